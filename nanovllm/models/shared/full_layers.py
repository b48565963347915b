"""Layers without a window whose heads have other sizes than those of layers with a window, and may lack values."""

from pathlib import Path
from typing import NamedTuple

from nanovllm.layers.linear import MergedColumnParallelLinear
from nanovllm.models import ModelConfig, read_rope
from nanovllm.utils.checks import check_bool, check_int
from nanovllm.utils.construction import get_construction


class FullLayers(NamedTuple):
    """What differs in layers without a window: `Windows.full`."""

    head_dim: int
    num_key_value_heads: int
    rope: tuple[tuple[float, ...], float]
    keys_are_values: bool


class QKParallelLinear(MergedColumnParallelLinear):
    """Merges the query and key projections, as QKVParallelLinear does with values."""

    def __init__(self, config: ModelConfig):
        tp, sizes = get_construction().tp, (config.num_attention_heads, config.num_key_value_heads)
        divisions = [tp, tp.for_heads(config.num_key_value_heads)]
        super().__init__(config.hidden_size, [n * config.head_dim for n in sizes], config.qkv_bias, divisions)

    def shard_ids(self) -> list[tuple]:
        return [("q",), ("k",)]


def read_full_layers(raw: dict, sizes: tuple[int | None, ...], file: Path) -> FullLayers:
    """Read the heads of full layers from a config.json.

    `sizes` contains the window of each layer, or None for a full layer. Raises ValueError if the entries are invalid,
    or differ between full layers.
    """
    keys_are_values = check_bool(f"{file}: attention_k_eq_v", raw.get("attention_k_eq_v", False))
    full = {"head_dim": raw.get("global_head_dim", 512), "num_key_value_heads": raw["num_key_value_heads"]}
    if keys_are_values and raw.get("num_global_key_value_heads"):
        full["num_key_value_heads"] = raw["num_global_key_value_heads"]
    if layers := raw.get("per_layer_config"):  # transformers 5.24 writes this in place of the entries above
        indices, known = {f"{i:09}" for i, size in enumerate(sizes) if size is None}, {str(i).zfill(9) for i in layers}
        first = next(iter(layers.values()))
        if known != indices or not first.keys() <= full.keys() or any(x != first for x in layers.values()):
            raise ValueError(f"{file}: per_layer_config: must have one entry for full layers, the same for all")
        full |= first
    head_dim, num_heads = (check_int(f"{file}: {name} of full layers", x, low=1) for name, x in full.items())
    return FullLayers(head_dim, num_heads, read_rope(raw, head_dim, file)[:2], keys_are_values)
