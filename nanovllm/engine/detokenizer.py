"""Token ids to text, as they come: no character is cut, and stop strings are found wherever tokens end."""
from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence

# Byte-level BPE writes a byte that is no printable Latin-1 character as one of those from 256 on, in their order.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))}


class Vocabulary(dict):
    """The bytes of each token id, looked up on first use; none of an id that stands for no text."""

    def __init__(self, tokenizer, skip_special_tokens: bool):
        """`tokenizer` is transformers' fast tokenizer of a byte-level BPE; ValueError for another kind."""
        kind = type(tokenizer.backend_tokenizer.decoder).__name__
        if kind != "ByteLevel":
            raise ValueError(f"tokenizer: its decoder is {kind!r}; must be 'ByteLevel'")
        self._token_of = tokenizer.convert_ids_to_tokens
        if skip_special_tokens:
            self |= {i: b"" for i, token in tokenizer.added_tokens_decoder.items() if token.special}

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id) or ""
        # an added token may hold other characters: then it is the text itself
        plain = all(character in _BYTES for character in token)
        self[token_id] = text = bytes(map(_BYTES.get, token)) if plain else token.encode()
        return text


class Detokenizer:
    """The text of one answer. What joins the tokens' bytes is UTF-8, so a character waits until its last byte is there."""

    def __init__(self, vocabulary: Mapping[int, bytes] | None):
        self.text = ""
        self._vocabulary = vocabulary
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._num_searched = 0  # characters in which no stop string ends
        self._num_taken = 0

    def extend(self, token_ids: Sequence[int], final: bool = False) -> None:
        """Add tokens; if they are the last ones, what is left of a character is replaced by U+FFFD."""
        self.text += self._decoder.decode(b"".join([self._vocabulary[i] for i in token_ids]), final)

    def cut_at_stop(self, stops: Sequence[str], include: bool) -> str | None:
        """The stop string whose end comes first in the text since the last call; the text ends with it, or before it."""
        found = []
        for stop in stops:
            begin = self.text.find(stop, max(0, self._num_searched + 1 - len(stop)))
            if begin >= 0:
                found.append((begin + len(stop), begin, stop))
        self._num_searched = len(self.text)
        if not found:
            return None
        end, begin, stop = min(found)
        self.text = self.text[: end if include else begin]
        self._decoder.reset()
        return stop

    def take(self, stops: Sequence[str], final: bool) -> str:
        """The text since the last call, short of what may turn out to be the beginning of one of `stops`."""
        end = len(self.text)
        if not final:
            end -= max((n for s in stops for n in range(1, len(s)) if self.text.endswith(s[:n])), default=0)
        begin, self._num_taken = self._num_taken, end
        return self.text[begin:end]
