"""Describes the images of a prompt: the pixels of the images, and the positions of the prompt's tokens."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np


class PromptImage(NamedTuple):
    """Describes an image that was scaled for the vision tower.

    pixels: uint8 [height, width, 3] as bytes.
    rows, columns: the height and the width of the image in tokens.
    digest: 16 bytes that depend on the pixels, rows and columns. Images with equal digests share cached blocks.
    """

    pixels: bytes
    rows: int
    columns: int
    digest: bytes

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def key(self) -> tuple[int, ...]:
        """The digest as four int32 numbers."""
        return tuple(np.frombuffer(self.digest, np.int32).tolist())


class PlacedImage(NamedTuple):
    """Describes an image, and the index of the image's first token in the prompt."""

    image: PromptImage
    start: int

    @property
    def end(self) -> int:
        return self.start + self.image.num_tokens


class PromptImages:
    """Holds the images of a prompt, in order. All answers to the prompt share one PromptImages object."""

    def __init__(self, images: Sequence[PromptImage], token_ids: Sequence[int], image_token_id: int):
        """`token_ids` must contain `image_token_id` once for each token of an image, at consecutive indices."""
        self.placed: list[PlacedImage] = []
        self.num_prompt_tokens = len(token_ids)
        ids, end = np.asarray(token_ids), 0
        for image in images:
            start = end + int((ids[end:] == image_token_id).argmax())
            end = start + image.num_tokens
            self.placed.append(PlacedImage(image, start))

    def __deepcopy__(self, memo: dict) -> "PromptImages":
        return self  # forks of a sequence share the images

    @property
    def images(self) -> list[PromptImage]:
        return [placed.image for placed in self.placed]

    @cached_property
    def _positions(self) -> np.ndarray:
        """The temporal, vertical and horizontal positions of the prompt's tokens: [3, tokens] int32.

        The position after an image is the image's first position plus the number of tokens on the image's longer side.
        """
        parts, end, position = list[np.ndarray](), 0, 0
        for image, start in self.placed:
            position = self._add_text(parts, position, start - end)
            rows, columns = np.indices((image.rows, image.columns)).reshape(2, -1)
            parts.append(position + np.stack((np.zeros_like(rows), rows, columns)))
            position += max(image.rows, image.columns)
            end = start + image.num_tokens
        self._add_text(parts, position, self.num_prompt_tokens - end)
        return np.concatenate(parts, 1).astype(np.int32)

    @staticmethod
    def _add_text(parts: list[np.ndarray], position: int, num_tokens: int) -> int:
        parts.append(np.broadcast_to(position + np.arange(num_tokens), (3, num_tokens)))
        return position + num_tokens

    @cached_property
    def delta(self) -> int:
        """The position of a generated token minus the token's index. `delta` is at most 0."""
        saved = (max(image.rows, image.columns) - image.num_tokens for image in self.images)
        return sum(saved)

    def positions(self, start: int, end: int) -> np.ndarray:
        """Return positions [3, end - start] int32 of the tokens `start:end`, which may be generated tokens."""
        generated = np.arange(max(start, self.num_prompt_tokens), end, dtype=np.int32) + self.delta
        prompt = self._positions[:, start:end]
        return np.concatenate((prompt, np.broadcast_to(generated, (3, len(generated)))), 1, dtype=np.int32)


def images_of(seq: Any) -> PromptImages | None:
    return seq.feature_state.get("vision")


def images_in(seq: Any, start: int, end: int) -> Iterator[PlacedImage]:
    """Yield each image that has at least one token among the tokens `start:end` of a sequence."""
    if (images := images_of(seq)) is not None:
        for placed in images.placed:
            if placed.start < end and start < placed.end:
                yield placed
