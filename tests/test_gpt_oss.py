"""gpt-oss as it is published, with experts in MXFP4, against transformers with the weights that they mean.

test_models.py has the checkpoints without quantization.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from common import CUDA, generate_by_steps
from safetensors.torch import load_file, save_file
from test_models import (
    CASES,
    GPT_OSS,
    SMALL,
    YARN,
    assert_same_as_transformers,
    edit,
    logits_of_rank,
    make_checkpoint,
    needs_new_families,
    reference_model,
    requests,
)
from test_packed import write_mxfp4
from test_quantization import short_requests

from nanovllm import SamplingParams

pytestmark = needs_new_families
# no size is a multiple of 128, and two ranks have whole groups of 32 inputs
SIZES = {"hidden_size": 160, "intermediate_size": 192}
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def write(monkeypatch, folder: Path, **entries) -> tuple[str, str]:
    """Folders with a checkpoint as it is published, and with the weights that it means in float32."""
    case = ("GptOss", 4, 2, 32, YARN | {"truncate": False}, GPT_OSS | SIZES | entries)
    monkeypatch.setitem(CASES, "gpt-oss in 4 bits", case)
    packed, plain = (make_checkpoint(folder / name, "gpt-oss in 4 bits") for name in ("packed", "plain"))
    stored, meant = {}, {}
    for name, weight in load_file(Path(plain) / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = meant[name] = weight
            continue
        written = [write_mxfp4(matrix.t().contiguous(), 32) for matrix in weight]  # transformers' are transposed
        blocks, scales = (torch.stack([x[key] for x, _ in written]) for key in ("weight_packed", "weight_scale"))
        stored |= {f"{name}_blocks": blocks.unflatten(-1, (-1, 16)), f"{name}_scales": scales}
        meant[name] = torch.stack([matrix.t() for _, matrix in written]).contiguous()
    save_file(stored, Path(packed) / "model.safetensors")
    save_file(meant, Path(plain) / "model.safetensors", metadata={"format": "pt"})
    edit(packed, quantization_config=CONFIG)
    return packed, plain


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return write(monkeypatch, tmp_path_factory.mktemp("gpt-oss"))


SCHEDULES = {
    "chunks and prefix hits": {},
    "preemption": dict(num_kvcache_blocks=10, max_num_batched_tokens=64),
    "drafts": dict(speculative_config={"method": "ngram", "num_speculative_tokens": 3}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_parity(make_llm, folders, name):
    """Prompts of up to 70 tokens and windows of 23."""
    llm = make_llm(folders[0], **SMALL | SCHEDULES[name])
    prompts = requests()
    if name == "preemption":
        prompts = [(prompt[:20], replace(params, max_tokens=28)) for prompt, params in prompts[2:]]
    assert_same_as_transformers(folders[1], generate_by_steps(llm, prompts), error=1e-4)
    if name == "preemption":
        assert llm.stats()["preemptions"] > 0
    (several,) = llm.generate([requests()[0][0]], SamplingParams(n=3, max_tokens=4, seed=1), use_tqdm=False)
    (alone,) = llm.generate([requests()[0][0]], SamplingParams(max_tokens=4, seed=1), use_tqdm=False)
    assert several.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("size, options", [(2, {}), (4, {"expert_parallel": True})])
def test_ranks(folders, tmp_path, size, options):
    (prompt, _), *_ = requests()
    expected = reference_model(folders[1])(torch.tensor([prompt])).logits[0]
    work = partial(logits_of_rank, size=size, folder=folders[0], store=tmp_path, prompt=prompt, **options)
    with ThreadPoolExecutor(size) as pool:
        for logits in pool.map(work, range(size)):
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("forked_ranks")
def test_too_many_ranks(monkeypatch, make_llm, tmp_path):
    """An expert of 2,880 inputs has 90 groups of 32, which four ranks can't share. It is refused before ranks start."""
    packed, _ = write(monkeypatch, tmp_path, intermediate_size=160)
    with pytest.raises(ValueError, match=r"inputs 0 to 79 of 160.* groups of 32: use fewer ranks, or expert_parallel"):
        make_llm(packed, tensor_parallel_size=2, **SMALL)


def test_dummy_weights(make_llm, folders):
    """Codes, biases and sinks are random, as a benchmark needs them."""
    llm = make_llm(folders[0], load_format="dummy", **SMALL)
    (layer, *_), generated = llm.model_runner.model.model.layers, generate_by_steps(llm, requests()[:2])
    experts = layer.mlp.experts
    weight = experts.format.weight(experts, "gate_up_proj", 3, torch.float32)
    assert len(weight.unique()) > 12 and experts.down_proj_bias.std() > 0 and layer.self_attn.attn.sinks.std() > 0
    assert all(len(output["token_ids"]) == 5 for output in generated)


def test_new_weights(make_llm, folders):
    """From 16-bit weights in transformers' layout, as a trainer has them, after `sleep`."""
    _, plain = folders
    llm = make_llm(plain, load_format="dummy", enable_sleep_mode=True, **SMALL)
    llm.sleep(level=2)
    llm.wake_up()
    llm.load_weights(load_file(Path(plain) / "model.safetensors").items())
    assert_same_as_transformers(plain, generate_by_steps(llm, requests()[:3]))


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_quantized_on_load(make_llm, folders, quantization):
    """Rounded weights are close to those of the checkpoint."""
    rounded, plain = (
        make_llm(folders[1], quantization=name, **SMALL).model_runner.model.model.layers[1].mlp.experts
        for name in (quantization, None)
    )
    assert not plain.format.is_scaled and (rounded.format.is_scaled or rounded.format.is_packed)
    for name in ("gate_up_proj", "down_proj"):
        expected, found = (x.format.weight(x, name, 5, torch.float32) for x in (plain, rounded))
        torch.testing.assert_close(found, expected, rtol=0.07, atol=0.05 * expected.abs().max().item())


@pytest.mark.skipif(CUDA, reason="runs kernels in Triton's interpreter")
def test_parity_on_kernels(monkeypatch, use_ops, make_llm, tmp_path):
    """Chunks, several decodes and a single one; with half of the experts, as each takes programs of its own."""
    pytest.importorskip("triton")
    packed, plain = write(monkeypatch, tmp_path, num_local_experts=4, num_experts_per_tok=2)
    use_ops()
    llm = make_llm(packed, attention_backend="triton", **SMALL | dict(max_num_batched_tokens=14))
    assert_same_as_transformers(plain, generate_by_steps(llm, short_requests((14, 2), (1, 2), (3, 3))))


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_parity_on_a_gpu(make_llm, folders, enforce_eager):
    """In float32, with the kernels of MXFP4 experts in CUDA graphs."""
    settings = dict(device="cuda", enforce_eager=enforce_eager, gpu_memory_utilization=0.1)
    llm = make_llm(folders[0], **SMALL | settings)
    assert_same_as_transformers(folders[1], generate_by_steps(llm, requests()))
