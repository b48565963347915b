"""Everything that one step needs, as one flat int32 buffer with named views.

The scheduler's counts become arrays here, on the host; the buffer then crosses to the device in a single copy, where
the same views are taken of it again. Nothing behind this point knows of sequences.
"""

from math import prod
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.scheduled_step import ScheduledSequence, ScheduledStep
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_result import LogprobRequest, logprob_requests
from nanovllm.layers.logits import REALS, WIDTH, column, mask_width, seeds
from nanovllm.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASES, SamplingParams, early_stops

GREEDY_BELOW = 1e-5  # a temperature that float32 logits could not be divided by


class BatchShape(NamedTuple):
    """What fixes the layout of a Batch."""

    is_prefill: bool
    num_tokens: int  # T
    num_seqs: int  # B
    num_samples: int  # S: rows that get a token; in a decode step T = B = S
    max_blocks_per_seq: int  # W: blocks of the longest sequence
    max_seqlen_q: int
    num_biases: int = 0  # N: entries of all requests that are sampled
    num_copies: int = 0  # C: cache blocks that sequences have in common no more, copied before the forward
    num_logprobs: int = 0  # tokens whose log-probabilities are asked for
    num_masks: int = 0  # M: sampled requests that have allowed_token_ids,
    mask_width: int = 0  # in so many words
    num_bad_words: int = 0  # K: sequences of tokens, of all requests that are sampled

    def fields(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the views, in the order in which they lie in the buffer."""
        T, B, S, W = self.num_tokens, self.num_seqs, self.num_samples, self.max_blocks_per_seq
        shapes = {
            "req_indices": (S,),  # where the sampled ids are kept on the device, and read by the next step
            "positions": (T,),
            "slot_mapping": (T,),  # where a token's key and value go in the cache; -1: nowhere
            "context_lens": (B,),  # tokens to attend to, this step's included
            "block_tables": (B, W),
        }
        if self.is_prefill:  # a decode step's ids are on the device already, and so is what its requests ask
            shapes |= {"input_ids": (T,), "cu_seqlens_q": (B + 1,), "logits_indices": (S,)}
            shapes |= {"params": (S, WIDTH)}
            # see RequestTable
            shapes |= dict.fromkeys(("bias_slots", "bias_ids", "bias_bits"), (self.num_biases,))
            shapes |= {"allowed_slots": (self.num_masks,), "allowed_ids": (self.num_masks, self.mask_width)}
            shapes |= {"word_slots": (self.num_bad_words,), "bad_words": (self.num_bad_words, MAX_BAD_WORD_TOKENS)}
        # the last, as a graph has no room for them
        return shapes | {
            "copies": (2, self.num_copies),
            "logprob_requests": (self.num_logprobs, len(LogprobRequest._fields)),
        }

    @property
    def size(self) -> int:
        return sum(map(_room, self.fields().values()))


def largest_batch(config: Config) -> int:
    """The size of the largest step that there can be."""
    B, T, W = config.max_num_seqs, config.max_num_batched_tokens, config.max_blocks_per_seq
    masks = B, mask_width(config.model_config.vocab_size)
    prefill = BatchShape(True, T, min(B, T), B, W, T, B * MAX_BIASES, B, T + B, *masks, B * MAX_BAD_WORDS)
    return max(prefill.size, BatchShape(False, B, B, B, W, 1, num_copies=B, num_logprobs=B).size)


def _room(dims: tuple[int, ...]) -> int:
    """Every view begins at a multiple of 16 bytes: Triton compiles a kernel anew for an address that does not."""
    return -(-prod(dims) // 4) * 4


class Batch:
    """The views of one step's buffer: numpy on the host, torch on the device.

    What depends on a prompt exists in prefill steps only: `input_ids`, `cu_seqlens_q`, `logits_indices` (the token rows that
    are sampled) and what requests ask of their logits. `copies` are the cache blocks to copy from, and to.
    """

    def __init__(self, shape: BatchShape, buffer):
        self.shape = shape
        self.buffer = buffer[: shape.size]
        offset = 0
        for name, dims in shape.fields().items():
            setattr(self, name, buffer[offset : offset + prod(dims)].reshape(dims))
            offset += _room(dims)

    def to(self, device_buffer: torch.Tensor) -> "Batch":
        """This batch on the device, in `device_buffer`; on CUDA the copy is asynchronous if our memory is pinned."""
        batch = Batch(self.shape, device_buffer)
        batch.buffer.copy_(torch.from_numpy(self.buffer), non_blocking=True)
        return batch


def prepare_prefill(
    step: ScheduledStep, buffer: np.ndarray, block_size: int, eos_token_ids: frozenset[int], vocab_size: int
) -> Batch:
    rows = step.rows
    ends = np.cumsum([row.end - row.start for row in rows])
    logits_indices = ends[step.sampled_rows] - 1
    asked = logprob_requests(step)
    biases = [_biases(seq, eos_token_ids) for seq in step.sampled_seqs]
    shape = BatchShape(
        is_prefill=True,
        num_tokens=step.num_tokens,
        num_seqs=len(rows),
        num_samples=len(step.sampled_seqs),
        max_blocks_per_seq=max(len(row.seq.block_table) for row in rows),
        max_seqlen_q=max(row.end - row.start for row in rows),
        num_copies=len(step.copies),
        num_biases=sum(map(len, biases)),
        num_logprobs=len(asked),
        num_masks=sum(seq.params.allowed_token_ids is not None for seq in step.sampled_seqs),
        mask_width=mask_width(vocab_size),
        num_bad_words=sum(len(seq.bad_words) for seq in step.sampled_seqs),
    )
    batch = Batch(shape, buffer)
    batch.cu_seqlens_q[0], batch.cu_seqlens_q[1:] = 0, ends
    _fill_rows(batch, rows)
    _fill_copies(batch, step.copies)
    for i, ((seq, start, end), last) in enumerate(zip(rows, ends)):
        first = last - (end - start)
        batch.input_ids[first:last] = seq.token_ids[start:end]
        batch.positions[first:last] = positions = np.arange(start, end)
        batch.slot_mapping[first:last] = _slots(batch.block_tables[i, positions // block_size], positions, block_size)
    batch.logits_indices[:] = logits_indices
    _fill_params(batch, step.sampled_seqs, biases)
    _fill_bans(batch, step.sampled_seqs)
    _fill_logprob_rows(batch, asked)
    return batch


def prepare_decode(
    step: ScheduledStep, buffer: np.ndarray, block_size: int, num_rows: int, max_blocks_per_seq: int, pad_req_index: int
) -> Batch:
    """A decode step of `num_rows`: the rows past the step's own are empty, store nothing and sample in vain."""
    n = len(step.rows)
    asked = logprob_requests(step)
    rows_and_width = num_rows, num_rows, num_rows, max_blocks_per_seq, 1
    batch = Batch(BatchShape(False, *rows_and_width, num_copies=len(step.copies), num_logprobs=len(asked)), buffer)
    _fill_rows(batch, step.rows)
    _fill_copies(batch, step.copies)
    _fill_logprob_rows(batch, asked)
    batch.positions[:n] = positions = batch.context_lens[:n] - 1
    batch.slot_mapping[:n] = _slots(batch.block_tables[np.arange(n), positions // block_size], positions, block_size)
    batch.positions[n:] = 0
    batch.slot_mapping[n:] = -1
    batch.req_indices[:n] = [seq.req_index for seq in step.sampled_seqs]
    batch.req_indices[n:] = pad_req_index
    return batch


def _slots(blocks: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    return blocks * block_size + positions % block_size


def _fill_rows(batch: Batch, rows: list[ScheduledSequence]) -> None:
    n = len(rows)
    batch.context_lens[:n] = [row.end for row in rows]
    batch.context_lens[n:] = 0
    batch.block_tables[:] = 0
    for table, (seq, _, _) in zip(batch.block_tables, rows):
        table[: len(seq.block_table)] = seq.block_table


def _fill_copies(batch: Batch, copies: list[tuple[int, int]]) -> None:
    batch.copies[:] = np.array(copies, np.int32).reshape(-1, 2).T


def _fill_logprob_rows(batch: Batch, asked: list[LogprobRequest]) -> None:
    batch.logprob_requests[:] = np.array(asked, np.int32).reshape(batch.logprob_requests.shape)


def _fill_params(batch: Batch, seqs: list[Sequence], biases: list[list[tuple[int, float]]]) -> None:
    batch.req_indices[:] = [seq.req_index for seq in seqs]
    batch.params[:] = 0
    for name in (*REALS, "top_k"):
        column(batch.params, name)[:] = [getattr(seq.params, name) for seq in seqs]
    temperatures = column(batch.params, "temperature")
    temperatures[temperatures < GREEDY_BELOW] = 0
    seeds(batch.params)[:] = np.array([seq.noise_seed for seq in seqs], np.uint64).view(np.int32).reshape(-1, 2)
    penalties = [column(batch.params, f"{name}_penalty") for name in ("presence", "frequency", "repetition")]
    column(batch.params, "is_penalized")[:] = np.any(np.stack(penalties, 1) != (0, 0, 1), axis=1)
    column(batch.params, "num_prompt_tokens")[:] = [seq.num_prompt_tokens for seq in seqs]
    column(batch.params, "min_len")[:] = [seq.num_prompt_tokens + seq.params.min_tokens for seq in seqs]
    column(batch.params, "num_biases")[:] = [len(seq.params.logit_bias or ()) for seq in seqs]
    column(batch.params, "num_stops")[:] = [len(b) for b in biases] - column(batch.params, "num_biases")
    batch.bias_slots[:] = [seq.req_index * MAX_BIASES + i for seq, b in zip(seqs, biases) for i in range(len(b))]
    batch.bias_ids[:] = [token_id for b in biases for token_id, _ in b]
    batch.bias_bits.view(np.float32)[:] = [value for b in biases for _, value in b]


def _biases(seq: Sequence, eos_token_ids: frozenset[int]) -> list[tuple[int, float]]:
    """A request's biases, and behind them -inf for the ids that would end it before it has min_tokens."""
    params = seq.params
    stops = sorted(early_stops(params, eos_token_ids))
    return [*(params.logit_bias or {}).items(), *((token_id, -np.inf) for token_id in stops)]


def _fill_bans(batch: Batch, seqs: list[Sequence]) -> None:
    """What requests must not generate: all but their allowed ids, and bad words."""
    masked = [seq for seq in seqs if seq.params.allowed_token_ids is not None]
    column(batch.params, "has_allowed_ids")[:] = [seq.params.allowed_token_ids is not None for seq in seqs]
    batch.allowed_slots[:] = [seq.req_index for seq in masked]
    for mask, seq in zip(batch.allowed_ids, masked):
        bits = np.zeros(32 * len(mask), np.uint8)
        bits[list(seq.params.allowed_token_ids)] = 1
        mask[:] = np.packbits(bits, bitorder="little").view("<i4")
    column(batch.params, "num_bad_words")[:] = [len(seq.bad_words) for seq in seqs]
    batch.word_slots[:] = [seq.req_index * MAX_BAD_WORDS + i for seq in seqs for i in range(len(seq.bad_words))]
    batch.bad_words[:] = -1
    for row, word in zip(batch.bad_words, [word for seq in seqs for word in seq.bad_words]):
        row[-len(word) :] = word


def dummy_prefill(num_seqs: int, length: int, block_size: int) -> ScheduledStep:
    """A prefill step of `num_seqs` prompts of `length` tokens in blocks of their own, as warm-up and tests need it."""
    per_seq = -(-length // block_size)
    step = ScheduledStep(is_prefill=True)
    for i in range(num_seqs):
        seq = Sequence(i, [0] * length, SamplingParams(), noise_seed=0, max_len=length + 1)
        seq.block_table = list(range(i * per_seq, (i + 1) * per_seq))
        seq.req_index = i
        step.rows.append(ScheduledSequence(seq, 0, length))
        step.sample(seq)
    return step
