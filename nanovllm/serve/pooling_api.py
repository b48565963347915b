"""Defines the HTTP routes for embeddings (OpenAI's API), reranking (Cohere's and Jina's APIs) and classification.

Each server has only one task, such as `embed` or `score`. If a request is for another task, the error names the
server's task.
"""

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from time import time
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from fastapi import FastAPI, Request, Response
from pydantic import Field

from nanovllm.pooling.pooling_outputs import PoolingOutput
from nanovllm.pooling.pooling_params import PoolingParams
from nanovllm.pooling.pooling_prompts import num_kept_of, prefix_of, with_prefix
from nanovllm.pooling.task import check_task
from nanovllm.serve import protocol
from nanovllm.serve.answers import encoded
from nanovllm.serve.errors import api_error, require
from nanovllm.serve.http_responses import json_response
from nanovllm.serve.openai_api import Api
from nanovllm.serve.pooling_client import pool
from nanovllm.serve.prompt_lanes import tokenized

MAX_INPUTS = 2048  # texts or documents of a request; OpenAI's bound
Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
Inputs = str | Texts | protocol.TokenIds | Annotated[list[protocol.TokenIds], Field(fail_fast=True)]


class PoolingBody(protocol.Body):
    priority: int = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=protocol.MAX_STOP_CHARACTERS)] | None = None
    user: str | None = None  # changes nothing here

    @property
    def options(self) -> dict[str, Any]:
        return {"priority": self.priority, "cache_salt": self.cache_salt}


class InputBody(PoolingBody, protocol.TextBody):
    own_names: ClassVar = {"prompt": "input"}

    input: Inputs
    truncation_side: Literal["left", "right"] = "right"

    def prompts(self) -> list[Any]:
        is_single = isinstance(self.input, str) or (bool(self.input) and isinstance(self.input[0], int))
        prompts: list[Any] = [self.input] if is_single else [*self.input]
        require(0 < len(prompts) <= MAX_INPUTS, f"input: has {len(prompts)} texts; must have 1 to {MAX_INPUTS}")
        return prompts


class EmbeddingBody(InputBody):
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    instruction: str | None = None


class ClassifyBody(InputBody):
    use_activation: bool = True


class PairBody(PoolingBody):
    """The fields that requests for reranking and requests for scores share."""

    instruction: str | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    max_tokens_per_doc: int | None = Field(None, ge=1)

    @property
    def options(self) -> dict[str, Any]:
        """Options of `score`. As in Cohere's API, `max_tokens_per_doc` also cuts documents that exceed the context."""
        num_kept = self.truncate_prompt_tokens
        if num_kept is None and self.max_tokens_per_doc is not None:
            num_kept = -1
        lengths = {"truncate_prompt_tokens": num_kept, "max_tokens_per_doc": self.max_tokens_per_doc}
        return super().options | {"instruction": self.instruction} | lengths


class RerankBody(PairBody):
    own_names: ClassVar = {"prompt": "documents"}

    query: str | dict[str, Any]
    documents: Annotated[list[str | dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None  # by default true, as in Jina's API; false for the path /v2/rerank of Cohere
    rank_fields: Annotated[list[str], Field(min_length=1, max_length=64)] | None = None
    max_chunks_per_doc: int | None = None  # of Cohere's API; changes nothing here, because documents are not split

    def query_text(self) -> str:
        text = self.query.get("text") if isinstance(self.query, dict) else self.query
        require(isinstance(text, str), "query: must be a string, or an object with a 'text'")
        return text  # type: ignore[return-value]

    def texts(self) -> list[str]:
        """Return the text of each document. A document is a string, or an object with texts.

        From an object, take its 'text' or, if `rank_fields` is set, the values of these fields as separate lines.
        """
        names = self.rank_fields or ["text"]
        parts = [
            [document[name] for name in names if name in document] if isinstance(document, dict) else [document]
            for document in self.documents
        ]
        is_text = all(values and all(isinstance(text, str) for text in values) for values in parts)
        bound = f"a string, or an object with a text in {' or '.join(map(repr, names))}"
        require(is_text, f"documents: each must be {bound}")
        return ["\n".join(values) for values in parts]


class ScoreBody(PairBody):
    own_names: ClassVar = {"prompt": "text_2", "query": "text_1", "documents": "text_2"}

    text_1: str | Texts
    text_2: str | Texts
    use_activation: bool = True


def add_routes(app: FastAPI, api: Api) -> None:
    routes = PoolingApi(api)
    app.post("/v1/embeddings")(routes.embeddings)
    for path in ("/classify", "/v1/classify"):
        app.post(path)(routes.classify)
    for path in ("/score", "/v1/score"):
        app.post(path)(routes.score)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        app.post(path)(routes.rerank)


class PoolingApi:
    """Defines a method for each route."""

    def __init__(self, api: Api):
        self._api, self._llm = api, api.llm

    async def embeddings(self, body: EmbeddingBody, request: Request) -> Response:
        async def compute() -> list[PoolingOutput]:
            check_task(config := self._llm.input_processor.config, "embed")
            body.truncate_prompt_tokens = num_kept_of(config, body.truncate_prompt_tokens)
            prompts = prepared(body, prefix_of(config, body.prompt_name, body.instruction))
            params = PoolingParams(dimensions=body.dimensions, normalize=body.normalize)
            return await pool(self._llm, prompts, params, **body.options)

        encode: Callable[[Any], Any] = lambda x: x.tolist()
        if body.encoding_format == "base64":
            encode = lambda x: b64encode(x.tobytes()).decode()
        answer = await self._answer(body, compute)
        return await listed(answer, lambda output: {"object": "embedding", "embedding": encode(output.embedding)})

    async def classify(self, body: ClassifyBody, request: Request) -> Response:
        compute = lambda: self._llm.classify(prepared(body), body.use_activation, **body.options)
        answer = await self._answer(body, compute)
        return await listed(answer, lambda x: {"label": x.label, "probs": x.probs, "num_classes": len(x.labels)})

    async def score(self, body: ScoreBody, request: Request) -> Response:
        texts = body.text_1, body.text_2
        compute = lambda: self._llm.score(*texts, use_activation=body.use_activation, **body.options)
        return await listed(await self._answer(body, compute), lambda x: {"object": "score", "score": x.score})

    async def rerank(self, body: RerankBody, request: Request) -> Response:
        query, texts, options = body.query_text(), body.texts(), body.options
        if self._llm.input_processor.config.scheduling_policy == "fcfs":
            options["priority"] = 0  # in Cohere's API, a hint that a server need not follow
        answer = await self._answer(body, lambda: self._llm.score(query, texts, **options))
        outputs = answer.pop("data")
        has_documents = body.return_documents
        if has_documents is None:
            has_documents = not request.url.path.endswith("/v2/rerank")
        return json_response(answer | {"object": "list", "results": ranked(body, outputs, has_documents)})

    async def _answer(self, body: PoolingBody, compute: Callable[[], Awaitable[list[PoolingOutput]]]) -> dict[str, Any]:
        """Compute the outputs. Return the fields that all answers have, and the outputs as `data`."""
        model = self._api.model_name(body.model)
        try:
            outputs = await compute()
        except Exception as problem:
            error = api_error(problem, {*type(body).model_fields, *body.own_names})
            error.rename(body.own_names)
            raise error from None
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"id": f"pool-{uuid4().hex}", "created": int(time()), "model": model, "usage": usage, "data": outputs}


def prepared(body: InputBody, prefix: str = "") -> list[Any]:
    """Return a body's prompts.

    If the body has tokenization options, each returned prompt is a function that tokenizes the prompt.
    """
    prompts = [with_prefix(prompt, prefix) for prompt in body.prompts()]
    if body.add_special_tokens is None and body.truncate_prompt_tokens is None:
        return prompts
    return [partial(tokenized, body, prompt, None, None) for prompt in prompts]


async def listed(answer: dict[str, Any], entry: Callable[[PoolingOutput], dict[str, Any]]) -> Response:
    """Encode outputs in a thread, because encoding a thousand vectors takes a long time."""

    def data() -> list[Any]:
        return [encoded({"index": i} | entry(output)) for i, output in enumerate(answer["data"])]

    return json_response(answer | {"object": "list", "data": await asyncio.to_thread(data)})


def ranked(body: RerankBody, outputs: Sequence[PoolingOutput], has_documents: bool) -> list[dict[str, Any]]:
    """Return the `top_n` most relevant documents, in descending order of their score."""
    order = sorted(range(len(outputs)), key=lambda i: outputs[i].score, reverse=True)[: body.top_n]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": outputs[i].score} for i in order]
    if has_documents:
        for i, result in zip(order, results):
            document = body.documents[i]
            result["document"] = document if isinstance(document, dict) else {"text": document}
    return results
