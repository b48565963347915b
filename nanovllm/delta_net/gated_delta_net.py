"""The gated delta rule: a layer with a fixed-size state instead of attention (Yang et al. 2024, arXiv:2412.06464).

Each head stores an associative memory: a matrix S [value_dim, key_dim]. For each token, S first decays. For the token's
key k, S returns the value S k. S then changes so that S k moves towards the token's value by the fraction beta.
Finally, S is multiplied by the token's query:

    S = exp(log_decay) S;  S = S + beta (v - S k) k^T;  out = S q

Queries, keys and values are the outputs of a short causal convolution.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.cache.state import State, StateSpec
from nanovllm.delta_net.scattered_linear import RowRanges, ScatteredColumnParallelLinear
from nanovllm.kernels import operation, ops_for
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.utils.construction import get_construction
from nanovllm.utils.context import get_context
from nanovllm.utils.loader import Shard, default_weight_loader, parameter
from nanovllm.utils.tensor_parallel import TensorParallel

CHUNK = 64  # tokens that update a state together


class DeltaHeads(NamedTuple):
    """Describes the heads of a whole layer, or of a rank's part of the layer.

    Each query head and each key head is shared by `num_values / num_keys` adjacent value heads.
    """

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    conv_size: int  # tokens that the convolution sees

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of elements in the queries, the keys and the values of a token."""
        return *2 * (self.num_keys * self.key_dim,), self.num_values * self.value_dim

    def of_rank(self, tp: TensorParallel) -> "DeltaHeads":
        num_keys = tp.shard_size("key heads of linear attention", self.num_keys)
        num_values = tp.shard_size("value heads of linear attention", self.num_values)
        return self._replace(num_keys=num_keys, num_values=num_values)


def delta_rule_step(q, k, v, log_decay, beta, state) -> tuple[torch.Tensor, torch.Tensor]:
    """Process one token in float32, by this module's equations. Return the output [..., value_dim] and the new state.

    Both q and k are [..., key_dim], and v is [..., value_dim]. `log_decay` and `beta` have the shape [...]: one number
    for each k. `state` is [..., value_dim, key_dim]. The new state has the dtype of `state`.
    """
    dtype = state.dtype
    state = state * log_decay.exp()[..., None, None]  # float32
    error = beta[..., None] * (v - _read(state, k))
    state.addcmul_(error[..., None], k[..., None, :])
    return _read(state, q), state.to(dtype)


def _read(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return `state @ key` as a tensor [..., value_dim]. On a CPU, the equivalent `key @ state.mT` is much faster."""
    return (key[..., None, :] @ state.mT)[..., 0, :]


def recurrent_delta_rule(q, k, v, log_decay, beta, state) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute T tokens one by one with `delta_rule_step`. The first dimension of all arguments except `state` is T."""
    outputs = []
    for token in zip(q, k, v, log_decay, beta):
        out, state = delta_rule_step(*token, state)
        outputs.append(out)
    return torch.stack(outputs), state


def chunk_delta_rule(q, k, v, log_decay, beta, state) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `recurrent_delta_rule` for inputs [T, heads, ...], with matmuls over CHUNK tokens at a time.

    The state stays in float32 until the last token.
    """
    by_head = (x.transpose(0, 1).split(CHUNK, 1) for x in (q, k, v, log_decay, beta))  # [heads, C, ...] each
    outputs, dtype, state = [], state.dtype, state.float()
    for q, k, v, log_decay, beta in zip(*by_head):
        decay = log_decay.cumsum(1)  # log of the decay since the chunk began
        between = (decay[:, :, None] - decay[:, None]).tril().exp().tril()  # [heads, C, C]: decay since each token
        from_start, to_end = decay.exp()[..., None], (decay[:, -1:] - decay).exp()[..., None]
        # each token's correction depends on the corrections of earlier tokens: a triangular system
        overlap = beta[..., None] * (k @ k.mT) * between
        wanted = beta[..., None] * (v - from_start * (k @ state.mT))
        errors = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
        outputs.append(from_start * (q @ state.mT) + (q @ k.mT * between) @ errors)
        state = from_start[:, -1:] * state + errors.mT @ (to_end * k)
    return torch.cat(outputs, 1).transpose(0, 1), state.to(dtype)


class GatedDeltaNet(nn.Module):
    """A layer with the gated delta rule: its projections, and the state of each sequence.

    `layer.cache.tensors` contains two tensors. `windows` [rows, conv_size - 1, channels] stores the last inputs of the
    convolution. `matrices` [rows, heads, value_dim, key_dim] stores the matrix S of each head.
    """

    l2_eps = 1e-6  # for the L2 norms of queries and keys

    def __init__(
        self,
        hidden_size: int,
        heads: DeltaHeads,
        eps: float,
        weights: tuple,
        state_dtype: torch.dtype = torch.float32,
    ):
        """Create the layer.

        `weights` contains the `weights` arguments of two ScatteredColumnParallelLinear layers. The first layer computes
        q, k, v and z, and the second layer computes b and a. `state_dtype` is the dtype of the stored matrices.
        """
        super().__init__()
        tp = get_construction().tp
        self.heads, self.eps, self.state_dtype = heads.of_rank(tp), eps, state_dtype
        self.in_proj_qkvz = ScatteredColumnParallelLinear(hidden_size, weights[0])
        self.in_proj_ba = ScatteredColumnParallelLinear(hidden_size, weights[1])
        self.conv1d, self.norm = nn.Module(), nn.Module()  # named as in checkpoints
        shape = sum(heads.sizes), 1, heads.conv_size
        load = RowRanges(shape, ranges_of_rank(heads.sizes, tp)).copy
        self.conv1d.weight = parameter((sum(self.heads.sizes), *shape[1:]), load)
        of_heads = Shard((heads.num_values,), tp.local_slice(heads.num_values)).copy
        self.A_log = parameter((self.heads.num_values,), of_heads, torch.float32)
        self.dt_bias = parameter((self.heads.num_values,), of_heads, torch.float32)
        self.norm.weight = parameter((heads.value_dim,), default_weight_loader, torch.float32)
        self.out_proj = RowParallelLinear(heads.sizes[2], hidden_size)

    @property
    def captures_chunks(self) -> bool:
        """Whether CUDA graphs can contain what this layer computes for prefill chunks.

        Graphs need a kernel for chunks, because the PyTorch definition reads lengths on the host.
        """
        return "delta_net_chunks" in ops_for(self.A_log.device)

    def cache_spec(self) -> StateSpec:
        heads = self.heads
        shapes = (heads.conv_size - 1, sum(heads.sizes)), (heads.num_values, heads.value_dim, heads.key_dim)
        return StateSpec(shapes, (self.conv1d.weight.dtype, self.state_dtype), sum(heads.sizes) + 2 * heads.num_values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [T, hidden_size] to [T, hidden_size]."""
        return self.out_proj(self.mix(self.in_proj_qkvz(x), self.in_proj_ba(x)))

    def mix(self, qkvz: torch.Tensor, ba: torch.Tensor) -> torch.Tensor:
        """Compute everything between the input and output projections, and update the states of the step's sequences.

        `qkvz` is [T, channels + heads * value_dim], and `ba` is [T, 2 * heads]. The result is [T, heads * value_dim].
        """
        context = get_context()
        out = qkvz.new_empty(len(qkvz), self.heads.sizes[2])
        n, count, rows = context.num_decode_rows, context.num_decode_rows_on_device, context.state_rows
        kept, starts = self.cache.kept_drafts, context.cu_seqlens_q
        if n and kept is None:  # decode rows come first
            delta_net_step(qkvz[:n], ba[:n], self, self.cache, rows[1, :n], out[:n], count)
        elif n:
            from nanovllm.delta_net.delta_net_drafts import delta_net_drafts  # lazily: few engines draft

            own_rows = rows[1] if starts is None else rows[1, : n : context.tokens_per_row]
            delta_net_drafts(qkvz[:n], ba[:n], self, self.cache, own_rows, context.context_lens[:n], out[:n], count)
        if starts is not None:
            num_seqs = len(starts) - 1 - n
            if count is None:
                starts, rows = starts[n:], rows[:, n:]
            delta_net_chunks(qkvz, ba, self, self.cache, rows, starts, num_seqs, out, count)
        return out


def ranges_of_rank(sizes: tuple[int, ...], tp: TensorParallel) -> tuple[range, ...]:
    """Return a rank's ranges of rows, in a weight that concatenates layers with `sizes` rows."""
    starts = (sum(sizes[:i]) for i in range(len(sizes)))
    return tuple(range(start, start + size)[tp.local_slice(size)] for start, size in zip(starts, sizes))


@operation
def delta_net_step(qkvz, ba, layer: Any, states: State, rows, out, count=None) -> None:
    """Fill `out` with the results of convolution, gates, delta rule and gated norm for B sequences with one token each.

    `qkvz` is [B, channels + heads * value_dim], `ba` is [B, 2 * heads], and `out` is [B, heads * value_dim]. `layer` is
    a GatedDeltaNet.

    rows: [B], the rows of the states to read and overwrite. Only padding may use the same row as another sequence.
    count: the number of sequences that are not padding ([1] int32), or None.
    """
    n = len(rows) if count is None else int(count)
    (windows, matrices), rows = states.tensors, rows[:n].long()
    qkv, z = qkvz[:n].split((windows.shape[2], layer.heads.sizes[2]), 1)
    inputs = torch.cat((windows[rows], qkv[:, None]), 1)
    windows[rows] = inputs[:, 1:]
    values = rule_inputs(convolve(inputs, layer)[:, 0], ba[:n], layer)
    states_before = matrices.index_select(0, rows)  # faster than matrices[rows]
    read, matrices[rows] = delta_rule_step(*values, states_before)
    out[:n] = gated_norm(read, z, layer)


@operation
def delta_net_chunks(qkvz, ba, layer: Any, states: State, state_rows, starts, num_seqs: int, out, count=None) -> None:
    """Compute `delta_net_step` for each token in the chunks of B sequences.

    The rows of `out` after the last token become 0. Sequence i has the tokens from `starts[i]` to `starts[i + 1]`. The
    state of sequence i is read from row `state_rows[0, i]`, and written to row `state_rows[1, i]`. If `count` [1] int32
    is given, the first `count` entries of `starts` and `state_rows` are decode rows, and are skipped.
    """
    windows, matrices = states.tensors
    qkv, z = qkvz.split((windows.shape[2], layer.heads.sizes[2]), 1)
    first = 0 if count is None else int(count)
    bounds = starts[first : first + num_seqs + 1].tolist()
    for read, written, begin, end in zip(*state_rows[:, first:].tolist(), bounds, bounds[1:]):
        if begin == end:
            continue  # padding
        inputs = torch.cat((windows[read], qkv[begin:end]))
        windows[written] = inputs[end - begin :]
        states.count_tokens(read, written, end - begin)
        values = rule_inputs(convolve(inputs[None], layer)[0], ba[begin:end], layer)
        y, matrices[written] = chunk_delta_rule(*values, matrices[read])
        out[begin:end] = gated_norm(y, z[begin:end], layer)
    out[bounds[-1] :] = 0


def convolve(inputs: torch.Tensor, layer: GatedDeltaNet) -> torch.Tensor:
    """Convolve each channel of `inputs` over time, and apply SiLU. `inputs` is [B, conv_size - 1 + T, channels].

    Return a float32 tensor [B, T, channels].
    """
    taps = layer.conv1d.weight[:, 0].float().T  # [conv_size, channels]
    num_tokens = inputs.shape[1] - len(taps) + 1
    return F.silu(sum(inputs[:, i : i + num_tokens] * tap for i, tap in enumerate(taps)))


def rule_inputs(qkv: torch.Tensor, ba: torch.Tensor, layer: GatedDeltaNet) -> tuple[torch.Tensor, ...]:
    """Return the queries, keys, values, log decays and betas of each value head, as float32 tensors [T, heads, ...]."""
    heads, (num_queries, _, num_values) = layer.heads, layer.heads.sizes
    qk, v = qkv.split((2 * num_queries, num_values), 1)
    qk = qk.unflatten(1, (2, heads.num_keys, heads.key_dim))
    qk = qk * (qk.square().sum(-1, keepdim=True) + layer.l2_eps).rsqrt()
    q, k = qk.repeat_interleave(heads.num_values // heads.num_keys, 2).unbind(1)
    b, a = ba.float().chunk(2, 1)
    log_decay = -layer.A_log.exp() * F.softplus(a + layer.dt_bias)
    return q * heads.key_dim**-0.5, k, v.unflatten(1, (-1, heads.value_dim)), log_decay, b.sigmoid()


def gated_norm(x: torch.Tensor, z: torch.Tensor, layer: GatedDeltaNet) -> torch.Tensor:
    """Return the RMS norm of each head of x, multiplied by SiLU(z).

    The input x is [T, heads, value_dim] float32. Both z and the result are [T, heads * value_dim].
    """
    normed = F.rms_norm(x, x.shape[2:], layer.norm.weight, layer.eps).flatten(1)
    return (normed * F.silu(z.float())).to(z.dtype)
