"""bench.py: its workloads are the published ones, its limit can be checked by hand, and its commands run."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench

ROOT = Path(__file__).parents[1]
QWEN3_06B = SimpleNamespace(
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    vocab_size=151936,
)
CONFIG = SimpleNamespace(model_config=QWEN3_06B, dtype=torch.bfloat16, max_num_seqs=512)


def test_headline_is_the_published_one():
    requests = bench.headline(256, 1024, 1024, seed=0, vocab_size=151936)
    assert sum(request.max_tokens for request in requests) == 133_966
    assert sum(len(request.prompt) for request in requests) == 142_827
    other = bench.other_ids(requests, 151936)
    assert all(a.prompt != b.prompt and len(a.prompt) == len(b.prompt) for a, b in zip(requests, other))


def test_limit():
    """The limit of one step is a sum that one can check by hand; that of the headline was derived separately."""
    weights = 2 * (28 * (4096 * 1024 + 2048 * 1024 + 6144 * 1024 + 3072 * 1024) + 151936 * 1024)
    keys_and_values = 28 * 2 * 8 * 128 * 2
    one_step = bench.limit_seconds([bench.Request([0] * 9, 2)], CONFIG, 1.0, float("inf"))
    assert one_step == weights + 10 * keys_and_values
    prefill_only = bench.limit_seconds([bench.Request([0], 1)], CONFIG, 1.0, 1.0)
    assert prefill_only == weights + 2 * 16 * 128 * 28  # two operations a weight, and one key that one query attends to
    requests = bench.headline(256, 1024, 1024, seed=0, vocab_size=151936)
    rate = 133_966 / bench.limit_seconds(requests, CONFIG, 4.45e12, 790e12)
    assert rate == pytest.approx(37_556, rel=0.01)


@pytest.mark.parametrize("lengths", [(1, 1), (2, 7), (100_000, 1), (1, 100_000)])
def test_smallest_workloads(lengths, monkeypatch, capsys):
    """However the lengths are scaled, a request has input and output tokens and fits into the model's length."""
    seen = {}
    monkeypatch.setitem(
        bench.ENGINES, "nanovllm", lambda model, settings, workloads: seen.update(workloads) or fake(workloads)
    )
    main(monkeypatch, "--num-seqs", "1", "--max-input-len", str(lengths[0]), "--max-output-len", str(lengths[1]))
    assert list(seen) == ["headline", "single", "prefill"]
    for request in (request for runs in seen.values() for requests in runs for request in requests):
        assert len(request.prompt) >= 1 and request.max_tokens >= 1
        assert len(request.prompt) + request.max_tokens <= 2048
    assert "headline: 1 requests" in capsys.readouterr().out


def fake(workloads: dict) -> dict:
    return bench.measure("nanovllm", lambda runs: bench.Result(1.0, token_times=[[0.5]]), workloads)


def main(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
    bench.main()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--num-seqs", "0"), ("--num-seqs", "0", "at least 1")),
        (("--num-seqs", "-3"), ("--num-seqs", "-3", "at least 1")),
        (("--max-input-len", "0"), ("--max-input-len", "0", "at least 1")),
        (("--max-output-len", "-1"), ("--max-output-len", "-1", "at least 1")),
        (("--prefill-len", "0"), ("--prefill-len", "0", "at least 1")),
        (("--prefill-len", "many"), ("--prefill-len", "'many'", "integer")),
        (("--seed", "-1"), ("--seed", "-1", "at least 0")),
        (("--compare", "nanovllm"), ("--compare", "'nanovllm'", "transformers, vllm")),
        (("--compare", "transformers,tgi"), ("--compare", "'tgi'", "transformers, vllm")),
        (("--top-k", "-2"), ("top_k", "-2", "-1")),
        (("--top-p", "1.5"), ("top_p", "1.5", "1")),
        (("--top-p", "nan"), ("top_p", "nan")),
        (("--model", "/no/such/folder"), ("/no/such/folder", "no such folder")),
        (("--max-num-seqs", "0"), ("max_num_seqs", "0", "1")),
        (("--max-model-len", "1"), ("max_model_len", "1", "2")),
        (("--dtype", "int3"), ("dtype", "int3", "bfloat16")),
        (("--profile", __file__), ("--profile", __file__, "folder")),
        (("--profile", f"{__file__}/traces"), ("--profile", __file__, "folder")),
        (("--save", __file__), ("--save", __file__, "results file")),
        (("--figure", "no_such_file.svg"), ("--figure", "no_such_file.svg", ".json")),
        (("--figure", __file__), ("--figure", __file__, ".svg")),
    ],
)
def test_bad_arguments_are_one_line(arguments, words, monkeypatch, capsys):
    """The error names the option, the value and the bound, and no engine is started before it."""
    for engine in bench.ENGINES:
        monkeypatch.setitem(bench.ENGINES, engine, lambda *_: pytest.fail("an engine was started"))
    with pytest.raises(SystemExit) as stopped:
        main(monkeypatch, *arguments)
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("bench.py: error: ") and all(word in last for word in words)


def test_progress(monkeypatch, capsys):
    """A line when an engine or a workload starts and ends; missing engines are left out, and none runs twice."""
    for engine in ("nanovllm", "transformers"):
        monkeypatch.setitem(bench.ENGINES, engine, lambda model, settings, workloads: fake(workloads))
    monkeypatch.setattr(bench, "run_in_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None if name == "vllm" else SimpleNamespace())
    main(monkeypatch, "--compare", "transformers,vllm,,transformers", "--workload", "single", "--device", "cpu")
    lines = [line.split(" after")[0] for line in capsys.readouterr().err.splitlines()]
    own = ["nanovllm: single starts", "nanovllm: single ends"]
    assert lines[:4] == ["nanovllm: starts", *own, "nanovllm: ends"]
    assert lines[4:] == ["transformers: starts", *own, "transformers: ends", "vllm: not installed, left out"]


def run(*arguments: str) -> str:
    lengths = ["--num-seqs", "3", "--max-input-len", "32", "--max-output-len", "24"]
    command = [sys.executable, "bench.py", *lengths, *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_one_call_does_all_workloads():
    out = run("--prefill-len", "40")
    assert "from start to the first token" in out
    assert [line.split(":")[0] for line in out.splitlines() if "requests" in line] == ["headline", "single", "prefill"]


def test_streaming_beside_generate():
    out = run("--streaming").splitlines()
    assert [line.split()[0] for line in out] == ["generate", "stream", "stream"] and "median of 7 pairs" in out[-1]


def test_beams_beside_transformers(monkeypatch, capsys):
    main(monkeypatch, "--beams", "2", "--max-output-len", "4", "--device", "cpu")
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out] == ["2", "nanovllm", "transformers"] and "20 tokens in, 4 out" in out[0]


def test_profile_writes_traces(tmp_path):
    out = run("--profile", str(tmp_path))
    assert {file.name for file in tmp_path.iterdir()} == {"decode-1.json", "decode-3.json"}
    assert out.count("us in all") == 2


def test_save_merges_results(monkeypatch, tmp_path):
    """Later calls add workloads and setups, and replace what they measure again."""
    file = tmp_path / "results.json"
    monkeypatch.setitem(bench.ENGINES, "nanovllm", lambda model, settings, workloads: fake(workloads))
    main(monkeypatch, "--workload", "single", "--max-output-len", "24", "--device", "cpu", "--save", str(file))
    assert json.loads(file.read_text()) == {
        "notes": "cpu, torch.bfloat16",
        "results": {"tiny-qwen3": {"single": {"nanovllm": 12}}},
    }
    bench.save_results(file, "", "tiny-qwen3", {"single": {"vllm": 10.4}, "prefill": {"nanovllm": 7.0}})
    bench.save_results(file, "", "tiny-qwen3 on 2 GPUs", {"single": {"nanovllm": 20.6}})
    assert json.loads(file.read_text()) == {
        "notes": "cpu, torch.bfloat16",
        "results": {
            "tiny-qwen3": {"single": {"nanovllm": 12, "vllm": 10}, "prefill": {"nanovllm": 7}},
            "tiny-qwen3 on 2 GPUs": {"single": {"nanovllm": 21}},
        },
    }


def test_figure_is_drawn(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    bench.save_results(tmp_path / "a.json", "a note", "a model", {"single": {"nanovllm": 1234, "vllm": 1000}})
    main(monkeypatch, "--figure", str(tmp_path / "a.svg"))
    text = (tmp_path / "a.svg").read_text()
    assert all(word in text for word in ("a note", "a model, single stream", "1,234", "1,000", "relative to vLLM"))
