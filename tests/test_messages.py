"""Anthropic's API: `/v1/messages` over raw HTTP, and with the `anthropic` package where it is installed."""

import asyncio
import json
from threading import current_thread
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
pytest.importorskip("openai")  # of test_server

from common import CharacterTokenizer
from test_server import MODEL, running

from nanovllm.engine.outputs import CompletionOutput, RequestOutput
from nanovllm.requests.stream_event import StreamEvent
from nanovllm.serve import anthropic_api
from nanovllm.serve.answer_formats import Formats
from nanovllm.serve.anthropic_api import MessagesAnswer, MessagesBody, chat_body
from nanovllm.serve.async_request import AsyncRequest
from nanovllm.serve.engine_client import EngineDeadError, QueueFullError
from nanovllm.serve.errors import ApiError

KEY = "sk-ant"
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
GREEDY = dict(model=MODEL, temperature=0.0, max_tokens=12)
TOOL = {
    "name": "get_weather",
    "description": "Of a place",
    "input_schema": {"properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False},
}
CALL = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"n": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"}
HEADER = "x-anthropic-billing-header: cc_version=2; cch=d1d48;"


@pytest.fixture(scope="module")
def server():
    with running(max_body_bytes=100_000, api_key=(KEY,), tool_call_parser="hermes") as server:
        yield server


@pytest.fixture(scope="module")
def http(server):
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01", "anthropic-beta": "some-2026-01-01"}
    with httpx.Client(base_url=server.url, timeout=20, headers=headers) as http:
        yield http


@pytest.fixture(scope="module")
def create(http):
    """The answer to a request; the events of a stream, in one list."""

    def create(path="/v1/messages", **fields):
        answer = http.post(path, json=fields)
        assert answer.status_code == 200, answer.text
        return events_of(answer.text) if fields.get("stream") else answer.json()

    return create


def events_of(text: str) -> list[dict]:
    found = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def built(events: list[dict]) -> dict:
    """The message that the events of a stream build, as a client puts it together. They come in the right order."""
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == [
        *("message_start", "message_delta", "message_stop")
    ]
    message, inputs = events[0]["message"], dict[int, str]()
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            message["content"].append(dict(event["content_block"]))
            is_open = True
            continue
        assert is_open and event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            continue
        block, delta = message["content"][-1], dict(event["delta"])
        kind = delta.pop("type")
        ((name, value),) = delta.items()
        if kind == "input_json_delta":
            inputs[event["index"]] = inputs.get(event["index"], "") + value
        else:
            assert kind == {"text": "text_delta", "thinking": "thinking_delta", "signature": "signature_delta"}[name]
            block[name] = block.get(name, "") + value
    assert not is_open
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message | events[-2]["delta"] | {"usage": message["usage"] | events[-2]["usage"]}


# -- what a conversation becomes ---------------------------------------------------------------------------------------


def converted(messages, **fields):
    body = chat_body(MessagesBody.model_validate({"messages": messages, "max_tokens": 5, **fields}))
    return body, body.as_sent("messages")


CHAT_CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"n": 1}}}
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
THOUGHTS = [{"type": "thinking", "thinking": text, "signature": "s"} for text in ("One. ", "Two.")]


@pytest.mark.parametrize(
    "messages, wanted",
    [
        pytest.param([USER, ANSWER, USER], [USER, ANSWER, USER], id="text"),
        pytest.param(
            [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}],
            [USER],
            id="one-block",
        ),
        pytest.param(
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "x": 1}]}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            id="blocks",
        ),
        pytest.param(
            [USER, {"role": "assistant", "content": [*THOUGHTS, {"type": "text", "text": "Hello"}]}, USER],
            [USER, {"role": "assistant", "content": "Hello", "reasoning": "One. Two."}, USER],
            id="thinking",
        ),
        pytest.param(
            [USER, {"role": "assistant", "content": [THOUGHTS[0], {"type": "redacted_thinking", "data": "x"}]}, USER],
            [USER, {"role": "assistant", "reasoning": "One. "}, USER],
            id="thinking-alone",
        ),
        pytest.param(
            [USER, {"role": "assistant", "content": [THOUGHTS[1], CALL]}, {"role": "user", "content": [RESULT]}],
            [
                USER,
                {"role": "assistant", "reasoning": "Two.", "tool_calls": [CHAT_CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            ],
            id="call-and-result",
        ),
        pytest.param(
            [{"role": "user", "content": [{"type": "text", "text": "Hi"}, RESULT | {"is_error": True}]}],
            [{"role": "tool", "tool_call_id": "call_1", "content": "sunny"}, USER],
            id="result-before-text",
        ),
        pytest.param(
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1"}]}, USER],
            [{"role": "tool", "tool_call_id": "call_1", "content": None}, USER],
            id="result-without-content",
        ),
        pytest.param(
            [USER, {"role": "system", "content": [{"type": "text", "text": x} for x in (HEADER, "Be ", "brief.")]}],
            [USER, {"role": "system", "content": "Be brief."}],
            id="inline-system",
        ),
        pytest.param([USER, {"role": "system", "content": HEADER}], [USER], id="inline-header"),
    ],
)
def test_conversations(messages, wanted):
    assert converted(messages)[1] == wanted


@pytest.mark.parametrize(
    "system, wanted",
    [("Be brief.", "Be brief."), ([HEADER, "Be ", "brief."], "Be brief."), ([HEADER], None), (None, None)],
)
def test_system_prompts(system, wanted):
    blocks = [{"type": "text", "text": text} for text in system] if isinstance(system, list) else system
    assert converted([USER], system=blocks)[1] == [*([{"role": "system", "content": wanted}] if wanted else []), USER]


def test_fields_of_a_request():
    body, _ = converted(
        [USER],
        tools=[TOOL, {"name": "other", "input_schema": {"type": "object"}, "type": "custom", "strict": True}],
        stop_sequences=["a", "b"],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stream=True,
        metadata={"user_id": "me"},
        thinking={"type": "enabled", "budget_tokens": 2000},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        chat_template_kwargs={"x": 1},
    )
    assert (body.max_tokens, body.stop, body.temperature, body.top_p, body.top_k) == (5, ["a", "b"], 0.5, 0.9, 7)
    assert (
        body.stream
        and body.reasoning_effort == "low"
        and body.chat_template_kwargs == {"enable_thinking": True, "x": 1}
    )
    assert [tool.function.name for tool in body.tools] == ["get_weather", "other"]
    assert body.tools[0].function.parameters == {"type": "object"} | TOOL["input_schema"]
    assert body.response_format.json_schema.schema_ == {"type": "object"}
    assert converted([USER], thinking={"type": "disabled"})[0].chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    "choice, wanted",
    [
        (None, None),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "get_weather"}, "get_weather"),
    ],
)
def test_tool_choices(choice, wanted):
    given = converted([USER], tools=[TOOL], tool_choice=choice)[0].tool_choice
    assert (given.function.name if hasattr(given, "function") else given) == wanted
    if choice is not None:
        choice = choice | {"disable_parallel_tool_use": True}
        assert converted([USER], tools=[TOOL], tool_choice=choice)[0].parallel_tool_calls is False


def test_too_many_calls_of_a_message_are_refused():
    """It is a bound of chats, whose error names no class of ours."""
    with pytest.raises(ApiError, match="messages.*at most") as found:
        converted([{"role": "assistant", "content": [CALL] * 1000}])
    assert found.value.status == 400 and "ChatBody" not in found.value.message


# -- answers -----------------------------------------------------------------------------------------------------------


def test_message(create, http):
    chat = http.post("/v1/chat/completions", json={"messages": QUESTION, **GREEDY}).json()
    message = create(messages=QUESTION, **GREEDY)
    assert message["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert message["id"].startswith("msg_") and message["model"] == MODEL
    assert (message["type"], message["role"]) == ("message", "assistant")
    usage = message["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert (num_prompt, usage["output_tokens"]) == (chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"])


@pytest.mark.parametrize(
    "fields, reason, sequence",
    [
        ({}, "end_turn", None),
        ({"max_tokens": 1}, "max_tokens", None),
        ({"stop_sequences": ["x", "2"]}, "stop_sequence", "2"),
    ],
)
def test_stop_reasons(create, fields, reason, sequence):
    options = {"messages": QUESTION, **GREEDY, **fields}
    message = create(**options)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    streamed = built(create(stream=True, **options))
    del message["id"], streamed["id"], message["usage"], streamed["usage"]
    assert streamed == message


def test_events_of_a_stream(create):
    # a long answer: a slow server sends several tokens in one piece
    question = [{"role": "user", "content": "Count from 1 to 40."}]
    events = create(messages=question, stream=True, **GREEDY | {"max_tokens": 100})
    start = events[0]["message"]
    assert (start["type"], start["role"], start["content"], start["stop_reason"]) == ("message", "assistant", [], None)
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    usage = events[-2]["usage"]
    assert len(deltas) > 1 and start["usage"]["output_tokens"] == 0 and usage["output_tokens"] >= len(deltas)
    assert start["usage"]["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_cached_tokens(create):
    messages = [{"role": "user", "content": "Cached. " * 40}]
    one, two = (create(messages=messages, **GREEDY)["usage"] for _ in range(2))
    streamed = built(create(messages=messages, stream=True, **GREEDY))["usage"]
    num_cached = two["cache_read_input_tokens"]
    assert one["cache_read_input_tokens"] == 0 and num_cached >= 16 and streamed == two
    assert two["input_tokens"] == one["input_tokens"] - num_cached


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_tools_that_must_be_called(create, choice, stream):
    options = dict(messages=QUESTION, tools=[TOOL], **GREEDY | {"max_tokens": 100})
    answer = create(tool_choice=choice | {"disable_parallel_tool_use": True}, stream=stream, **options)
    message = built(answer) if stream else answer
    (call,) = message["content"]
    assert (call["type"], call["name"], message["stop_reason"]) == ("tool_use", "get_weather", "tool_use")
    assert call["input"]["n"] in (1, 2) and call["id"]
    result = {"role": "user", "content": [RESULT | {"tool_use_id": call["id"]}, {"type": "text", "text": "So?"}]}
    messages = [*QUESTION, {"role": "assistant", "content": message["content"]}, result]
    assert create(**options | {"messages": messages, "max_tokens": 5})["content"][0]["type"] == "text"


def test_calls_that_are_cut(create):
    options = dict(messages=QUESTION, tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"})
    message = create(**options, **GREEDY | {"max_tokens": 2})
    assert message["stop_reason"] == "max_tokens" and [block["type"] for block in message["content"]] == ["text"]


def answer_to(text: str, finish_reason: str = "stop"):
    """The answer to a request with tools of a model that reasons and has written `text`; whole, and streamed."""
    body, _ = converted([USER], tools=[TOOL], stream=True)
    request = SimpleNamespace(prompt_token_ids=[1, 2, 3], num_cached_tokens=2)
    formats = Formats("hermes", reasoning=CharacterTokenizer().markers())
    one, two = (MessagesAnswer(body, MODEL, [request], formats) for _ in range(2))
    ids = [*map(ord, text)]
    output = CompletionOutput(0, text, ids, None, None, finish_reason, None)
    whole = json.loads(one._whole([RequestOutput(0, "Hi", [1, 2, 3], [output], True, 2, None, None)]))
    pieces = [StreamEvent(0, 0, 0, piece, [ord(piece)], None, None, None) for piece in text]
    pieces.append(StreamEvent(0, 0, 0, "", [], finish_reason, None, None))
    events = [data for piece in pieces if (data := two._events(0, [piece]))]
    return whole, built(events_of(b"".join([two.begin(), *events, two._end()]).decode()))


CALLED = '<tool_call>{"name": "get_weather", "arguments": {"n": 1}}</tool_call>'


@pytest.mark.parametrize(
    "text, types",
    [
        (f"<think>Hm</think>Let me see. {CALLED}{CALLED}", ["thinking", "text", "tool_use", "tool_use"]),
        (f"{CALLED}", ["tool_use"]),
        ("<think>Hm", ["thinking"]),
        ("", ["text"]),
    ],
)
def test_blocks_of_an_answer(text, types):
    whole, streamed = answer_to(text)
    assert [block["type"] for block in whole["content"]] == types
    assert whole["stop_reason"] == ("tool_use" if "tool_use" in types else "end_turn")
    assert whole["usage"] == {"input_tokens": 1, "cache_read_input_tokens": 2, "output_tokens": len(text)}
    for message in (whole, streamed):
        for block in message["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id") and block["input"] == {"n": 1}
            if block["type"] == "thinking":
                assert block.pop("signature") == message["id"] and block["thinking"] == "Hm"
        del message["id"]
    assert streamed == whole


def test_structured_output(create):
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    message = create(messages=QUESTION, output_config=wanted, **GREEDY | {"max_tokens": 60})
    assert json.loads(message["content"][0]["text"])["x"] in (1, 2)


def test_an_answer_that_has_begun(create):
    """The last message of the assistant is continued."""
    text = create(messages=QUESTION, **GREEDY)["content"][0]["text"]
    begun = [*QUESTION, {"role": "assistant", "content": text[:1]}]
    assert create(messages=begun, **GREEDY)["content"][0]["text"] == text[1:]


def test_count_tokens(create):
    fields = dict(model=MODEL, messages=QUESTION, system="Be brief.", tools=[TOOL])
    usage = create(max_tokens=1, **fields)["usage"]
    count = create("/v1/messages/count_tokens", **fields)
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_unknown_fields_and_parameters_are_ignored(create):
    wanted = create(messages=QUESTION, **GREEDY)["content"]
    options = {"cache_control": {"type": "ephemeral"}, "inference_geo": None, "betas": [], "speed": "fast"}
    assert create("/v1/messages?beta=true", messages=QUESTION, **options, **GREEDY)["content"] == wanted


# -- errors ------------------------------------------------------------------------------------------------------------


def check_error(answer, status, kind):
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind), answer.text
    return error["error"]["message"]


def test_clients_are_told_to_send_threads_as_a_whole(http):
    """With this code they do."""
    answer = http.post("/v1/messages", json={"messages": QUESTION, **GREEDY, "thread": {"type": "create"}})
    assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_errors_have_the_shape_of_the_api(http, path):
    body = {"messages": QUESTION, **GREEDY}
    check_error(http.post(path, json=body | {"model": "other"}), 404, "not_found_error")
    check_error(http.post(path, json=body, headers={"x-api-key": "other"}), 401, "authentication_error")
    check_error(http.post(path, json=body, headers={"host": "evil.example"}), 403, "permission_error")
    check_error(http.post(path, json=body | {"system": "a" * 100_000}), 413, "request_too_large")
    headers = {"content-type": "application/json"}
    check_error(http.post(path, content=b"{", headers=headers), 400, "invalid_request_error")
    check_error(http.get(path), 405, "invalid_request_error")
    check_error(http.post(f"{path}/batches", json=body), 404, "not_found_error")


@pytest.mark.parametrize(
    "error, status, kind",
    [
        (QueueFullError("no room"), 429, "rate_limit_error"),
        (EngineDeadError("gone"), 503, "overloaded_error"),
        (TimeoutError(), 504, "timeout_error"),
        (RuntimeError("of our own"), 500, "api_error"),
    ],
)
def test_errors_of_the_server(server, http, monkeypatch, error, status, kind):
    async def fail(*arguments):
        raise error

    monkeypatch.setattr(server.llm, "submit", fail)
    answer = http.post("/v1/messages", json={"messages": QUESTION, **GREEDY})
    assert "our own" not in check_error(answer, status, kind)


def test_error_in_a_stream(create, monkeypatch):
    def fail(*arguments):
        raise TimeoutError

    monkeypatch.setattr(AsyncRequest, "take_events", fail)
    events = create(messages=QUESTION, stream=True, **GREEDY)
    assert [event["type"] for event in events] == ["message_start", "error"]
    assert events[1]["error"]["type"] == "timeout_error"


def test_keys(server):
    """Either header has one, at any path; a wrong one in one of them is no harm."""
    body = {"messages": QUESTION, **GREEDY, "max_tokens": 1}
    bearer, key, wrong = {"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}, {"x-api-key": "other"}
    for headers, status in [(bearer, 200), (key, 200), (bearer | wrong, 200), (wrong, 401), ({"x-api-key": ""}, 401)]:
        for path in ("/v1/messages", "/v1/chat/completions"):
            assert httpx.post(server.url + path, json=body, headers=headers).status_code == status
    assert httpx.post(server.url + path, json=body, headers={"authorization": f"Basic {KEY}"}).status_code == 401


# -- the anthropic package ---------------------------------------------------------------------------------------------


@pytest.mark.clients
def test_anthropic(server, create):
    anthropic = pytest.importorskip("anthropic")
    text = create(messages=QUESTION, **GREEDY)["content"][0]["text"]
    options = dict(model=MODEL, messages=QUESTION, max_tokens=12, extra_body={"temperature": 0.0})
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        assert client.messages.create(**options).content[0].text == text
        with client.messages.stream(**options) as stream:
            assert "".join(stream.text_stream) == text and stream.get_final_message().stop_reason == "end_turn"
        assert client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens > 10
        choice = {"type": "tool", "name": "get_weather"}
        with client.messages.stream(**options | {"max_tokens": 100}, tools=[TOOL], tool_choice=choice) as stream:
            message = stream.get_final_message()
        assert message.content[0].input["n"] in (1, 2) and message.stop_reason == "tool_use"
        with pytest.raises(anthropic.NotFoundError, match="other"):
            client.messages.create(**options | {"model": "other"})


def test_long_conversations_are_translated_in_a_thread(server, create, monkeypatch):
    """Those of 2 MB take 0.2 s, in which the event loop serves others."""
    threads = []
    chat_body = anthropic_api.chat_body
    monkeypatch.setattr(anthropic_api, "chat_body", lambda body: threads.append(current_thread()) or chat_body(body))
    create(messages=QUESTION, **GREEDY)
    create("/v1/messages/count_tokens", messages=QUESTION)
    assert len(threads) == 2 and server.thread not in threads


@pytest.mark.clients
def test_anthropic_in_asyncio(server, create):
    anthropic = pytest.importorskip("anthropic")
    text = create(messages=QUESTION, **GREEDY)["content"][0]["text"]
    options = dict(model=MODEL, messages=QUESTION, max_tokens=12, extra_body={"temperature": 0.0})

    async def texts():
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
            async with client.messages.stream(**options) as stream:
                streamed = "".join([piece async for piece in stream.text_stream])
            return [streamed, (await client.messages.create(**options)).content[0].text]

    assert asyncio.run(texts()) == [text, text]


@pytest.mark.clients
def test_tool_runner(server):
    """The helper that calls functions: refused a stored conversation, it sends the whole one."""
    anthropic = pytest.importorskip("anthropic")
    calls = []

    @anthropic.beta_tool
    def note(n: int) -> str:
        """Note a number."""
        calls.append(n)
        return "noted"

    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        options = dict(model=MODEL, messages=QUESTION, max_tokens=100, tools=[note], max_iterations=2)
        choice = {"type": "tool", "name": "note"}
        answers = [*client.beta.messages.tool_runner(tool_choice=choice, extra_body={"temperature": 0.0}, **options)]
    assert [answer.stop_reason for answer in answers] == ["tool_use", "tool_use"] and len(calls) >= 1
