"""Makes the answers of /v1/completions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nanovllm.engine.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.requests.stream_event import StreamEvent
from nanovllm.serve.answers import Answer, encoded, logprob_value
from nanovllm.serve.async_request import AsyncRequest
from nanovllm.serve.protocol import CompletionBody

TokenLogprobs = Sequence[Mapping[int, Logprob] | None]


class Echo(NamedTuple):
    """The text of an echoed prompt, and the text of its first token. (The first token has no log-probability.)"""

    text: str = ""
    first_token: str = ""


class CompletionAnswer(Answer):
    id_prefix, object_name, chunk_name = "cmpl-", "text_completion", "text_completion"
    body: CompletionBody

    def __init__(self, body: CompletionBody, model: str, requests: Sequence[AsyncRequest], echoes: Sequence[Echo]):
        """echoes: one Echo per prompt."""
        super().__init__(body, model, requests)
        self._echoes = echoes
        self._num_characters: dict[int, int] = {}  # streamed so far, by choice

    def _whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        if self.body.max_tokens == 0:
            outputs = [replace(output, outputs=[_without_tokens(x) for x in output.outputs]) for output in outputs]
        return super()._whole(outputs)

    def _events(self, prompt_index: int, events: Sequence[StreamEvent]) -> bytes:
        if self.body.max_tokens == 0:
            events = [_without_tokens(event) for event in events]
        return super()._events(prompt_index, events)

    def choice(self, prompt_index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        echo, logprobs = self._echoes[prompt_index], None
        if answer.logprobs is not None and self.body.echo and output.prompt_logprobs is not None:
            token_ids = [*output.prompt_token_ids, *answer.token_ids]
            logprobs = self._logprobs(token_ids, [*output.prompt_logprobs, *answer.logprobs], 0, echo.first_token)
        elif answer.logprobs is not None:
            logprobs = self._logprobs(answer.token_ids, answer.logprobs, len(echo.text))
        number = self._number(prompt_index, answer.index)
        return self._choice(number, echo.text + answer.text, logprobs, answer) | self.prompt_entries(output)

    def chunk_choices(self, prompt_index: int, event: StreamEvent) -> list[dict[str, Any]]:
        number = self._number(prompt_index, event.output_index)
        is_first = number not in self._num_characters
        text = self._echoes[prompt_index].text + event.text if is_first else event.text
        offset = self._num_characters.get(number, len(text) - len(event.text))
        self._num_characters[number] = offset + len(event.text)
        logprobs = None if event.logprobs is None else self._logprobs(event.token_ids, event.logprobs, offset)
        is_empty = not text and logprobs is None and event.finish_reason is None
        if is_empty and not (self._has_usage_everywhere or self.body.return_token_ids):
            return []
        choice = self._choice(number, text, logprobs, event)
        if is_first and self.body.return_token_ids:
            choice["prompt_token_ids"] = self.requests[prompt_index].prompt_token_ids
        return [choice]

    def _choice(
        self, number: int, text: str, logprobs: dict | None, piece: CompletionOutput | StreamEvent
    ) -> dict[str, Any]:
        reasons = {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        token_ids = piece.token_ids if self.body.return_token_ids else None
        return {"index": number, "text": text, "logprobs": logprobs, **reasons, "token_ids": token_ids}

    def _number(self, prompt_index: int, answer_index: int) -> int:
        """Return the index of a choice. All answers to a prompt precede all answers to the following prompt."""
        return prompt_index * (self.body.n or 1) + answer_index

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: TokenLogprobs, offset: int, first_token: str = ""
    ) -> dict[str, list]:
        """Return log-probabilities in the format of the API.

        first_token: the text of the first token, if this token has no log-probabilities.
        """
        result: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, alternatives in zip(token_ids, logprobs):
            token = (alternatives[token_id].decoded_token or "") if alternatives else first_token
            result["tokens"].append(self.token_text(token_id, token))
            result["token_logprobs"].append(logprob_value(alternatives[token_id]) if alternatives else None)
            items = alternatives.items() if alternatives else ()
            top = {self.token_text(i, x.decoded_token) or f"token_id:{i}": logprob_value(x) for i, x in items}
            result["top_logprobs"].append(encoded(top) if top else None)
            result["text_offset"].append(offset)
            offset += len(token)
        return result


def _without_tokens(answer: Any) -> Any:
    """Remove the token that the engine generates even for `max_tokens=0`."""
    logprobs: list | None = None if answer.logprobs is None else []
    reason = answer.finish_reason and "length"
    return replace(answer, text="", token_ids=[], logprobs=logprobs, finish_reason=reason, stop_reason=None)
