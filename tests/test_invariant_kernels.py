"""Kernels whose rows do not depend on the batch: against plain PyTorch, and on a GPU bit by bit against each other."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import CUDA, DEVICE, DTYPES, assert_close, each_dtype_or_half, pairs, randn

triton = pytest.importorskip("triton")
import test_fp8_cache
import test_kernels
import triton.language as tl
from test_kernels import int32, linear_reference, paged
from test_quantization import WIDE, as_floats, scaled

from nanovllm.attention.triton import query_tiles
from nanovllm.cache.kv_cache import AttentionSpec
from nanovllm.cuda.graphs import capture_sizes
from nanovllm.cuda.runner import CUDAModelRunner
from nanovllm.features.logprobs import divided, log_probabilities
from nanovllm.invariant import cuda_ops
from nanovllm.invariant.cuda import Runner
from nanovllm.invariant.kernels import invariant_decode, invariant_prefill
from nanovllm.invariant.kernels.invariant_gemm import WIDE_128, WIDE_256, invariant_product
from nanovllm.kernels import ops
from nanovllm.kernels.linear import add_rms_norm as layernorm
from nanovllm.layers.attention import Attention
from nanovllm.quantization.scaled import dequantize

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


@pytest.fixture(autouse=True)
def kernels(monkeypatch) -> int:
    """What is checked of other kernels is checked of these; returns the keys of a segment, in the interpreter few."""
    for module in (test_fp8_cache, test_kernels):
        monkeypatch.setattr(module, "ops", cuda_ops)
    if not CUDA:
        for module in (invariant_decode, invariant_prefill):
            monkeypatch.setattr(module, "SEGMENT", tl.constexpr(128))
    return invariant_decode.SEGMENT.value


@pytest.mark.parametrize("n", [1024, 4096, 5120])
def test_norms(monkeypatch, n):
    """They are compiled alike for one row and several: the number of warps decides in which order squares add up."""
    calls = []

    def launch(kernel, grid, device):
        return lambda *args, **constants: calls.append(constants)

    monkeypatch.setattr(layernorm, "launch", launch)
    for num_rows in (1, 2, 64):
        ops.rms_norm(randn(num_rows, n), randn(n), 1e-6)
    assert calls[0] == calls[1] == calls[2] and calls[0]["num_warps"]


HEADS = [(1, 2, 128, 256), (2, 1, 64, 64), (3, 2, 32, 48), (7, 1, 64, 32), (16, 1, 32, 256)]
each_heads = pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "g{}-kv{}-d{}-b{}".format(*heads))


@each_dtype_or_half
@pytest.mark.parametrize("heads, splits", pairs(HEADS, [None, 1, 2]))
def test_decode(kernels, heads, splits, dtype):
    """At the ends of segments and tiles, with one segment or several in a program."""
    lengths = [2 * kernels + 1, kernels + 70, kernels + 1, kernels, kernels - 1, kernels - 60, 63, 1, 0]
    test_kernels.check_decode(lengths, heads, dtype, torch.nan, splits)


@each_dtype_or_half
@pytest.mark.parametrize("window, heads", pairs([1, 63, 100, 5000], HEADS[1:4]))
def test_decode_of_a_window(kernels, window, heads, dtype):
    lengths = [3 * kernels - 5, kernels + 64, kernels, 40, 1, 0]
    test_kernels.check_decode(lengths, heads, dtype, torch.nan, 2, window)


@each_dtype_or_half
@each_heads
def test_chunks(kernels, heads, dtype):
    num_new, num_before = [1, 63, 1, 0, 37, 65], [0, 0, kernels + 2, 40, kernels - 10, 2 * kernels - 20]
    test_kernels.check_prefill(num_new, num_before, heads, dtype, torch.nan)


@pytest.mark.parametrize("window", [1, 63, 100, 5000])
def test_chunks_of_a_window(kernels, window):
    num_new, num_before = [1, 90, 37], [0, 3 * kernels - 40, kernels - 10]
    test_kernels.check_prefill(num_new, num_before, HEADS[2], DTYPES[0], torch.nan, window)


@each_dtype_or_half
@test_kernels.each_scores
def test_soft_caps_and_sinks(kernels, scores, dtype):
    heads, lengths = (3, 2, 32, 48), [2 * kernels + 1, kernels, 63, 1, 0]
    scores = test_kernels.with_sinks(scores, heads, dtype)
    for splits, window in ((1, None), (2, 100)):
        test_kernels.check_decode(lengths, heads, dtype, torch.nan, splits, window, **scores)
        test_kernels.check_prefill([1, 90, 37], [0, kernels + 3, 40], heads, dtype, torch.nan, window, **scores)


@pytest.mark.parametrize("window", [None, 50])
def test_an_fp8_cache(window):
    dtype = torch.bfloat16 if CUDA else torch.float32
    test_fp8_cache.test_decode(test_fp8_cache.HEADS[1], (2, window), dtype, CUDA)
    test_fp8_cache.test_prefill(test_fp8_cache.HEADS[1], window, dtype, CUDA)


@each_dtype_or_half
@pytest.mark.parametrize("m, tiles", [(0, None), (1, None), (17, None), (70, None), (130, WIDE_128), (270, WIDE_256)])
def test_product(m, tiles, dtype):
    n, k = 200, 136
    if dtype == torch.float32:
        tiles = None  # those of 16 bits exceed the registers
    x, weight, bias = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype) / k**0.5, randn(n, dtype=dtype)
    assert_close(invariant_product(x, weight, tiles=tiles), linear_reference(x, weight))
    out = torch.empty(m, n, device=DEVICE)
    assert invariant_product(x, weight, bias, out, tiles) is out
    assert_close(out.to(dtype), linear_reference(x, weight) + bias.double())


def test_any_dimensions():
    weight, bias = randn(24, 16), randn(24)
    for x in (randn(16), randn(3, 2, 16), randn(1, 5, 16), randn(5, 32)[:, ::2]):
        y = cuda_ops.linear(x, weight, bias)
        assert y.shape == (*x.shape[:-1], 24)
        assert_close(y.view(-1, 24), linear_reference(x.reshape(-1, 16), weight) + bias.double())


@each_dtype_or_half
@pytest.mark.parametrize("m", [1, 17, 70])
def test_gate(m, dtype):
    """A product with one vector."""
    x, weight = randn(m, 136, dtype=dtype), randn(1, 136, dtype=dtype)
    assert_close(cuda_ops.gate_scores(x, weight), linear_reference(x, weight), 10)


@pytest.mark.parametrize("way", ["int8", "a16", "a8"])
@pytest.mark.parametrize("shape, m", pairs(WIDE, [1, 70]))
def test_product_of_8_bits(way, shape, m):
    n, k, rows, columns = shape
    values, scales = scaled(n, k, rows, columns, *[torch.int8] * (way == "int8"))
    x = randn(m, k, dtype=torch.float16)
    quantized = ops.quantize_rows(x, columns) if way == "a8" else x
    expected = (as_floats(quantized) if way == "a8" else x.double()) @ dequantize(values, scales, torch.float64).T
    y = invariant_product(quantized, (values, scales))
    assert y.dtype == x.dtype and (y - expected).norm() < (0.005 if way == "a8" else 0.002) * expected.norm()


def test_log_probabilities():
    """A token has the same bits alone and among the most likely ones."""
    logits, temperatures = randn(5, 1003), torch.tensor([1, 0.5, 2, 1.3, 0.7], device=DEVICE)
    ids = int32([7, 1002, 0, 500, 3])
    alone, ranks = cuda_ops.token_logprobs(logits, ids, temperatures)
    expected_ids, expected, expected_ranks = log_probabilities(logits, ids, 4, temperatures)
    found = cuda_ops.gather_logprobs(divided(logits, temperatures), expected_ids.long())
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[:, 0], alone) and torch.equal(ranks, expected_ranks)


def test_memory_of_decodes(kernels, monkeypatch):
    """What is kept free for them is what they allocate."""
    runner, found = Runner.__new__(Runner), []
    runner.config = SimpleNamespace(max_num_seqs=3, max_model_len=kernels + 1, tokens_per_row=2)
    runner.model = torch.nn.ModuleList([Attention(4, 32, 0.1, 2), Attention(4, 64, 0.1, 2, window=10)])
    monkeypatch.setattr(CUDAModelRunner, "size_kv_cache", lambda self, *arguments: found.append(arguments))
    runner.size_kv_cache(10**6)
    runner.config.max_model_len = kernels
    runner.size_kv_cache(10**6)
    assert found == [(10**6 - 2 * 24 * (64 + 2) * 4,), (10**6,)]


def test_long_heads_are_refused():
    """As those of Gemma 4, whose tiles would not fit into shared memory."""
    runner = Runner.__new__(Runner)
    runner.cache_groups, runner.device = {}, torch.device("cuda")
    runner.model = torch.nn.ModuleList([Attention(4, 256, 0.1, 2), Attention(4, 512, 0.1, 2)])
    with pytest.raises(ValueError, match="batch_invariant=True on CUDA: head_dim=512: must be at most 256"):
        runner.warm_up(lambda part: None)


def test_graphs_fill_tiles():
    assert capture_sizes(300, True) == [1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 300]
    assert {80, 96, 112, 144, 288} <= {*capture_sizes(300, False)}


@pytest.mark.gpu
@pytest.mark.parametrize("heads, window", pairs([(2, 8, 128, 256), (4, 8, 128, 64), (8, 2, 256, 64)], [None, 700]))
def test_decodes_and_chunks_have_the_same_bits(heads, window):
    group, kv_heads, head_dim, block_size = heads
    lengths, num_new = [5, 70, 600, 1030, 3000], [5, 69, 130, 60, 700]
    _, cache, context_lens, tables = paged(lengths, kv_heads, head_dim, block_size, torch.bfloat16, torch.nan)
    spec = AttentionSpec(window=window)
    if window:
        spec = replace(spec, soft_cap=2.0, sinks=randn(group * kv_heads))
    cache.spec = spec
    q = randn(sum(num_new), group * kv_heads, head_dim, dtype=torch.bfloat16)

    def chunks(q, num_new):
        starts = F.pad(int32(num_new).cumsum(0, dtype=torch.int32), (1, 0))
        spans = [(0, n) for n in num_new]  # in any order
        tiles = int32(query_tiles(spans, 0, cuda_ops.query_tile_size(group, head_dim, q.dtype)))
        return cuda_ops.prefill_attention(q, cache, starts, context_lens, tables, tiles)

    expected = chunks(q, num_new)
    half = [-(-n // 2) for n in num_new]
    ends = [torch.cat([part[-n:] for part, n in zip(x.split(num_new), half)]) for x in (q, expected)]
    assert torch.equal(chunks(ends[0], half), ends[1])
    rows = [
        (i, end) for i, (length, n) in enumerate(zip(lengths, num_new)) for end in range(length - n + 1, length + 1)
    ]
    which, bounds = zip(*rows)
    for splits in (1, 2, 6):
        args = int32(bounds), tables[[*which]].contiguous(), 3000, splits
        assert torch.equal(cuda_ops.decode_attention(q, cache, *args), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["bf16", "fp8", "fp8 rows"])
@pytest.mark.parametrize("n, k", [(1024, 3072), (6144, 1024), (4096, 4096)])
def test_products_have_the_same_bits(n, k, way):
    x, weight = randn(5000, k, dtype=torch.bfloat16), randn(n, k, dtype=torch.bfloat16)
    block = (1, k) if way == "fp8 rows" else (128, 128)
    if way != "bf16":
        weight = scaled(n, k, *block)
    rows = lambda m: x[:m].contiguous() if way == "bf16" else ops.quantize_rows(x[:m].contiguous(), block[1])
    expected = invariant_product(rows(5000), weight)
    for m in (1, 2, 7, 16, 17, 33, 64, 65, 100, 128, 129, 200, 256, 257, 300, 1000):
        assert torch.equal(invariant_product(rows(m), weight), expected[:m]), m


@pytest.mark.gpu
def test_gates_have_the_same_bits():
    x, weight = randn(300, 2048, dtype=torch.bfloat16), randn(1, 2048, dtype=torch.bfloat16)
    expected = cuda_ops.gate_scores(x, weight)
    for m in (1, 2, 17, 64, 129):
        assert torch.equal(cuda_ops.gate_scores(x[:m], weight), expected[:m]), m
