"""What tests share. The bundled model is the test data; transformers' own Qwen3 on its weights is the reference."""

import os

# also for processes that tests start: threads that wait for each other are very slow where a core is busy
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any is imported

from nanovllm import LLM
from nanovllm.kernels.sampling_columns import COLUMNS
from nanovllm.layers.logits import CUSTOM_FILTERS
from nanovllm.utils.hub import BUNDLED

torch.set_grad_enabled(False)

TINY = str(BUNDLED / "tiny-qwen3")


def pytest_addoption(parser):
    parser.addoption("--stress-seconds", type=float, default=2.0, help="how long each stress test of callers takes")
    parser.addoption(
        "--interrupts", type=int, default=10, help="at how many moments each test of interrupts raises one"
    )


@pytest.fixture(scope="session")
def stress_seconds(pytestconfig) -> float:
    return pytestconfig.getoption("--stress-seconds")


@pytest.fixture(scope="session")
def interrupts(pytestconfig) -> int:
    return pytestconfig.getoption("--interrupts")


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
    """A user's question as the token ids of a chat prompt."""

    def render(question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(text)

    return render


@pytest.fixture(autouse=True)
def remove_custom_filters():
    """Filters that a test registers apply to all engines of the process."""
    num_columns = len(COLUMNS)
    yield
    CUSTOM_FILTERS.clear()
    del COLUMNS[num_columns:]


@pytest.fixture
def make_llm():
    """Engines on the bundled model, in float32 on the CPU unless told otherwise, closed at the test's end."""
    engines = []

    def make(model: str = "tiny-qwen3", **settings) -> LLM:
        engines.append(LLM(model, **{"dtype": "float32", "device": "cpu"} | settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.exit()
