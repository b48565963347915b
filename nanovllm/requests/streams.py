"""The loop of `LLMEngine.stream`."""

from collections.abc import Iterator

from nanovllm.engine.engine_thread import EngineThread, Submission
from nanovllm.engine.outputs import OutputCollector, OutputKind
from nanovllm.requests.request import CompletionRequest
from nanovllm.requests.stream_event import StreamEvent

MAX_STEPS_AHEAD = 16  # that wait for the reader, who may have taken as many before


def events_of(requests: list[CompletionRequest], thread: EngineThread) -> Iterator[StreamEvent]:
    """Submits requests of the kind DELTA with the first event that is asked for, and ends when they have ended."""
    num_unfinished = sum(len(request.group) for request in requests)
    collector = OutputCollector(OutputKind.DELTA, MAX_STEPS_AHEAD)
    with Submission(thread, requests, collector):
        while num_unfinished:
            for event in thread.take(collector).events:
                num_unfinished -= event.finish_reason is not None
                yield event
