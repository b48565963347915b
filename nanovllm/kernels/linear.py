"""y = x W^T + b for small batches, by the kernel that is fastest for them."""

import torch

from nanovllm.kernels.gemv import gemv
from nanovllm.kernels.split_k_gemm import choose_split_k, split_k_gemm


def small_batch_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    split_k: int,
    out: torch.Tensor | None,
) -> torch.Tensor | None:
    """`layers.linear.linear`; None where the library is faster, or where only the library adds a bias."""
    if len(x) == 1:
        return gemv(x, weight, bias=bias, out=None if out is None else out[0])[0]
    if bias is not None:
        return None
    if split_k > 1:
        return split_k_gemm(x, weight, split_k, out)
    if choose_split_k(x, weight, 1):
        return split_k_gemm(x, weight, 1, out)[0]
    return None
