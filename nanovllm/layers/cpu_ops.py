"""CPU versions of a few operations, which are faster than the PyTorch definitions."""

import torch
import torch.nn.functional as F

from nanovllm.layers import sampler


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Pad 16-bit inputs to one of a few row counts, because oneDNN compiles about 0.5 MiB of code for each count."""
    rows = x.reshape(-1, x.shape[-1])
    num_padding = 0 if x.dtype is torch.float32 else padded_rows(len(rows)) - len(rows)
    if not num_padding:
        return NotImplemented
    return F.linear(F.pad(rows, (0, 0, 0, num_padding)), weight, bias)[: len(rows)].view(*x.shape[:-1], len(weight))


def padded_rows(num_rows: int) -> int:
    """Round up to a multiple of 8 (from 65 rows on), of 16 (from 129 rows on), and so on, up to multiples of 256."""
    step = 1 if num_rows <= 64 else min(256, 1 << ((num_rows - 1).bit_length() - 4))
    return -(-num_rows // step) * step


def attend_one_token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, spec):
    """With AMX, compute pairs of bfloat16 heads one by one, which takes 0.4 to 0.7 times as long as together."""
    has_amx_pairs = q.shape[2] == 2 and q.dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    if spec.is_special or not has_amx_pairs:
        return NotImplemented
    heads, k, v = q.flatten(1, 2).unsqueeze(2), k.transpose(1, 2), v.transpose(1, 2)  # [n, heads, queries, head_dim]
    options = dict(attn_mask=mask, scale=spec.scale, enable_gqa=True)
    return F.scaled_dot_product_attention(heads, k, v, **options).reshape(q.shape)


def philox(c0, c1, c2, c3, k0, k1, rounds: int = sampler.PHILOX_ROUNDS) -> tuple[torch.Tensor, ...]:
    """Compute Philox in NumPy, which takes a third of PyTorch's time with hundreds of counters."""
    words = (word.numpy() for word in (c0, c1, c2, c3, k0, k1))
    return tuple(map(torch.as_tensor, sampler.philox.__wrapped__(*words, rounds)))  # the definition
