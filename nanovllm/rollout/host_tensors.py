"""Implements sleep mode on a CPU, where tensors may move. The module cuda/arena.py implements sleep mode on CUDA."""

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner


class HostWeights:
    """Has the same methods as `Arena`, but manages the memory of a model's parameters on a CPU.

    `keep` copies nothing, because the weights are already in host memory.
    """

    is_mapped = True

    def __init__(self, model: nn.Module):
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
        self._sizes = [(storage, storage.nbytes()) for storage in storages.values()]
        self._are_kept = False

    def keep(self) -> None:
        self._are_kept = True

    def unmap(self) -> int:
        self.is_mapped = False
        if self._are_kept:
            return 0
        for storage, _ in self._sizes:
            storage.resize_(0)
        return sum(size for _, size in self._sizes)

    def drop_copies(self) -> int:
        was_kept, self._are_kept = self._are_kept, False
        return self.unmap() if was_kept else 0

    def map(self) -> None:
        if not self._are_kept:
            try:
                for storage, size in self._sizes:
                    storage.resize_(size)
            except RuntimeError:
                self.unmap()
                raise
        self.is_mapped = True

    def fill(self) -> None:
        self._are_kept = False  # dropped weights have arbitrary values until they are loaded


class HostCache:
    """Has the same methods as `Arena`, but manages the KV cache. During sleep, the cache has one block."""

    is_mapped = True

    def __init__(self, runner: "ModelRunner"):
        self._runner = runner

    def unmap(self) -> int:
        before = self._num_bytes()
        self._runner.allocate_kv_cache(num_blocks=1)
        self.is_mapped = False
        return before - self._num_bytes()

    def map(self) -> None:
        num_blocks = self._runner.config.num_kvcache_blocks
        assert num_blocks is not None, "the engine has started"
        self._runner.allocate_kv_cache(num_blocks)
        self.is_mapped = True

    def fill(self) -> None:
        """Do nothing: a new cache is already filled with zeros."""

    def _num_bytes(self) -> int:
        return sum(tensor.nbytes for tensors in self._runner.caches.values() for tensor in tensors)
