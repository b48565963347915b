"""Checks whether a model can be split over ranks."""

from nanovllm.models import ModelConfig
from nanovllm.utils.tensor_parallel import TensorParallel


def check_divides(model: ModelConfig, num_ranks: int) -> None:
    """Raise ValueError if the model can't be split into equal parts."""
    tp = TensorParallel(size=num_ranks)
    tp.shard_size("query heads", model.num_attention_heads)
    tp.for_heads(model.num_key_value_heads).shard_size("key-value heads", model.num_key_value_heads)
    if not model.moe or model.moe.is_next_to_mlp or len(model.moe.layers) < model.num_hidden_layers:
        tp.shard_size("inner size of the feed-forward layers", model.intermediate_size)
    if model.moe and model.moe.expert_parallel:
        tp.shard_size("experts", model.moe.num_experts)
    elif model.moe:
        tp.shard_size("inner size of the experts", model.moe.intermediate_size)
    if model.hybrid:
        model.hybrid.check_divides(tp)
    tp.shard_size("vocabulary", model.vocab_size)
