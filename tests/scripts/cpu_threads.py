"""Tokens per second of small steps on one thread, as they are computed, and on all threads, in turn.

`--busy` starts a program beside it that keeps a core busy.
"""

import argparse
import subprocess
import sys
from statistics import median
from time import perf_counter

from nanovllm import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
CALLS = 8  # of each kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", action="store_true")
    command = [sys.executable, "-c", "while True: pass"]
    busy = subprocess.Popen(command) if parser.parse_args().busy else None
    try:
        with LLM("tiny-qwen3", device="cpu") as llm:
            measure(llm)
    finally:
        if busy is not None:
            busy.kill()


def measure(llm: LLM) -> None:
    runner = llm.model_runner
    assert runner is not None
    by_size, never = runner.milliseconds_per_token, 1e9  # as if a token were much work
    llm.generate("warm up", PARAMS, use_tqdm=False)
    print(f"{'sequences':>10} {'one thread':>12} {'all threads':>12}")
    for num_seqs in (1, 8, 24):
        speeds: dict[float, list[float]] = {by_size: [], never: []}
        for _ in range(CALLS):
            for runner.milliseconds_per_token, found in speeds.items():
                begin = perf_counter()
                llm.generate([f"to be or not {i}" for i in range(num_seqs)], PARAMS, use_tqdm=False)
                found.append(num_seqs * PARAMS.max_tokens / (perf_counter() - begin))
        print(f"{num_seqs:10} {median(speeds[by_size]):12,.0f} {median(speeds[never]):12,.0f}")


if __name__ == "__main__":
    main()
