"""Replaces CPU operations whose results depend on the number of rows.

A runner computes a step in one thread. With several threads, the batch size would determine how loops over elements are
divided. In one thread, elementwise operations and reductions over the last dimension compute each row independently of
other rows. The following operations are replaced, because even in one thread, their results for a row depend on other
rows:

- Matmuls: the library chooses an algorithm by shape. The replacement uses all threads to multiply blocks of a fixed
  shape.
- Functions of few elements: PyTorch computes most elements of a tensor with vector instructions, but the last elements
  one by one. The replacements compute functions of few elements row by row.
- The chunked form of the gated delta rule: sums depend on where a chunk begins. The replacement computes each token
  alone, as in a decode step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.cache.state import State
from nanovllm.delta_net import gated_delta_net
from nanovllm.features import logprobs
from nanovllm.kernels.activations import Activation
from nanovllm.layers import gated_activation as activations
from nanovllm.layers import sampler
from nanovllm.layers import sigmoid_gate as gates
from nanovllm.layers.cpu_ops import philox as philox
from nanovllm.layers.sampler import SamplingRows

ROWS = 16  # rows per block of a matmul
num_threads: ContextVar[int] = ContextVar("threads of a product")


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch use one thread during a `with` block.

    Matmuls still use the previous number of threads.
    """
    before = torch.get_num_threads()
    token = num_threads.set(before)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        num_threads.reset(token)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    leading, x = x.shape[:-1], x.reshape(-1, x.shape[-1])  # a learner may pass a tensor with other dimensions
    y = x.new_empty(len(x), len(weight))
    torch.set_num_threads(num_threads.get())
    for begin in range(0, len(x), ROWS):
        rows = slice(begin, begin + ROWS)
        block = x.new_zeros(ROWS, x.shape[1])  # always a copy, so that its alignment is always the same
        num_rows = len(x[rows])
        block[:num_rows] = x[rows]
        y[rows] = F.linear(block, weight, bias)[:num_rows]
    torch.set_num_threads(1)
    return y.view(*leading, len(weight))


gate_scores = linear


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Compute the gate row by row, so that no vector instruction computes the gates of several rows."""
    if len(x) <= 1:
        return NotImplemented
    return torch.cat([gates.sigmoid_gate(*row) for row in zip(x.split(1), gate.split(1))])


def gated_activation(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Compute the activation row by row, for the same reason as `sigmoid_gate`."""
    if len(x) <= 1:
        return NotImplemented
    return torch.cat([activations.gated_activation(row, activation) for row in x.split(1)])


def delta_net_step(qkvz, ba, layer: Any, states: State, rows, out, count=None) -> None:
    """Compute the tokens in order, because several tokens of a sequence may use the same state."""
    if len(rows) == 1:
        return NotImplemented
    for x, gates_of_x, row, y in zip(qkvz.split(1), ba.split(1), rows.split(1), out.split(1)):
        gated_delta_net.delta_net_step(x, gates_of_x, layer, states, row, y)
    return None


def delta_net_chunks(qkvz, ba, layer: Any, states: State, state_rows, starts, num_seqs: int, out, count=None) -> None:
    """Compute chunks token by token, so that results do not depend on where a chunk begins.

    Steps on a CPU have no padding.
    """
    lengths = starts.diff().tolist()
    inputs = (x[starts[0] :].split(lengths) for x in (qkvz, ba, out))
    for *tokens, y, (read, written) in zip(*inputs, state_rows.T):
        for tensor in states.tensors:
            tensor[written] = tensor[read]
        states.count_tokens(read, written, len(y))
        gated_delta_net.delta_net_step(*tokens, layer, states, written.expand(len(y)), y)


def delta_net_drafts(qkvz, ba, layer: Any, states: State, rows, context_lens, out, count=None) -> None:
    """Process tokens one by one: the previous step's accepted drafts, a token that is not a draft, and new drafts.

    New drafts leave the stored state unchanged.
    """
    (kept, num_tokens), k = states.kept_drafts, len(qkvz) // len(rows)
    sizes = qkvz.shape[1] - out.shape[1], ba.shape[1]
    for x, gates_of_x, lengths, y, row in zip(*(t.split(k) for t in (qkvz, ba, context_lens, out)), rows.split(1)):
        own = layer, states, row
        for right in kept[row, : lengths[0] - 1 - num_tokens[row]].unbind(1):
            qkv, gates_of_right = right.split(sizes, 1)
            gated_delta_net.delta_net_step(F.pad(qkv, (0, out.shape[1])), gates_of_right, *own, y[:1])
        gated_delta_net.delta_net_step(x[:1], gates_of_x[:1], *own, y[:1])
        num_tokens[row], kept[row, : k - 1] = lengths[0], torch.cat((x[1:, : sizes[0]], gates_of_x[1:]), 1)
        stored = [tensor[row] for tensor in states.tensors]
        for i in range(1, k):
            y[i] = y[i - 1]  # stays if this token is a copy of the previous token
            if lengths[i] > lengths[i - 1]:
                gated_delta_net.delta_net_step(x[i : i + 1], gates_of_x[i : i + 1], *own, y[i : i + 1])
        for tensor, values in zip(states.tensors, stored):
            tensor[row] = values


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_id: int = 0,
    cutoffs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample row by row, because each row needs noise for a different set of tokens."""
    if len(logits) <= 1:
        return NotImplemented
    found = []
    for i in range(len(logits)):
        row = slice(i, i + 1)
        own_cutoffs = None if cutoffs is None else cutoffs[row]
        draw = logits[row], temperatures[row], seeds[row], positions[row], first_id
        found.append(sampler.sample(*draw, cutoffs=own_cutoffs))
    best, token_ids = zip(*found)
    return torch.cat(best), torch.cat(token_ids)


def logit_cutoffs(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    if len(logits) <= 1:
        return NotImplemented
    each = [rows._replace(params=params) for params in rows.params.split(1)]
    return torch.cat([sampler.logit_cutoffs(row, own) for row, own in zip(logits.split(1), each)])


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, temperatures: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-probabilities in the same way as `gather_logprobs`."""
    _, ranks = logprobs.token_logprobs.__wrapped__(logits, token_ids, temperatures)  # the definition
    values = logprobs.divided(logits, temperatures).log_softmax(-1)
    return values.gather(1, token_ids.unsqueeze(1).long()).squeeze(1), ranks
