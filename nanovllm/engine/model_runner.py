"""One rank: its weights, its part of the cache, and the execution of a step on its device."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch import nn

from nanovllm.attention import backend_class
from nanovllm.cache.kv_cache import PagedKV
from nanovllm.config import Config
from nanovllm.engine import request_tables
from nanovllm.engine.batch import BatchShape, DeviceBatch, HostBatch, prepare_batch, shape_of
from nanovllm.engine.features import FEATURES, StepFeature
from nanovllm.engine.request_tables import ForwardOutput, PendingStep, RequestTables, SamplerInput
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.kernels.sampling.sampling_columns import WIDTH, seeds
from nanovllm.layers.attention import Attention
from nanovllm.layers.sampler import Sampler, SamplingRows, logit_cutoffs
from nanovllm.models import make_model
from nanovllm.utils.context import Context, attention_context
from nanovllm.utils.loader import load_model
from nanovllm.utils.tensor_parallel import TensorParallel

CPU_KV_CACHE_BYTES = 2**30  # the cache on a CPU, unless num_kvcache_blocks says otherwise
CPU_OPERATIONS_PER_MS = 2e8  # of matrix products, roughly
MIN_MIXED_TOKENS = 64  # of a step that decodes and computes prompts, however slow the device is


class ModelRunner:
    """Loads the model, owns the cache, and runs steps.

    What a step samples stays on the device, in RequestTables. The next decode step reads its input there, so it can be
    queued before the host knows it.

    This class is for a device that computes each step at once, such as a CPU. On CUDA, `cuda/runner.py` has a
    subclass that queues steps and replays graphs.
    """

    def __init__(self, config: Config, lap: Callable[[str], None], tp: TensorParallel = TensorParallel()):
        """`lap` is called with the name of each part of the start when that is over."""
        self.config = config
        self.tp = tp
        self.device = config.device_of(tp.rank)
        self.sleepers: dict[str, Any] = {}  # what holds the memory that `sleep` gives back, by tag: see rollout/
        with self.on_device():
            self._start(config, lap)

    def _start(self, config: Config, lap: Callable[[str], None]) -> None:
        self.backend = backend_class(config.attention_backend)()
        self.model = self._load_model()
        lap("weights")
        self.cache_groups: dict[Any, list[nn.Module]] = {}  # by spec: see cache/state.py
        for layer in self.model.modules():
            if hasattr(layer, "cache_spec"):
                self.cache_groups.setdefault(layer.cache_spec(), []).append(layer)
            if isinstance(layer, Attention):
                layer.backend = self.backend
                self.backend.set_head_shape(layer.num_heads // layer.num_kv_heads, layer.head_dim, config.dtype)
        if any(spec.of_states for spec in self.cache_groups):
            from nanovllm.cache.state import fit_states  # few models have layers with a state

            fit_states(self)
        self.caches: dict[Any, list[torch.Tensor]] = {}  # the tensors of each group
        self.sampler = Sampler(self.tp, self.model.lm_head.first_id)
        self.pad_req_index = config.max_num_seqs
        loaded = [name for name, feature in FEATURES.items() if isinstance(feature.home, type)]  # those from outside
        if config.tokens_per_row > 1:
            loaded.append("spec_decode")
        sizes = config.max_num_seqs, config.tokens_per_row, config.max_blocks_per_seq, WIDTH
        self.tables = RequestTables.zeros(*sizes, self.device)
        num_rows = config.max_num_seqs * config.tokens_per_row
        # zeros that kernels of filters count in, and leave as zeros
        self._num_finished_programs = torch.zeros(num_rows, dtype=torch.int32, device=self.device)
        self.features: dict[str, StepFeature] = {}
        self.add_features(loaded)
        self.warm_up(lap)

    def warm_up(self, lap: Callable[[str], None]) -> None:
        """Size and allocate the cache, and whatever else the device needs before its first step."""
        config, model = self.config, self.config.model_config
        if config.num_kvcache_blocks is None:
            self.size_kv_cache(self.cache_budget(), "the budget on a CPU is")
        self.allocate_kv_cache(config.num_kvcache_blocks)
        self.milliseconds_per_token = model.num_hidden_layers * model.layer_operations / CPU_OPERATIONS_PER_MS
        if config.max_num_mixed_tokens is None:
            self.size_mixed_steps(self.milliseconds_per_token)
        lap("cache")

    def cache_budget(self) -> int:
        """The bytes for the cache if its size is not set; a subclass may estimate them before it has measured them."""
        return CPU_KV_CACHE_BYTES

    def on_device(self) -> AbstractContextManager:
        """Suspend the caller's autocast, which would change our dtypes; a subclass also makes the device current."""
        kind = self.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

    def size_kv_cache(self, available: int, limit: str) -> None:
        """Set how many cache blocks fit into `available` bytes. ValueError, which begins with `limit`, for too few."""
        config, state_bytes = self.config, self.cache_bytes(num_blocks=0)
        block_bytes = self.cache_bytes(num_blocks=1) - state_bytes
        num_blocks = self.min_of_ranks((available - state_bytes) // block_bytes)
        if num_blocks < config.max_blocks_per_seq:
            from nanovllm.utils.refusals import cache_too_small

            raise cache_too_small(config, block_bytes, state_bytes, available, limit)
        config.resolve(num_kvcache_blocks=num_blocks)

    def size_mixed_steps(self, milliseconds_per_token: float) -> None:
        """Set how many tokens of prompts are computed within `max_mixed_step_ms`."""
        num_fitting = int(self.config.max_mixed_step_ms / milliseconds_per_token)
        num_tokens = self.min_of_ranks(max(MIN_MIXED_TOKENS, num_fitting))  # all ranks capture the same graphs
        # whole tiles of the matrix products, whose rows past the last token would be padding
        self.config.resolve(max_num_mixed_tokens=num_tokens // 1024 * 1024 or num_tokens // 64 * 64)

    def min_of_ranks(self, number: int) -> int:
        return -self.tp.all_reduce_max(torch.tensor([-number], device=self.device)).item()

    def run(self, step: ScheduledStep) -> PendingStep:
        return self.launch(self.prepare(step), step)

    def add_features(self, names: Collection[str]) -> None:
        """Load features. They edit logits in the order of FEATURES."""
        loaded = self.features | {name: FEATURES[name].load()(self) for name in names if name not in self.features}
        self.features = {name: loaded[name] for name in [*FEATURES] if name in loaded}

    def host_buffer(self, shape: BatchShape) -> np.ndarray:
        """The memory in which the next batch is prepared: at least `shape.size` words."""
        return np.empty(shape.size, np.int32)

    def padded(self, shape: BatchShape) -> BatchShape:
        """The shape in which a step is computed."""
        return shape

    def prepare(self, step: ScheduledStep) -> HostBatch:
        if step.tokens_per_row > 1:
            step.feature_names.add("spec_decode")
        names = sorted(step.feature_names)  # the same layout in every run
        prepared = {name: FEATURES[name].load().prepare(step) for name in names}
        arrays = {name: found for name, found in prepared.items() if found is not None}
        block_size, first_row = self.config.kvcache_block_size, step.num_decodes * step.tokens_per_row
        backend_arrays = self.backend.prepare_chunks([c[1:] for c in step.chunks], first_row) if step.chunks else {}
        shape = self.padded(shape_of(step, block_size, backend_arrays))
        return prepare_batch(step, shape, backend_arrays, arrays, self.host_buffer, block_size, self.pad_req_index)

    def launch(self, batch: HostBatch, step: ScheduledStep | None = None) -> PendingStep:
        """Launch a prepared batch. On CUDA it is only queued: this returns while it, or even the step before, runs."""
        self.tp.check()
        with self.on_device():
            if batch.shape.num_block_copies:
                from nanovllm.features.block_copies import copy_blocks  # only where sequences fork, or states are kept

                copy_blocks(batch.block_copies, self._cached_token_ids, self.caches)
            on_host, output = self.compute(batch)
            arrays = batch.feature_arrays.items()
            pending = {name: self.features[name].after_forward(found, output) for name, found in arrays}
            return PendingStep(step, on_host, pending, self.end_of_step())

    @torch.inference_mode()
    def compute(self, batch: HostBatch) -> tuple[torch.Tensor, ForwardOutput]:
        """Run a batch; returns its results in host memory, where they are at the end of the step, and its output."""
        # with little work to share, threads mostly wait for each other, all the more on busy cores
        num_threads, is_small = torch.get_num_threads(), batch.shape.num_tokens * self.milliseconds_per_token < 1
        torch.set_num_threads(1 if is_small else num_threads)
        try:
            output = self.forward(batch.to(self.device))
            return output.results.cpu(), output
        finally:
            torch.set_num_threads(num_threads)

    def end_of_step(self) -> Callable[[], None]:
        """A function that waits until the device is done with what was queued so far."""
        return lambda: None

    def upload(self, batch: DeviceBatch) -> None:
        """Write the parameters and block tables of new requests to the device's tables; features take their arrays."""
        if batch.shape.num_new_requests:
            new = batch.new_req_indices.long()
            self.tables.params[new] = batch.params
            self.tables.block_tables[new, : batch.shape.max_blocks_per_seq] = batch.new_block_tables
        self.add_features(batch.feature_arrays)
        for name, arrays in batch.feature_arrays.items():
            self.features[name].upload(arrays)

    def forward(self, batch: DeviceBatch) -> ForwardOutput:
        """A whole step on the device. CUDA graphs capture this for decode batches, so it never waits for the device."""
        self.upload(batch)
        hidden_states, sampler_input = self.run_model(batch)
        return ForwardOutput(*self.sample(sampler_input), hidden_states, sampler_input)

    def run_model(self, batch: DeviceBatch) -> tuple[torch.Tensor, SamplerInput]:
        """Hidden states [T, hidden_size] and the sampler's input; the cache then has the step's keys and token ids."""
        if batch.shape.num_decodes:
            request_tables.place_decodes(self.tables, batch, self.config.kvcache_block_size)
        self.slot_token_ids[batch.slot_mapping] = batch.input_ids  # a slot of -1 is the last, which belongs to no block
        with attention_context(self._context(batch)):
            hidden_states = self.model(batch.input_ids, batch.positions)
        if not batch.shape.has_chunks:
            return hidden_states, SamplerInput(hidden_states, batch.req_indices, batch.positions, batch.block_tables)
        sampled, positions = (x.index_select(0, batch.logits_indices) for x in (hidden_states, batch.positions))
        block_tables = batch.block_tables.index_select(0, batch.sampled_rows)
        return hidden_states, SamplerInput(sampled, batch.req_indices, positions, block_tables)

    def _context(self, batch: DeviceBatch) -> Context:
        shape = batch.shape
        return Context(
            num_decodes=shape.num_decodes,
            tokens_per_row=shape.tokens_per_row,
            slot_mapping=batch.slot_mapping,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            max_context_len=min(shape.max_blocks_per_seq * self.config.kvcache_block_size, self.config.max_model_len),
            max_seqlen_q=shape.max_seqlen_q,
            cu_seqlens_q=batch.cu_seqlens_q,
            state_rows=batch.state_rows if shape.has_chunks else batch.req_indices.expand(2, -1),
            backend_arrays=batch.backend_arrays,
            num_decodes_on_device=batch.num_decodes if shape.is_padded else None,
        )

    def sampling_rows(self, x: SamplerInput) -> SamplingRows:
        req_indices, num_rows = x.req_indices, len(x.positions)
        if num_rows > len(req_indices):  # drafts
            req_indices = req_indices.repeat_interleave(num_rows // len(req_indices))
        params, scratch = self.tables.params.index_select(0, req_indices), self._num_finished_programs
        return SamplingRows(params, req_indices, x.positions, x.block_tables, self._cached_token_ids, scratch)

    def sample(self, x: SamplerInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample a token for each row: ForwardOutput's `token_ids` and `results`."""
        rows = self.sampling_rows(x)
        logits = self.compute_logits(x.hidden_states, rows)  # [S, vocabulary]
        for feature in self.features.values():
            feature.edit_logits(logits, rows)
        cutoffs = logit_cutoffs(logits, rows)
        logits = self.model.lm_head.local_logits(logits)
        token_ids = self.sampler(logits, rows.column("temperature"), seeds(rows.params), x.positions, cutoffs)
        counts = request_tables.accept(x.req_indices, x.positions, token_ids, self.tables)
        if counts is None:
            return token_ids, token_ids
        return token_ids, torch.cat((token_ids.view(len(counts), -1), counts.unsqueeze(1)), 1)

    def compute_logits(self, hidden_states: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        return self.model.compute_logits(hidden_states)

    @property
    def kv_cache(self) -> torch.Tensor:
        """[2, layers, blocks, block_size, kv_heads, head_dim]: the keys and values of the first group of layers."""
        return next(tensors[0] for spec, tensors in self.caches.items() if isinstance(spec, PagedKV))

    @property
    def _cached_token_ids(self) -> torch.Tensor:
        """[blocks, block_size] int32: the ids of the tokens whose keys and values are in the cache."""
        return self.slot_token_ids[:-1].view(-1, self.config.kvcache_block_size)

    def _load_model(self) -> nn.Module:
        config = self.config.model_config
        with torch.device(self.device):
            model = make_model(config, self.config.max_model_len, self.tp)
        # safetensors reads into tensors on the default device, whichever the caller has set
        with nullcontext() if torch.empty(0).device.type == "cpu" else torch.device("cpu"):
            load_model(model, Path(self.config.model), self.device, self.config.load_format, self.tp.rank == 0)
        self.fuse_layers(model)
        return model.eval()

    def fuse_layers(self, model: nn.Module) -> None:
        """A subclass may put fused forms in the place of plain layers."""

    def allocate_kv_cache(self, num_blocks: int, num_layers: int | None = None) -> None:
        """Allocate the tensors of each group of layers, of which each layer gets a part.

        With `num_layers=1` all layers of a group share one part, which is for steps whose results do not matter.
        """
        for spec, layers in self.cache_groups.items():
            # zeros: attention multiplies masked slots by 0, and a NaN in them would spread
            tensors = spec.tensors(num_layers or len(layers), num_blocks, self.config)
            self.caches[spec] = [self.zeros(tensor) for tensor in tensors]
            for i, layer in enumerate(layers):
                parts = [tensor[:, i % tensor.shape[1]] for tensor in self.caches[spec]]
                layer.cache = spec.make(parts, self.config)
        # by cache slot; tokens that are not stored write to one slot more
        num_slots = num_blocks * self.config.kvcache_block_size
        self.slot_token_ids = torch.zeros(num_slots + 1, dtype=torch.int32, device=self.device)

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        """The shape and dtype of a tensor on the meta device. The system maps pages of NumPy's zeros on first use."""
        return torch.from_numpy(np.zeros(like.nbytes, np.uint8)).view(like.dtype).view(like.shape).to(self.device)

    def cache_bytes(self, num_blocks: int) -> int:
        groups = self.cache_groups.items()
        tensors = (x for spec, layers in groups for x in spec.tensors(len(layers), num_blocks, self.config))
        return sum(tensor.nbytes for tensor in tensors)

    def recover(self) -> None:
        """Wait for the queued steps and drop their results. Never raises, as it is called after errors."""

    def exit(self) -> None:
        """Free the device's memory."""
        for layer in (layer for layers in self.cache_groups.values() for layer in layers):
            layer.cache = None
        for parameter in self.model.parameters():  # each refers to its loader, which refers to it
            del parameter.weight_loader
        self.model = self.tables = self.slot_token_ids = None
        self.cache_groups, self.caches, self.features, self.sleepers = {}, {}, {}, {}
        self.tp.close()


# by the type of the device, module:class of a runner; others have a ModelRunner
RUNNERS = {"cuda": "nanovllm.cuda.runner:CUDAModelRunner"}


def make_runner(config: Config, lap: Callable[[str], None], tp: TensorParallel) -> ModelRunner:
    """The runner of this rank's device."""
    kind = config.device_of(tp.rank).type
    home = f"nanovllm.invariant.{kind}:Runner" if config.batch_invariant else RUNNERS.get(kind)
    return (resolve_name(home) if home else ModelRunner)(config, lap, tp)
