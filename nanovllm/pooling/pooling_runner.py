"""The model runner of an engine whose steps compute vectors instead of tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.batches.batch import DeviceBatch, HostBatch
from nanovllm.batches.batch_runner import BatchRunner
from nanovllm.engine.forward_output import PendingStep, SamplerInput
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.pooling.pooling_scheduler import PooledResult
from nanovllm.utils.loader import HEAD, check_shape, default_weight_loader, find_tensors, parameter


class PendingVectors(PendingStep):
    """Describes a launched step whose vectors might not have reached host memory yet."""

    def wait(self) -> PooledResult:  # type: ignore[override]
        """Wait for the device, and return the vectors. Raises the same errors as `PendingStep.wait`."""
        assert self.step is not None
        self.synchronize()
        results = self.results[: len(self.step.sampled_seqs)].clone()  # a later step overwrites the original
        return PooledResult([*results.view(torch.float32).numpy()], {})


class EmbeddingHead(nn.Module):
    """Replaces a model's output head, and returns the hidden states [S, hidden_size] in float32."""

    first_id = 0  # for the Sampler, which never runs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


class ClassificationHead(EmbeddingHead):
    """Maps hidden states [S, hidden_size] to logits [S, outputs] in float32. Every rank has the whole weight."""

    def __init__(self, num_outputs: int, hidden_size: int):
        super().__init__()
        self.weight = parameter((num_outputs, hidden_size), self.weight_loader, torch.float32)

    def weight_loader(self, param: torch.Tensor, loaded_weight: Any, *shard_id: int) -> torch.Tensor:
        return default_weight_loader(param, loaded_weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self.weight)


class AnswerHead(ClassificationHead):
    """Holds a few rows of a language model's output head. Each row belongs to one token."""

    def __init__(self, token_ids: tuple[int, ...], vocab_size: int, hidden_size: int):
        super().__init__(len(token_ids), hidden_size)
        self.token_ids, self.vocab_size = token_ids, vocab_size

    def weight_loader(self, param: torch.Tensor, loaded_weight: Any, *shard_id: int) -> torch.Tensor:
        weight = check_shape(loaded_weight, (self.vocab_size, param.shape[1]))
        for row, token_id in zip(param, self.token_ids):
            row.copy_(weight[token_id : token_id + 1][0])
        return param

    def tie(self, embedding: Any) -> None:
        """Load the rows from the weight of the embedding, because the checkpoint contains no output head."""
        load_embedding, weight = embedding.weight.weight_loader, self.weight.data

        def load(param: torch.Tensor, loaded_weight: Any) -> torch.Tensor:
            self.weight_loader(weight, loaded_weight)
            return load_embedding(param, loaded_weight)

        embedding.weight.weight_loader = load
        del self.weight  # it becomes a buffer, because the loader looks for a tensor of each parameter
        self.register_buffer("weight", weight)


class PoolingRunner(BatchRunner):
    """Computes a vector for each prompt that a step completes.

    In the mode "last", a vector depends only on the last hidden state. In other modes, a table on the device stores a
    partial vector for each prompt until the last chunk of the prompt is computed.
    """

    partial_vectors: Any = None  # [requests + 1, hidden_size] float32, by request index

    def make_model(self) -> nn.Module:
        """Make the model without weights, and replace its output head with the head of the task."""
        model: Any = super().make_model()
        config, pooling = model.config, self.config.pooling
        model.config = replace(config, tie_word_embeddings=False)
        if pooling.token_ids:
            model.lm_head = AnswerHead(pooling.token_ids, config.vocab_size, config.hidden_size)
            has_head = self.config.load_format != "dummy" and HEAD in find_tensors(Path(self.config.model))
            if config.tie_word_embeddings and not has_head:
                model.lm_head.tie(next(x for x in model.modules() if isinstance(x, VocabParallelEmbedding)))
            return model
        model.lm_head = EmbeddingHead()
        if pooling.labels:
            model.lm_head = ClassificationHead(len(pooling.labels), config.hidden_size)
        # transformers calls a head for classes `score`
        model.packed_modules_mapping = {**model.packed_modules_mapping, "score": ("lm_head", 0)}
        model.unused_prefixes = (*getattr(model, "unused_prefixes", ()), "lm_head.")
        return model

    def make_tables(self) -> None:
        super().make_tables()
        if self.config.pooling.mode != "last":
            size = self.config.max_num_seqs + 1, self.config.model_config.hidden_size
            self.partial_vectors = torch.zeros(size, dtype=torch.float32, device=self.device)

    def run_batch(self, batch: DeviceBatch) -> tuple[torch.Tensor, SamplerInput]:
        """Run the model. If the mode is not "last", the head of the task reads pooled vectors [S, hidden_size]."""
        hidden_states, x = super().run_batch(batch)
        if self.config.pooling.mode != "last":
            x = x._replace(hidden_states=self.pool(hidden_states, batch))
        return hidden_states, x

    def pool(self, hidden_states: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        """Add a step's hidden states [T, hidden_size] to `partial_vectors`.

        Return the vectors of the prompts that this step completes, in float32. In the mode "mean", a vector is the mean
        of all hidden states of a prompt. In the mode "cls", a vector is the first hidden state.
        """
        starts, lengths, rows = batch.cu_seqlens_q, batch.context_lens, batch.state_rows[1].long()
        is_first_chunk = (lengths == starts.diff()).unsqueeze(1)
        before, sampled = self.partial_vectors[rows], batch.sampled_rows
        if self.config.pooling.mode == "cls":
            vectors = hidden_states[starts[:-1]].float().where(is_first_chunk, before)
        else:
            sums = torch.segment_reduce(hidden_states.float(), "sum", offsets=starts, axis=0)
            vectors = torch.where(is_first_chunk, sums, before + sums)
        self.partial_vectors[rows] = vectors
        return vectors[sampled] if self.config.pooling.mode == "cls" else vectors[sampled] / lengths[sampled, None]

    def sample_and_accept(self, x: SamplerInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute vectors [S, N]. The results of the step are the bits of the vectors, as int32."""
        # `compute_logits` may scale logits, which the family defines only for logits of tokens
        head = self.model.compute_logits if self.config.pooling.token_ids else self.model.lm_head
        results = head(x.hidden_states).contiguous().view(torch.int32)
        return results, results

    def launch(self, batch: HostBatch, step: ScheduledStep | None = None) -> PendingStep:
        return PendingVectors(*super().launch(batch, step))

    def exit(self) -> None:
        self.partial_vectors = None
        super().exit()
