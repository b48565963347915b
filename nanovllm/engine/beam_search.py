"""Beam search: a loop of one-token requests over the engine, whose prefix cache keeps what the beams have in common."""
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm.sampling_params import SamplingParams


class Beam(NamedTuple):
    """Tokens after the prompt, and the sum of their log-probabilities; once it has ended, by its length penalty."""

    score: float
    token_ids: tuple[int, ...] = ()


@dataclass
class BeamSearch:
    """The search from one prompt, as transformers' `generate(num_beams=...)` does it with its defaults.

    Of all continuations of the beams, the best `width` that do not end go on, and those that end among the best `width`
    are kept, `width` of them. It is over when no beam, divided by its length to the power `length_penalty`, is better
    than the worst that was kept.
    """

    prompt: list[int]
    max_tokens: int
    width: int
    length_penalty: float
    eos_token_ids: frozenset[int]
    beams: list[Beam] = field(default_factory=lambda: [Beam(0.0)])
    ended: list[Beam] = field(default_factory=list)

    def advance(self, logprobs: list[dict[int, float]]) -> None:
        """Go on by a token: for each beam the log-probabilities of its likeliest next ones."""
        length = len(self.beams[0].token_ids) + 1
        candidates = [
            Beam(beam.score + value, (*beam.token_ids, token_id))
            for beam, values in zip(self.beams, logprobs)
            for token_id, value in values.items()
        ]
        candidates.sort(key=lambda beam: -beam.score)
        best, penalty = candidates[: self.width], length**self.length_penalty
        self.ended += [beam._replace(score=beam.score / penalty) for beam in best if self._has_ended(beam)]
        self.ended = sorted(self.ended, key=lambda beam: -beam.score)[: self.width]
        self.beams = [beam for beam in candidates if not self._has_ended(beam)][: self.width]
        if self.beams and len(self.ended) == self.width and self.beams[0].score / penalty <= self.ended[-1].score:
            self.beams = []

    def _has_ended(self, beam: Beam) -> bool:
        return len(beam.token_ids) == self.max_tokens or beam.token_ids[-1] in self.eos_token_ids


def search(searches: list[BeamSearch], generate: Callable[[list[list[int]], SamplingParams], list[dict]]) -> None:
    """Take all searches to their ends; `generate` is the engine's."""
    while live := [one for one in searches if one.beams]:
        num_logprobs = max(one.width + max(one.width, len(one.eos_token_ids)) for one in live)  # the best may all be ends
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=num_logprobs)
        answers = iter(generate([[*one.prompt, *beam.token_ids] for one in live for beam in one.beams], params))
        for one in live:
            one.advance([next(answers)["logprobs"][0] for _ in one.beams])
