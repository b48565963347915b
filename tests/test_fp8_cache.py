"""The FP8 cache: its numbers, its kernels against plain PyTorch on what it holds, and engines that have it."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from common import (
    CUDA,
    DEVICE,
    NAN,
    TINY,
    TOLERANCE,
    assert_close,
    each_dtype_or_half,
    generate_by_steps,
    pairs,
    randn,
    whole_cache_budget,
)
from test_models import make_checkpoint

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.cache.kv_cache import AttentionSpec, KVCache
from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.fused import fuse
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.quantization.fp8_cache import FP8KVCache, dequantize, quantize

try:
    import triton
    import triton.language as tl
    from test_kernels import SCORES, attention_reference, int32, with_sinks

    from nanovllm.kernels import e4m3 as fp8
    from nanovllm.kernels import ops
except ImportError:
    triton = None

needs_triton = pytest.mark.skipif(triton is None, reason="needs Triton")

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # by its bits; 0x7F and 0xFF are NaN


# --- numbers


def test_a_row_is_rounded_to_e4m3_times_its_scale():
    x = torch.randn(1000, 32) * torch.exp2(torch.randint(-20, 20, (1000, 1)).float())
    data, scales = quantize(x)
    assert data.shape == x.shape and data.dtype == torch.uint8
    assert scales.shape == (1000,) and scales.dtype == torch.bfloat16
    largest, scales = x.abs().amax(-1), scales.float()
    torch.testing.assert_close(scales, largest / 448, rtol=2.0**-8, atol=0)
    read = dequantize(data, scales)
    expected = (x.double() / scales[:, None]).float().clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales[:, None]
    assert (read != expected).float().mean() < 1e-3  # where a quotient lies in the middle of two numbers
    assert torch.equal(read.abs().amax(-1), 448 * scales), "the largest number is nearly exact"
    is_normal = x.abs() >= 2.0**-6 * scales[:, None]
    assert ((read - x).abs() / x.abs())[is_normal].max() <= 2.0**-4  # half of the last of 4 digits
    assert is_normal.float().mean() > 0.99
    assert all(map(torch.equal, quantize(read), quantize(x))), "what was read is stored as it was"


def test_extremes():
    rows = torch.zeros(6, 16)
    rows[1, 3], rows[2, 3], rows[3, 3], rows[4, 3], rows[5, 3] = 448, 1e38, 1e-30, NAN, -torch.inf
    data, scales = quantize(rows)
    assert scales[[0, 1, 3, 4, 5]].tolist() == [2.0**-32, 1, 2.0**-32, torch.inf, torch.inf]
    read = dequantize(data, scales)
    assert read[[0, 1, 3], 3].tolist() == [0, 448, 0] and abs(read[2, 3] / 1e38 - 1) < 2.0**-8
    assert not read[:4, 4:].any() and not read[4:].isfinite().any()


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
HEADS = [(1, 3, 128, 256), (2, 1, 64, 16), (3, 2, 32, 48), (16, 1, 32, 64)]  # group, kv_heads, head_dim, block_size
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
            cache.store_kvcache(slots, k, v)
        contents.append([dequantize(*quantize(x)).double().to(DEVICE) for x in (k, v)])
    return contents, on_device(tensors, native), int32(lengths), tables.to(DEVICE)


def on_device(tensors: list[torch.Tensor], native: bool) -> FP8KVCache:
    cache = FP8KVCache(*(x.to(DEVICE).clone() for x in tensors))
    if not native:
        cache.k, cache.v = (x.view(torch.uint8) for x in (cache.k, cache.v))
    return cache


def assert_attended(
    out: torch.Tensor, q: torch.Tensor, contents: list, num_new: list[int], window: int | None, **scores
) -> None:
    """Relative to the largest number of each row, as values of one token may be a thousand times those of another."""
    parts = zip(q.split(num_new), contents, strict=True)
    expected = [attention_reference(part, k, v, window, **scores) for part, (k, v) in parts]
    expected = torch.cat(expected)
    size = expected.abs().amax(-1, keepdim=True).clamp_(min=1e-3)
    assert_close((out.double() / size).to(out.dtype), expected / size)


@needs_triton
@each_native
@each_dtype_or_half
@pytest.mark.parametrize("heads, case", pairs(HEADS, [(1, None), (3, None), (2, 50)]))
def test_decode(heads, case, dtype, native):
    splits, window = case
    group, kv_heads, head_dim, block_size = heads
    lengths = [130, block_size + 1, block_size, 65, 1, 0]
    contents, cache, context_lens, tables = paged(lengths, heads, dtype, native)
    q = randn(len(lengths), group * kv_heads, head_dim, dtype=dtype)
    scores = with_sinks(SCORES[2], heads, dtype) if window else {}
    cache.spec = AttentionSpec(window=window, **scores)
    out = ops.decode_attention(q, cache, context_lens, tables, 130, splits)
    assert_attended(out, q, contents, [1] * len(lengths), window, **scores)
    assert not out[-1].any()


@needs_triton
@each_native
@pytest.mark.parametrize("splits, window", [(1, None), (3, None), (3, 50)])
def test_decode_of_drafts(splits, window, native):
    """Three rows of each sequence."""
    heads, k, lengths = (4, 2, 32, 32), 3, [130, 66, 32, 3]
    contents, cache, _, tables = paged(lengths, heads, torch.bfloat16, native)
    q = randn(len(lengths) * k, 8, 32, dtype=torch.bfloat16)
    seen = int32([length - k + 1 + i for length in lengths for i in range(k)])
    scores = with_sinks(SCORES[2], heads, torch.bfloat16) if window else {}
    cache.spec = AttentionSpec(window=window, **scores)
    out = ops.decode_attention(q, cache, seen, tables.repeat_interleave(k, 0), 130, splits, tokens_per_row=k)
    assert_attended(out, q, contents, [k] * len(lengths), window, **scores)


@needs_triton
@each_native
@each_dtype_or_half
@pytest.mark.parametrize("heads, window", pairs(HEADS, [None, 50]))
def test_prefill(heads, window, dtype, native):
    group, kv_heads, head_dim, _ = heads
    num_new, num_before = [1, 63, 1, 37, 65], [0, 0, 130, 101, 22]
    lengths = [new + before for new, before in zip(num_new, num_before, strict=True)]
    contents, cache, context_lens, tables = paged(lengths, heads, dtype, native)
    q = randn(sum(num_new), group * kv_heads, head_dim, dtype=dtype)
    starts = F.pad(int32(num_new).cumsum(0, dtype=torch.int32), (1, 0))
    size = ops.query_tile_size(group, head_dim, dtype)
    tiles = int32([(i, first) for i, count in enumerate(num_new) for first in range(0, count, size)] + [(-1, 0)])
    scores = with_sinks(SCORES[2], heads, dtype) if window else {}
    cache.spec = AttentionSpec(window=window, **scores)
    out = ops.prefill_attention(q, cache, starts, context_lens, tables, tiles)
    assert_attended(out, q, contents, num_new, window, **scores)


def rope(positions: torch.Tensor, head_dim: int) -> torch.Tensor:
    inv_freq = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    fuse(rotary_emb := RotaryEmbedding(tuple(inv_freq.tolist()), 1.25, 300).to(DEVICE))
    return rotary_emb.rows(positions).cos_sin


@needs_triton
@each_native
@each_dtype_or_half
@pytest.mark.parametrize("heads, num_tokens", [((5, 1, 64, 16), 0), ((5, 1, 64, 16), 7), ((1, 3, 32, 48), 9)])
def test_store_by_norm_rope_store(heads, num_tokens, dtype, native):
    """What `store_kvcache` makes of the keys that a cache in the model's dtype gets; a slot of -1 stores nothing."""
    group, kv_heads, head_dim, block_size = heads
    qkv = randn(num_tokens, (group + 2) * kv_heads, head_dim, dtype=dtype)
    weights = [randn(head_dim, dtype=dtype) for _ in "qk"]
    slots = torch.randperm(4 * block_size)[:num_tokens].to(DEVICE)
    slots[2::3] = -1
    shape = 2, 1, 5, block_size, kv_heads, head_dim
    tensors = [torch.full_like(x[:, 0], 77, device="cpu") for x in FP8KVCache.tensors(shape, dtype)]
    plain = torch.zeros(shape[:1] + shape[2:], dtype=dtype, device=DEVICE)
    new = qkv, (*weights, 1e-6, rope(torch.arange(num_tokens, device=DEVICE), head_dim)), int32(slots)
    q = ops.norm_rope_and_store(*new, KVCache(plain))
    is_stored = slots >= 0
    k, v = (x.flatten(0, 1)[slots[is_stored]] for x in plain)
    expected, cache = on_device(tensors, native), on_device(tensors, native)
    if is_stored.any():
        expected.store_kvcache(slots[is_stored], k, v)
    own_q = ops.norm_rope_and_store(*new, cache)
    # in float32 the compiler may fuse other products and sums in a kernel that stores something else
    tolerance = 1e-6 if dtype == torch.float32 and CUDA else 0
    torch.testing.assert_close(own_q, q, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip((cache.k, cache.v, cache.scales), (expected.k, expected.v, expected.scales)):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@needs_triton
@each_native
@each_dtype_or_half
@pytest.mark.parametrize(
    "heads, splits", [((2, 2, 32, 16), 1), ((3, 1, 64, 48), 3), ((16, 1, 32, 256), 1), ((1, 3, 128, 32), 2)]
)
def test_decode_of_qkv(heads, splits, dtype, native):
    """It stores what `norm_rope_and_store` stores, and attends to that, not to what it had before rounding."""
    group, kv_heads, head_dim, block_size = heads
    lengths = [100, 65, 1, block_size, block_size + 1]
    _, cache, context_lens, tables = paged([*lengths, 0], heads, dtype, native)
    last = context_lens.long() - 1
    slots = tables.gather(1, last.clamp(min=0)[:, None] // block_size)[:, 0] * block_size + last % block_size
    slots[-1] = -1
    qkv = randn(len(lengths) + 1, (group + 2) * kv_heads, head_dim, dtype=dtype)
    qkv[:, -kv_heads:] *= 100  # the new values count for more than those in the cache
    weights = [randn(head_dim, dtype=dtype) for _ in "qk"]
    norm_rope, slots = (*weights, 1e-6, rope(last.clamp(min=0), head_dim)), int32(slots)
    other = on_device([torch.stack((cache.k, cache.v)).view(torch.uint8), cache.scales[None]], native)
    q = ops.norm_rope_and_store(qkv, norm_rope, slots, other)
    args = context_lens, tables, 100, splits
    expected = ops.decode_attention(q, other, *args)
    out = ops.decode_attention(qkv, cache, *args, norm_rope_inputs=(*norm_rope, slots))
    assert out.isfinite().all()
    size = expected[:-1].abs().amax(-1, keepdim=True)
    assert_close(out[:-1] / size, (expected[:-1] / size).double())
    for ours, theirs in zip((cache.k, cache.v, cache.scales), (other.k, other.v, other.scales)):
        different = ours.view(torch.uint8) != theirs.view(torch.uint8)
        assert different.float().mean() <= TOLERANCE[dtype], "a number may be rounded to the other side"


# --- engines

QUESTIONS = ["What is 17 + 25?", "Count from 5 to 19.", "Sort: 9, 3, 71, 20, 44, 8"]
VERSE = """HAMLET.
To be, or not to be, that is the question:
Whether 'tis nobler in the mind to suffer
The slings and arrows of outrageous fortune,
Or to take arms against a sea of troubles
And by opposing end them. To die, to sleep,
No more; and by a sleep to say we end
The heart-ache and the thousand natural shocks
That flesh is heir to: 'tis a consummation
Devoutly to be wish'd. To die, to sleep;
To sleep, perchance to dream. Ay, there's the rub,
For in that sleep of death what dreams may come,
When we have shuffled off this mortal coil,
Must give us pause. There's the respect
That makes calamity of so long life.
"""
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(temperature=0.9, max_tokens=14, ignore_eos=True, seed=3, n=3)
SMALL = dict(kvcache_block_size=16, num_kvcache_blocks=40, max_num_seqs=8)
MARGIN = 0.02  # a number that is rounded to the other side moves logits by about a thousandth


@pytest.fixture(scope="module")
def prompts(chat, tokenizer) -> list[list[int]]:
    verse = tokenizer.encode(VERSE)
    return [*map(chat, QUESTIONS), verse[:100], [*verse[:100], 7, 8], verse[30:33]]


@pytest.fixture(scope="module")
def alone(prompts) -> list:
    """The greedy answers where there is space for all of them."""
    with LLM("tiny-qwen3", dtype="float32", device="cpu", kv_cache_dtype="fp8") as llm:
        return generate_by_steps(llm, [(prompt, GREEDY) for prompt in prompts])


def assert_same(outputs: list, expected: list) -> None:
    """Token for token, up to where the two best logits of `expected` are nearly the same."""
    num_excused = 0
    for output, reference in zip(outputs, expected, strict=True):
        pairs = zip(output["token_ids"], reference["token_ids"], strict=True)
        first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if first is not None:
            best, second = sorted(x.logprob for x in reference["outputs"][0].logprobs[first].values())[:-3:-1]
            assert best - second < MARGIN, (first, output["token_ids"], reference["token_ids"])
            num_excused += 1
    assert num_excused <= 1


@pytest.fixture
def rounded(monkeypatch):
    """Lets the cache in the model's dtype hold what the FP8 cache holds."""
    store = KVCache.store_kvcache

    def store_rounded(self, slots, k, v):
        store(self, slots, *(dequantize(*quantize(x)).to(x.dtype) for x in (k, v)))

    def activate():
        monkeypatch.setattr(KVCache, "store_kvcache", store_rounded)

    return activate


@pytest.mark.parametrize(
    "dtype, async_scheduling, settings",
    [
        ("bfloat16", True, {}),
        ("float32", True, dict(num_kvcache_blocks=15, max_model_len=200)),
        ("float32", False, dict(max_num_batched_tokens=32, max_num_seqs=4)),
    ],
    ids=["plain", "preemption", "chunks"],
)
def test_the_same_bits_as_a_cache_of_rounded_numbers(
    make_llm, two_layer_model, prompts, rounded, dtype, async_scheduling, settings
):
    """Tokens, logprobs and beams; with prefix hits, preemption, chunks, several answers and copies of blocks."""
    results = []
    for kv_cache_dtype in ("fp8", "auto"):
        if kv_cache_dtype == "auto":
            rounded()
        settings = SMALL | settings | dict(dtype=dtype, async_scheduling=async_scheduling)
        llm = make_llm(two_layer_model, kv_cache_dtype=kv_cache_dtype, **settings)
        outputs = generate_by_steps(llm, [(p, params) for p in prompts for params in (GREEDY, SEEDED)])
        outputs += generate_by_steps(llm, [(prompt, GREEDY) for prompt in prompts[-4:]])
        assert outputs[-2]["num_cached_tokens"] >= 96
        answers = [(x.token_ids, x.logprobs) for output in outputs for x in output.outputs]
        beams = llm.beam_search(prompts[:2], BeamSearchParams(3, 6))
        beams = [(x.token_ids, x.score) for output in beams for x in output.outputs]
        results.append((answers, beams, llm.scheduler.num_preemptions))
    assert results[0] == results[1]
    assert results[0][2] > 0 or "max_model_len" not in settings


@pytest.mark.parametrize(
    "settings",
    [
        dict(num_kvcache_blocks=11, max_model_len=176, async_scheduling=False),
        dict(max_num_batched_tokens=24, max_num_seqs=4, async_scheduling=True),
        dict(enable_prefix_caching=False, kvcache_block_size=48),
    ],
    ids=["preemption", "chunks", "blocks-of-48"],
)
def test_answers_do_not_depend_on_how_they_come_about(make_llm, prompts, alone, settings):
    llm = make_llm(kv_cache_dtype="fp8", **SMALL | settings)
    for first in (0, 3):  # all, and then those with hits
        outputs = generate_by_steps(llm, [(prompt, GREEDY) for prompt in prompts[first:]])
        assert_same(outputs, alone[first:])
        has_hit = first > 0 and llm.config.enable_prefix_caching and "max_model_len" not in settings
        assert not has_hit or outputs[-2]["num_cached_tokens"] == 96
    assert (llm.scheduler.num_preemptions > 0) == ("max_model_len" in settings)


@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks(make_llm, prompts, alone):
    llm = make_llm(kv_cache_dtype="fp8", tensor_parallel_size=2, **SMALL)
    assert_same(generate_by_steps(llm, [(prompt, GREEDY) for prompt in prompts]), alone)


def test_greedy_as_transformers_with_rounded_keys_and_values(prompts, alone, monkeypatch):
    """Their attention reads from a cache that rounds what it is given, by arithmetic of its own.

    Each token is their best after ours before it.
    """
    from transformers import DynamicCache, Qwen3ForCausalLM

    update = DynamicCache.update

    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = (x.abs().amax(-1, keepdim=True) / 448).bfloat16().float()
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    def update_rounded(self, keys, values, *args, **kwargs):
        return update(self, rounded(keys), rounded(values), *args, **kwargs)

    monkeypatch.setattr(DynamicCache, "update", update_rounded)
    model = Qwen3ForCausalLM.from_pretrained(TINY, torch_dtype=torch.float32).eval()
    outputs = []
    for prompt, ours in zip(prompts, alone, strict=True):
        ids = torch.tensor([prompt + ours["token_ids"][:-1]])
        logits = model(ids, past_key_values=DynamicCache(), use_cache=True).logits[0, len(prompt) - 1 :]
        outputs.append({"token_ids": logits.argmax(-1).tolist()})
    assert_same(outputs, alone)


@needs_triton
@pytest.mark.skipif(CUDA, reason="runs kernels in Triton's interpreter")
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # in a tile of no queries
def test_kernels_in_an_engine(make_llm, tmp_path, use_ops):
    """Decode, mixed and prefill steps, fused and not; the layers around attention are plain PyTorch."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    requests = [([*range(first, last)], params) for first, last in ((20, 32), (40, 43), (60, 72))]
    settings = dict(
        model=make_checkpoint(tmp_path, "qwen3"),
        kv_cache_dtype="fp8",
        num_kvcache_blocks=8,
        kvcache_block_size=16,
        max_num_batched_tokens=14,
    )
    expected = generate_by_steps(make_llm(**settings), requests)
    llm = make_llm(attention_backend="triton", **settings)
    use_ops("norm_rope_and_store")
    outputs = generate_by_steps(llm, requests)
    assert [x["token_ids"] for x in outputs] == [x["token_ids"] for x in expected]
    assert llm.stats()["steps"]["mixed"] > 0 and llm.stats()["steps"]["decode"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, dict(enforce_eager=True), dict(attention_backend="sdpa")], ids=str)
def test_on_a_gpu(make_llm, prompts, alone, settings):
    llm = make_llm(device="cuda", kv_cache_dtype="fp8", gpu_memory_utilization=0.1, **SMALL | settings)
    assert_same(generate_by_steps(llm, [(prompt, GREEDY) for prompt in prompts]), alone)


# --- settings and sizes


def test_the_bytes_of_a_cache(make_llm, monkeypatch):
    """Of 32 numbers in float32 and in e4m3 with a scale in bfloat16; the device's budget holds so many more."""
    monkeypatch.setattr(ModelRunner, "cache_budget", whole_cache_budget)
    plain, fp8 = (make_llm(kv_cache_dtype=x) for x in ("auto", "fp8"))
    (tensors,) = fp8.model_runner.caches.values()
    num_heads = 4 * 4 * 256 * fp8.config.num_kvcache_blocks  # layers, heads of each, tokens
    assert sum(x.nbytes for x in tensors) == num_heads * 2 * (32 + 2) <= 2**30
    assert fp8.config.num_kvcache_blocks == plain.config.num_kvcache_blocks * 128 // 34
    assert "tokens in fp8," in repr(fp8) and "tokens," in repr(plain)


def test_refused_by_flash(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8': must be 'auto' for attention_backend='flash'"):
        Config(TINY, device="cuda", attention_backend="flash", kv_cache_dtype="fp8")


def logits_of(llm, ids: list[int]) -> torch.Tensor:
    """[len(ids) - 1, vocabulary], of what follows each token."""
    found = []
    hook = llm.model_runner.model.lm_head.register_forward_hook(lambda *call: found.append(call[-1].float()))
    llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    hook.remove()
    return torch.cat(found)[1 - len(ids) :]


def test_accuracy(make_llm, capsys):
    """What 8 bits cost, beside the rounding of bfloat16; `pytest -n 0 tests/test_fp8_cache.py -k accuracy` prints it.

    On texts that the model itself writes in float32. The logits' error is relative to those in float32; the best token
    is compared with theirs, too.
    """
    rows, expected, settings = {}, None, dict(enable_prefix_caching=False)
    params = SamplingParams(temperature=1.0, seed=0, n=4, max_tokens=30, ignore_eos=True)
    (written,) = make_llm(dtype="float32", **settings).generate("HAMLET.\n", params, use_tqdm=False)
    texts = [written.prompt_token_ids + completion.token_ids for completion in written.outputs]
    following = torch.tensor([token_id for text in texts for token_id in text[1:]])
    for dtype in ("float32", "bfloat16"):
        for kv_cache_dtype in ("auto", "fp8"):
            llm = make_llm(dtype=dtype, kv_cache_dtype=kv_cache_dtype, **settings)
            logits = torch.cat([logits_of(llm, text) for text in texts])
            expected = logits if expected is None else expected
            error = ((logits - expected).norm() / expected.norm()).item()
            same = (logits.argmax(-1) == expected.argmax(-1)).float().mean().item()
            perplexity = torch.nn.functional.cross_entropy(logits, following).exp().item()
            rows[dtype, kv_cache_dtype] = error, same, perplexity
    with capsys.disabled():
        print("\ndtype     cache  error of logits  same best token  perplexity")
        for (dtype, cache), (error, same, perplexity) in rows.items():
            print(f"{dtype:9} {cache:5}  {error:15.4f}  {same:15.1%}  {perplexity:10.2f}")
    error, same, perplexity = rows["float32", "fp8"]
    assert error < 0.15 and same > 0.8 and abs(perplexity / rows["float32", "auto"][2] - 1) < 0.1
