"""Turns token ids into text while they arrive. Characters are never split.

Two kinds of tokenizers are supported. Byte-level BPE (GPT-2, Qwen, Llama 3) writes each byte of a token as a character.
SentencePiece (Llama 2, Mistral) writes a space as U+2581, and has tokens such as `<0x0A>` for single bytes.
"""

from codecs import getincrementaldecoder
from itertools import islice

from nanovllm.requests.sentencepiece import check_decoder, sentencepiece_bytes

# Byte-level BPE does not change printable Latin-1 bytes, and maps all other bytes, in order, to characters from 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))}


class TokenBytes(dict[int, bytes]):
    """Maps a token id to the token's bytes in the middle of a text, or b"" if it has no text."""

    def __init__(self, tokenizer, skip_special_tokens: bool):
        """Raise ValueError if this kind of tokenizer is not supported."""
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        # test its behaviour, not its class, because the same decoder can be composed in several ways
        decode = getattr(decoder, "decode", "".join)
        if decode(["\u0120a", "\xc3", "\xa9"]) == " a\xe9":
            self._to_bytes = _byte_level_bytes
        else:
            check_decoder(decoder, decode)
            self._to_bytes = sentencepiece_bytes
        self._decode, self._token_of = decode, tokenizer.convert_ids_to_tokens
        if skip_special_tokens:
            self |= {i: b"" for i, token in tokenizer.added_tokens_decoder.items() if token.special}

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = text = self._to_bytes(self._token_of(token_id) or "")
        return text

    def at_start(self, token_id: int) -> bytes:
        """Return the bytes that a token has at the start of a text, where the tokenizer may omit a space."""
        text = self[token_id]
        return self._decode([self._token_of(token_id)]).encode() if text.startswith(b" ") else text


def _byte_level_bytes(token: str) -> bytes:
    # tokens added to the vocabulary may be plain text
    is_byte_level = all(character in _BYTES for character in token)
    return bytes(map(_BYTES.__getitem__, token)) if is_byte_level else token.encode()


class Detokenizer:
    """Decodes an answer in linear time. The text is `decode(prompt + answer)` without its prefix `decode(prompt)`.

    The bytes of the tokens form a UTF-8 stream, so a character becomes text when its last byte arrives. Invalid bytes
    become U+FFFD. (SentencePiece's `decode` also replaces valid bytes next to invalid bytes.)
    """

    def __init__(self, token_ids: list[int], num_prompt_tokens: int, token_bytes: TokenBytes):
        """`token_ids` is the sequence's list of prompt tokens and generated tokens, which grows between calls."""
        self._token_ids, self._token_bytes = token_ids, token_bytes
        self._bytes_of = token_bytes.__getitem__
        self._num_decoded = num_prompt_tokens
        self._is_at_start = not any(token_bytes[i] for i in islice(token_ids, num_prompt_tokens))
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._is_split = False  # whether the decoder holds an incomplete character
        self._pieces: list[str] = []  # the whole text
        self._pending = ""  # the end of the text, not yet returned by `take_text`

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def decode(self, num_hidden: int = 0, is_last: bool = False) -> str:
        """Return the text of the new tokens since the previous call, without the last `num_hidden` tokens.

        If `is_last` is True, no more tokens follow, so an incomplete character at the end becomes U+FFFD.
        """
        new = self._token_ids[self._num_decoded : len(self._token_ids) - num_hidden]
        self._num_decoded += len(new)
        data = b"".join(map(self._bytes_of, new))
        if self._is_at_start and data:  # tokens before the first token with text add nothing
            first = next(i for i in new if self._token_bytes[i])
            data = self._token_bytes.at_start(first) + data[len(self._token_bytes[first]) :]
            self._is_at_start = False
        if data.isascii() and not self._is_split:
            piece = data.decode()
        else:
            piece = self._decoder.decode(data, is_last)
            self._is_split = bool(self._decoder.getstate()[0])
        if piece:
            self._pieces.append(piece)
            self._pending += piece
        return piece

    def take_text(self, num_hidden: int = 0, is_last: bool = False) -> str:
        """Return the text since the previous call of `take_text`. The arguments are the same as for `decode`."""
        if is_last or self._num_decoded < len(self._token_ids):
            self.decode(num_hidden, is_last)
        text, self._pending = self._pending, ""
        return text
