"""Reads the sizes of the vision tower, and the text model's image settings, from the files of a checkpoint."""

from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.utils.checks import check_bool, check_choice, check_int, check_object, check_real, parse_json, read_json

if TYPE_CHECKING:
    from nanovllm.config import Config

COLORS = "image_mean", "image_std"
# transformers' defaults for entries that may be absent
TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
# transformers' defaults for the entries of an image processor; sizes are numbers of pixels, although named edges
PROCESSOR = {
    "do_resize": True,
    "size": {"shortest_edge": 56**2, "longest_edge": 1280 * 28**2},
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
# the entries that Qwen publishes, for checkpoints without an image processor
PUBLISHED = {"size": {"shortest_edge": 256**2, "longest_edge": 4096**2}} | dict.fromkeys(COLORS, [0.5] * 3)


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The part of a model's configuration that concerns images.

    depth, hidden_size, intermediate_size, num_heads, patch_size, temporal_patch_size, out_hidden_size: sizes of the
        vision tower.
    merge_size: a token stands for a square of `merge_size` x `merge_size` patches.
    grid_side: the side of the square grid of learned position embeddings.
    deepstack_layers: layers of the vision tower whose outputs are also used for the first layers of the text model.
    image_token_id: the id of the placeholder token. A prompt has one placeholder for each square of patches that
        becomes a token.
    mrope_section: how many pairs of columns of a head use the temporal, the vertical and the horizontal position.
    image_mean, image_std: one number for each of the three colors. The tower gets (pixel - mean) / std, where pixels
        range from 0 to 1.
    resample: the number of Pillow's filter for scaling, such as 3 for bicubic.
    min_pixels, max_pixels: the least and the greatest number of pixels that a scaled image may have.
    max_images: the maximum number of images in a prompt.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    temporal_patch_size: int
    out_hidden_size: int
    merge_size: int
    grid_side: int
    deepstack_layers: tuple[int, ...]
    image_token_id: int
    mrope_section: tuple[int, int, int]
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    resample: int
    min_pixels: int
    max_pixels: int
    max_images: int = 999

    @property
    def max_image_tokens(self) -> int:
        """The number of tokens of the largest image."""
        return self.max_pixels // (self.patch_size * self.merge_size) ** 2

    def operations(self, num_tokens: int) -> int:
        """Return how many operations of matmuls take as long as the tower takes for an image of `num_tokens` tokens.

        Attention computes about two thirds as many operations per second as matmuls do.
        """
        patches, size = num_tokens * self.merge_size**2, self.hidden_size
        attention = 4 * patches * size
        return round(self.depth * patches * (8 * size**2 + 4 * size * self.intermediate_size + 1.5 * attention))

    def with_settings(self, settings: "Config") -> "VisionConfig | None":
        """Return the configuration for an engine. If the engine takes no images, return None.

        Raises ValueError if the smallest allowed image is larger than the largest one.
        """
        pixels = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels} | (settings.mm_processor_kwargs or {})
        if (low := pixels["min_pixels"]) > (high := pixels["max_pixels"]):
            raise ValueError(f"mm_processor_kwargs: min_pixels={low}: must be at most max_pixels={high}")
        max_images = (settings.limit_mm_per_prompt or {}).get("image", self.max_images)
        if settings.language_model_only or not max_images:
            return None
        return replace(self, max_images=max_images, **pixels)


def check_limits(name: str, value: Any) -> dict[str, int]:
    """Return the setting `limit_mm_per_prompt` as a dict. Raises TypeError or ValueError for an invalid value."""
    limits = _json_dict(name, value, ("image", "video", "audio"))
    limits = {kind: limit["count"] if isinstance(limit, dict) else limit for kind, limit in limits.items()}
    highs = {"image": 2**16, "video": 0, "audio": 0}  # only images are supported
    return {kind: check_int(f"{name}: {kind}", limit, low=0, high=highs[kind]) for kind, limit in limits.items()}


def check_pixels(name: str, value: Any) -> dict[str, int]:
    """Return the setting `mm_processor_kwargs` as a dict. Raises TypeError or ValueError for an invalid value."""
    pixels = _json_dict(name, value, ("min_pixels", "max_pixels"))
    return {key: check_int(f"{name}: {key}", number, low=1, high=2**26) for key, number in pixels.items()}


def check_domains(name: str, value: Any) -> tuple[str, ...]:
    """Return the setting `allowed_media_domains` in lower case.

    Raises TypeError for a value that is not a list of strings.
    """
    if not isinstance(value, (list, tuple)) or not all(isinstance(host, str) for host in value):
        raise TypeError(f"{name}={value!r:.80}: must be a list of host names")
    return tuple(host.lower() for host in value)


def _json_dict(name: str, value: Any, keys: tuple[str, ...]) -> dict[str, Any]:
    value = parse_json(name, value)
    if not isinstance(value, dict):
        raise TypeError(f"{name}={value!r:.80}: must be a JSON object or a dict")
    for key in value:
        check_choice(f"{name}: a key", key, keys)
    return value


def read_vision(
    raw: dict, file: Path, image_token_id: int, mrope_section: tuple[int, int, int], deepstack: tuple[int, ...] = ()
) -> VisionConfig | None:
    """Read `raw`, the content of a config.json, and the image processor's entries next to `file`.

    Return None if the checkpoint has no vision tower. The arguments after `file` are defaults for entries that the
    files lack. If an entry is not supported, raises a ValueError or TypeError that names the file.
    """
    if not (found := raw.get("vision_config")):
        return None
    check_object(name := f"{file}: vision_config", found)
    sizes = {key: check_int(f"{name}: {key}", found.get(key, default), low=1) for key, default in TOWER.items()}
    check_choice(f"{name}: hidden_act", found.get("hidden_act", "gelu_pytorch_tanh"), ("gelu_pytorch_tanh",))
    check_choice(f"{name}: in_channels", found.get("in_channels", 3), (3,))
    check_choice(f"{name}: out_hidden_size", sizes["out_hidden_size"], (raw["hidden_size"],))
    if sizes["hidden_size"] % (4 * sizes["num_heads"]):
        raise ValueError(f"{name}: hidden_size={sizes['hidden_size']}: must be a multiple of 4 * num_heads")
    if (side := isqrt(positions := sizes.pop("num_position_embeddings"))) ** 2 != positions:
        raise ValueError(f"{name}: num_position_embeddings={positions}: must be a square")
    layers = tuple(found.get("deepstack_visual_indexes", deepstack) if deepstack else ())
    for layer in layers:
        check_int(f"{name}: deepstack_visual_indexes: a layer", layer, low=0, high=sizes["depth"] - 1)
    check_int(f"{name}: deepstack_visual_indexes: their number", len(layers), low=0, high=raw["num_hidden_layers"])
    rope = (raw.get("rope_parameters") or {}) | (raw.get("rope_scaling") or {})
    sections = [check_int(f"{file}: mrope_section", n, low=0) for n in rope.get("mrope_section") or mrope_section]
    if len(sections) != 3:
        raise ValueError(f"{file}: mrope_section={sections!r:.80}: must have 3 numbers")
    check_choice(f"{file}: mrope_interleaved", rope.get("mrope_interleaved", True), (True,))
    sizes["merge_size"] = sizes.pop("spatial_merge_size")
    return VisionConfig(
        **sizes,
        grid_side=side,
        deepstack_layers=layers,
        image_token_id=check_int(f"{file}: image_token_id", raw.get("image_token_id", image_token_id), low=0),
        mrope_section=(sections[0], sections[1], sections[2]),
        **_read_processor(file.parent, sizes),
    )


def _read_processor(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """Read how images and their pixels are scaled.

    Raises ValueError or TypeError for entries that `ImageReader` does not support.
    """
    name, raw = _processor_entries(folder)
    entries = PROCESSOR | {key: value for key, value in raw.items() if value is not None}
    check_choice(f"{name}: do_resize", entries["do_resize"], (True,))
    for key in ("patch_size", "temporal_patch_size", "merge_size"):
        check_choice(f"{name}: {key}", entries.get(key, sizes[key]), (sizes[key],))
    check_object(f"{name}: size", size := entries["size"])
    pixels = {
        "min_pixels": entries.get("min_pixels") or size.get("shortest_edge") or PROCESSOR["size"]["shortest_edge"],
        "max_pixels": entries.get("max_pixels") or size.get("longest_edge") or PROCESSOR["size"]["longest_edge"],
    }
    pixels = {key: check_int(f"{name}: {key}", value, low=1) for key, value in pixels.items()}
    resample = check_int(f"{name}: resample", entries["resample"], low=0, high=5)
    factor = check_real(f"{name}: rescale_factor", entries["rescale_factor"], low=1e-6, high=1.0)
    factor = 255 * factor if check_bool(f"{name}: do_rescale", entries["do_rescale"]) else 255.0
    colors = []
    for key, low, without in zip(COLORS, (0.0, 1e-6), (0.0, 1.0)):
        if not isinstance(numbers := entries[key], list) or len(numbers) != 3:
            raise ValueError(f"{name}: {key}={numbers!r:.80}: must be a list of 3 numbers")
        numbers = [check_real(f"{name}: {key}", number, low, high=255.0) for number in numbers]
        is_used = check_bool(f"{name}: do_normalize", entries["do_normalize"])
        colors.append(tuple(number / factor for number in (numbers if is_used else [without] * 3)))
    return dict(zip(COLORS, colors)) | pixels | {"resample": resample}


def _processor_entries(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the place and the content of the image processor's entries.

    Files take precedence in the same order as in transformers.
    """
    file = folder / "processor_config.json"
    if file.exists() and (found := read_json(file).get("image_processor")) is not None:
        check_object(name := f"{file}: image_processor", found)
        return name, found
    file = folder / "preprocessor_config.json"
    return str(file), read_json(file) if file.exists() else PUBLISHED
