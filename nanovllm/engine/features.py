"""The interface of features, which only some requests use. Each feature is a class in a separate file.

The table FEATURES lists all features. The first request that asks for a feature imports it. On CUDA, all are imported
at startup, because CUDA graphs contain their logit edits.
"""

from collections.abc import Mapping
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.requests.input_processor import InputProcessor
    from nanovllm.requests.request import CompletionRequest

Arrays = Mapping[str, Any]  # by name; a Batch contains int32 arrays: NumPy's on the host, PyTorch's on the device
Ends = dict[Sequence, tuple[str, int | str | None]]  # finish reason and stop reason of the sequences that end


class StepFeature:
    """The hooks of a feature. In this base class, most of them do nothing.

    The class methods run on rank 0 and deal with sequences. Each rank also creates an instance, which deals with the
    device and batches only.
    """

    fields: tuple[str, ...] = ()  # numeric parameters of a registered feature; 0 means not asked for

    @classmethod
    def attach(cls, request: "CompletionRequest", processor: "InputProcessor") -> None:
        """Check a request in its caller's thread, and set up its sequences. Raise ValueError or TypeError to reject it.

        The feature stores its state for a sequence in `seq.feature_state[name]`, which is initially None. It may set:
        `columns`, numbers for the device by column name (this base method fills in `fields`); `is_watched`, so that
        `after_step` sees each token; `waits_for_token`, so that no token is decoded before `after_step` has seen the
        previous one; and `skips_prefix_hits`.
        """
        for seq in request.group:
            seq.columns |= {name: float(getattr(seq.params, name, 0)) for name in cls.fields}

    @classmethod
    def prepare(cls, step: ScheduledStep) -> Arrays | None:
        """Return int32 arrays, or lists of arrays of equal length, for a step. None if the feature needs none.

        Each rank creates its instance of a feature when the first arrays arrive. So a feature that edits logits returns
        a dict when there are new sequences, even an empty dict.
        """
        return {} if step.new_seqs and cls.edit_logits is not StepFeature.edit_logits else None

    @classmethod
    def max_words(cls, config: "Config") -> int:
        """Return an upper bound of the int32 words in the arrays of a step, plus 4 for each array."""
        return 0

    def __init__(self, runner: "ModelRunner"):
        """Allocate the feature's memory on the runner's device. On CUDA, this runs before graphs are captured."""

    def upload(self, arrays: Arrays) -> None:
        """Receive the arrays of `prepare` on the device before the model runs. No CUDA graph contains this."""

    def edit_logits(self, logits: Any, rows: Any) -> None:
        """Edit logits [S, vocabulary] in place; `rows` are layers.sampler.SamplingRows.

        CUDA graphs contain this, so it must not wait for the device, and it runs even if no request needs it.
        """

    def after_forward(self, arrays: Arrays, output: Any) -> Any:
        """Compute further results from a ForwardOutput and `prepare`'s arrays. No CUDA graph contains this.

        Every rank calls this if `prepare` returned arrays. Return None, or an object whose `result(step)` is called on
        rank 0 when the device has finished.
        """

    @classmethod
    def after_step(cls, step: ScheduledStep, arrived: Mapping[int, Sequence], ends: Ends, result: Any) -> None:
        """Inspect new tokens, which are last in `seq.token_ids`, and add the sequences that must end to `ends`.

        `arrived` contains the watched sequences that have not ended, by the index of their token in
        StepResult.token_ids. `result` is the return value of `result(step)` (see `after_forward`), or None.

        Long work belongs in another thread, with its Future in `seq.awaited`. The sequence, which must have
        `waits_for_token`, is held until the Future is done. The Future's result is a value of `Ends`, or None.
        """

    @classmethod
    def forget(cls, seq: Sequence) -> None:
        """Free the feature's state of an ended sequence, which itself lives until it is garbage-collected."""


_class_of = cache(resolve_name)  # cached, because every step with features needs it


class Feature(NamedTuple):
    """The location of a feature, and the parameters that ask for it."""

    home: str | type[StepFeature]  # "module:Class" within nanovllm, or the class itself
    fields: Mapping[str, Any]  # parameter -> its value when the feature is not asked for

    def is_asked_for(self, params: SamplingParams) -> bool:
        return any(getattr(params, name, default) != default for name, default in self.fields.items())

    def load(self) -> type[StepFeature]:
        return _class_of(f"nanovllm.{self.home}") if isinstance(self.home, str) else self.home


def _feature(home: str, *names: str) -> Feature:
    return Feature(home, {name: SamplingParams.__dataclass_fields__[name].default for name in names})


# in the order in which features check requests, edit logits and look at tokens
FEATURES = {
    "logit_edits": _feature(
        "features.logit_edits:LogitEdits",
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
        *("min_tokens", "bad_words", "allowed_token_ids", "structured_outputs", "thinking_token_budget"),
    ),
    "logprobs": _feature("features.logprobs:TokenLogprobs", "logprobs", "prompt_logprobs"),
    "reasoning": _feature("reasoning.reasoning_feature:ReasoningStage", "reasoning_parser"),  # the next two use it
    "structured_outputs": _feature(
        "structured_outputs.structured_feature:StructuredOutputs", "structured_outputs", "thinking_token_budget"
    ),
    "stop_strings": _feature("features.stop_strings:StopStrings", "stop"),
    "spec_decode": _feature("spec_decode.speculation:Speculation"),  # asked for by `speculative_config`
}
