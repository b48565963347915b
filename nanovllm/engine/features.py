"""The interface of features, which only some requests use. Each feature is a class in a separate file.

The table FEATURES lists them. The first request that asks for a feature imports it. On CUDA the start imports all,
because graphs contain their edits of logits.
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

Arrays = Mapping[str, Any]  # by name; in a Batch they are int32, NumPy's on the host and PyTorch's on the device
Ends = dict[Sequence, tuple[str, int | str | None]]  # finish reason and stop reason of the sequences that end


class StepFeature:
    """The hooks of a feature. In this base class only `attach` and `prepare` do something.

    The class methods run in rank 0's process and know sequences. Each rank also makes one object of the class, which
    knows the device and batches but no sequences.
    """

    fields: tuple[str, ...] = ()  # numeric parameters of a registered feature; 0: not asked for

    @classmethod
    def attach(cls, request: "CompletionRequest", processor: "InputProcessor") -> None:
        """Check a new request in its caller's thread, and set up its sequences. ValueError or TypeError refuses it.

        The feature keeps its state of a sequence in `seq.feature_state[name]`, which is None before. It may also set:
        `columns`, numbers for the device by column name (done here for `fields`); `is_watched`, so that `after_step`
        sees each token; `waits_for_token`, so that no further token is decoded before `after_step` has seen it; and
        `skips_prefix_hits`.
        """
        for seq in request.group:
            seq.columns |= {name: float(getattr(seq.params, name, 0)) for name in cls.fields}

    @classmethod
    def prepare(cls, step: ScheduledStep) -> Arrays | None:
        """Arrays of int32 numbers, or lists of equally long arrays, for a step; None if it needs none.

        Each rank makes the feature's object when its first arrays arrive. So a feature that edits logits returns a dict
        when there are new sequences, even an empty one.
        """
        return {} if step.new_seqs and cls.edit_logits is not StepFeature.edit_logits else None

    @classmethod
    def max_words(cls, config: "Config") -> int:
        """An upper bound of the int32 words that the arrays of a step take, plus 4 for each array."""
        return 0

    def __init__(self, runner: "ModelRunner"):
        """Allocate the feature's memory on the runner's device. On CUDA this comes before graphs are captured."""

    def upload(self, arrays: Arrays) -> None:
        """Take the arrays of `prepare`, now on the device, before the model runs. No graph contains this."""

    def edit_logits(self, logits: Any, rows: Any) -> None:
        """Edit logits [S, vocabulary] in place; `rows` are layers.sampler.SamplingRows.

        CUDA graphs contain this. So it must not wait for the device, and it runs even if no request asks for it.
        """

    def after_forward(self, arrays: Arrays, output: Any) -> Any:
        """Compute more from a step's ForwardOutput and the `arrays` of `prepare`. No graph contains this.

        Every rank calls it if `prepare` has returned arrays. It returns an object with a method `result(step)`, which
        rank 0 calls when the device has finished, or None.
        """

    @classmethod
    def after_step(cls, step: ScheduledStep, arrived: Mapping[int, Sequence], ends: Ends, result: Any) -> None:
        """Look at the new tokens, the last ones of `seq.token_ids`, and add the sequences that end to `ends`.

        `arrived` are the watched sequences that have not ended, by the index of their token in StepResult.token_ids.
        `result` is the return value of `result(step)` (see `after_forward`), or None.

        Other threads do long work, with `seq.awaited` as its Future. The sequence is held until the Future is done;
        its result is a value of `Ends`, or None. The sequence must have `waits_for_token`.
        """

    @classmethod
    def forget(cls, seq: Sequence) -> None:
        """Free the feature's state of an ended sequence, because the sequence lives until garbage is collected."""


_class_of = cache(resolve_name)  # every step with features asks


class Feature(NamedTuple):
    """Where a feature is, and the parameters that ask for it."""

    home: str | type[StepFeature]  # "module:Class" within nanovllm, or the class itself
    fields: Mapping[str, Any]  # parameter -> its value if the feature is not asked for

    def is_asked_for(self, params: SamplingParams) -> bool:
        return any(getattr(params, name, default) != default for name, default in self.fields.items())

    def load(self) -> type[StepFeature]:
        return _class_of(f"nanovllm.{self.home}") if isinstance(self.home, str) else self.home


def _feature(home: str, *names: str) -> Feature:
    return Feature(home, {name: SamplingParams.__dataclass_fields__[name].default for name in names})


# by name, in the order in which features check requests, edit logits and look at tokens
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
