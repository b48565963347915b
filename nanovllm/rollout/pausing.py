"""Pauses the engine. Running requests are aborted or kept, and new requests are refused."""

from typing import TYPE_CHECKING

from nanovllm.engine.engine import UnavailableError
from nanovllm.utils.checks import check_choice

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine

PAUSED = "the engine is paused: resume() lets it generate again"


def pause(llm: "LLMEngine", mode: str = "abort") -> None:
    """Stop generating until `resume` is called. New requests raise UnavailableError.

    If `mode` is "abort", running requests end with the tokens generated so far, as after `LLM.abort`. If `mode` is
    "keep", running requests release their cache blocks and wait until `resume` is called. The callers of kept requests
    wait as well. After `resume`, the engine recomputes the tokens of kept requests with the current weights, and
    continues to generate. Tokens and vectors that a step in flight computes are kept. Raises ValueError if `mode` has
    another value.
    """
    check_choice("mode", mode, ("abort", "keep"))
    core = llm.core

    def work() -> None:
        if mode == "abort":
            for request_id in [*core.output_processor.requests]:
                core.output_processor.abort(request_id)
        for seq in (*core.scheduler.running.values(), *core.scheduler.prefilling.values()):
            core.scheduler.preempt(seq)
        core.unavailable["paused"] = PAUSED

    llm.engine_thread.call(work)


def reset_prefix_cache(llm: "LLMEngine") -> bool:
    """Empty the prefix cache and return True. If any sequence holds cache blocks, return False and change nothing."""

    def work() -> bool:
        scheduler = llm.core.scheduler
        if is_idle := not (scheduler.running or scheduler.prefilling):
            scheduler.block_manager.clear_prefix_cache()
        return is_idle

    return llm.engine_thread.call(work)


def resume(llm: "LLMEngine") -> None:
    """End the pause. If the engine sleeps or lacks weights, raise UnavailableError, and stay paused."""
    llm.engine_thread.check_open()
    for kind, reason in [*llm.core.unavailable.items()]:
        if kind != "paused":
            raise UnavailableError(reason)
    llm.core.unavailable.pop("paused", None)
    llm.engine_thread.wake()
