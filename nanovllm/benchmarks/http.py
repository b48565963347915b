"""Measures the workload `http`, in which each client waits for an answer before it sends its next request."""

import argparse
import json
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import nan
from multiprocessing.connection import wait
from statistics import mean
from string import ascii_lowercase
from typing import NamedTuple

from nanovllm.benchmarks import clients
from nanovllm.benchmarks.engines.vllm import vllm_settings
from nanovllm.benchmarks.processes import progress, report
from nanovllm.benchmarks.requests import Request, random_ids
from nanovllm.benchmarks.results import Result, Results, latency_ms
from nanovllm.benchmarks.servers import Server, Threads, as_flags, cpu_times, gpu_samples, running_server
from nanovllm.benchmarks.tables import number, print_table
from nanovllm.config import Config
from nanovllm.utils.cores import available_cores

HEADER = ["clients, tokens", "server", "tok/s", "requests/s", "first ms", "p99", "gap ms", "p99", "longest ms", "p99"]
HEADER += ["CPU %", "GPU %", "client %"]
LEAST_CPU = 5  # percent of a core; processes and threads that use less are not listed


class Load(NamedTuple):
    """A row of the table that the workload `http` prints.

    `kind` is "" for streamed completions, "whole" for completions that are not streamed, and "chat" for streamed chat
    answers.
    """

    num_clients: int
    input_len: int  # the length of a prompt, in tokens
    output_len: int
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.num_clients}x{self.input_len}/{self.output_len}" + (f"-{self.kind}" if self.kind else "")


# numbers of requests that take about 10 seconds on an H200, and about 1 second on a CPU
GPU_LOADS = {
    Load(1, 128, 256): 60,
    Load(64, 256, 256): 768,
    Load(256, 256, 256): 1024,
    Load(512, 128, 128): 2048,
    Load(512, 128, 128, "whole"): 4096,
    Load(256, 200, 256, "chat"): 1024,
    Load(256, 32, 8): 8192,
}
CPU_LOADS = {Load(1, 16, 32): 4, Load(4, 32, 16): 16, Load(4, 32, 16, "whole"): 16, Load(4, 50, 16, "chat"): 16}
NUM_ROUNDS = 4  # requests of each client, for other loads
Runs = dict[Load, tuple[list[bytes], list[bytes]]]  # warm-up requests and measured requests of each load


@dataclass
class LoadResult(Result):
    """`gpu` is the utilization of the busiest GPU, and `client` is the CPU time of the busiest client process.

    `gpu` and `client` are percentages of the elapsed time.
    """

    num_requests: int = 0
    threads: Threads = field(default_factory=dict)
    gpu: float = nan
    client: float = nan


def compare_servers(args: argparse.Namespace, settings: dict, config: Config) -> tuple[Results, list[RuntimeError]]:
    """Send the same requests to one server after another. Return the results, and the errors of servers that failed.

    A server fails if it does not start or if an answer is wrong. If a server fails, the results of its earlier loads
    are kept. If the first server fails, its error is raised.
    """
    commands = {
        "nanovllm": ("nanovllm", ["serve", args.model, *as_flags(settings), *args.server_flags]),
        "vllm": ("vllm.entrypoints.openai.api_server", as_flags(vllm_settings(args.model, settings))),
    }
    runs = {load: (warm_up, requests) for load, warm_up, requests in make_runs(args, config)}
    results: Results = {}
    errors = []
    for engine in ("nanovllm", *args.compare):
        results[engine] = {}
        try:
            run_loads(engine, commands[engine], runs, results[engine])
        except RuntimeError as error:
            if engine == "nanovllm":
                raise
            report(f"{engine} failed: {error}")
            errors.append(error)
    return results, errors


def run_loads(engine: str, command: tuple[str, list[str]], runs: Runs, results: dict[str, LoadResult]) -> None:
    """Start a server, send it the requests of each load, and add the results to `results`."""
    with progress(f"{engine}:"), running_server(*command) as server, ClientProcesses() as processes:
        for load, (warm_up, requests) in runs.items():
            with progress(f"{engine}: {load}"):
                try:
                    processes.run(server, load, warm_up)
                    results[str(load)] = processes.run(server, load, requests)
                except clients.AnswerError as error:
                    raise RuntimeError(f"{engine}, {load}: {error}") from error


class ClientProcesses:
    """Runs up to eight client processes.

    There is at most one client process per two cores, because the server needs the other cores.
    """

    def __enter__(self) -> "ClientProcesses":
        # -I, because files in this folder have the same names as other modules; a new session, so that Ctrl-C does not
        # reach the clients
        command = [sys.executable, "-I", clients.__file__]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            for _ in range(max(1, min(8, available_cores() // 2)))
        ]
        return self

    def __exit__(self, *_) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()

    def run(self, server: Server, load: Load, requests: list[bytes]) -> LoadResult:
        """Send the requests, and measure the answers. Raises AnswerError if an answer has a wrong number of tokens."""
        numbered, before = list(enumerate(requests)), cpu_times(server)
        step = min(len(self._processes), load.num_clients, len(requests))
        with gpu_samples() as gpu:
            for i, process in enumerate(self._processes[:step]):
                num_clients = len(range(i, load.num_clients, step))
                pickle.dump((server.port, numbered[i::step], num_clients, load.output_len), process.stdin)
                process.stdin.flush()
            waiting = [process.stdout for process in self._processes[:step]]
            parts = []
            while waiting:
                for output in wait(waiting):
                    parts.append(pickle.load(output))
                    waiting.remove(output)
                    if isinstance(parts[-1], str):
                        raise clients.AnswerError(parts[-1])
        begin, end = min(part[0] for part in parts), max(part[1] for part in parts)
        return LoadResult(
            end - begin,
            num_tokens=len(requests) * load.output_len,
            token_times=[times for part in parts for times in part[3]],
            num_requests=len(requests),
            threads=cpu_times(server, since=before),
            gpu=max((mean(of_gpu) for of_gpu in zip(*gpu)), default=nan),
            client=max(100 * part[2] / (end - begin) for part in parts),
        )


# -- requests ----------------------------------------------------------------------------------------------------------


def make_runs(args: argparse.Namespace, config: Config) -> Iterator[tuple[Load, list[bytes], list[bytes]]]:
    """Yield each load, its warm-up requests (one per client), and its measured requests."""
    from nanovllm.utils.loader import load_tokenizer

    known = CPU_LOADS if config.device == "cpu" else GPU_LOADS
    tokenizer = load_tokenizer(str(config.tokenizer))
    for load in args.clients or known:
        if load.input_len + load.output_len > config.max_model_len:
            raise RuntimeError(f"{load}: has more tokens than max_model_len={config.max_model_len}")
        if load.kind == "chat" and tokenizer.chat_template is None:
            report(f"{load}: left out, as the model has no chat template")
            continue
        settings = Request([], load.output_len, args.top_k, args.top_p).sampling_settings()
        if load.kind != "whole":
            settings |= {"stream": True, "stream_options": {"include_usage": True}}
        rng = random.Random(f"http {load} {args.seed}")
        num_words = max(1, round(load.input_len * 100 / len(tokenizer.encode(random_words(rng, 100)))))
        requests = []
        for _ in range(load.num_clients + (args.num_seqs or known.get(load, NUM_ROUNDS * load.num_clients))):
            if load.kind == "chat":
                messages = [{"role": "user", "content": random_words(rng, num_words)}]
                requests.append(post("/v1/chat/completions", settings | {"messages": messages}))
            else:
                prompt = random_ids(rng, load.input_len, config.model_config.vocab_size)
                requests.append(post("/v1/completions", settings | {"prompt": prompt}))
        yield load, requests[: load.num_clients], requests[load.num_clients :]


def random_words(rng: random.Random, num_words: int) -> str:
    return " ".join("".join(rng.choices(ascii_lowercase, k=rng.randint(2, 8))) for _ in range(num_words))


def post(path: str, body: dict) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    return "\r\n".join([*lines, f"content-length: {len(content)}", "", ""]).encode() + content


# -- results -----------------------------------------------------------------------------------------------------------


def print_results(results: Results) -> None:
    loads = next(iter(results.values()))
    rows = [row(load, engine, found[load]) for load in loads for engine, found in results.items() if load in found]
    print_table("closed loop: clients x tokens of a prompt / of its answer", HEADER, rows)
    print("\nfirst: until the first token; gap: between two arrivals of tokens; longest: gap of a request (medians and")
    print("99th percentiles). CPU: of the server, in percent of a core; client: of the busiest process of clients")
    print(f"\nprocesses of the server, and their threads, that use at least {LEAST_CPU}% of a core:")
    for load in loads:
        for engine, found in results.items():
            if load in found:
                print(f"  {load} {engine}: {'; '.join(busy(found[load])) or '-'}")


def row(load: str, engine: str, result: LoadResult) -> list[str]:
    times = [number(latency_ms(result, kind, p), 1) for kind in ("TTFT", "ITL", "longest gap") for p in (50, 99)]
    rates = [number(result.rate, 0), number(result.num_requests / result.seconds, 1)]
    cpu = sum(seconds for _, seconds in result.threads.values()) or nan
    shares = [100 * cpu / result.seconds, result.gpu, result.client]
    return [load, engine, *rates, *times, *(number(share, 0) for share in shares)]


def busy(result: LoadResult) -> list[str]:
    """Describe each busy process and its busy threads. Threads are numbered in the order of their creation."""
    shares: dict[int, list[tuple[str, float]]] = {}
    for (pid, _), (name, seconds) in sorted(result.threads.items()):
        shares.setdefault(pid, []).append((name, 100 * seconds / result.seconds))
    lines = []
    for threads in shares.values():
        if (whole := sum(share for _, share in threads)) >= LEAST_CPU:
            parts = [f"{name} {i}: {share:.0f}%" for i, (name, share) in enumerate(threads) if share >= LEAST_CPU]
            lines.append(f"{threads[0][0]} {whole:.0f}% ({', '.join(parts)})")
    return lines
