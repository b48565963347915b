"""Keys and values in FP8 (e4m3): half the bytes of a cache in bfloat16, so twice the tokens, read twice as fast.

The key and the value of a token and head have a scale each, computed from nothing but themselves when they are stored.
So there is no calibration, and what the cache holds for a token depends neither on its neighbours in a block, nor on
the chunks of a prompt, nor on the number of ranks. All attention reads it from there, that of the step which stores it
too: an answer is the same after a prefix hit, a preemption, or a copy of blocks.

A scale is a power of two, kept as its biased exponent (see `kernels/fp8.py`): a head of 128 takes 129 bytes, not 256.
"""

import torch

from nanovllm.layers.kv_cache import KVCache, chunk_size, gather_chunks

MIN_EXPONENT, MAX_EXPONENT = 95, 158  # of scales, biased by 127: as in kernels/fp8.py


class FP8KVCache(KVCache):
    """The keys and values of one layer in e4m3, `torch.float8_e4m3fn` or its bits as uint8, as the kernels take them.

    `scales` are the biased exponents of keys and of values, [blocks, kv_heads, block_size] uint8 each: those of a head
    are adjacent, since a program of a kernel reads the tokens of one head.
    """

    def __init__(self, data: torch.Tensor, scales: torch.Tensor):
        converts_e4m3 = data.is_cuda and torch.cuda.get_device_capability(data.device) >= (8, 9)
        super().__init__(data.view(torch.float8_e4m3fn) if converts_e4m3 else data)
        self.scales = scales[0], scales[1]

    @staticmethod
    def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Both as uint8: PyTorch can't copy rows of float8 on every device."""
        *_, block_size, kv_heads, _ = shape
        shapes = shape, (*shape[:3], kv_heads, block_size)
        return tuple(torch.empty(shape, dtype=torch.uint8, device="meta") for shape in shapes)

    def store(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        blocks, offsets = slots // self.k.shape[1], slots % self.k.shape[1]
        for cache, scales, data, exponents in zip((self.k, self.v), self.scales, *quantize(torch.stack((k, v)))):
            cache.view(torch.uint8).flatten(0, 1).index_copy_(0, slots, data)
            scales[blocks, :, offsets] = exponents

    def gather(self, chunks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        size = chunk_size(self.k.shape[1])
        chunks_per_block = self.k.shape[1] // size
        blocks, parts = chunks // chunks_per_block, chunks % chunks_per_block

        def read(cache: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            data = gather_chunks(cache.view(torch.uint8), chunks)
            exponents = scales.unflatten(2, (chunks_per_block, size))[blocks, :, parts]  # [B, chunks, kv_heads, size]
            return dequantize(data, exponents.transpose(2, 3).flatten(1, 2)).to(dtype)

        return read(self.k, self.scales[0]), read(self.v, self.scales[1])


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., head_dim] -> bits of e4m3 of the same shape, and the biased exponents of its scales [...]; both uint8.

    A scale is the least power of two, within bounds, that brings its row to at most 448, the largest number in e4m3.
    Its exponent is 255 if the row has NaN or infinity.
    """
    x = x.float()
    largest = (x.view(torch.int32) & 0x7FFFFFFF).amax(-1)  # order as the magnitudes, and NaN is above them
    # 448 is 1.75 * 2**8, and the sum carries into the exponent above a mantissa of 1.75
    exponents = (((largest + 0x1FFFFF) >> 23) - 8).clamp_(MIN_EXPONENT, MAX_EXPONENT)
    scaled = (x * _power_of_two(254 - exponents).unsqueeze(-1)).clamp_(-448, 448)
    exponents = exponents.masked_fill_(largest >= 0x7F800000, 255)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), exponents.to(torch.uint8)


def dequantize(data: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """What `quantize` has made [..., head_dim] and [...] -> [..., head_dim] float32, exact in the dtype it came from.

    A row with NaN or infinity has only these.
    """
    # A float16 with these bits has an exponent that is 8 too small. PyTorch converts float8 one number at a time.
    bits = data.view(torch.int8).short().bitwise_left_shift_(7).bitwise_and_(-0x4080)
    return bits.view(torch.float16).float().mul_(_power_of_two(exponents.int()).mul_(256).unsqueeze(-1))


def _power_of_two(biased_exponents: torch.Tensor) -> torch.Tensor:
    return (biased_exponents << 23).view(torch.float32)
