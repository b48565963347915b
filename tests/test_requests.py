"""What requests ask of the sampler, through the engine: the same whatever becomes of them on the way."""
import random

import pytest
import torch
from transformers import Qwen3ForCausalLM, RepetitionPenaltyLogitsProcessor

from conftest import TINY
from nanovllm import SamplingParams

WORLDS = {
    "defaults": {},
    "chunks": {"max_num_batched_tokens": 20, "kvcache_block_size": 16},
    "few blocks": {"num_kvcache_blocks": 16, "kvcache_block_size": 16, "enable_prefix_caching": False},
    "few blocks and prefixes": {"num_kvcache_blocks": 16, "kvcache_block_size": 16},
}
EOS = 2047

each_world = pytest.mark.parametrize("world", WORLDS)
both_ways = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


@pytest.fixture(scope="module")
def model():
    return Qwen3ForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of many lengths; some begin with the same two blocks."""
    rng = random.Random(0)
    ids = lambda n: [rng.randrange(256, 2040) for _ in range(n)]
    prefix = ids(32)
    return [prefix + ids(7), ids(1), ids(70), prefix + ids(3), ids(33), prefix + ids(30), ids(16), ids(12)]


def watch(llm) -> dict:
    """All log-probabilities that the engine delivers, by request and position of the token."""
    seen, launch = {}, llm.model_runner.launch

    def watched(batch, step):
        tokens = launch(batch, step)
        wait = tokens.wait

        def take():
            sampled = wait()
            for row, logprobs in zip(step.rows, sampled.logprobs):  # the rows that are sampled come first
                seen[row.seq.request_id, row.end] = logprobs
            for row, prompt_logprobs in zip(step.rows, sampled.prompt_logprobs):
                seen.update({(row.seq.request_id, row.start + 1 + i): x for i, x in enumerate(prompt_logprobs or ())})
            return sampled

        tokens.wait = take
        return tokens

    llm.model_runner.launch = watched
    return seen


@both_ways
@each_world
def test_logprobs(make_llm, model, prompts, world, async_scheduling):
    """Of greedy answers and of prompts; a request that did not ask gets none."""
    llm = make_llm(**WORLDS[world], async_scheduling=async_scheduling)
    seen = watch(llm)
    asks = [(3, 2), (0, None), (None, 4), (20, 0), (1, 1), (None, None), (5, 5), (2, None)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=most, prompt_logprobs=of_prompt)
        for most, of_prompt in asks
    ]
    answers = llm.generate(prompts, params, use_tqdm=False)
    assert llm.scheduler.num_preemptions > 0 or "few" not in world
    for request, ((most, of_prompt), prompt, answer) in enumerate(zip(asks, prompts, answers)):
        ids = prompt + answer["token_ids"]
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert expected[len(prompt) - 1 : -1].argmax(-1).tolist() == answer["token_ids"]
        for position in range(1, len(ids)):
            wanted = of_prompt if position < len(prompt) else most
            got = seen.get((request, position))
            if wanted is None:
                assert got is None
            elif got is None:  # prompts whose beginning was found in the cache
                assert position <= answer["num_cached_tokens"]
            else:
                assert next(iter(got)) == ids[position]
                best = expected[position - 1].topk(wanted)
                assert list(dict.fromkeys([ids[position], *best.indices.tolist()])) == list(got)
                torch.testing.assert_close(torch.tensor([*got.values()]), expected[position - 1, [*got]], rtol=1e-5, atol=1e-4)


@pytest.fixture(scope="module")
def asks() -> list[dict]:
    bias = {i: 3.0 - i % 7 for i in range(300, 600)}
    return [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0, "frequency_penalty": 0.5},
        {"frequency_penalty": -0.2, "repetition_penalty": 1.1, "logit_bias": {5: 9.0, 700: 4.0}},
        {"logit_bias": bias},
        {"min_tokens": 20, "stop_token_ids": [11], "logit_bias": {EOS: 30.0, 11: 20.0}},
        {},
        {"min_tokens": 12, "frequency_penalty": 1.0, "logit_bias": {EOS: 30.0}},
        {"repetition_penalty": 0.9, "presence_penalty": -0.5},
    ]


@pytest.fixture(scope="module")
def penalized(model, prompts, asks) -> list[list[int]]:
    """Greedy answers by the definitions, a token at a time."""
    answers = []
    for prompt, ask in zip(prompts, asks, strict=True):
        answer, past = [], None
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
                scores[0, token] -= ask.get("frequency_penalty", 0) * answer.count(token) + ask.get("presence_penalty", 0)
            answer.append(scores.argmax().item())
            if answer[-1] in model.generation_config.eos_token_id:
                break
        answers.append(answer)
    return answers


@both_ways
@each_world
def test_penalties_and_biases(make_llm, prompts, asks, penalized, world, async_scheduling):
    llm = make_llm(**WORLDS[world], async_scheduling=async_scheduling)
    params = [SamplingParams(temperature=0.0, max_tokens=40, **ask) for ask in asks]
    for _ in range(2):  # the second time prompts are found in the cache
        answers = llm.generate(prompts, params, use_tqdm=False)
        assert [answer["token_ids"] for answer in answers] == penalized
    assert llm.scheduler.num_preemptions > 0 or "few" not in world
    assert sum(answer["num_cached_tokens"] for answer in answers) > 0 or world in ("defaults", "few blocks")
    assert len(penalized[4]) == 21 and len(penalized[6]) == 13  # min_tokens, and the end that they wished for
    plain = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)
    assert all((answer["token_ids"] == mine) == (not ask) for answer, mine, ask in zip(plain, penalized, asks))


def test_a_seed_is_a_seed(make_llm):
    """Alone, among 64, with few blocks and in chunks; whatever it asks and whatever the others ask."""
    rng = random.Random(1)
    prompts = [[rng.randrange(256, 2040) for _ in range(rng.randint(1, 40))] for _ in range(64)]
    kinds = [
        {}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.8, "temperature": 1.5}, {"min_p": 0.05, "frequency_penalty": 0.4},
        {"top_k": 5, "repetition_penalty": 1.2, "logit_bias": {300: 5.0}}, {"temperature": 0.0, "presence_penalty": 1.0},
    ]  # fmt: skip
    params = [SamplingParams(seed=i, max_tokens=24, ignore_eos=True, **kinds[i % len(kinds)]) for i in range(64)]
    ids = lambda llm, some: [
        answer["token_ids"] for answer in llm.generate([prompts[i] for i in some], [params[i] for i in some], use_tqdm=False)
    ]
    together = ids(make_llm(), range(64))
    llm = make_llm()
    assert [ids(llm, [i])[0] for i in range(6)] == together[:6]
    for world in ("chunks", "few blocks"):
        llm = make_llm(**WORLDS[world], async_scheduling=True)
        assert ids(llm, range(63, -1, -1)) == together[::-1]
    assert llm.scheduler.num_preemptions > 0
