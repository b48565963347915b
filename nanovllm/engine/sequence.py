"""One answer on its way through the engine: counts and token ids, no tensors and no text."""

import struct
from collections.abc import Collection
from enum import Enum, auto
from itertools import count
from time import perf_counter
from typing import Any

from nanovllm.sampling_params import SamplingParams

_request_ids = count()  # of sequences that are made by hand: an engine numbers its requests


class SequenceStatus(Enum):
    WAITING = auto()  # holds no blocks
    RUNNING = auto()  # holds blocks and a request index
    FINISHED = auto()


def packed_ids(token_ids: list[int]) -> bytes:
    """Token ids as int32 numbers, in half of NumPy's time. struct.error for an id that has more bits."""
    return struct.pack(f"{len(token_ids)}i", *token_ids)


class Sequence:
    """A prompt and the tokens that were generated for it.

    Counts run ahead of contents: `num_tokens`, and `len`, count a token from the moment that the step which samples it
    is scheduled; `token_ids` has it when it has reached the host. Once a sequence is queued, only the Scheduler, with
    its block manager and the features that it calls, changes it.
    """

    block_size = 256  # of the cache; the scheduler sets its own

    def __init__(
        self,
        token_ids: list[int],
        params: SamplingParams | None = None,
        *,
        request_id: int | None = None,
        noise_seed: int = 0,
        max_len: int = 2**31 - 1,
        index: int = 0,
        priority: int = 0,
    ):
        params = params or SamplingParams()
        self.request_id = next(_request_ids) if request_id is None else request_id
        self.index = index  # among the answers to its request
        self.group = [self]  # all of those
        self.priority = priority  # of its request, for scheduling policies
        self.set_order(0)
        self.params = params
        self.feature_state: dict[str, Any] = {}  # by name, what the features that it uses keep of it: see StepFeature
        self.columns: dict[str, float] = {}  # parameters of features, by the name of their column on the device
        self.is_watched = False  # a feature or a caller looks at each token when it arrives
        self.waits_for_token = False  # a token is decoded when the one before it has reached the host
        self.skips_prefix_hits = False  # all of the prompt is computed
        self.pauses_after_token = False  # after each token, until it is resumed; the token is not appended
        self.is_paused = False  # it may hold blocks, and no step computes it
        self.awaited: Any = None  # a feature's Future: until it is done, no step computes the sequence
        self.noise_seed = noise_seed  # 64 bits, from which every random number of this sequence is made
        self.token_ids = [*token_ids]
        self.num_prompt_tokens = len(token_ids)
        self.max_num_tokens = max_len if params.max_tokens is None else min(len(token_ids) + params.max_tokens, max_len)
        self.num_tokens = len(token_ids)
        self.num_scheduled_tokens = 0  # of these, those of the last step that was scheduled
        self.num_computed_tokens = 0  # their keys and values are in the cache, or in a step that was scheduled
        self.token_limit = self.max_num_tokens  # no decode step is scheduled once `num_tokens` is that
        self.num_drafts = 0  # of the tokens after its next one: a step may give it one token more than that
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache when it was first admitted
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []  # of the full blocks of token_ids, computed when they are needed
        self.cache_salt = 0  # its blocks are shared with sequences of the same salt alone; 64 bits
        self.req_index = -1  # its row in the device's per-request state while it runs
        self.status = SequenceStatus.WAITING
        self.was_admitted = False  # at least once
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None  # the stop id or string; None for the tokenizer's own eos
        self.arrival = perf_counter()
        self.timing: dict[str, float] = {}  # seconds from arrival to "scheduled", "first_token" and "finished"

    def __len__(self) -> int:
        return self.num_tokens

    def __repr__(self) -> str:
        num_tokens = f"{self.num_prompt_tokens} + {self.num_completion_tokens} tokens"
        if (num_in_flight := self.num_tokens - len(self.token_ids)) > 0:
            num_tokens += f" and {num_in_flight} in flight"
        return f"Sequence({self.request_id}.{self.index}, {self.status.name}, {num_tokens}, blocks {self.block_table})"

    @property
    def key(self) -> tuple[int, int]:
        """Unique among the live sequences of an engine."""
        return self.request_id, self.index

    def set_order(self, priority_key: Any) -> None:
        """`priority_key` is the scheduling policy's; sequences of the same key keep the order of their requests."""
        self.order = priority_key, *self.key  # the least comes first

    def __getitem__(self, key: int | slice) -> Any:
        return self.token_ids[key]

    @property
    def seq_id(self) -> int:
        """The id of its request, which further answers to the same prompt share."""
        return self.request_id

    @property
    def temperature(self) -> float:
        return self.params.temperature

    @property
    def max_tokens(self) -> int | None:
        return self.params.max_tokens

    @property
    def ignore_eos(self) -> bool:
        return self.params.ignore_eos

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_completion_tokens(self) -> int:
        """Generated tokens that have reached the host."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def last_token(self) -> int:
        """The last token that has reached the host."""
        return self.token_ids[-1]

    def append_token(self, token_id: int) -> None:
        """A token has reached the host. `num_tokens` counts it already if a step was scheduled for it."""
        self.token_ids.append(token_id)
        if self.num_tokens < len(self.token_ids):
            self.num_tokens += 1

    @property
    def num_blocks(self) -> int:
        """The number of cache blocks that its tokens need."""
        return -(-self.num_tokens // self.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        return self.num_tokens - (self.num_blocks - 1) * self.block_size

    def block(self, i: int) -> list[int]:
        """The token ids of its i-th block."""
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    @property
    def has_sampled(self) -> bool:
        """Whether a step that samples its first token was scheduled."""
        return self.num_tokens > self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def limit_tokens(self, num_drafts: int = 0) -> None:
        """Set the number of drafts. If the sequence waits for its tokens, let it decode these and one more."""
        self.num_drafts = num_drafts
        if self.awaited is not None:
            self.token_limit = self.num_tokens
        elif self.waits_for_token:
            self.token_limit = min(len(self.token_ids) + 1 + num_drafts, self.max_num_tokens)

    def finish_reasons(self, eos_token_ids: Collection[int], eos: int) -> tuple[str, int | None] | None:
        """(finish reason, stop reason) if the last token ends this sequence; `eos` is the tokenizer's own."""
        params = self.params
        is_eos = self.last_token in eos_token_ids and not params.ignore_eos
        is_stop = is_eos or self.last_token in (params.stop_token_ids or ())
        if is_stop and self.num_completion_tokens > params.min_tokens:
            return "stop", None if is_eos and self.last_token == eos else self.last_token
        if len(self.token_ids) == self.max_num_tokens:
            return "length", None
        return None

    def record_time(self, event: str) -> None:
        """Note when an event happens for the first time."""
        self.timing.setdefault(event, perf_counter() - self.arrival)
