"""Defines the routes of OpenAI's API that generate text or handle tokens."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

from fastapi import FastAPI, Request, Response

from nanovllm.requests.prompts import has_images
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve import chat, protocol
from nanovllm.serve.adapters_api import ServedAdapters
from nanovllm.serve.answer_formats import find_formats
from nanovllm.serve.answers import Answer
from nanovllm.serve.async_request import AsyncRequest
from nanovllm.serve.completions import CompletionAnswer, Echo
from nanovllm.serve.engine_client import EngineClient
from nanovllm.serve.errors import ApiError, about, api_error, require, too_deep
from nanovllm.serve.http_responses import EventStream, json_response
from nanovllm.serve.prompt_lanes import RenderedChat, tokenized
from nanovllm.serve.settings import ServerSettings
from nanovllm.serve.structured import structured_outputs, with_own_field
from nanovllm.serve.template_sandbox import MANY_MESSAGES, may_take_long

# requests above these limits are prepared in a thread, so that other clients do not wait
MAX_BODY_IN_LOOP = 2**16  # bytes
MAX_MESSAGES_IN_LOOP = 256  # including the messages of previous responses
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for /v1/completions
# a request for the engine: prompts, parameters, and arguments of the chat template
Prepared = tuple[list, SamplingParams, dict[str, Any] | None]
Prepare = Callable[[], Prepared]
MakeAnswer = Callable[[Sequence[AsyncRequest]], Awaitable[Answer]]


class Api:
    def __init__(self, llm: EngineClient, settings: ServerSettings, model_names: Sequence[str], root: str):
        """root: the name or folder of the model that is served under `model_names`."""
        self.llm, self.settings, self.model_names, self.root = llm, settings, model_names, root
        self.adapters = ServedAdapters(llm, settings.adapters(), model_names)
        if settings.chat_template is not None:
            llm.input_processor.tokenizer.chat_template = settings.chat_template
        self.chat_template = getattr(llm.input_processor.tokenizer, "chat_template", None)
        self.formats = find_formats(llm.input_processor, settings)
        # the parameters that the model recommends, except for max_tokens, which the API defines
        plain, recommended = asdict(SamplingParams()), asdict(llm.input_processor.default_sampling_params())
        del recommended["max_tokens"]
        self.defaults = {name: value for name, value in recommended.items() if value != plain[name]}

    def add_routes(self, app: FastAPI) -> None:
        app.post("/v1/completions")(self.completions)
        app.post("/v1/chat/completions")(self.chat_completions)
        app.post("/tokenize")(self.tokenize)
        app.post("/detokenize")(self.detokenize)

    # -- generation ----------------------------------------------------------------------------------------------------

    async def completions(self, body: protocol.CompletionBody, request: Request) -> Response:
        def prepare() -> Prepared:
            require(body.best_of in (None, body.n or 1), f"best_of={body.best_of}: must be {body.n or 1}, as `n`")
            has_echoed_logprobs = body.echo and body.logprobs is not None
            require(not (has_echoed_logprobs and body.stream), "echo: can't be streamed together with logprobs")
            special = self.formats.budget_params(body)
            if has_echoed_logprobs and body.prompt_logprobs is None:
                special["prompt_logprobs"] = body.logprobs
            if body.max_tokens is None:
                special["max_tokens"] = COMPLETION_TOKENS
            elif body.max_tokens == 0 and body.echo:
                special["max_tokens"] = 1  # CompletionAnswer does not show this token
            params = protocol.sampling_params(body, self.defaults, structured_outputs(body), **special)
            return body.prompts(), params, None

        async def make_answer(requests: Sequence[AsyncRequest]) -> Answer:
            echoes = [await self._echo(prompt_request) if body.echo else Echo() for prompt_request in requests]
            return CompletionAnswer(body, self.model_name(body.model), requests, echoes)

        return await self._respond(body, request, prepare, make_answer)

    async def chat_completions(self, body: protocol.ChatBody, request: Request) -> Response:
        return await self.converse(body, request, chat.ChatAnswer)

    async def converse(self, body: protocol.ChatBody, request: Request, form: Callable[..., Answer]) -> Response:
        """Answer a conversation. `form` is called with the arguments of ChatAnswer, and makes the answer."""

        def prepare() -> Prepared:
            require(body.logprobs or not body.top_logprobs, "top_logprobs: needs logprobs=true")
            max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
            logprobs = (body.top_logprobs or 0) if body.logprobs else None
            structure = structured_outputs(body)
            special = {"max_tokens": max_tokens, "logprobs": logprobs}
            special |= self.formats.chat_params(body, structure is not None)
            params = protocol.sampling_params(body, self.defaults, structure, **special)
            return [chat.conversation(body)], params, self._template_arguments(body)

        async def make_answer(requests: Sequence[AsyncRequest]) -> Answer:
            return form(body, self.model_name(body.model), requests, self.formats)

        return await self._respond(body, request, prepare, make_answer)

    async def _respond(
        self, body: protocol.GenerationBody, request: Request, prepare: Prepare, make_answer: MakeAnswer
    ) -> Response:
        """Check and queue a request for each prompt. Return the complete answer or a stream."""
        if self.settings.enable_force_include_usage and body.stream:
            body.stream_options = protocol.StreamOptions(include_usage=True, continuous_usage_stats=True)
        body.return_tokens_as_token_ids = body.return_tokens_as_token_ids or self.settings.return_tokens_as_token_ids
        requests: list[AsyncRequest] = []
        until = asyncio.get_running_loop().time() + self.settings.request_timeout
        with ExitStack() as ending:
            ending.callback(self._discard, requests)
            try:
                num_messages = len(getattr(body, "messages", ()))
                is_long = len(await request.body()) > MAX_BODY_IN_LOOP or num_messages > MAX_MESSAGES_IN_LOOP
                await self._submit(body, await asyncio.to_thread(prepare) if is_long else prepare(), requests)
                answer = await make_answer(requests)
            except Exception as error:
                if "recursion" in str(error) and not isinstance(error, ApiError):
                    error = await asyncio.to_thread(too_deep, error, await request.body())
                raise with_own_field(api_error(error, type(body).model_fields), body) from None
            if not body.stream:
                return json_response(await answer.complete())
            return EventStream(answer, ending.pop_all().close, until)

    async def _submit(self, body: protocol.GenerationBody, prepared: Prepared, requests: list[AsyncRequest]) -> None:
        lora_request = self.adapters.by_name.get(self.model_name(body.model))
        require(body.stream or body.stream_options is None, "stream_options: needs stream=true")
        require(not (body.stream and body.prompt_logprobs), "prompt_logprobs: can't be streamed")
        (prompts, params, template_arguments), max_answers = prepared, self.settings.max_answers
        require(prompts, "prompt: there must be at least one")
        problem = f"n={params.n}: times {len(prompts)} prompts is more than {max_answers} answers"
        require(len(prompts) * params.n <= max_answers, problem)
        own_params: Any = params
        if body.use_beam_search:
            require(self.llm.has_one_engine, "use_beam_search: is not supported with several replicas")
            own_params = protocol.beam_search_params(body, params, self.llm.input_processor.max_model_len)
        for prompt in prompts:
            prompt = await self._rendered(body, prompt, template_arguments)
            is_rendered = isinstance(prompt, RenderedChat)
            if is_rendered or body.add_special_tokens is not None or body.truncate_prompt_tokens is not None:
                prompt = partial(tokenized, body, prompt, template_arguments, params.max_tokens)
            arguments = prompt, own_params, None, body.priority, template_arguments, bool(body.stream), body.cache_salt
            requests.append(await self.llm.submit(*arguments, lora_request))

    def _discard(self, requests: Sequence[AsyncRequest]) -> None:
        for request in requests:
            self.llm.discard(request)

    async def _echo(self, request: AsyncRequest) -> Echo:
        text, token_ids = request.request.prompt, request.prompt_token_ids
        whole = await self.llm.detokenize(token_ids) if text is None else text
        return Echo(whole, await self.llm.detokenize(token_ids[:1]))

    def _template_arguments(self, body: protocol.ChatFields) -> dict[str, Any]:
        return chat.template_arguments(body, self.chat_template, self.settings.trust_request_chat_template)

    async def _rendered(self, body: protocol.TextBody, prompt: Any, template_arguments: dict[str, Any] | None) -> Any:
        """Return a prompt. If the prompt is a conversation that may be slow to render, the sandbox renders it.

        Raises ValueError if the conversation has images, which the sandbox does not support.
        """
        if isinstance(body, protocol.ChatFields) and may_take_long(body, self.chat_template):
            if has_images(prompt) and self.llm.input_processor.config.model_config.vision is not None:
                slow = f"a chat_template, chat_template_kwargs that may be slow, or more than {MANY_MESSAGES} messages"
                raise ValueError(f"messages: a conversation with images must not have {slow}")
            return await self.llm.render(prompt, template_arguments or {})
        return prompt

    def model_name(self, name: str | None) -> str:
        """Return the model name to put into an answer. Raises ApiError if this server does not have the model."""
        if name is not None and name not in self.model_names and name not in self.adapters.by_name:
            served = ", ".join(map(repr, islice((*self.model_names, *self.adapters.by_name), 8)))
            problem = f"model {name!r:.80} is not served here; the server has {served}"
            raise ApiError(404, problem, "model", "model_not_found")
        return self.model_names[0] if name is None else name

    # -- tokens --------------------------------------------------------------------------------------------------------

    async def tokenize(self, body: protocol.AnyTokenizeBody, request: Request) -> Response:
        tokens, processor = await self.prompt_token_ids(body), self.llm.input_processor
        names = processor.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        lengths = {"count": len(tokens), "max_model_len": processor.config.max_model_len}
        return json_response(lengths | {"tokens": tokens, "token_strs": names})

    async def prompt_token_ids(self, body: protocol.TextBody) -> list[int]:
        """Tokenize a prompt. Raises ApiError if the model is unknown, or if the prompt can't be tokenized."""
        self.model_name(body.model)
        with about(type(body).model_fields):
            prompt, arguments = getattr(body, "prompt", None), None
            if isinstance(body, protocol.ChatFields):
                prompt, arguments = await asyncio.to_thread(chat.conversation, body), self._template_arguments(body)
                prompt = await self._rendered(body, prompt, arguments)
            return await self.llm.tokenize(partial(tokenized, body, prompt, arguments, None))

    async def detokenize(self, body: protocol.DetokenizeBody, request: Request) -> Response:
        self.model_name(body.model)
        with about(type(body).model_fields):
            return json_response({"prompt": await self.llm.detokenize(body.tokens)})
