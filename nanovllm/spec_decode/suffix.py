"""Drafts by suffix decoding. The drafts are the tokens that followed the longest matching context.

The context may have occurred in the same request or in an earlier request.

Source: Oliaro et al., "SuffixDecoding: extreme speculative decoding for emerging AI applications" (2024). Instead of
suffix trees, this module uses suffix automata, from Blumer et al., "The smallest automaton recognizing the subwords of
a text" (1985).
"""

from dataclasses import dataclass, field

from nanovllm.engine.sequence import Sequence
from nanovllm.spec_decode.proposer import Proposer

MAX_TOKENS = 2**16  # of one automaton, which then takes about 40 MiB; a Memory has two automata
MAX_COUNTED = 32  # a new token is counted only by this many states: the states with its longest contexts
ROOT = 0  # the state of the empty context


class SuffixAutomaton:
    """An index of all contexts (token sequences) in a set of texts.

    Building the index takes time and memory linear in the length of the texts.

    A state stands for all contexts that end at the same positions. `lengths[s]` is the length of the longest context of
    state s. `links[s]` is the suffix link of state s: the state of the longest suffix that does not belong to s.
    `next[s]` maps a token to the state of the contexts of s with this token appended. `counts[s]` is approximately how
    often the contexts of s occur.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.links, self.lengths, self.counts = [-1], [0], [0]
        self.num_tokens = 0

    def extend(self, state: int, token_id: int) -> int:
        """Append a token to a text. `state` is the text's state (`ROOT` if the text is empty). Return the new state."""
        self.num_tokens += 1
        if (new := self.next[state].get(token_id)) is not None:  # another text has the same context
            if self.lengths[new] > self.lengths[state] + 1:
                new = self._split(new, state, token_id)
        else:
            new = self._add({}, ROOT, self.lengths[state] + 1, 0)
            before: int = state
            while before >= 0 and token_id not in self.next[before]:
                self.next[before][token_id] = new
                before = self.links[before]
            if before >= 0:
                target = self.next[before][token_id]
                is_longer = self.lengths[target] > self.lengths[before] + 1
                self.links[new] = self._split(target, before, token_id) if is_longer else target
        counted = new
        for _ in range(MAX_COUNTED):
            if counted <= ROOT:
                break
            self.counts[counted] += 1
            counted = self.links[counted]
        return new

    def _add(self, following: dict[int, int], link: int, length: int, count: int) -> int:
        self.next.append(following)
        self.links.append(link)
        self.lengths.append(length)
        self.counts.append(count)
        return len(self.links) - 1

    def _split(self, state: int, before: int, token_id: int) -> int:
        """Move contexts of `state` to a new state, if they have at most `lengths[before] + 1` tokens.

        Return the new state.
        """
        copied = {**self.next[state]}, self.links[state], self.lengths[before] + 1, self.counts[state]
        self.links[state] = new = self._add(*copied)
        while before >= 0 and self.next[before].get(token_id) == state:
            self.next[before][token_id] = new
            before = self.links[before]
        return new

    def follow(self, state: int, length: int, token_id: int) -> tuple[int, int]:
        """Append a token to a context of `length` tokens.

        Return the state and the length of the new context's longest suffix that is in the index.
        """
        while state >= 0 and token_id not in self.next[state]:
            state = self.links[state]
            length = self.lengths[state] if state >= 0 else -1
        return (self.next[state][token_id], length + 1) if state >= 0 else (ROOT, 0)

    def context(self, state: int, length: int, depth: int) -> tuple[int, int]:
        """Find the longest suffix of a context. The suffix must have a continuation, and at most `depth` tokens.

        Return the suffix's state and length.
        """
        while state > ROOT and (not self.next[state] or self.lengths[self.links[state]] >= depth):
            state = self.links[state]
            length = self.lengths[state]
        return state, min(length, depth)

    def draft(self, state: int, num_drafts: int, min_probability: float) -> list[int]:
        """Return the most frequent continuation. The continuation ends before its probability falls below
        `min_probability`.
        """
        drafts: list[int] = []
        probability = 1.0
        while len(drafts) < num_drafts and (following := self.next[state]):
            token_id = max(following, key=lambda x: self.counts[following[x]])
            state = following[token_id]
            probability *= self.counts[state] / max(1, sum(self.counts[x] for x in following.values()))
            if probability < min_probability:
                break
            drafts.append(token_id)
        return drafts


@dataclass
class Memory:
    """Stores the remembered texts.

    The automaton `growing` gets new texts. The automaton `old` contains older texts, and does not change.
    """

    growing: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    old: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    num_texts: int = 0  # in `growing`


@dataclass
class Place:
    """The position of a sequence in a `Memory`."""

    memory: Memory
    num_read: int = 0  # number of its tokens that are in the memory
    state: int = ROOT  # in `memory.growing`: the state of its text
    old_state: int = ROOT  # in `memory.old`: the state of the longest context that occurred
    old_length: int = 0


class Suffix(Proposer):
    """Makes drafts from a memory that requests share. For privacy, a request with a `cache_salt` has its own memory."""

    def __init__(self, settings):
        super().__init__(settings)
        self.shared = Memory()
        self.places: dict[Sequence, Place] = {}

    def draft(self, seq, num_drafts):
        settings = self.settings
        if (place := self.places.get(seq)) is None:
            is_alone = seq.cache_salt or not settings.suffix_decoding_max_cached_requests
            place = self.places[seq] = Place(Memory() if is_alone else self.shared)
            place.memory.num_texts += 1
        self._read(place, seq.token_ids)
        memory, depth = place.memory, settings.suffix_decoding_max_tree_depth
        contexts = (
            (memory.growing, *memory.growing.context(place.state, memory.growing.lengths[place.state], depth)),
            (memory.old, *memory.old.context(place.old_state, place.old_length, depth)),
        )
        automaton, state, length = max(contexts, key=lambda x: x[2])  # among equally long contexts, the newer
        num_drafts = min(num_drafts, int(settings.suffix_decoding_max_spec_factor * length))
        return automaton.draft(state, num_drafts, settings.suffix_decoding_min_token_prob) if state else []

    def _read(self, place: Place, token_ids: list[int]) -> None:
        memory = place.memory
        for token_id in token_ids[place.num_read :]:
            place.state = memory.growing.extend(place.state, token_id)
            place.old_state, place.old_length = memory.old.follow(place.old_state, place.old_length, token_id)
        place.num_read = len(token_ids)
        max_texts = -(-self.settings.suffix_decoding_max_cached_requests // 2)
        if memory is self.shared and (memory.growing.num_tokens > MAX_TOKENS or memory.num_texts > max_texts):
            self._renew(memory)

    def _renew(self, memory: Memory) -> None:
        """Start a new automaton with the last tokens of live sequences. Drop the oldest automaton."""
        memory.old, memory.growing, memory.num_texts = memory.growing, SuffixAutomaton(), 0
        for seq, place in self.places.items():
            if place.memory is memory:
                place.old_state, place.old_length = place.state, memory.old.lengths[place.state]
                place.state = ROOT
                depth = self.settings.suffix_decoding_max_tree_depth
                for token_id in seq.token_ids[max(0, place.num_read - depth) : place.num_read]:
                    place.state = memory.growing.extend(place.state, token_id)

    def forget(self, seq):
        """Add the sequence's last tokens to the shared memory. Then forget the sequence."""
        if (place := self.places.pop(seq, None)) is not None and place.memory is self.shared:
            self._read(place, seq.token_ids)

    def reset(self):
        self.places.clear()
        self.shared = Memory()
