"""Operations: who computes them, what a port to another device takes, and what kernels take."""

import importlib
import inspect
import pkgutil

import pytest
import torch
from common import DEVICE, TINY

import nanovllm
from nanovllm import SamplingParams
from nanovllm.attention import BACKENDS, check_head_dim
from nanovllm.config import Config
from nanovllm.engine.runners import RUNNERS
from nanovllm.kernels import operation, ops_for, register_ops
from nanovllm.layers import cpu_ops
from nanovllm.layers.activation import silu_and_mul
from nanovllm.utils.device_checks import DEVICES

TOY = """
import torch
import torch.nn.functional as F

from nanovllm.attention.sdpa import SDPABackend

calls = []


def silu_and_mul(x):
    calls.append("silu_and_mul")
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def linear(x, weight, bias=None, split_k=1, out=None):
    if len(x) > 1 or bias is not None:
        return NotImplemented
    calls.append("linear")
    return (weight @ x[0])[None]


def rms_norm(x, weight, eps):
    calls.append("rms_norm")
    return F.rms_norm(x, weight.shape, weight, eps)


class ToyBackend(SDPABackend):
    @staticmethod
    def devices():
        return "cpu", "xpu"

    def attend(self, q, cache, context):
        calls.append("attend")
        return super().attend(q, cache, context)
"""


@pytest.fixture
def registered():
    """A function that registers operations until the end of the test."""
    before = {}

    def register(device_type: str, table: dict) -> None:
        before.setdefault(device_type, ops_for(torch.device(device_type)))
        register_ops(device_type, table)

    yield register
    for device_type, table in before.items():
        register_ops(device_type, table)


def test_a_port(make_llm, registered, monkeypatch, tmp_path):
    """A file of operations and an attention backend: both are used, and the text is the same."""
    prompts, params = ["HAMLET.\n", "My lord"], SamplingParams(temperature=0.0, max_tokens=12)
    expected = make_llm().generate(prompts, params, use_tqdm=False)
    (tmp_path / "toy_device.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    toy = importlib.import_module("toy_device")
    registered("cpu", vars(toy))
    monkeypatch.setitem(BACKENDS, "toy", "toy_device:ToyBackend")
    for prompt, output in zip(prompts, expected):  # one at a time: only `linear` of a single row is the toy's
        (actual,) = make_llm(attention_backend="toy").generate([prompt], params, use_tqdm=False)
        assert actual.outputs[0].token_ids == output.outputs[0].token_ids
    assert {*toy.calls} == {"silu_and_mul", "linear", "rms_norm", "attend"}


def test_settings_on_another_accelerator(registered, monkeypatch):
    """It computes as a CPU does, whatever is installed for CUDA, if it does not bring something of its own."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)  # Triton, for example
    with pytest.raises(ValueError, match="device='xpu': must be one of 'auto', 'cpu', 'cuda'"):
        Config(TINY, device="xpu")
    monkeypatch.setitem(DEVICES, "xpu", lambda: 2)
    registered("xpu", {"silu_and_mul": lambda x: "xpu"})
    for name in ("xpu", "xpu:1"):
        resolved = Config(TINY, device=name)
        assert (resolved.device, resolved.attention_backend, resolved.async_scheduling) == (name, "sdpa", False)
        assert resolved.device_of(0) == torch.device(name)
        assert resolved.device_of(0).type not in RUNNERS
        assert ops_for(resolved.device_of(0)).keys() == {"silu_and_mul"}
        check_head_dim(24, name, "sdpa")
    with pytest.raises(ValueError, match="device='xpu:2': there are 2 XPU devices here"):
        Config(TINY, device="xpu:2")
    with pytest.raises(ValueError, match="attention_backend='flash': needs device='cuda'"):
        Config(TINY, device="xpu", attention_backend="flash")
    namespace = {}
    exec(TOY, namespace)
    monkeypatch.setitem(BACKENDS, "toy", namespace["ToyBackend"])
    assert Config(TINY, device="xpu", attention_backend="toy").attention_backend == "toy"
    with pytest.raises(ValueError, match="attention_backend='toy': needs device='cpu' or 'xpu'"):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        Config(TINY, device="cuda", attention_backend="toy")


def test_the_device_of_the_first_argument_decides(registered):
    registered("meta", {"silu_and_mul": lambda x: "meta"})
    assert silu_and_mul(torch.empty(2, 4, device="meta")) == "meta"
    assert torch.equal(silu_and_mul(torch.zeros(2, 4)), torch.zeros(2, 2))


def test_not_implemented_means_the_definition(use_ops):
    @operation
    def twice(x):
        return 2 * x

    use_ops(table={"twice": lambda x: None if len(x) == 2 else NotImplemented})
    assert twice(torch.ones(3, device=DEVICE)).tolist() == [2, 2, 2]
    assert twice(torch.ones(2, device=DEVICE)) is None


ROOMS_OF_OPERATIONS = "attention", "engine", "layers", "delta_net", "moe", "quantization", "features", "fused"


def operations() -> dict:
    found = {}
    for info in pkgutil.walk_packages(nanovllm.__path__, "nanovllm."):
        _, room, *rest = info.name.split(".")
        if room in ROOMS_OF_OPERATIONS and "kernels" not in rest:
            module = importlib.import_module(info.name)
            found |= {
                name: value
                for name, value in vars(module).items()
                if getattr(value, "__module__", "") == info.name and getattr(value, "__qualname__", "") == name
                if getattr(value, "__code__", None) is operation(lambda x: x).__code__
            }
    return found


def test_a_cpu_takes_what_definitions_take():
    table, found = ops_for(torch.device("cpu")), operations()
    own = {name for name, value in vars(cpu_ops).items() if getattr(value, "__module__", "") == cpu_ops.__name__}
    assert own - {"padded_rows"} == table.keys() & found.keys() == {"linear", "attend_one_token", "philox"}
    for name in own - {"padded_rows"}:
        theirs, ours = (inspect.signature(x[name]).parameters for x in (table, found))
        assert [(p.name, p.default) for p in theirs.values()] == [(p.name, p.default) for p in ours.values()]


def test_rows_that_a_cpu_pads():
    """Of tensors with any number of dimensions."""
    x, weight, bias = torch.randn(3, 47, 8).bfloat16(), torch.randn(5, 8).bfloat16(), torch.randn(5).bfloat16()
    found = cpu_ops.linear(x, weight, bias)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, bias))
    assert cpu_ops.linear(x[0], weight, bias) is cpu_ops.linear(x.float(), weight, bias) is NotImplemented


@pytest.mark.parametrize("variant", ["", "-invariant"])
def test_kernels_take_what_definitions_take(variant):
    """By the same names, those without a default in the same places. A kernel may have more options."""
    ops = pytest.importorskip("nanovllm.kernels.ops")
    table, found = vars(ops), operations()
    assert len(found) >= 24
    for name in ("gate_scores", "philox", "attend_one_token"):  # the library is as fast, or a kernel does more
        del found[name]
    if variant:
        table = table | vars(importlib.import_module("nanovllm.invariant.cuda_ops"))
    else:
        del found["gather_logprobs"]  # here too
    for name, definition in found.items():
        theirs = inspect.signature(table[name]).parameters
        ours = inspect.signature(definition).parameters
        assert ours.keys() <= theirs.keys(), name
        required = [p.name for p in ours.values() if p.default is p.empty]
        assert [*theirs][: len(required)] == required, name
        more = [p for p in theirs.values() if p.name not in ours]
        assert all(p.default is not p.empty for p in more), name
