"""Implements sleep mode: `sleep` frees the engine's memory on all ranks, and `wake_up` allocates it again."""

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.engine import Engine, UnavailableError
from nanovllm.rollout.changes import Dropped, in_engine, refusing_requests
from nanovllm.rollout.host_tensors import HostCache, HostWeights
from nanovllm.utils.checks import check_bool, check_choice

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.engine.model_runner import ModelRunner

TAGS = ("weights", "kv_cache")
ASLEEP = "the engine sleeps: wake_up() lets it generate again"
DROPPED = "sleep(level=2) has dropped the weights: load all weights before the engine can generate"
logger = logging.getLogger("nanovllm")


def sleep(llm: "LLMEngine", level: int = 1, keep_prefix_cache: bool = False) -> int:
    """Free the memory of the weights and of the KV cache. The engine does not generate until `wake_up` is called.

    Level 1 keeps the weights in host memory. Level 2 drops the weights, so one or more calls of `load_weights` must
    load all weights after `wake_up`. If the engine already sleeps at level 1, a call with level 2 drops the weights in
    host memory.

    By default, the prefix cache is emptied. If `keep_prefix_cache` is True, the cache blocks in host memory stay. The
    device's blocks are first copied to host memory if they fit. After `wake_up`, prompts find the blocks in host memory
    again, unless the weights were replaced.

    Returns the number of bytes that were freed on each GPU, or on the CPU. Raises ValueError if `level` is not 1 or 2,
    if the engine was started without `enable_sleep_mode=True`, or if `level` is 2 and a 4-bit checkpoint was loaded,
    because `load_weights` can't load such weights. Raises ValueError if `keep_prefix_cache` is combined
    with level 2, or with an engine without `swap_space`. Raises UnavailableError if weights are being replaced, if host
    memory is too small, or if the engine has requests and is not paused. If an error is raised, the engine does not
    change.
    """
    check_choice("level", level, (1, 2))
    check_bool("keep_prefix_cache", keep_prefix_cache)
    _check_enabled(llm)
    if keep_prefix_cache and level == 2:
        raise ValueError("keep_prefix_cache=True: must be False with level=2, because new weights need a new cache")
    if keep_prefix_cache and not llm.core.scheduler.block_manager.tiers():
        raise ValueError("keep_prefix_cache=True: needs swap_space, because sleep frees the device's cache")

    if level == 2 and (formats := llm.config.model_config.quantization) and not formats.quantizes:
        raise ValueError(f"level=2: must be 1, because load_weights can't load the format {formats.name!r} again")

    def work() -> int:
        core = llm.core
        blocks: Any = core.scheduler.block_manager
        with refusing_requests(llm, "asleep", ASLEEP):
            if keep_prefix_cache:
                blocks.store_all()
            if (num_bytes := _on_all_ranks(core, MemoryCall("release", level))) is None:
                raise UnavailableError("sleep(level=1): the host has too little memory to keep the weights")
        (blocks.clear_device if keep_prefix_cache else blocks.clear_prefix_cache)()  # no sequence holds blocks
        if level == 2:
            core.unavailable["weights"] = Dropped(DROPPED)
            if core.adapters is not None:
                core.adapters.slots.clear()  # the adapters were dropped with the weights
        return num_bytes

    num_bytes = in_engine(llm.engine_thread, work)
    logger.info("asleep: %.2f GiB were freed on each device", num_bytes / 2**30)
    return num_bytes


def wake_up(llm: "LLMEngine", tags: Collection[str] | None = None) -> None:
    """Allocate the memory that `sleep` has freed. The new KV cache is empty.

    `tags` selects the memory to allocate: "weights", "kv_cache" or, by default, both.

    Memory that is already allocated stays unchanged. The engine generates again when both weights and cache are
    allocated. After `sleep(level=2)`, all weights must also be loaded. If a device lacks memory, no rank changes, and
    UnavailableError is raised. Raises ValueError if a tag is unknown.
    """
    for tag in TAGS if tags is None else tags:
        check_choice("tags", tag, TAGS)
    _check_enabled(llm)

    def work() -> None:
        core = llm.core
        if not _on_all_ranks(core, MemoryCall("take", tags=tuple(TAGS if tags is None else tags))):
            raise UnavailableError("there is not enough memory to wake up: the engine still sleeps")
        if all(sleeper.is_mapped for sleeper in sleepers_of(open_runner(core)).values()):
            core.unavailable.pop("asleep", None)

    in_engine(llm.engine_thread, work)
    llm.engine_thread.wake()  # requests kept by a pause continue


def is_sleeping(llm: "LLMEngine") -> bool:
    return "asleep" in llm.core.unavailable


def _check_enabled(llm: "LLMEngine") -> None:
    if not llm.config.enable_sleep_mode:
        raise ValueError("enable_sleep_mode=False: must be True when the engine is started, for it to sleep")


# -- each rank ---------------------------------------------------------------------------------------------------------


class MemoryCall(NamedTuple):
    """A function call that rank 0 sends as a message to all ranks."""

    name: str  # "release" or "take"
    level: int = 0
    tags: tuple[str, ...] = ()

    def receive(self, words: np.ndarray, runner: "ModelRunner", incoming: dict[Any, Any]) -> None:
        self.do(runner)

    def do(self, runner: "ModelRunner") -> int | None:
        with runner.on_device():
            return release(runner, self.level) if self.name == "release" else take(runner, self.tags)


def _on_all_ranks(core: Engine, call: MemoryCall) -> int | None:
    """Execute `call` on all ranks, and return this rank's result."""
    if core.workers.processes:
        core.workers.send(call, np.empty(0, np.int32))
    return call.do(open_runner(core))


def open_runner(core: Engine) -> "ModelRunner":
    core.check_open()
    assert core.model_runner is not None
    return core.model_runner


def sleepers_of(runner: Any) -> dict[str, Any]:
    """Return a dict that maps each tag to the object (on CUDA an `Arena`) that manages this part of a rank's memory."""
    if not runner.sleepers:
        runner.sleepers = {"weights": HostWeights(runner.model), "kv_cache": HostCache(runner)}
    return runner.sleepers


def release(runner: "ModelRunner", level: int) -> int | None:
    """Free this rank's memory. Return the number of freed bytes, or None if any rank could not keep its weights."""
    sleepers = sleepers_of(runner)
    weights = sleepers["weights"]
    if level == 1 and weights.is_mapped and not _all_can(runner, weights.keep):
        weights.drop_copies()
        return None
    num_bytes = weights.drop_copies() if level == 2 else 0
    return num_bytes + sum(sleeper.unmap() for sleeper in sleepers.values() if sleeper.is_mapped)


def take(runner: "ModelRunner", tags: Collection[str]) -> bool:
    """Allocate this rank's memory again. If any rank lacks memory, change nothing and return False."""
    woken = [sleeper for tag, sleeper in sleepers_of(runner).items() if tag in tags and not sleeper.is_mapped]

    def map_all() -> None:
        for sleeper in woken:
            sleeper.map()

    can_wake = _all_can(runner, map_all)
    for sleeper in woken:
        if can_wake:
            sleeper.fill()
        elif sleeper.is_mapped:
            sleeper.unmap()
    return can_wake


def _all_can(runner: "ModelRunner", work: Callable[[], None]) -> bool:
    try:
        work()
        lacks_memory = 0
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        # as text: an exception in a log record would keep tensors alive
        logger.warning("rank %d lacks memory: %s", runner.tp.rank, str(error))
        lacks_memory = 1
    return not runner.tp.all_reduce_max(torch.tensor([lacks_memory], dtype=torch.int64, device=runner.device)).item()
