"""Stores, loads and quantizes weights that consist of 8-bit values and block scales.

A matrix [N, K] is stored as values [N, K]. Each block of `rows` x `columns` values shares a float32 scale, so the
scales are [N / rows, K / columns].
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from nanovllm.kernels import operation
from nanovllm.utils.loader import QUANTIZED_DTYPES, Shard, check_shape, parameter

ROWS_AT_A_TIME = 2048  # rows that are quantized together; few, because float32 takes four times the memory


class Block(NamedTuple):
    """The size of a block of values that share a scale."""

    rows: int
    columns: int


@dataclass(frozen=True)
class QuantScheme:
    """Describes how a weight is quantized, in the checkpoint or while it is loaded."""

    dtype: torch.dtype  # of the values: float8_e4m3fn or int8
    max_value: float  # the quantized value of a block's largest magnitude
    block_rows: int | None  # rows that share a scale in the checkpoint; None: all
    block_columns: int | None  # columns that share a scale; None: all
    scale_name: str | None = None  # suffix of the scales' names; None: the checkpoint is not quantized
    bits: ClassVar[int] = 8
    quantizes: ClassVar[bool] = True  # weights without scales are quantized

    def block_of(self, shape: tuple[int, int]) -> Block:
        return Block(self.block_rows or shape[0], self.block_columns or shape[1])

    def local_block(self, shards: list[Shard], columns: int) -> Block:
        """Return the largest block size for which no block crosses the border of a shard of this rank.

        Both sides of a block are powers of two, unless the block spans whole rows. If a shard's border cuts a block of
        the checkpoint, the block becomes several smaller blocks with equal scales.
        """
        if self.block_columns is not None:
            columns = power_of_two(self.block_columns, columns)
        if self.block_rows is None:  # the merged weights of a layer have different scales
            return Block(1, columns)
        parts = [part for shard in shards for part in shard.parts]
        return Block(power_of_two(self.block_rows, *(len(range(p.shape[0])[p.rows]) for p in parts)), columns)

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape [ceil(N / rows), ceil(K / columns)] of the scales of a whole weight."""
        block = self.block_of((shape[0], shape[1]))
        return -(-shape[0] // block.rows), -(-shape[1] // block.columns)

    def dequantize(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Compute the float32 weight [N, K] from a checkpoint's values and scales.

        The last blocks of the weight may be smaller.
        """
        (n, k), block = values.shape, self.block_of(tuple(values.shape))
        of_rows = scales.float().repeat_interleave(block.rows, 0)[:n]
        return values.float() * of_rows.repeat_interleave(block.columns, 1)[:, :k]

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize a weight [N, K].

        Return values [N, K], and scales [ceil(N / rows), ceil(K / columns)]. The last blocks of the weight may be
        smaller.
        """
        rows, columns = self.block_of(tuple(weight.shape))
        parts = [self._quantize(part, rows, columns) for part in weight.split(-(-ROWS_AT_A_TIME // rows) * rows)]
        values, scales = zip(*parts)
        return torch.cat([part.view(torch.int8) for part in values]).view(self.dtype), torch.cat(scales)

    def _quantize(self, weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        n, k = weight.shape
        padded = nn.functional.pad(weight.float(), (0, -k % columns, 0, -n % rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # [n / rows, rows, k / columns, columns]
        scales = blocks.abs().amax((1, 3)) / self.max_value
        # blocks of zeros have a scale of 0, and the inverse of a scale must not be infinite
        values = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None, :, None]
        if not self.dtype.is_floating_point:
            values = values.round()
        limits = -self.max_value, self.max_value
        return values.clamp(*limits).to(self.dtype).flatten(2, 3).flatten(0, 1)[:n, :k], scales


def power_of_two(*sizes: int) -> int:
    """Return the largest power of two that divides all sizes."""
    divisor = math.gcd(*sizes)
    return divisor & -divisor


@operation
def dequantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `values` [..., N, K] times `scales` [..., N / rows, K / columns] in `dtype`."""
    rows, columns = (a // b for a, b in zip(values.shape[-2:], scales.shape[-2:]))
    blocks = values.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).float()
    return (blocks * scales[..., :, None, :, None]).to(dtype).flatten(-2, -1).flatten(-3, -2)


@operation
def min_block_columns(values: torch.Tensor) -> int:
    """Kernels for several rows need a minimum number of inputs per scale. Return this minimum."""
    return 1


class ScaledWeight:
    """Holds the parameters of a layer's 8-bit weight, and their loaders.

    `values` is [..., N, K], and `scales` is [..., N / rows, K / columns]. If the checkpoint has no scales, `scales` is
    a tensor, not a parameter.

    `select` takes the arguments of a `weight_loader`. `select` returns a shard of the checkpoint's weight, and the
    index of the shard's matrix in the stack. If there is only one matrix, the index is (). If the shard belongs to
    another rank, `select` returns None.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        scheme: QuantScheme,
        block: Block,
        select: Callable[..., tuple[Shard, tuple[int, ...]] | None],
    ):
        *stack, n, k = shape
        self.scheme, self.block, self.select = scheme, block, select
        self.values = parameter(shape, self._load_values, scheme.dtype)
        shape = (*stack, n // block.rows, k // block.columns)
        if scheme.scale_name is None:  # nothing loads these scales, so they need no loader
            self.scales = torch.empty(shape, dtype=torch.float32)
        else:
            self.scales = parameter(shape, self._load_scales, torch.float32)

    def _load_values(self, values: torch.Tensor, weight, *arguments) -> torch.Tensor | None:
        """Load a shard of a checkpoint's values, or quantize a weight.

        The result contains NaN if the weight contains NaN.
        """
        if (selected := self.select(*arguments)) is None:
            return None
        shard, index = selected
        if self.must_quantize(weight):
            return self.quantize_shard(check_shape(weight, shard.shape)[...], shard, index)
        found, needed = weight.get_dtype(), QUANTIZED_DTYPES[self.scheme.dtype]
        if found != needed:
            raise ValueError(f"the checkpoint has dtype {found}, its quantization_config needs {needed}")
        return _nan_of(shard.copy(values[index], weight))

    def must_quantize(self, weight) -> bool:
        """Return whether a weight has no scales.

        A weight without scales may be random, or come from a trainer or an unquantized file.
        """
        return callable(weight) or isinstance(weight, torch.Tensor) or self.scheme.scale_name is None

    def quantize_shard(self, weight: torch.Tensor, shard: Shard, index: tuple[int, ...]) -> torch.Tensor:
        """Quantize a whole weight, because blocks may be larger than shards.

        Copy this rank's shard of the quantized weight, and return the shard's scales.
        """
        # always on this device, because CUDA may round quotients differently than a CPU
        values, scales = self.scheme.quantize(weight.to(self.values.device))
        shard.copy(self.values[index], values)
        return self._copy_scales(scales, shard, index)

    def _load_scales(self, scales: torch.Tensor, weight, *arguments) -> torch.Tensor | None:
        if callable(weight) or (selected := self.select(*arguments)) is None:
            return None  # random weights are quantized, which also computes their scales
        return self._copy_scales(weight[...], *selected)

    def _copy_scales(self, scales: torch.Tensor, shard: Shard, index: tuple[int, ...]) -> torch.Tensor:
        """Copy the scales of a shard, and return the copy. `scales` contains the scales of the whole weight."""
        (n, k), block = shard.shape, self.scheme.block_of(shard.shape)
        needed = self.scheme.scales_shape(shard.shape)
        if scales.numel() != needed[0] * needed[1]:
            raise ValueError(f"the checkpoint has scales of shape {list(scales.shape)}, the model needs {list(needed)}")
        scales, copied = scales.reshape(needed), []
        for part in shard.parts:
            own_rows, own_columns = range(n)[part.rows], range(k)[part.columns]
            rows = [row // block.rows for row in own_rows[:: self.block.rows]]
            columns = [column // block.columns for column in own_columns[:: self.block.columns]]
            target = self.scales[index].narrow(0, part.first_row // self.block.rows, len(rows))
            copied.append(target.copy_(scales[_slice_of(rows)][:, _slice_of(columns)]))
        return torch.cat(copied)


def _slice_of(indices: list[int]) -> slice | list[int]:
    """Return a slice if the indices are consecutive.

    A list of indices would be copied to the device, and the host would wait for the copy.
    """
    begin, end = indices[0], indices[-1] + 1
    return slice(begin, end) if indices == list(range(begin, end)) else indices


def _nan_of(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor with one element, which is NaN if any of `values` is NaN. PyTorch has no `aminmax` for float8."""
    if values.dtype == torch.int8:
        return torch.zeros(1, device=values.device)
    has_nan = (values.view(torch.uint8) & 0x7F).amax() == 0x7F
    return torch.where(has_nan, torch.nan, 0.0).reshape(1)
