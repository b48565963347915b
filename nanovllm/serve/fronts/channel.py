"""Defines the MessagePack messages between a front and the engine's process.

A message contains all news since the previous message.

This module does not import PyTorch, so the engine's process can start fronts before it imports PyTorch.
"""

import socket
import threading
from contextlib import suppress
from typing import Any

from msgspec import Struct, msgpack

from nanovllm.requests.stream_event import StreamEvent
from nanovllm.serve.replicas.messages import Final, NewRequest


class FromFront(Struct, array_like=True):
    """A message from a front. If the first message has no `problem`, the front accepts connections.

    requests: pairs (id, encoded request). Each request is encoded separately, so that a broken request does not affect
        other requests.
    calls: calls of EngineCalls methods, as triples (number, method name, arguments).
    """

    requests: list[tuple[int, bytes]] = []
    discarded: list[int] = []
    aborted: list[int] = []
    calls: list[tuple[int, str, list[Any]]] = []
    problem: str = ""


class FromEngine(Struct, array_like=True):
    """A message from the engine. The first message is empty, and means that the engine has started.

    errors: triples (request id, name of the error's class, error message).
    results: triples (call number, result, error message or "").
    failure: the error that has ended the engine.
    """

    deltas: list[StreamEvent] = []
    finals: list[Final] = []
    errors: list[tuple[int, str, str]] = []
    results: list[tuple[int, Any, str]] = []
    failure: str = ""


decode_from_front = msgpack.Decoder(FromFront).decode
decode_from_engine = msgpack.Decoder(FromEngine).decode
decode_request = msgpack.Decoder(NewRequest).decode
LENGTH_BYTES = 4  # size of the length that precedes each message
_encode = msgpack.Encoder(enc_hook=list).encode  # `list` converts log-probabilities that are DeferredLists


def encode_request(new: NewRequest) -> tuple[int, bytes]:
    return new.request_id, _encode(new)


class Channel:
    """One end of a socket pair.

    One thread may receive while other threads send. After `close`, calls from all threads fail.
    """

    def __init__(self, end: socket.socket):
        self._socket, self._lock = end, threading.Lock()
        self._stream = end.makefile("rb")

    def fileno(self) -> int:
        """Return the file descriptor, so that `multiprocessing.connection.wait` can wait for several channels."""
        return self._socket.fileno()

    def send(self, message: Struct) -> None:
        """Send a message. Raises OSError if the other end is closed.

        If `send` raises any other error, nothing was sent.
        """
        data = _encode(message)
        with self._lock:
            self._socket.sendall(len(data).to_bytes(LENGTH_BYTES, "big") + data)

    def receive(self, seconds: float | None = None) -> bytes:
        """Return the next message. Raises OSError if no message arrives in time, or if either end is closed."""
        self._socket.settimeout(seconds)
        data = self._stream.read(int.from_bytes(self._stream.read(LENGTH_BYTES), "big"))
        if not data:
            raise ConnectionError("the other end of the channel is closed")
        return data

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
