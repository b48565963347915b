"""What a user of `LLM` sees: answers, refusals, the loop by hand, and an engine that survives errors."""

import gc
import json
import shutil
import sys
import time
import weakref

import numpy as np
import pytest
from common import step_error

from nanovllm import LLM, SamplingParams

pytestmark = pytest.mark.small_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
QUESTIONS = ["What is a cat?", "Count to ten.", "The dog ran to the river and", "def add(a, b):"]
BOTH_WAYS = pytest.mark.parametrize("async_scheduling", [False, True])


def run(llm: LLM, prompts, params=GREEDY) -> list[list[int]]:
    """The token ids of the answers."""
    return [answer["token_ids"] for answer in llm.generate(prompts, params, use_tqdm=False)]


def loop(llm: LLM) -> list:
    """Every StepOutput until nothing is left."""
    outputs = []
    while not llm.is_finished():
        outputs.append(llm.step())
    return outputs


def answers_of(outputs) -> dict[int, dict]:
    return {answer["request_id"]: answer for output in outputs for answer in output.finished}


@pytest.fixture(scope="module")
def llm(model_name):
    """One engine for all tests that leave it as they found it, which its end checks."""
    with LLM(model_name, dtype="float32", device="cpu", max_model_len=256) as engine:
        yield engine
        assert engine.is_finished()
        blocks = engine.scheduler.block_manager
        assert len(blocks.free_block_ids) == len(blocks.blocks), "blocks were lost"


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [tokenizer.encode(question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def alone(llm, prompts):
    """Each prompt's greedy answer, computed by itself; no two are the same."""
    expected = [run(llm, [prompt])[0] for prompt in prompts]
    assert len({tuple(token_ids) for token_ids in expected}) == len(prompts)
    return expected


# -- prompts and answers -----------------------------------------------------------------------------------------------


def test_shapes_of_prompts(llm, prompts, alone):
    assert run(llm, QUESTIONS[1]) == [alone[1]]
    assert run(llm, QUESTIONS) == alone
    assert run(llm, QUESTIONS[::-1]) == alone[::-1]
    assert run(llm, prompts) == alone
    assert run(llm, prompts[2]) == [alone[2]]
    assert run(llm, tuple(prompts[2])) == [alone[2]]
    assert run(llm, [QUESTIONS[0], prompts[1], tuple(prompts[2]), np.array(prompts[3])]) == alone
    assert run(llm, np.array(prompts[3])) == [alone[3]]
    assert run(llm, [np.int32(token_id) for token_id in prompts[3]]) == [alone[3]]
    assert run(llm, (question for question in QUESTIONS)) == alone
    assert run(llm, {"prompt": QUESTIONS[0]}) == run(llm, {"prompt_token_ids": prompts[0]}) == alone[:1]
    assert (
        run(llm, [{"prompt": QUESTIONS[0]}, {"prompt_token_ids": np.array(prompts[1])}, QUESTIONS[2], prompts[3]])
        == alone
    )
    # keys of prompts with images, which a program may always set
    assert run(llm, {"prompt": QUESTIONS[0], "mm_processor_kwargs": {"max_pixels": 9}}) == alone[:1]
    (answer,) = llm.generate({"prompt_token_ids": prompts[0], "prompt": "its text"}, GREEDY, use_tqdm=False)
    assert (answer.token_ids, answer.prompt) == (alone[0], "its text")


def test_answer(llm, tokenizer, alone):
    (answer,) = llm.generate(QUESTIONS[0], GREEDY, use_tqdm=False)
    keys = "request_id prompt prompt_token_ids outputs finished num_cached_tokens prompt_logprobs metrics"
    assert all(answer[key] is getattr(answer, key) for key in keys.split())
    assert answer["finished"] and answer["prompt_logprobs"] is None
    assert json.loads(json.dumps(dict(answer))) == {"text": answer.text, "token_ids": answer.token_ids}
    (output,) = answer.outputs
    keys = "index text token_ids cumulative_logprob logprobs finish_reason stop_reason"
    assert output.keys() == {*keys.split()} and output["index"] == 0 and output["cumulative_logprob"] is None
    assert all(answer[key] is output[key] is getattr(answer, key) for key in output if key != "index")
    assert answer["prompt"] == answer.prompt == QUESTIONS[0]
    with pytest.raises(KeyError):
        answer["nothing"]
    for value in (answer, output, answer.metrics):
        with pytest.raises(AttributeError):
            setattr(value, next(iter(value.__dataclass_fields__)), None)
    assert answer["prompt_token_ids"] == tokenizer.encode(QUESTIONS[0]) and answer["stop_reason"] is None
    times = [*answer.metrics.values()]
    assert times == sorted(times) and time.time() - 60 < times[0] < times[-1] <= time.time() + 0.01
    assert 0 <= answer.metrics.time_in_queue < 60
    assert answer["text"] == tokenizer.decode(alone[0], skip_special_tokens=True)
    assert all(type(token_id) is int for token_id in answer["token_ids"])
    assert answer["finish_reason"] == "length" and answer["num_cached_tokens"] == 0


def test_parameters_for_one_or_for_each(llm, prompts, alone):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (5, 1, 8, 3)]
    expected = [token_ids[: p.max_tokens] for token_ids, p in zip(alone, params)]
    assert run(llm, prompts, params) == run(llm, prompts, tuple(params)) == expected
    assert run(llm, prompts[:1], [GREEDY]) == alone[:1]


def test_default_parameters_are_the_models(make_llm, prompts):
    """What its generation_config.json recommends, in every way in; as vLLM has it."""
    params, first, second = make_llm().get_default_sampling_params(), make_llm(seed=3), make_llm(seed=3)
    assert params != SamplingParams()
    expected = run(first, [*prompts, prompts[0]], params)
    assert run(second, prompts, None) == expected[:4]
    request_id = second.add_request(prompts[0])
    assert answers_of(loop(second))[request_id].token_ids == expected[4]


def test_nothing_to_do(llm):
    assert llm.generate([]) == llm.generate([], []) == llm.generate((), GREEDY) == []
    output = llm.step()
    assert (output.finished, output.new_tokens, output.num_prefill_tokens, output.num_decode_tokens) == ([], [], 0, 0)


def test_progress_bar(llm, monkeypatch, capsys):
    """It is for terminals, because a file would keep all its states. A call without prompts has nothing to show."""
    llm.generate(QUESTIONS[:2], GREEDY)
    assert not capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert llm.generate([], GREEDY) == [] and not capsys.readouterr().err
    llm.generate(QUESTIONS[:2], GREEDY)
    assert "2/2" in (shown := capsys.readouterr().err) and "tok/s" in shown
    llm.generate(QUESTIONS[:2], GREEDY, use_tqdm=False)
    assert not capsys.readouterr().err


# -- ends --------------------------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_max_model_len_ends_a_generation(make_llm, async_scheduling):
    """Whatever max_tokens says, prompt and answer together have at most max_model_len tokens."""
    llm = make_llm(max_model_len=40, async_scheduling=async_scheduling, kvcache_block_size=16)
    lengths = [1, 15, 16, 33, 39]
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    answers = llm.generate([[7] * n for n in lengths], params, use_tqdm=False)
    assert [len(answer["token_ids"]) for answer in answers] == [40 - n for n in lengths]
    assert {answer["finish_reason"] for answer in answers} == {"length"}


@BOTH_WAYS
def test_every_eos_id_ends_a_generation(make_llm, model_name, tmp_path, prompts, async_scheduling):
    """Two tokens that the answers contain become eos ids."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    whole = run(make_llm(), prompts, params)

    def cut(token_ids, eos):
        end = next((i + 1 for i, token_id in enumerate(token_ids) if token_id in eos), None)
        return token_ids[:end], "stop" if end else "length"

    candidates = sorted({token_id for token_ids in whole for token_id in token_ids[2:]})
    eos = next(  # both of them end an answer, and somewhere neither does
        {a, b}
        for a in candidates
        for b in candidates
        if len({(*cut(t, {a, b})[0][-1:], cut(t, {a, b})[1]) for t in whole if cut(t, {a, b})[1] == "stop"}) == 2
        and any(cut(t, {a, b})[1] == "length" for t in whole)
    )
    folder = shutil.copytree(model_name, tmp_path / "model")
    stopping = SamplingParams(temperature=0, max_tokens=24)
    for eos_ids in (eos, set(whole[0][:2])):  # with the second, a token that comes too late is an end as well
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(eos_ids)}))
        llm = make_llm(str(folder), async_scheduling=async_scheduling)
        expected = [cut(token_ids, eos_ids) for token_ids in whole]
        answers = llm.generate(prompts, stopping, use_tqdm=False)
        assert [(answer["token_ids"], answer["finish_reason"]) for answer in answers] == expected
        assert run(llm, prompts, params) == whole  # ignore_eos
        ids = [llm.add_request(prompt, stopping) for prompt in prompts]  # all end in different steps
        arrived = [pair for output in loop(llm) for pair in output.new_tokens]
        assert [[token for i, token in arrived if i == j] for j in ids] == [token_ids for token_ids, _ in expected]
        assert run(llm, prompts, params) == whole  # nothing is left of what ended early


def test_eos_at_the_last_token_is_a_stop(make_llm, chat):
    """The model's own: a chat ends with its eos id, which is part of the answer and not of the text."""
    llm = make_llm("tiny-qwen3")
    prompt = chat(QUESTIONS[0])
    (answer,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=500), use_tqdm=False)
    assert answer["finish_reason"] == "stop" and answer["token_ids"][-1] in {2045, 2047}
    assert "<|" not in answer["text"] and answer["text"]
    just = SamplingParams(temperature=0, max_tokens=len(answer["token_ids"]))
    assert llm.generate(prompt, just, use_tqdm=False)[0]["finish_reason"] == "stop"
    short = SamplingParams(temperature=0, max_tokens=len(answer["token_ids"]) - 1)
    assert llm.generate(prompt, short, use_tqdm=False)[0]["finish_reason"] == "length"


# -- the loop by hand --------------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_step_output_adds_up(make_llm, prompts, alone, async_scheduling):
    """Every prompt token is computed once or was cached, and every new token arrives once, in order."""
    llm = make_llm(async_scheduling=async_scheduling, kvcache_block_size=16, max_num_batched_tokens=48)
    long = [*range(100, 200)]  # three steps of prefill
    requests = [*prompts, long, long]
    ids = [llm.add_request(prompt, GREEDY) for prompt in requests]
    assert ids == list(range(len(ids))) and not llm.is_finished()
    outputs = loop(llm)
    answers = answers_of(outputs)
    arrived = {i: [token for output in outputs for j, token in output.new_tokens if i == j] for i in ids}
    assert arrived == {i: answers[i]["token_ids"] for i in ids}
    assert [arrived[i] for i in ids[:4]] == alone and arrived[4] == arrived[5]
    assert sum(len(output.finished) for output in outputs) == len(ids)
    cached = sum(answer["num_cached_tokens"] for answer in answers.values())
    # whole blocks of the first long prompt, as many as were computed when the second was admitted
    assert answers[5]["num_cached_tokens"] == cached == 48
    assert sum(output.num_prefill_tokens for output in outputs) == sum(map(len, requests)) - cached
    assert max(output.num_prefill_tokens for output in outputs) == 48
    assert sum(output.num_decode_tokens for output in outputs) == len(ids) * (GREEDY.max_tokens - 1)
    assert all(output.num_prefill_tokens + output.num_decode_tokens <= 48 for output in outputs)
    assert any(output.num_prefill_tokens and output.num_decode_tokens for output in outputs)
    assert llm.add_request(prompts[0]) == len(ids)  # numbers go on


@BOTH_WAYS
def test_requests_come_and_go(make_llm, prompts, alone, async_scheduling):
    """A request may be added between any two steps, without effect on what is in flight."""
    llm = make_llm(async_scheduling=async_scheduling, max_num_seqs=2)
    outputs = []
    for prompt in prompts:
        llm.add_request(prompt, GREEDY)
        outputs += [llm.step() for _ in range(3)]
    answers = answers_of(outputs + loop(llm))
    assert [answers[i]["token_ids"] for i in range(4)] == alone


def test_generate_beside_added_requests(llm, prompts, alone):
    """They are computed together, and each caller gets its own."""
    request_id = llm.add_request(prompts[0], GREEDY)
    llm.step()
    assert run(llm, prompts) == alone and not llm.is_finished()
    assert answers_of(loop(llm))[request_id]["token_ids"] == alone[0]
    assert run(llm, prompts) == alone


def test_context_manager_and_exit(model_name, prompts):
    with LLM(model_name, dtype="float32", device="cpu") as llm:
        llm.add_request(prompts[0])
    assert llm.is_finished()
    llm.exit()  # again does no harm
    for call in (lambda: run(llm, prompts), lambda: llm.add_request(prompts[0]), llm.step):
        with pytest.raises(RuntimeError, match="closed by exit"):
            call()
    with pytest.raises(ZeroDivisionError), LLM(model_name, dtype="float32", device="cpu") as llm:
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="closed"):
        llm.step()


def test_two_engines(make_llm, prompts, alone):
    """One after the other, then two at the same time, with different settings."""
    first = make_llm(kvcache_block_size=16, async_scheduling=True)
    assert run(first, prompts) == alone
    first.exit()
    engines = [make_llm(async_scheduling=True), make_llm(kvcache_block_size=32, max_num_seqs=3)]
    for engine, order in zip(engines, (prompts, prompts[::-1])):
        for prompt in order:
            engine.add_request(prompt, GREEDY)
    outputs = [[], []]
    while not all(engine.is_finished() for engine in engines):
        for engine, seen in zip(engines, outputs):
            seen.append(engine.step())
    for seen, expected in zip(outputs, (alone, alone[::-1])):
        assert [answers_of(seen)[i]["token_ids"] for i in range(4)] == expected


# -- errors in the middle ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def several_blocks(model_name, prompts) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of several blocks of 16 each, and their answers."""
    long = [prompt * 4 for prompt in prompts]
    with LLM(model_name, dtype="float32", device="cpu") as llm:
        return long, run(llm, long)


@BOTH_WAYS
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("failing_step", [1, 2, 5])
@pytest.mark.parametrize("after", [False, True], ids=["before the forward", "after the forward"])
def test_engine_survives_an_error(make_llm, monkeypatch, several_blocks, async_scheduling, error, failing_step, after):
    """Nobody gets half an answer, nothing stays queued, and what the failed step left in the cache is not used."""
    llm = make_llm(async_scheduling=async_scheduling, kvcache_block_size=16, num_kvcache_blocks=40)
    requests, expected = several_blocks  # blocks are published when they are scheduled
    run_step, calls = llm.model_runner.run, []

    def faulty(step):
        calls.append(step)
        if len(calls) == failing_step:
            if after:
                run_step(step)
            for (cache,) in llm.model_runner.caches.values():
                cache.normal_()  # a step that failed may have written anything
            raise error("in the middle")
        return run_step(step)

    monkeypatch.setattr(llm.model_runner, "run", faulty)
    with step_error(error, "in the middle"):
        run(llm, requests)
    assert llm.is_finished() and not llm.scheduler.waiting
    blocks = llm.scheduler.block_manager
    assert len(blocks.free_block_ids) == 40 and len(llm.scheduler.free_req_indices) == llm.config.max_num_seqs
    answers = llm.generate(requests, GREEDY, use_tqdm=False)
    assert [answer["num_cached_tokens"] for answer in answers] == [0] * len(requests)
    assert [answer["token_ids"] for answer in answers] == expected
    assert llm.generate(requests[0], GREEDY, use_tqdm=False)[0]["num_cached_tokens"] > 0  # the cache is back


def test_error_in_step_drops_what_was_added(make_llm, monkeypatch, prompts, alone):
    llm = make_llm(async_scheduling=True)
    for prompt in prompts:
        llm.add_request(prompt, GREEDY)
    llm.step()
    with monkeypatch.context() as patch:
        patch.setattr(llm.model_runner, "compute", lambda batch: 1 / 0)
        with step_error(ZeroDivisionError):
            llm.step()
    output = llm.step()
    assert llm.is_finished() and not (output.finished or output.new_tokens or output.num_prefill_tokens)
    assert run(llm, prompts) == alone


def test_interrupt_in_the_progress_bar(make_llm, monkeypatch, prompts, alone):
    """Ctrl-C while the bar is drawn."""
    llm = make_llm(async_scheduling=True)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("nanovllm.utils.progress.tqdm.update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, GREEDY)
    assert llm.is_finished() and run(llm, prompts) == alone


# -- seeds -------------------------------------------------------------------------------------------------------------


def hot(seed: int | None = None, max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(temperature=1.5, max_tokens=max_tokens, ignore_eos=True, seed=seed)


def test_engine_seed_repeats_a_run(make_llm, prompts):
    first, second = make_llm(seed=7), make_llm(seed=7)
    runs = [run(first, prompts, hot()), run(first, prompts, hot())]
    assert [run(second, prompts, hot()), run(second, prompts, hot())] == runs
    assert runs[0] != runs[1]  # another request is another draw
    same = run(first, [prompts[0]] * 3, hot())
    assert len({tuple(token_ids) for token_ids in same}) == 3
    assert run(make_llm(seed=8), prompts, hot()) != runs[0]


def test_without_a_seed_every_run_differs(make_llm, prompts):
    runs = [run(make_llm(), prompts[0], hot())[0] for _ in range(2)]
    assert runs[0] != runs[1]


def test_request_seed_fixes_its_draws(make_llm, prompts):
    """Alone, in any row of a batch, preempted or not, with async scheduling or not, whatever the engine's seed."""
    params = [hot(seed) for seed in (0, 1, 2**32, 2**64 - 1)]
    plain = make_llm(seed=1)
    expected = [run(plain, [prompt], p)[0] for prompt, p in zip(prompts, params)]
    assert run(plain, prompts, params) == expected
    assert run(plain, prompts[::-1], params[::-1]) == expected[::-1]
    assert run(plain, [prompts[0]], hot(2**32 + 1)) != run(plain, [prompts[0]], hot(1))  # all 64 bits count
    for async_scheduling in (False, True):
        tight = make_llm(async_scheduling=async_scheduling, kvcache_block_size=16, num_kvcache_blocks=7)
        assert run(tight, prompts, params) == expected
        assert tight.scheduler.num_preemptions > 0


def test_exit_frees_the_weights_at_once(make_llm):
    """Without the garbage collector, which may come much later."""
    llm = make_llm()
    weights = [weakref.ref(parameter) for parameter in llm.model_runner.model.parameters()]
    gc.collect()
    gc.disable()
    try:
        llm.exit()
        assert len(weights) == 10 and not any(weight() is not None for weight in weights)
    finally:
        gc.enable()
