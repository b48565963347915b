"""Sequences of 32,768 tokens: chunks beside decodes, a prefix hit, and a preemption, against transformers."""

import random
from pathlib import Path

import pytest
import torch
from common import TINY, generate_by_steps

from nanovllm import SamplingParams

MAX_LEN = 32768
NUM_OUTPUT = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small model of one layer for sequences of MAX_LEN tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("long")
    shape = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, head_dim=16)
    config = Qwen3Config(
        vocab_size=2048,
        num_key_value_heads=1,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.3,
        sliding_window=None,  # transformers 4.51 has a window of 4,096 tokens, also where it is not in use
        **shape,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(f"{TINY}/{name}")
    return folder


def check(folder: Path, prompt: list[int], token_ids: list[int]) -> None:
    """Each token is transformers' best one after those before it, or within rounding of it."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    logits = model(torch.tensor([prompt + token_ids]), logits_to_keep=len(token_ids) + 1).logits[0, :-1]
    chosen = logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    assert (logits.max(1).values - chosen).max() < 2e-4
    assert logits.std() > 0.1 and len({*token_ids}) > 1


def test_32768_tokens(make_llm, folder):
    rng = random.Random(0)
    long, short = ([rng.randrange(2045) for _ in range(n)] for n in (MAX_LEN - NUM_OUTPUT, 250))
    llm = make_llm(
        str(folder),
        max_model_len=MAX_LEN,
        max_num_batched_tokens=2048,
        max_num_mixed_tokens=1024,
        kvcache_block_size=16,
        num_kvcache_blocks=(MAX_LEN + 256) // 16 + 1,
        scheduling_policy="priority",
        async_scheduling=True,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)

    # the short sequence decodes beside the chunks; after two more blocks of its own, the long one has to go
    many = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    first, other = generate_by_steps(llm, [(long, greedy, 1), (short, many, 0)])
    stats = llm.stats()
    assert stats["preemptions"] > 0 and stats["steps"]["mixed"] > 20
    (again,) = generate_by_steps(llm, [(long, greedy, 0)])
    assert again["num_cached_tokens"] == (len(long) - 1) // 16 * 16
    assert first["token_ids"] == again["token_ids"] and len(other["token_ids"]) == 100
    check(folder, long, first["token_ids"])
    check(folder, short, other["token_ids"])
