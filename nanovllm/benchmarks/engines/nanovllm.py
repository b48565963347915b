"""Runs workloads on this package, with `generate` or with `step`."""

import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING

from nanovllm import SamplingParams
from nanovllm.benchmarks.engines.loops import measure, serve
from nanovllm.benchmarks.processes import seconds_since_start
from nanovllm.benchmarks.requests import Request, Workloads
from nanovllm.benchmarks.results import Result, drafts_since, fastest, joined
from nanovllm.engine.admission import TokenBudget

if TYPE_CHECKING:
    from nanovllm import LLM


def nanovllm_params(request: Request) -> SamplingParams:
    return SamplingParams(**request.sampling_settings())


def inputs(requests: list[Request]) -> tuple[list[dict], list[SamplingParams]]:
    return [r.as_prompt() for r in requests], [nanovllm_params(r) for r in requests]


class NanoVllmSteps:
    params = staticmethod(nanovllm_params)

    def __init__(self, llm: "LLM"):
        self.llm, self.add, self.is_finished = llm, llm.add_request, llm.is_finished
        self.num_cached_tokens, self._hits_before, self._cost_of_cached = 0, Counter[str](), 0.0
        self._budget = TokenBudget(inf, llm.config.model_config.context_of_equal_cost)

    def step(self) -> list[tuple[int, int]]:
        output = self.llm.step()
        for request in output.finished:
            self.num_cached_tokens += request.num_cached_tokens
            self._cost_of_cached += self._budget.cost(0, request.num_cached_tokens)
        return output.new_tokens

    def seconds_saved(self) -> float:
        """Estimate how many seconds of computation the prefix cache has saved since the last call of this method.

        The estimate assumes the speed that the engine measured at its start.
        """
        config, cost, self._cost_of_cached = self.llm.config, self._cost_of_cached, 0.0
        assert config.max_mixed_step_ms and config.max_num_mixed_tokens  # known after the start
        return cost / config.max_num_mixed_tokens * config.max_mixed_step_ms / 1000

    def hits_by_tier(self) -> dict[str, int]:
        """Return how many prompt tokens came from host memory and from files since the last call of this method."""
        tiers = self.llm.stats().get("tiers", {})
        loaded = tiers.get("host_hits", 0)
        in_files = min(loaded, tiers.get("disk_hits", 0))  # some blocks are read for requests that are aborted
        totals = Counter({"in host memory": loaded - in_files, "in files": in_files})
        before, self._hits_before = self._hits_before, totals
        return totals - before


@contextmanager
def started_nanovllm(model: str, settings: dict) -> "Iterator[LLM]":
    """Start an `LLM` of this package. In the main process, print how long the start took."""
    from nanovllm import LLM  # imports PyTorch, which --help does not need

    with LLM(model, **settings) as llm:
        loaded = seconds_since_start()
        if llm.config.task == "generate":
            llm.generate([1], SamplingParams(max_tokens=1), use_tqdm=False)
        if multiprocessing.parent_process() is None:
            now, inside = seconds_since_start(), llm.startup_seconds
            parts = {"imports": loaded - sum(inside.values()), **inside, "first token": now - loaded}
            print(f"from start to the first token: {now:.1f} s", end=" (")
            print(", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items()), end=")\n")
        yield llm


def run_nanovllm(model: str, settings: dict, workloads: Workloads) -> dict[str, Result]:
    """Run workloads with `LLM.generate` or `LLM.embed`. An output's metrics contain the time of its first token."""

    def run(requests: list[Request]) -> Result:
        prompts, params = inputs(requests)
        before = llm.stats().get("spec_decode")
        begin = perf_counter()
        if llm.config.task == "embed":
            outputs: list = llm.embed(prompts, use_tqdm=sys.stderr.isatty())
        else:
            outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
        seconds, metrics = perf_counter() - begin, [output.metrics for output in outputs]
        # an embedding has no first token
        times = [[(m.first_token_time or m.finished_time) - m.arrival_time] for m in metrics]
        return Result(seconds, token_times=times, note=drafts_since(before, llm.stats().get("spec_decode")))

    with started_nanovllm(model, settings) as llm:
        return measure("nanovllm", run, workloads, fastest)


def step_nanovllm(model: str, settings: dict, workloads: Workloads) -> dict[str, Result]:
    """Run workloads with `LLM.step`."""
    with started_nanovllm(model, settings) as llm:
        return measure("nanovllm", partial(serve, NanoVllmSteps(llm)), workloads, joined)
