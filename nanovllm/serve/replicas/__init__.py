"""Several engines behind one call or one address, as Ray actors. README.md in this folder explains the design."""

from importlib import import_module
from typing import Any

MODULES = {"RayLLM": "ray_llm", "NanoVLLM": "ray_data", "PrefixRouter": "routing", "RoundRobin": "routing"}


def __getattr__(name: str) -> Any:
    """Import a class when it is used: RayLLM needs the extra `ray`, the others do not."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
