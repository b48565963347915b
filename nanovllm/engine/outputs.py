"""What comes out of the engine: answers, events, the account of a step, and a progress bar."""
from dataclasses import dataclass
from time import perf_counter

from tqdm import tqdm

from nanovllm.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one turn of the loop brought to the host.

    finished: the answers that ended, as `generate` returns them, with their `request_id`.
    arrived: the sequences that got a token, with it in a list; of those that were aborted the list is empty.
    """

    finished: list[dict]
    arrived: list[tuple[Sequence, list[int]]]
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0

    @property
    def new_tokens(self) -> list[tuple[int, int]]:
        """(request id, token id) of every token that arrived."""
        return [(seq.request_id, token_id) for seq, token_ids in self.arrived for token_id in token_ids]


def answer_of(group: list[Sequence]) -> dict:
    """What `LLMEngine.generate` returns of a request whose sequences have ended."""
    first, asked = group[0], group[0].params
    answer = {"request_id": first.request_id, "prompt_token_ids": first.token_ids[: first.num_prompt_tokens]}
    answer["num_cached_tokens"] = first.num_cached_tokens
    if asked.prompt_logprobs is not None:
        answer["prompt_logprobs"] = first.prompt_logprobs
    outputs = []
    for seq in group:
        outputs.append({"text": seq.detokenizer.extend(is_over=True), "token_ids": seq.completion_token_ids})
        outputs[-1] |= {"finish_reason": seq.finish_reason, "stop_reason": seq.stop_reason, "timing": seq.timing}
        if asked.logprobs is not None:
            outputs[-1]["logprobs"] = seq.logprobs
    return answer | (outputs[0] if asked.n == 1 else {"outputs": outputs})


def event_of(seq: Sequence, token_ids: list[int]) -> dict:
    """What `LLMEngine.stream` yields of a sequence that got these tokens."""
    text = seq.detokenizer.take(is_over=seq.finish_reason is not None)
    event = {"request_id": seq.request_id, "text": text, "token_ids": token_ids}
    event |= {"finish_reason": seq.finish_reason, "stop_reason": seq.stop_reason}
    if seq.params.n > 1:
        event["output_index"] = seq.index
    if seq.params.logprobs is not None:
        event["logprobs"] = seq.logprobs[len(seq.logprobs) - len(token_ids) :]
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
