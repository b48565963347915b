"""What a request may ask of its generation, and the checks of it that need to know the model."""

from dataclasses import dataclass
from numbers import Integral

from nanovllm.utils.checks import check_bool, check_int, check_real

MAX_BIASES = 512  # of a request, with the stop ids that min_tokens rules out
MAX_BAD_WORDS = 128  # sequences of tokens that a request rules out
MAX_BAD_WORD_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled, when it ends, and what comes with its answer; validated when made.

    temperature: logits are divided by it; 0 is greedy (and so is all below 1e-5, which float32 could not divide by).
    top_k: only so many of the most likely tokens, of equally likely ones those of lower id; 0 or -1 is all.
    top_p: only the fewest of the most likely tokens that together have this probability.
    min_p: only tokens that have this part of the most likely one's probability.
    seed: fixes the request's noise, whatever else is in its batch; None or -1 leaves it to the engine's `seed`.
    n: answers to the prompt, which is computed once.
    max_tokens: the most tokens to generate; None is up to the engine's `max_model_len`, which always ends a request.
    min_tokens: so many tokens come before anything can stop the request.
    ignore_eos: go on past the model's end-of-sequence ids.
    stop: strings that end the text; it is cut in front of them, or behind with `include_stop_str_in_output`.
    stop_token_ids: at most 128 ids that end a request besides the model's; the text is without them, as with strings.
    bad_words: strings that are not generated, as the tokenizer writes them with and without a space in front.
    allowed_token_ids: the only ids that may be generated.
    skip_special_tokens: leave special tokens out of the text.
    detokenize: whether the answer has text; without it there are no stop strings.
    presence_penalty, frequency_penalty: taken off the logit of a generated token, once, and as often as it came.
    repetition_penalty: divides the logit, or multiplies a negative one, of every token of the prompt and the answer.
    logit_bias: what to add to the logits of at most 300 token ids.
    logprobs: log-probabilities of each generated token and of so many of the most likely, -1 for all tokens; those of
        the model, before all of the above.
    prompt_logprobs: the same for the prompt's tokens; such a request reads no cached prefix.

    Raises ValueError (TypeError for a value of the wrong kind) with the value and the bound. What depends on the model
    is checked by `check_request`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 64
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | tuple[str, ...] | None = ()
    stop_token_ids: tuple[int, ...] | None = ()
    bad_words: str | tuple[str, ...] | None = ()
    allowed_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self):
        for name, low, high in (
            ("temperature", 0, 1e9),
            ("top_p", 1e-6, 1),
            ("min_p", 0, 1),
            ("repetition_penalty", 0.01, 100),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
        ):
            _set(self, name, check_real(name, getattr(self, name), low, high))
        for name, low, high in (("top_k", -1, 2**31 - 1), ("n", 1, 2**14)):
            _set(self, name, check_int(name, getattr(self, name), low, high))
        for name, low, high in (
            ("max_tokens", 1, None),
            ("seed", -1, 2**64 - 1),
            ("logprobs", -1, None),
            ("prompt_logprobs", -1, None),
        ):
            _set(self, name, check_int(name, getattr(self, name), low, high, optional=True))
        _set(self, "seed", None if self.seed == -1 else self.seed)
        most = 2**30 if self.max_tokens is None else min(self.max_tokens, 2**30)
        _set(self, "min_tokens", check_int("min_tokens", self.min_tokens, 0, most))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            check_bool(name, getattr(self, name))
        for name in ("stop", "bad_words"):
            _set(self, name, _strings(name, getattr(self, name)))
        if any(not word.strip() for word in self.bad_words):
            raise ValueError(f"bad_words={self.bad_words!r:.80}: a bad word must have a character that is no space")
        if self.stop and not self.detokenize:
            raise ValueError(f"detokenize=False: must be True with stop={self.stop!r:.80}, which ends the text")
        for name, least, most in (("stop_token_ids", 0, 128), ("allowed_token_ids", 1, None)):
            if (ids := getattr(self, name)) is not None or least == 0:
                _set(self, name, _token_ids(name, _tuple_of(Integral, name, ids), least, most))
        if not isinstance(biases := self.logit_bias or {}, dict):
            raise TypeError(f"logit_bias={biases!r:.80}: must map token ids to numbers")
        values = [check_real(f"logit_bias[{token_id!r}]", bias, -100, 100) for token_id, bias in biases.items()]
        _set(self, "logit_bias", dict(zip(_token_ids("logit_bias", tuple(biases), 0, 300), values)) or None)


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """`beam_width` beams of at most `max_tokens`; a score is divided by its length to the power `length_penalty`. With
    `ignore_eos` no beam ends before that.

    The vocabulary must hold twice as many tokens as there are beams, which `check_beams` checks.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    ignore_eos: bool = False

    def __post_init__(self):
        check_bool("ignore_eos", self.ignore_eos)
        for name in ("beam_width", "max_tokens"):
            _set(self, name, check_int(name, getattr(self, name), low=1))
        # no length to this power is too large for a float
        _set(self, "length_penalty", check_real("length_penalty", self.length_penalty, low=-10, high=10))


def early_stops(params: SamplingParams, eos_token_ids: frozenset[int]) -> set[int]:
    """The ids that would end a request before it has min_tokens."""
    if not params.min_tokens:
        return set()
    return {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}


def check_request(
    params: SamplingParams,
    vocab_size: int,
    eos_token_ids: frozenset[int],
    max_logprobs: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> None:
    """ValueError for what is right in itself, but not of this model. `bad_words` are what `bad_word_token_ids` made.

    At most `max_logprobs` log-probabilities of a token are given, or with -1 as many as there are tokens.
    """
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        for token_id in (min(ids), max(ids)) if (ids := getattr(params, name)) else ():
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"{name}: token id {token_id} is outside of the vocabulary (0 to {vocab_size - 1})")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name) or 0
        check_int(name, value, -1, vocab_size)
        if max_logprobs >= 0 and (vocab_size if value < 0 else value) > max_logprobs:
            raise ValueError(f"{name}={value}: must be at most max_logprobs={max_logprobs} (-1 is all tokens)")
    stops = early_stops(params, eos_token_ids)
    what = "logit_bias, stop_token_ids and the model's eos ids with min_tokens: their number"
    check_int(what, len(params.logit_bias or ()) + len(stops), 0, MAX_BIASES)
    never = stops | {word[0] for word in bad_words if len(word) == 1}
    if (ids := params.allowed_token_ids) and never.issuperset(ids):
        raise ValueError(f"allowed_token_ids={ids!r:.80}: bad_words and min_tokens must leave at least 1 of them")


def check_beams(params: BeamSearchParams, vocab_size: int) -> None:
    """ValueError where a step of the search would look at more tokens than there are."""
    check_int("beam_width", params.beam_width, 1, vocab_size // 2)


def bad_word_token_ids(tokenizer, words: tuple[str, ...], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The token ids of words as they stand at the beginning of a text, and behind a space, each once.

    ValueError for more than MAX_BAD_WORDS of those, or one of more than MAX_BAD_WORD_TOKENS.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            check_int(f"bad_words: the number of tokens of {text!r:.80}", len(ids), 1, MAX_BAD_WORD_TOKENS)
            if max(ids) >= vocab_size:
                raise ValueError(f"bad_words: token id {max(ids)} of {text!r:.80} is outside of the vocabulary")
            found[ids] = None
    check_int("bad_words: the number of words, with and without a space in front,", len(found), 0, MAX_BAD_WORDS)
    return tuple(found)


def _set(params, name: str, value) -> None:
    object.__setattr__(params, name, value)  # they are frozen for all others


def _strings(name: str, value) -> tuple[str, ...]:
    strings = _tuple_of(str, name, value)
    for string in strings:
        if not string:
            raise ValueError(f"{name}={strings!r:.80}: a string must have at least 1 character")
        if not string.isascii() and any("\ud800" <= character <= "\udfff" for character in string):
            raise ValueError(f"{name}={string!r:.80}: holds half of a surrogate pair, which is no character")
    return strings


def _token_ids(name: str, ids: tuple, least: int, most: int | None) -> tuple[int, ...]:
    check_int(f"{name}: the number of ids", len(ids), least, most)
    return tuple([check_int(f"{name}: token id", token_id, 0) for token_id in ids])


def _tuple_of(kind: type, name: str, value) -> tuple:
    """A tuple of what is one value of a kind, several, or None."""
    value = value.tolist() if hasattr(value, "tolist") else value  # of an array or a tensor
    values = () if value is None else (value,) if isinstance(value, kind) else value
    if not isinstance(values, (list, tuple, set, frozenset, range)) or not all(isinstance(v, kind) for v in values):
        what = "a string" if kind is str else "an integer"
        raise TypeError(f"{name}={value!r:.80}: must be {what}, or a list of those")
    return tuple(values)
