"""What is refused, and in which words: settings, parameters, arguments of calls, flags, and bodies of requests."""

import json
import math
import reprlib
from functools import partial

import numpy as np
import pytest
import torch
from common import TINY

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
pydantic = pytest.importorskip("pydantic")

from test_server import GREEDY as GREEDY_FIELDS
from test_server import PROMPT, QUESTION, TOOL, running

from nanovllm import LLM, BeamSearchParams, SamplingParams, SchedulingPolicy
from nanovllm.compat import vllm
from nanovllm.config import Config
from nanovllm.engine.scheduling_policy import Priority
from nanovllm.features.logit_edits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from nanovllm.serve import cli
from nanovllm.serve.anthropic_api import MessagesBody, chat_body
from nanovllm.serve.protocol import ChatBody, CompletionBody, DetokenizeBody
from nanovllm.serve.responses_api import ResponsesBody
from nanovllm.structured_outputs.spec import MAX_BYTES

MODEL_LEN = 2048  # of the bundled model


def rows(call, error: type[Exception], *table: tuple) -> list:
    """The tests of a table: what is called, its error and its arguments, and all words of the message.

    A row of the table is an argument, wrong values of it, and words of the message, which also names the argument
    and quotes the value; or it is several arguments, and words.
    """
    tests = []
    for given, *words in table:
        cases = [(given, words)]
        if isinstance(given, str):
            cases = [({given: value}, with_value(given, value, *words[1:])) for value in words[0]]
        tests += [pytest.param(call, error, *case, id=f"{call.__name__}-{case[0]}"[:60]) for case in cases]
    return tests


def with_value(name: str, value, first: str, *others: str) -> list[str]:
    """The words with the argument before them; unless they begin with it, as the message has another form of it."""
    if first.startswith(name):
        return [first, *others]
    return [f"{name}={value!r}{first if first.startswith(':') else ''}", first, *others]


def check(call, error: type[Exception], arguments: dict, words: list[str]) -> None:
    with pytest.raises(error) as found:
        call(**arguments)
    assert all(word in str(found.value) for word in words), str(found.value)


# -- settings and parameters -------------------------------------------------------------------------------------------


def config(**settings) -> Config:
    return Config.create(TINY, {"device": "cpu"} | settings)


def llm_of(**settings) -> LLM:
    return LLM(TINY, **settings)


def vllm_of(**settings) -> LLM:
    return vllm.LLM(TINY, **settings)


def beam_search_params(**params) -> BeamSearchParams:
    return BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | params)


INTEGER, NUMBER, BOOL = "must be an integer", "must be a number", "must be True or False"
INTEGERS = "max_num_batched_tokens", "max_num_seqs", "max_model_len", "kvcache_block_size", "num_kvcache_blocks", "seed"
INTEGERS += "tensor_parallel_size", "max_logprobs"
BOOLS = "enforce_eager", "enable_prefix_caching", "async_scheduling"
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}

SETTINGS = [
    *rows(
        config,
        ValueError,
        ("max_num_batched_tokens", [0, -5], "at least 1"),
        ("max_num_seqs", [0], "at least 1"),
        ("max_model_len", [1], "at least 2"),
        ("max_model_len", [MODEL_LEN + 1], f"at most {MODEL_LEN}"),
        ("gpu_memory_utilization", [0.0, -1], "at least 0.01"),
        ("gpu_memory_utilization", [1.01], "at most 1"),
        ("gpu_memory_utilization", [math.nan, math.inf], "finite"),
        ("tensor_parallel_size", [0], "tensor_parallel_size=0: must be at least 1"),
        ("tensor_parallel_size", [3], "tensor_parallel_size=3: must be one of 1, 2, 4, 8"),
        ("tensor_parallel_size", [16], "tensor_parallel_size=16: must be one of"),
        ("kvcache_block_size", [0, 8], "at least 16"),
        ("kvcache_block_size", [100], "multiple of 16"),
        ("num_kvcache_blocks", [0, -1], "at least 1"),
        ("num_kvcache_blocks", [2**31], f"at most {2**31 - 1}"),
        *((name, [2**16 + 16], "at most 65536") for name in ("max_num_seqs", "kvcache_block_size")),
        ("max_num_batched_tokens", [2**20 + 1], "at most 1048576"),
        ("dtype", ["float64"], "'bfloat16'"),
        ("dtype", ["bf16"], "(did you mean 'bfloat16'?)"),
        ("dtype", [torch.int8], "dtype='int8'", "'bfloat16'"),
        ("dtype", [None], "dtype='None'", "'bfloat16'"),
        ("device", ["tpu", ""], "'cpu', 'cuda'"),
        ("attention_backend", ["xformers"], "'flash', 'triton', 'sdpa'"),
        ("seed", [-1], "at least 0"),
        ("seed", [2**64], f"at most {2**64 - 1}"),
        ("max_logprobs", [-2], "at least -1"),
        ("load_format", ["gguf"], "'auto', 'safetensors', 'dummy'"),
        ("kv_cache_dtype", ["int8", "fp8_e5m2", None], ": must be one of 'auto', 'fp8'"),
        ("kv_cache_dtype", [torch.float8_e4m3fn], "kv_cache_dtype=", ": must be one of 'auto', 'fp8'"),
    ),
    *rows(
        config,
        TypeError,
        *((name, [16.0, "16", True, [16]], INTEGER) for name in INTEGERS),
        *((name, [None], INTEGER) for name in ("tensor_parallel_size", "kvcache_block_size", "max_logprobs")),
        ("gpu_memory_utilization", ["0.9", None, True, 1j], NUMBER),
        *((name, [1, 0, "yes", 0.0], BOOL) for name in BOOLS),
        *((name, [None], BOOL) for name in ("enforce_eager", "expert_parallel")),
        ("revision", [1], "a string or None"),
        ("tokenizer", [1], "a folder, a hub id"),
        # names that there are not, with those that may be meant
        ({"max_num_sequences": 1}, "'max_num_sequences' (did you mean 'max_num_seqs'?):"),
        ({"Dtype": 1}, "'Dtype' (did you mean 'dtype'?):"),
        ({"enforce-eager": 1}, "'enforce-eager' (did you mean 'enforce_eager'?):"),
        ({"zzz": 1}, "'zzz':"),
    ),
    # before a model is loaded
    *rows(config, ValueError, ("scheduling_policy", ["lifo"], ": must be one of fcfs, priority, or an object")),
    *rows(
        config,
        TypeError,
        ("scheduling_policy", [None], ": must be a name or an object with a method `priority_key`"),
        ("scheduling_policy", [Priority, SchedulingPolicy], "must be an instance, such as"),
    ),
    # also what a caller can't set: the model's own shape
    *(
        row
        for make in (config, llm_of)
        for name in ("max_seqs", "model_config", "Dtype")
        for row in rows(make, TypeError, ({name: 1}, f"'{name}'", "max_num_seqs", "seed"))
    ),
    # vLLM's settings, and what of them has no effect here
    *rows(
        config,
        ValueError,
        ({"block_size": 8}, "kvcache_block_size=8: must be at least 16"),
        ("structured_outputs_config", ["auto"], ": is not supported; it must be of type dict"),
        ("kv_transfer_config", ["nixl"], ": is not supported; it must be None or of type dict"),
        *(
            ({"kv_transfer_config": OFFLOADING | changes}, problem)
            for changes, problem in [
                ({"kv_connector": "NixlConnector"}, "kv_connector='NixlConnector': is not supported; it must be"),
                ({"kv_role": "kv_producer"}, "kv_role='kv_producer': is not supported; it must be 'kv_both' or None"),
                ({"kv_connector_extra_config": {"spec_name": "Tiering"}}, "spec_name='Tiering': is not supported"),
                ({"kv_connector_extra_config": {"cpu_bytes_to_use": 0}}, "cpu_bytes_to_use=0.0: must be at least 1"),
            ]
        ),
        *(  # an effect that only vllm.LLM has
            ({"structured_outputs_config": {name: True}}, f"{name}=True: is not supported; it must be False")
            for name in ("disable_any_whitespace", "disable_additional_properties")
        ),
    ),
    *rows(
        config,
        TypeError,
        (
            {"block_size": 16, "kvcache_block_size": 16},
            "block_size=16: is vLLM's name for 'kvcache_block_size', which is given too",
        ),
        (
            {
                "swap_space": 1,
                "kv_transfer_config": OFFLOADING | {"kv_connector_extra_config": {"cpu_bytes_to_use": 9}},
            },
            "sets 'swap_space', which is given too",
        ),
        ({"kv_transfer_config": OFFLOADING}, "cpu_bytes_to_use=None: must be a number"),
        ({"kv_transfer_config": {"kv_conector": "x"}}, "unknown key of kv_transfer_config 'kv_conector' (did you mean"),
        (
            {"structured_outputs_config": {"backends": "auto"}},
            "unknown key of structured_outputs_config 'backends' (did you mean 'backend'?): must be one of backend, ",
        ),
    ),
    *rows(
        vllm_of,
        TypeError,
        ({"structured_outputs_config": {"disable_any_whitespace": "yes"}}, f"disable_any_whitespace='yes': {BOOL}"),
        (
            {"structured_outputs_config": {"disable_additional_properties": "yes"}},
            f"disable_additional_properties='yes': {BOOL}",
        ),
        ("skip_tokenizer_init", ["yes"], BOOL),
    ),
]

AMONG_KEYS = "must have one of json, json_object, regex"
PARAMS = [
    *rows(
        SamplingParams,
        ValueError,
        ("temperature", [-0.1], "at least 0"),
        ("temperature", [math.nan, math.inf], "finite"),
        ("max_tokens", [0, -3], "at least 1"),
        ("seed", [-2], "at least -1"),
        ("seed", [2**64], f"at most {2**64 - 1}"),
        ("top_k", [-2], "at least -1"),
        ("top_k", [2**31], f"at most {2**31 - 1}"),
        ("top_p", [0], "at least 1e-06"),
        ("top_p", [1.01], "at most 1"),
        ("top_p", [math.nan], "finite"),
        ("min_p", [-0.1], "at least 0"),
        ("min_p", [1.1], "at most 1"),
        ("n", [0], "at least 1"),
        ("min_tokens", [-1], "at least 0"),
        ("min_tokens", [65], "at most 64"),  # max_tokens
        ("stop", ["", ["a", ""]], "stop", "at least 1 character"),
        ("stop", [["\ud800"]], "stop=", "surrogate"),
        ("stop_token_ids", [[1, -2]], "stop_token_ids", "at least 0"),
        ("stop_token_ids", [range(129), [*range(129)]], "stop_token_ids", "129: must be at most 128"),
        ("presence_penalty", [2.1], "at most 2"),
        ("frequency_penalty", [-2.1], "at least -2"),
        ("repetition_penalty", [0], "at least 0.01"),
        ("repetition_penalty", [math.inf], "finite"),
        ("logit_bias", [dict.fromkeys(range(301), 1.0)], "logit_bias", "301: must be at most 300"),
        ("logit_bias", [{1: 101.0}], "logit_bias[1]=101.0", "at most 100"),
        ("logit_bias", [{-1: 1.0}], "logit_bias", "at least 0"),
        ("logprobs", [-2], ": must be at least -1"),
        ("prompt_logprobs", [-2], "at least -1"),
        ("allowed_token_ids", [[]], "allowed_token_ids: the number of ids=0: must be at least 1"),
        ("allowed_token_ids", [[-1]], "allowed_token_ids: token id=-1: must be at least 0"),
        ({"stop": "a", "detokenize": False}, "detokenize=False: must be True with stop"),
        ("bad_words", [[" "]], "bad_words=", "must have a character that is not a space"),
        ("bad_words", [["a\udc00"]], "bad_words=", "surrogate"),
        # of structured outputs
        ({"structured_outputs": {}}, f"structured_outputs: has the keys []; {AMONG_KEYS}"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "has the keys ['regex', 'json']; must have one of"),
        ({"structured_outputs": {"xml": "a"}}, "has the keys ['xml']; must have one of"),
        ({"structured_outputs": {1: "a"}}, "has the keys [1]"),
        (
            {"structured_outputs": {"json": "true"}},
            "structured_outputs['json']='true': must be a JSON schema that is an object",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs['json']='{': is not JSON"),
        ({"structured_outputs": {"json": "[1]"}}, "must be a JSON schema that is an object"),
        ({"structured_outputs": {"json": '{"const": NaN}'}}, "is not JSON (NaN is not a JSON number"),
        ({"structured_outputs": {"json": {"const": math.inf}}}, "is not JSON"),
        ({"structured_outputs": {"json": {"const": object}}}, "is not JSON"),
        ({"structured_outputs": {"json": "[" * 10**5}}, "is not JSON"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs['json_object']=False: must be True"),
        ({"structured_outputs": {"regex": "a" * (MAX_BYTES + 1)}}, "has 65537 bytes; must be at most 65536"),
        ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs['regex']: has half of a surrogate pair"),
        ({"structured_outputs": {"choice": []}}, "must have at least 1 choice"),
        ({"structured_outputs": {"choice": ["a", "\udfff"]}}, "has half of a surrogate pair"),
        (
            {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
            "ignore_eos=True: must be False with structured_outputs",
        ),
    ),
    *rows(
        SamplingParams,
        TypeError,
        ("temperature", ["1", None, True], NUMBER),
        ("max_tokens", [1.0, True], INTEGER),
        ("ignore_eos", [1, None], BOOL),
        ("seed", [0.5, False], INTEGER),
        ("top_k", [1.5, None], INTEGER),
        ("n", [None], INTEGER),
        ("stop", [["a", 1], 1], "must be a string"),
        ("stop_token_ids", [[1, "2"], "2"], INTEGER),
        ("stop_token_ids", [[True]], "stop_token_ids", INTEGER),
        ("include_stop_str_in_output", [1], BOOL),
        ("skip_special_tokens", [None], BOOL),
        ("logit_bias", [[1], [], False, "", 0], "map token ids to numbers"),
        ("logit_bias", [{1: "a"}], "logit_bias[1]='a'", NUMBER),
        ("logit_bias", [{"1": 1.0}], "logit_bias", INTEGER),
        ("prompt_logprobs", [True], INTEGER),
        ("bad_words", [[1]], "must be a string"),
        ({"best_of": 2}, "best_of"),
        ("structured_outputs", ["json"], ": must be a dict"),
        (
            {"structured_outputs": {"json": True}},
            "structured_outputs['json']=True: must be a JSON schema, as a dict or as text",
        ),
        ({"structured_outputs": {"json": 5}}, "structured_outputs['json']=5: must be a JSON schema"),
        ({"structured_outputs": {"regex": b"a"}}, "structured_outputs['regex']=b'a': must be a string"),
        ({"structured_outputs": {"choice": "yes"}}, "structured_outputs['choice']='yes': must be a list of strings"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "must be a list of strings"),
        ({"structured_outputs": {"grammar": None}}, "must be a string"),
    ),
    *rows(
        beam_search_params,
        ValueError,
        ("beam_width", [0], ""),
        ("max_tokens", [0], ""),
        ("length_penalty", [math.nan, 100], ""),
    ),
    *rows(beam_search_params, TypeError, ({"structured_outputs": {"regex": "a"}}, "structured_outputs")),
    *rows(SamplingParams, TypeError, ({"max_token": 5}, "unknown parameter 'max_token' (did you mean 'max_tokens'?)")),
    *rows(
        vllm.SamplingParams,
        TypeError,
        ({"best_off": 2}, "unknown parameter 'best_off': must be one of temperature, max_tokens, "),
        ({"max_token": 2}, "unknown parameter 'max_token' (did you mean 'max_tokens'?): must be one of"),
        ({"guided_decoding": {}, "structured_outputs": {"regex": "a"}}, "guided_decoding={}: is another"),
        ("flat_logprobs", [1], f": {BOOL}"),
    ),
    *rows(
        vllm.SamplingParams,
        ValueError,
        ("seed", [-(2**63) - 1], ": must be at least"),
        ("logprob_token_ids", [[1]], ": is not supported"),
    ),
    *rows(vllm.SamplingParams, vllm.VLLMValidationError, ("temperature", [math.nan], ": must be finite")),
    *rows(
        vllm.BeamSearchParams,
        ValueError,
        (
            {"beam_width": 2, "max_tokens": 4, "structured_outputs": {"regex": "a"}},
            "structured_outputs={'regex': 'a'}: is not supported",
        ),
    ),
    *rows(
        vllm.StructuredOutputsParams,
        TypeError,
        ({"json": True, "disable_any_whitespace": True}, "structured_outputs['json']=True: must be a JSON schema"),
        ({"jso": {}}, "unknown option of structured outputs 'jso' (did you mean 'json'"),
    ),
    *rows(
        vllm.StructuredOutputsParams,
        ValueError,
        ({"json": "{", "disable_any_whitespace": True}, "structured_outputs['json']='{': is not JSON"),
        ({"json": {}, "whitespace_pattern": " "}, "whitespace_pattern=' ': is not supported"),
    ),
    *rows(
        vllm.get_tokenizer, ValueError, ({"tokenizer_name": TINY, "revision": "v1"}, "revision='v1': is not supported")
    ),
]


@pytest.mark.parametrize("call, error, arguments, words", SETTINGS + PARAMS)
def test_settings_and_parameters(call, error, arguments, words):
    check(call, error, arguments, words)


@pytest.mark.parametrize(
    "name, value, accepted",
    [
        ("trust_remote_code", 0, "of type bool"),
        ("tokenizer_mode", "slow", "'auto'"),
        ("pipeline_parallel_size", 2, "1"),
        ("pipeline_parallel_size", True, "1"),
        ("distributed_executor_backend", "ray", "None or 'mp' or 'uni'"),
        ("cpu_offload_gb", 10, "0 or 0.0"),
        ("stream_interval", None, "of type Real"),
        ("stream_interval", True, "of type Real"),
        ("disable_log_stats", 1, "of type bool"),
        ("compilation_config", "O3", "of type int or of type dict or None"),
        ("enable_prompt_embeds", True, "False"),
        ("skip_tokenizer_init", True, "False"),
    ],
)
def test_settings_of_vllm_that_would_change_something(name, value, accepted):
    with pytest.raises(ValueError) as found:
        config(**{name: value})
    assert str(found.value) == f"{name}={value!r}: is not supported; it must be {accepted}, or left out"


# -- calls of an engine ------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
GOOD = [[5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def llm(small_model):
    settings = dict(max_model_len=256, scheduling_policy="priority")
    with LLM(small_model, dtype="float32", device="cpu", **settings) as engine:
        yield engine
        assert engine.is_finished()
        blocks = engine.scheduler.block_manager
        assert len(blocks.free_block_ids) == len(blocks.blocks), "blocks were lost"


def answers(llm) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(GOOD, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def alone(llm):
    return answers(llm)


def add_request(llm, prompt, **arguments):
    llm.add_request(prompt, **arguments)


def generate(llm, prompt, **arguments):
    llm.generate(prompt, **{"sampling_params": GREEDY} | arguments)


def generate_alone(llm, prompt):
    generate(llm, [prompt])


def generate_among_others(llm, prompt):
    generate(llm, [GOOD[0], prompt, GOOD[1]])


def generate_before_text(llm, prompt):
    generate(llm, [prompt, "text"])


def generate_two(llm, **arguments):
    generate(llm, GOOD, **arguments)


def stream_two(llm, **arguments):
    llm.stream(GOOD, **{"sampling_params": GREEDY} | arguments)


def beams_of_two(llm, **arguments):
    llm.beam_search(GOOD, **{"params": BeamSearchParams(beam_width=2, max_tokens=1)} | arguments)


def request_of(llm, **params):
    llm.add_request([5], SamplingParams(**params))


def chat(llm, messages=QUESTION, **arguments):
    llm.chat(messages, GREEDY, **arguments)


def chat_part(llm, part):
    chat(llm, [{"role": "user", "content": [part]}])


def abort(llm, request_id):
    llm.abort(request_id)


NO_PROMPT, NO_DICT = "a string, a list of token ids", "a dict must have 'prompt'"
OUT = "is out of vocabulary"
OUT_OF_VOCABULARY = f"{OUT} (vocab_size=2048"
NO_PART = {"type": "image_url", "image_url": {}}, {"type": "text"}, {"type": "text", "text": 3}, 5

CALLS = [
    row
    for call in (add_request, generate_among_others)
    for row in (
        *rows(
            call,
            ValueError,
            ({"prompt": ""}, "empty"),
            ({"prompt": []}, "decoder prompt cannot be empty"),
            ({"prompt": [1] * 256}, "has 256 tokens", "maximum context length is 256 tokens"),
            ({"prompt": "cat " * 400}, "maximum context length is 256 tokens"),
            ({"prompt": [1, -1]}, f"id -1 {OUT}", "2047"),
            ({"prompt": [1, 2048, 1]}, f"id 2048 {OUT}", "2047"),
            ({"prompt": [1, 2**31]}, f"id 2147483648 {OUT}"),
            ({"prompt": [10**30]}, OUT),
            ({"prompt": {"prompt_token_ids": [2048]}}, f"id 2048 {OUT}", "2047"),
            ({"prompt": "half a \ud83d pair"}, "character 7 is a lone surrogate"),
            ({"prompt": {"prompt": "a", "multi_modal_data": {"image": 5}}}, "takes no images"),
        ),
        *rows(
            call,
            TypeError,
            *(({"prompt": prompt}, NO_PROMPT) for prompt in ([1, 2.0], ["1"], [None], [[1, 2]], True, 1.5, None)),
            *(({"prompt": prompt}, NO_PROMPT) for prompt in ([1, True], [1, np.float32(2)], [1, torch.tensor(2)])),
            *(({"prompt": prompt}, NO_DICT) for prompt in ({}, {"prompt": 5}, {"prompt_token_ids": "text"})),
            ({"prompt": {"prompt": "a", "negative_prompt": "b"}}, NO_DICT),
        ),
    )
]
for call in (generate, generate_before_text):
    CALLS += rows(call, TypeError, *(({"prompt": prompt}, "") for prompt in (True, 1, 1.5, None)))
for call in (add_request, generate, generate_alone):  # as elsewhere, True is not 1
    CALLS += rows(call, TypeError, *(({"prompt": prompt}, "") for prompt in ([True, False], [5, True])))
for call in (generate_two, stream_two, beams_of_two):
    CALLS += rows(
        call,
        ValueError,
        ("priority", [[1]], "priority: has 1 integers for 2 prompts"),
        ("priority", [[]], "priority: has 0 integers for 2 prompts"),
        ("priority", [[0, 2**63]], "priority=9223372036854775808: must be at most"),
    )
    CALLS += rows(
        call,
        TypeError,
        ("priority", [1], "priority=1: must be a list with one integer for each prompt"),
        ("priority", ["12"], ": must be a list"),
        *(("priority", [[0, x]], f"priority={x!r}: {INTEGER}") for x in (1.5, True, None)),
    )
CALLS += [
    *rows(
        generate_two,
        ValueError,
        *(({"sampling_params": [GREEDY] * i}, f"{i} sampling_params for 2 prompts") for i in (0, 1, 3, 5)),
    ),
    *rows(
        generate_two,
        TypeError,
        *(
            ({"sampling_params": params}, "must be a SamplingParams")
            for params in ({"temperature": 0}, "greedy", [GREEDY, 0.5])
        ),
    ),
    *rows(add_request, TypeError, ({"prompt": "text", "sampling_params": 0.7}, "must be a SamplingParams")),
    *rows(
        request_of,
        ValueError,
        ("logprobs", [101], ": must be at most max_logprobs=100"),
        ("prompt_logprobs", [-1], ": must be at most max_logprobs=100"),
        ("logprobs", [2049], ": must be at most 2048"),
        *(("stop_token_ids", [[x, 2048]], f"stop_token_ids: token id 2048 {OUT_OF_VOCABULARY}") for x in (5, 7)),
        ("allowed_token_ids", [[5, 2048]], f"allowed_token_ids: token id 2048 {OUT}"),
        ("logit_bias", [{2048: 1.0}, {2048: 1.0, 3: 2}], f"logit_bias: token id 2048 {OUT_OF_VOCABULARY}"),
        ({"min_tokens": 1, "stop_token_ids": [7], "allowed_token_ids": [2047, 7]}, "must leave at least 1 of them"),
        ({"bad_words": ["a"], "allowed_token_ids": [64, 267]}, "must leave at least 1 of them"),
        ({"bad_words": [f"{i}#{i}" for i in range(65)]}, f"130: must be at most {MAX_BAD_WORDS}"),
        ({"bad_words": ["xyz" * 20]}, "number of tokens of 'xyzxyz", f"must be at most {MAX_BAD_WORD_TOKENS}"),
    ),
    *rows(beams_of_two, TypeError, ({"params": GREEDY}, "must be a BeamSearchParams")),
    *rows(beams_of_two, ValueError, ({"params": BeamSearchParams(1025, 4)}, "beam_width=1025: must be at most 1024")),
    *rows(abort, ValueError, ("request_id", [10**9, -1], "")),
    *rows(abort, TypeError, ("request_id", ["0"], "")),
    *rows(
        chat,
        ValueError,
        ("messages", ["What is 4 + 5?", [{"content": "no role"}], [["no message"]], 5, None], "messages="),
    ),
    *rows(chat, TypeError, *(({name: 3}, name) for name in ("max_tokens", "temprature", "enable_thinking"))),
    *rows(chat_part, ValueError, *(({"part": part}, "content part ", " must be text") for part in NO_PART)),
]


@pytest.mark.parametrize("call, error, arguments, words", CALLS)
def test_calls(llm, alone, call, error, arguments, words):
    """Nothing is queued, and the next call is served."""
    check(partial(call, llm), error, arguments, words)
    assert llm.is_finished() and not llm.scheduler.waiting and not llm.scheduler.live
    assert answers(llm) == alone


# -- bodies of requests ------------------------------------------------------------------------------------------------

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BASE = {
    CHAT: {"messages": QUESTION},
    TEXT: {"prompt": PROMPT},
    RESPONSES: {"input": "Hi", "max_tokens": None, "max_output_tokens": 12},
    MESSAGES: {"messages": QUESTION},
}
NO_NUMBER = {"type": "integer", "minimum": 1, "maximum": 0}
NO_CALL = [{"type": "function", "function": {"name": "f", "parameters": NO_NUMBER}}]
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
IMAGE_URL = {"type": "image_url", "image_url": {"url": "x"}}
FUNCTION = TOOL["function"] | {"type": "function"}  # of the Responses API
TOO_LONG = "max_model_len (this model's maximum context length is"


REALS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def user(content) -> list[dict]:
    return [{"role": "user", "content": content}]


def bodies(path: str, *table: tuple) -> list:
    """A row is a field, wrong values of it, and words of the message; or fields, the one to blame, and words."""
    tests = []
    for given, *rest in table:
        if isinstance(given, str):
            values, *words = rest
            cases = [({given: value}, given, words) for value in values]
        else:
            param, *words = rest
            cases = [(given, param, words)]
        tests += [pytest.param(path, *case, id=f"{path}-{case[0]}"[:60]) for case in cases]
    return tests


BODIES = [
    row
    for path, messages in ((CHAT, "messages"), (TEXT, "prompt"))
    for row in bodies(
        path,
        ("prompt_logprobs", [-2, 21, "x"]),
        ("cache_salt", [5, ""]),
        ("thinking_token_budget", [0, 5, -2, "x"]),
        ("logprob_token_ids", [[1], 1]),
        ("use_beam_search", ["x"]),
        ("truncate_prompt_tokens", [-2, 2048, "x"]),
        ({"truncate_prompt_tokens": 0}, messages),
        ("truncation_side", ["middle"]),
        ("request_id", ["", "x" * 257, 5]),
        ("seed", [-(2**63) - 1, 2**63, 1.5]),
        ("max_tokens", [2**63, 2**65, 10**400], "must be at most 9223372036854775807"),
        ("n", [2**65], "must be at most 16384"),
        ("top_k", [2**31, -(2**65)], "must be at "),
        ("min_tokens", [2**65], "must be at most"),
        ("priority", [2**63, -(2**65)], "must be at "),
        ("prompt_logprobs", [2**65], "must be at most"),
        ("truncate_prompt_tokens", [2**65], "must be at most"),
        ("stop_token_ids", [[2**65], [-1]]),
        ("allowed_token_ids", [[2**65], [-(2**65)]]),
        ("logit_bias", [{str(2**63): 1}], "out of vocabulary"),
        ("logit_bias", [{str(2**65): 1}], "must be token ids"),
        *((name, [10**400, -(10**400), math.inf]) for name in REALS),
        ("guided_json", ["{", {"type": "no"}]),
        ("guided_regex", ["("]),
        ("guided_choice", [[], "x", [1]]),
        ("guided_grammar", ["start"]),
        ("return_token_ids", ["x"]),
    )
]
BODIES += bodies(
    TEXT,
    ("temperature", [-1, "hot"]),
    ("top_p", [0]),
    ("n", [0, 9]),
    ("max_tokens", [0, 1.5]),
    ("prompt", ["", [], [[]], None, [True], [5000], "\ud800"]),
    ("prompt", [[1] * 2048], TOO_LONG),
    ("stop", [[""], 5, ["x"] * 65, ["x" * 1025]]),
    ("bad_words", [["x"] * 129]),
    ("logit_bias", [{str(i): 1 for i in range(301)}, {"5": "x"}, {"x": 1}, {"5": 1000}]),
    ("logit_bias", [{"5000": 1}], "token id 5000 is out of vocabulary (vocab_size=2048)"),
    ("logit_bias", [{"x": 1, "5": 1, "-1": 1}], "['x', '-1']"),
    ("logit_bias", [{"5": ["x" * 100_000]}]),
    ("stream_options", [{"include_usage": True}]),
    ("logprobs", [21]),
    ("seed", ["x"]),
    ("best_of", [2, 5, "x"]),
    ("suffix", ["x"]),
    ("priority", [1]),
    ("use_beam_search", ["yes"]),
    ({"echo": True, "stream": True, "logprobs": 1}, "echo"),
    ("structured_outputs", [{"json": True}, {"json": False}], "['json']"),
)
BODIES += bodies(
    CHAT,
    ("verbosity", ["loud"]),
    ("modalities", [["audio"], "text"]),
    ("audio", [{"voice": "x"}]),
    ("reasoning_effort", ["much", 1]),
    ("functions", [[], [{}], "f"]),
    ("tools", [[], [TOOL] * 129, [{"type": "function"}]]),
    ("tool_choice", ["auto", "required"]),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ("documents", ["d", [1]]),
    ("messages", [[], "hello", [{"content": "x"}], user([IMAGE_URL]), user("x " * 4000)]),
    ("messages", [[{"role": "robot", "content": "x"}]], "role 'robot': must be one of assistant, developer, "),
    ("top_logprobs", [2]),
    ("max_completion_tokens", [2**63, 10**400], "less than or equal to 9223372036854775807"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("logprobs", [2]),
    ("max_completion_tokens", [0]),
    ("response_format", [{"type": "xml"}, {"type": "json_schema"}]),
    ("chat_template_kwargs", [{"chat_template": "{{ 1 }}"}]),
    ("chat_template", ["{{ 1 }}"]),
    # what no answer has
    ("structured_outputs", [{"json": NO_NUMBER}], "Unsatisfiable schema"),
    ("structured_outputs", [{"json": True}], "must be a JSON schema"),
    ("guided_json", [NO_NUMBER], "Unsatisfiable schema"),
    ("guided_regex", [r"[^\s\S]"], "no token is allowed, not even a first one"),
    ("response_format", [{"type": "json_schema", "json_schema": {"schema": NO_NUMBER}}], "Unsat"),
    ({"tools": NO_CALL, "tool_choice": "required"}, "tools", "Unsatisfiable schema"),
    ({"tools": NO_CALL, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tools", "Unsatisfiable"),
)
BODIES += [
    row
    for stream in (False, True)
    for row in bodies(
        RESPONSES,
        *(
            ({"stream": stream, **options}, next(iter(options)))
            for options in (
                {"input": []},
                {"input": 5},
                {"input": user([{"type": "input_image", "image_url": "x"}])},
                {"input": user(5)},
                {"input": [{"role": "robot", "content": "Hi"}]},
                {"input": [{"type": "computer_call", "call_id": "a"}]},
                {"input": [{"type": "function_call", "call_id": "a", "arguments": "{}"}]},
                {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}]},
                {"input": "word " * 5000},
                {"max_output_tokens": 0},
                {"max_output_tokens": 2**63},
                {"temperature": -1},
                {"top_logprobs": 21, "include": ["message.output_text.logprobs"]},
                {"tools": [{"type": "web_search"}]},
                {"tools": [FUNCTION | {"name": "not a name"}]},
                {"tools": [FUNCTION] * 129},
                {"tool_choice": "required"},
                {"tool_choice": "often"},
                {"tool_choice": {"type": "function", "name": "other"}, "tools": [FUNCTION]},
                {"tool_choice": {"type": "web_search"}, "tools": [FUNCTION]},
                {"text": {"format": {"type": "xml"}}},
                {"text": {"format": "text"}},
                {"text": {"format": {"type": "json_schema", "name": "a"}}},
                {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}},
                {"truncation": "sometimes"},
                {"reasoning": {"effort": "extreme"}},
                {"background": True},
                {"conversation": "conv_1"},
                {"prompt": {"id": "pmpt_1"}},
                {"use_beam_search": True},
            )
        ),
    )
]
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": [IMAGE]}
BODIES += bodies(
    MESSAGES,
    ("max_tokens", [None, 0]),
    ("max_tokens", [2**63], "max_tokens=9223372036854775808: must be at most"),
    ("top_k", [2**65], "top_k=36893488147419103232: must be at most"),
    ("temperature", [math.inf], "must be finite"),
    ("temperature", [-3.0], "temperature=-3"),
    ("top_p", ["much"]),
    ("messages", [[]]),
    ("messages", [[{"role": "robot", "content": "a"}]], "messages.0.role"),
    ("messages", [user([{"type": "text"}])], "messages.0.content.0.text.text"),
    ("messages", [user([IMAGE])], "content part ", "takes no images"),
    ("messages", [user([IMAGE | {"source": {"type": "file"}}])], "its type must be base64 or url"),
    ("messages", [user([{"type": "document"}])], "messages.0.content.0: ", "'document'"),
    ("messages", [user([RESULT])], "content part ", "takes no images"),
    ("messages", [user("a " * 5000)], "max_model_len"),
    ("messages", [[{"role": "system", "content": "x-anthropic-billing-header: cc_version=2; cch=d1d48;"}]]),
    ("system", [[IMAGE]]),
    ("tools", [[{"type": "web_search_20250305", "name": "web_search"}]], "tools.0.input_schema"),
    ("tool_choice", [{"type": "any"}]),
    ("tool_choice", [{"type": "some"}], "tool_choice.type"),
    ("stop_sequences", [["a"] * 65]),
    ("thread", [{"type": "create"}]),
    ("output_config", [{"effort": "x"}, {"format": {"type": "json_schema", "schema": 5}}], "output_config"),
)


@pytest.fixture(scope="module")
def post():
    with running(dict(max_logprobs=20), max_answers=8) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        headers = {"content-type": "application/json"}
        yield lambda path, body: http.post(path, content=json.dumps(body), headers=headers)


@pytest.mark.parametrize("path, change, param, words", BODIES)
def test_bodies(post, path, change, param, words):
    answer = post(path, GREEDY_FIELDS | BASE[path] | change)
    error = answer.json()["error"]
    message = error["message"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert all(word in message for word in words) and len(message) <= 500, message
    if path == MESSAGES:  # Anthropic's errors have no field for the name
        assert answer.json()["type"] == "error" and (param in message or words)
    else:
        assert error["param"] == param and len(message) > len(param) + 10
        assert message.startswith((param, "prompt: "))  # which messages become
        assert error["code"] == ("context_length_exceeded" if TOO_LONG in message else None)


MANY = [1] * 50_000
TABLE = {f"k{i}": "x" for i in range(50_000)}


@pytest.mark.parametrize(
    "model, fields",
    [
        (CompletionBody, dict(prompt=[1.5] * 50_000)),
        (CompletionBody, dict(prompt=[[1.5]] * 50_000)),
        (CompletionBody, dict(prompt="x", bad_words=MANY)),
        (CompletionBody, dict(prompt="x", logit_bias=TABLE)),
        (CompletionBody, dict(prompt="x", metadata=dict.fromkeys(TABLE, 1), stop=MANY)),
        (ChatBody, dict(messages=MANY)),
        (ChatBody, dict(messages=[{"role": "user"}] * 50_000)),
        (ChatBody, dict(messages=user(MANY))),
        (ChatBody, dict(messages=[{"role": "user", "tool_calls": MANY}])),
        (ChatBody, dict(messages=QUESTION, tools=[{}] * 50_000)),
        (DetokenizeBody, dict(tokens=["x"] * 50_000)),
        (ResponsesBody, dict(input=MANY)),
        (ResponsesBody, dict(input="a", tools=MANY)),
        (ResponsesBody, dict(input="a", tools=[{}] * 129)),
        (MessagesBody, dict(messages=MANY)),
        (MessagesBody, dict(messages=user(MANY))),
        (MessagesBody, dict(messages=user([{"type": "text"}] * 50_000))),
        (MessagesBody, dict(messages=user([RESULT | {"content": MANY}]))),
        (MessagesBody, dict(messages=QUESTION, system=MANY)),
        (MessagesBody, dict(messages=QUESTION, tools=[{}] * 50_000)),
        (MessagesBody, dict(messages=QUESTION, stop_sequences=MANY)),
    ],
    ids=reprlib.repr,
)
def test_checks_end_with_the_first_wrong_item(model, fields):
    """They run in the event loop: with an error for each item, two megabytes would stop it for seconds."""
    with pytest.raises(pydantic.ValidationError) as found:
        body = model.model_validate({"max_tokens": 5} | fields)
        chat_body(body)  # of Anthropic's, which becomes one of a chat
    assert found.value.error_count() <= (4 if model is CompletionBody else 3)  # of a prompt: one for each type


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, words",
    [
        ("serve tiny-qwen3 --max-num-seqs=0 --device=cpu --port=0", "max_num_seqs=0: must be at least 1"),
        ("serve tiny-qwen3 --tool-call-parser=x --device=cpu", "tool_call_parser='x': must be one of 'auto'"),
        ("serve tiny-qwen3 --api-key=", "api_key='': must have at least 1"),
        ("serve /no/such/folder --port=0", "no such folder"),
        ("generate tiny-qwen3 x --temperature=-1 --device=cpu", "temperature=-1.0: must be at least 0"),
        ("serve tiny-qwen3 --port=99999", "port=99999: must be at most 65535"),
        ("serve", "MODEL"),
        ("nothing", "invalid choice"),
        # what vLLM's command has, and would change something
        ("serve tiny-qwen3 --max-num 3", "unrecognized arguments"),  # no abbreviation: it may be another flag tomorrow
        ("serve tiny-qwen3 --enable-prompt-embeds", "enable_prompt_embeds=True: is not supported"),
        ("serve tiny-qwen3 --lora-modules a --device=cpu", "lora_modules='a': must be NAME=PATH"),
        ("serve tiny-qwen3 --pipeline-parallel-size 2", "pipeline_parallel_size=2: is not supported"),
        ("serve tiny-qwen3 --ssl-keyfile x", "unrecognized arguments: --ssl-keyfile"),
        ("serve tiny-qwen3 --middleware x", "unrecognized arguments: --middleware"),
        ("serve tiny-qwen3 --allow-credentials", "allow_credentials=True: is not supported"),
        ("serve tiny-qwen3 --tool-call-parser xlam", "tool_call_parser='xlam': must be one of"),
        ("serve tiny-qwen3 --reasoning-parser granite", "reasoning_parser='granite': must be one of"),
        ("serve tiny-qwen3 --block-size 16 --kvcache-block-size 16", "block_size=16: is vLLM's name for"),
        ("serve tiny-qwen3 --chat-template /no/such/file", "/no/such/file"),
        ("serve tiny-qwen3 --uds /no/such/folder/socket", "uds='/no/such/folder/socket': No such file"),
    ],
)
def test_command_lines(capsys, line, words):
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    assert end.value.code == 2 and words in capsys.readouterr().err
