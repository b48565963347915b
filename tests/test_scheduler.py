"""Who runs when. Random requests run on a device without a model, and everything is checked after every third move."""

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from time import thread_time

import pytest
from scaling import assert_grows_less
from simulation import (
    ALSO_EOS,
    EOS,
    MAX_LEN,
    SETTINGS,
    SimulatedEngine,
    Simulation,
    StateSimulation,
    WindowSimulation,
    random_requests,
    rows,
)

from nanovllm.engine.admission import MAX_STEPS_WITHOUT_ADMISSION, MIN_SHARED_CHUNK, TokenBudget
from nanovllm.engine.forks import fork, resume
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.stats import stats_of

WITH_DRAFTS = [(False, True, 4), (True, False, 5), (True, True, 6)]


@pytest.mark.parametrize(
    "name, asynchronous, on_host, seed",  # of the three, each but one with each name
    [(name, *case) for i, name in enumerate(SETTINGS) for j, case in enumerate(WITH_DRAFTS) if (i + j) % 3],
)
def test_random_requests_with_drafts(name, asynchronous, on_host, seed):
    """Of which some are wrong, so that the host's counts are only upper bounds until a step's result has arrived.

    Sequences draft while not too many run. If the host drafts, they wait for their tokens.
    """
    settings = SETTINGS[name] | dict(num_drafts=1 if "tiny blocks" in name else 2, drafts_on_host=on_host)
    simulation = Simulation(random_requests(seed), asynchronous, **settings)
    seen = simulation.run().seen
    assert (seen["preemptions"] > 0) == ("tiny cache" in name)
    assert seen["right drafts"] > seen["wrong drafts"] > 10
    assert not simulation.scheduler.paces


@pytest.mark.parametrize("asynchronous, seed", [(False, 0), (True, 1)])
@pytest.mark.parametrize("name", SETTINGS)
def test_random_requests(name, asynchronous, seed):
    """The same requests get the same answers under all settings, and what a setting is there for did happen."""
    seen = Simulation(random_requests(seed), asynchronous, **SETTINGS[name]).run().seen
    assert (seen["preemptions"] > 0) == ("tiny cache" in name)
    assert (seen["hits"] > 0) == ("no prefix caching" not in name)
    assert (seen["tokens thrown away"] > 0) == asynchronous
    assert seen["mixed"] > 0 and (seen["chunks"] > 0 or "chunks" not in name)


def test_random_requests_reach_rare_corners():
    """So that the test above keeps meaning what it says."""
    seen: Counter = Counter()
    for seed in range(8):
        seen += Simulation(random_requests(seed), True, **SETTINGS["tiny cache, tiny blocks"]).run().seen
        if seen["ended while preempted"] and seen["shared within a step"]:
            return
    pytest.fail(f"only {seen}")


@pytest.mark.parametrize("name, asynchronous", [(name, i % 2 == 0) for i, name in enumerate(SETTINGS)])
def test_random_requests_for_several_answers(name, asynchronous):
    """Up to more answers than may run at a time; every one is what it would be alone, and each gets in."""
    seen = Simulation(random_requests(int(asynchronous), 40, max_n=9), asynchronous, **SETTINGS[name]).run().seen
    assert seen["forks"] > 10 and seen["aborted"] > 0
    assert (seen["left behind"] > 0) == (name != "all at once")  # to be computed again, as not all fit


@pytest.mark.parametrize(
    "name, max_n, asynchronous, seed",
    [(name, *((1, True, 0), (6, False, 2))[i % 2]) for i, name in enumerate(SETTINGS)],
)
def test_random_requests_with_states(name, max_n, asynchronous, seed):
    """Each chunk begins with the state that the tokens before it have left, found or computed or forked.

    Snapshots have rows of their own, or those alone that sequences do not need.
    """
    seen: Counter = Counter()
    for num_snapshots in (0, 3):
        settings = SETTINGS[name] | {"num_snapshots": num_snapshots}
        one = StateSimulation(random_requests(seed, max_n=max_n), asynchronous, **settings).run().seen
        assert one["snapshots read"] == one["hits"]
        seen += one
    has_hits = "no prefix caching" not in name
    assert (seen["snapshots read"] > 0) == has_hits
    assert seen["copies of states"] > 0 or (max_n == 1 and not has_hits)


@pytest.mark.parametrize(
    "name, window, asynchronous, on_host, seed",
    [(name, (1, 6, 9, 30)[i % 4], *WITH_DRAFTS[i % 3]) for i, name in enumerate(SETTINGS)]
    + [(name, (9, 1, 30, 6)[i % 4], i % 2 == 0, None, i) for i, name in enumerate(SETTINGS)],
)
def test_random_requests_with_windows(name, window, asynchronous, on_host, seed):
    """Of layers with a window, blocks behind it are freed and used again; what tokens see is always there.

    With drafts, with several answers, aborted requests, preemptions, chunks and prefix hits.
    """
    settings, max_n = SETTINGS[name] | {"window": window}, 6
    if on_host is not None:
        settings |= dict(num_drafts=1 if "tiny blocks" in name else 2, drafts_on_host=on_host)
        max_n = 1
    simulation = WindowSimulation(random_requests(seed, max_n=max_n), asynchronous, **settings)
    seen = simulation.run().seen
    size = simulation.manager.block_size
    assert seen["freed columns"] > 0 and seen["most columns held"] <= -(-window // size) + 3
    assert (seen["hits"] > 0) == ("no prefix caching" not in name)
    if "at once" in name:
        assert seen["preemptions"] == 0


@pytest.mark.parametrize("num_conversations, num_running", [(12, 12), (16, 8), (20, 4)])
def test_conversations_find_states_in_all_rows(num_conversations, num_running):
    """Of 24 rows, 6 are for snapshots alone: the others hold them too while no sequence needs them.

    So each of those that run has a snapshot besides, and each of the others has one. Of six turns each, at least half
    of what attention would find is found.
    """
    engine = SimulatedEngine(num_blocks=800, max_num_seqs=18, num_snapshots=6, keeps_states=True, max_len=400)
    rng, found, findable = random.Random(0), 0, 0
    histories: list[list[int]] = [[] for _ in range(num_conversations)]
    for _ in range(6):
        for first in range(0, num_conversations, num_running):
            seqs, some = [], range(first, first + num_running)
            for i in some:
                findable += max(0, len(histories[i]) - 1) // 4 * 4  # the last token was not computed
                histories[i] += [100 * i + rng.randrange(100) for _ in range(rng.randint(5, 20))]
                seqs.append(engine.add(histories[i], max_tokens=rng.randint(8, 15), ignore_eos=True))
            engine.run()
            found += sum(seq.num_cached_tokens for seq in seqs)
            for i, seq in zip(some, seqs):
                histories[i] += seq.completion_token_ids
        assert len(engine.manager.snapshots) <= 24
    assert max(len(step.rows) for step in engine.steps) == num_running
    assert found > findable / 2


def test_scheduler_needs_no_torch():
    """The same simulation in a process where torch can't be imported and the packages' own __init__ don't run."""
    import nanovllm

    root = Path(nanovllm.__file__).parent
    script = f"""if True:
        import sys, types
        sys.modules["torch"] = None
        for name, folder in (("nanovllm", {str(root)!r}), ("nanovllm.engine", {str(root / "engine")!r})):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [folder]
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from simulation import SETTINGS, Simulation, random_requests
        print(Simulation(random_requests(0), True, **SETTINGS["tiny cache"]).run().seen["preemptions"])
    """
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 0


# -- one thing at a time ---------------------------------------------------------------------------------------------


def prompt(length: int, first: int = 100) -> list[int]:
    """Prompts of different `first` share no block."""
    return list(range(first, first + length))


def test_chunks_ride_along_with_decodes():
    """A prompt that arrives while others decode is computed in the same steps, and holds none of them up."""
    engine = SimulatedEngine(max_num_mixed_tokens=10)
    first = engine.add(prompt(5))
    assert rows(engine.step()) == [(0, 0, 5)]
    assert rows(engine.step()) == [(0, 5, 6)]
    second = engine.add(prompt(6, first=200))
    step = engine.step()
    assert rows(step) == [(0, 6, 7), (1, 0, 4)] and step.num_decodes == 1 and step.sampled_seqs == [first]
    step = engine.step()
    assert rows(step) == [(0, 7, 8), (1, 4, 6)] and step.num_decodes == 1 and step.sampled_seqs == [first, second]
    step = engine.step()
    assert rows(step) == [(0, 8, 9), (1, 6, 7)] and step.num_decodes == 2 and not step.chunks
    assert stats_of(engine.scheduler)["steps"] == {"prefill": 1, "decode": 2, "mixed": 2}


def test_prompts_first():
    """Where nobody sees when a token arrives, sequences decode when no prompt is left, or none can be admitted."""
    engine = SimulatedEngine(max_num_batched_tokens=8, max_num_mixed_tokens=4, max_num_seqs=3)
    for i in range(4):
        engine.add(prompt(6, first=100 * i), max_tokens=2)
    while not engine.scheduler.is_finished():
        engine.step(prompts_first=True)
    assert [sum(step.chunk_lens) for step in engine.steps] == [8, 8, 2, 0, 6, 0]
    assert [step.num_decodes for step in engine.steps] == [0, 0, 0, 3, 0, 1]


def test_what_a_sequence_says_of_itself():
    """Its length counts tokens in flight, and its contents do not."""
    engine = SimulatedEngine()
    seq = engine.add(prompt(5))
    step = engine.scheduler.schedule()
    assert (len(seq), seq.num_completion_tokens, seq.last_token) == (6, 0, 104)
    engine.give(step, 7)
    assert (len(seq), seq.num_completion_tokens, seq.last_token) == (6, 1, 7)
    assert seq.prompt_token_ids == prompt(5) and seq.completion_token_ids == [7] and not seq.is_finished
    assert repr(seq) == "Sequence(0.0, RUNNING, 5 + 1 tokens, blocks [0, 1])"
    engine.abort(0)
    assert seq.is_finished


def test_prompts_fill_the_token_budget():
    """A prompt that does not fit whole is computed as far as it goes, and on in the next step."""
    engine = SimulatedEngine(max_num_batched_tokens=8)
    seqs = [engine.add(prompt(n, first=first)) for n, first in ((3, 100), (14, 200), (2, 300))]
    steps = [engine.step() for _ in range(5)]
    assert [rows(step) for step in steps[:2]] == [[(0, 0, 3), (1, 0, 5)], [(0, 3, 4), (1, 5, 8)]]
    assert [rows(step) for step in steps[2:4]] == [[(0, 4, 5), (1, 8, 11)], [(0, 5, 6), (1, 11, 14)]]
    assert rows(steps[4]) == [(1, 14, 15), (0, 6, 7), (2, 0, 2)]  # the longest first, of those that decode
    assert [step.sampled_seqs for step in steps[:4]] == [seqs[:1], seqs[:1], seqs[:1], seqs[:2]]


def test_long_prompts_do_not_keep_short_ones_waiting():
    """A prompt that does not fit takes half of what is left of the budget while others wait."""
    engine = SimulatedEngine(num_blocks=3000, max_num_batched_tokens=2048, max_num_mixed_tokens=257, max_len=9999)
    for i, length in enumerate((5000, 3000, 20, 500)):
        engine.add(prompt(length, first=i * 10_000))
    assert rows(engine.step()) == [(0, 0, 1024), (1, 0, 512), (2, 0, 20), (3, 0, 492)]
    assert rows(engine.step()) == [(2, 20, 21), (0, 1024, 1152), (1, 512, 576), (3, 492, 500)]


def test_token_budget():
    """A chunk of tokens that attend to many others is shorter."""
    budget = TokenBudget(1000, context_of_equal_cost=2000)
    assert budget.chunk_end(0, 500, False) == 500 and budget.chunk_end(0, 500, True) == 500
    for start in (0, 100, 2000, 30_000):
        for others_wait in (False, True):
            end = budget.chunk_end(start, 40_000, others_wait)
            bound = 500 if others_wait else 1000
            assert budget.cost(start, end) <= bound <= budget.cost(start, end + 1)
    assert budget.chunk_end(2000, 40_000, False) - 2000 < 500 < budget.chunk_end(0, 40_000, False)
    assert TokenBudget(0.5).chunk_end(3, 9, False) == 4
    assert TokenBudget(2 * MIN_SHARED_CHUNK - 1).chunk_end(0, 999, True) == 2 * MIN_SHARED_CHUNK - 1
    assert TokenBudget(100).minus(10, 50) == TokenBudget(60)


def test_prompts_of_one_step_share_their_prefix():
    """What the first of them computes, the others of the same step find; each has its own last block."""
    engine = SimulatedEngine()
    seqs = [engine.add(prompt(8)) for _ in range(3)]
    assert rows(engine.step()) == [(0, 0, 8), (1, 4, 8), (2, 4, 8)]
    assert len({seq.block_table[0] for seq in seqs}) == 1 and len({seq.block_table[1] for seq in seqs}) == 3
    assert [seq.num_cached_tokens for seq in seqs] == [0, 4, 4]


def test_admission_in_groups_once_full():
    """A sixteenth of those that run must have ended before the next are admitted, and then all that fit are."""
    engine = SimulatedEngine(max_num_seqs=32, num_blocks=200, max_num_batched_tokens=1000)
    for i in range(32):
        engine.add(prompt(3, first=10 * i), max_tokens=2 + i)
    for i in range(4):
        engine.add(prompt(3, first=1000 + 10 * i), max_tokens=50)
    assert len(rows(engine.step())) == 32
    assert len(rows(engine.step())) == 32  # the first ends with it
    assert [len(rows(engine.step())) for _ in range(3)] == [31, 32, 31]


def test_admission_is_never_delayed_for_long():
    """Though only one of many has ended, the next is admitted after MAX_STEPS_WITHOUT_ADMISSION steps."""
    engine = SimulatedEngine(max_num_seqs=32, num_blocks=1000, max_num_batched_tokens=1000)
    for i in range(32):
        engine.add(prompt(3, first=10 * i), max_tokens=100 if i else 2)
    engine.add(prompt(3, first=1000), max_tokens=50)
    sizes = [len(rows(engine.step())) for _ in range(MAX_STEPS_WITHOUT_ADMISSION + 3)]
    assert sizes == [32, 32, *[31] * (MAX_STEPS_WITHOUT_ADMISSION - 1), 32, 32]


def test_max_num_seqs():
    engine = SimulatedEngine(max_num_seqs=2)
    seqs = [engine.add(prompt(3, first=100 * i)) for i in range(3)]
    assert rows(engine.step()) == [(0, 0, 3), (1, 0, 3)]
    assert list(engine.scheduler.waiting) == seqs[2:]
    assert not engine.step(EOS).chunks  # both end here
    assert rows(engine.step()) == [(2, 0, 3)]


@pytest.mark.parametrize("num_blocks, is_admitted", [(3, False), (4, True)])
def test_admission_leaves_blocks_in_reserve(num_blocks, is_admitted):
    """With a free block for each running sequence, the next step does not preempt what was just admitted."""
    engine = SimulatedEngine(num_blocks=num_blocks)
    engine.add(prompt(8))
    engine.add(prompt(3, first=200))
    assert len(engine.step().rows) == 1 + is_admitted
    assert not engine.step().chunks
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize("settings", [{}, dict(keeps_states=True), dict(window=6), dict(window=100)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_request_is_too_long_for_the_smallest_cache(asynchronous, settings):
    """A prompt that leaves room for one token runs, with several answers. One without answers may be a token longer."""
    sizes = dict(num_blocks=MAX_LEN // 16, block_size=16, max_num_seqs=3, max_num_batched_tokens=20)
    engine = SimulatedEngine(asynchronous=asynchronous, **sizes, **settings)
    groups = [engine.make_group(prompt(MAX_LEN - n, 100 * n), n=n, ignore_eos=True) for n in (1, 3, 2, 1, 4, 20)]
    for group in groups:
        engine.queue(group)
    engine.run()
    assert {seq.num_tokens for group in groups for seq in group} == {MAX_LEN}
    assert engine.manager.can_allocate(Sequence(prompt(MAX_LEN, first=5000), max_len=MAX_LEN))


def test_statistics_while_sequences_end():
    """Of window tables, as another thread reads them: a sequence may end at any moment."""
    engine = SimulatedEngine(window=6)
    for i in range(3):
        engine.add(prompt(9, first=100 * i), max_tokens=9)
    engine.step()

    class EndingMeanwhile(dict):
        def items(self):
            pairs = [*super().items()]
            engine.abort(len(self) - 1)
            return pairs

        def __iter__(self):
            return iter([key for key, _ in self.items()])

    engine.manager._num_freed = EndingMeanwhile(engine.manager._num_freed)
    for num_left in (2, 1, 0):
        assert stats_of(engine.scheduler)["block_groups"] and len(engine.scheduler.running) == num_left


def test_last_admitted_is_preempted_first_and_queued_first():
    """Preempted sequences are queued before those that never ran, in the order of their arrival."""
    engine = SimulatedEngine(num_blocks=7, max_num_seqs=3)
    first, second, third, fourth = [engine.add(prompt(4, first=100 * i)) for i in range(4)]
    engine.step()
    for _ in range(20):
        if engine.scheduler.num_preemptions == 1:
            assert list(engine.scheduler.running.values()) == [first, second]
            assert list(engine.scheduler.waiting) == [third, fourth]
        if engine.scheduler.num_preemptions == 2:
            break
        engine.step()
    assert list(engine.scheduler.running.values()) == [first]
    assert list(engine.scheduler.waiting) == [second, third, fourth]
    assert second.block_table == [] and second.req_index == -1 and second.num_computed_tokens == 0


def test_preempted_sequence_goes_on_from_what_it_has():
    """Its generated tokens are computed again with its prompt, as far as they are not found in the cache."""
    engine = SimulatedEngine()
    seq = engine.add(prompt(6))
    for _ in range(5):
        engine.step()
    engine.scheduler.preempt(seq)
    assert len(seq.token_ids) == 11
    step = engine.step()
    assert step.num_decodes == 0 and rows(step) == [(0, 8, 11)]
    assert seq.num_cached_tokens == 0  # of the prompt, and on first admission


def test_preempted_sequence_drops_its_drafts():
    """They follow a token that has to be computed first, so the next decode row has one token."""
    engine = SimulatedEngine(num_drafts=2)
    seq = engine.add(prompt(6))
    engine.step()
    assert len(seq.feature_state["spec_decode"].token_ids) == 2
    engine.scheduler.preempt(seq)
    steps = [engine.scheduler.schedule(), engine.scheduler.schedule()]
    assert [rows(step) for step in steps] == [[(0, 4, 7)], [(0, 7, 8)]]
    assert engine.scheduler.running


def test_generated_block_can_be_found_once_its_tokens_arrived():
    """It is computed before the host knows its last token, and neither alone is enough."""
    engine = SimulatedEngine()
    cached = engine.manager.hash_to_block_id
    engine.add(prompt(3))
    steps = [engine.scheduler.schedule(), engine.scheduler.schedule()]
    assert not cached
    engine.give(steps[0], 7)
    assert len(cached) == 1

    engine = SimulatedEngine()
    cached = engine.manager.hash_to_block_id
    engine.add(prompt(3))
    engine.step()
    assert not cached
    engine.step()
    assert len(cached) == 1


def test_only_watched_rows_are_shown():
    """Others may end as well: by their length, or by a stop id."""
    engine = SimulatedEngine()
    params = {}, {}, {"stop_token_ids": [9]}
    seqs = [engine.add(prompt(5, first=100 * i), max_tokens=9, **options) for i, options in enumerate(params)]
    seqs[1].is_watched = True
    while not engine.scheduler.is_finished():
        step = engine.scheduler.schedule()
        num_tokens = len(seqs[0].token_ids) + 1
        assert [step.sampled_seqs[i] for i in step.watched] == [seqs[1]]
        engine.give(step, *[9 if num_tokens == 10 else 7] * len(step.sampled_seqs))
    assert [seq.num_completion_tokens for seq in seqs] == [9, 9, 5]
    assert [(seq.finish_reason, seq.stop_reason) for seq in seqs] == [("length", None)] * 2 + [("stop", 9)]


@pytest.mark.parametrize("token_id", [EOS, ALSO_EOS])
def test_token_in_flight_of_an_ended_sequence_is_thrown_away(token_id):
    """The step after the end was scheduled before the end was known."""
    engine = SimulatedEngine()
    seq = engine.add(prompt(3))
    steps = [engine.scheduler.schedule(), engine.scheduler.schedule()]
    assert rows(steps[1]) == [(0, 3, 4)]
    assert engine.give(steps[0], token_id) == [seq]
    assert engine.scheduler.is_finished() and engine.scheduler.schedule() is None
    assert engine.give(steps[1], 5) == []
    assert seq.completion_token_ids == [token_id] and seq.finish_reason == "stop"


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_preempted_sequence_may_end_with_its_token_in_flight(reason):
    """It ends in the queue, where it holds nothing that could be given back twice."""
    engine = SimulatedEngine(num_blocks=5, block_size=2)
    first, second = engine.add(prompt(4)), engine.add(prompt(2, first=200), max_tokens=3)
    prefill, decode = engine.scheduler.schedule(), engine.scheduler.schedule()
    assert engine.give(prefill, 7, 7) == []
    last = engine.scheduler.schedule()
    assert engine.give(decode, 7, 7) == []
    step = engine.scheduler.schedule()  # the first needs a block
    assert rows(step) == [(0, 6, 7)] and list(engine.scheduler.waiting) == [second]
    assert engine.give(last, 7, EOS if reason == "stop" else 7) == [second]
    assert second.finish_reason == reason and len(second.completion_token_ids) == 3
    assert not engine.scheduler.waiting and list(engine.scheduler.running.values()) == [first]
    assert len(engine.scheduler.free_req_indices) == 3 and sum(b.ref_count for b in engine.manager.blocks) == 4


def test_nothing_to_schedule_while_the_last_token_is_in_flight():
    engine = SimulatedEngine()
    seq = engine.add(prompt(3), max_tokens=1)
    step = engine.scheduler.schedule()
    assert engine.scheduler.schedule() is None and not engine.scheduler.is_finished()
    assert engine.give(step, 7) == [seq]
    assert engine.scheduler.is_finished()


@pytest.mark.parametrize(
    "length, options, completion, reason",
    [
        (3, dict(max_tokens=3), [EOS], "stop"),
        (3, dict(max_tokens=3, ignore_eos=True), [EOS] * 3, "length"),
        (MAX_LEN - 2, dict(ignore_eos=True), [EOS] * 2, "length"),
    ],
)
def test_ends(length, options, completion, reason):
    """At an end-of-sequence id unless told otherwise, after max_tokens, and at the engine's bound."""
    engine = SimulatedEngine()
    seq = engine.add(prompt(length), **options)
    while not engine.scheduler.is_finished():
        engine.step(EOS)
    assert (seq.completion_token_ids, seq.finish_reason) == (completion, reason)


def leftovers(engine: SimulatedEngine) -> tuple:
    manager, scheduler = engine.manager, engine.scheduler
    held = sum(block.ref_count for block in manager.blocks)
    return len(manager.blocks) - len(manager.free_block_ids), held, len(scheduler.running), len(scheduler.waiting)


def test_abort_leaves_nothing():
    """Running, computed in part, preempted or never begun."""
    engine = SimulatedEngine(max_num_batched_tokens=24)
    seqs = [engine.add(prompt(9, first=100 * i)) for i in range(4)]
    engine.step()
    engine.scheduler.preempt(seqs[0])
    in_part, never_begun = seqs[2:]
    assert in_part.status is SequenceStatus.RUNNING and never_begun.status is SequenceStatus.WAITING
    for seq in seqs:
        assert engine.abort(seq.request_id) == [seq] and engine.abort(seq.request_id) == []
    assert engine.scheduler.is_finished() and leftovers(engine) == (0, 0, 0, 0)
    assert sorted(engine.scheduler.free_req_indices) == list(range(4))
    assert {(seq.status, seq.finish_reason) for seq in seqs} == {(SequenceStatus.FINISHED, "abort")}


def test_abort_takes_no_longer_where_many_wait():
    def seconds(num_waiting: int) -> float:
        engine = SimulatedEngine(num_blocks=10)
        seqs = [engine.add(prompt(9, first=100 * i)) for i in range(num_waiting)]
        order = random.Random(0).sample(range(len(seqs)), len(seqs))
        begin = thread_time()
        for request_id in order:
            engine.abort(request_id)
        elapsed = thread_time() - begin
        assert engine.scheduler.is_finished()
        return elapsed

    assert_grows_less(45, seconds, 1_000, 10_000, rounds=2)  # a search through the queue makes it 80


def test_reset_repairs_anything():
    """Whatever state an error left: all lists are whole again, and nothing is cached."""
    engine = SimulatedEngine(max_num_batched_tokens=12)
    manager = engine.manager
    seqs = [engine.add(prompt(9, first=100 * i), max_tokens=12) for i in range(4)]
    for _ in range(3):
        engine.step()
    assert manager.hash_to_block_id and seqs[0].completion_token_ids
    rng = random.Random(0)
    for seq in seqs:  # any damage that a half-done move could do
        seq.block_table = rng.choices(range(64), k=3)
        seq.req_index = 2
    manager.free_block_ids.clear()
    manager.blocks[7].ref_count = -5
    manager.copies[3] = 4
    engine.scheduler.free_req_indices = [1, 1, 1]
    engine.scheduler.running.clear()
    engine.scheduler.reset()
    assert leftovers(engine) == (0, 0, 0, 0) and sorted(engine.scheduler.free_req_indices) == list(range(4))
    assert not manager.hash_to_block_id and not manager.copies and all(block.hash == -1 for block in manager.blocks)
    seqs = [engine.add(prompt(9, first=100 * i), max_tokens=12) for i in range(4)]
    assert engine.step().rows[0] == (seqs[0], 0, 9) and seqs[0].num_cached_tokens == 0
    engine.run()
    assert [len(seq.completion_token_ids) for seq in seqs] == [12] * 4 and leftovers(engine) == (0, 0, 0, 0)


# -- beams -------------------------------------------------------------------------------------------------------------


def test_beams_share_what_they_have_in_common():
    """A fork shares the full blocks of its parent, and the last block is copied before the next step."""
    engine = SimulatedEngine()
    root = engine.add(prompt(6))
    root.pauses_after_token, root.token_limit = True, 0
    step = engine.scheduler.schedule()
    engine.give(step, 7)
    assert root.is_paused and root.completion_token_ids == [] and engine.scheduler.schedule() is None
    second, third = fork(engine.scheduler, root, 1, 8), fork(engine.scheduler, root, 2, 9)
    resume(engine.scheduler, root, 7)
    assert [seq.completion_token_ids for seq in (root, second, third)] == [[7], [8], [9]]
    assert second.block_table[:1] == third.block_table[:1] == root.block_table[:1]
    step = engine.scheduler.schedule()
    assert sorted(rows(step)) == [(0, 6, 7)] * 3 and step.num_decodes == 0
    assert step.copies == {seq.block_table[1]: root.block_table[1] for seq in (second, third)}
    engine.give(step, 1, 1, 1)
    engine.scheduler.finish(root, "stop")
    resume(engine.scheduler, second, 5)
    fork(engine.scheduler, third, 3, 6)
    resume(engine.scheduler, third, 5)
    step = engine.scheduler.schedule()
    assert len(step.rows) == 3 and {end for _, _, end in step.rows} == {8} and len(step.copies) == 1
    assert engine.abort(0) and leftovers(engine) == (0, 0, 0, 0)


def test_beams_that_find_no_blocks_are_computed_again():
    """Paused beams free their blocks for those that are not computed yet, though no other sequence ever ends."""
    engine = SimulatedEngine(num_blocks=4)
    root = engine.add(prompt(6))
    root.pauses_after_token, root.token_limit = True, 0
    beams, seen = [root], 0
    for length in range(7, 13):
        steps = 0
        while not all(seq.is_paused for seq in beams):
            step = engine.scheduler.schedule()
            engine.give(step, *[1] * len(step.sampled_seqs))
            steps += 1
        seen = max(seen, steps)
        if length == 7:
            beams = [root, fork(engine.scheduler, root, 1, 2), fork(engine.scheduler, root, 2, 3)]
            resume(engine.scheduler, root, 1)
        else:
            for seq in beams:
                resume(engine.scheduler, seq, length)
    assert seen > 1 and engine.scheduler.num_preemptions > 0
    assert [seq.completion_token_ids[0] for seq in beams] == [1, 2, 3] and {len(seq.token_ids) for seq in beams} == {12}
    engine.abort(0)
    assert leftovers(engine) == (0, 0, 0, 0)
