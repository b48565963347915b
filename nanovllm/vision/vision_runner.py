"""The model runner of an engine that takes images."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
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
from nanovllm.vision.image_store import MAX_PATCHES, ImageStore, largest_pack
from nanovllm.vision.prompt_images import PromptImage, images_in


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
        # an image may be begun while others are encoded: hidden states, residual, and tables of its patches
        begun = num_tokens * (bytes_per_token + vision.merge_size**2 * 3 * vision.hidden_size * config.dtype.itemsize)
        return peak + (num_tokens + config.max_num_batched_tokens) * bytes_per_token + begun

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
