"""The model runner of an engine that takes images."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from math import isqrt, prod
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.batches.batch import BatchShape, HostBatch
from nanovllm.batches.batch_runner import BatchRunner
from nanovllm.engine.features import Arrays
from nanovllm.engine.forward_output import PendingStep
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.utils.context import of_tokens
from nanovllm.vision.image_feature import has_images
from nanovllm.vision.prompt_images import PromptImage, images_in
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
        # called with the images to encode together, and the digests of the images to remove; see setup.py
        self.tell_ranks: Callable[[list[PromptImage], list[bytes]], None] = lambda images, leaving: None

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._embeddings

    def __getitem__(self, digest: bytes) -> torch.Tensor:
        return self._embeddings[digest]

    @property
    def num_tokens(self) -> int:
        return sum(x.shape[1] for x in self._embeddings.values())

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
            self.tell_ranks(pack, self._cleared)
            self._cleared = []
            self.add(pack)
        for digest in needed:  # packs have another order
            self._embeddings.move_to_end(digest)

    def _packs(self, images: list[PromptImage]) -> Iterator[list[PromptImage]]:
        """Yield lists of images that are encoded together. In a list, images of the same size are adjacent."""
        pack, num_patches = list[PromptImage](), 0
        for image in sorted(images, key=size_of):
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
    def add(self, images: list[PromptImage], leaving: Iterable[bytes] = ()) -> None:
        """Remove the images `leaving`, and compute the embeddings of `images`.

        In `images`, images of the same size must be adjacent.
        """
        for digest in leaving:
            self._embeddings.pop(digest, None)
        sizes = [len(image.pixels) for image in images]
        pinned = self._device.type == "cuda"  # otherwise, the copy would wait for all queued steps
        pixels = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        for part, image in zip(pixels.split(sizes), images):
            part.numpy()[:] = np.frombuffer(image.pixels, np.uint8)
        side = self._tower.config.patch_size * self._tower.config.merge_size  # of a token, in pixels
        shapes = [(len([*same]), rows * side, columns * side, 3) for (rows, columns), same in groupby(images, size_of)]
        parts = pixels.to(self._device, non_blocking=True).split([*map(prod, shapes)])
        groups = [part.view(shape) for part, shape in zip(parts, shapes)]
        embeddings = self._tower(groups).split([image.num_tokens for image in images], 1)
        for image, own in zip(images, embeddings):
            self._embeddings[image.digest] = own.clone()  # a view would keep the memory of all images

    def clear(self) -> None:
        self._cleared += self._embeddings
        self._embeddings.clear()


class ImageTokens(NamedTuple):
    """The embeddings of the N tokens of images in a step.

    tokens: [N] int64, the indices of the tokens in the step.
    levels: [1 + layers, N, hidden_size]. The first level replaces the embeddings of the tokens. The other levels are
        added to the outputs of the decoder's first layers.
    """

    tokens: torch.Tensor
    levels: torch.Tensor

    def replace(self, embeddings: torch.Tensor) -> torch.Tensor:
        return embeddings.index_copy(0, self.tokens, self.levels[0])

    def add(self, x: torch.Tensor, level: int) -> torch.Tensor:
        return x.index_add(0, self.tokens, self.levels[level])


@contextmanager
def image_embeddings(decoder: Any, images: Any) -> Iterator[None]:
    """Let a decoder use the embeddings of `images`, such as an ImageTokens, during a `with` block."""

    def replace(module: Any, arguments: Any, embeddings: torch.Tensor) -> torch.Tensor:
        return images.replace(embeddings)

    def add(level: int) -> Callable:
        return lambda module, arguments, output: (images.add(output[0], level), output[1])

    hooks = [decoder.embed_tokens.register_forward_hook(replace)]
    levels = range(1, len(images.levels))
    hooks += [layer.register_forward_hook(add(level)) for layer, level in zip(decoder.layers, levels)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class VisionRunner(BatchRunner):
    """Computes the embeddings of a step's images before the step.

    If a chunk begins before the end of its prompt's last image, each token of the step has three positions. In other
    steps, a token has one position: its index plus the `PromptImages.delta` of its request. Only the subclass in
    vision_graphs.py uses CUDA graphs for steps in which tokens have three positions.
    """

    _has_images = False  # whether a chunk of the step that is prepared begins before the end of an image
    _placed: list[list[int]] | None = None  # from RequestImages, while a step with images runs
    _positions: torch.Tensor | None = None

    def make_tables(self) -> None:
        super().make_tables()
        config = self.config
        tower, max_patches = self.model.model.visual, 0 if config.batch_invariant else MAX_PATCHES
        self.images = ImageStore(tower, config.max_num_batched_tokens, self.device, max_patches)
        self.deltas = torch.zeros(config.max_num_seqs + 1, dtype=torch.int32, device=self.device)
        self.add_features(["vision"])

    def warmup_model(self) -> int:
        """Reserve memory for the largest step, for the vision tower, and for the embeddings of images."""
        return super().warmup_model() - (self._bytes_of_images() if self.device.type == "cuda" else 0)

    def _bytes_of_images(self) -> int:
        config, vision = self.config, self.config.model_config.vision
        num_tokens = max(1, min(vision.max_image_tokens, config.max_model_len))
        sizes = largest_pack(num_tokens, self.images.max_patches // vision.merge_size**2)
        token = bytes(3 * (vision.merge_size * vision.patch_size) ** 2)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        images = [PromptImage(prod(size) * token, *size, i.to_bytes(16, "big")) for i, size in enumerate(sizes)]
        self.images.require(images)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        bytes_per_token = self.images[images[0].digest].nbytes // images[0].num_tokens
        self.images.clear()
        return peak + (num_tokens + config.max_num_batched_tokens) * bytes_per_token

    # -- on the host ---------------------------------------------------------------------------------------------------

    def prepare(self, step: ScheduledStep) -> HostBatch:
        placed = [placed for row in step.chunks for placed in images_in(*row)]
        self._has_images = has_images(step)
        with self.on_device():
            self.images.require(image for image, _ in placed)
        if step.chunks:
            step.feature_names.add("vision")
        return super().prepare(step)

    def padded(self, shape: BatchShape) -> BatchShape:
        return shape if self._has_images else super().padded(shape)

    def launch(self, batch: HostBatch, step: ScheduledStep | None = None) -> PendingStep:
        placed = batch.feature_arrays.get("vision", {}).get("placed")
        self._placed = None if placed is None else placed.tolist()
        try:
            return super().launch(batch, step)
        finally:
            self._placed = self._positions = None

    # -- on the device -------------------------------------------------------------------------------------------------

    def set_positions(self, arrays: Arrays) -> None:
        self.deltas[arrays["req_indices"].long()] = arrays["deltas"]
        self._positions = arrays.get("positions")

    def run_model(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # padding has position 0, and may get the delta of another row
        positions = (positions + of_tokens(self.deltas)).clamp_(min=0)
        if (given := self.given_positions(len(input_ids))) is None:
            return super().run_model(input_ids, positions)
        positions = torch.where(given >= 0, given, positions)
        if (images := self.image_tokens(len(input_ids))) is None:
            return super().run_model(input_ids, positions)
        with image_embeddings(self.model.model.language_model, images):
            return super().run_model(input_ids, positions)

    def given_positions(self, num_tokens: int) -> torch.Tensor | None:
        """Return the positions [3, T] of chunks, which are negative for other tokens; or None without images."""
        return self._positions

    def image_tokens(self, num_tokens: int) -> Any:
        if not self._placed:
            return None
        tokens = [torch.arange(token, token + n, device=self.device) for token, n, *_ in self._placed]
        return ImageTokens(torch.cat(tokens), torch.cat([*self.placed_embeddings()], 1))

    def placed_embeddings(self) -> Iterator[torch.Tensor]:
        """Yield the embeddings of each part of an image in this step."""
        for _, n, first, *key in self._placed or ():
            yield self.images[np.array(key, np.int32).tobytes()][:, first : first + n]

    def exit(self) -> None:
        self.images = self.deltas = None
        super().exit()
