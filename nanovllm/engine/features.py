"""The seam for what only some requests use: a feature is a class in a file of its own.

The core finds features in the table FEATURES. The first request that asks for a feature imports it; on CUDA the start
imports all, as graphs contain their edits of logits.
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

Arrays = Mapping[str, Any]  # by name; those of a Batch are int32, NumPy's on the host and PyTorch's on the device
Ends = dict[Sequence, tuple[str, int | str | None]]  # finish reason and stop reason of the sequences that end


class StepFeature:
    """The hooks of a feature. Except for `attach` and `prepare`, they do nothing here.

    The class methods run in rank 0's process, and know sequences. Each rank makes one object, which knows its device
    and batches, and no sequences.
    """

    fields: tuple[str, ...] = ()  # of a registered feature: its numeric parameters; 0: not asked for

    @classmethod
    def attach(cls, request: "CompletionRequest", processor: "InputProcessor") -> None:
        """Check a new requests.request.Request, in the thread of its caller: ValueError or TypeError refuses it.

        `seq.feature_state[name]`, None so far, has what the feature keeps of a sequence. It may set more: `columns`,
        numbers for the device by the name of their column, which for `fields` is done here; `is_watched`, so that
        `after_step` sees each of its tokens; `waits_for_token`, so that it decodes no token before that; and
        `skips_prefix_hits`.
        """
        for seq in request.group:
            seq.columns |= {name: float(getattr(seq.params, name, 0)) for name in cls.fields}

    @classmethod
    def prepare(cls, step: ScheduledStep) -> Arrays | None:
        """Arrays of int32 numbers, or lists of equally long ones, for a step; None if it needs none.

        Each rank makes the feature's object when the first arrays arrive. So a feature that edits logits returns a dict
        for new sequences, which is empty if there are no arrays.
        """
        return {} if step.new_seqs and cls.edit_logits is not StepFeature.edit_logits else None

    @classmethod
    def max_words(cls, config: "Config") -> int:
        """How many int32 words the arrays of a step take at most, plus 4 for each array; `config` is a Config."""
        return 0

    def __init__(self, runner: "ModelRunner"):
        """Allocate what it has on the device of this ModelRunner: on CUDA, before graphs are captured."""

    def upload(self, arrays: Arrays) -> None:
        """Take the arrays of `prepare`, on the device, before the model runs. No graph contains this."""

    def edit_logits(self, logits: Any, rows: Any) -> None:
        """Edit logits [S, vocabulary] in place; `rows` are layers.sampler.SamplingRows.

        CUDA graphs contain this, so it must not wait for the device, and runs whether a request asks for it or not.
        """

    def after_forward(self, arrays: Arrays, output: Any) -> Any:
        """Compute more from a step's ForwardOutput; `arrays` are those of `prepare`. No graph contains this.

        Every rank calls it, if `prepare` has returned arrays. What it returns has a method `result(step)`, which rank 0
        calls when the device has finished.
        """

    @classmethod
    def after_step(cls, step: ScheduledStep, arrived: Mapping[int, Sequence], ends: Ends, result: Any) -> None:
        """Look at the tokens of a step, the last of `seq.token_ids`, and add the sequences that end to `ends`.

        `arrived` are the watched sequences that still live, by the index of the token in StepResult.token_ids. `result`
        is what `result(step)` of `after_forward` has returned, or None.

        What takes long is done by other threads, with `seq.awaited` as its Future. The sequence is held until it is
        done; its result is a value of `Ends`, or None. The sequence must wait for its tokens (`waits_for_token`).
        """

    @classmethod
    def forget(cls, seq: Sequence) -> None:
        """Free what the feature keeps of a sequence that has ended: the sequence lives until garbage is collected."""


_class_of = cache(resolve_name)  # steps with features ask


class Feature(NamedTuple):
    """Where a feature is, and the parameters that ask for it, with the values that do not."""

    home: str | type[StepFeature]  # "module:Class" within nanovllm, or the class itself
    fields: Mapping[str, Any]

    def is_asked_for(self, params: SamplingParams) -> bool:
        return any(getattr(params, name, default) != default for name, default in self.fields.items())

    def load(self) -> type[StepFeature]:
        return _class_of(f"nanovllm.{self.home}") if isinstance(self.home, str) else self.home


def _feature(home: str, *names: str) -> Feature:
    return Feature(home, {name: SamplingParams.__dataclass_fields__[name].default for name in names})


# by name, in the order in which they check a request, edit logits and look at tokens
FEATURES = {
    "logit_edits": _feature(
        "features.logit_edits:LogitEdits",
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
        *("min_tokens", "bad_words", "allowed_token_ids", "structured_outputs", "thinking_token_budget"),
    ),
    "logprobs": _feature("features.logprobs:TokenLogprobs", "logprobs", "prompt_logprobs"),
    "reasoning": _feature("reasoning.reasoning_feature:ReasoningStage", "reasoning_parser"),  # which the next two ask
    "structured_outputs": _feature(
        "structured_outputs.structured_feature:StructuredOutputs", "structured_outputs", "thinking_token_budget"
    ),
    "stop_strings": _feature("features.stop_strings:StopStrings", "stop"),
    "spec_decode": _feature("spec_decode.speculation:Speculation"),  # asked for by `speculative_config`
}
