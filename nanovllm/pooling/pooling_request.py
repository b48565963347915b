"""Makes requests for embeddings, scores and classes."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from nanovllm.config import Config
from nanovllm.engine.outputs import OutputKind, RequestMetrics
from nanovllm.pooling.pooling_outputs import PoolingOutput
from nanovllm.pooling.pooling_params import PoolingParams
from nanovllm.pooling.pooling_scheduler import PooledSequence
from nanovllm.requests.input_processor import InputProcessor
from nanovllm.requests.request import Prompt, Request


class PoolingRequest(Request):
    index = 0  # like `CompletionRequest.index`
    group: list[Any]

    def __init__(
        self, seq: PooledSequence, params: PoolingParams, prompt: str | None, kind: OutputKind, config: Config
    ):
        super().__init__([seq], prompt, kind)
        self.params, self._config = params, config

    @property
    def is_finished(self) -> bool:
        return self.group[0].finish_reason is not None

    def output(self) -> PoolingOutput:
        (seq,) = self.group
        data = None if seq.vector is None else self._data(seq.vector)
        return self.output_of(data, seq.num_cached_tokens, self.metrics())

    def output_of(self, data: Any, num_cached_tokens: int, metrics: RequestMetrics) -> PoolingOutput:
        pooling, ids = self._config.pooling, self.group[0].prompt_token_ids
        return PoolingOutput(self.request_id, self.prompt, ids, data, pooling.labels, num_cached_tokens, metrics)

    def _data(self, vector: np.ndarray) -> np.ndarray:
        params, pooling = self.params, self._config.pooling
        if not pooling.labels:
            vector = vector[: params.dimensions or pooling.default_dimensions]
            is_normalized = pooling.normalize if params.normalize is None else params.normalize
            return vector / max(float(np.linalg.norm(vector)), 1e-12) if is_normalized else vector
        if len(pooling.token_ids) == 2:
            vector = vector[1:] - vector[:1]  # the log-odds of the relevant answer
        if not params.use_activation or pooling.activation == "identity":
            return vector
        if pooling.activation == "sigmoid":
            return (0.5 * (1 + np.tanh(0.5 * vector))).astype(np.float32)  # without overflow
        exponentials = np.exp(vector - vector.max())
        return exponentials / exponentials.sum()


def pooling_request(
    processor: InputProcessor, prompt: Prompt, params: PoolingParams, kind: OutputKind, priority: int = 0
) -> PoolingRequest:
    """Make a request for one text. Raises the same errors as `InputProcessor.request` and `params.check`."""
    params.check(processor.config)
    if priority:
        priority = processor.check_priority(priority)
    text, token_ids, _ = processor.tokenize(prompt)
    request_id, max_len = processor.next_request_id(), processor.max_model_len
    seq = PooledSequence(token_ids, request_id=request_id, max_len=max_len, priority=priority)
    processor.set_order(seq)
    return PoolingRequest(seq, params, text, kind, processor.config)


def pooling_requests(
    processor: InputProcessor, prompts: Iterable[Prompt], params: PoolingParams, priority: Iterable[int]
) -> list[PoolingRequest]:
    """Make a request for each text. Each request outputs only the final result."""
    kind = OutputKind.FINAL_ONLY
    return [pooling_request(processor, prompt, params, kind, p) for prompt, p in zip(prompts, priority)]
