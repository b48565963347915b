"""What answers to both kinds of generation requests have in common."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from time import time
from typing import Any
from uuid import uuid4

from nanovllm.engine.outputs import Logprob, RequestOutput, StreamEvent
from nanovllm.serve.async_request import AsyncRequest
from nanovllm.serve.errors import ApiError
from nanovllm.serve.protocol import GenerationBody

MIN_LOGPROB = -9999.0  # JSON has no infinity
MANY_LOGPROBS = 32  # tokens of an event: those of several steps, for a client that reads slowly
NUM_LEVELS = 5  # from an answer down to the log-probabilities of a token
DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def dump_json(content: Any, num_levels: int = 0) -> bytes:
    """JSON as bytes. Half of a surrogate pair, which only a client can have sent, becomes a question mark.

    num_levels: the items of so many outer levels are encoded one by one. Other threads can run in between.
    """
    text = _encode_in_pieces(content, num_levels) if num_levels else _encode(content)
    return text.encode("utf-8", "replace")


def _encode_in_pieces(content: Any, num_levels: int) -> str:
    if num_levels and isinstance(content, dict):
        entries = [f"{_encode(name)}:{_encode_in_pieces(value, num_levels - 1)}" for name, value in content.items()]
        return f"{{{','.join(entries)}}}"
    if num_levels and isinstance(content, list):
        return f"[{','.join([_encode_in_pieces(item, num_levels - 1) for item in content])}]"
    return _encode(content)


def server_sent_event(content: Any, num_levels: int = 0, name: str | None = None) -> bytes:
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + dump_json(content, num_levels) + b"\n\n"


class Answer:
    """The answer to one request of a client, complete or as chunks, for one prompt or several.

    Log-probabilities of many tokens take long to encode. A thread does that, in pieces, so that no other client waits.
    """

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(self, body: GenerationBody, model: str, requests: Sequence[AsyncRequest]):
        self.body, self.requests = body, requests
        self._has_logprobs = body.logprobs not in (None, False) or body.prompt_logprobs is not None
        self.id = f"{self.id_prefix}{body.request_id or uuid4().hex}"
        self._head = {"id": self.id, "created": int(time()), "model": model}
        self._num_streamed: dict[tuple[int, int], int] = {}  # tokens, by the indices of the prompt and of the answer

    async def complete(self) -> bytes:
        """The whole answer, as JSON."""
        outputs = [await request.result() for request in self.requests]
        return await asyncio.to_thread(self._whole, outputs) if self._has_logprobs else self._whole(outputs)

    def _whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        choices = [choice for i, output in enumerate(outputs) for choice in self.choices(i, output)]
        usage = self._usage(sum(len(answer.token_ids) for output in outputs for answer in output.outputs))
        content = {"object": self.object_name, **self._head, "choices": choices, "usage": usage, **self.extras(outputs)}
        return dump_json(content, NUM_LEVELS if self._has_logprobs else 0)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: of the beginning, of the answer while it arrives, and of the end."""
        if begin := self._begin():
            yield begin
        async for i, events in interleaved(self.requests):
            is_long = self._has_logprobs and any(len(event.token_ids) > MANY_LOGPROBS for event in events)
            if is_long:
                data = await asyncio.to_thread(self._events, i, events, NUM_LEVELS)
            else:
                data = self._events(i, events)
            if data:
                yield data
        yield await asyncio.to_thread(self._end) if self._has_logprobs else self._end()

    def _begin(self) -> bytes:
        return b""

    def _end(self) -> bytes:
        """The usage if the client wants it, and the mark of the end."""
        if not self.body.includes_usage:
            return DONE
        return server_sent_event(self._chunk([], self._usage(sum(self._num_streamed.values())))) + DONE

    def error_event(self, error: ApiError) -> bytes:
        """The last event, if there is an error after the first one."""
        return server_sent_event(error.body())

    def _events(self, prompt_index: int, events: Sequence[StreamEvent], num_levels: int = 0) -> bytes:
        chunks = []
        for event in events:
            key = prompt_index, event.output_index
            num_tokens = [self._num_streamed.get(key, 0)]  # before the event's last chunk, and with it
            num_tokens.append(num_tokens[0] + len(event.token_ids))
            self._num_streamed[key] = num_tokens[1]
            choices, everywhere = self.chunk_choices(prompt_index, event), self.body.includes_usage_everywhere
            for choice in choices:
                usage = self._usage(num_tokens[choice is choices[-1]], prompt_index) if everywhere else None
                chunks.append(server_sent_event(self._chunk([choice], usage), num_levels))
        return b"".join(chunks)

    def choices(self, prompt_index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The entries of `choices` for all answers to one prompt."""
        raise NotImplementedError

    def chunk_choices(self, prompt_index: int, event: StreamEvent) -> list[dict[str, Any]]:
        """The entry of `choices` in each chunk that an event makes; there may be none. The last has the tokens."""
        raise NotImplementedError

    def extras(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Further entries of a complete answer."""
        return {}

    def prompt_entries(self, output: RequestOutput) -> dict[str, Any]:
        """What the client wants to know of its prompt: entries of the answer, or of each choice."""
        logprobs = None
        if self.body.prompt_logprobs is not None:
            logprobs = [
                {str(i): x._asdict() | {"logprob": logprob_value(x)} for i, x in found.items()} if found else None
                for found in output.prompt_logprobs or ()
            ]
        token_ids = output.prompt_token_ids if self.body.return_token_ids else None
        return {"prompt_token_ids": token_ids, "prompt_logprobs": logprobs}

    def token_text(self, token_id: int, text: str | None) -> str:
        """How a token is shown beside its log-probability."""
        return f"token_id:{token_id}" if self.body.return_tokens_as_token_ids else text or ""

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        chunk = {"object": self.chunk_name, **self._head, "choices": choices}
        return chunk | {"usage": usage} if self.body.includes_usage else chunk

    def _usage(self, num_completion_tokens: int, prompt_index: int | None = None) -> dict[str, Any]:
        """The usage of one answer to a prompt, or of all answers."""
        requests = self.requests if prompt_index is None else [self.requests[prompt_index]]
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(request.num_cached_tokens for request in requests)},
        }


async def interleaved(requests: Sequence[AsyncRequest]) -> AsyncGenerator[tuple[int, list[StreamEvent]], None]:
    """(index of a request, its new events) in the order in which they arrive."""
    if len(requests) == 1:
        while events := await requests[0].next_events():
            yield 0, events
        return
    waiting = {asyncio.ensure_future(request.next_events()): i for i, request in enumerate(requests)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = waiting.pop(task)
                if events := task.result():
                    waiting[asyncio.ensure_future(requests[i].next_events())] = i
                    yield i, events
    finally:
        for task in waiting:
            task.cancel()


def logprob_value(found: Logprob) -> float:
    return max(found.logprob, MIN_LOGPROB)
