"""Defines compiled grammars and their automata, which several sequences can share."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

# Most grammars have fewer than 1,000 states. With 400 terminals, 2,000 states take 8 MB, so 128 grammars take at most
# 1 GiB. The largest automata (250,000 states) take as much memory for one grammar.
MAX_KEPT_STATES = 2000
SLOW_SECONDS = 0.005  # masks that take more CPU time are slow; most masks take less than a hundredth of that
Matcher = Any  # llguidance.LLMatcher, which is imported only where it is used


class Automata:
    """A matcher in its start state. Copies of the matcher share the automata that compute masks.

    has_failed: True if the matcher or a copy has failed.
    """

    def __init__(self, start: Matcher, is_largest: bool):
        self.start, self.is_largest, self.has_failed = start, is_largest, False


class Grammar:
    """A compiled grammar. The small automata have at most `MAX_KEPT_STATES` states, which is enough for most grammars.

    Sequences that need more states share the large automata, which only llguidance limits. The large automata are freed
    when no sequence uses them anymore.
    """

    def __init__(self, tokenizer: Any, text: str):
        """Compile `text` for `tokenizer`, an `LLTokenizer`. Raises ValueError if llguidance refuses the text."""
        self._tokenizer, self._text, self._lock = tokenizer, text, threading.Lock()
        # the exponential moving average of the CPU time of a mask
        self._mask_seconds: float | None = None
        self._small: Automata | None = self._compile(MAX_KEPT_STATES)
        self._large: Callable[[], Automata | None] = lambda: None
        if (error := self.automata().start.get_error()) != "":
            raise ValueError(error)

    def automata(self) -> Automata:
        """Return the small automata, or the large automata if the small automata have failed."""
        with self._lock:
            if self._small is not None and not self._small.has_failed:
                return self._small
            self._small = None
            if (large := self._large()) is None or large.has_failed:
                large = self._compile()
                self._large = weakref.ref(large)
            return large

    @property
    def is_slow(self) -> bool:
        return (self._mask_seconds or 0) > SLOW_SECONDS

    def add_mask(self, seconds: float) -> None:
        mean = seconds if self._mask_seconds is None else self._mask_seconds
        self._mask_seconds = mean + (seconds - mean) / 8

    def token_ids_of_byte(self, byte: int) -> list[int]:
        """Return a list with the id of the token that stands for a byte. If no token stands for the byte, return []."""
        tokenizer = self._tokenizer
        ids = tokenizer.greedy_tokenize(chr(byte)) if byte < 128 else tokenizer.tokenize_bytes(bytes([byte]))
        return ids if tokenizer.decode_bytes(ids) == bytes([byte]) else []

    def _compile(self, max_states: int | None = None) -> Automata:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=max_states)
        automata = Automata(LLMatcher(self._tokenizer, self._text, log_level=0, limits=limits), max_states is None)
        automata.has_failed = automata.start.is_error()
        return automata
