"""Implements structured outputs and reasoning budgets as a step feature."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.engine.features import Ends, StepFeature
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence
from nanovllm.structured_outputs.constraint import update_fast
from nanovllm.structured_outputs.grammars import constrain

if TYPE_CHECKING:
    from nanovllm.requests.input_processor import InputProcessor
    from nanovllm.requests.request import CompletionRequest

MAX_SECONDS = 0.02  # the time that a step may spend on masks; other threads compute the remaining masks


class StructuredOutputs(StepFeature):
    """Sets a `Constraint` as the `token_mask` of each sequence. `features.logit_edits` copies masks to the device."""

    masks_tokens = True

    @classmethod
    def attach(cls, request: "CompletionRequest", processor: "InputProcessor") -> None:
        constrain(request.group, processor)
        for seq in request.group:
            # a grammar must read each token before it can compute the mask for the next token
            seq.waits_for_token |= seq.params.structured_outputs is not None
            seq.token_limit = seq.token_mask.token_limit()

    @classmethod
    def after_step(cls, step: ScheduledStep, arrived: Mapping[int, Sequence], ends: Ends, result: Any) -> None:
        """Compute the next mask of each sequence that got a token.

        A sequence with an empty mask ends with the finish reason "error". While another thread computes a sequence's
        mask, the sequence takes part in no step.
        """
        seqs = [seq for seq in arrived.values() if "structured_outputs" in seq.feature_state and seq not in ends]
        constraints = [seq.token_mask for seq in seqs]
        # if a sequence already awaits a mask, this step has given it several tokens
        idle = [constraint for seq, constraint in zip(seqs, constraints) if seq.awaited is None]
        updated = {*update_fast(idle, MAX_SECONDS)}
        for seq, constraint in zip(seqs, constraints):
            if constraint not in updated:
                seq.awaited = constraint.start_update()
            elif constraint.error is not None:
                ends[seq] = "error", constraint.error
            elif not constraint.has_grammar:
                seq.token_limit = constraint.token_limit()

    @classmethod
    def forget(cls, seq: Sequence) -> None:
        seq.token_mask = None
        if seq.awaited is not None:
            seq.awaited.cancel()
