"""Renders the page. The page shows a live engine or a recording, and loads nothing from other addresses."""

import json
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src data:; {connect}"
    "base-uri 'none'; form-action 'none'"
)
RECORDING = '<script id="recording" type="application/json">', "</script>"
META = '<meta name="referrer" content="no-referrer">'


@cache
def source() -> str:
    return (files("nanovllm.serve") / "page.html").read_text("utf-8")


def content_security_policy(is_live: bool) -> str:
    """Return a content security policy that identifies the page's script and style by hashes, and allows no others.

    If `is_live`, the policy also allows requests to the page's server.
    """
    hashes = {}
    for tag in ("script", "style"):
        _, text = source().split(f"<{tag}>")
        text, *_ = text.split(f"</{tag}>")
        hashes[tag] = f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    return POLICY.format(**hashes, connect="connect-src 'self'; " if is_live else "")


def render_page(frames: list[dict[str, Any]] | None = None) -> str:
    """Return the page. The page shows the recorded `frames`, or the server's live engine if `frames` is None."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{content_security_policy(frames is None)}">'
    page = source().replace(META, f"{META}\n{policy}")
    if frames is not None:  # in a script element, only "<" can end the element
        recording = json.dumps(frames, separators=(",", ":")).replace("<", "\\u003c")
        page = page.replace("".join(RECORDING), recording.join(RECORDING))
    return page
