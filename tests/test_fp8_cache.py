"""The FP8 cache: its numbers, its kernels against plain PyTorch on what it holds, and engines that have it."""

import pytest
import torch
import torch.nn.functional as F
from conftest import CUDA, DEVICE, NAN, TOLERANCE, assert_close, each_dtype_or_half, randn

from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.quantization.fp8_cache import FP8KVCache, dequantize, quantize

try:
    import triton
    import triton.language as tl
    from test_kernels import attention_reference, int32

    from nanovllm.kernels import fp8, ops
except ImportError:
    triton = None

needs_triton = pytest.mark.skipif(triton is None, reason="needs Triton")

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # by its bits; 0x7F and 0xFF are NaN


# --- numbers


def test_a_row_is_rounded_to_e4m3_times_a_power_of_two():
    x = torch.randn(1000, 32) * torch.exp2(torch.randint(-20, 20, (1000, 1)).float())
    data, scales = quantize(x)
    assert data.shape == x.shape and data.dtype == torch.uint8 and scales.shape == (1000,)
    assert torch.equal(scales.double().log2().frac(), torch.zeros(1000)), "powers of two"
    scales = scales.double()
    largest = x.abs().amax(-1) / scales
    assert (largest <= 448).all() and (largest > 224).all(), "the scale is the least"
    expected = (x / scales[:, None]).float().to(torch.float8_e4m3fn).double() * scales[:, None]
    assert torch.equal(dequantize(data, scales).double(), expected)
    relative = (expected - x).abs() / x.abs()
    assert (
        relative[x.abs() > largest.max() * 2.0**-14 * scales[:, None]].max() <= 2.0**-4
    )  # half of the last of 4 digits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_read_is_exact_in_the_dtype_that_was_stored(dtype):
    """So attention in the model's dtype loses nothing more, and the values themselves are stored as they are."""
    x = (torch.randn(500, 64) * torch.exp2(torch.randint(-30, 10, (500, 1)).float())).to(dtype)
    read = dequantize(*quantize(x))
    assert torch.equal(read.to(dtype).float(), read)
    assert torch.equal(dequantize(*quantize(read.to(dtype))), read)


def test_extremes():
    rows = torch.zeros(7, 16)
    rows[1, 3], rows[2, 3], rows[3, 3], rows[4, 3], rows[5, 3], rows[6, 3] = 448, 449, 1e38, 1e-30, NAN, -torch.inf
    data, scales = quantize(rows)
    assert scales.tolist() == [2.0**-32, 1, 2, 2.0**31, 2.0**-32, torch.inf, torch.inf]
    read = dequantize(data, scales)
    assert read[:5, 3].tolist() == [0, 448, 448, 448 * 2.0**31, 0] and not read[:5, 4:].any()
    assert not read[5:, 3].isfinite().any()


@needs_triton
def test_conversions_of_kernels():
    """Of all bits, of the middle between each two numbers and its neighbours, and of what is out of range."""

    @triton.jit
    def convert(bits_ptr, floats_ptr, decoded_ptr, encoded_ptr, N: tl.constexpr):
        i = tl.arange(0, N)
        bits = tl.load(bits_ptr + i)
        tl.store(decoded_ptr + i, fp8.decode_e4m3(bits, decoded_ptr.dtype.element_ty))
        tl.store(encoded_ptr + i, fp8.encode_e4m3(tl.load(floats_ptr + i), encoded_ptr.dtype.element_ty))

    middles = (E4M3[:126] + E4M3[1:127]) / 2
    around = [torch.nextafter(middles, torch.full((126,), to)) for to in (0.0, 1e9)]
    floats = torch.cat((middles, *around, torch.tensor([NAN, 1e9, torch.inf, 464, 465, 0, 2.0**-11])))
    floats = F.pad(torch.cat((floats, -floats)), (0, 1024 - 2 * len(floats)))
    expected = floats.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    bits = torch.arange(1024).to(torch.uint8)
    for dtype in (torch.float32, torch.float16):
        for native in (False, *[True] * has_native_e4m3()):
            storage = torch.float8_e4m3fn if native else torch.uint8
            decoded, encoded = (torch.empty(1024, dtype=x, device=DEVICE) for x in (dtype, storage))
            convert[(1,)](bits.to(DEVICE).view(storage), floats.to(DEVICE), decoded, encoded, 1024)
            torch.testing.assert_close(decoded.cpu().float(), E4M3.repeat(4), rtol=0, atol=0, equal_nan=True)
            encoded = encoded.view(torch.float8_e4m3fn).cpu().float()
            torch.testing.assert_close(encoded, expected, rtol=0, atol=0, equal_nan=True)


def has_native_e4m3() -> bool:
    return CUDA and torch.cuda.get_device_capability() >= (8, 9)


# --- kernels

# group: query heads to a key-value head. Block sizes below, above and at odds with the kernels' tiles of keys
each_heads = pytest.mark.parametrize(
    "heads",  # group, kv_heads, head_dim, block_size
    [(1, 3, 128, 256), (2, 1, 64, 16), (3, 2, 32, 48), (16, 1, 32, 64)],
    ids=lambda heads: "g{}-kv{}-d{}-b{}".format(*heads),
)
each_native = pytest.mark.parametrize("native", [False] + [True] * has_native_e4m3())


def paged(lengths: list[int], heads: tuple, dtype: torch.dtype, native: bool = False):
    """What the cache holds of sequences, as float64, the cache with it in shuffled blocks, and the block tables.

    All other slots are NaN with a scale of NaN. The numbers have sizes from 2**-12 to 2**12, values of each token.
    """
    _, kv_heads, head_dim, block_size = heads
    blocks = [-(-length // block_size) for length in lengths]
    order = (torch.randperm(sum(blocks)) + 1).split(blocks)  # block 0 belongs to nobody
    tables = torch.zeros(len(lengths), max(blocks) + 3, dtype=torch.int32)[:, :-1]
    shape = 2, 1, sum(blocks) + 1, block_size, kv_heads, head_dim
    tensors = [torch.full_like(x[:, 0], -1, device="cpu") for x in FP8KVCache.tensors(shape, dtype)]
    cache, contents = FP8KVCache(*tensors), []
    for table, length, ids in zip(tables, lengths, order, strict=True):
        table[: len(ids)] = ids
        slots = (ids[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
        k, v = (torch.randn(length, kv_heads, head_dim) for _ in "kv")
        k, v = k.to(dtype), (v * torch.exp2(torch.randint(-12, 12, (*v.shape[:2], 1)).float())).to(dtype)
        if length:
            cache.store(slots, k, v)
        contents.append([dequantize(*quantize(x)).double().to(DEVICE) for x in (k, v)])
    return contents, on_device(tensors, native), int32(lengths), tables.to(DEVICE)


def on_device(tensors: list[torch.Tensor], native: bool) -> FP8KVCache:
    cache = FP8KVCache(*(x.to(DEVICE).clone() for x in tensors))
    if not native:
        cache.k, cache.v = (x.view(torch.uint8) for x in (cache.k, cache.v))
    return cache


def assert_attended(out: torch.Tensor, q: torch.Tensor, contents: list, num_new: list[int]) -> None:
    """Relative to the largest number of each row, as values of one token may be a thousand times those of another."""
    expected = [attention_reference(part, k, v) for part, (k, v) in zip(q.split(num_new), contents, strict=True)]
    expected = torch.cat(expected)
    size = expected.abs().amax(-1, keepdim=True).clamp_(min=1e-3)
    assert_close((out.double() / size).to(out.dtype), expected / size)


@needs_triton
@each_native
@each_dtype_or_half
@each_heads
@pytest.mark.parametrize("splits", [1, 3])
def test_decode(heads, dtype, splits, native):
    group, kv_heads, head_dim, block_size = heads
    lengths = [130, block_size + 1, block_size, 65, 1, 0]
    contents, cache, context_lens, tables = paged(lengths, heads, dtype, native)
    q = randn(len(lengths), group * kv_heads, head_dim, dtype=dtype)
    out = ops.decode_attention(q, cache.k, cache.v, context_lens, tables, 130, splits, scales=cache.scales)
    assert_attended(out, q, contents, [1] * len(lengths))
    assert not out[-1].any()


@needs_triton
@each_native
@each_dtype_or_half
@each_heads
def test_prefill(heads, dtype, native):
    group, kv_heads, head_dim, _ = heads
    num_new, num_before = [1, 63, 1, 37, 65], [0, 0, 130, 101, 22]
    lengths = [new + before for new, before in zip(num_new, num_before, strict=True)]
    contents, cache, context_lens, tables = paged(lengths, heads, dtype, native)
    q = randn(sum(num_new), group * kv_heads, head_dim, dtype=dtype)
    starts = F.pad(int32(num_new).cumsum(0, dtype=torch.int32), (1, 0))
    size = ops.query_tile_size(group, head_dim, dtype)
    tiles = int32([(i, first) for i, count in enumerate(num_new) for first in range(0, count, size)] + [(-1, 0)])
    out = ops.prefill_attention(q, cache.k, cache.v, starts, context_lens, tables, tiles, scales=cache.scales)
    assert_attended(out, q, contents, num_new)


def rope(positions: torch.Tensor, head_dim: int) -> torch.Tensor:
    inv_freq = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return RotaryEmbedding(tuple(inv_freq.tolist()), 1.25, 300).to(DEVICE)(positions)


@needs_triton
@each_native
@each_dtype_or_half
@pytest.mark.parametrize("heads, num_tokens", [((5, 1, 64, 16), 0), ((5, 1, 64, 16), 7), ((1, 3, 32, 48), 9)])
def test_store_by_norm_rope_store(heads, num_tokens, dtype, native):
    """What `KVCache.store` makes of the keys that a cache in the model's dtype gets; a slot of -1 stores nothing."""
    group, kv_heads, head_dim, block_size = heads
    qkv = randn(num_tokens, (group + 2) * kv_heads, head_dim, dtype=dtype)
    weights = [randn(head_dim, dtype=dtype) for _ in "qk"]
    slots = torch.randperm(4 * block_size)[:num_tokens].to(DEVICE)
    slots[2::3] = -1
    shape = 2, 1, 5, block_size, kv_heads, head_dim
    tensors = [torch.full_like(x[:, 0], 77, device="cpu") for x in FP8KVCache.tensors(shape, dtype)]
    plain = torch.zeros(shape[:1] + shape[2:], dtype=dtype, device=DEVICE)
    new = *weights, 1e-6, rope(torch.arange(num_tokens, device=DEVICE), head_dim), int32(slots)
    q = ops.norm_rope_store(qkv, *new, *plain)
    is_stored = slots >= 0
    k, v = (x.flatten(0, 1)[slots[is_stored]] for x in plain)
    expected, cache = on_device(tensors, native), on_device(tensors, native)
    if is_stored.any():
        expected.store(slots[is_stored], k, v)
    assert torch.equal(ops.norm_rope_store(qkv, *new, cache.k, cache.v, cache.scales), q)
    for ours, theirs in zip((cache.k, cache.v, cache.scales), (expected.k, expected.v, expected.scales)):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@needs_triton
@each_native
@each_dtype_or_half
@pytest.mark.parametrize(
    "heads, splits", [((2, 2, 32, 16), 1), ((3, 1, 64, 48), 3), ((16, 1, 32, 256), 1), ((1, 3, 128, 32), 2)]
)
def test_decode_of_qkv(heads, splits, dtype, native):
    """It stores what `norm_rope_store` stores, and attends to that, not to what it had before rounding."""
    group, kv_heads, head_dim, block_size = heads
    lengths = [100, 65, 1, block_size, block_size + 1]
    _, cache, context_lens, tables = paged([*lengths, 0], heads, dtype, native)
    last = context_lens.long() - 1
    slots = tables.gather(1, last.clamp(min=0)[:, None] // block_size)[:, 0] * block_size + last % block_size
    slots[-1] = -1
    qkv = randn(len(lengths) + 1, (group + 2) * kv_heads, head_dim, dtype=dtype)
    qkv[:, -kv_heads:] *= 100  # the new values count for more than those in the cache
    new = *[randn(head_dim, dtype=dtype) for _ in "qk"], 1e-6, rope(last.clamp(min=0), head_dim), int32(slots)
    other = on_device([torch.stack((cache.k, cache.v)).view(torch.uint8), cache.scales[None]], native)
    q = ops.norm_rope_store(qkv, *new, other.k, other.v, other.scales)
    args = context_lens, tables, 100, splits
    expected = ops.decode_attention(q, other.k, other.v, *args, scales=other.scales)
    out = ops.decode_attention_of_qkv(qkv, *new, cache.k, cache.v, *args, scales=cache.scales)
    assert out.isfinite().all()
    size = expected[:-1].abs().amax(-1, keepdim=True)
    assert_close(out[:-1] / size, (expected[:-1] / size).double())
    for ours, theirs in zip((cache.k, cache.v, cache.scales), (other.k, other.v, other.scales)):
        different = ours.view(torch.uint8) != theirs.view(torch.uint8)
        assert different.float().mean() <= TOLERANCE[dtype], "a number may be rounded to the other side"
