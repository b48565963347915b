"""Runs the headline benchmark of nano-vllm: the throughput of many random requests in one batch, in tokens per second.

    python bench.py                                      the benchmark in this file
    python bench.py headline --model Qwen/Qwen3-0.6B     the same requests with another model, and more figures
    python bench.py --shape qwen3-8b --compare vllm      further workloads, compared with vLLM
    python bench.py --help                               all benchmarks and flags

With arguments, this runs the command `nanovllm bench`, which needs no clone of the repository.
"""

import signal
import sys
from random import Random
from time import perf_counter

from nanovllm import SamplingParams

MODEL = "tiny-qwen3"  # bundled with the package; may also be a folder in the Hugging Face layout or a hub id


def random_requests(num_seqs: int, max_len: int, vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Make prompts of random token ids, and parameters. Lengths are about `max_len` / 10 to `max_len` tokens."""
    rng = Random(0)
    min_len, max_id = max_len * 100 // 1024, min(10_000, vocab_size - 1)
    prompts = [[rng.randint(0, max_id) for _ in range(rng.randint(min_len, max_len))] for _ in range(num_seqs)]
    output_lens = [rng.randint(min_len, max_len) for _ in range(num_seqs)]
    return prompts, [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length) for length in output_lens]


def main() -> None:
    print("Importing PyTorch ...", flush=True)
    from nanovllm import LLM  # not at the top, because importing PyTorch takes seconds

    with LLM(MODEL) as llm:
        num_seqs, max_len = (64, 256) if llm.config.device == "cpu" else (256, 1024)
        vocab_size = llm.config.model_config.vocab_size
        prompts, params = random_requests(num_seqs, max_len, vocab_size)
        # compile kernels; other token ids, so that the timed run has no prefix hits
        print("Warming up ...", flush=True)
        llm.generate([[(i + 1) % vocab_size for i in prompt] for prompt in prompts], params, use_tqdm=False)

        begin = perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = perf_counter() - begin
    num_tokens = sum(len(output["token_ids"]) for output in outputs)
    print(f"{MODEL}: {num_tokens:,} tokens in {seconds:.2f} s, {num_tokens / seconds:,.0f} tokens/s")


if __name__ == "__main__":
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the program at once
    if len(sys.argv) == 1:
        main()
    else:
        from nanovllm.benchmarks import command

        signal.signal(signal.SIGINT, handler)  # Ctrl-C ends the measurement, and its results are printed
        command.main()
