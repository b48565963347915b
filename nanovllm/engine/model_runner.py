"""One rank: its weights, its part of the cache and its graphs, and the way of a step over the device."""

from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.engine import batch as batches
from nanovllm.engine.batch import Batch
from nanovllm.engine.cuda_graph import DecodeGraphs
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.step_result import LogprobRequest, PendingStep, logprobs_of
from nanovllm.layers.attention import Attention
from nanovllm.layers.attention_backends import make_backend
from nanovllm.layers.logits import RequestTable, column, logit_cutoffs, penalize, seeds
from nanovllm.layers.sampler import Sampler
from nanovllm.models import model_class
from nanovllm.utils.context import Context, attention_context
from nanovllm.utils.loader import load_model
from nanovllm.utils.stopwatch import Stopwatch
from nanovllm.utils.tensor_parallel import TensorParallel

CPU_KV_CACHE_BYTES = 2**30  # the cache on a CPU, unless num_kvcache_blocks says otherwise
CUDA_RESERVE_BYTES = 512 * 2**20  # left for graphs, and for libraries that allocate behind PyTorch's back


class ModelRunner:
    """Loads the model, sizes and owns the cache, captures the graphs, and runs steps.

    What a step samples stays on the device in `last_token_ids`, by request index; a decode step reads its input
    there, so it can be queued before the host has seen it.
    """

    def __init__(self, config: Config, startup: Stopwatch, tp: TensorParallel = TensorParallel()):
        self.config = config
        self.tp = tp
        self.device = config.device_of(tp.rank)
        with self._on_device():
            self._start(config, startup)

    @contextmanager
    def _on_device(self):
        """The current device may be another engine's, and the caller's autocast would change our dtypes."""
        kind = self.device.type
        device = torch.cuda.device(self.device) if kind == "cuda" else nullcontext()
        with device, torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            yield

    def _start(self, config: Config, startup: Stopwatch) -> None:
        self.backend = make_backend(config.attention_backend)
        memory_before = self._memory_in_use()
        self.model = self._load_model()
        startup.lap("weights")
        self.attention_layers = [module for module in self.model.modules() if isinstance(module, Attention)]
        self.sampler = Sampler(self.tp, self.model.lm_head.first_id)
        self.pad_req_index = config.max_num_seqs
        self.last_token_ids = torch.zeros(config.max_num_seqs + 1, dtype=torch.int32, device=self.device)
        self.requests = RequestTable(config.max_num_seqs, config.model_config.vocab_size, self.device)
        self._make_buffers()
        self.graphs: DecodeGraphs | None = None
        if config.num_kvcache_blocks is None:
            config.set_num_kvcache_blocks(self._affordable_blocks(memory_before))
        self.allocate_kv_cache(config.num_kvcache_blocks)
        self._warmup_kernels()
        startup.lap("warm-up")
        if self.device.type == "cuda" and self.backend.uses_cuda_graphs and not config.enforce_eager:
            self.capture_cudagraph()
        startup.lap("graphs")

    def run(self, step: ScheduledStep) -> PendingStep:
        """Prepare and launch a step."""
        return self.launch(self.prepare(step), step)

    def host_buffer(self, is_prefill: bool) -> np.ndarray:
        """Where the next batch that is launched is to be prepared, once the last launch but one is over."""
        if self.graphs and not is_prefill:
            return self.graphs.host_buffer()
        return self._host_buffers[self._turn].numpy()

    def prepare(self, step: ScheduledStep) -> Batch:
        prepare = self.prepare_prefill if step.is_prefill else self.prepare_decode
        return prepare(step, self.host_buffer(step.is_prefill))

    def launch(self, batch: Batch, step: ScheduledStep | None = None) -> PendingStep:
        """Queue a batch that lies in `host_buffer`; the step may not be over when this returns, nor the one before it."""
        self.tp.check()
        with self._on_device():
            if batch.shape.num_copies:
                self._copy_blocks(batch.copies)
            if self.graphs and not batch.shape.is_prefill:
                token_ids = self.graphs.replay(batch.shape.num_seqs)
                outputs = self.graphs.outputs[batch.shape.num_seqs]
            else:
                token_ids = self._host_token_ids[self._turn][: batch.shape.num_samples]
                self._turn ^= 1
                outputs = self.execute(batch)
                token_ids.copy_(outputs[0], non_blocking=True)
            asked = [LogprobRequest(*row) for row in batch.logprob_requests.tolist()]
            logprobs = self._logprobs(batch, asked, *outputs) if asked else ()
            return PendingStep(step, token_ids, asked, logprobs, self.device.type == "cuda", self.tp)

    def prepare_prefill(self, step: ScheduledStep, buffer: np.ndarray) -> Batch:
        model = self.config.model_config
        return batches.prepare_prefill(
            step, buffer, self.config.kvcache_block_size, model.eos_token_ids, model.vocab_size
        )

    def prepare_decode(self, step: ScheduledStep, buffer: np.ndarray) -> Batch:
        num_rows, max_blocks_per_seq = len(step.rows), max(len(row.seq.block_table) for row in step.rows)
        if self.graphs:
            num_rows, max_blocks_per_seq = self.graphs.size_for(num_rows), self.config.max_blocks_per_seq
        return batches.prepare_decode(
            step, buffer, self.config.kvcache_block_size, num_rows, max_blocks_per_seq, self.pad_req_index
        )

    @torch.inference_mode()
    def execute(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a batch that is in host memory; on the device, the ids [S] that it samples and its hidden states [T, ...]."""
        return self._forward(batch.to(self._device_buffer))

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        shape = batch.shape
        context = Context(
            is_prefill=shape.is_prefill,
            slot_mapping=batch.slot_mapping,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            max_context_len=min(shape.max_blocks_per_seq * self.config.kvcache_block_size, self.config.max_model_len),
            max_seqlen_q=shape.max_seqlen_q,
            cu_seqlens_q=batch.cu_seqlens_q if shape.is_prefill else None,
        )
        input_ids = batch.input_ids if shape.is_prefill else self.last_token_ids.index_select(0, batch.req_indices)
        self.slot_token_ids[batch.slot_mapping] = input_ids  # a slot of -1 is the last, which is no block's
        blocks = self.slot_token_ids[:-1].view(-1, self.config.kvcache_block_size)
        with attention_context(context):
            hidden_states = self.model(input_ids, batch.positions)
        sampled, positions, block_tables = hidden_states, batch.positions, batch.block_tables
        if shape.is_prefill:  # no logits for rows that are not sampled
            self.requests.write(
                batch.req_indices,
                batch.params,
                batch.bias_slots,
                batch.bias_ids,
                batch.bias_bits,
                batch.allowed_slots,
                batch.allowed_ids,
                batch.word_slots,
                batch.bad_words,
            )
            sampled, positions = (x.index_select(0, batch.logits_indices) for x in (sampled, positions))
            seqs = torch.bucketize(batch.logits_indices, batch.cu_seqlens_q[1:], right=True)
            block_tables = block_tables.index_select(0, seqs)
        rows = self.requests.rows(batch.req_indices, blocks, block_tables, positions)
        logits = self.model.compute_logits(sampled, rows.params)
        penalize(logits, rows)
        cutoffs, temperatures = logit_cutoffs(logits, rows), column(rows.params, "temperature")
        logits = self.model.lm_head.own_part(logits)
        token_ids = self.sampler(logits, temperatures, seeds(rows.params), positions, cutoffs)
        self.last_token_ids[batch.req_indices] = token_ids
        return token_ids, hidden_states

    @torch.inference_mode()
    def _copy_blocks(self, copies: np.ndarray) -> None:
        """Copy cache blocks, and the ids behind their keys; copies [2, C] int32 are where from, and where to."""
        sources, targets = torch.from_numpy(copies).to(self.device, non_blocking=True).long()
        blocks = self.slot_token_ids[:-1].view(-1, self.config.kvcache_block_size)
        for cache in (blocks, *self.kv_cache.flatten(0, 1)):  # one at a time: what was gathered needs memory
            cache.index_copy_(0, targets, cache.index_select(0, sources))

    @torch.inference_mode()
    def _logprobs(self, batch: Batch, asked: list[LogprobRequest], *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What `log_probabilities` gives for each of `asked`, outside of the graph, so that other steps are none the slower."""
        logprobs = logprobs_of(batch, asked, self.model.compute_logits, *outputs)
        self.tp.max_of_ranks(torch.empty(0, dtype=torch.int64, device=self.device))  # they part as after a forward
        return logprobs

    def _load_model(self) -> nn.Module:
        config = self.config.model_config
        with torch.device(self.device):
            model = model_class(config.model_type)(config, self.config.max_model_len, self.backend, self.tp)
        with torch.device("cpu"):  # safetensors reads into tensors on the default device, whichever the caller has set
            load_model(model, Path(self.config.model), self.device, self.config.load_format)
        return model.eval()

    def _make_buffers(self) -> None:
        """Two host buffers, so that a step can be prepared while the one before is read, and one on the device."""
        B, size = self.config.max_num_seqs, batches.largest_batch(self.config)
        on_host = dict(dtype=torch.int32, device="cpu", pin_memory=self.device.type == "cuda")
        self._host_buffers = [torch.empty(size, **on_host) for _ in range(2)]
        self._host_token_ids = [torch.empty(B, **on_host) for _ in range(2)]
        self._device_buffer = torch.empty(size, dtype=torch.int32, device=self.device)
        self._turn = 0

    def _memory_in_use(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _affordable_blocks(self, memory_before: int) -> int:
        """How many blocks fit: on CUDA into our fraction of the card less what the largest step needs besides."""
        config = self.config
        if self.device.type == "cuda":
            peak = self._warmup_model()
            free, total = torch.cuda.mem_get_info(self.device)
            ours = int(total * config.gpu_memory_utilization) - (peak - memory_before) - self.tp.num_bytes
            left = free - (peak - self._memory_in_use()) - CUDA_RESERVE_BYTES  # others may have taken the rest
            available = max(0, min(ours, left))
            limit = f"gpu_memory_utilization={config.gpu_memory_utilization} of this card leaves"
        else:
            available = CPU_KV_CACHE_BYTES
            limit = "the budget on a CPU is"
        num_blocks = available // self._cache_of(1).nbytes
        if self.tp.size > 1:  # what the poorest rank can afford
            num_blocks = -self.tp.max_of_ranks(torch.tensor([-num_blocks], device=self.device)).item()
        if num_blocks < config.max_blocks_per_seq:
            raise ValueError(
                f"max_model_len={config.max_model_len}: one sequence needs "
                f"{self._cache_of(config.max_blocks_per_seq).nbytes / 2**30:.2f} GiB of cache, and {limit} "
                f"{available / 2**30:.2f} GiB; lower max_model_len, or set num_kvcache_blocks"
            )
        return num_blocks

    def _warmup_model(self) -> int:
        """Run the largest prefill there can be; the most memory that was allocated at a time, in bytes."""
        config = self.config
        num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        length = min(config.max_num_batched_tokens // num_seqs, config.max_model_len - 1)
        step = batches.dummy_prefill(num_seqs, length, config.kvcache_block_size)
        num_blocks = sum(len(row.seq.block_table) for row in step.rows)
        self._set_cache(self._zeros(self._cache_of(num_blocks, num_layers=1)))  # all layers share it
        torch.cuda.reset_peak_memory_stats(self.device)
        self.run(step).wait()
        peak = torch.cuda.max_memory_allocated(self.device) - self.kv_cache.nbytes
        self._set_cache(self._cache_of(0))
        torch.cuda.empty_cache()
        return peak

    def _warmup_kernels(self) -> None:
        """Compile and load the kernels of shorter prefills too, lest the first requests wait for that."""
        if self.device.type == "cuda":
            most = min(self.config.max_num_batched_tokens, self.config.max_model_len - 1)
            for length in (1, 16, 32, 64, 128, 256, 512):
                self.run(batches.dummy_prefill(1, min(length, most), self.config.kvcache_block_size)).wait()

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """One tensor [2, layers, blocks, block_size, kv_heads, head_dim], and each layer its part of it."""
        self._set_cache(self._zeros(self._cache_of(num_blocks)))

    def _cache_of(self, num_blocks: int, num_layers: int | None = None) -> torch.Tensor:
        """A cache without memory: its shape, and its size in bytes."""
        layer = self.attention_layers[0]
        layers = num_layers or len(self.attention_layers)
        shape = (2, layers, num_blocks, self.config.kvcache_block_size, layer.num_kv_heads, layer.head_dim)
        return torch.empty(shape, dtype=self.config.dtype, device="meta")

    def _zeros(self, cache: torch.Tensor) -> torch.Tensor:
        # zeros, not whatever was there: a NaN in a slot that is masked would still spread
        if self.device.type == "cuda":
            return torch.zeros_like(cache, device=self.device)
        # numpy's zeros are pages that the system hands out on first use
        return torch.from_numpy(np.zeros(cache.nbytes, np.uint8)).view(cache.dtype).view(cache.shape)

    def _set_cache(self, cache: torch.Tensor) -> None:
        self.kv_cache = cache
        # the ids behind the keys, by slot; one slot more, which stands for none
        self.slot_token_ids = torch.zeros(cache.shape[2] * cache.shape[3] + 1, dtype=torch.int32, device=self.device)
        for i, layer in enumerate(self.attention_layers):
            layer.k_cache, layer.v_cache = cache[:, i % cache.shape[1]]

    @torch.inference_mode()
    def capture_cudagraph(self) -> None:
        """Record a decode step for every batch size of the ladder."""
        self.graphs = DecodeGraphs(
            self.config.max_num_seqs, self.config.max_blocks_per_seq, self._device_buffer, self._forward
        )

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def recover(self) -> None:
        """Forget the steps that were queued, once they are over; never raises, as it is for the time after an error."""
        with suppress(RuntimeError):
            self.synchronize()
            if self.graphs:
                self.graphs.reset()

    def exit(self) -> None:
        """Free the device's memory; not that of a device which waits in vain for another rank."""
        if self.tp.lost and not self._is_idle_soon():
            return
        self.graphs = None
        self._set_cache(self._cache_of(0))
        self.model = self.last_token_ids = self.requests = self.slot_token_ids = self._device_buffer = None
        self.attention_layers = []
        self.tp.close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _is_idle_soon(self, patience: float = 5.0) -> bool:
        begin = perf_counter()
        with self._on_device():
            while self.device.type == "cuda" and not torch.cuda.current_stream().query():
                if perf_counter() - begin > patience:
                    return False
                sleep(0.001)
        return True
