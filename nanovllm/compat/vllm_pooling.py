"""vLLM's calls and outputs for embeddings, scores and classes."""

from dataclasses import dataclass
from typing import Any

import torch

import nanovllm
from nanovllm.compat.vllm_settings import select
from nanovllm.pooling import pooling_params
from nanovllm.pooling.pooling_outputs import PoolingOutput
from nanovllm.pooling.pooling_prompts import pairs_of
from nanovllm.pooling.task import check_task

PARAMS = ("dimensions", "use_activation")
ACCEPTED: dict[str, tuple] = {"task": (None, str), "truncate_prompt_tokens": (None,), "requires_token_ids": (False,)}
UNUSED: dict[str, tuple] = {
    "lora_request": (None, [], [None]),
    "tokenization_kwargs": (None, {}),
    "chat_template": (None,),
    "pooling_task": (None, str),
}


class PoolingParams(pooling_params.PoolingParams):
    """Our PoolingParams with vLLM's names. `use_activation` also controls whether embeddings are normalized."""

    def __init__(self, **params: Any):
        """Raises ValueError for a value that is not supported, and TypeError for an unknown name."""
        params = {name: value for name, value in params.items() if value is not None}
        params = select("parameter", params, PARAMS, ACCEPTED)
        super().__init__(normalize=params.get("use_activation"), **params)


@dataclass
class PooledData:
    """The data of an output. For each task, vLLM has a separate class with some of these attributes."""

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
    """The methods of vLLM's LLM that return vectors."""

    def embed(  # type: ignore[override]
        self, prompts: Any, *, use_tqdm: Any = True, pooling_params: Any = None, **unused: Any
    ) -> list[PoolingRequestOutput]:
        """Return an embedding of each prompt. Raises the same errors as our `embed`."""
        select("argument", unused, (), UNUSED)
        params = pooling_params or PoolingParams()
        return _outputs(super().embed(prompts, params.dimensions, params.normalize, use_tqdm=bool(use_tqdm)))

    def classify(  # type: ignore[override]
        self, prompts: Any, *, use_tqdm: Any = True, pooling_params: Any = None, **unused: Any
    ) -> list[PoolingRequestOutput]:
        """Return the probabilities of the classes. Raises the same errors as our `classify`."""
        select("argument", unused, (), UNUSED)
        params = pooling_params or PoolingParams()
        return _outputs(super().classify(prompts, params.use_activation, bool(use_tqdm)))

    def score(  # type: ignore[override]
        self, data_1: Any, data_2: Any, *, use_tqdm: Any = True, pooling_params: Any = None, **unused: Any
    ) -> list[PoolingRequestOutput]:
        """Return the relevance of documents (`data_2`) to queries (`data_1`). Raises the same errors as our `score`.

        As in vLLM, the tokenizer joins a query and a document, which must already contain the reranker's template.
        """
        check_task(self.config, "score")
        prompts = [{"prompt_token_ids": self.tokenizer(*pair)["input_ids"]} for pair in pairs_of(data_1, data_2)]
        return self.classify(prompts, use_tqdm=use_tqdm, pooling_params=pooling_params, **unused)

    def encode(self, prompts: Any, pooling_params: Any = None, **options: Any) -> list[PoolingRequestOutput]:
        """Return the vector of each prompt, for any task."""
        call = self.embed if self.config.task == "embed" else self.classify
        return call(prompts, pooling_params=pooling_params, **options)


def _outputs(outputs: list[PoolingOutput]) -> list[PoolingRequestOutput]:
    return [
        PoolingRequestOutput(str(x.request_id), PooledData(x.data.tolist()), x.prompt_token_ids, x.num_cached_tokens)
        for x in outputs
    ]
