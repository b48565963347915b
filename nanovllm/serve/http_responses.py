"""Responses, and work on behalf of a client that ends when the client goes away."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from nanovllm.serve.answers import Answer, dump_json
from nanovllm.serve.errors import ApiError, ClientGoneError, RequestTimeoutError, api_error

WRITE_SECONDS = 30.0  # in addition to the time of the request: for a client that reads slowly


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """content: bytes are JSON already."""
    data = content if isinstance(content, bytes) else dump_json(content)
    return Response(data, status, headers, media_type="application/json")


class ErrorResponse(Response):
    """An error, in the form of the API whose path was called."""

    def __init__(self, error: ApiError, **headers: str):
        """headers: in addition to those of the error."""
        super().__init__(status_code=error.status)
        self._error, self._error_headers = error, error.headers | headers

    async def __call__(self, scope, receive, send) -> None:
        body = self._error.body(scope["path"])
        await json_response(body, self.status_code, self._error_headers)(scope, receive, send)


class EventStream(Response):
    """Server-sent events. An error after the first event is one more event."""

    def __init__(self, answer: Answer, end: Callable[[], None], seconds: float):
        """end: called when no more events are needed. seconds: after which the events end by themselves."""
        self.status_code, self.background = 200, None
        self.init_headers({"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        self._answer, self._end, self._seconds = answer, end, seconds

    async def __call__(self, scope, receive, send) -> None:
        try:
            await while_connected(receive, self._send_all(send), self._seconds + WRITE_SECONDS)
        except (ClientGoneError, RequestTimeoutError):
            pass  # nothing reads the rest
        finally:
            self._end()

    async def _send_all(self, send) -> None:
        async with aclosing(self._answer.chunks()) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                body = self._answer.error_event(api_error(error))
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
