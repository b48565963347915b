"""Runs the application in this process, handles signals, and shuts the application down."""

import asyncio
import gc
import logging
import resource
import signal
import socket
from collections.abc import Callable
from math import inf
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from nanovllm.serve.api_server import create_app
from nanovllm.serve.engine_client import EngineClient
from nanovllm.serve.request_limits import BoundedProtocol
from nanovllm.serve.settings import ServerSettings

logger = logging.getLogger("nanovllm")
BACKLOG = 2048  # connections that the operating system accepts before the server accepts them
OTHER_FILES = 256  # open files in addition to connections, for devices, libraries, ranks and grammars


def allow_connections(number: int) -> None:
    limits, needed = resource.getrlimit(resource.RLIMIT_NOFILE), number + OTHER_FILES
    granted, maximum = [inf if limit == resource.RLIM_INFINITY else limit for limit in limits]
    if granted < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(min(needed, maximum)), limits[1]))
    if maximum < needed:
        problem = "this system allows a process %d open files (ulimit -Hn), so further connections will wait"
        logger.warning(f"max_connections=%d: {problem}", number, maximum)


class Server(uvicorn.Server):
    """A uvicorn server. Before the server listens, it starts the engine in the server's event loop."""

    def __init__(self, config: uvicorn.Config, llm: EngineClient):
        super().__init__(config)
        self.llm = llm
        self.on_start: Callable[[], None] = lambda: None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        starting = asyncio.ensure_future(self._start_engine())
        while not starting.done():
            await asyncio.wait([starting], timeout=0.1)
            if self.should_exit:
                starting.cancel()
                return
        starting.result()
        self.on_start()
        await super().serve(sockets)

    async def _start_engine(self) -> None:
        await self.llm.start()
        await cast(FastAPI, self.config.app).state.adapters.read()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if (number := len(self.server_state.tasks)) and not self.force_exit:
            text = "running requests: %d; the server waits up to %s s for them (drain_seconds), or until Ctrl-C again"
            logger.warning(text, number, self.config.timeout_graceful_shutdown)
        logging.getLogger("uvicorn.error").disabled = True  # it would log a traceback for each request that is cut off
        await super().shutdown(sockets)
        if number := len(self.server_state.tasks):
            logger.warning("running requests that end now, with an error: %d", number)


def make_server(llm: EngineClient, settings: ServerSettings, model: str) -> Server:
    """Make a server that ends when the engine fails."""
    config = uvicorn.Config(
        create_app(llm, settings, model, is_closing=lambda: server.should_exit),
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_level="info" if settings.access_log else "warning",
        access_log=settings.access_log,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=cast(Any, settings.timeout_keep_alive),  # uvicorn's annotation is int, but a float works
        limit_concurrency=settings.max_connections,
        timeout_graceful_shutdown=settings.drain_seconds,
    )
    server = Server(config, llm)
    llm.on_failure.append(lambda error: setattr(server, "should_exit", True))
    return server


def run_server(
    llm: EngineClient,
    settings: ServerSettings,
    model: str,
    listener: socket.socket,
    on_start: Callable[[], object] = lambda: None,
) -> int:
    """Serve until SIGTERM, Ctrl-C or an engine failure, and return the exit status of the process.

    on_start: a function to call once the server listens.
    """
    allow_connections(settings.max_connections)
    server = make_server(llm, settings, model)
    # uvicorn installs its own handlers later, and raises the signal again after all requests have drained
    handlers = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}

    def listen() -> None:
        listener.listen(BACKLOG)
        gc.collect()
        gc.freeze()  # later full collections would also scan these objects, and halt every stream for 0.4 s
        on_start()

    server.on_start = listen
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 1 if llm.error is not None else 0
