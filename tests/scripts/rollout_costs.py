"""What a trainer pays for on this device: log-probabilities, sleeping, and new weights.

`python tests/scripts/rollout_costs.py logprobs --shape qwen3-0.6b` prints tokens per second of the headline workload,
without log-probabilities and with those of the sampled tokens, in turn. `... sleep --shape qwen3-8b` prints seconds and
free memory, and loads all weights in place from tensors of the same device. The weights are random.
"""

import argparse
import tempfile
from pathlib import Path
from time import perf_counter

import torch
import transformers

from nanovllm import LLM, SamplingParams
from nanovllm.benchmarks.requests import headline, in_rounds
from nanovllm.benchmarks.shapes import SHAPES, write_shape


def seconds(work, *arguments) -> float:
    begin = perf_counter()
    work(*arguments)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter() - begin


def measure_logprobs(model: str, rounds: int, num_requests: int = 256) -> None:
    ways = {"without": {}, "logprobs=0": {"logprobs": 0}, "logprobs=1": {"logprobs": 1}}
    with LLM(model, load_format="dummy") as llm:
        vocab_size = llm.config.model_config.vocab_size
        requests = headline(num_requests, 1024, 1024, 0, vocab_size)
        runs = iter(in_rounds(requests, len(ways) * (1 + rounds), vocab_size))

        def tokens_per_second(**options) -> float:
            own = next(runs)
            params = [SamplingParams(**x.sampling_settings(), detokenize=False, **options) for x in own]
            return sum(x.max_tokens for x in own) / seconds(llm.generate, [x.prompt for x in own], params, False)

        for i in range(1 + rounds):  # the first round warms up
            found = {name: tokens_per_second(**options) for name, options in ways.items()}
            if i:
                print(", ".join(f"{name}: {rate:,.0f} tok/s" for name, rate in found.items()), flush=True)


def measure_sleep(model: str, rounds: int) -> None:
    config = transformers.AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        shapes = {n: x.shape for n, x in transformers.AutoModelForCausalLM.from_config(config).state_dict().items()}
    settings = dict(load_format="dummy", enable_sleep_mode=True, gpu_memory_utilization=0.5, max_model_len=4096)
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False)
    free = lambda: f"{torch.cuda.mem_get_info()[0] / 2**30:.2f} GiB free"
    with LLM(model, **settings) as llm:
        answer = lambda: llm.generate([range(100)], params, use_tqdm=False)[0].token_ids
        before = answer()
        print(f"awake: {free()}")
        for level in (*[1] * rounds, 2):
            slept, asleep = seconds(llm.sleep, level), free()
            woken = seconds(llm.wake_up)
            same = f"; the same tokens: {answer() == before}" if level == 1 else ""
            print(
                f"level {level}: asleep in {slept:.2f} s, {asleep}; awake in {woken:.2f} s, {free()}{same}", flush=True
            )
        weights = {
            name: 0.02 * torch.randn(shape, device="cuda", dtype=torch.bfloat16) for name, shape in shapes.items()
        }
        for _ in range(rounds):
            took = seconds(llm.load_weights, weights.items())
            print(f"all weights, {sum(x.nbytes for x in weights.values()) / 1e9:.1f} GB, in place in {took:.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("logprobs", "sleep"))
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_shape(args.shape, Path(folder) / args.shape)
        work = measure_logprobs if args.what == "logprobs" else measure_sleep
        work(str(Path(folder) / args.shape), args.rounds)
