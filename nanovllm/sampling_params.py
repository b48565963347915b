"""Defines the sampling parameters of a request. The parameters are validated on construction."""

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass

from nanovllm.reasoning.formats import FORMATS
from nanovllm.utils.checks import check_bool, check_choice, check_fields, check_int, check_real, checked, checks_names
from nanovllm.utils.collection_checks import check_collections

# parameters with several values, which most requests do not set
COLLECTIONS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias", "structured_outputs")
MAX_INT = 2**63 - 1  # for numbers that only the model bounds: they must fit into a message to another process


@checks_names
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Specifies how a request is sampled, when it ends, and what its output contains.

    Values are validated on construction. Only the first three parameters can be positional arguments.

    temperature: the divisor of the logits. At 0 (or below 1e-5), the most likely token is always chosen.
    max_tokens: maximum number of tokens to generate. `max_model_len` also applies. In Python, None leaves only
        `max_model_len`.
    ignore_eos: do not stop at the model's end-of-sequence ids.
    top_k: sample only from the k most likely tokens, with the lower ids among equals. 0 or -1 keep all tokens.
    top_p: sample only from the smallest set of most likely tokens whose total probability is at least this value.
    min_p: sample only from tokens whose probability is at least this fraction of the most likely token's probability.
    seed: the seed of the sampling noise (nanovllm/docs/sampling.md says what it repeats). By default, or with -1, the
        seed is derived from the engine's seed, or random if the engine has no seed.
    n: the number of answers. The prompt is computed once for all answers.
    min_tokens: until the answer has this many tokens, only `max_tokens` can end the answer.
    stop: strings that end the answer. The returned text ends before the stop string.
    stop_token_ids: at most 128 ids that end the answer, as end-of-sequence ids do. The text ends before
        such an id, unless `include_stop_str_in_output` is set.
    bad_words: strings that must not be generated, with or without a space before them.
    allowed_token_ids: the only ids that may be generated.
    include_stop_str_in_output: keep the stop string or stop token at the end of the text.
    skip_special_tokens: omit special tokens from the text.
    detokenize: decode the answer to text. If False, outputs have no text, and `stop` is refused.
    presence_penalty: a number from -2 to 2, subtracted from the logits of tokens that the answer already contains.
    frequency_penalty: a number from -2 to 2, subtracted from a token's logit for each occurrence in the answer.
    repetition_penalty: a number from 0.01 to 100, which divides the positive logits and multiplies the negative logits
        of tokens in the prompt or answer.
    logit_bias: maps up to 300 token ids to numbers from -100 to 100, which are added to their logits.
    structured_outputs: the required form of the answer: a dict with one key, "json" (a JSON schema, as a dict or text),
        "json_object" (True), "regex", "choice" (a list of strings) or "grammar". See
        nanovllm/docs/structured-outputs.md.
    reasoning_parser: how the model marks its reasoning, to which `structured_outputs` and `stop` do not apply: "qwen3",
        "deepseek_r1", "mistral" or another name in nanovllm/docs/reasoning.md.
    thinking_token_budget: maximum number of reasoning tokens, after which the engine forces the end marker. None or
        -1 means no limit. Needs `reasoning_parser`.
    logprobs: how many of the most likely tokens get a log-probability at each position, in addition to the generated
        token; -1 means all tokens. See the setting `logprobs_mode`.
    prompt_logprobs: like `logprobs`, but for prompt tokens, always from the model's own logits. The request does not
        read the prefix cache.

    Raises ValueError, or TypeError for a value of the wrong type. The error states the value and what is allowed.
    Limits that depend on the model are checked when a request is made.
    """

    temperature: float = checked(1.0, check_real, low=0)
    max_tokens: int | None = 64
    ignore_eos: bool = checked(False, check_bool)
    _: KW_ONLY
    top_k: int = checked(0, check_int, low=-1, high=2**31 - 1)
    top_p: float = checked(1.0, check_real, low=1e-6, high=1)
    min_p: float = checked(0.0, check_real, low=0, high=1)
    seed: int | None = checked(None, check_int, low=-1, high=2**64 - 1)
    n: int = checked(1, check_int, low=1, high=2**14)
    min_tokens: int = checked(0, check_int, low=0)
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    bad_words: str | Sequence[str] | None = ()
    allowed_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = checked(False, check_bool)
    skip_special_tokens: bool = checked(True, check_bool)
    detokenize: bool = checked(True, check_bool)
    presence_penalty: float = checked(0.0, check_real, low=-2, high=2)
    frequency_penalty: float = checked(0.0, check_real, low=-2, high=2)
    repetition_penalty: float = checked(1.0, check_real, low=0.01, high=100)
    logit_bias: dict[int, float] | None = None
    structured_outputs: dict[str, object] | None = None
    reasoning_parser: str | None = checked(None, check_choice, choices=(*FORMATS,))
    thinking_token_budget: int | None = checked(None, check_int, low=-1, high=2**30)
    logprobs: int | None = checked(None, check_int, low=-1, high=MAX_INT)
    prompt_logprobs: int | None = checked(None, check_int, low=-1, high=MAX_INT)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_tokens is not None:
            _set(self, "max_tokens", check_int("max_tokens", self.max_tokens, 1, MAX_INT))
        # prompt length + min_tokens must fit into an int32
        check_int("min_tokens", self.min_tokens, 0, min(self.max_tokens or 2**30, 2**30))
        for name in ("seed", "thinking_token_budget"):
            if getattr(self, name) == -1:
                _set(self, name, None)
        defaults = self.__dataclass_fields__
        if given := [name for name in COLLECTIONS if getattr(self, name) is not defaults[name].default]:
            check_collections(self, given)

    @property
    def has_filters(self) -> bool:
        """Whether `top_k`, `top_p` or `min_p` might exclude tokens from sampling."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def check_token_ids(name: str, token_ids: Iterable[int] | None, vocab_size: int) -> None:
    """Raise ValueError if a token id is outside the vocabulary."""
    for token_id in token_ids or ():
        if not 0 <= token_id < vocab_size:
            bound = f"(vocab_size={vocab_size}): must be in 0 to {vocab_size - 1}"
            raise ValueError(f"{name}: token id {token_id} is out of vocabulary {bound}")


def _set(params, name: str, value) -> None:
    object.__setattr__(params, name, value)  # the dataclasses are frozen
