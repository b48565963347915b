"""What trainers need: new weights in a running engine, pauses, and log-probabilities of what was sampled."""

import threading
from pathlib import Path

import pytest
import torch
from common import EXPERTS_ON_TWO, TINY, TWO_GPUS
from safetensors.torch import load_file, save_file
from test_models import SMALL, make_checkpoint, reference_model
from test_quantization import split_experts, write_quantized

from nanovllm import LLM, SamplingParams
from nanovllm.engine.engine import UnavailableError
from nanovllm.rollout import weights_of

PROMPTS = [[7, 8, 9, 10] * 6, [300, 20, 1]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WAYS = [GREEDY, SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True)]


def perturbed(folder: str, target: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of the same shape with other weights, in `target`, and its tensors."""
    target.mkdir()
    for file in Path(folder).glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    random = torch.Generator().manual_seed(1)
    weights = load_file(f"{folder}/model.safetensors")
    for name, tensor in weights.items():
        weights[name] = tensor + (0.3 * torch.randn(tensor.shape, generator=random)).to(tensor.dtype) * tensor.std()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return weights


def answers(llm) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, WAYS, use_tqdm=False)]


def bits(llm) -> dict[str, torch.Tensor]:
    """All that the model of rank 0 computes with, and the scales that are no parameters."""
    model = llm.model_runner.model
    found = dict(model.named_parameters())
    for path, module in model.named_modules():
        for name, weight in getattr(getattr(module, "format", None), "weights", {}).items():
            found[f"{path}.{name}.scales"] = weight.scales
        if (scales := getattr(getattr(module, "format", None), "scales", None)) is not None:
            found[f"{path}.scales"] = scales
    return {name: tensor.detach().view(torch.uint8).clone() for name, tensor in found.items()}


def assert_loaded(llm, fresh) -> list[list[int]]:
    """`llm` computes as `fresh` does, which was started from the same weights: their answers."""
    ours, theirs = bits(llm), bits(fresh)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    found = answers(llm)
    assert found == answers(fresh)
    return found


# -- new weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, settings",
    [
        ("llama-biases", {}),
        ("llama-3.2", {}),  # whose embedding is tied
        ("llama-3.2", {"dtype": "bfloat16"}),
        ("qwen3-moe", {}),
        ("llama-biases", {"quantization": "int8"}),
        ("qwen3-moe", {"quantization": "fp8"}),
        ("qwen3-moe", {"quantization": "int4"}),
    ],
)
def test_as_if_started_from_them(make_llm, tmp_path, name, settings):
    folder = make_checkpoint(tmp_path / "old", name)
    weights = perturbed(folder, tmp_path / "new")
    llm, fresh = (make_llm(str(path), **SMALL, **settings) for path in (folder, tmp_path / "new"))
    before = answers(llm)
    pointers = {name: p.data_ptr() for name, p in llm.model_runner.model.named_parameters()}
    llm.load_weights(weights.items())
    assert assert_loaded(llm, fresh) != before
    assert pointers == {name: p.data_ptr() for name, p in llm.model_runner.model.named_parameters()}
    # tensors of any floating dtype, in parts, each in a call of its own
    llm.load_weights(weights_of(folder))
    for part in [*split_experts(weights).items()]:
        llm.load_weights([(part[0], part[1].double())])
    assert_loaded(llm, fresh)


@pytest.mark.parametrize("name, format_name", [("llama-biases", "small-blocks"), ("qwen3-moe", "block")])
def test_quantized_checkpoints(make_llm, tmp_path, name, format_name):
    """8-bit values and scales are taken as they are, and weights of other dtypes are quantized again."""
    old, _ = write_quantized(make_checkpoint(tmp_path / "old", name), tmp_path / "a", format_name, margin=1.0)
    perturbed(str(tmp_path / "old"), tmp_path / "new")
    new, _ = write_quantized(str(tmp_path / "new"), tmp_path / "b", format_name, margin=1.0)
    llm, fresh = make_llm(old, **SMALL), make_llm(new, **SMALL)
    llm.load_weights(weights_of(new))
    assert_loaded(llm, fresh)
    llm.load_weights(weights_of(old))
    llm.load_weights(weights_of(tmp_path / "new"))
    assert_loaded(llm, fresh)
    with pytest.raises(ValueError, match=r"q_proj.weight: its dtype is int8: must be one of .* float8_e4m3fn"):
        llm.load_weights([("model.layers.0.self_attn.q_proj.weight", torch.zeros(64, 64, dtype=torch.int8))])


def test_heads(make_llm, tmp_path):
    """Of a checkpoint that says it is tied and has another head, both are replaced. A tied engine takes no other."""
    folder = make_checkpoint(tmp_path / "old", "llama-3.2")
    tied, weights = make_llm(folder, **SMALL), perturbed(folder, tmp_path / "new")
    embedding = "model.embed_tokens.weight"
    tied.load_weights((weights | {"lm_head.weight": weights[embedding].double()}).items())
    assert_loaded(tied, make_llm(str(tmp_path / "new"), **SMALL))
    with pytest.raises(ValueError, match="lm_head.weight: differs from the embedding, which this engine uses as its"):
        tied.load_weights((weights | {"lm_head.weight": weights[embedding] + 1}).items())

    for path in (tmp_path / "old", tmp_path / "new"):
        tensors = load_file(path / "model.safetensors")
        tensors["lm_head.weight"] = tensors[embedding].flip(0).contiguous()
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    llm, fresh = make_llm(folder, **SMALL), make_llm(str(tmp_path / "new"), **SMALL)
    before = answers(llm)
    llm.load_weights(weights_of(tmp_path / "new"))
    assert assert_loaded(llm, fresh) != before


def ranks_with_new_weights(make_llm, tmp_path, **settings) -> tuple[LLM, str]:
    """An engine of two ranks that has taken new weights, and the folder of these."""
    folder, new = make_checkpoint(tmp_path / "old", "qwen3-moe"), tmp_path / "new"
    weights = split_experts(perturbed(folder, new))
    llm = make_llm(folder, tensor_parallel_size=2, **settings)
    before = answers(llm)
    with pytest.raises(ValueError, match="experts.7.down_proj.weight: the checkpoint has shape"):
        llm.load_weights([("model.layers.0.mlp.experts.7.down_proj.weight", torch.zeros(3, 3))])
    assert answers(llm) == before
    llm.load_weights(weights.items())
    assert before != answers(llm) == answers(make_llm(str(new), **settings))
    return llm, str(new)


@pytest.mark.usefixtures("forked_ranks")
def test_ranks(make_llm, tmp_path):
    """Which have parts of all experts; test_sleep.py has experts by rank, in FP8."""
    ranks_with_new_weights(make_llm, tmp_path, **SMALL)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, settings",
    [
        ("llama-3.2", {}),
        ("mistral-window", {"quantization": "int8"}),
        ("llama-3.2", {"quantization": "int4"}),
        ("qwen3-moe", {"quantization": "fp8"}),
        ("qwen3-moe", {"enforce_eager": True}),
        pytest.param("llama-3.2", {"tensor_parallel_size": 2}, marks=TWO_GPUS),
        pytest.param("qwen3-moe", {"tensor_parallel_size": 2}, marks=TWO_GPUS),
        pytest.param("qwen3-moe", EXPERTS_ON_TWO | {"quantization": "fp8"}, marks=TWO_GPUS),
    ],
)
def test_on_a_gpu(make_llm, tmp_path, name, settings):
    """From tensors of the GPU, under graphs that were captured before."""
    folder = make_checkpoint(tmp_path / "old", name)
    weights = perturbed(folder, tmp_path / "new")
    settings = {"device": "cuda", "dtype": "bfloat16"} | settings
    llm, fresh = (make_llm(str(path), **SMALL, **settings) for path in (folder, tmp_path / "new"))
    before = answers(llm)
    llm.load_weights((name, tensor.cuda()) for name, tensor in weights.items())
    assert_loaded(llm, fresh)
    assert answers(llm) != before


def test_the_prefix_cache_is_emptied(make_llm):
    llm = make_llm(kvcache_block_size=16)
    for num_cached in (0, 16, 0):
        output = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)[0]
        assert output.num_cached_tokens == num_cached
        if num_cached:
            llm.load_weights([("model.norm.weight", torch.ones(256))])


BROKEN = [
    ({"x": torch.ones(1)}, ValueError, "weights: 'x': the model has no such tensor"),
    ({3: torch.ones(1)}, ValueError, "weights: 3: the model has no such tensor"),
    ({"model.norm.weight": [1.0]}, TypeError, "'model.norm.weight' has a list: must be a torch.Tensor"),
    (
        {"model.norm.weight": torch.ones(3)},
        ValueError,
        r"norm.weight: the checkpoint has shape \[3\], .* needs \[64\]",
    ),
    (
        {"model.norm.weight": torch.ones(64).int()},
        ValueError,
        "norm.weight: its dtype is int32: must be one of float64",
    ),
    ({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}, ValueError, "its dtype is float8_e4m3fn"),
    (
        {"model.norm.weight": torch.full((64,), torch.nan)},
        ValueError,
        "norm.weight: is NaN or infinite in torch.float32",
    ),
    (
        {"model.norm.weight": torch.full((64,), 1e300, dtype=torch.float64)},
        ValueError,
        "is NaN or infinite in torch.float32",
    ),
]


@pytest.fixture(scope="module")
def engine_for_bad_weights(two_layer_model):
    """After each of these tests it has its weights again."""
    with LLM(two_layer_model, dtype="float32", device="cpu") as llm:
        yield llm


@pytest.mark.parametrize("weights, error, message", BROKEN)
def test_bad_weights(engine_for_bad_weights, two_layer_model, weights, error, message):
    """Before anything is written an error changes nothing; afterwards, the engine waits for all weights."""
    llm = engine_for_bad_weights
    before = answers(llm)
    with pytest.raises(error, match=message):
        llm.load_weights(weights.items())
    assert answers(llm) == before
    good = dict(weights_of(two_layer_model))
    with pytest.raises(error, match=message):
        llm.load_weights([("model.embed_tokens.weight", good["model.embed_tokens.weight"]), *weights.items()])
    for refused in (lambda: answers(llm), lambda: llm.add_request(PROMPTS[0]), llm.step, lambda: next(llm.stream("a"))):
        with pytest.raises(UnavailableError, match="load all weights, in one call"):
            refused()
    llm.load_weights([*good.items()][1:])  # all but one
    with pytest.raises(UnavailableError, match="load all weights"):
        answers(llm)
    llm.load_weights(good.items())
    assert answers(llm) == before


def test_interrupted(make_llm):
    """Ctrl-C, or an error of the generator, in the middle."""
    llm = make_llm()
    before = answers(llm)
    for error in (KeyboardInterrupt, OSError):

        def weights(error=error):
            yield from [*weights_of(TINY)][:3]
            raise error

        with pytest.raises(error):
            llm.load_weights(weights())
        with pytest.raises(UnavailableError, match="load all weights"):
            answers(llm)
        llm.load_weights(weights_of(TINY))
        assert answers(llm) == before


def test_requests_that_run(make_llm):
    llm = make_llm()
    llm.add_request(PROMPTS[0], GREEDY)
    llm.step()
    with pytest.raises(UnavailableError, match="requests that have not ended: 1"):
        llm.load_weights([])
    while not llm.is_finished():
        llm.step()
    inner = []

    def weights():
        for call in (lambda: llm.load_weights([]), lambda: llm.generate(PROMPTS, GREEDY)):
            with pytest.raises(UnavailableError) as found:
                call()
            inner.append(str(found.value))
        yield "model.norm.weight", torch.ones(256)

    llm.load_weights(weights())
    assert len(inner) == 2 and all("the weights are being replaced" in message for message in inner)


# -- pauses ------------------------------------------------------------------------------------------------------------


def test_abort_and_go_on_from_the_tokens(make_llm):
    """A partial rollout: its tokens are a prompt later, and are found in the prefix cache."""
    llm = make_llm(kvcache_block_size=16)
    whole = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)[0].token_ids
    assert llm.reset_prefix_cache()
    llm.add_request(PROMPTS[0], GREEDY)
    for _ in range(6):
        llm.step()
    llm.pause()
    partial = llm.step().finished[0]
    assert partial.finish_reason == "abort" and 0 < len(partial.token_ids) < 12
    for refused in (lambda: llm.generate("a", use_tqdm=False), lambda: llm.add_request("a"), llm.step):
        with pytest.raises(UnavailableError, match=r"the engine is paused: resume\(\)"):
            refused()
    llm.pause()  # once more changes nothing
    llm.resume()
    rest = SamplingParams(temperature=0, max_tokens=12 - len(partial.token_ids), ignore_eos=True)
    output = llm.generate([PROMPTS[0] + partial.token_ids], rest, use_tqdm=False)[0]
    assert partial.token_ids + output.token_ids == whole and output.num_cached_tokens == 16
    with pytest.raises(ValueError, match="mode='wait': must be one of 'abort', 'keep'"):
        llm.pause("wait")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_keep_and_go_on_with_new_weights(make_llm, two_layer_model, tmp_path, async_scheduling):
    """Requests that were kept go on as those of an engine with the new weights do from their tokens."""
    weights = perturbed(two_layer_model, tmp_path / "new")
    llm = make_llm(two_layer_model, async_scheduling=async_scheduling, kvcache_block_size=16, max_num_seqs=2)
    fresh = make_llm(str(tmp_path / "new"))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [*PROMPTS, [9, 9, 9]]  # of which one waits
    tokens, paused, outputs = {}, threading.Event(), {}

    def pause(step, result):
        if not paused.is_set() and sum(map(len, (seq.completion_token_ids for seq in step.sampled_seqs))) > 12:
            paused.set()
            llm.pause("keep")
            live = llm.core.scheduler.live.values()
            tokens.update({seq.request_id: seq.completion_token_ids for group in live for seq in group.values()})

    llm.core.on_step.append(pause)
    caller = threading.Thread(target=lambda: outputs.update(enumerate(llm.generate(prompts, params, use_tqdm=False))))
    caller.start()
    assert paused.wait(60)
    llm.load_weights(weights.items())
    assert llm.stats()["blocks"]["used"] == 0
    llm.resume()
    caller.join(60)
    for i, prompt in enumerate(prompts):
        found = outputs[i].token_ids
        num_kept = len(tokens[i])
        if async_scheduling and num_kept:
            num_kept += 1  # the token of the step that was in flight
        assert len(found) == 40 and found[: len(tokens[i])] == tokens[i]
        rest = SamplingParams(temperature=0, max_tokens=40 - num_kept, ignore_eos=True)
        assert fresh.generate([prompt + found[:num_kept]], rest, use_tqdm=False)[0].token_ids == found[num_kept:]
    assert any(tokens.values()) and llm.is_finished()


def test_resume_waits_for_the_weights(make_llm):
    llm = make_llm()
    llm.pause()
    with pytest.raises(ValueError, match="no such tensor"):
        llm.load_weights([("model.norm.weight", torch.ones(256)), ("x", torch.ones(1))])
    with pytest.raises(UnavailableError, match="load all weights"):
        llm.resume()
    llm.load_weights(weights_of(TINY))
    llm.resume()
    assert len(answers(llm)) == 2
    llm.pause()
    llm.exit()  # a paused engine ends as any other
    with pytest.raises(RuntimeError, match="closed"):
        llm.resume()


# -- log-probabilities -------------------------------------------------------------------------------------------------


def expected_logprobs(mode: str, logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    temperature = params.temperature or 1.0
    if mode == "raw_logprobs":
        return logits.log_softmax(-1)
    if mode == "processed_logprobs":
        for token_id, bias in (params.logit_bias or {}).items():
            logits[:, token_id] += bias
        if params.top_k and params.temperature:
            logits[logits < logits.topk(params.top_k).values[:, -1:]] = -torch.inf
    return (logits / temperature).log_softmax(-1)


@pytest.mark.parametrize("mode", ["raw_logprobs", "temperature_logprobs", "processed_logprobs"])
def test_logprobs_modes(make_llm, mode):
    """On two ranks they are compared in test_tensor_parallel.py."""
    llm = make_llm(logprobs_mode=mode, max_model_len=128)
    options = dict(max_tokens=8, logprobs=3, ignore_eos=True, seed=1)
    ways = [
        SamplingParams(temperature=0, logit_bias={5: 2.0}, **options),
        SamplingParams(temperature=0.5, top_k=4, **options),
        SamplingParams(temperature=1.7, logit_bias={5: 8.0, 300: -100.0}, **options),
    ]
    outputs = llm.generate([PROMPTS[0]] * 3, ways, use_tqdm=False)
    llm.exit()
    reference = reference_model(TINY)
    for output, params in zip(outputs, ways):
        ids = torch.tensor([PROMPTS[0] + output.token_ids])
        logits = reference(ids).logits[0, len(PROMPTS[0]) - 1 : -1].float().clone()
        expected = expected_logprobs(mode, logits, params)
        for token_id, entries, row in zip(output.token_ids, output.outputs[0].logprobs, expected):
            assert entries[token_id].rank == 1 + (row > row[token_id]).sum()
            for i, entry in entries.items():
                assert entry.logprob == pytest.approx(row[i].item(), abs=1e-3), (mode, params, i)
            assert [*entries][-1] in row.topk(4).indices


def test_modes_of_vllm_that_are_not_log_probabilities(make_llm):
    with pytest.raises(ValueError, match="logprobs_mode='raw_logits': must be one of 'raw_logprobs', 'temperature_"):
        make_llm(logprobs_mode="raw_logits")


def test_what_folders_hold(tmp_path):
    assert {name for name, _ in weights_of(TINY)} == load_file(f"{TINY}/model.safetensors").keys()
    with pytest.raises(FileNotFoundError):
        next(weights_of(tmp_path))


# -- the server --------------------------------------------------------------------------------------------------------


@pytest.fixture
def serve(two_layer_model, monkeypatch):
    test_server = pytest.importorskip("test_server")
    monkeypatch.setattr(test_server, "FOLDER", two_layer_model)
    servers = []

    def start(**settings):
        servers.append(test_server.RunningServer(**settings))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_http(make_llm, serve, two_layer_model, tmp_path):
    httpx = pytest.importorskip("httpx")
    perturbed(two_layer_model, tmp_path / "new")
    server = serve(enable_dev_endpoints=True, engine_settings={"logprobs_mode": "processed_logprobs"})
    with httpx.Client(base_url=server.url, timeout=30) as client:
        body = dict(prompt=PROMPTS[0], temperature=0, max_tokens=12, ignore_eos=True, return_token_ids=True)

        def complete(**fields):
            answer = client.post("/v1/completions", json=body | fields)
            return answer.status_code, answer.json()

        _, before = complete()
        # a stream that is kept goes on
        with client.stream("POST", "/v1/completions", json=body | {"stream": True, "max_tokens": 200}) as stream:
            events = stream.iter_lines()
            next(events)
            for origin in ("http://evil.example", "null"):  # a form of a web page
                answer = client.post("/pause", headers={"origin": origin})
                assert answer.status_code == 403 and "Origin header" in answer.json()["error"]["message"]
            headers = {"origin": server.url}
            assert client.post("/resume", headers=headers).status_code == 200
            assert client.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
            assert client.get("/is_paused").json() == {"is_paused": True}
            status, refused = complete()
            assert status == 503 and refused["error"]["code"] == "engine_unavailable"
            answer = client.post("/update_weights", json={"path": str(tmp_path / "none")})
            assert answer.status_code == 400 and str(tmp_path / "none") in answer.json()["error"]["message"]
            answer = client.post("/update_weights", json={"path": str(tmp_path / "new")})
            assert answer.json() == {"status": "updated"}
            assert client.post("/resume").json() == {"status": "resumed"}
            assert [*events][-2:][0] == "data: [DONE]"
        assert client.post("/reset_prefix_cache").json() == {"success": True}
        fresh = make_llm(str(tmp_path / "new"))
        _, after = complete()
        assert after["choices"][0]["token_ids"] == fresh.generate([PROMPTS[0]], GREEDY, use_tqdm=False)[0].token_ids
        assert after["choices"][0]["token_ids"] != before["choices"][0]["token_ids"]
        answer = client.post("/pause", params={"mode": "wait"})
        assert answer.status_code == 400 and "must be one of 'abort', 'keep'" in answer.json()["error"]["message"]
        # a token that a filter removes has no log-probability, and JSON has no infinity
        _, answer = complete(temperature=1.0, top_k=1, logprobs=2, max_tokens=1)
        values = [*answer["choices"][0]["logprobs"]["top_logprobs"][0].values()]
        assert sorted(values) == [-9999.0, 0.0]


def test_http_without_the_flag(serve):
    httpx = pytest.importorskip("httpx")
    assert httpx.post(f"{serve().url}/pause").status_code == 404
