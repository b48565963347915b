"""The kernels by name; importing this needs Triton."""

from nanovllm.kernels import has_fp8_units
from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.decode_attention import decode_attention, decode_attention_of_qkv, fuses_qk_norm_rope
from nanovllm.kernels.dequantize import dequantize
from nanovllm.kernels.embedding import embed_range
from nanovllm.kernels.filters import logit_cutoffs
from nanovllm.kernels.gemv import gemv
from nanovllm.kernels.host_memory import deliver, fetch
from nanovllm.kernels.layernorm import rms_norm
from nanovllm.kernels.linear import small_batch_linear
from nanovllm.kernels.moe_gemm import moe_gemm, sum_local_parts
from nanovllm.kernels.moe_gemv import MAX_GEMV_TOKENS, moe_gemv
from nanovllm.kernels.moe_routing import route, router_logits
from nanovllm.kernels.norm_rope_store import norm_rope_store
from nanovllm.kernels.peers import gather_columns, max_of_ranks, sum_rms_norm
from nanovllm.kernels.penalties import penalize
from nanovllm.kernels.prefill_attention import prefill_attention, query_tile_size
from nanovllm.kernels.quantize_rows import quantize_rows, rms_norm_quantize, silu_and_mul_quantize
from nanovllm.kernels.request_tables import accept, place_decodes
from nanovllm.kernels.sampling import sample
from nanovllm.kernels.scaled_gemm import QuantizedRows, choose_scaled_split_k, scaled_gemm
from nanovllm.kernels.scaled_gemv import choose_gemv_split_k, scaled_gemv
from nanovllm.kernels.scaled_moe_gemm import scaled_moe_gemm
from nanovllm.kernels.scaled_moe_gemv import scaled_moe_gemv
from nanovllm.kernels.split_k_gemm import choose_split_k, split_k_gemm
