"""Defines LoRARequest, which names an adapter, and Adapter, which holds an adapter's weights in host memory."""

from dataclasses import dataclass, field
from typing import Any

from nanovllm.utils.checks import check_int, check_unicode


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Names an adapter. The fields are those of vLLM's LoRARequest.

    lora_name: a name that people can read.
    lora_int_id: a number that identifies the adapter. If the adapter's files change, use a new number, or call
        `LLM.remove_lora` first.
    lora_path: the folder in which PEFT has saved the adapter, or "tiny-qwen3-descending", the adapter in this package.

    Raises TypeError if a field has another type, or if a name or path is empty. Raises ValueError if `lora_int_id` is
    below 1, or if a string contains a lone surrogate.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        check_int("lora_int_id", self.lora_int_id, low=1, high=2**62)
        for name in ("lora_name", "lora_path"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise TypeError(f"{name}={value!r:.80}: must be a string with at least 1 character")
            check_unicode(name, value)


@dataclass(eq=False)
class Adapter:
    """Holds the weights of an adapter in host memory. New requests with the same `lora_int_id` share one Adapter.

    ranks: the rank of each module in `AdapterStacks.targets`. 0 means that the adapter does not change the module.
    weights: a flat tensor. For each changed module, `weights` contains A [rank, inputs] and then B [outputs, rank]. B
        includes the scale of the adapter. For a projection of experts, A and B contain the matrices of all experts.
    salt: a 64-bit hash of the ranks and weights, so that different adapters don't share cached prefixes.
    slot: the slot in which the devices store the adapter, or None.
    """

    request: LoRARequest
    ranks: list[int]
    weights: Any
    salt: int
    slot: int | None = field(default=None)

    def __deepcopy__(self, memo: dict) -> "Adapter":
        return self  # forks of a sequence share the adapter


def adapter_of(seq: Any) -> Adapter | None:
    return seq.feature_state.get("lora")
