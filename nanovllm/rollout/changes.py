"""How the engine is changed: in its own thread, between two steps, and while no request is computed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from nanovllm.engine.engine import UnavailableError
from nanovllm.engine.engine_thread import EngineThread
from nanovllm.engine.outputs import OutputCollector

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine

T = TypeVar("T")
LOADING = "the weights are being replaced: load_weights() has not returned yet"


class Dropped(str):
    """Why there are no steps after `sleep(level=2)`, in a sentence, and what `load_weights` has loaded since."""

    weights: Any = None  # a ModelWeights


@contextmanager
def refusing_requests(llm: "LLMEngine", kind: str, reason: str) -> Iterator[None]:
    """Change the engine, in its thread: `unavailable[kind]` is the reason from here on, and after an error as before.

    UnavailableError while there are requests, unless they are paused, or while weights are being replaced.
    """
    unavailable = llm.core.unavailable
    if unavailable.get("weights") == LOADING:
        raise UnavailableError(LOADING)
    before = {kind: unavailable[kind]} if kind in unavailable else {}
    unavailable[kind] = reason  # first: a request that comes at the same moment sees this, or is seen here
    try:
        queued = [waiter for waiter in llm.engine_thread.queued() if isinstance(waiter, OutputCollector)]
        num_requests = len(llm.core.scheduler.live) + len(queued)
        if num_requests and "paused" not in unavailable:
            raise UnavailableError(f"{num_requests} requests have not ended: call pause(), or let them end")
        yield
    except BaseException:
        del unavailable[kind]
        unavailable.update(before)
        raise


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
