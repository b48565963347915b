"""CUDA graphs of steps with images."""

from typing import Any, NamedTuple

import torch

from nanovllm.batches.batch import BatchShape, HostBatch
from nanovllm.cuda.graphs import MixedGraphs
from nanovllm.engine.features import Arrays
from nanovllm.engine.forward_output import ForwardOutput
from nanovllm.vision.vision_runner import VisionRunner


def shapes_with_images(shapes: list[BatchShape]) -> list[BatchShape]:
    """Return the shapes to capture with images: all up to 1,024 tokens, and a few longer ones with decodes.

    A long step takes longer to compute than to launch. But without a graph, a step may compile kernels at its first
    launch, while the sequences that decode wait.
    """
    longest = max(shape.num_tokens for shape in shapes)

    def is_chosen(shape: BatchShape) -> bool:
        n = shape.num_tokens
        return n <= 1024 or (shape.num_decode_rows > 0 and (n % 512 == 0 or n == longest))

    return [*filter(is_chosen, shapes)]


class StaticImages(NamedTuple):
    """The inputs of graphs: positions [3, T] and embeddings [1 + layers, T, hidden_size] of tokens.

    `is_image` [T] selects the tokens of images. The other tokens of `levels` have arbitrary values.
    """

    positions: torch.Tensor
    is_image: torch.Tensor
    levels: torch.Tensor

    def replace(self, embeddings: torch.Tensor) -> torch.Tensor:
        return torch.where(self.is_image[:, None], self.levels[0], embeddings)

    def add(self, x: torch.Tensor, level: int) -> torch.Tensor:
        return x + self.levels[level].masked_fill(~self.is_image[:, None], 0)


class VisionGraphsRunner(VisionRunner):
    """Also replays CUDA graphs for short steps and most mixed steps with images. These graphs read a StaticImages.

    Steps without images keep their own graphs, which are faster: tokens have one position, and layers have no hooks.
    """

    image_graphs: MixedGraphs | None = None
    mixed_graphs: MixedGraphs | None = None  # for steps without images
    static: StaticImages | None = None
    _static: StaticImages | None = None  # `static` while a graph with images is captured or replayed

    def capture_cudagraph(self) -> None:
        super().capture_cudagraph()
        if self.mixed_graphs is not None:
            runner: Any = self  # a CUDAModelRunner
            self.capture_images(self.mixed_graphs, runner.buffers.device)

    def capture_images(self, text: MixedGraphs, buffer: torch.Tensor) -> None:
        """Capture some shapes of `text` again, with images."""
        shapes, model = shapes_with_images(text.shapes), self.config.model_config
        num_tokens = max(shape.num_tokens for shape in shapes)
        size = 1 + len(model.vision.deepstack_layers), num_tokens, model.hidden_size
        self.static = self._static = StaticImages(
            torch.full((3, num_tokens), -1, dtype=torch.int32, device=self.device),
            torch.zeros(num_tokens, dtype=torch.bool, device=self.device),
            torch.zeros(size, dtype=self.config.dtype, device=self.device),
        )
        parts = self.run_batch, self.sample_and_accept
        try:
            sizes = self.config.max_num_seqs, buffer, self.pad_req_index
            self.image_graphs = MixedGraphs(shapes, *sizes, *parts, text.pool, text.few_layers)
        finally:
            self._static = None

    def padded(self, shape: BatchShape) -> BatchShape:
        if not self._has_images:
            return super().padded(shape)
        return (self.image_graphs and self.image_graphs.shape_for(shape)) or shape

    def compute(self, batch: HostBatch) -> tuple[torch.Tensor, ForwardOutput]:
        if self._placed is None or self.image_graphs is None or batch.shape.graph_shape not in self.image_graphs.models:
            return super().compute(batch)
        text, self.mixed_graphs, self._static = self.mixed_graphs, self.image_graphs, self.static
        try:
            return super().compute(batch)
        finally:
            self.mixed_graphs, self._static = text, None

    def set_positions(self, arrays: Arrays) -> None:
        super().set_positions(arrays)
        if (static := self._static) is not None:
            given = arrays["positions"]
            static.positions.fill_(-1)[:, : given.shape[1]] = given
            static.is_image.zero_()
            for (token, n, *_), levels in zip(self._placed or (), self.placed_embeddings()):
                static.is_image[token : token + n] = True
                static.levels[:, token : token + n] = levels

    def given_positions(self, num_tokens: int) -> torch.Tensor | None:
        return super().given_positions(num_tokens) if self._static is None else self._static.positions[:, :num_tokens]

    def image_tokens(self, num_tokens: int) -> Any:
        if self._static is None:
            return super().image_tokens(num_tokens)
        positions, is_image, levels = self._static
        return StaticImages(positions[:, :num_tokens], is_image[:num_tokens], levels[:, :num_tokens])

    def exit(self) -> None:
        self.image_graphs = self.static = None
        super().exit()
