"""Biases, penalties and filters: their plain definitions against transformers', and the kernels against
the definitions."""

import math

import numpy as np
import pytest
import torch
from common import CUDA, DEVICE, DTYPES, each_dtype, pairs, randn
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

triton = pytest.importorskip("triton")

from nanovllm.features.logit_edits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASES, EditTables, penalize
from nanovllm.features.logprobs import log_probabilities, token_logprobs
from nanovllm.kernels import ops
from nanovllm.kernels.sampling import filters, penalties, sampling_columns
from nanovllm.kernels.sampling.sampling_columns import COLUMNS, WIDTH, column
from nanovllm.layers import sampler as plain
from nanovllm.layers.sampler import KEEPS_ALL, Sampler, SamplingRows, token_keys

BLOCK_SIZE = 16
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
FILTERS = [
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 5000},
    {"top_p": 0.95},
    {"top_p": 1e-6},
    {"top_p": 0.5, "temperature": 3.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.95},
    {"top_k": 50, "top_p": 0.3, "min_p": 0.02},
    {"min_p": 0.3, "top_p": 0.6, "temperature": 0.7},
    {"top_k": 400, "top_p": 0.99, "temperature": 10.0},
    {},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.2},
    {"top_k": 7, "temperature": 1e-4},
    {"top_p": 0.9, "temperature": 100.0},
]


@pytest.fixture(autouse=True)
def same_random_numbers():
    torch.manual_seed(0)


def rows_of(
    requests: list[dict],
    biases: list | None = None,
    histories: list[list[int]] | None = None,
    vocab_size: int = 1,
    allowed: list[set[int]] = (),
    bad_words: list[list[list[int]]] = (),
) -> tuple[SamplingRows, EditTables]:
    """Rows with parameters by the names of COLUMNS, and their tokens. Requests lie in the table in another order than
    the rows, and blocks lie in any order."""
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
    entries = [(req_indices[i] * MAX_BIASES + j, *b) for i, row in enumerate(biases or []) for j, b in enumerate(row)]
    slots, ids, values = map(torch.tensor, zip(*entries)) if entries else 3 * [torch.zeros(0)]
    masks = torch.zeros(n, -(-vocab_size // 32), dtype=torch.int64)
    for mask, ids_of_row in zip(masks, allowed):
        for token_id in ids_of_row:
            mask[token_id // 32] |= 1 << token_id % 32
    words = [
        (req_indices[i] * MAX_BAD_WORDS + j, word) for i, row in enumerate(bad_words) for j, word in enumerate(row)
    ]
    words = [(entry, [-1] * (MAX_BAD_WORD_TOKENS - len(word)) + word) for entry, word in words]
    word_slots, words = map(torch.tensor, zip(*words)) if words else 2 * [torch.zeros(0)]
    tables = EditTables.zeros(n, vocab_size, 1, torch.device(DEVICE))
    names = "bias_entries", "bias_ids", "bias_bits", "mask_indices", "masks", "bad_word_entries", "bad_words"
    arrays = slots, ids, values.float().view(torch.int32), req_indices, masks, word_slots, words
    tables.write({name: x.int().to(DEVICE) for name, x in zip(names, arrays) if len(x)})
    rows = params, req_indices, positions, blocks, token_ids, torch.zeros(n, dtype=torch.int32)
    return SamplingRows(*(x.to(DEVICE) for x in rows)), tables


def on_cpu(value):
    return type(value)(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in value))


def test_kernels_know_the_columns():
    names = [*COLUMNS]
    for module, number in ((filters, 4), (penalties, 10)):
        constants = {name: value.value for name, value in vars(module).items() if name.lower() in names}
        assert len(constants) == number
        assert all(names.index(name.lower()) == i for name, i in constants.items())
    assert len({*names}) == len(names) <= WIDTH - 2
    assert names[sampling_columns.EDITS] == ["is_penalized", "num_biases", "num_stops", "num_bad_words"]


# -- filters -----------------------------------------------------------------------------------------------------------


def vllm_order(request: dict) -> LogitsProcessorList:
    """transformers' processors in vLLM's order."""
    request = DEFAULTS | request
    made = [TemperatureLogitsWarper(request["temperature"])]
    made += [MinPLogitsWarper(request["min_p"])] if request.get("min_p") else []
    made += [TopKLogitsWarper(request["top_k"])] if request.get("top_k") else []
    made += [TopPLogitsWarper(request["top_p"])] if request["top_p"] < 1 else []
    return LogitsProcessorList(made)


def kept(logits: torch.Tensor, cutoffs: torch.Tensor) -> torch.Tensor:
    """Which of logits [S, vocabulary] are kept and possible."""
    keys = token_keys(logits.float(), torch.arange(logits.shape[1]))
    return (keys >= cutoffs.cpu()[:, None]) & (logits > -torch.inf)


@pytest.mark.parametrize("vocab_size, spread", [(999, 1.0), (999, 10.0), (5003, 3.0)])
def test_filters_keep_what_transformers_keeps(vocab_size, spread):
    requests = [request for request in FILTERS if request.get("temperature", 1)]
    logits = torch.randn(len(requests), vocab_size) * spread
    logits[:, 7] = -torch.inf  # a token that is ruled out already
    cutoffs = plain.logit_cutoffs(logits, on_cpu(rows_of(requests)[0]))
    for row, ours, request in zip(logits, kept(logits, cutoffs), requests):
        theirs = vllm_order(request)(None, row[None])[0] > -torch.inf
        assert torch.equal(ours, theirs), request
    assert cutoffs[requests.index({})] == KEEPS_ALL


def kept_by_definition(logits: list[float], request: dict) -> tuple[set[int], set[int]]:
    """The ids that are kept, and those that would be if top_p were larger by what float32 rounds: a token at a time."""
    request = DEFAULTS | request
    order = sorted((i for i, x in enumerate(logits) if x > -math.inf), key=lambda i: (-logits[i], i))
    best, temperature = logits[order[0]], request["temperature"]
    if temperature == 0:
        return {*order}, {*order}
    weights = [math.exp((logits[i] - best) / temperature) for i in order]
    order = order[: sum(weight >= request.get("min_p", 0) * (1 - 1e-6) for weight in weights)]
    order = order[: request.get("top_k") or None]
    weights = weights[: len(order)]
    nuclei = []
    for top_p in (request["top_p"], request["top_p"] * (1 - 1e-5), request["top_p"] * (1 + 1e-5)):
        up_to, n = 0.0, 0
        while n < len(order) and (up_to < top_p * sum(weights) or request["top_p"] == 1):
            up_to, n = up_to + weights[n], n + 1
        nuclei.append(n)
    return {*order[: nuclei[1]]}, {*order[: nuclei[2]]}


N = 1300
EQUALS = {
    "all equal": lambda: torch.full((N,), 2.5),
    "few values": lambda: torch.randint(3, (N,)) / 2,
    "signed zeros": lambda: torch.where(torch.arange(N) % 3 > 0, -0.0, 0.0),
    "coarse": lambda: (torch.randn(N) * 8).round() / 4,
}
TIES = [  # some of them in the interpreter too, which is slow
    ("all equal", {"top_k": 6}),
    ("few values", {"top_p": 0.1}),
    ("signed zeros", {"top_k": 40, "top_p": 0.7}),
    ("coarse", {"top_k": 900, "top_p": 0.9, "min_p": 0.01}),
    ("coarse", {"top_p": 0.5, "temperature": 3.0}),
    ("few values", {"top_k": 300}),
]
ALL_TIES = TIES + [
    (kind, request)
    for kind in EQUALS
    for request in ({"top_k": 1}, {"top_k": 700}, {"top_p": 0.999}, {"min_p": 0.2}, {"top_k": 5, "min_p": 0.9})
]


@pytest.mark.parametrize("where", ["cpu", "kernel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_equal_logits_are_kept_by_the_lower_id(dtype, where):
    """Of a hundred equals too, top-k keeps k tokens and top-p as few as have the mass."""
    if where == "kernel" and dtype == torch.bfloat16 and not CUDA:
        pytest.skip("the interpreter has no bfloat16")
    kinds, requests = zip(*(ALL_TIES if CUDA or where == "cpu" else TIES))
    logits = torch.stack([EQUALS[kind]() for kind in kinds]).to(dtype)
    logits[:, ::7] = -torch.inf
    rows, _ = rows_of(requests)
    if where == "cpu":
        cutoffs = plain.logit_cutoffs(logits, on_cpu(rows))
    else:
        cutoffs = ops.logit_cutoffs(logits.to(DEVICE), rows)
    for row, request, ours in zip(logits.tolist(), requests, kept(logits, cutoffs)):
        ours = {*ours.nonzero().flatten().tolist()}
        least, most = kept_by_definition(row, request)
        assert least <= ours <= most, request
        assert least == most or "top_p" in request


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_top_1_is_greedy(dtype):
    """Where many logits are the largest too, at any temperature."""
    logits = (torch.randn(50, 300) * 2).round().to(dtype)
    requests = [{"top_k": 1, "temperature": 10.0}, {"top_p": 1e-6, "temperature": 0.5}] * 25
    rows = on_cpu(rows_of(requests)[0])
    noise = torch.randint(1 << 30, (50, 2)).int(), torch.arange(50).int()
    ids = Sampler()(logits, column(rows.params, "temperature"), *noise, plain.logit_cutoffs(logits, rows))
    assert ((logits == logits.amax(1, True)).sum(1) > 1).any()
    assert ids.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert torch.equal(ids, Sampler()(logits, torch.zeros(50), *noise))


@pytest.mark.parametrize(
    "vocab_size, dtype",
    [(1, torch.float16), (513, torch.float32), *((5001, dtype) for dtype in DTYPES if CUDA or dtype != torch.float32)],
    ids=str,
)
def test_cutoff_kernel(vocab_size, dtype):
    """It keeps what the definition keeps, ties included: float16 has many among so many."""
    requests = FILTERS if vocab_size > 1000 or CUDA else FILTERS[::3]  # the interpreter is slow
    spread = torch.tensor([0.3, 4.0]).repeat(len(requests) // 2)[:, None]
    logits = (torch.randn(len(requests), vocab_size) * spread).to(dtype)
    logits[3, 1::2] = -torch.inf
    logits[5:9, : vocab_size // 2] = 1.5
    wide = torch.full((len(requests), vocab_size + 5), torch.nan, dtype=dtype)
    logits = wide[:, 2:-3].copy_(logits)
    rows, _ = rows_of(requests)
    cutoffs = ops.logit_cutoffs(logits.to(DEVICE), rows).cpu()
    ours, expected = kept(logits, cutoffs), kept(logits, plain.logit_cutoffs(logits, on_cpu(rows)))
    for i in (ours != expected).any(1).nonzero().flatten().tolist():  # at the bound of top-p, where sums are rounded
        least, most = kept_by_definition(logits[i].tolist(), requests[i])
        assert least <= {*ours[i].nonzero().flatten().tolist()} <= most and "top_p" in requests[i]
    assert all(c == KEEPS_ALL for c, r in zip(cutoffs, requests) if not r or r.get("temperature") == 0)
    assert not rows.num_finished_programs.any()


def test_cutoff_kernel_at_zero():
    """Where numbers are densest, of both signs, and no distance that helps."""
    logits = torch.randn(4, 3000) * torch.tensor([1e-30, 1e-10, 1e-3, 1e10])[:, None]
    requests = [{"top_k": 700}, {"top_p": 0.5}, {"top_k": 2000, "top_p": 0.7}, {"top_p": 0.9, "temperature": 1e10}]
    rows, _ = rows_of(requests)
    expected = kept(logits, plain.logit_cutoffs(logits, on_cpu(rows)))
    different = (kept(logits, ops.logit_cutoffs(logits.to(DEVICE), rows)) != expected).sum(1)
    assert different[0] == 0 and different.max() <= 1  # of weights that are all equal, or nearly so


@pytest.mark.parametrize("request_", [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2, "temperature": 0.7}], ids=str)
def test_draws_follow_the_filtered_softmax(request_):
    """Chi-square of 100,000 draws; above 24.3 once in a thousand at seven degrees of freedom, and there are fewer."""
    n = 100_000
    logits = torch.tensor([2.0, 1.0, 0.0, -3.0, 1.5, -1.0, -torch.inf, 0.5, 1.9])
    cutoffs = plain.logit_cutoffs(logits[None], on_cpu(rows_of([request_])[0])).expand(n)
    temperature = torch.tensor(request_.get("temperature", 1.0))
    seeds, positions = torch.stack((torch.arange(n), torch.zeros(n)), 1).int(), torch.zeros(n, dtype=torch.int32)
    drawn = Sampler()(logits.expand(n, -1), temperature.expand(n), seeds, positions, cutoffs)
    counts = drawn.bincount(minlength=9).double()
    expected = n * vllm_order(request_)(None, logits[None])[0].softmax(-1).double()
    possible = expected > 0
    assert 1 < possible.sum() < 8 and counts[~possible].sum() == 0
    assert ((counts - expected).square() / expected)[possible].sum() < 24.3


@pytest.mark.parametrize("first_id, dtype", pairs([0, 4099], DTYPES))
def test_sample_kernel_keeps_to_cutoffs(first_id, dtype):
    """Whole rows, and a rank's part of them, whose cutoffs are of all ids."""
    logits = (torch.randn(20, 5001) * 8).round().div(8).to(DEVICE, dtype)
    temperatures = torch.tensor([0.0, 5.0]).repeat(10).to(DEVICE)
    seeds, positions = torch.randint(1 << 30, (20, 2)).int().to(DEVICE), torch.arange(20).int().to(DEVICE)
    ids = torch.arange(5001) + first_id
    cutoffs = token_keys(torch.linspace(-1, 3, 20).mul(8).round().div(8), ids[torch.randint(5001, (20,))]).to(DEVICE)
    cutoffs[0] = KEEPS_ALL
    best, drawn = ops.sample(logits, temperatures, seeds, positions, first_id, cutoffs=cutoffs)
    noise = [x.cpu() for x in (temperatures, seeds, positions, cutoffs)]
    assert torch.equal(drawn.cpu(), Sampler(first_id=first_id)(logits.cpu(), *noise))
    keys = token_keys(logits.cpu().float(), ids).gather(1, drawn.cpu()[:, None].long() - first_id)[:, 0]
    possible = best.cpu() > -torch.inf
    assert (keys >= cutoffs.cpu())[possible].all() and possible.sum() >= 15
    assert not torch.equal(drawn, ops.sample(logits, temperatures, seeds, positions, first_id)[1])


def test_sample_kernel_keeps_the_last_token():
    """Of equal logits those up to the cutoff's id, which is the only one here: the ids before it have lower ones."""
    ids = torch.tensor([0, 3, 2047, 5000])
    logits = torch.where(torch.arange(5001) < ids[:, None], -1.0, 0.0).to(DEVICE)
    temperatures, zeros = torch.tensor([1.0, 0.0, 1.0, 1.0], device=DEVICE), torch.zeros(4, 3).int().to(DEVICE)
    cutoffs = token_keys(torch.zeros(4), ids).to(DEVICE)
    drawn = ops.sample(logits, temperatures, zeros[:, :2].contiguous(), zeros[:, 2].contiguous(), 0, cutoffs=cutoffs)[1]
    assert drawn.tolist() == ids.tolist()


# -- log-probabilities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("most", [0, 5, 400, 1 << 30])
def test_log_probabilities_are_in_order(most, dtype):
    """By logit and then by id, of many that are equal; and a rank is a token's place in that order."""
    logits = (torch.randn(6, 400) * 3).round().to(dtype)
    logits[0, :300] = -torch.inf
    logits[1] = torch.where(torch.arange(400) % 3 > 0, -0.0, 0.0)
    chosen = torch.tensor([399, 0, 17, int(logits[3].float().argmax()), 2, 8])
    ids, values, ranks = log_probabilities(logits, chosen, most)
    for i, row in enumerate(logits.tolist()):
        order = sorted(range(400), key=lambda token_id: (-row[token_id], token_id))
        assert ids[i].tolist() == [chosen[i], *order[:most]]
        assert order[ranks[i] - 1] == chosen[i]
    torch.testing.assert_close(values, logits.float().log_softmax(-1).gather(1, ids))
    assert ranks[3] == 1


@each_dtype
@pytest.mark.parametrize("num_rows, vocab_size, is_divided", [(1, 1, False), (3, 1000, True), (2, 8200, False)])
def test_token_logprobs(num_rows, vocab_size, is_divided, dtype):
    logits = (randn(num_rows, vocab_size + 3, dtype=dtype) * 3)[:, :vocab_size]  # rows that do not follow each other
    token_ids = torch.arange(num_rows, device=DEVICE, dtype=torch.int32) * 700 % vocab_size
    if vocab_size > 1:
        logits[0, 1:-3] = -torch.inf  # more than a tile
        logits[-1] = logits[-1].round()  # many are equal
    temperatures = torch.linspace(0.3, 2, num_rows, device=DEVICE) if is_divided else None
    divided = logits.double() if temperatures is None else logits.double() / temperatures[:, None].double()
    expected = divided.log_softmax(-1).gather(1, token_ids[:, None].long()).squeeze(1)
    for compute in (ops.token_logprobs, token_logprobs.__wrapped__):
        logprobs, ranks = compute(logits, token_ids, temperatures)
        torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
        for row, token_id, rank in zip(logits.tolist(), token_ids.tolist(), ranks.tolist()):
            assert sorted(range(vocab_size), key=lambda i: (-row[i], i))[rank - 1] == token_id


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
    """Requests, histories of few different tokens, and biases of rows. Of two with stop ids one is past min_tokens."""
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
    penalize(edited, *map(on_cpu, rows_of(requests, biases, histories)))
    torch.testing.assert_close(edited, expected)
    changed = (expected != logits).sum(1).tolist()
    assert all(changed[:6]) and changed[4:] == [3, changed[5], 0, 0] and (edited[5, :2] == -torch.inf).all()


@each_dtype
@pytest.mark.parametrize("vocab_size", [5, 1023, 5001])
def test_penalize_kernel(vocab_size, dtype):
    requests, histories, biases = edits(vocab_size)
    rows, tables = rows_of(requests, biases, histories, vocab_size)
    tables = tables._replace(token_counts=tables.token_counts[:3])  # fewer programs than rows
    logits = torch.randn(len(requests), vocab_size).to(dtype)
    edited, expected = logits.to(DEVICE, copy=True), logits.clone()
    ops.penalize(edited, rows, tables)
    penalize(expected, on_cpu(rows), on_cpu(tables))
    torch.testing.assert_close(edited.cpu(), expected, rtol=1e-6 if dtype == torch.float32 else 2e-3, atol=1e-6)
    assert torch.equal(edited.cpu() != logits, expected != logits) and (expected != logits).any()
    assert not tables.token_counts.any()


# -- what may not be generated -----------------------------------------------------------------------------------------


def bans(vocab_size: int):
    """Requests that may generate few ids, and not some words of ids, with what they have: some words are begun."""
    few, no = {*range(0, min(vocab_size, 70), 3), vocab_size - 1}, []
    long = [i % 4 for i in range(MAX_BAD_WORD_TOKENS)]
    requests = [
        ({"has_allowed_ids": 1}, few, no, [1, 2], 1),
        ({}, no, [[0], [1, 3], [2, 3], [4]], [1, 2], 1),  # one has begun, one would have with the prompt
        ({}, no, [[2, 4], [1, 2, 3], [0, 1, 2, 0]], [0, 1, 2], 1),
        ({}, no, [long], [3, *long[:-1]], 1),
        ({}, no, [long], long[:-1], 1),  # its first token is the prompt's
        ({}, no, [[i % 5, i % 5] for i in range(MAX_BAD_WORDS)], [0] * 40, 20),
        ({"has_allowed_ids": 1, "is_penalized": 1, "repetition_penalty": 2.0}, few, [[0], [2, 3]], [3, 2] * 20, 3),
        ({}, no, no, [1], 1),
    ]
    rows = [
        request | {"num_bad_words": len(words), "num_prompt_tokens": num_prompt}
        for request, _, words, _, num_prompt in requests
    ]
    banned = []
    for request, allowed, words, tokens, num_prompt in requests:
        output = tokens[num_prompt:]
        banned.append({*range(vocab_size)} - allowed if request else set())
        banned[-1] |= {
            w[-1] for w in words if len(w) <= len(output) + 1 and output[len(output) + 1 - len(w) :] == w[:-1]
        }
    _, allowed, words, histories, _ = zip(*requests)
    return rows, histories, allowed, words, banned


@pytest.mark.parametrize("where, dtype", [("cpu", torch.bfloat16), *(("kernel", dtype) for dtype in DTYPES)], ids=str)
@pytest.mark.parametrize("vocab_size", [5, 97, 5001])
def test_allowed_ids_and_bad_words(vocab_size, where, dtype):
    requests, histories, allowed, words, banned = bans(vocab_size)
    rows, tables = rows_of(requests, None, histories, vocab_size, allowed, words)
    logits = torch.randn(len(requests), vocab_size).to(dtype)
    if where == "cpu":
        penalize(edited := logits.clone(), on_cpu(rows), on_cpu(tables))
    else:
        ops.penalize(edited := logits.to(DEVICE, copy=True), rows, tables)
    assert [{*(x == -torch.inf).nonzero().flatten().tolist()} for x in edited.cpu()] == banned
    assert [len(x) for x in banned][1:6] == [3, 2, 1, 0, 1] and not banned[7]
    unpenalized = [0, 1, 2, 3, 4, 5, 7]
    possible = edited.cpu()[unpenalized] > -torch.inf
    assert torch.equal(edited.cpu()[unpenalized][possible], logits[unpenalized][possible])


@pytest.mark.parametrize("where", ["cpu", "kernel"])
@pytest.mark.parametrize("num_rows", [3, 2, 1])
def test_masks_of_drafts(num_rows, where):
    """Each of a request's rows has the mask of its own place; what is written for a request is that of all."""
    vocab_size, num_masks, num_requests = 77, 3, 4
    rows, _ = rows_of([{"has_allowed_ids": 1}] * num_rows * num_requests, vocab_size=vocab_size)
    requests = torch.randperm(num_requests).repeat_interleave(num_rows)
    rows = rows._replace(req_indices=requests.int().to(DEVICE))
    tables = EditTables.zeros(num_requests, vocab_size, num_masks, torch.device(DEVICE))
    are_allowed = torch.randint(2, (num_requests + 1, num_masks, 96)).bool()
    are_allowed[0] = are_allowed[0, 0]
    bits = torch.from_numpy(np.packbits(are_allowed.numpy(), axis=-1, bitorder="little").view(np.int32)).to(DEVICE)
    tables.write({"mask_indices": torch.arange(num_requests + 1, device=DEVICE), "masks": bits[:, 0]})
    tables.allowed_masks[1:, 1:] = bits[1:, 1:]
    logits = torch.randn(len(requests), vocab_size, device=DEVICE)
    ops.penalize(logits, rows, tables) if where == "kernel" else penalize(logits, rows, tables)
    places = torch.arange(num_rows).repeat(num_requests)
    assert torch.equal(logits.cpu() > -torch.inf, are_allowed[requests, places, :vocab_size])
