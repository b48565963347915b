"""Weights of 8 bits: the same answers as transformers with the dequantized weights, and what is refused."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import TINY, generate_by_steps
from safetensors.torch import load_file, save_file
from test_models import SMALL, assert_same_as_transformers, edit, logits_of_rank, make_checkpoint, reference_model
from test_models import requests as model_requests

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.model_config import ModelConfig
from nanovllm.quantization.fp8 import e4m3_scaling
from nanovllm.quantization.int8 import plan_on_load as int8_plan
from nanovllm.quantization.scaled import dequantize

E4M3 = torch.float8_e4m3fn
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
}


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def write_quantized(source: str, folder: Path, format_name: str, skip=lambda name: False, **entries) -> tuple[str, str]:
    """Folders with the checkpoint in `source` quantized, and with the dequantized weights in float32."""
    config, scaling = FORMATS[format_name]
    scaling = e4m3_scaling(*scaling)
    quantized, plain = {}, {}
    tensors = load_file(Path(source) / "model.safetensors")
    for name, weight in split_experts(tensors).items():
        if not is_linear(name) or skip(name):
            quantized[name] = plain[name] = weight.float().contiguous()
            continue
        values, scales = scaling.quantize(weight.float())
        assert values.dtype == E4M3 and values.shape == weight.shape
        quantized[name] = values
        shape = scales.shape if scaling.block_rows else ()
        quantized[name.replace("weight", scaling.scale_name)] = scales.reshape(shape).clone()
        if config.get("activation_scheme") == "static" or "static" in format_name:
            quantized[name.replace("weight", "input_scale")] = torch.tensor(0.5)
        plain[name] = dequantized(values, scales, scaling)
    folders = []
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


def dequantized(values: torch.Tensor, scales: torch.Tensor, scaling) -> torch.Tensor:
    """Independent of the shapes' divisibility."""
    block = scaling.block_of(tuple(values.shape))
    n, k = values.shape
    grown = scales.repeat_interleave(block.rows, 0)[:n].repeat_interleave(block.columns, 1)[:, :k]
    return (values.float() * grown).contiguous()


# -- the numbers themselves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(128, 256), (300, 200), (1, 5), (2500, 40)])
@pytest.mark.parametrize("block", [(128, 128), (1, None), (None, None), (3, 7)])
@pytest.mark.parametrize("make", [e4m3_scaling, lambda *block: int8_plan().groups[0][1]], ids=["fp8", "int8"])
def test_quantize(shape, block, make):
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.rand(shape[0], 1)
    weight[0, : shape[1] // 2] = 0
    scaling = make(*block)
    values, scales = scaling.quantize(weight)
    error = (dequantized(values, scales, scaling) - weight).abs()
    largest = scales.repeat_interleave(scaling.block_of(shape).rows, 0)[: shape[0]].amax(1, keepdim=True)
    if scaling.dtype == torch.int8:
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
    ],
)
def test_parity(make_llm, tmp_path, name, format_name):
    folder, plain = write_quantized(make_checkpoint(tmp_path, name), tmp_path, format_name)
    llm = make_llm(folder, **SMALL)
    formats = {type(module.format).__name__ for module in llm.model_runner.model.modules() if hasattr(module, "format")}
    moe = name.startswith("qwen3-moe")
    assert (
        formats >= {"ScaledExperts"} if moe else {type(m).__name__ for m in formats} and "WeightFormat" not in formats
    )
    assert_same_as_transformers(plain, generate_by_steps(llm, model_requests()))


def test_parity_of_the_bundled_model(make_llm, tmp_path):
    """Blocks of 128 x 128, of which a weight has several."""
    folder, plain = write_quantized(TINY, tmp_path, "block")
    assert_same_as_transformers(plain, generate_by_steps(make_llm(folder, max_num_batched_tokens=64), model_requests()))


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
    ],
)
def test_ranks(tmp_path, name, format_name, size, settings):
    """Borders of ranks cut blocks; each rank has the scales of its own part."""
    folder, plain = write_quantized(make_checkpoint(tmp_path, name), tmp_path, format_name)
    (prompt, _), *_ = model_requests()
    expected = reference_model(plain)(torch.tensor([prompt])).logits[0]
    with ThreadPoolExecutor(size) as pool:
        arguments = size, folder, tmp_path, prompt
        for logits in pool.map(lambda rank: logits_of_rank(rank, *arguments, **settings), range(size)):
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


def test_engine_of_two_ranks(make_llm, tmp_path):
    folder, plain = write_quantized(make_checkpoint(tmp_path, "qwen3-moe"), tmp_path, "block")
    outputs = generate_by_steps(make_llm(folder, tensor_parallel_size=2, **SMALL), model_requests())
    assert_same_as_transformers(plain, outputs)


# -- on the fly --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_on_load_is_what_a_prepared_checkpoint_gives(make_llm, tmp_path, name):
    source = make_checkpoint(tmp_path, name)
    folder, plain = write_quantized(source, tmp_path, "ct-channel")
    prepared = generate_by_steps(make_llm(folder, **SMALL), model_requests())
    (tmp_path / "each").mkdir()
    shutil.copy(tmp_path / "config.json", tmp_path / "each")
    shutil.copytree(source, tmp_path / "each", dirs_exist_ok=True, ignore=lambda *_: ["quantized", "plain", "each"])
    save_file(split_experts(load_file(Path(source) / "model.safetensors")), tmp_path / "each" / "model.safetensors")
    for model in (source, str(tmp_path / "each")):
        on_load = generate_by_steps(make_llm(model, quantization="fp8", **SMALL), model_requests())
        assert_same_as_transformers(plain, on_load)
        for a, b in zip(prepared, on_load):
            assert a["token_ids"] == b["token_ids"]


def weights_of(folder: str, size: int, quantization: str) -> list[dict]:
    """Values and scales of each rank, by layer."""
    from nanovllm.layers.attention_backends import SDPABackend
    from nanovllm.models import model_class
    from nanovllm.utils.loader import load_model
    from nanovllm.utils.tensor_parallel import TensorParallel

    ranks = []
    for rank in range(size):
        config = ModelConfig.read(Path(folder), quantization)
        model = model_class(config.model_type)(config, 64, SDPABackend(), TensorParallel(rank, size))
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


def test_int8_on_load(make_llm, tmp_path):
    source = make_checkpoint(tmp_path, "qwen3-moe")
    (tmp_path / "plain").mkdir()
    shutil.copytree(source, tmp_path / "plain", dirs_exist_ok=True, ignore=lambda *_: ["plain"])
    scaling = int8_plan().groups[0][1]
    tensors = split_experts(load_file(Path(source) / "model.safetensors"))
    linear = {name: dequantized(*scaling.quantize(w), scaling) for name, w in tensors.items() if is_linear(name)}
    save_file(tensors | linear, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    llm = make_llm(source, quantization="int8", **SMALL)
    assert_same_as_transformers(str(tmp_path / "plain"), generate_by_steps(llm, model_requests()))


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
    assert formats == {"WeightFormat", "ExpertsFormat"} and model.config.quantization is None


# -- which layers, and what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "format_name, key, ignore, skipped",
    [
        ("block", "modules_to_not_convert", ["model.layers.0.self_attn.o_proj", "lm_head"], r"\.0\.self_attn\.o_proj"),
        ("block", "modules_to_not_convert", ["down_proj"], r"down_proj"),
        ("ct-channel", "ignore", ["lm_head", "re:.*layers.1.self_attn.[qkv]_proj"], r"\.1\.self_attn\.[qkv]_proj"),
        ("ct-tensor", "ignore", ["re:.*mlp.*"], r"\.mlp\."),
    ],
)
def test_ignored_layers(make_llm, tmp_path, format_name, key, ignore, skipped):
    source = make_checkpoint(tmp_path, "qwen3")
    skip = lambda name: re.search(skipped, name) is not None
    folder, plain = write_quantized(source, tmp_path, format_name, skip, **{key: ignore})
    llm = make_llm(folder, **SMALL)
    dtypes = {name: p.dtype for name, p in llm.model_runner.model.named_parameters() if name.endswith("proj.weight")}
    assert set(dtypes.values()) == {torch.float32, E4M3}
    assert_same_as_transformers(plain, generate_by_steps(llm, model_requests()))


def test_groups_of_compressed_tensors(make_llm, tmp_path):
    """The first group whose targets match decides."""
    config = compressed_tensors("channel")
    other = compressed_tensors("tensor")["config_groups"]["group_0"] | {"targets": ["re:.*self_attn.*"]}
    config["config_groups"] = {"attention": other, **config["config_groups"]}
    folder = make_checkpoint(tmp_path, "qwen3")
    edit(folder, quantization_config=config)
    plan = ModelConfig.read(Path(folder)).quantization
    assert plan.scaling_of("model.layers.0.self_attn.q_proj").block_rows is None
    assert plan.scaling_of("model.layers.0.mlp.up_proj").block_rows == 1
    assert plan.scaling_of("lm_head") is None


def test_parts_of_a_layer_in_different_formats(make_llm, tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3")
    edit(folder, quantization_config=BLOCK | {"modules_to_not_convert": ["q_proj"]})
    with pytest.raises(ValueError, match=r"layers.0.self_attn.qkv_proj: its parts .*q_proj.* in different ways"):
        make_llm(folder)


CT = compressed_tensors("channel")


@pytest.mark.parametrize(
    "config, message",
    [
        ({"quant_method": "gptq"}, "quant_method='gptq': must be one of 'fp8', .*quantization/__init__.py"),
        ({"bits": 4}, "quant_method=None: must be one of"),
        (BLOCK | {"fmt": "e5m2"}, "fmt='e5m2'"),
        (BLOCK | {"scale_fmt": "ue8m0"}, "scale_fmt='ue8m0'"),
        (BLOCK | {"weight_block_size": [128]}, r"weight_block_size=\[128\]: must be two positive"),
        (BLOCK | {"activation_scheme": "none"}, "activation_scheme='none'"),
        (CT | {"format": "pack-quantized"}, "format='pack-quantized'"),
        (CT | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (CT | {"config_groups": {}}, "has no config_groups"),
        (compressed_tensors("group"), "strategy='group': must be one of 'tensor', 'channel', 'block'"),
    ],
)
def test_refused_formats(tmp_path, config, message):
    folder = make_checkpoint(tmp_path, "qwen3")
    edit(folder, quantization_config=config)
    with pytest.raises(ValueError, match=message) as error:
        Config(folder, device="cpu")
    assert "config.json: quantization_config" in str(error.value)


def test_settings(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3")
    with pytest.raises(ValueError, match="quantization='awq': must be one of 'fp8', 'int8'; "):
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


def test_config_is_data(tmp_path):
    """It goes to the other ranks."""
    import pickle

    folder = make_checkpoint(tmp_path, "qwen3")
    edit(folder, quantization_config=CT)
    plan = ModelConfig.read(Path(folder)).quantization
    assert pickle.loads(pickle.dumps(plan)) == plan and json.loads(json.dumps(CT)) == CT
