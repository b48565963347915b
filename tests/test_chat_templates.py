"""Prompts of conversations: what transformers makes of what a client has sent, for templates of several kinds."""

import json
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from common import TINY
from transformers import AutoTokenizer

from nanovllm.requests.chat_templates import TemplateForms, forms_of
from nanovllm.requests.prompts import render_chat
from nanovllm.utils.loader import load_tokenizer

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
pytest.importorskip("openai")  # of test_server

import test_server

from nanovllm.serve import chat
from nanovllm.serve.anthropic_api import MessagesBody, chat_body
from nanovllm.serve.errors import ApiError
from nanovllm.serve.protocol import ChatBody
from nanovllm.serve.responses_api import ResponsesBody, _translate

# -- templates, in the ways of those that models come with -------------------------------------------------------------

TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
BEGIN, END = "{% for message in messages %}<{{ message.role }}>", "{% endfor %}{{ '<a>' if add_generation_prompt }}"
CALLS = """{% for call in message.tool_calls or [] %}{% set call = call.function or call %}
{{ call.name }} {{ call.arguments | tojson }}{% endfor %}"""
TEXT_CALLS = """{% for call in message['tool_calls'] or [] %}
{{ call['type'] + ' ' + call['function']['name'] + '\\n' + call['function']['arguments'] }}{% endfor %}"""
NAMED = "role", "content", "tool_calls", "reasoning", "reasoning_content", "thinking"
REST = f"""{{% for name, value in message | dictsort if name not in {NAMED} %}}
{{{{ name }}}}: {{{{ value | tojson }}}}{{% endfor %}}
"""
PARTS = "{% for part in message['content'] %}[{{ part | tojson }}]{% endfor %}"
MACRO = """{% macro render(value) %}{% if value is string %}{{ value }}{% elif value is iterable %}
{% for item in value %}[{{ item['text'] }}]{% endfor %}{% endif %}{% endmacro %}"""


class Case(NamedTuple):
    template: str
    forms: TemplateForms
    needs_content: bool  # fails for a message that has none


def case(content: str, calls: str = CALLS, before: str = "", roles: str = "", needs_content=False, **forms) -> Case:
    template = f"{before}{TOOLS}{BEGIN}{content}{calls}{REST}{END}"
    return Case(template, TemplateForms(roles=frozenset(roles.split()), **forms), needs_content)


CASES = {
    "joined": case("{{ message.role + '\\n' + message['content'] + '\\n' }}", needs_content=True),
    "printed": case("{{ message.content }}"),
    "stripped": case("{% set content = message.content | trim %}{{ content }}"),
    # a list would be dropped
    "text-or-nothing": case(
        "{% if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}"
        "{% endif %}{{ content.split('</think>')[-1] }}"
    ),
    "parts-or-text": case(
        f"{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}{PARTS}{{% endif %}}",
        content_parts=True,
    ),
    "parts": case(PARTS, content_parts=True, content_text=False),
    "parts-by-filter": case(
        "{{ message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join(' + ') }}",
        content_parts=True,
        content_text=False,
    ),
    "parts-in-a-macro": case("{{ render(message.get('content')) | trim }}", before=MACRO, content_parts=True),
    "parts-of-a-copy": case(
        "{% set found = message.content if message.content is not none else [] %}"
        "{% if found is string %}{{ found }}{% else %}{% for x in found or [] %}({{ x.text }}){% endfor %}{% endif %}",
        content_parts=True,
    ),
    "missing": case(
        "{% if message['content'] is defined and message['content'] is not none %}{{ '\\n' + message['content'] }}"
        "{% else %}NOTHING{% endif %}",
    ),
    "looked-for": case(
        "{% if 'content' not in message %}NOTHING{% else %}{{ message.content }}{% endif %}",
    ),
    "compared-with-none": case(
        "{% if message.content != none %}{{ message.content }}{% endif %}",
    ),
    "text-arguments": case("{{ message.content }}", TEXT_CALLS, arguments_text=True),
    "either-arguments": case(
        "{{ message.content }}",
        "{% for call in message.tool_calls or [] %}{% set arguments = call.function.arguments %}"
        "{% if arguments is string %}{{ '\\n' + arguments }}{% else %}{{ '\\n' + (arguments | tojson) }}{% endif %}"
        "{% endfor %}",
    ),
    "reasoning": case("{{ message.content }}{% if message.reasoning %}({{ message.reasoning }}){% endif %}"),
    "reasoning-content": case("{{ message.content }}({{ message['reasoning_content'] or '' }})"),
    "developer": case(
        "{% if message.role in ['system', 'developer'] %}SYSTEM {% endif %}{{ message.content }}",
        roles="developer",
    ),
    "generation": case(
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
        "{% continue %}{% endif %}{{ message['content'] }}",
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.mark.parametrize("name", CASES)
def test_forms(name):
    template, forms, _ = CASES[name]
    found = forms_of(template)
    assert found._replace(roles=forms.roles, reasoning=forms.reasoning) == forms
    assert ("developer" in found.roles) == ("developer" in forms.roles) and "user" not in found.roles


@pytest.mark.parametrize(
    "template", ["{% for", "{{ 1 + }}", "{% unknown %}", "", "plain", "{{ x" + " + x" * 5000 + " }}"]
)
def test_forms_of_what_is_no_template(template):
    assert forms_of(template) == TemplateForms()


# -- random conversations ----------------------------------------------------------------------------------------------


class Client:
    """Sends what clients may send, with its keys in any order."""

    WORDS = "a", "b c", "", 'ünï \n"q" \\ <tag>', "{{ x }}", "7", "नमस्ते", "👩‍👩‍👧"

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self.number, self.chance = self._random.randint, lambda probability=0.5: self._random.random() < probability

    def one_of(self, *values: Any) -> Any:
        return self._random.choice(values)

    def shuffled(self, entries: dict) -> dict:
        return dict(self._random.sample([*entries.items()], len(entries)))

    def word(self) -> str:
        return self.one_of(*self.WORDS)

    def words(self) -> list[str]:
        return [self.word() for _ in range(self.number(1, 3))]

    def value(self, depth: int = 0) -> Any:
        if depth < 2 and self.chance(0.6):
            return self.one_of(self.object(depth + 1), [self.value(depth + 1) for _ in range(self.number(0, 2))])
        return self.one_of(self.word(), self.number(-5, 10**6), 1.5, None, True)

    def object(self, depth: int = 0) -> dict:
        return {f"{self.one_of(*'zyxabc')}{i}": self.value(depth) for i in range(self.number(0, 3))}

    def arguments(self) -> str:
        return json.dumps(self.object(), ensure_ascii=self.chance(), indent=self.one_of(None, 1))

    def part(self, kind: str, text: str) -> dict:
        return self.shuffled({"type": kind, "text": text})

    def function(self, schema_name: str = "parameters") -> dict:
        properties = {f"p{i}": self.shuffled({"type": "string"} | self.object()) for i in (2, 1)}
        schema = {"type": "object", "properties": properties, "required": ["p1"]}
        schema = self.shuffled(schema | self.one_of({"description": self.word()}, {}))
        options = self.one_of({"description": self.word()}, {}) | self.one_of({"strict": self.chance()}, {})
        return self.shuffled({"name": f"f{self.number(0, 9)}", schema_name: schema} | options)


Requests = tuple[dict, list[dict], list[dict] | None]  # a body, and the messages and tools that it means


def with_content(plain: dict, content: Any, case: Case) -> dict:
    """A message with what the client has sent, if the template can take it. A null is nothing, as in transformers 5."""
    forms = case.forms
    if content is None and not case.needs_content:
        return {name: value for name, value in plain.items() if name != "content"}
    if isinstance(content, list) and not forms.content_parts:
        content = "\n".join(part["text"] for part in content)
    elif not isinstance(content, list) and not forms.content_text:
        content = [{"type": "text", "text": content}] if content else []
    return plain | {"content": "" if content is None else content}


def calls_of(found: list[tuple[str, str, str]], forms: TemplateForms) -> list[dict]:
    """Calls, of (id, name, JSON of the arguments)."""
    functions = [{"name": name, "arguments": x if forms.arguments_text else json.loads(x)} for _, name, x in found]
    return [{"id": call[0], "type": "function", "function": function} for call, function in zip(found, functions)]


def chat_request(client: Client, case: Case) -> Requests:
    """Of /v1/chat/completions."""
    sent, meant = [], []
    for _ in range(client.number(1, 5)):
        role = client.one_of("system", "developer", "user", "assistant", "tool")
        content = client.one_of(client.word(), [client.part("text", text) for text in client.words()])
        message: dict[str, Any] = {"role": role, "content": content}
        calls: list[dict] = []
        if client.chance():
            message |= {"name": client.word(), "x_unknown": client.value()}
        if role == "tool":
            message["tool_call_id"] = "call_1"
        if role == "assistant":
            if client.chance(0.5):
                message["content"] = content = None
            if content is None and client.chance(0.5):
                del message["content"]
            if client.chance(0.3):
                message |= dict.fromkeys(("refusal", "audio", "function_call", "annotations", "reasoning"))
            if client.chance(0.3):
                message[client.one_of("reasoning", "reasoning_content")] = "Hm."
            found = [(f"call_{i}", f"f{i}", client.arguments()) for i in range(client.number(0, 2))]
            calls = calls_of(found, case.forms)
            if found or client.chance(0.6):
                message["tool_calls"] = calls_of(found, TemplateForms(arguments_text=True)) or client.one_of([], None)
        sent.append(client.shuffled(message))
        kept = {name: value for name, value in message.items() if name != "tool_calls"}
        plain = {name: value for name, value in kept.items() if value is not None}
        if thoughts := plain.get("reasoning") or plain.get("reasoning_content"):
            plain |= {"reasoning": thoughts, "reasoning_content": thoughts}
        plain |= {"tool_calls": calls} if calls else {}
        plain["role"] = "system" if role == "developer" and role not in case.forms.roles else role
        meant.append(with_content(plain, content, case))
    body: dict[str, Any] = {"messages": sent}
    tools = None
    if client.chance(0.7):
        tools = [{"type": "function", "function": client.function()} for _ in range(2)]
        tools[0] |= {"x_unknown": client.value(), "function": tools[0]["function"] | {"x": None}}
        body["tools"] = tools = [client.shuffled(tool) for tool in tools]
    return client.shuffled(body), meant, tools


def messages_request(client: Client, case: Case) -> Requests:
    """Of /v1/messages. The last message is a user's, as an assistant's would be continued."""
    sent, meant = [], []
    for i in reversed(range(client.number(1, 5))):
        texts = [text for text in client.words() if text]
        blocks: list[dict] = [client.part("text", text) for text in texts]
        for block in blocks[:1]:
            block["cache_control"] = {"type": "ephemeral"}
        parts: Any = [{"type": "text", "text": text} for text in texts]
        content = parts if len(parts) > 1 else texts[0] if texts else None
        if i % 2:
            found = [("call_1", "f", json.dumps(client.object(), ensure_ascii=False))] * client.number(0, 1)
            uses = [{"type": "tool_use", "id": call, "name": name, "input": json.loads(x)} for call, name, x in found]
            sent.append({"role": "assistant", "content": blocks + [client.shuffled(use) for use in uses]})
            plain = {"role": "assistant"} | ({"tool_calls": calls_of(found, case.forms)} if found else {})
            meant.append(with_content(plain, content, case))
            continue
        if client.chance() or not texts:
            result = client.one_of("sunny", [{"type": "text", "text": text} for text in ("a", "b")])
            blocks.append(client.shuffled({"type": "tool_result", "tool_use_id": "call_1", "content": result}))
            meant.append(with_content({"role": "tool", "tool_call_id": "call_1"}, result, case))
        sent.append({"role": "user", "content": blocks})
        if texts:
            meant.append(with_content({"role": "user"}, content, case))
    body: dict[str, Any] = {"messages": sent, "max_tokens": 5}
    tools = None
    if client.chance(0.7):
        given = [client.function("input_schema") for _ in range(2)]
        body["tools"] = [tool | {"cache_control": {"type": "ephemeral"}} for tool in given]
        names = {"input_schema": "parameters"}
        tools = [{"type": "function", "function": {names.get(k, k): v for k, v in tool.items()}} for tool in given]
    return client.shuffled(body), meant, tools


def responses_request(client: Client, case: Case) -> Requests:
    """Of /v1/responses."""
    sent, meant = [], []
    for i in range(client.number(1, 5)):
        texts = client.words()
        content: Any = [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else texts[0]
        if client.chance():
            role = client.one_of("user", "assistant", "system")
            kind = "output_text" if role == "assistant" else "input_text"
            item = {"role": role, "content": [client.part(kind, text) | {"annotations": []} for text in texts]}
            sent.append(client.shuffled(item | client.one_of({"type": "message"}, {})))
            meant.append(with_content({"role": role}, content, case))
            continue
        call = (f"c{i}", "f", client.arguments())
        item = {"type": "function_call", "call_id": call[0], "name": call[1], "arguments": call[2]}
        output = {"type": "function_call_output", "call_id": call[0]}
        output["output"] = [client.part("input_text", text) for text in texts]
        sent += [{"role": "user", "content": "Now."}, client.shuffled(item), client.shuffled(output)]
        meant.append(with_content({"role": "user"}, "Now.", case))
        meant.append(with_content({"role": "assistant", "tool_calls": calls_of([call], case.forms)}, None, case))
        meant.append(with_content({"role": "tool", "tool_call_id": call[0]}, content, case))
    body: dict[str, Any] = {"input": sent}
    if client.chance():
        body["instructions"] = "Be kind."
        meant.insert(0, with_content({"role": "system"}, "Be kind.", case))
    tools = None
    if client.chance(0.7):
        body["tools"] = given = [client.shuffled({"type": "function"} | client.function()) for _ in range(2)]
        functions = [{name: value for name, value in tool.items() if name != "type"} for tool in given]
        tools = [{"type": "function", "function": function} for function in functions]
    return client.shuffled(body), meant, tools


APIS = {
    "chat": (chat_request, lambda body: ChatBody.model_validate(body)),
    "messages": (messages_request, lambda body: chat_body(MessagesBody.model_validate(body))),
    "responses": (responses_request, lambda body: _translate(ResponsesBody.model_validate(body), None)[0]),
}


def prompt_of(tokenizer, body: ChatBody, template: str | None) -> str:
    return render_chat(tokenizer, chat.conversation(body), chat.template_arguments(body) | {"chat_template": template})


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", CASES)
def test_random_requests(tokenizer, name, api):
    """Keys in the client's order, and unknown ones; texts, parts, nulls and calls as the template can take them."""
    case, (make, read) = CASES[name], APIS[api]
    for seed in range(40):
        sent, meant, tools = make(Client(seed), case)
        prompt = prompt_of(tokenizer, read(json.loads(json.dumps(sent))), case.template)
        options = dict(chat_template=case.template, tools=tools, tokenize=False, add_generation_prompt=True)
        assert prompt == tokenizer.apply_chat_template(meant, **options), f"seed {seed}: {sent}"


def test_prompts_over_http(tokenizer, small_model, monkeypatch):
    """What /tokenize says, and the prompt of an answer, are the same."""
    case = CASES["parts-or-text"]
    monkeypatch.setattr(test_server, "FOLDER", small_model)
    with test_server.running(chat_template=case.template, tool_call_parser="hermes") as server:
        for seed in range(8):
            sent, meant, tools = chat_request(Client(seed), case)
            options = dict(chat_template=case.template, tools=tools, tokenize=False, add_generation_prompt=True)
            prompt = tokenizer.apply_chat_template(meant, **options)
            expected = tokenizer.encode(prompt, add_special_tokens=False)
            assert httpx.post(f"{server.url}/tokenize", json=sent).json()["tokens"] == expected
            body = sent | {"max_tokens": 1, "return_token_ids": True}
            assert httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["prompt_token_ids"] == expected


# -- what it means -----------------------------------------------------------------------------------------------------

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}
DUMP = "{% for message in messages %}{{ message | tojson }}\n{% endfor %}{{ tools | tojson if tools }}"
KEYS = "{% for message in messages %}{{ message | list | join(' ') }}\n{% endfor %}"


def rendered(tokenizer, messages: list[dict], template: str, **fields) -> str:
    return prompt_of(tokenizer, ChatBody.model_validate({"messages": messages, **fields}), template)


@pytest.mark.parametrize("calls", [[], None])
def test_no_calls(tokenizer, calls):
    """The key alone makes some templates write calls."""
    template = "{% for message in messages %}{% if 'tool_calls' in message %}{{ message.tool_calls[0].function.name }}"
    template += "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    message = {"role": "assistant", "content": "Hi", "tool_calls": calls}
    assert rendered(tokenizer, [message], template) == "Hi"
    assert render_chat(tokenizer, [message], {"chat_template": template}) == "Hi"
    assert rendered(tokenizer, [message | {"tool_calls": [CALL]}], template) == "f"


def test_older_calls_and_functions(tokenizer):
    """They are calls of tools, with the same order of keys."""
    message = {"role": "assistant", "function_call": CALL["function"], "content": None}
    function = {"parameters": {"type": "object"}, "x": None, "name": "f"}
    prompt = rendered(tokenizer, [message], DUMP, functions=[function])
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": 2}}}]
    *_, dumped, tools = prompt.splitlines()
    assert json.loads(dumped) == {"role": "assistant", "tool_calls": calls} and '{"b": 1, "a": 2}' in dumped
    assert tools == json.dumps([{"type": "function", "function": function}])
    message = {"role": "assistant", "tool_calls": [CALL], "function_call": None}
    assert rendered(tokenizer, [message], KEYS) == "role tool_calls\n"


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_no_content(tokenizer, content):
    """Nothing is printed for it, and where a template can't do without one, it is empty."""
    messages = [{"role": "assistant", "tool_calls": [CALL]} | content, {"role": "tool", "content": "Hi"}]
    for template, prompt in (
        ("{% for message in messages %}[{{ message.content }}]{% endfor %}", "[][Hi]"),
        ("{% for message in messages %}{{ '[' + message.content + ']' }}{% endfor %}", "[][Hi]"),
        ("{% for message in messages %}{{ message.content is defined }} {% endfor %}", "False True "),
    ):
        assert rendered(tokenizer, messages, template) == prompt
        assert render_chat(tokenizer, messages, {"chat_template": template}) == prompt
    with pytest.raises(ValueError, match="the chat template fails .*content"):
        rendered(tokenizer, [{"role": "user"} | content], "{{ 'Hi ' + messages[0].content }}")
    with pytest.raises(ValueError, match="the chat template fails .too short"):
        rendered(
            tokenizer, messages, "{% if messages[0].content|length < 3 %}{{ raise_exception('too short') }}{% endif %}"
        )


def test_order_of_a_message(tokenizer):
    message = {"z": [{"y": None, "x": 1}], "content": "Hi", "name": None, "role": "user", "a": "b"}
    assert (
        rendered(tokenizer, [message], DUMP)
        == '{"z": [{"y": null, "x": 1}], "content": "Hi", "role": "user", "a": "b"}\n'
    )


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", CASES["parts-or-text"].template])
@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {"text": "x"}, 5])
def test_parts_that_are_not_text(tokenizer, template, part):
    """Also for a template that has a place for them."""
    with pytest.raises(ValueError, match="messages: content part .* must be text"):
        render_chat(tokenizer, [{"role": "user", "content": [part]}], {"chat_template": template})


def test_arguments_that_are_no_object(tokenizer):
    """A server refuses them; `LLM.chat` leaves them to the template."""
    for arguments in ("[1]", "{", "x", 5, [1]):
        message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        with pytest.raises(ApiError, match=r"messages\[0\].tool_calls: the arguments must be a JSON object"):
            rendered(tokenizer, [message], DUMP)
    message["tool_calls"][0]["function"]["arguments"] = "{"
    assert '"arguments": "{"' in render_chat(tokenizer, [message], {"chat_template": DUMP})


# -- templates with names ----------------------------------------------------------------------------------------------

FOLDER = "additional_chat_templates"
TEMPLATES = {
    "default": "plain {{ messages[0].content }}",
    "tool_use": "{{ tools[0].function.name }}",
    "rag": "documents",
}


@pytest.mark.parametrize("place", ["tokenizer_config.json", "folder"])
def test_templates_with_names(tmp_path, place):
    """Of Hermes 3 and Command R: with tools, that for tools is taken. Transformers 5 writes them to a folder."""
    shutil.copy(Path(TINY) / "tokenizer.json", tmp_path)
    config = json.loads((Path(TINY) / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": name, "template": text} for name, text in TEMPLATES.items()]
    if place == "folder":
        del config["chat_template"]
        (tmp_path / "chat_template.jinja").write_text(TEMPLATES["default"])
        (tmp_path / FOLDER).mkdir()
        for name in ("tool_use", "rag"):
            (tmp_path / FOLDER / f"{name}.jinja").write_text(TEMPLATES[name])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = load_tokenizer(str(tmp_path))
    assert found.chat_template == TEMPLATES
    question, tools = [{"role": "user", "content": "Hi"}], [{"type": "function", "function": {"name": "f"}}]
    assert rendered(found, question, None) == "plain Hi" and rendered(found, question, None, tools=tools) == "f"
    assert rendered(found, question, None, tools=tools, tool_choice="none") == "plain Hi"
    assert rendered(found, question, "rag", tools=tools) == "documents"
    for wanted in ("rag", TEMPLATES["rag"], None):
        chat.template_arguments(ChatBody.model_validate({"messages": question, "chat_template": wanted}), TEMPLATES)
    with pytest.raises(ApiError, match="chat_template: is a program"):
        chat.template_arguments(ChatBody.model_validate({"messages": question, "chat_template": "other"}), TEMPLATES)


def test_no_template_of_its_own(tokenizer):
    with pytest.raises(ValueError, match="the chat template fails .*multiple chat templates with no default"):
        found = load_tokenizer(TINY)
        found.chat_template = {"tool_use": "x"}
        render_chat(found, [{"role": "user", "content": "Hi"}], {})


def test_roles_are_the_ones_that_http_takes():
    """Names that the template compares are known, too, and a template of the caller may take any name."""
    tokenizer = load_tokenizer(TINY)
    messages = [{"role": "usr", "content": "x"}]
    for wrong in (messages, [{"role": 5, "content": "x"}]):
        problem = (
            f"messages: role {wrong[0]['role']!r}: must be one of assistant, developer, function, system, tool, user"
        )
        with pytest.raises(ValueError, match=problem):
            render_chat(tokenizer, wrong, {})
    template = "{% for m in messages %}{% if m.role == 'usr' %}{{ m.content }}{% endif %}{% endfor %}"
    assert render_chat(tokenizer, messages, {"chat_template": template.replace("usr", "other")}) == ""
    tokenizer.chat_template = template
    assert render_chat(tokenizer, messages, {}) == "x"
