"""Captures and replays CUDA graphs of a draft model or a draft head."""

from functools import partial
from typing import Any

import torch

from nanovllm.batches.batch import MAX_CHUNKS
from nanovllm.config import Config
from nanovllm.cuda.graphs import capture, capture_sizes, max_seqs_of
from nanovllm.utils.context import Context

# rows of catch-up steps; with more rows, graphs save no time: the device takes longer than the launches
ROWS = 16, 64, 256, 1024, 2048


class DraftGraphs:
    """The CUDA graphs of a drafter: one for each size in `capture_sizes`, up to the largest batch that may draft.

    Each graph first computes the rows of tokens that are new to the drafter. Then the graph computes all drafts of a
    step. The graph writes the drafts to RequestTables, where the target model's graph reads them. For each size in
    ROWS, another graph computes prompt rows, so that the drafter catches up with the model.
    """

    def __init__(self, config: Config, drafter: Any, pad_req_index: int, pool: Any):
        """Capture the graphs for a `spec_decode.draft_model.DraftModel`. All graphs share the memory pool `pool`."""
        self.drafter, self.num_steps = drafter, config.speculative_config.num_speculative_tokens
        self.sizes = capture_sizes(max_seqs_of(config, 1 + self.num_steps), config.batch_invariant)
        self.padding = torch.tensor([[pad_req_index], [0]], dtype=torch.int32, device=drafter.num_computed.device)
        self.inputs = self.padding.repeat(1, self.sizes[-1])  # request indices, and numbers of drafts
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        for size in reversed(self.sizes):
            work = partial(drafter.draft_chains, *self.inputs[:, :size], self.num_steps)
            work()  # compiles the remaining kernels: a capture must not compile
            self.graphs[size], _ = capture(work, pool)
        self.chunks: dict[int, tuple[torch.cuda.CUDAGraph, Context, torch.Tensor, torch.Tensor]] = {}
        sizes = [size for size in ROWS if size <= config.max_num_batched_tokens]
        for size in reversed(sizes if drafter.backend.captures_chunks else []):
            rows = padded_chunks(config, drafter, size)
            drafter.forward_chunks(*rows)
            self.chunks[size] = capture(partial(drafter.forward_chunks, *rows), pool)[0], *rows

    def run(self, req_indices: torch.Tensor, num_drafts: torch.Tensor, num_steps: int) -> None:
        """Replay a graph of `DraftModel.draft_chains`, or call `draft_chains` if no graph is large enough."""
        n = len(req_indices)
        size = next((size for size in self.sizes if size >= n), None)
        if size is None:
            self.drafter.draft_chains(req_indices, num_drafts, num_steps)
            return
        self.inputs[0, :n], self.inputs[1, :n] = req_indices, num_drafts
        self.inputs[:, n:size] = self.padding
        self.graphs[size].replay()

    def run_chunks(self, context: Context, token_slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Replay a graph of `DraftModel.forward_chunks`, or call `forward_chunks` if no graph is large enough."""
        n, num_seqs = len(positions), len(context.context_lens)
        size = min((size for size in self.chunks if size >= n), default=None)
        if size is None or num_seqs > MAX_CHUNKS:
            self.drafter.forward_chunks(context, token_slots, positions)
            return
        graph, own, *own_rows = self.chunks[size]
        fill(own.slot_mapping, context.slot_mapping, -1)
        fill(own.context_lens, context.context_lens, 0)
        fill(own.block_tables, context.block_tables, 0)
        fill(own.cu_seqlens_q, context.cu_seqlens_q, n)
        for name, values in context.backend_arrays.items():
            fill(own.backend_arrays[name], values, -1)
        for ours, values in zip(own_rows, (token_slots, positions)):
            fill(ours, values, 0)
        graph.replay()


def padded_chunks(config: Config, drafter: Any, num_rows: int) -> tuple[Context, torch.Tensor, torch.Tensor]:
    """Return arguments for `DraftModel.forward_chunks`, in which all `num_rows` rows are padding."""
    num_seqs = min(num_rows, MAX_CHUNKS)
    ints = lambda *dims, value=0: torch.full(dims, value, dtype=torch.int32, device=drafter.num_computed.device)
    arrays = drafter.backend.array_shapes(num_rows, num_seqs)
    context = Context(
        True,
        slot_mapping=ints(num_rows, value=-1),
        context_lens=ints(num_seqs),
        block_tables=ints(num_seqs, config.max_blocks_per_seq),
        max_context_len=config.max_model_len,
        max_seqlen_q=num_rows,
        cu_seqlens_q=ints(num_seqs + 1),
        backend_arrays={name: ints(*dims, value=-1) for name, dims in arrays},
    )
    return context, ints(num_rows), ints(num_rows)


def fill(tensor: torch.Tensor, values: torch.Tensor, padding: int) -> None:
    """Write `values` to the beginning of a tensor, and `padding` to the remaining elements."""
    tensor[: len(values)] = values
    tensor[len(values) :] = padding
