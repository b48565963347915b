"""What an engine took for a workload, the statistics of that, and the file that collects results."""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from math import nan
from pathlib import Path
from statistics import median

import numpy as np


@dataclass
class Result:
    """One engine on one workload.

    num_runs: how many runs of the workload it is the sum of.
    token_times: for each request, when its tokens arrived, in seconds from the request's arrival.
    """

    seconds: float = 0.0
    num_tokens: int = 0
    num_runs: int = 1
    token_times: list[list[float]] = field(default_factory=list)
    note: str = ""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


Results = dict[str, dict[str, Result]]  # by engine and workload


def fastest(results: list[Result]) -> Result:
    return min(results, key=lambda result: result.seconds)


def joined(results: list[Result]) -> Result:
    times = [times for result in results for times in result.token_times]
    return Result(sum(result.seconds for result in results), num_runs=len(results), token_times=times)


def percentile(values: list[float], p: float) -> float:
    """Interpolated linearly between the two nearest values; NaN if there are none."""
    return float(np.percentile(values, p)) if values else nan


def latencies(token_times: list[list[float]]) -> dict[str, list[float]]:
    """What the help text of the command defines, in seconds. A request with one token has only a TTFT."""
    gaps = [[b - a for a, b in pairwise(times)] for times in token_times if len(times) > 1]
    return {
        "TTFT": [times[0] for times in token_times if times],
        "time per output token": [sum(of_request) / len(of_request) for of_request in gaps],
        "ITL": [gap for of_request in gaps for gap in of_request],
        "longest gap": [max(of_request) for of_request in gaps],
    }


def latency_ms(result: Result, kind: str, p: float) -> float:
    """A percentile of one of the `latencies`, in milliseconds."""
    return 1000 * percentile(latencies(result.token_times)[kind], p)


def decode_rate(token_times: list[list[float]], num_seqs: int) -> float:
    """Tokens per second while all of `num_seqs` sequences decode: the median of the runs, which follow each other."""
    rates = []
    for i in range(0, len(token_times), num_seqs):
        run = token_times[i : i + num_seqs]
        begin, end = max(times[0] for times in run), min(times[-1] for times in run)
        num_tokens = sum(begin < time <= end for times in run for time in times)
        rates.append(num_tokens / (end - begin) if end > begin else nan)
    return median(rates)


def drafts_since(before: dict | None, now: dict | None) -> str:
    """Of two counts like `LLM.stats()["spec_decode"]`: the drafts that were right, in all and by their position."""
    if not before or not now:
        return ""
    names = "drafts", "draft_tokens", "accepted_tokens", "accepted_per_position"
    steps, drafted, accepted, by_position = (np.subtract(now[name], before[name]) for name in names)
    rates = " ".join(f"{rate:.2f}" for rate in by_position / max(1, steps))
    each = f"{1 + accepted / max(1, steps):.2f} tokens a step with drafts"
    return f"{accepted:,} of {drafted:,} drafts right ({rates}), {each}"


def save_results(file: Path, notes: str, setup: str, rates: dict[str, dict[str, float]]) -> None:
    """Merge tokens per second into a file of `{"notes": text, "results": {setup: {workload: {engine: rate}}}}`."""
    saved = json.loads(file.read_text()) if file.exists() else {"notes": notes, "results": {}}
    workloads = saved["results"].setdefault(setup, {})
    for workload, by_engine in rates.items():
        workloads.setdefault(workload, {}).update({engine: round(rate) for engine, rate in by_engine.items()})
    file.write_text(json.dumps(saved, indent=2) + "\n")
