"""What a front and the engine's process send each other, as MessagePack: all that is new since the last message.

Nothing here needs PyTorch, so that the engine's process can start the fronts before it imports that.
"""

import socket
import threading
from contextlib import suppress
from typing import Any

from msgspec import Struct, msgpack

from nanovllm.requests.stream_event import StreamEvent
from nanovllm.serve.replicas.messages import Final, NewRequest


class FromFront(Struct, array_like=True):
    """The first one says that the front accepts connections, or why it can't: by `problem`. requests: each with its id,
    and encoded by itself, so that one which can't be encoded or read takes no other along. calls: of EngineCalls; a
    number, the name of the method, and its arguments.
    """

    requests: list[tuple[int, bytes]] = []
    discarded: list[int] = []
    aborted: list[int] = []
    calls: list[tuple[int, str, list[Any]]] = []
    problem: str = ""


class FromEngine(Struct, array_like=True):
    """The first one, which is empty, says that the engine has started. errors: a request's id, the name of the class of
    the error, and its text. results: of calls, by number; with a text, that of the error. failure: that has ended the
    engine.
    """

    deltas: list[StreamEvent] = []
    finals: list[Final] = []
    errors: list[tuple[int, str, str]] = []
    results: list[tuple[int, Any, str]] = []
    failure: str = ""


decode_from_front = msgpack.Decoder(FromFront).decode
decode_from_engine = msgpack.Decoder(FromEngine).decode
decode_request = msgpack.Decoder(NewRequest).decode
LENGTH_BYTES = 4  # of a message's length, in front of it
_encode = msgpack.Encoder(enc_hook=list).encode  # log-probabilities are sequences of a type of their own


def encode_request(new: NewRequest) -> tuple[int, bytes]:
    return new.request_id, _encode(new)


class Channel:
    """One end of a pair of sockets. A thread may wait for messages while others send; `close` ends both."""

    def __init__(self, end: socket.socket):
        self._socket, self._lock = end, threading.Lock()
        self._stream = end.makefile("rb")

    def fileno(self) -> int:
        """So that several channels can be waited for."""
        return self._socket.fileno()

    def send(self, message: Struct) -> None:
        """OSError if the other end is closed. Any other error is one of the message, and nothing was sent."""
        data = _encode(message)
        with self._lock:
            self._socket.sendall(len(data).to_bytes(LENGTH_BYTES, "big") + data)

    def receive(self, seconds: float | None = None) -> bytes:
        """The next message. OSError if an end is closed, or after so many seconds."""
        self._socket.settimeout(seconds)
        data = self._stream.read(int.from_bytes(self._stream.read(LENGTH_BYTES), "big"))
        if not data:
            raise ConnectionError("the other end of the channel is closed")
        return data

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
