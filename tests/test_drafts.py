"""Rows of several tokens: whatever is drafted, the text is the same, and right drafts save steps."""

import random
from dataclasses import replace

import pytest
from common import generate_by_steps

from nanovllm import BeamSearchParams, SamplingParams
from nanovllm.cuda.start import dummy_prefill
from nanovllm.spec_decode.proposer import PROPOSERS, Proposer

pytestmark = pytest.mark.small_model

NUM_DRAFTS = 3
PROMPT_LENGTHS = 1, 3, 15, 16, 17, 20, 31, 33
SHORT_PROMPTS = 1, 3, 14
KINDS = ("right", "wrong", "mixed")


class KnownAnswers(Proposer):
    """Drafts what follows a sequence's tokens in `texts`, or something else than that, as `kind` says."""

    kind = "right"
    texts: tuple[list[int], ...] = ()
    vocab_size = 2045

    def __init__(self, settings):
        super().__init__(settings)
        self.random = random.Random(0)

    def draft(self, seq, num_drafts):
        token_ids = seq.token_ids
        known = [text for text in self.texts if text[: len(token_ids)] == token_ids]
        right = (self.random.choice(known)[len(token_ids) :] if known else []) + [0] * num_drafts
        is_right = [self.kind == "right" or (self.kind == "mixed" and self.random.random() < 0.6) for _ in right]
        other = lambda x: self.random.choice([(x + 1) % self.vocab_size, -1])  # -1 is no draft
        return [x if ok else other(x) for x, ok in zip(right, is_right)][:num_drafts]


def prompts_of(rng: random.Random, lengths: tuple[int, ...]) -> list[list[int]]:
    shared = [rng.randrange(5, 2000) for _ in range(max(lengths))]
    own = lambda: [rng.randrange(5, 2000) for _ in range(rng.choice(lengths))]
    return [shared[: rng.choice(lengths)] if rng.random() < 0.3 else own() for _ in range(16)]


def params_of(rng: random.Random, i: int) -> SamplingParams:
    options = dict(max_tokens=rng.choice([1, 2, 40, rng.randint(3, 60)]), seed=i, ignore_eos=rng.random() < 0.5)
    return rng.choice(
        [
            SamplingParams(temperature=0.0, **options),
            SamplingParams(temperature=1.0, top_p=0.9, **options),
            SamplingParams(temperature=0.8, n=3, **options),
            SamplingParams(temperature=0.7, presence_penalty=1.0, repetition_penalty=1.1, min_tokens=1, **options),
            SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1, **options),
            SamplingParams(temperature=0.0, stop=["e", "the "], **options),
            SamplingParams(temperature=1.0, stop_token_ids=[*range(0, 2000, 40)], **options),
            SamplingParams(temperature=0.0, bad_words=["the"], logit_bias={17: 2.0}, **options),
        ]
    )


def answers(outputs) -> list:
    return [
        (
            [(a.token_ids, a.text, a.finish_reason, a.stop_reason, ranks_of(a.logprobs)) for a in output.outputs],
            ranks_of(output.prompt_logprobs),
        )
        for output in outputs
    ]


def ranks_of(logprobs) -> list | None:
    return logprobs and [x and {i: (y.rank, y.decoded_token) for i, y in x.items()} for x in logprobs]


@pytest.fixture
def drafts(monkeypatch):
    """Settings of an engine that drafts, with KnownAnswers of a kind."""
    monkeypatch.setitem(PROPOSERS, "ngram", KnownAnswers)
    monkeypatch.setattr(KnownAnswers, "texts", ())

    def use(kind: str, num_drafts: int = NUM_DRAFTS) -> dict:
        monkeypatch.setattr(KnownAnswers, "kind", kind)
        return {"speculative_config": {"method": "ngram", "num_speculative_tokens": num_drafts}}

    return use


SETTINGS = dict(max_model_len=96, kvcache_block_size=16, num_kvcache_blocks=64, max_num_seqs=8, dtype="float32")
SCHEDULES = {
    "at once": {},
    "chunks": dict(max_num_batched_tokens=24, max_num_mixed_tokens=16),
    "preemptions": dict(num_kvcache_blocks=8),
    "one at a time": dict(max_num_seqs=1, num_kvcache_blocks=4),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_text_is_the_same(make_llm, monkeypatch, drafts, schedule):
    """Of two schedules, each kind of drafts runs once with async scheduling and once without."""
    rng, order = random.Random(schedule), [*SCHEDULES].index(schedule)
    prompts = prompts_of(rng, SHORT_PROMPTS if schedule == "preemptions" else PROMPT_LENGTHS)[:10]
    params = [replace(x, max_tokens=min(x.max_tokens, 40)) for x in (params_of(rng, i) for i in range(len(prompts)))]
    if schedule == "one at a time":
        prompts, params = prompts[:6], params[:6]
    settings = SETTINGS | SCHEDULES[schedule]
    llm = make_llm(**settings, async_scheduling=order % 2 == 1)
    expected = llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats()["preemptions"] > 0 or schedule != "preemptions"
    num_steps = {"without": sum(llm.stats()["steps"].values())}
    llm.exit()
    texts = tuple([*output.prompt_token_ids, *a.token_ids] for output in expected for a in output.outputs)
    monkeypatch.setattr(KnownAnswers, "texts", texts)
    for i, kind in enumerate(KINDS, order):
        llm = make_llm(**settings, **drafts(kind), async_scheduling=i % 2 == 0)
        if kind == "mixed":  # beside chunks of other prompts
            assert answers(generate_by_steps(llm, zip(prompts, params))) == answers(expected)
        else:
            assert answers(llm.generate(prompts, params, use_tqdm=False)) == answers(expected)
        stats = llm.stats()
        assert stats["tokens"]["out"] == sum(len(a.token_ids) for output in expected for a in output.outputs)
        assert stats["blocks"]["used"] == 0
        num_steps[kind] = sum(stats["steps"].values())
        llm.exit()
    assert num_steps["right"] < 0.6 * num_steps["without"] and num_steps["right"] < num_steps["wrong"], num_steps


def test_sequences_that_draft_share_steps(make_llm, drafts):
    """Those that begin to draft while a step is in flight would else be in every other step from then on."""
    prompts = [[50 + i] * 20 for i in range(8)]
    requests = [(prompt, SamplingParams(temperature=0.0, max_tokens=36, ignore_eos=True)) for prompt in prompts]
    outputs = generate_by_steps(make_llm(**SETTINGS), requests)
    KnownAnswers.texts = tuple([*x.prompt_token_ids, *x.outputs[0].token_ids] for x in outputs)
    num_steps = []
    for async_scheduling in (False, True):
        bounds = dict(max_num_batched_tokens=24, max_num_mixed_tokens=24)  # prompts come in turn
        llm = make_llm(**SETTINGS | bounds, async_scheduling=async_scheduling, **drafts("right", num_drafts=1))
        generate_by_steps(llm, requests)
        num_steps.append(sum(llm.stats()["steps"].values()))
    assert num_steps[1] < 1.2 * num_steps[0], num_steps


def test_streams(make_llm, drafts):
    """Several tokens, their text and their log-probabilities in an event."""
    rng = random.Random(0)
    prompts = prompts_of(rng, PROMPT_LENGTHS)[:6]
    params = [SamplingParams(temperature=0.0, max_tokens=20, logprobs=1, ignore_eos=True, stop=["zz"])] * len(prompts)
    llm = make_llm(**SETTINGS, async_scheduling=True, **drafts("right"))
    expected = llm.generate(prompts, params, use_tqdm=False)
    KnownAnswers.texts = tuple([*output.prompt_token_ids, *output.outputs[0].token_ids] for output in expected)
    texts, logprobs, sizes = [""] * len(prompts), [[] for _ in prompts], set()
    for event in llm.stream(prompts, params):
        texts[event.index] += event.text
        logprobs[event.index] += event.logprobs
        sizes.add(len(event.token_ids))
    assert texts == [output.outputs[0].text for output in expected]
    assert list(map(ranks_of, logprobs)) == [ranks_of(output.outputs[0].logprobs) for output in expected]
    assert sizes >= {1, 4}


def test_aborted_and_late_requests(make_llm, drafts):
    """Requests come and go while steps are in flight, and the others' answers stay what they are."""
    rng = random.Random(1)
    prompts = prompts_of(rng, SHORT_PROMPTS)
    params = [params_of(rng, i) for i in range(len(prompts))]
    llm = make_llm(**SETTINGS | dict(num_kvcache_blocks=8, async_scheduling=True), **drafts("mixed"))
    expected = llm.generate(prompts, params, use_tqdm=False)
    KnownAnswers.texts = tuple([*x.prompt_token_ids, *a.token_ids] for x in expected for a in x.outputs)
    found, pending, live = {}, list(range(len(prompts))), {}
    while pending or live:
        if pending and rng.random() < 0.5:
            i = pending.pop(0)
            live[llm.add_request(prompts[i], params[i])] = i
        if live and rng.random() < 0.05:
            llm.abort(victim := rng.choice([*live]))
            del live[victim]
        found |= {live.pop(x.request_id): x for x in llm.step().finished if x.request_id in live}
    assert len(found) < len(prompts)
    assert answers(found.values()) == answers(expected[i] for i in found)
    assert llm.stats()["blocks"]["used"] == 0


def test_beams_get_one_token_after_the_other(make_llm, drafts):
    search = lambda llm: [[beam.token_ids for beam in x.outputs] for x in llm.beam_search(prompts, params)]
    prompts, params = [[5, 6, 7], [8, 9]], BeamSearchParams(3, 8)
    expected = search(make_llm(**SETTINGS))
    assert search(make_llm(**SETTINGS, async_scheduling=True, **drafts("right"))) == expected


@pytest.mark.parametrize("num_seqs", [1, 2, 8])
def test_steps_of_the_start(make_llm, drafts, num_seqs):
    """CUDA warms up with these."""
    runner = make_llm(**SETTINGS, **drafts("right")).model_runner
    result = runner.run(dummy_prefill(num_seqs, 5, 16, runner.config.tokens_per_row)).wait()
    assert result.counts == [1] * num_seqs and len(result.token_ids) == num_seqs * (1 + NUM_DRAFTS)
