"""Runs replicas as Ray actors. No other file uses Ray."""

import asyncio
import gc
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import cache
from typing import Any

try:
    import ray
except ImportError as error:
    raise ImportError("ray is not installed; pip install 'nano-vllm[ray]'") from error

from nanovllm.config import Config
from nanovllm.serve.process import SWITCH_INTERVAL
from nanovllm.serve.replicas.driver import ANSWERS_PER_SEQ, absolute_path
from nanovllm.serve.replicas.group import RESTART_TIMEOUT, ReplicaGroup
from nanovllm.serve.replicas.replica import Replica
from nanovllm.serve.replicas.replica_state import ClusterDeadError
from nanovllm.serve.replicas.routing import Router

# actor options that callers can't set: calls must stay in order, and ReplicaGroup restarts replicas, not Ray
RESERVED_OPTIONS = {"concurrency_groups", "lifetime", "max_concurrency", "max_restarts", "max_task_retries", "name"}
NODE_CHECK_SECONDS = 10.0  # while a replica starts: seconds between checks that Ray still runs on this machine
MAX_UNREAD_REPORTS = 4  # with this many, the replica waits, and its next report covers more steps


def connect() -> bool:
    """Join the Ray cluster at RAY_ADDRESS, or start a cluster on this machine.

    Return False if Ray was already initialized.
    """
    if ray.is_initialized():
        return False
    # the default is "local", because without an address, Ray joins the latest cluster that anybody started on this
    # machine
    address = os.environ.get("RAY_ADDRESS") or "local"
    ray.init(address=address, include_dashboard=False, logging_level=logging.WARNING)
    return True


def disconnect() -> None:
    """Undo `connect`: stop the cluster if `connect` has started it, else leave the cluster."""
    ray.shutdown()


def check_node() -> None:
    """Raise ClusterDeadError if this machine's raylet has ended. (The raylet is the Ray process that starts actors.)"""
    node_id = ray.get_runtime_context().get_node_id()
    if not any(node["Alive"] for node in ray.nodes() if node["NodeID"] == node_id):
        raise ClusterDeadError("Ray has ended on this machine (its raylet is gone), so no replica can be started")


def needs_of(settings: dict[str, Any], actor_options: dict[str, Any], num_replicas: int) -> dict[str, Any]:
    """Return the Ray options of a replica's actor.

    The options reserve one GPU for each rank, or one CPU for each rank of a CPU engine. The actor starts the processes
    of its ranks. Ray reserves all resources of an actor on one node, so replicas need no placement groups, which could
    outlive the replicas. Raises ValueError if the cluster is too small, because Ray would then wait forever for more
    nodes.
    """
    device, num_ranks = settings.get("device", "auto"), settings.get("tensor_parallel_size", 1)
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device!r}: must be 'auto', 'cpu' or 'cuda': Ray chooses the GPUs of each replica")
    total = ray.cluster_resources()
    on_gpus = device == "cuda" or (device == "auto" and total.get("GPU", 0) > 0)
    needs = {"num_cpus": 1, "num_gpus": num_ranks} if on_gpus else {"num_cpus": num_ranks}
    if refused := RESERVED_OPTIONS & actor_options.keys():
        raise ValueError(f"actor_options: {', '.join(sorted(refused))} can't be set, as the replicas rely on them")
    needs |= actor_options
    resources = {"CPU": needs.get("num_cpus", 0), "GPU": needs.get("num_gpus", 0)} | needs.get("resources", {})
    needed = {resource: count for resource, count in resources.items() if count}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for resource, count in needed.items():
        if num_replicas * count > total.get(resource, 0):
            raise ValueError(
                f"num_replicas={num_replicas}: need {count} {resource}s each, and the cluster has "
                f"{total.get(resource, 0):.0f}; see actor_options"
            )
    capacity = sum(
        min((int(node.get(resource, 0) // count) for resource, count in needed.items()), default=num_replicas)
        for node in nodes
    )
    if capacity < num_replicas:
        raise ValueError(
            f"num_replicas={num_replicas}: need {needed} each on one node, and the nodes can hold {capacity} of them"
        )
    return needs


class ReplicaProcess(Replica):
    """A Replica that runs in a separate process."""

    def start(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        sys.setswitchinterval(SWITCH_INTERVAL)
        start_info = super().start(model, settings)
        gc.collect()
        gc.freeze()  # otherwise, a full collection would halt the engine's thread
        return start_info


class ActorHandle:
    """A `Handle` for a Ray actor.

    Except for `reports`, the actor's methods run one at a time, in the order of the calls.
    """

    def __init__(self, replica_class: type, options: dict[str, Any], model: str, settings: dict[str, Any]):
        self._options, self._model, self._settings = options, model, settings
        self._actor = ray.remote(concurrency_groups={"reports": 1}, **options)(replica_class).remote()

    def __str__(self) -> str:
        return f"an actor of Ray that needs {self._options}"

    async def start(self) -> dict[str, Any]:
        """Start the replica. If Ray has ended on this machine, raise ClusterDeadError instead of waiting forever."""
        start = asyncio.ensure_future(self._actor.start.remote(self._model, self._settings))
        try:
            while not start.done():
                await asyncio.wait([start], timeout=NODE_CHECK_SECONDS)
                await asyncio.to_thread(check_node)
            return await start
        except ray.exceptions.RayTaskError as error:
            raise error.cause or error from None
        finally:
            start.cancel()

    async def reports(self) -> AsyncIterator[bytes]:
        options = {"concurrency_group": "reports", "num_returns": "streaming"}
        stream = self._actor.reports.options(**options, _generator_backpressure_num_objects=MAX_UNREAD_REPORTS).remote()
        async for reference in stream:
            yield await reference

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor. Awaiting the result is optional."""
        return getattr(self._actor, method).remote(*arguments)

    def kill(self) -> None:
        """Kill the actor. The engine's other ranks end when their parent process has ended."""
        with suppress(ray.exceptions.RayError):  # the whole cluster may be gone
            ray.kill(self._actor)


def make_group(
    model: str,
    settings: dict[str, Any],
    config: Config,
    num_replicas: int,
    router: Router | None = None,
    actor_options: dict[str, Any] | None = None,
    replica_class: type = ReplicaProcess,
    restart_timeout: float = RESTART_TIMEOUT,
) -> ReplicaGroup:
    """Create a ReplicaGroup, but do not start the replicas.

    `settings` are the settings of each replica's LLM, and `config` is the driver's Config.
    """
    actor_settings = dict(settings)
    if settings.get("tokenizer") is not None:
        actor_settings["tokenizer"] = absolute_path(settings["tokenizer"])

    @cache  # is called only for the first start, because a restarted replica may have to wait for a node
    def needs() -> dict[str, Any]:
        return needs_of(settings, actor_options or {}, num_replicas)

    def launch() -> ActorHandle:
        return ActorHandle(replica_class, needs(), absolute_path(model), actor_settings)

    max_answers = ANSWERS_PER_SEQ * config.max_num_seqs
    return ReplicaGroup(launch, num_replicas, max_answers, config.kvcache_block_size, router, restart_timeout)
