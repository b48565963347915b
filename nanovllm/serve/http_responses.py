"""Defines HTTP responses. If a client disconnects, the work on its request is cancelled."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from anyio import CancelScope, current_time, fail_after
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from nanovllm.serve.answers import Answer, dump_json
from nanovllm.serve.errors import ApiError, api_error, body_error

Endpoint = Callable[[Request], Awaitable[Response]]
CONNECTION = "connection"  # the key of a request's BoundedProtocol (request_limits.py) in the request's state
# caches must not store a stream, and nginx must not buffer it
EVENT_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
HEARTBEAT = 10.0  # seconds without an event until a comment is sent, because many proxies end silent streams
COMMENT = b":\n\n"
WRITE_SECONDS = 30.0  # are added to the request's time limit, for clients that read slowly


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Make a JSON response. If `content` is bytes, it must already be JSON."""
    data = content if isinstance(content, bytes) else dump_json(content)
    return Response(data, status, headers, media_type="application/json")


def error_response(error: ApiError, path: str, **headers: str) -> Response:
    """Return the response for an error, with the given headers. The body has the format of the API at `path`."""
    return json_response(error.body(path), error.status, error.headers | headers)


def has_route(scope: Scope, method: str) -> bool:
    """Return True if the application has a route for the request's path and the given method."""
    return any(route.matches({**scope, "method": method})[0] is Match.FULL for route in scope["app"].routes)


def endpoint(route: APIRoute, seconds: float) -> Endpoint:
    """Return a function that answers the requests of a route. The requests must have a body.

    The function does not use FastAPI's layers, which would double the time per request. Work on a request stops when
    the client disconnects, or after `seconds` seconds.
    """
    kind: TypeAdapter[Any] = TypeAdapter(route.endpoint.__annotations__["body"])

    async def respond(request: Request) -> Response:
        try:
            try:
                body = kind.validate_python(json.loads(await request.body() or b"null"))
            except (ValueError, RecursionError) as error:
                raise body_error(error) from None
            with while_connected(request.scope["state"][CONNECTION], current_time() + seconds):
                return await route.endpoint(body, request)
        except Exception as error:
            return error_response(api_error(error), request.scope["path"])

    return respond


class EventStream(Response):
    """A response of server-sent events. If an error occurs after the first event, the error is sent as an event.

    The code that delivers outputs also writes them to the connection, so no task has to wake up. Until the client has
    read the previous piece of the stream, nothing is written, and new events are merged.
    """

    def __init__(self, answer: Answer, end: Callable[[], None], until: float):
        """end: a function to call when no more events are needed.
        until: the deadline of the events, on the event loop's clock.
        """
        self.status_code, self.background = 200, None
        self.init_headers({"content-type": "text/event-stream; charset=utf-8"} | EVENT_STREAM_HEADERS)
        self._answer, self._end, self._until = answer, end, until

    async def __call__(self, scope, receive, send) -> None:
        connection = self._connection = scope["state"][CONNECTION]
        loop = asyncio.get_running_loop()
        self._is_over: asyncio.Future[None] = loop.create_future()
        self._is_silent, self._timer = False, loop.call_later(HEARTBEAT, self._send_heartbeat)
        try:
            # after the client has gone, or after its time, nobody reads the remaining events
            with suppress(ApiError, TimeoutError), while_connected(connection, self._until + WRITE_SECONDS):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                if begin := self._answer.begin():
                    connection.write_chunk(begin)
                self._listen(self._write)
                self._write()
                try:
                    with fail_after(self._until - current_time()):
                        await self._is_over
                    end = await self._answer.end()
                except Exception as error:
                    end = self._answer.error_event(api_error(error))
                await send({"type": "http.response.body", "body": end})
        except asyncio.CancelledError as error:
            if connection.is_writable:  # otherwise, `send` would wait for the client
                await send({"type": "http.response.body", "body": self._answer.error_event(api_error(error))})
            raise
        finally:
            self._listen(None)
            self._timer.cancel()
            self._end()

    def _listen(self, write: Callable[[], None] | None) -> None:
        self._connection.on_writable = write
        for request in self._answer.requests:
            request.on_news = write

    def _write(self) -> None:
        """Write new events.

        This method is called when events arrive, and when the client has read the previous piece.
        """
        if not self._connection.is_writable or self._is_over.done():
            return
        try:
            if data := self._answer.take():
                self._is_silent = False
                self._connection.write_chunk(data)
            is_complete = True
            for request in self._answer.requests:
                if request.has_events:
                    self._is_over.get_loop().call_soon(self._write)
                    return
                is_complete = is_complete and request.final is not None
            if is_complete:
                self._is_over.set_result(None)
        except Exception as error:
            self._is_over.set_exception(error)

    def _send_heartbeat(self) -> None:
        """If no event was written since the last call, write a comment, which clients ignore."""
        if self._is_silent and self._connection.is_writable and not self._is_over.done():
            self._connection.write_chunk(COMMENT)
        self._is_silent = True
        self._timer = self._is_over.get_loop().call_later(HEARTBEAT, self._send_heartbeat)


@contextmanager
def while_connected(connection: Any, until: float) -> Iterator[None]:
    """Cancel the `with` block with an ApiError if the client disconnects, or with a TimeoutError at the deadline.

    connection: the BoundedProtocol of the request. The request's body must already have been read.
    until: the deadline, on the event loop's clock.
    """
    with CancelScope(deadline=until) as scope:
        connection.on_lost = scope.cancel
        if connection.is_lost:
            scope.cancel()
        try:
            yield
        finally:
            connection.on_lost = None
    if scope.cancelled_caught:
        # nobody reads the ApiError, because the client has gone
        raise ApiError(499, "the client has closed its connection") if connection.is_lost else TimeoutError
