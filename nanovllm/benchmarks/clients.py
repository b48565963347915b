"""Clients of an HTTP server that send one request after the other, as a program of its own.

They must not be what limits the server. So `http.py` runs this file, which imports nothing but the standard library, in
several processes, and gives each of them jobs: arguments of `drive`, pickled.
"""

import pickle
import re
import selectors
import socket
import sys
from collections.abc import Sequence
from time import perf_counter, process_time

NUM_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
MAX_SILENCE = 300.0  # seconds without any data from the server: vLLM may compile kernels meanwhile


class AnswerError(Exception):
    """An answer that is not the right one."""


class Client:
    """A connection, with one request at a time."""

    def __init__(self, port: int):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, number: int, request: bytes) -> None:
        self.number, self.times = number, list[float]()
        self._unread, self._body = b"", list[bytes]()
        self._status, self._num_missing = 0, -1  # bytes of the body; -1 if it comes in chunks
        self._begin = perf_counter()
        self.socket.sendall(request)

    def receive(self) -> bool:
        """Read what has arrived; whether that is all. `times` are those of data with new tokens, since the request."""
        data = self.socket.recv(65536)
        if b"[{" in data:  # as all choices are; the list in the event that has the usage is empty
            self.times.append(perf_counter() - self._begin)
        if not data:
            raise AnswerError("the server closed the connection within the answer")
        data = self._unread + data
        if not self._status:
            head, end, rest = data.partition(b"\r\n\r\n")
            if not end:
                self._unread = data
                return False
            self._read_head(head.lower())
            self._unread, data = b"", rest
        if self._num_missing < 0:
            return self._read_chunks(data)
        self._body.append(data)
        self._num_missing -= len(data)
        return self._num_missing <= 0

    def _read_head(self, head: bytes) -> None:
        found = re.match(rb"http/1\.1 (\d+)", head)
        length = re.search(rb"\r\ncontent-length: *(\d+)", head)
        if not found or not (length or b"\r\ntransfer-encoding: chunked" in head):
            raise AnswerError(f"this is no answer: {head[:200]!r}")
        self._status, self._num_missing = int(found[1]), int(length[1]) if length else -1

    def _read_chunks(self, data: bytes) -> bool:
        """Add all chunks that are complete to the body; whether the last one is among them."""
        while data:
            size_text, _, rest = data.partition(b"\r\n")
            try:
                size = int(size_text or b"0", 16)
            except ValueError:
                raise AnswerError(f"this is no chunk: {data[:200]!r}") from None
            if len(rest) < size + 2:
                break
            self._body.append(rest[:size])
            if not size:
                return True
            data = rest[size + 2 :]
        self._unread = data
        return False

    def check(self, num_tokens: int) -> None:
        """The status, the end, and the number of tokens by the answer's usage."""
        body = b"".join(self._body)
        counts = NUM_TOKENS.findall(body)
        if self._status != 200:
            raise AnswerError(f"status {self._status}: {body[:300]!r}")
        if not counts or int(counts[-1]) != num_tokens:
            count = int(counts[-1]) if counts else "no number of"
            raise AnswerError(f"{count} tokens instead of {num_tokens}; it ends with {body[-300:]!r}")
        if body.startswith(b"data:") and not body.endswith(b"data: [DONE]\n\n"):
            raise AnswerError(f"it ends with {body[-300:]!r} instead of [DONE]")


def drive(
    port: int, requests: Sequence[tuple[int, bytes]], num_clients: int, num_tokens: int
) -> tuple[float, float, float, list[list[float]]]:
    """Send the numbered requests: each client takes the next one when the last of its answers has ended.

    When it began and ended, the seconds of CPU time between, and the `Client.times` of each request. AnswerError for an
    answer without `num_tokens` tokens.
    """
    waiting = iter(requests)
    client = None
    try:
        clients = [Client(port) for _ in range(min(num_clients, len(requests)))]
        times = []
        with selectors.DefaultSelector() as selector:
            begin, cpu_begin = perf_counter(), process_time()
            for client in clients:
                client.send(*next(waiting))
                selector.register(client.socket, selectors.EVENT_READ, client)
            while selector.get_map():
                client = None
                if not (ready := selector.select(MAX_SILENCE)):
                    raise AnswerError(f"nothing has arrived for {MAX_SILENCE:g} seconds")
                for key, _ in ready:
                    client = key.data
                    if client.receive():
                        client.check(num_tokens)
                        times.append(client.times)
                        if request := next(waiting, None):
                            client.send(*request)
                        else:
                            selector.unregister(client.socket)
                            client.socket.close()
        return begin, perf_counter(), process_time() - cpu_begin, times
    except (AnswerError, OSError) as error:
        raise AnswerError(f"request {client.number}: {error}" if client else str(error)) from error


def main() -> None:
    """Do jobs from the standard input until it ends; the result of each, or its error, goes to the standard output."""
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result = drive(*job)
        except AnswerError as error:
            result = str(error)
        pickle.dump(result, sys.stdout.buffer)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
