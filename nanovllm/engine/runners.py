"""Chooses the model runner of a rank: the plain `ModelRunner` or a subclass."""

from collections.abc import Callable
from pkgutil import resolve_name

from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.utils.tensor_parallel import TensorParallel

RUNNERS = {"cuda": "nanovllm.cuda.runner:CUDAModelRunner"}  # device type -> module:class


def make_runner(config: Config, part_done: Callable[[str], None], tp: TensorParallel) -> ModelRunner:
    """Return the runner of this rank, with its model loaded."""
    kind, takes_images = config.device_of(tp.rank).type, config.model_config.vision is not None
    if config.batch_invariant:
        home = f"nanovllm.invariant.{kind}:Runner"
    elif kind in RUNNERS:
        home = RUNNERS[kind]
    elif config.async_scheduling or tp.size > 1 or config.tokens_per_row > 1 or config.pooling or takes_images:
        home = "nanovllm.batches.batch_runner:BatchRunner"
    else:
        return ModelRunner(config, part_done, tp)
    runner = resolve_name(home)
    if config.pooling:
        runner = resolve_name("nanovllm.pooling.pooling_runner:pooling_runner")(runner)
    if takes_images:
        runner = resolve_name("nanovllm.vision.vision_runner:vision_runner")(runner)
    return runner(config, part_done, tp)
