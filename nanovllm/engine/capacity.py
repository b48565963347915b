"""What a device can hold and compute: cache blocks in its memory, and tokens in the time of a step.

`runner` is the ModelRunner, which calls these functions when it starts.
"""

from time import perf_counter
from typing import Any

import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.engine.batch import Batch, decode_shape, dummy_prefill, largest_batch
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.step_result import SamplerInput

CPU_KV_CACHE_BYTES = 2**30  # the cache on a CPU, unless num_kvcache_blocks says otherwise
CUDA_RESERVE_BYTES = 512 * 2**20  # left for graphs, and for libraries that allocate without PyTorch's allocator
CPU_OPERATIONS_PER_S = 2e11  # of matrix products, roughly
MIN_MIXED_TOKENS = 64  # of a step that decodes and computes prompts, however slow the device is


def memory_in_use(device: torch.device) -> int:
    """Bytes that PyTorch has allocated on a CUDA device; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def affordable_blocks(runner: Any, memory_before: int) -> int:
    """How many cache blocks fit: on CUDA into our fraction of the memory, less what the largest step needs.

    `memory_before` is what was in use before the model was loaded.
    """
    config, block_bytes = runner.config, sum(tensor.nbytes for tensor in runner.cache_of(num_blocks=1))
    if runner.device.type == "cuda":
        peak = runner.warmup_model()
        free, total = torch.cuda.mem_get_info(runner.device)
        ours = int(total * config.gpu_memory_utilization) - (peak - memory_before) - runner.tp.num_bytes
        left = free - (peak - memory_in_use(runner.device)) - CUDA_RESERVE_BYTES  # other processes may use the rest
        available = max(0, min(ours, left))
        limit = f"gpu_memory_utilization={config.gpu_memory_utilization} of this GPU leaves"
    else:
        available = CPU_KV_CACHE_BYTES
        limit = "the budget on a CPU is"
    num_blocks = _min_of_ranks(runner, available // block_bytes)
    if num_blocks < config.max_blocks_per_seq:
        raise ValueError(
            f"max_model_len={config.max_model_len}: one sequence needs "
            f"{config.max_blocks_per_seq * block_bytes / 2**30:.2f} GiB of cache, and {limit} "
            f"{available / 2**30:.2f} GiB; lower max_model_len, or set num_kvcache_blocks"
        )
    return num_blocks


def largest_prefill(config: Config) -> ScheduledStep:
    """A step of as many tokens and sequences as the settings allow."""
    num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    length = min(config.max_num_batched_tokens // num_seqs, config.max_model_len - 1)
    return dummy_prefill(num_seqs, length, config.kvcache_block_size)


def num_tokens_within(runner: Any, milliseconds: float) -> int:
    """How many tokens of prompts the device computes in a time: measured on CUDA, and estimated on a CPU."""
    config, model = runner.config, runner.config.model_config
    if runner.device.type == "cuda":
        length = max(1, min(4096, config.max_num_batched_tokens // 2, config.max_model_len - 1))
        num_fitting = config.num_kvcache_blocks // -(-length // config.kvcache_block_size)
        num_seqs = min(2, num_fitting, config.max_num_seqs)
        for _ in range(2):  # the first run warms up
            begin = perf_counter()
            runner.run(dummy_prefill(num_seqs, length, config.kvcache_block_size)).wait()
        per_token = 1e3 * (perf_counter() - begin) / (num_seqs * length)
    else:
        per_token = 1e3 * model.num_hidden_layers * model.layer_operations / CPU_OPERATIONS_PER_S
    num_tokens = max(MIN_MIXED_TOKENS, int(milliseconds / per_token))
    num_tokens = _min_of_ranks(runner, num_tokens)  # all of them capture the same graphs
    # whole tiles of the matrix products, whose rows past the last token would be padding
    return num_tokens // 1024 * 1024 or num_tokens // 64 * 64


def _min_of_ranks(runner: Any, number: int) -> int:
    if runner.tp.size == 1:
        return number
    return -runner.tp.max_of_ranks(torch.tensor([-number], device=runner.device)).item()


@torch.inference_mode()
def compile_kernels(runner: Any) -> None:
    """Compile the kernels of the steps that graphs will contain, all at the same time. No kernel runs.

    Otherwise each would be compiled when it is first launched, one after the other. They change with powers of two of
    the number of tokens; a kernel that these steps lack is compiled at its first launch.
    """
    from nanovllm.engine.cuda_graph import capture_sizes, mixed_bounds  # not on a CPU
    from nanovllm.kernels.dependent_launch import compile_only

    config, model = runner.config, runner.model.model
    decodes = [decode_shape(size, config.max_blocks_per_seq) for size in capture_sizes(config.max_num_seqs)]
    chunks = mixed_bounds(config, runner.query_tile_size) if runner.backend.captures_chunks else []
    shapes = [x for x in decodes + chunks if x.num_tokens.bit_count() == 1 or x.num_tokens == config.max_num_seqs]
    buffer = torch.zeros(largest_batch(config), dtype=torch.int32, device=runner.device)

    def run_steps() -> None:
        for shape in shapes:
            _, x = runner.run_model(Batch.from_buffer(shape, buffer))
            # the graphs of decodes have the same numbers of samples as those of chunks
            runner.sample(SamplerInput(*(rows[:1] for rows in x)) if shape.has_chunks else x)
            runner.last_token_ids.zero_()  # no kernel has written token ids

    runner.allocate_kv_cache(16, num_layers=1)
    layers, model.layers = model.layers, first_layers_of_each_kind(model.layers)
    try:
        compile_only(run_steps)
    finally:
        model.layers = layers
        runner.allocate_kv_cache(0)


def first_layers_of_each_kind(layers: nn.ModuleList) -> nn.ModuleList:
    """As few layers, from the first on, as have every kind of layer after every kind that it follows."""
    kinds = [tuple(map(type, layer.modules())) for layer in layers]
    pairs = list(zip([None, *kinds], kinds))
    return layers[: 1 + max(map(pairs.index, set(pairs)))]


def warm_up_kernels(runner: Any) -> None:
    """Compile and load the kernels of short prefills; otherwise the first requests would wait for that."""
    config = runner.config
    max_length = min(config.max_num_batched_tokens, config.max_model_len - 1)
    for length in (1, 16, 32, 64, 128, 256, 512):
        runner.run(dummy_prefill(1, min(length, max_length), config.kvcache_block_size)).wait()
