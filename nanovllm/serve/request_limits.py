"""Applies limits to requests before they reach a route. Also applies limits to connections without a request."""

import asyncio
import hmac
import logging
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import httptools
from anyio import CancelScope, fail_after
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from nanovllm.serve.errors import ApiError, api_error
from nanovllm.serve.http_responses import CONNECTION, Endpoint, error_response, has_route
from nanovllm.serve.settings import ServerSettings
from nanovllm.serve.turns import CLIENT, LoopTurns

logger = logging.getLogger("nanovllm")
OPEN_PATHS = ("/", "/health", "/ping")  # need no key: the page asks the user for the key, and monitoring has none
KEY_VARIABLES = ("NANOVLLM_API_KEY", "VLLM_API_KEY")  # environment variables
HEADER_SECONDS = 10.0  # time for the headers of a request to arrive
MAX_HEADER_BYTES = 32 * 2**10
MAX_TEXT_BYTES = 2**21  # the most bytes of a body without images
MAX_COMMAS = 2**18  # the most commas of a longer body, because parsing many small values would delay other requests
LONG_HEADERS = f"the headers are longer than {MAX_HEADER_BYTES} bytes"
ADMITTED_PER_TURN = 4, 16  # minimum and maximum number of POST requests per iteration of the event loop
REQUEST_SECONDS = 0.0007  # approximate time to admit a request
UNREAD_SECONDS = 120.0  # a connection is reset after this time if its client does not read what was sent


class RequestLimits:
    """ASGI middleware that checks the host and the API key.

    The middleware reads the body of a request, and limits the body's size and the time to receive it. A route's
    function starts after the whole body has arrived, so it never waits for a client that sends slowly.
    """

    def __init__(
        self, app: Any, settings: ServerSettings, endpoints: Mapping[str, Endpoint], expects_images: bool = False
    ):
        """endpoints: for each path, the function that answers POST requests instead of `app`. Each iteration of the
            event loop admits only a few POST requests, so that a burst does not delay other work.
        expects_images: True if bodies may be long because of images. If True, long bodies with many commas are refused.
        """
        self._expects_images = expects_images
        self._endpoints, self._turns = endpoints, LoopTurns(*ADMITTED_PER_TURN, REQUEST_SECONDS)
        self.app, self.settings, self._root_path = app, settings, settings.root_path.rstrip("/")
        keys = [*(settings.api_key or ()), *(os.environ.get(name, "") for name in KEY_VARIABLES)]
        self._keys = [key.encode() for key in keys if key]
        self._hosts = settings.hosts()
        if not self._keys and not settings.is_local:
            problem = "every machine that reaches this address can use the server; --api-key sets a key"
            logger.warning("host=%r: %s", settings.host, problem)

    async def __call__(self, scope, receive, send) -> None:
        try:
            await self._respond(scope, receive, send)
        except asyncio.CancelledError as error:
            end = error_response(api_error(error), scope["path"], connection="close")
            with suppress(RuntimeError):  # the answer has begun
                await end(scope, receive, send)
            raise

    async def _respond(self, scope, receive, send) -> None:
        scope = scope | {"root_path": self._root_path}  # a proxy may or may not have removed it from the path
        headers, request = dict(scope["headers"]), Request(scope, self._bounded(receive))
        try:
            self._check_host([value for name, value in scope["headers"] if name == b"host"])
            path = scope["path"].removeprefix(self._root_path)
            if path not in OPEN_PATHS:
                keys = self._checked_keys(headers)
                CLIENT.set((*keys, *(scope.get("client") or ())[:1]))  # the address without the port
            has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
            content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            # with some other types, a web page of another origin could send a body without a CORS preflight
            is_foreign = scope["method"] == "POST" and has_body and content_type != b"application/json"
            if is_foreign and has_route(scope, "POST"):  # otherwise, the answer is 404 or 405
                raise ApiError(400, "the content-type of the body must be application/json")
            if scope["method"] == "POST" and not has_body:  # without a body, no preflight is needed either
                self._check_origin(headers)
            await self._read(request, headers.get(b"content-length", b""))
            answer: ASGIApp = self.app
            if scope["method"] == "POST" and path in self._endpoints:
                await self._turns.next()
                answer = await self._endpoints[path](request)
        except ApiError as error:
            # the rest of the body is not read, so the connection can't be used again
            answer = error_response(error, scope["path"], connection="close")
        if scope["method"] == "HEAD":
            await _answer_head(answer, scope, receive, send)
        else:
            await answer(scope, receive, send)

    def _check_host(self, hosts: list[bytes]) -> None:
        if len(hosts) > 1:  # a proxy may have checked another one of them
            raise ApiError(400, "there must be one Host header")
        name = b"".join(hosts).decode("latin-1").lower()
        if not name.endswith("]"):  # an IPv6 address without a port
            name = name.rpartition(":")[0] or name
        if self._hosts is not None and name not in self._hosts:
            raise ApiError(403, "the Host header is none of the names that this server answers to")

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        """Raise ApiError with status 403 if the request comes from a web page of another server."""
        origin, host = headers.get(b"origin", b"").lower(), headers.get(b"host", b"").lower()
        allowed = [name.lower().encode() for name in self.settings.allowed_origins or ()]
        is_own = not origin or origin.partition(b"://")[2] == host
        if not (is_own or origin in allowed or b"*" in allowed):
            raise ApiError(403, "the Origin header names a web page that may not call this server")

    def _checked_keys(self, headers: dict[bytes, bytes]) -> list[bytes]:
        """Return the valid API keys that the client has sent."""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        # clients of Anthropic's API send the key as x-api-key
        sent_keys = (bearer.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b""))
        # all keys are compared, in constant time, so that the time reveals nothing about them
        matches = [key for key in self._keys if any(hmac.compare_digest(value, key) for value in sent_keys)]
        if self._keys and not matches:
            message = "a valid API key is needed, as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise ApiError(401, message, code="invalid_api_key")
        return matches

    async def _read(self, request: Request, length: bytes) -> None:
        """Read the body into the cache of `request`. Raises ApiError if the body is too long or arrives too slowly."""
        self._check_length(int(length[:20]) if length.isdigit() else 0)
        try:
            with fail_after(self.settings.body_timeout):
                body = await request.body()
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.settings.body_timeout:g} seconds") from None
        except ClientDisconnect:
            raise ApiError(400, "the connection was closed before the end of the body") from None
        if self._expects_images and len(body) > MAX_TEXT_BYTES and body.count(b",") > MAX_COMMAS:
            problem = f"the body is longer than {MAX_TEXT_BYTES} bytes and has more than {MAX_COMMAS} commas"
            raise ApiError(413, problem, code="body_too_long")

    def _bounded(self, receive: Receive) -> Receive:
        """Wrap `receive`, so that it raises ApiError when the body becomes too long."""
        length = 0

        async def receive_some() -> Message:
            nonlocal length
            message = await receive()
            length += len(message.get("body", b""))
            self._check_length(length)
            return message

        return receive_some

    def _check_length(self, length: int) -> None:
        max_length = self.settings.max_body_bytes
        assert max_length is not None, "create_app sets it"
        if length > max_length:
            raise ApiError(413, f"the body is longer than {max_length} bytes", code="body_too_long")


async def _answer_head(answer: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a HEAD request with the headers that a GET request would get.

    The body is not produced, because it may be an endless stream.
    """
    with CancelScope() as body:

        async def send_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body"})
                body.cancel()

        await answer({**scope, "method": "GET"}, receive, send_headers)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol without pipelining. The size of the headers, and the time to send them, are limited.

    uvicorn closes idle connections, but its timer stops at the first byte of a request. After the first byte, the
    client has `HEADER_SECONDS` seconds to send all headers. Requests to upgrade the protocol are ignored, as HTTP
    permits. If a request is invalid or is refused before routing, the error has the API's usual format.
    """

    is_lost = False  # True when the client has closed the connection
    on_lost: Callable[[], object] | None = None  # called when the client closes the connection
    on_writable: Callable[[], None] | None = None  # called when the client has taken all data that was written
    _header_timer: asyncio.TimerHandle | None = None
    _num_header_bytes = 0
    url = b""  # the URL of the request that is being parsed

    @property
    def is_writable(self) -> bool:
        """True if the client has taken all written data."""
        return not self.flow.write_paused

    def write_chunk(self, data: bytes) -> None:
        """Write a part of a body as an HTTP/1.1 chunk."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        connection = transport.get_extra_info("socket")
        # only Linux has this option; on other systems, a connection whose client never reads stays open
        if hasattr(socket, "TCP_USER_TIMEOUT") and connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_SECONDS))
        self._begin_headers()

    def data_received(self, data: bytes) -> None:
        if self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._begin_headers()
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            cause = error.__context__  # the error that a callback has raised
            self._refuse(
                cause if isinstance(cause, ApiError) else ApiError(400, f"this is not valid HTTP/1.1: {error}")
            )
        if self._header_timer is not None:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self._refuse(ApiError(400, LONG_HEADERS))

    def _parse(self, data: bytes) -> None:
        """Feed data to the parser. If a request asks for an upgrade, it is parsed again without the upgrade header.

        The parser stops before the body of a request that asks for an upgrade, so a new parser reads the whole request
        again. The old parser would accept no further request after `connection: close` or an HTTP/1.0 request.
        """
        while data:
            try:
                self.parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as upgrade:
                if b"upgrade" not in dict(self.headers):  # such as the method CONNECT
                    raise httptools.HttpParserError("it asks for another protocol") from None
                version = self.parser.get_http_version().encode()
                lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
                lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
                data = b"\r\n".join([*lines, b"", data[upgrade.args[0] :]])
                self.parser = httptools.HttpRequestParser(self)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][CONNECTION] = self

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._end_headers()
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MAX_HEADER_BYTES:
            raise ApiError(400, LONG_HEADERS)
        if self.cycle is not None and not self.cycle.response_complete:  # pipelining would hide a lost connection
            raise ApiError(400, "a request arrived before the answer to the previous one: pipelining is not supported")
        if self.limit_concurrency and max(len(self.connections), len(self.tasks)) >= self.limit_concurrency:
            self._close_idle_connection()
        super().on_headers_complete()

    def _close_idle_connection(self) -> None:
        """Close the connection that has been idle longest."""
        all_protocols: set[Any] = self.connections  # type: ignore[assignment]
        idle = [protocol for protocol in all_protocols if protocol.timeout_keep_alive_task is not None]
        if not idle:
            raise ApiError(503, f"there are {self.limit_concurrency} connections, which is as many as may be open")
        oldest = min(idle, key=lambda protocol: protocol.timeout_keep_alive_task.when())
        all_protocols.discard(oldest)  # discard it now, because uvicorn counts the connections next
        oldest.transport.close()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_headers()
        super().connection_lost(exc)
        self.is_lost = True
        if self.on_lost is not None:
            self.on_lost()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.on_writable is not None:
            self.on_writable()

    def _refuse(self, error: ApiError) -> None:
        """Send an error without calling the application, and close the connection."""
        self._end_headers()
        if not self.transport.is_closing():
            response = error_response(error, self.url.decode("latin-1"), connection="close")
            headers = [b"%s: %s\r\n" % header for header in response.raw_headers]
            self.transport.write(b"".join([STATUS_LINE[error.status], *headers, b"\r\n", bytes(response.body)]))
            self.transport.close()

    def _begin_headers(self) -> None:
        self._num_header_bytes = 0
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _end_headers(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
