"""Adapters of experts, in both forms in which PEFT stores them, against transformers with merged weights."""

import json
from dataclasses import replace
from functools import partial
from itertools import product
from math import sqrt
from pathlib import Path

import pytest
import torch
from common import CUDA, DEVICE, TWO_GPUS, assert_close, each_dtype, generate_by_steps, randn
from safetensors.torch import load_file
from test_lora import (
    LORA,
    MLP,
    ON_GPU,
    SCHEDULES,
    PEFTAdapter,
    all_targets,
    arguments_of,
    assert_merged,
    assert_merged_on_average,
    check_padded_steps,
    mixed,
)
from test_models import (
    CASES,
    SMALL,
    V5,
    assert_same_as_transformers,
    make_checkpoint,
    reference_model,
    requests,
    shared_reference,
)
from torch import nn

from nanovllm import LLM, LoRARequest
from nanovllm.fused.fused_experts import FusedExperts
from nanovllm.kernels.activations import SWIGLU
from nanovllm.lora import lora_experts
from nanovllm.lora.lora_experts import AdaptedExperts, expert_linear
from nanovllm.moe.experts import Experts
from nanovllm.moe.moe_config import MoEConfig
from nanovllm.utils.construction import constructing
from nanovllm.utils.tensor_parallel import TensorParallel

EXPERTS = LORA | {"max_expert_lora_rank": 5, "num_kvcache_blocks": 80}
FORMS = [("single", "stacked"), ("swapped", "single")] if V5 else [("single", "single")]
PROJECTIONS = {"gate_proj": 0, "up_proj": 1, "down_proj": 2}
PARAMETERS = "gate_up_proj", "down_proj"


def is_gpt_oss(experts: nn.Module) -> bool:
    """Its stacks are [experts, inputs, outputs], in which outputs of gate and up alternate."""
    return type(experts).__name__ == "GptOssExperts"


class ExpertAdapter(PEFTAdapter):
    """An adapter of experts, and of the linear layers whose names end with an entry of `targets`."""

    def __init__(self, folder: Path, model: nn.Module, targets: list[str], number: int, form: str, r=3, **entries):
        """form: "single" for the modules of transformers 4, "stacked" for PEFT's ParamWrapper since version 0.20,
        "swapped" for older versions.
        """
        self.only = entries.pop("only", (*PROJECTIONS, *PARAMETERS))
        super().__init__(folder, model, targets, number, r, **entries)
        self.entries = {"r": r, "lora_alpha": 6} | entries
        self.generator = torch.Generator().manual_seed(number + 100)
        for path, experts in model.named_modules():
            if path.endswith(".experts"):
                add = self.add_single if form == "single" else partial(self.add_stacks, is_swapped=form == "swapped")
                add(path, experts)
        config = json.loads((folder / "adapter_config.json").read_text())
        if form == "single":
            config["target_modules"] = sorted({*targets, *PROJECTIONS} & {*targets, *self.only})
        else:
            config["target_parameters"] = [f"mlp.experts.{name}" for name in PARAMETERS if name in self.only]
            if not hasattr(model.model.layers[-1].mlp, "experts"):
                config["target_parameters"] = [name.removeprefix("mlp.") for name in config["target_parameters"]]
        self.save(config)

    def rank_and_scale(self, name: str) -> tuple[int, float]:
        rank = self.entries.get("rank_pattern", {}).get(name, self.entries["r"])
        alpha = self.entries.get("alpha_pattern", {}).get(name, self.entries["lora_alpha"])
        return rank, alpha / (sqrt(rank) if self.entries.get("use_rslora") else rank)

    def randn(self, rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self.generator) * scale

    def add(self, stored: str, a: torch.Tensor, b: torch.Tensor) -> None:
        self.tensors |= {
            f"base_model.model.{stored}.lora_A.weight": a,
            f"base_model.model.{stored}.lora_B.weight": b,
        }

    def add_single(self, path: str, experts: nn.Module) -> None:
        is_list = isinstance(experts, nn.ModuleList)
        for expert in range(len(experts) if is_list else len(experts.gate_up_proj)):
            for name in (name for name in PROJECTIONS if name in self.only):
                if is_list:
                    weight = f"{path}.{expert}.{name}.weight"
                    part = self.copy(weight, experts.get_parameter(f"{expert}.{name}.weight"))
                else:
                    parameter = "down_proj" if name == "down_proj" else "gate_up_proj"
                    part = self.copy(f"{path}.{parameter}", getattr(experts, parameter))[expert]
                    part = part.mT if is_gpt_oss(experts) else part
                    if name != "down_proj":
                        shard, size = PROJECTIONS[name], len(part) // 2
                        part = part[shard::2] if is_gpt_oss(experts) else part[shard * size : (shard + 1) * size]
                rank, scale = self.rank_and_scale(name)
                a, b = self.randn(rank, part.shape[1], part.shape[1] ** -0.5), self.randn(len(part), rank, 1 / rank)
                part += scale * b @ a
                self.add(f"{path}.{expert}.{name}", a, b)

    def add_stacks(self, path: str, experts: nn.Module, is_swapped: bool) -> None:
        """As PEFT's `ParamWrapper.get_delta_weight` does."""
        wrapped = [name for name in PARAMETERS if name in self.only]
        for i, name in enumerate(wrapped):
            weight = self.copy(f"{path}.{name}", getattr(experts, name))
            weight = weight.mT if is_gpt_oss(experts) else weight
            count, outputs, inputs = weight.shape
            rank, scale = self.rank_and_scale(name)
            columns, rows = (outputs, inputs) if is_swapped else (inputs, outputs)
            a, b = self.randn(count * rank, columns, columns**-0.5), self.randn(rows, rank * count, 1 / rank)
            equation = "ore,eri->eio" if is_swapped else "ore,eri->eoi"
            weight += scale * torch.einsum(equation, b.view(rows, rank, count), a.view(count, rank, columns))
            self.add(path + ".base_layer" * (len(wrapped) - 1 - i), a, b)

    def copy(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        return self.weights.setdefault(name, parameter.detach().clone())


def make_adapters(
    folder: Path, model: nn.Module, forms: tuple[str, str] = FORMS[0], first: int = 1
) -> list[PEFTAdapter]:
    """Two adapters of experts, and one of attention only. Their numbers begin with `first`."""
    targets = all_targets(model)
    dense = [name for name in targets if name not in MLP]
    patterns = {"rank_pattern": {"down_proj": 5}, "alpha_pattern": {"gate_up_proj": 2}}
    others = (MLP, {}) if forms[1] == "single" else (dense[:1], patterns)
    return [
        ExpertAdapter(folder / "a", model, targets, first, forms[0]),
        ExpertAdapter(folder / "b", model, others[0], first + 1, forms[1], **others[1]),
        PEFTAdapter(folder / "c", model, dense, first + 2),
    ]


def make_model(folder: Path, name: str) -> str:
    if name.startswith("qwen3_"):
        return pytest.importorskip("test_hybrid").make_checkpoint(folder, name)
    return make_checkpoint(folder, name)


def of_families(*names: str) -> list[str]:
    """Families that only transformers 5 has are left out with 4."""
    return [name for name in names if V5 or name.startswith("qwen3-moe")]


# -- the same answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", of_families("qwen3-moe", "qwen3-moe-step", "gemma4-experts", "gpt-oss", "qwen3_next", "qwen3_5_moe")
)
def test_parity(make_llm, tmp_path, name):
    """Three adapters share two slots; chunks, decodes next to them, and hits of the prefix cache. In each form."""
    folder = make_model(tmp_path / "model", name)
    llm, answered = make_llm(folder, **EXPERTS), []
    for number, forms in enumerate(FORMS):
        used = mixed(make_adapters(tmp_path / f"{number}", shared_reference(folder), forms, 1 + 3 * number))
        answered.append((used, generate_by_steps(llm, arguments_of(used, max_tokens=3))))
        assert_merged(folder, answered[-1][1], used)
    assert llm.stats()["steps"]["mixed"] > 0
    alone = [generate_by_steps(llm, [request])[0] for request in arguments_of(used, max_tokens=3)[:3]]
    assert_merged(folder, alone, used[:3])
    plain = generate_by_steps(llm, arguments_of([None] * 8, max_tokens=2))
    assert_merged(folder, plain, [None] * 8)
    for used, outputs in answered:
        pairs = [[next(iter(x.outputs[0].logprobs[0].values())).logprob for x in pair] for pair in zip(outputs, plain)]
        assert [abs(a - b) > 2e-5 for a, b in pairs] == [adapter is not None for adapter in used]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("experts") / "model", "qwen3-moe")


@pytest.mark.parametrize("settings", SCHEDULES, ids=str)
def test_schedules(make_llm, model, tmp_path, settings):
    used = mixed(make_adapters(tmp_path, shared_reference(model)))
    llm = make_llm(model, **EXPERTS | settings)
    assert_merged(model, generate_by_steps(llm, arguments_of(used)), used)


def test_parts_of_many_tokens(make_llm, model, tmp_path, monkeypatch):
    monkeypatch.setattr(lora_experts, "MAX_TOKENS", 7)
    used = mixed(make_adapters(tmp_path, shared_reference(model)))
    assert_merged(model, generate_by_steps(make_llm(model, **EXPERTS), arguments_of(used)), used)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["inner size", "experts"])
@pytest.mark.parametrize("name", of_families("qwen3-moe", "gpt-oss", "qwen3_5_moe"))
def test_two_ranks(make_llm, tmp_path, name, expert_parallel):
    """Ranks have parts of each expert's matrices, or the matrices of their experts."""
    folder = make_model(tmp_path / "model", name)
    used = mixed(make_adapters(tmp_path, shared_reference(folder)))
    llm = make_llm(folder, tensor_parallel_size=2, expert_parallel=expert_parallel, **EXPERTS)
    assert_merged(folder, generate_by_steps(llm, arguments_of(used, max_tokens=2)), used)


def test_slots(make_llm, model, tmp_path):
    """An adapter of attention takes the slot of an adapter of experts, which then comes back."""
    found = make_adapters(tmp_path, shared_reference(model))
    llm = make_llm(model, **EXPERTS | {"max_loras": 1})
    used = [found[0], found[2], found[1], found[2], found[0]]
    outputs = [generate_by_steps(llm, arguments_of([adapter] * 8)[2:3])[0] for adapter in used]
    assert_merged(model, outputs, used)
    llm.add_lora(found[1].request)
    assert llm.remove_lora(2) and not llm.remove_lora(2)
    assert {*llm.input_processor.helpers["adapters"]._loaded} == {1}


def test_sleep(make_llm, model, tmp_path):
    """Adapters come back after the device has lost them."""
    used = mixed(make_adapters(tmp_path, shared_reference(model)))
    llm = make_llm(model, enable_sleep_mode=True, **EXPERTS)
    for _ in range(2):
        assert_merged(model, generate_by_steps(llm, arguments_of(used)), used)
        llm.sleep(2)
        for target in llm.model_runner.model.adapters.targets.values():
            target.stack.a.zero_()  # as on CUDA
        llm.wake_up(["weights"])
        llm.load_weights(load_file(Path(model) / "model.safetensors").items())
        llm.wake_up()


@pytest.mark.skipif(not V5, reason="transformers 4 does not have the family")
def test_names_of_a_whole_model(make_llm, tmp_path):
    """Adapters of a model for images and text have longer names."""
    folder = make_model(tmp_path / "model", "qwen3_5_moe")
    found = make_adapters(tmp_path, shared_reference(folder))
    for adapter in found:
        adapter.tensors = {
            name.replace("model.model.", "model.model.language_model."): x for name, x in adapter.tensors.items()
        }
        adapter.save(json.loads((adapter.folder / "adapter_config.json").read_text()))
    assert_merged(
        folder,
        generate_by_steps(make_llm(folder, **EXPERTS), arguments_of(found * 2 + [None] * 2)),
        found * 2 + [None] * 2,
    )


@pytest.mark.parametrize("format_name", ["block", "small-blocks"])
def test_8_bit_base(make_llm, model, tmp_path, format_name):
    """The reference has dequantized weights."""
    test_quantization = pytest.importorskip("test_quantization")
    folder, plain = test_quantization.write_quantized(model, tmp_path, format_name)
    used = mixed(make_adapters(tmp_path, shared_reference(plain)))
    assert_merged(plain, generate_by_steps(make_llm(folder, **EXPERTS), arguments_of(used)), used)


@pytest.mark.parametrize("format_name", ["awq", "gptq"])
def test_4_bit_base(make_llm, monkeypatch, tmp_path, format_name):
    test_packed = pytest.importorskip("test_packed")
    source = test_packed.make(monkeypatch, tmp_path, "Qwen3Moe")
    folder, plain = test_packed.write_checkpoint(source, tmp_path, format_name)
    used = mixed(make_adapters(tmp_path, shared_reference(plain)))
    assert_merged(plain, generate_by_steps(make_llm(folder, **EXPERTS), arguments_of(used)), used)


# -- PEFT itself -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", of_families("qwen3-moe", "gpt-oss"))
def test_against_peft(make_llm, tmp_path, name):
    """What PEFT writes, if it is installed."""
    peft = pytest.importorskip("peft")
    folder = make_model(tmp_path / "model", name)
    parameters = [f"mlp.experts.{parameter}" for parameter in PARAMETERS] if V5 else None
    modules = ["q_proj"] if V5 else ["q_proj", *PROJECTIONS]
    patterns = {"rank_pattern": {"down_proj": 5}, "alpha_pattern": {"gate_up_proj": 3}}
    config = peft.LoraConfig(r=2, target_modules=modules, target_parameters=parameters, use_rslora=True, **patterns)
    adapted = peft.get_peft_model(reference_model(folder), config)
    generator = torch.Generator().manual_seed(1)
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_B" in parameter_name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    adapted.save_pretrained(tmp_path / "adapter")
    request = LoRARequest("peft", 1, str(tmp_path / "adapter"))
    outputs = generate_by_steps(make_llm(folder, **EXPERTS), [(*x, 0, request) for x in requests()])
    assert_same_as_transformers(folder, outputs, adapted)


# -- kernels -----------------------------------------------------------------------------------------------------------


def check_expert_linear(experts: Experts, dtype: torch.dtype, counts=(1, 5, 40, 150)) -> None:
    """Compare the kernel with the definition. Some rows belong to experts that other ranks have."""
    ops = pytest.importorskip("nanovllm.kernels.ops")
    for count, (name, inputs) in product(
        counts, (("gate_up_proj", experts.hidden_size), ("down_proj", experts.local_size))
    ):
        x, expert_ids = randn(count, inputs, dtype=dtype), torch.randint(experts.num_experts, (count,), device=DEVICE)
        expected = expert_linear.__wrapped__(x.float(), experts.float(), name, expert_ids)
        result = ops.expert_linear(x, experts.to(dtype), name, expert_ids.int())
        assert result.dtype == dtype
        assert_close(result, expected, 4)


@each_dtype
@pytest.mark.parametrize("rank, num_experts, hidden, size", [(0, 4, 40, 24), (1, 60, 72, 56), (1, 6, 136, 33)])
@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_expert_linear(rank, num_experts, hidden, size, dtype):
    """Odd sizes, and the second of two ranks."""
    moe = MoEConfig(
        frozenset(), num_experts, 2, size, True, expert_parallel=True, has_bias=size == 33, activation=SWIGLU
    )
    with torch.device(DEVICE), constructing(TensorParallel(rank, 1 + rank), torch.float32):
        experts = Experts(hidden, moe)
    for parameter in experts.parameters():
        parameter.copy_((randn(*parameter.shape) / parameter.shape[-1] ** 0.5).to(dtype))
    check_expert_linear(experts, dtype)


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_expert_linear_of_quantized_weights(make_llm, monkeypatch, tmp_path, quantization):
    folder = pytest.importorskip("test_packed").make(monkeypatch, tmp_path, "Qwen3Moe")
    llm = make_llm(folder, quantization=quantization, **SMALL)
    experts = llm.model_runner.model.model.layers[0].mlp.experts
    assert type(experts.format).__name__ == ("PackedExperts" if quantization == "int4" else "ScaledExperts")
    check_expert_linear(experts, torch.float32, counts=(3, 70))


@pytest.mark.skipif(CUDA, reason="runs kernels in Triton's interpreter")
@pytest.mark.parametrize("name", of_families("qwen3-moe", "gpt-oss", "gemma4-experts"))
def test_parity_on_kernels(use_ops, make_llm, monkeypatch, tmp_path, name):
    """With half of the experts: each takes programs of its own."""
    pytest.importorskip("triton")
    use_ops()
    *sizes, entries = CASES[name]
    few = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "top_k_experts": 2}
    monkeypatch.setitem(CASES, name, (*sizes, entries | {key: few[key] for key in few.keys() & entries.keys()}))
    folder = make_model(tmp_path / "model", name)
    found = make_adapters(tmp_path, shared_reference(folder))
    llm = make_llm(folder, attention_backend="triton", **EXPERTS | {"max_num_batched_tokens": 10})
    (prompt, params), *_ = requests()
    lengths, used = ((12, 2), (1, 2), (5, 3)), [found[0], None, found[1]]
    limited = [
        (prompt[:length], replace(params, max_tokens=n), 0, adapter and adapter.request)
        for (length, n), adapter in zip(lengths, used)
    ]
    assert_merged(folder, generate_by_steps(llm, limited), used)


@pytest.mark.skipif(CUDA, reason="runs graphs as Python code")
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # in a tile of no queries
def test_padded_steps(make_llm, tmp_path, use_ops, monkeypatch):
    """CUDA graphs contain experts with adapters."""
    entries = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, num_hidden_layers=1)
    monkeypatch.setitem(CASES, "one-moe-layer", ("Qwen3Moe", 2, 1, 16, {}, entries))
    folder = make_checkpoint(tmp_path / "model", "one-moe-layer")
    found = make_adapters(tmp_path, shared_reference(folder))
    use_ops("norm_rope_and_store", "place_decodes", "accept", "add_lora", "group_rows", "expert_linear")
    check_padded_steps(make_llm, monkeypatch, folder, found, EXPERTS)


def test_plain_experts_without_the_setting(use_ops, make_llm, model):
    """Without adapters of experts, the layers stay as they are, and no memory is allocated."""
    use_ops(table={})
    for settings, is_adapted in ((SMALL, False), (LORA, False), (EXPERTS, True)):
        llm = make_llm(model, **settings)
        modules = [*llm.model_runner.model.modules()]
        assert len([x for x in modules if isinstance(x, AdaptedExperts)]) == 2 * is_adapted
        assert len([x for x in modules if isinstance(x, FusedExperts)]) == 2 * (not is_adapted)
        if settings is not SMALL:
            targets = llm.model_runner.model.adapters.targets
            sizes = [targets[f"model.layers.1.mlp.experts.{name}"].stack for name in PROJECTIONS]
            rank = settings.get("max_expert_lora_rank", 0)
            assert [tuple(x.a.shape) for x in sizes] == [(16, 2, rank, 64)] * 2 + [(16, 1, rank, 48)]
            assert [tuple(x.b.shape) for x in sizes] == [(16, 96, rank)] * 2 + [(16, 64, rank)]


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", of_families("qwen3-moe", "gpt-oss", "gemma4-experts"))
def test_on_gpu(make_llm, tmp_path, name, enforce_eager):
    folder = make_model(tmp_path / "model", name)
    found = make_adapters(tmp_path, shared_reference(folder))
    llm = make_llm(folder, enforce_eager=enforce_eager, **ON_GPU | EXPERTS)
    for used in (mixed(found), [None] * 8, [found[1]] * 8):
        assert_merged(folder, generate_by_steps(llm, arguments_of(used)), used)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "fp8"},
        pytest.param({"tensor_parallel_size": 2}, marks=TWO_GPUS),
        pytest.param({"tensor_parallel_size": 2, "expert_parallel": True}, marks=TWO_GPUS),
    ],
    ids=str,
)
def test_settings_on_gpu(make_llm, model, tmp_path, settings):
    used = mixed(make_adapters(tmp_path, shared_reference(model)))
    outputs = generate_by_steps(make_llm(model, **ON_GPU | EXPERTS | settings), arguments_of(used))
    if "dtype" not in settings:
        assert_merged(model, outputs, used)
    else:
        assert_merged_on_average(model, outputs, used, 0.6 if "quantization" in settings else 0.3)


# -- what is refused ---------------------------------------------------------------------------------------------------

UP = "model.layers.1.mlp.experts.7.up_proj"
STACK = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def refusing(model):
    """An engine for all adapters that are refused."""
    with LLM(model, dtype="float32", device="cpu", **EXPERTS) as llm:
        yield llm


@pytest.mark.parametrize(
    "form, tensors, message",
    [
        (
            "single",
            {f"{UP}.lora_A.weight": torch.ones(3, 63)},
            r"7.up_proj.lora_A.weight: has shape \[3, 63\]: must be",
        ),
        (
            "single",
            {f"{UP}.lora_B.weight": torch.ones(47, 3)},
            r"7.up_proj.lora_B.weight: has shape \[47, 3\]: must be",
        ),
        ("single", {f"{UP}.lora_B.weight": None}, "experts.7.up_proj.lora_B.weight is missing"),
        (
            "single",
            {f"{UP}.lora_A.weight": None, f"{UP}.lora_B.weight": None},
            "7.up_proj.lora_A.weight is missing, but",
        ),
        ("single", {f"{UP}.lora_A.weight": torch.full((3, 64), torch.inf)}, "7.up_proj.lora_A.weight: is NaN or inf"),
        ("single", {f"{UP.replace('7', '8')}.lora_A.weight": torch.ones(3, 64)}, "no adapters for.*experts.8.up_proj'"),
        ("single", {"model.layers.1.mlp.gate.lora_A.weight": torch.ones(3, 64)}, "'model.layers.1.mlp.gate'.*routers"),
        ("stacked", {f"{STACK}.lora_A.weight": torch.ones(24, 47)}, r"\[24, 47\] and \[64, 24\]: the last size of A"),
        (
            "stacked",
            {f"{STACK}.lora_A.weight": torch.ones(23, 48)},
            r"lora_A.weight: has shape \[23, 48\]: must be \[24",
        ),
        ("stacked", {f"{STACK}.lora_A.weight": torch.ones(24)}, r"\[24\] and \[64, 24\]: the last size of A"),
        ("stacked", {f"{STACK}.lora_B.weight": torch.ones(64, 16)}, r"lora_B.weight: has shape \[64, 16\]: must be"),
        ("stacked", {f"{STACK}.lora_B.weight": None}, "layers.1.mlp.experts.lora_B.weight is missing"),
        (
            "stacked",
            {f"{STACK}.lora_A.weight": None, f"{STACK}.lora_B.weight": None},
            "the adapter of model.layers.1.mlp.experts.down_proj is missing, but matches target_parameters",
        ),
        (
            "stacked",
            {f"{UP}.lora_A.weight": torch.ones(3, 64), f"{UP}.lora_B.weight": torch.ones(48, 3)},
            "up_proj: does not match target_modules",
        ),
        (
            "stacked",
            {f"{STACK}.base_layer.base_layer.lora_A.weight": torch.ones(24, 8)},
            "no adapters for 'model.layers.1.mlp.experts.base_layer.base_layer'",
        ),
    ],
)
def test_broken_tensors(refusing, model, tmp_path, form, tensors, message):
    if form == "stacked" and not V5:
        pytest.skip("the model of transformers 4 has no stacks")
    adapter = ExpertAdapter(tmp_path / "a", shared_reference(model), ["q_proj"], 1, form)
    adapter.tensors |= {f"base_model.model.{name}": x for name, x in tensors.items()}
    adapter.tensors = {name: x for name, x in adapter.tensors.items() if x is not None}
    adapter.save(json.loads((tmp_path / "a" / "adapter_config.json").read_text()))
    with pytest.raises(ValueError, match=message) as raised:
        refusing.add_lora(adapter.request)
    assert str(tmp_path / "a" / "adapter_model.safetensors") in str(raised.value)


@pytest.mark.skipif(not V5, reason="the model of transformers 4 has no stacks")
@pytest.mark.parametrize(
    "entries, message",
    [
        ({"r": 6}, "adapter of model.layers.0.mlp.experts.*has rank 6: must be at most max_expert_lora_rank=5"),
        ({"target_parameters": ["mlp.gate.weight"]}, "mlp.experts.*does not match target_parameters"),
        ({"target_parameters": ["down_proj"]}, "experts.gate_up_proj: does not match target_parameters"),
        (
            {"target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]},
            "target_parameters: 'gate.weight': is not supported",
        ),
        ({"target_parameters": 3}, "must be a regular expression or a list"),
        ({"rank_pattern": {"experts.gate_up_proj": 2}}, r"lora_A.weight: has shape \[24, 64\]: must be \[16, 64\]"),
    ],
)
def test_broken_config(refusing, model, tmp_path, entries, message):
    adapter = ExpertAdapter(tmp_path / "a", shared_reference(model), [], 1, "stacked")
    adapter.edit(**entries)
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        refusing.add_lora(adapter.request)
    assert str(adapter.folder) in str(raised.value)


def test_without_the_setting(make_llm, model, tmp_path):
    adapter = ExpertAdapter(tmp_path / "a", shared_reference(model), ["q_proj"], 1, "single")
    message = "adapter_config.json: the adapter of model.*gate_proj has rank 3: must be at most max_expert_lora_rank=0"
    with pytest.raises(ValueError, match=message):
        make_llm(model, **LORA).add_lora(adapter.request)


@pytest.mark.skipif(not V5, reason="the model of transformers 4 has no stacks")
@pytest.mark.parametrize("form", ["stacked", "swapped"])
@pytest.mark.parametrize("size, square", [(64, "down_proj"), (32, "gate_up_proj")])
def test_square_parameters(make_llm, monkeypatch, tmp_path, form, size, square):
    """The other parameter shows which side has the inputs. Without it, nothing does."""
    entries = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=size)
    monkeypatch.setitem(CASES, f"square {square}", ("Qwen3Moe", 2, 1, 16, {}, entries))
    folder = make_checkpoint(tmp_path / "model", f"square {square}")
    llm, reference = make_llm(folder, **EXPERTS), shared_reference(folder)
    adapter = ExpertAdapter(tmp_path / "both", reference, [], 1, form)
    outputs = generate_by_steps(llm, arguments_of([adapter] * 8)[:3])
    assert_merged(folder, outputs, [adapter] * 3)
    only = ExpertAdapter(tmp_path / "only", reference, [], 2, form, only=[square])
    with pytest.raises(ValueError, match=f"mlp.experts: {square} has as many inputs as outputs"):
        llm.add_lora(only.request)
