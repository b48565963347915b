"""Computes a gated activation within a kernel, after a matmul."""

import triton
import triton.language as tl


@triton.jit
def activate(gate, up, ACT: tl.constexpr):
    """Compute `ACT`, an Activation of kernels/activations.py, or SwiGLU if `ACT` is None. NaN stays NaN."""
    x = gate
    if ACT is not None:
        if ACT.limit != 0.0:
            gate = tl.where(gate > ACT.limit, ACT.limit, gate)
            up = tl.where(up > ACT.limit, ACT.limit, tl.where(up < -ACT.limit, -ACT.limit, up))
            x = gate
        if ACT.cubic != 0.0:
            x = gate + ACT.cubic * gate * gate * gate
        if ACT.alpha != 1.0:
            x = ACT.alpha * x
        if ACT.shift != 0.0:
            up = up + ACT.shift
    return gate / (1.0 + tl.exp(-x)) * up
