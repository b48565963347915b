"""Norm, projection and activation, which follow each other in every block: a single row takes one or two kernels."""

from types import ModuleType

import torch

from nanovllm.kernels import triton_ops
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.partial_sum import PartialSum


def norm_linear(
    norm: RMSNorm,
    proj: LinearBase,
    x: PartialSum,
    residual: torch.Tensor | None,
    act: SiluAndMul | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """act(proj(norm(x + residual))), and x + residual, which may overwrite the residual."""
    if len(x) == 1 and (ops := triton_ops(proj.weight)) is not None:
        return _norm_linear_of_one_row(ops, norm, proj, x, residual, act)
    normed, residual = proj.format.add_rms_norm(norm, x, residual)
    y = proj(normed)
    return y if act is None else act(y), residual


def _norm_linear_of_one_row(
    ops: ModuleType,
    norm: RMSNorm,
    proj: LinearBase,
    x: PartialSum,
    residual: torch.Tensor | None,
    act: SiluAndMul | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    gemv, gated = proj.format.gemv, act is not None
    if (summed := x.tensor) is not None:
        return gemv(ops, proj, summed, norm.weight, norm.eps, residual, gated)
    normed, residual = norm.add_rms_norm(x, residual)
    return gemv(ops, proj, normed, gated=gated)[0], residual
