"""Makes drafts with a smaller model.

The draft model shares the vocabulary, block ids and sampling noise of the target model.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.attention import backend_class
from nanovllm.attention.base import connect
from nanovllm.engine.features import Arrays
from nanovllm.kernels.sampling.sampling_columns import seeds
from nanovllm.layers.sampler import Sampler, SamplingRows, logit_cutoffs
from nanovllm.models import make_model
from nanovllm.spec_decode.rows import ChainShape, place_chains, slots_of
from nanovllm.utils.context import Context, attention_context
from nanovllm.utils.loader import load_model

if TYPE_CHECKING:
    from nanovllm.batches.batch_runner import BatchRunner


class DraftModel:
    """A draft model with a separate KV cache, which uses the target model's block ids.

    There is no second block manager: a block is always allocated in both caches. The keys and values of one position in
    a sequence are called a row. Before the draft model drafts for a sequence, it computes the sequence's missing rows.
    Missing rows belong to the prompt, to blocks that a preemption has freed, or to tokens that were generated without
    drafts.

    Each rank has the whole draft model. The ranks' results may differ in their last bits, so the ranks agree on each
    draft by an all-reduce.

    To compute the row of a position, the drafter reads the token at position `position + shift`.
    """

    shift = 0

    def __init__(self, runner: "BatchRunner"):
        """Load the weights, and add the layers to the runner's cache groups.

        The memory of the cache groups is allocated later.
        """
        config = runner.config
        self.runner, self.sampler = runner, Sampler()
        with torch.device(runner.device):
            self.model = self.make_model().eval()
        with torch.device("cpu"):
            self.load(folder := Path(config.speculative_config.model), config.load_format)
        runner.fuse_layers(self.model)
        for parameter in self.model.parameters():
            del parameter.weight_loader  # it makes a reference cycle
        backend = backend_class(config.attention_backend)()
        self.backend = connect(self.model, backend, runner.device.type, config.dtype)
        for layer in self.model.modules():
            if hasattr(layer, "cache_spec"):
                spec = layer.cache_spec()
                if spec.of_states:
                    raise ValueError(f"speculative_config: model={str(folder)!r}: its layers keep states")
                runner.cache_groups.setdefault(spec, []).append(layer)
        # by request index: how many rows have keys; rows of drafts do not count, because the drafts may be wrong
        self.num_computed = torch.zeros(config.max_num_seqs + 1, dtype=torch.int64, device=runner.device)
        # The most rows that a sequence can lack if it drafted in the previous step; only the device knows the number.
        # Rows of accepted drafts exist, except the last one. Heads recompute these rows from the model's hidden states.
        self.width = runner.config.tokens_per_row if self.shift else 2
        self.run, self.run_chunks = self.draft_chains, self.forward_chunks  # on CUDA, graphs of these

    def make_model(self) -> nn.Module:
        config = self.runner.config
        model_config = config.speculative_config.draft_model_config
        return make_model(model_config, config.max_model_len)

    def load(self, folder: Path, load_format: str) -> None:
        load_model(self.model, folder, self.runner.device, load_format)

    def draft(self, arrays: Arrays) -> None:
        """Write drafts to `RequestTables`, for the sequences in the arrays of `Speculation.prepare`.

        On CUDA, the host waits for the device only if `arrays["behind"]` lists sequences.
        """
        if len(arrays["new_blocks"]):
            rows, columns, block_ids = arrays["new_blocks"].long().unbind(1)
            self.runner.tables.block_tables[rows, columns] = block_ids.int()
        if len(arrays["behind"]):
            self._catch_up(*arrays["behind"].long().unbind(1))
        self.run(arrays["req_indices"], arrays["num_drafts"], arrays["drafts"].shape[1])

    def _catch_up(self, req_indices: torch.Tensor, are_new: torch.Tensor) -> None:
        """Compute each sequence's missing rows, except the last row, in pieces of limited size."""
        ends = self.runner.tables.num_tokens[req_indices].long() - self.shift - 1
        starts = self.num_computed[req_indices].minimum(ends) * (are_new == 0)
        piece = max(1, self.runner.config.max_num_batched_tokens // len(req_indices))
        while (missing := ends - starts).any():
            behind, piece_ends = missing > 0, starts + missing.clamp(max=piece)
            self.compute_chunks(req_indices[behind], starts[behind], piece_ends[behind])
            starts = piece_ends
        self.num_computed[req_indices] = ends

    def compute_chunks(self, req_indices: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> None:
        """Compute the rows `starts:ends` of each sequence as chunks. Each argument is an int64 tensor [S]."""
        counts, config = ends - starts, self.runner.config
        rows = torch.arange(len(starts), device=starts.device).repeat_interleave(counts)
        cu_seqlens_q = F.pad(counts.cumsum(0), (1, 0))
        positions = torch.arange(len(rows), device=starts.device) + (starts - cu_seqlens_q[:-1])[rows]
        tables, places = self.runner.tables, (positions, positions + self.shift)
        slots, token_slots = (slots_of(tables, config.kvcache_block_size, req_indices[rows], x) for x in places)
        arrays = self.backend.prepare_chunks(torch.stack((starts, ends), 1).tolist(), 0)
        on_device = {name: torch.from_numpy(x).to(starts.device).int() for name, x in arrays.items()}
        context = Context(
            True,
            cu_seqlens_q=cu_seqlens_q.int(),
            max_seqlen_q=int(counts.max()),
            slot_mapping=slots.int(),
            context_lens=ends.int(),
            block_tables=tables.block_tables[req_indices, :-1],
            max_context_len=config.max_model_len,
            backend_arrays=on_device,
        )
        self.run_chunks(context, token_slots, positions.int())

    def forward_chunks(self, context: Context, token_slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Compute the rows that `context` describes. CUDA graphs can capture this method."""
        with attention_context(context):
            self.compute(context.slot_mapping, token_slots, positions)
        self.runner.tp.barrier(positions.device)  # needed because the embeddings are a sum over ranks

    def draft_chains(self, req_indices: torch.Tensor, num_drafts: torch.Tensor, num_steps: int) -> None:
        """Draft up to `num_steps` tokens for each of D sequences. Each sequence may have up to `width` missing rows.

        Sequence i gets `num_drafts[i]` drafts, and padding gets none. The drafts are written to the request tables. -1
        means that there is no draft. CUDA graphs capture this method, so shapes are fixed and the host never waits.
        """
        runner, tables, n, drafts = self.runner, self.runner.tables, len(req_indices), []
        by_request = tables.last_token_ids[:, 0], tables.params, tables.block_tables[:, :-1]
        token_ids, params, block_tables = (x.index_select(0, req_indices) for x in by_request)
        sizes, cached_ids = [n * self.width, *[n] * (num_steps - 1)], runner._cached_token_ids
        shape = ChainShape(num_steps, self.width, self.shift, runner.config.kvcache_block_size)
        *of_rows, newest, newest_slots = place_chains(req_indices, num_drafts, tables, self.num_computed, shape)
        steps = zip(*(x.split(sizes) for x in of_rows), newest, newest_slots)
        # last, last_slot: the position and the slot of each sequence's last row
        for positions, context_lens, slots, token_slots, last, last_slot in steps:
            runner.slot_token_ids[last_slot] = token_ids
            width = len(slots) // n
            tables_of_rows = block_tables if width == 1 else block_tables.repeat_interleave(width, 0)
            context = Context(
                slot_mapping=slots,
                context_lens=context_lens,
                block_tables=tables_of_rows,
                num_decode_rows=len(slots),
                max_context_len=runner.config.max_model_len,
                tokens_per_row=width,
            )
            with attention_context(context):
                hidden = self.compute(slots, token_slots, positions)[width - 1 :: width].contiguous()
            self.chain(last_slot, hidden)
            drawn = params, req_indices, last, block_tables, cached_ids, runner._num_finished_programs
            drafts.append(token_ids := self._sample(hidden, SamplingRows(*drawn)))
        tables.last_token_ids[req_indices, 1 : 1 + num_steps] = torch.stack(drafts).where(newest_slots >= 0, -1).T

    def compute(self, slots: torch.Tensor, token_slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute the rows of the cache slots `slots` from the tokens at the slots `token_slots`.

        Return hidden states [T, hidden_size].
        """
        return self.model(self.runner.slot_token_ids[token_slots], positions)

    def chain(self, token_slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """Do nothing.

        Draft heads override this method to store the hidden state of each sequence's last row at `token_slots`.
        """

    def compute_logits(self, hidden_states: torch.Tensor, sampling_params: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden_states)

    def _sample(self, hidden_states: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """Sample drafts with the same logit edits, filters and noise that the target model will use."""
        tp, logits = self.runner.tp, self.compute_logits(hidden_states, rows.params)
        for name, feature in self.runner.features.items():
            if name != "spec_decode":  # its edits belong to verification
                feature.edit_logits(logits, rows)
        cutoffs = logit_cutoffs(logits, rows)
        token_ids = self.sampler(logits, rows.column("temperature"), seeds(rows.params), rows.positions, cutoffs)
        return token_ids if tp.size == 1 else tp.all_reduce_max(token_ids.long()).int()
