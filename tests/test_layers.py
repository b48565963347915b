"""Layers: the ranks' shards against the whole, and everything against transformers or a dense float64 reference."""

import json
import math
import re
from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
import transformers
from common import assert_close, one_peer
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from nanovllm.attention.base import AttentionBackend, connect
from nanovllm.attention.flash import FlashBackend
from nanovllm.attention.sdpa import SDPABackend
from nanovllm.attention.triton import TritonBackend
from nanovllm.cache.kv_cache import AttentionSpec, KVCache
from nanovllm.fused import fuse
from nanovllm.fused.fused_attention import QKNormRope, apply_rotary, attend, norm_rope
from nanovllm.fused.fused_linear import partial_sum, product
from nanovllm.fused.norm_input import Normed
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.gated_activation import GeluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    linear,
)
from nanovllm.layers.rotary_embedding import RotaryEmbedding, get_rope
from nanovllm.models import ModelConfig
from nanovllm.utils.construction import constructing
from nanovllm.utils.context import Context, attention_context
from nanovllm.utils.partial_sum import PartialSum
from nanovllm.utils.tensor_parallel import TensorParallel

SIZES = pytest.mark.parametrize("size", [1, 2, 4])


class Lone(TensorParallel):
    """A rank without the others: its part of a sum stays a part, and the test adds the parts up."""

    def all_gather(self, x):
        return torch.cat([x if rank == self.rank else torch.zeros_like(x) for rank in range(self.size)], 1)


def of_ranks(size: int) -> Iterator[Lone]:
    """In each iteration, layers are constructed for a rank."""
    for rank in range(size):
        with constructing(tp := Lone(rank, size)):
            yield tp


def load(parameter: torch.nn.Parameter, weight: torch.Tensor, *shard_id: int | str) -> None:
    parameter.weight_loader(parameter, weight, *shard_id)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


# -- shards ------------------------------------------------------------------------------------------------------------


@SIZES
def test_merged_column(size):
    """Each rank has its part of the gate next to its part of the up projection, of whatever sizes."""
    x, gate, up = torch.randn(5, 24), torch.randn(16, 24), torch.randn(32, 24)
    parts = []
    for _ in of_ranks(size):
        layer = MergedColumnParallelLinear(24, [16, 32])
        for shard_id, weight in enumerate((gate, up)):
            load(layer.weight, weight, shard_id)
        parts.append(layer(x).split([16 // size, 32 // size], -1))
    for whole, shards in zip((gate, up), zip(*parts)):
        torch.testing.assert_close(torch.cat(shards, -1), x @ whole.T)


@SIZES
@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 4), (8, 2), (4, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_qkv(size, heads, kv_heads, bias):
    """Every query head meets the key-value head that it meets on one rank, also where those are replicated."""
    dim = 3
    rows = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
    weights = [torch.randn(n, 24) for n in rows.values()]
    biases = [torch.randn(n) for n in rows.values()] if bias else [None] * 3
    x = torch.randn(5, 24)
    parts = []
    for _ in of_ranks(size):
        layer = QKVParallelLinear(24, dim, heads, kv_heads, bias)
        assert (layer.num_heads, layer.num_kv_heads) == (heads // size, max(1, kv_heads // size))
        for shard_id, weight, b in zip("qkv", weights, biases):
            load(layer.weight, weight, shard_id)
            if bias:
                load(layer.bias, b, shard_id)
        local = layer(x).unflatten(-1, (-1, dim)).split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], 1)
        parts.append([part.repeat_interleave(layer.num_heads // part.shape[1], 1) for part in local])
    for shards, weight, b in zip(zip(*parts), weights, biases):
        whole = F.linear(x, weight, b).unflatten(-1, (-1, dim))
        torch.testing.assert_close(torch.cat(shards, 1), whole.repeat_interleave(heads // whole.shape[1], 1))


@SIZES
@pytest.mark.parametrize("bias", [False, True])
def test_row(size, bias):
    """The sum over ranks has the bias once."""
    x, weight, b = torch.randn(5, 16), torch.randn(24, 16), torch.randn(24) * 10
    total = 0
    for _, part in zip(of_ranks(size), x.chunk(size, -1)):
        layer = RowParallelLinear(16, 24, bias)
        load(layer.weight, weight)
        if bias:
            load(layer.bias, b)
        total = total + layer(part)
    torch.testing.assert_close(total, F.linear(x, weight, b if bias else None))


@SIZES
def test_embedding_and_head(size):
    weight, ids, x = torch.randn(32, 24), torch.tensor([0, 7, 8, 15, 16, 31, 31, 3]), torch.randn(5, 24)
    embedded, logits = 0, []
    for _ in of_ranks(size):
        embedding, head = VocabParallelEmbedding(32, 24), ParallelLMHead(32, 24)
        load(embedding.weight, weight)
        load(head.weight, weight)
        embedded = embedded + embedding(ids)
        logits.append(head(x))
        assert torch.equal(head.local_logits(logits[-1]), x @ head.weight.T)
    assert torch.equal(embedded, weight[ids])
    torch.testing.assert_close(sum(logits), x @ weight.T)


@pytest.mark.parametrize(
    "build, size, number",
    [
        (lambda: ColumnParallelLinear(8, 18), 4, 18),
        (lambda: MergedColumnParallelLinear(8, [8, 10]), 4, 10),
        (lambda: QKVParallelLinear(8, 4, 6, 2), 4, 6),
        (lambda: QKVParallelLinear(8, 4, 6, 3), 2, 3),
        (lambda: QKVParallelLinear(8, 4, 12, 3), 4, 3),
        (lambda: RowParallelLinear(15, 8), 2, 15),
        (lambda: VocabParallelEmbedding(31, 8), 2, 31),
        (lambda: ParallelLMHead(30, 8), 4, 30),
    ],
)
def test_sizes_that_do_not_divide_are_refused(build, size, number):
    message = rf"tensor_parallel_size={size}\b.*\b{number}\b"
    with constructing(Lone(0, size)), pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("layer", [MergedColumnParallelLinear(4, [2, 2]), QKVParallelLinear(4, 2, 2, 1)])
@pytest.mark.parametrize("shard_id", [(), ("",), ("kv",), (5,)])
def test_shard_ids_that_do_not_exist_are_refused(layer, shard_id):
    """A weight without an id would overwrite the first of several."""
    with pytest.raises(ValueError, match=f"shard_id={(shard_id or (None,))[0]!r}: must be one of (0, 1|'q', 'k', 'v')"):
        load(layer.weight, torch.zeros(2, 4), *shard_id)


def test_weights_of_another_shape_are_refused():
    with constructing(Lone(0, 2)):
        layer = RowParallelLinear(16, 24, True)
    for parameter, wrong, right in [(layer.weight, (24, 8), (24, 16)), (layer.bias, (12,), (24,))]:
        with pytest.raises(ValueError) as error:
            load(parameter, torch.zeros(wrong))
        assert str(list(wrong)) in str(error.value) and str(list(right)) in str(error.value)


# -- layers that follow each other -------------------------------------------------------------------------------------


def norm_and_projections(bias: bool):
    up, down = MergedColumnParallelLinear(24, [264] * 2, bias), RowParallelLinear(264, 24, bias)
    layers = nn.ModuleList([RMSNorm(24, 0.5), up, down])
    for parameter in layers.parameters():
        parameter.copy_(torch.randn(parameter.shape) / (parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 1))
    fuse(layers)
    return layers


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", [None, SiluAndMul()], ids=["", "act"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norm_linear(with_residual, act, bias, rows):
    norm, proj, _ = norm_and_projections(bias)
    x, residual = torch.randn(rows, 24), torch.randn(rows, 24) if with_residual else None
    total = x + residual if with_residual else x.clone()
    expected = F.rms_norm(total.double(), (24,), norm.weight.double(), 0.5) @ proj.weight.double().T
    expected = expected + proj.bias.double() if bias else expected
    if act:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    normed = norm(PartialSum(x), residual)
    torch.testing.assert_close(product(proj, normed, act), expected.float())
    assert torch.equal(normed.residual, total)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in Triton's interpreter; tests/test_gpu.py on CUDA")
@pytest.mark.parametrize("rows", [1, 5, 6])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_on_kernels(monkeypatch, use_ops, bias, rows):
    """One row, few and many as on a Hopper GPU: what a layer hands on, in parts or whole, the next one can read."""
    layers, x, shapes = norm_and_projections(bias), torch.randn(rows, 24).half(), []

    def two_blocks(norm, up, down, x, residual=None):
        for _ in range(2):
            normed = norm(x, residual)
            x = partial_sum(down, product(up, normed, SiluAndMul()))
            residual = normed.residual
            shapes.append(x.parts.shape)
        normed = norm(x, residual)
        return normed.tensor(), normed.residual

    layers = [layer.half() for layer in layers]
    expected = two_blocks(*(deepcopy(layer).double() for layer in layers), PartialSum(x.double()))
    use_ops()
    monkeypatch.setattr("nanovllm.kernels.linear.split_k_gemm.has_tma", lambda device: True)
    monkeypatch.setattr("nanovllm.kernels.linear.split_k_gemm.MAX_ROWS", 5)
    for actual, reference in zip(two_blocks(*layers, PartialSum(x)), expected):
        torch.testing.assert_close(actual.double(), reference, rtol=5e-3, atol=5e-3)
    assert shapes == 2 * [(rows, 24)] + 2 * [(4, rows, 24) if rows == 5 and not bias else (rows, 24)]


@pytest.mark.parametrize("shape", [(1, 5, 16), (3, 2, 16), (16,)])
@pytest.mark.parametrize("layer", [ReplicatedLinear(16, 24), SiluAndMul(), GeluAndMul(), RMSNorm(16)])
def test_any_leading_dimensions_on_kernels(use_ops, layer, shape):
    """Kernels compute matrices of rows. A layer computes other tensors, too, whether the kernels can or not."""
    pytest.importorskip("triton")
    for parameter in layer.parameters():
        parameter.data.normal_()
    x = torch.randn(shape)
    expected = layer(x)
    use_ops()
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("layer", [ReplicatedLinear(16, 24), SiluAndMul(), GeluAndMul(), RMSNorm(16)])
def test_rows_that_are_not_contiguous_on_kernels(use_ops, layer, rows):
    pytest.importorskip("triton")
    x = torch.randn(rows, 32)[:, ::2]
    for parameter in layer.parameters():
        parameter.data.normal_()
    expected = layer(x)
    use_ops()
    torch.testing.assert_close(layer(x), expected)


# -- against transformers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 64), (7, 3, 16)])
def test_rms_norm(shape):
    ours, theirs = RMSNorm(shape[-1], 1e-6), Qwen3RMSNorm(shape[-1], eps=1e-6)
    weight = torch.randn(shape[-1])
    load(ours.weight, weight)
    theirs.weight.data.copy_(weight)
    x = torch.randn(shape) * torch.logspace(-4, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))  # eps matters at 1e-4
    torch.testing.assert_close(ours(x), theirs(x))
    residual = torch.randn(shape)
    normed, total = ours(x, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, theirs(x + residual))


HEAD_DIM, MAX_LEN, THETA = 32, 4096, 1e6
ROPES = {
    "default": {},
    "linear": {"factor": 2.5},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn tuned": {
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn by ratio": {"factor": 3.7, "original_max_position_embeddings": MAX_LEN / 3.7, "beta_fast": 20.0},
    "yarn with mscale": {
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "mscale": 0.8,
        "mscale_all_dim": 1.2,
    },
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
}
WRITERS = {
    "v4 type": lambda rope: {"rope_theta": THETA, "rope_scaling": {"type": rope.pop("rope_type"), **rope}},
    "v4 rope_type": lambda rope: {"rope_theta": THETA, "rope_scaling": rope},
    "v4 null": lambda rope: {"rope_theta": THETA, "rope_scaling": None},
    "v5": lambda rope: {"rope_parameters": {"rope_theta": THETA, **rope}},
}
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_LEN,
}


def read_config(folder, **entries) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **SHAPE, **entries}))
    return ModelConfig.read(folder)


def theirs_rope(rope: dict, **entries) -> Qwen3RotaryEmbedding:
    """transformers' module, by the names that its version knows."""
    writer = WRITERS["v5" if int(transformers.__version__.split(".")[0]) >= 5 else "v4 rope_type"]
    return Qwen3RotaryEmbedding(Qwen3Config(**SHAPE, **writer(dict(rope)), **entries))


@pytest.mark.parametrize(
    "name, writer", [(name, writer) for name in ROPES for writer in WRITERS if writer != "v4 null" or name == "default"]
)
def test_rotary(tmp_path, name, writer):
    rope = {"rope_type": name.split()[0], **ROPES[name]}
    config = read_config(tmp_path, **WRITERS[writer](dict(rope)))
    assert_same_rope(config, theirs_rope(rope), [0, 1, 2, 63, 511, 512, 1023, 1024, 2000, MAX_LEN - 1])


def assert_same_rope(config, theirs, positions) -> None:
    rotary_emb, positions = RotaryEmbedding(config.rope_inv_freq, config.rope_scale, MAX_LEN), torch.tensor(positions)
    q, k = torch.randn(len(positions), 4, HEAD_DIM), torch.randn(len(positions), 2, HEAD_DIM)
    cos, sin = theirs(q, positions[None])
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    for found, reference in zip(rotary_emb(positions, q, k), expected):
        torch.testing.assert_close(found, reference[0].transpose(0, 1))
    fuse(rotary_emb)
    for x, reference in zip((q, k), expected):
        rotated = apply_rotary(x, rotary_emb.rows(positions).cos_sin)
        torch.testing.assert_close(rotated, reference[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norm_rope(dtype):
    """Queries and keys at once, each head with its own weight, are transformers' norm and rope of each."""
    x, cos_sin = torch.randn(7, 6, 32, dtype=dtype), torch.randn(7, 2, 32)
    q_norm, k_norm = (Qwen3RMSNorm(32, 1e-6).double() for _ in range(2))
    for norm in (q_norm, k_norm):
        norm.weight.data = torch.randn(32, dtype=dtype).double()
    weights = q_norm.weight.data.expand(4, -1), k_norm.weight.data.expand(2, -1)
    y = norm_rope(x, torch.cat(weights).to(dtype), 1e-6, cos_sin)
    q, k = q_norm(x[:, :4].double()), k_norm(x[:, 4:].double())
    expected = apply_rotary(torch.cat((q, k), 1), cos_sin)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)  # rounded once


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_few_sizes_of_products(monkeypatch, dtype, bias):
    """oneDNN compiles code for every number of rows, so there are few of them, and padding is not seen outside."""
    weight, b = torch.randn(24, 16, dtype=dtype), torch.randn(24, dtype=dtype) if bias else None
    sizes = set()
    with monkeypatch.context() as patch:
        patch.setattr(F, "linear", lambda x, *rest: sizes.add(len(x)) or x.new_empty(len(x), 24))
        for num_rows in range(1, 1025):
            y = linear(torch.ones(num_rows, 16, dtype=dtype), weight, b)
            assert y.shape == (num_rows, 24)
    if dtype != torch.float32:  # whose products are not oneDNN's
        assert len(sizes) == 64 + 4 * 8 and max(sizes) == 1024
    x = torch.randn(67, 16, dtype=dtype)
    reference = F.linear(x.double(), weight.double(), b if b is None else b.double())
    torch.testing.assert_close(linear(x, weight, b).double(), reference, rtol=0.01, atol=0.05)


def test_ropes_differ(tmp_path):
    """None of the kinds is read as another, so that test_rotary compares different things."""
    ropes = [(name.split()[0], rope) for name, rope in ROPES.items() if name != "dynamic"]  # which has the default's
    configs = [read_config(tmp_path, **WRITERS["v5"]({"rope_type": kind, **rope})) for kind, rope in ropes]
    assert len({(config.rope_inv_freq, config.rope_scale) for config in configs}) == len(ropes)
    assert read_config(tmp_path).rope_inv_freq != configs[0].rope_inv_freq  # theta is 10000 where none is given


@pytest.mark.parametrize("value", [0.0, -10000.0, "10000", True, math.nan, math.inf, [1e4]])
@pytest.mark.parametrize(
    "rope_type, name",
    [
        ("default", "rope_theta"),
        ("linear", "factor"),
        ("yarn", "factor"),
        ("yarn", "attention_factor"),
        ("llama3", "high_freq_factor"),
        ("llama3", "original_max_position_embeddings"),
    ],
)
@pytest.mark.parametrize("writer", ["v4 rope_type", "v5"])
def test_ropes_that_make_no_sense_are_refused(tmp_path, rope_type, name, value, writer):
    rope = {"rope_type": rope_type, **ROPES[next(key for key in ROPES if key.startswith(rope_type))]}
    entries = WRITERS[writer](rope)
    part = entries if name in entries else entries["rope_parameters" if writer == "v5" else "rope_scaling"]
    part[name] = value
    with pytest.raises((ValueError, TypeError), match=re.escape(f"{tmp_path}/config.json: {name}={value!r}: must be ")):
        read_config(tmp_path, **entries)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((64, 64, 16, -1.0), "base=-1.0"),
        ((64, 64, 0, 1e4), "max_position=0"),
        ((64, 0, 16, 1e4), "rotary_dim=0"),
        ((64, 64, 16, 1e4, {"rope_type": "linear"}), "rope_scaling: has no 'factor'"),
    ],
)
def test_arguments_of_get_rope_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        get_rope(*arguments)


def test_rope_that_is_no_object(tmp_path):
    with pytest.raises(TypeError, match="config.json: rope_scaling='linear': must be an object"):
        read_config(tmp_path, rope_scaling="linear")
    with pytest.raises(ValueError, match="config.json: rope_theta=0.0: must be at least"):
        read_config(tmp_path, rope_theta=0)
    unset = {"rope_theta": None, "rope_parameters": {"rope_theta": None, "rope_type": None}}
    assert read_config(tmp_path, **unset).rope_inv_freq == read_config(tmp_path).rope_inv_freq


@pytest.mark.parametrize("kind", ["axial", "su"])
@pytest.mark.parametrize("writer", ["v4 type", "v4 rope_type", "v5"])
def test_unknown_ropes_are_refused(tmp_path, kind, writer):
    with pytest.raises(ValueError, match=f"rope type='{kind}'.*'yarn'"):
        read_config(tmp_path, **WRITERS[writer]({"rope_type": kind, "factor": 2.0}))


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + i / 8 for i in range(HEAD_DIM // 2)],
    "long_factor": [2.0 + i for i in range(HEAD_DIM // 2)],
}


@pytest.mark.parametrize("writer", ["v4 type", "v4 rope_type", "v5"])
@pytest.mark.parametrize("extra", [{}, {"attention_factor": 1.5}])
def test_longrope(tmp_path, writer, extra):
    """Up to the original length, beyond which all frequencies change. Phi writes it beside the others."""
    rope, length = LONGROPE | extra, {"original_max_position_embeddings": 512}
    config = read_config(tmp_path, **WRITERS[writer](dict(rope)), **length)
    assert config.max_position_embeddings == MAX_LEN and config.rope_long[1] == 512
    assert config.rope_inv_freq != read_config(tmp_path).rope_inv_freq
    assert_same_rope(config, theirs_rope(rope, **length), [0, 1, 2, 63, 200, 511])
    for wrong in ([1.0] * 3, 2.0, [1.0] * 15 + ["2"]):
        with pytest.raises((ValueError, TypeError), match="config.json: short_factor"):
            read_config(tmp_path, **WRITERS[writer](rope | {"short_factor": wrong}), **length)


@pytest.mark.parametrize("writer", ["v4 type", "v4 rope_type", "v5"])
@pytest.mark.parametrize(
    "rope, max_len",
    [
        ({"rope_type": "default"}, MAX_LEN),
        ({"rope_type": "linear", "factor": 2.5}, 10240),
        ({"rope_type": "dynamic", "factor": 2.5}, MAX_LEN),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 3000}, 12000),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1000}, 2000),
        ({"rope_type": "yarn", "factor": 4.0}, 4 * MAX_LEN),
        ({"rope_type": "yarn", "original_max_position_embeddings": 512}, MAX_LEN),
        (ROPES["llama3"] | {"rope_type": "llama3"}, MAX_LEN),
    ],
)
def test_longest_sequence(tmp_path, rope, max_len, writer):
    assert read_config(tmp_path, **WRITERS[writer](dict(rope))).max_position_embeddings == max_len


def test_several_places_of_rope_entries(tmp_path):
    """YaRN in `rope_scaling`, which users add to a file of transformers 5, and parameters by kind of layer."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    expected = read_config(tmp_path, rope_theta=THETA, rope_scaling=yarn)
    plain = {"rope_theta": THETA, "rope_type": "default"}
    renamed = {"type": "yarn"} | {name: value for name, value in yarn.items() if name != "rope_type"}
    for entries in (
        {"rope_parameters": plain, "rope_scaling": yarn},
        {"rope_parameters": plain, "rope_scaling": renamed},
        {"rope_parameters": plain | yarn, "rope_scaling": None},
        {"rope_parameters": {"full_attention": plain | yarn, "sliding_attention": plain}},
        {"rope_theta": THETA, "rope_parameters": {"full_attention": yarn}},
    ):
        found = read_config(tmp_path, **entries)
        assert found.rope_inv_freq == expected.rope_inv_freq and found.rope_scale == expected.rope_scale
        assert found.max_position_embeddings == expected.max_position_embeddings == 4096


# -- attention ---------------------------------------------------------------------------------------------------------

LENGTHS = [1, 300, 16, 70, 17, 257, 5]
NEW = [1, 40, 16, 1, 17, 257, 3]  # the tokens before these are in the cache already
DIM = 16


def dense(q, k, v, soft_cap=None, sinks=None):
    """q [M, heads, dim], the last of k's L tokens -> [M, heads, dim] in float64."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("mhd,lhd->hml", q, k) / DIM**0.5
    scores = scores if soft_cap is None else soft_cap * (scores / soft_cap).tanh()
    later = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    scores = scores.masked_fill(later, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hml,lhd->mhd", scores.softmax(-1)[..., : len(k)], v)


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("group", [1, 2, 5, 8])
@pytest.mark.parametrize("num_decodes", [0, 2, len(LENGTHS)])
def test_sdpa_attention(monkeypatch, block_size, group, num_decodes):
    """Against the reference, and with padded lengths: a CPU's kernels are compiled for each that comes."""
    plain, padded_lengths = F.scaled_dot_product_attention, []

    def noted(q, k, *rest, **options):
        padded_lengths.append(k.shape[2])
        return plain(q, k, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    kv_heads, width = 2, -(-max(LENGTHS) // block_size)
    # no two sequences share a block, and no block is where its number would put it
    tables = torch.randperm(len(LENGTHS) * width).view(len(LENGTHS), width).int()
    cache = KVCache(torch.full((2, tables.numel(), block_size, kv_heads, DIM), 1e4))
    slots = (tables[:, :, None] * block_size + torch.arange(block_size, dtype=torch.int32)).flatten(1)
    keys, values = ([torch.randn(n, kv_heads, DIM) for n in LENGTHS] for _ in range(2))
    num_new = [1] * num_decodes + NEW[num_decodes:]
    queries = [torch.randn(n, group * kv_heads, DIM) for n in num_new]

    def store(first: list[int], last: list[int]) -> Context:
        """Tokens first[i]:last[i] of every sequence in one step; the context of that step."""
        rows = [(i, slice(a, b)) for i, (a, b) in enumerate(zip(first, last))]
        context = Context(
            num_decodes < len(LENGTHS),
            num_decode_rows=num_decodes,
            slot_mapping=torch.cat([slots[i, part] for i, part in rows]),
            context_lens=torch.tensor(last, dtype=torch.int32),
            block_tables=tables,
            max_context_len=max(LENGTHS),
            max_seqlen_q=max(num_new),
            cu_seqlens_q=torch.tensor([0, *num_new]).cumsum(0).int() if num_decodes < len(LENGTHS) else None,
        )
        new = (torch.cat([x[i][part] for i, part in rows]) for x in (keys, values))
        cache.store_kvcache(context.slot_mapping.long(), *new)
        return context

    before = [length - n for length, n in zip(LENGTHS, num_new)]
    store([0] * len(LENGTHS), before)
    expected = torch.cat([dense(*triple) for triple in zip(queries, keys, values)]).float()
    context = store(before, LENGTHS)
    for _ in range(2):  # the second layer finds the plan of the first
        torch.testing.assert_close(SDPABackend().attend(torch.cat(queries), cache, context), expected)
    sinks = torch.randn(group * kv_heads)
    cache.spec = AttentionSpec(soft_cap=1.5, sinks=sinks)
    expected = torch.cat([dense(*triple, 1.5, sinks) for triple in zip(queries, keys, values)]).float()
    torch.testing.assert_close(SDPABackend().attend(torch.cat(queries), cache, context), expected)
    assert padded_lengths and all(length % 16 == 0 for length in padded_lengths)


@pytest.mark.parametrize("has_amx", [True, False])
@pytest.mark.parametrize("group", [1, 2, 5])
def test_sdpa_decodes_in_bfloat16(monkeypatch, group, has_amx):
    """Where a CPU has AMX, a pair of heads is computed one by one: close to float64 either way."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    lengths, kv_heads = [40, 33, 1], 2
    tables = torch.tensor([[4, 0, 2], [1, 5, 6], [3, 0, 0]], dtype=torch.int32)
    cache = KVCache(torch.randn(2, 7, 16, kv_heads, DIM).bfloat16())
    q = torch.randn(3, group * kv_heads, DIM).bfloat16()
    context_lens = torch.tensor(lengths, dtype=torch.int32)
    context = Context(context_lens=context_lens, block_tables=tables, num_decode_rows=3, max_context_len=48)
    stored = [[x[table].flatten(0, 1)[:n] for x in (cache.k, cache.v)] for table, n in zip(tables, lengths)]
    expected = torch.cat([dense(row[None], *pair) for row, pair in zip(q, stored)])
    assert_close(SDPABackend().attend(q, cache, context), expected)


@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("path", ["layers", "plain", "kernels", "fused kernels", "fused product"])
def test_attention_from_qkv(monkeypatch, use_ops, path, has_norm):
    """The layer norms, rotates, stores and attends; a model without q and k norms, as Llama, has the same paths."""
    if path not in ("layers", "plain") and torch.cuda.is_available():
        pytest.skip("runs kernels in Triton's interpreter; tests/test_gpu.py on CUDA")
    heads, kv_heads, block_size, lengths = 4, 2, 16, [20, 5]
    layer = Attention(heads, DIM, DIM**-0.5, kv_heads)
    if path not in ("layers", "plain"):
        use_ops("norm_rope_and_store")
        layer.backend = TritonBackend()
        layer.backend.set_head_shape(heads // kv_heads, DIM, torch.float32)
        monkeypatch.setattr(layer.backend.ops, "fuses_qk_norm_rope", lambda *_: path == "fused kernels")
    fused_rows, double = [], ColumnParallelLinear((heads + 2 * kv_heads) * DIM, (heads + 2 * kv_heads) * DIM)
    double.weight.copy_(2 * torch.eye(len(double.weight)))
    rotary_emb = RotaryEmbedding(tuple(100.0 ** (-torch.arange(0, DIM, 2) / DIM)), 1.0, 32)
    plain_rope = deepcopy(rotary_emb)
    fuse(nn.ModuleList([double, rotary_emb]))

    def store_product(x, qkv_proj, *args):
        fused_rows.append(len(x))
        return layer.backend.ops.norm_rope_and_store(product(qkv_proj, x).unflatten(-1, (-1, DIM)), *args)

    if path == "fused product":
        monkeypatch.setattr(layer.backend.ops, "qkv_norm_rope_store", store_product)
    layer.cache = KVCache(torch.zeros(2, 4, block_size, kv_heads, DIM))
    tables = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    weights = (torch.rand(DIM) + 0.5, torch.rand(DIM) + 0.5) if has_norm else (None, None)
    qkvs = [torch.randn(length, heads + 2 * kv_heads, DIM) for length in lengths]

    def step(num_decodes: int, rows: list[slice]) -> torch.Tensor:
        positions = [torch.arange(length)[row] for length, row in zip(lengths, rows)]
        slots = [table[p // block_size] * block_size + p % block_size for table, p in zip(tables, positions)]
        num_new = [len(p) for p in positions]
        last = [int(p[-1]) + 1 for p in positions]
        chunks = [(end - new, end) for new, end in zip(num_new, last)][num_decodes:]
        tiles = layer.backend.prepare_chunks(chunks, num_decodes) if chunks and path not in ("layers", "plain") else {}
        context = Context(
            num_decodes < len(rows),
            num_decode_rows=num_decodes,
            slot_mapping=torch.cat(slots).int(),
            context_lens=torch.tensor(last, dtype=torch.int32),
            block_tables=tables[: len(rows)],
            max_context_len=max(last),
            max_seqlen_q=max(num_new),
            cu_seqlens_q=torch.tensor([0, *num_new]).cumsum(0).int() if num_decodes < len(rows) else None,
            backend_arrays={name: torch.from_numpy(x).int() for name, x in tiles.items()},
        )
        qkv = torch.cat([qkv[row] for qkv, row in zip(qkvs, rows)]).flatten(1)
        with attention_context(context):
            if path == "layers":
                q, k, v = qkv.unflatten(1, (-1, DIM)).split([heads, kv_heads, kv_heads], 1)
                if has_norm:
                    q, k = (F.rms_norm(x, (DIM,), weight, 1e-6) for x, weight in zip((q, k), weights))
                return layer(*plain_rope(torch.cat(positions), q, k), v)
            rope = rotary_emb.rows(torch.cat(positions))
            return attend(layer, Normed(qkv / 2), double, QKNormRope(*weights, 1e-6, rope.cos_sin))

    first = step(0, [slice(0, -3)] * 2).split([length - 3 for length in lengths])
    decode, chunk = step(1, [slice(-3, -2), slice(-3, -1)]).split([1, 2])  # a step that does both
    second, last = step(2, [slice(-2, -1), slice(-1, None)]).unbind()  # both decode
    (end,) = step(1, [slice(-1, None)])
    outs = [torch.cat((first[0], decode, second[None], end[None])), torch.cat((first[1], chunk, last[None]))]
    assert fused_rows == ([sum(lengths) - 6, 3] if path == "fused product" else [])  # of steps with chunks
    for i, qkv in enumerate(qkvs):
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
        cos_sin = rotary_emb.rows(torch.arange(lengths[i])).cos_sin
        if has_norm:
            q, k = (F.rms_norm(x, (DIM,), weight, 1e-6) for x, weight in zip((q, k), weights))
        expected = dense(apply_rotary(q, cos_sin), apply_rotary(k, cos_sin), v).flatten(1).float()
        torch.testing.assert_close(outs[i], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in Triton's interpreter; tests/test_gpu.py on CUDA")
@pytest.mark.parametrize("rows", [1, 3])
def test_layers_on_peer_memory(use_ops, rows):
    """The path through peer memory with a single rank, on memory of the CPU: sums, buffers that alternate, and keys."""
    use_ops("embed_shard", "norm_linear", "add_rms_norm")
    tp = one_peer()
    peers = tp.peers
    ids = torch.randint(32, (rows,))
    with constructing(tp):
        embedding, head = VocabParallelEmbedding(64, 24), ParallelLMHead(64, 24)
    down, norm, up = RowParallelLinear(24, 24), RMSNorm(24, 0.5), ColumnParallelLinear(24, 24)
    fuse(nn.ModuleList([embedding, head, down, norm, up]))
    for target in (embedding.weight, head.weight, norm.weight, up.weight, down.weight):
        target.copy_(torch.randn(target.shape))
    down.tp = tp
    x = embedding.fused(ids)
    normed = norm(x)
    y, residual = product(up, normed), normed.residual
    assert len(x) == rows and x.tensor is None
    torch.testing.assert_close(residual, embedding.weight[ids])
    torch.testing.assert_close(y, F.rms_norm(residual, (24,), norm.weight, 0.5) @ up.weight.T, rtol=1e-4, atol=1e-4)
    x = partial_sum(down, y)
    assert x.parts.data_ptr() - peers.memory.data_ptr() == peers.sums_offset + peers.capacity
    expected = residual + y @ down.weight.T
    normed = norm(x, residual)
    torch.testing.assert_close(normed.residual, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normed.tensor(), F.rms_norm(expected, (24,), norm.weight, 0.5), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(partial_sum(down, y).reduce(), y @ down.weight.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head(normed.tensor()), normed.tensor() @ head.weight.T, rtol=1e-4, atol=1e-4)
    for collective in (tp.all_reduce, tp.all_gather):  # those of plain layers
        torch.testing.assert_close(collective(y), y)
    keys = torch.randint(1 << 40, (rows,))
    assert torch.equal(tp.all_reduce_max(keys), keys) and peers._sum_buffers.buffer_index == 0


def test_next_backend_computes_what_one_cannot(caplog):
    """A backend that knows neither soft caps nor sinks gives way, and a line names the next."""

    class Plain(AttentionBackend):
        pass

    model, plain = nn.ModuleList([Attention(4, 32, 0.1, 2), Attention(4, 32, 0.1, 2, window=8)]), Plain()
    assert connect(model, plain, "cpu", torch.float32) is plain and not caplog.records
    model[1].sinks = nn.Parameter(torch.zeros(4))
    assert not FlashBackend.supports(model[1].cache_spec()) and FlashBackend.supports(model[0].cache_spec())
    taken = connect(model, plain, "cpu", torch.float32)
    assert taken is not plain
    assert f"Plain does not support this model's layers; {type(taken).__name__} takes its place" in caplog.text
