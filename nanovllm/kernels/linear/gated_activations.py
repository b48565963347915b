"""Kernels for gated activations (with or without the preceding matmul) and for sigmoid gates."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activations import GELU_AND_MUL, SWIGLU, Activation
from nanovllm.kernels.launch.dependent_launch import dependent_kernel, gdc_launch_and_wait, launch
from nanovllm.kernels.launch.gpu_features import has_hopper_kernels, num_sms
from nanovllm.kernels.linear.quantize_rows import Groups, store_rows

MIN_ROWS = 512  # for a fused matmul and activation


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    return gated_activation(x, SWIGLU)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    return gated_activation(x, GELU_AND_MUL)


def gated_activation(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the activation [T, n] of x [T, 2 * n]. The first half of x contains the gates.

    Return NotImplemented if x does not have two dimensions, or if the activation shifts or limits its operands.
    """
    if x.dim() != 2 or activation.shift or activation.limit:
        return NotImplemented
    n = x.shape[1] // 2
    out, block = torch.empty((len(x), n), dtype=x.dtype, device=x.device), min(2048, 1 << (n - 1).bit_length())
    store_rows(x, (out, None), 0, Groups(n, block, 1, block), activation, num_warps=8)
    return out


def gated_linear(x: torch.Tensor, weight: torch.Tensor, act: Activation) -> torch.Tensor:
    """Compute `gated_activation` of x W^T in one kernel. For x [T, K] and W [N, K], return [T, N / 2].

    The results are rounded as if separate kernels computed them. Return `NotImplemented` if no kernel supports the
    operands, or if the tiles would leave many multiprocessors idle.
    """
    n, k = weight.shape
    if (
        act not in (SWIGLU, GELU_AND_MUL)
        or len(x) < MIN_ROWS
        or x.dtype == torch.float32
        or n % 256
        or k % 8
        or not has_hopper_kernels()
    ):
        return NotImplemented
    num_tiles, sms = triton.cdiv(len(x), 128) * (n // 256), num_sms(weight.device)
    if num_tiles <= 0.9 * triton.cdiv(num_tiles, sms) * sms:
        return NotImplemented
    from nanovllm.kernels.hopper import hopper_gated  # it needs Gluon of Triton 3.6

    return hopper_gated.gated_linear(x, weight, act)


@dependent_kernel()
@triton.jit
def _sigmoid_gate_kernel(
    x_ptr, gate_ptr, out_ptr, gate_stride, n, IS_ONE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    # A program computes BLOCK elements of a row.
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + (0 * col if IS_ONE else col), col < n, 0.0).to(tl.float32)
    x = tl.load(x_ptr + row * n + col, col < n, 0.0).to(tl.float32)
    tl.store(out_ptr + row * n + col, x / (1.0 + tl.exp(-gate)), col < n)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return x [T, n] times the sigmoid of `gate`, which is [T, n] or [T, 1]. x is contiguous."""
    (num_rows, n), out = x.shape, torch.empty_like(x)
    if num_rows:
        block = min(2048, 1 << (n - 1).bit_length())
        launch(_sigmoid_gate_kernel, (num_rows, -(-n // block)), x.device)(
            x, gate, out, gate.stride(0), n, IS_ONE=gate.shape[1] == 1, BLOCK=block, num_warps=8
        )
    return out
