"""Recognizes the parts of a message's content that are not text."""

from collections.abc import Mapping
from typing import Any

# the types of OpenAI's chat completions and responses, of transformers, and of vLLM
IMAGE_TYPES = "image_url", "input_image", "image", "image_pil"
IMAGE_PART = {"type": "image"}  # takes the place of an image in messages for the chat template
UNSUPPORTED = {
    **dict.fromkeys(("video", "video_url", "input_video"), "videos are not supported"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio is not supported"),
}


def is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES


def image_entries(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an image part, except the entry `type` and null entries.

    The nested form of OpenAI, `"image_url": {"url": ..., "detail": ...}`, becomes `"image_url": ..., "detail": ...`.
    """
    entries = {key: value for key, value in part.items() if key != "type"}
    if isinstance(nested := entries.get("image_url"), Mapping):
        entries["image_url"] = nested.get("url")
        entries |= {key: value for key, value in nested.items() if key != "url"}
    return {key: value for key, value in entries.items() if value is not None}


def problem_with(part: Any) -> str | None:
    """If a part is a video or audio, return why it can't be read. For other parts, return None."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    problem = UNSUPPORTED.get(kind) if isinstance(kind, str) else None
    return None if problem is None else f"content part of type {kind!r}: {problem}"
