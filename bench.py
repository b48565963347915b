"""Throughput and latency of nano-vllm, beside other engines on the same requests in the same call.

    python bench.py --model MODEL                                    three workloads
    python bench.py --num-seqs 64 --max-input-len 256 --max-output-len 256 --compare transformers,vllm
    python bench.py --model MODEL --profile FOLDER                   traces of decode steps, and where their time goes
    python bench.py --streaming                                      the headline by generate and by stream, in turns
    python bench.py --beams 4                                        beam search beside transformers', in turns

Headline: `--num-seqs` requests of random ids, lengths uniform up to the maxima (from a tenth of them), temperature
0.6, no end of sequence. Single stream: one request, an eighth of the longest input in, half of the longest output out.
Prefill: an eighth as many requests of `--prefill-len` tokens in, one out. Every workload runs twice, with other ids of
the same lengths, and the second run counts; where engines are compared, each has a process of its own.

On CUDA the limit is what the chip allows: the bytes of weights and of keys and values that decode steps must read, over
the rate at which this device reads, and the operations of the prefill over its rate of matrix products; both rates
are measured here, and several ranks have several times as much.
"""

import argparse
import importlib.util
import logging
import multiprocessing
import random
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

STARTED = perf_counter()
TEMPERATURE = 0.6


@dataclass
class Request:
    prompt: list[int]
    max_tokens: int
    top_k: int = 0
    top_p: float = 1.0


@dataclass
class Result:
    """One engine on one workload: when each request's tokens came, in seconds from the start."""

    seconds: float = 0.0
    num_tokens: int = 0
    token_times: list[list[float]] = field(default_factory=list)
    note: str = ""

    def row(self, name: str, best: "Result", limit: float | None) -> list[str]:
        rate = self.num_tokens / self.seconds
        first = [times[0] for times in self.token_times if times]
        gaps = [b - a for times in self.token_times for a, b in zip(times, times[1:])]
        ratio = rate / (best.num_tokens / best.seconds)
        tail = [f"{1000 * q(xs):,.1f}" if xs else "-" for xs in (first, gaps) for q in (median, percentile_99)]
        of_limit = f"{limit / self.seconds:.2f}" if limit else "-"
        return [name, f"{self.seconds:.2f}", f"{rate:,.0f}", *tail, f"{ratio:.2f}", of_limit, self.note]


HEADER = ["engine", "s", "tok/s", "first ms", "p99", "between ms", "p99", "ratio", "of limit", ""]


def percentile_99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def headline(num_seqs: int, max_input_len: int, max_output_len: int, seed: int, vocab_size: int) -> list[Request]:
    """Prompts first, then output lengths, all from one generator: seed 0 at the defaults makes 133,966 tokens out."""
    rng = random.Random(seed)
    top = min(10_000, vocab_size - 1)
    min_input_len, min_output_len = (max(1, length * 100 // 1024) for length in (max_input_len, max_output_len))
    prompts = [[rng.randint(0, top) for _ in range(rng.randint(min_input_len, max_input_len))] for _ in range(num_seqs)]
    return [Request(prompt, rng.randint(min_output_len, max_output_len)) for prompt in prompts]


def single_stream(max_input_len: int, max_output_len: int, seed: int, vocab_size: int) -> list[Request]:
    rng = random.Random(seed)
    prompt = [rng.randrange(vocab_size) for _ in range(max(1, max_input_len // 8))]
    return [Request(prompt, max(1, max_output_len // 2))]


def prefill(num_seqs: int, prefill_len: int, seed: int, vocab_size: int) -> list[Request]:
    rng = random.Random(f"prefill {seed}")  # not the ids of the single stream, which are in the prefix cache
    return [Request([rng.randrange(vocab_size) for _ in range(prefill_len)], 1) for _ in range(max(1, num_seqs // 8))]


def other_ids(requests: list[Request], vocab_size: int) -> list[Request]:
    """The same lengths with other ids, so that no prefix cache helps the second run."""
    return [replace(request, prompt=[(i + 1) % vocab_size for i in request.prompt]) for request in requests]


# -- engines: each is called with (model, settings, workloads), a workload being two runs -----------------------------


def report(line: str) -> None:
    """Progress goes to stderr at once; stdout has the results."""
    print(line, file=sys.stderr, flush=True)


def measure(engine: str, run: Callable[[list], Result], workloads: dict[str, list[list[Request]]]) -> dict[str, Result]:
    """The result of `run` on each workload, with a line when it starts and when it ends."""
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


def stream_overhead(model: str, settings: dict, requests: list[Request], rounds: int = 7) -> None:
    """The same requests by `generate` and by `stream`, one after the other, again and again."""
    from nanovllm import LLM

    prompts, params = [r.prompt for r in requests], sampling_params(requests)
    num_tokens = sum(r.max_tokens for r in requests)
    seconds: dict[str, list[float]] = {"generate": [], "stream": []}
    with LLM(model, **settings, enable_prefix_caching=False) as llm:
        ways = {
            "generate": lambda: llm.generate(prompts, params, use_tqdm=False),
            "stream": lambda: [event["text"] for event in llm.stream(prompts, params)],
        }
        for i in range(rounds + 1):  # the first is for warming up
            for name in list(ways)[:: 1 if i % 2 else -1]:
                begin = perf_counter()
                ways[name]()
                seconds[name].append(perf_counter() - begin)
    for name, times in seconds.items():
        rates = [num_tokens / s for s in times[1:]]
        print(f"{name:8} {len(requests)} requests, {num_tokens:,} tokens out", end=", tok/s: ")
        print(f"median {median(rates):,.0f}, best {max(rates):,.0f}")
    ratios = [b / a - 1 for a, b in zip(seconds["generate"][1:], seconds["stream"][1:])]
    best = min(seconds["stream"][1:]) / min(seconds["generate"][1:]) - 1
    print(f"stream takes longer by {median(ratios):+.1%} (median of {rounds} pairs), {best:+.1%} (best of each)")


def beams_beside_transformers(model: str, settings: dict, width: int, max_tokens: int, rounds: int = 5) -> None:
    """A prompt of 20 tokens, searched by both, one after the other, again and again."""
    import torch
    from transformers import AutoModelForCausalLM

    from nanovllm import LLM, BeamSearchParams

    prompt = list(range(300, 320))
    seconds: dict[str, list[float]] = {"nanovllm": [], "transformers": []}
    with LLM(model, **settings) as llm:
        config = llm.config
        other = AutoModelForCausalLM.from_pretrained(config.model, dtype=config.dtype).to(config.device).eval()
        ids = torch.tensor([prompt], device=config.device)
        plain = dict(do_sample=False, temperature=None, top_p=None, top_k=None, eos_token_id=None, pad_token_id=0)
        ways = {
            "nanovllm": lambda: llm.beam_search(prompt, BeamSearchParams(width, max_tokens, ignore_eos=True)),
            "transformers": lambda: other.generate(
                ids, attention_mask=torch.ones_like(ids), num_beams=width, max_new_tokens=max_tokens, **plain
            ),
        }
        for i in range(rounds + 1):  # the first is for warming up
            for name in list(ways)[:: 1 if i % 2 else -1]:
                begin = perf_counter()
                ways[name]()
                seconds[name].append(perf_counter() - begin)
    print(f"{width} beams, {len(prompt)} tokens in, {max_tokens} out, in seconds:")
    for name, times in seconds.items():
        print(f"{name:13} median {median(times[1:]):.2f}, best {min(times[1:]):.2f}")


def profile_nanovllm(model: str, settings: dict, batch_sizes: list[int], length: int, folder: Path) -> None:
    """A trace of ten decode steps of each batch size, and the time of a step by kernel.

    Kernels overlap, so each is given the time from the end of the one before to its own end.
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
            for before, event in zip(events, events[1:]):
                total.setdefault(event.name, []).append(event.time_range.end - before.time_range.end)
            for name, times in sorted(total.items(), key=lambda item: -sum(item[1]))[:12]:
                calls, each = len(times) / num_steps, sum(times) / len(times)
                print(f"  {sum(times) / num_steps:8.1f} us  {calls:5.0f} x {each:7.2f} us  {name[:70]}")
            print(f"  {sum(map(sum, total.values())) / num_steps:8.1f} us in all")
            while not llm.is_finished():
                llm.step()


def run_transformers(model: str, settings: dict, workloads: dict[str, list[list[Request]]]) -> dict[str, Result]:
    """Padded batches, whole batch after whole batch; the best of a few batch sizes."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria

    from nanovllm.config import Config

    config = Config.create(model, settings)
    llm = AutoModelForCausalLM.from_pretrained(config.model, dtype=config.dtype).to(config.device).eval()
    llm.generation_config.eos_token_id = None

    class Clock(StoppingCriteria):
        """Notes when each token came; stops nothing."""

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
    """vLLM's offline class at its defaults, with our bounds and dtype. It tells of no single tokens here."""
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


# -- what the chip allows ---------------------------------------------------------------------------------------------


def measured_rates(device: str) -> tuple[float, float]:
    """Bytes per second that this device reads, and operations per second of a bf16 matrix product."""
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
    many = torch.ones(2**31 // 4, device="cuda")
    square = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    return many.nbytes / seconds(many.sum), 2 * size**3 / seconds(lambda: square @ square)


def limit_seconds(requests: list[Request], config, bytes_per_s: float, operations_per_s: float) -> float:
    """The least time for the requests, one after the other: prefill by its operations, decode by the bytes it must read.

    An engine that mixes the two in one step could hide the shorter behind the longer.
    """
    shape = config.model_config
    heads, kv_heads, head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    of_layer = (
        shape.hidden_size * (2 * heads + 2 * kv_heads) * head_dim + 3 * shape.hidden_size * shape.intermediate_size
    )
    of_layers = of_layer * shape.num_hidden_layers
    of_head = shape.hidden_size * shape.vocab_size
    kv_bytes = 2 * shape.num_hidden_layers * kv_heads * head_dim * config.dtype.itemsize  # of a token
    lengths = [(len(r.prompt), r.max_tokens) for r in requests]
    num_read = sum(sum(range(prompt + 1, prompt + tokens)) for prompt, tokens in lengths)
    num_decoded = sum(tokens - 1 for _, tokens in lengths)
    num_steps = max(max(tokens - 1 for _, tokens in lengths), -(-num_decoded // config.max_num_seqs))
    num_bytes = num_read * kv_bytes + num_steps * (of_layers + of_head) * config.dtype.itemsize
    attention = sum(2 * prompt**2 * heads * head_dim * shape.num_hidden_layers for prompt, _ in lengths)
    linear = sum(2 * prompt * of_layers + 2 * of_head for prompt, _ in lengths)
    return num_bytes / bytes_per_s + (linear + attention) / operations_per_s


def alone(function, *arguments):
    """The function's result, from a process that ends with it and gives all its memory back."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=show_engine_log) as pool:
        return pool.submit(function, *arguments).result()


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
    """An argparse type: names of engines with commas between them."""
    others = [name for name in ENGINES if name != "nanovllm"]
    names = list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    for name in names:
        if name not in others:
            raise argparse.ArgumentTypeError(f"{name!r}: must be of {', '.join(others)}; nanovllm always runs")
    return names


def writable_folder(text: str) -> Path:
    """An argparse type: a folder that exists or can be made, and takes files."""
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: is no folder that one can write to ({error.strerror})") from error
    return folder


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = integer(1)
    parser.add_argument("--model", default="tiny-qwen3")
    parser.add_argument("--workload", choices=["all", "headline", "single", "prefill"], default="all")
    parser.add_argument("--num-seqs", type=size, help="default 256, on a CPU 64")
    parser.add_argument("--max-input-len", type=size, help="default 1024, on a CPU 256")
    parser.add_argument("--max-output-len", type=size, help="default 1024, on a CPU 256")
    parser.add_argument("--prefill-len", type=size, help="default 3900, on a CPU 1024")
    parser.add_argument("--seed", type=integer(0), default=0)
    parser.add_argument(
        "--profile", type=writable_folder, metavar="FOLDER", help="write traces of decode steps, and nothing else"
    )
    parser.add_argument("--streaming", action="store_true", help="compare generate with stream, and nothing else")
    parser.add_argument(
        "--beams", type=size, metavar="WIDTH", help="compare beam search with transformers', and nothing else"
    )
    parser.add_argument(
        "--compare", type=other_engines, default=[], help="transformers, vllm, or both with a comma between them"
    )
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction)
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
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
        beams_beside_transformers(args.model, settings, args.beams, args.max_output_len or 400)
        return

    if args.streaming:
        stream_overhead(args.model, settings, headline(num_seqs, *lengths, args.seed, vocab_size))
        return

    prefill_len = min(args.prefill_len or (1024 if small else 3900), config.max_model_len - 1)
    requests = {
        "headline": headline(num_seqs, *lengths, args.seed, vocab_size),
        "single": single_stream(*lengths, args.seed, vocab_size),
        "prefill": prefill(num_seqs, prefill_len, args.seed, vocab_size),
    }
    for request in (request for made in requests.values() for request in made):
        request.top_k, request.top_p = args.top_k, args.top_p
    workloads = {
        name: [other_ids(made, vocab_size), made] for name, made in requests.items() if args.workload in ("all", name)
    }
    engines = ["nanovllm", *args.compare]
    results = {}
    for engine in engines:
        if importlib.util.find_spec(engine) is None:
            report(f"{engine}: not installed, left out")
            continue
        run = ENGINES[engine] if len(engines) == 1 else partial(alone, ENGINES[engine])
        report(f"{engine}: starts")
        begin = perf_counter()
        results[engine] = run(args.model, settings, workloads)
        report(f"{engine}: ends after {perf_counter() - begin:.1f} s")

    print(f"{args.model}, {config.dtype}, {config.device}, attention {config.attention_backend}")
    rates = None if small else alone(measured_rates, config.device)
    if rates:
        print(f"this device reads {rates[0] / 1e12:.2f} TB/s and multiplies at {rates[1] / 1e12:.0f} TFLOP/s")
    for name in workloads:
        made = requests[name]
        num_input, num_output = sum(len(r.prompt) for r in made), sum(r.max_tokens for r in made)
        for result in results.values():
            result[name].num_tokens = num_input if name == "prefill" else num_output
        title = f"{name}: {len(made)} requests, {num_input:,} tokens in, {num_output:,} out"
        others = [result[name] for engine, result in results.items() if engine != "nanovllm"]
        base = max(others or [results["nanovllm"][name]], key=lambda result: result.num_tokens / result.seconds)
        limit = limit_seconds(made, config, *(rate * args.tensor_parallel_size for rate in rates)) if rates else None
        print_table(title, [result[name].row(engine, base, limit) for engine, result in results.items()])
    print("\ntok/s: output tokens, in prefill input tokens", end="")
    print("; ratio: to the fastest of the others" if len(results) > 1 else "")


if __name__ == "__main__":
    main()
