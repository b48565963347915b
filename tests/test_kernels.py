"""Each Triton kernel against plain PyTorch: on the CUDA device, or in Triton's interpreter where there is none."""

import importlib
import sys
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import (
    CUDA,
    DEVICE,
    DTYPES,
    NAN,
    TOLERANCE,
    assert_close,
    each_dtype,
    each_dtype_or_half,
    noise_of_rows,
    pairs,
    randn,
)

triton = pytest.importorskip("triton")
import triton.language as tl

from nanovllm.attention.triton import query_tiles
from nanovllm.cache.kv_cache import AttentionSpec, KVCache
from nanovllm.distributed.kernels import peers
from nanovllm.distributed.kernels.peers import PeerBarrier
from nanovllm.fused import fuse
from nanovllm.fused.norm_input import NormedSum, NormInput
from nanovllm.kernels import hopper, ops
from nanovllm.kernels.activations import GELU_AND_MUL, SWIGLU, Activation, activation_of
from nanovllm.kernels.attention import decode_attention, prefill_attention
from nanovllm.kernels.attention.decode_attention import TILE
from nanovllm.kernels.attention.split_sequence import MAX_SPLITS, choose_num_splits
from nanovllm.kernels.hopper import hopper_tiles
from nanovllm.kernels.launch.gpu_features import has_tma, num_sms
from nanovllm.kernels.linear.add_rms_norm import rms_norm
from nanovllm.kernels.linear.gated_activations import gated_activation
from nanovllm.kernels.linear.split_k_gemm import (
    FEW_WEIGHTS,
    LONE_BYTES,
    MAX_ROWS,
    TILE_K,
    TILE_N,
    scaled_tiles,
    tile_m_of,
)
from nanovllm.kernels.sampling import sampling
from nanovllm.kernels.sampling.sampling import _gumbel
from nanovllm.kernels.sampling.sampling_columns import PHILOX_ROUNDS, WIDTH, column
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.gated_activation import GeluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import QKVParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.sampler import philox
from nanovllm.utils.construction import constructing
from nanovllm.utils.partial_sum import PartialSum
from nanovllm.utils.tensor_parallel import TensorParallel

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


def int32(values) -> torch.Tensor:
    return torch.as_tensor(values).to(DEVICE, torch.int32)


def inside(x: torch.Tensor, around: float = NAN) -> torch.Tensor:
    """x as a part, along dimension 1, of a tensor with `around` to both sides, the way q is a part of qkv."""
    part = x.new_full((x.shape[0], x.shape[1] + 5, *x.shape[2:]), around)[:, 2:-3]
    return part.copy_(x)


# --- attention

# group: query heads to a key-value head. Block sizes below, above and at odds with the kernels' tiles of keys
HEADS = [  # group, kv_heads, head_dim, block_size
    (1, 2, 128, 256),
    (2, 1, 64, 16),
    (3, 2, 32, 48),
    (5, 1, 128, 64),
    (7, 1, 64, 32),
    (8, 2, 64, 32),
    (16, 1, 32, 256),
]
each_heads = pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "g{}-kv{}-d{}-b{}".format(*heads))
# stale keys and values, finite as an engine has them, and NaN, of which nothing at all may come through
each_stale = pytest.mark.parametrize("stale", [1e4, NAN] if CUDA else [NAN])


def paged(lengths: list[int], kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, stale: float):
    """Sequences' keys and values, and the caches with them in shuffled blocks behind block tables.

    Every other slot is stale, and every other entry of the tables is the number of a stale block.
    """
    blocks = [-(-length // block_size) for length in lengths]
    order = (torch.randperm(sum(blocks)) + 1).to(DEVICE, torch.int32)  # block 0 belongs to nobody
    tables = int32(torch.zeros(len(lengths), max(blocks) + 3))[:, :-1]
    shape = (sum(blocks) + 1, block_size, kv_heads, head_dim)
    caches = [torch.full(shape, stale, device=DEVICE).to(dtype) for _ in "kv"]
    contents = []
    for table, length, ids in zip(tables, lengths, order.split(blocks), strict=True):
        table[: len(ids)] = ids
        slots = (ids.long()[:, None] * block_size + torch.arange(block_size, device=DEVICE)).flatten()[:length]
        contents.append([randn(length, kv_heads, head_dim, dtype=dtype) for _ in "kv"])
        for cache, content in zip(caches, contents[-1], strict=True):
            cache.flatten(0, 1)[slots] = content
    return contents, cache_of(*caches), int32(lengths), tables


def cache_of(k: torch.Tensor, v: torch.Tensor, window: int | None = None) -> KVCache:
    cache = KVCache((k, v))
    cache.spec = AttentionSpec(window=window)
    return cache


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last len(q) queries of a sequence against its keys, causally, or the last `window` of them; or else zeros."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * (scale or q.shape[-1] ** -0.5)
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=DEVICE).tril(last := len(k) - len(q))
    if window is not None:
        seen = seen.triu(last + 1 - window)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


def forget(tables: torch.Tensor, num_before: list[int], window: int, block_size: int) -> None:
    """Let the blocks that no query sees be block 0, which is stale: none has a bound before num_before - window + 1."""
    for table, before in zip(tables, num_before, strict=True):
        table[: max(0, before + 1 - window) // block_size] = 0


def check_decode(lengths, heads, dtype, stale, splits, window=None, **scores):
    group, kv_heads, head_dim, block_size = heads
    contents, cache, context_lens, tables = paged(lengths, kv_heads, head_dim, block_size, dtype, stale)
    cache.spec = AttentionSpec(window=window, **scores)
    q = randn(len(lengths), group * kv_heads, head_dim, dtype=dtype)
    if window:
        forget(tables, [length - 1 for length in lengths], window, block_size)
    out = ops.decode_attention(q, cache, context_lens, tables, max(lengths), splits)
    parts = zip(q.split(1), contents, strict=True)
    expected = [attention_reference(part, k, v, window, **scores) for part, (k, v) in parts]
    assert_close(out, torch.cat(expected))
    assert not out[context_lens == 0].any()


def check_prefill(num_new, num_before, heads, dtype, stale, window=None, **scores):
    group, kv_heads, head_dim, block_size = heads
    lengths = [new + before for new, before in zip(num_new, num_before, strict=True)]
    contents, cache, context_lens, tables = paged(lengths, kv_heads, head_dim, block_size, dtype, stale)
    cache.spec = AttentionSpec(window=window, **scores)
    q = randn(sum(num_new), group * kv_heads, head_dim, dtype=dtype)
    cu_seqlens_q = F.pad(int32(num_new).cumsum(0, dtype=torch.int32), (1, 0))
    size = ops.query_tile_size(group, head_dim, dtype)
    chunks = [*zip(num_before, lengths, strict=True)]
    tiles = F.pad(torch.from_numpy(query_tiles(chunks, 0, size)), (0, 0, 0, 2), value=-1)
    if window:
        forget(tables, num_before, window, block_size)
    out = ops.prefill_attention(q, cache, cu_seqlens_q, context_lens, tables, int32(tiles))
    parts = zip(q.split(num_new), contents, strict=True)
    expected = [attention_reference(part, k, v, window, **scores) for part, (k, v) in parts]
    assert_close(out, torch.cat(expected))


@each_dtype_or_half
@pytest.mark.parametrize("heads, window", [((2, 2, 64, 64), None), ((3, 1, 32, 16), 21)])
def test_another_scale(heads, window, dtype):
    check_decode([70, 1, 33], heads, dtype, NAN, 2, window, scale=0.05)
    check_prefill([1, 40, 9], [0, 3, 130], heads, dtype, NAN, window, scale=0.05)


SCORES = [{"soft_cap": 1.5}, {"sinks": True}, {"soft_cap": 0.7, "sinks": True, "scale": 0.3}]
each_scores = pytest.mark.parametrize("scores", SCORES, ids=lambda scores: "-".join(scores))


def with_sinks(scores: dict, heads: tuple, dtype: torch.dtype) -> dict:
    """Draw a sink for each query head: some are larger than every score."""
    return scores | ({"sinks": 3 * randn(heads[0] * heads[1], dtype=dtype)} if scores.get("sinks") else {})


@each_dtype_or_half
@each_scores
@pytest.mark.parametrize("heads, window", [((2, 2, 64, 64), None), ((3, 1, 32, 16), 21)])
def test_soft_caps_and_sinks(heads, window, scores, dtype):
    scores = with_sinks(scores, heads, dtype)
    for splits in (1, 3):
        check_decode([70, 0, 1, 133], heads, dtype, NAN, splits, window, **scores)
    check_prefill([1, 40, 9], [0, 3, 130], heads, dtype, NAN, window, **scores)


@each_dtype_or_half
@each_scores
@pytest.mark.parametrize("splits", [1, 3])
def test_soft_caps_and_sinks_of_qkv(splits, scores, dtype):
    heads = (3, 2, 32, 16)
    check_decode_of_qkv([100, 65, 1], heads, splits, True, 37, dtype, **with_sinks(scores, heads, dtype))


@each_dtype_or_half
@each_heads
@each_stale
def test_decode_of_a_mixed_batch(heads, dtype, stale):
    block_size = heads[-1]
    splits = {16: 16, 32: 1, 48: 4, 64: 2, 256: None}[block_size]  # some have more splits than tiles
    check_decode([65, 0, 1, block_size - 1, block_size, block_size + 1, 130], heads, dtype, stale, splits)


WINDOWS = [1, 16, 63, 100, 5000]


@each_dtype_or_half
@pytest.mark.parametrize("window, case", pairs(WINDOWS, [(HEADS[2], 1), (HEADS[4], 3), (HEADS[0], 4)]))
def test_decode_of_a_window(window, case, dtype):
    heads, splits = case
    check_decode([130, 0, 1, 49, 64, 65, 300], heads, dtype, NAN, splits, window)


@pytest.mark.parametrize("splits, dtype", pairs([1, 7, 16], DTYPES))
def test_decode_of_4095_tokens(splits, dtype):
    check_decode([4095], (4, 1, 32, 256), dtype, NAN, splits)


NUM_IDS = decode_attention.NUM_IDS.value


@each_dtype_or_half
@pytest.mark.parametrize(
    "block_size, splits, lengths",
    [
        (16, 1, [700, NUM_IDS * 16 + 1, NUM_IDS * 16, 0]),
        (16, 5, [5 * NUM_IDS * 16 + 20, 700, 0, 65]),  # of the longest, all splits but the last load ids twice
        (48, 2, [2 * NUM_IDS * 48 + 64]),  # the second split begins amid a block, and loads ids twice
    ],
)
def test_decode_looks_up_chunks_of_blocks(block_size, splits, lengths, dtype):
    check_decode(lengths, (3, 1, 32, block_size), dtype, NAN, splits)


@each_dtype_or_half
@pytest.mark.parametrize(
    "case, window",
    pairs(
        [  # heads, splits, has_norm
            ((2, 2, 32, 16), 1, True),
            ((2, 2, 32, 16), 7, True),
            ((3, 1, 64, 48), 1, True),
            ((3, 1, 64, 48), 3, True),
            ((3, 1, 64, 48), 3, False),
            ((7, 1, 128, 32), 2, False),
            ((16, 1, 32, 256), 3, True),
            ((1, 3, 128, 32), 1, True),
            ((1, 3, 128, 32), 1, False),
            ((1, 3, 128, 32), 2, True),
            ((4, 1, 512, 64), 2, True),
        ],
        [None, 1, 37],
    ),
)
def test_decode_of_qkv(case, window, dtype):
    """It stores what `norm_rope_and_store` does, and attends to it; a slot of -1 stores nothing."""
    heads, splits, has_norm = case
    block_size = heads[3]
    check_decode_of_qkv([100, 65, 1, block_size, block_size + 1], heads, splits, has_norm, window, dtype)


@each_dtype_or_half
@pytest.mark.parametrize("length, splits", [(1, 2), (129, 1), (440, 3)])
@pytest.mark.parametrize("heads, window", [((2, 2, 32, 256), None), ((7, 1, 64, 128), 131), ((3, 1, 128, 384), 37)])
def test_decode_of_a_single_qkv(heads, window, length, splits, dtype):
    """A sequence alone gets other programs."""
    check_decode_of_qkv([length], heads, splits, True, window, dtype)


def check_decode_of_qkv(lengths, heads, splits, has_norm, window, dtype, **scores):
    """Several sequences stand beside one without keys, which is padding."""
    group, kv_heads, head_dim, block_size = heads
    padding = [0] * (len(lengths) > 1)
    _, cache, context_lens, tables = paged([*lengths, *padding], kv_heads, head_dim, block_size, dtype, NAN)
    other = cache_of(cache.k.clone(), cache.v.clone())
    cache.spec = AttentionSpec(window=window, **scores)
    last = context_lens.long() - 1
    slots = tables.gather(1, last.clamp(min=0)[:, None] // block_size)[:, 0] * block_size + last % block_size
    slots[context_lens == 0] = -1
    qkv = randn(len(slots), (group + 2) * kv_heads + 3, head_dim, dtype=dtype)[:, 3:]  # gates are in front
    rotary = head_dim // 4 if head_dim == 64 else head_dim
    inv_freq = 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    cos_sin = cos_sin_at(last.clamp(min=0).cpu(), inv_freq, 500)
    weights = [randn(head_dim, dtype=dtype) if has_norm else None for _ in "qk"]
    norm_rope, slots = (*weights, 1e-6, cos_sin), int32(slots)
    q = ops.norm_rope_and_store(qkv, norm_rope, slots, other)
    contents = [
        [x[table.long()].flatten(0, 1)[:length] for x in (other.k, other.v)] for table, length in zip(tables, lengths)
    ]
    expected = [attention_reference(part, k, v, window, **scores) for part, (k, v) in zip(q.split(1), contents)]
    args = qkv, cache, context_lens, tables, max(lengths), splits
    out = ops.decode_attention(*args, norm_rope_inputs=(*norm_rope, slots))
    assert out.isfinite().all()
    assert_close(out[: len(lengths)], torch.cat(expected))
    for ours, theirs in zip((cache.k, cache.v), (other.k, other.v)):
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)


def cos_sin_at(positions: torch.Tensor, inv_freq: torch.Tensor, max_position: int) -> torch.Tensor:
    """Scaled by 1.25: [T, 2, N], as kernels take it."""
    rotary_emb = RotaryEmbedding(tuple(inv_freq.tolist()), 1.25, max_position)
    fuse(rotary_emb)
    return rotary_emb.rows(positions).cos_sin.to(DEVICE)


@pytest.mark.parametrize("splits", [1, 4])
def test_decode_of_nothing_is_zero(splits):
    check_decode([0, 0], (2, 1, 32, 16), torch.float16, NAN, splits)


@pytest.mark.parametrize(
    "shape, case",
    pairs(
        [(5, (4, 2, 64, 16)), (2, (3, 1, 32, 128)), (4, (16, 1, 16, 32)), (5, (16, 1, 16, 32))],
        pairs(DTYPES, [(1, None), (4, None), (1, 30), (4, 30), (None, 100)]),
    ),
)
def test_decode_of_drafts(shape, case):
    """A sequence's rows see a key more than the row before, or are copies of it; the last shape is too many queries."""
    (k, (group, kv_heads, head_dim, block_size)), (dtype, (splits, window)) = shape, case
    lengths, copies = [k, 63 + k, 190, 66, 0, 128], [0, 1, k - 1, 0, 0, 0]
    contents, cache, _, tables = paged(lengths, kv_heads, head_dim, block_size, dtype, NAN)
    scores = with_sinks(SCORES[2], (group, kv_heads), dtype) if window else {}
    cache.spec = AttentionSpec(window=window, **scores)
    seen = [[max(0, length - max(0, k - 1 - copied - i)) for i in range(k)] for length, copied in zip(lengths, copies)]
    seen[4] = [0] * k
    if window:
        forget(tables, [first - 1 for first, *_ in seen], window, block_size)
    q = randn(len(lengths) * k, group * kv_heads, head_dim, dtype=dtype)
    args = (
        q,
        cache,
        int32([n for own in seen for n in own]),
        tables.repeat_interleave(k, 0),
        max(lengths),
        splits,
    )
    out = ops.decode_attention(*args, tokens_per_row=k)
    rows = [(keys[:n], values[:n]) for (keys, values), own in zip(contents, seen) for n in own]
    expected = [
        attention_reference(row, *of_row, window, **scores) for row, of_row in zip(q.split(1), rows, strict=True)
    ]
    assert_close(out, torch.cat(expected))
    fewer = torch.full_like(q, 7.0)
    ops.decode_attention(*args, num_seqs=int32([3 * k]), out=fewer, tokens_per_row=k)
    assert torch.equal(fewer[: 3 * k], out[: 3 * k]) and (fewer[3 * k :] == 7).all()


@pytest.mark.parametrize("splits, dtype", pairs([1, 3], DTYPES))
def test_a_step_of_decodes_and_chunks(splits, dtype):
    """As in a CUDA graph: the number of decodes is read on the device, and the bounds are larger than what is there."""
    group, kv_heads, head_dim, block_size = 2, 2, 32, 16
    num_new, lengths = [1, 1, 5, 70], [130, 40, 5, 90]
    contents, cache, context_lens, tables = paged(lengths, kv_heads, head_dim, block_size, dtype, NAN)
    q = randn(sum(num_new) + 3, group * kv_heads, head_dim, dtype=dtype)
    out = torch.full_like(q, 7.0)
    starts = F.pad(int32(num_new).cumsum(0, dtype=torch.int32), (1, 0))
    tiles = query_tiles([(0, 5), (20, 90)], 2, ops.query_tile_size(group, head_dim, dtype))
    assert tiles[0, 0] == 3 and tiles[-2:].tolist() == [[3, 0], [2, 0]]
    tiles = int32(F.pad(torch.from_numpy(tiles), (0, 0, 0, 2), value=-1))
    ops.prefill_attention(q, cache, starts, context_lens, tables, tiles, out)
    assert (out[:2] == 7).all() and (out[-3:] == 7).all()
    args = q[:4], cache, context_lens, tables, max(lengths), splits
    ops.decode_attention(*args, num_seqs=int32([2]), out=out[:4])
    parts = zip(q.split([*num_new, 3]), contents)
    assert_close(out[:-3], torch.cat([attention_reference(part, k, v) for part, (k, v) in parts]))
    assert (out[-3:] == 7).all()


@pytest.mark.parametrize("heads", [(5, 1, 64, 16), (2, 2, 256, 48)])
def test_prefill_of_the_tiles_for_hopper(heads, monkeypatch):
    """Several programs compute one; with a window none of them is Hopper's."""
    group, _, head_dim, _ = heads
    monkeypatch.setattr(prefill_attention, "has_hopper_kernels", lambda: False)
    tokens = ops.query_tile_size(group, head_dim, torch.float16)
    monkeypatch.setattr(prefill_attention, "has_hopper_kernels", lambda: True)
    assert 1 < ops.query_tile_size(group, head_dim, torch.float16) // tokens <= 128 // tokens
    check_prefill([150, 1, 30], [20, 40, 0], heads, torch.float16, NAN, window=90)


@pytest.mark.gpu
@pytest.mark.skipif(not prefill_attention.has_hopper_kernels(), reason="needs a Hopper GPU, and Triton 3.6")
@pytest.mark.parametrize("is_hopper", [True, False], ids=["hopper", "any"])
@pytest.mark.parametrize(
    "heads, dtype",
    pairs(
        [(2, 8, 128, 256), (8, 4, 128, 128), (5, 8, 128, 64), (14, 1, 64, 256), (7, 2, 64, 320), (8, 2, 256, 64)],
        [torch.bfloat16, torch.float16],
    ),
)
def test_prefill_by_either_kernel(heads, dtype, is_hopper, monkeypatch):
    """Fewer tiles than programs and more; tiles of which a part, or a warpgroup, has no tokens."""
    monkeypatch.setattr(prefill_attention, "has_hopper_kernels", lambda: is_hopper)
    num_new, num_before = [1, 5, 63, 64, 65, 127, 129, 300, 1001], [0, 3, 0, 200, 129, 1, 1000, 77, 513]
    for window in (None, 1, 100, 257, 5000):
        check_prefill(num_new, num_before, heads, dtype, NAN, window)
        check_prefill([70], [0], heads, dtype, NAN, window)


def test_number_of_splits():
    device = torch.device(DEVICE)
    for batch_size, kv_heads in ((1, 1), (1, 2), (3, 1), (2, 8), (1000, 1)):
        for length in (0, 1, TILE, TILE + 1, 7 * TILE, 10**6):
            splits = choose_num_splits(batch_size, kv_heads, length, TILE, device)
            most = num_sms(device) // kv_heads if batch_size == 1 else MAX_SPLITS
            assert 1 <= splits <= min(max(1, most), max(1, -(-length // TILE)))
    few, many = (choose_num_splits(batch_size, 1, 10**6, TILE, device) for batch_size in (2, 3000))
    assert few > many == 1


@each_dtype_or_half
@each_heads
@each_stale
def test_prefill_of_a_mixed_batch(heads, dtype, stale):
    """Whole prompts, last chunks of prompts, single tokens and a sequence that waits, at odds with every tile."""
    check_prefill([1, 63, 1, 0, 37, 65], [0, 0, 130, 40, 101, 22], heads, dtype, stale)


@each_dtype_or_half
@pytest.mark.parametrize("window, heads", pairs(WINDOWS, [HEADS[2], HEADS[5], HEADS[0]]))
def test_prefill_of_a_window(window, heads, dtype):
    check_prefill([1, 150, 1, 0, 37, 65], [0, 0, 130, 40, 301, 22], heads, dtype, NAN, window)


@each_dtype_or_half
@pytest.mark.parametrize("num_new, num_before", [(1, 4094), (77, 4018), (513, 3582), *CUDA * [(4095, 0)]])
def test_prefill_up_to_4095_tokens(num_new, num_before, dtype):
    check_prefill([num_new], [num_before], (1, 1, 32, 256), dtype, NAN)


# --- the layers around it


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("size, dtype", pairs([1, 32, 128, 256, 1000, 5120], DTYPES))
@pytest.mark.parametrize("num_rows", [0, 1, 67] if CUDA else [0, 1, 7])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(with_residual, num_rows, size, dtype):
    x, weight = randn(num_rows, size, dtype=dtype), randn(size, dtype=dtype)
    x[1:2] *= 1e-3  # where eps counts
    residual = x.flip(0) * 0.5 if with_residual else None
    total = x + residual if with_residual else x
    out = rms_norm(x, weight, 1e-6, residual)
    if with_residual:
        assert torch.equal(residual, total)
    assert_close(out, rms_norm_reference(total, weight, 1e-6))


@pytest.mark.parametrize("size, dtype", pairs([1, 32, 1000], DTYPES))
@pytest.mark.parametrize("num_rows, parts", pairs([0, 1, 5], [1, 2, 4]))
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_of_parts(with_residual, parts, num_rows, size, dtype):
    x, weight = randn(parts, num_rows, size, dtype=dtype), randn(size, dtype=dtype)
    x[:, 1:2] *= 1e-3  # where eps counts
    total, residual = x.double().sum(0), None
    if with_residual:
        residual = x[0].flip(0) * 0.5
        # rounded part by part it would be another in half precision, and so in float32 in another order
        total = (sum(x[1:].float(), x[0].float()) + residual.float()).to(dtype)
    out = rms_norm(x, weight, 1e-6, residual, parts)
    if with_residual:
        assert torch.equal(residual, total)
    assert_close(out, rms_norm_reference(total, weight, 1e-6))


@pytest.mark.parametrize("size, dtype", pairs([1, 32, 1000, 3840], DTYPES))
@pytest.mark.parametrize("num_rows, parts", pairs([0, 1, 5], [1, 2, 4]))
@pytest.mark.parametrize("with_factor", [False, True])
def test_rms_norm_of_a_norm(with_factor, parts, num_rows, size, dtype):
    """The sum of the parts has a norm of its own, which may have a factor, before the residual is added."""
    x, (weight, own_weight) = randn(parts, num_rows, size, dtype=dtype), randn(2, size, dtype=dtype)
    x[:, 1:2] *= 1e-3  # where eps counts
    residual, before = x[0].flip(0) * 0.5, x[0].flip(0) * 0.5
    normed, factor = rms_norm_reference(x.double().sum(0), own_weight, 1e-6), None
    if with_factor:
        factor = torch.tensor([0.3]).to(DEVICE, dtype)
        normed *= factor.double()
    out = rms_norm(x, weight, 1e-6, residual, parts, (own_weight, factor))
    assert_close(residual, normed + before.double())
    assert_close(out, rms_norm_reference(residual, weight, 1e-6))
    total = NormedSum(PartialSum(x if parts > 1 else x[0], parts), SimpleNamespace(weight=own_weight, eps=1e-6))
    if with_factor:
        total.times(factor)
    assert_close(total.reduce(), normed)
    for eps in (1e-6, 0.5):  # the second differs from that of the own norm
        found, summed = ops.add_rms_norm(total, before.clone(), weight, eps)
        assert_close(summed, residual)
        assert_close(found, rms_norm_reference(summed, weight, eps))
    scaled = NormedSum(total.total, factor=torch.tensor([0.3]).to(DEVICE, dtype))  # without a norm of its own
    found, summed = ops.add_rms_norm(scaled, before.clone(), weight, 1e-6)
    product = x.double().sum(0) * scaled.norm[2].double()
    assert_close(scaled.reduce(), product)
    assert_close(summed, product + before.double(), 4)
    found, summed = ops.add_rms_norm(total, None, weight, 1e-6)
    assert_close(summed, normed)
    assert_close(found, rms_norm_reference(summed, weight, 1e-6))
    assert ops.add_normed(total, before) is before and torch.equal(before, residual)


@pytest.mark.parametrize("sizes, dtype", pairs([(1, 1), (64, 32), (1000, 250), (96, 4096)], DTYPES))
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_norm_columns(num_rows, sizes, dtype):
    """In place; the columns after the two groups stay."""
    x, weights = inside(randn(num_rows, sum(sizes) + 7, dtype=dtype)), tuple(randn(n, dtype=dtype) for n in sizes)
    x[1:2] *= 1e-3  # where eps counts
    q, k, v = x.clone().split((*sizes, 7), 1)
    assert ops.norm_columns(x, weights, 1e-6) is x
    for found, before, weight in zip(x.split((*sizes, 7), 1), (q, k), weights):
        assert_close(found, rms_norm_reference(before, weight, 1e-6))
    assert torch.equal(x[:, -7:], v)


@pytest.mark.parametrize("shape, dtype", pairs([(0, 5, 32), (1, 3, 512), (5, 7, 64)], DTYPES))
@pytest.mark.parametrize("count", [1, 3])
def test_norm_heads(count, shape, dtype):
    """In place; the heads before them stay."""
    x = inside(randn(*shape, dtype=dtype))
    x[1:2] *= 1e-3  # where eps counts
    before = x.clone()
    assert ops.norm_heads(x, count, 1e-6) is x
    assert_close(x[:, -count:], rms_norm_reference(before[:, -count:], torch.ones(shape[2]).to(DEVICE), 1e-6))
    assert torch.equal(x[:, :-count], before[:, :-count])


@each_dtype
@pytest.mark.parametrize("num_heads", [1, 3])
def test_rms_norm_of_heads(num_heads, dtype):
    """The heads of queries are a part of the rows of a product; a single one is a view of them."""
    x, weight = inside(randn(5, num_heads, 32, dtype=dtype)), randn(32)
    out = ops.rms_norm(x, weight, 1e-6)
    assert out.shape == x.shape and out.dtype == dtype
    assert_close(out, rms_norm_reference(x, weight, 1e-6))


@each_dtype
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_store_kvcache(kv_heads, dtype):
    """The numbers as they are; a slot of -1 stores nothing."""
    k, v = (inside(randn(5, kv_heads, 32, dtype=dtype)) for _ in "kv")
    cache, slots = cache_of(*(randn(4, 16, kv_heads, 32, dtype=dtype) for _ in "kv")), int32([40, -1, 3, 63, 17])
    expected = [x.clone() for x in (cache.k, cache.v)]
    for stored, x in zip(expected, (k, v)):
        stored.flatten(0, 1)[slots[slots >= 0].long()] = x[slots >= 0]
    ops.store_kvcache(k, v, cache, slots)
    assert torch.equal(cache.k, expected[0]) and torch.equal(cache.v, expected[1])


overflows = pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's exp says so


@overflows
@each_dtype
@pytest.mark.parametrize("n", [1, 7, 1000, 1025, 3072])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_gated_activations(name, num_rows, n, dtype):
    x = randn(num_rows, 2 * n, dtype=dtype) * 3
    x[:, : n // 8] *= 100  # where exp(-x) overflows, or vanishes
    gate, up = x.double().chunk(2, -1)
    assert_close(getattr(ops, name)(x), (F.silu(gate) if name == "silu_and_mul" else gelu(gate)) * up)
    assert ops.gated_activation(x, Activation(shift=1.0)) is NotImplemented
    assert ops.gated_activation(x, Activation(limit=1.0)) is NotImplemented


gelu = partial(F.gelu, approximate="tanh")
ACTIVATIONS = [None, SWIGLU, GELU_AND_MUL]


def linear_reference(x: torch.Tensor, weight: torch.Tensor, act: Activation | None = None, bias=None) -> torch.Tensor:
    y = x.double() @ weight.double().T
    if bias is not None:
        y += bias.double()
    if act is None:
        return y
    gate, up = y.chunk(2, -1)
    return (F.silu(gate) if act == SWIGLU else gelu(gate)) * up


@pytest.mark.gpu
@pytest.mark.skipif(not prefill_attention.has_hopper_kernels(), reason="needs a Hopper GPU, and Triton 3.6")
@pytest.mark.parametrize("num_rows, n, k", [(1, 128, 64), (130, 384, 136), (513, 3072, 1024), (1030, 2304, 1096)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act", ACTIVATIONS[1:])
def test_gated_linear_for_hopper(act, num_rows, n, k, dtype):
    """Fewer tiles than programs and more, also with rows and inputs beyond the last; rounded as in two steps."""
    from nanovllm.kernels.hopper.hopper_gated import gated_linear

    x, weight = randn(num_rows, k, dtype=dtype), randn(2 * n, k, dtype=dtype) * 2 / k**0.5
    weight[: n // 8] *= 30  # where exp(-x) overflows, or vanishes
    found, expected = gated_linear(x, weight, act), linear_reference(x, weight, act)
    in_steps = gated_activation(F.linear(x, weight), act)
    assert (found.double() - expected).norm() < 1.01 * (in_steps.double() - expected).norm()
    assert (found != in_steps).double().mean() < 0.02  # where sums in another order are rounded to other numbers


def test_choose_gated_linear(monkeypatch):
    """Matmul and activation are one kernel if its tiles fill a GPU, here of 10 multiprocessors, about completely."""
    importlib.import_module("nanovllm.fused.fused_linear")  # tells `activation_of` about modules
    module, calls = "nanovllm.kernels.hopper.hopper_gated", []
    hopper_gated = SimpleNamespace(gated_linear=lambda x, weight, act: calls.append((len(x), act)))
    monkeypatch.setitem(sys.modules, module, hopper_gated)
    monkeypatch.setattr(hopper, "hopper_gated", hopper_gated, raising=False)
    monkeypatch.setattr("nanovllm.kernels.linear.gated_activations.has_hopper_kernels", lambda: True)
    monkeypatch.setattr("nanovllm.kernels.linear.gated_activations.num_sms", lambda device: 10)

    def fused(n=640, k=64, dtype=torch.bfloat16, bias=None, act=SiluAndMul):
        calls.clear()
        norm, weight = RMSNorm(k, 1e-6).to(dtype), torch.empty(2 * n, k, dtype=dtype)
        for rows in (2, 256, 511, 512, 513, 640, 768, 2500):
            x = NormInput(PartialSum(torch.ones(rows, k, dtype=dtype)), None, norm)
            ops.norm_linear(x, weight, bias, act and act())
        assert all(found == activation_of(act()) for _, found in calls)
        return [rows for rows, _ in calls]

    assert fused() == fused(act=GeluAndMul) == [512, 768, 2500]
    assert fused(n=128) == [2500]
    assert not fused(n=640 - 64) and not fused(k=60) and not fused(dtype=torch.float32)
    assert not fused(bias=torch.ones(1280)) and not fused(act=None)
    monkeypatch.setattr("nanovllm.kernels.linear.gated_activations.has_hopper_kernels", lambda: False)
    assert not fused()


# below, above and at odds with tiles of 2048 inputs, or of 1024 with an activation
GEMV_SIZES = [(1, 1), (7, 1), (257, 7), (257, 33), (1, 1024), (7, 1500), (257, 1030), (7, 2048), (1, 2055), (7, 5120)]
GEMV_KINDS = [(before, act) for act in ACTIVATIONS for before in ("nothing", "norm", "sum and norm")]


@each_dtype_or_half
@pytest.mark.parametrize("size, kind", pairs(GEMV_SIZES, GEMV_KINDS), ids=str)
def test_gemv(size, kind, dtype):
    (n, k), (before, act) = size, kind
    x, residual = randn(1, k, dtype=dtype), randn(1, k, dtype=dtype) if "sum" in before else None
    weight, norm_weight = randn(2 * n if act else n, k, dtype=dtype) / k**0.5, None
    total = x if residual is None else x + residual
    expected, eps = total, 0.0
    if "norm" in before:
        norm_weight, eps = randn(k, dtype=dtype), 0.5  # as large as to count
        expected = rms_norm_reference(total, norm_weight, eps)
    inputs = [tensor for tensor in (x, weight, norm_weight, residual) if tensor is not None]
    copies = [tensor.clone() for tensor in inputs]
    out, returned = ops.gemv(x, weight, (norm_weight, eps), residual, act)
    assert_close(out, linear_reference(expected, weight, act))
    assert torch.equal(returned, total) and (returned is x) == (residual is None)
    assert all(map(torch.equal, inputs, copies))


@pytest.mark.parametrize("nk, dtype", pairs([(1, 1), (7, 1500), (257, 33), (7, 2055)], DTYPES))
@pytest.mark.parametrize("has_norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("act", ACTIVATIONS, ids=["", "swiglu", "gelu"])
def test_gemv_with_bias(act, has_norm, nk, dtype):
    n, k = nk
    x, norm_weight = randn(1, k, dtype=dtype), randn(k, dtype=dtype) if has_norm else None
    num_outputs = 2 * n if act else n
    weight, bias = randn(num_outputs, k, dtype=dtype) / k**0.5, randn(num_outputs, dtype=dtype)
    out, _ = ops.gemv(x, weight, (norm_weight, 0.5), act=act, bias=bias)
    normed = rms_norm_reference(x, norm_weight, 0.5) if has_norm else x
    assert_close(out, linear_reference(normed, weight, act, bias))


@pytest.mark.parametrize("act", ACTIVATIONS[:2])
def test_gemv_sums_exact_products(act):
    """Products of bfloat16 numbers have 16 digits, which float32 holds: here the last ones are all that remains."""
    n, k = 3, 8192
    x, weight = torch.full((1, k), 1 + 2**-7, dtype=torch.bfloat16), torch.full((n, k), 1 + 2**-7, dtype=torch.bfloat16)
    x[:, ::2], weight[:, ::2] = -1, 1 + 2**-6  # exactly, each pair's sum is 2^-14
    if act:
        weight = torch.cat((torch.zeros_like(weight), weight))
        weight[:n, 0] = -64
    out, _ = ops.gemv(x.to(DEVICE), weight.to(DEVICE), act=act)
    expected = k // 2 * 2**-14 * (64 if act else 1)
    assert out.tolist() == [[expected] * n]


@overflows
@each_dtype
@pytest.mark.parametrize("act", ACTIVATIONS[1:])
def test_gemv_with_gates_far_from_zero(act, dtype):
    gates = torch.tensor([-3e4, -200.0, -89.0, -88.0, -20.0, 0.0, 20.0, 88.0, 89.0, 200.0, 3e4])
    weight = torch.cat((gates, torch.ones(len(gates))))[:, None].repeat(1, 8).to(DEVICE, dtype) / 8
    x = torch.ones(1, 8).to(DEVICE, dtype)
    assert_close(ops.gemv(x, weight, act=act)[0], linear_reference(x, weight, act))


SPLIT_K_CASES = [((8, 8), 1), ((8, 8), 4), ((40, 136), 4), ((40, 136), 1)]  # n and k, and the number of parts


@pytest.mark.skipif(CUDA and not has_tma(torch.device(DEVICE)), reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=lambda dtype: str(dtype)[6:])  # float32 tiles do not fit on chip
@pytest.mark.parametrize(
    "m, n, k, split_k",
    [
        *((m, *nk, parts) for m, (nk, parts) in pairs((1, 3, 16, 17, 33, 64, 65, 130), SPLIT_K_CASES)),
        *((1, 8, 1000, 4), (33, 136, 1000, 1), (17, 136, 520, 4), (130, 1000, 136, 1)),
        *((65, 1000, 136, 4), (130, 1000, 136, 4)),
    ],
)
def test_split_k_gemm(m, n, k, split_k, dtype):
    """Of four parts those are empty that no tile of inputs is left for."""
    x, weight = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype) / k**0.5
    out = ops.split_k_gemm(x, weight, split_k)
    assert out.dtype == dtype and out.shape == (split_k, m, n)
    assert not out[triton.cdiv(k, TILE_K) :].any()
    error = (out.double().sum(0) - linear_reference(x, weight)).abs()
    # each part is rounded on its own, and may be larger than the sum
    assert (error <= TOLERANCE[dtype] / 2 * (1 + out.double().abs().sum(0))).all()


@pytest.mark.gpu
@pytest.mark.skipif(not prefill_attention.has_hopper_kernels(), reason="needs a Hopper GPU, and Triton 3.6")
@pytest.mark.parametrize("m", [129, 144, 155, 192, 193, 256])
@pytest.mark.parametrize("n, k, split_k", [(4096, 4096, 4), (5120, 1096, 3), (20008, 264, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_split_k_gemm_for_hopper(m, n, k, split_k, dtype):
    """More inputs than buffers and fewer; tiles and parts of which something is missing."""
    from nanovllm.kernels.hopper.hopper_gemm import hopper_gemm

    x, weight = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype) / k**0.5
    out = torch.full((split_k, m, n), NAN, dtype=dtype, device=DEVICE)
    hopper_gemm(x, weight, split_k, out)
    error = (out.double().sum(0) - linear_reference(x, weight)).abs()
    assert (error <= TOLERANCE[dtype] / 2 * (1 + out.double().abs().sum(0))).all()


def test_tiny_products_are_added_up_from_parts(monkeypatch):
    """As on a Hopper GPU; not those that write where they are told to."""
    counts, split_k_gemm = [], ops.split_k_gemm
    monkeypatch.setattr("nanovllm.kernels.linear.split_k_gemm.has_tma", lambda device: True)
    monkeypatch.setattr(ops, "split_k_gemm", lambda *args: counts.append(args[2]) or split_k_gemm(*args))
    x, weight = randn(5, 1024, dtype=torch.float16), randn(64, 1024, dtype=torch.float16) / 32
    for out in (None, x.new_empty(1, 5, 64)):
        found = ops.split_linear(x, weight, out=out)
        torch.testing.assert_close(found.double(), linear_reference(x, weight), rtol=0, atol=4e-3)
    assert counts[0] > 1 == counts[1]


def test_choose_split_k(monkeypatch):
    """The device is believed to be a Hopper GPU, but for the first line."""

    def split_k(rows, n=64, k=64, dtype=torch.float16, device="meta", max_split_k=4):
        return ops.choose_split_k(*(torch.empty(m, k, dtype=dtype, device=device) for m in (rows, n)), max_split_k)

    assert not any(split_k(rows, dtype=dtype, device="cpu") for rows in (0, 1, 64) for dtype in DTYPES)
    monkeypatch.setattr("nanovllm.kernels.linear.split_k_gemm.has_tma", lambda device: True)
    monkeypatch.setattr("nanovllm.kernels.linear.split_k_gemm.num_sms", lambda device: 132)
    monkeypatch.setattr("nanovllm.kernels.linear.split_k_gemm.has_hopper_kernels", lambda: False)
    assert split_k(1) == split_k(MAX_ROWS) == split_k(2, 7, 8, torch.bfloat16) == 4
    assert not split_k(0) and not split_k(MAX_ROWS + 1)
    # all programs at once: the outputs of Qwen3-4B, 8B and 14B, and one tile too many
    assert [split_k(64, n, 4096) for n in (2560, 4096, 5120, 132 * TILE_N, 133 * TILE_N)] == [3, 2, 0, 1, 0]
    # many times in turn, if all of these fill the GPU: the input of SwiGLU, and the head
    assert [split_k(m, 24576, 4096, max_split_k=1) for m in (2, 64, 65)] == [1, 1, 0]
    assert [split_k(64, num_tiles * TILE_N, 4096) for num_tiles in (18 * 132, 3 * 132 - 9, 2 * 132 - 60)] == [1, 1, 0]
    assert [split_k(m, 4096, 4096) for m in (65, 127, 128, 129, 256)] == [0, 0, 2, 0, 0]
    assert split_k(64, 4096, 4096, max_split_k=1) == 1
    # few weights: of more rows too, but only full tiles where there is one part
    assert [split_k(m, 1024, 1024) for m in (64, 80, 160, 256)] == [4, 4, 2, 4]
    assert [split_k(m, 4096, 1024, max_split_k=1) for m in (64, 80, 128, 192, 256)] == [1, 0, 1, 0, 1]
    assert FEW_WEIGHTS >= 4096 * 1024
    assert not split_k(2, k=60)  # rows that TMA cannot step over
    assert not any(split_k(rows, dtype=torch.float32) for rows in (0, 1, 64))
    # the kernel for Hopper: many inputs, and parts that fill the GPU
    monkeypatch.setattr("nanovllm.kernels.linear.split_k_gemm.has_hopper_kernels", lambda: True)
    assert [split_k(m, 4096, 12288) for m in (128, 129, 256, 257)] == [2, 4, 4, 0]
    assert [split_k(200, n, 12288) for n in (2560, 4096, 34 * 128)] == [0, 4, 0] and not split_k(200, 4096, 4096)
    assert not split_k(200, 4096, 12288, max_split_k=1) and not split_k(200, 4096, 12288, torch.float32)
    assert split_k(160, 1024, 1024) == 2


@pytest.mark.parametrize("sms", [78, 132, 144])
def test_tiles_of_8_bit_weights(sms):
    """They have all rows, up to 128; the widest make one wave, and what a program has in flight fits beside others'."""
    tiles = {}
    for num_rows, columns in product((2, 16, 17, 32, 64, 65, 160), range(64, 300 * 64, 64)):
        tile = tiles[num_rows, columns] = scaled_tiles(num_rows, columns, sms)
        programs = -(-columns // tile.tile_n) * -(-num_rows // tile.tile_m)
        assert tile.tile_m == tile_m_of(num_rows) >= min(num_rows, 128)
        assert tile.tile_n == TILE_N or 0.9 * sms < programs <= sms
        assert tile.stages * tile.tile_k * (tile.tile_n + tile.tile_m) <= (1 if programs <= sms else 0.75) * LONE_BYTES
    # a program for each multiprocessor: as wide as that allows
    full = 2 * TILE_N * sms
    assert [tiles[m, full].tile_n for m in (16, 32, 64, 65)] == [TILE_N, 2 * TILE_N, 2 * TILE_N, TILE_N]
    assert tiles[32, full + TILE_N].tile_n == tiles[32, full // 2].tile_n == TILE_N
    assert tiles[32, full // 2].stages > tiles[32, full + TILE_N].stages


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize(
    "sizes, dtype",  # heads, kv_heads, head_dim, rotary
    pairs([(1, 1, 32, 32), (5, 1, 64, 24), (3, 3, 32, 32), (16, 2, 128, 128), (2, 1, 256, 64)], DTYPES),
)
@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "no norm"])
def test_norm_rope_store(has_norm, sizes, num_tokens, dtype):
    heads, kv_heads, head_dim, rotary = sizes
    qkv = randn(num_tokens, heads + 2 * kv_heads + 1, head_dim, dtype=dtype)[:, 1:]  # a gate is in front
    qkv[1:2] *= 1e-3  # where eps counts
    results = stored(partial(ops.norm_rope_and_store, qkv), qkv, kv_heads, rotary, has_norm, dtype)
    for found, expected in results:
        assert_close(found, expected)
    values, expected = results[-1]
    assert torch.equal(values.double(), expected)


def stored(store, qkv: torch.Tensor, kv_heads: int, rotary: int, has_norm: bool, dtype: torch.dtype):
    """Queries, keys and values as `store` leaves them, each with what they are of qkv in float64. Some slots are -1."""
    num_tokens, num_rows, head_dim = qkv.shape
    q_weight, k_weight = (randn(head_dim, dtype=dtype) if has_norm else None for _ in "qk")
    inv_freq = 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    positions = torch.randint(300, (num_tokens,))
    cos_sin = cos_sin_at(positions, inv_freq, 300)
    num_blocks = num_tokens // 16 + 5
    caches = [randn(num_blocks + 1, 16, kv_heads, head_dim, dtype=dtype) for _ in "kv"]
    cache = cache_of(*(x[1:] for x in caches))  # in front is what a slot of -1 would overwrite
    slots = torch.randperm(16 * num_blocks)[:num_tokens].to(DEVICE)
    slots[2::3] = -1

    angles = torch.outer(positions.float(), inv_freq).double().unsqueeze(1).to(DEVICE)
    turn = torch.polar(torch.full_like(angles, 1.25), angles)

    def norm_rope(x, weight):
        normed = rms_norm_reference(x, weight, 1e-6) if has_norm else x.double()
        turned = torch.complex(*normed[..., :rotary].chunk(2, -1)) * turn
        return torch.cat((turned.real, turned.imag, normed[..., rotary:]), -1)

    q, k, v = qkv.split((num_rows - 2 * kv_heads, kv_heads, kv_heads), 1)
    expected = [x.double() for x in caches]
    for x, content in zip(expected, (norm_rope(k, k_weight), v.double()), strict=True):
        x[1:].flatten(0, 1)[slots[slots >= 0]] = content[slots >= 0]
    out = store((q_weight, k_weight, 1e-6, cos_sin), int32(slots), cache)
    return [*zip((out, *caches), (norm_rope(q, q_weight), *expected), strict=True)]


@pytest.mark.gpu
@pytest.mark.skipif(not prefill_attention.has_hopper_kernels(), reason="needs a Hopper GPU, and Triton 3.6")
@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("num_rows, heads, kv_heads, k", [(1, 2, 2, 64), (130, 16, 8, 1024), (2500, 6, 2, 1096)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_qkv_for_hopper(dtype, num_rows, heads, kv_heads, k, has_norm):
    """Fewer tiles than programs and more, also with rows and inputs beyond the last."""
    from nanovllm.kernels.hopper.hopper_qkv import store_product

    x, weight = randn(num_rows, k, dtype=dtype), randn((heads + 2 * kv_heads) * 128, k, dtype=dtype) / k**0.5
    qkv = linear_reference(x, weight).unflatten(1, (-1, 128))
    store = partial(store_product, (x, weight, None))
    for found, expected in stored(store, qkv, kv_heads, 128, has_norm, dtype):
        assert_close(found, expected)


def test_choose_qkv(monkeypatch):
    """Product, norm, rope and store are one kernel for more rows than a graph has; then it gets the layer's factors."""
    module, calls = "nanovllm.kernels.hopper.hopper_qkv", []
    fake = SimpleNamespace(store_product=lambda factors, *args: calls.append((factors, args)) or "queries")
    monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.setattr(hopper_tiles, "has_hopper_kernels", lambda: True)
    monkeypatch.setattr(hopper_tiles, "MAX_CAPTURED_ROWS", 4)

    def fused(rows=5, heads=6, kv_heads=2, head_dim=128, k=64, cache_dtype=torch.bfloat16, rotary=None, bias=False):
        with constructing(TensorParallel(), torch.bfloat16):
            layer = QKVParallelLinear(k, head_dim, heads, kv_heads, bias).to(DEVICE)
            norm = RMSNorm(k, 1e-6).to(DEVICE)
        fuse(layer)
        x = randn(rows, k, dtype=torch.bfloat16)
        norm.weight.copy_(randn(k))
        normed = NormInput(PartialSum(x), None, norm)
        cache = KVCache(torch.empty(2, 1, 16, kv_heads, head_dim, dtype=cache_dtype))
        args = (None, None, 0.0, torch.ones(rows, 2, rotary or head_dim)), torch.arange(rows), cache
        if (q := ops.qkv_norm_rope_store(normed, layer, *args)) is NotImplemented:
            assert not calls and ops.qkv_norm_rope_store(x, layer, *args) is NotImplemented
            return False
        (((found, *others), found_args),) = calls
        assert q == "queries" and torch.equal(found, normed.tensor()) and found_args == args
        assert others[0] is layer.weight and others[1:] == [None]
        calls.clear()
        return True

    assert fused() and fused(heads=2) and fused(rows=300)
    assert not fused(rows=4) and not fused(rows=1) and not fused(bias=True)
    assert fused(k=2560) and not fused(k=2568)  # in 16 bits
    assert not fused(heads=5) and not fused(kv_heads=1, heads=4) and not fused(k=60)
    assert not fused(head_dim=64, heads=12) and not fused(rotary=64) and not fused(cache_dtype=torch.float8_e4m3fn)
    monkeypatch.setattr(hopper_tiles, "has_hopper_kernels", lambda: False)
    assert not fused()


# --- host memory


@pytest.mark.parametrize("size", [1, 511, 513, 2049])
def test_fetch_and_deliver_alternate(size):
    """Four rounds: each reads and writes one buffer of the two, and the other is left alone."""
    batches, ids = (torch.randint(1000, (2, 2100), dtype=torch.int32, pin_memory=CUDA) for _ in range(2))
    buffer_index, out = int32([0]), int32([-1] * (size + 1))
    for i in range(4):
        expected = ids.clone()
        ops.copy_from_host(out[:size], batches, buffer_index)
        ops.copy_to_host(out[:size] + i, ids, buffer_index)
        expected[i % 2, :size] = batches[i % 2, :size] + i
        assert buffer_index.item() == 1 - i % 2 and out[-1] == -1
        assert torch.equal(out[:size].cpu(), batches[i % 2, :size]) and torch.equal(ids, expected)


# --- sampling


@triton.jit
def _philox_kernel(seeds_ptr, counters_ptr, out_ptr, ROUNDS: tl.constexpr):
    row = tl.program_id(0)
    c = counters_ptr + row * 4
    words = tl.philox(tl.load(seeds_ptr + row), tl.load(c), tl.load(c + 1), tl.load(c + 2), tl.load(c + 3), ROUNDS)
    for i in tl.static_range(4):
        tl.store(out_ptr + row * 4 + i, words[i].to(tl.int64))


@triton.jit
def _gumbel_kernel(bits_ptr, out_ptr, N: tl.constexpr, HARDWARE: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out_ptr + n, _gumbel(tl.load(bits_ptr + n).to(tl.uint32, bitcast=True), HARDWARE))


@pytest.mark.parametrize("rounds", [PHILOX_ROUNDS, 10])
def test_triton_has_the_same_philox(rounds):
    """tests/test_sampler.py holds the other one to the published numbers."""
    words = torch.randint(1 << 32, (6, 64)).to(DEVICE)
    words[:, :8] |= 0x80000000
    words[:, 8], words[:, 9] = 0, 0xFFFFFFFF
    counter, key = words[:4], words[4:]
    out = torch.empty(64, 4, dtype=torch.long, device=DEVICE)
    _philox_kernel[(64,)](key[0] | key[1] << 32, int32(counter.t().contiguous()), out, ROUNDS=rounds)
    assert torch.equal(out, torch.stack(tuple(philox(*words, rounds)), 1))


def test_gumbel_keeps_the_digits_of_both_tails():
    bits = torch.randint(1 << 32, (1024,))
    bits[:512] >>= torch.arange(512) // 16  # large noise has few bits
    bits[512:768] = 0xFFFFFFFF - bits[:256]  # small noise
    bits[0], bits[1] = 0, 0xFFFFFFFF
    out = torch.empty(1024, device=DEVICE)
    _gumbel_kernel[(1,)](int32(bits), out, N=1024, HARDWARE=bool(CUDA))
    v = ((bits.float() + 0.5) * 2.0**-32).double().clamp(max=1 - 2.0**-24)
    error = (out.cpu() + (-torch.log1p(-v)).log()).abs()
    assert error.max() < 1e-5
    # it is large noise that wins; a GPU's own logarithm is good to 2^-22 of log2, of 33 for the largest
    assert error[v < 0.005].max() < (33 * 2.0**-22 * 0.69 if CUDA else 2e-6)


def sample_reference(logits, temperatures, seeds, positions):
    noise = noise_of_rows(seeds, positions, logits.shape[-1])
    hot = temperatures[:, None] > 0
    return torch.where(hot, logits.float() / temperatures[:, None] + noise, logits.float()).argmax(-1).int()


def sampling_inputs(num_rows: int):
    """Temperatures of which every third is zero, seeds with and without high bits, positions near and far."""
    temperatures = torch.tensor([1.0, 0.0, 0.3]).repeat(num_rows)[:num_rows]
    seeds = torch.randint(-(1 << 31), 1 << 31, (num_rows, 2))
    seeds[1::4] = torch.tensor([7, 0])
    seeds[2::4, 1] = -1
    positions = torch.randint(1 << 31, (num_rows,)) >> torch.arange(num_rows) % 31
    return temperatures.to(DEVICE), int32(seeds), int32(positions)


@pytest.mark.parametrize(
    "shape, dtype", pairs([(0, 5), (6, 1), (32, 5), (16, 1023), (16, 2048), (5, 5001), (1, 151_936)], DTYPES)
)
def test_sample(shape, dtype):
    num_rows, vocab_size = shape
    logits = inside(randn(num_rows, vocab_size, dtype=dtype), torch.inf)
    inputs = sampling_inputs(num_rows)
    ids = ops.sample(logits, *inputs)[1]
    assert ids.dtype == torch.int32
    assert torch.equal(ids, sample_reference(logits, *inputs))


@each_dtype
def test_greedy_takes_the_lowest_of_equals(dtype):
    """Within a split and across splits, the last token included."""
    ties = [[0, 8999], [5, 6], [1023, 1024], [2047, 2048], [4095, 4096], [4096, 8192, 8999], [8999], [100, 5000]]
    logits = randn(len(ties), 9000, dtype=dtype)
    for row, columns in zip(logits, ties, strict=True):
        row[columns] = 20
    _, seeds, positions = sampling_inputs(len(ties))
    greedy = torch.zeros(len(ties), device=DEVICE)
    ids = ops.sample(logits, greedy, seeds, positions)[1]
    assert ids.tolist() == [columns[0] for columns in ties]


def test_sample_does_not_depend_on_the_splits(monkeypatch):
    """And tokens that are ruled out stay so."""
    logits = randn(3, 3001)
    logits[:, ::2] = -torch.inf
    inputs = sampling_inputs(3)
    expected = sample_reference(logits, *inputs)
    assert (expected % 2 == 1).all()
    for size in (128, 1024, 4096):
        monkeypatch.setattr(sampling, "SPLIT_SIZE", size)
        assert torch.equal(ops.sample(logits, *inputs)[1], expected)


@pytest.mark.parametrize("value", [-torch.inf, *CUDA * [NAN]])  # the interpreter has no maximum of NaN
def test_sample_without_a_candidate_is_a_token_still(value):
    """What comes out indexes the embedding."""
    logits = torch.full((3, 5001), value, device=DEVICE)
    assert ops.sample(logits, *sampling_inputs(3))[1].tolist() == [0, 0, 0]


# -- several ranks, one after the other in this process: the flags of those that run later are set beforehand ----------


class Ranks:
    """Memory of several ranks as distributed/kernels/peers.py has it: flags, keys, and the places of sums."""

    def __init__(self, size: int, num_programs: int, num_bytes: int):
        self.flags_bytes = num_programs * size * 4
        self.num_programs = num_programs
        self.memory = [torch.zeros(self.flags_bytes + num_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(size)]
        self.addresses = torch.tensor([memory.data_ptr() for memory in self.memory], device=DEVICE)
        self.aborted = int32([0])

    def flags(self, rank: int) -> torch.Tensor:
        return self.memory[rank][: self.flags_bytes].view(torch.int32).view(self.num_programs, -1)

    def data(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        return self.memory[rank][self.flags_bytes :].view(dtype)

    def barrier(self, rank: int, num_programs: int) -> PeerBarrier:
        """That of a rank whose kernel, of so many programs, all others have signalled."""
        self.flags(rank)[:num_programs] = 1
        self.flags(rank)[:, rank] = 0
        return PeerBarrier(self.addresses, self.flags_bytes, 0, self.num_programs, self.aborted, rank)

    def assert_signalled(self, rank: int, num_programs: int) -> None:
        """It has cleared its own flags, and set those of the others."""
        assert not self.flags(rank).any()
        for other in range(len(self.memory)):
            if other != rank:
                assert self.flags(other)[:num_programs, rank].all() and not self.flags(other)[num_programs:, rank].any()
                self.flags(other)[:, rank] = 0


@each_dtype_or_half
@pytest.mark.parametrize("num_rows, n, parts", [(1, 8, 1), (1, 136, 2), (3, 136, 1), (9, 1024, 2)])
@pytest.mark.parametrize("size", [2, 4])
def test_sum_rms_norm(size, num_rows, n, parts, dtype):
    """Of more rows than programs too; every rank has the same sum, to the last bit."""
    ranks = Ranks(size, 4, parts * num_rows * n * dtype.itemsize)
    for rank in range(size):
        ranks.data(rank, dtype)[:] = randn(parts * num_rows * n, dtype=dtype)
    weight, residual = randn(n, dtype=dtype), randn(num_rows, n, dtype=dtype)
    exact = sum(ranks.data(rank, dtype).view(parts, num_rows, n).double().sum(0) for rank in range(size))
    for added in (None, residual):
        sums = []
        for rank in range(size):
            mine = ranks.data(rank, dtype).view(parts, num_rows, n)
            barrier = ranks.barrier(rank, num_programs := min(4, num_rows))
            out, total = ops.sum_rms_norm(mine, barrier, weight, 1e-6, None if added is None else added.clone())
            ranks.assert_signalled(rank, num_programs)
            expected = exact if added is None else exact + added.double()
            assert_close(total, expected)
            assert_close(out, expected * (expected.square().mean(-1, True) + 1e-6).rsqrt() * weight.double())
            sums.append(total)
        assert all(torch.equal(total, sums[0]) for total in sums)


@pytest.mark.parametrize("num_keys", [0, 1, 127, 300])
@pytest.mark.parametrize("size", [2, 4])
def test_all_reduce_max(size, num_keys):
    keys = [torch.randint(-(1 << 62), 1 << 62, (num_keys,), device=DEVICE) for _ in range(size)]
    ranks = Ranks(size, 4, 8 * num_keys)
    for rank in range(size):
        ranks.data(rank, torch.int64)[:] = keys[rank]
    for rank in range(size):
        num_programs = max(1, -(-num_keys // 128))
        ranks.data(rank, torch.int64)[:] = 0  # the kernel writes its own
        out = ops.all_reduce_max(keys[rank], ranks.barrier(rank, num_programs))
        ranks.assert_signalled(rank, num_programs)
        assert torch.equal(out, torch.stack(keys).amax(0))


@pytest.mark.parametrize("num_rows, n", [(0, 8), (1, 8), (3, 136), (2, 5000)])
@pytest.mark.parametrize("size, dtype", pairs([2, 4], DTYPES))
def test_gather_columns(size, num_rows, n, dtype):
    """All columns; or the own part everywhere, and the others' in rows that are filtered."""
    ranks = Ranks(size, 4, dtype.itemsize * num_rows * n)
    parts = [randn(num_rows, n, dtype=dtype) for _ in range(size)]
    for rank in range(size):
        ranks.data(rank, dtype).view(num_rows, n)[:] = parts[rank]
    params = torch.zeros(num_rows, WIDTH, dtype=torch.int32)
    for name, value in (("temperature", 1.0), ("top_p", 1.0)):
        column(params, name)[:] = value
    column(params, "top_k")[1::2] = 7
    whole = torch.cat(parts, 1)
    num_programs = max(1, min(4, num_rows * size * -(-n // 2048)))
    for rank in range(size):
        for asked in (None, params.to(DEVICE)):
            out = ops.gather_columns(parts[rank], ranks.barrier(rank, num_programs), asked)
            ranks.assert_signalled(rank, num_programs)
            own = slice(rank * n, (rank + 1) * n)
            assert torch.equal(out[:, own], parts[rank])
            rows = slice(None) if asked is None else slice(1, None, 2)
            assert torch.equal(out[rows], whole[rows])


def test_a_kernel_that_is_aborted_does_not_wait(monkeypatch):
    if not CUDA:  # the interpreter takes a while for each try
        monkeypatch.setattr(peers, "ABORT_CHECK_INTERVAL", tl.constexpr(100))
    ranks = Ranks(2, 4, 64)
    ranks.aborted[:] = 1
    barrier = PeerBarrier(ranks.addresses, 32, 0, 4, ranks.aborted, 0)
    ops.all_reduce_max(torch.zeros(1, dtype=torch.int64, device=DEVICE), barrier)
    if CUDA:
        torch.cuda.synchronize()
    assert ranks.flags(1)[0, 0] == 1


@each_dtype
@pytest.mark.parametrize("num_ids, n, first_id", [(7, 8, 0), (7, 136, 7), (5, 1024, 1000)])
def test_embed_shard(num_ids, n, first_id, dtype):
    weight, out = randn(num_ids, n, dtype=dtype), randn(6, n, dtype=dtype)
    token_ids = int32([first_id - 1, first_id, first_id + num_ids - 1, first_id + num_ids, 0, 1 << 30])
    assert ops.embed_shard(token_ids, weight, first_id, out) is out
    for row, token_id in zip(out, token_ids.tolist()):
        inside = first_id <= token_id < first_id + num_ids
        assert torch.equal(row, weight[token_id - first_id] if inside else torch.zeros_like(row))


@pytest.mark.parametrize("first_id, dtype", pairs([1, 6, 4099], DTYPES))
def test_sample_from_a_part_of_the_vocabulary(first_id, dtype):
    """The noise is that of the ids, wherever the part begins."""
    num_rows = 16 if CUDA else 6
    logits = randn(num_rows, 5001, dtype=dtype)
    temperatures, seeds, positions = sampling_inputs(num_rows)
    score, ids = ops.sample(logits, temperatures, seeds, positions, first_id)
    noise = noise_of_rows(seeds, positions, 5001, first_id)
    hot = temperatures[:, None] > 0
    scores = torch.where(hot, logits.float() / temperatures[:, None].clamp(min=1e-6) + noise, logits.float())
    best, index = scores.max(-1)
    assert torch.equal(ids, index.int() + first_id)
    torch.testing.assert_close(score, best, rtol=1e-5, atol=1e-4)
    whole = noise_of_rows(seeds, positions, first_id + 5001)
    torch.testing.assert_close(noise, whole[:, first_id:])
