"""Drafts in a layer of the gated delta rule, whose states can't go back: what may be wrong never gets there.

Of a sequence's tokens in a step, the first is certain, and the state after it is stored. The drafts are computed from
there, and only their inputs are kept, which take about a hundredth of a state each. In the next step the sequence is
longer by the drafts that were right: these are computed again, into the state. How many they are is read on the host,
so this is for a CPU.
"""

from typing import Any

import torch

from nanovllm.cache.state import State
from nanovllm.delta_net.gated_delta_net import (
    GatedDeltaNet,
    convolve,
    delta_net_step,
    gated_norm,
    recurrent_delta_rule,
    rule_inputs,
)
from nanovllm.kernels import operation


@operation
def delta_net_drafts(qkvz, ba, layer: GatedDeltaNet, states: State, rows, context_lens, out, count=None) -> None:
    """As `delta_net_step`, of a token and the drafts after it for each of B sequences, whose states are in `rows` [B].

    qkvz [B * k, channels + heads * value_dim]; ba [B * k, 2 heads]; context_lens [B * k]: how many tokens there are up
    to each; out [B * k, heads * value_dim]. A draft that is no token further than the one before is a copy of that.
    With `count` [1] int32, only so many of the B * k rows are there.
    """
    assert states.kept_drafts is not None
    (inputs, num_tokens), k = states.kept_drafts, len(qkvz) // len(rows)
    rows = rows[: None if count is None else int(count) // k].long()
    of_rows = (x[: len(rows) * k] for x in (qkvz, ba, context_lens, out))
    qkvz, ba, lengths, out = (x.unflatten(0, (-1, k)) for x in of_rows)
    _replay(layer, states, rows, lengths[:, 0] - 1 - num_tokens[rows])
    num_tokens[rows] = lengths[:, 0]
    delta_net_step(qkvz[:, 0], ba[:, 0], layer, states, rows, out[:, 0])
    if (num_drafts := qkvz.shape[1] - 1) == 0:
        return
    qkv, z = qkvz[:, 1:].split((qkvz.shape[2] - out.shape[2], out.shape[2]), 2)
    inputs[rows, :num_drafts] = drafts = torch.cat((qkv, ba[:, 1:]), 2)
    _, read, _ = _advance(drafts, layer, states, rows)
    out[:, 1:] = gated_norm(read.flatten(0, 1), z.flatten(0, 1), layer).unflatten(0, z.shape[:2])
    # the copies too, as their keys and values go to the same slots
    out.copy_(out[torch.arange(len(rows), device=rows.device)[:, None], lengths - lengths[:, :1]])


def _replay(layer: GatedDeltaNet, states: State, rows: torch.Tensor, counts: torch.Tensor) -> None:
    """Compute the first `counts` [B] kept drafts of the sequences in `rows` again, and store their states."""
    some = counts.nonzero()[:, 0]
    if not len(some):
        return
    (windows, matrices), (kept, _) = states.tensors, states.kept_drafts
    rows, counts = rows[some], counts[some, None]
    inputs = kept[rows, : int(counts.max())]
    is_wrong = (torch.arange(inputs.shape[1], device=rows.device) >= counts)[:, :, None]
    qkv, gates = inputs.split((windows.shape[2], inputs.shape[2] - windows.shape[2]), 2)
    qkv.masked_fill_(is_wrong, 0)
    gates.masked_fill_(is_wrong, -torch.inf)  # a token neither decays nor corrects the matrix then
    seen, _, matrices[rows] = _advance(inputs, layer, states, rows)
    last = counts + torch.arange(windows.shape[1], device=rows.device)
    windows[rows] = seen[torch.arange(len(rows), device=rows.device)[:, None], last]


def _advance(inputs: torch.Tensor, layer: GatedDeltaNet, states: State, rows: torch.Tensor) -> tuple[Any, ...]:
    """T tokens from the states in `rows` [B] on, with inputs [B, T, channels + 2 heads].

    Returns the inputs of the convolution [B, conv_size - 1 + T, channels], what the tokens read [B, T, heads,
    value_dim], and the matrices after them.
    """
    windows, matrices = states.tensors
    qkv, ba = inputs.split((windows.shape[2], inputs.shape[2] - windows.shape[2]), 2)
    seen = torch.cat((windows[rows], qkv), 1)
    values = rule_inputs(convolve(seen, layer).flatten(0, 1), ba.flatten(0, 1), layer)
    by_token = (x.unflatten(0, inputs.shape[:2]).transpose(0, 1) for x in values)
    read, after = recurrent_delta_rule(*by_token, matrices[rows])
    return seen, read.transpose(0, 1), after
