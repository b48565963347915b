"""Replicas without Ray: their engines run in threads of this process, and a test can lose any of them."""

import asyncio
import sys
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from time import sleep
from types import SimpleNamespace

import pytest
from common import TINY
from transformers import AutoTokenizer

pytest.importorskip("fastapi")

from fastapi import FastAPI

from nanovllm import LLM, SamplingParams
from nanovllm.engine.outputs import CompletionOutput, Logprob, OutputKind
from nanovllm.requests.stream_event import StreamEvent
from nanovllm.serve import replicas
from nanovllm.serve.api_server import add_info_routes
from nanovllm.serve.engine_client import EngineDeadError
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.replicas import group as group_module
from nanovllm.serve.replicas import replica as replica_module
from nanovllm.serve.replicas import replica_state as state_module
from nanovllm.serve.replicas.driver import make_processor
from nanovllm.serve.replicas.group import MAX_FAILURES, ReplicaGroup
from nanovllm.serve.replicas.messages import Final, Report, decode_report, decode_requests, encode_report
from nanovllm.serve.replicas.ray_data import NanoVLLM
from nanovllm.serve.replicas.replica import Replica
from nanovllm.serve.replicas.replica_request import ReplicaRequest
from nanovllm.serve.replicas.replica_state import ClusterDeadError
from nanovllm.serve.replicas.routing import RoundRobin

assert AutoTokenizer  # imported here, as two threads that import it at the same time get in each other's way
SETTINGS = dict(
    dtype="float32", device="cpu", kvcache_block_size=16, num_kvcache_blocks=256, max_model_len=256, max_num_seqs=16
)
MODEL = TINY  # or what a fixture sets
PROMPTS = [f"{'To be, or not to be' if i % 2 else 'Whether it is nobler'}, said number {i}:" for i in range(10)]
PARAMS = SamplingParams(temperature=0.8, max_tokens=20)
LONG = replace(PARAMS, max_tokens=45, ignore_eos=True)


class LocalHandle:
    """A group.Handle. `lose` makes it look like an actor whose process has ended."""

    def __init__(self, fails_to_start: bool = False):
        self.replica = Replica()
        self.lost = asyncio.Event()
        self.is_started, self.fails_to_start = False, fails_to_start
        self.num_reports = 0

    async def start(self):
        if self.fails_to_start:
            raise RuntimeError("no GPU")
        facts = await asyncio.to_thread(self.replica.start, MODEL, SETTINGS)
        self.is_started = True
        return facts

    async def reports(self):
        stream = self.replica.reports()
        while True:
            read = asyncio.ensure_future(asyncio.to_thread(next, stream, None))
            lost = asyncio.ensure_future(self.lost.wait())
            await asyncio.wait([read, lost], return_when=asyncio.FIRST_COMPLETED)
            lost.cancel()
            if self.lost.is_set():
                read.add_done_callback(lambda task: task.exception())
                raise RuntimeError("the process was killed")
            self.num_reports += 1
            yield await read

    def call(self, method, *arguments):
        """As with Ray, an error is that of the awaitable, which need not be awaited."""
        done = asyncio.get_running_loop().create_future()
        try:
            done.set_result(None if self.lost.is_set() else getattr(self.replica, method)(*arguments))
        except Exception as error:
            done.set_exception(error)
            done.exception()
        return done

    def lose(self):
        self.lost.set()

    def kill(self):
        self.lost.set()
        if self.is_started:
            self.is_started = False
            self.replica.exit()


@pytest.fixture(scope="module", autouse=True)
def use_small_model(small_model):
    """No text matters, and its steps take less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "MODEL", small_model)
        yield


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(group_module, "RESTART_SECONDS", 0.01)


class Driver:
    """Makes requests and waits for them, as RayLLM and the server do."""

    def __init__(self, group: ReplicaGroup, seed: int | None = 3):
        self.group, self.input_processor = group, make_processor(MODEL, SETTINGS | {"seed": seed})
        self.ended: list[ReplicaRequest] = []

    def submit(self, prompts, params=PARAMS, kind=OutputKind.FINAL_ONLY) -> list[ReplicaRequest]:
        made = self.input_processor.requests(prompts, params, kind)
        requests = [ReplicaRequest(request, self.ended.append) for request in made]
        self.group.submit(requests)
        return requests


@asynccontextmanager
async def started(num_replicas: int = 2, handles: list | None = None, **settings):
    handles = [] if handles is None else handles

    def launch() -> LocalHandle:
        handles.append(LocalHandle())
        return handles[-1]

    group = ReplicaGroup(launch, num_replicas, settings.pop("max_answers", 32), 16, **settings)
    await group.start()
    try:
        yield Driver(group), handles
    finally:
        await group.close()


@pytest.fixture(scope="module")
def one_engine():
    """A function that does on one engine what Driver does on many."""

    def generate(prompts, params=PARAMS, seed=3):
        with LLM(MODEL, **SETTINGS, seed=seed) as llm:
            return llm.generate(prompts, params, use_tqdm=False)

    return generate


def facts(outputs) -> list:
    answers = [answer for output in outputs for answer in output.outputs]
    return [
        (a.index, a.text, a.token_ids, a.finish_reason, a.stop_reason, a.logprobs and len(a.logprobs)) for a in answers
    ]


async def streamed(request: ReplicaRequest, on_first=None):
    """All deltas of a request as one text and one list of token ids for each answer, and its output."""
    texts, ids = [""] * request.num_answers, [[] for _ in range(request.num_answers)]
    while events := await request.next_events():
        for event in events:
            texts[event.output_index] += event.text
            ids[event.output_index] += event.token_ids
        if on_first is not None and len(ids[0]) >= 3:
            on_first()
            on_first = None
    output = await request.result()
    assert texts == [answer.text for answer in output.outputs]
    assert ids == [answer.token_ids for answer in output.outputs]
    return output


def test_same_tokens_as_one_engine(one_engine):
    async def run():
        async with started() as (driver, _):
            return [await request.result() for request in driver.submit(PROMPTS)], driver.ended

    outputs, ended = asyncio.run(run())
    expected = one_engine(PROMPTS)
    assert facts(outputs) == facts(expected) and len(ended) == len(PROMPTS)
    for output, other in zip(outputs, expected):
        assert output.request_id == other.request_id and output.prompt == other.prompt
        assert output.prompt_token_ids == other.prompt_token_ids and output.finished
        times = output.metrics
        assert times.arrival_time <= times.first_scheduled_time < times.first_token_time < times.finished_time


@pytest.mark.parametrize(
    "params",
    [
        LONG,
        replace(LONG, n=2, stop=("king", "love"), presence_penalty=0.7, repetition_penalty=1.1),
        replace(LONG, logprobs=2, prompt_logprobs=1),
        replace(LONG, structured_outputs={"regex": "[a-z ]{90,100}"}, ignore_eos=False),
        replace(LONG, temperature=0.0, min_tokens=15, bad_words=("thou",)),
    ],
    ids=["plain", "several answers", "logprobs", "structured", "greedy"],
)
def test_streams_go_on_after_a_loss(one_engine, params):
    """No delta comes twice and none is missing, whichever replica sends it."""

    async def run():
        async with started() as (driver, handles):
            requests = driver.submit(PROMPTS[:4], params, OutputKind.DELTA)
            first = next(request for request in requests if request.replica_index == 0)
            streams = [streamed(request, handles[0].lose if request is first else None) for request in requests]
            outputs = await asyncio.gather(*streams)
            assert any(request.num_failures for request in requests)
            assert len(handles) == 3  # another one was started
            return outputs

    outputs = asyncio.run(run())
    expected = one_engine(PROMPTS[:4], params)
    assert facts(outputs) == facts(expected)
    if params.logprobs is not None:
        for output, other in zip(outputs, expected):
            assert [*output.outputs[0].logprobs[4]] == [*other.outputs[0].logprobs[4]]
            assert output.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
            assert len(output.prompt_logprobs) == len(other.prompt_logprobs)


def test_stop_strings_do_not_count_before_min_tokens_after_a_loss(one_engine):
    """What was generated before the loss stays protected, and a stop string may begin in it."""

    async def run(stop, **fields):
        params = replace(LONG, stop=stop, **fields)
        async with started(1) as (driver, handles):
            (request,) = driver.submit(PROMPTS[:1], params, OutputKind.DELTA)
            output = await streamed(request, handles[0].lose)
            assert request.num_failures == 1
        return facts([output]), facts(one_engine(PROMPTS[:1], params))

    (plain,) = one_engine(PROMPTS[:1], LONG)
    early = plain.text[1:4]  # completed by the first tokens
    got, expected = asyncio.run(run((early,), min_tokens=40))
    assert got == expected and got[0][3] == "length"
    got, expected = asyncio.run(run((early,), min_tokens=3))  # fewer than were generated before the loss
    assert got == expected
    late = plain.text[2:-20]  # begins before the loss, and ends after it
    got, expected = asyncio.run(run((late,)))
    assert got == expected and got[0][3] == "stop"


def test_other_tokens_after_a_loss_are_an_error():
    """With log-probabilities an answer is computed again: two different runs are not spliced."""
    processor = make_processor("tiny-qwen3", SETTINGS)
    ended = []
    params = replace(PARAMS, logprobs=1)
    (made,) = processor.requests(PROMPTS[:1], params, OutputKind.DELTA)
    request = ReplicaRequest(made, ended.append)
    assert request.message(0).generated == [[]]
    logprobs = [{1: Logprob(-1.0, 1, "a")}, {2: Logprob(-1.0, 1, "b")}]
    request.add_event(StreamEvent(0, 0, 0, "ab", [1, 2], None, None, logprobs))
    request.message(1)
    request.add_event(StreamEvent(0, 0, 0, "a", [1], None, None, None))
    with pytest.raises(RuntimeError, match="another one has sampled other tokens"):
        request.add_event(StreamEvent(0, 0, 0, "xc", [9, 3], None, None, None))


def test_grammars_are_compiled_beside_other_requests(monkeypatch):
    """Plain requests do not wait; a discard and an abort that come meanwhile take effect."""
    make_request, compiled = Replica._make_request, threading.Event()

    def make_slowly(self, new):
        if new.params.structured_outputs is not None:
            compiled.wait(20)
        return make_request(self, new)

    monkeypatch.setattr(Replica, "_make_request", make_slowly)
    structured = replace(LONG, structured_outputs={"regex": "[a-z ]{90,100}"}, ignore_eos=False)

    async def run():
        async with started(1) as (driver, handles):
            kept, aborted, discarded = driver.submit(PROMPTS[:3], structured)
            plain = driver.submit(PROMPTS[3:])
            await asyncio.sleep(0)
            driver.group.abort(aborted)
            driver.group.discard([discarded])
            assert all([await request.result() for request in plain])
            assert kept.final is None
            compiled.set()
            assert (await aborted.result()).finish_reason == "abort"
            assert (await kept.result()).finish_reason in ("stop", "length")
            assert not handles[0].replica._requests and not handles[0].replica._in_grammar_thread

    asyncio.run(run())


def test_requests_without_a_seed_are_repeatable_too():
    """Their noise is decided by the driver."""

    async def run():
        async with started() as (driver, handles):
            driver = Driver(driver.group, seed=None)
            requests = driver.submit(PROMPTS, LONG, OutputKind.DELTA)
            first = next(request for request in requests if request.replica_index == 0)
            return await asyncio.gather(
                *[streamed(request, handles[0].lose if request is first else None) for request in requests]
            )

    assert [len(output.token_ids) for output in asyncio.run(run())] == [LONG.max_tokens] * len(PROMPTS)


def test_error_of_one_request():
    """It concerns no other, and the replica goes on."""

    async def run():
        async with started() as (driver, handles):
            made = driver.input_processor.requests(PROMPTS, PARAMS, OutputKind.FINAL_ONLY)
            made[3].group[0].token_ids[0] = 10**6  # behind the driver's check
            requests = [ReplicaRequest(request, driver.ended.append) for request in made]
            requests[3].prompt_token_ids[0] = 10**6
            driver.group.submit(requests)
            with pytest.raises(ValueError, match="token id 1000000 is out of vocabulary"):
                await requests[3].result()
            assert all([await request.result() for request in requests if request is not requests[3]])
            assert len(handles) == 2 and driver.group.num_ready == 2

    asyncio.run(run())


def test_step_that_fails_is_a_loss(monkeypatch, one_engine):
    """The replica is started again, and its requests are computed elsewhere."""

    async def run():
        async with started() as (driver, handles):
            core = handles[0].replica.engine.core
            monkeypatch.setattr(core.scheduler, "postprocess", lambda *arguments: 1 / 0)
            requests = driver.submit(PROMPTS)
            outputs = [await request.result() for request in requests]
            while driver.group.num_ready < 2:
                await asyncio.sleep(0.01)
            assert driver.group.replicas[0].num_restarts == 1
            return outputs

    assert facts(asyncio.run(run())) == facts(one_engine(PROMPTS))


def test_request_that_kills_its_replicas(monkeypatch):
    """After MAX_FAILURES of them it ends with its own error, and later requests are computed."""
    make_request = Replica._make_request

    def make_or_die(self, new):
        if new.token_ids[0] == 7:
            self._fail(RuntimeError("poison"))
        return make_request(self, new)

    monkeypatch.setattr(Replica, "_make_request", make_or_die)

    async def run():
        async with started() as (driver, handles):
            (poison,) = driver.submit([[7, 8, 9]])
            with pytest.raises(RuntimeError, match=f"{MAX_FAILURES} replicas were lost while they computed it.*poison"):
                await poison.result()
            outputs = [await request.result() for request in driver.submit(PROMPTS)]
            assert len(outputs) == len(PROMPTS) and len(handles) > MAX_FAILURES

    asyncio.run(run())


def test_replicas_that_do_not_start_again():
    """A replica is given up after MAX_FAILURES in a row; when all are, everything ends with the cause."""

    async def run():
        handles = []
        async with started(handles=handles) as (driver, _):
            group, failures = driver.group, []
            group.on_failure.append(failures.append)
            group._launch = lambda: LocalHandle(fails_to_start=True)
            handles[0].lose()
            while group.num_ready == 2:
                await asyncio.sleep(0.01)
            outputs = [await request.result() for request in driver.submit(PROMPTS)]  # by the other one
            assert len(outputs) == len(PROMPTS) and group.num_ready == 1 and group.error is None
            requests = driver.submit(PROMPTS)
            handles[1].lose()
            for request in requests:
                with pytest.raises(EngineDeadError, match="all replicas were lost.*no GPU"):
                    await request.result()
            assert len(failures) == 1 and isinstance(failures[0], EngineDeadError)
            with pytest.raises(RuntimeError, match="no GPU"):
                await driver.submit(PROMPTS[:1])[0].result()

    asyncio.run(run())


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_innocents_of_a_request_that_kills_its_replicas(monkeypatch, one_engine, num_replicas):
    """What was computed beside it is computed in the end, also by a single replica, and no replica is given up."""
    process = replica_module.Replica._submit

    def process_or_die(self, messages):
        messages = [*messages]
        if any(new.token_ids[0] == 7 for new in messages):
            raise RuntimeError("poison")
        process(self, messages)

    monkeypatch.setattr(replica_module.Replica, "_submit", process_or_die)

    async def run():
        async with started(num_replicas) as (driver, _):
            requests = driver.submit([*PROMPTS[:5], [7, 8, 9], *PROMPTS[5:]])
            poison = requests.pop(5)
            with pytest.raises(RuntimeError, match="replicas were lost while they computed it.*poison"):
                await poison.result()
            outputs = [await request.result() for request in requests]
            assert len(outputs) == 10 and driver.group.error is None
            assert all(output.finish_reason in ("stop", "length") for output in outputs)
            return [len(output.prompt_token_ids) for output in outputs]

    assert asyncio.run(run()) == [len(output.prompt_token_ids) for output in one_engine(PROMPTS)]


def test_replica_that_fails_while_it_is_idle(monkeypatch):
    """A rank that dies then is noticed without a request, and an error of `submit` is a loss."""

    def dead():
        raise RuntimeError("rank 1 has died")

    async def run():
        async with started() as (driver, handles):
            workers = handles[0].replica.engine.core.workers
            monkeypatch.setattr(workers, "check", dead)
            workers.on_failure()
            while driver.group.replicas[0].num_restarts == 0:
                await asyncio.sleep(0.01)
            monkeypatch.setattr(handles[1].replica, "_submit", lambda messages: dead())
            outputs = [await request.result() for request in driver.submit(PROMPTS)]
            assert len(outputs) == 10 and len(handles) == 4

    asyncio.run(run())


def test_parameters_of_other_classes():
    """A class that a replica can't import is no obstacle; what can't be pickled ends its own request alone."""

    class MyParams(SamplingParams):
        """Local, so that pickle can't find it."""

    class MyText(str):
        """The same."""

    async def run():
        async with started() as (driver, handles):
            own = MyParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            bad = SamplingParams(temperature=0.0, max_tokens=4, stop=[MyText("none")])
            requests = driver.submit(PROMPTS[:3], [own, bad, PARAMS])
            assert len((await requests[0].result()).token_ids) == 4
            with pytest.raises(Exception, match="MyText"):
                await requests[1].result()
            assert await requests[2].result() and len(driver.ended) == 3
            assert len(handles) == 2 and not any(replica.num_answers for replica in driver.group.replicas)

    asyncio.run(run())


class BadRouter(RoundRobin):
    def choose(self, token_ids, loads):
        return 1 / 0 if token_ids[0] % 2 else 17

    def computed(self, replica, token_ids):
        raise RuntimeError("computed")

    def forget(self, replica):
        raise RuntimeError("forget")


def test_router_that_fails():
    """The least loaded replica is chosen instead, and every request has its answer."""

    async def run():
        async with started(router=BadRouter()) as (driver, handles):
            requests = driver.submit([[i + 1, 2, 3] for i in range(8)])
            assert [replica.num_answers for replica in driver.group.replicas] == [4, 4]
            handles[0].lose()
            assert len([await request.result() for request in requests]) == len(driver.ended) == 8

    asyncio.run(run())


def test_restart_that_takes_too_long(monkeypatch, caplog):
    """It counts as a failure, and the log says what the replica waits for."""
    monkeypatch.setattr(group_module, "START_LOG_SECONDS", 0.01)

    async def never(self):
        await asyncio.sleep(100)

    async def run():
        async with started(1, restart_timeout=0.05) as (driver, handles):
            monkeypatch.setattr(LocalHandle, "start", never)
            handles[0].lose()
            with pytest.raises(EngineDeadError, match="did not start within 0 s"):
                await driver.submit(PROMPTS[:1])[0].result()

    asyncio.run(run())
    assert "replica 0 is not ready yet" in caplog.text


def test_no_replica_can_be_started_any_more(monkeypatch):
    """That ends all requests at once, also those that another replica computes: it has no Ray either."""

    async def no_cluster(self):
        raise ClusterDeadError("the cluster is gone")

    async def run():
        async with started(2) as (driver, handles):
            # slow, so that none of its requests ends before the loss is noticed, however busy the machine is
            handles[1].replica.engine.core.on_step.append(lambda step, result: sleep(0.02))
            requests = driver.submit(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True))
            monkeypatch.setattr(LocalHandle, "start", no_cluster)
            handles[0].lose()
            for request in [*requests, *driver.submit(PROMPTS)]:
                with pytest.raises(ClusterDeadError, match="the cluster is gone"):
                    await request.result()
            assert isinstance(driver.group.error, EngineDeadError)

    asyncio.run(run())


def test_losses_that_are_far_apart(monkeypatch):
    """A replica that has run for some minutes starts with a clean record."""
    monkeypatch.setattr(state_module, "STABLE_SECONDS", 0.0)

    async def run():
        async with started(1) as (driver, handles):
            for i in range(MAX_FAILURES + 1):
                handles[-1].lose()
                while driver.group.replicas[0].num_restarts == i:
                    await asyncio.sleep(0.01)
            assert driver.group.error is None and driver.group.replicas[0].num_failures == 1

    asyncio.run(run())


def test_abort_while_no_replica_computes():
    """A request that waits ends at once, and one whose replica is lost ends with what its caller has."""

    async def run():
        async with started(1, max_answers=1) as (driver, handles):
            first, second, third = driver.submit(PROMPTS[:3], LONG, OutputKind.DELTA)
            driver.group.abort(second)
            output = await second.result()
            assert output.finish_reason == "abort" and output.token_ids == []
            assert [event.finish_reason for event in await second.next_events()] == ["abort"]
            while not (events := await first.next_events()):
                pass
            handles[0].lost.set()  # before the replica hears of it
            driver.group.abort(first)
            assert (await first.result()).finish_reason == "abort"
            assert (await first.result()).token_ids[: len(events[0].token_ids)] == events[0].token_ids
            assert (await third.result()).finish_reason == "length" and len(driver.ended) == 3

    asyncio.run(run())


def test_counters_of_replicas():
    """They never go back: when a replica is down, was restarted, or when an older reading comes later."""

    def reading(tokens: int, restarts: int = 0) -> dict:
        requests, blocks = {"waiting": 0, "running": 1}, {"used": 1, "cached": 0, "free": 1}
        counts = {"tokens": {"in": tokens, "out": tokens}, "prefix_hit_rate": 0.5, "preemptions": 0}
        return dict(requests=requests, blocks=blocks, restarts=restarts) | counts

    def count(stats) -> tuple[int, int]:
        metrics._stats = [stats]
        metrics._count()
        return metrics._engines[0]["prompt_tokens"], metrics._engines[0]["num_requests_running"]

    metrics = Metrics(SimpleNamespace(on_end=[], num_unfinished=0, engine=None), "tiny-qwen3")
    assert count(reading(10)) == (10, 1)
    assert count(None) == (10, 0)
    assert count(reading(30, restarts=1)) == (40, 1)  # more than before the restart, which is seen all the same
    assert count(reading(20, restarts=1)) == (40, 1)
    assert count(reading(12)) == (40, 1)
    assert count(reading(32, restarts=1)) == (42, 1)


def test_health_without_a_replica():
    """One dead replica is not a dead service, and a service without replicas can't be used."""
    pytest.importorskip("ray")
    from nanovllm.serve.replicas.async_replicas import AsyncReplicas

    client = object.__new__(AsyncReplicas)
    client._is_closing, client.group, client.on_end = False, ReplicaGroup(LocalHandle, 2, 32, 16), []
    app = FastAPI()
    add_info_routes(app, SimpleNamespace(llm=client, model_names=["tiny-qwen3"]))
    health = next(route.endpoint for route in app.routes if route.path == "/health")
    codes = []
    for num_ready in (2, 1, 0):
        for replica in client.group.replicas:
            replica.is_ready = replica.index < num_ready
        codes.append((client.health()["status"], asyncio.run(health()).status_code))
    assert codes == [("ok", 200), ("degraded", 200), ("unavailable", 503)]


def test_submit_before_start():
    group = ReplicaGroup(LocalHandle, 1, 32, 16)
    with pytest.raises(RuntimeError, match="not started"):
        Driver(group).submit(PROMPTS[:1])


def test_close_while_replicas_start():
    """Nothing is started after it, and nothing is left."""

    async def run():
        handles = []

        def launch():
            handles.append(LocalHandle())
            return handles[-1]

        group = ReplicaGroup(launch, 2, 32, 16)
        start = asyncio.ensure_future(group.start())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await group.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await start
        assert len(handles) == 2 and all(handle.lost.is_set() for handle in handles) and not group._tasks
        for handle in handles:
            handle.kill()

    asyncio.run(run())


def test_start_that_fails():
    async def run():
        handles = iter([LocalHandle(), LocalHandle(fails_to_start=True)])
        group = ReplicaGroup(lambda: next(handles), 2, 32, 16)
        with pytest.raises(RuntimeError, match="no GPU"):
            await group.start()
        assert all(replica.handle is None for replica in group.replicas)

    asyncio.run(run())


def test_discard_abort_and_bounds():
    async def run():
        async with started(1, max_answers=4) as (driver, handles):
            replica = handles[0].replica
            requests = driver.submit(PROMPTS, replace(PARAMS, max_tokens=200, ignore_eos=True), OutputKind.DELTA)
            assert sum(request.replica_index is not None for request in requests) == 4
            driver.group.discard(requests[2:] + requests[2:])
            await requests[0].next_events()
            driver.group.abort(requests[0])
            output = await streamed_rest(requests[0])
            assert output.finish_reason == "abort" and 0 < len(output.token_ids) < 200
            driver.group.discard(requests)
            while replica._requests or replica.engine.core.output_processor.requests:
                await asyncio.sleep(0.01)
            assert driver.ended == [requests[0]] and driver.group.replicas[0].num_answers == 0
            assert [stats["requests"] for stats in await driver.group.stats()] == [{"waiting": 0, "running": 0}]

    async def streamed_rest(request):
        while await request.next_events():
            pass
        return await request.result()

    asyncio.run(run())


def test_order_of_requests_that_wait(monkeypatch):
    """That of the scheduling policy, also after a loss."""
    monkeypatch.setitem(SETTINGS, "scheduling_policy", "priority")

    async def run():
        async with started(1, max_answers=1) as (driver, handles):
            made = driver.input_processor.requests(PROMPTS[:5], PARAMS, OutputKind.FINAL_ONLY, None, [2, 5, 1, 5, -3])
            requests = [ReplicaRequest(request, driver.ended.append) for request in made]
            driver.group.submit(requests)
            assert [request.replica_index for request in requests] == [None, None, None, None, 0]
            handles[0].lose()
            await asyncio.gather(*[request.result() for request in requests])
            assert [requests.index(request) for request in driver.ended] == [4, 2, 0, 1, 3]

    asyncio.run(run())


def test_one_message_for_many_requests():
    """Requests of one iteration of the loop go out together, and reports are about many."""

    async def run():
        async with started(1) as (driver, handles):
            calls = []
            call = handles[0].call
            handles[0].call = lambda method, *arguments: (calls.append((method, arguments)), call(method, *arguments))[
                1
            ]
            outputs = [await request.result() for request in driver.submit(PROMPTS)]
            assert [method for method, _ in calls] == ["submit"]
            assert len([*decode_requests(calls[0][1][0])]) == len(PROMPTS)
            assert handles[0].num_reports < len(outputs) + 2

    asyncio.run(run())


def test_ray_is_an_extra(monkeypatch):
    """Without it, the rest of the folder works, and RayLLM says what to install."""
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("actors", "ray_llm"):  # which another test of this process may have imported
        monkeypatch.delitem(sys.modules, f"nanovllm.serve.replicas.{name}", raising=False)
        monkeypatch.delattr(replicas, name, raising=False)
    assert replicas.PrefixRouter and replicas.NanoVLLM
    with pytest.raises(ImportError, match="pip install 'nano-vllm.ray.'"):
        _ = replicas.RayLLM
    with pytest.raises(AttributeError, match="no attribute 'Surprise'"):
        _ = replicas.Surprise


class TwoArguments(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, text, number):
        super().__init__(text)


def test_messages():
    delta = StreamEvent(0, 0, 3, "text", [1, 2], None, None, None)
    answer = CompletionOutput(0, "text", [1, 2], None, None, "length", None)
    final = Final(3, [answer], 16, None, (0.1, 0.2, 0.3))
    report = decode_report(encode_report(Report([delta], [final], [])))
    assert report.deltas == [delta] and report.finals == [final] and report.errors == []

    class Local(Exception):
        """Can't be pickled, as it is no module's."""

    report = decode_report(encode_report(Report([], [], [(1, TwoArguments("why", 3)), (2, ValueError("so"))])))
    assert isinstance(report.errors[0][1], RuntimeError) and "why" in str(report.errors[0][1])
    assert isinstance(report.errors[1][1], ValueError) and report.errors[1][0] == 2

    report = decode_report(encode_report(Report([], [], [(1, Local("why"))])))
    assert isinstance(report.errors[0][1], RuntimeError) and "why" in str(report.errors[0][1])


@pytest.mark.parametrize(
    "num_replicas, router, low, high", [(1, None, 0.7, 1), (2, None, 0.7, 1), (2, RoundRobin(), 0, 0.68)]
)
def test_hit_rate_of_real_caches(num_replicas, router, low, high):
    """Five conversations of 6 turns, turn by turn: the router knows what the block managers hold."""

    async def run():
        async with started(num_replicas, router=router) as (driver, _):
            params = replace(PARAMS, max_tokens=16, ignore_eos=True)
            histories = [[(i * 37 + j) % 500 + 10 for j in range(24)] for i in range(5)]
            homes = [set() for _ in histories]
            for turn in range(6):
                requests = [driver.submit([history], params)[0] for history in histories]
                for home, request in zip(homes, requests):
                    home.add(request.replica_index)
                outputs = [await request.result() for request in requests]
                histories = [
                    [*history, *output.token_ids, i + 10, turn + 10]
                    for i, (history, output) in enumerate(zip(histories, outputs))
                ]
            assert router is not None or all(len(home) == 1 for home in homes)
            stats = await driver.group.stats()
            found = sum(own["prefix_hit_rate"] * own["tokens"]["in"] for own in stats)
            return found / sum(own["tokens"]["in"] for own in stats)

    assert low <= asyncio.run(run()) <= high


def test_stage_of_ray_data(one_engine):
    """The class that `ray.data` calls is a function of columns; an invalid row concerns no other."""
    stage = NanoVLLM(MODEL, dict(temperature=0.8, max_tokens=20), **SETTINGS, seed=3)
    try:
        long, conversation = "word " * 300, [{"role": "user", "content": "Hello", "name": None}]
        batch = {"prompt": [*PROMPTS, long, conversation], "id": [*range(12)]}
        result = stage(batch)
        assert stage({"prompt": [long]})["finish_reason"] == ["error"]
    finally:
        stage.llm.exit()
    expected = one_engine(PROMPTS)
    assert result["generated_text"][:10] == [output.text for output in expected]
    assert result["num_output_tokens"][:10] == [len(output.token_ids) for output in expected]
    assert result["finish_reason"][10] == "error" and "max_model_len" in result["generated_text"][10]
    assert result["finish_reason"][11] in ("stop", "length") and result["id"] == [*range(12)]
