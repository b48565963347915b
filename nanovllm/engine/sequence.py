"""One answer on its way through the engine: counts, token ids and their text, no tensors."""
from enum import Enum, auto
from time import perf_counter

from nanovllm.engine.detokenizer import Detokenizer, Vocabulary
from nanovllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()  # holds no blocks
    RUNNING = auto()  # holds blocks and a request index
    FINISHED = auto()


class Sequence:
    """A prompt and what was generated for it.

    Lengths run ahead of contents: `num_tokens` counts a token from the moment that the step which samples it is
    scheduled, `token_ids` has it once it reached the host. Only the Scheduler changes a sequence.
    """

    def __init__(
        self, request_id: int, token_ids: list[int], params: SamplingParams, noise_seed: int, max_len: int,
        vocabulary: Vocabulary | None = None, index: int = 0,
    ):  # fmt: skip
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
        self.stop_reason: int | str | None = None  # the stop id or string that ended it; None for an eos id
        self.logprobs: list[dict[int, tuple[float, int]]] = []  # of each token: those of `engine.sampled`
        self.prompt_logprobs: list[dict[int, tuple[float, int]] | None] = [None]  # of the first; the others come in order
        self.timing: dict[str, float] = {}  # seconds from its arrival to "queue" (its end), "first_token", "finish"
        self._arrival = perf_counter()
        self.detokenizer = Detokenizer(token_ids, params, vocabulary)

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def has_begun(self) -> bool:
        """Whether a token was generated, or will be by a step that was scheduled."""
        return self.num_tokens > self.num_prompt_tokens

    def mark(self, event: str) -> None:
        """Note the time of an event when it happens first."""
        self.timing.setdefault(event, perf_counter() - self._arrival)
