"""Calls of tools in generated text: the same ones are found however the text is cut into pieces."""

import json
import random
import re
from itertools import groupby
from time import process_time
from types import SimpleNamespace

import pytest

pytest.importorskip("pydantic")

from common import CharacterTokenizer

from nanovllm.reasoning.formats import THINK, format_of, has_unknown_reasoning, template_text
from nanovllm.reasoning.stage import Reasoning, Stage, TextMarkers
from nanovllm.requests.stream_event import StreamEvent
from nanovllm.serve.answer_formats import Formats
from nanovllm.serve.answers import dump_json, encoded
from nanovllm.serve.chat import AnswerParser, ChatAnswer, make_tool_parser
from nanovllm.serve.errors import ApiError
from nanovllm.serve.protocol import ChatBody
from nanovllm.serve.reasoning_parser import ReasoningParser
from nanovllm.serve.tool_parsers import (
    DeepSeekParser,
    HermesParser,
    Llama3Parser,
    MistralParser,
    SeedParser,
    ToolCall,
    WholeParser,
    XmlParser,
    parser_for,
)

F, G = '{"name": "f", "arguments": {"a": "</x> \\u00e9"}}', '{"name": "g", "arguments": {}}'
CALLS = [ToolCall("f", '{"a": "</x> é"}'), ToolCall("g", "{}")]
LLAMA_F, LLAMA_G = F.replace("arguments", "parameters"), G.replace("arguments", "parameters")
SCHEMAS = {
    "f": {
        "properties": {
            "n": {"type": "integer"},
            "x": {"type": "number"},
            "s": {"type": "string"},
            "b": {"type": "boolean"},
            "o": {"$ref": "#/$defs/O"},
            "l": {"type": "array", "items": {"type": "integer"}},
            "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "i": {"type": ["integer", "null"]},
            "e": {"enum": [1, 2]},
        },
        "$defs": {"O": {"type": "object"}},
    }
}


def xml(name: str, **values: str) -> str:
    parameters = "".join([f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()])
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def seed(name: str, **values: str) -> str:
    return xml(name, **values).replace("tool_call>", "seed:tool_call>")


def xml_parser() -> XmlParser:
    return XmlParser(SCHEMAS)


DEEP_CALL, DEEP_CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
DEEP, DEEP_SEP = f"<\uff5ctool\u2581calls\u2581begin\uff5c>{DEEP_CALL}", "<\uff5ctool\u2581sep\uff5c>"
DEEP_END = f"{DEEP_CALL_END}<\uff5ctool\u2581calls\u2581end\uff5c>"
CASES = [
    (HermesParser, "No call <b> here, a < b", "No call <b> here, a < b", []),
    (HermesParser, f"Hi. <tool_call>\n{F}\n</tool_call>\n<tool_call>{G}</tool_call>", "Hi. ", CALLS),
    (HermesParser, f"<tool_call>{F}</tool_call>\n", "", CALLS[:1]),
    (HermesParser, f"\n <tool_call>{F}</tool_call>\n\nAnd then:\n<tool_call>{G}</tool_call>", "\n\nAnd then:\n", CALLS),
    (HermesParser, " \n", " \n", []),
    (HermesParser, f"<tool_call>{G}", "", CALLS[1:]),  # the end of the call was the stop string
    (HermesParser, f"<tool_call>{F}\n{G}</tool_call>", "", CALLS),
    (HermesParser, f"<tool_call>[{F}, {G}]</tool_call>", "", CALLS),
    (HermesParser, "<tool_call>{bad}</tool_call> and <tool_c", "<tool_call>{bad}</tool_call> and <tool_c", []),
    (HermesParser, '<tool_call>{"name": 1, "arguments": {}}</tool_call>', None, []),
    (HermesParser, '<tool_call>{"name": "f", "arguments": []}</tool_call>', None, []),
    (HermesParser, '<tool_call>{"name": "f"', None, []),
    (
        HermesParser,
        '<tool_call>{"name": "g"}</tool_call><tool_call>{"name": "g", "arguments": null}</tool_call>',
        "",
        2 * CALLS[1:],
    ),
    (Llama3Parser, '{"name": "g"}', None, []),  # an answer in JSON, more likely
    (
        HermesParser,
        f"<tool_call>{{bad}}</tool_call><tool_call>{G}</tool_call>",
        "<tool_call>{bad}</tool_call>",
        CALLS[1:],
    ),
    # the end of a call, and line ends and tabs, within a string
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>\n\t\\"y\\""}}</tool_call> ok',
        " ok",
        [ToolCall("f", json.dumps({"a": 'x</tool_call>\n\t"y"'}))],
    ),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> tail', None, []),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [ToolCall("f", '{"a": 1}')],
    ),
    # numbers that are none of JSON, or that no client can read back
    *(
        (HermesParser, f'<tool_call>{{"name": "f", "arguments": {{"a": {x}}}}}</tool_call>', None, [])
        for x in ("NaN", "-Infinity", "1e999", "-1e999")
    ),
    # another name of the arguments, or what OpenAI's clients write around a function
    (HermesParser, f"<tool_call>{LLAMA_F}</tool_call>", "", CALLS[:1]),
    (HermesParser, f'<tool_call>{{"type": "function", "function": {F}}}</tool_call>', "", CALLS[:1]),
    # an end is missing, or there is one too many
    (HermesParser, f"<tool_call>{F}\n<tool_call>{G}</tool_call>", "", CALLS),
    (HermesParser, f"<tool_call>{F} and more", " and more", CALLS[:1]),
    (HermesParser, f"<tool_call>{F}}}</tool_call> ok", " ok", CALLS[:1]),
    (HermesParser, f"<tool_call><tool_call>{G}</tool_call>", "<tool_call>", CALLS[1:]),
    # a string that does not end takes no other call with it
    (
        HermesParser,
        f'<tool_call>{{"name": "f", "arguments": {{"a": "x}}}}</tool_call><tool_call>{G}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "x}}</tool_call>',
        CALLS[1:],
    ),
    # nor is there a call within a string that was cut
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "<tool_call>{} </tool_call>', None, []),
    (MistralParser, '[TOOL_CALLS][{"name": "f", "arguments": {"a": "[TOOL_CALLS]g[ARGS]{}', None, []),
    (Llama3Parser, f"{LLAMA_F}; {LLAMA_G}", "", CALLS),
    (Llama3Parser, f"{LLAMA_F}, {LLAMA_G}", "", CALLS),
    (Llama3Parser, f"<|python_tag|>[{LLAMA_F}, {LLAMA_G}]", "", CALLS),
    (Llama3Parser, '{"name": "g", "parameters": null}', "", CALLS[1:]),
    (Llama3Parser, f"<|python_tag|>{LLAMA_F}\n{LLAMA_G}", "", CALLS),
    (Llama3Parser, f"{G}", "", CALLS[1:]),
    (Llama3Parser, f"I look.\n<|python_tag|>{LLAMA_F}; {LLAMA_G}", "I look.\n", CALLS),
    (Llama3Parser, f"{LLAMA_F} and {LLAMA_G}", f" and {LLAMA_G}", CALLS[:1]),
    (Llama3Parser, f"{LLAMA_F};\n", "", CALLS[:1]),
    (Llama3Parser, "{x} and", None, []),
    (Llama3Parser, "<|python_tag|>print(1)", None, []),
    (Llama3Parser, 'Hello {"name"}', None, []),
    (Llama3Parser, '{"x": 1}', None, []),
    (Llama3Parser, LLAMA_F[:-2], None, []),
    (Llama3Parser, "<|python", None, []),
    (Llama3Parser, "", "", []),
    (Llama3Parser, '{"name": "f", "parameters": {"a": NaN}}', None, []),
    (Llama3Parser, '{"name": "f", "parameters": {"a": "x\n\ty"}}', "", [ToolCall("f", '{"a": "x\\n\\ty"}')]),
    (WholeParser, f"[{LLAMA_F}, {LLAMA_G}]", "", CALLS),
    (WholeParser, f"[{LLAMA_F}", None, []),
    (lambda: WholeParser("g"), "{}", "", CALLS[1:]),
    (lambda: WholeParser("g"), '{"a": "cut', None, []),
    (MistralParser, f"[TOOL_CALLS][{F}, {G}]", "", CALLS),
    (MistralParser, f"Hi [TOOL_CALLS] [{F}] [TOOL_CALLS][{G}]", "Hi ", CALLS),
    (MistralParser, '[TOOL_CALLS]f[ARGS]{"a": "</x> é"}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}', "", CALLS),
    (MistralParser, "[TOOL_CALLS]f{bad}", None, []),
    (MistralParser, "[TOOL_CALLS][1, 2]", None, []),
    (MistralParser, "a [TOOL] b", None, []),
    (MistralParser, "[TOOL_CALLS]f[ARGS]{bad} [TOOL_CALLS]g[ARGS]{}", "[TOOL_CALLS]f[ARGS]{bad} ", CALLS[1:]),
    (MistralParser, "[TOOL_CALLS] is a marker. [TOOL_CALLS]g[ARGS]{}", "[TOOL_CALLS] is a marker. ", CALLS[1:]),
    (DeepSeekParser, f"Ok{DEEP}function{DEEP_SEP}g\n```json\n{{}}\n```{DEEP_END}", "Ok", CALLS[1:]),
    (DeepSeekParser, f'{DEEP}f{DEEP_SEP}{{"a": "</x> é"}}{DEEP_END}', "", CALLS[:1]),
    (DeepSeekParser, f"{DEEP}f{DEEP_SEP}{{bad{DEEP_END}", None, []),
    # the ends within a string, and a string with a fence
    (
        DeepSeekParser,
        f'{DEEP}f{DEEP_SEP}{{"a": "{DEEP_END} ```json"}}{DEEP_END} ok',
        " ok",
        [ToolCall("f", f'{{"a": "{DEEP_END} ```json"}}')],
    ),
    (DeepSeekParser, f"{DEEP}g{DEEP_SEP}{{}}", "", CALLS[1:]),  # the end was the stop string
    (
        DeepSeekParser,
        f"{DEEP}g{DEEP_SEP}{{}}{DEEP_CALL_END}{DEEP_CALL}f{DEEP_SEP}{{bad{DEEP_END}",
        f"{DEEP_CALL}f{DEEP_SEP}{{bad{DEEP_END}",
        CALLS[1:],
    ),
    (xml_parser, xml("f", s="</x> é") + "\n" + xml("g"), "", [ToolCall("f", '{"s": "</x> é"}'), CALLS[1]]),
    (xml_parser, f"I look.\n{xml('g')}", "I look.\n", CALLS[1:]),
    (xml_parser, xml("g").removeprefix("<tool_call>\n") + " Done", " Done", CALLS[1:]),
    (xml_parser, xml("g").removesuffix("\n</tool_call>"), "", CALLS[1:]),  # it was the stop string
    (xml_parser, f"<tool_call>\n{F}\n</tool_call>", "", CALLS[:1]),
    (xml_parser, "<tool_call>\n<function=f>\n<parameter=s>\nhalf", None, []),
    (xml_parser, "a <function b", None, []),
    (
        xml_parser,
        xml("f", s="</parameter>\n</function> and <parameter", n="3"),
        "",
        [ToolCall("f", json.dumps({"s": "</parameter>\n</function> and <parameter", "n": 3}))],
    ),
    (
        xml_parser,
        "<tool_call>\n<function=f>\n<parameter=n>\n3\n<parameter=s>\nx\n</function>\n</tool_call>",
        "",
        [ToolCall("f", '{"n": 3, "s": "x"}')],  # the ends of parameters are missing
    ),
    # the end of a function, or of a call, is missing
    (
        xml_parser,
        xml("f", n="3").replace("</function>\n", "") + " And " + xml("g"),
        " And ",
        [ToolCall("f", '{"n": 3}'), CALLS[1]],
    ),
    (xml_parser, xml("g").removesuffix("</tool_call>") + xml("g"), "", CALLS[1:] * 2),
    (
        xml_parser,
        xml("f", s="a <parameter=n> b </tool_call> c"),
        "",
        [ToolCall("f", '{"s": "a <parameter=n> b </tool_call> c"}')],
    ),
    (
        lambda: SeedParser(SCHEMAS),
        f"Hm.\n{seed('f', n='3')}\n{seed('g')}\n",
        "Hm.\n",
        [ToolCall("f", '{"n": 3}'), CALLS[1]],
    ),
    (SeedParser, seed("g").removesuffix("\n</seed:tool_call>"), "", CALLS[1:]),
    (SeedParser, seed("f", s="</tool_call> x"), "", [ToolCall("f", '{"s": "</seed:tool_call> x"}')]),
    (SeedParser, "a <seed:tool", None, []),
    (SeedParser, f"<seed:tool_call>\n{F}\n</seed:tool_call>", "", CALLS[:1]),
    (
        xml_parser,
        f"Write <function=NAME> in a <tool_call>. {xml('g')}",
        "Write <function=NAME> in a <tool_call>. ",
        CALLS[1:],
    ),
]


def joined(parts: list[str | ToolCall]) -> tuple[str, list[ToolCall]]:
    """The content and the calls."""
    return "".join([x for x in parts if isinstance(x, str)]), [x for x in parts if not isinstance(x, str)]


def in_order(parts: list[str | ToolCall]) -> list[str | ToolCall]:
    """With one text between two calls."""
    groups = groupby(parts, lambda part: isinstance(part, str))
    return [x for is_text, group in groups for x in (["".join(group)] if is_text else group)]


@pytest.mark.parametrize("make, text, content, calls", CASES, ids=map(str, range(len(CASES))))
def test_pieces_of_any_size(make, text, content, calls):
    """`content` None is all of the text."""
    content = text if content is None else content
    expected = in_order(make().feed(text, is_last=True))
    assert joined(expected) == (content, calls)
    rng = random.Random(0)
    for _ in range(50):
        parser, found, start = make(), [], 0
        while start < len(text):
            end = start + rng.choice([1, 2, 3, 8, 30])
            found += parser.feed(text[start:end])
            start = end
        assert in_order(found + parser.feed("", is_last=True)) == expected


def test_random_texts_in_pieces():
    """Whatever a model writes, pieces change nothing, no text is lost, and all arguments are JSON."""
    rng = random.Random(1)
    words = [F, G, "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=n>", "</parameter>"]
    words += ["[TOOL_CALLS]", "[ARGS]", "[", "]", "{", "}", '"', "\n", " ", "f", "3", ":", ",", "NaN", "1e999", "\\"]
    words += [
        "<seed:tool_call>",
        "</seed:tool_call>",
        DEEP,
        DEEP_CALL,
        DEEP_SEP,
        DEEP_CALL_END,
        DEEP_END,
        "```json",
        "<|python_tag|>",
        "x" * 300,
    ]
    for i in range(500):
        make = (HermesParser, xml_parser, MistralParser, Llama3Parser, DeepSeekParser, SeedParser)[i % 6]
        text = "".join(rng.choices(words, k=rng.randrange(1, 12)))
        expected = make().feed(text, is_last=True)
        content, calls = joined(expected)
        assert calls or content == text
        for call in calls:
            assert isinstance(json.loads(call.arguments, parse_constant=pytest.fail), dict)
        parser = make()
        found = [part for character in text for part in parser.feed(character)]
        assert in_order(found + parser.feed("", is_last=True)) == in_order(expected), text


MANY = 10_000  # of which each took hundreds of microseconds when all before it was read again


@pytest.mark.parametrize(
    "make, text",
    [
        (HermesParser, f'<tool_call>{{"name": "f", "arguments": {{"a": "{"</tool_call> " * MANY}"}}}}</tool_call>'),
        (HermesParser, f'<tool_call>{{"a" b}} {"<tool_call>" * MANY}'),
        (Llama3Parser, LLAMA_F.replace('"</x>', "[" + '{"k": 1}, ' * MANY + '"</x>').replace('e9"', 'e9"]')),
        (Llama3Parser, " \n" * 5 * MANY),
        (MistralParser, f"[TOOL_CALLS][{', '.join([G] * MANY)}]"),
        (MistralParser, "[TOOL_CALLS]g[ARGS]{} " * MANY),
        (DeepSeekParser, f'{DEEP}f{DEEP_SEP}{{"a": "{"> " * 5 * MANY}"}}{DEEP_END}'),
        (xml_parser, xml("f", s="<b> </b> </function>" * MANY).removeprefix("<tool_call>\n")),
        (xml_parser, xml("f", s="</tool_call> " * MANY)),
    ],
    ids=map(str, range(9)),
)
def test_time_is_linear(make, text):
    """It was 10 to 30 seconds for each."""
    expected, start = make().feed(text, is_last=True), process_time()
    parser = make()
    found = [part for i in range(0, len(text), 4) for part in parser.feed(text[i : i + 4])]
    assert in_order(found + parser.feed("", is_last=True)) == in_order(expected)
    assert process_time() - start < 5


@pytest.mark.parametrize(
    "key, text, value",
    [
        ("n", "3", 3),
        ("n", "3.0", 3),
        ("n", "three", "three"),
        ("n", "true", "true"),
        ("x", "0.5", 0.5),
        ("x", "NaN", "NaN"),
        ("s", "3", "3"),
        ("s", "null", "null"),
        ("s", "a\n\nb\n", "a\n\nb\n"),
        ("b", "True", True),
        ("b", "false", False),
        ("o", '{"k": [1, null]}', {"k": [1, None]}),
        ("l", "[1, 2]", [1, 2]),
        ("l", "1, 2", "1, 2"),
        ("m", "null", None),
        ("m", "None", None),
        ("m", "7", "7"),
        ("i", "null", None),
        ("i", "7", 7),
        ("e", "2", 2),
        ("unknown", "3", "3"),
    ],
)
def test_arguments_have_the_types_of_their_schemas(key, text, value):
    (call,) = xml_parser().feed(xml("f", **{key: text}), is_last=True)
    assert json.loads(call.arguments) == {key: value} and type(json.loads(call.arguments)[key]) is type(value)


def test_text_is_held_back_no_longer_than_needed():
    parser = HermesParser()
    assert ["".join(parser.feed(piece)) for piece in ("a <", "b", " <tool", "s>", "<tool_call>", "{")] == [
        *("a ", "<b", " ", "<tools>", "", "")
    ]
    assert Llama3Parser().feed("Hello") == ["Hello"]


TEXTS_WITH_REASONING = [
    ("<think>\nHm, a < b </thin\n</think>\n\nYes. </think>", Stage.BEFORE, "\nHm, a < b </thin\n", "Yes. </think>"),
    ("Hm</think>Yes", Stage.INSIDE, "Hm", "Yes"),
    ("Hm, no end </thi", Stage.INSIDE, "Hm, no end </thi", ""),
    # a begin marker that the prompt has already, or that a template leaves to the model
    ("\n<think>\nHm <think></think>Yes", Stage.INSIDE, "\nHm <think>", "Yes"),
    (" <thing></think>Yes", Stage.INSIDE, " <thing>", "Yes"),
    ("\n <th", Stage.INSIDE, "\n <th", ""),
    ("<think>", Stage.INSIDE, "", ""),
    ("\n<think></think>\n\nYes", Stage.BEFORE, "", "Yes"),
    ("Yes <think>", Stage.BEFORE, "", "Yes <think>"),
    ("<thing>", Stage.BEFORE, "", "<thing>"),
    ("<thin", Stage.BEFORE, "", "<thin"),
    (" \n", Stage.BEFORE, "", " \n"),
    ("", Stage.BEFORE, "", ""),
    ("<think>Yes</think>", Stage.ENDED, "", "<think>Yes</think>"),
]


def in_pieces(parser: ReasoningParser, text: str, rng: random.Random, has_tokens: bool) -> tuple[str, str]:
    """What a parser finds in pieces of a text, of which it has the tokens (characters), some of them ahead, or not."""
    found, start, num_ahead = ("", ""), 0, 0
    while start < len(text):
        end = start + rng.choice([1, 2, 3, 8, 30])
        ahead = min(len(text), end + rng.choice([0, 1, 5]))
        ids = [*map(ord, text[max(start, num_ahead) : ahead])] if has_tokens else None
        found, num_ahead = (
            tuple(map("".join, zip(found, parser.feed(text[start:end], False, ids)))),
            max(num_ahead, ahead),
        )
        start = end
    rest = parser.feed("", True, [] if has_tokens else None)
    return tuple(map("".join, zip(found, rest)))


@pytest.mark.parametrize("text, stage, reasoning, rest", TEXTS_WITH_REASONING)
def test_reasoning(text, stage, reasoning, rest):
    make = lambda markers: ReasoningParser(Reasoning(markers, stage))
    of_text, of_tokens = TextMarkers(THINK), CharacterTokenizer().markers()
    assert make(of_text).feed(text, is_last=True) == (reasoning, rest)
    assert make(of_tokens).feed(text, True, [*map(ord, text)]) == (reasoning, rest)
    rng = random.Random(0)
    for i in range(50):
        markers = of_tokens if i % 2 else of_text
        assert in_pieces(make(markers), text, rng, has_tokens=bool(i % 2)) == (reasoning, rest)


def test_markers_that_are_tokens():
    """Then the same text, written by other tokens, is a part of the reasoning."""
    tokenizer = CharacterTokenizer("<think>", "</think>")
    pieces = ["Hm ", *"</think>", " more", "</think>", "\n\nYes"]
    ids = [[ord(x) for x in piece] if piece != "</think>" else tokenizer.encode(piece) for piece in pieces]
    for is_streamed in (False, True):
        reasoning = Reasoning(tokenizer.markers(), Stage.INSIDE)
        parser = ReasoningParser(reasoning)
        if is_streamed:
            found = [parser.feed(piece, False, own) for piece, own in zip(pieces, ids)] + [parser.feed("", True, [])]
            found = tuple(map("".join, zip(*found)))
        else:
            found = parser.feed("".join(pieces), True, [i for own in ids for i in own])
        assert found == ("Hm </think> more", "Yes")
        assert reasoning.num_tokens == reasoning.num_thoughts == sum(map(len, ids[:-1])) and reasoning.num_ends == 2


@pytest.mark.parametrize(
    "name, prompt, stage",
    [
        ("think", "<|user|>Hi<|assistant|>", Stage.BEFORE),
        ("think", "<|user|>Hi<|assistant|><think>\n", Stage.INSIDE),
        ("think", "<|user|>Hi<|assistant|><think>\nHm, let", Stage.INSIDE),  # the answer continues that
        ("think", "<|user|>Hi<|assistant|><think>\nHm, a <tool_call> or", Stage.INSIDE),
        ("think", "<|user|>Hi<|assistant|><think>\n\n</think>\n\n", Stage.ENDED),
        ("think", "<|user|>What is <think>?<|assistant|>", Stage.BEFORE),
        ("think", "<|user|>Hi<|assistant|></think>", Stage.ENDED),
        ("deepseek_r1", "<|user|>Hi<|assistant|>", Stage.INSIDE),
        ("deepseek_r1", "<|user|>Hi<|assistant|><think>\n", Stage.INSIDE),
        ("deepseek_r1", "<|user|>Hi<|assistant|><think>\n\n</think>\n\n", Stage.ENDED),
        ("mistral", "<|user|>Hi<|assistant|>[THINK]", Stage.INSIDE),
    ],
)
def test_what_the_prompt_has_opened(name, prompt, stage):
    for tokenizer in (
        CharacterTokenizer("<|user|>", "<|assistant|>", "<think>", "</think>", "<tool_call>"),
        CharacterTokenizer("<|assistant|>"),
    ):
        assert tokenizer.markers(name).stage_after(tokenizer.encode(prompt)) is stage


def test_special_tokens_inside_the_reasoning():
    """Without a budget, Seed-OSS's template begins a remark about the budget, which is no turn."""
    tokenizer = CharacterTokenizer("<seed:bos>", "<seed:cot_budget_reflect>")
    for token in tokenizer.added_tokens_decoder.values():
        token.special = True
    prompt = tokenizer.encode("<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>")
    assert tokenizer.markers("seed_oss").stage_after(prompt) is Stage.INSIDE


def test_format_from_the_chat_template():
    granite = """{"name": "add", "parameters": {}} ... answer <function_call> {"name": ..., "arguments": ...}"""
    assert parser_for(granite) is None
    assert parser_for("... return <tool_call>{...}</tool_call>") == "hermes"
    assert parser_for("<tool_call>\n<function=example>\n<parameter=x>") == "qwen3_coder"
    template = "{%- set toolcall_begin_token = '<seed:tool_call>' -%}{%- set think_begin_token = '<seed:think>' -%}"
    assert parser_for(template + '"\n<function="') == format_of(template) == "seed_oss"
    assert parser_for('Respond in the format {"name": function name, "parameters": ...}') == "llama3_json"
    assert parser_for("[AVAILABLE_TOOLS] ... [TOOL_CALLS]") == "mistral"
    assert parser_for(f"{{{{ '{DEEP}' }}}}") == "deepseek_v3"
    assert parser_for("{{ messages }}") is None and parser_for("") is None
    assert format_of("{{ '<think>\\n' }}") == format_of("x.split('</think>')") == "think"
    assert format_of("'</think>' in content <\uff5cAssistant\uff5c>") == "deepseek_r1"
    assert format_of("[THINK]") == "mistral" and format_of("{{ messages }}") is None
    assert has_unknown_reasoning("{{ message.reasoning_content }}") and not has_unknown_reasoning("<think> thinking")
    assert template_text({"default": "a", "tool_use": "<tool_call>"}) == "a\n<tool_call>" and template_text(None) == ""


def test_ids_of_calls():
    assert re.fullmatch("[A-Za-z0-9]{9}", MistralParser.new_id()) and HermesParser.new_id().startswith("call_")
    parser = AnswerParser(None, MistralParser(), MistralParser.new_id)
    (found,) = parser.feed(f"[TOOL_CALLS][{F}]", [], True)
    assert [len(call["id"]) for call in found["tool_calls"]] == [9]


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
    tokenizer = CharacterTokenizer()
    request = SimpleNamespace(prompt_token_ids=tokenizer.encode("<think>\n"), num_cached_tokens=0)
    answer = ChatAnswer(body, "m", [request], Formats("hermes", reasoning=tokenizer.markers()))
    pieces = ["Well", "</think>", "\n\nHi", f"<tool_call>{F}", "</tool_call>", f"<tool_call>{G}</tool_call>", ""]
    choices = []
    for i, piece in enumerate(pieces):
        reason = "stop" if i == len(pieces) - 1 else None
        choices += answer.chunk_choices(0, StreamEvent(0, 0, 7, piece, [*map(ord, piece)], reason, None, None))
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


@pytest.mark.parametrize("choice", [None, "auto", "none", "required", {"type": "function", "function": {"name": "f"}}])
def test_tools_in_an_unknown_format(choice):
    tool = {"type": "function", "function": {"name": "f"}}
    body = ChatBody(messages=[{"role": "user", "content": "x"}], tools=[tool], tool_choice=choice)
    assert Formats("hermes").chat_params(body, False) == Formats("none").chat_params(body, False) == {}
    if choice in (None, "auto"):
        with pytest.raises(ApiError, match="--tool-call-parser"):
            Formats(None).chat_params(body, False)
    else:
        assert Formats(None).chat_params(body, False) == {}


def test_parameters_that_formats_add():
    body = lambda **fields: ChatBody(messages=[{"role": "user", "content": "x"}], **fields)
    formats = Formats("mistral", "mistral", CharacterTokenizer().markers("mistral"), frozenset(["[THINK]"]))
    shown = {"skip_special_tokens": False}
    assert formats.chat_params(body(), False) == shown
    assert formats.chat_params(body(), True) == formats.chat_params(body(stop="x"), False)
    assert formats.chat_params(body(stop="x"), False) == shown | {"reasoning_parser": "mistral"}
    assert formats.chat_params(body(thinking_token_budget=7), False) == shown | {"reasoning_parser": "mistral"}
    assert formats.chat_params(body(thinking_token_budget=-1), False) == shown
    with pytest.raises(ApiError, match="thinking_token_budget=7"):
        Formats("hermes").budget_params(body(thinking_token_budget=7))


def test_chunks_behind_the_reasoning_are_plain():
    """They are made of a frame and the text, as most of a stream."""
    tokenizer = CharacterTokenizer()
    request = SimpleNamespace(prompt_token_ids=[1], num_cached_tokens=0)
    body = ChatBody(messages=[{"role": "user", "content": "x"}])
    answer = ChatAnswer(body, "m", [request], Formats(None, reasoning=tokenizer.markers()))
    made = []
    for piece in ("<think>", "Hm", "</think>", "\n", "Yes", " or", " no"):
        answer._events(0, [StreamEvent(0, 0, 7, piece, [*map(ord, piece)], None, None, None)])
        made.append(bool(answer._frames))
    assert made == [False] * 4 + [True] * 3
    chunk = answer._events(0, [StreamEvent(0, 0, 7, "<think>", [*map(ord, "<think>")], None, None, None)])
    (choice,) = json.loads(chunk.decode().removeprefix("data: "))["choices"]
    assert choice["delta"] == {"content": "<think>"}
