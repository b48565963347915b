"""Tells the device which adapter slot each request uses."""

from typing import TYPE_CHECKING

import numpy as np

from nanovllm.engine.features import Arrays, StepFeature
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence
from nanovllm.lora.lora_request import adapter_of

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.model_runner import ModelRunner

NO_SLOT = -1


class RequestAdapters(StepFeature):
    """Writes the slots of newly admitted sequences to `AdapterStacks.slots_of_requests`.

    If `enable_lora` is set, every sequence has this feature. Each new sequence overwrites the slot that an earlier
    sequence with the same request index has left. The state of this feature for a sequence is the sequence's Adapter,
    or None.
    """

    @classmethod
    def prepare(cls, step: ScheduledStep) -> Arrays | None:
        if not (seqs := step.prompt_seqs):
            return None
        slots = [NO_SLOT if (adapter := adapter_of(seq)) is None else adapter.slot for seq in seqs]
        return {"req_indices": np.array([seq.req_index for seq in seqs], np.int32), "slots": np.array(slots, np.int32)}

    @classmethod
    def max_words(cls, config: "Config") -> int:
        return 2 * (config.max_num_seqs + 4) if config.enable_lora else 0

    @classmethod
    def forget(cls, seq: Sequence) -> None:
        """Release the adapter now, because the ended sequence stays in memory until garbage is collected."""
        seq.feature_state["lora"] = None

    def __init__(self, runner: "ModelRunner"):
        self.stacks = getattr(runner.model, "adapters", None)

    def upload(self, arrays: Arrays) -> None:
        if self.stacks is not None:
            self.stacks.slots_of_requests[arrays["req_indices"].long()] = arrays["slots"]
