"""The interface of an attention backend."""

import logging
from typing import Any

import numpy as np
import torch
from torch import nn

from nanovllm.attention import backend_class
from nanovllm.cache.kv_cache import SPAN_SIZE, AttentionSpec, KVCache
from nanovllm.utils.context import Context


class AttentionBackend:
    """Computes attention for a step. The step's keys and values are already in the cache.

    `heads` is a multiple of `kv_heads`. Query head `h` reads key-value head `h // (heads / kv_heads)`.
    """

    package, install = "torch", "pip install torch"  # the package that must be installed, and how to install it
    block_multiple = SPAN_SIZE  # must divide `kvcache_block_size`
    kv_cache_dtypes: tuple[str, ...] = ("auto",)  # supported values of `kv_cache_dtype`
    uses_cuda_graphs = True  # whether graphs can contain decodes; if so, `attend` reads no data on the host
    captures_chunks = False  # whether graphs can contain chunks; if so, only the device reads lengths
    ops: Any = None  # a module with the functions of kernels/ops.py, for kernels that also compute norms and RoPE

    @staticmethod
    def devices() -> tuple[str, ...] | None:
        """Return the supported device types, or None if every PyTorch device is supported."""
        return None

    @staticmethod
    def supports(spec: AttentionSpec) -> bool:
        """Return whether `attend` can compute this layer."""
        return not spec.is_special

    def set_head_shape(self, group: int, head_dim: int, dtype: torch.dtype) -> None:
        """Prepare for a layer with `group` query heads per key-value head."""

    def prepare_chunks(self, chunks: list[tuple[int, int]], first_row: int) -> dict[str, np.ndarray]:
        """Return int32 arrays for `Context.backend_arrays`. `chunks` are (start, end), from row `first_row` on."""
        return {}

    def array_shapes(self, num_tokens: int, num_chunks: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the names and the largest shapes of the arrays that `prepare_chunks` makes for a CUDA graph."""
        return ()

    def attend(self, q, cache: KVCache, context: Context) -> torch.Tensor:
        """Compute attention for a step's queries q [T, heads, head_dim]. The output has the shape of q.

        Decode rows precede prefill rows. `cache.spec` is the layer's AttentionSpec. A query sees the keys of its
        sequence up to the query's position. If `window` is set, a query sees only the last `window` keys up to its
        position. Scores are multiplied by `scale`, or by 1 / sqrt(head_dim) if `scale` is None. Padding rows see no
        keys, and their results are undefined.
        """
        raise NotImplementedError


def connect(model: nn.Module, backend: AttentionBackend, device: str, dtype: torch.dtype) -> AttentionBackend:
    """Connect a model's attention layers with the first backend that supports all of them, and return the backend.

    The backends are tried in this order: `backend`, triton, sdpa.
    """
    specs = {layer: layer.cache_spec() for layer in model.modules() if hasattr(layer, "cache_spec")}
    specs = {layer: spec for layer, spec in specs.items() if isinstance(spec, AttentionSpec)}
    if not all(map(backend.supports, specs.values())):
        backend = _next_backend([*specs.values()], backend, device)
    for layer in specs:
        layer.backend = backend
        backend.set_head_shape(layer.num_heads // layer.num_kv_heads, layer.head_dim, dtype)
    return backend


def _next_backend(specs: list[AttentionSpec], backend: AttentionBackend, device: str) -> AttentionBackend:
    candidates = [backend_class(name) for name in ("triton", "sdpa")]
    runs = (found for found in candidates if device in (found.devices() or (device,)))
    found = next(found for found in runs if all(map(found.supports, specs)))
    text = "attention: %s does not support this model's layers; %s takes its place"
    logging.getLogger("nanovllm").warning(text, type(backend).__name__, found.__name__)
    return found()
