"""Weights of 8 bits: the same answers as transformers with the dequantized weights, and what is refused."""

import json
import random
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import CUDA, DEVICE, TINY, Peers, assert_close, each_dtype_or_half, generate_by_steps, pairs, randn
from safetensors.torch import load_file, save_file
from test_models import (
    CASES,
    SMALL,
    assert_same_as_transformers,
    edit,
    gelu_family,
    logits_of_rank,
    make_checkpoint,
    needs_new_families,
    reference_model,
)
from test_models import requests as model_requests

from nanovllm import SamplingParams
from nanovllm.cache.kv_cache import KVCache
from nanovllm.config import Config
from nanovllm.fused.fused_linear import WeightFormat, partial_sum, product
from nanovllm.fused.norm_input import NormInput
from nanovllm.kernels.activations import GELU_AND_MUL, SWIGLU
from nanovllm.layers.gated_activation import GatedActivation
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.models import ModelConfig, make_model
from nanovllm.quantization import scaled as scaled_weights
from nanovllm.quantization.formats.fp8 import e4m3_scheme
from nanovllm.quantization.formats.int8 import config_on_load as int8_config
from nanovllm.quantization.scaled_linear import ScaledLinear
from nanovllm.utils.construction import constructing
from nanovllm.utils.loader import load_model
from nanovllm.utils.partial_sum import PartialSum
from nanovllm.utils.tensor_parallel import TensorParallel

__all__ = ["gelu_family"]  # a fixture
dequantize = scaled_weights.dequantize.__wrapped__  # as it is defined, on a GPU too
ops = pytest.importorskip("nanovllm.kernels.ops")
from nanovllm.kernels import variant
from nanovllm.kernels.hopper import hopper_tiles
from nanovllm.kernels.launch.gpu_features import has_hopper_kernels
from nanovllm.kernels.linear.add_rms_norm import rms_norm
from nanovllm.moe.kernels import mix_experts, moe_gemm, moe_routing
from nanovllm.moe.kernels.moe_gemv import moe_gemv
from nanovllm.quantization.kernels import multiply_scaled as scaled_linear
from nanovllm.quantization.kernels.scaled_gemv import choose_gemv_split_k, scaled_gemv

E4M3 = torch.float8_e4m3fn
SCALED = "scaled_linear", "best_scaled_split_k", "dequantize"
BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def compressed_tensors(strategy: str, dynamic: bool = True, **entries) -> dict:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    inputs = weights | {"dynamic": dynamic, "strategy": "token" if dynamic else "tensor"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}
    return config | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]} | entries


# what is written in config.json, and what quantizes a weight: rows and columns of a block, and the name of its scales
FORMATS = {
    "block": (BLOCK, (128, 128, "weight_scale_inv")),
    "small-blocks": (BLOCK | {"weight_block_size": [32, 16]}, (32, 16, "weight_scale_inv")),
    "tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, (None, None, "weight_scale")),
    "ct-channel": (compressed_tensors("channel"), (1, None, "weight_scale")),
    "ct-tensor": (compressed_tensors("tensor", dynamic=False), (None, None, "weight_scale")),
    "modelopt-static": ({"quant_method": "modelopt", "quant_algo": "FP8"}, (None, None, "weight_scale")),
}


def is_linear(name: str) -> bool:
    return name.endswith(("_proj.weight", "per_layer_input_gate.weight", "_projection.weight"))


def write_quantized(
    source: str, folder: Path, format_name: str, skip=lambda name: False, margin: float = 1.25, **entries
) -> tuple[str, str]:
    """Folders with the checkpoint in `source` quantized, and with the dequantized weights in float32.

    margin: scales are that much larger than they need to be, so that quantizing the values again would change them.
    """
    config, scheme = FORMATS[format_name]
    scheme = e4m3_scheme(*scheme)
    quantized, plain = {}, {}
    tensors = load_file(Path(source) / "model.safetensors")
    for name, weight in split_experts(tensors).items():
        if not is_linear(name) or skip(name):
            quantized[name] = plain[name] = weight.float().contiguous()
            continue
        values, scales = scheme.quantize(weight.float())
        values, scales = (values.float() / margin).to(E4M3), margin * scales
        assert values.dtype == E4M3 and values.shape == weight.shape
        quantized[name] = values
        shape = scales.shape if scheme.block_rows else ()
        quantized[name.replace("weight", scheme.scale_name)] = scales.reshape(shape).clone()
        if config.get("activation_scheme") == "static" or "static" in format_name:
            quantized[name.replace("weight", "input_scale")] = torch.tensor(0.5)
        plain[name] = dequantized(values, scales, scheme)
    folders, plain = [], stack_experts(plain, like=tensors)
    for kind, content in ("quantized", quantized), ("plain", plain):
        (target := folder / kind).mkdir(parents=True)
        for file in Path(source).glob("*.json"):
            shutil.copy(file, target)
        save_file(content, target / "model.safetensors", metadata={"format": "pt"})
        folders.append(str(target))
    edit(folders[0], quantization_config=config | entries)
    return tuple(folders)


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With a tensor for each expert and projection, as published checkpoints have them."""
    each = {}
    for name, tensor in tensors.items():
        path, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj"):
            each[name] = tensor
            continue
        for i, expert in enumerate(tensor):
            parts = zip(("gate", "up"), expert.chunk(2)) if kind == "gate_up_proj" else [("down", expert)]
            each |= {f"{path}.{i}.{part}_proj.weight": weight.clone() for part, weight in parts}
    return each


def stack_experts(each: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `split_experts`, if the experts are stacked in `like`, the checkpoint that was split."""
    result = dict(each)
    for name in (name for name in like if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))):
        path, _, kind = name.rpartition(".")
        parts = ("gate", "up") if kind == "gate_up_proj" else ("down",)
        experts = [[result.pop(f"{path}.{i}.{part}_proj.weight") for part in parts] for i in range(len(like[name]))]
        result[name] = torch.stack([torch.cat(expert) for expert in experts])
    return result


def dequantized(values: torch.Tensor, scales: torch.Tensor, scheme) -> torch.Tensor:
    """Independent of the shapes' divisibility."""
    block = scheme.block_of(tuple(values.shape))
    n, k = values.shape
    grown = scales.repeat_interleave(block.rows, 0)[:n].repeat_interleave(block.columns, 1)[:, :k]
    return (values.float() * grown).contiguous()


# -- the numbers themselves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(128, 256), (300, 200), (1, 5), (2500, 40)])
@pytest.mark.parametrize("block", [(128, 128), (1, None), (None, None), (3, 7)])
@pytest.mark.parametrize("make", [e4m3_scheme, lambda *block: int8_config().groups[0][1]], ids=["fp8", "int8"])
def test_quantize(shape, block, make):
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.rand(shape[0], 1)
    weight[0, : shape[1] // 2] = 0
    scheme = make(*block)
    values, scales = scheme.quantize(weight)
    error = (dequantized(values, scales, scheme) - weight).abs()
    largest = scales.repeat_interleave(scheme.block_of(shape).rows, 0)[: shape[0]].amax(1, keepdim=True)
    if scheme.dtype == torch.int8:
        assert (error <= largest * 0.5001).all()
    else:  # three bits after the first, and 2^-9 as the smallest number
        assert (error <= weight.abs() / 16 * 1.0001 + largest * 2**-10 * 1.0001).all()
    assert not values[0, : shape[1] // 2].float().any()


def test_dequantize():
    values, scales = torch.randn(3, 8, 12).to(E4M3), torch.rand(3, 4, 2)
    expected = values.float() * scales.repeat_interleave(2, 1).repeat_interleave(6, 2)
    assert torch.equal(dequantize(values, scales, torch.float32), expected)
    assert torch.equal(dequantize(values[1], scales[1], torch.float16), expected[1].half())


# -- whole models ------------------------------------------------------------------------------------------------------


def a_few_requests() -> list[tuple[list[int], SamplingParams]]:
    """Two chunks of a prompt, another prompt and a single token beside the second, and decodes."""
    return model_requests()[:3]


@pytest.mark.parametrize(
    "name, format_name",
    [
        ("qwen3", "block"),
        ("llama-biases", "small-blocks"),
        ("qwen2", "ct-channel"),
        ("mistral", "ct-tensor"),
        ("qwen3-biases", "tensor"),
        ("qwen3-moe", "block"),
        ("qwen3-moe-dense-layer", "ct-channel"),
        ("qwen3-moe-step", "small-blocks"),
        # with q, k and v in one tensor
        *(("phi3", name) for name in ("ct-channel", "tensor") if "phi3" in CASES),
        *(case for case in (("glm4", "small-blocks"), ("ministral3", "tensor")) if case[0] in CASES),
        *(case for case in (("gemma4-experts", "ct-channel"), ("gemma4-shared", "tensor")) if case[0] in CASES),
    ],
)
def test_parity(make_llm, tmp_path, name, format_name):
    folder, plain = write_quantized(make_checkpoint(tmp_path, name), tmp_path, format_name)
    llm = make_llm(folder, **SMALL)
    modules = [*llm.model_runner.model.modules()]
    formats = {type(module.format).__name__ for module in modules if hasattr(module, "format")}
    moe = name.startswith("qwen3-moe") or name == "gemma4-experts"
    assert formats >= {"ScaledExperts"} if moe else formats and "WeightFormat" not in formats
    assert moe or all(hasattr(module, "format") for module in modules if isinstance(module, LinearBase))
    assert_same_as_transformers(plain, generate_by_steps(llm, a_few_requests()))


def test_parity_with_a_separate_config(make_llm, tmp_path):
    """Model Optimizer may write its format into a file of its own, with modules that are not quantized."""
    folder, plain = write_quantized(
        make_checkpoint(tmp_path, "llama"), tmp_path, "modelopt-static", lambda name: "layers.1.mlp" in name
    )
    config = json.loads((Path(folder) / "config.json").read_text())
    config.pop("quantization_config")
    (Path(folder) / "config.json").write_text(json.dumps(config))
    separate = Path(folder) / "hf_quant_config.json"
    separate.write_text(json.dumps({"producer": {"name": "modelopt"}}))
    with pytest.raises(TypeError, match=r"hf_quant_config.json: quantization=None: must be an object"):
        make_llm(folder, **SMALL)
    written = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head", "model.layers.1.mlp*"]}
    separate.write_text(json.dumps({"quantization": written | {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ValueError, match=r"hf_quant_config.json: .*quant_algo='W4A8_AWQ'"):
        make_llm(folder, **SMALL)
    separate.write_text(json.dumps({"quantization": written | {"quant_algo": None}}))  # only the cache is quantized
    assert ModelConfig.read(Path(folder)).quantization is None
    separate.write_text(json.dumps({"quantization": written}))
    assert_same_as_transformers(plain, generate_by_steps(make_llm(folder, **SMALL), a_few_requests()))


@needs_new_families
def test_parity_within_a_checkpoint_with_images(make_llm, tmp_path):
    """As Ministral 3: nested names, in `modules_to_not_convert` too, and the scale of a whole weight is named _inv."""
    skipped = "model.layers.0.mlp.down_proj"
    source = make_checkpoint(tmp_path, "ministral3")
    folder, plain = write_quantized(source, tmp_path, "tensor", lambda name: name.startswith(skipped))
    nested = lambda name: name.replace("model.", "model.language_model.", 1)
    tensors = load_file(Path(folder) / "model.safetensors")
    tensors = {nested(name).replace("weight_scale", "weight_scale_inv"): x for name, x in tensors.items()}
    save_file(tensors | {"model.vision_tower.x": torch.ones(1)}, Path(folder) / "model.safetensors")
    text = json.loads((Path(folder) / "config.json").read_text())
    formats = text.pop("quantization_config") | {"modules_to_not_convert": [nested(skipped), "model.vision_tower"]}
    raw = {"model_type": "mistral3", "text_config": text, "quantization_config": formats, "dtype": "float32"}
    (Path(folder) / "config.json").write_text(json.dumps(raw))
    assert_same_as_transformers(plain, generate_by_steps(make_llm(folder, **SMALL), a_few_requests()))


def test_parity_of_the_bundled_model(make_llm, tmp_path):
    """Blocks of 128 x 128, of which a weight has several."""
    folder, plain = write_quantized(TINY, tmp_path, "block")
    assert_same_as_transformers(plain, generate_by_steps(make_llm(folder, max_num_batched_tokens=64), a_few_requests()))


@pytest.mark.parametrize(
    "name, format_name, size, settings",
    [
        ("qwen3", "block", 2, {}),
        ("llama-3.1", "small-blocks", 4, {}),
        ("llama-3.2", "ct-channel", 4, {}),
        ("mistral", "ct-tensor", 2, {}),
        ("qwen3-moe", "block", 2, {}),
        ("qwen3-moe", "ct-channel", 4, {}),
        ("qwen3-moe", "block", 4, {"expert_parallel": True}),
        *((name, "ct-channel", 2, {}) for name in ("gemma4-experts", "gemma4-shared") if name in CASES),
    ],
)
def test_ranks(tmp_path, name, format_name, size, settings):
    """Borders of ranks cut blocks; each rank has the scales of its own part. test_sleep.py has an engine's ranks."""
    folder, plain = write_quantized(make_checkpoint(tmp_path, name), tmp_path, format_name)
    (prompt, _), *_ = model_requests()
    expected = reference_model(plain)(torch.tensor([prompt])).logits[0]
    with ThreadPoolExecutor(size) as pool:
        arguments = size, folder, tmp_path, prompt
        for logits in pool.map(lambda rank: logits_of_rank(rank, *arguments, **settings), range(size)):
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


def short_requests(*lengths: tuple[int, int]) -> list[tuple[list[int], SamplingParams]]:
    """For the interpreter, which takes long for each token: of these numbers of tokens, given and wanted."""
    (prompt, params), *_ = model_requests()
    return [(prompt[-given:], replace(params, max_tokens=wanted)) for given, wanted in lengths]


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in Triton's interpreter")
@pytest.mark.parametrize(
    "name, format_name, lengths",
    [
        ("llama-biases", "small-blocks", [(3, 2)]),  # several rows, then one: more are computed in no other way
        ("llama-gelu", "block", [(12, 2), (1, 2), (3, 3)]),
    ],
)
def test_parity_on_kernels(monkeypatch, use_ops, make_llm, tmp_path, name, format_name, lengths):
    """Without FP8 units: chunks, several decodes, and a single one."""
    use_ops("linear", "split_linear", "norm_linear", "best_split_k", "add_rms_norm", *SCALED)
    monkeypatch.setattr(scaled_linear, "MAX_SCALED_ROWS", 8)
    folder, plain = write_quantized(make_checkpoint(tmp_path, name), tmp_path, format_name)
    llm = make_llm(
        folder, **SMALL | dict(max_num_batched_tokens=10)
    )  # more than MAX_SCALED_ROWS only in the first step
    assert_same_as_transformers(plain, generate_by_steps(llm, short_requests(*lengths)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in Triton's interpreter")
@pytest.mark.parametrize(
    "name, format_name",
    [("llama-biases", "block"), ("llama-gelu", "block"), ("qwen3", "ct-channel"), ("qwen3-moe", "ct-channel")],
)
def test_fp8_units(monkeypatch, use_ops, make_llm, tmp_path, name, format_name):
    """Activations of several rows are quantized: by the norm, the activation, or a kernel of their own."""
    products = "linear", "split_linear", "norm_linear", "best_split_k", "add_rms_norm", "silu_and_mul", "mix_experts"
    use_ops(*products, "quantize_rows", *SCALED)
    monkeypatch.setattr("nanovllm.quantization.quant_config.has_fp8_units", lambda device: True)
    monkeypatch.setattr("nanovllm.quantization.kernels.scaled_gemv.MAX_TILE_K", 32)
    monkeypatch.setattr("nanovllm.quantization.kernels.scaled_gemv.K_MULTIPLE", 32)
    monkeypatch.setattr("nanovllm.quantization.fp8_linear.MAX_GEMM_ROWS", 4)
    monkeypatch.setattr("nanovllm.quantization.fp8_linear.FP8Linear.max_split_k_rows", 6)
    monkeypatch.setattr("nanovllm.moe.kernels.moe_gemv.SCALED_GATE_UP_TILE", (32, 64, 4))
    monkeypatch.setattr("nanovllm.moe.kernels.moe_gemv.DOWN_TILE", (32, 64, 1))
    calls = []
    kernels = {"scaled_gemv", "split_k_gemm", "quantize_rows", "rms_norm_quantize"}
    act = set() if name == "llama-gelu" else {"silu_and_mul_quantize"}
    kernels |= {"moe_gemv", "moe_gemm"} if name == "qwen3-moe" else act
    for kernel in kernels:
        for module in (ops, mix_experts, scaled_linear):
            if (call := getattr(module, kernel, None)) is not None:
                note = lambda *a, kernel=kernel, call=call, **k: calls.append((kernel, a)) or call(*a, **k)
                monkeypatch.setattr(module, kernel, note)
    folder, plain = write_quantized(make_checkpoint(tmp_path, name), tmp_path, format_name)
    llm = make_llm(folder, **SMALL | dict(max_num_batched_tokens=7))
    outputs = generate_by_steps(llm, short_requests((6, 3), (1, 2), (1, 1)))
    assert {kernel for kernel, _ in calls} == kernels
    split_ks = [a[4] for kernel, a in calls if kernel == "scaled_gemv" and len(a) > 4]
    assert (max(split_ks) > 1) == (name != "llama-biases")
    # another expert may be chosen for a token; the random model is another one with transformers 4
    assert_near_transformers(plain, outputs, 0.5, 0.8 if name == "qwen3-moe" else 1.0)


def norm_of(weight: torch.Tensor) -> RMSNorm:
    norm = RMSNorm(len(weight), 1e-6)
    norm.weight.data = weight
    return norm


def test_two_products_of_a_norm():
    """The residual is added once, also where both layers let the norm quantize their rows."""
    from nanovllm.quantization.fp8_linear import FP8Linear

    x, residual, norm = randn(3, 64), randn(3, 64), norm_of(randn(64))
    normed = NormInput(PartialSum(x.clone()), residual.clone(), norm)
    for _ in range(2):
        FP8Linear._quantized(SimpleNamespace(group=64), normed)
        assert_close(normed.residual, (x + residual).double())


def assert_near_transformers(plain: str, outputs: list, tolerance: float, share: float = 1.0) -> None:
    """Log-probabilities of this share of the answers' tokens, up to what quantized activations cost."""
    model = reference_model(plain)
    differences = []
    for output in outputs:
        (answer,), prompt = output.outputs, output.prompt_token_ids
        logprobs = model(torch.tensor([prompt + answer.token_ids])).logits[0, :-1].log_softmax(-1)
        for i, ours in enumerate(answer.logprobs, len(prompt) - 1):
            differences.append(max(abs(logprob.logprob - logprobs[i, other]) for other, logprob in ours.items()))
    differences = torch.stack(differences).sort().values
    assert (differences <= tolerance).double().mean() >= share, differences
    assert differences.isfinite().all() and (share < 1.0 or differences[-1] < 4 * tolerance), differences


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "name, format_name",
    [("qwen3", "block"), ("llama-biases", "block"), ("mistral", "ct-channel"), ("qwen3-moe", "ct-channel")],
)
def test_on_gpu(make_llm, tmp_path, name, format_name, dtype, enforce_eager):
    """Chunks, decodes of a few sequences, and at the end of one."""
    folder, plain = write_quantized(make_checkpoint(tmp_path, name), tmp_path, format_name)
    settings = SMALL | dict(dtype=dtype, enforce_eager=enforce_eager, gpu_memory_utilization=0.1)
    outputs = generate_by_steps(make_llm(folder, device="cuda", **settings), model_requests())
    # another expert is chosen for some tokens, as their router's logits are nearly equal
    assert_near_transformers(plain, outputs, 0.7, 0.85 if name == "qwen3-moe" else 1.0)


# -- on the fly --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", *(name for name in ["gemma4-experts"] if name in CASES)])
def test_on_load_is_what_a_prepared_checkpoint_gives(make_llm, tmp_path, name):
    source = make_checkpoint(tmp_path, name)
    folder, plain = write_quantized(source, tmp_path, "ct-channel", margin=1.0)
    prepared = generate_by_steps(make_llm(folder, **SMALL), a_few_requests())
    (tmp_path / "each").mkdir()
    shutil.copy(tmp_path / "config.json", tmp_path / "each")
    shutil.copytree(source, tmp_path / "each", dirs_exist_ok=True, ignore=lambda *_: ["quantized", "plain", "each"])
    save_file(split_experts(load_file(Path(source) / "model.safetensors")), tmp_path / "each" / "model.safetensors")
    for model in (source, str(tmp_path / "each")):
        on_load = generate_by_steps(make_llm(model, quantization="fp8", **SMALL), a_few_requests())
        assert_same_as_transformers(plain, on_load)
        for a, b in zip(prepared, on_load):
            assert a["token_ids"] == b["token_ids"]


def weights_of(folder: str, size: int, quantization: str) -> list[dict]:
    """Values and scales of each rank, by layer."""
    ranks = []
    for rank in range(size):
        config = ModelConfig.read(Path(folder), quantization)
        model = make_model(config, 64, TensorParallel(rank, size))
        load_model(model, Path(folder), torch.device("cpu"))
        ranks.append({name: m.format for name, m in model.named_modules() if name.endswith("_proj")})
    return ranks


def test_on_load_is_the_same_on_any_number_of_ranks(tmp_path):
    """The scale of an output is that of its whole row, of which a rank of a row-parallel layer has a part."""
    folder = make_checkpoint(tmp_path, "llama")
    (whole,) = weights_of(folder, 1, "fp8")
    halves = weights_of(folder, 2, "fp8")
    for name, one in whole.items():
        parts = [half[name] for half in halves]
        if name.endswith(("o_proj", "down_proj")):
            assert torch.equal(one.values.view(torch.int8), torch.cat([p.values.view(torch.int8) for p in parts], 1))
            assert all(torch.equal(part.scales, one.scales) for part in parts), name
        else:
            assert sorted(torch.cat([p.scales for p in parts]).flatten().tolist()) == sorted(
                one.scales.flatten().tolist()
            )


def test_layers_take_no_memory_before_their_format(tmp_path):
    """So the device never holds the model in its own dtype."""
    config = ModelConfig.read(Path(make_checkpoint(tmp_path, "qwen3-moe")), "fp8")
    model = make_model(config, 64)
    for name, p in model.named_parameters():
        assert p.is_meta == ("proj" in name or ".mlp.gate." in name), name
    load_model(model, tmp_path, torch.device("cpu"))
    assert not any(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("name", ["qwen3-moe", *(x for x in ("gemma4-experts", "gemma4-shared") if x in CASES)])
def test_int8_on_load(make_llm, tmp_path, name):
    source = make_checkpoint(tmp_path, name)
    (tmp_path / "plain").mkdir()
    shutil.copytree(source, tmp_path / "plain", dirs_exist_ok=True, ignore=lambda *_: ["plain"])
    scheme = int8_config().groups[0][1]
    stored = load_file(Path(source) / "model.safetensors")
    tensors = split_experts(stored)
    linear = {name: dequantized(*scheme.quantize(w), scheme) for name, w in tensors.items() if is_linear(name)}
    save_file(
        stack_experts(tensors | linear, stored), tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"}
    )
    llm = make_llm(source, quantization="int8", **SMALL)
    assert_same_as_transformers(str(tmp_path / "plain"), generate_by_steps(llm, a_few_requests()))


@pytest.mark.parametrize("settings", [{}, {"quantization": "fp8"}, {"quantization": "int8"}])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3-moe"])
def test_dummy_weights(make_llm, tmp_path, name, settings):
    """Of a quantized shape, without any weight file."""
    folder = make_checkpoint(tmp_path, name)
    (Path(folder) / "model.safetensors").unlink()
    if not settings:
        edit(folder, quantization_config=BLOCK)
    llm = make_llm(folder, load_format="dummy", **settings)
    linear = [
        module for module in llm.model_runner.model.modules() if hasattr(getattr(module, "format", None), "scales")
    ]
    assert linear and all(1e-6 < layer.format.scales.min() <= layer.format.scales.max() < 1e-2 for layer in linear)
    (answer,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(answer["token_ids"]) == 4


def test_nothing_changes_without_the_setting(make_llm, tmp_path):
    llm = make_llm(make_checkpoint(tmp_path, "qwen3-moe"))
    model = llm.model_runner.model
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    formats = {type(module.format).__name__ for module in model.modules() if hasattr(module, "format")}
    assert formats == {"ExpertsFormat"} and model.config.quantization is None  # plain linear layers have none


# -- which layers, and what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "format_name, key, ignore, skipped",
    [
        ("block", "modules_to_not_convert", ["model.layers.0.self_attn.o_proj", "lm_head"], r"\.0\.self_attn\.o_proj"),
        ("block", "modules_to_not_convert", ["down_proj"], r"down_proj"),
        ("ct-channel", "ignore", ["lm_head", "re:.*layers.1.self_attn.[qkv]_proj"], r"\.1\.self_attn\.[qkv]_proj"),
        ("ct-tensor", "ignore", ["re:.*mlp.*"], r"\.mlp\."),
        ("small-blocks", "modules_to_not_convert", ["model.layers.1"], r"layers\.1\."),
    ],
)
def test_ignored_layers(make_llm, tmp_path, format_name, key, ignore, skipped):
    source = make_checkpoint(tmp_path, "qwen3")
    skip = lambda name: re.search(skipped, name) is not None
    folder, plain = write_quantized(source, tmp_path, format_name, skip, **{key: ignore})
    llm = make_llm(folder, **SMALL)
    dtypes = {name: p.dtype for name, p in llm.model_runner.model.named_parameters() if name.endswith("proj.weight")}
    assert set(dtypes.values()) == {torch.float32, E4M3}
    assert_same_as_transformers(plain, generate_by_steps(llm, a_few_requests()))


def test_groups_of_compressed_tensors(make_llm, tmp_path):
    """The first group whose targets match decides."""
    config = compressed_tensors("channel")
    other = compressed_tensors("tensor")["config_groups"]["group_0"] | {"targets": ["re:.*self_attn.*"]}
    config["config_groups"] = {"attention": other, **config["config_groups"]}
    folder = make_checkpoint(tmp_path, "qwen3")
    edit(folder, quantization_config=config)
    quantized = ModelConfig.read(Path(folder)).quantization
    assert quantized.scheme_of("model.layers.0.self_attn.q_proj").block_rows is None
    assert quantized.scheme_of("model.layers.0.mlp.up_proj").block_rows == 1
    assert quantized.scheme_of("lm_head") is None


def test_parts_of_a_layer_in_different_formats(make_llm, tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3")
    edit(folder, quantization_config=BLOCK | {"modules_to_not_convert": ["q_proj"]})
    with pytest.raises(ValueError, match=r"layers.0.self_attn.qkv_proj: its parts .*q_proj.* in different ways"):
        make_llm(folder)


CT = compressed_tensors("channel")


@pytest.mark.parametrize(
    "config, message",
    [
        ({"quant_method": "hqq"}, "quant_method='hqq': must be one of .*'fp8', .*quantization/formats/"),
        ({"bits": 4}, "quant_method=None: must be one of"),
        (BLOCK | {"fmt": "e5m2"}, "fmt='e5m2'"),
        (BLOCK | {"scale_fmt": "ue8m0"}, "scale_fmt='ue8m0'"),
        (BLOCK | {"weight_block_size": [128]}, r"weight_block_size=\[128\]: must be two positive"),
        (BLOCK | {"activation_scheme": "none"}, "activation_scheme='none'"),
        (CT | {"format": "int-quantized"}, "format='int-quantized'"),
        (CT | {"config_groups": {}}, "has no config_groups"),
        (compressed_tensors("group"), "strategy='group': must be one of 'tensor', 'channel', 'block'"),
    ],
)
def test_refused_formats(tmp_path, config, message):
    assert_refused(make_checkpoint(tmp_path, "qwen3"), config, message)


def assert_refused(folder: str, config: dict, message: str) -> None:
    edit(folder, quantization_config=config)
    with pytest.raises(ValueError, match=message) as error:
        Config(folder, device="cpu")
    assert "config.json: quantization_config" in str(error.value)


def test_settings(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3")
    with pytest.raises(ValueError, match="quantization='awq': must be one of 'fp8', 'int4', 'int8'; "):
        Config(folder, device="cpu", quantization="awq")
    assert Config(folder, device="cpu", quantization="int8").model_config.quantization.name == "int8"
    edit(folder, quantization_config=BLOCK)
    assert Config(folder, device="cpu") == Config(folder, device="cpu")
    same = Config(folder, device="cpu", quantization="fp8").model_config
    assert same == Config(folder, device="cpu").model_config
    with pytest.raises(ValueError, match="quantization='int8': must be 'fp8', the checkpoint's, or left out"):
        Config(folder, device="cpu", quantization="int8")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t, n: t | {n: t[n].float()}, "has dtype F32, its quantization_config needs F8_E4M3"),
        (lambda t, n: t | {n + "_scale_inv": torch.ones(3, 1)}, r"scales of shape \[3, 1\], the model needs \[1, 1\]"),
        (lambda t, n: {k: v for k, v in t.items() if k != n + "_scale_inv"}, "1 tensors are missing: .*_scale_inv"),
        (lambda t, n: t | {n: torch.full_like(t[n], torch.nan)}, "NaN or infinite .*: .*o_proj.weight$"),
        (
            lambda t, n: t | {n + "_scale_inv": torch.full((1, 1), torch.inf)},
            "NaN or infinite .*o_proj.weight_scale_inv$",
        ),
        (lambda t, n: t | {n: t[n][:5].clone()}, r"has shape \[5, 128\], the model needs \[64, 128\]"),
    ],
)
def test_broken_checkpoints(make_llm, tmp_path, change, message):
    folder, _ = write_quantized(make_checkpoint(tmp_path, "qwen3"), tmp_path, "block")
    file = Path(folder) / "model.safetensors"
    save_file(change(load_file(file), "model.layers.1.self_attn.o_proj.weight"), file)
    with pytest.raises(ValueError, match=message):
        make_llm(folder)


def test_weights_that_give_no_scales(make_llm, tmp_path):
    """What is checked of weights that are quantized here are their scales, which have another dtype than the norms."""
    folder = make_checkpoint(tmp_path, "qwen3")
    file, name = Path(folder) / "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
    weights = load_file(file)
    save_file(weights | {name: torch.full_like(weights[name], torch.nan)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"1 tensors are NaN or infinite in torch.float32: {name}"):
        make_llm(folder, quantization="fp8", dtype="bfloat16")


def test_config_is_data(tmp_path):
    """It goes to the other ranks."""
    import pickle

    folder = make_checkpoint(tmp_path, "qwen3")
    edit(folder, quantization_config=CT)
    config = ModelConfig.read(Path(folder)).quantization
    assert pickle.loads(pickle.dumps(config)) == config and json.loads(json.dumps(CT)) == CT


# -- kernels -----------------------------------------------------------------------------------------------------------


def scaled(n: int, k: int, rows: int, columns: int, kind=E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """Random values [n, k] of 8 bits, and scales of blocks."""
    scales = (torch.rand(n // rows, k // columns) + 0.5).to(DEVICE) / (16 if kind == E4M3 else 128)
    values = randn(n, k) * 8
    return values.round().clamp(-127, 127).to(torch.int8) if kind == torch.int8 else values.to(E4M3), scales


SHAPES = [(24, 96, 8, 32), (24, 1152, 8, 128), (40, 72, 1, 72), (36, 384, 4, 128), (6, 40, 2, 8), (70, 272, 1, 272)]
each_shape_and_kind = pytest.mark.parametrize("shape, kind", pairs(SHAPES, [E4M3, torch.int8]), ids=str)


@each_dtype_or_half
@each_shape_and_kind
@pytest.mark.parametrize(
    "act, has_bias, split_k",
    [(None, 0, 1), (SWIGLU, 1, 1), (GELU_AND_MUL, 1, 1), (None, 1, 1), (None, 0, 3)],
)
def test_scaled_gemv(fresh_memory_is_nan, dtype, kind, shape, act, has_bias, split_k):
    n, k, rows, columns = shape
    n *= 2 if act else 1  # a border of blocks between the halves
    values, scales = scaled(n, k, rows, columns, kind)
    x, bias = randn(1, k, dtype=dtype), randn(n, dtype=dtype) if has_bias else None
    expected = F.linear(x.double(), dequantize(values, scales, torch.float64), None if bias is None else bias.double())
    if act:
        expected = GatedActivation(act)(expected)
    y = scaled_gemv(x, (values, scales), act, bias, split_k)
    if split_k > 1:
        assert y.shape == (split_k, 1, n)
        y = y.float().sum(0).to(dtype)
    assert_close(y, expected, 10 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("k, has_bias, split_k", [(256, False, 1), (384, True, 1), (384, False, 2)])
def test_one_row_to_peers(monkeypatch, use_ops, k, has_bias, split_k):
    use_ops(*SCALED)
    monkeypatch.setattr("nanovllm.quantization.kernels.scaled_gemv.MAX_TILE_K", 128)
    tp = Peers()
    with torch.device(DEVICE), constructing(tp):
        layer = RowParallelLinear(k, 24, has_bias)
        layer.format = ScaledLinear(layer, e4m3_scheme(8, 128))
    layer.weight.weight_loader(layer.weight, randn(24, k))
    if has_bias:
        layer.bias.copy_(randn(24))
    x = randn(1, k)
    y = partial_sum(layer, x)
    weight = dequantize(layer.format.values, layer.format.scales, torch.float64)
    assert y.parts is tp.parts and y.parts.shape == (split_k, 1, 24)
    expected = F.linear(x.double(), weight, layer.bias.double() if has_bias else None)
    assert_close(y.parts.sum(0), expected, 10 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize(
    "k, max_split_k, split_k",
    [
        (4096, 4, 1),
        (8192, 4, 1),
        (12288, 4, 1),
        (16384, 4, 1),
        (9728, 4, 3),
        (9728, 1, 1),
        (17408, 4, 3),
        (25600, 4, 4),
        (25600, 2, 2),
        (8320, 4, 3),  # the best, and below three quarters
    ],
)
def test_split_k_of_one_row(k, max_split_k, split_k):
    """The fewest parts that fill at least three quarters of a tile, whose width is a power of two."""
    assert choose_gemv_split_k(k, max_split_k) == split_k


WIDE = [shape for shape in SHAPES if shape[3] >= 32]


@each_dtype_or_half
@pytest.mark.parametrize("way", ["int8", "a16", "a8"])
@pytest.mark.parametrize("shape", WIDE)
@pytest.mark.parametrize("num_rows, split_k", [(2, 1), (17, 3), (70 if CUDA else 33, 2)])
def test_scaled_gemm(fresh_memory_is_nan, dtype, way, shape, num_rows, split_k):
    n, k, rows, columns = shape
    values, scales = scaled(n, k, rows, columns, torch.int8 if way == "int8" else E4M3)
    x = randn(num_rows, k, dtype=dtype)
    x[0, :5] = 0
    rows = ops.quantize_rows(x, columns) if way == "a8" else x
    expected = (as_floats(rows) if way == "a8" else x.double()) @ dequantize(values, scales, torch.float64).T
    parts = ops.split_k_gemm(rows, (values, scales), split_k)
    assert parts.shape == (split_k, num_rows, n)
    if way == "a8":  # FP8 units add with fewer digits
        assert (parts.double().sum(0) - expected).norm() < 0.005 * expected.norm()
    else:
        assert_close(parts.float().sum(0).to(dtype), expected, 10 * max(1.0, expected.abs().max().item()))


@pytest.mark.gpu
@pytest.mark.skipif(not has_hopper_kernels(), reason="needs a Hopper GPU, and Triton 3.6")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows, n, k", [(1, 128, 128), (130, 384, 640), (1030, 4224, 384)])
def test_swiglu_on_hopper(fresh_memory_is_nan, dtype, num_rows, n, k):
    """Fewer tiles than programs and more, also with rows beyond the last; about as near as in three steps."""
    from nanovllm.kernels.hopper.hopper_gated import gated_linear

    values, scales = scaled(2 * n, k, 128, 128)
    scales /= 8  # else most results of silu are 0 or what it is of
    x = ops.quantize_rows(randn(num_rows, k, dtype=dtype), 128)
    rows = gated_linear(x, values, SWIGLU, scales)
    assert len(rows) == num_rows and rows.dtype == dtype and rows.scales.shape == (len(rows.values), n // 128)
    product = as_floats(x) @ dequantize(values, scales, torch.float64).T
    activated = F.silu(product[:, :n]) * product[:, n:]
    in_steps = ops.silu_and_mul_quantize(product.to(dtype), 128)
    error, error_in_steps = ((as_floats(y) - activated).norm() for y in (rows, in_steps))
    assert error < 1.1 * error_in_steps and error < 0.04 * activated.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not has_hopper_kernels(), reason="needs a Hopper GPU, and Triton 3.6")
@pytest.mark.parametrize("tile", [tile for *_, tiles in hopper_tiles.TILES for tile in tiles], ids=str)
@pytest.mark.parametrize(
    "num_rows, n, k, split_k, dtype", [(17, 640, 640, 2, torch.float16), (250, 27008, 1152, 1, torch.bfloat16)]
)
def test_scaled_gemm_on_hopper(fresh_memory_is_nan, tile, num_rows, n, k, split_k, dtype):
    """Fewer tiles than programs and more, fewer blocks than buffers and more; tiles and parts that lack something."""
    from nanovllm.quantization.kernels.hopper_scaled_gemm import hopper_scaled_gemm

    values, scales = scaled(n, k, 128, 128)
    x = ops.quantize_rows(randn(num_rows, k, dtype=dtype), 128)
    expected = as_floats(x) @ dequantize(values, scales, torch.float64).T
    parts = hopper_scaled_gemm(x, values, scales, tile._replace(split_k=split_k))
    assert parts.shape == (split_k, num_rows, n) and parts.dtype == dtype
    assert (parts.double().sum(0) - expected).norm() < 0.005 * expected.norm()


def test_tiles_on_hopper():
    """They fill the GPU as far as is promised, and those of a split product are found again from its parts."""
    rng, found = random.Random(0), 0
    for _ in range(2000):
        rows, n, k = rng.randrange(1, 300), 128 * rng.randrange(1, 300), 128 * rng.randrange(1, 120)
        most, sms = rng.choice((1, 2, 4)), rng.choice((78, 114, 132))
        if (tile := hopper_tiles.choose_tile(rows, n, k, most, sms)) is not None:
            found += 1
            programs = -(-rows // tile.rows) * -(-n // tile.outputs) * tile.split_k
            assert 16 < rows <= 256 and tile.split_k <= most
            assert programs > hopper_tiles.MIN_BUSY * sms * -(-programs // sms)
            assert tile == hopper_tiles.choose_tile(rows, n, k, tile.split_k, sms)
    assert 200 < found < 1800


@pytest.mark.parametrize("num_rows, parts", [(16, 2), (17, 2), (17, 1)])
def test_products_on_hopper(monkeypatch, use_ops, num_rows, parts):
    """Those that have a tile go to its kernel, whole and in parts; others stay, and all of a batch-invariant engine."""
    from nanovllm.quantization.fp8_linear import FP8Linear

    calls = []

    def hopper_scaled_gemm(x, values, scales, tile, out):
        calls.append((len(x), tile.split_k))
        return ops.split_k_gemm(x, (values, scales), tile.split_k, out)

    use_ops("best_scaled_split_k")
    name = "nanovllm.quantization.kernels.hopper_scaled_gemm"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(hopper_scaled_gemm=hopper_scaled_gemm))
    monkeypatch.setattr(hopper_tiles, "has_hopper_kernels", lambda: True)
    monkeypatch.setattr(hopper_tiles, "num_sms", lambda device: parts)
    layer = RowParallelLinear(2048, 128)
    with torch.device(DEVICE):
        layer.format = FP8Linear(layer, e4m3_scheme(128, 128))
    layer.weight.weight_loader(layer.weight, randn(128, 2048))
    x = ops.quantize_rows(randn(num_rows, 2048, dtype=torch.bfloat16), 128)
    y = partial_sum(layer, x)
    assert calls == ([(num_rows, parts)] if num_rows > 16 else [])
    variant.set("-invariant")
    try:
        parts_of_invariant = layer.format.linear(layer, x, None, y.split_k)
    finally:
        variant.set("")
    assert torch.equal(y.parts, parts_of_invariant) and len(calls) == (num_rows > 16)


@pytest.mark.gpu
@pytest.mark.skipif(not has_hopper_kernels(), reason="needs a Hopper GPU, and Triton 3.6")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows, heads, kv_heads, k", [(1, 2, 2, 128), (130, 16, 8, 640), (2500, 6, 2, 384)])
def test_qkv_on_hopper(fresh_memory_is_nan, dtype, num_rows, heads, kv_heads, k):
    """Fewer tiles than programs and more, also with rows beyond the last; up to what FP8 units round."""
    from test_kernels import stored

    from nanovllm.kernels.hopper.hopper_qkv import store_product

    values, scales = scaled((heads + 2 * kv_heads) * 128, k, 128, 128)
    x = ops.quantize_rows(randn(num_rows, k, dtype=dtype), 128)
    qkv = (as_floats(x) @ dequantize(values, scales, torch.float64).T).unflatten(1, (-1, 128))
    for found, expected in stored(partial(store_product, (x, values, scales)), qkv, kv_heads, 128, True, dtype):
        assert (found.double() - expected).norm() < 0.005 * expected.norm()


def test_factors_of_a_product(monkeypatch):
    """What a kernel gets that multiplies on its own: quantized rows, by the norm if it was not computed before."""
    from nanovllm.quantization.fp8_linear import FP8Linear

    fake = SimpleNamespace(store_product=lambda factors, *args: factors)
    monkeypatch.setitem(sys.modules, "nanovllm.kernels.hopper.hopper_qkv", fake)
    monkeypatch.setattr(hopper_tiles, "has_hopper_kernels", lambda: True)
    monkeypatch.setattr(hopper_tiles, "MAX_CAPTURED_ROWS", 2)
    layer = QKVParallelLinear(256, 128, 2, 2)
    cache = KVCache(torch.empty(2, 1, 16, 2, 128, dtype=torch.bfloat16))
    args = (None, None, 0.0, torch.ones(3, 2, 128)), torch.arange(3), cache
    x, norm = randn(3, 256), norm_of(randn(256))
    for rows, columns in ((128, 128), (None, 256), (128, 64)):
        with torch.device(DEVICE):
            layer.format = FP8Linear(layer, e4m3_scheme(rows, columns))
        for is_computed in (False, True):
            normed, other = (NormInput(PartialSum(x.clone()), None, norm) for _ in range(2))
            if is_computed:
                normed.tensor()
            factors = ops.qkv_norm_rope_store(normed, layer, *args)
            if (rows, columns) != (128, 128):
                assert factors is NotImplemented
                continue
            assert factors[1] is layer.format.values and factors[2] is layer.format.scales
            assert_near(as_floats(factors[0]), other.tensor().double(), 128)
            assert torch.equal(normed.residual, x)
    layer.format = ScaledLinear(layer, e4m3_scheme(128, 128))
    assert ops.qkv_norm_rope_store(normed, layer, *args) is NotImplemented
    layer.format = type("OwnFormat", (WeightFormat,), {})()  # whose weight others can't multiply, or do not find
    assert ops.qkv_norm_rope_store(normed, layer, *args) is NotImplemented
    del layer.weight
    assert ops.qkv_norm_rope_store(normed, layer, *args) is NotImplemented


def test_activation_in_the_product(monkeypatch):
    """Where a kernel computes the activation too, its rows go to the next layer as they are."""
    from nanovllm.quantization.fp8_linear import FP8Linear

    def swiglu(x, values, scales):
        calls.append(len(x))
        return ops.silu_and_mul_quantize(ops.split_k_gemm(x, (values, scales))[0], 128)

    layer, down = MergedColumnParallelLinear(128, [128] * 2), RowParallelLinear(128, 128)
    with torch.device(DEVICE):
        for linear in (layer, down):
            linear.format = FP8Linear(linear, e4m3_scheme(128, 128))
    for i in range(2):
        layer.weight.weight_loader(layer.weight, randn(128, 128), i)
    x, norm, outputs, calls = randn(3, 128), norm_of(randn(128)), [], []
    for _ in range(2):
        rows = product(layer, NormInput(PartialSum(x.clone()), None, norm), down.format.act_fn())
        outputs.append(as_floats(rows))
        monkeypatch.setattr(ops, "swiglu_quantize", swiglu)
    assert calls == [3] and torch.equal(*outputs)


def as_floats(rows) -> torch.Tensor:
    """What quantized rows stand for, in float64."""
    return dequantize(rows.values, rows.scales, torch.float64)[: len(rows)]


@each_dtype_or_half
@pytest.mark.parametrize(
    "num_rows, n, group", [(1, 96, 32), (5, 384, 128), (19, 72, 72), (3, 2200, 2200), (130 if CUDA else 33, 96, 32)]
)
def test_quantize_rows(fresh_memory_is_nan, dtype, num_rows, n, group):
    x = randn(num_rows, n, dtype=dtype)
    x[:1] = 0
    rows = ops.quantize_rows(x, group)
    assert len(rows) == num_rows and rows.dtype == dtype and len(rows.values) % 16 == 0
    assert rows.scales.shape == (len(rows.values), n // group) and rows.scales.stride(0) == 1
    assert len(ops.quantize_rows(x[:0], group)) == 0
    assert_near(as_floats(rows), x.double(), group)

    gated = randn(num_rows, 2 * n, dtype=dtype)
    activated = F.silu(gated[:, :n].double()) * gated[:, n:].double()
    assert_near(as_floats(ops.silu_and_mul_quantize(gated, group)), activated, group)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, group: int) -> None:
    """Up to the rounding to e4m3, and a little for what rounds to another side."""
    largest = expected.unflatten(1, (-1, group)).abs().amax(2, keepdim=True).expand(-1, -1, group).flatten(1)
    assert ((actual - expected).abs() <= expected.abs() * (0.0625 + 0.002) + largest * (2**-19 + 0.0001)).all()


@each_dtype_or_half
@pytest.mark.parametrize("n, group", [(96, 32), (384, 128), (72, 72)])
@pytest.mark.parametrize("split_k, has_residual", [(1, False), (1, True), (3, True)])
def test_rms_norm_quantize(fresh_memory_is_nan, dtype, n, group, split_k, has_residual):
    parts, weight = randn(split_k, 5, n, dtype=dtype), randn(n, dtype=dtype)
    residual = randn(5, n, dtype=dtype) if has_residual else None
    x = parts if split_k > 1 else parts[0]
    expected_residual = None if residual is None else residual.clone()
    normed = rms_norm(x, weight, 0.5, expected_residual, split_k)
    rows = ops.rms_norm_quantize(x, weight, 0.5, residual, split_k, group)
    assert residual is None or torch.equal(residual, expected_residual)
    assert_near(as_floats(rows), normed.double(), group)


@each_shape_and_kind
def test_dequantize_kernel(fresh_memory_is_nan, kind, shape):
    values, scales = scaled(*shape, kind)
    for dtype in (torch.float16, torch.float32):
        assert torch.equal(ops.dequantize(values, scales, dtype), dequantize(values, scales, dtype))


@pytest.mark.parametrize("n, k, rows", [shape[:3] for shape in WIDE if shape[2] > 1])
def test_scaled_gemm_of_several_rows_with_a_scale(fresh_memory_is_nan, n, k, rows):
    values, scales = scaled(n, k, rows, k)
    x = ops.quantize_rows(randn(20, k, dtype=torch.float16), k)
    expected = as_floats(x) @ dequantize(values, scales, torch.float64).T
    y = ops.split_k_gemm(x, (values, scales))[0]
    assert (y - expected).norm() < 0.005 * expected.norm()


def scaled_experts(num_experts: int, n: int, k: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = scaled(num_experts * n, k, rows, columns)
    return values.unflatten(0, (num_experts, n)), scales.unflatten(0, (num_experts, n // rows))


def experts_reference(x, routing, gate_up, down) -> torch.Tensor:
    """Every token through each of its experts, in float64."""
    gate_up, down = (dequantize(*weight, torch.float64) for weight in (gate_up, down))
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (weights, ids) in enumerate(zip(routing.weights.double(), routing.expert_ids)):
        for weight, expert in zip(weights, ids.tolist()):
            gate, up = (x[token : token + 1].double() @ gate_up[expert].T).chunk(2, -1)
            out[token] += weight * ((F.silu(gate) * up) @ down[expert].T)[0]
    return out


# tokens, experts, top_k, hidden, size, and the block of both weights; None: a scale for each row
EXPERT_SHAPES = [
    (1, 3, 2, 64, 96, (32, 32)),
    (3, 5, 3, 96, 64, None),
    (4, 2, 1, 320, 32, (16, 64)),
    (1, 4, 2, 128, 384, (16, 128)),
]


def expert_inputs(num_tokens, num_experts, top_k, hidden, size, block, dtype=torch.float16):
    x = randn(num_tokens, hidden, dtype=dtype)
    routing = moe_routing.route(randn(1, num_tokens, num_experts), top_k, True)
    gate_up = scaled_experts(num_experts, 2 * size, hidden, *(block or (1, hidden)))
    down = scaled_experts(num_experts, hidden, size, *((block[0], min(block[1], 32)) if block else (1, size)))
    return x, routing, (gate_up[0], gate_up[1] / 8), (down[0], down[1] / 8)


@pytest.fixture
def few_programs(monkeypatch, fresh_memory_is_nan):
    """Larger tiles than on a GPU, as the interpreter takes long for each program."""
    monkeypatch.setattr("nanovllm.moe.kernels.moe_gemv.SCALED_GATE_UP_TILE", (32, 128, 4))
    monkeypatch.setattr("nanovllm.moe.kernels.moe_gemv.DOWN_TILE", (32, 64, 1))


@pytest.mark.parametrize("shape", EXPERT_SHAPES, ids=str)
def test_scaled_moe_gemv(few_programs, shape):
    x, routing, gate_up, down = expert_inputs(*shape)
    expected = experts_reference(x, routing, gate_up, down)
    out = torch.full_like(x, torch.nan)
    assert moe_gemv(x, routing, gate_up, down, out=out) is out
    assert_close(out, expected, 10 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize(
    "shape, num_tokens, quantize",
    [(*pair, False) for pair in pairs(EXPERT_SHAPES[:3], [5, 18, 120 if CUDA else 65])]
    + [(*pair, True) for pair in pairs(EXPERT_SHAPES[:3], [5, 18, 120 if CUDA else 43])],
)
def test_scaled_moe_gemm(fresh_memory_is_nan, shape, num_tokens, quantize):
    """Tiles of 16, 32 and 64 rows, also where there are rows enough for larger ones."""
    x, routing, gate_up, down = expert_inputs(num_tokens, *shape[1:])
    parts = moe_gemm.moe_gemm(x, routing, gate_up, down, 0, quantize)
    expected = experts_reference(x, routing, gate_up, down)
    assert parts.shape == (shape[2], *x.shape)
    difference = (parts.double().sum(0) - expected).norm() / expected.norm()
    assert difference < (0.06 if quantize else 0.003), difference


@pytest.mark.parametrize("quantize", [False, True], ids=["a16", "a8"])
def test_experts_of_other_ranks(few_programs, quantize):
    """Experts 2 and 3 of four are here."""
    x, routing, gate_up, down = expert_inputs(4, 4, 2, 64, 32, (32, 32))
    local = [tuple(t[2:].contiguous() for t in weight) for weight in (gate_up, down)]
    weights = torch.where(routing.expert_ids >= 2, routing.weights, 0.0)
    expected = experts_reference(x, routing._replace(weights=weights), gate_up, down)
    assert_close(moe_gemv(x, routing, *local, 2), expected, 10 * max(1.0, expected.abs().max().item()))
    parts = moe_gemm.moe_gemm(x, routing, *local, 2, quantize)
    y = moe_gemm.sum_local_parts(parts, routing, 2, 2)
    difference = (y.double() - expected).norm() / expected.norm()
    assert difference < (0.06 if quantize else 0.003), difference
