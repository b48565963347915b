"""What a dependent kernel does before it waits is checked in its source: these kernels are never launched."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl

from nanovllm.kernels.attention.paged_cache import prefetch_rows
from nanovllm.kernels.launch.dependent_launch import (
    dependent_kernel,
    gdc_launch_and_wait,
    gdc_launch_dependents,
    gdc_wait,
    launch,
)

gl = tma = tl  # kernels in Gluon are checked in the same way


@triton.jit
def load_at(first_ptr, at):
    return tl.load(first_ptr + at)


@triton.jit
def store_at(first_ptr, at):
    tl.store(first_ptr + at, 1.0)


@triton.jit
def keeps_the_contract(x_ptr, w_ptr, scale_ptr, cache_ptr, out_ptr, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    gdc_launch_dependents(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = x_ptr + at  # an address is no read
    if tl.program_id(0) > n:
        return
    w = tl.load(tl.multiple_of(w_ptr + at, 16))
    scale = load_at(scale_ptr, 0).to(tl.float32)
    if not PDL:
        scale += tl.load(x_ptr)  # no dependent launch comes here
    if PDL:
        prefetch_rows(cache_ptr + at, BLOCK)
    gdc_wait(PDL)
    tl.store(out_ptr + at, (tl.load(row) * w * scale).to(dtype))


@triton.jit
def never_waits(x_ptr, PDL: tl.constexpr):
    gdc_launch_dependents(PDL)
    tl.program_id(0)


@triton.jit
def waits_in_other_launches(x_ptr, PDL: tl.constexpr):
    if not PDL:
        gdc_wait(PDL)


@triton.jit
def waits_under_a_condition(x_ptr, n, PDL: tl.constexpr):
    if n > 1:
        gdc_wait(PDL)
    gdc_wait(PDL)


@triton.jit
def reads(x_ptr, PDL: tl.constexpr):
    x = tl.load(x_ptr)
    gdc_wait(PDL)
    tl.store(x_ptr, x)


@triton.jit
def reads_by_another_name(x_ptr, w_ptr, n, PDL: tl.constexpr):
    at = w_ptr
    for _ in range(n):
        tl.load(at)
        at = x_ptr + n
    gdc_wait(PDL)


@triton.jit
def reads_in_a_function(x_ptr, PDL: tl.constexpr):
    load_at(x_ptr, 3)
    gdc_wait(PDL)


@triton.jit
def reads_one_of_several(x_ptrs, PDL: tl.constexpr):
    _, second_ptr = x_ptrs
    load_at(second_ptr, 3)
    gdc_wait(PDL)


@triton.jit
def reads_a_named_one(x_ptrs, PDL: tl.constexpr):
    tl.load(x_ptrs.scale + 3)
    gdc_wait(PDL)


@triton.jit
def reads_and_then_begins(x_ptr, PDL: tl.constexpr):
    tl.load(x_ptr)
    gdc_launch_and_wait(PDL)


@triton.jit
def begins_for_another_reason(x_ptr, IS_LARGE: tl.constexpr, PDL: tl.constexpr):
    gdc_launch_and_wait(IS_LARGE)


@triton.jit
def reads_a_tile(x_tiles, PDL: tl.constexpr):
    x_tiles.load([0, 0])
    gdc_wait(PDL)


@triton.jit
def reads_in_gluon(x_ptr, PDL: tl.constexpr):
    gl.load(x_ptr)
    gdc_wait(PDL)


@triton.jit
def copies_a_tile(x_tiles, barrier, buffer, PDL: tl.constexpr):
    tma.async_copy_global_to_shared(x_tiles, [0, 0], barrier, buffer)
    gdc_wait(PDL)


@triton.jit
def copies_back(x_tiles, buffer, PDL: tl.constexpr):
    tma.async_copy_shared_to_global(x_tiles, [0, 0], buffer)
    gdc_wait(PDL)


@triton.jit
def reads_a_pointer(w_ptr, PDL: tl.constexpr):
    tl.load(tl.load(w_ptr).to(tl.pointer_type(tl.int32)))
    gdc_wait(PDL)


@triton.jit
def writes(w_ptr, PDL: tl.constexpr):
    tl.store(w_ptr, 1.0)
    gdc_wait(PDL)


@triton.jit
def writes_in_a_function(w_ptr, PDL: tl.constexpr):
    store_at(w_ptr, 0)
    gdc_wait(PDL)


@triton.jit
def writes_a_tile(w_tiles, PDL: tl.constexpr):
    w_tiles.store([0, 0], 1.0)
    gdc_wait(PDL)


@triton.jit
def counts(w_ptr, PDL: tl.constexpr):
    tl.atomic_add(w_ptr, 1)
    gdc_wait(PDL)


@triton.jit
def runs_assembly(w_ptr, PDL: tl.constexpr):
    tl.inline_asm_elementwise("st", "=r,l", [w_ptr], dtype=tl.int32, is_pure=False, pack=1)
    gdc_wait(PDL)


def test_a_kernel_that_keeps_the_contract():
    dependent_kernel(early=("w_ptr", "scale_ptr"))(keeps_the_contract)
    for early in [(), ("w_ptr", "scale_ptr", "x_ptr")]:
        with pytest.raises(AssertionError, match=r"reads \['scale_ptr', 'w_ptr'\] before it waits, and declares"):
            dependent_kernel(early)(keeps_the_contract)


@pytest.mark.parametrize(
    "kernel, message",
    [
        (never_waits, "never waits"),
        (waits_in_other_launches, "never waits"),
        (waits_under_a_condition, "waits only under a condition"),
        (reads, "reads .*'x_ptr'"),
        (reads_by_another_name, "reads .*'x_ptr'"),
        (reads_in_a_function, "reads .*'x_ptr'"),
        (reads_one_of_several, "reads .*'x_ptrs'"),
        (reads_a_named_one, "reads .*'x_ptrs'"),
        (reads_and_then_begins, "reads .*'x_ptr'"),
        (begins_for_another_reason, "never waits"),
        (reads_a_tile, "reads .*'x_tiles'"),
        (reads_in_gluon, "reads .*'x_ptr'"),
        (copies_a_tile, "reads .*'x_tiles'"),
        (copies_back, "writes memory"),
        (reads_a_pointer, "not derived from a parameter"),
        (writes, "writes memory"),
        (writes_in_a_function, "writes memory"),
        (writes_a_tile, "writes memory"),
        (counts, "writes memory"),
        (runs_assembly, "can't be checked"),
    ],
)
def test_kernels_that_break_the_contract_are_refused(kernel, message):
    with pytest.raises(AssertionError, match=message):
        dependent_kernel(early=("w_ptr",))(kernel)


def test_a_kernel_without_a_declaration_is_not_launched():
    with pytest.raises(AttributeError):
        launch(keeps_the_contract, (1,), torch.device("cpu"))
