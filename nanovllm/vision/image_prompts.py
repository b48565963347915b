"""Reads prompts and conversations that contain images."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.requests.prompts import image_source, is_conversation, read_prompt
from nanovllm.requests.request import IMAGE_PART
from nanovllm.vision.prompt_images import PromptImage, PromptImages

if TYPE_CHECKING:
    from nanovllm.requests.input_processor import InputProcessor


NO_IMAGES = "this engine takes no images: the model has no vision tower, or language_model_only is set, or it pools"


def read_image_prompt(
    prompt: Any, template_arguments: Mapping, processor: "InputProcessor"
) -> tuple[str | None, list[int], PromptImages]:
    """Return the text, the token ids and the images of a prompt with images.

    In the token ids, an image has as many placeholders as the text model reads embeddings. Raises ValueError if the
    prompt has too many images, or another number of placeholders than images. Raises the errors of
    `ImageReader.read`.
    """
    is_chat, vision, sources = is_conversation(prompt), processor.config.model_config.vision, list[Any]()
    if is_chat:
        field, rest = "messages", [*_without_images(prompt, sources)]
    else:
        field, rest = "multi_modal_data", {name: x for name, x in prompt.items() if name != "multi_modal_data"}
        if isinstance(data := prompt["multi_modal_data"], PromptImages):  # read before
            return *read_prompt(rest, template_arguments, processor), data
        sources += _sources(data)
    if processor.images is None:
        part = f"content part {sources[0]!r:.80}: must be text" if is_chat else "must be left out"
        raise ValueError(f"{field}: {part}, because {NO_IMAGES}")
    if (count := len(sources)) > vision.max_images:
        raise ValueError(f"prompt: has {count} images: must be at most {vision.max_images} (limit_mm_per_prompt)")
    text, token_ids = read_prompt(rest, template_arguments, processor)
    if (found := token_ids.count(vision.image_token_id)) != count:
        token = processor.tokenizer.convert_ids_to_tokens(vision.image_token_id)
        raise ValueError(f"prompt: has {count} images and {found} times the placeholder {token!r}: must be equal")
    images: list[PromptImage] = []
    num_tokens = len(token_ids)
    for source in sources:
        try:
            images.append(processor.images.read(source, is_trusted=not is_chat))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{field}: {error}") from error
        num_tokens += images[-1].num_tokens - 1
        if num_tokens >= processor.max_model_len:  # now, because reading more images would take long
            raise ValueError(f"prompt: has at least {num_tokens} tokens; must be fewer than {processor.length_bound}")
    token_ids = [*_expanded(token_ids, images, vision.image_token_id)]
    return text, token_ids, PromptImages(images, token_ids, vision.image_token_id)


def _expanded(token_ids: list[int], images: list[PromptImage], image_token_id: int) -> Iterator[int]:
    sizes = (image.num_tokens for image in images)
    for token_id in token_ids:
        for _ in range(next(sizes) if token_id == image_token_id else 1):
            yield token_id


def _sources(data: Any) -> list[Any]:
    """Return the images in the `multi_modal_data` of a prompt. Raises TypeError or ValueError for anything else."""
    if not isinstance(data, Mapping):
        raise TypeError(f"multi_modal_data={data!r:.80}: must be a dict")
    if others := data.keys() - {"image"}:
        raise ValueError(f"multi_modal_data: has {sorted(map(str, others))}: only 'image' is supported")
    images = data.get("image", ())
    return [*images] if isinstance(images, (list, tuple)) else [images]


def _without_images(messages: list, sources: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages with placeholders for images, and add the images to `sources`."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            found = [image_source(part) for part in content]
            sources += [source for source in found if source is not None]
            content = [part if source is None else IMAGE_PART for part, source in zip(content, found)]
            message = {**message, "content": content}
        yield message
