"""What a request must pass before any route sees it, and what a connection must pass before there is a request."""

import asyncio
import hmac
import logging
import os
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nanovllm.serve.errors import ApiError
from nanovllm.serve.responses import error_response
from nanovllm.serve.settings import ServerSettings

logger = logging.getLogger("nanovllm")
OPEN_PATHS = ("/", "/health")  # need no key: the page asks for one, and monitors of the server have none
HEADER_SECONDS = 10.0  # within which the headers of a request must have arrived
MAX_HEADER_BYTES = 32 * 2**10
UNREAD_SECONDS = 120.0  # after which a connection is reset whose client takes nothing of what was sent


class Guard:
    """ASGI middleware: checks the host and the key, and reads the whole body, which is bounded in size and in time.

    Routes therefore never wait for a client that sends slowly, and `receive` gives them the body at once.
    """

    def __init__(self, app: Any, settings: ServerSettings):
        self.app, self.settings = app, settings
        keys = [*(settings.api_key or ()), os.environ.get("NANOVLLM_API_KEY", "")]
        self._keys = [key.encode() for key in keys if key]
        self._hosts = settings.hosts()
        if not self._keys and not settings.is_local:
            logger.warning(
                "host=%r: every machine that reaches this address can use the server; --api-key sets a key",
                settings.host,
            )

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http":
            try:
                headers = dict(scope["headers"])
                self._check_host(headers.get(b"host", b""))
                if scope["path"] not in OPEN_PATHS:
                    self._check_key(headers.get(b"authorization", b""))
                if scope["method"] == "POST":
                    self._check_type(headers.get(b"content-type", b""))
                receive = await self._with_body(headers, receive)
            except ApiError as error:
                # the rest of a body is not read, so the connection can't be used again
                await error_response(error, close=True)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check_host(self, host: bytes) -> None:
        name = host.decode("latin-1").lower()
        if not name.endswith("]"):  # an IPv6 address without a port
            name = name.rpartition(":")[0] or name
        if self._hosts is not None and name not in self._hosts:
            raise ApiError(403, "the Host header is none of the names that this server answers to")

    def _check_key(self, authorization: bytes) -> None:
        scheme, _, given = authorization.partition(b" ")
        # all keys are compared, so that the time does not tell which one is close
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        if self._keys and not (scheme.lower() == b"bearer" and any(matches)):
            raise ApiError(401, "a valid API key is needed, as `Authorization: Bearer KEY`", code="invalid_api_key")

    @staticmethod
    def _check_type(content_type: bytes) -> None:
        """A web page of another origin can send any other type without asking first (a CORS preflight)."""
        if content_type.partition(b";")[0].strip().lower() != b"application/json":
            raise ApiError(400, "the content-type of the body must be application/json")

    async def _with_body(self, headers: dict[bytes, bytes], receive):
        """A `receive` that gives the whole body first. ApiError with 413 or 408 if it is too long or too slow."""
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > self.settings.max_body_bytes:
            raise self._too_long()
        try:
            body = await asyncio.wait_for(self._read(receive), self.settings.body_timeout)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.settings.body_timeout:g} seconds") from None
        first = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay():
            return first.pop() if first else await receive()

        return replay

    async def _read(self, receive) -> bytes:
        pieces, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the connection was closed within the body")
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > self.settings.max_body_bytes:
                raise self._too_long()
            if not message.get("more_body", False):
                return b"".join(pieces)

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self.settings.max_body_bytes} bytes", code="body_too_long")


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1, with bounds on the size of headers and on the time that they take. No pipelining.

    Between requests uvicorn closes an idle connection after some seconds, but any byte ends that time; so does the
    first byte of a connection. From then on it is `HEADER_SECONDS`.
    """

    _header_timer: asyncio.TimerHandle | None = None
    _num_header_bytes = 0

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; else closing waits for such a client without an end
            milliseconds = int(1000 * UNREAD_SECONDS)
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._begin_headers()

    def data_received(self, data: bytes) -> None:
        if self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._begin_headers()
        super().data_received(data)
        if self._header_timer is not None:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self.transport.close()

    def on_headers_complete(self) -> None:
        self._end_headers()
        # the parser answers 400 to an error in here, and closes the connection
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MAX_HEADER_BYTES:
            raise ValueError("the headers are too long")
        if self.cycle is not None and not self.cycle.response_complete:
            raise ValueError("a request before the answer to the previous one")  # which would hide its disconnection
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_headers()
        super().connection_lost(exc)

    def _begin_headers(self) -> None:
        self._num_header_bytes = 0
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _end_headers(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
