"""Reads images, and scales them for the vision tower, as Qwen2VLImageProcessor of transformers does.

Pillow is an optional dependency. This file is therefore imported only when an engine gets its first prompt with images.
"""

import hashlib
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

try:
    from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
except ImportError as error:
    raise ImportError("images need Pillow: pip install 'nano-vllm[images]'") from error
try:  # the class of transformers 5 that needs no torchvision
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
except ImportError:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from nanovllm.vision.image_urls import fetch, read_file
from nanovllm.vision.prompt_images import PromptImage

if TYPE_CHECKING:
    from nanovllm.config import Config

# Pillow reads more formats, some of them with other programs
WEB_FORMATS = "PNG", "JPEG", "WEBP", "GIF"
FORMATS = *WEB_FORMATS, "BMP", "PPM", "TIFF"
MAX_BYTES = 2**26  # of a file
MAX_PIXELS = 2**26  # before scaling; a file of a few kilobytes may claim to have more
# larger images are decoded one after another. Pillow's `draft` would save memory too, but it changes pixels
LARGE_PIXELS, LARGE = 2**24, Lock()
LOCKS = [Lock() for _ in range(61)]  # two threads must not decode a PIL image at the same time
KINDS = "a PIL image, an array [height, width, 3] of uint8, the bytes or the path of a file, or a data: URL"


class ImageReader:
    """Makes a PromptImage from each image. Any thread may call the methods of this class."""

    def __init__(self, config: "Config"):
        self.config, self.vision = config, config.model_config.vision

    def read(self, source: Any, is_trusted: bool = True, bounds: tuple[int, int] | None = None) -> PromptImage:
        """Read an image from one of KINDS.

        If `is_trusted` is false, the format must be one of WEB_FORMATS, and a string must be a URL. A URL may name a
        file or another host only if settings allow this. Raises ValueError if the image is broken, too large or too
        narrow. Raises TypeError for a source that is none of KINDS. `scale` describes `bounds`.
        """
        return self.scale(self.open(source, is_trusted), bounds)

    def scale(self, opened: Any, bounds: tuple[int, int] | None = None) -> PromptImage:
        """Decode a PIL image, and scale it. Raises the same ValueErrors as `read`.

        bounds: the least and the greatest number of pixels after scaling. The defaults are the bounds in the
            VisionConfig.
        """
        if opened.width * opened.height <= LARGE_PIXELS:
            return self._scale(opened, bounds)
        # glibc keeps the memory that a thread has freed until the thread ends
        with LARGE, ThreadPoolExecutor(1, thread_name_prefix="nanovllm-large-image") as thread:
            return thread.submit(self._scale, opened, bounds).result()

    def _scale(self, opened: Any, bounds: tuple[int, int] | None) -> PromptImage:
        image, vision = self._in_rgb(opened), self.vision
        square = vision.patch_size * vision.merge_size
        sizes = image.height, image.width, square, *(bounds or (vision.min_pixels, vision.max_pixels))
        try:
            height, width = smart_resize(*sizes)
        except ValueError as error:  # the sides differ too much
            raise ValueError(f"image: has {image.width} x {image.height} pixels: {error}") from error
        if image.size != (width, height):  # otherwise, only a copy
            image = image.resize((width, height), vision.resample)
        pixels, shape = image.tobytes(), (height // square, width // square)
        digest = hashlib.sha256(b"%d %d " % shape)  # processors have instructions for SHA-256
        digest.update(pixels)
        return PromptImage(pixels, *shape, digest.digest()[:16])

    def open(self, source: Any, is_trusted: bool = True) -> Any:
        """Return a PIL image that is not decoded yet. Arguments and errors are the same as for `read`."""
        if isinstance(source, str) and (source[:5].lower() == "data:" or not is_trusted):
            source = fetch(source, self.config, MAX_BYTES)
        elif isinstance(source, Path) and not is_trusted:
            raise TypeError(f"image={str(source)!r:.200}: is a path: must be a URL")
        elif isinstance(source, str) and source.lower().startswith(("http://", "https://")):
            raise ValueError(f"image={source!r:.80}: is a URL, which only conversations may contain")
        elif isinstance(source, (str, Path)):
            path = Path(source)
            source = read_file(path, f"image={str(path)!r:.200}", MAX_BYTES)
        with _image_errors():
            if isinstance(source, (bytes, bytearray, memoryview)):
                source = _open_file(source, FORMATS if is_trusted else WEB_FORMATS)
            elif isinstance(source, np.ndarray):
                if source.dtype != np.uint8 or not (source.ndim == 2 or source.shape[2:] in ((3,), (4,))):
                    given = f"{[*source.shape]} of {source.dtype}"
                    raise TypeError(f"image: is an array {given}: must be [height, width, 3 or 4] of uint8")
                source = Image.fromarray(source)
            if not isinstance(source, Image.Image):
                raise TypeError(f"image={source!r:.80}: must be {KINDS}")
            if (num_pixels := source.width * source.height) > MAX_PIXELS or not num_pixels:
                bound = f"must have between 1 and {MAX_PIXELS} pixels"
                raise ValueError(f"image: has {source.width} x {source.height} pixels: {bound}")
        return source

    def _in_rgb(self, image: Any) -> Any:
        """Decode an image. As in transformers, rotate the image as its EXIF entry says, and put it on white."""
        with _image_errors(), LOCKS[id(image) % len(LOCKS)]:
            image.load()  # first, because some formats then have another mode
            if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # otherwise, only a copy
                image = ImageOps.exif_transpose(image)
            if "A" in image.getbands() or image.info.get("transparency") is not None:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            return image if image.mode == "RGB" else image.convert("RGB")


def _open_file(data: bytes | bytearray | memoryview, formats: tuple[str, ...]) -> Any:
    Image.init()  # loads all formats, which `open` requires if some are named
    try:
        return Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError as error:  # its message contains the address of the BytesIO
        *others, last = (name.replace("WEBP", "WebP") for name in formats)
        raise ValueError(f"image: unknown format: must be {', '.join(others)} or {last}") from error


@contextmanager
def _image_errors() -> Iterator[None]:
    try:
        yield
    except Image.DecompressionBombError as error:
        raise ValueError(f"image: has too many pixels: must have between 1 and {MAX_PIXELS}") from error
    except (TypeError, ValueError) as error:
        if str(error).startswith("image"):
            raise
        raise ValueError(f"image: can't be read ({error})") from error
    except Exception as error:  # a broken file can raise anything
        raise ValueError(f"image: can't be read ({type(error).__name__}: {error!s:.200})") from error
