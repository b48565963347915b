"""nano-vllm: compact LLM inference. `LLM(model).generate(prompts, SamplingParams(...))`."""
from nanovllm.engine.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.llm import LLM
from nanovllm.sampling_params import BeamSearchParams, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "BeamSearchParams", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]
