"""What comes out of the engine: answers, events, the account of a step, and a progress bar."""
from dataclasses import dataclass, field
from time import perf_counter

from tqdm import tqdm

from nanovllm.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one turn of the loop brought to the host.

    finished: the answers that ended, as `generate` returns them, with their `request_id`.
    new_tokens: (request id, token id) of every token that arrived.
    sequences: those that got one of them, or were aborted.
    """

    finished: list[dict] = field(default_factory=list)
    new_tokens: list[tuple[int, int]] = field(default_factory=list)
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    sequences: list[Sequence] = field(default_factory=list)


def answer_of(group: list[Sequence]) -> dict:
    """What `LLMEngine.generate` returns of a request whose sequences have ended."""
    first, params = group[0], group[0].params
    request = {"request_id": first.request_id, "prompt_token_ids": first.token_ids[: first.num_prompt_tokens]}
    request["num_cached_tokens"] = first.num_cached_tokens
    if params.prompt_logprobs is not None:
        request["prompt_logprobs"] = first.prompt_logprobs
    outputs = [
        {
            "text": seq.text(),
            "token_ids": seq.completion_token_ids,
            "finish_reason": seq.finish_reason,
            "stop_reason": seq.stop_reason,
            "timing": seq.timing,
        }
        | ({} if params.logprobs is None else {"logprobs": seq.logprobs})
        for seq in group
    ]
    return request | (outputs[0] if params.n == 1 else {"outputs": outputs})


def event_of(seq: Sequence) -> dict:
    """What `LLMEngine.stream` yields of a sequence: all that is new since the last event."""
    text, token_ids, logprobs = seq.take()
    event = {"request_id": seq.request_id, "text": text, "token_ids": token_ids}
    event |= {"finish_reason": seq.finish_reason, "stop_reason": seq.stop_reason}
    if seq.params.n > 1:
        event["output_index"] = seq.index
    if seq.params.logprobs is not None:
        event["logprobs"] = logprobs
    return event


class ProgressBar(tqdm):
    """Requests that are done, and tokens per second of the last prefill and the last decode step."""

    def __init__(self, total: int, disable: bool):
        super().__init__(total=total, desc="Generating", disable=disable, dynamic_ncols=True)
        self.rates: dict[str, str] = {}
        self.last = perf_counter()

    def show(self, output: StepOutput) -> None:
        now = perf_counter()
        for kind, num_tokens in (("prefill", output.num_prefill_tokens), ("decode", output.num_decode_tokens)):
            if num_tokens:
                self.rates[kind] = f"{num_tokens / (now - self.last):.0f} tok/s"
        self.last = now
        self.set_postfix(self.rates, refresh=False)
        self.update(len(output.finished))
