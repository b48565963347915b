"""Finds the image that a part of a conversation refers to, and the limits for scaling the image. Opens no image."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.requests.content_parts import image_entries
from nanovllm.utils.checks import check_choice, check_int, unknown_name
from nanovllm.vision.prompt_images import PromptImage
from nanovllm.vision.vision_config import VisionConfig

LOW_DETAIL = 512 * 512  # the most pixels of an image with OpenAI's `"detail": "low"`
SOURCES = {  # the entries with the image, by the type of the part
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "image": ("image", "path", "base64", "url"),
    "image_pil": ("image_pil",),
}
LIMITS = "detail", "min_pixels", "max_pixels"
SCHEMES = "data:", "file:", "http:", "https:"


class ImageSource(NamedTuple):
    """Describes an image that was not opened yet.

    image: an argument of `ImageReader.open`, or a PromptImage if the image was read earlier.
    is_trusted: an argument of `ImageReader.open`.
    bounds: the least and the greatest number of pixels that the scaled image may have.
    """

    image: Any
    is_trusted: bool
    bounds: tuple[int, int]

    @property
    def key(self) -> tuple:
        """The keys of two sources are equal only if both sources become the same PromptImage."""
        is_value = isinstance(self.image, (str, bytes, Path))
        return self.image if is_value else id(self.image), self.is_trusted, self.bounds


def part_source(part: Mapping[str, Any], vision: VisionConfig) -> ImageSource:
    """Return the image in an image part of a message.

    Raises TypeError or ValueError for an invalid part or unknown entry. A string can be a path only in the entries
    `image` and `path`. HTTP requests can't read files of the server, because their image parts contain only `image_url`
    (see serve/chat.py).
    """
    entries, names = image_entries(part), SOURCES[part["type"]]
    for name in entries.keys() - {*names, *LIMITS}:
        raise unknown_name("entry of an image part", name, (*names, *LIMITS))
    if len(found := entries.keys() & {*names}) != 1:
        has = " and ".join(sorted(found)) or "no image"
        raise ValueError(f"messages: an image part has {has}: must have one of {', '.join(names)}")
    (name,) = found
    image, is_trusted = entries[name], False
    if isinstance(image, PromptImage):
        return ImageSource(image, False, (0, 0))
    if name in ("path", "base64", "url") and not isinstance(image, (str, Path) if name == "path" else str):
        raise TypeError(f"messages: {name}={image!r:.80}: must be a string")
    if name == "base64" and not image.startswith("data:"):
        image = f"data:image/png;base64,{image}"  # the reader ignores the format that the URL claims
    is_text = isinstance(image, str) and not image.lower().startswith(SCHEMES)
    if name == "path" or (name == "image" and (is_text or isinstance(image, Path))):
        image, is_trusted = Path(image), True
    return ImageSource(image, is_trusted, pixel_bounds(entries, vision, "messages"))


def pixel_bounds(limits: Mapping[str, Any], vision: VisionConfig, field: str) -> tuple[int, int]:
    """Return the least and the greatest number of pixels that an image with these LIMITS may have after scaling.

    For a value that the engine does not allow, raises a TypeError or ValueError that names the request's field.
    """
    detail = check_choice(f"{field}: detail", limits.get("detail", "auto"), ("auto", "low", "high"))
    high = check_int(f"{field}: max_pixels", limits.get("max_pixels", vision.max_pixels), 1, vision.max_pixels)
    low = check_int(f"{field}: min_pixels", limits.get("min_pixels", min(vision.min_pixels, high)), 1, high)
    if detail == "low":
        high = min(high, LOW_DETAIL)
    return min(low, high), high
