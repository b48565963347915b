"""All between the qkv product and attention in one pass: q and k norm, rotary embedding, store into the cache."""
import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, launch


@triton.jit
def _norm_rope_store_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, slot_mapping_ptr, q_ptr, k_cache_ptr, v_cache_ptr, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, HALF)[None, :]
    is_q = head < HEADS
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    stored = slot + 0 * head >= 0
    is_k = stored & (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = stored & (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)

    weight1 = tl.where(is_q, tl.load(q_weight_ptr + col), tl.load(k_weight_ptr + col)).to(tl.float32)
    weight2 = tl.where(is_q, tl.load(q_weight_ptr + HALF + col), tl.load(k_weight_ptr + HALF + col)).to(tl.float32)
    if PDL:
        gdc_wait()
    x = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head) * (2 * HALF) + col
    x1 = tl.load(x, is_q | is_k | is_v, 0.0).to(tl.float32)
    x2 = tl.load(x + HALF, is_q | is_k | is_v, 0.0).to(tl.float32)
    norm = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / (2 * HALF) + eps)[:, None]
    y1 = x1 * norm * weight1
    y2 = x2 * norm * weight2
    cos = tl.load(cos_sin_ptr + token * (4 * HALF) + col)
    sin = tl.load(cos_sin_ptr + token * (4 * HALF) + 3 * HALF + col)
    z1 = y1 * cos - y2 * sin
    z2 = y2 * cos + y1 * sin

    q = q_ptr + (token * HEADS + head) * (2 * HALF) + col
    tl.store(q, z1, is_q)
    tl.store(q + HALF, z2, is_q)
    k = k_cache_ptr + (slot * KV_HEADS + head - HEADS) * (2 * HALF) + col
    tl.store(k, z1, is_k)
    tl.store(k + HALF, z2, is_k)
    v = v_cache_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS) * (2 * HALF) + col
    tl.store(v, x1, is_v)
    tl.store(v + HALF, x2, is_v)


def norm_rope_store(
    qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """qkv [T, heads + 2 kv_heads, head_dim], contiguous -> normed and turned queries [T, heads, head_dim].

    Normed and turned keys, and values, go to slot_mapping [T] of the caches [blocks, block_size, kv_heads, head_dim];
    -1 goes nowhere. Weights [head_dim]; cos_sin [T, 2, head_dim] float32: cosines, and sines that are negated in their
    first half. head_dim is a power of two.
    """
    num_tokens, total, head_dim = qkv.shape
    kv_heads = k_cache.shape[2]
    heads = total - 2 * kv_heads
    q = torch.empty((num_tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        rows = 16
        launch(_norm_rope_store_kernel, (num_tokens, triton.cdiv(total, rows)), qkv.device)(
            qkv, q_weight, k_weight, cos_sin, slot_mapping, q, k_cache, v_cache, eps,
            HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2, ROWS=rows, num_warps=4 if num_tokens < 1024 else 2,
        )  # fmt: skip
    return q
