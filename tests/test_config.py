"""Settings and sampling parameters: what is resolved to what. What is refused is in test_arguments.py."""

import dataclasses
import importlib.util
import inspect
import json
import shutil
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from common import TINY

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.models import MEMORY_LIMITS, ModelConfig, cpu_multiplies
from nanovllm.utils import cores

MODEL_LEN = 2048  # of the bundled model


def config(**settings) -> Config:
    return Config.create(TINY, {"device": "cpu"} | settings)


@pytest.fixture
def model_of_length(tmp_path):
    """A function that makes a folder of a model with another bound; there are no weights in it."""
    shutil.copy(Path(TINY) / "tokenizer.json", tmp_path)

    def make(length: int) -> str:
        raw = json.loads((Path(TINY) / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": length}))
        return str(tmp_path)

    return make


# -- settings ----------------------------------------------------------------------------------------------------------


def test_numbers_are_pythons_own():
    """One of fixed width would wrap in the arithmetic that comes later."""
    names = "max_num_batched_tokens max_num_seqs max_model_len kvcache_block_size num_kvcache_blocks max_logprobs seed"
    for kind in (np.int8, np.uint8, np.int64):
        c = config(**dict.fromkeys(names.split(), kind(32)), tensor_parallel_size=kind(1))
        assert {type(getattr(c, name)) for name in (*names.split(), "tensor_parallel_size")} == {int}
        assert c.max_num_batched_tokens * c.kvcache_block_size == 1024
    assert type(config(gpu_memory_utilization=np.float16(0.5)).gpu_memory_utilization) is float


def test_num_kvcache_blocks_is_set_once_it_is_known(make_llm):
    assert config().num_kvcache_blocks is None
    llm = make_llm()
    assert llm.config.num_kvcache_blocks == llm.stats()["blocks"]["free"] > 0


def test_engine_refuses_before_it_loads(monkeypatch):
    monkeypatch.setattr("nanovllm.engine.llm_engine.ModelRunner", lambda *_: pytest.fail("loaded a model"))
    with pytest.raises(ValueError, match="max_num_seqs=0"):
        LLM(TINY, device="cpu", max_num_seqs=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_cuda_without_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match=f"device='{device}'.*0 CUDA devices.*'cpu'"):
            config(device=device)
    assert Config(TINY).device == "cpu"


@pytest.mark.parametrize("backend, package", [("flash", "flash_attn"), ("triton", "triton")])
def test_backends_of_the_gpu_on_a_cpu(monkeypatch, backend, package):
    find_spec = importlib.util.find_spec
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == package else find_spec(name))
    with pytest.raises(ValueError, match=f"attention_backend='{backend}'.*device='cuda'"):
        config(attention_backend=backend)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(ValueError, match=f"attention_backend='{backend}'.*{package} is not installed.*pip install"):
        config(attention_backend=backend)


def test_triton_interpreter_makes_triton_run_on_a_cpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert config(attention_backend="triton").attention_backend == "triton"
    assert config().attention_backend == "sdpa"  # but not by default
    with pytest.raises(ValueError, match="needs device='cuda'"):
        config(attention_backend="flash")


def test_gpu_defaults_where_there_is_one(monkeypatch):
    """Resolution needs no device, only to be told of one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    with pytest.raises(ValueError, match="device='cuda:2'.*2 CUDA devices"):
        Config(TINY, device="cuda:2")
    resolved = Config(TINY)
    assert (resolved.device, resolved.attention_backend, resolved.async_scheduling) == ("cuda", "triton", True)
    assert Config(TINY, device="cuda:1").device == "cuda:1"
    assert Config(TINY, async_scheduling=False).async_scheduling is False
    assert Config(TINY, attention_backend="flash").attention_backend == "flash"
    with pytest.raises(ValueError, match="kvcache_block_size=128.*256"):
        Config(TINY, attention_backend="flash", kvcache_block_size=128)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert Config(TINY).attention_backend == "sdpa"


def test_defaults():
    c = config()
    assert (c.max_num_batched_tokens, c.max_num_seqs, c.gpu_memory_utilization) == (16384, 512, 0.9)
    assert (c.tensor_parallel_size, c.enforce_eager, c.kvcache_block_size) == (1, False, 256)
    assert (c.num_kvcache_blocks, c.enable_prefix_caching, c.seed) == (None, True, None)
    assert (c.device, c.attention_backend, c.async_scheduling) == ("cpu", "sdpa", False)
    assert (c.revision, c.load_format, c.max_logprobs) == (None, "auto", 100)
    assert c.model == c.tokenizer == TINY and Config("tiny-qwen3", device="cpu") == c
    assert config(async_scheduling=True).async_scheduling is True


def test_dtype():
    for dtype in ("float32", torch.float32, "torch.float32"):
        assert config(dtype=dtype).dtype is torch.float32
    assert config(dtype="float16").dtype is config(dtype="half").dtype is torch.float16
    assert config(dtype="float").dtype is config(dtype="float").model_config.dtype is torch.float32


@pytest.mark.parametrize("length, expected", [(1000, 1000), (4096, 4096), (40960, 4096)])
def test_max_model_len_default(model_of_length, length, expected):
    assert Config(model_of_length(length), device="cpu").max_model_len == expected


def test_max_model_len_up_to_the_models(model_of_length):
    model = model_of_length(40960)
    assert Config(model, device="cpu", max_model_len=40960).max_model_len == 40960
    with pytest.raises(ValueError, match="max_model_len=40961: must be at most 40960"):
        Config(model, device="cpu", max_model_len=40961)


def test_yarn_makes_the_longest_sequence_longer(model_of_length):
    """As model cards of Qwen turn it on, `max_position_embeddings` stays. The default length stays too."""
    file = Path(model := model_of_length(40960)) / "config.json"
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_scaling": yarn}))
    assert Config(model, device="cpu", max_model_len=131072).max_model_len == 131072
    assert Config(model, device="cpu").max_model_len == 4096
    with pytest.raises(ValueError, match="max_model_len=131073: must be at most 131072"):
        Config(model, device="cpu", max_model_len=131073)


@pytest.mark.parametrize(
    "blocks, max_model_len, expected", [(3, None, 48), (3, 40, 40), (3, 1000, 48), (1000, None, MODEL_LEN)]
)
def test_given_cache_bounds_max_model_len(blocks, max_model_len, expected):
    c = config(num_kvcache_blocks=blocks, kvcache_block_size=16, max_model_len=max_model_len)
    assert (c.max_model_len, c.num_kvcache_blocks) == (expected, blocks)


def test_signature_is_the_settings():
    """What an editor and `help` show of `LLM` is Config's own signature."""
    shown = inspect.signature(LLM).parameters
    assert [*shown] == [field.name for field in dataclasses.fields(Config) if field.init]
    assert shown["max_num_seqs"].default == 512 and shown["max_num_seqs"].annotation is int
    assert all(shown[name].kind is inspect.Parameter.KEYWORD_ONLY for name in [*shown][1:])


def test_frozen():
    c = config()
    for target, name in [(c, "max_num_seqs"), (c.model_config, "vocab_size"), (SamplingParams(), "temperature")]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(target, name, 1)


@pytest.mark.parametrize("emulates", [False, True])
def test_dtype_auto_on_a_cpu(monkeypatch, emulates):
    """float32 where the CPU would emulate the checkpoint's bfloat16; what is asked for by name is obeyed."""
    monkeypatch.setattr("nanovllm.models.cpu_multiplies", lambda dtype: dtype is not torch.bfloat16 or not emulates)
    auto = config()
    assert auto.dtype is auto.model_config.dtype is (torch.float32 if emulates else torch.bfloat16)
    assert auto.dtype_reason == ("this CPU has no instructions for bfloat16" if emulates else "the checkpoint's")
    named = config(dtype="bfloat16")
    assert named.dtype is torch.bfloat16 and named.dtype_reason == ""


@pytest.mark.parametrize("limit", ["machine", "container"])
def test_dtype_auto_needs_memory_for_float32(monkeypatch, tmp_path, limit):
    """Weights of 7 MB in bfloat16 would take more than half of 16 MiB in float32, also if these are a container's."""
    monkeypatch.setattr("nanovllm.models.cpu_multiplies", lambda dtype: False)
    assert [*map(str, MEMORY_LIMITS)] == ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
    monkeypatch.setattr(
        "nanovllm.models.MEMORY_LIMITS", files := [tmp_path / "a", tmp_path / "b", tmp_path / "missing"]
    )
    monkeypatch.setattr("os.sysconf", lambda name: 4096 if limit == "machine" else 2**20)
    files[0].write_text("max\n")
    assert limit == "machine" or config().dtype is torch.float32
    files[1].write_text(f"{2**24 if limit == 'container' else 2**62}\n")
    auto = config()
    assert auto.dtype is torch.bfloat16 and "more than half of 0.0 GiB" in auto.dtype_reason


@pytest.mark.parametrize(
    "is_x86, has_instructions, pytorch_uses, expected",
    [
        pytest.param(True, True, True, True, id="AVX512_BF16"),
        pytest.param(True, False, True, False, id="AVX-512"),
        pytest.param(True, False, False, False, id="AVX2"),
        pytest.param(True, True, False, False, id="AVX512_BF16, turned off"),
        pytest.param(False, False, True, True, id="ARM with bfloat16"),
        pytest.param(False, False, False, False, id="ARM without"),
    ],
)
def test_cpu_multiplies_bfloat16(monkeypatch, is_x86, has_instructions, pytorch_uses, expected):
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: is_x86)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_instructions)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: pytorch_uses, raising=False)
    assert cpu_multiplies(torch.bfloat16) is expected


def test_threads_of_a_step(make_llm, monkeypatch):
    """A small step has one thread, a prompt all of them, and errors leave the caller's number."""
    found, num_threads = {}, torch.get_num_threads()

    def spy(input_ids, positions):
        found[len(input_ids)] = torch.get_num_threads()
        return run_model(input_ids, positions)

    def fail(input_ids, positions):
        raise ValueError("no step")

    try:
        torch.set_num_threads(3)
        # the engine's own thread takes the number over when it first uses PyTorch
        llm = make_llm(max_num_seqs=2)
        run_model = llm.model_runner.run_model
        monkeypatch.setattr(llm.model_runner, "run_model", spy)
        llm.generate([[5] * 400], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert found == {400: 3, 1: 1} and "cpu with 3 threads" in repr(llm)
        monkeypatch.setattr(llm.model_runner, "run_model", fail)
        with pytest.raises(RuntimeError):
            llm.generate("a", use_tqdm=False)
        assert llm.engine_thread.call(torch.get_num_threads) == 3
    finally:
        torch.set_num_threads(num_threads)


def test_start_line_says_the_dtype_and_why(make_llm):
    llm = make_llm(dtype="auto")
    assert f"{str(llm.config.dtype)[6:]} ({llm.config.dtype_reason}), attention" in repr(llm)
    assert "float32, attention" in repr(make_llm(dtype="float32"))


def test_bundled_model_config():
    c = config().model_config
    assert (c.vocab_size, c.hidden_size, c.intermediate_size, c.num_hidden_layers) == (2048, 256, 768, 4)
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (8, 4, 32)
    assert c.tie_word_embeddings and not c.qkv_bias and c.eos_token_ids == {2047, 2045}


@pytest.mark.parametrize(
    "generation, own, expected",
    [
        ({"eos_token_id": [3, 4]}, 5, {3, 4}),
        ({"eos_token_id": 0}, 5, {0}),
        ({}, 5, {5}),
        (None, 5, {5}),
        (None, [5, 6], {5, 6}),
        (None, None, set()),
    ],
)
def test_eos_token_ids(tmp_path, generation, own, expected):
    raw = json.loads((Path(TINY) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"eos_token_id": own}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert ModelConfig.read(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "ids, message",
    [
        (2048, "eos_token_id=2048: must be at most 2047"),
        ([1, -1], "eos_token_id=-1: must be at least 0"),
        ("2047", "eos_token_id='2047': must be an integer"),
        ([[1]], r"eos_token_id=\[1\]: must be an integer"),
        (True, "eos_token_id=True: must be an integer"),
        (1.0, "eos_token_id=1.0"),
        ({"id": 1}, "eos_token_id={'id': 1}"),
    ],
)
def test_bad_eos_token_id(tmp_path, file, ids, message):
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps(raw | {"eos_token_id": ids}))
    with pytest.raises(ValueError, match=f"{tmp_path}/{file}: {message}"):
        ModelConfig.read(tmp_path)


@pytest.mark.parametrize(
    "name, value, kind",
    [
        ("num_hidden_layers", 0, ValueError),
        ("vocab_size", "2048", TypeError),
        ("hidden_size", None, TypeError),
        ("head_dim", 32.0, TypeError),
        ("num_key_value_heads", "4", TypeError),
        ("num_key_value_heads", 3, ValueError),
        ("head_dim", 33, ValueError),
        ("rms_norm_eps", -1, ValueError),
        ("rms_norm_eps", "x", TypeError),
        ("tie_word_embeddings", "false", TypeError),
        ("text_config", 5, TypeError),
        ("quantization_config", "fp8", TypeError),
        ("clip_qkv", 8.0, ValueError),
        ("logits_scaling", 8.0, ValueError),
        ("routed_scaling_factor", 2.5, ValueError),
        ("scoring_func", "sigmoid", ValueError),
        ("is_causal", False, ValueError),
    ],
)
def test_bad_model_config(tmp_path, name, value, kind):
    raw = json.loads((Path(TINY) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {name: value}))
    with pytest.raises(kind, match=f"{tmp_path}/config.json: {name}={value!r}"):
        ModelConfig.read(tmp_path)


# -- sampling parameters -----------------------------------------------------------------------------------------------


def test_good_sampling_params():
    assert SamplingParams() == SamplingParams(temperature=1.0, max_tokens=64, ignore_eos=False, seed=None)
    SamplingParams(temperature=0, max_tokens=np.int64(1), ignore_eos=True, seed=2**64 - 1)
    SamplingParams(temperature=np.float32(0.5), seed=np.uint64(7))
    SamplingParams(top_p=1, top_k=-1, min_p=1, min_tokens=64, logit_bias=dict.fromkeys(range(300), -100), logprobs=0)
    for ids in (7, [7], (7,), {7}, [np.int64(7)]):
        assert SamplingParams(stop="a", stop_token_ids=ids) == SamplingParams(stop=["a"], stop_token_ids=[7])
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


def test_an_enum_of_strings_is_a_string():
    """Settings go to other processes, which do not know the caller's classes."""

    class Choice(str, Enum):
        MODEL, DTYPE, POLICY = "tiny-qwen3", "float16", "priority"

    config = Config(Choice.MODEL, device="cpu", dtype=Choice.DTYPE, scheduling_policy=Choice.POLICY)
    assert config.dtype == torch.float16 and type(config.scheduling_policy) is type(config.model) is str
    assert config.scheduling_policy == "priority"


def test_utilization_of_a_gpu_has_no_effect_on_a_cpu(caplog):
    Config(TINY, device="cpu", gpu_memory_utilization=0.5)
    assert "gpu_memory_utilization=0.5: has no effect on a CPU" in caplog.text
    caplog.clear()
    Config(TINY, device="cpu")
    assert not caplog.text


@pytest.mark.parametrize("limit, most", [("200000 100000", 2), ("50000 100000", 1), ("max 100000", None), (None, None)])
def test_cores_of_a_container(monkeypatch, tmp_path, limit, most):
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: {*range(16)}, raising=False)
    monkeypatch.setattr(cores, "CPU_LIMIT", tmp_path / "cpu.max")
    if limit is not None:
        cores.CPU_LIMIT.write_text(limit)
    assert cores.available_cores() == (most or 16)
