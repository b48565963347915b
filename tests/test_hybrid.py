"""Hybrid models: the gated delta rule, and families with it in small random models that transformers has made."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
import transformers
from common import (
    CUDA,
    DEVICE,
    DTYPES,
    TINY,
    TOLERANCE,
    each_dtype,
    generate_by_steps,
    pairs,
    runs_as_on_cuda,
    warnings_in,
)
from safetensors.torch import load_file, save_file
from test_cuda_graph import capture
from test_drafts import KnownAnswers
from test_drafts import drafts as drafts  # fixtures
from test_invariant import assert_drafts_change_no_bit, assert_invariant, invariant
from test_models import GROUPS, ThreadRanks, edit
from test_models import make_checkpoint as make_dense_checkpoint
from test_packed import write_checkpoint
from test_quantization import BLOCK, FORMATS, write_quantized
from test_speculation import METHODS, accepted, drafting, few_likely, random_requests
from test_speculation import margins as margins
from test_states import assert_same_as_reference, poison

from nanovllm import BeamSearchParams, SamplingParams
from nanovllm.cache.state import State, StateSpec
from nanovllm.config import Config
from nanovllm.cuda import graphs as cuda_graph
from nanovllm.cuda.buffers import make_buffers
from nanovllm.cuda.graphs import MixedGraphs, graph_shapes
from nanovllm.delta_net.delta_net_drafts import delta_net_drafts
from nanovllm.delta_net.gated_delta_net import (
    DeltaHeads,
    GatedDeltaNet,
    chunk_delta_rule,
    delta_net_chunks,
    delta_net_step,
    recurrent_delta_rule,
)
from nanovllm.layers.sigmoid_gate import SigmoidGate, sigmoid_gate
from nanovllm.models import ModelConfig, make_model
from nanovllm.utils.construction import constructing
from nanovllm.utils.context import Context, attention_context
from nanovllm.utils.loader import load_model
from nanovllm.utils.tensor_parallel import TensorParallel

qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
pytest.importorskip("transformers.models.qwen3_5_moe", reason="transformers 4 does not have Qwen3.5")

KINDS = ["linear_attention", "linear_attention", "full_attention"]
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=40)
STACKED = EXPERTS | {"shared_expert_intermediate_size": 24}  # a shared expert like the others
ROPE = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}
YARN = ROPE | {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 64}
# family, layers, attention heads, key-value heads, head_dim; heads of the delta rule; other entries
CASES = {
    "qwen3_next": ("Qwen3Next", KINDS[1:], (4, 2, 32), (4, 8, 16, 24), EXPERTS | {"norm_topk_prob": True}),
    "qwen3_next-dense-layer": ("Qwen3Next", KINDS[1:], (4, 2, 32), (2, 2, 16, 16), STACKED | {"mlp_only_layers": [0]}),
    "qwen3_5": ("Qwen3_5", KINDS, (4, 2, 256), (2, 6, 16, 24), {}),
    "qwen3_5-tied": ("Qwen3_5", KINDS[1:], (2, 1, 32), (4, 4, 24, 8), {"tie_word_embeddings": True}),
    "qwen3_5-yarn": ("Qwen3_5", KINDS[1:], (2, 1, 32), (1, 2, 8, 8), {"rope_parameters": YARN}),
    "qwen3_5_moe": ("Qwen3_5Moe", KINDS[:0:-1], (4, 1, 32), (4, 8, 16, 24), STACKED),
}
VISION = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=64, patch_size=4)
SETTINGS = dict(max_model_len=352, kvcache_block_size=16, num_kvcache_blocks=120, max_num_seqs=8)
SCHEDULES = {
    "at once": {},
    "chunks": dict(max_num_batched_tokens=50, max_num_mixed_tokens=30),
    "preemptions": dict(num_kvcache_blocks=22),
    "one at a time": dict(max_num_seqs=1, num_kvcache_blocks=23),
    "without prefix cache": dict(enable_prefix_caching=False),
}


SAVED: dict[str, torch.nn.Module] = {}  # models of text alone, by their folders


def make_checkpoint(folder: Path, name: str, is_whole: bool = False) -> str:
    """Save a model of transformers with random weights, and the bundled tokenizer; whole ones have a vision part."""
    folder.mkdir(parents=True, exist_ok=True)
    model, files = saved_model(name, is_whole, repr(CASES[name]))
    for file, content in files.items():
        (folder / file).write_bytes(content)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(TINY) / file, folder)
    if not is_whole:
        SAVED[str(folder)] = model
    return str(folder)


@cache
def saved_model(name: str, is_whole: bool, case: str) -> tuple[torch.nn.Module, dict[str, bytes]]:
    """It is not to be changed; and what transformers saves, by the file's name. `case` is that of the name."""
    family, layer_types, (heads, kv_heads, head_dim), delta_heads, entries = CASES[name]
    rope = entries.get("rope_parameters", ROPE) | (
        {"mrope_section": [head_dim // 8 - 2, 1, 1], "mrope_interleaved": True} if "5" in family else {}
    )
    names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"
    entries = entries | {"rope_parameters": rope}
    entries |= {f"linear_{name}": size for name, size in zip(names, delta_heads)}
    shape = dict(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
        eos_token_id=None,
        **({} if family == "Qwen3_5Moe" else {"intermediate_size": 96}),
    )
    if is_whole:
        vision = VISION | {"num_position_embeddings": 16}
        config = getattr(transformers, f"{family}Config")(
            text_config=shape | entries, vision_config=vision, tie_word_embeddings="tie_word_embeddings" in entries
        )
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
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    return model, files


class Checkpoints:
    """Folders, and transformers' log-probabilities of what follows each token, by the name of the case."""

    def __init__(self, folder: Path):
        self.root = folder
        self.folder = cache(self.folder)
        self.model = cache(self.model)

    def folder(self, name: str) -> str:
        return make_checkpoint(self.root / name, name.removesuffix("-whole"), name.endswith("-whole"))

    def model(self, name: str):
        folder = self.folder(name)
        if (model := SAVED.get(folder)) is None:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
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
    requests = []
    for i, (prompt, kind) in enumerate(zip(prompts, 3 * kinds)):
        max_tokens = 14 if 2 < i < 7 else 2 + i // 2
        params = SamplingParams(**{"temperature": 1.0, "seed": i, "max_tokens": max_tokens, **options, **kind})
        requests.append((prompt, params))
    return requests


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


def layer_of(heads: DeltaHeads, dtype: torch.dtype, state_dtype: torch.dtype = torch.float32) -> GatedDeltaNet:
    """With random weights, as large as they are in trained models."""
    weights = [(sum(heads.sizes) + heads.sizes[2], (range(sum(heads.sizes) + heads.sizes[2]),))]
    gates = [(2 * heads.num_values, (range(2 * heads.num_values),))]
    with constructing(TensorParallel(), dtype):
        layer = GatedDeltaNet(8, heads, 1e-6, (weights, gates), state_dtype).to(DEVICE)
    for name, parameter in layer.named_parameters():
        parameter.normal_()
        if name == "A_log":
            parameter.sub_(2)
    return layer


class RuleCase:
    """A layer of some heads, and states with random numbers in `num_rows` rows, on the test device.

    The reference computes the same numbers in float32, as products in a 16-bit dtype differ by the order of sums.
    """

    def __init__(self, heads: tuple, dtype: torch.dtype, num_rows: int, state_dtype: torch.dtype = torch.float32):
        torch.manual_seed(0)
        self.heads, self.dtype = DeltaHeads(*heads), dtype
        self.layer = layer_of(self.heads, dtype, state_dtype)
        shapes = zip(*self.layer.cache_spec()[:2])
        self.states = State(*(torch.randn(1, num_rows, *shape, device=DEVICE).to(kind) for shape, kind in shapes))

    def check(self, op, plain_op, num_tokens: int, *arguments, count: int | None = None) -> None:
        """Rows that are not to be written keep their NaN."""
        sizes = sum(self.heads.sizes) + self.heads.sizes[2], 2 * self.heads.num_values
        inputs = torch.randn(num_tokens, sum(sizes), device=DEVICE).to(self.dtype).split(sizes, 1)
        layer = layer_of(self.heads, torch.float32)
        layer.load_state_dict(self.layer.state_dict())
        expected_states = State(*(x[None].to(torch.float32, copy=True) for x in self.states.tensors))
        counts = [] if count is None else [torch.tensor([count], dtype=torch.int32, device=DEVICE)]
        out = torch.full((num_tokens, self.heads.sizes[2]), torch.nan, device=DEVICE).to(self.dtype)
        expected = out.float()
        plain_op(*(x.float() for x in inputs), layer, expected_states, *arguments, expected, *counts)
        op(*inputs, self.layer, self.states, *arguments, out, *counts)
        assert torch.equal(out.isnan(), expected.isnan())
        out, expected = out.nan_to_num(), expected.nan_to_num()
        for found, wanted in zip((out, *self.states.tensors), (expected, *expected_states.tensors)):
            for row, wanted_row in zip(found.flatten(1).float(), wanted.flatten(1)):
                error = (row - wanted_row).norm() / wanted_row.norm().clamp(min=1e-9)
                assert error < 4 * TOLERANCE[self.dtype], error


WAYS = ["kernels.ops", "invariant.cuda_ops"]  # the fast kernels, and those for any batch
HEADS = [(2, 6, 16, 16, 4), (1, 1, 32, 24, 4), (3, 6, 24, 20, 2), (2, 2, 128, 64, 3)]


@pytest.mark.parametrize("num_rows, count", [(1, None), (3, None), (3, 2)])
@pytest.mark.parametrize("heads, dtype", pairs(HEADS, DTYPES), ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_step_kernel(way, heads, dtype, num_rows, count):
    """Each state is read and written in its row, and no other row."""
    ops = pytest.importorskip(f"nanovllm.{way}")
    rows = torch.tensor([5, 0, 3][:num_rows], dtype=torch.int32, device=DEVICE)
    case = RuleCase(heads, dtype, 7, dtype)  # states have the model's dtype
    case.check(ops.delta_net_step, delta_net_step.__wrapped__, num_rows, rows, count=count)


@pytest.mark.parametrize(
    "case, dtype", pairs(pairs([(1, 2, 16, 16, 4), (1, 1, 24, 40, 2)], [True, False]), DTYPES), ids=str
)
@pytest.mark.parametrize("way", WAYS)
def test_chunks_kernel(way, case, dtype):
    """Of sequences with fewer tokens than a window, a chunk and more; a snapshot is read, and stays.

    As in a CUDA graph, with room for three sequences that decode, of which there are two, and for a chunk more.
    """
    ops, (heads, is_padded) = pytest.importorskip(f"nanovllm.{way}"), case
    lengths = [1, 70, 2, 64, 3, 3]
    rows = torch.tensor([[5, 0, 3, 1, 8, 8], [5, 0, 3, 1, 2, 4]], dtype=torch.int32, device=DEVICE)
    num_tokens, num_seqs, count = sum(lengths), len(lengths), None
    if is_padded:
        lengths, count = [1, 1, *lengths, 0, 0], 2
        num_tokens, num_seqs = num_tokens + 2 + 9, num_seqs + 1
        rows = torch.nn.functional.pad(rows, (2, 2), value=6)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
    case = RuleCase(heads, dtype, 9, dtype if is_padded else torch.float32)
    arguments = rows, starts, num_seqs
    case.check(ops.delta_net_chunks, delta_net_chunks.__wrapped__, num_tokens, *arguments, count=count)


@pytest.mark.parametrize("shape, width", [((1, 5), 5), ((3, 3000), 3000), ((4, 70), 1)])
@each_dtype
def test_sigmoid_gate_kernel(dtype, shape, width):
    """Of gates that are a part of wider rows."""
    ops = pytest.importorskip("nanovllm.kernels.ops")
    x, gates = (torch.randn(n, shape[0], dtype=dtype, device=DEVICE).T for n in (shape[1], width + 3))
    x, gate = x.contiguous(), gates.contiguous()[:, 1 : width + 1]
    out = ops.sigmoid_gate(x, gate)
    torch.testing.assert_close(out, sigmoid_gate.__wrapped__(x, gate), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


# -- the families ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CASES, "qwen3_5-whole", "qwen3_5-tied-whole", "qwen3_5_moe-whole"])
def test_parity(make_hybrid, checkpoints, name):
    """In chunks, beside decodes, and with hits of the prefix cache."""
    llm = make_hybrid(name, **SCHEDULES["chunks"])
    # these differ in what is loaded, or in a layer without experts, and `test_schedules` has all requests of another
    is_variant = name.endswith(("-whole", "-dense-layer")) or name == "qwen3_5-tied"
    requests = make_requests()[: 6 if is_variant else None]
    outputs = generate_by_steps(llm, requests)
    assert_same_as_reference(checkpoints.model(name), outputs)
    assert len({token_id for output in outputs for token_id in output.outputs[0].token_ids}) > 12


@pytest.mark.parametrize("name", ["qwen3_5-tied", "qwen3_5-tied-whole"])
@pytest.mark.parametrize("is_other", [False, True])
def test_tied_checkpoint_that_has_a_head(tmp_path, caplog, name, is_other):
    """One that is not the embedding is used, in checkpoints of several parts too; the text alone may say it is tied."""
    folder = make_checkpoint(tmp_path, name.removesuffix("-whole"), name.endswith("-whole"))
    raw = json.loads((tmp_path / "config.json").read_text())
    if "text_config" in raw:
        raw.pop("tie_word_embeddings", None)
        raw["text_config"]["tie_word_embeddings"] = True
        (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    head = embedding.roll(1, 0) if is_other else embedding.clone()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = Config(folder, dtype="float32", device="cpu")
    model = make_model(config.model_config, 64)
    load_model(model, tmp_path, torch.device("cpu"))
    assert torch.equal(model.lm_head.weight, head) and len(warnings_in(caplog)) == is_other
    decoder = getattr(model.model, "language_model", model.model)
    assert (decoder.embed_tokens.weight is model.lm_head.weight) == (not is_other)
    assert torch.equal(decoder.embed_tokens.weight, embedding)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in Triton's interpreter")
def test_parity_on_kernels(use_ops, make_hybrid, checkpoints, monkeypatch):
    """Prompts, several decodes, and a single one; their inputs by two products, and by one."""
    pytest.importorskip("triton")
    use_ops("delta_net_step", "delta_net_chunks", "sigmoid_gate", "norm_rope_and_store", "linear")
    monkeypatch.setattr("nanovllm.fused.delta_net.MAX_MERGED_ROWS", 2)
    llm = make_hybrid("qwen3_5-tied")
    layer = next(x for x in llm.model_runner.model.modules() if isinstance(x, GatedDeltaNet))
    assert layer.in_proj is not None and layer.in_proj[-1].data_ptr() == layer.in_proj_ba.weight[-1].data_ptr()
    requests = [
        (prompt, replace(params, max_tokens=2 + (i == 1))) for i, (prompt, params) in enumerate(make_requests())
    ]
    assert_same_as_reference(checkpoints.model("qwen3_5-tied"), generate_by_steps(llm, requests[1:4]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs graphs as Python code")
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # in a tile of no queries
@pytest.mark.parametrize("num_drafts, has_graphs", [(0, True), (2, True), (2, False)])
def test_padded_steps(make_hybrid, checkpoints, use_ops, drafts, monkeypatch, num_drafts, has_graphs):
    """Graphs have room for more sequences that decode, chunks and tokens than there are; also with drafts.

    The first step samples nothing.
    """
    pytest.importorskip("triton")
    monkeypatch.setattr(cuda_graph, "TOKEN_SIZES", (16,) if num_drafts else (8, 16))
    monkeypatch.setattr(cuda_graph, "capture", capture)
    settings = dict(max_num_seqs=4, max_model_len=96, max_num_batched_tokens=16, max_num_mixed_tokens=16)
    settings |= dict(num_kvcache_blocks=24)
    rng = random.Random(1)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=5, ignore_eos=True, logprobs=0, detokenize=False)
    lengths = (1, 3, 20, 9, 5)[: 5 if has_graphs else 3]
    requests = [([rng.randrange(5, 500) for _ in range(n)], params) for n in lengths]
    if num_drafts:
        outputs = generate_by_steps(make_hybrid("qwen3_5-yarn", **settings), requests)
        settings |= drafts("mixed", num_drafts)
        monkeypatch.setattr(KnownAnswers, "texts", tuple(x.prompt_token_ids + x.outputs[0].token_ids for x in outputs))
    use_ops("norm_rope_and_store", "delta_net_drafts", "place_decodes", "accept")
    llm = make_hybrid("qwen3_5-yarn", attention_backend="triton", **settings)
    runner = llm.model_runner
    runs_as_on_cuda(runner)
    runner.buffers = make_buffers(llm.config, torch.device("cpu"))
    if has_graphs:
        shapes, buffer = graph_shapes(llm.config, runner.backend), runner.buffers.device
        with torch.inference_mode():
            parts = runner.pad_req_index, runner.run_batch, runner.sample_and_accept
            graphs = MixedGraphs(shapes, llm.config.max_num_seqs, buffer, *parts, pool=None)
        runner.mixed_graphs = graphs
    outputs = generate_by_steps(llm, requests[2:3]) + generate_by_steps(llm, requests)
    assert not num_drafts or accepted(llm)[0] > 3
    assert_same_as_reference(checkpoints.model("qwen3_5-yarn"), outputs)
    if has_graphs:
        replayed = {shape.num_decode_rows for shape in shapes if graphs.models[shape.graph_shape].num_replays}
        assert replayed >= {0, 4 * (1 + num_drafts)}


@pytest.mark.parametrize("schedule, async_scheduling", pairs(SCHEDULES, [True, False]))  # others in test_states.py
def test_schedules(make_hybrid, checkpoints, schedule, async_scheduling):
    """The second time, prompts are hit; what a sequence leaves in a row, another does not see."""
    llm = make_hybrid("qwen3_5-tied", **SCHEDULES[schedule], async_scheduling=async_scheduling)
    requests = make_requests()[slice(2, 7, 2) if schedule == "one at a time" else slice(None)]
    if schedule == "preemptions":
        requests = [(prompt, replace(params, max_tokens=20)) for prompt, params in requests]
    outputs = [llm.generate(*map(list, zip(*some)), use_tqdm=False) for some in (requests, requests[::2])]
    assert_same_as_reference(checkpoints.model("qwen3_5-tied"), [*outputs[0], *outputs[1]])
    hits = [output.num_cached_tokens for output in outputs[1]]
    assert any(hits) == (schedule in ("at once", "chunks")) or schedule in ("preemptions", "one at a time")
    assert llm.stats()["preemptions"] > 0 or schedule != "preemptions"
    assert llm.stats()["blocks"]["used"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_on_a_gpu(make_hybrid, checkpoints, name, enforce_eager):
    """Also steps with chunks are graphs; padding has a row of its own."""
    llm = make_hybrid(name, device="cuda", enforce_eager=enforce_eager, **SCHEDULES["chunks"])
    assert bool(llm.model_runner.graphs) == bool(llm.model_runner.mixed_graphs) == (not enforce_eager)
    for _ in range(2):
        assert_same_as_reference(checkpoints.model(name), generate_by_steps(llm, make_requests()))


def test_a_prompt_of_2000_tokens(make_hybrid, checkpoints):
    rng = random.Random(1)
    prompt = [rng.randrange(5, 500) for _ in range(2000)]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    sizes = dict(max_model_len=2048, num_kvcache_blocks=130, max_num_batched_tokens=777)
    llm = make_hybrid("qwen3_next", **sizes)
    assert_same_as_reference(checkpoints.model("qwen3_next"), llm.generate([prompt], params, use_tqdm=False))


def test_beams(make_hybrid, checkpoints):
    """Beams fork, and copy the state, after each token."""
    llm, logprobs = make_hybrid("qwen3_5_moe"), checkpoints.model("qwen3_5_moe")
    prompts = [prompt for prompt, _ in make_requests()[1:5]]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True))
    for output in outputs:
        n = len(output.prompt_token_ids)
        for beam in output.outputs:
            token_ids = output.prompt_token_ids + beam.token_ids
            expected = logprobs(*token_ids)[range(n - 1, len(token_ids) - 1), beam.token_ids].sum().item()
            assert beam.cumulative_logprob == pytest.approx(expected, abs=5e-3)


def test_abort(make_hybrid, checkpoints):
    """The rows of sequences that are dropped, in chunks of their prompt or while they decode, are used again."""
    llm = make_hybrid("qwen3_5", max_num_seqs=3, async_scheduling=True, **SCHEDULES["chunks"])
    requests = make_requests()[:10]
    for steps in (1, 4, 9):
        ids = [llm.add_request(*request) for request in requests[6:10]]
        for _ in range(steps):
            llm.step()
        for request_id in ids:
            llm.abort(request_id)
    assert_same_as_reference(checkpoints.model("qwen3_5"), generate_by_steps(llm, requests[1:7]))


def test_hits_of_conversations(make_hybrid):
    """Of six turns each, in turn, on as many snapshots as conversations: at least half of what attention would find."""
    num_conversations, rng = 6, random.Random(2)
    sizes = dict(max_num_seqs=num_conversations, max_model_len=1024, num_kvcache_blocks=400)
    llm = make_hybrid("qwen3_5-tied", **sizes)
    histories = [[rng.randrange(5, 500) for _ in range(20)] for _ in range(num_conversations)]
    found = findable = 0
    for turn in range(6):
        params = SamplingParams(temperature=0.0, max_tokens=5 + 4 * turn, ignore_eos=True)
        for some in (histories[:4], histories[4:]):
            for history in some:
                findable += (len(history) - 1) // 16 * 16 if turn else 0  # the last token was not computed
                history += [rng.randrange(5, 500) for _ in range(rng.randrange(5, 60))]
            for history, output in zip(some, llm.generate(some, params, use_tqdm=False)):
                found += output.num_cached_tokens
                history += output.outputs[0].token_ids
    assert found > findable / 2


@pytest.mark.parametrize("enable_prefix_caching, num_seqs", [(True, 13), (False, 18)])
def test_states_take_half_of_the_cache(make_hybrid, checkpoints, monkeypatch, enable_prefix_caching, num_seqs):
    """So `max_num_seqs` follows from it: of 20 rows, two are for padding and zeros, and 5 for snapshots alone."""
    row_bytes = 2 * (3 * (2 * 32 + 144) + 6 * 16 * 24) * 4
    monkeypatch.setattr("nanovllm.engine.model_runner.CPU_KV_CACHE_BYTES", 2 * 20 * row_bytes + 1000)
    sizes = dict(max_num_seqs=512, num_kvcache_blocks=None, max_model_len=16)
    llm = make_hybrid("qwen3_5", **sizes, enable_prefix_caching=enable_prefix_caching)
    tensors = (x for spec, found in llm.model_runner.caches.items() if spec.of_states for x in found)
    assert sum(x.nbytes for x in tensors) == 20 * row_bytes
    assert llm.config.max_num_seqs == num_seqs and f", 18 states for up to {num_seqs} sequences," in repr(llm)
    requests = [(prompt[:10], replace(params, max_tokens=5)) for prompt, params in make_requests()]
    assert_same_as_reference(checkpoints.model("qwen3_5"), generate_by_steps(llm, requests))


# -- drafts ------------------------------------------------------------------------------------------------------------


HEADS_OF_DRAFTS = [(1, 2, 24, 20, 3), (2, 4, 16, 24, 4), (1, 1, 16, 8, 2)]


@pytest.mark.parametrize(
    "way, heads",
    [
        *((("definitions", torch.float32), heads) for heads in HEADS_OF_DRAFTS),
        *pairs(
            pairs(["kernels.ops", "delta_net.kernels.delta_net_tokens"], [torch.float32, torch.float16]),
            HEADS_OF_DRAFTS,
        ),
    ],
    ids=str,
)
def test_drafts_of_a_layer(way, heads):
    """Chunks, and then steps of up to four drafts, of which some are right: they read what a whole chunk reads.

    Of a step of kernels, there are fewer sequences than there is room for, and one of them is padding.
    """
    (way, dtype), rng, (heads, num_seqs, num_drafts) = way, random.Random(0), (DeltaHeads(*heads), 3, 4)
    find = lambda op: op if way == "definitions" else getattr(pytest.importorskip(f"nanovllm.{way}"), op.__name__)
    device, num_padding = (torch.device("cpu"), 0) if way == "definitions" else (DEVICE, 1)
    torch.manual_seed(0)
    layer, exact_layer = (layer_of(heads, x).to(device) for x in (dtype, torch.float32))
    exact_layer.load_state_dict(layer.state_dict())
    spec = layer.cache_spec()
    settings = Config(TINY, device="cpu", **drafting("ngram", num_speculative_tokens=num_drafts))
    settings.resolve(num_states=num_seqs)
    tensors = [torch.full(x.shape[1:], 7, dtype=x.dtype, device=device) for x in spec.tensors(1, 0, settings)]
    states, pad, zeros = spec.make(tensors, settings), num_seqs, num_seqs + 1
    for tensor in (*states.tensors, states.kept_drafts.inputs):
        tensor.fill_(torch.nan)
        tensor[zeros] = 0
    states.kept_drafts.num_tokens[zeros] = 0
    sizes = sum(heads.sizes) + heads.sizes[2], 2 * heads.num_values
    draw = lambda *shape: [torch.randn(*shape, size).to(device, dtype) for size in sizes]
    int32 = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device=device)
    texts = draw(num_seqs, 60)
    plain = State(*(torch.zeros(1, num_seqs, *shape, device=device) for shape in spec.shapes))
    bounds, out = int32(range(0, 60 * num_seqs + 1, 60)), torch.empty(num_seqs * 60, heads.sizes[2], device=device)
    rows = int32(2 * [[*range(num_seqs)]])
    whole = delta_net_chunks.__wrapped__
    whole(*(x.flatten(0, 1).float() for x in texts), exact_layer, plain, rows, bounds, num_seqs, out)
    expected = out.view(num_seqs, 60, -1)

    def assert_near(found, expected):
        error = (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < 4 * TOLERANCE[dtype], error

    lengths, end, num_steps = [0, 0, 0], 50 if way == "definitions" or CUDA else 12, 0
    for added in ([5, 1, 3], [1, 2, 4]):
        which = [slice(begin, begin + size) for begin, size in zip(lengths, added)]
        chunks = [torch.cat([x[i, own] for i, own in enumerate(which)]) for x in texts]
        out = torch.empty(len(chunks[0]), heads.sizes[2], dtype=dtype, device=device)
        read, bounds = [*range(3)] if any(lengths) else 3 * [zeros], torch.tensor([0, *added]).cumsum(0)
        rows, bounds = int32([read, [*range(3)]]), int32(bounds.tolist())
        find(delta_net_chunks)(*chunks, layer, states, rows, bounds, num_seqs, out)
        assert_near(out, torch.cat([x[own] for x, own in zip(expected, which)]))
        lengths = [own.stop for own in which]
    while active := [i for i in range(num_seqs) if lengths[i] < end]:
        num_steps += 1
        rng.shuffle(active)
        k = rng.randint(1, 1 + num_drafts)
        counts = [rng.randint(1, k) for _ in active]  # tokens that are right
        numbers = [rng.randint(count, k) for count in counts]  # all of a sequence
        offsets = [[min(j, number - 1) for j in range(k)] for number in numbers]
        inputs = draw(len(active) + 2 * num_padding, k)  # wrong ones
        for i, seq in enumerate(active):
            for x, text in zip(inputs, texts):
                x[i, : counts[i]] = text[seq, lengths[seq] :][: counts[i]]
                x[i] = x[i, offsets[i]]
        ends = [[lengths[seq] + 1 + x for x in own] for seq, own in zip(active, offsets)]
        ends += num_padding * [k * [0], k * [10**6]]
        out = torch.full((len(ends) * k, heads.sizes[2]), torch.nan, dtype=dtype, device=device)
        rows = int32([[seq, -1] for seq in active] + num_padding * [[pad, -1], [0, -1]])[:, 0]
        count = [int32([(len(active) + 1) * k])] * num_padding
        flat = (x.flatten(0, 1) for x in inputs)
        find(delta_net_drafts)(*flat, layer, states, rows, int32(ends).flatten(), out, *count)
        assert num_padding == 0 or out[-k:].isnan().all()
        for i, (seq, found) in enumerate(zip(active, out.view(len(ends), k, -1))):
            own = range(lengths[seq], lengths[seq] + counts[i])
            assert_near(found[: counts[i]], expected[seq, own])
            assert torch.equal(found, found[offsets[i]])
            lengths[seq] += counts[i]
    assert num_steps > end / 4


def ids_of(outputs) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    "name, schedule, kinds",
    [
        ("qwen3_5", "at once", ("wrong", "mixed")),
        ("qwen3_next", "chunks", ("mixed", "right")),
        ("qwen3_5-tied", "preemptions", ("right", "wrong")),
    ],
)
def test_drafts(make_hybrid, checkpoints, monkeypatch, drafts, margins, name, schedule, kinds):
    """That are right, wrong and both: the same text, also of several answers, after hits and after preemptions."""
    requests, settings = make_requests(), SCHEDULES[schedule]
    if schedule == "chunks":
        requests = [(prompt, replace(params, max_tokens=params.max_tokens + 4)) for prompt, params in requests]
    if schedule == "preemptions":
        requests = [(prompt[:40], replace(params, max_tokens=28)) for prompt, params in requests[:5] + requests[8:]]
        settings = dict(max_model_len=96, num_kvcache_blocks=10)
    prompts, params = map(list, zip(*requests))
    llm = margins(make_hybrid(name, **settings))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    expected, num_steps = ids_of(outputs), sum(llm.stats()["steps"].values())
    llm.exit()
    texts = tuple([*x.prompt_token_ids, *answer.token_ids] for x in outputs for answer in x.outputs)
    monkeypatch.setattr(KnownAnswers, "texts", texts)
    monkeypatch.setattr(KnownAnswers, "vocab_size", 512)
    for kind in kinds:
        llm = make_hybrid(name, **settings, **drafts(kind), async_scheduling=kind == kinds[0])
        found = llm.generate(prompts, params, use_tqdm=False)
        assert ids_of(found) == expected
        assert_same_as_reference(checkpoints.model(name), found)
        stats = llm.stats()
        assert stats["preemptions"] > 0 or schedule != "preemptions"
        num_drafted, num_accepted = (stats["spec_decode"][key] for key in ("draft_tokens", "accepted_tokens"))
        assert num_drafted > 80 and num_accepted > {"right": 0.5, "wrong": -1, "mixed": 0.2}[kind] * num_drafted
        assert sum(stats["steps"].values()) < num_steps or kind != "right"
        if kind == "mixed":  # with hits, and beside chunks of other prompts
            found = generate_by_steps(llm, requests)
            assert ids_of(found) == expected and any(x.num_cached_tokens for x in found)
        assert llm.stats()["blocks"]["used"] == 0
        llm.exit()


def test_methods_of_drafting(make_hybrid, margins, tmp_path):
    """But for heads, which test_heads.py has. A draft model has no states of its own. Few tokens are likely."""
    prompts, params = (x[:4] for x in random_requests(500, random.Random(3)))
    params = few_likely(params)
    outputs = margins(make_hybrid("qwen3_5")).generate(prompts, params, use_tqdm=False)
    draft_model = make_dense_checkpoint(tmp_path / "draft", "llama")
    raw = json.loads((file := tmp_path / "draft/config.json").read_text())
    file.write_text(json.dumps(raw | {"max_position_embeddings": 512}))  # as long as the hybrid's sequences
    for method in METHODS:
        others = {"model": draft_model} if method == "draft_model" else {}
        llm = make_hybrid("qwen3_5", **drafting(method, **others))
        assert ids_of(llm.generate(prompts, params, use_tqdm=False)) == ids_of(outputs), method
        assert accepted(llm)[0] > 0, method


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("schedule", ["chunks", "preemptions"])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_drafts_on_a_gpu(make_hybrid, checkpoints, monkeypatch, free_drafts, drafts, name, schedule, enforce_eager):
    """Some are right and some wrong: the same text, beside chunks of prompts, after hits and after preemptions."""
    settings = dict(device="cuda", enforce_eager=enforce_eager, **SCHEDULES[schedule])
    prompts, params = map(list, zip(*make_requests()))
    params = [replace(x, max_tokens=x.max_tokens + 40) for x in params]  # so many that there are preemptions
    llm = make_hybrid(name, **settings)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.exit()
    texts = tuple([*x.prompt_token_ids, *answer.token_ids] for x in outputs for answer in x.outputs)
    monkeypatch.setattr(KnownAnswers, "texts", texts)
    monkeypatch.setattr(KnownAnswers, "vocab_size", 512)
    for kind, num_drafts in (("mixed", 3), ("right", 5)):
        llm = make_hybrid(name, **settings, **drafts(kind, num_drafts), async_scheduling=kind == "mixed")
        assert bool(llm.model_runner.mixed_graphs) != enforce_eager
        found = llm.generate(prompts, params, use_tqdm=False)
        found_by_steps = generate_by_steps(llm, zip(prompts, params))
        assert ids_of(found) == ids_of(outputs) == ids_of(found_by_steps)
        assert_same_as_reference(checkpoints.model(name), [*found, *found_by_steps])
        assert accepted(llm)[0] > 50
        assert llm.stats()["preemptions"] > 0 or schedule != "preemptions"
        llm.exit()


# -- ranks -------------------------------------------------------------------------------------------------------------


def logits_of_rank(rank: int, size: int, folder: str, store: Path, prompt: list[int]) -> torch.Tensor:
    """[len(prompt), vocabulary], of a rank that is a thread, in two chunks and then token by token."""
    config, num_tokens, outputs = ModelConfig.read(Path(folder)), len(prompt), []
    with torch.inference_mode():
        tp = ThreadRanks(rank, size, *GROUPS.setdefault((store, size), ([None] * size, Barrier(size, timeout=30))))
        model = make_model(config, num_tokens, tp)
        load_model(model, Path(folder), torch.device("cpu"))
        settings = Config(folder, device="cpu", kvcache_block_size=16 * (-(-num_tokens // 16)), max_num_seqs=1)
        for layer in model.modules():
            if hasattr(layer, "cache_spec"):
                tensors = (torch.zeros(x.shape, dtype=x.dtype) for x in layer.cache_spec().tensors(1, 1, settings))
                layer.cache = layer.cache_spec().make([tensor[:, 0] for tensor in tensors], settings)
        for begin, end in [(0, 20), (20, 90), *((i, i + 1) for i in range(90, num_tokens))]:
            int32 = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
            positions, starts = torch.arange(begin, end, dtype=torch.int32), int32(0, end - begin)
            is_prefill, table = begin < 90, torch.zeros(1, 1, dtype=torch.int32)
            shape = dict(max_seqlen_q=end - begin, cu_seqlens_q=starts) if is_prefill else dict(num_decode_rows=1)
            shape |= dict(slot_mapping=positions, context_lens=int32(end), block_tables=table, max_context_len=end)
            with attention_context(Context(is_prefill, state_rows=int32(0, 0)[:, None], **shape)):
                outputs.append(model.compute_logits(model(torch.tensor(prompt[begin:end]), positions)))
    return torch.cat(outputs)


@pytest.mark.parametrize(
    "name, size",
    [("qwen3_next", 2), ("qwen3_next", 4), ("qwen3_5", 2), ("qwen3_5_moe", 4), ("qwen3_5-tied-whole", 2)],
)
def test_ranks(checkpoints, tmp_path, name, size):
    """Each has its heads of both kinds of layers, and their part of the state."""
    prompt = make_requests()[7][0][:94]
    expected = checkpoints.model(name)(*prompt)
    with ThreadPoolExecutor(size) as pool:
        arguments = size, checkpoints.folder(name), tmp_path, prompt
        for logits in pool.map(lambda rank: logits_of_rank(rank, *arguments), range(size)):
            torch.testing.assert_close(logits.log_softmax(-1), expected, rtol=1e-4, atol=2e-3)


@pytest.mark.usefixtures("forked_ranks")
def test_engine_of_two_ranks(make_llm, checkpoints):
    settings = SETTINGS | SCHEDULES["chunks"]
    llm = make_llm(checkpoints.folder("qwen3_5_moe-whole"), tensor_parallel_size=2, **settings)
    assert_same_as_reference(checkpoints.model("qwen3_5_moe-whole"), generate_by_steps(llm, make_requests()[:5]))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_parts_that_are_left_out(make_hybrid, make_llm, checkpoints, tmp_path):
    """Weights of the vision part, and of the drafting layers (MTP), are known by their names; others are refused."""
    folder = shutil.copytree(checkpoints.folder("qwen3_5-whole"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in tensors)
    save_file(tensors | {"mtp.fc.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    assert "without its vision part" in repr(make_llm(str(folder), language_model_only=True, **SETTINGS))
    assert "without" not in repr(make_hybrid("qwen3_5"))
    save_file(tensors | {"model.audio.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="1 tensors belong to no parameter: model.audio.weight"):
        make_llm(str(folder), **SETTINGS)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe-whole"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_load_weights(make_llm, checkpoints, name, is_nested):
    """A trainer may have the whole model or its text alone; norms become those around one."""
    weights = transformers.AutoModelForCausalLM.from_pretrained(checkpoints.folder(name), dtype=torch.float32)
    weights = weights.state_dict()
    if is_nested:
        weights = {key.replace("model.", "model.language_model.", 1): weight for key, weight in weights.items()}
    llm = make_llm(checkpoints.folder(name), load_format="dummy", **SETTINGS)
    llm.load_weights(weights.items())
    outputs = generate_by_steps(llm, make_requests()[:4])
    assert_same_as_reference(checkpoints.model(name), outputs)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe-whole"])
def test_fp8(make_hybrid, make_llm, checkpoints, monkeypatch, tmp_path, name):
    """Weights that are interleaved by heads have their scales so too; gates of the delta rule are not quantized."""
    ends = ("_proj.weight", "_qkv.weight", "_qkvz.weight", "_proj_z.weight", "_expert.weight")
    monkeypatch.setattr("test_quantization.is_linear", lambda name: name.endswith(ends) and ".visual." not in name)
    ignore = [f"re:.*{name}" for name in ("lm_head", "in_proj_a", "in_proj_b", "shared_expert_gate", "visual.")]
    sizes = BLOCK | {"weight_block_size": [8, 16]}, (8, 16, "weight_scale_inv")
    monkeypatch.setitem(FORMATS, "block", sizes)
    quantized, plain = write_quantized(checkpoints.folder(name), tmp_path, "block", modules_to_not_convert=ignore)
    requests = [(prompt, replace(params, temperature=0.0)) for prompt, params in make_requests()[:4]]
    outputs = [generate_by_steps(make_llm(folder, **SETTINGS), requests) for folder in (quantized, plain)]
    for ours, expected in zip(*outputs):
        assert ours["token_ids"] == expected["token_ids"]


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_four_bits(make_llm, checkpoints, monkeypatch, tmp_path, name):
    """Rows that are interleaved by heads have their scales and zero points so too."""
    ends = ("_proj.weight", "_qkv.weight", "_qkvz.weight", "_proj_z.weight", "_expert.weight")
    monkeypatch.setattr("test_packed.is_linear", lambda name: name.endswith(ends))
    ignore = [f"re:.*{name}" for name in ("lm_head", "in_proj_a", "in_proj_b", "shared_expert_gate")]
    packed, plain = write_checkpoint(checkpoints.folder(name), tmp_path, "ct-channel", ignore=ignore)
    requests = [(prompt, replace(params, temperature=0.0)) for prompt, params in make_requests()[:4]]
    outputs = [generate_by_steps(make_llm(folder, **SETTINGS), requests) for folder in (packed, plain)]
    for ours, expected in zip(*outputs):
        assert ours["token_ids"] == expected["token_ids"]


def test_fp8_on_load(make_llm, checkpoints, monkeypatch, tmp_path):
    """Each row has a scale."""
    ends = ("_proj.weight", "_qkv.weight", "_proj_z.weight", "_proj_a.weight", "_proj_b.weight")
    monkeypatch.setattr("test_quantization.is_linear", lambda name: name.endswith(ends))
    _, plain = write_quantized(checkpoints.folder("qwen3_5"), tmp_path, "ct-channel", margin=1.0)
    requests = [(prompt, replace(params, temperature=0.0)) for prompt, params in make_requests()[:4]]
    expected = generate_by_steps(make_llm(plain, **SETTINGS), requests)
    found = generate_by_steps(make_llm(checkpoints.folder("qwen3_5"), quantization="fp8", **SETTINGS), requests)
    assert [output["token_ids"] for output in found] == [output["token_ids"] for output in expected]


@pytest.mark.parametrize(
    "entries, size, message",
    [
        ({"layer_types": KINDS[:2]}, 1, r"layer_types: lists 2 layers, not 3 \(num_hidden_layers\)"),
        ({"layer_types": 3 * KINDS[:1]}, 1, "at least one layer must be 'full_attention'"),
        ({"layer_types": [*KINDS[:2], "sliding"]}, 1, "a layer='sliding': must be one of 'linear_attention'"),
        ({"linear_num_value_heads": 7}, 1, "linear_num_value_heads=7: must be a multiple of linear_num_key_heads"),
        ({"linear_key_head_dim": 0}, 1, "linear_key_head_dim=0: must be at least 1"),
        ({"attn_output_gate": False}, 1, "attn_output_gate=False: must be one of True"),
        ({"output_gate_type": "sigmoid"}, 1, "output_gate_type='sigmoid': must be one of 'swish', 'silu'"),
        ({}, 4, r"does not divide the key heads of linear attention \(2\)"),
    ],
)
def test_what_is_refused(checkpoints, tmp_path, entries, size, message):
    folder = shutil.copytree(checkpoints.folder("qwen3_5"), tmp_path / "model")
    edit(str(folder), **entries)
    with pytest.raises(ValueError, match=message):
        Config(str(folder), device="cpu", tensor_parallel_size=size)


def test_sleep(make_llm, checkpoints):
    """States are given back with the cache, and are zeros again."""
    settings = SETTINGS | {"enable_sleep_mode": True}
    llm, requests = make_llm(checkpoints.folder("qwen3_5-tied"), **settings), make_requests()[:6]
    for _ in range(2):
        assert_same_as_reference(checkpoints.model("qwen3_5-tied"), generate_by_steps(llm, requests))
        assert llm.sleep(level=1) > sum(x.nbytes for x in llm.model_runner.model.parameters())
        llm.wake_up()


# -- the same bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, dtype", [("qwen3_next-dense-layer", "float32"), ("qwen3_5-tied", "bfloat16")])
def test_no_bit_differs(make_llm, checkpoints, name, dtype):
    """A request has the same bits in any batch, in any chunks, from a snapshot on and after a preemption."""
    assert_invariant(make_llm, checkpoints.folder(name), few_blocks=5, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_no_bit_differs_on_a_gpu(make_llm, checkpoints, name):
    assert_invariant(make_llm, checkpoints.folder(name), few_blocks=4, device="cuda", dtype="bfloat16")


def test_unknown_layers_have_no_invariant_kernels():
    """On CUDA such a model is refused as soon as its layers are known."""
    runner_class = pytest.importorskip("nanovllm.invariant.cuda").Runner
    groups = {StateSpec(((2,),), (torch.float32,)): [torch.nn.Identity()]}
    runner = SimpleNamespace(device=torch.device("cuda"), cache_groups=groups)
    with pytest.raises(ValueError, match="batch_invariant=True on cuda: must be False for .* layers of Identity"):
        runner_class.warm_up(runner, print)


def random_steps(rng: random.Random, lengths: list[int]) -> Iterator[dict[int, int]]:
    """Some of the sequences that are left, and how many tokens of each a step computes."""
    left = Counter(dict(enumerate(lengths)))
    while left:
        most = rng.choice([1, 7, 80])
        step = {i: rng.randint(1, min(most, left[i])) for i in rng.sample([*left], rng.randint(1, len(left)))}
        yield step
        left -= step


HEADS_OF_TOKENS = [(2, 4, 16, 24, 4), (3, 3, 20, 9, 2), *CUDA * [(4, 8, 128, 128, 4)]]


@pytest.mark.parametrize(
    "way, dtype, heads, state_dtype",
    [
        # each pair of a dtype, heads, and a dtype of states
        *(
            ("definitions", dtype, heads, (torch.float32, torch.bfloat16)[(i + j) % 2])
            for i, dtype in enumerate([torch.float32, torch.bfloat16])
            for j, heads in enumerate(HEADS_OF_TOKENS)
        ),
        *(("kernels", *case, torch.float32) for case in pairs(DTYPES, HEADS_OF_TOKENS)),
        ("kernels", torch.float16, HEADS_OF_TOKENS[0], torch.float16),
    ],
    ids=str,
)
def test_tokens_of_a_state_are_computed_alone(way, dtype, heads, state_dtype):
    """In chunks of any size and in decode steps, outputs and states have the same bits, near those of whole chunks."""
    step, chunks, context, device = delta_net_step, delta_net_chunks, invariant, torch.device("cpu")
    if way == "kernels":
        kernels = pytest.importorskip("nanovllm.invariant.cuda_ops")
        step, chunks, context, device = kernels.delta_net_step, kernels.delta_net_chunks, nullcontext, DEVICE
    torch.manual_seed(0)
    layer, lengths = (
        layer_of(DeltaHeads(*heads), dtype, state_dtype).to(device),
        [70, 5, 1, 90] if way == "definitions" else [40 if CUDA else 18, 3],
    )
    sizes, sequences = layer.heads.sizes, torch.arange(sum(lengths)).split(lengths)
    qkvz, ba = (
        torch.randn(sum(lengths), n).to(device, dtype) for n in (sum(sizes) + sizes[2], 2 * layer.heads.num_values)
    )
    tensors = [torch.randn(1, 8, *shape).to(device, kind) for shape, kind in zip(*layer.cache_spec()[:2])]

    def compute(step, chunks, steps: Iterable[dict[int, int]]) -> list[torch.Tensor]:
        """The i-th sequence begins with the state in row i, and has row 4 + i."""
        states, out, done = State(*(x.clone() for x in tensors)), qkvz.new_empty(len(qkvz), sizes[2]), Counter()
        for counts in steps:
            tokens = torch.cat([sequences[i][done[i] :][:n] for i, n in counts.items()]).to(device)
            starts = torch.tensor([0, *counts.values()]).cumsum(0).to(device, torch.int32)
            rows = [[4 + i if done[i] else i for i in counts], [4 + i for i in counts]]
            rows = torch.tensor(rows, dtype=torch.int32, device=device)
            arguments, y = (qkvz[tokens], ba[tokens], layer, states), out[tokens]
            if len(tokens) == len(counts) and all(done[i] for i in counts):
                step(*arguments, rows[1], y)
            else:
                chunks(*arguments, rows, starts, len(counts), y)
            out[tokens] = y
            done.update(counts)
        return [out, *states.tensors]

    alone = [{i: n} for i, n in enumerate(lengths)]
    plain = compute(delta_net_step.__wrapped__, delta_net_chunks.__wrapped__, alone)
    with context():
        expected = compute(step, chunks, alone)
        for seed in range(4 if CUDA else 2 if way == "definitions" else 1):
            found = compute(step, chunks, random_steps(random.Random(seed), lengths))
            assert all(map(torch.equal, found, expected)), seed
    tolerance = TOLERANCE[max(dtype, state_dtype, key=TOLERANCE.get)]
    tolerance *= 4 if state_dtype != torch.float32 else 1  # whole chunks round a state only at their end
    for ours, near in zip(expected, plain):
        torch.testing.assert_close(ours, near, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_drafts_change_no_bit(make_hybrid, state_dtype):
    engine = partial(make_hybrid, "qwen3_5-tied", mamba_ssm_cache_dtype=state_dtype)
    assert_drafts_change_no_bit(engine, 500, schedulings=[True])


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_drafts_change_no_bit_on_a_gpu(make_hybrid, free_drafts, name, enforce_eager):
    settings = dict(device="cuda", dtype="bfloat16", enforce_eager=enforce_eager)
    assert_drafts_change_no_bit(partial(make_hybrid, name, **settings), 500, on_gpu=True)


# -- states in 16 bits -------------------------------------------------------------------------------------------------


def test_states_in_16_bits(make_hybrid):
    """They take half of the memory, and change the log-probabilities of a prompt in chunks, but by little."""
    rng, found, sizes = random.Random(0), [], []
    prompts = [[rng.randrange(5, 500) for _ in range(300)] for _ in range(3)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for dtype in ("float32", "float16", "bfloat16"):
        llm = make_hybrid("qwen3_5", mamba_ssm_cache_dtype=dtype, **SCHEDULES["chunks"])
        matrices = [states[1] for spec, states in llm.model_runner.caches.items() if isinstance(spec, StateSpec)]
        assert matrices and all(x.dtype == getattr(torch, dtype) for x in matrices)
        sizes.append(sum(x.nbytes for x in matrices))
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found += [[y.logprob for x in outputs for each in x.prompt_logprobs[1:] for y in each.values()]]
        llm.exit()
    assert sizes[0] == 2 * sizes[1] == 2 * sizes[2]
    for logprobs, state_dtype in zip(found[1:], (torch.float16, torch.bfloat16)):
        differences = (torch.tensor(found[0]) - torch.tensor(logprobs)).abs()
        assert 0 < differences.mean() < differences.max() < 8 * TOLERANCE[state_dtype]


def test_dtype_of_states_is_checked(checkpoints, tmp_path):
    folder = checkpoints.folder("qwen3_5")
    assert ModelConfig.read(Path(folder)).hybrid.state_dtype == "float32"
    with pytest.raises(ValueError, match="mamba_ssm_cache_dtype='fp8': must be one of 'auto', 'float32'"):
        Config(folder, device="cpu", mamba_ssm_cache_dtype="fp8")
    shutil.copytree(folder, tmp_path / "model")
    edit(tmp_path / "model", mamba_ssm_dtype="bfloat16")
    assert Config(str(tmp_path / "model"), device="cpu").model_config.hybrid.state_dtype == "bfloat16"
    edit(tmp_path / "model", mamba_ssm_dtype="int8")
    with pytest.raises(ValueError, match="config.json: mamba_ssm_dtype='int8': must be one of 'float32'"):
        Config(str(tmp_path / "model"), device="cpu")


@pytest.mark.parametrize("width", [1, 24])
def test_gates_are_computed_alone(width):
    """The sigmoids of single numbers are the same in any number of rows, and so is the product before them."""
    torch.manual_seed(0)
    x, y, gates = torch.randn(50, 40), torch.randn(50, 24), torch.randn(50, 60)[:, 3 : 3 + width]
    gate = SigmoidGate(40)
    gate.weight.normal_()
    with invariant():
        for compute in (lambda rows: gate(x[rows], y[rows]), lambda rows: sigmoid_gate(y[rows], gates[rows])):
            alone = torch.cat([compute(slice(i, i + 1)) for i in range(50)])
            assert all(torch.equal(compute(slice(n)), alone[:n]) for n in (1, 2, 17, 50))
    torch.testing.assert_close(alone, sigmoid_gate(y, gates))
