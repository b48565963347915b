"""An engine's statistics, and its one-line description."""

from typing import TYPE_CHECKING

from nanovllm.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from nanovllm.config import Config


def stats_of(scheduler: Scheduler) -> dict:
    """Return the dict of `LLMEngine.stats`. If a step runs at the same time, some counts may be older than others."""
    totals, blocks = scheduler.totals, scheduler.block_manager
    num_free, num_cached = len(blocks.free_block_ids), blocks.num_cached
    optional = scheduler.feature_stats() | {"block_groups": blocks.groups(), "tiers": blocks.tiers()}
    return {
        "requests": {"waiting": len(scheduler.waiting), "running": scheduler.num_running},
        "blocks": {"used": len(blocks.blocks) - num_free, "cached": num_cached, "free": num_free - num_cached},
        "prefix_hit_rate": totals["cached_tokens"] / max(1, totals["prompt_tokens"]),
        "preemptions": scheduler.num_preemptions,
        "tokens": {"in": totals["prompt_tokens"], "out": totals["output_tokens"]},
        "steps": {kind: totals[f"{kind}_steps"] for kind in ("prefill", "decode", "mixed")},
        **{name: counts for name, counts in optional.items() if counts},
    }


def described(config: "Config") -> str:
    """Return one line for `repr(llm)`, with the settings that differ between machines and models."""
    num_tokens = (config.num_kvcache_blocks or 0) * config.kvcache_block_size
    dtype = str(config.dtype).removeprefix("torch.") + (f" ({config.dtype_reason})" if config.dtype_reason else "")
    import torch  # only here, because the scheduler's tests read the counts without PyTorch

    num_threads = torch.get_num_threads()
    threads = f" with {num_threads} thread{'s' * (num_threads > 1)}" if config.device == "cpu" else ""
    model = config.model_config
    parts = [part for part in getattr(model.hybrid, "unused_parts", ()) if part != "vision" or model.vision is None]
    left_out = f" without its {' and '.join(parts)} part" if parts else ""
    states = f"{config.num_states:,} states for up to {config.max_num_seqs:,} sequences, " if config.num_states else ""
    swap = f"{config.swap_space:g} GiB of host memory for more, " if config.swap_space else ""
    swap += f"{config.swap_dir_space:g} GiB of files in {config.swap_dir!r}, " if config.swap_dir else ""
    cache = "" if config.kv_cache_dtype == "auto" else f" in {config.kv_cache_dtype}"
    return (
        f"LLM({config.model!r}{left_out}: {config.device}{threads}, {dtype}, attention by {config.attention_backend}, "
        f"max_model_len {config.max_model_len:,}, {config.num_kvcache_blocks:,} blocks for {num_tokens:,} "
        f"tokens{cache}, {swap}{states}prefix caching {'on' if config.enable_prefix_caching else 'off'}, "
        f"{config.tensor_parallel_size} rank{'s' * (config.tensor_parallel_size > 1)})"
    )
