"""`nanovllm chat`: what is piped in, what is typed in a terminal, commands, and a server's answers."""

import json
import os
import pty
import re
import select
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest
from programs import Program

from nanovllm.sampling_params import SamplingParams
from nanovllm.serve import cli
from nanovllm.serve.terminal import lines
from nanovllm.serve.terminal.commands import CHAT_SAMPLING
from nanovllm.serve.terminal.conversation import COMMANDS, Conversation
from nanovllm.serve.terminal.sources import LocalModel, Piece, Server
from nanovllm.utils.waiting import waiting_for

LOCAL = ["tiny-qwen3", "--device=cpu", "--dtype=float32", "--temperature=0"]
ENVIRONMENT = os.environ | {"TERM": "dumb"}
PROMPT = "> "


class Parrot:
    """Answers with the last message, and keeps what it was asked."""

    name, description = "parrot", "a parrot"

    def __init__(self):
        self.asked = []

    def check(self, params):
        SamplingParams(**params)

    def all_params(self, params):
        return {"temperature": 1.0} | params

    def stream(self, messages, params):
        self.asked.append(([(message["role"], message["content"]) for message in messages], params))
        question = messages[-1]["content"]
        if question == "fail":
            raise OSError("it has failed")
        if question == "silence":
            yield Piece("", "", 1, "stop")
            return
        for i, word in enumerate(question.split(), 1):
            yield Piece(f"{word} ", "thought" * (i == 1), i, None)
            if word == "interrupt":
                raise KeyboardInterrupt
        yield Piece("", "", len(question.split()), "length" if "long" in question else "stop")


@pytest.fixture
def typed(monkeypatch, capsys):
    """A conversation with the parrot, of these lines: (exit status, output, errors, the parrot)."""

    def run(*typed_lines: str, **settings):
        rest = [*typed_lines]
        parrot = run.parrot = Parrot()

        def read(prompt: str = "") -> str:
            if not rest:
                raise EOFError
            if isinstance(line := rest.pop(0), BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        status = Conversation(parrot, settings.pop("params", {}), CHAT_SAMPLING, **settings).run()
        return status, *capsys.readouterr(), parrot

    return run


def test_turns_have_the_history(typed):
    status, output, errors, parrot = typed("one", "", "two words", "/clear", "three", system="be brief")
    assert (status, output) == (0, "one \ntwo words \nthree \n")
    system = ("system", "be brief")
    first = [("user", "one"), ("assistant", "one ")]
    assert [messages for messages, _ in parrot.asked] == [
        [system, ("user", "one")],
        [system, *first, ("user", "two words")],
        [system, ("user", "three")],
    ]
    summaries = errors.replace("thought\n\n", "").splitlines()
    assert re.fullmatch(r"\[1 token, first token after \d\.\d\d s, finish reason: stop\]", summaries[0])
    assert re.fullmatch(
        r"\[2 tokens, [\d.]+ tokens/s, first token after \d\.\d\d s, finish reason: stop\]", summaries[1]
    )


def test_why_an_answer_has_ended_is_said(typed):
    status, _, errors, parrot = typed("a long one", "silence", "fail", "again")
    assert (
        "finish reason: length]" in errors
        and "no text, finish reason: stop]" in errors
        and "Error: it has failed" in errors
    )
    assert status == 1  # as something that was piped in has failed
    assert ("user", "fail") not in parrot.asked[-1][0] and parrot.asked[-1][0][-1] == ("user", "again")


def test_lines_are_continued(typed):
    *_, parrot = typed("first\\", "second", " /not a command", "\\")
    assert [messages[-1][1] for messages, _ in parrot.asked] == ["first\nsecond", " /not a command"]


def test_commands(typed, tmp_path):
    file = tmp_path / "saved.json"
    status, _, errors, parrot = typed(
        *("/system be kind", "/system", "/params temperature=0.5 'stop=a b' seed=3", "hello", f"/save {file}"),
        *("/params seed=", "/params", "/system -", "hello again", "/exit", "never reached"),
    )
    assert status == 0 and len(parrot.asked) == 2
    assert parrot.asked[0][1] == {"temperature": 0.5, "stop": "a b", "seed": 3}
    assert parrot.asked[1][1] == {"temperature": 0.5, "stop": "a b"} and parrot.asked[1][0][0][0] == "user"
    assert json.loads(file.read_text()) == {
        "model": "parrot",
        "params": {"temperature": 0.5, "stop": "a b", "seed": 3},
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "hello "},
        ],
    }
    assert errors.count("system prompt: be kind") == 2 and "system prompt: none" in errors
    assert 'temperature=0.5 stop="a b"\n' in errors


def test_wrong_commands_change_nothing(typed, tmp_path):
    file = tmp_path / "there"
    file.write_text("mine")
    lines = ["/nonsense", "/params temperature=-1", "/params colour=red", "/params seed", "/params top_k=1 stop='"]
    _, _, errors, parrot = typed(*lines, f"/save {file}", "/help", "hello")
    assert parrot.asked[0][1] == {} and file.read_text() == "mine"
    for text in (
        "/nonsense: no such",
        "temperature=-1.0: must",
        "colour=red: must",
        "seed: must",
        "No closing quotation",
    ):
        assert f"Error: {text}" in errors, text
    assert f"Error: {file} exists already; /save! {file} overwrites it\n" in errors
    assert all(command in errors for command in COMMANDS)


def test_save_overwrites_a_file_when_told_to(typed, tmp_path):
    file = tmp_path / "my chat.json"
    _, _, errors, _ = typed("one", f"/save {file}", "two", f"/save {file}", f"/save! {file}")
    saved = json.loads(file.read_text())["messages"]
    assert [message["content"] for message in saved] == ["one", "one ", "two", "two "]
    assert errors.count(f"saved to {file}\n") == 2 and errors.count("Error: ") == 1


def test_wrong_parameters_are_refused_at_once(typed):
    with pytest.raises(ValueError, match="temperature=-1"):
        typed("hello", params={"temperature": -1})


def test_ctrl_c_of_a_pipe_ends_the_program(typed):
    with pytest.raises(KeyboardInterrupt):
        typed("interrupt me", "never reached")


def test_ctrl_c_in_a_terminal(typed, monkeypatch):
    """The first ends the answer, of which the beginning is kept; only two in a row end the program."""
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with pytest.raises(KeyboardInterrupt):
        typed("interrupt me", "go on", KeyboardInterrupt(), "and on", KeyboardInterrupt(), KeyboardInterrupt(), "no")
    questions = [messages[-1][1] for messages, _ in typed.parrot.asked]
    assert questions == ["interrupt me", "go on", "and on"]
    assert typed.parrot.asked[1][0][:2] == [("user", "interrupt me"), ("assistant", "interrupt ")]


# -- the whole command -------------------------------------------------------------------------------------------------


def test_piped_input(capsys, monkeypatch):
    """Status 1 as one line of it has failed; test_cli.py has status 0, and processes."""
    monkeypatch.setattr(sys, "stdin", StringIO("What is 17 + 25?\n" + "too long " * 3000 + "\nCount from 5 to 9.\n"))
    with pytest.raises(SystemExit) as end:
        cli.main(["chat", *LOCAL])
    printed = capsys.readouterr()
    assert (end.value.code, printed.out) == (1, "42\n5, 6, 7, 8, 9\n") and "Error: prompt" in printed.err
    assert len(re.findall(r"^\[\d+ tokens, [\d.]+ tokens/s, first token after", printed.err, re.MULTILINE)) == 2


@contextmanager
def terminal(*arguments: str, **environment: str):
    """The command in a terminal of its own, as (send, wait for a text, process)."""
    master, slave = pty.openpty()
    options = dict(stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    take_terminal = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    command = [sys.executable, "-c", f"{take_terminal}from nanovllm.serve import cli; cli.main()", "chat", *arguments]
    process = Program(command, env=ENVIRONMENT | environment, **options)
    os.close(slave)
    shown = ""

    def wait_for(text: str, seconds: float = 60) -> str:
        """What has been shown up to this text, which must come."""
        nonlocal shown
        end = time.monotonic() + seconds
        while text not in shown:
            assert time.monotonic() < end, shown
            if select.select([master], [], [], 0.1)[0]:
                shown += os.read(master, 65536).decode(errors="replace")
        before, _, shown = shown.partition(text)
        for _ in range(3 * (text == PROMPT)):  # readline shows it just before it waits for keys
            time.sleep(0.02)
            while Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[-1].split()[0] != "S":
                assert time.monotonic() < end and process.poll() is None, before
                time.sleep(0.01)
        return before

    try:
        yield lambda keys: os.write(master, keys.encode()), wait_for, process
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_terminal(tmp_path):
    """Ctrl-C ends an answer, and the conversation goes on; twice it ends the program. Lines are kept for the next."""
    with terminal(*LOCAL, "--ignore-eos", XDG_STATE_HOME=str(tmp_path)) as (send, wait_for, process):
        wait_for("/help lists the commands.")
        wait_for(PROMPT)
        send("Count from 5 to 9.\n")
        wait_for("5, 6, 7, 8, 9")
        send("\x03")
        wait_for("finish reason: Ctrl-C]")
        wait_for("Ctrl-C again ends the chat.")
        send("/params max_tokens=3 ignore_eos=false\n")
        wait_for("max_tokens=3")
        send("What is 17 + 25?\n")
        wait_for("42")
        wait_for("tokens/s")
        wait_for(PROMPT)
        send("\x03")
        wait_for("Ctrl-C again ends the chat.")
        wait_for(PROMPT)
        send("\x03")
        assert process.wait(20) == 130
    if lines.readline is not None:
        history = (tmp_path / "nanovllm" / "chat_history").read_text()
        assert "Count from 5 to 9." in history and "What is 17 + 25?" in history


def test_terminal_ends_with_its_input(tmp_path):
    """Beside a server, as that takes no model."""
    with answering() as (url, _), terminal(f"--url={url}", XDG_STATE_HOME=str(tmp_path)) as (send, wait_for, process):
        wait_for(PROMPT)
        send("/he\t\n" if lines.readline is not None else "/help\n")  # Tab completes a command
        wait_for("set the system prompt")
        wait_for(PROMPT)
        send("\x04")
        assert process.wait(20) == 0


def test_model_without_a_template(make_llm):
    llm = make_llm("tiny-qwen3")
    template, llm.tokenizer.chat_template = llm.tokenizer.chat_template, None
    with pytest.raises(ValueError, match="no chat template"):
        LocalModel(llm, "tiny-qwen3")
    llm.tokenizer.chat_template = template
    assert "adds, sorts" in LocalModel(llm, "tiny-qwen3").description


def test_reasoning_is_dimmed(capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    lines.write("thought\x1b[2J", sys.stderr, is_dim=True)  # and a model can't control the terminal
    assert capsys.readouterr().err == "\033[2mthought[2J\033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    lines.write("thought", sys.stderr, is_dim=True)
    assert capsys.readouterr().err == "thought"


def test_waiting_is_said(capsys, monkeypatch, caplog):
    """On a terminal by a line that is erased in the end, elsewhere in the log; by the outer one of two."""

    def wait_for(text: str) -> str:
        shown, end = "", time.monotonic() + 10
        while text not in shown:
            assert time.monotonic() < end, shown
            time.sleep(0.01)
            shown += capsys.readouterr().err
        return shown

    monkeypatch.setattr("nanovllm.utils.waiting.DELAY", 0.01)
    with caplog.at_level("INFO", "nanovllm"), waiting_for("Loading a model"), waiting_for("Loading a part"):
        pass
    assert caplog.messages == ["Loading a model ..."]
    capsys.readouterr()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with waiting_for("Loading a model"), waiting_for("Loading a part"):
        shown = wait_for("00:00")
    shown += capsys.readouterr().err
    assert "Loading a part" not in shown
    assert "\rLoading a model: 00:00" in shown and shown.endswith("\r") and "\n" not in shown
    monkeypatch.setattr("nanovllm.utils.waiting.DELAY", 10)
    with waiting_for("Loading a model"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("package, name", [("nanovllm.serve", "AsyncLLM"), ("nanovllm.serve.replicas", "PrefixRouter")])
def test_imports_say_what_they_import(package, name, caplog):
    """The first import may take seconds, because it imports PyTorch."""
    with caplog.at_level("INFO", "nanovllm"):
        assert getattr(import_module(package), name).__name__ == name
    assert caplog.messages == [f"Importing {name} ..."]


# -- a server ----------------------------------------------------------------------------------------------------------


@contextmanager
def answering(*chunks, status=200):
    """A server that answers with these chunks of a stream; yields its URL, and what it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(b'{"data": [{"id": "first"}, {"id": "second"}]}')

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.path, self.headers.get("authorization"), body))
            texts = [chunk if isinstance(chunk, str) else json.dumps(chunk) for chunk in chunks]
            self.reply(texts[0].encode() if status != 200 else "".join(f"data: {x}\n\n" for x in texts).encode())

        def reply(self, content):
            self.send_response(status if self.command == "POST" else 200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def delta(finish_reason=None, **content):
    return {"choices": [{"delta": content, "finish_reason": finish_reason}]}


def test_pieces_of_a_server():
    """Reasoning that the server separates, and that it leaves in the text; the usage has the true number of tokens."""
    separate = [delta(role="assistant"), delta(reasoning="hm"), delta(reasoning_content="m"), delta(content="4")]
    inside = [delta(content="<thi"), delta(content="nk>hmm</think>\n\n4")]
    for chunks in (separate, inside):
        usage = {"choices": [], "usage": {"completion_tokens": 7}}
        with answering(*chunks, delta("stop", content="2"), usage, "[DONE]") as (url, asked):
            server = Server(f"{url}/v1/", None, "key")
            messages = [{"role": "user", "content": "?"}]
            pieces = [*server.stream(messages, {"temperature": 0.5})]
        assert server.name == "first" and url in server.description
        assert "".join(piece.text for piece in pieces) == "42" and "".join(piece.reasoning for piece in pieces) == "hmm"
        assert (pieces[-1].num_tokens, pieces[-1].finish_reason) == (7, "stop")
        ((path, authorization, body),) = asked
        assert (path, authorization) == ("/v1/chat/completions", "Bearer key")
        options = {"stream": True, "stream_options": {"include_usage": True}}
        assert body == {"model": "first", "messages": messages, "temperature": 0.5, **options}


def test_errors_of_a_server():
    ended = [
        (['{"error": {"message": "too many tokens"}}'], 400, "status 400: too many tokens"),
        ([delta(content="4"), {"error": {"message": "the engine is dead"}}], 200, "the engine is dead"),
        ([delta(content="4")], 200, "ended before the answer did"),
    ]
    for chunks, status, message in ended:
        with answering(*chunks, status=status) as (url, _), pytest.raises(OSError, match=message):
            [*Server(url, "m", None).stream([], {})]
    with pytest.raises(OSError, match="refused"):
        Server(url, None, None)
    with pytest.raises(ValueError, match="http://"):
        Server("localhost:8000", None, None)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "needs a MODEL, or the --url of a server"),
        (["--url=http://127.0.0.1:9", "--max-num-seqs=3"], "max_num_seqs: set an engine"),
        (["tiny-qwen3", "--top-p=2"], "top_p=2.0: must be"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["chat", *arguments])
    assert end.value.code == 2 and f"nanovllm chat: {message}" in capsys.readouterr().err
