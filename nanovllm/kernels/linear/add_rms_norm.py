"""RMS norm kernels.

The kernels can add split-K summands and a residual before the norm, and can quantize the norm's result. Before the
residual is added, a separate norm may be applied to the sum of the summands.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.linear.quantize_rows import Groups, empty_rows, outputs_of, positions_of, store_groups
from nanovllm.kernels.linear.tiles import QuantizedRows


@dependent_kernel(early=("weight_ptrs",))
@triton.jit(do_not_specialize=["num_rows", "stride"])
def _rms_norm_kernel(
    x_ptrs, weight_ptrs, out_ptrs, num_rows, eps, stride, GROUPS: tl.constexpr, SPLIT_K: tl.constexpr, PDL: tl.constexpr
):
    # A program computes one whole row. A tile is [groups, elements per group].
    gdc_launch_dependents(PDL)
    x_ptr, residual_ptr = x_ptrs
    weight_ptr, own_weight_ptr, factor_ptr = weight_ptrs
    row = tl.program_id(0).to(tl.int64)
    col, inside = positions_of(0, GROUPS)
    at = row * GROUPS.n + col
    weight = tl.load(weight_ptr + col, inside, 0.0).to(tl.float32)
    if own_weight_ptr is not None:
        own_weight = tl.load(own_weight_ptr + col, inside, 0.0).to(tl.float32)
        factor = tl.load(factor_ptr).to(tl.float32) if factor_ptr is not None else 1.0
    gdc_wait(PDL)
    x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
    for part in tl.static_range(1, SPLIT_K):
        x += tl.load(x_ptr + (part * num_rows + row) * GROUPS.n + col, inside, 0.0).to(tl.float32)
    if residual_ptr is not None:
        DTYPE: tl.constexpr = residual_ptr.dtype.element_ty
        residual = tl.load(residual_ptr + at, inside, 0.0).to(tl.float32)
        if own_weight_ptr is not None:  # rounded as in separate kernels
            x *= tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / GROUPS.n + eps) * own_weight
            x = (x.to(DTYPE).to(tl.float32) * factor).to(DTYPE).to(tl.float32)
        total = (x + residual).to(DTYPE)
        tl.store(residual_ptr + at, total, inside)
        x = total.to(tl.float32)
    x *= tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / GROUPS.n + eps) * weight
    store_groups(x, out_ptrs, row, 0, stride, GROUPS)


def _store_norm(
    x, weight, eps, residual, split_k: int, group: int, outputs: tuple, scale_stride: int, own_norm=(None, None)
) -> None:
    num_rows, n = x.shape[-2:]
    if num_rows:
        width, count = 1 << (group - 1).bit_length(), 1 << (n // group - 1).bit_length()
        constants = dict(GROUPS=Groups(n, group, count, width), num_warps=4 if count * width <= 2048 else 8)
        launch(_rms_norm_kernel, (num_rows,), x.device)(
            (x, residual), (weight, *own_norm), outputs, num_rows, eps, scale_stride, SPLIT_K=split_k, **constants
        )


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    split_k: int = 1,
    own_norm: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """Return the RMS norm of x + residual, and store this sum in `residual`.

    x, the residual and the result are [T, N] and contiguous. Without a residual, normalize x. With `split_k` > 1, x is
    [split_k, T, N], to be summed over the first dimension.

    `own_norm` is (weight [N], factor [1]). If it is given, the norm of x with this weight, times the factor, replaces x
    before the residual is added.
    """
    out = torch.empty(x.shape[-2:], dtype=x.dtype, device=x.device)
    _store_norm(x, weight, eps, residual, split_k, x.shape[-1], (out, None), 0, own_norm)
    return out


def rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, split_k: int, group: int
) -> QuantizedRows:
    """Compute `rms_norm` and quantize the result, with one scale per `group` elements of a row."""
    rows = empty_rows(*x.shape[-2:], group, x)
    _store_norm(x, weight, eps, residual, split_k, group, *outputs_of(rows))
    return rows
