"""Responses, and work on behalf of a client that ends when the client goes away."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from nanovllm.serve.answers import dump_json, server_sent_event
from nanovllm.serve.errors import ApiError, RequestTimeoutError, api_error

WRITE_SECONDS = 30.0  # in addition to the time of the request: for a client that reads slowly


class ClientGoneError(Exception):
    """The client has closed its connection."""


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """content: bytes are JSON already."""
    data = content if isinstance(content, bytes) else dump_json(content)
    return Response(data, status, headers, media_type="application/json")


def error_response(error: ApiError, close: bool = False) -> Response:
    """`close`: the connection can't be used again."""
    return json_response(error.body(), error.status, error.headers | ({"connection": "close"} if close else {}))


class EventStream(Response):
    """Server-sent events. An error after the first event is one more event, with the body of an error."""

    def __init__(self, events: AsyncGenerator[bytes, None], end: Callable[[], None], seconds: float):
        """end: called when no more events are needed. seconds: after which the events end by themselves."""
        self.status_code, self.background = 200, None
        self.init_headers({"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        self._events, self._end, self._seconds = events, end, seconds

    async def __call__(self, scope, receive, send) -> None:
        try:
            await while_connected(receive, self._send_all(send), self._seconds + WRITE_SECONDS)
        except (ClientGoneError, RequestTimeoutError):
            pass  # nothing reads the rest
        finally:
            self._end()

    async def _send_all(self, send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                body = server_sent_event(api_error(error).body())
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive, work: Coroutine, seconds: float | None = None) -> Any:
    """The result of `work`. It is cancelled if the client goes away (ClientGoneError), or after `seconds`
    (RequestTimeoutError).

    receive: of ASGI, after the body was read.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait((task, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError if gone.done() else RequestTimeoutError
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnection(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
