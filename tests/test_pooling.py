"""Embeddings, scores and classes, against transformers' own classes in float32, on small random checkpoints."""

import asyncio
import base64
import json
import re
import shutil
import threading
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import test_models
import torch
import transformers
from common import TINY
from safetensors.torch import load_file, save_file

from nanovllm import LLM, BeamSearchParams
from nanovllm.config import Config
from nanovllm.engine.outputs import OutputKind
from nanovllm.pooling.pooling_params import PoolingParams
from nanovllm.pooling.pooling_prompts import RERANKER_INSTRUCTION, RERANKER_TEMPLATE
from nanovllm.pooling.pooling_request import pooling_request
from nanovllm.serve import AsyncLLM, QueueFullError
from nanovllm.serve.frames import View
from nanovllm.serve.trace import trace

VOCAB_SIZE, MAX_LEN = 2049, 400
YES = 2048  # a token of its own; "no" is in the bundled tokenizer
SMALL = dict(kvcache_block_size=16, num_kvcache_blocks=64, max_model_len=MAX_LEN)
# one chunk for all, chunks of many sizes, one sequence at a time, and steps that overlap
SCHEDULES = {
    "whole": {},
    "chunks": dict(max_num_batched_tokens=32, max_num_seqs=4),
    "tiny-chunks": dict(max_num_batched_tokens=5, max_num_seqs=3, kvcache_block_size=16),
    "overlap": dict(max_num_batched_tokens=64, async_scheduling=True, num_kvcache_blocks=17),
    "invariant": dict(max_num_batched_tokens=64, batch_invariant=True),
}
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
TEXTS = [
    "HAMLET.\nTo be, or not to be",
    "What is 2 + 3?",
    "the",
    "A longer text, which fills several blocks of the cache, because it repeats. " * 5,
    "A longer text, which fills several blocks of the cache, because it repeats. " * 5 + "And it ends elsewhere.",
    "Count from 5 to 19.",
]
PROMPTS = "query: ", "passage: "
FORMS = {
    "Qwen3": dict(head_dim=16, tie_word_embeddings=True),
    "Qwen3-untied": dict(head_dim=16, tie_word_embeddings=False),
    "Llama": dict(tie_word_embeddings=False),
}


@cache
def reference(family: str, kind: str, num_labels: int = 2):
    """A model of transformers with random weights."""
    config = getattr(transformers, f"{family.split('-')[0]}Config")(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        num_labels=num_labels,
        **FORMS[family],
    )
    model = getattr(transformers, f"{family.split('-')[0]}{kind}")(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + 0.3 * noise)
    return model


def save(folder: Path, model, files: dict | None = None, has_yes: bool = False) -> str:
    """Save a model with the bundled tokenizer. `files` are further JSON files."""
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(TINY) / file, folder)
    if has_yes:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"]["yes"] = YES
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name, content in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return str(folder)


def add_special_ends(folder: Path) -> None:
    """The tokenizer puts special tokens around a text, of which Qwen3-Embedding's has the one at the end."""
    file = folder / "tokenizer.json"
    special = lambda content: {"SpecialToken": {"id": content, "type_id": 0}}
    single, tokens = [special("<|im_start|>"), {"Sequence": {"id": "A", "type_id": 0}}, special("<|im_end|>")], {}
    for content, token_id in (("<|im_start|>", 2046), ("<|im_end|>", 2047)):
        tokens[content] = {"id": content, "ids": [token_id], "tokens": [content]}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 0}}, special("<|im_end|>")]
    processor = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": processor}))


def modules(*names: str) -> list[dict]:
    return [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(("Transformer", *names))
    ]


def pooled(mode: dict, *more: str, **prompts) -> dict:
    """The files of sentence-transformers."""
    files = {
        "modules.json": modules("Pooling", *more),
        "1_Pooling/config.json": {"word_embedding_dimension": 64} | mode,
    }
    return files | {"config_sentence_transformers.json": {"prompts": prompts, "default_prompt_name": None}}


def saved(**entries) -> dict:
    return {"config_sentence_transformers.json": entries}


LAST = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True}
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
CLS = {"pooling_mode": "cls", "include_prompt": True}
MODES = {"last": LAST, "mean": MEAN, "cls": CLS}
FAMILIES = "Qwen3", "Llama"


@cache  # many tests have the same texts
def hidden_states(model, *token_ids: int) -> torch.Tensor:
    return getattr(model, "model", model)(torch.tensor([token_ids])).last_hidden_state[0]


def expected_embedding(model, token_ids: list[int], mode: str, dimensions: int | None = None, normalize=True):
    states = hidden_states(model, *token_ids)
    vector = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[mode][:dimensions]
    return (vector / vector.norm() if normalize else vector).numpy()


def assert_vectors(outputs, expected, tolerance: float = 1e-5) -> None:
    for output, vector in zip(outputs, expected, strict=True):
        assert np.abs(output.data - vector).max() < tolerance and output.data.dtype == np.float32


# -- the engine --------------------------------------------------------------------------------------------------------


# the families in turn: `test_families` has all of them
@pytest.mark.parametrize(
    "mode, schedule, family",
    [(mode, schedule, FAMILIES[(i + j) % 2]) for i, mode in enumerate(MODES) for j, schedule in enumerate(SCHEDULES)],
)
def test_embeddings(make_llm, tmp_path, family, mode, schedule):
    """A base model as sentence-transformers saves it, in all schedules, twice, so that the second call has hits."""
    model = reference(family, "Model")
    folder = save(tmp_path, model, pooled(MODES[mode], "Normalize"))
    assert "embed_tokens.weight" in load_file(Path(folder) / "model.safetensors")
    llm = make_llm(folder, **SMALL | SCHEDULES[schedule])
    assert (llm.config.task, llm.config.pooling.mode) == ("embed", mode)
    texts = TEXTS * 2
    for _ in range(2):
        outputs = llm.embed(texts, use_tqdm=False)
        assert [output.prompt for output in outputs] == texts
        assert_vectors(outputs, [expected_embedding(model, x.prompt_token_ids, mode) for x in outputs])
    stats = llm.stats()
    assert stats["blocks"]["used"] == stats["requests"]["running"] == stats["tokens"]["out"] == 0
    assert stats["steps"]["decode"] == stats["steps"]["mixed"] == 0
    assert (sum(output.num_cached_tokens for output in outputs) > 0) == (mode == "last")


def assert_embeds_as_transformers(llm, model) -> None:
    prefix = [*range(10, 90)]
    texts = [prefix, prefix[:33], [7], [*prefix, 3, 4, 5], [*range(200, 350)], prefix + [9] * 30]
    for _ in range(2):
        outputs = llm.embed(texts, use_tqdm=False)
        assert_vectors(outputs, [expected_embedding(model.model, x, "last") for x in texts])


@pytest.mark.parametrize("name", [name for name in test_models.MAIN_CASES if "gelu" not in name])
def test_families(make_llm, tmp_path, name):
    folder = test_models.make_checkpoint(tmp_path, name)
    settings = SMALL | dict(max_model_len=test_models.MAX_LEN, max_num_batched_tokens=50, async_scheduling=True)
    llm = make_llm(folder, task="embed", **settings)
    assert_embeds_as_transformers(llm, test_models.shared_reference(folder))


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5-tied"])
def test_layers_with_a_state(make_llm, tmp_path, name):
    test_hybrid = pytest.importorskip("test_hybrid")
    folder = test_hybrid.make_checkpoint(tmp_path, name)
    for schedule in (dict(max_num_batched_tokens=50, async_scheduling=True), dict(max_num_seqs=2)):
        llm = make_llm(folder, task="embed", **test_hybrid.SETTINGS | schedule)
        assert_embeds_as_transformers(llm, test_hybrid.SAVED[folder])


def test_a_full_step_follows_another(make_llm, tmp_path):
    """With steps that overlap, the sequences of a step in flight do not keep the next ones out."""
    llm = make_llm(save(tmp_path, reference("Qwen3", "Model")), **SMALL, max_num_seqs=4, async_scheduling=True)
    sizes = []
    llm.core.on_step.append(lambda step, result: sizes.append(len(step.sampled_seqs)))
    llm.embed([[5 + i] * 9 for i in range(16)], use_tqdm=False)
    llm.engine_thread.call(lambda: None)  # comes after the hooks of the last step
    assert sizes == [4] * 4


def test_dimensions_and_norms(make_llm, tmp_path):
    model = reference("Qwen3", "Model")
    llm = make_llm(save(tmp_path, model, pooled(LAST)), **SMALL)
    ids = [5, 6, 7]
    whole = expected_embedding(model, ids, "last", normalize=False)
    assert_vectors(llm.embed([ids], use_tqdm=False), [whole])  # no module Normalize
    for dimensions, normalize in ((8, True), (8, False), (64, True)):
        expected = expected_embedding(model, ids, "last", dimensions, normalize)
        assert_vectors(llm.embed([ids], dimensions, normalize, use_tqdm=False), [expected])
    for dimensions in (0, 65):
        with pytest.raises(ValueError, match=f"dimensions={dimensions}: must be at (least 1|most 64)"):
            llm.embed([ids], dimensions)


def test_prompts_and_instructions(make_llm, tmp_path):
    form = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
    files = pooled(LAST, "Normalize", query=form, document="")
    llm = make_llm(save(tmp_path, reference("Qwen3", "Model"), files), **SMALL)
    prompt_of = lambda **options: llm.embed("cats", use_tqdm=False, **options)[0].prompt
    assert prompt_of() == prompt_of(prompt_name="document") == "cats"
    assert prompt_of(prompt_name="query") == form + "cats"
    assert prompt_of(instruction="Find {animals}") == "Instruct: Find {animals}\nQuery:cats"
    assert llm.embed({"prompt": "cats"}, prompt_name="query", use_tqdm=False)[0].prompt == form + "cats"
    assert llm.embed([5, 6], prompt_name="query", use_tqdm=False)[0].prompt_token_ids == [5, 6]
    with pytest.raises(ValueError, match="prompt_name='answer': must be one of"):
        prompt_of(prompt_name="answer")
    with pytest.raises(ValueError, match="prompt_name='query': must be None with an instruction"):
        prompt_of(prompt_name="query", instruction="Find cats")


@pytest.mark.parametrize("schedule", ["whole", "chunks"])
def test_truncation(make_llm, tmp_path, schedule):
    """As transformers cuts texts, on the right: special tokens around a text stay."""
    model, text = reference("Qwen3", "Model"), TEXTS[3] * 20
    add_special_ends(Path(save(tmp_path, model)))
    llm = make_llm(tmp_path, **SMALL | SCHEDULES[schedule])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    embed = lambda prompt, n=None: llm.embed(prompt, truncate_prompt_tokens=n, use_tqdm=False)[0]
    for n in (2, 3, 20, MAX_LEN, -1):
        output, ids = embed(text, n), tokenizer(text, truncation=True, max_length=n % (MAX_LEN + 1))["input_ids"]
        assert output.prompt_token_ids == ids == embed({"prompt": text}, n).prompt_token_ids
        assert ids[0] == 2046 and ids[-1] == 2047 and output.prompt == tokenizer.decode(ids)
        assert_vectors([output], [expected_embedding(model, ids, "last")])
    assert embed("the", 5).prompt == "the"
    assert embed([*range(5, 405)]).prompt_token_ids == embed([*range(5, 500)], -1).prompt_token_ids == [*range(5, 405)]
    chat = [{"role": "user", "content": text}]
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert embed(chat, 9).prompt_token_ids == tokenizer.encode(whole, add_special_tokens=False)[:9]
    for n, bound in ((1, "least 2"), (401, "most 400"), (-2, "least -1")):
        with pytest.raises(ValueError, match=f"truncate_prompt_tokens={n}: must be at {bound}"):
            embed(text, n)
    with pytest.raises(ValueError, match="tokens; must be at most max_model_len"):
        embed(text)
    for prompt in {"prompt": "a"}, {"prompt_token_ids": [5]}:
        with pytest.raises(ValueError, match="multi_modal_data: must be left out"):
            embed(prompt | {"multi_modal_data": {"image": b"a"}})
        with pytest.raises(ValueError, match="prompt: has images, and a prompt with images can't be truncated"):
            embed(prompt | {"multi_modal_data": {"image": b"a"}}, 9)
        with pytest.raises(TypeError, match="no keys but"):
            embed(prompt | {"other": 1})


def test_default_prompt(make_llm, tmp_path):
    files = pooled(LAST, passage="passage: ")
    files["config_sentence_transformers.json"]["default_prompt_name"] = "passage"
    llm = make_llm(save(tmp_path, reference("Qwen3", "Model"), files), **SMALL)
    assert llm.embed("cats", use_tqdm=False)[0].prompt == "passage: cats"


@each_schedule
@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_classes(make_llm, tmp_path, family, schedule):
    model = reference(family, "ForSequenceClassification", 3)
    llm = make_llm(save(tmp_path, model), **SMALL | SCHEDULES[schedule])
    assert llm.config.task == "classify"
    outputs, logits = (llm.classify(TEXTS, use_activation=x, use_tqdm=False) for x in (True, False))
    expected = [model(torch.tensor([x.prompt_token_ids])).logits[0] for x in outputs]
    assert_vectors(outputs, [x.softmax(-1).numpy() for x in expected])
    assert_vectors(logits, [x.numpy() for x in expected])
    for output, x in zip(outputs, expected):
        assert output.label == f"LABEL_{x.argmax()}" and sum(output.probs) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    "entries, activation",
    [
        ({}, torch.sigmoid),
        ({"problem_type": "regression"}, lambda x: x),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda x: x),
    ],
)
def test_converted_reranker(make_llm, tmp_path, entries, activation):
    model = reference("Qwen3", "ForSequenceClassification", 1)
    folder = save(tmp_path, model)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | entries))
    llm = make_llm(folder, **SMALL | SCHEDULES["chunks"])
    assert llm.config.task == "score"
    outputs = llm.score("cats", TEXTS[:3], use_tqdm=False)
    text = RERANKER_TEMPLATE.format(instruction=RERANKER_INSTRUCTION, query="cats", document=TEXTS[0])
    assert outputs[0].prompt == text
    expected = [activation(model(torch.tensor([x.prompt_token_ids])).logits[0]) for x in outputs]
    assert_vectors(outputs, [x.numpy() for x in expected])
    assert outputs[1].score == pytest.approx(expected[1].item(), abs=1e-5)
    # a reward model is asked with whole prompts
    (output,) = llm.classify([[{"role": "user", "content": "cats"}]], use_tqdm=False)
    logits = model(torch.tensor([output.prompt_token_ids])).logits[0]
    assert_vectors([output], [activation(logits).numpy()])


@each_schedule
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3-untied"])
def test_published_reranker(make_llm, tmp_path, family, schedule):
    """A language model whose answer is "yes" or "no"."""
    model = reference(family, "ForCausalLM")
    folder = save(tmp_path, model, has_yes=True)
    assert Config(folder).task == "generate"
    llm = make_llm(folder, task="score", **SMALL | SCHEDULES[schedule])
    outputs = llm.score(["cats", "dogs"], TEXTS[:2], "Find animals", use_tqdm=False)
    no = llm.tokenizer.convert_tokens_to_ids("no")
    for output, query, document in zip(outputs, ("cats", "dogs"), TEXTS, strict=False):
        text = RERANKER_TEMPLATE.format(instruction="Find animals", query=query, document=document)
        assert output.prompt == text
        logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
        probability = logits[[no, YES]].log_softmax(0)[1].exp()  # as on the model's card
        assert output.score == pytest.approx(probability.item(), abs=1e-5)
    runner = llm.model_runner
    sizes = [tuple(x.shape) for x in (*runner.model.parameters(), *runner.model.buffers())]
    assert sizes.count((VOCAB_SIZE, 64)) == 1  # the whole output head is not kept


def test_stored_head_of_a_tied_model_is_used(make_llm, tmp_path):
    """As in transformers 5, it overrides config.json."""
    model = reference("Qwen3-untied", "ForCausalLM")
    folder = save(tmp_path, model, has_yes=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    llm = make_llm(folder, task="score", **SMALL)
    (output,) = llm.score("cats", "Cats purr.", use_tqdm=False, use_activation=False)
    logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
    no = llm.tokenizer.convert_tokens_to_ids("no")
    assert output.score == pytest.approx((logits[YES] - logits[no]).item(), abs=1e-5)


def test_logit_score(make_llm, tmp_path):
    """A reranker as sentence-transformers saves it, whose chat template knows the two roles."""
    files = {"modules.json": modules("LogitScore"), "1_LogitScore/config.json": {"true_token_id": 40}}
    folder = save(tmp_path, model := reference("Qwen3", "ForCausalLM"), files)
    template = "{% for m in messages if m.role in ('query', 'document') %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    llm = make_llm(folder, **SMALL)
    assert (llm.config.task, llm.config.pooling.token_ids) == ("score", (40,))
    (output,) = llm.score("cats", "Cats purr.", use_tqdm=False, use_activation=False)
    assert output.prompt == "[query] cats\n[document] Cats purr.\n"
    logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
    assert output.score == pytest.approx(logits[40].item(), abs=1e-5)
    (output,) = llm.score("cats", "Cats {purr}.", template="{query}? {document}", use_tqdm=False)
    assert output.prompt == "cats? Cats {purr}."
    for wrong in (5, "{query.foo}", "{query[foo]}", "{other}", "{query}"):
        with pytest.raises((TypeError, ValueError), match=f"template={re.escape(repr(wrong))}: "):
            llm.score("cats", "Cats purr.", template=wrong)


def test_settings_of_sentence_transformers(make_llm, tmp_path, monkeypatch):
    """The checkpoint's length limit cuts texts, and its size shortens vectors, unless the caller asks otherwise."""
    model, files = reference("Qwen3", "Model"), pooled(LAST, "Normalize")
    files["config_sentence_transformers.json"]["truncate_dim"] = 16
    files["sentence_bert_config.json"] = {"max_seq_length": 12, "do_lower_case": False}
    add_special_ends(Path(save(tmp_path, model, files)))
    llm = make_llm(tmp_path, **SMALL)
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path)(TEXTS[3], truncation=True, max_length=12)["input_ids"]
    for n in (None, -1, 12, 100):
        (output,) = llm.embed(TEXTS[3], truncate_prompt_tokens=n, use_tqdm=False)
        assert output.prompt_token_ids == ids
        assert_vectors([output], [expected_embedding(model, ids, "last", 16)])
    (output,) = llm.embed(TEXTS[3], dimensions=64, truncate_prompt_tokens=5, use_tqdm=False)
    assert_vectors([output], [expected_embedding(model, ids[:4] + ids[-1:], "last")])

    async def main():
        async with AsyncLLM(str(tmp_path), dtype="float32", device="cpu", **SMALL) as llm:
            assert (await llm.embed(TEXTS[3]))[0].prompt_token_ids == ids

    asyncio.run(main())
    httpx = pytest.importorskip("httpx")
    with serving(str(tmp_path), monkeypatch) as server:
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": TEXTS[3]}).json()
        assert answer["usage"]["prompt_tokens"] == 12 and len(answer["data"][0]["embedding"]) == 16
    with pytest.raises(ValueError, match="truncate_prompt_tokens=401: must be at most 400"):
        llm.embed(TEXTS[3], truncate_prompt_tokens=401)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 500}')
    with pytest.raises(ValueError, match="tokens; must be at most max_model_len"):
        make_llm(tmp_path, **SMALL).embed(TEXTS[3] * 20)


def test_cut_documents(make_llm, tmp_path):
    """The template and the query stay whole."""
    llm = make_llm(save(tmp_path, reference("Qwen3", "ForSequenceClassification", 1)), **SMALL)
    prompt = lambda text: RERANKER_TEMPLATE.format(instruction=RERANKER_INSTRUCTION, query="cats", document=text)
    rest, count = len(llm.tokenizer.encode(prompt(""))), lambda text: len(llm.tokenizer.encode(text))
    for text in (TEXTS[3] * 9, "ä🐈 " * 300, "a\n \n" * 300):
        for n, options in (
            (1, dict(max_tokens_per_doc=1)),
            (33, dict(max_tokens_per_doc=33)),
            (20, dict(max_tokens_per_doc=33, truncate_prompt_tokens=rest + 20)),
            (MAX_LEN - rest, dict(truncate_prompt_tokens=-1)),
        ):
            full, short = llm.score("cats", [text, "Cats purr."], use_tqdm=False, **options)
            head, tail = prompt("\0").split("\0")
            document = full.prompt.removeprefix(head).removesuffix(tail)
            assert prompt(document) == full.prompt and text.startswith(document)
            assert n - 8 <= count(document) <= n + ("truncate_prompt_tokens" in options)  # the template adds a space
            num_tokens = len(full.prompt_token_ids)
            assert num_tokens == count(full.prompt) <= MAX_LEN and (n != 20 or num_tokens <= rest + 20)
            assert n == 1 or short.prompt == prompt("Cats purr.")
    with pytest.raises(ValueError, match=r"truncate_prompt_tokens=40: the prompt needs more than \d+ tokens"):
        llm.score("cats", text, truncate_prompt_tokens=40)
    with pytest.raises(ValueError, match=rf"max_model_len={MAX_LEN}: the prompt needs more than \d+ tokens"):
        llm.score(text * 9, "cats", truncate_prompt_tokens=-1)
    for name, n in (("max_tokens_per_doc", 0), ("truncate_prompt_tokens", 401)):
        with pytest.raises(ValueError, match=f"{name}={n}: must be at "):
            llm.score("cats", text, **{name: n})


def test_pairs_of_other_families(make_llm, tmp_path):
    """The tokenizer joins the texts."""
    llm = make_llm(save(tmp_path, reference("Llama", "ForSequenceClassification", 1)), **SMALL)
    (output,) = llm.score("cats", "Cats purr.", use_tqdm=False)
    assert output.prompt_token_ids == llm.tokenizer("cats", "Cats purr.")["input_ids"] and output.prompt is None
    (output,) = llm.score("cats", TEXTS[3] * 20, truncate_prompt_tokens=9, use_tqdm=False)
    assert output.prompt_token_ids == llm.tokenizer("cats", TEXTS[3])["input_ids"][:9]
    for template in (None, "{query} {document}"):
        with pytest.raises(
            ValueError, match="instruction='Find cats': the text of a query and a document has no place"
        ):
            llm.score("cats", "Cats purr.", "Find cats", template)


@pytest.mark.parametrize("task", ["embed", "score"])
def test_ranks(make_llm, tmp_path, forked_ranks, task):
    files = pooled(MEAN, "Normalize") if task == "embed" else None
    kind = "Model" if task == "embed" else "ForCausalLM"
    folder = save(tmp_path, reference("Qwen3", kind), files, has_yes=True)
    # ranks share the vocabulary
    outputs = []
    for size in (1, 2):
        if size == 2 and VOCAB_SIZE % 2:
            grow_vocabulary(tmp_path)
        llm = make_llm(folder, task=task, tensor_parallel_size=size, **SMALL | SCHEDULES["chunks"])
        call = llm.embed if task == "embed" else lambda texts, use_tqdm, llm=llm: llm.score("cats", texts)
        outputs.append(call(TEXTS, use_tqdm=False))
    assert_vectors(outputs[1], [output.data for output in outputs[0]])


def grow_vocabulary(folder: Path) -> None:
    """Add a token to a checkpoint, because two ranks share the vocabulary equally."""
    weights = load_file(folder / "model.safetensors")
    weights = {
        name: torch.cat((x, x[:1])) if x.shape[0] == VOCAB_SIZE else x.contiguous() for name, x in weights.items()
    }
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB_SIZE + 1}))


@pytest.mark.small_model
def test_quantized(make_llm, tmp_path):
    """Linear layers are quantized, and the head of the task is not."""
    model = reference("Qwen3", "ForSequenceClassification", 3)
    llm = make_llm(save(tmp_path, model), quantization="int8", **SMALL)
    outputs = llm.classify(TEXTS, use_tqdm=False)
    expected = [model(torch.tensor([x.prompt_token_ids])).logits[0].softmax(-1).numpy() for x in outputs]
    assert_vectors(outputs, expected, tolerance=0.1)
    assert llm.model_runner.model.lm_head.weight.dtype == torch.float32


def test_dummy_weights(make_llm, tmp_path):
    folder = save(tmp_path, reference("Qwen3", "ForCausalLM"), has_yes=True)
    (tmp_path / "model.safetensors").unlink()
    for task in ("embed", "score"):
        llm = make_llm(folder, task=task, load_format="dummy", **SMALL)
        outputs = llm.embed(TEXTS, use_tqdm=False) if task == "embed" else llm.score("cats", TEXTS, use_tqdm=False)
        assert np.isfinite([output.data for output in outputs]).all()


# -- tasks -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedder():
    """The bundled model, of which any task but "classify" can be asked."""
    with LLM("tiny-qwen3", task="embed", dtype="float32", device="cpu", **SMALL) as llm:
        yield llm


def test_a_server_of_embeddings_says_nothing_of_chats(embedder, caplog):
    from nanovllm.serve.answer_formats import find_formats
    from nanovllm.serve.settings import ServerSettings

    with caplog.at_level("INFO", "nanovllm"):
        formats = find_formats(embedder.input_processor, ServerSettings())
    assert caplog.messages == [] and formats.tool_calls is None and formats.reasoning_parser is None


def test_each_engine_has_one_task(embedder, make_llm):
    for call in (
        lambda: embedder.generate("x"),
        lambda: embedder.stream("x"),
        lambda: embedder.add_request("x"),
        lambda: embedder.chat([{"role": "user", "content": "x"}]),
        lambda: embedder.beam_search("x", BeamSearchParams(2, 4)),
    ):
        with pytest.raises(ValueError, match="task='embed': this engine computes embeddings; .* task='generate'"):
            call()
    with pytest.raises(ValueError, match="task='embed': this engine computes embeddings; this call needs task='score'"):
        embedder.score("x", "y")
    generator = make_llm("tiny-qwen3", **SMALL)
    with pytest.raises(ValueError, match="task='generate': this engine generates text; this call needs task='embed'"):
        generator.embed("x")
    assert embedder.stats()["requests"] == generator.stats()["requests"] == {"waiting": 0, "running": 0}


REFUSED = [
    (dict(task="rank"), {}, "task='rank': must be one of 'auto', 'generate'"),
    (dict(task="classify"), {}, "config.json: .*: the task 'classify' needs a ForSequenceClassification"),
    (dict(task="score"), {}, "tokenizer.json: has no token 'yes', which the task 'score' needs"),
    (dict(task="embed", speculative_config={"method": "ngram"}), {}, "speculative_config=.*: must be None"),
    ({}, {"modules.json": {"type": 3}}, "modules.json: must be a list of objects with a 'type'"),
    ({}, {"modules.json": modules("Dense")}, "modules.json: module='Dense': must be one of"),
    ({}, pooled({"pooling_mode": 3}), "1_Pooling/config.json: pooling_mode=3: must be a string or a list of strings"),
    ({}, pooled({"pooling_mode": "max"}), "1_Pooling/config.json: pooling_mode='max': must be one of 'lasttoken'"),
    ({}, pooled({"pooling_mode": ["mean", "cls"]}), r"pooling_mode='mean\+cls': must be one of"),
    ({}, pooled(MEAN | {"include_prompt": False}), "include_prompt=false: must be true with pooling_mode 'mean'"),
    ({}, pooled(LAST) | {"sentence_bert_config.json": {"do_lower_case": True}}, "bert_config.json: do_lower_case=true"),
    (
        {},
        pooled(LAST) | {"sentence_bert_config.json": {"max_seq_length": 0}},
        "bert_config.json: max_seq_length=0: must",
    ),
    (
        {},
        {"modules.json": modules("Pooling"), "1_Pooling/config.json": LAST} | saved(truncate_dim=65),
        "truncate_dim=65",
    ),
    (
        {},
        pooled(LAST) | saved(default_prompt_name="web"),
        "config_sentence_transformers.json: default_prompt_name='web': must be one of 'query', 'document'",
    ),
    (
        {},
        {"modules.json": modules("LogitScore"), "1_LogitScore/config.json": {"true_token_id": 9999}},
        r"1_LogitScore/config.json: token ids \[9999\] of answers: must be in 0 to 2048",
    ),
]


@pytest.mark.parametrize("settings, files, message", REFUSED)
def test_what_is_refused(tmp_path, settings, files, message):
    with pytest.raises(ValueError, match=message):
        Config(save(tmp_path, reference("Qwen3", "ForCausalLM"), files), **settings)


@pytest.mark.parametrize("sizes", ["32", [0], ["a"], 5])
def test_refused_dimensions(tmp_path, sizes):
    save(tmp_path, reference("Qwen3", "ForCausalLM"), pooled(LAST))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": sizes}))
    with pytest.raises(ValueError, match=r"config.json: matryoshka_dimensions=.*: must be a list of numbers"):
        Config(str(tmp_path))


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"id2label": {"first": "a"}}, "config.json: id2label=.*: must be an object with a name for each number"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.ReLU"}}, "config.json: activation_fn='ReLU': must be"),
        ({"use_bidirectional_attention": True}, "config.json: attention to later tokens is not supported"),
        ({"is_causal": False}, "config.json: is_causal=False: must be one of None, True"),
    ],
)
def test_refused_classifiers(tmp_path, entries, message):
    save(tmp_path, reference("Qwen3", "ForSequenceClassification", 3))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | entries))
    with pytest.raises(ValueError, match=message):
        Config(str(tmp_path))


@pytest.mark.parametrize(
    "settings, task",
    [
        (dict(), "embed"),
        (dict(runner="auto"), "embed"),
        (dict(runner="pooling"), "embed"),
        (dict(runner="generate"), "generate"),
        (dict(runner="pooling", task="embed"), "embed"),
        (dict(runner="pooling", task="generate"), "runner='pooling': contradicts task='generate'"),
        (dict(runner="generate", task="embed"), "runner='generate': contradicts task='embed'"),
    ],
)
def test_runner(tmp_path, settings, task):
    """vLLM's name for generation or pooling."""
    folder = save(tmp_path, reference("Qwen3", "Model"))
    if task in ("embed", "generate"):
        assert Config.create(folder, settings).task == task
    else:
        with pytest.raises(ValueError, match=task):
            Config.create(folder, settings)


def test_order_of_many_labels(tmp_path):
    """The keys of config.json are sorted as texts: 10 comes before 2."""
    folder = save(tmp_path, reference("Qwen3", "ForSequenceClassification", 12))
    assert Config(folder).pooling.labels == tuple(f"LABEL_{i}" for i in range(12))


def test_arguments(embedder):
    with pytest.raises(ValueError, match="prompt: has 401 tokens; must be at most max_model_len .*is 400 tokens"):
        embedder.embed([[5], [5] * 401])
    with pytest.raises(TypeError, match="prompts=3: must be"):
        embedder.embed(3)
    with pytest.raises(TypeError, match="normalize='yes': must be True or False"):
        embedder.embed("x", normalize="yes")
    assert embedder.embed([]) == [] and embedder.stats()["requests"]["waiting"] == 0


@pytest.mark.parametrize("swap_space", [0, 0.01])
def test_a_prompt_as_long_as_the_cache(make_llm, swap_space):
    """It needs no block for a next token, and those behind it get their turn."""
    llm = make_llm("tiny-qwen3", task="embed", num_kvcache_blocks=4, kvcache_block_size=16, swap_space=swap_space)
    assert llm.input_processor.max_prompt_tokens == 64
    outputs = []
    prompts = [[5 + i] * (64 - i % 2) for i in range(3)] * 2
    caller = threading.Thread(target=lambda: outputs.extend(llm.embed(prompts, use_tqdm=False)), daemon=True)
    caller.start()
    caller.join(30)
    assert len(outputs) == 6
    assert_vectors(outputs[3:], [output.data for output in outputs[:3]])
    assert (llm.stats().get("tiers", {}).get("loaded_blocks", 0) > 0) == (swap_space > 0)


def test_abort(embedder):
    """A caller that leaves takes its requests along."""
    interrupted = []

    def interrupt(step, result):
        if not interrupted:
            interrupted.append(True)
            embedder.core.output_processor.discard([*embedder.core.output_processor.requests][:-1])

    embedder.core.on_step.append(interrupt)
    try:
        output = embedder.embed([[7] * 200], use_tqdm=False)
    finally:
        embedder.core.on_step.remove(interrupt)
    assert output[0].finished and output[0].metrics.first_token_time is None and embedder.stats()["blocks"]["used"] == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_trace(make_llm, tmp_path, is_async):
    """The recorded sequences never get a token."""
    llm = make_llm("tiny-qwen3", task="embed", max_num_batched_tokens=30, async_scheduling=is_async, **SMALL)
    with trace(llm, tmp_path / "run.html") as recorder:
        llm.embed([[5 + i] * 40 for i in range(4)], use_tqdm=False)
    frames, _ = recorder.frames_since(0)
    assert frames[0]["key"]["task"] == "embed" and llm.stats()["pooled"] == {"embed": 4}
    assert len([seconds for frame in frames for seconds in frame.get("pooled", ()) if 0 < seconds < 60]) >= 3
    assert not any(frame.get("ttft") for frame in frames)
    names = [name for frame in frames for name, *_ in frame.get("seqs", ())]
    released = [entry for frame in frames for entry in frame.get("released", ())]
    assert sorted(map(tuple, released)) == [(name, "stop") for name in sorted(names)] and len(names) >= 3
    assert not any(frame.get("sampled") for frame in frames)
    view = View.from_key_frame(frames[0])
    for frame in frames[1:]:
        view.apply(frame)
        assert all(seq.computed <= seq.tokens == seq.max_tokens == 40 for seq in view.seqs.values())
    assert not view.seqs and sum(end - start for f in frames for _, start, end in f.get("chunks", ())) == 160


def test_vllm(tmp_path):
    """vLLM's calls, outputs and parameters."""
    vllm = pytest.importorskip("nanovllm.compat.vllm")
    model = reference("Qwen3", "Model")
    settings = dict(dtype="float32", device="cpu", **SMALL)
    with vllm.LLM(save(tmp_path, model, pooled(LAST, "Normalize")), runner="pooling", **settings) as llm:
        (output,) = llm.embed([5, 6], pooling_params=vllm.PoolingParams(dimensions=8), use_tqdm=False)
        assert np.allclose(output.outputs.embedding, expected_embedding(model, [5, 6], "last", 8), atol=1e-5)
        (output,) = llm.encode([5, 6], vllm.PoolingParams(use_activation=False), use_tqdm=False)
        expected = expected_embedding(model, [5, 6], "last", normalize=False)
        assert np.allclose(output.outputs.data.numpy(), expected, atol=1e-5) and output.outputs.hidden_size == 64
        with pytest.raises(TypeError, match="unknown parameter 'dimension'"):
            vllm.PoolingParams(dimension=8)
        for options in (dict(truncate_prompt_tokens=2), dict(tokenization_kwargs={"truncate_prompt_tokens": 2})):
            assert llm.embed([5, 6, 7], use_tqdm=False, **options)[0].prompt_token_ids == [5, 6]
        with pytest.raises(TypeError, match="unknown key of tokenization_kwargs 'padding'"):
            llm.embed("x", tokenization_kwargs={"padding": True})
    with vllm.LLM("tiny-qwen3", runner="pooling", **settings) as llm:  # of a model that generates text
        assert llm.config.task == "embed" and len(llm.embed("x", use_tqdm=False)[0].outputs.embedding) == 256
    model = reference("Qwen3", "ForSequenceClassification", 1)
    with vllm.LLM(save(tmp_path, model), runner="pooling", **settings) as llm:
        (output,) = llm.score("cats", "Cats purr.", use_tqdm=False)
        ids = llm.tokenizer.encode("cats") + llm.tokenizer.encode("Cats purr.")
        assert output.prompt_token_ids == ids
        assert output.outputs.score == pytest.approx(model(torch.tensor([ids])).logits.sigmoid().item(), abs=1e-5)
        for n in (9, -1):
            (cut,) = llm.score("cats", TEXTS[3] * 50, truncate_prompt_tokens=n, use_tqdm=False)
            ids_of = llm.tokenizer("cats", TEXTS[3] * 50, truncation=True, max_length=n % (MAX_LEN + 1))["input_ids"]
            assert cut.prompt_token_ids == ids_of
        assert llm.classify([ids], truncate_prompt_tokens=99, use_tqdm=False)[0].outputs.probs == [output.outputs.score]


# -- asyncio and HTTP --------------------------------------------------------------------------------------------------


def test_async(tmp_path):
    model = reference("Qwen3", "Model")
    folder = save(tmp_path, model, pooled(LAST, "Normalize", query="query: "))

    async def main():
        async with AsyncLLM(folder, dtype="float32", device="cpu", **SMALL) as llm:
            calls = [llm.embed(TEXTS), llm.embed([[5, 6], [7]], dimensions=8), llm.embed("cats", prompt_name="query")]
            texts, short, (query,) = await asyncio.gather(*calls)
            assert_vectors(texts, [expected_embedding(model, x.prompt_token_ids, "last") for x in texts])
            assert_vectors(short, [expected_embedding(model, x.prompt_token_ids, "last", 8) for x in short])
            assert query.prompt == "query: cats"
            for text in (TEXTS[3] * 5, TEXTS[3] * 500):  # the second is for the lane of long texts
                (cut,) = await llm.embed(text, prompt_name="query", truncate_prompt_tokens=7)
                assert cut.prompt_token_ids == llm.input_processor.encode("query: " + TEXTS[3])[:7]
            many = await llm.embed([[5 + i % 1000] * 3 for i in range(700)])  # more than may wait at a time
            assert_vectors(many[690:], [expected_embedding(model, x.prompt_token_ids, "last") for x in many[690:]])
            with pytest.raises(ValueError, match="this engine computes embeddings"):
                await llm.score("x", ["y"])
            with pytest.raises(ValueError, match="this engine computes embeddings"):
                await llm.submit("x")
            assert llm.num_unfinished == 0

    asyncio.run(main())


def test_more_texts_than_the_queue_holds(tmp_path):
    """They wait for each other. Only what other callers hold is an error, and only for a call that holds nothing."""
    model, texts = reference("Qwen3", "Model"), [[5 + i, 6] for i in range(30)]
    expected = [expected_embedding(model, x, "last") for x in texts]
    sizes = dict(max_num_seqs=2, max_queued_requests=2)

    async def main():
        async with AsyncLLM(save(tmp_path, model, pooled(LAST, "Normalize")), device="cpu", **SMALL | sizes) as llm:
            assert_vectors(await llm.embed(texts), expected)
            held = [await llm.submit([5] * 300, PoolingParams()) for _ in range(3)]
            assert_vectors(await llm.embed(texts), expected)
            held += [await llm.submit([5] * 300, PoolingParams()) for _ in range(4 - llm.num_unfinished)]
            with pytest.raises(QueueFullError, match="4 answers of at most 4"):
                await llm.embed(texts)
            for request in held:
                llm.discard(request)
            assert llm.num_unfinished == 0

    asyncio.run(main())


@contextmanager
def serving(folder: str, monkeypatch, **settings):
    server_tests = pytest.importorskip("test_server")
    monkeypatch.setattr(server_tests, "FOLDER", folder)
    with server_tests.running({"max_model_len": MAX_LEN} | settings) as server:
        yield server


def test_embeddings_over_http(tmp_path, monkeypatch):
    openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx")
    model = reference("Qwen3", "Model")
    folder = save(tmp_path, model, pooled(LAST, "Normalize", query="query: "))
    with serving(folder, monkeypatch) as server:
        ids = [server.llm.input_processor.encode(text) for text in TEXTS]
        expected = [expected_embedding(model, x, "last") for x in ids]
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            create = lambda **options: client.embeddings.create(model="tiny-qwen3", **options)
            for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
                answer = create(input=TEXTS, **options)
                assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
                for entry, vector in zip(answer.data, expected, strict=True):
                    numbers = entry.embedding
                    if isinstance(numbers, str):
                        numbers = np.frombuffer(base64.b64decode(numbers), np.float32)
                    assert np.abs(np.array(numbers) - vector).max() < 1e-5
            assert [entry.index for entry in create(input=ids, dimensions=8).data] == [*range(6)]
            short = create(input=ids[0], dimensions=8).data
            assert np.allclose(short[0].embedding, expected_embedding(model, ids[0], "last", 8), atol=1e-5)
            named = create(input="cats", extra_body={"prompt_name": "query"}).data[0].embedding
            token_ids = server.llm.input_processor.encode("query: cats")
            assert np.allclose(named, expected_embedding(model, token_ids, "last"), atol=1e-5)
            cut = create(input=TEXTS[3], extra_body={"truncate_prompt_tokens": 5}).data[0].embedding
            assert np.allclose(cut, expected_embedding(model, ids[3][:5], "last"), atol=1e-5)
            options = {"truncate_prompt_tokens": 5, "truncation_side": "left"}
            cut = create(input=TEXTS[3], extra_body=options).data[0].embedding
            assert np.allclose(cut, expected_embedding(model, ids[3][-5:], "last"), atol=1e-5)
            assert create(input=TEXTS[3] * 99, extra_body={"truncate_prompt_tokens": -1}).usage.total_tokens == MAX_LEN
            for options, param in (
                ({"input": []}, "input"),
                ({"input": [[5], [99999]]}, "input"),
                ({"input": "x", "dimensions": 65}, "dimensions"),
                ({"input": "x", "extra_body": {"prompt_name": "a"}}, "prompt_name"),
                ({"input": [[5] * 401]}, "input"),
            ):
                with pytest.raises(openai.BadRequestError) as error:
                    create(**options)
                assert error.value.param == param, error.value
            assert error.value.code == "context_length_exceeded"
            for call in (
                lambda: client.completions.create(model="tiny-qwen3", prompt="x"),
                lambda: client.chat.completions.create(model="tiny-qwen3", messages=[{"role": "user", "content": "x"}]),
            ):
                with pytest.raises(openai.BadRequestError, match="this engine computes embeddings"):
                    call()
        for path, body in (
            ("/rerank", {"query": "x", "documents": ["y"]}),
            ("/score", {"text_1": "x", "text_2": "y"}),
            ("/classify", {"input": "x"}),
        ):
            answer = httpx.post(server.url + path, json=body)
            assert answer.status_code == 400 and "task='embed'" in answer.json()["error"]["message"]
        metrics = httpx.get(f"{server.url}/metrics").text
        (vectors,) = [line for line in metrics.splitlines() if line.startswith("nanovllm:pooled_prompts_total{")]
        assert 'task="embed"' in vectors and "first_token" not in metrics and "per_output_token" not in metrics
        (number,) = [line for line in metrics.splitlines() if line.startswith("vllm:request_success_total{")]
        assert 'finished_reason="stop"' in number and float(vectors.split()[-1]) == float(number.split()[-1]) >= 24
        assert f'vllm:e2e_request_latency_seconds_count{{model_name="tiny-qwen3"}} {number.split()[-1]}' in metrics
        assert 'vllm:generation_tokens_total{model_name="tiny-qwen3"} 0.0' in metrics
        server.wait_until_free()


def test_a_generating_server_refuses_embeddings(monkeypatch):
    httpx = pytest.importorskip("httpx")
    with serving("tiny-qwen3", monkeypatch) as server:
        for path in ("/v1/embeddings", "/classify"):
            answer = httpx.post(server.url + path, json={"input": "x"})
            error = answer.json()["error"]
            assert answer.status_code == 400 and "this engine generates text" in error["message"]


def test_reranking_over_http(tmp_path, monkeypatch):
    httpx = pytest.importorskip("httpx")
    model = reference("Qwen3", "ForSequenceClassification", 1)
    with serving(save(tmp_path, model), monkeypatch) as server:
        post = lambda path, **body: httpx.post(server.url + path, json=body)
        prompt = lambda text: RERANKER_TEMPLATE.format(instruction=RERANKER_INSTRUCTION, query="cats", document=text)
        ids = [server.llm.input_processor.encode(prompt(text)) for text in TEXTS[:3]]
        scores = [model(torch.tensor([x])).logits[0, 0].sigmoid().item() for x in ids]
        order = sorted(range(3), key=lambda i: -scores[i])
        for path, has_documents in (("/rerank", True), ("/v1/rerank", True), ("/v2/rerank", False)):
            documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
            query = "cats" if path == "/v2/rerank" else {"text": "cats"}
            body = dict(model="tiny-qwen3", query=query, documents=documents, top_n=2, priority=999)
            answer = post(path, **body).json()
            assert answer["object"] == "list" and "data" not in answer
            assert [x["index"] for x in answer["results"]] == order[:2]
            assert answer["usage"]["total_tokens"] == sum(map(len, ids))
            for x in answer["results"]:
                assert x["relevance_score"] == pytest.approx(scores[x["index"]], abs=1e-5)
                assert x.get("document") == ({"text": TEXTS[x["index"]]} if has_documents else None)
            answer = post(path, **body, return_documents=not has_documents).json()
            assert [*map(bool, (x.get("document") for x in answer["results"]))] == [not has_documents] * 2
        documents = [{"title": TEXTS[0], "text": TEXTS[1]}, {"text": TEXTS[2]}]
        body = dict(query="cats", documents=documents)
        for names, texts in (
            (["title", "text"], [f"{TEXTS[0]}\n{TEXTS[1]}", TEXTS[2]]),
            (["text", "title"], [f"{TEXTS[1]}\n{TEXTS[0]}", TEXTS[2]]),
            (None, TEXTS[1:3]),
        ):
            answer = post("/v1/rerank", **body, rank_fields=names).json()
            found = {x["index"]: (x["relevance_score"], x["document"]) for x in answer["results"]}
            scored = post("/score", text_1="cats", text_2=texts).json()["data"]
            assert found == {i: (pytest.approx(scored[i]["score"], abs=1e-6), documents[i]) for i in range(2)}
        long = [TEXTS[3] * 99, TEXTS[3]]
        num_tokens = len(server.llm.input_processor.encode(prompt("")))
        for options, total in (
            (dict(max_tokens_per_doc=9), 2 * (num_tokens + 9)),
            (dict(truncate_prompt_tokens=num_tokens + 5), 2 * (num_tokens + 5)),
            (dict(max_tokens_per_doc=5000), len(server.llm.input_processor.encode(prompt(TEXTS[3]))) + MAX_LEN),
        ):
            for answer in (
                post("/v2/rerank", query="cats", documents=long, **options),
                post("/score", text_1="cats", text_2=long, **options),
            ):
                assert answer.status_code == 200 and total - 2 <= answer.json()["usage"]["total_tokens"] <= total
        assert post("/v2/rerank", query="cats", documents=long).json()["error"]["code"] == "context_length_exceeded"
        answer = post("/rerank", query="cats", documents=TEXTS[:3], return_documents=False).json()
        assert len(answer["results"]) == 3 and "document" not in answer["results"][0]
        answer = post("/score", text_1="cats", text_2=TEXTS[:3]).json()
        assert [x["score"] for x in answer["data"]] == pytest.approx(scores, abs=1e-5)
        answer = post("/v1/classify", input=[prompt(text) for text in TEXTS[:3]]).json()
        assert [x["probs"][0] for x in answer["data"]] == pytest.approx(scores, abs=1e-5)
        assert answer["data"][0]["label"] == "LABEL_0" and answer["data"][0]["num_classes"] == 1
        for body, param in (
            ({"query": "x", "documents": []}, "documents"),
            ({"query": "x", "documents": [{"title": "y"}]}, "documents"),
            ({"query": "x", "documents": ["y"], "top_n": 0}, "top_n"),
            ({"query": "x", "documents": [{"title": "y"}], "rank_fields": ["name"]}, "documents"),
            ({"query": "x", "documents": [{"title": 3}], "rank_fields": ["title"]}, "documents"),
            ({"query": "x", "documents": ["y"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
            ({"query": "x", "documents": ["y"], "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
            ({"query": {"image": "x"}, "documents": ["y"]}, "query"),
            ({"documents": ["y"]}, "query"),
        ):
            answer = post("/rerank", **body)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
        answer = post("/score", text_1=["x", "y"], text_2=["z"] * 3)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "text_1", answer.text


@pytest.mark.clients
def test_clients_of_embeddings(tmp_path, monkeypatch):
    """LangChain's client sends texts, or token ids of a tokenizer of its own, and asks for base64."""
    langchain = pytest.importorskip("langchain_openai")
    model = reference("Qwen3", "Model")
    with serving(save(tmp_path, model, pooled(LAST, "Normalize")), monkeypatch) as server:
        options = dict(base_url=f"{server.url}/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0)
        client = langchain.OpenAIEmbeddings(model="tiny-qwen3", **options)
        vectors = [
            *client.embed_documents(TEXTS),
            client.embed_query(TEXTS[0]),
            *asyncio.run(client.aembed_documents(TEXTS)),
        ]
        for text, vector in zip([*TEXTS, TEXTS[0], *TEXTS], vectors, strict=True):
            expected = expected_embedding(model, server.llm.input_processor.encode(text), "last")
            assert np.allclose(vector, expected, atol=1e-5)
        short = langchain.OpenAIEmbeddings(model="tiny-qwen3", dimensions=8, **options).embed_query("cats")
        expected = expected_embedding(model, server.llm.input_processor.encode("cats"), "last", 8)
        assert np.allclose(short, expected, atol=1e-5)
        cut = {"truncate_prompt_tokens": -1}
        client = langchain.OpenAIEmbeddings(model="tiny-qwen3", model_kwargs={"extra_body": cut}, **options)
        ids = server.llm.input_processor.encode(TEXTS[3] * 50)[:MAX_LEN]
        assert np.allclose(client.embed_query(TEXTS[3] * 50), expected_embedding(model, ids, "last"), atol=1e-5)


@pytest.mark.clients
def test_clients_of_rerankers(tmp_path, monkeypatch):
    """Cohere's client for both versions of its API, and LangChain's on top of it."""
    cohere, httpx = pytest.importorskip("cohere"), pytest.importorskip("httpx")
    model = reference("Qwen3", "ForSequenceClassification", 1)
    with serving(save(tmp_path, model), monkeypatch) as server:
        body = {"text_1": "cats", "text_2": [TEXTS[0], TEXTS[1], f"{TEXTS[0]}\n{TEXTS[1]}"]}
        first, second, both = (x["score"] for x in httpx.post(f"{server.url}/score", json=body).json()["data"])
        plain = {0: pytest.approx(first, abs=1e-6), 1: pytest.approx(second, abs=1e-6)}
        found = lambda results: {x.index: x.relevance_score for x in results}
        options = dict(model="tiny-qwen3", query="cats")
        with cohere.ClientV2("none", base_url=server.url) as client:
            assert found(client.rerank(documents=TEXTS[:2], **options).results) == plain
            cut = client.rerank(documents=[TEXTS[0] + TEXTS[3] * 99], max_tokens_per_doc=4096, priority=3, **options)
            assert len(cut.results) == 1
            results = client.rerank(documents=TEXTS[:2], top_n=1, **options).results
            assert found(results) == {i: x for i, x in plain.items() if x == max(first, second)}
            with pytest.raises(cohere.errors.BadRequestError, match="max_model_len"):
                client.rerank(documents=[TEXTS[3] * 99], **options)
        with cohere.Client("none", base_url=server.url) as client:
            documents = [{"title": TEXTS[0], "text": TEXTS[1]}, TEXTS[1]]
            fields = dict(rank_fields=["title", "text"], return_documents=True)
            results = client.rerank(documents=documents, **fields, **options).results
            assert found(results) == {0: pytest.approx(both, abs=1e-6), 1: plain[1]}
            assert {x.index: x.document.text for x in results} == {0: TEXTS[1], 1: TEXTS[1]}
            results = client.rerank(documents=TEXTS[:2], return_documents=False, **options).results
            assert found(results) == plain and results[0].document is None
        langchain = pytest.importorskip("langchain_cohere")
        compressor = langchain.CohereRerank(cohere_api_key="none", base_url=server.url, model="tiny-qwen3", top_n=5)
        assert {x["index"]: x["relevance_score"] for x in compressor.rerank(TEXTS[:2], "cats")} == plain


def test_fronts(tmp_path, monkeypatch):
    """The same vectors through an HTTP process of its own."""
    front_tests = pytest.importorskip("test_fronts")
    model = reference("Qwen3", "Model")
    folder = save(tmp_path, model, pooled(LAST, "Normalize"))
    with LLM(folder, **front_tests.ENGINE) as engine:
        setup = front_tests.Setup(engine)

        async def main():
            client = setup.front()
            await client.start()
            outputs = await client.embed(TEXTS[:5], dimensions=16)
            assert_vectors(outputs, [expected_embedding(model, x.prompt_token_ids, "last", 16) for x in outputs])
            assert outputs[0].metrics.finished_time > outputs[0].metrics.arrival_time
            with pytest.raises(ValueError, match="this engine computes embeddings"):
                await client.submit("x")
            await setup.wait_until_free()
            client.exit()

        asyncio.run(main())


def test_replicas(tmp_path, monkeypatch):
    """The same vectors from two replicas, of which one is lost."""
    replica_tests = pytest.importorskip("test_replica_group")
    model = reference("Qwen3", "Model")
    folder = save(tmp_path, model, pooled(MEAN, "Normalize"))
    monkeypatch.setattr(replica_tests, "MODEL", folder)
    monkeypatch.setattr(replica_tests.group_module, "RESTART_SECONDS", 0.01)

    async def main():
        async with replica_tests.started() as (driver, handles):
            processor, ids = driver.input_processor, [[5 + i] * 40 for i in range(20)]
            made = [pooling_request(processor, x, PoolingParams(dimensions=16), OutputKind.TOKENS) for x in ids]
            requests = [replica_tests.ReplicaRequest(request, driver.ended.append) for request in made]
            driver.group.submit(requests)
            handles[0].lose()
            outputs = [await request.result() for request in requests]
            assert_vectors(outputs, [expected_embedding(model, x, "mean", 16) for x in ids])

    asyncio.run(main())


def test_new_weights(make_llm, tmp_path):
    """A trainer hands over the weights of a base model, or of one with an output head."""
    model = reference("Qwen3", "Model")
    llm = make_llm(save(tmp_path, model), load_format="dummy", **SMALL)
    llm.load_weights(model.named_parameters())
    assert_vectors(llm.embed([[5, 6]], use_tqdm=False), [expected_embedding(model, [5, 6], "last")])
    other = reference("Qwen3", "ForCausalLM")
    llm.load_weights([*other.named_parameters(), ("lm_head.weight", other.lm_head.weight)])
    assert_vectors(llm.embed([[5, 6]], use_tqdm=False), [expected_embedding(other, [5, 6], "last")])


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_new_weights_in_a_pause(make_llm, tmp_path, async_scheduling):
    """A prompt whose last step has begun is computed once, as tokens in flight are; all others get the new weights."""
    old, new = reference("Qwen3", "Model"), reference("Qwen3", "ForCausalLM")
    schedule = dict(max_num_batched_tokens=20, async_scheduling=async_scheduling)
    llm = make_llm(save(tmp_path, old, pooled(LAST, "Normalize")), **SMALL | schedule)
    paused, steps, outputs = threading.Event(), [], []

    def on_step(step, result):
        steps.append(len(step.sampled_seqs))
        if len(steps) == 1:
            llm.pause("keep")
            paused.set()

    llm.core.on_step.append(on_step)
    texts = [[5 + i] * (9 + 5 * (i == 4)) for i in range(9)]
    caller = threading.Thread(target=lambda: outputs.extend(llm.embed(texts, use_tqdm=False)))
    caller.start()
    assert paused.wait(30)
    llm.load_weights([*new.named_parameters(), ("lm_head.weight", new.lm_head.weight)])
    assert llm.stats()["blocks"]["used"] == 0
    llm.resume()
    caller.join(30)
    llm.engine_thread.call(lambda: None)  # comes after the hooks of the last step
    num_old = sum(steps[: 1 + async_scheduling])
    models = [old] * num_old + [new] * (len(texts) - num_old)
    assert_vectors(outputs, [expected_embedding(model, x, "last") for model, x in zip(models, texts)])
    assert sum(steps) == len(texts) and num_old == 2 + 2 * async_scheduling


# -- CUDA --------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embeddings_on_cuda(tmp_path, mode, dtype):
    """In overlapping steps, with chunks."""
    model = reference("Qwen3", "Model")
    folder = save(tmp_path, model, pooled(MODES[mode], "Normalize"))
    texts = [[5 + i] * (1 + 37 * i % 300) for i in range(200)]
    with LLM(folder, dtype=dtype, device="cuda", max_num_batched_tokens=256, max_model_len=MAX_LEN) as llm:
        outputs = llm.embed(texts, use_tqdm=False)
    for output, ids in zip(outputs, texts, strict=True):
        expected = expected_embedding(model, ids, mode)
        if dtype == "float32":
            assert np.abs(output.embedding - expected).max() < 1e-4
        else:
            assert output.embedding @ expected > 0.999


@pytest.mark.gpu
def test_scores_on_cuda(tmp_path):
    model = reference("Qwen3", "ForCausalLM")
    folder = save(tmp_path, model, has_yes=True)
    with LLM(folder, task="score", dtype="float32", device="cuda", max_model_len=MAX_LEN) as llm:
        outputs = llm.score("cats", ["Cats purr.", "Dogs bark."] * 40, use_tqdm=False)
        no = llm.tokenizer.convert_tokens_to_ids("no")
    for output in outputs:
        logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
        assert output.score == pytest.approx((logits[YES] - logits[no]).sigmoid().item(), abs=1e-4)
