"""Implements the loop of `LLMEngine.stream`."""

from collections.abc import Iterator

from nanovllm.engine.collector import OutputCollector
from nanovllm.engine.engine_thread import EngineThread, Submission
from nanovllm.engine.outputs import OutputKind
from nanovllm.requests.request import CompletionRequest
from nanovllm.requests.stream_event import StreamEvent

MAX_STEPS_AHEAD = 16  # steps in the collector; the reader may have taken, but not yet read, up to 16 more


def events_of(requests: list[CompletionRequest], thread: EngineThread) -> Iterator[StreamEvent]:
    """Yield the events of requests with `OutputKind.DELTA`. The first call of `next` submits the requests."""
    num_unfinished = sum(len(request.group) for request in requests)
    collector = OutputCollector(OutputKind.DELTA, MAX_STEPS_AHEAD)
    with Submission(thread, requests, collector):
        while num_unfinished:
            for event in thread.take(collector).events:
                num_unfinished -= event.finish_reason is not None
                yield event
