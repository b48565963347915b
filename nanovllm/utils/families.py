"""Finds the model family of a checkpoint, using a table of all families. Importing this file imports no family."""

import re
from pathlib import Path
from pkgutil import iter_modules, resolve_name

PACKAGE = "nanovllm.models"
# `model_type` -> module:class
MODELS = {
    name: f"{PACKAGE}.{name}:" + re.sub(r"_(?!\d)", "", name.title()) + "ForCausalLM"
    for name in sorted(x.name for x in iter_modules([str(Path(__file__).parents[1] / "models")]) if not x.ispkg)
}
MODELS |= {
    "gemma3_text": f"{PACKAGE}.gemma3_text:Gemma3ForCausalLM",
    "gemma4_text": f"{PACKAGE}.gemma4_text:Gemma4ForCausalLM",
    "gemma4_unified_text": f"{PACKAGE}.gemma4_unified_text:Gemma4UnifiedForCausalLM",
    "smollm3": f"{PACKAGE}.smollm3:SmolLM3ForCausalLM",
    "qwen3_vl": f"{PACKAGE}.qwen3_vl:Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": f"{PACKAGE}.qwen3_vl_moe:Qwen3VLMoeForConditionalGeneration",
}


def find_model_type(raw: dict, file: Path) -> str:
    """Return the key of MODELS that fits a config.json.

    If `model_type` is unknown, other entries of config.json decide.
    """
    model_type = str(raw.get("model_type"))
    return model_type if model_type in MODELS else find_by_architecture(raw, file)


def find_by_architecture(raw: dict, file: Path) -> str:
    """Return the key of MODELS that fits the `text_config` or the `architectures` of a config.json.

    If there is a `text_config`, this function imports the text model's family. Raises ValueError if no key of MODELS
    fits.
    """
    text, architectures = raw.get("text_config"), raw.get("architectures") or ()
    text_type = text.get("model_type") if isinstance(text, dict) else None
    if text_type in MODELS and getattr(model_class(text_type), "may_be_nested", False):
        return text_type
    for family, location in MODELS.items():
        if location.split(":")[1] in architectures:
            return family
    raise ValueError(
        f"{file}: model_type={raw.get('model_type')!r} with architectures={architectures!r}: model_type must be one of "
        f"{', '.join(map(repr, MODELS))}; to add a family, add a file to nanovllm/models/"
    )


def model_class(model_type: str) -> type:
    return resolve_name(MODELS[model_type])
