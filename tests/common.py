"""Fixtures and helpers for tests. By default, tests use the bundled model, and transformers' Qwen3 as the reference."""

import atexit
import gc
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Collection, Iterable
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from functools import cache
from itertools import pairwise
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace

if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)  # runs last, and skips the teardown of modules, which takes two seconds
gc.disable()  # until tests are collected: collections during the imports would scan all modules again and again
# also for the processes that tests start: OpenMP threads that wait for each other are very slow on a busy machine
os.environ["OMP_NUM_THREADS"] = "1"
# a shell starts background programs with SIGINT ignored, and programs that tests start would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
# otherwise, each process would compile our sources again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import pytest
import torch
from programs import Program
from safetensors.torch import load_file, save_file

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any import: Triton reads it when a kernel is defined

from nanovllm import LLM, kernels
from nanovllm.batches.batch_runner import BatchRunner
from nanovllm.distributed import worker
from nanovllm.engine import llm_engine, model_runner
from nanovllm.engine.features import FEATURES
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.fused import fuse
from nanovllm.kernels.sampling.sampling_columns import COLUMNS
from nanovllm.layers.sampler import gumbel_noise
from nanovllm.reasoning.formats import FORMATS, HARMONY
from nanovllm.reasoning.harmony import HarmonyMarkers
from nanovllm.reasoning.stage import Markers
from nanovllm.utils.double_buffer import DoubleBuffer
from nanovllm.utils.loader import load_tokenizer
from nanovllm.utils.model_files import BUNDLED
from nanovllm.utils.partial_sum import PartialSum
from nanovllm.utils.tensor_parallel import TensorParallel

torch.set_grad_enabled(False)
ssl.create_default_context = cache(ssl.create_default_context)  # otherwise, each client of httpx reads all certificates


if not torch.cuda.is_available():
    torch.manual_seed = torch.default_generator.manual_seed  # the usual one records the stack for each kind of device
    with suppress(ImportError):  # without Triton
        import interpreter

        interpreter.speed_up()


def small_cache_budget(runner: ModelRunner) -> int:
    """Return the bytes for a cache of 16,384 tokens and at least 256 blocks. The usual 131,072 would take a second."""
    num_blocks = max(256, 16384 // runner.config.kvcache_block_size)
    return min(model_runner.CPU_KV_CACHE_BYTES, runner.cache_bytes(num_blocks))


whole_cache_budget, ModelRunner.cache_budget = ModelRunner.cache_budget, small_cache_budget

TOKENIZERS: dict = {}  # by the contents of their files


def load_tokenizer_once(folder: str):
    """Return a shallow copy of the tokenizer that other engines have, because loading one takes 5 to 10 ms."""
    files = sorted(file for file in Path(folder).rglob("*") if file.suffix in (".json", ".jinja"))
    key = tuple((file.relative_to(folder), file.read_bytes()) for file in files)
    if key not in TOKENIZERS:
        TOKENIZERS[key] = load_tokenizer(folder)
    return copy(TOKENIZERS[key])


llm_engine.load_tokenizer = load_tokenizer_once

TINY = str(BUNDLED / "tiny-qwen3")

# kernels are tested on the CUDA device, or without one, in Triton's interpreter
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.float16] + CUDA * [torch.bfloat16]  # the interpreter's bfloat16 is broken
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NAN = float("nan")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
# for kernels that are slow in the interpreter: float16 also tests conversions, which float32 does not need
each_dtype_or_half = pytest.mark.parametrize(
    "dtype", DTYPES if CUDA else [torch.float16], ids=lambda dtype: str(dtype)[6:]
)

# for tests with two ranks on CUDA
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
EXPERTS_ON_TWO = {"tensor_parallel_size": 2, "expert_parallel": True}


def pairs(first: Iterable, second: Iterable) -> list[tuple]:
    """Return all pairs on a GPU. In the slow interpreter, return every other pair, as on a chessboard."""
    return [(a, b) for i, a in enumerate(first) for j, b in enumerate(second) if CUDA or (i + j) % 2 == 0]


class Peers(TensorParallel):
    """A rank that writes its part of a sum to other ranks' memory."""

    def sum(self, compute, num_rows, width, dtype, split_k=1):
        self.parts = torch.full((split_k, num_rows, width), NAN, dtype=dtype, device=DEVICE)
        compute(self.parts)
        return PartialSum(self.parts, split_k)


def one_peer(capacity: int = 4096):
    """Return a PeerTensorParallel with memory of the CPU, of a single rank, whose layers take the path of two."""
    from nanovllm.distributed.peer_memory import MAX_KEYS, MAX_PROGRAMS, PeerMemory, PeerTensorParallel

    peers = object.__new__(PeerMemory)
    peers.rank, peers.size, peers.capacity, peers._sum_buffers = 0, 1, capacity, DoubleBuffer(0, 1)
    peers.keys_offset = 3 * MAX_PROGRAMS * 4
    peers.sums_offset = peers.keys_offset + 8 * MAX_KEYS
    peers.memory = torch.zeros(peers.sums_offset + 2 * peers.capacity, dtype=torch.uint8)
    peers.addresses = torch.tensor([peers.memory.data_ptr()])
    peers.aborted = torch.zeros(1, dtype=torch.int32)
    tp = PeerTensorParallel(peers)
    tp.size = 2
    return tp


class CharacterTokenizer:
    """A tokenizer in which each character is a token, whose id is its code point. `special` texts are also tokens."""

    def __init__(self, *special: str):
        self.special = {text: 0x110000 + i for i, text in enumerate(special)}
        self.added_tokens_decoder = {
            i: SimpleNamespace(content=text, special=False) for text, i in self.special.items()
        }
        self.bytes = {i: text.encode() for text, i in self.special.items()}

    def __getitem__(self, token_id: int) -> bytes:
        return self.bytes.get(token_id) or chr(token_id).encode()

    def convert_tokens_to_ids(self, text: str) -> int | None:
        return self.special.get(text)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self[token_id].decode()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        pieces = re.split("(" + "|".join(map(re.escape, self.special)) + ")", text) if self.special else [text]
        return [i for piece in pieces for i in ([self.special[piece]] if piece in self.special else map(ord, piece))]

    def markers(self, name: str = "think") -> Markers:
        """Return the markers of a reasoning format."""
        make = HarmonyMarkers if FORMATS[name] is HARMONY else Markers
        return make(FORMATS[name], self, self)


def noise_of_rows(seeds: torch.Tensor, positions: torch.Tensor, num_ids: int, first_id: int = 0) -> torch.Tensor:
    """Return the sampler's noise [S, num_ids] for `num_ids` token ids, starting at `first_id`."""
    quads = torch.arange(-(-(first_id + num_ids) // 4), device=seeds.device)
    rows = torch.arange(len(seeds), device=seeds.device).repeat_interleave(len(quads))
    noise = gumbel_noise(seeds[rows], positions[rows], quads.repeat(len(seeds)))
    return noise.view(len(seeds), 4 * len(quads))[:, first_id : first_id + num_ids]


def randn(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def warnings_in(caplog) -> list[str]:
    """Return our logger's warnings, even if other tests have changed its level."""
    return [x.getMessage() for x in caplog.records if x.name == "nanovllm" and x.levelname == "WARNING"]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    """Compare with `expected` in float64. The tolerance depends on the dtype of `actual`."""
    tolerance = TOLERANCE[actual.dtype] * scale
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.fixture
def fresh_memory_is_nan():
    """Fill torch.empty with NaN, which reveals values that a kernel does not write. Also fix the random seed."""
    torch.manual_seed(0)
    # torch.use_deterministic_algorithms would import the compiler, which takes two seconds
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    yield
    torch._C._set_deterministic_algorithms(False)


@contextmanager
def step_error(kind: type[BaseException], match: str | None = None):
    """Expect an error in a step, as `pytest.raises` does. Callers get a RuntimeError whose cause is this error."""
    with pytest.raises(RuntimeError, match=match) as raised:
        yield
    assert isinstance(raised.value.__cause__, kind)


def generate_by_steps(llm: LLM, requests: Iterable[tuple]) -> list:
    """Return the outputs of requests (arguments of `add_request`), computed with mixed steps of decodes and prompts.

    A lone call of `LLM.generate` has no mixed steps, because it computes all prompts first.
    """
    ids = [llm.add_request(*request) for request in requests]
    outputs = {}
    while not llm.is_finished():
        outputs |= {output.request_id: output for output in llm.step().finished}
    return [outputs[i] for i in ids]


@pytest.fixture(scope="session")
def stress_seconds(pytestconfig) -> float:
    return pytestconfig.getoption("--stress-seconds")


@pytest.fixture(scope="session")
def interrupts(pytestconfig) -> int:
    return pytestconfig.getoption("--interrupts")


def pytest_collection_finish():
    """Freeze all modules and tests, so that garbage collections during tests do not scan them."""
    gc.enable()
    gc.set_threshold(5000)  # tests make hardly any cyclic garbage
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise, some libraries report leaked objects at exit


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="session")
def chat(tokenizer):
    """Return a function that turns a user's question into the token ids of a chat prompt."""

    def render(question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(text)

    return render


@pytest.fixture(autouse=True)
def remove_registered_features():
    """Remove the features that a test has registered, because they apply to all engines in the process."""
    num_columns, features = len(COLUMNS), {**FEATURES}
    yield
    FEATURES.clear()
    FEATURES.update(features)
    for name in [*COLUMNS][num_columns:]:
        del COLUMNS[name]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory) -> str:
    """Return the folder of a model for tests with many steps. A step takes an eighth of the bundled model's time."""
    return write_small_model(tmp_path_factory.mktemp("small") / "model", num_layers=1)


@pytest.fixture(scope="session")
def two_layer_model(tmp_path_factory) -> str:
    """Return the folder of a small model for tests of what differs from layer to layer."""
    return write_small_model(tmp_path_factory.mktemp("small") / "model", num_layers=2)


def write_small_model(folder: Path, num_layers: int) -> str:
    """Write a model with few layers and a quarter of the bundled model's width.

    The random weights are so large that each token depends on all tokens before it.
    """
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {name: config[name] // 4 for name in ("hidden_size", "head_dim", "intermediate_size")}
    left_out = tuple(f"model.layers.{i}." for i in range(num_layers, config["num_hidden_layers"]))
    config |= {"num_hidden_layers": num_layers, "layer_types": config["layer_types"][:num_layers]}
    (folder / "config.json").write_text(json.dumps(config))
    random, weights = torch.Generator().manual_seed(1), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.startswith(left_out):
            shape = [size if size == config["vocab_size"] else size // 4 for size in tensor.shape]
            is_norm = len(shape) == 1
            weights[name] = torch.ones(shape) if is_norm else torch.randn(shape, generator=random) * 2 / shape[1] ** 0.5
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def with_end_ids(model: str, folder: Path, step: int, first: int = 0) -> str:
    """Copy a model to `folder`, with the end-of-sequence ids first, first + step, ..., so that random answers end."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(first, 2048, step)]}))
    return str(folder)


def scripted_model(folder: Path, pieces: list[str], template: str, special: Collection[str] = ()) -> str:
    """Make a model that answers with `pieces`, and then ends. Each piece becomes a new token; all must be different.

    Its only layer does nothing, and its output head maps each token to the next one. Prompts must end with a newline.
    special: the special tokens, which may be pieces or further tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens, end, size = [*pieces, *(x for x in special if x not in pieces)], 2047, 64
    tokenizer = json.loads(Path(TINY, "tokenizer.json").read_text())
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    added = [plain | {"id": 2048 + i, "content": text, "special": text in special} for i, text in enumerate(tokens)]
    tokenizer["added_tokens"] += added
    settings = json.loads(Path(TINY, "tokenizer_config.json").read_text()) | {"chat_template": template}
    config = dict(model_type="llama", vocab_size=2048 + len(tokens), hidden_size=size, intermediate_size=8)
    config |= dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32, rms_norm_eps=1e-6)
    config |= dict(max_position_embeddings=2048, eos_token_id=end, tie_word_embeddings=False, dtype="float32")
    for name, content in (("tokenizer", tokenizer), ("tokenizer_config", settings), ("config", config)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    last = load_tokenizer(TINY).encode("\n")[-1]
    chain = [last, *range(2048, 2048 + len(pieces)), end]
    embeddings, head = torch.zeros(2, config["vocab_size"], size)
    for i, (token, following) in enumerate(pairwise(chain)):
        embeddings[token, i], head[following, i] = 1, 10
    weights = {"model.embed_tokens.weight": embeddings, "lm_head.weight": head, "model.norm.weight": torch.ones(size)}
    shapes = {"self_attn.q_proj": (64, size), "self_attn.k_proj": (32, size), "self_attn.v_proj": (32, size)}
    shapes |= {"self_attn.o_proj": (size, 64), "mlp.gate_proj": (8, size), "mlp.up_proj": (8, size)}
    shapes |= {"mlp.down_proj": (size, 8), "input_layernorm": (size,), "post_attention_layernorm": (size,)}
    layer = {name: torch.zeros(shape) if len(shape) > 1 else torch.ones(shape) for name, shape in shapes.items()}
    save_file(weights | {f"model.layers.0.{x}.weight": w for x, w in layer.items()}, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def model_name(request) -> str:
    """Return the model for `make_llm`: the bundled model, or `small_model` in files with that mark."""
    is_small = request.node.get_closest_marker("small_model")
    return request.getfixturevalue("small_model") if is_small else "tiny-qwen3"


@pytest.fixture
def use_ops(monkeypatch):
    """Return a function that replaces the test device's operations by a table, by some kernels, or by all kernels.

    Engines made after calling it have fused layers. Without a CUDA device, kernels run in Triton's interpreter.
    """
    before = kernels.ops_for(torch.device(DEVICE))

    def use(*names: str, table: dict | None = None) -> None:
        monkeypatch.setattr(ModelRunner, "fuse_layers", lambda self, model: fuse(model))
        if table is None:
            table = vars(pytest.importorskip("nanovllm.kernels.ops"))
        kernels.register_ops(DEVICE, {name: table[name] for name in names} if names else table)

    yield use
    kernels.register_ops(DEVICE, before)


def runs_as_on_cuda(runner) -> None:
    """Make a CPU runner run steps as a CUDA runner does. The runner must not have allocated memory yet."""
    from nanovllm.cuda.runner import CUDAModelRunner

    plain, batches = vars(ModelRunner), vars(BatchRunner)
    methods = {name: plain[name] for name in ("on_device", "zeros", "recover")}
    methods |= {name: batches[name] for name in ("end_of_step", "exit")}
    runner.__class__ = type("CUDAModelRunnerOnCPU", (CUDAModelRunner,), methods)
    if not hasattr(runner, "tables"):  # it was a plain runner
        BatchRunner.make_tables(runner)


class ForkedRank(ForkProcess):
    """A rank's process, forked so that PyTorch is already imported. A new process would need two seconds for that."""

    def __init__(self, command: list[str], stdin: int, pass_fds: tuple[int, ...]):
        super().__init__(target=self.work, args=(int(command[3]), pass_fds))
        self.start()

    def work(self, socket: int, kept_fds: tuple[int, ...]) -> None:
        for fd in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, socket, *kept_fds}:
            with suppress(OSError):  # the descriptor of the folder itself
                os.close(fd)
        worker.work(socket)

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, seconds: float) -> None:
        self.join(seconds)


@pytest.fixture
def free_drafts(monkeypatch):
    """Pretend that more rows take no time on CUDA, so that drafts always pay off, even for a small model."""
    from nanovllm.cuda import start as cuda
    from nanovllm.spec_decode.speculative_config import StepCost

    def measure(runner):
        settings = replace(runner.config.speculative_config, step_cost=StepCost((1, 2), (1.0, 1.0)))
        runner.config.resolve(speculative_config=settings)

    monkeypatch.setattr(cuda, "measure_drafts", measure)


@pytest.fixture
def forked_ranks(monkeypatch):
    """Fork ranks from this process. test_tensor_parallel.py also starts ranks as programs do."""
    if not CUDA:  # forked processes can't use CUDA
        monkeypatch.setattr(worker, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": ForkedRank}))


def run_with_copy(code: str, folder: Path, *arguments: str) -> str:
    """Run a program with a copy of the package in `folder`, and return its output. The program must not fail."""
    command = [sys.executable, "-c", code, *arguments]
    with Program(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        printed, errors = process.communicate()
    assert process.returncode == 0, errors
    return printed


@pytest.fixture
def make_llm(model_name):
    """Return a function that makes engines, by default in float32 on the CPU. They are closed after the test."""
    engines = []

    def make(model: str = model_name, **settings) -> LLM:
        engines.append(LLM(model, **{"dtype": "float32", "device": "cpu"} | settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.exit()
