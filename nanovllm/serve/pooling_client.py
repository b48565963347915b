"""Defines the methods `embed`, `score` and `classify` of EngineClient, with the arguments of LLM's methods."""

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from nanovllm.pooling.pooling_outputs import PoolingOutput
from nanovllm.pooling.pooling_params import PoolingParams
from nanovllm.pooling.pooling_prompts import num_kept_of, pair_prompt, pairs_of, prefix_of, with_prefix
from nanovllm.pooling.task import check_task
from nanovllm.requests.prompts import as_prompts
from nanovllm.requests.request import Prompt
from nanovllm.requests.truncation import cut_prompt

if TYPE_CHECKING:
    from nanovllm.serve.engine_client import EngineClient

WINDOW = 256  # the most requests of one call that run or wait at a time, so that other clients get their turn


async def embed(
    self: "EngineClient",
    prompts: Prompt | list[Prompt],
    dimensions: int | None = None,
    normalize: bool | None = None,
    prompt_name: str | None = None,
    instruction: str | None = None,
    truncate_prompt_tokens: int | None = None,
    **options: Any,
) -> list[PoolingOutput]:
    """Return embeddings, as `LLM.embed` does. `options` are passed to `EngineClient.submit`."""
    config = self.input_processor.config
    check_task(config, "embed")
    prefix = prefix_of(config, prompt_name, instruction)
    params = PoolingParams(dimensions=dimensions, normalize=normalize)
    texts = [with_prefix(prompt, prefix) for prompt in as_prompts(prompts)]
    return await pool(self, _cut(texts, num_kept_of(config, truncate_prompt_tokens)), params, **options)


async def score(
    self: "EngineClient",
    query: str | list[str],
    documents: str | list[str],
    instruction: str | None = None,
    template: str | None = None,
    use_activation: bool = True,
    truncate_prompt_tokens: int | None = None,
    max_tokens_per_doc: int | None = None,
    **options: Any,
) -> list[PoolingOutput]:
    """Score documents, as `LLM.score` does. `options` are passed to `EngineClient.submit`."""
    check_task(self.input_processor.config, "score")
    pairs = pairs_of(query, documents)
    limits: dict[str, Any] = dict(truncate_prompt_tokens=truncate_prompt_tokens, max_tokens_per_doc=max_tokens_per_doc)
    make = partial(pair_prompt, instruction=instruction, template=template, **limits)
    prompts = [partial(make, query=text, document=document) for text, document in pairs]
    return await pool(self, prompts, PoolingParams(use_activation=use_activation), **options)


async def classify(
    self: "EngineClient",
    prompts: Prompt | list[Prompt],
    use_activation: bool = True,
    truncate_prompt_tokens: int | None = None,
    **options: Any,
) -> list[PoolingOutput]:
    """Classify texts, as `LLM.classify` does. `options` are passed to `EngineClient.submit`."""
    check_task(self.input_processor.config, "classify", "score")
    texts = _cut(as_prompts(prompts), truncate_prompt_tokens)
    return await pool(self, texts, PoolingParams(use_activation=use_activation), **options)


def _cut(prompts: list[Prompt], num_kept: int | None) -> list[Any]:
    """Return functions that tokenize the prompts and cut them to `num_kept` tokens.

    If `num_kept` is None, return the prompts unchanged.
    """
    return prompts if num_kept is None else [partial(cut_prompt, prompt, num_kept) for prompt in prompts]


async def pool(llm: "EngineClient", prompts: Iterable[Any], params: PoolingParams, **options: Any) -> list:
    """Submit a request for each prompt. Return the outputs in the order of the prompts.

    At most WINDOW requests run or wait at a time, and fewer if the queue is full. Raises QueueFullError if the requests
    of other callers fill the queue.
    """
    running: deque[Any] = deque()
    outputs = []
    try:
        for prompt in prompts:
            while running and (len(running) == WINDOW or llm.num_unfinished >= llm.max_live):
                outputs.append(await running[0].result())
                running.popleft()
            running.append(await llm.submit(prompt, params, **options))
        while running:
            outputs.append(await running[0].result())
            running.popleft()
        return outputs
    finally:
        for request in running:
            llm.discard(request)
