"""RMS norm kernels.

The kernels can add split-K summands and a residual before the norm, and can quantize the norm's result. The sum of the
summands may have a norm of its own, which is applied before the residual is added.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.linear.quantize_rows import Groups, empty_rows, outputs_of, positions_of, store_groups
from nanovllm.kernels.linear.tiles import QuantizedRows

NO_OWN_NORM = None, None  # weight and factor


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
    weight = tl.load(weight_ptr + col, inside, 0.0).to(tl.float32) if weight_ptr is not None else 1.0
    if own_weight_ptr is not None:
        own_weight = tl.load(own_weight_ptr + col, inside, 0.0).to(tl.float32)
    if own_weight_ptr is not None or factor_ptr is not None:
        factor = tl.load(factor_ptr).to(tl.float32) if factor_ptr is not None else 1.0
    gdc_wait(PDL)
    x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
    for part in tl.static_range(1, SPLIT_K):
        x += tl.load(x_ptr + (part * num_rows + row) * GROUPS.n + col, inside, 0.0).to(tl.float32)
    if residual_ptr is not None:
        DTYPE: tl.constexpr = residual_ptr.dtype.element_ty
        residual = tl.load(residual_ptr + at, inside, 0.0).to(tl.float32)
        if own_weight_ptr is not None:
            x *= tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / GROUPS.n + eps) * own_weight
        if own_weight_ptr is not None or factor_ptr is not None:  # rounded as in separate kernels
            x = (x.to(DTYPE).to(tl.float32) * factor).to(DTYPE).to(tl.float32)
        total = (x + residual).to(DTYPE)
        tl.store(residual_ptr + at, total, inside)
        x = total.to(tl.float32)
    if weight_ptr is not None:
        x *= tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / GROUPS.n + eps) * weight
        store_groups(x, out_ptrs, row, 0, stride, GROUPS)


def _store_norm(
    x, weight, eps, residual, split_k: int, group: int, outputs: tuple, scale_stride: int, own_norm: tuple
) -> None:
    num_rows, n = x.shape[-2:]
    assert residual is not None or own_norm == NO_OWN_NORM
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
    own_norm: tuple[torch.Tensor | None, torch.Tensor | None] = NO_OWN_NORM,
) -> torch.Tensor:
    """Return the RMS norm of x + residual, and store this sum in `residual`.

    x, the residual and the result are [T, N] and contiguous. Without a residual, only x is normalized. If `split_k` >
    1, x is [split_k, T, N], and is summed over the first dimension.

    `own_norm` is (weight [N], factor [1]). The weight and the factor may be None. Before the residual is added, x is
    normalized if there is a weight, and then multiplied by the factor, if any.
    """
    out = torch.empty(x.shape[-2:], dtype=x.dtype, device=x.device)
    _store_norm(x, weight, eps, residual, split_k, x.shape[-1], (out, None), 0, own_norm)
    return out


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    split_k: int,
    group: int,
    own_norm: tuple[torch.Tensor | None, torch.Tensor | None] = NO_OWN_NORM,
) -> QuantizedRows:
    """Compute `rms_norm`, and quantize the result. There is one scale per `group` elements of a row."""
    rows = empty_rows(*x.shape[-2:], group, x)
    _store_norm(x, weight, eps, residual, split_k, group, *outputs_of(rows), own_norm)
    return rows


def add_normed(x, residual: torch.Tensor) -> torch.Tensor:
    """Add the NormedSum x [T, N] to `residual` in place, and return `residual`."""
    parts, (own_weight, eps, factor) = x.total.parts, x.norm
    if x.total.barrier is not None:
        return NotImplemented
    _store_norm(parts, None, eps, residual, x.total.split_k, parts.shape[-1], (None, None), 0, (own_weight, factor))
    return residual


@dependent_kernel(early=("weight_ptrs",))
@triton.jit
def _norm_columns_kernel(x_ptr, weight_ptrs, eps, stride, SIZES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    # A program normalizes one of two groups of columns in one row.
    gdc_launch_dependents(PDL)
    weight_ptr, second_ptr = weight_ptrs
    first, size = 0, SIZES[0]
    if tl.program_id(1) == 1:
        weight_ptr, first, size = second_ptr, SIZES[0], SIZES[1]
    col = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + col, col < size, 0.0).to(tl.float32)
    gdc_wait(PDL)
    at = x_ptr + tl.program_id(0).to(tl.int64) * stride + first + col
    x = tl.load(at, col < size, 0.0).to(tl.float32)
    tl.store(at, x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * weight, col < size)


def norm_columns(x: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], eps: float) -> torch.Tensor:
    """In x [T, N], normalize the first `len(weights[0])` columns and the next `len(weights[1])` columns in place.

    Return x.
    """
    sizes = tuple(map(len, weights))
    if len(x):
        block = 1 << (max(sizes) - 1).bit_length()
        launch(_norm_columns_kernel, (len(x), 2), x.device)(
            x, weights, eps, x.stride(0), SIZES=sizes, BLOCK=block, num_warps=4 if block <= 2048 else 8
        )
    return x


@dependent_kernel()
@triton.jit
def _norm_heads_kernel(
    x_ptr, eps, stride, FIRST: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr
):
    # A program normalizes COUNT heads of one token, from head FIRST on.
    gdc_launch_dependents(PDL)
    HEADS: tl.constexpr = triton.next_power_of_2(COUNT)
    head = tl.arange(0, HEADS)[:, None]
    at = x_ptr + tl.program_id(0).to(tl.int64) * stride + (FIRST + head) * SIZE + tl.arange(0, SIZE)[None, :]
    gdc_wait(PDL)
    x = tl.load(at, head < COUNT, 0.0).to(tl.float32)
    tl.store(at, x * tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None], head < COUNT)


def norm_heads(x: torch.Tensor, count: int, eps: float) -> torch.Tensor:
    """Normalize the last `count` heads of x [T, heads, head_dim] in place, without a weight, and return x.

    `head_dim` is a power of two.
    """
    num_rows, heads, size = x.shape
    if num_rows:
        constants = dict(FIRST=heads - count, COUNT=count, SIZE=size, num_warps=4 if count * size <= 4096 else 8)
        launch(_norm_heads_kernel, (num_rows,), x.device)(x, eps, x.stride(0), **constants)
    return x
