"""`quantization="int8"`: weights of 8-bit integers, a scale for each output; activations stay as they are.

It is the example of another format: kernels and loaders of scaled.py serve any 8-bit values with scales.
"""

import torch

from nanovllm.quantization.quant_config import ALL, QuantConfig
from nanovllm.quantization.scaled import QuantScheme

MAX_INT8 = 127.0


def config_on_load() -> QuantConfig:
    return QuantConfig("int8", (((ALL,), QuantScheme(torch.int8, MAX_INT8, 1, None)),))
