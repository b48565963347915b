"""The second tier of the prefix cache: blocks that leave the device come back, and nothing else changes."""

import ctypes
import gc
import os
import random
import re
import runpy
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import islice
from pathlib import Path
from time import monotonic, sleep
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import numpy as np
import pytest
import test_models
import torch
from common import TWO_GPUS
from safetensors.torch import load_file, save_file
from simulation import (
    SETTINGS,
    SimulatedEngine,
    Simulation,
    StateSimulation,
    WindowSimulation,
    fingerprints,
    random_requests,
    true_tokens,
)

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.cache.block_copies import block_parts
from nanovllm.engine.admission import MAX_STEPS_WITHOUT_ADMISSION
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.rollout import weights_of
from nanovllm.tiers import disk_tier, host_blocks, tiered_blocks
from nanovllm.tiers.block_files import BlockFiles
from nanovllm.tiers.connector import Connector
from nanovllm.tiers.host_blocks import HostBlocks, PinnedBlocks, row_bytes
from nanovllm.tiers.host_tier import HostTier
from nanovllm.tiers.shared_rows import SharedRows
from nanovllm.tiers.tiered_blocks import install_connector, use_connector
from nanovllm.utils import cuda_driver
from nanovllm.utils.tensor_parallel import TensorParallel

pytestmark = pytest.mark.small_model


# -- without a model ---------------------------------------------------------------------------------------------------


class LateBlocks:
    """Replaces HostBlocks on a simulated device, and makes copies as late as the order of streams allows.

    So what a step must wait for is missing if it does not wait. Rank 0 believes that a copy has ended after a random
    number of questions, whatever this rank has done.
    """

    def __init__(self, runner, num_rows: int, shared: None):
        self.memory, self.random, self.failures = runner.memory, runner.random, runner.failures
        self.rows: list = [None] * num_rows
        self.queues: dict[str, list] = {"put": [], "get": []}  # (number, copies, how many puts come first)
        self.num_puts, self.num_done = 0, 0

    def put(self, runner, number, copies):
        self._queue("put", number, copies.T.tolist(), 0)

    def get(self, runner, number, copies):
        self._queue("get", number, copies.T.tolist(), self.num_puts)

    def _queue(self, action, number, copies, num_before):
        """Queue a copy. If the copy fails, queue only its beginning, but copy whole blocks and states."""
        fails = self.failures and self.random.random() < {"put": 0.1, "get": 0.2}[action]
        if fails:
            first = copies[self.random.randrange(len(copies))][0]
            copies = copies[: [block_id for block_id, _ in copies].index(first)]
        self.queues[action].append((number, copies, num_before))
        self.num_puts += action == "put"
        if fails:
            raise OSError("a copy could not begin")
        self._make_some()

    def has_ended(self, number):
        if self.failures and self.random.random() < 0.1:
            raise OSError("a copy has failed")
        return self.random.random() < 0.3

    def order_steps(self, numbers):
        for number in numbers:
            for action, queue in self.queues.items():
                while queue and queue[0][0] <= number and number in [x for x, _, _ in queue]:
                    self._make(action)

    def _make_some(self):
        for action in ("put", "get", "put"):
            if self.queues[action] and self.random.random() < 0.2:
                self._make(action)

    def _make(self, action):
        _, copies, num_before = self.queues[action].pop(0)
        if action == "put":
            self.num_done += 1
        while self.num_done < num_before:
            self._make("put")
        for block_id, row in copies:
            if action == "put":
                self.rows[row] = self.memory.read(block_id)
        for block_id in {block_id for block_id, _ in copies} if action == "get" else ():
            stored, *others = [self.rows[row] for i, row in copies if i == block_id]
            self.memory.write(block_id, stored if all(other == stored for other in others) else "parts of two states")

    def num_rows_of(self, runner, block_id):
        return 1 if block_id < len(self.memory.cache) else 3


class Memory:
    """The blocks of a simulated device, and its states, which a simulation may replace."""

    def __init__(self, cache, simulation=None):
        self.cache, self.simulation = cache, simulation

    def read(self, block_id):
        i = block_id - len(self.cache)
        return [*self.cache[block_id]] if i < 0 else self.simulation.states.get(i)

    def write(self, block_id, content):
        i = block_id - len(self.cache)
        if i < 0:
            self.cache[block_id] = [*content]
        else:
            self.simulation.states[i] = content
            self.simulation.seen["loaded snapshots"] += 1


class Tiered:
    """Gives a simulated engine a second tier."""

    def use(self, connector):
        install_connector(self.scheduler, connector)
        self.manager = self.scheduler.block_manager

    def use_late_host(self, num_rows, memory, failures):
        device = dict(device=SimpleNamespace(type="cpu"), on_device=nullcontext, min_of_ranks=int)
        runner = SimpleNamespace(memory=memory, random=random.Random(0), failures=failures, **device)
        self.tier = HostTier(SimpleNamespace(workers=SimpleNamespace(processes=()), model_runner=runner), num_rows)
        self.use(self.tier)

    def blocks_of_loads(self):
        return [block_id for load in getattr(self.manager, "loads", ()) for block_id in load.held]


class TieredEngine(Tiered, SimulatedEngine):
    pass


class TieredSimulation(Tiered, Simulation):
    is_cleared = True  # whether the cache is emptied now and then

    def __init__(self, requests, asynchronous, num_rows, failures=False, **settings):
        super().__init__(requests, asynchronous, **settings)
        for seq in self.marks:
            self.set_salt(seq, self.requests[seq.request_id])
        self.use_late_host(num_rows, Memory(self.cache, self), failures)

    def set_salt(self, seq, request):
        """Sequences with different salts share nothing."""
        seq.cache_salt = request.key % 5 // 4
        self.marks[seq] = fingerprints([seq.cache_salt, *self.tokens[seq]])[1:]

    def submit(self, request):
        """Queue a request while others run, and return its sequences."""
        group = self.make_group(
            request.prompt, request.max_tokens, request.n, key=request.key, ignore_eos=request.ignore_eos
        )
        for seq in group:
            self.tokens[seq] = true_tokens(request, seq.index)
            self.set_salt(seq, request)
        self.queue(group)
        return group

    def finish(self):
        """Run until nothing is left, and forget the requests."""
        while self.in_flight or not self.scheduler.is_finished():
            self.step()
        while self.manager.loads:  # of sequences that were aborted
            self.manager.begin_step()
        assert all(seq.is_finished for seq in self.seqs)
        for known in (self.seqs, self.unfinished, self.steps, self.tokens, self.marks, self.first_start):
            known.clear()
        self.check_accounting()

    def check_move(self):
        super().check_move()
        tier, manager = self.tier, self.manager
        rows = [row for entry in tier._entries.values() for row in entry.rows]
        assert len({*rows, *tier._free_rows}) == len(rows) + len(tier._free_rows) == tier._num_rows
        assert {*manager._arriving} == {content.block_hash for load in manager.loads for content in load.contents}
        num_ids = len(manager.blocks) + getattr(manager, "num_states", -2) + 2
        assert len(tier._copies) <= num_ids and len(tier._reads) <= len(tier._copies)
        number = self.random.random() if self.is_cleared else 0.5
        if number < 0.01:
            manager.clear_prefix_cache()
            self.seen["cleared"] += 1
        elif number > 0.997:
            manager.store_all()
            manager.clear_device()
            self.seen["stored all"] += 1

    def check_end(self):
        while self.manager.loads:  # of sequences that were aborted
            self.manager.begin_step()
        super().check_end()
        assert not any(entry.num_reads for entry in self.tier._entries.values())
        self.seen["loaded"] = self.scheduler.totals["loaded_blocks"]
        self.seen["lost"] = self.scheduler.totals["lost_copies"]


class TieredStates(TieredSimulation, StateSimulation):
    """A simulation of a model with states, and a second tier."""

    def rows_of_snapshots(self):
        first, loads = len(self.manager.blocks), getattr(self.manager, "loads", ())
        arriving = [block_id - first for load in loads for block_id in load.block_ids if block_id >= first]
        return super().rows_of_snapshots() + arriving


class TieredWindows(TieredSimulation, WindowSimulation):
    """A simulation of a model with window tables, and a second tier."""


CAPACITIES = [1, 3, 40, 1000]


@pytest.fixture(autouse=True)
def late_copies(monkeypatch):
    monkeypatch.setattr(host_blocks, "HostBlocks", LateBlocks)
    monkeypatch.setattr(tiered_blocks, "IDLE_SECONDS", 0)


def seeds_of(name: str) -> list[int]:
    """Return both seeds for the settings that load most blocks, and one of them for the others."""
    return [0, 1] if "tiny cache" in name else [([*SETTINGS].index(name) + 1) % 2]


@pytest.mark.parametrize(
    "name, seed", [(name, seed) for name in SETTINGS if "no prefix caching" not in name for seed in seeds_of(name)]
)
def test_random_requests_with_a_tier(monkeypatch, name, seed):
    """Answers and blocks are right with any capacity, however late copies are made, and whether they succeed."""
    seen, settings = Counter(), SETTINGS[name] | {"num_blocks": min(40, SETTINGS[name]["num_blocks"])}
    for i, num_rows in enumerate(CAPACITIES):
        monkeypatch.setattr(tiered_blocks, "NUM_AHEAD", (0, 2, 128)[(i + seed) % 3])
        drafts = dict(num_drafts=1, drafts_on_host=i % 2 == 0) if (i + seed) % 2 else {}
        requests = random_requests(seed, 34, max_n=1 if drafts else 5)
        seen += TieredSimulation(requests, i % 2 == 1, num_rows, i == 2, **settings | drafts).run().seen
    assert seen["loaded"] > (10 if "tiny cache" in name else 5) and seen["lost"] > 0, seen


TINY = {"tiny cache": 0, "tiny cache, tiny blocks": 0, "tiny cache, chunks": 0}  # seeds


@pytest.mark.parametrize("name", TINY)
def test_random_requests_with_states(monkeypatch, name):
    """A snapshot takes three rows in host memory."""
    seen = Counter()
    for i, (num_rows, num_snapshots) in enumerate([(40, 3), (1000, 2), (60, 60)]):
        monkeypatch.setattr(tiered_blocks, "NUM_AHEAD", (0, 2, 128)[i])
        monkeypatch.setattr(tiered_blocks, "NUM_SNAPSHOTS_AHEAD", 4 * (i == 1))
        requests, settings = random_requests(TINY[name], 24, max_n=5), SETTINGS[name] | {"num_snapshots": num_snapshots}
        seen += TieredStates(requests, i != 1, num_rows, i != 1, **settings).run().seen
    assert seen["loaded"] > 20 and seen["loaded snapshots"] > 5 and seen["lost"] > 0, seen


@pytest.mark.parametrize("name", TINY)
def test_random_requests_with_windows(monkeypatch, name):
    """A prefix needs some columns of the window tables in addition."""
    seen = Counter()
    for i, (num_rows, window) in enumerate([(40, 1), (1000, 9), (1000, 30)]):
        monkeypatch.setattr(tiered_blocks, "NUM_AHEAD", (0, 2, 128)[i])
        drafts = dict(num_drafts=1, drafts_on_host=name == "tiny cache") if i == 1 else {}
        requests = random_requests(TINY[name], 24, max_n=1 if drafts else 5)
        settings = SETTINGS[name] | drafts | {"window": window}
        seen += TieredWindows(requests, i > 0, num_rows, i != 1, **settings).run().seen
    assert seen["loaded"] > 10 and seen["lost"] > 0, seen


class ToyStore(Connector):
    """Stores any number of blocks, and copies them at once, unless `fails`."""

    def __init__(self, runner):
        self.runner, self.stored, self.fails = runner, {}, False
        self.num_put, self.num_got = 0, 0

    def contains(self, block_hash, token_ids):
        return block_hash in self.stored and self.stored[block_hash][0] == token_ids

    def put(self, blocks):
        for block_hash, token_ids, block_ids in blocks:
            self._check()
            self.num_put += not self.contains(block_hash, token_ids)
            self.stored[block_hash] = token_ids, [part.clone() for i in block_ids for part in self._parts(i)]

    def get(self, blocks):
        for block_hash, _, block_ids in blocks:
            parts = [part for i in block_ids for part in self._parts(i)]
            for part, stored in zip(parts, self.stored[block_hash][1], strict=True):
                part.copy_(stored)
            self._check()
        self.num_got += len(blocks)
        return lambda: True

    def order_steps(self, block_ids):
        """Do nothing: there are no copies on their way."""

    def clear(self):
        self.stored = {}

    def _parts(self, block_id):
        return block_parts(self.runner._cached_token_ids, self.runner.caches, block_id)

    def _check(self):
        if self.fails:
            raise OSError("the store is closed")


class SlowStore(ToyStore):
    """Stores nothing but hashes. Its copies arrive when the test says so."""

    has_arrived = False

    def __init__(self):
        super().__init__(SimpleNamespace(_cached_token_ids=None, caches=None))

    def _parts(self, block_id):
        return []

    def get(self, blocks):
        super().get(blocks)
        return lambda: self.has_arrived


@pytest.fixture
def slow():
    """Return a simulated engine of 8 blocks and a slow store, which has the blocks of an evicted prompt."""
    engine, store = TieredEngine(num_blocks=8, checked=True), SlowStore()
    engine.use(store)
    for token_id in (1, 2, 3):
        engine.add([token_id] * 20, max_tokens=1)
        engine.run()
    return engine, store


def test_others_run_while_blocks_are_on_their_way(slow):
    """And a sequence that begins with the same blocks waits for the same load."""
    engine, store = slow
    first, same = engine.add([1] * 20, max_tokens=1), engine.add([1] * 21, max_tokens=1)
    other = engine.add([3] * 3, max_tokens=8)
    for _ in range(5):
        engine.step()
    assert len(other.token_ids) == 8 and store.num_got == 4
    assert len(engine.manager.loads) == 1 and [*engine.scheduler.waiting] == [first, same]
    assert engine.scheduler.waiting[1] is same and "Sequence" in repr(engine.scheduler.waiting)
    engine.abort(first.request_id)
    store.has_arrived = True
    engine.run()
    assert (same.num_cached_tokens, store.num_got) == (20, 5) and first.num_cached_tokens == 0
    assert not engine.manager.loads and len(engine.manager.free_block_ids) == 8


def test_loads_hold_what_their_sequence_needs(slow):
    """So that it fits when its blocks have arrived, however many requests come meanwhile.

    Those that do not fit do not pause its admission.
    """
    engine, store = slow
    running = engine.add([9], max_tokens=7)
    engine.step()
    first, others = engine.add([1] * 13, max_tokens=1), [engine.add([i] * 10, max_tokens=2) for i in (4, 5, 6)]
    for _ in range(3):
        engine.step()
    assert not any(seq.was_admitted for seq in (first, *others)) and running in engine.scheduler.running.values()
    store.has_arrived = True
    engine.step()
    assert first.num_cached_tokens == 12 and not any(seq.was_admitted for seq in others)
    engine.run()


def test_blocks_are_loaded_at_the_end_of_an_admission_pause(slow):
    """And not before, although the sequence fits all the time."""
    engine, store = slow
    store.has_arrived = True
    running = engine.add([9], max_tokens=8)
    engine.step()
    seq = engine.add([1] * 13, max_tokens=1)
    engine.scheduler.admission.pause(num_running=1)
    engine.scheduler.admission._num_steps = MAX_STEPS_WITHOUT_ADMISSION - 2
    for num_got in (0, 0, 3):
        engine.step()
        assert store.num_got == num_got and not seq.was_admitted
    engine.step()
    assert seq.was_admitted and seq.num_cached_tokens == 12 and running in engine.scheduler.running.values()
    engine.run()


def test_an_idle_engine_sleeps_while_blocks_are_on_their_way(slow, monkeypatch):
    """Whether or not a sequence waits that would fit without these blocks."""
    engine, store = slow
    sleeps = []
    monkeypatch.setattr(tiered_blocks, "sleep", sleeps.append)
    engine.add([1] * 20, max_tokens=1)
    assert engine.scheduler.schedule() is None and len(sleeps) == 1
    engine.add([4] * 20, max_tokens=1)
    assert engine.scheduler.schedule() is None and len(sleeps) == 2
    store.has_arrived = True
    engine.run()
    assert len(sleeps) == 2


def test_a_large_group_loads_blocks_when_nothing_runs(slow):
    """It is admitted then without a spare block for each answer."""
    engine, store = slow
    store.has_arrived = True
    seq = engine.add([1] * 20, max_tokens=1, n=4)
    engine.run()
    assert store.num_got >= 4 and seq.num_cached_tokens >= 16


def test_iteration_does_not_read_the_whole_queue(slow):
    engine, _ = slow
    queue = engine.scheduler.waiting
    seqs = [engine.make_group([1])[0] for _ in range(100)]
    others = iter([seqs[0], seqs[2], *seqs[4:]])
    queue._others, queue._loading = others, dict.fromkeys([seqs[3], seqs[1]])
    assert [*islice(queue, 6)] == seqs[:6] and next(others) in seqs[6:8]


def test_a_cleared_cache_gets_no_blocks_that_were_on_their_way(slow):
    engine, store = slow
    seq = engine.add([1] * 20, max_tokens=1)
    assert engine.scheduler.schedule() is None and len(engine.manager.loads) == 1
    engine.manager.clear_prefix_cache()
    store.has_arrived = True
    engine.run()
    assert seq.num_cached_tokens == 0 and engine.scheduler.totals["loaded_tokens"] == 0


def test_loads_stay_away_from_the_blocks_of_copies(slow):
    """The next step copies blocks for forks, even if the forks have ended, and a load may be faster."""
    engine, _ = slow
    source, target = [*engine.manager.free_block_ids][:2]
    engine.manager.copies = {target: source}
    engine.add([1] * 20, max_tokens=1)
    assert engine.scheduler.schedule() is None
    (load,) = engine.manager.loads
    assert load.block_ids and not {*load.block_ids} & {source, target}
    assert {source, target} <= engine.manager.free_block_ids.keys()


def test_loads_stay_away_from_the_rows_of_the_step():
    """The next step reads some rows, and copies states, so a load must not write there."""
    engine = TieredEngine(max_num_seqs=2, num_snapshots=4, keeps_states=True)
    engine.use(SlowStore())
    manager = engine.manager
    engine.add([1] * 20, max_tokens=1)
    engine.run()
    engine.scheduler.schedule()
    rows = {*manager.rows.free_others, *manager.rows.free_indices, *manager.snapshots.values()}
    (read,), copied = manager.snapshots.values(), manager.rows.free_others[0]
    manager.rows.being_read, manager._in_copies = {read}, {len(manager.blocks) + copied}
    found = [manager._allocate_for(~0)[0] - len(manager.blocks) for _ in range(len(rows) - 2)]
    assert {*found} == rows - {read, copied} and manager._row_for_load() is None
    manager.rows.being_read.clear()
    assert manager._allocate_for(~0) == (len(manager.blocks) + read,) and not manager.snapshots
    assert any(block_hash < 0 for block_hash in manager.connector.stored)


def test_which_columns_are_stored():
    """Those at the end of a prompt, and at the end of a prefix that a second prompt shares, for a third prompt."""
    engine, store = TieredEngine(num_blocks=14, window=6, checked=False), SlowStore()
    engine.use(store)
    store.has_arrived = True
    hits = []
    for i in range(3):
        seq = engine.add([1] * 16 + [10 + i] * 24, max_tokens=1)
        engine.run()
        hits.append(seq.num_cached_tokens)
        for other in range(3):  # drive it out
            engine.add([20 + 3 * i + other] * 40, max_tokens=1)
            engine.run()
        columns = [i for i, block_hash in enumerate(seq.block_hashes) if ~block_hash in store.stored]
        assert columns == [2, 3, 7, 8, 9][0 if i else 2 :]
    assert hits == [0, 0, 16]


def reachable_bytes(root: object) -> int:
    """Return the size of all objects that can be reached from `root`, except for code."""
    sizes, objects = {}, [root]
    while objects:
        found = objects.pop()
        if id(found) not in sizes and not isinstance(found, (type, ModuleType, FunctionType)):
            sizes[id(found)] = sys.getsizeof(found)
            objects += gc.get_referents(found)
    return sum(sizes.values())


@pytest.mark.parametrize(
    "kind, settings",
    [(TieredSimulation, {}), (TieredStates, dict(num_snapshots=3)), (TieredWindows, dict(window=9))],
    ids=["plain", "states", "windows"],
)
def test_nothing_grows(pytestconfig, monkeypatch, kind, settings):
    """Of the engine and the tier, over many requests, some of which are aborted while their blocks are on their way.

    The option `--requests` is their number. Sizes are compared with those of the first fifth.
    """
    monkeypatch.setattr(kind, "is_cleared", False)
    engine = kind([], asynchronous=True, num_rows=60, failures=True, num_blocks=22, max_num_seqs=6, **settings)
    num_parts, sizes = pytestconfig.getoption("--requests") // 100, []
    for seed in range(num_parts):
        for i, request in enumerate(random_requests(seed, 100, max_n=3)):
            group = engine.submit(request)
            if i % 7 == 0:
                engine.step()
                engine.abort(group[0].request_id)
                engine.check_move()
            while len(engine.scheduler.waiting) > 6:
                engine.step(prompts_first=i % 3 == 1)
        engine.finish()
        sizes.append(reachable_bytes(engine))
    assert max(sizes[num_parts // 5 :]) < 1.2 * max(sizes[: num_parts // 5]), sizes
    assert engine.scheduler.totals["loaded_blocks"] > 10 * num_parts


def converse(engine, num_conversations=20, num_turns=5) -> float:
    """Return the fraction of the prompts' tokens that are found, in conversations that alternate."""
    rng, histories, num_tokens, num_found = random.Random(0), [[] for _ in range(num_conversations)], 0, 0
    for _ in range(num_turns):
        due, live = [*range(num_conversations)], {}
        while due or live:
            while due and len(live) < 6:
                i = due.pop(0)
                prompt = histories[i] + [rng.randrange(1000) for _ in range(rng.randint(20, 60))]
                live[engine.add(prompt, max_tokens=rng.randint(10, 40))] = i
            engine.step()
            for seq in [seq for seq in live if seq.is_finished]:
                histories[live.pop(seq)] = seq.token_ids
                num_tokens, num_found = num_tokens + seq.num_prompt_tokens, num_found + seq.num_cached_tokens
    return num_found / num_tokens


@pytest.mark.parametrize(
    "num_blocks, num_rows, settings, least",
    [
        (300, 2000, {}, 0.97),
        (800, 1500, dict(keeps_states=True, num_snapshots=6), 0.85),  # fewer snapshots than conversations
        (200, 1000, dict(window=20), 0.9),
    ],
    ids=["plain", "states", "windows"],
)
def test_hits_of_conversations(num_blocks, num_rows, settings, least):
    """With a cache that is too small for the histories, almost all hits come back, though loads take many steps."""
    sizes = dict(block_size=8, max_num_seqs=6, max_len=1000, asynchronous=True) | settings
    tiered, plain = (kind(num_blocks=num_blocks, **sizes) for kind in (TieredEngine, SimulatedEngine))
    tiered.states, tiered.seen = {}, Counter()
    tiered.use_late_host(num_rows, Memory([[] for _ in tiered.manager.blocks], tiered), failures=False)
    unbounded = SimulatedEngine(num_blocks=3000, **sizes | ({"num_snapshots": 600} if "num_snapshots" in sizes else {}))
    assert converse(plain) < 0.4 * (most := converse(unbounded))
    assert converse(tiered) > least * most and not tiered.scheduler.num_preemptions


def test_the_simulation_of_conversations(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hits_of_conversations.py", "--states", "6", "--pauses", "0"])
    runpy.run_path(str(Path(__file__).parent / "scripts/hits_of_conversations.py"), run_name="__main__")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == 6 * ["0"] and int(rows[0][2][:-1]) > 50


# -- with a model ------------------------------------------------------------------------------------------------------


def make_requests(first_id: int, end_id: int, longest: int = 10) -> list[tuple[list[int], SamplingParams]]:
    """Return (prompt, params) with shared beginnings, of which some continue earlier ones."""
    rng = random.Random(0)
    texts = [[rng.randrange(first_id, end_id) for _ in range(150)] for _ in range(4)]
    requests = []
    for i in range(11):
        prompt = rng.choice(texts)[: rng.randint(60, 150)]
        prompt += [rng.randrange(first_id, end_id) for _ in range(rng.randint(1, 40))]
        max_tokens = rng.randint(1, longest)
        params = SamplingParams(temperature=i % 2, seed=i, max_tokens=max_tokens, ignore_eos=True, n=1 + i % 3)
        requests.append((prompt, params))
    return requests * 2


@pytest.fixture(scope="module")
def requests():
    return make_requests(256, 2040)


def answers(llm: LLM, requests, num_together: int = 6) -> list[list[list[int]]]:
    outputs = []
    for i in range(0, len(requests), num_together):
        prompts, params = zip(*requests[i : i + num_together])
        outputs += llm.generate([*prompts], [*params], use_tqdm=False)
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(small_model, requests):
    with LLM(small_model, dtype="float32", device="cpu") as llm:
        return answers(llm, requests)


SMALL = dict(kvcache_block_size=16, num_kvcache_blocks=14, max_num_seqs=4)
SETTINGS_OF_ENGINES = {
    "one block": dict(num_rows=1),
    "few blocks": dict(num_rows=9, async_scheduling=True),
    "all blocks": dict(num_rows=500),
    "chunks": dict(num_rows=500, async_scheduling=True, max_num_batched_tokens=32),
    "drafts": dict(num_rows=60, speculative_config={"method": "ngram", "num_speculative_tokens": 3}),
    "adapters": dict(num_rows=60, enable_lora=True, max_lora_rank=8, async_scheduling=True),
    "ranks": dict(num_rows=60, tensor_parallel_size=2),
}


@cache
def row_bytes_of(model: str) -> int:
    with LLM(model, dtype="float32", device="cpu", **SMALL) as llm:
        return row_bytes(llm.model_runner)


def gib(num_rows: int, model: str) -> float:
    """Return the `swap_space` for so many blocks of a model."""
    return (num_rows + 0.5) * row_bytes_of(model) / 2**30


@pytest.fixture
def make_tiered(make_llm, model_name, monkeypatch):
    monkeypatch.setattr(host_blocks, "HostBlocks", HostBlocks)
    return lambda num_rows=60, **settings: make_llm(swap_space=gib(num_rows, model_name), **SMALL | settings)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", SETTINGS_OF_ENGINES)
def test_answers_do_not_change(make_tiered, requests, expected, name):
    llm = make_tiered(**SETTINGS_OF_ENGINES[name])
    indices = range(17) if name != "ranks" else [*range(7), *range(11, 18)]  # their steps take long
    assert answers(llm, [requests[i] for i in indices]) == [expected[i] for i in indices]
    stats = llm.stats()
    tiers = stats["tiers"]
    assert (tiers["host_hits"] > 100 or name in ("one block", "few blocks")) and stats["preemptions"] > 0
    assert (tiers["loaded_blocks"] > 0 or name == "one block") and tiers["device_hits"] > 0
    assert tiers["host_hits"] + tiers["device_hits"] == round(stats["prefix_hit_rate"] * stats["tokens"]["in"])
    assert stats["blocks"]["used"] == 0
    before = stats["tiers"]["loaded_blocks"]
    assert llm.reset_prefix_cache()
    answers(llm, requests[:1])
    assert llm.stats()["tiers"]["loaded_blocks"] == before


class Other(NamedTuple):
    """A model with states or with window tables, and its answers to requests.

    `spoil` overwrites what an engine does not need before each step.
    """

    spoil: Callable[[LLM], LLM]
    folder: str
    row_bytes: int
    requests: list
    expected: list


@pytest.fixture(scope="module")
def make_other(tmp_path_factory):
    """Return a function that makes each kind once."""

    @cache
    def make(kind: str) -> Other:
        folder = tmp_path_factory.mktemp(kind) / "model"
        if kind == "states":
            from test_hybrid import make_checkpoint, poison  # skips the test with transformers 4

            folder, spoil = make_checkpoint(folder, "qwen3_5-tied"), poison
        else:
            import test_windows

            if not test_models.V5:
                pytest.skip("transformers 4 does not have this form of the family")
            with patch.dict(test_models.CASES, windows=test_windows.WINDOWED["gemma3-windows"].case):
                folder, spoil = test_models.make_checkpoint(folder, "windows"), test_windows.spoil_free_blocks
        requests = make_requests(5, 500, longest=16)[:14]
        with LLM(folder, dtype="float32", device="cpu", kvcache_block_size=16, num_kvcache_blocks=400) as llm:
            return Other(spoil, folder, row_bytes(llm.model_runner), requests, answers(llm, requests))

    return make


@pytest.fixture(params=["states", "windows"])
def other(request, make_other):
    return make_other(request.param)


OTHERS = {
    "few blocks": dict(num_rows=200, enable_sleep_mode=True),
    "chunks": dict(num_rows=3000, async_scheduling=True, max_num_batched_tokens=32),
    "drafts": SETTINGS_OF_ENGINES["drafts"] | dict(num_rows=3000, async_scheduling=True),
    "ranks": dict(num_rows=3000, tensor_parallel_size=2),
}


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    "other, name",
    [(kind, name) for kind in ("states", "windows") for name in OTHERS if (kind, name) != ("windows", "drafts")],
    indirect=["other"],
)
def test_states_and_windows(make_llm, monkeypatch, other, name):
    monkeypatch.setattr(host_blocks, "HostBlocks", HostBlocks)
    settings = {**OTHERS[name]}
    num_rows = settings.pop("num_rows")
    settings |= dict(swap_space=(num_rows + 0.5) * other.row_bytes / 2**30)
    llm = other.spoil(make_llm(other.folder, **SMALL | settings))
    assert answers(llm, other.requests) == other.expected
    stats = llm.stats()
    assert stats["tiers"]["host_hits"] > 100 and stats["blocks"]["used"] == 0
    assert stats["preemptions"] > 0 or not llm.config.num_states
    if llm.config.enable_sleep_mode:
        for keeps in (True, False):
            before = llm.stats()["tiers"]["loaded_blocks"]
            llm.sleep(keep_prefix_cache=keeps)
            llm.wake_up()
            assert answers(llm, other.requests[-1:]) == other.expected[-1:]
            assert (llm.stats()["tiers"]["loaded_blocks"] > before) == keeps


def test_rows_of_a_state(make_llm, other, monkeypatch, streams):
    """A state takes several rows, and comes back with all its bits, also if its layers are far apart."""
    settings = dict(kv_cache_dtype="fp8", speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    with pytest.raises(ValueError, match=r"a cache block( with a snapshot)? takes .* GiB"):
        make_llm(other.folder, swap_space=1.5 * other.row_bytes / 2**30, **SMALL)
    llm = make_llm(other.folder, **SMALL | settings)
    runner, num_blocks = llm.model_runner, len(llm.scheduler.block_manager.blocks)
    generator = torch.Generator().manual_seed(0)
    for tensor in (tensor for tensors in runner.caches.values() for tensor in tensors):
        tensor.copy_(torch.randint(0, 100, tensor.shape, generator=generator))
    source, target = (num_blocks + 3, num_blocks + 5) if llm.config.num_states else (3, 5)
    ids = range(num_blocks + max(0, llm.config.num_states))
    before = [[part.clone() for part in block_parts(runner._cached_token_ids, runner.caches, i)] for i in ids]
    blocks = PinnedBlocks(runner, 100)
    num_rows = blocks.num_rows_of(runner, source)
    assert (num_rows > 3) == bool(llm.config.num_states) and blocks.num_rows_of(runner, 0) == 1
    rows = [*range(7, 7 + num_rows)]
    blocks.put(runner, 0, np.array([[source] * num_rows, rows], np.int32))
    monkeypatch.setattr(host_blocks, "MAX_PITCH", 1 << 10)
    blocks.get(runner, 1, np.array([[target] * num_rows, rows], np.int32))
    before[target] = before[source]
    for i in ids:
        for part, expected in zip(block_parts(runner._cached_token_ids, runner.caches, i), before[i], strict=True):
            assert part.equal(expected), i
    del blocks
    assert streams[-1] == "unpins"


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_aborts(make_tiered, requests, expected, async_scheduling):
    """At any moment, also while blocks are on their way."""
    llm, rng = make_tiered(async_scheduling=async_scheduling), random.Random(1)
    live, ended = {}, {}
    left = [*enumerate(requests)]
    while left or live:
        while left and len(live) < 6:
            i, (prompt, params) = left.pop(0)
            live[llm.add_request(prompt, params)] = i
        for output in llm.step().finished:
            ended[live.pop(output.request_id)] = [answer.token_ids for answer in output.outputs]
        if live and rng.random() < 0.04:
            llm.abort(rng.choice([*live]))
    assert llm.stats()["tiers"]["loaded_blocks"] > 20
    cut = [i for i, outputs in ended.items() if outputs != expected[i]]
    assert 0 < len(cut) < len(requests) / 2
    for i in cut:
        assert all(answer == whole[: len(answer)] for answer, whole in zip(ended[i], expected[i]))
    blocks = llm.scheduler.block_manager
    assert len(blocks.free_block_ids) == 14 - sum(len(load.held) for load in blocks.loads)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("rank", [0, 1])
def test_copies_that_fail_on_one_of_two_ranks(make_tiered, requests, expected, monkeypatch, rank):
    """Rank 0 chooses what is stored, so the others can go on without its copy. No other rank's copy may fail."""
    rng = random.Random(3)

    def failing(copy):
        def copy_some(self, runner, number, copies):
            fails = runner.tp.rank == rank and rng.random() < 0.3
            copy(self, runner, number, copies[:, : -1 if fails else None])
            if fails:
                raise OSError("a copy could not begin")

        return copy_some

    for name in ("put", "get"):
        monkeypatch.setattr(HostBlocks, name, failing(getattr(HostBlocks, name)))
    llm = make_tiered(num_rows=30, tensor_parallel_size=2)
    if rank == 0:
        assert answers(llm, requests[:9]) == expected[:9]
        tiers = llm.stats()["tiers"]
        assert tiers["lost_copies"] > 1 and tiers["loaded_blocks"] > 5
    else:
        with pytest.raises(RuntimeError, match="rank 1"):
            answers(llm, requests[:9])


@pytest.mark.parametrize("fails", [False, True])
def test_another_store(make_llm, requests, expected, fails, caplog):
    """What is not in the store is computed, and a store that has failed is reported once."""
    llm = make_llm(**SMALL)
    store = ToyStore(llm.model_runner)
    for wrong in None, ToyStore:
        with pytest.raises(TypeError, match="connector=.*must be an object of a subclass of Connector"):
            use_connector(llm, wrong)
    llm.add_request([5, 6, 7], SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="1 requests have not ended"):
        use_connector(llm, store)
    while not llm.is_finished():
        llm.step()
    use_connector(llm, store)
    with pytest.raises(ValueError, match="already has a connector, a ToyStore"):
        use_connector(llm, ToyStore(llm.model_runner))
    assert answers(llm, requests[:17]) == expected[:17]
    assert store.num_put > 20 and store.num_got > 20
    store.fails = fails
    assert answers(llm, requests[11:]) == expected[11:]
    assert (llm.stats()["tiers"]["lost_copies"] > 10) == fails
    assert sum("could not be" in record.message for record in caplog.records if record.levelname == "WARNING") == fails


def test_fp8_cache(make_llm, make_tiered, requests):
    plain = answers(make_llm(kv_cache_dtype="fp8", **SMALL), requests[11:22])
    llm = make_tiered(kv_cache_dtype="fp8")
    assert answers(llm, requests[11:22]) == plain and llm.stats()["tiers"]["loaded_blocks"] > 20


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sleep(make_tiered, small_model, requests, expected, tmp_path, num_ranks):
    """It drops the blocks or keeps them, and new weights drop them."""
    settings = dict(enable_sleep_mode=True, tensor_parallel_size=num_ranks)
    llm = make_tiered(num_rows=500, num_kvcache_blocks=60, swap_dir=str(tmp_path), **settings)

    def hits_after(*sleeps: dict) -> int:
        """Return the tokens of a prompt that are found in host memory afterwards."""
        assert answers(llm, requests[:1]) == expected[:1]
        before = llm.stats()["tiers"]["host_hits"]
        for arguments in sleeps:
            llm.sleep(**arguments)
        llm.wake_up()
        if sleeps[-1] == {"level": 2}:
            llm.load_weights(weights_of(small_model))
        assert answers(llm, requests[:1]) == expected[:1]
        return llm.stats()["tiers"]["host_hits"] - before

    keeps, num_full = {"keep_prefix_cache": True}, (len(requests[0][0]) - 1) // 16 * 16
    assert llm.stats()["tiers"]["host_hits"] == 0  # nothing has left the device
    assert hits_after(keeps) == hits_after(keeps, keeps) == num_full
    assert isinstance(llm.scheduler.block_manager.connector._files, BlockFiles)  # the folder is still used
    assert hits_after(keeps, {}) == hits_after({}) == hits_after(keeps, {"level": 2}) == 0
    assert hits_after(keeps) == num_full
    with pytest.raises(ValueError, match="keep_prefix_cache=True: must be False with level=2"):
        llm.sleep(level=2, keep_prefix_cache=True)


def test_what_sleep_keeps(make_tiered, requests, expected, monkeypatch):
    """If host memory is too small, the blocks that were used last; and what requests wait for, if they were kept."""
    llm = make_tiered(num_rows=20, num_kvcache_blocks=60, max_num_seqs=2, enable_sleep_mode=True)
    tier = llm.scheduler.block_manager.connector
    assert answers(llm, requests[:8]) == expected[:8]
    llm.sleep(keep_prefix_cache=True)
    llm.wake_up()
    assert len(tier._entries) == 20
    assert answers(llm, requests[7:8]) == expected[7:8]
    assert llm.stats()["tiers"]["host_hits"] == (len(requests[7][0]) - 1) // 16 * 16
    llm.sleep(keep_prefix_cache=True)
    llm.wake_up()
    copies = []
    monkeypatch.setattr(HostBlocks, "has_ended", lambda self, number: bool(copies))
    name, before = llm.add_request(*requests[7]), llm.stats()["tiers"]["loaded_blocks"]
    llm.step()
    assert llm.scheduler.block_manager.loads
    llm.pause("keep")
    llm.sleep(keep_prefix_cache=True)
    copies.append("have ended")
    llm.wake_up()
    llm.resume()
    while not (ended := llm.step().finished):
        pass
    assert [ended[0].request_id, [answer.token_ids for answer in ended[0].outputs]] == [name, expected[7]]
    assert llm.stats()["tiers"]["loaded_blocks"] > before


def test_beams(make_llm, make_tiered, requests):
    params = BeamSearchParams(beam_width=3, max_tokens=10)
    prompts = [prompt for prompt, _ in requests[11:22]]
    plain, llm = make_llm(), make_tiered(num_rows=500)
    found, expected = (
        [[beam.token_ids for beam in engine.beam_search([prompt], params)[0].outputs] for prompt in prompts]
        for engine in (llm, plain)
    )
    assert found == expected
    assert llm.stats()["tiers"]["loaded_blocks"] > 10 and llm.stats()["preemptions"] > 0


def test_refusals(make_llm):
    for error, settings in [
        ("swap_space=1: must be 0 with enable_prefix_caching=False", {"enable_prefix_caching": False}),
        ("swap_space=0.0001: a cache block takes", {"swap_space": 0.0001, "kvcache_block_size": 4096}),
        ("swap_space=100000: this machine", {"swap_space": 100_000}),
        ("swap_space=-1.0: must be at least 0", {"swap_space": -1}),
    ]:
        with pytest.raises(ValueError, match=re.escape(error)):
            make_llm(**{"swap_space": 1, "load_format": "dummy"} | settings)
    engine = TieredEngine(enable_prefix_caching=False)
    with pytest.raises(ValueError, match="enable_prefix_caching=False: must be True"):
        engine.use(SlowStore())
    engine = TieredEngine()
    engine.use(SlowStore())
    with pytest.raises(ValueError, match="already has a connector, a SlowStore"):
        engine.use(SlowStore())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_cache_dtype": "fp8"}, {"enforce_eager": True}, pytest.param({"tensor_parallel_size": 2}, marks=TWO_GPUS)],
    ids=str,
)
def test_on_a_gpu(make_llm, requests, settings):
    """Blocks move on two streams while steps run, and answers stay the same."""
    sizes = SMALL | dict(model="tiny-qwen3", device="cuda", dtype="float32", kvcache_block_size=256)
    rng = random.Random(0)
    long = [([*prompt, *rng.choices(range(256, 2040), k=600)], params) for prompt, params in requests[:16]]
    long = [*long, *long[::-1], *long]
    plain = make_llm(**sizes | {"num_kvcache_blocks": 400}, **settings)
    expected = answers(plain, long)
    llm = make_llm(swap_space=1.0, **sizes, **settings)
    assert isinstance(llm.model_runner.host_blocks, PinnedBlocks)
    found = answers(llm, long)
    same = [mine == theirs for mine, theirs in zip(found, expected)]
    assert llm.stats()["tiers"]["loaded_blocks"] > 20 and sum(same) >= 0.95 * len(same)


@pytest.mark.gpu
def test_sleep_on_a_gpu(make_llm, requests):
    """The device's blocks are in host memory before the device's memory is freed."""
    sizes = dict(device="cuda", dtype="float32", kvcache_block_size=256, num_kvcache_blocks=100, swap_space=1.0)
    rng = random.Random(0)
    long = [([*prompt, *rng.choices(range(256, 2040), k=900)], params) for prompt, params in requests[:8]]
    llm = make_llm("tiny-qwen3", enable_sleep_mode=True, **sizes)
    before = answers(llm, long)
    llm.sleep(keep_prefix_cache=True)
    llm.wake_up()
    found = answers(llm, long)
    tiers = llm.stats()["tiers"]
    assert tiers["host_hits"] >= 8 * 3 * 256 and tiers["lost_copies"] == 0
    assert sum(mine == theirs for mine, theirs in zip(found, before)) >= 7


@pytest.mark.gpu
def test_states_and_windows_on_a_gpu(make_llm, other):
    sizes, requests = SMALL | dict(device="cuda"), other.requests * 2
    expected = answers(make_llm(other.folder, **sizes | {"num_kvcache_blocks": 400}), requests)
    llm = make_llm(other.folder, swap_space=0.5, **sizes)
    found = answers(llm, requests)
    same = [mine == theirs for mine, theirs in zip(found, expected)]
    assert llm.stats()["tiers"]["loaded_blocks"] > 20 and sum(same) >= 0.9 * len(same)


def test_memory_for_pinning():
    memory = host_blocks.allocate(5000)
    assert memory.shape == (5000,) and not memory.any() and memory.fill_(3).sum() == 15_000


class RecordedStream:
    """A stream that logs what it does, with events that have not happened."""

    cuda_stream = 0

    def __init__(self, log, name="steps"):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        return SimpleNamespace(stream=self, query=lambda: False)

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for an event of {event.stream.name}")


class SimulatedDriver:
    """Copies in host memory, at once, and counts copies by their number of rows."""

    def __init__(self, log):
        self.log = log

    def cuMemcpy2DAsync_v2(self, reference, stream):
        copy = reference._obj
        for i in range(copy.height):
            source, target = ((x.host or x.device) + i * x.pitch for x in (copy.source, copy.target))
            ctypes.memmove(target, source, copy.width)
        return 0

    def cuMemHostRegister_v2(self, address, num_bytes, flags):
        self.log.append(f"pins {num_bytes.value} bytes")
        return 0

    def cuMemHostUnregister(self, address):
        self.log.append("unpins")
        return 0


@pytest.fixture
def streams(monkeypatch):
    """Replace CUDA's streams and copies, and return the log of what they do."""
    log, names = [], iter(["out", "in"])
    current = [RecordedStream(log)]

    @contextmanager
    def use(stream):
        log.append(f"copies on {stream.name}")
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: RecordedStream(log, next(names)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("ends"))
    monkeypatch.setattr(cuda_driver, "_driver", lambda: SimulatedDriver(log))
    return log


def test_order_of_streams(make_llm, streams):
    """Copies follow steps, loads follow stores, and steps follow the copies that they are told to, without the host."""
    llm, log = make_llm(**SMALL), streams
    runner = llm.model_runner
    blocks = PinnedBlocks(runner, 3)
    runner.kv_cache[:, :, 5] = torch.randn(runner.kv_cache[:, :, 5].shape)
    runner._cached_token_ids[5] = 99
    blocks.put(runner, 0, np.array([[5], [2]], np.int32))
    blocks.get(runner, 1, np.array([[6], [2]], np.int32))
    assert torch.equal(runner.kv_cache[:, :, 6], runner.kv_cache[:, :, 5]) and (runner._cached_token_ids[6] == 99).all()
    assert not runner.kv_cache[:, :, 7].any() and not runner._cached_token_ids[7].any()
    assert not blocks.has_ended(0) and not blocks.has_ended(1)
    blocks.order_steps([0, 1, 5])
    assert blocks.has_ended(0) and blocks.has_ended(1)
    del blocks
    assert log == [
        f"pins {3 * row_bytes(runner)} bytes",
        *("out waits for steps", "copies on out"),
        *("in waits for steps", "in waits for out", "copies on in"),
        *("steps waits for an event of out", "steps waits for an event of in"),
        *("ends", "unpins"),
    ]


def test_a_copy_that_cannot_begin(make_llm, streams, monkeypatch):
    """Later steps wait for the part of the copy that the driver has begun."""
    runner, results = make_llm(**SMALL).model_runner, iter([0, 719, 0])
    blocks = PinnedBlocks(runner, 3)
    monkeypatch.setattr(SimulatedDriver, "cuMemcpy2DAsync_v2", lambda *_: next(results))
    with pytest.raises(OSError, match="could not begin: cuMemcpy2DAsync_v2: CUDA error 719"):
        blocks.put(runner, 0, np.array([[5, 6], [2, 1]], np.int32))
    assert not blocks.has_ended(0)
    blocks.order_steps([0])
    assert streams[-1] == "steps waits for an event of out"


def test_rank_0_knows_when_all_ranks_have_copied(make_llm, streams):
    """Of two ranks that share rows, the second one has streams. The first one sees the rows of both."""
    llm, copies = make_llm(**SMALL), np.array([[5], [2]], np.int32)
    llm.model_runner.kv_cache[:, :, 5] = torch.randn(llm.model_runner.kv_cache[:, :, 5].shape)
    parts = dict(_cached_token_ids=llm.model_runner._cached_token_ids, caches=llm.model_runner.caches)
    runners = [SimpleNamespace(**parts, device=torch.device("cpu"), tp=TensorParallel(rank, 2)) for rank in range(2)]
    with open(os.memfd_create("test"), "r+b") as file:
        place = 3, row_bytes(llm.model_runner), os.getpid(), file.fileno()
        shared = [SharedRows(runner.tp, *place) for runner in runners]
    first, second = HostBlocks(runners[0], 3, shared[0]), PinnedBlocks(runners[1], 3, shared[1])
    streams.clear()
    for number, action in enumerate(("put", "get", "put")):
        have_ended = first.end_of_copies(number + 1)
        for blocks, runner in ((first, runners[0]), (second, runners[1])):
            assert not have_ended()
            getattr(blocks, action)(runner, number, copies)
        assert have_ended() and first.end_of_copies(number)() and not first.end_of_copies(number + 2)()
        assert streams[-2:] == ["in waits for out", "copies on in"]  # the counter follows all copies
        streams.clear()
    rows = first.rows_of_ranks
    assert rows.shape == (2, 3, row_bytes(llm.model_runner)) and rows[1].data_ptr() != second.rows.data_ptr()
    assert rows[0, 2].any() and rows[0, 2].equal(rows[1, 2]) and not rows[:, :2].any()


def test_embeddings(make_llm, make_tiered, requests):
    """Of a model that pools the last token, whose prompts can share beginnings."""
    prompts = [prompt for prompt, _ in requests]
    plain, tiered = make_llm(task="embed"), make_tiered(num_rows=500, task="embed")
    expected, found = ([x.embedding for x in llm.embed(prompts, use_tqdm=False)] for llm in (plain, tiered))
    assert np.allclose(expected, found, atol=1e-5) and tiered.stats()["tiers"]["loaded_blocks"] > 0


# -- files -------------------------------------------------------------------------------------------------------------


def rows_of_file(i: int) -> list[np.ndarray]:
    return [np.random.default_rng(i).integers(256, size=64, dtype=np.uint8) for _ in range(2)]


def test_files_of_blocks(tmp_path):
    """Blocks come back as they were. The least recently used files are deleted, also by a later engine."""
    files, found = BlockFiles(tmp_path, max_bytes=1000), [np.zeros(64, np.uint8) for _ in range(2)]
    for i in range(3):
        files.add(~i, files.write(~i, [i, 7, 2**31 - 1], rows_of_file(i)))
    files.touch(-1)
    files.read(~1, [1, 7, 2**31 - 1], found)
    np.testing.assert_array_equal(found, rows_of_file(1))
    (tmp_path / "1 (copy).block").write_bytes(b"a user made this file")
    (tmp_path / "left over.tmp").write_bytes(b"torn")
    os.utime(tmp_path / "left over.tmp", (0, 0))
    size = files.write(5, [1], rows_of_file(5))
    later = BlockFiles(tmp_path, max_bytes=3 * size + 16)  # too little for the four files
    assert [i in later for i in (-1, -2, -3, 5)] == [True, False, True, True]
    assert sorted(x.name for x in tmp_path.iterdir()) == ["-1.block", "-3.block", "1 (copy).block", "5.block"]
    with pytest.raises(OSError, match=r"-2\.block"):
        files.read(~1, [1, 7, 2**31 - 1], found)  # the other engine has deleted this file


def test_damaged_files(tmp_path):
    """A file that is cut, longer, changed in any byte, or of other token ids is never read as right."""
    files, found, ids = BlockFiles(tmp_path, 10**6), [np.zeros(64, np.uint8) for _ in range(2)], [3, 1, 4]
    files.write(1, ids, rows_of_file(1))
    path = tmp_path / "1.block"
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(len(whole))] + [whole + b"\0"]
    damaged += [bytes([*whole[:i], whole[i] ^ 1, *whole[i + 1 :]]) for i in range(len(whole))]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(OSError, match=r"1\.block: (is|stores)"):
            files.read(1, ids, found)
    path.write_bytes(whole)
    with pytest.raises(OSError, match="other token ids"):
        files.read(1, [3, 1, 5], found)
    files.read(1, ids, found)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match=r"1\.block: is not a regular file"):
        files.read(1, ids, found)


@pytest.fixture
def restarted(monkeypatch, tmp_path):
    """Return a function that starts an engine with `swap_dir`, lets it answer requests, and ends it."""
    monkeypatch.setattr(host_blocks, "HostBlocks", HostBlocks)
    monkeypatch.setattr(tiered_blocks, "IDLE_SECONDS", 0.001)

    def run(model, requests, num_rows=60, **settings):
        settings = SMALL | dict(swap_dir=str(tmp_path / "swap"), swap_space=gib(num_rows, model)) | settings
        with LLM(model, dtype="float32", device="cpu", **settings) as llm:
            found = answers(llm, requests)
            return found, llm.stats()["tiers"]

    return run


@pytest.mark.parametrize("name", ["few blocks", "chunks", "drafts"])
def test_blocks_survive_a_restart(restarted, small_model, requests, expected, name):
    """Also if host memory is so small that most blocks are only in files, and that some prefixes can't be loaded."""
    for part in (slice(9), slice(13)):
        tokens, tiers = restarted(small_model, requests[part], **SETTINGS_OF_ENGINES[name])
        assert tokens == expected[part]
    assert tiers["disk_blocks"] > 10 and (tiers["lost_copies"] == 0 or name == "few blocks")


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=TWO_GPUS)])
def test_blocks_survive_a_restart_on_a_gpu(make_llm, requests, monkeypatch, tmp_path, num_ranks):
    """Files are written after copies to pinned memory, and read before copies from it."""
    monkeypatch.setattr(host_blocks, "HostBlocks", HostBlocks)
    sizes = SMALL | dict(model="tiny-qwen3", device="cuda", dtype="float32", kvcache_block_size=256)
    rng = random.Random(0)
    long = [([*prompt, *rng.choices(range(256, 2040), k=600)], params) for prompt, params in requests[:16]]
    sizes["tensor_parallel_size"] = num_ranks
    expected = answers(make_llm(**sizes | {"num_kvcache_blocks": 400}), long)
    for _ in range(2):
        llm = make_llm(swap_space=1.0, swap_dir=str(tmp_path), **sizes)
        same = [mine == theirs for mine, theirs in zip(answers(llm, long), expected)]
        tiers = llm.stats()["tiers"]
        llm.exit()
    assert tiers["disk_blocks"] > 10 and tiers["lost_copies"] == 0 and sum(same) >= 0.9 * len(same)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    "other, num_ranks", [("states", 1), ("windows", 1), ("states", 2)], indirect=["other"], ids=lambda x: str(x)
)
def test_states_and_windows_survive_a_restart(restarted, other, num_ranks):
    chosen = slice(9 if num_ranks == 1 else 5)
    for _ in range(2):
        tokens, tiers = restarted(other.folder, other.requests[chosen], num_rows=3000, tensor_parallel_size=num_ranks)
        assert tokens == other.expected[chosen]
    assert tiers["disk_blocks"] > 10 and tiers["lost_copies"] == 0


@pytest.mark.usefixtures("forked_ranks")
def test_files_of_several_ranks(restarted, small_model, requests, expected, monkeypatch, tmp_path, caplog):
    """They contain the rows of all ranks, also of a rank that copies late, and any damage is noticed."""
    put = HostBlocks.put

    def late_put(self, runner, *arguments):
        sleep(0.02 * runner.tp.rank)
        put(self, runner, *arguments)

    monkeypatch.setattr(HostBlocks, "put", late_put)
    run = partial(restarted, small_model, requests[:4])
    assert run(tensor_parallel_size=2)[0] == expected[:4]
    tokens, tiers = run(tensor_parallel_size=2)
    assert tokens == expected[:4] and tiers["disk_blocks"] > 10 and tiers["lost_copies"] == 0
    for file in (tmp_path / "swap").rglob("*.block"):
        content = bytearray(file.read_bytes())
        content[-100] ^= 1  # in the row of the last rank
        file.write_bytes(content)
    tokens, tiers = run(tensor_parallel_size=2)
    assert tokens == expected[:4] and tiers["disk_blocks"] == 0 and tiers["lost_copies"] > 0
    assert sum("is damaged" in record.message for record in caplog.records if record.levelname == "WARNING") == 1
    tokens, tiers = run()
    assert tokens == expected[:4] and tiers["disk_blocks"] == 0


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("dies_in", ["a step", "exit"])
def test_a_lost_rank(make_llm, small_model, requests, monkeypatch, tmp_path, caplog, dies_in):
    """The engine ends within seconds, and nothing of the shared memory is left."""
    put, sign = HostBlocks.put, tmp_path / "sign"

    def deadly_put(self, runner, *arguments):
        if runner.tp.rank and sign.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, runner, *arguments)

    def maps() -> tuple[bool, list[str]]:
        """Return whether the rows are mapped, and what else is mapped that has a name in /dev/shm."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        named = [line for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")]
        return any("memfd:nanovllm" in line for line in lines), named

    monkeypatch.setattr(host_blocks, "HostBlocks", HostBlocks)
    monkeypatch.setattr(HostBlocks, "put", deadly_put)
    gc.collect()  # errors in earlier tests may refer to their engines
    assert maps() == (False, [])
    llm = make_llm(tensor_parallel_size=2, swap_space=gib(60, small_model), swap_dir=str(tmp_path / "swap"), **SMALL)
    answers(llm, requests[:1])
    assert maps() == (True, [])
    sign.touch()
    begin = monotonic()
    if dies_in == "a step":
        with pytest.raises(RuntimeError, match=r"rank 1 was killed \(SIGKILL\)"):
            answers(llm, requests[1:])
    llm.exit()
    assert monotonic() - begin < 5 and ("rank 1 was killed" in caplog.text) == (dies_in == "exit")
    assert maps() == (False, [])
    threads = [thread for thread in threading.enumerate() if thread.name == "nanovllm-files"]
    for thread in threads:
        thread.join(1)
    assert not any(thread.is_alive() for thread in threads)


def test_bad_and_slow_files(restarted, small_model, requests, expected, monkeypatch, tmp_path, caplog):
    """What can't be read is computed, and what can't be written is lost, with one warning."""
    restarted(small_model, requests[:9])
    files = sorted((tmp_path / "swap").rglob("*.block"))
    for i, file in enumerate(files):
        if i % 3 == 0:
            file.write_bytes(file.read_bytes()[:-1])
        elif i % 3 == 1:
            file.unlink()
    read, write = BlockFiles.read, BlockFiles.write

    def slow_read(self, *arguments):
        sleep(random.Random(arguments[0]).random() / 50)
        read(self, *arguments)

    def failing_write(self, block_hash, *arguments):
        if block_hash % 2:
            raise OSError(28, "No space left on device")
        return write(self, block_hash, *arguments)

    monkeypatch.setattr(BlockFiles, "read", slow_read)
    monkeypatch.setattr(BlockFiles, "write", failing_write)
    tokens, tiers = restarted(small_model, requests[:13], num_rows=20)
    assert tokens == expected[:13] and tiers["disk_blocks"] > 0 and tiers["lost_copies"] > 1
    assert sum("could not be" in record.message for record in caplog.records if record.levelname == "WARNING") == 1
    assert not [*(tmp_path / "swap").rglob("*.tmp")]
    assert not any(thread.name == "nanovllm-files" for thread in threading.enumerate()), "they would outlive Python"


def test_files_that_hang(make_llm, small_model, tmp_path, monkeypatch):
    """Dropping all requests does not wait for them, and the rows into which they are read are never used again."""
    monkeypatch.setattr(host_blocks, "HostBlocks", HostBlocks)
    prompt, params = [*range(5, 70)], SamplingParams(temperature=0, max_tokens=2)
    settings = SMALL | dict(swap_dir=str(tmp_path), swap_space=gib(60, small_model))
    with make_llm(small_model, **settings) as llm:
        expected = llm.generate(prompt, params, use_tqdm=False)
    go_on, read = threading.Event(), BlockFiles.read
    monkeypatch.setattr(BlockFiles, "read", lambda *x: [go_on.wait(60), read(*x)])
    monkeypatch.setattr(disk_tier, "EXIT_SECONDS", 0.05)
    llm = make_llm(small_model, **settings)
    tier: Any = llm.scheduler.block_manager.connector
    request_id = llm.add_request(prompt, params)
    while not tier._file_reads or tier._file_reads[0].futures is None:
        llm.step()
    (reading,) = tier._file_reads
    while not all(future.running() for future in reading.futures.values()):  # those that wait would be cancelled
        sleep(0.001)
    rows = {row for entry in reading.entries.values() for row in entry.rows}
    llm.abort(request_id)
    with pytest.raises(RuntimeError, match="a step has failed"):
        llm.engine_thread.call(lambda: 1 // 0)
    assert rows and rows.isdisjoint(tier._free_rows)
    assert llm.generate(prompt, params, use_tqdm=False)[0].outputs == expected[0].outputs
    assert rows.isdisjoint(row for entry in tier._entries.values() for row in entry.rows)
    llm.exit()
    go_on.set()


def test_a_slow_disk(restarted, small_model, requests, expected, monkeypatch):
    """Blocks are computed if that was measured to be faster than reading them. Reads are measured again later."""
    read, run = BlockFiles.read, partial(restarted, small_model, requests[:9], num_rows=500)

    def slow_read(*arguments):
        sleep(0.005)
        read(*arguments)

    def num_read(ms_per_token: float | None) -> int:
        with monkeypatch.context() as patch:
            warm_up = ModelRunner.warm_up
            patch.setattr(
                ModelRunner,
                "warm_up",
                lambda self, done: [warm_up(self, done), setattr(self, "measured_ms_per_token", ms_per_token)],
            )
            tokens, tiers = run()
        assert tokens == expected[:9] and tiers["lost_copies"] == 0
        return tiers["disk_blocks"]

    run()
    monkeypatch.setattr(BlockFiles, "read", slow_read)
    all_blocks, first_blocks = num_read(None), num_read(0.001)
    assert num_read(1.0) == all_blocks > 2 * first_blocks > 0
    monkeypatch.setattr(disk_tier, "RETRY_SECONDS", 0.0)
    assert num_read(0.001) == all_blocks


def test_rows_are_read_into_when_copies_have_ended(restarted, small_model, requests, expected, monkeypatch):
    """A thread must not write to a row of host memory before earlier copies from the device to this row."""
    restarted(small_model, requests[:13], num_rows=20)
    questions = []

    def end_of_copies(self, num_copies):
        return lambda: questions.append(0) or len(questions) % 3 == 0

    monkeypatch.setattr(HostBlocks, "end_of_copies", end_of_copies)
    tokens, tiers = restarted(small_model, requests[:13], num_rows=20)
    assert tokens == expected[:13] and tiers["disk_blocks"] > 0 and len(questions) > 10


def test_exit_does_not_wait_for_slow_files(restarted, small_model, requests, monkeypatch, caplog):
    write = BlockFiles.write

    def slow_write(self, *arguments):
        sleep(0.1)
        return write(self, *arguments)

    monkeypatch.setattr(BlockFiles, "write", slow_write)
    monkeypatch.setattr("nanovllm.tiers.disk_tier.EXIT_SECONDS", 0.05)
    restarted(small_model, requests[:9])
    assert "not all cache blocks could be written" in caplog.text


def test_files_are_bounded(restarted, small_model, requests, tmp_path):
    restarted(small_model, requests[:9], swap_dir_space=gib(7, small_model))
    files = [*(tmp_path / "swap").rglob("*.block")]
    assert 3 <= len(files) <= 7


def test_files_of_other_weights_are_not_used(small_model, requests, expected, tmp_path, monkeypatch):
    """Neither after new weights in the same engine, nor with other files, another layout, or other ranks."""
    monkeypatch.setattr(host_blocks, "HostBlocks", HostBlocks)
    model = shutil.copytree(small_model, tmp_path / "model")
    settings = SMALL | dict(dtype="float32", device="cpu", swap_dir=str(tmp_path / "swap"), swap_space=0.01)
    weights = load_file(model / "model.safetensors")
    changed = {name: 0.9 * weight for name, weight in weights.items()}

    def run(**more) -> tuple[list, int]:
        with LLM(str(model), **settings | more) as llm:
            return answers(llm, requests[:9]), llm.stats()["tiers"]["disk_blocks"]

    assert run() == (expected[:9], 0) and run()[1] > 0
    with LLM(str(model), **settings) as llm:
        llm.load_weights(changed.items())
        others = answers(llm, requests[:9])
        assert others != expected[:9] and llm.stats()["tiers"]["disk_blocks"] == 0
        before = disk_tier.fingerprint(llm.config, llm.model_runner)
        llm.config.resolve(tensor_parallel_size=2)  # the shapes of blocks may be the same
        assert disk_tier.fingerprint(llm.config, llm.model_runner) != before
        llm.config.resolve(tensor_parallel_size=1)
    tokens, num_read = run()
    assert tokens == expected[:9] and num_read > 0
    assert run(kvcache_block_size=32)[1] == run(batch_invariant=True)[1] == 0
    save_file(changed, model / "model.safetensors")
    assert run() == (others, 0)


def test_refused_folders(make_llm, tmp_path):
    (tmp_path / "file").touch()
    for settings, message in {
        (("swap_dir", ""), ("swap_space", 1)): "must be the path of a folder",
        (("swap_dir", str(tmp_path / "file")), ("swap_space", 1)): "is not a folder",
        (("swap_dir", str(tmp_path / "file" / "inside")), ("swap_space", 0.01)): "can't be used",
        (("swap_dir", "~no-such-user/x"), ("swap_space", 0.01)): "swap_dir='~no-such-user/x': can't be used",
        (("swap_dir", "a" * 5000), ("swap_space", 0.01)): "can't be used",
        (("swap_dir", str(tmp_path / "a\0b")), ("swap_space", 0.01)): "can't be used",
        (("swap_dir", str(tmp_path)),): "needs swap_space",
        (("swap_dir", str(tmp_path)), ("swap_space", 0.01), ("swap_dir_space", 1e-9)): "swap_dir_space=1e-09: a cache",
    }.items():
        with pytest.raises(ValueError, match=message):
            make_llm(**dict(settings))
    with pytest.raises(TypeError, match="swap_dir=3: must be a string"):
        make_llm(swap_dir=3, swap_space=1)


def test_the_number_of_a_folder(tmp_path, monkeypatch, caplog):
    """A full disk leaves no file behind. A damaged file is replaced, and blocks of the lost number are deleted."""
    file = tmp_path / "salt"
    with monkeypatch.context() as context:
        context.setattr(disk_tier.secrets, "token_bytes", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            disk_tier._stored_salt(tmp_path)
    assert not file.exists()
    salt, block = disk_tier._stored_salt(tmp_path), tmp_path / "3.block"
    block.touch()
    assert disk_tier._stored_salt(tmp_path) == salt and block.exists() and not caplog.records
    monkeypatch.setattr(disk_tier, "sleep", lambda seconds: None)
    stored = file.read_bytes()
    for damaged in (b"", stored[:5], bytes([stored[0] ^ 1]) + stored[1:]):
        file.write_bytes(damaged)
        block.touch()
        assert disk_tier._stored_salt(tmp_path) == disk_tier._stored_salt(tmp_path) != salt
        assert not block.exists() and "salt is damaged" in caplog.text
        caplog.clear()
