"""Defines two HTTP routes: one for the page, and one for frames as server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import HTMLResponse, StreamingResponse

from nanovllm.serve.http_responses import COMMENT, EVENT_STREAM_HEADERS, HEARTBEAT
from nanovllm.serve.page import content_security_policy, render_page

TICK = 0.05  # seconds between two events of a stream
QUIET = 0.3  # after this many seconds without a frame, the state is read again
MAX_STREAMS = 16  # the most open streams; each stream asks for frames in every tick
Call = Callable[..., Awaitable[Any]]


def view_router(
    call: Call, authorize: Callable[..., Any] | None = None, is_closing: Callable[[], bool] = lambda: False
) -> APIRouter:
    """Make the routes `GET /` (the page) and `GET /view/events` (its frames).

    call: `EngineClient.call`.
    authorize: a FastAPI dependency of `/view/events`.
    is_closing: a function that ends the streams by returning True.
    """
    router = APIRouter()
    watchers = Watchers(call)
    headers = {
        "Content-Security-Policy": f"{content_security_policy(is_live=True)}; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    @router.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(render_page(), headers=headers)

    @router.get("/view/events", include_in_schema=False, dependencies=[Depends(authorize)] if authorize else [])
    async def events(request: Request) -> StreamingResponse:
        if watchers.are_full:
            raise HTTPException(503, f"{MAX_STREAMS} pages show the engine already: close one of them")
        stream = watchers.events(request.is_disconnected, is_closing)
        return StreamingResponse(stream, media_type="text/event-stream", headers=EVENT_STREAM_HEADERS)

    return router


class Watchers:
    """The open streams of frames. The streams share one recorder, which runs while any stream is open.

    Each stream remembers the last frame that it sent. Nothing is queued for a slow stream. If a stream is too slow, it
    skips frames, and continues with a key frame.
    """

    def __init__(self, call: Call):
        self._call = call
        self._num_watching = 0
        self._lock = asyncio.Lock()  # held while the recording starts or stops
        self._next_refresh = 0.0

    @property
    def are_full(self) -> bool:
        return self._num_watching >= MAX_STREAMS

    async def events(self, is_disconnected: Callable[[], Any], is_closing: Callable[[], bool]) -> AsyncIterator[str]:
        if self.are_full:  # several clients have asked for the last stream at the same moment
            return
        self._num_watching += 1
        with suppress(RuntimeError):  # the engine has ended
            try:
                await self._start()
                last, sent_at, is_recording = 0, monotonic(), True
                while is_recording and not is_closing() and not await is_disconnected():
                    text, last, is_recording, is_idle = await self._call("frames", last)
                    if text:
                        sent_at = monotonic()
                        yield f"data: {text}\n\n"
                    elif monotonic() - sent_at > HEARTBEAT:
                        sent_at = monotonic()
                        yield COMMENT.decode()
                    elif monotonic() - sent_at > QUIET and not is_idle:
                        await self._refresh()
                    # all streams wake up at the same time, and get the same text
                    await asyncio.sleep(TICK - monotonic() % TICK)
            finally:
                await asyncio.shield(self._leave())

    async def _start(self) -> None:
        async with self._lock:
            await self._call("start_recording")

    async def _leave(self) -> None:
        self._num_watching -= 1
        async with self._lock:
            if not self._num_watching:
                await self._call("stop_recording")

    async def _refresh(self) -> None:
        """Read the engine's state again, because requests may have been aborted without a step."""
        if monotonic() >= self._next_refresh:
            self._next_refresh = monotonic() + QUIET
            await self._call("refresh_recording")
