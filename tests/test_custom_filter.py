"""A filter that is registered from outside, as the exercise of the README has it."""

from dataclasses import dataclass

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.kernels.sampling_columns import MAX_CUSTOM_COLUMNS
from nanovllm.layers import logits as plain
from nanovllm.layers.logits import register_filter


@dataclass(frozen=True, kw_only=True)
class Params(SamplingParams):
    top_n_sigma: float = 0.0


def top_n_sigma(logits: torch.Tensor, n: torch.Tensor) -> None:
    """Keep the tokens whose logits are at most n standard deviations below the largest; n = 0 keeps all."""
    x = logits.float()
    cutoff = x.amax(1) - n * x.std(1)
    logits.masked_fill_((x < cutoff[:, None]) & (n > 0)[:, None], -torch.inf)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_top_n_sigma(make_llm, chat, async_scheduling):
    prompts = [chat("Who wrote this?"), chat("What is it?"), chat("Why?")]
    options = dict(max_tokens=12, ignore_eos=True, seed=7)
    ids = lambda llm, params: [answer["token_ids"] for answer in llm.generate(prompts, params, use_tqdm=False)]
    without = make_llm(async_scheduling=async_scheduling)
    greedy = ids(without, SamplingParams(temperature=0.0, **options))
    random = ids(without, SamplingParams(temperature=5.0, **options))
    register_filter("top_n_sigma", top_n_sigma)
    llm = make_llm(async_scheduling=async_scheduling)
    assert ids(llm, SamplingParams(temperature=5.0, **options)) == random != greedy
    assert ids(llm, Params(temperature=5.0, top_n_sigma=1e-3, **options)) == greedy
    assert ids(llm, Params(temperature=5.0, **options)) == random
    assert ids(without, Params(temperature=5.0, top_n_sigma=1e-3, **options)) == random, "it was made before"
    mixed = [Params(temperature=5.0, top_n_sigma=n, **options) for n in (1e-3, 0.0, 1e-3)]
    assert ids(llm, mixed) == [greedy[0], random[1], greedy[2]]


def test_values_by_row():
    register_filter("top_n_sigma", top_n_sigma, default=-1.0)
    logits = torch.randn(4, 1000)
    params = torch.zeros(4, plain.WIDTH, dtype=torch.int32)
    plain.column(params, "top_n_sigma")[:] = torch.tensor([0.0, 1.0, 2.0, -1.0])
    plain.apply_custom_filters(plain.CUSTOM_FILTERS, filtered := logits.clone(), params)
    assert torch.equal(filtered[[0, 3]], logits[[0, 3]])
    for i, n in ((1, 1.0), (2, 2.0)):
        kept = logits[i] >= logits[i].max() - n * logits[i].std()
        assert torch.equal(filtered[i] > -torch.inf, kept) and 0 < kept.sum() < 1000


def test_names_and_numbers_are_checked():
    with pytest.raises(ValueError, match="'top_k': there is a sampling parameter"):
        register_filter("top_k", top_n_sigma)
    for i in range(MAX_CUSTOM_COLUMNS):
        register_filter(f"filter_{i}", top_n_sigma)
    with pytest.raises(ValueError, match="'filter_1': there is"):
        register_filter("filter_1", top_n_sigma)
    with pytest.raises(ValueError, match="'one_more': 4 filters"):
        register_filter("one_more", top_n_sigma)


def test_filters_need_one_rank(make_llm):
    register_filter("top_n_sigma", top_n_sigma)
    with pytest.raises(ValueError, match="tensor_parallel_size=2: must be 1 with filters"):
        make_llm(tensor_parallel_size=2)
