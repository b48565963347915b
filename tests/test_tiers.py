"""The second tier of the prefix cache: blocks that leave the device come back, and nothing else changes."""

import random
from collections import OrderedDict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from simulation import SETTINGS, Simulation, random_requests

from nanovllm import LLM, SamplingParams
from nanovllm.cache.block_copies import block_parts
from nanovllm.tiers import host_tier, tiered_blocks
from nanovllm.tiers.connector import Connector
from nanovllm.tiers.host_tier import HostTier
from nanovllm.tiers.tiered_blocks import use_connector

pytestmark = pytest.mark.small_model


# -- without a model ---------------------------------------------------------------------------------------------------


class LateBlocks:
    """Replaces HostBlocks on a simulated device, and makes each copy as late as the order of streams allows, or earlier.

    So what a step must wait for is missing if it does not wait. Rank 0 believes that a copy has ended after a random
    number of questions, whatever this rank has done.
    """

    def __init__(self, runner, num_rows: int):
        self.cache, self.random, self.failures = runner.cache, runner.random, runner.failures
        self.rows: list = [None] * num_rows
        self.queues: dict[str, list] = {"put": [], "get": []}  # (number, copies, how many puts come first)
        self.num_puts, self.num_done, self.num_gets = 0, 0, 0

    def put(self, runner, number, copies):
        self.queues["put"].append((number, copies.T.tolist(), 0))
        self.num_puts += 1
        self._make_some()

    def get(self, runner, number, copies):
        if self.failures and self.random.random() < 0.1:
            raise OSError("a copy could not start")
        self.queues["get"].append((number, copies.T.tolist(), self.num_puts))
        self.num_gets += 1
        self._make_some()

    def has_ended(self, number):
        if self.failures and self.random.random() < 0.05:
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
                self.rows[row] = [*self.cache[block_id]]
            else:
                self.cache[block_id] = [*self.rows[row]]


class TieredSimulation(Simulation):
    def __init__(self, requests, asynchronous, num_rows, failures=False, **settings):
        super().__init__(requests, asynchronous, **settings)
        device = dict(device=SimpleNamespace(type="cpu"), on_device=nullcontext)
        runner = SimpleNamespace(cache=self.cache, random=random.Random(0), failures=failures, **device)
        self.tier = HostTier(SimpleNamespace(workers=SimpleNamespace(processes=()), model_runner=runner), num_rows)
        use_connector(self.scheduler, self.tier)
        self.manager = self.scheduler.block_manager

    def blocks_of_loads(self):
        loads = getattr(self.manager, "loads", ())
        return [block.block_id for load in loads for block in load.held]

    def check_move(self):
        super().check_move()
        tier, manager = self.tier, self.manager
        rows = [entry.row for entry in tier._entries.values()]
        assert len({*rows, *tier._free_rows}) == len(rows) + len(tier._free_rows) == tier._num_rows
        assert {*manager._arriving} == {content.block_hash for load in manager.loads for content in load.contents}
        assert len(tier._copies) <= len(manager.blocks) and len(tier._reads) <= len(tier._copies)
        if self.random.random() < 0.01:
            manager.clear_prefix_cache()
            self.seen["cleared"] += 1

    def check_end(self):
        while self.manager.loads:  # of sequences that were aborted
            self.manager.take_copies()
        super().check_end()
        assert not any(entry.num_reads for entry in self.tier._entries.values())
        self.seen["loaded"] = self.scheduler.totals["loaded_blocks"]
        self.seen["lost"] = self.scheduler.totals["lost_copies"]


CAPACITIES = [1, 3, 40, 1000]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [name for name in SETTINGS if "no prefix caching" not in name])
def test_random_requests_with_a_tier(monkeypatch, name, seed):
    """Answers and blocks are right with any capacity, however late copies are made, and whether they succeed."""
    seen = {"loaded": 0, "lost": 0}
    for i, num_rows in enumerate(CAPACITIES):
        monkeypatch.setattr(host_tier, "HostBlocks", LateBlocks)
        monkeypatch.setattr(tiered_blocks, "NUM_AHEAD", (0, 2, 128)[(i + seed) % 3])
        monkeypatch.setattr(tiered_blocks, "IDLE_SECONDS", 0)
        drafts = dict(num_drafts=1, drafts_on_host=i % 2 == 0) if (i + seed) % 2 else {}
        requests = random_requests(seed, 40, max_n=1 if drafts else 5)
        failures = (i + seed) % 3 == 0
        one = TieredSimulation(requests, i % 2 == 1, num_rows, failures, **SETTINGS[name] | drafts).run().seen
        seen = {key: seen[key] + one[key] for key in seen}
    print(name, seed, seen)
    if "tiny cache" in name:
        assert seen["loaded"] > 20 and seen["lost"] > 0
