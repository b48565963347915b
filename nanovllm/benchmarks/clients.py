"""A program that runs HTTP clients.

The clients must not be the bottleneck, so `http.py` runs several processes, which import only the standard library.
Each process receives pickled arguments for the function `drive` on standard input.
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
    """Raised if an answer is wrong or incomplete."""


class Client:
    def __init__(self, port: int):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, number: int, request: bytes) -> None:
        self.number, self.times = number, list[float]()
        self._unread, self._body = b"", list[bytes]()
        self._status, self._num_missing = 0, -1  # missing bytes of the body; -1 with chunked encoding
        self._begin = perf_counter()
        self.socket.sendall(request)

    def receive(self) -> bool:
        """Receive more data of an answer, and return whether the answer is complete.

        If the data contains new tokens, `times` gets a new element: the seconds since the request was sent.
        """
        data = self.socket.recv(65536)
        if b"[{" in data:  # a list of choices; in the event with the usage, this list is empty
            self.times.append(perf_counter() - self._begin)
        if not data:
            raise AnswerError("the server closed the connection before the end of the answer")
        data = self._unread + data
        if not self._status:
            head, end, body = data.partition(b"\r\n\r\n")
            if not end:
                self._unread = data
                return False
            self._read_head(head.lower())
            self._unread, data = b"", body
        if self._num_missing < 0:
            return self._read_chunks(data)
        self._body.append(data)
        self._num_missing -= len(data)
        return self._num_missing <= 0

    def _read_head(self, head: bytes) -> None:
        match = re.match(rb"http/1\.1 (\d+)", head)
        length = re.search(rb"\r\ncontent-length: *(\d+)", head)
        if not match or not (length or b"\r\ntransfer-encoding: chunked" in head):
            raise AnswerError(f"not a valid answer: {head[:200]!r}")
        self._status, self._num_missing = int(match[1]), int(length[1]) if length else -1

    def _read_chunks(self, data: bytes) -> bool:
        """Add all complete chunks to the answer's body, and return whether the body is complete."""
        while data:
            size_text, _, chunk = data.partition(b"\r\n")
            try:
                size = int(size_text or b"0", 16)
            except ValueError:
                raise AnswerError(f"not a valid chunk: {data[:200]!r}") from None
            if len(chunk) < size + 2:
                break
            self._body.append(chunk[:size])
            if not size:
                return True
            data = chunk[size + 2 :]
        self._unread = data
        return False

    def check(self, num_tokens: int) -> None:
        """Raise AnswerError if the status, the last bytes or the token count of the answer is wrong."""
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
    """Send the numbered requests. Each client sends its next request when its previous request is answered.

    Returns the start time, end time and CPU time of this process in seconds, and the `Client.times` of each request.
    Raises AnswerError if the number of tokens in any answer is not `num_tokens`.
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
    """Run the jobs that arrive on standard input. Write each result or error message to standard output."""
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
