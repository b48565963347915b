"""Implements `quantization="int8"`: weights are 8-bit integers with a scale per output.

Activations are not quantized. This module shows how to add a format: the loaders in scaled.py and the kernels work for
any 8-bit values with scales.
"""

import torch

from nanovllm.quantization.quant_config import ALL, QuantConfig
from nanovllm.quantization.scaled import QuantScheme

MAX_INT8 = 127.0


def config_on_load() -> QuantConfig:
    return QuantConfig("int8", (((ALL,), QuantScheme(torch.int8, MAX_INT8, 1, None)),))
