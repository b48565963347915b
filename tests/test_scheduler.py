"""Who runs when. Random requests run on a device without a model, and everything is checked after every move."""

import random
import subprocess
import sys
from collections import Counter, deque
from pathlib import Path
from time import thread_time
from typing import NamedTuple
from zlib import crc32

import pytest

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.output_processor import OutputProcessor
from nanovllm.engine.scheduled_step import ScheduledSequence, ScheduledStep, StepResult
from nanovllm.engine.scheduler import MAX_STEPS_WITHOUT_ADMISSION, Scheduler
from nanovllm.engine.scheduling_policy import MIN_SHARED_CHUNK, TokenBudget
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

VOCAB_SIZE, EOS, ALSO_EOS = 50, 0, 1
MAX_LEN = 64


class Request(NamedTuple):
    prompt: list[int]
    max_tokens: int = 64
    ignore_eos: bool = False
    key: int = 0
    arrival: int = 0  # iterations of the loop before it is added
    n: int = 1
    aborted_at: int = 1000


def make_scheduler(
    num_blocks=64,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_num_mixed_tokens=64,
    enable_prefix_caching=True,
    tokens_per_row=1,
) -> Scheduler:
    manager = BlockManager(num_blocks, block_size, enable_prefix_caching)
    budgets = TokenBudget(max_num_batched_tokens), TokenBudget(max_num_mixed_tokens)
    return Scheduler(manager, max_num_seqs, *budgets, tokens_per_row)


def outputs_of(scheduler: Scheduler) -> OutputProcessor:
    return OutputProcessor(scheduler, frozenset({EOS, ALSO_EOS}))


def make_group(request_id: int, request: Request) -> list[Sequence]:
    params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=request.ignore_eos, n=request.n)
    seeds = [request.key + 1000 * index for index in range(request.n)]
    group = [Sequence(request_id, list(request.prompt), params, seed, MAX_LEN, index=i) for i, seed in enumerate(seeds)]
    for seq in group:
        seq.group = group
    return group


def make_sequence(request_id: int, request: Request) -> Sequence:
    return make_group(request_id, request)[0]


# -- a simulated engine ----------------------------------------------------------------------------------------------


def true_tokens(request: Request, index: int = 0) -> list[int]:
    """The prompt and all that could be sampled after it: a function of the request and the position alone."""
    last = min(len(request.prompt) + request.max_tokens, MAX_LEN)
    key = request.key + 1000 * index
    return request.prompt + [crc32(b"%d %d" % (key, i)) % VOCAB_SIZE for i in range(len(request.prompt), last)]


def true_answer(request: Request, index: int) -> tuple[list[int], str]:
    """What comes out of a request, whatever runs beside it."""
    completion = true_tokens(request, index)[len(request.prompt) :]
    ends = [i for i, token_id in enumerate(completion) if token_id in (EOS, ALSO_EOS) and not request.ignore_eos]
    return (completion[: ends[0] + 1], "stop") if ends else (completion, "length")


def fingerprints(token_ids: list[int]) -> list[int]:
    """For each position what its keys and values are a function of: the tokens up to it, itself included."""
    marks = [0]
    for token_id in token_ids:
        marks.append(hash((marks[-1], token_id)))
    return marks[1:]


def random_requests(seed: int, num_requests: int = 60, max_n: int = 1) -> list[Request]:
    """Many begin like an earlier one's prompt and answer; some with its key, so that they go on like it too.

    With `max_n`, half of them have several answers, and some are aborted.
    """
    rng = random.Random(seed)
    requests: list[Request] = []
    for i in range(num_requests):
        prompt, key = [], i
        if requests and rng.random() < 0.6:
            earlier = rng.choice(requests)
            prompt = true_tokens(earlier)[: rng.randint(1, MAX_LEN - 8)]
            key = rng.choice([earlier.key, i])
        if key == i:
            prompt = prompt + rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 7 if prompt else 40))
        requests.append(Request(prompt, rng.randint(1, 40), rng.random() < 0.3, key, arrival=rng.randrange(0, 100, 20)))
        if max_n > 1:
            n = rng.randint(2, max_n) if rng.random() < 0.5 else 1
            aborted_at = requests[-1].arrival + rng.randint(1, 60) if rng.random() < 0.2 else 1000
            requests[-1] = requests[-1]._replace(n=n, aborted_at=aborted_at)
    return requests


def postprocess(scheduler: Scheduler, step: ScheduledStep, token_ids: list[int]) -> list[Sequence]:
    """Give sequences that belong to no request their tokens; returns those that have ended."""
    seqs = outputs_of(scheduler).postprocess(step, StepResult(token_ids, {}))
    return [seq for seq in seqs if seq.is_finished]


class Simulation:
    """The engine's loop over a device that has a cache and no model.

    The device computes a step at once when it is given one, as a stream would do later; the host learns the tokens
    at once, or with `asynchronous` one step late. `seen` counts what happened on the way.
    """

    def __init__(self, requests: list[Request], asynchronous: bool, **settings):
        self.requests = requests
        self.max_in_flight = 1 if asynchronous else 0
        self.scheduler = make_scheduler(**settings)
        self.manager = self.scheduler.block_manager
        self.groups = [make_group(i, request) for i, request in enumerate(requests)]
        self.seqs = [seq for group in self.groups for seq in group]
        self.tokens = {seq: true_tokens(requests[seq.request_id], seq.index) for seq in self.seqs}
        self.marks = {seq: fingerprints(token_ids) for seq, token_ids in self.tokens.items()}
        self.cache: dict[int, int] = {}  # slot -> fingerprint
        # on the device, by request index
        self.last_token_ids: dict[int, int] = {}
        self.num_tokens: dict[int, int] = {}
        self.block_tables: dict[int, list[int]] = {}
        self.random = random.Random(len(requests))  # whether a draft is right
        self.in_flight: deque[tuple[ScheduledStep, StepResult]] = deque()
        self.first_start: dict[Sequence, int] = {}
        self.num_steps = 0
        self.seen: Counter = Counter()
        self.ended: set[Sequence] = set()  # whose end has been checked

    def run(self) -> "Simulation":
        arrivals = deque(sorted(self.groups, key=lambda group: self.requests[group[0].request_id].arrival))
        iteration = 0
        while arrivals or self.in_flight or not self.scheduler.is_finished():
            while arrivals and self.requests[arrivals[0][0].request_id].arrival <= iteration:
                self.scheduler.add(*arrivals.popleft())
            for request_id, request in enumerate(self.requests):
                if request.aborted_at == iteration:
                    self.seen["aborted"] += len(outputs_of(self.scheduler).end_all(request_id))
                    self.check_accounting()
            self.iterate()
            iteration += 1
        self.seen["preemptions"] = self.scheduler.num_preemptions
        self.check_end()
        return self

    def iterate(self):
        step = self.scheduler.schedule(prompts_first=self.num_steps % 3 == 1)
        self.num_steps += 1
        assert step or self.in_flight or self.scheduler.is_finished(), "stuck"
        if step:
            self.in_flight.append((step, self.compute(step)))
        self.check_accounting()
        if len(self.in_flight) > self.max_in_flight or (self.in_flight and not step):
            self.postprocess(*self.in_flight.popleft())
            self.check_accounting()

    def postprocess(self, step: ScheduledStep, result: StepResult):
        before = {seq: seq.status for seq in step.sampled_seqs}
        finished = [seq for seq in outputs_of(self.scheduler).postprocess(step, result) if seq.is_finished]
        ended = [seq for seq in step.sampled_seqs if seq.status is SequenceStatus.FINISHED]
        assert {*finished} == {seq for seq in ended if before[seq] is not SequenceStatus.FINISHED}
        self.seen["tokens thrown away"] += len(ended) - len(finished)
        self.seen["ended while preempted"] += sum(before[s] is SequenceStatus.WAITING for s in finished)

    def compute(self, step: ScheduledStep) -> StepResult:
        """Write the cache, check that it holds what is read, and sample."""
        rows = self.rows(step)
        self.check_step(step, rows)
        size = self.manager.block_size
        before = dict(self.cache)
        for source, target in step.copies:
            for offset in range(size):
                self.cache[target * size + offset] = before.get(source * size + offset)
        for i, column, block_id in step.new_blocks:
            table = self.block_tables[step.req_indices[i]]
            assert column == len(table)
            table.append(block_id)
        for seq, start, _ in rows[: step.num_decodes]:  # the host may not know the input: it is on the device
            assert self.last_token_ids[seq.req_index] == self.tokens[seq][start]
            assert self.block_tables[seq.req_index] == seq.block_table
        counts = [1] * len(step.sampled_seqs)
        for i, (seq, start, end) in enumerate(rows):
            is_right = [True] * (end - start)
            if i < step.num_decodes:
                is_right[1:] = [self.random.random() < 0.7 for _ in is_right[1:]]
                counts[i] = (*is_right, False).index(False)
            for position in range(start, end):
                mark = self.marks[seq][position] if all(is_right[: position + 1 - start]) else -1
                self.cache[self.slot(seq, position)] = mark
        for i, (seq, start, end) in enumerate(rows):
            num_read = start + counts[i] if i < step.num_decodes else end
            context = [self.cache[self.slot(seq, position)] for position in range(num_read)]
            assert context == self.marks[seq][:num_read], "another sequence's keys and values"
        token_ids, k = [], step.tokens_per_row
        copied = self.manager.copies  # what the next step copies can't be read yet
        for seq, row, count in zip(step.sampled_seqs, step.sampled_rows, counts, strict=True):
            end = rows[row].start + count if row < step.num_decodes else rows[row].end
            context = [self.cache[self.slot(seq, p)] for p in range(end) if self.block(seq, p) not in copied]
            assert context == self.marks[seq][: len(context)], "what was shared is not its own prompt's"
            assert len(context) == end or end - len(context) == end % self.manager.block_size
            token_ids += [*self.tokens[seq][end + 1 - count : end + 1], *[-1] * (k - count)]
            self.last_token_ids[seq.req_index] = self.tokens[seq][end]
            self.num_tokens[seq.req_index] = end + 1
        for seq in step.new_seqs:
            self.block_tables[seq.req_index] = [*seq.block_table]
        self.seen["wrong drafts"] += int(sum(step.num_reserved)) - sum(counts[: step.num_decodes])
        self.seen["right drafts"] += sum(counts) - len(counts)
        return StepResult(token_ids, {}, counts if k > 1 else None)

    def rows(self, step: ScheduledStep) -> list[ScheduledSequence]:
        """Those of the step, but where sequences decode on the device; the host has upper bounds."""
        rows = step.rows
        for i, (num_reserved, (seq, start, end)) in enumerate(zip(step.num_reserved.tolist(), rows)):
            first = self.num_tokens[seq.req_index] - 1
            assert first <= start and end == start + num_reserved and 1 <= num_reserved <= step.tokens_per_row
            rows[i] = ScheduledSequence(seq, first, first + num_reserved)
        return rows

    def block(self, seq: Sequence, position: int) -> int:
        return seq.block_table[position // self.manager.block_size]

    def slot(self, seq: Sequence, position: int) -> int:
        return self.block(seq, position) * self.manager.block_size + position % self.manager.block_size

    def check_step(self, step: ScheduledStep, rows: list[ScheduledSequence]):
        """Its rows are within the bounds, and write into nothing that others hold."""
        writers, readers = Counter(), Counter()
        for i, (seq, start, end) in enumerate(rows):
            assert 0 <= start < end
            assert end <= len(seq.token_ids) or i < step.num_decodes
            first_written = start // self.manager.block_size
            readers.update(seq.block_table[:first_written])
            writers.update(seq.block_table[first_written:])
            if seq not in self.first_start:
                self.first_start[seq] = start
                self.seen["hits"] += start > 0
                self.seen["left behind"] += seq.index > 0
        for seq, row in zip(step.sampled_seqs, step.sampled_rows):
            if seq is not step.rows[row].seq:
                assert row >= step.num_decodes and seq.group is step.rows[row].seq.group and seq not in self.first_start
                num_full, in_part = divmod(seq.num_prompt_tokens, self.manager.block_size)
                self.first_start[seq] = self.first_start[step.rows[row].seq]
                readers.update(seq.block_table[:num_full])
                writers.update(seq.block_table[num_full:])
                assert len(seq.block_table) == num_full + 1
                source = self.manager.copies.get(seq.block_table[-1])
                assert source == (step.rows[row].seq.block_table[num_full] if in_part else None)
                self.seen["forks"] += 1
        for block_id, num_writers in writers.items():  # who else holds it reads what this same step writes
            assert num_writers == 1 and self.manager.blocks[block_id].ref_count == 1 + readers[block_id]
        decodes = [seq for seq, _, _ in step.rows[: step.num_decodes]]
        complete = [seq for seq, _, end in step.chunks if end == len(seq.token_ids)]
        owners = [seq for seq, row in zip(step.sampled_seqs, step.sampled_rows) if step.rows[row].seq is seq]
        assert owners == decodes + complete and step.sampled_seqs[: step.num_decodes] == decodes
        assert step.sampled_rows == sorted(step.sampled_rows) and len({*step.sampled_seqs}) == len(step.sampled_seqs)
        num_chunk_tokens = sum(end - start for _, start, end in step.chunks)
        bound = self.scheduler.budget.num_tokens
        if step.num_decodes and step.chunks:
            bound = min(bound, self.scheduler.mixed_budget.num_tokens)
            bound = max(bound, step.num_decodes * step.tokens_per_row + max(1, bound // 4))
            self.seen["mixed"] += 1
        if step.chunks:
            assert step.num_decodes * step.tokens_per_row + num_chunk_tokens <= bound
        assert len({seq for seq, _, _ in step.rows}) == len(step.rows) <= self.scheduler.max_num_seqs
        self.seen["chunks"] += len(step.chunks) - len(complete)
        self.seen["shared within a step"] += bool(writers.keys() & readers.keys())

    def check_accounting(self):
        scheduler, manager = self.scheduler, self.manager
        live = {*scheduler.prefilling.values(), *scheduler.running.values()}
        assert len(live) == len(scheduler.prefilling) + len(scheduler.running)
        assert all(seq.status is SequenceStatus.RUNNING for seq in live)
        waiting = [*scheduler.waiting]
        assert all(seq.status is SequenceStatus.WAITING for seq in waiting)
        assert [seq.order for seq in waiting] == sorted(seq.order for seq in waiting)
        assert len(waiting) + len(live) == sum(map(len, scheduler.live.values()))
        assert len(live) <= scheduler.max_num_seqs
        indices = [seq.req_index for seq in live]
        assert sorted(indices + scheduler.free_req_indices) == list(range(scheduler.max_num_seqs))

        held = Counter(block_id for seq in live for block_id in seq.block_table)
        assert {block.block_id: block.ref_count for block in manager.blocks if block.ref_count} == held
        assert manager.free_block_ids.keys() == set(range(len(manager.blocks))) - held.keys()
        self.check_findable()

        in_flight = Counter()
        for step, _ in self.in_flight:
            in_flight.update(dict(zip(step.sampled_seqs, step.num_reserved.tolist())))
            in_flight.update(step.new_seqs)
        for seq in [seq for seq in self.seqs if seq not in self.ended]:
            if seq.status is not SequenceStatus.FINISHED:
                assert seq.num_tokens - len(seq.token_ids) == in_flight.get(seq, 0)
            else:
                self.ended.add(seq)  # if it held a block later, that would be one too many above
            if seq not in live:
                assert seq.block_table == [] and seq.req_index == -1
        for seq in live:
            assert len(set(seq.block_table)) == len(seq.block_table)
            self.check_cached(seq)
        self.check_decode_table()

    def check_decode_table(self):
        """It has the rows of the sequences that decode, with what these say of themselves, and no others."""
        table, seqs = self.scheduler.decoding, [*self.scheduler.running.values()]
        rows = [seq.req_index for seq in seqs]
        assert table.seqs[rows].tolist() == seqs
        assert table.numbers[rows, :3].tolist() == [[s.num_tokens, s.num_computed_tokens, s.token_limit] for s in seqs]
        assert table.capacities[rows].tolist() == [len(seq.block_table) * self.manager.block_size for seq in seqs]
        others = sorted({*range(self.scheduler.max_num_seqs)} - {*rows})
        assert not table.numbers[others].any() and not any(table.seqs[others])

    def check_findable(self):
        """Every block that has a hash is known by it, once."""
        manager = self.manager
        known = [(key, block_id) for key, block_id in manager.hash_to_block_id.items()]
        known += [(key, block_id) for key, others in manager.duplicates.items() for block_id in others]
        assert sorted(known) == sorted((b.hash, b.block_id) for b in manager.blocks if b.hash is not None)
        assert manager.duplicates.keys() <= manager.hash_to_block_id.keys() and all(manager.duplicates.values())

    def check_cached(self, seq: Sequence):
        """Only full blocks whose tokens are known and computed can be found, and by the right tokens."""
        size = self.manager.block_size
        for i, block in enumerate(self.manager.blocks[block_id] for block_id in seq.block_table):
            if block.hash is not None:
                assert (i + 1) * size <= min(seq.num_computed_tokens, len(seq.token_ids))
                assert block.token_ids == seq.token_ids[i * size : (i + 1) * size]

    def check_end(self):
        """Nothing is left, and every answer is what it would have been alone."""
        assert not (self.scheduler.waiting or self.scheduler.prefilling or self.scheduler.running)
        assert len(self.manager.free_block_ids) == len(self.manager.blocks)
        for seq in self.seqs:
            assert seq.status is SequenceStatus.FINISHED
            assert seq.num_cached_tokens == self.first_start.get(seq, 0)
            token_ids, reason = true_answer(self.requests[seq.request_id], seq.index)
            if seq.finish_reason == "abort":
                assert seq.completion_token_ids == token_ids[: len(seq.completion_token_ids)] != token_ids
            else:
                assert (seq.completion_token_ids, seq.finish_reason) == (token_ids, reason)
        counts = self.scheduler.stats()
        assert counts["blocks"]["used"] == 0 and sum(counts["blocks"].values()) == len(self.manager.blocks)
        assert counts["tokens"]["out"] == sum(len(seq.completion_token_ids) for seq in self.seqs)
        assert counts["requests"] == {"waiting": 0, "running": 0}


SETTINGS = {
    "all at once": dict(num_blocks=500, max_num_seqs=60, max_num_batched_tokens=2000),
    "few at a time": dict(num_blocks=120, max_num_seqs=3),
    "chunks": dict(num_blocks=120, max_num_seqs=6, max_num_batched_tokens=7),
    "chunks beside decodes": dict(num_blocks=120, max_num_seqs=6, max_num_mixed_tokens=3),
    "tiny cache": dict(num_blocks=18, max_num_seqs=8),
    "tiny cache, tiny blocks": dict(num_blocks=32, block_size=2, max_num_seqs=8),
    "tiny cache, blocks of 16": dict(num_blocks=4, block_size=16, max_num_seqs=8),
    "tiny cache, chunks": dict(num_blocks=22, block_size=3, max_num_seqs=8, max_num_batched_tokens=5),
    "tiny cache, no prefix caching": dict(num_blocks=18, max_num_seqs=8, enable_prefix_caching=False),
}


@pytest.mark.parametrize("asynchronous, seed", [(False, 4), (True, 5)])
@pytest.mark.parametrize("name", SETTINGS)
def test_random_requests_with_drafts(name, asynchronous, seed):
    """Of which some are wrong, so that the host's counts are only upper bounds until a step's result has arrived."""
    tokens_per_row = 2 if "tiny blocks" in name else 3
    settings = SETTINGS[name] | dict(tokens_per_row=tokens_per_row)
    seen = Simulation(random_requests(seed), asynchronous, **settings).run().seen
    assert (seen["preemptions"] > 0) == ("tiny cache" in name)
    assert seen["right drafts"] > seen["wrong drafts"] > 100


@pytest.mark.parametrize("asynchronous, seed", [(False, 0), (True, 1), (True, 2), (False, 3)])
@pytest.mark.parametrize("name", SETTINGS)
def test_random_requests(name, asynchronous, seed):
    """The same requests get the same answers under all settings, and what a setting is there for did happen."""
    seen = Simulation(random_requests(seed), asynchronous, **SETTINGS[name]).run().seen
    assert (seen["preemptions"] > 0) == ("tiny cache" in name)
    assert (seen["hits"] > 0) == ("no prefix caching" not in name)
    assert (seen["tokens thrown away"] > 0) == asynchronous
    assert seen["mixed"] > 0 and (seen["chunks"] > 0 or "chunks" not in name)


def test_random_requests_reach_rare_corners():
    """So that the test above keeps meaning what it says."""
    runs = [Simulation(random_requests(seed), True, **SETTINGS["tiny cache, tiny blocks"]).run() for seed in range(8)]
    seen = sum((run.seen for run in runs), Counter())
    assert seen["ended while preempted"] and seen["shared within a step"]


@pytest.mark.parametrize("name, asynchronous", [(name, i % 2 == 0) for i, name in enumerate(SETTINGS)])
def test_random_requests_for_several_answers(name, asynchronous):
    """Up to more answers than may run at a time; every one is what it would be alone, and each gets in."""
    seen = Simulation(random_requests(int(asynchronous), 40, max_n=9), asynchronous, **SETTINGS[name]).run().seen
    assert seen["forks"] > 10 and seen["aborted"] > 0
    assert (seen["left behind"] > 0) == (name != "all at once")  # to be computed again, as not all fit


def test_scheduler_needs_no_torch():
    """The same simulation in a process where torch can't be imported and the packages' own __init__ don't run."""
    import nanovllm

    root = Path(nanovllm.__file__).parent
    script = f"""if True:
        import sys, types
        sys.modules["torch"] = None
        for name, folder in (("nanovllm", {str(root)!r}), ("nanovllm.engine", {str(root / "engine")!r})):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [folder]
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_scheduler import SETTINGS, Simulation, random_requests
        print(Simulation(random_requests(0), True, **SETTINGS["tiny cache"]).run().seen["preemptions"])
    """
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 0


# -- one thing at a time ---------------------------------------------------------------------------------------------


def add(scheduler: Scheduler, *requests: Request) -> list[Sequence]:
    seqs = [make_sequence(i, request) for i, request in enumerate(requests, start=len(scheduler.running))]
    for seq in seqs:
        scheduler.add(seq)
    return seqs


def prompt(length: int, first: int = 100) -> list[int]:
    """Prompts of different `first` share no block."""
    return list(range(first, first + length))


def rows(step: ScheduledStep) -> list[tuple[int, int, int]]:
    return [(seq.request_id, start, end) for seq, start, end in step.rows]


def advance(scheduler: Scheduler, token_id: int = 7) -> ScheduledStep:
    """A step whose sequences all get the same token."""
    step = scheduler.schedule()
    postprocess(scheduler, step, [token_id] * len(step.sampled_seqs))
    return step


def test_chunks_ride_along_with_decodes():
    """A prompt that arrives while others decode is computed in the same steps, and holds none of them up."""
    scheduler = make_scheduler(max_num_mixed_tokens=10)
    (first,) = add(scheduler, Request(prompt(5)))
    assert rows(advance(scheduler)) == [(0, 0, 5)]
    assert rows(advance(scheduler)) == [(0, 5, 6)]
    (second,) = add(scheduler, Request(prompt(6, first=200)))
    step = advance(scheduler)
    assert rows(step) == [(0, 6, 7), (1, 0, 4)] and step.num_decodes == 1 and step.sampled_seqs == [first]
    step = advance(scheduler)
    assert rows(step) == [(0, 7, 8), (1, 4, 6)] and step.num_decodes == 1 and step.sampled_seqs == [first, second]
    step = advance(scheduler)
    assert rows(step) == [(0, 8, 9), (1, 6, 7)] and step.num_decodes == 2 and not step.chunks
    assert scheduler.stats()["steps"] == {"prefill": 1, "decode": 2, "mixed": 2}


def test_prompts_first():
    """Where nobody sees when a token arrives, sequences decode when no prompt is left, or none can be admitted."""
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_mixed_tokens=4, max_num_seqs=3)
    add(scheduler, *[Request(prompt(6, first=100 * i), max_tokens=2) for i in range(4)])
    steps = []
    while not scheduler.is_finished():
        steps.append(scheduler.schedule(prompts_first=True))
        postprocess(scheduler, steps[-1], [7] * len(steps[-1].sampled_seqs))
    assert [sum(end - start for _, start, end in step.chunks) for step in steps] == [8, 8, 2, 0, 6, 0]
    assert [step.num_decodes for step in steps] == [0, 0, 0, 3, 0, 1]


def test_what_a_sequence_says_of_itself():
    """Its length counts tokens in flight, and its contents do not."""
    scheduler = make_scheduler()
    (seq,) = add(scheduler, Request(prompt(5)))
    step = scheduler.schedule()
    assert (len(seq), seq.num_completion_tokens, seq.last_token) == (6, 0, 104)
    postprocess(scheduler, step, [7])
    assert (len(seq), seq.num_completion_tokens, seq.last_token) == (6, 1, 7)
    assert seq.prompt_token_ids == prompt(5) and seq.completion_token_ids == [7] and not seq.is_finished
    assert repr(seq) == "Sequence(0.0, RUNNING, 5 + 1 tokens, blocks [0, 1])"
    outputs_of(scheduler).end_all(0)
    assert seq.is_finished


def test_prompts_fill_the_token_budget():
    """A prompt that does not fit whole is computed as far as it goes, and on in the next step."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    seqs = add(scheduler, Request(prompt(3)), Request(prompt(14, first=200)), Request(prompt(2, first=300)))
    steps = [advance(scheduler) for _ in range(5)]
    assert [rows(step) for step in steps[:2]] == [[(0, 0, 3), (1, 0, 5)], [(0, 3, 4), (1, 5, 8)]]
    assert [rows(step) for step in steps[2:4]] == [[(0, 4, 5), (1, 8, 11)], [(0, 5, 6), (1, 11, 14)]]
    assert rows(steps[4]) == [(1, 14, 15), (0, 6, 7), (2, 0, 2)]  # the longest first, of those that decode
    assert [step.sampled_seqs for step in steps[:4]] == [seqs[:1], seqs[:1], seqs[:1], seqs[:2]]


def test_long_prompts_do_not_keep_short_ones_waiting():
    """A prompt that does not fit takes half of what is left of the budget while others wait."""
    scheduler = make_scheduler(num_blocks=3000, max_num_batched_tokens=2048, max_num_mixed_tokens=257)
    lengths = 5000, 3000, 20, 500
    seqs = [Sequence(i, prompt(n, first=i * 10_000), SamplingParams(), i, 9999) for i, n in enumerate(lengths)]
    for seq in seqs:
        scheduler.add(seq)
    assert rows(advance(scheduler)) == [(0, 0, 1024), (1, 0, 512), (2, 0, 20), (3, 0, 492)]
    assert rows(advance(scheduler)) == [(2, 20, 21), (0, 1024, 1152), (1, 512, 576), (3, 492, 500)]


def test_token_budget():
    """A chunk of tokens that attend to many others is shorter."""
    budget = TokenBudget(1000, context_of_equal_cost=2000)
    assert budget.chunk_end(0, 500, False) == 500 and budget.chunk_end(0, 500, True) == 500
    for start in (0, 100, 2000, 30_000):
        for others_wait in (False, True):
            end = budget.chunk_end(start, 40_000, others_wait)
            bound = 500 if others_wait else 1000
            assert budget.cost(start, end) <= bound <= budget.cost(start, end + 1)
    assert budget.chunk_end(2000, 40_000, False) - 2000 < 500 < budget.chunk_end(0, 40_000, False)
    assert TokenBudget(0.5).chunk_end(3, 9, False) == 4
    assert TokenBudget(2 * MIN_SHARED_CHUNK - 1).chunk_end(0, 999, True) == 2 * MIN_SHARED_CHUNK - 1
    assert TokenBudget(100).minus(10, 50) == TokenBudget(60)


def test_prompts_of_one_step_share_their_prefix():
    """What the first of them computes, the others of the same step find; each has its own last block."""
    scheduler = make_scheduler()
    seqs = add(scheduler, *[Request(prompt(8))] * 3)
    assert rows(advance(scheduler)) == [(0, 0, 8), (1, 4, 8), (2, 4, 8)]
    assert len({seq.block_table[0] for seq in seqs}) == 1 and len({seq.block_table[1] for seq in seqs}) == 3
    assert [seq.num_cached_tokens for seq in seqs] == [0, 4, 4]


def test_admission_in_groups_once_full():
    """A sixteenth of those that run must have ended before the next are admitted, and then all that fit are."""
    scheduler = make_scheduler(max_num_seqs=32, num_blocks=200, max_num_batched_tokens=1000)
    lasting = [Request(prompt(3, first=10 * i), max_tokens=2 + i) for i in range(32)]
    add(scheduler, *lasting, *[Request(prompt(3, first=1000 + 10 * i), max_tokens=50) for i in range(4)])
    assert len(rows(advance(scheduler))) == 32
    assert len(rows(advance(scheduler))) == 32  # the first ends with it
    assert [len(rows(advance(scheduler))) for _ in range(3)] == [31, 32, 31]


def test_admission_is_never_delayed_for_long():
    """Though only one of many has ended, the next is admitted after MAX_STEPS_WITHOUT_ADMISSION steps."""
    scheduler = make_scheduler(max_num_seqs=32, num_blocks=1000, max_num_batched_tokens=1000)
    lasting = [Request(prompt(3, first=10 * i), max_tokens=100 if i else 2) for i in range(32)]
    add(scheduler, *lasting, Request(prompt(3, first=1000), max_tokens=50))
    sizes = [len(rows(advance(scheduler))) for _ in range(MAX_STEPS_WITHOUT_ADMISSION + 3)]
    assert sizes == [32, 32, *[31] * (MAX_STEPS_WITHOUT_ADMISSION - 1), 32, 32]


def test_max_num_seqs():
    scheduler = make_scheduler(max_num_seqs=2)
    seqs = add(scheduler, *[Request(prompt(3, first=100 * i)) for i in range(3)])
    assert rows(advance(scheduler)) == [(0, 0, 3), (1, 0, 3)]
    assert list(scheduler.waiting) == seqs[2:]
    assert not advance(scheduler, EOS).chunks  # both end here
    assert rows(advance(scheduler)) == [(2, 0, 3)]


@pytest.mark.parametrize("num_blocks, is_admitted", [(3, False), (4, True)])
def test_admission_leaves_blocks_in_reserve(num_blocks, is_admitted):
    """With a free block for each running sequence, the next step does not preempt what was just admitted."""
    scheduler = make_scheduler(num_blocks)
    add(scheduler, Request(prompt(8)), Request(prompt(3, first=200)))
    assert len(advance(scheduler).rows) == 1 + is_admitted
    assert bool(advance(scheduler).chunks) != is_admitted or not is_admitted
    assert scheduler.num_preemptions == 0


def test_last_admitted_is_preempted_first_and_queued_first():
    """Preempted sequences are queued before those that never ran, in the order of their arrival."""
    scheduler = make_scheduler(num_blocks=7, max_num_seqs=3)
    first, second, third, fourth = add(scheduler, *[Request(prompt(4, first=100 * i)) for i in range(4)])
    advance(scheduler)
    for _ in range(20):
        if scheduler.num_preemptions == 1:
            assert list(scheduler.running.values()) == [first, second]
            assert list(scheduler.waiting) == [third, fourth]
        if scheduler.num_preemptions == 2:
            break
        advance(scheduler)
    assert list(scheduler.running.values()) == [first]
    assert list(scheduler.waiting) == [second, third, fourth]
    assert second.block_table == [] and second.req_index == -1 and second.num_computed_tokens == 0


def test_preempted_sequence_goes_on_from_what_it_has():
    """Its generated tokens are computed again with its prompt, as far as they are not found in the cache."""
    scheduler = make_scheduler()
    (seq,) = add(scheduler, Request(prompt(6)))
    for _ in range(5):
        advance(scheduler)
    scheduler.preempt(seq)
    assert len(seq.token_ids) == 11
    step = advance(scheduler)
    assert step.num_decodes == 0 and rows(step) == [(0, 8, 11)]
    assert seq.num_cached_tokens == 0  # of the prompt, and on first admission


def test_generated_block_can_be_found_once_its_tokens_arrived():
    """It is computed before the host knows its last token, and neither alone is enough."""
    scheduler = make_scheduler()
    cached = scheduler.block_manager.hash_to_block_id
    add(scheduler, Request(prompt(3)))
    steps = [scheduler.schedule(), scheduler.schedule()]
    assert not cached
    postprocess(scheduler, steps[0], [7])
    assert len(cached) == 1

    scheduler = make_scheduler()
    cached = scheduler.block_manager.hash_to_block_id
    add(scheduler, Request(prompt(3)))
    advance(scheduler)
    assert not cached
    advance(scheduler)
    assert len(cached) == 1


def test_only_rows_where_something_happens_are_visited():
    """A first token, the tokens around the end of a block, the last one, and all of those that are asked to be."""
    scheduler = make_scheduler()
    params = [SamplingParams(max_tokens=9, **p) for p in ({}, {}, {"stop_token_ids": [9]})]
    seqs = [Sequence(i, prompt(5, first=100 * i), p, 0, MAX_LEN) for i, p in enumerate(params)]
    seqs[1].is_watched = True
    for seq in seqs:
        scheduler.add(seq)
    visited = []
    while not scheduler.is_finished():
        step = scheduler.schedule()
        num_tokens = len(seqs[0].token_ids) + 1
        visited += [num_tokens] if seqs[0] in [step.sampled_seqs[i] for i in step.visited] else []
        indices = {seq.request_id: i for i, seq in enumerate(step.sampled_seqs)}
        assert step.watched == [indices[1]] and (2 not in indices or indices[2] in step.visited)
        postprocess(scheduler, step, [9 if num_tokens == 10 else 7] * len(indices))
    assert visited == [6, 8, 9, 12, 13, 14]
    assert [seq.num_completion_tokens for seq in seqs] == [9, 9, 5]
    assert [(seq.finish_reason, seq.stop_reason) for seq in seqs] == [("length", None)] * 2 + [("stop", 9)]


@pytest.mark.parametrize("token_id", [EOS, ALSO_EOS])
def test_token_in_flight_of_an_ended_sequence_is_thrown_away(token_id):
    """The step after the end was scheduled before the end was known."""
    scheduler = make_scheduler()
    (seq,) = add(scheduler, Request(prompt(3)))
    steps = [scheduler.schedule(), scheduler.schedule()]
    assert rows(steps[1]) == [(0, 3, 4)]
    assert postprocess(scheduler, steps[0], [token_id]) == [seq]
    assert scheduler.is_finished() and scheduler.schedule() is None
    assert postprocess(scheduler, steps[1], [5]) == []
    assert seq.completion_token_ids == [token_id] and seq.finish_reason == "stop"


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_preempted_sequence_may_end_with_its_token_in_flight(reason):
    """It ends in the queue, where it holds nothing that could be given back twice."""
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    first, second = add(scheduler, Request(prompt(4)), Request(prompt(2, first=200), max_tokens=3))
    prefill, decode = scheduler.schedule(), scheduler.schedule()
    assert postprocess(scheduler, prefill, [7, 7]) == []
    last = scheduler.schedule()
    assert postprocess(scheduler, decode, [7, 7]) == []
    step = scheduler.schedule()  # the first needs a block
    assert rows(step) == [(0, 6, 7)] and list(scheduler.waiting) == [second]
    assert postprocess(scheduler, last, [7, EOS if reason == "stop" else 7]) == [second]
    assert second.finish_reason == reason and len(second.completion_token_ids) == 3
    assert not scheduler.waiting and list(scheduler.running.values()) == [first]
    assert len(scheduler.free_req_indices) == 3 and sum(b.ref_count for b in scheduler.block_manager.blocks) == 4


def test_nothing_to_schedule_while_the_last_token_is_in_flight():
    scheduler = make_scheduler()
    (seq,) = add(scheduler, Request(prompt(3), max_tokens=1))
    step = scheduler.schedule()
    assert scheduler.schedule() is None and not scheduler.is_finished()
    assert postprocess(scheduler, step, [7]) == [seq]
    assert scheduler.is_finished()


@pytest.mark.parametrize(
    "request_, completion, reason",
    [
        (Request(prompt(3), max_tokens=3), [EOS], "stop"),
        (Request(prompt(3), max_tokens=3, ignore_eos=True), [EOS] * 3, "length"),
        (Request(prompt(MAX_LEN - 2), ignore_eos=True), [EOS] * 2, "length"),
    ],
)
def test_ends(request_, completion, reason):
    """At an end-of-sequence id unless told otherwise, after max_tokens, and at the engine's bound."""
    scheduler = make_scheduler()
    (seq,) = add(scheduler, request_)
    while not scheduler.is_finished():
        advance(scheduler, EOS)
    assert (seq.completion_token_ids, seq.finish_reason) == (completion, reason)


def leftovers(scheduler: Scheduler) -> tuple:
    manager = scheduler.block_manager
    held = sum(block.ref_count for block in manager.blocks)
    return len(manager.blocks) - len(manager.free_block_ids), held, len(scheduler.running), len(scheduler.waiting)


def test_abort_leaves_nothing():
    """Running, computed in part, preempted or never begun."""
    scheduler = make_scheduler(max_num_batched_tokens=24)
    seqs = add(scheduler, *[Request(prompt(9, first=100 * i)) for i in range(4)])
    advance(scheduler)
    scheduler.preempt(seqs[0])
    in_part, never_begun = seqs[2:]
    assert in_part.status is SequenceStatus.RUNNING and never_begun.status is SequenceStatus.WAITING
    for seq in seqs:
        outputs = outputs_of(scheduler)
        assert outputs.end_all(seq.request_id) == [seq] and outputs.end_all(seq.request_id) == []
    assert scheduler.is_finished() and leftovers(scheduler) == (0, 0, 0, 0)
    assert sorted(scheduler.free_req_indices) == list(range(4))
    assert {(seq.status, seq.finish_reason) for seq in seqs} == {(SequenceStatus.FINISHED, "abort")}


def test_abort_takes_no_longer_where_many_wait():
    def seconds(num_waiting: int) -> float:
        scheduler = make_scheduler(num_blocks=10)
        seqs = add(scheduler, *[Request(prompt(9, first=100 * i)) for i in range(num_waiting)])
        order = random.Random(0).sample(range(len(seqs)), len(seqs))
        outputs, begin = outputs_of(scheduler), thread_time()
        for request_id in order:
            outputs.end_all(request_id)
        assert scheduler.is_finished()
        return thread_time() - begin

    assert seconds(20_000) < 30 * seconds(2_000)  # and not 100 times as long


def test_reset_repairs_anything():
    """Whatever state an error left: all lists are whole again, and nothing is cached."""
    scheduler = make_scheduler(max_num_batched_tokens=12)
    manager = scheduler.block_manager
    seqs = add(scheduler, *[Request(prompt(9, first=100 * i), max_tokens=12) for i in range(4)])
    for _ in range(3):
        advance(scheduler)
    assert manager.hash_to_block_id and seqs[0].completion_token_ids
    rng = random.Random(0)
    for seq in seqs:  # any damage that a half-done move could do
        seq.block_table = rng.choices(range(64), k=3)
        seq.req_index = 2
    manager.free_block_ids.clear()
    manager.blocks[7].ref_count = -5
    manager.copies[3] = 4
    scheduler.free_req_indices = [1, 1, 1]
    scheduler.running.clear()
    scheduler.reset()
    assert leftovers(scheduler) == (0, 0, 0, 0) and sorted(scheduler.free_req_indices) == list(range(4))
    assert not manager.hash_to_block_id and not manager.copies and all(block.hash is None for block in manager.blocks)
    seqs = add(scheduler, *[Request(prompt(9, first=100 * i), max_tokens=12) for i in range(4)])
    assert rows(advance(scheduler))[0] == (0, 0, 9) and seqs[0].num_cached_tokens == 0
    while not scheduler.is_finished():
        advance(scheduler)
    assert [len(seq.completion_token_ids) for seq in seqs] == [12] * 4 and leftovers(scheduler) == (0, 0, 0, 0)


# -- beams -------------------------------------------------------------------------------------------------------------


def test_beams_share_what_they_have_in_common():
    """A fork shares the full blocks of its parent, and the last block is copied before the next step."""
    scheduler = make_scheduler()
    root = make_sequence(0, Request(prompt(6)))
    root.pauses = True
    scheduler.add(root)
    step = scheduler.schedule()
    postprocess(scheduler, step, [7])
    assert root.is_paused and root.completion_token_ids == [] and scheduler.schedule() is None
    second, third = scheduler.fork(root, 1, 8), scheduler.fork(root, 2, 9)
    scheduler.resume(root, 7)
    assert [seq.completion_token_ids for seq in (root, second, third)] == [[7], [8], [9]]
    assert second.block_table[:1] == third.block_table[:1] == root.block_table[:1]
    step = scheduler.schedule()
    assert sorted(rows(step)) == [(0, 6, 7)] * 3 and step.num_decodes == 0
    assert sorted(step.copies) == sorted((root.block_table[1], seq.block_table[1]) for seq in (second, third))
    postprocess(scheduler, step, [1, 1, 1])
    outputs_of(scheduler).end(root, "stop")
    scheduler.resume(second, 5)
    scheduler.fork(third, 3, 6)
    scheduler.resume(third, 5)
    step = scheduler.schedule()
    assert len(step.rows) == 3 and {end for _, _, end in step.rows} == {8} and len(step.copies) == 1
    assert outputs_of(scheduler).end_all(0) and leftovers(scheduler) == (0, 0, 0, 0)


def test_beams_that_find_no_blocks_are_computed_again():
    """Paused beams free their blocks for those that are not computed yet, though no other sequence ever ends."""
    scheduler = make_scheduler(num_blocks=4)
    root = make_sequence(0, Request(prompt(6)))
    root.pauses = True
    scheduler.add(root)
    beams, seen = [root], 0
    for length in range(7, 13):
        steps = 0
        while not all(seq.is_paused for seq in beams):
            step = scheduler.schedule()
            postprocess(scheduler, step, [1] * len(step.sampled_seqs))
            steps += 1
        seen = max(seen, steps)
        if length == 7:
            beams = [root, scheduler.fork(root, 1, 2), scheduler.fork(root, 2, 3)]
            scheduler.resume(root, 1)
        else:
            for seq in beams:
                scheduler.resume(seq, length)
    assert seen > 1 and scheduler.num_preemptions > 0
    assert [seq.completion_token_ids[0] for seq in beams] == [1, 2, 3] and {len(seq.token_ids) for seq in beams} == {12}
    outputs_of(scheduler).end_all(0)
    assert leftovers(scheduler) == (0, 0, 0, 0)
