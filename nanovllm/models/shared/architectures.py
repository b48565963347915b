"""Finds the family of a checkpoint whose `model_type` is unknown."""

from pathlib import Path

from nanovllm.models import MODELS, model_class


def find_by_architecture(raw: dict, file: Path) -> str:
    """Return the key in MODELS for the text model or the `architectures` of a config.json.

    Raises ValueError if MODELS has no such key.
    """
    model_type, architectures = raw.get("model_type"), raw.get("architectures") or ()
    text = raw.get("text_config")
    text_type = text.get("model_type") if isinstance(text, dict) else None
    if text_type in MODELS and getattr(model_class(text_type), "may_be_nested", False):
        return text_type
    for family, location in MODELS.items():
        if location.split(":")[1] in architectures:
            return family
    raise ValueError(
        f"{file}: model_type={model_type!r} with architectures={architectures!r}: model_type must be one of "
        f"{', '.join(map(repr, MODELS))}; another family is a file of nanovllm/models/"
    )
