"""The noise and the draws of the sampler, by their statistics. All seeds are fixed, so nothing here fails by chance."""

import math

import pytest
import torch
from common import noise_of_rows

from nanovllm.layers import sampler
from nanovllm.layers.sampler import Sampler, gumbel_noise, philox


def distance(samples: torch.Tensor, cdf) -> float:
    """Kolmogorov-Smirnov: sqrt(n) times the largest distance to the distribution; above 1.95 once in a thousand."""
    expected = cdf(samples.double().flatten().sort().values)
    n = len(expected)
    steps = torch.arange(n + 1) / n
    return max((steps[1:] - expected).max(), (expected - steps[:-1]).max()).item() * math.sqrt(n)


def gumbel_cdf(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-torch.exp(-x))


def draw(logits: torch.Tensor, temperatures, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    temperatures = torch.as_tensor(temperatures, dtype=torch.float32).expand(len(logits))
    return Sampler()(logits, temperatures, seeds.int(), positions.int())


@pytest.mark.parametrize("philox", [philox, philox.__wrapped__], ids=["operation", "definition"])
def test_philox_known_answers(philox):
    """The vectors published with Random123, for Philox4x32-10."""
    for counter, key, expected in (
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ):
        counter, key = (tuple(torch.tensor(int(word, 16)) for word in words.split()) for words in (counter, key))
        assert " ".join(f"{word.item():08x}" for word in philox(*counter, *key, rounds=10)) == expected


def test_noise_is_gumbel():
    n = 1 << 20
    noise = noise_of_rows(torch.arange(128).view(64, 2) - 64, torch.arange(64), n // 64).double()
    assert abs(noise.mean() - 0.5772157) < 4 * math.sqrt(math.pi**2 / 6 / n)
    assert abs(noise.var() - math.pi**2 / 6) < 4 * math.pi**2 / 6 * math.sqrt(4.4 / n)
    for word in range(4):  # of each counter
        assert distance(noise[:, word::4], gumbel_cdf) < 1.95


def test_noise_keeps_its_tail():
    """Large noise is that of the word to float32's precision; of a word cut to 24 bits it would be coarse."""
    seeds, positions = torch.tensor([[-5, 3], [5, -3]]), torch.tensor([0, 12345])
    noise = noise_of_rows(seeds, positions, 150_000)
    counter = torch.arange(37_500).expand(2, -1)
    zero, key = torch.zeros_like(counter), (seeds & 0xFFFFFFFF).unsqueeze(-1).unbind(1)
    words = torch.stack(tuple(philox(counter, positions[:, None], zero, zero, *key)), -1)
    v = (words.flatten(1).double() + 0.5) / 2**32
    expected = -(-torch.log1p(-v)).log()
    torch.testing.assert_close(noise[expected > 1].double(), expected[expected > 1], rtol=1e-6, atol=0)
    assert noise.dtype == torch.float32 and noise.max() > 11


def test_maximum_over_a_vocabulary():
    """The largest of n is log(n) above one of them, in distribution; it is the tail that decides who wins."""
    seeds = torch.stack((torch.arange(400) // 20, torch.zeros(400)), 1).int()
    positions = torch.arange(400) % 20
    tops = [noise_of_rows(s, p, 50_000).max(-1).values for s, p in zip(seeds.split(8), positions.split(8), strict=True)]
    assert distance(torch.cat(tops) - math.log(50_000), gumbel_cdf) < 1.95


def test_neighbours_are_uncorrelated():
    """Seeds and positions that differ by one, seeds that differ in the upper word, swapped words, tokens next to it."""
    n = 1 << 17
    seeds = torch.tensor([[6, 4], [7, 4], [6, 5], [4, 6], [6, 4], [6, 4], [6, 4]])
    positions = torch.tensor([10, 10, 10, 10, 11, 9, 10 + (1 << 30)])
    noise = noise_of_rows(seeds, positions, n + 8)
    rows = torch.cat((noise[:, :n], *(noise[:1, shift : shift + n] for shift in (1, 2, 4))))
    correlation = torch.corrcoef(rows) - torch.eye(len(rows))
    assert correlation.abs().max() < 4 / math.sqrt(n)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("varying", ["seed", "upper word of seed", "position", "token"])
def test_draws_follow_the_softmax(varying, temperature):
    """Chi-square of 100,000 draws; above 24.3 once in a thousand at seven degrees of freedom."""
    n = 100_000
    logits = torch.tensor([2.0, 1.0, 0.0, -3.0, 1.5, -1.0, -torch.inf, 0.5, 1.9])
    count, zero = torch.arange(n), torch.zeros(n, dtype=torch.long)
    vary = {name: count if name == varying else zero for name in ("seed", "upper word of seed", "position")}
    seeds = torch.stack((vary["seed"], vary["upper word of seed"]), 1)
    if varying == "token":  # one row of noise, cut into many
        noise = noise_of_rows(seeds[:1], zero[:1], n * 9).view(n, 9)
        ids = (logits / temperature + noise).argmax(-1)
    else:
        ids = draw(logits.expand(n, -1), temperature, seeds, vary["position"])
    counts = ids.bincount(minlength=9).double()
    expected = n * (logits.double() / temperature).softmax(-1)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert ((counts - expected).square() / expected)[possible].sum() < 24.3


def test_noise_belongs_to_seed_position_and_token():
    """Whatever else is in the batch, in whatever order and vocabulary."""
    seeds, positions = torch.randint(-(1 << 31), 1 << 31, (9, 2)).int(), torch.arange(9).int() * 1000
    noise = noise_of_rows(seeds, positions, 1003)
    order = torch.randperm(9)
    assert torch.equal(noise_of_rows(seeds[order], positions[order], 1003), noise[order])
    for i in range(9):
        alone = noise_of_rows(seeds[i : i + 1], positions[i : i + 1], 1 + i)
        assert torch.equal(alone, noise[i : i + 1, : 1 + i])


@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("first_id", [0, 6])
def test_tokens_without_noise_could_not_have_won(monkeypatch, spread, first_id):
    """The draws are those with the noise of every token, of which peaked distributions need few."""
    noisy = []
    monkeypatch.setattr(sampler, "gumbel_noise", lambda *args: noisy.append(len(args[2])) or gumbel_noise(*args))
    logits, seeds = torch.randn(500, 1001) * spread, torch.arange(1000).view(500, 2)
    positions, zero = torch.arange(500), torch.zeros(500)
    drawn = Sampler(first_id=first_id)(logits, zero + 0.5, seeds.int(), positions.int())
    expected = (logits / 0.5 + noise_of_rows(seeds, positions, 1001, first_id)).argmax(1) + first_id
    assert drawn.tolist() == expected.tolist()
    assert (sum(noisy) < 20 * 500) == (spread == 30.0)


@pytest.mark.parametrize("gap, wins", [(25.0, True), (26.0, False)])
def test_the_largest_noise_against_the_smallest(monkeypatch, gap, wins):
    """A token that is 25 below the best one wins with the extremes of the generator, and one 26 below cannot."""
    words = torch.full((1, 4), 0xFFFFFFFF), torch.zeros(1, 4, dtype=torch.long)

    def extremes(quads, *others):  # the smallest noise for ids below 4, the largest for the others
        return tuple(torch.where(quads < 1, *(word[0, i] for word in words)) for i in range(4))

    monkeypatch.setattr(sampler, "philox", extremes)
    logits = torch.tensor([[gap, -50.0, -50.0, -50.0, 0.0, -50.0]])
    zero = torch.zeros(1, 2)
    assert (draw(logits, 1.0, zero, zero[0, :1]).item() == 4) is wins
    assert (gumbel_noise(zero, zero[0, :1], torch.tensor([0])) > -2.9).all()
    assert (gumbel_noise(zero, zero[0, :1], torch.tensor([1])) < 22.9).all()


def test_a_draw_does_not_depend_on_the_batch():
    """Greedy rows between random ones neither change nor are changed, and take the lowest of equals."""
    logits = torch.randn(30, 101).half()
    temperatures = torch.tensor([0.0, 0.5, 2.0]).repeat(10)
    logits[::3, [40, 70]] = 10
    seeds, positions = torch.randint(1 << 31, (30, 2)), torch.arange(30)
    ids = draw(logits, temperatures, seeds, positions)
    assert ids.dtype == torch.int32
    assert (ids[::3] == 40).all() and len(ids[1::3].unique()) > 5
    for i in range(30):
        row = slice(i, i + 1)
        assert draw(logits[row], temperatures[row], seeds[row], positions[row]) == ids[i]
