"""Decode steps as CUDA graphs: the forward and the sampler of one batch size, captured once and replayed."""

from collections.abc import Callable

import numpy as np
import torch

from nanovllm.engine.batch import Batch, DeviceBatch, decode_shape, largest_decode


def batch_size_ladder(max_num_seqs: int) -> list[int]:
    """The batch sizes that are captured: fine where steps are short, and always up to max_num_seqs itself."""
    sizes = [1, 2, 4, 8, *range(16, 256, 16), *range(256, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """One graph for each size of the ladder, all working in the same device buffer and sharing one memory pool.

    A graph fetches its batch from pinned host memory, and delivers the ids there: between two steps there is nothing
    but the start of the next graph. The host has two places for each, so that it can prepare a step while the one
    before runs; host and device change over with every replay.
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, buffer: torch.Tensor, forward: Callable):
        """`forward` maps a decode Batch that lies in `buffer` to the ids it samples and the hidden states that they come
        from, without asking the host.
        """
        from nanovllm.kernels import ops

        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.outputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of `forward`: what the last replay left there
        self.ladder = batch_size_ladder(max_num_seqs)
        room = largest_decode(max_num_seqs, max_blocks_per_seq).size
        # zeros: rows without a context, which write to a slot that nobody holds yet
        self._batches = torch.zeros(2, room, dtype=torch.int32, device="cpu", pin_memory=True)
        self._token_ids = torch.zeros(2, max_num_seqs, dtype=torch.int32, device="cpu", pin_memory=True)
        self._device_turn = torch.zeros(1, dtype=torch.int32, device=buffer.device)

        def step(batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor]:
            ops.fetch(batch.buffer, self._batches, self._device_turn)
            token_ids, hidden_states = forward(batch)
            ops.deliver(token_ids, self._token_ids, self._device_turn)
            return token_ids, hidden_states

        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.ladder):  # the largest first: the others find room in its memory
            batch = Batch.from_buffer(decode_shape(size, max_blocks_per_seq), buffer)
            step(batch)  # compiles what is still to be compiled, outside of the capture
            self.graphs[size] = torch.cuda.CUDAGraph()
            # what other threads ask of CUDA meanwhile is no part of the graph
            with torch.cuda.graph(self.graphs[size], pool=pool, capture_error_mode="thread_local"):
                self.outputs[size] = step(batch)
        self.reset()

    def size_for(self, num_seqs: int) -> int:
        """The smallest captured batch size that holds `num_seqs`."""
        return next(size for size in self.ladder if size >= num_seqs)

    def host_buffer(self) -> np.ndarray:
        """Where the batch of the next replay is prepared, once the last replay but one is over."""
        return self._batches[self._turn].numpy()

    def replay(self, size: int) -> torch.Tensor:
        """Ids [size] in host memory, to be read when the replay is over, and before the next but one."""
        self.graphs[size].replay()
        token_ids = self._token_ids[self._turn, :size]
        self._turn ^= 1
        return token_ids

    @torch.inference_mode()
    def reset(self) -> None:
        """Host and device begin at the same place again, wherever an error left them; the device is idle."""
        self._turn = 0
        self._device_turn.zero_()
