"""Computes draft tokens in a layer with the gated delta rule.

A state can't be rolled back, so unverified drafts never update it. A sequence's first token in a step is never a draft.
The layer stores the state after a sequence's first token, and computes the drafts from the stored state. For each
draft, the layer stores the draft's inputs, which need about a hundredth of a state's memory. The next step processes
the accepted drafts again to update the state. The functions in this file are meant for a CPU, because they read the
number of accepted drafts on the host.
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
    """Compute `delta_net_step` for B sequences, each with one token and k - 1 drafts.

    `qkvz` is [B * k, channels + heads * value_dim], `ba` is [B * k, 2 * heads], and `out` is [B * k, heads *
    value_dim].

    context_lens: [B * k], the position of each token plus 1. If a token's value in `context_lens` does not exceed the
    previous token's value, the token is a copy of the previous token.
    count: the number of tokens that are not padding ([1] int32), or None.
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
    # a copy needs the output of its original, because both write their keys and values to the same slot
    out.copy_(out[torch.arange(len(rows), device=rows.device)[:, None], lengths - lengths[:, :1]])


def _replay(layer: GatedDeltaNet, states: State, rows: torch.Tensor, counts: torch.Tensor) -> None:
    """For each sequence b, advance the state in row `rows[b]` by the first `counts[b]` stored drafts."""
    some = counts.nonzero()[:, 0]
    if not len(some):
        return
    (windows, matrices), (kept, _) = states.tensors, states.kept_drafts
    rows, counts = rows[some], counts[some, None]
    inputs = kept[rows, : int(counts.max())]
    is_wrong = (torch.arange(inputs.shape[1], device=rows.device) >= counts)[:, :, None]
    qkv, gates = inputs.split((windows.shape[2], inputs.shape[2] - windows.shape[2]), 2)
    qkv.masked_fill_(is_wrong, 0)
    gates.masked_fill_(is_wrong, -torch.inf)  # so that the token neither decays nor corrects the matrix
    seen, _, matrices[rows] = _advance(inputs, layer, states, rows)
    last = counts + torch.arange(windows.shape[1], device=rows.device)
    windows[rows] = seen[torch.arange(len(rows), device=rows.device)[:, None], last]


def _advance(inputs: torch.Tensor, layer: GatedDeltaNet, states: State, rows: torch.Tensor) -> tuple[Any, ...]:
    """Process T tokens of B sequences, starting from the states in `rows` [B].

    `inputs` is [B, T, channels + 2 * heads].

    Return the convolution's inputs [B, conv_size - 1 + T, channels], the outputs [B, T, heads, value_dim], and the
    matrices after the last token.
    """
    windows, matrices = states.tensors
    qkv, ba = inputs.split((windows.shape[2], inputs.shape[2] - windows.shape[2]), 2)
    seen = torch.cat((windows[rows], qkv), 1)
    values = rule_inputs(convolve(seen, layer).flatten(0, 1), ba.flatten(0, 1), layer)
    by_token = (x.unflatten(0, inputs.shape[:2]).transpose(0, 1) for x in values)
    read, after = recurrent_delta_rule(*by_token, matrices[rows])
    return seen, read.transpose(0, 1), after
