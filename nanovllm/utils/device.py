"""The state of a device around our work on it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter, sleep

import numpy as np
import torch


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make `device` the current one, and suspend the caller's autocast, which would change our dtypes."""
    kind = device.type
    current = torch.cuda.device(device) if kind == "cuda" else nullcontext()
    with current, torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        yield


def zeros_on(device: torch.device, like: torch.Tensor) -> torch.Tensor:
    """A tensor of zeros with the shape and dtype of a tensor on the meta device."""
    if device.type == "cuda" or not like.nbytes:
        return torch.zeros_like(like, device=device)
    # the system maps pages of numpy's zeros on first use
    return torch.from_numpy(np.zeros(like.nbytes, np.uint8)).view(like.dtype).view(like.shape)


def becomes_idle(device: torch.device, timeout: float = 5.0) -> bool:
    """Whether the device's current stream is done within `timeout` seconds."""
    if device.type != "cuda":
        return True
    begin = perf_counter()
    with torch.cuda.device(device):
        while not torch.cuda.current_stream().query():
            if perf_counter() - begin > timeout:
                return False
            sleep(0.001)
    return True
