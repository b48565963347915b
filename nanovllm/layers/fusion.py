"""Layers that follow each other, in one kernel where there is one row."""

import torch

from nanovllm.distributed.peer_memory import PeerSum
from nanovllm.kernels import triton_ops
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear


def norm_linear(
    norm: RMSNorm,
    proj: MergedColumnParallelLinear,
    x: torch.Tensor | PeerSum,
    residual: torch.Tensor | None,
    act: SiluAndMul | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """act(proj(norm(x + residual))), and x + residual, which may take the residual's place."""
    ops = triton_ops(proj.weight) if proj.bias is None and len(x) == 1 else None
    if ops is not None and not isinstance(x, PeerSum):
        return ops.gemv(x, proj.weight, norm.weight, norm.eps, residual, gated=act is not None)
    x, residual = (norm(x), x) if residual is None and not isinstance(x, PeerSum) else norm(x, residual)
    if ops is not None:
        return ops.gemv(x, proj.weight, gated=act is not None)[0], residual
    x = proj(x)
    return x if act is None else act(x), residual
