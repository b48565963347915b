"""bench.py: its workloads are the published ones, its limit is arithmetic, and its commands run."""
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import bench  # noqa: E402

QWEN3_06B = SimpleNamespace(
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, hidden_size=1024, intermediate_size=3072,
    num_hidden_layers=28, vocab_size=151936,
)  # fmt: skip
CONFIG = SimpleNamespace(model_config=QWEN3_06B, dtype=torch.bfloat16, max_num_seqs=512)


def test_headline_is_the_published_one():
    requests = bench.headline(256, 1024, 1024, seed=0, vocab_size=151936)
    assert sum(request.max_tokens for request in requests) == 133_966
    assert sum(len(request.prompt) for request in requests) == 142_827
    other = bench.other_ids(requests, 151936)
    assert all(a.prompt != b.prompt and len(a.prompt) == len(b.prompt) for a, b in zip(requests, other))


def test_limit():
    """Of one step it is what one can add up by hand; of the headline what others worked out for this chip."""
    weights = 2 * (28 * (4096 * 1024 + 2048 * 1024 + 6144 * 1024 + 3072 * 1024) + 151936 * 1024)
    keys_and_values = 28 * 2 * 8 * 128 * 2
    one_step = bench.limit_seconds([bench.Request([0] * 9, 2)], CONFIG, 1.0, float("inf"))
    assert one_step == weights + 10 * keys_and_values
    alone = bench.limit_seconds([bench.Request([0], 1)], CONFIG, 1.0, 1.0)
    assert alone == weights + 2 * 16 * 128 * 28  # two operations a weight, and one key that one query attends to
    requests = bench.headline(256, 1024, 1024, seed=0, vocab_size=151936)
    rate = 133_966 / bench.limit_seconds(requests, CONFIG, 4.45e12, 790e12)
    assert rate == pytest.approx(37_556, rel=0.01)


def run(*arguments: str) -> str:
    command = [sys.executable, "bench.py", "--num-seqs", "3", "--max-input-len", "32", "--max-output-len", "24", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_one_call_does_all_workloads():
    out = run("--prefill-len", "40")
    assert "from start to the first token" in out
    assert [line.split(":")[0] for line in out.splitlines() if "requests" in line] == ["headline", "single", "prefill"]


def test_streaming_beside_generate():
    out = run("--streaming").splitlines()
    assert [line.split()[0] for line in out] == ["generate", "stream", "stream"] and "median of 7 pairs" in out[-1]


def test_profile_writes_traces(tmp_path):
    out = run("--profile", str(tmp_path))
    assert {file.name for file in tmp_path.iterdir()} == {"decode-1.json", "decode-3.json"}
    assert out.count("us in all") == 2
