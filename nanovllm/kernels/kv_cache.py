"""A step's keys and values into the paged cache."""
import torch
import triton
import triton.language as tl


@triton.jit
def _store_kvcache_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, k_stride, v_stride, N: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        col = tl.arange(0, BLOCK)
        mask = col < N
        tl.store(k_cache_ptr + slot * N + col, tl.load(k_ptr + token * k_stride + col, mask), mask)
        tl.store(v_cache_ptr + slot * N + col, tl.load(v_ptr + token * v_stride + col, mask), mask)


def store_kvcache(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """k and v [T, kv_heads, head_dim], each token contiguous, go to slot_mapping [T] of the caches; -1 goes nowhere."""
    num_tokens, kv_heads, head_dim = k.shape
    n = kv_heads * head_dim
    if num_tokens:
        _store_kvcache_kernel[(num_tokens,)](
            k, v, k_cache, v_cache, slot_mapping, k.stride(0), v.stride(0), N=n, BLOCK=triton.next_power_of_2(n)
        )
