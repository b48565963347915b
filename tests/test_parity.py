"""Token for token transformers' greedy output, in every way that the engine can come to it.

A first difference is excused only where the reference's own two best logits are within MARGIN, and is counted and
printed. What follows it in that answer is a different text and is not compared.
"""

import random
from collections.abc import Iterable
from functools import cache

import pytest
import torch
from common import TINY, generate_by_steps, with_end_ids

from nanovllm import SamplingParams

MARGIN = 2e-4
SHARED_PREFIX = 300
NUM_VERSES = 24  # the first requests
MAX_ANSWER, MAX_RANDOM = 56, 16  # the most tokens that follow text, and random ids
SONNET = """Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date"""


def questions(rng: random.Random) -> list[str]:
    numbers = lambda count, high: [rng.randrange(high) for _ in range(count)]
    words = [
        "love",
        "day",
        "night",
        "king",
        "crown",
        "sword",
        "ghost",
        "storm",
        "island",
        "daughter",
        "father",
        "brother",
        "queen",
        "blood",
    ]
    asked = ["introduce yourself", "Who are you?", "Hello!", "list all prime numbers within 100"]
    asked += [f"List the primes up to {n}." for n in (3, 17, 60)]
    asked += ["What is {} + {}?".format(*numbers(2, 1000)) for _ in range(32)]
    asked += ["Add {} and {}.".format(*numbers(2, 100)) for _ in range(16)]
    asked += ["Sort: " + ", ".join(map(str, numbers(rng.randint(2, 8), 100))) for _ in range(20)]
    asked += [f"Count from {a} to {a + rng.randint(2, 20)}." for a in numbers(10, 200)]
    asked += ["Copy: " + " ".join(rng.choices(words, k=rng.randint(1, 20))) for _ in range(15)]
    return asked


@pytest.fixture(scope="module")
def requests(chat, tokenizer) -> list[tuple[list[int], int]]:
    """(prompt, max_tokens): verse, chat prompts with one right answer, random ids of all lengths, shared prefixes."""
    rng = random.Random(0)
    ids = lambda n: [rng.randrange(2045) for _ in range(n)]
    made = [(chat(question), MAX_ANSWER) for question in questions(rng)]
    verse = tokenizer.encode(SONNET)
    verses = [
        (verse[: rng.randint(2, len(verse))], rng.randint(MAX_ANSWER // 2, MAX_ANSWER)) for _ in range(NUM_VERSES)
    ]
    lengths = [1, 1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 255, 256, 257, 511, 512, 513, 1023, 1024, 1500]
    lengths += [int(1.8 ** rng.uniform(2, 10)) for _ in range(35)]
    made += [(ids(length), rng.randint(1, MAX_RANDOM)) for length in lengths]
    prefix = ids(SHARED_PREFIX)
    made += [(prefix + ids(rng.randint(1, 40)), 8) for _ in range(20)]
    rng.shuffle(made)
    made = verses + made  # first come those that grow longest, so that a small cache fills up while they run
    assert len(made) >= 200
    return made


@pytest.fixture(scope="module")
def random_model(two_layer_model, tmp_path_factory) -> str:
    """Half of its answers end within 80 tokens."""
    return with_end_ids(two_layer_model, tmp_path_factory.mktemp("random"), 128)


class Reference:
    """transformers' greedy ids of requests, and by how much each of them led.

    The first answer of an engine serves as a draft: transformers computes its logits in one forward. From the first
    token on that is not its own choice, it goes on by itself.
    """

    def __init__(self, folder: str):
        from transformers import Qwen3ForCausalLM

        self.model = Qwen3ForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
        self.end_ids = {*torch.tensor(self.model.generation_config.eos_token_id).view(-1).tolist()}
        self.answers: dict[tuple, tuple[list[int], list[float]]] = {}

    def answer(self, prompt: list[int], max_tokens: int, draft: list[int]) -> tuple[list[int], list[float]]:
        key = (*prompt, max_tokens)
        if key not in self.answers:
            self.answers[key] = self._answer(prompt, max_tokens, draft)
        return self.answers[key]

    def _answer(self, prompt, max_tokens, draft):
        while True:
            logits = self.model(torch.tensor([prompt + draft]), logits_to_keep=len(draft) + 1).logits[0]
            chosen, best = logits.argmax(-1).tolist(), logits.topk(2).values
            margins = (best[:, 0] - best[:, 1]).tolist()
            num_right = next((i for i, (a, b) in enumerate(zip(chosen, draft)) if a != b), len(draft))
            draft = chosen[: num_right + 1]
            for i, token_id in enumerate(draft, 1):
                if i == max_tokens or token_id in self.end_ids:
                    return draft[:i], margins[:i]


@pytest.fixture(scope="module")
def reference():
    """A function from folders to references, of which each is made once."""
    return cache(Reference)


@pytest.fixture
def same_as_reference(reference, requests, random_model, request, capsys):
    """A check of a model's answers to all requests, or to those at `indices`."""

    def check(answers: list[dict], indices: Iterable[int] | None = None, model: str = random_model) -> None:
        excused = 0
        for i, answer in zip(range(len(requests)) if indices is None else indices, answers, strict=True):
            got = answer["token_ids"]
            expected, margins = reference(model).answer(*requests[i], got)
            differ = next((j for j, (a, b) in enumerate(zip(got, expected)) if a != b), None)
            if differ is None:
                assert len(got) == len(expected), f"request {i}: {len(got)} tokens instead of {len(expected)}"
                continue
            assert margins[differ] < MARGIN, f"request {i}, token {differ}: {got[differ]} instead of {expected[differ]}"
            excused += 1
        with capsys.disabled():
            print(f"\n  {request.node.name}: {len(answers)} answers, {excused} excused", end="")

    return check


def params_of(requests) -> list[SamplingParams]:
    return [SamplingParams(temperature=0.0, max_tokens=max_tokens) for _, max_tokens in requests]


def generate(llm, requests) -> list[dict]:
    return generate_by_steps(llm, [(prompt, params) for (prompt, _), params in zip(requests, params_of(requests))])


both_ways = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


@pytest.mark.parametrize(
    "settings, first, step",
    [
        pytest.param({"async_scheduling": False}, 0, 6, id="defaults"),
        pytest.param({"kvcache_block_size": 256, "max_num_seqs": 7, "async_scheduling": True}, 0, 8, id="few-seqs"),
        pytest.param({"enable_prefix_caching": False, "async_scheduling": True}, 1, 6, id="no-prefix-cache"),
        pytest.param(
            {"max_num_mixed_tokens": 48, "max_num_seqs": 24, "async_scheduling": False}, 2, 8, id="short-chunks-sync"
        ),
        pytest.param(
            {"max_num_mixed_tokens": 48, "max_num_seqs": 24, "async_scheduling": True}, 3, 8, id="short-chunks-async"
        ),
    ],
)
def test_worlds(make_llm, random_model, requests, same_as_reference, settings, first, step):
    llm = make_llm(random_model, **settings)
    same_as_reference(generate(llm, requests[first::step]), range(first, len(requests), step))


@pytest.mark.parametrize("async_scheduling, first, step", [(True, 0, 4), (False, 1, 8)], ids=["offline", "by steps"])
def test_bundled_model(make_llm, requests, same_as_reference, async_scheduling, first, step):
    """Verse, and questions with one right answer, which ends by itself."""
    llm = make_llm(TINY, max_num_seqs=50, async_scheduling=async_scheduling)
    indices = [i for i, (_, max_tokens) in enumerate(requests) if max_tokens > MAX_RANDOM][first::step]
    some = [requests[i] for i in indices]
    offline = lambda: llm.generate([prompt for prompt, _ in some], params_of(some), use_tqdm=False)
    same_as_reference(offline() if async_scheduling else generate(llm, some), indices, TINY)


def test_offline(make_llm, random_model, requests, same_as_reference):
    llm = make_llm(random_model, max_num_seqs=50, async_scheduling=True)
    some = requests[::2]
    answers = llm.generate([prompt for prompt, _ in some], params_of(some), use_tqdm=False)
    same_as_reference(answers, range(0, len(requests), 2))
    assert llm.stats()["steps"]["mixed"] == 0


def test_chunked_prefill(make_llm, random_model, requests, same_as_reference):
    """With a budget of 64 tokens a step most prompts are computed in pieces."""
    llm = make_llm(random_model, max_num_batched_tokens=64, kvcache_block_size=16, async_scheduling=True)
    pieces = []
    schedule = llm.scheduler.schedule
    llm.scheduler.schedule = lambda **options: pieces.append(schedule(**options)) or pieces[-1]
    indices = [i for i, (prompt, _) in enumerate(requests) if len(prompt) > 64 or i % 8 == 0]
    same_as_reference(generate(llm, [requests[i] for i in indices]), indices)
    assert sum(step is not None and len(step.sampled_seqs) < len(step.rows) for step in pieces) > 100


@both_ways
def test_preemption(make_llm, random_model, requests, same_as_reference, async_scheduling):
    """The cache holds the longest of these requests and hardly more."""
    llm = make_llm(random_model, num_kvcache_blocks=48, kvcache_block_size=16, async_scheduling=async_scheduling)
    indices = [*range(NUM_VERSES), *range(NUM_VERSES + async_scheduling, len(requests), 8)]
    indices = [i for i in indices if len(requests[i][0]) <= 513]
    same_as_reference(generate(llm, [requests[i] for i in indices]), indices)
    assert llm.scheduler.num_preemptions > 0


@both_ways
def test_shared_prefixes(make_llm, random_model, requests, same_as_reference, async_scheduling):
    """Hits within a step, hits of a second round, and no hits give the same tokens."""
    llm = make_llm(random_model, kvcache_block_size=16, async_scheduling=async_scheduling)
    may_share = [SHARED_PREFIX < len(prompt) <= SHARED_PREFIX + 40 for prompt, _ in requests]
    indices = [i for i, shares in enumerate(may_share) if shares or i % 8 == async_scheduling]
    some = [requests[i] for i in indices]
    first = generate(llm, some)
    same_as_reference(first, indices)
    sharing = [answer["num_cached_tokens"] >= SHARED_PREFIX // 16 * 16 for answer in first]
    assert sum(sharing) >= 19, "all but the first of the prompts with a common prefix should find it"
    second = generate(llm, some)
    same_as_reference(second, indices)
    for (prompt, _), answer in zip(some, second):
        assert answer["num_cached_tokens"] == (len(prompt) - 1) // 16 * 16, "everything but the last block is known"


@both_ways
def test_waves(make_llm, random_model, requests, same_as_reference, async_scheduling):
    """Requests come in while others run; several engines' worth of batch compositions in one run."""
    llm = make_llm(random_model, kvcache_block_size=16, max_num_seqs=24, async_scheduling=async_scheduling)
    rng = random.Random(1)
    indices = range(int(async_scheduling), len(requests), 4)
    left = list(zip([requests[i][0] for i in indices], params_of(requests)[indices.start :: 4]))
    answers: dict[int, dict] = {}
    ids = []
    while left or not llm.is_finished():
        for _ in range(rng.choice([0, 0, 1, 2, 9])):
            if left:
                ids.append(llm.add_request(*left.pop(0)))
        answers |= {answer["request_id"]: answer for answer in llm.step().finished}
    same_as_reference([answers[i] for i in ids], indices)


def test_right_answers(chat, make_llm):
    """In the checkpoint's own bfloat16 the bundled model knows what it was trained to know."""
    llm = make_llm(dtype="auto")
    asked = {
        "list all prime numbers within 30": "2, 3, 5, 7, 11, 13, 17, 19, 23, 29",
        "What is 17 + 25?": "42",
        "Sort: 9, 3, 71, 20": "3, 9, 20, 71",
        "Count from 5 to 9.": "5, 6, 7, 8, 9",
        "Copy: sword crown": "sword crown",
    }
    answers = llm.generate([chat(q) for q in asked], SamplingParams(temperature=0.0), use_tqdm=False)
    assert [answer["text"] for answer in answers] == list(asked.values())
