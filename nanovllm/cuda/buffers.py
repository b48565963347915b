"""Allocates the buffers for batches and results once, large enough for the largest step."""

from typing import NamedTuple

import torch

from nanovllm.batches.batch import Batch, DeviceBatch, HostBatch, largest_batch
from nanovllm.config import Config
from nanovllm.utils.double_buffer import DoubleBuffer


class StepBuffers(NamedTuple):
    """Pinned host memory for the batch and the results of one step, in int32 words."""

    batch: torch.Tensor
    results: torch.Tensor  # large enough for any ForwardOutput.results

    def results_like(self, on_device: torch.Tensor) -> torch.Tensor:
        return self.results[: on_device.numel()].view_as(on_device)


class Buffers(NamedTuple):
    """Host memory for the batches and results of two steps, and device memory for one batch."""

    host: DoubleBuffer[StepBuffers]
    device: torch.Tensor


def make_buffers(config: Config, device: torch.device) -> Buffers:
    size = largest_batch(config)
    words_per_seq = config.pooling.num_values if config.pooling else config.tokens_per_row + 1
    batches, results = host_memory(size, config.max_num_seqs * words_per_seq, device)
    on_device = torch.zeros(size, dtype=torch.int32, device=device)
    return Buffers(DoubleBuffer(*map(StepBuffers, batches, results)), on_device)


def to_device(batch: HostBatch, buffer: torch.Tensor) -> DeviceBatch:
    """Copy a batch asynchronously to the beginning of a device buffer."""
    on_device = Batch.from_buffer(batch.shape, buffer)
    on_device.buffer.copy_(torch.from_numpy(batch.buffer), non_blocking=True)
    return on_device


def host_memory(size: int, num_result_words: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate int32 memory for two steps: batches [2, size], and results [2, num_result_words].

    A sequence's results are up to `tokens_per_row` token ids, followed by their count. For pooling models, a sequence's
    results are the bits of a vector.
    """
    options = dict(dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    return torch.zeros(2, size, **options), torch.zeros(2, num_result_words, **options)
