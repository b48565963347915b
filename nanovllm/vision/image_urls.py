"""Reads images from URLs. A URL may name a file or another host only if settings allow this."""

import base64
import binascii
import http.client
import ipaddress
import socket
import ssl
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from threading import Timer
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

from nanovllm.utils.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from nanovllm.config import Config

MAX_SECONDS = 5.0  # for finding the address, connecting and downloading together
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # a gateway may map these addresses to private IPv4 addresses
PORTS = {"http": 80, "https": 443}
ESCAPES = {"%2B": "+", "%2F": "/", "%3D": "=", "%0D": "", "%0A": "", "\r": "", "\n": ""}  # in base64, with line breaks


def fetch(url: str, config: "Config", max_bytes: int) -> bytes:
    """Return the bytes at a URL. Raises ValueError if the URL can't be read or must not be read."""
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        return _decode(url, max_bytes)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"image_url={url!r:.80}: is not a valid URL ({error})") from error
    if scheme == "file":
        return _read_local(url, parts, config.allowed_local_media_path, max_bytes)
    if scheme in PORTS:
        return _download(url, parts, config.allowed_media_domains, max_bytes)
    raise ValueError(f"image_url={url!r:.80}: must be a data:, file:, http: or https: URL")


def _decode(url: str, max_bytes: int) -> bytes:
    header, comma, data = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise ValueError(f"image_url={url!r:.80}: must contain base64, as data:image/png;base64,...")
    if len(data) > max_bytes // 3 * 4:
        raise ValueError(f"image_url={url!r:.80}: has more than {max_bytes} bytes")
    for escape, character in ESCAPES.items():  # `unquote` would take gigabytes if there are many
        data = data.replace(escape, character).replace(escape.lower(), character)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"image_url={url!r:.80}: is not valid base64 ({error})") from error


def _read_local(url: str, parts: SplitResult, allowed: str, max_bytes: int) -> bytes:
    if not allowed:
        raise ValueError(f"image_url={url!r:.80}: files are read only with the setting allowed_local_media_path")
    try:
        path = Path(unquote(parts.path)).resolve()  # follows links, which might leave the folder
    except RuntimeError as error:  # raised before Python 3.13
        raise ValueError(f"image_url={url!r:.80}: can't be read (links form a loop)") from error
    if parts.netloc not in ("", "localhost") or not path.is_relative_to(Path(allowed).resolve()):
        raise ValueError(f"image_url={url!r:.80}: is not below allowed_local_media_path={allowed!r}")
    return read_file(path, f"image_url={url!r:.80}", max_bytes, is_regular=True)


def read_file(path: Path, name: str, max_bytes: int, is_regular: bool = False) -> bytes:
    """Return the contents of a file. If `is_regular` is True, the path must be that of a regular file.

    If the file is missing or too large, raises a ValueError whose message begins with `name`.
    """
    try:
        if is_regular and not path.is_file():
            raise ValueError(f"{name}: is not a file")
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"{name}: can't be read ({error.strerror})") from error
    except ValueError as error:  # the path contains a character that no path may have
        raise ValueError(f"{name}: can't be read ({error})") from error
    if len(data) > max_bytes:
        raise ValueError(f"{name}: has more than {max_bytes} bytes")
    return data


def _download(url: str, parts: SplitResult, domains: Any, max_bytes: int) -> bytes:
    """Download a URL within MAX_SECONDS.

    The URL's domain must be allowed and have a public address. Redirects are refused.
    """
    host = (parts.hostname or "").lower()
    if host not in (domains or ()):
        raise ValueError(f"image_url={url!r:.80}: {host!r:.80} is not among allowed_media_domains={domains!r:.200}")
    target = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe="/?%:@!$&'()*+,;=~[]")
    until = monotonic() + MAX_SECONDS
    try:
        port = parts.port or PORTS[parts.scheme]
        address = _look_up(host, port, MAX_SECONDS)
        connection: Any = http.client.HTTPConnection(host, port)
        connection.default_port = PORTS[parts.scheme]  # the Host header leaves it out
        context = ssl.create_default_context() if parts.scheme == "https" else None
        sock: Any = socket.create_connection(address, max(0.001, until - monotonic()))
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        timer = Timer(max(0.0, until - monotonic()), _shut_down, (sock,))
        with sock:
            timer.start()
            try:
                if parts.scheme == "https":
                    sock.do_handshake()
                connection.sock = sock
                return _get(connection, target, max_bytes, until)
            finally:
                timer.cancel()
    except (OSError, http.client.HTTPException) as error:
        problem = f"can't be fetched ({type(error).__name__}: {error})"
        if monotonic() >= until or isinstance(error, TimeoutError):
            problem = f"takes more than {MAX_SECONDS:g} s"
        raise ValueError(f"image_url={url!r:.80}: {problem}") from error
    except ValueError as error:
        raise ValueError(f"image_url={url!r:.80}: {error}") from error


def _get(connection: http.client.HTTPConnection, target: str, max_bytes: int, until: float) -> bytes:
    connection.request("GET", target, headers={"Accept": "image/*"})
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"the answer has status {response.status}")
    data = bytearray()
    while len(data) <= max_bytes and monotonic() < until and (piece := response.read1(2**16)):
        data += piece
    if len(data) > max_bytes:
        raise ValueError(f"takes more than {max_bytes} bytes")
    if monotonic() >= until:  # the data was cut
        raise TimeoutError
    return bytes(data)


def _shut_down(sock: socket.socket) -> None:
    """Make another thread stop waiting for a socket.

    The thread may wait for the TLS handshake, the headers or the body.
    """
    with suppress(OSError):  # the socket is already closed
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # SSLSocket.shutdown would go on in plain text


def _look_up(host: str, port: int, seconds: float) -> tuple[str, int]:
    """Return the `_public_address` of `host`. Raises TimeoutError if the lookup takes longer than `seconds`.

    The thread of a slow lookup ends when the resolver gives up.
    """
    threads = DaemonThreads("nanovllm-resolver", 1)
    try:
        return threads.submit(_public_address, host, port).result(seconds)
    except futures.TimeoutError as error:  # not the builtin TimeoutError before Python 3.11
        raise TimeoutError from error
    finally:
        threads.close()


def _public_address(host: str, port: int) -> tuple[str, int]:
    """Return a public address of `host`.

    The caller must connect to this address instead of the host's name. Otherwise, the name would be looked up again,
    and the second lookup might return a private address.
    """
    addresses = [str(address[0]) for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address in addresses:
        ip: Any = ipaddress.ip_address(address)
        ip = getattr(ip, "ipv4_mapped", None) or ip
        if not ip.is_global or ip.is_multicast or ip in NAT64:
            raise ValueError(f"{host!r:.80} has the address {address}, which is not public")
    return addresses[0], port
