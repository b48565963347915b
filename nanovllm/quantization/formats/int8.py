"""Implements `quantization="int8"`: weights become 8-bit integers. Each output of a layer has a scale.

Activations are not quantized. This module is a good template for a new format, because loaders and kernels support any
8-bit values with scales.
"""

import torch

from nanovllm.quantization.quant_config import ALL, QuantConfig
from nanovllm.quantization.scaled import QuantScheme

MAX_INT8 = 127.0


def config_on_load() -> QuantConfig:
    return QuantConfig("int8", (((ALL,), QuantScheme(torch.int8, MAX_INT8, 1, None)),))
