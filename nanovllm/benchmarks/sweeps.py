"""Makes the workloads `online`, `conversations`, `latency`, `batches` and `images`, and their tables.

Each workload varies one variable.
"""

import argparse
from functools import partial
from math import isqrt
from typing import Any

from nanovllm.benchmarks.engines.nanovllm import run_nanovllm
from nanovllm.benchmarks.processes import progress, report, run_in_process
from nanovllm.benchmarks.requests import (
    IMAGE_TEXT,
    Workloads,
    by_turn,
    conversations,
    fit,
    in_rounds,
    online,
    other_ids,
    same_lengths,
    with_images,
)
from nanovllm.benchmarks.results import Result, Results, decode_rate, latency_ms
from nanovllm.benchmarks.tables import Panel
from nanovllm.config import Config

PROMPT_LENS = (16, 128, 512, 1024, 4000, 8000, 16000, 32000)
CONTEXT_LENS = (100, 500, 1500, 4000, 30000)
QUICK_SECONDS = 5.0
FIRST_TOKENS = 10  # runs of a single request of the workload `images`
CONVERSATIONS = "conversations"
DECODE_SEQS = {1: "1 sequence", 8: "8 sequences"}


def online_sweep(args: argparse.Namespace, config: Config) -> tuple[Workloads, list[Panel]]:
    """Make the workload `online`. The warm-up is the first quarter of the requests, with different token ids."""
    vocab_size, on_cpu = config.model_config.vocab_size, config.device == "cpu"
    medians = median_lengths(args, config)
    names = {rate: f"online {rate:g}/s" for rate in args.request_rate or (8, 16, 24)}
    workloads = {}
    for rate, name in names.items():
        num_seqs = args.num_seqs or max(1, round((6 if on_cpu else 20) * rate))
        requests = online(rate, num_seqs, medians, config.max_model_len, args.seed, vocab_size)
        workloads[name] = [other_ids(requests[: -(-num_seqs // 4)], vocab_size), requests]
    x = "requests per second"
    panels = []
    for kind in ("TTFT", "time per output token", "longest gap", "ITL"):
        statistics = {p: partial(latency_ms, kind=kind, p=p, min_values=20 if p == 99 else 1) for p in (50, 90, 99)}
        curves = {f"p{p}": (names, statistic) for p, statistic in statistics.items()}
        panels.append(Panel(f"{kind}, ms", x, curves, is_drawn=kind != "ITL"))
    rate = {"": (names, lambda result: result.rate)}
    return workloads, [*panels, Panel("output tokens per second", x, rate, digits=0, is_drawn=False)]


def median_lengths(args: argparse.Namespace, config: Config) -> tuple[int, int]:
    defaults = (125, 40) if config.device == "cpu" else (500, 160)
    return args.median_input_len or defaults[0], args.median_output_len or defaults[1]


def rates_of_cpu(args: argparse.Namespace, settings: dict[str, Any], config: Config) -> list[float]:
    """Briefly measure this CPU's highest request rate.

    Return 30, 60 and 90% of the highest rate, because no fixed rates suit all CPUs.
    """
    vocab_size, medians, highest = config.model_config.vocab_size, median_lengths(args, config), 0.0
    with progress("the highest rate of requests:"):
        # at most the requests of a measured run; the second number is used only if the first takes little time
        for num_seqs in sorted({min(number, args.num_seqs or number) for number in (12, 96)}):
            requests = online(1e9, num_seqs, medians, config.max_model_len, args.seed, vocab_size)
            workloads = {"rate": [requests[:2], other_ids(requests, vocab_size)]}
            seconds = run_in_process(run_nanovllm, args.model, settings, workloads)["rate"].seconds
            highest = num_seqs / seconds
            if seconds > QUICK_SECONDS:
                break
    report(f"about {highest:.2g} requests per second; --request-rate sets other rates than 30, 60 and 90% of it")
    return [float(f"{part * highest:.2g}") for part in (0.3, 0.6, 0.9)]


def conversations_sweep(args: argparse.Namespace, config: Config) -> tuple[Workloads, list[Panel]]:
    """Make the workload `conversations`. The warm-up has a quarter of the conversations, with different token ids."""
    vocab_size, on_cpu = config.model_config.vocab_size, config.device == "cpu"
    number, turns, pause = (6, (2, 5), 0.2) if on_cpu else (64, (3, 20), 2.0)
    number, shape = args.num_seqs or number, (args.turns or turns, args.pause or pause)
    sizes = median_lengths(args, config), config.max_model_len, args.seed, vocab_size
    requests = conversations(number, *shape, *sizes)
    if not requests:
        raise ValueError(
            f"max_model_len={config.max_model_len}: the first turn of every conversation needs more tokens"
        )
    warm_up = conversations(-(-number // 4), *shape, *sizes)
    names = {turn: f"turn {turn}" for turn in by_turn(requests)}
    ttft = {f"p{p}": (names, partial(latency_ms, kind="TTFT", p=p)) for p in (50, 99)}
    rate = {"": ({len(requests): CONVERSATIONS}, lambda result: result.rate)}
    return {CONVERSATIONS: [other_ids(warm_up, vocab_size), requests]}, [
        Panel("TTFT by turn, ms", "turn", ttft, digits=1),
        Panel("output tokens per second", "requests", rate, digits=0, is_drawn=False),
    ]


def add_turns(results: Results, workloads: Workloads) -> None:
    for by_name in results.values():
        if (whole := by_name.get(CONVERSATIONS)) is not None:
            for turn, indices in by_turn(workloads[CONVERSATIONS][-1]).items():
                by_name[f"turn {turn}"] = Result(token_times=[whole.token_times[i] for i in indices])


def latency_sweep(args: argparse.Namespace, config: Config) -> tuple[Workloads, list[Panel]]:
    """Make the workload `latency`. Lengths above `max_model_len` or --max-input-len are left out.

    If fewer than three lengths remain, add fractions of the bound, so that the plot is a curve.

    All decode runs with the same context length have the same token ids. After the first run, the prefix cache contains
    the contexts, so all sequences start to decode at the same time.
    """
    vocab_size, max_input_len = config.model_config.vocab_size, args.max_input_len or config.max_model_len
    num_runs = args.num_seqs or (5 if config.device == "cpu" else 20)
    output_len = min(args.max_output_len or 96, config.max_model_len - 1)

    def fitting(lengths: tuple[int, ...], num_output: int) -> list[int]:
        bound = min(max_input_len, config.max_model_len - num_output)
        fitting = [length for length in lengths if length <= bound]
        return fitting if len(fitting) > 2 else sorted({*fitting, *(-(-bound // part) for part in (4, 2, 1))})

    workloads = {}
    prompts = {length: f"prompt of {length:,}" for length in fitting(PROMPT_LENS, 1)}
    for length, name in prompts.items():
        requests = same_lengths(1 + num_runs, length, 1, f"{name} {args.seed}", vocab_size)
        workloads[name] = [[request] for request in requests]
    decode = {}
    for num_seqs, statistic in DECODE_SEQS.items():
        names = {length: f"{statistic} after {length:,} tokens" for length in fitting(CONTEXT_LENS, output_len)}
        for length, name in names.items():
            workloads[name] = 4 * [same_lengths(num_seqs, length, output_len, f"{name} {args.seed}", vocab_size)]
        decode[statistic] = (names, lambda result, num_seqs=num_seqs: decode_rate(result.token_times, num_seqs))
    statistics = {"median": 50, "min": 0, "p99": 99}
    ttft = {name: (prompts, partial(latency_ms, kind="TTFT", p=p)) for name, p in statistics.items()}
    return workloads, [
        Panel("time to first token of a single prompt, ms", "prompt tokens", ttft, log="xy"),
        Panel("decode, tokens per second", "context tokens", decode, log="xy", digits=0),
    ]


def batches_sweep(args: argparse.Namespace, config: Config) -> tuple[Workloads, list[Panel]]:
    vocab_size, on_cpu = config.model_config.vocab_size, config.device == "cpu"
    input_len, output_len = (128, 64) if on_cpu else (512, 256)
    lengths = fit(args.max_input_len or input_len, args.max_output_len or output_len, config.max_model_len)
    sizes = args.batch_sizes or ((1, 4, 16, 64) if on_cpu else (2, 8, 32, 128, 512))
    names = {size: f"batch of {size}" for size in sizes}
    workloads = {}
    for size, name in names.items():
        requests = same_lengths(size, *lengths, f"{name} {args.seed}", vocab_size)
        workloads[name] = in_rounds(requests, args.rounds, vocab_size)
    title = f"output tokens per second ({lengths[0]} in, {lengths[1]} out)"
    return workloads, [Panel(title, "requests", {"": (names, lambda result: result.rate)}, log="xy", digits=0)]


def images_sweep(args: argparse.Namespace, config: Config) -> tuple[Workloads, list[Panel]]:
    """Make the workload `images`. Each request of each run has a different image. The model must accept images.

    Raises RuntimeError if an image is too large or too small.
    """
    from nanovllm.vision.image_reader import MAX_PIXELS, smart_resize  # Pillow is an optional dependency

    vision, on_cpu = config.model_config.vision, config.device == "cpu"
    num_seqs, output_len = args.num_seqs or (4 if on_cpu else 64), args.max_output_len or (16 if on_cpu else 64)
    sides = args.image_sizes or [256 if on_cpu else 1024]
    kinds = "first image", "first text", "images"
    first, text, many = ({side: f"{kind} {side}" for side in sides} for kind in kinds)
    workloads = {}
    for side in sides:
        square = vision.patch_size * vision.merge_size
        try:
            height, width = smart_resize(side, side, square, vision.min_pixels, vision.max_pixels)
        except ValueError as error:  # old versions of transformers scale no image that is smaller than a token
            raise RuntimeError(f"--image-sizes {side}: {error}") from error
        num_tokens = sum(IMAGE_TEXT) + height * width // square**2
        if side**2 > MAX_PIXELS:
            raise RuntimeError(f"--image-sizes {side}: must be at most {isqrt(MAX_PIXELS)}")
        if num_tokens + output_len > config.max_model_len:
            tokens = f"has {num_tokens} tokens in and {output_len} out"
            raise RuntimeError(f"--image-sizes {side}: {tokens}: must be at most max_model_len={config.max_model_len}")
        made = with_images(1 + FIRST_TOKENS, side, 1, f"{first[side]} {args.seed}", vision.image_token_id)
        workloads[first[side]] = [[request] for request in made]
        made = same_lengths(1 + FIRST_TOKENS, num_tokens, 1, f"{text[side]} {args.seed}", vision.image_token_id)
        workloads[text[side]] = [[request] for request in made]
        seeds = [f"{many[side]} {args.seed} {i}" for i in range(1 + args.rounds)]
        workloads[many[side]] = [with_images(num_seqs, side, output_len, x, vision.image_token_id) for x in seeds]
    milliseconds = lambda result: 1000 * result.seconds
    firsts = {"image": (first, milliseconds), "text": (text, milliseconds)}
    rate = {"": (many, lambda result: num_seqs / result.seconds)}
    return workloads, [
        Panel("time to first token of a single request, ms", "pixels of a side", firsts, digits=1),
        Panel(f"images per second ({num_seqs} requests, {output_len} out)", "pixels of a side", rate, digits=1),
    ]


SWEEPS = {
    "online": online_sweep,
    CONVERSATIONS: conversations_sweep,
    "latency": latency_sweep,
    "batches": batches_sweep,
    "images": images_sweep,
}
STEPPED = ("online", CONVERSATIONS, "latency")  # workloads that need the times of tokens, so they step the engines
