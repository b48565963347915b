"""Defines a runner that prepares each step as a flat batch, before the host knows the previous step's tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nanovllm.batches import request_tables
from nanovllm.batches.batch import BatchShape, DeviceBatch, HostBatch, prepare_batch, shape_of
from nanovllm.batches.request_tables import RequestTables
from nanovllm.cache.state import fit_states
from nanovllm.cache.window_tables import divide_layers, place_windows
from nanovllm.engine.forward_output import ForwardOutput, PendingStep, SamplerInput
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.kernels.sampling.sampling_columns import WIDTH, seeds
from nanovllm.layers.sampler import SamplingRows
from nanovllm.utils.context import Context, attention_context


class BatchRunner(ModelRunner):
    """Replaces the plain ModelRunner in engines for which `is_plain` (engine/runners.py) returns False.

    Sampled tokens stay on the device in RequestTables, so the next step can be queued before the host knows the tokens.

    On a CPU, this class computes each step immediately. On CUDA, the subclass in cuda/runner.py queues steps and
    replays graphs.
    """

    host_blocks: Any = None  # with `swap_space`: see tiers/
    measured_ms_per_token: float | None = None  # result of `time_per_token`, if it was measured

    def __init__(self, *args: Any):
        self.sleepers: dict[str, Any] = {}  # owners of the memory that `sleep` frees, by tag: see rollout/
        super().__init__(*args)

    def make_tables(self) -> None:
        config = self.config
        if any(spec.of_states for spec in self.cache_groups):
            fit_states(self)
        if len(self.cache_groups) > 1:
            divide_layers(self)
        sizes = config.max_num_seqs, config.tokens_per_row, config.max_blocks_per_seq, WIDTH
        self.tables = RequestTables.zeros(*sizes, self.device, len(config.table_views))
        self.pad_req_index = config.max_num_seqs
        # counters for the filters' kernels, which reset them to zero
        num_rows = config.max_num_seqs * config.tokens_per_row
        self._num_finished_programs = torch.zeros(num_rows, dtype=torch.int32, device=self.device)
        if config.tokens_per_row > 1:
            self.add_features(["spec_decode"])

    def run(self, step: ScheduledStep) -> PendingStep:
        return self.launch(self.prepare(step), step)

    # -- on the host ---------------------------------------------------------------------------------------------------

    def prepare(self, step: ScheduledStep) -> HostBatch:
        if step.tokens_per_row > 1:
            step.feature_names.add("spec_decode")
        block_size, first_row = self.config.kvcache_block_size, step.num_decode_tokens
        views = self.config.table_views
        backend_arrays = self.backend.prepare_chunks([c[1:] for c in step.chunks], first_row) if step.chunks else {}
        arrays = self.prepare_features(step)
        shape = self.padded(shape_of(step, block_size, backend_arrays, len(views)))
        sizes = block_size, self.pad_req_index, views
        return prepare_batch(step, shape, backend_arrays, arrays, self.host_buffer, *sizes)

    def padded(self, shape: BatchShape) -> BatchShape:
        """Return the shape in which the step is computed. A subclass may add padding to the shape."""
        return shape

    def host_buffer(self, shape: BatchShape) -> np.ndarray:
        return np.empty(shape.size, np.int32)

    def launch(self, batch: HostBatch, step: ScheduledStep | None = None) -> PendingStep:
        """Launch a prepared batch. On CUDA, this method only queues the batch."""
        self.tp.check()
        with self.on_device():
            if batch.shape.num_block_copies:
                self.copy_blocks(batch.block_copies)
            on_host, output = self.compute(batch)
            arrays = batch.feature_arrays.items()
            pending = {name: self.features[name].after_forward(x, output) for name, x in arrays}
            return PendingStep(step, on_host, pending, self.end_of_step())

    @torch.inference_mode()
    def compute(self, batch: HostBatch) -> tuple[torch.Tensor, ForwardOutput]:
        """Run a batch.

        Return (results, output). `results` are in host memory, and become valid when the step ends. `output` is on the
        device.
        """
        with self.few_threads(batch.shape.num_tokens):
            output = self.forward(batch.to(self.device))
            return output.results.cpu(), output

    def end_of_step(self) -> Callable[[], None]:
        """Return a function that waits until the device has finished all work queued so far."""
        return lambda: None

    # -- on the device -------------------------------------------------------------------------------------------------

    def forward(self, batch: DeviceBatch) -> ForwardOutput:
        """Compute a whole step on the device. CUDA graphs capture this method, so it never waits for the device."""
        self.upload(batch)
        hidden_states, x = self.run_batch(batch)
        return ForwardOutput(*self.sample_and_accept(x), hidden_states, x)

    def upload(self, batch: DeviceBatch) -> None:
        """Write new requests' parameters and block tables to the device's tables, and upload the features' arrays."""
        if batch.shape.num_new_requests:
            new = batch.new_req_indices.long()
            self.tables.params[new] = batch.params
            self.tables.block_tables[new, : batch.shape.max_blocks_per_seq] = batch.new_block_tables
            if batch.shape.num_window_tables:
                tables = batch.new_window_tables.transpose(0, 1)
                self.tables.window_tables[new, :, : batch.shape.max_blocks_per_seq] = tables
        self.add_features(batch.feature_arrays)
        for name, arrays in batch.feature_arrays.items():
            self.features[name].upload(arrays)

    def run_batch(self, batch: DeviceBatch) -> tuple[torch.Tensor, SamplerInput]:
        """Fill in decode rows, and run the model. Return hidden states [T, hidden_size] and the sampler's input."""
        if batch.shape.num_decode_rows:
            request_tables.place_decodes(self.tables, batch, self.config.kvcache_block_size)
            if batch.shape.num_window_tables:
                place_windows(self.tables, batch, self.config.kvcache_block_size)
        with attention_context(self._context(batch)):
            hidden_states = self.run_model(batch.input_ids, batch.positions)
        if not batch.shape.has_chunks:
            return hidden_states, SamplerInput(hidden_states, batch.req_indices, batch.positions, batch.block_tables)
        sampled = self.sampled_states(hidden_states, batch)
        positions = batch.positions.index_select(0, batch.logits_indices)
        block_tables = batch.block_tables.index_select(0, batch.sampled_rows)
        return hidden_states, SamplerInput(sampled, batch.req_indices, positions, block_tables)

    def sampled_states(self, hidden_states: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        return hidden_states.index_select(0, batch.logits_indices)

    def _context(self, batch: DeviceBatch) -> Context:
        shape = batch.shape
        context = Context(
            shape.has_chunks,
            num_decode_rows=shape.num_decode_rows,
            tokens_per_row=shape.tokens_per_row,
            slot_mapping=batch.slot_mapping,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            max_context_len=min(shape.max_blocks_per_seq * self.config.kvcache_block_size, self.config.max_model_len),
            max_seqlen_q=shape.max_seqlen_q,
            cu_seqlens_q=batch.cu_seqlens_q,
            state_rows=batch.state_rows if shape.has_chunks else batch.req_indices.expand(2, -1),
            backend_arrays=batch.backend_arrays,
            num_decode_rows_on_device=batch.num_decode_rows if shape.is_padded else None,
        )
        context.window_contexts = [
            replace(context, slot_mapping=slots[: shape.num_tokens], block_tables=tables[: shape.num_seqs], plans={})
            for slots, tables in zip(batch.window_slots, batch.window_tables)
        ]
        return context

    def sample_and_accept(self, x: SamplerInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample tokens, and store them in the tables. Return ForwardOutput's `token_ids` and `results`."""
        rows = self.sampling_rows(x)
        logits = self.compute_logits(x.hidden_states, rows)
        cutoffs = self.edit_logits(logits, rows)
        logits = self.model.lm_head.local_logits(logits)
        token_ids = self.sampler(logits, rows.column("temperature"), seeds(rows.params), x.positions, cutoffs)
        counts = request_tables.accept(x.req_indices, x.positions, token_ids, self.tables)
        if counts is None:
            return token_ids, token_ids
        return token_ids, torch.cat((token_ids.view(len(counts), -1), counts.unsqueeze(1)), 1)

    def compute_logits(self, hidden_states: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        return self.model.compute_logits(hidden_states)

    def sampling_rows(self, x: SamplerInput) -> SamplingRows:
        req_indices, num_rows = x.req_indices, len(x.positions)
        if num_rows > len(req_indices):  # drafts
            req_indices = req_indices.repeat_interleave(num_rows // len(req_indices))
        params, scratch = self.tables.params.index_select(0, req_indices), self._num_finished_programs
        return SamplingRows(params, req_indices, x.positions, x.block_tables, self._cached_token_ids, scratch)

    # -- the cache -----------------------------------------------------------------------------------------------------

    def allocate_kv_cache(self, num_blocks: int, num_layers: int | None = None) -> None:
        super().allocate_kv_cache(num_blocks * self.config.num_block_tables, num_layers)

    def cache_bytes(self, num_blocks: int) -> int:
        return super().cache_bytes(num_blocks * self.config.num_block_tables)

    def exit(self) -> None:
        self.tables = self.host_blocks = None
        self.sleepers = {}
        super().exit()
