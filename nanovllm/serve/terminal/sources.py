"""Provides a conversation's answers, which come from a model in this process or from a server with OpenAI's API."""

import json
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, replace
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from nanovllm.reasoning.formats import THINK, format_of, template_text
from nanovllm.reasoning.stage import Reasoning, Stage, TextMarkers
from nanovllm.requests.request import Message
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.harmony_parser import HarmonyParser
from nanovllm.serve.reasoning_parser import ReasoningParser, make_reasoning_parser
from nanovllm.utils.model_files import BUNDLED

if TYPE_CHECKING:
    from nanovllm.llm import LLM

TIMEOUT = 600.0  # seconds that a server may be silent


class Piece(NamedTuple):
    """The next part of an answer. The last part has a `finish_reason`.

    num_tokens: the number of the answer's tokens so far, including the reasoning.
    """

    text: str
    reasoning: str
    num_tokens: int
    finish_reason: str | None


class Source(Protocol):
    name: str  # the model's name
    description: str

    def check(self, params: dict[str, Any]) -> None:
        """Raise ValueError or TypeError if a sampling parameter is wrong."""

    def check_image(self, part: dict[str, Any]) -> None:
        """Raise ValueError if the model can't read an image, which is a part of a message.

        A server is not asked, so it may refuse the image later.
        """

    def all_params(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return the given sampling parameters.

        Also return the defaults of all other parameters, if the defaults are known.
        """

    def stream(self, messages: list[Message], params: dict[str, Any]) -> Generator[Piece, None, None]:
        """Yield the answer to a conversation in pieces. Failures raise ValueError, OSError or RuntimeError."""


class LocalModel:
    """A model in this process."""

    def __init__(self, llm: "LLM", name: str):
        if llm.tokenizer.chat_template is None:
            raise ValueError(f"model={name!r}: has no chat template; `nanovllm generate` works without one")
        self.llm, self.name = llm, name
        config = llm.config
        dtype = str(config.dtype).removeprefix("torch.")
        self.description = f"{name} on {config.device}, {dtype}, up to {config.max_model_len} tokens"
        if Path(config.model).parent == BUNDLED:
            self.description += ". It is for demonstration: it adds, sorts, counts and lists primes"
        # by default, an answer may fill the context
        self.defaults = replace(llm.get_default_sampling_params(), max_tokens=None)

    def check(self, params: dict[str, Any]) -> None:
        replace(self.defaults, **params)

    def check_image(self, part: dict[str, Any]) -> None:
        messages: list[Message] = [{"role": "user", "content": [part]}]
        self.llm.input_processor.tokenize(messages)

    def all_params(self, params: dict[str, Any]) -> dict[str, Any]:
        return asdict(replace(self.defaults, **params))

    def stream(self, messages: list[Message], params: dict[str, Any]) -> Generator[Piece, None, None]:
        from nanovllm.reasoning.reasoning_feature import markers_of
        from nanovllm.requests.request import TokensPrompt

        processor = self.llm.input_processor
        markers = markers_of(format_of(template_text(self.llm.tokenizer.chat_template)) or "think", processor)
        text, prompt_token_ids, images = processor.tokenize(messages)
        parser: Any = make_reasoning_parser(markers.start(prompt_token_ids))
        if isinstance(parser, HarmonyParser):
            params = params | {"skip_special_tokens": False}
        prompt = TokensPrompt(prompt=text or "", prompt_token_ids=prompt_token_ids, multi_modal_data=images)
        num_tokens = 0
        stream: Any = self.llm.stream(prompt, replace(self.defaults, **params))  # a generator
        with closing(stream) as events:
            for event in events:
                num_tokens += len(event.token_ids)
                reasoning, text = parser.feed(event.text, event.finish_reason is not None, event.token_ids)
                yield Piece(text, reasoning, num_tokens, event.finish_reason)


class Server:
    """A running server. If a parameter is not given, the server chooses its value."""

    def __init__(self, url: str, model: str | None, api_key: str | None):
        """Raises OSError if a request fails.

        Raises ValueError if the URL is wrong, or if the server lists no models.
        """
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url={url!r}: must begin with http:// or https://")
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self.name = model or self._first_model()
        self.description = f"{self.name} at {self.url}"

    def _first_model(self) -> str:
        with self._open("/models") as response:
            try:
                return json.load(response)["data"][0]["id"]
            except (ValueError, LookupError, TypeError):
                raise ValueError(f"url={self.url!r}: lists no models; pass the model's name") from None

    def _open(self, path: str, body: dict | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            return urlopen(Request(self.url + path, data, self.headers), timeout=TIMEOUT)
        except HTTPError as error:
            raise OSError(f"{self.url}{path}: status {error.code}: {_message(error.read())}") from None
        except (URLError, HTTPException) as error:
            raise OSError(f"{self.url}: {getattr(error, 'reason', error)!s}") from None

    def check(self, params: dict[str, Any]) -> None:
        SamplingParams(**params)

    def check_image(self, part: dict[str, Any]) -> None:
        pass

    def all_params(self, params: dict[str, Any]) -> dict[str, Any]:
        return params

    def stream(self, messages: list[Message], params: dict[str, Any]) -> Generator[Piece, None, None]:
        body = {"model": self.name, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        # needed if the server leaves the reasoning in the text
        parser = ReasoningParser(Reasoning(TextMarkers(THINK), Stage.BEFORE))
        num_tokens, finish_reason = 0, None
        with self._open("/chat/completions", body | params) as response:
            for chunk in self._chunks(response):
                for choice in chunk.get("choices", []):
                    delta = choice.get("delta") or {}
                    reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
                    content = delta.get("content") or ""
                    finish_reason = choice.get("finish_reason") or finish_reason
                    if content or reasoning:
                        num_tokens += 1  # an estimate (one token per chunk) until the usage arrives
                        more, text = parser.feed(content)
                        yield Piece(text, reasoning + more, num_tokens, None)
                num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
        if finish_reason is None:
            raise OSError(f"{self.url}: the connection ended before the answer did")
        reasoning, text = parser.feed("", is_last=True)
        yield Piece(text, reasoning, num_tokens, finish_reason)

    def _chunks(self, response: Any) -> Generator[dict, None, None]:
        """Yield the JSON objects in server-sent events. Error events and failed connections raise OSError."""
        try:
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise OSError(f"{self.url}: {_message(data)}")
                    yield chunk
        except HTTPException as error:
            raise OSError(f"{self.url}: {error!r}") from None


def _message(content: bytes) -> str:
    try:
        error = json.loads(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return content.decode(errors="replace")[:500].strip()
