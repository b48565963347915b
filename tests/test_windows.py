"""Models in which some layers have a window, and block tables of their own whose old blocks are freed."""

import random
from dataclasses import replace
from functools import cache
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from common import generate_by_steps, pairs
from test_models import CASES, GEMMA3, GEMMA4, GEMMA4_SHARED, make_checkpoint, needs_new_families, reference_model
from test_page import Checker
from test_speculation import answers, drafting
from test_states import assert_likelihoods, assert_same_as_reference, make_requests

from nanovllm import BeamSearchParams, SamplingParams
from nanovllm.batches.batch_runner import BatchRunner
from nanovllm.benchmarks.shapes import write_shape
from nanovllm.cache.window_tables import divide_layers
from nanovllm.config import Config
from nanovllm.engine.window_blocks import WindowBlockManager
from nanovllm.models import make_model
from nanovllm.serve.trace import StepRecorder

pytestmark = needs_new_families


def layers(kinds: str, **entries) -> dict:
    """s: a layer with a window, f: a full layer"""
    names = {"s": "sliding_attention", "f": "full_attention"}
    return {"layer_types": [names[kind] for kind in kinds], "num_hidden_layers": len(kinds)} | entries


class Windowed(NamedTuple):
    """A model, and how its layers are divided."""

    case: tuple
    num_tables: int
    views: list[tuple[int, int, int]]


WINDOWED = {
    "gemma3-windows": Windowed(("Gemma3", 4, 2, 32, {}, GEMMA3 | layers("ssfss")), 4, [(i, 1, 0) for i in range(4)]),
    # a block stores 64 numbers of two layers with a window, or of four layers without; the fourth is missing
    "gemma4-windows": Windowed(
        ("Gemma4", 4, 4, 16, {}, GEMMA4 | layers("ssfsfsf")), 2, [(0, 1, 0), (1, 1, 0), (-1, 2, 0), (-1, 2, 1)]
    ),
    # a block stores 32 numbers of one layer without a window, or of two layers with a window
    "gemma4-shared-windows": Windowed(
        ("Gemma4", 4, 1, 16, {}, GEMMA4 | GEMMA4_SHARED | layers("sssfssf", num_kv_shared_layers=2)),
        2,
        [(0, 2, 0), (0, 2, 1), (1, 2, 0), (1, 2, 1)],
    ),
}
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
def make_once(tmp_path_factory):
    """Return a function that makes each checkpoint once, and its reference, which remembers what it has computed."""

    @cache
    def make(name: str):
        with patch.dict(CASES, {name: WINDOWED[name].case}):
            folder = make_checkpoint(tmp_path_factory.mktemp("windows") / "model", name)
        model = reference_model(folder)

        @cache
        @torch.no_grad()
        def logprobs(*token_ids: int) -> torch.Tensor:
            return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)

        return folder, logprobs

    return make


@pytest.fixture
def name(request):
    return getattr(request, "param", "gemma3-windows")


@pytest.fixture
def folder(make_once, name):
    return make_once(name)[0]


@pytest.fixture
def reference(make_once, name):
    return make_once(name)[1]


@pytest.fixture
def make_windowed(make_llm, folder):
    return lambda **settings: spoil_free_blocks(make_llm(folder, **SETTINGS | settings))


def spoil_free_blocks(llm):
    """Before each step, fill all blocks that nobody holds and that no lookup finds with large numbers."""
    runner, manager = llm.model_runner, llm.scheduler.block_manager
    run_model = runner.run_model

    def run_spoiled(input_ids, positions):
        spoiled = [block.block_id for block in manager.blocks if not block.ref_count and block.hash == -1]
        runner.kv_cache[:, :, spoiled] = 0x7E if runner.kv_cache.dtype == torch.uint8 else 1e4  # 0x7E: 448 in e4m3
        return run_model(input_ids, positions)

    runner.run_model = run_spoiled
    return llm


def windowed_requests(number: int = 7, longest: int = 12) -> list[tuple[list[int], SamplingParams]]:
    """Some prompts are longer than the window, and some of them begin alike."""
    rng = random.Random(1)
    requests = [(prompt, replace(x, max_tokens=min(x.max_tokens, longest))) for prompt, x in make_requests(number)]
    longer = [rng.randrange(5, 500) for _ in range(70)]
    return [(longer + prompt if i % 3 == 0 else prompt, params) for i, (prompt, params) in enumerate(requests)]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", WINDOWED, indirect=True)
def test_other_ranks_and_drafters(make_windowed, folder, reference, name):
    """The layers of a draft model use the first table."""
    ranks = {"tensor_parallel_size": 2} | SCHEDULES["preemptions"]
    for settings in [ranks] + [drafting("draft_model", model=folder)] * (name == "gemma3-windows"):
        llm = make_windowed(**settings)
        requests = windowed_requests(4)
        outputs = llm.generate(*map(list, zip(*requests)), use_tqdm=False)
        assert_same_as_reference(reference, outputs)
        assert llm.config.num_window_tables > 0 and llm.stats()["blocks"]["used"] == 0
        assert len(llm.config.table_views) <= llm.config.model_config.max_table_views
        llm.exit()


@pytest.mark.parametrize(
    "name, schedule, async_scheduling",
    [("gemma3-windows", *pair) for pair in pairs(SCHEDULES, [False, True])]
    + [("gemma4-windows", *pair) for pair in (("chunks", False), ("preemptions", True), ("drafts", True))]
    + [("gemma4-shared-windows", *pair) for pair in (("at once", True), ("chunks", True), ("drafts", False))],
    indirect=["name"],
)
def test_same_as_transformers(make_windowed, name, reference, schedule, async_scheduling):
    llm = make_windowed(**SCHEDULES[schedule], async_scheduling=async_scheduling)
    assert (llm.config.num_window_tables, [*llm.config.table_views]) == WINDOWED[name][1:]
    assert llm.config.cache_window == 23 and len(llm.model_runner.cache_groups) == 1
    assert isinstance(llm.scheduler.block_manager, WindowBlockManager)
    requests = windowed_requests(*{"one at a time": (4,), "preemptions": (9, 22)}.get(schedule, ()))
    assert_same_as_reference(reference, llm.generate(*map(list, zip(*requests)), use_tqdm=False))
    outputs = generate_by_steps(llm, requests[::2])  # again, with prefix hits
    assert_same_as_reference(reference, outputs)
    hits = [output.num_cached_tokens for output in outputs]
    assert any(hits) if schedule in ("at once", "chunks") else schedule != "without prefix cache" or not any(hits)
    assert llm.stats()["preemptions"] > 0 or schedule != "preemptions"
    assert llm.stats()["blocks"]["used"] == 0


@pytest.mark.parametrize(
    "name, schedule, settings",
    [("gemma3-windows", schedule, {}) for schedule in ("at once", "preemptions", "drafts")]
    + [(name, "at once", {"kv_cache_dtype": "fp8"}) for name in ("gemma4-windows", "gemma4-shared-windows")],
    indirect=["name"],
)
def test_same_tokens_without_window_tables(make_windowed, monkeypatch, schedule, settings):
    prompts = [prompt for prompt, _ in windowed_requests()]
    params = [SamplingParams(max_tokens=7, n=1 + i % 2, ignore_eos=True, seed=i) for i in range(len(prompts))]
    settings = settings | SCHEDULES[schedule]
    llm = make_windowed(**settings)
    assert llm.config.num_window_tables > 0
    found = answers(llm.generate(prompts, params, use_tqdm=False))
    monkeypatch.setattr("nanovllm.batches.batch_runner.divide_layers", lambda runner: None)
    llm = make_windowed(**settings)
    assert llm.config.num_window_tables == 0 and "block_groups" not in llm.stats()
    assert answers(llm.generate(prompts, params, use_tqdm=False)) == found


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_beams(make_windowed, reference, async_scheduling):
    llm = make_windowed(num_kvcache_blocks=30, async_scheduling=async_scheduling)
    prompts = [prompt for prompt, _ in windowed_requests()[:4]]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=20, ignore_eos=True))
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


@pytest.mark.parametrize(
    "shape, num_tables, before, after",
    [("gemma3-12b", 5, 8, 42), ("gemma4-31b", 10, 3, 29), ("gemma4-26b-a4b", 9, 14, 100), ("gemma4-e2b", 2, 182, 521)],
)
def test_more_sequences_fit(tmp_path, shape, num_tables, before, after):
    """Of 32,000 tokens, in the same memory: computed from the sizes of tensors and the blocks that sequences hold."""
    write_shape(shape, tmp_path / "model")
    config = Config(str(tmp_path / "model"), load_format="dummy", device="cpu", dtype="bfloat16", max_model_len=32768)
    runner = BatchRunner.__new__(BatchRunner)
    runner.config = config
    with torch.device("meta"):
        model = make_model(config.model_config, config.max_model_len)
    runner.cache_groups = {}
    for layer in model.modules():
        if hasattr(layer, "cache_spec"):
            runner.cache_groups.setdefault(layer.cache_spec(), []).append(layer)
    num_bytes, blocks_of_seq = 100 * 2**30, -(-32_000 // 256)
    found = num_bytes // (blocks_of_seq * runner.cache_bytes(1))
    divide_layers(runner)
    assert len(config.table_views) <= config.model_config.max_table_views
    manager = WindowBlockManager(num_bytes // runner.cache_bytes(1), 256, True, num_tables, config.cache_window)
    most_columns = manager.num_blocks_for(config.cache_window) + 1
    assert (config.num_window_tables, found) == (num_tables, before)
    assert manager.num_blocks // (blocks_of_seq + num_tables * most_columns) == after
