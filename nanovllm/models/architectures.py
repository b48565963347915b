"""Finds the family of a checkpoint whose `model_type` is unknown. Imported when needed."""

from pathlib import Path

from nanovllm.models import MODELS


def find_by_architecture(raw: dict, file: Path) -> str:
    """The key of MODELS for one of the `architectures` in a config.json; ValueError if none is known."""
    model_type, architectures = raw.get("model_type"), raw.get("architectures") or ()
    for family, location in MODELS.items():
        if location.split(":")[1] in architectures:
            return family
    raise ValueError(
        f"{file}: model_type={model_type!r} with architectures={architectures!r}: model_type must be one of "
        f"{', '.join(map(repr, MODELS))}; another family is a file of nanovllm/models/"
    )
