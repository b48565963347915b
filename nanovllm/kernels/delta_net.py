"""A decode step of the gated delta rule in one kernel: convolution, gates, rule and gated norm.

It is bound by the states, 64 KiB for each head of the published models, which it reads and writes once.
"""

from typing import Any

import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import (
    dependent_kernel,
    gdc_launch_dependents,
    gdc_wait,
    launch,
    next_power_of_2,
    num_sms,
)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _convolve_and_shift(x_ptr, window_ptr, weight_ptr, channel, inside, CHANNELS: tl.constexpr, SIZE: tl.constexpr):
    """SiLU of the convolution of some channels, in float32. Their window [SIZE - 1, CHANNELS] moves by one input."""
    i = tl.arange(0, next_power_of_2(SIZE))[:, None]
    channel, inside = channel[None, :], inside[None, :]
    inputs = tl.load(window_ptr + i * CHANNELS + channel, (i < SIZE - 1) & inside, 0.0)
    inputs += tl.load(x_ptr + channel + 0 * i, (i == SIZE - 1) & inside, 0.0)
    weight = tl.load(weight_ptr + channel * SIZE + i, (i < SIZE) & inside, 0.0)
    tl.debug_barrier()  # all threads have read the window
    tl.store(window_ptr + (i - 1) * CHANNELS + channel, inputs, (i > 0) & (i < SIZE) & inside)
    return _silu(tl.sum(inputs.to(tl.float32) * weight.to(tl.float32), 0))


@triton.jit
def _load_tile(matrix_ptr, n, TILE: tl.constexpr, HEADS: tl.constexpr):
    """The n-th tile of the matrices of some value heads [TILE, KEY_DIM], and the addresses and what is inside."""
    NUM_TILES: tl.constexpr = (HEADS.value_dim + TILE - 1) // TILE
    GROUP: tl.constexpr = HEADS.num_values // HEADS.num_keys
    e = n % NUM_TILES * TILE + tl.arange(0, TILE)
    d = tl.arange(0, next_power_of_2(HEADS.key_dim))
    inside = ((n < GROUP * NUM_TILES) & (e < HEADS.value_dim))[:, None] & (d < HEADS.key_dim)[None, :]
    addresses = matrix_ptr + (n // NUM_TILES * HEADS.value_dim + e)[:, None] * HEADS.key_dim + d[None, :]
    return tl.load(addresses, inside, 0.0), addresses, inside


# the states were written by the step before, and there is an ordinary launch, the embedding, between
@dependent_kernel(early=("rows_ptr", "state_ptrs", "count_ptr"))
@triton.jit
def _delta_net_step_kernel(
    x_ptr,
    ba_ptr,
    rows_ptr,
    state_ptrs,
    count_ptr,
    weight_ptrs,
    out_ptr,
    eps,
    L2_EPS,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes a key head of a sequence, and its value heads one after the other, in tiles of values.

    So no other program reads the windows that it moves. Each tile is loaded while the one before is computed.
    """
    if PDL:
        gdc_launch_dependents()
    window_ptr, matrix_ptr = state_ptrs
    conv_ptr, a_log_ptr, dt_bias_ptr, norm_ptr = weight_ptrs
    NUM_VALUES: tl.constexpr = HEADS.num_values
    GROUP: tl.constexpr = NUM_VALUES // HEADS.num_keys
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    SIZE: tl.constexpr = HEADS.conv_size
    KEYS: tl.constexpr = HEADS.num_keys * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + NUM_VALUES * VALUE_DIM
    NUM_TILES: tl.constexpr = (VALUE_DIM + TILE - 1) // TILE
    key_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    num_seqs = tl.num_programs(1)
    if count_ptr is not None:
        num_seqs = tl.load(count_ptr)
    if seq >= num_seqs:
        return
    row = tl.load(rows_ptr + seq).to(tl.int64)
    matrix = matrix_ptr + (row * NUM_VALUES + key_head * GROUP) * (VALUE_DIM * KEY_DIM)
    next_state, next_addresses, next_inside = _load_tile(matrix, 0, TILE, HEADS)
    if PDL:
        gdc_wait()
    x = x_ptr + seq * (CHANNELS + NUM_VALUES * VALUE_DIM)
    window = window_ptr + row * ((SIZE - 1) * CHANNELS)
    d = tl.arange(0, next_power_of_2(KEY_DIM))
    q = _convolve_and_shift(x, window, conv_ptr, key_head * KEY_DIM + d, d < KEY_DIM, CHANNELS, SIZE)
    k = _convolve_and_shift(x, window, conv_ptr, KEYS + key_head * KEY_DIM + d, d < KEY_DIM, CHANNELS, SIZE)
    q *= tl.rsqrt((tl.sum(q * q, 0) + L2_EPS) * KEY_DIM)
    k *= tl.rsqrt(tl.sum(k * k, 0) + L2_EPS)
    tiles = tl.arange(0, next_power_of_2(NUM_TILES))[:, None]
    e_all = tiles * TILE + tl.arange(0, TILE)[None, :]  # all values of a head
    norm_weight = tl.load(norm_ptr + e_all, e_all < VALUE_DIM, 0.0)
    y = tl.zeros([next_power_of_2(NUM_TILES), TILE], tl.float32)
    for n in range(GROUP * NUM_TILES):
        state, addresses, inside = next_state, next_addresses, next_inside
        next_state, next_addresses, next_inside = _load_tile(matrix, n + 1, TILE, HEADS)
        head, tile = key_head * GROUP + n // NUM_TILES, n % NUM_TILES
        e = tile * TILE + tl.arange(0, TILE)
        channel = 2 * KEYS + head * VALUE_DIM + e
        v = _convolve_and_shift(x, window, conv_ptr, channel, e < VALUE_DIM, CHANNELS, SIZE)
        b = tl.load(ba_ptr + seq * (2 * NUM_VALUES) + head).to(tl.float32)
        a = tl.load(ba_ptr + seq * (2 * NUM_VALUES) + NUM_VALUES + head).to(tl.float32) + tl.load(dt_bias_ptr + head)
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        state *= tl.exp(-tl.exp(tl.load(a_log_ptr + head)) * softplus)
        error = (v - tl.sum(state * k[None, :], 1)) / (1.0 + tl.exp(-b))
        state += error[:, None] * k[None, :]
        tl.store(addresses, state, inside)
        y = tl.where(tiles == tile, tl.sum(state * q[None, :], 1)[None, :], y)
        if tile == NUM_TILES - 1:
            inverse_rms = tl.rsqrt(tl.sum(tl.sum(y * y, 1), 0) / VALUE_DIM + eps)
            z = tl.load(x + CHANNELS + head * VALUE_DIM + e_all, e_all < VALUE_DIM, 0.0).to(tl.float32)
            out = out_ptr + (seq * NUM_VALUES + head) * VALUE_DIM + e_all
            tl.store(out, y * inverse_rms * norm_weight * _silu(z), e_all < VALUE_DIM)


def delta_net_step(qkvz, ba, layer: Any, states: Any, rows, out, count=None) -> None:
    """As its definition in layers/gated_delta_net.py, with convolutions in float32."""
    heads, grid = layer.heads, (layer.heads.num_keys, len(rows))
    windows, matrices = states.tensors
    weights = layer.conv1d.weight, layer.A_log, layer.dt_bias, layer.norm.weight
    # few programs load a whole head at once; of many, several share a multiprocessor
    is_few = grid[0] * grid[1] <= num_sms(qkvz.device)
    tile = min(next_power_of_2(heads.value_dim), 128) if is_few else 32
    launch(_delta_net_step_kernel, grid, qkvz.device, shared=50)(
        *(qkvz, ba, rows, (windows, matrices), count, weights, out, layer.eps, layer.l2_eps),
        HEADS=heads,
        TILE=tile,
        num_warps=16 if tile == 128 else 4,
    )
