"""Reads the format AWQ (arXiv:2306.00978): 4-bit integers with zero points, packed along the outputs of a layer.

A 32-bit word contains the 4-bit codes of outputs 0, 2, 4, 6, 1, 3, 5, 7, low bits first.
"""

import re
from pathlib import Path

import torch

from nanovllm.quantization.packed import PackedScheme, nibbles
from nanovllm.quantization.quant_config import ALL, QuantConfig, check_unread, read_patterns
from nanovllm.utils.checks import check_choice

GROUP_SIZES = 32, 64, 128, -1
# entries of GPTQModel, which writes this format and GPTQ
UNREAD = {"pack_dtype": ("int32", "torch.int32"), "adapter": (), "rotation": (), "lm_head": ()}


def read_config(raw: dict, file: Path) -> QuantConfig:
    where = f"{file}: quantization_config"
    check_unread(where, raw, UNREAD | {"dynamic": ()})
    if raw.get("backend") == "llm-awq":  # other backends are kernels, this one packs weights in another way
        raise ValueError(f"{where}: backend='llm-awq': is not supported")
    for name in "version", "format", "checkpoint_format":  # of AutoAWQ, of transformers 5, and of GPTQModel
        check_choice(f"{where}: {name}", str(raw.get(name) or "gemm").lower(), ("gemm",))
    check_choice(f"{where}: bits", raw.get("bits", raw.get("w_bit")), (4,))
    check_choice(f"{where}: zero_point", raw.get("zero_point", True), (True,))
    group = check_choice(f"{where}: group_size", raw.get("group_size", raw.get("q_group_size")), GROUP_SIZES)
    tensors = (
        ("qweight", "words", codes_of_outputs),
        ("qzeros", "zeros", codes_of_outputs),
        ("scales", "scales", torch.t),
    )
    scheme = PackedScheme("int4", None if group == -1 else group, tensors)
    # each entry skips every module whose name contains the entry
    names = read_patterns(f"{where}: modules_to_not_convert", raw.get("modules_to_not_convert"))
    ignore = tuple(f"re:.*{re.escape(name)}" for name in names)
    return QuantConfig("awq", (((ALL,), scheme),), ignore, ("I32",))


def codes_of_outputs(packed: torch.Tensor) -> torch.Tensor:
    """Unpack words [K, N / 8] to codes [N, K]."""
    return nibbles(packed).unflatten(1, (-1, 2, 4)).transpose(2, 3).flatten(1).t()
