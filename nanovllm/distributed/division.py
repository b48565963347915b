"""Whether a model can be divided among ranks, and key-value heads among more ranks than there are heads."""

from nanovllm.models import ModelConfig
from nanovllm.utils.tensor_parallel import TensorParallel


def check_divides(model: ModelConfig, num_ranks: int) -> None:
    """ValueError if the model can't be divided equally."""
    tp = TensorParallel(size=num_ranks)
    tp.shard_size("query heads", model.num_attention_heads)
    for_heads(tp, model.num_key_value_heads).shard_size("key-value heads", model.num_key_value_heads)
    if not model.moe or len(model.moe.layers) < model.num_hidden_layers:
        tp.shard_size("inner size of the feed-forward layers", model.intermediate_size)
    if model.moe and model.moe.expert_parallel:
        tp.shard_size("experts", model.moe.num_experts)
    elif model.moe:
        tp.shard_size("inner size of the experts", model.moe.intermediate_size)
    if model.hybrid:
        model.hybrid.check_divides(tp)
    tp.shard_size("vocabulary", model.vocab_size)


def for_heads(tp: TensorParallel, num_kv_heads: int) -> TensorParallel:
    """How key-value heads are divided: if there are fewer heads than ranks, several ranks hold the same head."""
    if num_kv_heads >= tp.size:
        return tp
    if tp.size % num_kv_heads:
        raise ValueError(f"tensor_parallel_size={tp.size}: no multiple of the key-value heads ({num_kv_heads})")
    return TensorParallel(tp.rank * num_kv_heads // tp.size, num_kv_heads)
