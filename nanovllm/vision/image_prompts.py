"""Reads prompts and conversations that contain images."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from nanovllm.requests.content_parts import IMAGE_PART, is_image
from nanovllm.requests.prompts import has_images, is_conversation, read_text_prompt
from nanovllm.utils.cores import available_cores
from nanovllm.utils.daemon_threads import DaemonThreads
from nanovllm.vision.image_reader import MAX_PIXELS, ImageReader
from nanovllm.vision.image_sources import ImageSource, part_source, pixel_bounds
from nanovllm.vision.prompt_images import PromptImage, PromptImages
from nanovllm.vision.vision_config import VisionConfig, check_pixels

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.requests.input_processor import InputProcessor


MAX_THREADS = 16
MAX_PROMPT_PIXELS = 2 * MAX_PIXELS  # of a prompt's images before scaling, because decoding takes time


class ImagePromptReader:
    """Reads prompts with images for an engine that accepts images. Any thread may call the methods of this class."""

    def __init__(self, config: "Config"):
        self.vision, self.reader = config.model_config.vision, ImageReader(config)

    def read(
        self, prompt: Any, template_arguments: Mapping, processor: "InputProcessor"
    ) -> tuple[str | None, list[int], PromptImages | None]:
        """Return the text, the token ids and the images of a prompt.

        For each embedding of an image that the text model reads, the token ids contain one placeholder. Raises
        ValueError if the prompt has too many images or pixels, or if the numbers of placeholders and images differ.
        Raises the errors of `ImageReader.read`.
        """
        image_token_id = self.vision.image_token_id
        field, rest, sources = _split(prompt, self.vision)
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
            if isinstance(source.image, PromptImage):  # `read_all` has read it
                known[source.key] = source.image
            if source.key not in known:
                try:
                    opened = self.reader.open(source.image, source.is_trusted)
                    if (num_pixels := num_pixels + opened.width * opened.height) > MAX_PROMPT_PIXELS:
                        bound = f"must have at most {MAX_PROMPT_PIXELS} together"
                        raise ValueError(f"the images have at least {num_pixels} pixels: {bound}")
                    known[source.key] = self.reader.scale(opened, source.bounds)
                except (TypeError, ValueError) as error:
                    kind = TypeError if isinstance(error, TypeError) else ValueError  # subclasses take other arguments
                    raise kind(f"{field}: {error}") from error
            images.append(known[source.key])
            num_tokens += images[-1].num_tokens - 1
            if num_tokens >= processor.max_model_len:  # other images are not read, because that may be slow
                bound = processor.length_bound
                raise ValueError(f"prompt: has at least {num_tokens} tokens; must be {bound}")
        token_ids = [*_expanded(token_ids, images, image_token_id)]
        return text, token_ids, PromptImages(images, token_ids, image_token_id)

    def read_all(self, prompts: list) -> list:
        """Read the images of prompts in several threads. Return the prompts with a PromptImage in place of each image.

        An image that can't be read stays in its prompt, so that `read` raises the error.
        """
        # an image of several prompts is read once
        tasks = {source.key: source for prompt in prompts for source in self._sources(prompt)}
        if len(tasks) < 2:
            return prompts
        futures: dict[tuple, Future] = {}
        # daemon threads, because a read of a pipe may never end
        threads = DaemonThreads("nanovllm-images", min(MAX_THREADS, available_cores(), len(tasks)))
        try:
            for key, source in tasks.items():
                futures[key] = threads.submit(self.reader.read, source.image, source.is_trusted, source.bounds)
            found = {key: future.result() for key, future in futures.items() if future.exception() is None}
        finally:
            for future in futures.values():  # after Ctrl-C
                future.cancel()
            threads.close()
        return [self._with_images(prompt, found) for prompt in prompts]

    def _sources(self, prompt: Any) -> list[ImageSource]:
        """Return those images of a prompt that have not been read yet.

        If the prompt is not valid, return an empty list.
        """
        if not has_images(prompt):
            return []
        try:
            _, _, sources = _split(prompt, self.vision)
        except (TypeError, ValueError):
            return []
        sources = sources if isinstance(sources, list) else []
        return [source for source in sources if not isinstance(source.image, PromptImage)]

    def _with_images(self, prompt: Any, found: Mapping[tuple, PromptImage]) -> Any:
        """Return a prompt in which the images in `found` replace their sources."""
        if not self._sources(prompt):
            return prompt
        if not is_conversation(prompt):
            images = [found.get(source.key, source.image) for source in _split(prompt, self.vision)[2]]
            return {**prompt, "multi_modal_data": {"image": images}}

        def replaced(part: Any) -> Any:
            image = found.get(part_source(part, self.vision).key) if is_image(part) else None
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


def _split(prompt: Any, vision: VisionConfig) -> tuple[str, Any, Any]:
    """Return the name of the field with images, the prompt without images, and the images.

    The images are a list of ImageSource objects, or a PromptImages object. In a conversation, placeholders replace the
    images. Raises TypeError or ValueError for anything that is not an image.
    """
    return _split_conversation(prompt, vision) if is_conversation(prompt) else _split_prompt(prompt, vision)


def _split_prompt(prompt: Mapping, vision: VisionConfig) -> tuple[str, Any, list[ImageSource] | PromptImages]:
    data, field = prompt["multi_modal_data"], "multi_modal_data"
    rest = {name: value for name, value in prompt.items() if name not in (field, "mm_processor_kwargs")}
    if isinstance(data, PromptImages):
        return field, rest, data
    if not isinstance(data, Mapping):
        raise TypeError(f"{field}={data!r:.80}: must be a dict")
    if others := data.keys() - {"image"}:
        raise ValueError(f"{field}: has {sorted(map(str, others))}: only 'image' is supported")
    pixels = check_pixels("mm_processor_kwargs", prompt.get("mm_processor_kwargs") or {})
    bounds, images = pixel_bounds(pixels, vision, "mm_processor_kwargs"), data["image"]
    images = images if isinstance(images, (list, tuple)) else [images]
    return field, rest, [ImageSource(image, True, bounds) for image in images]


def _split_conversation(messages: list, vision: VisionConfig) -> tuple[str, Any, list[ImageSource]]:
    rest, sources = [], []
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            sources += [part_source(part, vision) for part in content if is_image(part)]
            message = {**message, "content": [IMAGE_PART if is_image(part) else part for part in content]}
        rest.append(message)
    return "messages", rest, sources
