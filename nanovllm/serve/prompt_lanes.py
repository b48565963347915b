"""Tokenizes prompts in such a way that long texts do not delay short texts.

A text that is certain to exceed the context length is refused without being tokenized.
"""

import json
import threading
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, cast

from nanovllm.requests.input_processor import InputProcessor
from nanovllm.requests.prompts import has_images, is_conversation, render_chat
from nanovllm.requests.request import Prompt, TokensPrompt
from nanovllm.requests.truncation import cut_prompt

LONG_TEXT = 2**14  # characters; tokenizing them takes about 15 ms
# normalizers and pre-tokenizers that remove no text; see `longest_token`
_KEEPING = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend"}
_KEEPING |= {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"}
PromptSource = Prompt | Callable[["PromptLane"], Prompt]


def reads_images(source: PromptSource) -> bool:
    """Return whether a prompt has images. If `source` is a `functools.partial`, the prompt is among its arguments."""
    return any(map(has_images, source.args)) if isinstance(source, partial) else has_images(source)


class LongTextError(Exception):
    """The text is too long for the PromptLane that tokenizes short texts."""


class RenderedChat(str):
    """The output of a chat template. The text already has special tokens, so the tokenizer adds none."""


class PromptLane(InputProcessor):
    """One of two objects that tokenize prompts.

    The PromptLane for long texts has its own tokenizer and its own lock.
    """

    def __init__(self, processor: InputProcessor, takes_long_texts: bool):
        tokenizer = deepcopy(processor.tokenizer) if takes_long_texts else processor.tokenizer
        super().__init__(processor.config, tokenizer)
        self.policy = processor.policy
        self.tokenizer_lock = threading.RLock() if takes_long_texts else processor.tokenizer_lock
        self.takes_long_texts, self._longest_token = takes_long_texts, longest_token(tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True, is_cut: bool = False) -> list[int]:
        """Return the token ids of a text.

        Raises LongTextError if the PromptLane for long texts must tokenize the text. Raises ValueError if the text
        can't fit into the context. If `is_cut` is True, the caller truncates the tokens, so any length is allowed.
        """
        is_elsewhere = len(text) > LONG_TEXT and not self.takes_long_texts
        if self._longest_token is not None and not is_cut:
            self._check_length(text, self._longest_token, is_elsewhere)
        if is_elsewhere:
            raise LongTextError
        return super().encode(text, add_special_tokens)

    def tokens_of(self, prompt: PromptSource, chat_template_kwargs: Mapping | None) -> TokensPrompt:
        """Return the token ids of a prompt, and its text if there is one.

        If `prompt` is a function, call the function first.
        """
        text, token_ids, images = self.tokenize(prompt(self) if callable(prompt) else prompt, chat_template_kwargs)
        return tokens_prompt(token_ids, text, images)

    def _check_length(self, text: str, longest_token: int, is_elsewhere: bool) -> None:
        max_bytes = self.max_prompt_tokens * longest_token
        num_bytes = len(data := text.encode(errors="replace"))
        if num_bytes > max_bytes and (normalizer := self.tokenizer.backend_tokenizer.normalizer) is not None:
            if is_elsewhere:
                raise LongTextError
            num_bytes = len(normalizer.normalize_str(data.decode()).encode())  # the normalized text may be shorter
        if num_bytes > max_bytes:
            num_tokens = -(-num_bytes // longest_token)
            raise ValueError(f"prompt: has at least {num_tokens} tokens; must be {self.length_bound}")


def tokenized(
    body: Any, prompt: Any, template_arguments: Mapping | None, max_tokens: int | None, lane: PromptLane
) -> TokensPrompt:
    """Tokenize a prompt. The options are fields of `body`, which is a protocol.TextBody.

    By default, special tokens are added to text, but not to the output of a chat template. Raises ValueError if
    `truncate_prompt_tokens` plus `max_tokens` exceeds the context length.
    """
    adds_special, num_kept = body.add_special_tokens, body.truncate_prompt_tokens
    if has_images(prompt):
        if num_kept is not None:
            raise ValueError(f"truncate_prompt_tokens={num_kept}: a prompt with images can't be cut")
        return lane.tokens_of(prompt, template_arguments)
    if is_conversation(prompt):
        with lane.tokenizer_lock:
            prompt = RenderedChat(render_chat(lane.tokenizer, prompt, template_arguments or {}))
    if adds_special is None and isinstance(prompt, RenderedChat):
        adds_special = False
    if num_kept is not None:
        max_kept = min(lane.max_prompt_tokens, lane.max_model_len - (max_tokens or 0))
        return cut_prompt(prompt, num_kept, lane, body.truncation_side, adds_special, max_kept)
    if isinstance(prompt, str):
        return tokens_prompt(lane.encode(prompt, adds_special is not False), prompt)
    return tokens_prompt(cast(list[int], prompt), None)


def tokens_prompt(token_ids: list[int], text: str | None, images: Any = None) -> TokensPrompt:
    """Return a TokensPrompt that leaves out the arguments that are None."""
    parts = {"prompt_token_ids": token_ids, "prompt": text, "multi_modal_data": images}
    return cast(TokensPrompt, {name: part for name, part in parts.items() if part is not None})


def longest_token(tokenizer: Any) -> int | None:
    """Return how many bytes of normalized UTF-8 text a token can contain, or `None` if there is no maximum.

    A maximum exists if three conditions hold:
    - The vocabulary contains every byte, so no token represents unknown text.
    - Normalizers and pre-tokenizers remove no text. The text between two special tokens is treated like a whole text.
    - No special token absorbs the spaces around it.
    """
    backend, added = tokenizer.backend_tokenizer, tokenizer.added_tokens_decoder.values()
    vocab = backend.get_vocab(with_added_tokens=False)
    normalizer, steps = backend.normalizer, [*_steps(backend.normalizer), *_steps(backend.pre_tokenizer)]
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    if is_byte_level:  # each character of a token stands for a byte
        from tokenizers.pre_tokenizers import ByteLevel

        has_all_bytes = vocab.keys() >= {*ByteLevel.alphabet()}
    else:
        all_bytes = {f"<0x{byte:02X}>" for byte in range(256)}
        has_all_bytes = getattr(backend.model, "byte_fallback", False) and vocab.keys() >= all_bytes
    if not has_all_bytes or any(token.lstrip or token.rstrip for token in added) or not all(map(_keeps_all, steps)):
        return None
    contents = [token.content for token in added]
    if normalizer is not None:
        contents += [normalizer.normalize_str(content) for content in contents]
    sizes = map(len, vocab) if is_byte_level else (len(token.encode()) for token in vocab)
    return max([*sizes, *(len(content.encode()) for content in contents)])


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, in the format of tokenizer.json."""
    return [] if part is None else _flat(json.loads(part.__getstate__()))


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    inner = step.get("normalizers", step.get("pretokenizers"))
    return [step] if inner is None else [x for part in inner for x in _flat(part)]


def _keeps_all(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":  # a regular expression may match more in the parts of a text than in the whole
        return "String" in step["pattern"]
    return step["type"] in _KEEPING and step.get("behavior") != "Removed"
