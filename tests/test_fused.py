"""Every family and format: fused layers compute what the plain ones do, for prompts, several decodes and a single one.

A family gets this test by being in the CASES of test_models.py or test_hybrid.py.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import test_models
import torch
from common import CUDA, DEVICE, one_peer
from test_models import gelu_family  # noqa: F401  (a fixture)
from torch import nn

from nanovllm.attention import backend_class
from nanovllm.benchmarks import fused as show_fused
from nanovllm.config import Config
from nanovllm.fused import FORMS, fuse
from nanovllm.fused.decoder import FusedModel
from nanovllm.fused.forms import Fused
from nanovllm.fused.fused_experts import mix_experts
from nanovllm.fused.norm_input import NormInput
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.gated_activation import GatedActivation, GeluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import LinearBase, ReplicatedLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.sigmoid_gate import SigmoidGate
from nanovllm.models import ModelConfig, make_model
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.olmo3 import Olmo3Attention, RowRMSNorm
from nanovllm.models.qwen3 import Qwen3DecoderLayer, Qwen3MLP
from nanovllm.moe.experts import Experts, MoE
from nanovllm.serve import cli
from nanovllm.spec_decode.draft_heads import watch_input
from nanovllm.utils.context import Context, attention_context
from nanovllm.utils.families import MODELS
from nanovllm.utils.loader import load_model
from nanovllm.utils.partial_sum import PartialSum

MODULES = dict.fromkeys(test_models.CASES, test_models)
with suppress(pytest.skip.Exception):  # transformers 4 does not have all of its families
    import test_hybrid

    MODULES |= dict.fromkeys(test_hybrid.CASES, test_hybrid)

DOCS = Path(__file__).parents[1] / "nanovllm/docs"
BLOCK_SIZE, MAX_LEN = 16, 64
# of each step, the tokens of two sequences that are computed: a prompt and a longer one, a decode and a chunk, decodes
STEPS = [((0, 2), (0, 15)), ((2, 3), (15, 18)), ((3, 4), (18, 19)), ((4, 5), None)]
SHORT_STEPS = [((0, 1), (0, 2)), ((1, 2), None)]  # for kernels of plain layers
FEW_STEPS = [((2, 3), (12, 18)), *STEPS[2:]]  # for the slow interpreter, and formats: behind tokens of zeros
# one of each family, whose kernels are run
FAMILIES = [
    "llama-biases",
    "llama-gelu",
    "mistral-window",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-experts",
    "gemma4-shared",
    "smollm3",
    "glm4",
    "granite",
    "ministral3",
    "olmo3",
    "qwen3",
    "qwen3-moe",
    "gpt-oss",
    "qwen3_5",
    "qwen3_next",
    "qwen3_5_moe",
]


FORMATS_BY_KERNELS = (
    ("llama-biases", "fp8"),
    ("gemma3", "fp8"),
    ("gemma4", "int8"),
    ("qwen3-moe", "int8"),
    ("llama-biases", "int4"),
)


def make_folder(folder: Path, name: str) -> str:
    return MODULES[name].make_checkpoint(folder, name)


class Runner:
    """A model on the test device with a cache for two sequences."""

    def __init__(self, folder: str, backend: str, load_format: str = "auto", **settings):
        sizes = dict(kvcache_block_size=BLOCK_SIZE, num_kvcache_blocks=8, max_num_seqs=2, max_model_len=MAX_LEN)
        self.config = Config(folder, device=DEVICE, dtype="float32", **sizes, **settings)
        self.config.resolve(num_states=2)
        with torch.device(DEVICE):
            self.model = make_model(self.config.model_config, MAX_LEN)
        load_model(self.model, Path(folder), torch.device(DEVICE), load_format)
        self.backend = backend_class(backend)()
        for layer in self.model.modules():
            if isinstance(layer, Attention):
                layer.backend = self.backend
                self.backend.set_head_shape(layer.num_heads // layer.num_kv_heads, layer.head_dim, torch.float32)
        self.clear()

    def clear(self) -> None:
        """Give each layer an empty cache."""
        for layer in self.model.modules():
            if hasattr(layer, "cache_spec"):
                tensors = layer.cache_spec().tensors(1, 8, self.config)
                parts = [torch.zeros(x.shape, dtype=x.dtype, device=DEVICE)[:, 0] for x in tensors]
                layer.cache = layer.cache_spec().make(parts, self.config)

    def step(self, rows: tuple, work, only_outputs: bool = False) -> torch.Tensor:
        """What `work(token_ids, positions)` returns in a step of these tokens.

        only_outputs: only the last token of each sequence is needed, if there are chunks.
        """
        spans = [span for span in rows if span is not None]
        num_new, ends = [end - begin for begin, end in spans], [end for _, end in spans]
        int32 = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
        tables = int32([[4, 1, 6, 2], [3, 0, 5, 7]])[: len(spans)]
        positions = torch.cat([torch.arange(*span, device=DEVICE) for span in spans])
        seqs = torch.arange(len(spans), device=DEVICE).repeat_interleave(int32(num_new))
        slots = tables[seqs, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        num_decodes = next((i for i, n in enumerate(num_new) if n > 1), len(spans))
        chunks = [*zip([begin for begin, _ in spans], ends)][num_decodes:]
        arrays = self.backend.prepare_chunks(chunks, num_decodes) if chunks else {}
        context = Context(
            bool(chunks),
            num_decode_rows=num_decodes,
            slot_mapping=slots.int(),
            context_lens=int32(ends),
            block_tables=tables,
            max_context_len=max(ends),
            max_seqlen_q=max(num_new),
            cu_seqlens_q=int32([0, *num_new]).cumsum(0, dtype=torch.int32) if chunks else None,
            state_rows=torch.arange(len(spans), device=DEVICE).int().expand(2, -1),
            backend_arrays={name: torch.from_numpy(x).to(DEVICE).int() for name, x in arrays.items()},
        )
        token_ids = (37 * positions + 11 * seqs + 3) % 101 + 5
        decoder = getattr(self.model.model, "language_model", self.model.model)
        decoder.output_rows = int32(num_new).cumsum(0) - 1 if only_outputs and chunks else None
        with attention_context(context), torch.inference_mode():
            return work(token_ids, positions.int())


def skip_what_kernels_do_not_take(folder: str, quantization: str | None) -> None:
    """On a GPU; its kernels are those of real sizes."""
    config = ModelConfig.read(Path(folder))
    sizes = [config.head_dim] + ([config.hybrid.heads.key_dim, config.hybrid.heads.value_dim] if config.hybrid else [])
    if CUDA and (min(sizes) < 16 or config.head_dim.bit_count() > 1 or (config.moe and quantization)):
        pytest.skip("too small for kernels")


def layer_by_layer(model: nn.Module):
    """The model with layers that take and return tensors, whatever they are inside."""
    decoder = getattr(model.model, "language_model", model.model)

    def work(token_ids, positions):
        hidden_states, residual, found = decoder.embed_tokens(token_ids), None, []
        more: list = [()] * len(decoder.layers)  # further arguments of each layer
        if hasattr(decoder, "layer_embeddings"):
            more = [(x,) for x in decoder.layer_embeddings(token_ids, hidden_states).unbind(1)]
        for layer, arguments in zip(decoder.layers, more, strict=True):
            hidden_states, residual = layer(positions, hidden_states, residual, *arguments)
            found.append(hidden_states + residual)
        return torch.stack(found)

    return work


def assert_near(found: torch.Tensor, expected: torch.Tensor, quantization: str | None) -> None:
    # in FP8, some GPUs quantize the rows of products too, which one rounding before that changes
    tolerance = 0.1 if CUDA and quantization == "fp8" else 1e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * expected.abs().max())


def assert_same(plain: Runner, fused: Runner, works=None, steps=STEPS) -> None:
    for rows in steps:
        expected = plain.step(rows, works[0] if works else plain.model)
        found = fused.step(rows, works[1] if works else fused.model)
        assert_near(found, expected, plain.config.quantization)


# each case, most with one format besides their own, and one case of each family with all of them, unless other families
# have all of its forms
QUANTIZATIONS = "fp8", "int8", "int4"
WITH_ALL_FORMATS = {*FAMILIES} - {"llama-gelu", "mistral-window", "gemma2", "smollm3", "qwen3_5_moe"}
CASES_AND_FORMATS = [
    (name, quantization)
    for i, name in enumerate(MODULES)
    for quantization in (None, *(QUANTIZATIONS if name in WITH_ALL_FORMATS else [QUANTIZATIONS[i % 3]]))
    if quantization is None or name not in test_models.VARIANTS
]


@pytest.mark.parametrize("name, quantization", CASES_AND_FORMATS)
def test_fused_forms_by_their_definitions(tmp_path, name, quantization):
    """The whole model and each layer alone; for the latter, prompts, and a decode next to a chunk."""
    folder = make_folder(tmp_path / "model", name)
    skip_what_kernels_do_not_take(folder, quantization)
    runner, sums = Runner(folder, "sdpa", quantization=quantization), []
    steps = FEW_STEPS if quantization else STEPS
    assert not any(isinstance(module, Fused) for module in runner.model.modules())
    layers = getattr(runner.model.model, "language_model", runner.model.model).layers
    add = lambda layer, inputs, outputs: sums.append(outputs[0] + outputs[1])
    hooks = [layer.register_forward_hook(add) for layer in layers]
    expected = [runner.step(rows, runner.model) for rows in steps]
    expected_of_layers = [torch.stack(sums[i * len(layers) :][: len(layers)]) for i in range(2)]
    for hook in hooks:
        hook.remove()
    fuse(runner.model)
    assert any(isinstance(module, Fused) for module in runner.model.modules())
    for works, wanted in ((runner.model, expected), (layer_by_layer(runner.model), expected_of_layers)):
        runner.clear()
        for rows, of_step in zip(steps, wanted):
            assert_near(runner.step(rows, works), of_step, quantization)
    runner.clear()
    found = [runner.step(rows, runner.model, only_outputs=True) for rows in steps]
    decoder = getattr(runner.model.model, "language_model", runner.model.model)
    assert (len(found[0]) == 2) == (isinstance(decoder, FusedModel) and decoder.can_select_outputs())
    for rows, ours, of_step in zip(steps, found, expected):
        if len(ours) < len(of_step):
            num_new = [end - begin for begin, end in filter(None, rows)]
            of_step = of_step[torch.tensor(num_new, device=DEVICE).cumsum(0) - 1]
        assert_near(ours, of_step, quantization)


def test_plain_modules_are_in_the_table_of_models(tmp_path):
    """docs/models.md names the classes of each family that have no form; parts of plain PyTorch are not counted."""
    rows = re.findall(r"^\| `(\w+)` \|.*\|(.*) \|$", (DOCS / "models.md").read_text(), re.MULTILINE)
    documented = {family: {*re.findall(r"`(\w+)`", plain)} for family, plain in rows[1:]}
    assert documented.keys() == MODELS.keys()
    parts = (
        LinearBase,
        Attention,
        nn.ModuleList,
        nn.Identity,
        SiluAndMul,
        GeluAndMul,
        Experts,
        SigmoidGate,
        GatedActivation,
    )
    found: dict[str, set[str]] = {}
    for name in MODULES:
        if name != "llama-gelu":  # which is no family of the package
            fused = Runner(make_folder(tmp_path / name, name), "sdpa")
            fuse(fused.model)
            plain = [x for x in fused.model.model.modules() if not isinstance(x, (Fused, *parts))]
            names = {type(module).__name__ for module in plain if type(module) is not nn.Module}
            found.setdefault(fused.config.model_config.model_type, set()).update(names)
    assert found == {family: documented[family] for family in found} and len(found) >= 5


@pytest.fixture
def few_programs(monkeypatch):
    """Experts have fewer and larger programs in the interpreter; test_moe.py has the real tiles."""
    moe_gemv = pytest.importorskip("nanovllm.moe.kernels.moe_gemv")
    if not CUDA:
        monkeypatch.setattr(moe_gemv, "GATE_UP_TILE", (16, 1024, 1))
        monkeypatch.setattr(moe_gemv, "SCALED_GATE_UP_TILE", (16, 2048, 4))
        monkeypatch.setattr(moe_gemv, "DOWN_TILE", (16, 256, 1))


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # in a tile of no queries
@pytest.mark.parametrize(
    "name, quantization",
    [
        (name, quantization)
        for name, quantization in (*((name, None) for name in FAMILIES), *FORMATS_BY_KERNELS)
        if name in MODULES
    ],
)
def test_fused_forms_by_their_kernels(tmp_path, use_ops, few_programs, name, quantization):
    """On a GPU, or in Triton's interpreter; plain layers have kernels too, each for itself."""
    folder = make_folder(tmp_path / "model", name)
    skip_what_kernels_do_not_take(folder, quantization)
    plain = Runner(folder, "sdpa", quantization=quantization)
    expected = {}
    for steps in (SHORT_STEPS, FEW_STEPS):
        plain.clear()
        expected |= {rows: plain.step(rows, plain.model) for rows in steps}
    use_ops()
    runner = Runner(folder, "triton", quantization=quantization)
    for steps in (SHORT_STEPS, FEW_STEPS):
        if steps is FEW_STEPS:
            runner.clear()
            fuse(runner.model)
        for rows in steps:
            assert_near(runner.step(rows, runner.model), expected[rows], quantization)
    runner.clear()
    found = runner.step(FEW_STEPS[0], runner.model, only_outputs=True)
    assert_near(found, expected[FEW_STEPS[0]][[0, -1]] if len(found) == 2 else expected[FEW_STEPS[0]], quantization)


# -- what matches ------------------------------------------------------------------------------------------------------


class ScaledNorm(RMSNorm):
    def forward(self, x, residual=None):
        return super().forward(2 * x, residual)


class PostNormLayer(Qwen3DecoderLayer):
    """Another order of norms: each part is normed after it was computed, before it is added."""

    def forward(self, positions, hidden_states, residual):
        x = hidden_states if residual is None else hidden_states + residual
        x = x + self.input_layernorm(self.self_attn(positions, x))
        return self.post_attention_layernorm(self.mlp(x)), x


class Toy(LlamaForCausalLM):
    """Its first layer is like those of Llama, its second has another order, its third another norm."""

    @classmethod
    def make_layer(cls, config, layer_index, rotary_emb):
        layer = super().make_layer(config, layer_index, rotary_emb)
        if layer_index == 1:
            return PostNormLayer(config, layer.self_attn, layer.mlp)
        if layer_index == 2:
            layer.input_layernorm = ScaledNorm(config.hidden_size, config.rms_norm_eps)
        return layer


def test_what_does_not_match_stays_plain(tmp_path, monkeypatch):
    """Plain layers stand between fused ones; parts of theirs are fused. The results are the same."""
    folder = make_folder(tmp_path / "model", "llama")
    monkeypatch.setitem(test_models.MODELS, "llama", f"{__name__}:Toy")
    test_models.edit(folder, num_hidden_layers=4)
    plain, fused = (Runner(folder, "sdpa", load_format="dummy") for _ in range(2))
    for runner in (plain, fused):
        generator = torch.Generator().manual_seed(0)
        for parameter in runner.model.parameters():
            values = torch.randn(parameter.shape, generator=generator).to(DEVICE)
            parameter.data.copy_(values / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + 0.3 * values)
    fuse(fused.model)
    layers = fused.model.model.layers
    assert [isinstance(layer, Fused) for layer in layers] == [True, False, False, True]
    assert all(isinstance(layer.self_attn, Fused) and isinstance(layer.mlp, Fused) for layer in layers)
    assert type(layers[1]) is PostNormLayer and type(layers[0]).__name__ == "FusedQwen3DecoderLayer"
    assert_same(plain, fused)
    assert_same(plain, fused, [layer_by_layer(x.model) for x in (plain, fused)])


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_another_scale(tmp_path, use_ops, backend):
    """Of scores: it is data of a layer, which kernels take."""
    if backend == "triton":
        pytest.importorskip("triton")
    folder = make_folder(tmp_path / "model", "qwen3")
    plain, fused = Runner(folder, "sdpa"), Runner(folder, backend)
    before = plain.step(STEPS[0], plain.model)
    plain.clear()
    for runner in (plain, fused):
        cache = runner.model.model.layers[0].self_attn.attn.cache
        cache.spec = replace(cache.spec, scale=0.05)
    fuse(fused.model)
    assert isinstance(fused.model.model.layers[0].self_attn, Fused)
    if backend == "triton":
        use_ops()
    assert_same(plain, fused, steps=FEW_STEPS if backend == "triton" else STEPS)
    assert not torch.allclose(plain.step(STEPS[0], plain.model), before, rtol=1e-2)


class DoubledNorm(RMSNorm):
    def rms_forward(self, x):
        return 2 * super().rms_forward(x)

    def add_rms_forward(self, x, residual):
        normed, total = super().add_rms_forward(x, residual)
        return 2 * normed, total


class NegatedLinear(RowParallelLinear):
    def multiply(self, x, bias):
        return -super().multiply(x, bias)


class ShiftedLinear(RowParallelLinear):
    def forward(self, x):
        return super().forward(x) + 1


class HalvedActivation(SiluAndMul):
    def forward(self, x):
        return super().forward(x) / 2


class ScaledEmbedding(VocabParallelEmbedding):
    def forward(self, token_ids):
        return 3 * super().forward(token_ids)


class SlowRope(RotaryEmbedding):
    def forward(self, positions, q, k):
        return super().forward(positions // 2, q, k)


class InterleavedRope(RotaryEmbedding):
    def _rotate(self, x, cos, sin):
        pairs = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return super()._rotate(pairs, cos, sin)


OWN_PARTS = [
    ("input_layernorm", DoubledNorm),
    ("self_attn.q_norm", DoubledNorm),
    ("self_attn.o_proj", NegatedLinear),
    ("mlp.down_proj", NegatedLinear),
    ("mlp.down_proj", ShiftedLinear),
    ("mlp.act_fn", HalvedActivation),
    ("self_attn.rotary_emb", SlowRope),
    ("self_attn.rotary_emb", InterleavedRope),
    ("", ScaledEmbedding),
]


@pytest.mark.parametrize("path, kind", OWN_PARTS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_parts_with_methods_of_their_own(tmp_path, use_ops, path, kind):
    """A form does not take the place of a module that has a part which it does not know; its kernels run."""
    folder = make_folder(tmp_path / "model", "qwen3")
    plain = Runner(folder, "sdpa")
    before = plain.step(STEPS[0], plain.model)
    if path == "mlp.act_fn":  # which the definitions call, and kernels might not
        pytest.importorskip("triton")
        use_ops("norm_linear")
    fused = Runner(folder, "sdpa")
    for runner in (plain, fused):
        decoder = runner.model.model
        part = decoder.layers[0].get_submodule(path) if path else decoder.embed_tokens
        part.__class__ = kind
    fuse(fused.model)
    assert_same(plain, fused)
    assert not torch.allclose(plain.step(STEPS[0], plain.model), before, rtol=1e-2)


def doubled(forward: Callable) -> Callable:
    @wraps(forward)
    def twice(*args):
        return 2 * forward(*args)

    return twice


class Wrapped(Qwen3MLP):
    forward = doubled(Qwen3MLP.forward)


class View(Qwen3MLP):
    def forward(self, x):
        return (2 * super().forward(x)).repeat(1, 2)[:, x.shape[1] :]


def wrap(mlp) -> None:
    mlp.__class__ = Wrapped


def return_views(mlp) -> None:
    mlp.__class__ = View


def set_forward(mlp) -> None:
    mlp.forward = doubled(mlp.forward)


def set_forward_of_a_linear_layer(mlp) -> None:
    mlp.down_proj.forward = doubled(mlp.down_proj.forward)


def add_hook(mlp) -> None:
    mlp.register_forward_hook(lambda module, args, y: 2 * y)


def script(mlp) -> None:
    mlp.act_fn = torch.jit.trace(HalvedActivation(), torch.ones(2, mlp.down_proj.weight.shape[1] * 2, device=DEVICE))


NOT_ON_CUDA = pytest.mark.skipif(DEVICE == "cuda", reason="no kernel of ours can be traced")


@pytest.mark.parametrize(
    "change",
    [wrap, return_views, set_forward, set_forward_of_a_linear_layer, add_hook, pytest.param(script, marks=NOT_ON_CUDA)],
)
def test_forwards_that_are_not_the_plain_one(tmp_path, use_ops, change):
    """They are called with and without kernels: a decorated one, a module's own, one with hooks, and others."""
    folder = make_folder(tmp_path / "model", "qwen3")
    plain, fused = (Runner(folder, "sdpa") for _ in range(2))
    before = plain.step(STEPS[0], plain.model)
    for runner in (plain, fused):
        change(runner.model.model.layers[0].mlp)
    fuse(fused.model)
    assert_same(plain, fused)
    pytest.importorskip("triton")
    use_ops("norm_linear", "add_rms_norm")
    assert_same(plain, fused, steps=FEW_STEPS)
    assert not torch.allclose(plain.step(STEPS[0], plain.model), before, rtol=1e-2)


def strided_embedding(model) -> None:
    embed, kept = model.model.embed_tokens, []
    model.model.embed_tokens = StridedEmbedding(embed, kept)


class StridedEmbedding(nn.Module):
    """An embedding from outside, whose result is a view of a tensor that it keeps."""

    def __init__(self, embed, kept):
        super().__init__()
        self.embed, self.kept = embed, kept

    def forward(self, token_ids):
        self.kept.append(self.embed(token_ids).repeat(1, 2))
        return self.kept[-1][:, self.kept[-1].shape[1] // 2 :]


def strided_feed_forward(model) -> None:
    layer = model.model.layers[0]
    layer.feed_forward = lambda x, hidden_states: (layer.mlp(x) + x).repeat(1, 2)[:, x.shape[1] :]


def hooks_after_attention_and_mlp(model) -> None:
    layer = model.model.layers[0]
    for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
        norm.register_forward_hook(lambda module, args, y: 2 * y)


@pytest.mark.parametrize("change", [strided_embedding, strided_feed_forward, hooks_after_attention_and_mlp])
@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_changed_parts_of_gemma(tmp_path, use_ops, name, change):
    """They are called with and without kernels, and nothing that they keep is overwritten."""
    if name not in MODULES:
        pytest.skip("transformers 4")
    folder = make_folder(tmp_path / "model", name)
    plain, fused = (Runner(folder, "sdpa") for _ in range(2))
    before = plain.step(STEPS[0], plain.model)
    for runner in (plain, fused):
        change(runner.model)
    fuse(fused.model)
    assert_same(plain, fused)
    pytest.importorskip("triton")
    use_ops("norm_linear", "add_rms_norm", "add_normed", "rms_norm")
    assert_same(plain, fused, steps=FEW_STEPS)
    if change is strided_embedding:
        kept = [runner.model.model.embed_tokens.kept for runner in (plain, fused)]
        assert len(kept[0]) > 4 and all(map(torch.equal, *kept))
    else:
        assert not torch.allclose(plain.step(STEPS[0], plain.model), before, rtol=1e-2)


STRIDED = [
    ("gemma3", "post_attention_layernorm"),
    ("gemma3", "post_feedforward_layernorm"),
    ("glm4", "post_mlp_layernorm"),
    ("olmo3", "post_feedforward_layernorm"),
    ("gemma4-experts", "post_feedforward_layernorm_1"),
    ("gemma4-experts", "pre_feedforward_layernorm_2"),
    ("gemma4-experts", "experts"),
]
KEPT = [
    ("olmo3", "self_attn"),
    ("olmo3", "mlp"),
    ("gemma4-experts", "router"),
    ("gemma4-experts", "pre_feedforward_layernorm_2"),
    ("gemma4-experts", "post_feedforward_layernorm_1"),
]


@pytest.mark.parametrize("name, path", STRIDED)
def test_hooks_that_return_views(tmp_path, use_ops, few_programs, name, path):
    """Kernels need contiguous tensors."""
    if name not in MODULES:
        pytest.skip("transformers 4")
    pytest.importorskip("triton")
    plain, fused = (Runner(make_folder(tmp_path / "model", name), "sdpa") for _ in range(2))
    strided = lambda module, args, y: (2 * y).repeat(1, 2)[:, y.shape[1] :]
    for runner in (plain, fused):
        for layer in runner.model.model.layers:
            layer.get_submodule(path).register_forward_hook(strided)
    fuse(fused.model)
    use_ops()
    rows = (0, 1), (0, 3)  # the first two of the rows would also be right if their strides were ignored
    assert_near(fused.step(rows, fused.model), plain.step(rows, plain.model), None)


@pytest.mark.parametrize("name, path", KEPT)
def test_tensors_that_hooks_keep(tmp_path, name, path):
    """Nothing overwrites them."""
    if name not in MODULES:
        pytest.skip("transformers 4")
    runner, kept = Runner(make_folder(tmp_path / "model", name), "sdpa"), []
    keep = lambda module, args, y: kept.extend((x, x.clone()) for x in (*args, y) if isinstance(x, torch.Tensor))
    for layer in runner.model.model.layers:
        layer.get_submodule(path).register_forward_hook(keep)
    fuse(runner.model)
    runner.step(STEPS[0], runner.model)
    assert kept and all(torch.equal(*pair) for pair in kept)


class ScaledRowNorm(RowRMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


def other_class(norm) -> None:
    norm.__class__ = ScaledRowNorm


def own_forward(norm) -> None:
    norm.forward = doubled(norm.forward)


def other_eps(norm) -> None:
    norm.eps = 4.0


@pytest.mark.parametrize("change", [other_class, own_forward, other_eps])
def test_other_norms_of_rows(tmp_path, change):
    if "olmo3" not in MODULES:
        pytest.skip("transformers 4")
    folder = make_folder(tmp_path / "model", "olmo3")
    plain, fused = (Runner(folder, "sdpa") for _ in range(2))
    for runner in (plain, fused):
        attention = runner.model.model.layers[0].self_attn
        change(attention.q_norm)
    fuse(fused.model)
    assert_same(plain, fused)
    attention = fused.model.model.layers[1].self_attn
    attention.__class__ = Olmo3Attention  # plain again, with norms of another kind
    attention.q_norm = attention.k_norm = nn.Identity()
    fuse(fused.model)
    assert not isinstance(attention, Fused)


@pytest.mark.skipif(CUDA, reason="runs kernels in Triton's interpreter")
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gemma4", "gemma4-experts", "glm4", "olmo3"])
def test_sums_in_peer_memory(tmp_path, use_ops, name):
    """The kernels of norms complete the sums, before norms of the sums' own as well. A single rank is the only peer."""
    if name not in MODULES:
        pytest.skip("transformers 4")
    folder, tp = make_folder(tmp_path / "model", name), one_peer(2**14)
    plain, fused = (Runner(folder, "sdpa") for _ in range(2))
    fuse(fused.model)
    for module in fused.model.modules():
        if isinstance(module, RowParallelLinear):
            module.tp = tp
    use_ops("norm_linear", "add_rms_norm", "add_normed", "rms_norm")
    assert_same(plain, fused, steps=FEW_STEPS)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3", "gemma4", "glm4", "olmo3", "granite"])
@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
def test_inputs_of_layers(tmp_path, name, is_fused):
    """Heads of EAGLE-3 read the inputs of layers, whatever norms a family has."""
    if name not in MODULES:
        pytest.skip("transformers 4")
    folder, found = make_folder(tmp_path / "model", name), []
    plain, runner = (Runner(folder, "sdpa") for _ in range(2))
    if is_fused:
        fuse(runner.model)
    for layer in runner.model.model.layers:
        watch_input(layer, found.append)
    for rows in STEPS:
        outputs = plain.step(rows, layer_by_layer(plain.model))
        found.clear()
        runner.step(rows, runner.model)
        assert len(found) == len(outputs)
        assert_near(torch.stack(found[1:]), outputs[:-1], None)


def test_other_kinds_of_linear_layers_stay_plain(tmp_path):
    """Whether ranks sum a product is for the layer to say."""
    folder = make_folder(tmp_path / "model", "qwen3")
    plain, fused = (Runner(folder, "sdpa") for _ in range(2))
    for layer in fused.model.model.layers:
        layer.mlp.down_proj.__class__ = layer.self_attn.o_proj.__class__ = ReplicatedLinear
    fuse(fused.model)
    assert not isinstance(fused.model.model.layers[0].mlp, Fused)
    assert not isinstance(fused.model.model.layers[0].self_attn, Fused)
    assert_same(plain, fused)


def test_router_with_a_bias(tmp_path):
    folder = make_folder(tmp_path / "model", "qwen3-moe")
    plain, fused = (Runner(folder, "sdpa") for _ in range(2))
    moes = [[m for m in x.model.modules() if isinstance(m, MoE)] for x in (plain, fused)]
    for moe in (*moes[0], *moes[1]):
        moe.gate.bias = nn.Parameter(torch.linspace(-2, 2, len(moe.gate.weight), device=DEVICE))
    fuse(fused.model)
    assert moes[1] and all(isinstance(moe, Fused) for moe in moes[1])
    assert_same(plain, fused)


def test_fusing_twice(tmp_path):
    folder = make_folder(tmp_path / "model", "qwen3")
    plain, fused = (Runner(folder, "sdpa") for _ in range(2))
    fuse(fused.model)
    fuse(fused.model)
    assert_same(plain, fused)


def test_own_activations_are_not_quantized(tmp_path, use_ops, monkeypatch):
    """With FP8 units, SwiGLU hands quantized rows to the next product, unless a layer does it in its own way."""
    use_ops("quantize_rows", table={"quantize_rows": None})
    monkeypatch.setattr("nanovllm.quantization.quant_config.has_fp8_units", lambda device: True)
    folder = make_folder(tmp_path / "model", "qwen3")
    for name, kind, expected in [
        ("Qwen3MLP", Qwen3MLP, "FP8SiluAndMul"),
        ("Qwen3MLP", View, "SiluAndMul"),
        ("SiluAndMul", HalvedActivation, "HalvedActivation"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(f"nanovllm.models.qwen3.{name}", kind)
            act = Runner(folder, "sdpa", quantization="fp8").model.model.layers[0].mlp.act_fn
        assert type(act).__name__ == expected


def test_own_products_are_not_quantized(tmp_path, monkeypatch):
    monkeypatch.setattr("nanovllm.models.qwen3.RowParallelLinear", NegatedLinear)
    with pytest.raises(
        ValueError, match=r"layers.0.self_attn.o_proj: can't be quantized: NegatedLinear has a `multiply`"
    ):
        Runner(make_folder(tmp_path / "model", "qwen3"), "sdpa", quantization="int8")


def test_sum_over_ranks_has_the_dtype_of_activations(tmp_path, use_ops, few_programs):
    """The weights of norms may be float32, as in hybrid models."""
    pytest.importorskip("triton")
    runner = Runner(make_folder(tmp_path / "model", "qwen3-moe"), "sdpa")
    fuse(runner.model)
    use_ops("mix_experts")
    moe, norm = next((x.mlp, x.post_attention_layernorm) for x in runner.model.model.layers if isinstance(x.mlp, MoE))
    moe, found = moe.half(), []
    moe.tp = SimpleNamespace(
        size=1, rank=0, sum=lambda compute, *sizes: found.append(sizes) or PartialSum(compute(None))
    )
    assert norm.weight.dtype == torch.float32
    for num_rows in (1, 3, 9):
        x = torch.linspace(-1, 1, num_rows * len(norm.weight), device=DEVICE).view(num_rows, -1).half()
        mix_experts(NormInput(PartialSum(x), None, norm), moe, torch.arange(num_rows, device=DEVICE).int())
        assert found.pop()[:3] == (num_rows, len(norm.weight), torch.float16)


def test_forms_are_those_of_plain_functions():
    """Each entry of the table names a function that exists, and a form that says what it fuses."""
    for function, home in FORMS.items():
        found = resolve_name(function)
        assert f"{found.__module__}:{found.__qualname__}" == function
        form = resolve_name(f"nanovllm.fused.{home}")
        assert issubclass(form, Fused) and form.what, home


# -- nanovllm show-fused -----------------------------------------------------------------------------------------------


def test_show_fused(tmp_path, capsys, monkeypatch):
    """What is replaced, what stays plain because of a part, and a table of what was measured."""
    folder = make_folder(tmp_path / "model", "llama")
    monkeypatch.setitem(test_models.MODELS, "llama", f"{__name__}:ToyWithANorm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    taken = {
        (): 100.0,
        ("Attention",): 130.0,
        ("MLP", "MoE"): 110.0,
        ("DecoderLayer", "HybridLayer", "Qwen3Model"): 90.0,
    }

    def run(function, model, settings, names=()):
        assert function is show_fused.step_times and model == folder and settings["load_format"] == "dummy"
        return {"1 sequence": taken.get(names, 200.0)}

    monkeypatch.setattr(show_fused, "run_in_process", run)
    with pytest.raises(SystemExit) as end:
        cli.main(["show-fused", folder, "--load-format=dummy", "--measure"])
    printed = capsys.readouterr().out
    assert end.value.code == 0
    assert re.search(r"Qwen3DecoderLayer +1  norms with the products", printed)
    assert re.search(r"LlamaAttention +2  norms of q and k", printed) and re.search(r"RMSNorm +4 ", printed)
    assert "although a fused form exists: 1 Qwen3DecoderLayer\n" in printed
    assert re.search(
        r"(?s)a GPU.*a step +100\n.*attention.* \+30\n.*feed-forward.* \+10\n.*sums +-10\nall +\+100\n", printed
    )
    assert "delta rule" not in printed


class ToyWithANorm(LlamaForCausalLM):
    """The first norm of its second layer is another one."""

    @classmethod
    def make_layer(cls, config, layer_index, rotary_emb):
        layer = super().make_layer(config, layer_index, rotary_emb)
        if layer_index == 1:
            layer.input_layernorm = ScaledNorm(config.hidden_size, config.rms_norm_eps)
        return layer


def test_forms_that_are_left_out():
    """For a while, so that a model is fused without them."""
    before = dict(FORMS)
    with show_fused.without(("Attention",)):
        assert {before[name] for name in before.keys() - FORMS.keys()} == {
            "fused_attention:FusedAttention",
            "fused_attention:FusedGatedAttention",
            "family_attention:FusedGemma4Attention",
            "family_attention:FusedMinistral3Attention",
            "family_attention:FusedOlmo3Attention",
        }
    assert before == FORMS
    with show_fused.without(("",)):
        assert not FORMS
    assert before == FORMS


@pytest.mark.gpu
def test_measured_steps(tmp_path):
    """Two engines, one of them plain: both run, and a fused step takes no longer than a plain one."""
    folder = make_folder(tmp_path / "model", "qwen3")
    times = [show_fused.step_times(folder, {}, names) for names in (("no such class",), ("",))]
    assert all(fast < 1.1 * slow for fast, slow in zip(*(found.values() for found in times)))
