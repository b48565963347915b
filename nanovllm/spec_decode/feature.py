"""Drafts as a feature of a step: they are written where the step's input is read."""

from typing import Any

import numpy as np
import torch

from nanovllm.engine.features import Arrays, StepFeature
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.layers.sampler import SamplingRows


class Speculation(StepFeature):
    """Each rank writes the drafts of a step to RequestTables, those of the host or those of a model on its device."""

    @classmethod
    def prepare(cls, step: ScheduledStep) -> Arrays | None:
        """Drafts [D, k - 1] of the sequences that have some, -1 where there is none; and all new blocks."""
        rows = (step.num_reserved > 1).nonzero()[0]
        if not len(rows):
            return None
        drafts, are_new = np.full((len(rows), step.tokens_per_row - 1), -1), []
        for own, i, num_reserved in zip(drafts, rows, step.num_reserved[rows]):
            state = step.sampled_seqs[i].feature_state["spec_decode"]
            own[: num_reserved - 1] = state.token_ids[: num_reserved - 1]
            are_new.append(state.is_new)
            state.is_new = False
        new_blocks = [(step.req_indices[i], column, block_id) for i, column, block_id in step.new_blocks]
        return dict(
            req_indices=step.req_indices[rows],
            num_drafts=step.num_reserved[rows] - 1,
            are_new=np.array(are_new),
            drafts=drafts,
            new_blocks=np.array(new_blocks).reshape(-1, 3),
        )

    @classmethod
    def max_words(cls, config: Any) -> int:
        return config.max_num_seqs * 7 + 5 * 4 if config.speculative_config else 0

    def __init__(self, runner: Any):
        self.tables, settings = runner.tables, runner.config.speculative_config
        self.rates = self.drafter = None
        if settings is None:  # on CUDA, the start loads all features
            return
        if runner.keeps_states:
            raise ValueError(f"speculative_config: method={settings.method!r}: can't be used with layers of a state")
        if settings.is_synthetic:
            rates = torch.tensor((1.0, *settings.synthetic_acceptance_rates), device=runner.device)
            self.rates = (rates[1:] / rates[:-1].clamp(min=1e-9)).clamp(
                max=1
            )  # of each draft, if those before are right
        if settings.method == "draft_model":
            from nanovllm.spec_decode.draft_model import DraftModel

            self.drafter = DraftModel(runner)

    def upload(self, arrays: Arrays) -> None:
        drafts = self.drafter.draft(arrays) if self.drafter else arrays["drafts"]
        self.tables.last_token_ids[arrays["req_indices"].long(), 1 : 1 + drafts.shape[1]] = drafts

    def edit_logits(self, logits: torch.Tensor, rows: SamplingRows) -> None:
        """With `synthetic_acceptance_rates`, let drafts be right so often, whatever the model says."""
        if self.rates is None:
            return
        req_indices, positions = rows.req_indices.long(), rows.positions.long()
        offsets = (positions + 1 - self.tables.num_tokens[req_indices]).clamp(0, len(self.rates) - 1)
        next_positions, next_indices = (x.roll(-1) for x in (positions, req_indices))
        is_drafted = (next_positions == positions + 1) & (next_indices == req_indices)
        drafts = self.tables.last_token_ids[req_indices, 1 + offsets].clamp(min=0).long()
        random = (positions * 40503 + req_indices * 69621 + 12345) * 2654435761 % 2**32 / 2**32
        value = torch.where(random < self.rates[offsets], 1e4, -torch.inf).to(logits.dtype)
        old = logits.gather(1, drafts[:, None])
        logits.scatter_(1, drafts[:, None], torch.where(is_drafted, value, old[:, 0])[:, None])
