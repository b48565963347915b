"""The harmony format of gpt-oss: what answers mean, whole and streamed.

If openai-harmony is installed, it must read and render the same. The package needs the vocabulary o200k_base.tiktoken
in the folder TIKTOKEN_ENCODINGS_BASE.
"""

import json
import os
import random
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from common import TINY, CharacterTokenizer, scripted_model

from nanovllm import LLM, SamplingParams
from nanovllm.reasoning.formats import HARMONY, format_of
from nanovllm.reasoning.harmony import CONTROLS, ENDS
from nanovllm.reasoning.stage import Stage
from nanovllm.requests.chat_templates import forms_of
from nanovllm.requests.prompts import render_chat
from nanovllm.utils.loader import load_tokenizer

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
from test_reasoning import ENGINES, JSON, READERS, TOOL, whole_and_streamed

from nanovllm.serve.chat import AnswerParser
from nanovllm.serve.reasoning_parser import make_reasoning_parser
from nanovllm.serve.terminal.sources import LocalModel
from nanovllm.serve.tool_parsers import HarmonyToolParser, ToolParser, WholeParser, parser_for

THOUGHT = "<|channel|>analysis<|message|>Hm, 1 < 2 |> é<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"n": 7}<|call|>'
ROLE_CALL = ' to=functions.add<|channel|>commentary json<|message|>{"n": 7}<|call|>'
# an answer, and what it means: reasoning, content, and calls
ANSWERS = {
    "final": (THOUGHT + "<|channel|>final<|message|>Yes.<|return|>", "Hm, 1 < 2 |> é", "Yes.", []),
    "call": (THOUGHT + CALL, "Hm, 1 < 2 |> é", "", [("add", {"n": 7})]),
    "call-of-role": (THOUGHT + ROLE_CALL, "Hm, 1 < 2 |> é", "", [("add", {"n": 7})]),
    "call-at-once": (ROLE_CALL, "", "", [("add", {"n": 7})]),
    "call-without-type": (CALL.replace(" <|constrain|>json", ""), "", "", [("add", {"n": 7})]),
    "call-without-end": (CALL.removesuffix("<|call|>"), "", "", [("add", {"n": 7})]),
    "preamble": (
        THOUGHT + "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant" + CALL,
        *("Hm, 1 < 2 |> é", "I add.", [("add", {"n": 7})]),
    ),
    "thoughts": (
        2 * THOUGHT + "<|channel|>final<|message|>Yes",
        *("Hm, 1 < 2 |> é\n\nHm, 1 < 2 |> é", "Yes", []),
    ),
    "two-answers": (2 * "<|channel|>final<|message|>Yes<|end|><|start|>assistant", "", "Yes\n\nYes", []),
    "python": ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "print(1)", "", []),
    "cut-thought": ("<|channel|>analysis<|message|>Hm <|", "Hm <|", "", []),
    "cut-header": (THOUGHT + "<|channel|>fin", "Hm, 1 < 2 |> é", "", []),
    "no-channel": ("<|message|>Yes<|end|>", "", "Yes", []),
    "controls-in-a-body": ("<|channel|>final<|message|>a<|channel|>b<|message|>c", "", "a<|channel|>b<|message|>c", []),
    "call-in-analysis": (
        '<|channel|>analysis to=functions.add code<|message|>{"n": 7}<|call|>',
        *("", "", [("add", {"n": 7})]),
    ),
    "thought-without-end": (
        "<|channel|>analysis<|message|>Hm<|start|>assistant<|channel|>final<|message|>Yes<|return|>",
        *("Hm", "Yes", []),
    ),
    "messages-without-end": (
        "<|channel|>analysis<|message|><|start|>assistant" + CALL.removesuffix("<|call|>") + "<|start|>assistant",
        *("", "", [("add", {"n": 7})]),
    ),
    "nothing": ("", "", "", []),
}
# what openai-harmony refuses
INCOMPLETE = {"cut-header", "nothing", "two-answers", "controls-in-a-body"}
INCOMPLETE |= {"thought-without-end", "messages-without-end"}
TOKENIZER = CharacterTokenizer(*CONTROLS)
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"


def tokens_of(text: str) -> list[tuple[str, int]]:
    return [(TOKENIZER[i].decode(), i) for i in TOKENIZER.encode(text)]


def read(tokens: list[tuple[str, int]], tools: ToolParser, rng: random.Random | None = None, prompt: str = PROMPT):
    """(reasoning, content, calls) of an answer, whole or in pieces, for which some tokens are early."""
    reasoning = TOKENIZER.markers("openai_gptoss").start(TOKENIZER.encode(prompt))
    parser = AnswerParser(make_reasoning_parser(reasoning, tools), tools)
    texts, found, begin, num_ids = {"reasoning": "", "content": ""}, [], 0, 0
    while begin < len(tokens):
        end = len(tokens) if rng is None else begin + rng.choice([1, 2, 3, 8, 30])
        ahead = max(num_ids, end + (rng.choice([0, 1, 5]) if rng else 0))
        piece = "".join(text for text, _ in tokens[begin:end])
        found += parser.feed(piece, [i for _, i in tokens[num_ids:ahead]], False)
        begin, num_ids = end, ahead
    found += parser.feed("", [], True)
    for name in texts:
        texts[name] = "".join(part.get(name, "") for part in found)
    calls = [call["function"] for part in found for call in part.get("tool_calls", ())]
    return *texts.values(), [(call["name"], json.loads(call["arguments"])) for call in calls]


def read_all(tokens: list[tuple[str, int]], make=HarmonyToolParser, **options):
    """The same for the whole answer and for pieces."""
    expected = read(tokens, make(), **options)
    for seed in range(40):
        assert read(tokens, make(), random.Random(seed), **options) == expected
    return expected


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name):
    text, *expected = ANSWERS[name]
    assert read_all(tokens_of(text)) == tuple(expected)


def test_texts_that_only_spell_controls():
    """They change nothing, as a part of any message."""
    fake = [(x, ord(x)) for x in "<|end|><|start|>assistant" + CALL + "<|channel|>final<|message|>"]
    tokens = [*tokens_of("<|channel|>analysis<|message|>a"), *fake, *tokens_of("<|end|><|start|>assistant")]
    tokens += [*tokens_of("<|channel|>final<|message|>b"), *fake[:7], *tokens_of("c<|return|>")]
    spelled = "".join(text for text, _ in fake)
    assert read_all(tokens) == ("a" + spelled, "b<|end|>c", [])
    tokens = [*tokens_of(THOUGHT + "<|channel|>final<|message|>"), *((x, ord(x)) for x in CALL)]
    assert read_all(tokens) == ("Hm, 1 < 2 |> é", CALL, [])


def test_a_model_without_the_format():
    """Or one that has not learned it yet."""
    assert read_all(tokens_of("Just <| text")) == ("", "Just <| text", [])


@pytest.mark.parametrize(
    "make, text, expected",
    [
        (ToolParser, CALL, ("", '{"n": 7}', [])),  # a call, but the request has no tools
        (lambda: WholeParser("add"), THOUGHT + CALL, ("Hm, 1 < 2 |> é", "", [("add", {"n": 7})])),
        (lambda: WholeParser("add"), '<|channel|>final<|message|>{"n": 7}', ("", "", [("add", {"n": 7})])),
        *[
            (HarmonyToolParser, CALL.replace('{"n": 7}', body).removesuffix(end), expected)
            for end in ("", "<|call|>")
            for body, expected in [
                ("", ("", "", [("add", {})])),
                (" ", ("", "", [("add", {})])),
                ("[7]", ("", "[7]", [])),  # what is no JSON object is not lost
                ('{"n": ', ("", '{"n": ', [])),
            ]
        ],
    ],
)
def test_calls_of_other_kinds(make, text, expected):
    assert read_all(tokens_of(text), make) == expected


@pytest.mark.parametrize(
    "end, stage, text, expected",
    [
        ("<|channel|>final<|message|>", Stage.ENDED, "Yes<|return|>", ("", "Yes", [])),
        ("<|channel|>analysis<|message|>Hm", Stage.INSIDE, ", ok<|end|>", (", ok", "", [])),
        ("<|channel|>commentary to=functions.add<|message|>", Stage.ENDED, '{"n": 7}', ("", "", [("add", {"n": 7})])),
        ("<|channel|>", Stage.INSIDE, "final<|message|>Yes", ("", "Yes", [])),
    ],
)
def test_what_the_prompt_has_begun(end, stage, text, expected):
    markers = TOKENIZER.markers("openai_gptoss")
    assert markers.start(TOKENIZER.encode(PROMPT + end)).stage is stage
    assert read_all(tokens_of(text), prompt=PROMPT + end) == expected
    assert markers.start(TOKENIZER.encode("a raw prompt")).stage is Stage.INSIDE


@pytest.mark.parametrize("end", ["<|end|><|start|>", "<|start|>"])
def test_reasoning_ends_with_the_header_of_another_message(end):
    """A message may lack its end, and a call of a function is not reasoning in any channel."""
    for header in ("<|channel|>final", "<|channel|>analysis to=functions.add code"):
        reasoning = TOKENIZER.markers("openai_gptoss").start(TOKENIZER.encode(PROMPT))
        thought = TOKENIZER.encode("<|channel|>analysis<|message|>Hm" + end + "assistant" + header)
        reasoning.take(thought)
        assert reasoning.stage is Stage.INSIDE
        reasoning.take(TOKENIZER.encode("<|message|>Yes"))
        assert reasoning.stage is Stage.ENDED and reasoning.num_tokens == len(thought) + 1


def test_calls_without_a_reasoning_parser():
    """With --reasoning-parser none, the markup of other messages stays in the content."""
    *texts, call = HarmonyToolParser().feed(THOUGHT + CALL, is_last=True)
    assert "".join(texts) == THOUGHT.removesuffix("<|start|>assistant") and call == ("add", '{"n": 7}')


# -- openai-harmony ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def harmony():
    package = pytest.importorskip("openai_harmony")
    if not Path(os.environ.get("TIKTOKEN_ENCODINGS_BASE", ""), "o200k_base.tiktoken").is_file():
        pytest.skip("TIKTOKEN_ENCODINGS_BASE has no vocabulary")
    return package


@cache
def encoding_of(harmony):
    return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def as_openai_harmony_reads(harmony, text: str) -> tuple[str, str, list]:
    encoding = encoding_of(harmony)
    ids = encoding.encode(text, allowed_special="all")
    texts, calls = {True: [], False: []}, []
    for message in encoding.parse_messages_from_completion_tokens(ids, harmony.Role.ASSISTANT):
        body = message.content[0].text
        is_function = (message.recipient or "").startswith("functions.")
        if is_function or (message.channel == "commentary" and message.recipient):
            calls.append((message.recipient.removeprefix("functions."), json.loads(body)))
        else:
            texts[message.channel == "analysis"].append(body)
    return "\n\n".join(texts[True]), "\n\n".join(texts[False]), calls


@pytest.mark.parametrize("name", [name for name in ANSWERS if name not in INCOMPLETE])
def test_as_openai_harmony_reads_answers(harmony, name):
    text, *expected = ANSWERS[name]
    assert as_openai_harmony_reads(harmony, text) == tuple(expected)


def test_random_answers_as_openai_harmony_reads_them(harmony):
    rng = random.Random(0)
    heads = ["<|channel|>analysis", "<|channel|>commentary", "<|channel|>final"]
    calls = [" to=functions.add<|channel|>commentary json", "<|channel|>commentary to=functions.add <|constrain|>json"]
    words = ["Yes ", "\n", "<|", "|>", "é", "{", "channel", "to=functions.add", "<think>"]
    for _ in range(200):
        messages = []
        for _ in range(rng.randrange(1, 6)):
            if rng.random() < 0.3:
                messages.append(f'{rng.choice(calls)}<|message|>{{"n": {rng.randrange(9)}}}<|call|>')
            else:  # a call's neighbours lose white space at their ends, as in every format
                body = f"a{''.join(rng.choices(words, k=rng.randrange(5)))}b"
                messages.append(f"{rng.choice(heads)}<|message|>{body}<|end|>")
        text = "<|start|>assistant".join(messages)
        found = read(tokens_of(text), HarmonyToolParser(), rng)
        reasoning, content, calls_found = as_openai_harmony_reads(harmony, text)
        assert (found[0], found[1].split(), found[2]) == (reasoning, content.split(), calls_found), text


# what a checkpoint's template does for the messages of a conversation, in few lines
TEMPLATE = """<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06

Reasoning: {{ reasoning_effort or "medium" }}

# Valid channels: analysis, commentary, final. Channel must be included for every message.
{%- if tools %}
Calls to these tools must go to the commentary channel: 'functions'.
{%- endif %}<|end|>
{%- if messages[0].role in ["developer", "system"] -%}
<|start|>developer<|message|># Instructions

{{ messages[0].content }}<|end|>{% set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if message.role == "tool" -%}
<|start|>functions.{{ messages[loop.index0 - 1].tool_calls[0].function.name }} to=assistant<|channel|>commentary
{{- "<|message|>" + message.content }}<|end|>
{%- elif message.role == "user" -%}
<|start|>user<|message|>{{ message.content }}<|end|>
{%- elif "tool_calls" in message %}
{%- if message.content and message.thinking %}{{ raise_exception("both") }}{% endif %}
{%- if message.thinking or message.content -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking or message.content }}<|end|>
{%- endif %}
{%- set call = message.tool_calls[0].function -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary <|constrain|>json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- else -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt -%}
<|start|>assistant{{ suffix }}
{%- endif %}"""


def test_formats_from_the_template():
    assert (parser_for(TEMPLATE), format_of(TEMPLATE)) == ("openai", "openai_gptoss")
    forms = forms_of(TEMPLATE)
    assert forms.is_harmony and forms.reasoning == {"thinking"} and not forms.arguments_text


def call_message(**entries) -> dict:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"n": 7}'}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **entries}


@pytest.fixture(scope="module")
def tokenizer():
    loaded = load_tokenizer(TINY)
    loaded.chat_template = TEMPLATE
    return loaded


def test_rendering(harmony, tokenizer):
    """A conversation with a call, as clients of the API send it, is what openai-harmony renders."""
    make, roles = harmony.Message.from_role_and_content, harmony.Role
    system = harmony.SystemContent.new().with_reasoning_effort(harmony.ReasoningEffort("High"))
    arguments = harmony.Message.from_role_and_content(roles.ASSISTANT, '{"n": 7}').with_channel("commentary")
    result = harmony.Message.from_author_and_content(harmony.Author.new(roles.TOOL, "functions.add"), "8")
    conversation = [
        make(roles.SYSTEM, system),
        make(roles.DEVELOPER, harmony.DeveloperContent.new().with_instructions("Be nice.")),
        make(roles.USER, "Hi?"),
        make(roles.ASSISTANT, "Hm").with_channel("analysis"),
        arguments.with_recipient("functions.add").with_content_type("<|constrain|>json"),
        result.with_channel("commentary").with_recipient("assistant"),
    ]
    encoding = encoding_of(harmony)
    ids = encoding.render_conversation_for_completion(harmony.Conversation.from_messages(conversation), roles.ASSISTANT)
    messages = [
        {"role": "system", "content": "Be nice."},
        {"role": "user", "content": [{"type": "text", "text": "Hi?"}]},
        call_message(reasoning="Hm"),
        {"role": "tool", "tool_call_id": "call_1", "content": "8"},
    ]
    assert render_chat(tokenizer, messages, {"reasoning_effort": "high"}) == encoding.decode(ids)


def test_text_before_a_call_is_a_thought(tokenizer):
    """A template accepts either reasoning or content with a call, and clients return both."""
    texts = [
        render_chat(tokenizer, [{"role": "user", "content": "Hi"}, call_message(**entries)], {})
        for entries in ({"reasoning_content": "Hm", "content": "I add."}, {"reasoning": "Hm\n\nI add."})
    ]
    assert texts[0] == texts[1] and "<|channel|>analysis<|message|>Hm\n\nI add.<|end|>" in texts[0]


def test_several_calls_and_instructions(tokenizer):
    """The template reads one call of a message, the first instructions, and descriptions of tools."""
    call = lambda name, number: {"id": f"call_{number}", "function": {"name": name, "arguments": "{}"}}
    result = lambda number, text: {"role": "tool", "tool_call_id": f"call_{number}", "content": text}
    messages = [
        {"role": "system", "content": "One."},
        {"role": "user", "content": "Hi"},
        call_message(tool_calls=[call("add", 1), call("mul", 2)], reasoning="Hm"),
        result(2, "of mul"),
        result(1, "of add"),
        {"role": "developer", "content": [{"type": "text", "text": "Two."}]},
        call_message(tool_calls=[call("neg", 3)]),
        result(3, "of neg"),
    ]
    text = render_chat(tokenizer, messages, {"reasoning_effort": "minimal"})
    order = ["Reasoning: low", "One.\n\nTwo.<|end|>", ">Hm<", "to=functions.add", "functions.add to", "of add"]
    order += ["to=functions.mul", "functions.mul to", "of mul", "to=functions.neg", "functions.neg to", "of neg"]
    assert [text.count(part) for part in order] == [1] * len(order)
    assert sorted(order, key=text.index) == order
    loaded = load_tokenizer(TINY)
    loaded.chat_template = TEMPLATE + "{% for tool in tools %}{{ '// ' + tool.function.description }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "add", "description": None}}]
    assert render_chat(loaded, messages[:2], {"tools": tools}).endswith("<|start|>assistant// ")
    with pytest.raises(ValueError, match="reasoning_effort='none': must be one of 'low', 'medium', 'high'"):
        render_chat(tokenizer, messages[:2], {"reasoning_effort": "none"})


# -- engines and servers -----------------------------------------------------------------------------------------------

# a model with a fixed order of tokens can't write a token twice, nor one of the bundled tokenizer, such as the role
WITHIN = "<|channel|>analysis<|message|>\n"
BEGIN = ["<|end|>", "<|start|>", "<|channel|>", "final", "<|message|>"]
TO_FINAL = ["Let me", " think", " of {", *BEGIN, '{"n": ', "7}", " tail"]
TO_CALL = ["Let me", *BEGIN[:2], " to=functions.add", "<|channel|>", "commentary json", "<|message|>", '{"n": ', "7}"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harmony")
    pieces = {"final": [*TO_FINAL, "<|return|>"], "call": [*TO_CALL, "<|call|>"]}
    made = {}
    for name, tokens in pieces.items():
        template = TEMPLATE.replace("{{ suffix }}", WITHIN).replace("{%- endif %}", "{% endif %}")
        template = template.replace(WITHIN + "\n", WITHIN)
        made[name] = scripted_model(folder / name, tokens, template, special=CONTROLS)
        config = json.loads((Path(made[name]) / "config.json").read_text())
        ends = load_tokenizer(made[name]).convert_tokens_to_ids([*ENDS[1:]])
        generation = {"eos_token_id": [config["eos_token_id"], *ends]}
        (Path(made[name]) / "generation_config.json").write_text(json.dumps(generation))
    return made


def answers(llm: LLM, num_prompts: int = 1, **params) -> list[tuple[str, str | None, int | str | None]]:
    shown = dict(temperature=0, max_tokens=40, reasoning_parser="openai_gptoss", skip_special_tokens=False)
    outputs = llm.chat([[{"role": "user", "content": "q"}]] * num_prompts, SamplingParams(**shown | params), False)
    return [(x.text, x.finish_reason, x.stop_reason) for output in outputs for x in output.outputs]


def engine(folder: str, **settings) -> LLM:
    return LLM(folder, **{"num_kvcache_blocks": 64, "max_model_len": 512} | settings)


@pytest.mark.parametrize("settings", ENGINES.values(), ids=ENGINES)
def test_grammars_stop_strings_and_budgets(folders, settings):
    settings = settings | ({"num_kvcache_blocks": 36} if "num_kvcache_blocks" in settings else {})
    thought, begin = "".join(TO_FINAL[:3]), "".join(BEGIN)
    with engine(folders["final"], **settings) as llm:
        ends = llm.tokenizer.convert_tokens_to_ids([*ENDS[1:]])
        assert llm.config.model_config.eos_token_ids >= {*ends}
        ((text, reason, _),) = answers(llm)
        assert text.removesuffix("<|return|>") == "".join(TO_FINAL) and reason == "stop"
        constrained = thought + begin + '{"n": 7}', "stop", None
        assert answers(llm, 3, structured_outputs=JSON) == [constrained] * 3
        assert answers(llm, 2, stop=["{", "7"]) == [(thought + begin, "stop", "{")] * 2
        for budget in range(5):
            ((text, *_),) = answers(llm, thinking_token_budget=budget, structured_outputs=JSON)
            assert text == "".join(TO_FINAL[: min(budget, 3)]) + (HARMONY.end if budget < 4 else begin) + '{"n": 7}'


def test_an_answer_can_not_end_within_its_reasoning(folders):
    """The call is a message after the reasoning, which the grammar forms."""
    with engine(folders["call"]) as llm:
        ((text, reason, _),) = answers(llm, structured_outputs=JSON)
        assert text.removesuffix("<|call|>") == "".join(TO_CALL) and reason == "stop"
        ((text, reason, _),) = answers(llm, structured_outputs={"choice": ["yes"]})
        assert text.startswith("".join(TO_CALL[:-2]) + "yes") and reason == "stop"


def test_terminal(folders):
    with engine(folders["final"]) as llm:
        pieces = [*LocalModel(llm, "gpt-oss").stream([{"role": "user", "content": "q"}], {"temperature": 0.0})]
    assert "".join(piece.reasoning for piece in pieces) == "Let me think of {"
    assert "".join(piece.text for piece in pieces) == '{"n": 7} tail' and pieces[-1].finish_reason == "stop"


@pytest.fixture(scope="module")
def urls(folders):
    test_server = pytest.importorskip("test_server")
    with ExitStack() as stack:
        made = {}
        for name, folder in folders.items():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(test_server, "FOLDER", folder)
                made[name] = stack.enter_context(test_server.running()).url
        yield made


FORMS = {
    "/v1/chat/completions": ("messages", [{"type": "function", "function": TOOL}]),
    "/v1/responses": ("input", [{"type": "function", **TOOL}]),
    "/v1/messages": ("messages", [{"name": "add", "input_schema": TOOL["parameters"]}]),
}


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("name", ["final", "call"])
def test_server(monkeypatch, urls, name, path, has_tools):
    field, tools = FORMS[path]
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {field: [{"role": "user", "content": "q"}], length: 60, "temperature": 0}
    body |= {"tools": tools} if has_tools else {}
    monkeypatch.setattr("test_reasoning.THOUGHT", {"final": TO_FINAL[:8], "call": TO_CALL[:7]}[name])  # with headers
    found = whole_and_streamed(urls[name], path, body)
    expected = {"final": ("Let me think of {", '{"n": 7} tail', []), "call": ("Let me", '{"n": 7}', [])}[name]
    if name == "call" and has_tools:
        expected = ("Let me", "", [("add", {"n": 7})])
    assert found == [expected] * 2


def test_forced_calls(urls):
    """They are in the message after the reasoning, whatever its channel."""
    body = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 60, "temperature": 0}
    body |= {"tools": FORMS["/v1/chat/completions"][1]}
    for name, thought in (("final", "Let me think of {"), ("call", "Let me")):
        choice = {"type": "function", "function": {"name": "add"}}
        answer = httpx.post(urls[name] + "/v1/chat/completions", json=body | {"tool_choice": choice}, timeout=30).json()
        assert READERS["/v1/chat/completions"](answer) == (thought, "", [("add", {"n": 7})])


def test_reasoning_effort(urls):
    """It has its effect through the template."""
    rendered = [
        httpx.post(urls["final"] + "/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
        for effort in (None, "high", "xhigh")
        for body in [{"messages": [{"role": "user", "content": "q"}], "max_tokens": 1, "reasoning_effort": effort}]
    ]
    assert len({*rendered}) > 1


def test_a_vocabulary_without_control_tokens(make_llm):
    """Grammars and stop strings could not tell where the reasoning ends."""
    params = SamplingParams(max_tokens=2, reasoning_parser="openai_gptoss", stop="x")
    with pytest.raises(ValueError, match="reasoning_parser='openai_gptoss': the vocabulary lacks"):
        make_llm().generate("a", params, use_tqdm=False)
