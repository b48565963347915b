"""Reads images, and prepares them for the vision tower with transformers' image processor."""

import hashlib
import io
import threading
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.vision.image_urls import fetch
from nanovllm.vision.prompt_images import PromptImage

if TYPE_CHECKING:
    from nanovllm.config import Config

# Pillow reads more formats, some of them with other programs
WEB_FORMATS = "GIF", "JPEG", "PNG", "WEBP"
FORMATS = *WEB_FORMATS, "BMP", "PPM", "TIFF"
MAX_BYTES = 2**26  # of a file
MAX_PIXELS = 2**26  # before scaling; a file of a few kilobytes may claim to have more
KINDS = "a PIL image, an array [height, width, 3] of uint8, the bytes or the path of a file, or a data: URL"


class ImageReader:
    """Makes a PromptImage of each image. Any thread may call the methods."""

    def __init__(self, config: "Config"):
        self.config, self.vision = config, config.model_config.vision
        self._lock = threading.Lock()

    @cached_property
    def _processor(self) -> Any:
        import transformers  # lazy, as in utils/loader.py

        # with Pillow alone, transformers 5 has a class of its own
        name = "Qwen2VLImageProcessorPil" if hasattr(transformers, "Qwen2VLImageProcessorPil") else None
        return getattr(transformers, name or "Qwen2VLImageProcessor")(
            patch_size=self.vision.patch_size,
            temporal_patch_size=self.vision.temporal_patch_size,
            merge_size=self.vision.merge_size,
            min_pixels=self.vision.min_pixels,
            max_pixels=self.vision.max_pixels,
            do_rescale=False,  # the tower does this, and gets bytes
            do_normalize=False,
        )

    def read(self, source: Any, is_trusted: bool = True) -> PromptImage:
        """Read an image from one of KINDS.

        If `is_trusted` is false, the format must be one of WEB_FORMATS, and a string must be a URL, which may name
        files and other hosts only if settings allow it. Raises ValueError for broken, too large and too narrow images,
        TypeError for other types, and ImportError without Pillow.
        """
        image = self._open(source, is_trusted)
        try:
            with self._lock:
                processor = self._processor
            found = processor(images=[image], return_tensors="np")
        except ValueError as error:  # the sides differ too much
            raise ValueError(f"image: has {image.width} x {image.height} pixels: {error}") from error
        (_, height, width), n, size = (
            found["image_grid_thw"][0].tolist(),
            self.vision.merge_size,
            self.vision.patch_size,
        )
        frames = found["pixel_values"].reshape(height * width, 3, -1, size, size)
        pixels = frames[:, :, 0].astype(np.uint8).tobytes()  # all frames of an image are equal
        shape = height // n, width // n
        digest = hashlib.sha256(b"%d %d " % shape + pixels).digest()[:16]
        return PromptImage(pixels, *shape, digest)

    def _open(self, source: Any, is_trusted: bool) -> Any:
        """Return a PIL image in RGB. As transformers does, turn it as its EXIF entry says, and take the first frame."""
        try:
            import PIL.Image
            from transformers.image_utils import load_image
        except ImportError as error:
            raise ImportError("images need Pillow: pip install 'nano-vllm[images]'") from error
        if isinstance(source, str) and (source.startswith("data:") or not is_trusted):
            source = fetch(source, self.config, MAX_BYTES)
        elif isinstance(source, (str, Path)):
            source = read_file(Path(source))
        try:
            if isinstance(source, (bytes, bytearray, memoryview)):
                PIL.Image.init()  # loads all formats, which `open` requires if some are named
                source = PIL.Image.open(io.BytesIO(source), formats=FORMATS if is_trusted else WEB_FORMATS)
            elif isinstance(source, np.ndarray):
                source = PIL.Image.fromarray(source)
            if not isinstance(source, PIL.Image.Image):
                raise TypeError(f"image={source!r:.80}: must be {KINDS}")
            if (num_pixels := source.width * source.height) > MAX_PIXELS or not num_pixels:
                bound = f"must have between 1 and {MAX_PIXELS} pixels"
                raise ValueError(f"image: has {source.width} x {source.height} pixels: {bound}")
            return load_image(source)
        except (TypeError, ValueError) as error:
            if str(error).startswith("image"):
                raise
            raise ValueError(f"image: can't be read ({error})") from error
        except Exception as error:  # a broken file can raise anything
            raise ValueError(f"image: can't be read ({type(error).__name__}: {error!s:.200})") from error


def read_file(path: Path) -> bytes:
    """Return the contents of an image file. Raises a ValueError that names it if it is missing or too large."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"image={str(path)!r:.200}: can't be read ({error.strerror})") from error
    if len(data) > MAX_BYTES:
        raise ValueError(f"image={str(path)!r:.200}: has more than {MAX_BYTES} bytes")
    return data
