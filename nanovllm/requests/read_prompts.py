"""Reads prompts that may have images."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.requests.prompts import has_images, is_conversation, read_text_prompt
from nanovllm.requests.request import Prompt

if TYPE_CHECKING:
    from nanovllm.requests.input_processor import InputProcessor

NO_IMAGES = "this engine takes no images: the model has no vision tower, or language_model_only is set, or it pools"


def read_images(prompts: list, processor: "InputProcessor") -> list:
    """Return the prompts. If several prompts have images, threads first read the images in parallel."""
    return prompts if sum(map(has_images, prompts)) < 2 else image_prompt_reader(processor).read_all(prompts)


def image_prompt_reader(processor: "InputProcessor") -> Any:
    """Return the ImagePromptReader of an engine that accepts images. Raises ValueError if Pillow is not installed."""
    if "images" not in processor.helpers:
        try:
            from nanovllm.vision.image_prompts import ImagePromptReader  # few engines take images
        except ImportError as error:
            raise ValueError(f"prompt: images can't be read ({error})") from error
        processor.helpers["images"] = ImagePromptReader(processor.config)
    return processor.helpers["images"]


def read_prompt(
    prompt: Prompt, template_arguments: Mapping, processor: "InputProcessor"
) -> tuple[str | None, list[int], Any]:
    """Return the text (None if unknown), the token ids and the images of a prompt that is not a string.

    The images are a PromptImages, or None if the prompt has no images. Raises ValueError if the prompt has images, but
    the engine does not accept images.
    """
    if not has_images(prompt):
        return *read_text_prompt(prompt, template_arguments, processor), None
    if processor.config.model_config.vision is None:
        is_chat = is_conversation(prompt)
        field = "messages: a content part must be text" if is_chat else "multi_modal_data: must be left out"
        raise ValueError(f"{field}, because {NO_IMAGES}")
    return image_prompt_reader(processor).read(prompt, template_arguments, processor)
