"""Replicas on Ray: two nodes on this machine, of which one is killed while requests are computed."""

import http.client
import json
import os
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
from nanovllm.serve.address import listening_socket
from nanovllm.serve.replicas import NanoVLLM, RayLLM
from nanovllm.serve.replicas.async_replicas import AsyncReplicas
from nanovllm.serve.server import make_server
from nanovllm.serve.settings import ServerSettings

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200)]
SETTINGS = dict(
    dtype="float32", device="cpu", kvcache_block_size=16, num_kvcache_blocks=512, max_model_len=256, max_num_seqs=8
)
PARAMS = SamplingParams(temperature=0.7, max_tokens=16)
SHARED = ["To be, or not to be, that is the question:", "HAMLET.\nWhether it is nobler in the mind to suffer"]
NODE = dict(num_cpus=1, object_store_memory=80 * 2**20, num_gpus=0, include_dashboard=False)
# a killed node is noticed within three seconds, and one that is only slow is not taken for dead
SYSTEM = {"health_check_period_ms": 500, "health_check_timeout_ms": 10_000, "health_check_failure_threshold": 5}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Each node has room for one replica."""
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"_system_config": SYSTEM})
    cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def replace_second_node(cluster: Cluster) -> None:
    """Kill it, and start another one, on which the lost replica is started again."""
    (node,) = cluster.worker_nodes
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(**NODE)


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
    """All 500 answers, in order, are those of one engine; the lost replica is started again on a new node."""
    with RayLLM("tiny-qwen3", num_replicas=2, **SETTINGS, seed=1) as llm:
        outputs = []
        params = (PARAMS for _ in range(500))
        for output in llm.generate_iter(iter(prompts(500)), params):
            outputs.append(output)
            if len(outputs) == 100:
                replace_second_node(cluster)
        assert tokens(outputs) == tokens(expected)
        assert [output.text for output in outputs] == [output.text for output in expected]
        wait_until(lambda: llm.group.num_ready == 2)
        assert [replica.num_restarts for replica in llm.group.replicas] in ([0, 1], [1, 0])

        # the rest of the interface
        with pytest.raises(ValueError, match="num_replicas=30: need 1 CPUs each, and the cluster has 2"):
            RayLLM("tiny-qwen3", num_replicas=30, **SETTINGS)
        with pytest.raises(ValueError, match="device='cuda:1': must be .*Ray chooses"):
            RayLLM("tiny-qwen3", **SETTINGS | {"device": "cuda:1"})
        with pytest.raises(ValueError, match="decoder prompt cannot be empty"):
            llm.generate(["fine", []])
        few = SamplingParams(max_tokens=2)
        refused = list(llm.generate_iter(["fine", 3.5, [], "fine"], few))
        assert [output.finish_reason == "error" for output in refused] == [False, True, True, False]
        assert "prompts[1]: prompt=3.5" in refused[1].outputs[0].stop_reason
        with pytest.raises(ValueError, match="2 sampling_params for more prompts"):
            list(llm.generate_iter(["a", "b", "c"], [few, few]))
        with pytest.raises(TypeError, match="prompts='abc': must be an iterable of prompts"):
            list(llm.generate_iter("abc"))
        with pytest.raises(ValueError, match="actor_options: max_concurrency can't be set"):
            RayLLM("tiny-qwen3", actor_options={"max_concurrency": 2}, **SETTINGS)
        with pytest.raises(ValueError, match="num_replicas=1: need .* on one node, and the nodes can hold 0 of them"):
            RayLLM("tiny-qwen3", actor_options={"num_cpus": 2}, **SETTINGS)
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
        wait_until(lambda: not any(replica.requests for replica in llm.group.replicas))
    with pytest.raises(RuntimeError, match="closed by exit"):
        llm.generate("a")
    with pytest.raises(RuntimeError, match="closed by exit"):
        llm.stats()
    wait_until(lambda: ray.available_resources().get("CPU") == 2)


class ReplicaServer:
    """`nanovllm serve --data-parallel-size 2` in a thread of this process."""

    def __init__(self) -> None:
        settings = ServerSettings(port=0, drain_seconds=1)
        self.llm = AsyncReplicas("tiny-qwen3", num_replicas=2, **SETTINGS, seed=1)
        listener = listening_socket(settings)
        self.port = listener.getsockname()[1]
        self.server = make_server(self.llm, settings, "tiny-qwen3")
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})
        self.thread.start()
        wait_until(lambda: self.server.started)

    def exit(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.llm.exit()

    def get(self, path: str) -> tuple[int, bytes]:
        return self._send("GET", path)

    def post(self, path: str, **body) -> dict:
        status, content = self._send("POST", path, body)
        assert status == 200, content
        return json.loads(content)

    def _send(self, method: str, path: str, body=None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body and json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        content = response.status, response.read()
        connection.close()
        return content

    def metrics(self) -> dict[str, float]:
        lines = self.get("/metrics")[1].decode().splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"}


@pytest.fixture
def server(cluster):
    server = ReplicaServer()
    yield server
    server.exit()


def test_online_while_a_node_is_killed(cluster, server):
    """500 streams, 64 at a time: those that are open go on where they were, and all texts are those of one engine."""
    assert json.loads(server.get("/health")[1]) == {"status": "ok", "replicas": {"ready": 2, "total": 2}}
    lengths = [150] * 24 + [16] * 476
    samplings = [dict(temperature=0, max_tokens=n, ignore_eos=True, min_tokens=n) for n in lengths]
    with LLM("tiny-qwen3", **SETTINGS | {"max_num_seqs": 64}) as llm:
        one = llm.generate(prompts(500), [SamplingParams(**sampling) for sampling in samplings], use_tqdm=False)
    num_started = threading.Semaphore(0)

    def stream(prompt: str, sampling: dict) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = dict(prompt=prompt, stream=True, stream_options={"include_usage": True}, **sampling)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        text, usage = "", None
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if not text:
                    num_started.release()
                text += "".join(choice["text"] for choice in chunk["choices"])
                usage = chunk["usage"]
        connection.close()
        assert usage["completion_tokens"] == sampling["max_tokens"]
        return text

    with ThreadPoolExecutor(64) as pool:
        texts = [pool.submit(stream, *request) for request in zip(prompts(500), samplings, strict=True)]
        for _ in range(4):
            num_started.acquire(timeout=60)
        replace_second_node(cluster)
        assert [text.result() for text in texts] == [output.text for output in one]
    wait_until(lambda: json.loads(server.get("/health")[1])["status"] == "ok")

    before = server.metrics()
    answer = server.post("/v1/completions", prompt=prompts(3), max_tokens=4, temperature=0)
    assert [choice["text"] for choice in answer["choices"]]
    after = server.metrics()
    model = 'model_name="tiny-qwen3"'
    total = 'vllm:prompt_tokens_total{model_name="tiny-qwen3"}'
    each = [f'nanovllm:replica_prompt_tokens_total{{{model},replica="{i}"}}' for i in range(2)]
    assert after[total] == before[total] + answer["usage"]["prompt_tokens"] == sum(after[name] for name in each)
    assert server.get("/")[0] == 404  # the page shows one engine
    with pytest.raises(AssertionError, match="max_model_len"):
        server.post("/v1/completions", prompt=[5] * 300)
    # a dead replica is not a dead service
    server.llm.group.replicas[0].handle.kill()
    wait_until(lambda: b"degraded" in server.get("/health")[1], 20)
    assert server.get("/health")[0] == 200
    assert server.post("/v1/completions", prompt="still", max_tokens=2)["usage"]["completion_tokens"] == 2
    lost = server.metrics()
    assert lost[total] >= after[total]  # a counter never goes back


SCRIPT = """
import signal
from itertools import repeat

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever shell started us

from nanovllm import SamplingParams
from nanovllm.serve.replicas import NanoVLLM, RayLLM

settings = dict(device="cpu", dtype="float32", num_kvcache_blocks=16, max_num_seqs=4, tensor_parallel_size=2)
with RayLLM("tiny-qwen3", actor_options={"num_cpus": 1}, **settings) as llm:
    for _ in llm.generate_iter(repeat("a"), SamplingParams(max_tokens=8)):
        print("answer", flush=True)
"""


def test_ctrl_c_leaves_nothing(cluster):
    """Neither the actor nor the other rank of its engine."""
    before = processes()
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    program = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, env=environment, text=True)
    assert "answer\n" in program.stdout  # not always its first line: Gloo of PyTorch 2.8 prints how ranks connect
    found, own = processes(), children(os.getpid())  # the cluster is ours
    ranks = {pid for pid in own - before.keys() if "nanovllm.distributed" in found.get(pid, "")}
    assert len(ranks) == 1
    program.send_signal(signal.SIGINT)
    program.stdout.read()
    assert program.wait(30) != 0
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU"), 20)
    wait_until(lambda: not ranks & processes().keys(), 20)


PRIVATE_RAY = """
import threading

from nanovllm import SamplingParams
from nanovllm.serve.engine_client import EngineDeadError
from nanovllm.serve.replicas import RayLLM

settings = dict(device="cpu", dtype="float32", num_kvcache_blocks=16, max_num_seqs=4)
with RayLLM("tiny-qwen3", actor_options={"num_cpus": 1}, **settings) as llm:
    threading.Timer(0.5, print, ["running"], {"flush": True}).start()
    for attempt in range(2):
        try:
            for _ in llm.as_completed(["a"] * 10_000, SamplingParams(max_tokens=1000, ignore_eos=True)):
                pass
        except EngineDeadError as error:
            print(error, flush=True)
"""


def test_private_ray_is_killed():
    """Calls that wait fail within a minute, later ones at once, and nothing is left."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    program = subprocess.Popen([sys.executable, "-c", PRIVATE_RAY], stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert program.stdout.readline() == "running\n"
        own = children(program.pid)
        raylet = next(pid for pid in own if processes().get(pid, "").partition(" ")[0].endswith("/raylet"))
        os.kill(raylet, signal.SIGKILL)
        start = monotonic()
        message = "Ray has ended on this machine (its raylet is gone), so no replica can be started\n"
        for seconds in (60, 61):
            assert message in program.stdout and monotonic() - start < seconds  # Ray's own log is there too
        assert program.wait(60) == 0
        wait_until(lambda: not own & processes().keys(), 30)
    finally:
        program.kill()


def processes() -> dict[int, str]:
    """The command line of each process."""
    lines = subprocess.run(
        ["ps", "-ewwo", "pid=,args="], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return {int(line.split(None, 1)[0]): line.split(None, 1)[-1] for line in lines}


def children(pid: int) -> set[int]:
    """The processes that a process has started, and those that they have started."""
    lines = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout.splitlines()
    parents = {int(child): int(parent) for child, parent in map(str.split, lines)}
    found, new = set(), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new}
        found |= new
    return found


def test_ray_data(cluster, tmp_path):
    """The example of docs/several-gpus.md: JSON lines in, Parquet and JSON lines out."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("pandas")
    import ray.data

    lines = [json.dumps({"id": i, "prompt": text}) for i, text in enumerate(prompts(40))]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    ds = ray.data.read_json(str(tmp_path / "in.jsonl"))
    arguments = dict(model="tiny-qwen3", sampling_params={"temperature": 0, "max_tokens": 8}, **SETTINGS)
    ds = ds.map_batches(NanoVLLM, fn_constructor_kwargs=arguments, concurrency=1, batch_size=16)
    ds.write_parquet(str(tmp_path / "out"))
    rows = {row["id"]: row for row in ray.data.read_parquet(str(tmp_path / "out")).take_all()}
    with LLM("tiny-qwen3", **SETTINGS) as llm:
        outputs = llm.generate(prompts(40), SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert [rows[i]["generated_text"] for i in range(40)] == [output.text for output in outputs]
