"""Weights as 8-bit values times scales that blocks of them share: how they are stored, loaded and made.

A matrix [N, K] has values [N, K] and float32 scales [N / rows, K / columns], each for a block of rows x columns.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from nanovllm.delta_net.scattered_linear import RowRanges
from nanovllm.kernels import operation
from nanovllm.utils.loader import QUANTIZED_DTYPES, Shard, check_shape, parameter

ROWS_AT_A_TIME = 2048  # are quantized, as float32 takes four times the memory of the result


class Block(NamedTuple):
    """The part of a matrix that shares a scale."""

    rows: int
    columns: int


@dataclass(frozen=True)
class QuantScheme:
    """How a weight is quantized: in the checkpoint, or while it is loaded."""

    dtype: torch.dtype  # of the values: float8_e4m3fn or int8
    max_value: float  # what the largest value of a block becomes
    block_rows: int | None  # that share a scale in the checkpoint; None: all
    block_columns: int | None
    scale_name: str | None = None  # the end of the name of the checkpoint's scales; None: it is not quantized yet

    def block_of(self, shape: tuple[int, int]) -> Block:
        """The block of a whole weight of the checkpoint."""
        return Block(self.block_rows or shape[0], self.block_columns or shape[1])

    def local_block(self, shards: list[Shard], columns: int) -> Block:
        """The largest block, of powers of two, that no border of a shard cuts, for this rank's part of some weights.

        So ranks may cut a block of the checkpoint, whose scale then belongs to several smaller ones.
        """
        if self.block_columns is not None:
            columns = _power_of_two(self.block_columns, columns)
        if self.block_rows is None:  # weights that share a layer have different scales
            return Block(1, columns)
        parts = [part for shard in shards for part in _parts_of(shard)]
        return Block(_power_of_two(self.block_rows, *(len(range(p.shape[0])[p.rows]) for p in parts)), columns)

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [N, K], and scales [N / rows, K / columns] rounded up; the last blocks may be smaller."""
        rows, columns = self.block_of(tuple(weight.shape))
        parts = [self._quantize(part, rows, columns) for part in weight.split(-(-ROWS_AT_A_TIME // rows) * rows)]
        values, scales = zip(*parts)
        return torch.cat([part.view(torch.int8) for part in values]).view(self.dtype), torch.cat(scales)

    def _quantize(self, weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        n, k = weight.shape
        padded = nn.functional.pad(weight.float(), (0, -k % columns, 0, -n % rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # [n / rows, rows, k / columns, columns]
        scales = blocks.abs().amax((1, 3)) / self.max_value
        # zeros need no scale; and a scale must not be so small that its inverse is infinite
        values = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None, :, None]
        if not self.dtype.is_floating_point:
            values = values.round()
        limits = -self.max_value, self.max_value
        return values.clamp(*limits).to(self.dtype).flatten(2, 3).flatten(0, 1)[:n, :k], scales


def _power_of_two(*sizes: int) -> int:
    """The largest power of two that divides all sizes."""
    divisor = math.gcd(*sizes)
    return divisor & -divisor


@operation
def dequantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., N, K] in `dtype`, of values [..., N, K] and scales [..., N / rows, K / columns]."""
    rows, columns = (a // b for a, b in zip(values.shape[-2:], scales.shape[-2:]))
    blocks = values.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).float()
    return (blocks * scales[..., :, None, :, None]).to(dtype).flatten(-2, -1).flatten(-3, -2)


@operation
def min_block_columns(values: torch.Tensor) -> int:
    """How many inputs must share a scale where experts multiply several rows by such values."""
    return 1


class ScaledWeight:
    """Values [..., N, K] and scales [..., N / rows, K / columns] of a layer, as parameters that load themselves.

    Scales that the checkpoint does not have are no parameter.

    `select` tells for the arguments of a `weight_loader` which shard of a checkpoint's weight it is given, and the
    index of the matrix that the shard belongs to, () if there is only one; None if it belongs to another rank.
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
        if scheme.scale_name is None:  # a loader would refer to its parameter, and the runner deletes those of a layer
            self.scales = torch.empty(shape, dtype=torch.float32)
        else:
            self.scales = parameter(shape, self._load_scales, torch.float32)

    def _load_values(self, values: torch.Tensor, weight, *arguments) -> torch.Tensor | None:
        """A shard of a checkpoint's values, or of a weight that is quantized now; returns what tells NaN."""
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
        """Whether a weight has no scales: random numbers, a trainer's tensor, or one of an unquantized checkpoint."""
        return callable(weight) or isinstance(weight, torch.Tensor) or self.scheme.scale_name is None

    def quantize_shard(self, weight: torch.Tensor, shard: Shard, index: tuple[int, ...]) -> torch.Tensor:
        """Quantize a whole weight, as blocks may be larger than a rank's part, and copy a shard; returns its scales."""
        # wherever it comes from, by the arithmetic of one device: on CUDA, a quotient may be rounded otherwise
        values, scales = self.scheme.quantize(weight.to(self.values.device))
        shard.copy(self.values[index], values)
        return self._copy_scales(scales, shard, index)

    def _load_scales(self, scales: torch.Tensor, weight, *arguments) -> torch.Tensor | None:
        if callable(weight) or (selected := self.select(*arguments)) is None:
            return None  # random weights are quantized, which makes their scales
        return self._copy_scales(weight[...], *selected)

    def _copy_scales(self, scales: torch.Tensor, shard: Shard, index: tuple[int, ...]) -> torch.Tensor:
        """Copy a shard's part of the checkpoint's scales, [N / rows, K / columns] for the whole weight; return it."""
        (n, k), block = shard.shape, self.scheme.block_of(shard.shape)
        needed = -(-n // block.rows), -(-k // block.columns)
        if scales.numel() != needed[0] * needed[1]:
            raise ValueError(f"the checkpoint has scales of shape {list(scales.shape)}, the model needs {list(needed)}")
        scales, copied = scales.reshape(needed), []
        for part in _parts_of(shard):
            own_rows, own_columns = range(n)[part.rows], range(k)[part.columns]
            rows = [row // block.rows for row in own_rows[:: self.block.rows]]
            columns = [column // block.columns for column in own_columns[:: self.block.columns]]
            target = self.scales[index].narrow(0, part.first_row // self.block.rows, len(rows))
            copied.append(target.copy_(scales[_slice_of(rows)][:, _slice_of(columns)]))
        return torch.cat(copied)


def _parts_of(shard: Shard | RowRanges) -> list[Shard]:
    return shard.parts if isinstance(shard, RowRanges) else [shard]


def _slice_of(indices: list[int]) -> slice | list[int]:
    """A slice if they follow each other: a list is copied to the device, which has to be waited for."""
    begin, end = indices[0], indices[-1] + 1
    return slice(begin, end) if indices == list(range(begin, end)) else indices


def _nan_of(values: torch.Tensor) -> torch.Tensor:
    """A tensor with one element, which is NaN if a value is; PyTorch has no `aminmax` of float8."""
    if values.dtype == torch.int8:
        return torch.zeros(1, device=values.device)
    has_nan = (values.view(torch.uint8) & 0x7F).amax() == 0x7F
    return torch.where(has_nan, torch.nan, 0.0).reshape(1)
