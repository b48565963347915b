"""The kernels by name; importing this needs Triton."""
from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.decode_attention import decode_attention, suits_decode_qkv
from nanovllm.kernels.embedding import embed_range
from nanovllm.kernels.few_row_linear import few_row_linear, few_row_parts
from nanovllm.kernels.filters import logit_cutoffs
from nanovllm.kernels.host_memory import deliver, fetch
from nanovllm.kernels.layernorm import rms_norm
from nanovllm.kernels.norm_rope_store import norm_rope_store
from nanovllm.kernels.one_row_linear import one_row_linear
from nanovllm.kernels.peers import gather_columns, max_of_ranks, sum_rms_norm
from nanovllm.kernels.penalties import penalize
from nanovllm.kernels.prefill_attention import prefill_attention
from nanovllm.kernels.sampling import sample
