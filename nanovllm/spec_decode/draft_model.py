"""A smaller model with the same vocabulary drafts, from the cache blocks and with the noise of the other."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanovllm.engine.features import Arrays
from nanovllm.kernels.sampling_columns import seeds
from nanovllm.layers.attention import Attention, make_backend
from nanovllm.layers.sampler import Sampler, SamplingRows, logit_cutoffs
from nanovllm.models import model_class
from nanovllm.utils.context import Context, attention_context
from nanovllm.utils.loader import load_model
from nanovllm.utils.tensor_parallel import TensorParallel


class DraftModel:
    """Its keys and values lie in the same blocks as the model's, in tensors of its own.

    So it needs no block manager: a sequence that has a slot for a token has one for its draft model's key. What it has
    not computed of a sequence, it does when it is to draft for it: the prompt, what a preemption has lost, and what was
    generated while nothing was drafted. Of a shared block, each sequence computes the same numbers again.

    Each rank has all of it. They might differ in a last bit, so they agree on each draft.

    A row is what it computes for a position: there, with the token of that position, or of one `shift` later.
    """

    shift = 0

    def __init__(self, runner: Any):
        """Loads the weights. Its layers join the runner's cache groups, which have no memory yet."""
        config = runner.config
        self.runner, self.sampler, self.backend = runner, Sampler(), make_backend(config.attention_backend)
        with torch.device(runner.device):
            self.model = self.make_model().eval()
        with torch.device("cpu"):
            self.load(Path(config.speculative_config.model), config.load_format)
        for parameter in self.model.parameters():
            del parameter.weight_loader  # which refers to it
        for layer in self.model.modules():
            if isinstance(layer, Attention):
                self.backend.set_head_shape(layer.num_heads // layer.num_kv_heads, layer.head_dim, config.dtype)
            if hasattr(layer, "cache_spec"):
                spec = layer.cache_spec()
                if spec.of_states:
                    model = config.speculative_config.model
                    raise ValueError(f"speculative_config: model={model!r}: its layers keep states")
                runner.cache_groups.setdefault(spec, []).append(layer)
        # by request index, of the rows whose keys are there, or of drafts that may have been wrong
        self.num_computed = torch.zeros(config.max_num_seqs + 1, dtype=torch.int64, device=runner.device)

    def make_model(self) -> nn.Module:
        config = self.runner.config
        model_config = config.speculative_config.draft_model_config
        return model_class(model_config.model_type)(model_config, config.max_model_len, self.backend, TensorParallel())

    def load(self, folder: Path, load_format: str) -> None:
        load_model(self.model, folder, self.runner.device, load_format)

    def draft(self, arrays: Arrays) -> torch.Tensor:
        """Drafts [D, k] int32, -1 after the `num_drafts` of a sequence; `arrays` are those of `Speculation.prepare`."""
        tables, req_indices = self.runner.tables, arrays["req_indices"].long()
        rows, columns, block_ids = arrays["new_blocks"].long().unbind(1)
        tables.block_tables[rows, columns] = block_ids.int()
        lengths = tables.num_tokens[req_indices].long() - self.shift
        starts = self.num_computed[req_indices].minimum(lengths - 1) * (arrays["are_new"] == 0)
        piece = max(1, self.runner.config.max_num_batched_tokens // len(req_indices))
        while (missing := lengths - starts).max() > piece:
            ends = starts + (missing - 1).clamp(max=piece)
            behind = ends > starts
            self._forward(req_indices[behind], starts[behind], ends[behind])
            starts = ends
        num_drafts = arrays["num_drafts"].long()
        drafts = torch.full((len(req_indices), int(num_drafts.max())), -1, dtype=torch.int32, device=lengths.device)
        active, ends = torch.arange(len(req_indices), device=lengths.device), lengths
        for i in range(drafts.shape[1]):
            hidden_states = self._forward(req_indices[active], starts[active], ends[active], drafts[active, i - 1 : i])
            drafts[active, i] = self._sample(hidden_states, req_indices[active], ends[active] - 1 + self.shift)
            active = (num_drafts > i + 1).nonzero()[:, 0]
            starts, ends = ends, ends + 1
        # a shifted row of a draft began with what the drafter predicted: it is computed again
        self.num_computed[req_indices] = lengths if self.shift else lengths + num_drafts - 1
        return drafts

    def _forward(self, req_indices: Any, starts: Any, ends: Any, drafts: Any = None) -> torch.Tensor:
        """Compute the rows `starts:ends` of each sequence -> hidden states [S, hidden_size] of the last ones.

        `drafts` [S, 1] are the tokens of these, if drafts follow; [S, 0]: the last tokens of the sequences.
        """
        runner, config = self.runner, self.runner.config
        counts, block_size = ends - starts, config.kvcache_block_size
        rows = torch.arange(len(starts), device=starts.device).repeat_interleave(counts)
        last = counts.cumsum(0) - 1
        positions = torch.arange(len(rows), device=starts.device) + (ends - 1 - last)[rows]
        block_tables = runner.tables.block_tables[req_indices, : -(-(int(ends.max()) + self.shift) // block_size)]
        places = positions, positions + self.shift
        slots, token_slots = (block_tables[rows, x // block_size] * block_size + x % block_size for x in places)
        if drafts is not None:  # what the sampler reads
            newest = drafts if drafts.shape[1] else runner.tables.last_token_ids[req_indices, :1]
            runner.slot_token_ids[token_slots[last]] = newest[:, 0]
        is_decode = len(rows) == len(starts)
        arrays = {} if is_decode else self.backend.prepare_chunks(torch.stack((starts, ends), 1).tolist(), 0)
        context = Context(
            num_decodes=len(starts) * is_decode,
            slot_mapping=slots,
            context_lens=ends.int(),
            block_tables=block_tables,
            max_context_len=config.max_model_len,
            max_seqlen_q=int(counts.max()),
            cu_seqlens_q=None if is_decode else torch.nn.functional.pad(last + 1, (1, 0)).int(),
            backend_arrays={name: torch.from_numpy(x).to(starts.device) for name, x in arrays.items()},
        )
        with attention_context(context):
            hidden_states = self.compute(slots, token_slots, positions.int())[last]
        if drafts is not None:
            self.chain(token_slots[last], hidden_states)
        return hidden_states

    def compute(self, slots: torch.Tensor, token_slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, hidden_size] of rows, from their cache slots, those of their tokens, and positions [T]."""
        return self.model(self.runner.slot_token_ids[token_slots], positions)

    def chain(self, token_slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """Drafts follow rows [S] whose tokens have these cache slots."""

    def compute_logits(self, hidden_states: torch.Tensor, sampling_params: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden_states, sampling_params)

    def _sample(self, hidden_states: torch.Tensor, req_indices: torch.Tensor, positions: Any) -> torch.Tensor:
        """What the model would draw from these logits: with the same edits, filters and noise."""
        runner, positions = self.runner, positions.int()
        params, block_tables = runner.tables.params[req_indices], runner.tables.block_tables[req_indices, :-1]
        scratch = runner._num_finished_programs
        rows = SamplingRows(params, req_indices.int(), positions, block_tables, runner._cached_token_ids, scratch)
        logits = self.compute_logits(hidden_states, params)
        for feature in runner.features.values():
            feature.edit_logits(logits, rows)
        cutoffs = logit_cutoffs(logits, rows)
        token_ids = self.sampler(logits, rows.column("temperature"), seeds(params), positions, cutoffs)
        return runner.tp.all_reduce_max(token_ids)
