"""The arrays of a step: their layout in one buffer, and what they hold."""

import numpy as np
import pytest
import torch
from common import TINY, generate_by_steps

from nanovllm.batches import batch as batches
from nanovllm.batches.batch import VIEWS, Batch, BatchShape
from nanovllm.batches.batch_runner import BatchRunner
from nanovllm.batches.request_tables import RequestTables, accept, place_decodes
from nanovllm.config import Config
from nanovllm.cuda.graphs import decode_shape
from nanovllm.cuda.start import dummy_prefill
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.runners import RUNNERS
from nanovllm.engine.scheduled_step import ScheduledSequence, ScheduledStep
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.sampling.sampling_columns import column
from nanovllm.sampling_params import SamplingParams
from nanovllm.spec_decode.rows import ChainShape, place_chains
from nanovllm.utils.context import get_context, reset_context

FEATURES = (("one", (("a", (3,)), ("b", (2, 5)))), ("two", (("a", (1, 7)),)))
MIXED = BatchShape(7, 3, 1, 2, 5, 4, (("tiles", (6, 2)),), False, 1, 0, 2, 1, 3, FEATURES)
CPU = torch.device("cpu")
DECODE = decode_shape(5, 3)._replace(num_block_copies=1, feature_shapes=FEATURES[1:])
BLOCK_SIZE = 4


def views(batch: Batch) -> dict:
    found = {view.name: getattr(batch, view.name) for view in VIEWS}
    of_features = {(feature, name): x for feature, arrays in batch.feature_arrays.items() for name, x in arrays.items()}
    return (
        {name: x for name, x in found.items() if x is not None and 0 not in x.shape}
        | of_features
        | batch.backend_arrays
    )


@pytest.mark.parametrize("num_window_tables", [0, 3])
@pytest.mark.parametrize("shape", [MIXED, DECODE], ids=["mixed", "decode"])
def test_views_are_aligned_and_apart(shape, num_window_tables):
    """Triton compiles a kernel anew for an address that is no multiple of 16 bytes."""
    shape = shape._replace(num_window_tables=num_window_tables)
    host = Batch.from_buffer(shape, np.zeros(shape.size + 3, np.int32))
    base = host.buffer.ctypes.data
    assert len(host.buffer) == shape.size
    for i, x in enumerate(views(host).values(), 1):
        assert (x.ctypes.data - base) % 16 == 0 and x.dtype == np.int32
        assert not x.any()
        x[:] = i
    assert all((x == i).all() for i, x in enumerate(views(host).values(), 1))
    parts = [*host.window_slots, *host.window_tables]
    assert len(parts) == 2 * num_window_tables and all((x.ctypes.data - base) % 16 == 0 for x in parts)
    device = host.to(torch.full((shape.size + 9,), -1, dtype=torch.int32))
    assert views(device).keys() == views(host).keys()
    for ours, theirs in zip(views(device).values(), views(host).values()):
        assert np.array_equal(ours.numpy(), theirs)
        assert (ours.data_ptr() - device.buffer.data_ptr()) % 16 == 0
    in_place = host.to(CPU)
    assert all(np.shares_memory(x.numpy(), host.buffer) for x in views(in_place).values())


def test_what_depends_on_prompts_is_absent_from_decode_steps():
    shape = DECODE._replace(num_window_tables=1)
    absent = {view.name for view in VIEWS} - views(Batch.from_buffer(shape, np.zeros(shape.size, np.int32))).keys()
    assert {"cu_seqlens_q", "logits_indices", "params", "new_block_tables"} <= absent
    assert absent == {view.name for view in VIEWS if view.metadata["chunks_only"]}


def sequence(i: int, tokens: range, blocks: list[int], **params) -> Sequence:
    seq = Sequence([*tokens], SamplingParams(**params), request_id=i, noise_seed=2**63 + i, max_len=50)
    seq.block_table, seq.req_index = blocks, 5 - i
    return seq


def prepare(step: ScheduledStep, arrays=None, shape: BatchShape | None = None) -> Batch:
    backend_arrays = {"tiles": np.arange(len(step.chunks) * 2).reshape(-1, 2)} if step.chunks else {}
    shape = batches.shape_of(step, BLOCK_SIZE, backend_arrays) if shape is None else shape
    host_buffer = lambda shape: np.full(9999, -7, np.int32)
    return batches.prepare_batch(step, shape, backend_arrays, arrays or {}, host_buffer, BLOCK_SIZE, pad_req_index=8)


def decodes(seqs: list[Sequence], num_drafts: int = 0) -> ScheduledStep:
    """The first has just got its last block."""
    step = ScheduledStep()
    ends = [min(seq.token_limit - 1, seq.num_tokens + num_drafts) for seq in seqs]
    step.decode([ScheduledSequence(seq, seq.num_tokens - 1, end) for seq, end in zip(seqs, ends)])
    step.new_blocks = [(0, len(seqs[0].block_table) - 1, seqs[0].block_table[-1])]
    step.tokens_per_row = max(step.num_reserved)
    return step


def tables_of(seqs: list[Sequence], num_rejected: int = 0, tokens_per_row: int = 1) -> RequestTables:
    """What the device knows before a step in which these decode: they have `num_rejected` tokens less than planned."""
    tables = RequestTables.zeros(8, tokens_per_row, 5, 20, torch.device("cpu"))
    for i, seq in enumerate(seqs):
        table = seq.block_table[:-1] if i == 0 else seq.block_table
        tables.block_tables[seq.req_index, : len(table)] = torch.tensor(table, dtype=torch.int32)
        tables.num_tokens[seq.req_index] = len(seq.token_ids) - num_rejected
        tables.last_token_ids[seq.req_index] = torch.arange(tokens_per_row) + 100 * seq.request_id
    return tables


def test_chunks():
    """Two whole prompts and a chunk of a third, which is not sampled yet; two answers share the first prompt."""
    seqs = [sequence(0, range(6), [7, 2]), sequence(1, range(10, 11), [0]), sequence(2, range(20, 32), [5, 1, 3])]
    step = ScheduledStep(copies={6: 4})
    for seq, (start, end) in zip(seqs, [(2, 6), (0, 1), (4, 9)]):
        step.chunks.append(ScheduledSequence(seq, start, end))
        if end == len(seq.token_ids):
            step.add_sampled(seq)
    answer = sequence(3, range(6), [7, 6])
    answer.columns = {"min_len": 33}
    step.sampled_seqs.insert(1, answer)
    step.sampled_rows.insert(1, 0)
    batch = prepare(step)
    assert batch.input_ids.tolist() == [2, 3, 4, 5, 10, 24, 25, 26, 27, 28]
    assert batch.positions.tolist() == [2, 3, 4, 5, 0, 4, 5, 6, 7, 8]
    assert batch.slot_mapping.tolist() == [30, 31, 8, 9, 0, 4, 5, 6, 7, 12]
    assert batch.cu_seqlens_q.tolist() == [0, 4, 5, 10]
    assert batch.context_lens.tolist() == [6, 1, 9]
    assert batch.block_tables.tolist() == [[7, 2, 0], [0, 0, 0], [5, 1, 3]]
    assert batch.logits_indices.tolist() == [3, 3, 4] and batch.sampled_rows.tolist() == [0, 0, 1]
    assert batch.req_indices.tolist() == [5, 2, 4]
    assert batch.block_copies.tolist() == [[4], [6]]
    assert batch.shape.max_seqlen_q == 5 and column(batch.params, "min_len").tolist() == [0, 33, 0]
    assert batch.shape.num_decode_rows == 0 and batch.new_req_indices.tolist() == [5, 2, 4]


def test_chunks_beside_decodes():
    """The token ids and parameters of what decodes are on the device; only the chunk's are in the batch."""
    seqs = [sequence(0, range(6), [7, 2]), sequence(1, range(3), [3])]
    seqs += [sequence(2, range(20, 25), [5, 1]), sequence(3, range(30, 34), [0])]
    tables, step = tables_of(seqs[:2]), decodes(seqs[:2])
    for seq, (start, end) in zip(seqs[2:], [(1, 4), (0, 4)]):
        step.chunks.append(ScheduledSequence(seq, start, end))
        if end == len(seq.token_ids):
            step.add_sampled(seq)
    arrays = {"one": {"a": np.array([5]), "b": [np.arange(3, dtype=np.int32), np.arange(5, 8, dtype=np.int32)]}}
    batch = prepare(step, arrays)
    place_decodes(tables, batch.to(CPU), BLOCK_SIZE)
    assert batch.input_ids.tolist() == [0, 100, 21, 22, 23, 30, 31, 32, 33]
    assert batch.positions.tolist() == [5, 2, 1, 2, 3, 0, 1, 2, 3]
    assert batch.slot_mapping.tolist() == [9, 14, 21, 22, 23, 0, 1, 2, 3]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 5, 9] and batch.context_lens.tolist() == [6, 3, 4, 4]
    assert batch.logits_indices.tolist() == [0, 1, 8] and batch.sampled_rows.tolist() == [0, 1, 3]
    assert batch.req_indices.tolist() == [5, 4, 2] and batch.new_req_indices.tolist() == [2]
    assert batch.shape.num_decode_rows == 2 and len(batch.params) == 1
    assert {name: x.tolist() for name, x in batch.feature_arrays["one"].items()} == {
        "a": [5],
        "b": [[0, 1, 2], [5, 6, 7]],
    }
    assert batch.backend_arrays["tiles"].tolist() == [[0, 1], [2, 3]] and batch.num_decode_rows == 2

    bounds = BatchShape(20, 9, 5, 7, 3, 0, (("tiles", (6, 2)),))
    bounds = bounds._replace(is_padded=True)
    padded = prepare(step, shape=bounds)
    place_decodes(tables, padded.to(CPU), BLOCK_SIZE)
    assert padded.shape.graph_shape == bounds.graph_shape and padded.shape.num_sampled_seqs == 3
    for name, padding in [("positions", 0), ("slot_mapping", -1), ("context_lens", 0), ("req_indices", 8)]:
        ours, real = getattr(padded, name), getattr(batch, name)
        assert np.array_equal(ours[: len(real)], real) and (ours[len(real) :] == padding).all()
    assert padded.cu_seqlens_q.tolist() == [0, 1, 2, 5, 9, *[9] * 5]
    assert padded.backend_arrays["tiles"].tolist() == [[0, 1], [2, 3], *[[-1, -1]] * 4]
    assert padded.num_decode_rows == 2 and np.array_equal(padded.params, batch.params)
    assert np.array_equal(padded.new_req_indices, batch.new_req_indices)


def test_decode_with_padding():
    seqs = [sequence(0, range(6), [7, 2]), sequence(1, range(4), [3])]
    tables = tables_of(seqs)
    batch = prepare(decodes(seqs), shape=decode_shape(4, 3))
    num_words = batch.to(CPU).input_ids.storage_offset()  # which a graph fetches
    assert num_words == 4 + 4 + 8 and not (batch.buffer[:num_words] == -7).any()
    place_decodes(tables, batch.to(CPU), BLOCK_SIZE)
    assert tables.block_tables[5, :3].tolist() == [7, 2, 0]
    assert batch.positions.tolist() == [5, 3, 0, 0]
    assert batch.slot_mapping.tolist() == [9, 15, -1, -1]
    assert batch.context_lens.tolist() == [6, 4, 0, 0]
    assert batch.block_tables.tolist() == [[7, 2, 0], [3, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert batch.req_indices.tolist() == [5, 4, 8, 8]
    assert batch.input_ids[:2].tolist() == [0, 100]


def test_drafts():
    """The host planned for one token more than the device has. The second sequence may get two tokens, no third."""
    seqs = [sequence(0, range(7), [7, 2]), sequence(1, range(3), [3], max_tokens=2), sequence(2, range(5), [0, 4])]
    tables, step = tables_of(seqs[:2], 1, tokens_per_row=3), decodes(seqs[:2], 2)
    assert step.num_reserved == [3, 2] and [end for _, _, end in step.decodes] == [9, 4]
    batch = prepare(step, shape=decode_shape(3, 3, 3))
    place_decodes(tables, batch.to(CPU), BLOCK_SIZE)
    assert batch.input_ids[:6].tolist() == [0, 1, 2, 100, 101, 101]
    assert batch.positions.tolist() == [5, 6, 7, 1, 2, 2, 0, 0, 0]
    assert batch.slot_mapping.tolist() == [9, 10, 11, 13, 14, 14, -1, -1, -1]
    assert batch.context_lens.tolist() == [6, 7, 8, 2, 3, 3, 0, 0, 0]
    assert batch.block_tables[:6].tolist() == [[7, 2, 0]] * 3 + [[3, 0, 0]] * 3

    step.chunks.append(ScheduledSequence(seqs[2], 3, 5))
    step.add_sampled(seqs[2])
    batch = prepare(step)
    place_decodes(tables, batch.to(CPU), BLOCK_SIZE)
    assert batch.input_ids.tolist() == [0, 1, 2, 100, 101, 101, 3, 4]
    assert batch.positions.tolist() == [5, 6, 7, 1, 2, 2, 3, 4]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4, 5, 6, 8]
    assert batch.logits_indices.tolist() == [0, 1, 2, 3, 4, 5, 7, 7, 7]
    assert batch.sampled_rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 6]
    assert batch.req_indices.tolist() == [5, 4, 3] and batch.new_block_tables.tolist() == [[0, 4, 0]]

    # the first sequence's first draft is right; the second's is, too; nothing is drafted for the third
    x = map(torch.from_numpy, (batch.req_indices, batch.positions[batch.logits_indices]))
    counts = accept(*x, torch.tensor([1, 9, 3, 101, 8, 8, 0, 0, 0], dtype=torch.int32), tables)
    assert counts.tolist() == [2, 2, 1]
    assert tables.last_token_ids[[5, 4, 3], 0].tolist() == [9, 8, 0]
    assert tables.num_tokens[[5, 4, 3]].tolist() == [8, 4, 6]


@pytest.mark.parametrize("seed", range(20))
def test_kernels_of_request_tables(seed, use_ops):
    rng = np.random.default_rng(seed)
    k, num_seqs, W, R, size = *(int(rng.integers(1, high)) for high in (5, 6, 7)), 9, 16
    shape, num_real = decode_shape(num_seqs, W, k), int(rng.integers(1, num_seqs + 1))
    if seed % 2:
        n = num_seqs * k
        shape = BatchShape(n + 7, n + 2, n, n + 2 * k, W, 5, is_padded=True, tokens_per_row=k)
    numbers = lambda low, high, *dims: torch.from_numpy(rng.integers(low, high, dims)).int()
    lengths = numbers(1, max(2, W * size - k), R + 1)
    windows = numbers(0, 50, R + 1, 0, 9)
    tables = RequestTables(
        numbers(0, 3, R + 1, k), lengths, numbers(0, 50, R + 1, 9), numbers(0, 1, R + 1, 20), windows
    )
    host = Batch.from_buffer(shape, np.full(shape.size, -5, np.int32))
    host.req_indices[:], host.num_reserved[:], host.new_blocks[:] = R, 0, -1
    host.req_indices[:num_real] = rng.permutation(R)[:num_real]
    host.num_reserved[:num_real] = rng.integers(1, k + 1, num_real)
    host.new_blocks[0] = W - 1, 77
    if seed % 2:
        host.num_decode_rows[:] = num_real * k
    token_ids, results = numbers(0, 3, num_real * k), []
    for names in ((), ("place_decodes", "accept")):
        use_ops(*names, table=None if names else {})
        batch = Batch.from_buffer(shape, torch.from_numpy(host.buffer.copy()))
        ours = RequestTables(*(x.clone() for x in tables))
        place_decodes(ours, batch, size)
        counts = accept(batch.req_indices[:num_real], batch.positions[: num_real * k].clone(), token_ids, ours)
        results.append([batch.buffer, ours.block_tables[:, :-1], *ours[:2], *([] if counts is None else [counts])])
    assert all(torch.equal(*both) for both in zip(*results, strict=True))
    assert k == 1 or len(results[0]) == 5


@pytest.mark.parametrize("seed", range(20))
def test_kernel_of_chains(seed, use_ops):
    """Some rows of padding, which has no drafts; sequences lack few rows or more than there is room for."""
    rng = np.random.default_rng(seed)
    num_steps, width, num_seqs, shift, R, size = *(int(rng.integers(1, high)) for high in (5, 6, 7)), seed % 2, 9, 16
    numbers = lambda low, high, *dims: torch.from_numpy(rng.integers(low, high, dims)).int()
    lengths = numbers(width + shift + 1, 4 * size - num_steps, R + 1)
    lengths[R] = 0
    windows = numbers(0, 50, R + 1, 0, 5)
    tables = RequestTables(
        numbers(0, 3, R + 1, 5), lengths, numbers(0, 50, R + 1, 5), numbers(0, 1, R + 1, 20), windows
    )
    num_real = int(rng.integers(1, num_seqs + 1))
    req_indices, num_drafts = torch.full((num_seqs,), R, dtype=torch.int32), torch.zeros(num_seqs, dtype=torch.int32)
    req_indices[:num_real] = torch.from_numpy(rng.permutation(R)[:num_real]).int()
    num_drafts[:num_real] = numbers(1, num_steps + 1, num_real)
    num_computed = (lengths - numbers(0, width + 3, R + 1)).clamp(min=0).long()
    results = []
    for names in ((), ("place_chains",)):
        use_ops(*names, table=None if names else {})
        ours = num_computed.clone()
        shape = ChainShape(num_steps, width, shift, size)
        results.append([*place_chains(req_indices, num_drafts, tables, ours, shape), ours])
    assert all(torch.equal(*both) for both in zip(*results, strict=True))
    slots = results[0][2]
    assert (slots < 0).sum() == (num_seqs - num_real) * (width + num_steps - 1)


def test_the_same_views_of_any_prepared_batch():
    """Another rank gets the shape and the buffer, and takes the same views of it."""
    arrays = {"one": {"a": np.arange(7)}}
    batch = prepare(dummy_prefill(3, 5, BLOCK_SIZE), arrays)
    other = Batch.from_buffer(BatchShape(*batch.shape), batch.buffer.copy())
    assert views(other).keys() == views(batch).keys()
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(views(other).values(), views(batch).values()))


class BothRunner(BatchRunner):
    """Compares what it computes from a batch with the plain runner's arrays, in each step."""

    def run(self, step):
        self.step = step
        return super().run(step)

    def run_model(self, input_ids, positions):
        context, step = get_context(), self.step
        plain = self.prepare_prefill(step.rows, step.num_decodes) if step.chunks else self.prepare_decode(step.rows)
        other = get_context()
        assert input_ids.tolist() == plain[0].tolist() and positions.tolist() == plain[1].tolist()
        for name in ("is_prefill", "max_seqlen_q", "num_decode_rows", "tokens_per_row"):
            assert getattr(context, name) == getattr(other, name)
        for name in ("slot_mapping", "context_lens", "cu_seqlens_q"):
            assert (name == "cu_seqlens_q" and not step.chunks) or torch.equal(
                getattr(context, name), getattr(other, name)
            )
        for ours, theirs, length in zip(context.block_tables, other.block_tables, context.context_lens.tolist()):
            num_blocks = -(-length // self.config.kvcache_block_size)
            assert torch.equal(ours[:num_blocks], theirs[:num_blocks])
        assert other.max_context_len <= context.max_context_len
        self.kinds.add(step.kind)
        hidden_states = super().run_model(input_ids, positions)
        self.expected = self.sampler_input(hidden_states, positions, step)
        return hidden_states

    def sample_and_accept(self, x):
        for name in ("hidden_states", "req_indices", "positions"):
            assert torch.equal(getattr(x, name), getattr(self.expected, name))
        rows = self.sampling_rows(x)
        assert torch.equal(rows.column("temperature"), self.prepare_sample(self.step.sampled_seqs))
        return super().sample_and_accept(x)


@pytest.mark.parametrize("num_blocks", [12, 60], ids=["preemptions", "enough blocks"])
def test_plain_arrays_are_those_of_the_batch(make_llm, small_model, monkeypatch, num_blocks):
    """Chunks, prefix hits, several answers to a prompt, preemptions, and decodes beside prompts."""
    monkeypatch.setitem(RUNNERS, "cpu", f"{__name__}:BothRunner")
    monkeypatch.setattr(BothRunner, "kinds", set(), raising=False)
    settings = dict(kvcache_block_size=16, num_kvcache_blocks=num_blocks, max_num_batched_tokens=40, max_num_seqs=5)
    llm = make_llm(small_model, **settings)
    requests = [
        ([5 + i % 3] * (7 * i % 50 + 1), SamplingParams(n=1 + i % 2, seed=i, temperature=i % 3 / 2, max_tokens=24))
        for i in range(9)
    ]
    outputs = generate_by_steps(llm, requests)
    assert type(llm.model_runner) is BothRunner and BothRunner.kinds == {"prefill", "decode", "mixed"}
    assert (llm.stats()["preemptions"] > 0) == (num_blocks == 12)
    monkeypatch.delitem(RUNNERS, "cpu")
    plain = make_llm(small_model, **settings)
    assert type(plain.model_runner) is ModelRunner
    assert [x.token_ids for x in outputs] == [x.token_ids for x in generate_by_steps(plain, requests)]


def test_sequences_of_a_step_are_prepared_as_it_was_scheduled():
    """What guides print: chunks, a prefix hit, decodes, and a sequence that was preempted."""
    config = Config(TINY, device="cpu", kvcache_block_size=16, num_kvcache_blocks=6, max_num_batched_tokens=16)
    runner, scheduler = ModelRunner(config), Scheduler(config)
    seqs = [Sequence([5 + i] * 20, SamplingParams(max_tokens=40)) for i in range(2)]
    scheduler.add(*seqs[:1])
    for i in range(8):
        step = scheduler.schedule(prompts_first=True)
        step_seqs, is_prefill = step
        prepare = runner.prepare_prefill if is_prefill else runner.prepare_decode
        found = [x.tolist() for x in (*prepare(step_seqs), get_context().slot_mapping, get_context().context_lens)]
        expected = [x.tolist() for x in (*prepare(step.rows), get_context().slot_mapping, get_context().context_lens)]
        assert found == expected and len(found[0]) == len(found[1])
        reset_context()
        scheduler.postprocess(step, runner.run(step).wait())
        if i == 3:
            scheduler.add(*seqs[1:])
        if i == 6:
            scheduler.preempt(seqs[0])
            assert ScheduledSequence.of(seqs[0]) == (seqs[0], 0, len(seqs[0].token_ids))
    assert seqs[0].num_completion_tokens > 2


def test_no_step_without_blocks():
    scheduler = Scheduler(Config(TINY, device="cpu"))
    scheduler.add(Sequence([1, 2, 3]))
    with pytest.raises(RuntimeError, match="num_kvcache_blocks is not known: make a ModelRunner"):
        scheduler.schedule()
