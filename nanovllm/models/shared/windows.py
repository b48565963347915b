"""Families in which some layers have a sliding window. Layers with a window have a separate rotary embedding."""

from math import ceil
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models import ModelConfig, read_rope
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.checks import check_int, check_object


class Windows(NamedTuple):
    """The value of `ModelConfig.details` in families with windows."""

    sizes: tuple[int | None, ...]  # for each layer, how many tokens a token attends to; None: all
    rope: tuple[tuple[float, ...], float]  # `rope_inv_freq` and `rope_scale` of layers with a window
    scale: float | None = None  # of scores, in all layers; None is 1 / sqrt(head_dim)
    soft_cap: float | None = None  # of scores
    final_soft_cap: float | None = None  # of logits
    more: Any = None  # details of a single family


class WindowsForCausalLM(Qwen3ForCausalLM):
    layer_types: ClassVar = ("full_attention", "sliding_attention")

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        rotary_emb = RotaryEmbedding(*config.details.rope, config.max_position_embeddings)
        for layer, size in zip(self.model.layers, config.details.sizes, strict=True):
            attn = layer.self_attn.attn
            attn.scale, attn.soft_cap = config.details.scale or attn.scale, config.details.soft_cap
            if size is not None:
                attn.window, layer.self_attn.rotary_emb = size, rotary_emb


def read_windows(
    raw: dict, file: Path, interval: int, local_theta: float | None = None, scales_local: bool = False
) -> dict:
    """Return the fields of ModelConfig that describe windows. A window has `sliding_window` tokens.

    If an older checkpoint has no `layer_types`, every `interval`-th layer attends to all tokens. Layers with a window
    ignore `rope_scaling`, unless `scales_local` is True. For layers with a window, RoPE's theta comes from
    `rope_parameters["sliding_attention"]`, else from `local_theta`, else from `rope_theta`.
    """
    num_layers = raw["num_hidden_layers"]
    interval = check_int(f"{file}: sliding_window_pattern", raw.get("sliding_window_pattern", interval), low=1)
    kinds = raw.get("layer_types") or [
        "full_attention" if (i + 1) % interval == 0 else "sliding_attention" for i in range(num_layers)
    ]
    size = check_int(f"{file}: sliding_window", raw.get("sliding_window"), low=1)
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    rope = raw.get("rope_parameters") or {}
    check_object(f"{file}: rope_parameters: sliding_attention", local := rope.get("sliding_attention") or {})
    theta = local_theta or rope.get("rope_theta") or raw.get("rope_theta", 10000.0)
    local = {"rope_theta": theta} | local
    entries = raw if scales_local else {**raw, "rope_parameters": local, "rope_scaling": None}
    inv_freq, scale, *_ = read_rope(entries, head_dim, file)
    sizes = tuple(size if kind == "sliding_attention" else None for kind in kinds)
    return {"details": Windows(sizes, (inv_freq, scale)), **fields_of_sizes(sizes)}


def fields_of_sizes(sizes: tuple[int | None, ...]) -> dict:
    """Return the fields of ModelConfig that depend on which layers have a window."""
    fraction = sizes.count(None) / len(sizes)
    return {"attention_fraction": fraction, "max_table_views": ceil(1 / fraction) - 1 if fraction else 0}
