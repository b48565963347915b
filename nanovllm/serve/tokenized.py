"""Prompts that are tokenized as their request says: with or without special tokens, and cut to a length."""

from collections.abc import Mapping
from typing import Any

from nanovllm.engine.prompts import is_conversation, render_chat
from nanovllm.engine.request import TokensPrompt
from nanovllm.serve.prompt_lanes import PromptLane
from nanovllm.serve.protocol import TextBody
from nanovllm.utils.checks import check_int


def tokenized(
    body: TextBody, prompt: Any, template_arguments: Mapping | None, max_tokens: int | None, lane: PromptLane
) -> TokensPrompt:
    """The token ids of a prompt, and its text. ValueError if more tokens are to be kept than fit before `max_tokens`.

    Unless the request says otherwise, special tokens are added to text, but not to what a chat template makes.
    """
    adds_special, num_kept, tokenizer = body.add_special_tokens, body.truncate_prompt_tokens, lane.tokenizer
    with lane.tokenizer_lock:
        if is_conversation(prompt):
            prompt, adds_special = render_chat(tokenizer, prompt, template_arguments or {}), bool(adds_special)
        if isinstance(prompt, str):
            token_ids = lane.encode(prompt, adds_special is not False, is_cut=num_kept is not None)
        else:
            token_ids, prompt = prompt, None
        if num_kept is not None:
            most = lane.max_model_len - max(1, max_tokens or 0)
            num_kept = most if num_kept == -1 else check_int("truncate_prompt_tokens", num_kept, 0, most)
            if num_kept < len(token_ids):
                is_left = body.truncation_side == "left"
                token_ids = token_ids[len(token_ids) - num_kept :] if is_left else token_ids[:num_kept]
                prompt = tokenizer.decode(token_ids)
    return {"prompt_token_ids": token_ids} if prompt is None else {"prompt_token_ids": token_ids, "prompt": prompt}
