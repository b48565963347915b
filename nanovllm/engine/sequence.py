"""One answer on its way through the engine: counts and token ids, no tensors and no text."""

from enum import Enum, auto
from time import perf_counter

from nanovllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()  # holds no blocks
    RUNNING = auto()  # holds blocks and a request index
    FINISHED = auto()


class Sequence:
    """A prompt and what was generated for it.

    Lengths run ahead of contents: `num_tokens` counts a token from the moment that the step which samples it is
    scheduled, `token_ids` has it once it reached the host. Only the Scheduler changes a sequence.

    A beam of a beam search is a sequence that pauses: its step brings `candidates` for the next token, and it waits for
    `Scheduler.branch` to choose among them.
    """

    def __init__(
        self,
        request_id: int,
        token_ids: list[int],
        params: SamplingParams,
        noise_seed: int,
        max_len: int,
        index: int = 0,
        pauses: bool = False,
    ):
        self.request_id = request_id
        self.index = index  # among the answers to its request
        self.group = [self]  # all of them
        self.params = params
        self.bad_words: tuple[tuple[int, ...], ...] = ()  # token ids of `params.bad_words`
        self.noise_seed = noise_seed  # 64 bits; keys every draw of this request
        self.token_ids = token_ids
        self.num_prompt_tokens = len(token_ids)
        self.num_tokens = len(token_ids)
        self.max_num_tokens = max_len if params.max_tokens is None else min(len(token_ids) + params.max_tokens, max_len)
        self.num_computed_tokens = 0  # keys and values are in the cache, or in a step that was scheduled
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache on first admission
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []  # chain over the full blocks of token_ids, extended on demand
        self.req_index = -1  # this sequence's row of the device's per-request state while it runs
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None  # the stop id or string that ended it; None for the model's own end
        self.logprobs: list[dict[int, tuple[float, int]]] = []  # of each token: those of `engine.sampled`
        self.prompt_logprobs: list[dict[int, tuple[float, int]] | None] = [
            None
        ]  # of the first; the others come in order
        self.pauses = pauses
        self.candidates: dict | None = None
        self.arrival = perf_counter()
        self.timing: dict[str, float] = {}  # seconds from its arrival to "scheduled", "first_token", "finished"

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def has_begun(self) -> bool:
        """Whether a token was generated, or will be by a step that was scheduled."""
        return self.num_tokens > self.num_prompt_tokens

    @property
    def is_paused(self) -> bool:
        """Whether its candidates are there: it holds its blocks, or lost them, and nothing is to be computed."""
        return self.candidates is not None

    def continued(self, index: int, token_id: int) -> "Sequence":
        """A beam that begins with what this one has, and goes on with `token_id`; it holds nothing yet."""
        other = Sequence(
            self.request_id, [*self.token_ids], self.params, self.noise_seed, self.max_num_tokens, index, True
        )
        other.group, other.num_prompt_tokens, other.arrival = self.group, self.num_prompt_tokens, self.arrival
        other.max_num_tokens, other.timing = self.max_num_tokens, dict(self.timing)
        other.append(token_id)
        return other

    def append(self, token_id: int) -> None:
        """Go on with a token that was chosen on the host."""
        self.token_ids.append(token_id)
        self.num_tokens = len(self.token_ids)
        self.candidates = None

    def mark(self, event: str) -> None:
        """Note the time of an event when it happens first."""
        self.timing.setdefault(event, perf_counter() - self.arrival)
