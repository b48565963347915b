"""Adapters of experts, in both forms in which PEFT stores them: the same answers as transformers with merged weights."""

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest
import torch
from common import generate_by_steps
from safetensors.torch import save_file
from test_lora import LORA, MLP, PEFTAdapter, all_targets, arguments_of, assert_merged, mixed
from test_models import V5, make_checkpoint, shared_reference
from torch import nn

EXPERTS = LORA | {"max_expert_lora_rank": 5}
PROJECTIONS = {"gate_proj": 0, "up_proj": 1, "down_proj": 2}
PARAMETERS = "gate_up_proj", "down_proj"


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
                (self.add_single if form == "single" else self.add_stacks)(path, experts, form)
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

    def add_single(self, path: str, experts: nn.Module, form: str) -> None:
        is_list = isinstance(experts, nn.ModuleList)
        for expert in range(len(experts) if is_list else len(experts.gate_up_proj)):
            for name in (name for name in PROJECTIONS if name in self.only):
                if is_list:
                    weight = f"{path}.{expert}.{name}.weight"
                    part = self.copy(weight, experts.get_parameter(f"{expert}.{name}.weight"))
                else:
                    parameter = "down_proj" if name == "down_proj" else "gate_up_proj"
                    part = self.copy(f"{path}.{parameter}", getattr(experts, parameter))[expert]
                    part = part.mT if getattr(experts, "is_transposed", False) else part
                    if name != "down_proj":
                        shard, size = PROJECTIONS[name], len(part) // 2
                        alternates = not getattr(experts, "is_concatenated", True)
                        part = part[shard::2] if alternates else part[shard * size : (shard + 1) * size]
                rank, scale = self.rank_and_scale(name)
                a, b = self.randn(rank, part.shape[1], part.shape[1] ** -0.5), self.randn(len(part), rank, 1 / rank)
                part += scale * b @ a
                self.add(f"{path}.{expert}.{name}", a, b)

    def add_stacks(self, path: str, experts: nn.Module, form: str) -> None:
        """As PEFT's `ParamWrapper.get_delta_weight` does."""
        wrapped = [name for name in PARAMETERS if name in self.only]
        for i, name in enumerate(wrapped):
            weight = self.copy(f"{path}.{name}", getattr(experts, name))
            weight = weight.mT if getattr(experts, "is_transposed", False) else weight
            count, outputs, inputs = weight.shape
            rank, scale = self.rank_and_scale(name)
            columns, rows = (inputs, outputs) if form == "stacked" else (outputs, inputs)
            a, b = self.randn(count * rank, columns, columns**-0.5), self.randn(rows, rank * count, 1 / rank)
            sides = "eoi" if form == "stacked" else "eio"
            equation = f"ore,eri->{sides}"
            weight += scale * torch.einsum(equation, b.view(rows, rank, count), a.view(count, rank, columns))
            self.add(path + ".base_layer" * (len(wrapped) - 1 - i), a, b)

    def copy(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        return self.weights.setdefault(name, parameter.detach().clone())


def make_adapters(folder: Path, model: nn.Module, forms: tuple[str, str]) -> list[PEFTAdapter]:
    """Two adapters of experts, and one of attention only."""
    targets = all_targets(model)
    dense = [name for name in targets if name not in MLP]
    patterns = {"rank_pattern": {"down_proj": 5}, "alpha_pattern": {"gate_up_proj": 2, "up_proj": 3}}
    return [
        ExpertAdapter(folder / "a", model, targets, 1, forms[0]),
        ExpertAdapter(folder / "b", model, MLP if forms[1] == "single" else dense[:1], 2, forms[1], **patterns if forms[1] != "single" else {}),
        PEFTAdapter(folder / "c", model, dense, 3),
    ]


def make_model(folder: Path, name: str) -> str:
    if name.startswith("qwen3_"):
        return pytest.importorskip("test_hybrid").make_checkpoint(folder, name)
    return make_checkpoint(folder, name)


V5_FAMILIES = ["gemma4-experts", "gpt-oss", "qwen3_next", "qwen3_5_moe"] if V5 else []


@pytest.mark.parametrize("forms", [("single", "stacked"), ("swapped", "single")] if V5 else [("single", "single")])
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-moe-step", *V5_FAMILIES])
def test_parity(make_llm, tmp_path, name, forms):
    """Three adapters share two slots; chunks, decodes next to them, and hits of the prefix cache."""
    folder = make_model(tmp_path / "model", name)
    found = make_adapters(tmp_path, shared_reference(folder), forms)
    llm = make_llm(folder, **EXPERTS | {"num_kvcache_blocks": 80})
    used = mixed(found)
    outputs = generate_by_steps(llm, arguments_of(used))
    assert_merged(folder, outputs, used)
    alone = [generate_by_steps(llm, [request])[0] for request in arguments_of(used)[:3]]
    assert_merged(folder, alone, used[:3])
