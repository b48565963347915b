"""The application behind the HTTP API: its routes, and how each of them uses the engine."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from time import time
from typing import Any, NamedTuple

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from nanovllm.sampling_params import SamplingParams
from nanovllm.serve import chat
from nanovllm.serve.answers import Answer
from nanovllm.serve.async_request import AsyncRequest
from nanovllm.serve.completions import CompletionAnswer, Echo
from nanovllm.serve.engine_client import EngineClient, EngineDeadError
from nanovllm.serve.errors import ApiError, RequestTimeoutError, api_error, validation_error
from nanovllm.serve.guard import Guard
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    TokenizeChatBody,
    sampling_params,
)
from nanovllm.serve.responses import ClientGoneError, EventStream, error_response, json_response, while_connected
from nanovllm.serve.settings import ServerSettings
from nanovllm.serve.structured import structured_outputs, with_own_field
from nanovllm.serve.tool_parsers import parser_for
from nanovllm.serve.view import view_router

MAX_BODY_IN_LOOP = 2**16  # bytes; a thread prepares what a longer body says, so that no other client waits
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for /v1/completions


def create_app(
    llm: EngineClient, settings: ServerSettings, model: str, is_closing: Callable[[], bool] = lambda: False
) -> FastAPI:
    """model: as it was given on the command line. `is_closing` tells the page's endless streams to end."""
    app = FastAPI(title="nano-vllm", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    own_name = Path(model).absolute().name if Path(model).expanduser().is_dir() else model  # a hub id has a `/`
    api = Api(llm, settings, settings.served_model_name or (own_name,))
    app.include_router(api.router())
    if llm.engine is not None:  # the page shows the steps of one engine
        app.include_router(view_router(llm, is_closing=is_closing))
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_error)
    app.add_middleware(Guard, settings=settings)
    if settings.allowed_origins:
        origins = [*settings.allowed_origins]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(validation_error(error.errors()))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Of the framework: an unknown path, a wrong method, a body that it can't read."""
    assert isinstance(error, HTTPException)
    return error_response(ApiError(error.status_code, str(error.detail)))


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(api_error(error))


class Prepared(NamedTuple):
    """What a body says, in the terms of the engine."""

    prompts: list
    params: SamplingParams
    template_arguments: dict[str, Any] | None


class Api:
    """The routes, and what they share."""

    def __init__(self, llm: EngineClient, settings: ServerSettings, model_names: Sequence[str]):
        self.llm, self.settings, self.model_names = llm, settings, model_names
        self.metrics = Metrics(llm, model_names[0])
        parser = settings.tool_call_parser
        template = getattr(llm.processor.tokenizer, "chat_template", None)
        self.tool_call_parser = parser_for(template) if parser == "auto" else parser
        # what the model recommends; the length of an answer is the API's own
        own, recommended = asdict(SamplingParams()), asdict(llm.processor.default_sampling_params())
        changed = {name: value for name, value in recommended.items() if value != own[name]}
        self.defaults = {name: value for name, value in changed.items() if name != "max_tokens"}
        self.started = int(time())

    def router(self) -> APIRouter:
        router, options = APIRouter(), dict[str, Any](response_model=None)
        router.post("/v1/completions", **options)(self.completions)
        router.post("/v1/chat/completions", **options)(self.chat_completions)
        router.post("/tokenize", **options)(self.tokenize)
        router.post("/detokenize", **options)(self.detokenize)
        router.get("/v1/models", **options)(self.models)
        router.get("/v1/models/{name:path}", **options)(self.model)
        router.get("/health", **options)(self.health)
        router.get("/metrics", **options)(self.metrics_text)
        return router

    # -- generation ----------------------------------------------------------------------------------------------------

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        def prepare() -> Prepared:
            if body.best_of not in (None, body.n or 1):
                raise ApiError(400, f"best_of={body.best_of}: must be {body.n or 1}, as `n`", "best_of")
            if body.echo and body.stream and body.logprobs is not None:
                raise ApiError(400, "echo: can't be streamed together with logprobs", "echo")
            special = {"logprobs": body.logprobs, "prompt_logprobs": body.logprobs if body.echo else None}
            if body.max_tokens is None:
                special["max_tokens"] = COMPLETION_TOKENS
            elif body.max_tokens == 0 and body.echo:
                special["max_tokens"] = 1  # of which CompletionAnswer shows nothing
            params = sampling_params(body, self.defaults, structured_outputs(body), **special)
            return Prepared(body.prompts(), params, None)

        async def make_answer(requests: Sequence[AsyncRequest]) -> Answer:
            echoes = [await self._echo(own) if body.echo else Echo() for own in requests]
            return CompletionAnswer(body, self._model_name(body.model), requests, echoes)

        return await self._respond(body, request, prepare, make_answer)

    async def chat_completions(self, body: ChatBody, request: Request) -> Response:
        def prepare() -> Prepared:
            if body.top_logprobs and not body.logprobs:
                raise ApiError(400, "top_logprobs: needs logprobs=true", "top_logprobs")
            max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
            logprobs = (body.top_logprobs or 0) if body.logprobs else None
            special = {"max_tokens": max_tokens, "logprobs": logprobs}
            params = sampling_params(body, self.defaults, structured_outputs(body), **special)
            return Prepared([chat.conversation(body)], params, chat.template_arguments(body))

        async def make_answer(requests: Sequence[AsyncRequest]) -> Answer:
            make_parser = chat.make_tool_parser(body, self.tool_call_parser)
            finds_reasoning = self.settings.reasoning_parser == "think"
            name, token_bytes = self._model_name(body.model), self.llm.token_bytes
            return chat.ChatAnswer(body, name, requests, make_parser, finds_reasoning, token_bytes)

        return await self._respond(body, request, prepare, make_answer)

    async def _respond(
        self,
        body: GenerationBody,
        request: Request,
        prepare: Callable[[], Prepared],
        make_answer: Callable[[Sequence[AsyncRequest]], Awaitable[Answer]],
    ) -> Response:
        """Check and queue the requests for all prompts, then answer at the end or piece by piece."""
        requests: list[AsyncRequest] = []
        seconds = self.settings.request_timeout
        timer = asyncio.get_running_loop().call_later(seconds, self._fail, requests)

        def end() -> None:
            timer.cancel()
            for own in requests:
                self.llm.discard(own)

        async def queue() -> Answer:
            try:
                is_long = len(await request.body()) > MAX_BODY_IN_LOOP
                await self._submit(body, await asyncio.to_thread(prepare) if is_long else prepare(), requests)
                return await make_answer(requests)
            except Exception as error:
                raise with_own_field(api_error(error, type(body).model_fields), body) from None

        async def complete() -> Response:
            return json_response(await (await queue()).complete())

        stream = None
        try:
            if not body.stream:
                return await while_connected(request.receive, complete(), seconds)
            answer = await while_connected(request.receive, queue(), seconds)
            stream = EventStream(answer.chunks(), end, seconds)
            return stream
        except ClientGoneError:
            return Response(status_code=499)  # nothing reads it any more
        except Exception as error:
            return error_response(api_error(error))
        finally:
            if stream is None:
                end()

    async def _submit(self, body: GenerationBody, prepared: Prepared, requests: list[AsyncRequest]) -> None:
        """Queue a request for each prompt, and add it to `requests`."""
        self._model_name(body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options: needs stream=true", "stream_options")
        prompts, params, template_arguments = prepared
        if not prompts:
            raise ApiError(400, "prompt: there must be at least one", "prompt")
        if len(prompts) * params.n > (bound := self.settings.max_answers):
            raise ApiError(400, f"n={params.n}: times {len(prompts)} prompts is more than {bound} answers", "n")
        in_pieces = bool(body.stream)
        for prompt in prompts:
            requests.append(await self.llm.submit(prompt, params, None, body.priority, template_arguments, in_pieces))

    @staticmethod
    def _fail(requests: Sequence[AsyncRequest]) -> None:
        """Their time is over."""
        for request in requests:
            request.fail(RequestTimeoutError())

    async def _echo(self, request: AsyncRequest) -> Echo:
        text, token_ids = request.request.prompt, request.prompt_token_ids
        whole = await self.llm.detokenize(token_ids) if text is None else text
        return Echo(whole, await self.llm.detokenize(token_ids[:1]))

    def _model_name(self, name: str | None) -> str:
        """The name that an answer states. ApiError for a model that is not served here."""
        if name is not None and name not in self.model_names:
            raise ApiError(404, f"model {name!r:.80} is not served here", "model", "model_not_found")
        return self.model_names[0] if name is None else name

    # -- the other routes ----------------------------------------------------------------------------------------------

    async def tokenize(self, body: TokenizeBody | TokenizeChatBody, request: Request) -> Response:
        async def answer() -> dict[str, Any]:
            self._model_name(body.model)
            if isinstance(body, TokenizeBody):
                token_ids = await self.llm.tokenize(body.prompt)
            else:
                conversation = await asyncio.to_thread(chat.conversation, body)
                token_ids = await self.llm.tokenize(conversation, chat.template_arguments(body))
            max_model_len = self.llm.processor.config.max_model_len
            return {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids}

        return await self._answer(body, request, answer())

    async def detokenize(self, body: DetokenizeBody, request: Request) -> Response:
        async def answer() -> dict[str, Any]:
            self._model_name(body.model)
            return {"prompt": await self.llm.detokenize(body.tokens)}

        return await self._answer(body, request, answer())

    async def _answer(self, body: Body, request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
        """What `work` returns. It is cancelled if the client goes away, and after the time that a request may take."""
        try:
            return json_response(await while_connected(request.receive, work, self.settings.request_timeout))
        except ClientGoneError:
            return Response(status_code=499)  # nothing reads it any more
        except Exception as error:
            return error_response(api_error(error, type(body).model_fields))

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self._model_entry(name) for name in self.model_names]})

    async def model(self, name: str) -> Response:
        try:
            return json_response(self._model_entry(self._model_name(name)))
        except ApiError as error:
            return error_response(error)

    def _model_entry(self, name: str) -> dict[str, Any]:
        max_model_len = self.llm.processor.config.max_model_len
        entry = {"id": name, "object": "model", "created": self.started, "owned_by": "nano-vllm"}
        return entry | {"max_model_len": max_model_len}

    async def health(self) -> Response:
        try:
            health = self.llm.health()
            return json_response(health, 503 if health["status"] == "unavailable" else 200)
        except EngineDeadError as error:
            return error_response(api_error(error))

    async def metrics_text(self) -> Response:
        return Response(await self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
