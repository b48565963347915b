"""The kernels by name; importing this needs Triton."""
from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.decode_attention import decode_attention
from nanovllm.kernels.kv_cache import store_kvcache
from nanovllm.kernels.layernorm import rms_norm
from nanovllm.kernels.prefill_attention import prefill_attention
from nanovllm.kernels.rotary import rotate
from nanovllm.kernels.sampling import sample

__all__ = ["decode_attention", "prefill_attention", "rms_norm", "rotate", "sample", "silu_and_mul", "store_kvcache"]
