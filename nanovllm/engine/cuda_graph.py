"""Decode steps as CUDA graphs: model and sampler of one batch size, captured once and replayed."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from nanovllm.engine.batch import Batch, DeviceBatch, decode_shape, largest_decode
from nanovllm.utils.double_buffer import DoubleBuffer


class ForwardOutput(NamedTuple):
    """What a step leaves on the device."""

    token_ids: torch.Tensor  # [S] int32, sampled
    hidden_states: torch.Tensor  # [T, hidden_size]


class StepBuffers(NamedTuple):
    """Host memory of one step, pinned on CUDA: int32 words of its batch and the token ids that it samples."""

    batch: torch.Tensor
    token_ids: torch.Tensor


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending: densest where steps are short, and always max_num_seqs itself."""
    sizes = [1, 2, 4, 8, *range(16, 256, 16), *range(256, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """One graph for each batch size in `graph_bs`; all use the same device buffer and share one memory pool.

    A graph fetches its batch from pinned host memory and delivers the token ids there, so nothing runs between two
    steps but the launch of the next graph. Host memory is double-buffered: the host prepares a step while the previous
    one runs. Host and device each keep the index of their current buffer, and each replay advances both.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        buffer: torch.Tensor,
        forward: Callable[[DeviceBatch], ForwardOutput],
    ):
        """`forward` runs a decode batch that lies in `buffer`, without waiting for the device."""
        from nanovllm.kernels import ops

        self.graph_bs = capture_sizes(max_num_seqs)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.outputs: dict[int, ForwardOutput] = {}  # tensors that each replay overwrites
        batch_size = largest_decode(max_num_seqs, max_blocks_per_seq).size
        # zeros: rows without a context, which write to a slot of a cache that is still empty
        batches = torch.zeros(2, batch_size, dtype=torch.int32, device="cpu", pin_memory=True)
        token_ids = torch.zeros(2, max_num_seqs, dtype=torch.int32, device="cpu", pin_memory=True)
        self.host_buffers = DoubleBuffer(*map(StepBuffers, batches, token_ids))
        self._device_buffer_index = torch.zeros(1, dtype=torch.int32, device=buffer.device)

        def step(batch: DeviceBatch) -> ForwardOutput:
            ops.fetch(batch.buffer, batches, self._device_buffer_index)
            output = forward(batch)
            ops.deliver(output.token_ids, token_ids, self._device_buffer_index)
            return output

        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.graph_bs):  # the largest first, so that the others fit into its memory
            batch = Batch.from_buffer(decode_shape(size, max_blocks_per_seq), buffer)
            step(batch)  # compiles the remaining kernels, which a capture must not do
            self.graphs[size] = torch.cuda.CUDAGraph()
            # thread_local: other threads may use CUDA during the capture
            with torch.cuda.graph(self.graphs[size], pool=pool, capture_error_mode="thread_local"):
                self.outputs[size] = step(batch)
        self.reset()

    def size_for(self, num_seqs: int) -> int:
        """The smallest captured batch size that holds `num_seqs`."""
        return next(size for size in self.graph_bs if size >= num_seqs)

    def replay(self, size: int) -> tuple[torch.Tensor, ForwardOutput]:
        """Run the batch in the current host buffer; returns its token ids [size] in host memory, and its output.

        Read the token ids when the replay is over, and before the replay after the next one begins.
        """
        self.graphs[size].replay()
        return self.host_buffers.advance().token_ids[:size], self.outputs[size]

    @torch.inference_mode()
    def reset(self) -> None:
        """After an error, and with an idle device: let host and device begin with the same buffer again."""
        self.host_buffers.reset()
        self._device_buffer_index.zero_()
