"""What a request may ask of its generation."""
from dataclasses import dataclass

from nanovllm.utils.checks import check_int, check_real


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it ends; validated when made.

    temperature: logits are divided by it; 0 is greedy (and so is all below 1e-5, which float32 could not divide by).
    max_tokens: the most tokens to generate; the engine's `max_model_len` may end a request earlier.
    ignore_eos: go on past the model's end-of-sequence ids.
    seed: fixes the request's noise, whatever else is in its batch; None leaves it to the engine's `seed`.

    Raises ValueError (TypeError for a value of the wrong kind) with the value and the bound.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    seed: int | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self):
        check_real("temperature", self.temperature, low=0.0)
        check_int("max_tokens", self.max_tokens, low=1)
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos={self.ignore_eos!r}: must be True or False")
        if self.seed is not None:
            check_int("seed", self.seed, low=0, high=2**64 - 1)
