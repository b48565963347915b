"""What a model or a head drafts for a step, as CUDA graphs."""

from functools import partial
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.graphs.cuda_graph import capture, capture_sizes, max_seqs_of


class DraftGraphs:
    """All drafts of a step in one graph: the rows that the drafter has not computed yet, then one row for each draft.

    There is a graph for each number of sequences, up to as many as may draft. It reads its sequences in a buffer, and
    leaves its drafts in RequestTables, where the graph of the step itself reads them.
    """

    def __init__(self, config: Config, drafter: Any, pad_req_index: int, pool: Any):
        """`drafter` is a spec_decode.draft_model.DraftModel, and `pool` the memory pool of the other graphs."""
        self.drafter, self.num_steps = drafter, config.speculative_config.num_speculative_tokens
        self.sizes = capture_sizes(max_seqs_of(config, 1 + self.num_steps), config.batch_invariant)
        self.padding = torch.tensor([[pad_req_index], [0]], dtype=torch.int32, device=drafter.num_computed.device)
        self.inputs = self.padding.repeat(1, self.sizes[-1])  # request indices, and numbers of drafts
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        for size in reversed(self.sizes):
            work = partial(drafter.draft_chains, *self.inputs[:, :size], self.num_steps)
            work()  # compiles the remaining kernels, which a capture must not do
            self.graphs[size], _ = capture(work, pool)

    def run(self, req_indices: torch.Tensor, num_drafts: torch.Tensor, num_steps: int) -> None:
        """`DraftModel.draft_chains`; that itself if there are too many sequences."""
        n = len(req_indices)
        size = next((size for size in self.sizes if size >= n), None)
        if size is None:
            self.drafter.draft_chains(req_indices, num_drafts, num_steps)
            return
        self.inputs[0, :n], self.inputs[1, :n] = req_indices, num_drafts
        self.inputs[:, n:size] = self.padding
        self.graphs[size].replay()
