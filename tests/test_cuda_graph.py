"""Padded steps, as CUDA graphs compute them. Here a graph runs its Python code again instead of kernels."""

import json
import random
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from common import TINY, generate_by_steps, runs_as_on_cuda
from test_drafts import KnownAnswers, answers, drafts  # noqa: F401
from test_heads import write_head
from test_models import CASES, GEMMA3, make_checkpoint, needs_new_families
from torch.utils._pytree import tree_leaves

from nanovllm import SamplingParams
from nanovllm.attention.base import AttentionBackend
from nanovllm.batches.batch import BatchShape
from nanovllm.cuda import draft_graphs
from nanovllm.cuda import graphs as cuda_graph
from nanovllm.cuda import start as cuda
from nanovllm.cuda.buffers import make_buffers
from nanovllm.cuda.draft_graphs import DraftGraphs
from nanovllm.cuda.graphs import DecodeGraphs, MixedGraphs, graph_shapes
from nanovllm.utils import dummy_weights

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in Triton's interpreter")

SMALL = dict(
    load_format="dummy",
    async_scheduling=True,
    max_num_seqs=5,
    max_model_len=64,
    kvcache_block_size=16,
    num_kvcache_blocks=12,
    max_num_batched_tokens=12,
    max_num_mixed_tokens=12,
)


class Rerun:
    """In place of a torch.cuda.CUDAGraph: leaves its results in the tensors of the first run."""

    def __init__(self, work, output: tuple | None):
        self.work, self.output, self.num_replays = work, output, 0

    @torch.inference_mode()
    def replay(self) -> None:
        for first, output in zip(tree_leaves(self.output), tree_leaves(self.work())):
            if first is not output and first is not None:
                first.copy_(output)
        self.num_replays += 1


def capture(work, pool):
    output = work()
    return Rerun(work, output), output


@pytest.fixture
def unsplit_keys(monkeypatch):
    """`test_padding_changes_nothing` has keys of a sequence that several programs read, which takes twice as long."""
    monkeypatch.setattr("nanovllm.kernels.attention.decode_attention.choose_num_splits", lambda *arguments: 1)


@pytest.fixture
def one_layer(tmp_path) -> str:
    """A model folder whose weights are random when it is loaded; the interpreter is slow."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(f"{TINY}/{name}")
    config = json.loads(Path(f"{TINY}/config.json").read_text())
    del config["layer_types"]
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def use_graphs(llm) -> tuple[DecodeGraphs, MixedGraphs]:
    runner = llm.model_runner
    runs_as_on_cuda(runner)
    runner.buffers = make_buffers(llm.config, torch.device("cpu"))
    parts = runner.run_batch, runner.sample_and_accept
    with torch.inference_mode():
        decode_graphs = DecodeGraphs(llm.config, runner.buffers.device, runner.forward, pool=None)
        sizes = llm.config.max_num_seqs, runner.buffers.device, runner.pad_req_index
        graphs = MixedGraphs(graph_shapes(llm.config, runner.backend), *sizes, *parts, pool=None)
    runner.graphs, runner.mixed_graphs = decode_graphs, graphs
    return decode_graphs, graphs


def test_outputs_of_the_last_layer(make_llm, monkeypatch):
    """Steps without graphs compute them only for tokens that are sampled, unless log-probabilities are wanted."""
    from nanovllm.fused import fuse
    from nanovllm.fused.decoder import FusedDecoderLayer

    settings = dict(max_num_batched_tokens=32, kvcache_block_size=16, num_kvcache_blocks=60, max_num_seqs=4)
    prompts = [[i % 90 + 5 for i in range(k, k + n)] for k, n in [(0, 50), (7, 3), (40, 1), (0, 25)]]
    params = [SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, n=1 + i % 2) for i in range(4)]
    wanted = replace(params[0], prompt_logprobs=0)
    expected = generate_by_steps(make_llm(**settings), [*zip(prompts, params), (prompts[3], wanted)])
    llm, seen = make_llm(**settings), []
    runner, fused = llm.model_runner, FusedDecoderLayer.fused
    runs_as_on_cuda(runner)
    runner.buffers = make_buffers(llm.config, torch.device("cpu"))
    fuse(runner.model)

    def record(self, x, residual, rope, rows=None):
        found = fused(self, x, residual, rope, rows)
        seen.append((len(found[1]), len(rope.positions)))
        return found

    monkeypatch.setattr(FusedDecoderLayer, "fused", record)
    assert [x.outputs for x in generate_by_steps(llm, zip(prompts, params))] == [x.outputs for x in expected[:4]]
    narrowed = [count for count in seen if count[0] < count[1]]
    assert len(narrowed) > 1 and all(num_outputs in (1, 2, 4, 8) for num_outputs, _ in narrowed)
    seen.clear()
    (found,) = generate_by_steps(llm, [(prompts[3], wanted)])
    for ours, theirs in zip(found.prompt_logprobs[1:], expected[4].prompt_logprobs[1:], strict=True):
        assert all(x.logprob == pytest.approx(theirs[token_id].logprob, abs=1e-4) for token_id, x in ours.items())
    assert all(num_outputs == num_tokens for num_outputs, num_tokens in seen)
    hook = runner.model.model.layers[-1].mlp.register_forward_hook(lambda module, arguments, output: None)
    seen.clear()
    generate_by_steps(llm, [(prompts[3], params[0])])
    hook.remove()
    assert all(num_outputs == num_tokens for num_outputs, num_tokens in seen), "a hook sees all tokens"
    seen.clear()
    llm.config.resolve(batch_invariant=True)
    generate_by_steps(llm, [(prompts[3], params[0])])
    assert all(num_outputs == num_tokens for num_outputs, num_tokens in seen), "its sums over ranks have other bits"


@needs_new_families
@pytest.mark.usefixtures("unsplit_keys")
@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
def test_window_tables_of_padded_steps(make_llm, tmp_path, use_ops, monkeypatch, drafts, num_drafts):
    """The device fills in the window tables and slots of decode rows, next to those of chunks."""
    monkeypatch.setattr(cuda_graph, "TOKEN_SIZES", (4, 32))
    monkeypatch.setattr(cuda_graph, "capture", capture)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    entries = GEMMA3 | {"layer_types": kinds, "num_hidden_layers": 3, "sliding_window": 9}
    monkeypatch.setitem(CASES, "gemma3-graphs", ("Gemma3", 2, 1, 16, {}, entries))
    folder = make_checkpoint(tmp_path, "gemma3-graphs")
    prompts = [[i % 90 + 5 for i in range(k, k + n)] for k, n in [(0, 33), (7, 3), (0, 36), (9, 9)]]
    params = [SamplingParams(temperature=0.0, max_tokens=3 + i, n=1 + i % 2, ignore_eos=True) for i in range(4)]
    settings = SMALL | {"load_format": "auto"} | (drafts("mixed", num_drafts) if num_drafts else {})
    expected = generate_by_steps(make_llm(folder, **settings), zip(prompts, params))
    texts = tuple([*output.prompt_token_ids, *x.token_ids] for output in expected for x in output.outputs)
    monkeypatch.setattr(KnownAnswers, "texts", texts)
    use_ops("norm_rope_and_store", "place_decodes", "accept")
    llm = make_llm(folder, attention_backend="triton", **settings)
    assert llm.config.num_window_tables == 2
    decode_graphs, graphs = use_graphs(llm)
    outputs = generate_by_steps(llm, zip(prompts, params))
    for used in (decode_graphs.graphs, graphs.models):
        assert any(graph.num_replays for graph in used.values())
    assert [[x.token_ids for x in output.outputs] for output in outputs] == [
        [x.token_ids for x in output.outputs] for output in expected
    ]


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # in a tile of no queries
def test_padding_changes_nothing(make_llm, one_layer, use_ops, monkeypatch, drafts, num_drafts):
    """Nor do the kernels: what is expected comes from steps without padding, of plain PyTorch."""
    monkeypatch.setattr(cuda_graph, "TOKEN_SIZES", (4, 32))
    monkeypatch.setattr(cuda_graph, "capture", capture)
    monkeypatch.setattr(dummy_weights, "BOUND", 1.0)  # each token depends on all before it
    prompts = [[i % 90 + 5 for i in range(k, k + n)] for k, n in [(0, 20), (7, 3), (40, 1), (0, 25), (3, 23), (9, 9)]]
    params = [
        SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.8, max_tokens=6, ignore_eos=True, seed=1, n=2),
        SamplingParams(temperature=0.8, max_tokens=9, ignore_eos=True, seed=2, presence_penalty=1.0, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, prompt_logprobs=1),
        SamplingParams(temperature=0.7, max_tokens=6, ignore_eos=True, seed=3, logit_bias={17: 5.0}, top_k=5),
        SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, bad_words=["a"]),
    ]
    if find_spec("llguidance"):
        prompts.append([50, 51, 52, 53, 54])
        grammar = {"regex": "[a-d]{20}"}
        params.append(SamplingParams(temperature=0.8, max_tokens=6, seed=4, structured_outputs=grammar))
    # processed log-probabilities take what a graph leaves of the sampler's input
    settings = SMALL | {"logprobs_mode": "processed_logprobs"} | (drafts("mixed", num_drafts) if num_drafts else {})
    expected = generate_by_steps(make_llm(one_layer, **settings), zip(prompts, params))
    texts = tuple([*output.prompt_token_ids, *x.token_ids] for output in expected for x in output.outputs)
    monkeypatch.setattr(KnownAnswers, "texts", texts)
    use_ops("norm_rope_and_store", "place_decodes", "accept")

    llm = make_llm(one_layer, attention_backend="triton", **settings)
    runner, k = llm.model_runner, 1 + num_drafts
    assert llm.config.tokens_per_row == k
    shapes = graph_shapes(llm.config, runner.backend)
    found = [(shape.tokens_per_row, shape.num_decode_rows, shape.num_tokens) for shape in shapes]
    expected_shapes = [(1, 0, 4), (1, 0, 12), (1, 4, 4), (1, 5, 12), *([(3, 3, 4), (3, 12, 12)] if k > 1 else [])]
    assert found == expected_shapes
    decode_graphs, graphs = use_graphs(llm)
    outputs = generate_by_steps(llm, zip(prompts, params))
    replayed = {
        (shape.tokens_per_row, shape.num_decode_rows // shape.tokens_per_row)
        for shape in decode_graphs.shapes
        if decode_graphs.graphs[shape.graph_shape].num_replays
    }
    assert replayed >= {(1, size) for size in (1, 2, 4, 5)} if k == 1 else {width for width, _ in replayed} == {1, k}
    num_replays = {shape: graphs.models[shape.graph_shape].num_replays for shape in shapes}
    assert sum(num_replays.values()) == sum(graph.num_replays for graph in graphs.samplers.values())
    assert {shape.num_decode_rows for shape, count in num_replays.items() if count} >= {0, 5 if k == 1 else 12}, (
        num_replays
    )
    for output, reference in zip(outputs, expected, strict=True):
        for ours, theirs in zip(output.outputs, reference.outputs, strict=True):
            assert ours.token_ids == theirs.token_ids
        for ours, theirs in zip(output.prompt_logprobs or (), reference.prompt_logprobs or (), strict=True):
            assert (ours and ours.keys()) == (theirs and theirs.keys())
    for i in (0, 2):
        for ours, theirs in zip(outputs[i].outputs[0].logprobs, expected[i].outputs[0].logprobs, strict=True):
            assert [x.rank for x in ours.values()] == [x.rank for x in theirs.values()]
            assert next(iter(ours.values())).logprob == pytest.approx(next(iter(theirs.values())).logprob, abs=1e-3)


@pytest.mark.usefixtures("unsplit_keys")
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
def test_drafts_of_graphs(make_llm, one_layer, use_ops, monkeypatch, tmp_path, method):
    """Drafters whose rows are padded draft the same, whether one to all of their drafts were taken, and more sequences
    than a graph has may draft in a step.
    """
    monkeypatch.setattr(cuda_graph, "TOKEN_SIZES", (4, 32))
    monkeypatch.setattr(cuda_graph, "capture", capture)
    monkeypatch.setattr(draft_graphs, "capture", capture)
    monkeypatch.setattr(draft_graphs, "ROWS", (8, 12))
    monkeypatch.setattr(dummy_weights, "BOUND", 1.0)
    speculative = {"method": method, "num_speculative_tokens": 3, "model": one_layer, "disable_by_batch_size": 4}
    if method == "eagle3":
        head = write_head(tmp_path / "head", "authors", target=one_layer, layer_ids=[0, 0, 0], head_dim=32)
        rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.6, 0.4]}
        speculative |= {"model": str(head), **rates}
    rng = random.Random(0)
    prompts = [[rng.randrange(5, 2000) for _ in range(n)] for n in (20, 3, 1, 17, 30)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0.8, max_tokens=9, ignore_eos=True, seed=2, presence_penalty=1.0),
        SamplingParams(temperature=0.8, max_tokens=11, ignore_eos=True, seed=1, n=2),
        SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True, seed=3, logit_bias={17: 5.0}, top_k=5),
        SamplingParams(temperature=1.0, max_tokens=13, ignore_eos=True, seed=4, top_p=0.9),
    ]
    settings = SMALL | {"speculative_config": speculative}
    plain = make_llm(one_layer, **settings)
    expected = generate_by_steps(plain, zip(prompts, params))
    use_ops("norm_rope_and_store", "place_decodes", "place_chains", "accept")
    llm = make_llm(one_layer, attention_backend="triton", **settings)
    runner, k = llm.model_runner, 4
    runs_as_on_cuda(runner)
    runner.buffers, drafter = make_buffers(llm.config, torch.device("cpu")), runner.features["spec_decode"].drafter
    with torch.inference_mode():
        runner.graphs = DecodeGraphs(llm.config, runner.buffers.device, runner.forward, pool=None)
        graphs = DraftGraphs(llm.config, drafter, runner.pad_req_index, pool=None)
    drafter.run, drafter.run_chunks = graphs.run, graphs.run_chunks
    if method == "eagle3":
        monkeypatch.setattr(cuda, "max_seqs_of", lambda *_: 2)  # of the three sizes two, as the interpreter is slow
        llm.config.resolve(max_model_len=18)  # and two steps, not four
        cuda.measure_drafts(runner)
        llm.config.resolve(max_model_len=SMALL["max_model_len"])
        cost, of_decodes = llm.config.speculative_config.step_cost, runner.graphs.graphs
        assert cost.rows == (1, 2) and min(cost.times + cost.drafting) > 0 and cost.of(2, 3) == cost.drafting[1]
        wide = [of_decodes[shape.graph_shape] for shape in runner.graphs.shapes if shape.tokens_per_row == k]
        assert [sorted(x.num_replays for x in found) for found in (graphs.graphs.values(), wide)] == [[0, 6, 6]] * 2
        for table in runner.tables:
            table.zero_()
        llm.scheduler.settings = plain.scheduler.settings  # drafts as often
    num_before = {size: graph.num_replays for size, graph in graphs.graphs.items()}
    outputs = generate_by_steps(llm, zip(prompts, params))
    assert answers(outputs) == answers(expected)
    num_replays = {size: graph.num_replays - num_before[size] for size, graph in graphs.graphs.items()}
    assert num_replays[1] > 2 and num_replays[2] + num_replays[4] > 2, num_replays
    assert all(graph.num_replays for graph, *_ in graphs.chunks.values()), graphs.chunks
    drafts, of_plain = (x.stats()["spec_decode"] for x in (llm, plain))
    assert drafts == of_plain and 20 < drafts["accepted_tokens"] <= drafts["draft_tokens"]


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_drafters_where_kernels_are_only_compiled(make_llm, one_layer, use_ops, monkeypatch, tmp_path, method):
    """As when a start on CUDA compiles kernels: what they would write is an index, and what is drawn may be any."""
    kernels = pytest.importorskip("nanovllm.kernels.sampling.place_decodes")
    model = one_layer
    if method == "eagle3":
        model = str(write_head(tmp_path / "head", "authors", target=one_layer, layer_ids=[0, 0, 0], head_dim=32))
    speculative = {"method": method, "num_speculative_tokens": 3, "model": model}
    llm = make_llm(one_layer, **SMALL, speculative_config=speculative)
    monkeypatch.setattr(kernels, "launch_ordinary", lambda kernel, grid: lambda *args, **constants: None)
    drawn = torch.full((4,), 2**30, dtype=torch.int32)
    use_ops(table={"place_chains": kernels.place_chains, "sample": lambda *args, **options: (drawn, drawn)})
    drafter = llm.model_runner.features["spec_decode"].drafter
    with torch.inference_mode():
        for _ in range(2):
            drafter.draft_chains(*torch.zeros(2, 4, dtype=torch.int32), num_steps=3)
    assert (llm.model_runner.tables.last_token_ids[0, 1:] == -1).all()


@pytest.mark.usefixtures("unsplit_keys")
@pytest.mark.skipif(not find_spec("llguidance"), reason="llguidance is not installed")
def test_masks_of_drafts(make_llm, one_layer, use_ops, monkeypatch):
    """What a grammar forces is drafted, and each draft of a graph has its own mask, beside rows that are free."""
    monkeypatch.setattr(cuda_graph, "capture", capture)
    monkeypatch.setattr(dummy_weights, "BOUND", 1.0)
    grammars = {"regex": "(abcdefgh|hgfedcba){3}[cd]"}, {"choice": ["KING RICHARD", "KING HENRY"]}, None
    params = [
        SamplingParams(temperature=1.0, max_tokens=30, seed=i, structured_outputs=own, ignore_eos=own is None)
        for i, own in enumerate(grammars)
    ]
    requests = [("Hello", own) for own in params]
    settings = SMALL | {"max_model_len": 80, "num_kvcache_blocks": 15}
    expected = generate_by_steps(make_llm(one_layer, **settings), requests)
    use_ops("norm_rope_and_store", "place_decodes", "accept", "penalize")
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "disable_by_batch_size": 4}
    llm = make_llm(one_layer, attention_backend="triton", **settings, speculative_config=speculative)
    runner = llm.model_runner
    runs_as_on_cuda(runner)
    runner.buffers = make_buffers(llm.config, torch.device("cpu"))
    runner.add_features(["logit_edits"])
    with torch.inference_mode():
        runner.graphs = DecodeGraphs(llm.config, runner.buffers.device, runner.forward, pool=None)
    assert answers(generate_by_steps(llm, requests)) == answers(expected)
    drafts = llm.stats()["spec_decode"]
    assert drafts["accepted_tokens"] > 8 and drafts["accepted_per_position"][2] > 1, drafts
    widths = {
        shape.tokens_per_row for shape in runner.graphs.shapes if runner.graphs.graphs[shape.graph_shape].num_replays
    }
    assert widths == {1, 4}


def test_the_smallest_graph_that_holds_a_step(make_llm):
    config = make_llm(max_num_seqs=64, max_num_batched_tokens=300, max_num_mixed_tokens=256).config
    shapes = graph_shapes(config, AttentionBackend())
    graphs = object.__new__(MixedGraphs)
    graphs.shapes = shapes

    def found(num_decodes: int, num_tokens: int, num_chunks: int, num_sampled_tokens: int) -> tuple[int, int] | None:
        step = BatchShape(num_tokens, num_decodes + num_chunks, num_decodes, num_sampled_tokens, max_blocks_per_seq=1)
        return (shape := graphs.shape_for(step)) and (shape.num_decode_rows, shape.num_tokens)

    assert found(0, 1, 1, 1) == (0, 16) and found(0, 17, 1, 0) == (0, 32) and found(3, 43, 1, 4) == (64, 64)
    assert found(33, 80, 2, 35) == (64, 128) and found(0, 256, 32, 32) == (0, 256) and found(20, 32, 1, 21) == (32, 32)
    assert found(0, 256, 33, 33) is None and found(0, 257, 1, 1) is None
    assert found(0, 16, 1, 60) is None  # attention of no decode would not wait for what is before it
    assert max(shape.num_tokens for shape in shapes) == 256


def test_rows_of_the_largest_graph_with_chunks(make_llm):
    """Kernels for more may round in their own way: no step is padded to so many, in an engine with graphs alone."""
    from nanovllm.kernels.hopper.hopper_tiles import MAX_CAPTURED_ROWS

    config = make_llm(max_num_batched_tokens=16384, max_num_mixed_tokens=16384).config
    assert max(shape.num_tokens for shape in graph_shapes(config, AttentionBackend())) == MAX_CAPTURED_ROWS
    assert max(draft_graphs.ROWS) <= MAX_CAPTURED_ROWS
