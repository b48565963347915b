"""The least time that the hardware needs for a workload."""

from nanovllm.benchmarks.requests import Request
from nanovllm.config import Config


def measured_rates(device: str) -> tuple[float, float]:
    """Memory bandwidth in bytes read per second, and operations per second of a bf16 matrix product."""
    import torch

    def seconds(function) -> float:
        times = []
        for _ in range(8):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        return min(times)

    size = 8192
    torch.cuda.set_device(torch.device(device).index or 0)
    large = torch.ones(2**31 // 4, device="cuda")
    square = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    return large.nbytes / seconds(large.sum), 2 * size**3 / seconds(lambda: square @ square)


def limit_seconds(requests: list[Request], config: Config, bytes_per_s: float, operations_per_s: float) -> float:
    """The least time for the requests: operations of the prefill, plus bytes that the decode steps must read.

    An engine that runs prefill and decode in the same step could overlap the two, and be faster than this. Of a mixture
    of experts, a step reads as many as its tokens choose on average if each expert is as likely.
    """
    shape = config.model_config
    heads, kv_heads, head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    all_layer_weights = shape.layer_operations // 2 * shape.num_hidden_layers  # each is multiplied and added
    head_weights = shape.hidden_size * shape.vocab_size
    head_bytes = head_dim + 2 if config.kv_cache_dtype == "fp8" else head_dim * config.dtype.itemsize  # 2 of a scale
    kv_bytes = 2 * shape.num_hidden_layers * kv_heads * head_bytes  # per token
    lengths = [(len(r.prompt), r.max_tokens) for r in requests]
    num_read = sum(sum(range(prompt + 1, prompt + tokens)) for prompt, tokens in lengths)
    num_decoded = sum(tokens - 1 for _, tokens in lengths)
    num_steps = max(max(tokens - 1 for _, tokens in lengths), -(-num_decoded // config.max_num_seqs))
    batch_size = num_decoded / max(1, num_steps)
    num_weights = all_layer_weights
    if moe := shape.moe:
        is_read = 1 - (1 - moe.top_k / moe.num_experts) ** batch_size
        num_more_experts = moe.num_experts * is_read - moe.top_k  # than a single token chooses
        expert_weights = 3 * shape.hidden_size * moe.intermediate_size * len(moe.layers)
        num_weights += max(0, num_more_experts) * expert_weights
    weight_bytes = num_weights * (1 if shape.quantization else config.dtype.itemsize)
    num_bytes = num_read * kv_bytes + num_steps * (weight_bytes + head_weights * config.dtype.itemsize)
    attention = sum(2 * prompt**2 * heads * head_dim * shape.num_hidden_layers for prompt, _ in lengths)
    # FP8 units multiply twice as fast
    speed_up = 2 if shape.quantization and shape.quantization.dtype.is_floating_point else 1
    linear = sum(2 * prompt * all_layer_weights / speed_up + 2 * head_weights for prompt, _ in lengths)
    return num_bytes / bytes_per_s + (linear + attention) / operations_per_s
