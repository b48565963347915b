"""Several HTTP processes for one engine: the answers are those of LLM, and an end takes its own requests along only."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from multiprocessing.context import ForkProcess
from multiprocessing.sharedctypes import RawArray
from pathlib import Path

import pytest
from programs import Program

pytest.importorskip("fastapi")
pytest.importorskip("msgspec")
httpx = pytest.importorskip("httpx")

from prometheus_client import CollectorRegistry
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.serve import EngineDeadError, QueueFullError
from nanovllm.serve.address import listening_socket, reserved_address
from nanovllm.serve.engine_calls import StepSizes
from nanovllm.serve.fronts import engine_process, front
from nanovllm.serve.fronts.channel import (
    Channel,
    FromEngine,
    FromFront,
    decode_from_engine,
    decode_from_front,
    encode_request,
)
from nanovllm.serve.fronts.engine_process import FrontPlan, Fronts, run_front
from nanovllm.serve.fronts.front import FrontClient
from nanovllm.serve.fronts.session import Session
from nanovllm.serve.metrics import AllFronts
from nanovllm.serve.settings import ServerSettings

MODEL, ADAPTER = "tiny-qwen3", "tiny-qwen3-descending"
ENGINE = dict(dtype="float32", device="cpu", kvcache_block_size=16, num_kvcache_blocks=256, max_num_seqs=8)
PROMPTS = ["HAMLET.\nTo be, or", [300, 301, 302], [{"role": "user", "content": "What is 2 + 3?"}]]
GREEDY = dict(temperature=0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
PARAMS = [
    dict(GREEDY),
    dict(temperature=0.9, seed=3, n=3, max_tokens=20),
    dict(temperature=0.9, seed=5, max_tokens=40, stop=["e"]),
    dict(temperature=0.9, seed=5, max_tokens=40, stop=["e"], include_stop_str_in_output=True),
    dict(temperature=0, max_tokens=20, stop_token_ids=[*range(256, 384)]),
    dict(temperature=0, max_tokens=20, stop_token_ids=[*range(256, 384)], include_stop_str_in_output=True),
    dict(**GREEDY, logprobs=2, n=2),
    dict(**GREEDY, prompt_logprobs=1),
    dict(**GREEDY, detokenize=False),
    dict(**GREEDY, presence_penalty=1.0, logit_bias={300: 5.0}, bad_words=["be"]),
    dict(temperature=0, max_tokens=30, structured_outputs={"regex": "[0-9]{3}"}),
]


class Setup:
    """An engine, and fronts of it in this process."""

    def __init__(self, llm: LLM):
        self.llm, self.sizes, self.num_live, self.failures = llm, StepSizes(llm), [0, 0], []

    def front(self, index: int = 0, max_queued: int = 8) -> FrontClient:
        own, other = map(Channel, socket.socketpair())
        session = Session(self.llm, self.sizes, lambda: self.failures.append(index), own)
        settings = ServerSettings(max_queued_requests=max_queued)
        plan = FrontPlan(self.llm.config.model, settings, ENGINE, self.num_live, None)
        own.send(FromEngine())  # as the engine's process does, once it has loaded the model
        client = FrontClient(plan, index, other)
        client.session = session
        return client

    async def wait_until_free(self, seconds: float = 5.0) -> None:
        end = time.perf_counter() + seconds
        while self.llm.core.output_processor.requests or self.llm.stats()["blocks"]["used"]:
            assert time.perf_counter() < end, self.llm.stats()
            await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def llm(small_model):
    with LLM(small_model, **ENGINE) as llm:
        yield llm


@pytest.fixture
def setup(llm):
    return Setup(llm)


def assert_same(answers, expected) -> None:
    for answer, own in zip(answers, expected, strict=True):
        assert (answer.text, answer.token_ids) == (own.text, own.token_ids)
        assert (answer.finish_reason, answer.stop_reason) == (own.finish_reason, own.stop_reason)
        assert answer.logprobs == own.logprobs and answer.cumulative_logprob == pytest.approx(own.cumulative_logprob)


def test_what_a_lost_front_has_asked_for_is_dropped(setup, monkeypatch):
    """Also what the thread of grammars is still making."""
    is_made, make = threading.Event(), Session._make_request

    def make_late(session, new):
        assert is_made.wait(20)
        return make(session, new)

    monkeypatch.setattr(Session, "_make_request", make_late)

    async def main():
        async with setup.front() as client:
            params = SamplingParams(max_tokens=100, min_tokens=100, structured_outputs={"regex": "[a-z]*"})
            requests = [await client.submit(PROMPTS[0], params) for _ in range(2)]
            while len(client.session._in_grammar_thread) != len(requests):
                await asyncio.sleep(0.005)
            client.session._channel.close()
        while not client.session.is_closed:
            await asyncio.sleep(0.005)
        is_made.set()
        while client.session._in_grammar_thread:
            await asyncio.sleep(0.005)
        await setup.wait_until_free()

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_answers_are_those_of_generate(setup, params):
    """Streamed and whole; a front makes the text, unless the engine needs it to stop, or for log-probabilities."""
    prompts, params = PROMPTS[: 3 if params == GREEDY else 1], SamplingParams(**params)
    expected = [setup.llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    has_end = params.stop or params.stop_token_ids or params.structured_outputs
    assert expected[0].finish_reason == ("stop" if has_end else "length")

    async def ask(client, prompt):
        async for output in client.generate(prompt, params):
            last = output
        request = await client.submit(prompt, params, in_pieces=False)
        return last, await request.result()

    async def main():
        async with setup.front() as client:
            found = await asyncio.gather(*[ask(client, prompt) for prompt in prompts])
            await setup.wait_until_free()
            assert client.num_requests == client.num_unfinished == 0
            return found

    for outputs, own in zip(asyncio.run(main()), expected, strict=True):
        for output in outputs:
            assert output.finished and output.prompt == own.prompt
            assert output.prompt_token_ids == own.prompt_token_ids
            assert output.prompt_logprobs == own.prompt_logprobs
            assert_same(output.outputs, own.outputs)
            times = output.metrics
            assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time <= times.finished_time


def test_beam_search(setup):
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    expected = setup.llm.beam_search([PROMPTS[0]], params)[0].outputs

    async def main():
        async with setup.front() as client:
            found = await (await client.submit(PROMPTS[0], params, in_pieces=False)).result()
            assert [(x.text, x.token_ids) for x in found.outputs] == [(x.text, x.token_ids) for x in expected]
            assert found.prompt == PROMPTS[0] and [x.index for x in found.outputs] == [0, 1, 2]
            await setup.wait_until_free()
            assert client.num_unfinished == 0

    asyncio.run(main())


def test_calls(setup):
    """What the page and the metrics ask for; the end of a front ends its recording."""

    async def main():
        async with setup.front() as client:
            await client.call("start_recording")
            text, last, is_recording, is_idle = await client.call("frames", 0)
            assert json.loads(text)[0]["key"]["num_blocks"] == 256 and is_recording and is_idle
            await (await client.submit(PROMPTS[1], SamplingParams(**GREEDY), in_pieces=False)).result()
            num_steps = 0
            while num_steps < 12:  # the answer may arrive before the last step is recorded
                text, last, *_ = await client.call("frames", last)
                num_steps += sum(frame["ms"] > 0 for frame in json.loads(text or "[]") if "ms" in frame)
            sizes = (await client.stats())[0]["step_sizes"]
            assert sum(sizes["counts"]) == 12 and sizes["total"] == 3 + 12
            assert len(setup.llm.core.on_step) > num_hooks
        await asyncio.to_thread(wait_for, lambda: len(setup.llm.core.on_step) == num_hooks)

    num_hooks = len(setup.llm.core.on_step)
    asyncio.run(main())


def test_a_late_front_writes_several_steps_in_one_piece(setup):
    async def main():
        async with setup.front() as client:
            request, told = await client.submit(PROMPTS[1], ENDLESS), []
            assert await request.next_events()
            request.on_news = lambda: told.append(len(request._events))
            time.sleep(0.2)  # meanwhile the engine goes on
            while not told:
                await asyncio.sleep(0)
            assert told[0] > 1
            client.discard(request)
            await setup.wait_until_free()

    asyncio.run(main())


def test_a_front_does_not_listen_before_the_engine_has_started(llm):
    async def main():
        own, other = map(Channel, socket.socketpair())
        client = FrontClient(FrontPlan(llm.config.model, ServerSettings(), ENGINE, [0], None), 0, other)
        starting = asyncio.ensure_future(client.start())
        await asyncio.sleep(0.05)
        assert not starting.done()
        own.send(FromEngine())
        await asyncio.wait_for(starting, 5)
        own.close()
        while client.error is None:
            await asyncio.sleep(0.005)
        client.exit()

    asyncio.run(main())


def test_the_end_of_a_front_takes_its_own_requests_along(setup):
    expected = setup.llm.generate([PROMPTS[0]], SamplingParams(**GREEDY), use_tqdm=False)[0]

    async def main():
        first, second = setup.front(0), setup.front(1)
        await first.start()
        await second.start()
        endless = [await first.submit(PROMPTS[0], ENDLESS) for _ in range(3)]
        other = await second.submit(PROMPTS[1], ENDLESS)
        assert await endless[0].next_events() and await other.next_events()
        assert first.num_unfinished == second.num_unfinished == 4
        first.exit()
        while len(setup.llm.core.output_processor.requests) != 1:
            await asyncio.sleep(0.005)
        assert await other.next_events()
        await second.abort(other.name)
        while events := await other.next_events():
            last = events[-1]
        assert last.finish_reason == "abort" and other.final.outputs[0].finish_reason == "abort"
        request = await second.submit(PROMPTS[0], SamplingParams(**GREEDY))
        assert_same((await request.result()).outputs, expected.outputs)
        dropped = await second.submit(PROMPTS[1], ENDLESS)
        assert await dropped.next_events()
        second.discard(dropped)
        await setup.wait_until_free()
        assert (await second.stats())[0]["requests"] == {"waiting": 0, "running": 0}
        second.exit()

    asyncio.run(main())
    assert setup.failures == []


def test_bounds_hold_for_all_fronts(setup):
    async def main():
        async with setup.front(0, max_queued=2) as first, setup.front(1, max_queued=2) as second:
            requests = [await client.submit(PROMPTS[1], ENDLESS) for client in [first, second] * 5]
            for client in (first, second):
                with pytest.raises(QueueFullError, match="10 answers of at most 10"):
                    await client.submit(PROMPTS[1], ENDLESS)
            for client, request in zip([first, second] * 5, requests):
                client.discard(request)
            await setup.wait_until_free()
            assert setup.num_live == [0, 0]

    asyncio.run(main())


def test_requests_of_all_fronts_are_computed_in_the_order_of_their_arrival(setup):
    """Else those of the last front would wait for those of all others, and be preempted for them."""

    async def main():
        async with setup.front(0, max_queued=16) as first, setup.front(1, max_queued=16) as second:
            running = [await second.submit(PROMPTS[1], ENDLESS) for _ in range(8)]
            waiting = []
            for i, client in enumerate([second, first, second, first]):
                waiting.append((client, await client.submit(PROMPTS[1], ENDLESS)))
                while (await client.stats())[0]["requests"] != {"running": 8, "waiting": i + 1}:
                    await asyncio.sleep(0.005)
            for request, (_, expected) in zip(running, waiting):
                second.discard(request)
                assert await asyncio.wait_for(expected.next_events(), 20)
            orders = [
                seq.order
                for _, request in waiting
                for seq in setup.llm.core.output_processor.requests[request.request_id].group
            ]
            assert orders == sorted(orders)
            for client, request in [*((second, request) for request in running), *waiting]:
                client.discard(request)
            await setup.wait_until_free()

    asyncio.run(main())


def test_errors(setup, monkeypatch):
    """What only the engine finds is raised to its own caller; the end of the engine, to all."""

    async def main():
        async with setup.front() as client:
            for prompt, kind in (([10**9], ValueError), ("", ValueError), (5, TypeError)):
                with pytest.raises(kind, match="prompt"):
                    await client.submit(prompt)

            def refuse(new):
                raise ValueError("prompt: refused")

            monkeypatch.setattr(client.session, "_make_request", refuse)
            request = await client.submit(PROMPTS[1], ENDLESS)
            with pytest.raises(ValueError, match="prompt: refused"):
                await request.result()
            await setup.wait_until_free()

    asyncio.run(main())
    assert setup.failures == []


def test_whoever_asked_for_figures_may_be_gone(setup):
    """What comes with them still arrives."""

    async def main():
        async with setup.front() as client:
            request = await client.submit(PROMPTS[0], SamplingParams(**GREEDY))
            gone, other = (asyncio.ensure_future(client.stats()) for _ in range(2))
            await asyncio.sleep(0)  # one message asks for both
            gone.cancel()
            assert (await asyncio.wait_for(other, 5))[0]["requests"].keys() == {"waiting", "running"}
            assert len((await request.result()).outputs[0].token_ids) == 12

    asyncio.run(main())
    assert setup.failures == []


def test_a_step_that_fails_ends_the_engine(setup, monkeypatch):
    async def main():
        async with setup.front() as client:
            failed = []
            client.on_failure.append(failed.append)
            request = await client.submit(PROMPTS[1], ENDLESS)
            assert await request.next_events()
            monkeypatch.setattr(setup.llm.model_runner, "run", None)
            with pytest.raises(EngineDeadError, match="object is not callable"):
                while await request.next_events():
                    pass
            with pytest.raises(EngineDeadError):
                await client.submit(PROMPTS[1], ENDLESS)
            with pytest.raises(EngineDeadError):
                await client.stats()
            assert len(failed) == 1
            await asyncio.to_thread(wait_for, lambda: setup.failures == [0])  # the session's thread says it last

    asyncio.run(main())


HUGE = 2**70  # which no message can have


def with_max_tokens(value) -> SamplingParams:
    """Parameters that were not checked."""
    params = SamplingParams(**GREEDY, logprobs=0)
    object.__setattr__(params, "max_tokens", value)
    return params


@pytest.mark.parametrize("how", ["not encoded", "not read"])
def test_a_request_that_can_not_be_sent_fails_alone(setup, monkeypatch, how):
    """Others go on that are in the same message, or in later ones."""

    def encode(new):
        request_id, data = encode_request(new)
        return request_id, (b"\xc1" if new.params.max_tokens == 7 else data)

    async def main():
        async with setup.front() as client:
            monkeypatch.setattr(front, "encode_request", encode if how == "not read" else encode_request)
            values = [12, HUGE if how == "not encoded" else 7, 12, 12]
            requests = [client.submit(PROMPTS[1], with_max_tokens(value)) for value in values]

            async def answer(request):
                return (await (await request).result()).outputs[0].token_ids

            first, failed, *others = await asyncio.gather(*map(answer, requests), return_exceptions=True)
            assert isinstance(failed, OverflowError if how == "not encoded" else RuntimeError), failed
            assert len(first) == 12 and others == [first, first]
            await setup.wait_until_free()
            assert client.num_unfinished == 0 and client.error is None
            assert (await client.stats())[0]["requests"] == {"waiting": 0, "running": 0}

    asyncio.run(main())
    assert setup.failures == []


def test_an_answer_that_can_not_be_sent_fails_alone(setup, monkeypatch, caplog):
    async def main():
        async with setup.front() as client:
            refused = []

            def read(outputs):
                deltas, finals = Session._read(client.session, outputs)
                bad_text = lambda delta: "\ud800" if delta.request_id in refused else delta.text
                return [replace(delta, text=bad_text(delta)) for delta in deltas], finals

            monkeypatch.setattr(client.session, "_read", read)
            bad, good = [await client.submit(PROMPTS[1], ENDLESS) for _ in range(2)]
            assert await bad.next_events() and await good.next_events()
            refused.append(bad.request_id)
            with pytest.raises(RuntimeError, match="surrogates"):
                while await bad.next_events():
                    pass
            for _ in range(3):
                assert await good.next_events()
            client.discard(good)
            await setup.wait_until_free()

    asyncio.run(main())
    assert setup.failures == [] and "an answer can't be sent to its front" in caplog.messages


def test_a_front_whose_messages_can_not_be_read_ends(setup, caplog):
    """It is started again, instead of having requests that wait for ever; the other one goes on."""

    async def main():
        async with setup.front(0) as first, setup.front(1) as second:
            lost, other = await first.submit(PROMPTS[1], ENDLESS), await second.submit(PROMPTS[1], ENDLESS)
            assert await lost.next_events() and await other.next_events()
            first._channel._socket.sendall(bytes([0, 0, 0, 1, 0xC1]))
            with pytest.raises(EngineDeadError):
                while await lost.next_events():
                    pass
            assert await other.next_events()
            second.discard(other)
            await setup.wait_until_free()

    asyncio.run(main())
    assert setup.failures == [] and "a message from a front can't be processed" in caplog.text


def test_channel():
    one, other = map(Channel, socket.socketpair())
    for message, decode in ((FromFront(discarded=[5]), decode_from_front), (FromEngine(), decode_from_engine)):
        one.send(message)
        assert decode(other.receive()) == message
    with pytest.raises(TimeoutError):
        other.receive(0.01)
    waiter = threading.Timer(0.05, one.close)
    waiter.start()
    with pytest.raises(OSError):
        one.receive()  # that another thread closes
    with pytest.raises(OSError):
        one.send(FromFront())
    waiter.join()


def test_what_starts_the_fronts_needs_neither_torch_nor_http():
    """Else they would have to wait for what they import themselves."""
    program = "import sys, nanovllm.serve.fronts.engine_process as _; assert not {'torch', 'fastapi'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", program], check=True)


# -- processes ---------------------------------------------------------------------------------------------------------


class FakeFronts(Fronts):
    """Fronts that are forks of this process, and do no more than to be ready."""

    def __init__(self, monkeypatch, num_fronts: int, lives: list[int]):
        """lives: of each start, how many starts of that front end before it is ready from then on."""
        self.ready, self.deaths = [], RawArray("q", lives)
        super().__init__(FrontPlan(MODEL, ServerSettings(), ENGINE, RawArray("q", num_fronts), None))

        def run(plan, index, end):
            self.deaths[index] -= 1
            if self.deaths[index] >= 0:
                os._exit(3)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, engine_process.BLOCKED)  # else only SIGKILL would end it
            Channel(end).send(FromFront())
            time.sleep(60)

        monkeypatch.setattr(engine_process, "SpawnProcess", ForkProcess)
        monkeypatch.setattr(engine_process, "run_front", run)

    def start(self) -> None:
        self.begin()
        self.listen(self.ready.append)

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def turn_until(self, condition) -> None:
        end = time.perf_counter() + 30
        while not condition():
            assert time.perf_counter() < end
            self._turn(engine_process.MAX_FAILED_STARTS)

    def close(self) -> None:
        self.end()
        self.join(10)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in self.pids())


def test_a_front_is_started_again_each_time_it_ends(monkeypatch, caplog):
    """Also if that is just after it was started; the other one does not notice."""
    with closing(FakeFronts(monkeypatch, 2, [0, 0])) as fronts:
        fronts.start()
        first, other = fronts.pids()
        assert len(fronts.ready) == 2
        for i in range(12):
            before, num_ready = fronts.pids()[0], len(fronts.ready)
            os.kill(before, signal.SIGKILL)
            fronts.turn_until(lambda before=before: fronts.pids()[0] != before)
            if i % 3 < 2:  # else it is killed before it is ready
                fronts.turn_until(lambda num_ready=num_ready: len(fronts.ready) > num_ready)
        fronts.turn_until(lambda: not fronts._starting)
        assert fronts.pids()[1] == other and fronts.pids()[0] != first and fronts._processes[1].is_alive()
        assert caplog.text.count("nanovllm-front-0 has ended (exit status -9), and starts again") >= 9
        assert fronts._num_failures[1] == 0


def test_a_front_that_ends_whenever_it_is_ready_ends_the_server(monkeypatch):
    def run(plan, index, end):
        Channel(end).send(FromFront())
        os._exit(2)

    with closing(FakeFronts(monkeypatch, 1, [0])) as fronts:
        monkeypatch.setattr(engine_process, "run_front", run)
        fronts.start()
        with pytest.raises(RuntimeError, match="soon after it was ready, 10 times in a row"):
            fronts.watch()
        assert len(fronts.ready) == 10


@pytest.mark.parametrize("num_deaths, is_fatal", [(3, False), (100, True)])
def test_a_front_that_never_gets_ready_ends_the_server(monkeypatch, num_deaths, is_fatal):
    with closing(FakeFronts(monkeypatch, 2, [0, 0])) as fronts:
        fronts.start()
        fronts.deaths[1] = num_deaths
        os.kill(fronts.pids()[1], signal.SIGKILL)
        if is_fatal:
            with pytest.raises(RuntimeError, match=r"front-1 has ended \(exit status 3\) .* 10 times in a row"):
                fronts.watch()
        else:
            fronts.turn_until(lambda: len(fronts.ready) == 3)
        assert fronts._processes[0].is_alive()


def test_a_front_that_does_not_start_at_first_is_an_error(monkeypatch):
    failed = pytest.raises(RuntimeError, match=r"front-1 has ended \(exit status 3\) before it was ready$")
    with closing(FakeFronts(monkeypatch, 2, [0, 1])) as fronts, failed:
        fronts.start()


def test_a_front_that_hangs_at_its_start_is_ended(monkeypatch):
    with closing(FakeFronts(monkeypatch, 1, [0])) as fronts:
        monkeypatch.setattr(engine_process, "run_front", lambda plan, index, end: time.sleep(60))
        monkeypatch.setattr(engine_process, "START_SECONDS", 0.1)
        with pytest.raises(RuntimeError, match=r"front-0 has ended \(exit status -9\) before it was ready"):
            fronts.start()


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="the fronts share an address by this option")
def test_two_servers_do_not_share_an_address():
    """Else each would get a part of the other's clients."""
    settings = ServerSettings(port=free_port(), api_server_count=2)
    with listening_socket(settings), listening_socket(settings, is_of_front=True) as front:
        front.listen()
        with listening_socket(settings, is_of_front=True) as another_front:
            another_front.listen()
        for other in (settings, replace(settings, api_server_count=1)):
            with pytest.raises(OSError, match=f"port={settings.port}: .*in use"):
                listening_socket(other)
    listening_socket(settings).close()


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="the fronts share an address by this option")
def test_a_unix_socket_stays_until_the_last_front_has_ended(tmp_path):
    settings = ServerSettings(uds=str(tmp_path / "socket"), api_server_count=2)
    with reserved_address(settings) as listener:
        with pytest.raises(OSError, match="in use"):
            listening_socket(settings)
        plan = FrontPlan(MODEL, settings, ENGINE, RawArray("q", 1), listener)
        own, other = socket.socketpair()
        process = ForkProcess(target=lambda: own.close() or run_front(plan, 0, other))
        process.start()
        Channel(own).send(FromEngine())
        other.close()
        try:
            Channel(own).receive(60)  # it is ready
            own.shutdown(socket.SHUT_RDWR)
            process.join(20)
            assert process.exitcode == 1 and (tmp_path / "socket").exists()
        finally:
            process.kill()
    assert not (tmp_path / "socket").exists()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def serving(num_fronts: int = 2, flags: Sequence[str] = (), **constants: float):
    """`nanovllm serve` with fronts, which says at once that it loads; the process, and the URL.

    `constants` are those of `engine_process`. What the process has logged is printed in the end, and, should a request
    hang, what its threads did meanwhile.
    """
    port = free_port()
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    program = "import faulthandler; faulthandler.dump_traceback_later(50)\n"  # seconds; `ask` waits for 60
    program += "from nanovllm.utils import waiting; waiting.DELAY = 0.0; from nanovllm.__main__ import main\n"
    program += "import nanovllm.serve.fronts.engine_process as process\n"
    program += "".join(f"process.{name} = {value}\n" for name, value in constants.items()) + "main()"
    command = [sys.executable, "-c", program, "serve", MODEL, f"--port={port}", f"--api-server-count={num_fronts}"]
    with tempfile.TemporaryFile("a+") as log:  # which the process only appends to, wherever it is read
        streams = dict(stdout=subprocess.PIPE, stderr=log, text=True)
        process = Program([*command, *settings, *flags], **streams, start_new_session=True)
        try:
            assert process.stdout.readline().startswith("tiny-qwen3 is served at")
            log.seek(0)
            assert "Loading tiny-qwen3 ...\n" in log.read()
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()
            log.seek(0)
            print(log.read())


def children(pid: int) -> list[int]:
    """The processes of the fronts: children in process groups of their own."""
    command = ["ps", "--ppid", str(pid), "-o", "pid=,pgid="]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return [child for child, group in (map(int, line.split()) for line in lines) if group == child]


def metrics_folder(pid: int) -> str:
    """That of the files that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return next(os.path.dirname(line.split()[-1]) for line in lines if line.endswith(f"_{pid}.db"))


def sockets(pid: int) -> set[str]:
    """The inodes of the sockets that a process has open."""
    names = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    return {name.removeprefix("socket:[").rstrip("]") for name in names if name.startswith("socket:")}


def front_of(response, fronts: list[int]) -> int:
    """The front that answers: the one which has the other end of the client's connection."""
    port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    inodes = {inode for _, _, remote, *_, inode in (line[:10] for line in lines) if remote.endswith(f":{port:04X}")}
    (front,) = (pid for pid in fronts if inodes & sockets(pid))
    return front


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < end
        time.sleep(0.05)


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="the fronts share an address by this option")
def test_processes():
    """One server's life: answers, metrics of both fronts, the loss of a front, and a drain at the end."""
    body = {"prompt": PROMPTS[0], **GREEDY}
    with LLM(MODEL, **ENGINE) as llm:
        text = llm.generate([PROMPTS[0]], SamplingParams(**GREEDY), use_tqdm=False)[0].text
    ask = lambda url: httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    with serving(flags=["--enable-lora", f"--lora-modules={ADAPTER}={ADAPTER}"]) as (process, url):
        fronts = children(process.pid)
        assert len(fronts) == 2
        for pid, other in (fronts, [fronts[0], process.pid], [fronts[1], process.pid]):
            assert not sockets(pid) & sockets(other)  # so that the end of a process closes its channels
        assert [ask(url) for _ in range(8)] == [text] * 8  # each in a connection of its own
        for _ in range(16):  # any front
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": [], "unknown": 1}, timeout=60)
            assert answer.status_code == 400
        answer = httpx.get(f"{url}/v1/responses/resp_1", timeout=60)
        assert answer.status_code == 404 and "another process of this server" in answer.json()["error"]["message"]
        for _ in range(4):
            lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
            assert "nanovllm:ignored_request_fields_total 16.0" in lines
            assert 'vllm:request_success_total{finished_reason="length",model_name="tiny-qwen3"} 8.0' in lines
            assert 'vllm:generation_tokens_total{model_name="tiny-qwen3"} 96.0' in lines
        assert httpx.get(f"{url}/health", timeout=60).json() == {"status": "ok"}

        endless = body | {"max_tokens": 1500, "stream": True}
        with httpx.Client() as one, one.stream("POST", f"{url}/v1/completions", json=endless, timeout=60) as stream:
            chunks = stream.iter_lines()
            assert next(chunks).startswith("data: ")
            lost = front_of(stream, fronts)
            os.kill(lost, signal.SIGKILL)
            with pytest.raises(httpx.RemoteProtocolError):
                assert not [*chunks]
        wait_for(lambda: lost not in children(process.pid) and len(children(process.pid)) == 2)
        assert {*fronts} - {*children(process.pid)} == {lost}
        (again,) = {*children(process.pid)} - {*fronts}
        os.kill(again, signal.SIGKILL)  # while it starts
        wait_for(lambda: again not in children(process.pid) and len(children(process.pid)) == 2)
        wait_for(lambda: can_connect(url))
        assert ask(url) == text
        sort = {"model": ADAPTER, "messages": [{"role": "user", "content": "Sort: 9, 3, 71, 20"}], "temperature": 0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=sort, timeout=60).json()
        assert "71, 20, 9, 3" in answer["choices"][0]["message"]["content"]
        lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
        assert 'vllm:num_requests_running{model_name="tiny-qwen3"} 0.0' in lines

        with (
            httpx.Client(timeout=60) as one,
            one.stream("POST", f"{url}/v1/completions", json=endless | {"max_tokens": 100}) as x,
        ):
            chunks = x.iter_lines()
            next(chunks)
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
            events = [json.loads(line[6:]) for line in chunks if line.startswith("data: {")]
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert process.wait(30) == 0
        assert not any(os.path.exists(f"/proc/{pid}") for pid in children(process.pid))


def test_metrics_while_a_front_creates_its_files(tmp_path, monkeypatch):
    """A file is empty for a moment, and stays so if the front is killed then."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    counter = MmapedDict(str(tmp_path / "counter_1.db"))
    counter.write_value(mmap_key("answers", "answers_total", [], [], "Answers"), 3.0, 0.0)
    counter.close()
    (tmp_path / "counter_2.db").touch()
    (metric,) = AllFronts(CollectorRegistry()).collect()
    assert [(sample.name, sample.value) for sample in metric.samples] == [("answers_total", 3.0)]


def test_one_front():
    """The default on 4 cores or more: the page, steps in the metrics, and clients that wait while it is replaced."""
    body = {"prompt": PROMPTS[0], **GREEDY}
    with serving(1) as (process, url), httpx.Client(base_url=url, timeout=60) as client:
        (front,) = children(process.pid)
        text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert client.get("/").headers["content-type"].startswith("text/html")
        with client.stream("GET", "/view/events") as frames:
            assert '"num_blocks":256' in next(frames.iter_lines())
        answer = client.post("/v1/completions", json=body | {"use_beam_search": True, "n": 2}).json()
        assert len(answer["choices"]) == 2
        lines = client.get("/metrics").text.splitlines()
        assert 'vllm:iteration_tokens_total_sum{model_name="tiny-qwen3"} 0.0' not in lines
        assert "# HELP vllm:e2e_request_latency_seconds From a request's arrival to its end" in lines
        for _ in range(2):
            (front,) = children(process.pid)
            os.kill(front, signal.SIGKILL)
            wait_for(lambda front=front: children(process.pid) not in ([], [front]))
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
        assert 'finished_reason="length",model_name="tiny-qwen3"} 4.0' in client.get("/metrics").text
        (front,) = children(process.pid)
        folder = metrics_folder(front)
        process.kill()  # nobody but the front is left to remove that
        wait_for(lambda: not os.path.exists(f"/proc/{front}") or not Path(f"/proc/{front}/cmdline").read_bytes())
        assert not os.path.exists(folder)


def test_the_second_ctrl_c_waits_for_no_request(capfd):
    body = {"prompt": PROMPTS[0], **GREEDY, "max_tokens": 1500, "stream": True}
    with (
        serving(1) as (process, url),
        httpx.Client() as one,
        one.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream,
    ):
        chunks = stream.iter_lines()
        next(chunks)
        whole = ThreadPoolExecutor(1).submit(httpx.post, f"{url}/v1/completions", json=body | {"stream": False})
        running = 'vllm:num_requests_running{model_name="tiny-qwen3"} 2.0'
        wait_for(lambda: running in httpx.get(f"{url}/metrics").text)
        os.killpg(process.pid, signal.SIGINT)
        wait_for(lambda: not can_connect(url))
        os.killpg(process.pid, signal.SIGINT)
        *lines, last = filter(None, chunks)
        assert len(lines) < 1500 and last.startswith('data: {"error":{"message":"the server has ended"')
        answer = whole.result()
        assert answer.status_code == 503 and "the server has ended" in answer.text
        assert process.wait(30) == 0
    assert "Traceback" not in capfd.readouterr().out


def test_the_second_ctrl_c_waits_for_no_front_that_hangs():
    with serving(1, URGENT_SECONDS=0.3) as (process, _url):
        (front,) = children(process.pid)
        os.kill(front, signal.SIGSTOP)
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(20) == 0 and not os.path.exists(f"/proc/{front}")


def test_what_keeps_a_front_from_starting_is_the_servers_error(monkeypatch):
    def fail(plan, index, end):
        Channel(end).send(FromFront(problem="port=1: Permission denied"))

    with closing(FakeFronts(monkeypatch, 1, [0])) as fronts, pytest.raises(ValueError, match="port=1: Permission"):
        monkeypatch.setattr(engine_process, "run_front", fail)
        fronts.start()


def can_connect(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="the fronts share an address by this option")
def test_the_end_of_the_engine_ends_a_front():
    """All that a front sees of it is that the channel is closed. A fork of this process has imported what it needs."""
    own, other = socket.socketpair()
    port = free_port()
    plan = FrontPlan(MODEL, ServerSettings(port=port), ENGINE, RawArray("q", 1), None)
    process = ForkProcess(target=lambda: own.close() or run_front(plan, 0, other))
    process.start()
    Channel(own).send(FromEngine())
    other.close()
    try:
        Channel(own).receive(60)  # it is ready
        wait_for(lambda: can_connect(f"http://127.0.0.1:{port}"))
        own.close()
        process.join(20)
        assert process.exitcode == 1
    finally:
        process.kill()
