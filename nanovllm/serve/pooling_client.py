"""Defines the methods `embed`, `score` and `classify` of EngineClient, with the arguments of LLM's methods."""

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from nanovllm.pooling.pooling_outputs import PoolingOutput
from nanovllm.pooling.pooling_params import PoolingParams
from nanovllm.pooling.pooling_prompts import pair_prompt, pairs_of, prefix_of, with_prefix
from nanovllm.pooling.task import check_task
from nanovllm.requests.prompts import as_prompts
from nanovllm.requests.request import Prompt

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
    **options: Any,
) -> list[PoolingOutput]:
    """Return embeddings, as `LLM.embed` does. `options` are options of `submit`."""
    config = self.input_processor.config
    check_task(config, "embed")
    prefix = prefix_of(config, prompt_name, instruction)
    params = PoolingParams(dimensions=dimensions, normalize=normalize)
    return await pool(self, [with_prefix(prompt, prefix) for prompt in as_prompts(prompts)], params, **options)


async def score(
    self: "EngineClient",
    query: str | list[str],
    documents: str | list[str],
    instruction: str | None = None,
    template: str | None = None,
    use_activation: bool = True,
    **options: Any,
) -> list[PoolingOutput]:
    """Score documents, as `LLM.score` does. `options` are options of `submit`."""
    check_task(self.input_processor.config, "score")
    pairs = pairs_of(query, documents)
    prompts = [partial(_pair_prompt, *pair, instruction, template) for pair in pairs]
    return await pool(self, prompts, PoolingParams(use_activation=use_activation), **options)


async def classify(
    self: "EngineClient", prompts: Prompt | list[Prompt], use_activation: bool = True, **options: Any
) -> list[PoolingOutput]:
    """Classify texts, as `LLM.classify` does. `options` are options of `submit`."""
    check_task(self.input_processor.config, "classify", "score")
    return await pool(self, as_prompts(prompts), PoolingParams(use_activation=use_activation), **options)


def _pair_prompt(query: str, document: str, instruction: str | None, template: str | None, lane: Any) -> Any:
    return pair_prompt(lane, query, document, instruction, template)


async def pool(llm: "EngineClient", prompts: Iterable[Any], params: PoolingParams, **options: Any) -> list:
    """Submit a request for each prompt, at most WINDOW at a time. Outputs are in the order of the prompts."""
    running: deque[Any] = deque()
    outputs = []
    try:
        for prompt in prompts:
            if len(running) == WINDOW:
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
