"""Compares `generate` with `stream` on the same requests, or our beam search with transformers' beam search."""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from nanovllm import LLM, BeamSearchParams
from nanovllm.benchmarks.engines.nanovllm import inputs
from nanovllm.benchmarks.requests import Request, number_of


def time_alternately(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return how many seconds each call takes in each round, after a warm-up.

    Every other round reverses the order of the calls.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name in list(calls)[:: 1 if i % 2 else -1]:
            begin = perf_counter()
            calls[name]()
            seconds[name].append(perf_counter() - begin)
    return {name: times[1:] for name, times in seconds.items()}


def compare_streaming(model: str, settings: dict, requests: list[Request], rounds: int = 7) -> None:
    prompts, params = inputs(requests)
    num_tokens = sum(r.max_tokens for r in requests)
    with LLM(model, **settings, enable_prefix_caching=False) as llm:
        calls = {
            "generate": lambda: llm.generate(prompts, params, use_tqdm=False),
            "stream": lambda: [event["text"] for event in llm.stream(prompts, params)],
        }
        seconds = time_alternately(calls, rounds)
    for name, times in seconds.items():
        rates = [num_tokens / s for s in times]
        print(f"{name:8} {number_of(requests)}, {num_tokens:,} tokens out", end=", tok/s: ")
        print(f"median {median(rates):,.0f}, best {max(rates):,.0f}")
    ratios = [b / a - 1 for a, b in zip(seconds["generate"], seconds["stream"])]
    best = min(seconds["stream"]) / min(seconds["generate"]) - 1
    print(f"stream takes longer by {median(ratios):+.1%} (median of {rounds} pairs), {best:+.1%} (best of each)")


def compare_beam_search(model: str, settings: dict, width: int, max_tokens: int, rounds: int = 5) -> None:
    """Measure our beam search and transformers' beam search in `rounds` alternating runs on a prompt of 20 tokens."""
    from transformers import AutoModelForCausalLM

    prompt = list(range(300, 320))
    with LLM(model, **settings) as llm:
        config = llm.config
        reference = (
            AutoModelForCausalLM.from_pretrained(config.model, torch_dtype=config.dtype).to(config.device).eval()
        )
        ids = torch.tensor([prompt], device=config.device)
        plain = dict(do_sample=False, temperature=None, top_p=None, top_k=None, eos_token_id=None, pad_token_id=0)
        plain |= dict(attention_mask=torch.ones_like(ids), num_beams=width, max_new_tokens=max_tokens)
        calls = {
            "nanovllm": lambda: llm.beam_search(prompt, BeamSearchParams(width, max_tokens, ignore_eos=True)),
            "transformers": lambda: reference.generate(ids, **plain),
        }
        seconds = time_alternately(calls, rounds)
    print(f"{width} beams, {len(prompt)} tokens in, {max_tokens} out, in seconds:")
    for name, times in seconds.items():
        print(f"{name:13} median {median(times):.2f}, best {min(times):.2f}")
