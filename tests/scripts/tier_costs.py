"""What the tier of the prefix cache in host memory gains and costs on this device.

    python tests/scripts/tier_costs.py --shape qwen3-8b --history 30000 --swap-space 32
    python tests/scripts/tier_costs.py --shape qwen3.5-9b
    python tests/scripts/tier_costs.py --shape gemma3-12b --num-kvcache-blocks 140

Prints the time to the first token of a history that must be computed, that has left the device, and that is still
there. Then prints the time per token of other sequences: alone, with histories that are on the device, of which only
the last tokens are computed, and with histories that come from host memory and leave the device again. The weights are
random. `--shape tiny-qwen3` takes the bundled model.

The cache must be too small for four histories. With window tables, a history holds few blocks of these tables after it
was computed, so `--num-kvcache-blocks` must be smaller than the default.
"""

import argparse
import random
import tempfile
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter

from nanovllm import LLM, SamplingParams
from nanovllm.benchmarks.shapes import SHAPES, write_shape

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)


def first_token(llm: LLM, prompt: list[int]) -> float:
    """Return the time to the first token, in ms."""
    metrics = llm.generate([prompt], ONE, use_tqdm=False)[0].metrics
    return 1e3 * (metrics.first_token_time - metrics.arrival_time)


def measure_first_tokens(llm: LLM, histories: list[list[int]]) -> None:
    """Print the medians. Each history, and the same tokens in reverse, drive the previous one out of the device."""
    times: dict[str, list[float]] = {"computed": [], "from the host": [], "on the device": []}
    for name in ("computed", "from the host"):
        for history in histories:
            if name == "from the host":
                first_token(llm, history[::-1])
            times[name].append(first_token(llm, history))
            times["on the device"].append(first_token(llm, history))
    for name, found in times.items():
        print(f"{name:>14}: {median(found):8.1f} ms to the first token (least {min(found):.1f}, most {max(found):.1f})")
    print(f"{'ratio':>14}: {median(times['computed']) / median(times['from the host']):8.1f}")
    print(llm.stats()["tiers"], flush=True)


def measure_others(llm: LLM, histories: list[list[int]], num_streams: int, num_tokens: int) -> None:
    rng = random.Random(1)
    params = SamplingParams(temperature=0.0, max_tokens=8 * num_tokens, ignore_eos=True, detokenize=False)
    streams = {llm.add_request([rng.randrange(1000) for _ in range(100)], params) for _ in range(num_streams)}
    started: set[int] = set()
    while started != streams:
        started.update(request_id for request_id, _ in llm.step().new_tokens)

    def milliseconds_per_token(asked: list[list[int]]) -> tuple[float, int]:
        """Let the streams get `num_tokens` tokens each. Ask for a history at eight times, if the last one has ended."""
        following, loading, num_asked, num_new, begin = cycle(asked), None, 0, 0, perf_counter()
        while num_new < num_tokens * num_streams or loading is not None:
            if asked and loading is None and num_asked * num_tokens * num_streams <= 8 * num_new and num_asked < 8:
                loading, num_asked = llm.add_request(next(following), ONE), num_asked + 1
            output = llm.step()
            num_new += sum(request_id in streams for request_id, _ in output.new_tokens)
            if any(request.request_id == loading for request in output.finished):
                loading = None
        return 1e3 * (perf_counter() - begin) * num_streams / num_new, num_asked

    for kind, asked in 2 * (("the host", histories), ("the device", histories[-1:]), ("nowhere", [])):
        took, num_asked = milliseconds_per_token(asked)
        print(f"{num_streams} others: {took:.3f} ms per token, with {num_asked} histories from {kind}", flush=True)
    for request_id in streams:
        llm.abort(request_id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, "tiny-qwen3"], default="qwen3-8b")
    parser.add_argument("--history", type=int, default=30_000, help="tokens")
    parser.add_argument("--swap-space", type=float, default=32.0, help="GiB")
    parser.add_argument("--streams", type=int, default=16, help="other sequences")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each other sequence in a phase")
    parser.add_argument("--kvcache-block-size", type=int, default=256)
    parser.add_argument("--num-kvcache-blocks", type=int, help="default: for three halves of a history, and the others")
    args = parser.parse_args()
    rng, size = random.Random(0), args.kvcache_block_size
    histories = [[rng.randrange(1000) for _ in range(args.history)] for _ in range(4)]
    num_blocks = 3 * args.history // 2 // size + args.streams * (-(-(100 + 8 * args.tokens) // size) + 1)
    settings = dict(kvcache_block_size=size, num_kvcache_blocks=args.num_kvcache_blocks or num_blocks)
    settings |= dict(max_model_len=args.history + 2 * size, max_num_seqs=args.streams + 8)  # each state takes memory
    with tempfile.TemporaryDirectory() as folder:
        model = args.shape
        if args.shape in SHAPES:
            write_shape(args.shape, Path(model := str(Path(folder) / args.shape)))
            settings["load_format"] = "dummy"
        with LLM(model, swap_space=args.swap_space, **settings) as llm:
            print(f"{llm!r}\nstarted in {sum(llm.startup_seconds.values()):.1f} s", flush=True)
            first_token(llm, histories[0][::-1])  # warms up
            measure_first_tokens(llm, histories)
            measure_others(llm, histories, args.streams, args.tokens)


if __name__ == "__main__":
    main()
