"""Implements beam search.

Beams are sequences that pause after each token and share the cache blocks of their common prefix.
"""

from dataclasses import dataclass
from itertools import count
from operator import itemgetter
from typing import NamedTuple

from nanovllm.engine.forks import fork, resume
from nanovllm.engine.outputs import OutputKind, Record
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.features.beam_params import BeamSearchParams
from nanovllm.features.logprobs import TokenLogprobs
from nanovllm.pooling.task import check_task
from nanovllm.requests.detokenizer import Detokenizer, TokenBytes
from nanovllm.requests.input_processor import InputProcessor
from nanovllm.requests.prompts import as_priorities, as_prompts
from nanovllm.requests.request import Prompt, Request
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int


@dataclass(frozen=True, slots=True, eq=False)
class BeamOutput(Record):
    """Describes a beam in the result of a search.

    `score` is `cumulative_logprob / len(token_ids) ** length_penalty`.
    """

    text: str
    token_ids: list[int]
    cumulative_logprob: float
    score: float


@dataclass(frozen=True, slots=True, eq=False)
class BeamSearchOutput(Record):
    """Contains the beams that a search found, best first.

    `finished` is False if the search was aborted. An aborted search may return fewer than `beam_width` beams, or none.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[BeamOutput]
    finished: bool


class FinishedBeam(NamedTuple):
    """A beam that has ended. `score` is computed as in `BeamOutput`."""

    score: float
    cumulative_logprob: float
    token_ids: tuple[int, ...]


class Candidate(NamedTuple):
    """A beam plus one token. The candidate may become a beam of the next step."""

    cumulative_logprob: float
    token_ids: tuple[int, ...]  # of the completion, without the prompt
    beam: Sequence


class BeamRequest(Request):
    """Searches for the most likely answers to a prompt, exactly like `generate(num_beams=...)` in transformers.

    A candidate is a beam plus one token. The added token may end the candidate. The best `beam_width` candidates that
    do not end become the beams of the next step. A candidate that ends becomes a finished beam if it is among the best
    `beam_width` of all candidates in its step. Only the best `beam_width` finished beams are kept. The search ends when
    there are `beam_width` finished beams, and no live beam has a better score than the worst finished beam.
    """

    def __init__(
        self,
        root: Sequence,
        params: BeamSearchParams,
        prompt: str | None,
        kind: OutputKind,
        token_bytes: TokenBytes,
        eos_token_ids: frozenset[int],
    ):
        """Begin the search with one beam, the sequence `root`.

        `root` contains the prompt and pauses after each token.
        """
        super().__init__([root], prompt, kind)
        self._root, self._params, self._token_bytes = root, params, token_bytes
        self._max_tokens = root.max_num_tokens - root.num_prompt_tokens
        self._eos_token_ids = eos_token_ids
        self._cumulative_logprobs = {root.index: 0.0}  # of the live beams, by the sequence's index
        self._next_index = count(1)
        self._finished: list[FinishedBeam] = []

    @property
    def is_finished(self) -> bool:
        return not self._cumulative_logprobs

    def advance(self, scheduler: Scheduler) -> None:
        """If the candidates of every beam have arrived, choose the next beams from these candidates."""
        beams = [*scheduler.live[self.request_id].values()]
        if not all(seq.is_paused for seq in beams):
            return
        beam_width, length = self._params.beam_width, beams[0].num_completion_tokens + 1
        penalty, is_last = length**self._params.length_penalty, length == self._max_tokens
        candidates = [
            Candidate(self._cumulative_logprobs[seq.index] + logprob, (*seq.completion_token_ids, token_id), seq)
            for seq in beams
            for token_id, (logprob, _) in seq.feature_state["logprobs"].take_candidates().items()
        ]
        candidates.sort(key=itemgetter(0, 1), reverse=True)
        ends = [is_last or candidate.token_ids[-1] in self._eos_token_ids for candidate in candidates]
        for candidate, is_end in zip(candidates[:beam_width], ends):
            if is_end:
                score = candidate.cumulative_logprob / penalty
                self._finished.append(FinishedBeam(score, candidate.cumulative_logprob, candidate.token_ids))
        self._finished = sorted(self._finished, reverse=True)[:beam_width]
        survivors = [candidate for candidate, is_end in zip(candidates, ends) if not is_end][:beam_width]
        is_full = len(self._finished) == beam_width
        if survivors and is_full and survivors[0].cumulative_logprob / penalty <= self._finished[-1].score:
            survivors = []
        self._branch(scheduler, beams, survivors)

    def _branch(self, scheduler: Scheduler, beams: list[Sequence], survivors: list[Candidate]) -> None:
        """Extend each beam with the tokens of its surviving candidates."""
        survivors_of: dict[int, list[Candidate]] = {}
        for candidate in survivors:
            survivors_of.setdefault(candidate.beam.index, []).append(candidate)
        for beam in beams:  # beams without survivors end first, so that the forks below can use their blocks
            if beam.index not in survivors_of:
                scheduler.finish(beam, "stop")
        cumulative_logprobs: dict[int, float] = {}
        for beam in beams:
            if children := survivors_of.get(beam.index):
                first_child, *other_children = children
                for child in other_children:  # a fork copies `beam` before its next token
                    index = next(self._next_index)
                    fork(scheduler, beam, index, child.token_ids[-1])
                    cumulative_logprobs[index] = child.cumulative_logprob
                resume(scheduler, beam, first_child.token_ids[-1])
                cumulative_logprobs[beam.index] = first_child.cumulative_logprob
        self._cumulative_logprobs = cumulative_logprobs

    def output(self) -> BeamSearchOutput:
        outputs = [
            BeamOutput(self._text(beam.token_ids), [*beam.token_ids], beam.cumulative_logprob, beam.score)
            for beam in self._finished
        ]
        return BeamSearchOutput(self.request_id, self.prompt, self._root.prompt_token_ids, outputs, self.is_finished)

    def _text(self, token_ids: tuple[int, ...]) -> str:
        prompt = self._root.prompt_token_ids
        return Detokenizer([*prompt, *token_ids], len(prompt), self._token_bytes).decode(is_last=True)


def beam_requests(
    processor: InputProcessor,
    prompts: Prompt | list[Prompt],
    params: BeamSearchParams,
    priority: list[int] | None = None,
    kind: OutputKind = OutputKind.FINAL_ONLY,
    request_class: type[BeamRequest] = BeamRequest,
) -> list[BeamRequest]:
    """Create a beam search for each prompt. Raises the same errors as `InputProcessor.requests`."""
    if not isinstance(params, BeamSearchParams):
        raise TypeError(f"params={params!r}: must be a BeamSearchParams")
    check_task(processor.config, "generate")
    model = processor.config.model_config
    # each beam has up to 2 * beam_width candidates, which are different tokens
    check_int("beam_width", params.beam_width, 1, model.vocab_size // 2)
    eos_token_ids = frozenset() if params.ignore_eos else model.eos_token_ids
    # enough candidates that at least `beam_width` of them do not end
    num_candidates = min(model.vocab_size, params.beam_width + max(params.beam_width, len(eos_token_ids)))
    sampling_params = SamplingParams(temperature=0, max_tokens=params.max_tokens, logprobs=num_candidates)
    tokenized = [processor.tokenize(prompt) for prompt in as_prompts(prompts)]
    requests = []
    for (text, token_ids, images), own_priority in zip(tokenized, as_priorities(priority, len(tokenized))):
        request_id, max_len = processor.next_request_id(), processor.max_model_len
        root = Sequence([*token_ids], sampling_params, request_id=request_id, max_len=max_len)
        root.pauses_after_token, root.token_limit = True, 0  # each token is computed as a chunk, not decoded
        root.priority = processor.check_priority(own_priority)
        if images is not None:
            root.feature_state["vision"] = images
        TokenLogprobs.watch(root)
        processor.set_order(root)
        requests.append(request_class(root, params, text, kind, processor.token_bytes, eos_token_ids))
    return requests
