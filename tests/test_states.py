"""What layers keep: states of fixed size, and keys and values of several shapes. Transformers computes them without."""

import gc
import random
import re
import weakref
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from common import generate_by_steps, pairs, runs_as_on_cuda
from safetensors.torch import load_file, save_file
from test_models import make_checkpoint, reference_model
from test_readme import STATE, page

from nanovllm import BeamSearchParams, SamplingParams
from nanovllm.benchmarks.shapes import write_shape
from nanovllm.cache.state import fit_states
from nanovllm.config import Config
from nanovllm.cuda.buffers import make_buffers
from nanovllm.cuda.start import RESERVE_BYTES, free_kv_cache
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.fused import fuse
from nanovllm.models import make_model
from nanovllm.models.llama import LlamaAttention, LlamaForCausalLM
from nanovllm.models.qwen3 import Qwen3MLP
from nanovllm.utils.context import get_context
from nanovllm.utils.families import MODELS

LAYER: dict = {}
exec(STATE, LAYER)  # the layer of CONTRIBUTING.md
SETTINGS = dict(max_model_len=96, kvcache_block_size=16, num_kvcache_blocks=64, max_num_seqs=8)
SCHEDULES = {
    "at once": {},
    "chunks": dict(max_num_batched_tokens=24, max_num_mixed_tokens=16),
    "preemptions": dict(num_kvcache_blocks=8),
    "one at a time": dict(max_num_seqs=1, num_kvcache_blocks=6),
    "without prefix cache": dict(enable_prefix_caching=False),
}


class StatefulMLP(Qwen3MLP):
    def __init__(self, config):
        super().__init__(config)
        self.sum = LAYER["DecayedSum"](config.hidden_size)

    def forward(self, x):
        return super().forward(x) + self.sum(x)


class StatefulForCausalLM(LlamaForCausalLM):
    """The second layer has fewer key-value heads than the first, and both add a decayed sum."""

    def __init__(self, config):
        super().__init__(config)
        first, second = self.model.layers
        second.self_attn = LlamaAttention(replace(config, num_key_value_heads=1), first.self_attn.rotary_emb)

    @staticmethod
    def make_mlp(config, layer_index):
        return StatefulMLP(config)

    @classmethod
    def read_config(cls, raw, file):
        return super().read_config(raw, file) | {"keeps_states": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = make_checkpoint(tmp_path_factory.mktemp("states") / "model", "llama")
    reference = patched(reference_model(folder))
    weights = reference.state_dict()
    generator = torch.Generator().manual_seed(1)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weight = weights[f"model.layers.1.self_attn.{name}.weight"]
        weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5)
    save_file({name: x.contiguous() for name, x in weights.items()}, f"{folder}/model.safetensors")
    return folder


@pytest.fixture(scope="module")
def reference(folder):
    """A function from token ids to the log-probabilities of what follows each."""
    model = patched(reference_model(folder, ignore_mismatched_sizes=True))
    model.load_state_dict(load_file(f"{folder}/model.safetensors"), strict=False)

    @cache  # most answers are the same in all tests
    @torch.no_grad()
    def logprobs(*token_ids: int) -> torch.Tensor:
        return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)

    return logprobs


def patched(model):
    """Transformers' Llama with the layers of StatefulForCausalLM, which compute whole sequences."""
    config = deepcopy(model.config)
    config.num_key_value_heads = 1
    model.model.layers[1].self_attn = type(model.model.layers[1].self_attn)(config, layer_idx=1)
    for layer in model.model.layers:
        layer.mlp.forward = partial(add_decayed_sum, layer.mlp.forward)
    return model.eval()


def add_decayed_sum(mlp, x: torch.Tensor) -> torch.Tensor:
    """[B, T, N]"""
    decay = 0.9 ** (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).tril().float()
    return mlp(x) + decay.tril() @ x


@pytest.fixture
def make_stateful(make_llm, monkeypatch, folder):
    monkeypatch.setitem(MODELS, "llama", f"{__name__}:StatefulForCausalLM")
    return lambda **settings: poison(make_llm(folder, **SETTINGS | settings))


def poison(llm):
    """What no sequence, snapshot or beginning needs is NaN before each step, which would spread."""
    runner, manager = llm.model_runner, llm.scheduler.block_manager
    run_model = runner.run_model

    def run_poisoned(input_ids, positions):
        seqs = [*llm.scheduler.running.values(), *llm.scheduler.prefilling.values()]
        needed = {manager.rows.zeros, *manager.snapshots.values(), *(seq.req_index for seq in seqs)}
        needed |= {*get_context().state_rows.flatten().tolist()}
        needed |= {i - manager.num_blocks for load in getattr(manager, "loads", ()) for i in load.block_ids}
        num_rows = llm.config.num_states + 2
        rows = [row for row in range(num_rows) if row not in needed]
        for spec, tensors in runner.caches.items():
            for tensor in tensors if spec.of_states else ():
                assert tensor.shape[2] == num_rows
                tensor[:, :, rows] = torch.nan if tensor.is_floating_point() else -(2**30)
        return run_model(input_ids, positions)

    runner.run_model = run_poisoned
    return llm


def assert_same_as_reference(reference, outputs) -> None:
    for output in outputs:
        for answer in output.outputs:
            token_ids = output.prompt_token_ids + answer.token_ids
            logprobs = reference(*token_ids)
            n = len(output.prompt_token_ids)
            expected = logprobs[range(n - 1, len(token_ids) - 1), answer.token_ids].tolist()
            found = [logprob[token_id].logprob for token_id, logprob in zip(answer.token_ids, answer.logprobs)]
            assert found == pytest.approx(expected, abs=2e-3), (n, answer.index)
            if prompt_logprobs := output.prompt_logprobs:
                expected = logprobs[range(n - 1), output.prompt_token_ids[1:]].tolist()
                pairs = zip(output.prompt_token_ids[1:], prompt_logprobs[1:])
                assert [x[token_id].logprob for token_id, x in pairs] == pytest.approx(expected, abs=2e-3)


def make_requests(num_requests: int = 14) -> list[tuple[list[int], SamplingParams]]:
    """Some prompts begin with those of others, and end before, at and behind the ends of blocks."""
    rng = random.Random(0)
    shared = [rng.randrange(5, 500) for _ in range(80)]
    requests = []
    for i in range(num_requests):
        prompt = shared[: rng.choice((15, 16, 17, 32, 40, 50))] if i % 2 else []
        prompt = prompt + [rng.randrange(5, 500) for _ in range(rng.choice((1, 5, 16, 17)))]
        options = dict(max_tokens=rng.randint(1, 30), ignore_eos=True, logprobs=0, detokenize=False, seed=i)
        kind = rng.choice([{}, {"n": 3}, {"prompt_logprobs": 0}, {"temperature": 0.0}, {"presence_penalty": 0.5}])
        requests.append((prompt, SamplingParams(**{"temperature": 1.0, **options, **kind})))
    return requests


@pytest.mark.parametrize("schedule, async_scheduling", pairs(SCHEDULES, [False, True]))  # others in test_hybrid.py
def test_same_as_transformers(make_stateful, reference, schedule, async_scheduling):
    llm = make_stateful(**SCHEDULES[schedule], async_scheduling=async_scheduling)
    specs = [*llm.model_runner.cache_groups]
    assert [spec.of_states for spec in specs].count(True) == 1 and len(specs) == 3
    requests = make_requests(6 if schedule == "one at a time" else 10)
    assert_same_as_reference(reference, llm.generate(*map(list, zip(*requests)), use_tqdm=False))
    outputs = generate_by_steps(llm, requests[1::2])  # again, with prefix hits
    assert_same_as_reference(reference, outputs)
    hits = [output.num_cached_tokens for output in outputs]
    assert all(hit % 16 == 0 for hit in hits)
    assert any(hits) if schedule in ("at once", "chunks") else schedule != "without prefix cache" or not any(hits)
    assert llm.stats()["preemptions"] > 0 or schedule != "preemptions"
    assert llm.stats()["blocks"]["used"] == 0


def assert_likelihoods(reference, outputs) -> None:
    """Of beams: `reference` maps token ids to the log-probabilities of the next tokens."""
    for output in outputs:
        n = len(output.prompt_token_ids)
        for beam in output.outputs:
            token_ids = output.prompt_token_ids + beam.token_ids
            expected = reference(*token_ids)[range(n - 1, len(token_ids) - 1), beam.token_ids].sum().item()
            assert beam.cumulative_logprob == pytest.approx(expected, abs=5e-3)


def test_an_mlp_that_keeps_states_computes_all_tokens(make_stateful):
    """On CUDA, other MLPs of the last layer compute only the tokens that are sampled."""
    settings, params = dict(max_num_batched_tokens=24), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    requests = [([i * 7 % 90 + 5 for i in range(n)], params) for n in (50, 3, 1, 25)]
    expected = generate_by_steps(make_stateful(**settings), requests)
    llm = make_stateful(**settings, async_scheduling=True)
    runs_as_on_cuda(llm.model_runner)
    llm.model_runner.buffers = make_buffers(llm.config, torch.device("cpu"))
    fuse(llm.model_runner.model)
    assert [x.outputs for x in generate_by_steps(llm, requests)] == [x.outputs for x in expected]


def test_beams(make_stateful, reference):
    """Beams fork, and copy the state, after each token."""
    llm = make_stateful(num_kvcache_blocks=40)
    prompts = [prompt for prompt, _ in make_requests()[:4]]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True))
    assert_likelihoods(reference, outputs)


def test_prefix_hits(make_stateful, reference):
    """A prompt leaves a snapshot at its last full block; a prefix leaves one when it is used for the second time."""
    llm = make_stateful()
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=0)
    prompt = [*make_requests()[1][0][:15], *range(5, 70)]

    def hit(token_ids: list[int]) -> int:
        (output,) = llm.generate([token_ids], params, use_tqdm=False)
        assert_same_as_reference(reference, [output])
        return output.num_cached_tokens

    assert [hit(prompt), hit(prompt)] == [0, 64]  # of 80 tokens, at least one of which is computed
    assert [hit([*prompt[:40], *range(100, 140 + i)]) for i in (0, 1)] == [0, 64]
    assert [hit([*prompt[:40], *range(200 + i, 240)]) for i in (0, 1)] == [32, 32]
    assert llm.reset_prefix_cache() and hit(prompt) == 0


def test_snapshots_are_bounded(make_stateful, reference):
    """There are twice as many rows as sequences may run; the one that was found least recently goes."""
    llm = make_stateful(max_num_seqs=2)
    manager, params = llm.scheduler.block_manager, SamplingParams(max_tokens=1, ignore_eos=True)
    prompts = [[*range(10 * i, 10 * i + 20)] for i in range(1, 6)]
    hits = lambda i: llm.generate([prompts[i]], params, use_tqdm=False)[0].num_cached_tokens > 0
    assert [hits(i) for i in (0, 1, 2, 0, 3, 0, 2, 3, 1)] == [False, False, False, True, False, True, True, True, False]
    assert len(manager.snapshots) == 3 and len(manager.rows.free_indices) == 1


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_sequences_take_the_rows_of_snapshots(make_stateful, reference, monkeypatch, async_scheduling):
    """One row is for a snapshot alone: others lie in those of sequences, of which three run, then two and one."""
    one_more = lambda runner: runner.config.resolve(num_states=runner.config.max_num_seqs + 1)
    monkeypatch.setattr("nanovllm.batches.batch_runner.fit_states", one_more)
    llm = make_stateful(max_num_seqs=3, async_scheduling=async_scheduling)
    rows, hits = llm.scheduler.block_manager.rows, []
    for requests in (make_requests(), make_requests()[-2:], make_requests()[-1:]):
        outputs = llm.generate(*map(list, zip(*requests)), use_tqdm=False)
        assert_same_as_reference(reference, outputs)
        hits.append(sum(output.num_cached_tokens > 0 for output in outputs))
        assert len(rows.snapshots) == 4 - len(rows.free_indices) > 1
    assert all(hits[1:])


def test_drafts_are_refused(make_stateful):
    """A state can't go back to the last token that was right, and this layer does not compute drafts again."""
    with pytest.raises(ValueError, match="method='ngram': a layer keeps a state, but no drafts"):
        make_stateful(speculative_config={"method": "ngram", "num_speculative_tokens": 2})


def test_a_family_must_tell_that_it_keeps_states(make_stateful, monkeypatch):
    monkeypatch.setattr(StatefulForCausalLM, "read_config", LlamaForCausalLM.read_config)
    with pytest.raises(ValueError, match="model_type='llama': a layer keeps a state, so .* keeps_states=True"):
        make_stateful()


def test_unknown_layers_are_not_batch_invariant(make_stateful):
    """Nobody says of them that a state does not depend on how a prompt was cut into chunks."""
    with pytest.raises(ValueError, match="batch_invariant=True on cpu: must be False .* DecayedSum, which keep"):
        make_stateful(batch_invariant=True)


def test_memory(make_stateful, monkeypatch):
    """States take theirs first; a row for each sequence, its snapshot, padding and zeros."""
    monkeypatch.setattr("nanovllm.engine.model_runner.CPU_KV_CACHE_BYTES", 2**22)
    llm = make_stateful(num_kvcache_blocks=None, max_model_len=64)
    runner = llm.model_runner
    num_bytes = sum(tensor.nbytes for tensors in runner.caches.values() for tensor in tensors)
    block_bytes = 16 * 2 * (2 + 1) * 16 * 4  # tokens, keys and values, heads of both layers, their numbers
    state_bytes = 2 * (8 + 8 + 2) * 64 * 4
    assert (
        num_bytes
        == llm.config.num_kvcache_blocks * block_bytes + state_bytes
        == runner.cache_bytes(llm.config.num_kvcache_blocks)
    )
    assert 2**22 - block_bytes < num_bytes <= 2**22


GPUS = {"H100": 79.1, "H200": 139.8}  # GiB
ROW = r"\| Qwen(\S+) on an (H\d00).*?\| (\w+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|"
ROWS = re.findall(ROW, page("cache"))
assert len(ROWS) == 12, "the table of sizes has another form"


@pytest.mark.parametrize("model, gpu, state_dtype, num_seqs, num_states, num_tokens", ROWS)
def test_sizes_of_published_shapes(tmp_path, model, gpu, state_dtype, num_seqs, num_states, num_tokens):
    """The table of cache.md is what the engine does with such memory, and what weights and steps take of it."""
    write_shape(f"qwen{model.lower()}", tmp_path / "model")
    settings = dict(dtype="bfloat16", mamba_ssm_cache_dtype=state_dtype, load_format="dummy")
    config = Config(str(tmp_path / "model"), device="cpu", **settings)
    with torch.device("meta"):
        layers = [*make_model(config.model_config, config.max_model_len).modules()]
    storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in layers[0].parameters()}  # some share one
    left = int(GPUS[gpu] * config.gpu_memory_utilization * 2**30) - RESERVE_BYTES
    left -= sum(storage.nbytes() for storage in storages.values())
    specs = [layer.cache_spec() for layer in layers if hasattr(layer, "cache_spec")]
    groups = {spec: [spec] * n for spec, n in Counter(specs).items()}
    runner = SimpleNamespace(config=config, cache_groups=groups, cache_budget=lambda: left, min_of_ranks=int)
    runner.cache_bytes = partial(ModelRunner.cache_bytes, runner)
    fit_states(runner)
    ModelRunner.size_kv_cache(runner, left - int(1.9 * 2**30))
    found = config.max_num_seqs, config.num_states, config.num_kvcache_blocks * config.kvcache_block_size
    expected = [int(x.replace(",", "")) for x in (num_seqs, num_states, num_tokens)]
    assert found == pytest.approx(expected, rel=0.005)
    assert config.max_num_seqs >= 256 or gpu == "H100" or "27B" in model  # what the benchmark's requests need


def test_warm_up_gives_states_back(make_stateful, monkeypatch):
    """They can be half of a GPU's memory, so there is no room for others beside them."""
    monkeypatch.setattr(torch.cuda, "empty_cache", gc.collect)
    runner = make_stateful().model_runner
    found = [weakref.ref(tensor) for tensors in runner.caches.values() for tensor in tensors]
    assert len(found) == 3 and all(tensor() is not None for tensor in found)
    free_kv_cache(runner)
    assert all(tensor() is None for tensor in found)
    assert all(layer.cache is None for layers in runner.cache_groups.values() for layer in layers)


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("schedule", ["at once", "preemptions"])
def test_on_a_gpu(make_stateful, reference, schedule, enforce_eager):
    """Graphs contain steps that only decode; padding has a row of its own."""
    llm = make_stateful(
        device="cuda", enforce_eager=enforce_eager, async_scheduling=True, **SETTINGS | SCHEDULES[schedule]
    )
    assert bool(llm.model_runner.graphs) != enforce_eager and llm.model_runner.mixed_graphs is None
    requests = make_requests()
    for _ in range(2):
        assert_same_as_reference(reference, llm.generate(*map(list, zip(*requests)), use_tqdm=False))
    assert_same_as_reference(reference, generate_by_steps(llm, requests))
