"""Everything that one step needs, as one flat int32 buffer with named views.

The host turns the scheduler's counts into arrays here. The buffer then crosses to the device in a single copy, and the
same views are taken of the copy. What runs on the device knows of no sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import lru_cache
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.new_requests import fill_new_requests
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.kernels.sampling_columns import WIDTH
from nanovllm.layers.logits import mask_of, mask_width
from nanovllm.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASES, early_stops

MAX_CHUNKS = 32  # of a step that a CUDA graph computes
VIEW_ALIGNMENT = 4  # words, which are 16 bytes: Triton compiles another kernel for an address that is not aligned so

Array = TypeVar("Array", np.ndarray, torch.Tensor)
Dims = tuple[int, ...]


class BatchShape(NamedTuple):
    """The numbers that determine the layout of a Batch."""

    num_tokens: int
    num_seqs: int
    num_decodes: int  # of the sequences, those that come first and have one token each
    num_samples: int  # rows that get a token
    max_blocks_per_seq: int  # the width of the block tables
    max_seqlen_q: int = 1
    num_query_tiles: int = 0
    is_padded: bool = False  # whether these are upper bounds, in a step with chunks; the real numbers are on the device

    num_sampled: int = 0  # of the samples, those that are not padding, in steps with chunks
    num_new_requests: int = 0  # sampled for the first time since they were admitted
    num_biases: int = 0  # entries, over all new requests
    num_block_copies: int = 0  # cache blocks that sequences no longer share, copied before the forward pass
    num_logprobs: int = 0  # tokens whose log-probabilities are requested
    num_masks: int = 0  # sampled sequences whose masks of allowed token ids are new
    mask_width: int = 0  # words of a mask
    num_bad_words: int = 0  # over all new requests

    @property
    def has_chunks(self) -> bool:
        """Whether there are tokens of prompts, and not decodes alone."""
        return self.num_seqs > self.num_decodes

    @property
    def bounds(self) -> tuple[int, ...]:
        """The first group of fields, by which a CUDA graph is found."""
        return self[: self._fields.index("num_sampled")]

    @property
    def size(self) -> int:
        """Words in the buffer."""
        return _layout(self)[1]


def _view(dims: Callable[[BatchShape], Dims], chunks_only: bool = False) -> Any:
    return field(default=None, metadata={"dims": dims, "chunks_only": chunks_only})


@dataclass(slots=True, eq=False)
class Batch(Generic[Array]):
    """The int32 arrays of one step: numpy on the host, torch on the device. Each field states its shape.

    What depends on prompts is None in steps that only decode: their input ids are on the device already, and so are
    the sampling parameters of their requests (see RequestTable). The views whose shapes depend on BatchShape.bounds
    come first: CUDA graphs read these and no others.
    """

    shape: BatchShape
    buffer: Array

    req_indices: Array = _view(lambda s: (s.num_samples,))  # row of each sampled request in the tables on the device
    positions: Array = _view(lambda s: (s.num_tokens,))
    slot_mapping: Array = _view(lambda s: (s.num_tokens,))  # cache slot of a token's key and value; -1: do not store
    context_lens: Array = _view(lambda s: (s.num_seqs,))  # tokens to attend to, this step's included
    block_tables: Array = _view(lambda s: (s.num_seqs, s.max_blocks_per_seq))

    input_ids: Array = _view(lambda s: (s.num_tokens,), chunks_only=True)  # those of decodes are on the device
    cu_seqlens_q: Array = _view(lambda s: (s.num_seqs + 1,), chunks_only=True)
    logits_indices: Array = _view(lambda s: (s.num_samples,), chunks_only=True)  # the tokens that are sampled, and
    sampled_rows: Array = _view(lambda s: (s.num_samples,), chunks_only=True)  # their sequences
    num_decodes: Array = _view(lambda s: (1,), chunks_only=True)  # for CUDA graphs, whose shape has an upper bound
    query_tiles: Array = _view(lambda s: (s.num_query_tiles, 2), chunks_only=True)  # of attention; see Context
    params: Array = _view(lambda s: (s.num_new_requests, WIDTH), chunks_only=True)  # new requests are sampled last
    bias_slots: Array = _view(lambda s: (s.num_biases,), chunks_only=True)  # in the flattened table of all requests
    bias_ids: Array = _view(lambda s: (s.num_biases,), chunks_only=True)
    bias_bits: Array = _view(lambda s: (s.num_biases,), chunks_only=True)  # of float32 numbers
    bad_word_slots: Array = _view(lambda s: (s.num_bad_words,), chunks_only=True)
    bad_words: Array = _view(lambda s: (s.num_bad_words, MAX_BAD_WORD_TOKENS), chunks_only=True)  # -1 fills the front

    mask_indices: Array = _view(lambda s: (s.num_masks,))  # rows of the table of masks on the device
    masks: Array = _view(lambda s: (s.num_masks, s.mask_width))  # a bit for each token id
    block_copies: Array = _view(lambda s: (2, s.num_block_copies))  # cache blocks to copy from, and to copy to
    logprob_requests: Array = _view(lambda s: (s.num_logprobs, 4))  # see features.logprobs.LogprobRequest

    @property
    def new_req_indices(self) -> Array:
        """[new requests]: the last of `req_indices` but the padding."""
        end = self.shape.num_sampled
        return self.req_indices[end - self.shape.num_new_requests : end]

    @classmethod
    def from_buffer(cls, shape: BatchShape, buffer: Array) -> "Batch[Array]":
        """The views of a buffer that may be longer than the batch."""
        layout, size = _layout(shape)
        views = {name: buffer[begin:end].reshape(dims) for name, begin, end, dims in layout}
        return cls(shape, buffer[:size], **views)

    def to(self, device_buffer: torch.Tensor) -> "Batch[torch.Tensor]":
        """This host batch in `device_buffer`; on CUDA the copy is asynchronous if the host's memory is pinned."""
        batch = Batch.from_buffer(self.shape, device_buffer)
        batch.buffer.copy_(torch.from_numpy(self.buffer), non_blocking=True)
        return batch


HostBatch = Batch[np.ndarray]
DeviceBatch = Batch[torch.Tensor]
VIEWS = [f for f in fields(Batch) if "dims" in f.metadata]


@lru_cache(maxsize=1024)
def _layout(shape: BatchShape) -> tuple[list[tuple[str, int, int, Dims]], int]:
    """Name, begin, end and shape of each view, in words of the buffer; and the size of the buffer."""
    views, begin = [], 0
    for view in VIEWS:
        if shape.has_chunks or not view.metadata["chunks_only"]:
            dims = view.metadata["dims"](shape)
            views.append((view.name, begin, begin + prod(dims), dims))
            begin += -(-prod(dims) // VIEW_ALIGNMENT) * VIEW_ALIGNMENT
    return views, begin


def largest_batch(config: Config) -> int:
    """Words in the buffer of the largest possible step."""
    B, T, W = config.max_num_seqs, config.max_num_batched_tokens, config.max_blocks_per_seq
    return BatchShape(
        num_tokens=max(T, B),
        num_seqs=B + MAX_CHUNKS,
        num_decodes=0,
        num_samples=B + MAX_CHUNKS,
        max_blocks_per_seq=W,
        max_seqlen_q=T,
        num_query_tiles=T + B + MAX_CHUNKS,
        num_sampled=B,
        num_new_requests=B,
        num_biases=B * MAX_BIASES,
        num_block_copies=B,
        num_logprobs=T + B,
        num_masks=B,
        mask_width=mask_width(config.model_config.vocab_size),
        num_bad_words=B * MAX_BAD_WORDS,
    ).size


def decode_shape(num_seqs: int, max_blocks_per_seq: int, **extras: int) -> BatchShape:
    """Of a step that only decodes; `extras` are the sizes of arrays that are empty in most steps."""
    return BatchShape(
        num_tokens=num_seqs,
        num_seqs=num_seqs,
        num_decodes=num_seqs,
        num_samples=num_seqs,
        max_blocks_per_seq=max_blocks_per_seq,
        num_sampled=num_seqs,
        **extras,
    )


def prepare_decode(
    step: ScheduledStep, buffer: np.ndarray, block_size: int, num_rows: int, max_blocks_per_seq: int, pad_req_index: int
) -> HostBatch:
    """A step that only decodes, with `num_rows`. The rows past the step's own are padding: empty sequences that store
    nothing, and whose samples are dropped.
    """
    logprobs = _logprob_requests(step)
    masks = {seq.req_index: seq.constraint.mask for seq in step.constrained}
    shape = decode_shape(num_rows, max_blocks_per_seq, **_sizes_of_extras(step, logprobs, masks))
    batch = Batch.from_buffer(shape, buffer)
    _fill_rows(batch, step)
    _fill(batch.positions, step.context_lens - 1, padding=0)
    _fill_slots(batch, np.arange(step.num_decodes), block_size)
    _fill(batch.req_indices, step.req_indices, pad_req_index)
    _fill_extras(batch, step, logprobs, masks)
    return batch


def prepare_mixed(
    step: ScheduledStep,
    buffer: np.ndarray,
    block_size: int,
    query_tile_size: int,
    eos_token_ids: frozenset[int],
    vocab_size: int,
    bounds: BatchShape | None = None,
    pad_req_index: int = 0,
) -> HostBatch:
    """A step with chunks of prompts, which may also decode; padded to `bounds` if they are given."""
    n = step.num_decodes
    lengths = np.array([1] * n + [end - start for _, start, end in step.chunks])
    ends = np.cumsum(lengths)  # [B], into the flat tokens of the step
    tiles = query_tiles(lengths, n, query_tile_size)
    B, T, S = len(lengths), int(ends[-1]), len(step.sampled_seqs)
    logprobs = _logprob_requests(step)
    new = step.sampled_seqs[n:]  # every decode is sampled, and comes first
    limited = [seq for seq in new if seq.params.allowed_token_ids is not None]
    masks = {seq.req_index: mask_of(seq.params.allowed_token_ids, vocab_size) for seq in limited}
    masks |= {seq.req_index: seq.constraint.mask for seq in step.constrained}  # which allow these ids only, too
    stop_ids = [sorted(early_stops(seq.params, eos_token_ids)) for seq in new]
    if bounds is None:
        max_blocks_per_seq = max(len(row.seq.block_table) for row in step.rows)
        bounds = BatchShape(T, B, n, S, max_blocks_per_seq, int(lengths.max()), len(tiles))
    shape = bounds._replace(
        num_sampled=S,
        num_new_requests=len(new),
        num_biases=sum(len(seq.params.logit_bias or ()) for seq in new) + sum(map(len, stop_ids)),
        num_bad_words=sum(len(seq.bad_words) for seq in new),
        **_sizes_of_extras(step, logprobs, masks),
    )
    batch = Batch.from_buffer(shape, buffer)
    batch.num_decodes[:] = n
    batch.cu_seqlens_q[0] = 0
    _fill(batch.cu_seqlens_q[1:], ends, padding=T)
    _fill(batch.query_tiles, tiles, padding=-1)
    _fill_rows(batch, step)
    batch.input_ids[:n] = batch.input_ids[T:] = 0
    for (seq, start, end), last in zip(step.chunks, ends[n:].tolist()):
        batch.input_ids[last - (end - start) : last] = seq.token_ids[start:end]
    _fill(batch.positions, np.arange(T) + np.repeat(batch.context_lens[:B] - ends, lengths), padding=0)
    _fill_slots(batch, np.repeat(np.arange(B), lengths), block_size)
    _fill(batch.req_indices, [*step.req_indices, *(seq.req_index for seq in new)], pad_req_index)
    _fill(batch.sampled_rows, step.sampled_rows, padding=0)
    _fill(batch.logits_indices, ends[step.sampled_rows] - 1, padding=0)
    fill_new_requests(batch, new, stop_ids)
    _fill_extras(batch, step, logprobs, masks)
    return batch


def query_tiles(lengths: np.ndarray, num_decodes: int, size: int) -> np.ndarray:
    """The tiles [N, 2] of attention's `query_tiles`, by the rows' numbers of new tokens. Of each row, those with the
    most keys come first.
    """
    if not size:
        return np.empty((0, 2), np.int32)
    counts = -(-lengths[num_decodes:] // size)  # tiles of each chunk
    last = np.cumsum(counts) - 1
    rows = np.repeat(np.arange(num_decodes, len(lengths)), counts)
    return np.stack((rows, size * (np.repeat(last, counts) - np.arange(len(rows)))), 1)


def _fill(array: np.ndarray, values: Any, padding: int) -> None:
    """`values` at the beginning of an array, and `padding` after them."""
    array[: len(values)] = values
    array[len(values) :] = padding


def _fill_slots(batch: HostBatch, rows: np.ndarray, block_size: int) -> None:
    """Cache slots of the first tokens, which belong to `rows` of the block tables."""
    positions = batch.positions[: len(rows)]
    indices, offsets = np.divmod(positions, block_size)
    _fill(batch.slot_mapping, batch.block_tables[rows, indices] * block_size + offsets, padding=-1)


def _fill_rows(batch: HostBatch, step: ScheduledStep) -> None:
    n, width = step.num_decodes, min(batch.block_tables.shape[1], step.block_tables.shape[1])
    _fill(batch.context_lens, step.context_lens, padding=0)
    batch.block_tables[:] = 0
    batch.block_tables[:n, :width] = step.block_tables[step.req_indices, :width]
    for i, (seq, _, end) in enumerate(step.chunks, n):
        batch.context_lens[i] = end
        batch.block_tables[i, : len(seq.block_table)] = seq.block_table


def _logprob_requests(step: ScheduledStep) -> list:
    seqs = [*(row.seq for row in step.chunks), *(step.sampled_seqs[i] for i in step.visited)]
    if not any(seq.has_logprobs for seq in seqs):
        return []
    from nanovllm.features.logprobs import logprob_requests  # a feature, which few requests use

    return logprob_requests(step)


def _sizes_of_extras(step: ScheduledStep, logprobs: list, masks: dict[int, np.ndarray]) -> dict:
    return dict(
        num_block_copies=len(step.copies),
        num_logprobs=len(logprobs),
        num_masks=len(masks),
        mask_width=max(map(len, masks.values()), default=0),
    )


def _fill_extras(batch: HostBatch, step: ScheduledStep, logprobs: list, masks: dict[int, np.ndarray]) -> None:
    """Arrays that are empty in most steps; `masks` are by request index."""
    if masks:
        batch.mask_indices[:] = [*masks]
        np.stack([*masks.values()], out=batch.masks)
    if step.copies:
        batch.block_copies[:] = np.array(step.copies, np.int32).T
    if logprobs:
        batch.logprob_requests[:] = np.array(logprobs, np.int32)
