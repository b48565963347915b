"""Reads MXFP4 as gpt-oss stores it: e2m1 values, and a power of two as the scale of each group of 32 inputs.

One tensor contains all experts of a layer. Other layers are not quantized.
"""

import re
from pathlib import Path

import torch

from nanovllm.quantization.packed import PackedScheme, nibbles
from nanovllm.quantization.quant_config import QuantConfig, read_patterns

E8M0 = torch.float8_e8m0fnu
EXPERTS = r"re:.*\.experts\."


def read_config(raw: dict, file: Path) -> QuantConfig:
    tensors = ("blocks", "words", codes_of_blocks), ("scales", "scales", e8m0)
    scheme = PackedScheme("e2m1", 32, tensors, E8M0)
    where = f"{file}: quantization_config: modules_to_not_convert"
    names = read_patterns(where, raw.get("modules_to_not_convert"))  # with "*" for any text
    ignore = tuple("re:" + re.escape(name).replace(r"\*", ".*") for name in names)
    return QuantConfig("mxfp4", (((EXPERTS,), scheme),), ignore, ("U8",))


def codes_of_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """Unpack blocks [N, K / 32, 16] to codes [N, K]."""
    return nibbles(blocks).flatten(1)


def e8m0(exponents: torch.Tensor) -> torch.Tensor:
    if exponents.element_size() > 1:
        raise ValueError(f"the checkpoint has dtype {str(exponents.dtype)[6:]}, scales must be exponents of 8 bits")
    return exponents.view(E8M0)
