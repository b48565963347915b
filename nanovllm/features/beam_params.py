"""The parameters of a beam search, which are validated on construction."""

from dataclasses import dataclass

from nanovllm.sampling_params import MAX_INT
from nanovllm.utils.checks import check_bool, check_fields, check_int, check_real, checked


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """The parameters of `LLM.beam_search`.

    beam_width: the number of beams and of answers; at most half the vocabulary size.
    max_tokens: maximum number of tokens to generate per beam.
    length_penalty: the score of a beam is its cumulative log-probability divided by (number of tokens **
        length_penalty).
    ignore_eos: do not end beams at end-of-sequence ids.
    """

    beam_width: int
    max_tokens: int
    # within these bounds, number of tokens ** length_penalty does not overflow a float
    length_penalty: float = checked(1.0, check_real, low=-10, high=10)
    ignore_eos: bool = checked(False, check_bool)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("beam_width", "max_tokens"):
            object.__setattr__(self, name, check_int(name, getattr(self, name), 1, MAX_INT))  # the class is frozen
