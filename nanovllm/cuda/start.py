"""Starts a rank on CUDA: compiles kernels, measures memory and time, and captures graphs.

In the functions of this file, `runner` is a CUDAModelRunner that has loaded its model.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import chain, product
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import nn

from nanovllm.batches.batch import Batch
from nanovllm.config import Config
from nanovllm.cuda.draft_graphs import DraftGraphs
from nanovllm.cuda.graphs import DecodeGraphs, MixedGraphs, decode_shapes, graph_shapes, max_seqs_of
from nanovllm.engine.forward_output import SamplerInput
from nanovllm.engine.scheduled_step import ScheduledSequence, ScheduledStep
from nanovllm.engine.sequence import Sequence

if TYPE_CHECKING:
    from nanovllm.cuda.runner import CUDAModelRunner

RESERVE_BYTES = 512 * 2**20  # for graphs, and for libraries that bypass PyTorch's allocator


def has_graphs(runner: "CUDAModelRunner") -> bool:
    parts = runner.backend, *runner.model.modules()
    return not runner.config.enforce_eager and all(getattr(part, "uses_cuda_graphs", True) for part in parts)


def warm_up_rest(runner: "CUDAModelRunner") -> None:
    """After graphs are captured, compile the remaining kernels, measure drafts, and clear the request tables."""
    if runner.mixed_graphs is None:
        warm_up_kernels(runner)
    for length in warm_up_lengths(runner.config):
        catch_up_drafter(runner, 1, length)
    if runner.config.speculative_config is not None:
        measure_drafts(runner)
    for table in runner.tables:
        table.zero_()


@contextmanager
def threads_in_turn() -> Iterator[None]:
    """Within a `with` block, let a waiting thread get the GIL after 0.1 ms instead of 5 ms.

    The tokenizer's imports hold the GIL for more than a second. Until the imports are complete, a thread that calls
    CUDA or reads a file must wait to get the GIL back.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def hash_compiler() -> None:
    """Make Triton hash its own files (400 MB) in advance. The keys of Triton's cache depend on the hash."""
    with suppress(ImportError):  # no Triton, or an old version, which hashes for the first kernel
        from triton.runtime.cache import triton_key

        triton_key()


def memory_left(runner: "CUDAModelRunner", memory_before: int) -> int:
    """Return how many bytes the KV cache may use.

    The engine may use the fraction `gpu_memory_utilization` of the device's memory. The KV cache gets the part of the
    engine's memory that the largest step does not need, but at most the memory that is free during that step.
    """
    config = runner.config
    peak = peak_of_largest_step(runner)
    free, total = torch.cuda.mem_get_info(runner.device)
    uncounted = runner.tp.num_bytes + sum(arena.num_bytes for arena in runner.sleepers.values())  # not in `peak`
    ours = int(total * config.gpu_memory_utilization) - (peak - memory_before) - uncounted
    # other processes may use some of the device's memory
    left = free - (peak - torch.cuda.memory_allocated(runner.device)) - RESERVE_BYTES
    return max(0, min(ours, left))


def peak_of_largest_step(runner: "CUDAModelRunner") -> int:
    """Run the largest prefill. Return the peak of allocated memory in bytes, without the KV cache."""
    step = largest_prefill(runner.config)
    num_blocks = sum(len(row.seq.block_table) for row in step.chunks)
    runner.allocate_kv_cache(num_blocks, num_layers=1)
    torch.cuda.reset_peak_memory_stats(runner.device)
    runner.run(step).wait()
    catch_up_drafter(runner, len(step.chunks), step.chunk_lens[0])
    tensors = (tensor for found in runner.caches.values() for tensor in found)
    peak = torch.cuda.max_memory_allocated(runner.device) - sum(tensor.nbytes for tensor in tensors)
    free_kv_cache(runner)
    return peak


def free_kv_cache(runner: "CUDAModelRunner") -> None:
    """Free the KV cache before a new KV cache is allocated."""
    for layer in chain(*runner.cache_groups.values()):
        layer.cache = None
    runner.caches = {}
    torch.cuda.empty_cache()


def largest_prefill(config: Config) -> ScheduledStep:
    """Return a prefill step with as many tokens and sequences as the settings allow."""
    num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    length = min(config.max_num_batched_tokens // num_seqs, config.max_model_len - 1)
    return dummy_prefill(num_seqs, length, config.kvcache_block_size, config.tokens_per_row)


def dummy_prefill(num_seqs: int, length: int, block_size: int, tokens_per_row: int = 1) -> ScheduledStep:
    """Return a prefill step for warm-up and tests, with `num_seqs` prompts of `length` tokens.

    The prompts share no blocks.
    """
    per_seq = -(-length // block_size)
    step = ScheduledStep(tokens_per_row=tokens_per_row)
    for i in range(num_seqs):
        seq = Sequence([0] * length, request_id=i, noise_seed=i, max_len=length + 1)
        seq.block_table = list(range(i * per_seq, (i + 1) * per_seq))
        seq.req_index = i
        step.chunks.append(ScheduledSequence(seq, 0, length))
        step.state_rows.append(i)
        step.add_sampled(seq)
    return step


def milliseconds_per_token(runner: "CUDAModelRunner") -> float:
    config = runner.config
    length = max(1, min(4096, config.max_num_batched_tokens // 2, config.max_model_len - 1))
    num_fitting = config.num_kvcache_blocks // -(-length // config.kvcache_block_size)
    num_seqs = min(2, num_fitting, config.max_num_seqs)
    seconds = []
    for _ in range(4):  # the first run warms up; other runs may be slow because of the GIL
        step = dummy_prefill(num_seqs, length, config.kvcache_block_size, config.tokens_per_row)
        begin = perf_counter()
        runner.run(step).wait()
        seconds.append(perf_counter() - begin)
    return 1e3 * min(seconds) / (num_seqs * length)


@torch.inference_mode()
def compile_kernels(runner: "CUDAModelRunner") -> None:
    """Compile the kernels of the captured steps and of the longest step, in parallel. No kernel runs.

    The choice of kernels for n tokens may change when n or n - 128 exceeds a power of two. Kernels that are not
    compiled here are compiled at their first launch.
    """
    from nanovllm.kernels.launch.dependent_launch import compile_only

    config = runner.config
    decodes, chunks = decode_shapes(config), []
    if captures_chunks(runner):
        chunks = graph_shapes(config, runner.backend)
    rows = [
        (shape, shape.num_tokens // (1 if shape.has_chunks else shape.tokens_per_row)) for shape in decodes + chunks
    ]
    shapes = [shape for shape, n in rows if n.bit_count() == 1 or n in (144, 160, 192, config.max_num_seqs)]
    if chunks and (most := config.max_num_batched_tokens) > chunks[-1].num_tokens:
        arrays = runner.backend.array_shapes(most, chunks[0].num_seqs)
        shapes.append(chunks[0]._replace(num_tokens=most, max_seqlen_q=most, backend_shapes=arrays))
    buffer, drafter = runner.buffers.device, runner.features["spec_decode"].drafter

    def run_steps() -> None:
        for shape in shapes:
            _, x = runner.run_batch(Batch.from_buffer(shape, buffer))
            # with chunks, sample only one row: the decode shapes already cover all numbers of sampled rows
            first = SamplerInput(*(rows[: shape.tokens_per_row] for rows in x))._replace(req_indices=x.req_indices[:1])
            runner.sample_and_accept(first if shape.has_chunks else x)
            if drafter is not None and shape.tokens_per_row > 1 and not shape.has_chunks:
                drafter.draft_chains(
                    *x.req_indices.new_zeros(2, len(x.req_indices)), num_steps=config.tokens_per_row - 1
                )

    runner.allocate_kv_cache(16, num_layers=1)
    try:
        with few_layers(runner)():
            compile_only(run_steps)
    finally:
        free_kv_cache(runner)


def measure_drafts(runner: "CUDAModelRunner") -> None:
    from nanovllm.spec_decode.proposer import Drafts
    from nanovllm.spec_decode.speculative_config import StepCost  # imported lazily, because few engines draft tokens

    config, settings, k = runner.config, runner.config.speculative_config, runner.config.tokens_per_row
    most = min(max_seqs_of(config, k), config.num_kvcache_blocks, config.max_num_batched_tokens)
    sizes = *(n for n in (1, 2, 8, 32, 128) if n < most), most
    length = max(
        1, min(64, config.max_num_batched_tokens // most, config.kvcache_block_size, config.max_model_len // 2)
    )
    num_steps = max(1, min(4, (config.max_model_len - length) // k - 1))  # a sequence may grow by k tokens in each step
    times: dict[int, list[float]] = {1: [], k: []}
    for n, (width, found) in product(sizes, times.items()):
        prompts = dummy_prefill(n, length, config.kvcache_block_size)
        for i, seq in enumerate(prompts.sampled_seqs):
            seq.feature_state["spec_decode"] = Drafts([*range(i, i + k - 1)])  # different tokens for different experts
        step = ScheduledStep()
        step.decode([ScheduledSequence(seq, length, length + width) for seq in prompts.sampled_seqs])
        seconds = []
        for _ in range(3):  # in the first run, the drafter catches up and kernels are loaded
            runner.run(prompts).wait()
            begin, pending = perf_counter(), []
            for _ in range(num_steps):
                pending.append(runner.run(step))
                if len(pending) > 1:
                    pending.pop(0).wait()  # one step runs while the next is launched
            pending[0].wait()
            seconds.append(perf_counter() - begin)
        found.append(min(seconds) / num_steps)
    config.resolve(speculative_config=replace(settings, step_cost=StepCost(sizes, *map(tuple, times.values()))))


def captures_chunks(runner: "CUDAModelRunner") -> bool:
    """Return whether CUDA graphs can contain steps with chunks of prompts."""
    layers = chain(*runner.cache_groups.values())
    return runner.backend.captures_chunks and all(getattr(layer, "captures_chunks", True) for layer in layers)


def few_layers(runner: "CUDAModelRunner") -> Callable[[], AbstractContextManager]:
    """Return a function that opens a context in which the model has just enough layers to compile all kernels."""
    model = getattr(runner.model.model, "language_model", runner.model.model)
    layers, few = model.layers, first_layers_of_each_kind(model.layers)

    @contextmanager
    def context() -> Iterator[None]:
        model.layers = few
        try:
            yield
        finally:
            model.layers = layers

    return context


def first_layers_of_each_kind(layers: nn.ModuleList) -> nn.ModuleList:
    """Return the shortest prefix of `layers` that contains every pair of adjacent layer kinds."""
    kinds = [tuple(map(type, layer.modules())) for layer in layers]
    pairs = list(zip([None, *kinds], kinds))
    return layers[: 1 + max(map(pairs.index, set(pairs)))]


def warm_up_kernels(runner: "CUDAModelRunner") -> None:
    """Compile and load the kernels of short prefills, so that the first requests do not wait for compilation."""
    for length in warm_up_lengths(runner.config):
        runner.run(dummy_prefill(1, length, runner.config.kvcache_block_size, runner.config.tokens_per_row)).wait()


@torch.inference_mode()
def catch_up_drafter(runner: "CUDAModelRunner", num_seqs: int, length: int) -> None:
    """If there is a drafter, compute the drafter's first `length` rows for each of the first `num_seqs` requests."""
    if (drafter := runner.features["spec_decode"].drafter) is not None:
        req_indices = torch.arange(num_seqs, device=runner.device)
        drafter.compute_chunks(req_indices, 0 * req_indices, 0 * req_indices + length)


def warm_up_lengths(config: Config) -> list[int]:
    max_length = min(config.max_num_batched_tokens, config.max_model_len - 1)
    return [min(length, max_length) for length in (1, 16, 32, 64, 128, 256, 512)]


@torch.inference_mode()
def capture_graphs(runner: "CUDAModelRunner") -> None:
    """Capture graphs for decode steps, for the drafter, and for short steps with chunks."""
    config, pool, buffer = runner.config, torch.cuda.graph_pool_handle(), runner.buffers.device
    drafter = runner.features["spec_decode"].drafter
    # with a drafter, all layers run, because draft heads read hidden states of later layers
    rest = pool, few_layers(runner) if drafter is None else nullcontext
    runner.graphs = DecodeGraphs(config, buffer, runner.forward, *rest)
    if drafter is not None:
        graphs = DraftGraphs(config, drafter, runner.pad_req_index, pool)
        drafter.run, drafter.run_chunks = graphs.run, graphs.run_chunks
    if captures_chunks(runner):
        shapes = graph_shapes(config, runner.backend)
        parts = runner.run_batch, runner.sample_and_accept
        runner.mixed_graphs = MixedGraphs(shapes, config.max_num_seqs, buffer, runner.pad_req_index, *parts, *rest)
