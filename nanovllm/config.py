"""Settings of an engine and the shape of its model: frozen, validated, with nothing left to guess."""
import importlib.util
import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

from nanovllm.utils.checks import check_bool, check_choice, check_int, check_real
from nanovllm.utils.distributed import TensorParallel
from nanovllm.utils.hub import find_model

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Qwen3 checkpoint, read from its `config.json` as transformers 4 or 5 wrote it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    dtype: torch.dtype
    rope_inv_freq: tuple[float, ...]  # head_dim / 2 angles per position
    rope_scale: float  # cos and sin are multiplied by it (yarn)
    eos_token_ids: frozenset[int]

    @classmethod
    def read(cls, folder: Path) -> "ModelConfig":
        raw = json.loads((folder / "config.json").read_text())
        check_choice("model_type", raw.get("model_type"), ("qwen3",))
        check_choice("hidden_act", raw.get("hidden_act", "silu"), ("silu",))
        if raw.get("quantization_config"):
            raise ValueError(f"{folder}: quantized checkpoints are not supported (quantization_config is set)")
        if raw.get("use_sliding_window"):
            raise ValueError(f"{folder}: sliding-window attention is not supported (use_sliding_window is set)")
        heads = raw.get("num_attention_heads")
        names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings"
        try:
            plain = {name: raw[name] for name in names.split()}
            head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
            inv_freq, rope_scale = _rope_frequencies(raw, head_dim)
        except KeyError as error:  # transformers' rope initialisers raise it too
            raise ValueError(f"{folder}/config.json: has no {error}") from error
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
        check_choice("the checkpoint's dtype", dtype, DTYPES)
        return cls(
            **plain,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            attention_bias=raw.get("attention_bias", False),
            dtype=DTYPES[dtype],
            rope_inv_freq=inv_freq,
            rope_scale=rope_scale,
            eos_token_ids=_eos_token_ids(folder, raw),
        )

    def check_divides(self, tp: TensorParallel) -> None:
        """ValueError where the ranks can't all have an equal part of the model."""
        tp.share("query heads", self.num_attention_heads)
        tp.for_heads(self.num_key_value_heads).share("key-value heads", self.num_key_value_heads)
        tp.share("inner size of the feed-forward layers", self.intermediate_size)
        tp.share("vocabulary", self.vocab_size)


def _rope_frequencies(raw: dict, head_dim: int) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies and the scale of cos and sin, from `rope_parameters` or `rope_theta` and `rope_scaling`."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    check_choice("rope type", kind, ("default", "linear", "yarn", "llama3"))
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return tuple((1.0 / theta**exponents).tolist()), 1.0
    # transformers is imported here alone: it owns the published definitions of the scaled kinds
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    shape = {name: value for name, value in raw.items() if not name.startswith("rope_")}
    scaling = {"rope_type": kind, **rope}
    config = Qwen3Config(**shape | {"head_dim": head_dim, "rope_theta": theta, "rope_scaling": scaling})
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return tuple(inv_freq.float().tolist()), float(scale)


def _eos_token_ids(folder: Path, raw: dict) -> frozenset[int]:
    """All ids that end a generation: `generation_config.json` may list several, `config.json` is the fallback."""
    if (generation := folder / "generation_config.json").exists():
        raw = raw | json.loads(generation.read_text())
    ids = raw.get("eos_token_id")
    return frozenset([ids] if isinstance(ids, int) else ids or [])


@dataclass(frozen=True, slots=True)
class Config:
    """An engine's settings. `None` and `"auto"` are resolved on construction: what one reads here is what runs.

    model: a folder in the Hugging Face layout, a hub id, or `"tiny-qwen3"`, the model inside this package.
    max_num_batched_tokens: tokens of one prefill step; longer prompts are computed in chunks.
    max_num_seqs: sequences that run at a time, and so the bound of a decode step.
    max_model_len: tokens of a prompt and its generation together; None is the least of 4096 and the model's own.
    gpu_memory_utilization: fraction of the whole card that this engine may use, weights and cache together.
    tensor_parallel_size: 1, 2, 4 or 8 ranks that share the model; on CUDA each has a device, from `device` on.
    enforce_eager: no CUDA graphs.
    kvcache_block_size: tokens of a cache block, a multiple of 16 (of 256 for the `flash` backend).
    num_kvcache_blocks: None sizes the cache from memory. A given number also bounds `max_model_len`.
    dtype: "auto" takes the checkpoint's; "float32", "float16", "bfloat16", or the torch.dtype.
    device: "auto" is "cuda" where there is one, else "cpu".
    attention_backend: "auto" is "triton" on CUDA where Triton is installed, else "sdpa"; or "flash".
    async_scheduling: prepare a step while the one before runs; None is True on CUDA and False on a CPU.
    seed: makes requests without a seed of their own repeatable; None makes every run differ.

    Raises ValueError or TypeError with the value and the bound, FileNotFoundError where there is no such model.
    """

    model: str
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    kvcache_block_size: int = 256
    num_kvcache_blocks: int | None = None
    dtype: str | torch.dtype = "auto"
    device: str = "auto"
    attention_backend: str = "auto"
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    seed: int | None = None
    model_config: ModelConfig = field(init=False, repr=False)

    def __post_init__(self):
        self._check_numbers()
        device = _resolve_device(self.device, self.tensor_parallel_size)
        backend = _resolve_backend(self.attention_backend, device)
        if self.kvcache_block_size % (multiple := 256 if backend == "flash" else 16):
            raise ValueError(f"kvcache_block_size={self.kvcache_block_size}: must be a multiple of {multiple} for {backend!r}")
        folder = find_model(self.model)
        model_config = ModelConfig.read(folder)
        model_config.check_divides(TensorParallel(size=self.tensor_parallel_size))
        resolved = {
            "model": str(folder),
            "model_config": model_config,
            "device": device,
            "attention_backend": backend,
            "dtype": _resolve_dtype(self.dtype, model_config.dtype),
            "max_model_len": self._resolve_max_model_len(model_config.max_position_embeddings),
            "async_scheduling": device != "cpu" if self.async_scheduling is None else self.async_scheduling,
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)

    @classmethod
    def create(cls, model: str, settings: dict) -> "Config":
        """A Config of keyword settings; an unknown name is a TypeError that lists the known ones."""
        known = [f.name for f in fields(cls) if f.init]
        for name in settings:
            if name not in known:
                raise TypeError(f"unknown setting {name!r}: must be one of {', '.join(known[1:])}")
        return cls(model, **settings)

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence there can be."""
        return -(-self.max_model_len // self.kvcache_block_size)

    def device_of(self, rank: int) -> torch.device:
        """The device of a rank: on CUDA one each, from the one that was asked for on."""
        device = torch.device(self.device)
        return torch.device("cuda", (device.index or 0) + rank) if device.type == "cuda" else device

    def _check_numbers(self):
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, low=1)
        check_int("max_num_seqs", self.max_num_seqs, low=1)
        check_int("tensor_parallel_size", self.tensor_parallel_size, low=1)
        check_choice("tensor_parallel_size", self.tensor_parallel_size, (1, 2, 4, 8))
        check_int("kvcache_block_size", self.kvcache_block_size, low=16)
        check_int("num_kvcache_blocks", self.num_kvcache_blocks, low=1, optional=True)
        check_real("gpu_memory_utilization", self.gpu_memory_utilization, low=0.01, high=1.0)
        check_bool("enforce_eager", self.enforce_eager)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_bool("async_scheduling", self.async_scheduling, optional=True)
        check_int("seed", self.seed, low=0, high=2**64 - 1, optional=True)

    def _resolve_max_model_len(self, model_len: int) -> int:
        length = min(4096, model_len) if self.max_model_len is None else self.max_model_len
        check_int("max_model_len", length, low=2, high=model_len)
        if self.num_kvcache_blocks is not None:
            length = min(length, self.num_kvcache_blocks * self.kvcache_block_size)
        return length


def _resolve_device(name: str, num_ranks: int) -> str:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = str(name).partition(":")
    check_choice("device", kind, ("auto", "cpu", "cuda"))
    if kind == "cpu":
        return "cpu"
    count = torch.cuda.device_count()
    if not (number.isdecimal() or not number) or int(number or 0) >= count:
        raise ValueError(f"device={name!r}: there are {count} CUDA devices here; or use 'cpu'")
    if int(number or 0) + num_ranks > count:
        raise ValueError(f"tensor_parallel_size={num_ranks}: from {name!r} on there are {count - int(number or 0)} devices")
    return str(name)


def _resolve_backend(backend: str, device: str) -> str:
    check_choice("attention_backend", backend, ("auto", "flash", "triton", "sdpa"))
    if backend == "auto":
        return "triton" if device != "cpu" and importlib.util.find_spec("triton") else "sdpa"
    package = {"flash": "flash_attn", "triton": "triton"}.get(backend)
    if package and importlib.util.find_spec(package) is None:
        hint = "pip install 'nano-vllm[flash]'" if backend == "flash" else "pip install triton"
        raise ValueError(f"attention_backend={backend!r}: the package {package} is not installed ({hint})")
    if device == "cpu" and package and not (backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"):
        raise ValueError(f"attention_backend={backend!r}: needs device='cuda'")
    return backend


def _resolve_dtype(dtype: str | torch.dtype, checkpoint: torch.dtype) -> torch.dtype:
    if dtype == "auto":
        return checkpoint
    dtype = str(dtype).removeprefix("torch.")
    check_choice("dtype", dtype, ("auto", *DTYPES))
    return DTYPES[dtype]
