"""Implements vLLM's methods and outputs for embeddings, scores and classes."""

from dataclasses import dataclass
from typing import Any

import torch

import nanovllm
from nanovllm.compat.vllm_settings import select
from nanovllm.pooling import pooling_params
from nanovllm.pooling.pooling_outputs import PoolingOutput
from nanovllm.pooling.pooling_prompts import pairs_of
from nanovllm.pooling.task import check_task
from nanovllm.requests.truncation import check_num_kept

PARAMS = ("dimensions", "use_activation")
ACCEPTED: dict[str, tuple] = {"task": (None, str), "truncate_prompt_tokens": (None,), "requires_token_ids": (False,)}
UNUSED: dict[str, tuple] = {
    "lora_request": (None, [], [None]),
    "chat_template": (None,),
    "pooling_task": (None, str),
}


class PoolingParams(pooling_params.PoolingParams):
    """nano-vllm's PoolingParams with vLLM's names.

    `use_activation` also sets whether embeddings are normalized.
    """

    def __init__(self, **params: Any):
        """Raises ValueError for a value that is not supported, and TypeError for an unknown name."""
        params = {name: value for name, value in params.items() if value is not None}
        params = select("parameter", params, PARAMS, ACCEPTED)
        super().__init__(normalize=params.get("use_activation"), **params)


@dataclass
class PooledData:
    """The data of an embedding, score or class output.

    In vLLM, each task has its own class, with some of this class's attributes.
    """

    embedding: list[float]

    @property
    def data(self) -> Any:

        return torch.tensor(self.embedding)

    @property
    def probs(self) -> list[float]:
        return self.embedding

    @property
    def score(self) -> float:
        return self.embedding[0]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)

    num_classes = hidden_size


@dataclass
class PoolingRequestOutput:
    """The output of a request for an embedding, a score or classes."""

    request_id: str
    outputs: PooledData
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


class PoolingCalls(nanovllm.LLM):
    """The methods of vLLM's LLM that return vectors.

    truncate_prompt_tokens: as in `nanovllm.LLM.embed`; may also be given as a key of `tokenization_kwargs`.
    """

    def embed(  # type: ignore[override]
        self, prompts: Any, *, use_tqdm: Any = True, pooling_params: Any = None, **unused: Any
    ) -> list[PoolingRequestOutput]:
        """Return an embedding of each prompt. Raises the same errors as `nanovllm.LLM.embed`."""
        num_kept, params = _num_kept(unused), pooling_params or PoolingParams()
        options: dict[str, Any] = dict(use_tqdm=bool(use_tqdm), truncate_prompt_tokens=num_kept)
        return _outputs(super().embed(prompts, params.dimensions, params.normalize, **options))

    def classify(  # type: ignore[override]
        self, prompts: Any, *, use_tqdm: Any = True, pooling_params: Any = None, **unused: Any
    ) -> list[PoolingRequestOutput]:
        """Return the probabilities of the classes. Raises the same errors as `nanovllm.LLM.classify`."""
        num_kept, params = _num_kept(unused), pooling_params or PoolingParams()
        return _outputs(super().classify(prompts, params.use_activation, bool(use_tqdm), None, num_kept))

    def score(  # type: ignore[override]
        self, data_1: Any, data_2: Any, *, use_tqdm: Any = True, pooling_params: Any = None, **unused: Any
    ) -> list[PoolingRequestOutput]:
        """Return the relevance of documents (`data_2`) to queries (`data_1`).

        Raises the same errors as `nanovllm.LLM.score`. As in vLLM, the tokenizer joins each query with a document. The
        reranker's template must already be part of the queries and documents.
        """
        check_task(self.config, "score")
        if (num_kept := _num_kept(unused)) is not None:
            num_kept = check_num_kept(num_kept, self.input_processor.max_prompt_tokens)
        cut: dict[str, Any] = dict(truncation=num_kept is not None, max_length=num_kept)
        with self.input_processor.tokenizer_lock:
            ids = [self.tokenizer(*pair, **cut)["input_ids"] for pair in pairs_of(data_1, data_2)]
        return self.classify(ids, use_tqdm=use_tqdm, pooling_params=pooling_params)

    def encode(self, prompts: Any, pooling_params: Any = None, **options: Any) -> list[PoolingRequestOutput]:
        """Return the vector of each prompt, for any task."""
        call = self.embed if self.config.task == "embed" else self.classify
        return call(prompts, pooling_params=pooling_params, **options)


def _num_kept(arguments: dict[str, Any]) -> int | None:
    """Return `truncate_prompt_tokens`. Raises the same errors as `select` if another argument would have an effect."""
    name, tokenization = "truncate_prompt_tokens", arguments.pop("tokenization_kwargs", None) or {}
    given = select("argument", arguments, (name,), UNUSED)
    return (given | select("key of tokenization_kwargs", tokenization, (name,), {})).get(name)


def _outputs(outputs: list[PoolingOutput]) -> list[PoolingRequestOutput]:
    return [
        PoolingRequestOutput(str(x.request_id), PooledData(x.data.tolist()), x.prompt_token_ids, x.num_cached_tokens)
        for x in outputs
    ]
