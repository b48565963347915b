"""The interface of features, such as stop strings, which only some requests use. Each feature is a class in a separate
file.

A feature is imported when a request first asks for it or, on CUDA, at startup, because CUDA graphs contain its edits.
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
    """Defines the hooks of a feature.

    The class methods, except `max_words`, run on rank 0, and the instance methods on every rank.
    """

    fields: tuple[str, ...] = ()  # numeric parameters of a registered feature; 0 means not asked for
    masks_tokens = False  # whether `attach` sets `token_mask`; the fields then also ask for the feature `logit_edits`

    @classmethod
    def attach(cls, request: "CompletionRequest", processor: "InputProcessor") -> None:
        """Check a request in the caller's thread, and set up the request's sequences.

        Raise ValueError or TypeError to reject the request. The feature's state for a sequence is
        `seq.feature_state[name]`, initially None. The feature may set these attributes of a sequence:

        columns: a dict that maps column names to values for the device. The base class sets the columns listed in
            `fields`.
        is_watched: if True, `after_step` sees each token of the sequence.
        waits_for_token: if True, no token is decoded before `after_step` has seen the previous token.
        skips_prefix_hits: if True, the prompt is computed without reading the prefix cache.
        token_mask: a `TokenMask` (features/logit_edits.py), which restricts the next token.
        """
        for seq in request.group:
            seq.columns |= {name: float(getattr(seq.params, name, 0)) for name in cls.fields}

    @classmethod
    def prepare(cls, step: ScheduledStep) -> Arrays | None:
        """Return a dict of int32 arrays for a step, or None if the feature needs no arrays.

        A value of the dict may also be a list of arrays of equal length. A rank creates its instance of a feature when
        the feature's first arrays arrive. A feature that edits logits must return a dict (possibly empty) for each step
        with new sequences.
        """
        return {} if step.new_seqs and cls.edit_logits is not StepFeature.edit_logits else None

    @classmethod
    def max_words(cls, config: "Config") -> int:
        """Return the maximum number of int32 words in a step's arrays, counting 4 extra words per array."""
        return 0

    def __init__(self, runner: "ModelRunner"):
        """Allocate memory on the runner's device. On CUDA, the constructor runs before graphs are captured."""

    def upload(self, arrays: Arrays) -> None:
        """Receive the arrays from `prepare` on the device. This method runs before the model, outside CUDA graphs."""

    def edit_logits(self, logits: Any, rows: Any) -> None:
        """Edit logits [S, vocabulary] in place. `rows` is a `layers.sampler.SamplingRows`.

        CUDA graphs contain this method, so the method must not wait for the device. `edit_logits` also runs when no
        request needs the feature.
        """

    def after_forward(self, arrays: Arrays, output: Any) -> Any:
        """Compute the feature's results from a ForwardOutput and the arrays from `prepare`, outside CUDA graphs.

        Every rank calls this method if `prepare` returned arrays. Return None, or an object with a method
        `result(step)`. Rank 0 calls `result` when the device has finished the step.
        """

    @classmethod
    def after_step(cls, step: ScheduledStep, arrived: Mapping[int, Sequence], ends: Ends, result: Any) -> None:
        """Inspect the new tokens, and store in `ends` the sequences that must end.

        `arrived` maps the index of each new token in `StepResult.token_ids` to the token's sequence. `arrived` leaves
        out sequences that are not watched or have already ended. The new token is also the last element of
        `seq.token_ids`, unless the sequence pauses after each token. `result` is the return value of `result(step)`, or
        None (see `after_forward`).

        If a feature's work takes long, the feature does it in another thread, and stores the work's Future in
        `seq.awaited`. The Future's result is a pair (finish reason, stop reason), or None if the sequence continues. A
        sequence with `awaited` must also have `waits_for_token`, and is held until the Future is done.
        """

    @classmethod
    def forget(cls, seq: Sequence) -> None:
        """Free the feature's data for an ended sequence, even if the sequence object still exists."""


_class_of = cache(resolve_name)  # cached, because every step with features needs it


class Feature(NamedTuple):
    """The location of a feature's class, and the request parameters that ask for the feature."""

    home: str | type[StepFeature]  # "module:Class" within nanovllm, or the class itself
    defaults: Mapping[str, Any]  # parameter -> its value when the feature is not asked for

    def is_asked_for(self, params: SamplingParams) -> bool:
        return any(getattr(params, name, default) != default for name, default in self.defaults.items())

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
    "reasoning": _feature("reasoning.reasoning_feature:ReasoningStage", "reasoning_parser"),  # used by the next two
    "structured_outputs": _feature(
        "structured_outputs.structured_feature:StructuredOutputs", "structured_outputs", "thinking_token_budget"
    ),
    "stop_strings": _feature("features.stop_strings:StopStrings", "stop"),
    "spec_decode": _feature("spec_decode.speculation:Speculation"),  # asked for by `speculative_config`
    "lora": _feature("lora.lora_feature:RequestAdapters"),  # asked for by `enable_lora`
    "vision": _feature("vision.image_feature:RequestImages"),  # asked for by prompts with images
}
