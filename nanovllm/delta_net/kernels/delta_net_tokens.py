"""The gated delta rule, computed token by token: for decode steps, for drafts, and for batch-invariant chunks.

The first kernel computes the convolution and the gates of all tokens. The second kernel updates each state in
registers. A decode step reads and writes each state once, so memory bandwidth limits the speed. In the published
models, a state has 64 KiB per head.

The same instructions compute a token in a chunk, in a decode step and as a draft. The bits of a result can depend on
the number of warps.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.delta_net.kernels.delta_net_inputs import keep_inputs, rule_inputs, silu
from nanovllm.delta_net.kernels.delta_net_operands import Plan, Sequences, operands_of, sequence_of
from nanovllm.invariant.kernels.invariant_attention import fma
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_dependents, gdc_wait, launch
from nanovllm.kernels.launch.gpu_features import num_sms

NUM_WARPS = 8
TILE = 8  # tokens whose inputs or norms are computed together


@triton.jit
def _through_tokens(state, rule_ptrs, head, key_at, begin, end, shift, DTYPE: tl.constexpr, HEADS: tl.constexpr):
    """Process the tokens from `begin` to `end`, and return the final state. Each token's output replaces its value v.

    The state is rounded to DTYPE after each token, so the result does not depend on when the state is stored.
    """
    e, in_key = tl.arange(0, state.shape[0]), key_at < HEADS.key_dim
    key_at += head // HEADS.group * HEADS.key_dim
    value_at = head * HEADS.value_dim + e
    for t in tl.range(begin, end, num_stages=3):
        token = tl.cast(shift + t, tl.int64)
        v_ptr, gate_at = rule_ptrs.v + token * HEADS.values, token * HEADS.num_values + head
        q = tl.load(rule_ptrs.q + token * HEADS.keys + key_at, in_key, 0.0)
        k = tl.load(rule_ptrs.k + token * HEADS.keys + key_at, in_key, 0.0)
        v = tl.load(v_ptr + value_at, e < HEADS.value_dim, 0.0)
        decay, beta = tl.load(rule_ptrs.decay + gate_at), tl.load(rule_ptrs.beta + gate_at)
        # both sums use the old state, so that neither waits for the other
        error = fma(tl.sum(tl.sum(state * k, 1), 1), -decay, v) * beta
        read = fma(error, tl.sum(tl.sum(q * k, 1), 1), decay * tl.sum(tl.sum(state * q, 1), 1))
        state = fma(tl.broadcast_to(k, state.shape), error[:, None, None], state * decay)
        if tl.float32 != DTYPE:
            state = state.to(DTYPE).to(tl.float32)
        tl.store(v_ptr + value_at, read, e < HEADS.value_dim)
    return state


# states can be read early, because the embedding, an ordinary launch, came after the step that wrote the states
@dependent_kernel(early=("seq_ptrs", "state_ptrs"))
@triton.jit(do_not_specialize=["num_rows", "stride"])
def _tokens_kernel(
    x_rows, rule_ptrs, seq_ptrs, state_ptrs, norm_ptrs, out_ptr, num_rows, stride, PLAN: tl.constexpr, PDL: tl.constexpr
):
    """Each program computes one value head of a sequence: all tokens in order, then their gated norms.

    For a decoding sequence, the accepted drafts of the previous step come first, followed by one token, after which the
    state is stored. The drafts of this step come last, and do not change the stored state. The last tokens of a
    sequence may be copies of the token before them.
    """
    gdc_launch_dependents(PDL)
    HEADS: tl.constexpr = PLAN.heads
    head, seq = tl.program_id(0), tl.program_id(1)
    own, end, read, written = sequence_of(seq_ptrs, seq, stride, PLAN)
    stop, has_work = end, True
    if PLAN.rows == 0:
        is_last = seq == tl.num_programs(1) - 1  # the last sequence's program also fills the rows of padding
        stop, has_work = tl.where(is_last, num_rows, end), (own < end) | is_last
    elif seq_ptrs.count is not None:
        has_work = own < tl.load(seq_ptrs.count)
    if not has_work:
        return
    # [value_dim, key_dim / P, P]: a thread has many columns of a few rows, so that it computes most of a row's sum
    # itself
    PART: tl.constexpr = HEADS.key_pad if HEADS.key_pad < 32 else 32
    d = (tl.arange(0, HEADS.key_pad // PART)[:, None] * PART + tl.arange(0, PART)[None, :])[None, :, :]
    e = tl.arange(0, HEADS.value_pad)[:, None, None]
    of_state = (e < HEADS.value_dim) & (d < HEADS.key_dim)
    state_at = (head * HEADS.value_dim + e) * HEADS.key_dim + d
    DTYPE: tl.constexpr = state_ptrs.matrices.dtype.element_ty
    own_state = state_ptrs.matrices + read * (HEADS.values * HEADS.key_dim) + state_at
    state = tl.load(own_state, of_state, 0.0).to(tl.float32)
    gdc_wait(PDL)
    begin, certain, end_own, shift = own, end, end, 0
    if PLAN.kept:
        begin -= tl.load(rule_ptrs.num_right + seq)
        end_own = own + 1 + tl.load(seq_ptrs.context_lens + end - 1) - tl.load(seq_ptrs.context_lens + own)
    if PLAN.rows:
        certain, shift = own + 1, seq * (PLAN.kept + PLAN.rows) - begin
    # 1. inputs that the next step reads
    source = x_rows, state_ptrs, read, begin, own
    keep_inputs(source, written, head, certain, end, PLAN)
    # 2. tokens up to the last certain token
    state = _through_tokens(state, rule_ptrs, head, d, begin, certain, shift, DTYPE, HEADS)
    tl.store(state_ptrs.matrices + written * (HEADS.values * HEADS.key_dim) + state_at, state, of_state)
    # 3. drafts after that token
    if PLAN.rows > 1:
        _through_tokens(state, rule_ptrs, head, d, certain, end_own, shift, DTYPE, HEADS)
    # 4. gated norms; a copy gets the norm of its original, and padding gets zeros
    tl.debug_barrier()  # until all threads have written the outputs
    norm_ptr, eps = norm_ptrs
    e = tl.arange(0, HEADS.value_pad)[None, :]
    in_value, own_value = e < HEADS.value_dim, head * HEADS.value_dim + e
    weight = tl.load(norm_ptr + e, in_value, 0.0)
    for first in range(own, stop, PLAN.tile):
        t = (first + tl.arange(0, PLAN.tile))[:, None]
        is_there, row = (t < end) & in_value, t.to(tl.int64)
        token = (shift + tl.minimum(t, end_own - 1)).to(tl.int64)
        y = tl.load(rule_ptrs.v + token * HEADS.values + own_value, is_there, 0.0)
        y *= tl.rsqrt(tl.sum(y * y, 1) / HEADS.value_dim + eps)[:, None] * weight
        z = tl.load(x_rows.qkvz + row * x_rows.stride + HEADS.channels + own_value, is_there, 0.0).to(tl.float32)
        tl.store(out_ptr + row * HEADS.values + own_value, y * silu(z), (t < stop) & in_value)


def _launch_tokens(
    qkvz, ba, layer: Any, states: Any, seqs: Sequences, sizes: tuple, out, num_warps: int | None
) -> None:
    """Launch `_inputs_kernel` and `_tokens_kernel`.

    `sizes` is (sequences, rows per sequence, maximum drafts of the previous step). If `num_warps` is None, choose the
    fastest number of warps. If there are many programs, each program gets fewer warps, because the warps of a program
    repeat some work.
    """
    heads, x, state_tensors = operands = operands_of(qkvz, ba, layer, states)
    num_seqs, rows, kept = sizes
    tile, input_warps = TILE, 4
    if num_warps is None:
        is_few = heads.num_values * num_seqs <= num_sms(qkvz.device)
        num_warps = NUM_WARPS if is_few else NUM_WARPS // 2
        input_warps = 4 if is_few or rows > 1 else 1
        tile = 1 if rows + kept == 1 else tile
    plan = Plan(heads, tile, rows, kept)
    inputs = rule_inputs(operands, layer, seqs, num_seqs, plan, torch.float32, input_warps)
    norm, constants = (layer.norm.weight, layer.eps), dict(PLAN=plan, num_warps=num_warps)
    launch(_tokens_kernel, (heads.num_values, num_seqs), qkvz.device, shared=50)(
        x, inputs, seqs, state_tensors, norm, out, len(qkvz), seqs.rows.stride(0), **constants
    )


def delta_net_step(qkvz, ba, layer: Any, states: Any, rows, out, count=None, num_warps: int | None = None) -> None:
    """Implement the operation `delta_net_step` of delta_net/gated_delta_net.py."""
    _launch_tokens(qkvz, ba, layer, states, Sequences(rows, count), (len(rows), 1, 0), out, num_warps)


def delta_net_drafts(
    qkvz, ba, layer: Any, states: Any, rows, context_lens, out, count=None, num_warps: int | None = None
) -> None:
    """Implement the operation `delta_net_drafts` of delta_net/delta_net_drafts.py."""
    seqs = Sequences(rows, count, context_lens=context_lens)
    sizes = len(rows), len(qkvz) // len(rows), states.kept_drafts.inputs.shape[1]
    _launch_tokens(qkvz, ba, layer, states, seqs, sizes, out, num_warps)


def delta_net_chunks(qkvz, ba, layer: Any, states: Any, state_rows, starts, num_seqs: int, out, count=None) -> None:
    """Compute `delta_net_chunks` token by token, as in decode steps, with NUM_WARPS warps per program."""
    seqs = Sequences(state_rows, count, starts)
    _launch_tokens(qkvz, ba, layer, states, seqs, (num_seqs, 0, 0), out, NUM_WARPS)
