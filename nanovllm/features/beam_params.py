"""Defines the parameters of a beam search, and validates them on construction."""

from dataclasses import dataclass

from nanovllm.sampling_params import MAX_INT
from nanovllm.utils.checks import check_bool, check_fields, check_int, check_real, checked, checks_names


@checks_names
@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """The parameters of `LLM.beam_search`.

    beam_width: the number of beams in each step, and the number of answers to return. The maximum is half the
        vocabulary size.
    max_tokens: the maximum number of tokens to generate per beam.
    length_penalty: a beam's score is `cumulative_logprob / len(token_ids) ** length_penalty`.
    ignore_eos: whether beams continue after end-of-sequence ids.
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
