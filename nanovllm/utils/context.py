"""Defines the context of a step, which layers read to learn about the step's sequences.

The context is set only while the model runs.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

_UNSET: Any = None  # outside a step


@dataclass(slots=True)
class Context:
    """Describes the B sequences of a step. The T new tokens of all sequences are concatenated.

    The first `num_decode_rows` sequences have one new token each. If `is_prefill` is True, the remaining sequences have
    chunks of prompts. Attention reads all keys from the cache, including the keys of this step.
    """

    is_prefill: bool = False  # whether there are chunks of prompts
    cu_seqlens_q: torch.Tensor = _UNSET  # [B + 1] int32: where new tokens begin; only set if `is_prefill`
    max_seqlen_q: int = 1
    slot_mapping: torch.Tensor = _UNSET  # [T] int32: cache slots for keys and values; -1: do not store
    context_lens: torch.Tensor = _UNSET  # [B] int32: how many tokens to attend to, including this step's
    block_tables: torch.Tensor = _UNSET  # [B, W] int32
    num_decode_rows: int = 0  # an upper bound in a CUDA graph with chunks
    max_context_len: int = 0  # an upper bound of context_lens, known to the host
    # [2, B] int32, or [2, B / tokens_per_row] in a decode step: which states are read (cache/state.py), and which
    # requests the rows belong to
    state_rows: torch.Tensor = _UNSET
    backend_arrays: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of `AttentionBackend.prepare_chunks`
    tokens_per_row: int = 1  # with drafts, how many of the `num_decode_rows` rows belong to one sequence
    num_decode_rows_on_device: torch.Tensor | None = None  # [1] int32, in a CUDA graph with chunks
    plans: dict[Any, Any] = field(default_factory=dict)  # of the attention backend, made in the step's first layer
    window_contexts: list["Context"] = field(default_factory=list)  # see cache/window_tables.py

    @property
    def req_indices(self) -> torch.Tensor:
        return self.state_rows[1]

    def of_table(self, table: int) -> "Context":
        """Return the context for layers that use another block table (see cache/window_tables.py)."""
        return self.window_contexts[table - 1] if table else self


_context: ContextVar[Context | None] = ContextVar("context", default=None)


def get_context() -> Context:
    """Return the context of the step that this thread computes, or an empty context."""
    return _context.get() or Context()


def set_context(is_prefill: bool = False, **fields: Any) -> None:
    _context.set(Context(is_prefill, **fields))


def reset_context() -> None:
    _context.set(None)


@contextmanager
def attention_context(context: Context) -> Iterator[None]:
    _context.set(context)
    try:
        yield
    finally:
        reset_context()


def of_tokens(of_requests: torch.Tensor) -> torch.Tensor:
    """Return a tensor [T] that contains, for each token of this thread's step, the value of the token's request.

    `of_requests` [requests] contains the value of each request. Padding tokens get arbitrary values.
    """
    context = get_context()
    values = of_requests[context.req_indices.long()]
    num_tokens = len(context.slot_mapping)
    if context.is_prefill:
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=values.device)
        rows = torch.searchsorted(context.cu_seqlens_q[1:], tokens, right=True)
        return values[rows.clamp_max(len(values) - 1)]  # tokens after the last row are padding
    return values.repeat_interleave(num_tokens // len(values)) if len(values) < num_tokens else values
