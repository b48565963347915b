"""Traces of decode steps, and the time of each kernel in them."""

from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM
from nanovllm.benchmarks.engines.nanovllm import nanovllm_params
from nanovllm.benchmarks.requests import Request


def profile_nanovllm(model: str, settings: dict, batch_sizes: list[int], length: int, folder: Path) -> None:
    """Write a trace of ten decode steps for each batch size, and print how much of a step each kernel takes.

    Kernels overlap, so the time of a kernel is counted from the end of the previous kernel to its own end.
    """
    num_steps = 10
    with LLM(model, **settings) as llm:
        cuda = llm.config.device != "cpu"
        for batch_size in batch_sizes:
            for i in range(batch_size):
                llm.add_request([1 + i, *range(3, length)], nanovllm_params(Request([], 100)))
            while llm.step().num_decode_tokens < batch_size and not llm.is_finished():
                pass
            for _ in range(10):
                llm.step()
            with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]) as trace:
                for _ in range(num_steps):
                    llm.step()
                if cuda:
                    torch.cuda.synchronize()
            file = folder / f"decode-{batch_size}.json"
            trace.export_chrome_trace(str(file))
            print(f"\nbatch of {batch_size}, context {length}: {file} (open it in https://ui.perfetto.dev)")
            kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
            events = sorted((e for e in trace.events() if e.device_type == kind), key=lambda e: e.time_range.end)
            total: dict[str, list[float]] = {}
            for previous, event in pairwise(events):
                total.setdefault(event.name, []).append(event.time_range.end - previous.time_range.end)
            for name, times in sorted(total.items(), key=lambda item: -sum(item[1]))[:12]:
                calls, each = len(times) / num_steps, sum(times) / len(times)
                print(f"  {sum(times) / num_steps:8.1f} us  {calls:5.0f} x {each:7.2f} us  {name[:70]}")
            print(f"  {sum(map(sum, total.values())) / num_steps:8.1f} us in all")
            while not llm.is_finished():
                llm.step()
