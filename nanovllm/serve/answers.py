"""Encodes JSON. Defines the base class of answers to completion requests and chat requests."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from time import time
from typing import Any
from uuid import uuid4

import msgspec

from nanovllm.engine.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.requests.stream_event import StreamEvent
from nanovllm.serve.async_request import AsyncRequest
from nanovllm.serve.errors import ApiError
from nanovllm.serve.protocol import GenerationBody, StreamOptions

MIN_LOGPROB = -9999.0  # JSON has no infinity
MANY_LOGPROBS = 640  # the most that are encoded at once; if a client reads slowly, more may accumulate
MARK = uuid4().hex  # a placeholder for text; no client can guess it
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def dump_json(content: Any) -> bytes:
    """Encode content as JSON. Lone surrogates, which clients may send, become question marks."""
    try:
        return _encode(content)
    except UnicodeEncodeError:
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), default=msgspec.json.decode)
        return text.encode("utf-8", "replace")


def encoded(content: Any) -> msgspec.Raw:
    """Encode content as JSON. The returned JSON can be part of other content that is encoded later."""
    return msgspec.Raw(dump_json(content))


def server_sent_event(content: dict[str, Any]) -> bytes:
    """Encode a server-sent event. If the content has a "type", this type becomes the event's name."""
    head = f"event: {content['type']}\n".encode() if "type" in content else b""
    return head + b"data: " + dump_json(content) + b"\n\n"


class Answer:
    """The answer to a client's request, which may have several prompts. An answer is complete or streamed.

    If an answer has log-probabilities, a thread encodes the answer, because encoding takes a long time.
    """

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(self, body: GenerationBody, model: str, requests: Sequence[AsyncRequest]):
        self.body, self.requests = body, requests
        self._has_logprobs = body.logprobs not in (None, False) or body.prompt_logprobs is not None
        options = body.stream_options or StreamOptions()
        self._has_usage = bool(options.include_usage)
        self._has_usage_everywhere = self._has_usage and bool(options.continuous_usage_stats)
        self.id = f"{self.id_prefix}{body.request_id or uuid4().hex}"
        self._head = {"id": self.id, "created": int(time()), "model": model}
        self._frames: dict[tuple[int, int], tuple[bytes, bytes]] = {}  # keys as in `_num_streamed`
        self._num_streamed: dict[tuple[int, int], int] = {}  # streamed tokens by (prompt index, answer index)

    async def complete(self) -> bytes:
        outputs = [await request.result() for request in self.requests]
        return await asyncio.to_thread(self._whole, outputs) if self._has_logprobs else self._whole(outputs)

    def _whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        choices = [self.choice(i, output, answer) for i, output in enumerate(outputs) for answer in output.outputs]
        usage = self._usage(sum(len(answer.token_ids) for output in outputs for answer in output.outputs))
        content = {"object": self.object_name, **self._head, "choices": choices, "usage": usage, **self.extras(outputs)}
        return dump_json(content)

    def begin(self) -> bytes:
        return b""

    def take(self) -> bytes:
        """Return server-sent events for new output. Raises the error of a failed request."""
        data, has_logprobs = [], self._has_logprobs
        for i, request in enumerate(self.requests):
            if events := request.take_events(self._max_events(request) if has_logprobs else inf):
                data.append(self._events(i, events))
        return b"".join(data)

    def _max_events(self, request: AsyncRequest) -> float:
        """Return the number of events to encode now. The event loop's next iteration encodes the remaining events."""
        if (num_top := request.request.params.logprobs) is None:
            return inf
        return max(1, MANY_LOGPROBS // (num_top + 1)) if num_top >= 0 else 1

    async def end(self) -> bytes:
        return await asyncio.to_thread(self._end) if self._has_logprobs else self._end()

    def _end(self) -> bytes:
        """Return the last events: the usage (if the client asked for it) and `[DONE]`."""
        if not self._has_usage:
            return DONE
        return server_sent_event(self._chunk([], self._usage(sum(self._num_streamed.values())))) + DONE

    def error_event(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails after its first event."""
        return server_sent_event(error.body())

    def _events(self, prompt_index: int, events: Sequence[StreamEvent]) -> bytes:
        chunks: list[bytes] = []
        for event in events:
            key = prompt_index, event.output_index
            num_before = self._num_streamed.get(key, 0)
            self._num_streamed[key] = num_tokens = num_before + len(event.token_ids)
            if event.finish_reason is None and (frame := self._frames.get(key)) is not None:
                if event.text:
                    chunks += (frame[0], dump_json(event.text), frame[1])
                continue
            choices = self.chunk_choices(prompt_index, event)
            for choice in choices:
                everywhere = self._has_usage_everywhere
                num = num_tokens if choice is choices[-1] else num_before  # the tokens are in the last chunk
                usage = self._usage(num, prompt_index) if everywhere else None
                chunks.append(server_sent_event(self._chunk([choice], usage)))
            if event.finish_reason is None and self.goes_on_plainly(event):
                self._frames[key] = self._frame(prompt_index, event)
        return b"".join(chunks)

    def goes_on_plainly(self, event: StreamEvent) -> bool:
        """Return True if all further chunks of this choice, except the last one, will differ only in their text."""
        return not (self._has_logprobs or self._has_usage_everywhere or self.body.return_token_ids)

    def _frame(self, prompt_index: int, event: StreamEvent) -> tuple[bytes, bytes]:
        """Return the parts of an encoded chunk before and after its text."""
        (choice,) = self.chunk_choices(prompt_index, replace(event, text=MARK))
        before, after = server_sent_event(self._chunk([choice], None)).split(dump_json(MARK))
        return before, after

    def choice(self, prompt_index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        raise NotImplementedError

    def chunk_choices(self, prompt_index: int, event: StreamEvent) -> list[dict[str, Any]]:
        """Return the entries of `choices` for an event. Each chunk of the event has one entry.

        The last entry contains the event's tokens.
        """
        raise NotImplementedError

    def extras(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return additional fields of a complete answer."""
        return {}

    def prompt_entries(self, output: RequestOutput) -> dict[str, Any]:
        """Return the token ids and the log-probabilities of the prompt, if the client asked for them."""
        logprobs = None
        if self.body.prompt_logprobs is not None:
            logprobs = [
                encoded({i: x._asdict() | {"logprob": logprob_value(x)} for i, x in entry.items()}) if entry else None
                for entry in output.prompt_logprobs or ()
            ]
        token_ids = output.prompt_token_ids if self.body.return_token_ids else None
        return {"prompt_token_ids": token_ids, "prompt_logprobs": logprobs}

    def token_text(self, token_id: int, text: str | None) -> str:
        """Return a token's name in a list of log-probabilities. The name is the token's text or, on request, its id."""
        return f"token_id:{token_id}" if self.body.return_tokens_as_token_ids else text or ""

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        chunk = {"object": self.chunk_name, **self._head, "choices": choices}
        return chunk | {"usage": usage} if self._has_usage else chunk

    def _usage(self, num_completion_tokens: int, prompt_index: int | None = None) -> dict[str, Any]:
        requests = self.requests if prompt_index is None else [self.requests[prompt_index]]
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(request.num_cached_tokens for request in requests)},
        }


def logprob_value(entry: Logprob) -> float:
    return max(entry.logprob, MIN_LOGPROB)
