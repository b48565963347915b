"""Workloads over a range of a variable: `online`, `latency` and `batches`, and the tables of each."""

import argparse
from functools import partial

from nanovllm.benchmarks.requests import Workloads, fit, in_rounds, online, other_ids, same_lengths
from nanovllm.benchmarks.results import decode_rate, latency_ms
from nanovllm.benchmarks.tables import Panel
from nanovllm.config import Config

PROMPT_LENS = (16, 128, 512, 1024, 4000, 8000, 16000, 32000)
CONTEXT_LENS = (500, 4000, 30000)
DECODE_SEQS = {1: "1 sequence", 8: "8 sequences"}


def online_sweep(args: argparse.Namespace, config: Config) -> tuple[Workloads, list[Panel]]:
    """The warm-up is the first quarter of the requests with other ids, and with the same times of arrival."""
    vocab_size, medians = config.model_config.vocab_size, (args.median_input_len, args.median_output_len)
    names = {rate: f"online {rate:g}/s" for rate in args.request_rate}
    workloads = {}
    for rate, name in names.items():
        num_seqs = args.num_seqs or max(1, round(20 * rate))
        requests = online(rate, num_seqs, medians, config.max_model_len, args.seed, vocab_size)
        workloads[name] = [other_ids(requests[: -(-num_seqs // 4)], vocab_size), requests]
    x = "requests per second"
    panels = []
    for kind in ("TTFT", "time per output token", "longest gap", "ITL"):
        curves = {f"p{p}": (names, partial(latency_ms, kind=kind, p=p)) for p in (50, 90, 99)}
        panels.append(Panel(f"{kind}, ms", x, curves, is_drawn=kind != "ITL"))
    rate = {"": (names, lambda result: result.rate)}
    return workloads, [*panels, Panel("output tokens per second", x, rate, digits=0, is_drawn=False)]


def latency_sweep(args: argparse.Namespace, config: Config) -> tuple[Workloads, list[Panel]]:
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
    statistics = {"median": 50, "min": 0, "p99": 99}
    first = {name: (prompts, partial(latency_ms, kind="TTFT", p=p)) for name, p in statistics.items()}
    return workloads, [
        Panel("time to the token of one prompt, ms", "prompt tokens", first, log="xy"),
        Panel("decode, tokens per second", "context tokens", decode, log="xy", digits=0),
    ]


def batches_sweep(args: argparse.Namespace, config: Config) -> tuple[Workloads, list[Panel]]:
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
