"""How many bits of answers depend on what else is computed, with the setting `batch_invariant` and without it.

`python tests/scripts/compare_batches.py --shape qwen3-0.6b` generates random requests alone, then all at once with CUDA
graphs, again with prefix hits, and in random order in an engine with small chunks and a cache so small that sequences
are preempted. It prints how many tokens and their log-probabilities were compared, up to the first other token of each
request, and how many differ. The weights are random.

With `--engine vllm`, vLLM does the same where it is installed, with its own mode if VLLM_BATCH_INVARIANT=1 is set. A
small cache is then one for the longest sequence.
"""

import argparse
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import AutoConfig

import nanovllm
from nanovllm.benchmarks.engines.vllm import vllm_settings
from nanovllm.benchmarks.shapes import SHAPES, write_shape

BLOCKS_OF = {"nanovllm": "num_kvcache_blocks", "vllm": "num_gpu_blocks_override"}  # the names of this setting


def engine_settings(args: argparse.Namespace, model: str) -> dict[str, Any]:
    settings = dict(load_format="dummy", max_model_len=4096, gpu_memory_utilization=0.85)
    settings |= {name: value for name in ("quantization", "kv_cache_dtype") if (value := getattr(args, name))}
    if args.engine == "vllm":
        return settings | vllm_settings(model, settings)
    return settings | dict(model=model, batch_invariant=not args.without)


@contextmanager
def engine(args: argparse.Namespace, **settings: Any) -> Iterator[Any]:
    """An `LLM` of either engine, which have the names that are used here."""
    llm = import_module(args.engine).LLM(**settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown() if args.engine == "vllm" else llm.exit()


def make_requests(args: argparse.Namespace, rng: random.Random, vocab_size: int) -> list[tuple[list[int], Any]]:
    SamplingParams = import_module(args.engine).SamplingParams
    prefix, made = [rng.randrange(vocab_size) for _ in range(700)], []
    for i in range(args.requests):
        own = [rng.randrange(vocab_size) for _ in range(rng.choice([1, 20, 300, 1100]))]
        options = rng.choice([dict(temperature=0), dict(temperature=0.9), dict(temperature=1.2, top_p=0.9, top_k=50)])
        params = dict(seed=i, max_tokens=rng.randint(100, 300), ignore_eos=True, detokenize=False)
        made.append((prefix * (i % 2) + own, SamplingParams(**options, **params, logprobs=rng.choice([0, 0, 2]))))
    return made


def answers(llm: Any, requests: list) -> list[list]:
    """Of each request, its tokens with all of their log-probabilities."""
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    outputs = llm.generate(prompts, [params for _, params in requests], use_tqdm=False)
    found = []
    for answer in (output.outputs[0] for output in outputs):
        entries = ([(i, x.logprob) for i, x in of_token.items()] for of_token in answer.logprobs)
        found.append([*zip(answer.token_ids, entries)])
    return found


def report(what: str, requests: list, found: list[list], expected: list[list], llm: Any) -> int:
    num_compared = num_tokens = num_logprobs = 0
    differ: dict[str, list[bool]] = {"greedy": [], "sampled": [], "filtered": []}  # of a request, whether anything does
    for (_, params), ours, theirs in zip(requests, found, expected, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(ours, theirs)) if x[0] != y[0]), len(ours))
        has_other_token, other_logprobs = same < len(ours), sum(x != y for x, y in zip(ours[:same], theirs))
        num_compared += same + has_other_token
        num_tokens += has_other_token
        num_logprobs += other_logprobs
        kind = "filtered" if params.top_p < 1 else "sampled" if params.temperature else "greedy"
        differ[kind].append(has_other_token or other_logprobs > 0)
    kinds = ", ".join(f"{sum(x)} of {len(x)} {kind} requests" for kind, x in differ.items())
    preemptions = f"; {llm.stats()['preemptions']} preemptions" if isinstance(llm, nanovllm.LLM) else ""
    print(
        f"{what}: {num_compared:,} tokens compared; {num_tokens} differ, and of {num_logprobs:,} equal ones the "
        f"log-probabilities, in {kinds}{preemptions}",
        flush=True,
    )
    return num_tokens + num_logprobs


def main(args: argparse.Namespace, model: str) -> None:
    rng, settings = random.Random(args.seed), engine_settings(args, model)
    vocab_size = AutoConfig.from_pretrained(model).vocab_size
    with engine(args, **settings, max_num_seqs=args.requests) as llm:
        requests, alone = make_requests(args, rng, vocab_size), []
        for request in requests:
            llm.reset_prefix_cache()
            alone += answers(llm, [request])
        num_differing = report("all at once, with graphs", requests, answers(llm, requests), alone, llm)
        num_differing += report("again, with prefix hits", requests, answers(llm, requests), alone, llm)
    small = dict(max_num_seqs=24, max_num_batched_tokens=rng.choice([300, 500, 900]), enforce_eager=True)
    small[BLOCKS_OF[args.engine]] = 24 if args.engine == "nanovllm" else settings["max_model_len"] // 16
    with engine(args, **settings | small) as llm:
        order = rng.sample(range(len(requests)), len(requests))
        requests, alone = [requests[i] for i in order], [alone[i] for i in order]
        num_differing += report("small chunks, few blocks", requests, answers(llm, requests), alone, llm)
    if num_differing and args.engine == "nanovllm" and not args.without:
        raise SystemExit("bits differ")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process has used CUDA
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--engine", choices=BLOCKS_OF, default="nanovllm")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--without", action="store_true", help="the same without the setting")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_shape(args.shape, Path(folder) / args.shape)
        main(args, str(Path(folder) / args.shape))
