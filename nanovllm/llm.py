"""The name that people import."""
from nanovllm.engine.llm_engine import LLMEngine


class LLM(LLMEngine):
    """An engine for offline generation: `LLM(model, **settings).generate(prompts, sampling_params)`."""
