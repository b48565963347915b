"""Simulated engines without a model: the engine's loop around the real scheduler, with checks after every third move.

Nothing here needs PyTorch.
"""

import itertools
import random
from collections import Counter, deque
from math import inf
from types import SimpleNamespace
from typing import NamedTuple
from zlib import crc32

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduled_step import ScheduledSequence, ScheduledStep, StepResult
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.scheduling_policy import make_policy
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.state_blocks import StateBlockManager
from nanovllm.engine.stats import stats_of
from nanovllm.engine.window_blocks import WindowBlockManager
from nanovllm.sampling_params import SamplingParams
from nanovllm.spec_decode.drafting_scheduler import DraftingScheduler
from nanovllm.spec_decode.proposer import Proposer
from nanovllm.spec_decode.speculative_config import ON_CPU

VOCAB_SIZE, EOS, ALSO_EOS = 50, 0, 1
MAX_LEN = 64


def rows(step: ScheduledStep) -> list[tuple[int, int, int]]:
    return [(seq.request_id, start, end) for seq, start, end in step.rows]


class RandomDrafts(Proposer):
    """Proposes random numbers of drafts. The simulation decides whether they are accepted."""

    def __init__(self, settings):
        super().__init__(settings)
        self.random = random.Random(0)

    def draft(self, seq, num_drafts):
        assert seq.num_tokens == len(seq.token_ids)
        return [0] * self.random.randint(0, num_drafts)


class SimulatedEngine:
    """A scheduler with a loop around it. All sequences of a step get the same token.

    They get it at once or, if `asynchronous`, after the next step has been scheduled. If `checked`,
    `check_accounting` runs after every third move.
    """

    def __init__(
        self,
        policy="fcfs",
        num_blocks=64,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_num_mixed_tokens=64,
        context_of_equal_cost=inf,
        enable_prefix_caching=True,
        num_drafts=0,
        drafts_on_host=False,
        max_len=MAX_LEN,
        asynchronous=False,
        checked=False,
        keeps_states=False,
        num_snapshots=0,
        window=None,
        num_window_tables=2,
    ):
        sizes = num_blocks, block_size, enable_prefix_caching
        states = max_num_seqs, max_num_seqs + num_snapshots
        self.manager = StateBlockManager(*sizes, *states) if keeps_states else BlockManager(*sizes)
        if window is not None:
            self.manager = WindowBlockManager(*sizes, num_window_tables, window)
        config = SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        config.max_num_mixed_tokens = max_num_mixed_tokens
        eos_token_ids = frozenset({EOS, ALSO_EOS})
        config.model_config = SimpleNamespace(context_of_equal_cost=context_of_equal_cost, eos_token_ids=eos_token_ids)
        config.eos = -1
        if num_drafts:
            sizes = dict(num_speculative_tokens=num_drafts, disable_by_batch_size=max(3, max_num_seqs - 2))
            settings = SimpleNamespace(method="draft_model", is_synthetic=False, step_cost=ON_CPU, **sizes)
            config.speculative_config = settings
            self.scheduler = DraftingScheduler(config, self.manager)
            if drafts_on_host:
                self.scheduler.proposer = RandomDrafts(settings)
        else:
            self.scheduler = Scheduler(config, self.manager)
        self.policy, self.max_len, self.checked = make_policy(policy), max_len, checked
        self.num_moves = 0
        self.num_requests = 0
        self.seqs: list[Sequence] = []  # all queued sequences
        self.unfinished: set[Sequence] = set()  # queued sequences that had not ended at the last check
        self.steps: list[ScheduledStep] = []
        self.max_in_flight = 1 if asynchronous else 0
        self.in_flight: deque[tuple[ScheduledStep, StepResult]] = deque()

    def make_group(self, prompt: list[int], max_tokens=64, n=1, priority=0, key=0, **params) -> list[Sequence]:
        """Make the sequences of a request. Each gets a different seed, made from `key`."""
        request_id, self.num_requests = self.num_requests, self.num_requests + 1
        sampling_params = SamplingParams(max_tokens=max_tokens, n=n, **params)
        seeds = [key + 1000 * i for i in range(n)]
        same = dict(request_id=request_id, max_len=self.max_len, priority=priority)
        group = [Sequence([*prompt], sampling_params, noise_seed=seed, index=i, **same) for i, seed in enumerate(seeds)]
        for seq in group:
            seq.group = group
            seq.set_order(self.policy.priority_key(group[0]))
        return group

    def queue(self, group: list[Sequence]) -> None:
        self.seqs += group
        self.unfinished.update(group)
        self.scheduler.add(*group)

    def add(self, prompt: list[int], *args, **options) -> Sequence:
        """Queue a request with the arguments of `make_group`, and return its first sequence."""
        group = self.make_group(prompt, *args, **options)
        self.queue(group)
        return group[0]

    def abort(self, request_id: int) -> list[Sequence]:
        return self.scheduler.abort(request_id)

    def step(self, token_id: int = 7, prompts_first: bool = False) -> ScheduledStep | None:
        """Schedule a step, and give the sequences of this step, or of the previous step, their tokens."""
        step = self.scheduler.schedule(prompts_first)
        assert step or self.in_flight or self.scheduler.held or self.blocks_of_loads(), "stuck"
        if step:
            self.steps.append(step)
            self.in_flight.append((step, self.compute(step, token_id)))
        self.check_move()
        if len(self.in_flight) > self.max_in_flight or (self.in_flight and not step):
            self.postprocess(*self.in_flight.popleft())
            self.check_move()
        return step

    def run(self) -> None:
        """Run steps until all sequences have ended."""
        while not self.scheduler.is_finished():
            self.step()

    def compute(self, step: ScheduledStep, token_id: int) -> StepResult:
        return StepResult([token_id] * len(step.sampled_seqs), {})

    def postprocess(self, step: ScheduledStep, result: StepResult) -> list[Sequence]:
        """Postprocess a step, and return the sequences that have ended."""
        return [seq for seq in self.scheduler.postprocess(step, result) if seq.is_finished]

    def give(self, step: ScheduledStep, *token_ids: int) -> list[Sequence]:
        """Give tokens to the sequences of a step that the test has scheduled. Returns the sequences that have ended."""
        return self.postprocess(step, StepResult([*token_ids], {}))

    def check_move(self) -> None:
        """Check every third move. What a move leaves behind is still there later."""
        self.num_moves += 1
        if self.checked and self.num_moves % 3 == 0:
            self.check_accounting()

    def check_accounting(self) -> None:
        """Check that each sequence is in the list of its status, and that blocks and request indices have one owner."""
        scheduler, manager = self.scheduler, self.manager
        live = {*scheduler.prefilling.values(), *scheduler.running.values()}
        assert len(live) == len(scheduler.prefilling) + len(scheduler.running)
        assert all(seq.status is SequenceStatus.RUNNING for seq in live)
        waiting = [*scheduler.waiting]
        assert all(seq.status is SequenceStatus.WAITING for seq in waiting)
        orders = [seq.order for seq in waiting]
        assert orders == sorted(orders)
        waiting += [seq for seq in self.scheduler.held if seq.status is SequenceStatus.WAITING]  # they are in no queue
        assert len(waiting) + len(live) == sum(map(len, scheduler.live.values()))
        assert len(live) <= scheduler.max_num_seqs
        indices = [seq.req_index for seq in live]
        assert sorted(indices + self.free_req_indices()) == list(range(scheduler.max_num_seqs))

        held = Counter(itertools.chain(*map(self.blocks_of, live), self.blocks_of_loads()))
        assert {block.block_id: block.ref_count for block in manager.blocks if block.ref_count} == held
        assert manager.free_block_ids.keys() == set(range(len(manager.blocks))) - held.keys()
        self.check_findable()

        in_flight = Counter()
        for step, _ in self.in_flight:
            in_flight.update(dict(zip(step.sampled_seqs, step.num_reserved)))
            in_flight.update(step.new_seqs)
        ended = [seq for seq in self.unfinished if seq.status is SequenceStatus.FINISHED]
        self.unfinished.difference_update(ended)  # a block that one of them still held would show above
        assert {*live, *waiting} == self.unfinished
        expected = [in_flight.get(seq, 0) for seq in self.unfinished]  # faster than `in_flight[seq]`
        assert [seq.num_tokens - len(seq.token_ids) for seq in self.unfinished] == expected
        assert not [seq for seq in (*waiting, *ended) if seq.block_table or seq.req_index != -1]
        for seq in live:
            assert len(set(seq.block_table)) == len(seq.block_table)
            self.check_cached(seq)
        assert all(seq.num_computed_tokens == seq.num_tokens - 1 for seq in self.scheduler.running.values())

    def blocks_of(self, seq: Sequence) -> list[int]:
        return seq.block_table

    def blocks_of_loads(self) -> list[int]:
        """Return the blocks that loads from a second tier of the cache hold."""
        return []

    def free_req_indices(self) -> list[int]:
        return self.scheduler.free_req_indices

    def check_findable(self) -> None:
        """Check that each block with a hash is in the tables of the manager exactly once."""
        manager = self.manager
        known = [*manager.hash_to_block_id.items()]
        known += [(key, block_id) for key, duplicate_ids in manager.duplicates.items() for block_id in duplicate_ids]
        expected = {(block.hash, block.block_id) for block in manager.blocks if block.hash != -1}
        known += [(key, block_id) for key, column in self.cached_columns() for block_id in column]
        assert {*known} == expected and len(known) == len(expected)
        assert manager.duplicates.keys() <= manager.hash_to_block_id.keys() and all(manager.duplicates.values())

    def cached_columns(self) -> list[tuple[int, tuple[int, ...]]]:
        return []

    def check_cached(self, seq: Sequence) -> None:
        """Check that only full blocks of known and computed tokens have a hash, and that their tokens are right."""
        size, blocks = self.manager.block_size, self.manager.blocks
        num_full = min(seq.num_computed_tokens, len(seq.token_ids)) // size
        for i, block_id in enumerate(seq.block_table):
            if blocks[block_id].hash != -1:
                assert i < num_full and blocks[block_id].token_ids == seq.token_ids[i * size : (i + 1) * size]


# -- random requests on a device with a cache --------------------------------------------------------------------------


class Request(NamedTuple):
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    key: int  # determines the sampled tokens
    arrival: int  # iterations of the loop before the request is added
    n: int = 1
    aborted_at: int = 1000


def true_tokens(request: Request, index: int = 0) -> list[int]:
    """Return the prompt and all tokens that could be sampled after it, which depend only on request and position."""
    last = min(len(request.prompt) + request.max_tokens, MAX_LEN)
    key = request.key + 1000 * index
    return request.prompt + [crc32(b"%d %d" % (key, i)) % VOCAB_SIZE for i in range(len(request.prompt), last)]


def true_answer(request: Request, index: int) -> tuple[list[int], str]:
    """Return the answer to a request and its finish reason, which must not depend on other requests."""
    completion = true_tokens(request, index)[len(request.prompt) :]
    ends = [i for i, token_id in enumerate(completion) if token_id in (EOS, ALSO_EOS) and not request.ignore_eos]
    return (completion[: ends[0] + 1], "stop") if ends else (completion, "length")


def fingerprints(token_ids: list[int]) -> list[int]:
    """Return a fingerprint of the keys and values at each position: a hash of all tokens up to and including it."""
    marks = [0]
    for token_id in token_ids:
        marks.append(hash((marks[-1], token_id)))
    return marks[1:]


def random_requests(seed: int, num_requests: int = 30, max_n: int = 1) -> list[Request]:
    """Make random requests. Many begin like the prompt and answer of an earlier request; some also go on like it.

    With `max_n` > 1, half of them have several answers, and some are aborted.
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


class Simulation(SimulatedEngine):
    """Runs requests on a simulated device with a cache and no model, and checks everything after every third move.

    The device computes each step at once, whereas a CUDA stream would compute it later. `seen` counts events.
    """

    def __init__(self, requests: list[Request], asynchronous: bool, **settings):
        super().__init__(asynchronous=asynchronous, checked=True, **settings)
        self.requests = requests
        self.groups = [
            self.make_group(x.prompt, x.max_tokens, x.n, key=x.key, ignore_eos=x.ignore_eos) for x in requests
        ]
        self.tokens = {seq: true_tokens(requests[seq.request_id], seq.index) for group in self.groups for seq in group}
        self.marks = {seq: fingerprints(token_ids) for seq, token_ids in self.tokens.items()}
        self.cache = [[0] * self.manager.block_size for _ in self.manager.blocks]  # fingerprints
        # tables on the device, by request index
        self.last_token_ids: dict[int, int] = {}
        self.num_tokens: dict[int, int] = {}
        self.block_tables: dict[int, list[int]] = {}
        self.random = random.Random(len(requests))  # decides whether a draft is accepted
        self.first_start: dict[Sequence, int] = {}
        self.seen: Counter = Counter()

    def run(self) -> "Simulation":
        arrivals = deque(sorted(self.groups, key=lambda group: self.requests[group[0].request_id].arrival))
        for iteration in itertools.count():
            while arrivals and self.requests[arrivals[0][0].request_id].arrival <= iteration:
                self.queue(arrivals.popleft())
            for request_id, request in enumerate(self.requests):
                if request.aborted_at == iteration:
                    self.seen["aborted"] += len(self.abort(request_id))
                    self.check_move()
            if self.in_flight or not self.scheduler.is_finished():
                self.step(prompts_first=iteration % 3 == 1)
            elif not arrivals:
                break
        self.seen["preemptions"] = self.scheduler.num_preemptions
        self.check_end()
        return self

    def postprocess(self, step: ScheduledStep, result: StepResult) -> list[Sequence]:
        before = {seq: seq.status for seq in step.sampled_seqs}
        finished = super().postprocess(step, result)
        ended = [seq for seq in step.sampled_seqs if seq.status is SequenceStatus.FINISHED]
        assert {*finished} == {seq for seq in ended if before[seq] is not SequenceStatus.FINISHED}
        self.seen["tokens thrown away"] += len(ended) - len(finished)
        self.seen["ended while preempted"] += sum(before[s] is SequenceStatus.WAITING for s in finished)
        return finished

    def compute(self, step: ScheduledStep, token_id: int) -> StepResult:
        """Write the cache, check that each sequence reads what it should, and sample the token of each sequence."""
        rows = self.rows_on_device(step)
        self.check_step(step, rows)
        num_blocks, size = self.manager.num_blocks, self.manager.block_size
        copied = {target: [*self.cache[source]] for target, source in step.copies.items() if target < num_blocks}
        for target, marks in copied.items():
            self.cache[target] = marks
        for i, column, block_id in step.new_blocks:
            table = self.block_tables[step.req_indices[i]]
            assert column == len(table)
            table.append(block_id)
        for seq, start, _ in rows[: step.num_decodes]:  # the input is on the device; the host may not know it
            assert self.last_token_ids[seq.req_index] == self.tokens[seq][start]
            assert self.block_tables[seq.req_index] == seq.block_table
        counts = [1] * len(step.sampled_seqs)
        for i, (seq, start, end) in enumerate(rows):
            num_right = end - start
            if i < step.num_decodes:
                are_right = [self.random.random() < 0.7 for _ in range(num_right - 1)]
                counts[i] = num_right = (True, *are_right, False).index(False)
            marks = self.marks[seq][start : start + num_right] + [-1] * (end - start - num_right)
            for position, mark in enumerate(marks, start):
                for block_id in self.column(seq, position // size):
                    self.cache[block_id][position % size] = mark
        for i, (seq, start, end) in enumerate(rows):
            num_read = start + counts[i] if i < step.num_decodes else end
            assert self.read(seq, num_read) == self.marks[seq][:num_read], "another sequence's keys and values"
            self.check_windows(seq, start, num_read)
        token_ids, k = [], step.tokens_per_row
        copied = self.manager.copies  # blocks that the next step copies can't be read yet
        for seq, row, count in zip(step.sampled_seqs, step.sampled_rows, counts, strict=True):
            end = rows[row].start + count if row < step.num_decodes else rows[row].end
            context = self.read(seq, end, unless=copied)
            assert context == self.marks[seq][: len(context)], "what was shared is not its own prompt's"
            assert len(context) == end or end - len(context) == end % size
            token_ids += [*self.tokens[seq][end + 1 - count : end + 1], *[-1] * (k - count)]
            self.last_token_ids[seq.req_index] = self.tokens[seq][end]
            self.num_tokens[seq.req_index] = end + 1
        for seq in step.new_seqs:
            self.block_tables[seq.req_index] = [*seq.block_table]
        self.seen["wrong drafts"] += int(sum(step.num_reserved)) - sum(counts[: step.num_decodes])
        self.seen["right drafts"] += sum(counts) - len(counts)
        return StepResult(token_ids, {}, counts if k > 1 else None)

    def rows_on_device(self, step: ScheduledStep) -> list[ScheduledSequence]:
        """Return the rows of the step with the device's positions of decodes, for which the host has upper bounds."""
        rows = step.rows
        for i, (num_reserved, (seq, start, end)) in enumerate(zip(step.num_reserved, rows)):
            first = self.num_tokens[seq.req_index] - 1
            assert first <= start and end == start + num_reserved and 1 <= num_reserved <= step.tokens_per_row
            rows[i] = ScheduledSequence(seq, first, first + num_reserved)
        return rows

    def read(self, seq: Sequence, end: int, unless=()) -> list[int]:
        """Return what the cache holds for the first `end` tokens of `seq`, except for the blocks in `unless`."""
        size = self.manager.block_size
        block_ids = seq.block_table[: -(-end // size)]
        ends = range(end, 0, -size)  # within each block
        return [mark for x, n in zip(block_ids, ends) if x not in unless for mark in self.cache[x][:n]]

    def column(self, seq: Sequence, i: int) -> list[int]:
        """Return the blocks that store a sequence's tokens of column `i` of its block tables."""
        return [seq.block_table[i]]

    def check_windows(self, seq: Sequence, start: int, end: int) -> None:
        """Check what the tokens from `start` to `end` see in window tables."""

    def check_step(self, step: ScheduledStep, rows: list[ScheduledSequence]):
        """Check that the rows of a step are within bounds, and write only to blocks that nobody else reads."""
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
            if seq is not (first := rows[row].seq):
                assert row >= step.num_decodes and seq.group is first.group and seq not in self.first_start
                num_full, in_part = divmod(seq.num_prompt_tokens, self.manager.block_size)
                self.first_start[seq] = self.first_start[first]
                readers.update(seq.block_table[:num_full])
                writers.update(seq.block_table[num_full:])
                assert len(seq.block_table) == num_full + 1
                source = self.manager.copies.get(seq.block_table[-1])
                assert source == (first.block_table[num_full] if in_part else None)
                self.seen["forks"] += 1
        for block_id, num_writers in writers.items():  # other holders read what this step writes
            num_holders = self.manager.blocks[block_id].ref_count - self.blocks_of_loads().count(block_id)
            assert num_writers == 1 and num_holders == 1 + readers[block_id]
        decodes = [seq for seq, _, _ in rows[: step.num_decodes]]
        complete = [seq for seq, _, end in step.chunks if end == len(seq.token_ids)]
        owners = [seq for seq, row in zip(step.sampled_seqs, step.sampled_rows) if rows[row].seq is seq]
        assert owners == decodes + complete and step.sampled_seqs[: step.num_decodes] == decodes
        assert step.sampled_rows == sorted(step.sampled_rows) and len({*step.sampled_seqs}) == len(step.sampled_seqs)
        num_chunk_tokens = sum(end - start for _, start, end in step.chunks)
        bound = self.scheduler.budget.num_tokens
        if step.num_decodes and step.chunks:
            bound = min(bound, self.scheduler.mixed_budget.num_tokens)
            bound = max(bound, step.num_decode_tokens + max(1, bound // 4))
            self.seen["mixed"] += 1
        if step.chunks:
            assert step.num_decode_tokens + num_chunk_tokens <= bound
        assert len({seq for seq, _, _ in rows}) == len(rows) <= self.scheduler.max_num_seqs
        self.seen["chunks"] += len(step.chunks) - len(complete)
        self.seen["shared within a step"] += bool(writers.keys() & readers.keys())

    def check_end(self):
        """Check that nothing is left, and that each answer is the same as without other requests."""
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
        counts = stats_of(self.scheduler)
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


class StateSimulation(Simulation):
    """A simulation whose model also has a layer with a state: the fingerprint of the last token that it has seen.

    `num_snapshots` rows are only for snapshots of states.
    """

    def __init__(self, *args, **settings):
        super().__init__(*args, keeps_states=True, **settings)
        self.states = {self.manager.rows.zeros: 0}

    def compute(self, step: ScheduledStep, token_id: int) -> StepResult:
        num_blocks, before = self.manager.num_blocks, dict(self.states)
        for target, source in step.copies.items():
            if target >= num_blocks:
                self.states[target - num_blocks] = before[source - num_blocks]
                self.seen["copies of states"] += 1
        chunks, rows = zip(step.chunks, step.state_rows, strict=True), step.rows
        decodes = ((row, row.seq.req_index) for row in rows[: step.num_decodes])
        writers = {seq.req_index: seq for seq, _, _ in rows}
        for (seq, start, _), row in (*decodes, *chunks):
            assert self.states[row] == (self.marks[seq][start - 1] if start else 0), "another sequence's state"
            assert writers.get(row, seq) is seq, "another sequence's chunk writes it meanwhile"
            if start and seq not in self.first_start:
                self.seen["snapshots read"] += 1
                self.seen["snapshots in rows of sequences"] += row < self.manager.rows.num_indices
                self.seen["snapshots that are overwritten"] += row == seq.req_index
        for seq, _, end in rows:
            self.states[seq.req_index] = self.marks[seq][end - 1]
        result = super().compute(step, token_id)
        for block_id, row in self.manager.snapshots.items():
            assert self.states[row] == self.cache[block_id][-1]
        return result

    def check_accounting(self) -> None:
        super().check_accounting()
        manager = self.manager
        indices = [seq.req_index for seq in (*self.scheduler.running.values(), *self.scheduler.prefilling.values())]
        rows = [*indices, *self.rows_of_snapshots(), *manager.rows.free_indices, *manager.rows.free_others]
        padding, zeros = manager.max_num_seqs, manager.rows.zeros
        assert sorted([*rows, padding, zeros]) == [*range(manager.num_states + 2)]
        assert all(manager.blocks[block_id].hash != -1 for block_id in (*manager.snapshots, *manager._untaken))
        running = {*self.scheduler.running.values(), *self.scheduler.prefilling.values()}
        assert manager._boundaries.keys() <= running and not manager._first_rows

    def rows_of_snapshots(self) -> list[int]:
        manager = self.manager
        return [*manager.snapshots.values(), *manager._untaken.values(), *manager._unused]

    def free_req_indices(self) -> list[int]:
        """Return the free indices, including indices whose rows hold snapshots."""
        rows = self.manager.rows
        return [*rows.free_indices, *(row for row in self.rows_of_snapshots() if row < rows.num_indices)]


class WindowSimulation(Simulation):
    """A simulation whose model also has layers with a window, in block tables of their own."""

    def blocks_of(self, seq: Sequence) -> list[int]:
        return [*seq.block_table, *itertools.chain.from_iterable(self.manager._held(seq))]

    def cached_columns(self) -> list[tuple[int, tuple[int, ...]]]:
        return [*self.manager.columns.items()]

    def column(self, seq: Sequence, i: int) -> list[int]:
        assert i >= self.manager._num_freed[seq]
        return [seq.block_table[i], *seq.window_columns[i]]

    def check_windows(self, seq: Sequence, start: int, end: int) -> None:
        size, first = self.manager.block_size, max(0, start + 1 - self.manager.window)
        for position in range(first, end):
            for block_id in self.column(seq, position // size):
                assert self.cache[block_id][position % size] == self.marks[seq][position]

    def check_accounting(self) -> None:
        super().check_accounting()
        manager, live = self.manager, {*self.scheduler.running.values(), *self.scheduler.prefilling.values()}
        assert manager._num_freed.keys() == live
        for seq in live:
            num_freed = manager._num_freed[seq]
            assert not any(map(any, seq.window_columns[:num_freed]))
            assert num_freed <= manager.first_column(min(seq.num_computed_tokens, len(seq.token_ids)))
            assert len(seq.window_columns) <= len(seq.block_table)
        for block_hash, column in manager.columns.items():
            blocks = [manager.blocks[block_id] for block_id in column]
            assert {(block.hash, block.ref_count) for block in blocks} == {(block_hash, blocks[0].ref_count)}
        if self.scheduler.block_manager.groups():
            assert sum(group["used"] for group in manager.groups()) == len(manager.used_block_ids)
        settled = {*self.scheduler.running.values()} - {*manager._chunked}
        held = [len(manager._held(seq)) for seq in settled]
        self.seen["most columns held"] = max([self.seen["most columns held"], *held])
        self.seen["freed columns"] += sum(manager._num_freed.values())
