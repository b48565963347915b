"""Holds the adapters of an engine in host memory."""

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from nanovllm.lora.adapter_files import read_adapter
from nanovllm.lora.expert_files import ExpertsShape
from nanovllm.lora.lora_request import Adapter, LoRARequest

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.lora.adapter_queue import AdapterSlots


class AdapterRegistry:
    """Holds the adapters in host memory. Any thread may call the methods of this class.

    An adapter stays in memory from `add` until `remove`, and also while a request uses the adapter or a device stores
    it.
    """

    def __init__(
        self,
        config: "Config",
        shapes: Mapping[str, tuple[int, int]],
        experts: Mapping[str, ExpertsShape],
        slots: "AdapterSlots",
    ):
        """shapes: (inputs, outputs) of each linear layer that can have an adapter, by name in the checkpoint.

        experts: the mixtures of experts, by name.
        slots: the adapters on the devices.
        """
        self._config, self.shapes, self.experts, self.slots = config, shapes, experts, slots
        self._loaded: WeakValueDictionary[int, Adapter] = WeakValueDictionary()  # by `lora_int_id`, as in `_added`
        self._added: dict[int, Adapter] = {}
        self._lock = threading.Lock()  # so that two threads do not read the same adapter

    def get(self, request: LoRARequest) -> Adapter:
        """Return an adapter. If the adapter is not in memory, read the adapter's files.

        Raises ValueError if another adapter in memory has the same `lora_int_id`. Raises the errors of `read_adapter`.
        """
        number = request.lora_int_id
        if (adapter := self._loaded.get(number)) is None:  # without waiting for other reads
            with self._lock:
                if (adapter := self._loaded.get(number)) is None:
                    adapter = self._loaded[number] = read_adapter(request, self._config, self.shapes, self.experts)
        if adapter.request != request:
            known, wrong = (f"{x.lora_name!r:.80} ({x.lora_path!r:.200})" for x in (adapter.request, request))
            advice = f"use another number, or call remove_lora({number}) first"
            raise ValueError(f"lora_int_id={number}: is the number of {known}, not of {wrong}: {advice}")
        return adapter

    def add(self, request: LoRARequest) -> None:
        """Read an adapter, and keep it in memory until it is removed. Raises the errors of `get`."""
        if not isinstance(request, LoRARequest):
            raise TypeError(f"lora_request={request!r:.80}: must be a LoRARequest")
        self._added[request.lora_int_id] = self.get(request)

    def remove(self, lora_int_id: int) -> bool:
        """Forget an adapter, so that the next request with this `lora_int_id` reads files again.

        Unfinished requests keep the adapter until they end. Return False if no adapter in memory has this
        `lora_int_id`.
        """
        adapter = self._loaded.pop(lora_int_id, None)
        self._added.pop(lora_int_id, None)
        return adapter is not None
