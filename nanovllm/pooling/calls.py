"""Implements the methods of `LLM` that compute vectors. Each function has the name of the method that it implements."""

from typing import TYPE_CHECKING, Any

from nanovllm.pooling.pooling_outputs import PoolingOutput
from nanovllm.pooling.pooling_params import PoolingParams
from nanovllm.pooling.pooling_prompts import cut_prompts, pair_prompt, pairs_of, prefix_of, with_prefix
from nanovllm.pooling.pooling_request import pooling_requests
from nanovllm.pooling.task import check_task
from nanovllm.requests.prompts import as_priorities, as_prompts
from nanovllm.requests.request import Prompt

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine


def embed(
    self: "LLMEngine",
    prompts: Prompt | list[Prompt],
    dimensions: int | None = None,
    normalize: bool | None = None,
    prompt_name: str | None = None,
    instruction: str | None = None,
    use_tqdm: bool = True,
    priority: list[int] | None = None,
    truncate_prompt_tokens: int | None = None,
) -> list[PoolingOutput]:
    """Return the embedding of each prompt, in the order of the prompts.

    prompts: the same kinds of prompts as for `generate`.
    dimensions, normalize: see PoolingParams.
    prompt_name: the name of a prefix in the checkpoint, such as "query". The prefix is put before each text.
    instruction: a description of the task of the queries. The description is put before each text as "Instruct: ...",
        which Qwen3-Embedding expects.
    truncate_prompt_tokens: the maximum number of tokens of a prompt; -1 means `max_model_len`. The end of a longer
        prompt is left out, except for special tokens that the tokenizer adds. By default, a prompt of more than
        `max_model_len` tokens is an error.

    Raises the errors of `generate`. Raises ValueError if the task is not "embed".
    """
    check_task(self.config, "embed")
    prefix = prefix_of(self.config, prompt_name, instruction)
    texts = [with_prefix(prompt, prefix) for prompt in as_prompts(prompts)]
    params = PoolingParams(dimensions=dimensions, normalize=normalize)
    return _run(self, cut_prompts(texts, truncate_prompt_tokens, self.input_processor), params, use_tqdm, priority)


def score(
    self: "LLMEngine",
    query: str | list[str],
    documents: str | list[str],
    instruction: str | None = None,
    template: str | None = None,
    use_activation: bool = True,
    use_tqdm: bool = True,
    priority: list[int] | None = None,
    truncate_prompt_tokens: int | None = None,
    max_tokens_per_doc: int | None = None,
) -> list[PoolingOutput]:
    """Return the relevance of each document, in the order of the documents.

    query: one query for all documents, or a list with one query for each document.
    instruction, template, truncate_prompt_tokens, max_tokens_per_doc: see `pooling_prompts.pair_prompt`.
    use_activation: see PoolingParams.

    Raises the errors of `generate`. Raises ValueError if the task is not "score".
    """
    check_task(self.config, "score")
    limits: dict[str, Any] = dict(truncate_prompt_tokens=truncate_prompt_tokens, max_tokens_per_doc=max_tokens_per_doc)
    pairs, processor = pairs_of(query, documents), self.input_processor
    prompts = [pair_prompt(processor, *pair, instruction, template, **limits) for pair in pairs]
    return _run(self, prompts, PoolingParams(use_activation=use_activation), use_tqdm, priority)


def classify(
    self: "LLMEngine",
    prompts: Prompt | list[Prompt],
    use_activation: bool = True,
    use_tqdm: bool = True,
    priority: list[int] | None = None,
    truncate_prompt_tokens: int | None = None,
) -> list[PoolingOutput]:
    """Return the probability of each class for each prompt. A reward model has a single class.

    prompts: the same kinds of prompts as for `generate`.
    use_activation: see PoolingParams.
    truncate_prompt_tokens: see `embed`.

    Raises the errors of `generate`. Raises ValueError if the task is neither "classify" nor "score".
    """
    check_task(self.config, "classify", "score")
    prompts = cut_prompts(as_prompts(prompts), truncate_prompt_tokens, self.input_processor)
    return _run(self, prompts, PoolingParams(use_activation=use_activation), use_tqdm, priority)


def _run(
    llm: "LLMEngine", prompts: list, params: PoolingParams, use_tqdm: bool, priority: list[int] | None
) -> list[PoolingOutput]:
    priorities = as_priorities(priority, len(prompts))
    return llm._run(pooling_requests(llm.input_processor, prompts, params, priorities), use_tqdm, "Pooling")
