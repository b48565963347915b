"""An engine gives its memory back, and takes it again: on a CPU, in an arena whose driver is a fake, and on a GPU."""

import asyncio
import ctypes
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from common import TINY
from test_models import SMALL, make_checkpoint
from test_rollout import GREEDY, PROMPTS, answers, bits, ranks_with_new_weights, serve  # noqa: F401  (`serve` is a fixture)

from nanovllm import SamplingParams
from nanovllm.batches.batch_runner import BatchRunner
from nanovllm.cuda.arena import Arena
from nanovllm.cuda.runner import CUDAModelRunner
from nanovllm.engine import runners
from nanovllm.engine.collector import OutputCollector
from nanovllm.engine.engine import UnavailableError
from nanovllm.rollout import host_tensors as host_memory
from nanovllm.rollout import weights_of
from nanovllm.utils import cuda_driver
from nanovllm.utils.cuda_driver import DeviceBytes

SETTINGS = dict(enable_sleep_mode=True, max_model_len=128, num_kvcache_blocks=16, kvcache_block_size=16)


def assert_refuses(llm, message: str) -> None:
    for refused in (lambda: answers(llm), lambda: llm.add_request(PROMPTS[0]), llm.step, lambda: next(llm.stream("a"))):
        with pytest.raises(UnavailableError, match=message):
            refused()


def assert_sleeps_and_wakes(llm, folder: str) -> None:
    """At both levels, with the same answers afterwards."""
    before = answers(llm)
    pointers = [id(p) for p in llm.model_runner.model.parameters()]
    for wakes in ([None], [["kv_cache"], ["weights"]]):
        assert llm.sleep() > 0 and llm.is_sleeping()
        for tags in wakes:
            assert_refuses(llm, r"the engine sleeps: wake_up\(\) lets it")
            llm.wake_up(tags)
        assert not llm.is_sleeping()
        output = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)[0]
        assert output.num_cached_tokens == 0
        assert all(not tensor.isnan().any() for found in llm.model_runner.caches.values() for tensor in found)
        assert answers(llm) == before
    num_weights = sum(p.nbytes for p in llm.model_runner.model.parameters())
    assert llm.sleep(level=2) >= num_weights
    with pytest.raises(UnavailableError, match=r"wake_up\(tags=\['weights'\]\) before load_weights"):
        llm.load_weights([])
    llm.wake_up(["weights"])
    tensors = [*weights_of(folder)]
    for tensor in tensors[:-1]:  # in any number of calls, as TRL does
        llm.load_weights([tensor])
    assert_refuses(llm, "the engine sleeps|has dropped the weights")
    llm.wake_up(["kv_cache"])
    assert_refuses(llm, r"sleep\(level=2\) has dropped the weights: load all weights before")
    with pytest.raises(ValueError, match="no such tensor"):
        llm.load_weights([("x", tensors[0][1])])
    llm.load_weights(tensors[-1:])
    assert answers(llm) == before
    assert pointers == [id(p) for p in llm.model_runner.model.parameters()]


@pytest.mark.parametrize(
    "name, settings",
    [("qwen3-moe", {}), ("llama-3.2", {"quantization": "int8"}), ("llama-3.2", {"quantization": "int4"})],
)
def test_levels(make_llm, tmp_path, name, settings):
    folder = make_checkpoint(tmp_path, name)
    assert_sleeps_and_wakes(make_llm(folder, **SMALL | SETTINGS, **settings), folder)


@pytest.mark.usefixtures("forked_ranks")
def test_ranks(make_llm, tmp_path, monkeypatch):
    """With new weights. Where one rank has not enough memory to wake up, all go on sleeping."""
    settings = SMALL | SETTINGS | {"expert_parallel": True, "quantization": "fp8"}
    llm, folder = ranks_with_new_weights(make_llm, tmp_path, **settings)
    assert_sleeps_and_wakes(llm, folder)
    before = answers(llm)
    llm.sleep()

    def fail(self):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(host_memory.HostCache, "map", fail)
        with pytest.raises(UnavailableError, match="not enough memory to wake up: the engine still sleeps"):
            llm.wake_up()
    assert llm.is_sleeping() and not any(x.is_mapped for x in llm.model_runner.sleepers.values())
    assert_refuses(llm, "the engine sleeps")
    llm.wake_up()
    assert answers(llm) == before


def test_refusals(make_llm):
    llm = make_llm()
    for call in (llm.sleep, llm.wake_up):
        with pytest.raises(ValueError, match="enable_sleep_mode=False: must be True when the engine is started"):
            call()
    llm.exit()
    llm = make_llm(**SETTINGS)
    with pytest.raises(ValueError, match="keep_prefix_cache=True: needs swap_space"):
        llm.sleep(keep_prefix_cache=True)
    with pytest.raises(ValueError, match="level=3: must be one of 1, 2"):
        llm.sleep(level=3)
    with pytest.raises(ValueError, match="tags='cache': must be one of 'weights', 'kv_cache'"):
        llm.wake_up(["cache"])
    llm.wake_up()  # it is awake
    llm.add_request(PROMPTS[0], GREEDY)
    llm.step()
    with pytest.raises(UnavailableError, match=r"requests that have not ended: 1; call pause\(\)"):
        llm.sleep()
    while not llm.is_finished():
        llm.step()
    before = answers(llm)
    inner = []

    def weights():
        try:
            llm.sleep()
        except UnavailableError as error:
            inner.append(str(error))
        yield from weights_of(TINY)

    llm.load_weights(weights())
    assert inner and "the weights are being replaced" in inner[0]
    assert llm.sleep() > 0 and llm.sleep() == 0  # it sleeps already
    assert llm.sleep(level=2) == sum(p.nbytes for p in llm.model_runner.model.parameters())
    llm.wake_up()
    assert_refuses(llm, "has dropped the weights")
    llm.load_weights(weights_of(TINY))
    assert answers(llm) == before


def test_requests_that_are_kept(make_llm, monkeypatch):
    """The pause may come so early that the caller is still submitting requests of which the engine runs a step."""
    llm = make_llm(**SETTINGS)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = [output.token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    paused, outputs = threading.Event(), []

    def pause(step, result):
        if not paused.is_set() and step.num_decodes:
            llm.pause("keep")
            paused.set()

    def post(command, waiter=None, post=llm.engine_thread._post):
        post(command, waiter)
        if threading.current_thread() is caller:
            assert paused.wait(60)

    llm.engine_thread.call(lambda: llm.core.on_step.append(pause))  # not while hooks see the last step of `generate`
    caller = threading.Thread(target=lambda: outputs.extend(llm.generate(PROMPTS, params, use_tqdm=False)))
    monkeypatch.setattr(llm.engine_thread, "_post", post)
    caller.start()
    assert paused.wait(60)
    llm.sleep()
    with pytest.raises(UnavailableError, match="the engine sleeps"):
        llm.resume()
    llm.wake_up()
    assert_refuses(llm, "the engine is paused")
    llm.resume()
    caller.join(60)
    assert [output.token_ids for output in outputs] == expected


def test_http_and_asyncio(serve):
    httpx = pytest.importorskip("httpx")
    settings = SETTINGS | {"swap_space": 0.01}
    server = serve(enable_dev_endpoints=True, engine_settings=settings)
    with httpx.Client(base_url=server.url, timeout=30) as client:
        body = dict(prompt=PROMPTS[0], temperature=0, max_tokens=8, return_token_ids=True)

        def complete():
            answer = client.post("/v1/completions", json=body)
            return answer.status_code, answer.json()

        _, before = complete()
        assert client.get("/is_sleeping").json() == {"is_sleeping": False}
        answer = client.post("/sleep", params={"level": 1}).json()
        assert answer["status"] == "asleep" and answer["num_bytes"] > 0
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        status, refused = complete()
        assert status == 503 and "the engine sleeps" in refused["error"]["message"]
        answer = client.post("/wake_up", params={"tags": "weight"})
        assert answer.status_code == 400 and "must be one of 'weights', 'kv_cache'" in answer.json()["error"]["message"]
        assert client.post("/wake_up", params={"tags": "weights"}).json() == {"is_sleeping": True}
        assert client.post("/wake_up", params={"tags": ["kv_cache", "weights"]}).json() == {"is_sleeping": False}
        _, again = complete()
        client.post("/sleep", params={"keep_prefix_cache": True})
        client.post("/wake_up")
        for keeps in ("x", True):
            answer = client.post("/sleep", params={"level": 2, "keep_prefix_cache": keeps})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "keep_prefix_cache"
        for level in (3, "x"):
            answer = client.post("/sleep", params={"level": level})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "level"
        _, after = complete()
        assert after["choices"] == again["choices"] == before["choices"]
        assert server.llm.engine.stats()["tiers"]["host_hits"] >= 16

    async def sleep_and_wake() -> list[bool]:
        await server.llm.sleep(keep_prefix_cache=True)
        found = [await server.llm.is_sleeping()]
        await server.llm.wake_up(["weights"])
        await server.llm.wake_up(["kv_cache"])
        return [*found, await server.llm.is_sleeping()]

    assert asyncio.run(sleep_and_wake()) == [True, False]


# -- arenas ------------------------------------------------------------------------------------------------------------


class FakeDriver:
    """CUDA's virtual memory management in host memory. It checks the order and the arguments of its calls."""

    UNIT = 256

    def __init__(self, capacity: int = 2**40):
        self.capacity = capacity
        self.calls: list[str] = []
        self.buffers = {}  # by address
        self.sizes = {}  # of reserved ranges
        self.handles = {}  # the size of each
        self.mapped = {}  # address -> handle
        self.accessible = set()
        self.fails = ""  # the name of a function
        self.num_handles = 0

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name == self.fails:
                return 999
            return getattr(self, f"_{name}")(*arguments) or 0

        if not name.startswith("cu"):
            raise AttributeError(name)
        return call

    def check_prop(self, prop):
        prop = prop._obj
        assert ctypes.sizeof(prop) == 32 and (prop.type, prop.handle_types) == (1, 0)
        assert (prop.location.type, prop.location.id) == (1, 0)

    def _cuMemGetAllocationGranularity(self, granularity, prop, option):
        self.check_prop(prop)
        assert option == 0
        granularity._obj.value = self.UNIT

    def _cuMemAddressReserve(self, address, size, alignment, hint, flags):
        assert size.value % self.UNIT == 0 and size.value and alignment.value == hint.value == flags.value == 0
        buffer = torch.full((size.value + self.UNIT,), 0x7F, dtype=torch.uint8)
        found = -(-buffer.data_ptr() // self.UNIT) * self.UNIT
        self.buffers[found], self.sizes[found] = buffer, size.value
        address._obj.value = found

    def _cuMemCreate(self, handle, size, prop, flags):
        self.check_prop(prop)
        assert flags.value == 0
        if sum(self.handles.values()) + size.value > self.capacity:
            return cuda_driver.OUT_OF_MEMORY
        self.num_handles += 1
        handle._obj.value = self.num_handles
        self.handles[self.num_handles] = size.value
        return 0

    def _cuMemMap(self, address, size, offset, handle, flags):
        address, handle = address.value, handle.value
        assert self.sizes[address] == size.value == self.handles[handle] and offset.value == flags.value == 0
        assert address not in self.mapped and handle not in self.mapped.values()
        self.mapped[address] = handle
        self.buffers[address].fill_(0x7F)  # new memory has any values: NaN in float32

    def _cuMemSetAccess(self, address, size, access, count):
        access = access._obj
        assert ctypes.sizeof(access) == 12 and (access.location.type, access.location.id, access.flags) == (1, 0, 3)
        assert address.value in self.mapped and size.value == self.sizes[address.value] and count.value == 1
        self.accessible.add(address.value)

    def _cuMemUnmap(self, address, size):
        assert size.value == self.sizes[address.value]
        del self.mapped[address.value]
        self.accessible.discard(address.value)
        self.buffers[address.value].fill_(0x7F)

    def _cuMemRelease(self, handle):
        assert handle.value not in self.mapped.values()
        del self.handles[handle.value]

    def _cuMemAddressFree(self, address, size):
        assert address.value not in self.mapped and self.sizes.pop(address.value) == size.value


@pytest.fixture
def driver(monkeypatch):
    def tensor(self, device):
        array = (ctypes.c_uint8 * self.num_bytes).from_address(self.address)
        array.owner = self  # as PyTorch keeps an object with a __cuda_array_interface__
        return torch.frombuffer(array, dtype=torch.uint8)

    fake = FakeDriver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: fake)
    monkeypatch.setattr(DeviceBytes, "tensor", tensor)
    return fake


def test_arena(driver):
    arena = Arena(torch.device("cpu"))
    with arena:
        small = torch.empty(10, dtype=torch.float32, device="cpu")
        large = torch.empty(3, 100, dtype=torch.float32, device="cpu")
        other = torch.empty(512, dtype=torch.bfloat16, device="cpu")
        host = torch.zeros(3000)
    outside = torch.empty(3000)
    assert len(driver.sizes) == 2 and arena.num_bytes == 1280 + 1024
    assert large.data_ptr() in driver.accessible and other.data_ptr() in driver.accessible
    assert not {small.data_ptr(), host.data_ptr(), outside.data_ptr()} & driver.sizes.keys()
    expected = torch.arange(300.0).view(3, 100)
    large.copy_(expected)
    driver.calls.clear()
    arena.keep()
    assert arena.unmap() == 1280 + 1024 and not driver.handles and not driver.mapped and not arena.is_mapped
    assert driver.calls == ["cuMemUnmap", "cuMemRelease"] * 2
    assert not torch.equal(large, expected)
    driver.calls.clear()
    arena.map()
    assert driver.calls == ["cuMemCreate", "cuMemMap", "cuMemSetAccess"] * 2  # nothing is reserved again
    arena.fill()
    assert torch.equal(large, expected) and driver.accessible == driver.sizes.keys()
    arena.unmap()
    arena.map()
    arena.fill()  # what was not kept
    assert not large.any()
    del other
    gc.collect()
    assert driver.sizes.keys() == driver.mapped.keys() == {large.data_ptr()}
    arena.unmap()
    del large
    gc.collect()
    assert not (driver.sizes or driver.handles or driver.mapped)


def test_an_arena_that_lacks_memory(driver):
    arena = Arena(torch.device("cpu"))
    with arena:
        tensors = [torch.empty(256, device="cpu") for _ in range(3)]
    driver.capacity = 2 * 1024
    arena.keep()
    arena.unmap()
    with pytest.raises(torch.OutOfMemoryError, match="cuMemCreate: CUDA error 2"):
        arena.map()
    assert not (driver.handles or driver.mapped or arena.is_mapped)
    driver.capacity = 2**20
    for name in ("cuMemMap", "cuMemSetAccess"):
        driver.fails = name
        with pytest.raises(RuntimeError, match=f"{name}: CUDA error 999"):
            arena.map()
        assert not (driver.handles or driver.mapped)
    driver.fails = ""
    arena.map()
    assert len(driver.mapped) == len(tensors)
    driver.capacity = 0
    num_ranges = len(driver.sizes)
    with pytest.raises(torch.OutOfMemoryError), arena:
        torch.empty(256, device="cpu")
    gc.collect()
    assert len(driver.sizes) == num_ranges


class ArenaRunner(BatchRunner):
    """A CPU's, whose weights and cache lie in arenas as those of a CUDAModelRunner do."""

    arena = CUDAModelRunner.arena

    def _load_model(self):
        with self.arena("weights"):
            return super()._load_model()

    def allocate_kv_cache(self, num_blocks, num_layers=None):
        with self.arena("kv_cache"):
            super().allocate_kv_cache(num_blocks, num_layers)

    def zeros(self, like):
        return torch.empty(like.shape, dtype=like.dtype, device=self.device).zero_()


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_an_engine_in_arenas(make_llm, monkeypatch, driver, tmp_path, quantization):
    """Its tensors keep their addresses, and hold no bytes while it sleeps."""
    monkeypatch.setitem(runners.RUNNERS, "cpu", "test_sleep:ArenaRunner")
    folder = make_checkpoint(tmp_path, "qwen3-moe")
    llm = make_llm(folder, **SMALL | SETTINGS, quantization=quantization)
    weights = [p for p in llm.model_runner.model.parameters() if p.nbytes >= driver.UNIT]
    caches = [tensor for found in llm.model_runner.caches.values() for tensor in found]
    addresses = {tensor.data_ptr() for tensor in weights + caches}
    assert addresses <= driver.mapped.keys() and sum(p.nbytes for p in weights) <= sum(driver.handles.values())
    assert_sleeps_and_wakes(llm, folder)
    assert {tensor.data_ptr() for tensor in weights + caches} == addresses
    before = answers(llm)
    num_bytes = sum(driver.handles.values())
    assert llm.sleep() == num_bytes and not driver.handles
    driver.capacity = num_bytes - 1
    with pytest.raises(UnavailableError, match="the engine still sleeps"):
        llm.wake_up()
    assert not driver.handles and llm.is_sleeping()
    driver.capacity = num_bytes
    llm.wake_up()
    assert answers(llm) == before
    del weights, caches
    llm.exit()
    gc.collect()
    assert not (driver.sizes or driver.handles)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def test_a_request_that_comes_with_sleep(make_llm):
    """It is queued behind `sleep`, which has not begun: `sleep` is refused, and the request is answered."""
    llm = make_llm(**SETTINGS)
    expected, is_free = answers(llm), threading.Event()
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(llm.engine_thread.call, is_free.wait)]
        for work in (llm.sleep, lambda: answers(llm)):
            num_queued = len(llm.engine_thread.queued())
            futures.append(pool.submit(work))
            while len(llm.engine_thread.queued()) == num_queued:
                time.sleep(0.001)
        is_free.set()
        with pytest.raises(UnavailableError, match="requests that have not ended: 1"):
            futures[1].result()
        assert futures[2].result() == expected and not llm.is_sleeping()


def test_a_request_that_comes_after_sleep_has_begun(make_llm, monkeypatch):
    """`sleep` has not seen it, so it is refused, although it was queued."""
    llm = make_llm(**SETTINGS)
    thread, check = llm.engine_thread, llm.engine_thread.check_open

    def sleep_meanwhile() -> None:
        check()
        if any(isinstance(waiter, OutputCollector) for waiter in thread.queued()) or llm.core.scheduler.live:
            llm.core.unavailable["asleep"] = "it sleeps"

    monkeypatch.setattr(thread, "check_open", sleep_meanwhile)
    held = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(thread.call, held.wait)
        while not thread.queued():
            time.sleep(0.001)
        with pytest.raises(UnavailableError, match="it sleeps"):
            answers(llm)
        held.set()
    monkeypatch.undo()
    llm.core.unavailable.clear()
    assert answers(llm) and llm.stats()["requests"]["running"] == llm.stats()["requests"]["waiting"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("settings", [{}, {"quantization": "fp8"}], ids=["plain", "fp8"])
def test_on_a_gpu(make_llm, enforce_eager, settings):
    """The bytes come back to the device, the addresses stay, and so do the graphs; new weights come from anywhere."""
    llm = make_llm(
        device="cuda",
        dtype="bfloat16",
        enable_sleep_mode=True,
        enforce_eager=enforce_eager,
        gpu_memory_utilization=0.1,
        max_num_seqs=20,
        **settings,
    )
    runner = llm.model_runner
    before, graphs = answers(llm), runner.graphs
    tensors = [*runner.model.parameters(), *(tensor for found in runner.caches.values() for tensor in found)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    in_arenas = sum(arena.num_bytes for arena in runner.sleepers.values())
    weights = {name: tensor.clone() for name, tensor in bits(llm).items()}
    for level, device in ((1, None), (2, "cpu"), (2, "cuda"), (1, None)):
        free = torch.cuda.mem_get_info()[0]
        assert llm.sleep(level) == in_arenas
        assert torch.cuda.mem_get_info()[0] - free >= in_arenas
        with pytest.raises(UnavailableError, match="the engine sleeps"):
            answers(llm)
        llm.wake_up(["weights"])
        if level == 2:
            llm.load_weights((name, weight.to(device)) for name, weight in weights_of(TINY))
        llm.wake_up(["kv_cache"])
        assert all(torch.equal(tensor, weights[name]) for name, tensor in bits(llm).items())
        assert answers(llm) == before
        assert addresses == [tensor.data_ptr() for tensor in tensors] and runner.graphs is graphs


@pytest.mark.gpu
def test_a_gpu_that_lacks_memory(make_llm):
    llm = make_llm(device="cuda", dtype="bfloat16", enable_sleep_mode=True, gpu_memory_utilization=0.1)
    before = answers(llm)
    llm.sleep()
    free, _ = torch.cuda.mem_get_info()
    trainer = torch.empty(free - 2**28, dtype=torch.uint8, device="cuda")
    with pytest.raises(UnavailableError, match="the engine still sleeps"):
        llm.wake_up()
    assert llm.is_sleeping()
    del trainer
    torch.cuda.empty_cache()
    llm.wake_up()
    assert answers(llm) == before
