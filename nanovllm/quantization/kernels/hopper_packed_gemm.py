"""Computes y = x W^T with 4-bit W and up to 512 rows of x. The kernel is written in Gluon for Hopper.

packed.py defines the layout of W. A block contains 128 inputs of W. One warp loads blocks, and each of two warpgroups
multiplies 64 rows of W by all tokens of a tile. The two warpgroups either multiply different rows of W, or share the
same rows and process alternate blocks. If warpgroups share rows, more programs run, which keeps all multiprocessors
busy even if there are few tokens.

Weights are converted in registers, because the first operand of matmuls is in registers. Each thread converts the codes
that it has loaded. `wgmma` multiplies many tokens, and a warpgroup converts the second half of a block while the tensor
cores multiply the first half. For up to 8 tokens, `mma.sync` is faster, because `wgmma` takes as long for 8 tokens as
for more. With few tokens, a program may also compute a gated activation: 32 rows of W are gates, and 32 rows are the
factors of these gates. A thread then has the sums of a gate and of its factor.
"""

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from nanovllm.kernels.activations import Activation
from nanovllm.kernels.hopper.hopper_ring import (
    barriers,
    buffers,
    gdc_launch_dependents,
    gdc_wait,
    store_transposed,
    sums_of,
    tiles_of,
)
from nanovllm.kernels.hopper.hopper_tiles import SMALL_TILE_M, HopperTile
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, launch
from nanovllm.kernels.linear.activate import activate
from nanovllm.quantization.kernels.packed_gemm import INPUTS, WORDS, assembly_of, packed_operands

ROWS = gl.constexpr(64)  # rows of W per warpgroup
BLOCK = gl.constexpr(INPUTS.value)
WORDS_OF_BLOCK = gl.constexpr(WORDS.value)
OUTPUTS = gl.constexpr(32)  # of a warpgroup that computes an activation; it multiplies as many gates as factors
SYNC_SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))  # of `mma.sync`
SUMS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
MAX_SCALED_TOKENS = 32  # up to this many, scaling the sums of a block takes less time than scaling its weights
# If the bits of an e2m1 number are read as bfloat16 or float16, the number is smaller by the factor 2^126 or 2^14. The
# scales are multiplied by a part of this factor, so that the dtype can represent the weights. The sums are multiplied
# by the rest.
E2M1_EXPONENTS = {torch.bfloat16: (62, 64), torch.float16: (5, 9)}
LOADING_REGISTERS = gl.constexpr(24)  # of a thread that loads

_activate = gluon.jit(activate.fn)


@gluon.constexpr_function
def codes_of(is_gated):
    """Return the layout of a block's words [64, 16], which are the codes of the first operand of matmuls.

    A thread has words of two rows. If the block consists of gates and their factors, these are rows i and 32 + i.
    """
    rows, warps = ([32, 0], [[8, 0], [16, 0]]) if is_gated else ([8, 0], [[16, 0], [32, 0]])
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], rows, [0, 8]], lanes, warps, [], [64, 16])


class Plan(NamedTuple):
    weight: NamedTuple  # PackedShape
    tokens: int  # per tile
    row_groups: int  # warpgroups with different rows
    k_groups: int  # warpgroups with the same rows
    burst: int  # blocks that are loaded together
    groups: int  # groups of inputs per block; each group shares a scale
    has_zeros: bool
    is_sync: bool  # whether `mma.sync` multiplies, which is faster than `wgmma` for few tokens
    scales_sums: bool  # whether the sums are scaled instead of the weights
    scale_exponent: int  # scales are multiplied by 2**scale_exponent, and sums by 2**sum_exponent: see E2M1_EXPONENTS
    sum_exponent: int
    stages: int  # bursts that are loaded ahead; a multiple of k_groups
    registers: int  # per thread that multiplies
    is_gated: bool  # whether a program computes an activation of gates and their factors
    activation: Activation | None


@gluon.jit
def load_words(i, words_tiles, rings, row, up_row, block, PLAN: gl.constexpr):
    """Start loading the words of W for the program's i-th step. `block` is the program's first block.

    If the program computes an activation, it loads 32 rows from `row` and 32 rows from `up_row`.
    """
    words, _, full, _ = rings
    BURST: gl.constexpr = PLAN.burst
    ROW_GROUPS: gl.constexpr = PLAN.row_groups
    stage = i % PLAN.stages
    mbarrier.expect(full.index(stage), BURST * (ROW_GROUPS * ROWS * BLOCK // 2 + PLAN.tokens * BLOCK * 2))
    for b in gl.static_range(BURST):
        word = (block + i * BURST + b) * WORDS_OF_BLOCK
        for group in gl.static_range(ROW_GROUPS):
            buffer = words.index((stage * BURST + b) * ROW_GROUPS + group)
            if PLAN.is_gated:
                up = buffer.slice(OUTPUTS, OUTPUTS)
                tma.async_copy_global_to_shared(words_tiles, [row, word], full.index(stage), buffer.slice(0, OUTPUTS))
                tma.async_copy_global_to_shared(words_tiles, [up_row, word], full.index(stage), up)
            else:
                tma.async_copy_global_to_shared(words_tiles, [row + group * ROWS, word], full.index(stage), buffer)


@gluon.jit
def load_blocks(tiles, rings, at, steps, PLAN: gl.constexpr):
    """Run the loading warp."""
    words_tiles, x_tiles = tiles
    _, xs, full, empty = rings
    row, up_row, token, block = at
    HALVES: gl.constexpr = 2 * PLAN.burst
    for i in range(steps):
        stage = i % PLAN.stages
        if i >= PLAN.stages:
            mbarrier.wait(empty.index(stage), (i // PLAN.stages & 1) ^ 1)
            load_words(i, words_tiles, rings, row, up_row, block, PLAN)
        for half in gl.static_range(HALVES):
            x_at = [token, (block + i * PLAN.burst) * BLOCK + half * (BLOCK // 2)]
            tma.async_copy_global_to_shared(x_tiles, x_at, full.index(stage), xs.index(stage * HALVES + half))


@gluon.jit
def _factors(w_ptrs, n, block, dtype: gl.constexpr, PLAN: gl.constexpr):
    """Load the scales of a block's groups for rows `n` of W. Also load the numbers that are added to the codes.

    If the last block has fewer groups, the scales of the missing groups are 0. If `block` is beyond the last block,
    return the factors of the last block.
    """
    GROUPS: gl.constexpr = PLAN.groups
    LAST: gl.constexpr = (PLAN.weight.groups - 1) // GROUPS * GROUPS
    first_group = gl.minimum(block * BLOCK // PLAN.weight.group_size, LAST)
    at = n * PLAN.weight.groups + first_group
    scales, summands = (), ()
    for g in gl.static_range(GROUPS):
        exists = first_group + g < PLAN.weight.groups
        scale_ptr = w_ptrs[1] + at + g
        scale = gl.load(scale_ptr) if LAST + g < PLAN.weight.groups else gl.load(scale_ptr, exists, 0.0)
        if PLAN.weight.is_e8m0:  # bfloat16 has as many exponent bits as e8m0
            exponent = gl.minimum(scale.to(gl.int32), 255 - PLAN.scale_exponent) + PLAN.scale_exponent
            scale = (exponent << 7).to(gl.int16).to(gl.bfloat16, bitcast=True)
        elif PLAN.scale_exponent > 0:
            scale = (scale.to(gl.float32) * 2.0**PLAN.scale_exponent).to(dtype)
        scales = scales + (scale,)  # noqa: RUF005 (Gluon has no star)
        if PLAN.has_zeros:
            zeros = gl.load(w_ptrs[2] + at + g, exists, 0).to(gl.float32)
            summands = summands + ((-zeros - (1024.0 if dtype == gl.float16 else 128.0)).to(dtype),)  # noqa: RUF005
    return scales, summands


@gluon.jit
def _burst_factors(w_ptrs, n, block, dtype: gl.constexpr, PLAN: gl.constexpr):
    """Return the factors of the blocks of a burst, which begins at `block`."""
    factors = (_factors(w_ptrs, n, block, dtype, PLAN),)
    if PLAN.burst > 1:
        factors = factors + (_factors(w_ptrs, n, block + 1, dtype, PLAN),)  # noqa: RUF005
    return factors


@gluon.jit
def _weights(words, factors, HALF: gl.constexpr, dtype: gl.constexpr, PLAN: gl.constexpr):
    """Convert half of a block to the first operand of a matmul."""
    scales, summands = factors
    CODES: gl.constexpr = codes_of(PLAN.is_gated)
    slices = ()
    for j in gl.static_range(HALF * 4, HALF * 4 + 4):
        summand = gl.full([ROWS, 16], 0.0, dtype, CODES)
        if PLAN.has_zeros:
            summand += gl.expand_dims(summands[j * PLAN.groups // 8], 1)
        elif not PLAN.weight.is_e2m1:
            summand -= 1032.0 if dtype == gl.float16 else 136.0
        bits = gl.inline_asm_elementwise(PLAN.weight.assembly[j], "=r,r,r,r", [words, summand], gl.int16, True, 2)
        values = bits.to(dtype, bitcast=True)
        if not PLAN.scales_sums:
            values *= gl.expand_dims(scales[j * PLAN.groups // 8].to(dtype), 1)
        slices = slices + (values,)  # noqa: RUF005
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SYNC_SUMS if PLAN.is_sync else sums_of(64), 2)
    # [row, input, slice & 2, slice & 1] becomes [row, 64 inputs], where each thread keeps its values
    joined = gl.join(gl.join(slices[0], slices[2]), gl.join(slices[1], slices[3]))
    weights = gl.reshape(joined.permute((0, 2, 3, 1)), [ROWS, 64])
    if PLAN.is_gated:  # each warp has 8 gates and their factors
        weights = gl.reshape(gl.reshape(weights, [2, 4, 8, 64]).permute((1, 0, 2, 3)), [ROWS, 64])
    return gl.convert_layout(weights, OPERAND, assert_trivial=True)


@gluon.jit
def _rows(i, rows, in_order_of_sums: gl.constexpr, PLAN: gl.constexpr):
    """Return the rows of W that belong to rows `i` of a warpgroup's sums, or of its words.

    `rows` is (the program's first row, the row after the last row, the distance of a gate's row from its factor's row).
    """
    first, end, distance = rows
    if PLAN.is_gated:
        is_factor, output = i // OUTPUTS, i % OUTPUTS
        if in_order_of_sums:
            is_factor, output = i // 8 % 2, i // 16 * 8 + i % 8
        i = gl.minimum(first + output, end - 1) + is_factor * distance
    else:
        i = gl.minimum(first + i, end - 1)
    return i


@gluon.jit
def multiply_blocks(rings, sharing, w_ptrs, bias_ptr, rows, blocks, G: gl.constexpr, PLAN: gl.constexpr):
    """Return a warpgroup's results: the sums [64, tokens], or the activation [32, tokens], in float32.

    `_rows` describes `rows`. If warpgroups share rows, only the first warpgroup has valid results.

    If warpgroups share rows, they use different buffers. With a common buffer, each warpgroup would wait for every
    second use of the buffer. Every second use has the same barrier parity, so a waiting warpgroup could miss its turn.
    """
    words_ring, xs, full, empty = rings
    block, steps = blocks
    dtype: gl.constexpr = xs.dtype
    ROW_GROUP: gl.constexpr = G % PLAN.row_groups
    K_GROUP: gl.constexpr = G // PLAN.row_groups
    BURST: gl.constexpr = PLAN.burst
    LAYOUT: gl.constexpr = SYNC_SUMS if PLAN.is_sync else sums_of(PLAN.tokens)
    CODES: gl.constexpr = codes_of(PLAN.is_gated)
    FACTORS: gl.constexpr = gl.SliceLayout(1, LAYOUT if PLAN.scales_sums else CODES)
    zeros = gl.full([ROWS, PLAN.tokens], 0.0, gl.float32, LAYOUT)
    sums = zeros
    rows = rows[0] + ROW_GROUP * ROWS, rows[1], rows[2]
    n = _rows(gl.arange(0, ROWS, FACTORS), rows, PLAN.scales_sums, PLAN)
    next_factors = _burst_factors(w_ptrs, n, block + K_GROUP * BURST, dtype, PLAN)
    for i in range(K_GROUP, steps, PLAN.k_groups):
        stage = i % PLAN.stages
        factors = next_factors
        next_factors = _burst_factors(w_ptrs, n, block + (i + PLAN.k_groups) * BURST, dtype, PLAN)
        mbarrier.wait(full.index(stage), i // PLAN.stages & 1)
        for b in gl.static_range(BURST):
            scales, summands = factors[b]
            if PLAN.scales_sums and PLAN.has_zeros:
                summands = (gl.convert_layout(summands[0], gl.SliceLayout(1, CODES)),)
            words = words_ring.index((stage * BURST + b) * PLAN.row_groups + ROW_GROUP).load(CODES)
            first = xs.index((stage * BURST + b) * 2).permute((1, 0))
            second = xs.index((stage * BURST + b) * 2 + 1).permute((1, 0))
            w = _weights(words, (scales, summands), 0, dtype, PLAN)
            if PLAN.is_sync:
                next_w = _weights(words, (scales, summands), 1, dtype, PLAN)
                # two sums, because each `mma.sync` waits for the previous `mma.sync` of the same sum
                y = mma_v2(w, first.load(gl.DotOperandLayout(1, LAYOUT, 2)), zeros if PLAN.scales_sums else sums)
                y += mma_v2(next_w, second.load(gl.DotOperandLayout(1, LAYOUT, 2)), zeros)
            else:
                if PLAN.scales_sums:
                    y = hopper.warpgroup_mma(w, first, zeros, use_acc=False, is_async=True)
                else:
                    y = hopper.warpgroup_mma(w, first, sums, is_async=True)
                next_w = _weights(words, (scales, summands), 1, dtype, PLAN)
                y = hopper.warpgroup_mma(next_w, second, y, is_async=True)
                # the compiler overlaps nothing if a matmul is unfinished at the end of an iteration
                y, w, next_w = hopper.warpgroup_mma_wait(0, deps=[y, w, next_w])
            if PLAN.scales_sums:
                sums += y * gl.expand_dims(scales[0].to(gl.float32), 1)
            else:
                sums = y
        mbarrier.arrive(empty.index(stage), count=1)
    sums *= 2.0**PLAN.sum_exponent
    if K_GROUP > 0:
        sharing[1].index(ROW_GROUP).store(sums)
        mbarrier.arrive(sharing[0].index(0), count=1)
    else:
        if PLAN.k_groups > 1:
            mbarrier.wait(sharing[0].index(0), 0)
            sums += sharing[1].index(ROW_GROUP).load(LAYOUT)
        n = _rows(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), rows, True, PLAN)
        if w_ptrs[3] is not None:
            sums *= gl.expand_dims(gl.load(w_ptrs[3] + n), 1)
        if bias_ptr is not None:
            sums += gl.expand_dims(gl.load(bias_ptr + n).to(gl.float32), 1)
        if PLAN.is_gated:
            parts = gl.reshape(sums, [4, 2, 8, PLAN.tokens]).permute((0, 2, 3, 1))
            gates, factors = gl.reshape(parts, [OUTPUTS, PLAN.tokens, 2]).split()
            ACTIVATION: gl.constexpr = PLAN.activation
            sums = _activate(gates, factors, ACTIVATION)
    return sums


@gluon.jit
def store_rows(out_ptr, y, out_row, is_row, first, num_outputs):
    """Store y [outputs, tokens] in rows `out_row` of `out`, from output `first` on."""
    n = first + gl.arange(0, y.shape[0], gl.SliceLayout(1, y.type.layout))
    at = out_ptr + out_row.to(gl.int64)[None, :] * num_outputs + n[:, None]
    gl.store(at, y.to(out_ptr.dtype.element_ty), (n < num_outputs)[:, None] & is_row[None, :])


@gluon.jit
def _multiply(pointers, rings, sharing, at, sizes, G: gl.constexpr, PLAN: gl.constexpr):
    """Run a multiplying warpgroup."""
    w_ptrs, bias_ptr, out_ptr = pointers
    row, token, block = at
    steps, num_tokens, num_outputs = sizes
    rows = row, num_outputs, num_outputs
    y = multiply_blocks(rings, sharing, w_ptrs, bias_ptr, rows, (block, steps), G, PLAN)
    if PLAN.row_groups > G:
        if PLAN.is_sync:
            m = token + gl.arange(0, PLAN.tokens, gl.SliceLayout(0, y.type.layout))
            store_rows(out_ptr, y, m, m < num_tokens, row, num_outputs)
        else:
            store_transposed(out_ptr, y, row + G * ROWS, token, num_tokens, num_outputs)


@gluon.jit
def allocate(words_tiles, x_tiles, PLAN: gl.constexpr):
    """Return rings of buffers with barriers, and shared memory for the sums of warpgroups that share rows."""
    STAGES: gl.constexpr = PLAN.stages
    gl.static_assert(STAGES % PLAN.k_groups == 0)  # see `multiply_blocks`
    gl.static_assert(not (PLAN.is_gated and PLAN.has_zeros))  # zero points would be in the order of the sums
    ROW_GROUPS: gl.constexpr = PLAN.row_groups
    BURST: gl.constexpr = PLAN.burst
    NUM_WORDS: gl.constexpr = [STAGES * BURST * ROW_GROUPS, ROWS, WORDS_OF_BLOCK]
    words, xs = gl.allocate_shared_memory(gl.int32, NUM_WORDS, words_tiles.layout), buffers(x_tiles, STAGES * BURST * 2)
    full, empty = barriers(STAGES, 1), barriers(STAGES, ROW_GROUPS)
    OTHERS: gl.constexpr = ROW_GROUPS * (PLAN.k_groups - 1)
    # The compiler passes arguments to warpgroups in memory that it thinks is free. The initialization of a barrier that
    # no warpgroup uses could overwrite these arguments.
    sharing = ()
    if OTHERS > 0:
        sums = gl.allocate_shared_memory(gl.float32, [OTHERS, ROWS, PLAN.tokens], SUMS)
        sharing = barriers(1, ROW_GROUPS), sums
    return (words, xs, full, empty), sharing


@dependent_kernel(early=("words_tiles",))
@gluon.jit(do_not_specialize=["num_tokens", "steps", "split_k"])
def _packed_gemm_kernel(
    words_tiles,
    x_tiles,
    w_ptrs,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_outputs,
    steps,
    split_k,
    PLAN: gl.constexpr,
    PDL: gl.constexpr,
):
    # A program computes a tile of the result over the inputs of one split.
    gdc_launch_dependents(PDL)
    rings, sharing = allocate(words_tiles, x_tiles, PLAN)
    split = gl.program_id(0) % split_k
    TILE: gl.constexpr = OUTPUTS if PLAN.is_gated else PLAN.row_groups * ROWS
    row, block = gl.program_id(0) // split_k * TILE, split * steps * PLAN.burst
    for i in range(gl.minimum(steps, PLAN.stages)):
        load_words(i, words_tiles, rings, row, row + num_outputs, block, PLAN)
    gdc_wait(PDL)
    token = gl.program_id(1) * PLAN.tokens
    pointers = w_ptrs, bias_ptr, out_ptr + split * num_tokens * num_outputs
    at, sizes = (row, token, block), (steps, num_tokens, num_outputs)
    load_at = row, row + num_outputs, token, block
    gl.warp_specialize(
        [
            (_multiply, (pointers, rings, sharing, at, sizes, gl.constexpr(0), PLAN)),
            (_multiply, (pointers, rings, sharing, at, sizes, gl.constexpr(1), PLAN)),
            (load_blocks, ((words_tiles, x_tiles), rings, load_at, steps, PLAN)),
        ],
        [4, 1],  # warps of the second and the third partition
        [PLAN.registers, LOADING_REGISTERS],
    )


def plan_of(weight, dtype: torch.dtype, tile: HopperTile, activation: Activation | None = None) -> tuple[tuple, Plan]:
    """Return the pointers of a Packed weight, and a plan for the kernel that multiplies by the weight."""
    pointers, shape = packed_operands(weight, dtype)
    groups, row_groups = max(1, BLOCK.value // shape.group_size), tile.outputs // ROWS.value
    exponents = 0, 0
    if shape.is_e2m1:  # the kernel reads e2m1 bits as much smaller 16-bit numbers
        shape = shape._replace(assembly=assembly_of(True, dtype, is_scaled_later=True))
        exponents = E2M1_EXPONENTS[dtype]
    registers = (tile.registers * 3 - LOADING_REGISTERS.value) // 2 // 8 * 8
    return pointers, Plan(
        *(shape, tile.rows, row_groups, 2 // row_groups, tile.burst, groups, weight.zeros is not None),
        *(tile.rows == SMALL_TILE_M, groups == 1 and tile.rows <= MAX_SCALED_TOKENS and not shape.is_e2m1),
        *(*exponents, tile.stages, registers, activation is not None, activation),
    )


def hopper_packed_gemm(
    x: torch.Tensor, weight, tile: HopperTile, out=None, bias=None, activation: Activation | None = None
) -> torch.Tensor:
    """Compute `packed_gemm`, which returns [split_k, M, N]. The values of x [M, K] have 16 bits.

    The weight [N, K] has contiguous groups. The bias is added to the sums of each split. If an activation is given,
    there are at most 8 rows of x, one split and no zero points, and the result is [1, M, N / 2].
    """
    m, n, tile_n, box = len(x), len(weight.words), tile.outputs, ROWS.value
    if activation is not None:
        n, tile_n, box = n // 2, OUTPUTS.value, OUTPUTS.value
    out = torch.empty((tile.split_k, m, n), dtype=x.dtype, device=x.device) if out is None else out
    pointers, plan = plan_of(weight, x.dtype, tile, activation)
    steps = triton.cdiv(triton.cdiv(weight.k, BLOCK.value), tile.burst * tile.split_k)
    grid = triton.cdiv(n, tile_n) * tile.split_k, triton.cdiv(m, tile.rows)
    tiles = tiles_of(weight.words, box, WORDS.value), tiles_of(x, tile.rows, BLOCK.value // 2)
    launch(_packed_gemm_kernel, grid, x.device)(
        *tiles, pointers, bias, out, m, n, steps, tile.split_k, PLAN=plan, num_warps=4, maxnreg=tile.registers
    )
    return out
