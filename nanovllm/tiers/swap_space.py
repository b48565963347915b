"""Checks the setting `swap_space` before the model is loaded."""

from typing import TYPE_CHECKING

from nanovllm.models import cpu_memory

if TYPE_CHECKING:
    from nanovllm.config import Config


def check_swap_space(config: "Config") -> None:
    """Raise ValueError if the other settings rule out `swap_space`, or if the host has less memory."""
    given = f"swap_space={config.swap_space:g}"
    if not config.enable_prefix_caching:
        reason = "enable_prefix_caching=False" if config.pooling is None else f"task={config.task!r}"
        raise ValueError(f"{given}: must be 0 with {reason}, because only the prefix cache uses it")
    if config.swap_space * 2**30 > (memory := cpu_memory()):
        raise ValueError(f"{given}: this machine, or its container, has {memory / 2**30:.1f} GiB of memory")
