"""`quantization="int8"`: weights of 8-bit integers, a scale for each output; activations stay as they are.

It is the example of another format: kernels and loaders of scaled.py serve any 8-bit values with scales.
"""

import torch

from nanovllm.quantization.plan import ALL, Plan
from nanovllm.quantization.scaled import Scaling

MAX_INT8 = 127.0


def plan_on_load() -> Plan:
    return Plan("int8", (((ALL,), Scaling(torch.int8, MAX_INT8, 1, None)),))
