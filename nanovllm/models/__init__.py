"""The model families: which module and class computes a checkpoint. A module is imported when its family is used.

The class of a family is constructed as `cls(config, max_len, backend, tp)` (ModelConfig, the longest sequence,
AttentionBackend, TensorParallel). CONTRIBUTING.md shows how to add one. It has:

- `read_config(raw, file)`: the content of config.json -> the fields of ModelConfig that depend on the family, as a
  dict. ValueError that names `file` for a model that the class can't compute
- `hidden_acts`: the values of `hidden_act` in config.json that the class computes
- `packed_modules_mapping`: a checkpoint's module -> (the merged module that holds it, its shard id there)
- `config`, and `lm_head`, a ParallelLMHead
- `forward(token_ids, positions)`: [T] each -> hidden states [T, hidden_size]
- `compute_logits(hidden_states, sampling_params)`: `lm_head` of hidden states

Linear layers and experts take `config.linear_dtype`, so that their weights may have another format (quantization/).
All else takes `config.dtype`.
"""

from pathlib import Path
from pkgutil import resolve_name

# `model_type` in config.json -> module:class, where the class has the name that transformers gives the architecture
MODELS = {
    "llama": "nanovllm.models.llama:LlamaForCausalLM",
    "mistral": "nanovllm.models.mistral:MistralForCausalLM",
    "qwen2": "nanovllm.models.qwen2:Qwen2ForCausalLM",
    "qwen3": "nanovllm.models.qwen3:Qwen3ForCausalLM",
    "qwen3_moe": "nanovllm.models.qwen3_moe:Qwen3MoeForCausalLM",
}


def find_model_type(raw: dict, file: Path) -> str:
    """The key of MODELS for the content of a config.json: its `model_type`, or the one of its `architectures`.

    ValueError if MODELS has neither.
    """
    model_type, architectures = raw.get("model_type"), raw.get("architectures") or ()
    if model_type in MODELS:
        return model_type
    for known, location in MODELS.items():
        if location.split(":")[1] in architectures:
            return known
    raise ValueError(
        f"{file}: model_type={model_type!r} with architectures={architectures!r}: model_type must be one of "
        f"{', '.join(map(repr, MODELS))}; nanovllm/models/__init__.py is where another family is added"
    )


def model_class(model_type: str) -> type:
    return resolve_name(MODELS[model_type])
