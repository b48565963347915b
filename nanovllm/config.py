"""Defines `Config`, the settings of an engine. Only `Config.resolve` changes settings after construction."""

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from nanovllm.compat.vllm_settings import translate
from nanovllm.pooling.task import TASKS, find_task
from nanovllm.utils.checks import check_bool, check_choice, check_fields, check_int, check_real, checked
from nanovllm.utils.model_files import find_model, find_tokenizer

if TYPE_CHECKING:
    import torch

    from nanovllm.models import ModelConfig


logger = logging.getLogger("nanovllm")
STATE_DTYPES = ("float32", "bfloat16", "float16")
LOGPROBS_MODES = ("raw_logprobs", "temperature_logprobs", "processed_logprobs")


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of an engine. On construction, most `None` and `"auto"` values are replaced with resolved values.

    Constructing a Config imports PyTorch. Importing this module does not import PyTorch, so that `nanovllm --help`
    needs no PyTorch.

    model: a folder in the Hugging Face layout, a hub id, or `"tiny-qwen3"`, which is part of this package.
    max_num_batched_tokens: maximum number of tokens in a step. Longer prompts take several steps.
    max_mixed_step_ms: target duration in milliseconds of a step that both decodes and computes prompts; by default 50
        on CUDA and 250 on a CPU.
    max_num_mixed_tokens: maximum number of tokens in such a step; by default, as many as the device computes in
        `max_mixed_step_ms`.
    scheduling_policy: "fcfs" (first come, first served) or "priority" (the request with the lowest `priority` value
        comes first). In Python, also an object with a method `priority_key`: see `engine/scheduling_policy.py`.
    max_num_seqs: maximum number of sequences that run at the same time. Recurrent states may lower the maximum: see
        nanovllm/docs/cache.md.
    max_model_len: maximum number of tokens in a prompt and its answer together; by default 4096 or the model's own
        limit, whichever is smaller.
    gpu_memory_utilization: the fraction of the GPU's memory for weights and cache together.
    tensor_parallel_size: the number of ranks that share the model: 1, 2, 4 or 8. On CUDA, ranks use consecutive GPUs,
        starting with `device`.
    expert_parallel: with several ranks, give each rank whole experts instead of a part of every expert.
    enforce_eager: do not use CUDA graphs.
    kvcache_block_size: tokens per cache block, a multiple of 16. The backend "flash" needs a multiple of 256. On CUDA,
        `batch_invariant` needs a multiple of 64.
    num_kvcache_blocks: the number of cache blocks; by default, as many as fit into memory or, on a CPU, into 1 GiB. A
        number that is set here also limits `max_model_len`.
    kv_cache_dtype: the format of cached keys and values: "auto" (the setting `dtype`), or "fp8" with the backend
        "triton" or "sdpa".
    mamba_ssm_cache_dtype: the dtype of stored recurrent states: "float32", "bfloat16", "float16", or "auto" (the
        checkpoint's choice, usually "float32").
    dtype: "float32" (or "float"), "float16" (or "half"), "bfloat16", or "auto": the checkpoint's dtype, or float32 on a
        CPU that would emulate the checkpoint's dtype and has memory for float32. In Python, also a torch.dtype.
    device: "cpu", "cuda", or one GPU, such as "cuda:1". "auto" is "cuda" if there is a CUDA device, else "cpu".
    attention_backend: "triton", "sdpa" or "flash". "auto" is "triton" on CUDA if Triton is installed, else "sdpa".
    swap_space: size in GiB, for all ranks together, of the host memory that keeps evicted cache blocks: see
        nanovllm/docs/cache.md.
    swap_dir: a folder for copies of the blocks in host memory, which outlive the process. Needs `swap_space`.
    swap_dir_space: maximum size in GiB of each model's files in `swap_dir`.
    enable_prefix_caching: reuse the cache blocks of earlier requests that begin with the same tokens.
    async_scheduling: prepare a step while the previous step runs; by default on CUDA only.
    seed: makes the results of requests without their own `seed` repeatable; by default, each run differs.
    tokenizer: the folder or hub id of the tokenizer; by default the model's.
    revision: the branch, tag or commit of a model on the hub; by default, the hub's default branch.
    quantization: "fp8", "int8" or "int4" quantizes the weights of linear layers while they are loaded: see
        nanovllm/docs/quantization.md.
    load_format: "auto" and "safetensors" read the weights. "dummy" makes random weights, and needs no weight files.
    logprobs_mode: the distribution that `logprobs` describe: that of the model's logits ("raw_logprobs"), of logits
        divided by the temperature ("temperature_logprobs"), or the one that is sampled from ("processed_logprobs").
    enable_sleep_mode: allow `sleep`, which frees memory until `wake_up` is called; see nanovllm/docs/training.md.
    batch_invariant: make the tokens and log-probabilities of a request bitwise identical in any batch; see
        nanovllm/docs/batch-invariance.md.
    max_logprobs: upper limit for `logprobs` and `prompt_logprobs` of a request, in Python and over HTTP. -1 means the
        vocabulary size.
    enable_lora: allow requests to use low-rank adapters; see nanovllm/docs/lora.md.
    max_loras: the number of adapters that are on the device at the same time.
    max_lora_rank: upper limit for the rank of adapters, for which memory is allocated.
    max_expert_lora_rank: the same limit for experts; with 0, adapters of experts are refused.
    speculative_config: how tokens are drafted, as JSON with the keys in nanovllm/docs/speculation.md. In Python, also a
        dict.
    task: "generate", "embed" (texts to vectors), "score" (the relevance of documents) or "classify"; by default the
        task for which the checkpoint was made. "pooling" also selects this task, but "embed" in place of "generate".
        See nanovllm/docs/embeddings.md.
    language_model_only: load no vision tower, and take no images.
    limit_mm_per_prompt: the maximum number of images in a prompt, as JSON such as `{"image": 4}`; by default 999.
    mm_processor_kwargs: the minimum and maximum number of pixels, as JSON with the keys `min_pixels` and
        `max_pixels`. Images outside of these limits are scaled.
    allowed_local_media_path: a folder with images to which conversations may refer; by default none. See
        nanovllm/docs/images.md.
    allowed_media_domains: the hosts from which conversations may take images; by default none.

    Raises a ValueError or TypeError that states the value and what is allowed, or FileNotFoundError if the model does
    not exist.
    """

    model: str
    _: KW_ONLY
    max_num_batched_tokens: int = checked(16384, check_int, low=1, high=2**20)
    max_mixed_step_ms: float | None = checked(None, check_real, low=0.1, high=1e6)
    max_num_mixed_tokens: int | None = checked(None, check_int, low=1)
    scheduling_policy: Any = checked("fcfs", "nanovllm.utils.setting_checks:check_policy")
    max_num_seqs: int = checked(512, check_int, low=1, high=2**16)
    max_model_len: int | None = checked(None, check_int, low=2)
    gpu_memory_utilization: float = checked(0.9, check_real, low=0.01, high=1.0)
    tensor_parallel_size: int = checked(1, check_int, low=1)
    expert_parallel: bool = checked(False, check_bool)
    enforce_eager: bool = checked(False, check_bool)
    kvcache_block_size: int = checked(256, check_int, low=16, high=2**16)
    num_kvcache_blocks: int | None = checked(None, check_int, low=1, high=2**31 - 1)
    kv_cache_dtype: str = checked("auto", check_choice, choices=("auto", "fp8"))
    mamba_ssm_cache_dtype: str = checked("auto", check_choice, choices=("auto", *STATE_DTYPES))
    dtype: "str | torch.dtype" = "auto"
    device: str = "auto"
    attention_backend: str = "auto"
    swap_space: float = checked(0.0, check_real, low=0.0, high=2**20)
    swap_dir: str | None = None
    swap_dir_space: float = checked(64.0, check_real, low=0.0, high=2**20)
    enable_prefix_caching: bool = checked(True, check_bool)
    async_scheduling: bool | None = checked(None, check_bool)
    seed: int | None = checked(None, check_int, low=0, high=2**64 - 1)
    tokenizer: str | None = None
    revision: str | None = checked(None, "nanovllm.utils.setting_checks:check_revision")
    quantization: str | None = None
    load_format: str = checked("auto", check_choice, choices=("auto", "safetensors", "dummy"))
    logprobs_mode: str = checked("raw_logprobs", check_choice, choices=LOGPROBS_MODES)
    max_logprobs: int = checked(100, check_int, low=-1)
    enable_sleep_mode: bool = checked(False, check_bool)
    batch_invariant: bool = checked(False, check_bool)
    enable_lora: bool = checked(False, check_bool)
    max_loras: int = checked(8, check_int, low=1, high=256)
    max_lora_rank: int = checked(64, check_int, low=1, high=512)
    max_expert_lora_rank: int = checked(0, check_int, low=0, high=512)
    speculative_config: Any = None
    task: str = checked("auto", check_choice, choices=("auto", *TASKS, "pooling"))
    language_model_only: bool = checked(False, check_bool)
    limit_mm_per_prompt: Any = checked(None, "nanovllm.vision.vision_config:check_limits")
    mm_processor_kwargs: Any = checked(None, "nanovllm.vision.vision_config:check_pixels")
    allowed_local_media_path: str = ""
    allowed_media_domains: Sequence[str] | None = checked(None, "nanovllm.vision.vision_config:check_domains")
    dtype_reason: str = field(init=False, repr=False)  # why "auto" was resolved to this dtype
    eos: int = field(default=-1, init=False, repr=False)  # from the tokenizer; -1 until the engine has loaded it
    num_states: int = field(default=0, init=False, repr=False)  # for layers that keep states: see cache/state.py
    num_window_tables: int = field(default=0, init=False, repr=False)  # see cache/window_tables.py
    cache_window: int = field(default=0, init=False, repr=False)  # the window of the layers that use these tables
    table_views: tuple = field(default=(), init=False, repr=False)  # see cache/window_tables.py
    model_config: "ModelConfig" = field(init=False, repr=False)  # its `dtype` is the resolved dtype
    pooling: Any = field(default=None, init=False, repr=False)  # a PoolingConfig, unless the task is "generate"

    def __post_init__(self) -> None:
        from nanovllm.models import ModelConfig, dtype_in_use

        self._check_settings()
        device = _resolve_device(self.device, self.tensor_parallel_size)
        runs_plain_torch = device == "cpu" and self.attention_backend in ("auto", "sdpa") and not self.batch_invariant
        backend, block_multiple = "sdpa", 16
        if not runs_plain_torch:
            from nanovllm.attention import check_head_dim, resolve_backend  # only kernels need these checks

            backend, block_multiple = resolve_backend(self, device)
        if (block_size := self.kvcache_block_size) % block_multiple:
            raise ValueError(f"kvcache_block_size={block_size}: must be a multiple of {block_multiple} for {backend!r}")
        folder = find_model(self.model, self.revision, with_weights=self.load_format != "dummy")
        model_config = ModelConfig.read(folder, self.quantization)
        for name in ("moe", "hybrid", "vision"):
            if (part := getattr(model_config, name)) is not None:
                model_config = replace(model_config, **{name: part.with_settings(self)})
        if self.tensor_parallel_size > 1:
            from nanovllm.distributed.division import check_divides

            check_divides(model_config, self.tensor_parallel_size)
        if not runs_plain_torch:
            check_head_dim(model_config.head_dim, device, backend)
        dtype, dtype_reason = dtype_in_use(self.dtype, model_config.dtype, device, folder)
        self.resolve(
            model=str(folder),
            tokenizer=str(find_tokenizer(self.tokenizer, folder)),
            model_config=replace(model_config, dtype=dtype),
            device=device,
            attention_backend=backend,
            dtype=dtype,
            dtype_reason=dtype_reason,
            max_mixed_step_ms=self.max_mixed_step_ms or (250.0 if device == "cpu" else 50.0),
            max_model_len=self._resolve_max_model_len(model_config.max_position_embeddings),
            task=self.task if self.task in TASKS else find_task(folder, pools=self.task == "pooling"),
            async_scheduling=device.startswith("cuda") if self.async_scheduling is None else self.async_scheduling,
        )
        if device == "cpu" and self.gpu_memory_utilization != 0.9:
            words = "gpu_memory_utilization=%s: has no effect on a CPU; num_kvcache_blocks sets the size of the cache"
            logger.warning(words, self.gpu_memory_utilization)
        if self.task != "generate":
            self._resolve_pooling(folder)
        if self.swap_space or self.swap_dir is not None:
            from nanovllm.tiers.swap_space import check_swap_space  # rarely needed

            check_swap_space(self)
        if self.speculative_config is not None:
            from nanovllm.spec_decode.speculative_config import read_speculative_config  # few engines draft tokens

            self.resolve(speculative_config=read_speculative_config(self))

    def resolve(self, **settings) -> None:
        """Replace settings with resolved values. The ModelRunner sets measured values, and the LLMEngine sets `eos`."""
        for name, value in settings.items():
            object.__setattr__(self, name, value)

    @classmethod
    def create(cls, model: str, settings: dict) -> "Config":
        """Make a Config from keyword settings. `compat.vllm_settings` translates vLLM's setting names and values.

        Raises TypeError for an unknown name, with a list of the known names.
        """
        known = [f.name for f in fields(cls) if f.init][1:]
        if None in settings.values() or not settings.keys() <= {*known}:
            settings = translate(settings, known)
        return cls(model, **settings)

    def _resolve_pooling(self, folder: Path) -> None:
        """Read how the checkpoint pools hidden states, and turn off settings that only matter for generation."""
        if self.speculative_config is not None:
            raise ValueError(f"speculative_config={self.speculative_config!r}: must be None with task={self.task!r}")
        if self.enable_lora:
            raise ValueError(f"enable_lora=True: must be False with task={self.task!r}")
        from nanovllm.pooling.pooling_config import read_pooling_config  # few engines pool

        pooling = read_pooling_config(folder, Path(str(self.tokenizer)), self.task, self.model_config)
        hits = self.enable_prefix_caching and pooling.mode == "last"  # otherwise, all hidden states are needed
        model = replace(self.model_config, vision=None)
        self.resolve(model_config=model, pooling=pooling, enable_prefix_caching=hits, enforce_eager=True)

    @property
    def hf_config(self) -> Any:
        """The model's config.json, as transformers parses it. The engine itself uses `model_config`."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.model)

    @property
    def max_blocks_per_seq(self) -> int:
        """The number of blocks that the longest possible sequence needs."""
        assert self.max_model_len is not None, "is resolved on construction"
        return -(-self.max_model_len // self.kvcache_block_size)

    @property
    def num_block_tables(self) -> int:
        """The number of block tables of a sequence. A block stores keys and values for the layers of a single table."""
        return 1 + self.num_window_tables

    @property
    def tokens_per_row(self) -> int:
        """The maximum number of tokens that a sequence gets in a step: one more than the maximum number of drafts."""
        return 1 + (self.speculative_config.num_speculative_tokens if self.speculative_config else 0)

    def device_of(self, rank: int) -> "torch.device":
        """Return the device of a rank. On CUDA, ranks use consecutive GPUs, starting with `device`."""
        import torch

        device = torch.device(self.device)
        return torch.device("cuda", (device.index or 0) + rank) if device.type == "cuda" else device

    def _check_settings(self) -> None:
        for setting in fields(self):
            if setting.init and isinstance(value := getattr(self, setting.name), str):
                self.resolve(**{setting.name: str.__str__(value)})  # an Enum's class may be unknown to other ranks
        check_fields(self)
        check_choice("tensor_parallel_size", self.tensor_parallel_size, (1, 2, 4, 8))
        if self.enable_lora and self.batch_invariant:
            raise ValueError("enable_lora=True: is not supported with batch_invariant=True")

    def _resolve_max_model_len(self, max_position_embeddings: int) -> int:
        length = min(4096, max_position_embeddings) if self.max_model_len is None else self.max_model_len
        check_int("max_model_len", length, low=2, high=max_position_embeddings)
        if self.num_kvcache_blocks is not None:
            length = min(length, self.num_kvcache_blocks * self.kvcache_block_size)
        return length


P = ParamSpec("P")
Init = Callable[Concatenate[Any, P], None]


def takes_settings_of(settings: Callable[P, object]) -> Callable[[Callable[..., None]], Init[P]]:
    """Decorate `__init__` with the signature of the class `settings`, for editors, type checkers and `help`."""

    def decorate(init: Callable[..., None]) -> Init[P]:
        init.__signature__ = inspect.signature(settings.__init__)  # type: ignore[attr-defined, misc]
        return init

    return decorate


def _resolve_device(name: str, num_ranks: int) -> str:
    if name == "auto":
        import torch

        name = "cuda" if torch.cuda.is_available() else "cpu"
    if (name := str(name)).partition(":")[0] == "cpu":
        return "cpu"
    from nanovllm.utils.device_checks import check_devices  # not needed on a CPU

    check_devices(name, num_ranks)
    return name
