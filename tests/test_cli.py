"""The command line: flags from the settings, the commands, and the end of a server's process."""

import contextlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from common import CUDA

import nanovllm
from nanovllm.benchmarks import engines
from nanovllm.config import Config
from nanovllm.serve import address, cli
from nanovllm.serve.settings import ServerSettings
from nanovllm.utils.flags import descriptions, given

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
CPU = ["--device=cpu", "--dtype=float32"]


def parse(*arguments: str):
    return cli.parse(arguments)


def test_every_setting_is_a_flag():
    options = parse(
        *("serve", "tiny-qwen3", "--max-num-seqs=7", "--no-enable-prefix-caching", "--async-scheduling", "--seed=3"),
        *("--gpu-memory-utilization=0.5", "--dtype=float32", "--num-kvcache-blocks=9", "--scheduling-policy=priority"),
        *("--port=0", "--api-key=a", "--api-key=b", "--allowed-origins=https://x.org", "--request-timeout=5"),
    )
    assert given(options, Config) == dict(
        model="tiny-qwen3",
        max_num_seqs=7,
        enable_prefix_caching=False,
        async_scheduling=True,
        seed=3,
        gpu_memory_utilization=0.5,
        dtype="float32",
        num_kvcache_blocks=9,
        scheduling_policy="priority",
    )
    server = given(options, ServerSettings)
    assert server == dict(port=0, api_key=("a", "b"), allowed_origins=("https://x.org",), request_timeout=5.0)
    assert ServerSettings(**server).drain_seconds == 30 and ServerSettings(**server).max_queued_requests == 1024
    assert given(parse("serve", "m"), Config) == {"model": "m"}
    options = parse("generate", "m", "p", "--temperature=0.5", "--stop=a", "--stop=b", "--seed=4", "--max-num-seqs=2")
    assert (options.temperature, options.stop, options.seed, options.max_num_seqs) == (0.5, ["a", "b"], 4, 2)


VLLM_LINES = [
    (
        "Qwen/Qwen3-8B --tensor_parallel_size=2 --max_model_len 512 --enable_prefix_caching "
        "--gpu_memory_utilization 0.5",
        dict(tensor_parallel_size=2, max_model_len=512, enable_prefix_caching=True, gpu_memory_utilization=0.5),
        {},
    ),
    (
        "--trust-remote-code --model Qwen/Qwen3-8B -tp 2 -dp 1 -pp 1 --block-size 16 --num-gpu-blocks-override 9 -O3",
        dict(tensor_parallel_size=2, kvcache_block_size=16, num_kvcache_blocks=9),
        {},
    ),
    (
        "--swap-space 4 --disable-log-requests --enable-chunked-prefill --no-enable-log-requests Qwen/Qwen3-8B",
        {"swap_space": 4.0},
        {},
    ),
    ("--kv-offloading-size 4 Qwen/Qwen3-8B", {"swap_space": 4}, {}),
    (
        'Qwen/Qwen3-8B --kv-transfer-config {"kv_connector":"OffloadingConnector","kv_role":"kv_both",'
        '"kv_connector_extra_config":{"cpu_bytes_to_use":1073741824}}',
        {"swap_space": 1},
        {},
    ),
    (
        "Qwen/Qwen3-8B --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser deepseek_r1 "
        "--served-model-name a b --enable-prompt-tokens-details --enable-force-include-usage --uvicorn-log-level info",
        {},
        dict(
            tool_call_parser="hermes",
            reasoning_parser="deepseek_r1",
            served_model_name=("a", "b"),
            enable_force_include_usage=True,
        ),
    ),
    (
        '--allowed-origins ["*","https://x.org"] --allowed-methods ["*"] --root-path /v '
        "--api-key a --api-key b Qwen/Qwen3-8B",
        {},
        dict(allowed_origins=("*", "https://x.org"), root_path="/v", api_key=("a", "b")),
    ),
    (
        "--model=Qwen/Qwen3-8B --reasoning-parser qwen3 --tool-call-parser llama4_json --uds /tmp/x --no-enable-eplb",
        {},
        dict(reasoning_parser="qwen3", tool_call_parser="llama3_json", uds="/tmp/x"),
    ),
]


@pytest.mark.parametrize("line, engine, server", VLLM_LINES, ids=lambda value: str(value)[:30])
def test_command_lines_of_vllm(monkeypatch, line, engine, server):
    pytest.importorskip("fastapi")
    from nanovllm.serve import server as serving

    made = []
    monkeypatch.setattr("nanovllm.serve.settings.available_cores", lambda: 2)  # HTTP has no process of its own
    monkeypatch.setattr(address, "listening_socket", lambda settings: contextlib.nullcontext(made.append(settings)))
    monkeypatch.setattr(cli, "make_client", lambda *arguments: made.append(arguments) or MagicMock())
    monkeypatch.setattr(serving, "run_server", lambda *arguments: 0)
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", *line.split()])
    settings, (model, of_client, engine_settings) = made
    assert (end.value.code, model, of_client, engine_settings) == (0, "Qwen/Qwen3-8B", settings, engine)
    default = ServerSettings()
    changed = {name: value for name, value in vars(settings).items() if value != getattr(default, name)}
    assert changed == server


@pytest.mark.parametrize(
    "line, engine",
    [
        ("tiny-qwen3", {"kvcache_block_size": 16, "num_kvcache_blocks": 200}),
        ("tiny-qwen3 --seed 1", {"seed": 1, "kvcache_block_size": 16, "num_kvcache_blocks": 200}),
        ("tiny-qwen3 --num-kvcache-blocks 9", {"num_kvcache_blocks": 9}),
        ("tiny-qwen3 --block-size 32", {"kvcache_block_size": 32}),
        ("tiny-qwen3 --task embed", {"task": "embed"}),  # there are no chats to show
        ("Qwen/Qwen3-8B", {}),
    ],
)
def test_bundled_model_has_a_small_cache(monkeypatch, caplog, line, engine):
    """So that its page has something to show, unless a flag says otherwise; a line at the start says it."""
    serving, made = pytest.importorskip("nanovllm.serve.server"), []
    monkeypatch.setattr("nanovllm.serve.settings.available_cores", lambda: 2)
    monkeypatch.setattr(address, "listening_socket", lambda settings: contextlib.nullcontext())
    monkeypatch.setattr(cli, "make_client", lambda *arguments: made.append(arguments[-1]) or MagicMock())
    monkeypatch.setattr(serving, "run_server", lambda *arguments: 0)
    with pytest.raises(SystemExit), caplog.at_level("INFO", "nanovllm"):
        cli.main(["serve", *line.split()])
    assert made == [engine]
    assert ("(200 blocks of 16 tokens)" in caplog.text) == (engine.get("num_kvcache_blocks") == 200)


def test_unix_socket_chat_template_and_forced_fields(tmp_path):
    """The chat template of the server is a file here. No request asks for the usage or for ids instead of texts."""
    httpx, openai = pytest.importorskip("httpx"), pytest.importorskip("openai")
    pytest.importorskip("fastapi")
    from nanovllm.serve import AsyncLLM
    from nanovllm.serve.address import listening_socket
    from nanovllm.serve.server import make_server

    path, template = tmp_path / "socket", tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }} = ", "utf-8")
    settings = ServerSettings(
        uds=str(path), chat_template=str(template), enable_force_include_usage=True, return_tokens_as_token_ids=True
    )
    llm = AsyncLLM("tiny-qwen3", device="cpu", dtype="float32", num_kvcache_blocks=8)
    server = make_server(llm, settings, "tiny-qwen3")
    with listening_socket(settings) as listener:
        listener.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        transport = httpx.HTTPTransport(uds=str(path))
        with openai.OpenAI(
            base_url="http://any.name/v1", api_key="x", http_client=httpx.Client(transport=transport)
        ) as client:
            messages = [{"role": "user", "content": "17 + 25"}]
            ask = {"model": "tiny-qwen3", "messages": messages, "max_tokens": 2, "logprobs": 1}
            chunks = [*client.chat.completions.create(**ask, stream=True)]
        server.should_exit = True
        thread.join(20)
    llm.exit()
    num_tokens = len(llm.engine.tokenizer.encode("17 + 25 = "))
    assert [chunk.usage.prompt_tokens for chunk in chunks] == [num_tokens] * len(chunks)
    logprobs = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    tokens = [entry.token for entries in logprobs for entry in entries.content]
    assert tokens and all(token.startswith("token_id:") for token in tokens)


@pytest.mark.parametrize("settings", [Config, ServerSettings])
def test_every_flag_has_help(settings, capsys):
    texts = descriptions(settings)
    for field in settings.__dataclass_fields__.values():
        if field.init and field.name not in ("_", "model"):
            assert len(texts[field.name]) > 10, field.name
    with pytest.raises(SystemExit) as end:
        parse("serve", "--help")
    text = capsys.readouterr().out
    assert (
        end.value.code == 0
        and "--kvcache-block-size N" in text
        and "by default 4096 or the model's own limit" in " ".join(text.split())
    )
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench"])
def test_help_is_in_the_words_of_a_shell(command, capsys):
    """No Python, and flags instead of the names of fields; `chat` has a default of its own."""
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if re.search(r"--[a-z-]+-$", line)], "a flag of two lines"
    text = " ".join(" ".join(lines).split())
    assert end.value.code == 0 and "(default: )" not in text
    assert not re.search(r"None|True|False|VALUE|torch\.|priority_key", text)
    assert "value comes first) (default: fcfs)" in text and "also limits --max-model-len" in text
    assert "--dtype DTYPE" in text and "do not use CUDA graphs (default: off)" in text
    assert ("(default: as long as the context)" in text) == (command == "chat")


def test_an_address_in_use(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SystemExit) as end:
            cli.main(["serve", "tiny-qwen3", f"--port={(port := taken.getsockname()[1])}"])
        assert end.value.code == 2
        assert f"host='127.0.0.1', port={port}: Address already in use" in capsys.readouterr().err


def test_generate(capsys):
    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            cli.main(["generate", "tiny-qwen3", *arguments, "--temperature=0", "--max-tokens=8", *CPU])
        assert end.value.code == 0
        return capsys.readouterr().out

    text = run("KING RICHARD.\n", "--no-chat")
    assert len(text) > 8
    assert run("KING RICHARD.\n", "--no-chat", "--n=2") == f"--- 1 of 2\n{text}--- 2 of 2\n{text}"
    assert run("What is 17 + 25?") == "42\n" == run("What is 17 + 25?", "--chat")


@pytest.mark.parametrize(
    "arguments, error",
    [
        ([], "nanovllm: error: the following arguments are required: COMMAND; see nanovllm --help"),
        (["generate"], "nanovllm generate: error: the following arguments are required: MODEL, PROMPT; see "),
        (["serve"], "nanovllm serve: error: the following arguments are required: MODEL; see nanovllm serve --help"),
        (
            ["generate", "m", "p", "--max-tok=3"],
            "error: unrecognized arguments: --max-tok=3 (did you mean --max-tokens?); see nanovllm generate --help",
        ),
        (
            ["serve", "m", "--max-num-s=3"],
            "nanovllm serve: error: unrecognized arguments: --max-num-s=3 (did you mean --max-num-seqs?)",
        ),
        (
            ["serve", "m", "n", "--zzz"],
            "nanovllm serve: error: unrecognized arguments: n --zzz; see nanovllm serve --help",
        ),
        (["serve", "m", "--response-role=x"], "nanovllm serve: error: response_role='x'"),
        (
            ["chat", "m", "--temp=3"],
            "nanovllm chat: error: unrecognized arguments: --temp=3 (did you mean --temperature?)",
        ),
        (
            ["bench", "--num-s=3"],
            "nanovllm bench: error: unrecognized arguments: --num-s=3 (did you mean --num-seqs?); see ",
        ),
        (["chat"], "nanovllm chat: error: needs a MODEL, or the --url of a server"),
        (
            ["generate", "tiny-qwen3", "p", "--max-tokens=0"],
            "nanovllm generate: error: max_tokens=0: must be at least 1",
        ),
        (["chat", "../nothing"], "nanovllm chat: error: model='../nothing': no such folder"),
        (["--vers"], "nanovllm: error: "),
        (["genrate", "m", "p"], "invalid choice: 'genrate' (did you mean 'generate'?)"),
        (
            ["chat", "--model", "m"],
            "unrecognized arguments: --model (MODEL is given without a flag); see nanovllm chat",
        ),
        (["serve", "m", "--temperature=0"], "unrecognized arguments: --temperature=0; see nanovllm serve --help"),
        (["generate", "m", "What", "is", "1 + 1"], "is 1 + 1 (a PROMPT of several words needs quotes); see nanovllm g"),
        (["bench", "bathces"], "'bathces' (did you mean 'batches'?): must be one of"),
        (["generate", "tiny-qwen", "p"], "model='tiny-qwen': no such folder; did you mean 'tiny-qwen3'?"),
        (
            ["chat", "tiny_qwen3"],
            "nanovllm chat: error: model='tiny_qwen3': no such folder; did you mean 'tiny-qwen3'?",
        ),
    ],
)
def test_what_is_wrong_takes_one_line(arguments, error, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    line, *rest = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and error in line and not rest


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"nanovllm {nanovllm.__version__}\n")


NO_TORCH = ["--help", "--version", "", *(f"{name} --help" for name in cli.COMMANDS), "chat", "chat m --url http://x"]
NO_TORCH += [f"{command} ./nope" for command in ("serve", "generate -", "chat", "show-fused", "bench --model")]


@pytest.mark.parametrize("arguments", NO_TORCH)
def test_help_a_wrong_model_and_a_chat_with_a_server_need_no_torch(arguments):
    """Half a second of a processor's time at most, the best of three; the clock would count other programs, too."""
    code = "import sys, time; from nanovllm.serve import cli\ntry: cli.main(sys.argv[1:])\nfinally: "
    code += "print({'torch', 'transformers', 'fastapi', 'safetensors'} & {*sys.modules}, file=sys.stderr); "
    code += "print(time.process_time(), file=sys.stderr)"
    seconds = []
    for _ in range(3):
        command = [sys.executable, "-c", code, *arguments.split()]
        ended = subprocess.run(command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        *_, imported, used = ended.stderr.splitlines()
        assert imported == "set()"
        seconds.append(float(used))
        if seconds[-1] < 0.5:
            return
    pytest.fail(f"{seconds} s")


def test_names_of_the_package_are_imported_when_used():
    from nanovllm import serve

    assert {*nanovllm.__all__} <= {*dir(nanovllm)}
    assert {getattr(nanovllm, name).__name__ for name in nanovllm.__all__} == {*nanovllm.__all__}
    assert {getattr(serve, name).__name__ for name in serve.__all__} == {*serve.__all__}
    for module in (nanovllm, serve):
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'nonsense'"):
            module.nonsense  # noqa: B018


@pytest.fixture(scope="module")
def completion_script(tmp_path_factory):
    @cache
    def write(shell: str) -> Path:
        command = [sys.executable, "-m", "nanovllm", "completion", shell]
        file = tmp_path_factory.mktemp("completion") / f"nanovllm.{shell}"
        file.write_bytes(subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=True).stdout)
        return file

    return write


BASH = "source {script}; COMP_WORDS=({line}); COMP_CWORD={index}; %s; echo ${{COMPREPLY[@]}}"
COMPLETIONS = {
    "bash": BASH % "_nanovllm",
    "zsh": "autoload -U compinit; compinit -u -D; " + BASH % "emulate ksh -c _nanovllm",  # as bashcompinit calls it
    "fish": "source {script}; complete -C '{line}' | cut -f 1",
}


@pytest.mark.parametrize(
    "line, found",
    [
        ("nanovllm ge", ["generate"]),
        ("nanovllm --v", ["--version"]),
        ("nanovllm serve --kvcache", ["--kvcache-block-size"]),
        ("nanovllm chat tiny", ["tiny-qwen3"]),
        ("nanovllm chat tiny-qwen3 --no-enable-p", ["--no-enable-prefix-caching"]),
        ("nanovllm bench --batch-s", ["--batch-sizes"]),
        ("nanovllm completion b", ["bash"]),
        ("nanovllm generate nonsense", []),
    ],
)
@pytest.mark.parametrize("shell", COMPLETIONS)
def test_completion(shell, line, found, completion_script):
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    command = COMPLETIONS[shell].format(script=completion_script(shell), line=line, index=len(line.split()) - 1)
    folder = completion_script(shell).parent  # fish completes the names of files, too
    ended = subprocess.run([shell, "-c", command], capture_output=True, text=True, check=True, cwd=folder)
    words = ended.stdout.split()
    if shell == "zsh":  # which leaves out itself what does not begin so
        words = [word for word in words if word.startswith(line.split()[-1])]
    assert words == found and not ended.stderr


@pytest.mark.parametrize("shell", COMPLETIONS)
def test_completion_has_all_commands_and_flags(shell, completion_script):
    words = {*re.findall(r"[\w-]+", completion_script(shell).read_text())}
    assert {*cli.COMMANDS, "--help", "--kvcache-block-size", "--top-p", "--url", "--batch-sizes", shell} <= words


def test_generate_says_why_it_has_ended(capsys):
    def run(*arguments: str) -> tuple[str, str]:
        with pytest.raises(SystemExit):
            cli.main(["generate", "tiny-qwen3", "What is 17 + 25?", "--temperature=0", *arguments, *CPU])
        return capsys.readouterr()

    assert re.search(r"^\[3 tokens, .*, finish reason: stop\]$", run()[1], re.MULTILINE)
    assert "[1 token, " in (shown := run("--max-tokens=1"))[1] and ", finish reason: length]" in shown[1]
    output, errors = run("--stop=4")  # an answer without text
    assert output == "\n" and ", no text, finish reason: stop]" in errors
    output, errors = run("--stop=4", "--n=2")
    assert output == "--- 1 of 2\n\n--- 2 of 2\n\n" and errors.count(" no text, finish reason: stop]") == 2


def test_bench(tmp_path, monkeypatch, capsys):
    """It writes no file, and gives each engine a process of its own; transformers' is this one here."""
    in_process, started, fork = engines.run_in_process, [], multiprocessing.get_context("fork")

    def run(function, *arguments):
        started.append(function)
        return in_process(function, *arguments) if function is engines.run_nanovllm else function(*arguments)

    monkeypatch.setattr(engines, "run_in_process", run)
    if not CUDA:  # which forks can't use; they have imported PyTorch
        monkeypatch.setattr("multiprocessing.get_context", lambda kind: fork)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(
            ["bench", "single", "--compare=transformers", "--device=cpu", "--max-input-len=16", "--max-output-len=8"]
        )
    rows = [line.split()[0] for line in capsys.readouterr().out.split("single: 1 request,")[1].splitlines()[1:4]]
    assert rows == ["engine", "nanovllm", "transformers"] and end.value.code == 0
    assert started == [engines.run_nanovllm, engines.run_transformers] and not list(tmp_path.iterdir())


IMPORTING = ("libtorch_python", "libtorch_cpu")  # libraries that a process has mapped while it imports PyTorch


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("example.py",), -signal.SIGINT),
        (("bench.py",), -signal.SIGINT),
        (("-m", "nanovllm", "generate", "tiny-qwen3", "x"), 130),
        (("-m", "nanovllm", "bench", "single"), 130),
        (("-m", "nanovllm", "show-fused", "tiny-qwen3"), 130),
    ],
    ids=lambda part: part[-2] if isinstance(part, tuple) and len(part) > 2 else None,
)
def test_ctrl_c_while_pytorch_is_imported(command, status):
    """It ends the program at once, and nothing is printed. A shell sees status 130 in both cases."""
    if command[0].endswith(".py"):
        command = [str(Path(cli.__file__).parents[2] / command[0])]
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=ENVIRONMENT
    )
    folder = Path(f"/proc/{process.pid}")
    while process.poll() is None and not any(name in (folder / "maps").read_text() for name in IMPORTING):
        time.sleep(0.01)
    ticks = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]  # of user and system time
    process.send_signal(signal.SIGINT)
    _, ended, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(ended)
    assert process.returncode == status and process.stderr.read() == b""
    # in seconds of processor time, which do not depend on what else runs; the imports take longer
    assert usage.ru_utime + usage.ru_stime - sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") < 1


def test_bench_has_its_own_arguments(capsys):
    for arguments, message in [(["nonsense"], "WORKLOAD: 'nonsense'"), (["--num-seqs", "0"], "--num-seqs: 0")]:
        with pytest.raises(SystemExit) as end:
            cli.main(["bench", *arguments])
        assert end.value.code == 2
        assert f"nanovllm bench: error: argument {message}: must be" in capsys.readouterr().err


def test_serve_needs_its_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", "tiny-qwen3"])
    assert end.value.code == 2 and "pip install 'nano-vllm[serve]'" in capsys.readouterr().err


def test_serve_says_that_it_loads(monkeypatch, capsys, caplog):
    """From a second on, until the server listens."""
    pytest.importorskip("fastapi")
    from nanovllm.serve import server as serving

    def run_server(llm, settings, model, listener, on_start) -> int:
        time.sleep(0.3)
        assert caplog.messages[-1] == "Loading tiny-qwen3 ..."
        on_start()
        assert "tiny-qwen3 is served at http://" in capsys.readouterr().out
        return 0

    monkeypatch.setattr("nanovllm.utils.waiting.DELAY", 0.05)
    monkeypatch.setattr(cli, "set_up_process", lambda: None)
    monkeypatch.setattr(logging.getLogger("nanovllm"), "handlers", [])  # those of other tests
    monkeypatch.setattr("nanovllm.serve.settings.available_cores", lambda: 2)
    monkeypatch.setattr(cli, "make_client", lambda *arguments: MagicMock())
    monkeypatch.setattr(serving, "run_server", run_server)
    with pytest.raises(SystemExit) as end, caplog.at_level("INFO", "nanovllm"):
        cli.main(["serve", "tiny-qwen3", "--port=0"])
    assert end.value.code == 0 and capsys.readouterr().err == ""


def test_process_serves_a_chat_and_drains_after_sigterm(tmp_path):
    """The whole way: `python -m nanovllm serve`, `nanovllm chat --url` with it, status 0 of both; an answer that is
    running at SIGTERM is completed.

    The server does without AutoTokenizer, with which old transformers import PyTorch's compiler: seconds of a start.
    """
    pytest.importorskip("fastapi")
    program = [sys.executable, "-m", "nanovllm"]
    command = [*program, "serve", "tiny-qwen3", "--port=0", "--drain-seconds=20", *CPU]
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}  # it prints what `import` finds
    with (tmp_path / "imports").open("w+") as imports:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=imports, env=environment, text=True)
    try:
        line = process.stdout.readline()  # is printed when connections are accepted
        assert "tiny-qwen3" in line and "http://127.0.0.1:" in line
        url = line[line.index("http") :].split()[0]
        command = [*program, "chat", f"--url={url}", "--temperature=0"]
        chat = subprocess.run(command, input="What is 17 + 25?\n", env=ENVIRONMENT, capture_output=True, text=True)
        assert (chat.returncode, chat.stdout) == (0, "42\n") and "first token after" in chat.stderr
        body = dict(prompt="HAMLET.\n", temperature=0, max_tokens=150, ignore_eos=True, stream=True)
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            answer.readline()
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            lines = answer.read().decode().split("\n\n")
        assert lines[-2] == "data: [DONE]" and '"finish_reason":"length"' in lines[-3]
        assert process.wait(20) == 0
        imported = {line.rpartition(" ")[2] for line in (tmp_path / "imports").read_text().splitlines()}
        assert "torch" in imported and "transformers.models.auto.auto_factory" not in imported
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "cores, settings, num_fronts",
    [
        (2, {}, 0),
        (3, {}, 0),
        (4, {}, 1),
        (16, {}, 1),
        (16, {"api_server_count": 0}, 0),
        (2, {"api_server_count": 3}, 3),
        (16, {"data_parallel_size": 2}, 0),
        (16, {"data_parallel_size": 2, "api_server_count": 1}, 0),
        (16, {"enable_dev_endpoints": True}, 0),
        (16, {"enable_dev_endpoints": True, "api_server_count": 0}, 0),
        (16, {"uds": "/tmp/socket"}, 1),
    ],
)
def test_http_has_a_process_of_its_own_where_there_are_cores(monkeypatch, cores, settings, num_fronts):
    monkeypatch.setattr("nanovllm.serve.settings.available_cores", lambda: cores)
    assert ServerSettings(**settings).num_fronts == num_fronts


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"api_server_count": -1}, "api_server_count=-1: must be at least 0"),
        ({"api_server_count": 2, "data_parallel_size": 2}, "api_server_count=2: must be at most 1 with data_parallel"),
        ({"api_server_count": 1, "enable_dev_endpoints": True}, "enable_dev_endpoints=True: needs api_server_count=0"),
        ({"data_parallel_size": 2, "enable_dev_endpoints": True}, "data_parallel_size=1, not 0 and 2"),
    ],
)
def test_what_does_not_go_with_several_processes(settings, message):
    with pytest.raises(ValueError, match=message):
        ServerSettings(**settings)


def test_systems_that_share_no_address(monkeypatch, capsys):
    pytest.importorskip("fastapi")
    monkeypatch.delattr(socket, "SO_REUSEPORT", raising=False)
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", "tiny-qwen3", "--port=0", "--api-server-count=2"])
    assert end.value.code == 2 and "api_server_count must be at most 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "limits, expected, warnings",
    [
        ((1024, 4096), [(1256, 4096)], 0),
        ((1024, -1), [(1256, -1)], 0),
        ((1024, 1100), [(1100, 1100)], 1),
        ((1100, 1100), [(1100, 1100)], 1),
        ((1256, 1256), [], 0),
        ((-1, -1), [], 0),
    ],
)
def test_open_files(monkeypatch, caplog, limits, expected, warnings):
    """As many connections as the settings allow, where the system does."""
    pytest.importorskip("fastapi")
    from nanovllm.serve import server as serving

    changes = []
    monkeypatch.setattr(serving.resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(serving.resource, "setrlimit", lambda kind, limits: changes.append(limits))
    monkeypatch.setattr(serving.resource, "RLIM_INFINITY", -1)
    serving.allow_connections(1000)
    assert changes == expected and len(caplog.records) == warnings
    assert all("1100 open files" in text and "max_connections=1000" in text for text in caplog.messages)


def test_a_dead_engine_is_an_exit_status(monkeypatch):
    pytest.importorskip("fastapi")
    from nanovllm.serve import AsyncLLM
    from nanovllm.serve.address import listening_socket
    from nanovllm.serve.server import run_server

    settings = ServerSettings(port=0)
    llm = AsyncLLM("tiny-qwen3", device="cpu", dtype="float32", num_kvcache_blocks=8)

    def broken(**_):
        raise MemoryError("no memory is left")

    def ask() -> None:
        request = urllib.request.Request(url, b'{"prompt": "x"}', {"content-type": "application/json"})
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(request, timeout=20)

    monkeypatch.setattr(llm.engine.scheduler, "schedule", broken)
    with listening_socket(settings) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        listener.listen()
        client = threading.Thread(target=ask)
        client.start()
        assert run_server(llm, settings, "tiny-qwen3", listener) == 1
        client.join(20)
    llm.exit()
    assert not client.is_alive() and llm.engine.model_runner is None
