"""Mixture of experts: the kernels and the layer against plain PyTorch in float64, and against transformers."""

import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import CUDA, DEVICE, DTYPES, NAN, Peers, assert_close, each_dtype, each_dtype_or_half, pairs, randn

triton = pytest.importorskip("triton")

from nanovllm import kernels
from nanovllm.fused import fuse
from nanovllm.fused.forms import Fused
from nanovllm.kernels.activations import GELU_AND_MUL, SWIGLU, Activation
from nanovllm.kernels.launch.gpu_features import has_hopper_kernels, has_tma
from nanovllm.layers.gated_activation import GatedActivation
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.models.shared.hybrid import SharedExpertMoE
from nanovllm.moe.experts import DOWN, GATE, UP, MoE, route
from nanovllm.moe.kernels import moe_gemm, moe_gemv, moe_routing
from nanovllm.moe.kernels.moe_routing import Routing, max_tiles, sort_by_expert
from nanovllm.moe.moe_config import MoEConfig
from nanovllm.quantization import find_quantization
from nanovllm.utils.construction import constructing
from nanovllm.utils.partial_sum import PartialSum
from nanovllm.utils.tensor_parallel import TensorParallel

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")
# both ways of reading tiles, which the interpreter can run as well
DTYPES_AND_TMA = [(dtype, tma) for dtype in DTYPES for tma in (False, True) if CUDA or tma == (dtype == torch.float16)]
each_dtype_and_tma = pytest.mark.parametrize(
    "dtype, tma", DTYPES_AND_TMA, ids=lambda value: str(value).removeprefix("torch.")
)


@pytest.fixture
def few_programs(monkeypatch):
    """The interpreter takes as long for a program with a large tile as for one with a small tile."""
    if not CUDA:
        monkeypatch.setattr(moe_gemv, "GATE_UP_TILE", (64, 128, 1))
        monkeypatch.setattr(moe_gemv, "DOWN_TILE", (64, 128, 1))


@pytest.fixture
def use_tma(monkeypatch):
    def patch(tma: bool) -> None:
        if tma and CUDA and not has_tma(torch.device(DEVICE)):
            pytest.skip("needs a Hopper GPU")
        monkeypatch.setattr(moe_gemm, "has_tma", lambda device: tma)

    return patch


@pytest.fixture
def in_a_step(monkeypatch):
    """Without padding."""
    monkeypatch.setattr("nanovllm.fused.fused_experts.get_context", lambda: SimpleNamespace(slot_mapping=None))


@pytest.fixture
def with_kernels(use_ops, in_a_step):
    """Layers use the kernels, also in the interpreter."""
    use_ops("mix_experts", "add_rms_norm")


def expert_weights(num_experts: int, hidden: int, size: int, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = randn(num_experts, 2 * size, hidden) / hidden**0.5
    return gate_up.to(dtype), (randn(num_experts, hidden, size) / size**0.5).to(dtype)


CLAMPED = Activation(1.5, shift=1.0, limit=0.75)  # as in gpt-oss


def reference(x, weights, expert_ids, gate_up, down, biases=(0, 0), act=None) -> torch.Tensor:
    """Every token through every expert, in float64."""
    y = torch.einsum("th,enh->ten", x.double(), gate_up.double()) + biases[0]
    y = torch.einsum("ten,ehn->teh", (act or GatedActivation(SWIGLU))(y), down.double()) + biases[1]
    dense = torch.zeros(len(x), len(down), dtype=torch.float64, device=x.device)
    dense.scatter_(1, expert_ids.long(), weights.double())
    return torch.einsum("te,teh->th", dense, y)


# --- routing


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    "num_experts, top_k, split_k, num_shared",
    [(1, 1, 1, 0), (2, 1, 3, 1), (5, 5, 1, 0), (60, 4, 2, 3), (128, 8, 8, 1)],
)
def test_route(num_experts, top_k, split_k, num_shared, renormalize):
    logits = randn(split_k, 7, num_experts + num_shared)
    logits[0, :, num_experts:] += 4  # no choice depends on shared experts
    total = logits[0].clone()
    for part in logits[1:]:
        total += part  # in the order of the kernel: rounding decides near ties
    weights, expert_ids = route(total, top_k, renormalize, num_shared)
    routing = moe_routing.route(logits, top_k, renormalize, None, num_shared)
    assert torch.equal(routing.expert_ids.long(), expert_ids) and routing.num_experts == num_experts
    assert routing.expert_ids.dtype == torch.int32 and routing.weights.dtype == torch.float32
    assert_close(routing.weights, weights)
    chosen_ids, shared_ids = expert_ids[:, :top_k], expert_ids[:, top_k:]
    chosen = total[:, :num_experts].double().softmax(-1).gather(-1, chosen_ids)
    assert_close(weights[:, :top_k], chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen)
    assert torch.equal(total[:, :num_experts].topk(top_k).indices, chosen_ids)
    assert_close(weights[:, top_k:], total[:, num_experts:].double().sigmoid())
    assert shared_ids.tolist() == 7 * [list(range(num_experts, num_experts + num_shared))]


@each_dtype
def test_equal_logits_prefer_the_lower_expert(dtype):
    logits = torch.zeros(3, 60).to(DEVICE, dtype)
    logits[1, [7, 33, 50]] = 2.0
    logits[2] = torch.arange(60).to(DEVICE, dtype).div(8, rounding_mode="floor")
    expected = [[0, 1, 2, 3], [7, 33, 50, 0], [56, 57, 58, 59]]
    assert route(logits, 4, True)[1].tolist() == expected
    assert moe_routing.route(logits[None], 4, True).expert_ids.tolist() == expected


def test_near_ties_are_decided_by_the_last_bit():
    """Where the softmax rounds two logits to the same probability, the larger logit still comes first."""
    base = torch.full((1, 33), 5.0)
    base[0, 20] = torch.nextafter(base[0, 20], torch.tensor(9.0))
    logits = base.to(DEVICE)
    assert (
        moe_routing.route(logits[None], 2, True).expert_ids.tolist() == route(logits, 2, True)[1].tolist() == [[20, 0]]
    )


@pytest.mark.filterwarnings("ignore:invalid value")
def test_any_logits_choose_valid_and_distinct_experts():
    """Rows that pad a batch may hold anything, and must not make a kernel read other memory than the experts'."""
    inf = float("inf")
    logits = torch.tensor([[NAN] * 40, [inf] * 40, [-inf] * 40, [NAN, inf, 1.0, -inf] * 10]).to(DEVICE)
    expert_ids = moe_routing.route(logits[None], 8, True).expert_ids
    assert ((expert_ids >= 0) & (expert_ids < 40)).all()
    assert all(len(set(row)) == 8 for row in expert_ids.tolist())


def test_padding_goes_where_the_first_token_goes():
    logits, slots = randn(2, 6, 20), torch.tensor([8, 9, -1, 3, -1, -1], dtype=torch.int32, device=DEVICE)
    weights, expert_ids, _ = moe_routing.route(logits, 3, True)
    rows = [0, 1, 0, 3, 0, 0]
    padded = moe_routing.route(logits, 3, True, slots)
    assert torch.equal(padded.expert_ids, expert_ids[rows]) and torch.equal(padded.weights, weights[rows])


def test_route_with_a_bias():
    logits, bias = randn(3, 7, 60), randn(60)
    weights, expert_ids = route(logits[0] + logits[1] + logits[2] + bias, 4, True)
    routing = moe_routing.route(logits, 4, True, bias=bias)
    assert torch.equal(routing.expert_ids.long(), expert_ids)
    assert_close(routing.weights, weights)


def test_route_with_factors():
    logits, factors = randn(1, 7, 60), randn(60)
    weights, expert_ids = route(logits[0], 4, True)
    routing = moe_routing.route(logits, 4, True, factors=factors)
    assert torch.equal(routing.expert_ids.long(), expert_ids)
    assert_close(routing.weights, weights * factors[expert_ids])


def test_router_logits():
    x, weight = randn(5, 72), randn(9, 72)
    logits = moe_routing.router_logits(x, weight)
    assert_close(logits.sum(0), x.double() @ weight.double().T)


@pytest.mark.skipif(CUDA and not has_tma(torch.device(DEVICE)), reason="needs a Hopper GPU")
@pytest.mark.parametrize("num_tokens, num_experts, hidden", [(1, 128, 2048), (7, 60, 384), (70, 5, 136)])
def test_router_logits_in_float32_from_half_precision(monkeypatch, num_tokens, num_experts, hidden):
    monkeypatch.setattr(moe_routing, "has_tma", lambda device: True)
    x, weight = randn(num_tokens, hidden, dtype=torch.float16), randn(num_experts, hidden, dtype=torch.float16)
    logits = moe_routing.router_logits(x, weight)
    assert logits.dtype == torch.float32 and logits.shape[1:] == (num_tokens, num_experts)
    assert 1 <= len(logits) <= max(1, hidden // 128)
    assert_close(logits.sum(0), x.double() @ weight.double().T, 30)  # numbers of about sqrt(hidden)


# --- rows sorted by expert


def all_to(expert: int, num_tokens: int) -> torch.Tensor:
    return torch.full((num_tokens, 1), expert, dtype=torch.int32)


def random_ids(num_tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    return torch.rand(num_tokens, num_experts).argsort(1)[:, :top_k].int()


@pytest.mark.parametrize(
    "expert_ids, first, num_experts, tile_m, share",
    [
        (random_ids(1, 7, 3), 0, 7, 16, 8192),
        (random_ids(70, 60, 8), 0, 60, 16, 8192),
        (random_ids(3, 60, 8), 0, 60, 16, 8192),  # few pairs, but tiles of several programs
        (random_ids(70, 9, 4), 0, 9, 16, 128),  # several shares
        (random_ids(70, 9, 4), 3, 3, 64, 128),  # this rank has the experts 3 to 5
        (random_ids(160, 128, 8), 0, 128, 16, 256),
        (random_ids(3, 128, 8), 120, 8, 16, 8192),
        (all_to(2, 65), 0, 3, 16, 8192),
        (all_to(2, 65), 0, 2, 16, 8192),  # nothing for this rank
    ],
    ids=["few", "many", "tiles", "shares", "rank", "more shares", "few of a rank", "all to one", "none"],
)
def test_sort_by_expert(monkeypatch, expert_ids, first, num_experts, tile_m, share):
    monkeypatch.setattr(moe_routing, "LONE_SHARE", share)
    monkeypatch.setattr(moe_routing, "SHARE", share)
    rows = sort_by_expert(expert_ids.to(DEVICE), first, num_experts, tile_m)
    pairs, table = rows.pairs.tolist(), rows.table.tolist()
    expected = [torch.nonzero(expert_ids.flatten() == first + e).flatten().tolist() for e in range(num_experts)]
    assert pairs[: sum(map(len, expected))] == [pair for of_expert in expected for pair in of_expert]
    used = [tile for tile in table if tile[0] >= 0]
    assert table[: len(used)] == used, "unused tiles come last"
    row = 0
    for expert, first_row, end_row in used:
        assert first_row == row and 0 < end_row - first_row <= tile_m
        assert set(pairs[first_row:end_row]) <= set(expected[expert])
        row = end_row
    assert row == sum(map(len, expected)) and len(used) == sum(-(-len(x) // tile_m) for x in expected)


def test_each_pair_is_in_a_share_and_a_block(monkeypatch):
    launched = {}
    launch = lambda kernel, grid, device: lambda *args, SIZES, **options: launched.update({kernel: (grid[0], SIZES)})
    monkeypatch.setattr(moe_routing, "launch", launch)
    for num_tokens in (1, 17, 256, 257, 5000, 16384, 100_000, 262_144):
        launched.clear()
        sort_by_expert(torch.empty(num_tokens, 8, dtype=torch.int32), 0, 128, 128)
        num_programs, sizes = launched[moe_routing._sort_kernel]
        assert 0 <= (num_programs - 1) * sizes.block - 8 * num_tokens < sizes.block and sizes.share % sizes.block == 0
        num_shares, _ = launched.get(moe_routing._count_kernel, (1, None))
        assert num_shares == -(-8 * num_tokens // sizes.share) <= moe_routing.MAX_SHARES.value


def test_number_of_tiles():
    assert max_tiles(1, 128, 16) == 1 and max_tiles(64, 128, 16) == 64
    assert max_tiles(256, 128, 16) == (256 + 128 * 15) // 16 == 136
    for num_experts, tile_m in ((3, 4), (5, 2)):
        for num_pairs in range(30):
            counts = [1] * min(num_pairs, num_experts)  # one row in each last tile, full tiles before
            left = num_pairs - len(counts)
            worst = len(counts) + left // tile_m
            assert worst <= max_tiles(num_pairs, num_experts, tile_m) <= num_pairs


def test_tiles_of_one_expert_rarely_exceed_one():
    sizes = {tokens: moe_gemm.choose_tile_m(8 * tokens, 128) for tokens in (5, 128, 256, 512, 1024, 16384)}
    assert sizes == {5: 16, 128: 16, 256: 32, 512: 64, 1024: 128, 16384: 128}


# --- products

GEMV_SHAPES = [  # tokens, experts, top_k, hidden, size
    (1, 2, 1, 64, 40),
    (2, 60, 8, 72, 24),
    (4, 5, 2, 136, 72),
]
GEMM_SHAPES = [  # tiles of 16 rows three times, of 32, 64 and 128
    (1, 2, 1, 64, 40),
    (3, 60, 8, 40, 24),
    (7, 3, 2, 72, 33),
    (33, 5, 3, 72, 136),
    (40, 4, 4, 104, 24),
    (70, 7, 7, 192, 16),
]


def inputs(num_tokens, num_experts, top_k, hidden, size, dtype):
    x, logits = randn(num_tokens, hidden, dtype=dtype), randn(2, num_tokens, num_experts)
    routing = moe_routing.route(logits, top_k, True)
    return x, logits, routing, *expert_weights(num_experts, hidden, size, dtype)


@each_dtype
@pytest.mark.parametrize("shape", GEMV_SHAPES, ids=str)
def test_moe_gemv(few_programs, shape, dtype):
    x, _, routing, gate_up, down = inputs(*shape, dtype)
    expected = reference(x, routing.weights, routing.expert_ids, gate_up, down)
    out = torch.full_like(x, NAN)
    assert moe_gemv.moe_gemv(x, routing, gate_up, down, out=out) is out
    assert_close(out, expected)


@each_dtype_or_half
def test_moe_gemv_of_the_norm(dtype):
    """With tiles of the sizes that a GPU has."""
    x, _, routing, gate_up, down = inputs(1, 5, 2, 24, 264, dtype)
    norm_weight, eps = randn(24, dtype=dtype), 0.5  # as large as to count
    normed = x.double() * (x.double().square().mean() + eps).rsqrt() * norm_weight.double()
    expected = reference(normed, routing.weights, routing.expert_ids, gate_up, down)
    assert_close(moe_gemv.moe_gemv(x, routing, gate_up, down, 0, (norm_weight, eps)), expected)


@pytest.mark.parametrize("shape, dtype_and_tma", pairs(GEMM_SHAPES, DTYPES_AND_TMA), ids=str)
def test_moe_gemm(use_tma, shape, dtype_and_tma):
    """All widths of tiles that the number of rows may have, the last ones not full, and sizes at odds with tiles."""
    dtype, tma = dtype_and_tma
    use_tma(tma)
    x, _, routing, gate_up, down = inputs(*shape, dtype)
    parts = moe_gemm.moe_gemm(x, routing, gate_up, down)
    assert parts.shape == (shape[2], *x.shape) and parts.dtype == dtype
    # each part is rounded on its own
    assert_close(parts.float().sum(0).to(dtype), reference(x, *routing[:2], gate_up, down), 2)


@pytest.mark.parametrize("shape, dtype_and_tma", pairs(GEMM_SHAPES, DTYPES_AND_TMA), ids=str)
def test_moe_gemm_with_biases(use_tma, shape, dtype_and_tma):
    """And with the activation of gpt-oss."""
    dtype, tma = dtype_and_tma
    use_tma(tma)
    x, _, routing, gate_up, down = inputs(*shape, dtype)
    biases, act = [randn(*weight.shape[:2], dtype=dtype) for weight in (gate_up, down)], GatedActivation(CLAMPED)
    parts = moe_gemm.moe_gemm(x, routing, gate_up, down, biases=tuple(biases), activation=CLAMPED)
    assert_close(parts.float().sum(0).to(dtype), reference(x, *routing[:2], gate_up, down, biases, act), 2)


@pytest.mark.parametrize("activation, dtype", pairs([CLAMPED, GELU_AND_MUL], DTYPES))
def test_activations(few_programs, activation, dtype):
    """Of grouped GEMMs and of matrix-vector products; `GatedActivation` is the reference."""
    x, _, routing, gate_up, down = inputs(3, 5, 2, 72, 40, dtype)
    expected = reference(x, *routing[:2], gate_up, down, act=GatedActivation(activation))
    parts = moe_gemm.moe_gemm(x, routing, gate_up, down, activation=activation)
    assert_close(parts.float().sum(0).to(dtype), expected, 2)
    assert_close(moe_gemv.moe_gemv(x, routing, gate_up, down, activation=activation), expected, 2)


def test_gelu():
    x = randn(7, 40)
    gate, up = x.chunk(2, -1)
    assert_close(GatedActivation(GELU_AND_MUL)(x), F.gelu(gate, approximate="tanh") * up)


@each_dtype_and_tma
@pytest.mark.parametrize("expert_ids", [all_to(1, 150), random_ids(150, 3, 2) + 1], ids=["one", "three of four"])
def test_experts_without_tokens(use_tma, expert_ids, tma, dtype):
    """And experts with more rows than a tile has."""
    use_tma(tma)
    expert_ids = expert_ids.to(DEVICE)
    x, (gate_up, down) = randn(150, 64, dtype=dtype), expert_weights(4, 64, 40, dtype)
    weights = torch.rand(expert_ids.shape).to(DEVICE)
    gate_up[0] = down[0] = NAN  # nothing of it may be read
    expected = reference(x, weights, expert_ids - 1, gate_up[1:], down[1:])
    parts = moe_gemm.moe_gemm(x, Routing(weights, expert_ids, 4), gate_up, down)
    assert_close(parts.float().sum(0).to(dtype), expected, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not has_hopper_kernels(), reason="needs a Hopper GPU, and Triton 3.6")
@pytest.mark.parametrize("shape", [(70, 7, 6, 256, 16), (300, 5, 3, 512, 136), (1100, 12, 8, 1024, 768)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_down_for_hopper(shape, dtype, monkeypatch):
    """Fewer tiles than programs and more, on one rank and on the second of two. The bits are those of the kernel for
    any GPU: `batch_invariant` has either, by the number of rows."""
    x, logits, _, gate_up, down = inputs(*shape, dtype)
    logits[..., 1] = -100  # an expert without tokens
    routing, first = moe_routing.route(logits, shape[2], True), shape[1] // 2
    is_local = (routing.expert_ids >= first).t()
    expected = reference(x, *routing[:2], gate_up, down)
    gate_up[1] = down[1] = NAN

    def parts():
        whole = moe_gemm.moe_gemm(x, routing, gate_up, down)
        return whole, moe_gemm.moe_gemm(x, routing, gate_up[first:], down[first:], first)[is_local]

    for_hopper = parts()
    assert_close(for_hopper[0].float().sum(0).to(dtype), expected, 2)
    monkeypatch.setattr(moe_gemm, "has_hopper_kernels", lambda: False)
    assert all(map(torch.equal, for_hopper, parts()))


def test_choose_experts_down(monkeypatch):
    """The kernel for Hopper computes what its tiles divide, of 16 bits, with 128 rows."""
    module, calls = "nanovllm.moe.kernels.hopper_experts", []
    hopper = SimpleNamespace(experts_down=lambda x, weight, rows, routing, out: calls.append(len(x)) or out)
    monkeypatch.setitem(sys.modules, module, hopper)
    monkeypatch.setattr(kernels, "hopper_experts", hopper, raising=False)
    monkeypatch.setattr(moe_gemm, "has_hopper_kernels", lambda: True)
    for num_tokens, hidden, dtype in ((43, 256, torch.float16), (42, 256, torch.float16), (43, 128, torch.float16)):
        x, _, routing, *weights = inputs(num_tokens, 1, 1, hidden, 16, dtype)
        moe_gemm.moe_gemm(x, routing, *weights)
    x, _, routing, *weights = inputs(43, 1, 1, 256, 16, torch.float32)
    moe_gemm.moe_gemm(x, routing, *weights)
    monkeypatch.setattr(moe_gemm, "has_hopper_kernels", lambda: False)
    moe_gemm.moe_gemm(x.half(), routing, *(weight.half() for weight in weights))
    assert calls == [43]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("num_tokens", [3, 20])
def test_a_row_does_not_depend_on_the_others(few_programs, num_tokens):
    """Not even on rows of NaN, as those that pad a batch may be."""
    x, logits, _, gate_up, down = inputs(num_tokens, 6, 2, 64, 40, torch.float16)
    other, other_logits = randn(num_tokens, 64, dtype=torch.float16), randn(2, num_tokens, 6)
    other[0], other_logits[:, 0] = NAN, NAN
    other[-1], other_logits[:, -1] = x[-1], logits[:, -1]
    rows = []
    for some_x, some_logits in ((x, logits), (other, other_logits)):
        routing = moe_routing.route(some_logits, 2, True)
        if num_tokens == 3:
            rows.append(moe_gemv.moe_gemv(some_x, routing, gate_up, down)[-1])
        else:
            rows.append(moe_gemm.moe_gemm(some_x, routing, gate_up, down)[:, -1])
    assert rows[0].isfinite().all() and torch.equal(*rows)


# --- the layer


class Shard(TensorParallel):
    """One of several ranks, whose sums stay its own part."""


def make_layer(num_experts, top_k, hidden, size, tp=TensorParallel(), expert_parallel=False, renormalize=True):
    with torch.device(DEVICE), constructing(tp):
        return MoE(hidden, MoEConfig(frozenset(), num_experts, top_k, size, renormalize, expert_parallel))


def load(parameter: torch.nn.Parameter, weight, *shard_id: int) -> torch.Tensor | None:
    return parameter.weight_loader(parameter, weight, *shard_id)


def load_stacked(layer: MoE, gate: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> None:
    load(layer.gate.weight, gate)
    load(layer.experts.gate_up_proj, gate_up)
    load(layer.experts.down_proj, down)


def checkpoint(num_experts, hidden, size):
    return randn(num_experts, hidden) / hidden**0.5 * 3, *expert_weights(num_experts, hidden, size)


def run(
    layer: MoE, x: torch.Tensor | PartialSum, residual: torch.Tensor, norm: RMSNorm
) -> tuple[PartialSum, torch.Tensor]:
    """What the layer, plain or fused, makes of the norm of x + residual, and this sum."""
    if isinstance(layer, Fused):
        normed = norm(x if isinstance(x, PartialSum) else PartialSum(x.clone()), residual.clone())
        return layer.fused(normed), normed.residual
    rows, total = norm(x, residual)
    return PartialSum(layer(rows)), total


def make_norm(hidden: int) -> RMSNorm:
    norm = RMSNorm(hidden, 1e-6).to(DEVICE)
    norm.weight.copy_(randn(hidden))
    return norm


@pytest.fixture(params=["plain", "fused", "kernels"])
def path(request, few_programs, use_ops, in_a_step):
    """Plain layers, and fused ones, whose operations are as they are defined, or kernels."""
    if request.param == "kernels":
        request.getfixturevalue("with_kernels")
    else:
        use_ops(table={})
    return request.param


def prepare(path: str, *modules: torch.nn.Module) -> None:
    """Fuse them, unless they are to be plain. A norm that is fused computes tensors as a plain one does."""
    if path != "plain":
        for module in modules:
            fuse(module)


@pytest.mark.parametrize(
    "num_tokens, num_experts, top_k, renormalize",
    [(1, 6, 2, False), (1, 30, 5, True), (3, 4, 1, True), (3, 6, 2, False), (9, 4, 1, False), (9, 17, 5, True)],
)
def test_layer_against_transformers(path, num_tokens, num_experts, top_k, renormalize):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    hidden, size = 32, 40
    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=size,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=renormalize,
    )
    theirs = Qwen3MoeSparseMoeBlock(config).to(DEVICE)
    layer = make_layer(num_experts, top_k, hidden, size, renormalize=renormalize)
    weights = checkpoint(num_experts, hidden, size)
    if isinstance(theirs.experts, torch.nn.ModuleList):  # before transformers 5, each expert has weights of its own
        theirs.gate.weight.copy_(weights[0])
        for expert, gate_up, down in zip(theirs.experts, *weights[1:], strict=True):
            for linear, weight in zip((expert.gate_proj, expert.up_proj, expert.down_proj), (*gate_up.chunk(2), down)):
                linear.weight.copy_(weight)
    else:
        for parameter, weight in zip((theirs.gate.weight, *theirs.experts.parameters()), weights, strict=True):
            parameter.copy_(weight)
    load_stacked(layer, *weights)
    x, residual, norm = randn(num_tokens, hidden), randn(num_tokens, hidden), make_norm(hidden)
    prepare(path, layer, norm)
    y, total = run(layer, x, residual, norm)
    assert torch.equal(total, x + residual)
    out = y.reduce()
    expected = theirs(norm(total)[None])[0].view_as(out)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["inner size", "experts"])
@pytest.mark.parametrize(
    "num_tokens, size, peers", [(1, 4, False), (1, 2, True), (2, 2, False), (7, 4 if CUDA else 2, True)]
)
def test_parts_of_ranks_add_up(path, num_tokens, size, peers, expert_parallel):
    peers = peers and path == "kernels"  # ranks that read each other's memory have kernels
    weights = checkpoint(8, 32, 48)
    x, residual, norm = randn(num_tokens, 32), randn(num_tokens, 32), make_norm(32)
    whole = make_layer(8, 3, 32, 48)
    load_stacked(whole, *weights)
    prepare(path, whole, norm)
    whole_sum, total = run(whole, x, residual, norm)
    expected = whole_sum.reduce()
    out = torch.zeros_like(expected)
    for rank in range(size):
        tp = (Peers if peers else Shard)(rank, size)
        layer = make_layer(8, 3, 32, 48, tp, expert_parallel)
        load_stacked(layer, *weights)
        prepare(path, layer)
        y, same = run(layer, x, residual, norm)
        assert torch.equal(same, total) and y.split_k == 1 and (not peers or y.parts is tp.parts)
        out += y.parts.reshape(out.shape)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_tokens, size, shared_size", [(1, 1, 48), (3, 2, 48), (9, 1, 48), (9, 2, 48), (3, 1, 24)])
def test_shared_expert(path, num_tokens, size, shared_size):
    """Every token has it, by the sigmoid of its gate; one of the others' size is stacked with them, also by ranks."""
    gate, gate_up, down = checkpoint(8, 32, 48)
    shared_gate, (shared_gate_up,), (shared_down,) = randn(1, 32), *expert_weights(1, 32, shared_size)
    x, norm = randn(num_tokens, 32), make_norm(32)
    out, is_stacked = torch.zeros(num_tokens, 32), shared_size == 48
    shape = dict(hidden_size=32, mlp_bias=False, quantization=None)
    shape |= dict(moe=MoEConfig(frozenset(), 8, 3, 48, True), hybrid=SimpleNamespace(shared_size=shared_size))
    config = make_dataclass("Config", [*shape, "intermediate_size"])(**shape, intermediate_size=0)
    for rank in range(size):
        with torch.device(DEVICE), constructing(Shard(rank, size)):
            layer = SharedExpertMoE(config, 0)
        load_stacked(layer, gate, gate_up, down)
        for i, part in enumerate(shared_gate_up.chunk(2)):
            load(layer.shared_expert.gate_up_proj.weight, part, i)
        load(layer.shared_expert.down_proj.weight, shared_down)
        load(layer.shared_expert_gate.weight, shared_gate)
        prepare(path, layer, norm)
        y, total = run(layer, x, torch.zeros_like(x), norm)
        assert len(layer.experts.down_proj) == 8 + is_stacked
        out += y.reduce().cpu()
    rows = norm(total)
    routing = route(F.linear(rows, gate), 3, True)
    expected = reference(rows, *routing, gate_up, down)
    weight = F.linear(rows.double(), shared_gate.double()).sigmoid()
    expected += reference(rows, weight, torch.zeros_like(weight), shared_gate_up[None], shared_down[None])
    torch.testing.assert_close(out, expected.float().cpu(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantized_shared_expert(fresh_memory_is_nan, path, name, num_tokens):
    """It is stacked with the other experts, if all of them have the same format."""
    formats = find_quantization(None, Path("config.json"), name)
    shape = dict(hidden_size=64, mlp_bias=False, quantization=formats, dtype=torch.float32)
    shape |= dict(moe=MoEConfig(frozenset(), 4, 2, 32, True), hybrid=SimpleNamespace(shared_size=32))
    config = make_dataclass("Config", [*shape, "intermediate_size"])(**shape, intermediate_size=0)
    model = torch.nn.Module()
    model.config, model.packed_modules_mapping = config, Qwen3ForCausalLM.packed_modules_mapping
    with torch.device(DEVICE), constructing(Shard(0, 1), torch.float32, is_quantized=True):
        model.mlp = layer = SharedExpertMoE(config, 0)
    formats.prepare(model, torch.device(DEVICE))
    gate, *stacks = checkpoint(4, 64, 32)
    load(layer.gate.weight, gate)
    for name, stack in zip(("gate_up_proj", "down_proj"), stacks):  # what is loaded does not include the shared expert
        assert load(layer.experts.get_parameter(name), stack).isfinite().all()
    shared = layer.shared_expert.gate_up_proj.weight, layer.shared_expert.down_proj.weight
    _, gate_up, down = checkpoint(1, 64, 32)
    for i, part in enumerate(gate_up[0].chunk(2)):
        load(shared[0], part, i)
    load(shared[1], down[0])
    load(layer.shared_expert_gate.weight, randn(1, 64))
    x, norm = randn(num_tokens, 64), make_norm(64)
    rows, experts, expected = norm(x), layer.experts, torch.zeros(num_tokens, 64, dtype=torch.float64)
    weights, expert_ids = route(F.linear(rows, layer.gate.weight[:4]), 2, True)
    gates = F.linear(rows.double(), layer.gate.weight[4:].double()).sigmoid()
    weights, expert_ids = torch.cat((weights, gates), 1), F.pad(expert_ids, (0, 1), value=4)
    stacks = [
        torch.stack([experts.format.weight(experts, name, i, torch.float64) for i in range(5)])
        for name in ("gate_up_proj", "down_proj")
    ]
    for stack, weight in zip(stacks, (gate_up[0], down[0])):
        assert (stack[4] - weight).norm() < 0.1 * weight.norm()
    expected = reference(rows, weights, expert_ids, *stacks)
    prepare(path, layer, norm)
    y, _ = run(layer, x, torch.zeros_like(x), norm)
    torch.testing.assert_close(y.reduce(), expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", ["fused", "kernels"], indirect=True)
def test_several_parts_before_the_layer(path):
    """A sum that is not added up yet, also of a single row."""
    layer, norm = make_layer(4, 2, 64, 40), make_norm(64)
    load_stacked(layer, *checkpoint(4, 64, 40))
    prepare(path, layer, norm)
    parts, residual = randn(3, 1, 64), randn(1, 64)
    y, total = run(layer, PartialSum(parts, 3), residual, norm)
    expected, _ = run(layer, parts.sum(0), residual, norm)
    torch.testing.assert_close(total, parts.sum(0) + residual)
    torch.testing.assert_close(y.reduce(), expected.reduce(), rtol=1e-5, atol=1e-5)


def test_the_next_norm_adds_up_the_parts(with_kernels):
    layer, norm = make_layer(6, 4, 64, 40), make_norm(64)
    load_stacked(layer, *checkpoint(6, 64, 40))
    prepare("kernels", layer, norm)
    y, residual = run(layer, randn(9, 64), randn(9, 64), norm)
    assert y.split_k == 4 and y.parts.shape == (4, 9, 64)
    expected = y.reduce() + residual
    normed = norm(y, residual)
    torch.testing.assert_close(normed.residual, expected)
    torch.testing.assert_close(normed.tensor(), norm(PartialSum(expected)).tensor())


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["inner size", "experts"])
def test_a_tensor_for_each_expert(expert_parallel, tmp_path):
    """As published checkpoints have them; both kinds are read through slices of a safetensors file."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    num_experts, hidden, size = 4, 8, 6
    _, gate_up, down = checkpoint(num_experts, hidden, size)
    tensors = {"gate_up_proj": gate_up, "down_proj": down}
    for i in range(num_experts):
        gate, up = gate_up[i].chunk(2)
        tensors |= {f"{i}.gate_proj.weight": gate, f"{i}.up_proj.weight": up, f"{i}.down_proj.weight": down[i]}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", "pt", device=DEVICE) as file:
        for rank in range(2):
            layers = [make_layer(num_experts, 2, hidden, size, Shard(rank, 2), expert_parallel) for _ in range(2)]
            stacked, single = (layer.experts for layer in layers)
            for name in ("gate_up_proj", "down_proj"):
                parameter = getattr(stacked, name)
                assert torch.equal(load(parameter, file.get_slice(name)), parameter)
            names = single.tensors_of_experts()
            assert names.keys() == tensors.keys() - {"gate_up_proj", "down_proj"}
            num_filled = 0
            for name, (parameter, expert_and_shard_id) in names.items():
                filled = load(parameter, file.get_slice(name), *expert_and_shard_id)
                num_filled += 0 if filled is None else filled.numel()
            assert num_filled == single.gate_up_proj.numel() + single.down_proj.numel()
            for ours, theirs in zip(single.parameters(), stacked.parameters(), strict=True):
                assert torch.equal(ours, theirs)
            half = slice(2 * rank, 2 * rank + 2) if expert_parallel else slice(None)
            columns = slice(None) if expert_parallel else slice(3 * rank, 3 * rank + 3)
            gate, up = gate_up[half].chunk(2, 1)
            assert torch.equal(single.gate_up_proj, torch.cat((gate[:, columns], up[:, columns]), 1))
            assert torch.equal(single.down_proj, down[half][:, :, columns])


def test_wrong_shapes_are_refused():
    experts = make_layer(4, 2, 8, 6).experts
    for wrong in (torch.zeros(4, 6, 8), torch.zeros(4, 8, 12)):
        with pytest.raises(ValueError, match=r"the model needs \[4, 12, 8\]"):
            load(experts.gate_up_proj, wrong)
    with pytest.raises(ValueError, match=r"the model needs \[4, 8, 6\]"):
        load(experts.down_proj, torch.zeros(4, 6, 8))
    for shard_id, parameter in ((GATE, experts.gate_up_proj), (UP, experts.gate_up_proj), (DOWN, experts.down_proj)):
        with pytest.raises(ValueError, match="the model needs"):
            load(parameter, torch.zeros(7, 7), 0, shard_id)
    drawn = load(experts.down_proj, lambda shape: torch.ones(shape))  # as random weights are made
    assert torch.equal(drawn, experts.down_proj) and (drawn == 1).all()


def test_ranks_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="inner size of the experts"):
        make_layer(6, 2, 8, 6, TensorParallel(0, 4))
    with pytest.raises(ValueError, match=r"experts \(6\)"):
        make_layer(6, 2, 8, 8, TensorParallel(0, 4), expert_parallel=True)
