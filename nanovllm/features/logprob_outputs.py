"""Converts the numeric log-probabilities of steps into output entries, which include the text of each token."""

from codecs import getincrementaldecoder
from collections import abc
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from nanovllm.engine.outputs import Logprob
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

# (log-probability, rank) by token id: first the chosen token, then the most likely tokens in descending order. The most
# likely token has rank 1. Among equally likely tokens, the lower id comes first.
Logprobs = dict[int, tuple[float, int]]
# the stored form of these entries: id, log-probability and rank of each token, flattened into one tuple. The garbage
# collector soon stops tracking tuples of numbers; that many dicts would trigger full collections again and again
KeptLogprobs = tuple[Any, ...]


def unpack(kept: KeptLogprobs) -> Logprobs:
    return {i: (value, rank) for i, value, rank in zip(kept[::3], kept[1::3], kept[2::3])}


class OutputLogprobs:
    """Creates the output entries of a request that sets `logprobs` or `prompt_logprobs`."""

    def __init__(self, params: SamplingParams, token_bytes: Mapping[int, bytes]):
        """`token_bytes` must include the special tokens."""
        self._params, self._token_bytes = params, token_bytes
        self._streamed: dict[int, LogprobTexts] = {}  # by index of the sequence: the texts of streamed tokens

    def _new_texts(self) -> "LogprobTexts":
        return LogprobTexts(self._token_bytes, self._params.detokenize)

    def of_event(self, seq: Sequence, start: int) -> list[dict[int, Logprob]] | None:
        """Return the entries of a stream event, or None if the event has no entries.

        The event's tokens begin at index `start`.
        """
        if self._params.logprobs is None or not (kept := seq.feature_state["logprobs"].of_tokens):
            return None
        if seq.index not in self._streamed:
            self._streamed[seq.index] = self._new_texts()
        return self._streamed[seq.index].add(kept[start - seq.num_prompt_tokens :])

    def of_answer(self, seq: Sequence) -> tuple[Iterable[dict[int, Logprob]] | None, float | None]:
        """Return the entries of the answer's tokens, and the sum of the tokens' log-probabilities."""
        if self._params.logprobs is None:
            return None, None
        kept = seq.feature_state["logprobs"].of_tokens
        # the first entry of each tuple is the token itself
        return DeferredList(lambda: self._new_texts().add(kept)), sum(value for _, value, *_ in kept)

    def of_prompt(self, seq: Sequence) -> list[dict[int, Logprob] | None] | None:
        """Return the entries of the prompt's tokens, with None for the first token."""
        if self._params.prompt_logprobs is None:
            return None
        texts = self._new_texts()
        texts.decode(seq.token_ids[0])
        return [None, *texts.add(seq.feature_state["logprobs"].of_prompt[1:])]


class DeferredList(abc.Sequence):
    """A list that is built in the reader's thread when the list is first read.

    Building the list in the engine's thread would delay a step.
    """

    def __init__(self, make: Callable[[], list]):
        self._list = cache(make)

    def __len__(self) -> int:
        return len(self._list())

    def __getitem__(self, index):
        return self._list()[index]

    def __add__(self, other: Iterable) -> list:
        return [*self, *other]

    def __radd__(self, other: Iterable) -> list:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        return self._list() == (other._list() if isinstance(other, DeferredList) else other)

    def __repr__(self) -> str:
        return repr(self._list())

    def __reduce__(self):
        return list, (self._list(),)


class LogprobTexts:
    """Adds text to the log-probabilities of one answer, token by token.

    If several tokens encode one character, the text of the last of these tokens contains the character.
    """

    def __init__(self, token_bytes: Mapping[int, bytes], detokenize: bool):
        """If `detokenize` is False, all texts are None."""
        self._token_bytes, self._detokenize = token_bytes, detokenize
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def add(self, logprobs: Iterable[KeptLogprobs | None]) -> list[dict[int, Logprob]]:
        """Return one dict for each of the next tokens.

        A dict contains first the token itself, and then the alternatives to the token.
        """
        result = []
        for kept in logprobs:
            assert kept, "a token without log-probabilities"
            entries = unpack(kept).items()
            if self._detokenize:
                text_of = self.decode(kept[0], kept[::3])
                result.append({i: Logprob(*value, text_of[i]) for i, value in entries})
            else:
                result.append({i: Logprob(*value, None) for i, value in entries})
        return result

    def decode(self, token_id: int, alternatives: Iterable[int] = ()) -> dict[int, str]:
        """Return the texts of the next token and its alternatives, by token id."""
        state, texts = self._decoder.getstate(), {}
        for i in (*alternatives, token_id):
            self._decoder.setstate(state)
            texts[i] = self._decoder.decode(self._token_bytes[i])
        return texts
