"""Reads the matrices of an adapter from its safetensors file."""

from pathlib import Path
from typing import Any

import torch

PREFIX = "base_model.model."  # PEFT's name of the base model
MATRICES = ".lora_A.weight", ".lora_B.weight"
FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16


class AdapterTensors:
    """Reads the tensors in an adapter's file. Methods raise a ValueError that names the file and the tensor."""

    def __init__(self, file: Path, tensors: Any, dtype: torch.dtype):
        """tensors: the open file. dtype: the dtype of the matrices that `pair` returns."""
        self.file, self.dtype, self._tensors = file, dtype, tensors
        self.names = dict.fromkeys(tensors.keys())  # in order

    def shapes(self, module: str) -> list[list[int]]:
        """Return the shapes of the matrices A and B of a module."""
        return [self._tensors.get_slice(self._name(module, kind)).get_shape() for kind in MATRICES]

    def pair(
        self, module: str, a: tuple[int, int], b: tuple[int, int], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the matrix A of a module, and the matrix B times `scale`. A and B must have the shapes `a` and `b`."""
        name_a, name_b = (self._name(module, kind) for kind in MATRICES)
        return self._read(name_a, a, 1.0), self._read(name_b, b, scale)

    def _name(self, module: str, kind: str) -> str:
        if (name := PREFIX + module + kind) not in self.names:
            raise ValueError(f"{self.file}: {name} is missing")
        return name

    def _read(self, name: str, shape: tuple[int, int], scale: float) -> torch.Tensor:
        matrix = self._tensors.get_tensor(name)
        if tuple(matrix.shape) != shape:
            raise ValueError(f"{self.file}: {name}: has shape {list(matrix.shape)}: must be {list(shape)}")
        if matrix.dtype not in FLOATS:
            known = ", ".join(str(known).removeprefix("torch.") for known in FLOATS)
            raise ValueError(
                f"{self.file}: {name}: has dtype {str(matrix.dtype).removeprefix('torch.')}: must be one of {known}"
            )
        matrix = (matrix.float() * scale).to(self.dtype)
        if not matrix.isfinite().all():
            raise ValueError(f"{self.file}: {name}: is NaN or infinite in {str(self.dtype).removeprefix('torch.')}")
        return matrix
