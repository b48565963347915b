"""From the log-probabilities of steps, as numbers, to those of outputs, with the text of tokens."""

from codecs import getincrementaldecoder
from collections import abc
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from nanovllm.engine.outputs import Logprob
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

# (log-probability, rank) by token id: first the token of the text, then the most likely ones in descending order. The
# most likely token has rank 1; of equally likely tokens the one with the lower id comes first.
Logprobs = dict[int, tuple[float, int]]
# the same as it is kept: id, log-probability and rank of each, in one tuple. Python's garbage collector soon leaves
# tuples of numbers alone, and so many dicts would make it go through all objects of the process again and again
KeptLogprobs = tuple[Any, ...]


def unpack(kept: KeptLogprobs) -> Logprobs:
    return {i: (value, rank) for i, value, rank in zip(kept[::3], kept[1::3], kept[2::3])}


class OutputLogprobs:
    """The log-probabilities in the outputs of a request, which has asked for those of its tokens or of its prompt."""

    def __init__(self, params: SamplingParams, token_bytes: Mapping[int, bytes]):
        """`token_bytes` have the special tokens, too."""
        self._params, self._token_bytes = params, token_bytes
        self._streamed: dict[int, LogprobTexts] = {}  # of the tokens that events had, by the sequence's index

    def _new_texts(self) -> "LogprobTexts":
        return LogprobTexts(self._token_bytes, self._params.detokenize)

    def of_event(self, seq: Sequence, start: int) -> list[dict[int, Logprob]] | None:
        """The entries for each token from the one with the index `start` on. None if none has arrived yet."""
        if self._params.logprobs is None or not (found := seq.feature_state["logprobs"].of_tokens):
            return None
        if seq.index not in self._streamed:
            self._streamed[seq.index] = self._new_texts()
        return self._streamed[seq.index].add(found[start - seq.num_prompt_tokens :])

    def of_answer(self, seq: Sequence) -> tuple[Iterable[dict[int, Logprob]] | None, float | None]:
        """The entries for each token of the answer, and the sum of its log-probabilities."""
        if self._params.logprobs is None:
            return None, None
        found = seq.feature_state["logprobs"].of_tokens
        # the first entry of each is the token itself
        return DeferredList(lambda: self._new_texts().add(found)), sum(value for _, value, *_ in found)

    def of_prompt(self, seq: Sequence) -> list[dict[int, Logprob] | None] | None:
        """The entries for each token of the prompt; None for the first."""
        if self._params.prompt_logprobs is None:
            return None
        texts = self._new_texts()
        texts.decode(seq.token_ids[0])
        return [None, *texts.add(seq.feature_state["logprobs"].of_prompt[1:])]


class DeferredList(abc.Sequence):
    """A list that is made when it is first read, by the thread that reads it: a step would wait for so many objects."""

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

    A character of several tokens is the text of the last of them.
    """

    def __init__(self, token_bytes: Mapping[int, bytes], detokenize: bool):
        """Without `detokenize` the text is None."""
        self._token_bytes, self._detokenize = token_bytes, detokenize
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def add(self, logprobs: Iterable[KeptLogprobs | None]) -> list[dict[int, Logprob]]:
        """The next tokens. The first entry of each dict is the token itself, the others are alternatives to it."""
        result = []
        for kept in logprobs:
            assert kept, "a token without log-probabilities"
            found = unpack(kept).items()
            if self._detokenize:
                text_of = self.decode(kept[0], kept[::3])
                result.append({i: Logprob(*value, text_of[i]) for i, value in found})
            else:
                result.append({i: Logprob(*value, None) for i, value in found})
        return result

    def decode(self, token_id: int, alternatives: Iterable[int] = ()) -> dict[int, str]:
        """The text of the next token, and the text of each alternative to it."""
        state, texts = self._decoder.getstate(), {}
        for i in (*alternatives, token_id):
            self._decoder.setstate(state)
            texts[i] = self._decoder.decode(self._token_bytes[i])
        return texts
