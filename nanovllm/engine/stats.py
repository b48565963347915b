"""An engine's statistics, and its one-line description."""

from typing import TYPE_CHECKING, Any

from nanovllm.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.llm_engine import LLMEngine


def stats_of(scheduler: Scheduler) -> dict:
    """Return the dict of `LLMEngine.stats`. If a step runs meanwhile, the counts may be of different moments."""
    totals, blocks = scheduler.totals, scheduler.block_manager
    num_free = len(blocks.free_block_ids)
    num_cached, groups = blocks.num_cached, blocks.groups()
    accepted = [totals[f"accepted_{i}"] for i in range(totals["num_speculative_tokens"])]
    drafts = {
        "drafts": totals["drafts"],  # sequences with drafts, summed over steps
        "draft_tokens": totals["draft_tokens"],
        "accepted_tokens": sum(accepted),
        "accepted_per_position": accepted,
    }
    return {
        "requests": {"waiting": len(scheduler.waiting), "running": len(scheduler.prefilling) + len(scheduler.running)},
        "blocks": {"used": len(blocks.blocks) - num_free, "cached": num_cached, "free": num_free - num_cached},
        **({"block_groups": groups} if groups else {}),
        "prefix_hit_rate": totals["cached_tokens"] / max(1, totals["prompt_tokens"]),
        "preemptions": scheduler.num_preemptions,
        "tokens": {"in": totals["prompt_tokens"], "out": totals["output_tokens"]},
        **({} if scheduler.task == "generate" else {"pooled": {scheduler.task: totals["pooled_prompts"]}}),
        "steps": {kind: totals[f"{kind}_steps"] for kind in ("prefill", "decode", "mixed")},
        **({"spec_decode": drafts} if accepted else {}),
        **({"tiers": tiers} if (tiers := tiers_of(scheduler)) else {}),
    }


def tiers_of(scheduler: Scheduler) -> dict[str, int]:
    """Return the counts of the prefix cache's tiers. If the device is the only tier, the dict is empty."""
    totals = scheduler.totals
    if not totals["tiers"]:
        return {}
    manager: Any = scheduler.block_manager
    return {
        "device_hits": totals["cached_tokens"] - totals["loaded_tokens"],  # in tokens of prompts
        "host_hits": totals["loaded_tokens"],
        "loaded_blocks": totals["loaded_blocks"],
        "lost_copies": totals["lost_copies"],
        **({"disk_blocks": totals["disk_blocks"]} if totals["tiers"] > 2 else {}),
        **manager.connector.usage(),
    }


def stats_of_engine(llm: "LLMEngine") -> dict:
    """Return the dict of `LLMEngine.stats`, computed between two steps or after `exit`."""
    if llm.model_runner is None:
        return stats_of(llm.scheduler)
    return llm.engine_thread.call(lambda: stats_of(llm.scheduler))


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
