"""What a draft model and a head bring on a GPU: random weights, and drafts of which a given part is right.

`python tests/scripts/time_drafters.py` prints the tokens per second of 1 to 64 sequences of Qwen3-8B's shape, each of
100 prompt and 512 output tokens: without drafts, with a head of EAGLE-3, and with a model of Qwen3-0.6B's shape. Each
position's drafts are right as often as `--acceptance` says, if those before are.
"""

import argparse
import random
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.benchmarks.shapes import SHAPES, write_head, write_shape


def seconds(llm: LLM, num_seqs: int, num_tokens: int) -> float:
    rng = random.Random(num_seqs)
    prompts = [[rng.randrange(5, 9000) for _ in range(100)] for _ in range(num_seqs)]
    begin = perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0.6, max_tokens=num_tokens, ignore_eos=True), use_tqdm=False)
    return perf_counter() - begin


def measure(args: argparse.Namespace, model: Path, speculative_config: dict[str, Any] | None) -> list[str]:
    sizes = args.batch_sizes
    settings = dict(load_format="dummy", max_num_seqs=max(sizes), max_model_len=1024, max_num_batched_tokens=1024)
    cells = []
    with LLM(str(model), **settings, speculative_config=speculative_config) as llm:
        seconds(llm, max(sizes), 16)  # warms up
        for n in sizes:
            cells.append(f"{n * args.num_tokens / seconds(llm, n, args.num_tokens):,.0f}")
    return cells


def main(args: argparse.Namespace, root: Path) -> None:
    model, drafter, head = root / "model", root / "drafter", root / "head"
    write_shape(args.shape, model)
    write_shape(args.draft_shape, drafter)
    write_head(head, model)
    imposed = dict(
        num_speculative_tokens=args.num_drafts,
        disable_by_batch_size=max(args.batch_sizes),
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=[args.acceptance ** (i + 1) for i in range(args.num_drafts)],
    )
    methods = {
        "without": None,
        "eagle3": imposed | dict(model=str(head)),
        "draft_model": imposed | dict(model=str(drafter)),
    }
    print("sequences", *args.batch_sizes, sep="\t")
    for method, config in methods.items():
        found = measure(args, model, config and config | dict(method=method))
        print(method, *found, sep="\t", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--draft-shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--num-drafts", type=int, default=4)
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--num-tokens", type=int, default=512)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64])
    with tempfile.TemporaryDirectory() as folder:
        main(parser.parse_args(), Path(folder))
