"""Implements `quantization="int4"`: weights become 4-bit integers.

Each group of inputs (usually 128) has a scale and a zero point.
"""

from nanovllm.quantization.packed import PackedScheme
from nanovllm.quantization.quant_config import ALL, QuantConfig


def config_on_load() -> QuantConfig:
    return QuantConfig("int4", (((ALL,), PackedScheme("int4", 128)),))
