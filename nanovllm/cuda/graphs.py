"""Captures whole steps as CUDA graphs, once per padded size, and replays them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any

import torch

from nanovllm.attention.base import AttentionBackend
from nanovllm.batches.batch import MAX_CHUNKS, Batch, BatchShape, DeviceBatch
from nanovllm.config import Config
from nanovllm.cuda.buffers import StepBuffers, host_memory
from nanovllm.engine.forward_output import ForwardOutput, SamplerInput
from nanovllm.utils.double_buffer import DoubleBuffer


def capture_sizes(max_num_seqs: int, fills_tiles: bool) -> list[int]:
    """Return the batch sizes to capture, in ascending order up to `max_num_seqs`.

    Small sizes are closer together than large sizes. If `fills_tiles` is set, all sizes above 64 except the last are
    multiples of 128, to fill whole GEMM tiles.
    """
    sizes = [1, 2, 4, 8, *range(16, 256, 16), *range(256, max_num_seqs, 32)]
    if fills_tiles:
        sizes = [size for size in sizes if size <= 64 or size % 128 == 0]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def capture(work: Callable[[], Any], pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture `work`, and return the graph and the result of `work`. Each replay overwrites the result's tensors."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: other threads may use CUDA during the capture
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = work()
    return graph, output


def decode_shape(
    num_seqs: int, max_blocks_per_seq: int, tokens_per_row: int = 1, num_window_tables: int = 0
) -> BatchShape:
    n = num_seqs * tokens_per_row
    more = dict(tokens_per_row=tokens_per_row, num_window_tables=num_window_tables)
    return BatchShape(n, n, n, n, max_blocks_per_seq, **more)


def max_seqs_of(config: Config, tokens_per_row: int) -> int:
    limit = config.speculative_config.disable_by_batch_size if tokens_per_row > 1 else config.max_num_seqs
    return min(config.max_num_seqs, limit)


def decode_shapes(config: Config) -> list[BatchShape]:
    """Return the shapes for which decode steps are captured. With drafts, some shapes have several tokens per row."""
    return [
        decode_shape(size, config.max_blocks_per_seq, k, len(config.table_views))
        for k in sorted({1, config.tokens_per_row})
        for size in capture_sizes(max_seqs_of(config, k), config.batch_invariant)
    ]


class DecodeGraphs:
    """CUDA graphs of decode steps, including the sampler, one per shape in `decode_shapes`.

    A graph first copies the batch from pinned host memory, and finally copies the results to host memory. Between two
    steps, the host only launches the next graph. There are two host buffers, so the host can prepare a step while the
    previous step runs. The host and the device each store the index of their current buffer. Each replay switches both
    indices to the other buffer.
    """

    def __init__(
        self,
        config: Config,
        buffer: torch.Tensor,
        forward: Callable[[DeviceBatch], ForwardOutput],
        pool: Any,
        few_layers: Callable[[], AbstractContextManager] = nullcontext,
    ):
        """buffer: int32 device memory for a batch.
        forward: runs the decode batch in `buffer`, without waiting for the device.
        pool: the memory pool of the graphs. The graphs of a rank run one by one, so they can share a pool.
        few_layers: opens a context in which the model has just enough layers to compile all kernels.
        """
        from nanovllm.kernels import ops

        self.shapes = decode_shapes(config)
        self.graphs: dict[tuple[int, ...], torch.cuda.CUDAGraph] = {}
        self.outputs: dict[tuple[int, ...], ForwardOutput] = {}  # tensors that each replay overwrites
        # a batch of zeros is all padding
        num_result_words = config.max_num_seqs * (config.tokens_per_row + 1)
        batches, results = host_memory(len(buffer), num_result_words, buffer.device)
        self.host_buffers = DoubleBuffer(*map(StepBuffers, batches, results))
        self._device_buffer_index = torch.zeros(1, dtype=torch.int32, device=buffer.device)

        def step(batch: DeviceBatch) -> ForwardOutput:
            num_words = batch.input_ids.storage_offset()  # the host fills in the first words
            ops.copy_from_host(batch.buffer[:num_words], batches, self._device_buffer_index)
            output = forward(batch)
            ops.copy_to_host(output.results.flatten(), results, self._device_buffer_index)
            return output

        # the largest graph first, so that the others can reuse its memory
        for shape in sorted(self.shapes, key=lambda shape: shape.num_tokens, reverse=True):
            batch, key = Batch.from_buffer(shape, buffer), shape.graph_shape
            with few_layers():
                step(batch)  # compiles the remaining kernels: a capture must not compile
            self.graphs[key], self.outputs[key] = capture(partial(step, batch), pool)
        self.reset()

    def has(self, shape: BatchShape) -> bool:
        return shape.graph_shape in self.graphs

    def shape_for(self, step: BatchShape) -> BatchShape | None:
        def fits(shape: BatchShape) -> bool:
            return shape.tokens_per_row == step.tokens_per_row and shape.num_decode_rows >= step.num_decode_rows

        return next(filter(fits, self.shapes), None)

    def replay(self, shape: BatchShape) -> tuple[torch.Tensor, ForwardOutput]:
        """Run the batch in the current host buffer. Return the step's results in host memory, and the device's output.

        The results stay valid during the next replay, and are overwritten by the replay after that.
        """
        self.graphs[shape.graph_shape].replay()
        output = self.outputs[shape.graph_shape]
        return self.host_buffers.advance().results_like(output.results), output

    @torch.inference_mode()
    def reset(self) -> None:
        """After an error, make host and device use the same buffer again. The device must be idle."""
        self.host_buffers.reset()
        self._device_buffer_index.zero_()


# tokens of a step with chunks; the time of GEMMs grows in steps of 128 rows, the size of a tile
TOKEN_SIZES = (16, 32, 64, *range(128, 2048, 128), *range(2048, 4096, 512), *range(4096, 8193, 1024))


def graph_shapes(config: Config, backend: AttentionBackend) -> list[BatchShape]:
    """Return the shapes to capture for steps with prefill chunks. A step uses the first shape into which it fits.

    Only short steps are captured, because the kernels of a short step take longer to launch than to run. Before
    `max_num_mixed_tokens` is known, return all shapes that might be captured.
    """
    largest = min(config.max_num_mixed_tokens or TOKEN_SIZES[-1], config.max_num_batched_tokens, TOKEN_SIZES[-1])
    sizes = [*(size for size in TOKEN_SIZES if size < largest), largest]
    shapes: list[BatchShape] = []
    widest = max_seqs_of(config, config.tokens_per_row), config.tokens_per_row
    for max_decodes, k in ((0, 1), (config.max_num_seqs, 1), *((widest,) if config.tokens_per_row > 1 else ())):
        for num_tokens in (size for size in sizes if size >= k):
            num_decode_rows = min(max_decodes, num_tokens // k) * k
            num_chunks = min(num_tokens, MAX_CHUNKS)
            shapes.append(
                BatchShape(
                    num_tokens=num_tokens,
                    num_seqs=num_decode_rows + num_chunks,
                    num_decode_rows=num_decode_rows,
                    num_sampled_tokens=num_decode_rows + num_chunks * k,
                    max_blocks_per_seq=config.max_blocks_per_seq,
                    max_seqlen_q=num_tokens,
                    backend_shapes=backend.array_shapes(num_tokens, num_chunks),
                    is_padded=True,
                    tokens_per_row=k,
                    num_window_tables=len(config.table_views),
                )
            )
    return shapes


class MixedGraphs:
    """CUDA graphs of steps with prefill chunks.

    One graph per `graph_shape` runs the model, and one graph per number of rows runs the sampler. A single graph for
    model and sampler would compute logits for all tokens of a chunk. The sampling parameters of new requests, and the
    arrays of features, differ in size from step to step. `replay` therefore writes the parameters and the arrays to the
    device before the graphs run.
    """

    def __init__(
        self,
        shapes: list[BatchShape],
        max_num_seqs: int,
        buffer: torch.Tensor,
        pad_req_index: int,
        run_model: Callable[[DeviceBatch], tuple[torch.Tensor, SamplerInput]],
        sample: Callable[[SamplerInput], tuple[torch.Tensor, torch.Tensor]],
        pool: Any,
        few_layers: Callable[[], AbstractContextManager] = nullcontext,
    ):
        """run_model: returns the hidden states of a batch in `buffer`, and the sampler's input.
        sample: returns the first two fields of a `ForwardOutput`.
        pool, few_layers: see DecodeGraphs.
        """
        self.shapes, self.pool, self.few_layers = shapes, pool, few_layers
        most: dict[int, int] = {}  # maximum number of sampled sequences, by tokens per row
        for shape in shapes:
            num_seqs, k = shape.num_sampled_tokens // shape.tokens_per_row, shape.tokens_per_row
            most[k] = min(max_num_seqs, max(most.get(k, 0), num_seqs))
        sizes = 1, 2, 4, 8, 16, *range(32, 257, 32)
        # (sequences, tokens per row)
        self.sample_sizes = [(n, k) for k, end in most.items() for n in (*(x for x in sizes if x < end), end)]
        self.models: dict[tuple[int, ...], torch.cuda.CUDAGraph] = {}
        self.samplers: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.sampled: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        buffer.zero_()
        largest = max(shapes, key=lambda shape: shape.num_sampled_tokens)
        num_rows = max(largest.num_sampled_tokens, max_num_seqs)
        hidden_states, example = run_model(Batch.from_buffer(largest, buffer))
        max_tokens = max(shape.num_tokens for shape in shapes)
        self.hidden_states = hidden_states.new_zeros(max_tokens, hidden_states.shape[1])
        self.input = SamplerInput(*(x.new_zeros(num_rows, *x.shape[1:]) for x in example))
        sample(self._rows(1))  # completes the forward pass, which PeerMemory requires

        def model_part(shape: BatchShape) -> None:
            hidden_states, found = run_model(Batch.from_buffer(shape, buffer))
            self.hidden_states[: shape.num_tokens] = hidden_states
            for ours, theirs in zip(self.input, found):
                ours[: len(theirs)] = theirs
            self.input.req_indices[shape.num_sampled_tokens // shape.tokens_per_row :] = pad_req_index

        for shape in sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True):
            with few_layers():
                model_part(shape)  # compiles kernels: a capture must not compile
                sample(self._rows(1))
            self.models[shape.graph_shape], _ = capture(partial(model_part, shape), pool)
            sample(self._rows(1))
        for size in sorted(self.sample_sizes, key=prod, reverse=True):
            with few_layers():
                model_part(shapes[0])
                sample(self._rows(*size))
                model_part(shapes[0])
            self.samplers[size], self.sampled[size] = capture(partial(sample, self._rows(*size)), pool)

    def _rows(self, num_seqs: int, tokens_per_row: int = 1) -> SamplerInput:
        rows = SamplerInput(*(x[: num_seqs * tokens_per_row] for x in self.input))
        return rows._replace(req_indices=self.input.req_indices[:num_seqs])

    def shape_for(self, step: BatchShape) -> BatchShape | None:
        num_chunks = step.num_seqs - step.num_decode_rows
        for shape in self.shapes:
            if (
                step.tokens_per_row == shape.tokens_per_row
                and (step.num_decode_rows <= shape.num_decode_rows and step.num_tokens <= shape.num_tokens)
                and num_chunks <= shape.num_seqs - shape.num_decode_rows
                and step.num_sampled_tokens <= shape.num_sampled_tokens
                # a kernel without any work would never wait, which breaks the contract of dependent launch
                and (step.num_decode_rows or not shape.num_decode_rows)
            ):
                return shape
        return None

    def replay(self, shape: BatchShape, write_requests: Callable[[], None]) -> ForwardOutput:
        write_requests()
        self.models[shape.graph_shape].replay()
        k, num_seqs = shape.tokens_per_row, shape.num_sampled_seqs
        size = next(size for size in self.sample_sizes if size[1] == k and size[0] >= num_seqs)
        self.samplers[size].replay()
        return ForwardOutput(*self.sampled[size], self.hidden_states, self._rows(*size))
