"""Replicas beside one engine and beside ranks.

`python tests/scripts/compare_replicas.py --shape qwen3-8b --num-gpus 4`

Prints for each of them the time to start, and tokens per second for the headline workload (as many times as there are
engines) and for 16, 64 and 256 sequences with 512 input and 256 output tokens. Each runs in a process of its own, the
replicas on Ray. Not a test that pytest collects.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}

import torch

from nanovllm import LLM
from nanovllm.benchmarks.engines.nanovllm import inputs
from nanovllm.benchmarks.requests import Request, headline, other_ids, same_lengths
from nanovllm.benchmarks.shapes import SHAPES, write_shape
from nanovllm.config import Config

KINDS = {"one": "one engine", "replicas": "replicas", "ranks": "one engine on all"}
BATCHES = (16, 64, 256)


def workloads(num_engines: int, on_cpu: bool, vocab_size: int) -> Iterator[tuple[str, list[Request]]]:
    """On a CPU requests are a sixteenth as many and as long."""
    divisor = 16 if on_cpu else 1
    requests = headline(256 // divisor, 1024 // divisor, 1024 // divisor, 0, vocab_size)
    yield "headline", [copy for i in range(num_engines) for copy in other_ids(requests, vocab_size, by=i)]
    for size in (size // divisor for size in BATCHES):
        name = f"{size} sequences"
        yield name, same_lengths(size, 512 // divisor, 256 // divisor, name, vocab_size)


def run(kind: str, model: str, num_gpus: int, settings: dict) -> None:
    vocab_size = Config.create(model, dict(settings)).model_config.vocab_size
    begin = perf_counter()
    if kind == "replicas":
        from nanovllm.serve.replicas import RayLLM

        llm = RayLLM(model, num_replicas=num_gpus, **settings)
    else:
        llm = LLM(model, tensor_parallel_size=num_gpus if kind == "ranks" else 1, **settings)
    cells = [f"{perf_counter() - begin:.1f} s"]
    for _, requests in workloads(num_gpus if kind == "replicas" else 1, settings["device"] == "cpu", vocab_size):
        for batch in (other_ids(requests, vocab_size, by=99), requests):  # the first one to warm up
            prompts, params = inputs(batch)
            begin = perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = perf_counter() - begin
        cells.append(f"{sum(len(output.token_ids) for output in outputs) / seconds:,.0f}")
    llm.exit()
    print(" | ".join([f"{KINDS[kind]:>17}", *(f"{cell:>13}" for cell in cells)]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default="tiny-qwen3")
    model.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--num-gpus", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kind", choices=KINDS, help="only this one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"device": args.device}
        if args.shape:
            args.model = str(Path(folder) / args.shape)
            write_shape(args.shape, Path(args.model))
            settings["load_format"] = "dummy"
        if args.kind:
            run(args.kind, args.model, args.num_gpus, settings)
            return
        names = ["start", *(name for name, _ in workloads(1, args.device == "cpu", 2_000))]
        print(" | ".join([f"{args.num_gpus} GPUs, tok/s".rjust(17), *(name.rjust(13) for name in names)]), flush=True)
        for kind in KINDS:
            options = ["--num-gpus", str(args.num_gpus), "--device", args.device, "--kind", kind]
            options += ["--shape", args.shape] if args.shape else ["--model", args.model]
            subprocess.run([sys.executable, __file__, *options], check=True)


if __name__ == "__main__":
    main()
