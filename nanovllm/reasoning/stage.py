"""Determines from the token ids of an answer whether the answer is before, inside or after its reasoning."""

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Any

from nanovllm.reasoning.formats import ReasoningFormat


class Stage(Enum):
    BEFORE = auto()  # the answer may still begin with reasoning
    INSIDE = auto()
    ENDED = auto()  # or the answer has no reasoning


class Markers:
    """Holds the markers of a reasoning format, and the tokens that represent the markers in a model's vocabulary.

    Most models have one token for each marker. If a model has marker tokens, a marker is recognized only in a token
    that contains the whole marker. Several tokens that together spell the marker are part of the reasoning. If a model
    has no marker tokens, any tokens that together spell a marker are recognized.
    """

    def __init__(self, form: ReasoningFormat, tokenizer: Any, token_bytes: Mapping[int, bytes]):
        """`token_bytes` must include the special tokens."""
        self.begin, self.end, self.is_open = form.begin.encode(), form.end.encode(), form.is_open
        self.token_bytes = token_bytes
        self.texts = form.begin, form.end
        self.begin_id, self.end_id = (find_token_id(tokenizer, text) for text in (form.begin, form.end))
        self.end_ids: list[int] = tokenizer.encode(form.end, add_special_tokens=False)
        added = tokenizer.added_tokens_decoder.items()
        self._turn_ids = {
            i
            for i, token in added
            if _begins_or_ends_turn(token) and not self._has_marker(token.content) and token.content not in form.inner
        }

    def _has_marker(self, text: str) -> bool:
        return self.begin in text.encode() or self.end in text.encode()

    def start(self, prompt_token_ids: list[int]) -> "Reasoning":
        """Return the state at the beginning of an answer to this prompt."""
        return Reasoning(self, self.stage_after(prompt_token_ids))

    def stage_after(self, prompt_token_ids: list[int]) -> Stage:
        """Return the stage in which an answer to this prompt begins.

        The reasoning may begin or end in the last turn of the prompt.
        """
        start = len(prompt_token_ids)
        while start and prompt_token_ids[start - 1] not in self._turn_ids:
            start -= 1
        turn = b"".join([self.token_bytes[token_id] for token_id in prompt_token_ids[start:]])
        begin, end = turn.rfind(self.begin), turn.rfind(self.end)
        if begin == end == -1:
            return Stage.INSIDE if self.is_open else Stage.BEFORE
        return Stage.INSIDE if begin > end else Stage.ENDED


class TextMarkers:
    """Holds the markers of a reasoning format, for text whose tokens are unknown."""

    begin_id = end_id = None

    def __init__(self, form: ReasoningFormat):
        self.begin, self.end = form.begin.encode(), form.end.encode()


class Reasoning:
    """Tracks the reasoning of an answer after the tokens processed so far.

    stage: before, inside or after the reasoning.
    num_tokens: the number of reasoning tokens, including markers.
    num_thoughts: the number of reasoning tokens after the begin marker.
    num_ends: how often the text of the end marker has occurred, including occurrences that did not end the reasoning.
    """

    def __init__(self, markers: Markers | TextMarkers, stage: Stage):
        self.markers: Any = markers
        self.stage = stage
        self.num_tokens = self.num_thoughts = self.num_ends = 0
        self._num_before = 0  # leading tokens of white space, or of an incomplete marker
        self._text = b""  # the end of the text, in which a marker may begin

    @property
    def has_begun(self) -> bool:
        return self.stage is Stage.INSIDE or self.num_tokens > 0

    def take(self, token_ids: Iterable[int]) -> None:
        """Process the next tokens of the answer. Tokens after the reasoning have no effect."""
        for token_id in token_ids:
            if self.stage is Stage.ENDED:
                return
            self.take_text(self.markers.token_bytes[token_id])

    def forced_id(self, budget: int) -> int | None:
        """Return the next token of the end marker if `num_thoughts` has reached `budget`, else None."""
        end_ids, num_over = self.markers.end_ids, self.num_thoughts - budget
        return end_ids[num_over % len(end_ids)] if num_over >= 0 else None

    def take_text(self, piece: bytes) -> None:
        """Process the text of the next token. With TextMarkers, `piece` may be the text of several tokens."""
        if self.stage is Stage.BEFORE:
            self._begin_with(piece)
        elif self.stage is Stage.INSIDE:
            self._text += piece
            self.num_thoughts += 1
            self.num_tokens += 1
            self._find_end(piece)

    def _begin_with(self, piece: bytes) -> None:
        begin = self.markers.begin
        self._num_before += 1
        self._text = text = (self._text + piece).lstrip()
        if text.startswith(begin):
            self.stage, self.num_tokens, self._text = Stage.INSIDE, self._num_before, text[len(begin) :]
            self._find_end(self._text)
        elif text and (self.markers.begin_id is not None or not begin.startswith(text)):
            self.stage = Stage.ENDED

    def _find_end(self, piece: bytes) -> None:
        end = self.markers.end
        if (place := self._text.find(end)) >= 0:
            self.num_ends += 1
            if self.markers.end_id is None or end in piece:
                self.stage = Stage.ENDED
            self._text = self._text[place + len(end) :]
        self._text = self._text[-len(end) + 1 :]


def _begins_or_ends_turn(token: Any) -> bool:
    """Return whether an added token may separate the turns of a conversation.

    Added tokens that do not separate turns, such as `<tool_call>`, may occur inside reasoning. DeepSeek does not mark
    all separators as special, so every token that contains a bar is treated as a separator.
    """
    return bool(token.content.strip()) and (token.special or any(bar in token.content for bar in "|\uff5c"))


def find_token_id(tokenizer: Any, text: str) -> int | None:
    """Return the id of the token whose text is `text`, or None if no token has this text."""
    token_id = tokenizer.convert_tokens_to_ids(text)
    return token_id if token_id is not None and tokenizer.convert_ids_to_tokens(token_id) == text else None
