"""Cuts prompts to a number of tokens."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.requests.prompts import has_images, read_text_prompt
from nanovllm.requests.request import Prompt, TokensPrompt
from nanovllm.utils.checks import check_int

if TYPE_CHECKING:
    from nanovllm.requests.input_processor import InputProcessor


def cut_prompt(
    prompt: Prompt,
    num_kept: int,
    processor: "InputProcessor",
    side: str = "right",
    adds_special: bool | None = None,
    max_kept: int | None = None,
) -> TokensPrompt:
    """Tokenize a prompt. If the prompt has more than `num_kept` tokens, cut it to `num_kept` tokens.

    num_kept: the maximum number of tokens to keep. -1 means `max_kept`.
    side: the side on which tokens are cut off. Special tokens that the tokenizer adds around a text are kept, as in
        transformers.
    adds_special: whether to add special tokens to a text. By default, special tokens are added to all texts except the
        texts that a chat template has made.
    max_kept: the limit of `num_kept`. The default is the maximum number of tokens of a prompt.

    Raises the errors of `InputProcessor.tokenize`. Raises ValueError if `num_kept` is out of bounds.
    """
    max_kept = processor.max_prompt_tokens if max_kept is None else max_kept
    num_kept = check_num_kept(num_kept, max_kept)
    if has_images(prompt):
        raise ValueError("prompt: has images, and a prompt with images can't be truncated")
    is_text = isinstance(prompt, str) or (isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is None)
    adds_special = is_text if adds_special is None else adds_special and is_text
    with processor.tokenizer_lock:
        text, token_ids = read_text_prompt(prompt, {}, processor, adds_special, is_cut=True)
        if len(token_ids) > num_kept:
            head, tail = special_ends(processor.tokenizer) if adds_special else ([], [])
            num_inner = check_int("truncate_prompt_tokens", num_kept, low=len(head + tail)) - len(head + tail)
            inner = token_ids[len(head) : len(token_ids) - len(tail)]
            token_ids = head + (inner[:num_inner] if side == "right" else inner[len(inner) - num_inner :]) + tail
            text = processor.tokenizer.decode(token_ids)
    parts: TokensPrompt = {"prompt_token_ids": token_ids}
    return parts if text is None else parts | {"prompt": text}


def check_num_kept(num_kept: int, max_kept: int) -> int:
    """Return the number of tokens to which `truncate_prompt_tokens` cuts a prompt. -1 means `max_kept`.

    Raises TypeError or ValueError if `num_kept` is not an integer from -1 to `max_kept`.
    """
    num_kept = check_int("truncate_prompt_tokens", num_kept, low=-1, high=max_kept)
    return max_kept if num_kept == -1 else num_kept


def special_ends(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer adds before and after a text."""
    whole, inner = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : (end := start + len(inner))] == inner:
            return whole[:start], whole[end:]
    return [], []


def first_tokens(text: str, num_tokens: int, processor: "InputProcessor") -> str:
    """Return a beginning of `text` with at most `num_tokens` tokens, not counting special tokens.

    `num_tokens` must be at least 1.
    """
    if len(processor.encode(text, add_special_tokens=False, is_cut=True)) <= num_tokens:
        return text
    with processor.tokenizer_lock:
        encoded = processor.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ends = encoded["offset_mapping"]
    return text[: min(ends[num_tokens - 1][1], ends[num_tokens][0])]  # several tokens may be parts of one character
