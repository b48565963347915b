"""Latency through HTTP beside the engine's own.

`python tests/scripts/online_server.py --shape qwen3-8b --request-rate 8,24`

The requests are those of `bench.py --workload online`, an open loop: each is sent when it is due. First the engine
alone serves them, in a loop of `LLM.step`, then a server with the same settings. Not a test that pytest collects.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanovllm.benchmarks.arguments import each, integer, positive
from nanovllm.benchmarks.clients import NUM_TOKENS
from nanovllm.benchmarks.engines.nanovllm import step_nanovllm
from nanovllm.benchmarks.processes import run_in_process
from nanovllm.benchmarks.requests import TEMPERATURE, Request, Workloads
from nanovllm.benchmarks.results import Result
from nanovllm.benchmarks.servers import as_flags, running_server
from nanovllm.benchmarks.shapes import SHAPES, write_shape
from nanovllm.benchmarks.sweeps import online_sweep
from nanovllm.config import Config

USAGE = {"include_usage": True, "continuous_usage_stats": True}  # counts of tokens, as random ones may have no text


async def send(port: int, request: Request, begin: float) -> list[float]:
    """Wait until the request is due; the times of its tokens, in seconds from then."""
    body = dict(prompt=request.prompt, max_tokens=request.max_tokens, temperature=TEMPERATURE, top_k=0, top_p=1)
    body |= dict(ignore_eos=True, stream=True, stream_options=USAGE)
    content = json.dumps(body).encode()
    due = begin + request.arrival
    await asyncio.sleep(max(0.0, due - perf_counter()))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [b"POST /v1/completions HTTP/1.1", b"host: localhost", b"content-type: application/json"]
    lines += [b"connection: close", b"content-length: %d" % len(content), b"", content]
    writer.write(b"\r\n".join(lines))
    times: list[float] = []
    while data := await reader.readline():
        if found := NUM_TOKENS.search(data):
            times += [perf_counter() - due] * (int(found[1]) - len(times))
    writer.close()
    assert len(times) == request.max_tokens, (len(times), request.max_tokens)
    return times


async def send_all(port: int, requests: list[Request]) -> Result:
    begin = perf_counter()
    times = await asyncio.gather(*[send(port, request, begin) for request in requests])
    return Result(perf_counter() - begin, sum(map(len, times)), token_times=times)


def through_http(model: str, settings: dict, workloads: Workloads) -> dict[str, Result]:
    with running_server("nanovllm", ["serve", model, *as_flags(settings)]) as server:
        results = {}
        for name, (warm_up, requests) in workloads.items():
            asyncio.run(send_all(server.port, warm_up))
            results[name] = asyncio.run(send_all(server.port, requests))
        return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default="tiny-qwen3")
    model.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--request-rate", type=each(positive), default="8,16,24")
    parser.add_argument("--num-seqs", type=integer(1))
    parser.add_argument("--median-input-len", type=int, default=500)
    parser.add_argument("--median-output-len", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--without-engine", action="store_true", help="measure HTTP only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"device": args.device}
        if args.shape:
            args.model = str(Path(folder, args.shape))
            write_shape(args.shape, Path(args.model))
            settings["load_format"] = "dummy"
        workloads, panels = online_sweep(args, Config.create(args.model, settings))
        results = {}
        if not args.without_engine:
            results["engine alone"] = run_in_process(step_nanovllm, args.model, settings, workloads)
            for result in results["engine alone"].values():
                result.num_tokens = sum(map(len, result.token_times))
        results["through HTTP"] = through_http(args.model, settings, workloads)
    for panel in panels:
        panel.print(results)


if __name__ == "__main__":
    main()
