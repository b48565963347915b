"""Structured outputs, and budgets of reasoning, as a feature of a step."""

from collections.abc import Mapping
from typing import Any

from nanovllm.engine.features import Ends, StepFeature
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence
from nanovllm.structured_outputs.constraint import update
from nanovllm.structured_outputs.grammars import constrain


class StructuredOutputs(StepFeature):
    """A sequence keeps its Constraint, whose mask `features.logit_edits` brings to the device."""

    @classmethod
    def attach(cls, request: Any, processor: Any) -> None:
        constrain(request.group, processor)
        for seq in request.group:
            # a grammar needs each token before the next one
            seq.is_watched, seq.waits_for_token = True, seq.params.structured_outputs is not None
            seq.token_limit = seq.feature_state["structured_outputs"].token_limit()

    @classmethod
    def after_step(cls, step: ScheduledStep, arrived: Mapping[int, Sequence], ends: Ends, result: Any) -> None:
        """Make the masks of sequences that have got a token. Those whose mask is empty end with an "error"."""
        seqs = [seq for seq in arrived.values() if "structured_outputs" in seq.feature_state and seq not in ends]
        update([seq.feature_state["structured_outputs"] for seq in seqs])
        for seq in seqs:
            constraint = seq.feature_state["structured_outputs"]
            if constraint.error is not None:
                ends[seq] = "error", constraint.error
            elif not seq.waits_for_token:
                seq.token_limit = constraint.token_limit()
