"""Stores, loads and dequantizes 4-bit weights from checkpoints of any format.

A weight [N, K] consists of 4-bit codes for values. A value is an integer ("int4") or a floating-point number ("e2m1").
An e2m1 number has two exponent bits and one mantissa bit (OCP Microscaling Formats 1.0). In a row of the weight, each
group of adjacent values shares a scale and, in some formats, a zero point. The weight that a code stands for is
(value - zero) * scale.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import operation
from nanovllm.quantization.scaled import ROWS_AT_A_TIME, power_of_two
from nanovllm.utils.dummy_weights import BOUND
from nanovllm.utils.loader import Shard, check_shape, parameter

CHUNK = 128  # inputs in 16 adjacent words: bits 4 j to 4 j + 3 of word i hold the code of input 16 j + i
MIDDLE = 8  # the zero point of integers without stored zero points
VALUES = {
    "int4": torch.arange(16.0),
    "e2m1": torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]),
}
DUMMY = {"scales": 2.0**-8, "zeros": MIDDLE, "row_scales": 1.0}  # every scale format contains 2^-8


class Packed(NamedTuple):
    """Holds the tensors of a 4-bit weight [N, K], or of a stack of 4-bit weights [..., N, K]."""

    words: torch.Tensor  # [N, 16 * ceil(K / CHUNK)] int32, each with eight codes; padded with arbitrary codes
    scales: torch.Tensor  # [N, groups]: a float dtype of the model, float8_e4m3fn or float8_e8m0fnu
    zeros: torch.Tensor | None  # [N, groups] uint8; None: MIDDLE for integers, 0 for e2m1
    row_scales: torch.Tensor | None  # [N] float32, factors of whole rows; None: 1
    group_ids: torch.Tensor | None  # [K] int32, the group of each input; None: groups are contiguous
    codes: str  # a key of VALUES
    k: int
    group_size: int

    @property
    def device(self) -> torch.device:
        return self.words.device

    def of(self, index: int) -> "Packed":
        return self._replace(**{name: x[index] for name, x in zip(self._fields, self[:5]) if x is not None})


@dataclass(frozen=True)
class PackedScheme:
    """Describes a 4-bit weight, and the tensors that store it in a checkpoint.

    tensors: a tuple (name, field of Packed, reader) for each tensor in the checkpoint. `name` is the end of the
    tensor's name. The `reader` of the field `words` converts the tensor of a whole weight to codes [N, K]. The other
    readers convert a tensor to the field's shape. The field "contiguous" stands for a tensor of group ids that is only
    checked: the groups must be contiguous. If `tensors` is empty, the checkpoint has 16-bit weights, and they are
    quantized while they are loaded.
    """

    codes: str
    group_size: int | None  # inputs that share a scale; None: all
    tensors: tuple[tuple[str, str, Callable[[torch.Tensor], torch.Tensor]], ...] = ()
    scale_dtype: torch.dtype | None = None  # None: the model's dtype
    dtype: ClassVar[torch.dtype] = torch.int32  # of the packed values
    scale_name: ClassVar[None] = None
    bits: ClassVar[int] = 4

    @property
    def quantizes(self) -> bool:
        return not self.tensors


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpack integers to uint8 codes along the last dimension, low bits first."""
    if packed.is_floating_point():
        raise ValueError(f"the checkpoint has dtype {str(packed.dtype)[6:]}, packed 4-bit values must be integers")
    values = packed.reshape(-1).view(torch.uint8)
    return torch.stack((values & 15, values >> 4), -1).view(*packed.shape[:-1], -1)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes [N, K] into the words of Packed."""
    codes = F.pad(codes, (0, -codes.shape[1] % CHUNK)).view(len(codes), -1, 4, 2, 16)
    pairs = codes[:, :, :, 0] | codes[:, :, :, 1] << 4  # [N, chunks, 4, 16]: the bytes of a word
    return pairs.transpose(2, 3).contiguous().view(torch.int32).flatten(1)


def unpack(words: torch.Tensor, k: int) -> torch.Tensor:
    """Unpack the words of Packed to codes [N, K] uint8."""
    codes = nibbles(words).unflatten(1, (-1, 16, 8))  # [N, chunks, word, code]
    return codes.transpose(2, 3).flatten(1)[:, :k]


@operation
def dequantize_packed(weight: Packed, dtype: torch.dtype) -> torch.Tensor:
    """Return a Packed weight [N, K] in `dtype`. Stacks of weights are not supported."""
    columns = weight.group_ids
    if columns is None:
        columns = torch.arange(weight.k, device=weight.device) // weight.group_size
    values = VALUES[weight.codes].to(weight.device)[unpack(weight.words, weight.k).long()]
    if weight.zeros is not None:
        values -= weight.zeros.float()[:, columns]
    elif weight.codes == "int4":
        values -= MIDDLE
    values *= weight.scales.float()[:, columns]
    return (values if weight.row_scales is None else values * weight.row_scales[:, None]).to(dtype)


def quantize(weight: torch.Tensor, group_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Round a weight [N, K] to integers with zero points. Return words, scales in `dtype`, and zero points.

    The range of a group's integers covers the smallest weight of the group, the largest weight of the group, and 0. If
    any weight of a group is not finite, the group's scale is not finite.
    """
    parts = [_quantize(part, group_size, dtype) for part in weight.split(ROWS_AT_A_TIME)]
    return tuple(torch.cat(found) for found in zip(*parts))


def _quantize(weight: torch.Tensor, group_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    groups = weight.float().unflatten(1, (-1, group_size))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / 15).to(dtype)
    steps = scales.float().clamp(min=torch.finfo(dtype).tiny)  # a group of zeros has a scale of 0
    zeros = (-low / steps).round().clamp(0, 15).nan_to_num()
    codes = ((groups / steps[..., None]).round() + zeros[..., None]).clamp(0, 15).nan_to_num()
    return pack(codes.to(torch.uint8).flatten(1)), scales, zeros.to(torch.uint8)


class PackedWeight:
    """Holds the parameters that store a layer's 4-bit weight, and loads them.

    `parameters` maps each tensor's name in the checkpoint to a parameter. The class ScaledWeight describes `select`.
    Raise ValueError if one group contains inputs of two ranks.
    """

    advice = "use fewer ranks"  # the end of this error's message

    def __init__(self, shape: tuple[int, ...], scheme: PackedScheme, shards: list[Shard], select: Callable):
        *stack, n, k = shape
        whole_k, self.columns = shards[0].shape[1], shards[0].parts[0].columns  # all shards have the same inputs
        self.scheme, self.select = scheme, select
        fields = {field for _, field, _ in scheme.tensors} or {"words", "zeros"}
        first = range(whole_k)[self.columns].start
        size = scheme.group_size or k
        if scheme.quantizes and (size := power_of_two(size, k)) < 16:  # kernels need groups of at least 16 inputs
            size = k
        self.num_groups, self.first_group = k // size, first // size if scheme.group_size else 0
        if "group_ids" in fields:  # an input may be in any group, so every rank needs the scales of all groups
            self.num_groups, self.first_group = whole_k // size, 0
        if whole_k % size or (size % 16 and self.num_groups > 1):
            raise ValueError(
                f"its {whole_k} inputs are divided into groups of {size}: must be a multiple of 16, and a divisor"
            )
        if "group_ids" not in fields and ((first % size and scheme.group_size) or k % size):
            raise ValueError(
                f"this rank has inputs {first} to {first + k - 1} of {whole_k}, which can't be divided into groups of "
                f"{size}: {self.advice}"
            )

        def make(field: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor | None:
            if field in fields or field == "scales":
                return parameter((*stack, *shape), lambda *_: None, dtype).data
            return None

        self.packed = Packed(
            make("words", (n, -(-k // CHUNK) * (CHUNK // 8)), torch.int32),  # type: ignore[arg-type]
            make("scales", (n, self.num_groups), scheme.scale_dtype),  # type: ignore[arg-type]
            make("zeros", (n, self.num_groups), torch.uint8),
            make("row_scales", (n,), torch.float32),
            make("group_ids", (k,), torch.int32),
            *(scheme.codes, k, size),
        )
        if self.packed.group_ids is not None:
            self.packed.group_ids.fill_(-1)
        self.parameters = {name: nn.Parameter(torch.empty(0), requires_grad=False) for name in self._fields()}
        self.move_to(self.packed)
        if scheme.quantizes:
            self.parameters["weight"].weight_loader = self._quantize  # type: ignore[attr-defined]
        for name, field, reader in scheme.tensors:
            self.parameters[name].weight_loader = partial(self._load, field, reader)  # type: ignore[attr-defined]

    def move_to(self, packed: Packed) -> None:
        """Make the parameters and their loaders use the tensors of `packed`.

        The new tensors must have the old tensors' shapes.
        """
        self.packed = packed
        for name, field in self._fields().items():
            if (data := getattr(packed, field, None)) is not None:
                self.parameters[name].data = data

    def _fields(self) -> dict[str, str]:
        """Map the name of each parameter to a field of Packed."""
        return {name: field for name, field, _ in self.scheme.tensors} or {"weight": "words"}

    def _quantize(self, _: torch.Tensor, weight, *arguments) -> torch.Tensor | None:
        """Quantize a shard of a 16-bit weight, and return the shard's scales."""
        if (selected := self.select(*arguments)) is None:
            return None
        shard, index = selected
        weight, filled = check_shape(weight, shard.shape)[...].to(self.packed.device), []
        for part in shard.parts:
            quantized = quantize(weight[part.rows, part.columns], self.packed.group_size, self.packed.scales.dtype)
            filled += [_copy(x, index, part, data) for x, data in zip(self.packed, quantized)]
        return torch.cat(filled[1::3])

    def _load(self, field: str, read: Callable, _: torch.Tensor, weight, *arguments) -> torch.Tensor | None:
        """Load this rank's shard of a tensor of the checkpoint."""
        if (selected := self.select(*arguments)) is None:
            return None
        shard, index = selected
        (n, k), target = shard.shape, getattr(self.packed, field, None)
        shapes = {"words": (n, k), "row_scales": (1,), "group_ids": (k,), "contiguous": (k,)}
        shape = shapes.get(field, (n, k // (self.scheme.group_size or k)))
        data = self._random(field, weight, shape) if callable(weight) else read(weight[...].to(self.packed.device))
        if field in ("scales", "row_scales") and not data.is_floating_point():
            raise ValueError(f"the checkpoint has dtype {str(data.dtype)[6:]}, scales must be floating-point numbers")
        data = check_shape(data.reshape(-1) if field == "row_scales" else data, shape)
        if field in ("contiguous", "group_ids"):
            return self._load_groups(target, index, data[self.columns])
        groups, filled = slice(self.first_group, self.first_group + self.num_groups), []
        for part in shard.parts:
            if field == "words":
                own = pack(data[part.rows, part.columns])
            else:
                own = data.expand(n)[part.rows] if field == "row_scales" else data[part.rows, groups]
            filled.append(_copy(target, index, part, own).float())
        return torch.cat(filled) if field in ("scales", "row_scales") else None

    def _load_groups(self, target: torch.Tensor | None, index: tuple[int, ...], ids: torch.Tensor) -> None:
        """Load the group id of each input. If there is no `target`, check that the groups are contiguous."""
        if target is None:
            first = torch.arange(len(ids), device=ids.device) // self.packed.group_size
            if not torch.equal(first + self.first_group, ids.long()):
                raise ValueError("its groups are not contiguous, although quantization_config says so")
            return
        if ids.min() < 0 or ids.max() >= self.num_groups:
            raise ValueError(f"has groups {ids.min()} to {ids.max()}: must be in 0 to {self.num_groups - 1}")
        if target[index].min() >= 0 and not torch.equal(target[index], ids.to(target.dtype)):
            raise ValueError("differs from the groups of a part that is merged with it: this is not supported")
        target[index].copy_(ids)

    def _random(self, field: str, weight: Callable, shape: tuple[int, ...]) -> torch.Tensor:
        """Return dummy data for `field`: random codes, equal scales, equal zero points, or contiguous groups."""
        if field == "words":
            return ((weight(shape).float() / BOUND + 1) * 8).clamp(0, 15).to(torch.uint8)
        if field in DUMMY:
            dtype = getattr(self.packed, field).dtype
            return torch.full(shape, DUMMY[field]).to(dtype).to(self.packed.device)
        return torch.arange(shape[0], device=self.packed.device) // self.packed.group_size


def _copy(target: torch.Tensor | None, index: tuple[int, ...], part: Shard, data: torch.Tensor) -> torch.Tensor:
    assert target is not None
    filled = target[index].narrow(0, part.first_row, len(data))
    if data.dtype == target.dtype and data.element_size() == 1:  # not every device copies 8-bit floats
        filled.view(torch.uint8).copy_(data.view(torch.uint8))
        return filled
    return filled.copy_(data)
