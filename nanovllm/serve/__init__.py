"""The engine for asyncio, behind an HTTP address. Nothing outside of this folder imports it."""

from nanovllm.serve.async_llm import AsyncLLM, EngineDeadError, QueueFullError

__all__ = ["AsyncLLM", "EngineDeadError", "QueueFullError"]
