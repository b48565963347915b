"""Models in which some layers have a window, and block tables of their own whose old blocks are freed."""

import random
from functools import cache

import pytest
import torch
from common import generate_by_steps, pairs
from test_models import CASES, GEMMA3, make_checkpoint, needs_new_families, reference_model
from test_page import Checker
from test_speculation import answers, drafting
from test_states import assert_likelihoods, assert_same_as_reference, make_requests

from nanovllm import BeamSearchParams, SamplingParams
from nanovllm.benchmarks.shapes import write_shape
from nanovllm.cache.window_tables import divide_layers
from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.window_blocks import WindowBlockManager
from nanovllm.models import make_model
from nanovllm.serve.trace import StepRecorder

pytestmark = needs_new_families
KINDS = ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 2
CASE = "gemma3-windows"
SETTINGS = dict(max_model_len=160, kvcache_block_size=16, num_kvcache_blocks=64, max_num_seqs=8)
SCHEDULES = {
    "at once": {},
    "chunks": dict(max_num_batched_tokens=24, max_num_mixed_tokens=16),
    "preemptions": dict(num_kvcache_blocks=10),
    "one at a time": dict(max_num_seqs=1, num_kvcache_blocks=10),
    "without prefix cache": dict(enable_prefix_caching=False),
    "drafts": drafting("ngram"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    entries = GEMMA3 | {"layer_types": KINDS, "num_hidden_layers": len(KINDS)}
    CASES[CASE] = ("Gemma3", 4, 2, 32, {}, entries)
    yield make_checkpoint(tmp_path_factory.mktemp("windows") / "model", CASE)
    del CASES[CASE]


@pytest.fixture(scope="module")
def reference(folder):
    model = reference_model(folder)

    @cache
    @torch.no_grad()
    def logprobs(*token_ids: int) -> torch.Tensor:
        return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)

    return logprobs


@pytest.fixture
def make_windowed(make_llm, folder):
    return lambda **settings: spoil_free_blocks(make_llm(folder, **SETTINGS | settings))


def spoil_free_blocks(llm):
    """Before each step, fill all blocks that nobody holds and that no lookup finds with large numbers."""
    runner, manager = llm.model_runner, llm.scheduler.block_manager
    run_model = runner.run_model

    def run_spoiled(input_ids, positions):
        spoiled = [block.block_id for block in manager.blocks if not block.ref_count and block.hash == -1]
        runner.kv_cache[:, :, spoiled] = 1e4
        return run_model(input_ids, positions)

    runner.run_model = run_spoiled
    return llm


def windowed_requests(number: int = 9) -> list[tuple[list[int], SamplingParams]]:
    """Some prompts are longer than the window, and some of them begin alike."""
    rng, requests = random.Random(1), make_requests(number)
    longer = [rng.randrange(5, 500) for _ in range(70)]
    return [(longer + prompt if i % 3 == 0 else prompt, params) for i, (prompt, params) in enumerate(requests)]


def test_other_ranks_and_drafters(make_windowed, folder, reference):
    """The layers of a draft model use the first table."""
    drafts = drafting("draft_model", model=folder)
    for settings in (drafts, {"tensor_parallel_size": 2} | SCHEDULES["preemptions"]):
        llm = make_windowed(**settings)
        requests = windowed_requests(6)
        outputs = llm.generate(*map(list, zip(*requests)), use_tqdm=False)
        assert_same_as_reference(reference, outputs)
        assert llm.config.num_window_tables == 4 and llm.stats()["blocks"]["used"] == 0
        llm.exit()


@pytest.mark.parametrize("schedule, async_scheduling", pairs(SCHEDULES, [False, True]))
def test_same_as_transformers(make_windowed, reference, schedule, async_scheduling):
    llm = make_windowed(**SCHEDULES[schedule], async_scheduling=async_scheduling)
    assert llm.config.num_window_tables == 4 and llm.config.cache_window == 23
    assert isinstance(llm.scheduler.block_manager, WindowBlockManager)
    requests = windowed_requests(5 if schedule == "one at a time" else 9)
    outputs = [llm.generate(*map(list, zip(*requests)), use_tqdm=False) for _ in range(2)]
    assert_same_as_reference(reference, [*outputs[0], *outputs[1]])
    assert_same_as_reference(reference, generate_by_steps(llm, requests[::2]))
    hits = [output.num_cached_tokens for output in outputs[1]]
    assert any(hits) if schedule in ("at once", "chunks") else schedule != "without prefix cache" or not any(hits)
    assert llm.stats()["preemptions"] > 0 or schedule != "preemptions"
    assert llm.stats()["blocks"]["used"] == 0


@pytest.mark.parametrize("schedule", ["at once", "preemptions", "drafts"])
def test_same_tokens_without_window_tables(make_windowed, monkeypatch, schedule):
    prompts = [prompt for prompt, _ in windowed_requests()]
    params = [SamplingParams(max_tokens=28, n=1 + i % 2, ignore_eos=True, seed=i) for i in range(len(prompts))]
    found = answers(make_windowed(**SCHEDULES[schedule]).generate(prompts, params, use_tqdm=False))
    monkeypatch.setattr("nanovllm.engine.model_runner.divide_layers", lambda runner: None)
    llm = make_windowed(**SCHEDULES[schedule])
    assert llm.config.num_window_tables == 0 and "block_groups" not in llm.stats()
    assert answers(llm.generate(prompts, params, use_tqdm=False)) == found


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_beams(make_windowed, reference, async_scheduling):
    llm = make_windowed(num_kvcache_blocks=30, async_scheduling=async_scheduling)
    prompts = [prompt for prompt, _ in windowed_requests()[:4]]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=30, ignore_eos=True))
    assert_likelihoods(reference, outputs)
    assert llm.stats()["blocks"]["used"] == 0


def test_statistics(make_windowed):
    """A running sequence holds all its blocks of the first table, and few of the others."""
    llm = make_windowed()
    llm.add_request([*range(5, 105)], SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(30):
        llm.step()
    full, windows = llm.stats()["block_groups"]
    assert full == {"window": None, "used": 9}
    assert (windows["window"], windows["tables"]) == (23, 4) and windows["used"] <= 4 * 4
    assert llm.stats()["blocks"]["used"] == full["used"] + windows["used"]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_page(make_windowed, async_scheduling):
    """It adds up how many blocks the window tables hold, and which blocks are cached."""
    llm = make_windowed(**SCHEDULES["preemptions"], async_scheduling=async_scheduling)
    recorder = StepRecorder(llm)
    recorder.start()
    checker = Checker(llm, recorder)
    most = []

    def check(step, result):
        groups = llm.scheduler.block_manager.groups()
        assert checker.view.windows == groups[1]["used"]
        most.append(checker.view.windows)

    llm.core.on_step.append(check)
    llm.generate(*map(list, zip(*windowed_requests())), use_tqdm=False)
    assert max(most) > 0 and checker.view.engine["block_tables"] == 5


def test_gemma_3_12b_holds_five_times_as_many_sequences(tmp_path):
    """Of 32,000 tokens, in the same memory: computed from the sizes of tensors and the blocks that sequences hold."""
    write_shape("gemma3-12b", tmp_path / "model")
    config = Config(str(tmp_path / "model"), load_format="dummy", device="cpu", dtype="bfloat16", max_model_len=32768)
    runner = ModelRunner.__new__(ModelRunner)
    runner.config = config
    with torch.device("meta"):
        model = make_model(config.model_config, config.max_model_len)
    runner.cache_groups = {}
    for layer in model.modules():
        if hasattr(layer, "cache_spec"):
            runner.cache_groups.setdefault(layer.cache_spec(), []).append(layer)
    num_bytes, blocks_of_seq = 100 * 2**30, -(-32_000 // 256)
    before = num_bytes // (blocks_of_seq * runner.cache_bytes(1))
    divide_layers(runner)
    assert (config.num_window_tables, config.cache_window) == (5, 1024)
    manager = WindowBlockManager(num_bytes // runner.cache_bytes(1), 256, True, 5, 1024)
    most_columns = manager.num_blocks_for(1024) + 1
    after = manager.num_blocks // (blocks_of_seq + 5 * most_columns)
    assert (before, after) == (8, 42)
