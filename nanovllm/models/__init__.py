"""Finds the model family of a checkpoint, and reads the checkpoint's shape.

A family is a module of this package, named after the `model_type` in config.json and imported on first use. The
family's class has the architecture's name in transformers: the module `qwen3_moe` contains `Qwen3MoeForCausalLM`.
CONTRIBUTING.md shows how to add a family. The class has, besides what `Qwen3ForCausalLM` shows:

- `read_config(raw, file)`: returns the fields of ModelConfig that the family reads from config.json (`raw`), or raises
  a ValueError that names `file`
- `model`, or `model.language_model`: has `layers`, a few of which the engine runs at startup on CUDA

The class may have:

- `layer_types`: supported values of `layer_types` in config.json, by default `full_attention`
- `reads`: the entries of NEUTRAL that `read_config` reads, and that may therefore have any value
- `defaults`: the values of entries that config.json or its `text_config` may omit
- `unused_prefixes`: name prefixes of tensors that the class ignores
- `may_be_nested`: True if the class also computes the text model of multimodal checkpoints

Layers get their rank and the dtype of their weights from utils/construction.py.
"""

import os
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanovllm.quantization import find_quantization
from nanovllm.utils.checks import check_bool, check_choice, check_int, check_object, check_real, read_json
from nanovllm.utils.construction import constructing
from nanovllm.utils.families import find_model_type, model_class
from nanovllm.utils.rope_scaling import inverse_frequencies, scaled_rope
from nanovllm.utils.tensor_parallel import TensorParallel

DTYPES = {name: getattr(torch, name) for name in ("float32", "float", "float16", "half", "bfloat16")}
# entries of config.json that change the result of families that read them; with these values, they change nothing
NEUTRAL = {
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "routed_scaling_factor"), 1.0),
    "clip_qkv": None,
    "is_causal": True,
    "scoring_func": "softmax",
}
# entries of config.json for which the whole model's value overrides that of `text_config`
OF_WHOLE = "model_type", "tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id", "quantization_config"
# a container's memory limit, in both versions of cgroups
MEMORY_LIMITS = [Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory/memory.limit_in_bytes")]


def make_model(config: "ModelConfig", max_len: int, tp: TensorParallel = TensorParallel()) -> nn.Module:
    """Make a rank's model on the default device, without weights, for sequences of up to `max_len` tokens."""
    config = replace(config, max_position_embeddings=max_len)
    if config.rope_long is not None and max_len > config.rope_long[1]:
        config = replace(config, rope_inv_freq=config.rope_long[0])
    with constructing(tp, config.dtype, config.quantization is not None):
        return model_class(config.model_type)(config)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a checkpoint, from a `config.json` written by transformers 4 or 5."""

    model_type: str  # a key of `utils.families.MODELS`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int  # the longest sequence; a rope type may extend the value in config.json
    rms_norm_eps: float
    tie_word_embeddings: bool
    dtype: torch.dtype
    rope_inv_freq: tuple[float, ...]  # angle per position, for each rotated pair of a head
    rope_scale: float  # a factor of cos and sin (YaRN)
    eos_token_ids: frozenset[int]
    # fields set by `read_config` of a family's class
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None  # how many tokens a token attends to, including itself
    moe: Any = None  # MoEConfig of moe/, if there are layers with a mixture of experts
    attention_fraction: float = 1.0  # the fraction of layers that attend to all tokens
    max_table_views: int = 0  # an upper bound of the number of `Config.table_views`
    keeps_states: bool = False  # whether there are layers that keep a state: see cache/state.py
    hybrid: Any = None  # HybridConfig, if these layers are those of delta_net/
    vision: Any = None  # VisionConfig of vision/, if the engine takes images
    quantization: Any = None  # weight formats of linear layers: see quantization/
    rope_long: tuple[tuple[float, ...], int] | None = None  # (`rope_inv_freq` above a length, this length)
    details: Any = None  # further fields of a single family

    @classmethod
    def read(cls, folder: Path, quantization: str | None = None, raw: dict | None = None) -> "ModelConfig":
        """Read the config.json in `folder`, or use `raw`, its content. Errors (ValueError, TypeError) name the file."""
        file = folder / "config.json"
        raw = raw or read_json(file)
        model_type = find_model_type(raw, file)
        family = model_class(model_type)
        for name in ("text_config", "quantization_config"):
            check_object(f"{file}: {name}", raw.get(name) or {})
        defaults, text = getattr(family, "defaults", {}), raw.get("text_config") or {}
        raw = defaults | raw | text | {name: raw[name] for name in OF_WHOLE if raw.get(name) is not None}
        if raw.get("rope_parameters") is None:  # transformers uses its default
            raw = raw | {"rope_parameters": defaults.get("rope_parameters")}
        check_choice(f"{file}: hidden_act", raw.get("hidden_act", "silu"), family.hidden_acts)
        if raw.get("use_sliding_window"):
            raise ValueError(f"{file}: sliding-window attention is not supported (use_sliding_window is set)")
        for name in NEUTRAL.keys() - getattr(family, "reads", ()):
            check_choice(f"{file}: {name}", raw.get(name), (None, NEUTRAL[name]))
        kinds = raw.get("layer_types") or ()
        for kind in kinds:
            check_choice(f"{file}: layer_types: a layer", kind, getattr(family, "layer_types", ("full_attention",)))
        heads = raw.get("num_attention_heads")
        names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings"
        try:
            plain: dict[str, Any] = {name: check_int(f"{file}: {name}", raw[name], low=1) for name in names.split()}
            head_dim = check_int(f"{file}: head_dim", raw.get("head_dim") or raw["hidden_size"] // heads, low=2)
            kv_heads = check_int(f"{file}: num_key_value_heads", raw.get("num_key_value_heads") or heads, low=1)
            if heads % kv_heads:
                raise ValueError(f"{file}: num_key_value_heads={kv_heads}: must divide num_attention_heads={heads}")
            if head_dim % 2:
                raise ValueError(f"{file}: head_dim={head_dim}: must be even")
            if kinds and len(kinds) != (num_layers := plain["num_hidden_layers"]):
                raise ValueError(
                    f"{file}: layer_types: lists {len(kinds)} layers, not {num_layers} (num_hidden_layers)"
                )
            inv_freq, rope_scale, plain["max_position_embeddings"], rope_long = read_rope(raw, head_dim, file)
        except KeyError as error:
            raise ValueError(f"{file}: has no {error}") from error
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
        check_choice(f"{file}: dtype", dtype, DTYPES)
        eos_token_ids = _eos_token_ids(file, raw, plain["vocab_size"])
        if (generation := folder / "generation_config.json").exists():
            eos_token_ids = _eos_token_ids(generation, raw | read_json(generation), plain["vocab_size"])
        formats, quantized = None, raw.get("quantization_config")
        if quantized or quantization is not None or (folder / "hf_quant_config.json").exists():
            formats = find_quantization(quantized, file, quantization)
        return cls(
            model_type=model_type,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=check_real(f"{file}: rms_norm_eps", raw.get("rms_norm_eps", 1e-6), low=0.0, high=1.0),
            tie_word_embeddings=check_bool(f"{file}: tie_word_embeddings", raw.get("tie_word_embeddings", False)),
            dtype=DTYPES[dtype],
            rope_inv_freq=inv_freq,
            rope_scale=rope_scale,
            rope_long=rope_long,
            eos_token_ids=eos_token_ids,
            quantization=formats,
            **(plain | family.read_config(raw, file)),
        )

    @property
    def layer_operations(self) -> int:
        """The number of operations in matmuls for one token, averaged over the layers."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        feed_forward = 3 * self.intermediate_size
        if self.moe:
            fraction = len(self.moe.layers) / self.num_hidden_layers
            without_mlp = 0 if self.moe.is_next_to_mlp else fraction
            feed_forward = (1 - without_mlp) * feed_forward + fraction * self.moe.weights_per_input
        more = self.hybrid.more_weights(queries, keys) if self.hybrid else 0
        return round(2 * self.hidden_size * (2 * queries + 2 * keys + feed_forward + more))

    @property
    def context_of_equal_cost(self) -> float:
        """The context length at which attention, at 2/3 of the speed of matmuls, takes as long as they do."""
        operations_per_key = 1.5 * 4 * self.num_attention_heads * self.head_dim * self.attention_fraction
        return self.layer_operations / operations_per_key if operations_per_key else inf


def read_rope(raw: dict, head_dim: int, file: Path) -> tuple[tuple[float, ...], float, int, Any]:
    """Return ModelConfig's fields `rope_inv_freq`, `rope_scale`, `max_position_embeddings` and `rope_long`.

    Transformers 5 writes `rope_parameters`, and older versions `rope_theta` and `rope_scaling`. `rope_scaling`
    overrides the rest, because users add it for longer contexts.
    """
    rope = {name: raw[name] for name in ("rope_theta", "partial_rotary_factor") if raw.get(name) is not None}
    for name in ("rope_parameters", "rope_scaling"):
        entries = raw.get(name) or {}
        check_object(f"{file}: {name}", entries)
        entries = entries.get("full_attention") or entries  # other layer types may have separate entries
        check_object(f"{file}: {name}: full_attention", entries)
        kind = entries.get("rope_type") or entries.get("type")
        rope |= {name: value for name, value in (entries | {"rope_type": kind}).items() if value is not None}
    theta = rope.pop("rope_theta", 10000.0)
    check_real(f"{file}: rope_theta", theta, low=1e-6, high=1e30)
    kind = rope.pop("rope_type", "default")
    if kind == "default" and not rope:
        return tuple(inverse_frequencies(theta, head_dim).tolist()), 1.0, raw["max_position_embeddings"], None
    inv_freq, scale, max_len, long = scaled_rope(kind, theta, rope, raw, head_dim, file)
    return tuple(inv_freq.tolist()), scale, max_len, long and (tuple(long[0].tolist()), long[1])


def _eos_token_ids(file: Path, raw: dict, vocab_size: int) -> frozenset[int]:
    ids = raw.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    try:
        return frozenset(check_int(f"{file}: eos_token_id", i, low=0, high=vocab_size - 1) for i in ids)
    except TypeError as error:
        raise ValueError(error) from error


# -- the dtype in use --------------------------------------------------------------------------------------------------


def dtype_in_use(wanted: str | torch.dtype, stored: torch.dtype, device: str, folder: Path) -> tuple[torch.dtype, str]:
    """Return the engine's dtype and, if `wanted` is "auto", the reason."""
    if wanted != "auto":
        name = str(wanted).removeprefix("torch.")
        check_choice("dtype", name, ("auto", *DTYPES))
        return DTYPES[name], ""
    if device != "cpu" or stored == torch.float32 or cpu_multiplies(stored):
        return stored, "the checkpoint's"
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if 2 * num_bytes > (memory := cpu_memory()) / 2:
        return stored, f"slow on this CPU, but float32 would take more than half of {memory / 2**30:.1f} GiB"
    return torch.float32, f"this CPU has no instructions for {str(stored).removeprefix('torch.')}"


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Return whether the CPU has special instructions, which PyTorch uses, for matmuls in this 16-bit dtype.

    Without them, matmuls take up to seven times as long as in float32.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    # PyTorch returns True for every CPU with AVX-512; on other architectures, its answer is right
    is_x86 = torch.cpu._is_avx2_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and (not is_x86 or torch.cpu._is_avx512_bf16_supported())


def cpu_memory() -> int:
    """Return how many bytes of memory this process may use. A container's limit may be below the machine's memory."""
    limits = [file.read_text().strip() for file in MEMORY_LIMITS if file.is_file()]  # a number, or "max"
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *(int(x) for x in limits if x.isdigit())])
