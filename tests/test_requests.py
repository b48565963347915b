"""What requests ask of the sampler, through the engine: the same whatever becomes of them on the way."""

import random
from functools import cache

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM, RepetitionPenaltyLogitsProcessor

from nanovllm import SamplingParams
from nanovllm.engine.sequence import Sequence
from nanovllm.features.logit_edits import bad_word_token_ids, check_edits
from nanovllm.features.logprobs import StepLogprobs, TokenLogprobs, unpack

pytestmark = pytest.mark.small_model

WORLDS = {
    "defaults": {},
    "chunks": {"max_num_batched_tokens": 20, "kvcache_block_size": 16},
    "few blocks": {"num_kvcache_blocks": 16, "kvcache_block_size": 16, "enable_prefix_caching": False},
    "few blocks and prefixes": {"num_kvcache_blocks": 16, "kvcache_block_size": 16},
}
EOS = 2047

# both ways to schedule where blocks run out, and one of them elsewhere
each_world = pytest.mark.parametrize(
    "world, async_scheduling",
    [
        ("defaults", True),
        ("chunks", False),
        ("few blocks", False),
        ("few blocks", True),
        ("few blocks and prefixes", True),
    ],
)
both_ways = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


@pytest.fixture(scope="module")
def model(model_name):
    return Qwen3ForCausalLM.from_pretrained(model_name, torch_dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def logprobs_of(model):
    """A function from token ids to the log-probabilities of what follows each."""
    return cache(lambda *ids: model(torch.tensor([ids])).logits[0].log_softmax(-1))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of many lengths; some begin with the same two blocks."""
    rng = random.Random(0)
    ids = lambda n: [rng.randrange(256, 2040) for _ in range(n)]
    prefix = ids(32)
    return [
        prefix + ids(7),
        ids(1),
        ids(70),
        prefix + ids(3),
        ids(33),
        prefix + ids(30),
        ids(16),
        ids(12),
        ids(20),
        ids(5),
    ]


def watch(llm) -> dict:
    """All log-probabilities that the engine delivers, by request and position of the token."""
    seen: dict = {}

    def record(step, result) -> None:
        found = result.feature_results.get("logprobs", StepLogprobs([], []))
        for seq, row, logprobs in zip(step.sampled_seqs, step.sampled_rows, found.of_tokens):
            seen[seq.request_id, step.rows[row].end] = logprobs and unpack(logprobs)
        for row, prompt_logprobs in zip(step.chunks, found.of_prompts):
            seen.update(
                {(row.seq.request_id, row.start + 1 + i): unpack(x) for i, x in enumerate(prompt_logprobs or ())}
            )

    llm.core.on_step.append(record)
    return seen


@each_world
def test_logprobs(make_llm, logprobs_of, prompts, world, async_scheduling):
    """Of greedy answers and of prompts; a request that did not ask gets none."""
    llm = make_llm(**WORLDS[world], async_scheduling=async_scheduling)
    seen = watch(llm)
    asks = [(3, 2), (0, None), (None, 4), (20, 0), (1, 1), (None, None), (5, 5), (2, None), (9, None), (1, 7)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=most, prompt_logprobs=of_prompt)
        for most, of_prompt in asks
    ]
    answers = llm.generate(prompts, params, use_tqdm=False)
    assert llm.scheduler.num_preemptions > 0 or "few" not in world
    for request, ((most, of_prompt), prompt, answer) in enumerate(zip(asks, prompts, answers)):
        ids = prompt + answer["token_ids"]
        expected = logprobs_of(*ids)
        assert expected[len(prompt) - 1 : -1].argmax(-1).tolist() == answer["token_ids"]
        for position in range(1, len(ids)):
            wanted = of_prompt if position < len(prompt) else most
            got = seen.get((request, position))
            if wanted is None:
                assert got is None
            elif got is None:  # prompts whose beginning was found in the cache
                assert position <= answer["num_cached_tokens"]
            else:
                check_logprobs(got, ids[position], expected[position - 1], wanted)
                assert position < len(prompt) or got[ids[position]][1] == 1


def check_logprobs(got: dict, token_id: int, expected: torch.Tensor, wanted: int) -> None:
    """The token's own and those of the `wanted` most likely; ranks count in `expected`, within rounding."""
    values, ranks = (torch.tensor(x) for x in zip(*got.values()))
    assert torch.allclose(values, expected[[*got]], rtol=1e-5, atol=1e-4)  # takes a tenth of the time of assert_close
    num = len(expected) if wanted < 0 else wanted
    others = [i for i, (_, rank) in got.items() if i != token_id or rank <= num]
    assert next(iter(got)) == token_id and len(others) == num
    assert sorted(got[i][1] for i in others) == [*range(1, num + 1)]
    order = expected.sort(descending=True).values
    assert torch.allclose(values, order[ranks - 1], rtol=1e-5, atol=1e-4)
    assert ranks[1:].tolist() == sorted(ranks[1:].tolist())


@pytest.fixture(scope="module")
def asks() -> list[dict]:
    bias = {i: 3.0 - i % 7 for i in range(300, 600)}
    return [
        {"frequency_penalty": -0.2, "repetition_penalty": 1.1, "logit_bias": {5: 9.0, 700: 4.0}},
        {"presence_penalty": 2.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"logit_bias": bias},
        {"min_tokens": 20, "stop_token_ids": [11], "logit_bias": {EOS: 30.0, 11: 20.0}},
        {},
        {"min_tokens": 12, "frequency_penalty": 1.0, "logit_bias": {EOS: 30.0}},
        {"repetition_penalty": 0.9, "presence_penalty": -0.5},
        {"allowed_token_ids": [*range(256, 2040, 7)], "frequency_penalty": 0.3},
        {"bad_words": ["MIO", " earth", "the", " sun"], "allowed_token_ids": [*range(2046)]},
    ]


@pytest.fixture(scope="module")
def penalized(model, tokenizer, prompts, asks) -> list[list[int]]:
    """Greedy answers by the definitions, a token at a time."""
    answers = []
    for prompt, ask in zip(prompts, asks, strict=True):
        answer, past = [], None
        bad_words = bad_word_token_ids(tokenizer, ask.get("bad_words", ()), 2048)
        for _ in range(40):
            new = (prompt + answer)[0 if past is None else -1 :]
            out = model(torch.tensor([new]), past_key_values=past, use_cache=True)
            past, scores = out.past_key_values, out.logits[:, -1]
            for token, bias in ask.get("logit_bias", {}).items():
                scores[0, token] += bias
            if len(answer) < ask.get("min_tokens", 0):
                scores[0, [EOS, *model.generation_config.eos_token_id, *ask.get("stop_token_ids", [])]] = -torch.inf
            if (repetition := ask.get("repetition_penalty", 1.0)) != 1:
                scores = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([prompt + answer]), scores)
            for token in set(answer):
                scores[0, token] -= ask.get("frequency_penalty", 0) * answer.count(token) + ask.get(
                    "presence_penalty", 0
                )
            if "allowed_token_ids" in ask:
                scores[0, [*{*range(2048)} - {*ask["allowed_token_ids"]}]] = -torch.inf
            for *begin, last in bad_words:
                if answer[len(answer) - len(begin) :] == begin:
                    scores[0, last] = -torch.inf
            answer.append(scores.argmax().item())
            if answer[-1] in model.generation_config.eos_token_id:
                break
        answers.append(answer)
    return answers


@each_world
def test_penalties_and_biases(make_llm, prompts, asks, penalized, world, async_scheduling):
    llm = make_llm(**WORLDS[world], async_scheduling=async_scheduling)
    params = [SamplingParams(temperature=0.0, max_tokens=40, **ask) for ask in asks]
    for _ in range(1 + (world in ("chunks", "few blocks and prefixes"))):  # the second time prompts are in the cache
        answers = llm.generate(prompts, params, use_tqdm=False)
        assert [answer["token_ids"] for answer in answers] == penalized
    assert llm.scheduler.num_preemptions > 0 or "few" not in world
    assert sum(answer["num_cached_tokens"] for answer in answers) > 0 or world in ("defaults", "few blocks")
    assert len(penalized[4]) == 21 and len(penalized[6]) == 13  # min_tokens, and the end that they wished for
    assert {*penalized[8]} <= {*asks[8]["allowed_token_ids"]} and len({*penalized[8]}) > 5
    assert not any(word in answers[9]["text"] for word in ("MIO", "earth", " the ", " sun"))
    if world == "defaults":  # each of the parameters changes the answer
        plain = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)
        assert all((answer["token_ids"] == mine) == (not ask) for answer, mine, ask in zip(plain, penalized, asks))


def test_a_seed_is_a_seed(make_llm):
    """Alone, among 40, with few blocks and in chunks; whatever it asks and whatever the others ask."""
    rng = random.Random(1)
    prompts = [[rng.randrange(256, 2040) for _ in range(rng.randint(1, 40))] for _ in range(40)]
    kinds = [
        {},
        {"top_k": 20, "top_p": 0.95},
        {"top_p": 0.8, "temperature": 1.5},
        {"min_p": 0.05, "frequency_penalty": 0.4},
        {"top_k": 5, "repetition_penalty": 1.2, "logit_bias": {300: 5.0}, "bad_words": ["the", "ing"]},
        {"temperature": 0.0, "presence_penalty": 1.0, "allowed_token_ids": [*range(0, 2046, 2)]},
    ]
    params = [SamplingParams(seed=i, max_tokens=16, ignore_eos=True, **kinds[i % len(kinds)]) for i in range(40)]
    ids = lambda llm, some: [
        answer["token_ids"]
        for answer in llm.generate([prompts[i] for i in some], [params[i] for i in some], use_tqdm=False)
    ]
    together = ids(make_llm(), range(40))
    llm = make_llm()
    assert [ids(llm, [i])[0] for i in range(6)] == together[:6]
    for world in ("chunks", "few blocks"):
        llm = make_llm(**WORLDS[world], async_scheduling=True)
        assert ids(llm, range(39, -1, -1)) == together[::-1]
    assert llm.scheduler.num_preemptions > 0


def test_logprobs_of_the_whole_vocabulary(make_llm, model):
    """-1, of a prompt and of an answer, next to a request that wants few."""
    llm = make_llm()
    runner, prompts = llm.model_runner, [[300, 400, 500], [7, 8]]
    every = SamplingParams(temperature=0.0, logprobs=-1, prompt_logprobs=-1)
    for i, params in enumerate((every, SamplingParams(temperature=0.0, logprobs=2))):
        seq = Sequence([*prompts[i]], params, request_id=i, max_len=20)
        TokenLogprobs.watch(seq)
        llm.scheduler.add(seq)
    token_ids, features, _ = runner.run(llm.scheduler.schedule()).wait()
    of_tokens = [unpack(x) for x in features["logprobs"].of_tokens]
    of_prompts = [found and [*map(unpack, found)] for found in features["logprobs"].of_prompts]
    assert [len(x) for x in of_tokens] == [2048, 2] and of_prompts[1] is None
    expected = [model(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in prompts]
    check_logprobs(of_tokens[0], token_ids[0], expected[0][2], -1)
    check_logprobs(of_tokens[1], token_ids[1], expected[1][1], 2)
    for i, found in enumerate(of_prompts[0]):
        check_logprobs(found, prompts[0][i + 1], expected[0][i], -1)


@both_ways
def test_a_greedy_token_has_rank_1(make_llm, prompts, async_scheduling):
    """In bfloat16, where logits are often equal and depend on how many rows are computed at once."""
    llm = make_llm(dtype="bfloat16", async_scheduling=async_scheduling)
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=[None, 3, 0][i % 3]) for i in range(10)
    ]
    for answer, asked in zip(llm.generate(prompts, params, use_tqdm=False), params):
        ranks = [found[token_id][1] for found, token_id in zip(answer["logprobs"] or (), answer["token_ids"])]
        assert ranks == ([] if asked.logprobs is None else [1] * 24)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_top_1_is_greedy(make_llm, prompts, dtype):
    """Also where logits are equal, as many are in these dtypes."""
    llm = make_llm(dtype=dtype)
    ids = lambda **params: [
        answer["token_ids"]
        for answer in llm.generate(prompts[:4] * 4, SamplingParams(max_tokens=12, **params), use_tqdm=False)
    ]
    assert ids(top_k=1) == ids(top_p=1e-6, temperature=3.0) == ids(temperature=0.0)


# -- checks at the door ------------------------------------------------------------------------------------------------


def test_numbers_become_pythons_own():
    """One of fixed width would wrap: a request of 2**31 - 1 tokens never ended."""
    reals = dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"), np.float32(0.5))
    ints = dict.fromkeys(("top_k", "n", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"), np.int32(3))
    ids = {
        "stop_token_ids": [np.int32(3)],
        "allowed_token_ids": (np.int64(5),),
        "logit_bias": {np.int16(4): np.float16(2)},
    }
    params = SamplingParams(**reals, **ints, **ids, seed=np.uint64(2**64 - 1))
    assert {type(getattr(params, name)) for name in reals} == {float}
    assert {type(getattr(params, name)) for name in (*ints, "seed")} == {int}
    numbers = (*params.stop_token_ids, *params.allowed_token_ids, *params.logit_bias)
    assert numbers == (3, 5, 4) and {*map(type, numbers)} == {int} and type(params.logit_bias[4]) is float
    endless = SamplingParams(max_tokens=np.int32(2**31 - 1))
    assert Sequence([1] * 9, endless, max_len=50).max_num_tokens == 50


def test_what_vllm_takes():
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None, allowed_token_ids=None) == SamplingParams()
    params = SamplingParams(max_tokens=None, min_tokens=100, bad_words="ill", logprobs=-1, prompt_logprobs=-1)
    assert Sequence([1] * 9, params, max_len=50).max_num_tokens == 50
    assert params.bad_words == ("ill",) and not SamplingParams(detokenize=False).detokenize


def test_more_biases_than_there_is_room_for():
    """All that a request may name, where the model has many ends too."""
    ids = {"logit_bias": dict.fromkeys(range(300), 1.0), "stop_token_ids": [*range(128)]}
    check_edits(SamplingParams(**ids, min_tokens=1), 2048, frozenset(range(1000, 1084)))
    check_edits(SamplingParams(**ids), 2048, frozenset(range(1000, 1085)))
    with pytest.raises(
        ValueError, match="logit_bias, stop_token_ids and the model's eos ids .*=513: must be at most 512"
    ):
        check_edits(SamplingParams(**ids, min_tokens=1), 2048, frozenset(range(1000, 1085)))


def test_bad_words_are_tokenized_with_and_without_a_space(tokenizer):
    words = bad_word_token_ids(tokenizer, ("the", " the", "morning"), 2048)
    assert [tokenizer.decode(ids) for ids in words] == ["the", " the", "morning", " morning"]
    with pytest.raises(ValueError, match="out of vocabulary"):
        bad_word_token_ids(tokenizer, ("the",), 260)
