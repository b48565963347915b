"""The model families by the `model_type` of their config.json; a family's module is imported when it is used.

A family is a module with a class that is constructed as `cls(config, max_len, backend, tp)` (ModelConfig, the longest
sequence, AttentionBackend, TensorParallel) and has:

- `packed_modules_mapping`: a checkpoint's module -> (the merged module that holds it, its shard id there)
- `config`, and `lm_head`, a ParallelLMHead
- `forward(token_ids, positions)`: [T] each -> hidden states [T, hidden_size]
- `compute_logits(hidden_states, sampling_params)`: `lm_head` of hidden states
"""

from importlib import import_module

MODELS = {"qwen3": "nanovllm.models.qwen3:Qwen3ForCausalLM"}


def model_class(model_type: str) -> type:
    module, name = MODELS[model_type].split(":")
    return getattr(import_module(module), name)
