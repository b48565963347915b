"""Tracks reasoning in each step, so that other features know where the answer begins."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.engine.features import Ends, StepFeature
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence
from nanovllm.reasoning.formats import FORMATS, HARMONY
from nanovllm.reasoning.harmony import HarmonyMarkers
from nanovllm.reasoning.stage import Markers

if TYPE_CHECKING:
    from nanovllm.requests.input_processor import InputProcessor
    from nanovllm.requests.request import CompletionRequest


class ReasoningStage(StepFeature):
    """Stores a `Reasoning` for each sequence. The `Reasoning` processes each token when the token reaches the host."""

    @classmethod
    def attach(cls, request: "CompletionRequest", processor: "InputProcessor") -> None:
        markers = markers_of(request.params.reasoning_parser, processor)
        for seq in request.group:
            seq.feature_state["reasoning"] = markers.start(request.group[0].prompt_token_ids)
            seq.is_watched = True

    @classmethod
    def after_step(cls, step: ScheduledStep, arrived: Mapping[int, Sequence], ends: Ends, result: Any) -> None:
        for seq in arrived.values():
            if (reasoning := seq.feature_state.get("reasoning")) is not None:
                reasoning.take(seq.token_ids[-1:])


def markers_of(name: str, processor: "InputProcessor") -> Markers | HarmonyMarkers:
    """Return the markers of the format `name`. `processor` caches them."""
    form = FORMATS[name]
    make = HarmonyMarkers if form is HARMONY else Markers
    if form not in processor.helpers:
        with processor.tokenizer_lock:
            processor.helpers[form] = make(form, processor.tokenizer, processor.all_token_bytes)
    return processor.helpers[form]
