"""Rotary position embedding in place."""
import torch
import triton
import triton.language as tl


@triton.jit
def _rotate_kernel(x_ptr, cos_sin_ptr, num_rows, heads, HALF: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # a head of a token
    col = tl.arange(0, HALF)[None, :]
    mask = (row < num_rows)[:, None] & (col < HALF)
    cos_sin = cos_sin_ptr + (row // heads)[:, None].to(tl.int64) * (2 * HALF) + col
    cos = tl.load(cos_sin, mask, 0.0)
    sin = tl.load(cos_sin + HALF, mask, 0.0)
    x = x_ptr + row[:, None].to(tl.int64) * (2 * HALF) + col
    x1 = tl.load(x, mask, 0.0).to(tl.float32)
    x2 = tl.load(x + HALF, mask, 0.0).to(tl.float32)
    tl.store(x, x1 * cos - x2 * sin, mask)
    tl.store(x + HALF, x2 * cos + x1 * sin, mask)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim], contiguous, is turned in place and returned; head_dim is a power of two.

    cos_sin [T, head_dim] float32, cosines first.
    """
    num_tokens, heads, head_dim = x.shape
    rows = max(1, 2048 // head_dim)
    if num_rows := num_tokens * heads:
        _rotate_kernel[(triton.cdiv(num_rows, rows),)](
            x, cos_sin, num_rows, heads, HALF=head_dim // 2, ROWS=rows
        )
    return x
