"""Layers that follow each other, in one kernel where there is one row."""
import torch

from nanovllm.kernels import triton_ops
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear


def norm_linear(
    norm: RMSNorm, proj: MergedColumnParallelLinear, x: torch.Tensor, residual: torch.Tensor | None,
    act: SiluAndMul | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """act(proj(norm(x + residual))), and x + residual, which may take the residual's place."""
    ops = triton_ops(x) if proj.bias is None else None
    if ops is not None and len(x) == 1:
        return ops.one_row_linear(x, proj.weight, norm.weight, norm.eps, residual, gated=act is not None)
    x, residual = (norm(x), x) if residual is None else norm(x, residual)
    x = proj(x)
    return x if act is None else act(x), residual
