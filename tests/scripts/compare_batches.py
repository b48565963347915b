"""How many bits of answers depend on what else is computed, with the setting `batch_invariant` and without it.

`python tests/scripts/compare_batches.py --shape qwen3-0.6b` generates random requests alone, then all at once with CUDA
graphs, again with prefix hits, and in random order in an engine with small chunks and a cache so small that sequences
are preempted. It prints how many tokens and their log-probabilities were compared, up to the first other token of each
request, and how many differ. The weights are random.
"""

import argparse
import random
import tempfile
from pathlib import Path

from nanovllm import LLM, SamplingParams
from nanovllm.benchmarks.shapes import SHAPES, write_shape


def make_requests(rng: random.Random, number: int, vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
    prefix, made = [rng.randrange(vocab_size) for _ in range(700)], []
    for i in range(number):
        own = [rng.randrange(vocab_size) for _ in range(rng.choice([1, 20, 300, 1100]))]
        options = rng.choice([dict(temperature=0), dict(temperature=0.9), dict(temperature=1.2, top_p=0.9, top_k=50)])
        params = dict(seed=i, max_tokens=rng.randint(100, 300), ignore_eos=True, detokenize=False)
        made.append((prefix * (i % 2) + own, SamplingParams(**options, **params, logprobs=rng.choice([0, 0, 2]))))
    return made


def answers(llm: LLM, requests: list) -> list[list]:
    """Of each request, its tokens with all of their log-probabilities."""
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
    found = []
    for answer in (output.outputs[0] for output in outputs):
        entries = ([(i, x.logprob) for i, x in of_token.items()] for of_token in answer.logprobs)
        found.append([*zip(answer.token_ids, entries)])
    return found


def report(what: str, found: list[list], expected: list[list], llm: LLM) -> int:
    num_compared = num_differing = num_requests = 0
    for ours, theirs in zip(found, expected, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(ours, theirs)) if x[0] != y[0]), len(ours) - 1)
        num_compared += same + 1
        differing = sum(x != y for x, y in zip(ours[: same + 1], theirs))
        num_differing += differing
        num_requests += differing > 0
    counts = llm.stats()
    print(
        f"{what}: {num_compared:,} tokens with log-probabilities compared, {num_differing:,} differ, in {num_requests} "
        f"of {len(found)} requests ({counts['preemptions']} preemptions)",
        flush=True,
    )
    return num_differing


def main(args: argparse.Namespace, model: str) -> None:
    rng = random.Random(args.seed)
    settings = dict(load_format="dummy", max_model_len=4096, batch_invariant=not args.without)
    settings |= {name: value for name in ("quantization", "kv_cache_dtype") if (value := getattr(args, name))}
    with LLM(model, max_num_seqs=args.requests, gpu_memory_utilization=0.7, **settings) as llm:
        requests = make_requests(rng, args.requests, llm.config.model_config.vocab_size)
        alone = []
        for request in requests:
            llm.reset_prefix_cache()
            alone += answers(llm, [request])
        num_differing = report("all at once, with graphs", answers(llm, requests), alone, llm)
        num_differing += report("again, with prefix hits", answers(llm, requests), alone, llm)
    small = dict(num_kvcache_blocks=24, max_num_batched_tokens=rng.choice([300, 500, 900]), enforce_eager=True)
    with LLM(model, max_num_seqs=24, **settings | small) as llm:
        order = rng.sample(range(len(requests)), len(requests))
        found = answers(llm, [requests[i] for i in order])
        num_differing += report("small chunks, few blocks", found, [alone[i] for i in order], llm)
    if num_differing and not args.without:
        raise SystemExit("bits differ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--without", action="store_true", help="the same without the setting")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_shape(args.shape, Path(folder) / args.shape)
        main(args, str(Path(folder) / args.shape))
