"""AsyncLLM: the answers are those of LLM, and nothing is left of a request that ended, was cancelled, or failed."""

import asyncio
import gc
import threading
import time
import weakref
from dataclasses import replace
from itertools import pairwise

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.serve import AsyncLLM, EngineDeadError, QueueFullError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
PROMPTS = ["HAMLET.\nTo be, or", "KING RICHARD.\n", [300, 301, 302], [{"role": "user", "content": "What is 2 + 3?"}]]
SETTINGS = dict(dtype="float32", device="cpu", kvcache_block_size=16, num_kvcache_blocks=256)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def llm(request, small_model):
    llm = AsyncLLM(small_model, async_scheduling=request.param, **SETTINGS)
    yield llm
    llm.exit()


@pytest.fixture
def make_async_llm(small_model):
    made = []

    def make(**settings) -> AsyncLLM:
        made.append(AsyncLLM(small_model, **SETTINGS | settings))
        return made[-1]

    yield make
    for llm in made:
        llm.exit()


@pytest.fixture(scope="module")
def offline(small_model):
    """Answers of `LLM.generate`, each computed alone."""
    with LLM(small_model, **SETTINGS) as llm:
        yield lambda prompt, params=GREEDY: llm.generate([prompt], params, use_tqdm=False)[0]


async def last_output(llm, *arguments, **options):
    async for output in llm.generate(*arguments, **options):
        last = output
    return last


async def wait_until_free(llm, seconds: float = 5.0) -> None:
    """No request is left, and all blocks are free."""
    end = time.perf_counter() + seconds
    requests = llm.engine.core.output_processor.requests
    while (requests or llm.engine.stats()["blocks"]["used"]) and time.perf_counter() < end:
        await asyncio.sleep(0.005)
    stats = llm.engine.stats()
    assert stats["blocks"]["used"] == 0 and stats["requests"] == {"waiting": 0, "running": 0}
    assert not (requests or llm._live or llm._names or llm.num_unfinished)


def test_answers_are_those_of_generate(llm, offline):
    params = [GREEDY, SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=20, stop=["e"])]

    async def main():
        calls = [last_output(llm, prompt, own) for prompt in PROMPTS for own in params]
        outputs = await asyncio.gather(*calls)
        await wait_until_free(llm)
        return outputs

    for output, (prompt, own) in zip(asyncio.run(main()), [(p, own) for p in PROMPTS for own in params]):
        expected = offline(prompt, own)
        assert output.finished and output.outputs == expected.outputs and output.prompt == expected.prompt


def test_partial_outputs_grow(llm, offline):
    params = SamplingParams(temperature=0, max_tokens=16, n=2, logprobs=1, prompt_logprobs=1)

    async def main():
        return [output async for output in llm.generate(PROMPTS[0], params)]

    outputs = asyncio.run(main())
    final, expected = outputs[-1], offline(PROMPTS[0], params)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True] and len(outputs) > 5
    for before, after in pairwise(outputs):
        for old, new in zip(before.outputs, after.outputs):
            assert new.text.startswith(old.text) and new.token_ids[: len(old.token_ids)] == old.token_ids
            assert old.logprobs is None or new.logprobs[: len(old.logprobs)] == old.logprobs
    assert final.outputs == expected.outputs and final.prompt_logprobs == expected.prompt_logprobs
    before_last = outputs[-2].outputs[1]
    assert before_last.cumulative_logprob == pytest.approx(
        sum(found[i].logprob for i, found in zip(before_last.token_ids, before_last.logprobs))
    )
    assert final.metrics.first_token_time >= final.metrics.arrival_time == pytest.approx(time.time(), abs=60)


def test_stream(llm, offline):
    async def main():
        return [event async for event in llm.stream(PROMPTS[3], GREEDY)]

    events, expected = asyncio.run(main()), offline(PROMPTS[3])
    assert "".join(event.text for event in events) == expected.text
    assert [i for event in events for i in event.token_ids] == expected.token_ids
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]


def test_a_slow_reader_gets_merged_events(llm, offline):
    params = SamplingParams(temperature=0, max_tokens=12, n=2, ignore_eos=True, logprobs=0)

    async def main():
        request = await llm.submit(PROMPTS[0], params)
        await request.result()
        return await request.next_events(), await request.next_events()

    events, rest = asyncio.run(main())
    expected = offline(PROMPTS[0], params).outputs
    assert rest == [] and [event.output_index for event in events] == [0, 1]
    for event, answer in zip(events, expected):
        assert (event.text, event.token_ids, event.logprobs) == (answer.text, answer.token_ids, answer.logprobs)
        assert event.finish_reason == "length"


def test_only_the_result(llm, offline):
    async def main():
        request = await llm.submit(PROMPTS[1], SamplingParams(temperature=0, stop=["\n"]), in_pieces=False)
        result = await request.result()
        await wait_until_free(llm)
        return result, await request.next_events()

    result, events = asyncio.run(main())
    assert events == [] and result.outputs == offline(PROMPTS[1], SamplingParams(temperature=0, stop=["\n"])).outputs


def test_cancelled_tasks_free_their_blocks(llm, offline):
    async def main():
        tasks = [asyncio.create_task(last_output(llm, prompt, ENDLESS)) for prompt in PROMPTS * 4]
        other = asyncio.create_task(last_output(llm, PROMPTS[0], GREEDY))
        for task in tasks[::2]:
            await asyncio.sleep(0.01)
            task.cancel()
        async for _ in llm.generate(PROMPTS[2], ENDLESS):
            break
        answer = await other
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await wait_until_free(llm)
        return answer

    assert asyncio.run(main()).outputs == offline(PROMPTS[0]).outputs


def test_abort_by_id(llm):
    async def main():
        outputs = []
        async for output in llm.generate(PROMPTS[0], ENDLESS, request_id="mine"):
            outputs.append(output)
            if len(outputs) == 3:
                await llm.abort("mine")
                await llm.abort("unknown")
        num_tokens = llm.engine.stats()["tokens"]["out"]
        request = await llm.submit(PROMPTS[0], ENDLESS, request_id="mine", in_pieces=False)
        while llm.engine.stats()["tokens"]["out"] == num_tokens:
            await asyncio.sleep(0.005)
        await llm.abort("mine")
        result = await request.result()
        await wait_until_free(llm)
        return outputs[-1], result

    for output in asyncio.run(main()):
        assert output.finish_reason == "abort" and 0 < len(output.token_ids) < 1500


def test_an_aborted_request_keeps_its_logprobs(llm):
    """Also if its caller finds all events merged, of which the last, that of the abort, has no token."""

    async def main():
        request = await llm.submit(PROMPTS[0], replace(ENDLESS, logprobs=0), request_id="mine")
        while not request._events:
            await asyncio.sleep(0.005)
        await llm.abort("mine")
        await request.result()
        (event,) = await request.next_events()
        llm.discard(request)
        await wait_until_free(llm)
        return event

    event = asyncio.run(main())
    assert event.finish_reason == "abort" and [*map(next, map(iter, event.logprobs))] == event.token_ids != []


def test_an_error_is_its_own(llm, offline):
    async def main():
        bad = [
            ("", GREEDY, ValueError),
            ([10**6], GREEDY, ValueError),
            (None, GREEDY, TypeError),
            ("x", 5, TypeError),
            ("x", SamplingParams(logprobs=5000), ValueError),
            ([{"role": "user"}], GREEDY, ValueError),
        ]
        good = asyncio.create_task(last_output(llm, PROMPTS[0], GREEDY))
        for prompt, params, kind in bad:
            with pytest.raises(kind):
                await last_output(llm, prompt, params)
        with pytest.raises(ValueError, match="priority"):
            await last_output(llm, "x", GREEDY, priority=3)
        one = asyncio.create_task(last_output(llm, "x", GREEDY, request_id="same"))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="same"):
            await last_output(llm, "x", GREEDY, request_id="same")
        await one
        answer = await good
        await wait_until_free(llm)
        return answer

    assert asyncio.run(main()).outputs == offline(PROMPTS[0]).outputs


def test_chat_template_arguments_and_tokenize(llm):
    async def main():
        without = {"add_generation_prompt": False}
        output = await last_output(llm, PROMPTS[3], GREEDY, chat_template_kwargs=without)
        return output, await llm.tokenize(PROMPTS[3], without), await llm.tokenize(PROMPTS[3])

    output, ids, with_prompt = asyncio.run(main())
    assert output.prompt_token_ids == ids == with_prompt[: len(ids)] and len(ids) < len(with_prompt)


def test_queue_is_bounded(make_async_llm):
    llm = make_async_llm(max_num_seqs=2, max_queued_requests=3)

    async def main():
        tasks = [asyncio.create_task(last_output(llm, PROMPTS[0], SHORT)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="at most 5"):
            await last_output(llm, "x", SamplingParams(n=3))
        with pytest.raises(ValueError, match="n=6"):
            await last_output(llm, "x", SamplingParams(n=6))
        assert (await last_output(llm, "x", SamplingParams(n=2, max_tokens=1), request_id="a")).finished
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(await asyncio.gather(*[last_output(llm, "x", GREEDY) for _ in range(5)])) == 5
        await wait_until_free(llm)

    asyncio.run(main())


def test_a_failed_step_reaches_every_caller(make_async_llm, monkeypatch, caplog):
    llm = make_async_llm()
    failures = []
    llm.on_failure.append(failures.append)

    async def main():
        tasks = [asyncio.create_task(last_output(llm, prompt, ENDLESS)) for prompt in PROMPTS]
        waits = await llm.submit(PROMPTS[0], ENDLESS, in_pieces=False)
        await asyncio.sleep(0.05)

        def broken(**_):
            raise MemoryError("no memory is left")

        monkeypatch.setattr(llm.engine.core.scheduler, "schedule", broken)
        results = await asyncio.gather(*tasks, waits.result(), return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 5
        with pytest.raises(EngineDeadError, match="no memory is left"):
            await last_output(llm, "x", GREEDY)
        assert not llm.num_unfinished

    asyncio.run(main())
    llm.exit()
    assert [type(error) for error in failures] == [MemoryError] and llm.engine.model_runner is None


def test_exit_reaches_every_caller(make_async_llm):
    async def main():
        async with make_async_llm() as llm:
            tasks = [asyncio.create_task(last_output(llm, prompt, ENDLESS)) for prompt in PROMPTS]
            await asyncio.sleep(0.05)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 4
        with pytest.raises(EngineDeadError, match="closed"):
            await last_output(llm, "x", GREEDY)
        llm.exit()  # again is fine

    asyncio.run(main())
    assert not [thread for thread in threading.enumerate() if thread.name == "nanovllm-engine" and not thread.daemon]


def test_exit_reaches_callers_whose_prompts_wait(make_async_llm, monkeypatch):
    """An engine that is closed is not a task that is cancelled."""
    llm = make_async_llm()
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_):
        begun.set()
        assert go_on.wait(10)
        raise RuntimeError("closed")

    monkeypatch.setattr(llm._lane, "tokenize", slow)

    async def main():
        tasks = [asyncio.create_task(last_output(llm, "x", GREEDY)) for _ in range(4)]
        tasks.append(asyncio.create_task(llm.tokenize("x")))
        assert await asyncio.to_thread(begun.wait, 10)
        await asyncio.get_running_loop().run_in_executor(None, llm.exit)
        go_on.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 5 and not llm.num_unfinished
        with pytest.raises(EngineDeadError):
            await llm.detokenize([1])

    asyncio.run(main())


def test_exit_ends_the_process_that_compiles_grammars(make_async_llm):
    pytest.importorskip("llguidance")
    llm = make_async_llm()
    params = SamplingParams(structured_outputs={"choice": ["yes"]})
    assert asyncio.run(last_output(llm, "x", params)).text == "yes"
    (child,) = llm.engine.input_processor.helpers["grammars"]._sandbox._processes
    assert child.poll() is None
    llm.exit()
    assert child.returncode is not None


def test_one_event_loop_after_another(make_async_llm, offline):
    """A loop that ends in the middle of a request leaves nothing behind."""
    llm = make_async_llm()

    async def leave():
        await llm.submit(PROMPTS[0], ENDLESS)
        await asyncio.sleep(0.02)

    async def other_loop():
        with pytest.raises(RuntimeError, match="another event loop"):
            await last_output(llm, "x", GREEDY)

    async def two():
        running = asyncio.create_task(last_output(llm, PROMPTS[0], ENDLESS))
        await asyncio.sleep(0.02)
        await asyncio.get_running_loop().run_in_executor(None, lambda: asyncio.run(other_loop()))
        running.cancel()

    asyncio.run(leave())
    asyncio.run(two())
    answer = asyncio.run(last_output(llm, PROMPTS[0], GREEDY))
    assert answer.outputs == offline(PROMPTS[0]).outputs
    asyncio.run(wait_until_free(llm))


def test_loop_that_never_takes_its_outputs(make_async_llm, offline):
    """It was told of outputs, and stands still: the next loop is told all the same."""
    llm, loop = make_async_llm(), asyncio.new_event_loop()

    async def begin():
        return asyncio.ensure_future(last_output(llm, PROMPTS[0], ENDLESS))

    task = loop.run_until_complete(begin())
    while llm._told is None:
        loop.run_until_complete(asyncio.sleep(0.001))
        time.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()
    answer = asyncio.run(asyncio.wait_for(last_output(llm, PROMPTS[0], GREEDY), 30))
    assert answer.outputs == offline(PROMPTS[0]).outputs


def test_engine_without_references_ends():
    """Also after requests: the thread of an idle engine keeps nothing of them."""
    llm = AsyncLLM("tiny-qwen3", **SETTINGS)
    asyncio.run(last_output(llm, PROMPTS[0], GREEDY))
    thread, alive = llm.engine.engine_thread._thread, weakref.ref(llm)
    del llm
    give_up = time.monotonic() + 10
    while (alive() is not None or thread.is_alive()) and time.monotonic() < give_up:
        gc.collect()
        time.sleep(0.01)
    assert alive() is None and not thread.is_alive()
