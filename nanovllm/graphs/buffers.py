"""Memory that is allocated once, for the largest step: of batches on the host and on the device, and of token ids."""

from typing import NamedTuple

import torch

from nanovllm.config import Config
from nanovllm.engine.batch import MAX_CHUNKS, BatchShape
from nanovllm.engine.features import FEATURES
from nanovllm.utils.double_buffer import DoubleBuffer


class StepBuffers(NamedTuple):
    """Pinned host memory of one step: int32 words of its batch and the token ids that it samples."""

    batch: torch.Tensor
    token_ids: torch.Tensor


class Buffers(NamedTuple):
    """The batches and token ids of two steps on the host, and one batch on the device."""

    host: DoubleBuffer[StepBuffers]
    device: torch.Tensor


def make_buffers(config: Config, device: torch.device) -> Buffers:
    size = largest_batch(config)
    options = dict(dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    make = lambda: StepBuffers(torch.zeros(size, **options), torch.zeros(config.max_num_seqs, **options))
    return Buffers(DoubleBuffer(make(), make()), torch.zeros(size, dtype=torch.int32, device=device))


def largest_batch(config: Config) -> int:
    """Words in the buffer of the largest possible step."""
    B, T, W = config.max_num_seqs, config.max_num_batched_tokens, config.max_blocks_per_seq
    largest = BatchShape(
        num_tokens=max(T, B),
        num_seqs=B + MAX_CHUNKS,
        num_decodes=0,
        num_samples=B + MAX_CHUNKS,
        max_blocks_per_seq=W,
        max_seqlen_q=T,
        num_query_tiles=T + B + MAX_CHUNKS,
        num_sampled=B,
        num_new_requests=B,
        num_block_copies=B,
    )
    return largest.size + sum(feature.load().max_words(config) for feature in FEATURES.values())
