"""Features of a step: some that are registered from outside, and what the seam promises."""

import sys
from dataclasses import dataclass
from itertools import takewhile
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.engine.features import FEATURES, Feature, StepFeature
from nanovllm.features import register_feature
from nanovllm.features.logit_edits import TokenMask, mask_of
from nanovllm.kernels.sampling.sampling_columns import COLUMNS, MAX_CUSTOM_COLUMNS

pytestmark = pytest.mark.small_model


@dataclass(frozen=True, kw_only=True)
class Params(SamplingParams):
    top_n_sigma: float = 0.0


class TopNSigma(StepFeature):
    """Keep the tokens whose logits are at most n standard deviations below the largest; n = 0 keeps all."""

    fields = ("top_n_sigma",)

    def edit_logits(self, logits, rows):
        x, n = logits.float(), rows.column("top_n_sigma")
        cutoff = x.amax(1) - n * x.std(1)
        logits.masked_fill_((x < cutoff[:, None]) & (n > 0)[:, None], -torch.inf)


class CountTokens(StepFeature):
    """A feature on the host: it counts tokens, and ends a sequence after so many."""

    fields = ("max_counted",)
    seen: ClassVar[list[int]] = []

    @classmethod
    def attach(cls, request, processor):
        if request.params.max_counted < 0:
            raise ValueError(f"max_counted={request.params.max_counted}: must be at least 0")
        for seq in request.group:
            seq.feature_state["CountTokens"], seq.is_watched = [], True

    @classmethod
    def after_step(cls, step, arrived, ends, result):
        for seq in arrived.values():
            if (counted := seq.feature_state.get("CountTokens")) is not None:
                counted.append(seq.last_token)
                if len(counted) == seq.params.max_counted:
                    ends[seq] = "stop", "counted"
                cls.seen = counted


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_top_n_sigma(make_llm, chat, async_scheduling):
    prompts = [chat("Who wrote this?"), chat("What is it?"), chat("Why?")]
    options = dict(max_tokens=12, ignore_eos=True, seed=7)
    ids = lambda llm, params: [answer["token_ids"] for answer in llm.generate(prompts, params, use_tqdm=False)]
    without = make_llm(async_scheduling=async_scheduling)
    greedy = ids(without, SamplingParams(temperature=0.0, **options))
    random = ids(without, SamplingParams(temperature=5.0, **options))
    register_feature(TopNSigma)
    llm = make_llm(async_scheduling=async_scheduling)
    assert ids(llm, SamplingParams(temperature=5.0, **options)) == random != greedy
    assert ids(llm, Params(temperature=5.0, top_n_sigma=1e-3, **options)) == greedy
    assert ids(llm, Params(temperature=5.0, **options)) == random
    assert ids(without, Params(temperature=5.0, top_n_sigma=1e-3, **options)) == random, "it was made before"
    mixed = [Params(temperature=5.0, top_n_sigma=n, **options) for n in (1e-3, 0.0, 1e-3)]
    assert ids(llm, mixed) == [greedy[0], random[1], greedy[2]]


def test_feature_of_the_table(make_llm, monkeypatch):
    """One that edits logits and has nothing on the host is loaded by its first request, as those of the package are."""
    home = SimpleNamespace(TopNSigma=TopNSigma)
    monkeypatch.setitem(sys.modules, "nanovllm.features.top_n_sigma", home)
    monkeypatch.setitem(FEATURES, "top_n_sigma", Feature("features.top_n_sigma:TopNSigma", {"top_n_sigma": 0.0}))
    COLUMNS["top_n_sigma"] = float
    llm = make_llm(async_scheduling=True)
    ids = lambda params: [output.token_ids for output in llm.generate([[5, 6, 7]] * 2, params, use_tqdm=False)]
    random = SamplingParams(temperature=5.0, max_tokens=8, seed=7)
    greedy, noise = ids(SamplingParams(temperature=0.0, max_tokens=8)), ids(random)
    assert not llm.model_runner.features
    assert ids([Params(temperature=5.0, max_tokens=8, seed=7, top_n_sigma=1e-3), random]) == [greedy[0], noise[1]]
    assert [*llm.model_runner.features] == ["top_n_sigma"] and greedy != noise


@dataclass(frozen=True, kw_only=True)
class Counting(SamplingParams):
    max_counted: int = 0


def test_feature_on_the_host(make_llm):
    """It sees each token once, also after preemptions and beside others, and ends its own sequence alone."""
    register_feature(CountTokens)
    llm = make_llm(async_scheduling=True)
    options = dict(max_tokens=12, ignore_eos=True, temperature=0.0)
    plain, counted = llm.generate([[5, 6, 7]] * 2, [SamplingParams(**options), Counting(max_counted=7, **options)])
    assert counted.token_ids == plain.token_ids[:7] == CountTokens.seen
    assert (counted.outputs[0].stop_reason, plain.finish_reason) == ("counted", "length")
    llm.add_request([5, 6, 7], Counting(max_counted=9, **options))
    while not llm.is_finished():
        llm.step()
        llm.engine_thread.call(lambda: [*map(llm.scheduler.preempt, [*llm.scheduler.running.values()])])
    assert CountTokens.seen == plain.token_ids[:9] and llm.stats()["preemptions"] > 3
    with pytest.raises(ValueError, match="max_counted=-1"):
        llm.generate([[5]], Counting(max_counted=-1))


@dataclass(frozen=True, kw_only=True)
class Residual(SamplingParams):
    modulus: int = 0
    only_even: int = 0


class ResidueMask(TokenMask):
    def __init__(self, seq, modulus, vocab_size):
        super().__init__(seq, vocab_size)
        self.masks = [mask_of(range(i, vocab_size, modulus), vocab_size) & self.allowed_mask for i in range(modulus)]
        self.advance(0)

    def advance(self, num_tokens):
        self.num_tokens, self.next_mask = num_tokens, self.masks[num_tokens % len(self.masks)]

    def draft(self, drafts, num_drafts):
        masks = [self.masks[(self.num_tokens + i) % len(self.masks)] for i in range(len(drafts) + 1)]
        is_allowed = lambda pair: pair[0] >= 0 and pair[1][pair[0] // 32] >> pair[0] % 32 & 1
        kept = [token_id for token_id, _ in takewhile(is_allowed, zip(drafts, masks))]
        self.draft_masks = masks[1 : len(kept) + 1]
        return kept


class Residues(StepFeature):
    """Token i of an answer has an id that is i modulo the field's value."""

    fields = ("modulus",)
    masks_tokens = True

    @classmethod
    def attach(cls, request, processor):
        for seq in request.group:
            modulus = getattr(seq.params, cls.fields[0])
            seq.token_mask = ResidueMask(seq, modulus, processor.config.model_config.vocab_size)
            seq.waits_for_token = True

    @classmethod
    def after_step(cls, step, arrived, ends, result):
        for seq in arrived.values():
            if isinstance(seq.token_mask, ResidueMask):
                seq.token_mask.advance(seq.num_completion_tokens)


class EvenIds(StepFeature):
    """Its mask never changes, so its sequences do not wait for their tokens."""

    fields = ("only_even",)
    masks_tokens = True

    @classmethod
    def attach(cls, request, processor):
        vocab_size = processor.config.model_config.vocab_size
        for seq in request.group:
            seq.token_mask = mask = TokenMask(seq, vocab_size)
            mask.next_mask = mask.allowed_mask & mask_of(range(0, vocab_size, 2), vocab_size)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
FEW = [*range(300, 309), 402]
MASKED = {
    "plain": {},
    "edits": dict(logit_bias={303: 3.0, 304: 5.0, 900: 9.0}, bad_words=["the", "e"]),
    "allowed": dict(allowed_token_ids=FEW),
    "drafted": dict(allowed_token_ids=FEW, logit_bias={300: 20.0, 304: 20.0, 308: 20.0}),
}


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_feature_that_masks_tokens(make_llm, async_scheduling, drafts):
    """It works with other edits, drafts, several answers and log-probabilities, and leaves other requests alone."""
    register_feature(Residues)
    llm = make_llm(async_scheduling=async_scheduling, **(dict(speculative_config=NGRAM) if drafts else {}))
    prompt, greedy = [5, 6, 7, 300, 304, 5, 6], dict(temperature=0.0, ignore_eos=True, logprobs=0)
    outputs = llm.generate(
        [prompt] * (len(MASKED) + 1),
        [*(Residual(modulus=3, max_tokens=12, **greedy, **x) for x in MASKED.values()), SamplingParams(**greedy)],
        use_tqdm=False,
    )
    plain = make_llm()
    for options, output in zip(MASKED.values(), outputs):
        token_ids, logprob = [], 0.0
        for i in range(12):
            allowed = options.get("allowed_token_ids", range(plain.config.model_config.vocab_size))
            own = {**options, "allowed_token_ids": [x for x in allowed if x % 3 == i % 3]}
            params = SamplingParams(max_tokens=1, **greedy, **own)
            (answer,) = plain.generate([prompt + token_ids], params, use_tqdm=False)[0].outputs
            token_ids, logprob = token_ids + answer.token_ids, logprob + answer.cumulative_logprob
        assert output.token_ids == token_ids
        assert output.outputs[0].cumulative_logprob == pytest.approx(logprob, abs=1e-3), "they are the model's own"
    assert outputs[-1].token_ids == plain.generate([prompt], SamplingParams(**greedy), use_tqdm=False)[0].token_ids
    if drafts:
        assert llm.stats()["spec_decode"]["accepted_tokens"] > 5
    sampled = Residual(modulus=4, max_tokens=9, n=3, temperature=2.0, seed=5, ignore_eos=True)
    answers = [x.token_ids for x in llm.generate([prompt], sampled, use_tqdm=False)[0].outputs]
    assert all([x % 4 for x in ids] == [0, 1, 2, 3, 0, 1, 2, 3, 0] for ids in answers) and answers[0] != answers[1]


@pytest.mark.parametrize("drafts", [False, True])
def test_a_mask_that_stays(make_llm, drafts):
    """It needs no code for tokens or drafts."""
    register_feature(EvenIds)
    llm = make_llm(async_scheduling=True, **(dict(speculative_config=NGRAM) if drafts else {}))
    options = dict(temperature=0.0, max_tokens=12, ignore_eos=True)
    even = [*range(0, llm.config.model_config.vocab_size, 2)]
    params = [Residual(only_even=1, **options), SamplingParams(**options)]
    params.append(SamplingParams(allowed_token_ids=even, **options))
    masked, plain, expected = (x.token_ids for x in llm.generate([[5, 6, 7]] * 3, params, use_tqdm=False))
    assert masked == expected != plain


def test_a_request_has_one_token_mask(make_llm):
    register_feature(Residues)
    register_feature(EvenIds)
    register_feature(type("Incomplete", (Residues,), dict(fields=("max_counted",), masks_tokens=False)))
    llm = make_llm()
    with pytest.raises(ValueError, match="ResidueMask and TokenMask: only one"):
        llm.generate([[5, 6]], Residual(modulus=2, only_even=1), use_tqdm=False)
    with pytest.raises(ValueError, match="ResidueMask: .* must set masks_tokens"):
        llm.generate([[5, 6]], Counting(max_counted=2), use_tqdm=False)


@dataclass(frozen=True, kw_only=True)
class Waiting(SamplingParams):
    max_counted: float = 1.0


def test_feature_that_keeps_nothing(make_llm):
    """Its hooks are called though, and a sequence that waits for its tokens goes on after each."""
    calls = []

    class Waits(StepFeature):
        fields = ("max_counted", "another")

        @classmethod
        def attach(cls, request, processor):
            super().attach(request, processor)
            for seq in request.group:
                seq.waits_for_token = True

        @classmethod
        def prepare(cls, step):
            calls.append(("prepare", len(step.sampled_seqs)))

        @classmethod
        def after_step(cls, step, arrived, ends, result):
            calls.append(("after_step", *arrived))
            if len(calls) == 2:  # as another thread may at any time: it is for other engines
                register_feature(TopNSigma)

    register_feature(Waits)
    llm = make_llm(async_scheduling=True)
    options = dict(max_tokens=3, ignore_eos=True, temperature=0.0)
    plain, counted = (llm.generate([[5, 6]], x(**options), use_tqdm=False)[0] for x in (SamplingParams, Waiting))
    assert counted.token_ids == plain.token_ids
    assert calls == [("prepare", 1), ("after_step", 0)] * 3
    for value, error in (("x", ValueError), (None, TypeError)):  # of its caller alone
        with pytest.raises(error):
            llm.generate([[5, 6]], Waiting(max_counted=value), use_tqdm=False)


def test_plain_requests_carry_nothing(make_llm):
    """Neither their sequences nor the batches of their steps know of any feature, and no feature was loaded."""
    llm = make_llm()
    steps = []
    llm.core.on_step.append(lambda step, result: steps.append((step, result)))
    llm.generate([[5, 6], [7]], SamplingParams(max_tokens=5, top_k=5, top_p=0.9, min_p=0.01, seed=1), use_tqdm=False)
    assert llm.stats()["steps"]["decode"] == 4  # asked between two steps: the observer has seen the last one
    assert len(steps) == 5 and not llm.model_runner.features
    for step, result in steps:
        assert not (step.feature_names or step.watched or result.feature_results)
        assert not any(seq.feature_state or seq.columns for seq in step.sampled_seqs)
    llm.generate([[5, 6]], SamplingParams(max_tokens=2, stop_token_ids=[7], min_tokens=1), use_tqdm=False)
    assert [*llm.model_runner.features] == ["logit_edits"]
    llm.generate([[5, 6]], SamplingParams(max_tokens=2, logprobs=0), use_tqdm=False)
    assert [*llm.model_runner.features] == ["logit_edits", "logprobs"]


def test_every_field_has_the_default_of_its_parameter():
    for feature in FEATURES.values():
        assert not feature.is_asked_for(SamplingParams()) and feature.load().__mro__[1] is StepFeature
        assert not feature.load().masks_tokens or {*feature.defaults} <= {*FEATURES["logit_edits"].defaults}


def test_names_and_numbers_are_checked():
    make = lambda name: type(name, (StepFeature,), {"fields": (name,)})
    for name in ("top_k", "max_tokens", "num_biases"):
        with pytest.raises(ValueError, match=f"'{name}': a sampling parameter"):
            register_feature(make(name))
    for i in range(MAX_CUSTOM_COLUMNS):
        register_feature(make(f"feature_{i}"))
    with pytest.raises(ValueError, match="'feature_1': another feature"):
        register_feature(make("feature_1"))
    with pytest.raises(ValueError, match="one_more.*4 columns"):
        register_feature(make("one_more"))


def test_registered_features_need_one_rank(make_llm):
    register_feature(TopNSigma)
    with pytest.raises(ValueError, match="tensor_parallel_size=2: must be 1 with registered features"):
        make_llm(tensor_parallel_size=2)


def test_steps_of_plain_requests_edit_no_logits(make_llm, monkeypatch):
    """Also after a request that had a feature; beside one, they do."""
    llm, calls = make_llm(), []
    plain, penalized = SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, presence_penalty=1.0)
    llm.generate([[5, 6]], penalized, use_tqdm=False)
    edit_logits = type(llm.model_runner).edit_logits
    spy = lambda runner, logits, rows: calls.append(len(logits)) or edit_logits(runner, logits, rows)
    monkeypatch.setattr(type(llm.model_runner), "edit_logits", spy)
    llm.generate([[5, 6]], plain, use_tqdm=False)
    assert not calls
    llm.generate([[5, 6], [7, 8]], [plain, penalized], use_tqdm=False)
    assert calls[0] == 2
