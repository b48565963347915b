"""Conversations: the template's input, and the answers of /v1/chat/completions."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from nanovllm.engine import prompts
from nanovllm.engine.outputs import CompletionOutput, Logprob, RequestOutput, StreamEvent
from nanovllm.serve.answers import Answer, logprob_value
from nanovllm.serve.async_request import AsyncRequest
from nanovllm.serve.errors import ApiError
from nanovllm.serve.protocol import ChatBody, ChatFields, Message, NamedToolChoice
from nanovllm.serve.reasoning import ReasoningParser, begins_inside
from nanovllm.serve.tool_parsers import PARSERS, JsonListParser, NamedParser, ToolCall, ToolParser


def conversation(body: ChatFields) -> list[prompts.Message]:
    """The messages, as chat templates read them."""
    return [_message(message, i) for i, message in enumerate(body.messages)]


def template_arguments(body: ChatFields) -> dict[str, Any]:
    """Arguments of the chat template, apart from the messages. ApiError for those that are none of the client's."""
    own = body.chat_template_kwargs or {}
    if reserved := own.keys() & {"chat_template", "tokenize", "tools", "messages", "conversation", "return_dict"}:
        raise ApiError(400, f"chat_template_kwargs: {min(reserved)!r} is not allowed here", "chat_template_kwargs")
    offers_tools = body.tools and getattr(body, "tool_choice", None) != "none"
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()] if offers_tools else None
    return {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "tools": tools,
        **own,
    }


def make_tool_parser(body: ChatBody, name: str) -> Callable[[], ToolParser]:
    """A function that makes the parser of one answer; `name` is that of the model's own format."""
    choice = body.tool_choice
    if not body.tools or choice == "none":
        return ToolParser
    if isinstance(choice, NamedToolChoice):
        return lambda: NamedParser(choice.function.name)
    return JsonListParser if choice == "required" else PARSERS[name]


class AnswerParser:
    """Takes the text of one answer, in pieces or at once, and makes entries of its message."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser, max_calls: int | None = None):
        """max_calls: further calls are dropped; None is no bound."""
        self._reasoning, self._tools, self._max_calls = reasoning, tools, max_calls
        self.num_calls = 0

    def feed(self, text: str, is_last: bool) -> dict[str, Any]:
        """Those of "reasoning_content", "content" and "tool_calls" for which there is something new."""
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.feed(text, is_last)
        content, calls = self._tools.feed(text, is_last)
        if self._max_calls is not None:
            calls = calls[: self._max_calls - self.num_calls]
        self.num_calls += len(calls)
        found = {"reasoning_content": reasoning, "content": content, "tool_calls": [_call_entry(x) for x in calls]}
        return {name: value for name, value in found.items() if value}


class ChatAnswer(Answer):
    id_prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body: ChatBody

    def __init__(
        self,
        body: ChatBody,
        model: str,
        requests: Sequence[AsyncRequest],
        make_tool_parser: Callable[[], ToolParser],
        finds_reasoning: bool = False,
        token_bytes: Mapping[int, bytes] | None = None,
    ):
        """token_bytes: of each token id, for log-probabilities; a token may end within a character."""
        super().__init__(body, model, requests)
        self._token_bytes = {} if token_bytes is None else token_bytes
        self._make_tool_parser, self._finds_reasoning = make_tool_parser, finds_reasoning
        self._streams: dict[int, AnswerParser] = {}  # by answer

    def choices(self, prompt_index: int, output: RequestOutput) -> list[dict[str, Any]]:
        return [self._choice(answer) for answer in output.outputs]

    def _make_parser(self) -> "AnswerParser":
        prompt = self.requests[0].request.prompt
        reasoning = ReasoningParser(begins_inside(prompt)) if self._finds_reasoning else None
        return AnswerParser(reasoning, self._make_tool_parser(), 1 if self.body.parallel_tool_calls is False else None)

    def _choice(self, answer: CompletionOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": "", **self._make_parser().feed(answer.text, is_last=True)}
        if has_calls := "tool_calls" in message:
            message["content"] = message["content"] or None
        return {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs(answer.token_ids, answer.logprobs),
            "finish_reason": _finish_reason(answer.finish_reason, has_calls),
            "stop_reason": answer.stop_reason,
        }

    def chunk_choices(self, prompt_index: int, event: StreamEvent) -> list[dict[str, Any]]:
        index, is_last, chunks = event.output_index, event.finish_reason is not None, []
        if (parser := self._streams.get(index)) is None:
            parser = self._streams[index] = self._make_parser()
            chunks.append({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        delta = parser.feed(event.text, is_last)
        if calls := delta.get("tool_calls"):
            first = parser.num_calls - len(calls)
            delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls, first)]
        if delta or is_last or event.logprobs is not None or self.body.includes_usage_everywhere:
            choice = {"index": index, "delta": delta, "logprobs": self._logprobs(event.token_ids, event.logprobs)}
            choice["finish_reason"] = _finish_reason(event.finish_reason, parser.num_calls > 0)
            if is_last:
                choice["stop_reason"] = event.stop_reason
            chunks.append(choice)
        return chunks

    def _logprobs(self, token_ids: Iterable[int], logprobs: Iterable[Mapping[int, Logprob]] | None) -> dict | None:
        if logprobs is None:
            return None
        num_top, content = self.body.top_logprobs or 0, []
        for token_id, found in zip(token_ids, logprobs):
            entries = {i: self._logprob_entry(i, x) for i, x in found.items()}
            most_likely = sorted(found, key=lambda i: found[i].rank)[:num_top]
            content.append(entries[token_id] | {"top_logprobs": [entries[i] for i in most_likely]})
        return {"content": content, "refusal": None}

    def _logprob_entry(self, token_id: int, found: Logprob) -> dict[str, Any]:
        data = self._token_bytes[token_id]
        return {"token": found.decoded_token or "", "logprob": logprob_value(found), "bytes": [*data]}


def _call_entry(call: ToolCall) -> dict[str, Any]:
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": call._asdict()}


def _finish_reason(reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and reason == "stop" else reason


def _message(message: Message, index: int) -> dict[str, Any]:
    """Arguments of calls as objects, which every template can write; "developer" is OpenAI's newer name of "system"."""
    plain = message.model_dump(exclude_unset=True) | {"content": message.content or ""}
    if message.role == "developer":
        plain["role"] = "system"
    if message.tool_calls is not None:
        plain["tool_calls"] = [_plain_call(call, f"messages[{index}].tool_calls") for call in message.tool_calls]
    return plain


def _plain_call(call: dict[str, Any], path: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{path}: a call must have a function with a name", "messages")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{path}: the arguments must be a JSON object", "messages")
    return call | {"function": function | {"arguments": arguments}}
