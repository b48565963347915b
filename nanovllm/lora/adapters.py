"""Gives requests their adapters."""

from typing import TYPE_CHECKING, Any

from nanovllm.lora.lora_request import LoRARequest

if TYPE_CHECKING:
    from nanovllm.requests.input_processor import InputProcessor
    from nanovllm.requests.request import Request


def set_adapter(request: "Request", lora_request: Any, processor: "InputProcessor") -> None:
    """Give the sequences of a request an adapter, or none if `lora_request` is None.

    Raises TypeError for other types, ValueError without `enable_lora`, and the errors of `read_adapter`.
    """
    if lora_request is not None and not isinstance(lora_request, LoRARequest):
        raise TypeError(f"lora_request={lora_request!r:.80}: must be a LoRARequest or None")
    if not processor.config.enable_lora:
        raise ValueError(f"lora_request={lora_request!r:.80}: needs enable_lora=True when the engine is started")
    request.lora_request = lora_request
    if processor.adapters is None:
        return  # another process has the model, and computes the request
    adapter = None if lora_request is None else processor.adapters.get(lora_request)
    for seq in request.group:
        seq.feature_state["lora"] = adapter
        seq.cache_salt ^= 0 if adapter is None else adapter.salt
