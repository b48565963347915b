"""Hybrid models: the gated delta rule, and families with it in small random models that transformers has made."""

import random
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from conftest import TINY, generate_by_steps
from test_states import assert_same_as_reference, poison

from nanovllm import SamplingParams
from nanovllm.layers.gated_delta_net import chunk_delta_rule, recurrent_delta_rule

qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
pytest.importorskip("transformers.models.qwen3_5_moe", reason="transformers 4 does not have Qwen3.5")

KINDS = ["linear_attention", "linear_attention", "full_attention"]
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=40)
ROPE = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}
# family, layers, attention heads, key-value heads, head_dim; heads of the delta rule; other entries
CASES = {
    "qwen3_next": ("Qwen3Next", KINDS, (4, 2, 32), (4, 8, 16, 24), EXPERTS | {"norm_topk_prob": True}),
    "qwen3_next-dense-layer": ("Qwen3Next", KINDS[1:], (4, 2, 32), (2, 2, 16, 16), EXPERTS | {"mlp_only_layers": [0]}),
    "qwen3_5": ("Qwen3_5", KINDS, (4, 2, 256), (2, 6, 16, 24), {}),
    "qwen3_5-tied": ("Qwen3_5", KINDS[1:], (2, 1, 32), (4, 4, 24, 8), {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5Moe", KINDS[::-1], (4, 1, 32), (4, 8, 16, 24), EXPERTS),
}
VISION = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=64, patch_size=4)
SETTINGS = dict(max_model_len=352, kvcache_block_size=16, num_kvcache_blocks=120, max_num_seqs=8)
SCHEDULES = {
    "at once": {},
    "chunks": dict(max_num_batched_tokens=50, max_num_mixed_tokens=30),
    "preemptions": dict(num_kvcache_blocks=24),
    "one at a time": dict(max_num_seqs=1, num_kvcache_blocks=23),
    "without prefix cache": dict(enable_prefix_caching=False),
}


def make_checkpoint(folder: Path, name: str, is_whole: bool = False) -> str:
    """Save a model of transformers with random weights, and the bundled tokenizer; whole ones have a vision part."""
    family, layer_types, (heads, kv_heads, head_dim), delta_heads, entries = CASES[name]
    rope = ROPE | ({"mrope_section": [head_dim // 8 - 2, 1, 1], "mrope_interleaved": True} if "5" in family else {})
    names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"
    entries = entries | {f"linear_{name}": size for name, size in zip(names, delta_heads)}
    shape = dict(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
        rope_parameters=rope,
        eos_token_id=None,
        **({} if family == "Qwen3_5Moe" else {"intermediate_size": 96}),
    )
    if is_whole:
        vision = VISION | {"num_position_embeddings": 16}
        config = getattr(transformers, f"{family}Config")(text_config=shape | entries, vision_config=vision)
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    else:
        config = getattr(transformers, f"{family}Config" if family == "Qwen3Next" else f"{family}TextConfig")
        model = getattr(transformers, f"{family}ForCausalLM")(config(**shape, **entries))
    generator = torch.Generator().manual_seed(len(name))
    for parameter_name, parameter in model.float().named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "embed" in parameter_name or "lm_head" in parameter_name:
            parameter.copy_(0.3 * noise)
        elif "conv1d" in parameter_name:
            parameter.copy_(0.6 * noise)
        elif parameter.dim() > 1:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        elif parameter_name.endswith("A_log"):  # some heads forget within tokens, and some hardly ever
            parameter.copy_(1.5 * noise - 2)
        else:
            parameter.add_(0.3 * noise)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(TINY) / file, folder)
    return str(folder)


class Checkpoints:
    """Folders, and transformers' log-probabilities of what follows each token, by the name of the case."""

    def __init__(self, folder: Path):
        self.root = folder
        self.folder = cache(self.folder)
        self.model = cache(self.model)

    def folder(self, name: str) -> str:
        return make_checkpoint(self.root / name, name.removesuffix("-whole"), name.endswith("-whole"))

    def model(self, name: str):
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder(name), dtype=torch.float32)
        return cache(lambda *token_ids: model.eval()(torch.tensor([token_ids])).logits[0].log_softmax(-1))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture
def make_hybrid(make_llm, checkpoints):
    return lambda name, **settings: poison(make_llm(checkpoints.folder(name), **SETTINGS | settings))


def make_requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts end before, at and behind the ends of blocks and chunks; some begin with those of others."""
    rng = random.Random(0)
    ids = lambda n: [rng.randrange(5, 500) for _ in range(n)]
    shared = ids(140)
    prompts = [ids(n) for n in (1, 2, 3, 16, 63, 64, 65)] + [ids(300), shared, shared[:70] + ids(9), shared + ids(20)]
    kinds = [{}, {"n": 3}, {"prompt_logprobs": 0}, {"temperature": 0.0}, {"presence_penalty": 0.5}]
    options = dict(ignore_eos=True, logprobs=0, detokenize=False)
    return [
        (prompt, SamplingParams(**{"temperature": 1.0, "seed": i, "max_tokens": 2 + 5 * i % 23, **options, **kind}))
        for i, (prompt, kind) in enumerate(zip(prompts, 3 * kinds))
    ]


# -- the rule ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 5, 63, 64, 65, 130])
def test_delta_rule(num_tokens):
    """Recurrent and in chunks, from a state on, it is the same as transformers' two."""
    generator = torch.Generator().manual_seed(num_tokens)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    heads, key_dim, value_dim = 3, 16, 24
    q, k = (torch.nn.functional.normalize(draw(num_tokens, heads, key_dim), dim=-1) for _ in range(2))
    v, log_decay = draw(num_tokens, heads, value_dim), -draw(num_tokens, heads).exp() * torch.tensor([0.01, 0.3, 5.0])
    beta, state = draw(num_tokens, heads).sigmoid(), draw(heads, value_dim, key_dim)
    expected = recurrent_delta_rule(q, k, v, log_decay, beta, state)
    for found, wanted in zip(chunk_delta_rule(q, k, v, log_decay, beta, state), expected):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)
    inputs = [x[None] for x in (q * key_dim**0.5, k, v, log_decay, beta)]
    for rule in (qwen3_next.torch_chunk_gated_delta_rule, qwen3_next.torch_recurrent_gated_delta_rule):
        out, after = rule(*inputs, initial_state=state.mT[None], output_final_state=True)
        torch.testing.assert_close(out[0], expected[0], rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(after[0].mT, expected[1], rtol=1e-5, atol=2e-5)


# -- the families ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CASES, "qwen3_5-whole", "qwen3_5-tied-whole", "qwen3_5_moe-whole"])
def test_parity(make_hybrid, checkpoints, name):
    """In chunks, beside decodes, and with hits of the prefix cache."""
    llm = make_hybrid(name, **SCHEDULES["chunks"])
    outputs = generate_by_steps(llm, make_requests())
    assert_same_as_reference(checkpoints.model(name), outputs)
    assert len({token_id for output in outputs for token_id in output.outputs[0].token_ids}) > 12
