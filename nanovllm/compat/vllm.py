"""Implements vLLM's interface for offline generation.

Import names from this module, for example `from nanovllm.compat.vllm import LLM, SamplingParams`. If a program imports
vLLM itself, call `install()` first. After `install()`, `import vllm` returns this module. Importing a submodule of vLLM
that is listed in MODULES also returns this module. The use of a name that this module lacks raises ImportError or
AttributeError.
"""

import gc
import socket
import sys
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
from nanovllm.compat.vllm_pooling import PoolingParams, PoolingRequestOutput
from nanovllm.compat.vllm_settings import select
from nanovllm.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.lora.lora_request import LoRARequest
from nanovllm.requests.request import Prompt, TextPrompt, TokensPrompt
from nanovllm.utils.model_files import find_tokenizer

__version__ = "0.26.0"  # the version of vLLM whose names are used here
MODULES = (
    "config distributed distributed.weight_transfer distributed.weight_transfer.nccl_engine entrypoints "
    "entrypoints.llm exceptions inputs logprobs lora lora.request outputs pooling_params renderers renderers.hf "
    "sampling_params tokenizers utils utils.network_utils"
)
EmbeddingRequestOutput = ClassificationRequestOutput = ScoringRequestOutput = PoolingRequestOutput
GuidedDecodingParams = StructuredOutputsParams
PromptType = Prompt
StructuredOutputsConfig = dict
VLLMValidationError = ValueError


class NCCLWeightTransferEngine:
    """A placeholder that raises an error if it is used. In vLLM, this class sends weights to a server.

    TRL always imports it.
    """

    def __init__(self, *args: Any, **options: Any):
        raise NotImplementedError("weights are sent by NCCL to vLLM's server only: here, call LLM.load_weights")

    trainer_init = trainer_send_weights = __init__


NCCLTrainerSendWeightsArgs = NCCLWeightTransferEngine


def get_ip() -> str:
    """Resolve the host name of this machine to an IP address."""
    return socket.gethostbyname(socket.gethostname())


def get_tokenizer(tokenizer_name: str, **options: Any) -> Any:
    """Return the tokenizer of a model. `tokenizer_name` is a folder, a hub id or the name of a bundled model.

    `options` are passed to `from_pretrained`.
    """
    from transformers import AutoTokenizer

    unused: dict = dict.fromkeys(("download_dir", "revision"), (None,))
    unused |= {"tokenizer_mode": ("auto",), "trust_remote_code": (bool, None)}
    options = select("argument", options, [*options.keys() - unused], unused)
    return AutoTokenizer.from_pretrained(find_tokenizer(tokenizer_name, Path()), **options)


def resolve_chat_template(
    tokenizer: Any, chat_template: str | None = None, tools: list[dict] | None = None, *, model_config: Any = None
) -> str | None:
    try:
        return tokenizer.get_chat_template(chat_template, tools=tools)
    except ValueError:
        return None


def cleanup_dist_env_and_memory(*args: Any) -> None:
    gc.collect()


class VllmDistribution(Distribution, DistributionFinder):
    def read_text(self, filename: str) -> str | None:
        return f"Name: vllm\nVersion: {__version__}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(self, context: Any = None) -> list[Distribution]:
        return [self] if context is not None and context.name == "vllm" else []


def install() -> None:
    """Make this module the result of `import vllm`, and of imports of the submodules in MODULES."""
    module = sys.modules[__name__]
    sys.modules.update(dict.fromkeys(["vllm", *(f"vllm.{name}" for name in MODULES.split())], module))
    sys.meta_path.insert(0, VllmDistribution())
