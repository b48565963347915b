"""Defines the outputs of requests for embeddings, scores and classes."""

from dataclasses import dataclass
from typing import Any

from nanovllm.engine.outputs import CompletionOutput, Record, RequestMetrics


@dataclass(frozen=True, slots=True, eq=False)
class PoolingOutput(Record):
    """Contains the vector that was computed for a text: an embedding, a score, or the probabilities of classes.

    prompt: the text, including the instruction or template. If the prompt was passed as token ids, `prompt` is None.
    data: a NumPy array of float32, or None if the request was aborted.
    labels: the names of the classes, in the order of `data`.
    metrics: see RequestMetrics. No tokens are generated, so `first_token_time` is None.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    data: Any
    labels: tuple[str, ...]
    num_cached_tokens: int
    metrics: RequestMetrics

    @property
    def embedding(self) -> Any:
        """The embedding, a NumPy array of float32."""
        return self.data

    @property
    def score(self) -> float:
        """The relevance of a document. With the usual activation, sigmoid, the relevance is between 0 and 1."""
        return float(self.data[0])

    @property
    def probs(self) -> list[float]:
        return self.data.tolist()

    @property
    def label(self) -> str:
        return self.labels[int(self.data.argmax())]

    @property
    def finished(self) -> bool:
        return self.data is not None

    @property
    def outputs(self) -> list[CompletionOutput]:
        return [CompletionOutput(0, "", [], None, None, "stop" if self.finished else "abort", None)]
