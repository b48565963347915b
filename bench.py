"""Throughput and latency of nano-vllm, and of other engines on the same requests in the same call.

    python bench.py --model MODEL                     the three workloads below
    python bench.py --model MODEL --compare vllm      the same with vLLM beside it (or transformers, or both)
    python bench.py --model MODEL --profile FOLDER    traces of decode steps, and the time of each kernel in them
    python bench.py --streaming                       the headline workload by generate() and by stream()
    python bench.py --beams 4                         beam search, compared with that of transformers
    python bench.py --figure FILE.svg                 a bar chart of the numbers that --save FILE.json has collected

Workloads, all with random token ids, temperature 0.6 and no end-of-sequence token:

    headline    --num-seqs requests; their input and output lengths are uniform between a tenth of the maximum and the
                maximum
    single      one request; its input is an eighth of --max-input-len, its output half of --max-output-len
    prefill     an eighth of --num-seqs requests of --prefill-len tokens, with one output token each

Each workload runs twice with the same lengths and different ids, and the second run is reported. When engines are
compared, each of them runs in its own process.

On CUDA the table has a column "of limit": the time that the hardware needs at least, divided by the measured time. The
least time is the bytes of weights, keys and values that decode steps read, divided by the memory bandwidth, plus the
operations of the prefill, divided by the matrix product rate. Both rates are measured on this device; several ranks
count as several times the rates of one.
"""

import argparse
import importlib.util
import json
import logging
import multiprocessing
import random
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

STARTED = perf_counter()
TEMPERATURE = 0.6
WORKLOADS = {"headline": "headline", "single": "single stream", "prefill": "prefill"}
# names in results files -> names in the figure; `--compare` can't run "original"
LABELS = {
    "nanovllm": "this package",
    "vllm": "vLLM",
    "original": "the original nano-vllm",
    "transformers": "transformers",
}


@dataclass
class Request:
    prompt: list[int]
    max_tokens: int
    top_k: int = 0
    top_p: float = 1.0


@dataclass
class Result:
    """One engine on one workload.

    token_times: for each request, when its tokens arrived, in seconds from the start of the run.
    """

    seconds: float = 0.0
    num_tokens: int = 0
    token_times: list[list[float]] = field(default_factory=list)
    note: str = ""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds

    def row(self, name: str, baseline: "Result", limit: float | None) -> list[str]:
        first = [times[0] for times in self.token_times if times]
        gaps = [b - a for times in self.token_times for a, b in pairwise(times)]
        latencies = [f"{1000 * q(xs):,.1f}" if xs else "-" for xs in (first, gaps) for q in (median, percentile_99)]
        of_limit = f"{limit / self.seconds:.2f}" if limit else "-"
        ratio = f"{self.rate / baseline.rate:.2f}"
        return [name, f"{self.seconds:.2f}", f"{self.rate:,.0f}", *latencies, ratio, of_limit, self.note]


HEADER = ["engine", "s", "tok/s", "TTFT ms", "p99", "ITL ms", "p99", "ratio", "of limit", ""]


def percentile_99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def headline(num_seqs: int, max_input_len: int, max_output_len: int, seed: int, vocab_size: int) -> list[Request]:
    """Prompts first, then output lengths, from one generator: seed 0 at the defaults gives 133,966 output tokens."""
    rng = random.Random(seed)
    max_id = min(10_000, vocab_size - 1)
    min_input_len, min_output_len = (max(1, length * 100 // 1024) for length in (max_input_len, max_output_len))
    prompts = [
        [rng.randint(0, max_id) for _ in range(rng.randint(min_input_len, max_input_len))] for _ in range(num_seqs)
    ]
    return [Request(prompt, rng.randint(min_output_len, max_output_len)) for prompt in prompts]


def single_stream(max_input_len: int, max_output_len: int, seed: int, vocab_size: int) -> list[Request]:
    rng = random.Random(seed)
    prompt = [rng.randrange(vocab_size) for _ in range(max(1, max_input_len // 8))]
    return [Request(prompt, max(1, max_output_len // 2))]


def prefill(num_seqs: int, prefill_len: int, seed: int, vocab_size: int) -> list[Request]:
    rng = random.Random(f"prefill {seed}")  # other ids than single_stream has: those are in the prefix cache
    return [Request([rng.randrange(vocab_size) for _ in range(prefill_len)], 1) for _ in range(max(1, num_seqs // 8))]


def other_ids(requests: list[Request], vocab_size: int) -> list[Request]:
    """The same lengths with other ids, so that the second run finds nothing in the prefix cache."""
    return [replace(request, prompt=[(i + 1) % vocab_size for i in request.prompt]) for request in requests]


# -- engines: functions of (model, settings, workloads), where a workload is two lists of requests --------------------


def report(line: str) -> None:
    """Print a line of progress to stderr; results go to stdout."""
    print(line, file=sys.stderr, flush=True)


def measure(engine: str, run: Callable[[list], Result], workloads: dict[str, list[list[Request]]]) -> dict[str, Result]:
    """Call `run` on each workload and report when it starts and ends."""
    results = {}
    for name, runs in workloads.items():
        report(f"{engine}: {name} starts")
        begin = perf_counter()
        results[name] = run(runs)
        report(f"{engine}: {name} ends after {perf_counter() - begin:.1f} s")
    return results


def sampling_params(requests: list[Request]) -> list:
    from nanovllm import SamplingParams

    return [
        SamplingParams(temperature=TEMPERATURE, top_k=r.top_k, top_p=r.top_p, ignore_eos=True, max_tokens=r.max_tokens)
        for r in requests
    ]


def run_nanovllm(model: str, settings: dict, workloads: dict[str, list[list[Request]]]) -> dict[str, Result]:
    from nanovllm import LLM

    def run(requests: list[Request]) -> Result:
        params = sampling_params(requests)
        times: dict[int, list[float]] = {}
        begin = perf_counter()
        for request, param in zip(requests, params):
            times[llm.add_request(request.prompt, param)] = []
        while not llm.is_finished():
            new_tokens = llm.step().new_tokens
            now = perf_counter() - begin
            for request_id, _ in new_tokens:
                times[request_id].append(now)
        return Result(perf_counter() - begin, token_times=list(times.values()))

    with LLM(model, **settings) as llm:
        loaded = perf_counter()
        run([Request([1], 1)])
        if multiprocessing.parent_process() is None:
            now, inside = perf_counter(), llm.startup_seconds
            imports = loaded - STARTED - sum(inside.values())
            parts = {"imports": imports, **inside, "first token": now - loaded}
            print(f"from start to the first token: {now - STARTED:.1f} s", end=" (")
            print(", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items()), end=")\n")
        return measure("nanovllm", lambda runs: [run(requests) for requests in runs][-1], workloads)


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

    prompts, params = [r.prompt for r in requests], sampling_params(requests)
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
        other = AutoModelForCausalLM.from_pretrained(config.model, dtype=config.dtype).to(config.device).eval()
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
            requests = [Request([1 + i, *range(3, length)], 100) for i in range(batch_size)]
            for request, param in zip(requests, sampling_params(requests)):
                llm.add_request(request.prompt, param)
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


def run_transformers(model: str, settings: dict, workloads: dict[str, list[list[Request]]]) -> dict[str, Result]:
    """Padded batches, one after the other; the fastest of a few batch sizes is reported."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria

    from nanovllm.config import Config

    config = Config.create(model, settings)
    llm = AutoModelForCausalLM.from_pretrained(config.model, dtype=config.dtype).to(config.device).eval()
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
        result = Result(note=f"batches of {batch_size}")
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
        results = [[run(requests, size) for requests in runs][-1] for size in sizes]
        return min(results, key=lambda result: result.seconds)

    return measure("transformers", best, workloads)


def run_vllm(model: str, settings: dict, workloads: dict[str, list[list[Request]]]) -> dict[str, Result]:
    """vLLM's offline `LLM` with its defaults and with our bounds and dtype; it reports no times of single tokens."""
    from vllm import LLM, SamplingParams

    from nanovllm.config import Config

    config = Config.create(model, settings)
    llm = LLM(
        config.model,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        dtype=str(config.dtype).removeprefix("torch."),
        tensor_parallel_size=config.tensor_parallel_size,
    )

    def run(requests: list[Request]) -> Result:
        params = [
            SamplingParams(
                temperature=TEMPERATURE,
                top_k=r.top_k,
                top_p=r.top_p,
                ignore_eos=True,
                max_tokens=r.max_tokens,
                detokenize=False,
            )
            for r in requests
        ]
        begin = perf_counter()
        llm.generate([{"prompt_token_ids": r.prompt} for r in requests], params, use_tqdm=False)
        return Result(perf_counter() - begin)

    return measure("vllm", lambda runs: [run(requests) for requests in runs][-1], workloads)


ENGINES = {"nanovllm": run_nanovllm, "transformers": run_transformers, "vllm": run_vllm}


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

    An engine that runs prefill and decode in the same step could overlap the two, and be faster than this.
    """
    shape = config.model_config
    heads, kv_heads, head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    layer_weights = (
        shape.hidden_size * (2 * heads + 2 * kv_heads) * head_dim + 3 * shape.hidden_size * shape.intermediate_size
    )
    all_layer_weights = layer_weights * shape.num_hidden_layers
    head_weights = shape.hidden_size * shape.vocab_size
    kv_bytes = 2 * shape.num_hidden_layers * kv_heads * head_dim * config.dtype.itemsize  # per token
    lengths = [(len(r.prompt), r.max_tokens) for r in requests]
    num_read = sum(sum(range(prompt + 1, prompt + tokens)) for prompt, tokens in lengths)
    num_decoded = sum(tokens - 1 for _, tokens in lengths)
    num_steps = max(max(tokens - 1 for _, tokens in lengths), -(-num_decoded // config.max_num_seqs))
    num_bytes = num_read * kv_bytes + num_steps * (all_layer_weights + head_weights) * config.dtype.itemsize
    attention = sum(2 * prompt**2 * heads * head_dim * shape.num_hidden_layers for prompt, _ in lengths)
    linear = sum(2 * prompt * all_layer_weights + 2 * head_weights for prompt, _ in lengths)
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


def draw_figure(file: Path) -> None:
    """Draw the results file beside `file` as bars: speed relative to vLLM where it is there, labelled with tokens/s."""
    import matplotlib

    matplotlib.use("svg")
    # text stays text, and nothing in the file depends on when it is drawn
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "nano-vllm", "font.size": 9})
    import matplotlib.pyplot as plt

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
    axes.legend(loc="center right", frameon=False)
    figure.savefig(file, metadata={"Date": None})


def print_table(title: str, rows: list[list[str]]) -> None:
    rows = [HEADER, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    print(f"\n{title}")
    for row in rows:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1])]
        print("  ".join([row[0].ljust(widths[0]), *numbers, row[-1]]).rstrip())


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


def figure_file(text: str) -> Path:
    """An argparse type: an svg file with a results file of the same name beside it."""
    file = Path(text)
    if file.suffix != ".svg" or not file.with_suffix(".json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: must end in .svg and have a .json of the same name beside it")
    results_file(str(file.with_suffix(".json")))
    return file


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = integer(1)
    parser.add_argument("--model", default="tiny-qwen3", help="a folder, a hub id, or the bundled tiny-qwen3")
    parser.add_argument("--workload", choices=["all", *WORKLOADS], default="all")
    parser.add_argument("--num-seqs", type=size, help="requests of the headline workload (256; on a CPU 64)")
    parser.add_argument("--max-input-len", type=size, help="longest prompt in tokens (1024; on a CPU 256)")
    parser.add_argument("--max-output-len", type=size, help="longest output in tokens (1024; on a CPU 256)")
    parser.add_argument("--prefill-len", type=size, help="prompt length of the prefill workload (3900; on a CPU 1024)")
    parser.add_argument("--seed", type=integer(0), default=0, help="seed of the random requests")
    parser.add_argument(
        "--compare", type=other_engines, default=[], help="transformers, vllm, or both with a comma between them"
    )
    parser.add_argument("--save", type=results_file, metavar="FILE.json", help="add the tokens per second to this file")

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
    engine.add_argument("--device", default="auto")
    engine.add_argument("--attention-backend", default="auto")
    engine.add_argument("--tensor-parallel-size", type=int, default=1)
    engine.add_argument("--max-num-seqs", type=int, default=512)
    engine.add_argument("--max-num-batched-tokens", type=int, default=16384)
    engine.add_argument("--max-model-len", type=int)
    engine.add_argument("--enforce-eager", action="store_true")
    engine.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction)
    return parser


def run_engines(
    engines: list[str], model: str, settings: dict, workloads: dict[str, list[Request]], vocab_size: int
) -> dict[str, dict[str, Result]]:
    """Results by engine and workload. Several engines run in a process each; one that is not installed is left out."""
    runs = {name: [other_ids(requests, vocab_size), requests] for name, requests in workloads.items()}
    results = {}
    for engine in engines:
        if importlib.util.find_spec(engine) is None:
            report(f"{engine}: not installed, left out")
            continue
        run = ENGINES[engine] if len(engines) == 1 else partial(run_in_process, ENGINES[engine])
        report(f"{engine}: starts")
        begin = perf_counter()
        results[engine] = run(model, settings, runs)
        report(f"{engine}: ends after {perf_counter() - begin:.1f} s")
        for name, requests in workloads.items():
            results[engine][name].num_tokens = sum(
                len(r.prompt) if name == "prefill" else r.max_tokens for r in requests
            )
    return results


def print_results(
    model: str, config, workloads: dict[str, list[Request]], results: dict[str, dict[str, Result]]
) -> None:
    print(f"{model}, {config.dtype}, {config.device}, attention {config.attention_backend}")
    rates = None if config.device == "cpu" else run_in_process(measured_rates, config.device)
    if rates:
        print(f"this device reads {rates[0] / 1e12:.2f} TB/s and multiplies at {rates[1] / 1e12:.0f} TFLOP/s")
    for name, requests in workloads.items():
        num_input, num_output = sum(len(r.prompt) for r in requests), sum(r.max_tokens for r in requests)
        others = [result[name] for engine, result in results.items() if engine != "nanovllm"]
        baseline = max(others or [results["nanovllm"][name]], key=lambda result: result.rate)
        limit = limit_seconds(requests, config, *(config.tensor_parallel_size * x for x in rates)) if rates else None
        title = f"{name}: {len(requests)} requests, {num_input:,} tokens in, {num_output:,} out"
        print_table(title, [result[name].row(engine, baseline, limit) for engine, result in results.items()])
    print("\ntok/s: output tokens, in prefill input tokens; TTFT and ITL: median and 99th percentile", end="")
    print("; ratio: to the fastest other engine" if len(results) > 1 else "")


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.figure:
        draw_figure(args.figure)
        return
    show_engine_log()
    from nanovllm import SamplingParams
    from nanovllm.config import Config

    names = ["dtype", "device", "attention_backend", "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens"]
    names += ["max_model_len", "enforce_eager", "async_scheduling"]
    settings = {name: getattr(args, name) for name in names}
    try:  # before any engine is started
        SamplingParams(temperature=TEMPERATURE, top_k=args.top_k, top_p=args.top_p)
        config = Config.create(args.model, settings)
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))
    vocab_size = config.model_config.vocab_size
    small = config.device == "cpu"
    num_seqs = args.num_seqs or (64 if small else 256)
    lengths = [args.max_input_len or (256 if small else 1024), args.max_output_len or (256 if small else 1024)]
    if sum(lengths) > config.max_model_len:
        lengths = [max(1, length * config.max_model_len // sum(lengths)) for length in lengths]
    if args.profile:
        batch_sizes = sorted({1, min(num_seqs, config.max_num_seqs)})
        profile_nanovllm(args.model, settings, batch_sizes, sum(lengths) // 4, args.profile)
        return
    if args.beams:
        compare_beam_search(args.model, settings, args.beams, args.max_output_len or 400)
        return
    if args.streaming:
        compare_streaming(args.model, settings, headline(num_seqs, *lengths, args.seed, vocab_size))
        return

    prefill_len = min(args.prefill_len or (1024 if small else 3900), config.max_model_len - 1)
    workloads = {
        "headline": headline(num_seqs, *lengths, args.seed, vocab_size),
        "single": single_stream(*lengths, args.seed, vocab_size),
        "prefill": prefill(num_seqs, prefill_len, args.seed, vocab_size),
    }
    if args.workload != "all":
        workloads = {args.workload: workloads[args.workload]}
    for request in (request for requests in workloads.values() for request in requests):
        request.top_k, request.top_p = args.top_k, args.top_p
    results = run_engines(["nanovllm", *args.compare], args.model, settings, workloads, vocab_size)
    print_results(args.model, config, workloads, results)
    if args.save:
        num_ranks = config.tensor_parallel_size
        setup = Path(args.model).name + (f" on {num_ranks} GPUs" if num_ranks > 1 else "")
        by_workload = {name: {engine: result[name].rate for engine, result in results.items()} for name in workloads}
        save_results(args.save, f"{config.device}, {config.dtype}", setup, by_workload)


if __name__ == "__main__":
    main()
