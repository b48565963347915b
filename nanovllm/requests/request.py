"""Defines requests. A request turns token ids into text, and makes the outputs for the caller."""

from collections.abc import Mapping
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, TypedDict, Union

from nanovllm.engine.collector import OutputCollector
from nanovllm.engine.outputs import CompletionOutput, OutputKind, RequestMetrics, RequestOutput
from nanovllm.engine.sequence import Sequence
from nanovllm.requests.detokenizer import Detokenizer, TokenBytes

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.lora.lora_request import LoRARequest

Message = Mapping[str, object]  # "role", "content", and other keys that the chat template reads


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: list[int]
    prompt: str  # the text, if the caller knows it
    multi_modal_data: Any  # {"image": an image or a list of images}: see vision/image_reader.py
    mm_processor_kwargs: Any  # {"min_pixels": ..., "max_pixels": ...}, for the images of this prompt


Prompt = str | list[int] | TextPrompt | TokensPrompt | list[Message]
Adapters = Union["LoRARequest", list["LoRARequest | None"], None]  # one for all prompts, or one or None for each


class Request:
    """Holds a prompt, the sequences that answer the prompt, and the collector of the caller."""

    collector: OutputCollector  # set when the request is submitted
    is_admitted = False  # whether the engine took the request while nothing made it refuse requests
    lora_request: Any = None  # a LoRARequest, if the request uses an adapter

    def __init__(self, group: list[Sequence], prompt: str | None, kind: OutputKind):
        self.request_id = group[0].request_id
        self.group, self.prompt, self.kind = group, prompt, kind

    @property
    def is_finished(self) -> bool:
        raise NotImplementedError

    def advance(self, scheduler: "Scheduler") -> None:
        """React to a step in which sequences of this request ended or paused."""

    def deliver(self, seq: Sequence) -> None:
        """Put new tokens of `seq` into the collector. If the caller gets only the final output, do nothing."""

    def metrics(self) -> RequestMetrics:
        arrival = time() - (perf_counter() - self.group[0].arrival)
        moments = []
        for event, pick in (("scheduled", min), ("first_token", min), ("finished", max)):
            seconds = [seq.timing[event] for seq in self.group if event in seq.timing]
            moments.append(arrival + pick(seconds) if seconds else None)
        return RequestMetrics(arrival, *moments)

    def output(self) -> Any:
        """Return this request's output: a Record with a `request_id` and the answers so far."""
        raise NotImplementedError


class CompletionRequest(Request):
    """A request for `n` independent answers to a prompt."""

    def __init__(
        self, group: list[Sequence], prompt: str | None, kind: OutputKind, token_bytes: TokenBytes, index: int = 0
    ):
        """`index` is the prompt's position in the caller's list."""
        super().__init__(group, prompt, kind)
        self.index = index
        self.params = group[0].params
        self.token_bytes = token_bytes
        self.detokenizers: dict[int, Detokenizer] = {}  # by sequence index; features may add detokenizers
        self.logprobs: Any = None  # an OutputLogprobs of features/, if the request asks for log-probabilities

    @property
    def is_finished(self) -> bool:
        return all(seq.finish_reason for seq in self.group)

    def output(self) -> RequestOutput:
        first = self.group[0]
        return RequestOutput(
            self.request_id,
            self.prompt,
            first.prompt_token_ids,
            [self._completion(seq) for seq in self.group],
            self.is_finished,
            first.num_cached_tokens,
            None if self.logprobs is None else self.logprobs.of_prompt(first),
            self.metrics(),
        )

    def _completion(self, seq: Sequence) -> CompletionOutput:
        token_ids, text = seq.completion_token_ids, ""
        if self.params.detokenize and token_ids:
            detokenizer = self.detokenizer(seq)
            detokenizer.decode(self.num_hidden(seq), seq.finish_reason is not None)
            text = detokenizer.text
        logprobs, cumulative_logprob = (None, None) if self.logprobs is None else self.logprobs.of_answer(seq)
        return CompletionOutput(
            seq.index, text, token_ids, cumulative_logprob, logprobs, seq.finish_reason, seq.stop_reason
        )

    def detokenizer(self, seq: Sequence) -> Detokenizer:
        if seq.index not in self.detokenizers:
            self.detokenizers[seq.index] = Detokenizer(seq.token_ids, seq.num_prompt_tokens, self.token_bytes)
        return self.detokenizers[seq.index]

    @staticmethod
    def num_hidden(seq: Sequence) -> int:
        """Return how many tokens at the end are not in the text: 1 if an id ended `seq`, else 0."""
        ended_by_id = seq.finish_reason == "stop" and not isinstance(seq.stop_reason, str)
        return int(ended_by_id and not seq.params.include_stop_str_in_output)
