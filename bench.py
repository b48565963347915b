"""Throughput and latency of nano-vllm, and of other engines on the same requests in the same call.

    python bench.py --model MODEL                     the first three workloads below
    python bench.py --model MODEL --compare vllm      the same with vLLM beside it (or transformers, or both)
    python bench.py --shape llama-3.1-8b              the same with random weights of a published shape: no download
    python bench.py --model MODEL --workload online --request-rate 8,16,24      latency while requests keep arriving
    python bench.py --model MODEL --workload latency --max-model-len 32768      one prompt; decode behind a context
    python bench.py --model MODEL --workload batches --batch-sizes 2,8,32       throughput by batch size
    python bench.py --model MODEL --workload all,batches --compare vllm         both in one run
    python bench.py --workload host                   what a step costs the host, on any machine
    python bench.py --model MODEL --profile FOLDER    traces of decode steps, and the time of each kernel in them
    python bench.py --streaming                       the headline workload by generate() and by stream()
    python bench.py --beams 4                         beam search, compared with that of transformers
    python bench.py --figure FILE.svg                 a bar chart of the numbers that --save FILE.json has collected

Workloads, all with random token ids, temperature 0.6 and no end-of-sequence token:

    headline    --num-seqs requests; their input and output lengths are uniform between a tenth of the maximum and the
                maximum
    single      one request; its input is an eighth of --max-input-len, its output half of --max-output-len
    prefill     an eighth of --num-seqs requests of --prefill-len tokens, with one output token each
    online      for each request rate, 20 seconds of requests, or --num-seqs; the gaps between arrivals are exponential,
                the lengths log-normal (sigma 0.9 for inputs, 0.7 for outputs) and cut to max_model_len
    latency     one prompt of 16 to 32,000 tokens and one output token, --num-seqs times; then 1 and 8 sequences that
                decode behind contexts of 500 to 30,000 tokens, three times. --max-model-len and --max-input-len bound
                the lengths
    batches     for each batch size, requests with 512 input and 256 output tokens
    host        no model runs: the device is replaced by one that samples at once. For 1 to 1,024 sequences that decode,
                the microseconds of a step's schedule, prepare and process; then those of a step of 512 sequences in the
                whole process, until the caller of `generate` or `stream` has the text. The time of a loop of Python
                says how fast the machine is

Before what is reported, each workload runs once with other ids (online with a quarter of its requests). Of headline,
single, prefill and batches, --rounds runs follow, each with ids of its own, and the fastest is reported: vLLM's FP8
compiles kernels whenever a step has a new number of tokens, also after the first run. When engines are compared, each
of them runs in its own process, and vLLM with its own defaults: of our settings it gets the model, its dtypes,
max_model_len and the number of GPUs, and another bound only if the command line states it. The output names the
versions, and the VLLM_* variables of the environment. --plot FILE.svg draws the last three workloads.

Online is an open loop: a request is submitted when it is due, however busy the engine is, and its times count from when
it was due. TTFT is the time to its first token. The time per output token is the time from its first token to its last,
divided by the number of tokens after the first. ITL are all gaps between two tokens of a request, and the longest of
them is reported as well. Decode speed counts the tokens that arrive while all sequences of a batch decode. Percentiles
are interpolated between the two nearest values, so that p50 is the median. For online and latency, one loop steps both
engines, and vLLM has the defaults of its server; the other workloads are calls of `LLM.generate`.

On CUDA the table has a column "of limit": the time that the hardware needs at least, divided by the measured time. The
least time is the bytes of weights, keys and values that decode steps read, divided by the memory bandwidth, plus the
operations of the prefill, divided by the matrix product rate. Both rates are measured on this device; several ranks
count as several times the rates of one.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import inf, isnan, log, nan
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep

STARTED = perf_counter()
TEMPERATURE = 0.6
WORKLOADS = {"headline": "headline", "single": "single stream", "prefill": "prefill"}
SIGMAS = (0.9, 0.7)  # of the log-normal lengths of prompts and outputs
PROMPT_LENS = (16, 128, 512, 1024, 4000, 8000, 16000, 32000)
CONTEXT_LENS = (500, 4000, 30000)
HOST_SEQS = (1, 8, 64, 256, 512, 1024)
DECODE_SEQS = {1: "1 sequence", 8: "8 sequences"}
# names in results files -> names in the figure; `--compare` can't run "original"
LABELS = {
    "nanovllm": "this package",
    "vllm": "vLLM",
    "original": "the original nano-vllm",
    "transformers": "transformers",
}
# entries of config.json, as published; `--shape NAME` makes such a model
SHAPE_ENTRIES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "eos_token_id",
    "tie_word_embeddings",
)
SHAPES = {
    "qwen3-0.6b": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 40960, 1e-6, 1e6, 151645, True),
    "qwen3-8b": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 40960, 1e-6, 1e6, 151645, False),
    "llama-3.1-8b": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, 131072, 1e-5, 5e5, 128001, False),
    "llama-3.2-1b": ("llama", 2048, 8192, 16, 32, 8, 64, 128256, 131072, 1e-5, 5e5, 128001, True),
    "qwen3-30b-a3b": ("qwen3_moe", 2048, 6144, 48, 32, 4, 128, 151936, 40960, 1e-6, 1e6, 151645, False),
    "qwen3-235b-a22b": ("qwen3_moe", 4096, 12288, 94, 64, 4, 128, 151936, 40960, 1e-6, 1e6, 151645, False),
    "qwen2.5-7b": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, 131072, 1e-6, 1e6, 151643, False),
    "mistral-7b": ("mistral", 4096, 14336, 32, 32, 8, 128, 32768, 32768, 1e-5, 1e6, 2, False),  # v0.3
}
LLAMA_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}
# entries that only some shapes have
EXTRA_ENTRIES: dict[str, dict] = {
    "llama-3.1-8b": {"rope_scaling": LLAMA_ROPE | {"factor": 8.0}},
    "llama-3.2-1b": {"rope_scaling": LLAMA_ROPE | {"factor": 32.0}},
    "mistral-7b": {"sliding_window": None},
    "qwen3-30b-a3b": EXPERTS | {"moe_intermediate_size": 768, "mlp_only_layers": []},
    "qwen3-235b-a22b": EXPERTS | {"moe_intermediate_size": 1536, "mlp_only_layers": []},
}
# shapes that are also published with FP8 weights, of which blocks share a scale
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
for _name in [name for name in SHAPES if name.startswith("qwen3-")]:
    SHAPES[f"{_name}-fp8"] = SHAPES[_name]
    EXTRA_ENTRIES[f"{_name}-fp8"] = EXTRA_ENTRIES.get(_name, {}) | {"quantization_config": FP8_CONFIG}
# statistics that have no style here are in tables only
LINE_STYLES = {"": "-", "p50": "-", "p99": "--", "median": "-", "1 sequence": "-", "8 sequences": "--"}
LINE_COLORS = {"nanovllm": "#1a7f5a", "vllm": "#7b8a97", "transformers": "#c08a3e"}


@dataclass
class Request:
    """`arrival`: when the request is due, in seconds from the start of the run."""

    prompt: list[int]
    max_tokens: int
    top_k: int = 0
    top_p: float = 1.0
    arrival: float = 0.0


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

    def row(self, name: str, baseline: "Result", limit: float | None) -> list[str]:
        ttft = latencies(self.token_times)["TTFT"]
        times = [number(1000 * percentile(ttft, p), 1) for p in (50, 99)]
        of_limit = f"{limit / self.seconds:.2f}" if limit else "-"
        ratio = f"{self.rate / baseline.rate:.2f}"
        return [name, f"{self.seconds:.2f}", f"{self.rate:,.0f}", *times, ratio, of_limit, self.note]


Workloads = dict[str, list[list[Request]]]  # for each a list of runs; the first is a warm-up, the others are measured
Results = dict[str, dict[str, Result]]  # by engine and workload
HEADER = ["engine", "s", "tok/s", "TTFT ms", "p99", "ratio", "of limit", ""]


def percentile(values: list[float], p: float) -> float:
    """Interpolated linearly between the two nearest values; NaN if there are none."""
    if not values:
        return nan
    ordered = sorted(values)
    low, fraction = divmod(p / 100 * (len(ordered) - 1), 1)
    below, above = ordered[int(low)], ordered[min(int(low) + 1, len(ordered) - 1)]
    return below + fraction * (above - below)


def latencies(token_times: list[list[float]]) -> dict[str, list[float]]:
    """What the docstring of this file defines, in seconds. A request with one token has only a TTFT."""
    gaps = [[b - a for a, b in pairwise(times)] for times in token_times if len(times) > 1]
    return {
        "TTFT": [times[0] for times in token_times if times],
        "time per output token": [sum(of_request) / len(of_request) for of_request in gaps],
        "ITL": [gap for of_request in gaps for gap in of_request],
        "longest gap": [max(of_request) for of_request in gaps],
    }


def decode_rate(token_times: list[list[float]], num_seqs: int) -> float:
    """Tokens per second while all of `num_seqs` sequences decode: the median of the runs, which follow each other."""
    rates = []
    for i in range(0, len(token_times), num_seqs):
        run = token_times[i : i + num_seqs]
        begin, end = max(times[0] for times in run), min(times[-1] for times in run)
        num_tokens = sum(begin < time <= end for times in run for time in times)
        rates.append(num_tokens / (end - begin) if end > begin else nan)
    return median(rates)


def headline(num_seqs: int, max_input_len: int, max_output_len: int, seed: int, vocab_size: int) -> list[Request]:
    """Prompts first, then output lengths, from one generator: seed 0 at the defaults gives 133,966 output tokens."""
    rng = random.Random(seed)
    max_id = min(10_000, vocab_size - 1)
    min_input_len, min_output_len = (max(1, length * 100 // 1024) for length in (max_input_len, max_output_len))
    prompts = [
        [rng.randint(0, max_id) for _ in range(rng.randint(min_input_len, max_input_len))] for _ in range(num_seqs)
    ]
    return [Request(prompt, rng.randint(min_output_len, max_output_len)) for prompt in prompts]


def same_lengths(num_seqs: int, input_len: int, output_len: int, seed: int | str, vocab_size: int) -> list[Request]:
    """Each workload needs a seed of its own, because the prefix cache holds the prompts of earlier workloads."""
    rng = random.Random(seed)
    return [Request([rng.randrange(vocab_size) for _ in range(input_len)], output_len) for _ in range(num_seqs)]


def online(
    rate: float, num_seqs: int, medians: tuple[int, int], max_model_len: int, seed: int, vocab_size: int
) -> list[Request]:
    """Poisson arrivals, `rate` per second; `medians` of the lengths of prompts and outputs."""
    rng = random.Random(f"online {rate} {seed}")
    requests, arrival = [], 0.0
    for _ in range(num_seqs):
        arrival += rng.expovariate(rate)
        input_len, output_len = (
            max(1, round(rng.lognormvariate(log(middle), sigma))) for middle, sigma in zip(medians, SIGMAS)
        )
        output_len = min(output_len, max_model_len - 1)
        prompt = [rng.randrange(vocab_size) for _ in range(min(input_len, max_model_len - output_len))]
        requests.append(Request(prompt, output_len, arrival=arrival))
    return requests


def fit(input_len: int, output_len: int, max_model_len: int) -> list[int]:
    """Both lengths, scaled down if their sum is more than `max_model_len`."""
    scale = max(input_len + output_len, max_model_len)
    return [max(1, length * max_model_len // scale) for length in (input_len, output_len)]


def in_rounds(requests: list[Request], rounds: int, vocab_size: int) -> list[list[Request]]:
    """A warm-up, and so many rounds; the last one has the ids of `requests`."""
    return [other_ids(requests, vocab_size, by) for by in range(rounds, -1, -1)]


def other_ids(requests: list[Request], vocab_size: int, by: int = 1) -> list[Request]:
    """The same lengths with other ids, so that the second run finds nothing in the prefix cache."""
    return [replace(request, prompt=[(i + by) % vocab_size for i in request.prompt]) for request in requests]


# -- engines: functions of (model, settings, workloads) ----------------------------------------------------------------


def report(line: str) -> None:
    """Print a line of progress to stderr; results go to stdout."""
    print(line, file=sys.stderr, flush=True)


def measure(engine: str, run: Callable[[list], Result], workloads: Workloads) -> dict[str, Result]:
    """Call `run` on each workload and report when it starts and ends."""
    results = {}
    for name, runs in workloads.items():
        report(f"{engine}: {name} starts")
        begin = perf_counter()
        results[name] = run(runs)
        report(f"{engine}: {name} ends after {perf_counter() - begin:.1f} s")
    return results


def fastest_run(run: Callable[[list[Request]], Result]) -> Callable[[list[list[Request]]], Result]:
    """A function that does all runs of a workload, and returns the best result of all but the first."""

    def run_all(runs: list[list[Request]]) -> Result:
        return min([run(requests) for requests in runs][1:], key=lambda result: result.seconds)

    return run_all


def joined_runs(run: Callable[[list[Request]], Result]) -> Callable[[list[list[Request]]], Result]:
    """A function that does all runs of a workload, and joins the results of all but the first."""

    def run_all(runs: list[list[Request]]) -> Result:
        results = [run(requests) for requests in runs][1:]
        times = [times for result in results for times in result.token_times]
        return Result(sum(result.seconds for result in results), num_runs=len(results), token_times=times)

    return run_all


def serve(engine, requests: list[Request]) -> Result:
    """Submit each request when it is due, and step the engine until all have ended.

    `engine.params(request)` are its sampling parameters, `add(prompt, params)` returns an id, and `step()` returns
    the id of the request of every new token. A request that falls due during a step is submitted after the step.
    """
    params = [engine.params(request) for request in requests]
    times: dict[int, list[float]] = {}
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
    seconds = perf_counter() - begin
    token_times = [[time - request.arrival for time in times[i]] for i, request in zip(times, requests)]
    return Result(seconds, token_times=token_times)


def sampling_settings(request: Request) -> dict:
    """Those of this package and of vLLM."""
    bounds = dict(top_k=request.top_k, top_p=request.top_p, max_tokens=request.max_tokens)
    return dict(temperature=TEMPERATURE, ignore_eos=True, **bounds)


def nanovllm_params(request: Request):
    from nanovllm import SamplingParams

    return SamplingParams(**sampling_settings(request))


class NanoVllmSteps:
    """An `LLM` of this package for `serve`."""

    params = staticmethod(nanovllm_params)

    def __init__(self, llm):
        self.llm, self.add, self.is_finished = llm, llm.add_request, llm.is_finished

    def step(self) -> list[int]:
        return [request_id for request_id, _ in self.llm.step().new_tokens]


@contextmanager
def started_nanovllm(model: str, settings: dict):
    """An `LLM` of this package; prints how long its start took if this is the command's own process."""
    from nanovllm import LLM, SamplingParams

    with LLM(model, **settings) as llm:
        loaded = perf_counter()
        llm.generate([1], SamplingParams(max_tokens=1), use_tqdm=False)
        if multiprocessing.parent_process() is None:
            now, inside = perf_counter(), llm.startup_seconds
            imports = loaded - STARTED - sum(inside.values())
            parts = {"imports": imports, **inside, "first token": now - loaded}
            print(f"from start to the first token: {now - STARTED:.1f} s", end=" (")
            print(", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items()), end=")\n")
        yield llm


def run_nanovllm(model: str, settings: dict, workloads: Workloads) -> dict[str, Result]:
    """`LLM.generate` of this package; its outputs tell when their first tokens arrived."""

    def run(requests: list[Request]) -> Result:
        params = list(map(nanovllm_params, requests))
        begin = perf_counter()
        outputs = llm.generate([r.prompt for r in requests], params, use_tqdm=False)
        seconds, metrics = perf_counter() - begin, [output.metrics for output in outputs]
        return Result(seconds, token_times=[[m.first_token_time - m.arrival_time] for m in metrics])

    with started_nanovllm(model, settings) as llm:
        return measure("nanovllm", fastest_run(run), workloads)


def step_nanovllm(model: str, settings: dict, workloads: Workloads) -> dict[str, Result]:
    """`LLM.step` of this package."""
    with started_nanovllm(model, settings) as llm:
        return measure("nanovllm", joined_runs(partial(serve, NanoVllmSteps(llm))), workloads)


def time_alternately(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round, after a round of warm-up; every other round is in reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name in list(calls)[:: 1 if i % 2 else -1]:
            begin = perf_counter()
            calls[name]()
            seconds[name].append(perf_counter() - begin)
    return {name: times[1:] for name, times in seconds.items()}


def compare_streaming(model: str, settings: dict, requests: list[Request], rounds: int = 7) -> None:
    """Time the same requests by `generate` and by `stream`, alternating, `rounds` times each."""
    from nanovllm import LLM

    prompts, params = [r.prompt for r in requests], list(map(nanovllm_params, requests))
    num_tokens = sum(r.max_tokens for r in requests)
    with LLM(model, **settings, enable_prefix_caching=False) as llm:
        calls = {
            "generate": lambda: llm.generate(prompts, params, use_tqdm=False),
            "stream": lambda: [event["text"] for event in llm.stream(prompts, params)],
        }
        seconds = time_alternately(calls, rounds)
    for name, times in seconds.items():
        rates = [num_tokens / s for s in times]
        print(f"{name:8} {len(requests)} requests, {num_tokens:,} tokens out", end=", tok/s: ")
        print(f"median {median(rates):,.0f}, best {max(rates):,.0f}")
    ratios = [b / a - 1 for a, b in zip(seconds["generate"], seconds["stream"])]
    best = min(seconds["stream"]) / min(seconds["generate"]) - 1
    print(f"stream takes longer by {median(ratios):+.1%} (median of {rounds} pairs), {best:+.1%} (best of each)")


def compare_beam_search(model: str, settings: dict, width: int, max_tokens: int, rounds: int = 5) -> None:
    """Time both beam searches on a prompt of 20 tokens, alternating, `rounds` times each."""
    import torch
    from transformers import AutoModelForCausalLM

    from nanovllm import LLM, BeamSearchParams

    prompt = list(range(300, 320))
    with LLM(model, **settings) as llm:
        config = llm.config
        other = AutoModelForCausalLM.from_pretrained(config.model, torch_dtype=config.dtype).to(config.device).eval()
        ids = torch.tensor([prompt], device=config.device)
        plain = dict(do_sample=False, temperature=None, top_p=None, top_k=None, eos_token_id=None, pad_token_id=0)
        calls = {
            "nanovllm": lambda: llm.beam_search(prompt, BeamSearchParams(width, max_tokens, ignore_eos=True)),
            "transformers": lambda: other.generate(
                ids, attention_mask=torch.ones_like(ids), num_beams=width, max_new_tokens=max_tokens, **plain
            ),
        }
        seconds = time_alternately(calls, rounds)
    print(f"{width} beams, {len(prompt)} tokens in, {max_tokens} out, in seconds:")
    for name, times in seconds.items():
        print(f"{name:13} median {median(times):.2f}, best {min(times):.2f}")


def profile_nanovllm(model: str, settings: dict, batch_sizes: list[int], length: int, folder: Path) -> None:
    """Write a trace of ten decode steps for each batch size, and print how much of a step each kernel takes.

    Kernels overlap, so the time of a kernel is counted from the end of the previous kernel to its own end.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    from nanovllm import LLM

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
                llm.model_runner.synchronize()
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


def write_shape(name: str, folder: Path) -> None:
    """Make a folder with the config.json of a shape, and a tokenizer whose tokens are the 256 bytes; no weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from nanovllm.models import MODELS

    entries = dict(zip(SHAPE_ENTRIES, SHAPES[name], strict=True)) | EXTRA_ENTRIES.get(name, {})
    architecture = MODELS[entries["model_type"]].split(":")[1]
    folder.mkdir()
    config = {"architectures": [architecture], "torch_dtype": "bfloat16", **entries}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(characters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def run_transformers(model: str, settings: dict, workloads: Workloads) -> dict[str, Result]:
    """Padded batches, one after the other; the fastest of a few batch sizes is reported, and on a CPU of two dtypes."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria

    from nanovllm.config import Config

    config = Config.create(model, settings)
    any_dtype = config.device == "cpu" and settings.get("dtype", "auto") == "auto"
    dtypes = [torch.float32, torch.bfloat16] if any_dtype else [config.dtype]
    llm = AutoModelForCausalLM.from_pretrained(config.model).to(config.device).eval()
    llm.generation_config.eos_token_id = None

    class Clock(StoppingCriteria):
        """Records when each token arrives, and never stops the generation."""

        def __init__(self, begin: float):
            self.begin, self.times = begin, []

        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.is_cuda:
                torch.cuda.synchronize()
            self.times.append(perf_counter() - self.begin)
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def run(requests: list[Request], batch_size: int) -> Result:
        result = Result(note=f"batches of {batch_size}, {str(llm.dtype).removeprefix('torch.')}")
        begin = perf_counter()
        for i in range(0, len(requests), batch_size):
            batch = requests[i : i + batch_size]
            longest = max(len(r.prompt) for r in batch)
            ids = torch.tensor([[0] * (longest - len(r.prompt)) + r.prompt for r in batch], device=llm.device)
            mask = torch.tensor([[0] * (longest - len(r.prompt)) + [1] * len(r.prompt) for r in batch])
            clock = Clock(begin)
            llm.generate(
                ids,
                attention_mask=mask.to(llm.device),
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=batch[0].top_k,
                top_p=batch[0].top_p,
                pad_token_id=0,
                max_new_tokens=max(r.max_tokens for r in batch),
                stopping_criteria=[clock],
            )
            result.token_times += [clock.times[: r.max_tokens] for r in batch]
        result.seconds = perf_counter() - begin
        return result

    def best(runs: list[list[Request]]) -> Result:
        sizes = sorted({min(size, len(runs[0])) for size in (16, 64, 256)})
        results = []
        for dtype in dtypes:
            llm.to(dtype)
            results += [fastest_run(partial(run, batch_size=size))(runs) for size in sizes]
        return min(results, key=lambda result: result.seconds)

    return measure("transformers", best, workloads)


def vllm_settings(model: str, settings: dict) -> dict:
    """Our model, dtypes and max_model_len, and weights that are random if ours are; all else is vLLM's default.

    `settings` may state two further bounds: what is not in it is not passed on.
    """
    from nanovllm.config import Config

    config = Config.create(model, settings)
    names = ["model", "max_model_len", "tensor_parallel_size", "load_format", "quantization", "kv_cache_dtype"]
    names += [name for name in ("max_num_seqs", "max_num_batched_tokens") if name in settings]
    return {"dtype": str(config.dtype).removeprefix("torch."), **{name: getattr(config, name) for name in names}}


def run_vllm(model: str, settings: dict, workloads: Workloads) -> dict[str, Result]:
    """vLLM's offline `LLM`; it reports no times of single tokens."""
    from vllm import LLM, SamplingParams

    llm = LLM(**vllm_settings(model, settings))

    def run(requests: list[Request]) -> Result:
        params = [SamplingParams(**sampling_settings(r), detokenize=False) for r in requests]
        begin = perf_counter()
        llm.generate([{"prompt_token_ids": r.prompt} for r in requests], params, use_tqdm=False)
        return Result(perf_counter() - begin)

    return measure("vllm", fastest_run(run), workloads)


class VllmSteps:
    """An `LLMEngine` of vLLM for `serve`."""

    def __init__(self, engine):
        self.engine, self.num_requests = engine, 0

    def params(self, request: Request):
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        # DELTA: an output has new tokens only
        return SamplingParams(**sampling_settings(request), detokenize=False, output_kind=RequestOutputKind.DELTA)

    def add(self, prompt: list[int], params) -> int:
        request_id, self.num_requests = self.num_requests, self.num_requests + 1
        self.engine.add_request(str(request_id), {"prompt_token_ids": prompt}, params)
        return request_id

    def step(self) -> list[int]:
        outputs = self.engine.step()
        # the id may have a suffix of vLLM's own, after a dash
        return [int(output.request_id.split("-")[0]) for output in outputs for _ in output.outputs[0].token_ids]

    def is_finished(self) -> bool:
        return not self.engine.has_unfinished_requests()


def step_vllm(model: str, settings: dict, workloads: Workloads) -> dict[str, Result]:
    """vLLM's `LLMEngine` with the defaults of its server; its model runs in a process of its own."""
    from vllm import EngineArgs, LLMEngine
    from vllm.usage.usage_lib import UsageContext

    arguments = EngineArgs(**vllm_settings(model, settings), disable_log_stats=True)
    # without a context, an engine has other bounds: on an H200 2,048 tokens a step instead of the server's 8,192
    engine = VllmSteps(LLMEngine.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER))
    return measure("vllm", joined_runs(partial(serve, engine)), workloads)


ENGINES = {"nanovllm": run_nanovllm, "transformers": run_transformers, "vllm": run_vllm}
STEPPED_ENGINES = {"nanovllm": step_nanovllm, "vllm": step_vllm}  # for workloads that need the times of tokens


def versions(engines: Iterable[str]) -> str:
    """Those of the engines and of what they run on, and the environment variables that change what vLLM does."""
    found = []
    for package in (*engines, "torch", "triton"):
        with suppress(importlib.metadata.PackageNotFoundError):
            name = {"nanovllm": "nano-vllm"}.get(package, package)
            found.append(f"{package} {importlib.metadata.version(name)}")
    found += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("VLLM_")]
    return ", ".join(found)


# -- the limit of the hardware ----------------------------------------------------------------------------------------


def measured_rates(device: str) -> tuple[float, float]:
    """Memory bandwidth in bytes read per second, and operations per second of a bf16 matrix product."""
    import torch

    def seconds(function) -> float:
        times = []
        for _ in range(8):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        return min(times)

    size = 8192
    torch.cuda.set_device(torch.device(device).index or 0)
    large = torch.ones(2**31 // 4, device="cuda")
    square = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    return large.nbytes / seconds(large.sum), 2 * size**3 / seconds(lambda: square @ square)


def limit_seconds(requests: list[Request], config, bytes_per_s: float, operations_per_s: float) -> float:
    """The least time for the requests: operations of the prefill, plus bytes that the decode steps must read.

    An engine that runs prefill and decode in the same step could overlap the two, and be faster than this. Of a mixture
    of experts, a step reads as many as its tokens choose on average if each expert is as likely.
    """
    shape = config.model_config
    heads, kv_heads, head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    all_layer_weights = shape.layer_operations // 2 * shape.num_hidden_layers  # each is multiplied and added
    head_weights = shape.hidden_size * shape.vocab_size
    head_bytes = head_dim + 2 if config.kv_cache_dtype == "fp8" else head_dim * config.dtype.itemsize  # 2 of a scale
    kv_bytes = 2 * shape.num_hidden_layers * kv_heads * head_bytes  # per token
    lengths = [(len(r.prompt), r.max_tokens) for r in requests]
    num_read = sum(sum(range(prompt + 1, prompt + tokens)) for prompt, tokens in lengths)
    num_decoded = sum(tokens - 1 for _, tokens in lengths)
    num_steps = max(max(tokens - 1 for _, tokens in lengths), -(-num_decoded // config.max_num_seqs))
    batch_size = num_decoded / max(1, num_steps)
    is_read = 1 - (1 - shape.num_experts_per_tok / max(1, shape.num_experts)) ** batch_size
    num_more_experts = shape.num_experts * is_read - shape.num_experts_per_tok  # than a single token chooses
    expert_weights = 3 * shape.hidden_size * shape.moe_intermediate_size * len(shape.moe_layers)
    num_weights = all_layer_weights + max(0, num_more_experts) * expert_weights
    weight_bytes = num_weights * (1 if shape.quantization else config.dtype.itemsize)
    num_bytes = num_read * kv_bytes + num_steps * (weight_bytes + head_weights * config.dtype.itemsize)
    attention = sum(2 * prompt**2 * heads * head_dim * shape.num_hidden_layers for prompt, _ in lengths)
    # FP8 units multiply twice as fast
    speed_up = 2 if shape.quantization and shape.quantization.dtype.is_floating_point else 1
    linear = sum(2 * prompt * all_layer_weights / speed_up + 2 * head_weights for prompt, _ in lengths)
    return num_bytes / bytes_per_s + (linear + attention) / operations_per_s


def run_in_process(function, *arguments):
    """Call the function in a new process, whose end frees all memory that the function used."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=show_engine_log) as pool:
        return pool.submit(function, *arguments).result()


# -- results files and the figure ------------------------------------------------------------------------------------


def save_results(file: Path, notes: str, setup: str, rates: dict[str, dict[str, float]]) -> None:
    """Merge tokens per second, by workload and engine, into the results file. `results_file` has its format."""
    saved = json.loads(file.read_text()) if file.exists() else {"notes": notes, "results": {}}
    workloads = saved["results"].setdefault(setup, {})
    for workload, by_engine in rates.items():
        workloads.setdefault(workload, {}).update({engine: round(rate) for engine, rate in by_engine.items()})
    file.write_text(json.dumps(saved, indent=2) + "\n")


def svg_pyplot():
    """matplotlib.pyplot for small svg files: text stays text, and nothing depends on when the file is drawn."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "nano-vllm", "font.size": 9})
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw_figure(file: Path) -> None:
    """Draw the results file beside `file` as bars: speed relative to vLLM where it is there, labelled with tokens/s."""
    plt = svg_pyplot()
    saved = json.loads(file.with_suffix(".json").read_text())
    groups = [
        (setup, workload, rates)
        for setup, by_workload in saved["results"].items()
        for workload, rates in by_workload.items()
    ]
    engines = [engine for engine in LABELS if any(engine in rates for _, _, rates in groups)]
    baseline = "vllm" if "vllm" in engines else engines[-1]
    height = 0.8 / len(engines)
    figure, axes = plt.subplots(figsize=(8, 1 + len(groups) * (0.1 + 0.15 * len(engines))), layout="constrained")
    for i, engine in enumerate(engines):
        measured = [(k, rates) for k, (_, _, rates) in enumerate(groups) if engine in rates]
        relative = [rates[engine] / rates.get(baseline, rates["nanovllm"]) for _, rates in measured]
        rows = [k + (i - (len(engines) - 1) / 2) * height for k, _ in measured]
        color = ("#1a7f5a", "#b8c4ce", "#dde3e8", "#eeeeee")[i]
        bars = axes.barh(rows, relative, 0.92 * height, label=LABELS[engine], color=color)
        axes.bar_label(bars, [f"{rates[engine]:,}" for _, rates in measured], padding=3)
    axes.set_yticks(range(len(groups)), [f"{setup}, {WORKLOADS[workload]}" for setup, workload, _ in groups])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"speed relative to {LABELS[baseline]}; labels are tokens per second\n{saved['notes']}")
    figure.legend(loc="outside upper center", ncols=len(engines), frameon=False)
    figure.savefig(file, metadata={"Date": None})


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """The first column is aligned to the left, and so is one without a header; all others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [header, *rows]:
        left = [i == 0 or not name for i, name in enumerate(header)]
        cells = [cell.ljust(width) if is_left else cell.rjust(width) for cell, width, is_left in zip(row, widths, left)]
        print("  ".join(cells).rstrip())


def number(value: float, digits: int) -> str:
    return "-" if isnan(value) else f"{value:,.{digits}f}"


# -- sweeps: workloads over a range of a variable, their tables and their picture --------------------------------------


@dataclass
class Panel:
    """A quantity over a variable x: one table, and one part of the picture.

    curves: for each statistic, the names of the workloads by x, and the function of their results that gives y.
    log: of the axes "x" and "y", those that are logarithmic. digits: of y after the decimal point, in the table.
    """

    title: str
    xlabel: str
    curves: dict[str, tuple[dict[float, str], Callable[[Result], float]]]
    log: str = ""
    digits: int = 2
    is_drawn: bool = True

    def points(self, results: Results) -> dict[tuple[str, str], dict[float, float]]:
        """y by x, for each engine and statistic."""
        return {
            (engine, statistic): {x: value(by_workload[name]) for x, name in names.items()}
            for engine, by_workload in results.items()
            for statistic, (names, value) in self.curves.items()
        }

    def print(self, results: Results) -> None:
        points = self.points(results)
        xs = next(iter(self.curves.values()))[0]
        rows = [[f"{x:,g}", *(number(curve[x], self.digits) for curve in points.values())] for x in xs]
        print_table(self.title, [self.xlabel, *(" ".join(names).strip() for names in points)], rows)


def draw_panels(file: Path, title: str, panels: list[Panel], results: Results) -> None:
    """A color for each engine, and a line style for each statistic that LINE_STYLES has."""
    plt = svg_pyplot()
    from matplotlib.ticker import LogLocator

    drawn = [panel for panel in panels if panel.is_drawn]
    size = (max(4.5, 3.2 * len(drawn)), 3)
    figure, (all_axes,) = plt.subplots(1, len(drawn), figsize=size, layout="constrained", squeeze=False)
    labels: list[str] = []
    for panel, axes in zip(drawn, all_axes):
        for (engine, statistic), points in panel.points(results).items():
            if statistic in LINE_STYLES:
                style = dict(linestyle=LINE_STYLES[statistic], color=LINE_COLORS[engine], marker="o", markersize=3)
                label = ", ".join(filter(None, [LABELS[engine], statistic]))
                axes.plot(list(points), list(points.values()), label=label, **style)
                axes.set_xscale("log" if "x" in panel.log else "linear")
                axes.set_xticks(list(points), [f"{x:,g}" for x in points], rotation=45 if panel.log else 0)
        if "y" in panel.log:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        else:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.minorticks_off()
        axes.set_title(panel.title, fontsize=9)
        axes.set_xlabel(panel.xlabel)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if labels != (labels := axes.get_legend_handles_labels()[1]):  # once for neighbors that have the same
            axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def latency_percentile(kind: str, p: float) -> Callable[[Result], float]:
    """In milliseconds; the kinds are those of `latencies`."""
    return lambda result: 1000 * percentile(latencies(result.token_times)[kind], p)


def online_sweep(args: argparse.Namespace, config) -> tuple[Workloads, list[Panel]]:
    """The warm-up is the first quarter of the requests with other ids, and with the same times of arrival."""
    vocab_size, medians = config.model_config.vocab_size, (args.median_input_len, args.median_output_len)
    names = {rate: f"online {rate:g}/s" for rate in args.request_rate}
    workloads = {}
    for rate, name in names.items():
        num_seqs = args.num_seqs or max(1, round(20 * rate))
        requests = online(rate, num_seqs, medians, config.max_model_len, args.seed, vocab_size)
        workloads[name] = [other_ids(requests[: -(-num_seqs // 4)], vocab_size), requests]
    x = "requests per second"
    panels = [
        Panel(f"{kind}, ms", x, {f"p{p}": (names, latency_percentile(kind, p)) for p in (50, 90, 99)})
        for kind in ("TTFT", "time per output token", "longest gap", "ITL")
    ]
    panels.append(Panel("output tokens per second", x, {"": (names, lambda result: result.rate)}, digits=0))
    for panel in panels[3:]:
        panel.is_drawn = False
    return workloads, panels


def latency_sweep(args: argparse.Namespace, config) -> tuple[Workloads, list[Panel]]:
    """Lengths that do not fit are left out.

    The runs of a context have the same ids. Those after the first find them in the prefix cache, so that all sequences
    begin to decode together.
    """
    vocab_size, max_input_len = config.model_config.vocab_size, args.max_input_len or config.max_model_len
    num_runs = args.num_seqs or (5 if config.device == "cpu" else 20)
    output_len = min(args.max_output_len or 96, config.max_model_len - 1)

    def fitting(lengths: tuple[int, ...], num_output: int) -> list[int]:
        bound = min(max_input_len, config.max_model_len - num_output)
        return [length for length in lengths if length <= bound] or [bound]

    workloads = {}
    prompts = {length: f"prompt of {length:,}" for length in fitting(PROMPT_LENS, 1)}
    for length, name in prompts.items():
        requests = same_lengths(1 + num_runs, length, 1, f"{name} {args.seed}", vocab_size)
        workloads[name] = [[request] for request in requests]
    decode = {}
    for num_seqs, statistic in DECODE_SEQS.items():
        names = {length: f"{statistic} behind {length:,}" for length in fitting(CONTEXT_LENS, output_len)}
        for length, name in names.items():
            workloads[name] = 4 * [same_lengths(num_seqs, length, output_len, f"{name} {args.seed}", vocab_size)]
        decode[statistic] = (names, lambda result, num_seqs=num_seqs: decode_rate(result.token_times, num_seqs))
    first = {name: (prompts, latency_percentile("TTFT", p)) for name, p in (("median", 50), ("min", 0), ("p99", 99))}
    return workloads, [
        Panel("time to the token of one prompt, ms", "prompt tokens", first, log="xy"),
        Panel("decode, tokens per second", "context tokens", decode, log="xy", digits=0),
    ]


def batches_sweep(args: argparse.Namespace, config) -> tuple[Workloads, list[Panel]]:
    vocab_size = config.model_config.vocab_size
    lengths = fit(args.max_input_len or 512, args.max_output_len or 256, config.max_model_len)
    names = {size: f"batch of {size}" for size in args.batch_sizes}
    workloads = {}
    for size, name in names.items():
        requests = same_lengths(size, *lengths, f"{name} {args.seed}", vocab_size)
        workloads[name] = in_rounds(requests, args.rounds, vocab_size)
    title = f"output tokens per second ({lengths[0]} in, {lengths[1]} out)"
    return workloads, [Panel(title, "requests", {"": (names, lambda result: result.rate)}, log="xy", digits=0)]


SWEEPS = {"online": online_sweep, "latency": latency_sweep, "batches": batches_sweep}
STEPPED = ("online", "latency")  # need the times of tokens, and engines that are stepped


# -- the host's part of a step ----------------------------------------------------------------------------------------


class FakeDevice:
    """Its `launch` takes the place of a ModelRunner's: every step is over at once, and samples random token ids.

    decoding_since: the CPU time of the process when the first step that only decodes was launched.
    """

    def __init__(self, runner, num_seqs: int, vocab_size: int):
        import torch

        self.tp, self.token_ids = runner.tp, torch.randint(vocab_size, (num_seqs,), dtype=torch.int32)
        self.decoding_since = nan

    def launch(self, batch, step):
        from nanovllm.engine.step_result import PendingStep

        if step.kind == "decode" and isnan(self.decoding_since):
            self.decoding_since = process_time()
        return PendingStep(step, self.token_ids, {}, False, self.tp)


def measure_host(model: str, settings: dict) -> None:
    """Print what a step costs the host, for numbers of sequences up to `max_num_seqs`."""
    from nanovllm import LLM

    settings = {"max_num_seqs": max(HOST_SEQS)} | settings | {"device": "cpu", "async_scheduling": False}
    max_num_seqs = settings["max_num_seqs"]
    # one step computes all prompts, and each sequence has a block in reserve
    bounds = dict(max_num_batched_tokens=512 * max_num_seqs, num_kvcache_blocks=4 * max_num_seqs + 8)
    with LLM(model, **settings | bounds) as llm:
        vocab_size = llm.config.model_config.vocab_size
        lengths = fit(512, 100, llm.config.max_model_len)
        sizes = [n for n in HOST_SEQS if n <= max_num_seqs]
        requests = [host_requests(n, *lengths, vocab_size) for n in sizes]
        rows = [[f"{n:,}", *(f"{x:,.0f}" for x in host_step(llm, some))] for n, some in zip(sizes, requests)]
        num_seqs = min(512, max_num_seqs)
        calls = host_calls(llm, host_requests(num_seqs, *lengths, vocab_size))
    print(f"a loop of 1,000,000 additions in Python takes {1000 * python_loop():.1f} ms on this machine")
    title = "what a step costs the host, microseconds (median of the steps, fastest of three rounds)"
    print_table(title, ["sequences", "schedule", "prepare", "process", "sum"], rows)
    title = f"CPU time of a step of {num_seqs} sequences until the caller has the text, microseconds"
    print_table(title, ["call", "step"], [[name, f"{us:,.0f}"] for name, us in calls.items()])


def host_requests(num_seqs: int, max_input_len: int, output_len: int, vocab_size: int) -> list[Request]:
    """Prompts of random lengths, so that the sequences do not all need their next block in the same step."""
    rng = random.Random(num_seqs)
    lengths = [rng.randint(1, max_input_len) for _ in range(num_seqs)]
    return [Request([rng.randrange(vocab_size) for _ in range(length)], output_len) for length in lengths]


def host_step(llm, requests: list[Request], rounds: int = 3) -> list[float]:
    """Microseconds of schedule, prepare and process, and of all three, in a step in which all sequences decode.

    Medians of the steps of a round; the fastest of `rounds` counts.
    """
    return min((host_round(llm, requests) for _ in range(rounds)), key=lambda times: times[-1])


def host_round(llm, requests: list[Request]) -> list[float]:
    from nanovllm.engine.sequence import Sequence

    scheduler, outputs, runner, config = llm.scheduler, llm.core.output_processor, llm.model_runner, llm.config
    device = FakeDevice(runner, len(requests), config.model_config.vocab_size)
    for i, r in enumerate(requests):
        scheduler.add(Sequence(i, [*r.prompt], nanovllm_params(r), noise_seed=i, max_len=config.max_model_len))
    times = []
    while not scheduler.is_finished():
        begin = perf_counter()
        step = scheduler.schedule(prompts_first=True)
        scheduled = perf_counter()
        batch = runner.prepare(step)
        prepared = perf_counter()
        pending = device.launch(batch, step)
        launched = perf_counter()
        outputs.postprocess(step, pending.wait())
        if step.kind == "decode":
            times.append((scheduled - begin, prepared - scheduled, perf_counter() - launched))
    return [1e6 * median(column) for column in (*zip(*times), map(sum, times))]


def host_calls(llm, requests: list[Request], rounds: int = 3) -> dict[str, float]:
    """Microseconds of CPU time for a step of `generate` and `stream`; the least of `rounds`."""
    prompts, params = [r.prompt for r in requests], list(map(nanovllm_params, requests))
    with_stop = [replace(p, stop=["a string that never comes"]) for p in params]
    calls = {
        "generate": lambda: llm.generate(prompts, params, use_tqdm=False),
        "stream": lambda: [event.text for event in llm.stream(prompts, params)],
        "stream with a stop string": lambda: [event.text for event in llm.stream(prompts, with_stop)],
    }
    runner, num_steps = llm.model_runner, requests[0].max_tokens - 1
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for name in [*calls] * rounds:
        device = FakeDevice(runner, len(requests), llm.config.model_config.vocab_size)
        runner.launch = device.launch
        calls[name]()
        seconds[name].append(process_time() - device.decoding_since)
    del runner.launch
    return {name: 1e6 * min(times) / num_steps for name, times in seconds.items()}


def python_loop() -> float:
    """Seconds of a loop that is the same on every machine, the least of five."""
    times = []
    for _ in range(5):
        begin, total = perf_counter(), 0
        for i in range(1_000_000):
            total += i
        times.append(perf_counter() - begin)
    return min(times)


# -- the command line --------------------------------------------------------------------------------------------------


def show_engine_log() -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanovllm").setLevel(logging.INFO)


def integer(low: int) -> Callable[[str], int]:
    """An argparse type: an integer that is at least `low`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: must be an integer") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{value}: must be at least {low}")
        return value

    return parse


def positive(text: str) -> float:
    """An argparse type: a positive number."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number") from None
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"{text}: must be greater than 0 and finite")
    return value


def each(parse: Callable[[str], float]) -> Callable[[str], list]:
    """An argparse type: one value or several with commas between them, in ascending order, each of them once."""

    def parse_all(text: str) -> list:
        if not (parts := list(filter(None, map(str.strip, text.split(","))))):
            raise argparse.ArgumentTypeError(f"{text!r}: must have at least one value")
        return sorted(set(map(parse, parts)))

    return parse_all


def workload_names(text: str) -> list[str]:
    """An argparse type: comma-separated names of workloads, where "all" stands for the first three."""
    names = dict.fromkeys(name for part in text.split(",") for name in (WORKLOADS if part == "all" else [part]))
    for name in names:
        if name not in (*WORKLOADS, *SWEEPS, "host"):
            choices = ", ".join(["all", *WORKLOADS, *SWEEPS, "host"])
            raise argparse.ArgumentTypeError(f"{name!r}: must be one of {choices}, or several with commas")
        if name in (*STEPPED, "host") and len(names) > 1:
            raise argparse.ArgumentTypeError(f"{name!r}: must be the only workload of a run")
    return list(names)


def other_engines(text: str) -> list[str]:
    """An argparse type: comma-separated names of engines to compare with."""
    others = [name for name in ENGINES if name != "nanovllm"]
    names = list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    for name in names:
        if name not in others:
            raise argparse.ArgumentTypeError(f"{name!r}: must be of {', '.join(others)}; nanovllm always runs")
    return names


def writable_folder(text: str) -> Path:
    """An argparse type: a folder that exists or can be created, and in which files can be written."""
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: is not a writable folder ({error.strerror})") from error
    return folder


def results_file(text: str) -> Path:
    """An argparse type: a JSON file, new or `{"notes": text, "results": {setup: {workload: {engine: rate}}}}`."""
    file = Path(text)
    writable_folder(str(file.parent))
    if file.exists():
        try:
            json.loads(file.read_text())["results"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise argparse.ArgumentTypeError(f"{text!r}: is not a results file of --save ({error!r})") from error
    return file


def svg_file(text: str) -> Path:
    """An argparse type: an svg file that can be written."""
    file = Path(text)
    if file.suffix != ".svg":
        raise argparse.ArgumentTypeError(f"{text!r}: must end in .svg")
    writable_folder(str(file.parent))
    return file


def figure_file(text: str) -> Path:
    """An argparse type: an svg file with a results file of the same name beside it."""
    file = svg_file(text)
    if not file.with_suffix(".json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: must have a .json of the same name beside it")
    results_file(str(file.with_suffix(".json")))
    return file


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = integer(1)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default="tiny-qwen3", help="a folder, a hub id, or the bundled tiny-qwen3")
    model.add_argument("--shape", choices=SHAPES, help="a model with random weights, which needs no download")
    parser.add_argument("--workload", type=workload_names, default="all", help="one, or several with commas between")
    parser.add_argument("--num-seqs", type=size, help="requests, see above (256; on a CPU 64; of latency 20 and 5)")
    parser.add_argument("--max-input-len", type=size, help="longest prompt (1024; on a CPU 256; of batches 512)")
    parser.add_argument(
        "--max-output-len", type=size, help="longest output (1024; on a CPU 256; of batches 256, of latency 96)"
    )
    parser.add_argument("--prefill-len", type=size, help="prompt length of the prefill workload (3900; on a CPU 1024)")
    parser.add_argument("--request-rate", type=each(positive), default="8,16,24", help="online: requests per second")
    parser.add_argument("--median-input-len", type=size, default=500, help="online: median prompt length")
    parser.add_argument("--median-output-len", type=size, default=160, help="online: median output length")
    parser.add_argument("--batch-sizes", type=each(size), default="2,8,32,128,512", help="batches: numbers of requests")
    parser.add_argument("--rounds", type=size, help="runs of which the fastest is reported (2; on a CPU 1)")
    parser.add_argument("--seed", type=integer(0), default=0, help="seed of the random requests")
    parser.add_argument(
        "--compare", type=other_engines, default=[], help="transformers, vllm, or both with a comma between them"
    )
    parser.add_argument("--save", type=results_file, metavar="FILE.json", help="add the tokens per second to this file")
    parser.add_argument("--plot", type=svg_file, metavar="FILE.svg", help=f"draw {', '.join(SWEEPS)}; needs matplotlib")

    other = parser.add_argument_group("instead of the workloads")
    other.add_argument("--profile", type=writable_folder, metavar="FOLDER", help="write traces of decode steps there")
    other.add_argument("--streaming", action="store_true", help="compare generate() with stream()")
    other.add_argument("--beams", type=size, metavar="WIDTH", help="compare beam search with that of transformers")
    other.add_argument("--figure", type=figure_file, metavar="FILE.svg", help="draw FILE.json (needs matplotlib)")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--top-k", type=int, default=0, help="0 keeps all tokens")
    sampling.add_argument("--top-p", type=float, default=1.0, help="1 keeps all tokens")

    engine = parser.add_argument_group("engine settings, as of LLM(...)")
    engine.add_argument("--dtype", default="auto")
    engine.add_argument("--quantization", help="fp8 or int8: quantize the weights while they are loaded")
    engine.add_argument("--device", default="auto")
    engine.add_argument("--attention-backend", default="auto")
    engine.add_argument("--kv-cache-dtype", default="auto")
    engine.add_argument("--tensor-parallel-size", type=int, default=1)
    engine.add_argument("--max-num-seqs", type=int)
    engine.add_argument("--max-num-batched-tokens", type=int)
    engine.add_argument("--max-model-len", type=int)
    engine.add_argument("--enforce-eager", action="store_true")
    engine.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction)
    return parser


def run_engines(
    engines: list[str], functions: dict[str, Callable], model: str, settings: dict, workloads: Workloads
) -> Results:
    """Several engines run in a process each; one that is not installed is left out."""
    results = {}
    for engine in engines:
        if importlib.util.find_spec(engine) is None:
            report(f"{engine}: not installed, left out")
            continue
        run = functions[engine] if len(engines) == 1 else partial(run_in_process, functions[engine])
        report(f"{engine}: starts")
        begin = perf_counter()
        results[engine] = run(model, settings, workloads)
        report(f"{engine}: ends after {perf_counter() - begin:.1f} s")
        for name, runs in workloads.items():
            result = results[engine][name]
            counted = [request for requests in runs[-result.num_runs :] for request in requests]
            result.num_tokens = sum(len(r.prompt) if name == "prefill" else r.max_tokens for r in counted)
    return results


def print_throughput(config, workloads: Workloads, results: Results) -> None:
    rates = None if config.device == "cpu" else run_in_process(measured_rates, config.device)
    if rates:
        print(f"this device reads {rates[0] / 1e12:.2f} TB/s and multiplies at {rates[1] / 1e12:.0f} TFLOP/s")
    for name, (*_, requests) in workloads.items():
        others = [result[name] for engine, result in results.items() if engine != "nanovllm"]
        baseline = max(others or [results["nanovllm"][name]], key=lambda result: result.rate)
        limit = limit_seconds(requests, config, *(config.tensor_parallel_size * x for x in rates)) if rates else None
        rows = [result[name].row(engine, baseline, limit) for engine, result in results.items()]
        print_table(describe(name, requests), HEADER, rows)
    print("\ntok/s: output tokens, in prefill input tokens; TTFT: median and 99th percentile", end="")
    print("; ratio: to the fastest other engine" if len(results) > 1 else "")


def describe(name: str, requests: list[Request]) -> str:
    num_input, num_output = sum(len(r.prompt) for r in requests), sum(r.max_tokens for r in requests)
    return f"{name}: {len(requests)} requests, {num_input:,} tokens in, {num_output:,} out"


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.shape:
            args.model = str(Path(folder) / args.shape)
            write_shape(args.shape, Path(args.model))
        run_command(parser, args)


def run_command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if (args.figure or args.plot) and importlib.util.find_spec("matplotlib") is None:
        parser.error("--figure and --plot need matplotlib, which `pip install '.[plot]'` installs")
    if args.figure:
        draw_figure(args.figure)
        return
    sweeps, chosen = ([name for name in args.workload if name in names] for names in (SWEEPS, WORKLOADS))
    functions = STEPPED_ENGINES if sweeps and sweeps[0] in STEPPED else ENGINES
    if missing := [engine for engine in args.compare if engine not in functions]:
        parser.error(f"--compare {missing[0]}: --workload {sweeps[0]} compares with vllm only")
    if args.compare and args.workload == ["host"]:
        parser.error("--compare: --workload host measures this package alone")
    if args.rounds and functions is STEPPED_ENGINES:
        parser.error(f"--rounds: --workload {sweeps[0]} has runs of its own")
    if args.plot and not sweeps:
        parser.error(f"--plot: --workload {','.join(args.workload)} must be one of {', '.join(SWEEPS)}")
    if args.save and not chosen:
        parser.error(f"--save: --workload {','.join(args.workload)} must be one of all, {', '.join(WORKLOADS)}")
    if args.shape and (args.beams or "transformers" in args.compare):
        option = "--beams" if args.beams else "--compare transformers"
        parser.error(f"{option}: transformers reads weights from files, and --shape has none; use --model instead")
    show_engine_log()
    from nanovllm import SamplingParams
    from nanovllm.config import Config

    names = ["dtype", "device", "attention_backend", "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens"]
    names += ["max_model_len", "quantization", "kv_cache_dtype", "enforce_eager", "async_scheduling"]
    settings = {name: value for name in names if (value := getattr(args, name)) is not None}
    settings |= {"load_format": "dummy"} if args.shape else {}
    try:  # before any engine is started
        SamplingParams(temperature=TEMPERATURE, top_k=args.top_k, top_p=args.top_p)
        config = Config.create(args.model, settings)
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))
    vocab_size = config.model_config.vocab_size
    small = config.device == "cpu"
    args.rounds = args.rounds or (1 if small else 2)
    num_seqs = args.num_seqs or (64 if small else 256)
    longest = 256 if small else 1024
    lengths = fit(args.max_input_len or longest, args.max_output_len or longest, config.max_model_len)
    if args.profile:
        batch_sizes = sorted({1, min(num_seqs, config.max_num_seqs)})
        profile_nanovllm(args.model, settings, batch_sizes, sum(lengths) // 4, args.profile)
        return
    if args.workload == ["host"]:
        measure_host(args.model, settings)
        return
    if args.beams:
        compare_beam_search(args.model, settings, args.beams, args.max_output_len or 400)
        return
    if args.streaming:
        compare_streaming(args.model, settings, headline(num_seqs, *lengths, args.seed, vocab_size))
        return

    workloads, panels = {}, []
    if chosen:
        prefill_len = min(args.prefill_len or (1024 if small else 3900), config.max_model_len - 1)
        single_lens = [max(1, lengths[0] // 8), max(1, lengths[1] // 2)]
        requests = {
            "headline": headline(num_seqs, *lengths, args.seed, vocab_size),
            "single": same_lengths(1, *single_lens, args.seed, vocab_size),
            "prefill": same_lengths(max(1, num_seqs // 8), prefill_len, 1, f"prefill {args.seed}", vocab_size),
        }
        workloads = {name: in_rounds(requests[name], args.rounds, vocab_size) for name in chosen}
    for name in sweeps:
        more_workloads, panels = SWEEPS[name](args, config)
        workloads |= more_workloads
    for request in (request for runs in workloads.values() for run in runs for request in run):
        request.top_k, request.top_p = args.top_k, args.top_p
    results = run_engines(["nanovllm", *args.compare], functions, args.model, settings, workloads)
    dtypes = str(config.dtype) + ("" if config.kv_cache_dtype == "auto" else f", cache {config.kv_cache_dtype}")
    print(f"{args.shape or args.model}, {dtypes}, {config.device}, attention {config.attention_backend}")
    print(versions(results))
    if chosen:
        print_throughput(config, {name: workloads[name] for name in chosen}, results)
    for name, runs in workloads.items():
        if name not in chosen:
            num_runs = next(iter(results.values()))[name].num_runs
            print(describe(name, [request for run in runs[-num_runs:] for request in run]))
    for panel in panels:
        panel.print(results)
    num_ranks = config.tensor_parallel_size
    setup = Path(args.model).name + (f" on {num_ranks} GPUs" if num_ranks > 1 else "")
    if args.plot:
        import torch

        device = "CPU" if config.device == "cpu" else torch.cuda.get_device_name(config.device)
        draw_panels(args.plot, f"{setup}, {device}", panels, results)
    if args.save:
        by_workload = {name: {engine: result[name].rate for engine, result in results.items()} for name in chosen}
        save_results(args.save, f"{config.device}, {dtypes}, {versions(results)}", setup, by_workload)


if __name__ == "__main__":
    main()
