"""Triton kernels, each a function on tensors that knows nothing of layers."""

import importlib
import importlib.util
from functools import cache
from types import ModuleType

import torch


def triton_ops(x: torch.Tensor) -> ModuleType | None:
    """The kernels that stand in for plain PyTorch where `x` lives, or None: they are for CUDA, where Triton is."""
    return _ops() if x.is_cuda else None


@cache
def _ops() -> ModuleType | None:
    return importlib.import_module("nanovllm.kernels.ops") if importlib.util.find_spec("triton") else None
