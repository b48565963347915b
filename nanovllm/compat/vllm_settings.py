"""Lists the settings of vLLM's engine (up to version 0.26) that nano-vllm's engine lacks."""

from collections.abc import Collection
from numbers import Real
from typing import Any

from nanovllm.utils.checks import check_real, unknown_name

# settings that have a different name here
ALIASES = {
    "block_size": "kvcache_block_size",
    "num_gpu_blocks_override": "num_kvcache_blocks",
    "enable_expert_parallel": "expert_parallel",
    "kv_offloading_size": "swap_space",
}
# settings whose default is None in vLLM but not here
NONE_IS_DEFAULT = (
    *("attention_backend", "block_size", "enable_prefix_caching", "kv_offloading_size"),
    *("max_num_batched_tokens", "max_num_seqs"),
)
# (accepted values or types of values, names of settings); a value is accepted if ignoring it changes nothing
GROUPS: tuple[tuple[tuple, str], ...] = (
    # unneeded permissions, log output, and hints for vLLM's computation: any value is accepted
    (
        (bool,),
        "aggregate_engine_logging allow_deprecated_quantization cudagraph_metrics disable_cascade_attn "
        "disable_chunked_mm_input disable_custom_all_reduce disable_log_requests disable_log_stats "
        "enable_log_requests enable_logging_iteration_details enable_mfu_metrics enable_mm_processor_stats "
        "interleave_mm_strings jit_monitor_verbose kv_cache_metrics scheduler_reserve_full_isl "
        "skip_mm_profiling trust_remote_code use_fp64_gumbel use_tqdm_on_load",
    ),
    (
        (bool, None),
        "disable_hybrid_kv_cache_manager disable_nccl_for_dp_synchronization enable_bf16x3_router_gemm "
        "enable_chunked_prefill enable_flashinfer_autotune",
    ),
    (
        (Real,),
        "dbo_decode_token_threshold dbo_prefill_token_threshold kv_cache_metrics_sample long_prefill_token_threshold "
        "max_long_partial_prefills max_num_partial_prefills max_seq_len_to_capture "
        "mm_processor_cache_gb mm_shm_cache_max_object_size_mb optimization_level prefill_schedule_interval "
        "renderer_num_workers safetensors_prefetch_block_size safetensors_prefetch_num_threads shutdown_timeout "
        "stream_interval watermark",
    ),
    (
        (Real, None),
        "cpu_distributed_timeout_seconds distributed_timeout_seconds max_cpu_loras max_cudagraph_capture_size",
    ),
    ((int, dict, None), "compilation_config"),
    ((dict, None), "structured_outputs_config"),
    ((None, dict), "kv_transfer_config"),
    ((list, None), "cudagraph_capture_sizes"),
    ((str,), "jit_monitor_mode mamba_backend performance_mode prefix_caching_hash_algo pt_load_map_location"),
    ((str, None), "show_hidden_metrics_for_version"),
    # features that this engine lacks: only values that leave the feature off are accepted
    (
        (False,),
        "calculate_kv_scales data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb "
        "disable_sliding_window enable_cumem_allocator enable_dbo enable_elastic_ep enable_ep_weight_filter "
        "enable_eplb enable_layerwise_nvtx_tracing enable_mamba_cache_stochastic_rounding "
        "enable_mixed_moe_lora_format enable_mm_embeds enable_moe_shared_loras enable_prompt_embeds "
        "enable_return_routed_experts enable_tower_connector_lora fail_on_environ_validation "
        "fully_sharded_loras kv_sharing_fast_prefill mm_encoder_only numa_bind ray_workers_use_nsight "
        "skip_tokenizer_init specialize_active_lora tokens_only",
    ),
    (
        (None,),
        "code_revision collect_detailed_traces data_parallel_address data_parallel_rank "
        "data_parallel_rpc_port data_parallel_size_local data_parallel_start_rank default_mm_loras device_ids "
        "diffusion_config download_dir ec_transfer_config gdn_prefill_backend hf_config_path hf_token "
        "io_processor_plugin kv_cache_memory_bytes kv_events_config "
        "lora_target_modules mamba_block_size max_num_scheduled_tokens max_parallel_loading_workers "
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "numa_bind_cpus numa_bind_nodes otlp_traces_endpoint override_attention_dtype "
        "pooler_config prefix_match_unit quantization_config reasoning_config reasoning_parser_plugin "
        "safetensors_load_strategy scheduler_cls served_model_name spec_method spec_model spec_tokens "
        "tokenizer_revision video_pruning_rate weight_transfer_config",
    ),
    (
        (None, {}),
        "additional_config attention_config eplb_config hf_overrides ir_op_priority kernel_config "
        "mamba_config media_io_kwargs model_class_overrides model_loader_extra_config override_generation_config "
        "profiler_config",
    ),
    ((None, [], ()), "kv_cache_dtype_skip_layers logits_processors"),
    ((None, set(), []), "cpu_offload_params offload_params"),
    (
        (0, 0.0),
        "cpu_offload_gb mamba_cache_philox_rounds mm_ipc_gpu_memory_gb node_rank offload_group_size ubatch_size",
    ),
    (
        (1,),
        "cp_kv_cache_interleave_size data_parallel_size dcp_kv_cache_interleave_size decode_context_parallel_size "
        "nnodes offload_num_in_group offload_prefetch_step pipeline_parallel_size prefill_context_parallel_size",
    ),
    (("",), "model_weights reasoning_parser worker_extension_cls"),
    (
        ("auto",),
        "config_format generation_config linear_backend lora_dtype mamba_cache_dtype "
        "moe_backend offload_backend tokenizer_mode worker_cls",
    ),
    (("auto", "vllm"), "model_impl"),
    (("auto", "generate", "pooling"), "runner"),  # see `translate`
    (("auto", "none"), "convert"),
    ((None, "mp", "uni"), "distributed_executor_backend"),
    (("mp",), "data_parallel_backend"),
    (("127.0.0.1",), "master_addr"),
    ((29501,), "master_port"),
    (("linear",), "expert_placement_strategy"),
    (("ag_rs",), "dcp_comm_backend"),
    (("allgather_reducescatter",), "all2all_backend"),
    (("native",), "kv_offloading_backend"),
    (("none",), "mamba_cache_mode"),
    (("lru", None), "mm_processor_cache_type"),
    (("weights",), "mm_encoder_tp_mode"),
    (("direct_rpc",), "mm_tensor_ipc"),
    ((1.5,), "mm_encoder_fp8_scale_save_margin"),
    ((["original/**/*"], "original/**/*"), "ignore_patterns"),
)
VLLM_SETTINGS = {name: accepted for accepted, names in GROUPS for name in names.split()}
STRUCTURED_OUTPUTS_CONFIG = {
    "backend": (str,),  # llguidance makes the masks in any case
    "disable_any_whitespace": (False,),  # LLM of compat.vllm handles these two
    "disable_additional_properties": (False,),
    "enable_in_reasoning": (False,),
    "reasoning_parser": ("",),
    "reasoning_parser_plugin": ("",),
}
KV_TRANSFER_CONFIG = {
    "kv_connector": ("OffloadingConnector", None),
    "kv_role": ("kv_both", None),
    "kv_connector_extra_config": (dict,),
    "kv_load_failure_policy": ("recompute",),
    "engine_id": (str, None),
}
OFFLOADING = {
    "spec_name": ("CPUOffloadingSpec",),
    "eviction_policy": ("lru",),
    "block_size": (int,),  # of host memory; here, blocks have the same size as on the device
    "store_threshold": (0, 1),
    "max_tracker_size": (int,),  # only used with a larger store_threshold
}


def translate(settings: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Translate the names of vLLM's settings to nano-vllm's names, which are in `known`.

    Raises ValueError if a vLLM setting has an unsupported value. Raises TypeError for an unknown name, and for a
    setting that is given under both vLLM's name and nano-vllm's name.
    """
    renamed: dict[str, Any] = {}
    for given, value in settings.items():
        name = ALIASES.get(given, given)
        if name != given and name in settings:
            raise TypeError(f"{given}={value!r}: is vLLM's name for {name!r}, which is given too")
        if value is not None or given not in NONE_IS_DEFAULT:
            renamed[name] = value
    if isinstance(transfer := renamed.get("kv_transfer_config"), dict) and (num_bytes := _offloaded_bytes(transfer)):
        if "swap_space" in renamed:
            raise TypeError(f"kv_transfer_config={transfer!r:.200}: sets 'swap_space', which is given too")
        renamed["swap_space"] = num_bytes / 2**30
    runner, task = renamed.get("runner", "auto"), renamed.get("task", "auto")
    if "generate" in (runner, task) and "auto" not in (runner, task) and runner != task:
        raise ValueError(f"runner={runner!r}: contradicts task={task!r}")
    if runner in ("generate", "pooling") and task == "auto":
        renamed["task"] = runner
    ours = select("setting", renamed, known, VLLM_SETTINGS)
    config = renamed.get("structured_outputs_config") or {}
    select("key of structured_outputs_config", config, (), STRUCTURED_OUTPUTS_CONFIG)
    return ours


def _offloaded_bytes(transfer: dict[str, Any]) -> float:
    """Return the bytes of host memory that a `kv_transfer_config` asks for, summed over all ranks.

    The default is 0.
    """
    select("key of kv_transfer_config", transfer, (), KV_TRANSFER_CONFIG)
    if transfer.get("kv_connector") is None:
        return 0.0
    extra = transfer.get("kv_connector_extra_config", {})
    select("key of kv_connector_extra_config", extra, ("cpu_bytes_to_use",), OFFLOADING)
    return check_real("cpu_bytes_to_use", extra.get("cpu_bytes_to_use"), low=1, high=2**50)


def select(
    kind: str, values: dict[str, Any], known: Collection[str], accepted: dict[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Return the values whose names are in `known`. Check the remaining values against `accepted`.

    Raises TypeError for a name that is in neither `known` nor `accepted`. Raises ValueError for a value that is not
    accepted.
    """
    for name, value in values.items():
        if name in known:
            continue
        if name not in accepted:
            raise unknown_name(kind, name, known or accepted)
        check_accepted(name, value, accepted[name])
    return {name: value for name, value in values.items() if name in known}


def check_accepted(name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    """Raise ValueError unless `accepted` contains the type of `value`, or an equal value of the same type."""
    for choice in accepted:
        if isinstance(choice, type):
            if isinstance(value, choice) and (choice is bool or not isinstance(value, bool)):
                return
        elif type(value) is type(choice) and value == choice:
            return
    bound = " or ".join(f"of type {x.__name__}" if isinstance(x, type) else repr(x) for x in accepted)
    raise ValueError(f"{name}={value!r:.80}: is not supported; it must be {bound}, or left out")
