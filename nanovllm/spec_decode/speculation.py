"""Implements speculative decoding as a `StepFeature`. The feature writes drafts to tables that the step reads."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanovllm.engine.features import Arrays, StepFeature
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.features.logit_edits import mask_width
from nanovllm.layers.sampler import SamplingRows

if TYPE_CHECKING:
    from nanovllm.batches.batch_runner import BatchRunner
    from nanovllm.config import Config

# by method: the drafter on the device
DRAFTERS = {
    "draft_model": "nanovllm.spec_decode.draft_model:DraftModel",
    "eagle3": "nanovllm.spec_decode.draft_heads:Eagle3",
    "mtp": "nanovllm.spec_decode.draft_heads:Mtp",
}


class Speculation(StepFeature):
    """Writes a step's drafts to `RequestTables` on each rank.

    The drafts come from the host, or from a model on the device.
    """

    @classmethod
    def prepare(cls, step: ScheduledStep) -> Arrays | None:
        """Return the drafts of D sequences, and the new blocks of all sequences.

        `drafts` [D, tokens_per_row - 1] contains -1 where there is no draft.

        `behind` [B, 2] lists the sequences for which a drafter on the device must first compute missing rows. Each pair
        contains the request index, and 1 if the sequence is new.
        """
        req_indices, all_reserved = (np.array(x, np.int64) for x in (step.req_indices, step.num_reserved))
        rows = (all_reserved > 1).nonzero()[0]
        if not len(rows):
            return None
        drafts, behind, places, masks = np.full((len(rows), step.tokens_per_row - 1), -1), [], [], []
        for draft_row, i, num_reserved in zip(drafts, rows, all_reserved[rows]):
            seq = step.sampled_seqs[i]
            state = seq.feature_state["spec_decode"]
            draft_row[: num_reserved - 1] = state.token_ids[: num_reserved - 1]
            if state.is_behind:
                behind.append((req_indices[i], state.is_new))
            state.is_new = state.is_behind = False
            if seq.token_mask is not None:
                places += [np.array((req_indices[i], n + 1)) for n in range(len(seq.token_mask.draft_masks))]
                masks += seq.token_mask.draft_masks
        new_blocks = [(req_indices[i], column, block_id) for i, column, block_id in step.new_blocks]
        return dict(
            dict(mask_places=places, masks=masks) if masks else {},
            req_indices=req_indices[rows],
            num_drafts=all_reserved[rows] - 1,
            behind=np.array(behind, np.int64).reshape(-1, 2),
            drafts=drafts,
            new_blocks=np.array(new_blocks).reshape(-1, 3),
        )

    @classmethod
    def max_words(cls, config: "Config") -> int:
        if (settings := config.speculative_config) is None:
            return 0
        size = 3 + mask_width(config.model_config.vocab_size) if settings.drafts_with_masks else 1
        num_drafts = min(config.max_num_seqs, settings.disable_by_batch_size) * settings.num_speculative_tokens
        return 8 * config.max_num_seqs + num_drafts * size + 7 * 4

    def __init__(self, runner: "BatchRunner"):
        self.runner, self.tables, settings = runner, runner.tables, runner.config.speculative_config
        self.rates = self.drafter = None
        if settings is None:  # on CUDA, the start loads all features
            return
        if any(spec.of_states and not spec.draft_size for spec in runner.cache_groups):
            raise ValueError(f"speculative_config: method={settings.method!r}: a layer keeps a state, but no drafts")
        if settings.is_synthetic:
            rates = torch.tensor((1.0, *settings.synthetic_acceptance_rates), device=runner.device)
            # the acceptance rate of each draft if all earlier drafts are accepted, in units of 2^-24
            self.rates = ((rates[1:] / rates[:-1].clamp(min=1e-9)).clamp(max=1) * 2**24).long()
        if (drafter := DRAFTERS.get(settings.method)) is not None:
            self.drafter = resolve_name(drafter)(runner)

    def upload(self, arrays: Arrays) -> None:
        if self.drafter is not None:
            self.drafter.draft(arrays)
        else:
            drafts = arrays["drafts"]
            self.tables.last_token_ids[arrays["req_indices"].long(), 1 : 1 + drafts.shape[1]] = drafts
        if "masks" in arrays:  # `features.logit_edits` has written the first mask of each sequence
            allowed_masks = self.runner.features["logit_edits"].tables.allowed_masks
            allowed_masks[arrays["mask_places"].long().unbind(1)] = arrays["masks"]

    def edit_logits(self, logits: torch.Tensor, rows: SamplingRows) -> None:
        """Edit the logits so that drafts are accepted at the `synthetic_acceptance_rates`, if the setting is given."""
        if (rates := self.rates) is None:
            return
        req_indices, positions = rows.req_indices.long(), rows.positions.long()
        offsets = (positions + 1 - self.tables.num_tokens[req_indices]).clamp(0, len(rates) - 1)
        next_positions, next_indices = (x.roll(-1) for x in (positions, req_indices))
        is_drafted = (next_positions == positions + 1) & (next_indices == req_indices)
        drafts = self.tables.last_token_ids[req_indices, 1 + offsets].clamp(min=0).long()
        random = (positions + req_indices * 65537) * -0x61C8864680B583EB  # a hash, modulo 2^64
        random = ((random ^ (random >> 29)) * -0x40A7B892E31B1A47) >> 40 & 0xFFFFFF
        value = torch.where(random < rates[offsets], 1e4, -torch.inf).to(logits.dtype)
        old = logits.gather(1, drafts[:, None])
        logits.scatter_(1, drafts[:, None], torch.where(is_drafted, value, old[:, 0])[:, None])
