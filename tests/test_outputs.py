"""What requests bring besides ids: stops, streams, several answers to a prompt, log-probabilities, chat, statistics."""

import json
import shutil
from dataclasses import replace
from functools import cache

import pytest
import torch
from common import TINY, step_error

from nanovllm import LLM, BeamSearchParams, SamplingParams

pytestmark = pytest.mark.small_model

BOTH_WAYS = pytest.mark.parametrize("async_scheduling", [False, True])
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
HOT = SamplingParams(
    temperature=1.2, max_tokens=16, ignore_eos=True, seed=3, repetition_penalty=1.2, frequency_penalty=0.2
)
VERSES = ["HAMLET.\nTo be, or not to be", "KING RICHARD.\n", "What is the night?", "Enter ROMEO"]


def generate(llm: LLM, prompts, params=GREEDY) -> list[dict]:
    return llm.generate(prompts, params, use_tqdm=False)


def texts(llm: LLM, prompts, params=GREEDY) -> list[str]:
    return [answer["text"] for answer in generate(llm, prompts, params)]


def check_empty(llm: LLM):
    stats = llm.stats()
    assert llm.is_finished() and stats["blocks"]["used"] == 0 and stats["requests"] == {"waiting": 0, "running": 0}
    assert len(llm.scheduler.free_req_indices) == llm.config.max_num_seqs


@pytest.fixture(scope="module")
def llm(model_name):
    with LLM(model_name, dtype="float32", device="cpu", kvcache_block_size=16) as engine:
        yield engine
        check_empty(engine)


@pytest.fixture(scope="module")
def verses(llm):
    return texts(llm, VERSES)


# -- stops -------------------------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_stop_strings(make_llm, verses, async_scheduling):
    """Any piece of what the model says; the answer ends with the first token that completes it."""
    llm = make_llm(async_scheduling=async_scheduling)
    for verse, prompt in zip(verses, VERSES):
        for begin, length in ((3, 1), (5, 4), (11, 9)):
            stop = verse[begin : begin + length]
            end = verse.index(stop)
            for include in (False, True):
                params = replace(GREEDY, stop=["not in the text at all", stop], include_stop_str_in_output=include)
                (answer,) = generate(llm, prompt, params)
                assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)
                assert answer["text"] == verse[: end + length * include]
                decode = lambda ids: llm.tokenizer.decode(ids, skip_special_tokens=True)
                assert stop in decode(answer["token_ids"]) and stop not in decode(answer["token_ids"][:-1])
                streamed = "".join(event["text"] for event in llm.stream(prompt, params))
                assert streamed == answer["text"]
    check_empty(llm)


@BOTH_WAYS
def test_stop_token_ids(make_llm, verses, async_scheduling):
    llm = make_llm(async_scheduling=async_scheduling)
    ids = generate(llm, VERSES[0])[0]["token_ids"]
    stop = next(i for i in ids[4:] if i not in ids[:4])
    n = ids.index(stop) + 1
    (answer,) = generate(llm, VERSES[0], replace(GREEDY, stop_token_ids=[stop, 5]))
    assert (answer["finish_reason"], answer["stop_reason"], answer["token_ids"]) == ("stop", stop, ids[:n])
    assert answer["text"] == llm.tokenizer.decode(ids[: n - 1])
    (answer,) = generate(llm, VERSES[0], replace(GREEDY, stop_token_ids=[stop], include_stop_str_in_output=True))
    assert answer["text"] == llm.tokenizer.decode(ids[:n])
    (answer,) = generate(llm, VERSES[0], replace(GREEDY, max_tokens=n, stop_token_ids=[stop]))
    assert answer["finish_reason"] == "stop"  # though it would have been the last token anyway


def test_special_tokens_in_the_text(make_llm, chat):
    llm = make_llm("tiny-qwen3")
    prompt = chat("What is 17 + 25?")
    params = SamplingParams(temperature=0, stop_token_ids=[3])
    (plain,) = generate(llm, prompt, params)
    assert plain["token_ids"][-1] == 2047 and plain["stop_reason"] is None and plain["text"].strip() == "42"
    shown = texts(llm, prompt, replace(params, skip_special_tokens=False, include_stop_str_in_output=True))
    assert shown == [llm.tokenizer.decode(plain["token_ids"])] and shown[0].endswith("<|im_end|>")
    assert texts(llm, prompt, replace(params, skip_special_tokens=False)) == [plain["text"]]


# -- streams -----------------------------------------------------------------------------------------------------------


def gather(events: list[dict]) -> dict:
    """The answer that the events of one output make."""
    assert all(event["finish_reason"] is None for event in events[:-1])
    token_ids = [token_id for event in events for token_id in event["token_ids"]]
    return {"text": "".join(event["text"] for event in events), "token_ids": token_ids} | {
        key: events[-1][key] for key in ("request_id", "finish_reason", "stop_reason")
    }


@BOTH_WAYS
def test_stream_is_generate_in_pieces(make_llm, verses, async_scheduling):
    llm = make_llm(async_scheduling=async_scheduling, max_num_seqs=3)
    params = [replace(GREEDY, max_tokens=n) for n in (1, 24, 7, 12)]
    params[3] = replace(params[3], stop=verses[3][8:12])
    expected = generate(llm, VERSES, params)
    events = list(llm.stream(VERSES, params))
    order = [event["index"] for event in events]
    assert order != sorted(order), "one after the other"
    for index, answer in enumerate(expected):
        mine = [event for event in events if event["index"] == index]
        assert all(len(event["token_ids"]) == 1 for event in mine)
        made = gather(mine)
        assert made.pop("request_id") == answer["request_id"] + 4
        assert made == {key: answer[key] for key in made}
    keys = "index output_index request_id text token_ids finish_reason stop_reason logprobs"
    assert all(event.keys() == {*keys.split()} and event.output_index == 0 for event in events)
    check_empty(llm)


@pytest.mark.parametrize("when, async_scheduling", [(1, True), (5, False), (30, True), (30, False)])
def test_leaving_a_stream_aborts_what_is_left(make_llm, verses, async_scheduling, when):
    llm = make_llm(async_scheduling=async_scheduling, max_num_seqs=2)
    for i, _ in enumerate(llm.stream(VERSES, GREEDY), 1):
        if i == when:
            break
    check_empty(llm)
    assert texts(llm, VERSES) == verses
    events = llm.stream(VERSES, GREEDY)
    with pytest.raises(ZeroDivisionError):
        for _ in events:
            raise ZeroDivisionError
    del events
    check_empty(llm)
    assert texts(llm, VERSES) == verses


def test_stream_that_was_never_begun_queues_nothing(llm):
    events = llm.stream(VERSES, GREEDY)
    assert llm.is_finished()
    del events
    with pytest.raises(ValueError, match="empty"):
        llm.stream([VERSES[0], ""], GREEDY)  # at once, not with the first event
    assert list(llm.stream([], GREEDY)) == []


def test_error_in_a_stream(make_llm, monkeypatch, verses):
    llm = make_llm(async_scheduling=True)
    events = llm.stream(VERSES, GREEDY)
    next(events)
    with monkeypatch.context() as patch:
        patch.setattr(llm.model_runner, "compute", lambda batch: 1 / 0)
        with step_error(ZeroDivisionError):
            list(events)
    check_empty(llm)
    assert texts(llm, VERSES) == verses


def test_alternating_streams(llm, verses):
    """Several at a time, with a call of generate in between, and one that is closed early."""
    streams = [llm.stream(verse, GREEDY) for verse in VERSES]
    pieces = [next(stream).text for stream in streams]
    assert texts(llm, VERSES) == verses
    streams.pop().close()
    for i, _ in enumerate(streams):
        pieces[i] += "".join(event.text for event in streams[i])
    assert pieces[:3] == verses[:3]
    first, second = (llm.stream(verse, GREEDY) for verse in VERSES[:2])
    pairs = [(one.text, other.text) for one, other in zip(first, second)]
    assert ["".join(texts) for texts in zip(*pairs)] == verses[:2]


@BOTH_WAYS
def test_request_added_in_a_stream(make_llm, verses, async_scheduling):
    llm = make_llm(async_scheduling=async_scheduling)
    made, request_id = {}, None
    for event in llm.stream(VERSES[:2], GREEDY):
        if request_id is None:
            request_id = llm.add_request(VERSES[2], GREEDY)
        made.setdefault(event["index"], []).append(event)
    assert {index: gather(events)["text"] for index, events in made.items()} == dict(zip((0, 1), verses))
    events = llm.stream(VERSES[:2], GREEDY)
    next(events)
    other_id = llm.add_request(VERSES[3], GREEDY)
    del events  # that one is not the stream's
    finished = {}
    while not llm.is_finished():
        finished |= {answer.request_id: answer.text for answer in llm.step().finished}
    assert finished == {request_id: verses[2], other_id: verses[3]}
    check_empty(llm)


@BOTH_WAYS
def test_abort(make_llm, verses, async_scheduling):
    """One that waits, one that runs, one that is over; what it had is its answer, and the others do not notice."""
    llm = make_llm(async_scheduling=async_scheduling, max_num_seqs=2, kvcache_block_size=16)
    ids = [llm.add_request(verse, GREEDY) for verse in VERSES]
    answers, outputs = {}, [llm.step() for _ in range(5)]
    used = llm.stats()["blocks"]["used"]
    llm.abort(ids[0])
    llm.abort(ids[3])
    assert llm.stats()["blocks"]["used"] < used
    while not llm.is_finished():
        outputs.append(llm.step())
        answers |= {answer["request_id"]: answer for answer in outputs[-1].finished}
    assert {i: answers[i]["finish_reason"] for i in ids} == dict(zip(ids, ["abort", "length", "length", "abort"]))
    got = [token_id for output in outputs for i, token_id in output.new_tokens if i == ids[0]]
    assert answers[ids[0]]["token_ids"] == got and verses[0].startswith(answers[ids[0]]["text"]) and got
    assert answers[ids[3]]["token_ids"] == [] and answers[ids[3]]["text"] == ""
    assert answers[ids[3]].metrics.first_scheduled_time is None is answers[ids[3]].metrics.time_in_queue
    assert [answers[i]["text"] for i in ids[1:3]] == verses[1:3]
    llm.abort(ids[1])  # over
    assert llm.is_finished()
    check_empty(llm)


@BOTH_WAYS
def test_abort_in_a_stream(monkeypatch, make_llm, verses, async_scheduling):
    monkeypatch.setattr(
        "nanovllm.requests.streams.MAX_STEPS_AHEAD", 1
    )  # so that few tokens follow, even on a slow machine
    llm = make_llm(async_scheduling=async_scheduling)
    seen = {i: [] for i in range(4)}
    for i, event in enumerate(llm.stream(VERSES, GREEDY)):
        seen[event["index"]].append(event)
        if i == 10:
            llm.abort(event["request_id"])
            aborted = event["index"]
    made = {index: gather(events) for index, events in seen.items()}
    assert made[aborted]["finish_reason"] == "abort" and 1 < len(seen[aborted]) < 8
    assert verses[aborted].startswith(made[aborted]["text"])
    assert [made[i]["text"] for i in made if i != aborted] == [verses[i] for i in made if i != aborted]


# -- several answers to a prompt ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(llm):
    """The first answer is that of the same request with n=1; and the others are those of seeds of their own."""
    answers = generate(llm, VERSES, replace(HOT, n=5))
    assert [answer["outputs"][0]["token_ids"] for answer in answers] == [
        a["token_ids"] for a in generate(llm, VERSES, HOT)
    ]
    return [[output["token_ids"] for output in answer["outputs"]] for answer in answers]


def test_answer_with_several_outputs(llm, alone):
    (answer,) = generate(llm, VERSES[0], replace(HOT, n=5))
    (single,) = generate(llm, VERSES[0], HOT)
    assert answer.keys() == single.keys() and answer["token_ids"] == single["token_ids"]  # one shape for any n
    assert [output.index for output in answer["outputs"]] == [*range(5)]
    assert all(output.keys() == single.outputs[0].keys() for output in answer["outputs"])
    assert len({tuple(token_ids) for token_ids in alone[0]}) == 5
    assert [generate(llm, VERSES[0], replace(HOT, n=n))[0]["outputs"][1]["token_ids"] for n in (2, 3)] == [
        alone[0][1]
    ] * 2


@pytest.mark.parametrize(
    "settings, async_scheduling",
    [
        (dict(), True),
        (dict(kvcache_block_size=16), False),
        (dict(kvcache_block_size=16, max_num_seqs=3), True),
        (dict(kvcache_block_size=16, num_kvcache_blocks=9), False),
        (dict(kvcache_block_size=16, num_kvcache_blocks=9), True),
        (dict(kvcache_block_size=16, num_kvcache_blocks=7, enable_prefix_caching=False), True),
        (dict(kvcache_block_size=16, max_num_batched_tokens=5), False),
        (dict(kvcache_block_size=16, num_kvcache_blocks=6, max_num_seqs=4, max_num_batched_tokens=7), True),
    ],
)
def test_several_answers_are_the_same_everywhere(make_llm, alone, settings, async_scheduling):
    """Shared blocks, copied ones, too few rows or blocks, preemption, chunks."""
    llm = make_llm(async_scheduling=async_scheduling, **settings)
    answers = generate(llm, VERSES, replace(HOT, n=5))
    assert [[output["token_ids"] for output in answer["outputs"]] for answer in answers] == alone
    assert (llm.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in settings)
    check_empty(llm)


def test_prompt_is_computed_once(make_llm):
    """Of lengths that fill blocks and do not; each answer has but one block of its own at first."""
    llm = make_llm(kvcache_block_size=16)
    for length in (15, 16, 17, 40):
        before = llm.stats()["tokens"]["in"]
        llm.add_request([7 + length] * length, replace(HOT, n=8, max_tokens=3))
        assert llm.step().num_prefill_tokens == length == llm.stats()["tokens"]["in"] - before
        assert llm.stats()["requests"]["running"] == 8
        own = 8 if length % 16 else 7  # where the prompt fills its blocks, the first has not needed another yet
        assert llm.stats()["blocks"]["used"] == length // 16 + own
        while not llm.is_finished():
            assert llm.step().num_prefill_tokens == 0


@BOTH_WAYS
def test_stream_of_several_answers(make_llm, alone, async_scheduling):
    llm = make_llm(async_scheduling=async_scheduling)
    made = {}
    for event in llm.stream(VERSES, replace(HOT, n=5)):
        made.setdefault((event["index"], event["output_index"]), []).extend(event["token_ids"])
    assert made == {(i, k): alone[i][k] for i in range(4) for k in range(5)}


@BOTH_WAYS
def test_abort_of_several_answers(make_llm, async_scheduling):
    llm = make_llm(async_scheduling=async_scheduling, max_num_seqs=2)
    request_id = llm.add_request(VERSES[0], replace(HOT, n=5))
    llm.step(), llm.step()
    llm.abort(request_id)
    answers = llm.step().finished
    assert [output["finish_reason"] for output in answers[0]["outputs"]] == ["abort"] * 5 and len(answers) == 1
    check_empty(llm)


# -- log-probabilities -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    """A model's log-probabilities of a text [length, vocabulary], of transformers: row i is of what follows token i."""
    from transformers import Qwen3ForCausalLM

    load = cache(lambda folder: Qwen3ForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval())
    return lambda folder, ids: load(folder)(torch.tensor([ids])).logits[0].log_softmax(-1)


def check_logprobs(llm: LLM, dicts: list[dict], ids: list[int], expected: torch.Tensor, num: int):
    assert len(dicts) == len(ids)
    for found, token_id, row in zip(dicts, ids, expected, strict=True):
        best = row.topk(num)
        assert found.keys() == {token_id, *best.indices.tolist()}
        for i, logprob in found.items():
            assert logprob.logprob == pytest.approx(row[i].item(), abs=2e-4)
            assert logprob.rank == 1 + (row > row[i]).sum() or row[i].isclose(row, atol=1e-4, rtol=0).sum() > 1
            text = llm.tokenizer.decode([i])
            # the model is random, so a token may be part of a character, or follow part of one
            assert logprob.decoded_token == text or "\ufffd" in text + logprob.decoded_token


@pytest.mark.parametrize(
    "settings, async_scheduling",
    [
        (dict(), True),
        (dict(max_num_batched_tokens=6), False),
        (dict(num_kvcache_blocks=9), False),
        (dict(num_kvcache_blocks=9, max_num_batched_tokens=6), True),
    ],
    ids=str,
)
def test_logprobs_are_transformers(make_llm, model_name, reference, settings, async_scheduling):
    """Of the prompt and of what follows, whole, in chunks, and preempted; each request is computed twice."""
    folder = model_name if settings else TINY
    llm = make_llm(folder, async_scheduling=async_scheduling, kvcache_block_size=16, **settings)
    params = [replace(HOT, n=n, logprobs=3, prompt_logprobs=2) for n in (1, 1, 3, 1)]
    for _ in range(2):
        for answer in generate(llm, VERSES, params):
            prompt = answer["prompt_token_ids"]
            assert answer["num_cached_tokens"] == 0 and answer["prompt_logprobs"][0] is None
            for output in answer.outputs:
                expected = reference(folder, prompt + output["token_ids"])
                check_logprobs(llm, answer["prompt_logprobs"][1:], prompt[1:], expected[: len(prompt) - 1], 2)
                check_logprobs(llm, output["logprobs"], output["token_ids"], expected[len(prompt) - 1 : -1], 3)
    assert (llm.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in settings)
    events = list(llm.stream(VERSES[0], replace(GREEDY, logprobs=0)))
    assert all([*event["logprobs"][0]] == event["token_ids"] and len(event["logprobs"]) == 1 for event in events)


# -- chat and defaults -------------------------------------------------------------------------------------------------


def test_chat(make_llm, chat):
    llm = make_llm("tiny-qwen3")
    ask = lambda question: [{"role": "user", "content": question}]
    params = SamplingParams(temperature=0, max_tokens=16)
    (answer,) = llm.chat(ask("What is 17 + 25?"), params, use_tqdm=False)
    assert answer["text"].strip() == "42" and answer["prompt_token_ids"] == chat("What is 17 + 25?")
    two = llm.chat([ask("What is 17 + 25?"), ask("What is 4 + 5?")], params, use_tqdm=False)
    assert [answer["text"].strip() for answer in two] == ["42", "9"]
    (without,) = llm.chat(ask("What is 17 + 25?"), params, use_tqdm=False, add_generation_prompt=False)
    assert without["prompt_token_ids"] == answer["prompt_token_ids"][: len(without["prompt_token_ids"])]
    assert len(without["prompt_token_ids"]) < len(answer["prompt_token_ids"])
    assert llm.chat([], params) == []
    assert llm.is_finished()


@BOTH_WAYS
def test_chat_streams(make_llm, chat, async_scheduling):
    """A conversation is a prompt, alone or among others; its content may be a list of text parts."""
    llm = make_llm("tiny-qwen3", async_scheduling=async_scheduling)
    params = SamplingParams(temperature=0, max_tokens=16)
    ask = lambda question: [{"role": "user", "content": question}]
    parts = ask([{"type": "text", "text": "What is"}, {"type": "text", "text": "17 + 25?"}])
    assert "".join(event.text for event in llm.stream(ask("What is 17 + 25?"), params)).strip() == "42"
    several = [ask("What is 17 + 25?"), "HAMLET.\n", ask("What is 4 + 5?")]
    made = dict.fromkeys(range(3), "")
    for event in llm.stream(several, params):
        made[event.index] += event.text
    assert made[0].strip() == "42" and made[2].strip() == "9" and made[1] == texts(llm, "HAMLET.\n", params)[0]
    (answer,) = llm.chat(parts, params, use_tqdm=False)
    assert answer.prompt_token_ids == chat("What is\n17 + 25?")


def test_template_arguments_pass_through(make_llm):
    llm = make_llm()
    llm.tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking %} think{% endif %}"
    for thinking, text in ((True, "a b think"), (False, "a b")):
        arguments = {"enable_thinking": thinking}
        (answer,) = llm.chat(
            [{"role": "user", "content": "a b"}], GREEDY, use_tqdm=False, chat_template_kwargs=arguments
        )
        assert llm.tokenizer.decode(answer["prompt_token_ids"]) == text


def test_default_sampling_params(make_llm, tmp_path):
    assert make_llm().get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    folder = shutil.copytree(TINY, tmp_path / "model")
    llm = make_llm(str(folder))
    for raw, expected in (
        ({"do_sample": False, "temperature": 0.6}, SamplingParams(temperature=0)),
        (
            {"max_new_tokens": 5, "min_p": 0.1, "repetition_penalty": 1.2, "top_k": None},
            SamplingParams(max_tokens=5, min_p=0.1, repetition_penalty=1.2),
        ),
    ):
        (folder / "generation_config.json").write_text(json.dumps(raw))
        assert llm.get_default_sampling_params() == expected
    (folder / "generation_config.json").unlink()
    assert llm.get_default_sampling_params() == SamplingParams()


# -- what scripts look for ---------------------------------------------------------------------------------------------


def test_what_an_engine_says_of_itself(caplog, monkeypatch, tmp_path):
    """One line, in the log and as its repr; and the settings say what runs, wherever the process goes."""
    shutil.copytree(TINY, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    with (
        caplog.at_level("INFO", logger="nanovllm"),
        LLM("model", dtype="float32", device="cpu", kvcache_block_size=64) as llm,
    ):
        assert [text for text in caplog.messages if not text.startswith("Loading")] == [repr(llm)]
        monkeypatch.chdir("/")
        assert llm.get_default_sampling_params().top_k == 20  # is read from the folder
        num_blocks = llm.config.num_kvcache_blocks
        assert num_blocks == len(llm.scheduler.block_manager.blocks) > 1
        for said in (
            str(tmp_path / "model"),
            "cpu",
            "float32",
            "sdpa",
            "2,048",
            f"{num_blocks:,} blocks",
            "on",
            "1 rank",
        ):
            assert said in repr(llm)
        assert f"{num_blocks * 64:,} tokens" in repr(llm) and "\n" not in repr(llm)
        assert llm.get_tokenizer().encode("Hello") == llm.tokenizer.encode("Hello")


def test_reset_prefix_cache(make_llm):
    """Not while anything may be using it."""
    llm = make_llm(kvcache_block_size=16)
    cached = lambda: generate(llm, [7] * 48, replace(GREEDY, max_tokens=2))[0].num_cached_tokens
    assert [cached(), cached()] == [0, 32]
    assert llm.reset_prefix_cache() is True
    assert [cached(), cached()] == [0, 32]
    request_id = llm.add_request([8] * 48, GREEDY)
    llm.step()
    assert llm.reset_prefix_cache() is False
    llm.abort(request_id)
    llm.step()
    assert cached() == 32 and llm.reset_prefix_cache() and cached() == 0


@BOTH_WAYS
def test_without_text(make_llm, verses, async_scheduling):
    """The same ids, and no time for text; log-probabilities have none either."""
    llm = make_llm(async_scheduling=async_scheduling)
    params = replace(GREEDY, detokenize=False, logprobs=1)
    answers = generate(llm, VERSES, params)
    assert [llm.tokenizer.decode(answer.token_ids, skip_special_tokens=True) for answer in answers] == verses
    assert all(answer.text == "" for answer in answers)
    assert {x.decoded_token for answer in answers for found in answer.logprobs for x in found.values()} == {None}
    for answer in answers:
        assert answer.cumulative_logprob == pytest.approx(
            sum(f[i].logprob for i, f in zip(answer.token_ids, answer.logprobs))
        )
    assert all(event.text == "" for event in llm.stream(VERSES, params))


def test_text_of_tokens_that_are_parts_of_characters(llm):
    """A character of several tokens belongs to the last of them; together they are the text."""
    text = "naïve 東京 🙂"
    ids = llm.tokenizer.encode(text)
    (answer,) = generate(llm, ids, replace(GREEDY, prompt_logprobs=3, max_tokens=1))
    pieces = [found[i].decoded_token for i, found in zip(ids[1:], answer.prompt_logprobs[1:])]
    assert llm.tokenizer.decode(ids[:1]) + "".join(pieces) == text and "" in pieces


@BOTH_WAYS
def test_a_second_eos_id_is_named(make_llm, model_name, tmp_path, async_scheduling):
    """The tokenizer's own needs no reason, as in vLLM; another of generation_config.json's is one."""
    folder = shutil.copytree(model_name, tmp_path / "model")
    plain = generate(make_llm(), VERSES[0])[0].token_ids
    second = next(i for i in plain[4:] if i not in plain[:4])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2047, second]}))
    llm = make_llm(str(folder), async_scheduling=async_scheduling)
    (answer,) = generate(llm, VERSES[0], SamplingParams(temperature=0, max_tokens=24))
    assert (answer.finish_reason, answer.stop_reason, answer.token_ids[-1]) == ("stop", second, second)


# -- statistics --------------------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_stats(make_llm, async_scheduling):
    llm = make_llm(kvcache_block_size=16, num_kvcache_blocks=20, async_scheduling=async_scheduling, max_num_seqs=2)
    assert llm.stats() == {
        "requests": {"waiting": 0, "running": 0},
        "blocks": {"used": 0, "cached": 0, "free": 20},
        "prefix_hit_rate": 0.0,
        "preemptions": 0,
        "tokens": {"in": 0, "out": 0},
        "steps": {"prefill": 0, "decode": 0, "mixed": 0},
    }
    for _ in range(2):
        generate(llm, [7] * 48, SamplingParams(max_tokens=5, ignore_eos=True))
    steps = {"prefill": 2, "decode": 8, "mixed": 0}
    assert llm.stats() == {
        "requests": {"waiting": 0, "running": 0},
        "blocks": {"used": 0, "cached": 3, "free": 17},
        "preemptions": 0,
        "prefix_hit_rate": 32 / 96,
        "tokens": {"in": 96, "out": 10},
        "steps": steps,
    }
    for i in range(3):
        llm.add_request([i] * 20, GREEDY)
    assert llm.stats()["requests"] == {"waiting": 3, "running": 0}
    llm.step()
    assert llm.stats()["requests"] == {"waiting": 1, "running": 2} and llm.stats()["blocks"]["used"] == 4
    for i in range(3):
        llm.abort(2 + i)
    assert len(llm.step().finished) == 3


# -- the loop of the guides --------------------------------------------------------------------------------------------


def test_a_step_is_a_pair(make_llm):
    """(id, token ids) of what has ended, and the number of tokens: of prompts, or minus that of decoded ones."""
    llm, expected = make_llm(async_scheduling=False), {}
    for prompt in ([5] * 9, [7, 8]):
        expected[llm.add_request(prompt, SamplingParams(0.0, 3, True))] = None
    ended, counts = [], []
    while not llm.is_finished():
        outputs, num_tokens = llm.step()
        ended += outputs
        counts.append(num_tokens)
    assert counts == [11, -2, -2]
    assert {request_id for request_id, _ in ended} == expected.keys()
    assert all(len(token_ids) == 3 for _, token_ids in ended)
    last = llm.step()
    assert last[0] == [] and last[1] == 0
    with pytest.raises(IndexError):
        last[2]


def test_parameters_by_position():
    params = SamplingParams(0.6, 256, True)
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (0.6, 256, True)
    with pytest.raises(TypeError):
        SamplingParams(0.6, 256, True, 5)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_a_prompt_counts_once(make_llm, max_num_seqs):
    """Whichever of its answers are admitted later, and however many beams are computed again."""
    llm = make_llm(max_num_seqs=max_num_seqs, kvcache_block_size=16)
    llm.generate([[30] * 20], SamplingParams(max_tokens=4, ignore_eos=True, n=4), use_tqdm=False)
    assert llm.stats()["tokens"]["in"] == 20
    llm.beam_search([[31] * 20], BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))
    assert llm.stats()["tokens"]["in"] == 40 and llm.stats()["prefix_hit_rate"] == 0
