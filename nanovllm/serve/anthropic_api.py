"""Serves Anthropic's API, `/v1/messages`. Requests are translated to chat requests, and answers are translated back.

Each supported content type has a class in this file. Other content types, such as documents, are refused; the error
names the type.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BeforeValidator, Field
from typing_extensions import NotRequired, TypedDict

from nanovllm.engine.outputs import RequestOutput
from nanovllm.requests.stream_event import StreamEvent
from nanovllm.serve import chat
from nanovllm.serve.answers import dump_json, server_sent_event
from nanovllm.serve.errors import MESSAGES_PATH, ApiError, require
from nanovllm.serve.http_responses import json_response
from nanovllm.serve.openai_api import Api
from nanovllm.serve.protocol import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, Body, ChatBody, Item, String, translated

# Claude Code sends a system block that begins with this text, and that contains a different hash in each request
BILLING_HEADER = "x-anthropic-billing-header"
SAME_FIELDS = {"model", "stream", "max_tokens", "temperature", "top_p", "top_k"}
OF_FUNCTIONS = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


# A body may have 100,000 blocks. Blocks are TypedDicts, which pydantic checks five times as fast as models.


class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


class ImageBlock(TypedDict):
    type: Literal["image"]
    source: dict[str, Any]


class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(TypedDict):
    """Encrypted reasoning from another server, which this server can't read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(TypedDict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None]  # as in a chat message


AnyBlock = TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
Blocks = list[Annotated[AnyBlock, Field(discriminator="type")]]


class InputMessage(Item):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Blocks, Field(fail_fast=True, max_length=MAX_MESSAGES), BeforeValidator(_as_blocks)]


class InputTool(Item):
    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(Item):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountTokensBody(Body):
    kept_fields: ClassVar = ("tools",)

    messages: list[InputMessage] = Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    system: Annotated[list[TextBlock], Field(fail_fast=True), BeforeValidator(_as_blocks)] | None = None
    tools: Annotated[list[InputTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None
    thread: Any = None
    chat_template_kwargs: dict[str, Any] | None = None  # an extension of vLLM


class MessagesBody(CountTokensBody):
    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[String], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    output_config: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None  # changes nothing here


class TranslatedMessages(ChatBody):
    own_names: ClassVar = {
        **dict.fromkeys(("reasoning_effort", "response_format"), "output_config"),
        "thinking_token_budget": "thinking",
    }


def chat_body(body: CountTokensBody) -> ChatBody:
    problem = "thread: this server stores no conversations; send the whole conversation"
    require(not body.thread, problem, "thread_unsupported_request")  # after this code, clients resend everything
    system = InputMessage.model_construct(role="system", content=body.system or [])
    messages = [message for input_message in (system, *body.messages) for message in _chat_messages(input_message)]
    fields = body.model_dump(include=SAME_FIELDS) | {"messages": messages}
    if body.tools:
        fields["tools"] = [{"type": "function", "function": _function(tool)} for tool in body.as_sent("tools")]
    if (choice := body.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name or ""}}
        fields["tool_choice"] = TOOL_CHOICES.get(choice.type, named)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if messages and messages[-1]["role"] == "assistant" and messages[-1].get("content"):
        fields |= {"add_generation_prompt": False, "continue_final_message": True}  # the answer continues this message
    thinks = {"enable_thinking": body.thinking.get("type") != "disabled"} if body.thinking else {}
    fields["chat_template_kwargs"] = thinks | (body.chat_template_kwargs or {})
    if isinstance(body, MessagesBody):
        config = body.output_config or {}
        fields |= {"stop": body.stop_sequences, "reasoning_effort": config.get("effort")}
        fields["thinking_token_budget"] = (body.thinking or {}).get("budget_tokens")
        if answer_format := config.get("format"):
            fields["response_format"] = {"type": "json_schema", "json_schema": answer_format}
    return translated(TranslatedMessages, fields)


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """Translate a tool. Keep the order of the tool's fields, and leave out fields that chat requests do not define."""
    function = {OF_FUNCTIONS[name]: value for name, value in tool.items() if name in OF_FUNCTIONS and value is not None}
    if "type" not in function["parameters"]:
        function["parameters"] = {"type": "object", **function["parameters"]}
    return function


def _chat_messages(message: InputMessage) -> Iterator[dict[str, Any]]:
    """Translate a message.

    Each tool result becomes a message. All other content blocks together become the last message.
    """
    blocks = defaultdict[str, list[Any]](list)
    for block in message.content:
        blocks[block["type"]].append(block)
    for result in blocks["tool_result"]:
        content = result.get("content")
        if isinstance(content, list):
            content = [_image_part(block) if block.get("type") == "image" else block for block in content]
        yield {"role": "tool", "tool_call_id": result["tool_use_id"], "content": content}
    entry: dict[str, Any] = {"role": message.role}
    texts = blocks["text"]
    if message.role == "system":
        text = "".join([block["text"] for block in texts if not block["text"].startswith(BILLING_HEADER)])
        texts = _as_blocks(text) if text else []
    if blocks["image"]:
        kinds = {"text": lambda block: block, "image": _image_part}
        entry["content"] = [kinds[block["type"]](block) for block in message.content if block["type"] in kinds]
    elif texts:
        entry["content"] = texts if len(texts) > 1 else texts[0]["text"]
    if thoughts := blocks["thinking"]:
        entry["reasoning"] = "".join([block["thinking"] for block in thoughts])
    for call in blocks["tool_use"]:
        function = {"name": call["name"], "arguments": call["input"]}
        entry.setdefault("tool_calls", []).append({"id": call["id"], "type": "function", "function": function})
    if len(entry) > 1 or message.role == "assistant":
        yield entry


def _image_part(block: Mapping[str, Any]) -> dict[str, Any]:
    """Translate an image to a part of a chat message."""
    source: Any = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    require(kind in ("base64", "url"), f"messages: an image with source={source!r:.80}: its type must be base64 or url")
    data = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": source.get("url") if kind == "url" else data}}


class MessagesAnswer(chat.ChatAnswer):
    """A chat answer in Anthropic's format, as a complete list of blocks or as streamed events."""

    id_prefix = "msg_"
    _num_tokens = 0  # streamed so far
    _num_blocks = 0  # started so far
    _open_type: str | None = None  # the type of the last block, until it ends

    def _whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        answer = outputs[0].outputs[0]
        parser = self._make_parser()
        content = [block for part in self._found(parser, answer, is_last=True) for block in self._blocks(part)]
        stop = _stop(self._rest(answer, parser.num_calls) | {"stop_reason": answer.stop_reason})
        usage = {"usage": self._tokens(len(answer.token_ids))}
        return dump_json(self._message(content or [{"type": "text", "text": ""}]) | stop | usage)

    def begin(self) -> bytes:
        num_tokens = len(self.requests[0].prompt_token_ids)  # the number of cached tokens is not known yet
        start = {"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": num_tokens, "output_tokens": 0}}
        return _event("message_start", message=self._message([]) | start)

    def _events(self, prompt_index: int, events: Sequence[StreamEvent]) -> bytes:
        data: list[bytes] = []
        for event in events:
            self._num_tokens += len(event.token_ids)
            for choice in self.chunk_choices(prompt_index, event):
                for block in self._blocks(choice["delta"]):
                    data += self._add(block)
                if choice["finish_reason"] is not None:
                    if not self._num_blocks:
                        data += self._next_block({"type": "text", "text": ""})
                    data += self._next_block(None)
                    data.append(_event("message_delta", delta=_stop(choice), usage=self._tokens(self._num_tokens)))
        return b"".join(data)

    def _end(self) -> bytes:
        return _event("message_stop")

    def error_event(self, error: ApiError) -> bytes:
        return server_sent_event(error.body(MESSAGES_PATH))

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._head["model"], "content": content}

    def _blocks(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if thinking := message.get("reasoning_content"):
            # without a signature, clients do not send the block back
            yield {"type": "thinking", "thinking": thinking, "signature": self.id}
        if text := message.get("content"):
            yield {"type": "text", "text": text}
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            yield {"type": "tool_use", "id": call["id"], "name": name, "input": arguments}

    def _add(self, block: dict[str, Any]) -> Iterator[bytes]:
        """Yield events for a block, or for another piece of the open block."""
        kind = block["type"]
        if kind == "tool_use":
            yield from self._next_block(block | {"input": {}})
            yield self._delta(type="input_json_delta", partial_json=json.dumps(block["input"], ensure_ascii=False))
            return
        if kind != self._open_type:
            yield from self._next_block({"type": kind, kind: ""})
        yield self._delta(type=f"{kind}_delta", **{kind: block[kind]})

    def _next_block(self, block: dict[str, Any] | None) -> Iterator[bytes]:
        """Yield events that end the open block, if any. Yield events that begin `block`, unless it is None."""
        if self._open_type == "thinking":
            yield self._delta(type="signature_delta", signature=self.id)
        if self._open_type is not None:
            yield _event("content_block_stop", index=self._num_blocks - 1)
        self._open_type = None if block is None else block["type"]
        if block is not None:
            self._num_blocks += 1
            yield _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _tokens(self, num_output_tokens: int) -> dict[str, int]:
        (request,) = self.requests
        num_cached = request.num_cached_tokens
        num_new = len(request.prompt_token_ids) - num_cached
        return {"input_tokens": num_new, "cache_read_input_tokens": num_cached, "output_tokens": num_output_tokens}


def _event(name: str, **content: Any) -> bytes:
    return server_sent_event({"type": name, **content})


def _stop(choice: dict[str, Any]) -> dict[str, Any]:
    reason, stop = choice["finish_reason"], choice["stop_reason"]
    if reason == "stop" and isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}


def add_routes(app: FastAPI, api: Api) -> None:
    @app.post(MESSAGES_PATH)
    async def messages(body: MessagesBody, request: Request) -> Response:
        if api.formats.reasoning is None and body.thinking:
            body.thinking.pop("budget_tokens", None)  # without reasoning, a budget has no effect
        return await api.converse(await asyncio.to_thread(chat_body, body), request, MessagesAnswer)

    @app.post(f"{MESSAGES_PATH}/count_tokens")
    async def count_tokens(body: CountTokensBody, request: Request) -> Response:
        conversation = await asyncio.to_thread(chat_body, body)
        return json_response({"input_tokens": len(await api.prompt_token_ids(conversation))})
