"""The command line: flags from the settings, the commands, and the end of a server's process."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from nanovllm.config import Config
from nanovllm.serve import cli
from nanovllm.serve.flags import descriptions, given
from nanovllm.serve.settings import ServerSettings

CPU = ["--device=cpu", "--dtype=float32"]


def parse(*arguments: str):
    return cli.make_parser().parse_args(arguments)


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
    assert ServerSettings(**server).drain_seconds == 30 and options.max_queued_requests == 1024
    assert given(parse("serve", "m"), Config) == {"model": "m"}
    options = parse("generate", "m", "p", "--temperature=0.5", "--stop=a", "--stop=b", "--seed=4", "--max-num-seqs=2")
    assert (options.temperature, options.stop, options.seed, options.max_num_seqs) == (0.5, ["a", "b"], 4, 2)


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
        and "None is 4096, or if it is smaller" in " ".join(text.split())
    )
    assert max(map(len, text.splitlines())) <= 110


def test_wrong_command_lines(capsys):
    for arguments, message in [
        (["serve", "tiny-qwen3", "--max-num-seqs=0", *CPU], "max_num_seqs=0: must be at least 1"),
        (["serve", "tiny-qwen3", "--tool-call-parser=x", *CPU], "tool_call_parser='x': must be one of 'auto'"),
        (["serve", "tiny-qwen3", "--api-key="], "api_key='': must have at least 1"),
        (["serve", "/no/such/folder"], "no such folder"),
        (["generate", "tiny-qwen3", "x", "--temperature=-1", *CPU], "temperature=-1.0: must be at least 0"),
        (["serve", "tiny-qwen3", "--port=99999"], "port=99999: must be at most 65535"),
        (["serve"], "MODEL"),
        (["nothing"], "invalid choice"),
    ]:
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == 2 and message in capsys.readouterr().err
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


def test_bench_is_the_script_of_the_repository(monkeypatch, capsys, tmp_path):
    calls = []
    monkeypatch.setattr(os, "execv", lambda *arguments: calls.append(arguments))
    cli.bench(["--help"])
    assert calls == [(sys.executable, [sys.executable, str(cli.BENCH), "--help"])] and cli.BENCH.is_file()
    monkeypatch.setattr(cli, "BENCH", tmp_path / "bench.py")
    with pytest.raises(SystemExit) as end:
        cli.main(["bench"])
    assert end.value.code == 2 and "not in the package" in capsys.readouterr().err


def test_serve_needs_its_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "nanovllm.serve.server", None)
    monkeypatch.delattr("nanovllm.serve.server", raising=False)
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", "tiny-qwen3"])
    assert end.value.code == 2 and "pip install 'nano-vllm[serve]'" in capsys.readouterr().err


def test_process_drains_after_sigterm():
    """The whole way: `python -m nanovllm serve`, an answer that is running at SIGTERM is completed, status 0."""
    pytest.importorskip("fastapi")
    command = [sys.executable, "-m", "nanovllm", "serve", "tiny-qwen3", "--port=0", "--drain-seconds=20", *CPU]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()  # is printed when connections are accepted
        assert "tiny-qwen3" in line and "http://127.0.0.1:" in line
        url = line[line.index("http") :].split()[0]
        body = dict(prompt="HAMLET.\n", temperature=0, max_tokens=300, ignore_eos=True, stream=True)
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            answer.readline()
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            lines = answer.read().decode().split("\n\n")
        assert lines[-2] == "data: [DONE]" and '"finish_reason":"length"' in lines[-3]
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_dead_engine_is_an_exit_status(monkeypatch):
    pytest.importorskip("fastapi")
    from nanovllm.serve import AsyncLLM
    from nanovllm.serve.server import listening_socket, run_server

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
