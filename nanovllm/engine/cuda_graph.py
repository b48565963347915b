"""Decode steps as CUDA graphs: the forward and the sampler of one batch size, captured once and replayed."""
from collections.abc import Callable

import torch

from nanovllm.engine.batch import Batch, BatchShape


def batch_size_ladder(max_num_seqs: int) -> list[int]:
    """The batch sizes that are captured: fine where steps are short, and always up to max_num_seqs itself."""
    sizes = [1, 2, 4, 8, *range(16, 256, 16), *range(256, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """One graph for each size of the ladder, all reading the same device buffer and sharing one memory pool."""

    def __init__(self, max_num_seqs: int, table_width: int, buffer: torch.Tensor, forward: Callable):
        """`forward` maps a decode Batch that lies in `buffer` to the ids it samples, without asking the host."""
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.token_ids: dict[int, torch.Tensor] = {}
        self.ladder = batch_size_ladder(max_num_seqs)
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.ladder):  # the largest first: the others find room in its memory
            batch = Batch(BatchShape(False, size, size, size, table_width, 1), buffer)
            forward(batch)  # compiles what is still to be compiled, outside of the capture
            self.graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[size], pool=pool):
                self.token_ids[size] = forward(batch)

    def size_for(self, num_seqs: int) -> int:
        """The smallest captured batch size that holds `num_seqs`."""
        return next(size for size in self.ladder if size >= num_seqs)

    def replay(self, size: int) -> torch.Tensor:
        """Ids [size], valid until the next replay; the batch is in the buffer already."""
        self.graphs[size].replay()
        return self.token_ids[size]
