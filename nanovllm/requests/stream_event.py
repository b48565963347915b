"""The events of a stream."""

from dataclasses import dataclass

from nanovllm.engine.outputs import Logprob, Record


@dataclass(frozen=True, slots=True, eq=False)
class StreamEvent(Record):
    """Contains the next piece of an answer. Only the last event of an answer has a `finish_reason`.

    index: the prompt's position in the caller's list.
    output_index: the answer's index among the `n` answers to the prompt.
    text: the new text. If the end of the text might begin a stop string, the end is held back for a later event.
    token_ids: the new tokens, whose text might be in a later event.
    logprobs: the log-probabilities of `token_ids`, or None if the request does not ask for them.
    """

    index: int
    output_index: int
    request_id: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[dict[int, Logprob]] | None
