"""What `logprobs=0` and `batch_invariant` cost on this CPU: `python tests/scripts/step_costs.py`.

It prints milliseconds of a step of the bundled model, and ratios: the medians of runs in turn.
"""

from statistics import median
from time import perf_counter

from nanovllm import LLM, SamplingParams

NUM_TOKENS, NUM_RUNS = 64, 9
SETTINGS = dict(device="cpu", dtype="float32", max_model_len=256, num_kvcache_blocks=80)


def milliseconds(llm: LLM, num_seqs: int, **options) -> float:
    params = SamplingParams(temperature=0.8, max_tokens=NUM_TOKENS, ignore_eos=True, seed=1, **options)
    begin = perf_counter()
    llm.generate([[10 + i, *range(2, 9)] for i in range(num_seqs)], params, use_tqdm=False)
    return 1e3 * (perf_counter() - begin) / NUM_TOKENS


if __name__ == "__main__":
    with LLM("tiny-qwen3", **SETTINGS) as plain, LLM("tiny-qwen3", batch_invariant=True, **SETTINGS) as invariant:
        for n in (1, 8, 32):
            ways = (plain, {}), (plain, {"logprobs": 0}), (invariant, {})
            runs = [[milliseconds(llm, n, **options) for llm, options in ways] for _ in range(NUM_RUNS)]
            logprobs, bits = (median(run[i] / run[0] for run in runs) for i in (1, 2))
            best = ", ".join(f"{min(times):.2f}" for times in zip(*runs))
            print(f"{n} sequences: plain, logprobs=0, batch_invariant: {best} ms; ratios {logprobs:.2f}, {bits:.2f}")
