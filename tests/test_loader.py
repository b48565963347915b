"""Checkpoints: what is loaded equals transformers' model of the same folder, and what is wrong is refused by name."""
import json
import shutil
import socket
from pathlib import Path

import pytest
import torch
from conftest import TINY
from safetensors.torch import load_file, save_file

from nanovllm import SamplingParams
from nanovllm.utils.hub import find_model

PROMPT = [5, 1999, 300, 42, 7, 7, 1024, 11]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LAYER = "model.layers.1."


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

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
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


def test_tied_checkpoint_that_stores_its_head(checkpoint, make_llm, tensors, tiny_logits):
    """The embedding is what counts, wherever the other tensor lies in the files."""
    folder = checkpoint({"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, tensors)
    assert torch.equal(ours(make_llm(folder))[1], tiny_logits)


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
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"model_type": "llama"}, "model_type='llama'.*'qwen3'"),
        ({"model_type": None}, "model_type=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
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


def test_find_model(monkeypatch, tmp_path):
    assert find_model("tiny-qwen3") == find_model(TINY) == Path(TINY)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert find_model("~/model") == tmp_path / "model"
