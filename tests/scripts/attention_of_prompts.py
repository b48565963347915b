"""How fast the attention of prompts is: the kernel for Hopper and the one for any GPU, in turn, in CUDA graphs.

`python tests/scripts/attention_of_prompts.py --heads 16 --kv-heads 8` prints microseconds and TFLOP/s of one layer, the
median of six runs of each. A pair of a query and a key that it sees takes 4 * head_dim operations for each head. Chunks
of a step are joined by "+", and "8000:10048" computes the tokens from 8,000 on. Caches are in bfloat16, and blocks lie
in random order.
"""

import argparse
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.attention.triton import query_tiles
from nanovllm.kernels import ops
from nanovllm.kernels.attention import prefill_attention
from nanovllm.layers.attention import KVCache

Chunk = tuple[int, int]  # the first token of a sequence that is computed, and the end


def chunks_of(text: str) -> list[Chunk]:
    bounds = [[int(x) for x in chunk.split(":")] for chunk in text.split("+")]
    return [(0, x[0]) if len(x) == 1 else (x[0], x[1]) for x in bounds]


def inputs(args: argparse.Namespace, chunks: list[Chunk]) -> tuple[torch.Tensor, ...]:
    """What attention reads but the tiles of queries: see `ops.prefill_attention`."""
    ends = [end for _, end in chunks]
    num_new, num_blocks = [b - a for a, b in chunks], [-(-end // args.block_size) for end in ends]
    tables = ints(torch.zeros(len(chunks), max(num_blocks)))
    for table, ids in zip(tables, torch.randperm(sum(num_blocks)).split(num_blocks), strict=True):
        table[: len(ids)] = ids
    shape = sum(num_blocks), args.block_size, args.kv_heads, args.head_dim
    q_and_caches = ((sum(num_new), args.heads, args.head_dim), shape, shape)
    q, k_cache, v_cache = (torch.randn(x, dtype=torch.bfloat16, device="cuda") for x in q_and_caches)
    return q, KVCache((k_cache, v_cache)), ints(F.pad(torch.tensor(num_new).cumsum(0), (1, 0))), ints(ends), tables


def ints(values) -> torch.Tensor:
    return torch.as_tensor(values, device="cuda").int()


def capture(is_hopper: bool, args: argparse.Namespace, chunks: list[Chunk], given: tuple, num_calls: int) -> Any:
    """A graph of so many calls of either kernel, which reads the tensors `given`."""
    prefill_attention.has_hopper_kernels = lambda: is_hopper
    size = ops.query_tile_size(args.heads // args.kv_heads, args.head_dim, torch.bfloat16)
    tiles, out = ints(query_tiles(chunks, 0, size)), torch.empty_like(given[0])
    ops.prefill_attention(*given, tiles, out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            ops.prefill_attention(*given, tiles, out)
    return graph, tiles, out


def seconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def main(args: argparse.Namespace) -> None:
    if not prefill_attention.has_hopper_kernels():
        raise SystemExit("this needs a Hopper GPU, and a version of Triton that hopper_prefill.py was tried with")
    print(f"{'chunks':>24}  {'any GPU':>20}  {'Hopper':>20}")
    for text in args.chunks:
        chunks = chunks_of(text)
        operations = sum(2 * args.heads * args.head_dim * (b * (b + 1) - a * (a + 1)) for a, b in chunks)
        num_calls = max(2, int(3e-3 / (operations / 5e14 + 1e-5)))
        given = inputs(args, chunks)
        captured = {is_hopper: capture(is_hopper, args, chunks, given, num_calls) for is_hopper in (False, True)}
        times: dict[bool, list[float]] = {False: [], True: []}
        for is_warm in [False] + [True] * 6:
            for is_hopper, (graph, *_) in captured.items():
                taken = seconds(graph) / num_calls
                if is_warm:
                    times[is_hopper].append(taken)
        cells = (f"{1e6 * median(x):9,.1f} us {operations / median(x) / 1e12:7.0f}" for x in times.values())
        print(f"{text:>24}  {'  '.join(cells)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=256)
    default = ["512", "1024", "2048", "4096", "4096+4096+4096+4096", "16384", "32768", "8000:10048", "30000:30512"]
    parser.add_argument("--chunks", nargs="+", default=default)
    main(parser.parse_args())
