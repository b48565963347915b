"""Makes requests with random token ids, images, lengths and arrival times."""

import random
from dataclasses import dataclass, replace
from math import log
from typing import Any

import numpy as np

TEMPERATURE = 0.6
SIGMAS = (0.9, 0.7)  # for the log-normal lengths of prompts and of outputs
IMAGE_TEXT = (8, 16)  # the numbers of tokens before and after an image
SYSTEM_PROMPT = 4  # the length of the prompt that all conversations share, divided by a question's median length


@dataclass(frozen=True)
class RandomImage:
    """A square image of random pixels. `side` is in pixels. Different seeds give different pixels."""

    side: int
    seed: str

    def draw(self) -> Any:
        """Return a PIL image."""
        from PIL import Image  # an optional dependency

        generator = np.random.default_rng([*self.seed.encode()])
        return Image.fromarray(generator.integers(256, size=(self.side, self.side, 3), dtype=np.uint8))


@dataclass
class Request:
    """A request of a benchmark.

    arrival: when the request is due, in seconds from the start of the run.
    previous: the index of the conversation's previous turn, if there is one. For a turn that follows another, `prompt`
        is appended to the previous prompt and answer, and `arrival` is measured from the end of the previous answer.
    image: the image, or None. If there is an image, `prompt` contains its placeholder once.
    """

    prompt: list[int]
    max_tokens: int
    top_k: int = 0
    top_p: float = 1.0
    arrival: float = 0.0
    previous: int | None = None
    image: RandomImage | None = None

    def as_prompt(self) -> dict[str, Any]:
        """Return a prompt for `LLM.generate`, in a form that this package and vLLM accept.

        Drawing an image takes milliseconds.
        """
        images = {"multi_modal_data": {"image": self.image.draw()}} if self.image else {}
        return {"prompt_token_ids": self.prompt, **images}

    def sampling_settings(self) -> dict:
        """Return arguments for `SamplingParams`, both for this package's class and for vLLM's class."""
        settings = dict(temperature=TEMPERATURE, top_k=self.top_k, top_p=self.top_p)
        return settings | dict(max_tokens=self.max_tokens, ignore_eos=True)


Workloads = dict[str, list[list[Request]]]  # by name: a list of runs; the first run is a warm-up


def random_ids(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(length)]


def headline(num_seqs: int, max_input_len: int, max_output_len: int, seed: int, vocab_size: int) -> list[Request]:
    """Make the requests of the workload `headline`. One random generator draws all prompts, then all output lengths.

    With seed 0 and the default lengths, the requests have 133,966 output tokens in total.
    """
    rng = random.Random(seed)
    num_ids = min(10_001, vocab_size)
    min_input_len, min_output_len = (max(1, length * 100 // 1024) for length in (max_input_len, max_output_len))
    prompts = [random_ids(rng, rng.randint(min_input_len, max_input_len), num_ids) for _ in range(num_seqs)]
    return [Request(prompt, rng.randint(min_output_len, max_output_len)) for prompt in prompts]


def same_lengths(num_seqs: int, input_len: int, output_len: int, seed: int | str, vocab_size: int) -> list[Request]:
    """Make requests of equal lengths. Workloads need different seeds, because prompts stay in the prefix cache."""
    rng = random.Random(seed)
    return [Request(random_ids(rng, input_len, vocab_size), output_len) for _ in range(num_seqs)]


def with_images(num_seqs: int, side: int, output_len: int, seed: str, image_token_id: int) -> list[Request]:
    """Make requests with one image each. All token ids of the text are less than `image_token_id`."""
    rng, requests = random.Random(seed), []
    for i in range(num_seqs):
        before, after = (random_ids(rng, length, image_token_id) for length in IMAGE_TEXT)
        requests.append(Request([*before, image_token_id, *after], output_len, image=RandomImage(side, f"{seed} {i}")))
    return requests


def online(
    rate: float, num_seqs: int, medians: tuple[int, int], max_model_len: int, seed: int, vocab_size: int
) -> list[Request]:
    """Make requests whose arrivals are a Poisson process, with `rate` requests per second.

    `medians` contains the median prompt length and the median output length, in tokens.
    """
    rng = random.Random(f"online {rate} {seed}")
    requests, arrival = [], 0.0
    for _ in range(num_seqs):
        arrival += rng.expovariate(rate)
        input_len, output_len = (
            max(1, round(rng.lognormvariate(log(middle), sigma))) for middle, sigma in zip(medians, SIGMAS)
        )
        output_len = min(output_len, max_model_len - 1)
        prompt = random_ids(rng, min(input_len, max_model_len - output_len), vocab_size)
        requests.append(Request(prompt, output_len, arrival=arrival))
    return requests


def conversations(
    number: int,
    turns: tuple[int, int],
    pause: float,
    medians: tuple[int, int],
    max_model_len: int,
    seed: int,
    vocab_size: int,
) -> list[Request]:
    """Make conversations that share a system prompt. A conversation ends early if it reaches `max_model_len`.

    turns: the least and the greatest number of turns of a conversation.
    pause: the mean time in seconds between an answer and the next question. The first questions of all conversations
        arrive within `5 * pause` seconds.
    medians: the median lengths of a question and of an answer, in tokens.
    """
    rng = random.Random(f"conversations {seed}")
    system_prompt, requests = random_ids(rng, min(SYSTEM_PROMPT * medians[0], max_model_len // 2), vocab_size), []
    for _ in range(number):
        question, history_len, previous = list(system_prompt), 0, None
        arrival = rng.uniform(0, 5 * pause)
        for _ in range(rng.randint(*turns)):
            lengths = [max(1, round(rng.lognormvariate(log(x), sigma))) for x, sigma in zip(medians, SIGMAS)]
            question += random_ids(rng, lengths[0], vocab_size)
            history_len += len(question) + lengths[1]
            if history_len >= max_model_len:
                break
            requests.append(Request(question, lengths[1], arrival=arrival, previous=previous))
            question, previous, arrival = [], len(requests) - 1, rng.expovariate(1 / pause)
    return requests


def by_turn(requests: list[Request]) -> dict[int, list[int]]:
    """Return the indices of the requests of each turn. Turns are counted from 1."""
    turns: list[int] = []
    for request in requests:
        turns.append(1 if request.previous is None else turns[request.previous] + 1)
    return {turn: [i for i, x in enumerate(turns) if x == turn] for turn in sorted({*turns})}


def fit(input_len: int, output_len: int, max_model_len: int) -> list[int]:
    """Return both lengths, scaled down if their sum is more than `max_model_len`."""
    scale = max(input_len + output_len, max_model_len)
    return [max(1, length * max_model_len // scale) for length in (input_len, output_len)]


def in_rounds(requests: list[Request], rounds: int, vocab_size: int) -> list[list[Request]]:
    """Return a warm-up and `rounds` runs, each with different token ids.

    The last run has the token ids of `requests`.
    """
    return [other_ids(requests, vocab_size, by) for by in range(rounds, -1, -1)]


def other_ids(requests: list[Request], vocab_size: int, by: int = 1) -> list[Request]:
    """Return copies of the requests with token ids that the prefix cache does not contain."""
    return [replace(request, prompt=[(i + by) % vocab_size for i in request.prompt]) for request in requests]


def describe(name: str, requests: list[Request]) -> str:
    num_input, num_output = sum(len(r.prompt) for r in requests), sum(r.max_tokens for r in requests)
    num_images = sum(r.image is not None for r in requests)
    images = f" and {num_images:,} image{'s' * (num_images != 1)}" if num_images else ""
    return f"{name}: {number_of(requests)}, {num_input - num_images:,} tokens{images} in, {num_output:,} out"


def number_of(requests: list[Request]) -> str:
    return f"{len(requests):,} request{'s' * (len(requests) != 1)}"
