"""Several callers of one engine, and interrupts at any moment: each caller gets its answers, and nothing is lost."""

import gc
import os
import random
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from scaling import assert_grows_less

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.engine.collector import OutputCollector, StepOutput
from nanovllm.engine.engine_thread import EngineThread
from nanovllm.engine.outputs import OutputKind
from nanovllm.requests.request import CompletionRequest
from nanovllm.requests.streams import MAX_STEPS_AHEAD

pytestmark = pytest.mark.small_model

BOTH_WAYS = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
HOT = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=5)


def check_whole(llm: LLM):
    """Nothing is left of any request, and no block or row is lost, once all commands are carried out."""
    llm.engine_thread.call(lambda: None)
    scheduler, blocks, processor = llm.scheduler, llm.scheduler.block_manager, llm.core.output_processor
    assert not (scheduler.live or scheduler.waiting or scheduler.running or processor.requests or processor.collectors)
    assert len(blocks.free_block_ids) == len(blocks.blocks) and not any(block.ref_count for block in blocks.blocks)
    assert sorted(scheduler.free_req_indices) == list(range(llm.config.max_num_seqs))


@pytest.fixture(scope="module")
def requests():
    """(prompt, params) of all kinds that a caller may have, each with a seed or greedy."""
    rng = random.Random(0)
    prompts = [[rng.randrange(256, 2040) for _ in range(rng.choice([1, 5, 16, 40, 90]))] for _ in range(16)]
    prompts[5:10] = [[*prompts[4], *prompt] for prompt in prompts[5:10]]
    kinds = [GREEDY, HOT, replace(HOT, n=3), replace(GREEDY, max_tokens=40), replace(HOT, max_tokens=1)]
    return [(prompt, replace(kinds[i % 5], seed=i)) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def alone(model_name, requests):
    """The answers to each request by itself."""
    with LLM(model_name, dtype="float32", device="cpu") as llm:
        outputs = [llm.generate(*request, use_tqdm=False)[0].outputs for request in requests]
    return [[output.token_ids for output in several] for several in outputs]


@contextmanager
def threads(*functions):
    """Run the functions in threads of their own; what one of them raises is raised here."""
    errors = []

    def run(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in started:
        thread.start()
    yield
    for thread in started:
        thread.join(120)
        assert not thread.is_alive(), "hangs"
    if errors:
        raise errors[0]


# -- several threads ---------------------------------------------------------------------------------------------------


class Caller:
    """A thread's worth of random calls, each checked against the answer alone."""

    def __init__(self, llm: LLM, requests, alone, seed: int, until: float, started: list[int]):
        self.llm, self.requests, self.alone, self.started = llm, requests, alone, started
        self.rng, self.until = random.Random(seed), until
        self.num_calls = 0

    def __call__(self):
        ways = [self.generate, self.stream, self.leave_stream, self.loop, self.abort_stream, self.abort_anything]
        while time.monotonic() < self.until:
            self.rng.choice(ways)()
            self.num_calls += 1

    def some(self) -> list[int]:
        return [self.rng.randrange(len(self.requests)) for _ in range(self.rng.choice([1, 1, 2, 5]))]

    def check(self, i: int, outputs: list[list[int]], is_whole: bool = True):
        for output, expected in zip(outputs, self.alone[i], strict=True):
            assert output == (expected if is_whole else expected[: len(output)])

    def generate(self):
        some = self.some()
        answers = self.llm.generate(*self.split(some), use_tqdm=False)
        for i, answer in zip(some, answers, strict=True):
            is_whole = all(output.finish_reason != "abort" for output in answer.outputs)
            self.check(i, [output.token_ids for output in answer.outputs], is_whole)

    def split(self, some: list[int]):
        return [self.requests[i][0] for i in some], [self.requests[i][1] for i in some]

    def stream(self, leave_after: int = 10**9, abort_after: int = 10**9):
        some = self.some()
        made = [[[] for _ in self.alone[i]] for i in some]
        ends = {}
        for count, event in enumerate(self.llm.stream(*self.split(some))):
            assert (event.index, event.output_index) not in ends, "an event after the last"
            self.started.append(event.request_id)
            made[event.index][event.output_index] += event.token_ids
            if event.finish_reason:
                ends[event.index, event.output_index] = event.finish_reason
            if count == leave_after:
                break
            if count == abort_after:
                self.llm.abort(event.request_id)
        else:
            assert len(ends) == sum(map(len, made))
        for index, i in enumerate(some):
            reasons = [ends.get((index, k), "abort") for k in range(len(made[index]))]
            self.check(i, made[index], "abort" not in reasons)

    def leave_stream(self):
        self.stream(leave_after=self.rng.randrange(30))

    def abort_stream(self):
        self.stream(abort_after=self.rng.randrange(30))

    def loop(self):
        of_request = {self.llm.add_request(*self.requests[i]): i for i in self.some()}
        while of_request:
            for answer in self.llm.step().finished:
                is_whole = all(output.finish_reason != "abort" for output in answer.outputs)
                self.check(of_request.pop(answer.request_id), [x.token_ids for x in answer.outputs], is_whole)
        assert self.llm.is_finished()

    def abort_anything(self):
        if self.started:
            self.llm.abort(self.rng.choice(self.started[-50:]))
        time.sleep(self.rng.random() * 0.02)


@BOTH_WAYS
def test_stress_of_callers(make_llm, requests, alone, stress_seconds, async_scheduling):
    """Eight threads generate, stream, leave, loop and abort; `pytest --stress-seconds 60` takes a minute each."""
    llm = make_llm(async_scheduling=async_scheduling, kvcache_block_size=16, num_kvcache_blocks=12, max_num_seqs=12)
    before = threading.active_count()
    for first_seed in range(0, 80, 8):
        started, until = [], time.monotonic() + stress_seconds
        callers = [Caller(llm, requests, alone, first_seed + i, until, started) for i in range(8)]
        with threads(*callers):
            pass
        assert threading.active_count() == before
        assert all(caller.num_calls > stress_seconds / 4 for caller in callers), "a caller never made progress"
        check_whole(llm)
        if llm.scheduler.num_preemptions > 0:  # two or three times in a round, and on a busy machine never in some
            break
    assert llm.scheduler.num_preemptions > 0


def test_loop_of_a_server(make_llm, requests, alone):
    """One thread steps, others add requests, and the first gets the outputs of all."""
    llm = make_llm(kvcache_block_size=16)
    of_request, is_over = {}, threading.Event()

    def add(some):
        for i in some:
            of_request[llm.add_request(*requests[i])] = i

    def serve():
        seen = 0
        while seen < len(requests):
            for answer in llm.step().finished:
                while answer.request_id not in of_request:
                    time.sleep(0.001)  # its thread has not been told the id yet
                assert [output.token_ids for output in answer.outputs] == alone[of_request[answer.request_id]]
                seen += 1
        is_over.set()

    with threads(serve, *(lambda k=k: add(range(k, len(requests), 4)) for k in range(4))):
        assert is_over.wait(60)
    check_whole(llm)


@BOTH_WAYS
def test_error_in_another_callers_step(make_llm, monkeypatch, requests, async_scheduling):
    """Every caller that waits gets an error, with that of the step as its cause."""
    llm = make_llm(async_scheduling=async_scheduling)
    compute, all_here = llm.model_runner.run, threading.Barrier(4)
    seen = []

    def faulty(batch):
        if len(llm.core.output_processor.requests) == 4:
            raise ZeroDivisionError("in the middle")
        return compute(batch)

    def call(i):
        all_here.wait()
        try:
            llm.generate(requests[i][0], replace(GREEDY, max_tokens=1000), use_tqdm=False)
        except Exception as error:
            seen.append(error)

    with monkeypatch.context() as patch:
        patch.setattr(llm.model_runner, "run", faulty)
        with threads(*(lambda i=i: call(i) for i in range(4))):
            pass
    assert [type(error) for error in seen] == [RuntimeError] * 4
    assert all(isinstance(error.__cause__, ZeroDivisionError) for error in seen)
    check_whole(llm)
    assert llm.generate(*requests[0], use_tqdm=False)


def test_exit_while_others_wait(make_llm, requests):
    llm = make_llm()
    raised = []

    def call(i):
        with pytest.raises(RuntimeError, match="closed by exit"):
            llm.generate(requests[i][0], replace(GREEDY, max_tokens=2000), use_tqdm=False)
        raised.append(i)

    with threads(*(lambda i=i: call(i) for i in range(3))):
        while len(llm.core.output_processor.requests) < 3:
            time.sleep(0.001)
        llm.exit()
    assert len(raised) == 3


def test_abort_many_that_wait(make_llm):
    """The time per request does not depend on how many wait."""
    llm = make_llm(max_num_seqs=2)

    def seconds(num_waiting: int) -> float:
        ids = [llm.add_request([1, 2, 3], GREEDY) for _ in range(num_waiting)]
        llm.step()
        begin = llm.engine_thread.call(time.thread_time)
        for request_id in random.Random(0).sample(ids, num_waiting):
            llm.abort(request_id)
        took = llm.engine_thread.call(time.thread_time) - begin
        assert len(llm.step().finished) == num_waiting and llm.is_finished()
        check_whole(llm)
        return took

    assert_grows_less(25, seconds, 800, 8_000, rounds=2)  # a search through the queue makes it 44


def test_abort_before_any_request(make_llm):
    with pytest.raises(ValueError, match="request_id=0: there has been no request yet"):
        make_llm().abort(0)


@BOTH_WAYS
def test_abort_of_another_request_in_a_stream(make_llm, requests, async_scheduling):
    """Each sequence has one last event, however it ends, and the engine works after a caller has left."""
    llm = make_llm(async_scheduling=async_scheduling)
    ends = []
    for event in llm.stream([prompt for prompt, _ in requests[:4]], GREEDY):
        if event.finish_reason:
            ends.append((event.index, event.finish_reason))
        if event.index == 3 and len(ends) == 0:
            llm.abort(event.request_id - 1)
            llm.abort(event.request_id - 1)
    assert sorted(ends) == [(0, "length"), (1, "length"), (2, "abort"), (3, "length")]
    for event in llm.stream([prompt for prompt, _ in requests[:4]], GREEDY):
        llm.abort(event.request_id)
        break
    check_whole(llm)
    assert llm.generate(*requests[0], use_tqdm=False)[0].finish_reason == "length"


def test_others_decode_beside_beams(make_llm, requests):
    """A search takes a step for each of its tokens, and no more than every other one."""
    llm = make_llm(kvcache_block_size=16)
    llm.add_request(requests[0][0], replace(GREEDY, max_tokens=100))
    llm.step()
    llm.beam_search(requests[1][0], BeamSearchParams(3, 40, ignore_eos=True))
    assert len(llm.step().new_tokens) > 35
    while not llm.is_finished():
        llm.step()
    check_whole(llm)


def test_requests_of_a_thread_that_ended(make_llm, requests, alone):
    """The thread that steps gets their answers, though the other thread had stepped once itself."""
    llm = make_llm()

    def add_and_step():
        llm.add_request(*requests[0])
        llm.step()

    with threads(add_and_step):
        pass
    answers = []
    while not llm.is_finished():
        answers += llm.step().finished
    assert [answer.token_ids for answer in answers] == alone[0]
    check_whole(llm)


def test_fork_beside_a_step(make_llm, requests):
    """In the child, which has no thread that could make steps, every call says so, and `exit` waits for nothing."""
    llm = make_llm()
    with threads(lambda: llm.generate(requests[0][0], replace(GREEDY, max_tokens=120), use_tqdm=False)):
        while not llm.stats()["tokens"]["out"]:
            time.sleep(0.001)
        if (child := os.fork()) == 0:
            signal.alarm(20)  # hangs end by it
            for call in (lambda: llm.generate([1]), lambda: llm.add_request([1]), llm.step, llm.reset_prefix_cache):
                with pytest.raises(RuntimeError, match="is a fork of"):
                    call()
            llm.exit()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    check_whole(llm)


def test_exit_in_a_signal_handler(make_llm, monkeypatch, requests):
    """It is done when the step that runs is over."""
    llm = make_llm()
    schedule = llm.scheduler.schedule

    def interrupted(**options):
        # more than once: a signal just before a thread blocks in C is handled only when the thread wakes up
        if llm.scheduler.totals["output_tokens"] >= 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        return schedule(**options)

    previous = signal.signal(signal.SIGUSR1, lambda *_: llm.exit())
    monkeypatch.setattr(llm.scheduler, "schedule", interrupted)
    try:
        with pytest.raises(RuntimeError, match="closed by exit"):
            llm.generate(requests[0][0], replace(GREEDY, max_tokens=300), use_tqdm=False)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert llm.model_runner is None


# -- collectors --------------------------------------------------------------------------------------------------------


def test_collector_of_a_caller_that_never_steps(make_llm, requests):
    """Steps that bring it nothing leave nothing in it; what they computed is added up."""
    llm = make_llm(max_num_seqs=1)
    with threads(lambda: llm.add_request(requests[0][0], replace(GREEDY, max_tokens=3))):
        pass
    (collector,) = llm._step_callers.collectors.values()
    llm.generate(requests[1][0], replace(GREEDY, max_tokens=30), use_tqdm=False)
    collector.take_into(output := StepOutput())
    assert len(output.new_tokens) == 3 and len(output.finished) == 1 and not output.events
    assert output.num_prefill_tokens == len(requests[0][0]) and 2 <= output.num_decode_tokens <= 3
    assert not (collector.is_ready or collector.live)


def test_outputs_of_others_before_an_error(make_llm):
    """A thread that reads the outputs of two others gets what one of them has, though the other has an error."""
    llm = make_llm()
    output, failed = OutputCollector(OutputKind.TOKENS), OutputCollector(OutputKind.TOKENS)
    llm._step_callers.collectors |= {threading.Thread(): output, threading.Thread(): failed}
    output.new.new_tokens.append((0, 5))
    output.flush()
    failed.fail(RuntimeError("a step has failed"))
    assert llm.step().new_tokens == [(0, 5)]
    output.fail(RuntimeError("a step has failed"))
    with pytest.raises(RuntimeError, match="a step has failed"):
        llm.step()
    assert llm.is_finished() and not llm.step().has_outputs  # one error, though both have it


@BOTH_WAYS
def test_engine_runs_ahead_of_a_stream_by_a_bound(make_llm, requests, async_scheduling):
    llm = make_llm(async_scheduling=async_scheduling)
    stream = llm.stream(requests[0][0], replace(GREEDY, max_tokens=100))
    next(stream)
    count = lambda: llm.engine_thread.call(lambda: llm.scheduler.totals["output_tokens"])
    while count() < MAX_STEPS_AHEAD:
        time.sleep(0.001)
    time.sleep(0.1)
    assert count() <= 2 * MAX_STEPS_AHEAD  # the reader has taken some, and as many wait for it
    assert llm.generate(*requests[1], use_tqdm=False)  # others go on, and the stream with them
    assert len([*stream]) == 99
    check_whole(llm)


def test_no_outputs_for_a_caller_that_has_left(make_llm, monkeypatch, requests):
    llm = make_llm()
    made, output, compute = [], CompletionRequest.output, llm.model_runner.run
    monkeypatch.setattr(CompletionRequest, "output", lambda request: made.append(request) or output(request))

    def interrupting(batch):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        return compute(batch)

    def leave(*_):
        raise SystemExit

    previous = signal.signal(signal.SIGUSR1, leave)
    try:
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(llm.model_runner, "run", interrupting)
            llm.generate([requests[0][0]] * 3, replace(GREEDY, max_tokens=1000), use_tqdm=False)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    check_whole(llm)
    assert not made, "made an output that nobody reads"


# -- interrupts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", range(4))
def test_calls_in_a_signal_handler(make_llm, monkeypatch, requests, alone, moment):
    """While the engine's thread is in the middle of a step: an abort takes effect after it, and a nested call works."""
    llm = make_llm(async_scheduling=moment % 2 == 1)
    where = [
        (llm.scheduler, "schedule"),
        (llm.scheduler, "postprocess"),
        (llm.model_runner, "run_model"),
        (llm.core.output_processor, "process"),
    ]
    target, name = where[moment]
    plain, nested, is_handled = getattr(target, name), [], threading.Event()

    def handler(*_):
        if is_handled.is_set():
            return
        llm.abort(1)
        is_handled.set()
        nested.extend(llm.generate(*requests[3], use_tqdm=False))

    def interrupted(*args, **options):
        result = plain(*args, **options)
        if llm.scheduler.totals["output_tokens"] == 12 and not is_handled.is_set():
            # a signal that arrives just before the main thread begins to wait is handled only with the next one
            for _ in range(100):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
                if is_handled.wait(0.1):
                    break
            assert is_handled.is_set()
        return result

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        monkeypatch.setattr(target, name, interrupted)
        prompts, params = [p for p, _ in requests[:3]], [replace(GREEDY, max_tokens=20)] * 3
        answers = llm.generate(prompts, params, use_tqdm=False)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert [answer.finish_reason for answer in answers] == ["length", "abort", "length"]
    assert [answer.token_ids for answer in nested] == alone[3]
    check_whole(llm)


def test_the_engines_own_thread_can_not_wait(make_llm, requests):
    """A hook gets an error instead of a deadlock, which is one of the step; `abort` and `exit` work there."""
    llm = make_llm()
    for wait in (lambda *_: llm.generate([5], GREEDY, use_tqdm=False), lambda *_: llm.step()):
        llm.core.on_step[:] = [wait]
        with pytest.raises(RuntimeError, match="the engine's own thread"):
            llm.generate(*requests[0], use_tqdm=False)
    seen = []
    llm.core.on_step[:] = [lambda step, result: seen.append(llm.stats()["tokens"]["out"])]
    assert llm.generate(requests[0][0], GREEDY, use_tqdm=False) and llm.stats()  # when the last step is over
    assert seen[-1] - seen[0] == 11
    llm.core.on_step[:] = [lambda step, result: llm.abort(step.sampled_seqs[0].request_id)]
    assert llm.generate(*requests[0], use_tqdm=False)[0].finish_reason == "abort"
    llm.core.on_step[:] = [lambda step, result: llm.exit()]
    with pytest.raises(RuntimeError, match="closed by exit"):
        llm.generate(requests[0][0], replace(GREEDY, max_tokens=1000), use_tqdm=False)


def test_finalizer_in_the_thread_that_watches_the_ranks(make_llm, monkeypatch, requests):
    """The engine's thread waits for that one when it ends the ranks, so that one must not wait for the engine's."""
    llm, is_released = make_llm(), threading.Event()
    postprocess = llm.scheduler.postprocess
    slow = lambda *arguments: is_released.wait(20) and postprocess(*arguments)
    monkeypatch.setattr(llm.scheduler, "postprocess", slow)
    watcher = threading.Thread(target=llm.engine_thread.exit)
    llm.workers.supervisor = watcher

    def generate():
        with pytest.raises(RuntimeError, match="closed by exit"):
            llm.generate(*requests[0], use_tqdm=False)

    with threads(generate):
        while not llm.scheduler.live:
            time.sleep(0.001)
        watcher.start()
        watcher.join(5)
        assert not watcher.is_alive(), "waits for a step"
        is_released.set()


def test_nothing_is_left_of_an_engine_without_references(model_name, requests):
    """Its thread ends, also when the last reference goes in the middle of a stream."""
    before = threading.active_count()
    llm = LLM(model_name, dtype="float32", device="cpu", max_model_len=256)
    stream = llm.stream(requests[0][0], replace(GREEDY, max_tokens=200))
    next(stream)
    assert threading.active_count() == before + 1
    del llm, stream
    gc.collect()
    give_up = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < give_up:
        time.sleep(0.001)
    assert threading.active_count() == before


@pytest.mark.parametrize("has_started", [False, True])
def test_nothing_is_left_of_a_start_that_was_interrupted(model_name, monkeypatch, has_started):
    """Neither before the engine's thread has started nor just after it."""
    before, start = threading.active_count(), EngineThread.start

    def interrupted(engine_thread):
        if has_started:
            start(engine_thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineThread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LLM(model_name, dtype="float32", device="cpu", max_model_len=256)
    gc.collect()
    give_up = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < give_up:
        time.sleep(0.001)
    assert threading.active_count() == before


class Interrupt:
    """Raises KeyboardInterrupt at the k-th bytecode that is run in the engine's own files."""

    FILES = ("llm_engine", "engine_thread", "step_callers", "outputs", "request", "beam_search")

    def __init__(self, at: int, files=FILES, by_signal: bool = False):
        self.at, self.count, self.by_signal = at, 0, by_signal
        self.files = tuple(f"engine/{name}.py" for name in files)
        self.where = None

    def trace(self, frame, event, argument):
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        frame.f_trace = self.trace  # Python 3.13 ignores f_trace_opcodes in a frame that has no f_trace yet
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.count += 1
            if self.count == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
                if self.by_signal:
                    signal.raise_signal(signal.SIGINT)
                else:
                    raise KeyboardInterrupt(self.where)
        return self.trace

    def __enter__(self):
        sys._getframe().f_trace_opcodes = True  # some versions of Python 3.12 look for it when the trace begins
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)


@pytest.fixture
def sigint():
    """Ctrl-C as a shell in the foreground has it: one in the background may have it ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


WORKS = {
    "generate": lambda llm, some: llm.generate(*some, use_tqdm=False),
    "stream": lambda llm, some: list(llm.stream(*some)),
    "beams": lambda llm, some: llm.beam_search(some[0][:2], BeamSearchParams(2, 3)),
}


@pytest.mark.parametrize("by_signal", [False, True], ids=["raised", "signal"])
@pytest.mark.parametrize("name", WORKS)
def test_interrupt_at_any_bytecode(make_llm, requests, alone, sigint, interrupts, name, by_signal):
    """Anywhere in the engine's Python code: the next call is right, and nothing is lost.

    `pytest --interrupts 2000` takes so many moments.
    """
    llm = make_llm(kvcache_block_size=16, num_kvcache_blocks=16, max_num_seqs=3, async_scheduling=True)
    some = [requests[i][0] for i in (0, 2, 5)], [replace(requests[i][1], max_tokens=3) for i in (0, 2, 5)]
    expected = [alone[i] for i in (0, 2, 5)]
    with Interrupt(0) as whole:
        WORKS[name](llm, some)
    rng = random.Random(name)
    for at in rng.sample(range(1, whole.count), interrupts):
        interrupt = Interrupt(at, by_signal=by_signal)
        try:
            with interrupt:
                WORKS[name](llm, some)
        except KeyboardInterrupt:
            pass
        signal_handler = signal.getsignal(signal.SIGINT)
        assert signal_handler is signal.default_int_handler, interrupt.where
        check = llm.generate(*some, use_tqdm=False)
        got = [[output.token_ids for output in answer.outputs] for answer in check]
        assert got == [[ids[:3] for ids in several] for several in expected], interrupt.where
        check_whole(llm)


def interrupt_after(seconds: float) -> threading.Timer:
    """Ctrl-C in the main thread, wherever it and the engine's thread are by then."""
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    return timer


@BOTH_WAYS
@pytest.mark.parametrize("name", WORKS)
def test_interrupt_at_any_time(make_llm, requests, alone, sigint, interrupts, name, async_scheduling):
    """While the engine's thread is anywhere in a step."""
    llm = make_llm(kvcache_block_size=16, num_kvcache_blocks=16, max_num_seqs=3, async_scheduling=async_scheduling)
    some = [requests[i][0] for i in (0, 2, 5)], [replace(requests[i][1], max_tokens=3) for i in (0, 2, 5)]
    expected = [[ids[:3] for ids in alone[i]] for i in (0, 2, 5)]
    rng, num_interrupted = random.Random(name), 0
    begin = time.perf_counter()
    WORKS[name](llm, some)
    seconds = time.perf_counter() - begin
    for _ in range(interrupts):
        try:
            timer = interrupt_after(rng.random() * seconds)
            try:
                WORKS[name](llm, some)
            finally:
                timer.join()
        except KeyboardInterrupt:
            num_interrupted += 1
        check = llm.generate(*some, use_tqdm=False)
        assert [[output.token_ids for output in answer.outputs] for answer in check] == expected
        check_whole(llm)
    assert num_interrupted == interrupts


ENGINE_FILES = ["engine", "engine_thread", "output_processor", "outputs", "request", "scheduler", "model_runner"]


class Injection(Interrupt):
    """Raises an exception at the k-th bytecode that the engine's thread runs in these files."""

    def __init__(self, llm: LLM, at: int, files=ENGINE_FILES):
        super().__init__(at, files)
        self.llm = llm

    def __enter__(self):
        self.llm.engine_thread.call(super().__enter__)
        return self

    def __exit__(self, *_):
        self.count_in_block = self.count
        self.at = 0  # from now on it only counts
        self.llm.engine_thread.call(super().__exit__)


@BOTH_WAYS
@pytest.mark.parametrize("name", WORKS)
def test_exception_at_any_bytecode_of_the_engine(make_llm, requests, alone, interrupts, name, async_scheduling):
    """The caller gets a RuntimeError with it as the cause, or its answers; the next call is right, nothing is lost."""
    llm = make_llm(kvcache_block_size=16, num_kvcache_blocks=16, max_num_seqs=3, async_scheduling=async_scheduling)
    some = [requests[i][0] for i in (0, 2, 5)], [replace(requests[i][1], max_tokens=3) for i in (0, 2, 5)]
    expected = [[ids[:3] for ids in alone[i]] for i in (0, 2, 5)]
    with Injection(llm, 0) as whole:
        WORKS[name](llm, some)
    assert whole.count_in_block > 2000
    rng, num_failed = random.Random(name), 0
    for at in rng.sample(range(1, whole.count_in_block), interrupts):
        try:
            with Injection(llm, at) as injection:
                WORKS[name](llm, some)
        except RuntimeError as error:
            assert isinstance(error.__cause__, KeyboardInterrupt), injection.where
            num_failed += 1
        check = llm.generate(*some, use_tqdm=False)
        got = [[output.token_ids for output in answer.outputs] for answer in check]
        assert got == expected, injection.where
        check_whole(llm)
    assert num_failed > interrupts // 2


@BOTH_WAYS
def test_interrupts_of_one_caller_among_many(make_llm, requests, alone, sigint, interrupts, async_scheduling):
    """SIGINT at random moments of the main thread: other callers lose nothing."""
    llm = make_llm(kvcache_block_size=16, num_kvcache_blocks=16, max_num_seqs=4, async_scheduling=async_scheduling)
    is_over, num_calls = threading.Event(), [0] * 3

    def call(i):
        while not is_over.is_set():
            answers = llm.generate(requests[i][0], requests[i][1], use_tqdm=False)
            assert [output.token_ids for output in answers[0].outputs] == alone[i]
            num_calls[i] += 1

    rng = random.Random(0)
    with threads(*(lambda i=i: call(i) for i in range(3))):
        try:
            for _ in range(interrupts):
                try:
                    with Interrupt(rng.randrange(1, 1500), by_signal=True):
                        for _ in range(3):
                            llm.add_request(*requests[4])
                            llm.generate(*requests[5], use_tqdm=False)
                except KeyboardInterrupt:
                    pass
                while not llm.is_finished():
                    llm.step()
        finally:
            is_over.set()
    assert min(num_calls) > 0
    check_whole(llm)
