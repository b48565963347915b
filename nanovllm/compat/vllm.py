"""vLLM's interface for offline generation on top of ours: `from nanovllm.compat.vllm import LLM, SamplingParams`.

After `install()`, `import vllm` and imports from the modules of vLLM in MODULES find this file, for programs that have
no setting for the engine. Names that are missing here are an ImportError or an AttributeError.
"""

import gc
import socket
import sys
from dataclasses import dataclass
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from typing import Any

from nanovllm.compat.params import (
    BeamSearchParams,
    FlatLogprobs,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from nanovllm.compat.vllm_llm import LLM, BeamSearchOutput, BeamSearchSequence
from nanovllm.compat.vllm_settings import select
from nanovllm.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.requests.request import Prompt, TextPrompt, TokensPrompt
from nanovllm.utils.loader import find_tokenizer

__version__ = "0.26.0"  # of vLLM, whose names these are
MODULES = (
    "config distributed distributed.weight_transfer distributed.weight_transfer.nccl_engine entrypoints "
    "entrypoints.llm exceptions inputs logprobs lora lora.request outputs renderers renderers.hf sampling_params "
    "tokenizers utils utils.network_utils"
)
GuidedDecodingParams = StructuredOutputsParams
PromptType = Prompt
StructuredOutputsConfig = dict
VLLMValidationError = ValueError


@dataclass
class LoRARequest:
    """A request for an adapter, which can be imported and made, but which `LLM.generate` refuses."""

    lora_name: str = ""
    lora_int_id: int = 0
    lora_path: str = ""


class NCCLWeightTransferEngine:
    """What sends weights to vLLM's server. TRL imports it in any case; here it does nothing but raise."""

    def __init__(self, *args: Any, **options: Any):
        raise NotImplementedError("weights are sent by NCCL to vLLM's server only: here, call LLM.load_weights")

    trainer_init = trainer_send_weights = __init__


NCCLTrainerSendWeightsArgs = NCCLWeightTransferEngine


def get_ip() -> str:
    """The address of this machine, as its own name resolves."""
    return socket.gethostbyname(socket.gethostname())


def get_tokenizer(tokenizer_name: str, **options: Any) -> Any:
    """transformers' tokenizer of a folder, a hub id or a bundled model, with options of its `from_pretrained`."""
    from transformers import AutoTokenizer

    unused: dict = dict.fromkeys(("download_dir", "revision"), (None,))
    unused |= {"tokenizer_mode": ("auto",), "trust_remote_code": (bool, None)}
    options = select("argument", options, [*options.keys() - unused], unused)
    return AutoTokenizer.from_pretrained(find_tokenizer(tokenizer_name, Path()), **options)


def resolve_chat_template(
    tokenizer: Any, chat_template: str | None = None, tools: list[dict] | None = None, *, model_config: Any = None
) -> str | None:
    """The given chat template, or that of the tokenizer; None if it has none."""
    try:
        return tokenizer.get_chat_template(chat_template, tools=tools)
    except ValueError:
        return None


def cleanup_dist_env_and_memory(*args: Any) -> None:
    gc.collect()


class VllmDistribution(Distribution, DistributionFinder):
    """Tells `importlib.metadata` the version of vLLM."""

    def read_text(self, filename: str) -> str | None:
        return f"Name: vllm\nVersion: {__version__}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(self, context: Any = None) -> list[Distribution]:
        return [self] if context is not None and context.name == "vllm" else []


def install() -> None:
    """Make this file what `import vllm` finds in this process, with the modules in MODULES."""
    module = sys.modules[__name__]
    sys.modules.update(dict.fromkeys(["vllm", *(f"vllm.{name}" for name in MODULES.split())], module))
    sys.meta_path.insert(0, VllmDistribution())
