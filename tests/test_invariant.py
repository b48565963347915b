"""`batch_invariant`: a request gets the same bits alone and in any batch."""

import random
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from common import EXPERTS_ON_TWO, TINY, TWO_GPUS
from test_models import CASES, MAX_LEN, VOCAB_SIZE, make_checkpoint
from test_speculation import accepted, drafting, few_likely, random_requests

from nanovllm import SamplingParams
from nanovllm.attention.sdpa import SDPABackend
from nanovllm.cache.kv_cache import AttentionSpec, KVCache
from nanovllm.config import Config
from nanovllm.distributed import process_group
from nanovllm.distributed.worker import Workers
from nanovllm.features.logprobs import log_probabilities
from nanovllm.invariant import invariant_operations
from nanovllm.invariant.cpu import cpu_ops as ops  # which it registers
from nanovllm.invariant.cpu_attention import InvariantBackend
from nanovllm.kernels import variant
from nanovllm.kernels.sampling.sampling_columns import WIDTH, column_index
from nanovllm.layers import sampler
from nanovllm.layers.linear import linear
from nanovllm.layers.sampler import SamplingRows
from nanovllm.utils.context import Context

PREFIX = [*range(50, 90)]


def make_requests(rng: random.Random, prefix=PREFIX, max_tokens=13) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of all lengths, some with a common prefix, greedy and sampled, with filters and penalties."""
    made = []
    for i in range(8):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range((1, 100, 15, 5, 33, 17, 16, 7)[i])]
        ways = [dict(temperature=0), dict(temperature=0.8), dict(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01)]
        edits = [{}, dict(repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={5: 2.0})]
        params = SamplingParams(
            **rng.choice(ways),
            **rng.choice(edits),
            seed=i,
            max_tokens=max_tokens if len(prompt) < 20 else rng.choice([1, 5]),  # some are preempted
            ignore_eos=True,
            logprobs=rng.choice([0, 0, 3]),
            prompt_logprobs=i // 2 if i % 4 == 0 else None,  # such prompts are not looked for in the cache
            detokenize=False,
        )
        made.append((prefix * (i % 2) + prompt, params))
    return made


def bits(output) -> list:
    """A token with all of its log-probabilities, for each of the prompt and of the answer."""
    answer = output.outputs[0]
    tokens = [(None, entries) for entries in (output.prompt_logprobs or [None])[1:]]
    tokens += zip(answer.token_ids, answer.logprobs, strict=True)
    return [(i, [(key, x.logprob, x.rank) for key, x in entries.items()]) for i, entries in tokens]


def assert_invariant(make_llm, folder: str, few_blocks: int | None = None, **settings) -> None:
    """Each request alone, in whole chunks, against random batches in small engines, one of them of few blocks."""
    rng = random.Random(str(settings))
    on_gpu = settings.get("device") == "cuda"
    block_size, default_blocks = (64, 6) if on_gpu else (16, 6)
    num_blocks = few_blocks or default_blocks, 64  # with few blocks there are preemptions, with many prefix hits
    settings |= dict(batch_invariant=True, max_model_len=MAX_LEN, kvcache_block_size=block_size)
    made = make_requests(rng, PREFIX[:35] * 2, 90 if few_blocks else 60) if on_gpu else make_requests(rng)
    llm = make_llm(folder, enable_prefix_caching=False, max_num_seqs=1, num_kvcache_blocks=64, **settings)
    alone = [bits(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt, params in made]
    llm.exit()
    num_preemptions = num_found = num_compared = 0
    for i in range(2):
        llm = make_llm(
            folder,
            num_kvcache_blocks=num_blocks[i],
            max_num_batched_tokens=(33, rng.choice([7, 16, 64]))[i],
            max_num_seqs=8,
            async_scheduling=i % 2 == 0,
            enforce_eager=i == 1,
            **settings,
        )
        room = (num_blocks[i] - 1) * block_size  # a prompt that takes all blocks would wait for the others to end
        order = [j for j in rng.sample(range(len(made)), len(made)) if len(made[j][0]) + made[j][1].max_tokens <= room]
        if i == 0:  # those with long answers run at the same time, first those whose blocks have most room left
            order.sort(key=lambda j: (-made[j][1].max_tokens, 0 if on_gpu else len(made[j][0]) % block_size))
        outputs = llm.generate([made[j][0] for j in order], [made[j][1] for j in order], use_tqdm=False)
        for j, output in zip(order, outputs):
            found = bits(output)
            differing = [n for n, (x, y) in enumerate(zip(found, alone[j], strict=True)) if x != y]
            assert not differing, (j, made[j][1], differing)
            num_compared += len(found)
            num_found += output.num_cached_tokens
        num_preemptions += llm.stats()["preemptions"]
        llm.exit()
    assert num_preemptions and num_found and num_compared > 200, (num_preemptions, num_found, num_compared)


@pytest.mark.parametrize(
    "name, settings",
    [
        ("llama-3.2", {"dtype": "float32"}),
        ("mistral-window", {"dtype": "bfloat16", "quantization": "int8"}),
        ("qwen3", {"quantization": "int4"}),
        ("qwen3-moe", {"dtype": "float32", "kv_cache_dtype": "fp8", "logprobs_mode": "processed_logprobs"}),
        ("gemma4-experts", {"dtype": "float32"}),
        ("gemma4-shared", {"dtype": "float32"}),
    ],
)
def test_no_bit_differs(make_llm, tmp_path, name, settings):
    if name not in CASES:
        pytest.skip("transformers 4")
    assert_invariant(make_llm, make_checkpoint(tmp_path, name), **settings)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, settings",
    [
        ("llama-3.2", {}),
        ("qwen2", {"dtype": "float16"}),  # biases
        ("mistral-window", {"quantization": "int8"}),
        ("mistral-window", {"quantization": "int4"}),
        ("qwen3", {"quantization": "fp8", "logprobs_mode": "processed_logprobs"}),
        ("qwen3", {"kv_cache_dtype": "fp8", "logprobs_mode": "temperature_logprobs"}),
        ("qwen3-moe", {}),
        ("qwen3-moe", {"quantization": "fp8"}),
        pytest.param("llama-3.2", {"tensor_parallel_size": 2}, marks=TWO_GPUS),
        pytest.param("qwen3-moe", {"tensor_parallel_size": 2}, marks=TWO_GPUS),
        pytest.param("qwen3-moe", EXPERTS_ON_TWO | {"quantization": "fp8"}, marks=TWO_GPUS),
    ],
)
def test_no_bit_differs_on_a_gpu(make_llm, tmp_path, name, settings):
    assert_invariant(make_llm, make_checkpoint(tmp_path, name), **{"device": "cuda", "dtype": "bfloat16"} | settings)


@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks(make_llm, tmp_path):
    """For each number of ranks, its own bits."""
    folder = make_checkpoint(tmp_path, "llama-3.2")
    settings = dict(batch_invariant=True, max_model_len=MAX_LEN, kvcache_block_size=16, num_kvcache_blocks=40)
    llm = make_llm(folder, tensor_parallel_size=2, **settings)
    made = make_requests(random.Random(1))
    together = llm.generate([prompt for prompt, _ in made], [params for _, params in made], use_tqdm=False)
    for (prompt, params), output in zip(made[:3], together):
        assert bits(llm.generate([prompt], params, use_tqdm=False)[0]) == bits(output)


def assert_drafts_change_no_bit(
    make_engine, vocab_size: int, on_gpu: bool = False, schedulings: Iterable[bool] = (False, True)
) -> None:
    """Some are right, as few tokens are likely; in engines with preemptions and chunks, by default sync and async."""
    block_size, num_blocks, max_tokens = (64, 3, 60) if on_gpu else (16, 8, 24)
    prompts, params = (x[:6] for x in random_requests(vocab_size, random.Random(3)))
    params = [replace(x, logprobs=2, n=1, max_tokens=max_tokens, ignore_eos=True) for x in few_likely(params)]
    found = []
    for settings in ({}, *(drafting("ngram") | dict(async_scheduling=x) for x in schedulings)):
        small = dict(num_kvcache_blocks=num_blocks, kvcache_block_size=block_size)
        small |= dict(max_num_batched_tokens=48, max_model_len=128)
        llm = make_engine(batch_invariant=True, max_num_seqs=6, **small, **settings)
        found.append([bits(x) for x in llm.generate(prompts, params, use_tqdm=False)])
        if settings:
            assert accepted(llm)[0] > 20 and llm.stats()["preemptions"] > 0
        llm.exit()
    assert all(x == found[0] for x in found[1:])


def test_drafts_change_no_bit(make_llm, tmp_path):
    folder = make_checkpoint(tmp_path, "mistral-window")
    assert_drafts_change_no_bit(partial(make_llm, folder, dtype="bfloat16"), VOCAB_SIZE)


@pytest.mark.gpu
def test_drafts_change_no_bit_on_a_gpu(make_llm, free_drafts, tmp_path):
    folder = make_checkpoint(tmp_path, "mistral-window")
    assert_drafts_change_no_bit(partial(make_llm, folder, device="cuda", dtype="bfloat16"), VOCAB_SIZE, on_gpu=True)


def test_beside_an_engine_without(make_llm, small_model):
    """The setting belongs to an engine, not to the process; and the answers are almost those of the other one."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
    plain, ours = make_llm(small_model), make_llm(small_model, batch_invariant=True)
    for _ in range(2):
        outputs = [llm.generate([PREFIX], params, use_tqdm=False)[0].outputs[0] for llm in (plain, ours)]
        logprobs = [[entry[i].logprob for i, entry in zip(x.token_ids, x.logprobs)] for x in outputs]
        assert outputs[0].token_ids == outputs[1].token_ids and logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    assert variant.get() == ""


# -- operations --------------------------------------------------------------------------------------------------------


@contextmanager
def invariant():
    with invariant_operations(), ops.one_thread():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_have_one_shape(monkeypatch, dtype):
    """Whatever the number of rows, the library sees ROWS of them."""
    seen = []
    weight, bias = torch.randn(24, 40).to(dtype), torch.randn(24).to(dtype)
    x = torch.randn(50, 40).to(dtype)
    expected = F.linear(x.double(), weight.double(), bias.double())

    def watched(rows, *arguments):
        seen.append((rows.shape, rows.is_contiguous(), rows.data_ptr() % 64, torch.get_num_threads()))
        return torch._C._nn.linear(rows, *arguments)

    monkeypatch.setattr(ops.F, "linear", watched)
    with invariant():
        for num_rows in (0, 1, 15, 16, 17, 50):
            y = linear(x[:num_rows], weight, bias)
            torch.testing.assert_close(y.double(), expected[:num_rows], atol=0.1, rtol=0.02)
        assert torch.equal(linear(x.view(2, 5, 5, 40), weight, bias), y.view(2, 5, 5, 24)), "other dimensions"
        assert torch.get_num_threads() == 1
    assert set(seen) == {((ops.ROWS, 40), True, 0, torch.get_num_threads())} and len(seen) == 1 + 1 + 1 + 2 + 4 + 4


def test_rows_are_sampled_alone(monkeypatch):
    """And a log-probability is the same, whether others want those of the most likely tokens or not."""
    torch.manual_seed(0)
    logits, temperatures = torch.randn(7, 203), torch.tensor([0.0, 1.0, 0.5, 2.0, 0.0, 1.0, 3.0])
    seeds, positions = torch.arange(14, dtype=torch.int32).view(7, 2), torch.arange(7, dtype=torch.int32)
    params = torch.zeros(7, WIDTH, dtype=torch.int32)
    for name, values in {"temperature": temperatures, "top_p": torch.full((7,), 0.8), "min_p": torch.zeros(7)}.items():
        params[:, column_index(name)] = values.view(torch.int32)
    rows = SamplingRows(params, *[None] * 5)
    expected = sampler.logit_cutoffs(logits, rows)
    drawn = sampler.sample(logits, temperatures, seeds, positions, 0, cutoffs=expected)
    num_rows, add_noise = [], sampler.add_noise

    def watched(scores, *arguments):
        num_rows.append(len(scores))
        return add_noise(scores, *arguments)

    monkeypatch.setattr(sampler, "add_noise", watched)
    with invariant():
        assert torch.equal(sampler.logit_cutoffs(logits, rows), expected)
        scores, token_ids = sampler.sample(logits, temperatures, seeds, positions, 0, cutoffs=expected)
        assert torch.equal(token_ids, drawn[1]) and num_rows == [1] * 5
        torch.testing.assert_close(scores, drawn[0])
        few, many = (log_probabilities(logits, token_ids, num_top) for num_top in (0, 4))
        assert all(torch.equal(x.view(7, -1)[:, 0], y.view(7, -1)[:, 0]) for x, y in zip(few, many))


@pytest.mark.parametrize("window, is_special", [(None, False), (40, False), (None, True), (40, True)])
def test_attention(window, is_special):
    """Near the plain backend; a chunk's queries have the bits of decode steps."""
    torch.manual_seed(0)
    lengths, chunks = [1, 17, 256, 257, 600], [1, 1, 1, 30, 41]
    num_blocks = [-(-length // 16) for length in lengths]
    tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32)
    for row, order in zip(tables, torch.randperm(sum(num_blocks)).int().split(num_blocks)):
        row[: len(order)] = order
    cache = KVCache(torch.randn(2, sum(num_blocks), 16, 2, 24))
    cache.spec = AttentionSpec(window=window, scale=0.3)
    if is_special:
        cache.spec = replace(cache.spec, soft_cap=2.0, sinks=2 * torch.randn(6))
    q = torch.randn(sum(chunks), 6, 24)

    def context(lengths, tables, chunks):
        starts = torch.tensor([0, *chunks]).cumsum(0).int()
        lengths = torch.tensor(lengths, dtype=torch.int32)
        of_chunks = dict(cu_seqlens_q=starts, max_seqlen_q=max(chunks)) if max(chunks) > 1 else {}
        return Context(bool(of_chunks), context_lens=lengths, block_tables=tables, num_decode_rows=3, **of_chunks)

    found = InvariantBackend().attend(q, cache, context(lengths, tables, chunks))
    torch.testing.assert_close(found, SDPABackend().attend(q, cache, context(lengths, tables, chunks)))
    first = 0
    for length, table, size in zip(lengths, tables, chunks):
        ends = [*range(length - size + 1, length + 1)]
        decode = context(ends, table.expand(size, -1), [1] * size)
        assert torch.equal(
            InvariantBackend().attend(q[first : first + size], cache, decode), found[first : first + size]
        )
        first += size


def test_a_library_whose_rows_differ_is_refused(make_llm, monkeypatch):
    def uneven(x, weight, bias=None):
        y = torch._C._nn.linear(x, weight, bias)
        y[-1] *= 1 + 1e-6
        return y

    monkeypatch.setattr(ops.F, "linear", uneven)
    with pytest.raises(RuntimeError, match=r"equal rows times \[\d+, \d+\] of torch.float32 have different results"):
        make_llm(batch_invariant=True)


def test_settings(monkeypatch):
    def refused(message, **settings):
        with pytest.raises(ValueError, match=message):
            Config(TINY, batch_invariant=True, **{"device": "cpu"} | settings)

    assert Config(TINY, device="cpu", batch_invariant=True).attention_backend == "sdpa"
    refused(
        "batch_invariant=True has its own backend: attention_backend='flash'", device="cpu", attention_backend="flash"
    )
    refused("batch_invariant=True: tensor_parallel_size=4: must be one of 1, 2", tensor_parallel_size=4)
    monkeypatch.setattr("nanovllm.config._resolve_device", lambda name, num_ranks: "cuda:0")
    assert Config(TINY, device="cuda", batch_invariant=True).attention_backend == "triton"
    several = Config(TINY, device="cuda", batch_invariant=True, tensor_parallel_size=4)
    monkeypatch.setattr(process_group, "_can_read_peers", lambda device, rank, size: size == 2)
    with pytest.raises(
        ValueError, match="tensor_parallel_size=4: must be 1, as these GPUs can't read each other's memory"
    ):
        Workers(several)
    refused("batch_invariant=True has its own backend: attention_backend='sdpa'", attention_backend="sdpa")
