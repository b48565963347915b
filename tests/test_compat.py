"""vLLM's vocabulary: what is accepted, what is refused, and programs that import vLLM."""

import copy
import dataclasses
import json
import math
import os
import pickle
import runpy
import subprocess
import sys
from enum import Enum
from numbers import Real

import pytest
from common import TINY
from programs import Program

from nanovllm import LLM
from nanovllm.compat import vllm
from nanovllm.compat.params import ACCEPTED
from nanovllm.compat.vllm_settings import STRUCTURED_OUTPUTS_CONFIG, VLLM_SETTINGS
from nanovllm.config import Config
from nanovllm.rollout import weights_of

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
PROMPT = "HAMLET.\nTo be, or not to be"


def config(**settings) -> Config:
    return Config.create(TINY, {"device": "cpu"} | settings)


def example(accepted: tuple):
    """A value that is accepted."""
    values = {bool: True, int: 3, Real: 0.5, str: "any", dict: {}, list: [1], Enum: vllm.RequestOutputKind.DELTA}
    return values[accepted[0]] if isinstance(accepted[0], type) else accepted[0]


@pytest.fixture(scope="module")
def llm():
    settings = {"max_num_seqs": None, "enable_lora": False, "max_lora_rank": 16, "max_logprobs": 5}
    with vllm.LLM(TINY, dtype="float32", block_size=16, **settings) as llm:
        yield llm


# -- settings ----------------------------------------------------------------------------------------------------------


def test_other_names():
    resolved = config(block_size=32, num_gpu_blocks_override=7, enable_expert_parallel=True, kv_offloading_size=1)
    assert (resolved.kvcache_block_size, resolved.num_kvcache_blocks, resolved.expert_parallel) == (32, 7, True)
    assert resolved.swap_space == 1.0
    extra = {"cpu_bytes_to_use": 2**29, "spec_name": "CPUOffloadingSpec", "eviction_policy": "lru"}
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    assert config(kv_transfer_config=transfer).swap_space == 0.5
    assert config(kv_transfer_config={}) == config(kv_transfer_config={"kv_connector": None}) == config()


@pytest.mark.parametrize(
    "name",
    [
        "attention_backend",
        "block_size",
        "enable_prefix_caching",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_model_len",
        "num_gpu_blocks_override",
        "kv_offloading_size",
        "quantization",
        "structured_outputs_config",
        "long_prefill_token_threshold",
    ],
)
def test_defaults_that_are_none(name):
    """In vLLM; of the last one it is 0."""
    assert config(**{name: 0 if name.endswith("threshold") else None}) == config()


def test_every_setting_has_a_value_that_changes_nothing(make_llm):
    values = {name: example(accepted) for name, accepted in VLLM_SETTINGS.items()}
    assert len(values) > 170 and config(**values) == config()
    assert make_llm(**values).config.model == TINY


def test_some_values_that_change_nothing():
    config(
        swap_space=4, compilation_config={"cudagraph_mode": "FULL"}, trust_remote_code=True, skip_tokenizer_init=False
    )
    config(structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": False}, hf_overrides={})
    assert all(STRUCTURED_OUTPUTS_CONFIG.values())


# -- parameters --------------------------------------------------------------------------------------------------------


def test_sampling_params():
    """vLLM's default of max_tokens, and any of its own names with a value that changes nothing."""
    assert vllm.SamplingParams().max_tokens == 16
    values = {name: example(accepted) for name, accepted in ACCEPTED.items()}
    assert vllm.SamplingParams(**values, guided_decoding=None) == vllm.SamplingParams()
    assert vllm.SamplingParams(seed=-(2**63)).seed == 2**63 and vllm.SamplingParams(seed=-1).seed is None


def test_parameters_can_be_changed():
    params = vllm.SamplingParams(stop=["a"])
    params.max_tokens = 3
    assert (params.max_tokens, params.stop) == (3, ("a",))
    with pytest.raises(ValueError, match="temperature=-1"):
        params.temperature = -1
    with pytest.raises(TypeError, match="unknown parameter 'top_kk'"):
        params.top_kk = 1
    assert params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == dataclasses.replace(params)


def test_structured_outputs_params():
    for kind in (vllm.StructuredOutputsParams, vllm.GuidedDecodingParams):
        form = kind(choice=["yes", "no"], regex=None, backend=None)
        assert form.choice == ["yes", "no"] and form.json is None and form == pickle.loads(pickle.dumps(form))
        assert vllm.SamplingParams(guided_decoding=form) == vllm.SamplingParams(structured_outputs=form)
        assert vllm.SamplingParams(structured_outputs=form).structured_outputs == {"choice": ("yes", "no")}
    schema = {"type": "object"}
    for given in (schema, json.dumps(schema)):
        compact = vllm.StructuredOutputsParams(json=given, disable_any_whitespace=True)
        assert compact.json == {"type": "object", "x-guidance": {"whitespace_pattern": ""}}
        closed = vllm.StructuredOutputsParams(json=given, disable_additional_properties=True)
        assert closed.json == {"type": "object", "additionalProperties": False}
    with pytest.raises(ValueError, match="must have one of json"):
        vllm.SamplingParams(structured_outputs=vllm.StructuredOutputsParams(regex="a", choice=["b"]))
    with pytest.raises(AttributeError, match="no attribute 'yaml'"):
        form.yaml  # noqa: B018


# -- the engine --------------------------------------------------------------------------------------------------------


def test_engine(llm):
    engine = llm.llm_engine
    assert engine is llm and engine.model_config.max_model_len == llm.config.max_model_len == 2048
    assert engine.model_config.get_vocab_size() == 2048 and engine.vllm_config.cache_config.enable_prefix_caching
    assert engine.get_num_unfinished_requests() == 0 and not engine.has_unfinished_requests()
    assert llm.config.kvcache_block_size == 16 and llm.config.seed == 0
    default = llm.get_default_sampling_params()
    assert (default.temperature, default.top_k, default.max_tokens) == (0.6, 20, 16)


def test_generate(llm):
    """The answers of our own engine, to every form of a prompt and with every argument."""
    with LLM(TINY, dtype="float32") as ours:
        (expected,) = ours.generate(PROMPT, vllm.SamplingParams(**GREEDY), use_tqdm=False)
    tokens = vllm.TokensPrompt(prompt_token_ids=expected.prompt_token_ids, multi_modal_data=None, cache_salt=None)
    prompts = [PROMPT, vllm.TextPrompt(prompt=PROMPT), tokens]
    for output in llm.generate(
        prompts, vllm.SamplingParams(**GREEDY), use_tqdm=False, lora_request=None, mm_processor_kwargs=None
    ):
        assert isinstance(output, vllm.RequestOutput) and output.outputs == expected.outputs
    assert len(llm.generate(prompts[0], use_tqdm=False, priority=[0])[0].token_ids) <= 16
    with pytest.raises(ValueError, match="lora_request=LoRARequest.*needs enable_lora=True"):
        llm.generate(PROMPT, lora_request=vllm.LoRARequest("a", 1, "b"))
    with pytest.raises(ValueError, match="cache_salt='x': is not supported"):
        llm.generate({"prompt": PROMPT, "cache_salt": "x"})
    with pytest.raises(TypeError, match="unknown argument 'lora'"):
        llm.generate(PROMPT, lora=None)


def test_without_a_tokenizer():
    with vllm.LLM(TINY, skip_tokenizer_init=True) as llm:
        for prompt in ("abc", {"prompt": "abc"}):
            with pytest.raises(ValueError, match="must have token ids, because of `skip_tokenizer_init=True`"):
                llm.generate(prompt)
        with pytest.raises(ValueError, match="detokenize=False: must be True with stop="):
            llm.generate([5, 6], vllm.SamplingParams(stop="x"))
        for prompt in ([5, 6, 7], {"prompt_token_ids": [5, 6, 7]}):
            (output,) = llm.generate(prompt, vllm.SamplingParams(**GREEDY, detokenize=True), use_tqdm=False)
            assert output.text == "" and output.token_ids


def test_flat_logprobs(llm):
    params = [
        vllm.SamplingParams(**GREEDY, logprobs=2, prompt_logprobs=1, flat_logprobs=flat) for flat in (True, False)
    ]
    flat, plain = llm.generate([PROMPT] * 2, params, use_tqdm=False)
    assert type(flat.logprobs) is type(flat.prompt_logprobs) is vllm.FlatLogprobs and type(plain.logprobs) is list
    assert flat == dataclasses.replace(plain, request_id=flat.request_id, metrics=flat.metrics)
    params[1].flat_logprobs, params[1].prompt_logprobs = True, None
    (flat,) = llm.chat([{"role": "user", "content": "a"}], params[1], False)
    assert type(flat.logprobs) is vllm.FlatLogprobs and flat.prompt_logprobs is None


def test_structured_outputs_config_of_an_engine():
    """JSON without a space between its parts, and without properties that the schema does not name."""
    inner = {"type": "object", "properties": {"type": {"enum": ["a", "b"]}}, "required": ["type"]}
    schema = {
        "type": "object",
        "properties": {"x": inner, "y": {"type": "integer", "maximum": 99}},
        "required": ["x", "y"],
    }
    params = vllm.SamplingParams(temperature=1.5, seed=0, max_tokens=60, structured_outputs={"json": schema})
    config = {"backend": "guidance", "disable_any_whitespace": True, "disable_additional_properties": True}
    with vllm.LLM(TINY, structured_outputs_config=config, max_model_len=128) as llm:
        flat = vllm.SamplingParams(max_tokens=2, logprobs=1, flat_logprobs=True, structured_outputs={"json": schema})
        assert type(llm.generate("a", flat, use_tqdm=False)[0].logprobs) is vllm.FlatLogprobs
        for output in llm.generate(["a"] * 8, [params] * 8, use_tqdm=False):
            answer = json.loads(output.text)
            assert output.text == json.dumps(answer, separators=(",", ":"))
            assert answer.keys() == {"x", "y"} and answer["x"].keys() == {"type"}


def test_tokenization(llm):
    def prompt_of(prompt, **options):
        (output,) = llm.generate(prompt, vllm.SamplingParams(**GREEDY), use_tqdm=False, tokenization_kwargs=options)
        return output.prompt_token_ids

    ids = llm.get_tokenizer().encode(PROMPT)
    for prompt in (PROMPT, {"prompt": PROMPT}, ids, {"prompt_token_ids": ids}):
        assert prompt_of(prompt, truncate_prompt_tokens=3) == ids[-3:]
        assert prompt_of(prompt, add_special_tokens=False) == ids
    assert len(prompt_of(PROMPT * 500, truncate_prompt_tokens=-1)) == 2047
    with pytest.raises(ValueError, match="truncate_prompt_tokens=-2: must be at least -1"):
        prompt_of(PROMPT, truncate_prompt_tokens=-2)
    with pytest.raises(ValueError, match="decoder prompt cannot be empty"):
        prompt_of(PROMPT, truncate_prompt_tokens=0)
    with pytest.raises(TypeError, match="padding"):
        prompt_of(PROMPT, padding=True)


def test_chat(llm):
    conversation = [{"role": "user", "content": "What is 17 + 25?"}]
    (plain,) = llm.chat(conversation, vllm.SamplingParams(**GREEDY), False, None, tools=None)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (other,) = llm.chat([conversation], vllm.SamplingParams(**GREEDY), False, chat_template=template)
    assert "user" in plain.prompt and other.prompt == "What is 17 + 25?"
    with pytest.raises(ValueError, match="chat_template_content_format='openai'"):
        llm.chat(conversation, chat_template_content_format="openai")


def test_beam_search(llm):
    params = vllm.BeamSearchParams(beam_width=2, max_tokens=4, temperature=0.0, length_penalty=1.0)
    prompts = [{"prompt": PROMPT}, vllm.TokensPrompt(prompt_token_ids=[5, 6, 7]), PROMPT[:7]]
    outputs = llm.beam_search(prompts, params, lora_request=None, concurrency_limit=2)
    together = llm.beam_search(prompts, params)
    assert len(outputs) == len(together) == 3
    for sequence, other in zip(*([x for output in found for x in output.sequences] for found in (outputs, together))):
        assert (sequence.tokens, sequence.text) == (other.tokens, other.text)
        # the products of a batch of another size round differently
        assert sequence.cum_logprob == pytest.approx(other.cum_logprob, abs=1e-3)
    for output, ids in zip(outputs, (llm.tokenizer.encode(PROMPT), [5, 6, 7], llm.tokenizer.encode(PROMPT[:7]))):
        first, second = output.sequences
        assert first.tokens[: len(ids)] == ids and first.text == llm.tokenizer.decode(first.tokens)
        assert first.cum_logprob > second.cum_logprob
    with pytest.raises(ValueError, match="concurrency_limit=-1: must be at least 1"):
        llm.beam_search(prompts, params, concurrency_limit=-1)


# -- programs that import vLLM -----------------------------------------------------------------------------------------


PROGRAM = """
from importlib.metadata import version
from importlib.util import find_spec
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.renderers.hf import resolve_chat_template
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, StructuredOutputsParams
from vllm.tokenizers import get_tokenizer
import vllm, vllm.inputs, vllm.outputs, sys

assert find_spec("vllm") and version("vllm") == vllm.__version__
model = sys.argv[1]
arguments = dict(revision=None, dtype="auto", tokenizer=None, tokenizer_mode="auto", tokenizer_revision=None,
    trust_remote_code=False, tensor_parallel_size=1, max_model_len=None, max_num_seqs=None, quantization=None,
    seed=1234, enable_lora=False, max_lora_rank=16)
llm = LLM(model=model, **arguments)
tokenizer = get_tokenizer(model, tokenizer_mode="auto", trust_remote_code=False, revision=None, add_bos_token=False)
template = resolve_chat_template(
    tokenizer=tokenizer, chat_template=None, tools=None, model_config=llm.llm_engine.model_config)
assert "im_start" in template
score = SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=1, detokenize=False)
answer = SamplingParams(max_tokens=4, stop=["\\n"], temperature=0.0, skip_special_tokens=False,
    spaces_between_special_tokens=False)
ids = tokenizer("HAMLET.", return_attention_mask=False).input_ids
for params in (score, answer):
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=ids)], sampling_params=[params], use_tqdm=False,
        lora_request=None)
    print([*(output.prompt_logprobs or [])[1:]] != [], output.outputs[0].text == "")
"""


def test_program_that_imports_vllm(tmp_path):
    """What lm-evaluation-harness's backend imports and calls."""
    (tmp_path / "program.py").write_text("import sibling\n" + PROGRAM)
    (tmp_path / "sibling.py").touch()
    command = [sys.executable, "-m", "nanovllm.compat", str(tmp_path / "program.py"), TINY]
    with Program(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        output, errors = program.communicate(timeout=120)
    assert program.returncode == 0, errors
    assert output.splitlines() == ["True True", "False True"]


def test_what_trl_calls():
    """Its colocated mode: a rank is one of its own processes, and weights are loaded one by one."""
    refused = pytest.raises(ValueError, match="tensor_parallel_size=2: must be 1, as ranks can't be processes of")
    with refused:
        vllm.LLM(TINY, distributed_executor_backend="external_launcher", tensor_parallel_size=2)
    options = dict(max_model_len=None, enable_sleep_mode=True, model_impl="vllm", trust_remote_code=False)
    with vllm.LLM(TINY, distributed_executor_backend="external_launcher", tensor_parallel_size=1, **options) as llm:
        before = llm.generate(PROMPT, vllm.SamplingParams(**GREEDY))[0].token_ids
        load = llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights
        norm = dict(weights_of(TINY))["model.norm.weight"]
        load([("model.norm.weight", norm.flip(0))])
        assert llm.generate(PROMPT, vllm.SamplingParams(**GREEDY))[0].token_ids != before
        load([("model.norm.weight", norm)])
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        for weight in weights_of(TINY):
            load([weight])
        assert llm.reset_prefix_cache()
        llm.wake_up(tags=["kv_cache"])
        assert llm.generate(PROMPT, vllm.SamplingParams(**GREEDY))[0].token_ids == before
    with pytest.raises(NotImplementedError, match="call LLM.load_weights"):
        vllm.NCCLWeightTransferEngine.trainer_init({})
    assert vllm.get_ip().count(".") == 3


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "usage: python -m nanovllm.compat"),
        (("a_package.that_is_missing",), "there is no module 'a_package.that_is_missing': install the package"),
        (("missing.py",), "nanovllm.compat: error: there is no file 'missing.py'\n"),
    ],
)
def test_compat_without_a_program(arguments, problem, monkeypatch, capsys):
    """It is an error before anything is imported, with the status of a wrong command line."""
    monkeypatch.setattr(sys, "argv", ["nanovllm.compat", *arguments])
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(name))
    with pytest.raises(SystemExit) as end:
        runpy.run_module("nanovllm.compat", run_name="__main__")
    assert end.value.code == 2 and problem in capsys.readouterr().err


ROWS = [
    {"question": "What is 2 + 3?", "choices": ["5", "7", "9"], "answer": 0},
    {"question": "HAMLET.\nTo be, or not to", "choices": ["be", "king", "lord"], "answer": 0},
    {"question": "KING RICHARD.\nMy", "choices": ["the", "lord", "seven"], "answer": 1},
]
TASK = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
KINDS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "until": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}, {"metric": "bleu"}],
    },
}


@pytest.mark.clients
def test_lm_evaluation_harness(tmp_path):
    """The answers and log-likelihoods are those of its backend for OpenAI's API."""
    for package in ("lm_eval", "aiohttp", "fastapi"):
        pytest.importorskip(package)
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, ROWS)))
    data = {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.json")}}}
    for name, kind in KINDS.items():  # JSON is YAML
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name} | TASK | data | kind))

    def evaluate(program: list[str], model: str, arguments: str) -> list:
        """What the model answered to each request, and the metrics."""
        out = tmp_path / model
        options = f"--model {model} --model_args {arguments} --tasks choice,until --include_path {tmp_path}"
        command = [sys.executable, "-m", *program, *options.split(), "--log_samples", "--output_path", str(out)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert result.returncode == 0, result.stderr
        samples = [json.loads(line) for file in sorted(out.rglob("samples_*")) for line in file.open()]
        assert len(samples) == 2 * len(ROWS)
        (metrics,) = [json.loads(file.read_text())["results"] for file in out.rglob("results_*")]
        return [sample["resps"] for sample in samples], metrics

    offline, metrics = evaluate(
        ["nanovllm.compat", "lm_eval"], "vllm", f"pretrained={TINY},dtype=float32,max_length=512"
    )
    command = [sys.executable, "-m", "nanovllm", "serve", TINY, "--port=0", "--dtype=float32", "--device=cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline()
            url = line[line.index("http://") :].split()[0]
            name = f"model=tiny-qwen3,base_url={url}/v1/completions,tokenizer_backend=huggingface,tokenizer={TINY}"
            online, online_metrics = evaluate(["lm_eval"], "local-completions", f"{name},max_length=512")
        finally:
            server.terminate()
    assert metrics == online_metrics
    for ours, theirs in zip(offline, online, strict=True):
        for (answer,), (other,) in zip(ours, theirs, strict=True):
            if isinstance(answer, str):
                assert answer == other
            else:  # (log-likelihood, whether it is greedy), as text
                assert math.isclose(float(answer[0]), float(other[0]), abs_tol=1e-3) and answer[1] == other[1]
