"""Defines the engines to compare. Each engine is a function that runs workloads on a model with our settings."""

import importlib.metadata
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from nanovllm.benchmarks.engines.nanovllm import run_nanovllm, step_nanovllm
from nanovllm.benchmarks.engines.transformers import run_transformers
from nanovllm.benchmarks.engines.vllm import run_vllm, step_vllm
from nanovllm.benchmarks.processes import progress, report, run_in_process
from nanovllm.benchmarks.requests import Workloads
from nanovllm.benchmarks.results import Result, Results

Engines = dict[str, Callable[[str, dict, Workloads], dict[str, Result]]]
ENGINES: Engines = {"nanovllm": run_nanovllm, "transformers": run_transformers, "vllm": run_vllm}
STEPPED_ENGINES: Engines = {"nanovllm": step_nanovllm, "vllm": step_vllm}  # for workloads that need the times of tokens


def run_engines(
    names: list[str], functions: Engines, model: str, settings: dict, workloads: Workloads
) -> tuple[Results, list[Exception]]:
    """Run the workloads on each engine. Return the results, and the errors of engines that failed.

    If there are several names, each engine runs in a separate process. After Ctrl-C, no other engine starts, and only
    the results of complete workloads are returned. If the first engine fails, its error is raised.
    """
    results: Results = {}
    errors: list[Exception] = []
    for engine in names:
        run = functions[engine] if len(names) == 1 else partial(run_in_process, functions[engine])
        try:
            with progress(f"{engine}:"):
                results[engine] = run(model, settings, workloads)
        except Exception as error:
            if engine == names[0]:
                raise
            report(f"{engine} failed: {type(error).__name__}: {error}")
            errors.append(error)
            continue
        for name, result in results[engine].items():
            runs = workloads[name]
            counted = [request for requests in runs[-result.num_runs :] for request in requests]
            counts_input = name.startswith(("prefill", "embed"))
            result.num_tokens = sum(len(r.prompt) if counts_input else r.max_tokens for r in counted)
        if results[engine].keys() < workloads.keys():  # Ctrl-C
            break
    return results, errors


def versions(engines: Iterable[str]) -> str:
    """Return the versions of the engines, `torch` and `triton`, and all environment variables named `VLLM_*`."""
    parts = []
    for package in (*engines, "torch", "triton"):
        with suppress(importlib.metadata.PackageNotFoundError):
            name = {"nanovllm": "nano-vllm"}.get(package, package)
            parts.append(f"{package} {importlib.metadata.version(name)}")
    parts += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("VLLM_")]
    return ", ".join(parts)
