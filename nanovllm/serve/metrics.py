"""Metrics for Prometheus. If a metric has the same meaning as in vLLM, it also has the same name."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from nanovllm.serve.async_request import AsyncRequest
from nanovllm.serve.engine_calls import STEP_TOKENS
from nanovllm.serve.engine_client import EngineClient
from nanovllm.serve.protocol import IGNORED

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token", SECONDS),
    "request_time_per_output_token_seconds": ("Mean time between two tokens of a request", TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("From a request's arrival to its end", SECONDS),
    "request_queue_time_seconds": ("From a request's arrival to the first step that computes it", SECONDS),
    "request_prompt_tokens": ("Tokens of a request's prompt", TOKENS),
    "request_generation_tokens": ("Tokens of an answer", TOKENS),
}
OF_TOKENS = {"time_to_first_token_seconds", "request_time_per_output_token_seconds", "request_generation_tokens"}
STEP_SIZES = "iteration_tokens_total", "Tokens of prompts that a step computes, and tokens that it samples"
# by metric: its description, and a function that reads it from `LLM.stats()`
Quantities = dict[str, tuple[str, Callable[[dict[str, Any]], int]]]
GAUGES: Quantities = {
    "num_requests_running": ("Answers that hold cache blocks", lambda now: now["requests"]["running"]),
    "num_requests_waiting": ("Answers that wait for cache blocks", lambda now: now["requests"]["waiting"]),
    "kv_cache_usage_perc": ("Fraction of the cache blocks in use", lambda now: now["blocks"]["used"]),
}
COUNTERS: Quantities = {
    "prompt_tokens": ("Tokens of prompts", lambda now: now["tokens"]["in"]),
    "generation_tokens": ("Generated tokens", lambda now: now["tokens"]["out"]),
    "prefix_cache_queries": ("Tokens of prompts that were looked up", lambda now: now["tokens"]["in"]),
    "prefix_cache_hits": ("Tokens of prompts that were found in the device's cache", lambda now: _device_hits(now)),
    "external_prefix_cache_queries": (
        "Tokens of prompts that were looked up in host memory",
        lambda now: now["tokens"]["in"] - _device_hits(now) if "tiers" in now else 0,
    ),
    "external_prefix_cache_hits": (
        "Tokens of prompts that were found in host memory",
        lambda now: now.get("tiers", {}).get("host_hits", 0),
    ),
    "disk_blocks": ("Cache blocks that were read from files", lambda now: now.get("tiers", {}).get("disk_blocks", 0)),
    "lost_copies": (
        "Copies of cache blocks that failed; the blocks are computed again",
        lambda now: now.get("tiers", {}).get("lost_copies", 0),
    ),
    "num_preemptions": ("Sequences that gave up their cache blocks", lambda now: now["preemptions"]),
    "spec_decode_num_drafts": ("Steps of sequences with drafts", lambda now: _drafts(now, "drafts")),
    "spec_decode_num_draft_tokens": ("Drafted tokens", lambda now: _drafts(now, "draft_tokens")),
    "spec_decode_num_accepted_tokens": ("Accepted drafts", lambda now: _drafts(now, "accepted_tokens")),
}
OWN = "disk_blocks", "lost_copies"  # vLLM has no such metrics
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
ZEROS = dict.fromkeys((*GAUGES, *COUNTERS, "blocks"), 0)


class Metrics:
    """The metrics of a server. Answers are counted when they end. The method `text` reads the engines' metrics.

    Step sizes are reported for a single engine, not for replicas.
    """

    def __init__(self, llm: EngineClient, model: str, task: str = "generate"):
        self._llm, self._model, self._task = llm, model, task
        self._stats: list[dict[str, Any] | None] = []  # the last stats of each engine
        self._engines: defaultdict[int, dict[str, int]] = defaultdict(ZEROS.copy)  # by engine: the values to show
        # by index of the engine: the counters at its last restart, and the number of its restarts
        self._before_restart: defaultdict[int, dict[str, int]] = defaultdict((ZEROS | {"restarts": 0}).copy)
        registry = self._shown = CollectorRegistry()
        options: dict = {"labelnames": ("model_name",), "registry": registry}
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, buckets=buckets, **options).labels(model)
            for name, (text, buckets) in HISTOGRAMS.items()
            if task == "generate" or name not in OF_TOKENS
        }
        labels = "model_name", "finished_reason"
        self._ends = Counter("vllm:request_success", "Answers that ended", labels, registry=registry)
        text = "Answers that were aborted, mostly because their clients disconnected"
        self._aborted = Counter("nanovllm:request_aborted", text, **options).labels(model)
        if task != "generate":
            text, labels = "Prompts whose vector was computed, by the server's task", ("model_name", "task")
            self._pooled = Counter("nanovllm:pooled_prompts", text, labels, registry=registry).labels(model, task)
        registry.register(IGNORED.count)
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # sum the counts of all fronts, including fronts that have ended
            self._shown = CollectorRegistry()
            self._shown.register(AllFronts(registry))
        self._shown.register(self)  # type: ignore[arg-type]
        llm.on_end.append(self.observe)

    async def text(self) -> bytes:
        self._stats = await self._llm.stats()
        return generate_latest(self._shown)

    def observe(self, request: AsyncRequest) -> None:
        """Count a request that has ended. The times of a dropped request are left out, because they are meaningless."""
        final: Any = request.final
        pools = self._task != "generate"
        has_result = final is not None and (final.finished if pools else final.metrics.first_token_time is not None)
        if not has_result or (times := final.metrics).finished_time is None:
            self._aborted.inc(request.num_answers)
            return
        for answer in final.outputs:
            self._ends.labels(self._model, str(answer.finish_reason)).inc()
            values = {
                "request_prompt_tokens": len(request.prompt_token_ids),
                "request_queue_time_seconds": times.time_in_queue,
                "e2e_request_latency_seconds": times.finished_time - times.arrival_time,
            }
            if pools:
                self._pooled.inc()
            else:
                values["request_generation_tokens"] = len(answer.token_ids)
                values["time_to_first_token_seconds"] = times.first_token_time - times.arrival_time
                if (num_gaps := len(answer.token_ids) - 1) > 0:
                    seconds = times.finished_time - times.first_token_time
                    values["request_time_per_output_token_seconds"] = seconds / num_gaps
            for name, value in values.items():
                self._histograms[name].observe(value or 0.0)

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's metrics for the registry.

        If there are several replicas, yield the sums over all replicas, then the metrics of each replica.
        """
        self._count()
        total = {name: sum(engine[name] for engine in self._engines.values()) for name in ZEROS}
        waiting = self._llm.num_unfinished - total["num_requests_running"]  # includes answers that are tokenized now
        total["num_requests_waiting"] = max(0, waiting)
        yield from _families("vllm:", ["model_name"], [([self._model], total)])
        accepted = [_drafts(stats, "accepted_per_position", []) for stats in self._stats if stats]
        if numbers := [sum(column) for column in zip(*accepted)]:
            family = CounterMetricFamily(
                f"vllm:{PER_POSITION}", "Accepted drafts by position", labels=["model_name", "position"]
            )
            for position, number in enumerate(numbers):
                family.add_metric([self._model, str(position)], number)
            yield family
        yield self._step_sizes()
        if len(self._engines) > 1:
            replicas = [([self._model, str(i)], engine) for i, engine in self._engines.items()]
            yield from _families("nanovllm:replica_", ["model_name", "replica"], replicas)

    def _step_sizes(self) -> Metric:
        sizes = [stats["step_sizes"] for stats in self._stats if stats and "step_sizes" in stats]
        counts = map(sum, zip([0] * (len(STEP_TOKENS) + 1), *(each["counts"] for each in sizes)))
        bounds = [*map(float, STEP_TOKENS), "+Inf"]
        name, text = STEP_SIZES
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        buckets = [(str(bound), count) for bound, count in zip(bounds, accumulate(counts))]
        family.add_metric([self._model], buckets, sum(each["total"] for each in sizes))
        return family

    def _count(self) -> None:
        """Update the metrics from the engines' stats.

        Counters never decrease, even if a replica restarts or its stats are late.
        """
        for i, stats in enumerate(self._stats):
            engine, before = self._engines[i], self._before_restart[i]
            if stats is None:
                engine |= {name: 0 for name in ZEROS if name not in COUNTERS}
                continue
            now = {name: read(stats) for name, (_, read) in (GAUGES | COUNTERS).items()}
            restarts = stats.get("restarts", 0)
            if restarts < before["restarts"]:  # these stats are from before the restart
                continue
            if restarts > before["restarts"]:
                before |= {"restarts": restarts, **{name: engine[name] for name in COUNTERS}}
            engine |= now | {name: max(engine[name], now[name] + before[name]) for name in COUNTERS}
            engine["blocks"] = sum(stats["blocks"].values())


class AllFronts(MultiProcessCollector):
    """Adds up the metrics of all fronts, and keeps the help texts of the metrics."""

    def __init__(self, registry: CollectorRegistry):
        super().__init__(None)
        self._folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
        self._texts = {metric.name: metric.documentation for metric in registry.collect()}

    def collect(self) -> Iterator[Metric]:
        # an empty file belongs to a front that is still creating it, or was killed while creating it
        files = [str(file) for file in self._folder.glob("*.db") if file.stat().st_size]
        for metric in self.merge(files):
            metric.documentation = self._texts.get(metric.name, metric.documentation)
            yield metric


def _device_hits(stats: dict[str, Any]) -> int:
    hits = round(stats["prefix_hit_rate"] * stats["tokens"]["in"])
    return stats.get("tiers", {}).get("device_hits", hits)


def _drafts(stats: dict[str, Any], name: str, default: Any = 0) -> Any:
    """Return one of the counts of speculative decoding. If an engine has no `speculative_config`, return `default`."""
    return stats.get("spec_decode", {}).get(name, default)


def _families(prefix: str, labels: list[str], engines: list[tuple[list[str], dict[str, int]]]) -> Iterator[Metric]:
    """Yield each quantity as a gauge or a counter. `engines` contains pairs (label values, quantities)."""
    for kind, quantities in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for name, (text, _) in quantities.items():
            family = kind(f"{'nanovllm:' if name in OWN and prefix == 'vllm:' else prefix}{name}", text, labels=labels)
            for values, engine in engines:
                scale = max(1, engine["blocks"]) if name == "kv_cache_usage_perc" else 1
                family.add_metric(values, engine[name] / scale)
            yield family
