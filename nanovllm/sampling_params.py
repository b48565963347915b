"""The parameters of a request, which check themselves."""

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass

from nanovllm.reasoning.formats import FORMATS
from nanovllm.utils.checks import check_bool, check_choice, check_fields, check_int, check_real, checked
from nanovllm.utils.collection_checks import check_collections

# parameters with several values, of which most requests have none
COLLECTIONS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias", "structured_outputs")
MAX_INT = 2**63 - 1  # of a number whose bound is the model's: it must fit into a message to another process


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled, when it ends, and what its output contains. Validated on construction.

    The first three may be passed by position.

    temperature: the logits are divided by it. With 0, or anything below 1e-5, the most likely token is taken.
    max_tokens: maximum number of tokens to generate. The setting `max_model_len` limits the answer too. In Python, None
        leaves that as the only limit.
    ignore_eos: do not end at the model's end-of-sequence ids.
    top_k: sample from the k most likely tokens only. Of equally likely tokens, the lower id comes first. 0 or -1: all.
    top_p: sample from the smallest set of most likely tokens that together have at least this probability.
    min_p: sample from tokens with at least this fraction of the most likely token's probability.
    seed: the same seed draws the same noise in any batch; docs/sampling.md says what may still differ. Without a seed,
        or with -1, it is derived from the engine's seed, or random if there is none.
    n: the number of answers. The prompt is computed once.
    min_tokens: until the answer has this many tokens, only `max_tokens` ends it.
    stop: strings that end the answer. The text is cut before them.
    stop_token_ids: at most 128 ids that end the answer as end-of-sequence ids do. They are cut like `stop`.
    bad_words: strings that are not generated. Each is tokenized both with and without a space before it.
    allowed_token_ids: the only ids that may be generated.
    include_stop_str_in_output: the text ends after the stop string or stop token, not before it.
    skip_special_tokens: leave special tokens out of the text.
    detokenize: decode the answer to text. Without it there is no text, and `stop` is refused.
    presence_penalty: subtracted from the logits of the tokens that the answer has so far; -2 to 2.
    frequency_penalty: subtracted from the same logits once for each time that the token was generated; -2 to 2.
    repetition_penalty: for tokens in the prompt or the answer, positive logits are divided by it, and negative logits
        are multiplied by it; 0.01 to 100.
    logit_bias: a dict from at most 300 token ids to numbers from -100 to 100, which are added to their logits.
    structured_outputs: the form of the answer, as a dict with one key: "json" (a JSON schema, as a dict or text),
        "json_object" (True), "regex", "choice" (a list of strings) or "grammar". See docs/structured-outputs.md.
    reasoning_parser: how the model marks its reasoning: "qwen3", "deepseek_r1", "mistral" or another name of
        docs/reasoning.md. `structured_outputs` and `stop` then apply only to the answer after the reasoning.
    thinking_token_budget: maximum number of tokens of reasoning. Then its end is forced. None or -1: no limit. Needs
        `reasoning_parser`.
    logprobs: return the log-probability of each generated token and of this many of the most likely tokens; -1 is all.
        The setting `logprobs_mode` says of which logits.
    prompt_logprobs: the same for the tokens of the prompt, always the model's own. Such a request does not read the
        prefix cache.

    Raises ValueError (TypeError for a value of the wrong type) with the value and the bound. What depends on the model
    is checked when a request is made.
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
        _set(self, "seed", None if self.seed == -1 else self.seed)
        # prompt length + min_tokens must fit into an int32
        check_int("min_tokens", self.min_tokens, 0, min(self.max_tokens or 2**30, 2**30))
        if self.thinking_token_budget == -1:
            _set(self, "thinking_token_budget", None)
        defaults = self.__dataclass_fields__
        if given := [name for name in COLLECTIONS if getattr(self, name) is not defaults[name].default]:
            check_collections(self, given)

    @property
    def has_filters(self) -> bool:
        """Whether less likely tokens are left out before the draw."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def check_token_ids(name: str, token_ids: Iterable[int] | None, vocab_size: int) -> None:
    """ValueError for an id that is outside of the vocabulary."""
    for token_id in token_ids or ():
        if not 0 <= token_id < vocab_size:
            bound = f"(vocab_size={vocab_size}): must be in 0 to {vocab_size - 1}"
            raise ValueError(f"{name}: token id {token_id} is out of vocabulary {bound}")


def _set(params, name: str, value) -> None:
    object.__setattr__(params, name, value)  # the dataclasses are frozen
