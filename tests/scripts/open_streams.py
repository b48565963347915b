"""Many streams at once: `python tests/scripts/open_streams.py --streams 2000`. Not a test that pytest collects.

Starts `nanovllm serve tiny-qwen3` on the CPU, opens all streams as fast as it can, and prints how the times to the
first token, the longest gaps between two pieces and the durations are distributed. Every stream must get all of its
tokens, and none may wait much longer than the others: the longest gap of any is at most five times the median of all.
With `--max-num-seqs` below the number of streams, the rest wait for their turn: their first tokens come late, and their
gaps must not be longer.
"""

import argparse
import asyncio
import json
import os
import sys
from time import perf_counter

os.environ["OMP_NUM_THREADS"] = "1"

from nanovllm.benchmarks.servers import as_flags, running_server

END = b"0\r\n\r\n"  # of a chunked body
MOST = 5  # times the median: the longest gap of any stream


class Stream(asyncio.Protocol):
    """One request, and when its pieces arrived. The data are read afterwards, so that the clients need little time."""

    def __init__(self, request: bytes):
        self.request, self.data, self.times = request, bytearray(), [perf_counter()]
        self.has_ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport) -> None:
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.data += data
        if b"data: " in data:
            self.times.append(perf_counter())
        if data.endswith(END):
            self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.has_ended.done():
            self.has_ended.set_result(None)

    def num_tokens(self) -> int:
        """How many tokens the answer has; 0 if it is not complete."""
        lines = [line for line in self.data.split(b"\n") if line.startswith(b"data: ")]
        is_whole = self.data.startswith(b"HTTP/1.1 200 ") and lines and lines[-1].startswith(b"data: [DONE]")
        return json.loads(lines[-2][6:])["usage"]["completion_tokens"] if is_whole else 0


def make_request(index: int, num_tokens: int) -> bytes:
    body = dict(prompt=f"HAMLET.\n{index} ", temperature=0, max_tokens=num_tokens, ignore_eos=True, stream=True)
    content = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def open_all(port: int, num_streams: int, num_tokens: int) -> list[Stream]:
    loop = asyncio.get_running_loop()
    make = lambda i: lambda: Stream(make_request(i, num_tokens))
    found = await asyncio.gather(
        *[loop.create_connection(make(i), "127.0.0.1", port) for i in range(num_streams)], return_exceptions=True
    )
    streams = [pair[1] for pair in found if not isinstance(pair, BaseException)]
    await asyncio.gather(*[stream.has_ended for stream in streams])
    return streams


def show(name: str, values: list[float]) -> None:
    values = sorted(values)
    parts = [f"{title} {values[int(q * (len(values) - 1))]:.2f}" for title, q in QUANTILES.items()]
    print(f"  {name:24} {', '.join(parts)}")


QUANTILES = {"least": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "most": 1.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--max-num-seqs", type=int, help="default: all streams run at once")
    parser.add_argument("--api-server-count", type=int, help="the number of fronts; default: the server's own")
    options = parser.parse_args()
    blocks = options.streams * (options.tokens // 16 + 3)
    engine = dict(device="cpu", dtype="float32", kvcache_block_size=16, num_kvcache_blocks=blocks)
    engine |= dict(max_num_seqs=options.max_num_seqs or options.streams, max_model_len=options.tokens + 64)
    flags = as_flags(engine | {"max_queued_requests": options.streams, "api_server_count": options.api_server_count})
    with running_server("nanovllm", ["serve", "tiny-qwen3", *flags]) as server:
        asyncio.run(open_all(server.port, 8, options.tokens))  # what is imported and compiled with the first requests
        streams = asyncio.run(open_all(server.port, options.streams, options.tokens))
    whole = [stream for stream in streams if stream.num_tokens() == options.tokens]
    longest = [max(b - a for a, b in zip(stream.times[1:], stream.times[2:])) for stream in whole]
    begin, end = min(stream.times[0] for stream in streams), max(stream.times[-1] for stream in streams)
    print(f"{options.streams} streams of {options.tokens} tokens, {len(whole)} complete; {end - begin:.1f} s")
    print(f"  {'tokens a second':24} {len(whole) * options.tokens / (end - begin):,.0f}")
    show("first token, s", [stream.times[1] - stream.times[0] for stream in whole])
    show("longest gap, s", longest)
    show("pieces of an answer", [len(stream.times) - 1.0 for stream in whole])
    show("from first to last, s", [stream.times[-1] - stream.times[1] for stream in whole])
    is_fine = len(whole) == options.streams and max(longest) <= MOST * sorted(longest)[len(longest) // 2]
    print("fine" if is_fine else "NOT FINE")
    return not is_fine


if __name__ == "__main__":
    sys.exit(main())
