"""Computes which tokens may follow in a constrained answer. If no token is allowed, the answer ends."""

import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from copy import copy
from functools import cache, partial
from itertools import islice
from math import inf
from time import perf_counter, thread_time
from typing import Any, cast
from weakref import proxy

import numpy as np

from nanovllm.engine.sequence import Sequence
from nanovllm.features.logit_edits import MAX_BAD_WORD_TOKENS, TokenMask, mask_of
from nanovllm.reasoning.stage import Reasoning, Stage
from nanovllm.structured_outputs.grammar import Grammar, Matcher
from nanovllm.structured_outputs.masks import MaskQueue, num_cores

TOKEN_MARKER = 0xFF  # in a text of llguidance, this byte precedes a token that the grammar names


class Constraint(TokenMask):
    """Restricts the next token of one sequence. A grammar, a reasoning budget, or both define the restrictions.

    The grammar applies to the text after the reasoning. Inside the reasoning, end-of-sequence ids are banned. The mask
    also contains the bans of other parameters, because all bans together decide whether any token is left. The ids in
    `stop_token_ids` are treated like end-of-sequence ids: they are allowed only where the grammar may end.

    The state of a constraint depends only on the sequence's token ids, so a preemption loses nothing.
    """

    def __init__(
        self,
        seq: Sequence,
        grammar: Grammar | None,
        queue: MaskQueue | None,
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ):
        """queue: computes masks that would delay a step. If there is no grammar, `queue` is None."""
        super().__init__(seq, vocab_size)
        # a proxy, because a reference cycle would keep both objects until the garbage collector runs
        self._seq, self._grammar = proxy(seq), cast(Grammar, grammar)
        self._queue, self._vocab_size, self.has_grammar = queue, vocab_size, grammar is not None
        self._matcher: Matcher = None
        if grammar is not None:
            self._automata = grammar.automata()
            self._matcher = self._automata.start.deep_copy()
        self._num_consumed = 0  # generated tokens that the matcher has consumed
        reasoning: Reasoning | None = seq.feature_state.get("reasoning")
        if reasoning is not None and reasoning.stage is Stage.BEFORE and reasoning.markers.begin_id is None:
            reasoning = None if self.has_grammar else reasoning  # the marker may be ordinary text of the grammar
        self.reasoning, self._budget = reasoning, seq.params.thinking_token_budget
        self._min_tokens = seq.params.min_tokens
        self._stops = np.array(seq.params.stop_token_ids or (), np.int64)
        self._ends = np.array([*{*eos_token_ids, *self._stops.tolist()}], np.int64)
        self._bad_words = seq.feature_state["logit_edits"].bad_words
        self._free_but_ends = self.allowed_mask.copy()  # the mask inside the reasoning before a grammar
        _set_bits(self._free_but_ends, self._ends, False)
        self.error: str | None = None  # why no token can follow; None if a token can

    def start_update(self) -> Future:
        """Run `update` in another thread, after earlier updates. This object must not be read until `update` ends."""
        update = partial(self.update, self._seq.completion_token_ids, copy(self.reasoning))
        return cast(MaskQueue, self._queue).submit(update)

    def update(self, completion: list[int], reasoning: Reasoning | None = None) -> tuple[str, str] | None:
        """Compute the mask for the next token. The mask depends on the generated tokens and the reasoning's stage.

        If a token can follow, return None. If no token can follow, return a finish reason and an error message.
        """
        if not self.set_without_grammar(reasoning):
            if self.consume(completion, reasoning):
                self.set_mask(self._grammar_mask(), completion, reasoning)
            if self._matcher.is_error() and self._restart():
                return self.update(completion, reasoning)
        return None if self.error is None else ("error", self.error)

    def set_without_grammar(self, reasoning: Reasoning | None) -> bool:
        """Return False if a grammar applies to the next token.

        If no grammar applies, such as inside reasoning, set the mask and return True.
        """
        if (mask := self._mask_without_grammar(reasoning)) is None:
            return False
        self._set(mask)
        return True

    def _restart(self) -> bool:
        """Start again with the large automata, because the small automata may have failed at their size limit.

        Return False if the large automata have failed, too.
        """
        self._automata.has_failed = True
        if self._automata.is_largest:
            return False
        self._automata = self._grammar.automata()
        self._matcher, self._num_consumed = self._automata.start.deep_copy(), 0
        return True

    def consume(self, completion: list[int], reasoning: Reasoning | None = None) -> bool:
        """Feed new tokens to the matcher. Return False if the grammar refuses a token."""
        new = completion[cast(int, _num_in_reasoning(reasoning)) + self._num_consumed :]
        is_allowed = self._matcher.consume_tokens(new)
        self._num_consumed += len(new)
        if not is_allowed:
            self.set_mask(None, completion)
        return is_allowed

    def set_mask(self, mask: np.ndarray | None, completion: list[int], reasoning: Reasoning | None = None) -> None:
        """Add the bans of other parameters to `mask`, and store the mask. `mask` is None if the grammar has failed."""
        if mask is None or self._matcher.is_error():
            self.next_mask = np.zeros_like(self.allowed_mask)
            reason = _first_line(self._matcher.get_error())
            says_nothing = reason in ("", "NoExtensionBias")  # llguidance: no token is allowed
            self.error = f"structured_outputs: {'no token is allowed' if says_nothing else reason}"
        else:
            if reasoning is not None and reasoning.stage is Stage.BEFORE and not completion:
                _set_bits(mask, np.array([reasoning.markers.begin_id]), True)  # the answer may begin with reasoning
            self._set(self._with_bans(mask, completion))

    def _set(self, mask: np.ndarray) -> None:
        self.next_mask = mask
        self.error = None if mask.any() else "structured_outputs: the parameters allow no token"

    def _mask_without_grammar(self, reasoning: Reasoning | None) -> np.ndarray | None:
        if reasoning is None or reasoning.stage is not Stage.INSIDE:
            return None if self.has_grammar else self.allowed_mask
        if self._budget is not None and (forced := reasoning.forced_id(self._budget)) is not None:
            return mask_of([forced], self._vocab_size)
        return self._free_but_ends if self.has_grammar else self.allowed_mask

    def token_limit(self) -> int:
        """Return the length, in tokens, at which the sequence needs a new mask."""
        seq, reasoning = self._seq, self.reasoning
        if reasoning is None or self._budget is None or reasoning.stage is Stage.ENDED:
            return seq.max_num_tokens
        # after the budget, each token is forced, and the forced token depends on the previous token
        num_left = max(1, self._budget - reasoning.num_thoughts)
        return min(len(seq.token_ids) + num_left, seq.max_num_tokens)

    # -- drafts --------------------------------------------------------------------------------------------------------

    def draft(self, drafts: list[int], num_drafts: int) -> list[int]:
        """Return the drafts before the first draft that is not allowed or that ends the answer. Set `draft_masks`.

        If no drafts are left, return up to `num_drafts` tokens that the grammar forces. If the grammar's masks are
        slow, return no drafts.
        """
        if self._mask_without_grammar(self.reasoning) is not None:
            return self._allowed_of(drafts)
        if self._grammar.is_slow:
            self.draft_masks = []
            return []
        return self._allowed_of(drafts) or self._allowed_of(self._matcher.compute_ff_tokens()[:num_drafts])

    def _allowed_of(self, drafts: list[int]) -> list[int]:
        completion, mask, reasoning = self._seq.completion_token_ids, self.next_mask, copy(self.reasoning)
        self.draft_masks, num_before, num_consumed = [], len(completion), 0
        for token_id in drafts:
            is_allowed = token_id >= 0 and mask[token_id // 32] >> token_id % 32 & 1
            if not is_allowed or token_id in self._ends or (self.has_grammar and self._grammar.is_slow):
                break
            completion.append(token_id)
            if reasoning is not None:
                reasoning.take([token_id])
            if self.has_grammar and len(completion) > _num_in_reasoning(reasoning):
                self._matcher.consume_token(token_id)
                num_consumed += 1
            if (mask := self._mask_without_grammar(reasoning)) is None:
                mask = self._with_bans(self._grammar_mask(), completion)
            self.draft_masks.append(mask)
        if num_consumed:
            if self._matcher.is_error():  # the next update reports the error
                self.draft_masks = []
                return []
            self._matcher.rollback(num_consumed)
        return completion[num_before:]

    # -- masks ---------------------------------------------------------------------------------------------------------

    def _grammar_mask(self) -> np.ndarray:
        """Return the mask for the grammar's current state. The caller must check for errors of the matcher."""
        mask = np.empty_like(self.next_mask)
        begin = thread_time()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._grammar.add_mask(thread_time() - begin)
        return self._with_text(mask)

    def _with_text(self, mask: np.ndarray) -> np.ndarray:
        """Correct llguidance's mask if the mask allows only one token, and the grammar refuses this token.

        If only one text can follow, llguidance allows only the first token of this text. The first token of the
        required text may be an added token, which the grammar does not accept as text. If the tokenizer normalizes
        texts, the first token may begin a different text than the grammar requires. The corrected mask allows only the
        token for the first byte of the required text.
        """
        text = self._matcher.compute_ff_bytes()
        if text and text[0] != TOKEN_MARKER and not self._matcher.validate_tokens([_first_id(mask)]):
            return mask_of(self._grammar.token_ids_of_byte(text[0]), 32 * len(mask))
        return mask

    def _with_bans(self, mask: np.ndarray, completion: list[int]) -> np.ndarray:
        if len(self._stops):
            _set_bits(mask, self._stops, self._matcher.is_accepting())
        if len(completion) < self._min_tokens:
            _set_bits(mask, self._ends, False)
        mask &= self.allowed_mask
        recent = completion[-MAX_BAD_WORD_TOKENS:]
        for *start, last in self._bad_words:
            if not start or recent[-len(start) :] == start:
                _set_bits(mask, np.array([last]), False)
        return mask


def update_fast(constraints: Iterable[Constraint], seconds: float) -> list[Constraint]:
    """Update constraints whose masks are fast to compute, for about `seconds` seconds. Return the updated constraints.

    An update takes almost no time if the sequence is inside its reasoning, or if there is no grammar. Masks of
    different grammars are computed in parallel, but llguidance computes masks of the same grammar one after another.
    Any mask may be slow, so a parallel call computes only one mask per grammar, and at most `num_cores()` masks.
    """
    end, updated = perf_counter() + seconds, []
    waiting: dict[Grammar, deque[Constraint]] = {}
    for constraint in constraints:
        if constraint.set_without_grammar(constraint.reasoning):
            updated.append(constraint)
        elif not constraint._grammar.is_slow:
            waiting.setdefault(constraint._grammar, deque()).append(constraint)
    while waiting and perf_counter() < end:
        chunk = [queue.popleft() for queue in islice(waiting.values(), num_cores())]
        _update_together(chunk)
        # `start_update` handles errors, because a restart takes time
        updated += [constraint for constraint in chunk if not constraint._matcher.is_error()]
        for grammar in (constraint._grammar for constraint in chunk):
            if grammar.is_slow or not waiting[grammar]:
                del waiting[grammar]
    return updated


def _update_together(constraints: list[Constraint]) -> None:
    completions = [constraint._seq.completion_token_ids for constraint in constraints]
    ready = [pair for pair in zip(constraints, completions) if pair[0].consume(pair[1], pair[0].reasoning)]
    if len(ready) == 1:
        ((constraint, completion),) = ready
        constraint.set_mask(constraint._grammar_mask(), completion, constraint.reasoning)
    elif ready:
        begin = perf_counter()
        masks = np.empty((len(ready), len(ready[0][0].next_mask)), np.int32)
        matchers = [(constraint._matcher, i) for i, (constraint, _) in enumerate(ready)]
        _executor(os.getpid()).unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(masks))
        seconds = perf_counter() - begin  # an upper bound for each mask, because the time of a single mask is unknown
        for (constraint, completion), mask in zip(ready, masks):
            constraint.set_mask(constraint._with_text(mask), completion, constraint.reasoning)
            constraint._grammar.add_mask(seconds)


@cache
def _executor(pid: int) -> Any:
    """Return llguidance's thread pool for the process `pid`. (A forked process needs a new pool.)"""
    from llguidance import LLExecutor

    return LLExecutor(num_cores())


def _num_in_reasoning(reasoning: Reasoning | None) -> float:
    """Return how many tokens of an answer come before the text that the grammar describes.

    Inside the reasoning, the number is infinity.
    """
    if reasoning is None:
        return 0
    return inf if reasoning.stage is Stage.INSIDE else reasoning.num_tokens


def _set_bits(mask: np.ndarray, token_ids: np.ndarray, value: bool) -> None:
    words, bits = mask.view(np.uint32), np.uint32(1) << (token_ids % 32).astype(np.uint32)
    if value:
        np.bitwise_or.at(words, token_ids // 32, bits)
    else:
        np.bitwise_and.at(words, token_ids // 32, ~bits)


def _first_id(mask: np.ndarray) -> int:
    """Return the lowest token id that a mask allows. If no id is allowed, return 0."""
    word = int((mask != 0).argmax())
    bits = int(mask[word])
    return 32 * word + (bits & -bits).bit_length() - 1 if bits else 0


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]
