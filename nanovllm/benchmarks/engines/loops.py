"""Defines two loops: `measure` runs all workloads, and `serve` submits requests when they are due."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from time import perf_counter, sleep
from typing import Any

from nanovllm.benchmarks.processes import progress, report
from nanovllm.benchmarks.requests import Request, Workloads, number_of
from nanovllm.benchmarks.results import Result
from nanovllm.utils.progress import progress_bar, with_bar

Run = Callable[[list[Request]], Result]
Summary = Callable[[list[Result]], Result]
BAR: dict[str, Any] = dict(leave=False, dynamic_ncols=True)


def measure(engine: str, run: Run, workloads: Workloads, summary: Summary) -> dict[str, Result]:
    """Execute all runs of each workload, and report when the workload starts and ends. The first run is a warm-up.

    After Ctrl-C, return the results of the workloads that have finished, if any.
    """
    results: dict[str, Result] = {}
    try:
        for i, (name, runs) in enumerate(workloads.items()):
            with progress(f"{engine}: {name}" + f" ({i + 1} of {len(workloads)})" * (len(workloads) > 1)):
                _, *measured = [run(requests) for requests in with_bar(runs, desc=name, unit="run", **BAR)]
                results[name] = summary(measured)
    except KeyboardInterrupt:
        if not results:
            raise
        report(f"{engine}: interrupted, {len(results)} of {len(workloads)} workloads are complete")
    return results


def serve(engine, requests: list[Request]) -> Result:
    """Submit each request when it is due, and run engine steps until all requests have ended.

    `engine.params` returns a request's sampling parameters. `engine.add` adds a request and returns the request id.
    `engine.step` returns (request id, token id) for each new token. A request that is due during a step is submitted
    after the step.
    """
    params = [engine.params(request) for request in requests]
    due = [(request.arrival, i) for i, request in enumerate(requests) if request.previous is None]
    heapify(due)
    next_turns = {request.previous: i for i, request in enumerate(requests) if request.previous is not None}
    prompts = [request.prompt for request in requests]
    starts, times, answers = [0.0] * len(requests), [[] for _ in requests], [[] for _ in requests]
    indices: dict[int, int] = {}  # request id -> index
    num_tokens = sum(request.max_tokens for request in requests)
    with progress_bar(num_tokens, desc=number_of(requests), unit="tok", **BAR) as advance:
        begin = perf_counter()
        while due or not engine.is_finished():
            now = perf_counter() - begin
            while due and due[0][0] <= now:
                start, i = heappop(due)
                starts[i], indices[engine.add(prompts[i], params[i])] = start, i
            if due and engine.is_finished():
                # the last millisecond is spent in this loop, because sleep() may return late
                sleep(max(0.0, due[0][0] - now - 0.001))
                continue
            new_tokens = engine.step()
            now = perf_counter() - begin
            for request_id, token_id in new_tokens:
                i = indices[request_id]
                times[i].append(now - starts[i])
                answers[i].append(token_id)
                if len(answers[i]) == requests[i].max_tokens and (following := next_turns.get(i)) is not None:
                    prompts[following] = prompts[i] + answers[i] + requests[following].prompt
                    heappush(due, (now + requests[following].arrival, following))
            advance(len(new_tokens))
        seconds = perf_counter() - begin
    note = ""
    if next_turns:
        num_tokens, tiers = sum(map(len, prompts)), getattr(engine, "hits_by_tier", dict)()
        note = f"{engine.num_cached_tokens / num_tokens:.1%} of the prompts' tokens were in the prefix cache"
        if tiers:
            places = {"on the device": engine.num_cached_tokens - sum(tiers.values()), **tiers}
            note += f" ({', '.join(f'{n / num_tokens:.1%} {place}' for place, n in places.items())})"
        if (saved := getattr(engine, "seconds_saved", float)()) > 0:
            note += f"; computing them would have taken about {saved:.2g} s"
        engine.num_cached_tokens = 0
    return Result(seconds, token_times=times, note=note)
