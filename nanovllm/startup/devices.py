"""Whether the CUDA devices that the settings name are there."""

import torch


def check_devices(name: str, number: str, num_ranks: int) -> None:
    """ValueError unless there is a device `name`, which ends in `number` or has none, and one for each further rank."""
    count = torch.cuda.device_count()
    if not (number.isdecimal() or not number) or int(number or 0) >= count:
        raise ValueError(f"device={name!r}: there are {count} CUDA devices here; 'cpu' needs none")
    if num_ranks > (left := count - int(number or 0)):
        raise ValueError(f"tensor_parallel_size={num_ranks}: must be at most {left}, the devices from {name!r} on")
