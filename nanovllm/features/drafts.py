"""Rows of several tokens: a sequence gets its next token and, of the drafts after it, those that are right.

A feature with `num_drafts` asks for them, and no feature of this package does. The core imports this file where a step
has such rows: k, `tokens_per_row`, is then more than 1.
"""

from collections.abc import Collection
from typing import Any

import torch

from nanovllm.engine.request_tables import RequestTables, SamplerInput, arrays
from nanovllm.engine.scheduled_step import ScheduledStep, StepResult
from nanovllm.engine.sequence import Sequence, SequenceStatus

# -- on the device: engine/request_tables.py and the runner call these; kernels do the same as the first two ----


def rows_of_drafts(k: int, req_indices: Any, num_reserved: Any, lengths: Any, last_token_ids: Any) -> tuple[Any, ...]:
    """The k rows of each of D sequences: request indices, `num_reserved`, lengths and token ids, all [D * k].

    Each row attends to one token more: the last token, then drafts. Rows past the sequence's `num_reserved` are copies
    of the last one.
    """
    (steps,) = arrays(torch.arange(k, device=getattr(num_reserved, "device", "cpu")))
    offsets = (steps - (steps - num_reserved[:, None] + 1).clip(0)).clip(0)  # [D, k]
    found = (x[:, None] + 0 * steps for x in (req_indices, num_reserved))
    token_ids = last_token_ids[req_indices[:, None], offsets].clip(0)  # -1: no draft
    return tuple(x.reshape(-1) for x in (*found, lengths[:, None] + offsets, token_ids))


def accept_drafts(
    req_indices: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, tables: RequestTables
) -> torch.Tensor:
    """How many of its sampled tokens [S * k] each sequence gets: counts [S] int32. See `accept`.

    A draft is right if it equals the token that was sampled in its place. Rows whose position is that of the row before
    them have none.
    """
    k = tables.last_token_ids.shape[1]
    req_indices, positions, tokens = arrays(req_indices[::k], positions.reshape(-1, k), token_ids.reshape(-1, k))
    last_token_ids, num_tokens = arrays(*tables[:2])
    is_right = (last_token_ids[req_indices, 1:] == tokens[:, :-1]) & (positions[:, 1:] > positions[:, :-1])
    counts = 1 + is_right.cumprod(1).sum(1)
    (rows,) = arrays(torch.arange(len(tokens), device=token_ids.device))
    last_token_ids[req_indices, 0] = tokens[rows, counts - 1]
    num_tokens[req_indices] = positions[:, 0] + 1 + counts
    return torch.as_tensor(counts).int()


def propose(runner: Any, x: SamplerInput, token_ids: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Draft what may follow the tokens of a step. Returns `results` [S, k + 1] of its ForwardOutput."""
    k = runner.tokens_per_row
    proposer = next(feature for feature in runner.features.values() if feature.num_drafts)
    runner.tables.last_token_ids[x.req_indices[::k], 1:] = proposer.propose(x, counts)
    return torch.cat((token_ids.view(-1, k), counts.unsqueeze(1)), 1)


# -- on the host: engine/output_processor.py calls this ----------------------------------------------------------------


def postprocess_drafts(processor: Any, step: ScheduledStep, result: StepResult) -> Collection[Sequence]:
    """`OutputProcessor.postprocess`, in rounds: the i-th for the i-th token of each sequence that gets so many."""
    counts, k = result.counts or [], step.tokens_per_row
    settle(step, counts)
    changed, step_watched = dict[Sequence, None](), {*step.watched}
    for i in range(k):
        chosen = [j for j, count in enumerate(counts) if count > i]  # of the step's `sampled_seqs`
        seqs, token_ids = [step.sampled_seqs[j] for j in chosen], [result.token_ids[j * k + i] for j in chosen]
        watched = [place for place, j in enumerate(chosen) if j in step_watched]
        arrived, ends = processor.append(seqs, token_ids, [*range(len(seqs))], watched)
        arrived = {chosen[place] * k + i: seq for place, seq in arrived.items()}
        changed |= dict.fromkeys(processor.run_features(step, result, arrived, ends))
    return changed


def settle(step: ScheduledStep, counts: list[int]) -> None:
    """Take back what a step had reserved for drafts that were wrong: its sequences get `counts` tokens."""
    for seq, num_reserved, count in zip(step.sampled_seqs, step.num_reserved.tolist(), counts):
        if seq.status is not SequenceStatus.FINISHED:
            seq.num_tokens -= num_reserved - count
            if seq.status is SequenceStatus.RUNNING:  # else it was preempted, and has nothing computed
                seq.num_computed_tokens -= num_reserved - count
