"""Implements the vision tower of Qwen3-VL and Qwen3.5 (arXiv:2511.21631), which maps patches to embeddings of tokens.

Every rank has the whole tower, which encodes several images at once. P is the number of patches of all images together.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import operation
from nanovllm.layers.linear import linear
from nanovllm.layers.rotary_embedding import apply_rotary_emb
from nanovllm.utils.loader import default_weight_loader, parameter
from nanovllm.utils.rope_scaling import inverse_frequencies
from nanovllm.vision.vision_config import VisionConfig

NORM_EPS = 1e-6
ROPE_THETA = 10000.0


class TowerLinear(nn.Module):
    """Computes x W^T + b. Each rank has the whole weight. Weight formats and adapters do not change this layer."""

    def __init__(self, input_size: int, output_size: int):
        super().__init__()
        self.weight = parameter((output_size, input_size), default_weight_loader)
        self.bias = parameter((output_size,), default_weight_loader)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


@operation
def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer norm of x + residual, and the sum x + residual. Both results are [P, N].

    May overwrite `residual`.
    """
    x = x + residual
    return F.layer_norm(x, weight.shape, weight, bias, eps), x


class LayerNorm(nn.Module):
    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = parameter((hidden_size,), default_weight_loader)
        self.bias = parameter((hidden_size,), default_weight_loader)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, NORM_EPS)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual, and the sum x + residual."""
        return add_layer_norm(x, residual, self.weight, self.bias, NORM_EPS)


class PatchProjection(nn.Module):
    """Computes a 3D convolution as a matmul, because the stride is the kernel size. All frames of a patch are equal."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        kernel = 3, config.temporal_patch_size, config.patch_size, config.patch_size
        self.weight = parameter((config.hidden_size, *kernel), default_weight_loader)
        self.bias = parameter((config.hidden_size,), default_weight_loader)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map the pixels of patches [P, 3, patch_size, patch_size] to [P, hidden_size]."""
        frames = pixels.unsqueeze(2).expand(-1, *self.weight.shape[1:])
        return linear(frames.flatten(1), self.weight.flatten(1), self.bias)


class PatchEmbedding(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        self.proj = PatchProjection(config)


class PositionEmbedding(nn.Module):
    """Holds learned embeddings on a square grid, which are interpolated for images of any size."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.side = config.grid_side
        self.weight = parameter((self.side**2, config.hidden_size), default_weight_loader)

    def forward(self, height: int, width: int) -> torch.Tensor:
        """Return the embeddings [height, width, hidden_size] of an image's patches, in float32."""
        grid = self.weight.float().view(1, self.side, self.side, -1).permute(0, 3, 1, 2)
        # corners stay corners
        return F.interpolate(grid, (height, width), mode="bilinear", align_corners=True)[0].permute(1, 2, 0)


class Grids(NamedTuple):
    """Describes the patches of images that are encoded together.

    counts: for each size of image, the number of images and the number of patches of each image.
    cos, sin: [P, 1, head_dim / 2], for RoPE.
    """

    counts: tuple[tuple[int, int], ...]
    cos: torch.Tensor
    sin: torch.Tensor


@operation
def rotate_patches(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the queries and keys of qkv [P, 3, heads, N]. `cos` and `sin` are [P, 1, N / 2]. May overwrite qkv."""
    qk = apply_rotary_emb(qkv[:, :2].flatten(1, 2), cos, sin)
    return torch.cat((qk.unflatten(1, (2, -1)), qkv[:, 2:]), 1)


@operation
def patch_attention(qkv: torch.Tensor) -> torch.Tensor:
    """Compute the attention [B, n, heads * N] of each patch to all patches of its image.

    qkv is [B, n, 3, heads, N], for B images with n patches each.
    """
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, n, N]
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@operation
def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return gelu(x W^T + bias), which is [P, outputs]. GELU is approximated with tanh."""
    return F.gelu(linear(x, weight, bias), approximate="tanh")


class TowerAttention(nn.Module):
    """Computes attention. Each patch of an image attends to all patches of the image."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = TowerLinear(config.hidden_size, 3 * config.hidden_size)
        self.proj = TowerLinear(config.hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor, grids: Grids) -> torch.Tensor:
        qkv = rotate_patches(self.qkv(x).unflatten(-1, (3, self.num_heads, -1)), grids.cos, grids.sin)
        parts = zip(qkv.split([count * size for count, size in grids.counts]), grids.counts)
        outputs = [patch_attention(part.unflatten(0, counts)).flatten(0, 1) for part, counts in parts]
        return self.proj(torch.cat(outputs) if len(outputs) > 1 else outputs[0])


class TowerMLP(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        self.linear_fc1 = TowerLinear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = TowerLinear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(linear_gelu(x, self.linear_fc1.weight, self.linear_fc1.bias))


class TowerBlock(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(config.hidden_size), LayerNorm(config.hidden_size)
        self.attn = TowerAttention(config)
        self.mlp = TowerMLP(config)

    def forward(self, x: torch.Tensor, residual: torch.Tensor, grids: Grids) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of the MLP, and the residual that the next block must add.

        Both tensors are [P, hidden_size].
        """
        x, residual = self.norm1.add(x, residual)
        x, residual = self.norm2.add(self.attn(x, grids), residual)
        return self.mlp(x), residual


class PatchMerger(nn.Module):
    """Maps patches [P, hidden_size] to tokens [P / merge_size^2, outputs]. Each square of patches becomes a token."""

    def __init__(self, config: VisionConfig, norms_squares: bool):
        """norms_squares: whether the norm is over each square of patches instead of each patch."""
        super().__init__()
        self.size = config.hidden_size * config.merge_size**2
        self.norm = LayerNorm(self.size if norms_squares else config.hidden_size)
        self.linear_fc1 = TowerLinear(self.size, self.size)
        self.linear_fc2 = TowerLinear(self.size, config.out_hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.view(-1, *self.norm.weight.shape)).view(-1, self.size)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class VisionTower(nn.Module):
    """The vision tower. The tower's attributes have the names that checkpoints use."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.config = config
        numbers = {"mean": config.image_mean, "std": config.image_std}
        head_dim = config.hidden_size // config.num_heads
        numbers["inv_freq"] = tuple(inverse_frequencies(ROPE_THETA, head_dim // 2).tolist())
        for name, values in numbers.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32), persistent=False)
        self.patch_embed = PatchEmbedding(config)
        self.pos_embed = PositionEmbedding(config)
        self.blocks = nn.ModuleList([TowerBlock(config) for _ in range(config.depth)])
        self.merger = PatchMerger(config, norms_squares=False)
        mergers = [PatchMerger(config, norms_squares=True) for _ in config.deepstack_layers]
        self.deepstack_merger_list = nn.ModuleList(mergers)

    def forward(self, groups: list[torch.Tensor]) -> torch.Tensor:
        """Map images to embeddings [1 + layers, tokens, out_hidden_size], in the order of the images.

        The embeddings at index 0 replace the placeholders of images. The embeddings at other indices are added after
        the first layers of the text model (DeepStack, arXiv:2406.04334). Each tensor in `groups` contains B images of
        one size: [B, height, width, 3] uint8.
        """
        *_, embeddings = self.in_parts(groups)
        return embeddings

    def in_parts(self, groups: list[torch.Tensor]) -> Iterator[Any]:
        """Compute the result of `forward` in parts. Yield None after each block, and finally the result."""
        x = self.patch_embed.proj(torch.cat([self._patches(images) for images in groups]))
        counts, *tables = zip(*(self._grid(*images.shape[:3]) for images in groups))
        residual, cos, sin = map(torch.cat, tables)
        grids, levels = Grids(counts, cos, sin), []
        mergers = dict(zip(self.config.deepstack_layers, self.deepstack_merger_list))
        for i, block in enumerate(self.blocks):
            x, residual = block(x, residual, grids)
            if i in mergers:
                levels.append(mergers[i](x + residual))
            yield None
        yield torch.stack([self.merger(x + residual), *levels])

    def _patches(self, images: torch.Tensor) -> torch.Tensor:
        """Return normalized patches [B * n, 3, patch_size, patch_size]. The patches of a square are adjacent."""
        n, size = self.config.merge_size, self.config.patch_size
        rows, columns = (length // (n * size) for length in images.shape[1:3])
        squares = images.view(len(images), rows, n, size, columns, n, size, 3)
        patches = squares.permute(0, 1, 4, 2, 5, 7, 3, 6).flatten(0, 4).float()
        mean, std = self.mean[:, None, None], self.std[:, None, None]
        return ((patches / 255 - mean) / std).to(self.pos_embed.weight.dtype)

    def _grid(self, num_images: int, height: int, width: int) -> tuple:
        """Describe images of one size. Return the pair (images, patches per image), and three tables.

        The tables have a row for each patch of each image: the learned positions [P, hidden_size], cosines and sines
        [P, 1, head_dim / 2]. The row of a patch determines the rotation of half of the pairs. The column determines the
        rotation of the other half.
        """
        size = height // self.config.patch_size, width // self.config.patch_size
        positions = self._in_squares(self.pos_embed(*size)).to(self.pos_embed.weight.dtype)
        rows, columns = (torch.arange(n, dtype=torch.float32, device=positions.device) for n in size)
        places = torch.stack((rows[:, None].expand(size), columns.expand(size)), -1)
        angles = (self._in_squares(places).unsqueeze(-1) * self.inv_freq).flatten(1).unsqueeze(1)
        tables = positions, angles.cos(), angles.sin()
        repeated = [x.expand(num_images, *x.shape).flatten(0, 1) for x in tables]
        return (num_images, len(positions)), *repeated

    def _in_squares(self, grid: torch.Tensor) -> torch.Tensor:
        """Put `grid` [height, width, N] into the order of the patches. The result is [height * width, N]."""
        height, width, size = grid.shape
        n = self.config.merge_size
        return grid.view(height // n, n, width // n, n, size).transpose(1, 2).reshape(-1, size)
