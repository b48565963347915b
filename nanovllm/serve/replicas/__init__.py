"""Runs several engines as Ray actors. Callers use one Python object or one HTTP address for all engines.

README.md in this folder explains the design.
"""

from importlib import import_module
from typing import Any

from nanovllm.utils.waiting import waiting_for

MODULES = {"RayLLM": "ray_llm", "NanoVLLM": "ray_data", "PrefixRouter": "routing", "RoundRobin": "routing"}


def __getattr__(name: str) -> Any:
    """Import each class on first use, because RayLLM needs the package extra `ray`."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with waiting_for(f"Importing {name}"):
        return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
