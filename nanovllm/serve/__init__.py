"""The HTTP server, the command line, and an asyncio interface to the engine. No other subpackage imports `serve`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanovllm.utils.waiting import waiting_for

if TYPE_CHECKING:
    from nanovllm.serve.async_llm import AsyncLLM, EngineDeadError, QueueFullError

__all__ = ["AsyncLLM", "EngineDeadError", "QueueFullError"]


def __getattr__(name: str) -> Any:
    """Import a name in `__all__` on first use.

    The late import lets the command line print help without importing the engine.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with waiting_for(f"Importing {name}"):
        return getattr(import_module("nanovllm.serve.async_llm"), name)
