"""How the engine is changed: in its own thread, between two steps, and while no request is computed."""

from collections.abc import Callable
from typing import Any, TypeVar

from nanovllm.engine.engine import Engine, UnavailableError
from nanovllm.engine.engine_thread import EngineThread

T = TypeVar("T")
LOADING = "the weights are being replaced: load_weights() has not returned yet"


class Dropped(str):
    """Why there are no steps after `sleep(level=2)`, in a sentence, and what `load_weights` has loaded since."""

    weights: Any = None  # a ModelWeights


def check_idle(core: Engine) -> None:
    """UnavailableError while there are requests, unless they are paused, or while weights are being replaced."""
    if core.unavailable.get("weights") == LOADING:
        raise UnavailableError(LOADING)
    if (live := core.scheduler.live) and "paused" not in core.unavailable:
        raise UnavailableError(f"{len(live)} requests have not ended: call pause(), or let them end")


def in_engine(thread: EngineThread, work: Callable[[], T]) -> T:
    """Do `work` in the engine's thread, between two steps. Its errors of these kinds are raised here, and end nothing.

    Any other one ends all requests, as an error of a step does.
    """

    def attempt() -> tuple[T | None, Exception | None]:
        try:
            return work(), None
        except (ValueError, TypeError, UnavailableError) as error:
            return None, error

    result, error = thread.call(attempt)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
