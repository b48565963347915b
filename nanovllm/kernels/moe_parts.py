"""Mixture of experts on several ranks: each token's `top_k` parts of the output are added up before the ranks' sum."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.moe_routing import Routing


@dependent_kernel()
@triton.jit(do_not_specialize=["num_tokens", "first_expert"])
def _sum_parts_kernel(
    parts_ptr,
    ids_ptr,
    out_ptr,
    num_tokens,
    first_expert,
    N: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + slot) - first_expert
        limit = tl.where((expert >= 0) & (expert < E), N, 0)
        total += tl.load(parts_ptr + (slot * num_tokens + token) * N + col, col < limit, 0.0).to(tl.float32)
    tl.store(out_ptr + token * N + col, total.to(out_ptr.dtype.element_ty), col < N)


def sum_local_parts(
    parts: torch.Tensor, routing: Routing, first_expert: int, num_experts: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of the parts [top_k, T, hidden] of this rank's experts: [T, hidden]; `out` takes it.

    A single rank leaves this to the next norm. Several would read the parts of all other ranks there.
    """
    top_k, num_tokens, n = parts.shape
    out = torch.empty_like(parts[0]) if out is None else out
    block = min(2048, triton.next_power_of_2(n))
    launch(_sum_parts_kernel, (num_tokens, triton.cdiv(n, block)), parts.device)(
        parts,
        routing.expert_ids,
        out,
        num_tokens,
        first_expert,
        N=n,
        E=num_experts,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=4,
    )
    return out
