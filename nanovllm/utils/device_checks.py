"""Checks that the devices in the settings exist."""

from collections.abc import Callable

import torch

from nanovllm.utils.checks import check_choice

# torch.device type, except "cpu" -> number of devices; a port to another accelerator adds an entry
DEVICES: dict[str, Callable[[], int]] = {"cuda": lambda: torch.cuda.device_count()}


def check_devices(name: str, num_ranks: int) -> None:
    """Raise ValueError if fewer than `num_ranks` devices exist from the device `name` on, such as "cuda:1"."""
    kind, _, number = name.partition(":")
    check_choice("device", kind, ("auto", "cpu", *DEVICES))
    count = DEVICES[kind]()
    if not (number.isdecimal() or not number) or int(number or 0) >= count:
        raise ValueError(f"device={name!r}: there are {count} {kind.upper()} devices here; 'cpu' needs none")
    if num_ranks > (left := count - int(number or 0)):
        raise ValueError(f"tensor_parallel_size={num_ranks}: must be at most {left}, the devices from {name!r} on")
