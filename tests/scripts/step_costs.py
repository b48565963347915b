"""What `logprobs=0` and `batch_invariant` cost on this CPU: `python tests/scripts/step_costs.py`.

It prints milliseconds of a step of the bundled model, and ratios: the medians of runs in turn. Then those of a token of
a prompt and of a step in four layers of about the shape of Qwen3.5-0.8B, three of which keep a state.
"""

import json
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from nanovllm import LLM, SamplingParams
from nanovllm.benchmarks.shapes import write_shape

NUM_TOKENS, NUM_RUNS = 64, 9
SETTINGS = dict(device="cpu", dtype="float32", max_model_len=256, num_kvcache_blocks=80)
HYBRID = dict(num_hidden_layers=4, hidden_size=1024, intermediate_size=3584, vocab_size=512, linear_num_value_heads=16)
HYBRID |= dict(num_attention_heads=8, num_key_value_heads=2, eos_token_id=0)


def milliseconds(llm: LLM, num_seqs: int, prompt_len: int = 8, num_tokens: int = NUM_TOKENS, **options) -> float:
    """Of a step with so many sequences, if the prompt is short."""
    params = SamplingParams(temperature=0.8, max_tokens=num_tokens, ignore_eos=True, seed=1, **options)
    begin = perf_counter()
    llm.generate([[10 + i, *range(2, 1 + prompt_len)] for i in range(num_seqs)], params, use_tqdm=False)
    return 1e3 * (perf_counter() - begin) / num_tokens


def compare(*ways) -> str:
    """The least milliseconds of each way, and how many times as long as the first one the others take."""
    runs = [[compute() for compute in ways] for _ in range(NUM_RUNS)]
    ratios = ", ".join(f"{median(run[i] / run[0] for run in runs):.2f}" for i in range(1, len(ways)))
    return ", ".join(f"{min(times):.2f}" for times in zip(*runs)) + f" ms; ratios {ratios}"


if __name__ == "__main__":
    with LLM("tiny-qwen3", **SETTINGS) as plain, LLM("tiny-qwen3", batch_invariant=True, **SETTINGS) as invariant:
        for n in (1, 8, 32):
            ways = (plain, {}), (plain, {"logprobs": 0}), (invariant, {})
            costs = compare(*(partial(milliseconds, llm, n, **options) for llm, options in ways))
            print(f"{n} sequences: plain, logprobs=0, batch_invariant: {costs}")
    with TemporaryDirectory() as folder:
        write_shape("qwen3.5-9b", shape := Path(folder) / "hybrid")
        config = json.loads((shape / "config.json").read_text())
        (shape / "config.json").write_text(json.dumps(config | HYBRID))
        settings = SETTINGS | dict(load_format="dummy", enable_prefix_caching=False)
        with LLM(str(shape), **settings) as plain, LLM(str(shape), batch_invariant=True, **settings) as invariant:
            prompts = (partial(milliseconds, llm, 1, 200, 1) for llm in (plain, invariant))
            print(f"with states, a prompt of 200 tokens: plain, batch_invariant: {compare(*prompts)}")
            for n in (1, 8):
                steps = (partial(milliseconds, llm, n, num_tokens=16) for llm in (plain, invariant))
                print(f"with states, {n} sequences: plain, batch_invariant: {compare(*steps)}")
