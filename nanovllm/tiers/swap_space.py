"""Checks the settings `swap_space` and `swap_dir` before the model is loaded."""

from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.models import cpu_memory

if TYPE_CHECKING:
    from nanovllm.config import Config


def check_swap_space(config: "Config") -> None:
    """Raise ValueError if other settings don't allow `swap_space` or `swap_dir`, or if the host has too little memory.

    Raises TypeError if `swap_dir` is not a string.
    """
    if config.swap_dir is not None:
        check_swap_dir(config)
    given = f"swap_space={config.swap_space:g}"
    if not config.enable_prefix_caching:
        reason = "enable_prefix_caching=False" if config.pooling is None else f"task={config.task!r}"
        raise ValueError(f"{given}: must be 0 with {reason}, because only the prefix cache uses it")
    if config.swap_space * 2**30 > (memory := cpu_memory()):
        raise ValueError(f"{given}: this machine, or its container, has {memory / 2**30:.1f} GiB of memory")


def check_swap_dir(config: "Config") -> None:
    given = f"swap_dir={config.swap_dir!r:.200}"
    if not isinstance(config.swap_dir, str):
        raise TypeError(f"{given}: must be a string, the path of a folder")
    if not config.swap_dir:
        raise ValueError(f"{given}: must be the path of a folder")
    if not config.swap_space:
        raise ValueError(f"{given}: needs swap_space, because blocks are read into host memory first")
    try:
        exists = (path := Path(config.swap_dir).expanduser()).exists()
    except (OSError, RuntimeError) as error:  # the path is too long, or begins with "~" and an unknown user
        raise ValueError(f"{given}: can't be used ({error!s:.80})") from error
    if exists and not path.is_dir():
        raise ValueError(f"{given}: is not a folder")
