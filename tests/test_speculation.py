"""Exact speculation: each method drafts what it should, and not one token differs, whatever is drafted."""

import json
import random
import shutil
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from statistics import mean
from types import SimpleNamespace

import pytest
import torch
from common import TINY, generate_by_steps, noise_of_rows, pairs
from simulation import SimulatedEngine
from test_drafts import SCHEDULES, answers, params_of
from test_models import VOCAB_SIZE, make_checkpoint

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.scheduled_step import StepResult
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.stats import stats_of
from nanovllm.layers.sampler import KEEPS_ALL, token_keys
from nanovllm.spec_decode import drafting_scheduler, suffix
from nanovllm.spec_decode.draft_model import DraftModel
from nanovllm.spec_decode.drafting_scheduler import Pace
from nanovllm.spec_decode.drafting_scheduler import width_that_pays as find_width
from nanovllm.spec_decode.proposer import PROPOSERS, Proposer
from nanovllm.spec_decode.speculation import Speculation
from nanovllm.spec_decode.speculative_config import ON_CPU, StepCost
from nanovllm.spec_decode.suffix import ROOT, SuffixAutomaton

NUM_DRAFTS = 4
METHODS = {
    "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"suffix_decoding_max_tree_depth": 8},
    "draft_model": {"model": TINY},
}
SETTINGS = dict(max_model_len=128, kvcache_block_size=16, num_kvcache_blocks=80, max_num_seqs=8)


def drafting(method: str, **others) -> dict:
    keys = {"method": method, "num_speculative_tokens": NUM_DRAFTS, **METHODS[method], **others}
    return {"speculative_config": keys}


def accepted(llm: LLM) -> tuple[int, int]:
    """Accepted and drafted tokens."""
    found = llm.stats()["spec_decode"]
    return sum(found["accepted_per_position"]), found["draft_tokens"]


@pytest.fixture
def margins(monkeypatch):
    """What an engine samples is no near tie: `margins(llm)` watches, and at the end of the test checks.

    Rows of several tokens round differently than single ones.
    """
    gaps: list[float] = []

    def watch(llm: LLM) -> LLM:
        def look(sampler, inputs):
            logits, temperatures, seeds, positions, cutoffs = inputs
            scores, is_drawn = logits.clone(), temperatures > 0
            if cutoffs is not None:
                keys = token_keys(scores, torch.arange(scores.shape[1]))
                scores[(keys < cutoffs[:, None]) & (cutoffs > KEEPS_ALL)[:, None]] = -torch.inf
            scores[is_drawn] /= temperatures[is_drawn, None]
            scores[is_drawn] += noise_of_rows(seeds[is_drawn], positions[is_drawn], scores.shape[1])
            best = scores.topk(2).values
            gaps.extend((best[:, 0] - best[:, 1]).tolist())

        llm.model_runner.sampler.register_forward_pre_hook(look)
        return llm

    yield watch
    assert min(gaps) > 1e-4


WORDS = ["cat", "dog", "house", "tree", "river", "king", "queen", "night", "day", "word", "sea", "star"]


def requests(chat, rng: random.Random, number: int = 8, max_len: int = 64) -> tuple[list, list]:
    """Tasks, some of whose answers repeat their prompts, or the ends of such prompts; and parameters of all kinds."""
    tasks = ["Copy: " + " ".join(rng.choices(WORDS, k=6)) for _ in range(number)]
    tasks[::3] = [f"Count from {i} to {i + 9}." for i in range(3, 3 + len(tasks[::3]))]
    return [chat(task)[-max_len:] for task in tasks], [params_of(rng, i) for i in range(number)]


def random_requests(vocab_size: int, rng: random.Random) -> tuple[list, list]:
    """Prompts that repeat themselves, as do the answers of random models."""
    phrases = [[rng.randrange(5, vocab_size) for _ in range(rng.randint(1, 9))] for _ in range(4)]
    prompts = [[x for _ in range(rng.randint(1, 5)) for x in rng.choice(phrases)] for _ in range(14)]
    params = [params_of(rng, i) for i in range(len(prompts))]
    return prompts, [replace(x, bad_words=None, stop=None, stop_token_ids=None, logit_bias=None) for x in params]


def few_likely(params: list[SamplingParams]) -> list[SamplingParams]:
    """A random model repeats itself, too, if few tokens are likely."""
    return [replace(x, logit_bias=dict.fromkeys(range(20, 24), 9.0)) for x in params]


@pytest.mark.parametrize("schedule, async_scheduling", [("at once", False), ("preemptions", True), ("chunks", True)])
def test_not_one_token_differs(make_llm, small_model, chat, margins, schedule, async_scheduling):
    """Of text in steps of whole prompts, and of a small model's answers in others."""
    sizes = dict(number=11, max_len=14) if schedule == "preemptions" else dict(number=6)
    model, (prompts, params) = TINY, requests(chat, random.Random(schedule), **sizes)
    params = [replace(x, max_tokens=min(x.max_tokens, 24)) for x in params]
    if schedule != "at once":
        model, params = small_model, few_likely(params)
    settings = SETTINGS | SCHEDULES[schedule] | dict(async_scheduling=async_scheduling)
    llm = margins(make_llm(model, **settings))
    expected = answers(llm.generate(prompts, params, use_tqdm=False))
    assert llm.stats()["preemptions"] > 0 or schedule != "preemptions"
    assert "spec_decode" not in llm.stats()
    llm.exit()
    for method in METHODS:
        llm = make_llm(model, **settings, **drafting(method, **{"model": model} if method == "draft_model" else {}))
        assert answers(llm.generate(prompts, params, use_tqdm=False)) == expected, method
        again = generate_by_steps(llm, zip(prompts[:2], params[:2]))  # with prefix hits, and chunks beside decodes
        assert answers(again) == expected[:2], method
        assert accepted(llm)[0] > 20 and llm.stats()["blocks"]["used"] == 0
        assert llm.stats()["preemptions"] > 0 or schedule != "preemptions"
        assert not llm.scheduler.paces
        llm.exit()


def test_another_family(make_llm, margins, tmp_path, monkeypatch):
    """Layers with a window, and a draft model with another shape of keys."""
    monkeypatch.setattr(drafting_scheduler, "LIMIT", 100.0)  # its drafts are mostly wrong
    model, other = (make_checkpoint(tmp_path / name, name) for name in ("mistral-window", "llama"))
    prompts, params = (x[:9] for x in random_requests(VOCAB_SIZE, random.Random(3)))
    params = few_likely(params)
    expected = margins(make_llm(model, **SETTINGS)).generate(prompts, params, use_tqdm=False)
    for method in METHODS:
        llm = make_llm(model, **SETTINGS, **drafting(method, **{"model": other} if method == "draft_model" else {}))
        assert answers(llm.generate(prompts, params, use_tqdm=False)) == answers(expected), method
        assert accepted(llm)[0] > 0, method


@pytest.mark.usefixtures("forked_ranks")
def test_ranks(make_llm, small_model, chat, margins):
    """Each rank has the same drafts: those of the host in its batch, those of a model as all ranks agree."""
    prompts, params = requests(chat, random.Random(5), 4)
    params = few_likely(params)
    expected = answers(margins(make_llm(small_model, **SETTINGS)).generate(prompts, params, use_tqdm=False))
    for method, own in (("suffix", {}), ("draft_model", {"model": small_model})):
        llm = make_llm(small_model, tensor_parallel_size=2, **SETTINGS, **drafting(method, **own))
        assert answers(llm.generate(prompts, params, use_tqdm=False)) == expected
        assert accepted(llm)[0] > 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_model_as_its_own_drafter(make_llm, small_model, chat, async_scheduling):
    """It draws what the model will: with the same noise, filters, penalties, and all tokens in its cache.

    Few blocks and short steps let sequences be preempted, and prompts be computed in pieces.
    """
    prompts, params = requests(chat, random.Random(7), 6, max_len=14)
    params = [replace(x, max_tokens=40) for x in params]
    settings = SETTINGS | dict(num_kvcache_blocks=6, max_num_batched_tokens=24, async_scheduling=async_scheduling)
    llm = make_llm(small_model, **settings, **drafting("draft_model", model=small_model))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats()["preemptions"] > 0
    num_accepted, num_drafted = accepted(llm)
    num_late = sum(len(output.outputs) for output in outputs) * 2 * NUM_DRAFTS  # drafts past the end of an answer
    assert num_drafted - num_late <= num_accepted > 100


def test_the_drafter_catches_up(make_llm, small_model, chat):
    """While too many sequences run, it computes nothing; later it needs what they have generated meanwhile."""
    llm = make_llm(small_model, **SETTINGS, **drafting("draft_model", model=small_model, disable_by_batch_size=2))
    prompts = [chat(f"Count from {i} to {i + 9}.") for i in range(3)]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=n, ignore_eos=True) for i, n in enumerate((20, 60, 60))
    ]
    drafted = []
    llm.core.on_step.append(lambda step, result: drafted.append(step.tokens_per_row > 1))
    llm.generate(prompts, params, use_tqdm=False)
    assert not any(drafted[:20]) and all(drafted[22:30])
    num_accepted, num_drafted = accepted(llm)
    assert num_drafted - 2 * NUM_DRAFTS <= num_accepted > 50


def test_keys_of_wrong_drafts_are_computed_again(make_llm, small_model, monkeypatch):
    """Also if nothing was drafted in the step after them: all drafts of the model for itself are right then."""
    for name, value in {"PAID_PER_STEP": 0.2, "LEAST_PER_STEP": 0.15}.items():
        monkeypatch.setattr(drafting_scheduler, name, value)
    llm = make_llm(small_model, **SETTINGS, **drafting("draft_model", model=small_model))
    sample, pauses, num_wrong = DraftModel._sample, set(), 0
    llm.core.on_step.append(lambda step, result: pauses.add(llm.scheduler.is_losing))

    def sample_wrong_ones(*args):
        nonlocal num_wrong
        is_wrong = True not in pauses
        num_wrong += is_wrong
        return sample(*args) + is_wrong

    monkeypatch.setattr(DraftModel, "_sample", sample_wrong_ones)
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True), use_tqdm=False)
    num_accepted, num_drafted = accepted(llm)
    assert num_accepted == num_drafted - num_wrong > 40 and num_wrong >= 5 * NUM_DRAFTS


def structured_requests(max_tokens: int = 40) -> tuple[list[str], list[SamplingParams]]:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "numbers": {"type": "array", "items": {"enum": [1, 2]}},
        },
        "required": ["name", "numbers"],
        "additionalProperties": False,
    }
    grammars = [{"json": json.dumps(schema)}, {"regex": "(ab|ba){8}[cd]"}, {"choice": ["KING RICHARD", "KING HENRY"]}]
    options = [{}, {"n": 3, "top_p": 0.9}, {"min_tokens": 3, "repetition_penalty": 1.1}, {"logprobs": 2}]
    prompts, params = ["ROMEO"], [SamplingParams(temperature=0.7, seed=1, max_tokens=30)]
    for i, (own, option) in enumerate(zip(2 * grammars, 2 * options), 1):
        sampling = dict(temperature=0.8 * (i % 3), seed=i, max_tokens=max_tokens)
        params.append(SamplingParams(structured_outputs=own, **sampling, **option))
        prompts.append("HAMLET" * i)
    return prompts, params


def num_masked_drafts(llm) -> list[int]:
    """Grows while the engine runs: the drafts of sequences with a grammar, by step."""
    numbers: list[int] = []

    def count(step, result) -> None:
        rows = zip(step.sampled_seqs, step.num_reserved)
        numbers.append(sum(number - 1 for seq, number in rows if "structured_outputs" in seq.feature_state))

    llm.core.on_step.append(count)
    return numbers


needs_llguidance = pytest.mark.skipif(not find_spec("llguidance"), reason="llguidance is not installed")


@needs_llguidance
def test_structured_outputs(make_llm, small_model, margins):
    """What the grammar forbids is cut from the drafts, and what it forces is drafted."""
    requests = structured_requests(28)
    settings = SETTINGS | dict(num_kvcache_blocks=20)
    expected = answers(margins(make_llm(small_model, **settings)).generate(*requests, use_tqdm=False))
    for method, async_scheduling in zip(METHODS, (False, True, True)):
        own = {"model": small_model} if method == "draft_model" else {}
        llm = make_llm(small_model, **settings, **drafting(method, **own), async_scheduling=async_scheduling)
        numbers = num_masked_drafts(llm)
        assert answers(llm.generate(*requests, use_tqdm=False)) == expected, method
        assert any(numbers) == (method != "draft_model"), method


@needs_llguidance
@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
def test_structured_outputs_on_cuda(make_llm, eager):
    """Graphs have a mask for each draft. That of a step may have more rows: hence the same bits in any batch."""
    requests = structured_requests()
    settings = SETTINGS | dict(device="cuda", dtype="bfloat16", kvcache_block_size=64)
    settings |= dict(batch_invariant=True, enforce_eager=eager)
    expected = answers(make_llm(**settings).generate(*requests, use_tqdm=False))
    llm = make_llm(**settings, **drafting("ngram"))
    numbers = num_masked_drafts(llm)
    assert answers(llm.generate(*requests, use_tqdm=False)) == expected
    assert sum(numbers) > 20 and llm.stats()["spec_decode"]["accepted_tokens"] > 15


# -- adaptation --------------------------------------------------------------------------------------------------------


class Silent(Proposer):
    """Drafts what is known: the tokens from some number on."""

    known: tuple[int, ...] = ()

    def draft(self, seq, num_drafts):
        return [*self.known[len(seq.token_ids) :][:num_drafts]]


class Wrong(Silent):
    """Always drafts."""

    def draft(self, seq, num_drafts):
        return [*super().draft(seq, num_drafts), *[7] * num_drafts][:num_drafts]


@pytest.mark.parametrize("num_seqs, num_tokens", [(1, 80), (8, 20)])
def test_wrong_drafts_of_a_model_cost_little(make_llm, small_model, monkeypatch, num_seqs, num_tokens):
    """However many sequences run, and however short they are; as soon as drafts are right, they are used."""
    monkeypatch.setattr(drafting_scheduler, "LEAST_PER_STEP", 0.02)  # so that drafts are soon tried again
    sample, is_wrong = DraftModel._sample, 1
    draw = lambda *args: (sample(*args) + is_wrong) % llm.config.model_config.vocab_size
    monkeypatch.setattr(DraftModel, "_sample", draw)
    llm = make_llm(small_model, **SETTINGS, **drafting("draft_model", model=small_model))
    steps = []  # their numbers of sequences, and of drafts

    def generate(num_rounds: int) -> float:
        num_before, cost = len(steps), llm.config.speculative_config.step_cost.of
        for i in range(num_rounds):
            prompts = [[5 + i % 400, 6 + j] for j in range(num_seqs)]
            llm.generate(prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=i), use_tqdm=False)
        found = [(n, num_drafts) for n, num_drafts in steps[num_before:] if n]
        return sum(cost(*both) for both in found) / sum(cost(n) for n, _ in found)

    llm.core.on_step.append(lambda step, result: steps.append((step.num_decodes, step.tokens_per_row - 1)))
    generate(90 // num_tokens)  # which uses up what drafts may cost at first
    assert 1 < generate(160 // num_tokens) < 1.03
    is_wrong = 0
    generate(90 // num_tokens)
    before = accepted(llm)
    generate(1)
    num_accepted, num_drafted = (now - then for now, then in zip(accepted(llm), before))
    assert num_accepted == num_drafted > 0.7 * num_seqs * num_tokens


OF = cache(StepCost.of)


@pytest.fixture(autouse=True)
def known_costs(monkeypatch):
    """The simulations ask for the same few a hundred thousand times."""
    monkeypatch.setattr(StepCost, "of", OF)


# ms of steps of Qwen3-8B, without and with four drafts of a head of EAGLE-3, on an H200
BF16 = StepCost((1, 8, 32, 64), (4.1, 4.34, 4.7, 4.9), (5.24, 6.22, 7.19, 10.0))
FP8 = StepCost((1, 8, 32, 64), (2.7, 3.15, 3.8, 4.5), (3.98, 5.12, 7.07, 8.8))
COSTS = {"bf16": BF16, "fp8": FP8}
RATES_AND_COSTS = [(0.0, "bf16"), (0.0, "fp8"), (0.2, "fp8"), (0.2, "bf16")]  # every other one has both rates and costs


class TimedEngine(SimulatedEngine):
    """Sequences draft on a device that is a step behind the host. `time` is that of its steps, in ms."""

    kept = 0.04  # what each step takes longer, as what a head reads is kept
    catch_up = 2.0  # how long the device is idle while sequences catch up

    def __init__(self, seed: int, cost: StepCost = BF16):
        sizes = dict(max_num_seqs=256, num_blocks=1025, block_size=256, max_len=1024, max_num_batched_tokens=10**5)
        super().__init__(asynchronous=True, num_drafts=4, **sizes)
        self.scheduler.settings.step_cost, self.scheduler.settings.disable_by_batch_size = cost, 64
        self.cost, self.random, self.rate, self.time, self.num_wide = cost, random.Random(seed), 0.0, 0.0, 0

    def compute(self, step, token_id):
        n, arrays = step.num_decodes, Speculation.prepare(step)
        if arrays is None:
            self.time += (self.cost.of(n) + self.kept) * bool(n)
            return super().compute(step, token_id)
        step.tokens_per_row = 5  # as graphs have it
        self.num_wide += 1
        self.time += self.cost.of(n, 4) + self.kept + self.catch_up * (len(arrays["behind"]) > 0)
        is_wrong = lambda: self.random.random() >= self.rate
        counts = [1 + next((i for i in range(x - 1) if is_wrong()), x - 1) for x in step.num_reserved]
        counts += [1] * len(step.new_seqs)
        return StepResult([token_id] * 5 * len(counts), {}, counts)

    def generate(self, rate: float, num_seqs: int, num_tokens: int) -> float:
        """The time of so many tokens of each sequence, if drafts are right at a rate, relative to that without."""
        self.rate, self.time, self.num_wide = rate, 0.0, 0
        for i in range(num_seqs):
            self.add([2 + i % 40] * 100, max_tokens=1 + num_tokens, ignore_eos=True)
        while not self.scheduler.is_finished() or self.in_flight:
            self.step(prompts_first=True)
        return self.time / (self.cost.of(num_seqs) * num_tokens)


@pytest.mark.parametrize("size, drafts", pairs([(1, 6), (8, 3), (32, 1), (100, 1)], RATES_AND_COSTS), ids=str)
def test_wrong_drafts_cost_three_percent(size, drafts):
    """At most, from the first token on, and less later."""
    (num_seqs, num_engines), (rate, cost) = size, (drafts[0], COSTS[drafts[1]])
    engines = [TimedEngine(seed, cost) for seed in range(num_engines)]
    lengths = 256, 256, 900 if num_seqs < 100 else 300
    first, second, others = ([engine.generate(rate, num_seqs, n) for engine in engines] for n in lengths)
    assert 1.0 < mean(first) < 1.03 and mean(second) < 1.025 and mean(others) < 1.02


@pytest.mark.parametrize("num_seqs", [1, 8, 32])
def test_wrong_drafts_are_tried_less_and_less(num_seqs):
    engine = TimedEngine(0)
    num_wide = [engine.generate(0.0, num_seqs, 900) and engine.num_wide for _ in range(6)]
    assert 0 < sum(num_wide[3:]) < 0.8 * sum(num_wide[:3]) < 25, num_wide


@pytest.mark.parametrize(
    "num_seqs, rate, bound", [(1, 0.8, 0.45), (1, 0.6, 0.64), (8, 0.8, 0.48), (8, 0.5, 0.83), (32, 0.8, 0.6)]
)
def test_right_drafts_are_used(num_seqs, rate, bound):
    """Chance hardly stops those that pay."""
    assert mean(TimedEngine(seed).generate(rate, num_seqs, 400) for seed in range(12 // num_seqs + 2)) < bound


@pytest.mark.parametrize("num_seqs", [1, 8, 32])
def test_drafts_that_become_right_are_used(num_seqs):
    engine = TimedEngine(0)
    for _ in range(2):
        engine.generate(0.0, num_seqs, 60)
        assert engine.scheduler.is_losing and 0 < engine.num_wide < 20
        engine.generate(1.0, num_seqs, 900)
        assert not engine.scheduler.is_losing and engine.num_wide > 30


def test_a_sequence_whose_drafts_are_wrong_pauses(make_llm, small_model, monkeypatch):
    monkeypatch.setitem(PROPOSERS, "ngram", Wrong)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    settings = SETTINGS | dict(max_model_len=512)
    llm = make_llm(small_model, **settings, **drafting("ngram"))
    steps = []
    llm.core.on_step.append(lambda step, result: steps.append(step.tokens_per_row > 1))
    output = llm.generate("HAMLET", params, use_tqdm=False)[0]
    assert len(steps) > 180 and 5 < sum(steps) < 50
    first = steps.index(True)
    assert not all(steps[first : first + 20]) and any(steps[60:])
    # when drafts begin to be right, it soon drafts always
    prompt = output.prompt_token_ids
    monkeypatch.setattr(
        Wrong, "known", (*[7] * (len(prompt) + 100), *[*prompt, *output.outputs[0].token_ids][len(prompt) + 100 :])
    )
    del steps[:]
    again = llm.generate("HAMLET", params, use_tqdm=False)[0]
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    assert len(steps) < 160 and all(steps[-8:-2])


def test_a_sequence_without_drafts_waits_for_few_tokens(make_llm, small_model, monkeypatch):
    monkeypatch.setitem(PROPOSERS, "ngram", Silent)
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    llm = make_llm(small_model, **(SETTINGS | dict(max_model_len=256)), **drafting("ngram"))
    waits = []
    llm.core.on_step.append(lambda step, result: waits.extend(seq.waits_for_token for seq in step.sampled_seqs))
    output = llm.generate("HAMLET", params, use_tqdm=False)[0]
    llm.engine_thread.call(lambda: None)  # waits for the end of the last step, whose hooks follow its output
    assert len(waits) == 150 and 10 < sum(waits) < 30 and not any(waits[8:18])
    text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    monkeypatch.setattr(Silent, "known", tuple(text))
    del waits[:]
    again = llm.generate("HAMLET", params, use_tqdm=False)[0]  # each of its tokens is drafted
    assert again.outputs[0].token_ids == output.outputs[0].token_ids and len(waits) < 60


def test_pace():
    pace = Pace()
    for _ in range(4):
        assert not pace.pause
        pace.missed()
    assert pace.pause == 16
    pace = Pace()
    lengths = []
    for _ in range(8):
        num_steps = 0
        while not pace.pause:
            pace.accepted(0, 0.5)
            num_steps += 1
        lengths.append((num_steps, pace.pause))
        pace.pause = 0
    assert lengths == [(11, 16), *[(4, n) for n in (32, 64, 128, 256, 512, 512, 512)]]
    for _ in range(30):
        pace.accepted(2, 0.5)
    assert pace.next_pause == 16 and not pace.pause


def test_widths_that_pay():
    """A lone sequence drafts if half a token is right; of many, most must have some."""
    width_that_pays = partial(find_width, cost=ON_CPU)
    assert width_that_pays([], 1) == width_that_pays([(4, 0.5)], 1) == 0
    assert width_that_pays([(4, 1.5)], 1) == 4 and width_that_pays([(4, 4.0), (2, 2.0)], 2) == 4
    assert width_that_pays([(4, 3.0)], 8) == width_that_pays([(4, 0.7)] * 8, 8) == 0
    assert width_that_pays([(4, 3.0)] * 8, 8) == 4
    assert width_that_pays([(2, 2.0)] * 7 + [(20, 3.0)], 8) == 2
    # rows of a graph are as wide for one draft as for four, and four take 0.8 of a step to draft
    width_that_pays = partial(find_width, cost=StepCost((1, 8, 64), (144, 168, 224), (293, 328, 608)))
    assert width_that_pays([(4, 0.9)], 1) == width_that_pays([(1, 1.0)], 1) == 0
    assert width_that_pays([(4, 1.2)] * 8, 8) == width_that_pays([(1, 1.0), *[(4, 1.2)] * 7], 8) == 4
    assert width_that_pays([(4, 1.1)] * 64, 64) == 0 and width_that_pays([(4, 2.0)] * 64, 64) == 4


def test_large_batches_do_not_draft(make_llm, small_model):
    """Nor does any sequence wait for its tokens then."""
    llm = make_llm(small_model, **SETTINGS, **drafting("ngram", disable_by_batch_size=3), async_scheduling=True)
    prompts = [[5, 6, 7, 8] * 4] * 6
    repeated = dict(temperature=0.0, ignore_eos=True, allowed_token_ids=[5, 6])  # so that there are drafts
    params = [SamplingParams(max_tokens=n, **repeated) for n in (20, 20, 20, 40, 60, 60)]
    steps = []
    llm.core.on_step.append(lambda step, result: steps.append((len(step.sampled_seqs), step.tokens_per_row)))
    plain = make_llm(small_model, **SETTINGS)
    expected = [[*x.outputs[0].token_ids] for x in plain.generate(prompts, params, use_tqdm=False)]
    assert [[*x.outputs[0].token_ids] for x in llm.generate(prompts, params, use_tqdm=False)] == expected
    assert all(k == 1 for num_seqs, k in steps if num_seqs > 3) and any(k > 1 for _, k in steps)
    assert len([k for num_seqs, k in steps if num_seqs > 3]) <= 21


# -- what is drafted ---------------------------------------------------------------------------------------------------


def brute_force_context(text: bytes) -> bytes:
    """The longest suffix that has occurred before, and was continued."""
    return next((text[start:] for start in range(len(text)) if text.find(text[start:]) < start), b"")


@pytest.mark.parametrize("seed", range(20))
def test_suffix_automaton(seed):
    rng = random.Random(seed)
    automaton, state, text = SuffixAutomaton(), ROOT, b""
    for _ in range(120):
        text += bytes([rng.choice([1, 2, 3][: rng.randint(1, 3)])])
        state = automaton.extend(state, text[-1])
        found, length = automaton.context(state, automaton.lengths[state], 1000)
        assert length == len(brute_force_context(text))
        if length:
            drafts = automaton.draft(found, 5, 0.0)
            assert drafts and text[len(text) - length :] + bytes(drafts) in text
    assert len(automaton.links) <= 2 * len(text)


def test_suffixes_of_several_texts():
    """Each is followed on its own; the most frequent continuation wins, as far as it is likely."""
    automaton = SuffixAutomaton()
    states = [ROOT] * 4
    texts = [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [9, 2, 3, 4, 6], [8, 2, 3]
    for i in range(5):
        states = [automaton.extend(s, text[i]) if i < len(text) else s for s, text in zip(states, texts)]
    state, length = automaton.context(states[3], 3, 24)
    assert length == 2 and automaton.draft(state, 9, 0.1) == [4, 6] and automaton.draft(state, 9, 0.9) == [4]
    assert automaton.context(states[3], 3, 1)[1] == 1
    state, length = ROOT, 0
    for token_id in (7, 3, 4):
        state, length = automaton.follow(state, length, token_id)
    assert length == 2 and automaton.draft(state, 1, 0.1) == [6]


def test_suffixes_of_earlier_answers(make_llm, small_model, monkeypatch):
    """Later requests draft from them, but not with another salt; old ones are forgotten."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    llm = make_llm(small_model, **SETTINGS, **drafting("suffix"))

    def num_accepted(prompt: list[int], salt: int = 0) -> int:
        before = accepted(llm)[0]
        with monkeypatch.context() as salted:
            salted.setattr(Sequence, "cache_salt", salt, raising=False)
            salted.setattr(Sequence, "__setattr__", lambda seq, *x: x[0] == "cache_salt" or object.__setattr__(seq, *x))
            llm.generate([prompt], params, use_tqdm=False)
        return accepted(llm)[0] - before

    prompt = [100, 200, 300]
    alone = num_accepted(prompt)
    assert num_accepted(prompt) > alone + 15
    assert num_accepted(prompt, salt=9) == alone
    monkeypatch.setattr(suffix, "MAX_TOKENS", 50)
    for i in range(2):
        num_accepted([1000 + i])
    assert num_accepted(prompt) == alone
    llm.exit()
    llm = make_llm(small_model, **SETTINGS, **drafting("suffix", suffix_decoding_max_cached_requests=0))
    assert num_accepted(prompt) == num_accepted(prompt) == alone


def test_acceptance_can_be_imposed(make_llm, small_model):
    """To measure speed with a model that would accept few drafts."""
    rates = [0.8, 0.64, 0.5, 0.0]
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    llm = make_llm(small_model, **SETTINGS, **drafting("ngram", **synthetic))
    params = SamplingParams(temperature=1.0, max_tokens=110, ignore_eos=True)
    llm.generate([[i, i + 1] for i in range(5, 25)], params, use_tqdm=False)
    stats = llm.stats()["spec_decode"]
    found = [n / stats["drafts"] for n in stats["accepted_per_position"]]
    assert found == pytest.approx(rates, abs=0.06) and stats["drafts"] > 500


# -- settings ----------------------------------------------------------------------------------------------------------

REFUSED = [
    ({"method": "ngram"}, "num_speculative_tokens=None: must be given"),
    (
        {"method": "n-gram", "num_speculative_tokens": 2},
        "method='n-gram': must be one of 'ngram', 'suffix', 'draft_model', 'eagle3', 'mtp'",
    ),
    ({"method": "eagle3", "num_speculative_tokens": 2}, "model=None: must be given for method 'eagle3'"),
    ({"method": "medusa", "num_speculative_tokens": 2}, "method='medusa': must be one of 'ngram', 'suffix'"),
    ({"method": "mtp", "num_speculative_tokens": 2, "model": "x"}, "is only for method 'draft_model', 'eagle3'"),
    ({"num_speculative_tokens": 2}, "method=None: must be one of"),
    ({"method": "ngram", "num_speculative_tokens": 16}, "less than kvcache_block_size=16,=16: must be at most 15"),
    ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0: must be at least 1"),
    ({"method": "ngram", "num_speculative_tokens": 2.5}, "num_speculative_tokens=2.5: must be an integer"),
    ({"method": "ngram", "num_speculative_tokens": 2, "lookup": 3}, "unknown key 'lookup': must be one of method, "),
    ({"method": "suffix", "prompt_lookup_max": 3}, "prompt_lookup_max=3: is only for method 'ngram'"),
    (
        {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 3, "prompt_lookup_max": 2},
        "must be at most 2",
    ),
    ({"method": "draft_model", "num_speculative_tokens": 2}, "model=None: must be given"),
    ({"model": "no-such-model/here", "num_speculative_tokens": 2}, "no-such-model"),
    ({"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"}, "must be given with"),
    ({"method": "ngram", "num_speculative_tokens": 2, "synthetic_acceptance_rates": [1, 0]}, "must be given with"),
    ("{", "is not JSON"),
    ([], "must be a dict"),
]


@pytest.mark.parametrize("given, message", REFUSED)
def test_refused_settings(given, message):
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match="speculative_config") as raised:
        LLM(TINY, device="cpu", kvcache_block_size=16, speculative_config=given)
    assert message in str(raised.value)


def test_another_vocabulary(tmp_path):
    """It is seen before any weight is read: there is none."""
    small = make_checkpoint(tmp_path / "small", "llama")
    (tmp_path / "small" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="has a vocabulary of 512 ids; must have 2,048, as .*tiny-qwen3"):
        LLM(TINY, device="cpu", speculative_config={"model": small, "num_speculative_tokens": 2})
    other = tmp_path / "other"
    shutil.copytree(TINY, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [*vocabulary][300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="its tokenizer has another vocabulary"):
        LLM(TINY, device="cpu", speculative_config={"model": str(other), "num_speculative_tokens": 2})


def test_metrics():
    """Of two engines, the sums; what another engine says has none."""
    Metrics = pytest.importorskip("nanovllm.serve.metrics", exc_type=ImportError).Metrics
    drafts = {"drafts": 4, "draft_tokens": 8, "accepted_tokens": 5, "accepted_per_position": [3, 2]}
    stats = stats_of(Scheduler(Config(TINY, device="cpu", num_kvcache_blocks=4)))
    metrics = Metrics(SimpleNamespace(on_end=[], num_unfinished=0, engine=None), "tiny-qwen3")
    for found in ([stats], [stats | {"spec_decode": drafts}, stats | {"spec_decode": drafts}]):
        metrics._stats = found
        samples = [x for family in metrics.collect() for x in family.samples if "vllm:spec" in x.name]
    values = {(sample.name, sample.labels.get("position")): sample.value for sample in samples}
    name = "vllm:spec_decode_num"
    assert values == {
        (f"{name}_drafts_total", None): 8,
        (f"{name}_draft_tokens_total", None): 16,
        (f"{name}_accepted_tokens_total", None): 10,
        (f"{name}_accepted_tokens_per_pos_total", "0"): 6,
        (f"{name}_accepted_tokens_per_pos_total", "1"): 4,
    }
