"""Reads the images that URLs name. Files and other hosts are read only if settings allow them."""

import base64
import binascii
import http.client
import ipaddress
import socket
import ssl
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from nanovllm.config import Config

MAX_SECONDS = 5.0  # of a download
PORTS = {"http": 80, "https": 443}
ESCAPES = {"%2B": "+", "%2F": "/", "%3D": "="}  # of the characters of base64


def fetch(url: str, config: "Config", max_bytes: int) -> bytes:
    """Return the bytes that a URL names. Raises ValueError if they can't be read, or may not be read."""
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        return _decode(url, max_bytes)
    if scheme == "file":
        return _read_local(url, config.allowed_local_media_path, max_bytes)
    if scheme in PORTS:
        return _download(url, config.allowed_media_domains, max_bytes)
    raise ValueError(f"image_url={url!r:.80}: must be a data:, file:, http: or https: URL")


def _decode(url: str, max_bytes: int) -> bytes:
    header, comma, data = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise ValueError(f"image_url={url!r:.80}: must contain base64, as data:image/png;base64,...")
    if len(data) > max_bytes // 3 * 4:
        raise ValueError(f"image_url={url!r:.80}: has more than {max_bytes} bytes")
    for escape, character in ESCAPES.items():  # `unquote` would take gigabytes if there are many
        data = data.replace(escape, character).replace(escape.lower(), character)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"image_url={url!r:.80}: is not valid base64 ({error})") from error


def _read_local(url: str, allowed: str, max_bytes: int) -> bytes:
    if not allowed:
        raise ValueError(f"image_url={url!r:.80}: files are read only with the setting allowed_local_media_path")
    parts = urlsplit(url)
    path = Path(unquote(parts.path)).resolve()  # follows links, which might leave the folder
    if parts.netloc not in ("", "localhost") or not path.is_relative_to(Path(allowed).resolve()):
        raise ValueError(f"image_url={url!r:.80}: is not below allowed_local_media_path={allowed!r}")
    try:
        if not path.is_file():
            raise ValueError(f"image_url={url!r:.80}: is no file")
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"image_url={url!r:.80}: can't be read ({error.strerror})") from error
    if len(data) > max_bytes:
        raise ValueError(f"image_url={url!r:.80}: has more than {max_bytes} bytes")
    return data


def _download(url: str, domains: Any, max_bytes: int) -> bytes:
    """Get a URL within MAX_SECONDS from an allowed domain with a public address. Redirects are refused."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    if host not in (domains or ()):
        raise ValueError(f"image_url={url!r:.80}: {host!r:.80} is not among allowed_media_domains={domains!r:.200}")
    until = monotonic() + MAX_SECONDS
    try:
        port = parts.port or PORTS[parts.scheme]
        address = _public_address(host, port)
        connection: Any = http.client.HTTPConnection(host, port)
        connection.sock = socket.create_connection(address, MAX_SECONDS)
        if parts.scheme == "https":
            connection.sock = ssl.create_default_context().wrap_socket(connection.sock, server_hostname=host)
        with connection.sock:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", target, headers={"Accept": "image/*"})
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(f"image_url={url!r:.80}: the answer has status {response.status}")
            data = bytearray()
            while piece := response.read1(2**16):
                data += piece
                if len(data) > max_bytes or monotonic() > until:
                    bound = f"{max_bytes} bytes" if len(data) > max_bytes else f"{MAX_SECONDS:g} s"
                    raise ValueError(f"image_url={url!r:.80}: takes more than {bound}")
            return bytes(data)
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"image_url={url!r:.80}: can't be fetched ({type(error).__name__}: {error})") from error


def _public_address(host: str, port: int) -> tuple[str, int]:
    """Return the address to connect to, so that the name is not looked up again, with another result."""
    for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if not ipaddress.ip_address(address[0]).is_global:
            raise ValueError(f"image_url: {host!r:.80} has the address {address[0]}, which is not public")
    return str(address[0]), port
