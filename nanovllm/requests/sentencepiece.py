"""Converts SentencePiece tokens to bytes."""

import re
from collections.abc import Callable

_SPACE = "\u2581"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def check_decoder(decoder: object, decode: Callable[[list[str]], str]) -> None:
    """Raise ValueError if `decode`, a method of `decoder`, does not treat spaces as SentencePiece does."""
    if decode(["a", _SPACE + "b"]) != "a b":
        kind = type(decoder).__name__
        raise ValueError(f"tokenizer: its decoder is {kind!r}; must be 'ByteLevel', or one for SentencePiece")


def sentencepiece_bytes(token: str) -> bytes:
    return bytes([int(token[3:5], 16)]) if _BYTE_TOKEN.fullmatch(token) else token.replace(_SPACE, " ").encode()
