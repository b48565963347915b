"""The gated delta rule: a layer with a state of fixed size in place of attention (Yang et al. 2024, arXiv:2412.06464).

Each head keeps a matrix S [value_dim, key_dim], an associative memory. A token decays it, corrects what it returns for
the token's key by a part of the error, and reads it with the token's query:

    S = exp(log_decay) S;  S = S + beta (v - S k) k^T;  out = S q

Queries, keys and values come out of a short causal convolution.
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

CHUNK = 64  # tokens whose updates of a state are made at once


class DeltaHeads(NamedTuple):
    """The heads of a layer, or those of a rank. A query and a key serve `num_values / num_keys` adjacent values."""

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    conv_size: int  # tokens that the convolution sees

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many numbers of a token are its queries, keys and values."""
        return *2 * (self.num_keys * self.key_dim,), self.num_values * self.value_dim

    def of_rank(self, tp: TensorParallel) -> "DeltaHeads":
        num_keys = tp.shard_size("key heads of linear attention", self.num_keys)
        num_values = tp.shard_size("value heads of linear attention", self.num_values)
        return self._replace(num_keys=num_keys, num_values=num_values)


def delta_rule_step(q, k, v, log_decay, beta, state) -> tuple[torch.Tensor, torch.Tensor]:
    """One token, by the definition: q and k [..., key_dim], v [..., value_dim], log_decay and beta [...], float32.

    Returns what the token reads [..., value_dim], and the state [..., value_dim, key_dim] after it.
    """
    state = state * log_decay.exp()[..., None, None]
    error = beta[..., None] * (v - _read(state, k))
    state.addcmul_(error[..., None], k[..., None, :])
    return _read(state, q), state


def _read(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The product [..., value_dim], which a CPU's library computes much faster in this order."""
    return (key[..., None, :] @ state.mT)[..., 0, :]


def recurrent_delta_rule(q, k, v, log_decay, beta, state) -> tuple[torch.Tensor, torch.Tensor]:
    """T tokens of a sequence, one after the other: as `delta_rule_step`, with a first dimension T but for the state."""
    outputs = []
    for token in zip(q, k, v, log_decay, beta):
        out, state = delta_rule_step(*token, state)
        outputs.append(out)
    return torch.stack(outputs), state


def chunk_delta_rule(q, k, v, log_decay, beta, state) -> tuple[torch.Tensor, torch.Tensor]:
    """As `recurrent_delta_rule` of inputs [T, heads, ...], by matrix products of CHUNK tokens."""
    by_head = (x.transpose(0, 1).split(CHUNK, 1) for x in (q, k, v, log_decay, beta))  # [heads, C, ...] each
    outputs = []
    for q, k, v, log_decay, beta in zip(*by_head):
        decay = log_decay.cumsum(1)  # of the state since the chunk began, as a logarithm
        between = (decay[:, :, None] - decay[:, None]).tril().exp().tril()  # [heads, C, C]: since a token before
        from_start, to_end = decay.exp()[..., None], (decay[:, -1:] - decay).exp()[..., None]
        # each token's correction depends on those before it: a triangular system
        overlap = beta[..., None] * (k @ k.mT) * between
        wanted = beta[..., None] * (v - from_start * (k @ state.mT))
        errors = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
        outputs.append(from_start * (q @ state.mT) + (q @ k.mT * between) @ errors)
        state = from_start[:, -1:] * state + errors.mT @ (to_end * k)
    return torch.cat(outputs, 1).transpose(0, 1), state


class GatedDeltaNet(nn.Module):
    """The products before and after the rule, and the state of each sequence.

    `layer.cache.tensors` are `windows` [rows, conv_size - 1, channels], the last inputs of the convolution, oldest
    first, whose channels are those of queries, keys and values; and `matrices` [rows, heads, value_dim, key_dim].

    """

    l2_eps = 1e-6  # of queries and keys

    def __init__(self, hidden_size: int, heads: DeltaHeads, eps: float, weights: tuple):
        """`weights`: as ScatteredColumnParallelLinear takes them, of [q, k, v, z] and of [b, a]."""
        super().__init__()
        tp = get_construction().tp
        self.heads, self.eps = heads.of_rank(tp), eps
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
        """Whether a CUDA graph can contain chunks: the definition reads their lengths on the host."""
        return "delta_net_chunks" in ops_for(self.A_log.device)

    def cache_spec(self) -> StateSpec:
        heads = self.heads
        shapes = (heads.conv_size - 1, sum(heads.sizes)), (heads.num_values, heads.value_dim, heads.key_dim)
        return StateSpec(shapes, (self.conv1d.weight.dtype, torch.float32), sum(heads.sizes) + 2 * heads.num_values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        return self.out_proj(self.mix(self.in_proj_qkvz(x), self.in_proj_ba(x)))

    def mix(self, qkvz: torch.Tensor, ba: torch.Tensor) -> torch.Tensor:
        """What lies between the projections: [T, channels + heads * value_dim] and [T, 2 heads] -> [T, heads *
        value_dim]. The states of the step's sequences are read and overwritten.
        """
        context = get_context()
        out = qkvz.new_empty(len(qkvz), self.heads.sizes[2])
        n, count, rows = context.num_decode_rows, context.num_decode_rows_on_device, context.state_rows
        kept, starts = self.cache.kept_drafts, context.cu_seqlens_q
        if n and kept is None:  # they come first
            delta_net_step(qkvz[:n], ba[:n], self, self.cache, rows[1, :n], out[:n], count)
        elif n:
            from nanovllm.delta_net.delta_net_drafts import delta_net_drafts  # few engines draft tokens

            own_rows = rows[1] if starts is None else rows[1, : n : context.tokens_per_row]
            delta_net_drafts(qkvz[:n], ba[:n], self, self.cache, own_rows, context.context_lens[:n], out[:n], count)
        if starts is not None:
            num_seqs = len(starts) - 1 - n
            if count is None:
                starts, rows = starts[n:], rows[:, n:]
            delta_net_chunks(qkvz, ba, self, self.cache, rows, starts, num_seqs, out, count)
        return out


def ranges_of_rank(sizes: tuple[int, ...], tp: TensorParallel) -> tuple[range, ...]:
    """A rank's rows of a weight that has those of several layers side by side, `sizes` of each."""
    starts = (sum(sizes[:i]) for i in range(len(sizes)))
    return tuple(range(start, start + size)[tp.local_slice(size)] for start, size in zip(starts, sizes))


@operation
def delta_net_step(qkvz, ba, layer: Any, states: State, rows, out, count=None) -> None:
    """Convolution, gates, delta rule and gated norm of one token for each of B sequences, into `out`.

    qkvz [B, channels + heads * value_dim]; ba [B, 2 heads]; layer: a GatedDeltaNet; out [B, heads * value_dim]. The
    states in `rows` [B], all different but for padding, are read and overwritten. With `count` [1] int32, only so many
    of the sequences are there.
    """
    n = len(rows) if count is None else int(count)
    (windows, matrices), rows = states.tensors, rows[:n].long()
    qkv, z = qkvz[:n].split((windows.shape[2], layer.heads.sizes[2]), 1)
    inputs = torch.cat((windows[rows], qkv[:, None]), 1)
    windows[rows] = inputs[:, 1:]
    values = rule_inputs(convolve(inputs, layer)[:, 0], ba[:n], layer)
    states_before = matrices.index_select(0, rows)  # which copies faster than matrices[rows]
    read, matrices[rows] = delta_rule_step(*values, states_before)
    out[:n] = gated_norm(read, z, layer)


@operation
def delta_net_chunks(qkvz, ba, layer: Any, states: State, state_rows, starts, num_seqs: int, out, count=None) -> None:
    """As `delta_net_step`, of several tokens for each of B sequences: its own are `starts[i]` to `starts[i + 1]`.

    The states are read from the rows `state_rows[0]` [B], and written to `state_rows[1]`. With `count` [1] int32, so
    many other sequences stand before these in `starts` and `state_rows`. Rows of `out` after the last token become 0.
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
    """Each channel's convolution over time, and SiLU: [B, conv_size - 1 + T, channels] -> [B, T, channels], float32."""
    taps = layer.conv1d.weight[:, 0].float().T  # [conv_size, channels]
    num_tokens = inputs.shape[1] - len(taps) + 1
    return F.silu(sum(inputs[:, i : i + num_tokens] * tap for i, tap in enumerate(taps)))


def rule_inputs(qkv: torch.Tensor, ba: torch.Tensor, layer: GatedDeltaNet) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values, logarithms of decays, and betas, of each value head: [T, heads, ...] float32."""
    heads, (num_queries, _, num_values) = layer.heads, layer.heads.sizes
    qk, v = qkv.split((2 * num_queries, num_values), 1)
    qk = qk.unflatten(1, (2, heads.num_keys, heads.key_dim))
    qk = qk * (qk.square().sum(-1, keepdim=True) + layer.l2_eps).rsqrt()
    q, k = qk.repeat_interleave(heads.num_values // heads.num_keys, 2).unbind(1)
    b, a = ba.float().chunk(2, 1)
    log_decay = -layer.A_log.exp() * F.softplus(a + layer.dt_bias)
    return q * heads.key_dim**-0.5, k, v.unflatten(1, (-1, heads.value_dim)), log_decay, b.sigmoid()


def gated_norm(x: torch.Tensor, z: torch.Tensor, layer: GatedDeltaNet) -> torch.Tensor:
    """RMS norm of each head of x [T, heads, value_dim] float32, times SiLU of z -> as z [T, heads * value_dim]."""
    normed = F.rms_norm(x, x.shape[2:], layer.norm.weight, layer.eps).flatten(1)
    return (normed * F.silu(z.float())).to(z.dtype)
