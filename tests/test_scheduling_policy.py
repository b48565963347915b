"""Who is served first: priorities, a policy of one's own, and fairness, counted in steps and tokens."""

import random
from math import ceil

import numpy as np
import pytest
from common import generate_by_steps, step_error
from simulation import SimulatedEngine, rows

from nanovllm import BeamSearchParams, SamplingParams, SchedulingPolicy
from nanovllm.engine.admission import MAX_STEPS_WITHOUT_ADMISSION, MIN_SHARED_CHUNK, TokenBudget, WaitingQueue
from nanovllm.engine.scheduling_policy import FCFS
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.stats import stats_of
from nanovllm.features import beam_search

pytestmark = pytest.mark.small_model

BLOCK_SIZE = 16


class ShortestFirst(SchedulingPolicy):
    def priority_key(self, seq):
        return seq.num_prompt_tokens


class Returns:
    """A policy whose keys are those of a list, or that raises those that are exceptions."""

    def __init__(self, *keys):
        self.keys = list(keys)
        self.num_calls = 0

    def priority_key(self, seq):
        self.num_calls += 1
        key = self.keys.pop(0)
        if isinstance(key, Exception):
            raise key
        return key


# -- a scheduler without a device ----------------------------------------------------------------------------------


class Engine(SimulatedEngine):
    """The simulated engine, with prompts of which only the length matters."""

    def __init__(self, policy="fcfs", num_blocks=4000, max_num_seqs=64, budget=4096, mixed=None, **settings):
        settings = {"max_len": 100_000, "enable_prefix_caching": False} | settings
        super().__init__(policy, num_blocks, BLOCK_SIZE, max_num_seqs, budget, mixed or budget, **settings)

    def add(self, length: int, max_tokens: int = 1000, **options) -> Sequence:
        return super().add([self.num_requests + 1] * length, max_tokens, **options)

    def num_steps_until(self, condition, limit=1000) -> int:
        begin = len(self.steps)
        while not condition():
            assert len(self.steps) - begin < limit, "too many steps"
            self.step()
        return len(self.steps) - begin


def waiting_ids(engine: Engine) -> list[int]:
    return [seq.request_id for seq in engine.scheduler.waiting]


# -- the order of a policy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy, expected",
    [("fcfs", [0, 1, 2, 3]), ("priority", [3, 1, 2, 0]), (ShortestFirst(), [2, 0, 1, 3])],
    ids=["fcfs", "priority", "own"],
)
def test_admission_in_order(policy, expected):
    """One at a time; of equal ones the first that was added comes first."""
    engine = Engine(policy, max_num_seqs=1)
    for length, priority in [(5, 4), (5, 0), (3, 0), (9, -1)]:
        engine.add(length, max_tokens=1, priority=priority)
    assert [engine.step().sampled_seqs[0].request_id for _ in range(4)] == expected


def test_chunks_in_order():
    """A prompt that is being computed waits while more urgent ones are."""
    engine = Engine("priority", budget=20)
    engine.add(50, priority=5)
    assert rows(engine.step()) == [(0, 0, 20)]
    engine.add(24, max_tokens=1, priority=1)
    engine.add(6, max_tokens=1, priority=3)
    assert rows(engine.step()) == [(1, 0, 20)]
    assert rows(engine.step()) == [(1, 20, 24), (2, 0, 6), (0, 20, 30)]
    assert rows(engine.step()) == [(0, 30, 50)]


def test_chunks_in_order_of_arrival():
    engine = Engine("fcfs", budget=20)
    for length in (30, 24, 6):
        engine.add(length, max_tokens=1)
    assert [rows(engine.step()) for _ in range(3)] == [
        [(0, 0, 20)],
        [(0, 20, 30), (1, 0, 10)],
        [(1, 10, 24), (2, 0, 6)],
    ]


@pytest.mark.parametrize("policy, victims", [("fcfs", [2, 1]), ("priority", [0, 1]), (ShortestFirst(), [1, 2])])
def test_the_least_urgent_is_preempted_first(policy, victims):
    """And it is the first of those in the queue that runs again."""
    engine = Engine(policy, num_blocks=7)  # each has one block at first, and three must be in reserve
    for length, priority in ((13, 9), (15, 3), (14, 1)):
        engine.add(length, max_tokens=60, priority=priority)
    found: list[int] = []
    while len(found) < 2:
        before = {*waiting_ids(engine)}
        engine.step()
        found += [i for i in waiting_ids(engine) if i not in before]
    assert found == victims and engine.scheduler.num_preemptions == 2
    order = sorted(victims, key=lambda i: victims.index(i), reverse=True)
    assert waiting_ids(engine) == order
    (survivor,) = {0, 1, 2} - {*victims}
    assert [seq.request_id for seq in engine.scheduler.running.values()] == [survivor]


def test_a_prompt_that_is_being_computed_may_be_preempted():
    """If it is the least urgent; the sequences that decode go on."""
    engine = Engine("priority", num_blocks=7, mixed=1)
    engine.add(16, priority=1)
    engine.step()
    engine.add(60, priority=2)  # four blocks; the other has two, and one more in reserve
    assert rows(engine.step()) == [(0, 16, 17), (1, 0, 1)]
    engine.num_steps_until(lambda: engine.scheduler.num_preemptions)
    assert waiting_ids(engine) == [1] and not engine.scheduler.prefilling
    assert [seq.request_id for seq in engine.scheduler.running.values()] == [0]


class AtRandom:
    def __init__(self, seed: int):
        self.random = random.Random(seed).random

    def priority_key(self, seq):
        return self.random()


@pytest.mark.parametrize(  # of the blocks a sequence has at most 14
    "num_blocks, asynchronous, seed", [(20, False, 0), (20, True, 1), (120, True, 2), (120, False, 3)]
)
def test_accounting_in_random_traffic(num_blocks, asynchronous, seed):
    """Under any order, with aborts and preemptions: blocks and request indices are those of the running sequences, and
    each request ends with the tokens that it is to have.
    """
    rng = random.Random(seed)
    options = dict(asynchronous=asynchronous, checked=True)
    engine = Engine(AtRandom(seed), num_blocks, max_num_seqs=8, budget=64, mixed=rng.choice([3, 40]), **options)
    scheduler, seqs = engine.scheduler, engine.seqs
    for i in range(3000):
        if i < 250 and rng.random() < 0.3:
            engine.add(rng.choice([1, 30, 150]), max_tokens=rng.randint(1, 60), n=rng.choice([1, 1, 3]))
        if seqs and rng.random() < 0.03:
            engine.abort(rng.choice(seqs).request_id)
            engine.check_move()
        if scheduler.is_finished() and i > 250:
            break
        if not scheduler.is_finished():
            engine.step()
    assert {seq.finish_reason for seq in seqs} == {"length", "abort"}
    assert all(seq.num_completion_tokens == seq.params.max_tokens for seq in seqs if seq.finish_reason == "length")
    assert (scheduler.num_preemptions > 0) == (num_blocks == 20)


def test_answers_to_one_prompt_are_queued_together():
    """And are admitted with the first of them."""
    engine = Engine("priority", max_num_seqs=6)
    engine.add(5, priority=1, n=3)
    engine.add(5, priority=0, n=3)
    assert [(seq.request_id, seq.index) for seq in engine.scheduler.waiting] == [
        (r, i) for r in (1, 0) for i in (0, 1, 2)
    ]
    assert [(seq.request_id, seq.index) for seq in engine.step().sampled_seqs] == [
        (r, i) for r in (1, 0) for i in (0, 1, 2)
    ]


def test_waiting_queue():
    """Against a sorted list, with sequences that are removed from anywhere."""
    rng = random.Random(0)
    queue, expected = WaitingQueue(), []
    for i in range(400):
        seq = Sequence([1], request_id=i, max_len=10)
        seq.order = rng.randrange(5), i, 0
        queue.push(seq)
        expected.append(seq)
        if rng.random() < 0.7:
            gone = rng.choice(expected)
            queue.discard(gone)
            queue.discard(gone)  # it is not there: nothing happens
            expected.remove(gone)
    expected.sort(key=lambda seq: seq.order)
    assert [*queue] == expected and queue.next_ready() is expected[0] and len(queue) == len(expected)
    assert WaitingQueue().next_ready() is None


# -- fairness, on counts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [float("inf"), 2000.0])
@pytest.mark.parametrize("policy", ["fcfs", "priority", ShortestFirst()], ids=["fcfs", "priority", "own"])
def test_no_running_sequence_misses_a_step(policy, context):
    """While long prompts arrive all the time: each step decodes all that run, and its chunks stay in the budget."""
    rng = random.Random(1)
    engine = Engine(policy, num_blocks=10_000, mixed=600, context_of_equal_cost=context)
    for _ in range(8):
        engine.add(20, max_tokens=10_000)
    engine.step()
    for i in range(300):
        if i % 3 == 0:
            engine.add(rng.randint(500, 6000), max_tokens=rng.randint(1, 50), priority=rng.randrange(4))
        running = {*engine.scheduler.running.values()}
        step = engine.step()
        assert {row.seq for row in step.rows[: step.num_decodes]} == running >= {*engine.steps[0].sampled_seqs}
        assert 0 < sum(step.chunk_lens) <= 600
        cost = sum(TokenBudget(600, context).cost(start, end) for _, start, end in step.chunks)
        assert cost <= 600 + 3  # the last token may be one of up to three units
    assert engine.scheduler.num_preemptions == 0
    assert stats_of(engine.scheduler)["steps"] == {"prefill": 1, "decode": 0, "mixed": 300}


def test_a_step_that_decodes_nothing_has_the_whole_budget():
    engine = Engine(budget=4096, mixed=600)
    engine.add(9000)
    assert [sum(engine.step().chunk_lens) for _ in range(3)] == [4096, 4096, 808]


def test_prompts_and_decodes_fit_into_max_num_batched_tokens():
    """A mixed budget that is larger does not help."""
    engine = Engine(budget=100, mixed=10_000)
    for _ in range(30):
        engine.add(2)
    engine.step()
    engine.add(500)
    assert [sum(engine.step().chunk_lens) for _ in range(2)] == [70, 70]


def test_steps_are_longer_the_more_prompts_wait():
    """Half of the bound, or a quarter of the tokens that wait, but not more than the bound; decodes are part of it."""
    engine = Engine(mixed=800)
    engine.add(5, max_tokens=10_000)
    engine.step()
    for length, expected in ((1600, [399, 399, 399, 399, 4]), (2400, [599, 449]), (9000, [799, 799])):
        seq = engine.add(length, max_tokens=1)
        assert [sum(engine.step().chunk_lens) for _ in expected] == expected
        engine.num_steps_until(lambda seq=seq: seq.is_finished)


def test_prompts_get_a_part_of_a_step_however_many_decode():
    engine = Engine(mixed=40, max_num_seqs=64)
    for _ in range(50):
        engine.add(2)
    engine.step()
    engine.add(500)
    assert [sum(engine.step().chunk_lens) for _ in range(3)] == [10, 10, 10]


@pytest.mark.parametrize("num_long", [1, 2, 3])
def test_a_short_prompt_gets_its_token_in_the_first_step(num_long):
    """Each long prompt before it takes half of what is left of the budget, and the short one fits into the rest."""
    mixed = 2 ** (num_long - 1) * 2 * MIN_SHARED_CHUNK
    engine = Engine(num_blocks=10_000, mixed=mixed + 1, budget=10_000)  # a token for the sequence that decodes
    engine.add(5)
    engine.step()
    for _ in range(num_long):
        engine.add(50_000)
    short = engine.add(MIN_SHARED_CHUNK)
    step = engine.step()
    assert short in step.sampled_seqs and sum(step.chunk_lens) == mixed
    assert [end - start for _, start, end in step.chunks[:-1]] == [mixed // 2 ** (i + 1) for i in range(num_long)]


def test_a_short_prompt_behind_many_long_ones():
    """It does not wait for the last two of them, which share the budget with it."""
    mixed = 4 * MIN_SHARED_CHUNK
    engine = Engine(mixed=mixed + 1)
    engine.add(5)
    engine.step()
    longs = [engine.add(10 * mixed, max_tokens=1) for _ in range(6)]
    short = engine.add(5)
    engine.num_steps_until(lambda: short.has_sampled)
    assert [long.has_sampled for long in longs] == [True] * 4 + [False] * 2
    assert all(sum(step.chunk_lens) == mixed for step in engine.steps[1:-1]), "the budget was in use all the time"


@pytest.mark.parametrize("num_decoding", [0, 1])
@pytest.mark.parametrize("context", [float("inf"), 4000.0])
def test_a_long_prompt_is_not_overtaken_without_end(num_decoding, context):
    """Short ones arrive in every step, more than can be computed; the first gets half of the budget all the time."""
    mixed, length = 1024, 20_000
    engine = Engine(max_num_seqs=2000, budget=mixed, mixed=mixed, context_of_equal_cost=context)
    for _ in range(num_decoding):
        engine.add(5, max_tokens=10_000)
        engine.step()
    long = engine.add(length)
    others_before = engine.num_requests

    def short_ones_arrive() -> bool:
        for _ in range(12):
            engine.add(100, max_tokens=1)
        return long.has_sampled

    num_steps = engine.num_steps_until(short_ones_arrive)
    budget = TokenBudget(mixed, context if num_decoding else float("inf"))
    assert num_steps <= ceil(budget.cost(0, length) / (mixed / 2)) + 1
    done = sum(seq.request_id >= others_before for step in engine.steps for seq in step.sampled_seqs)
    assert done > 2 * num_steps  # nor do the short ones wait for it


def test_fcfs_starts_prompts_in_the_order_of_arrival():
    """In random traffic, with at most ten sequences at a time."""
    rng = random.Random(2)
    engine = Engine(num_blocks=500, max_num_seqs=10, budget=1024, mixed=600)
    for i in range(600):
        if i < 300 and rng.random() < 0.5:
            engine.add(rng.choice([10, 100, 1500]), max_tokens=rng.randint(1, 30))
        if not engine.scheduler.is_finished():
            engine.step()
    assert engine.scheduler.is_finished()
    first_steps: dict[int, None] = {}
    for step in engine.steps:
        first_steps |= {seq.request_id: None for seq, _, _ in step.chunks}
    assert [*first_steps] == sorted(first_steps) and len(first_steps) > 100


def test_admission_waits_for_no_group_while_the_engine_is_not_full():
    """Whatever ends or arrives, the next step begins what has arrived."""
    rng = random.Random(3)
    engine = Engine(num_blocks=10_000, max_num_seqs=64)
    for _ in range(300):
        new = [engine.add(rng.randint(1, 40), max_tokens=rng.randint(1, 30)) for _ in range(rng.randrange(3))]
        if engine.scheduler.is_finished():
            continue
        step = engine.step()
        assert len(step.rows) < 64, "this traffic is to leave the engine half empty"
        assert {*new} == {row.seq for row in step.chunks}


def test_admission_of_a_full_engine_is_delayed_for_some_steps_only():
    """Counted from the step in which a sequence has ended to the one in which another is admitted."""
    rng = random.Random(4)
    engine = Engine(num_blocks=10_000, max_num_seqs=32, budget=1000)
    for _ in range(200):
        engine.add(3, max_tokens=rng.randint(1, 300))
    num_delayed, longest = 0, 0
    while engine.scheduler.waiting:
        is_free = len(engine.scheduler.running) < 32
        step = engine.step()
        num_delayed = 0 if step.chunks or not is_free else num_delayed + 1
        longest = max(longest, num_delayed)
    assert 1 < longest <= MAX_STEPS_WITHOUT_ADMISSION


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preempted_sequences_are_not_overtaken(policy):
    """Although blocks are few and new requests arrive all the time, they end within 150 steps."""
    engine = Engine(policy, num_blocks=12, max_num_seqs=8, budget=64, mixed=32)
    seqs = [engine.add(20, max_tokens=40) for _ in range(3)]
    for i in range(400):
        if i % 4 == 0:
            engine.add(10, max_tokens=30, priority=1)
        engine.step()
        if all(seq.is_finished for seq in seqs):
            break
    assert all(seq.finish_reason == "length" for seq in seqs) and engine.scheduler.num_preemptions > 0
    assert len(engine.steps) <= 150


# -- the engine ----------------------------------------------------------------------------------------------------

GREEDY = dict(temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def requests():
    """(prompt, parameters, priority), with several answers to some."""
    rng = random.Random(5)
    made = []
    for i in range(24):
        prompt = [rng.randrange(2045) for _ in range(rng.choice([3, 17, 60, 150]))]
        n = 3 if i % 6 == 0 else 1
        params = SamplingParams(
            max_tokens=rng.randint(1, 24), n=n, **(GREEDY | {"temperature": 0.8 * (i % 4 == 0)}), seed=i
        )
        made.append((prompt, params, rng.randrange(-2, 3)))
    return [list(column) for column in zip(*made)]


@pytest.fixture(scope="module")
def expected(model_name, requests):
    """The answers of an engine that does one request after the other."""
    from nanovllm import LLM

    with LLM(model_name, dtype="float32", device="cpu") as llm:
        return [answers_of(llm.generate(prompt, params, use_tqdm=False))[0] for prompt, params, _ in zip(*requests)]


def answers_of(outputs) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


WORLDS = {
    "plenty": {},
    "chunks": dict(max_num_batched_tokens=40, max_num_mixed_tokens=16, max_num_seqs=8),
    "few blocks": dict(kvcache_block_size=16, num_kvcache_blocks=14, max_num_seqs=8, max_num_mixed_tokens=32),
}


@pytest.mark.parametrize(
    "policy, async_scheduling", [("priority", True), (ShortestFirst(), False)], ids=["priority-async", "own-sync"]
)
@pytest.mark.parametrize("world", WORLDS)
def test_answers_do_not_depend_on_the_policy(make_llm, requests, expected, world, policy, async_scheduling):
    prompts, params, priority = requests
    llm = make_llm(scheduling_policy=policy, async_scheduling=async_scheduling, **WORLDS[world])
    assert answers_of(generate_by_steps(llm, zip(prompts, params, priority))) == expected
    stats = llm.stats()
    assert (stats["preemptions"] > 0) == (world == "few blocks")
    assert stats["steps"]["mixed"] > 0 or world == "plenty"


@pytest.mark.parametrize("call", ["generate", "stream", "add_request", "chat"])
def test_low_priority_is_served_first(make_llm, call):
    """By every method that takes requests; numpy's integers are integers."""
    llm = make_llm(scheduling_policy="priority", max_num_seqs=1)
    prompts, params, priority = [[5, 6], [7, 8], [9, 10]], SamplingParams(max_tokens=2, **GREEDY), [3, -1, np.int64(2)]
    first_tokens: list[int] = []
    if call == "stream":
        for event in llm.stream(prompts, params, priority=np.array(priority)):
            first_tokens += [event.index] * (event.index not in first_tokens)
    elif call == "add_request":
        ids = [llm.add_request(prompt, params, priority=p) for prompt, p in zip(prompts, priority)]
        while not llm.is_finished():
            first_tokens += [ids.index(output.request_id) for output in llm.step().finished]
    else:
        conversations = [[{"role": "user", "content": str(prompt)}] for prompt in prompts]
        run, what = (llm.chat, conversations) if call == "chat" else (llm.generate, prompts)
        outputs = run(what, params, use_tqdm=False, priority=tuple(priority))
        times = [output.metrics.first_token_time for output in outputs]
        first_tokens = sorted(range(3), key=times.__getitem__)
    assert first_tokens == [1, 2, 0]


def test_beams_have_the_priority_of_their_request(make_llm, monkeypatch):
    llm = make_llm(scheduling_policy="priority")
    seen = []
    fork = beam_search.fork
    record = lambda scheduler, seq, *args: seen.extend([seq, fork(scheduler, seq, *args)]) or seen[-1]
    monkeypatch.setattr(beam_search, "fork", record)
    params = BeamSearchParams(beam_width=3, max_tokens=4)
    with_priority = llm.beam_search([[5, 6], [7, 8]], params, priority=[4, -4])
    assert {(seq.request_id, seq.priority, seq.order[0]) for seq in seen} == {(0, 4, 4), (1, -4, -4)}
    assert len({seq.index for seq in seen}) > 3
    again = llm.beam_search([[5, 6], [7, 8]], params)
    assert [output.outputs for output in with_priority] == [output.outputs for output in again]


@pytest.mark.parametrize("policy", ["fcfs", FCFS()])
def test_fcfs_refuses_priorities(make_llm, policy):
    llm = make_llm(scheduling_policy=policy)
    with pytest.raises(ValueError, match="priority=2: must be 0 with scheduling_policy='fcfs'"):
        llm.add_request([5], priority=2)
    with pytest.raises(ValueError, match="priority=-1: must be 0 with scheduling_policy='fcfs'"):
        llm.generate([[5], [6]], priority=[0, -1])
    assert llm.is_finished()
    assert len(llm.generate([[5], [6]], SamplingParams(max_tokens=1), use_tqdm=False, priority=[0, 0])) == 2


@pytest.mark.parametrize(
    "keys",
    [[None], [float("nan")], [1, "a"], [{1}, {2}], [object()], [1, np.array([1, 2])]],
    ids=["None", "NaN", "mixed types", "sets", "objects", "arrays"],
)
def test_keys_without_an_order(make_llm, keys):
    """The caller gets an error, nothing of its call is queued, and the engine continues with its other requests."""
    policy = Returns(*keys, *keys[:-1], *keys[:-1])
    llm = make_llm(scheduling_policy=policy)
    params = SamplingParams(max_tokens=3, **GREEDY)
    for prompt in range(len(keys) - 1):
        llm.add_request([prompt + 5], params)
    with pytest.raises(
        TypeError, match="scheduling_policy: priority_key of Returns returned .*, which must be less than"
    ):
        llm.generate([7, 8], params, use_tqdm=False)
    assert llm.stats()["requests"] == {"waiting": len(keys) - 1, "running": 0}
    while not llm.is_finished():
        llm.step()
    policy.keys = [keys[0] if len(keys) > 1 else 1]
    assert len(llm.generate([7, 8], params, use_tqdm=False)[0].token_ids) == 3


def test_a_policy_that_raises(make_llm):
    """Its own error is that of the call, and none of the call's prompts is queued."""
    policy = Returns(1, ZeroDivisionError("mine"), 2, 3)
    llm = make_llm(scheduling_policy=policy)
    with pytest.raises(ZeroDivisionError, match="mine"):
        llm.generate([[5], [6]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert not llm.scheduler.live
    assert len(llm.generate([[5], [6]], SamplingParams(max_tokens=1), use_tqdm=False)) == 2


def test_keys_that_only_the_queue_finds_without_order(make_llm):
    """Each can be compared with the key before it, but the third not with the first: this is an error of the step."""
    llm = make_llm(scheduling_policy=Returns((1, 2), (0, 0), (1, "a"), 0), max_num_seqs=1)
    with step_error(TypeError, "not supported between instances"):
        llm.generate([[5], [6], [7]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert not llm.scheduler.live and not llm.scheduler.waiting


def test_a_policy_is_called_once_for_each_request(make_llm):
    """Also if a request has several answers, is preempted, or is computed again after an interrupt."""
    policy = Returns(*range(9))
    llm = make_llm(scheduling_policy=policy, kvcache_block_size=16, num_kvcache_blocks=6)
    llm.generate([[5] * 14, [6] * 14, [7]], SamplingParams(max_tokens=24, n=2, **GREEDY), use_tqdm=False)
    assert llm.stats()["preemptions"] > 0 and policy.num_calls == 3
