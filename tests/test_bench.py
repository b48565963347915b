"""Benchmarks: workloads are the published ones, statistics can be checked by hand, and commands run."""

import importlib.util
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from types import ModuleType, SimpleNamespace

import pytest
import torch
from programs import Program
from transformers import AutoConfig, AutoTokenizer

import bench
from nanovllm import LLM, SamplingParams
from nanovllm.benchmarks import clients, command, engines, http, pictures, profiling, servers, sweeps, throughput
from nanovllm.benchmarks.arguments import engine_settings, make_parser, parse
from nanovllm.benchmarks.engines import ENGINES, STEPPED_ENGINES, loops, versions
from nanovllm.benchmarks.engines.loops import measure, serve
from nanovllm.benchmarks.engines.vllm import step_vllm, vllm_settings
from nanovllm.benchmarks.host import host_calls, host_requests
from nanovllm.benchmarks.limits import Rates, least_steps, limits
from nanovllm.benchmarks.pictures import LINE_COLORS
from nanovllm.benchmarks.processes import seconds_since_start
from nanovllm.benchmarks.requests import (
    Request,
    by_turn,
    conversations,
    headline,
    in_rounds,
    online,
    other_ids,
    with_images,
)
from nanovllm.benchmarks.results import Result, decode_rate, drafts_since, fastest, latencies, percentile, save_results
from nanovllm.benchmarks.servers import as_flags, cpu_times, running_server
from nanovllm.benchmarks.shapes import EXTRA_ENTRIES, SHAPE_ENTRIES, SHAPES, TOWER, write_shape
from nanovllm.benchmarks.sweeps import batches_sweep, images_sweep, latency_sweep
from nanovllm.benchmarks.tables import Panel
from nanovllm.benchmarks.throughput import WORKLOADS
from nanovllm.config import Config
from nanovllm.models import ModelConfig, make_model
from nanovllm.vision.tower import VisionTower

ROOT = Path(__file__).parents[1]
QWEN3_06B = ModelConfig(
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    dtype=torch.bfloat16,
    rope_inv_freq=(1.0,) * 64,
    rope_scale=1.0,
    eos_token_ids=frozenset({151645}),
)
CONFIG = SimpleNamespace(model_config=QWEN3_06B, dtype=torch.bfloat16, kv_cache_dtype="auto", max_num_seqs=512)
CONFIG.max_num_batched_tokens = 16384


@pytest.fixture(autouse=True)
def cpu_with_bfloat16(monkeypatch):
    """Then "auto" is the checkpoint's dtype on every machine."""
    monkeypatch.setattr("nanovllm.models.cpu_multiplies", lambda dtype: True)


def test_headline_is_the_published_one():
    requests = headline(256, 1024, 1024, seed=0, vocab_size=151936)
    assert sum(request.max_tokens for request in requests) == 133_966
    assert sum(len(request.prompt) for request in requests) == 142_827
    other = other_ids(requests, 151936)
    assert all(a.prompt != b.prompt and len(a.prompt) == len(b.prompt) for a, b in zip(requests, other))


def test_the_script_has_the_requests_of_the_headline():
    for num_seqs, max_len, vocab_size in [(256, 1024, 151936), (64, 256, 1000)]:
        prompts, params = bench.random_requests(num_seqs, max_len, vocab_size)
        requests = headline(num_seqs, max_len, max_len, seed=0, vocab_size=vocab_size)
        assert prompts == [request.prompt for request in requests]
        assert params == [SamplingParams(**request.sampling_settings()) for request in requests]


def test_the_script_is_short():
    """It is what a reader of nano-vllm opens first; everything else is in `nanovllm/benchmarks/`."""
    assert len((ROOT / "bench.py").read_text().splitlines()) <= 60


def test_the_script_without_arguments(monkeypatch, capsys):
    """It measures the second of two runs, in which no prompt is cached."""
    few_requests = bench.random_requests(3, 64, 1000)
    monkeypatch.setattr(bench, "random_requests", lambda num_seqs, max_len, vocab_size: few_requests)
    bench.main()
    num_tokens = sum(params.max_tokens for params in few_requests[1])
    assert capsys.readouterr().out.startswith(
        f"Importing PyTorch ...\nWarming up ...\ntiny-qwen3: {num_tokens} tokens in "
    )


INFINITE = float("inf")
WEIGHTS = 28 * (4096 * 1024 + 2048 * 1024 + 6144 * 1024 + 3072 * 1024)  # of Qwen3-0.6B, and
HEAD = 151936 * 1024


def test_limits():
    """Those of few steps are sums that one can check by hand; those of the headline were derived separately."""
    keys_and_values = 28 * 2 * 8 * 128 * 2
    weights = 2 * (WEIGHTS + HEAD)
    two_steps = [Request([0] * 9, 2)]
    assert limits(two_steps, CONFIG, Rates(1.0, INFINITE)).stepwise == 2 * weights + 10 * keys_and_values
    fp8 = SimpleNamespace(**vars(CONFIG) | {"kv_cache_dtype": "fp8"})
    assert limits(two_steps, fp8, Rates(1.0, INFINITE)).stepwise == 2 * weights + 10 * 28 * 8 * 260
    # two operations a weight, and of attention four for each dimension of a query, of 45 and 10 pairs with keys
    operations = 2 * (10 * WEIGHTS + 2 * HEAD) + 4 * (9 * 9 / 2 + 10) * 16 * 128 * 28
    assert limits(two_steps, CONFIG, Rates(INFINITE, 1.0)) == (operations, operations)
    requests = headline(256, 1024, 1024, seed=0, vocab_size=151936)
    found = limits(requests, CONFIG, Rates(4.45e12, 700e12))
    assert 133_966 / found.stepwise == pytest.approx(37_000, rel=0.02)
    assert 133_966 / found.overlap == pytest.approx(39_600, rel=0.02)


@pytest.mark.parametrize("name, num_layers, num_heads", [("qwen3.5-9b", 24, 32), ("qwen3.6-27b", 48, 48)])
def test_limits_with_states(name, num_layers, num_heads, tmp_path):
    """A prompt writes its state, and a decode reads and writes it; a layer in four has keys and values."""
    write_shape(name, tmp_path / name)
    config = Config(str(tmp_path / name), device="cpu", load_format="dummy", dtype="bfloat16")
    shape = config.model_config
    with torch.device("meta"):
        model = make_model(shape, 2)
    linear = {path: x.numel() for path, x in model.named_parameters() if x.dim() == 2 and "embed" not in path}
    state = num_layers * (4 * num_heads * 128 * 128 + 2 * 3 * 128 * (2 * 16 + num_heads))
    found = limits([Request([0] * 9, 2)], config, Rates(1.0, INFINITE)).stepwise
    keys_and_values = 10 * shape.num_hidden_layers // 4 * 2 * 4 * 256 * 2
    assert found == pytest.approx(2 * 2 * sum(linear.values()) + 3 * state + keys_and_values, rel=1e-6)


def test_limits_with_quantized_experts(tmp_path):
    """Attention is read in 16 bits: 3.6 billion parameters for a token, of which 2.4 billion are in 4 bits."""
    write_shape("gpt-oss-20b", tmp_path / "model")
    config = Config(str(tmp_path / "model"), device="cpu", load_format="dummy")
    num_bytes = limits([Request([0], 1)], config, Rates(1.0, INFINITE)).stepwise
    attention, experts, head = 24 * 2 * 2880 * (64 + 8) * 64, 24 * 2880 * (32 + 3 * 4 * 2880), 201088 * 2880
    assert num_bytes == 2 * attention + experts / 2 + 2 * head


def test_limits_of_waves():
    """A sequence begins when another one has ended; a step that computes several reads the weights once."""
    weights, rates = 2 * (WEIGHTS + HEAD), Rates(1.0, INFINITE)
    keys_and_values = 28 * 2 * 8 * 128 * 2
    requests = [Request([0], 1), Request([0], 3), Request([0], 1)]
    together = limits(requests, CONFIG, rates).stepwise
    assert together == 3 * weights + (2 + 3) * keys_and_values
    two = SimpleNamespace(**vars(CONFIG) | {"max_num_seqs": 2})
    assert limits(requests, two, rates).stepwise == together + weights
    long = SimpleNamespace(**vars(CONFIG) | {"max_num_batched_tokens": 2})
    assert limits([Request([0] * 5, 1)], long, rates).stepwise == 3 * weights


@pytest.mark.parametrize("lengths", [(1, 1), (2, 7), (100_000, 1), (1, 100_000)])
def test_smallest_workloads(lengths, monkeypatch, capsys):
    """However the lengths are scaled, a request has input and output tokens and fits into the model's length."""
    seen = {}
    monkeypatch.setitem(
        ENGINES, "nanovllm", lambda model, settings, workloads: seen.update(workloads) or fake(workloads)
    )
    main(monkeypatch, "--num-seqs", "1", "--max-input-len", str(lengths[0]), "--max-output-len", str(lengths[1]))
    assert list(seen) == ["headline", "single", "prefill"]
    for request in (request for runs in seen.values() for requests in runs for request in requests):
        assert len(request.prompt) >= 1 and request.max_tokens >= 1
        assert len(request.prompt) + request.max_tokens <= 2048
    assert "headline: 1 request," in capsys.readouterr().out


def fake(workloads: dict) -> dict:
    return measure("nanovllm", lambda requests: Result(1.0, token_times=[[0.5]]), workloads, fastest)


def main(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
    command.main()


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
        (("--kv-cache-dtype", "int8"), ("kv_cache_dtype", "int8", "fp8")),
        (("--profile", __file__), ("--profile", __file__, "folder")),
        (("--profile", f"{__file__}/traces"), ("--profile", __file__, "folder")),
        (("--profile", ".", "--workload", "online"), ("--profile", "online", "headline, single, prefill, batches")),
        (("--profile", ".", "--device", "cpu"), ("--profile", "GPU", "CPU")),
        (("--save", __file__), ("--save", __file__, "results file")),
        (("--figure", "no_such_file.svg"), ("--figure", "no_such_file.svg", ".json")),
        (("--figure", __file__), ("--figure", __file__, ".svg")),
        (("--workload", "offline"), ("--workload", "'offline'", "online")),
        (("--workload", "all,online"), ("--workload", "online and conversations and latency", "other workloads")),
        (("--workload", "online,online", "--rounds", "3"), ("--rounds", "online", "fixed number of runs")),
        (("--request-rate", "8,0"), ("--request-rate", "0", "greater than 0")),
        (("--request-rate=-2.5",), ("--request-rate", "-2.5", "greater than 0")),
        (("--request-rate", "8,inf"), ("--request-rate", "inf", "finite")),
        (("--request-rate", "nan"), ("--request-rate", "nan", "finite")),
        (("--request-rate", "fast"), ("--request-rate", "'fast'", "number")),
        (("--request-rate", " ,"), ("--request-rate", "' ,'", "at least one")),
        (("--batch-sizes", ""), ("--batch-sizes", "''", "at least one")),
        (("--batch-sizes", "2,0"), ("--batch-sizes", "0", "at least 1")),
        (("--batch-sizes", "2.5"), ("--batch-sizes", "'2.5'", "integer")),
        (("--median-input-len", "0"), ("--median-input-len", "0", "at least 1")),
        (("--median-output-len", "-1"), ("--median-output-len", "-1", "at least 1")),
        (("--workload", "online", "--plot", __file__), ("--plot", __file__, ".svg")),
        (("--workload", "online", "--plot", f"{__file__}/a.svg"), ("--plot", __file__, "folder")),
        (("--workload", "online", "--compare", "transformers"), ("--compare", "transformers", "online", "vllm only")),
        (("--workload", "latency", "--save", "a.json"), ("--save", "latency", "headline")),
        (("--workload", "host", "--save", "a.json"), ("--save", "host", "headline")),
        (("--workload", "host", "--compare", "vllm"), ("--compare", "host", "alone")),
        (("--workload", "single,host"), ("--workload", "'host'", "only workload")),
        (("--workload", "http,host"), ("--workload", "'http'", "only workload")),
        (("--workload", "http", "--compare", "vllm,transformers"), ("--compare", "transformers", "http", "vllm only")),
        (("--workload", "http", "--rounds", "3"), ("--rounds", "http", "fixed number of runs")),
        (("--workload", "http", "--save", "a.json"), ("--save", "http", "headline")),
        (("--workload", "http", "--clients", "64"), ("--clients", "'64'", "CLIENTSxINPUT/OUTPUT")),
        (("--workload", "http", "--clients", "4x8/0"), ("--clients", "'4x8/0'", "CLIENTSxINPUT/OUTPUT")),
        (("--workload", "http", "--clients", "4x8/8-fast"), ("--clients", "'4x8/8-fast'", "-whole or -chat")),
        (("--workload", "http", "--server-flags", "--a 'b"), ("--server-flags", "No closing quotation")),
        (
            ("online", "--max-input-len", "9"),
            ("--max-input-len", "online", "batches", "did you mean --median-input-len?"),
        ),
        (("embed", "--median-output-len", "9"), ("--median-output-len", "embed", "online, conversations")),
        (("embed", "--num-seqs", "9"), ("--num-seqs", "embed", "headline, prefill")),
        (("conversations", "--turns", "5-3"), ("--turns", "'5-3'", "MAX must be at least MIN")),
        (("online", "--turns", "3-5"), ("--turns", "online", "must be one of conversations")),
        (("conversations", "--pause", "0"), ("--pause", "0", "greater than 0")),
        (("single", "--batch-sizes", "9"), ("--batch-sizes", "single", "must be one of batches")),
        (("single", "--image-sizes", "9"), ("--image-sizes", "single", "must be one of images")),
        (("headline,images", "--compare", "transformers"), ("--compare", "transformers", "images", "vllm only")),
        (("headline,images", "--profile", "."), ("--profile", "images", "headline, single, prefill, batches")),
        (("images",), ("images", "tiny-qwen3", "takes no images")),
        (("--clients", "4x8/8"), ("--clients", "headline,single,prefill", "must be http")),
        (("--shape", "gpt-2"), ("--shape", "'gpt-2'", "llama-3.1-8b")),
        (("--shape", "qwen3-8b", "--model", "tiny-qwen3"), ("--shape", "--model", "not allowed")),
        (("--shape", "qwen3-8b", "--compare", "transformers"), ("--compare transformers", "weights", "--shape")),
        (("--shape", "qwen3-8b", "--beams", "2"), ("--beams", "weights", "--shape", "--model")),
    ],
)
def test_bad_arguments_are_one_line(arguments, words, monkeypatch, capsys):
    """The error names the option, the value and the bound, and no engine is started before it."""
    for engine in ENGINES:
        monkeypatch.setitem(ENGINES, engine, lambda *_: pytest.fail("an engine was started"))
    with pytest.raises(SystemExit) as stopped:
        main(monkeypatch, *arguments)
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("bench.py: error: ") and all(word in last for word in words)


NUM_PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b": 7_248_023_552,
    "gemma3-12b": 11_766_034_176,
    "gemma4-31b": 30_697_345_340,
    "gemma4-26b-a4b": 25_233_141_790,
    "gemma4-e2b": 4_628_569_379,
    "olmo3-7b": 7_298_011_136,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.6-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_shapes(name, tmp_path):
    """They have as many parameters as the published checkpoints, and transformers reads the same numbers."""
    write_shape(name, tmp_path / name)
    if "qwen3_5" in SHAPES[name][0]:
        pytest.importorskip("transformers.models.qwen3_5", reason="transformers 4 does not have Qwen3.5")
    for family in ("olmo3", "gemma4", "gpt_oss"):
        if name.startswith(family.replace("_", "-")):
            pytest.importorskip(f"transformers.models.{family}", reason=f"old versions of transformers lack {family}")
    config = Config(str(tmp_path / name), device="cpu", load_format="dummy").model_config
    theirs = AutoConfig.from_pretrained(tmp_path / name).get_text_config()
    for entry in SHAPE_ENTRIES:
        if entry not in ("head_dim", "rope_theta", "eos_token_id", "model_type"):
            assert getattr(config, entry) == theirs.to_dict().get(entry, 512), entry  # 512: a size that no layer has
    assert config.model_type in (theirs.model_type, theirs.model_type.removesuffix("_text"))
    assert config.dtype == torch.bfloat16 and config.eos_token_ids == {theirs.eos_token_id}
    with torch.device("meta"):
        model = make_model(config, 2)
    storages = {x._cdata: x.nbytes() // p.element_size() for p in model.parameters() for x in [p.untyped_storage()]}
    assert sum(storages.values()) == NUM_PARAMETERS[name]  # a shared expert is a part of the stacks


@pytest.mark.parametrize("name", ["qwen3-vl-8b", "qwen3.5-9b", "qwen3.6-27b", "qwen3.5-35b-a3b"])
def test_shapes_with_a_tower(name, tmp_path):
    """The tower has the published size, and transformers finds the tokens of images where config.json says."""
    write_shape(name, tmp_path / name, with_tower=True)
    config = Config(str(tmp_path / name), device="cpu", load_format="dummy").model_config
    family = SHAPES[name][0].removesuffix("_text")
    pytest.importorskip(f"transformers.models.{family}", reason=f"old versions of transformers lack {family}")
    theirs, tokenizer = AutoConfig.from_pretrained(tmp_path / name), AutoTokenizer.from_pretrained(tmp_path / name)
    assert theirs.vision_config.out_hidden_size == theirs.get_text_config().hidden_size == config.hidden_size
    for token in ("image_pad", "video_pad", "vision_start", "vision_end"):
        token_id = getattr(theirs, f"{token.removesuffix('_pad')}_token_id")
        assert tokenizer.convert_tokens_to_ids(f"<|{token}|>") == token_id > 255
    assert config.vision.image_token_id == theirs.image_token_id and config.vision.max_pixels == 2**24
    if name == "qwen3-vl-8b":
        with torch.device("meta"):
            tower = VisionTower(config.vision)
        assert sum(x.numel() for x in tower.parameters()) + NUM_PARAMETERS["qwen3-8b"] == 8_767_123_696


# the format's arithmetic is that of FP8, or that of bfloat16; one stream is bound by bytes
@pytest.mark.parametrize("suffix, low, high", [("fp8", 0.5, 0.6), ("w4a16", 0.25, 0.45)])
@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b"])
def test_quantized_shapes(name, suffix, low, high, tmp_path):
    """They differ from the others in the format of their weights alone, and are bound by fewer bytes and operations."""
    configs = []
    for shape in (name, f"{name}-{suffix}"):
        write_shape(shape, tmp_path / shape)
        configs.append(Config(str(tmp_path / shape), device="cpu", load_format="dummy"))
    plain, quantized = configs
    assert replace(quantized.model_config, quantization=None) == plain.model_config
    scheme = quantized.model_config.quantization.scheme_of("model.layers.3.self_attn.q_proj")
    assert (scheme.block_rows if suffix == "fp8" else scheme.group_size) == 128
    requests = [Request([1] * 100, 100)]
    rates = Rates(4e12, 7e14)
    for ours, theirs in zip(limits(requests, quantized, rates), limits(requests, plain, rates)):
        assert low < ours / theirs < high


def test_the_model_of_a_shape(monkeypatch, capsys):
    """It runs without weight files; vLLM gets the same folder, which is gone at the end."""
    seen = {}
    monkeypatch.setitem(SHAPES, "small", ("llama", 64, 96, 2, 4, 2, 16, 512, 256, 1e-5, 1e4, 2, True))
    monkeypatch.setitem(
        ENGINES, "vllm", lambda *arguments: seen.update(vllm_settings(*arguments[:2])) or fake(arguments[2])
    )
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("nanovllm.benchmarks.arguments.find_spec", lambda *args: args == ("vllm",) or find_spec(*args))
    monkeypatch.setattr(engines, "run_in_process", lambda function, *arguments: function(*arguments))
    options = ["--num-seqs", "2", "--max-input-len", "10", "--max-output-len", "4", "--kv-cache-dtype", "fp8"]
    main(monkeypatch, "--shape", "small", "--compare", "vllm", "--workload", "headline", "--device", "cpu", *options)
    out = capsys.readouterr().out
    assert "small, torch.bfloat16, cache fp8, cpu" in out and "headline: 2 requests" in out
    assert seen["kv_cache_dtype"] == "fp8"
    assert seen["load_format"] == "dummy" and Path(seen["model"]).name == "small" and not Path(seen["model"]).exists()


IMPOSED = {"num_speculative_tokens": 2, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1, 0.5]}
DRAFTING = {
    "ngram": {"prompt_lookup_min": 2, "prompt_lookup_max": 5},  # whose defaults differ
    "draft_model": {"model": "small"},
    "eagle3": {"model": None},
}


@pytest.mark.parametrize("method", DRAFTING)
def test_drafts_of_a_shape(monkeypatch, capsys, method):
    """What drafts is a shape too; vLLM gets it, and drafts that are right as often; the numbers are printed."""
    seen, shape = {}, ("llama", 64, 96, 6, 4, 2, 16, 512, 256, 1e-5, 1e4, 2, True)
    monkeypatch.setitem(SHAPES, "small", shape)

    def run_vllm(model, settings, workloads):
        seen.update(vllm_settings(model, settings))
        drafter = Path(seen["speculative_config"].get("model", model))
        seen["drafter"] = json.loads((drafter / "config.json").read_text())
        return fake(workloads)

    monkeypatch.setitem(ENGINES, "vllm", run_vllm)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("nanovllm.benchmarks.arguments.find_spec", lambda *args: args == ("vllm",) or find_spec(*args))
    monkeypatch.setattr(engines, "run_in_process", lambda function, *arguments: function(*arguments))
    given = {"method": method, "disable_by_batch_size": 3} | IMPOSED | DRAFTING[method]
    options = ["--max-input-len", "9", "--max-output-len", "8", "--speculative-config", json.dumps(given), *CPU]
    main(monkeypatch, "batches", "--shape", "small", "--compare", "vllm", "--batch-sizes", "2,3", *options)
    theirs = seen["speculative_config"]
    shared = given.keys() - {"disable_by_batch_size", "model", "synthetic_acceptance_rates"}
    assert {name: theirs[name] for name in shared} == {name: given[name] for name in shared}
    assert theirs["synthetic_acceptance_rates"] == (1, 0.5)
    assert theirs.keys() - {"model"} == shared | {"synthetic_acceptance_rates"}
    assert ("worker_cls" in seen) == (method == "eagle3") and as_flags(seen)  # a server takes them too
    layers = {"ngram": 6, "draft_model": 6, "eagle3": 1}
    assert seen["drafter"]["num_hidden_layers"] == layers[method]
    notes = re.findall(
        r"nanovllm: ([\d,]+) of ([\d,]+) drafts right \((.*) (.*)\), (.*) tokens a step", capsys.readouterr().out
    )
    assert len(notes) == 2
    for accepted, drafted, first, second, tokens in notes:
        assert 0 < int(accepted) <= int(drafted) and float(first) == 1 and float(second) < 1
        assert 2 <= float(tokens) <= 3


def test_counts_of_drafts():
    before = {"drafts": 2, "draft_tokens": 8, "accepted_tokens": 3, "accepted_per_position": [2, 1, 0, 0]}
    now = {"drafts": 6, "draft_tokens": 24, "accepted_tokens": 9, "accepted_per_position": [5, 3, 1, 0]}
    found = drafts_since(before, now)
    assert found == "6 of 16 drafts right (0.75 0.50 0.25 0.00), 2.50 tokens a step with drafts"
    assert drafts_since(None, None) == "" and "0 of 0" in drafts_since(now, now)


@pytest.mark.parametrize("with_text", [False, True])
def test_tokenizer_of_a_shape(with_text, tmp_path):
    """Its text is that of bytes; if all ids have one, a server can stream every token that random weights give."""
    write_shape("mistral-7b", tmp_path / "model", with_text)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "na\xefve \U0001f642\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text and max(tokenizer.encode(text)) < 256
    assert [bool(tokenizer.decode([i])) for i in (0, 255, 256, 32767)] == [True, True, with_text, with_text]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat.strip() == "Hi"


def test_progress(monkeypatch, capsys):
    """A line when an engine or a workload starts and ends; none runs twice. A missing engine is an error at once."""
    for engine in ("nanovllm", "transformers"):
        monkeypatch.setitem(ENGINES, engine, lambda model, settings, workloads: fake(workloads))
    monkeypatch.setattr(engines, "run_in_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(
        "nanovllm.benchmarks.arguments.find_spec", lambda name: None if name == "vllm" else SimpleNamespace()
    )
    with pytest.raises(SystemExit, match="2"):
        main(monkeypatch, "--compare", "transformers,vllm", "--workload", "single", "--device", "cpu")
    assert "--compare vllm: is not installed" in capsys.readouterr().err
    main(monkeypatch, "--compare", "transformers,,transformers", "--workload", "single", "--device", "cpu")
    lines = [line.split(" after")[0] for line in capsys.readouterr().err.splitlines()]
    own = ["nanovllm: single starts", "nanovllm: single ends"]
    assert lines[:4] == ["nanovllm: starts", *own, "nanovllm: ends"]
    assert lines[4:] == ["transformers: starts", *own, "transformers: ends"]


def test_every_setting_of_the_engine_has_a_flag():
    flags = ["--kvcache-block-size", "32", "--no-enable-prefix-caching", "--max-num-seqs", "4", "--seed", "3"]
    expected = {"kvcache_block_size": 32, "enable_prefix_caching": False, "max_num_seqs": 4}
    assert engine_settings(parse(make_parser(), flags)) == expected
    assert engine_settings(parse(make_parser(), ["--shape", "llama-3.1-8b"])) == {"load_format": "dummy"}


def test_a_workload_may_be_the_first_argument(capsys):
    """`nanovllm bench online` is short for `nanovllm bench --workload online`."""
    parser = make_parser()
    for arguments in (["all,batches", "--seed", "1"], ["--seed", "1", "all,batches"]):
        args = parse(parser, arguments)
        assert args.workload == ["headline", "single", "prefill", "batches"] and args.seed == 1
    assert parse(parser, []).workload == ["headline", "single", "prefill"]
    with pytest.raises(SystemExit):
        parse(parser, ["online", "--workload", "latency"])
    assert "not allowed" in capsys.readouterr().err


def test_time_since_the_start_of_the_process(monkeypatch):
    """It counts what ran before the package was imported; where Linux does not tell, since then."""
    code = (
        "import time; time.sleep(0.5); from nanovllm.benchmarks import processes as p; print(p.seconds_since_start())"
    )
    begin = perf_counter()
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 0.5 <= float(ended.stdout) <= perf_counter() - begin + 0.1
    before = seconds_since_start()
    monkeypatch.setattr(Path, "read_text", lambda path: os.stat("/no/such/file"))
    assert 0 <= seconds_since_start() <= before + 0.1


CPU = ("--device", "cpu", "--dtype", "float32")
SHORT = (*CPU, "--num-seqs", "3", "--max-input-len", "32", "--max-output-len", "24")


def test_one_call_does_all_workloads(monkeypatch, capsys):
    """The script with arguments, as a program."""
    monkeypatch.setattr(sys, "argv", ["bench.py", *SHORT, "--prefill-len", "40"])
    runpy.run_path(str(ROOT / "bench.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "from start to the first token" in out
    assert [line.split(":")[0] for line in out.splitlines() if " request" in line] == ["headline", "single", "prefill"]


def test_embed(monkeypatch, capsys):
    """The TTFT of an embedding is the time until its vector is there."""
    monkeypatch.setattr(throughput, "EMBED_ON_CPU", {"embed long": (2, 40), "embed short": (3, 5)})
    main(monkeypatch, "embed", *CPU)
    *_, long, short = re.findall(r"^nanovllm +\S+ +\S+ +(\S+)", capsys.readouterr().out, re.MULTILINE)
    assert float(long) > 0 and float(short) > 0


def test_streaming_beside_generate(monkeypatch, capsys):
    main(monkeypatch, *SHORT, "--max-output-len", "4", "--streaming")
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out] == ["generate", "stream", "stream"] and "median of 7 pairs" in out[-1]


def test_beams_beside_transformers(monkeypatch, capsys):
    main(monkeypatch, "--beams", "2", "--max-output-len", "4", *CPU)
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out] == ["2", "nanovllm", "transformers"] and "20 tokens in, 4 out" in out[0]


# what a GPU did in a run: name, begin and end of each kernel
PROMPTS = [
    *[("nvjet_sm90_tst_192x128", 0, 4), ("_norm_rope_store_kernel", 3, 5), ("_prefill_kernel", 5, 10)],
    *[("nvjet_sm90_tst_192x128", 8, 12), ("_penalize_kernel", 13, 14), ("_sample_reduce_kernel", 14, 15)],
]
DECODES = [
    *[("Memcpy DtoH", 16, 17), ("_gemv_kernel", 17, 20), ("_decode_kernel", 20, 24), ("_combine_kernel", 20, 25)],
    *[("_gemv_kernel", 25, 28), ("_cutoff_kernel", 26, 29), ("an unknown kernel", 31, 32)],
]


def test_kinds_of_kernels():
    """Of kernels that overlap, each counts from the end of the one before it; the last product is the head."""
    prompts, decodes = ([profiling.Event(end, begin, name) for name, begin, end in part] for part in (PROMPTS, DECODES))
    assert profiling.split(prompts + decodes) == (prompts, decodes)
    expected = {"attention": 5, "RoPE & store": 1, "products": 4, "head & sampler": 2 + 1 + 1, "idle": 1}
    assert profiling.times_by_kind(prompts) == expected
    expected = {"attention": 5, "products": 3, "head & sampler": 3 + 1, "the rest": 1 + 1, "idle": 2}
    assert profiling.times_by_kind(decodes) == expected


def test_every_kernel_has_a_kind():
    files = [path for path in (ROOT / "nanovllm").rglob("*.py") if "kernels" in path.parts]
    sources = [path.read_text() for path in files]
    names = {name for source in sources for name in re.findall(r"\.jit.*\ndef (_\w+_kernel)\(", source)}
    assert len(names) > 30
    assert {name for name in names if profiling.kind_of(name) == profiling.REST} == {
        *("_copy_from_host_kernel", "_copy_to_host_kernel", "_place_decodes_kernel", "_place_chains_kernel"),
        *("_accept_kernel", "_embed_shard_kernel", "_max_kernel", "_gather_kernel", "_rotate_kernel"),
        "_patch_attention_kernel",
    }


def test_profile(monkeypatch, capsys, tmp_path):
    """A table of mean steps, from traces of a GPU that there is not."""

    class Trace:
        def __init__(self, activities):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def export_chrome_trace(self, file):
            kernels = [dict(cat="kernel", name=name, ts=40 * a, dur=40 * (b - a)) for name, a, b in PROMPTS + DECODES]
            Path(file).write_text(json.dumps({"traceEvents": [{"cat": "cuda_runtime", "name": "x"}, *kernels]}))

    monkeypatch.setattr(profiling, "profile", Trace)
    monkeypatch.setattr(profiling, "run_in_process", lambda function, device: Rates(1e12, 1e9))
    args = make_parser().parse_args([*SHORT, "--prefill-len", "20", "--rounds", "1"])
    config = Config.create("tiny-qwen3", settings := engine_settings(args))
    again = [Request([1, 2, 3], 5)]  # its prompt is cached when it is traced
    workloads = throughput.workloads(args, config) | {"a context": [again, again]}
    profiling.profile_workloads("tiny-qwen3", settings, config, workloads, tmp_path)
    assert {file.stem for file in tmp_path.iterdir()} == {*WORKLOADS, "a-context"}
    header, *rows = table(
        capsys.readouterr().out, f"microseconds of a mean step; traces for https://ui.perfetto.dev in {tmp_path}"
    )
    columns = "steps", "attention", "RoPE & store", "products", "head & sampler", "the rest", "idle", "total", "limit"
    assert " ".join(header) == " ".join(columns)
    found = {" ".join(row[:-10]): row[-10:] for row in rows}
    assert [*found] == [
        *("headline: prompts", "headline: decodes", "single: prompts", "single: decodes", "prefill: prompts"),
        "a context: decodes",
    ]
    assert found["single: prompts"][:8] == ["1", "200", "40", "160", "160", "0", "40", "600"]
    assert found["a context: decodes"][:8] == ["4", "50", "0", "30", "40", "20", "20", "160"]
    microseconds = sum(map(max, least_steps(again, config, Rates(1e12, 1e9))[1])) * 1e6 / 4
    assert found["a context: decodes"][8:] == [f"{microseconds:.0f}", "multiplying"]


def test_save_merges_results(monkeypatch, tmp_path):
    """Later calls add workloads and setups, and replace what they measure again."""
    file = tmp_path / "results.json"
    monkeypatch.setitem(ENGINES, "nanovllm", lambda model, settings, workloads: fake(workloads))
    main(monkeypatch, "--workload", "single", "--max-output-len", "24", "--device", "cpu", "--save", str(file))
    assert json.loads(file.read_text()) == {
        "notes": (notes := f"cpu, torch.bfloat16, {versions(['nanovllm'])}"),
        "results": {"tiny-qwen3": {"single": {"nanovllm": 12}}},
    }
    assert f"torch {torch.__version__.split('+')[0]}" in notes
    save_results(file, "", "tiny-qwen3", {"single": {"vllm": 10.4}, "prefill": {"nanovllm": 7.0}})
    save_results(file, "", "tiny-qwen3 on 2 GPUs", {"single": {"nanovllm": 20.6}})
    assert json.loads(file.read_text()) == {
        "notes": notes,
        "results": {
            "tiny-qwen3": {"single": {"nanovllm": 12, "vllm": 10}, "prefill": {"nanovllm": 7}},
            "tiny-qwen3 on 2 GPUs": {"single": {"nanovllm": 21}},
        },
    }


def test_rounds():
    """The fastest counts, the warm-up does not, and none finds another's prompts in the prefix cache."""
    requests = [Request([5, 6], 3)]
    warm_up, _, last = runs = in_rounds(requests, 2, 100)
    assert [run[0].prompt for run in runs] == [[7, 8], [6, 7], [5, 6]]
    seconds = {7: 0.1, 6: 1.0, 5: 2.0}
    workloads = {"two rounds": runs, "one round": [warm_up, last]}
    results = measure("nanovllm", lambda requests: Result(seconds[requests[0].prompt[0]]), workloads, fastest)
    assert results["two rounds"].seconds == 1.0 and results["one round"].seconds == 2.0


def test_versions(monkeypatch):
    """Whoever reads a comparison sees what ran, and which switches of vLLM were set."""
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    found = versions(["nanovllm", "vllm-that-is-not-installed"]).split(", ")
    assert found[0] == "nanovllm 0.1.0" and found[1].startswith(f"torch {torch.__version__.split('+')[0]}")
    assert found[-1] == "VLLM_USE_DEEP_GEMM=0" and not any("not-installed" in part for part in found)


def test_several_workloads_in_one_run(monkeypatch, capsys):
    """Each engine starts once for all of them."""
    calls = []
    for engine in ("nanovllm", "vllm"):
        monkeypatch.setitem(ENGINES, engine, lambda *arguments: calls.append(1) or fake(arguments[2]))
    monkeypatch.setattr(engines, "run_in_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr("nanovllm.benchmarks.arguments.find_spec", lambda name: True)
    main(monkeypatch, "--workload", "all,batches", "--batch-sizes", "2,3", "--compare", "vllm", "--device", "cpu")
    out = capsys.readouterr().out
    assert len(calls) == 2 and all(f"\n{name}: " in out for name in ("headline", "single", "prefill", "batch of 3"))
    sizes = [row[0] for row in table(out, "output tokens per second (128 in, 64 out)")[1:]]
    assert sizes == ["2", "3"]


def test_a_rival_that_fails(monkeypatch, capsys, tmp_path):
    """The results of the other engines are printed and saved. Then the error is raised."""
    monkeypatch.setattr(engines, "run_in_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr("nanovllm.benchmarks.arguments.find_spec", lambda name: SimpleNamespace())
    for engine in ("nanovllm", "transformers"):
        monkeypatch.setitem(ENGINES, engine, lambda model, settings, workloads: fake(workloads))
    monkeypatch.setitem(ENGINES, "vllm", lambda *_: 1 / 0)
    options = ["--workload", "single", "--device", "cpu", "--save", str(tmp_path / "a.json")]
    with pytest.raises(ZeroDivisionError):
        main(monkeypatch, "--compare", "vllm,transformers", *options)
    out, err = capsys.readouterr()
    assert "vllm failed: ZeroDivisionError: division by zero" in err
    assert "\nnanovllm " in out and "\ntransformers " in out and "\nvllm " not in out
    saved = json.loads((tmp_path / "a.json").read_text())["results"]["tiny-qwen3"]
    assert saved["single"].keys() == {"nanovllm", "transformers"}
    monkeypatch.setitem(ENGINES, "nanovllm", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(monkeypatch, "--compare", "transformers", *options)
    assert "transformers: starts" not in capsys.readouterr().err


def test_figure_is_drawn(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    save_results(tmp_path / "a.json", "a note", "a model", {"single": {"nanovllm": 1234, "vllm": 1000}})
    main(monkeypatch, "--figure", str(tmp_path / "a.svg"))
    text = (tmp_path / "a.svg").read_text()
    assert all(word in text for word in ("a note", "a model, single stream", "1,234", "1,000", "relative to vLLM"))


# -- latency: statistics, the open loop, and the workloads that are swept over a variable


def test_plot_needs_a_sweep(monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit):
        main(monkeypatch, "--workload", "single", "--plot", "a.svg")
    assert "--plot: --workload single must be one of online, conversations, latency, batches" in capsys.readouterr().err


def test_percentile_interpolates():
    """The p-th percentile of n values is at p / 100 * (n - 1) of the sorted values, counted from 0."""
    assert [percentile([4, 1, 3, 2], p) for p in (0, 50, 90, 100)] == [1, 2.5, pytest.approx(3.7), 4]
    assert percentile(list(range(101)), 99) == 99
    assert percentile([7.0], 99) == 7
    assert math.isnan(percentile([], 50))


def test_latencies():
    """Of three requests: one with three gaps, one with one token, and one that got no token."""
    found = latencies([[0.5, 1.0, 3.0, 3.5], [2.0], []])
    assert found == {"TTFT": [0.5, 2.0], "time per output token": [1.0], "ITL": [0.5, 2.0, 0.5], "longest gap": [2.0]}


def test_decode_rate():
    """Counted is what arrives after all have their first token, until the first sequence ends; the median of runs."""
    run = [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]]  # from 2 to 4, two tokens of each
    assert decode_rate(run, 2) == 2
    assert decode_rate([[0.0, 1.0], [0.0, 0.25], [0.0, 0.5]], 1) == 2
    assert math.isnan(decode_rate([[1.0, 2.0], [3.0, 4.0]], 2))  # never both at a time


def test_online_requests():
    """Gaps are exponential and lengths log-normal; the same seed gives the same requests."""
    requests = online(8.0, 400, (500, 160), 4096, seed=0, vocab_size=1000)
    gaps = [b.arrival - a.arrival for a, b in pairwise(requests)]
    assert min(gaps) > 0 and mean(gaps) == pytest.approx(1 / 8, rel=0.15)
    assert median(gaps) == pytest.approx(math.log(2) / 8, rel=0.15)
    assert median(len(r.prompt) for r in requests) == pytest.approx(500, rel=0.15)
    assert median(r.max_tokens for r in requests) == pytest.approx(160, rel=0.15)
    assert all(len(r.prompt) + r.max_tokens <= 4096 for r in requests)
    assert requests == online(8.0, 400, (500, 160), 4096, seed=0, vocab_size=1000)
    assert requests[0].prompt[:16] != online(16.0, 1, (500, 160), 4096, seed=0, vocab_size=1000)[0].prompt[:16]
    short = online(8.0, 50, (500, 160), 20, seed=0, vocab_size=1000)
    assert all(len(r.prompt) >= 1 and r.max_tokens >= 1 and len(r.prompt) + r.max_tokens <= 20 for r in short)


class Clock:
    """Replaces the clock of the open loop: time passes in `sleep` and in the steps of an engine."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(loops, "perf_counter", lambda: self.now)
        monkeypatch.setattr(loops, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.001)


class SlowEngine:
    """Its steps take a second, and give each request a token, whose id is the time."""

    def __init__(self, clock: Clock):
        self.clock, self.left, self.log, self.num_cached_tokens = clock, {}, [], 0

    def params(self, request: Request) -> int:
        return request.max_tokens

    def add(self, prompt: list[int], params: int) -> int:
        self.log.append((prompt, self.clock.now))
        self.left[len(self.log)] = params
        return len(self.log)

    def step(self) -> list[tuple[int, int]]:
        assert self.left, "a step without requests"
        self.clock.now += 1
        self.num_cached_tokens += 1
        tokens = [(i, round(self.clock.now)) for i in self.left]
        self.left = {i: n - 1 for i, n in self.left.items() if n > 1}
        return tokens

    def is_finished(self) -> bool:
        return not self.left


def test_open_loop(monkeypatch):
    """Times count from when a request was due, though it was submitted after the step; idle time is slept through."""
    engine = SlowEngine(Clock(monkeypatch))
    requests = [Request([i], 2, arrival=arrival) for i, arrival in enumerate((0.0, 0.25, 10.0))]
    result = serve(engine, requests)
    submitted = [time for _, time in engine.log]
    assert submitted[:2] == [100, 101] and submitted[2] == pytest.approx(110, abs=0.002)
    assert result.token_times[:2] == [[1.0, 2.0], [1.75, 2.75]]
    assert result.token_times[2] == pytest.approx([1.0, 2.0], abs=0.002)
    assert result.seconds == pytest.approx(12, abs=0.002)


def test_turns(monkeypatch):
    """A turn's prompt is the whole conversation, and is due when a pause after the answer is over."""
    engine = SlowEngine(Clock(monkeypatch))
    turns = [Request([7], 2), Request([8, 9], 1, arrival=3.0, previous=0), Request([4], 1, arrival=0.5)]
    turns.append(Request([6], 1, arrival=0.0, previous=1))
    assert by_turn(turns) == {1: [0, 2], 2: [1], 3: [3]}
    result = serve(engine, turns)
    assert [prompt for prompt, _ in engine.log] == [[7], [4], [7, 101, 102, 8, 9], [7, 101, 102, 8, 9, 106, 6]]
    assert [round(time) for _, time in engine.log] == [100, 101, 105, 106]
    assert [[round(x, 1) for x in times] for times in result.token_times] == [[1, 2], [1], [1.5], [1]]
    assert (
        result.note == f"{4 / 14:.1%} of the prompts' tokens were in the prefix cache" and not engine.num_cached_tokens
    )
    engine.hits_by_tier = lambda: {"in host memory": 1, "in files": 2}
    engine.seconds_saved = lambda: 3.0
    places = f" ({1 / 14:.1%} on the device, {1 / 14:.1%} in host memory, {2 / 14:.1%} in files)"
    note = f"{result.note}{places}; computing them would have taken about 3 s"
    assert serve(engine, turns).note == note


def test_conversations(monkeypatch, capsys):
    """They share a system prompt, stay below the longest length, and later turns find the earlier ones in the cache."""
    requests = conversations(8, (2, 6), 1.0, (20, 10), 300, 0, 1000)
    turns = by_turn(requests)
    assert len(turns[1]) == 8 and len(turns) > 2 and len({tuple(requests[i].prompt[:80]) for i in turns[1]}) == 1
    lengths = [0] * len(requests)
    for i, request in enumerate(requests):
        before = 0 if request.previous is None else lengths[request.previous]
        lengths[i] = before + len(request.prompt) + request.max_tokens
    assert max(lengths) < 300
    sizes = ["--num-seqs", "2", "--median-input-len", "8", "--median-output-len", "3", "--kvcache-block-size", "16"]
    main(monkeypatch, "conversations", "--turns", "3-3", "--pause", "0.01", *sizes, *CPU)
    out = capsys.readouterr().out
    header, *rows = table(out, "TTFT by turn, ms")
    assert " ".join(header) == "turn nanovllm p50 nanovllm p99" and [row[0] for row in rows] == ["1", "2", "3"]
    assert all(float(x) > 0 for row in rows for x in row[1:])
    pattern = r"nanovllm: ([\d.]+)% of the prompts' tokens were in the prefix cache; .* about ([\d.e+-]+) s"
    percentage, seconds = map(float, re.search(pattern, out).groups())
    assert 0 < percentage < 100 and 0 < seconds < 10
    with pytest.raises(SystemExit, match="max_model_len=64: the first turn of every conversation needs more tokens"):
        main(monkeypatch, "conversations", "--max-model-len", "64", *CPU)


def test_vllm_steps(monkeypatch):
    """The loop with the names and types that vLLM's engine has; ids are unique, and may come back with a suffix.

    In the end the engine's process is ended.
    """
    seen, ends = [], []

    class LLMEngine:
        engine_core = SimpleNamespace(shutdown=lambda: ends.append(len(seen)))

        @classmethod
        def from_engine_args(cls, arguments, usage_context):
            assert usage_context == "server"
            seen.append(arguments)
            return cls()

        def __init__(self):
            self.queue = {}

        def add_request(self, request_id, prompt, params):
            assert isinstance(request_id, str) and request_id not in seen
            assert params["output_kind"] == "delta" and params["ignore_eos"] and not params["detokenize"]
            seen.append(request_id)
            self.queue[request_id] = [len(prompt["prompt_token_ids"]), params["max_tokens"]]

        def step(self):
            outputs = []
            for request_id, state in list(self.queue.items()):
                num_new = 0 if state[0] > 2 else min(2, state[1])  # none in the first step of a longer prompt
                state[:] = [1, state[1] - num_new]
                output = SimpleNamespace(token_ids=[0] * num_new)
                ended = dict(finished=not state[1], num_cached_tokens=None)
                outputs.append(SimpleNamespace(request_id=f"{request_id}-ab12", outputs=[output], **ended))
                if not state[1]:
                    del self.queue[request_id]
            return outputs

        def has_unfinished_requests(self):
            return bool(self.queue)

    vllm, sampling_params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    usage_lib = SimpleNamespace(UsageContext=SimpleNamespace(OPENAI_API_SERVER="server"))
    monkeypatch.setitem(sys.modules, "vllm.usage", ModuleType("vllm.usage"))
    monkeypatch.setitem(sys.modules, "vllm.usage.usage_lib", usage_lib)
    vllm.LLMEngine, vllm.EngineArgs, sampling_params.SamplingParams = LLMEngine, dict, dict
    sampling_params.RequestOutputKind = SimpleNamespace(DELTA="delta")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling_params)
    run = [Request([1], 3), Request([1, 2, 3], 2)]
    results = step_vllm("tiny-qwen3", {"device": "cpu", "max_num_seqs": 7}, {"a workload": [run, run, run]})
    arguments, *ids = seen
    assert arguments["max_num_seqs"] == 7 and arguments["max_model_len"] == 2048 and arguments["dtype"] == "bfloat16"
    assert ids == ["0", "1", "2", "3", "4", "5"] and ends == [7]
    own = vllm_settings("tiny-qwen3", {"device": "cpu"})
    assert vllm_settings("tiny-qwen3", {"device": "cpu", "swap_space": 2})["kv_offloading_size"] == 2
    assert own.keys() == arguments.keys() - {"max_num_seqs", "disable_log_stats"}  # vLLM has its own defaults
    times = results["a workload"].token_times  # of the second and the third run
    assert [len(of_request) for of_request in times] == [3, 2, 3, 2]
    assert times[0][0] == times[0][1] < times[0][2] and times[1][0] == times[1][1]


def table(out: str, title: str) -> list[list[str]]:
    """The cells of the table below `title`, without commas in numbers; those of the header may have a space in them."""
    rows = out.split(f"\n{title}\n")[1].split("\n\n")[0].splitlines()
    return [row.replace(",", "").split() for row in rows]


def test_online(monkeypatch, capsys):
    lengths = ["--median-input-len", "20", "--median-output-len", "6", "--num-seqs", "6"]
    main(monkeypatch, "--workload", "online", "--request-rate", "40,20", *lengths, *CPU)
    out = capsys.readouterr().out
    assert "online 20/s: 6 requests, " in out and "online 40/s: 6 requests, " in out
    for kind in ("TTFT", "time per output token", "longest gap", "ITL"):
        header, *rows = table(out, f"{kind}, ms")
        assert " ".join(header) == "requests per second nanovllm p50 nanovllm p90 nanovllm p99"
        assert [row[0] for row in rows] == ["20", "40"]
        assert all(0 < float(a) <= float(b) for _, a, b, _ in rows)
        # six requests say nothing about one in a hundred, but their 30 gaps do
        assert all(float(b) <= float(c) if kind == "ITL" else c == "-" for _, _, b, c in rows)
    assert all(float(rate) > 0 for _, rate in table(out, "output tokens per second")[1:])


def test_online_finds_rates_for_a_cpu(monkeypatch, capsys):
    """Three rates below what a run of twelve requests has shown; the lengths are short there."""
    monkeypatch.setattr(sweeps, "run_in_process", lambda function, *arguments: function(*arguments))
    found = {"rate": Result(seconds=6.0)}
    monkeypatch.setattr(sweeps, "run_nanovllm", lambda model, settings, workloads: found)
    monkeypatch.setitem(STEPPED_ENGINES, "nanovllm", lambda model, settings, workloads: fake_results(workloads))
    main(monkeypatch, "--workload", "online", "--device", "cpu")
    out, err = capsys.readouterr()
    assert "about 2 requests per second" in err and "--request-rate sets other rates" in err
    assert [row[0] for row in table(out, "TTFT, ms")] == ["requests", "0.6", "1.2", "1.8"]
    assert "online 0.6/s: 4 requests" in out and "online 1.8/s: 11 requests" in out  # of 6 seconds
    found["rate"] = Result(seconds=1.0)
    for num_seqs, rate in ((), 96), (("--num-seqs", "8"), 8), (("--num-seqs", "40"), 40):
        main(monkeypatch, "online", "--device", "cpu", *num_seqs)
        assert f"about {rate} requests per second" in capsys.readouterr().err


def fake_results(workloads) -> dict[str, Result]:
    """Of an engine that needs a second for everything."""
    return {
        name: Result(1.0, token_times=[[1.0 + i for i in range(r.max_tokens)] for rs in runs[1:] for r in rs])
        for name, runs in workloads.items()
    }


def test_a_table_without_results_is_left_out(capsys, tmp_path):
    """After Ctrl-C in the first part of `latency`, the second part has none."""
    pytest.importorskip("matplotlib")
    prompts, decode = (Panel(name, "x", {"p50": ({5.0: name}, lambda result: 1.0)}) for name in ("prompts", "decode"))
    results = {"nanovllm": {"prompts": Result()}}
    for panel in (prompts, decode):
        panel.print(results)
    assert "prompts" in (out := capsys.readouterr().out) and "decode" not in out
    pictures.draw_panels(tmp_path / "a.svg", "", [prompts, decode], results)
    assert "prompts" in (text := (tmp_path / "a.svg").read_text()) and "decode" not in text
    pictures.draw_panels(tmp_path / "b.svg", "", [decode], results)
    assert not (tmp_path / "b.svg").exists()


def test_interrupted_sweep(monkeypatch, capsys, tmp_path):
    """Ctrl-C in the second of three batch sizes: the first is in the table and in the picture. No other engine runs."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(engines, "run_in_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr("nanovllm.benchmarks.arguments.find_spec", lambda name: SimpleNamespace())
    monkeypatch.setitem(ENGINES, "vllm", lambda *_: pytest.fail("another engine"))
    generate, num_calls = LLM.generate, 0

    def interrupted(self, prompts, *args, **kwargs):
        nonlocal num_calls
        if (num_calls := num_calls + (len(prompts) == 3)) == 2:
            raise KeyboardInterrupt
        return generate(self, prompts, *args, **kwargs)

    monkeypatch.setattr(LLM, "generate", interrupted)
    lengths = ["--max-input-len", "8", "--max-output-len", "4", "--compare", "vllm", "--device", "cpu"]
    picture = tmp_path / "a.svg"
    with pytest.raises(SystemExit, match="130"):
        main(monkeypatch, "--workload", "batches", "--batch-sizes", "2,3,4", *lengths, "--plot", str(picture))
    out, err = capsys.readouterr()
    assert "nanovllm: interrupted, 1 of 3 workloads are complete" in err
    header, *rows = table(out, "output tokens per second (8 in, 4 out)")
    assert header == ["requests", "nanovllm"] and [row[0] for row in rows] == ["2", "3", "4"]
    assert float(rows[0][1]) > 0 and rows[1][1] == rows[2][1] == "-"
    assert "batch of 2: 2 requests" in out and "batch of 3" not in out
    assert "this package" in picture.read_text()


def test_interrupt_before_any_result(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "generate", interrupted)
    with pytest.raises(SystemExit, match="130"):
        main(monkeypatch, "--workload", "batches", "--batch-sizes", "2", "--device", "cpu")


def test_latency(monkeypatch, capsys):
    bounds = ["--max-input-len", "20", "--max-output-len", "4", "--num-seqs", "2"]
    main(monkeypatch, "--workload", "latency", *bounds, *CPU)
    out = capsys.readouterr().out
    assert "prompt of 16: 2 requests, 32 tokens in, 2 out" in out
    assert "8 sequences after 20 tokens: 24 requests, 480 tokens in, 96 out" in out
    header, *rows = table(out, "time to first token of a single prompt, ms")
    assert " ".join(header) == "prompt tokens nanovllm median nanovllm min nanovllm p99"
    assert [row[0] for row in rows] == ["5", "10", "16", "20"]  # the bound, and parts of it, as few lengths fit
    for _, middle, least, p99 in rows:
        assert 0 < float(least) <= float(middle) <= float(p99)
    header, *rows = table(out, "decode, tokens per second")
    assert " ".join(header) == "context tokens nanovllm 1 sequence nanovllm 8 sequences"
    assert [row[0] for row in rows] == ["5", "10", "20"] and all(float(rate) > 0 for row in rows for rate in row[1:])


def test_latency_lengths_fit():
    """Every length that fits is there, and no prompt is in the prefix cache when it is timed."""
    config = SimpleNamespace(device="cuda:0", max_model_len=4096, model_config=SimpleNamespace(vocab_size=1000))
    args = make_parser().parse_args(["--num-seqs", "3"])
    workloads, _ = latency_sweep(args, config)
    prompts = [f"prompt of {length}" for length in ("16", "128", "512", "1,024", "4,000")]
    lengths = ("100", "500", "1,500", "4,000")
    decodes = [f"{seqs} after {length} tokens" for seqs in ("1 sequence", "8 sequences") for length in lengths]
    assert list(workloads) == prompts + decodes
    starts = [tuple(request.prompt[:16]) for name in prompts for (request,) in workloads[name]]
    assert len(set(starts)) == len(starts) == 4 * len(prompts)
    for requests in (requests for runs in workloads.values() for requests in runs):
        assert all(len(r.prompt) + r.max_tokens <= 4096 for r in requests)


def test_sweeps_of_one_run(tmp_path, monkeypatch, capsys):
    """Online and latency have tables and panels of their own in one run."""
    bounds = ["--max-input-len", "20", "--max-output-len", "4", "--num-seqs", "2", "--request-rate", "50"]
    figure = ["--plot", str(tmp_path / "a.svg")] if importlib.util.find_spec("matplotlib") else []
    main(monkeypatch, "online,latency", *bounds, *figure, *CPU)
    out = capsys.readouterr().out
    first, decode = "time to first token of a single prompt, ms", "decode, tokens per second"
    for title, num_rows in (("TTFT, ms", 1), (first, 4), (decode, 3)):
        assert len(table(out, title)) == 1 + num_rows
        assert not figure or title in (tmp_path / "a.svg").read_text()


def test_default_batches():
    """A CPU gets shorter requests in smaller batches than a GPU."""
    config = SimpleNamespace(max_model_len=4096, model_config=SimpleNamespace(vocab_size=1000))
    num_tokens = []
    for config.device in ("cpu", "cuda:0"):
        workloads, _ = batches_sweep(make_parser().parse_args(["--rounds", "1"]), config)
        num_tokens.append([sum(r.max_tokens for r in runs[-1]) for runs in workloads.values()])
    assert num_tokens == [[64, 256, 1024, 4096], [512, 2048, 8192, 32768, 131072]]


def test_batches(monkeypatch, capsys):
    """A row for each size; the lengths are exact."""
    lengths = ["--max-input-len", "8", "--max-output-len", "4"]
    main(monkeypatch, "--workload", "batches", "--batch-sizes", "5,2,2", *lengths, *CPU)
    out = capsys.readouterr().out
    assert "batch of 5: 5 requests, 40 tokens in, 20 out" in out
    rows = table(out, "output tokens per second (8 in, 4 out)")
    assert [row[0] for row in rows] == ["requests", "2", "5"] and all(float(rate) > 0 for _, rate in rows[1:])


@pytest.fixture
def small_tower(monkeypatch):
    """A shape with a vision tower, for a CPU."""
    pytest.importorskip("PIL.Image")
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [7, 5, 4]}
    small = ("qwen3_vl_text", 64, 96, 3, 4, 2, 32, 600, 4096, 1e-6, 5e6, 2, False)
    monkeypatch.setitem(SHAPES, "small", small)
    monkeypatch.setitem(EXTRA_ENTRIES, "small", {"rope_scaling": rope})
    tower = TOWER | dict(hidden_size=32, num_heads=2, intermediate_size=48)
    monkeypatch.setattr("nanovllm.benchmarks.shapes.TOWER", tower)


def test_images(monkeypatch, capsys, small_tower):
    """Both engines get the same prompts, and one image each; texts have a tower beside them, and as many tokens."""
    seen, prompts = {}, []

    def run_vllm(model, settings, workloads):
        prompts.extend(r.as_prompt() for runs in workloads.values() for requests in runs for r in requests if r.image)
        seen.update(vllm_settings(model, settings))
        return measure("vllm", lambda requests: Result(0.25), workloads, fastest)

    monkeypatch.setitem(ENGINES, "vllm", run_vllm)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("nanovllm.benchmarks.arguments.find_spec", lambda *args: args == ("vllm",) or find_spec(*args))
    monkeypatch.setattr(engines, "run_in_process", lambda function, *arguments: function(*arguments))
    lengths = ["--max-input-len", "20", "--max-output-len", "3", "--num-seqs", "2", "--image-sizes", "64,352"]
    main(monkeypatch, "headline,images", "--shape", "small", "--compare", "vllm", *lengths, *CPU)
    out = capsys.readouterr().out
    assert "headline: 2 requests" in out
    assert "first image 64: 1 request, 24 tokens and 1 image in, 1 out" in out  # it is scaled to 64 tokens
    assert "first text 64: 1 request, 88 tokens in, 1 out" in out and "first text 352: 1 request, 145 tokens" in out
    assert "images 352: 2 requests, 48 tokens and 2 images in, 6 out" in out
    header, *rows = table(out, "time to first token of a single request, ms")
    assert " ".join(header) == "pixels of a side nanovllm image nanovllm text vllm image vllm text"
    assert [row[0] for row in rows] == ["64", "352"] and all(row[3:] == ["250.0"] * 2 for row in rows)
    assert all(float(ms) > 0 for row in rows for ms in row[1:])
    assert [row[2] for row in table(out, "images per second (2 requests, 3 out)")[1:]] == ["8.0"] * 2
    assert seen["limit_mm_per_prompt"] == {"image": 1, "video": 0} and "language_model_only" not in seen
    images = [prompt["multi_modal_data"]["image"].tobytes() for prompt in prompts]
    assert len({*images}) == len(images) == 2 * (11 + 2 * 2)
    main(monkeypatch, "headline", "--shape", "small", "--compare", "vllm", "--num-seqs", "1", *lengths[:4], *CPU)
    assert seen["language_model_only"] and "limit_mm_per_prompt" not in vllm_settings("tiny-qwen3", {"device": "cpu"})


@pytest.fixture
def vision_config():
    vision = SimpleNamespace(min_pixels=2**16, max_pixels=2**24, patch_size=16, merge_size=2, image_token_id=256)
    return SimpleNamespace(model_config=SimpleNamespace(vision=vision), device="cuda:0", max_model_len=4096)


def test_default_images(vision_config):
    """An image of 1,024 x 1,024 pixels has 1,024 tokens; a text that is compared with it has as many."""
    pytest.importorskip("PIL.Image")
    config = vision_config
    workloads, _ = images_sweep(make_parser().parse_args(["images", "--rounds", "2"]), config)
    sizes = {name: (len(runs), len(runs[-1]), runs[-1][0].max_tokens) for name, runs in workloads.items()}
    assert sizes == {"first image 1024": (11, 1, 1), "first text 1024": (11, 1, 1), "images 1024": (3, 64, 64)}
    assert len(workloads["first text 1024"][0][0].prompt) == 24 + 1024


def test_sizes_of_images(monkeypatch, vision_config, small_tower):
    """A text has as many tokens as the scaled image. No engine is started for an image that is too large."""
    args = make_parser().parse_args(["images", "--image-sizes", "32,300,720,1000", "--rounds", "1"])
    workloads, _ = images_sweep(args, vision_config)
    lengths = [len(runs[0][0].prompt) - 24 for name, runs in workloads.items() if name.startswith("first text")]
    assert lengths == [64, 81, 484, 961]
    for side, match in (100000, "must be at most 8192"), (2000, "3868 tokens in and 300 out: .* max_model_len=4096"):
        with pytest.raises(SystemExit, match=f"^--image-sizes {side}: .*{match}"):
            sizes = "--image-sizes", f"{side}", "--max-output-len", "300"
            main(monkeypatch, "images", "--shape", "small", *sizes, *CPU)


def test_random_images():
    """The same seed gives the same pixels, and text has no placeholder."""
    pytest.importorskip("PIL.Image")
    one, other = with_images(2, 48, 5, "a seed", image_token_id=9)
    assert one.prompt[8] == 9 and max(one.prompt[:8] + one.prompt[9:]) < 9 and len(one.prompt) == 25
    image = one.image.draw()
    assert image.size == (48, 48) and image == one.image.draw() != other.image.draw()


def test_host(monkeypatch, capsys):
    """Each part takes time, and the sum is theirs; it gets by without a forward pass."""
    monkeypatch.setattr("nanovllm.batches.batch_runner.BatchRunner.compute", lambda *_: pytest.fail("a forward pass"))
    main(monkeypatch, "--workload", "host", "--max-num-seqs", "8", *CPU)
    out = capsys.readouterr().out
    assert "a loop of 1,000,000 additions in Python takes" in out
    header, *rows = table(
        out, "what a step costs the host, microseconds (median of the steps, fastest of three rounds)"
    )
    assert header == ["sequences", "schedule", "prepare", "process", "sum"] and [row[0] for row in rows] == ["1", "8"]
    for _, *parts, whole in rows:
        assert all(int(part) > 0 for part in parts) and int(whole) >= sum(map(int, parts)) * 0.8
    _, *rows = table(out, "CPU time of a step of 8 sequences until the caller has the text, microseconds")
    assert [" ".join(name) for *name, _ in rows] == ["generate", "stream", "stream with a stop string"]
    assert all(int(microseconds) > 0 for *_, microseconds in rows)


def test_host_calls_leave_the_engine_as_it_was(make_llm):
    """All tokens come from the device's replacement, which is gone afterwards."""
    llm = make_llm(max_num_seqs=4, async_scheduling=True)
    before = llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    requests = host_requests(4, 20, 8, llm.config.model_config.vocab_size)
    assert all(us > 0 for us in host_calls(llm, requests, rounds=1).values())
    assert llm.stats()["tokens"]["out"] == 3 + 3 * 4 * 8
    after = llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert after[0].token_ids == before[0].token_ids


@pytest.mark.parametrize("workload", ["online", "latency", "batches"])
def test_plot(workload, monkeypatch, capsys, tmp_path):
    """Both engines are in the table and in the picture, which is the same when it is drawn again, and small."""
    pytest.importorskip("matplotlib")

    def fake_sweep(speed: float):
        def run(model, settings, workloads):
            def times(request: Request) -> list[float]:
                return [speed * (1 + i) for i in range(request.max_tokens)]

            return {
                name: Result(1.0, token_times=[times(r) for requests in runs[1:] for r in requests])
                for name, runs in workloads.items()
            }

        return run

    for functions in (ENGINES, STEPPED_ENGINES):
        monkeypatch.setitem(functions, "nanovllm", fake_sweep(0.01))
        monkeypatch.setitem(functions, "vllm", fake_sweep(0.02))
    monkeypatch.setattr(engines, "run_in_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr("nanovllm.benchmarks.arguments.find_spec", lambda name: SimpleNamespace())
    pictures = []
    for name in ("a.svg", "b.svg"):
        arguments = ["--workload", workload, "--compare", "vllm", "--plot", str(tmp_path / name), "--device", "cpu"]
        some = "--num-seqs", "3"
        sweep = {"online": (*some, "--request-rate", "8,16"), "latency": some, "batches": ("--batch-sizes", "2,3")}
        main(monkeypatch, *arguments, *sweep[workload])
        pictures.append((tmp_path / name).read_text())
    assert pictures[0] == pictures[1] and len(pictures[0]) < 60_000
    words = {
        "online": ["TTFT, ms", "time per output token, ms", "longest gap, ms", "this package, p50", "vLLM, p99"],
        "latency": ["time to first token of a single prompt, ms", "this package, median", "vLLM, 8 sequences", "1,024"],
        "batches": ["output tokens per second", "this package", "vLLM"],
    }[workload]
    assert all(word in pictures[0] for word in ["tiny-qwen3, CPU", *words])
    for color in LINE_COLORS["nanovllm"], LINE_COLORS["vllm"]:  # a single point of each statistic can be told apart
        fills = {color} if workload == "batches" else {color, "#ffffff"}
        assert {*re.findall(rf'style="fill: (#\w+); stroke: {color}', pictures[0])} == fills
    out = capsys.readouterr().out
    first = {"online": "20.00", "latency": "20.00", "batches": "192"}[workload]
    assert "vllm" in out and first in out


# -- HTTP: servers, their clients, and what a wrong answer does

FAKE_SERVER = """
import json, os, signal, socketserver, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

mode, host, port = sys.argv[1], sys.argv[2].split("=")[1], int(sys.argv[3].split("=")[1])
if mode == "no start":
    sys.exit("an error of the server")
log = open(mode + ".log", "a")
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), other.pid, file=log, flush=True)

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_): pass

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        print(self.path, body.decode(), file=log, flush=True)
        body = json.loads(body)
        num_tokens = body["max_tokens"] - (mode == "tokens")
        usage = {"prompt_tokens": 9, "completion_tokens": num_tokens}
        head = b"HTTP/1.1 %d OK\\r\\n" % (500 if mode == "status" else 200)
        if body.get("stream"):
            events = [{"choices": [{"text": str(i)}]} for i in range(num_tokens)]
            events += [{"choices": [], "usage": usage}]
            texts = [b"data: " + json.dumps(event).encode() + b"\\n\\n" for event in events]
            texts += [b"data: [DONE]\\n\\n"] * (mode != "no end")
            chunks = [b"%x\\r\\n%s\\r\\n" % (len(text), text) for text in texts]
            if mode == "chunk":
                chunks[2] = b"zz\\r\\n"
            if mode in ("close", "hang"):
                chunks = chunks[:2]
            chunks += [b"0\\r\\n\\r\\n"] * (mode not in ("close", "hang"))
            data = head + b"Transfer-Encoding: chunked\\r\\n\\r\\n" + b"".join(chunks)
        else:
            content = json.dumps({"choices": [{"text": "a"}], "usage": usage}).encode()
            data = head + b"Content-Length: %d\\r\\n\\r\\n" % len(content) + content
        if mode == "text":
            data = b"Hello\\r\\n\\r\\n"
        for part in ([data[i : i + 1] for i in range(len(data))] if mode == "bytes" else [data]):
            self.wfile.write(part)
            self.wfile.flush()
        if mode == "hang":
            time.sleep(600)
        self.close_connection = mode == "close"

class Server(ThreadingHTTPServer):
    daemon_threads = True

Server((host, port), Handler).serve_forever()
"""


@pytest.fixture
def fake_server(monkeypatch, tmp_path):
    """A function that makes servers behave in some way; in the end, nothing may be left of any of them."""
    (tmp_path / "fake_server.py").write_text(FAKE_SERVER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    commands, modes, before = [], [], children()

    def use(*some: str) -> list:
        def fake(module, arguments):
            commands.append((module, arguments))
            return running_server("fake_server", [modes[len(commands) - 1]])

        modes.extend(some)
        monkeypatch.setattr(http, "running_server", fake)
        monkeypatch.setattr("nanovllm.benchmarks.arguments.find_spec", lambda name: True)
        return commands

    yield use
    assert children() == before
    pids = [int(pid) for log in tmp_path.glob("*.log") for pid in log.read_text().splitlines()[0].split()]
    until = perf_counter() + 10  # those that were killed have a moment to end
    while any(map(is_running, pids)):
        assert perf_counter() < until


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def children() -> set[str]:
    """The processes that this one has started."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_http(monkeypatch, capsys):
    """The server of this package with the engine's settings; every kind of request."""
    monkeypatch.setattr(servers, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Program}))
    rows = ["2x8/6", "3x12/4-whole", "2x20/5-chat"]
    settings = ["--device", "cpu", "--dtype", "float32", "--max-num-seqs", "3", "--no-enable-prefix-caching"]
    options = ["--clients", ",".join(rows), "--num-seqs", "6", "--server-flags=--max-queued-requests 5"]
    main(monkeypatch, "--workload", "http", *settings, *options)
    out = capsys.readouterr().out
    assert out.startswith("tiny-qwen3, torch.float32, cpu, ")
    header, *found = table(out, "closed loop: clients x tokens of a prompt / of its answer")
    assert header[-6:] == ["CPU", "%", "GPU", "%", "client", "%"]
    assert sorted(row[0] for row in found) == sorted(rows) and all(row[1] == "nanovllm" for row in found)
    for name, _, tokens, requests, *times, cpu, _, client in found:
        output_len = int(name.split("/")[1].split("-")[0])
        assert float(tokens) == pytest.approx(output_len * float(requests), rel=0.1) and float(cpu) > 0 <= float(client)
        for p50, p99 in zip(times[::2], times[1::2]):
            assert p50 == p99 == "-" if "whole" in name and p50 != times[0] else 0 <= float(p50) <= float(p99)
    for name in rows:  # the server's process, and a thread of it
        assert re.search(rf"\n  {name} nanovllm: \S+ \d+% \(.*\d: \d+%", out)


def test_both_servers_get_the_same_requests(fake_server, monkeypatch, capsys, tmp_path):
    """One after the other, vLLM's with its own defaults; no prompt comes twice, and answers may arrive in any parts."""
    monkeypatch.setitem(SHAPES, "small", ("llama", 64, 96, 2, 4, 2, 16, 512, 256, 1e-5, 1e4, 2, True))
    commands = fake_server("fine", "bytes")
    options = ["--shape", "small", "--clients", "2x8/6,2x8/3-whole,1x8/2-chat", "--num-seqs", "3", "--top-k", "7"]
    options += [
        "--max-model-len",
        "100",
        "--max-num-batched-tokens",
        "50",
        "--server-flags=--port 5",
        "--device",
        "cpu",
    ]
    main(monkeypatch, "--workload", "http", "--compare", "vllm", *options)
    (module, flags), (other, others) = commands
    assert (module, other) == ("nanovllm", "vllm.entrypoints.openai.api_server")
    assert flags[0] == "serve" and flags[-2:] == ["--port", "5"] and "--max-num-batched-tokens=50" in flags
    same = {"--load-format=dummy", "--max-model-len=100"}
    assert same <= set(flags) and same | {f"--model={flags[1]}", "--dtype=bfloat16"} <= set(others)
    assert not any("port" in flag or "device" in flag for flag in others)
    sent, again = (sorted(Path(f"{mode}.log").read_text().splitlines()[1:]) for mode in ("fine", "bytes"))
    assert sent == again and len(set(sent)) == len(sent) == (2 + 3) + (2 + 3) + (1 + 3)
    bodies = [json.loads(line.split(" ", 1)[1]) for line in sent]
    assert all(body["ignore_eos"] and body["temperature"] == 0.6 and body["top_k"] == 7 for body in bodies)
    assert all(len(body["prompt"]) == 8 for body in bodies if "prompt" in body)
    assert sum(line.startswith("/v1/chat/completions ") for line in sent) == 4
    streamed = [body for body in bodies if body.get("stream")]
    assert len(streamed) == 9 and all(body["stream_options"] == {"include_usage": True} for body in streamed)
    rows = table(capsys.readouterr().out, "closed loop: clients x tokens of a prompt / of its answer")[1:]
    assert [row[1] for row in rows] == ["nanovllm", "vllm"] * 3


def test_results_of_other_servers_are_kept_when_one_fails(fake_server, monkeypatch, capsys):
    fake_server("fine", "status")
    with pytest.raises(SystemExit, match="vllm, 2x8/6: .*status 500"):
        main(monkeypatch, "--workload", "http", "--compare", "vllm", "--clients", "2x8/6", "--device", "cpu")
    out, err = capsys.readouterr()
    rows = table(out, "closed loop: clients x tokens of a prompt / of its answer")[1:]
    assert [row[1] for row in rows] == ["nanovllm"] and "vllm failed: vllm, 2x8/6: " in err


@pytest.mark.parametrize(
    "mode, words",
    [
        ("tokens", "5 tokens instead of 6"),
        ("no end", "instead of [DONE]"),
        ("chunk", "not a valid chunk: b'zz"),
        ("text", "not a valid answer: b'hello'"),
        ("close", "the server closed the connection"),
        ("status", "status 500"),
        ("hang", "nothing has arrived for 0.3 seconds"),
    ],
)
def test_wrong_answers_end_the_run(mode, words, fake_server, monkeypatch, tmp_path):
    """The error says which answer it was and what is wrong; nothing is left running, which the fixture checks."""
    source = Path(clients.__file__).read_text()
    impatient = tmp_path / "clients.py"
    silence = 0.3 if mode == "hang" else 10.0
    impatient.write_text(source.replace("MAX_SILENCE = 300.0", f"MAX_SILENCE = {silence}"))
    monkeypatch.setattr(clients, "__file__", str(impatient))
    fake_server(mode)
    with pytest.raises(SystemExit) as stopped:
        main(monkeypatch, "--workload", "http", "--clients", "2x8/6", "--device", "cpu")
    message = str(stopped.value)
    assert message.startswith("nanovllm, 2x8/6: ") and words in message
    assert re.search(r": request \d+: ", message) or mode == "hang"


def test_a_server_that_does_not_start(fake_server, monkeypatch, capsys):
    fake_server("no start")
    with pytest.raises(SystemExit, match="the server ended with status 1"):
        main(monkeypatch, "--workload", "http", "--device", "cpu")
    assert "an error of the server" in capsys.readouterr().err


@pytest.mark.parametrize("number, expected", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signals_leave_no_server(number, expected, fake_server):
    fake_server()
    handler = signal.getsignal(number)
    with pytest.raises(expected), running_server("fake_server", ["fine"]) as server, http.ClientProcesses():
        assert is_running(server.process.pid) and cpu_times(server)
        signal.raise_signal(number)
    assert not is_running(server.process.pid) and signal.getsignal(number) is handler
