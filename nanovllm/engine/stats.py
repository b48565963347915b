"""What a scheduler has counted, and how full it is."""

from nanovllm.engine.scheduler import Scheduler


def stats_of(scheduler: Scheduler) -> dict:
    """See `LLMEngine.stats`."""
    totals, blocks = scheduler.totals, scheduler.block_manager
    num_free = len(blocks.free_block_ids)
    num_cached = sum(blocks.blocks[i].ref_count == 0 for i in [*blocks.hash_to_block_id.values()])
    return {
        "requests": {"waiting": len(scheduler.waiting), "running": len(scheduler.prefilling) + len(scheduler.running)},
        "blocks": {"used": len(blocks.blocks) - num_free, "cached": num_cached, "free": num_free - num_cached},
        "prefix_hit_rate": totals["cached_tokens"] / max(1, totals["prompt_tokens"]),
        "preemptions": scheduler.num_preemptions,
        "tokens": {"in": totals["prompt_tokens"], "out": totals["output_tokens"]},
        "steps": {kind: totals[f"{kind}_steps"] for kind in ("prefill", "decode", "mixed")},
    }
