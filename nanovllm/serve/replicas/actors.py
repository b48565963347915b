"""Replicas as actors of Ray: the one file that speaks to Ray."""

import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import ray

from nanovllm.config import Config
from nanovllm.serve.replicas.front import ANSWERS_PER_SEQ, for_other_hosts
from nanovllm.serve.replicas.group import ReplicaGroup
from nanovllm.serve.replicas.replica import Replica
from nanovllm.serve.replicas.routing import Router

MAX_UNREAD_REPORTS = 4  # then the replica waits, and its next report is about more steps


def connect() -> bool:
    """Join the cluster of RAY_ADDRESS, or start one on this machine. False if the process was connected before."""
    if ray.is_initialized():
        return False
    ray.init(include_dashboard=False, logging_level=logging.WARNING)
    return True


def disconnect() -> None:
    """End the cluster that `connect` has started, or leave the one that it has joined."""
    ray.shutdown()


def resources(device: str, tensor_parallel_size: int) -> dict[str, float]:
    """What a replica needs for itself: a GPU for each rank, or a CPU where the cluster has no GPUs.

    The ranks are processes of the actor's own. Ray grants all that one actor needs on one node, so that no placement
    group is needed to keep them together, and none can be left behind.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device!r}: must be 'auto', 'cpu' or 'cuda': Ray chooses the GPUs of each replica")
    num_gpus = ray.cluster_resources().get("GPU", 0)
    if device == "cpu" or (device == "auto" and not num_gpus):
        return {"num_cpus": tensor_parallel_size}
    return {"num_cpus": 1, "num_gpus": tensor_parallel_size}


class ActorHandle:
    """A `group.Handle`. The actor's methods run one at a time, in the order of the calls, and `reports` beside them."""

    def __init__(self, replica_class: type, options: dict[str, Any], model: str, settings: dict[str, Any]):
        self._model, self._settings = model, settings
        self._actor = ray.remote(concurrency_groups={"reports": 1}, **options)(replica_class).remote()

    async def start(self) -> dict[str, Any]:
        try:
            return await self._actor.start.remote(self._model, self._settings)
        except ray.exceptions.RayTaskError as error:
            raise error.cause or error from None

    async def reports(self) -> AsyncIterator[bytes]:
        options = {"concurrency_group": "reports", "num_returns": "streaming"}
        stream = self._actor.reports.options(**options, _generator_backpressure_num_objects=MAX_UNREAD_REPORTS).remote()
        async for reference in stream:
            yield await reference

    def call(self, method: str, *arguments: Any) -> Any:
        """An awaitable, which need not be awaited."""
        return getattr(self._actor, method).remote(*arguments)

    def kill(self) -> None:
        """Its other ranks notice, and end by themselves."""
        with suppress(ray.exceptions.RayError):  # the whole cluster may be gone
            ray.kill(self._actor)


def make_group(
    model: str,
    settings: dict[str, Any],
    config: Config,
    num_replicas: int,
    router: Router | None = None,
    actor_options: dict[str, Any] | None = None,
    replica_class: type = Replica,
) -> ReplicaGroup:
    """A group that is not started yet. `settings` are those of each replica's LLM, and `config` is the front's."""
    own_settings = dict(settings)
    if settings.get("tokenizer") is not None:
        own_settings["tokenizer"] = for_other_hosts(settings["tokenizer"])

    def launch() -> ActorHandle:
        needs = resources(settings.get("device", "auto"), settings.get("tensor_parallel_size", 1))
        return ActorHandle(replica_class, needs | (actor_options or {}), for_other_hosts(model), own_settings)

    max_answers = ANSWERS_PER_SEQ * config.max_num_seqs
    return ReplicaGroup(launch, num_replicas, max_answers, config.kvcache_block_size, router)
