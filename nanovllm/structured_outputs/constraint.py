"""Which tokens may come next in an answer of a given form: a mask for each token, and an end if there are none."""

from weakref import proxy

import numpy as np

from nanovllm.engine.sequence import Sequence
from nanovllm.features.logit_edits import MAX_BAD_WORD_TOKENS, mask_of
from nanovllm.structured_outputs.grammar import Grammar, Matcher

TOKEN_MARKER = 0xFF  # begins what stands in the text of llguidance for a token that a grammar names


class Constraint:
    """The state of a grammar after the tokens of one sequence, and the mask of the tokens that it allows next.

    Besides the grammar, the mask has what other parameters ban: only here is it known when no token is left. An id of
    `stop_token_ids` is like an end-of-sequence id, which is allowed where the grammar may end, and nowhere else.

    All of this is a function of the sequence's token ids, so nothing is lost with a preemption.
    """

    def __init__(self, seq: Sequence, grammar: Grammar, vocab_size: int, eos_token_ids: frozenset[int]):
        self._seq, self._grammar = proxy(seq), grammar  # a cycle would keep both until the garbage collector runs
        self._automata = grammar.automata()
        self._matcher: Matcher = self._automata.start.deep_copy()
        self._num_consumed = 0  # generated tokens that the matcher has
        self.next_mask = mask_of((), vocab_size)  # [ceil(vocabulary / 32)] int32: bits of the ids that may come next
        self.draft_masks: list[np.ndarray] = []  # those after the drafts of the next step
        self.error: str | None = None  # why there is no next token
        params = seq.params
        self._stops = np.array(params.stop_token_ids or (), np.int64)
        self._ends = np.array([*{*eos_token_ids, *self._stops.tolist()}], np.int64)
        edits = seq.feature_state["logit_edits"]
        self._allowed, self._bad_words = edits.allowed_mask, edits.bad_words

    def update(self) -> None:
        """Bring the mask up to date with the tokens of the sequence."""
        if self.consume():
            self.set_mask(self._grammar_mask())
        if self._matcher.is_error() and self._restart():
            self.update()

    def _restart(self) -> bool:
        """After an error, start again with larger automata, unless there are none: too small ones may be the cause."""
        self._automata.has_failed = True
        if self._automata.is_largest:
            return False
        self._automata = self._grammar.automata()
        self._matcher, self._num_consumed = self._automata.start.deep_copy(), 0
        return True

    def consume(self) -> bool:
        """Give the grammar the tokens that it does not have yet; False if it does not allow them."""
        new = self._seq.token_ids[self._seq.num_prompt_tokens + self._num_consumed :]
        is_allowed = self._matcher.consume_tokens(new)
        self._num_consumed = self._seq.num_completion_tokens
        if not is_allowed:
            self.set_mask(None)
        return is_allowed

    def set_mask(self, mask: np.ndarray | None) -> None:
        """`mask` is the grammar's own, without the bans of other parameters; None if its state is an error."""
        if mask is None or self._matcher.is_error():
            self.next_mask = np.zeros_like(self.next_mask)
            reason = _first_line(self._matcher.get_error())
            says_nothing = reason in ("", "NoExtensionBias")  # the second is what llguidance calls it
            self.error = f"structured_outputs: {'no token is allowed' if says_nothing else reason}"
        else:
            self.next_mask = self._with_bans(mask, self._seq.completion_token_ids)
            self.error = None if self.next_mask.any() else "structured_outputs: the parameters allow no token"

    def draft(self, drafts: list[int], num_drafts: int) -> list[int]:
        """As many of the drafts as are allowed and do not end the answer; if none, what the grammar forces, at most so
        many. Sets `draft_masks`.
        """
        return self._allowed_of(drafts) or self._allowed_of(self._matcher.compute_ff_tokens()[:num_drafts])

    def _allowed_of(self, drafts: list[int]) -> list[int]:
        completion, mask = self._seq.completion_token_ids, self.next_mask
        self.draft_masks, num_before = [], len(completion)
        for token_id in drafts:
            if token_id < 0 or token_id in self._ends or not mask[token_id // 32] >> token_id % 32 & 1:
                break
            self._matcher.consume_token(token_id)
            completion.append(token_id)
            mask = self._with_bans(self._grammar_mask(), completion)
            self.draft_masks.append(mask)
        if self._matcher.is_error():  # its masks are none
            self.draft_masks = []
            return self._allowed_of(drafts) if self._restart() and self.consume() else []
        self._matcher.rollback(len(self.draft_masks))
        return completion[num_before:]

    def _grammar_mask(self) -> np.ndarray:
        """What the grammar allows in its state, which may be an error.

        Where it allows one text alone, llguidance gives the first token that the tokenizer makes of this text. That may
        be an added token, which is no text to the grammar, or one of another text, if the tokenizer normalizes texts.
        The grammar does not allow such a token: the first byte is allowed instead.
        """
        mask = np.empty_like(self.next_mask)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if (
            np.count_nonzero(mask) == 1
            and len(token_ids := _ids_of(mask)) == 1
            and (text := self._matcher.compute_ff_bytes())
            and text[0] != TOKEN_MARKER
            and not self._matcher.validate_tokens(token_ids)
        ):
            return mask_of(self._grammar.token_ids_of_byte(text[0]), 32 * len(mask))
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


def _set_bits(mask: np.ndarray, token_ids: np.ndarray, value: bool) -> None:
    words, bits = mask.view(np.uint32), np.uint32(1) << (token_ids % 32).astype(np.uint32)
    if value:
        np.bitwise_or.at(words, token_ids // 32, bits)
    else:
        np.bitwise_and.at(words, token_ids // 32, ~bits)


def _ids_of(mask: np.ndarray) -> list[int]:
    return np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]
