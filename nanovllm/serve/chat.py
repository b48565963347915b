"""Prepares the input of the chat template, and makes the answers of /v1/chat/completions."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, islice
from typing import Any, cast

from nanovllm.engine.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.requests import prompts
from nanovllm.requests.content_parts import image_entries, is_image
from nanovllm.requests.stream_event import StreamEvent
from nanovllm.serve.answer_formats import Formats
from nanovllm.serve.answers import Answer, encoded, logprob_value
from nanovllm.serve.async_request import AsyncRequest
from nanovllm.serve.errors import ApiError, require
from nanovllm.serve.harmony_parser import HarmonyParser
from nanovllm.serve.protocol import ChatBody, ChatFields, Message, NamedToolChoice
from nanovllm.serve.reasoning_parser import ReasoningParser, make_reasoning_parser
from nanovllm.serve.tool_parsers import PARSERS, Part, ToolCall, ToolParser, WholeParser, parsed
from nanovllm.vision.image_sources import LIMITS
from nanovllm.vision.vision_config import check_pixels

TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "documents", "chat_template")


def conversation(body: ChatFields) -> list[prompts.Message]:
    """Return the client's messages. Tool calls get OpenAI's newer form, and images become `image_url` parts.

    Raises TypeError or ValueError for invalid `mm_processor_kwargs`. Raises ApiError for an invalid message.
    """
    sent, pixels = body.as_sent("messages"), check_pixels("mm_processor_kwargs", body.mm_processor_kwargs or {})
    return [_message(message, sent[i], i, pixels) for i, message in enumerate(body.messages)]


def template_arguments(
    body: ChatFields, template: str | Mapping[str, str] | None = None, is_trusting: bool = False
) -> dict[str, Any]:
    """Return the arguments of the chat template, except for the messages.

    Raises ApiError if the client sets an argument that clients must not set.

    template: the server's template, or a dict of templates by name.
    is_trusting: True if the server renders templates from clients. (A template is a program.)
    """
    kwargs = body.chat_template_kwargs or {}
    problem = "chat_template: is a program, which this server accepts only with --trust-request-chat-template"
    servers = (None, *template, *template.values()) if isinstance(template, Mapping) else (None, template)
    require(is_trusting or body.chat_template in servers, problem)
    if reserved := kwargs.keys() & {"chat_template", "tokenize", "tools", "messages", "conversation", "return_dict"}:
        raise ApiError(400, f"chat_template_kwargs: {min(reserved)!r} is not allowed here", "chat_template_kwargs")
    offers_tools = body.tools and getattr(body, "tool_choice", None) != "none"
    arguments: dict[str, Any] = {name: getattr(body, name) for name in TEMPLATE_FIELDS}
    arguments["tools"] = _tools(body) if offers_tools else None
    if (effort := body.reasoning_effort) is not None:
        arguments |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return arguments | kwargs


def make_tool_parser(body: ChatBody, name: str | None) -> Callable[[], ToolParser]:
    """Return a function that makes a tool parser for one answer.

    `name` is the model's tool-call format, or `None` if unknown.
    """
    choice = body.tool_choice
    if not body.tools or choice == "none":
        return ToolParser
    if isinstance(choice, NamedToolChoice):
        return lambda: WholeParser(choice.function.name)
    if choice == "required":
        return WholeParser
    return partial(PARSERS[name or "none"], {tool.function.name: tool.function.parameters for tool in body.tools})


class AnswerParser:
    """Parses the text of one answer, in pieces or as a whole, into fields of chat messages."""

    def __init__(
        self,
        reasoning: ReasoningParser | HarmonyParser | None,
        tools: ToolParser,
        new_id: Callable[[], str] = ToolParser.new_id,
        max_calls: int | None = None,
    ):
        """new_id: a function that makes an id for each tool call.
        max_calls: the number of tool calls to keep; `None` keeps all.
        """
        self._reasoning, self._tools, self._new_id, self._max_calls = reasoning, tools, new_id, max_calls
        self.num_calls = 0

    @property
    def passes_text(self) -> bool:
        return type(self._tools) is ToolParser and (self._reasoning is None or self._reasoning.is_over)

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._reasoning is None else self._reasoning.reasoning.num_tokens

    def feed(self, text: str, token_ids: list[int], is_last: bool) -> Iterator[dict[str, Any]]:
        """Yield new fields in order. Reasoning comes first, then content alternates with lists of tool calls.

        "reasoning_content" is an older name of "reasoning".
        """
        content: str | list[Part] = text
        if self._reasoning is not None:
            reasoning, content = self._reasoning.feed(text, is_last, token_ids)
            if reasoning:
                yield {"reasoning": reasoning, "reasoning_content": reasoning}
        found = content if isinstance(content, list) else self._tools.feed(content, is_last)
        for is_text, parts in groupby(found, lambda part: isinstance(part, str)):
            if is_text:
                yield {"content": "".join(cast(Any, parts))}
            elif calls := [*islice(parts, None if self._max_calls is None else self._max_calls - self.num_calls)]:
                self.num_calls += len(calls)
                yield {"tool_calls": [self._entry(call) for call in cast(Any, calls)]}

    def _entry(self, call: ToolCall) -> dict[str, Any]:
        return {"id": self._new_id(), "type": "function", "function": call._asdict()}


class ChatAnswer(Answer):
    id_prefix, object_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    body: ChatBody

    def __init__(self, body: ChatBody, model: str, requests: Sequence[AsyncRequest], formats: Formats):
        super().__init__(body, model, requests)
        self._make_tool_parser = make_tool_parser(body, formats.tool_calls)
        self._new_call_id = PARSERS[formats.tool_calls or "none"].new_id
        self._markers, self._token_bytes = formats.reasoning, formats.token_bytes
        # if reasoning is hidden, token ids and log-probabilities are hidden too, because they would reveal it
        self._hides_tokens = self._markers is not None and not body.include_reasoning
        self._streams: dict[int, AnswerParser] = {}  # by answer
        last = body.messages[-1]
        self._role = "assistant" if body.add_generation_prompt else last.role
        self._echo = _text(last.content) if body.echo and last.role == self._role else ""

    def _make_parser(self) -> "AnswerParser":
        reasoning, tools = None, self._make_tool_parser()
        if self._markers is not None:
            reasoning = make_reasoning_parser(self._markers.start(self.requests[0].prompt_token_ids), tools)
        max_calls = 1 if self.body.parallel_tool_calls is False else None
        return AnswerParser(reasoning, tools, self._new_call_id, max_calls)

    def choice(self, prompt_index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        parser = self._make_parser()
        message: dict[str, Any] = {"role": self._role, "content": ""}
        for part in self._found(parser, answer, is_last=True):
            for name, value in part.items():
                message[name] = message[name] + value if name in message else value
        is_called_freely = parser.num_calls and self.body.tool_choice in (None, "auto")
        message["content"] = self._echo + message["content"] or (None if is_called_freely else "")
        other_fields = self._rest(answer, parser.num_calls)
        return {"index": answer.index, "message": message, **other_fields, "stop_reason": answer.stop_reason}

    def extras(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return self.prompt_entries(outputs[0])

    def chunk_choices(self, prompt_index: int, event: StreamEvent) -> list[dict[str, Any]]:
        index, is_last, chunks = event.output_index, event.finish_reason is not None, []
        if (parser := self._streams.get(index)) is None:
            parser = self._streams[index] = self._make_parser()
            chunks.append({"index": index, "delta": {"role": self._role, "content": self._echo}, "finish_reason": None})
        deltas = []
        for delta in self._found(parser, event, is_last):
            if calls := delta.get("tool_calls"):
                first_index = parser.num_calls - len(calls)
                delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls, first_index)]
            deltas.append(delta)
        chunks += [{"index": index, "delta": delta, "finish_reason": None} for delta in deltas[:-1]]
        delta = deltas[-1] if deltas else {}
        other_fields = self._rest(event, parser.num_calls)
        if delta or any(other_fields.values()) or self._has_usage_everywhere:
            stop = {"stop_reason": event.stop_reason} if is_last else {}
            chunks.append({"index": index, "delta": delta, **other_fields, **stop})
        return chunks

    def goes_on_plainly(self, event: StreamEvent) -> bool:
        return super().goes_on_plainly(event) and self._streams[event.output_index].passes_text

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        chunk = super()._chunk(choices, usage)
        if self.body.return_token_ids and any("role" in choice["delta"] for choice in choices):
            chunk["prompt_token_ids"] = self.requests[0].prompt_token_ids
        return chunk

    def _found(
        self, parser: AnswerParser, piece: CompletionOutput | StreamEvent, is_last: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield the fields that the parser finds. Leave out reasoning if the client does not want it."""
        for part in parser.feed(piece.text, piece.token_ids, is_last):
            if self.body.functions is not None and "tool_calls" in part:
                yield {"function_call": part["tool_calls"][0]["function"]}
            elif self.body.include_reasoning or "reasoning" not in part:
                yield part

    def _rest(self, piece: CompletionOutput | StreamEvent, num_calls: int) -> dict[str, Any]:
        """Return all fields of a choice except its message or delta."""
        reason = piece.finish_reason
        if reason == "stop" and num_calls:
            reason = "tool_calls" if self.body.functions is None else "function_call"
        token_ids = piece.token_ids if self.body.return_token_ids and not self._hides_tokens else None
        logprobs = self._logprobs(piece.token_ids, piece.logprobs)
        return {"logprobs": logprobs, "finish_reason": reason, "token_ids": token_ids}

    def _logprobs(self, token_ids: Iterable[int], logprobs: Iterable[Mapping[int, Logprob]] | None) -> dict | None:
        if logprobs is None or self._hides_tokens:
            return None
        num_top, content = self.body.top_logprobs or 0, []
        for token_id, alternatives in zip(token_ids, logprobs):
            entries = {i: self._logprob_entry(i, x) for i, x in alternatives.items()}
            most_likely = sorted(alternatives, key=lambda i: alternatives[i].rank)[: num_top if num_top >= 0 else None]
            content.append(encoded(entries[token_id] | {"top_logprobs": [entries[i] for i in most_likely]}))
        return {"content": content, "refusal": None}

    def _logprob_entry(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        data = self._token_bytes[token_id]
        token = self.token_text(token_id, logprob.decoded_token)
        return {"token": token, "logprob": logprob_value(logprob), "bytes": [*data]}


def _message(message: Message, sent: dict[str, Any], index: int, pixels: Mapping[str, int]) -> dict[str, Any]:
    """Return a message as the client sent it, but convert images, and tool calls in OpenAI's older form.

    `pixels` are the defaults of an image's `min_pixels` and `max_pixels`.
    """
    plain = dict(sent)
    if isinstance(content := plain.get("content"), list):
        plain["content"] = [_image_part(part, pixels) if is_image(part) else part for part in content]
    old_call, calls, name = plain.pop("function_call", None), message.tool_calls, "tool_calls"
    if old_call is not None and not calls:
        calls, name = [{"type": "function", "function": old_call}], "function_call"
    if calls:
        plain["tool_calls"] = [_checked_call(call, f"messages[{index}].{name}") for call in calls]
    return plain


def _image_part(part: Mapping[str, Any], pixels: Mapping[str, int]) -> dict[str, Any]:
    """Return an image part without unknown entries. Raises ApiError if no known entry has a string with the image.

    The returned part has the type `image_url`. A string in an `image_url` part is never used as a path, so no request
    can read a file by its path.
    """
    entries = {**pixels, **image_entries(part)}
    others = ", ".join(f"{name!r:.80}" for name in entries if name not in LIMITS) or "no image"
    problem = f"messages: an image part of type {part['type']!r} has {others:.200}: must have 'image_url'"
    name = require(next((name for name in ("image_url", part["type"], "url") if name in entries), None), problem)
    require(isinstance(entries[name], str), f"messages: {name}={entries[name]!r:.80}: must be a string with a URL")
    limits = {name: entries[name] for name in LIMITS if name in entries}
    return {"type": "image_url", "image_url": entries[name], **limits}


def _text(content: str | list[dict[str, Any]] | None) -> str:
    """Return the text of a message's content. Parts without text, such as images, are left out."""
    texts = [part["text"] for part in content if "text" in part] if isinstance(content, list) else [content or ""]
    return "\n".join(texts)


def _checked_call(call: dict[str, Any], path: str) -> dict[str, Any]:
    function: Any = call.get("function")
    has_name = isinstance(function, dict) and isinstance(function.get("name"), str)
    require(has_name, f"{path}: a call must have a function with a name")
    arguments = function.get("arguments")
    arguments = "{}" if arguments in (None, "") else arguments
    value = parsed(arguments) if isinstance(arguments, str) else arguments
    require(isinstance(value, dict), f"{path}: the arguments must be a JSON object")
    return call | {"function": function | {"arguments": arguments}}


def _tools(body: ChatFields) -> list[dict[str, Any]]:
    functions = (body.as_sent("functions") or ()) if isinstance(body, ChatBody) else ()
    return [*(body.as_sent("tools") or ()), *({"type": "function", "function": function} for function in functions)]
