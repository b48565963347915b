"""Triton kernels behind functions on tensors, which know nothing of layers."""

import importlib
import importlib.util
from functools import cache
from types import ModuleType

import torch


def triton_ops(x: torch.Tensor) -> ModuleType | None:
    """The kernels that replace plain PyTorch for `x`; None if `x` is not on CUDA or Triton is missing."""
    return _ops() if x.is_cuda else None


@cache
def _ops() -> ModuleType | None:
    return importlib.import_module("nanovllm.kernels.ops") if importlib.util.find_spec("triton") else None
