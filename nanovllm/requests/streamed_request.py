"""Defines requests whose answers reach the caller piece by piece."""

from typing import Any

from nanovllm.engine.outputs import OutputKind
from nanovllm.engine.sequence import Sequence
from nanovllm.requests.request import CompletionRequest
from nanovllm.requests.stream_event import StreamEvent


class StreamedRequest(CompletionRequest):
    def __init__(self, group: list[Sequence], *arguments: Any):
        super().__init__(group, *arguments)
        # by sequence index: how many of the sequence's tokens were delivered, including the prompt
        self._num_delivered = [seq.num_prompt_tokens for seq in group]

    def deliver(self, seq: Sequence) -> None:
        is_last = seq.finish_reason is not None
        start, self._num_delivered[seq.index] = self._num_delivered[seq.index], len(seq.token_ids)
        token_ids = seq.token_ids[start:]
        if self.kind is OutputKind.TOKENS:
            self.collector.new.new_tokens += [(self.request_id, token_id) for token_id in token_ids]
            return
        num_hidden = self.num_hidden(seq) if is_last else 0
        text = self.detokenizer(seq).take_text(num_hidden, is_last) if self.params.detokenize else ""
        logprobs = None if self.logprobs is None else self.logprobs.of_event(seq, start)
        event = StreamEvent(
            self.index, seq.index, self.request_id, text, token_ids, seq.finish_reason, seq.stop_reason, logprobs
        )
        self.collector.new.events.append(event)
