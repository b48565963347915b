"""Every family, in small random models that transformers has made: the same tokens and log-probabilities.

The reference is transformers' own class in float32, in one forward pass over a prompt and its answer.
"""

import json
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F
import transformers
from common import TINY, generate_by_steps
from safetensors.torch import load_file, save_file
from torch import nn

from nanovllm import SamplingParams
from nanovllm.cache.kv_cache import KVCache
from nanovllm.config import Config
from nanovllm.layers.attention import Attention
from nanovllm.models import ModelConfig, make_model
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.qwen2 import Qwen2ForCausalLM
from nanovllm.models.shared.windows import fields_of_sizes
from nanovllm.utils.context import Context, attention_context
from nanovllm.utils.families import MODELS
from nanovllm.utils.loader import load_model
from nanovllm.utils.tensor_parallel import TensorParallel

MARGIN = 2e-4  # of logits: a smaller lead than this is a tie, and either token is right
VOCAB_SIZE = 512
MAX_LEN = 192
V5 = int(transformers.__version__.split(".")[0]) >= 5
# a step has room for 32 tokens, so prompts are computed in chunks, beside decodes; four sequences run at a time
SMALL = dict(
    kvcache_block_size=16, num_kvcache_blocks=64, max_num_batched_tokens=32, max_num_seqs=4, max_model_len=MAX_LEN
)

LINEAR = {"rope_type": "linear", "factor": 3.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
GEMMA3 = {
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": theta}
        for kind, theta in (("full_attention", 5000.0), ("sliding_attention", 300.0))
    },
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 23,
    "query_pre_attn_scalar": 20,
    "tie_word_embeddings": False,
}
GEMMA2 = {
    "sliding_window": 23,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 2.0,
    "tie_word_embeddings": False,
}
GEMMA4 = {
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    },
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 23,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 512,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 2.0,
    "tie_word_embeddings": False,
}
NO_SHARING = {"attention_k_eq_v": False, "final_logit_softcapping": None}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 48}
GEMMA4_UNIFIED = {name: x for name, x in GEMMA4.items() if not name.endswith("per_layer_input")}
# the last four layers read the caches of the layers before them
GEMMA4_SHARED = {
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2 + ["full_attention"],
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 24,
    "attention_k_eq_v": False,
}
OLMO3 = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 23}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.5,
}
GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 23, "swiglu_limit": 0.5}
MINISTRAL3 = YARN | {"llama_4_scaling_beta": 0.3}


needs_new_families = pytest.mark.skipif(not V5, reason="transformers 4 does not have the family, or not this form")
CONFIGS = {
    f"Gemma{x}": f"Gemma{x}TextConfig" for x in ("3", "4", "4Unified")
}  # transformers' names that are not the family's


def by_layer_type(scaled: dict) -> dict:
    """Only layers without a window are scaled."""
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    return {"sliding_attention": rope, "full_attention": rope | scaled}


HEADS = "num_attention_heads", "num_key_value_heads", "head_dim"

# family, heads, key-value heads, head_dim (None: hidden_size 64 / heads), rope, and other entries of the config
CASES = {
    "llama": ("Llama", 4, 2, None, {}, {}),
    "llama-2": ("Llama", 4, 4, None, LINEAR, {}),
    "llama-3.1": ("Llama", 8, 2, None, LLAMA3, {}),
    "llama-3.2": ("Llama", 4, 1, 32, LLAMA3, {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", 4, 2, None, {}, {"attention_bias": True, "mlp_bias": True}),
    "llama-yarn": ("Llama", 2, 2, 24, YARN, {"attention_bias": True}),
    "llama-gelu": ("Llama", 4, 2, None, {}, {"hidden_act": "gelu"}),
    "qwen2": ("Qwen2", 4, 2, None, {}, {"tie_word_embeddings": True}),
    "qwen2.5": ("Qwen2", 8, 2, None, YARN, {}),
    "mistral": ("Mistral", 4, 2, 32, {}, {"sliding_window": None}),
    "mistral-window": ("Mistral", 6, 2, 16, LINEAR, {"sliding_window": 23}),
    "qwen3": ("Qwen3", 4, 2, 32, {}, {"tie_word_embeddings": True}),
    "qwen3-biases": ("Qwen3", 6, 2, 24, YARN, {"attention_bias": True}),
    # as model cards of Qwen turn YaRN on: this length stays, so transformers 4 takes another factor from it
    **({"qwen3-long": ("Qwen3", 4, 2, 16, YARN, {"max_position_embeddings": 60})} if V5 else {}),
    "qwen3-moe": ("Qwen3Moe", 4, 2, 32, {}, EXPERTS | {"norm_topk_prob": True}),
    "qwen3-moe-top-1": ("Qwen3Moe", 4, 4, 16, YARN, EXPERTS | {"num_experts_per_tok": 1}),
    "qwen3-moe-step": ("Qwen3Moe", 4, 2, 16, {}, EXPERTS | {"decoder_sparse_step": 2, "num_experts": 60}),
    "qwen3-moe-dense-layer": ("Qwen3Moe", 2, 2, 32, {}, EXPERTS | {"mlp_only_layers": [1], "num_experts_per_tok": 8}),
}
# transformers 4 does not have all of these families, and writes the entries of the others in another way
if V5:
    CASES |= {
        "gemma3": ("Gemma3", 4, 2, 32, {}, GEMMA3),
        "gemma3-caps": ("Gemma3", 4, 2, 32, {}, GEMMA3 | {"final_logit_softcapping": 2.0}),
        "gemma2": ("Gemma2", 4, 2, 16, None, GEMMA2),
        "gemma4": ("Gemma4", 4, 2, 16, {}, GEMMA4),
        "gemma4-values": ("Gemma4", 4, 2, 16, {}, GEMMA4 | NO_SHARING),
        "gemma4-experts": ("Gemma4", 4, 2, 16, {}, GEMMA4 | GEMMA4_EXPERTS),
        "gemma4-shared": ("Gemma4", 4, 1, 16, {}, GEMMA4 | GEMMA4_SHARED),
        "gemma4-equal-heads": ("Gemma4", 4, 2, 16, {}, GEMMA4 | {"global_head_dim": 16}),
        "olmo3": ("Olmo3", 4, 2, 16, {}, OLMO3 | {"rope_parameters": by_layer_type({})}),
        "olmo3-yarn": ("Olmo3", 4, 4, 16, {}, OLMO3 | {"rope_parameters": by_layer_type(YARN)}),
        "smollm3": ("SmolLM3", 4, 2, 16, {}, {"no_rope_layers": [1, 0]}),
        "granite": ("Granite", 4, 2, 16, {}, GRANITE),
        "glm4": ("Glm4", 4, 2, 32, {"partial_rotary_factor": 0.5}, {"eos_token_id": 3}),
        "phi3": ("Phi3", 4, 2, 16, {}, {"sliding_window": 23}),
        "phi3-partial": ("Phi3", 4, 2, 16, {"partial_rotary_factor": 0.75}, {}),
        "seed-oss": ("SeedOss", 4, 2, 16, {}, {"attention_out_bias": True, "attention_dropout": 0.0}),
        "ministral3": ("Ministral3", 4, 2, 16, MINISTRAL3, {}),
        "gpt-oss": ("GptOss", 4, 2, 32, YARN | {"truncate": False}, GPT_OSS),
        **(
            {"gemma4-unified": ("Gemma4Unified", 4, 2, 16, {}, GEMMA4_UNIFIED)}
            if hasattr(transformers, "Gemma4UnifiedTextConfig")
            else {}
        ),
        "gpt-oss-no-biases": ("GptOss", 8, 1, 16, {}, GPT_OSS | {"attention_bias": False, "swiglu_limit": 1.0}),
    }
# Each differs from another case of its family only in rotations, windows, caps, biases, or numbers of heads or experts.
# Tests of what does not depend on these leave them out.
VARIANTS = {
    *("llama-2", "llama-3.1", "llama-yarn", "qwen2.5", "mistral", "qwen3-biases", "qwen3-long", "qwen3-moe-top-1"),
    *("gemma3-caps", "olmo3-yarn", "phi3-partial", "gpt-oss-no-biases"),
}
MAIN_CASES = [name for name in CASES if name not in VARIANTS]


class GeluAndMul(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.gelu(gate) * up


class GeluLlama(LlamaForCausalLM):
    """A family from outside, with another activation: the case "llama-gelu"."""

    hidden_acts = ("gelu",)

    @staticmethod
    def make_mlp(config, layer_index):
        mlp = LlamaForCausalLM.make_mlp(config, layer_index)
        mlp.act_fn = GeluAndMul()
        return mlp


@pytest.fixture(autouse=True)
def gelu_family(request, monkeypatch):
    """In the tests of that case, the type "llama" is this family."""
    if "llama-gelu" in request.node.name:
        monkeypatch.setitem(MODELS, "llama", f"{__name__}:GeluLlama")


def make_checkpoint(folder: Path, name: str) -> str:
    """A model of transformers with random weights, biases and norms, and the bundled tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in checkpoint_files(name, repr(CASES[name])).items():
        (folder / file).write_bytes(content)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(TINY) / file, folder)
    return str(folder)


REFERENCES: dict[tuple[bytes, ...], nn.Module] = {}  # models of transformers, by the contents of their files


@cache
def checkpoint_files(name: str, case: str) -> dict[str, bytes]:
    """What transformers saves, by the file's name. `case` is that of the name, which tests change."""
    family, heads, kv_heads, head_dim, rope, entries = CASES[name]
    rope = {"rope_theta": 5000.0, **(rope or {"rope_type": "default"})}
    if not V5:
        rope_theta = rope.pop("rope_theta")
        rope = {"rope_theta": rope_theta, "rope_scaling": rope if rope["rope_type"] != "default" else None}
    shape = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=96 if heads == 6 else 64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        # of YaRN, transformers 4 takes the factor from this length
        max_position_embeddings=MAX_LEN if CASES[name][4] is YARN else 4 * MAX_LEN,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        attn_implementation="eager",  # sdpa ignores soft caps in some versions
    )
    shape |= ({"rope_parameters": rope} if V5 else rope) | ({"head_dim": head_dim} if head_dim else {})
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**shape | entries)
    model = as_configured(getattr(transformers, f"{family}ForCausalLM")(config).float().eval())
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "embed" in parameter_name or "lm_head" in parameter_name:
            parameter.copy_(0.3 * noise)
        elif parameter.dim() > 1:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        else:  # biases are zeros and norms are ones in a new model, which would hide that they are not used
            is_around_zero = parameter_name.endswith("bias") or family.startswith("Gemma")
            parameter.copy_(0.3 * noise + (0 if is_around_zero else 1))
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(1 + 0.3 * torch.randn(1, generator=generator))
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    REFERENCES[files["config.json"], files["model.safetensors"]] = model
    return files


def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(0)
    ids = lambda n: [rng.randrange(VOCAB_SIZE) for _ in range(n)]
    prefix = ids(40)
    prompts = [prefix, *map(ids, (1, 17, 2, 16, 70)), prefix + ids(1), prefix + ids(20)]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2, detokenize=False)
    # a prompt whose log-probabilities are wanted is computed from its beginning
    return [(prompt, params if i == 7 else replace(params, prompt_logprobs=0)) for i, prompt in enumerate(prompts)]


def reference_model(folder: str, **options):
    options = {"attn_implementation": "eager", "torch_dtype": torch.float32} | options
    return as_configured(transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval())


def as_configured(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":  # some versions do not read the config's limit
            module.limit = model.config.swiglu_limit
    return model


def shared_reference(folder: str) -> nn.Module:
    """The model that was saved as a checkpoint, or one that is loaded once; not to be changed."""
    key = tuple((Path(folder) / name).read_bytes() for name in ("config.json", "model.safetensors"))
    if key not in REFERENCES:
        REFERENCES[key] = reference_model(folder)
    return REFERENCES[key]


def assert_same_as_transformers(folder: str, outputs: list, model: nn.Module | None = None, error=1e-3) -> None:
    """By default, the reference is the checkpoint in `folder`. It computes all outputs at once."""
    sequences = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
    longest = max(map(len, sequences))  # no token sees those behind it, so any may be there
    batch = torch.tensor([token_ids + [0] * (longest - len(token_ids)) for token_ids in sequences])
    for output, token_ids, logits in zip(outputs, sequences, (model or shared_reference(folder))(batch).logits):
        (answer,), n = output.outputs, len(output.prompt_token_ids)
        logits = logits[: len(token_ids) - 1]
        found = [*(output.prompt_logprobs or [{}] * n)[1:], *answer.logprobs]
        assert len(found) == len(logits)
        positions, ids = zip(*((i, token_id) for i, ours in enumerate(found) for token_id in ours))
        ours = torch.tensor([logprob.logprob for ours in found for logprob in ours.values()])
        difference = (ours - logits.log_softmax(-1)[positions, ids]).abs()
        assert (difference <= error).all(), (n, positions[difference.nan_to_num(torch.inf).argmax()])
        lead = logits[n - 1 :].amax(-1) - logits[range(n - 1, len(logits)), answer.token_ids]
        assert (lead < MARGIN).all(), (n, lead)


@pytest.mark.parametrize("name", CASES)
def test_parity(make_llm, tmp_path, name):
    """In chunks, beside decodes, and with hits of the prefix cache."""
    folder = make_checkpoint(tmp_path, name)
    llm = make_llm(folder, **SMALL)
    outputs = generate_by_steps(llm, requests())
    assert_same_as_transformers(folder, outputs)
    assert len({token_id for output in outputs for token_id in output["token_ids"]}) > 8, "logits are nearly constant"
    assert outputs[-1]["num_cached_tokens"] == 32 and llm.stats()["steps"]["mixed"] > 0


@pytest.mark.parametrize("name", ["llama-3.1", "qwen3-moe"])
def test_long_prompts(make_llm, tmp_path, name):
    """With several answers, drafts and preemption, far behind the first positions."""
    folder, rng = make_checkpoint(tmp_path, name), random.Random(0)
    sizes = dict(num_kvcache_blocks=45, max_num_batched_tokens=128, max_model_len=640)
    drafting = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    llm = make_llm(folder, **SMALL | sizes, speculative_config=drafting)
    ids = [rng.randrange(VOCAB_SIZE) for _ in range(600)]
    params = SamplingParams(temperature=0, n=2, max_tokens=24, ignore_eos=True, logprobs=1, detokenize=False)
    outputs = generate_by_steps(llm, [(prompt, params) for prompt in (2 * ids[:20], ids, 9 * ids[:5])])
    for output in outputs:
        single = [replace(output, outputs=[answer]) for answer in output.outputs]
        assert_same_as_transformers(folder, single, error=1e-4)
    stats = llm.stats()
    assert stats["preemptions"] and stats["steps"]["mixed"] and stats["spec_decode"]["draft_tokens"]


class ThreadRanks(TensorParallel):
    """A rank that is a thread of this process. Its collectives take and change tensors as those of gloo do."""

    def __init__(self, rank: int, size: int, shared: list, barrier: Barrier):
        super().__init__(rank, size)
        self.shared, self.barrier_of_threads = shared, barrier

    def combine(self, x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the result of a function for the stack of every rank's x."""
        assert x.is_contiguous()
        self.shared[self.rank] = x
        self.barrier_of_threads.wait()
        result = function(torch.stack(self.shared))
        self.barrier_of_threads.wait()  # until all have read x
        return result

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self.combine(x, lambda parts: parts.sum(0)))

    def all_reduce_max(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.copy_(self.combine(keys, lambda parts: parts.amax(0)))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self.combine(x.contiguous(), lambda parts: parts.transpose(0, 1).flatten(1))


GROUPS: dict[tuple[Path, int], tuple[list, Barrier]] = {}  # what threads of a test share


@torch.no_grad()
def logits_of_rank(
    rank: int, size: int, folder: str, store: Path, prompt: list[int], expert_parallel: bool = False, **settings
) -> torch.Tensor:
    """[len(prompt), vocabulary], of a rank that is a thread. `settings` replace fields of ModelConfig.

    `store` is a folder of the test, and the same for all ranks.
    """
    config, num_tokens = replace(ModelConfig.read(Path(folder)), **settings), len(prompt)
    if expert_parallel:
        config = replace(config, moe=replace(config.moe, expert_parallel=True))
    tp = ThreadRanks(rank, size, *GROUPS.setdefault((store, size), ([None] * size, Barrier(size, timeout=30))))
    model = make_model(config, MAX_LEN, tp)
    load_model(model, Path(folder), torch.device("cpu"))
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.cache = KVCache(torch.zeros(2, 1, MAX_LEN, layer.num_kv_heads, layer.head_dim))
            layer.cache.spec = layer.cache_spec()
    positions = torch.arange(num_tokens, dtype=torch.int32)
    starts, table = torch.tensor([0, num_tokens], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    context = Context(True, starts, num_tokens, positions, starts[1:], table, max_context_len=num_tokens)
    with attention_context(context):
        return model.compute_logits(model(torch.tensor(prompt), positions))


@pytest.mark.parametrize(
    "name, size, settings",
    [
        *((name, 2 if CASES[name][1] % 4 or name in VARIANTS else 4, {}) for name in CASES),
        ("llama", 2, {}),
        *(("qwen3-moe", size, {"expert_parallel": True}) for size in (2, 4)),
        ("qwen3-moe-step", 4, {"expert_parallel": True}),
    ],
)
def test_ranks(tmp_path, name, size, settings):
    """Each rank has its part of the weights and biases. test_tensor_parallel.py has the ranks of an engine."""
    folder = make_checkpoint(tmp_path / "model", name)
    (prompt, _), *_ = requests()
    expected = shared_reference(folder)(torch.tensor([prompt])).logits[0]
    with ThreadPoolExecutor(size) as pool:
        arguments = size, folder, tmp_path, prompt
        for logits in pool.map(lambda rank: logits_of_rank(rank, *arguments, **settings), range(size)):
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("forked_ranks")
def test_engine_of_two_ranks(make_llm, tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3-moe")
    llm = make_llm(folder, tensor_parallel_size=2, expert_parallel=True, **SMALL)
    assert_same_as_transformers(folder, generate_by_steps(llm, requests()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in Triton's interpreter; tests/test_gpu.py on CUDA")
@pytest.mark.parametrize(
    "name, has_kernels",
    [("llama-biases", True), ("llama-biases", False), ("llama-gelu", True)]
    + [("gemma3", has_kernels) for has_kernels in (True, False) if "gemma3" in CASES],
    ids=str,
)
def test_parity_on_kernels(use_ops, make_llm, tmp_path, name, has_kernels):
    """Attention without q and k norms, and products with biases, of chunks, several decodes, and a single one.

    With kernels in all layers, or in the attention backend alone.
    """
    pytest.importorskip("triton")
    if has_kernels:
        use_ops()
    folder = make_checkpoint(tmp_path, name)
    llm, sizes = make_llm(folder, attention_backend="triton", **SMALL), []
    llm.core.on_step.append(lambda step, result: sizes.append((sum(step.chunk_lens), step.num_decodes)))
    (prompt, params), *_ = requests()
    limited = [(prompt[:length], replace(params, max_tokens=n)) for length, n in ((34, 2), (1, 2), (5, 3))]
    assert_same_as_transformers(folder, generate_by_steps(llm, limited))
    assert sizes[0] == (32, 0) and sizes[-2:] == [(0, 3), (0, 1)]


# -- what checkpoints of the families store ----------------------------------------------------------------------------


def edit(folder: str, remove: tuple[str, ...] = (), **entries) -> None:
    """Change entries of config.json."""
    file = Path(folder) / "config.json"
    raw = {name: value for name, value in json.loads(file.read_text()).items() if name not in remove}
    file.write_text(json.dumps(raw | entries))


def test_architectures_decide_if_the_type_is_unknown(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen2")
    for model_type in (None, "custom"):
        edit(folder, model_type=model_type)
        assert ModelConfig.read(tmp_path).model_type == "qwen2"
    edit(folder, model_type="llama")
    assert ModelConfig.read(tmp_path).model_type == "llama"


def test_old_llama_checkpoint(make_llm, tmp_path):
    """Of transformers 4: without newer entries, with frequencies beside the weights, and with a head that is tied."""
    folder = make_checkpoint(tmp_path, "llama-3.2")
    before = generate_by_steps(make_llm(folder, **SMALL), requests())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(16) for i in range(2)}
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | head, tmp_path / "model.safetensors")
    scaling = {"type": LLAMA3["rope_type"]} | {name: value for name, value in LLAMA3.items() if name != "rope_type"}
    new = ("rope_parameters", "attention_bias", "mlp_bias", "pretraining_tp", "dtype")
    edit(folder, new, rope_theta=5000.0, rope_scaling=scaling, torch_dtype="float32")
    after = generate_by_steps(make_llm(folder, **SMALL), requests())
    assert [output["token_ids"] for output in after] == [output["token_ids"] for output in before]
    save_file(tensors | {"model.rotary_emb.freq": torch.ones(16)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="1 tensors belong to no parameter: model.rotary_emb.freq"):
        make_llm(folder)


@pytest.mark.parametrize(
    "prefixes", [("model.language_model.", "lm_head."), ("language_model.model.", "language_model.lm_head.")]
)
@needs_new_families
def test_text_model_of_a_checkpoint_with_images(make_llm, tmp_path, prefixes):
    """As Gemma 3 with 4B and more is published, and as transformers saves it."""
    folder = make_checkpoint(tmp_path, "gemma3")
    expected = [output["token_ids"] for output in generate_by_steps(make_llm(folder, **SMALL), requests())]
    text = json.loads((tmp_path / "config.json").read_text())
    raw = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"dtype": "float32", "vision_config": {}}))
    names = {"model.": prefixes[0], "lm_head.": prefixes[1]}
    tensors = {
        names[name.split(".")[0] + "."] + name.split(".", 1)[1]: x
        for name, x in load_file(tmp_path / "model.safetensors").items()
    }
    images = {"model.vision_tower.x": torch.ones(1), "multi_modal_projector.x": torch.ones(1)}
    save_file(tensors | images, tmp_path / "model.safetensors")
    assert [output["token_ids"] for output in generate_by_steps(make_llm(folder, **SMALL), requests())] == expected


@needs_new_families
def test_gemma_4_as_it_is_published(make_llm, tmp_path):
    """In several files, beside models of images and audio, and with projections of keys that no layer reads."""
    folder = make_checkpoint(tmp_path, "gemma4-shared")
    names = ("embed_vision.x", "vision_tower.x", "audio_tower.x", "embed_audio.x")
    unused = {f"model.{name}": torch.ones(1) for name in names}
    for i in range(3, 7):
        for name in ("k_proj", "v_proj", "k_norm"):
            unused[f"model.language_model.layers.{i}.self_attn.{name}.weight"] = torch.ones(1)
    tensors = load_file(tmp_path / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()} | unused
    files = {f"model-{i}-of-2.safetensors": dict([*nested.items()][i - 1 :: 2]) for i in (1, 2)}
    for file, content in files.items():
        save_file(content, tmp_path / file)
    index = {"weight_map": {name: file for file, content in files.items() for name in content}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = generate_by_steps(make_llm(folder, **SMALL), requests())
    (tmp_path / "model.safetensors").unlink()
    text = json.loads((tmp_path / "config.json").read_text())
    raw = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"dtype": "float32", "vision_config": {}}))
    found = generate_by_steps(make_llm(folder, **SMALL), requests())
    assert [output["token_ids"] for output in found] == [output["token_ids"] for output in expected]


@needs_new_families
def test_older_forms_of_windows(tmp_path):
    """Before transformers 5 had `rope_parameters` by type of layer."""
    folder = make_checkpoint(tmp_path / "gemma3", "gemma3")
    edit(folder, layer_types=["sliding_attention"] * 2)
    expected = ModelConfig.read(Path(folder))
    edit(
        folder,
        ("rope_parameters", "layer_types"),
        rope_theta=5000.0,
        rope_local_base_freq=300.0,
        sliding_window_pattern=6,
    )
    assert ModelConfig.read(Path(folder)) == expected
    edit(folder, rope_scaling=LINEAR)  # of layers without a window
    scaled = ModelConfig.read(Path(folder))
    assert scaled.details == expected.details and scaled.max_position_embeddings == expected.max_position_embeddings
    assert scaled.rope_inv_freq != expected.rope_inv_freq
    folder = make_checkpoint(tmp_path / "olmo3", "olmo3-yarn")
    expected = ModelConfig.read(Path(folder))
    edit(folder, ("rope_parameters",), rope_theta=5000.0, rope_scaling=YARN)
    assert ModelConfig.read(Path(folder)) == expected


@pytest.mark.parametrize(
    "name, entries, message",
    [
        ("gemma3", {"final_logit_softcapping": 0.0}, "softcapping=0.0: must be"),
        ("gemma4-shared", {"enable_moe_block": True}, "enable_moe_block=True: is not supported with hidden_size_per"),
        ("gemma4-shared", {"num_kv_shared_layers": 8}, "num_kv_shared_layers=8: must be at most 7"),
        ("gemma4-shared", {"num_kv_shared_layers": 6}, "num_kv_shared_layers=6: a kind of layer would have no cache"),
        ("gemma4-shared", {"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input=100: must be at least 512"),
        ("gemma4-experts", {"top_k_experts": 9}, "top_k_experts=9: must be at most 8"),
        ("gemma4-experts", {"moe_intermediate_size": None}, "moe_intermediate_size=None: must be an integer"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all': must be"),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 32}}}, "per_layer_config: must have one entry"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True: must be"),
        ("gemma3", {"hidden_activation": "relu"}, "hidden_activation='relu': must be"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        ("gemma3", {"sliding_window": None}, "sliding_window=None"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 2}, "layer_types: a layer='chunked_attention'"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types: lists 1 layers, not 2"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: lists 1 layers, not 2"),
        ("gemma3", {"rope_parameters": {"full_attention": [1]}}, "rope_parameters: full_attention=.1.: must be an obj"),
        ("gemma3", {"rope_parameters": {"sliding_attention": "x"}}, "rope_parameters: sliding_attention='x': must be"),
        ("granite", {"logits_scaling": 0}, "logits_scaling=0"),
        ("phi3", {"sliding_window": 0}, "sliding_window=0: must be at least 1"),
        ("ministral3", {"sliding_window": 16}, "sliding_window=16: must be"),
        ("ministral3", {"rope_parameters": MINISTRAL3 | {"llama_4_scaling_beta": -1}}, "llama_4_scaling_beta=-1"),
    ],
)
@needs_new_families
def test_families_that_are_refused(tmp_path, name, entries, message):
    edit(make_checkpoint(tmp_path, name), **entries)
    with pytest.raises((ValueError, TypeError), match=f"config.json: {message}"):
        ModelConfig.read(tmp_path)


class ReadKeys(dict):
    """A dict that notes which keys are asked for, also of the dicts that are made from it."""

    def __init__(self, *args, noted: set[str]):
        super().__init__(*args)
        self.noted = noted

    def __getitem__(self, key):
        self.noted.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.noted.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.noted.add(key)
        return super().__contains__(key)

    def __or__(self, other):
        return ReadKeys(super().__or__(other), noted=self.noted)

    def __ror__(self, other):
        return ReadKeys({**other, **self}, noted=self.noted)


# entries of config.json that change no result: of training, of text, of transformers itself
NEUTRAL = {"architectures", "bos_token_id", "pad_token_id", "initializer_range", "transformers_version", "use_cache"}
NEUTRAL |= {"attention_dropout", "embd_pdrop", "resid_pdrop", "residual_dropout"}
NEUTRAL |= {"output_router_logits", "router_aux_loss_coef"}
NEUTRAL |= {"sliding_window", "max_window_layers"}  # unless `use_sliding_window` is set, which is refused
NEUTRAL |= {"num_experts", "top_k_experts", "moe_intermediate_size"}  # of Gemma 4 without experts
NEUTRAL |= {"_sliding_window_pattern"}  # transformers writes `layer_types`, too


@pytest.mark.parametrize("name", [name for name in CASES if name != "llama-gelu"])
def test_every_entry_is_read_or_neutral(tmp_path, name):
    """Of those that transformers' configuration of the family has: nothing that changes a result is ignored."""
    make_checkpoint(tmp_path, name)
    raw, noted = json.loads((tmp_path / "config.json").read_text()), set[str]()
    ModelConfig.read(tmp_path, raw=ReadKeys(raw, noted=noted))
    assert raw.keys() - noted <= NEUTRAL
    if "sliding_window" not in noted:
        with pytest.raises(ValueError, match="use_sliding_window is set"):
            ModelConfig.read(tmp_path, raw=raw | {"use_sliding_window": True})


CONFIG_CLASSES = {
    "gemma3_text": "Gemma3TextConfig",
    "gemma4_text": "Gemma4TextConfig",
    "gemma4_unified_text": "Gemma4UnifiedTextConfig",
    "smollm3": "SmolLM3Config",
    "seed_oss": "SeedOssConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "gpt_oss": "GptOssConfig",
    "qwen3_next": "Qwen3NextConfig",
    "qwen3_vl": "Qwen3VLTextConfig",
    "qwen3_vl_moe": "Qwen3VLMoeTextConfig",
    "qwen3_5": "Qwen3_5TextConfig",
    "qwen3_5_moe": "Qwen3_5MoeTextConfig",
}
# entries that every checkpoint has
SIZES = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"
SIZES += "num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts"


@pytest.mark.skipif(not V5, reason="transformers 4 has other defaults, and not all families")
@pytest.mark.parametrize("model_type", MODELS)
def test_entries_that_are_absent(model_type):
    """They have the values that transformers gives them, as it does not write all of them."""
    name = CONFIG_CLASSES.get(model_type, f"{model_type.title()}Config")
    if not hasattr(transformers, name):
        pytest.skip("transformers does not have the family yet")
    entries = getattr(transformers, name)().to_dict() | {"model_type": model_type, "dtype": "float32"}
    kept = (*SIZES, "model_type", "dtype")
    few = {key: x for key, x in entries.items() if x is not None and key in kept}
    read = lambda raw: replace(ModelConfig.read(Path(), raw=raw), eos_token_ids=frozenset())
    assert read(few) == read(entries)


PUBLISHED = {
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss",
            **dict(hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_local_experts=32, head_dim=64),
            **dict(num_attention_heads=64, num_key_value_heads=8, vocab_size=201088, max_position_embeddings=131072),
            **dict(sliding_window=128, attention_bias=True, num_experts_per_tok=4, experts_per_token=4),
            **dict(initial_context_length=4096, rope_theta=150000, rms_norm_eps=1e-5, eos_token_id=200002),
            "rope_scaling": YARN | {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            },
        },
        {},
        {
            **dict(dtype=torch.bfloat16, max_position_embeddings=131072, details=(128, None) * 12),
            **dict(qkv_bias=True, o_bias=True, eos_token_ids={200002}, attention_fraction=0.5),
        },
    ),
    "gemma-3-4b": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
        },
        {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
        {"max_position_embeddings": 131072, "tie_word_embeddings": True, "eos_token_ids": {1, 106}},
    ),
    "qwen3.6-27b": (
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "image_token_id": 248056,
            "text_config": {
                "model_type": "qwen3_5_text",
                **dict(vocab_size=248320, hidden_size=5120, intermediate_size=17408, num_hidden_layers=64),
                **dict(num_attention_heads=24, num_key_value_heads=4, head_dim=256, max_position_embeddings=262144),
                **dict(linear_num_key_heads=16, linear_num_value_heads=48, linear_key_head_dim=128),
                **dict(linear_value_head_dim=128, linear_conv_kernel_dim=4, full_attention_interval=4),
                **dict(attention_bias=False, attention_dropout=0.0, attn_output_gate=True, output_gate_type="swish"),
                **dict(hidden_act="silu", rms_norm_eps=1e-6, mamba_ssm_dtype="float32", partial_rotary_factor=0.25),
                **dict(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, eos_token_id=248044),
                "rope_parameters": {
                    **dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25),
                    **dict(mrope_interleaved=True, mrope_section=[11, 11, 10]),
                },
            },
            "tie_word_embeddings": False,
            "vision_config": {"model_type": "qwen3_5", "depth": 27, "out_hidden_size": 5120},
        },
        {"vocab_size": 248320, "num_attention_heads": 24, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6},
        {"tie_word_embeddings": False, "eos_token_ids": {248044}},
    ),
    "smollm3": (
        {
            "model_type": "smollm3",
            **dict(vocab_size=128256, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36),
            **dict(num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=65536, rope_theta=5e6),
            **dict(pretraining_tp=2, use_sliding_window=False, sliding_window=None, no_rope_layer_interval=4),
            "eos_token_id": 128012,
            "torch_dtype": "bfloat16",
        },
        {"head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 65536},
        {"details": (True, True, True, False) * 9},
    ),
    "phi-4-mini": (
        {
            "model_type": "phi3",
            **dict(vocab_size=200064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32),
            **dict(num_attention_heads=24, num_key_value_heads=8, partial_rotary_factor=0.75, rope_theta=10000.0),
            **dict(max_position_embeddings=131072, original_max_position_embeddings=4096, sliding_window=262144),
            **dict(attention_bias=False, attention_dropout=0.0, tie_word_embeddings=True, eos_token_id=199999),
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
            "torch_dtype": "bfloat16",
        },
        {"head_dim": 128, "max_position_embeddings": 131072, "sliding_window": 262144},
        {"rms_norm_eps": 1e-5},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    """What matters of config.json as checkpoints are published, which is not what transformers' classes write."""
    raw, *expected = PUBLISHED[name]
    config = ModelConfig.read(Path(), raw=raw)
    for key, value in {**expected[0], **expected[1]}.items():
        assert getattr(config, key) == value, key


@needs_new_families
def test_a_model_whose_layers_all_have_windows(make_llm, tmp_path):
    folder = make_checkpoint(tmp_path, "gemma3")
    edit(folder, layer_types=["sliding_attention"] * 2)
    assert_same_as_transformers(folder, generate_by_steps(make_llm(folder, **SMALL), requests()[:3]))


@needs_new_families
def test_one_rope_for_all_layers(tmp_path):
    """As some versions of transformers wrote it: the theta is that of layers with windows, too."""
    edit(make_checkpoint(tmp_path, "olmo3"), rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    config = ModelConfig.read(tmp_path)
    assert config.details.rope == (config.rope_inv_freq, 1.0) and config.rope_inv_freq[1] == pytest.approx(
        5000.0 ** (-1 / 8)
    )


@needs_new_families
def test_rope_of_gemma_2(tmp_path):
    """One rotary embedding, which may be scaled, serves all layers."""
    edit(make_checkpoint(tmp_path, "gemma2"), rope_parameters=LINEAR | {"rope_theta": 5000.0})
    config = ModelConfig.read(tmp_path)
    assert config.details.rope == (config.rope_inv_freq, 1.0) and config.rope_inv_freq[0] == pytest.approx(1 / 3)


@needs_new_families
def test_entries_of_a_text_model(tmp_path):
    """`text_config` describes the text model, even if the whole model has entries with the same names."""
    make_checkpoint(tmp_path, "gemma3")
    text = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": [5, 6]}
    raw = {"model_type": "gemma3", "text_config": text, "eos_token_id": None, "dtype": None}
    expected = ModelConfig.read(tmp_path, raw=raw)
    assert expected.eos_token_ids == {5, 6}
    for entries in (
        {"sliding_window": 5, "rms_norm_eps": 0.01},
        {"rope_parameters": None, "final_logit_softcapping": 3.0},
    ):
        assert ModelConfig.read(tmp_path, raw=raw | entries) == expected
    assert ModelConfig.read(tmp_path, raw=raw | {"eos_token_id": 7}).eos_token_ids == {7}


@needs_new_families
def test_rope_that_is_null(tmp_path):
    """It is that of a checkpoint without the entry."""
    folder = make_checkpoint(tmp_path, "ministral3")
    edit(folder, ("rope_parameters",))
    absent = ModelConfig.read(tmp_path)
    edit(folder, rope_parameters=None)
    assert ModelConfig.read(tmp_path) == absent
    edit(folder, rope_parameters={"rope_type": "default"})
    assert ModelConfig.read(tmp_path) != absent


@needs_new_families
def test_old_names_of_longrope(tmp_path, monkeypatch):
    rope = {"rope_type": "longrope", "short_factor": [1.0, 1.5] * 4, "long_factor": [2.0, 3.0] * 4}
    monkeypatch.setitem(CASES, "phi3", ("Phi3", 4, 2, 16, rope, {"original_max_position_embeddings": 64}))
    folder = make_checkpoint(tmp_path, "phi3")
    expected, raw = ModelConfig.read(tmp_path), json.loads((tmp_path / "config.json").read_text())
    for kind in "su", "yarn":
        edit(folder, ("rope_parameters",), rope_scaling=raw["rope_parameters"] | {"rope_type": kind})
        assert ModelConfig.read(tmp_path) == expected


@pytest.mark.parametrize(
    "entries, message",
    [
        (YARN | {"rope_theta": 1.0}, "rope_theta=1.0: must be at least"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor=1.0: must be above low_freq_factor=1.0"),
    ],
)
def test_impossible_rope(tmp_path, entries, message):
    edit(make_checkpoint(tmp_path, "llama"), rope_parameters=entries, rope_scaling=None, rope_theta=None)
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        ModelConfig.read(tmp_path)


@pytest.mark.parametrize("length", [64, MAX_LEN])
@needs_new_families
def test_longrope_by_the_length_of_the_engine(make_llm, tmp_path, monkeypatch, length):
    """Long factors for an engine that computes sequences beyond the original length, as in vLLM."""
    rope = {"rope_type": "longrope", "short_factor": [1.0, 1.5] * 4, "long_factor": [2.0, 3.0] * 4}
    entries = {"original_max_position_embeddings": 64}
    monkeypatch.setitem(CASES, "phi3", ("Phi3", 4, 2, 16, rope, entries))
    folder = make_checkpoint(tmp_path, "phi3")
    llm = make_llm(folder, **SMALL | {"max_model_len": length})
    (prompt, params), *_ = requests()
    prompt = prompt[:30] if length == 64 else prompt * 2  # transformers decides by each sequence
    assert_same_as_transformers(folder, generate_by_steps(llm, [(prompt, params)]))


@needs_new_families
def test_parts_in_one_tensor(tmp_path):
    """Of another size they are refused, with the name."""
    make_checkpoint(tmp_path, "phi3")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.gate_up_proj.weight"
    for rows, message in ((191, "whose rows can't be divided"), (190, "the model needs")):
        save_file(tensors | {name: tensors[name][:rows]}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=f"{name}: the checkpoint has shape .*{message}"):
            load_model(make_model(ModelConfig.read(tmp_path), MAX_LEN), tmp_path, torch.device("cpu"))
    tensors[name][-1, -1] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="NaN"):
        load_model(make_model(ModelConfig.read(tmp_path), MAX_LEN), tmp_path, torch.device("cpu"))


def test_experts_in_one_tensor_or_in_many(make_llm, tmp_path):
    """Published checkpoints have a tensor for each expert and projection; transformers stacks them in memory."""
    folder = make_checkpoint(tmp_path, "qwen3-moe-dense-layer")
    expected = [output["token_ids"] for output in generate_by_steps(make_llm(folder, **SMALL), requests())]
    tensors = load_file(tmp_path / "model.safetensors")
    each = {name: tensors.pop(name) for name in [*tensors] if ".mlp.experts." in name}
    assert len(each) == 3 * 8, "of one layer; the other is dense"
    down = [each[f"model.layers.0.mlp.experts.{i}.down_proj.weight"] for i in range(8)]
    gate_up = [
        torch.cat([each[f"model.layers.0.mlp.experts.{i}.{kind}_proj.weight"] for kind in ("gate", "up")])
        for i in range(8)
    ]
    stacked = {"gate_up_proj": torch.stack(gate_up), "down_proj": torch.stack(down)}
    stacked = {f"model.layers.0.mlp.experts.{name}": tensor for name, tensor in stacked.items()}
    save_file(tensors | stacked, tmp_path / "model.safetensors")
    assert [output["token_ids"] for output in generate_by_steps(make_llm(folder, **SMALL), requests())] == expected
    save_file(tensors | each | stacked, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="24 tensors belong to no parameter"):
        make_llm(folder)
    del each["model.layers.0.mlp.experts.5.up_proj.weight"]
    save_file(tensors | each, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="1 tensors are missing: model.layers.0.mlp.experts.5.up_proj.weight"):
        make_llm(folder)


@pytest.mark.parametrize(
    "entries, size, settings, message",
    [
        ({"num_experts_per_tok": 9}, 1, {}, "num_experts_per_tok=9: must be at most 8"),
        ({"num_experts": None}, 1, {}, "num_experts=None: must be an integer"),
        ({"moe_intermediate_size": 50}, 4, {}, r"does not divide the inner size of the experts \(50\)"),
        ({"num_experts": 10}, 4, {"expert_parallel": True}, r"does not divide the experts \(10\)"),
    ],
)
def test_experts_that_are_refused(tmp_path, entries, size, settings, message):
    folder = make_checkpoint(tmp_path, "qwen3-moe")
    edit(folder, **entries)
    with pytest.raises((ValueError, TypeError), match=message):
        Config(folder, device="cpu", tensor_parallel_size=size, **settings)


def test_key_value_heads_and_head_dim_of_llama_2(tmp_path):
    folder = make_checkpoint(tmp_path, "llama-2")
    expected = ModelConfig.read(tmp_path)
    edit(folder, remove=("num_key_value_heads", "head_dim"))
    assert ModelConfig.read(tmp_path) == expected
    assert (expected.num_key_value_heads, expected.head_dim) == (4, 16)


@pytest.mark.parametrize(
    "backend, kv_cache_dtype, window",
    [
        *(("sdpa", "auto", window) for window in (1, 16, 23)),
        ("sdpa", "fp8", 23),
        ("triton", "auto", 23),  # test_kernels.py has the others
    ],
)
def test_tokens_behind_a_window(make_llm, tmp_path, monkeypatch, window, backend, kv_cache_dtype):
    """Chunks, decodes and prefix hits leave them out; in float32 FP8 rounds keys and values, nothing else."""
    monkeypatch.setitem(CASES, "mistral", (*CASES["mistral"][:-1], {"sliding_window": window}))
    folder = make_checkpoint(tmp_path, "mistral")
    llm = make_llm(folder, attention_backend=backend, kv_cache_dtype=kv_cache_dtype, **SMALL)
    some = requests()
    if backend == "triton":  # the interpreter takes long for each step
        some = [(prompt, replace(params, max_tokens=3)) for prompt, params in (some[0], some[5], some[7])]
    outputs = generate_by_steps(llm, some)
    if kv_cache_dtype == "auto":
        assert_same_as_transformers(folder, outputs)
        assert llm.stats()["steps"]["mixed"] > 0 and outputs[-1]["num_cached_tokens"] == 32
    else:  # with all tokens in view, the first log-probabilities of long prompts would be others
        edit(folder, sliding_window=None)
        others = generate_by_steps(make_llm(folder, kv_cache_dtype=kv_cache_dtype, **SMALL), requests())
        assert outputs[5].prompt_logprobs[-1] != others[5].prompt_logprobs[-1]


class WindowInSecondLayer(Qwen2ForCausalLM):
    def __init__(self, *args):
        super().__init__(*args)
        self.model.layers[1].self_attn.attn.window = 20

    @staticmethod
    def read_config(raw: dict, file: Path) -> dict:
        return Qwen2ForCausalLM.read_config(raw, file) | fields_of_sizes((None, 20))


@pytest.mark.skipif(not V5, reason="transformers 4 has windows for all layers of Qwen2, or none")
def test_windows_of_layers(make_llm, tmp_path, monkeypatch):
    """Layers with a window mask other tokens than layers without, and use a block table of their own."""
    entries = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    monkeypatch.setitem(CASES, "qwen2", (*CASES["qwen2"][:-1], CASES["qwen2"][-1] | entries))
    theirs = make_checkpoint(tmp_path / "theirs", "qwen2")
    ours = shutil.copytree(theirs, tmp_path / "ours")
    edit(ours, remove=("layer_types",), use_sliding_window=False)  # else it is refused: no family here has them
    monkeypatch.setitem(MODELS, "qwen2", f"{__name__}:WindowInSecondLayer")
    llm = make_llm(str(ours), **SMALL)
    assert len(llm.model_runner.cache_groups) == 1 and llm.config.num_window_tables == 1
    assert_same_as_transformers(theirs, generate_by_steps(llm, requests()))


@pytest.mark.parametrize("head_dim", [8, 24, 96])
def test_head_dim_of_kernels(tmp_path, head_dim):
    folder = make_checkpoint(tmp_path, "llama")
    edit(folder, head_dim=head_dim)
    assert Config(folder, device="cpu").model_config.head_dim == head_dim
    with pytest.raises(ValueError, match=f"head_dim={head_dim} of the model: must be a power of two from 16 on"):
        Config(folder, device="cpu", attention_backend="triton")
    edit(folder, head_dim=64)
    assert Config(folder, device="cpu", attention_backend="triton").model_config.head_dim == 64
