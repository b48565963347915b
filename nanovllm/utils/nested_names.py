"""Converts tensor names of checkpoints that contain a text model, and also models for images or audio."""

# prefix in such a checkpoint -> prefix in a checkpoint of the text model
TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
IMAGE_PARTS = "vision_tower.", "multi_modal_projector.", "embed_vision.", "audio_tower.", "embed_audio."
IMAGE_PREFIXES = (*IMAGE_PARTS, *(f"model.{part}" for part in IMAGE_PARTS))


def text_name(name: str) -> str:
    """Return the name that a tensor would have in a checkpoint of only the text model."""
    for prefix, own in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def nested_names(module: str) -> list[str]:
    """Return the possible names of a text model's `module` in a checkpoint. The first name is `module` itself."""
    return [module] + [
        prefix + module.removeprefix(own) for prefix, own in TEXT_PREFIXES.items() if module.startswith(own)
    ]
