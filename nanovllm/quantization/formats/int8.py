"""Implements `quantization="int8"`: weights are 8-bit integers with a scale per output.

Activations are not quantized. To add a format, start from this module: loaders and kernels work for all 8-bit values
with scales.
"""

import torch

from nanovllm.quantization.quant_config import ALL, QuantConfig
from nanovllm.quantization.scaled import QuantScheme

MAX_INT8 = 127.0


def config_on_load() -> QuantConfig:
    return QuantConfig("int8", (((ALL,), QuantScheme(torch.int8, MAX_INT8, 1, None)),))
