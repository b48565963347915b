"""Defines the runner of a rank on CUDA, which queues steps and replays CUDA graphs."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from time import perf_counter, sleep

import numpy as np
import torch
from torch import nn

from nanovllm.batches.batch import BatchShape, DeviceBatch, HostBatch
from nanovllm.batches.batch_runner import BatchRunner
from nanovllm.cuda import start
from nanovllm.cuda.arena import Arena
from nanovllm.cuda.buffers import Buffers, make_buffers, to_device
from nanovllm.cuda.graphs import DecodeGraphs, MixedGraphs
from nanovllm.cuda.start import RESERVE_BYTES, hash_compiler, threads_in_turn
from nanovllm.engine.features import FEATURES, StepFeature
from nanovllm.engine.forward_output import ForwardOutput, SamplerInput
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.fused import fuse
from nanovllm.fused.decoder import FusedModel
from nanovllm.fused.forms import has_hooks
from nanovllm.layers.sampler import SamplingRows
from nanovllm.utils.tensor_parallel import STEP_TIMEOUT


class CUDAModelRunner(BatchRunner):
    buffers: Buffers
    graphs: DecodeGraphs | None = None
    mixed_graphs: MixedGraphs | None = None

    def _start(self, config, part_done):
        self._memory_before = torch.cuda.memory_allocated(self.device)
        with threads_in_turn(), ThreadPoolExecutor(1) as pool:
            pool.submit(hash_compiler)
            super()._start(config, part_done)

    def _load_model(self):
        with self.arena("weights"):
            return super()._load_model()

    def fuse_layers(self, model: nn.Module) -> None:
        fuse(model)

    def run_batch(self, batch: DeviceBatch) -> tuple[torch.Tensor, SamplerInput]:
        """Let the last MLP compute only the tokens that are sampled, if no other code reads its outputs.

        In CUDA graphs, the last MLP computes all tokens. The number of rows is padded to a power of two, so that most
        kernels are those of decode steps, which were compiled at the start.
        """
        decoder, shape = getattr(self.model.model, "language_model", self.model.model), batch.shape
        num_rows = 1 << (shape.num_sampled_tokens - 1).bit_length() if shape.num_sampled_tokens else shape.num_tokens
        if num_rows >= shape.num_tokens or self._needs_all_outputs(batch, decoder):
            return super().run_batch(batch)
        rows = batch.logits_indices
        decoder.output_rows = torch.cat((rows, rows[-1:].expand(num_rows - len(rows))))
        try:
            return super().run_batch(batch)
        finally:
            decoder.output_rows = None

    def _needs_all_outputs(self, batch: DeviceBatch, decoder: nn.Module) -> bool:
        config, shape = self.config, batch.shape
        if config.enable_lora or config.speculative_config or (config.pooling and config.pooling.mode != "last"):
            return True
        if config.batch_invariant:  # with several ranks, a sum of some rows is rounded differently
            return True
        after_forward = {type(self.features[name]).after_forward for name in batch.feature_arrays}  # may read outputs
        if shape.is_padded or not shape.has_chunks or after_forward - {StepFeature.after_forward}:
            return True
        if has_hooks(self.model, self.model.model):
            return True
        return not (isinstance(decoder, FusedModel) and decoder.can_select_outputs())

    def sampled_states(self, hidden_states: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        if len(hidden_states) == batch.shape.num_tokens:
            return super().sampled_states(hidden_states, batch)
        return hidden_states[: batch.shape.num_sampled_tokens]

    def compute_logits(self, hidden_states: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        head = self.model.lm_head
        head.sampling_params = rows.params  # only rows with filters need the other ranks' logits
        try:
            return super().compute_logits(hidden_states, rows)
        finally:
            head.sampling_params = None

    def arena(self, tag: str) -> AbstractContextManager:
        """Return a context in which new tensors get memory that `sleep` can free under the tag `tag`."""
        if not self.config.enable_sleep_mode:
            return nullcontext()
        self.sleepers[tag] = Arena(self.device)
        return self.sleepers[tag]

    def warm_up(self, part_done: Callable[[str], None]) -> None:
        self.buffers = make_buffers(self.config, self.device)
        self.add_features(FEATURES)  # graphs contain the features' edits of logits
        if start.has_graphs(self):
            start.compile_kernels(self)
        part_done("kernels")
        super().warm_up(part_done)
        start.warm_up_rest(self)
        part_done("graphs")

    def warmup_model(self) -> int:
        return start.memory_left(self, self._memory_before)

    def allocate_kv_cache(self, num_blocks: int, num_layers: int | None = None) -> None:
        with self.arena("kv_cache") if num_layers is None else nullcontext():
            super().allocate_kv_cache(num_blocks, num_layers)

    def time_per_token(self) -> float:
        self.measured_ms_per_token = start.milliseconds_per_token(self)
        return self.measured_ms_per_token

    def capture_cudagraph(self) -> None:
        if start.has_graphs(self):
            start.capture_graphs(self)

    @property
    def budget_name(self) -> str:
        return f"gpu_memory_utilization={self.config.gpu_memory_utilization} of this GPU leaves"

    def cache_budget(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        weights = torch.cuda.memory_allocated(self.device) - self._memory_before
        weights += sum(arena.num_bytes for arena in self.sleepers.values())
        return min(free, int(total * self.config.gpu_memory_utilization) - weights) - RESERVE_BYTES

    @contextmanager
    def on_device(self) -> Iterator[None]:
        with torch.cuda.device(self.device), super().on_device():
            yield

    def prepare(self, step: ScheduledStep) -> HostBatch:
        if step.tokens_per_row > 1:
            step.tokens_per_row = self.config.tokens_per_row  # as in graphs; spare rows copy the last token
        return super().prepare(step)

    def host_buffer(self, shape: BatchShape) -> np.ndarray:
        """Return pinned memory for a batch.

        The step that last used the buffer, two steps ago, must have finished.
        """
        buffers = self.graphs.host_buffers if self._has_decode_graph(shape) else self.buffers.host
        return buffers.current.batch.numpy()

    def _has_decode_graph(self, shape: BatchShape) -> bool:
        return self.graphs is not None and self.graphs.has(shape)

    def padded(self, shape: BatchShape) -> BatchShape:
        graphs = self.mixed_graphs if shape.has_chunks else self.graphs
        return (graphs and graphs.shape_for(shape)) or shape

    @torch.inference_mode()
    def compute(self, batch: HostBatch) -> tuple[torch.Tensor, ForwardOutput]:
        if self._has_decode_graph(batch.shape):
            if batch.feature_arrays:  # the graph edits logits, but does not upload the arrays that the edits read
                self.upload(self._to_device(batch))
            return self.graphs.replay(batch.shape)
        device_batch = self._to_device(batch)
        if self.mixed_graphs and batch.shape.graph_shape in self.mixed_graphs.models:
            output = self.mixed_graphs.replay(batch.shape, lambda: self.upload(device_batch))
        else:
            output = self.forward(device_batch)
        results = output.results[: batch.shape.num_sampled_seqs]
        return self.buffers.host.advance().results_like(results).copy_(results, non_blocking=True), output

    def _to_device(self, batch: HostBatch) -> DeviceBatch:
        return to_device(batch, self.buffers.device)

    def end_of_step(self) -> Callable[[], None]:
        """Return a function that waits for the current step.

        The function raises RuntimeError if another rank is lost or hangs.
        """
        done = torch.cuda.Event()
        done.record()
        return done.synchronize if self.tp.size == 1 else lambda: self._wait(done)

    def _wait(self, done: torch.cuda.Event) -> None:
        begin = perf_counter()
        while not done.query():
            self.tp.check()
            if perf_counter() - begin > STEP_TIMEOUT:
                raise RuntimeError(f"a step was not over after {STEP_TIMEOUT:.0f} s")

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device=self.device).zero_()  # an Arena replaces torch.empty

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def recover(self) -> None:
        with suppress(RuntimeError):
            self.synchronize()
            if self.graphs:
                self.graphs.reset()

    def exit(self) -> None:
        """Free the device's memory, unless another rank is lost and the device hangs."""
        if self.tp.lost and not self._becomes_idle():
            return
        self.graphs = self.mixed_graphs = None
        del self.buffers
        super().exit()
        gc.collect()  # collects objects that refer to each other and to the weights
        torch.cuda.empty_cache()

    def _becomes_idle(self, timeout: float = 5.0) -> bool:
        begin = perf_counter()
        with torch.cuda.device(self.device):
            while not torch.cuda.current_stream().query():
                if perf_counter() - begin > timeout:
                    return False
                sleep(0.001)
        return True
