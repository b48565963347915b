"""What an engine tells about itself while it runs."""

from nanovllm.engine.scheduler import Scheduler


def scheduler_stats(scheduler: Scheduler) -> dict:
    """See `LLMEngine.stats`."""
    counts, blocks = scheduler.counts, scheduler.block_manager
    num_free = len(blocks.free_block_ids)
    num_cached = sum(blocks.blocks[i].ref_count == 0 for i in [*blocks.hash_to_block_id.values()])
    return {
        "requests": {"waiting": len(scheduler.waiting), "running": len(scheduler.prefilling) + len(scheduler.running)},
        "blocks": {"used": len(blocks.blocks) - num_free, "cached": num_cached, "free": num_free - num_cached},
        "prefix_hit_rate": counts["cached_tokens"] / max(1, counts["prompt_tokens"]),
        "preemptions": scheduler.num_preemptions,
        "tokens": {"in": counts["prompt_tokens"], "out": counts["output_tokens"]},
        "steps": {kind: counts[f"{kind}_steps"] for kind in ("prefill", "decode", "mixed")},
    }
