"""How many requests one driver can feed, with replicas that answer at once: `python tests/scripts/saturate_driver.py`.

Prints requests per second, the driver's own CPU time and bytes for each request, and how its memory grows with their
number. Not a test that pytest collects.
"""

import argparse
import os
import random
import resource
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter, process_time

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}

from nanovllm import SamplingParams
from nanovllm.engine.outputs import CompletionOutput
from nanovllm.serve.replicas import RayLLM, actors
from nanovllm.serve.replicas.messages import Final, Report, decode_requests, encode_report


class InstantReplica:
    """Has every answer at once: always the same tokens and the same text."""

    def start(self, model: str, settings: dict) -> dict:
        self._changed = threading.Condition()
        self._finals: list[Final] = []
        self._num_bytes = {"in": 0, "out": 0}
        rng = random.Random(0)
        tokens = [rng.randrange(100_000) for _ in range(settings["max_num_batched_tokens"])]
        self._tokens, self._text = tokens, "word " * (len(tokens) * 4 // 5)
        return {"num_blocks": 4000}

    def submit(self, data: bytes) -> None:
        self._num_bytes["in"] += len(data)
        finals = [Final(new.request_id, [self._answer(new)], 0, None, (0.0, 0.1, 1.0)) for new in decode_requests(data)]
        with self._changed:
            self._finals += finals
            self._changed.notify()

    def _answer(self, new) -> CompletionOutput:
        """Objects of its own, as pickle would send those that answers share only once."""
        return CompletionOutput(0, f"{self._text}{new.request_id}", [*self._tokens], None, None, "length", None)

    def discard(self, request_ids: list[int]) -> None: ...

    def stats(self) -> dict:
        return self._num_bytes

    def reports(self) -> Iterator[bytes]:
        while True:
            with self._changed:
                while not self._finals:
                    self._changed.wait()
                finals, self._finals = self._finals, []
            report = encode_report(Report([], finals, []))
            self._num_bytes["out"] += len(report)
            yield report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-requests", type=int, default=20_000)
    parser.add_argument("--num-replicas", type=int, default=2)
    parser.add_argument("--input-len", type=int, default=560)
    parser.add_argument("--output-len", type=int, default=520)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--text", action="store_true", help="prompts are text, which the driver tokenizes")
    args = parser.parse_args()
    actors.make_group = partial(actors.make_group, replica_class=InstantReplica)
    settings = dict(device="cpu", max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.output_len)
    rng = random.Random(0)
    pool = [rng.randrange(2000) for _ in range(100_000)]

    def prompts(count: int) -> Iterator[list[int] | str]:
        for i in range(count):
            start = (i * 7919) % (len(pool) - args.input_len)
            yield "to be or not " * (args.input_len // 4) if args.text else pool[start : start + args.input_len]

    params = SamplingParams(max_tokens=args.output_len, seed=1)
    with RayLLM("tiny-qwen3", num_replicas=args.num_replicas, actor_options={"num_cpus": 0.1}, **settings) as llm:
        for _ in llm.generate_iter(prompts(500), params):
            pass
        before = sum(sum(own.values()) for own in llm.stats())
        for count in (args.num_requests // 4, args.num_requests):
            begin, cpu = perf_counter(), process_time()
            num_tokens = sum(len(output.token_ids) for output in llm.generate_iter(prompts(count), params))
            seconds, cpu = perf_counter() - begin, process_time() - cpu
            assert num_tokens == count * args.output_len
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            after = sum(sum(own.values()) for own in llm.stats())
            print(
                f"{count:,} requests of {args.input_len} + {args.output_len} tokens, {args.num_replicas} replicas: "
                f"{count / seconds:,.0f} requests/s, {cpu / count * 1e6:.0f} us of the driver's CPU and "
                f"{(after - before) / count:,.0f} bytes each; at most {memory:,.0f} MiB of memory"
            )
            before = after


if __name__ == "__main__":
    main()
