"""Kernels that are compiled before they run, for a GPU that is not there."""

import os
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
from programs import Program

triton = pytest.importorskip("triton")

PROGRAM = """
import sys

for name in [*sys.modules]:  # this is a fork, which may have imported Triton for its interpreter
    if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
        del sys.modules[name]

import gc
import threading
import time

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from nanovllm.kernels.launch import dependent_launch
from nanovllm.kernels.linear import gemv
from nanovllm.kernels.launch.dependent_launch import compile_only, launch_ordinary
from nanovllm.kernels.activations import SWIGLU


class Utils:
    get_device_properties = lambda self, device: {"max_shared_mem": 2**18}
    unload_module = lambda self, module: None

    def load_binary(self, *binary):
        loaders.append((threading.get_ident(), devices.current))
        return "module", "function", 32, 0, 1024


class Driver:
    utils = Utils()
    get_current_device = get_current_stream = lambda self, *device: getattr(devices, "current", 0)
    set_current_device = lambda self, device: setattr(devices, "current", device)
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source, metadata):
        assert loading.acquire(blocking=False), "one at a time"
        time.sleep(0.3)
        loading.release()
        return "launcher"

loaders, devices, loading = [], threading.local(), threading.Lock()
devices.current = 3
driver.set_active(Driver())
dependent_launch.has_tma = lambda device: True


@triton.jit
def invalid(x_ptr):
    tl.store(x_ptr, undefined)


num_threads = []


def kernels(jit):
    return [kernel for cache, *_ in jit.device_caches.values() for kernel in cache.values()]


def work():
    x, weight = torch.randn(1, 64, dtype=torch.bfloat16), torch.randn(32, 64, dtype=torch.bfloat16)
    for _ in range(2):
        gemv.gemv(x, weight)
    gemv.gemv(x, weight, act=SWIGLU)
    num_threads.append(threading.active_count())
    assert not gc.isenabled()

compile_only(work)
assert num_threads[0] > 1
assert gc.isenabled()
found = kernels(gemv._gemv_kernel.jit)
assert len(found) == 2 and all(kernel.asm["cubin"] and kernel.function for kernel in found), found
assert len(loaders) == 2 and all(at != threading.get_ident() and device == 3 for at, device in loaders), loaders

with_error = lambda: launch_ordinary(invalid, (1,))(torch.zeros(1))
for _ in range(2):
    try:
        compile_only(with_error)
    except triton.compiler.CompilationError as error:
        assert "undefined" in str(error)
    else:
        sys.exit("an error was lost")
    assert gc.isenabled() and not kernels(invalid)
compile_only(work)  # the error has left nothing behind
assert kernels(gemv._gemv_kernel.jit) == found
assert launch_ordinary(invalid, (1,)).keywords["warmup"] is False
gc.disable()
compile_only(work)
assert not gc.isenabled()
"""


ADAPTERS = """
from types import SimpleNamespace

from nanovllm.lora.kernels import lora_gemm
from nanovllm.lora.lora_linear import LoRAStack


def adapters(num_rows, dtype, sizes, max_rank, inputs=256, slots=3, experts=1):
    ints, rows = dict(dtype=torch.int32), slots * experts
    a = torch.randn(rows, len(sizes), max_rank, inputs, dtype=dtype)
    b = torch.randn(rows, sum(sizes), max_rank, dtype=dtype)
    ranks = torch.full((slots, 2 * len(sizes)), 3, **ints)[:, : len(sizes)]
    stack = LoRAStack(a, b, ranks, torch.tensor(sizes, **ints).cumsum(0).int(), max(sizes), experts)
    x, y = torch.randn(num_rows, inputs, dtype=dtype), torch.randn(num_rows, sum(sizes), dtype=dtype)
    slots_of_rows = torch.zeros(num_rows, **ints)
    rows = SimpleNamespace(slots=slots_of_rows, unready=None, groups=lora_gemm.group_rows(slots_of_rows, rows))
    lora_gemm.add_lora(y, x, stack, rows)
    if num_rows == 1:
        lora_gemm.add_lora(y, x, stack, rows, gated=True)
        weight = torch.randn(sum(sizes), inputs, dtype=dtype)
        assert lora_gemm.adapted_linear(x, weight, None, stack._replace(alignment=64), rows, True) is not NotImplemented


def work():
    # each dtype, all kinds of tiles, and experts; a compilation takes half a second, and more for large tiles
    adapters(1, torch.float32, [64, 64], 16, slots=1)
    adapters(300, torch.bfloat16, [64, 32, 32], 70)
    adapters(40, torch.float16, [64, 64], 8, slots=4, experts=256)


compile_only(work)
for kernel, number in (
    (lora_gemm._shrink_kernel, 3),
    (lora_gemm._expand_kernel, 3),
    (lora_gemm._expand_swiglu_kernel, 1),
    (gemv._gemv_kernel, 3),  # two of them from before
):
    found = kernels(kernel.jit)
    assert len(found) == number and all(kernel.asm["cubin"] for kernel in found), (kernel.jit, found)
"""


LARGE_HEADS = """
from nanovllm.cache.kv_cache import AttentionSpec, KVCache
from nanovllm.kernels.attention import decode_attention

decode_attention.has_tma, decode_attention.num_sms = lambda device: True, lambda device: 132


def work():
    ints, bf16 = dict(dtype=torch.int32), dict(dtype=torch.bfloat16)
    seqs = torch.full((3,), 99, **ints), torch.zeros(3, 8, **ints), 2000
    head_dim = 512  # this kernel needs the most memory
    cache = KVCache(torch.zeros(2, 8, 256, 2, head_dim, **bf16))
    cache.spec = AttentionSpec(2, head_dim, scale=1.0)
    weight, cos_sin = torch.ones(head_dim, **bf16), torch.zeros(3, 2, head_dim)
    qkv = torch.zeros(3, 20, head_dim, **bf16)
    more = weight, weight, 1e-6, cos_sin, torch.zeros(3, **ints)
    decode_attention.decode_attention(qkv, cache, *seqs, norm_rope_inputs=more)


compile_only(work)
(kernel,) = kernels(decode_attention._decode_kernel.jit)
assert kernel.metadata.shared <= 227 * 1024  # of a multiprocessor of an H100
print("done")
"""


@pytest.mark.skipif(not hasattr(triton, "AsyncCompileMode"), reason="needs Triton 3.5")
def test_kernels_are_compiled_side_by_side(tmp_path):
    """In one process, as a compiler takes half a second to start."""
    program = tmp_path / "program.py"  # Triton reads the source of kernels
    program.write_text(PROGRAM + ADAPTERS + LARGE_HEADS)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with Program([sys.executable, str(program)], env=environment, text=True, **streams) as run:
        output, errors = run.communicate(timeout=120)
    assert run.returncode == 0 and output.endswith("done\n"), output + errors


@pytest.mark.parametrize("is_triton_3_4", [False, True])
def test_triton_3_4_launches_no_dependent_kernels(monkeypatch, is_triton_3_4):
    import torch

    from nanovllm.kernels.launch import dependent_launch
    from nanovllm.kernels.linear.gemv import _gemv_kernel

    launched = []
    run = lambda *arguments, **constants: launched.append(constants["PDL"])
    monkeypatch.setattr(dependent_launch, "launch_ordinary", lambda jit, grid: run)
    monkeypatch.setattr(dependent_launch, "has_tma", lambda device: True)
    monkeypatch.setattr(dependent_launch, "IS_TRITON_3_4", is_triton_3_4)
    dependent_launch.launch(_gemv_kernel, (1,), torch.device("cpu"), shared=None)()
    assert launched == [not is_triton_3_4]


def test_threads_wait_less_for_the_lock_during_a_start():
    from nanovllm.cuda.start import threads_in_turn

    before = sys.getswitchinterval()
    with suppress(KeyError), threads_in_turn():
        assert sys.getswitchinterval() == pytest.approx(1e-4)
        raise KeyError
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("is_installed", [True, False])
def test_triton_is_hashed_if_it_is_there(monkeypatch, is_installed):
    from nanovllm.cuda.start import hash_compiler

    hashed = []
    module = SimpleNamespace(triton_key=lambda: hashed.append(True)) if is_installed else None
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", module)
    hash_compiler()
    assert bool(hashed) == is_installed


def test_time_of_a_token_is_the_shortest_that_was_measured(monkeypatch):
    from nanovllm.cuda import start as cuda

    config = SimpleNamespace(max_num_batched_tokens=20, max_model_len=99, num_kvcache_blocks=9, max_num_seqs=9)
    config.kvcache_block_size, config.tokens_per_row = 16, 1
    seconds = iter([0, 9, 10, 16, 20, 23, 30, 34])
    monkeypatch.setattr(cuda, "perf_counter", lambda: next(seconds))
    runner = SimpleNamespace(config=config, run=lambda step: SimpleNamespace(wait=lambda: None))
    assert cuda.milliseconds_per_token(runner) == 3000 / (2 * 10)


@pytest.mark.parametrize("kinds, count", [("aaaa", 2), ("a", 1), ("abab", 3), ("aabbb", 4), ("abbabb", 4), ("aaab", 4)])
def test_first_layers_of_each_kind(kinds, count):
    from torch import nn

    from nanovllm.cuda.start import first_layers_of_each_kind

    mlps = {"a": nn.Linear, "b": nn.Bilinear}
    layers = nn.ModuleList(nn.Module() for _ in kinds)
    for layer, kind in zip(layers, kinds):
        layer.mlp = mlps[kind](*[1] * (2 if kind == "a" else 3))
    found = first_layers_of_each_kind(layers)
    assert [*found] == [*layers][:count]
