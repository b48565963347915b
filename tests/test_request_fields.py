"""Fields that clients of OpenAI and vLLM send: which have an effect, which mean nothing, and which are refused."""

import json
import logging
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import pytest
from common import CharacterTokenizer
from programs import Program
from test_server import GREEDY, MODEL, PROMPT, QUESTION, TOOL, expected, offline, running, use_small_model, wait_for

from nanovllm import BeamSearchParams, SamplingParams
from nanovllm.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm.requests.prompts import render_chat
from nanovllm.requests.stream_event import StreamEvent
from nanovllm.serve import template_sandbox
from nanovllm.serve.answer_formats import Formats
from nanovllm.serve.chat import ChatAnswer
from nanovllm.serve.prompt_lanes import tokenized
from nanovllm.serve.protocol import IGNORED, ChatBody, CompletionBody, GenerationBody, IgnoredFields
from nanovllm.serve.template_sandbox import TemplateSandbox

httpx = pytest.importorskip("httpx")
__all__ = ["offline", "use_small_model"]  # fixtures

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BASE = {CHAT: {"messages": QUESTION}, TEXT: {"prompt": PROMPT}}
HELLO = [*QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "Well, "}]}]
CONTINUED = dict(messages=HELLO, add_generation_prompt=False, continue_final_message=True)
TEMPLATE = "{{ reasoning_effort }} {{ enable_thinking }} {{ documents[0].title }} {{ tools[0].function.name }}"


@pytest.fixture(scope="module")
def server():
    with running(trust_request_chat_template=True, tool_call_parser="hermes") as server:
        yield server


@pytest.fixture(scope="module")
def post(server):
    with httpx.Client(base_url=server.url, timeout=20) as http:
        headers = {"content-type": "application/json"}
        yield lambda path, body: http.post(path, content=json.dumps(GREEDY | BASE[path] | body), headers=headers)


def chunks(answer) -> list[dict]:
    events = answer.text.split("\n\n")
    assert answer.status_code == 200 and events[-2:] == ["data: [DONE]", ""], answer.text
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


MEANINGLESS = {
    "prompt_cache_key": ["k"],
    "prompt_cache_retention": ["24h"],
    "user": ["me"],
    "metadata": [{"a": "b"}],
    "spaces_between_special_tokens": [True, False],
    "chat_template": [None],
    "add_special_tokens": [False, None],
    "truncate_prompt_tokens": [None, -1, 100],
    "truncation_side": ["left", "right"],
    "cache_salt": [None],
    "thinking_token_budget": [None, -1],
    "logprob_token_ids": [None, []],
    "use_beam_search": [None, False],
    "length_penalty": [None, 1.0, 2.0],  # of a beam search
    "n": [None, 1],
    "priority": [None, 0],
    "seed": [None, -1],
    "stream_options": [None],
}
MEANINGLESS_IN = {
    CHAT: {
        "verbosity": ["low"],
        "modalities": [["text"]],
        "audio": [None],
        "reasoning_effort": ["none", "high", "max"],
        "include_reasoning": [True, False, None],
        "echo": [True, False],  # the last message is not the assistant's
        "parallel_tool_calls": [None, True],
        "tool_choice": [None, "none"],
        "future_field": [{"a": [1]}],
    },
    TEXT: {"suffix": [None, ""], "best_of": [None, 1], "future_field": [5]},
}


@pytest.mark.parametrize("path", BASE)
@pytest.mark.parametrize("index", range(3))  # of the values, which at least one field has three of
def test_values_that_mean_nothing(post, offline, path, index):
    """All fields in one request. An answer that differs does not say whose fault it is; most errors do."""
    fields_of_path = MEANINGLESS | MEANINGLESS_IN[path]
    assert max(map(len, fields_of_path.values())) == 3
    answer = post(path, {name: values[index % len(values)] for name, values in fields_of_path.items()})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    text = expected(offline, QUESTION if path == CHAT else PROMPT).text
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == text


def test_every_sampling_parameter_is_a_field():
    """Else a body with it would be answered as if it were not there.

    What `detokenize` leaves out is the answer, and the `reasoning_parser` is the server's.
    """
    names = {field.name for field in fields(SamplingParams)} - {"detokenize", "reasoning_parser"}
    missing = names - GenerationBody.model_fields.keys()
    assert not missing, f"add {missing} to GenerationBody of serve/protocol.py"


def total(ignored: IgnoredFields) -> float:
    (metric,) = ignored.count.collect()
    return next(sample.value for sample in metric.samples if sample.name.endswith("_total"))


def test_unknown_fields_anywhere(post, server, caplog, monkeypatch):
    """They are ignored in all parts of a body; those of the body are counted, and logged once for each name."""
    monkeypatch.setattr(IGNORED, "_logged", set())  # another test may have logged as many as are logged
    before = total(IGNORED)
    body = {
        "stream": True,
        "stream_options": {"include_usage": True, "x": 1},
        "response_format": {"type": "json_object", "x": 1},
        "tools": [TOOL | {"x": 1, "function": TOOL["function"] | {"x": 1}}],
        "tool_choice": "none",
        "messages": [QUESTION[0] | {"x": 1}],
        "unknown_a": 1,
        "unknown_b\ud800": {"x": 1},
    }
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert chunks(post(CHAT, body))
    assert [text.count("unknown_a") for text in caplog.messages] == [1] and "unknown_b" in caplog.messages[0]
    assert total(IGNORED) == before + 6
    assert f"nanovllm:ignored_request_fields_total {total(IGNORED):.1f}" in httpx.get(f"{server.url}/metrics").text


def test_bodies_of_many_unknown_fields(caplog):
    fields = {f"k{i}": "x" for i in range(200_000)}
    start = time.process_time()
    CompletionBody.model_validate({"prompt": "x"} | fields)
    assert time.process_time() - start < 1.0
    ignored = IgnoredFields()
    for _ in range(2):
        ignored.add(fields.keys())
    ignored.add({"y" * 10_000: 1}.keys())
    assert total(ignored) == 400_001 and len(ignored._logged) == 100
    assert all(len(record.getMessage()) < 5_000 for record in caplog.records)


# -- fields with an effect ---------------------------------------------------------------------------------------------


def test_token_ids(post, offline):
    for path, prompt in ((CHAT, QUESTION), (TEXT, PROMPT)):
        output, body = expected(offline, prompt), {"return_token_ids": True, "request_id": "mine"}
        answer = post(path, body).json()
        choice, prompt_owner = answer["choices"][0], answer if path == CHAT else answer["choices"][0]
        assert choice["token_ids"] == output.token_ids
        assert prompt_owner["prompt_token_ids"] == output.prompt_token_ids
        assert answer["id"].removeprefix("chat") == "cmpl-mine"
        streamed = chunks(post(path, body | {"stream": True}))
        assert [i for chunk in streamed for i in chunk["choices"][0].get("token_ids", ())] == output.token_ids
        first, *rest = [chunk if path == CHAT else chunk["choices"][0] for chunk in streamed]
        assert first["prompt_token_ids"] == output.prompt_token_ids
        assert not any("prompt_token_ids" in entry for entry in rest)
        answer = post(path, {}).json()
        entries = answer | answer["choices"][0]  # clients read these as attributes
        assert entries["token_ids"] is entries["prompt_token_ids"] is entries["prompt_logprobs"] is None


def test_prompt_logprobs(post, offline):
    for path, prompt in ((CHAT, QUESTION), (TEXT, PROMPT)):
        wanted = expected(offline, prompt, prompt_logprobs=2).prompt_logprobs
        answer = post(path, {"prompt_logprobs": 2}).json()
        found = (answer if path == CHAT else answer["choices"][0])["prompt_logprobs"]
        assert found[0] is wanted[0] is None and len(found) == len(wanted)
        for entries, logprobs in zip(found[1:], wanted[1:]):
            assert {int(i) for i in entries} == {*logprobs}
            for i, entry in entries.items():
                assert entry["rank"] == logprobs[int(i)].rank
                assert entry["decoded_token"] == logprobs[int(i)].decoded_token
                assert entry["logprob"] == pytest.approx(logprobs[int(i)].logprob)
        error = post(path, {"prompt_logprobs": 2, "stream": True}).json()["error"]
        assert error["param"] == "prompt_logprobs"
    choice = post(TEXT, {"prompt_logprobs": 1, "logprobs": 1, "max_tokens": 2}).json()["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 2  # without `echo`, those of the answer alone


def fields_of_logprobs(num_top: int) -> list[tuple[str, str, dict]]:
    """(path, field, body) for each field that says how many log-probabilities a token has."""
    common, included = {"max_tokens": 1}, {"include": ["message.output_text.logprobs"], "max_output_tokens": 1}
    return [
        (TEXT, "logprobs", common | {"prompt": PROMPT, "logprobs": num_top}),
        (TEXT, "prompt_logprobs", common | {"prompt": PROMPT, "prompt_logprobs": num_top}),
        (TEXT, "logprobs", common | {"prompt": PROMPT, "logprobs": num_top, "echo": True}),
        (CHAT, "top_logprobs", common | {"messages": QUESTION, "logprobs": True, "top_logprobs": num_top}),
        (CHAT, "prompt_logprobs", common | {"messages": QUESTION, "prompt_logprobs": num_top}),
        ("/v1/responses", "top_logprobs", included | {"input": "x", "top_logprobs": num_top}),
    ]


@pytest.mark.parametrize("most", [3, 30, -1])
def test_the_bound_of_log_probabilities_is_the_engines(most):
    """Everywhere; -1 is no bound, and as a request's number all tokens."""
    with running(dict(max_logprobs=most)) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        for path, _, body in fields_of_logprobs(200 if most < 0 else most):
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
        for path, field, body in fields_of_logprobs(-1 if most < 0 else most + 1):
            answer = http.post(path, json=body)
            if most < 0:
                assert answer.status_code == 200, answer.text
                continue
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field)
            assert error["message"].startswith(f"{field}={most + 1}: must be at most max_logprobs={most}")
        if most == -1:
            body = {"messages": QUESTION, "logprobs": True, "top_logprobs": -1, "max_tokens": 2}
            entries = http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
            assert [len(entry["top_logprobs"]) for entry in entries] == [2048] * 2
            choices = [x for chunk in chunks(http.post(CHAT, json=body | {"stream": True})) for x in chunk["choices"]]
            found = [entry for choice in choices if choice.get("logprobs") for entry in choice["logprobs"]["content"]]
            assert [len(entry["top_logprobs"]) for entry in found] == [2048] * 2
        error = http.post("/v1/responses", json={"input": "x", "top_logprobs": 10**9}).json()["error"]
        assert error["param"] == "top_logprobs"  # though no log-probabilities are included


def test_tokens_as_token_ids(post, offline):
    names = [f"token_id:{i}" for i in expected(offline, PROMPT).token_ids]
    options = {"return_tokens_as_token_ids": True, "logprobs": 1}
    logprobs = post(TEXT, options).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == names and all(name in top for name, top in zip(names, logprobs["top_logprobs"]))
    names = [f"token_id:{i}" for i in expected(offline, QUESTION).token_ids]
    options |= {"logprobs": True, "top_logprobs": 1}
    content = post(CHAT, options).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == names
    assert [entry["top_logprobs"][0]["token"] for entry in content] == names


def test_echo_of_a_message(post):
    plain = post(CHAT, CONTINUED).json()["choices"][0]["message"]["content"]
    for stream in (False, True):
        answer = post(CHAT, CONTINUED | {"echo": True, "stream": stream})
        if stream:
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks(answer))
        else:
            text = answer.json()["choices"][0]["message"]["content"]
        assert text == f"Well, {plain}"


def test_truncated_prompts(post, offline):
    """Also of a prompt that is too long for the model."""
    ids = offline.tokenizer.encode(PROMPT)
    for prompt in (PROMPT, ids):
        for side, kept in (("left", ids[-4:]), ("right", ids[:4])):
            options = {"prompt": prompt, "truncate_prompt_tokens": 4, "truncation_side": side, "echo": True}
            choice = post(TEXT, options | {"return_token_ids": True}).json()["choices"][0]
            assert choice["prompt_token_ids"] == kept
            text = offline.tokenizer.decode(kept)
            assert choice["text"] == text + expected(offline, kept).text
    message = [{"role": "user", "content": "one two three " * 1500}]
    usage = post(CHAT, {"messages": message, "truncate_prompt_tokens": -1}).json()["usage"]
    assert usage["prompt_tokens"] == 2048 - GREEDY["max_tokens"]


@pytest.mark.parametrize("penalty", [None, 0.0, 3.0])
def test_beam_search(server, post, offline, penalty):
    body = {"use_beam_search": True, "n": 3, "length_penalty": penalty, "max_tokens": 6}
    params = BeamSearchParams(3, 6, 1.0 if penalty is None else penalty)
    prompts = [PROMPT, "ROMEO.\n"]
    wanted = [beam for output in offline.beam_search(prompts, params) for beam in output.outputs]
    answer = post(TEXT, body | {"prompt": prompts, "echo": False, "return_token_ids": True}).json()
    assert [choice["index"] for choice in answer["choices"]] == [*range(6)]
    assert [choice["token_ids"] for choice in answer["choices"]] == [beam.token_ids for beam in wanted]
    assert [choice["text"] for choice in answer["choices"]] == [beam.text for beam in wanted]
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"length", "stop"}
    assert answer["usage"]["completion_tokens"] == sum(len(beam.token_ids) for beam in wanted)
    wanted = offline.beam_search([QUESTION], params)[0].outputs
    texts = [choice["message"]["content"] for choice in post(CHAT, body).json()["choices"]]
    assert texts == [beam.text for beam in wanted]
    for other in ({"stream": True}, {"stop": "x"}, {"structured_outputs": {"regex": "a"}}, {"cache_salt": "x"}):
        error = post(TEXT, body | other).json()["error"]
        assert error["param"] == "use_beam_search" and next(iter(other)) in error["message"]
    server.wait_until_free()


def test_cache_salt(post):
    """Only requests with the same salt find each other's blocks."""
    body = {"prompt": "Of salted prompts, " * 20, "n": 2, "temperature": 1.0}
    for salt, is_found in (("a", False), ("a", True), ("b", False), (None, False), (None, True), ("a", True)):
        details = post(TEXT, body | {"cache_salt": salt}).json()["usage"]["prompt_tokens_details"]
        assert (details["cached_tokens"] > 0) is is_found, salt


def test_what_replicas_do_not_have(server, post, monkeypatch):
    monkeypatch.setattr(server.llm, "has_one_engine", False)
    assert post(TEXT, {"use_beam_search": True}).json()["error"]["param"] == "use_beam_search"


def test_special_tokens(offline):
    """The tokenizer here adds one, which that of the bundled model does not."""

    def encode(text, add_special_tokens=True):
        return [7] * add_special_tokens + offline.tokenizer.encode(text)

    own = offline.tokenizer
    templates = dict(apply_chat_template=own.apply_chat_template, get_chat_template=own.get_chat_template)
    fake = SimpleNamespace(encode=encode, decode=own.decode, **templates)
    lane = SimpleNamespace(tokenizer=fake, tokenizer_lock=threading.RLock(), max_model_len=100)
    lane.encode = encode
    plain = offline.tokenizer.encode(PROMPT)
    for adds, ids in ((None, [7, *plain]), (True, [7, *plain]), (False, plain)):
        body = CompletionBody(prompt=PROMPT, add_special_tokens=adds)
        assert tokenized(body, PROMPT, None, None, lane) == {"prompt_token_ids": ids, "prompt": PROMPT}
    for adds, num in ((None, 0), (False, 0), (True, 1)):
        ids = tokenized(ChatBody(messages=QUESTION, add_special_tokens=adds), QUESTION, {}, None, lane)
        assert ids["prompt_token_ids"][:num] == [7] * num and ids["prompt_token_ids"][num] != 7


def test_arguments_of_the_template(post, offline):
    body = {
        "chat_template": TEMPLATE,
        "reasoning_effort": "none",
        "documents": [{"title": "d1"}],
        "functions": [TOOL["function"]],
        "return_token_ids": True,
    }
    for change, text in [
        ({}, "none False d1 get_weather"),
        ({"reasoning_effort": "low"}, "low True d1 get_weather"),
        ({"chat_template_kwargs": {"enable_thinking": 5}}, "none 5 d1 get_weather"),
    ]:
        assert offline.tokenizer.decode(post(CHAT, body | change).json()["prompt_token_ids"]) == text


def test_templates_of_clients_are_programs(offline):
    with running() as server:
        url, body = server.url + CHAT, GREEDY | {"messages": QUESTION}
        error = httpx.post(url, json=body | {"chat_template": TEMPLATE}).json()["error"]
        assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]
        same = httpx.post(url, json=body | {"chat_template": offline.tokenizer.chat_template}).json()
        assert same["choices"][0]["message"]["content"] == expected(offline, QUESTION).text


HUGE_TEXTS = [
    "{{ 'a' * 10**10 }}",
    "{{ ('a' * 10**5) * 10**5 }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ 'a'.ljust(10**10) }}{{ 'a'.center(10**10) }}{{ '1'.zfill(10**10) }}",
    "{% set x = 'a' * 10**6 %}{{ x.replace('a', x) }}",
    "{{ [0] * 10**10 }}",
    "{{ [1] | tojson(indent=10**10) }}",
    "{% for i in range(10**9) %}a{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{{ 'a' * 10**8 }}",
]
# within one call, in which nothing else can interrupt it
SLOW_TEMPLATE = "{{ (10**(10**6)) ** 1000 }}"


@pytest.fixture(scope="module")
def sandbox(offline):
    with closing(TemplateSandbox(offline.tokenizer)) as sandbox:
        yield sandbox


@pytest.mark.parametrize("template", HUGE_TEXTS)
def test_templates_that_make_huge_texts(sandbox, template):
    """They are refused, and the process goes on."""
    assert sandbox.render(QUESTION, {"chat_template": "{{ messages[0].role }}"}) == "user"
    before = [process.pid for process in sandbox._processes]
    with pytest.raises(ValueError, match="the chat template fails .*(too much memory|must be at most|too big)"):
        sandbox.render(QUESTION, {"chat_template": template})
    assert [process.pid for process in sandbox._processes] == before


@pytest.fixture
def forked(monkeypatch):
    """Processes of the sandbox are forks, which have imported transformers; those of `sandbox` are new ones."""
    monkeypatch.setattr(template_sandbox, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Program}))


@pytest.mark.usefixtures("forked")
def test_templates_that_take_long(offline, monkeypatch):
    """Their process is ended, and another one has the next conversation."""
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    with closing(TemplateSandbox(offline.tokenizer)) as sandbox:
        with pytest.raises(ValueError, match=r"the chat template fails \(it takes more than 0.2 s, or too much memory"):
            sandbox.render(QUESTION, {"chat_template": SLOW_TEMPLATE})
        assert not sandbox._processes
        assert sandbox.render(QUESTION, {"chat_template": "{{ messages[0].role }}"}) == "user"
        (process,) = sandbox._processes
    assert process.wait(10) < 0
    with pytest.raises(RuntimeError, match="closed"):
        sandbox.render(QUESTION, {})


RENDERED = [
    {},
    {"tools": [TOOL], "x": [1, {"y": None}], "enable_thinking": False},
    {"chat_template": TEMPLATE, "tools": [TOOL], "documents": [{"title": "\u00e9\U0001f600"}], "reasoning_effort": 5},
    {"add_generation_prompt": False, "continue_final_message": True},
    {"chat_template": "{{ bos_token }} {{ eos_token }} {{ messages | tojson }}"},
    {"chat_template": "{{ raise_exception('not like this') }}"},
    {"chat_template": "{% if %}"},
]


@pytest.mark.parametrize("arguments", RENDERED, ids=str)
def test_texts_of_the_sandbox_are_those_of_the_tokenizer(offline, sandbox, arguments):
    messages, results = [*QUESTION, {"role": "assistant", "content": "Well, \u00e9"}], []
    for render in (partial(render_chat, offline.tokenizer), sandbox.render):
        try:
            results.append(render(messages, arguments))
        except ValueError as error:
            results.append(str(error))
    assert results[0] == results[1] and results[0]


def test_what_may_take_long():
    def may_take_long(**fields) -> bool:
        return template_sandbox.may_take_long(ChatBody(**{"messages": QUESTION} | fields), TEMPLATE)

    for own in ({}, {"enable_thinking": False}, {"a": None, "language": "en"}, {"thinking_budget": 10**9}):
        assert not may_take_long(chat_template_kwargs=own) and not may_take_long(chat_template=TEMPLATE)
    for own in ({"n": 5}, {"n": 1e300}, {"x": []}, {"x": {"y": 1}}, {"x": "y" * 2000}):
        assert may_take_long(chat_template_kwargs=own)
    assert may_take_long(chat_template="{{ 1 }}") and may_take_long(messages=QUESTION * 2000)


@pytest.mark.usefixtures("forked")
def test_others_go_on_while_a_template_takes_long(monkeypatch, offline):
    """It has neither the tokenizer's threads nor its lock. Its own errors name what the client has sent."""
    template, content = "{{ messages[0].content * n }}", QUESTION[0]["content"]
    with (
        running(chat_template=template) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
        ThreadPoolExecutor(4) as pool,
    ):

        def ask(path: str, n: int):
            body = {"messages": QUESTION, "max_tokens": 2, "chat_template_kwargs": {"n": n}}
            return http.post(path, json=body | ({"input": content} if "responses" in path else {}))

        paths = ("/tokenize", CHAT, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
        assert ask("/tokenize", 2).json()["tokens"] == offline.tokenizer.encode(content * 2)
        for path in paths:
            assert ask(path, 2).status_code == 200
            answer = ask(path, 10**10)
            assert answer.status_code == 400 and "the chat template fails (it takes too much memory)" in answer.text
        go_on, render = threading.Event(), server.llm._template_sandbox.render
        hold = lambda *arguments: go_on.wait(30) and render(*arguments)
        monkeypatch.setattr(server.llm._template_sandbox, "render", hold)
        held = [pool.submit(ask, path, 3) for path in paths[:4]]
        for _ in range(5):
            assert http.post("/tokenize", json={"prompt": PROMPT}).json()["count"] == 9
            assert http.post(TEXT, json=GREEDY | {"prompt": PROMPT}).status_code == 200
        assert not any(answer.done() for answer in held)
        go_on.set()
        assert [answer.result().status_code for answer in held] == [200] * 4
        server.wait_until_free()


@pytest.mark.usefixtures("forked")
def test_a_server_that_ends_while_a_template_takes_long():
    with running(trust_request_chat_template=True, drain_seconds=0) as server, ThreadPoolExecutor(1) as pool:
        body = {"messages": QUESTION, "chat_template": SLOW_TEMPLATE}
        answer = pool.submit(httpx.post, server.url + CHAT, json=body)
        wait_for(lambda: server.llm._template_sandbox._processes)
        (process,) = server.llm._template_sandbox._processes
        server.llm.exit()
        assert answer.result(10).status_code == 503 and process.wait(10) < 0


@pytest.mark.parametrize(
    "field, value, ok",
    [
        ("guided_json", {"enum": [1, 2]}, ("1", "2")),
        ("guided_json", '{"enum": [1, 2]}', ("1", "2")),
        ("guided_regex", "[xy]", ("x", "y")),
        ("guided_choice", ["yes", "no"], ("yes", "no")),
        ("guided_grammar", 'start: "x" | "y"', ("x", "y")),
    ],
)
def test_guided_decoding(post, field, value, ok):
    assert post(TEXT, {field: value}).json()["choices"][0]["text"] in ok
    both = post(TEXT, {field: value, "structured_outputs": {"regex": "a"}}).json()["error"]
    assert both["param"] == field


def test_functions(post):
    """OpenAI's older form of tools, in the request and in the answer."""
    function, options = TOOL["function"], {"max_tokens": 100}
    body = {"functions": [function], "function_call": {"name": "get_weather"}} | options
    choice = post(CHAT, body).json()["choices"][0]
    call = choice["message"]["function_call"]
    assert (call["name"], json.loads(call["arguments"])["n"] in (1, 2)) == ("get_weather", True)
    assert choice["finish_reason"] == "function_call" and choice["message"].keys() == {
        "role",
        "content",
        "function_call",
    }
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(post(CHAT, body | {"stream": True}))]
    assert [delta["function_call"] for delta in deltas if "function_call" in delta] == [call]
    history = [
        *QUESTION,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "get_weather", "content": "sunny"},
    ]
    assert post(CHAT, {"messages": history, "functions": [function]} | options).status_code == 200
    template = "{{ messages[1].tool_calls[0].function.arguments.n > 0 }} {{ messages[2].role }}"
    answer = post(CHAT, {"messages": history, "chat_template": template, "return_token_ids": True, "max_tokens": 1})
    usage = answer.json()["usage"]
    tools = post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "chat_template": "True tool"})
    assert usage["prompt_tokens"] == tools.json()["usage"]["prompt_tokens"]


# -- answers -----------------------------------------------------------------------------------------------------------


def answers_to(body: ChatBody, text: str) -> tuple[dict, list[dict]]:
    """The choice of a complete answer with this text, and the deltas of a streamed one."""
    request = SimpleNamespace(prompt_token_ids=[1], num_cached_tokens=0)
    tokenizer = CharacterTokenizer()

    def make():
        return ChatAnswer(body, "m", [request], Formats("hermes", reasoning=tokenizer.markers()))

    output = CompletionOutput(0, text, tokenizer.encode(text), None, None, "stop", None)
    whole = RequestOutput(7, "", [1], [output], True, 0, None, RequestMetrics(0, 0, 0, 0))
    streamed = make().chunk_choices(0, StreamEvent(0, 0, 7, text, output.token_ids, "stop", None, None))
    return make().choice(0, whole, output), streamed


def test_reasoning_has_both_names():
    text, both = "<think>Well</think>Hi", {"reasoning": "Well", "reasoning_content": "Well"}
    body = ChatBody(messages=QUESTION, return_token_ids=True)
    whole, streamed = answers_to(body, text)
    assert whole["message"] == {"role": "assistant", "content": "Hi", **both}
    assert [choice["delta"] for choice in streamed[1:]] == [both, {"content": "Hi"}]  # in their order
    assert streamed[2]["token_ids"] == [*map(ord, text)]
    whole, streamed = answers_to(body.model_copy(update={"include_reasoning": False}), text)
    assert whole["message"] == {"role": "assistant", "content": "Hi"} and whole["token_ids"] is None
    assert streamed[1]["delta"] == {"content": "Hi"} and streamed[1]["token_ids"] is None


def test_continuous_usage(post):
    options = {"stream": True, "n": 2, "seed": 1}
    for wanted in ({"continuous_usage_stats": True}, {"include_usage": False, "continuous_usage_stats": True}):
        assert not any("usage" in chunk for chunk in chunks(post(CHAT, options | {"stream_options": wanted})))
    both = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(post(CHAT, options | {"stream_options": both, "temperature": 1}))
    for index in (0, 1):
        own = [chunk for chunk in found if chunk["choices"] and chunk["choices"][0]["index"] == index]
        counts = [chunk["usage"]["completion_tokens"] for chunk in own]
        assert own[0]["choices"][0]["delta"]["role"] == "assistant"
        assert counts[0] == 0 and counts == sorted(counts) and counts[-1] <= GREEDY["max_tokens"]
    assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] > counts[-1]


def test_a_named_call_that_is_cut(post):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    body = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 2}
    answer = post(CHAT, body).json()["choices"][0]
    assert answer["finish_reason"] == "length" and "tool_calls" not in answer["message"]
    assert not any(
        "tool_calls" in chunk["choices"][0]["delta"] for chunk in chunks(post(CHAT, body | {"stream": True}))
    )


def test_seeds(post):
    """The whole range of int64; -1 is no seed, as in vLLM."""
    body = {"temperature": 2.0, "max_tokens": 8}
    texts = {}
    for seed in (-(2**63), -2, 0, 2**63 - 1):
        first, second = (post(TEXT, body | {"seed": seed}).json()["choices"][0]["text"] for _ in range(2))
        assert first == second
        texts[seed] = first
    assert len({*texts.values()}) == 4
    assert len({post(TEXT, body | {"seed": -1}).json()["choices"][0]["text"] for _ in range(4)}) > 1


def test_metrics_count_the_same_answers(server, post):
    post(TEXT, {"n": 3, "temperature": 1.0})
    post(CHAT, {})
    deadline, values = time.monotonic() + 10, {}
    while time.monotonic() < deadline:
        values = {}
        for line in httpx.get(f"{server.url}/metrics").text.splitlines():
            if line.startswith("vllm:") and "_bucket" not in line:
                name = line.split("{")[0]
                values[name] = values.get(name, 0) + float(line.rsplit(" ", 1)[1])
        num_answers = values["vllm:request_success_total"]
        histograms = ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_generation_tokens")
        if num_answers >= 4 and all(values[f"vllm:{name}_count"] == num_answers for name in histograms):
            break
    else:
        raise AssertionError(values)
    tokens = values["vllm:prompt_tokens_total"] + values["vllm:generation_tokens_total"]
    assert 0 < values["vllm:iteration_tokens_total_sum"] <= tokens
    assert values["vllm:iteration_tokens_total_count"] > 0


def test_root_of_a_model(server):
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["root"] == MODEL


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, text",
    [
        (b'{"prompt": "\xff"}', "not valid UTF-8: byte 0xff at position 12"),
        (b'{"prompt": "x",}', "not valid JSON: "),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}", "digits"),
        (b"[1]", "must be a JSON object"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_bodies_that_can_not_be_read(server, content, text):
    answer = httpx.post(server.url + TEXT, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and text in answer.json()["error"]["message"], answer.text


def nested(num_levels: int) -> dict:
    value: dict = {}
    for _ in range(num_levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "change",
    [
        {"tools": [TOOL | {"function": TOOL["function"] | {"parameters": nested(800)}}]},
        {"chat_template_kwargs": nested(800)},
        {"messages": [QUESTION[0] | {"x": nested(800)}]},
        {"structured_outputs": {"json": nested(200)}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": nested(200)}}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_deep_nesting_names_the_field(post, change):
    """Where it is too deep for this version of Python: 3.13 reads ten times as deep as 3.11."""
    answer = post(CHAT, change | {"metadata": {"a": [1]}, "max_tokens": 1})
    if answer.status_code != 200 or "structured_outputs" in change or "response_format" in change:
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == next(iter(change)) and "nested" in error["message"]


def test_errors_about_something_else_are_not_of_nesting(post):
    """Even if they quote the word that Python's own errors about it have."""
    error = post(TEXT, {"model": "recursion", "metadata": nested(200)}).json()["error"]
    assert error["param"] == "model"
