"""Defines `NanoVLLM`, a stage of a `ray.data` pipeline that runs an engine."""

from typing import Any

from nanovllm.llm import LLM
from nanovllm.requests.prompts import is_conversation
from nanovllm.requests.request import Prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.prompt_lanes import tokens_prompt


class NanoVLLM:
    """Generates text in a `ray.data` pipeline.

    ```python
    ds.map_batches(NanoVLLM, fn_constructor_kwargs={"model": ...}, concurrency=N, num_gpus=M, batch_size=1024)
    ```

    Each of the N `ray.data` workers has one engine. If `tensor_parallel_size=M` is set, an engine uses M GPUs. Each
    batch becomes one call of `LLM.generate`, so `batch_size` should be several times `max_num_seqs`. The output has the
    columns of the input, and also `generated_text`, `finish_reason`, `num_prompt_tokens` and `num_output_tokens`. If a
    row's prompt is invalid, its finish reason is "error", and its text is the error message. Other rows are not
    affected.

    The class works without Ray: calling an instance maps a dict of columns to a dict of columns.
    """

    def __init__(
        self, model: str, sampling_params: dict[str, Any] | None = None, column: str = "prompt", **settings: Any
    ) -> None:
        """Load the model. `settings` are the settings of `LLM`.

        sampling_params: arguments of SamplingParams, or `None` for the parameters that the model recommends.
        column: the column that contains the prompts, which are strings, lists of token ids, or conversations (lists of
            dicts with `role` and `content`).
        """
        self.column = column
        self.llm = LLM(model, **settings)
        default = self.llm.get_default_sampling_params()
        self.params = default if sampling_params is None else SamplingParams(**sampling_params)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        errors: dict[int, str] = {}
        prompts: dict[int, Prompt] = {}
        for i, prompt in enumerate(batch[self.column]):
            try:
                text, token_ids, images = self.llm.input_processor.tokenize(_as_prompt(prompt))
                prompts[i] = tokens_prompt(token_ids, text, images)
            except (ValueError, TypeError) as error:
                errors[i] = str(error)
        answers = self.llm.generate([*prompts.values()], self.params, use_tqdm=False) if prompts else []
        outputs = dict(zip(prompts, answers))
        rows = range(len(batch[self.column]))
        return batch | {
            "generated_text": [outputs[i].text if i in outputs else errors[i] for i in rows],
            "finish_reason": [outputs[i].finish_reason if i in outputs else "error" for i in rows],
            "num_prompt_tokens": [len(outputs[i].prompt_token_ids) if i in outputs else 0 for i in rows],
            "num_output_tokens": [len(outputs[i].token_ids) if i in outputs else 0 for i in rows],
        }


def _as_prompt(value: Any) -> Any:
    """Convert a cell of a column to a prompt. Arrays become lists."""
    items = value.tolist() if hasattr(value, "tolist") else value
    if is_conversation(items):  # a key that only other rows have is None in this row
        return [{key: entry for key, entry in message.items() if entry is not None} for message in items]
    return items
