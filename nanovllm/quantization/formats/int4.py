"""Implements `quantization="int4"`: weights are rounded to 4-bit integers, with a scale and a zero point per group."""

from nanovllm.quantization.packed import PackedScheme
from nanovllm.quantization.quant_config import ALL, QuantConfig


def config_on_load() -> QuantConfig:
    return QuantConfig("int4", (((ALL,), PackedScheme("int4", 128)),))
