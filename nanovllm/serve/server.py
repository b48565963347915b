"""The process that serves the application: its address, its signals, and its end."""

import asyncio
import gc
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from nanovllm.serve.api_server import create_app
from nanovllm.serve.engine_client import EngineClient
from nanovllm.serve.request_limits import BoundedProtocol
from nanovllm.serve.settings import ServerSettings

BACKLOG = 2048  # connections that the system accepts before the server does


def listening_socket(settings: ServerSettings, is_shared: bool = False) -> socket.socket:
    """Reserves the address before the model is loaded. OSError if it is in use, or not an address of this machine.

    is_shared: with other sockets that are shared; the system gives each connection to one of those that listen.
    """
    try:
        if settings.uds is not None:
            return _bound(socket.AF_UNIX, settings.uds, is_shared=False)
        family, *_, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        return _bound(family, address, is_shared)
    except OSError as error:
        name = f"host={settings.host!r}, port={settings.port}" if settings.uds is None else f"uds={settings.uds!r}"
        raise OSError(f"{name}: {error.strerror or error}") from error


def _bound(family: int, address: Any, is_shared: bool) -> socket.socket:
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(address)
    except OSError:
        reserved.close()
        raise
    return reserved


class Server(uvicorn.Server):
    """Starts the engine in its own event loop, and listens when that is done."""

    def __init__(self, config: uvicorn.Config, llm: EngineClient):
        super().__init__(config)
        self.llm = llm
        self.on_start: Callable[[], None] = lambda: None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        starting = asyncio.ensure_future(self.llm.start())
        while not starting.done():
            await asyncio.wait([starting], timeout=0.1)
            if self.should_exit:
                starting.cancel()
                return
        starting.result()
        self.on_start()
        await super().serve(sockets)


def make_server(llm: EngineClient, settings: ServerSettings, model: str) -> Server:
    """A server that ends when the engine fails."""
    config = uvicorn.Config(
        create_app(llm, settings, model, is_closing=lambda: server.should_exit),
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_level="info" if settings.access_log else "warning",
        access_log=settings.access_log,
        server_header=False,
        backlog=BACKLOG,
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
    on_start: Callable[[], None] | None = None,
) -> int:
    """Serve until SIGTERM, Ctrl-C or a failure of the engine; the exit status of the process.

    on_start: is called when the server listens; None: it prints where.
    """
    server = make_server(llm, settings, model)

    def end(*_) -> None:
        """Called before uvicorn has its handlers, and after it has drained, as it then raises the signal again."""
        server.should_exit = True

    handlers = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}

    def listen() -> None:
        listener.listen(BACKLOG)
        gc.collect()
        gc.freeze()  # a collection that goes through the tokenizer and all modules halts every stream for 0.4 s
        (on_start or partial(announce, settings, model, listener))()

    server.on_start = listen
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if settings.uds:
            Path(settings.uds).unlink(missing_ok=True)
    return 1 if llm.error is not None else 0


def announce(settings: ServerSettings, model: str, listener: socket.socket) -> None:
    """Print where the server listens."""
    address = f"unix:{settings.uds}"
    if settings.uds is None:
        host, port = listener.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(f"{model} is served at {address} (Ctrl-C ends it)", flush=True)
