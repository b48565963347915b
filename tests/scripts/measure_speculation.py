"""What speculation brings on the bundled model's tasks: python tests/scripts/measure_speculation.py

For each task and method: how many drafts were right, the mean number of tokens of a step that had drafts, and the speed
with and without, in alternating pairs. The texts must be the same.
"""

import argparse
import random
from statistics import median
from time import perf_counter

from nanovllm import LLM, SamplingParams

WORDS = ["cat", "dog", "house", "tree", "river", "king", "queen", "night", "day", "word", "sea", "star", "hand", "moon"]
METHODS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "itself": {"method": "draft_model", "model": "tiny-qwen3", "num_speculative_tokens": 4},
}


def tasks(rng: random.Random, number: int) -> dict[str, list[str]]:
    """Other ones in each round: the suffix automaton remembers answers."""
    words = lambda n: " ".join(rng.choices(WORDS, k=n))
    numbers = lambda: ", ".join(str(rng.randrange(100)) for _ in range(8))
    starts = [rng.randrange(1, 500) for _ in range(number)]
    return {
        "copy": [f"Copy: {words(12)}" for _ in range(number)],
        "sort": [f"Sort: {numbers()}" for _ in range(number)],
        "count": [f"Count from {i} to {i + 19}." for i in starts],
        "Hamlet": [f"HAMLET.\nThe {words(3)}" for _ in range(number)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs")
    parser.add_argument("--number", type=int, default=4, help="requests of a task in a run, at least as many as run")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1], help="sequences that run at a time")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=[*METHODS])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--always", action="store_true", help="also with more sequences than disable_by_batch_size")
    parser.add_argument(
        "--tasks", nargs="+", default=[*tasks(random.Random(0), 1)], choices=[*tasks(random.Random(0), 1)]
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    print("method  batch  temperature  task    right             tokens a step  tok/s without  with   ratio")
    for batch_size in args.batch_sizes:
        settings = dict(device=args.device, dtype="float32", max_num_seqs=batch_size, max_model_len=512)
        settings |= dict(num_kvcache_blocks=4 * batch_size)  # there are two engines
        plain = LLM("tiny-qwen3", **settings)
        for name in args.methods:
            config = METHODS[name] | ({"disable_by_batch_size": batch_size} if args.always else {})
            llm = LLM("tiny-qwen3", **settings, speculative_config=config)
            for temperature in args.temperatures:
                for task in args.tasks:
                    title = f"{name:7} {batch_size:5}  {temperature:11}  {task:6}"
                    print(f"{title}  {compare(plain, llm, task, temperature, args, batch_size)}", flush=True)
            llm.exit()
        plain.exit()


def compare(plain: LLM, llm: LLM, task: str, temperature: float, args: argparse.Namespace, batch_size: int) -> str:
    before = llm.stats()["spec_decode"]
    rates: dict[LLM, list[float]] = {plain: [], llm: []}
    for i in range(args.rounds):
        texts = tasks(random.Random(f"{i} {temperature}"), max(args.number, batch_size))[task]
        is_raw = task == "Hamlet"
        if not is_raw:
            conversations = [[{"role": "user", "content": text}] for text in texts]
            texts = plain.tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
        options = dict(temperature=temperature, max_tokens=args.max_tokens, ignore_eos=is_raw)
        params = [SamplingParams(seed=100 * i + j, **options) for j in range(len(texts))]
        answers = []
        for engine in (plain, llm) if i % 2 else (llm, plain):
            begin = perf_counter()
            outputs = engine.generate(texts, params, use_tqdm=False)
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
            rates[engine].append(sum(map(len, answers[-1])) / (perf_counter() - begin))
        assert answers[0] == answers[1], "the texts differ"
    now = llm.stats()["spec_decode"]
    num_drafts, drafted, accepted = (now[x] - before[x] for x in ("drafts", "draft_tokens", "accepted_tokens"))
    right = f"{accepted / max(1, drafted):.0%} of {drafted:,}"
    ratio = median(b / a for a, b in zip(*rates.values()))
    without, with_drafts = map(median, rates.values())
    return f"{right:18}{1 + accepted / max(1, num_drafts):13.2f}{without:15,.0f}{with_drafts:6,.0f}{ratio:8.2f}"


if __name__ == "__main__":
    main()
