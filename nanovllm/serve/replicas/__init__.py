"""Several engines behind one call or one address, as actors of Ray. Nothing outside of this folder imports it by name
but the command line.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.serve.replicas.ray_data import NanoVLLM
    from nanovllm.serve.replicas.ray_llm import RayLLM

__all__ = ["NanoVLLM", "RayLLM"]


def __getattr__(name: str) -> Any:
    """Import when it is used: RayLLM needs the extra `ray`, the routing and a replica itself do not."""
    if name == "RayLLM":
        from nanovllm.serve.replicas.ray_llm import RayLLM

        return RayLLM
    if name == "NanoVLLM":
        from nanovllm.serve.replicas.ray_data import NanoVLLM

        return NanoVLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
