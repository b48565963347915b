"""Metrics for Prometheus, with vLLM's names where they mean the same."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nanovllm.serve.async_llm import AsyncLLM
from nanovllm.serve.async_request import AsyncRequest

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token", SECONDS),
    "request_time_per_output_token_seconds": ("Mean time between two tokens of a request", TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("From a request's arrival to its end", SECONDS),
    "request_queue_time_seconds": ("From a request's arrival to the first step that computes it", SECONDS),
    "request_prompt_tokens": ("Tokens of a request's prompt", TOKENS),
    "request_generation_tokens": ("Tokens of all answers to a request", TOKENS),
}


class Metrics:
    """Histograms are filled once for each request that ends. All else is read from the engine when `text` is called."""

    def __init__(self, llm: AsyncLLM, model: str):
        self._llm, self._model = llm, model
        self._registry = CollectorRegistry()
        options: dict = {"labelnames": ("model_name",), "registry": self._registry}
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, buckets=buckets, **options).labels(model)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._ends = Counter(
            "vllm:request_success", "Answers that ended", ("model_name", "finished_reason"), registry=self._registry
        )
        self._registry.register(self)  # type: ignore[arg-type]
        llm.on_end.append(self.observe)

    def text(self) -> bytes:
        """In the text format of Prometheus."""
        return generate_latest(self._registry)

    def observe(self, request: AsyncRequest) -> None:
        """A request has ended. If it was dropped, its times say nothing about the engine."""
        if (output := request.final) is None:
            self._ends.labels(self._model, "abort").inc(request.num_answers)
            return
        for answer in output.outputs:
            self._ends.labels(self._model, str(answer.finish_reason)).inc()
        num_tokens = sum(len(answer.token_ids) for answer in output.outputs)
        times = output.metrics
        values = {
            "request_prompt_tokens": len(output.prompt_token_ids),
            "request_generation_tokens": num_tokens,
            "request_queue_time_seconds": times.time_in_queue,
        }
        if times.first_token_time is not None and times.finished_time is not None:
            values["time_to_first_token_seconds"] = times.first_token_time - times.arrival_time
            values["e2e_request_latency_seconds"] = times.finished_time - times.arrival_time
            if (num_gaps := max(len(answer.token_ids) for answer in output.outputs) - 1) > 0:
                seconds = times.finished_time - times.first_token_time
                values["request_time_per_output_token_seconds"] = seconds / num_gaps
        for name, value in values.items():
            if value is not None:
                self._histograms[name].observe(value)

    def collect(self) -> Iterator[Metric]:
        """The state of the engine, for the registry."""
        stats = self._llm.engine.stats()
        requests, blocks, tokens = stats["requests"], stats["blocks"], stats["tokens"]
        waiting = max(0, self._llm.num_unfinished - requests["running"])  # also those that are being tokenized
        for name, text, value in [
            ("num_requests_running", "Answers that hold cache blocks", requests["running"]),
            ("num_requests_waiting", "Answers that wait for cache blocks", waiting),
            ("kv_cache_usage_perc", "Fraction of the cache blocks in use", blocks["used"] / sum(blocks.values())),
        ]:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, value in [
            ("prompt_tokens", "Tokens of prompts", tokens["in"]),
            ("generation_tokens", "Generated tokens", tokens["out"]),
            ("prefix_cache_queries", "Tokens of prompts that were looked up", tokens["in"]),
            ("prefix_cache_hits", "Those that were found", round(stats["prefix_hit_rate"] * tokens["in"])),
            ("num_preemptions", "Sequences that gave up their cache blocks", stats["preemptions"]),
        ]:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
