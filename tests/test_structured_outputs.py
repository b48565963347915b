"""Answers of a given form: random schemas, and every other way in which an answer can be constrained or can end."""

import gc
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter, sleep
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common import TINY, generate_by_steps, runs_as_on_cuda, step_error
from simulation import SETTINGS, Simulation, random_requests
from test_callers import Interrupt

from nanovllm import LLM, SamplingParams
from nanovllm.batches.batch import Batch, BatchShape
from nanovllm.cuda.buffers import make_buffers
from nanovllm.cuda.graphs import decode_shape
from nanovllm.engine import awaiting
from nanovllm.engine.features import FEATURES, Feature, StepFeature
from nanovllm.engine.outputs import OutputKind
from nanovllm.engine.sequence import Sequence
from nanovllm.features.logit_edits import mask_of
from nanovllm.structured_outputs import constraint as constraints
from nanovllm.structured_outputs import grammar as compiled_grammar
from nanovllm.structured_outputs import grammars, json_schema, masks, sandbox
from nanovllm.structured_outputs import structured_feature as feature
from nanovllm.structured_outputs.json_schema import for_llguidance

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
pytestmark = pytest.mark.small_model

FORMATS = jsonschema.FormatChecker(["uuid", "ipv4", "date"])  # that of "time" refuses long fractions, which are valid
BOTH_WAYS = pytest.mark.parametrize("async_scheduling", [False, True])
EOS, ALSO_EOS = 2047, 2045  # of the bundled model
SMALL_CACHE = dict(kvcache_block_size=16, num_kvcache_blocks=40, max_num_seqs=12)


@pytest.fixture(scope="module")
def llm(small_model):
    with LLM(small_model, dtype="float32", device="cpu") as engine:
        yield engine


def params(kind: str, content, **others) -> SamplingParams:
    return SamplingParams(structured_outputs={kind: content}, **{"max_tokens": 120, "seed": 1} | others)


def answer(llm: LLM, own: SamplingParams, prompt: str = "Hello"):
    (output,) = llm.generate([prompt], own, use_tqdm=False)
    return output


@pytest.fixture(autouse=True)
def masks_are_made_in_steps(monkeypatch):
    """However busy the machine is, unless a test is about this."""
    monkeypatch.setattr(feature, "MAX_SECONDS", 600)
    monkeypatch.setattr(compiled_grammar, "SLOW_SECONDS", 600)


# -- random schemas --------------------------------------------------------------------------------------------------


def random_leaf(rng: random.Random) -> dict:
    low = rng.randint(-1000, 1000)
    return rng.choice(
        [
            {"type": "string", "minLength": (n := rng.randint(0, 3)), "maxLength": n + rng.randint(0, 6)},
            {"type": "string", "pattern": rng.choice(["^[a-f]{2,4}$", "^(yes|no)-[0-9]+$", "^[A-Z][a-z]*!?$"])},
            {"type": "string", "format": rng.choice(["date", "time", "uuid", "ipv4"])},
            {"enum": rng.sample([0, -1.5, "a", "bc", 'd "e"', "\u00e9\u4e16", True, None, [1], {"k": "v"}], 3)},
            {"const": rng.choice(["fixed", 42, None])},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
            {"type": "integer", "multipleOf": 7} if rng.random() < 0.2 else {"type": "integer", "maximum": 9},
            {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            {"type": ["boolean", "null"]},
        ]
    )


def random_schema(rng: random.Random, depth: int, is_root: bool = True) -> dict:
    kind = rng.choice(["object", "object", "array", "anyOf", "leaf"]) if depth else "leaf"
    inner = lambda: random_schema(rng, depth - 1, is_root=False)
    if kind == "object":
        names = rng.sample(["a", "name", "x y", "\u00fc", 'quote"d', "nested", "list"], rng.randint(0, 3))
        required = [name for name in names if rng.random() < 0.7]
        more = rng.choice([False, False, False, {"type": "boolean"}])
        properties = {name: inner() for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}
    if kind == "array" and rng.random() < 0.3:
        return {"type": "array", "prefixItems": [inner(), random_leaf(rng)], "items": False, "minItems": 2}
    if kind == "array":
        least = rng.randint(0, 2)
        return {"type": "array", "items": inner(), "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if kind == "anyOf" and is_root:
        return {"$defs": {"tree": inner()}, "anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}
    return {"anyOf": [inner(), random_leaf(rng)]} if kind == "anyOf" else random_leaf(rng)


def random_request(rng: random.Random, seed: int) -> tuple[SamplingParams, Callable[[str], None]]:
    """Parameters, and a check of the text of an answer that ends by itself."""
    others = dict(seed=seed, temperature=rng.choice([0.0, 0.7, 1.0, 2.0]), max_tokens=36, top_k=rng.choice([0, 0, 5]))
    kind = rng.random()
    if kind < 0.8:
        schema = random_schema(rng, depth=rng.choice([1, 2, 2, 3]))

        def check(text: str) -> None:
            jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))

        return params("json", schema if seed % 2 else json.dumps(schema), **others), check
    if kind < 0.9:
        pattern = rng.choice([r"[a-f]{3}-\d{1,3}", r"(foo|bar)+baz?", r"[^\n]{2,5}\n", r"\S+@\S+\.(com|de)"])
        return params("regex", pattern, **others), lambda text: re.fullmatch(pattern, text) or pytest.fail(text)
    choices = rng.sample(["yes", "no", 'a "quoted" one', "new\nline", "\u00e9t\u00e9", "\U0001f600", "\x7f", "a/b"], 3)
    return params("choice", choices, **others), lambda text: text in choices or pytest.fail(text)


def test_random_schemas(make_llm, monkeypatch, pytestconfig, record_property):
    """Every answer that ends by itself is valid; and it is the same in any batch, preempted, and asynchronously.

    `pytest --schemas 2000` takes so many.
    """
    rng = random.Random(pytestconfig.getoption("--schemas"))
    asks = [random_request(rng, seed) for seed in range(pytestconfig.getoption("--schemas"))]
    free = SamplingParams(max_tokens=30, seed=5, ignore_eos=True)
    prompts = ["Hello"[: 1 + i % 5] for i in range(len(asks))]
    reference = make_llm(max_num_seqs=64)
    expected = reference.generate(prompts, [own for own, _ in asks], use_tqdm=False)
    expected_free = answer(reference, free).token_ids
    reference.exit()
    reasons = [output.finish_reason for output in expected]
    for (own, check), output in zip(asks, expected):
        assert output.finish_reason in ("stop", "length"), (output.stop_reason, own)
        if output.finish_reason == "stop":
            assert output.token_ids[-1] in (EOS, ALSO_EOS)
            try:
                check(output.text)
            except Exception as error:
                raise AssertionError(f"{output.text!r} is no answer to {own.structured_outputs}") from error
    record_property("finish reasons", {reason: reasons.count(reason) for reason in {*reasons}})
    assert reasons.count("stop") > 0.7 * len(asks)

    requests = [(prompt, own) for prompt, (own, _) in zip(prompts, asks)]
    requests[::12] = [("Hello", free)] * len(requests[::12])
    llm = make_llm(async_scheduling=True, **SMALL_CACHE)
    schedule, running = llm.scheduler.schedule, llm.scheduler.running

    def preempting_schedule(**options):
        if running and rng.random() < 0.1:
            llm.scheduler.preempt(rng.choice([*running.values()]))
        return schedule(**options)

    monkeypatch.setattr(llm.scheduler, "schedule", preempting_schedule)
    outputs = generate_by_steps(llm, requests)
    for (_, own), output, other in zip(requests, outputs, expected):
        assert output.token_ids == (expected_free if own is free else other.token_ids), own
    assert llm.stats()["preemptions"] > len(asks) // 20
    assert llm.stats()["blocks"]["used"] == 0


# -- how constrained rows are scheduled ------------------------------------------------------------------------------


def constrained(step) -> list[Sequence]:
    """Those that get a token from a step, and wait for it."""
    return [seq for seq in step.sampled_seqs if seq.waits_for_token]


def scheduled_rows(llm: LLM, monkeypatch) -> list[list[int]]:
    """The ids of the requests that each step samples; it grows with the steps."""
    rows, schedule = [], llm.scheduler.schedule

    def recorded(**options):
        step = schedule(**options)
        rows.append([seq.request_id for seq in step.sampled_seqs] if step else [])
        assert not step or all(len(seq.token_ids) == seq.num_tokens - 1 for seq in constrained(step))
        return step

    monkeypatch.setattr(llm.scheduler, "schedule", recorded)
    return rows


def test_only_constrained_rows_wait(make_llm, monkeypatch):
    llm = make_llm(async_scheduling=True)
    rows = scheduled_rows(llm, monkeypatch)
    free = SamplingParams(max_tokens=12, ignore_eos=True)
    outputs = generate_by_steps(llm, [("Hello", free), ("Hello", params("regex", "a{6}")), ("Hello", free)])
    assert [output.text == "aaaaaa" for output in outputs] == [False, True, False]
    num_tokens = len(outputs[1].token_ids)
    assert 3 <= num_tokens <= 7
    assert all({0, 2} <= {*ids} for ids in rows[:12]), rows
    assert [1 in ids for ids in rows[: 2 * num_tokens]] == [True, False] * num_tokens, "in every other step"


def test_nothing_waits_without_async_scheduling(make_llm, monkeypatch):
    llm = make_llm(async_scheduling=False)
    rows = scheduled_rows(llm, monkeypatch)
    output = generate_by_steps(llm, [("Hello", params("regex", "a{6}"))])[0]
    assert rows == [[0]] * len(output.token_ids)


def test_a_prompt_does_not_hold_up_rows_that_wait(make_llm, monkeypatch):
    """While a constrained row waits for its token, chunks have the budget of a step with decodes."""
    llm = make_llm(TINY, async_scheduling=True, max_num_mixed_tokens=32, max_num_batched_tokens=512)
    llm.add_request("Hello", params("regex", "a{9}b{9}"))
    for _ in range(3):
        llm.step()
    llm.add_request([5] * 300, SamplingParams(max_tokens=2))
    steps, schedule = [], llm.scheduler.schedule
    monkeypatch.setattr(llm.scheduler, "schedule", lambda **options: steps.append(schedule(**options)) or steps[-1])
    for _ in range(5):
        llm.step()
    assert {sum(row.end - row.start for row in step.chunks) for step in steps if step} <= {*range(24, 33)}
    assert {step.num_decodes for step in steps if step} == {0, 1}


class ConstrainedSimulation(Simulation):
    """Every other request is constrained."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        for group in self.groups[1::2]:
            for seq in group:
                seq.waits_for_token = seq.is_watched = True

    def compute(self, step, token_id):
        waited_for = constrained(step)
        assert all(len(seq.token_ids) == seq.num_tokens - 1 for seq in waited_for), "its last token is unknown"
        self.seen["constrained"] += len(waited_for)
        waiting = [seq for seq in self.scheduler.running.values() if seq.num_tokens == seq.token_limit]
        self.seen["waiting"] += len({*waiting} - {*step.sampled_seqs})
        return super().compute(step, token_id)


@pytest.mark.parametrize("name, asynchronous", [("few at a time", False), *((name, True) for name in SETTINGS)])
def test_random_schedules(name, asynchronous):
    """Answers, blocks and queues are right, whatever settings, preemptions and aborts do to sequences that wait."""
    simulation = ConstrainedSimulation(random_requests(7, 24, max_n=3), asynchronous, **SETTINGS[name]).run()
    assert simulation.seen["constrained"] > 100 and (simulation.seen["waiting"] > 0) == asynchronous


@BOTH_WAYS
def test_several_answers_and_preemptions(make_llm, llm, async_scheduling):
    """n answers share a prompt but no state; all are computed again in between, and are the same."""
    schema = {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 2, "maxItems": 3}
    own = params("json", schema, n=4, temperature=1.5)
    expected = [output.token_ids for output in answer(llm, own).outputs]
    assert len({*map(tuple, expected)}) > 1
    llm = make_llm(async_scheduling=async_scheduling, **SMALL_CACHE)
    llm.add_request("Hello", own)
    outputs, num_steps = [], 0
    while not llm.is_finished():
        outputs += llm.step().finished
        num_steps += 1
        if num_steps in (1, 4, 5, 11):
            llm.engine_thread.call(lambda: [*map(llm.scheduler.preempt, [*llm.scheduler.running.values()])])
    assert [output.token_ids for output in outputs[0].outputs] == expected
    events = list(llm.stream("Hello", own))
    texts = ["".join(event.text for event in events if event.output_index == i) for i in range(4)]
    assert texts == [output.text for output in outputs[0].outputs]


def test_mask_follows_the_tokens(llm):
    """Several at a time, as after a loss of a replica; and a constraint lives no longer than its sequence."""
    (request,) = llm.input_processor.requests("Hello", params("regex", "[ab]{3}c*"), OutputKind.FINAL_ONLY)
    (seq,) = request.group
    constraint = seq.token_mask
    allowed = lambda: [i for i in range(2048) if constraint.next_mask[i // 32] >> (i % 32) & 1]
    single = lambda text: llm.tokenizer.encode(text)[0]
    first = allowed()
    assert {single("a"), single("b")} <= {*first} and single("c") not in first
    seq.token_ids.append(single("a"))
    constraint.update(seq.completion_token_ids)
    after_one = allowed()
    assert single("a") in after_one and single("c") not in after_one
    seq.token_ids += [single("b"), single("b")]
    constraint.update(seq.completion_token_ids)
    assert {single("c"), EOS, ALSO_EOS} <= {*allowed()} and single("a") not in allowed()
    constraint, own = weakref.ref(constraint), weakref.ref(seq)
    gc.disable()
    try:
        request.group.clear()
        del seq, request
        assert constraint() is None and own() is None, "it would live until the garbage collector runs"
    finally:
        gc.enable()


class RerunDecodes:
    """In place of DecodeGraphs: runs a decode step from the part of the host's buffer that a graph fetches."""

    def __init__(self, runner, config):
        self.runner, self.width, self.num_replays = runner, config.max_blocks_per_seq, 0
        runs_as_on_cuda(runner)
        runner.buffers = make_buffers(config, torch.device("cpu"))
        runner.buffers.host.current.batch.fill_(-7)
        self.host_buffers = runner.buffers.host

    def has(self, shape: BatchShape) -> bool:
        return not shape.has_chunks

    def shape_for(self, step: BatchShape) -> BatchShape:
        return decode_shape(step.num_decode_rows, self.width)

    @torch.inference_mode()
    def replay(self, shape: BatchShape):
        batch = Batch.from_buffer(decode_shape(shape.num_decode_rows, self.width), self.runner.buffers.device)
        num_words = batch.input_ids.storage_offset()
        batch.buffer[:num_words] = self.host_buffers.current.batch[:num_words]
        output = self.runner.forward(batch)
        results = self.host_buffers.advance().results_like(output.results).copy_(output.results)
        self.num_replays += 1
        return results, output

    def reset(self) -> None:
        self.host_buffers.reset()


def test_masks_of_graphs(make_llm):
    """What a decode graph does not fetch, the masks, is on the device before it runs."""
    asks = [params("regex", "[a-d]{20}", seed=i) for i in range(3)] + [SamplingParams(max_tokens=15, seed=3)]
    asks.append(SamplingParams(max_tokens=15, seed=3, allowed_token_ids=[*range(500, 600)]))
    requests = [("Hello", own) for own in asks]
    expected = [output.token_ids for output in generate_by_steps(make_llm(), requests)]
    llm = make_llm(async_scheduling=True, max_num_seqs=4)
    graphs = llm.model_runner.graphs = RerunDecodes(llm.model_runner, llm.config)
    assert [output.token_ids for output in generate_by_steps(llm, requests)] == expected
    assert graphs.num_replays > 10


@pytest.mark.gpu
def test_on_a_gpu(make_llm):
    """With graphs and without, asynchronous or not, alone and beside free rows."""
    asks = [params("regex", "[a-d ]{30}", seed=i, temperature=i % 2, top_k=i % 3) for i in range(9)]
    asks += [params("json", {"type": "array", "items": {"type": "integer"}, "maxItems": 9}, n=3)]
    asks += [SamplingParams(seed=i, max_tokens=24, ignore_eos=True, logprobs=1) for i in range(9)]
    asks += [SamplingParams(seed=3, allowed_token_ids=[*range(500, 600)])]
    requests = [("Hello"[: 1 + i % 5], own) for i, own in enumerate(asks)]
    found = []
    for settings in ({}, {"async_scheduling": False}, {"enforce_eager": True}):
        outputs = generate_by_steps(make_llm(device="cuda", gpu_memory_utilization=0.1, **settings), requests)
        found.append([[x.token_ids for x in output.outputs] for output in outputs])
        assert all(re.fullmatch("[a-d ]{30}", output.text) for output in outputs[:9])
    assert found == [found[0]] * 3


# -- masks that take long --------------------------------------------------------------------------------------------


class Gate:
    """In place of the threads that make masks: they are made when the test says so."""

    def __init__(self, monkeypatch):
        self.turns = []
        monkeypatch.setattr(masks.MaskThreads, "submit", lambda threads, turn, is_slow: self.turns.append(turn))
        monkeypatch.setattr(feature, "MAX_SECONDS", 0)
        monkeypatch.setattr(awaiting, "MAX_WAIT_SECONDS", 0)

    def make(self, number: int | None = None) -> None:
        turns = [self.turns.pop(0) for _ in range(len(self.turns) if number is None else number)]
        for turn in turns:
            turn()


def requests_of(llm: LLM, *asks: SamplingParams) -> list[int]:
    return [llm.add_request("Hello", own) for own in asks]


@BOTH_WAYS
def test_masks_that_are_not_made_hold_up_no_other_sequence(make_llm, monkeypatch, async_scheduling):
    """The others get a token in every step; and no token differs, whenever the masks are made."""
    free = SamplingParams(max_tokens=25, ignore_eos=True, seed=4)
    asks = [params("regex", "[a-d]{9}", n=3), free, params("json_object", True, max_tokens=20), free]
    expected = [[x.token_ids for x in o.outputs] for o in generate_by_steps(make_llm(), [("Hello", x) for x in asks])]
    gate = Gate(monkeypatch)
    llm = make_llm(async_scheduling=async_scheduling, **SMALL_CACHE)
    ids, outputs, num_steps = requests_of(llm, *asks), {}, 0
    while len(outputs) < 2:
        outputs |= {output.request_id: output for output in llm.step().finished}
        num_steps += 1
    assert outputs.keys() == {ids[1], ids[3]} and num_steps <= 25 + 2
    assert len(gate.turns) == 2, "one of each request"
    rng = random.Random(1)
    while not llm.is_finished():
        gate.make(rng.randint(0, len(gate.turns)))
        if rng.random() < 0.4 and llm.scheduler.running:
            llm.engine_thread.call(lambda: llm.scheduler.preempt(rng.choice([*llm.scheduler.running.values()])))
        outputs |= {output.request_id: output for output in llm.step().finished}
    assert [[x.token_ids for x in outputs[i].outputs] for i in ids] == expected
    assert llm.stats()["blocks"]["used"] == 0 and not llm.scheduler.held
    assert llm.stats()["preemptions"] > 3


def test_drafts_of_sequences_whose_masks_are_not_made(make_llm, monkeypatch):
    asks = [params("regex", "(abc){2,9}d", n=2), params("choice", ["abcabcabcabc"]), params("json_object", True)]
    expected = [[x.token_ids for x in o.outputs] for o in generate_by_steps(make_llm(), [("abc", x) for x in asks])]
    gate = Gate(monkeypatch)
    llm = make_llm(speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})
    ids, outputs, rng = [llm.add_request("abc", own) for own in asks], {}, random.Random(2)
    while not llm.is_finished():
        outputs |= {output.request_id: output for output in llm.step().finished}
        gate.make(rng.randint(0, len(gate.turns)))
    assert [[x.token_ids for x in outputs[i].outputs] for i in ids] == expected


def test_the_engine_waits_for_masks(make_llm, monkeypatch):
    """When nothing else is left, it neither stops nor turns idly: it waits, but looks for commands."""
    gate, waits, wait = Gate(monkeypatch), [], awaiting.wait

    def recorded(futures, seconds, until):
        waits.append((len(futures), seconds))
        return wait(futures, seconds, until)

    monkeypatch.setattr(awaiting, "wait", recorded)
    monkeypatch.setattr(awaiting, "MAX_WAIT_SECONDS", 0.001)
    llm = make_llm(async_scheduling=True)
    rows = scheduled_rows(llm, monkeypatch)
    with ThreadPoolExecutor() as pool:
        output = pool.submit(llm.generate, ["Hello"], params("regex", "[ab]{4}"), use_tqdm=False)
        wait_for(lambda: len(waits) > 5)
        assert {*waits[1:]} == {(1, 0.001)} and [*filter(None, rows)] == [[0]]
        others = pool.submit(llm.generate, ["Hello"], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert len(others.result(20)[0].token_ids) == 3
        while not output.done():
            gate.make()
            sleep(0.001)
        assert re.fullmatch("[ab]{4}", output.result()[0].text)


@BOTH_WAYS
def test_held_sequences_keep_their_blocks(make_llm, monkeypatch, async_scheduling):
    """Others wait for a place meanwhile. Nothing is preempted for them and computed again."""
    monkeypatch.setattr(feature, "MAX_SECONDS", -1)  # other threads make all masks
    llm = make_llm(async_scheduling=async_scheduling, max_num_seqs=1, enable_prefix_caching=False)
    num_computed = []
    llm.core.on_step.append(lambda step, result: num_computed.extend(step.chunk_lens))
    llm.generate([[50 + i] * 40 for i in range(3)], params("regex", "[ab]{9}"), use_tqdm=False)
    assert num_computed == [40] * 3 and llm.stats()["preemptions"] == 0


@BOTH_WAYS
def test_an_error_of_a_mask_ends_its_request_alone(make_llm, monkeypatch, async_scheduling):
    monkeypatch.setattr(feature, "MAX_SECONDS", -1)
    llm, update = make_llm(async_scheduling=async_scheduling), constraints.Constraint.update

    def fail(constraint, *arguments):
        if len(constraint._seq.completion_token_ids) == 2:
            raise MemoryError("no room")
        return update(constraint, *arguments)

    monkeypatch.setattr(constraints.Constraint, "update", fail)
    other = SamplingParams(max_tokens=20, ignore_eos=True)
    outputs = llm.generate(["Hello"] * 2, [params("regex", "[ab]{9}"), other], use_tqdm=False)
    assert outputs[0].finish_reason == "error" and outputs[0].outputs[0].stop_reason == "MemoryError: no room"
    assert len(outputs[1].token_ids) == 20 and not llm.scheduler.held and llm.stats()["blocks"]["used"] == 0


@BOTH_WAYS
def test_held_sequences_are_aborted_and_dropped(make_llm, monkeypatch, async_scheduling):
    """In the middle of the others; what they wait for is not made."""
    gate = Gate(monkeypatch)
    llm = make_llm(async_scheduling=async_scheduling, max_num_seqs=4)
    first, second = requests_of(llm, params("regex", "[ab]{5}", n=3), params("regex", "c{5}"))
    for _ in range(4):
        llm.step()
    awaited = [seq.awaited for seq in llm.scheduler.held]
    llm.engine_thread.call(lambda: llm.scheduler.preempt(next(iter(llm.scheduler.held))))
    llm.abort(first)
    outputs = [*llm.step().finished]
    while not llm.is_finished():
        gate.make()
        outputs += llm.step().finished
    assert {output.request_id: [*{x.finish_reason for x in output.outputs}] for output in outputs} == {
        first: ["abort"],
        second: ["stop"],
    }
    assert [future.cancelled() for future in awaited] == [True] * 3 + [False]
    assert llm.stats()["blocks"]["used"] == 0
    requests_of(llm, params("regex", "[ab]{5}", n=2))
    for _ in range(4):
        llm.step()
    awaited = [seq.awaited for seq in llm.scheduler.held]
    assert len(awaited) == 2
    llm.exit()
    assert all(future.cancelled() for future in awaited)


def test_errors_in_threads(make_llm, monkeypatch):
    """Of a grammar: the answer ends, with the tokens it has. Of the program: the step fails, and the engine goes on."""
    gate = Gate(monkeypatch)
    llm = make_llm()
    bad = params("regex", "[ab]b[cd]", allowed_token_ids=[llm.tokenizer.encode(text)[0] for text in "ab"])
    (stream,) = [llm.stream("Hello", bad)]
    with ThreadPoolExecutor() as pool:
        events = pool.submit(list, stream)
        while not events.done():
            gate.make()
            sleep(0.001)
    last = events.result()[-1]
    assert (last.finish_reason, last.stop_reason) == ("error", "structured_outputs: the parameters allow no token")
    monkeypatch.setattr(constraints.Constraint, "_grammar_mask", lambda self: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        llm.add_request("Hello", params("regex", "a"))
    monkeypatch.undo()
    requests_of(llm, params("regex", "a{9}"))
    monkeypatch.setattr(constraints.Constraint, "_grammar_mask", lambda self: 1 // 0)
    with step_error(ZeroDivisionError):
        while True:
            llm.step()
    monkeypatch.undo()
    assert answer(llm, params("regex", "a{9}")).text == "a" * 9


@BOTH_WAYS
def test_masks_that_take_random_times(make_llm, monkeypatch, async_scheduling):
    """With the real threads, steps that seldom wait, preemptions and aborts: no token differs."""
    rng = random.Random(5)
    asks = [random_request(rng, seed)[0] for seed in range(6)]
    asks += [params("regex", "[a-d]{20}", n=3, seed=7), SamplingParams(max_tokens=24, ignore_eos=True, seed=3)]
    expected = [[x.token_ids for x in o.outputs] for o in generate_by_steps(make_llm(), [("Hi", x) for x in asks])]
    make = constraints.Constraint._grammar_mask

    def later(self):
        sleep(rng.choice([0, 0, 0.001, 0.004]))
        return make(self)

    monkeypatch.setattr(constraints.Constraint, "_grammar_mask", later)
    monkeypatch.setattr(feature, "MAX_SECONDS", 0.001)
    llm = make_llm(async_scheduling=async_scheduling, **SMALL_CACHE)
    ids, aborted, outputs = [llm.add_request("Hi", own) for own in asks], [], {}
    for _ in range(4):
        aborted.append(llm.add_request("Hi", params("regex", "[a-d]{30}", n=2)))
    while not llm.is_finished():
        outputs |= {output.request_id: output for output in llm.step().finished}
        if rng.random() < 0.05 and llm.scheduler.running:
            llm.engine_thread.call(lambda: llm.scheduler.preempt(rng.choice([*llm.scheduler.running.values()])))
        if aborted and rng.random() < 0.1:
            llm.abort(aborted.pop())
    assert [[x.token_ids for x in outputs[i].outputs] for i in ids] == expected
    assert llm.stats()["blocks"]["used"] == 0 and not llm.scheduler.held


def test_a_request_that_is_moved_waits_for_its_mask(llm, monkeypatch):
    """A replica gives it the tokens that another one has generated."""
    from nanovllm.serve.replicas.messages import NewRequest
    from nanovllm.serve.replicas.replica import Replica

    own = params("regex", "[ab]{4}c", n=2)
    token_ids = [llm.tokenizer.encode(text)[0] for text in "aba"]
    masks_of = lambda group: [seq.token_mask.next_mask.tolist() for seq in group]
    expected = new_request(llm, own).group
    for seq, generated in zip(expected, (token_ids, token_ids[:1])):
        seq.token_mask.update(generated)
    monkeypatch.setattr(feature, "MAX_SECONDS", 0)
    moved = NewRequest(10**6, 0, [5], own, 0, OutputKind.FINAL_ONLY, [1, 2], [token_ids, token_ids[:1]])
    group = Replica._make_request(SimpleNamespace(engine=llm, orders_by_id=False), moved).group
    assert masks_of(group) == masks_of(expected) and not any(seq.awaited for seq in group)


class HeldSimulation(ConstrainedSimulation):
    """After most tokens, every other request awaits something, for random times."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        for group in self.groups[1::2]:
            for seq in group:
                seq.feature_state["later"] = None

    def step(self, token_id=7, prompts_first=False):
        awaited = [seq.awaited for seq in self.scheduler.held]
        for future in awaited:
            if self.random.random() < 0.3 and future.set_running_or_notify_cancel():
                future.set_result(None)
        self.seen["held"] += len(awaited)
        self.seen["held without blocks"] += sum(not seq.block_table for seq in self.scheduler.held)
        if awaited:
            awaiting.resume_done(self.scheduler)
            self.check_move()
        return super().step(token_id, prompts_first)

    def postprocess(self, step, result):
        assert not any(seq.awaited and not seq.awaited.done() for seq in step.sampled_seqs if not seq.is_finished)
        return super().postprocess(step, result)


class Later(StepFeature):
    random = random.Random(3)

    @classmethod
    def after_step(cls, step, arrived, ends, result):
        for seq in arrived.values():
            if "later" in seq.feature_state and seq not in ends and cls.random.random() < 0.7:
                seq.awaited = Future()


@pytest.mark.parametrize("name", [name for name in SETTINGS if "draft" not in name])
@BOTH_WAYS
def test_random_schedules_with_held_sequences(monkeypatch, name, async_scheduling):
    monkeypatch.setitem(FEATURES, "later", Feature(Later, {}))
    monkeypatch.setattr(awaiting, "MAX_WAIT_SECONDS", 0)
    requests = random_requests(11, 18, max_n=3)
    simulation = HeldSimulation(requests, async_scheduling, **SETTINGS[name]).run()
    assert simulation.seen["held"] > 100 and not simulation.scheduler.held


@pytest.fixture
def clock(monkeypatch):
    """The processor time of threads, which jobs let pass."""
    now = [0.0]
    monkeypatch.setattr(masks, "thread_time", lambda: now[0])
    return now


class Pace:
    """Of a grammar."""

    is_slow = False


def test_requests_take_turns(clock):
    """One with many masks that take long does not hold up one with few; fast ones are made together."""
    threads, made, order = masks.MaskThreads(), [], threading.Event()
    threads._fast = ThreadPoolExecutor(1)
    queues = {name: masks.MaskQueue(threads, Pace()) for name in "ABC"}

    def job(name: str, seconds: float):
        assert order.wait(20)
        made.append(name)
        clock[0] += seconds
        return name

    futures = [queues[name].submit(lambda name=name: job(name, 0.02)) for name in "AAAABB"]
    futures += [queues["C"].submit(lambda: job("C", 0.001)) for _ in range(4)]
    futures[3].cancel()
    order.set()
    assert [future.result(20) for future in futures if not future.cancelled()] == [*"AAABBCCCC"]
    assert "".join(made) == "ABCCCCABA"
    assert queues["B"].submit(lambda: job("B", 0)).result(20) == "B"
    with pytest.raises(ZeroDivisionError):
        queues["B"].submit(lambda: 1 // 0).result(20)
    assert queues["B"].submit(lambda: 3).result(20) == 3, "a thread survives errors"
    threads.close()


def test_slow_grammars_have_threads_of_their_own():
    threads, slow, fast, order = masks.MaskThreads(), Pace(), Pace(), threading.Event()
    slow.is_slow = True
    blocked = [masks.MaskQueue(threads, slow).submit(lambda: order.wait(20)) for _ in range(100)]
    assert masks.MaskQueue(threads, fast).submit(lambda: 3).result(20) == 3
    assert not any(future.done() for future in blocked)
    order.set()
    assert all(future.result(20) for future in blocked)
    threads.close()


def test_a_grammar_is_slow_by_its_last_masks(llm, monkeypatch):
    monkeypatch.setattr(compiled_grammar, "SLOW_SECONDS", 0.005)
    constraint = new_request(llm, params("regex", "[xy]{4}")).group[0].token_mask
    own = grammar_of(llm, params("regex", "[xy]{4}"))
    assert not own.is_slow
    own.add_mask(0.05)
    assert own.is_slow, "one mask tells"
    for _ in range(30):
        own.add_mask(0.00002)
    assert not own.is_slow
    assert constraint.draft([llm.tokenizer.encode("x")[0]], 3) and constraint.draft_masks
    own.add_mask(0.05)
    assert constraint.draft([llm.tokenizer.encode("x")[0]], 3) == [] == constraint.draft_masks


def test_answers_share_the_first_mask(llm, monkeypatch):
    made, make = [], constraints.Constraint._grammar_mask
    monkeypatch.setattr(constraints.Constraint, "_grammar_mask", lambda self: made.append(self) or make(self))
    group = new_request(llm, params("regex", "[ab]{4}", n=50)).group
    assert len(made) == 1
    first, *others = [seq.token_mask.next_mask for seq in group]
    assert first.any() and all(mask is first for mask in others)


# -- other parameters ------------------------------------------------------------------------------------------------


def test_json_object(llm):
    asks = [params("json_object", True, seed=seed, temperature=1.5) for seed in range(5)]
    for output in llm.generate(["Hello"] * 5, asks, use_tqdm=False):
        assert output.finish_reason in ("stop", "length")
        if output.finish_reason == "stop":
            assert isinstance(json.loads(output.text), dict)


def test_grammar(llm):
    lark = 'start: "begin" step+ "end"\nstep: "(" /[0-9]{1,3}/ ")"'
    output = answer(llm, params("grammar", lark, temperature=1.0, logit_bias={llm.tokenizer.encode("end")[0]: 20}))
    assert output.finish_reason == "stop" and re.fullmatch(r"begin(\([0-9]{1,3}\))+end", output.text)


@pytest.mark.parametrize(
    "lark, token_ids",
    [
        ('start: "a" <|im_start|> "b"', ["a", 2046, "b"]),
        ('start: "a" <|endoftext|>', ["a", 2045]),
        ("start: <[1234]> <[2046]> <[300]>", [1234, 2046, 300]),
        ('start: <[1000-1003]> "c"', [range(1000, 1004), "c"]),
    ],
)
def test_grammars_with_special_tokens_and_ids(llm, lark, token_ids):
    output = answer(llm, params("grammar", lark, temperature=1.0))
    wanted = [llm.tokenizer.encode(own)[0] if isinstance(own, str) else own for own in token_ids]
    assert len(output.token_ids) >= len(wanted) and output.finish_reason == "stop"
    for found, own in zip(output.token_ids, wanted):
        assert found in own if isinstance(own, range) else found == own


def test_special_tokens_may_have_the_lowest_ids():
    """As in most vocabularies but Qwen's; bytes and names that are no ASCII may follow."""
    box = sandbox.CompileSandbox(258, {0: "<unk>", 1: "<s>", 97: "<\u4f60>", 400: "<late>"})
    for lark in ("start: <s> <unk> /[^a]+/", "start: <\u4f60>", "start: <late>", "start: <[257]>"):
        assert box.error_of(grammars._grammar_of("grammar", lark)) == "", lark
    assert "unknown special token" in box.error_of(grammars._grammar_of("grammar", "start: <pad>"))


MANY_CHOICES = {
    "2,001 numbers": [f"c{i}" for i in range(2001)],
    "20,000 of three bytes": [chr(0x80 + i % 0x700) + chr(33 + i // 0x700) for i in range(20_000)],
    "prefixes of each other": ["a" * i for i in range(1, 350)] + ["ab"],
    "long ones": [f"{i:04}" + "xy" * 13 for i in range(2010)],
    "an empty one": ["", "b", "bc", *map(str, range(9000))],
}


@pytest.mark.parametrize("name", MANY_CHOICES)
def test_many_choices(llm, name):
    choices = MANY_CHOICES[name]
    for seed in range(3):
        output = answer(llm, params("choice", choices, seed=seed, temperature=3.0, max_tokens=400))
        assert output.text in choices and output.finish_reason == "stop", output


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_eos_ends_an_answer_where_the_grammar_may_end(llm, temperature):
    for eos in (EOS, ALSO_EOS):
        bias = {EOS: -100, ALSO_EOS: -100} | {eos: 100}
        output = answer(llm, params("regex", "[a-z]{9}[a-z]*", logit_bias=bias, temperature=temperature))
        assert output.token_ids[-1] == eos and output.finish_reason == "stop"
        assert len(output.text) >= 9 > len(llm.tokenizer.decode(output.token_ids[:-2]))
        assert output.stop_reason == (None if eos == llm.tokenizer.eos_token_id else eos)


def test_logprobs_are_the_model_s_own(llm):
    """Of the logits before the mask, as before every other edit: a token that is forced may be unlikely."""
    output = answer(llm, params("choice", ["zq"], logprobs=2))
    assert output.text == "zq" and output.cumulative_logprob < -5
    assert output.logprobs[0][output.token_ids[0]].rank > 2 and len(output.logprobs[0]) == 3


def test_min_tokens(llm):
    """The end is banned before; where nothing else is allowed, the answer ends with an error."""
    eager = {EOS: 100, ALSO_EOS: 100}
    output = answer(llm, params("regex", "a*", min_tokens=9, logit_bias=eager))
    assert len(output.token_ids) == 10 and output.finish_reason == "stop" and {*output.text} == {"a"}
    output = answer(llm, params("regex", "aaa", min_tokens=9, logit_bias=eager))
    assert output.text == "aaa" and output.finish_reason == "error"
    assert output.stop_reason == "structured_outputs: the parameters allow no token"


def test_stop_ids_are_like_eos(llm):
    """They are allowed where the grammar may end, and only there."""
    stop = llm.tokenizer.encode("!")[0]
    output = answer(llm, params("regex", "[ab!]{3}b*", stop_token_ids=[stop], logit_bias={stop: 90}))
    # the third letter may be in a token with more letters
    assert re.fullmatch("[ab]{3}b*", output.text) and output.stop_reason == stop and output.token_ids[-1] == stop
    output = answer(llm, params("regex", "[ab]{3}", stop_token_ids=[stop], min_tokens=2, logit_bias={stop: 90}))
    assert re.fullmatch("[ab]{3}", output.text) and output.stop_reason == stop
    with pytest.raises(ValueError, match="the parameters allow no token, not even a first one"):
        answer(llm, params("regex", "!{3}", stop_token_ids=[stop], allowed_token_ids=[stop, EOS]))


def test_stop_strings_cut_an_answer(llm):
    output = answer(llm, params("regex", "[ab]{5}XY", stop="X"))
    assert re.fullmatch("[ab]{5}", output.text) and (output.finish_reason, output.stop_reason) == ("stop", "X")
    output = answer(llm, params("regex", "[ab]{5}XY", stop="X", include_stop_str_in_output=True))
    assert re.fullmatch("[ab]{5}X", output.text)


def test_allowed_ids_and_bad_words(llm):
    single = [llm.tokenizer.encode(text)[0] for text in "abc"]
    output = answer(llm, params("regex", "[a-z]{8}", allowed_token_ids=[*single, EOS]))
    assert re.fullmatch("[abc]{8}", output.text) and output.finish_reason == "stop"
    output = answer(llm, params("regex", "[a-z]{8}", allowed_token_ids=single))
    assert re.fullmatch("[abc]{8}", output.text) and output.finish_reason == "error", "the end is not allowed"
    output = answer(llm, params("choice", ["ab", "ac"], bad_words=["b", "ab"], temperature=5.0))
    assert output.text == "ac" and output.finish_reason == "stop"
    output = answer(llm, params("regex", "[ab]b[cd]", allowed_token_ids=single, bad_words=["bc"]))
    assert re.fullmatch("[ab]b", output.text) and output.finish_reason == "error"


def test_penalties_and_filters(llm):
    others = dict(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3, presence_penalty=0.5)
    pattern = "([a-z]{2,6} ){3}[a-z]+"
    asks = [params("regex", pattern, seed=seed, max_tokens=60, **others) for seed in range(4)]
    for output in llm.generate(["Hello"] * 4, asks, use_tqdm=False):
        assert output.finish_reason == "length" or re.fullmatch(pattern, output.text)


def test_a_length_ends_an_answer(llm):
    output = answer(llm, params("regex", "a{50}", max_tokens=3))
    assert output.finish_reason == "length" and len(output.token_ids) == 3 and {*output.text} == {"a"}


@BOTH_WAYS
def test_limits_of_the_library_end_an_answer(make_llm, monkeypatch, async_scheduling):
    """An error in the middle, which larger automata do not mend, ends this answer, and no other."""
    llm = make_llm(async_scheduling=async_scheduling)
    consume, count = constraints.Constraint.consume, []

    def fails_later(self, completion, reasoning):
        count.append(self)
        if self in count[4:5]:
            self._matcher.consume_tokens([3])  # not allowed
        return consume(self, completion, reasoning)

    monkeypatch.setattr(constraints.Constraint, "consume", fails_later)
    outputs = generate_by_steps(
        llm, [("Hello", params("regex", "[ab]{9}c{9}")), ("Hello", params("choice", ["qqqqqqqqqq"]))]
    )
    reasons = sorted((output.finish_reason, output.stop_reason) for output in outputs)
    assert [reason for reason, _ in reasons] == ["error", "stop"]
    assert reasons[0][1].startswith("structured_outputs: Parser Error") and "\n" not in reasons[0][1]
    assert llm.stats()["blocks"]["used"] == 0


# -- texts that spell tokens -----------------------------------------------------------------------------------------

# of a tokenizer that has these in place of its last tokens: content, whether it is special, what it strips
ADDED_TOKENS = [
    ("<think>", False, ""),
    ("</think>", False, ""),
    ("<tool_call>", True, ""),
    ("[INST]", True, ""),
    ("<mask>", True, "lstrip rstrip"),
    ("<pad", False, ""),
    ("hello", False, ""),
    ("yes", True, ""),
]
SPELLED = [
    *("<think>", "</think>", "<tool_call>", "[INST]", "<|im_end|>", "<|im_start|>", "<|endoftext|>", "hello", "yes"),
    *(
        "a<think>b",
        "<think><tool_call>",
        "x  <mask>  y",
        "<|im_end|>\n",
        "<|im_end|>yes",
        "hello<|im_end|>",
        "yes, yes",
    ),
    *("<thin", "think>", "<<think>", "<think>>", "<pad", "<pad>", "\n\n<think>\n", "say hello", '"<think>"'),
    *("e\u0301", "\u212b", "\u1100\u1161<think>", "no\u0308"),  # which the tokenizer normalizes
]


@pytest.fixture(scope="module")
def model_with_added_tokens(tmp_path_factory, small_model) -> str:
    """A copy of the small model whose tokenizer has ADDED_TOKENS, and normalizes texts as Qwen's does."""
    shutil.copytree(small_model, folder := tmp_path_factory.mktemp("added") / "model")
    data = json.loads((folder / "tokenizer.json").read_text())
    data["normalizer"] = {"type": "NFC"}
    vocabulary, merges = data["model"]["vocab"], data["model"]["merges"]
    del merges[-len(ADDED_TOKENS) :]
    for (content, is_special, strips), token in zip(ADDED_TOKENS, [*vocabulary][-len(ADDED_TOKENS) :]):
        flags = {name: name in strips.split() for name in ("single_word", "normalized", "lstrip", "rstrip")}
        token_id = vocabulary.pop(token)
        data["added_tokens"].append({"id": token_id, "content": content, "special": is_special} | flags)
    data["added_tokens"].sort(key=lambda token: token["id"])
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return str(folder)


def forms_of(text: str) -> list[tuple[dict, Callable[[str], bool]]]:
    """Each form in which a text can be asked for, with a check of the answer."""
    choices, pattern = [text, "zq", f"{text}z", f"z{text}", text[:-1]], re.sub(r"([\[\]|])", r"\\\1", text)
    named = {"type": "object", "properties": {text: {"const": 1}}, "required": [text], "additionalProperties": False}
    is_text = lambda answer: answer == text
    is_json = lambda value: lambda answer: json.loads(answer) == value
    return [
        ({"choice": [text]}, is_text),
        ({"choice": choices}, lambda answer: answer in choices),
        ({"regex": pattern}, is_text),
        ({"regex": f"{pattern}[ab]{{3}}"}, lambda answer: answer[:-3] == text),
        ({"grammar": f"start: WORD {json.dumps(text)}\nWORD: /[a-z]{{2}}/"}, lambda answer: answer[2:] == text),
        ({"json": {"const": text}}, is_json(text)),
        ({"json": {"enum": [text]}}, is_json(text)),
        ({"json": {"type": "string", "pattern": f"^{pattern}$"}}, is_json(text)),
        ({"json": named}, is_json({text: 1})),
        ({"json": {"const": {"k": [text]}}}, is_json({"k": [text]})),
    ]


@pytest.mark.parametrize("way", ["greedy", "sampled", "asynchronous", "with drafts"])
def test_texts_that_spell_tokens(make_llm, model_with_added_tokens, way):
    """The grammar has text there, so other tokens spell it, and the answer is exactly this text."""
    settings: dict = {"async_scheduling": way in ("asynchronous", "with drafts")}
    if way == "with drafts":
        settings["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    llm = make_llm(model_with_added_tokens, **settings)
    asks = [(text, *form) for text in SPELLED for form in forms_of(text)]
    # a third each; with a stride that divides the number of forms, not all forms would be in it
    asks = asks[["sampled", "asynchronous", "with drafts", "greedy"].index(way) % 3 :: 3]
    own = [
        params(*next(iter(form.items())), seed=i, temperature=1.5 * (way != "greedy"), skip_special_tokens=i % 2 == 0)
        for i, (_, form, _) in enumerate(asks)
    ]
    outputs = llm.generate([f"yes<think>hello{text}" for text, *_ in asks], own, use_tqdm=False)
    for (_, form, check), output in zip(asks, outputs):
        assert output.finish_reason == "stop" and check(output.text), (form, output.text, output.stop_reason)
        assert output.token_ids[-1] in (EOS, ALSO_EOS) and not {EOS, ALSO_EOS}.intersection(output.token_ids[:-1])


def test_tokens_that_a_grammar_names(make_llm, model_with_added_tokens):
    """Without quotes, they are the tokens themselves, special or not."""
    llm = make_llm(model_with_added_tokens)
    output = answer(llm, params("grammar", 'start: <think> "<think>" <tool_call>', skip_special_tokens=False))
    think, call = llm.tokenizer.convert_tokens_to_ids(["<think>", "<tool_call>"])
    assert output.text == "<think><think><tool_call>" and output.finish_reason == "stop"
    assert [output.token_ids[0], output.token_ids[-2]] == [think, call]
    assert not {think, call}.intersection(output.token_ids[1:-2])


# -- the memory that grammars take -----------------------------------------------------------------------------------


def with_many_states(number: int, num_terminals: int = 100) -> str:
    """A grammar whose masks build automata of many states; another one for each number."""
    names = [f"T{i}" for i in range(num_terminals)]
    terminals = [f"/[a-z]*{chr(97 + (i + number) % 26)}[a-z]{{{i % 40}}}/" for i in range(num_terminals)]
    rules = [f"{name}: {terminal}" for name, terminal in zip(names, terminals)]
    return "\n".join([f"start: ({' | '.join(names)})+", *rules])


def new_request(llm: LLM, own: SamplingParams):
    (request,) = llm.input_processor.requests("Hello", own, OutputKind.FINAL_ONLY)
    return request


def grammar_of(llm: LLM, own: SamplingParams) -> compiled_grammar.Grammar:
    return llm.input_processor.helpers["grammars"].grammar(own.structured_outputs)


@pytest.mark.parametrize("drafts", [0, 3])
def test_automata_are_exchanged_where_they_are_too_small(make_llm, llm, monkeypatch, drafts):
    """No token differs; the larger ones are shared, and go with the last sequence that uses them."""
    asks = [params("grammar", with_many_states(0, 30), n=3, temperature=1.5, max_tokens=12), params("regex", "a{3,9}b")]
    asks.append(params("json", {"type": "array", "items": {"type": "string", "maxLength": 9}}, max_tokens=30))
    expected = [[x.token_ids for x in output.outputs] for output in llm.generate(["Hi"] * 3, asks, use_tqdm=False)]
    monkeypatch.setattr(compiled_grammar, "MAX_KEPT_STATES", 40)
    compiled, compile_as_ever = [], compiled_grammar.Grammar._compile

    def recorded(self, *limit: int):
        compiled.append((self, *limit))
        return compile_as_ever(self, *limit)

    monkeypatch.setattr(compiled_grammar.Grammar, "_compile", recorded)
    config = {"method": "ngram", "num_speculative_tokens": drafts}
    llm = make_llm(**(dict(speculative_config=config) if drafts else {}))
    outputs = llm.generate(["Hi"] * 3, asks, use_tqdm=False)
    assert [[x.token_ids for x in output.outputs] for output in outputs] == expected
    first = grammar_of(llm, asks[0])
    assert compiled.count((first,)) == 1, "its three sequences share them"
    assert first._large() is None and first._small is None, "nothing is kept"
    llm.generate("Hi", asks[0], use_tqdm=False)
    assert compiled.count((first,)) == 2 and compiled.count((first, 40)) == 1


def test_an_error_stays_with_the_sequences_that_it_ends(llm, monkeypatch):
    """llguidance's automata can't be used after an error, so later requests get others, even while these are in use."""
    monkeypatch.setattr(compiled_grammar, "MAX_KEPT_STATES", 1)
    own = params("regex", "[ab]{9}c{9}")
    (request,) = llm.input_processor.requests("Hello", own, OutputKind.FINAL_ONLY)
    constraint = request.group[0].token_mask
    first = constraint._automata
    assert first.is_largest and grammar_of(llm, own).automata() is first
    assert constraint.update([3])[0] == "error", "it is not allowed"
    assert "Parser Error" in constraint.error and constraint._automata is first
    assert grammar_of(llm, own).automata() is not first
    assert answer(llm, own).finish_reason == "stop"


def test_kept_grammars_take_little_memory(llm):
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("no /proc")

    def size() -> float:
        gc.collect()
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    sizes = []
    for i in range(6):
        own = params("grammar", with_many_states(i, 40), max_tokens=16, temperature=1.5)
        llm.generate("Hi", own, use_tqdm=False)
        sizes.append(size())
    assert sizes[-1] - sizes[1] < 25, f"{sizes} MiB: what the masks of a grammar build is about 7 MiB"


# -- schemas as generators write them --------------------------------------------------------------------------------

INTEGER = {"type": "integer"}


def record(**keywords) -> dict:
    return {"type": "object", "additionalProperties": INTEGER, **keywords}


# each has a note at that place, where `format` is not the keyword but a name, or data, it stays
NOTES = {"format": "path", "writeOnly": True, "x-order": 1, "nullable": True, "examples": [{"format": "path"}]}
PLACES = {
    "the root": lambda note: {"type": "string", **note},
    "a property": lambda note: {"type": "object", "properties": {"p": {"type": "string", **note}}},
    "a pattern": lambda note: {"type": "object", "patternProperties": {"^p": {"type": "string", **note}}},
    "other properties": lambda note: {"type": "object", "additionalProperties": {"type": "string", **note}},
    "items": lambda note: {"type": "array", "items": {"type": "string", **note}},
    "first items": lambda note: {"type": "array", "prefixItems": [{"type": "string", **note}]},
    "alternatives": lambda note: {"anyOf": [{"type": "null"}, {"allOf": [{"type": ["string", "null"], **note}]}]},
    "a definition": lambda note: {"$defs": {"s": {"type": "string", **note}}, "$ref": "#/$defs/s"},
    "a reference": lambda note: {"properties": {"p": {"$ref": "#/x-a/b~1c/0"}}, "x-a": {"b/c": [{**note}]}},
    "a resource": lambda note: {
        "properties": {"p": {"$id": "p", "$ref": "#/x-a", "x-a": {"type": "string", **note}}, "x-a": {}}
    },
    "a loop": lambda note: {"$ref": "#/$defs/s", "$defs": {"s": {"items": {"$ref": "#/$defs/s"}, **note}}},
}


@pytest.mark.parametrize("place", PLACES)
def test_annotations_do_not_constrain(llm, place):
    """Wherever a schema has them, and for any type."""
    schema = PLACES[place](NOTES)
    llm.input_processor.requests("Hello", params("json", schema), OutputKind.FINAL_ONLY)
    rewritten = json.loads(for_llguidance(json.dumps(schema)))
    expected = PLACES[place]({name: note for name, note in NOTES.items() if name != "format"})
    assert rewritten == json.loads(json.dumps(expected))
    assert for_llguidance(json.dumps(PLACES[place]({"format": "uuid"}))) == json.dumps(
        PLACES[place]({"format": "uuid"})
    )


def test_names_and_data_are_no_keywords():
    data = {"format": "path", "uniqueItems": False, "propertyNames": {"enum": []}}
    schema = {"properties": {key: {"type": "string"} for key in data}, "required": [*data]}
    schema["properties"] |= {"e": {"enum": [data]}, "c": {"const": data}, "d": {"default": data, "examples": [data]}}
    assert json.loads(for_llguidance(json.dumps(schema))) == schema
    assert list(json.loads(for_llguidance(json.dumps(schema)))["properties"]) == [*schema["properties"]], "their order"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False, "unevaluatedItems": True, "minContains": 1},
        record(unevaluatedProperties={}, dependentRequired={}, dependentSchemas={}),
        {"type": "integer", "if": {"minimum": 3}, "not": False},
        {"type": "integer", "then": {"minimum": 3}, "else": {"minimum": 4}},
        {"$dynamicAnchor": "n", "anyOf": [INTEGER, {"type": "array", "items": {"$ref": "#n"}}]},
        *(
            {"$schema": dialect, "type": "string"}
            for dialect in (
                "https://spec.openapis.org/oas/3.1/dialect/base",
                "http://json-schema.org/schema#",
                "https://json-schema.org/draft-07/schema",
                "http://json-schema.org/draft/2020-12/schema#",
                "mine",
            )
        ),
    ],
)
def test_keywords_that_constrain_nothing(llm, schema):
    llm.input_processor.requests("Hello", params("json", schema), OutputKind.FINAL_ONLY)


RULES_FOR_NAMES = [
    {"type": "string"},
    {"type": ["string", "null"], "title": "Key", "format": "path"},
    True,
    False,
    INTEGER,
    {"enum": ["b", "a", "b", 3]},
    {"const": "a"},
    {"anyOf": [{"const": "c"}, {"type": "string", "enum": ["a", "d"]}]},
    {"$ref": "#/$defs/key"},
    {"pattern": "^[ab]"},
    {"minLength": 1, "maxLength": 2},
    {"type": "string", "minLength": 2},
]


@pytest.mark.parametrize("names", RULES_FOR_NAMES, ids=str)
@pytest.mark.parametrize("properties", [{}, {"c": {"type": "boolean"}, "a": {"type": "null"}}], ids=["any", "c, a"])
@pytest.mark.parametrize("more", [True, False, {"type": "string", "format": "int32"}], ids=str)
def test_names_of_properties(names, properties, more):
    """The rewritten schema is valid for the same objects, and has no `propertyNames`."""
    schema = {"propertyNames": names, "properties": properties, "additionalProperties": more}
    schema |= {"$defs": {"key": {"$ref": "#/$defs/other"}, "other": {"enum": ["a", "e"]}}}
    if properties and isinstance(names, dict) and names.keys() & {"pattern", "minLength"}:
        with pytest.raises(ValueError, match="propertyNames: with 'properties', only"):
            for_llguidance(json.dumps(schema))
        return
    before = jsonschema.Draft202012Validator(schema)
    after = jsonschema.Draft202012Validator(rewritten := json.loads(for_llguidance(json.dumps(schema))))
    assert "propertyNames" not in rewritten
    found = {False: 0, True: 0}
    for name in ("", "a", "b", "c", "d", "e", "ab", "xyz"):
        for value in (None, "s", 1, True):
            for instance in ({name: value}, {name: value, "a": None}, [name]):
                assert after.is_valid(instance) == before.is_valid(instance), (instance, rewritten)
                found[before.is_valid(instance)] += 1
    assert found[True]


def test_many_names_share_a_schema():
    """A copy for each would be more text than a schema may have, and in nested ones too much for any machine."""
    schema = record(additionalProperties={"type": "string", "maxLength": 5})
    for depth in range(12):
        schema = record(propertyNames={"enum": [f"{depth}_{i}" for i in range(50)]}, additionalProperties=schema)
    assert len(for_llguidance(json.dumps(schema))) < 100_000


def test_records_are_answered(llm):
    for seed in range(6):
        schema = record(propertyNames={"type": "string", "enum": ["one", "two"]}, required=["two"])
        output = answer(llm, params("json", schema, seed=seed, temperature=1.5))
        found = json.loads(output.text) if output.finish_reason == "stop" else {"two": 2}
        assert found.keys() <= {"one", "two"} and "two" in found


CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "n": INTEGER}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"$ref": "#/$defs/name"}, "s": {}}, "required": ["s", "kind"]}
NODE = {
    "properties": {"kind": {"enum": ["node", "root"]}, "items": {"type": "array", "items": {"$ref": "#/$defs/any"}}},
    "type": "object",
    "required": ["kind"],
    "description": "a recursive one",
}
UNTAGGED = {"type": "object", "properties": {"kind": {"const": "bird", "default": "bird"}}}
DEFINITIONS = {"name": {"enum": ["dog"]}, "cat": CAT, "dog": DOG, "node": NODE, "bird": UNTAGGED}
REFERENCES = {name: {"$ref": f"#/$defs/{name}"} for name in DEFINITIONS}


@pytest.mark.parametrize(
    "alternatives, others, is_disjoint",
    [
        ([REFERENCES["cat"], REFERENCES["dog"]], {}, True),
        ([REFERENCES["cat"], DOG, REFERENCES["node"] | {"title": "Node"}], {}, True),
        ([CAT, {"type": "null"}], {}, True),
        ([CAT, {"type": ["string", "boolean"]}, INTEGER], {}, True),
        ([{"const": "a"}, {"enum": ["b", 1, None]}, {"const": True}], {}, True),
        ([CAT, REFERENCES["bird"]], {"discriminator": {"propertyName": "kind"}}, True),
        ([CAT, UNTAGGED], {}, False),
        ([CAT, CAT | {"title": "Same"}], {"discriminator": {"propertyName": "kind"}}, False),
        ([INTEGER, {"type": "number"}], {}, False),
        ([{"const": 1}, {"const": 1.0}], {}, False),
        ([{"const": "a"}, {"type": "string"}], {}, False),
        ([CAT, {"minimum": 3}], {}, False),
        ([CAT, {"type": "null"}], {"anyOf": [CAT]}, False),
    ],
)
def test_alternatives_that_exclude_each_other(llm, alternatives, others, is_disjoint):
    """As pydantic and zod write unions; llguidance sees that of a few only."""
    one = {"oneOf": [*alternatives], **others}
    schema = {"type": "object", "properties": {"p": one}, "required": ["p"], "$defs": DEFINITIONS | {"any": one}}
    rewritten = json.loads(for_llguidance(json.dumps(schema)))
    assert ("oneOf" in rewritten["properties"]["p"]) != is_disjoint
    if not is_disjoint:
        return
    llm.input_processor.requests("Hello", params("json", schema), OutputKind.FINAL_ONLY)
    before, after = map(jsonschema.Draft202012Validator, (schema, rewritten))
    for kind in ("cat", "dog", "node", "bird", "x", None):
        for more in ({}, {"s": 1}, {"n": 1}, {"items": [{"kind": "cat"}]}):
            instance = {"p": more if kind is None else {"kind": kind, **more}}
            assert before.is_valid(instance) >= after.is_valid(instance)
            assert before.is_valid(instance) == after.is_valid(instance) or kind is None, "a tag is given"
    for value in (None, True, "a", "b", 1, 2, 1.5, []):
        assert before.is_valid({"p": value}) == after.is_valid({"p": value})


def test_alternatives_that_are_not_supported_are_left_out(llm):
    """Pydantic says of a Decimal that it is a number, or a string with a pattern that looks ahead."""
    decimal = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}
    output = answer(llm, params("json", decimal, max_tokens=300))
    assert output.finish_reason == "length" or isinstance(json.loads(output.text), (int, float))
    with pytest.raises(ValueError, match="look-ahead"):
        llm.add_request("Hello", params("json", {"anyOf": decimal["anyOf"][1:]}))


@pytest.mark.parametrize("name", ["Page<Item>", "Page[int]", "a b", "\u00fcber", "50% off", "x~y", "caf\u00e9 [1]"])
def test_references_to_any_name(llm, name):
    """Generators seldom write them as URIs, in which such names are encoded."""
    key = name.replace("~", "~0").replace("%", "%25")
    schema = {"$ref": f"#/$defs/{key}", "$defs": {name: {"type": "string", "format": "path", "maxLength": 3}}}
    llm.input_processor.requests("Hello", params("json", schema), OutputKind.FINAL_ONLY)


@pytest.mark.parametrize(
    "schema, words",
    [
        (record(propertyNames={"format": "email"}), r"propertyNames: \['format'\] is not supported there"),
        (record(propertyNames={"pattern": "a", "minLength": 2}), r"\['minLength', 'pattern'\] is not supported"),
        (record(propertyNames={"not": {"const": "a"}}), r"propertyNames: \['not'\]"),
        (record(propertyNames={"$ref": "#/propertyNames"}), r"propertyNames: \['.ref'\]"),
        (record(propertyNames={"const": "a"}, patternProperties={"b": {}}), "with 'patternProperties'"),
        ({"type": "string", "format": "idn-email"}, "Unknown format: idn-email"),
        ({"type": "array", "items": {"not": {"type": "null"}}}, 'Unimplemented keys: ."not"'),
        ({"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a"}}}, "Unimplemented keys: .*dynamicRef"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "ref='#/.defs/a': refers to itself"),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/properties/a"}}}, "refers to itself"),
        (json.loads('{"items":' * 300 + "true" + "}" * 300), "nested too deeply|recursion limit"),
    ],
)
def test_constraints_that_are_not_supported_are_named(llm, schema, words):
    with pytest.raises(ValueError, match=words):
        llm.add_request("Hello", params("json", schema))


def test_schemas_that_are_none():
    """Whatever stands there, at any place, the only error is a ValueError."""
    keywords = [
        *json_schema.SCHEMAS,
        *json_schema.LISTS,
        *json_schema.MAPS,
        *json_schema.NEUTRAL,
        *json_schema.PARTNERS,
    ]
    keywords += [*json_schema.OF_STRINGS, "$schema", "$id", "$dynamicAnchor", "type", "required", "discriminator"]
    leaves = [
        "a",
        "object",
        "string",
        "#",
        "#/$defs/a",
        "#/a/0",
        "path",
        "(?=a)",
        1,
        -1,
        1.5,
        True,
        False,
        None,
        [],
        {},
    ]

    def random_value(rng: random.Random, depth: int):
        kind = rng.random() if depth else 1
        if kind < 0.5:
            return {rng.choice(keywords): random_value(rng, depth - 1) for _ in range(rng.randint(0, 4))}
        return [random_value(rng, depth - 1) for _ in range(2)] if kind < 0.6 else rng.choice(leaves)

    num_accepted = 0
    for seed in range(2000):
        if isinstance(schema := random_value(random.Random(seed), 6), dict):
            with suppress(ValueError):
                for_llguidance(json.dumps(schema))
                num_accepted += 1
    assert 500 < num_accepted < 1990


def test_tools_with_such_schemas(llm):
    """One of many has them, and a call is required."""
    from nanovllm.serve.protocol import ChatBody
    from nanovllm.serve.structured import structured_outputs

    schema = {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "$schema": "mine"}
    schema["$defs"] = {"P": {"type": "string", "format": "path"}}
    functions = [
        {"name": "f", "parameters": schema},
        {"name": "g", "parameters": record(propertyNames={"minLength": 1})},
    ]
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": f} for f in functions],
    }
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        found = structured_outputs(ChatBody.model_validate(body | {"tool_choice": choice}))
        output = answer(llm, SamplingParams(structured_outputs=found, max_tokens=60, temperature=1.5, seed=3))
        assert output.finish_reason in ("stop", "length")


# -- errors at the door ----------------------------------------------------------------------------------------------


def test_specifications_are_checked_and_kept():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert SamplingParams(structured_outputs={"json": schema}) == SamplingParams(
        structured_outputs={"json": json.dumps(schema)}
    )
    assert SamplingParams(structured_outputs={"choice": ["a", ""]}).structured_outputs == {"choice": ("a", "")}
    own = params("regex", "a")
    assert replace(own, seed=2).structured_outputs == {"regex": "a"}


@pytest.mark.parametrize(
    "kind, content, words",
    [
        ("json", {"type": "strin"}, "Invalid type: strin"),
        ("json", {"type": "array", "uniqueItems": True}, "Unimplemented keys: ..uniqueItems"),
        ("json", {"$ref": "#/nowhere"}, "does not exist"),
        ("json", {"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ("json", '{"type": "integer", "minimum": 1, "maximum": 0}', "minimum"),
        ("regex", "(a", "unclosed group"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("grammar", "start: nothing", 'unknown name: "nothing"'),
        ("grammar", "no grammar (", "Expected token"),
        ("grammar", "start: <[2048]>", "too large: 2048"),
        ("grammar", "start: <[3000000]>", "too large: 3000000"),
        ("grammar", "start: <|no_such_token|>", 'unknown special token: "<.no_such_token.>"'),
    ],
)
def test_what_the_library_refuses(llm, kind, content, words):
    with pytest.raises(ValueError, match=rf"structured_outputs\['{kind}'\]=.*{words}") as found:
        llm.add_request("Hello", params(kind, content))
    assert len(str(found.value)) < 600
    assert llm.is_finished() and not llm.scheduler.live


@pytest.mark.parametrize(
    "kind, content",
    [
        ("json", {"allOf": [{"type": "integer", "multipleOf": k} for k in (97, 89, 83)]}),
        ("json", {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(1, 30)]}),
        ("grammar", "start: A\nA: B & C & D\nB: /(.*a.{15}b)*/\nC: /(.*c.{12}d)*/\nD: ~(/.*e.{13}f.*/)"),
    ],
)
def test_grammars_that_would_take_minutes(monkeypatch, kind, content):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.5)
    box = sandbox.CompileSandbox(300, {})
    assert box.error_of("{") != "" == box.error_of('{"grammars": [{"lark_grammar": "start: /a+/"}]}')
    (first,) = box._processes
    (own,) = params(kind, content).structured_outputs.items()
    begin = perf_counter()
    assert box.error_of(grammars._grammar_of(*own)) == "takes more than 0.5 s, or too much memory, to compile"
    assert perf_counter() - begin < 5 and first.returncode is not None
    assert box.error_of('{"grammars": [{"lark_grammar": "start: nothing"}]}').startswith("at 1(8): unknown name")
    (child,) = box._processes
    with monkeypatch.context() as patch:  # what is known needs no process
        patch.setattr(sandbox, "_ask", None)
        assert box.error_of(grammars._grammar_of(*own)).startswith("takes more than 0.5 s")
    del box
    assert child.returncode is not None


@pytest.fixture
def trials(monkeypatch):
    """The grammars in trial, which end as this test says: `trials[grammar].set()`."""
    trials = {}

    def wait(process, grammar: str) -> bytes:
        trials[grammar] = threading.Event()
        assert trials[grammar].wait(20)
        return json.dumps(f"an error of {grammar}").encode()

    monkeypatch.setattr(sandbox, "_ask", wait)
    yield trials
    for event in trials.values():
        event.set()


def wait_for(condition) -> None:
    end = perf_counter() + 20
    while not condition():
        assert perf_counter() < end
        sleep(0.001)


def test_trials_at_a_time(trials):
    """As many as there are processes, the same grammar once, and a slow one delays no other."""
    box, asked = sandbox.CompileSandbox(300, {}), ["a", "a", "a", "b", "c", "d", "e", "e", "a"]
    with ThreadPoolExecutor(len(asked)) as pool:
        errors = [pool.submit(box.error_of, grammar) for grammar in asked]
        wait_for(lambda: len(trials) == sandbox.MAX_PROCESSES)
        assert len(box._processes) == sandbox.MAX_PROCESSES
        trials.pop(last := next(name for name in trials if name != "a")).set()
        wait_for(lambda: len(trials) == sandbox.MAX_PROCESSES)
        others = [error for error, grammar in zip(errors, asked) if grammar == last]
        assert [error.result(20) for error in others] == [f"an error of {last}"] * len(others)
        assert [error.done() for error in errors] == [grammar == last for grammar in asked]
        for event in trials.values():
            event.set()
        assert [error.result(20) for error in errors] == [f"an error of {grammar}" for grammar in asked]
    assert len(trials) == 4 and len(box._processes) == sandbox.MAX_PROCESSES and not box._in_trial
    box.close()
    assert all(process.returncode is not None for process in box._processes)


def test_results_are_bounded_and_interrupts_leave_nothing(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_RESULTS", 2)
    answers, asked = [b'"%s"' % (b"x" * 9999), b'""', b'""', KeyboardInterrupt(), b'""'], []

    def ask(process, grammar: str) -> bytes:
        asked.append((grammar, process))
        if isinstance(given := answers.pop(0), BaseException):
            raise given
        return given

    monkeypatch.setattr(sandbox, "_ask", ask)
    box = sandbox.CompileSandbox(300, {})
    for name in ("a", "b", "a", "c", "a"):
        assert len(box.error_of(name)) == (sandbox.MAX_ERROR_CHARACTERS if name == "a" else 0)
    with pytest.raises(KeyboardInterrupt):
        box.error_of("b")
    assert box.error_of("b") == "" and not box._in_trial
    names, processes = zip(*asked)
    assert names == ("a", "b", "c", "b", "b"), "b was pushed out by c"
    assert len({*processes}) == 2 and processes[3].returncode is not None and processes[4].poll() is None


def test_exit_in_a_signal_handler(monkeypatch):
    """`close` may interrupt `error_of` at any bytecode of the same thread: nothing hangs, and no process is left."""
    monkeypatch.setattr(sandbox, "_ask", lambda process, grammar: b"" if process.poll() is not None else b'""')
    monkeypatch.setattr(sandbox, "_send", lambda process, message: None)
    previous = signal.signal(signal.SIGINT, lambda *_: box.close())
    try:
        at, num_closed = 1, 0
        while True:
            box, interrupt = sandbox.CompileSandbox(300, {}), Interrupt(at, by_signal=True)
            interrupt.files = ("structured_outputs/sandbox.py",)
            try:
                with interrupt:
                    assert box.error_of("a") == ""
            except RuntimeError as error:
                assert "closed by exit" in str(error)
                num_closed += 1
            assert not box._in_trial and all(process.returncode is not None for process in box._processes) == (
                interrupt.where is not None
            ), interrupt.where
            if interrupt.where is None:
                break
            at += 11
        assert at > 100 and num_closed > 5
    finally:
        signal.signal(signal.SIGINT, previous)


def test_exit_ends_the_process(make_llm, monkeypatch):
    llm = make_llm()
    answer(llm, params("choice", ["a"]))
    box, slow = llm.input_processor.helpers["grammars"]._sandbox, grammars._grammar_of("regex", "b" * 50)
    (first,) = box._processes
    assert first.poll() is None
    # also while another thread waits for it, which is told why
    monkeypatch.setattr(sandbox, "_ask", lambda process, grammar: process.stdout.readline())
    errors = []

    def compile_slowly() -> None:
        try:
            box.error_of(slow)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=compile_slowly)
    thread.start()
    wait_for(lambda: box._in_trial)
    llm.exit()
    thread.join(5)
    assert errors == ["this engine was closed by exit()"] and first.wait(5) < 0
    with pytest.raises(RuntimeError, match="closed by exit"):
        box.error_of(slow)
    assert first.returncode is not None and box._processes == {first}
    llm.exit()  # again is fine
    monkeypatch.undo()
    llm = make_llm()
    answer(llm, params("choice", ["a"]))
    (child,) = llm.input_processor.helpers["grammars"]._sandbox._processes
    llm.exit()
    assert child.returncode is not None and child.stdin.closed and child.stdout.closed


def test_grammars_are_compiled_once(llm, monkeypatch):
    import llguidance

    compiled, matcher = [], llguidance.LLMatcher
    fake = lambda *arguments, **options: compiled.append(arguments[1]) or matcher(*arguments, **options)
    for name in ("grammar_from_regex", "grammar_from_lark", "grammar_from_json_schema"):
        setattr(fake, name, getattr(matcher, name))
    monkeypatch.setattr(llguidance, "LLMatcher", fake)
    monkeypatch.setattr(grammars, "MAX_CACHED_GRAMMARS", 2)
    for pattern in ("x1", "x2", "x1", "x3", "x1", "x2"):
        assert answer(llm, params("regex", pattern, n=2)).text == pattern
    assert len(compiled) == 4


def test_without_the_library(make_llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    llm = make_llm()
    with pytest.raises(ValueError, match="llguidance is not installed .* pip install 'nano-vllm.serve.'"):
        llm.generate("Hello", params("choice", ["a"]), use_tqdm=False)
    assert len(answer(llm, SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3


def test_bits_of_masks():
    mask = mask_of((0, 31, 32, 69), vocab_size=70)
    assert mask.tolist() == [-(2**31) + 1, 1, 1 << 5] and mask.dtype == np.int32
    constraints._set_bits(mask, np.array([31, 33, 69, 33]), False)
    assert mask.tolist() == [1, 1, 0]
    constraints._set_bits(mask, np.array([31, 33, 31]), True)
    assert mask.tolist() == [-(2**31) + 1, 3, 0]
