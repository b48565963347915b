"""Replaces CUDA operations whose results depend on the number of rows."""

from functools import partial

import torch

from nanovllm.delta_net.kernels import delta_net_tokens
from nanovllm.delta_net.kernels.delta_net_tokens import NUM_WARPS, delta_net_chunks
from nanovllm.features.logprobs import divided
from nanovllm.invariant.kernels.invariant_decode import decode_attention
from nanovllm.invariant.kernels.invariant_gemm import invariant_product
from nanovllm.invariant.kernels.invariant_prefill import prefill_attention, query_tile_size
from nanovllm.kernels.sampling.gather_logprobs import log_sums_and_ranks
from nanovllm.moe.kernels.mix_experts import choose_experts as choose_experts_by
from nanovllm.moe.kernels.mix_experts import mix_by_gemm, sum_by_gemm
from nanovllm.moe.kernels.packed_experts import grouped_packed_experts
from nanovllm.quantization.kernels.multiply_scaled import suits_scaled_gemm
from nanovllm.quantization.kernels.packed_gemm import LARGE_TILE_M, packed_gemm, packed_tiles

__all__ = ["decode_attention", "delta_net_chunks", "prefill_attention", "query_tile_size"]


delta_net_step = partial(delta_net_tokens.delta_net_step, num_warps=NUM_WARPS)
delta_net_drafts = partial(delta_net_tokens.delta_net_drafts, num_warps=NUM_WARPS)


def fuses_qk_norm_rope(batch_size, kv_heads, device):
    return False


def qkv_norm_rope_store(x, layer, qk_norm_rope, slot_mapping, cache):
    return NotImplemented


def linear(x, weight, bias=None):
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # a learner may pass a tensor with other dimensions
    return invariant_product(rows, weight, bias).view(*x.shape[:-1], len(weight))


def split_linear(x, weight, bias=None, split_k=1, out=None):
    return invariant_product(x, weight, bias, None if out is None else out[0])


def gate_scores(x, weight):
    return invariant_product(x, weight)


def norm_linear(x, weight, bias=None, act=None):
    return NotImplemented


def best_split_k(x, weight, max_split_k):
    return 1


def scaled_linear(x, values, scales, bias=None, act=None, split_k=1, out=None):
    if not suits_scaled_gemm(values, scales):
        return NotImplemented
    y = invariant_product(x, (values, scales), bias, None if out is None else out[0])
    return y if act is None else act(y)


def packed_linear(x, weight, bias=None, act=None, split_k=1, out=None):
    if len(x) == 0:
        return NotImplemented
    tiles = packed_tiles(LARGE_TILE_M)  # the same for any number of rows
    y = packed_gemm(x.contiguous(), weight, 1, out, tiles)[0]
    if bias is not None:
        y += bias
    return y if act is None else act(y)


def best_packed_split_k(x, weight, max_split_k):
    return 1


def best_scaled_split_k(values, scales, num_rows, max_split_k, max_rows=None):
    return 1


def mix_experts(x, layer, slot_mapping):
    if len(x) == 0:
        return NotImplemented
    return mix_by_gemm(x, layer, slot_mapping, _router_logits, grouped_packed_experts)


def choose_experts(x, weight, top_k, factors, slot_mapping):
    return choose_experts_by(x, weight, top_k, factors, slot_mapping, _router_logits)


def sum_experts(x, experts, weights, expert_ids):
    return sum_by_gemm(x, experts, weights, expert_ids, grouped_packed_experts) if len(x) else NotImplemented


def _router_logits(x, weight):
    return invariant_product(x, weight, out=x.new_empty(len(x), len(weight), dtype=torch.float32))[None]


def token_logprobs(logits, token_ids, temperatures=None):
    logits = divided(logits, temperatures)
    log_sums, ranks = log_sums_and_ranks(logits, token_ids)
    return logits.gather(1, token_ids.unsqueeze(1).long()).squeeze(1) - log_sums, ranks


def gather_logprobs(logits, ids):
    """Compute log-probabilities of several tokens per row, with the same results as `token_logprobs`."""
    return logits.gather(1, ids) - log_sums_and_ranks(logits, ids[:, 0])[0].unsqueeze(1)
