"""Builds an engine from its settings."""

from collections.abc import Callable
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.engine import Engine, SingleRank
from nanovllm.engine.output_processor import OutputProcessor
from nanovllm.engine.runners import make_runner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.state_blocks import StateBlockManager
from nanovllm.engine.window_blocks import WindowBlockManager
from nanovllm.pooling.pooling_scheduler import PoolingScheduler
from nanovllm.spec_decode.drafting_scheduler import DraftingScheduler


def build_engine(config: Config, part_done: Callable[[str], None] = lambda part: None) -> Engine:
    """Build an engine and load its model. `part_done(name)` is called after each startup phase.

    Raises RuntimeError if a rank does not start.
    """
    workers: Any = SingleRank()
    if config.tensor_parallel_size > 1:
        from nanovllm.distributed.worker import Workers  # a single rank needs no processes and channels

        workers = Workers(config)
    engine = Engine(config, workers)
    try:
        tp = workers.connect()
        part_done("ranks")
        engine.model_runner = make_runner(config, part_done, tp)
        workers.wait_until_started()
    except BaseException as error:
        engine.close_after(error)
        raise
    # only now, because the runner determines the numbers of cache blocks and states
    engine.scheduler = make_scheduler(config)
    if config.enable_lora:
        from nanovllm.lora.setup import use_adapters  # few engines have adapters

        use_adapters(engine)
    if config.swap_space:
        from nanovllm.tiers import disk_tier, host_tier  # rarely needed

        (host_tier.use_host_tier if config.swap_dir is None else disk_tier.use_disk_tier)(engine)
        part_done("host memory")
    if config.model_config.vision is not None:
        from nanovllm.vision.setup import use_images  # few engines take images

        use_images(engine)
    engine.output_processor = OutputProcessor(engine.scheduler)
    return engine


def make_scheduler(config: Config) -> Scheduler:
    """Make the scheduler. `config.num_kvcache_blocks` must be known."""
    block_manager: BlockManager | None = None
    sizes = config.num_kvcache_blocks or 0, config.kvcache_block_size, config.enable_prefix_caching
    if config.num_window_tables:
        block_manager = WindowBlockManager(*sizes, config.num_window_tables, config.cache_window)
    elif config.num_states:
        block_manager = StateBlockManager(*sizes, config.max_num_seqs, config.num_states)
    if config.speculative_config is not None:
        return DraftingScheduler(config, block_manager)
    return (PoolingScheduler if config.pooling else Scheduler)(config, block_manager)
