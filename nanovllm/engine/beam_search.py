"""Beam search: beams are sequences that pause after each token, share what they have in common, and branch."""

from itertools import count
from operator import itemgetter
from typing import NamedTuple

from nanovllm.engine.detokenizer import Detokenizer, Vocabulary
from nanovllm.engine.outputs import BeamOutput, BeamSearchOutput
from nanovllm.engine.request import Inbox
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import BeamSearchParams, SamplingParams


class Beam(NamedTuple):
    """Tokens after the prompt, the sum of their log-probabilities, and the score of a beam that has ended."""

    score: float
    cumulative_logprob: float
    token_ids: tuple[int, ...]


class BeamRequest:
    """A search for the likeliest answers to a prompt, as transformers' `generate(num_beams=...)` does with its defaults.

    Of all continuations of the beams, the best `beam_width` that do not end go on, and those that end among the best
    `beam_width` are kept, so many in all. The search is over when no beam, divided by its length to the power
    `length_penalty`, is better than the worst that was kept.
    """

    is_quiet = True

    def __init__(
        self,
        root: Sequence,
        params: BeamSearchParams,
        prompt: str | None,
        inbox: Inbox,
        vocabulary: Vocabulary,
        max_model_len: int,
        eos_token_ids: frozenset[int],
    ):
        self.request_id, self.group, self.prompt, self.inbox = root.request_id, [root], prompt, inbox
        self._root, self._params, self._vocabulary = root, params, vocabulary
        self._max_tokens = min(params.max_tokens, max_model_len - root.num_prompt_tokens)
        self._eos_token_ids = eos_token_ids
        self._sums = {root.index: 0.0}  # of log-probabilities, by the live beams' indices
        self._next_index = count(1)
        self._ended: list[Beam] = []

    @staticmethod
    def sampling_params(params: BeamSearchParams, num_eos: int, vocab_size: int) -> SamplingParams:
        """What a beam's sequence asks for: so many candidates that enough are left if the best are ends."""
        num_candidates = min(vocab_size, params.beam_width + max(params.beam_width, num_eos))
        return SamplingParams(temperature=0, max_tokens=params.max_tokens, logprobs=num_candidates)

    @property
    def is_finished(self) -> bool:
        return not self._sums

    def advance(self, scheduler: Scheduler) -> None:
        """Choose among the candidates, once those of all beams are there."""
        beams = [*scheduler.live[self.request_id].values()]
        if not all(seq.is_paused for seq in beams):
            return
        width, length = self._params.beam_width, len(beams[0].token_ids) + 1 - self._root.num_prompt_tokens
        penalty, is_last = length**self._params.length_penalty, length == self._max_tokens
        found = [
            (self._sums[seq.index] + logprob, (*seq.completion_token_ids, token_id), seq)
            for seq in beams
            for token_id, (logprob, _) in seq.candidates.items()
        ]
        found.sort(key=itemgetter(0, 1), reverse=True)
        is_end = [is_last or token_ids[-1] in self._eos_token_ids for _, token_ids, _ in found]
        self._ended += [Beam(x / penalty, x, ids) for (x, ids, _), ends in zip(found[:width], is_end) if ends]
        self._ended = sorted(self._ended, reverse=True)[:width]
        live = [continuation for continuation, ends in zip(found, is_end) if not ends][:width]
        if live and len(self._ended) == width and live[0][0] / penalty <= self._ended[-1].score:
            live = []
        self._branch(scheduler, beams, live)

    def _branch(
        self, scheduler: Scheduler, beams: list[Sequence], live: list[tuple[float, tuple[int, ...], Sequence]]
    ) -> None:
        children: dict[int, list[tuple[float, int]]] = {}
        for total, token_ids, seq in live:
            children.setdefault(seq.index, []).append((total, token_ids[-1]))
        for seq in beams:  # first of all they give back their blocks
            if seq.index not in children:
                scheduler.finish(seq, "stop")
        sums = {}
        for seq in beams:
            if seq.index in children:
                totals, token_ids = zip(*children[seq.index])
                indices = [seq.index, *(next(self._next_index) for _ in totals[1:])]
                sums |= zip(indices, totals)
                scheduler.branch(seq, [*zip(indices, token_ids)])
        self._sums = sums

    def output(self) -> BeamSearchOutput:
        prompt_token_ids = self._root.token_ids[: self._root.num_prompt_tokens]
        outputs = [
            BeamOutput(self._text(x.token_ids), [*x.token_ids], x.cumulative_logprob, x.score) for x in self._ended
        ]
        return BeamSearchOutput(self.request_id, self.prompt, prompt_token_ids, outputs, self.is_finished)

    def _text(self, token_ids: tuple[int, ...]) -> str:
        return Detokenizer([*token_ids], 0, self._root.params, self._vocabulary).extend(is_over=True)
