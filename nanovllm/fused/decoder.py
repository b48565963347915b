"""Defines fused forms of decoder layers and of the whole model. Norms are fused with neighbouring matmuls."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.fused.forms import (
    Fused,
    FusedRMSNorm,
    FusedRotaryEmbedding,
    Rope,
    has_hooks,
    rope_at,
    run_fused,
    takes_fused,
)
from nanovllm.fused.fused_linear import are_known, partial_sum, product, split_linear
from nanovllm.fused.norm_input import Normed, NormInput
from nanovllm.layers.embed_head import embed_shard
from nanovllm.utils.partial_sum import PartialSum, sum_over_ranks

copied = partial(torch.clone, memory_format=torch.contiguous_format)


class FusedMLP(Fused):
    """Replaces `Qwen3MLP.forward`."""

    what = "norm, gate_up and activation (one row); gate_up and activation (from 512 rows on Hopper)"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return are_known(module.gate_up_proj, output=module.down_proj)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.fused(Normed(x)).reduce()

    def fused(self: Any, x: NormInput) -> PartialSum:
        return partial_sum(self.down_proj, product(self.gate_up_proj, x, self.act_fn))


class FusedDecoderLayer(Fused):
    """Replaces `Qwen3DecoderLayer.forward`, and the `forward` of other layers whose norms have the same order."""

    what = "norms with the products after them, sums with the norms after them"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return isinstance(module.input_layernorm, FusedRMSNorm) and isinstance(
            module.post_attention_layernorm, FusedRMSNorm
        )

    def forward(
        self: Any, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            hidden_states = copied(hidden_states)  # becomes the second norm's residual, which that norm overwrites
        else:
            residual = copied(residual)
        rope = rope_at(getattr(self.self_attn, "rotary_emb", None), positions)
        x, residual = self.fused(PartialSum(hidden_states.contiguous()), residual, rope)
        return x.reduce(), residual

    def fused(
        self: Any, x: PartialSum, residual: torch.Tensor | None, rope: Rope, rows: torch.Tensor | None = None
    ) -> tuple[PartialSum, torch.Tensor]:
        """Return the output of the MLP, and the residual. The next norm adds the output of the MLP to the residual.

        After attention, only `rows` are computed; by default all rows.
        """
        normed = self.input_layernorm(x, residual)
        normed = self.post_attention_layernorm(*select(rows, self.mix(normed, rope), normed.residual))
        return run_fused(self.mlp, normed), normed.residual

    def mix(self: Any, x: NormInput, rope: Rope) -> PartialSum:
        return run_fused(self.self_attn, x, rope)


def select(rows: torch.Tensor | None, x: PartialSum, residual: torch.Tensor) -> tuple[PartialSum, torch.Tensor]:
    """Return `rows` of `x` and `residual`, or all rows if `rows` is None."""
    if rows is None:
        return x, residual
    return PartialSum(x.reduce().index_select(0, rows)), residual.index_select(0, rows)


class FusedHybridLayer(FusedDecoderLayer):
    """Replaces `HybridLayer.forward`."""

    def mix(self: Any, x: NormInput, rope: Rope) -> PartialSum:
        return run_fused(self.linear_attn, x) if self.self_attn is None else super().mix(x, rope)


class FusedEmbedding(Fused):
    """Replaces `VocabParallelEmbedding.forward`."""

    what = "the sum over ranks with the first norm"

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.fused(token_ids).reduce()

    def fused(self: Any, token_ids: torch.Tensor) -> PartialSum:
        if self.tp.size == 1:
            return PartialSum(F.embedding(token_ids, self.weight))
        compute = partial(embed_shard, token_ids, self.weight, self.first_id)
        return sum_over_ranks(self.tp, compute, len(token_ids), self.weight.shape[1], self.weight.dtype)


class FusedLMHead(Fused):
    """Replaces `ParallelLMHead.forward`.

    While the sampler's logits are computed, `sampling_params` is `SamplingRows.params`. If `sampling_params` is set, a
    row may lack the logits of other ranks. Rows with filters, such as top-k, are always complete.
    """

    what = "the product and the exchange of logits between ranks, without those that are not needed"
    sampling_params: torch.Tensor | None = None

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if not hasattr(self.tp, "gather"):
            return super().forward(hidden_states)  # type: ignore[misc]
        compute = partial(split_linear, hidden_states, self.weight, None, 1)
        sizes = len(hidden_states), len(self.weight)
        return self.tp.gather(compute, *sizes, hidden_states.dtype, self.sampling_params)


class FusedModel(Fused):
    """Replaces `Qwen3Model.forward`."""

    what = "the last sum of a layer with the first norm of the next"
    output_rows: torch.Tensor | None = None  # the rows that `forward` returns, if `can_select_outputs`; None: all rows

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return isinstance(module.norm, FusedRMSNorm)

    def can_select_outputs(self: Any) -> bool:
        """Return whether the last MLP can run for some rows: it reads no context, and no hook sees its output."""
        *_, layer = None, *self.layers
        known = isinstance(layer, FusedDecoderLayer) and takes_fused(getattr(layer, "mlp", None))
        return known and not has_hooks(self, self.norm, *layer.modules())

    def prepare(self: Any) -> None:
        fused = [layer for layer in self.layers if isinstance(layer, Fused)]
        of_layers = [getattr(getattr(layer, "self_attn", None), "rotary_emb", None) for layer in fused]
        found = dict.fromkeys(rope for rope in of_layers if isinstance(rope, FusedRotaryEmbedding))
        self.ropes = tuple(found)  # a tuple, so that the embeddings do not become submodules of the model
        for layer, rope in zip(fused, of_layers):
            # the last Rope of a step has no cosines and sines
            layer.rope_index = self.ropes.index(rope) if rope in found else -1  # type: ignore[assignment, arg-type]

    def forward(self: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # The lookup must come first. Attention may read cos_sin while the previous kernel still runs. This is safe only
        # because the embedding, an ordinary launch, starts after the lookup is complete: see dependent_launch.py.
        ropes = [*(rope.rows(positions) for rope in self.ropes), Rope(positions, None)]
        embed: Any = self.embed_tokens
        x, residual = embed.fused(input_ids) if takes_fused(embed) else PartialSum(copied(embed(input_ids))), None
        for i, layer in enumerate(self.layers, 1):
            if takes_fused(layer):
                rows = self.output_rows if i == len(self.layers) else None
                x, residual = layer.fused(x, residual, ropes[layer.rope_index], rows)  # type: ignore[operator]
            else:
                hidden_states, residual = layer(positions, x.reduce(), residual)
                x, residual = PartialSum(hidden_states.contiguous()), residual.contiguous()
        return self.norm(x, residual).tensor()
