"""Makes the workloads `headline`, `single` and `prefill`, and prints their tables, with the hardware's limits."""

import argparse

from nanovllm.benchmarks.limits import Limits, limits, measured_rates
from nanovllm.benchmarks.processes import run_in_process
from nanovllm.benchmarks.requests import Request, Workloads, describe, fit, headline, in_rounds, same_lengths
from nanovllm.benchmarks.results import Result, Results, latency_ms
from nanovllm.benchmarks.tables import number, print_table
from nanovllm.config import Config

EMBED = {"embed long": (512, 512), "embed short": (10_000, 30)}  # numbers of texts, and tokens per text
EMBED_ON_CPU = {"embed long": (16, 512), "embed short": (256, 30)}
WORKLOADS = {"headline": "headline", "single": "single stream", "prefill": "prefill"}
HEADER = ["engine", "s", "tok/s", "TTFT ms", "p99", "ratio"]
OF_LIMITS = ["of limit", "of overlap"]  # columns on a GPU


def sizes(args: argparse.Namespace, config: Config) -> tuple[int, list[int]]:
    """Return the number of requests of the workload `headline`, and its maximum input and output lengths."""
    num_seqs, longest = (64, 256) if config.device == "cpu" else (256, 1024)
    lengths = fit(args.max_input_len or longest, args.max_output_len or longest, config.max_model_len)
    return args.num_seqs or num_seqs, lengths


def headline_requests(args: argparse.Namespace, config: Config) -> list[Request]:
    num_seqs, lengths = sizes(args, config)
    return headline(num_seqs, *lengths, args.seed, config.model_config.vocab_size)


def workloads(args: argparse.Namespace, config: Config) -> Workloads:
    num_seqs, lengths = sizes(args, config)
    single_lens = [max(1, lengths[0] // 8), max(1, lengths[1] // 2)]
    prefill_len = min(args.prefill_len or (1024 if config.device == "cpu" else 3900), config.max_model_len - 1)
    vocab_size = config.model_config.vocab_size
    if args.workload == ["embed"]:
        texts = EMBED_ON_CPU if config.device == "cpu" else EMBED
        made = {name: same_lengths(*sizes, 1, f"{name} {args.seed}", vocab_size) for name, sizes in texts.items()}
        return {name: in_rounds(requests, args.rounds, vocab_size) for name, requests in made.items()}
    requests = {
        "headline": headline_requests(args, config),
        "single": same_lengths(1, *single_lens, args.seed, vocab_size),
        "prefill": same_lengths(max(1, num_seqs // 8), prefill_len, 1, f"prefill {args.seed}", vocab_size),
    }
    return {name: in_rounds(requests[name], args.rounds, vocab_size) for name in args.workload if name in requests}


def print_results(config: Config, workloads: Workloads, results: Results) -> None:
    rates = None if config.device == "cpu" else run_in_process(measured_rates, config.device)
    if rates:
        read, multiplied = (rate / 1e12 for rate in rates)
        print(f"under load, this device reads {read:.2f} TB/s and multiplies at {multiplied:.0f} TFLOP/s")
    for name, (*_, requests) in workloads.items():
        by_engine = {engine: result[name] for engine, result in results.items() if name in result}
        if "nanovllm" not in by_engine:
            continue
        other_results = [result for engine, result in by_engine.items() if engine != "nanovllm"]
        baseline = max(other_results or by_engine.values(), key=lambda result: result.rate)
        least = limits(requests, config, rates.times(config.tensor_parallel_size)) if rates else None
        rows = [row(engine, result, baseline, least) for engine, result in by_engine.items()]
        print_table(describe(name, requests), [*HEADER, *(OF_LIMITS if least else []), ""], rows)
    print("\ntok/s: output tokens, in prefill and embed input tokens; TTFT: median and 99th percentile", end="")
    print("; ratio: to the fastest other engine" if len(results) > 1 else "")


def row(engine: str, result: Result, baseline: Result, least: Limits | None) -> list[str]:
    """Return a row's cells, in the order of the header. `least` contains the hardware's limits, or is None on a CPU."""
    ttft = [number(latency_ms(result, "TTFT", p), 1) for p in (50, 99)]
    of_limits = [f"{seconds / result.seconds:.2f}" for seconds in least or ()]
    ratio = f"{result.rate / baseline.rate:.2f}"
    return [engine, f"{result.seconds:.2f}", f"{result.rate:,.0f}", *ttft, ratio, *of_limits, result.note]
