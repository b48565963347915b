"""What layers read during a step, set for the duration of one forward."""

from collections.abc import Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class Context:
    """The B sequences of a step, whose T new tokens are concatenated.

    The first `num_decodes` rows have one token each, and with drafts `tokens_per_row` of them belong to one sequence;
    then come chunks of prompts, if there is `cu_seqlens_q`. In a CUDA graph with chunks, num_decodes is an upper bound.
    `plans` are the attention backend's own: what it computes in the first layer and reuses in the others.
    """

    num_decodes: int
    slot_mapping: torch.Tensor  # [T] int32, -1: do not store
    context_lens: torch.Tensor  # [B] int32, this step's tokens included
    block_tables: torch.Tensor  # [B, W] int32
    max_context_len: int  # upper bound of context_lens, known to the host
    max_seqlen_q: int = 1
    cu_seqlens_q: torch.Tensor | None = None  # [B + 1] int32
    state_rows: torch.Tensor | None = None  # [2, B] int32: see cache/state.py
    backend_arrays: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of `AttentionBackend.prepare_chunks`
    tokens_per_row: int = 1  # of the first `num_decodes` rows, a sequence has this many, each a token longer
    num_decodes_on_device: torch.Tensor | None = None  # [1] int32, in a CUDA graph with chunks
    plans: dict[Any, Any] = field(default_factory=dict)

    @property
    def has_chunks(self) -> bool:
        return self.cu_seqlens_q is not None


_context: ContextVar[Context | None] = ContextVar("attention context", default=None)


def get_context() -> Context:
    context = _context.get()
    assert context is not None, "a layer runs outside of a step"
    return context


@contextmanager
def attention_context(context: Context):
    """Set `context` for a `with` block, and clear it however the block ends."""
    assert _context.get() is None, "steps do not nest"
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def clear_context() -> None:
    """Clear the context after an error, which may have come within `attention_context` itself."""
    _context.set(None)
