"""What a request may ask of its generation."""
from dataclasses import dataclass
from numbers import Integral

from nanovllm.utils.checks import check_bool, check_int, check_real

MAX_LOGPROBS = 100


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled, when it ends, and what comes with its answer; validated when made.

    temperature: logits are divided by it; 0 is greedy (and so is all below 1e-5, which float32 could not divide by).
    top_k: only so many of the most likely tokens; 0 or -1 is all.
    top_p: only the most likely tokens that together have this probability.
    min_p: only tokens that have this part of the most likely one's probability.
    seed: fixes the request's noise, whatever else is in its batch; None leaves it to the engine's `seed`.
    n: answers to the prompt, which is computed once.
    max_tokens: the most tokens to generate; the engine's `max_model_len` may end a request earlier.
    min_tokens: so many tokens come before anything can stop the request.
    ignore_eos: go on past the model's end-of-sequence ids.
    stop: strings that end the text; it is cut in front of them, or behind with `include_stop_str_in_output`.
    stop_token_ids: at most 128 ids that end a request besides the model's; the text is without them, as with strings.
    skip_special_tokens: leave special tokens out of the text.
    presence_penalty, frequency_penalty: taken off the logit of a generated token, once, and as often as it came.
    repetition_penalty: divides the logit, or multiplies a negative one, of every token of the prompt and the answer.
    logit_bias: what to add to the logits of at most 300 token ids.
    logprobs: log-probabilities of each generated token and of so many of the most likely; before all of the above.
    prompt_logprobs: the same for the prompt's tokens; such a request reads no cached prefix.

    Raises ValueError (TypeError for a value of the wrong kind) with the value and the bound.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int = 64
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self):
        for name, low, high in (
            ("temperature", 0, 1e9), ("top_p", 1e-6, 1), ("min_p", 0, 1), ("repetition_penalty", 0.01, 100),
            ("presence_penalty", -2, 2), ("frequency_penalty", -2, 2),
        ):  # fmt: skip
            check_real(name, getattr(self, name), low, high)
        for name, low, high in (("top_k", -1, 2**31 - 1), ("n", 1, 2**14), ("max_tokens", 1, None)):
            check_int(name, getattr(self, name), low, high)
        for name, high in (("seed", 2**64 - 1), ("logprobs", MAX_LOGPROBS), ("prompt_logprobs", MAX_LOGPROBS)):
            check_int(name, getattr(self, name), 0, high, optional=True)
        check_int("min_tokens", self.min_tokens, 0, min(self.max_tokens, 2**30))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        for name, kind in (("stop", str), ("stop_token_ids", Integral)):
            object.__setattr__(self, name, _tuple_of(kind, name, getattr(self, name)))
        if "" in self.stop:
            raise ValueError(f"stop={self.stop!r}: a stop string must have at least 1 character")
        if not isinstance(biases := self.logit_bias or {}, dict):
            raise TypeError(f"logit_bias={biases!r:.80}: must map token ids to numbers")
        for token_id, bias in biases.items():
            check_real(f"logit_bias[{token_id!r}]", bias, -100, 100)
        for name, ids, most in (("stop_token_ids", self.stop_token_ids, 128), ("logit_bias", biases, 300)):
            check_int(f"{name}: the number of ids", len(ids), 0, most)
            for token_id in ids:
                check_int(f"{name}: token id", token_id, 0)


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """`beam_width` beams of at most `max_tokens`; a score is divided by its length to the power `length_penalty`."""

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0

    def __post_init__(self):
        check_int("beam_width", self.beam_width, low=1, high=MAX_LOGPROBS // 2)
        check_int("max_tokens", self.max_tokens, low=1)
        check_real("length_penalty", self.length_penalty, low=-100.0, high=100.0)


def _tuple_of(kind: type, name: str, value) -> tuple:
    """A tuple of what is one value of a kind, several, or None."""
    values = () if value is None else (value,) if isinstance(value, kind) else value
    if not isinstance(values, (list, tuple, set, frozenset)) or not all(isinstance(v, kind) for v in values):
        raise TypeError(f"{name}={value!r:.80}: must be of type {kind.__name__}, or a list of those")
    return tuple(values)
