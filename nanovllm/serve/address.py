"""Reserves the address at which the server listens.

Importing this module takes only 20 ms, because no HTTP library is needed.
"""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from nanovllm.serve.settings import ServerSettings


def listening_socket(settings: ServerSettings, is_of_front: bool = False) -> socket.socket:
    """Reserve the server's address before the model loads.

    Raises OSError if the address is in use or does not belong to this machine.

    is_of_front: True if other fronts (HTTP processes) of this server may also use the address. If several fronts use
        the address, the operating system assigns each connection to one of them.
    """
    family, address, is_unix = socket.AF_UNIX, cast(Any, settings.uds), settings.uds is not None
    try:
        if not is_unix:
            family, *_, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        is_shared = settings.num_fronts > 1 and not is_unix
        if is_shared and not is_of_front:  # SO_REUSEPORT below would also let another server share the address
            _bound_socket(family, address, is_shared=False).close()
        return _bound_socket(family, address, is_shared)
    except OSError as error:
        name = f"uds={settings.uds!r}" if is_unix else f"host={settings.host!r}, port={settings.port}"
        advice = "; --port sets another one" if error.errno == errno.EADDRINUSE and not is_unix else ""
        raise OSError(f"{name}: {error.strerror or error}{advice}") from error


def _bound_socket(family: int, address: Any, is_shared: bool) -> socket.socket:
    with ExitStack() as unused:
        bound = unused.enter_context(socket.socket(family, socket.SOCK_STREAM))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            if not hasattr(socket, "SO_REUSEPORT"):
                raise OSError("this system can't share an address among processes: api_server_count must be at most 1")
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
        unused.pop_all()
    return bound


@contextmanager
def reserved_address(settings: ServerSettings) -> Iterator[socket.socket]:
    """Keep a `listening_socket` open during a `with` block.

    At the end of the block, remove a Unix domain socket's file.
    """
    with listening_socket(settings) as listener:
        try:
            yield listener
        finally:
            if settings.uds:
                Path(settings.uds).unlink(missing_ok=True)


def announce(settings: ServerSettings, model: str, listener: socket.socket) -> None:
    address = f"unix:{settings.uds}"
    if settings.uds is None:
        host, port = listener.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(f"{model} is served at {address} (Ctrl-C ends it)", flush=True)
