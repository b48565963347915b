"""nano-vllm: compact LLM inference. `LLM(model).generate(prompts, SamplingParams(...))`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from nanovllm.engine.scheduling_policy import SchedulingPolicy
    from nanovllm.features.beam_params import BeamSearchParams
    from nanovllm.llm import LLM
    from nanovllm.lora.lora_request import LoRARequest
    from nanovllm.requests.request import TextPrompt, TokensPrompt
    from nanovllm.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "BeamSearchParams", "SamplingParams", "SchedulingPolicy", "TextPrompt", "TokensPrompt"]
__all__ += ["CompletionOutput", "LoRARequest", "Logprob", "RequestMetrics", "RequestOutput"]
# modules that a plain `generate` imports come first
HOMES = ["sampling_params", "engine.outputs", "requests.request", "engine.scheduling_policy", "llm"]
HOMES += ["features.beam_params", "lora.lora_request"]


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` on first use, so that `--help` of commands does not import PyTorch."""
    from nanovllm.utils.waiting import waiting_for

    if name in __all__:
        with waiting_for(f"Importing {name}"):
            for home in HOMES:
                if hasattr(module := import_module(f"nanovllm.{home}"), name):
                    return globals().setdefault(name, getattr(module, name))  # `__getattr__` is then not called again
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
