"""What several ranks have, however they communicate: one of them may be lost, and a fork leaves them."""

from pathlib import Path

import torch

from nanovllm.utils.tensor_parallel import TensorParallel


class Ranks(TensorParallel):
    """One of several ranks; of this class itself, one that has not connected with the others yet."""

    folder: Path | None = None  # where the ranks' communication still needs files

    def barrier(self, device: torch.device) -> None:
        self.all_reduce_max(torch.empty(0, dtype=torch.int64, device=device))

    def check(self) -> None:
        if self.lost:
            raise RuntimeError("another rank was lost")

    def abort(self) -> None:
        """Make the device stop waiting for a rank that was lost."""
        self.lost = True

    def leave_in_child(self) -> None:
        """Forget the other ranks in a forked child: they, and all that connects to them, belong to the parent."""
        self.lost = True
