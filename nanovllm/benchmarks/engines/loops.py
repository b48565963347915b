"""Defines two loops: `measure` runs all workloads, and `serve` submits requests when they are due."""

from collections.abc import Callable
from time import perf_counter, sleep

from nanovllm.benchmarks.processes import progress, report
from nanovllm.benchmarks.requests import Request, Workloads
from nanovllm.benchmarks.results import Result
from nanovllm.utils.progress import progress_bar, with_bar

Run = Callable[[list[Request]], Result]
Summary = Callable[[list[Result]], Result]
BAR = dict(leave=False, disable=None, dynamic_ncols=True)  # None: no bar unless stderr is a terminal


def measure(engine: str, run: Run, workloads: Workloads, summary: Summary) -> dict[str, Result]:
    """Do all runs of each workload. The first run is a warm-up. Report when a workload starts and ends.

    After Ctrl-C, return the results of the workloads that are complete, if there are any.
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
    """Submit each request when it is due, and step the engine until all requests have ended.

    `engine.params` returns the sampling parameters of a request, `engine.add` adds a request and returns its id, and
    `engine.step` returns the request id of each new token. A request that falls due during a step is submitted after
    the step.
    """
    params = [engine.params(request) for request in requests]
    times: dict[int, list[float]] = {}
    num_tokens = sum(request.max_tokens for request in requests)
    with progress_bar(num_tokens, desc=f"{len(requests)} requests", unit="tok", **BAR) as advance:
        begin = perf_counter()
        while len(times) < len(requests) or not engine.is_finished():
            now = perf_counter() - begin
            while (i := len(times)) < len(requests) and requests[i].arrival <= now:
                times[engine.add(requests[i].prompt, params[i])] = []
            if i < len(requests) and engine.is_finished():
                # the last millisecond is spent in this loop, because sleep() may return late
                sleep(max(0.0, requests[i].arrival - now - 0.001))
                continue
            ids = engine.step()
            now = perf_counter() - begin
            for request_id in ids:
                times[request_id].append(now)
            advance(len(ids))
        seconds = perf_counter() - begin
    token_times = [[time - request.arrival for time in times[i]] for i, request in zip(times, requests)]
    return Result(seconds, token_times=token_times)
