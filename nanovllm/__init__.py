"""nano-vllm: compact LLM inference. `LLM(model).generate(prompts, SamplingParams(...))`."""

from nanovllm.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.engine.request import TextPrompt, TokensPrompt
from nanovllm.engine.scheduling_policy import SchedulingPolicy
from nanovllm.llm import LLM
from nanovllm.sampling_params import BeamSearchParams, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SchedulingPolicy",
    "TextPrompt",
    "TokensPrompt",
]
