"""Stores the embeddings of images on a rank's device, and computes them with the vision tower."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import groupby
from math import isqrt, prod
from typing import Any

import numpy as np
import torch

from nanovllm.vision.prompt_images import PromptImage
from nanovllm.vision.tower import VisionTower

MAX_PATCHES = 2**14  # that are encoded together, unless a single image has more


def size_of(image: PromptImage) -> tuple[int, int]:
    return image.rows, image.columns


def largest_pack(num_tokens: int, max_tokens: int) -> list[tuple[int, int]]:
    """Return the rows and columns of images that need the most memory if they are encoded together.

    Each image has at most `num_tokens` tokens. All images together have `max_tokens` tokens, unless one image has more.
    If there are several images, the last one has another size, because images of several sizes need more memory.
    """
    columns = isqrt(num_tokens)
    rows = num_tokens // columns
    sizes = [(rows, columns)] * max(1, (max_tokens - 1) // (rows * columns))
    rest = max_tokens - len(sizes) * rows * columns
    return [*sizes, (1, rest)] if rest > 0 else sizes


class ImageStore:
    """Stores the embeddings of images on a rank's device. The keys are the digests of the images.

    If the store is full, the least recently used embeddings are removed. Rank 0 chooses which images are encoded and
    which are removed, and tells the other ranks.
    """

    def __init__(self, tower: VisionTower, max_tokens: int, device: torch.device, max_patches: int = MAX_PATCHES):
        """max_tokens: the maximum number of stored embeddings.
        max_patches: the maximum number of patches of images that are encoded together.
        """
        self._tower, self._max_tokens, self._device = tower, max_tokens, device
        self.max_patches = max_patches
        self._embeddings: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # [1 + layers, tokens, hidden_size]
        self._cleared: list[bytes] = []  # digests that the other ranks must still remove
        self._begun: dict[bytes, Iterator[Any]] = {}  # at most one image of which some blocks were computed
        self._num_computed = 0  # how many blocks of this image were computed
        # called with the digests to remove, and with the name and the arguments of a method; see setup.py
        self.tell_ranks: Callable[..., None] = lambda leaving, method, *arguments: None

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._embeddings

    def __getitem__(self, digest: bytes) -> torch.Tensor:
        return self._embeddings[digest]

    @property
    def num_tokens(self) -> int:
        return sum(x.shape[1] for x in self._embeddings.values())

    @property
    def num_blocks(self) -> int:
        return len(self._tower.blocks)

    def require(self, images: Iterable[PromptImage]) -> None:
        """Compute the embeddings of the images that are not stored. Only rank 0 calls this method.

        First, the least recently used images are removed, because the images of the previous step may exceed
        `max_tokens`. The most recently used image stays, because the next chunk may begin inside this image.
        """
        needed = {image.digest: image for image in images}
        self._make_room(0, [*needed, *[*self._embeddings][-1:]])
        if new := [image for digest, image in needed.items() if digest not in self._embeddings]:
            self._make_room(sum(image.num_tokens for image in new), needed)
        for pack in self._packs(new):
            self._tell_ranks("add", pack)
            self.add(pack)
        for digest in needed:  # packs have another order
            self._embeddings.move_to_end(digest)

    def part_left(self, image: PromptImage) -> float:
        """Return which part of the work for an image is left: 0 if the image's embeddings are stored."""
        if image.digest in self._embeddings:
            return 0
        return 1 - self._num_computed / self.num_blocks if image.digest in self._begun else 1

    def advance(self, image: PromptImage, num_blocks: int) -> None:
        """Compute up to `num_blocks` further blocks of the tower for an image. Only rank 0 calls this method.

        `require` computes the rest. Only one image can be begun: the blocks of another image are forgotten.
        """
        self._tell_ranks("compute_blocks", [image], num_blocks)
        self.compute_blocks([image], num_blocks)

    def forget(self, image: PromptImage) -> None:
        """Forget the blocks that were computed for an image, because its prompt was aborted or preempted."""
        if self._begun.pop(image.digest, None) is not None:
            self._cleared.append(image.digest)

    def _tell_ranks(self, method: str, images: list[PromptImage], *arguments: Any) -> None:
        """Make the other ranks call `remove`, and then `method`. If an image is begun, the ranks have its pixels."""
        images = [image._replace(pixels=b"") if image.digest in self._begun else image for image in images]
        self.tell_ranks(self._cleared, method, images, *arguments)
        self._cleared = []

    def remove(self, leaving: Iterable[bytes]) -> None:
        for digest in leaving:
            self._embeddings.pop(digest, None)
            self._begun.pop(digest, None)

    @torch.inference_mode()
    def compute_blocks(self, images: list[PromptImage], num_blocks: int) -> None:
        """Do the work of `advance` on this rank."""
        (image,) = images
        if image.digest not in self._begun:
            self._begun, self._num_computed = {image.digest: self._tower.in_parts(self._pixels([image]))}, 0
        parts = self._begun.pop(image.digest)  # an error ends the iterator
        for _ in range(min(num_blocks, self.num_blocks - self._num_computed)):
            next(parts)
            self._num_computed += 1
        self._begun[image.digest] = parts

    def _packs(self, images: list[PromptImage]) -> Iterator[list[PromptImage]]:
        """Yield lists of images that are encoded together. In a list, images of the same size are adjacent."""
        begun = {image.digest: [image] for image in images if image.digest in self._begun}
        yield from begun.values()
        pack, num_patches = list[PromptImage](), 0
        for image in sorted((image for image in images if image.digest not in begun), key=size_of):
            patches = image.num_tokens * self._tower.config.merge_size**2
            if pack and num_patches + patches > self.max_patches:
                yield pack
                pack, num_patches = [], 0
            pack.append(image)
            num_patches += patches
        if pack:
            yield pack

    def _make_room(self, num_tokens: int, kept: Collection[bytes]) -> None:
        """Remove the least recently used images, except `kept`, until `num_tokens` more embeddings fit."""
        num_tokens += self.num_tokens
        for digest in [digest for digest in self._embeddings if digest not in kept]:
            if num_tokens <= self._max_tokens:
                break
            num_tokens -= self._embeddings.pop(digest).shape[1]
            self._cleared.append(digest)

    @torch.inference_mode()
    def add(self, images: list[PromptImage]) -> None:
        """Compute the embeddings of `images`. Images of the same size must be adjacent."""
        if (parts := self._begun.pop(images[0].digest, None)) is not None:
            *_, embeddings = parts
        else:
            embeddings = self._tower(self._pixels(images))
        for image, own in zip(images, embeddings.split([image.num_tokens for image in images], 1)):
            self._embeddings[image.digest] = own.clone()  # a view would keep the memory of all images

    def _pixels(self, images: list[PromptImage]) -> list[torch.Tensor]:
        """Copy images to the device. Return a tensor [B, height, width, 3] uint8 for each size of image."""
        sizes = [len(image.pixels) for image in images]
        pinned = self._device.type == "cuda"  # otherwise, the copy would wait for all queued steps
        pixels = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        for part, image in zip(pixels.split(sizes), images):
            part.numpy()[:] = np.frombuffer(image.pixels, np.uint8)
        side = self._tower.config.patch_size * self._tower.config.merge_size  # of a token, in pixels
        shapes = [(len([*same]), rows * side, columns * side, 3) for (rows, columns), same in groupby(images, size_of)]
        parts = pixels.to(self._device, non_blocking=True).split([*map(prod, shapes)])
        return [part.view(shape) for part, shape in zip(parts, shapes)]

    def clear(self) -> None:
        self._cleared += [*self._embeddings, *self._begun]
        self._embeddings.clear()
        self._begun.clear()
