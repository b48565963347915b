"""Heads draft what their definitions say, whatever happens to their sequences, and no token differs."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from common import TINY, generate_by_steps, noise_of_rows
from safetensors.torch import load_file, save_file
from test_drafts import PROMPT_LENGTHS, SCHEDULES, SHORT_PROMPTS, answers, params_of, prompts_of
from test_models import edit
from test_quantization import write_quantized
from test_speculation import margins as margins
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.sampling.sampling_columns import column, seeds
from nanovllm.models import ModelConfig
from nanovllm.models.shared.head_models import Eagle3Head
from nanovllm.spec_decode import draft_heads, drafting_scheduler
from nanovllm.spec_decode.draft_heads import Eagle3, Head, fill
from nanovllm.spec_decode.draft_model import DraftModel
from nanovllm.spec_decode.head_checkpoint import read_eagle3_config
from nanovllm.spec_decode.speculative_config import StepCost

NUM_DRAFTS = 3
KINDS_OF_HEADS = "attention", "key_value"
SETTINGS = dict(max_model_len=96, kvcache_block_size=16, num_kvcache_blocks=64, max_num_seqs=8)
SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.7, 0.5, 0.3]}
EPS = 1e-5

# what differs between heads; the model has 4 layers, and 256 numbers of a hidden state
HEADS = {
    "plain": dict(layer_ids=[1, 2, 3], draft_vocab_size=600),
    "norms": dict(layer_ids=[0, 2, 3], model_type="qwen3", norm_before_residual=True),
    "own embeddings": dict(layer_ids=[0, 0, 1], hidden_size=96, norm_before_residual=True, draft_vocab_size=900),
}


def eagle(folder: Path, **others) -> dict:
    keys = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": NUM_DRAFTS}
    return {"speculative_config": keys | others}


def write_head(folder: Path, form: str, seed: int = 0, tensors: dict | None = None, **options) -> Path:
    """A head with random weights, in the form of its authors, theirs with a pickle, or that of speculators."""
    target = json.loads((Path(options.pop("target", TINY)) / "config.json").read_text())
    size, vocab_size = target["hidden_size"], target["vocab_size"]
    options = {"hidden_size": size, "draft_vocab_size": vocab_size, "norm_before_residual": False} | options
    layer_ids, own_size, num_own = (options.pop(x) for x in ("layer_ids", "hidden_size", "draft_vocab_size"))
    layer = dict(
        model_type=options.pop("model_type", "llama"),
        hidden_size=own_size,
        intermediate_size=80,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=64,
        rms_norm_eps=EPS,
        rope_theta=500.0,
        vocab_size=vocab_size,
        hidden_act="silu",
    )
    layer |= {name: options.pop(name) for name in [*options] if name in layer}
    raw = options | {"draft_vocab_size": num_own, "target_hidden_size": size}
    if form == "speculators":
        raw |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        raw |= {"eagle_aux_hidden_state_layer_ids": layer_ids, "transformer_layer_config": layer}
    else:
        raw |= {"architectures": ["LlamaForCausalLMEagle3"], **layer}
        raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in layer_ids]}
        if 0 in layer_ids:  # which that form can't say
            raw["eagle_aux_hidden_state_layer_ids"] = layer_ids
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = tensors or random_tensors(layer, size, num_own, seed)
    if form != "speculators":
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    if form == "pickle":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def random_tensors(layer: dict, size: int, num_own: int, seed: int) -> dict[str, torch.Tensor]:
    own, queries, keys = layer["hidden_size"], *(layer[f"num_{x}_heads"] * layer["head_dim"] for x in KINDS_OF_HEADS)
    shapes = {
        "fc": (own, 3 * size),
        "layers.0.self_attn.q_proj": (queries, 2 * own),
        "layers.0.self_attn.k_proj": (keys, 2 * own),
        "layers.0.self_attn.v_proj": (keys, 2 * own),
        "layers.0.self_attn.o_proj": (own, queries),
        "layers.0.mlp.gate_proj": (80, own),
        "layers.0.mlp.up_proj": (80, own),
        "layers.0.mlp.down_proj": (own, 80),
        "lm_head": (num_own, own),
        **{f"layers.0.{x}": (own,) for x in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "norm": (own,),
    }
    if own != size:
        shapes["embed_tokens"] = layer["vocab_size"], own
    if layer["model_type"] == "qwen3":
        shapes |= {f"layers.0.self_attn.{x}_norm": (layer["head_dim"],) for x in "qk"}
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    tensors = {
        f"{name}.weight": 3 * draw(*shape) / shape[1] ** 0.5 if len(shape) > 1 else 1 + 0.3 * draw(*shape)
        for name, shape in shapes.items()
    }
    if num_own < layer["vocab_size"]:
        own_ids = torch.randperm(layer["vocab_size"], generator=generator)[:num_own].sort().values
        tensors["d2t"] = own_ids - torch.arange(num_own)
        tensors["t2d"] = torch.zeros(layer["vocab_size"], dtype=torch.bool).index_fill(0, own_ids, True)
    return tensors


# -- what is drafted ---------------------------------------------------------------------------------------------------


class Reference:
    """A definition, on hidden states of transformers; each draft computes all rows from the first on."""

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
        self.embeddings = self.model.get_input_embeddings().weight
        self.hidden: dict[tuple, torch.Tensor] = {}

    def of_model(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        """What the head reads [T, its size] of the model's tokens."""
        known = next((x for text, x in self.hidden.items() if text[: len(token_ids)] == token_ids), None)
        if known is None:
            output = self.model(torch.tensor([token_ids]), output_hidden_states=True)
            known = self.hidden[token_ids] = self.read([x[0] for x in output.hidden_states])
        return known[: len(token_ids)]

    def drafts(self, token_ids: tuple[int, ...], temperature: float, seed: torch.Tensor, num_drafts: int) -> list[int]:
        """The drafts after some tokens; -1 from a near tie on."""
        hidden, tokens = self.of_model(token_ids)[:-1], [*token_ids]
        for _ in range(num_drafts):
            hidden = torch.cat((hidden, self.next_hidden(tokens[1:], hidden)[None]))
            scores = self.logits(hidden[-1])
            if temperature:
                scores = scores / temperature
                scores += noise_of_rows(seed[None], torch.tensor([len(tokens) - 1]), len(scores))[0]
            best = scores.topk(2)
            if best.values[0] - best.values[1] < 1e-3:
                return tokens[len(token_ids) :] + [-1] * (num_drafts - len(tokens) + len(token_ids))
            tokens.append(best.indices[0].item())
        return tokens[len(token_ids) :]


class Eagle3Reference(Reference):
    def __init__(self, folder: Path, target: str = TINY):
        super().__init__(target)
        raw = json.loads((folder / "config.json").read_text())
        self.layer = raw.get("transformer_layer_config", raw)
        self.before = raw["norm_before_residual"]
        ids = raw.get("eagle_aux_hidden_state_layer_ids")
        self.layer_ids = ids or [i + 1 for i in raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
        tensors = load_file(folder / "model.safetensors")
        self.w = {name.replace("midlayer.", "layers.0.").removesuffix(".weight"): x for name, x in tensors.items()}
        self.embeddings = self.w.get("embed_tokens", self.embeddings)

    def read(self, hidden_states: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([hidden_states[i] for i in self.layer_ids], -1) @ self.w["fc"].T

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        own = self.norm("norm", hidden) @ self.w["lm_head"].T
        ids = self.w.get("d2t", torch.zeros(len(own), dtype=torch.int64)) + torch.arange(len(own))
        return torch.full((self.model.config.vocab_size,), -torch.inf).index_copy(0, ids, own)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[name], EPS)

    def next_hidden(self, token_ids: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """Tokens 1, 2, ... and hidden states 0, 1, ... -> the hidden state that follows the last one."""
        w, size = self.w, self.layer["head_dim"]
        embeddings = self.embeddings[token_ids]
        normed = self.norm("layers.0.hidden_norm", hidden)
        both = torch.cat((self.norm("layers.0.input_layernorm", embeddings), normed), -1)
        q, k, v = (
            (both @ w[f"layers.0.self_attn.{x}_proj"].T).unflatten(-1, (-1, size)).transpose(0, 1) for x in "qkv"
        )
        if self.layer["model_type"] == "qwen3":
            q, k = self.norm("layers.0.self_attn.q_norm", q), self.norm("layers.0.self_attn.k_norm", k)
        frequencies = self.layer["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        rotate = torch.polar(torch.ones(()), torch.arange(len(token_ids))[:, None] * frequencies)
        q, k = (torch.complex(*x.chunk(2, -1)) * rotate for x in (q, k))
        q, k = (torch.cat((x.real, x.imag), -1) for x in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = (normed if self.before else hidden) + attended.transpose(0, 1).flatten(1) @ w["layers.0.self_attn.o_proj"].T
        y = self.norm("layers.0.post_attention_layernorm", x)
        gate, up, down = (w[f"layers.0.mlp.{name}_proj"] for name in ("gate", "up", "down"))
        return (x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T)[-1]


class MtpReference(Reference):
    """The layer is transformers' own."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        tensors = load_file(folder / "model.safetensors")
        self.w = {name.removeprefix("mtp."): x for name, x in tensors.items() if name.startswith("mtp.")}
        index = self.model.config.layer_types.index("full_attention")
        self.layer = type(self.model.model.layers[index])(self.model.config, index).eval()
        own = {name.removeprefix("layers.0."): x for name, x in self.w.items() if name.startswith("layers.0.")}
        if num_experts := getattr(self.model.config, "num_experts", 0):  # stacked, in transformers
            gate, up, down = (
                torch.stack([own.pop(f"mlp.experts.{i}.{name}_proj.weight") for i in range(num_experts)])
                for name in ("gate", "up", "down")
            )
            own |= {"mlp.experts.gate_up_proj": torch.cat((gate, up), 1), "mlp.experts.down_proj": down}
        self.layer.load_state_dict(own)

    def read(self, hidden_states: list[torch.Tensor]) -> torch.Tensor:
        return hidden_states[-1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(hidden)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.w[f"{name}.weight"], self.model.config.rms_norm_eps)

    def next_hidden(self, token_ids: list[int], hidden: torch.Tensor) -> torch.Tensor:
        embeddings = self.norm("pre_fc_norm_embedding", self.embeddings[token_ids])
        both = torch.cat((embeddings, self.norm("pre_fc_norm_hidden", hidden)), -1)
        x = (both @ self.w["fc.weight"].T)[None]
        cos_sin = self.model.model.rotary_emb(x, torch.arange(len(token_ids))[None])
        return self.norm("norm", self.layer(x, position_embeddings=cos_sin, attention_mask=None)[0])[-1]


def text_of(runner, req_index: int) -> tuple[int, ...]:
    """A sequence's token ids on the device, when drafts have been made for it."""
    places = torch.arange(int(runner.tables.num_tokens[req_index]))
    slots = runner.tables.block_tables[req_index][places // 16].long() * 16 + places % 16
    return tuple(runner.slot_token_ids[slots].tolist())


@pytest.fixture(autouse=True)
def wrong_drafts_may_cost(monkeypatch):
    """Else the engine would stop drafting wrong tokens before they had shown anything."""
    monkeypatch.setattr(drafting_scheduler, "LIMIT", 100.0)


@pytest.fixture
def drafted(monkeypatch) -> list[tuple]:
    """What heads draft: (token ids so far, temperature, seed, drafts)."""
    found, draft = [], Head.draft

    def record(self, arrays):
        draft(self, arrays)
        for i in arrays["req_indices"].tolist():
            own = self.runner.tables.last_token_ids[i, 1 : 1 + arrays["drafts"].shape[1]].tolist()
            params = self.runner.tables.params[i]
            temperature, seed = column(params[None], "temperature").item(), seeds(params[None])[0].clone()
            found.append((text_of(self.runner, i), temperature, seed, [x for x in own if x >= 0]))

    monkeypatch.setattr(Head, "draft", record)
    return found


def requests_of_heads(vocab_size: int = 2048) -> list[tuple]:
    """Some share a prefix, some are short, and one has three answers; no two that share a block go on otherwise."""
    rng = random.Random(0)
    ids = lambda n: [rng.randrange(5, vocab_size) for _ in range(n)]
    prefix = ids(40)
    prompts = [prefix, ids(1), ids(17), prefix + ids(3), ids(30), ids(5)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=10 + i, ignore_eos=True) for i in range(6)]
    params[4] = SamplingParams(temperature=1.0, seed=9, n=3, max_tokens=9, ignore_eos=True)
    return [*zip(prompts, params)]


@pytest.mark.parametrize(
    "head, form, schedule, max_seqs, async_scheduling",
    [
        ("plain", "authors", "chunks", 4, False),
        ("norms", "speculators", "preemptions", 8, True),
        ("own embeddings", "authors", "at once", 8, True),
    ],
)
def test_drafts_are_those_of_the_definition(
    make_llm, tmp_path, drafted, head, form, schedule, max_seqs, async_scheduling
):
    """In chunks of prompts, after hits, in forks and after preemptions; after drafts that were taken, and others.

    While more than `max_seqs` sequences run, there are no drafts, and the head computes these rows later.
    """
    folder = write_head(tmp_path / "head", form, **HEADS[head])
    settings = SETTINGS | SCHEDULES[schedule] | dict(async_scheduling=async_scheduling)
    llm = make_llm(**settings, **eagle(folder, **SYNTHETIC, disable_by_batch_size=max_seqs))
    generate_by_steps(llm, requests_of_heads())
    generate_by_steps(llm, requests_of_heads()[:2])  # which finds the prompt in the cache
    stats = llm.stats()
    assert stats["preemptions"] > 0 or schedule != "preemptions"
    assert 0 < stats["spec_decode"]["accepted_tokens"] < stats["spec_decode"]["draft_tokens"]
    compare(Eagle3Reference(folder), drafted)


def compare(reference: Reference, drafted: list[tuple]) -> None:
    num_compared = 0
    for token_ids, temperature, seed, drafts in sorted(drafted, key=lambda x: -len(x[0])):
        expected = reference.drafts(token_ids, temperature, seed, len(drafts))
        num_sure = (*expected, -1).index(-1)
        assert drafts[:num_sure] == expected[:num_sure], (len(token_ids), temperature)
        num_compared += num_sure
    assert num_compared > 60


MTP = {"mtp_num_hidden_layers": 1}
MTP_SETTINGS = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
HYBRID = ["linear_attention", "full_attention"]


@pytest.fixture
def mtp_folder(tmp_path, monkeypatch, request) -> Path:
    """A model of Qwen3.5 without states, and its head; the family and the kinds of layers may be others.

    Hybrid ones of Qwen3.5 are whole checkpoints, with a vision part.
    """
    pytest.importorskip("transformers.models.qwen3_5_moe", reason="transformers 4 does not have Qwen3.5")
    import test_hybrid

    family, kinds = getattr(request, "param", ("Qwen3_5", 2 * ["full_attention"]))
    entries = {} if family == "Qwen3_5" else test_hybrid.EXPERTS
    case = family, kinds, (4, 2, 32), (2, 4, 8, 8), entries
    monkeypatch.setitem(test_hybrid.CASES, "attention", case)
    is_whole = family.startswith("Qwen3_5") and kinds == HYBRID
    folder = Path(test_hybrid.make_checkpoint(tmp_path / "model", "attention", is_whole))
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    own = {"mtp.fc.weight": draw(64, 128) / 8}
    own |= {f"mtp.{name}.weight": 0.3 * draw(64) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    layer = f"model.{'language_model.' * is_whole}layers.{kinds.index('full_attention')}."
    for name, x in tensors.items():
        if name.startswith(layer):
            own[name.replace(layer, "mtp.layers.0.")] = draw(*x.shape) * (x.shape[-1] ** -0.5 if x.dim() > 1 else 0.3)
    save_file(tensors | own, folder / "model.safetensors")
    text_config = json.loads((folder / "config.json").read_text()).get("text_config", {})
    edit(str(folder), **{"text_config": text_config | MTP} if is_whole else MTP)
    return folder


@pytest.mark.parametrize(
    "mtp_folder, schedule, async_scheduling",
    [
        (("Qwen3_5", ["full_attention"] * 2), "chunks", True),
        (("Qwen3_5", HYBRID), "preemptions", True),
        (("Qwen3_5Moe", HYBRID), "chunks", False),
        (("Qwen3Next", HYBRID), "at once", True),
    ],
    indirect=["mtp_folder"],
    ids=str,
)
def test_mtp(make_llm, mtp_folder, drafted, schedule, async_scheduling):
    """A head in the model's own checkpoint; its drafts, and that no token differs."""
    settings = SETTINGS | SCHEDULES[schedule] | dict(async_scheduling=async_scheduling)
    llm = make_llm(str(mtp_folder), **settings, speculative_config=MTP_SETTINGS | SYNTHETIC)
    generate_by_steps(llm, requests_of_heads(512))
    compare(MtpReference(mtp_folder), drafted)
    stats = llm.stats()
    assert stats["preemptions"] > 0 or schedule != "preemptions"
    assert 0 < stats["spec_decode"]["accepted_tokens"] < stats["spec_decode"]["draft_tokens"]
    llm.exit()
    llm = make_llm(str(mtp_folder), **settings)
    assert "MTP part" in repr(llm)
    expected = answers(generate_by_steps(llm, requests_of_heads(512)))
    llm = make_llm(str(mtp_folder), **settings, speculative_config=MTP_SETTINGS)
    assert "MTP" not in repr(llm)
    assert answers(generate_by_steps(llm, requests_of_heads(512))) == expected
    assert llm.stats()["spec_decode"]["draft_tokens"] > 50


plain_draft = Head.draft


def draft_known(monkeypatch, texts: list[tuple[int, ...]], num_ids: int, fraction: float) -> None:
    """Let heads draft how one of `texts` goes on. About `fraction` of the drafts are right, the others are wrong."""
    rng = random.Random(0)

    def draft_text(self, arrays):
        plain_draft(self, arrays)
        for i in arrays["req_indices"].tolist():
            text, own = text_of(self.runner, i), self.runner.tables.last_token_ids[i, 1 : 1 + arrays["drafts"].shape[1]]
            known = [x[len(text) :] for x in texts if x[: len(text)] == text]
            for j, token_id in enumerate(rng.choice(known)[: int((own >= 0).sum())] if known else ()):
                own[j] = token_id if rng.random() < fraction else (token_id + 1) % num_ids

    monkeypatch.setattr(Head, "draft", draft_text)


@pytest.mark.parametrize("schedule", ["chunks", "preemptions"])
@pytest.mark.parametrize("mtp_folder", [("Qwen3_5", HYBRID)], indirect=True, ids=str)
def test_drafts_of_a_device_in_states(make_llm, mtp_folder, monkeypatch, margins, schedule):
    """Steps are queued before the host knows how many drafts were right, which here are all or some of them."""
    settings = SETTINGS | SCHEDULES[schedule] | dict(async_scheduling=True)
    requests = [(prompt, replace(params, max_tokens=20)) for prompt, params in requests_of_heads(512)]
    outputs = generate_by_steps(margins(make_llm(str(mtp_folder), **settings)), requests)
    texts = [(*x.prompt_token_ids, *answer.token_ids) for x in outputs for answer in x.outputs]
    for fraction in (1.0, 0.7):
        draft_known(monkeypatch, texts, 512, fraction)
        llm = make_llm(str(mtp_folder), **settings, speculative_config=MTP_SETTINGS)
        assert answers(generate_by_steps(llm, requests)) == answers(outputs)
        stats = llm.stats()
        assert stats["preemptions"] > 0 or schedule != "preemptions"
        num_drafted, num_accepted = (stats["spec_decode"][name] for name in ("draft_tokens", "accepted_tokens"))
        assert num_drafted > 50 and 0.5 * fraction**2 <= num_accepted / num_drafted <= fraction


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("mtp_folder", [("Qwen3Next", ["linear_attention", *HYBRID])], indirect=True, ids=str)
def test_heads_of_a_hybrid_model(make_llm, mtp_folder, drafted, tmp_path):
    """EAGLE-3 reads hidden states before layers of both kinds; and two ranks have their parts of the states."""
    head = write_head(tmp_path / "head", "authors", target=mtp_folder, layer_ids=[0, 1, 2])
    generate_by_steps(make_llm(str(mtp_folder), **SETTINGS, **eagle(head, **SYNTHETIC)), requests_of_heads(512))
    compare(Eagle3Reference(head, str(mtp_folder)), drafted)
    found = []
    for settings in ({}, {"tensor_parallel_size": 2, "speculative_config": MTP_SETTINGS}):
        llm = make_llm(str(mtp_folder), **SETTINGS, **settings)
        found.append(answers(generate_by_steps(llm, requests_of_heads(512))))
    assert found[0] == found[1]
    assert llm.stats()["spec_decode"]["draft_tokens"] > 50


@pytest.mark.parametrize("mtp_folder", [(x, ["full_attention"] * 2) for x in ("Qwen3_5", "Qwen3Next")], indirect=True)
@pytest.mark.parametrize("format_name", ["small-blocks", "ct-channel"])
def test_quantized_mtp(make_llm, mtp_folder, tmp_path, monkeypatch, format_name):
    """The head of an FP8 checkpoint is dequantized: its weights are those of a checkpoint without a format."""
    filled = []
    monkeypatch.setattr(
        draft_heads, "fill", lambda head, tensors, folder: filled.append(tensors) or fill(head, tensors, folder)
    )
    folders = write_quantized(str(mtp_folder), tmp_path, format_name)
    for folder in folders:
        llm = make_llm(folder, **SETTINGS, speculative_config=MTP_SETTINGS)
        outputs = llm.generate(
            [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False
        )
        assert len(outputs[0].token_ids) == 6 and llm.stats()["spec_decode"]["draft_tokens"] > 0
    quantized, plain = filled
    assert quantized.keys() == plain.keys() and any(name.endswith("q_proj.weight") for name in plain)
    for name, tensor in quantized.items():
        torch.testing.assert_close(tensor.float(), plain[name].float())
    tensors = load_file(f"{folders[0]}/model.safetensors")
    (scale,) = [name for name in tensors if "mtp.layers.0.self_attn.o_proj.weight_scale" in name]
    save_file({name: x for name, x in tensors.items() if name != scale}, f"{folders[0]}/model.safetensors")
    with pytest.raises(ValueError, match="mtp.layers.0.self_attn.o_proj.weight: has no scales of shape"):
        make_llm(folders[0], **SETTINGS, speculative_config=MTP_SETTINGS)


def test_refused_mtp(mtp_folder):
    settings = {"device": "cpu", "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    with pytest.raises(ValueError, match="method='mtp': models of the family 'qwen3' have no head"):
        LLM(TINY, **settings)
    tensors = load_file(mtp_folder / "model.safetensors")
    for name, message in [("mtp.layers.1.x", "must have a head of one layer"), ("mtp.x", "belong to no parameter: x")]:
        save_file(tensors | {name: torch.ones(1)}, mtp_folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            LLM(str(mtp_folder), dtype="float32", **settings)
    save_file({name: x for name, x in tensors.items() if "mtp" not in name}, mtp_folder / "model.safetensors")
    with pytest.raises(ValueError, match="must have a head of one layer"):
        LLM(str(mtp_folder), **settings)


def test_forms_are_the_same_head(make_llm, tmp_path, drafted):
    found = []
    for form in ("authors", "pickle", "speculators"):
        llm = make_llm(**SETTINGS, **eagle(write_head(tmp_path / form, form, **HEADS["plain"])))
        generate_by_steps(llm, requests_of_heads()[2:4])
        found.append([drafts for _, _, _, drafts in drafted])
        drafted.clear()
        llm.exit()
    assert found[0] == found[1] == found[2] and len(found[0]) > 8


# -- what becomes of drafts --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bigrams(two_layer_model, tmp_path_factory) -> tuple[str, Path]:
    return make_bigrams(two_layer_model, tmp_path_factory.mktemp("bigrams"))


def make_bigrams(model: str, folder: Path, num_heads: int = 1) -> tuple[str, Path]:
    """A model whose next token depends on the last one alone, and a head that predicts the same.

    The model's layers add nothing. The head's attention finds a row's own embedding, and nothing else reaches the norm.
    """
    shutil.copytree(model, folder / "model")
    weights = load_file(folder / "model/model.safetensors")
    adds = lambda name: name.endswith(("o_proj.weight", "down_proj.weight"))
    save_file({k: x * 0 if adds(k) else x for k, x in weights.items()}, folder / "model/model.safetensors")
    size = len(weights["model.norm.weight"])
    shape = dict(num_attention_heads=num_heads, num_key_value_heads=num_heads, head_dim=size // num_heads)
    shape |= dict(rms_norm_eps=1e-6)
    layer = dict(model_type="llama", hidden_size=size, vocab_size=2048) | shape
    tensors = random_tensors(layer, size, 2048, seed=1)
    own_embedding = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
    for name in ("q", "k", "v"):
        tensors[f"layers.0.self_attn.{name}_proj.weight"] = own_embedding * (1 if name == "v" else 4)
    tensors["layers.0.self_attn.o_proj.weight"] = torch.eye(size)
    for name in ("mlp.down_proj", "hidden_norm"):
        tensors[f"layers.0.{name}.weight"] *= 0
    for name in ("layers.0.input_layernorm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(size)
    tensors["lm_head.weight"] = weights["model.embed_tokens.weight"]
    options = dict(target=folder / "model", layer_ids=[0, 1, 1], norm_before_residual=True, **shape)
    return str(folder / "model"), write_head(folder / "head", "speculators", tensors=tensors, **options)


@pytest.mark.parametrize("schedule, async_scheduling", [("preemptions", False), ("chunks", True)])
def test_not_one_token_differs(make_llm, bigrams, two_layer_model, tmp_path, schedule, async_scheduling):
    """Whether all drafts are right, or hardly any."""
    model, right = bigrams
    wrong = write_head(tmp_path / "wrong", "authors", target=two_layer_model, layer_ids=[0, 1, 1])
    rng = random.Random(schedule)
    prompts = prompts_of(rng, SHORT_PROMPTS if schedule == "preemptions" else PROMPT_LENGTHS)[:7]
    params = [replace(x, max_tokens=min(x.max_tokens, 36)) for x in (params_of(rng, i) for i in range(len(prompts)))]
    settings = SETTINGS | SCHEDULES[schedule] | dict(async_scheduling=async_scheduling)
    for target, head in ((model, right), (two_layer_model, wrong)):
        llm = make_llm(target, **settings)
        expected = answers(llm.generate(prompts, params, use_tqdm=False))
        llm.exit()
        llm = make_llm(target, **settings, **eagle(head))
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
        assert answers(outputs) == expected
        if head is right or schedule == "chunks":
            assert answers(generate_by_steps(llm, zip(prompts[:4], params[:4]))) == expected[:4]
        assert stats["preemptions"] > 0 or schedule != "preemptions"
        num_drafted, num_accepted = (stats["spec_decode"][name] for name in ("draft_tokens", "accepted_tokens"))
        if head is right:  # but for drafts past the end of an answer
            assert num_drafted - sum(len(x.outputs) for x in outputs) * 2 * NUM_DRAFTS <= num_accepted > 100
        else:
            assert num_accepted < 0.2 * num_drafted > 20
        llm.exit()


@pytest.mark.usefixtures("forked_ranks")
def test_ranks(make_llm, bigrams):
    """Each has the whole head, and embeddings that are divided."""
    model, head = bigrams
    prompts = [[5, 6, 7], [8] * 20]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    found = []
    for settings in ({}, {"tensor_parallel_size": 2, **eagle(head)}):
        llm = make_llm(model, **SETTINGS, **settings)
        found.append(answers(llm.generate(prompts, params, use_tqdm=False)))
    assert found[0] == found[1]
    assert llm.stats()["spec_decode"]["accepted_tokens"] >= 20


def test_dummy_weights(make_llm, tmp_path):
    """Of a head whose tensors are not there."""
    folder = write_head(tmp_path / "head", "speculators", **HEADS["own embeddings"])
    (folder / "model.safetensors").unlink()
    llm = make_llm(**SETTINGS, **eagle(folder), load_format="dummy")
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert llm.stats()["spec_decode"]["draft_tokens"] > 0


# -- on CUDA -----------------------------------------------------------------------------------------------------------

ON_CUDA = {
    "graphs": dict(dtype="float32"),
    "eager": dict(dtype="float32", enforce_eager=True),
    "bit for bit": dict(dtype="bfloat16", batch_invariant=True, kvcache_block_size=64),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ON_CUDA)
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
@pytest.mark.parametrize("mtp_folder", [("Qwen3_5", ["full_attention"] * 2)], indirect=True, ids=["no states"])
def test_drafters_on_cuda(make_llm, tmp_path, mtp_folder, monkeypatch, method, kind):
    """The same tokens as without drafts, whether these are right or wrong, with preemptions, forks and prefix hits.

    If no sequence has to catch up, nothing waits for the device.
    """
    draft = DraftModel.draft

    def refuse_waits(self, arrays):
        torch.cuda.set_sync_debug_mode("default" if len(arrays["behind"]) else "error")
        draft(self, arrays)
        torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(DraftModel, "draft", refuse_waits)
    monkeypatch.setattr(StepCost, "of", lambda *sizes: 1.0)  # else no model would draft for itself
    model, settings = TINY, {"model": TINY}
    if method == "eagle3":
        model, head = make_bigrams(TINY, tmp_path / "bigrams", num_heads=4)
        settings = {"model": str(head)}
    elif method == "mtp":
        model, settings = str(mtp_folder), {}
    drafting = {"method": method, "num_speculative_tokens": NUM_DRAFTS, **settings, "disable_by_batch_size": 5}
    rng = random.Random(0)
    vocab_size = 512 if method == "mtp" else 2048
    params = [replace(params_of(rng, i), max_tokens=rng.randint(1, 40), bad_words=None) for i in range(12)]
    params = [replace(x, stop_token_ids=None, logit_bias=None, ignore_eos=True) for x in params]
    prompts = [[rng.randrange(5, vocab_size) for _ in range(rng.choice((1, 3, 14, 40)))] for _ in params]
    prompts[5], prompts[8] = prompts[2][:14] * 2, prompts[2][:14] * 3
    options = SETTINGS | dict(device="cuda", max_num_batched_tokens=64) | ON_CUDA[kind]
    options |= dict(num_kvcache_blocks={16: 8, 64: 6}[options["kvcache_block_size"]])
    found = []
    for speculative in (None, drafting):
        llm = make_llm(model, **options, speculative_config=speculative)
        outputs = generate_by_steps(llm, zip(prompts, params))
        outputs += llm.generate(prompts[:3], params[:3], use_tqdm=False)  # no more than may draft
        found.append([[(x.token_ids, x.text) for x in output.outputs] for output in outputs])
        stats = llm.stats()
        llm.exit()
    assert stats["preemptions"] > 0 or kind == "bit for bit"
    assert stats["spec_decode"]["draft_tokens"] > 50
    accepted = stats["spec_decode"]["accepted_per_position"]
    assert method == "mtp" or accepted[-1] > 5, accepted
    assert found[0] == found[1]


@pytest.mark.gpu
def test_sleep_on_cuda(make_llm, free_drafts, tmp_path):
    """What drafts stays on the device; its memory of tokens is computed again."""
    model, head = make_bigrams(TINY, tmp_path / "bigrams", num_heads=4)
    llm = make_llm(model, **SETTINGS, device="cuda", enable_sleep_mode=True, **eagle(head))
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    found = []
    for level in (0, 1, 2):
        if level:
            llm.sleep(level)
            llm.wake_up()
        if level == 2:
            llm.load_weights(load_file(f"{model}/model.safetensors").items())
        before = llm.stats()["spec_decode"]["accepted_tokens"]
        outputs = llm.generate([[5, 6, 7], [8] * 20], params, use_tqdm=False)
        found.append(
            ([x.outputs[0].token_ids for x in outputs], llm.stats()["spec_decode"]["accepted_tokens"] - before)
        )
    assert found[0] == found[1] == found[2] and found[0][1] > 30


# -- heads that are refused --------------------------------------------------------------------------------------------

LAYERS = "eagle_aux_hidden_state_layer_ids"
REFUSED = [
    ({"speculators_model_type": "eagle"}, "config.json: speculators_model_type='eagle': must be one of 'eagle3'"),
    ({"target_hidden_size": 320}, "config.json: target_hidden_size=320: must be 256, as in the model"),
    ({"hidden_size": 128}, "config.json: hidden_size=128: must be 256, as in the model"),
    ({"vocab_size": 2047}, "config.json: vocab_size=2047: must be 2048, as in the model"),
    ({"draft_vocab_size": 2049}, "config.json: draft_vocab_size=2049: must be at most 2048"),
    ({"num_hidden_layers": 2}, "config.json: num_hidden_layers=2: must be at most 1"),
    ({"norm_output": True}, "config.json: norm_output=True: is not supported"),
    ({"norm_before_residual": "yes"}, "config.json: norm_before_residual='yes': must be True or False"),
    ({"model_type": "gpt"}, "config.json: model_type='gpt'"),
    ({LAYERS: [1, 2]}, f"config.json: {LAYERS}=[1, 2]: must be three layers of the model's 4, in ascending order"),
    ({LAYERS: [1, 3, 2]}, f"config.json: {LAYERS}=[1, 3, 2]: must be three layers"),
    ({LAYERS: [1, 2, 4]}, f"config.json: {LAYERS}: a layer=4: must be at most 3"),
    ({"eagle_config": {LAYERS: [0, 1, 3]}}, f"config.json: {LAYERS}: a layer=3: must be at most 2"),
    ({"eagle_config": {}}, f"config.json: {LAYERS}=[2, 2, 1]: must be three layers of the model's 4"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "config.json: use_aux_hidden_state=False: must be one of True"),
]


@pytest.mark.parametrize("changes, message", REFUSED)
def test_refused_heads(tmp_path, changes, message):
    """Before the model is loaded."""
    folder = write_head(tmp_path / "head", "authors", **HEADS["plain"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises((ValueError, TypeError), match="speculative_config: ") as raised:
        LLM(TINY, device="cpu", **eagle(folder))
    assert f"{folder}/{message}" in str(raised.value)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("d2t", None, "1 tensors are missing: d2t"),
        ("d2t", lambda x: x[1:], "d2t: the checkpoint has shape [599], the model needs [600]"),
        ("d2t", lambda x: x + 2000, "d2t: must lead to different token ids from 0 to 2047"),
        ("d2t", lambda x: -torch.arange(600), "d2t: must lead to different token ids"),
        ("fc.weight", None, "1 tensors are missing: fc.weight"),
        ("fc.weight", lambda x: x[:, 1:], "fc.weight: the checkpoint has shape [256, 767], the model needs [256, 768]"),
        ("norm.weight", lambda x: x * torch.nan, "1 tensors are NaN or infinite in torch.float32: norm.weight"),
        ("fc.bias", lambda x: torch.ones(256), "1 tensors belong to no parameter: fc.bias"),
    ],
)
def test_refused_tensors(tmp_path, name, change, message):
    folder = write_head(tmp_path / "head", "authors", **HEADS["plain"])
    tensors = load_file(folder / "model.safetensors")
    value = tensors.pop(name, None)
    save_file(tensors | ({name: change(value).contiguous()} if change else {}), folder / "model.safetensors")
    config = read_eagle3_config(folder, ModelConfig.read(Path(TINY)), torch.float32, with_weights=True)
    head = Eagle3.__new__(Eagle3)
    head.model = Eagle3Head(config, 16)
    with pytest.raises(ValueError, match=str(folder)) as raised:
        head.fill(folder)
    assert message in str(raised.value)


def test_a_broken_pickle(tmp_path):
    folder = write_head(tmp_path / "head", "pickle", **HEADS["plain"])
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"speculative_config: .*pytorch_model.bin: can't be read"):
        LLM(TINY, device="cpu", **eagle(folder))
