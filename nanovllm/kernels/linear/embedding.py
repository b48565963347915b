"""Looks up embeddings on a rank, which stores the embeddings of a range of token ids."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch.dependent_launch import launch_ordinary, next_power_of_2


@triton.jit
def _embed_shard_kernel(ids_ptr, weight_ptr, out_ptr, first_id, num_ids, N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, next_power_of_2(N))
    at = tl.load(ids_ptr + row).to(tl.int64) - first_id
    width = tl.where((at >= 0) & (at < num_ids), N, 0)
    tl.store(out_ptr + row * N + col, tl.load(weight_ptr + at * N + col, col < width, 0.0), col < N)


def embed_shard(token_ids: torch.Tensor, weight: torch.Tensor, first_id: int, out: torch.Tensor | None = None):
    """Fill `out` [T, N] with the embeddings of tokens. Tokens whose embeddings are on other ranks get zeros.

    Row 0 of the weight [ids, N] is the embedding of token `first_id`. The launch of this kernel must be ordinary:
    before its wait, attention reads the result of the preceding rope lookup (see dependent_launch.py).
    """
    if out is None:
        return NotImplemented
    num_ids, n = weight.shape
    launch_ordinary(_embed_shard_kernel, (len(token_ids),))(token_ids, weight, out, first_id, num_ids, N=n)
    return out
