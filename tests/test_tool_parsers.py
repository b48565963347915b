"""Calls of tools in generated text: the same ones are found however the text is cut into pieces."""

import json
import random
from types import SimpleNamespace

import pytest

pytest.importorskip("pydantic")

from nanovllm.engine.stream_event import StreamEvent
from nanovllm.serve.answers import dump_json, encoded
from nanovllm.serve.chat import ChatAnswer, Formats, make_tool_parser
from nanovllm.serve.protocol import ChatBody
from nanovllm.serve.reasoning import ReasoningParser
from nanovllm.serve.tool_parsers import HermesParser, Llama3Parser, ToolCall, WholeParser, parser_for

F, G = '{"name": "f", "arguments": {"a": "</x> \\u00e9"}}', '{"name": "g", "arguments": {}}'
CALLS = [ToolCall("f", '{"a": "</x> é"}'), ToolCall("g", "{}")]
LLAMA_F, LLAMA_G = F.replace("arguments", "parameters"), G.replace("arguments", "parameters")
CASES = [
    (HermesParser, "No call <b> here, a < b", "No call <b> here, a < b", []),
    (HermesParser, f"Hi. <tool_call>\n{F}\n</tool_call>\n<tool_call>{G}</tool_call>", "Hi. \n", CALLS),
    (HermesParser, f"<tool_call>{F}</tool_call>\n", "", CALLS[:1]),
    (HermesParser, f"<tool_call>{G}", "", CALLS[1:]),  # the end of the call was the stop string
    (HermesParser, "<tool_call>{bad}</tool_call> and <tool_c", "<tool_call>{bad}</tool_call> and <tool_c", []),
    (HermesParser, '<tool_call>{"name": 1, "arguments": {}}</tool_call>', None, []),
    (HermesParser, '<tool_call>{"name": "f", "arguments": []}</tool_call>', None, []),
    (HermesParser, '<tool_call>{"name": "f"', None, []),
    (Llama3Parser, f"{LLAMA_F}; {LLAMA_G}", "", CALLS),
    (Llama3Parser, f"<|python_tag|>{LLAMA_F}\n{LLAMA_G}", "", CALLS),
    (Llama3Parser, f"{G}", "", CALLS[1:]),
    (Llama3Parser, 'Hello {"name"}', None, []),
    (Llama3Parser, '{"x": 1}', None, []),
    (Llama3Parser, LLAMA_F[:-2], None, []),
    (Llama3Parser, "<|python", None, []),
    (Llama3Parser, "", "", []),
    (WholeParser, f"[{LLAMA_F}, {LLAMA_G}]", "", CALLS),
    (WholeParser, f"[{LLAMA_F}", None, []),
    (lambda: WholeParser("g"), "{}", "", CALLS[1:]),
    (lambda: WholeParser("g"), '{"a": "cut', None, []),
]


@pytest.mark.parametrize("make, text, content, calls", CASES, ids=map(str, range(len(CASES))))
def test_pieces_of_any_size(make, text, content, calls):
    """`content` None is all of the text."""
    content = text if content is None else content
    assert make().feed(text, is_last=True) == (content, calls)
    rng = random.Random(0)
    for _ in range(50):
        parser, contents, found, start = make(), "", [], 0
        while start < len(text):
            end = start + rng.choice([1, 2, 3, 8, 30])
            piece, new = parser.feed(text[start:end])
            contents, found, start = contents + piece, found + new, end
        piece, new = parser.feed("", is_last=True)
        assert ((contents + piece).strip(), found + new) == (content.strip(), calls)


def test_text_is_held_back_no_longer_than_needed():
    parser = HermesParser()
    assert [parser.feed(piece)[0] for piece in ("a <", "b", " <tool", "s>", "<tool_call>", "{")] == [
        *("a ", "<b", " ", "<tools>", "", "")
    ]
    assert Llama3Parser().feed("Hello") == ("Hello", [])


@pytest.mark.parametrize(
    "text, is_inside, reasoning, rest",
    [
        ("<think>\nHm, a < b </thin\n</think>\n\nYes. </think>", False, "\nHm, a < b </thin\n", "Yes. </think>"),
        ("Hm</think>Yes", True, "Hm", "Yes"),
        ("Hm, no end </thi", True, "Hm, no end </thi", ""),
        ("\n<think></think>\n\nYes", False, "", "Yes"),
        ("Yes <think>", False, "", "Yes <think>"),
        ("<thing>", False, "", "<thing>"),
        ("<thin", False, "", "<thin"),
        ("", False, "", ""),
    ],
)
def test_reasoning(text, is_inside, reasoning, rest):
    assert ReasoningParser(is_inside).feed(text, is_last=True) == (reasoning, rest)
    rng = random.Random(0)
    for _ in range(50):
        parser, found, start = ReasoningParser(is_inside), ("", ""), 0
        while start < len(text):
            end = start + rng.choice([1, 2, 3, 8, 30])
            found = tuple(map("".join, zip(found, parser.feed(text[start:end]))))
            start = end
        assert tuple(map("".join, zip(found, parser.feed("", is_last=True)))) == (reasoning, rest)


def test_format_from_the_chat_template():
    assert parser_for("... return <tool_call>{...}</tool_call>") == "hermes"
    assert parser_for('Respond in the format {"name": function name, "parameters": ...}') == "llama3_json"
    assert parser_for("{{ messages }}") == parser_for(None) == "none"


@pytest.mark.parametrize("text", ["b", "\ud800"])
def test_json_of_parts_that_are_encoded(text):
    content = {"a\u00e9": [1.5, None, {"x": [True, {}], text: [[], f'"{text}\n']}], text: {}, "d": [10**30]}
    expected = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    assert dump_json(content) == expected
    assert dump_json({name: encoded(value) for name, value in content.items()}) == expected


def test_chat_chunks():
    """Of a streamed answer with two calls: their numbers, their ids, and the finish reason."""
    tool = {"type": "function", "function": {"name": "f"}}
    body = ChatBody(messages=[{"role": "user", "content": "x"}], tools=[tool])
    request = SimpleNamespace(prompt_token_ids=[1], num_cached_tokens=0, request=SimpleNamespace(prompt="<think>\n"))
    answer = ChatAnswer(body, "m", [request], Formats("hermes", finds_reasoning=True))
    pieces = ["Well", "</think>", "\n\nHi", f"<tool_call>{F}", "</tool_call>", f"<tool_call>{G}</tool_call>", ""]
    choices = []
    for i, piece in enumerate(pieces):
        reason = "stop" if i == len(pieces) - 1 else None
        choices += answer.chunk_choices(0, StreamEvent(0, 0, 7, piece, [5], reason, None, None))
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert deltas[1:3] == [{"reasoning": "Well", "reasoning_content": "Well"}, {"content": "Hi"}]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1] and len({call["id"] for call in calls}) == 2
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": "</x> é"}, {}]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    one = body.model_copy(update={"parallel_tool_calls": False})
    answer = ChatAnswer(one, "m", [request], Formats("hermes"))
    choices = [
        choice
        for piece in (f"<tool_call>{F}</tool_call>", f"<tool_call>{G}</tool_call>")
        for choice in answer.chunk_choices(0, StreamEvent(0, 0, 7, piece, [5], None, None, None))
    ]
    assert [len(choice["delta"].get("tool_calls", ())) for choice in choices] == [0, 1]
    for choice, name in [("none", "ToolParser"), ("required", "WholeParser"), ("auto", "Llama3Parser")]:
        parser = make_tool_parser(body.model_copy(update={"tool_choice": choice}), "llama3_json")()
        assert type(parser).__name__ == name
