"""Reasoning as a state of the engine: grammars, stop strings and budgets begin and end where the reasoning does.

How the text of an answer is split is in test_tool_parsers.py.
"""

import json
from contextlib import ExitStack, contextmanager

import pytest
from common import scripted_model

from nanovllm import LLM, SamplingParams
from nanovllm.engine.features import FEATURES, Feature, StepFeature
from nanovllm.engine.outputs import OutputKind
from nanovllm.requests import input_processor
from nanovllm.serve.replicas.messages import NewRequest, decode_requests, encode_requests
from nanovllm.serve.replicas.replica import Replica

pytest.importorskip("llguidance")
httpx = pytest.importorskip("httpx")

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENED = PLAIN.replace("assistant\n{%", "assistant\n<think>\n{%")
CLOSED = PLAIN.replace("assistant\n{%", "assistant\n<think>\n\n</think>\n{%")
THOUGHT = ["Let me think", " about {", " more", "</think>"]
ANSWER = ['{"n": ', "7}", " tail"]
CONVERSATION = [{"role": "user", "content": "q"}]
JSON = {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}
SHOWN = dict(temperature=0, max_tokens=30, reasoning_parser="qwen3", skip_special_tokens=False)
ENGINES = {
    "plain": {},
    "synchronous": {"async_scheduling": False},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 2},
    "preemption": {"num_kvcache_blocks": 9, "kvcache_block_size": 16},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reasoning")
    return {
        "opened": scripted_model(folder / "opened", [*THOUGHT, *ANSWER], OPENED),
        "tokens": scripted_model(folder / "tokens", [*THOUGHT, *ANSWER], OPENED, special=["<think>", "</think>"]),
        "opens": scripted_model(folder / "opens", ["<think>", *THOUGHT, *ANSWER], PLAIN),
        "closed": scripted_model(folder / "closed", ANSWER, CLOSED),
        "answers": scripted_model(folder / "answers", ANSWER, PLAIN, special=["<think>"]),
        "ends": scripted_model(folder / "ends", ["Let me think"], OPENED, special=["<think>", "</think>"]),
    }


def answers(llm: LLM, num_prompts: int = 1, **params) -> list[tuple[str, str | None, int | str | None]]:
    """Text, finish reason and stop reason of each answer."""
    params = SamplingParams(**SHOWN | params)
    outputs = llm.chat([CONVERSATION] * num_prompts, params, use_tqdm=False)
    return [(x.text, x.finish_reason, x.stop_reason) for output in outputs for x in output.outputs]


def engine(folder: str, **settings) -> LLM:
    return LLM(folder, **{"num_kvcache_blocks": 16, "max_model_len": 128} | settings)


@pytest.mark.parametrize("settings", ENGINES.values(), ids=ENGINES)
def test_the_answer_follows_the_grammar_and_the_reasoning_does_not(folders, settings):
    thought = "".join(THOUGHT)
    with engine(folders["opened"], **settings) as llm:
        expected = thought + '{"n": 7}', "stop", None
        assert answers(llm, 5, structured_outputs=JSON) == [expected] * 5
        assert answers(llm, structured_outputs=JSON, n=4) == [expected] * 4
        assert answers(llm, structured_outputs={"regex": "[0-9]"}, reasoning_parser=None)[0][0] in {*"0123456789"}
        both = [SamplingParams(**SHOWN | {"structured_outputs": JSON, "reasoning_parser": x}) for x in ("qwen3", None)]
        first, second = llm.chat([CONVERSATION] * 2, both, use_tqdm=False)
        assert first.outputs[0].text == expected[0] and second.outputs[0].text.startswith('{"n":')


@pytest.mark.parametrize("name", ["tokens", "opens", "closed", "answers"])
def test_where_the_reasoning_begins(folders, name):
    """In the prompt, or with the first token, or not at all, as the prompt has closed it or the model has none."""
    begin = {"tokens": "".join(THOUGHT), "opens": "<think>" + "".join(THOUGHT)}.get(name, "")
    with engine(folders[name]) as llm:
        assert answers(llm, structured_outputs=JSON) == [(begin + '{"n": 7}', "stop", None)]
        # nor may an answer without reasoning be anything else
        assert answers(llm, structured_outputs={"regex": "[0-9]"})[0][0][len(begin) :] in {*"0123456789"}


def test_an_answer_can_not_end_within_its_reasoning(folders):
    """If a grammar follows; what ends by itself has its form."""
    with engine(folders["ends"]) as llm:
        assert answers(llm) == [("Let me think", "stop", None)]
        ((text, reason, _),) = answers(llm, structured_outputs={"choice": ["yes", "no"]})
        assert text.startswith("Let me think") and reason == "length"
        ((text, reason, _),) = answers(llm, structured_outputs={"choice": ["yes", "no"]}, thinking_token_budget=3)
        assert text.startswith("Let me think") and text.partition("</think>")[2] in ("yes", "no") and reason == "stop"


@pytest.mark.parametrize("settings", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("name", ["opened", "tokens"])
def test_budget(folders, settings, name):
    with engine(folders[name], **settings) as llm:
        tail = "</think>" + "".join(ANSWER)
        for budget in range(5):
            text = "".join(THOUGHT[: min(budget, 3)]) + tail
            assert answers(llm, 3, thinking_token_budget=budget) == [(text, "stop", None)] * 3
        assert answers(llm, thinking_token_budget=-1) == [("".join(THOUGHT[:3]) + tail, "stop", None)]
        text = THOUGHT[0] + '</think>{"n": 7}'
        assert answers(llm, 3, thinking_token_budget=1, structured_outputs=JSON) == [(text, "stop", None)] * 3
        assert answers(llm, 3, thinking_token_budget=2, max_tokens=2) == [("".join(THOUGHT[:2]), "length", None)] * 3


def test_budget_of_a_reasoning_that_the_answer_opens(folders):
    with engine(folders["opens"]) as llm:
        for budget in range(3):
            text = "<think>" + "".join(THOUGHT[:budget]) + "</think>" + "".join(ANSWER)
            assert answers(llm, thinking_token_budget=budget) == [(text, "stop", None)]
    with engine(folders["answers"]) as llm:
        assert answers(llm, thinking_token_budget=0) == [("".join(ANSWER), "stop", None)]


def test_budget_needs_a_format(folders):
    match = "thinking_token_budget=5: needs a reasoning_parser"
    with engine(folders["opened"]) as llm, pytest.raises(ValueError, match=match):
        answers(llm, thinking_token_budget=5, reasoning_parser=None)
    with pytest.raises(ValueError, match="reasoning_parser='x': must be one of"):
        SamplingParams(reasoning_parser="x")


def test_a_budget_leaves_waiting_to_others(folders, monkeypatch):
    """Alone, a budget waits for no token; a sequence for which another feature waits goes on waiting."""

    class Waits(StepFeature):
        @classmethod
        def attach(cls, request, processor):
            for seq in request.group:
                seq.waits_for_token = seq.params.max_tokens == 7

    monkeypatch.setattr(input_processor, "FEATURES", {"waits": Feature(Waits, {"max_tokens": 16}), **FEATURES})
    with engine(folders["opened"]) as llm:
        for max_tokens in (7, 8):
            params = SamplingParams(reasoning_parser="qwen3", thinking_token_budget=2, max_tokens=max_tokens)
            (request,) = llm.input_processor.requests("q", params, OutputKind.FINAL_ONLY)
            assert request.group[0].waits_for_token == (max_tokens == 7)


@pytest.mark.parametrize("settings", ENGINES.values(), ids=ENGINES)
def test_stop_strings_end_the_answer_alone(folders, settings):
    thought = "".join(THOUGHT)
    with engine(folders["opened"], **settings) as llm:
        assert answers(llm, 3, stop=["think"]) == [(thought + "".join(ANSWER), "stop", None)] * 3
        assert answers(llm, 3, stop=["7", "more"]) == [(thought + '{"n": ', "stop", "7")] * 3
        assert answers(llm, stop=["7"], include_stop_str_in_output=True) == [(thought + '{"n": 7', "stop", "7")]
        # one that would begin in the reasoning
        assert answers(llm, stop=['</think>{"n']) == [(thought + "".join(ANSWER), "stop", None)]
        assert answers(llm, stop=["think"], reasoning_parser=None) == [("Let me ", "stop", "think")]


@contextmanager
def replica_of(llm: LLM):
    replica = Replica()
    replica.attach(llm)
    try:
        yield replica
    finally:
        replica.close()


@pytest.mark.parametrize(
    "params", [dict(structured_outputs=JSON), dict(thinking_token_budget=2), dict(stop=["7", "more"])]
)
def test_a_replica_goes_on_where_another_was(folders, params):
    with engine(folders["tokens"]) as llm, replica_of(llm) as replica:
        params = SamplingParams(temperature=0, max_tokens=30, reasoning_parser="qwen3", **params)
        (output,) = llm.chat([CONVERSATION], params, use_tqdm=False)
        token_ids = output.outputs[0].token_ids
        for i in range(len(token_ids)):
            ids, kind = output.prompt_token_ids, OutputKind.FINAL_ONLY
            new = NewRequest(1000 + i, 0, ids, params, 0, kind, [0], [token_ids[:i]])
            (decoded,) = decode_requests(encode_requests([new]))
            assert decoded.params == params
            replica.submit(encode_requests([new]))
            report = next(report for report in replica.new_reports() if report.finals or report.errors)
            assert not report.errors and report.finals[0].answers[0].token_ids == token_ids
            assert report.finals[0].answers[0].finish_reason == output.outputs[0].finish_reason


def test_messages_of_fronts_have_the_parameters():
    pytest.importorskip("msgspec")
    from nanovllm.serve.fronts.channel import decode_request, encode_request

    params = SamplingParams(reasoning_parser="mistral", thinking_token_budget=7, stop="x")
    new = NewRequest(1, 0, [1], params, 0, OutputKind.DELTA, [0], [[]])
    assert decode_request(encode_request(new)[1]).params == params


# -- the server --------------------------------------------------------------------------------------------------------

TOOL = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
}
CALLED = ['[{"name": "add"', ', "parameters": {"n": 7}}]']


@pytest.fixture(scope="module")
def servers(folders, tmp_path_factory):
    """URLs of servers: of a model that answers with JSON, with a list of calls, and with a call of its own format."""
    test_server = pytest.importorskip("test_server")
    folder, template = tmp_path_factory.mktemp("calls"), "{% if tools %}<tool_call>{% endif %}" + OPENED
    own = [*THOUGHT, "\n\nOk. ", '<tool_call>{"name": "add", ', '"arguments": {"n": 7}}</tool_call>']
    folders = folders | {
        "calls": scripted_model(folder / "calls", [*THOUGHT, *CALLED], template),
        "own": scripted_model(folder / "own", own, template),
        "between": scripted_model(
            folder / "between",
            ["</think>", "First:", own[-2], own[-1] + "\nNext:", own[-2] + " ", own[-1] + " Done"],
            template,
        ),
        "special": scripted_model(
            folder / "special", ["Hm", "[/THINK]", "Yes"], OPENED.replace("<think>", "[THINK]"), ["[/THINK]"]
        ),
    }
    urls = {}
    with ExitStack() as stack:
        for name in ("opened", "calls", "own", "between", "special"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(test_server, "FOLDER", folders[name])
                urls[name] = stack.enter_context(test_server.running()).url
        yield urls


@pytest.fixture
def post(servers):
    """(reasoning, content, calls, number of tokens of the reasoning) of an answer: whole, and streamed."""

    def post(name: str, path: str, **fields):
        prompt = {"input": "q"} if path == "/v1/responses" else {"messages": CONVERSATION}
        length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        body = prompt | {length: 60, "temperature": 0} | fields
        found = whole_and_streamed(servers[name], path, body)
        assert found[0] == found[1]
        return found[0]

    return post


def of_chat(answer) -> tuple:
    if isinstance(answer, dict):
        parts = [choice["message"] for choice in answer["choices"]]
    else:
        parts = [choice["delta"] for chunk in answer for choice in chunk["choices"]]
    calls = [call["function"] for part in parts for call in part.get("tool_calls") or ()]
    texts = ["".join([part.get(name) or "" for part in parts]) for name in ("reasoning", "content")]
    return *texts, [(call["name"], json.loads(call["arguments"])) for call in calls]


def of_responses(answer) -> tuple:
    response = answer if isinstance(answer, dict) else answer[-1]["response"]
    texts = {"reasoning": "", "message": ""}
    for item in response["output"]:
        if item["type"] in texts:
            texts[item["type"]] += item["content"][0]["text"]
    calls = [(x["name"], json.loads(x["arguments"])) for x in response["output"] if x["type"] == "function_call"]
    num_tokens = response["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert num_tokens == (len(THOUGHT) if texts["reasoning"] else 0)
    return *texts.values(), calls


def of_messages(answer) -> tuple:
    if isinstance(answer, dict):
        blocks = answer["content"]
    else:
        blocks = [event["content_block"] for event in answer if event["type"] == "content_block_start"]
        for event in answer:
            if event["type"] == "content_block_delta":
                block = blocks[event["index"]]
                for name, text in event["delta"].items():
                    block[name] = text if name in ("type", "signature") else block.get(name, "") + text
    texts = ["".join([block.get(name, "") for block in blocks]) for name in ("thinking", "text")]
    calls = [block for block in blocks if "name" in block]
    return *texts, [(x["name"], json.loads(x.get("partial_json", "null")) or x["input"]) for x in calls]


READERS = {"/v1/chat/completions": of_chat, "/v1/responses": of_responses, "/v1/messages": of_messages}


def whole_and_streamed(url: str, path: str, body: dict) -> list[tuple]:
    """What READERS find in the answer to a body, sent as a whole and streamed."""
    found = []
    for stream in (False, True):
        answer = httpx.post(url + path, json=body | {"stream": stream}, timeout=30)
        assert answer.status_code == 200, answer.text
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        found.append(READERS[path](answer.json() if not stream else [json.loads(x) for x in events]))
    return found


THOUGHTS = "".join(THOUGHT[:-1])


def test_json_is_the_content(post):
    schema = JSON["json"]
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    expected = (THOUGHTS, '{"n": 7}', [])
    assert post("opened", "/v1/chat/completions", response_format=wanted) == expected
    assert post("opened", "/v1/chat/completions", response_format=wanted, include_reasoning=False) == (
        "",
        *expected[1:],
    )
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    assert post("opened", "/v1/responses", text=text) == expected
    assert (
        post("opened", "/v1/messages", output_config={"format": {"type": "json_schema", "schema": schema}}) == expected
    )


def test_forced_calls_are_calls(post):
    expected = (THOUGHTS, "", [("add", {"n": 7})])
    tools, function = [{"type": "function", "function": TOOL}], {"type": "function", "function": {"name": "add"}}
    assert post("calls", "/v1/chat/completions", tools=tools, tool_choice="required") == expected
    assert post("opened", "/v1/chat/completions", tools=tools, tool_choice=function) == expected
    named = [{"type": "function", **TOOL}]
    assert post("calls", "/v1/responses", tools=named, tool_choice="required") == expected
    choice = {"type": "function", "name": "add"}
    assert post("opened", "/v1/responses", tools=named, tool_choice=choice) == expected
    inputs = [{"name": "add", "input_schema": TOOL["parameters"]}]
    assert post("calls", "/v1/messages", tools=inputs, tool_choice={"type": "any"}) == expected
    assert post("opened", "/v1/messages", tools=inputs, tool_choice={"type": "tool", "name": "add"}) == expected


def test_calls_of_the_models_own_format(post):
    expected = (THOUGHTS, "Ok. ", [("add", {"n": 7})])
    assert post("own", "/v1/chat/completions", tools=[{"type": "function", "function": TOOL}]) == expected
    assert post("own", "/v1/responses", tools=[{"type": "function", **TOOL}]) == expected
    assert post("own", "/v1/messages", tools=[{"name": "add", "input_schema": TOOL["parameters"]}]) == expected


def test_functions_are_the_older_form_of_tools(servers):
    body = {"messages": CONVERSATION, "temperature": 0, "functions": [TOOL]}
    answer = httpx.post(servers["own"] + "/v1/chat/completions", json=body).json()
    call = {"name": "add", "arguments": '{"n": 7}'}
    assert answer["choices"][0]["message"]["function_call"] == call
    assert answer["choices"][0]["finish_reason"] == "function_call"


def test_texts_between_calls_stay_there(servers):
    """In each API that has an order, whole and streamed."""
    url, expected = servers["between"], ["First:", "add", "\nNext:", "add", " Done"]
    body = {"messages": CONVERSATION, "max_tokens": 60, "temperature": 0}
    body["tools"] = [{"name": "add", "input_schema": TOOL["parameters"]}]
    answer = httpx.post(url + "/v1/messages", json=body).json()
    assert [block.get("text") or block["name"] for block in answer["content"]] == expected
    found, events = [], httpx.post(url + "/v1/messages", json=body | {"stream": True}).text.splitlines()
    for event in [json.loads(line.removeprefix("data: ")) for line in events if line.startswith("data: {")]:
        if event["type"] == "content_block_start":
            found.append(event["content_block"].get("name", ""))
        found[-1:] = [x + event.get("delta", {}).get("text", "") for x in found[-1:]]
    assert found == expected
    body = {"input": "q", "temperature": 0, "tools": [{"type": "function", **TOOL}]}
    answers = [httpx.post(url + "/v1/responses", json=body).json()]
    events = httpx.post(url + "/v1/responses", json=body | {"stream": True}).text.strip().splitlines()
    answers.append(json.loads(events[-1].removeprefix("data: "))["response"])
    for answer in answers:
        assert [x["name"] if "name" in x else x["content"][0]["text"] for x in answer["output"]] == expected


def test_stops_and_budgets(post):
    chat = "/v1/chat/completions"
    assert post("opened", chat, stop=["think", "}"]) == (THOUGHTS, '{"n": 7', [])
    assert post("opened", "/v1/messages", stop_sequences=["think", "}"]) == (THOUGHTS, '{"n": 7', [])
    assert post("opened", chat, thinking_token_budget=1) == (THOUGHT[0], "".join(ANSWER), [])
    thinking = {"type": "enabled", "budget_tokens": 2}
    assert post("opened", "/v1/messages", thinking=thinking) == ("".join(THOUGHT[:2]), "".join(ANSWER), [])
    assert post("opened", chat, max_tokens=2) == ("".join(THOUGHT[:2]), "", [])


def test_markers_that_are_special_tokens_are_seen(post):
    assert post("special", "/v1/chat/completions") == ("Hm", "Yes", [])
    assert post("special", "/v1/chat/completions", stop=["m"]) == ("Hm", "Yes", [])


def test_budget_of_a_model_that_does_not_reason(servers):
    test_server = pytest.importorskip("test_server")
    with test_server.running() as server:
        body = {"messages": CONVERSATION, "max_tokens": 2}
        answer = httpx.post(server.url + "/v1/chat/completions", json=body | {"thinking_token_budget": 5})
        assert answer.status_code == 400 and "thinking_token_budget=5" in answer.text
        thinking = {"type": "enabled", "budget_tokens": 5}  # clients send it to any model
        assert httpx.post(server.url + "/v1/messages", json=body | {"thinking": thinking}).status_code == 200


@pytest.mark.parametrize(
    "template, log",
    [
        (OPENED, "tool calls none (requests with `tools` are refused); reasoning think"),
        ("{% if tools %}<tool_call>{% endif %}" + PLAIN, "tool calls hermes; reasoning none"),
        ("{% if tools %}{{ tools }}{% endif %}" + PLAIN, "tools, in a format that is unknown"),
        ("{{ enable_thinking }}" + PLAIN, "reasoning, in a format that is unknown"),
    ],
)
def test_the_log_says_which_formats(folders, caplog, template, log):
    pytest.importorskip("fastapi")
    from nanovllm.serve.answer_formats import find_formats
    from nanovllm.serve.settings import ServerSettings

    with engine(folders["opened"]) as llm, caplog.at_level("INFO", "nanovllm"):
        llm.tokenizer.chat_template = template
        find_formats(llm.input_processor, ServerSettings())
    assert log in caplog.text
