"""Defines the base class `Ranks`, which handles lost ranks and forked child processes."""

from pathlib import Path

import torch

from nanovllm.utils.tensor_parallel import TensorParallel


class Ranks(TensorParallel):
    """One of several ranks. An instance of the base class itself represents a rank that is not connected yet."""

    folder: Path | None = None  # a folder whose files the ranks' communication still needs

    def barrier(self, device: torch.device) -> None:
        self.all_reduce_max(torch.empty(0, dtype=torch.int64, device=device))

    def check(self) -> None:
        if self.lost:
            raise RuntimeError("another rank was lost")

    def abort(self) -> None:
        self.lost = True

    def leave_in_child(self) -> None:
        """In a forked child process, forget the other ranks, because they belong to the parent process."""
        self.lost = True
