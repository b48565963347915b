"""Reads from config.json how the layers of Gemma 4 differ."""

from math import ceil
from pathlib import Path
from typing import NamedTuple

from nanovllm.kernels.activations import GELU_AND_MUL
from nanovllm.models import read_rope
from nanovllm.models.shared.windows import Windows
from nanovllm.moe.moe_config import MoEConfig
from nanovllm.utils.checks import check_bool, check_int

HIDDEN_SIZE = "hidden_size_per_layer_input"


class Gemma4Details(NamedTuple):
    """The value of `Windows.more` for Gemma 4. A full layer is a layer without a window."""

    head_dim: int  # of full layers
    num_key_value_heads: int  # of full layers
    rope: tuple[tuple[float, ...], float]  # `rope_inv_freq` and `rope_scale` of full layers
    keys_are_values: bool  # in full layers
    sources: tuple[int, ...]  # for each layer, the layer whose cache it reads, which may be itself
    shared_intermediate_size: int  # of the MLP in layers that read another layer's cache
    per_layer_vocab_size: int
    per_layer_size: int  # of a token's embedding for each layer; 0: there is none


def read_details(raw: dict, sizes: tuple[int | None, ...], file: Path) -> Gemma4Details:
    """Return the Gemma4Details of a config.json. `sizes` contains the window of each layer, or None for a full layer.

    Raises ValueError if an entry is invalid, or if an entry differs between full layers.
    """
    keys_are_values = check_bool(f"{file}: attention_k_eq_v", raw.get("attention_k_eq_v", False))
    layers = raw.get("per_layer_config")  # transformers 5.24 writes this instead of the entries `global_...`
    head_dim = raw.get("global_head_dim", 512 if layers is None else raw["head_dim"])
    full = {"head_dim": head_dim, "num_key_value_heads": raw["num_key_value_heads"]}
    if keys_are_values and raw.get("num_global_key_value_heads"):
        full["num_key_value_heads"] = raw["num_global_key_value_heads"]
    if layers:
        indices, known = {f"{i:09}" for i, size in enumerate(sizes) if size is None}, {str(i).zfill(9) for i in layers}
        first = next(iter(layers.values()))
        if known != indices or not first.keys() <= full.keys() or any(x != first for x in layers.values()):
            raise ValueError(f"{file}: per_layer_config: must have one entry for full layers, the same for all")
        full |= first
    head_dim, num_heads = (check_int(f"{file}: {name} of full layers", x, low=1) for name, x in full.items())
    is_wide = check_bool(f"{file}: use_double_wide_mlp", raw.get("use_double_wide_mlp", False))
    vocab_size = raw["vocab_size_per_layer_input"]
    if raw[HIDDEN_SIZE]:
        check_int(f"{file}: vocab_size_per_layer_input", vocab_size, low=raw["vocab_size"])
    return Gemma4Details(
        head_dim=head_dim,
        num_key_value_heads=num_heads,
        rope=read_rope(raw, head_dim, file)[:2],
        keys_are_values=keys_are_values,
        sources=_read_sources(raw, sizes, file),
        shared_intermediate_size=raw["intermediate_size"] * (2 if is_wide else 1),
        per_layer_vocab_size=vocab_size,
        per_layer_size=check_int(f"{file}: {HIDDEN_SIZE}", raw[HIDDEN_SIZE] or 0, low=0),
    )


def _read_sources(raw: dict, sizes: tuple[int | None, ...], file: Path) -> tuple[int, ...]:
    """Return `Gemma4Details.sources`.

    The last layers may have no cache. A layer without a cache reads the cache of the last layer that has a cache and
    the same window.
    """
    name = f"{file}: num_kv_shared_layers"
    num_own = len(sizes) - check_int(name, raw.get("num_kv_shared_layers", 0), low=0, high=len(sizes))
    last = {sizes[i]: i for i in range(num_own)}
    if not last.keys() >= {*sizes}:
        raise ValueError(f"{name}={len(sizes) - num_own}: a kind of layer would have no cache to read")
    return (*range(num_own), *(last[size] for size in sizes[num_own:]))


def max_table_views(raw: dict, details: Windows) -> int:
    """Return `ModelConfig.max_table_views`. The returned number is large enough for any number of ranks."""
    own = [size for i, size in enumerate(details.sizes) if details.more.sources[i] == i]
    num_full, more = own.count(None), details.more
    ratio = raw["head_dim"] * raw["num_key_value_heads"] / (more.head_dim * more.num_key_value_heads)
    return ceil(max(1, ratio) * (len(own) - num_full) / num_full) + ceil(max(ratio, 1 / ratio))


def read_moe(raw: dict, file: Path) -> MoEConfig | None:
    """Return the configuration of the experts, or None if the model has no experts."""
    if not check_bool(f"{file}: enable_moe_block", raw.get("enable_moe_block", False)):
        return None
    if raw[HIDDEN_SIZE]:
        raise ValueError(f"{file}: enable_moe_block=True: is not supported with {HIDDEN_SIZE}={raw[HIDDEN_SIZE]!r}")
    num_experts = check_int(f"{file}: num_experts", raw.get("num_experts"), low=1)
    top_k = check_int(f"{file}: top_k_experts", raw.get("top_k_experts"), low=1, high=num_experts)
    size = check_int(f"{file}: moe_intermediate_size", raw.get("moe_intermediate_size"), low=1)
    layers = frozenset(range(raw["num_hidden_layers"]))
    others = dict(renormalize=True, is_next_to_mlp=True, activation=GELU_AND_MUL)
    return MoEConfig(layers, num_experts, top_k, size, **others)
