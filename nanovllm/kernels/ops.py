"""The table of operations for CUDA. Importing this module requires Triton.

A function with the name of an operation replaces the operation's definition. A replacement returns `NotImplemented` if
no kernel is faster than the definition. Functions with other names are helpers, or are called by CUDA code.
"""

import torch

from nanovllm.delta_net.kernels.delta_net_chunks import delta_net_chunks
from nanovllm.delta_net.kernels.delta_net_tokens import delta_net_drafts, delta_net_step
from nanovllm.distributed.kernels.peers import all_reduce_max, gather_columns, sum_rms_norm
from nanovllm.kernels.activations import activation_of
from nanovllm.kernels.attention.decode_attention import decode_attention, fuses_qk_norm_rope
from nanovllm.kernels.attention.norm_rope_store import norm_rope_and_store
from nanovllm.kernels.attention.prefill_attention import prefill_attention, query_tile_size
from nanovllm.kernels.hopper.hopper_tiles import qkv_norm_rope_store, quantized_linear
from nanovllm.kernels.launch.host_copies import copy_from_host, copy_to_host
from nanovllm.kernels.linear.add_rms_norm import NO_OWN_NORM, add_normed, norm_columns, norm_heads, rms_norm_quantize
from nanovllm.kernels.linear.add_rms_norm import rms_norm as add_and_norm
from nanovllm.kernels.linear.embedding import embed_shard
from nanovllm.kernels.linear.gated_activations import (
    gated_activation,
    gated_linear,
    gelu_and_mul,
    sigmoid_gate,
    silu_and_mul,
)
from nanovllm.kernels.linear.gemv import gemv
from nanovllm.kernels.linear.quantize_rows import quantize_rows, silu_and_mul_quantize
from nanovllm.kernels.linear.split_k_gemm import choose_split_k, split_k_gemm
from nanovllm.kernels.linear.tiles import SWIGLU_GROUP, QuantizedRows
from nanovllm.kernels.sampling.filters import logit_cutoffs
from nanovllm.kernels.sampling.gather_logprobs import token_logprobs
from nanovllm.kernels.sampling.penalties import penalize
from nanovllm.kernels.sampling.place_decodes import accept, place_chains, place_decodes
from nanovllm.kernels.sampling.sampling import sample
from nanovllm.lora.kernels.lora_gemm import adapted_linear, add_lora, group_rows
from nanovllm.moe.kernels.mix_experts import choose_experts, expert_linear, mix_experts, sum_experts
from nanovllm.quantization.kernels.dequantize import dequantize
from nanovllm.quantization.kernels.multiply_scaled import (
    best_scaled_split_k,
    min_block_columns,
    scaled_linear,
    swiglu_quantize,
)
from nanovllm.quantization.kernels.packed_gemm import best_packed_split_k, dequantize_packed, packed_linear
from nanovllm.vision.kernels.add_layer_norm import add_layer_norm
from nanovllm.vision.kernels.linear_gelu import linear_gelu
from nanovllm.vision.kernels.patch_attention import patch_attention
from nanovllm.vision.kernels.rotate_patches import rotate_patches

TINY_WEIGHTS, TINY_SPLIT_K = 2**20, 16  # splitting K of a small GEMM saves time, although the summands must be added


def linear(x, weight, bias=None):
    return split_linear(x, weight, bias)


def split_linear(x, weight, bias=None, split_k=1, out=None):
    if x.dim() != 2:  # only in a learner's call of a layer
        return NotImplemented
    x = x.contiguous()  # no copy, except in a learner's call
    if len(x) == 1:
        return gemv(x, weight, bias=bias, out=None if out is None else out[0])[0]
    if bias is None and split_k > 1:
        return split_k_gemm(x, weight, split_k, out)
    max_split_k = TINY_SPLIT_K if out is None and weight.numel() <= TINY_WEIGHTS else 1
    if bias is None and (split_k := choose_split_k(x, weight, max_split_k)):
        parts = split_k_gemm(x, weight, split_k, out)
        return parts[0] if split_k == 1 else parts.sum(0)
    # cuBLAS is at least as fast, or there is a bias, which only cuBLAS adds
    return NotImplemented


def norm_linear(x, weight, bias=None, act=None):
    """Compute norm, matmul and activation in one kernel, if x is a single row and not an unfinished sum.

    For several rows, a separate kernel computes the norm. For many rows on Hopper, one kernel computes matmul and
    activation.
    """
    activation = activation_of(act)
    if len(x) != 1:
        return NotImplemented if act is None or bias is not None else gated_linear(x.tensor(), weight, activation)
    if (summands := x.summands()) is None:
        return gemv(x.tensor(), weight, act=activation, bias=bias)[0]
    row, residual = summands
    y, x.total = gemv(row, weight, (x.weight, x.eps), residual, activation, bias)
    return y


def best_split_k(x, weight, max_split_k):
    return max(1, choose_split_k(x, weight, max_split_k)) if len(x) > 1 else 1


def own_norm_of(x, residual, eps):
    """Split the argument x of `add_rms_norm` into a PartialSum and the kernel's argument `own_norm`."""
    if x.norm is None:
        return x, NO_OWN_NORM
    own_weight, own_eps, factor = x.norm
    if residual is None or x.total.barrier is not None or (own_weight is not None and own_eps != eps):
        return x.finish(), NO_OWN_NORM
    return x.total, (own_weight, factor)


def add_rms_norm(x, residual, weight, eps):
    x, own_norm = own_norm_of(x, residual, eps)
    if x.barrier is not None:
        return sum_rms_norm(x.parts, x.barrier, weight, eps, residual)
    if residual is None:
        total = x.reduce()
        return add_and_norm(total, weight, eps), total
    return add_and_norm(x.parts, weight, eps, residual, x.split_k, own_norm), residual


def rms_norm(x, weight, eps):
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # x may contain heads, a view of qkv
    return add_and_norm(rows, weight, eps).view(x.shape)


def store_kvcache(k, v, cache, slot_mapping):
    """Store keys and values with `norm_rope_and_store`, without norms and without rotation (angles of 0)."""
    cos = torch.ones(len(k), 1, 2, dtype=torch.float32, device=k.device)
    cos_sin = torch.cat((cos, 0 * cos), 1)  # the kernel may read it early: the next torch.cat is an ordinary launch
    norm_rope_and_store(torch.cat((k, v), 1), (None, None, 0.0, cos_sin), slot_mapping, cache)
