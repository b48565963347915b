"""Stores the rank and the dtype of the layers that are being constructed."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from nanovllm.utils.tensor_parallel import TensorParallel


class Construction(NamedTuple):
    tp: TensorParallel = TensorParallel()
    dtype: torch.dtype | None = None  # of weights; None: PyTorch's default
    is_quantized: bool = False  # linear layers and experts use no memory until their weight format allocates it


_ALONE = Construction()
_construction: ContextVar[Construction] = ContextVar("construction of layers", default=_ALONE)


def get_construction() -> Construction:
    return _construction.get()


@contextmanager
def constructing(tp: TensorParallel, dtype: torch.dtype | None = None, is_quantized: bool = False) -> Iterator[None]:
    token = _construction.set(Construction(tp, dtype, is_quantized))
    try:
        yield
    finally:
        _construction.reset(token)
