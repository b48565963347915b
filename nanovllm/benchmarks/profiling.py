"""Profiles a run of each workload: writes a trace, and prints the mean time per step of each kind of kernel."""

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile

from nanovllm.benchmarks.engines.nanovllm import inputs, started_nanovllm
from nanovllm.benchmarks.limits import Steps, least_steps, measured_rates
from nanovllm.benchmarks.processes import run_in_process
from nanovllm.benchmarks.requests import Request, Workloads
from nanovllm.benchmarks.tables import number, print_table
from nanovllm.config import Config

PRODUCTS, SAMPLER, REST, IDLE = "products", "head & sampler", "the rest", "idle"
OF_PROMPTS = "_prefill_kernel"  # the attention kernel of steps that compute prompts
KINDS = {  # kind: pattern of kernel names; the first match counts
    "attention": f"{OF_PROMPTS}|_decode_kernel|_combine_kernel",
    "RoPE & store": "_norm_rope_store_kernel",
    "delta rule": "_inputs_kernel|_chunks_kernel|_states_kernel|_outputs_kernel|_tokens_kernel",
    "experts": "_(route|count|scan|sort|gather_pairs|grouped|packed_experts|activate|sum_parts|gate_up|down)_kernel"
    "|_(gate_up|down)_gemv_kernel",
    PRODUCTS: "gemm|gemv|nvjet|cutlass|splitK|_split_k_kernel|_product_kernel|_dequantize(_packed)?_kernel",
    "adapters": "_(shrink|expand|expand_swiglu)_kernel",
    "norms & SwiGLU": "_norm_kernel|_norm_(columns|heads)_kernel|_groups_kernel|_sigmoid_gate_kernel",
    SAMPLER: "_penalize_kernel|_cutoff_kernel|_sample_split_kernel|_sample_reduce_kernel|_token_logprobs_kernel",
    REST: "",
}
COLUMNS = [*KINDS, IDLE]
# traced tokens of each request: fewer than any output of the default headline, so that all requests decode together
MAX_TOKENS = 65


class Event(NamedTuple):
    """A kernel, copy or memset on the GPU, with times in microseconds."""

    end: float
    begin: float
    name: str


@cache
def kind_of(name: str) -> str:
    return next(kind for kind, names in KINDS.items() if re.search(names, name))


def profile_workloads(model: str, settings: dict, config: Config, workloads: Workloads, folder: Path) -> None:
    """Trace the last run of each workload, with at most MAX_TOKENS per output, and print the mean time per step.

    The first run is a warm-up. If the warm-up had the prompts of the traced run, the prefix cache contains them, and
    the table leaves out the prompt steps.
    """
    profiles = {}
    with started_nanovllm(model, settings) as llm:
        for name, runs in workloads.items():
            warm_up, requests = (shortened(runs[i]) for i in (0, -1))
            llm.generate(*inputs(warm_up), use_tqdm=False)
            before = Counter(llm.stats()["steps"])
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                llm.generate(*inputs(requests), use_tqdm=False)
            steps = Counter(llm.stats()["steps"]) - before
            file = folder / f"{name.replace(' ', '-')}.json"
            trace.export_chrome_trace(str(file))
            num_steps = 0 if warm_up == requests else steps["prefill"] + steps["mixed"], steps["decode"]
            profiles[name] = requests, num_steps, [times_by_kind(part) for part in split(read_trace(file))]
    rates = run_in_process(measured_rates, config.device).times(config.tensor_parallel_size)
    rows = []
    for name, (requests, *parts) in profiles.items():
        for part, num_steps, times, least in zip(("prompts", "decodes"), *parts, least_steps(requests, config, rates)):
            if num_steps:
                rows.append([f"{name}: {part}", f"{num_steps:,}", *row(times, num_steps, least)])
    columns = [i for i in range(len(rows[0])) if any(row[i] != "0" for row in rows)]
    header = ["", "steps", *COLUMNS, "total", "limit", ""]
    title = f"microseconds of a mean step; traces for https://ui.perfetto.dev in {folder}"
    print_table(title, [header[i] for i in columns], [[row[i] for i in columns] for row in rows])
    print("\nlimit: the least time for reading or multiplying, whichever takes longer; see --help")


def shortened(requests: list[Request]) -> list[Request]:
    return [replace(request, max_tokens=min(MAX_TOKENS, request.max_tokens)) for request in requests]


def row(times: Counter[str], num_steps: int, least: Steps) -> list[str]:
    """Return the cells of a table row, without the name and the number of steps. `least` is from `least_steps`."""
    reads, multiplies = map(sum, zip(*least))
    cells = [*(times[kind] for kind in COLUMNS), sum(times.values()), sum(map(max, least)) * 1e6]
    return [*(number(us / num_steps, 0) for us in cells), "reading" if reads > multiplies else "multiplying"]


def read_trace(file: Path) -> list[Event]:
    kinds = "kernel", "gpu_memcpy", "gpu_memset"
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("cat") in kinds]
    return sorted(Event(event["ts"] + event["dur"], event["ts"], event["name"]) for event in events)


def split(events: list[Event]) -> tuple[list[Event], list[Event]]:
    """Split the events at the end of the last step that computes prompts."""
    end = max((i for i, event in enumerate(events) if OF_PROMPTS in event.name), default=0)
    while end < len(events) and kind_of(events[end].name) != SAMPLER:
        end += 1
    while end < len(events) and kind_of(events[end].name) == SAMPLER:
        end += 1
    return events[:end], events[end:]


def times_by_kind(events: list[Event]) -> Counter[str]:
    """Return the time of each kind of kernel in microseconds.

    Kernels overlap, so the time of a kernel is measured from the end of the previous kernel. The last GEMM before a
    sampler kernel counts as the output head. Time in which no kernel runs counts as idle.
    """
    times: Counter[str] = Counter()
    now, last_product = events[0].begin if events else 0.0, 0.0
    for event in events:
        kind, spent = kind_of(event.name), event.end - max(now, event.begin)
        times[kind] += spent
        times[IDLE] += max(0.0, event.begin - now)
        if kind == PRODUCTS:
            last_product = spent
        elif kind == SAMPLER:
            times[PRODUCTS] -= last_product
            times[SAMPLER] += last_product
            last_product = 0.0
        now = event.end
    return times
