"""A KV cache in FP8 (e4m3). An FP8 cache stores nearly twice as many tokens as a bfloat16 cache of the same size.

A token has one key and one value for each head, and each key and each value has its own scale. A scale depends only on
its key or value, so the cache needs no calibration. The scales of a token do not depend on other tokens, on how the
prompt is divided into chunks, or on the number of ranks. Attention always reads keys and values from the cache, even in
the step that stores them. Prefix hits, preemptions and copies of blocks therefore do not change an answer.

If the head dimension is 128, a key and its value take 260 bytes, including the scales (`kernels/e4m3.py`). In bfloat16,
a key and its value take 512 bytes.
"""

from math import prod

import torch

from nanovllm.cache.kv_cache import SPAN_SIZE, KVCache, gather_spans
from nanovllm.kernels.launch.gpu_features import has_fp8_units

MIN_SCALE = 2.0**-32  # as in kernels/e4m3.py


class FP8KVCache(KVCache):
    """Holds the keys and values of one layer in e4m3.

    The dtype of keys and values is `torch.float8_e4m3fn` on devices with FP8 units. On other devices, the dtype is
    uint8, with the same bits.

    `scales` is [blocks, kv_heads, block_size] int32. Each 32-bit word contains two bfloat16 scales, one for a key and
    one for its value, because kernels can load 32-bit words in advance. The words of a head are adjacent, because each
    program of a kernel reads the tokens of one head.
    """

    def __init__(self, data: torch.Tensor, *scales: torch.Tensor):
        """Use the tensor in `scales` whose size fits `data`.

        The other tensors in `scales` belong to layers of other shapes (cache/window_tables.py).
        """
        super().__init__(data.view(torch.float8_e4m3fn) if has_fp8_units(data.device) else data)
        shape = self.k.shape[0], self.k.shape[2], self.k.shape[1]
        self.scales = next(x.view(shape) for x in scales if x.numel() == prod(shape))

    @staticmethod
    def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return (values, scales). The values are uint8, because PyTorch can't copy rows of float8 on every device."""
        _, layers, blocks, block_size, kv_heads, _ = shape
        scales = torch.empty((1, layers, blocks, kv_heads, block_size), dtype=torch.int32, device="meta")
        return torch.empty(shape, dtype=torch.uint8, device="meta"), scales

    def store_kvcache(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        data, scales = quantize(torch.stack((k, v)))
        for cache, rows in zip((self.k, self.v), data):
            cache.view(torch.uint8).flatten(0, 1).index_copy_(0, slots, rows)
        pairs = torch.stack(tuple(scales), -1).view(torch.int32).squeeze(-1)  # [T, kv_heads]
        block_size = self.k.shape[1]
        self.scales[slots // block_size, :, slots % block_size] = pairs

    def gather(self, spans: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        spans_per_block = self.k.shape[1] // SPAN_SIZE
        pairs = self.scales.unflatten(2, (spans_per_block, SPAN_SIZE))
        pairs = pairs[spans // spans_per_block, :, spans % spans_per_block]  # [B, spans, kv_heads, SPAN_SIZE]
        pairs = pairs.transpose(2, 3).flatten(1, 2)  # [B, L, kv_heads]
        scales = pairs.unsqueeze(-1).view(torch.bfloat16).unbind(-1)
        data = (gather_spans(cache.view(torch.uint8), spans) for cache in (self.k, self.v))
        k, v = (dequantize(*pair).to(dtype) for pair in zip(data, scales))
        return k, v


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows x [..., head_dim] to e4m3. Return uint8 bits [..., head_dim] and bfloat16 scales [...].

    A scale is the row's largest magnitude divided by 448, the largest e4m3 value. If the row contains NaN or infinity,
    the scale is infinite.
    """
    x = x.float()
    largest = x.abs().amax(-1)
    scales = (largest * (1 / 448)).clamp_(min=MIN_SCALE).bfloat16().masked_fill_(~largest.isfinite(), torch.inf)
    scaled = (x * scales.float().reciprocal_().unsqueeze(-1)).clamp_(-448, 448)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales


def dequantize(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Invert `quantize`. Return float32 [..., head_dim].

    If the original row contained NaN or infinity, no number in the result's row is finite.
    """
    # Read as float16, these bits have an exponent that is 8 too small. PyTorch would convert one number at a time.
    bits = data.view(torch.int8).short().bitwise_left_shift_(7).bitwise_and_(-0x4080)
    return bits.view(torch.float16).float().mul_((scales.float() * 256).unsqueeze(-1))
