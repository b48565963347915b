"""Gives requests their adapters."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.lora.lora_request import LoRARequest

if TYPE_CHECKING:
    from nanovllm.requests.input_processor import InputProcessor
    from nanovllm.requests.request import Request


def set_adapters(requests: Sequence["Request"], lora_request: Any, processor: "InputProcessor") -> None:
    """If a request has an adapter, give the adapter to the request's sequences.

    `lora_request` is one LoRARequest or None for all requests, or a list with one element for each request. Raises
    TypeError for values of other types. Raises ValueError if a list has a wrong length, or if an adapter is given
    without `enable_lora`. Raises the errors of `AdapterRegistry.get`.
    """
    found = lora_request if isinstance(lora_request, (list, tuple)) else [lora_request] * len(requests)
    if len(found) != len(requests):
        raise ValueError(f"lora_request: has {len(found)} adapters for {len(requests)} prompts: pass one for each")
    for request, own in zip(requests, found):
        if own is not None and not isinstance(own, LoRARequest):
            raise TypeError(f"lora_request={own!r:.80}: must be a LoRARequest or None")
        if own is not None and not processor.config.enable_lora:
            raise ValueError(f"lora_request={own!r:.80}: needs enable_lora=True when the engine is started")
        request.lora_request = own
        if (known := processor.helpers.get("adapters")) is not None:  # otherwise another process has the model
            adapter = None if own is None else known.get(own)
            for seq in request.group:
                seq.feature_state["lora"] = adapter
                seq.cache_salt ^= 0 if adapter is None else adapter.salt
