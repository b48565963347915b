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

    temperature: the logits are divided by it; 0 is greedy, and so is anything below 1e-5.
    max_tokens: maximum number of tokens to generate; the engine's `max_model_len` is always a bound too.
    ignore_eos: do not end at the model's end-of-sequence ids.
    top_k: sample from the k most likely tokens only; of equally likely tokens the lower id comes first. 0 or -1: all.
    top_p: sample from the smallest set of most likely tokens that together have at least this probability.
    min_p: sample from tokens with at least this fraction of the most likely token's probability.
    seed: with it the noise of a draw does not depend on the other requests of a batch. The logits do in their last bits
        on a GPU, whose kernels differ by the number of rows, so that a token may differ where two are nearly equally
        likely. None or -1: derived from the engine's `seed`, or random if there is none.
    n: the number of answers; the prompt is computed once.
    min_tokens: nothing but `max_tokens` ends the request before it has generated this many tokens.
    stop: strings that end the request; the text is cut before them, or after them with `include_stop_str_in_output`.
    stop_token_ids: at most 128 ids that end the request like the model's own; cut from the text like `stop`.
    bad_words: strings that are not generated, tokenized both with and without a space before them.
    allowed_token_ids: the only ids that may be generated.
    include_stop_str_in_output: the text ends after the stop string or stop token, not before it.
    skip_special_tokens: leave special tokens out of the text.
    detokenize: decode the answer to text; False: no text, and no stop strings.
    presence_penalty: subtracted from the logits of tokens that were generated.
    frequency_penalty: the same, times how often each was generated.
    repetition_penalty: for tokens in the prompt or the answer, positive logits are divided by it, others multiplied.
    logit_bias: added to the logits of at most 300 token ids.
    structured_outputs: the form of the answer: a dict with one key, which is "json" (a JSON schema, as a dict or text),
        "json_object" (True), "regex" (of the whole answer, in the syntax of Rust's regex crate), "choice" (a list of
        strings) or "grammar" (llguidance's variant of Lark). An answer that ends by itself has this form. Needs
        llguidance: `pip install 'nano-vllm[serve]'`. docs/structured-outputs.md has the rest.
    reasoning_parser: how the model marks what it thinks before it answers, by the name of vLLM's parser: "qwen3",
        "deepseek_r1", "mistral" and others. `structured_outputs` and `stop` then hold for the answer alone.
    thinking_token_budget: maximum number of tokens that it thinks; then the end of the reasoning is forced. None or -1:
        no bound. Needs `reasoning_parser`.
    logprobs: return the log-probability of each generated token and of this many of the most likely ones (-1 is all).
        They are the model's own, before penalties, temperature and filters, unless `logprobs_mode` says otherwise.
    prompt_logprobs: the same for the tokens of the prompt, always the model's own; such a request does not read the
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
