"""Token ids to text, as they come: no character is cut, and stop strings are found wherever tokens end."""

from codecs import getincrementaldecoder
from collections.abc import Iterable
from operator import itemgetter

from nanovllm.sampling_params import SamplingParams

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


class TokenTexts:
    """The text of single tokens in their places: a character of several tokens is the last one's, the others have none."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def take(self, token_id: int, alternatives: Iterable[int] = ()) -> dict[int, str]:
        """The text of the next token, and what others would have in its place."""
        state, texts = self._decoder.getstate(), {}
        for i in (*alternatives, token_id):
            self._decoder.setstate(state)
            texts[i] = self._decoder.decode(self._vocabulary[i])
        return texts


class Detokenizer:
    """The text of one answer, in time linear in its length.

    What joins the tokens' bytes is UTF-8, so a character waits until its last byte is there.
    """

    def __init__(self, token_ids: list[int], num_prompt_tokens: int, params: SamplingParams, vocabulary: Vocabulary):
        """`token_ids` is the sequence's own list: the prompt, to which tokens will be appended."""
        self._token_ids, self._params, self._vocabulary = token_ids, params, vocabulary
        self._num_prompt = self._num_decoded = num_prompt_tokens
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._pieces: list[str] = []
        self._untaken: list[str] = []
        self._window = ""  # the last characters that a stop string may begin with, which ends in what follows
        self._max_overlap = max(map(len, params.stop), default=1) - 1

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def extend(self, num_hidden: int = 0, is_over: bool = False) -> str:
        """What the tokens since the last call add, short of the last `num_hidden`, which are no part of the text.

        When it is over, what is left of a character is replaced by U+FFFD.
        """
        new = self._token_ids[self._num_decoded : len(self._token_ids) - num_hidden]
        self._num_decoded += len(new)
        piece = self._decoder.decode(b"".join([self._vocabulary[i] for i in new]), is_over)
        if piece:
            self._pieces.append(piece)
            self._untaken.append(piece)
        return piece

    def cut_at_stop(self) -> str | None:
        """The stop string that ends first in what the last token adds, unless it came too early; the text is cut there.

        Of several that end there it is the first of the list.
        """
        piece, params, found = self.extend(), self._params, []
        text = self._window + piece
        for stop in params.stop if len(self._token_ids) - self._num_prompt > params.min_tokens else ():
            if (begin := text.find(stop, max(0, len(self._window) + 1 - len(stop)))) >= 0:
                found.append((begin + len(stop), begin, stop))
        self._window = text[len(text) - min(self._max_overlap, len(text)) :]
        if not found:
            return None
        end, begin, stop = min(found, key=itemgetter(0))
        num_cut = len(text) - (end if params.include_stop_str_in_output else begin)
        self._pieces, self._untaken = ([(x := "".join(p))[: len(x) - num_cut]] for p in (self._pieces, self._untaken))
        self._decoder.reset()
        return stop

    def take(self, num_hidden: int = 0, is_over: bool = False) -> str:
        """The text since the last call, short of what may turn out to be the beginning of a stop string."""
        self.extend(num_hidden, is_over)
        text = "".join(self._untaken)
        stops = () if is_over or self._params.include_stop_str_in_output else self._params.stop
        bound = min(self._max_overlap, len(text))
        lengths = (
            n
            for n in range(bound, 0, -1)
            if any(len(s) > n and s[n - 1] == text[-1] and text.endswith(s[:n]) for s in stops)
        )
        num_held = next(lengths, 0) if stops else 0
        self._untaken = [text[len(text) - num_held :]]
        return text[: len(text) - num_held]
