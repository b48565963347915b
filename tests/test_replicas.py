"""Replicas on Ray: two nodes on this machine, of which one is killed while requests are computed."""

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep

import pytest

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster

from nanovllm import LLM, SamplingParams
from nanovllm.serve.replicas import RayLLM
from nanovllm.serve.replicas.async_replicas import AsyncReplicas
from nanovllm.serve.server import listening_socket, make_server
from nanovllm.serve.settings import ServerSettings

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200), pytest.mark.xdist_group("ray")]
SETTINGS = dict(
    dtype="float32", device="cpu", kvcache_block_size=16, num_kvcache_blocks=512, max_model_len=256, max_num_seqs=8
)
SPREAD = {"scheduling_strategy": "SPREAD"}
PARAMS = SamplingParams(temperature=0.7, max_tokens=16)
SHARED = ["To be, or not to be, that is the question:", "HAMLET.\nWhether it is nobler in the mind to suffer"]
NODE = dict(object_store_memory=80 * 2**20, num_gpus=0, include_dashboard=False)
# a killed node is noticed within a second or two
SYSTEM = {"health_check_period_ms": 300, "health_check_timeout_ms": 300, "health_check_failure_threshold": 2}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 2, "_system_config": SYSTEM})
    cluster.add_node(**NODE, num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def kill_second_node(cluster: Cluster) -> None:
    (node,) = cluster.worker_nodes
    cluster.remove_node(node, allow_graceful=False)


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = monotonic() + seconds
    while not condition():
        assert monotonic() < deadline
        sleep(0.02)


def prompts(count: int) -> list[str]:
    return [f"{SHARED[i % 2]} {i * 7}" for i in range(count)]


@pytest.fixture(scope="module")
def expected() -> list:
    """What one engine answers to 500 prompts."""
    with LLM("tiny-qwen3", **SETTINGS | {"max_num_seqs": 64}, seed=1) as llm:
        return llm.generate(prompts(500), PARAMS, use_tqdm=False)


def tokens(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_offline_while_a_node_is_killed(cluster, expected):
    """All 500 answers, in order, are those of one engine; the replica is started again on the other node."""
    with RayLLM("tiny-qwen3", num_replicas=2, actor_options=SPREAD, **SETTINGS, seed=1) as llm:
        outputs = []
        params = (PARAMS for _ in range(500))
        for output in llm.generate_iter(iter(prompts(500)), params):
            outputs.append(output)
            if len(outputs) == 100:
                killer = threading.Thread(target=kill_second_node, args=(cluster,))
                killer.start()
        killer.join()
        assert tokens(outputs) == tokens(expected)
        assert [output.text for output in outputs] == [output.text for output in expected]
        wait_until(lambda: llm.group.num_ready == 2)
        assert [slot.num_restarts for slot in llm.group.slots] in ([0, 1], [1, 0])

        # the rest of the interface, with two replicas on one node
        with pytest.raises(ValueError, match="prompt: is empty"):
            llm.generate(["fine", []])
        with pytest.raises(TypeError, match=r"prompts\[1\]: prompt=3.5"):
            list(llm.generate_iter(["fine", 3.5]))
        conversation = [{"role": "user", "content": "What is 2 + 3?"}]
        greedy = SamplingParams(temperature=0, max_tokens=8)
        answers = llm.chat([conversation] * 3, greedy, use_tqdm=False)
        assert len({answer.text for answer in answers}) == 1
        found = dict(llm.as_completed(prompts(40), greedy))
        assert sorted(found) == [*range(40)]
        assert tokens(found[i] for i in range(40)) == tokens(llm.generate(prompts(40), greedy, use_tqdm=False))
        stats = llm.stats()
        assert sum(own["tokens"]["in"] for own in stats) > 0 and all(own["prefix_hit_rate"] > 0.5 for own in stats)
        with ThreadPoolExecutor(3) as pool:
            several = [*pool.map(lambda i: llm.generate(prompts(20), greedy, use_tqdm=False), range(3))]
        assert all(tokens(own) == tokens(several[0]) for own in several)
        for _ in llm.generate_iter(prompts(500), PARAMS):
            break  # what is left is discarded
        wait_until(lambda: not any(slot.requests for slot in llm.group.slots))
    with pytest.raises(RuntimeError, match="closed by exit"):
        llm.generate("a")
    wait_until(lambda: ray.available_resources().get("CPU") == 2)
    cluster.add_node(**NODE, num_cpus=1)
