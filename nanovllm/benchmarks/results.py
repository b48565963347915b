"""Defines the results of engines, computes statistics, and saves results to a file."""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from math import nan
from pathlib import Path
from statistics import median

import numpy as np


@dataclass
class Result:
    """The result of one engine on one workload.

    num_runs: the number of runs that the result summarizes.
    token_times: for each request, the arrival times of its tokens, in seconds since the request was due.
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
    notes = dict.fromkeys(result.note for result in results)
    seconds = sum(result.seconds for result in results)
    return Result(seconds, num_runs=len(results), token_times=times, note="; ".join(filter(None, notes)))


def percentile(values: list[float], p: float) -> float:
    """Return a percentile, interpolated linearly between the two nearest values. Return NaN if there are no values."""
    return float(np.percentile(values, p)) if values else nan


def latencies(token_times: list[list[float]]) -> dict[str, list[float]]:
    """Return latencies in seconds, as defined in the command's help.

    A request with one output token has only a TTFT.
    """
    gaps = [[b - a for a, b in pairwise(times)] for times in token_times if len(times) > 1]
    return {
        "TTFT": [times[0] for times in token_times if times],
        "time per output token": [sum(of_request) / len(of_request) for of_request in gaps],
        "ITL": [gap for of_request in gaps for gap in of_request],
        "longest gap": [max(of_request) for of_request in gaps],
    }


def latency_ms(result: Result, kind: str, p: float, min_values: int = 1) -> float:
    """Return a percentile of one kind of `latencies` in milliseconds, or NaN if there are too few values."""
    values = latencies(result.token_times)[kind]
    return 1000 * percentile(values, p) if len(values) >= min_values else nan


def decode_rate(token_times: list[list[float]], num_seqs: int) -> float:
    """Return the decode speed in tokens per second while all sequences of a run decode (median of the runs).

    `token_times` contains the runs one after another, with `num_seqs` sequences per run.
    """
    rates = []
    for i in range(0, len(token_times), num_seqs):
        run = token_times[i : i + num_seqs]
        begin, end = max(times[0] for times in run), min(times[-1] for times in run)
        num_tokens = sum(begin < time <= end for times in run for time in times)
        rates.append(num_tokens / (end - begin) if end > begin else nan)
    return median(rates)


def drafts_since(before: dict | None, now: dict | None) -> str:
    """Describe how many drafts were accepted between two readings of `LLM.stats()["spec_decode"]`."""
    if not before or not now:
        return ""
    names = "drafts", "draft_tokens", "accepted_tokens", "accepted_per_position"
    steps, drafted, accepted, by_position = (np.subtract(now[name], before[name]) for name in names)
    rates = " ".join(f"{rate:.2f}" for rate in by_position / max(1, steps))
    each = f"{1 + accepted / max(1, steps):.2f} tokens a step with drafts"
    return f"{accepted:,} of {drafted:,} drafts right ({rates}), {each}"


def save_results(file: Path, notes: str, setup: str, rates: dict[str, dict[str, float]]) -> None:
    """Merge rates (tokens/s) into a JSON file `{"notes": text, "results": {setup: {workload: {engine: rate}}}}`."""
    saved = json.loads(file.read_text()) if file.exists() else {"notes": notes, "results": {}}
    workloads = saved["results"].setdefault(setup, {})
    for workload, by_engine in rates.items():
        workloads.setdefault(workload, {}).update({engine: round(rate) for engine, rate in by_engine.items()})
    file.write_text(json.dumps(saved, indent=2) + "\n")
