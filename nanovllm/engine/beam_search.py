"""Beam search: a loop of one-token requests over the engine, whose prefix cache keeps what the beams have in common."""
from collections.abc import Callable
from typing import NamedTuple

from nanovllm.sampling_params import BeamSearchParams, SamplingParams


class Beam(NamedTuple):
    """Tokens after the prompt, and the sum of their log-probabilities; once it has ended, by its length penalty."""

    score: float
    token_ids: tuple[int, ...]


def beam_search(
    generate: Callable[[list[list[int]], SamplingParams], list[dict]], prompts: list[list[int]], params: BeamSearchParams,
    max_model_len: int, eos_token_ids: frozenset[int],
) -> list[list[Beam]]:  # fmt: skip
    """The best beams of each prompt, as transformers' `generate(num_beams=...)` finds them with its defaults.

    Of all continuations of a prompt's beams, the best `beam_width` that do not end go on, and those that end among the
    best `beam_width` are kept, so many in all. The search is over when no beam, divided by its length to the power
    `length_penalty`, is better than the worst that was kept. `generate` is the engine's.
    """
    width = params.beam_width
    num_logprobs = width + max(width, len(eos_token_ids))  # the best may all be ends
    one_token = SamplingParams(temperature=0, max_tokens=1, logprobs=num_logprobs)
    live, ended = [[Beam(0.0, ())] for _ in prompts], [[] for _ in prompts]
    for length in range(1, params.max_tokens + 1):
        penalty = length**params.length_penalty
        requests = [[*prompt, *beam.token_ids] for prompt, beams in zip(prompts, live) for beam in beams]
        answers = iter(generate(requests, one_token) if requests else ())
        for i, prompt in enumerate(prompts):
            is_last = length == params.max_tokens or len(prompt) + length == max_model_len
            new = [(beam, token_id, x) for beam in live[i] for token_id, (x, _) in next(answers)["logprobs"][0].items()]
            found = sorted((Beam(beam.score + x, (*beam.token_ids, token_id)) for beam, token_id, x in new), reverse=True)
            ends = [beam for beam in found[:width] if is_last or beam.token_ids[-1] in eos_token_ids]
            ended[i] += [Beam(beam.score / penalty, beam.token_ids) for beam in ends]
            ended[i] = sorted(ended[i], reverse=True)[:width]
            live[i] = [beam for beam in found if not is_last and beam.token_ids[-1] not in eos_token_ids][:width]
            if live[i] and len(ended[i]) == width and live[i][0].score / penalty <= ended[i][-1].score:
                live[i] = []
    return ended
