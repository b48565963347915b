"""Which tokens may come next in an answer of a given form: a mask for each token, and an end if there are none."""

import os
from collections.abc import Collection
from copy import copy
from functools import cache
from math import inf
from typing import Any, cast
from weakref import proxy

import numpy as np

from nanovllm.engine.sequence import Sequence
from nanovllm.features.logit_edits import MAX_BAD_WORD_TOKENS, mask_of
from nanovllm.reasoning.stage import Reasoning, Stage

Matcher = Any  # llguidance.LLMatcher, which is imported only where it is used


class Constraint:
    """What limits the next token of one sequence: a grammar, a budget of its reasoning, or both.

    The grammar holds for the answer: for all tokens, or for those behind the reasoning, in which an end-of-sequence id
    is banned then. Besides that, the mask has what other parameters ban: only here is it known when no token is left.
    An id of `stop_token_ids` is like an end-of-sequence id, which is allowed where the grammar may end, and nowhere
    else.

    All of this is a function of the sequence's token ids, so nothing is lost with a preemption.
    """

    def __init__(self, seq: Sequence, matcher: Matcher | None, vocab_size: int, eos_token_ids: frozenset[int]):
        """`matcher` is at its start, and belongs to this constraint alone; None if there is no grammar."""
        # a cycle would keep both until the garbage collector runs
        self._seq, self._matcher = proxy(seq), cast(Any, matcher)
        self._num_consumed = 0  # generated tokens that the matcher has
        reasoning: Reasoning | None = seq.feature_state.get("reasoning")
        if reasoning is not None and reasoning.stage is Stage.BEFORE and reasoning.markers.begin_id is None:
            reasoning = None if matcher is not None else reasoning  # a grammar may spell the marker, and goes on
        self._reasoning = reasoning
        self._vocab_size, params = vocab_size, seq.params
        self._budget = params.thinking_token_budget
        self._stops = np.array(params.stop_token_ids or (), np.int64)
        self._ends = np.array([*{*eos_token_ids, *self._stops.tolist()}], np.int64)
        edits = seq.feature_state["logit_edits"]
        self._allowed, self._bad_words = edits.allowed_mask, edits.bad_words
        # without a grammar, and inside a reasoning that is followed by one
        self._free = _all_ids(vocab_size) if self._allowed is None else self._allowed
        self._free_but_ends = self._free.copy()
        _set_bits(self._free_but_ends, self._ends, False)
        self.next_mask = self._free  # [ceil(vocabulary / 32)] int32: bits of the ids that may come next
        self.sent_mask: np.ndarray | None = None  # the one that the device has
        self.draft_masks: list[np.ndarray] = []  # those after the drafts of the next step
        self.error: str | None = None  # why there is no next token

    def consume(self) -> bool:
        """Give the grammar the tokens that it does not have yet. True if its mask is needed, for `set_mask`."""
        if (mask := self._mask_without_grammar(self._reasoning)) is not None:
            self._set(mask)
            return False
        start = self._seq.num_prompt_tokens + self._num_in_reasoning(self._reasoning)
        new = self._seq.token_ids[start + self._num_consumed :]
        is_allowed = self._matcher.consume_tokens(new)
        self._num_consumed += len(new)
        if not is_allowed:
            self.set_mask(None)
        return is_allowed

    def set_mask(self, mask: np.ndarray | None) -> None:
        """`mask` is the grammar's own, without the bans of other parameters; None if its state is an error."""
        if mask is None or self._matcher.is_error():
            self.next_mask = np.zeros_like(self._free)
            reason = _first_line(self._matcher.get_error())
            says_nothing = reason in ("", "NoExtensionBias")  # the second is what llguidance calls it
            self.error = f"structured_outputs: {'no token is allowed' if says_nothing else reason}"
        else:
            completion = self._seq.completion_token_ids
            self._set(self._with_bans(self._with_opening(mask, completion), completion))

    def _set(self, mask: np.ndarray) -> None:
        self.next_mask = mask
        self.error = None if mask.any() else "structured_outputs: the parameters allow no token"

    def token_limit(self) -> int:
        """The number of tokens of the sequence up to which none needs another mask than `next_mask`."""
        seq, reasoning = self._seq, self._reasoning
        if reasoning is None or self._budget is None or reasoning.stage is Stage.ENDED:
            return seq.max_num_tokens
        # behind the budget each token is forced, and known when the one before it has arrived
        num_left = max(1, self._budget - reasoning.num_thoughts)
        return min(len(seq.token_ids) + num_left, seq.max_num_tokens)

    def draft(self, drafts: list[int], num_drafts: int) -> list[int]:
        """As many of the drafts as are allowed and do not end the answer; if none, what the grammar forces, at most so
        many. Sets `draft_masks`.
        """
        if self._mask_without_grammar(self._reasoning) is not None:
            return self._allowed_of(drafts)
        return self._allowed_of(drafts) or self._allowed_of(self._matcher.compute_ff_tokens()[:num_drafts])

    def _allowed_of(self, drafts: list[int]) -> list[int]:
        completion, mask, reasoning = self._seq.completion_token_ids, self.next_mask, copy(self._reasoning)
        self.draft_masks, num_before, num_consumed = [], len(completion), 0
        for token_id in drafts:
            if token_id < 0 or token_id in self._ends or not mask[token_id // 32] >> token_id % 32 & 1:
                break
            completion.append(token_id)
            if reasoning is not None:
                reasoning.take([token_id])
            if self._matcher is not None and len(completion) > self._num_in_reasoning(reasoning):
                self._matcher.consume_token(token_id)
                num_consumed += 1
            if (mask := self._mask_without_grammar(reasoning)) is None:
                raw = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(self._free)].copy()
                mask = self._with_bans(raw, completion)
            self.draft_masks.append(mask)
        if num_consumed:
            self._matcher.rollback(num_consumed)
        return completion[num_before:]

    # -- reasoning -----------------------------------------------------------------------------------------------------

    def _num_in_reasoning(self, reasoning: Reasoning | None) -> float:
        """How many tokens of the answer are none of the grammar's."""
        if reasoning is None:
            return 0
        return inf if reasoning.stage is Stage.INSIDE else reasoning.num_tokens

    def _mask_without_grammar(self, reasoning: Reasoning | None) -> np.ndarray | None:
        """The mask inside the reasoning, or where there is no grammar; None where the grammar has it."""
        if reasoning is None or reasoning.stage is not Stage.INSIDE:
            return self._free if self._matcher is None else None
        if self._budget is not None and (num_over := reasoning.num_thoughts - self._budget) >= 0:
            end_ids = reasoning.markers.end_ids
            return mask_of([end_ids[num_over % len(end_ids)]], self._vocab_size)
        return self._free if self._matcher is None else self._free_but_ends

    def _with_opening(self, mask: np.ndarray, completion: list[int]) -> np.ndarray:
        """Where an answer may begin with reasoning, its marker is allowed too."""
        reasoning = self._reasoning
        if reasoning is not None and reasoning.stage is Stage.BEFORE and not completion:
            _set_bits(mask, np.array([reasoning.markers.begin_id]), True)
        return mask

    def _with_bans(self, mask: np.ndarray, completion: list[int]) -> np.ndarray:
        seq = self._seq
        if len(self._stops):
            _set_bits(mask, self._stops, self._matcher.is_accepting())
        if len(completion) < seq.params.min_tokens:
            _set_bits(mask, self._ends, False)
        if self._allowed is not None:
            mask &= self._allowed
        recent = completion[-MAX_BAD_WORD_TOKENS:]
        for *start, last in self._bad_words:
            if not start or recent[-len(start) :] == start:
                _set_bits(mask, np.array([last]), False)
        return mask


@cache
def _all_ids(vocab_size: int) -> np.ndarray:
    mask = mask_of(range(vocab_size), vocab_size)
    mask.flags.writeable = False
    return mask


def _set_bits(mask: np.ndarray, token_ids: np.ndarray, value: bool) -> None:
    words, bits = mask.view(np.uint32), np.uint32(1) << (token_ids % 32).astype(np.uint32)
    if value:
        np.bitwise_or.at(words, token_ids // 32, bits)
    else:
        np.bitwise_and.at(words, token_ids // 32, ~bits)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


@cache
def _executor(pid: int) -> Any:
    """A pool of threads, which a forked process does not inherit."""
    from llguidance import LLExecutor

    return LLExecutor()


def update(constraints: Collection[Constraint]) -> None:
    """Bring masks up to date with the tokens of their sequences, in parallel."""
    ready = [constraint for constraint in constraints if constraint.consume()]
    if not ready:
        return
    masks = np.empty((len(ready), len(ready[0].next_mask)), np.int32)
    matchers = [(constraint._matcher, i) for i, constraint in enumerate(ready)]
    _executor(os.getpid()).unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(masks))
    for constraint, mask in zip(ready, masks):
        constraint.set_mask(mask)
