"""The HTTP API, with the `openai` package as its client, and with raw sockets for what no client would send."""

import asyncio
import copy
import gc
import json
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Literal, Optional

import pytest

pytest.importorskip("fastapi")
pydantic = pytest.importorskip("pydantic")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
jsonschema = pytest.importorskip("jsonschema")

import tokenizers

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.engine.outputs import OutputKind
from nanovllm.requests.input_processor import InputProcessor
from nanovllm.requests.stream_event import StreamEvent
from nanovllm.serve import AsyncLLM, answers, http_responses, metrics, request_limits
from nanovllm.serve.address import listening_socket
from nanovllm.serve.answer_formats import Formats
from nanovllm.serve.async_request import AsyncRequest
from nanovllm.serve.chat import ChatAnswer
from nanovllm.serve.completions import CompletionAnswer, Echo
from nanovllm.serve.prompt_lanes import PromptLane, longest_token
from nanovllm.serve.protocol import ChatBody, CompletionBody
from nanovllm.serve.server import make_server
from nanovllm.serve.settings import ServerSettings
from nanovllm.serve.structured import structured_outputs
from nanovllm.serve.turns import CLIENT, ClientTurns, LoopTurns
from nanovllm.utils.model_files import BUNDLED

ENGINE = dict(dtype="float32", device="cpu", kvcache_block_size=16, num_kvcache_blocks=256)
MODEL = "tiny-qwen3"
FOLDER = MODEL  # or what a fixture sets
KEY = "a secret k\u00e9y"
QUESTION = [{"role": "user", "content": "Count from 5 to 19."}]
PROMPT = "HAMLET.\nTo be, or"
GREEDY = dict(model=MODEL, temperature=0, max_tokens=12)


class RunningServer:
    """A server in a thread of this process, on a free port."""

    def __init__(self, engine_settings=None, **settings):
        self.settings = ServerSettings(**{"port": 0, "drain_seconds": 5} | settings)
        self.llm = AsyncLLM(FOLDER, **ENGINE | (engine_settings or {}))
        listener = listening_socket(self.settings)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = make_server(self.llm, self.settings, str(BUNDLED / MODEL))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        self.llm.exit()
        assert not self.thread.is_alive()

    def wait_until_free(self, seconds: float = 5.0) -> None:
        """No request is left, and all blocks are free."""
        end = time.perf_counter() + seconds
        while self.llm.num_unfinished or self.llm.engine.stats()["blocks"]["used"]:
            assert time.perf_counter() < end, self.llm.engine.stats()
            time.sleep(0.005)

    def wait_until_running(self) -> None:
        while not self.llm.engine.stats()["requests"]["running"]:
            time.sleep(0.002)

    def send(self, *pieces: bytes, pause: float = 0.0, timeout: float = 5.0, until: bytes | None = None) -> bytes:
        """The answer to raw bytes, until the server closes the connection or `until`; what has arrived by `timeout`."""
        received = b""
        with closing(socket.create_connection(("127.0.0.1", self.port), timeout)) as connection:
            try:
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(pause)
                while (until is None or until not in received) and (data := connection.recv(65536)):
                    received += data
            except (TimeoutError, ConnectionError):
                pass
        return received


def wait_for(condition, seconds: float = 10.0) -> None:
    end = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < end
        time.sleep(0.002)


@contextmanager
def running(*arguments, **settings):
    server = RunningServer(*arguments, **settings)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module", autouse=True)
def use_small_model(small_model):
    """No text matters, and its steps take less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "FOLDER", small_model)
        yield


@pytest.fixture(scope="module")
def server():
    with running(max_body_bytes=100_000, max_answers=8, body_timeout=0.5, tool_call_parser="hermes") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def post(server):
    with httpx.Client(base_url=server.url, timeout=20) as http:
        headers = {"content-type": "application/json"}
        yield lambda path, body: http.post(path, content=json.dumps(body), headers=headers)


@pytest.fixture(scope="module")
def offline():
    with LLM(FOLDER, **ENGINE) as llm:
        yield llm


EXPECTED = {}  # by prompt and parameters


def expected(offline, prompt, **params):
    """The output of `offline`, which computes it once."""
    key = json.dumps([prompt, params], sort_keys=True)
    if key not in EXPECTED:
        ask = offline.chat if isinstance(prompt, list) and isinstance(prompt[0], dict) else offline.generate
        sampling = SamplingParams(**{"temperature": 0, "max_tokens": 12} | params)
        (EXPECTED[key],) = ask(prompt, sampling, use_tqdm=False)
    return EXPECTED[key]


# -- the openai package ------------------------------------------------------------------------------------------------


def test_models(client, server):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "nano-vllm"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_completion(client, offline):
    answer = client.completions.create(prompt=PROMPT, **GREEDY)
    output = expected(offline, PROMPT)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.index) == (output.text, "length", 0)
    assert answer.object == "text_completion" and answer.model == MODEL and answer.id.startswith("cmpl-")
    num_prompt, num_new = len(output.prompt_token_ids), len(output.token_ids)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (num_prompt, num_new, num_prompt + 12)


def test_completion_of_several_prompts(client, offline):
    prompts = [PROMPT, "KING RICHARD.\n"]
    ids = [offline.tokenizer.encode(prompt) for prompt in prompts]
    texts = [output.text for output in (expected(offline, prompt) for prompt in prompts) for _ in range(2)]
    for given in (prompts, ids):
        answer = client.completions.create(prompt=given, n=2, **GREEDY)
        assert [choice.text for choice in answer.choices] == texts
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        streamed = dict.fromkeys(range(4), "")
        for chunk in client.completions.create(prompt=given, n=2, stream=True, **GREEDY):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert [*streamed.values()] == texts
    assert client.completions.create(prompt=ids[0], **GREEDY).choices[0].text == texts[0]


def test_completion_defaults(client):
    """OpenAI's number of tokens, and what the model recommends for the rest: with a seed, sampled as recommended."""
    one, two = (client.completions.create(model=MODEL, prompt=PROMPT, seed=5).choices[0] for _ in range(2))
    assert one.text == two.text and one.finish_reason == "length"
    same = client.completions.create(
        model=MODEL, prompt=PROMPT, seed=5, temperature=0.6, top_p=0.95, max_tokens=16, extra_body={"top_k": 20}
    )
    assert same.choices[0].text == one.text


def test_completion_logprobs_and_echo(client, offline):
    answer = client.completions.create(prompt=PROMPT, logprobs=2, **GREEDY).choices[0].logprobs
    output = expected(offline, PROMPT, logprobs=2, prompt_logprobs=2)
    assert "".join(answer.tokens) == output.text and answer.text_offset[0] == 0
    assert answer.token_logprobs == pytest.approx(
        [found[i].logprob for i, found in zip(output.token_ids, output.logprobs)], abs=1e-3
    )
    assert [len(top) for top in answer.top_logprobs] == [2] * 12
    echoed = client.completions.create(prompt=PROMPT, logprobs=2, echo=True, **GREEDY).choices[0]
    assert echoed.text == PROMPT + output.text == "".join(echoed.logprobs.tokens)
    assert echoed.logprobs.token_logprobs[0] is None and echoed.logprobs.text_offset[-1] < len(echoed.text)
    scored = client.completions.create(prompt=PROMPT, logprobs=1, echo=True, **GREEDY | {"max_tokens": 0})
    assert (scored.choices[0].text, scored.choices[0].finish_reason) == (PROMPT, "length")
    assert scored.choices[0].logprobs.tokens == echoed.logprobs.tokens[: len(output.prompt_token_ids)]
    assert scored.usage.completion_tokens == 0 and scored.usage.prompt_tokens == len(output.prompt_token_ids)
    chunks = client.completions.create(prompt=PROMPT, echo=True, stream=True, **GREEDY | {"max_tokens": 0})
    assert [(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in chunks] == [(PROMPT, "length")]
    assert client.completions.create(prompt=PROMPT, echo=None, **GREEDY).choices[0].text == output.text
    from_ids = client.completions.create(prompt=output.prompt_token_ids, echo=True, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in from_ids) == PROMPT + output.text


def test_chat(client, offline):
    answer = client.chat.completions.create(messages=QUESTION, **GREEDY)
    output = expected(offline, QUESTION)
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (output.text, "assistant", "length")
    assert choice.message.tool_calls is None and answer.usage.prompt_tokens == len(output.prompt_token_ids)
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    assert client.chat.completions.create(messages=parts, **GREEDY).choices[0].message.content == output.text


def test_chat_stream(client, offline):
    output = expected(offline, QUESTION)
    options = {"include_usage": True}
    chunks = [*client.chat.completions.create(messages=QUESTION, stream=True, stream_options=options, **GREEDY)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == output.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert len({chunk.id for chunk in chunks}) == 1 and len(chunks) > 5
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens == len(output.prompt_token_ids)


def test_options_reach_the_engine(client, offline):
    """Each option changes the answer as it does offline."""
    cases = [
        dict(stop=["a"]),
        dict(stop="e"),
        dict(seed=3, temperature=1.0, top_p=0.8),
        dict(presence_penalty=1.5, frequency_penalty=0.5),
        dict(logit_bias={"300": 100}),
        dict(extra_body=dict(top_k=3, min_p=0.1, seed=4, temperature=1.5)),
        dict(extra_body=dict(repetition_penalty=1.8)),
        dict(extra_body=dict(ignore_eos=True, min_tokens=2), max_completion_tokens=40),
        dict(extra_body=dict(allowed_token_ids=[300, 301], bad_words=["x"], stop_token_ids=[301])),
        dict(extra_body=dict(include_stop_str_in_output=True, skip_special_tokens=False), stop=["a"]),
    ]
    for case in cases:
        params = {**case, **case.get("extra_body", {})}
        params.pop("extra_body", None)
        if "logit_bias" in params:
            params["logit_bias"] = {300: 100}
        if "max_completion_tokens" in params:
            params["max_tokens"] = params.pop("max_completion_tokens")
        if params.get("temperature"):
            params = dict(top_p=0.95, top_k=20) | params  # recommended by the model
        output = expected(offline, QUESTION, **params)
        assert output.text != expected(offline, QUESTION).text, case
        choice = client.chat.completions.create(messages=QUESTION, **GREEDY | case).choices[0]
        assert (choice.message.content, choice.finish_reason) == (output.text, output.finish_reason), case


def test_chat_logprobs(client, offline):
    output = expected(offline, QUESTION, logprobs=3)
    options = dict(messages=QUESTION, logprobs=True, top_logprobs=3, **GREEDY)
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    streamed = []
    for chunk in client.chat.completions.create(stream=True, **options):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    for content in (whole, streamed):
        assert "".join(entry.token for entry in content) == output.text
        for entry, token_id, found in zip(content, output.token_ids, output.logprobs, strict=True):
            assert entry.logprob == pytest.approx(found[token_id].logprob, abs=1e-3)
            assert bytes(entry.bytes).decode() == entry.token and len(entry.top_logprobs) == 3
            assert entry.top_logprobs[0].logprob == max(top.logprob for top in entry.top_logprobs) == entry.logprob
    for extra in ({}, {"top_logprobs": 0}):
        answer = client.chat.completions.create(messages=QUESTION, logprobs=True, **GREEDY, **extra)
        only = answer.choices[0].logprobs.content
        assert [entry.top_logprobs for entry in only] == [[]] * 12
    plain = client.chat.completions.create(messages=QUESTION, logprobs=False, top_logprobs=0, **GREEDY)
    assert plain.choices[0].logprobs is None


def test_log_probabilities_of_a_slow_reader(client, offline, monkeypatch):
    """Of the events of many steps, a few are encoded at a time."""
    output = expected(offline, QUESTION, logprobs=3)
    monkeypatch.setattr(answers, "MANY_LOGPROBS", 1)
    options = dict(messages=QUESTION, logprobs=True, top_logprobs=3, stream=True, **GREEDY)
    found = [x for chunk in client.chat.completions.create(**options) for x in chunk.choices]
    entries = [entry for choice in found if choice.logprobs for entry in choice.logprobs.content]
    assert "".join(choice.delta.content or "" for choice in found) == output.text
    assert [entry.token for entry in entries] == [x[i].decoded_token for i, x in zip(output.token_ids, output.logprobs)]


def test_logprobs_of_a_part_of_a_character(client, offline):
    """`bytes` are those of the token, and `token` is text: together they are the characters, as OpenAI has it."""
    ids = offline.tokenizer.encode("\u4e16", add_special_tokens=False)
    assert len(ids) > 1
    options = dict(messages=QUESTION, logprobs=True, top_logprobs=1, **GREEDY | {"max_tokens": 6})
    answer = client.chat.completions.create(extra_body={"allowed_token_ids": ids}, **options).choices[0]
    assert all(entry.bytes for entry in answer.logprobs.content)
    data = b"".join(bytes(entry.bytes) for entry in answer.logprobs.content)
    assert data.decode(errors="replace") == answer.message.content


class Chunks:
    """A connection whose client takes a piece only when told to."""

    def __init__(self):
        self.written, self.is_writable, self.is_lost, self.on_writable = [], True, False, None

    def write_chunk(self, data: bytes) -> None:
        self.written.append(data)
        self.is_writable = False

    def take_all(self) -> None:
        self.is_writable = True
        self.on_writable()


def stream_answer(kind, body, texts) -> tuple[list[bytes], list[dict]]:
    """The pieces written for a stream of these texts, and its events. The client first reads when half have arrived."""

    async def main():
        connection, sent = Chunks(), []
        group = [SimpleNamespace(prompt_token_ids=[1, 2], num_cached_tokens=0)]
        request = AsyncRequest(SimpleNamespace(group=group, request_id=0, prompt="Hi", output=object), "a")
        options = ((Echo(),),) if kind is CompletionAnswer else (Formats("none"),)
        answer = kind(body, MODEL, [request], *options)

        async def send(message):
            sent.append(message.get("body", b""))

        stream = http_responses.EventStream(answer, lambda: None, 10.0)
        task = asyncio.create_task(stream({"state": {"connection": connection}}, None, send))
        await asyncio.sleep(0)
        for i, text in enumerate([*texts, None]):
            reason = "length" if text is None else None
            request.add_event(StreamEvent(0, 0, 0, text or "", [i], reason, None, None))
            request.tell()
            if i >= len(texts) // 2:
                connection.take_all()
        while not task.done():
            connection.take_all()
            await asyncio.sleep(0)
        assert request.on_news is None and connection.on_writable is None
        return [*connection.written, sent[-1]]

    pieces = asyncio.run(main())
    *events, done = b"".join(pieces).split(b"\n\n")[:-1]
    assert done == b"data: [DONE]"
    return pieces, [json.loads(event.removeprefix(b"data: ")) for event in events]


TEXTS = ["To", "", " be", '"\\\n', "\u4e16", answers.MARK, "\ud83d", " \x00", "or"]


@pytest.mark.parametrize("includes_usage", [False, True])
@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
def test_frames_of_chunks(monkeypatch, kind, includes_usage):
    """Chunks that are put together from a frame and a text are those that are encoded as a whole."""
    options = dict(stream=True, stream_options={"include_usage": includes_usage})
    prompt = {"prompt": "Hi"} if kind is CompletionAnswer else {"messages": QUESTION}
    body = (CompletionBody if kind is CompletionAnswer else ChatBody)(**prompt, **options)
    pieces, events = stream_answer(kind, body, TEXTS)
    assert len(pieces) < len(TEXTS)  # those that came while the client did not read are merged
    texts = [x["text"] if "text" in x else x["delta"].get("content", "") for event in events for x in event["choices"]]
    assert "".join(texts) == "".join(TEXTS).replace("\ud83d", "?")
    if includes_usage:
        assert events.pop()["usage"]["completion_tokens"] == len(TEXTS) + 1
    monkeypatch.setattr(kind, "goes_on_plainly", lambda self, event: False)
    whole = stream_answer(kind, body, TEXTS)[1][: len(events)]
    same = {"id": "", "created": 0}
    assert [event | same for event in events] == [event | same for event in whole]


def test_a_burst_of_requests_goes_on_in_turns():
    """A few in each turn of the event loop, in their order; a task that was cancelled takes no turn."""

    async def main():
        turns, admitted, by_turn = LoopTurns(3), [], []

        async def arrive(i):
            await turns.next()
            admitted.append(i)

        tasks = [asyncio.create_task(arrive(i)) for i in range(20)]
        await asyncio.sleep(0)
        tasks[5].cancel()
        while len(admitted) < 19:
            by_turn.append(len(admitted))
            await asyncio.sleep(0)
        assert admitted == [i for i in range(20) if i != 5]
        assert max(after - before for before, after in pairwise(by_turn)) <= 3
        for _ in range(3):
            await asyncio.sleep(0)
        await asyncio.wait_for(turns.next(), 1)  # at once, when nobody waits

    asyncio.run(main())


def test_more_go_on_in_long_turns():
    """As many as take half of the time: beside streams, a burst would wait for a turn of these for every few."""

    async def main():
        turns, admitted, by_turn = LoopTurns(2, 6, 0.002), [], [0]

        async def arrive(i):
            await turns.next()
            admitted.append(i)

        tasks = [asyncio.create_task(arrive(i)) for i in range(30)]
        while len(admitted) < len(tasks):
            await asyncio.sleep(0)
            by_turn.append(len(admitted))
            time.sleep(0.03)
        counts = [after - before for before, after in pairwise(by_turn)]
        assert counts[0] <= 2 and max(counts) == 6 and admitted == [*range(30)]

    asyncio.run(main())


def test_a_burst_of_requests_holds_up_nothing_else(server, monkeypatch):
    """Of requests that arrive at once, a few are submitted in each turn of the event loop: streams go on between."""
    loop, submit, turn, submitted = server.server.servers[0].get_loop(), server.llm.submit, [0], []
    next_turn = LoopTurns._next_turn

    def count_turns(turns):
        turn[0] += turns._most == max(request_limits.ADMITTED_PER_TURN)  # not the turns of other work
        next_turn(turns)

    def spy(*arguments):
        submitted.append(turn[0])
        return submit(*arguments)

    monkeypatch.setattr(server.llm, "submit", spy)
    monkeypatch.setattr(LoopTurns, "_next_turn", count_turns)
    body = json.dumps({"prompt": [300, 301], "max_tokens": 1}).encode()
    connections = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(60)]
    all_have_arrived = threading.Event()
    loop.call_soon_threadsafe(all_have_arrived.wait, 20)
    for connection in connections:
        connection.sendall(head("/v1/completions", f"content-length: {len(body)}") + body)
    all_have_arrived.set()
    for connection in connections:
        assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
        connection.close()
    assert len(submitted) == 60 and max(Counter(submitted).values()) <= max(request_limits.ADMITTED_PER_TURN)


def test_streams_to_the_byte(server, offline):
    """Of requests in one connection: chunks of just the stated sizes, and then the answer to the next request."""
    text = expected(offline, PROMPT).text
    with (
        closing(socket.create_connection(("127.0.0.1", server.port), 20)) as connection,
        connection.makefile("rb") as received,
    ):
        for stream in (True, True, False, True):
            body = json.dumps({"prompt": PROMPT, "stream": stream, **GREEDY}).encode()
            connection.sendall(head("/v1/completions", f"content-length: {len(body)}") + body)
            assert received.readline() == b"HTTP/1.1 200 OK\r\n"
            lines = dict(line[:-2].split(b": ") for line in iter(received.readline, b"\r\n"))
            assert (b"content-length" in lines) != stream
            if not stream:
                whole = json.loads(received.read(int(lines[b"content-length"])))
                assert whole["choices"][0]["text"] == text
                continue
            assert lines[b"transfer-encoding"] == b"chunked" and b"connection" not in lines
            data, size = b"", 1
            while size:
                line = received.readline()
                size = int(line, 16)
                data += received.read(size)
                assert line == b"%x\r\n" % size and received.read(2) == b"\r\n"
            *events, done = data.decode().split("\n\n")[:-1]
            assert done == "data: [DONE]" and data.endswith(b"\n\n")
            assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events) == text


def test_several_answers(client, offline):
    options = dict(messages=QUESTION, n=3, seed=7, model=MODEL, temperature=1.0, max_tokens=10)
    answers = expected(offline, QUESTION, n=3, seed=7, temperature=1.0, max_tokens=10, top_k=20, top_p=0.95).outputs
    whole = client.chat.completions.create(**options)
    assert [choice.message.content for choice in whole.choices] == [answer.text for answer in answers]
    assert whole.usage.completion_tokens == sum(len(answer.token_ids) for answer in answers)
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == [answer.text for answer in answers]


def test_template_arguments(client, offline):
    messages = [*QUESTION, {"role": "assistant", "content": "It is"}]
    extra = dict(add_generation_prompt=False, continue_final_message=True)
    answer = client.chat.completions.create(messages=messages, extra_body=extra, **GREEDY)
    output = offline.chat(messages, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False, **extra)[0]
    assert answer.choices[0].message.content == output.text
    same = dict(chat_template_kwargs={"add_generation_prompt": True, "enable_thinking": False})
    assert client.chat.completions.create(messages=QUESTION, extra_body=same, **GREEDY).choices[0].message.content


def test_async_client(server, offline):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def stream(prompt):
                pieces = [
                    piece async for piece in await client.completions.create(prompt=prompt, stream=True, **GREEDY)
                ]
                return "".join(piece.choices[0].text for piece in pieces)

            prompts = [f"{i} {PROMPT}" for i in range(16)]
            whole = [client.completions.create(prompt=prompt, **GREEDY) for prompt in prompts]
            texts = await asyncio.gather(*map(stream, prompts))
            return prompts, texts, [answer.choices[0].text for answer in await asyncio.gather(*whole)]

    prompts, texts, whole = asyncio.run(main())
    assert texts == whole == [expected(offline, prompt).text for prompt in prompts]
    server.wait_until_free()


def test_tokenize(post, offline):
    answer = post("/tokenize", {"model": MODEL, "prompt": PROMPT}).json()
    token_ids = offline.tokenizer.encode(PROMPT)
    assert answer == {"count": 9, "max_model_len": 2048, "tokens": token_ids, "token_strs": None}
    names = post("/tokenize", {"prompt": PROMPT, "return_token_strs": True}).json()["token_strs"]
    assert names == offline.tokenizer.convert_ids_to_tokens(token_ids)
    chat = post("/tokenize", {"messages": QUESTION}).json()["tokens"]
    assert chat == expected(offline, QUESTION).prompt_token_ids
    assert post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": PROMPT}
    assert post("/detokenize", {"tokens": [2046, 2047]}).json() == {"prompt": "<|im_start|><|im_end|>"}


@pytest.mark.parametrize(
    "body, param, message",
    [
        ({"prompt": 5}, "prompt", "prompt: Input should be a valid string"),
        ({}, "prompt", "prompt: Field required"),
        ({"messages": [{}]}, "messages", "messages.0.role: Field required"),
        ({"messages": QUESTION, "add_generation_prompt": "x"}, "add_generation_prompt", "valid boolean"),
        ([], None, "the body must be a JSON object"),
    ],
)
def test_errors_of_tokenize(post, body, param, message):
    answer = post("/tokenize", body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and message in error["message"]


def test_special_tokens_are_added_where_they_are_wanted(server, post, monkeypatch):
    """The bundled tokenizer adds none, so it is told to."""
    backend = server.llm._lane.tokenizer.backend_tokenizer
    own, first = backend.post_processor, ("<|endoftext|>", 2045)
    backend.post_processor = tokenizers.processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[first])
    try:
        for body, default in [({"prompt": PROMPT}, True), ({"messages": QUESTION}, False)]:
            with_token = post("/tokenize", body | {"add_special_tokens": True}).json()["tokens"]
            without = post("/tokenize", body | {"add_special_tokens": False}).json()["tokens"]
            assert with_token == [2045, *without]
            assert post("/tokenize", body).json()["tokens"] == (with_token if default else without)
    finally:
        backend.post_processor = own


def test_metrics(server, client):
    client.completions.create(prompt=PROMPT, **GREEDY)
    text = httpx.get(f"{server.url}/metrics").text
    values = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if "_bucket" not in line and "{" in line
    }
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert values[f"vllm:{name}_count"] > 0 and 0 <= values[f"vllm:{name}_sum"] < 100
    assert values["vllm:generation_tokens_total"] >= 12 and values["vllm:prompt_tokens_total"] >= 9
    assert values["nanovllm:disk_blocks_total"] == values["nanovllm:lost_copies_total"] == 0
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny-qwen3"}' in text
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_hits_by_tier():
    """As in vLLM, the tokens that the device's cache lacks are looked up in host memory."""
    stats = {"tokens": {"in": 100}, "prefix_hit_rate": 0.5, "tiers": {"device_hits": 30, "host_hits": 20}}
    names = "prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries", "external_prefix_cache_hits"
    assert [metrics.COUNTERS[name][1](stats) for name in names] == [100, 30, 70, 20]
    del stats["tiers"]
    assert [metrics.COUNTERS[name][1](stats) for name in names] == [100, 50, 0, 0]


# -- structured output and tools ---------------------------------------------------------------------------------------

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Of a place",
        "parameters": {
            "type": "object",
            "properties": {"n": {"enum": [1, 2]}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}


def test_tools_that_are_not_called(client, offline):
    for choice in ("auto", "none"):
        options = dict(messages=QUESTION, tools=[TOOL], tool_choice=choice, **GREEDY)
        message = client.chat.completions.create(**options).choices[0].message
        assert message.content == expected(offline, QUESTION).text and message.tool_calls is None


def test_messages_with_tool_calls(client):
    """As a client sends them back: arguments as text, and content that is null."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"n": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    assert client.chat.completions.create(messages=messages, tools=[TOOL], **GREEDY).choices[0].message.content
    for arguments in ("{", "[]", 5):
        call["function"]["arguments"] = arguments
        with pytest.raises(openai.BadRequestError, match="arguments must be a JSON object"):
            client.chat.completions.create(messages=messages, tools=[TOOL], **GREEDY)


def test_response_format(client):
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    for stream in (False, True):
        options = dict(messages=QUESTION, response_format=wanted, stream=stream, **GREEDY | {"max_tokens": 60})
        answer = client.chat.completions.create(**options)
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            text = answer.choices[0].message.content
        assert json.loads(text)["x"] in (1, 2)
    for extra, param in [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
    ]:
        with pytest.raises(openai.BadRequestError) as found:
            client.chat.completions.create(messages=QUESTION, extra_body=extra, **GREEDY)
        assert found.value.param == param
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = client.chat.completions.create(messages=QUESTION, extra_body=extra, **GREEDY)
    assert answer.choices[0].message.content in ("yes", "no")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools_that_must_be_called(client, choice):
    options = dict(messages=QUESTION, tools=[TOOL], tool_choice=choice, **GREEDY | {"max_tokens": 100})
    options["parallel_tool_calls"] = False  # of several this model writes on and on
    answer = client.chat.completions.create(**options).choices[0]
    call = answer.message.tool_calls[0]
    assert call.function.name == "get_weather" and json.loads(call.function.arguments)["n"] in (1, 2)
    chunks = [*client.chat.completions.create(stream=True, **options)]
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert (calls[0].function.name, calls[0].function.arguments) == (call.function.name, call.function.arguments)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")


def nested(names: tuple[str, ...]) -> type[Strict]:
    """A model with one of another model, which has the same name whatever its names are."""

    class Item(Strict):
        name: Literal[names]  # type: ignore[valid-type]

    class Order(Strict):
        item: Item

    return Order


class Tree(Strict):
    leaf: Literal["a", "b"]
    child: Optional["Tree"]


FRUIT, ROOTS = nested(("apple", "plum")), nested(("beet", "turnip"))


@pytest.mark.parametrize("models", [{"a": FRUIT}, {"a": FRUIT, "b": ROOTS}, {"a": FRUIT, "b": Tree}])
def test_schemas_of_tools_have_definitions_of_their_own(client, models):
    """`$defs` of nested models, of equal names in two tools, and of a model that has itself."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": model.model_json_schema()}}
        for name, model in models.items()
    ]
    # so hot that each choice is almost a coin toss
    settings = dict(model=MODEL, temperature=4.0, seed=1, max_tokens=120, n=7, parallel_tool_calls=False)
    answer = client.chat.completions.create(messages=QUESTION, tools=tools, tool_choice="required", **settings)
    calls = [choice.message.tool_calls[0] for choice in answer.choices if choice.message.tool_calls]
    assert len(calls) >= 5 and {call.function.name for call in calls} == models.keys()
    for call in calls:
        models[call.function.name].model_validate_json(call.function.arguments)


X_IS = [{"$defs": {"X": {"$anchor": "x", "type": kind}}} for kind in ("integer", "boolean")]
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@pytest.mark.parametrize(
    "schema, good, bad",
    [
        ({"properties": {"a": {"$ref": "#/$defs/X"}}, **X_IS[0]}, {"a": 1}, {"a": True}),
        ({"properties": {"a": {"$ref": "#x"}}, **X_IS[0]}, {"a": 1}, {"a": True}),
        ({"properties": {"b": {"type": "integer"}, "a": {"$ref": "#/properties/b"}}}, {"a": 1}, {"a": True}),
        ({"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}, {"a": [{"a": []}]}, {"a": [{"name": "f0"}]}),
        (
            {"$ref": "#/definitions/M", "definitions": {"M": {"properties": {"a": {"enum": [1]}}}}, "$schema": DRAFT_7},
            {"a": 1},
            {"a": 2},
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/Y"}}, "$defs": {"Y": {"$id": "y", "$ref": "#/$defs/X", **X_IS[0]}}},
            {"a": 1},
            {"a": True},
        ),
        (
            {"properties": {"$ref": {"type": "integer"}, "a": {"const": {"$ref": "#/nowhere", "$id": "#"}}}},
            {"$ref": 1, "a": {"$ref": "#/nowhere", "$id": "#"}},
            {"$ref": "#"},
        ),
    ],
    ids=["pointer", "anchor", "property", "recursion", "draft 7", "resource", "data"],
)
def test_references_of_a_tool_stay_within_its_schema(offline, schema, good, bad):
    """Also beside a tool whose definitions have the same names."""
    closed = {"type": "object", "additionalProperties": False}
    other = {**closed, "properties": {"a": {"$ref": "#/$defs/X"}, "b": {"$ref": "#x"}}, **X_IS[1]}
    if "$ref" not in schema:
        schema = closed | schema
    functions = [{"name": f"f{i}", "parameters": own} for i, own in enumerate([schema, other])]
    tools = [{"type": "function", "function": function} for function in functions]
    wanted = structured_outputs(ChatBody(messages=QUESTION, tools=tools, tool_choice="required"))
    seq = offline.input_processor.requests("Hello", SamplingParams(structured_outputs=wanted), OutputKind.FINAL_ONLY)[0]
    for name, arguments, is_valid in [("f0", good, True), ("f0", bad, False), ("f1", {"a": True, "b": False}, True)]:
        matcher = seq.group[0].token_mask._matcher.deep_copy()
        call = [{"name": name, "parameters": arguments}]
        accepts = matcher.consume_tokens(offline.tokenizer.encode(json.dumps(call))) and matcher.is_accepting()
        assert accepts is is_valid, matcher.get_error()
        assert jsonschema.Draft202012Validator(wanted["json"]).is_valid(call) is is_valid


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors_that_the_client_raises(client):
    with pytest.raises(openai.NotFoundError) as found:
        client.chat.completions.create(messages=QUESTION, **GREEDY | {"model": "gpt-4"})
    assert (found.value.code, found.value.param) == ("model_not_found", "model")
    assert f"model 'gpt-4' is not served here; the server has {MODEL!r}" in str(found.value)
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(messages=QUESTION, stream=True, **GREEDY | {"temperature": 5e9})
    assert found.value.param == "temperature"


def test_unknown_paths_and_bodies(server):
    for method, path, content, status in [
        ("GET", "/nothing", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("GET", "/docs", None, 404),
        ("GET", "/../../etc/passwd", None, 404),
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"[1]", 400),
        ("POST", "/v1/completions", b"\xff\xfe{}", 400),
        ("POST", "/v1/completions", b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}", 400),
        ("POST", "/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400),
        ("POST", "/v1/completions", b'{"prompt": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", 400),
        ("POST", "/v1/completions", b'{"model": "\\ud800", "prompt": "x"}', 404),
    ]:
        headers = {"content-type": "application/json"}
        answer = httpx.request(method, server.url + path, content=content, headers=headers, timeout=20)
        error = answer.json()["error"]
        assert answer.status_code == status and set(error) == {"message", "type", "param", "code"}, (path, content)
        assert "Traceback" not in answer.text and "/" not in error["message"].replace("application/json", "")
    # a form of another web page can send this without asking first
    plain = httpx.post(
        f"{server.url}/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"}
    )
    assert plain.status_code == 400 and "application/json" in plain.json()["error"]["message"]


@pytest.mark.parametrize("root_path", ["", "/some/path"])
def test_a_path_that_is_almost_right(root_path):
    """The error names the right path, whatever the body is."""
    with running(root_path=root_path) as server:
        for path, meant in [
            ("/v1/chat/completion", "/v1/chat/completions"),
            ("/chat/completions", "/v1/chat/completions"),
            ("/v1/v1/completions", "/v1/completions"),
            ("/messages", "/v1/messages"),
        ]:
            answer = httpx.post(server.url + root_path + path, data={"a": "b"})
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == f"Not Found: did you mean {meant}?"
        assert httpx.post(server.url + root_path + "/version", data={"a": "b"}).status_code == 405


def test_unexpected_errors_say_nothing(server, post, monkeypatch, caplog):
    def broken(*_):
        raise KeyError("/secret/path")

    monkeypatch.setattr(server.llm._lane, "tokenize", broken)
    for path, body in [("/tokenize", {"prompt": "x"}), ("/v1/completions", {"prompt": "x"})]:
        answer = post(path, body)
        assert answer.status_code == 500 and answer.json()["error"]["message"] == "internal error"
    assert "/secret/path" in caplog.text
    monkeypatch.undo()

    def own_mistake(*_):
        raise ValueError("/secret/path")

    monkeypatch.setattr(CompletionAnswer, "_choice", own_mistake)
    body = dict(prompt=PROMPT, max_tokens=2)
    assert post("/v1/completions", body).status_code == 500
    answer = post("/v1/completions", body | {"stream": True})
    assert answer.status_code == 200 and "internal error" in answer.text and "secret" not in answer.text
    server.wait_until_free()


def test_small_routes(server, client):
    def get(path: str, method: str = "GET") -> httpx.Response:
        return httpx.request(method, server.url + path)

    assert get("/version").json() == {"version": nanovllm.__version__}
    assert get("/ping").json() == get("/ping", "POST").json() == get("/health").json()
    assert get("/load").json() == {"server_load": 0}
    with client.completions.create(**GREEDY | {"prompt": PROMPT, "max_tokens": 1500, "n": 2}, stream=True) as stream:
        next(stream)
        assert get("/load").json() == {"server_load": 1}
    server.wait_until_free()
    for path, allowed in [("/v1/completions", "POST"), ("/health", "GET, HEAD"), ("/ping", "GET, POST, HEAD")]:
        answer = get(path, "DELETE")
        assert answer.status_code == 405 and answer.headers["allow"] == allowed and answer.json()["error"]
    answer = httpx.request("POST", f"{server.url}/", json={})
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    for path in ("/health", "/v1/models", "/metrics", "/version", "/"):
        whole, head = get(path), get(path, "HEAD")
        assert head.status_code == 200 and head.content == b"" and whole.content
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert get("/v1/completions", "HEAD").status_code == 405
    assert get("/openapi.json").status_code == 404


EVENT_STREAMS = [
    ("POST", "/v1/chat/completions", {"messages": QUESTION}),
    ("POST", "/v1/completions", {"prompt": PROMPT}),
    ("POST", "/v1/responses", {"input": PROMPT}),
    ("POST", "/v1/messages", {"messages": QUESTION}),
    ("GET", "/view/events", None),
]


@pytest.mark.parametrize("method, path, body", EVENT_STREAMS, ids=lambda value: str(value)[:20])
def test_no_proxy_keeps_a_part_of_a_stream(server, method, path, body):
    body = None if body is None else body | {"stream": True, "max_tokens": 2}
    with httpx.stream(method, server.url + path, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-accel-buffering"] == "no" and answer.headers["cache-control"] == "no-cache"
        assert next(answer.iter_lines())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_silent_streams_have_comments(server, monkeypatch, path):
    """While a request waits for its first token, proxies are to keep its connection; clients ignore the comments."""
    go_on, step = threading.Event(), server.llm.engine.core.step
    monkeypatch.setattr(http_responses, "HEARTBEAT", 0.02)
    monkeypatch.setattr(server.llm.engine.core, "step", lambda: go_on.wait(20) and step())
    body = {"messages": QUESTION, "max_tokens": 3, "stream": True}
    with httpx.stream("POST", server.url + path, json=body) as answer:
        lines = answer.iter_lines()
        before = [next(lines) for _ in range(8)]
        go_on.set()
        rest = [*lines]
    assert [line for line in before if line][-2:] == [":", ":"]
    events = [line for line in rest if line.startswith("data: ")]
    assert len(events) >= 3 and all(line.startswith(("data: ", "event: ")) or line in ("", ":") for line in rest)
    server.wait_until_free()


def test_methods_of_all_routes(server, caplog):
    """A wrong one is answered with those that there are, without a line in the log."""
    paths = {"/": "GET, HEAD", "/view/events": "GET, HEAD", "/v1/models/x": "GET, HEAD", "/metrics": "GET, HEAD"}
    paths |= {"/v1/responses": "POST", "/v1/responses/x": "DELETE, GET, HEAD", "/tokenize": "POST"}
    paths |= {"/v1/messages": "POST", "/v1/messages/count_tokens": "POST", "/ping": "GET, POST, HEAD"}
    with httpx.Client(base_url=server.url) as http:
        for path, allowed in paths.items():
            for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"} - {*allowed.split(", ")}:
                answer = http.request(method, path, json={})
                assert (answer.status_code, answer.headers["allow"]) == (405, allowed), (method, path)
                assert answer.json()["error"] if "messages" not in path else answer.json()["type"] == "error"
    assert not caplog.records


def test_the_head_of_an_endless_stream(server):
    """The connection is free for the next request, as nothing is streamed."""
    with httpx.Client(base_url=server.url, timeout=5) as http:
        for _ in range(3):
            answer = http.head("/view/events")
            assert (answer.status_code, answer.content) == (200, b"")
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert http.get("/health").status_code == 200
    wait_for(lambda: not server.server.server_state.tasks)


def test_schema_and_root_path():
    with running(enable_openapi=True, root_path="/some/path/", api_key=("k",)) as server:
        headers = {"authorization": "Bearer k"}
        assert httpx.get(f"{server.url}/openapi.json").status_code == 401
        schema = httpx.get(f"{server.url}/openapi.json", headers=headers).json()
        assert {"/v1/chat/completions", "/tokenize", "/version"} <= schema["paths"].keys()
        body = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "prompt" in schema["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"]
        for prefix in ("", "/some/path"):  # a proxy may leave it out
            assert httpx.get(f"{server.url}{prefix}/health").status_code == 200
            assert httpx.get(f"{server.url}{prefix}/v1/models").status_code == 401
            assert httpx.get(f"{server.url}{prefix}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("variable", ["NANOVLLM_API_KEY", "VLLM_API_KEY"])
def test_keys_of_the_environment(monkeypatch, variable):
    monkeypatch.setenv(variable, "k")
    assert request_limits.RequestLimits(None, ServerSettings(), {})._keys == [b"k"]


# -- long prompts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", lambda text: {"prompt": text}),
        ("/v1/completions", lambda text: {"prompt": ["x", text]}),
        ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
        ("/tokenize", lambda text: {"prompt": text}),
        ("/tokenize", lambda text: {"messages": [{"role": "user", "content": text}]}),
    ],
)
def test_prompts_that_cannot_fit_are_not_tokenized(server, post, monkeypatch, path, body):
    tokenized, encode = [], InputProcessor.encode
    monkeypatch.setattr(InputProcessor, "encode", lambda self, *args: tokenized.append(args[0]) or encode(self, *args))
    answer = post(path, body("a" * 90_000))  # tokens have at most 16 bytes
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded", error
    assert "has at least 56" in error["message"] and "maximum context length is 2048 tokens" in error["message"]
    assert not [text for text in tokenized if len(text) > 1]
    server.wait_until_free()


def test_long_prompts_do_not_delay_short_ones(server, post, monkeypatch):
    """As many long ones as there are threads for short ones, and more: they wait for each other only."""
    begun, go_on, encode = [], threading.Event(), InputProcessor.encode

    def slow(self, text, *arguments):
        if len(text) > 1000:
            begun.append(text)
            assert go_on.wait(20)
        return encode(self, text, *arguments)

    monkeypatch.setattr(InputProcessor, "encode", slow)
    text, grammar = " " * 30_000, {"regex": "[a-z]+"}
    bodies = [
        ("/v1/completions", {"prompt": text, "max_tokens": 1}),
        ("/v1/completions", {"prompt": text, "max_tokens": 1, "structured_outputs": grammar}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
        ("/tokenize", {"prompt": text}),
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        try:
            long = [pool.submit(post, *body) for body in bodies]
            wait_for(lambda: begun and len(server.server.server_state.tasks) == len(bodies))
            for path, body in bodies:
                short = {name: PROMPT for name in ("prompt",) if name in body} or {"messages": QUESTION}
                assert post(path, body | short).status_code == 200
            assert len(begun) == 1 and not any(answer.done() for answer in long)
        finally:
            go_on.set()
        assert [answer.result().status_code for answer in long] == [200] * len(bodies) and len(begun) == len(bodies)
    server.wait_until_free()


NFC, NFKC, Replace = tokenizers.normalizers.NFC(), tokenizers.normalizers.NFKC(), tokenizers.normalizers.Replace
Split, Whitespace = tokenizers.pre_tokenizers.Split, tokenizers.pre_tokenizers.Whitespace()


@pytest.mark.parametrize("normalizer", [None, NFC, NFKC, Replace("ab", "")], ids=str)
def test_bound_of_prompts_holds_for_what_a_normalizer_leaves(offline, normalizer):
    processor = copy.copy(offline.input_processor)
    processor.tokenizer = copy.deepcopy(offline.tokenizer)
    if normalizer is not None:
        processor.tokenizer.backend_tokenizer.normalizer = normalizer
    lane, random = PromptLane(processor, takes_long_texts=True), Random(0)
    characters = ["e\u0301", "\u03b1\u0313\u0301\u0345", "\u212a", " ", "ab", "\U0001d400", "\ufdfa", "<|im_end|>"]
    for _ in range(20):
        text = "".join(random.choices(characters, [random.random() for _ in characters], k=1500))
        num_tokens = len(lane.tokenizer.encode(text))
        try:
            assert len(lane.encode(text)) == num_tokens
        except ValueError:  # the bound is for what certainly does not fit
            assert num_tokens >= lane.max_model_len
    assert len(lane.encode("e\u0301" * 20_000, is_cut=True)) > lane.max_model_len
    removed, kept = {"NFC": ("e\u0301", 10_000), "Rep": ("ab", 50_000)}.get(str(normalizer)[:3], (" ", 2000))
    assert lane.encode(removed * kept + "x")  # and is not for what does, which the normalizer makes shorter


@pytest.mark.parametrize(
    "part, value",
    [
        ("normalizer", tokenizers.normalizers.Strip()),
        ("normalizer", tokenizers.normalizers.Sequence([NFC, Replace(tokenizers.Regex("a+$"), "")])),
        ("pre_tokenizer", Whitespace),
        ("pre_tokenizer", tokenizers.pre_tokenizers.Sequence([Split(" ", "removed"), Whitespace])),
        ("added", tokenizers.AddedToken("<mask>", lstrip=True)),
        ("model", tokenizers.models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)),
    ],
    ids=str,
)
def test_tokens_without_a_bound(offline, part, value):
    tokenizer = copy.deepcopy(offline.tokenizer)
    assert longest_token(tokenizer) == 16
    if part == "added":
        tokenizer.add_tokens(value)
    else:
        setattr(tokenizer.backend_tokenizer, part, value)
    assert longest_token(tokenizer) is None


def test_slow_grammars_of_one_client_do_not_delay_another(monkeypatch):
    """A client has two in trial, and the rest of its own wait for these."""
    pytest.importorskip("llguidance")
    from nanovllm.structured_outputs import sandbox

    ask, slow, go_on = sandbox._ask, [], threading.Event()

    def wait(process, grammar):
        if "slow" not in grammar:
            return ask(process, grammar)
        slow.append(grammar)
        assert go_on.wait(20)
        return b'"refused"'

    monkeypatch.setattr(sandbox, "_ask", wait)
    with running(api_key=("slow", "good")) as server, ThreadPoolExecutor(8) as pool:

        def post(key, pattern):
            body = {"prompt": "x", "max_tokens": 9, "structured_outputs": {"regex": pattern}}
            headers = {"authorization": f"Bearer {key}"}
            return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=20)

        try:
            answers = [pool.submit(post, "slow", f"slow{i}") for i in range(7)]
            wait_for(lambda: len(slow) == 2 and len(server.llm._names) == 7)
            for pattern in ("good", "better"):
                assert post("good", pattern).json()["choices"][0]["text"] == pattern
            assert len(slow) == 2 and not any(answer.done() for answer in answers)
        finally:
            go_on.set()
        assert ["refused" in answer.result().json()["error"]["message"] for answer in answers] == [True] * 7
        assert len(slow) == 7
        wait_for(lambda: gc.collect() >= 0 and not server.llm._grammar_turns._turns)  # the errors have their frames
        server.wait_until_free()


def test_slow_masks_of_one_client_do_not_delay_another(monkeypatch):
    """Not those of many answers at a time, nor that the first client goes away meanwhile."""
    pytest.importorskip("llguidance")
    from nanovllm.structured_outputs import constraint, grammar

    make, slow, go_on = constraint.Constraint._grammar_mask, set(), threading.Event()

    def wait(self):
        if threading.current_thread().name.startswith("nanovllm-masks"):
            assert go_on.wait(20)
        return make(self)

    monkeypatch.setattr(constraint.Constraint, "_grammar_mask", wait)
    monkeypatch.setattr(grammar.Grammar, "is_slow", property(lambda self: self in slow))
    with running() as server, ThreadPoolExecutor(4) as pool:
        url, body = f"{server.url}/v1/completions", {"prompt": "x", "max_tokens": 9}
        post = lambda **fields: httpx.post(url, json=body | fields, timeout=20).json()["choices"]
        try:
            assert post(guided_regex="slow")[0]["text"] == "slow"  # nothing is slow so far
            slow.update(server.llm.engine.input_processor.helpers["grammars"]._grammars.values())
            held = server.llm.engine.scheduler.held
            many = pool.submit(post, n=40, guided_regex="slow")
            with httpx.stream("POST", url, json=body | {"n": 40, "guided_regex": "slow", "stream": True}, timeout=20):
                wait_for(lambda: len(held) == 80)
                for _ in range(3):
                    assert len(post(max_tokens=2, ignore_eos=True)[0]["text"]) > 0
                    assert post(guided_choice=["good"])[0]["text"] == "good"
            wait_for(lambda: len(held) == 40)
            assert not many.done()
        finally:
            go_on.set()
        assert [choice["text"] for choice in many.result()] == ["slow"] * 40
        server.wait_until_free()


def test_a_turn_lasts_as_long_as_its_call():
    """A client that goes away does not get another one; turns that are not used are forgotten."""

    async def main():
        turns, begun, go_on = ClientTurns(1), [], asyncio.Event()

        async def call(name):
            begun.append(name)
            await go_on.wait()
            return name

        start = lambda name: asyncio.create_task(turns.run(lambda: call(name)))
        first, second, third = map(start, "abc")
        while begun != ["a"]:
            await asyncio.sleep(0)
        first.cancel()
        second.cancel()
        results = await asyncio.gather(first, second, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 2 and begun == ["a"]
        CLIENT.set("another")
        other = start("d")
        while begun != ["a", "d"]:
            await asyncio.sleep(0)
        go_on.set()
        assert await asyncio.gather(third, other) == ["c", "d"] and begun == ["a", "d", "c"]
        del first, second, results  # the errors have their frames
        await asyncio.sleep(0)
        gc.collect()
        assert not turns._turns

    asyncio.run(main())


# -- attacks -----------------------------------------------------------------------------------------------------------


def head(path="/v1/completions", *lines: str, host="localhost") -> bytes:
    return "\r\n".join(
        [f"POST {path} HTTP/1.1", f"host: {host}", "content-type: application/json", *lines, "", ""]
    ).encode()


UPGRADES = [
    ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__"),
    ("Upgrade: h2c", "Connection: HTTP2-Settings", "Connection: upgrade"),
    ("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13"),
    ("connection: Upgrade", "upgrade: TLS/1.0, HTTP/2.0", "expect: 100-continue"),
]


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("lines", UPGRADES, ids=lambda lines: lines[1])
def test_upgrades_are_ignored(server, lines, is_chunked):
    """curl --http2 and Java's client ask for one with every request, and go on in HTTP/1.1 if there is none."""
    body = json.dumps({"prompt": PROMPT}).encode()
    size = "transfer-encoding: chunked" if is_chunked else f"content-length: {len(body)}"
    content = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body
    request = head("/tokenize", size, *lines) + content
    last = head("/tokenize", size, "connection: close") + content
    pieces = [[request], [request[:70], request[70:]], [request[: -len(content)], content]]
    for sent in (*pieces, [request[i : i + 1] for i in range(len(request))]):
        answer = server.send(*sent, pause=0.02 / len(sent), until=b"null}")
        assert answer.count(b"HTTP/1.1 200 OK") == 1 and b'"count":9' in answer, answer
        assert answer.startswith(b"HTTP/1.1 100 Continue") == ("expect: 100-continue" in lines)
    with closing(socket.create_connection(("127.0.0.1", server.port), 5)) as connection:  # it is as good as before
        connection.sendall(request)
        answer = connection.recv(65536)
        while not answer.endswith(b"null}"):
            answer += connection.recv(65536)
        connection.sendall(last)
        while data := connection.recv(65536):
            answer += data
    assert answer.count(b" 200 OK") == 2 and b"connection: close" in answer


LAST_UPGRADES = [
    ("1.1", "connection: Upgrade, close", "upgrade: websocket"),
    ("1.1", "connection: close, Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__"),
    ("1.1", "connection: close", "connection: upgrade", "upgrade: websocket", "upgrade: h2c"),
    ("1.0", "connection: upgrade", "upgrade: h2c"),
    ("1.0", "connection: Upgrade, keep-alive", "upgrade: websocket"),
    ("1.0", "connection: close, upgrade", "upgrade: TLS/1.0"),
]


@pytest.mark.parametrize("is_in_pieces", [False, True])
@pytest.mark.parametrize("given", LAST_UPGRADES, ids=str)
def test_upgrades_of_the_last_request_of_a_connection(server, given, is_in_pieces):
    """They are ignored as well: the answer comes at once, and then the end."""
    version, *lines = given
    body = json.dumps({"prompt": PROMPT}).encode()
    for path, content, end in (("/tokenize", body, b"null}"), ("/health", b"", b'{"status":"ok"}')):
        request = head(path, *([f"content-length: {len(body)}"] if content else []), *lines) + content
        request = request.replace(b"HTTP/1.1", b"HTTP/" + version.encode())
        request = request if content else request.replace(b"POST", b"GET")
        begin = time.perf_counter()
        answer = server.send(*([request[i : i + 1] for i in range(len(request))] if is_in_pieces else [request]))
        assert answer.startswith(b"HTTP/1.1 200 OK") and answer.endswith(end), answer
        assert time.perf_counter() - begin < request_limits.HEADER_SECONDS / 2


@pytest.mark.parametrize(
    "request_, status, message",
    [
        (b"GET\r\n\r\n", 400, "not valid HTTP/1.1"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "not valid HTTP/1.1"),  # TLS
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "not valid HTTP/1.1"),
        (b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n", 400, "another protocol"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\na b\r\n\r\n", 400, "not valid HTTP/1.1"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 40_000, 400, "longer than 32768 bytes"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 40_000 + b"\r\n\r\n", 400, "longer than 32768"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.com\r\n\r\n", 400, "one Host header"),
        (b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n", 400, "not valid HTTP/1.1"),
        (b"GET /a HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2, 400, "pipelining"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_errors_of_the_protocol_are_json(server, request_, status, message):
    header, _, body = server.send(request_).rpartition(b"\r\n\r\n")
    assert b"HTTP/1.1 %d " % status in header and b"content-type: application/json" in header, header
    assert f"content-length: {len(body)}".encode() in header and b"connection: close" in header
    error = json.loads(body)["error"]
    assert message in error["message"] and set(error) == {"message", "type", "param", "code"}


def test_long_bodies(server):
    assert b" 413 " in server.send(head("/v1/completions", "content-length: 999999999"))
    assert server.send(head("/v1/completions", "content-length: " + "9" * 400)).startswith(b"HTTP/1.1 4")
    chunk = b"1000\r\n" + b"x" * 4096 + b"\r\n"
    assert b" 413 " in server.send(head("/v1/completions", "transfer-encoding: chunked"), *[chunk] * 26)


def test_long_bodies_are_the_same(post, offline):
    """What a long body says is prepared in a thread."""
    body = dict(prompt=PROMPT, temperature=0, max_tokens=4, allowed_token_ids=[300] * 15_000)
    assert post("/v1/completions", body).json()["choices"][0]["text"] == offline.tokenizer.decode([300] * 4)
    error = post("/v1/completions", body | {"temperature": -1}).json()["error"]
    assert (error["param"], error["type"]) == ("temperature", "invalid_request_error")


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_clients_that_go_away_before_their_prompt_is_tokenized(server, monkeypatch, path):
    """They leave the queue at once, and their prompts are not tokenized any more."""
    begun, go_on = [], threading.Event()
    tokenize = server.llm._lane.tokenize

    def slow(*arguments):
        begun.append(arguments)
        assert go_on.wait(10)
        return tokenize(*arguments)

    monkeypatch.setattr(server.llm._lane, "tokenize", slow)
    content = json.dumps(dict(prompt=PROMPT) | ({"stream": True} if path != "/tokenize" else {})).encode()
    connections = []
    try:
        for _ in range(5):
            connections.append(socket.create_connection(("127.0.0.1", server.port)))
            connections[-1].sendall(head(path, f"content-length: {len(content)}") + content)
        end = time.perf_counter() + 5
        while len(server.server.server_state.tasks) < 5 or len(begun) < 2:
            assert time.perf_counter() < end
            time.sleep(0.002)
        for connection in connections:
            connection.close()
        while server.llm.num_unfinished or server.server.server_state.tasks:
            assert time.perf_counter() < end
            time.sleep(0.002)
    finally:
        go_on.set()
    assert httpx.get(f"{server.url}/health").status_code == 200
    monkeypatch.undo()
    assert httpx.post(f"{server.url}/tokenize", json={"prompt": PROMPT}).json()["count"] == 9
    assert len(begun) == 2  # the threads of the pool
    server.wait_until_free()


def test_slow_bodies(server):
    whole = head("/v1/completions", "content-length: 100"), b"{"
    chunked = head("/v1/completions", "transfer-encoding: chunked"), *[b"1\r\nx\r\n"] * 3
    with ThreadPoolExecutor(2) as pool:  # at the same time
        for answer in pool.map(lambda pieces: server.send(*pieces, pause=0.2), (whole, chunked)):
            assert b" 408 " in answer and b"error" in answer


def test_slow_and_long_headers(server, monkeypatch):
    assert b" 400 " in server.send(head("/health", "x: " + "y" * 40_000))
    endless = [b"x%d: " % i + b"y" * 2000 + b"\r\n" for i in range(40)]
    assert b" 200 " not in server.send(b"POST / HTTP/1.1\r\n", *endless, pause=0.001)
    monkeypatch.setattr(request_limits, "HEADER_SECONDS", 0.2)
    begin = time.perf_counter()
    slow = [], [b"GET /heal"], [b"\r\n"], [b"GET /health HTTP/1.1\r\n", *[b"x: y\r\n"] * 5]
    with ThreadPoolExecutor(4) as pool:  # at the same time
        assert [*pool.map(lambda pieces: server.send(*pieces, pause=0.1), slow)] == [b""] * 4
    # after an answer too: bytes that begin no request do not keep the connection open
    answer = server.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"\r\n", pause=0.05)
    assert answer.count(b" 200 OK") == 1 and time.perf_counter() - begin < 4


def test_refused_connections_are_forgotten(server):
    """An error that several connections share would keep their frames, as each `raise` adds to its traceback."""

    def num_connections() -> int:
        gc.collect()
        return sum(isinstance(x, request_limits.BoundedProtocol) for x in gc.get_objects())

    before = num_connections()
    for _ in range(5):
        assert b" 400 " in server.send(head("/health", "x: " + "y" * 40_000))
    wait_for(lambda: num_connections() <= before)


@pytest.mark.parametrize("seconds", [0.3, 30.0])
def test_idle_connections_stay_open(seconds):
    """For as long as the setting says: a pool of a client or a proxy may use them again until then."""
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with running(timeout_keep_alive=seconds) as server, socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(10)
        client.sendall(request)
        assert b" 200 OK" in client.recv(65536)
        if seconds < 1:
            assert client.recv(1) == b""
            return
        (protocol,) = server.server.server_state.connections
        wait_for(lambda: protocol.timeout_keep_alive_task)  # set after the answer was sent
        left = protocol.timeout_keep_alive_task.when() - protocol.loop.time()
        assert seconds - 10 < left < seconds + 0.001  # the sum of two times is rounded
        client.sendall(request)
        assert b" 200 OK" in client.recv(65536)


def test_how_long_idle_connections_stay_open(monkeypatch):
    """The setting, else vLLM's variable, else longer than the 90 seconds of common clients."""
    name = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
    monkeypatch.delenv(name, raising=False)
    assert ServerSettings().timeout_keep_alive > 90
    monkeypatch.setenv(name, "7.5")
    assert ServerSettings().timeout_keep_alive == 7.5 and ServerSettings(timeout_keep_alive=3).timeout_keep_alive == 3
    for wrong in ("soon", "-1", "nan", "1e9"):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(ValueError, match=f"{name}='?{wrong}'?: must be "):
            ServerSettings()
    with pytest.raises(ValueError, match="timeout_keep_alive=-1.0: must be at least 0"):
        ServerSettings(timeout_keep_alive=-1.0)


def test_idle_connections_make_place_for_others():
    """The one that was idle for longest is closed, and one that waits for an answer is not."""
    body = json.dumps(dict(prompt=PROMPT, max_tokens=1500, ignore_eos=True, stream=True)).encode()
    with running(max_connections=4) as server:
        request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
        connections = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(3)]
        connections[0].sendall(head("/v1/completions", f"content-length: {len(body)}") + body)
        assert b" 200 OK" in connections[0].recv(1000)
        for connection in connections[1:]:
            connection.sendall(request)
            assert b" 200 OK" in connection.recv(65536)
            time.sleep(0.02)  # the event loop counts milliseconds
        connections.append(socket.create_connection(("127.0.0.1", server.port), timeout=10))
        connections[-1].sendall(request)
        assert b" 200 OK" in connections[-1].recv(65536)
        assert connections[1].recv(1) == b""  # the oldest of those that wait
        for connection in connections[2:]:
            connection.sendall(request)
            assert b" 200 OK" in connection.recv(65536)
        assert connections[0].recv(1000)
        for connection in connections:
            connection.close()


def test_pipelining_is_refused(server):
    """The first answer is given up: a client that sends more meanwhile could hide that it went away."""
    body = json.dumps(dict(prompt=PROMPT, max_tokens=1500, ignore_eos=True, stream=True)).encode()
    request = head("/v1/completions", f"content-length: {len(body)}") + body
    assert b" 400 " in server.send(request, request, pause=0.1)
    server.wait_until_free()


def test_other_names_of_the_server(server):
    for host, status in [("localhost", 200), ("127.0.0.1:80", 200), ("[::1]:80", 200), ("[::1]", 200)]:
        assert httpx.get(f"{server.url}/health", headers={"host": host}).status_code == status
    for host in ("evil.com", "evil.com:8000", "localhost.evil.com", "127.0.0.1.evil.com", "x[::1]"):
        answer = httpx.get(f"{server.url}/health", headers={"host": host})
        assert answer.status_code == 403 and answer.json()["error"]["type"] == "permission_error"
    assert b" 403 " in server.send(b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n")


def test_no_cors_unless_asked_for(server):
    headers = {"origin": "https://evil.com", "access-control-request-method": "POST"}
    answer = httpx.options(f"{server.url}/v1/completions", headers=headers)
    assert answer.status_code == 405 and not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize("how", ["stream", "whole", "several"])
def test_clients_that_go_away_free_their_blocks(server, how):
    body = dict(prompt=PROMPT, max_tokens=1500, ignore_eos=True, stream=how == "stream", n=3 if how == "several" else 1)
    content = json.dumps(body).encode()
    for abrupt in (False, True):
        with closing(socket.create_connection(("127.0.0.1", server.port))) as connection:
            connection.sendall(head("/v1/completions", f"content-length: {len(content)}") + content)
            server.wait_until_running()
            if how == "stream":
                connection.recv(1000)
            if abrupt:  # a reset instead of an orderly end
                linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        server.wait_until_free(1.0)


def test_keys_queue_time_and_origins():
    settings = dict(api_key=(KEY, "other"), allowed_origins=("https://good.com",), request_timeout=0.4)
    with running(dict(max_num_seqs=2, max_queued_requests=2, scheduling_policy="priority"), **settings) as server:
        base = f"{server.url}/v1"
        for wrong in ("wrong", KEY + "x", KEY[:-1], "\u00e9"):
            headers = {"authorization": f"Bearer {wrong}".encode()}
            answer = httpx.get(f"{base}/models", headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert httpx.get(f"{base}/models").status_code == httpx.get(f"{server.url}/metrics").status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200
        headers = {"authorization": f"bearer {KEY}".encode()}
        assert httpx.get(f"{base}/models", headers=headers).status_code == 200

        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=base, api_key="wrong", max_retries=0).models.list()
        client = openai.OpenAI(base_url=base, api_key="other", max_retries=0)
        endless = dict(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=2000, extra_body={"ignore_eos": True})

        # the fifth answer is refused; the others end when their time is over
        streams = [client.completions.create(stream=True, **endless) for _ in range(4)]
        with pytest.raises(openai.RateLimitError) as found:
            client.completions.create(**endless)
        assert int(found.value.response.headers["retry-after"]) > 0 and found.value.code == "queue_full"
        for stream in streams:
            with pytest.raises(openai.APIError, match="longer than this server allows"):
                for _ in stream:
                    pass
        server.wait_until_free()
        with pytest.raises(openai.InternalServerError) as found:
            client.completions.create(**endless)
        assert found.value.status_code == 504
        server.wait_until_free()
        # the time counts from the beginning, also where a prompt waits for a thread
        go_on, request = threading.Event(), server.llm.engine.input_processor.request
        server.llm.engine.input_processor.request = lambda *arguments, **options: (
            go_on.wait(5) and request(*arguments, **options)
        )
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as found:
                client.completions.create(stream=stream, **endless)
            assert found.value.status_code == 504 and not server.llm.num_unfinished
        server.llm.engine.input_processor.request = request
        go_on.set()
        urgent = dict(endless, max_tokens=2, extra_body={"priority": -1})
        assert client.completions.create(**urgent).choices[0].finish_reason == "length"

        headers = {"origin": "https://good.com", "access-control-request-method": "POST"}
        answer = httpx.options(f"{base}/completions", headers=headers)
        assert answer.headers["access-control-allow-origin"] == "https://good.com"
        answer = httpx.options(f"{base}/completions", headers=headers | {"origin": "https://evil.com"})
        assert "access-control-allow-origin" not in answer.headers


def test_a_dead_engine(monkeypatch):
    with running() as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        options = dict(model=MODEL, prompt=PROMPT, max_tokens=1500, extra_body={"ignore_eos": True})
        stream = client.completions.create(stream=True, **options)
        next(stream)
        server.llm.on_failure.clear()  # else the server ends by itself, which is tested below

        def broken(**_):
            raise MemoryError("/secret/path")

        monkeypatch.setattr(server.llm.engine.scheduler, "schedule", broken)
        with pytest.raises(openai.APIError, match="the engine is not running"):
            for _ in stream:
                pass
        answer = httpx.get(f"{server.url}/health")
        assert answer.status_code == 503 and "secret" not in answer.text
        with pytest.raises(openai.InternalServerError) as found:
            client.completions.create(**options)
        assert found.value.status_code == 503 and found.value.code == "engine_dead"
    with running() as server:
        monkeypatch.setattr(server.llm.engine.scheduler, "schedule", broken)
        with pytest.raises(openai.InternalServerError):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0).completions.create(**options)
        server.thread.join(5)
        assert not server.thread.is_alive() and server.llm.error is not None


def test_draining(caplog):
    """The server ends when the requests that are running have ended; it accepts no others."""
    with running(drain_seconds=20) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        options = dict(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=120, extra_body={"ignore_eos": True})
        stream = client.completions.create(stream=True, **options)
        next(stream)
        server.server.should_exit = True
        time.sleep(0.3)
        with pytest.raises(openai.APIConnectionError):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0).models.list()
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        server.thread.join(5)
        assert not server.thread.is_alive()
        assert "running requests: 1; the server waits up to 20 s for them" in caplog.text


STREAMS = [
    ("completions", {"prompt": PROMPT}, '{"error":{"message":"the server has ended",'),
    ("chat/completions", {"messages": QUESTION}, '{"error":{"message":"the server has ended",'),
    ("responses", {"input": PROMPT, "max_output_tokens": 1900}, '{"type":"response.failed",'),
    (
        "messages",
        {"messages": QUESTION},
        '{"type":"error","error":{"type":"overloaded_error","message":"the server has',
    ),
]


@pytest.mark.parametrize("path, body, error", STREAMS, ids=[path for path, *_ in STREAMS])
def test_streams_that_outlast_the_draining_end_with_an_error(path, body, error, monkeypatch, caplog):
    """The body is whole, in the format of its API, and the log says what happens without a traceback."""
    with running(drain_seconds=0) as server:
        monkeypatch.setattr(server.llm.engine.scheduler, "eos_token_ids", frozenset())  # no answer ends by itself
        body = {"model": MODEL, "max_tokens": 1900, "stream": True} | body
        with httpx.stream("POST", f"{server.url}/v1/{path}", json=body, timeout=20) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.server.should_exit = True
            *_, last = filter(None, lines)
        assert last.startswith(f"data: {error}") and "the server has ended" in last
        server.thread.join(5)
        assert not server.thread.is_alive()
        server.wait_until_free()
    assert [text for text in caplog.messages if text.startswith("running requests")] == [
        "running requests: 1; the server waits up to 0 s for them (drain_seconds), or until Ctrl-C again",
        "running requests that end now, with an error: 1",
    ]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_many_connections_and_clients_that_do_not_read(monkeypatch):
    monkeypatch.setattr(http_responses, "WRITE_SECONDS", 0.2)
    with running(max_connections=8, request_timeout=1.0) as server:
        body = dict(prompt=PROMPT, max_tokens=1900, ignore_eos=True, stream=True, n=8, logprobs=20)
        content = json.dumps(body).encode()
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        deaf.sendall(head("/v1/completions", f"content-length: {len(content)}") + content)
        server.wait_until_running()
        assert httpx.get(f"{server.url}/health").status_code == 200  # nobody else waits for it
        more = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
        answer = server.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b" 503 " in answer and b"retry-after" in answer and b'{"error":' in answer
        server.wait_until_free()
        end = time.perf_counter() + 3
        while server.server.server_state.tasks and time.perf_counter() < end:
            time.sleep(0.01)
        assert not server.server.server_state.tasks  # the stream has ended, read or not
        for connection in (*idle, *more, deaf):
            connection.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="needs an option of Linux")
def test_clients_that_never_read_lose_their_connection(monkeypatch):
    monkeypatch.setattr(request_limits, "UNREAD_SECONDS", 0.3)
    with running() as server:

        async def long_text(token_ids):
            return "x" * 8_000_000

        monkeypatch.setattr(server.llm, "detokenize", long_text)
        content = b'{"tokens": []}'
        request = head("/detokenize", f"content-length: {len(content)}") + content
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", server.port))
            deaf.sendall(request)
            end = time.perf_counter() + 10
            while not server.server.server_state.total_requests or server.server.server_state.connections:
                assert time.perf_counter() < end
                time.sleep(0.01)


# -- the documentation -------------------------------------------------------------------------------------------------


def test_commands_of_the_documents(monkeypatch):
    """The lines with `curl` work as they stand there, with answers that end."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    monkeypatch.setattr(sys.modules[__name__], "FOLDER", MODEL)
    package = Path(request_limits.__file__).parents[1]
    text = (package / "docs/serving.md").read_text() + (package.parent / "README.md").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.startswith("curl ")]
    assert len(lines) == 7
    with running() as server:
        for line in lines:
            command = shlex.split(line.replace("http://127.0.0.1:8000", server.url))
            answer = subprocess.run([*command, "--silent", "--fail"], capture_output=True, text=True, timeout=20)
            assert answer.returncode == 0 and len(answer.stdout) > 10, (line, answer)


# -- another client ----------------------------------------------------------------------------------------------------


@pytest.mark.clients
def test_litellm(server, offline):
    litellm = pytest.importorskip("litellm")
    options = dict(model=f"openai/{MODEL}", api_base=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=12)
    text = expected(offline, QUESTION).text
    answer = litellm.completion(messages=QUESTION, **options)
    assert answer.choices[0].message.content == text and answer.usage.completion_tokens == 12
    chunks = litellm.completion(messages=QUESTION, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=QUESTION, **options | {"temperature": -3})
