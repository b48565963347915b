"""Weights of 4 bits: each published format against a reference, models against transformers, kernels, and refusals."""

import json
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import CUDA, DEVICE, NAN, TOLERANCE, assert_close, each_dtype_or_half, generate_by_steps, pairs, randn
from safetensors.torch import load_file, save_file
from test_models import (
    CASES,
    SMALL,
    assert_same_as_transformers,
    edit,
    logits_of_rank,
    make_checkpoint,
    shared_reference,
)
from test_models import requests as model_requests
from test_quantization import assert_refused, is_linear, short_requests, split_experts

from nanovllm import SamplingParams
from nanovllm.kernels.activations import SWIGLU, Activation
from nanovllm.layers.gated_activation import GatedActivation
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.models import ModelConfig, make_model
from nanovllm.moe.experts import Experts
from nanovllm.moe.moe_config import MoEConfig
from nanovllm.quantization import find_quantization
from nanovllm.quantization import packed as packed_weights
from nanovllm.quantization.formats.mxfp4 import read_config as mxfp4_config
from nanovllm.quantization.packed import VALUES, Packed, nibbles, pack, quantize, unpack
from nanovllm.quantization.packed_linear import PackedExperts, PackedLinear
from nanovllm.utils.construction import constructing
from nanovllm.utils.loader import load_model
from nanovllm.utils.tensor_parallel import TensorParallel

ops = pytest.importorskip("nanovllm.kernels.ops")
from nanovllm.invariant import cuda_ops
from nanovllm.kernels.hopper.hopper_tiles import choose_packed_tile, packed_tile
from nanovllm.kernels.launch.gpu_features import has_hopper_kernels
from nanovllm.moe.kernels.moe_gemm import sum_local_parts
from nanovllm.moe.kernels.moe_routing import Routing, route
from nanovllm.moe.kernels.packed_experts import grouped_packed_experts, packed_experts
from nanovllm.quantization.kernels.packed_gemm import packed_gemm

dequantize = packed_weights.dequantize_packed.__wrapped__  # as it is defined, on a GPU too
E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
AWQ_ORDER = 0, 2, 4, 6, 1, 3, 5, 7  # the output of each code of a word


# -- writers of the published formats ----------------------------------------------------------------------------------


def words_of(codes: torch.Tensor, dim: int, order=range(8), dtype=torch.int32) -> torch.Tensor:
    """Pack codes along `dim`: code i of a word, low bits first, is number order[i] of the codes that the word has."""
    count = dtype.itemsize * 2
    parts = codes.long().unflatten(dim, (-1, count)).movedim(dim + 1, 0)
    words = sum(parts[number] << 4 * i for i, number in zip(range(count), order))
    return torch.where(words >= 2**31, words - 2**32, words).to(dtype).contiguous()


def rounded(weight: torch.Tensor, size: int, symmetric: bool, ids: torch.Tensor | None = None) -> tuple:
    """Codes [N, K], float16 scales [N, groups], zero points [N, groups] and the weight that they mean, [N, K]."""
    ids = torch.arange(weight.shape[1]) // size if ids is None else ids
    one_hot = F.one_hot(ids).T.bool()  # [groups, K]
    grouped = torch.where(one_hot, weight[:, None], 0.0)  # [N, groups, K]
    low, high = grouped.amin(2), grouped.amax(2)
    scales = (grouped.abs().amax(2) / 7.5 if symmetric else (high - low) / 15).half()
    zeros = torch.full_like(low, 8) if symmetric else (-low / scales.float()).round().clamp(1, 15)
    scale, zero = scales.float()[:, ids], zeros[:, ids]
    codes = (weight / scale + zero).round().clamp(0, 15)
    return codes, scales, zeros, (codes - zero) * scale


def write_compressed_int4(weight, size, symmetric=True, ids=None):
    codes, scales, zeros, plain = rounded(weight, size, symmetric, ids)
    tensors = {"weight_packed": words_of(codes, 1), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        tensors["weight_zero_point"] = words_of(zeros, 0)
    return tensors | ({} if ids is None else {"weight_g_idx": ids.int()}), plain


def write_gptq(weight, size, symmetric=False, ids=None, less=1):
    codes, scales, zeros, plain = rounded(weight, size, symmetric, ids)
    ids = torch.arange(weight.shape[1]) // size if ids is None else ids
    tensors = {"qweight": words_of(codes.T, 0), "qzeros": words_of(zeros.T - less, 1), "scales": scales.T.contiguous()}
    return tensors | {"g_idx": ids.int()}, plain


def write_awq(weight, size):
    codes, scales, zeros, plain = rounded(weight, size, False)
    packed = {"qweight": words_of(codes.T, 1, AWQ_ORDER), "qzeros": words_of(zeros.T, 1, AWQ_ORDER)}
    return packed | {"scales": scales.T.contiguous()}, plain


def fp4(weight: torch.Tensor, scales: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of the nearest e2m1 numbers, packed in bytes, and the weight that they mean."""
    scale = scales.float().repeat_interleave(size, 1)
    codes = (weight[..., None] / scale[..., None] - VALUES["e2m1"]).abs().argmin(-1)
    return words_of(codes, 1, range(2), torch.uint8), VALUES["e2m1"][codes] * scale


def write_mxfp4(weight, size):
    exponents = (weight.unflatten(1, (-1, size)).abs().amax(2) / 6).log2().ceil() + 127
    packed, plain = fp4(weight, 2.0 ** (exponents - 127), size)
    return {"weight_packed": packed, "weight_scale": exponents.to(torch.uint8)}, plain


def write_nvfp4(weight, size, modelopt=False):
    whole = weight.abs().max() / (6 * 448)  # modelopt stores this factor, compressed-tensors its inverse
    whole = whole if modelopt else 1 / (1 / whole)
    scales = (weight.unflatten(1, (-1, size)).abs().amax(2) / 6 / whole).to(E4M3)
    packed, plain = fp4(weight, scales.float() * whole, size)
    names = ("weight", "weight_scale_2") if modelopt else ("weight_packed", "weight_global_scale")
    inputs = "input_scale" if modelopt else "input_global_scale"
    factor = whole if modelopt else (1 / whole)[None]
    return {names[0]: packed, "weight_scale": scales, names[1]: factor, inputs: torch.ones(1)}, plain


def compressed(format_name: str, strategy: str, size: int | None, kind: str = "int", **weights) -> dict:
    weights = {"num_bits": 4, "type": kind, "symmetric": True, "strategy": strategy, "group_size": size} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": format_name, "quantization_status": "compressed"}
    return config | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def gptq(size: int, **entries) -> dict:
    return {"quant_method": "gptq", "bits": 4, "group_size": size, "desc_act": False, "sym": False} | entries


MIXED = "mixed"  # instead of contiguous groups: a random group for each input
# config.json's entry, the writer, the group size (None: all inputs), and other arguments of the writer
FORMATS = {
    "ct-32": (compressed("pack-quantized", "group", 32), write_compressed_int4, 32, {}),
    "ct-asymmetric": (
        compressed("pack-quantized", "group", 32, symmetric=False),
        *(write_compressed_int4, 32, {"symmetric": False}),
    ),
    "ct-channel": (
        compressed("pack-quantized", "channel", None, symmetric=False),
        *(write_compressed_int4, None, {"symmetric": False}),
    ),
    "ct-order": (
        compressed("pack-quantized", "group", 32, symmetric=False, actorder="group"),
        *(write_compressed_int4, 32, {"symmetric": False, "ids": MIXED}),
    ),
    "gptq": (gptq(32), write_gptq, 32, {}),
    "gptq-channel": (gptq(-1, sym=True, desc_act=True), write_gptq, None, {"symmetric": True}),
    "gptq-order": (gptq(32, desc_act=True), write_gptq, 32, {"ids": MIXED}),
    "gptq-v2": (gptq(32, format="gptq_v2"), write_gptq, 32, {"less": 0}),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        write_awq,
        32,
        {},
    ),
    "mxfp4": (compressed("mxfp4-pack-quantized", "group", 32, "float"), write_mxfp4, 32, {}),
    "nvfp4": (compressed("nvfp4-pack-quantized", "tensor_group", 16, "float"), write_nvfp4, 16, {}),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        *(write_nvfp4, 16, {"modelopt": True}),
    ),
}


def written(format_name: str, weight: torch.Tensor, seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a weight [N, K] in a format, and the weight that they mean. Equal seeds give equal groups."""
    _, write, size, options = FORMATS[format_name]
    size = size or weight.shape[1]
    if options.get("ids") is MIXED:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
        options = options | {"ids": (torch.arange(weight.shape[1]) // size)[order]}
    return write(weight, size, **options)


def write_checkpoint(
    source: str, folder: Path, format_name: str, skip=lambda name: False, **entries
) -> tuple[str, str]:
    """Folders with the checkpoint in `source` in a format, and with the weights that it means in float32."""
    stored, plain = {}, {}
    for name, weight in split_experts(load_file(Path(source) / "model.safetensors")).items():
        if not is_linear(name) or skip(name):
            stored[name] = plain[name] = weight.float().contiguous()
            continue
        path, _, _ = name.rpartition(".")
        tensors, plain[name] = written(format_name, weight.float())
        stored |= {f"{path}.{kind}": tensor for kind, tensor in tensors.items()}
    folders = []
    for kind, content in ("packed", stored), ("plain", plain):
        (target := folder / kind).mkdir(parents=True)
        for file in Path(source).glob("*.json"):
            (target / file.name).write_bytes(file.read_bytes())
        save_file(
            {n: x.contiguous() for n, x in content.items()}, target / "model.safetensors", metadata={"format": "pt"}
        )
        folders.append(str(target))
    edit(folders[0], quantization_config=FORMATS[format_name][0] | entries)
    return tuple(folders)


def make(monkeypatch, folder: Path, family: str, **entries) -> str:
    """A checkpoint of a family with sizes that groups of 32 divide on two ranks."""
    sizes = {"intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3}
    monkeypatch.setitem(CASES, f"{family} in 4 bits", (family, 4, 2, 32, {}, sizes | entries))
    return make_checkpoint(folder, f"{family} in 4 bits")


# -- the numbers themselves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 64), (24, 160), (16, 32)], ids=str)
@pytest.mark.parametrize("format_name", FORMATS)
def test_read(tmp_path, format_name, shape):
    """A whole weight through the loaders of a layer is what the reference of the format means."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    tensors, plain = written(format_name, weight)
    layer, config = ReplicatedLinear(shape[1], shape[0]), read_scheme(format_name)
    layer.format = PackedLinear(layer, config.groups[0][1])
    unused = config.unused_tensors
    loaded = {name for name in tensors if not f".{name}".endswith(unused)}
    assert loaded == {name for name, _ in layer.named_parameters()}
    for name in loaded:
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensors[name])
    torch.testing.assert_close(dequantize(layer.format.packed, torch.float32), plain, rtol=1e-6, atol=0)


def read_scheme(format_name: str):
    config = FORMATS[format_name][0]
    module = import_module("nanovllm.quantization.formats." + config["quant_method"].replace("-", "_"))
    return module.read_config(config, Path("config.json"))


def test_pack():
    codes = torch.randint(0, 16, (3, 200), dtype=torch.uint8)
    words = pack(codes)
    assert words.shape == (3, 32) and torch.equal(unpack(words, 200), codes)
    k = torch.arange(200)
    assert torch.equal(words[:, k // 128 * 16 + k % 16] >> k % 128 // 16 * 4 & 15, codes.int())
    assert torch.equal(nibbles(words_of(codes, 1)), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize(dtype):
    """The error is at most half of a scale; weights of 0 stay 0; NaN is seen in the scales."""
    weight = torch.randn(70, 96) * torch.rand(70, 1)
    weight[3], weight[4], weight[5, :32], weight[6, 5] = 0, weight[4].abs() + 1, 1e-30, torch.nan
    words, scales, zeros = quantize(weight, 32, dtype)
    assert scales.dtype == dtype and (zeros <= 15).all() and not scales[6, 0].isfinite()
    found = dequantize(Packed(words, scales, zeros, None, None, "int4", 96, 32), torch.float32)
    error, largest = (found - weight).abs(), scales.float().repeat_interleave(32, 1)
    known = torch.arange(70) != 6
    slack = {torch.float32: 0.5001, torch.float16: 0.51, torch.bfloat16: 0.6}[dtype]  # the range, rounded
    assert (error <= largest * slack + 1e-7)[known].all() and not found[3].any()


class Slice:
    """A tensor with the interface of a safetensors slice."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return [*self.tensor.shape]

    def __getitem__(self, index) -> torch.Tensor:
        return self.tensor[index]


@pytest.mark.parametrize("rank, size", [(0, 1), (1, 2)])
def test_experts_of_gpt_oss(rank, size):
    """What transformers reads from the same tensors."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    moe, config = (
        MoEConfig(frozenset({0}), 4, 2, 64, True, alternates=True),
        mxfp4_config({"quant_method": "mxfp4"}, Path("config.json")),
    )
    with constructing(TensorParallel(rank, size), torch.float32):
        experts = Experts(96, moe)
        experts.format = PackedExperts(experts, config.groups[0][1])
    wholes = []
    for name, n, k in ("gate_up_proj", 128, 96), ("down_proj", 96, 64):
        blocks = torch.randint(0, 256, (4, n, k // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (4, n, k // 32), dtype=torch.uint8)
        for kind, tensor in ("blocks", blocks), ("scales", scales):
            parameter = getattr(experts, f"{name}_{kind}")
            parameter.weight_loader(parameter, Slice(tensor))
        wholes.append(mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2))
    own = slice(32 * rank, 64 * (rank + 1) // size)
    for i in range(4):
        found = [experts.format.weight(experts, f"{name}_proj", i, torch.float32) for name in ("gate_up", "down")]
        assert torch.equal(found[0], torch.cat((wholes[0][i, ::2][own], wholes[0][i, 1::2][own])))
        assert torch.equal(found[1], wholes[1][i][:, own])
    with pytest.raises(ValueError, match="the checkpoint has 3 experts, the model needs 4"):
        parameter.weight_loader(parameter, Slice(scales[:3]))


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_parity(monkeypatch, make_llm, tmp_path, family, format_name):
    source = make(monkeypatch, tmp_path, family, **({"attention_bias": True} if family == "Llama" else {}))
    folder, plain = write_checkpoint(source, tmp_path, format_name)
    llm = make_llm(folder, **SMALL)
    formats = {type(module.format).__name__ for module in llm.model_runner.model.modules() if hasattr(module, "format")}
    assert formats == {"PackedLinear"} | ({"PackedExperts"} if "Moe" in family else set())
    assert_same_as_transformers(plain, generate_by_steps(llm, model_requests()[:3]))


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
@pytest.mark.parametrize("format_name", ["ct-asymmetric", "ct-channel", "gptq", "gptq-order", "awq", "nvfp4", "mxfp4"])
def test_ranks(monkeypatch, tmp_path, family, format_name):
    """`test_parity` has one rank."""
    folder, plain = write_checkpoint(make(monkeypatch, tmp_path, family), tmp_path, format_name)
    (prompt, _), *_ = model_requests()
    expected = shared_reference(plain)(torch.tensor([prompt])).logits[0]
    for size, options in (2, {}), *([(4, {"expert_parallel": True})] if family == "Qwen3Moe" else []):
        (store := tmp_path / f"{size} ranks").mkdir()
        work = partial(logits_of_rank, size=size, folder=folder, store=store, prompt=prompt, **options)
        with ThreadPoolExecutor(size) as pool:
            for logits in pool.map(work, range(size)):
                torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_groups_that_ranks_cannot_divide(monkeypatch, tmp_path):
    folder, _ = write_checkpoint(make(monkeypatch, tmp_path, "Llama", intermediate_size=96), tmp_path, "awq")
    message = r"mlp.down_proj: this rank has inputs 48 to 95 of 96, .* groups of 32: use fewer ranks"
    with pytest.raises(ValueError, match=message):
        load_rank(folder, 1, 2)


def test_groups_that_do_not_divide_inputs(monkeypatch, tmp_path):
    """No number of ranks helps."""
    folder, _ = write_checkpoint(make(monkeypatch, tmp_path, "Llama", intermediate_size=96), tmp_path, "awq")
    edit(folder, intermediate_size=72)
    with pytest.raises(ValueError, match="down_proj: its 72 inputs are divided into groups of 32: must be a multiple"):
        load_rank(folder, 0, 1)


def test_groups_by_name(monkeypatch, tmp_path):
    """A pattern for names has precedence over the pattern "Linear", in any order."""
    group, other = (compressed("pack-quantized", "group", n)["config_groups"]["group_0"] for n in (32, 64))
    other = other | {"targets": ["re:.*down_proj$"]}
    for groups in {"a": group, "b": other}, {"a": other, "b": group}:
        config = find_quantization(INT4 | {"config_groups": groups}, Path("config.json"), None)
        sizes = [
            config.scheme_of(f"model.layers.0.{name}").group_size for name in ("mlp.down_proj", "self_attn.o_proj")
        ]
        assert sizes == [64, 32]


def load_rank(folder: str, rank: int, size: int, quantization: str | None = None):
    model = make_model(ModelConfig.read(Path(folder), quantization), 64, TensorParallel(rank, size))
    load_model(model, Path(folder), torch.device("cpu"))
    return model


@pytest.mark.parametrize(
    "format_name, entries, skipped",
    [
        ("ct-32", {"ignore": ["lm_head", "re:.*self_attn.*"]}, "self_attn"),
        ("awq", {"modules_to_not_convert": ["self_attn"]}, "self_attn"),
        ("gptq", {"dynamic": {r"-:.*\.mlp\..*": {}}}, ".mlp."),
        (
            "gptq",
            {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]]},
            "o_proj",
        ),
        ("modelopt", {"ignore": ["lm_head", "model.layers.1*"]}, "layers.1."),
    ],
)
def test_ignored_layers(monkeypatch, make_llm, tmp_path, format_name, entries, skipped):
    skip = lambda name: skipped in name or (skipped == "o_proj" and "mlp" in name)
    folder, plain = write_checkpoint(make(monkeypatch, tmp_path, "Llama"), tmp_path, format_name, skip, **entries)
    assert_same_as_transformers(plain, generate_by_steps(make_llm(folder, **SMALL), model_requests()[:2]))


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_on_load(monkeypatch, make_llm, tmp_path, family):
    """`quantization="int4"` computes with the weights that rounding gives, on one rank and on several."""
    source = make(monkeypatch, tmp_path / "source", family)
    tensors = split_experts(load_file(Path(source) / "model.safetensors"))
    for name in filter(is_linear, tensors):
        k = tensors[name].shape[1]
        group = 128 if k == 128 else 64
        quantized = quantize(tensors[name], group, torch.float32)
        tensors[name] = dequantize(Packed(*quantized, None, None, "int4", k, group), torch.float32)
    (plain := tmp_path / "plain").mkdir()
    for file in Path(source).glob("*.json"):
        (plain / file.name).write_bytes(file.read_bytes())
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    llm = make_llm(source, quantization="int4", **SMALL)
    assert_same_as_transformers(str(plain), generate_by_steps(llm, model_requests()[:3]))
    ranks = [load_rank(source, rank, 2, "int4") for rank in range(2)]
    columns = [rank.model.layers[0].self_attn.o_proj.format.packed for rank in ranks]
    assert [x.k for x in columns] == [64, 64] and all(x.group_size == 64 for x in columns)


@pytest.mark.parametrize("format_name", [None, "ct-asymmetric", "gptq-order", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_dummy_weights(monkeypatch, make_llm, tmp_path, family, format_name):
    """Random codes, without any weight file."""
    folder = make(monkeypatch, tmp_path, family)
    (Path(folder) / "model.safetensors").unlink()
    if format_name:
        edit(folder, quantization_config=FORMATS[format_name][0])
    llm = make_llm(folder, load_format="dummy", **({} if format_name else {"quantization": "int4"}))
    layer = llm.model_runner.model.model.layers[0].self_attn.qkv_proj.format.packed
    weight = dequantize(layer, torch.float32)
    assert 0.005 < weight.std() < 0.03 and len(unpack(layer.words, layer.k).unique()) == 16
    (answer,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(answer["token_ids"]) == 4


def test_new_weights(monkeypatch, make_llm, tmp_path):
    """A 4-bit checkpoint takes none, so they stay; quantizing while loading is tested in test_rollout.py."""
    folder, plain = write_checkpoint(make(monkeypatch, tmp_path, "Llama"), tmp_path, "awq")
    llm = make_llm(folder, enable_sleep_mode=True, **SMALL)
    with pytest.raises(ValueError, match="level=2: must be 1, because load_weights can't load the format 'awq' again"):
        llm.sleep(level=2)
    with pytest.raises(
        ValueError, match="load_weights: the weights of a checkpoint in the format 'awq' can't be replaced"
    ):
        llm.load_weights(load_file(Path(plain) / "model.safetensors").items())
    assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)) == 1


# -- kernels -----------------------------------------------------------------------------------------------------------

# codes, dtype of the scales (None: that of x), group size (None: all inputs), and which optional tensors there are
KINDS = {
    "int4": ("int4", None, 32, ""),
    "int4-zeros": ("int4", None, 128, "zeros"),
    "channel": ("int4", None, None, "zeros"),
    "ordered": ("int4", None, 32, "zeros group_ids"),
    "64": ("int4", None, 64, "zeros"),
    "mxfp4": ("e2m1", E8M0, 32, ""),
    "nvfp4": ("e2m1", E4M3, 16, "row_scales"),
}


def random_packed(kind: str, n: int, k: int, dtype: torch.dtype, *stack: int) -> Packed:
    codes, scale_dtype, size, optional = KINDS[kind]
    size = size or k
    rows, groups = (*stack, n), -(-k // size)
    words = pack(torch.randint(0, 16, (n * max(1, *stack, 1), k), dtype=torch.uint8)).view(*rows, -1)
    scales = 2.0 ** torch.randint(-3, 1, (*rows, groups)) if scale_dtype == E8M0 else torch.rand(*rows, groups) + 0.1
    return Packed(
        words.to(DEVICE),
        (scales / 4).to(scale_dtype or dtype).to(DEVICE),
        torch.randint(0, 16, (*rows, groups), dtype=torch.uint8).to(DEVICE) if "zeros" in optional else None,
        (torch.rand(rows) + 0.5).to(DEVICE) if "row_scales" in optional else None,
        torch.randint(0, groups, (*stack, k), dtype=torch.int32).to(DEVICE) if "group_ids" in optional else None,
        *(codes, k, size),
    )


@each_dtype_or_half
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "num_rows, n, k, split_k", [(1, 40, 256, 1), (3, 72, 640, 3), (17, 70, 384, 2), (66, 8, 160, 1)]
)
def test_packed_gemm(fresh_memory_is_nan, dtype, kind, num_rows, n, k, split_k):
    k = 160 if KINDS[kind][2] != 128 and split_k == 1 else k  # a row that does not fill its last chunk
    if KINDS[kind][2] == 128 and k % 128:
        k = 128
    weight, x = random_packed(kind, n, k, dtype), randn(num_rows, k, dtype=dtype)
    expected = x.double() @ dequantize(weight, torch.float64).T
    parts = packed_gemm(x, weight, split_k)
    assert parts.shape == (split_k, num_rows, n)
    assert_close(parts.float().sum(0).to(dtype), expected, 10 * max(1.0, expected.abs().max().item()))


@pytest.mark.gpu
@pytest.mark.skipif(not has_hopper_kernels(), reason="needs a Hopper GPU, and Triton 3.6")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "group_ids" not in KINDS[kind][3]])
@pytest.mark.parametrize("num_rows", [1, 8, 9, 16, 17, 50, 128, 129, 300, 512])
def test_packed_gemm_for_hopper(kind, num_rows, dtype):
    """Tiles and blocks of which something is missing; more blocks than buffers, fewer, and none in the last split."""
    from nanovllm.quantization.kernels.hopper_packed_gemm import hopper_packed_gemm

    if kind == "mxfp4" and dtype == torch.float16:
        assert packed_tile(randn(num_rows, 128, dtype=dtype), random_packed(kind, 8, 128, dtype), 1) is None
        return
    for n, k, split_k in (
        (200, 2944, 4),
        (72, 1280, 3),
        (8200, 8192, 1),
        (1096, 128 if KINDS[kind][2] == 128 else 160, 1),
    ):
        weight, x = random_packed(kind, n, k, dtype), randn(num_rows, k, dtype=dtype)
        tile = packed_tile(x, weight, split_k)._replace(split_k=split_k)
        out = torch.full((split_k, num_rows, n), NAN, dtype=dtype, device=DEVICE)
        parts = hopper_packed_gemm(x, weight, tile, out).double()
        plain = dequantize(weight, torch.float64)
        error = (parts.sum(0) - x.double() @ plain.T).abs()
        assert (error <= TOLERANCE[dtype] * (2 * plain.norm(dim=1) + parts.abs().sum(0))).all()


@pytest.mark.gpu
@pytest.mark.skipif(not has_hopper_kernels(), reason="needs a Hopper GPU, and Triton 3.6")
@pytest.mark.parametrize("activation", [SWIGLU, Activation(1.5, shift=1.0, limit=0.75)])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "zeros" not in KINDS[kind][3]])
def test_packed_activation_for_hopper(kind, activation):
    """One kernel computes the matmul, the bias and the activation of few rows."""
    from nanovllm.quantization.kernels.hopper_packed_gemm import hopper_packed_gemm

    for num_rows, n, k in (1, 80, 1280), (8, 26000, 2944), (5, 200, 128 if KINDS[kind][2] == 128 else 160):
        weight, x = random_packed(kind, n, k, torch.bfloat16), randn(num_rows, k, dtype=torch.bfloat16)
        bias, tile = randn(n, dtype=torch.bfloat16), packed_tile(x, weight, 1)
        y = hopper_packed_gemm(x, weight, tile, None, bias, activation)[0].double()
        expected = GatedActivation(activation)(x.double() @ dequantize(weight, torch.float64).T + bias.double())
        assert (y - expected).norm() <= 0.02 * expected.norm()  # a gate of -20 has an error of 0.1


def test_tiles_for_hopper():
    """Warpgroups with the same rows have their own buffers; registers and memory of a multiprocessor suffice."""
    for num_rows in range(1, 513):
        for n, k, few_registers in (4096, 4096, True), (24576, 4096, True), (24576, 2880, False), (8, 128, True):
            for max_split_k in 1, 8:
                tile = choose_packed_tile(num_rows, n, k, max_split_k, 132, few_registers)
                assert tile.stages and (tile.outputs == 128 or tile.stages % 2 == 0)
                programs, sum_bytes = {168: 1, 80: 2, 56: 3}[tile.registers], (tile.outputs == 64) * tile.rows * 256
                num_bytes = tile.stages * tile.burst * (tile.outputs * 64 + tile.rows * 256) + sum_bytes
                assert programs * num_bytes < 227 * 2**10 and programs * tile.registers * 384 <= 65536
                assert 1 <= tile.split_k <= max_split_k and (tile.split_k == 1 or k // 128 // tile.split_k >= 8)
    assert choose_packed_tile(513, 4096, 4096, 8, 132, True) is choose_packed_tile(0, 4096, 4096, 8, 132, True) is None


@pytest.mark.parametrize("kind", KINDS)
def test_packed_gemm_in_float32(fresh_memory_is_nan, kind):
    weight, x = random_packed(kind, 20, 384, torch.float32), randn(5, 384)
    expected = x.double() @ dequantize(weight, torch.float64).T
    assert_close(packed_gemm(x, weight)[0], expected, 10 * expected.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
def test_dequantize_kernel(fresh_memory_is_nan, kind):
    for n, k, dtype in (21, 384, torch.float32), (5, 128, torch.float16):
        weight = random_packed(kind, n, k, dtype)
        assert torch.equal(ops.dequantize_packed(weight, dtype), dequantize(weight, dtype))


CLAMPED = Activation(1.5, shift=1.0, limit=0.75)  # as in gpt-oss


@pytest.mark.parametrize("first_expert", [0, 2])
@pytest.mark.parametrize("kind, num_tokens", pairs(KINDS, [1, 5, 40]))
def test_packed_experts(fresh_memory_is_nan, kind, num_tokens, first_expert):
    """With `first_expert`, experts 2 to 4 of five are here. With MXFP4, the experts are those of gpt-oss."""
    check_packed_experts(kind, num_tokens, first_expert, 128, 128 if KINDS[kind][2] == 128 else 96, torch.float16)


@pytest.mark.parametrize("first_expert", [0, 2])
@pytest.mark.parametrize("kind", ["int4-zeros", "mxfp4"])
def test_packed_experts_that_are_converted(fresh_memory_is_nan, monkeypatch, kind, first_expert):
    """Two experts after the other."""
    monkeypatch.setattr("nanovllm.moe.kernels.packed_experts.MIN_CONVERTED_ROWS", 4)
    monkeypatch.setattr("nanovllm.moe.kernels.packed_experts.MAX_CONVERTED_BYTES", 2 * 3 * 128 * 128 * 2)
    check_packed_experts(kind, 12, first_expert, 128, 128, torch.float16)


@pytest.mark.parametrize("kind", ["int4", "64"])
def test_kernels_next_to_the_gemms_for_hopper(monkeypatch, kind):
    """These kernels run on any GPU. With plain GEMMs in place of the kernels for Hopper, the results are the same.

    If there are zero points, the activation has a kernel of its own.
    """
    stacks = [random_packed(kind, *shape, torch.float16, 5) for shape in ((192, 64), (64, 96))]
    x, routing = randn(11, 64, dtype=torch.float16), route(randn(1, 11, 5), 2, True)

    def packed_rows(x, weight, bias, rows, routing, first_expert, out, activation=None):
        tiles = [(expert, i, i + 1) for i, expert in enumerate(routing.expert_ids[0].tolist())]
        if rows is not None:
            tiles = rows.table[rows.table[:, 0] >= 0].tolist()
        for expert, first, end in tiles:
            plain = dequantize(weight.of(expert), torch.float64)
            for row in range(first, end):
                pair = row if rows is None else rows.pairs[row].item()
                y = x[min(row, len(x) - 1)].double() @ plain.T
                if activation is not None:
                    y = GatedActivation(activation)(y)
                if out.dim() == 3:
                    out[pair % 2, pair // 2] = y * routing.weights[pair // 2, pair % 2]
                else:
                    out[row] = y
        return out

    hopper = SimpleNamespace(packed_rows=packed_rows)
    for some in (x, x[:5], x[:1]):
        chosen = Routing(routing.weights[: len(some)], routing.expert_ids[: len(some)], 5)
        expected = grouped_packed_experts(some, chosen, *stacks)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "nanovllm.moe.kernels.hopper_packed_experts", hopper)
            patch.setattr("nanovllm.moe.kernels.packed_experts.suits_packed_kernels", lambda *weights: True)
            found = packed_experts(some, chosen, *stacks)
        assert (found - expected).norm() < 0.003 * expected.norm()


def test_invariant_experts(monkeypatch):
    """With `batch_invariant`, the kernel for any GPU computes any number of rows."""
    stacks = [random_packed("int4", *shape, torch.float16, 5) for shape in ((64, 64), (64, 32))]
    kinds = SimpleNamespace(is_packed=True, stacks=lambda experts: stacks)
    biases = dict(gate_up_proj_bias=None, down_proj_bias=None)
    experts = SimpleNamespace(format=kinds, activation=None, first_expert=0, num_experts=5, num_stacked=5, **biases)
    monkeypatch.setattr("nanovllm.moe.kernels.packed_experts.MIN_CONVERTED_ROWS", 1)
    monkeypatch.setattr("nanovllm.moe.kernels.packed_experts.suits_packed_kernels", lambda *weights: True)
    x = randn(9, 64, dtype=torch.float16)
    weights, ids, _ = route(randn(1, 9, 5), 2, True)
    whole = cuda_ops.sum_experts(x, experts, weights, ids)
    assert_close(cuda_ops.sum_experts(x[3:4], experts, weights[3:4], ids[3:4]), whole[3:4].double())


@pytest.mark.gpu
@pytest.mark.skipif(not has_hopper_kernels(), reason="needs a Hopper GPU, and Triton 3.6")
@pytest.mark.parametrize("first_expert", [0, 2])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 40, 130, 300, 1700])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "group_ids" not in KINDS[kind][3]])
def test_packed_experts_for_hopper(kind, num_tokens, first_expert):
    """More blocks than buffers, partial tiles and blocks, and tiles of all numbers of rows."""
    sizes = (1280, 1152) if KINDS[kind][2] == 128 else (1376, 352)
    check_packed_experts(kind, num_tokens, first_expert, *sizes, torch.bfloat16, 0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not has_hopper_kernels(), reason="needs a Hopper GPU, and Triton 3.6")
@pytest.mark.parametrize("num_tokens", [20, 150, 900])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "group_ids" not in KINDS[kind][3]])
def test_many_packed_experts_for_hopper(kind, num_tokens):
    """Programs with 128 outputs of few rows."""
    check_packed_experts(kind, num_tokens, 0, 2048, 768, torch.bfloat16, 0.02, num_experts=64)


def check_packed_experts(kind, num_tokens, first_expert, hidden, size, dtype, error=0.003, num_experts=5):
    x, routing = randn(num_tokens, hidden, dtype=dtype), route(randn(1, num_tokens, num_experts), 2, True)
    shapes = (2 * size, hidden), (hidden, size)
    gate_up, down = (random_packed(kind, *shape, dtype, num_experts) for shape in shapes)
    gate_up = gate_up._replace(scales=(gate_up.scales.float() / 8).to(gate_up.scales.dtype))
    local = [Packed(*(x if x is None else x[first_expert:] for x in w[:5]), *w[5:]) for w in (gate_up, down)]
    biases, act, terms = (
        [torch.zeros(num_experts, n, device=DEVICE) for n in (2 * size, hidden)],
        GatedActivation(SWIGLU),
        (),
    )
    if kind == "mxfp4":
        biases, act = [randn(*bias.shape, dtype=dtype) for bias in biases], GatedActivation(CLAMPED)
        terms = tuple(bias[first_expert:] for bias in biases), CLAMPED
    parts = packed_experts(x, routing, *local, first_expert, *terms)
    y = sum_local_parts(parts, routing, first_expert, num_experts - first_expert)
    gate_up, down = ([dequantize(w.of(i), torch.float64) for i in range(num_experts)] for w in (gate_up, down))
    expected = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
    for expert in range(first_expert, num_experts):
        weight = (routing.weights * (routing.expert_ids == expert)).sum(1, keepdim=True)
        gate_and_up = x.double() @ gate_up[expert].T + biases[0][expert]
        expected += weight * (act(gate_and_up) @ down[expert].T + biases[1][expert])
    assert (y.double() - expected).norm() <= error * expected.norm()


@pytest.mark.skipif(CUDA, reason="runs kernels in Triton's interpreter")
@pytest.mark.parametrize(
    "family, format_name", [("Llama", "awq"), ("Qwen3", "nvfp4"), ("Llama", "gptq-order"), ("Qwen3Moe", "gptq-order")]
)
def test_parity_on_kernels(monkeypatch, use_ops, make_llm, tmp_path, family, format_name):
    """Chunks, several decodes and a single one, with splits that the next norm adds."""
    use_ops("packed_linear", "best_packed_split_k", "dequantize_packed", "add_rms_norm", "mix_experts")
    monkeypatch.setattr("nanovllm.quantization.kernels.packed_gemm.MAX_PACKED_ROWS", 8)
    few = {"num_experts": 4, "num_experts_per_tok": 2}  # each takes programs of its own
    folder, plain = write_checkpoint(make(monkeypatch, tmp_path, family, **few), tmp_path, format_name)
    llm = make_llm(folder, **SMALL | dict(max_num_batched_tokens=10))
    assert_same_as_transformers(plain, generate_by_steps(llm, short_requests((12, 2), (1, 2), (3, 3))))


# -- what is refused ---------------------------------------------------------------------------------------------------

INT4 = compressed("pack-quantized", "group", 32)
W4A8 = json.loads(json.dumps(INT4))
W4A8["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True}


@pytest.mark.parametrize(
    "config, message",
    [
        (W4A8, "group_0: input_activations: num_bits=8: must be one of 4"),
        (compressed("pack-quantized", "group", 32, num_bits=8), "weights: num_bits=8: must be one of 4"),
        (compressed("pack-quantized", "group", 96), "group_size=96: must be one of 32, 64, 128"),
        (compressed("pack-quantized", "block", 32), "strategy='block': must be one of 'group', 'channel'"),
        (compressed("marlin-24", "group", 32), "format='marlin-24': must be one of"),
        (compressed("mxfp4-pack-quantized", "group", 16, "float"), "group_size=16: must be one of 32"),
        (gptq(32, bits=8), "bits=8: must be one of 4"),
        (gptq(32, lm_head=True), "lm_head=True"),
        (gptq(32, checkpoint_format="marlin"), "checkpoint_format='marlin': must be one of 'gptq', 'gptq_v2'"),
        (
            gptq(32, checkpoint_format="gptq_v2", format="gptq"),
            "format='gptq': contradicts checkpoint_format='gptq_v2'",
        ),
        (gptq(32, dynamic={"+:.*down.*": {"bits": 8}}), r"dynamic: '\+:.*down.*': {'bits': 8}: gives modules"),
        (gptq(32, dynamic=["-:.*"]), r"dynamic=\['-:.*'\]: must be an object"),
        (gptq(32, dynamic={"-:*(": {}}), r"dynamic: 're:\*\(': must be a regular expression after 're:' \(nothing to"),
        (gptq(32, modules_to_not_convert="lm_head"), "modules_to_not_convert='lm_head': must be a list of names"),
        (INT4 | {"ignore": [3]}, r"ignore=\[3\]: must be a list of names"),
        (INT4 | {"config_groups": {"g": {"targets": "Linear", "weights": {}}}}, "g: targets='Linear': must be a list"),
        (INT4 | {"config_groups": {"g": {"targets": ["Linear"], "weights": "W8"}}}, "g: weights='W8': must be an obj"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version='gemv'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}, "zero_point=False"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "quant_algo='W4A8_AWQ': must be one of 'NVFP4', 'F",
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method='bitsandbytes': must be one of 'awq', "),
    ],
)
def test_refused_formats(tmp_path, config, message):
    assert_refused(make_checkpoint(tmp_path, "llama"), config, message)


GROUP, WEIGHTS = "config_groups.group_0.", "config_groups.group_0.weights."
INPUTS = GROUP + "input_activations"
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
AWQ = FORMATS["awq"][0]
HADAMARD = {"config_groups": {"R4": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}}
# the published entries of each kind of `quantization_config`: a value that changes nothing, values that are refused,
# and values that are read; the values of other entries change nothing
ENTRIES = {
    "gptq": (
        gptq(32),
        {
            "bits": (4, [8, 2], []),
            "sym": (True, [], []),
            "group_size": (32, [16], [64, -1]),
            "desc_act": (False, ["static"], [True]),
            "lm_head": (False, [True], []),
            "format": ("GPTQ", ["marlin", "bitblas", "gguf"], ["gptq_v2"]),
            "checkpoint_format": ("gptq", ["marlin"], ["gptq_v2"]),
            "is_marlin_format": (False, [True], []),
            "pack_dtype": ("int32", ["int8", "int16", "torch.int64"], []),
            "adapter": (None, [{"name": "lora", "rank": 64}], []),
            "rotation": (None, ["hadamard"], []),
            "dynamic": (
                {"lm_head": {}, "+:.*": {}},
                [{"+:.*": {"bits": 8}}, {".*": {"bits": 8}}],
                [{"-:.*q_proj": {}}],
            ),
            "modules_in_block_to_quantize": (None, [], [[["mlp.up_proj"]]]),
            "modules_to_not_convert": (None, [], [["x"]]),
            "meta": ({"quantizer": ["gptqmodel:5.7.0"], "act_group_aware": True}, [], []),
            "method": ("gptq", [], []),
            "true_sequential": (True, [], []),
            "static_groups": (True, [], []),
            "damp_percent": (0.1, [], []),
            "backend": ("marlin", [], []),
            "act_group_aware": (True, [], []),
            "block_name_to_quantize": ("x", [], []),
        },
    ),
    "awq": (
        AWQ,
        {
            "bits": (4, [8], []),
            "group_size": (32, [16], [64]),
            "zero_point": (True, [False], []),
            "version": ("GEMM", ["gemv", "gemv_fast", "llm-awq", "marlin"], []),
            "format": ("gemm", ["gemv", "llm-awq"], []),
            "checkpoint_format": ("gemm", ["gemv_fast"], []),
            "backend": ("gemm_triton", ["llm-awq"], []),
            "modules_to_not_convert": (None, [], [["x"]]),
            "pack_dtype": ("int32", ["int16"], []),
            "adapter": (None, [{"name": "lora"}], []),
            "rotation": (None, ["random"], []),
            "lm_head": (False, [True], []),
            "dynamic": (None, [{"-:.*": {}}], []),
            "sym": (False, [], []),
            "do_fuse": (True, [], []),
            "meta": ({}, [], []),
        },
    ),
    "compressed-tensors": (
        INT4,
        {
            "format": ("pack-quantized", ["dense", "mixed-precision", "int-quantized", "marlin-24"], []),
            "quantization_status": ("frozen", ["initialized"], []),
            "kv_cache_scheme": ({"num_bits": 8}, [], []),
            "ignore": (["lm_head"], [], [["x"]]),
            "transform_config": ({"config_groups": {}}, [HADAMARD], []),
            "sparsity_config": ({"format": "dense", "global_sparsity": 0.1}, [{"format": "sparse-24-bitmask"}], []),
            "global_compression_ratio": (1.5, [], []),
            "version": ("0.12.2", [], []),
            "run_compressed": (True, [], []),
            "config_groups": (INT4["config_groups"], [{}, {"W4A16": ["Linear"]}], []),
            GROUP + "targets": (["Linear"], [], [["re:.*mlp.*"]]),
            GROUP + "format": ("pack-quantized", ["nvfp4-pack-quantized", "int-quantized"], []),
            GROUP + "output_activations": (None, [{"num_bits": 8}], []),
            INPUTS: ({"num_bits": 4}, [{"num_bits": 8}], []),
            WEIGHTS + "num_bits": (4, [8, 2], []),
            WEIGHTS + "type": ("int", ["float"], []),
            WEIGHTS + "symmetric": (True, [], [False]),
            WEIGHTS + "group_size": (32, [16], [64]),
            WEIGHTS + "strategy": ("group", ["tensor", "block", "tensor_group", "token"], []),
            WEIGHTS + "dynamic": (False, [True, "local"], []),
            WEIGHTS + "observer": ("minmax", [], []),
            WEIGHTS + "actorder": ("static", ["random"], ["group", "dynamic", True]),
            WEIGHTS + "scale_dtype": ("torch.bfloat16", [], []),
            WEIGHTS + "zp_dtype": ("torch.int8", [], []),
        },
    ),
    "compressed-tensors, fp4": (
        compressed("nvfp4-pack-quantized", "tensor_group", 16, "float"),
        {
            INPUTS: ({"num_bits": 4, "dynamic": "local"}, [{"num_bits": 8}], []),
            WEIGHTS + "symmetric": (True, [False], []),
            WEIGHTS + "group_size": (16, [32], []),
            WEIGHTS + "strategy": ("tensor_group", ["channel", "tensor"], []),
            WEIGHTS + "actorder": ("weight", ["group"], []),
        },
    ),
    "modelopt": (
        NVFP4,
        {
            "quant_algo": ("NVFP4", ["W4A16_AWQ", "NVFP4_SVD", "MIXED_PRECISION"], ["FP8"]),
            "group_size": (16, [32], []),
            "ignore": ([], [], [["x*"]]),
            "exclude_modules": (None, [], [["lm_head"]]),
            "producer": ({}, [], []),
            "kv_cache_scheme": ({"num_bits": 8, "type": "float"}, [], []),
            "kv_cache_quant_algo": ("FP8", [], []),
            "has_zero_point": (False, [True], []),
            "pre_quant_scale": (False, [True], []),
            "lora_rank": (None, [32], []),
            "quantized_layers": (None, [{"x": {"quant_algo": "FP8"}}], []),
            WEIGHTS + "group_size": (16, [32], []),
            WEIGHTS + "num_bits": (4, [8], []),
            WEIGHTS + "type": ("float", ["int"], []),
            INPUTS: ({"num_bits": 4}, [{"num_bits": 8}], []),
            GROUP + "pre_quant_scale": (False, [True], []),
            GROUP + "output_activations": (None, [{"num_bits": 8}], []),
        },
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {
            "activation_scheme": ("dynamic", ["none"], []),
            "weight_block_size": ([128, 128], [[128], "128x128"], [[64, 64]]),
            "modules_to_not_convert": (None, [], [["x"]]),
            "ignored_layers": (None, [], [["x"]]),
            "modules_to_convert": (None, [["model.embed_tokens"]], []),
            "fmt": ("e4m3", ["e5m2"], []),
            "scale_fmt": ("float", ["ue8m0"], []),
            "expert_dtype": ("fp8", ["fp4"], []),
            "dequantize": (True, [], []),
        },
    ),
    "mxfp4": (
        {"quant_method": "mxfp4"},
        {
            "modules_to_not_convert": (None, [], [["x"]]),
            "dequantize": (True, [], []),
        },
    ),
}


@pytest.mark.parametrize(
    "kind, path", [(kind, path) for kind, (_, entries) in ENTRIES.items() for path in entries], ids=str
)
def test_entries(kind, path):
    """Each entry is read, or refused by name, unless its value changes nothing."""
    config, entries = ENTRIES[kind]
    neutral, refused, is_read = entries[path]

    def with_value(value):
        changed = inner = json.loads(json.dumps(config))
        *parents, name = path.split(".")
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = value
        return find_quantization(changed, Path("config.json"), None)

    plain = find_quantization(config, Path("config.json"), None)
    assert with_value(neutral) == plain and all(with_value(value) != plain for value in is_read)
    for value in refused:
        with pytest.raises(ValueError, match=rf"^config.json: quantization_config: .*{path.rpartition('.')[2]}"):
            with_value(value)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda t, n: {n + ".qweight": t[n + ".qweight"][:3].clone()},
            r"shape \[64, 24\], the model needs \[64, 128\]",
        ),
        (
            lambda t, n: {n + ".qweight": t[n + ".qweight"].float()},
            "dtype float32, packed 4-bit values must be integers",
        ),
        (lambda t, n: {n + ".scales": t[n + ".scales"] * torch.nan}, "NaN or infinite .*o_proj.scales$"),
        (lambda t, n: {n + ".scales": t[n + ".scales"].int()}, "scales: the checkpoint has dtype int32, scales must"),
        (
            lambda t, n: {"model.norm.weight": t["model.norm.weight"].int()},
            "norm.weight: the checkpoint has dtype int32",
        ),
        (
            lambda t, n: {"lm_head.qweight": t[n + ".qweight"].clone()},
            "1 tensors belong to a quantized output head, .*qweight",
        ),
        (lambda t, n: {n + ".g_idx": t[n + ".g_idx"].flip(0)}, "groups are not contiguous, although"),
        (lambda t, n: {n + ".bias": torch.eye(64)[63]}, "o_proj.bias: is not zero, and the model has no such"),
        (lambda t, n: {n + ".qzeros": t[n + ".qzeros"][:1].clone()}, r"qzeros: .*shape \[64, 1\].*needs \[64, 4\]"),
    ],
)
def test_broken_checkpoints(monkeypatch, make_llm, tmp_path, change, message):
    folder, _ = write_checkpoint(make(monkeypatch, tmp_path, "Llama"), tmp_path, "gptq")
    file, name = Path(folder) / "model.safetensors", "model.layers.1.self_attn.o_proj"
    tensors = load_file(file)
    save_file(tensors | change(tensors, name), file)
    with pytest.raises(ValueError, match=message):
        make_llm(folder)


def test_old_gptq(monkeypatch, make_llm, tmp_path):
    """AutoGPTQ wrote biases of 0, and group ids as int64; others write no group ids."""
    folder, plain = write_checkpoint(make(monkeypatch, tmp_path, "Llama"), tmp_path, "gptq")
    file = Path(folder) / "model.safetensors"
    tensors = {name: tensor.long() if "g_idx" in name else tensor for name, tensor in load_file(file).items()}
    scales = {name.removesuffix("scales"): x for name, x in tensors.items() if name.endswith(".scales")}
    kept = {name: x for name, x in tensors.items() if not name.endswith("0.mlp.down_proj.g_idx")}
    save_file(kept | {f"{layer}bias": torch.zeros_like(x[0]) for layer, x in scales.items()}, file)
    assert_same_as_transformers(plain, generate_by_steps(make_llm(folder, **SMALL), model_requests()[:2]))
    edit(folder, quantization_config=gptq(32, desc_act=True))
    with pytest.raises(ValueError, match="1 tensors are missing: .*0.mlp.down_proj.g_idx"):
        make_llm(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda ids: ids.flip(0), "differs from the groups of a part that is merged with it"),
        (lambda ids: ids + 1, "has groups 1 to 2: must be in 0 to 1"),
    ],
)
def test_broken_orders(monkeypatch, make_llm, tmp_path, change, message):
    folder, _ = write_checkpoint(make(monkeypatch, tmp_path, "Llama"), tmp_path, "gptq-order")
    file, name = Path(folder) / "model.safetensors", "model.layers.1.self_attn.k_proj.g_idx"
    tensors = load_file(file)
    save_file(tensors | {name: change(tensors[name])}, file)
    with pytest.raises(ValueError, match=f"g_idx: {message}"):
        make_llm(folder)


@pytest.mark.parametrize("format_name", FORMATS)
def test_config_is_data(tmp_path, format_name):
    """It goes to the other ranks."""
    config = read_scheme(format_name)
    assert pickle.loads(pickle.dumps(config)) == config and config.bits == 4 and not config.quantizes


@pytest.mark.parametrize("format_name", ["ct-32", "ct-asymmetric", "ct-channel", "mxfp4", "nvfp4"])
def test_as_compressed_tensors(format_name):
    """The writers above write what the library reads."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    config, *_ = FORMATS[format_name]
    group = config["config_groups"]["group_0"]
    scheme = QuantizationScheme(targets=["Linear"], weights=group["weights"])
    tensors, plain = written(format_name, torch.randn(24, 160))
    found = BaseCompressor.get_value_from_registry(config["format"]).decompress(tensors, scheme)["weight"]
    rtol = 5e-3 if format_name == "nvfp4" else 1e-3  # the library computes in bfloat16 or in the scales' dtype, float16
    torch.testing.assert_close(found.float(), plain, rtol=rtol, atol=1e-6)
