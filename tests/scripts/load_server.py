"""Load on a server: `python tests/scripts/load_server.py --minutes 2`. Not a test that pytest collects.

Starts `nanovllm serve tiny-qwen3` on the CPU in a process of its own. 512 clients ask for greedy answers without a
pause, most of them streamed; a third of the requests are given up at random moments, and a tenth are invalid. Every
answer that was not given up must be that of `LLM.generate`, every invalid request must get its status, and in the end
the server must have no request and no block in use, as many file handles as after the first seconds, and as much memory
(within a tenth).
"""

import argparse
import asyncio
import json
import os
import random
import re
import socket
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter, sleep

os.environ["OMP_NUM_THREADS"] = "1"

from nanovllm import LLM, SamplingParams
from nanovllm.benchmarks.servers import Server, as_flags, running_server

ENGINE = dict(device="cpu", dtype="float32", kvcache_block_size=16, num_kvcache_blocks=512, max_num_seqs=256)
NUM_CASES = 192  # different requests
BAD_BODIES = [
    (b"{", 400),
    (b'{"prompt": "x", "temperature": -1}', 400),
    (b'{"prompt": "x", "top_p": 7}', 400),
    (b'{"prompt": [99999]}', 400),
    (b'{"prompt": "x", "n": 1000}', 400),
    (b'{"model": "gpt-4", "prompt": "x"}', 404),
    (b'{"prompt": "' + b"x " * 3_000_000 + b'"}', 413),
]


def make_cases(rng: random.Random) -> list[dict]:
    """Bodies of requests, with the expected text of each as "expected"."""
    bodies = []
    for i in range(NUM_CASES):
        speaker = rng.choice(["HAMLET", "KING RICHARD", "ROMEO", "QUEEN"])
        text = f"{speaker}.\n" + "".join(rng.choice("abcdefgh ,.") for _ in range(rng.choice([5, 40, 200])))
        tokens = rng.randint(8, 64)
        bodies.append(dict(prompt=text, temperature=0, max_tokens=tokens, ignore_eos=True, stream=i % 8 != 0))
    params = [SamplingParams(temperature=0, max_tokens=body["max_tokens"], ignore_eos=True) for body in bodies]
    with LLM("tiny-qwen3", **ENGINE) as llm:
        outputs = llm.generate([body["prompt"] for body in bodies], params, use_tqdm=False)
    return [body | {"expected": output.text} for body, output in zip(bodies, outputs)]


class Load:
    """All clients, and what they saw."""

    def __init__(self, port: int, cases: list[dict], seed: int):
        self.port, self.cases, self.rng = port, cases, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.first_token_seconds: list[float] = []
        self.num_tokens = 0
        self.mistakes: list[str] = []

    async def client(self, until: float) -> None:
        """One request after another."""
        while perf_counter() < until:
            if self.rng.random() < 0.1:
                await self.send_bad(*self.rng.choice(BAD_BODIES))
                continue
            case = self.rng.choice(self.cases)
            patience = self.rng.choice([0.01, 0.2, 1.0, 5.0]) * self.rng.random() if self.rng.random() < 1 / 3 else None
            content = json.dumps({name: value for name, value in case.items() if name != "expected"}).encode()
            try:
                status, text = await asyncio.wait_for(self.request(content), patience)
            except asyncio.TimeoutError:
                self.counts["given up"] += 1
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                self.mistakes.append(f"{case}: {error!r}")
            else:
                if status == 429:
                    self.counts["refused: 429"] += 1
                elif (status, text) == (200, case["expected"]):
                    self.counts["answered"] += 1
                else:
                    self.mistakes.append(f"{case}: status {status}, text {text!r}")

    async def send_bad(self, content: bytes, expected: int) -> None:
        try:
            status, text = await self.request(content)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            status, text = 413 if expected == 413 else 0, repr(error)  # while the body was still being sent
        self.counts[f"invalid: {status}"] += 1
        if status != expected:
            self.mistakes.append(f"{content[:80]!r}: status {status}, text {text!r}")

    async def request(self, content: bytes) -> tuple[int, str]:
        """Status and text of a completion."""
        begin = perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            lines = [b"POST /v1/completions HTTP/1.1", b"host: localhost", b"content-type: application/json"]
            lines += [b"connection: close", b"content-length: %d" % len(content), b"", content]
            writer.write(b"\r\n".join(lines))
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            status = int(head.split()[1])
            if "text/event-stream" not in head:
                data = json.loads(await reader.read())
                return status, data["choices"][0]["text"] if status == 200 else data["error"]["message"]
            text, done = [], False
            while size := int(await reader.readline(), 16):
                chunk = await reader.readexactly(size + 2)
                for line in chunk.split(b"\n"):
                    if line.startswith(b"data: [DONE]"):
                        done = True
                    elif line.startswith(b"data: "):
                        if not text:
                            self.first_token_seconds.append(perf_counter() - begin)
                        text.append(json.loads(line[6:])["choices"][0]["text"])
                        self.num_tokens += 1
            return (status, "".join(text)) if done else (0, "no [DONE]")
        finally:
            writer.transport.abort()

    async def run(self, num_clients: int, seconds: float) -> None:
        until = perf_counter() + seconds
        await asyncio.gather(*[self.client(until) for _ in range(num_clients)])


class Watch:
    """What a server uses."""

    def __init__(self, server: Server):
        self.process, self.port = server

    def processes(self) -> list[Path]:
        """The server and its fronts."""
        main = self.process.pid
        children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        return [Path("/proc", str(pid)) for pid in (main, *children)]

    def memory_mb(self) -> float:
        found = [re.search(r"VmRSS:\s+(\d+)", (folder / "status").read_text()) for folder in self.processes()]
        return sum(int(size[1]) for size in found) / 1024

    def num_handles(self) -> int:
        return sum(len([*(folder / "fd").iterdir()]) for folder in self.processes())

    def metric(self, name: str) -> float:
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
        return float(re.search(rf"^vllm:{name}{{.*}} (\S+)", text, re.M)[1])

    def state(self) -> dict[str, float]:
        """When nothing runs any more."""
        for _ in range(100):
            running = self.metric("num_requests_running") + self.metric("num_requests_waiting")
            if not running and not self.metric("kv_cache_usage_perc"):
                break
            sleep(0.1)
        sleep(0.5)  # connections that are closing
        return {
            "requests": running,
            "blocks in use, %": 100 * self.metric("kv_cache_usage_perc"),
            "file handles": self.num_handles(),
            "memory, MB": self.memory_mb(),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--clients", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-server-count", type=int, help="the number of fronts; default: the server's own")
    options = parser.parse_args()
    cases = make_cases(random.Random(options.seed))
    flags = as_flags(ENGINE | {"api_server_count": options.api_server_count})
    with running_server("nanovllm", ["serve", "tiny-qwen3", *flags]) as server:
        watch = Watch(server)
        load = Load(server.port, cases, options.seed)
        asyncio.run(load.run(options.clients, min(20.0, options.minutes * 15)))  # pools and buffers get their size
        before = watch.state()
        load = Load(server.port, cases, options.seed + 1)
        begin = perf_counter()
        asyncio.run(load.run(options.clients, options.minutes * 60))
        seconds = perf_counter() - begin
        after = watch.state()
        num_preempted = watch.metric("num_preemptions_total")
    status = server.process.returncode
    times = sorted(load.first_token_seconds)
    print(f"\n{options.clients} clients, {seconds / 60:.1f} minutes, {sum(load.counts.values())} requests")
    for name, count in sorted(load.counts.items()):
        print(f"  {name:32} {count:10,}")
    print(f"  {'wrong answers':32} {len(load.mistakes):10,}")
    print(f"  {'preemptions':32} {num_preempted:10,.0f}")
    print(f"  {'events a second':32} {load.num_tokens / seconds:10,.0f}")
    for p in (50, 99):
        print(f"  {f'first event, p{p}, s':32} {times[len(times) * p // 100]:10.2f}")
    for name, value in before.items():
        print(f"  {name + ', before and after':32} {value:10,.0f} {after[name]:10,.0f}")
    print(f"  {'exit status':32} {status:10}")
    for mistake in load.mistakes[:10]:
        print(mistake[:300])
    is_back = (
        after["requests"] == after["blocks in use, %"] == 0 and after["file handles"] <= before["file handles"] + 4
    )
    is_fine = is_back and after["memory, MB"] < before["memory, MB"] * 1.1 and not load.mistakes and status == 0
    print("fine" if is_fine else "NOT FINE")
    return not is_fine


if __name__ == "__main__":
    sys.exit(main())
