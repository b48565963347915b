"""Adapters of requests: the same answers as transformers with the adapter merged into the weights."""

import asyncio
import json
import random
import re
from dataclasses import replace
from functools import partial
from math import gcd, sqrt
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from common import CUDA, DEVICE, TINY, TWO_GPUS, assert_close, each_dtype, generate_by_steps, randn, runs_as_on_cuda
from safetensors.torch import load_file, save_file
from test_models import (  # noqa: F401 (gelu_family is a fixture)
    CASES,
    MAIN_CASES,
    SMALL,
    V5,
    VOCAB_SIZE,
    assert_same_as_transformers,
    gelu_family,
    make_checkpoint,
    requests,
    shared_reference,
)
from torch import nn
from torch.func import functional_call

from nanovllm import LLM, BeamSearchParams, LoRARequest, SamplingParams
from nanovllm.cuda import graphs
from nanovllm.cuda.buffers import make_buffers
from nanovllm.engine.sequence import Sequence
from nanovllm.fused.decoder import FusedMLP
from nanovllm.fused.fused_attention import FusedAttention
from nanovllm.fused.norm_input import NormInput
from nanovllm.layers.activation import silu_and_mul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.lora.adapter_config import AdapterConfig
from nanovllm.lora.adapter_queue import AdapterQueue, AdapterSlots
from nanovllm.lora.lora_linear import LoRAStack, StepAdapters, add_lora, group_rows
from nanovllm.lora.lora_request import Adapter
from nanovllm.serve.async_llm import AsyncLLM
from nanovllm.utils.partial_sum import PartialSum

LORA = SMALL | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 20}
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]


def linear_names(model: nn.Module) -> list[str]:
    """Names of the layers that can have an adapter."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [
        name
        for name in names
        if not name.endswith(("lm_head", ".gate", "expert_gate", ".router.proj")) and ".experts." not in name
    ]


class PEFTAdapter:
    """An adapter in PEFT's format, and the model with the adapter merged into its weights."""

    def __init__(self, folder: Path, model: nn.Module, targets: list[str], number: int, r: int = 4, **entries):
        """Make an adapter for all linear layers whose name ends with an entry of `targets`."""
        folder.mkdir(parents=True)
        self.folder, self.weights, generator = folder, {}, torch.Generator().manual_seed(number)
        self.merged = partial(functional_call, model, self.weights)
        self.request = LoRARequest(folder.name, number, str(folder))
        config = {"peft_type": "LORA", "r": r, "lora_alpha": 6, "target_modules": targets, "bias": "none"} | entries
        self.tensors: dict[str, torch.Tensor] = {}
        for name in linear_names(model):
            last = name.rpartition(".")[2]
            if last not in targets and not isinstance(targets, str):
                continue
            if isinstance(targets, str) and "layers.1." not in name:  # the only expression of these tests
                continue
            rank = config.get("rank_pattern", {}).get(last, r)
            alpha = config.get("alpha_pattern", {}).get(last, config["lora_alpha"])
            weight = model.get_submodule(name).weight
            a = torch.randn(rank, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
            b = torch.randn(len(weight), rank, generator=generator) / rank
            scale = alpha / (sqrt(rank) if config.get("use_rslora") else rank)
            self.weights[f"{name}.weight"] = weight + scale * b @ a
            self.tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        self.save(config)

    def save(self, config: dict) -> None:
        save_file({name: x.contiguous() for name, x in self.tensors.items()}, self.folder / "adapter_model.safetensors")
        (self.folder / "adapter_config.json").write_text(json.dumps(config))

    def edit(self, **entries) -> None:
        file = self.folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def all_targets(model: nn.Module) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in linear_names(model)})


@pytest.fixture
def adapters(tmp_path):
    """Return a function that makes three different adapters of a checkpoint."""

    def make(folder: str) -> list[PEFTAdapter]:
        model = shared_reference(folder)
        targets = all_targets(model)
        return [
            PEFTAdapter(tmp_path / "all", model, targets, 1),
            PEFTAdapter(tmp_path / "some", model, targets[::2], 2, r=20, use_rslora=True, lora_alpha=3),
            PEFTAdapter(
                tmp_path / "patterns",
                model,
                targets[1:],
                3,
                rank_pattern={targets[1]: 7},
                alpha_pattern={targets[-1]: 11, targets[1]: 2},
            ),
        ]

    return make


def assert_merged(folder: str, outputs: list, used: list) -> None:
    """Compare each output with the model into which its adapter is merged."""
    assert len(outputs) == len(used)
    for adapter in dict.fromkeys(used):
        own = [output for output, other in zip(outputs, used) if other is adapter]
        assert_same_as_transformers(folder, own, adapter and adapter.merged)


def mixed(found: list[PEFTAdapter]) -> list:
    """Return an adapter or None for each of the `requests`. The last two share a prefix."""
    return [found[0], None, found[1], found[2], found[0], None, found[1], found[0]]


def arguments_of(used: list, **params) -> list[tuple]:
    return [
        (prompt, replace(given, **params), 0, adapter and adapter.request)
        for (prompt, given), adapter in zip(requests(), used, strict=True)
    ]


# -- the same answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAIN_CASES)
def test_parity(make_llm, adapters, tmp_path, name):
    """Every family. Three adapters share two slots, and requests of all of them and of none share steps."""
    folder = make_checkpoint(tmp_path / "model", name)
    found = adapters(folder)
    llm = make_llm(folder, **LORA)
    outputs = generate_by_steps(llm, arguments_of(mixed(found), max_tokens=3))
    assert_merged(folder, outputs, mixed(found))
    assert llm.stats()["steps"]["mixed"] > 0
    # without adapters, the first tokens are less or more likely, unless they have no adapter
    lengths = [len(output.prompt_token_ids) for output in outputs]
    prompts = [output.prompt_token_ids + [0] * (max(lengths) - n) for output, n in zip(outputs, lengths)]
    plain = shared_reference(folder)(torch.tensor(prompts)).logits.log_softmax(-1)
    for output, adapter, without, n in zip(outputs, mixed(found), plain, lengths):
        (token_id, *_), (logprobs, *_) = output.outputs[0].token_ids, output.outputs[0].logprobs
        assert (abs(logprobs[token_id].logprob - without[n - 1, token_id]) > 2e-5) == (adapter is not None)


# -- kernels -----------------------------------------------------------------------------------------------------------


def make_stack(
    slots: int, inputs: int, sizes: list[int], max_rank: int, dtype: torch.dtype, experts: int = 1
) -> LoRAStack:
    """Random adapters, of all ranks up to `max_rank`. What belongs to no adapter is NaN."""
    rng = random.Random(inputs)
    ranks = torch.tensor(
        [[rng.choice((0, 1, max_rank, rng.randint(1, max_rank))) for _ in sizes] for _ in range(slots)]
    )
    rows = slots * experts
    a, b = randn(rows, len(sizes), max_rank, inputs, dtype=dtype), randn(rows, sum(sizes), max_rank, dtype=dtype)
    ends = torch.tensor(sizes).cumsum(0)
    for slot in range(rows):
        for part, rank in enumerate(ranks[slot // experts]):
            a[slot, part, rank:] = torch.nan
            b[slot, ends[part] - sizes[part] : ends[part], rank:] = torch.nan
    a, ints = a / inputs**0.5, dict(dtype=torch.int32, device=DEVICE)
    alignment = gcd(64, *ends.tolist())
    return LoRAStack(a, b / max_rank, ranks.to(**ints), ends.to(**ints), max(sizes), experts, alignment)


@each_dtype
@pytest.mark.parametrize(
    "num_rows, slots, inputs, sizes, max_rank, experts",
    [
        (1, 1, 24, [40], 5, 1),
        (3, 2, 200, [70, 1, 130], 16, 1),
        (17, 8, 300, [64, 64], 20, 1),
        (40, 3, 136, [129], 70, 1),
        (150, 5, 72, [30, 100], 8, 1),
        (150, 5, 72, [640, 400], 8, 1),
        (21, 3, 56, [40, 40], 5, 7),
        (140, 2, 40, [33], 3, 9),
    ],
)
@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_kernels(monkeypatch, num_rows, slots, inputs, sizes, max_rank, experts, dtype):
    """Few rows and many, in float64 for comparison."""
    ops = pytest.importorskip("nanovllm.kernels.ops")
    if sum(sizes) > 1000 and not CUDA:  # a program computes several tiles of outputs
        monkeypatch.setattr("nanovllm.lora.kernels.lora_gemm.num_sms", lambda device: 1)
    stack, slots = make_stack(slots, inputs, sizes, max_rank, dtype, experts), slots * experts
    x, y = randn(num_rows, inputs, dtype=dtype), randn(num_rows, sum(sizes), dtype=dtype)
    for slots_of_rows in (torch.randint(-1, slots, (num_rows,)), torch.full((num_rows,), slots - 1)):
        slots_of_rows = slots_of_rows.to(DEVICE, torch.int32)
        exact = stack._replace(a=stack.a.double(), b=stack.b.double())
        groups = [(i, (slots_of_rows == i).nonzero().flatten()) for i in range(slots)]
        expected = add_lora.__wrapped__(y.double(), x.double(), exact, SimpleNamespace(groups=groups))
        rows = SimpleNamespace(groups=ops.group_rows(slots_of_rows, slots))
        assert_close(ops.add_lora(y.clone(), x, stack, rows), expected, 4)
        if len(sizes) == 2 and sizes[0] == sizes[1]:
            gated = ops.add_lora(y.clone(), x, stack, rows, gated=True)
            assert_close(gated, silu_and_mul.__wrapped__(expected), 4)


def expected_of_rows(x, weight, bias, stack, slots_of_rows, gated=False) -> torch.Tensor:
    """`adapted_linear` in float64."""
    exact = stack._replace(a=stack.a.double(), b=stack.b.double())
    groups = [(i, (slots_of_rows == i).nonzero().flatten()) for i in range(len(stack.ranks))]
    y = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    y = add_lora.__wrapped__(y, x.double(), exact, SimpleNamespace(groups=groups))
    return silu_and_mul.__wrapped__(y) if gated else y


@each_dtype
@pytest.mark.parametrize(
    "slots, inputs, sizes, max_rank",
    [(1, 24, [48], 5), (3, 200, [80, 16, 144], 16), (8, 304, [64, 64], 20), (2, 3000, [32], 70)],
)
@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_kernels_for_a_row(slots, inputs, sizes, max_rank, dtype):
    """One kernel computes a norm, multiplies by the weight, and adds the result of the adapter, if there is one."""
    ops = pytest.importorskip("nanovllm.kernels.ops")
    stack, outputs = make_stack(slots, inputs, sizes, max_rank, dtype), sum(sizes)
    x, residual = randn(1, inputs, dtype=dtype), randn(1, inputs, dtype=dtype)
    weight, norm = randn(outputs, inputs, dtype=dtype) / inputs**0.5, RMSNorm(inputs, 1e-5).to(DEVICE, dtype)
    norm.weight.data.uniform_(0.5, 2)
    for slot in range(-1, slots):
        slots_of_rows, bias = torch.tensor([slot], dtype=torch.int32, device=DEVICE), randn(outputs, dtype=dtype)
        rows = StepAdapters(slots_of_rows, slots)
        out = torch.empty(1, 1, outputs, dtype=dtype, device=DEVICE)
        assert torch.equal(ops.adapted_linear(x, weight, bias, stack, rows, out=out), out[0])
        assert_close(out[0], expected_of_rows(x, weight, bias, stack, slots_of_rows), 4)
        normed = NormInput(PartialSum(x), residual, norm)
        normed_x = RMSNorm.forward(norm.double(), x.double() + residual.double())
        norm.to(dtype)
        gated = len(sizes) == 2
        y = ops.adapted_linear(normed, weight, bias, stack, rows, gated)
        assert_close(y, expected_of_rows(normed_x, weight, bias, stack, slots_of_rows, gated), 4)
        assert_close(normed.total, x.double() + residual.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if CUDA else [torch.float16])
@pytest.mark.parametrize(
    "num_rows, slots, inputs, sizes, max_rank, split_k",
    [
        (2, 1, 24, [48], 5, 1),
        (9, 3, 200, [64, 192], 16, 1),
        (16, 8, 304, [64, 64], 20, 1),
        (5, 2, 3000, [100], 70, 3),
        (8, 8, 4104, [192, 64, 64], 16, 2),
    ],
)
@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_kernels_for_few_rows(monkeypatch, num_rows, slots, inputs, sizes, max_rank, split_k, dtype):
    """One kernel multiplies by the weight and adds the results of all rows' adapters."""
    ops = pytest.importorskip("nanovllm.kernels.ops")
    if not CUDA:
        monkeypatch.setattr("nanovllm.kernels.linear.split_k_gemm.has_tma", lambda device: True)
    stack = make_stack(slots, inputs, sizes, max_rank, dtype)
    x, weight = randn(num_rows, inputs, dtype=dtype), randn(sum(sizes), inputs, dtype=dtype) / inputs**0.5
    for slots_of_rows in (torch.randint(-1, slots, (num_rows,)), torch.full((num_rows,), -1)):
        rows = StepAdapters(slots_of_rows.to(DEVICE, torch.int32), slots)
        y = ops.adapted_linear(x, weight, None, stack, rows, split_k=split_k)
        assert y.shape == ((split_k, num_rows, sum(sizes)) if split_k > 1 else (num_rows, sum(sizes)))
        y = y.double().sum(0).to(dtype) if split_k > 1 else y
        assert_close(y, expected_of_rows(x, weight, None, stack, rows.slots), 4)
        if len(sizes) == 2 and sizes[0] == sizes[1]:
            y = ops.adapted_linear(x, weight, None, stack, rows, True)
            assert_close(y, expected_of_rows(x, weight, None, stack, rows.slots, True), 4)


@pytest.mark.parametrize(
    "num_rows, inputs, sizes, max_rank", [(1, 64, [24, 40], 8), (17, 64, [64], 8), (2, 64, [96, 32], 8)]
)
def test_rows_that_no_kernel_fuses(monkeypatch, num_rows, inputs, sizes, max_rank):
    """A program might compute outputs of two parts, or there are too many rows."""
    ops = pytest.importorskip("nanovllm.kernels.ops")
    monkeypatch.setattr("nanovllm.kernels.linear.split_k_gemm.has_tma", lambda device: True)
    stack, weight = (
        make_stack(1, inputs, sizes, max_rank, torch.float16),
        randn(sum(sizes), inputs, dtype=torch.float16),
    )
    x = randn(num_rows, inputs, dtype=torch.float16)
    assert ops.adapted_linear(x, weight, None, stack, StepAdapters(None, 1)) is NotImplemented


def test_rows_without_adapters():
    """Nothing is read or written, even if all adapters are NaN."""
    ops = pytest.importorskip("nanovllm.kernels.ops")
    stack = make_stack(2, 24, [40], 5, torch.float32)
    stack.a.fill_(torch.nan)
    y = randn(20, 40)
    for functions in (ops, None):
        slots = torch.full((20,), -1, dtype=torch.int32, device=DEVICE)
        group, add = (ops.group_rows, ops.add_lora) if functions else (group_rows.__wrapped__, add_lora.__wrapped__)
        assert torch.equal(add(y.clone(), randn(20, 24), stack, SimpleNamespace(groups=group(slots, 2))), y)


@pytest.mark.skipif(CUDA, reason="runs kernels in Triton's interpreter; tests/test_gpu.py on CUDA")
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "llama-gelu", *(["phi3"] if V5 else [])])
def test_parity_on_kernels(use_ops, make_llm, adapters, tmp_path, name):
    """Fused layers with adapters. A single row, several rows, and chunks."""
    pytest.importorskip("triton")
    use_ops()
    folder = make_checkpoint(tmp_path / "model", name)
    found = adapters(folder)
    llm, sizes = make_llm(folder, attention_backend="triton", **LORA | {"max_num_batched_tokens": 18}), []
    llm.core.on_step.append(lambda step, result: sizes.append((sum(step.chunk_lens), step.num_decodes)))
    (prompt, params), *_ = requests()
    lengths, used = ((20, 2), (1, 2), (5, 3)), [found[0], None, found[1]]
    limited = [
        (prompt[:length], replace(params, max_tokens=n), 0, adapter and adapter.request)
        for (length, n), adapter in zip(lengths, used)
    ]
    assert_merged(folder, generate_by_steps(llm, limited), used)
    assert sizes[0] == (18, 0) and sizes[-2:] == [(0, 3), (0, 1)]
    modules = [*llm.model_runner.model.modules()]
    for form in (FusedAttention, FusedMLP):
        assert len([module for module in modules if isinstance(module, form)]) == 2


# -- together with everything else -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("lora") / "model", "qwen3")


@pytest.fixture
def found(adapters, model) -> list[PEFTAdapter]:
    return adapters(model)


SCHEDULES: list[dict] = [
    {"async_scheduling": True},
    {"num_kvcache_blocks": 16},  # with preemptions
    {"max_num_seqs": 1},
    {"enable_prefix_caching": False, "max_loras": 3},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
]


@pytest.mark.parametrize("settings", [*SCHEDULES, {"kv_cache_dtype": "fp8"}], ids=str)
def test_schedules(make_llm, model, found, settings):
    llm = make_llm(model, **LORA | settings)
    used = mixed(found)
    outputs = generate_by_steps(llm, arguments_of(used))
    if "kv_cache_dtype" in settings:  # rounded
        alone = [generate_by_steps(llm, [request])[0] for request in arguments_of(used)]
        assert [x.token_ids for x in outputs] == [x.token_ids for x in alone]
    else:
        assert_merged(model, outputs, used)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", *(["phi3", "glm4"] if V5 else [])])
def test_two_ranks(make_llm, adapters, tmp_path, name):
    """Each has its part of every adapter."""
    folder = make_checkpoint(tmp_path / "model", name)
    found = adapters(folder)
    llm = make_llm(folder, tensor_parallel_size=2, **LORA)
    assert_merged(folder, generate_by_steps(llm, arguments_of(mixed(found), max_tokens=2)), mixed(found))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.usefixtures("forked_ranks")
def test_hybrids(make_llm, tmp_path, num_ranks):
    """Layers with a state, projections whose rows are scattered, and a shared expert of another size."""
    test_hybrid = pytest.importorskip("test_hybrid")
    for name in ("qwen3_5", "qwen3_next"):
        folder = test_hybrid.make_checkpoint(tmp_path / name, name)
        model = shared_reference(folder)
        found = [PEFTAdapter(tmp_path / f"{name}-{i}", model, all_targets(model), i) for i in (1, 2, 3)]
        assert any("linear_attn" in name for name in found[0].tensors)
        assert name == "qwen3_5" or any("shared_expert" in name for name in found[0].tensors)
        llm = make_llm(folder, tensor_parallel_size=num_ranks, **LORA | {"num_kvcache_blocks": 80})
        requests = arguments_of(mixed(found), max_tokens=5 if num_ranks == 1 else 2)
        assert_merged(folder, generate_by_steps(llm, requests), mixed(found))


def test_shared_experts_are_not_stacked(make_llm, tmp_path):
    """With `enable_lora`, a shared expert of the size of the others is a linear layer that can have an adapter."""
    test_hybrid = pytest.importorskip("test_hybrid")
    folder = test_hybrid.make_checkpoint(tmp_path / "model", "qwen3_5_moe")
    model, num_stacked = shared_reference(folder), []
    for settings in ({}, LORA):
        llm = make_llm(folder, **SMALL | settings | {"num_kvcache_blocks": 80})
        num_stacked.append(llm.model_runner.model.model.layers[0].mlp.experts.num_stacked)
    assert num_stacked == [9, 8]
    found = [PEFTAdapter(tmp_path / f"{i}", model, all_targets(model), i) for i in (1, 2, 3)]
    assert any("shared_expert" in name for name in found[0].tensors)
    assert_merged(folder, generate_by_steps(llm, arguments_of(mixed(found))), mixed(found))


def test_quantized_base(make_llm, tmp_path):
    """The adapter is not quantized. The reference has dequantized weights."""
    test_quantization = pytest.importorskip("test_quantization")
    source = make_checkpoint(tmp_path / "model", "llama-biases")
    folder, plain = test_quantization.write_quantized(source, tmp_path, "small-blocks")
    reference = shared_reference(plain)
    found = [PEFTAdapter(tmp_path / f"{i}", reference, ATTENTION + MLP, i) for i in (1, 2, 3)]
    llm = make_llm(folder, **LORA)
    assert_merged(plain, generate_by_steps(llm, arguments_of(mixed(found))), mixed(found))
    (prompt, params), *_ = requests()
    for quantization in ("int8", "int4"):
        llm = make_llm(source, quantization=quantization, **LORA)
        answers = [llm.generate([prompt], params, False, None, x.request)[0].token_ids for x in found]
        assert len({*map(tuple, answers)}) == 3


@pytest.mark.skipif(CUDA, reason="runs kernels in Triton's interpreter; tests/test_gpu.py on CUDA")
def test_base_of_fp8_units(monkeypatch, use_ops, make_llm, tmp_path):
    """Layers whose activations are quantized by the norm or the activation before them."""
    test_quantization = pytest.importorskip("test_quantization")
    products = "linear", "split_linear", "norm_linear", "best_split_k", "add_rms_norm", "silu_and_mul"
    use_ops(*products, "quantize_rows", "add_lora", "group_rows", *test_quantization.SCALED)
    monkeypatch.setattr("nanovllm.quantization.quant_config.has_fp8_units", lambda device: True)
    folder, plain = test_quantization.write_quantized(
        make_checkpoint(tmp_path / "model", "llama-biases"), tmp_path, "block"
    )
    reference = shared_reference(plain)
    adapter = PEFTAdapter(tmp_path / "a", reference, ATTENTION + MLP, 1)
    llm = make_llm(folder, **LORA | dict(max_num_batched_tokens=7))
    (prompt, params), *_ = requests()
    plain_params = replace(params, max_tokens=2, prompt_logprobs=0)
    (output,) = generate_by_steps(llm, [(prompt[:12], plain_params, 0, adapter.request)])
    logprobs = adapter.merged(torch.tensor([output.prompt_token_ids])).logits[0].log_softmax(-1)
    expected = logprobs[range(11), output.prompt_token_ids[1:]]
    ours = torch.tensor([x[i].logprob for i, x in zip(prompt[1:12], output.prompt_logprobs[1:])])
    without = reference(torch.tensor([output.prompt_token_ids])).logits[0].log_softmax(-1)
    without = without[range(11), output.prompt_token_ids[1:]]
    assert (ours - expected).abs().mean() < 0.3 * (without - expected).abs().mean()


def test_answers_and_beams(make_llm, model, found):
    llm, (prompt, params) = make_llm(model, **LORA), requests()[0]
    for adapter in (found[0], found[1], None):
        options = {"lora_request": adapter and adapter.request, "use_tqdm": False}
        (output,) = llm.generate([prompt], replace(params, n=3, temperature=1.0, seed=1), **options)
        reference = adapter.merged if adapter else shared_reference(model)
        for answer in output.outputs:
            token_ids = prompt + answer.token_ids
            logprobs = reference(torch.tensor([token_ids])).logits[0].log_softmax(-1)
            expected = logprobs[range(len(prompt) - 1, len(token_ids) - 1), answer.token_ids].sum().item()
            assert answer.cumulative_logprob == pytest.approx(expected, abs=5e-3)
        (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True), **options)
        for beam in output.outputs:
            token_ids = prompt + beam.token_ids
            logprobs = reference(torch.tensor([token_ids])).logits[0].log_softmax(-1)
            expected = logprobs[range(len(prompt) - 1, len(token_ids) - 1), beam.token_ids].sum().item()
            assert beam.cumulative_logprob == pytest.approx(expected, abs=5e-3)


def test_streams_chats_and_grammars(make_llm, tmp_path):
    found = [PEFTAdapter(tmp_path / f"{i}", shared_reference(TINY), ATTENTION + MLP, i).request for i in (1, 2, 3)]
    settings = dict(enable_lora=True, max_loras=2, max_model_len=256, num_kvcache_blocks=64, kvcache_block_size=16)
    llm, params = make_llm(TINY, **settings), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    used = [found[0], None]
    outputs = llm.generate([[5, 6, 7], [5, 6, 7]], params, use_tqdm=False, lora_request=used)
    assert outputs[0].token_ids != outputs[1].token_ids
    pieces: dict[int, list[int]] = {0: [], 1: []}
    for event in llm.stream([[5, 6, 7], [5, 6, 7]], params, lora_request=used):
        pieces[event.index] += event.token_ids
    assert [*pieces.values()] == [output.token_ids for output in outputs]
    (chat,) = llm.chat([{"role": "user", "content": "Hi"}], params, False, lora_request=found[0])
    (again,) = llm.generate([chat.prompt_token_ids], params, False, lora_request=found[0])
    assert chat.token_ids == again.token_ids
    pytest.importorskip("llguidance")
    constrained = SamplingParams(temperature=0, max_tokens=5, structured_outputs={"regex": "[0-9]{5}"})
    answers = llm.generate(["5 + 3"] * 4, constrained, False, lora_request=[None, *found])
    assert all(len(output.text) == 5 and output.text.isdigit() for output in answers)
    assert len({output.text for output in answers}) > 1


def test_prefix_caches_are_not_mixed(make_llm, model, found):
    """Requests with the same prompt find only what their adapter has computed, also after it has left the device."""
    llm = make_llm(model, **LORA | {"max_loras": 1})
    prompt, params = requests()[5][0], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    used = [None, found[0], found[1], found[0], None, found[1]]
    outputs = []
    for adapter in used:
        outputs += llm.generate([prompt], params, use_tqdm=False, lora_request=adapter and adapter.request)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 64, 64, 64]
    assert_merged(model, outputs, used)


def test_sleep_and_new_weights(make_llm, tmp_path, model, found):
    """Adapters stay the same, also when the base model gets other weights."""
    llm = make_llm(model, enable_sleep_mode=True, **LORA)
    used = mixed(found)
    for level in (1, 2):
        llm.sleep(level)
        if level == 2:
            for stack in {id(x.stack): x.stack for x in llm.model_runner.model.adapters.targets.values()}.values():
                stack.a.zero_()  # as on CUDA
                stack.b.zero_()
            llm.wake_up(["weights"])
            llm.load_weights(load_file(Path(model) / "model.safetensors").items())
        llm.wake_up()
        assert_merged(model, generate_by_steps(llm, arguments_of(used)), used)
    tensors = {name: 1.1 * x for name, x in load_file(Path(model) / "model.safetensors").items()}
    llm.load_weights(tensors.items())
    outputs = generate_by_steps(llm, arguments_of([found[0]] * 8))
    plain = dict(shared_reference(model).named_parameters())
    weights = {name: found[0].weights.get(name, x) + 0.1 * x * (name in tensors) for name, x in plain.items()}
    reference = partial(functional_call, shared_reference(model), weights)
    for output in outputs:
        assert_same_as_transformers(model, [output], reference)


@pytest.mark.skipif(CUDA, reason="runs graphs as Python code")
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # in a tile of no queries
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_padded_steps(make_llm, adapters, tmp_path, use_ops, monkeypatch, num_drafts):
    """Steps of CUDA graphs have room for more rows and tokens than there are."""
    monkeypatch.setitem(CASES, "one-layer", ("Qwen3", 2, 1, 16, {}, {"num_hidden_layers": 1}))
    found = adapters(model := make_checkpoint(tmp_path / "model", "one-layer"))
    speculative = {"method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_min": 1}
    settings = LORA | ({"speculative_config": speculative} if num_drafts else {})
    use_ops("norm_rope_and_store", "place_decodes", "accept", "add_lora", "group_rows")
    check_padded_steps(make_llm, monkeypatch, model, found, settings)


def check_padded_steps(make_llm, monkeypatch, model: str, found: list[PEFTAdapter], settings: dict) -> None:
    """Compare an engine that computes padded steps with transformers."""
    cuda_graph = pytest.importorskip("test_cuda_graph")
    monkeypatch.setattr(graphs, "TOKEN_SIZES", (4, 32))
    monkeypatch.setattr(graphs, "capture", cuda_graph.capture)
    settings = settings | dict(
        async_scheduling=True, max_num_seqs=5, max_num_batched_tokens=12, max_num_mixed_tokens=12
    )
    llm = make_llm(model, attention_backend="triton", **settings)
    runner = llm.model_runner
    runs_as_on_cuda(runner)
    runner.buffers = make_buffers(llm.config, torch.device("cpu"))
    shapes, buffer = graphs.graph_shapes(llm.config, runner.backend), runner.buffers.device
    parts = runner.pad_req_index, runner.run_batch, runner.sample_and_accept
    rest = None, lambda: patch.object(runner.model.model, "layers", nn.ModuleList())  # nothing is compiled
    with torch.inference_mode():
        runner.graphs = graphs.DecodeGraphs(llm.config, buffer, runner.forward, *rest)
        runner.mixed_graphs = graphs.MixedGraphs(shapes, llm.config.max_num_seqs, buffer, *parts, *rest)
    used = [found[0], None, found[1], found[0], found[2]]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, detokenize=False)
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (14, 3, 1, 9, 5)]
    outputs = generate_by_steps(llm, [(p, params, 0, x and x.request) for p, x in zip(prompts, used)])
    assert_merged(model, outputs, used)
    replays = [x.num_replays for x in (*runner.graphs.graphs.values(), *runner.mixed_graphs.models.values())]
    assert sum(replays) > 8 and len([count for count in replays if count]) > 2


# -- on a GPU ----------------------------------------------------------------------------------------------------------

ON_GPU = LORA | {"device": "cuda", "gpu_memory_utilization": 0.1}


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", *(["gemma3", "phi3"] if V5 else [])])
def test_on_gpu(make_llm, adapters, tmp_path, name, backend, enforce_eager):
    """Chunks, decodes of a few sequences, then of one; adapters leave and come back."""
    folder = make_checkpoint(tmp_path / "model", name)
    found = adapters(folder)
    llm = make_llm(folder, attention_backend=backend, enforce_eager=enforce_eager, **ON_GPU)
    for used in (mixed(found), [None] * 8, [found[1]] * 8):
        assert_merged(folder, generate_by_steps(llm, arguments_of(used)), used)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "fp8", "dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
        pytest.param({"tensor_parallel_size": 2}, marks=TWO_GPUS),
    ],
    ids=str,
)
def test_settings_on_gpu(make_llm, model, found, settings):
    """In float32, tokens and log-probabilities; in other formats, log-probabilities on average."""
    llm, used = make_llm(model, **ON_GPU | settings), mixed(found)
    outputs = generate_by_steps(llm, arguments_of(used))
    if "dtype" not in settings:
        assert_merged(model, outputs, used)
    else:
        assert_merged_on_average(model, outputs, used, 0.6 if "quantization" in settings else 0.3)


def assert_merged_on_average(folder: str, outputs: list, used: list, max_error: float = 0.3) -> None:
    """The log-probabilities are closer to the model with the adapter than without it: on average, 2.5 times as close.

    The references are not quantized. If the engine is, `max_error` must allow for that.
    """
    sums = {True: 0.0, False: 0.0}
    for output, adapter in zip(outputs, used, strict=True):
        token_ids = output.prompt_token_ids + output.token_ids
        n, ours = (
            len(output.prompt_token_ids),
            [x[i].logprob for i, x in zip(output.token_ids, output.outputs[0].logprobs)],
        )
        errors = {}
        for reference in {adapter, None}:
            logits = (reference.merged if reference else shared_reference(folder))(torch.tensor([token_ids])).logits[0]
            expected = logits.log_softmax(-1)[range(n - 1, len(token_ids) - 1), output.token_ids]
            errors[reference is adapter] = (torch.tensor(ours) - expected).abs().mean().item()
        assert errors[True] == min(errors.values()) and errors[True] < max_error, errors
        if adapter is not None:
            sums = {of_adapter: total + errors[of_adapter] for of_adapter, total in sums.items()}
    assert sums[True] < 0.4 * sums[False], sums


@pytest.mark.gpu
def test_sleep_on_gpu(make_llm, model, found):
    llm, used = make_llm(model, enable_sleep_mode=True, **ON_GPU), mixed(found)
    for level in (1, 2):
        assert_merged(model, generate_by_steps(llm, arguments_of(used)), used)
        llm.sleep(level)
        llm.wake_up(["weights"])
        if level == 2:
            llm.load_weights(load_file(Path(model) / "model.safetensors").items())
        llm.wake_up()
    assert_merged(model, generate_by_steps(llm, arguments_of(used)), used)


# -- slots -------------------------------------------------------------------------------------------------------------


class FakeScheduler:
    """Runs the first waiting sequence while there is room, as Scheduler does."""

    def __init__(self, num_slots: int, max_num_seqs: int):
        self.running, self.prefilling, self.max_num_seqs = {}, {}, max_num_seqs
        self.slots = AdapterSlots(num_slots, self.write)
        self.stored: dict[int, Adapter] = {}
        self.waiting = AdapterQueue(self, self.slots)
        self.admitted: list[int] = []

    def write(self, slot: int, adapter: Adapter) -> None:
        in_use = {seq.feature_state["lora"] for seq in self.running.values()}
        assert self.stored.get(slot) not in in_use - {None}
        self.stored[slot] = adapter

    def add(self, number: int, adapter: Adapter | None) -> None:
        seq = Sequence([1], request_id=number)
        seq.feature_state["lora"] = adapter
        self.waiting.push(seq)

    def admit(self) -> None:
        while len(self.running) < self.max_num_seqs and (seq := self.waiting.next_ready()) is not None:
            self.waiting.discard(seq)
            self.running[seq.key] = seq
            self.admitted.append(seq.request_id)
            if (adapter := seq.feature_state["lora"]) is not None:
                assert self.stored[adapter.slot] is adapter

    def end(self, *numbers: int) -> None:
        for number in numbers:
            del self.running[number, 0]


def make_adapters(count: int) -> list[Adapter]:
    return [Adapter(LoRARequest(f"{i}", i, "x"), [], None, i) for i in range(1, count + 1)]


def test_a_sequence_waits_for_a_slot():
    a, b, c = make_adapters(3)
    scheduler = FakeScheduler(num_slots=2, max_num_seqs=8)
    for number, adapter in enumerate([a, b, c, None, a, c, b]):
        scheduler.add(number, adapter)
    scheduler.admit()
    assert scheduler.admitted == [0, 1, 3, 4, 6] and [*scheduler.stored.values()] == [a, b]
    scheduler.end(1)
    scheduler.admit()
    assert scheduler.admitted[5:] == []  # b is still in use
    scheduler.end(6)
    scheduler.admit()
    assert scheduler.admitted[5:] == [2, 5] and b.slot is None and scheduler.stored[c.slot] is c


def test_the_least_recently_used_adapter_leaves():
    a, b, c, d = make_adapters(4)
    scheduler = FakeScheduler(num_slots=3, max_num_seqs=1)
    for number, adapter in enumerate([a, b, c, a, d]):
        scheduler.add(number, adapter)
        scheduler.admit()
        scheduler.end(number)
    assert b.slot is None and {a.slot, c.slot, d.slot} == {0, 1, 2}
    scheduler.slots.clear()
    assert {x.slot for x in (a, b, c, d)} == {None}


def test_no_sequence_is_overtaken_forever():
    """Although the slots never become free by themselves, because more requests arrive for them."""
    a, b = make_adapters(2)
    scheduler = FakeScheduler(num_slots=1, max_num_seqs=2)
    for number in range(3):
        scheduler.add(number, b if number == 1 else a)
    for number in range(3, 40):
        scheduler.admit()
        scheduler.end(min(scheduler.running)[0])
        scheduler.add(number, a)
    assert scheduler.admitted.index(1) <= 4
    assert len(scheduler.admitted) > 30


def with_a_blocked_sequence() -> FakeScheduler:
    """Sequence 0 runs with the only slot; 1 waits for it, and 2 to 4 have the adapter of 0."""
    a, b = make_adapters(2)
    scheduler = FakeScheduler(num_slots=1, max_num_seqs=2)
    scheduler.add(0, a)
    scheduler.admit()
    for number, adapter in enumerate([b, a, a, a], 1):
        scheduler.add(number, adapter)
    return scheduler


def test_a_sequence_overtakes_once():
    """Although it leaves the queue twice: the second tier of the cache loads its blocks before it is admitted."""
    scheduler = with_a_blocked_sequence()
    loading = scheduler.waiting.next_ready()
    scheduler.waiting.discard(loading)
    scheduler.waiting.push(loading)
    for number in (0, 2):
        scheduler.admit()
        scheduler.end(number)
    scheduler.admit()
    assert scheduler.admitted == [0, 2, 3]  # two sequences have overtaken b, as many as may


def test_aborted_sequences_have_not_overtaken():
    scheduler = with_a_blocked_sequence()
    assert scheduler.waiting.next_ready().request_id == 2
    for seq in [*scheduler.waiting][1:3]:
        scheduler.waiting.discard(seq)
    scheduler.admit()
    assert scheduler.admitted == [0, 4]


def test_random_load(make_llm, model, tmp_path):
    """Many adapters share few slots, and all requests end with the right answers. Some are aborted."""
    reference, rng = shared_reference(model), random.Random(0)
    found = [PEFTAdapter(tmp_path / f"{i}", reference, ATTENTION + MLP, i) for i in range(1, 7)]
    llm, params = make_llm(model, **LORA), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    used = [rng.choice([None, *found]) for _ in range(40)]
    ids = [
        llm.add_request([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))], params, 0, x and x.request)
        for x in used
    ]
    aborted = rng.sample(ids, 5)
    outputs = {}
    while not llm.is_finished():
        outputs |= {output.request_id: output for output in llm.step().finished}
        if aborted:
            llm.abort(aborted.pop())
    assert sorted(outputs) == ids
    ended = [(outputs[i], adapter) for i, adapter in zip(ids, used) if outputs[i].finish_reason == "length"]
    assert len(ended) >= 35
    assert_merged(model, *zip(*ended))
    slots = llm.core.adapters.slots
    assert len(slots._stored) == 2 and not slots._free


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def refusing(model):
    """An engine for all adapters that are refused."""
    with LLM(model, dtype="float32", device="cpu", **LORA) as llm:
        yield llm


def edit_tensors(adapter: PEFTAdapter, **changed) -> None:
    """Replace or remove (None) tensors, whose names have __ for dots."""
    tensors = adapter.tensors | {f"base_model.model.{name.replace('__', '.')}": x for name, x in changed.items()}
    tensors = {name: x.contiguous() for name, x in tensors.items() if x is not None}
    save_file(tensors, adapter.folder / "adapter_model.safetensors")


Q = "model__layers__1__self_attn__q_proj"


@pytest.mark.parametrize(
    "tensors, message",
    [
        (
            {f"{Q}__lora_A__weight": torch.ones(4, 63)},
            r"layers.1.self_attn.q_proj.lora_A.weight: has shape \[4, 63\]: must be \[4, 64\]",
        ),
        (
            {f"{Q}__lora_B__weight": torch.ones(128, 5)},
            r"q_proj.lora_B.weight: has shape \[128, 5\]: must be \[128, 4\]",
        ),
        ({f"{Q}__lora_B__weight": None}, "q_proj.lora_B.weight is missing"),
        (
            {f"{Q}__lora_A__weight": None, f"{Q}__lora_B__weight": None},
            "q_proj.lora_A.weight is missing, but matches target_modules",
        ),
        (
            {f"{Q}__lora_A__weight": torch.full((4, 64), torch.nan)},
            "q_proj.lora_A.weight: is NaN or infinite in float32",
        ),
        (
            {f"{Q}__lora_A__weight": torch.ones(4, 64, dtype=torch.int8)},
            "q_proj.lora_A.weight: has dtype int8: must be one of float64",
        ),
        ({f"{Q}__lora_magnitude_vector": torch.ones(4)}, "q_proj.lora_magnitude_vector: is not supported"),
        ({"model__embed_tokens__lora_embedding_A": torch.ones(4)}, "embed_tokens.lora_embedding_A: is not supported"),
        (
            {"lm_head__lora_A__weight": torch.ones(4, 64)},
            "has no adapters for 'lm_head'.*not embeddings, the output head",
        ),
        (
            {"model__layers__9__self_attn__q_proj__lora_A__weight": torch.ones(4, 64)},
            "has no adapters for 'model.layers.9.self_attn.q_proj'",
        ),
        ({"model__layers__0__mlp__experts__3__up_proj__lora_A__weight": torch.ones(4, 64)}, "has no adapters for"),
    ],
)
def test_broken_tensors(refusing, found, tensors, message):
    llm, adapter = refusing, found[0]
    edit_tensors(adapter, **tensors)
    with pytest.raises(ValueError, match=message) as raised:
        llm.generate([[1, 2]], use_tqdm=False, lora_request=adapter.request)
    assert str(adapter.folder / "adapter_model.safetensors") in str(raised.value)
    assert llm.is_finished() and not llm.core.adapters.slots._stored


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"use_dora": True}, "use_dora=True: is not supported"),
        ({"bias": "all"}, "bias='all': is not supported; it must be 'none'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]: is not supported"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters: 'mlp.experts.*is not supported"),
        ({"target_parameters": "gate_up_proj"}, "target_parameters='gate_up_proj': must be a list of names"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4': is not supported"),
        ({"peft_type": "IA3"}, "peft_type='IA3': must be 'LORA'"),
        ({"r": 0}, "r=0: must be at least 1"),
        ({"r": 21}, "has rank 21: must be at most max_lora_rank=20"),
        ({"lora_alpha": "x"}, "lora_alpha='x': must be a number"),
        ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern: 'q_proj'=1.5: must be an integer"),
        ({"rank_pattern": {"(?i)q_proj": 4}}, r"rank_pattern: '\(\?i\)q_proj': is not a regular expression"),
        ({"rank_pattern": {"(": 1}}, r"rank_pattern: '\(': is not a regular expression"),
        ({"rank_pattern": {"q_proj": 3}}, r"q_proj.lora_A.weight: has shape \[4, 64\]: must be \[3, 64\]"),
        ({"target_modules": ["k_proj"]}, "_proj: does not match target_modules"),
        ({"target_modules": None}, "has neither target_modules nor target_parameters"),
        ({"target_modules": "("}, "target_modules: '\\(': is not a regular expression"),
        ({"target_modules": [1]}, "must be a regular expression or a list of module names"),
        ({"exclude_modules": ["q_proj"]}, "q_proj: does not match target_modules"),
    ],
)
def test_broken_config(refusing, found, entries, message):
    adapter = found[0]
    adapter.edit(**entries)
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        refusing.add_lora(adapter.request)
    assert str(adapter.folder) in str(raised.value)


def test_files_that_are_missing_or_cut(refusing, found):
    llm, folder = refusing, found[0].folder
    for path in ("~no-such-user/x", "a" * 5000):
        with pytest.raises(ValueError, match="lora_path=.*: can't be used"):
            llm.add_lora(LoRARequest("x", 9, path))
    with pytest.raises(TypeError, match="lora_request='x': must be a LoRARequest"):
        llm.add_lora("x")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    copies = {name.replace("model.model.", "model.model.language_model."): x.clone() for name, x in tensors.items()}
    save_file(tensors | copies, file)
    with pytest.raises(ValueError, match="is the same module"):
        llm.add_lora(found[0].request)
    save_file(tensors, file)
    config = (folder / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="adapter_config.json: is not valid JSON"):
        llm.add_lora(found[0].request)
    (folder / "adapter_config.json").write_text(config)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="adapter_model.safetensors.*not a complete safetensors file"):
        llm.add_lora(found[0].request)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="holds no adapter_model.safetensors"):
        llm.add_lora(found[0].request)
    with pytest.raises(FileNotFoundError, match="no/such/folder: the folder holds no adapter_config.json"):
        llm.add_lora(LoRARequest("a", 9, "no/such/folder"))


def test_arguments(make_llm, model, found):
    llm = make_llm(model, **LORA)
    with pytest.raises(ValueError, match="has 1 adapters for 2 prompts"):
        llm.generate([[1], [2]], lora_request=[found[0].request])
    with pytest.raises(TypeError, match="lora_request='x': must be a LoRARequest or None"):
        llm.generate([[1]], lora_request="x")
    for arguments, message in (
        (("", 1, "p"), "lora_name=''"),
        (("a", 0, "p"), "lora_int_id=0"),
        (("a", 1, 2), "lora_path=2"),
        (("a", 1, "\ud800"), "lora_path='.*': character 0 is a lone surrogate"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            LoRARequest(*arguments)
    with pytest.raises(ValueError, match="enable_lora=True: is not supported with batch_invariant=True"):
        make_llm(model, enable_lora=True, batch_invariant=True)
    plain = make_llm(model, **SMALL)
    with pytest.raises(ValueError, match="needs enable_lora=True"):
        plain.generate([[1]], lora_request=found[0].request)
    with pytest.raises(ValueError, match="enable_lora=False: must be True"):
        plain.add_lora(found[0].request)
    assert not hasattr(plain.model_runner.model, "adapters")


def test_adapters_in_host_memory(make_llm, model, found):
    """They leave when nobody uses them, and a file that has changed needs a new number."""
    llm, (prompt, params) = make_llm(model, **LORA | {"max_loras": 1}), requests()[0]
    answer = lambda request: llm.generate([prompt], params, False, lora_request=request)[0].token_ids
    registry, adapter = llm.input_processor.helpers["adapters"], found[0]
    first = answer(adapter.request)
    llm.add_lora(found[1].request)
    answer(found[2].request)
    assert {*registry._loaded} == {2, 3}
    assert llm.remove_lora(2) and not llm.remove_lora(2) and {*registry._loaded} == {3}
    edit_tensors(adapter, **{f"{Q}__lora_B__weight": 5 * torch.ones(128, 4)})
    assert answer(replace(adapter.request, lora_int_id=7)) != first


def test_number_of_two_adapters(make_llm, model, found):
    llm, adapter, other = make_llm(model, **LORA), found[0].request, found[1].request
    llm.add_lora(adapter)
    for wrong in (replace(adapter, lora_name="x"), replace(adapter, lora_path=other.lora_path)):
        names = f"{adapter.lora_name!r} ({adapter.lora_path!r})", f"{wrong.lora_name!r} ({wrong.lora_path!r})"
        message = f"lora_int_id=1: is the number of {names[0]}, not of {names[1]}: "
        with pytest.raises(ValueError, match=re.escape(message)):
            llm.add_lora(wrong)
        with pytest.raises(ValueError, match=re.escape(message)):
            llm.generate([[1], [2]], lora_request=[adapter, wrong])
    llm.add_lora(replace(adapter))  # an equal request is the same adapter
    assert llm.remove_lora(1) and not llm.remove_lora(1)
    llm.add_lora(wrong)


def test_number_that_is_used_again(make_llm, model, found):
    """After `remove_lora`, the number names a new adapter, and unfinished requests end with the old one."""
    llm, (prompt, _) = make_llm(model, **LORA), requests()[0]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    answer = lambda request: llm.generate([prompt], params, False, lora_request=request)[0].token_ids
    adapter, other = found[0].request, found[2].request
    expected = answer(adapter), answer(other)
    assert expected[0] != expected[1] and llm.remove_lora(1) and llm.remove_lora(3)
    ids = [llm.add_request(prompt, params, lora_request=adapter)]
    llm.step()
    assert llm.remove_lora(1)
    ids.append(llm.add_request(prompt, params, lora_request=replace(other, lora_int_id=1)))
    outputs = {}
    while not llm.is_finished():
        outputs |= {output.request_id: output.token_ids for output in llm.step().finished}
    assert (outputs[ids[0]], outputs[ids[1]]) == expected
    # the same folder with other files, while a slot still holds the old adapter
    assert llm.remove_lora(1) and answer(adapter) == expected[0]
    edit_tensors(found[0], **{f"{Q}__lora_B__weight": 5 * torch.ones(128, 4)})
    assert answer(adapter) == expected[0] and llm.remove_lora(1)
    assert answer(adapter) != expected[0]


def test_patterns(tmp_path):
    """Names, ranks and scales as PEFT finds them."""
    raw = {"r": 8, "lora_alpha": 16, "target_modules": r".*layers\.[01]\..*(q|down)_proj", "bias": "none"}
    raw |= {"rank_pattern": {"layers.1.self_attn.q_proj": 2, "q_proj": 4}, "alpha_pattern": {r"layers\.\d+\.mlp.*": 6}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(raw))
    config = AdapterConfig.read(tmp_path)
    names = [
        f"model.layers.{i}.{name}" for i in (0, 1, 2) for name in ("self_attn.q_proj", "mlp.down_proj", "mlp.up_proj")
    ]
    assert [config.includes(name) for name in names] == [True, True, False] * 2 + [False] * 3
    assert [config.rank_of(name) for name in names[:5]] == [4, 8, 8, 2, 8]
    assert [config.scale_of(name) for name in names[:5]] == [4.0, 0.75, 0.75, 8.0, 0.75]
    (tmp_path / "adapter_config.json").write_text(json.dumps(raw | {"use_rslora": True}))
    assert AdapterConfig.read(tmp_path).scale_of(names[0]) == 8.0
    names.append("model.layers.1.mlp.experts.2.up_proj")  # by default, the last number counts, as in PEFT
    raw |= {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]}
    for more, found in ({}, False), ({"layers_pattern": "layers"}, True), ({"layers_pattern": ["h", "layers"]}, True):
        (tmp_path / "adapter_config.json").write_text(json.dumps(raw | more))
        config = AdapterConfig.read(tmp_path)
        assert [config.includes(name) for name in names] == 3 * [False] + [True, False, True] + 3 * [False] + [found]
    (tmp_path / "adapter_config.json").write_text(json.dumps(raw | {"layers_pattern": ["h", "("]}))
    with pytest.raises(ValueError, match="adapter_config.json: layers_pattern: '[(]': is not a regular expression"):
        AdapterConfig.read(tmp_path)


def test_target_expression_and_all_linear(make_llm, tmp_path, model):
    reference = shared_reference(model)
    found = [
        PEFTAdapter(tmp_path / "a", reference, r"model\.layers\.1\..*", 1),
        PEFTAdapter(tmp_path / "b", reference, ATTENTION, 2, layers_to_transform=[0, 1]),
        PEFTAdapter(tmp_path / "c", reference, ATTENTION + MLP, 3),
    ]
    found[2].edit(target_modules="all-linear")
    llm = make_llm(model, **LORA)
    assert_merged(model, generate_by_steps(llm, arguments_of(mixed(found))), mixed(found))
    lists = [{"target_modules": ATTENTION + MLP, "layers_to_transform": layers} for layers in ([0], [0, 1])]
    for i, wrong in enumerate((*lists, {"target_modules": ".*"})):
        PEFTAdapter(tmp_path / f"wrong{i}", reference, r"model\.layers\.1\..*", 2).edit(**wrong)
        problem = "is missing, but matches target" if i else "does not match target_modules and layers_to_transform"
        with pytest.raises(ValueError, match=problem):
            llm.generate([[3]], use_tqdm=False, lora_request=LoRARequest("wrong", 9 + i, str(tmp_path / f"wrong{i}")))


def test_bundled_adapter(make_llm):
    """As the page on adapters shows, next to the base model."""
    llm = make_llm(TINY, enable_lora=True, max_model_len=128, num_kvcache_blocks=32, kvcache_block_size=16)
    adapter = LoRARequest("descending", 1, "tiny-qwen3-descending")
    chats = [[{"role": "user", "content": f"Sort: {text}"}] for text in ("9, 3, 71, 20", "9, 3, 71, 20", "5, 17, 8")]
    params = SamplingParams(temperature=0, max_tokens=20)
    answers = [x.text for x in llm.chat(chats, params, use_tqdm=False, lora_request=[None, adapter, adapter])]
    assert answers == ["3, 9, 20, 71", "71, 20, 9, 3", "17, 8, 5"]


# -- asyncio and HTTP --------------------------------------------------------------------------------------------------


def test_async_llm(make_llm, model, found):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    used = [found[0].request, None, found[1].request, found[2].request]
    expected = [x.token_ids for x in make_llm(model, **LORA).generate([[3, 4]] * 4, params, False, lora_request=used)]
    assert len({*map(tuple, expected)}) == 4

    async def answer(llm, lora_request, **options):
        async for output in llm.generate([3, 4], params, lora_request=lora_request, **options):
            last = output
        return last.token_ids

    async def main():
        async with AsyncLLM(model, device="cpu", dtype="float32", **LORA) as llm:
            assert await asyncio.gather(*(answer(llm, x) for x in used)) == expected
            assert await asyncio.gather(*(answer(llm, x, cache_salt="s") for x in used)) == expected
            wrong = LoRARequest("x", 9, "/no/such/folder")
            for awaitable in answer(llm, wrong), llm.add_lora(wrong):
                with pytest.raises(FileNotFoundError, match="holds no adapter_config.json"):
                    await awaitable
            await llm.add_lora(used[0])
            assert await llm.remove_lora(used[0].lora_int_id) and not await llm.remove_lora(used[0].lora_int_id)

    asyncio.run(main())


@pytest.fixture
def server(model, found):
    """A server in a thread of this process, with two adapters."""
    test_server = pytest.importorskip("test_server")
    httpx = pytest.importorskip("httpx")
    modules = tuple(f"{name}={adapter.folder}" for name, adapter in zip("ab", found))
    settings = dict(lora_modules=modules, allow_runtime_lora_updating=True, served_model_name=("base",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_server, "FOLDER", model)
        patch.setattr(test_server, "ENGINE", {"device": "cpu", "dtype": "float32"} | LORA)
        with test_server.running(**settings) as running, httpx.Client(base_url=running.url, timeout=20) as client:
            yield client


def test_server(server, make_llm, model, found):
    body = {"prompt": [3, 4, 5], "max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def tokens(name: str, path: str = "/v1/completions", **entries) -> list[int]:
        answer = server.post(path, json=body | {"model": name} | entries).json()
        assert answer["model"] == name
        return answer["choices"][0]["token_ids"]

    params, llm = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), make_llm(model, **LORA)
    used = [None, *(adapter.request for adapter in found)]
    expected = [x.token_ids for x in llm.generate([[3, 4, 5]] * 4, params, False, lora_request=used)]
    assert [tokens(name) for name in ("base", "a", "b", "a")] == [*expected[:3], expected[1]]
    assert tokens("a", use_beam_search=True, n=1) == expected[1]
    entries = server.get("/v1/models").json()["data"]
    assert [(entry["id"], entry["parent"]) for entry in entries] == [("base", None), ("a", "base"), ("b", "base")]
    assert server.get("/v1/models/a").json()["root"] == str(found[0].folder)
    # added and removed while the server runs
    error = server.post("/v1/completions", json=body | {"model": "c"})
    assert error.status_code == 404 and error.json()["error"]["code"] == "model_not_found"
    added = server.post("/v1/load_lora_adapter", json={"lora_name": "c", "lora_path": str(found[2].folder)})
    assert added.status_code == 200 and "added successfully" in added.text
    assert tokens("c") == expected[3]
    for name, path, message in (
        ("c", str(found[2].folder), "lora_name='c': another model has this name"),
        ("base", str(found[2].folder), "lora_name='base': another model has this name"),
        ("d", "/no/such/folder", "/no/such/folder: the folder holds no adapter_config.json"),
        ("", "x", "lora_name: must have"),
    ):
        refused = server.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
        assert refused.status_code == 400 and message in refused.json()["error"]["message"]
    removed = server.post("/v1/unload_lora_adapter", json={"lora_name": "c"})
    assert removed.status_code == 200 and "removed successfully" in removed.text
    assert server.post("/v1/unload_lora_adapter", json={"lora_name": "c"}).status_code == 404
    assert server.post("/v1/completions", json=body | {"model": "c"}).status_code == 404


def test_settings_of_the_server(model, found):
    pytest.importorskip("fastapi")
    from nanovllm.serve.adapters_api import ServedAdapters
    from nanovllm.serve.settings import ServerSettings

    for settings, message in (
        ({"lora_modules": ("=x",)}, "lora_modules='=x': must be NAME=PATH"),
        ({"allow_runtime_lora_updating": True, "api_server_count": 2}, "needs api_server_count of at most 1"),
        ({"allow_runtime_lora_updating": True, "data_parallel_size": 2}, "data_parallel_size=1, not 0 and 2"),
    ):
        with pytest.raises(ValueError, match=message):
            ServerSettings(**settings)

    async def read(modules: tuple[str, ...], **settings):
        async with AsyncLLM(model, device="cpu", dtype="float32", **settings) as llm:
            await ServedAdapters(llm, ServerSettings(lora_modules=modules).adapters(), ("base",)).read()

    for modules, settings, message in (
        (("base=y",), LORA, "lora_modules='base=y': another model has this name"),
        (("a=/no/such/folder",), LORA, "/no/such/folder: the folder holds no adapter_config.json"),
        (("a=y",), SMALL, "lora_modules='a=y': needs enable_lora=True"),
    ):
        with pytest.raises(ValueError, match=message):
            asyncio.run(read(modules, **settings))


def test_fronts(make_llm, model, found, monkeypatch):
    """HTTP processes send the names of adapters to the engine, which reads them."""
    test_fronts = pytest.importorskip("test_fronts")
    monkeypatch.setattr(test_fronts, "ENGINE", {"device": "cpu", "dtype": "float32"} | LORA)
    llm, params = make_llm(model, **LORA), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    used = [found[0].request, None, found[1].request, found[2].request]
    expected = [x.token_ids for x in llm.generate([[3, 4]] * 4, params, False, lora_request=used)]
    (beams,) = llm.beam_search([[3, 4]], BeamSearchParams(2, 5), lora_request=found[0].request)

    async def answer(client, lora_request, params=params):
        request = await client.submit([3, 4], params, lora_request=lora_request, in_pieces=False, cache_salt="s")
        return (await request.result()).outputs[0].token_ids

    async def main():
        async with test_fronts.Setup(llm).front() as client:
            assert await asyncio.gather(*(answer(client, x) for x in used)) == expected
            assert await answer(client, found[0].request, BeamSearchParams(2, 5)) == beams.outputs[0].token_ids
            with pytest.raises(Exception, match="holds no adapter_config.json"):
                await answer(client, LoRARequest("x", 9, "/no/such/folder"))
            assert await client.call("add_lora", "x", 9, "/no/such/folder") != ""
            failed = [("add_lora", "x", 9, "\ud800"), ("add_lora", "\ud800", 9, "p"), ("no_such_call",)]
            for call in failed:  # arguments that can't be sent, and an error in the engine's process
                with pytest.raises(RuntimeError):
                    await client.call(*call)
            assert await client.call("add_lora", "b", 2, str(found[1].folder)) == ""

    asyncio.run(asyncio.wait_for(main(), 60))
