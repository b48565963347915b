"""Biases, penalties and filters: their plain definitions against transformers', and the kernels against
the definitions."""
import pytest
import torch
from transformers import (
    LogitsProcessorList, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper,
    TopPLogitsWarper,
)  # fmt: skip

triton = pytest.importorskip("triton")

from nanovllm.kernels import asked as columns  # noqa: E402
from nanovllm.kernels import ops  # noqa: E402
from nanovllm.layers import logits as plain  # noqa: E402
from nanovllm.layers.logits import FIELDS, MOST_BIASES, WIDTH, RequestTable, Rows, column  # noqa: E402
from nanovllm.layers.sampler import Sampler  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.float16] + CUDA * [torch.bfloat16]
BLOCK_SIZE = 16
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
FILTERS = [
    {"top_k": 1}, {"top_k": 20}, {"top_k": 5000}, {"top_p": 0.95}, {"top_p": 1e-6}, {"top_p": 0.5, "temperature": 3.0},
    {"min_p": 0.1}, {"min_p": 1.0}, {"top_k": 20, "top_p": 0.95}, {"top_k": 50, "top_p": 0.3, "min_p": 0.02},
    {"min_p": 0.3, "top_p": 0.6, "temperature": 0.7}, {"top_k": 400, "top_p": 0.99, "temperature": 10.0}, {},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.2}, {"top_k": 7, "temperature": 1e-4}, {"top_p": 0.9, "temperature": 100.0},
]  # fmt: skip

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


@pytest.fixture(autouse=True)
def same_random_numbers():
    torch.manual_seed(0)


def rows_of(
    requests: list[dict], biases: list | None = None, histories: list[list[int]] | None = None, vocab_size: int = 1
) -> Rows:
    """What rows ask, by the names of FIELDS, and their tokens; requests lie in the table in another order than the rows,
    and blocks lie about."""
    n = len(requests)
    params = torch.zeros(n, WIDTH, dtype=torch.int32)
    for i, request in enumerate(requests):
        for name, value in (DEFAULTS | request).items():
            column(params, name)[i] = value
    histories = histories or [[0]] * n
    width = max(-(-len(tokens) // BLOCK_SIZE) for tokens in histories)
    blocks = torch.randperm(n * width).int().view(n, width)
    token_ids = torch.full((n * width, BLOCK_SIZE), 3, dtype=torch.int32)
    for table, tokens in zip(blocks, histories):
        for i, token in enumerate(tokens):
            token_ids[table[i // BLOCK_SIZE], i % BLOCK_SIZE] = token
    positions = torch.tensor([len(tokens) - 1 for tokens in histories]).int()
    req_indices = torch.randperm(n).int()
    entries = [(req_indices[i] * MOST_BIASES + j, *b) for i, row in enumerate(biases or []) for j, b in enumerate(row)]
    slots, ids, values = map(torch.tensor, zip(*entries)) if entries else 3 * [torch.zeros(0)]
    table = RequestTable(n, vocab_size, torch.device(DEVICE))
    table.write(*(x.to(DEVICE) for x in (req_indices, params, slots.int(), ids.int(), values.float().view(torch.int32))))
    return table.rows(*(x.to(DEVICE) for x in (req_indices, token_ids, blocks, positions)))


def on_cpu(value):
    return type(value)(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in value))


def test_kernels_know_the_fields():
    assert [getattr(columns, name.upper()).value for name in FIELDS] == list(range(len(FIELDS)))


# -- filters -----------------------------------------------------------------------------------------------------------


def vllm_order(request: dict) -> LogitsProcessorList:
    """transformers' processors in vLLM's order."""
    request = DEFAULTS | request
    made = [TemperatureLogitsWarper(request["temperature"])]
    made += [MinPLogitsWarper(request["min_p"])] if request.get("min_p") else []
    made += [TopKLogitsWarper(request["top_k"])] if request.get("top_k") else []
    made += [TopPLogitsWarper(request["top_p"])] if request["top_p"] < 1 else []
    return LogitsProcessorList(made)


@pytest.mark.parametrize("vocab_size, spread", [(999, 1.0), (999, 10.0), (5003, 3.0)])
def test_filters_keep_what_transformers_keeps(vocab_size, spread):
    requests = [request for request in FILTERS if request.get("temperature", 1)]
    logits = torch.randn(len(requests), vocab_size) * spread
    logits[:, 7] = -torch.inf  # a token that is ruled out already
    least = plain.thresholds(logits, on_cpu(rows_of(requests)))
    for row, threshold, request in zip(logits, least, requests):
        theirs = vllm_order(request)(None, row[None])[0] > -torch.inf
        assert torch.equal((row >= threshold) & (row > -torch.inf), theirs), request
    assert least[requests.index({})] == -torch.inf


@each_dtype
@pytest.mark.parametrize("vocab_size", [1, 513, 9001])
def test_threshold_kernel(vocab_size, dtype):
    """Equal to the definition, ties included: float16 has many among so many."""
    requests = FILTERS
    logits = (torch.randn(len(requests), vocab_size) * torch.tensor([0.3, 4.0]).repeat(len(FILTERS) // 2)[:, None]).to(dtype)
    logits[3, 1::2] = -torch.inf
    logits[5:9, : vocab_size // 2] = 1.5
    wide = torch.full((len(requests), vocab_size + 5), torch.nan, dtype=dtype)
    logits = wide[:, 2:-3].copy_(logits)
    rows = rows_of(requests)
    least = ops.thresholds(logits.to(DEVICE), rows).cpu()
    expected = plain.thresholds(logits, on_cpu(rows))
    assert torch.equal(logits >= least[:, None], logits >= expected[:, None])
    assert least[FILTERS.index({})] == -torch.inf == least[-3]
    assert not rows.arrivals.any()


def test_threshold_kernel_at_zero():
    """Where numbers are densest, of both signs, and no distance that helps."""
    logits = torch.randn(4, 3000) * torch.tensor([1e-30, 1e-10, 1e-3, 1e10])[:, None]
    requests = [{"top_k": 700}, {"top_p": 0.5}, {"top_k": 2000, "top_p": 0.7}, {"top_p": 0.9, "temperature": 1e10}]
    rows = rows_of(requests)
    expected = plain.thresholds(logits, on_cpu(rows))
    assert torch.equal(logits >= ops.thresholds(logits.to(DEVICE), rows).cpu()[:, None], logits >= expected[:, None])


@pytest.mark.parametrize("request_", [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2, "temperature": 0.7}], ids=str)
def test_draws_follow_the_filtered_softmax(request_):
    """Chi-square of 100,000 draws; above 24.3 once in a thousand at seven degrees of freedom, and there are fewer."""
    n = 100_000
    logits = torch.tensor([2.0, 1.0, 0.0, -3.0, 1.5, -1.0, -torch.inf, 0.5, 1.9])
    least = plain.thresholds(logits[None], on_cpu(rows_of([request_]))).expand(n)
    temperature = torch.tensor(request_.get("temperature", 1.0))
    seeds, positions = torch.stack((torch.arange(n), torch.zeros(n)), 1).int(), torch.zeros(n, dtype=torch.int32)
    counts = Sampler()(logits.expand(n, -1), temperature.expand(n), seeds, positions, least).bincount(minlength=9).double()
    expected = n * vllm_order(request_)(None, logits[None])[0].softmax(-1).double()
    possible = expected > 0
    assert 1 < possible.sum() < 8 and counts[~possible].sum() == 0
    assert ((counts - expected).square() / expected)[possible].sum() < 24.3


@each_dtype
def test_sample_kernel_keeps_to_thresholds(dtype):
    logits = torch.randn(20, 5001).to(DEVICE, dtype)
    temperatures = torch.tensor([0.0, 5.0]).repeat(10).to(DEVICE)
    seeds, positions = torch.randint(1 << 30, (20, 2)).int().to(DEVICE), torch.arange(20).int().to(DEVICE)
    least = torch.linspace(-1, 3, 20).to(DEVICE)
    ids = ops.sample(logits, temperatures, seeds, positions, 7, thresholds=least)[1]
    assert torch.equal(ids.cpu(), Sampler()(logits.cpu(), *(x.cpu() for x in (temperatures, seeds, positions, least))))
    assert (logits.gather(1, ids[:, None].long())[:, 0] >= least).all()
    assert not torch.equal(ids, ops.sample(logits, temperatures, seeds, positions, 7)[1])


# -- biases and penalties ----------------------------------------------------------------------------------------------

EDITS = [
    {"is_penalized": 1, "repetition_penalty": 1.3},
    {"is_penalized": 1, "presence_penalty": 0.7},
    {"is_penalized": 1, "frequency_penalty": -0.3},
    {"is_penalized": 1, "repetition_penalty": 0.8, "presence_penalty": 1.5, "frequency_penalty": 0.25},
    {"num_biases": 3},
    {"num_biases": 2, "num_stops": 2, "is_penalized": 1, "repetition_penalty": 2.0, "frequency_penalty": 1.0},
    {"num_biases": 0, "num_stops": 3},
    {},
]
LENGTHS = [300, 40, 17, 270, 1, 33, 30, 5]


def edits(vocab_size: int):
    """Requests, histories of few different tokens, and the rows' biases; of two with stop ids one is past min_tokens."""
    histories = [torch.randint(max(1, min(vocab_size, 20)), (length,)).tolist() for length in LENGTHS]
    requests = [
        edit | {"num_prompt_tokens": max(1, length // 2), "min_len": length + 1 - (edit.get("num_stops") == 3)}
        for edit, length in zip(EDITS, LENGTHS)
    ]
    ids = [torch.randperm(min(vocab_size, 30))[: r.get("num_biases", 0)].tolist() for r in requests]
    biases = [[(i, 2.5 - i) for i in row] for row in ids]
    stops = [[(i, -torch.inf) for i in range(r.get("num_stops", 0))] for r in requests]
    return requests, histories, [a + b for a, b in zip(biases, stops)]


def test_penalties_by_definition():
    """Counted one token at a time, as vLLM says; the repetition penalty is transformers' too."""
    requests, histories, biases = edits(100)
    logits = torch.randn(len(requests), 100)
    expected = logits.clone()
    for x, request, tokens, bias in zip(expected, requests, histories, biases):
        request = {"presence_penalty": 0, "frequency_penalty": 0} | DEFAULTS | request
        for i, (token, value) in enumerate(bias):
            if i < request.get("num_biases", 0) or len(tokens) < request["min_len"]:
                x[token] += value
        if request["repetition_penalty"] != 1:
            x[:] = RepetitionPenaltyLogitsProcessor(request["repetition_penalty"])(torch.tensor([tokens]), x[None])[0]
        outputs = tokens[request["num_prompt_tokens"] :]
        for token in set(outputs):
            x[token] -= request["frequency_penalty"] * outputs.count(token) + request["presence_penalty"]
    edited = logits.clone()
    plain.penalize(edited, on_cpu(rows_of(requests, biases, histories)))
    torch.testing.assert_close(edited, expected)
    changed = (expected != logits).sum(1).tolist()
    assert all(changed[:6]) and changed[4:] == [3, changed[5], 0, 0] and (edited[5, :2] == -torch.inf).all()


@each_dtype
@pytest.mark.parametrize("vocab_size", [5, 1023, 5001])
def test_penalize_kernel(vocab_size, dtype):
    requests, histories, biases = edits(vocab_size)
    rows = rows_of(requests, biases, histories, vocab_size)
    rows = rows._replace(counts=rows.counts[:3])  # fewer programs than rows
    logits = torch.randn(len(requests), vocab_size).to(dtype)
    edited, expected = logits.to(DEVICE, copy=True), logits.clone()
    ops.penalize(edited, rows)
    plain.penalize(expected, on_cpu(rows))
    torch.testing.assert_close(edited.cpu(), expected, rtol=1e-6 if dtype == torch.float32 else 2e-3, atol=1e-6)
    assert torch.equal(edited.cpu() != logits, expected != logits) and (expected != logits).any()
    assert not rows.counts.any()
