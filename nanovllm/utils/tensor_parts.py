"""Splits tensors into messages, which are sent to other ranks."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch


class TensorPart(NamedTuple):
    """Describes a message that contains `num_bytes` bytes of a tensor, from byte `begin` on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    num_bytes: int

    def join(self, words: np.ndarray, incoming: dict[Any, Any]) -> torch.Tensor | None:
        """Copy the part to `incoming`. After the last part, return the complete tensor."""
        if self.begin == 0:
            size = math.prod(self.shape) * self.dtype.itemsize
            incoming[self.name] = np.empty(size, np.uint8)
        data, end = incoming[self.name], self.begin + self.num_bytes
        data[self.begin : end] = words.view(np.uint8)[: self.num_bytes]
        if end < len(data):
            return None
        return torch.from_numpy(incoming.pop(self.name)).view(self.dtype).view(self.shape)


def parts_of(name: str, tensor: torch.Tensor, max_bytes: int) -> Iterator[tuple[TensorPart, np.ndarray]]:
    """Split a tensor into messages of at most `max_bytes` bytes.

    Yields each part and its bytes, which are packed into int32 words.
    """
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    for begin in range(0, len(data), max_bytes):
        part = data[begin : begin + max_bytes]
        words = np.pad(part, (0, -len(part) % 4)).view(np.int32)
        yield TensorPart(name, tensor.dtype, tuple(tensor.shape), begin, len(part)), words
