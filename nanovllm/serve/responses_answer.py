"""Makes the answers of /v1/responses: a list of output items, or a stream of typed events."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any
from uuid import uuid4

from msgspec import Raw

from nanovllm.engine.outputs import CompletionOutput, RequestOutput
from nanovllm.requests.stream_event import StreamEvent
from nanovllm.serve.answers import dump_json, server_sent_event
from nanovllm.serve.chat import ChatAnswer
from nanovllm.serve.errors import ApiError
from nanovllm.serve.protocol import GenerationBody

# the response repeats these fields of the request
REPEATED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls"),
    *("previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier", "service_tier", "text"),
    *("tool_choice", "tools", "top_logprobs", "truncation", "user"),
)

# by kind of text item: the prefix of its id, additional fields of the item, and fields of its only part
TEXT_ITEMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "reasoning": ("rs", {"summary": []}, {"type": "reasoning_text"}),
    "message": ("msg", {"role": "assistant"}, {"type": "output_text", "annotations": [], "logprobs": []}),
}


class ResponsesAnswer(ChatAnswer):
    id_prefix = "resp_"

    def __init__(self, request: GenerationBody, keep: Callable[[str, bytes], None], *arguments: Any):
        """request: the body as the client sent it.
        keep: a function to call with the id and the JSON of the complete response.
        arguments: the arguments of ChatAnswer.
        """
        super().__init__(*arguments)
        self._request, self._keep = request, keep
        self._parser, self._numbers = self._make_parser(), count()
        self._status = "in_progress"
        self._output: list[dict[str, Any]] = []
        self._open_kind: str | None = None  # the kind of the last item, if its text is still arriving
        self._part: dict[str, Any] = {}  # the part of the last item, without its text
        self._texts: list[str] = []  # the text of the last item, in pieces
        self._text_logprobs: list[Any] = []  # the log-probabilities of the last message
        self._held_logprobs: list[Any] = []  # log-probabilities of tokens whose text has not arrived yet
        self._generated: list[int] = []  # the ids of all tokens of the answer

    def _whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        self._events(0, outputs[0].outputs)
        return self._kept()

    def begin(self) -> bytes:
        return b"".join([self._event(name, response=self._response()) for name in ("created", "in_progress")])

    def _events(self, prompt_index: int, events: Sequence[CompletionOutput | StreamEvent]) -> bytes:
        return b"".join([data for event in events for data in self._take(event)])

    def _end(self) -> bytes:
        return self._event(self._status, response=Raw(self._kept()))

    def error_event(self, error: ApiError) -> bytes:
        self._status = "failed"
        response = self._response() | {"error": {"code": "server_error", "message": error.message}}
        return self._event(self._status, response=response)

    def _kept(self) -> bytes:
        data = dump_json(self._response())
        self._keep(self.id, data)
        return data

    def _event(self, name: str, /, **fields: Any) -> bytes:
        return server_sent_event({"type": f"response.{name}", "sequence_number": next(self._numbers), **fields})

    # -- items ---------------------------------------------------------------------------------------------------------

    def _take(self, piece: CompletionOutput | StreamEvent) -> Iterator[bytes]:
        """Add a piece of the answer to the output. Yield the piece's events.

        Each event is encoded before the next event changes the same item.
        """
        is_last = piece.finish_reason is not None
        self._generated += piece.token_ids
        self._held_logprobs += (self._logprobs(piece.token_ids, piece.logprobs) or {"content": []})["content"]
        for part in self._found(self._parser, piece, is_last):
            yield from self._add_text("reasoning", part.get("reasoning", ""))
            if self._open_kind == "reasoning" and "reasoning" not in part:
                del self._held_logprobs[: self._parser.num_reasoning_tokens]
            yield from self._add_text("message", part.get("content", ""))
            for call in part.get("tool_calls", ()):
                yield from self._add_call(call)
        if is_last:
            self._status = "incomplete" if piece.finish_reason == "length" else "completed"
            if not self._output:
                yield from self._open("message")
            yield from self._close(self._status)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _item_event(self, name: str, **changes: Any) -> bytes:
        """Change the last item, and return an event that contains the whole item."""
        self._output[-1] |= changes
        return self._event(f"output_item.{name}", output_index=len(self._output) - 1, item=self._output[-1])

    def _add_item(self, id_prefix: str, **fields: Any) -> bytes:
        self._output.append({"id": f"{id_prefix}_{uuid4().hex}", "status": "in_progress", **fields})
        return self._item_event("added")

    def _open(self, kind: str) -> Iterator[bytes]:
        yield from self._close()
        self._open_kind, self._texts, self._text_logprobs = kind, [], []
        id_prefix, entries, self._part = TEXT_ITEMS[kind]
        yield self._add_item(id_prefix, type=kind, content=[], **entries)
        yield self._event("content_part.added", **self._place(), content_index=0, part={"text": "", **self._part})

    def _add_text(self, kind: str, text: str) -> Iterator[bytes]:
        if not text:
            return
        if self._open_kind != kind:
            yield from self._open(kind)
        self._texts.append(text)
        entries = {"delta": text} | ({"logprobs": self._take_logprobs()} if kind == "message" else {})
        yield self._event(f"{self._part['type']}.delta", **self._place(), content_index=0, **entries)

    def _take_logprobs(self) -> list[Any]:
        taken, self._held_logprobs = self._held_logprobs, []
        self._text_logprobs += taken
        return taken

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        if (kind := self._open_kind) is None:
            return
        self._open_kind, text = None, dict[str, Any](text="".join(self._texts))
        if kind == "message":
            self._take_logprobs()  # take the log-probabilities of the token that ended the answer
            text["logprobs"] = self._text_logprobs
        part = self._part | text
        yield self._event(f"{part['type']}.done", **self._place(), content_index=0, **text)
        yield self._event("content_part.done", **self._place(), content_index=0, part=part)
        yield self._item_event("done", content=[part], status=status)

    def _add_call(self, call: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        function = call["function"]
        yield self._add_item("fc", type="function_call", call_id=call["id"], name=function["name"], arguments="")
        yield self._event("function_call_arguments.delta", **self._place(), delta=function["arguments"])
        yield self._event("function_call_arguments.done", **self._place(), **function)
        yield self._item_event("done", arguments=function["arguments"], status="completed")

    # -- the response --------------------------------------------------------------------------------------------------

    def _response(self) -> dict[str, Any]:
        params = self.requests[0].request.params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._head["created"],
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "model": self._head["model"],
            "output": self._output,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "usage": None if self._status == "in_progress" else self._response_usage(),
            **{name: getattr(self._request, name) for name in REPEATED},
        }

    def _response_usage(self) -> dict[str, Any]:
        usage = self._usage(len(self._generated))
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._parser.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }
