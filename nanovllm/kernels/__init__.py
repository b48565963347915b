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
def has_fp8_units(device: torch.device) -> bool:
    """Whether the device converts and multiplies e4m3: GPUs from compute capability 8.9 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def _ops() -> ModuleType | None:
    return importlib.import_module("nanovllm.kernels.ops") if importlib.util.find_spec("triton") else None
