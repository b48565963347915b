"""Defines the inputs of a step: a flat int32 buffer with named views.

The host fills the buffer, and copies it to the device as a whole. Code for the device uses the same views, and never a
`Sequence`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from nanovllm.cache.window_tables import TableView, view_tables
from nanovllm.config import Config
from nanovllm.engine.features import FEATURES
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence, packed_ids
from nanovllm.kernels.sampling.sampling_columns import WIDTH, params_rows

MAX_CHUNKS = 32  # the most chunks in a step that a CUDA graph computes
VIEW_ALIGNMENT = 4  # words (16 bytes); Triton compiles another kernel for unaligned addresses

Array = TypeVar("Array", np.ndarray, torch.Tensor)
Dims = tuple[int, ...]
ArrayShapes = tuple[tuple[str, Dims], ...]  # names and dimensions


class BatchShape(NamedTuple):
    """The sizes that determine the layout of a Batch."""

    num_tokens: int
    num_seqs: int
    num_decode_rows: int  # rows of one token, which come first
    num_sampled_tokens: int
    max_blocks_per_seq: int  # the width of the block tables
    max_seqlen_q: int = 1
    backend_shapes: ArrayShapes = ()  # of `backend_arrays`
    is_padded: bool = False  # for a CUDA graph with chunks: the sizes are upper bounds; the device has exact numbers
    tokens_per_row: int = 1  # see ScheduledStep; decode rows per sequence, each with one more token of context
    num_window_tables: int = 0  # see cache/window_tables.py

    num_sampled_seqs: int = 0  # without padding
    num_new_requests: int = 0  # requests that are sampled for the first time since their admission
    num_block_copies: int = 0  # of cache blocks and states, before the forward pass
    feature_shapes: tuple[tuple[str, ArrayShapes], ...] = ()  # arrays of each feature that the step uses

    @property
    def has_chunks(self) -> bool:
        return self.num_seqs > self.num_decode_rows

    @property
    def graph_shape(self) -> tuple[int, ...]:
        """The fields that select a CUDA graph: all fields before `num_sampled_seqs`."""
        return self[: self._fields.index("num_sampled_seqs")]

    @property
    def size(self) -> int:
        return _layout(self)[1]


def _aligned(num_words: int) -> int:
    return -(-num_words // VIEW_ALIGNMENT) * VIEW_ALIGNMENT


def _view(dims: Callable[[BatchShape], Dims], chunks_only: bool = False) -> Any:
    return field(default=None, metadata={"dims": dims, "chunks_only": chunks_only})


@dataclass(slots=True, eq=False)
class Batch(Generic[Array]):
    """The int32 arrays of a step, as NumPy arrays on the host and as tensors on the device.

    Fields that are declared with `chunks_only` are None in steps that only decode. For decode rows, the host fills the
    fields from `req_indices` to `new_window_blocks`. The device fills the fields from `input_ids` to `window_tables`
    (see `place_decodes` and `place_windows`). `BatchShape.graph_shape` determines the shapes of the first views in the
    buffer. CUDA graphs read only these first views of the buffer.
    """

    shape: BatchShape
    buffer: Array

    req_indices: Array = _view(lambda s: (s.num_sampled_tokens // s.tokens_per_row,))  # of each sampled sequence
    num_reserved: Array = _view(lambda s: (s.num_decode_rows // s.tokens_per_row,))  # see ScheduledStep; 0: padding
    # per decoding sequence: (column in the block table, id of the new block); column -1: no new block
    new_blocks: Array = _view(lambda s: (s.num_decode_rows // s.tokens_per_row, 2))

    new_window_blocks: Array = _view(lambda s: (s.num_decode_rows // s.tokens_per_row, s.num_window_tables))  # ids

    input_ids: Array = _view(lambda s: (s.num_tokens,))
    positions: Array = _view(lambda s: (s.num_tokens,))
    slot_mapping: Array = _view(lambda s: (s.num_tokens,))  # cache slot of a token's key and value; -1: do not store
    context_lens: Array = _view(lambda s: (s.num_seqs,))  # how many tokens to attend to, including this step's
    block_tables: Array = _view(lambda s: (s.num_seqs, s.max_blocks_per_seq))
    # like `slot_mapping` and `block_tables`, for each window table; each table's part is aligned
    window_slots: Array = _view(lambda s: (s.num_window_tables, _aligned(s.num_tokens)))
    window_tables: Array = _view(lambda s: (s.num_window_tables, _aligned(s.num_seqs), s.max_blocks_per_seq))

    cu_seqlens_q: Array = _view(lambda s: (s.num_seqs + 1,), chunks_only=True)
    logits_indices: Array = _view(lambda s: (s.num_sampled_tokens,), chunks_only=True)  # token whose logits are sampled
    sampled_rows: Array = _view(lambda s: (s.num_sampled_tokens,), chunks_only=True)  # that token's block table row
    state_rows: Array = _view(lambda s: (2, s.num_seqs), chunks_only=True)  # read, written: see cache/state.py
    num_decode_rows: Array = _view(lambda s: (1,), chunks_only=True)  # for CUDA graphs, whose shape has an upper bound
    params: Array = _view(lambda s: (s.num_new_requests, WIDTH), chunks_only=True)  # of new requests
    new_block_tables: Array = _view(lambda s: (s.num_new_requests, s.max_blocks_per_seq), chunks_only=True)
    new_window_tables: Array = _view(
        lambda s: (s.num_window_tables, s.num_new_requests, s.max_blocks_per_seq), chunks_only=True
    )

    block_copies: Array = _view(lambda s: (2, s.num_block_copies))  # from, to; ids of states follow ids of blocks
    feature_arrays: dict[str, dict[str, Array]] = field(default_factory=dict)  # of `StepFeature.prepare`
    backend_arrays: dict[str, Array] = field(default_factory=dict)  # of `AttentionBackend.prepare_chunks`

    @property
    def new_req_indices(self) -> Array:
        """The request indices of new requests, which are the last elements of `req_indices`."""
        end = self.shape.num_sampled_seqs
        return self.req_indices[end - self.shape.num_new_requests : end]

    @classmethod
    def from_buffer(cls, shape: BatchShape, buffer: Array) -> "Batch[Array]":
        """Make the views of a batch in `buffer`, which may be longer than the batch."""
        layout, size = _layout(shape)
        arrays = {
            owner: {name: buffer[begin:end].reshape(dims) for name, begin, end, dims in views}
            for owner, views in layout
        }
        batch_arrays, backend_arrays = arrays.pop(BATCH), arrays.pop(BACKEND)
        return cls(shape, buffer[:size], **batch_arrays, feature_arrays=arrays, backend_arrays=backend_arrays)

    def to(self, device: torch.device) -> "Batch[torch.Tensor]":
        return Batch.from_buffer(self.shape, torch.from_numpy(self.buffer).to(device))


FeatureArrays = Mapping[str, Mapping[str, Any]]  # by feature and name: arrays, or lists of arrays of equal length
HostBatch = Batch[np.ndarray]
DeviceBatch = Batch[torch.Tensor]
VIEWS = [f for f in fields(Batch) if "dims" in f.metadata]
BATCH, BACKEND = "the batch itself", "the attention backend"  # owners of arrays, besides features


@lru_cache(maxsize=1024)
def _layout(shape: BatchShape) -> tuple[list[tuple[str, list[tuple[str, int, int, Dims]]]], int]:
    """Return the views (name, begin, end, dimensions) of the batch, the backend and each feature, and the size of the
    buffer in words.
    """
    views_used = [view for view in VIEWS if shape.has_chunks or not view.metadata["chunks_only"]]
    batch_shapes = [(view.name, view.metadata["dims"](shape)) for view in views_used]
    layout, begin = [], 0
    for owner, shapes in ((BACKEND, shape.backend_shapes), (BATCH, batch_shapes), *shape.feature_shapes):
        layout.append((owner, views := []))
        for name, dims in shapes:
            views.append((name, begin, begin + prod(dims), dims))
            begin += _aligned(prod(dims))
    return layout, begin


def shape_of(
    step: ScheduledStep, block_size: int, backend_arrays: Mapping[str, np.ndarray], num_window_tables: int = 0
) -> BatchShape:
    """Return the shape of a step without padding. The fields of BatchShape that are not in `graph_shape` keep their
    defaults.
    """
    k, chunk_lens = step.tokens_per_row, step.chunk_lens
    n = step.num_decodes * k
    longest_decode = max((end for _, _, end in step.decodes), default=0)
    return BatchShape(
        num_tokens=n + sum(chunk_lens),
        num_seqs=n + len(chunk_lens),
        num_decode_rows=n,
        num_sampled_tokens=len(step.sampled_seqs) * k,
        max_blocks_per_seq=max([-(-longest_decode // block_size), *(len(seq.block_table) for seq in step.prompt_seqs)]),
        max_seqlen_q=max(chunk_lens, default=1),
        backend_shapes=tuple((name, x.shape) for name, x in backend_arrays.items()),
        tokens_per_row=k,
        num_window_tables=num_window_tables,
    )


def prepare_batch(
    step: ScheduledStep,
    shape: BatchShape,
    backend_arrays: Mapping[str, np.ndarray],
    feature_arrays: FeatureArrays,
    host_buffer: Callable[[BatchShape], np.ndarray],
    block_size: int,
    pad_req_index: int = 0,
    views: tuple[TableView, ...] = (),
) -> HostBatch:
    """Fill a step's batch, including the arrays of the backend and of features.

    `host_buffer` returns memory for the batch. If `shape` is larger than the step, empty sequences pad the batch. The
    padding stores no keys or values. Tokens that are sampled for padding are dropped. The backend's arrays are padded
    with -1.
    """
    new = step.new_seqs
    shape = shape._replace(
        num_sampled_seqs=len(step.sampled_seqs),
        num_new_requests=len(new),
        num_block_copies=len(step.copies),
        feature_shapes=_feature_shapes(feature_arrays),
    )
    batch = Batch.from_buffer(shape, host_buffer(shape))
    _fill(batch.req_indices, step.req_indices + [seq.req_index for seq in new], pad_req_index)
    _fill(batch.num_reserved, step.num_reserved, padding=0)
    batch.new_blocks[:] = -1
    for i, *new_block in step.new_blocks:
        batch.new_blocks[i] = new_block
        if views:
            column, block_id = new_block
            columns = [step.decodes[i].seq.window_columns[column]]
            batch.new_window_blocks[i] = view_tables(views, columns, [block_id])[:, 0]
    if step.chunks:
        _fill_chunks(batch, step, block_size, pad_req_index)
        batch.params[:] = params_rows(new)
        _fill_tables(batch.new_block_tables, new)
        if views:
            _fill_windows(batch, step, block_size, views)
    if step.copies:
        batch.block_copies[:] = [*step.copies.values()], [*step.copies]
    for name, values in backend_arrays.items():
        _fill(batch.backend_arrays[name], values, padding=-1)
    for name, arrays in feature_arrays.items():
        for key, values in arrays.items():
            if isinstance(values, list):
                np.stack(values, out=batch.feature_arrays[name][key])
            else:
                batch.feature_arrays[name][key][:] = values
    return batch


def _fill(array: np.ndarray, values: Any, padding: int) -> None:
    array[: len(values)] = values
    array[len(values) :] = padding


def _fill_chunks(batch: HostBatch, step: ScheduledStep, block_size: int, pad_req_index: int) -> None:
    """Fill the rows and tokens of chunks (after the decode rows), and the arrays that locate the chunks."""
    k, n = step.tokens_per_row, step.num_decode_tokens
    lengths = np.array([1] * n + step.chunk_lens)
    ends = lengths.cumsum(dtype=np.int32)  # [B], the end of each row in the step's flat tokens
    B, T = len(lengths), int(ends[-1])
    batch.num_decode_rows[:] = n
    batch.cu_seqlens_q[0] = 0
    _fill(batch.cu_seqlens_q[1:], ends, padding=T)
    seqs, _, chunk_ends = zip(*step.chunks)
    _fill(batch.context_lens[n:], chunk_ends, padding=0)
    _fill_tables(batch.block_tables[n:], seqs)
    decode_states = np.repeat(np.array(step.req_indices, np.int64), k)
    for rows, chunk_states in zip(batch.state_rows, (step.state_rows, [seq.req_index for seq in seqs])):
        _fill(rows, np.concatenate((decode_states, chunk_states)), pad_req_index)
    for (seq, start, end), last in zip(step.chunks, ends[n:].tolist()):
        batch.input_ids[last - (end - start) : last] = np.frombuffer(packed_ids(seq.token_ids[start:end]), np.int32)
    batch.input_ids[T:] = 0
    rows = np.arange(n, B).repeat(lengths[n:])
    positions = np.arange(n, T, dtype=np.int32) + (batch.context_lens[:B] - ends)[rows]
    columns = positions // block_size
    _fill(batch.positions[n:], positions, padding=0)
    _fill(batch.slot_mapping[n:], positions + (batch.block_tables[rows, columns] - columns) * block_size, padding=-1)
    chunk_rows = np.repeat(np.array(step.sampled_rows[step.num_decodes :], np.int64) - step.num_decodes + n, k)
    sampled = np.concatenate((np.arange(n), chunk_rows))
    _fill(batch.sampled_rows, sampled, padding=0)
    _fill(batch.logits_indices, ends[sampled] - 1, padding=0)


def _fill_windows(batch: HostBatch, step: ScheduledStep, block_size: int, views: tuple[TableView, ...]) -> None:
    """Fill the window tables of chunks and new requests, and the window slots of chunks."""
    n = step.num_decode_tokens
    chunk_tables = batch.window_tables[:, n : n + len(step.chunks)]
    batch.window_tables[:, n:], batch.window_slots[:, n:] = 0, -1
    batch.new_window_tables[:] = 0
    seqs = [(chunk_tables, [seq for seq, _, _ in step.chunks]), (batch.new_window_tables, step.new_seqs)]
    for tables, i, seq in [(tables, i, seq) for tables, found in seqs for i, seq in enumerate(found)]:
        tables[:, i, : len(seq.block_table)] = view_tables(views, seq.window_columns, seq.block_table)
    rows = np.arange(len(step.chunks)).repeat(step.chunk_lens)
    positions = batch.positions[n : n + len(rows)]
    slots = chunk_tables[:, rows, positions // block_size] * block_size + positions % block_size
    batch.window_slots[:, n : n + len(rows)] = slots


def _fill_tables(tables: np.ndarray, seqs: Iterable[Sequence]) -> None:
    tables[:] = 0
    for table, seq in zip(tables, seqs):
        table[: len(seq.block_table)] = seq.block_table


def _feature_shapes(arrays: FeatureArrays) -> tuple[tuple[str, ArrayShapes], ...]:
    dims = lambda rows: (len(rows), *rows[0].shape) if isinstance(rows, list) else rows.shape
    return tuple((name, tuple((key, dims(x)) for key, x in by_key.items())) for name, by_key in arrays.items())


def largest_batch(config: Config) -> int:
    """Return the buffer size of the largest possible step, in int32 words."""
    T, W, num_seqs = config.max_num_batched_tokens, config.max_blocks_per_seq, config.max_num_seqs
    B = num_seqs * config.tokens_per_row
    # other ranks call this function before their runner has divided the layers among tables
    num_window_tables = max(len(config.table_views), config.model_config.max_table_views)
    largest = BatchShape(
        num_tokens=T + B,
        num_seqs=B + MAX_CHUNKS,
        num_decode_rows=B,
        num_sampled_tokens=B + MAX_CHUNKS * config.tokens_per_row,
        max_blocks_per_seq=W,
        max_seqlen_q=T,
        backend_shapes=(("", (T + B + MAX_CHUNKS, 2)),),  # enough for any backend: two words per query tile
        num_sampled_seqs=num_seqs,
        num_new_requests=num_seqs,
        # a sequence may copy a block of each table and its state, and leave a snapshot
        num_block_copies=(3 + num_window_tables) * num_seqs,
        num_window_tables=num_window_tables,
    )
    return largest.size + config.tokens_per_row * sum(feature.load().max_words(config) for feature in FEATURES.values())
