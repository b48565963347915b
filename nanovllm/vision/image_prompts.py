"""Reads prompts and conversations that contain images."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from nanovllm.requests.chat_templates import IMAGE_PART
from nanovllm.requests.prompts import has_images, image_source, is_conversation, read_text_prompt
from nanovllm.utils.cores import available_cores
from nanovllm.utils.daemon_threads import DaemonThreads
from nanovllm.vision.image_reader import MAX_PIXELS, ImageReader
from nanovllm.vision.prompt_images import PromptImage, PromptImages

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.requests.input_processor import InputProcessor


MAX_THREADS = 16
MAX_PROMPT_PIXELS = 2 * MAX_PIXELS  # of a prompt's images before scaling, because decoding takes time


class ImagePrompts:
    """Reads prompts with images for an engine that takes images. Any thread may call the methods."""

    def __init__(self, config: "Config"):
        self.vision, self.reader = config.model_config.vision, ImageReader(config)

    def read(
        self, prompt: Any, template_arguments: Mapping, processor: "InputProcessor"
    ) -> tuple[str | None, list[int], PromptImages | None]:
        """Return the text, the token ids and the images of a prompt.

        In the token ids, an image has one placeholder for each embedding that the text model reads. Raises ValueError
        if the prompt has too many images or pixels, or if the numbers of placeholders and images differ. Raises the
        errors of `ImageReader.read`.
        """
        is_chat, image_token_id = is_conversation(prompt), self.vision.image_token_id
        field, rest, sources = _split_conversation(prompt) if is_chat else _split_prompt(prompt)
        if isinstance(sources, PromptImages):  # the images were read earlier
            return *read_text_prompt(rest, template_arguments, processor), sources
        if (count := len(sources)) > self.vision.max_images:
            bound = f"must be at most {self.vision.max_images} (limit_mm_per_prompt)"
            raise ValueError(f"prompt: has {count} images: {bound}")
        text, token_ids = read_text_prompt(rest, template_arguments, processor)
        if (found := token_ids.count(image_token_id)) != count:
            token = processor.tokenizer.convert_ids_to_tokens(image_token_id)
            raise ValueError(f"prompt: has {count} images and {found} times the placeholder {token!r}: must be equal")
        if not sources:
            return text, token_ids, None
        images, num_tokens, num_pixels = list[PromptImage](), len(token_ids), 0
        known: dict[Any, PromptImage] = {}
        for source in sources:
            key = _key(source)
            if isinstance(source, PromptImage):  # `read_all` has read it
                known[key] = source
            if key not in known:
                try:
                    opened = self.reader.open(source, is_trusted=not is_chat)
                    if (num_pixels := num_pixels + opened.width * opened.height) > MAX_PROMPT_PIXELS:
                        bound = f"must have at most {MAX_PROMPT_PIXELS} together"
                        raise ValueError(f"the images have at least {num_pixels} pixels: {bound}")
                    known[key] = self.reader.cut(opened)
                except (TypeError, ValueError) as error:
                    kind = TypeError if isinstance(error, TypeError) else ValueError  # subclasses take other arguments
                    raise kind(f"{field}: {error}") from error
            images.append(known[key])
            num_tokens += images[-1].num_tokens - 1
            if num_tokens >= processor.max_model_len:  # other images are not read, because that may be slow
                bound = processor.length_bound
                raise ValueError(f"prompt: has at least {num_tokens} tokens; must be {bound}")
        token_ids = [*_expanded(token_ids, images, image_token_id)]
        return text, token_ids, PromptImages(images, token_ids, image_token_id)

    def read_all(self, prompts: list) -> list:
        """Read images in several threads. Return the prompts with a PromptImage in place of each image.

        Images that can't be read stay in the prompts, so that `read` raises the error.
        """
        tasks: dict[tuple[Any, bool], Any] = {}  # an image of several prompts is read once
        for prompt in prompts:
            is_trusted = not is_conversation(prompt)
            for source in _sources(prompt):
                tasks[_key(source), is_trusted] = source
        if len(tasks) < 2:
            return prompts
        futures: dict[tuple[Any, bool], Future] = {}
        # daemon threads, because a read of a pipe may never end
        threads = DaemonThreads("nanovllm-images", min(MAX_THREADS, available_cores(), len(tasks)))
        try:
            for (key, is_trusted), source in tasks.items():
                futures[key, is_trusted] = threads.submit(self.reader.read, source, is_trusted)
            found = {task: future.result() for task, future in futures.items() if future.exception() is None}
        finally:
            for future in futures.values():  # after Ctrl-C
                future.cancel()
            threads.close()
        return [_with_images(prompt, found) for prompt in prompts]


def _key(source: Any) -> Any:
    """Return equal keys only for sources that are the same image."""
    return source if isinstance(source, (str, bytes)) else id(source)


def _sources(prompt: Any) -> list:
    """Return the images of a prompt that have not been read, or an empty list if the prompt is wrong."""
    if not has_images(prompt):
        return []
    try:
        _, _, sources = _split_conversation(prompt) if is_conversation(prompt) else _split_prompt(prompt)
    except (TypeError, ValueError):
        return []
    return [source for source in sources if not isinstance(source, PromptImage)] if isinstance(sources, list) else []


def _with_images(prompt: Any, found: Mapping[tuple[Any, bool], PromptImage]) -> Any:
    """Return a prompt in which the images in `found` replace their sources."""
    if not _sources(prompt):
        return prompt
    if not is_conversation(prompt):
        images = [found.get((_key(source), True), source) for source in _split_prompt(prompt)[2]]
        return {**prompt, "multi_modal_data": {"image": images}}

    def replaced(part: Any) -> Any:
        source = image_source(part)
        image = None if source is None else found.get((_key(source), False))
        return part if image is None else IMAGE_PART | {"image": image}

    contents = (message.get("content") for message in prompt)
    return [
        {**message, "content": [*map(replaced, content)]} if isinstance(content, (list, tuple)) else message
        for message, content in zip(prompt, contents)
    ]


def _expanded(token_ids: list[int], images: list[PromptImage], image_token_id: int) -> Iterator[int]:
    sizes = (image.num_tokens for image in images)
    for token_id in token_ids:
        for _ in range(next(sizes) if token_id == image_token_id else 1):
            yield token_id


def _split_prompt(prompt: Mapping) -> tuple[str, Any, Any]:
    """Return the name of the field with images, the prompt without this field, and the images.

    Raises TypeError or ValueError if `multi_modal_data` does not contain images.
    """
    data = prompt["multi_modal_data"]
    rest = {name: value for name, value in prompt.items() if name != "multi_modal_data"}
    if isinstance(data, PromptImages):
        return "multi_modal_data", rest, data
    if not isinstance(data, Mapping):
        raise TypeError(f"multi_modal_data={data!r:.80}: must be a dict")
    if others := data.keys() - {"image"}:
        raise ValueError(f"multi_modal_data: has {sorted(map(str, others))}: only 'image' is supported")
    images = data["image"]
    return "multi_modal_data", rest, [*images] if isinstance(images, (list, tuple)) else [images]


def _split_conversation(messages: list) -> tuple[str, Any, Any]:
    """Return the name of the field with images, the messages with placeholders for images, and the images."""
    rest, sources = [], []
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            found = [image_source(part) for part in content]
            sources += [source for source in found if source is not None]
            content = [part if source is None else IMAGE_PART for part, source in zip(content, found)]
            message = {**message, "content": content}
        rest.append(message)
    return "messages", rest, sources
