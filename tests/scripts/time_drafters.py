"""What drafts bring on a GPU: random weights, and drafts of which a given part is right.

`python tests/scripts/time_drafters.py` prints the tokens per second of 1 to 64 sequences of Qwen3-8B's shape, each of
100 prompt and 512 output tokens: without drafts, with a head of EAGLE-3, and with a model of Qwen3-0.6B's shape. Each
position's drafts are right as often as `--acceptance` says, if those before are: so many drafts of `"ngram"` are also
made, which else depends on the text. As chance gives few sequences more or fewer tokens a step, `expected` is the ratio
to decoding without drafts for as many as the acceptance says.

`--strict` imposes nothing: heads and models with random weights are wrong, and it shows what that costs, or, with more
sequences than may draft, what it costs that they might. `--parts` shows what a step with drafts consists of.
"""

import argparse
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.benchmarks.shapes import SHAPES, write_head, write_shape

MAX_LEN = 1024
Replay = tuple[torch.cuda.CUDAGraph, torch.cuda.Event, torch.cuda.Event]


def generate(llm: LLM, num_seqs: int, num_tokens: int) -> tuple[float, float]:
    """Tokens per second, prompts included, and the mean number of tokens of a sequence in a step with drafts."""
    rng = random.Random(num_seqs)
    prompts = [[rng.randrange(5, 9000) for _ in range(100)] for _ in range(num_seqs)]
    before, begin = llm.stats().get("spec_decode"), perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0.6, max_tokens=num_tokens, ignore_eos=True), use_tqdm=False)
    seconds = perf_counter() - begin
    if before is None:
        return num_seqs * num_tokens / seconds, 1.0
    num_drafts, accepted = (llm.stats()["spec_decode"][x] - before[x] for x in ("drafts", "accepted_tokens"))
    return num_seqs * num_tokens / seconds, 1 + accepted / max(1, num_drafts)


@contextmanager
def recorded_replays() -> Iterator[list[Replay]]:
    """The graphs that are replayed meanwhile, with events before and after each."""
    replays: list[Replay] = []
    own = torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        own(graph)
        end.record()
        replays.append((graph, begin, end))

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
    try:
        yield replays
    finally:
        torch.cuda.CUDAGraph.replay = own  # type: ignore[method-assign]


def parts(llm: LLM, num_seqs: int) -> str:
    """The device's time of the parts of a step with drafts, medians in ms."""
    with recorded_replays() as replays:
        generate(llm, num_seqs, 100)
        torch.cuda.synchronize()
    drafter = llm.model_runner.features["spec_decode"].drafter
    if drafter is None:
        return ""
    drafting = {id(graph) for graph in drafter.run.__self__.graphs.values()}
    steps = [both for both in pairwise(replays) if id(both[0][0]) in drafting]
    ms = lambda begin, end: median(begin(step).elapsed_time(end(step)) for step in steps[1:-1])
    drafts = ms(lambda step: step[0][1], lambda step: step[0][2])
    between = ms(lambda step: step[0][2], lambda step: step[1][1])
    rest = ms(lambda step: step[1][1], lambda step: step[1][2])
    gaps = [a[1][2].elapsed_time(b[0][1]) for a, b in pairwise(steps)]
    return f"drafts {drafts:.2f} ms, between {between:.2f}, model and sampling {rest:.2f}, gap {median(gaps):.2f}"


def measure(args: argparse.Namespace, model: Path, method: str, config: dict[str, Any] | None) -> None:
    """Print a line for each number of sequences."""
    sizes = args.batch_sizes
    settings = dict(load_format="dummy", max_num_seqs=max(sizes), max_model_len=MAX_LEN, max_num_batched_tokens=1024)
    settings |= dict(num_kvcache_blocks=max(sizes) * MAX_LEN // 256 + 1, tensor_parallel_size=args.ranks)
    expected = 1 + sum(args.acceptance ** (i + 1) for i in range(args.num_drafts))
    with LLM(str(model), **settings, speculative_config=config) as llm:
        generate(llm, max(sizes), 16)  # warms up
        for n in sizes:
            found = [generate(llm, n, args.num_tokens) for _ in range(args.rounds)]
            rate, tokens = (median(column) for column in zip(*found))
            line = f"{args.shape}  {method:11} {n:4} {rate:9,.0f} tok/s"
            if config is None:
                args.plain[n] = rate
            else:
                ratio = rate / args.plain.get(n, torch.nan)
                line += f"  {ratio:5.2f}  {tokens:5.2f} a step  expected {ratio * expected / tokens:5.2f}"
                line += f"  {parts(llm, n)}" if args.parts else ""
            print(line, flush=True)


def main(args: argparse.Namespace, root: Path) -> None:
    model, drafter, head = root / "model", root / "drafter", root / "head"
    write_shape(args.shape, model)
    write_shape(args.draft_shape, drafter)
    write_head(head, model)
    drafting: dict[str, Any] = dict(num_speculative_tokens=args.num_drafts)
    if not args.strict:
        rates = [args.acceptance ** (i + 1) for i in range(args.num_drafts)]
        drafting |= dict(rejection_sample_method="synthetic", synthetic_acceptance_rates=rates)
        drafting |= dict(disable_by_batch_size=max(args.batch_sizes))
    folders = {"eagle3": {"model": str(head)}, "draft_model": {"model": str(drafter)}}
    args.plain = {}  # tokens per second without drafts, by the number of sequences
    print(torch.cuda.get_device_name(), args.ranks, "ranks" if args.ranks > 1 else "rank", flush=True)
    for method in args.methods:
        config = None if method == "without" else drafting | {"method": method} | folders.get(method, {})
        measure(args, model, method, config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--draft-shape", choices=SHAPES, default="qwen3-0.6b")
    methods = ["without", "eagle3", "draft_model", "ngram"]
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods[:3], help="in this order")
    parser.add_argument("--num-drafts", type=int, default=4)
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--num-tokens", type=int, default=512)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--parts", action="store_true")
    with tempfile.TemporaryDirectory() as folder:
        main(parser.parse_args(), Path(folder))
