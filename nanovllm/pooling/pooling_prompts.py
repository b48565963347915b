"""Makes prompts for embeddings (texts with a prefix) and for rerankers (pairs of a query and a document)."""

import re
from typing import Any

from nanovllm.config import Config
from nanovllm.requests.input_processor import InputProcessor
from nanovllm.requests.prompts import render_chat
from nanovllm.requests.request import Prompt, TokensPrompt
from nanovllm.requests.truncation import check_num_kept, cut_prompt, first_tokens
from nanovllm.utils.checks import check_choice, check_int

# https://huggingface.co/Qwen/Qwen3-Embedding-0.6B
INSTRUCTED_QUERY = "Instruct: {instruction}\nQuery:"
# https://huggingface.co/Qwen/Qwen3-Reranker-0.6B
RERANKER_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
RERANKER_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
LONG_TEXT = 2**14  # characters
RERANKER_FAMILIES = ("qwen3",)  # their rerankers use this template, unless the checkpoint has another one


def prefix_of(config: Config, prompt_name: str | None, instruction: str | None) -> str:
    """Return the prefix of a text that will be embedded. Raises ValueError if `prompt_name` is unknown."""
    prompts = config.pooling.prompts
    if instruction is not None:
        if prompt_name is not None:
            raise ValueError(f"prompt_name={prompt_name!r:.80}: must be None with an instruction")
        form = INSTRUCTED_QUERY
        if re.fullmatch(r"Instruct: .*\nQuery: ?", published := prompts.get("query", "")):
            form = INSTRUCTED_QUERY + " " * published.endswith(" ")
        return form.format(instruction=instruction)
    if prompt_name is None:
        return prompts.get(config.pooling.default_prompt_name or "", "")
    prompts = {"query": "", "document": ""} | prompts  # as in sentence-transformers
    return prompts[check_choice("prompt_name", prompt_name, prompts)]


def with_prefix(prompt: Any, prefix: str) -> Any:
    """If a prompt is a text, put `prefix` before it. Return token ids and conversations unchanged."""
    if isinstance(prompt, dict) and prompt.get("prompt_token_ids") is None and isinstance(prompt.get("prompt"), str):
        return {**prompt, "prompt": prefix + prompt["prompt"]}
    return prefix + prompt if isinstance(prompt, str) else prompt


def pairs_of(query: Any, documents: Any) -> list[tuple[str, str]]:
    """Pair one query with all documents, or each query with the document at the same index.

    Raises TypeError or ValueError.
    """
    queries, texts = ([x] if isinstance(x, str) else x for x in (query, documents))
    for name, value in (("query", queries), ("documents", texts)):
        if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
            raise TypeError(f"{name}={value!r:.80}: must be a string or a list of strings")
    queries = [*queries] * len(texts) if len(queries) == 1 else queries
    if len(queries) != len(texts):
        raise ValueError(f"query: there are {len(queries)} for {len(texts)} documents: pass one, or one for each")
    return [*zip(queries, texts)]


def num_kept_of(config: Config, truncate_prompt_tokens: int | None) -> int | None:
    """Return how many tokens of a prompt to keep: the caller's number, limited by the checkpoint's `max_tokens`."""
    assert config.max_model_len is not None, "it is resolved on construction"
    most, num_kept = config.pooling.max_tokens, truncate_prompt_tokens
    if most is None or most > config.max_model_len:  # then a longer prompt would be cut to another length: an error
        return num_kept
    return most if num_kept is None else min(most, check_num_kept(num_kept, config.max_model_len))


def cut_prompts(prompts: list[Prompt], num_kept: int | None, processor: InputProcessor) -> list[Prompt]:
    """Cut each prompt to `num_kept` tokens. If `num_kept` is None, prompts are cut only to the checkpoint's limit."""
    num_kept = num_kept_of(processor.config, num_kept)
    return prompts if num_kept is None else [cut_prompt(prompt, num_kept, processor) for prompt in prompts]


def pair_prompt(
    processor: InputProcessor,
    query: str,
    document: str,
    instruction: str | None = None,
    template: str | None = None,
    truncate_prompt_tokens: int | None = None,
    max_tokens_per_doc: int | None = None,
) -> TokensPrompt:
    """Return the prompt for scoring a document against a query.

    The text comes from `template`, which contains `{query}`, `{document}` and, if needed, `{instruction}`. If
    `template` is None, and the checkpoint's chat template has the roles "query" and "document", the chat template makes
    the text. If the chat template lacks the two roles, RERANKER_TEMPLATE makes the text for models of
    RERANKER_FAMILIES. For other models, the tokenizer joins the query and the document.

    truncate_prompt_tokens: the maximum number of tokens of the prompt; -1 means `max_model_len`. If the prompt has more
        tokens, the end of the document is left out. The query and the template are never cut.
    max_tokens_per_doc: the maximum number of tokens of the document. The end of a longer document is left out.
    """
    if max_tokens_per_doc is not None:
        document = first_tokens(document, check_int("max_tokens_per_doc", max_tokens_per_doc, low=1), processor)
    if truncate_prompt_tokens is None:
        return _pair_prompt(processor, query, document, instruction, template)
    num_kept = check_num_kept(truncate_prompt_tokens, processor.max_prompt_tokens)
    while True:
        prompt = _pair_prompt(processor, query, document, instruction, template, is_cut=True)
        if (excess := len(prompt["prompt_token_ids"]) - num_kept) <= 0:
            return prompt
        num_tokens = len(processor.encode(document, add_special_tokens=False, is_cut=True)) - excess
        if num_tokens < 1:
            limit = "max_model_len" if truncate_prompt_tokens == -1 else "truncate_prompt_tokens"
            bound = f"more than {num_kept - num_tokens} tokens, of which the document has none"
            raise ValueError(f"{limit}={num_kept}: the prompt needs {bound}")
        document = first_tokens(document, num_tokens, processor)


def _pair_prompt(
    processor: InputProcessor,
    query: str,
    document: str,
    instruction: str | None,
    template: str | None,
    is_cut: bool = False,
) -> TokensPrompt:
    tokenizer = processor.tokenizer
    if template is None and _has_roles(tokenizer):
        parts = {"system": instruction, "query": query, "document": document}
        messages: Any = [{"role": role, "content": text} for role, text in parts.items() if text is not None]
        with processor.tokenizer_lock:
            text = render_chat(tokenizer, messages, {})
    else:
        if template is None and processor.config.model_config.model_type.startswith(RERANKER_FAMILIES):
            template = RERANKER_TEMPLATE
        if instruction is not None and "{instruction}" not in (template or ""):
            raise ValueError(f"instruction={instruction!r:.80}: the text of a query and a document has no place for it")
        if template is None:
            if len(query) + len(document) > LONG_TEXT:
                # a server's `encode` may refuse the text
                processor.encode(query + document, add_special_tokens=False, is_cut=is_cut)
            with processor.tokenizer_lock:
                return {"prompt_token_ids": tokenizer(query, document)["input_ids"]}
        instruction = RERANKER_INSTRUCTION if instruction is None else instruction
        if not isinstance(template, str):
            raise TypeError(f"template={template!r:.80}: must be a string")
        if not all(field in template for field in ("{query}", "{document}")):
            raise ValueError(f"template={template!r:.80}: must contain {{query}} and {{document}}")
        try:
            text = template.format(instruction=instruction, query=query, document=document)
        except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"template={template!r:.80}: has an unknown field ({error!r})") from error
    return {"prompt": text, "prompt_token_ids": processor.encode(text, add_special_tokens=False, is_cut=is_cut)}


def _has_roles(tokenizer: Any) -> bool:
    templates = getattr(tokenizer, "chat_template", None) or ""
    text = " ".join(templates.values()) if isinstance(templates, dict) else templates
    return all(re.search(f"['\"]{role}['\"]", text) for role in ("query", "document"))
