"""The state of a sequence in the engine: token ids, counts and block ids, without tensors or text."""

import struct
from collections.abc import Collection
from enum import Enum, auto
from itertools import count
from time import perf_counter
from typing import Any

from nanovllm.sampling_params import SamplingParams

GREEDY_BELOW = 1e-5  # float32 logits cannot be divided by a smaller temperature
_request_ids = count()  # for sequences made without an engine


class SequenceStatus(Enum):
    WAITING = auto()  # holds no blocks
    RUNNING = auto()  # holds blocks and a request index
    FINISHED = auto()


def packed_ids(token_ids: list[int]) -> bytes:
    """Return token ids as int32 bytes, in half of NumPy's time. Raises struct.error for an id that does not fit."""
    return struct.pack(f"{len(token_ids)}i", *token_ids)


class Sequence:
    """A prompt and the tokens generated for it.

    `num_tokens` and `len` include the token that a scheduled step will sample. `token_ids` contains only tokens that
    have reached the host. Only the Scheduler, its block manager and its features may change a queued sequence.
    """

    block_size = 256  # tokens per cache block; the scheduler sets the engine's value

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
        self.token_ids = [*token_ids]
        self.params = params
        self.num_prompt_tokens = len(token_ids)
        self.max_num_tokens = max_len if params.max_tokens is None else min(len(token_ids) + params.max_tokens, max_len)
        self.num_tokens = len(token_ids)
        self.num_scheduled_tokens = 0  # how many tokens the last scheduled step computes
        self.num_computed_tokens = 0  # tokens in the cache, including tokens that scheduled steps will store
        self.token_limit = self.max_num_tokens  # no step decodes the sequence once `num_tokens` reaches this
        self.num_cached_tokens = 0  # found in the prefix cache when the sequence was first admitted
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []  # of the full blocks of token_ids, computed when needed
        self.cache_salt = 0  # 64 bits; only sequences with equal salts share blocks
        self.status = SequenceStatus.WAITING
        self.was_admitted = False  # at least once
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None  # the stop id or string; None for the tokenizer's end-of-sequence id
        self.req_index = -1  # while the sequence runs, its row in the device's per-request tables
        self.noise_seed = noise_seed  # 64 bits: the seed of all random numbers of this sequence
        self.request_id = next(_request_ids) if request_id is None else request_id
        self.index = index  # of this answer in its request
        self.group = [self]  # all answers to its request
        self.priority = priority  # for scheduling policies
        self.set_order(0)
        self.arrival = perf_counter()
        self.timing: dict[str, float] = {}  # seconds from arrival to "scheduled", "first_token" and "finished"
        # for features
        self.feature_state: dict[str, Any] = {}  # by feature name: see StepFeature
        self.columns: dict[str, float] = {}  # parameters of features, by the name of their column on the device
        self.token_mask: Any = None  # a feature's TokenMask (features/logit_edits.py)
        self.is_watched = False  # a feature or a caller looks at each token when it arrives
        self.waits_for_token = False  # decode a token only when the previous one has reached the host
        self.skips_prefix_hits = False  # compute the whole prompt
        self.pauses_after_token = False  # pause after each token, without appending it, until resumed
        self.is_paused = False  # no step computes the sequence, but it may hold blocks
        self.awaited: Any = None  # a feature's Future: no step computes the sequence until it is done
        self.window_columns: list[tuple[int, ...]] = []  # of layers with a window: see engine/window_blocks.py

    def __len__(self) -> int:
        return self.num_tokens

    def __repr__(self) -> str:
        num_tokens = f"{self.num_prompt_tokens} + {self.num_completion_tokens} tokens"
        if (num_in_flight := self.num_tokens - len(self.token_ids)) > 0:
            num_tokens += f" and {num_in_flight} in flight"
        return f"Sequence({self.request_id}.{self.index}, {self.status.name}, {num_tokens}, blocks {self.block_table})"

    @property
    def key(self) -> tuple[int, int]:
        """A key that is unique among the live sequences of an engine."""
        return self.request_id, self.index

    def set_order(self, priority_key: Any) -> None:
        """Set `order` from the key of the scheduling policy. Sequences with equal keys are ordered by request id."""
        self.order = priority_key, *self.key  # the smallest comes first

    def __getitem__(self, key: int | slice) -> Any:
        return self.token_ids[key]

    @property
    def seq_id(self) -> int:
        """The request id, which all answers to one prompt share."""
        return self.request_id

    @property
    def temperature(self) -> float:
        return self.params.temperature if self.params.temperature >= GREEDY_BELOW else 0.0

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
        """The number of generated tokens on the host."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def last_token(self) -> int:
        return self.token_ids[-1]

    def append_token(self, token_id: int) -> None:
        """Append a token that has reached the host. `num_tokens` includes it if a step sampled it."""
        self.token_ids.append(token_id)
        if self.num_tokens < len(self.token_ids):
            self.num_tokens += 1

    @property
    def num_blocks(self) -> int:
        """The number of cache blocks that the sequence's tokens need."""
        return -(-self.num_tokens // self.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        return self.num_tokens - (self.num_blocks - 1) * self.block_size

    def block(self, i: int) -> list[int]:
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    @property
    def has_sampled(self) -> bool:
        """Whether the step that samples the sequence's first token has been scheduled."""
        return self.num_tokens > self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def limit_tokens(self, num_tokens: int = 1) -> None:
        """Set `token_limit`. With `waits_for_token`, `num_tokens` more tokens may follow; with `awaited`, none."""
        if self.awaited is not None:
            self.token_limit = self.num_tokens
        elif self.waits_for_token:
            self.token_limit = min(len(self.token_ids) + num_tokens, self.max_num_tokens)

    def finish_reasons(self, eos_token_ids: Collection[int], eos: int) -> tuple[str, int | None] | None:
        """Return (finish reason, stop reason) if the last token ends the sequence."""
        params = self.params
        is_eos = self.last_token in eos_token_ids and not params.ignore_eos
        is_stop = is_eos or self.last_token in (params.stop_token_ids or ())
        if is_stop and self.num_completion_tokens > params.min_tokens:
            return "stop", None if is_eos and self.last_token == eos else self.last_token
        if len(self.token_ids) == self.max_num_tokens:
            return "length", None
        return None

    def record_time(self, event: str) -> None:
        self.timing.setdefault(event, perf_counter() - self.arrival)
