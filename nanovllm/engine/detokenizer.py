"""Token ids to text while they arrive: no character is split, and stop strings may begin and end within tokens."""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Mapping
from operator import itemgetter

from nanovllm.sampling_params import SamplingParams

# Byte-level BPE writes printable Latin-1 bytes as themselves, and the others, in order, as the characters from 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))}


class TokenBytes(dict[int, bytes]):
    """The bytes of each token id, filled on first use; empty for an id that has no text."""

    def __init__(self, tokenizer, skip_special_tokens: bool):
        """`tokenizer` is transformers' fast tokenizer of a byte-level BPE; ValueError for any other kind."""
        kind = type(tokenizer.backend_tokenizer.decoder).__name__
        if kind != "ByteLevel":
            raise ValueError(f"tokenizer: its decoder is {kind!r}; must be 'ByteLevel'")
        self._token_of = tokenizer.convert_ids_to_tokens
        if skip_special_tokens:
            self |= {i: b"" for i, token in tokenizer.added_tokens_decoder.items() if token.special}

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id) or ""
        # a token that was added to the vocabulary may be written as plain text
        is_byte_level = all(character in _BYTES for character in token)
        self[token_id] = text = bytes(map(_BYTES.__getitem__, token)) if is_byte_level else token.encode()
        return text


class TokenTexts:
    """The text of single tokens of a sequence. A character of several tokens is the text of the last of them."""

    def __init__(self, token_bytes: Mapping[int, bytes]):
        self._token_bytes = token_bytes
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def decode(self, token_id: int, alternatives: Iterable[int] = ()) -> dict[int, str]:
        """The text of the next token, and the text of each alternative to it."""
        state, texts = self._decoder.getstate(), {}
        for i in (*alternatives, token_id):
            self._decoder.setstate(state)
            texts[i] = self._decoder.decode(self._token_bytes[i])
        return texts


class Detokenizer:
    """The text of one answer, in time linear in its length.

    The bytes of the tokens together are UTF-8, so a character becomes text when its last byte has arrived.
    """

    def __init__(
        self, token_ids: list[int], num_prompt_tokens: int, params: SamplingParams, token_bytes: Mapping[int, bytes]
    ):
        """`token_ids` is the sequence's own list, which grows: the prompt, then the tokens that are generated."""
        self._token_ids, self._token_bytes = token_ids, token_bytes
        self._stops, self._min_tokens = params.stop or (), params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._num_prompt_tokens = self._num_decoded = num_prompt_tokens
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._pieces: list[str] = []  # the whole text
        self._pending: list[str] = []  # of which `take_text` has not returned this yet
        self._window = ""  # the last characters before the next token, in which a stop string may begin
        self._max_overlap = max(map(len, self._stops), default=1) - 1

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def decode(self, num_hidden: int = 0, is_last: bool = False) -> str:
        """The text of the tokens since the last call, but for the last `num_hidden`, which are not part of the text.

        If no more tokens follow (`is_last`), an incomplete character is replaced by U+FFFD.
        """
        new = self._token_ids[self._num_decoded : len(self._token_ids) - num_hidden]
        self._num_decoded += len(new)
        piece = self._decoder.decode(b"".join([self._token_bytes[i] for i in new]), is_last)
        if piece:
            self._pieces.append(piece)
            self._pending.append(piece)
        return piece

    def cut_at_stop(self) -> str | None:
        """Decode the last token; if it completes a stop string, after min_tokens, cut the text there and return it.

        Of several stop strings it is the one that ends first, and of those that end at the same character the first of
        the list.
        """
        piece, found = self.decode(), []
        text = self._window + piece
        for stop in self._stops if len(self._token_ids) - self._num_prompt_tokens > self._min_tokens else ():
            if (begin := text.find(stop, max(0, len(self._window) + 1 - len(stop)))) >= 0:
                found.append((begin + len(stop), begin, stop))
        self._window = text[len(text) - min(self._max_overlap, len(text)) :]
        if not found:
            return None
        end, begin, stop = min(found, key=itemgetter(0))
        num_cut = len(text) - (end if self._include_stop else begin)
        self._pieces = _without_end(self._pieces, num_cut)
        self._pending = _without_end(self._pending, num_cut)
        self._decoder.reset()
        return stop

    def take_text(self, num_hidden: int = 0, is_last: bool = False) -> str:
        """The text since the last call, without an end that may be the beginning of a stop string."""
        self.decode(num_hidden, is_last)
        text = "".join(self._pending)
        num_held_back = 0
        if not is_last and not self._include_stop:
            num_held_back = self._partial_stop(text)
        self._pending = [text[len(text) - num_held_back :]]
        return text[: len(text) - num_held_back]

    def _partial_stop(self, text: str) -> int:
        """The length of the longest end of `text` that is the beginning of a stop string."""
        for n in range(min(self._max_overlap, len(text)), 0, -1):
            for stop in self._stops:
                if len(stop) > n and stop[n - 1] == text[-1] and text.endswith(stop[:n]):
                    return n
        return 0


def _without_end(pieces: list[str], num_characters: int) -> list[str]:
    text = "".join(pieces)
    return [text[: len(text) - num_characters]]
