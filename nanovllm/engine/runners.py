"""Chooses the model runner of a rank: the plain `ModelRunner` or a subclass."""

from collections.abc import Callable
from pkgutil import resolve_name

from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.utils.replace import subclass
from nanovllm.utils.tensor_parallel import TensorParallel

RUNNERS = {"cuda": "nanovllm.cuda.runner:CUDAModelRunner"}  # device type -> module:class


def make_runner(config: Config, part_done: Callable[[str], None], tp: TensorParallel) -> ModelRunner:
    """Return the runner of this rank, with its model loaded."""
    kind = config.device_of(tp.rank).type
    if config.batch_invariant:
        home = f"nanovllm.invariant.{kind}:Runner"
    elif kind in RUNNERS:
        home = RUNNERS[kind]
    elif is_plain(config):
        return ModelRunner(config, part_done, tp)
    else:
        home = "nanovllm.batches.batch_runner:BatchRunner"
    runner = resolve_name(home)
    if config.pooling:
        runner = subclass(resolve_name("nanovllm.pooling.pooling_runner:PoolingRunner"), runner, "Pooling")
    if config.model_config.vision:
        home = "vision_graphs:VisionGraphsRunner" if kind == "cuda" else "vision_runner:VisionRunner"
        runner = subclass(resolve_name(f"nanovllm.vision.{home}"), runner, "Vision")
    return runner(config, part_done, tp)


def is_plain(config: Config) -> bool:
    """Return whether the plain ModelRunner can compute the engine's steps."""
    model = config.model_config
    overlaps = config.async_scheduling or config.tensor_parallel_size > 1
    needs_tables = config.tokens_per_row > 1 or model.keeps_states or model.max_table_views or config.enable_lora
    moves_memory = config.enable_sleep_mode or config.swap_space
    return not (overlaps or needs_tables or moves_memory or config.pooling or model.vision)
