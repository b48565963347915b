"""Measures the host time of a step, for the workload `host`. No model runs, so the workload runs on any machine."""

import random
from dataclasses import replace
from math import isnan, nan
from statistics import median
from time import perf_counter, process_time
from timeit import repeat

import torch

from nanovllm import LLM
from nanovllm.benchmarks.engines.nanovllm import inputs, nanovllm_params
from nanovllm.benchmarks.requests import Request, fit, random_ids
from nanovllm.benchmarks.tables import print_table
from nanovllm.engine.forward_output import PendingStep
from nanovllm.engine.sequence import Sequence

HOST_SEQS = (1, 8, 64, 256, 512, 1024)


def measure_host(model: str, settings: dict) -> None:
    """Print the host time of a step, for several numbers of sequences up to `max_num_seqs`."""
    settings = {"max_num_seqs": max(HOST_SEQS)} | settings | {"device": "cpu", "async_scheduling": True}
    max_num_seqs = settings["max_num_seqs"]
    # large enough that one step computes all prompts, and no sequence runs out of blocks
    bounds = dict(max_num_batched_tokens=512 * max_num_seqs, num_kvcache_blocks=4 * max_num_seqs + 8)
    with LLM(model, **settings | bounds) as llm:
        vocab_size = llm.config.model_config.vocab_size
        lengths = fit(512, 100, llm.config.max_model_len)
        rows = []
        for n in [n for n in HOST_SEQS if n <= max_num_seqs]:
            rounds = [host_step(llm, host_requests(n, *lengths, vocab_size)) for _ in range(3)]
            rows.append([f"{n:,}", *(f"{x:,.0f}" for x in min(rounds, key=lambda times: times[-1]))])
        num_seqs = min(512, max_num_seqs)
        calls = host_calls(llm, host_requests(num_seqs, *lengths, vocab_size))
    loop = min(repeat("for i in range(1_000_000): total += i", "total = 0", number=1))
    print(f"a loop of 1,000,000 additions in Python takes {1000 * loop:.1f} ms on this machine")
    title = "what a step costs the host, microseconds (median of the steps, fastest of three rounds)"
    print_table(title, ["sequences", "schedule", "prepare", "process", "sum"], rows)
    title = f"CPU time of a step of {num_seqs} sequences until the caller has the text, microseconds"
    print_table(title, ["call", "step"], [[name, f"{us:,.0f}"] for name, us in calls.items()])


def host_requests(num_seqs: int, max_input_len: int, output_len: int, vocab_size: int) -> list[Request]:
    """Make prompts of random lengths, so that the sequences do not all need their next block in the same step."""
    rng = random.Random(num_seqs)
    lengths = [rng.randint(1, max_input_len) for _ in range(num_seqs)]
    return [Request(random_ids(rng, length, vocab_size), output_len) for length in lengths]


def host_step(llm: LLM, requests: list[Request]) -> list[float]:
    """Return median times of a decode step in microseconds: for scheduling, preparing, processing, and in total."""
    scheduler, runner, config = llm.scheduler, llm.model_runner, llm.config
    device = FakeDevice(len(requests), config.model_config.vocab_size)
    for i, r in enumerate(requests):
        scheduler.add(
            Sequence([*r.prompt], nanovllm_params(r), request_id=i, noise_seed=i, max_len=config.max_model_len)
        )
    times = []
    while not scheduler.is_finished():
        begin = perf_counter()
        step = scheduler.schedule(prompts_first=True)
        scheduled = perf_counter()
        batch = runner.prepare(step)
        prepared = perf_counter()
        pending = device.launch(batch, step)
        launched = perf_counter()
        scheduler.postprocess(step, pending.wait())
        if step.kind == "decode":
            times.append((scheduled - begin, prepared - scheduled, perf_counter() - launched))
    return [1e6 * median(column) for column in (*zip(*times), map(sum, times))]


def host_calls(llm: LLM, requests: list[Request], rounds: int = 3) -> dict[str, float]:
    """Return the CPU time per step of `generate` and of `stream`, in microseconds (minimum of `rounds` runs)."""
    prompts, params = inputs(requests)
    with_stop = [replace(p, stop=["a string that never comes"]) for p in params]
    calls = {
        "generate": lambda: llm.generate(prompts, params, use_tqdm=False),
        "stream": lambda: [event.text for event in llm.stream(prompts, params)],
        "stream with a stop string": lambda: [event.text for event in llm.stream(prompts, with_stop)],
    }
    runner, num_steps = llm.model_runner, requests[0].max_tokens - 1
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for name in [*calls] * rounds:
        device = FakeDevice(len(requests), llm.config.model_config.vocab_size)
        runner.launch = device.launch
        calls[name]()
        seconds[name].append(process_time() - device.decoding_since)
    del runner.launch
    return {name: 1e6 * min(times) / num_steps for name, times in seconds.items()}


class FakeDevice:
    """A fake device that finishes each step immediately, with random token ids.

    `FakeDevice.launch` replaces `BatchRunner.launch`.

    decoding_since: the CPU time of this process at the launch of the first decode step, in seconds.
    """

    def __init__(self, num_seqs: int, vocab_size: int):
        self.token_ids = torch.randint(vocab_size, (num_seqs,), dtype=torch.int32)
        self.decoding_since = nan

    def launch(self, batch, step):
        if step.kind == "decode" and isnan(self.decoding_since):
            self.decoding_since = process_time()
        return PendingStep(step, self.token_ids, {}, lambda: None)
