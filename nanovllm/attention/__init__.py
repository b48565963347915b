"""The table of attention backends, and checks of the selected backend.

`base` contains the interface. Every other module in this package contains one backend, and is imported only if the
engine uses that backend.
"""

import importlib.util
from pkgutil import iter_modules, resolve_name
from typing import TYPE_CHECKING, Any

from nanovllm.utils.checks import check_choice

if TYPE_CHECKING:
    from nanovllm.config import Config

# a class or "module:class" for each value of `attention_backend`, except for "sdpa", which needs only PyTorch
NAMES = sorted({module.name for module in iter_modules(__path__)} - {"base", "sdpa"})
BACKENDS: dict[str, Any] = {name: f"{__name__}.{name}:{name.title()}Backend" for name in NAMES}


def backend_class(name: str) -> Any:
    home = f"{__name__}.sdpa:SDPABackend" if name == "sdpa" else BACKENDS[name]
    return resolve_name(home) if isinstance(home, str) else home


def resolve_backend(config: "Config", device: str) -> tuple[str, int]:
    """Return the backend's name, and a number that must divide `kvcache_block_size`.

    Raises ValueError if the backend can't run.
    """
    name, kv_cache_dtype = config.attention_backend, config.kv_cache_dtype
    check_choice("attention_backend", name, ("auto", *BACKENDS, "sdpa"))
    if config.batch_invariant:
        own = "sdpa" if device == "cpu" else "triton"
        check_choice("batch_invariant=True has its own backend: attention_backend", name, ("auto", own))
        if device == "cpu":  # with more ranks, gloo's order of summation depends on the batch size
            check_choice("batch_invariant=True: tensor_parallel_size", config.tensor_parallel_size, (1, 2))
        name = own
    if name == "auto":
        name = "triton" if device.startswith("cuda") and importlib.util.find_spec("triton") else "sdpa"
    if name == "sdpa":
        return name, 16
    backend = backend_class(name)
    if importlib.util.find_spec(backend.package) is None:
        raise ValueError(
            f"attention_backend={name!r}: the package {backend.package} is not installed ({backend.install})"
        )
    if (devices := backend.devices()) is not None and device.partition(":")[0] not in devices:
        raise ValueError(f"attention_backend={name!r}: needs device={' or '.join(map(repr, devices))}")
    if kv_cache_dtype not in backend.kv_cache_dtypes:
        accepted = " or ".join(map(repr, backend.kv_cache_dtypes))
        raise ValueError(f"kv_cache_dtype={kv_cache_dtype!r}: must be {accepted} for attention_backend={name!r}")
    return name, 64 if config.batch_invariant else backend.block_multiple  # a tile of 64 keys lies in one block


def check_head_dim(head_dim: int, device: str, backend: str) -> None:
    """Raise ValueError if the engine uses Triton kernels that do not support `head_dim`."""
    runs_kernels = backend == "triton" or (device.startswith("cuda") and importlib.util.find_spec("triton") is not None)
    if runs_kernels and (head_dim < 16 or head_dim & (head_dim - 1)):
        raise ValueError(f"head_dim={head_dim} of the model: must be a power of two from 16 on, unless device='cpu'")
