"""/v1/responses, with the `openai` package as its client: its types check every answer and every event."""

import json
from threading import current_thread
from typing import Literal

import pytest

pytest.importorskip("fastapi")
pydantic = pytest.importorskip("pydantic")
openai = pytest.importorskip("openai")

import test_server
from common import with_end_ids
from openai.types.responses import Response, ResponseStreamEvent
from test_server import MODEL, client, expected, offline, running

from nanovllm.serve import chat, openai_api, responses_api
from nanovllm.serve.errors import ApiError
from nanovllm.serve.responses_answer import ResponsesAnswer
from nanovllm.serve.responses_api import ResponseStore

__all__ = ["client", "offline"]  # fixtures

SUM = "What is 17 + 25?"
QUESTION = [{"role": "user", "content": SUM}]
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
ARGUMENTS = {"city": "Paris"}
CALL = json.dumps({"name": "get_weather", "arguments": ARGUMENTS})
THOUGHT = "I add."
# structured output makes the tiny model say what a larger one would
CALLS = {"structured_outputs": {"choice": [f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"]}}
THINKS = {"structured_outputs": {"choice": [f"<think>\n{THOUGHT}\n</think>\n\n42"]}}
THINKS_AND_CALLS = {"structured_outputs": {"choice": [f"<think>{THOUGHT}</think>Look.<tool_call>{CALL}</tool_call>"]}}
GREEDY = dict(model=MODEL, temperature=0, max_output_tokens=80)
LOGPROBS = dict(include=["message.output_text.logprobs"], top_logprobs=2)
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)
# what an event ends, by its type
BEGUN_BY = {
    "response.output_item.done": "response.output_item.added",
    "response.content_part.done": "response.content_part.added",
    "response.output_text.done": "response.output_text.delta",
    "response.reasoning_text.done": "response.reasoning_text.delta",
    "response.function_call_arguments.done": "response.function_call_arguments.delta",
    "response.completed": "response.created",
    "response.incomplete": "response.created",
}


@pytest.fixture(scope="module", autouse=True)
def use_small_model(small_model, tmp_path_factory):
    """No text matters, but answers end. Bytes are no ends: JSON consists of them."""
    folder = with_end_ids(small_model, tmp_path_factory.mktemp("responses"), 16, first=1023)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_server, "FOLDER", folder)
        yield


@pytest.fixture(scope="module")
def server():
    with running(reasoning_parser="think", tool_call_parser="hermes") as server:
        yield server


def create(client, **options) -> Response:
    """The response, checked against OpenAI's types: the client itself accepts anything."""
    raw = client.responses.with_raw_response.create(**GREEDY | options)
    response = Response.model_validate(raw.http_response.json(), strict=True)
    assert response.id.startswith("resp_") and response.object == "response" and response.model == MODEL
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    return response


def stream(client, **options) -> list:
    """The events, of which the types, the order, the numbers and the places are checked."""
    raw = client.responses.with_streaming_response.create(stream=True, **GREEDY | options)
    with raw as response:
        lines = [*response.iter_lines()]
    assert all(not line for line in lines[2::3]) and len(lines) % 3 == 0
    events = [EVENT.validate_json(line.removeprefix("data: ")) for line in lines[1::3]]
    assert [line.removeprefix("event: ") for line in lines[::3]] == [event.type for event in events]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    begun, item, index = [], None, -1
    for event in events:
        if event.type == "response.output_item.added":
            item, index = event.item, index + 1
            assert item.status == "in_progress" and item.id
        elif event.type == "response.output_item.done":
            assert event.item.id == item.id
        if item is not None and "response" not in event.type.split(".")[1] and hasattr(event, "output_index"):
            assert event.output_index == index and getattr(event, "item_id", item.id) == item.id
        if event.type in BEGUN_BY:
            assert begun.pop() == BEGUN_BY[event.type]
        elif event.type in BEGUN_BY.values() and begun[-1:] != [event.type]:
            begun.append(event.type)
    assert not begun
    return events


def without_ids(item) -> dict:
    """Of an item or of its event."""
    return item.model_dump(exclude={"id", "call_id"})


def text_of(events, kind: str = "output_text") -> str:
    return "".join(event.delta for event in events if event.type == f"response.{kind}.delta")


# -- answers -----------------------------------------------------------------------------------------------------------


def test_text(client, offline):
    output = expected(offline, QUESTION, max_tokens=80)
    assert 1 < len(output.token_ids) < 80
    response = create(client, input=SUM)
    assert (response.output_text, response.status, response.error) == (output.text, "completed", None)
    assert response.incomplete_details is None and not response.background
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(output.prompt_token_ids), len(output.token_ids))
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert response.temperature == 0 and response.tools == [] and response.tool_choice == "auto"
    events = stream(client, input=SUM)
    assert text_of(events) == output.text and events[-1].type == "response.completed"
    assert [without_ids(item) for item in events[-1].response.output] == [without_ids(x) for x in response.output]
    assert events[-1].response.usage.output_tokens == usage.output_tokens
    assert events[0].response.usage is None and events[0].response.output == []


@pytest.mark.parametrize(
    "given",
    [
        QUESTION,
        [{"type": "message", **QUESTION[0], "status": None}],
        [{"role": "user", "content": [{"type": "input_text", "text": text} for text in (QUESTION[0]["content"],)]}],
    ],
)
def test_forms_of_input(client, offline, given):
    assert create(client, input=given).output_text == expected(offline, QUESTION, max_tokens=80).text


def call_item(call_id: str, name: str, arguments: str, **entries) -> dict:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **entries}


def call(call_id: str, name: str, arguments: str) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


TURN = [
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": [{"type": "input_text", "text": "Weather"}, {"type": "input_text", "text": "there?"}]},
    {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
    call_item("a", "f", '{"x": 1}', id=None),
    call_item("b", "g", "{}", status="completed"),
    {"type": "function_call_output", "call_id": "a", "output": "sunny"},
    {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "cold"}]},
]
TURN_AS_CHAT = [
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "there?"}]},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning": "Hm.",
        "tool_calls": [call("a", "f", '{"x": 1}'), call("b", "g", "{}")],
    },
    {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    {"role": "tool", "tool_call_id": "b", "content": "cold"},
]
ANSWERS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "one"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "two"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "content": None},
    call_item("a", "f", "{}"),
]
ANSWERS_AS_CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "assistant", "reasoning": "Hm.", "tool_calls": [call("a", "f", "{}")]},
]


@pytest.mark.parametrize("given, messages", [(TURN, TURN_AS_CHAT), (ANSWERS, ANSWERS_AS_CHAT)])
def test_items_are_messages(client, server, offline, monkeypatch, given, messages):
    """A message for each, or for several that are one answer."""
    seen = []
    submit = server.llm.submit

    async def spy(prompt, *arguments, **options):
        seen.append(prompt)
        return await submit(prompt, *arguments, **options)

    monkeypatch.setattr(server.llm, "submit", spy)
    create(client, input=given, instructions="Be kind.", max_output_tokens=1)
    assert seen == [[{"role": "system", "content": "Be kind."}, *messages]]


def test_incomplete(client):
    response = create(client, input="Count to ten.", max_output_tokens=5)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete" and response.usage.output_tokens == 5
    events = stream(client, input="Count to ten.", max_output_tokens=5)
    assert events[-1].type == "response.incomplete" and events[-1].response.status == "incomplete"
    cut = events[-1].response.output[0]
    assert cut.content[0].text == response.output_text
    # a message that was cut is continued if it comes last
    both = create(client, input="Count to ten.", max_output_tokens=10).output_text
    given = [{"role": "user", "content": "Count to ten."}, response.output[0].model_dump(exclude_none=True)]
    assert response.output_text + create(client, input=given, max_output_tokens=5).output_text == both


def test_truncation(client, server):
    """A prompt that is too long is cut at its beginning, instead of the error that it is otherwise."""
    response = create(client, input="word " * 5000, truncation="auto", max_output_tokens=5)
    assert response.usage.input_tokens == server.llm.input_processor.config.max_model_len - 5


def test_logprobs(client, offline):
    output = expected(offline, QUESTION, max_tokens=80, logprobs=2)
    content = create(client, input=QUESTION, **LOGPROBS).output[0].content[0]
    assert len(content.logprobs) == len(output.token_ids)
    found = [entry.logprob for entry in content.logprobs]
    assert found == pytest.approx([x[i].logprob for i, x in zip(output.token_ids, output.logprobs)], abs=1e-3)
    assert all(len(entry.top_logprobs) == 2 for entry in content.logprobs)
    events = stream(client, input=QUESTION, **LOGPROBS)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert deltas and all(event.logprobs and len(event.logprobs[0].top_logprobs) == 2 for event in deltas)
    # another request, whose prompt may come from the prefix cache: the last bits may differ
    final = events[-1].response.output[0].content[0].logprobs
    assert [entry.token for entry in final] == [entry.token for entry in content.logprobs]
    assert [entry.logprob for entry in final] == pytest.approx(found, abs=1e-3)
    # the token that ended the answer has no text, and so no delta, unless it came together with the one before
    streamed, whole = [entry.logprob for event in deltas for entry in event.logprobs], [e.logprob for e in final]
    assert streamed in (whole[:-1], whole)
    assert all(len(entry.top_logprobs) == 2 for entry in final)
    assert create(client, input=QUESTION, top_logprobs=2).output[0].content[0].logprobs == []


# -- reasoning and tools -----------------------------------------------------------------------------------------------


def test_reasoning(client):
    response = create(client, input="17 + 25?", extra_body=THINKS, **LOGPROBS)
    reasoning, message = response.output
    assert reasoning.type == "reasoning" and reasoning.content[0].text.strip() == THOUGHT and reasoning.summary == []
    assert message.content[0].text == "42" and response.output_text == "42"
    num_reasoning = response.usage.output_tokens_details.reasoning_tokens
    assert 0 < num_reasoning < response.usage.output_tokens
    tokens = "".join(entry.token for entry in message.content[0].logprobs)
    assert "think" not in tokens and THOUGHT not in tokens and "42" in tokens
    events = stream(client, input="17 + 25?", extra_body=THINKS, **LOGPROBS)
    assert text_of(events, "reasoning_text").strip() == THOUGHT and text_of(events) == "42"
    assert [without_ids(item) for item in events[-1].response.output] == [without_ids(x) for x in response.output]
    assert events[-1].response.usage.output_tokens_details.reasoning_tokens == num_reasoning
    cut = create(client, input="17 + 25?", extra_body=THINKS, max_output_tokens=12)
    assert [item.type for item in cut.output] == ["reasoning"] and cut.output[0].status == "incomplete"
    assert cut.usage.output_tokens_details.reasoning_tokens == 12


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_call_that_is_required(client, choice):
    options = dict(input="Weather?", tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    response = create(client, **options)
    (call,) = response.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", ARGUMENTS)
    assert call.status == "completed" and call.call_id.startswith("call_") and response.tools[0].name == "get_weather"
    events = stream(client, **options)
    assert json.loads(text_of(events, "function_call_arguments")) == ARGUMENTS and not text_of(events)
    assert without_ids(events[-1].response.output[0]) == without_ids(call)
    formatted = create(client, text={"format": {"type": "json_object"}}, **options)  # of text; instructor sends both
    assert without_ids(formatted.output[0]) == without_ids(call)
    # as agents do: the call and its result are sent back
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items = [{"role": "user", "content": "Weather?"}, call, result]
    assert create(client, input=items, tools=[TOOL], max_output_tokens=5).output_text
    cut = create(client, **options | {"max_output_tokens": 3})
    assert cut.status == "incomplete" and cut.output[0].type == "message"


def test_calls_of_the_models_own_format(client):
    options = dict(input="Weather?", tools=[TOOL], extra_body=CALLS, max_output_tokens=300)
    response = create(client, **options)
    assert [item.type for item in response.output] == ["function_call"] * 2
    assert len({item.call_id for item in response.output}) == len({item.id for item in response.output}) == 2
    events = stream(client, **options)
    assert [without_ids(item) for item in events[-1].response.output] == [without_ids(x) for x in response.output]
    assert len(create(client, parallel_tool_calls=False, **options).output) == 1
    options["extra_body"] = THINKS_AND_CALLS
    for response in (create(client, **options), stream(client, **options)[-1].response):
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        assert [item.status for item in response.output] == ["completed"] * 3


def test_tools_that_are_allowed(client):
    other = TOOL | {"name": "other"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    options = dict(input="Weather?", tools=[other, TOOL], tool_choice=choice, parallel_tool_calls=False)
    assert {item.name for item in create(client, **options).output} == {"get_weather"}
    choice["mode"] = "auto"
    assert create(client, **options).output[0].type == "message"
    assert create(client, input="Weather?", tools=[], tool_choice="auto").output[0].type == "message"
    none = client.responses.create(**GREEDY | options | {"tool_choice": choice | {"tools": [None, 5, {}]}})
    assert none.output[0].type == "message"


# -- text.format -------------------------------------------------------------------------------------------------------


class Answer(pydantic.BaseModel, extra="forbid"):
    city: Literal["Paris", "Rome"]
    sunny: bool


def test_formats(client):
    text = client.responses.parse(input="Weather?", text_format=Answer, **GREEDY)
    assert isinstance(text.output_parsed, Answer)
    with client.responses.stream(input="Weather?", text_format=Answer, **GREEDY) as events:
        for _ in events:
            pass
        assert events.get_final_response().output_parsed == text.output_parsed
    schema = {"type": "json_schema", "name": "answer", "schema": Answer.model_json_schema(), "strict": True}
    response = create(client, input="Weather?", text={"format": schema, "verbosity": "low"})
    assert Answer.model_validate_json(response.output_text) == text.output_parsed
    assert response.text.format.schema_ == schema["schema"]
    plain = create(client, input=QUESTION, text={"format": {"type": "text"}})
    assert plain.output_text == create(client, input=QUESTION).output_text
    extra = {"structured_outputs": {"choice": ["{}"]}}
    assert create(client, input="Weather?", extra_body=extra).output_text == "{}"
    with pytest.raises(openai.BadRequestError, match="text: can't be combined"):
        create(client, input="Weather?", text={"format": schema}, extra_body=extra)
    cut = create(client, input="Weather?", text={"format": {"type": "json_object"}}, max_output_tokens=3)
    assert cut.output_text.lstrip().startswith("{")


# -- the store ---------------------------------------------------------------------------------------------------------


def test_previous_response(client):
    """The items of the conversation go on; the instructions do not."""
    first = create(client, input=SUM, instructions="Be short.", metadata={"a": "b"})
    second = create(client, input="And 2 + 2?", previous_response_id=first.id)
    third = stream(client, input="And 3 + 3?", previous_response_id=second.id)[-1].response
    items = [*QUESTION, *first.output, {"role": "user", "content": "And 2 + 2?"}]
    assert create(client, input=items).output_text == second.output_text
    items += [*second.output, {"role": "user", "content": "And 3 + 3?"}]
    assert create(client, input=items).usage.input_tokens == third.usage.input_tokens
    assert client.responses.retrieve(third.id).output_text == third.output_text
    assert client.responses.retrieve(first.id).metadata == {"a": "b"}


def test_a_call_and_its_output_by_reference(client):
    first = create(client, input="Weather?", tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sunny"}
    second = create(client, input=[result], tools=[TOOL], previous_response_id=first.id, max_output_tokens=5)
    items = [{"role": "user", "content": "Weather?"}, first.output[0], result]
    whole = create(client, input=items, tools=[TOOL], max_output_tokens=5)
    assert second.usage.input_tokens == whole.usage.input_tokens and second.output_text == whole.output_text


def test_stored_or_not(client):
    response = create(client, input="Hi")
    retrieved = Response.model_validate(
        client.responses.with_raw_response.retrieve(response.id).http_response.json(), strict=True
    )
    assert retrieved == response
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(response.id)
    client.responses.delete(response.id)
    missing = create(client, input="Hi", store=False)
    unknown = stream(client, input="Hi", store=False)[-1].response
    for name in (response.id, missing.id, unknown.id, "resp_nothing"):
        for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match=f"Response with id .{name}. not found"):
                call(name)
    with pytest.raises(openai.NotFoundError, match="not found"):
        create(client, input="Hi", previous_response_id=missing.id)


def test_a_stored_response_is_not_replaced(client):
    """A request may name an id, but that of a stored response is the server's own."""
    ids = {create(client, input="Hi", max_output_tokens=1, extra_body={"request_id": "mine"}).id for _ in range(2)}
    assert len(ids) == 2 and "resp_mine" not in ids


def test_a_short_request_with_a_long_conversation_is_prepared_in_a_thread(client, server, monkeypatch):
    threads = []
    conversation = chat.conversation
    monkeypatch.setattr(chat, "conversation", lambda body: threads.append(current_thread()) or conversation(body))
    items = [{"role": "user", "content": "a"}] * openai_api.MAX_MESSAGES_IN_LOOP
    first = create(client, input=items, max_output_tokens=1, truncation="auto")
    create(client, input="b", max_output_tokens=1, truncation="auto", previous_response_id=first.id)
    assert len(threads) == 2 and threads[1] is not server.thread


def test_a_conversation_is_bounded(client, monkeypatch):
    """With truncation its prompt would always fit, and each response would make it longer."""
    monkeypatch.setattr(responses_api, "MAX_CONVERSATION_BYTES", 1000)
    options = dict(input="word " * 150, truncation="auto", max_output_tokens=1)
    first = create(client, **options)
    with pytest.raises(openai.BadRequestError, match="has more than 1000 bytes") as caught:
        create(client, previous_response_id=first.id, **options)
    assert caught.value.param == "previous_response_id"


def test_the_store_is_bounded():
    store = ResponseStore(max_number=3, max_bytes=100)
    for name in "abc":
        store.add(name, b"1234", b"12")
    store.get("a")
    store.add("d", b"", b"")
    with pytest.raises(ApiError, match="'b'"):  # the least recently used
        store.get("b")
    assert store.get("a") == (b"1234", b"12")
    store.remove("c")
    store.add("e", b"1" * 50, b"2" * 45)  # 101 bytes with "a"
    assert [*store._entries] == ["e"]
    store.add("f", b"1" * 101, b"")  # too long by itself
    assert not store._entries and store._num_bytes == 0


# -- errors ------------------------------------------------------------------------------------------------------------


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.responses.create(model="gpt-4", input="Hi")


def test_an_error_within_a_stream_is_a_failed_response(client, monkeypatch):
    def take(self):
        raise TimeoutError

    monkeypatch.setattr(ResponsesAnswer, "take", take)
    *_, last = client.responses.create(input="Hi", stream=True, **GREEDY)
    last = EVENT.validate_python(last.model_dump(), strict=False)
    assert (last.type, last.response.status, last.sequence_number) == ("response.failed", "failed", 2)
    assert (
        last.response.error.code == "server_error" and "longer than this server allows" in last.response.error.message
    )


def test_a_client_that_goes_away(client, server):
    with client.responses.create(input="Hi", stream=True, model=MODEL, extra_body={"ignore_eos": True}) as events:
        next(iter(events))
    server.wait_until_free()
