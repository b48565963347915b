"""What tests share. The bundled model is the test data; transformers' own Qwen3 on its weights is the reference."""
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any is imported

from nanovllm import LLM
from nanovllm.utils.hub import BUNDLED

torch.set_grad_enabled(False)
torch.set_num_threads(1)  # threads that wait for each other are slow beyond measure where a core is taken

TINY = str(BUNDLED / "tiny-qwen3")


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


@pytest.fixture
def make_llm_with_logprobs(make_llm):
    """STAND-IN, to go when the sampler makes log-probabilities: then this is `make_llm`."""
    from nanovllm.engine.model_runner import Sampled

    def make(*arguments, **settings) -> LLM:
        llm = make_llm(*arguments, **settings)
        runner = llm.model_runner
        hidden, inside, run = [], runner.model.forward, runner.run

        def best(logits: torch.Tensor, token_id: int, num: int) -> dict[int, float]:
            logprobs = logits.float().log_softmax(-1)
            values, ids = logprobs.topk(num)
            return {token_id: logprobs[token_id].item()} | dict(zip(ids.tolist(), values.tolist()))

        class Tokens:
            def __init__(self, step, tokens, logits):
                self.step, self.tokens, self.logits = step, tokens, logits

            def wait(self) -> Sampled:
                token_ids, _, _ = self.tokens.wait()
                rows, logprobs, prompt_logprobs = self.step.rows, [], []
                ends = [sum(end - start for _, start, end in rows[: i + 1]) for i in range(len(rows))]
                for seq, row, token_id in zip(self.step.sampled, self.step.sample_rows, token_ids):
                    num = seq.params.logprobs
                    logprobs.append(None if num is None else best(self.logits[ends[row] - 1], token_id, num))
                for (seq, start, end), last in zip(rows, ends):
                    num, ids = seq.params.prompt_logprobs, seq.token_ids[start + 1 : min(end + 1, seq.num_prompt_tokens)]
                    asked = [best(self.logits[last - end + start + i], x, num or 0) for i, x in enumerate(ids)]
                    prompt_logprobs.append(None if num is None else asked)
                return Sampled(token_ids, logprobs, prompt_logprobs)

        def forward(*inputs):
            hidden.append(inside(*inputs))
            return hidden[-1]

        def run_and_note(step):
            tokens = run(step)
            with torch.inference_mode():
                return Tokens(step, tokens, runner.model.compute_logits(hidden.pop()))

        runner.model.forward, runner.run = forward, run_and_note
        return llm

    return make
