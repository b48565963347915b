"""Defines a request of an asyncio caller. Events accumulate until the caller takes them."""

import asyncio
from collections.abc import Callable, Iterable
from math import inf
from time import time
from typing import Any

from nanovllm.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.requests.request import CompletionRequest
from nanovllm.requests.stream_event import StreamEvent


class AsyncRequest:
    """A request that belongs to one event loop. Only the event loop's thread may use the request.

    If the caller is slow, it gets the merged events of several steps.
    """

    def __init__(self, request: CompletionRequest, name: str):
        """name: the id that the caller gave the request. (The engine's id is `request_id`.)"""
        self.request, self.name = request, name
        self.request_id, self.num_answers = request.request_id, len(request.group)
        self.arrival_time = time()
        self.prompt_token_ids = request.group[0].prompt_token_ids
        self.final: RequestOutput | None = None  # the output with all answers, once all answers have ended
        self._events: list[StreamEvent] = []
        self._num_unfinished = self.num_answers
        self._error: Exception | None = None
        self._has_news = asyncio.Event()
        # called when an event, the output or an error arrives; if None, a task may wait for `_has_news`
        self.on_news: Callable[[], None] | None = None

    @property
    def num_cached_tokens(self) -> int:
        """The number of prompt tokens that were found in the prefix cache; 0 until the prompt is computed."""
        return self.request.group[0].num_cached_tokens

    # -- what the AsyncLLM calls ---------------------------------------------------------------------------------------

    def add_event(self, event: StreamEvent) -> None:
        """Add an event. When the AsyncLLM has added all new events, it calls `tell` once."""
        self._events.append(event)
        if event.finish_reason is not None:
            self._num_unfinished -= 1
            if not self._num_unfinished:
                self.final = self.request.output()

    def finish(self, final: Any) -> None:
        """Set the complete output. After `finish`, the AsyncLLM calls `tell`."""
        self.final = final

    def fail(self, error: Exception) -> None:
        """Make the caller's next call raise `error`, unless the answers are complete."""
        self._error = error
        self.tell()

    def tell(self) -> None:
        (self.on_news or self._has_news.set)()

    # -- what the caller calls -----------------------------------------------------------------------------------------

    async def next_events(self) -> list[StreamEvent]:
        """Wait for new events, and merge them into one event per answer.

        The returned list is empty if the request has no further events.
        """
        while not (self._events or self.final):
            await self._wait()
        return self.take_events()

    def take_events(self, max_events: float = inf) -> list[StreamEvent]:
        """Return merged events without waiting.

        At most `max_events` events are merged, and further events are kept for later. Raises the error of a failed
        request.
        """
        self._check()
        taken, self._events = self._events, []
        if len(taken) > max_events:
            taken, self._events = taken[: int(max_events)], taken[int(max_events) :]
        return merged(taken)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    async def result(self) -> RequestOutput:
        while self.final is None:
            await self._wait()
        return self.final

    def output(self, answers: Iterable["PartialAnswer"]) -> RequestOutput:
        if self.final is not None:
            return self.final
        metrics, outputs = RequestMetrics(self.arrival_time, None, None, None), [answer.output() for answer in answers]
        prompt, ids = self.request.prompt, self.prompt_token_ids
        return RequestOutput(self.request_id, prompt, ids, outputs, False, self.num_cached_tokens, None, metrics)

    async def _wait(self) -> None:
        self._check()
        self._has_news.clear()
        await self._has_news.wait()

    def _check(self) -> None:
        if self._error is not None and self.final is None:
            raise self._error


def merged(events: list[StreamEvent]) -> list[StreamEvent]:
    """Merge events into one event per answer, in the order of the answers' first events."""
    if len(events) < 2:
        return events
    pieces: dict[int, list[StreamEvent]] = {}
    for event in events:
        pieces.setdefault(event.output_index, []).append(event)
    return [answer_events[0] if len(answer_events) == 1 else _merge(answer_events) for answer_events in pieces.values()]


def _merge(events: list[StreamEvent]) -> StreamEvent:
    last, text = events[-1], "".join([event.text for event in events])
    token_ids = [token_id for event in events for token_id in event.token_ids]
    logprobs = None if last.logprobs is None else [entry for event in events for entry in event.logprobs or ()]
    ids, reasons = (last.index, last.output_index, last.request_id), (last.finish_reason, last.stop_reason)
    return StreamEvent(*ids, text, token_ids, *reasons, logprobs)


class PartialAnswer:
    """The part of an answer that has arrived so far. New events extend the answer's lists in place."""

    def __init__(self, index: int):
        self.index = index
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None
        self.cumulative_logprob: float | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, event: StreamEvent) -> None:
        self.texts.append(event.text)
        self.token_ids += event.token_ids
        if event.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += event.logprobs
            new = [entry[token_id].logprob for token_id, entry in zip(event.token_ids, event.logprobs)]
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(new)
        self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason

    def output(self) -> CompletionOutput:
        """Return the answer so far.

        The returned lists are copies, so the returned answer does not change when more tokens arrive.
        """
        text, token_ids = "".join(self.texts), [*self.token_ids]
        self.texts = [text]
        logprobs = None if self.logprobs is None else [*self.logprobs]
        reasons = self.finish_reason, self.stop_reason
        return CompletionOutput(self.index, text, token_ids, self.cumulative_logprob, logprobs, *reasons)
