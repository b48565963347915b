"""Reads from config.json which layers use the gated delta rule, and how large the heads of these layers are."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nanovllm.config import STATE_DTYPES, Config
from nanovllm.delta_net.gated_delta_net import DeltaHeads
from nanovllm.utils.checks import check_choice, check_int
from nanovllm.utils.tensor_parallel import TensorParallel

LAYER_TYPES = "linear_attention", "full_attention"  # as config.json names them


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """The part of a hybrid model's configuration that ModelConfig does not contain."""

    attention_layers: frozenset[int]  # indices of the layers with attention
    heads: DeltaHeads
    num_layers: int
    shared_size: int  # inner size of the shared expert; 0: there is none
    is_nested: bool  # whether the decoder's weights are under `model.language_model` in the checkpoint
    unused_parts: tuple[str, ...]  # parts of the checkpoint that the engine does not use, for the log
    state_dtype: str = "float32"  # of the stored matrices

    def with_settings(self, settings: Config) -> "HybridConfig":
        dtype = settings.mamba_ssm_cache_dtype
        return self if dtype == "auto" else replace(self, state_dtype=dtype)

    def more_weights(self, queries: int, keys: int) -> float:
        """Return how many more weights a layer has, on average, than plain attention and experts.

        The number is divided by the hidden size.
        """
        state_inputs, fraction = sum(self.heads.sizes), len(self.attention_layers) / self.num_layers
        values = self.heads.sizes[2]
        state = state_inputs + 2 * values + 2 * self.heads.num_values - 2 * (queries + keys)
        return fraction * queries + (1 - fraction) * state + 3 * self.shared_size

    def state_bytes(self, itemsize: int) -> int:
        """Return the size of a sequence's states in bytes. `itemsize` is the size of a convolution input in bytes."""
        heads = self.heads
        window, matrices = (heads.conv_size - 1) * sum(heads.sizes), heads.sizes[2] * heads.key_dim
        matrix_itemsize = getattr(torch, self.state_dtype).itemsize
        return (self.num_layers - len(self.attention_layers)) * (itemsize * window + matrix_itemsize * matrices)

    def check_divides(self, tp: TensorParallel) -> None:
        self.heads.of_rank(tp)
        tp.shard_size("inner size of the shared expert", self.shared_size)


def read_hybrid(raw: dict, file: Path) -> HybridConfig:
    """Read config.json, whose content is `raw`.

    If an entry is not supported, raise a ValueError or TypeError that names `file`.
    """
    names = "num_key_heads num_value_heads key_head_dim value_head_dim conv_kernel_dim"
    heads = DeltaHeads(*(check_int(f"{file}: linear_{n}", raw[f"linear_{n}"], low=1) for n in names.split()))
    if heads.num_values % heads.num_keys:
        raise ValueError(
            f"{file}: linear_num_value_heads={heads.num_values}: must be a multiple of linear_num_key_heads "
            f"({heads.num_keys})"
        )
    check_choice(f"{file}: attn_output_gate", raw.get("attn_output_gate", True), (True,))
    check_choice(f"{file}: output_gate_type", raw.get("output_gate_type", "swish"), ("swish", "silu"))
    num_layers = raw["num_hidden_layers"]
    interval = check_int(f"{file}: full_attention_interval", raw["full_attention_interval"], low=1)
    kinds = raw.get("layer_types") or [LAYER_TYPES[(i + 1) % interval == 0] for i in range(num_layers)]
    attention_layers = frozenset(i for i, kind in enumerate(kinds) if kind == "full_attention")
    if not attention_layers:
        raise ValueError(f"{file}: layer_types: at least one layer must be 'full_attention'")
    parts = {"vision": raw.get("vision_config"), "MTP": raw.get("mtp_num_hidden_layers")}
    unused_parts = tuple(name for name, found in parts.items() if found)
    shared_size = 0
    if "num_experts" in raw:
        name = "shared_expert_intermediate_size"
        shared_size = check_int(f"{file}: {name}", raw[name], low=1)
    state_dtype = check_choice(f"{file}: mamba_ssm_dtype", raw.get("mamba_ssm_dtype") or "float32", STATE_DTYPES)
    return HybridConfig(
        attention_layers, heads, num_layers, shared_size, "text_config" in raw, unused_parts, state_dtype
    )
