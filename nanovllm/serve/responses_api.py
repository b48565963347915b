"""Turns requests to OpenAI's `/v1/responses` into chat requests. Stores a limited number of responses."""

import asyncio
import json
from typing import Annotated, Any, ClassVar, Literal, cast

from fastapi import FastAPI, Request, Response
from pydantic import Field

from nanovllm.features.logprobs import check_num_logprobs
from nanovllm.requests.content_parts import is_image, problem_with
from nanovllm.sampling_params import MAX_INT
from nanovllm.serve.answers import dump_json
from nanovllm.serve.errors import ApiError, about, require
from nanovllm.serve.http_responses import json_response
from nanovllm.serve.openai_api import Api
from nanovllm.serve.protocol import ChatBody, Dicts, GenerationBody, Strings, ToolDicts, only, translated
from nanovllm.serve.responses_answer import ResponsesAnswer

MAX_STORED = 1000  # responses
MAX_STORED_BYTES = 64 * 2**20  # of JSON: the responses, and the conversations before them
MAX_CONVERSATION_BYTES = 4 * 2**20  # of JSON, with previous responses; otherwise, truncation would tokenize any length
NOT_FOUND = "It was not stored, is not kept any more, or another process of this server has it."


class ResponsesBody(GenerationBody):
    input: str | Dicts
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    max_tool_calls: int | None = None  # changes nothing: it limits tools that the server runs, and there are none
    tools: ToolDicts = Field([])
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] = Field({"format": {"type": "text"}})
    reasoning: dict[str, Any] = Field({})
    include_reasoning: bool = True
    include: Strings = Field([])
    top_logprobs: int = Field(0, ge=-1)
    truncation: Literal["auto", "disabled"] = "disabled"
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    # these fields would change the answer, and are not supported
    background: Annotated[Any, only(False)] = False
    conversation: Annotated[Any, only()] = None
    prompt: Annotated[Any, only()] = None
    use_beam_search: Annotated[Any, only(False)] = None


class Conversation(ChatBody):
    """A chat body that was translated from a request to /v1/responses."""

    own_names: ClassVar = ChatBody.own_names | {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text",
        "reasoning_effort": "reasoning",
    }


class ResponseStore:
    """Stores each response, as JSON, under its id. The conversation items before the response are also stored.

    If there are too many responses or bytes, the least recently used responses are dropped. Only the event loop's
    thread may use the store.
    """

    def __init__(self, max_number: int = MAX_STORED, max_bytes: int = MAX_STORED_BYTES):
        self._max_number, self._max_bytes = max_number, max_bytes
        self._entries: dict[str, tuple[bytes, bytes]] = {}
        self._num_bytes = 0

    def add(self, name: str, response: bytes, items: bytes) -> None:
        self._entries[name] = response, items
        self._num_bytes += len(response) + len(items)
        while len(self._entries) > self._max_number or self._num_bytes > self._max_bytes:
            self.remove(next(iter(self._entries)))

    def get(self, name: str) -> tuple[bytes, bytes]:
        """Return the response and the conversation items before it.

        Raises ApiError (404) if the response is not stored.
        """
        if name not in self._entries:
            raise ApiError(404, f"Response with id {name!r:.80} not found. {NOT_FOUND}")
        self._entries[name] = self._entries.pop(name)
        return self._entries[name]

    def remove(self, name: str) -> None:
        self._num_bytes -= sum(map(len, self._entries.pop(name)))


def add_routes(app: FastAPI, api: Api) -> None:
    store = ResponseStore()

    @app.post("/v1/responses")
    async def create(body: ResponsesBody, request: Request) -> Response:
        with about(ResponsesBody.model_fields):  # checked even if the response includes no log-probabilities
            check_num_logprobs("top_logprobs", body.top_logprobs, api.llm.input_processor.config)
        previous = None if body.previous_response_id is None else store.get(body.previous_response_id)
        conversation, items = await asyncio.to_thread(_translate, body, previous)
        loop = asyncio.get_running_loop()

        def keep(name: str, response: bytes) -> None:
            if body.store:
                loop.call_soon_threadsafe(store.add, name, response, items)

        return await api.converse(conversation, request, lambda *arguments: ResponsesAnswer(body, keep, *arguments))

    @app.get("/v1/responses/{name}")
    async def retrieve(name: str) -> Response:
        return json_response(store.get(name)[0])

    @app.post("/v1/responses/{name}/cancel")
    async def cancel(name: str) -> Response:
        store.get(name)
        raise ApiError(400, "Cannot cancel a synchronous response.")

    @app.delete("/v1/responses/{name}")
    async def delete(name: str) -> Response:
        store.get(name)
        store.remove(name)
        return json_response({"id": name, "object": "response", "deleted": True})


def _translate(body: ResponsesBody, previous: tuple[bytes, bytes] | None) -> tuple[ChatBody, bytes]:
    """Return the conversation, and the JSON of its items.

    New items come after the items and the output of the previous response. Instructions of previous requests are
    ignored. Raises ApiError if the input is not supported.
    """
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if previous is not None:
        items = json.loads(previous[1]) + json.loads(previous[0])["output"] + items
    dumped = dump_json(items)
    problem = f"previous_response_id: the conversation has more than {MAX_CONVERSATION_BYTES} bytes"
    require(previous is None or len(dumped) <= MAX_CONVERSATION_BYTES, problem)
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    last_item = items[-1] if items else {}
    is_cut = last_item.get("role") == "assistant" and last_item.get("status") in ("in_progress", "incomplete")
    answer_format = body.text.get("format")
    if isinstance(answer_format, dict) and answer_format.get("type") == "json_schema":
        answer_format = {"type": "json_schema", "json_schema": answer_format}
    has_logprobs = "message.output_text.logprobs" in body.include
    # whoever knows the id of a stored response can read it, so clients must not choose ids
    names = body.model_fields_set & ChatBody.model_fields.keys() - {"request_id"}
    common = {name: getattr(body, name) for name in names}
    translated_fields = {
        "messages": instructions + _messages(items),
        "n": 1,
        "max_completion_tokens": body.max_output_tokens,
        "response_format": answer_format,
        "logprobs": has_logprobs,
        "top_logprobs": body.top_logprobs if has_logprobs else None,
        "reasoning_effort": body.reasoning.get("effort"),
        "truncate_prompt_tokens": -1 if body.truncation == "auto" else None,
        "add_generation_prompt": not is_cut,
        "continue_final_message": is_cut,
    }
    return translated(Conversation, common | translated_fields | _tools(body)), dumped


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Translate items to messages. The reasoning, text and call items of one answer become a single message."""
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        kind, last_message = item.get("type") or "message", messages[-1] if messages else {}
        if kind == "message" and item.get("role") in ("user", "assistant", "system", "developer"):
            message = {"role": item["role"], "content": _content(item.get("content"), i)}
        elif kind == "reasoning":
            texts = _texts(item.get("content") or item.get("summary"), i)
            message = {"role": "assistant", "reasoning": "".join(texts)}
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            message = {"role": "assistant", "tool_calls": [*last_message.get("tool_calls", ()), call]}
        elif kind == "function_call_output":
            message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"), i)}
        else:
            problem = f"input[{i}]: neither a message with a role nor a supported type: {kind!r:.80}"
            raise ApiError(400, problem, "input")
        is_after_reasoning = last_message.keys() == {"role", "reasoning"} and kind != "reasoning"
        if message["role"] == last_message.get("role") == "assistant" and (
            is_after_reasoning or kind == "function_call"
        ):
            last_message.update(message)
        else:
            messages.append(message)
    return messages


def _content(content: Any, index: int) -> str | list[dict[str, Any]]:
    """Return a chat message's content. The content is a list if there are images or several texts, else a string."""
    if isinstance(content, list) and any(map(is_image, content)):
        as_text = lambda part: {"type": "text", "text": _texts([part], index)[0]}
        return [part if is_image(part) else as_text(part) for part in content]
    texts = _texts(content, index)
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)


def _texts(content: Any, index: int) -> list[str]:
    parts = content if isinstance(content, list) else [] if content is None else [{"text": content}]
    for problem in filter(None, map(problem_with, parts)):
        raise ApiError(400, f"input[{index}]: {problem}", "input")
    texts: list[Any] = [part.get("text", part.get("refusal")) if isinstance(part, dict) else None for part in parts]
    is_text = all(isinstance(text, str) for text in texts)
    require(is_text, f"input[{index}]: the content must be text, or parts that are text")
    return texts


def _tools(body: ResponsesBody) -> dict[str, Any]:
    """Translate the tools and the tool choice."""
    tools, choice = body.tools, cast(Any, body.tool_choice)
    if isinstance(choice, dict) and isinstance(allowed := choice.get("tools"), list):  # "allowed_tools"
        names = [tool.get("name") for tool in allowed if isinstance(tool, dict)]
        tools = [tool for tool in tools if tool.get("name") in names]
        choice = choice.get("mode")
    elif isinstance(choice, dict):
        choice = {"type": choice.get("type"), "function": choice}
    nested = [{"type": tool.pop("type", None), "function": tool} for tool in map(dict, tools)]
    return {"tools": nested or None, "tool_choice": choice if tools or choice not in ("auto", "none") else None}
