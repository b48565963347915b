"""Defines the plain model runner, which runs steps, and holds the weights and the KV cache of a rank."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from nanovllm.attention import backend_class
from nanovllm.attention.base import AttentionBackend, connect
from nanovllm.cache.block_copies import copy_blocks
from nanovllm.cache.kv_cache import AttentionSpec
from nanovllm.config import Config
from nanovllm.engine.features import FEATURES, Arrays, StepFeature
from nanovllm.engine.forward_output import ForwardOutput, PendingStep, SamplerInput
from nanovllm.engine.scheduled_step import ScheduledSequence, ScheduledStep
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.sampling.sampling_columns import params_rows, seeds_of
from nanovllm.layers.sampler import Sampler, SamplingRows, logit_cutoffs
from nanovllm.models import make_model
from nanovllm.utils.context import get_context, reset_context, set_context
from nanovllm.utils.loader import load_model
from nanovllm.utils.refusals import cache_too_small
from nanovllm.utils.tensor_parallel import TensorParallel

CPU_KV_CACHE_BYTES = 2**30  # unless num_kvcache_blocks is set
CPU_OPERATIONS_PER_MS = 2e8  # a rough estimate for matmuls
MIN_MIXED_TOKENS = 64  # the least `max_num_mixed_tokens`, even on a slow device


class ModelRunner:
    """Loads the model, owns the KV cache, and runs one step at a time. runners.py chooses this class or a subclass."""

    budget_name = "the budget on a CPU is"  # for error messages about the cache size

    def __init__(
        self,
        config: Config,
        part_done: Callable[[str], None] = lambda part: None,
        tp: TensorParallel = TensorParallel(),
    ):
        """Load the model and allocate the cache. `part_done(name)` is called after each startup phase."""
        self.config = config
        self.tp = tp
        self.device = config.device_of(tp.rank)
        with self.on_device():
            self._start(config, part_done)

    def _start(self, config: Config, part_done: Callable[[str], None]) -> None:
        backend = self.make_backend()
        self.model: Any = self._load_model()
        part_done("weights")
        self.backend = connect(self.model, backend, self.device.type, config.dtype)
        self.cache_groups: dict[Any, list[nn.Module]] = {}  # layers by the spec of their cache: see cache/state.py
        for layer in self.model.modules():
            if hasattr(layer, "cache_spec"):
                self.cache_groups.setdefault(layer.cache_spec(), []).append(layer)
        self.caches: dict[Any, list[torch.Tensor]] = {}  # tensors by spec
        self.sampler = Sampler(self.tp, self.model.lm_head.first_id)
        model = config.model_config
        self.milliseconds_per_token = model.num_hidden_layers * model.layer_operations / CPU_OPERATIONS_PER_MS
        self.features: dict[str, StepFeature] = {}
        self.make_tables()
        from_outside = [name for name, feature in FEATURES.items() if isinstance(feature.home, type)]
        self.add_features(from_outside)
        self.edits_all_rows = bool(from_outside)  # these features also edit logits of requests without features
        self.warm_up(part_done)

    def make_backend(self) -> AttentionBackend:
        return backend_class(self.config.attention_backend)()

    def make_tables(self) -> None:
        """Allocate tables of requests in subclasses, after the model is loaded, and before the cache is allocated."""

    def warm_up(self, part_done: Callable[[str], None]) -> None:
        """Choose the cache's size, allocate the cache, and prepare the device for the first step."""
        config = self.config
        if config.num_kvcache_blocks is None:
            self.size_kv_cache(self.warmup_model())
        self.allocate_kv_cache(config.num_kvcache_blocks)
        if config.max_num_mixed_tokens is None:
            self.size_mixed_steps(self.time_per_token())
        part_done("cache")
        self.capture_cudagraph()

    def warmup_model(self) -> int:
        """Return how many bytes the cache may use. On CUDA, run the largest step to measure the memory that remains."""
        return self.cache_budget()

    def cache_budget(self) -> int:
        """Estimate the result of `warmup_model`."""
        return CPU_KV_CACHE_BYTES

    def time_per_token(self) -> float:
        """Return the milliseconds per prompt token, which are estimated on a CPU and measured on CUDA."""
        return self.milliseconds_per_token

    def capture_cudagraph(self) -> None:
        """Capture steps in CUDA graphs, in subclasses."""

    def on_device(self) -> AbstractContextManager:
        """Suspend the caller's autocast, because it would change dtypes. On CUDA, also make the device current."""
        kind = self.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

    def size_kv_cache(self, available: int) -> None:
        """Set `num_kvcache_blocks` so that the cache fills `available` bytes, or raise ValueError."""
        config, state_bytes = self.config, self.cache_bytes(num_blocks=0)
        block_bytes = self.cache_bytes(num_blocks=1) - state_bytes
        num_blocks = self.min_of_ranks((available - state_bytes) // block_bytes)
        if num_blocks < config.max_blocks_per_seq:
            raise cache_too_small(config, block_bytes, state_bytes, available, self.budget_name)
        config.resolve(num_kvcache_blocks=num_blocks)

    def size_mixed_steps(self, milliseconds_per_token: float) -> None:
        """Set `max_num_mixed_tokens` to the tokens that `max_mixed_step_ms` allows, in whole GEMM tiles."""
        num_fitting = int(self.config.max_mixed_step_ms / milliseconds_per_token)
        num_tokens = self.min_of_ranks(max(MIN_MIXED_TOKENS, num_fitting))  # all ranks capture the same graphs
        self.config.resolve(max_num_mixed_tokens=num_tokens // 1024 * 1024 or num_tokens // 64 * 64)

    def min_of_ranks(self, number: int) -> int:
        return -self.tp.all_reduce_max(torch.tensor([-number], device=self.device)).item()

    # -- a step --------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, step: ScheduledStep) -> PendingStep:
        """Compute a step, and sample a token for each sequence in `step.sampled_seqs`."""
        rows, self._sampled_seqs = step.rows, step.sampled_seqs  # see `sampling_rows`
        with self.on_device(), self.few_threads(sum(end - start for _, start, end in rows)):
            arrays = self.start_features(step) if step.feature_names else {}
            if step.copies:
                self.copy_blocks(np.array([[*step.copies.values()], [*step.copies]], np.int32))
            try:
                if step.chunks:
                    input_ids, positions = self.prepare_prefill(rows, step.num_decodes)
                else:
                    input_ids, positions = self.prepare_decode(rows)
                hidden_states = self.run_model(input_ids, positions)
                sampler_input = self.sampler_input(hidden_states, positions, step)
            finally:
                reset_context()
            token_ids = self.sample(sampler_input, step.sampled_seqs)
            output = ForwardOutput(token_ids, token_ids, hidden_states, sampler_input)
            pending = {name: self.features[name].after_forward(x, output) for name, x in arrays.items()}
            return PendingStep(step, token_ids.cpu(), pending, lambda: None)

    def prepare_prefill(
        self, rows: Iterable[ScheduledSequence | Sequence], num_decodes: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Set the context of a step with prompts. Return the step's token ids and positions, each [T] int32.

        The first `num_decodes` rows are decode rows.
        """
        rows = [x if isinstance(x, ScheduledSequence) else ScheduledSequence.of(x) for x in rows]
        block_size = self.config.kvcache_block_size
        input_ids, positions, slot_mapping, cu_seqlens_q = [], [], [], [0]
        for seq, start, end in rows:
            input_ids += seq.token_ids[start:end]
            positions += range(start, end)
            slot_mapping += [seq.block_table[i // block_size] * block_size + i % block_size for i in range(start, end)]
            cu_seqlens_q.append(cu_seqlens_q[-1] + end - start)
        chunks = [(start, end) for _, start, end in rows[num_decodes:]]
        set_context(
            True,
            cu_seqlens_q=self.int_tensor(cu_seqlens_q),
            max_seqlen_q=max(end - start for start, end in chunks),
            slot_mapping=self.int_tensor(slot_mapping),
            context_lens=self.int_tensor([end for _, _, end in rows]),
            max_context_len=max(end for _, _, end in rows),
            block_tables=self.prepare_block_tables([seq for seq, _, _ in rows]),
            num_decode_rows=num_decodes,
            backend_arrays={k: self.int_tensor(x) for k, x in self.backend.prepare_chunks(chunks, num_decodes).items()},
        )
        return self.int_tensor(input_ids), self.int_tensor(positions)

    def prepare_decode(self, rows: Iterable[ScheduledSequence | Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """Set the context of a step without prompts. Return the step's token ids and positions, each [B] int32."""
        rows = [x if isinstance(x, ScheduledSequence) else ScheduledSequence.of(x) for x in rows]
        block_size = self.config.kvcache_block_size
        input_ids, positions, slot_mapping, context_lens = [], [], [], []
        for seq, _, end in rows:
            position = end - 1
            input_ids.append(seq.token_ids[position])
            positions.append(position)
            slot_mapping.append(seq.block_table[position // block_size] * block_size + position % block_size)
            context_lens.append(end)
        set_context(
            False,
            slot_mapping=self.int_tensor(slot_mapping),
            context_lens=self.int_tensor(context_lens),
            max_context_len=max(context_lens),
            block_tables=self.prepare_block_tables([seq for seq, _, _ in rows]),
            num_decode_rows=len(rows),
        )
        return self.int_tensor(input_ids), self.int_tensor(positions)

    def prepare_block_tables(self, seqs: list[Sequence]) -> torch.Tensor:
        """Return the block ids of each sequence, padded with zeros: [B, W] int32."""
        width = max(len(seq.block_table) for seq in seqs)
        return self.int_tensor([seq.block_table + [0] * (width - len(seq.block_table)) for seq in seqs])

    def prepare_sample(self, seqs: list[Sequence]) -> torch.Tensor:
        """Return the temperatures [S] float32, with 0 for greedy sampling."""
        return torch.tensor([seq.temperature for seq in seqs], dtype=torch.float32, device=self.device)

    def run_model(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Store the step's token ids next to its keys and values, and return hidden states [T, hidden_size]."""
        self.slot_token_ids[get_context().slot_mapping] = input_ids  # padding's slot -1 is the extra slot at the end
        return self.model(input_ids, positions)

    def sampler_input(self, hidden_states: torch.Tensor, positions: torch.Tensor, step: ScheduledStep) -> SamplerInput:
        """Select the last token of each sampled row."""
        context, req_indices = get_context(), self.int_tensor([seq.req_index for seq in step.sampled_seqs])
        if not context.is_prefill:
            return SamplerInput(hidden_states, req_indices, positions, context.block_tables)
        rows = self.int_tensor(step.sampled_rows)
        last = context.cu_seqlens_q[rows + 1] - 1
        return SamplerInput(hidden_states[last], req_indices, positions[last], context.block_tables[rows])

    def sample(self, x: SamplerInput, seqs: list[Sequence]) -> torch.Tensor:
        """Sample a token id for each of `seqs`. Return an int32 tensor [S]."""
        logits, cutoffs = self.model.compute_logits(x.hidden_states), None  # [S, vocabulary]
        if self.edits_all_rows or any(seq.feature_state or seq.params.has_filters for seq in seqs):
            cutoffs = self.edit_logits(logits, self.sampling_rows(x))
        seeds = self.int_tensor(seeds_of(seqs))
        return self.sampler(logits, self.prepare_sample(seqs), seeds, x.positions, cutoffs)

    def edit_logits(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """Let features edit logits [S, vocabulary] in place. Return cutoffs [S] for min-p, top-k and top-p."""
        for feature in self.features.values():
            feature.edit_logits(logits, rows)
        return logit_cutoffs(logits, rows)

    def sampling_rows(self, x: SamplerInput) -> SamplingRows:
        """Return the data about sampled rows that features and filters need."""
        params, scratch = self.int_tensor(params_rows(self._sampled_seqs)), torch.zeros_like(x.req_indices)
        return SamplingRows(params, x.req_indices, x.positions, x.block_tables, self._cached_token_ids, scratch)

    def int_tensor(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=self.device)

    @contextmanager
    def few_threads(self, num_tokens: int) -> Iterator[None]:
        """Use a single CPU thread for a small step, because several threads would mostly wait for each other."""
        num_threads = torch.get_num_threads()
        if num_tokens * self.milliseconds_per_token < 1:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)

    def copy_blocks(self, copies: np.ndarray) -> None:
        """Copy cache blocks and states, for forks and snapshots. `copies` [2, C] contains sources and targets."""
        copy_blocks(copies, self._cached_token_ids, self.caches)

    # -- features ------------------------------------------------------------------------------------------------------

    def add_features(self, names: Collection[str]) -> None:
        """Load features. Loaded features edit logits in the order of the table FEATURES."""
        loaded = self.features | {name: FEATURES[name].load()(self) for name in names if name not in self.features}
        self.features = {name: loaded[name] for name in [*FEATURES] if name in loaded}

    def start_features(self, step: ScheduledStep) -> dict[str, Arrays]:
        """Prepare the arrays of a step's features and upload them. Return the arrays on the host."""
        prepared = self.prepare_features(step)
        self.add_features(prepared)
        host_arrays: dict[str, Arrays] = {}
        for name, arrays in prepared.items():
            host_arrays[name] = {key: np.asarray(x, np.int32) for key, x in arrays.items()}
            self.features[name].upload({key: torch.from_numpy(x) for key, x in host_arrays[name].items()})
        return host_arrays

    def prepare_features(self, step: ScheduledStep) -> dict[str, Arrays]:
        """Return the arrays of each feature of a step, in an order that does not depend on the run."""
        prepared = {name: FEATURES[name].load().prepare(step) for name in sorted(step.feature_names)}
        return {name: arrays for name, arrays in prepared.items() if arrays is not None}

    # -- the cache -----------------------------------------------------------------------------------------------------

    @property
    def kv_cache(self) -> torch.Tensor:
        """The keys and values of the first group of layers, [2, layers, blocks, block_size, kv_heads, head_dim]."""
        return next(tensors[0] for spec, tensors in self.caches.items() if isinstance(spec, AttentionSpec))

    @property
    def _cached_token_ids(self) -> torch.Tensor:
        """The token ids [blocks, block_size] int32 that belong to the cached keys and values."""
        return self.slot_token_ids[:-1].view(-1, self.config.kvcache_block_size)

    def _load_model(self) -> nn.Module:
        with torch.device(self.device):
            model = self.make_model()
        # safetensors reads into tensors on the default device, which the caller may have changed
        with nullcontext() if torch.empty(0).device.type == "cpu" else torch.device("cpu"):
            load_model(model, Path(self.config.model), self.device, self.config.load_format, self.tp.rank == 0)
        if self.config.enable_lora:
            from nanovllm.lora.adapter_stacks import add_adapters  # few engines have adapters

            add_adapters(model, self.config, self.device)
        self.fuse_layers(model)
        return model.eval()

    def make_model(self) -> nn.Module:
        """Make this rank's model, without weights."""
        return make_model(self.config.model_config, self.config.max_model_len, self.tp)

    def fuse_layers(self, model: nn.Module) -> None:
        """Replace layers with fused forms, in subclasses."""

    def allocate_kv_cache(self, num_blocks: int, num_layers: int | None = None) -> None:
        """Allocate the cache tensors of each group of layers, and assign each layer its part.

        With `num_layers` = 1, all layers of a group share one part, for steps whose results do not matter.
        """
        for spec, layers in self.cache_groups.items():
            # zeros, because attention multiplies masked slots by 0, and a NaN there would spread
            tensors = spec.tensors(num_layers or len(layers), num_blocks, self.config)
            self.caches[spec] = [self.zeros(tensor) for tensor in tensors]
            for i, layer in enumerate(layers):
                parts = [tensor[:, i % tensor.shape[1]] for tensor in self.caches[spec]]
                layer.cache = layer.cache_spec().make(parts, self.config)  # equal to `spec`, except for sinks
        num_slots = num_blocks * self.config.kvcache_block_size + 1  # the last is for padding
        self.slot_token_ids = torch.zeros(num_slots, dtype=torch.int32, device=self.device)

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Allocate zeros like a tensor on the meta device. NumPy's zeros take no memory until they are written."""
        return torch.from_numpy(np.zeros(like.nbytes, np.uint8)).view(like.dtype).view(like.shape).to(self.device)

    def cache_bytes(self, num_blocks: int) -> int:
        groups = self.cache_groups.items()
        tensors = (x for spec, layers in groups for x in spec.tensors(len(layers), num_blocks, self.config))
        return sum(tensor.nbytes for tensor in tensors)

    def recover(self) -> None:
        """After an error, wait for the queued steps, and drop their results. Never raises an error."""

    def exit(self) -> None:
        """Free the device's memory."""
        for layer in (layer for layers in self.cache_groups.values() for layer in layers):
            layer.cache = None
        for parameter in self.model.parameters():  # a parameter and its loader refer to each other
            del parameter.weight_loader
        self.model = self.slot_token_ids = None
        self.cache_groups, self.caches, self.features = {}, {}, {}
        self.tp.close()
