"""No steps for a while: what becomes of the requests that run, and of those that come."""

from typing import TYPE_CHECKING

from nanovllm.engine.engine import UnavailableError
from nanovllm.utils.checks import check_choice

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine

PAUSED = "the engine is paused: resume() lets it generate again"


def pause(llm: "LLMEngine", mode: str = "abort") -> None:
    """Make no steps, and refuse new requests with an UnavailableError, until `resume`.

    Requests that run end with the tokens that they have (mode "abort", as by `LLM.abort`), or wait for `resume` without
    holding cache blocks (mode "keep"). The latter are computed again from their tokens, with the weights of that
    moment, and then go on. Their callers wait meanwhile. ValueError for another mode.
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
    """Empty the prefix cache. False, and nothing is done, while sequences hold blocks."""

    def work() -> bool:
        scheduler = llm.core.scheduler
        if is_idle := not (scheduler.running or scheduler.prefilling):
            scheduler.block_manager.clear_prefix_cache()
        return is_idle

    return llm.engine_thread.call(work)


def resume(llm: "LLMEngine") -> None:
    """Generate again. UnavailableError, and the engine stays paused, if its weights are not complete."""
    llm.engine_thread.check_open()
    for kind, reason in [*llm.core.unavailable.items()]:
        if kind != "paused":
            raise UnavailableError(reason)
    llm.core.unavailable.pop("paused", None)
    llm.engine_thread.wake()
