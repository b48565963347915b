"""Checkpoints: what is loaded equals transformers' model of the same folder, and what is wrong is refused by name."""

import json
import os
import shutil
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from common import TINY, warnings_in
from safetensors.torch import load_file, save_file
from torch import nn

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.engine import model_runner
from nanovllm.models import make_model
from nanovllm.utils.families import MODELS
from nanovllm.utils.loader import load_model, weight_loaders
from nanovllm.utils.model_files import check_model, find_model
from nanovllm.utils.tensor_parallel import TensorParallel

PROMPT = [5, 1999, 300, 42, 7, 7, 1024, 11]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LAYER = "model.layers.1."
V5 = int(transformers.__version__.split(".")[0]) >= 5


def cache_of(llm) -> torch.Tensor:
    """[2, layers, blocks, block_size, kv_heads, head_dim]"""
    ((cache,),) = llm.model_runner.caches.values()
    return cache


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return load_file(Path(TINY) / "model.safetensors")


@pytest.fixture
def checkpoint(tmp_path):
    """A function that writes a copy of the bundled model, with other tensors and entries of config.json."""

    def write(*files: dict[str, torch.Tensor], **entries) -> str:
        for source in Path(TINY).glob("*.json"):
            shutil.copy(source, tmp_path)
        config = json.loads((tmp_path / "config.json").read_text()) | entries
        (tmp_path / "config.json").write_text(json.dumps(config))
        weight_map = {}
        for i, content in enumerate(files, 1):
            name = "model.safetensors" if len(files) == 1 else f"model-{i:05}-of-{len(files):05}.safetensors"
            save_file(content, tmp_path / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(content, name)
        if len(files) > 1:
            index = {"metadata": {}, "weight_map": weight_map}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        return str(tmp_path)

    return write


def ours(llm) -> tuple[list[int], torch.Tensor]:
    """The greedy answer to PROMPT, and the logits that each of its tokens was taken from."""
    seen, model = [], llm.model_runner.model
    compute = model.compute_logits
    model.compute_logits = lambda *hidden: seen.append(compute(*hidden)) or seen[-1]
    (answer,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    return answer["token_ids"], torch.cat(seen).clone()


def theirs(folder: str, token_ids: list[int]) -> torch.Tensor:
    """transformers' logits for the tokens after PROMPT."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    return model(torch.tensor([PROMPT + token_ids])).logits[0, len(PROMPT) - 1 : -1]


def assert_same_as_transformers(llm, folder) -> torch.Tensor:
    token_ids, logits = ours(llm)
    reference = theirs(folder, token_ids)
    torch.testing.assert_close(logits, reference, rtol=1e-4, atol=1e-4 * float(reference.abs().max()))
    assert token_ids == reference.argmax(-1).tolist() and len(token_ids) == GREEDY.max_tokens
    return logits


@pytest.fixture(scope="module")
def tiny_logits() -> torch.Tensor:
    """What the bundled model says, so that a changed one can be seen to differ."""
    from nanovllm import LLM

    with LLM(TINY, dtype="float32", device="cpu") as llm:
        return assert_same_as_transformers(llm, TINY)


def test_sharded(checkpoint, make_llm, tensors, tiny_logits):
    names = sorted(tensors)
    folder = checkpoint(*({name: tensors[name] for name in names[i::3]} for i in range(3)))
    assert len(list(Path(folder).glob("*.safetensors"))) == 3
    assert torch.equal(ours(make_llm(folder))[1], tiny_logits)


def test_untied_head(checkpoint, make_llm, tensors, tiny_logits):
    torch.manual_seed(0)
    head = torch.randn_like(tensors["model.embed_tokens.weight"]) * 0.02
    folder = checkpoint(tensors | {"lm_head.weight": head}, tie_word_embeddings=False)
    logits = assert_same_as_transformers(make_llm(folder), folder)
    assert not torch.allclose(logits[0], tiny_logits[0], atol=1e-2)


EMBEDDING = "model.embed_tokens.weight"


def is_tied(llm) -> bool:
    model = llm.model_runner.model
    return model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("num_files", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tied_checkpoint_that_stores_its_head_too(checkpoint, make_llm, tensors, tiny_logits, caplog, num_files, dtype):
    """It is the embedding, in another dtype perhaps, so one tensor in memory is enough."""
    head = {"lm_head.weight": tensors[EMBEDDING].to(dtype, copy=True)}
    llm = make_llm(checkpoint(*([head, tensors] if num_files == 2 else [tensors | head])))
    assert torch.equal(ours(llm)[1], tiny_logits) and is_tied(llm) and not warnings_in(caplog)


@pytest.mark.parametrize("num_files", [1, 2])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_tied_checkpoint_with_another_head(checkpoint, make_llm, tensors, tiny_logits, caplog, num_files, quantization):
    """As in transformers 5, the head that is there is used, with a warning; one number may be all that differs."""
    head = tensors[EMBEDDING].clone()
    head[-1, -1] += 64
    files = [{"lm_head.weight": head}, tensors] if num_files == 2 else [tensors | {"lm_head.weight": head}]
    llm = make_llm(folder := checkpoint(*files), quantization=quantization)
    warning, *others = warnings_in(caplog)[::-1]
    assert len(others) == (quantization is not None)  # which says that a CPU dequantizes in each step
    assert f"lm_head.weight differs from {EMBEDDING}, so it is used" in warning and folder in warning
    found = ours(llm)
    if not quantization and V5:
        assert_same_as_transformers(llm, folder)
    checkpoint(tie_word_embeddings=False)  # as it should have been
    caplog.clear()
    token_ids, logits = ours(make_llm(folder, quantization=quantization))
    assert found[0] == token_ids and torch.equal(found[1], logits) and not is_tied(llm)
    assert len(warnings_in(caplog)) == len(others)
    assert not torch.allclose(logits[0], tiny_logits[0], atol=1e-2)


def test_tied_checkpoint_with_another_head_on_ranks(checkpoint, tensors, caplog):
    """Each has its part of it, also the ranks whose part does not differ. One of them warns."""
    head = tensors[EMBEDDING].clone()
    head[-1, -1] += 64
    folder = Path(checkpoint(tensors | {"lm_head.weight": head}))
    config = Config(str(folder), dtype="float32", device="cpu").model_config
    for rank in range(2):
        part = make_model(config, 64, TensorParallel(rank, 2))
        load_model(part, folder, torch.device("cpu"))
        assert torch.equal(part.lm_head.weight, head.float().chunk(2)[rank])
        assert torch.equal(part.model.embed_tokens.weight, tensors[EMBEDDING].float().chunk(2)[rank])
    assert len(warnings_in(caplog)) == 1


def test_tied_checkpoint_whose_head_has_another_shape(checkpoint, make_llm, tensors):
    folder = checkpoint(tensors | {"lm_head.weight": torch.zeros(2049, 256)})
    with pytest.raises(ValueError, match=r"lm_head.weight: the checkpoint has shape \[2049, 256\], the model needs"):
        make_llm(folder)


def test_attention_bias(checkpoint, make_llm, tensors, tiny_logits):
    torch.manual_seed(0)
    biases = {
        name.replace(".weight", ".bias"): torch.randn(weight.shape[0]).bfloat16() * 0.3
        for name, weight in tensors.items()
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"))
    }
    assert len(biases) == 16
    folder = checkpoint(tensors | biases, attention_bias=True)
    logits = assert_same_as_transformers(make_llm(folder), folder)
    assert not torch.allclose(logits[0], tiny_logits[0], atol=1e-2)


def test_transformers_4_config(checkpoint, make_llm, tensors, tiny_logits):
    """The same model under the names of transformers 4; its theta is read, and not another."""
    folder = checkpoint(tensors, rope_parameters=None, rope_theta=10000.0, rope_scaling=None, torch_dtype="bfloat16")
    assert torch.equal(ours(make_llm(folder))[1], tiny_logits)
    folder = checkpoint(tensors, rope_parameters=None, rope_theta=500.0)
    assert not torch.allclose(ours(make_llm(folder))[1][0], tiny_logits[0], atol=1e-2)


def test_single_file_before_stale_shards(checkpoint, make_llm, tensors, tiny_logits):
    """As in transformers: what an index and shards beside it say is old."""
    stale = {name: tensor * 2 for name, tensor in tensors.items()}
    names = sorted(tensors)
    checkpoint(*({name: stale[name] for name in names[i::2]} for i in range(2)))
    folder = checkpoint(tensors)
    assert len(list(Path(folder).glob("*.safetensors"))) == 3
    assert torch.equal(ours(make_llm(folder))[1], tiny_logits)


def test_index_says_which_file_holds_a_tensor(checkpoint, make_llm, tensors, tiny_logits):
    """A file that the index does not name is not read, nor what another file has of a tensor."""
    names, norm = sorted(tensors), "model.norm.weight"
    first = {name: tensors[name] for name in names[::2] if name != norm}
    folder = checkpoint(first, {name: tensors[name] for name in {*names[1::2], norm}})
    save_file(first | {norm: tensors[norm] * 2}, Path(folder) / "model-00001-of-00002.safetensors")
    save_file({norm: tensors[norm] * 2}, Path(folder) / "adapter.safetensors")
    assert torch.equal(ours(make_llm(folder))[1], tiny_logits)


def test_progress_bar(checkpoint, make_llm, tensors, monkeypatch, capsys):
    """Of the files, if they are not read at once."""
    names = sorted(tensors)
    folder = checkpoint({name: tensors[name] for name in names[:3]}, {name: tensors[name] for name in names[3:]})
    make_llm(folder)
    assert "Loading weights" not in capsys.readouterr().err
    monkeypatch.setattr("nanovllm.utils.loader.BAR_DELAY", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    make_llm(folder)
    assert "Loading weights:   0%|" in (shown := capsys.readouterr().err) and "/2 [" in shown


def test_files_without_an_index(checkpoint, make_llm, tensors, tiny_logits):
    names = sorted(tensors)
    folder = Path(checkpoint(*({name: tensors[name] for name in names[i::2]} for i in range(2))))
    (folder / "model.safetensors.index.json").unlink()
    assert torch.equal(ours(make_llm(str(folder)))[1], tiny_logits)
    save_file({names[0]: tensors[names[0]]}, folder / "other.safetensors")
    with pytest.raises(
        ValueError, match=f"{names[0]} is in both model-00001-of-00002.safetensors and other.safetensors"
    ):
        make_llm(str(folder))


def test_dummy_weights(make_llm, tmp_path):
    """Of a folder without weight files; every rank has its part of the same model."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(Path(TINY) / name, tmp_path)
    llm = make_llm(str(tmp_path), load_format="dummy")
    token_ids, logits = ours(llm)
    assert len(token_ids) == GREEDY.max_tokens and logits.isfinite().all()
    config, whole = llm.config, dict(llm.model_runner.model.named_parameters())
    assert all(parameter.abs().max() < 0.1 and parameter.std() > 0.01 for parameter in whole.values())
    for rank in range(2):
        part = make_model(config.model_config, 64, TensorParallel(rank, 2))
        load_model(part, tmp_path, torch.device("cpu"), "dummy")
        part = dict(part.named_parameters())
        for name, dim in (("embed_tokens", 0), ("layers.3.mlp.down_proj", 1), ("layers.0.input_layernorm", None)):
            name = f"model.{name}.weight"
            assert torch.equal(part[name], whole[name] if dim is None else whole[name].chunk(2, dim)[rank])
    with pytest.raises(FileNotFoundError, match="no .*safetensors"):
        make_llm(str(tmp_path), load_format="safetensors")


TOY = """
from torch import nn

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding


class ToyForCausalLM(nn.Module):
    hidden_acts = ("silu",)
    packed_modules_mapping = {"query": ("qkv", "q"), "key": ("qkv", "k"), "value": ("qkv", "v")}

    def __init__(self, config):
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.config = config
        self.embed = VocabParallelEmbedding(config.vocab_size, size)
        self.rotary_emb = RotaryEmbedding(config.rope_inv_freq, config.rope_scale, config.max_position_embeddings)
        self.norms = nn.ModuleList(RMSNorm(size, config.rms_norm_eps) for _ in range(3))
        self.qkv = QKVParallelLinear(size, dim, heads, kv_heads)
        self.attn = Attention(self.qkv.num_heads, dim, dim**-0.5, self.qkv.num_kv_heads)
        self.out = RowParallelLinear(heads * dim, size)
        self.up = ColumnParallelLinear(size, 64)
        self.act = SiluAndMul()
        self.down = RowParallelLinear(32, size)
        self.lm_head = ParallelLMHead(config.vocab_size, size)

    @staticmethod
    def read_config(raw, file):
        return {}

    def forward(self, token_ids, positions):
        residual = self.embed(token_ids)
        attn = self.attn
        qkv = self.qkv(self.norms[0](residual)).unflatten(-1, (-1, attn.head_dim))
        q, k, v = qkv.split([attn.num_heads, attn.num_kv_heads, attn.num_kv_heads], 1)
        x = self.out(attn(*self.rotary_emb(positions, q, k), v))
        x, residual = self.norms[1](x, residual)
        x = self.down(self.act(self.up(x)))
        return self.norms[2](x, residual)[0]

    def compute_logits(self, hidden_states):
        return self.lm_head(hidden_states)
"""


def test_a_registered_family(checkpoint, make_llm, monkeypatch, tmp_path):
    """A family is a module and an entry of MODELS; this one has one layer, no q and k norms, and its own names."""
    (tmp_path / "toy_family.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    folder = checkpoint(model_type="toy", architectures=None, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="model_type='toy'.*'qwen3'"):
        make_llm(folder, load_format="dummy")
    monkeypatch.setitem(MODELS, "toy", "toy_family:ToyForCausalLM")
    llm = make_llm(folder, load_format="dummy", max_num_batched_tokens=64)
    names = {name for name, _ in llm.model_runner.model.named_parameters()}
    assert names == {
        f"{name}.weight" for name in ("embed", "norms.0", "norms.1", "norms.2", "qkv", "out", "up", "down", "lm_head")
    }
    bounds = [shard.abs().max() for shard in llm.model_runner.model.qkv.weight.split([256, 128, 128])]
    assert all(0.03 < bound < 0.036 for bound in bounds)
    token_ids, logits = ours(llm)
    assert len(token_ids) == GREEDY.max_tokens and logits.isfinite().all()
    # token by token from the cache, and all at once
    (again,) = llm.generate([PROMPT + token_ids[:-1]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert again["token_ids"] == token_ids[-1:]


def test_relative_path(make_llm, monkeypatch, tmp_path):
    """The folder is read again after the start, by which time the current one may be another."""
    shutil.copytree(TINY, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    llm = make_llm("model")
    os.chdir("/")
    assert llm.config.model == llm.config.tokenizer == str(tmp_path / "model")
    assert llm.get_default_sampling_params().top_k == 20
    assert llm.config.num_kvcache_blocks == cache_of(llm).shape[2] > 0


# -- what the caller does to PyTorch -----------------------------------------------------------------------------------

ASKED = [
    GREEDY,
    SamplingParams(temperature=0.8, seed=1, top_k=20, top_p=0.9, min_p=0.01, max_tokens=6, ignore_eos=True, logprobs=2),
    SamplingParams(
        temperature=0,
        presence_penalty=0.3,
        frequency_penalty=0.31,
        repetition_penalty=1.1,
        logit_bias={5: 1.7},
        max_tokens=6,
        ignore_eos=True,
        prompt_logprobs=1,
    ),
]


def answers(llm) -> list:
    names = ("token_ids", "logprobs", "prompt_logprobs")
    return [[dict(answer).get(name) for name in names] for answer in llm.generate([PROMPT] * 3, ASKED, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain_answers() -> list:
    from nanovllm import LLM

    with LLM(TINY, dtype="float32", device="cpu") as llm:
        return answers(llm)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_default_dtype_of_the_process(make_llm, plain_answers, dtype):
    before = make_llm()
    torch.set_default_dtype(dtype)
    try:
        assert answers(before) == plain_answers
        assert answers(make_llm()) == plain_answers
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_default_device_of_the_process(make_llm, plain_answers):
    torch.set_default_device("meta")
    try:
        assert answers(make_llm()) == plain_answers
    finally:
        torch.set_default_device(None)


def test_autocast(make_llm, plain_answers):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        llm = make_llm()
        assert answers(llm) == plain_answers
        assert torch.is_autocast_enabled("cpu"), "the caller's own"
        inside = ours(llm)[1]
    assert torch.equal(inside, ours(llm)[1]) and inside.dtype == torch.float32


def test_loading_in_two_threads(make_llm, monkeypatch):
    """Each engine has its dtype, and other threads never see another default."""
    both, seen = threading.Barrier(2, timeout=30), []

    def build(*arguments):
        both.wait()
        seen.append(torch.zeros(1).dtype)
        return make_model(*arguments)

    monkeypatch.setattr(model_runner, "make_model", build)
    dtypes = torch.float16, torch.bfloat16
    with ThreadPoolExecutor(2) as pool:
        engines = list(pool.map(lambda dtype: make_llm(dtype=dtype), dtypes))
    for llm, dtype in zip(engines, dtypes):
        assert {parameter.dtype for parameter in llm.model_runner.model.parameters()} == {dtype}
        assert cache_of(llm).dtype == llm.config.model_config.dtype == dtype
    assert seen == [torch.float32] * 2


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lost",
    ["model.norm.weight", "model.embed_tokens.weight", LAYER + "self_attn.k_proj.weight", LAYER + "mlp.up_proj.weight"],
)
def test_missing_tensor(checkpoint, make_llm, tensors, lost):
    folder = checkpoint({name: tensor for name, tensor in tensors.items() if name != lost})
    with pytest.raises(ValueError, match=f"1 tensors are missing: {lost}$"):
        make_llm(folder)


def test_missing_head_and_biases(checkpoint, make_llm, tensors):
    with pytest.raises(ValueError, match="missing: lm_head.weight$"):
        make_llm(checkpoint(tensors, tie_word_embeddings=False))
    with pytest.raises(ValueError, match="16 tensors are missing: .*_proj.bias"):
        make_llm(checkpoint(tensors, attention_bias=True))


@pytest.mark.parametrize(
    "name", ["model.layers.4.mlp.up_proj.weight", LAYER + "self_attn.q_proj.bias", LAYER + "self_attn.qkv_proj.weight"]
)
def test_surplus_tensor(checkpoint, make_llm, tensors, name):
    with pytest.raises(ValueError, match=f"1 tensors belong to no parameter: {name}$"):
        make_llm(checkpoint(tensors | {name: torch.zeros(256)}))


@pytest.mark.parametrize(
    "name, shape, needed",
    [
        (LAYER + "self_attn.v_proj.weight", (256, 256), [128, 256]),
        (LAYER + "self_attn.o_proj.weight", (256, 128), [256, 256]),
        (LAYER + "self_attn.q_norm.weight", (1,), [32]),  # would broadcast
        (LAYER + "mlp.gate_proj.weight", (256, 768), [768, 256]),
        ("model.embed_tokens.weight", (2049, 256), [2048, 256]),
    ],
)
def test_wrong_shape(checkpoint, make_llm, tensors, name, shape, needed):
    with pytest.raises(ValueError) as error:
        make_llm(checkpoint(tensors | {name: torch.zeros(shape)}))
    assert name in str(error.value) and str(list(shape)) in str(error.value) and str(needed) in str(error.value)


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            "config.json: model_type='gpt2' .*'GPT2LMHeadModel'.*'llama', .*'qwen3'.*nanovllm/models/",
        ),
        ({"model_type": None, "architectures": None}, "model_type=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: a layer='sliding_attention'"),
        ({"model_type": "llama", "pretraining_tp": 2}, "config.json: pretraining_tp=2"),
        ({"model_type": "mistral", "sliding_window": 0}, "config.json: sliding_window=0"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_unsupported_checkpoint(checkpoint, make_llm, tensors, entries, message):
    with pytest.raises(ValueError, match=message):
        make_llm(checkpoint(tensors, **entries))


def test_folder_without_weights(checkpoint, make_llm):
    with pytest.raises(FileNotFoundError, match="no .*safetensors"):
        make_llm(checkpoint())


def test_folder_without_config(tmp_path, make_llm):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path.name}.*no config.json"):
        make_llm(str(tmp_path))


def test_no_such_folder(tmp_path, make_llm):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="LoRA adapter; load its base model with enable_lora=True"):
        find_model(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no such folder"):
        make_llm(str(tmp_path / "nowhere"))


def test_hub_id_offline(monkeypatch, tmp_path):
    """Without network a hub id says what to do."""
    import huggingface_hub.constants

    calls = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **_: calls.append(args))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="nobody/nothing.*pass the folder of .*bundled 'tiny-qwen3'"):
        find_model("nobody/nothing")
    assert not calls, "the network was asked"


@pytest.mark.parametrize(
    ("name", "advice"), [("RepositoryNotFoundError", "the hub has no such model"), ("GatedRepoError", "accept its")]
)
def test_the_advice_stands_before_the_error_of_the_hub(monkeypatch, name, advice):
    import huggingface_hub

    def snapshot_download(*arguments, **options):
        raise type(name, (Exception,), {})("404 Client Error")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(FileNotFoundError, match=rf"^model='a/b': no such folder, and .*{advice}.*\n\({name}: 404"):
        find_model("a/b")


def test_commands_check_a_model_before_they_import_pytorch(tmp_path):
    check_model(TINY), check_model("owner/name")  # the hub is not asked yet
    for raw in ({"model_type": "llama"}, {"model_type": "x", "text_config": {"model_type": "qwen3"}}):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        check_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json: model_type='gpt2' with .*must be one of"):
        check_model(str(tmp_path))


def test_find_model(monkeypatch, tmp_path):
    assert find_model("tiny-qwen3") == find_model(TINY) == Path(TINY)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert find_model("~/model") == tmp_path / "model"


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1503300328\n"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content, message",
    [("{", "not valid JSON"), ("[]", "JSON object.*list"), (LFS_POINTER, "git-lfs pointer.*git lfs pull")],
)
def test_broken_json(checkpoint, make_llm, tensors, name, content, message):
    folder = checkpoint(tensors)
    (Path(folder) / name).write_text(content)
    with pytest.raises(ValueError, match=f"{folder}/{name}: .*{message}"):
        make_llm(folder)


def test_broken_tokenizer(checkpoint, make_llm, tensors):
    folder = checkpoint(tensors)
    (Path(folder) / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{folder}: can't load the tokenizer .KeyError"):
        make_llm(folder)


def test_broken_index(checkpoint, make_llm, tensors):
    names = sorted(tensors)
    folder = Path(checkpoint(*({name: tensors[name] for name in names[i::2]} for i in range(2))))
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    for content, message in (
        ("{", f"{index}: is not valid JSON"),
        ("{}", f"{index}: has no weight_map"),
        (json.dumps({"weight_map": {names[0]: 1}}), f"{index}: has no weight_map"),
        (
            json.dumps({"weight_map": weight_map | {"x.weight": "model-00002-of-00002.safetensors"}}),
            f"{folder}/model-00002-of-00002.safetensors: lacks x.weight, which {index.name} says",
        ),
    ):
        index.write_text(content)
        with pytest.raises(ValueError, match=message):
            make_llm(str(folder))
    index.write_text(json.dumps({"weight_map": weight_map | {names[0]: "model-00003-of-00003.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=f"{folder}/model-00003-of-00003.safetensors: is missing"):
        make_llm(str(folder))


def test_broken_safetensors(checkpoint, make_llm, tensors):
    folder = checkpoint(tensors)
    file = Path(folder) / "model.safetensors"
    whole = file.read_bytes()
    for content, message in (
        (whole[:-10], "not a complete safetensors file"),
        (whole[:4], "not a complete safetensors file"),
        (b"", "not a complete safetensors file"),
        (LFS_POINTER.encode(), "git-lfs pointer.*git lfs pull"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"{file}: .*{message}"):
            make_llm(folder)


@pytest.mark.parametrize("dtype, shown", [(torch.int8, "I8"), (torch.bool, "BOOL"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_weights_that_are_no_floats(checkpoint, make_llm, tensors, dtype, shown):
    name = LAYER + "mlp.up_proj.weight"
    with pytest.raises(ValueError, match=f"model.safetensors: {name} has dtype {shown}: must be one of .*BF16"):
        make_llm(checkpoint(tensors | {name: tensors[name].to(dtype)}))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite(checkpoint, make_llm, tensors, value):
    broken = [LAYER + "mlp.up_proj.weight", LAYER + "self_attn.k_proj.weight", "model.norm.weight"]
    changed = {name: tensors[name].clone() for name in broken}
    for tensor in changed.values():
        tensor.view(-1)[-1] = value
    folder = checkpoint(tensors | changed)
    with pytest.raises(
        ValueError, match=f"{folder}: 3 tensors are NaN or infinite in torch.float32: {', '.join(broken)}$"
    ):
        make_llm(folder)


def test_weights_too_large_for_the_dtype(checkpoint, make_llm, tensors):
    folder = checkpoint(tensors | {"model.norm.weight": tensors["model.norm.weight"].float() * 1e6})
    with pytest.raises(ValueError, match="infinite in torch.float16: model.norm.weight$"):
        make_llm(folder, dtype="float16")


def test_folder_without_tokenizer(checkpoint, make_llm, tensors, monkeypatch):
    folder = Path(checkpoint(tensors))
    (folder / "tokenizer.json").rename(folder / "vocab.json")  # which is half of a tokenizer
    monkeypatch.setattr("nanovllm.engine.llm_engine.ModelRunner", lambda *_: pytest.fail("loaded a model"))
    wanted = "tokenizer.json, or vocab.json and merges.txt, or tokenizer.model"
    for settings, named in (
        ({}, folder),
        ({"tokenizer": folder}, folder),
        ({"tokenizer": folder.parent}, folder.parent),
    ):
        with pytest.raises(FileNotFoundError, match=f"{named}: .*{wanted}.*tokenizer="):
            make_llm(str(folder), **settings)
    with pytest.raises(FileNotFoundError, match="tokenizer='/nowhere': no such folder"):
        make_llm(str(folder), tokenizer="/nowhere")


def test_tokenizer_of_another_folder(checkpoint, make_llm, tensors):
    folder = checkpoint(tensors)
    (Path(folder) / "tokenizer.json").unlink()
    llm = make_llm(folder, tokenizer="tiny-qwen3")
    assert llm.config.tokenizer == TINY and llm.tokenizer.decode(llm.tokenizer.encode("Hello")) == "Hello"
    num_decoded = len(llm.input_processor.token_bytes)
    (output,) = llm.generate([[5, 6]], SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False), use_tqdm=False)
    assert output.text == "" and len(output.token_ids) == 4 and len(llm.input_processor.token_bytes) == num_decoded


@pytest.mark.parametrize(
    "model, tokenizer, expected",
    [("a/model", None, ("a/model", "v2", True)), ("tiny-qwen3", "a/tokenizer", ("a/tokenizer", None, False))],
)
def test_what_is_fetched_from_the_hub(monkeypatch, model, tokenizer, expected):
    import huggingface_hub

    fetched = []

    def snapshot_download(name, revision, allow_patterns, ignore_patterns):
        assert ignore_patterns == ["consolidated*", "original/*"]
        fetched.append((name, revision, "*.safetensors" in allow_patterns))
        return TINY

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    Config(model, device="cpu", tokenizer=tokenizer, revision="v2")
    assert fetched == [expected]
    if tokenizer is None:
        Config(model, device="cpu", load_format="dummy")
        assert fetched[1:] == [("a/model", None, False)]


def test_parameters_of_plain_modules():
    """They are loaded whole, also those of the model itself."""
    model = nn.Module()
    model.packed_modules_mapping = {}
    model.scale, model.proj = nn.Parameter(torch.ones(4)), nn.Linear(2, 3)
    loaders = weight_loaders(model)
    assert loaders.keys() == {"scale", "proj.weight", "proj.bias"}
    with torch.no_grad():
        for load, shard_id in loaders.values():
            load(torch.full_like(load.args[0], 2.0), *shard_id)
    assert all((parameter == 2).all() for parameter in model.parameters())
