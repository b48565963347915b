"""Functions that help to change a running engine. Changes are made in the engine's thread, between two steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from nanovllm.engine.collector import OutputCollector
from nanovllm.engine.engine import UnavailableError
from nanovllm.engine.engine_thread import EngineThread

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine

T = TypeVar("T")
LOADING = "the weights are being replaced: load_weights() has not returned yet"


class Dropped(str):
    """The reason why the engine can't run after `sleep(level=2)`.

    `weights` tracks which weights were loaded after the call of `sleep`.
    """

    weights: Any = None  # a ModelWeights


@contextmanager
def refusing_requests(llm: "LLMEngine", kind: str, reason: str) -> Iterator[None]:
    """Refuse new requests while a `with` block changes the engine, by setting `unavailable[kind]` to `reason`.

    The reason stays set after the block ends. If the block raises an error, the previous reason is restored. Raises
    UnavailableError if the engine has requests and is not paused, or while weights are being replaced.
    """
    unavailable = llm.core.unavailable
    if unavailable.get("weights") == LOADING:
        raise UnavailableError(LOADING)
    before = {kind: unavailable[kind]} if kind in unavailable else {}
    unavailable[kind] = reason  # before the check: a request that arrives now sees the reason, or is counted
    try:
        queued = [waiter for waiter in llm.engine_thread.queued() if isinstance(waiter, OutputCollector)]
        num_requests = len(llm.core.scheduler.live) + len(queued)
        if num_requests and "paused" not in unavailable:
            raise UnavailableError(f"requests that have not ended: {num_requests}; call pause(), or let them end")
        yield
    except BaseException:
        del unavailable[kind]
        unavailable.update(before)
        raise


def in_engine(thread: EngineThread, work: Callable[[], T]) -> T:
    """Call `work` in the engine's thread, between two steps, and return its result.

    If `work` raises ValueError, TypeError or UnavailableError, this function raises the same error, and the engine
    continues. After any other error, all requests end, as after an error in a step.
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
