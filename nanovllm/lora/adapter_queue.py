"""Assigns the device's adapter slots, and lets sequences wait until their adapter has a slot."""

from collections import OrderedDict
from collections.abc import Callable, Collection
from operator import attrgetter
from typing import TYPE_CHECKING

from nanovllm.engine.admission import WaitingQueue
from nanovllm.engine.sequence import Sequence
from nanovllm.lora.lora_request import Adapter, adapter_of

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler


class AdapterSlots:
    """Manages the adapters that are stored on the devices.

    If no slot is free, a new adapter replaces the least recently used adapter.
    """

    def __init__(self, num_slots: int, write: Callable[[int, Adapter], None]):
        """`write(slot, adapter)` stores an adapter on all ranks.

        Steps that are launched after the call can use the adapter.
        """
        self.num_slots, self._write = num_slots, write
        self._stored: OrderedDict[Adapter, None] = OrderedDict()  # the least recently used adapter is first
        self._free = [*reversed(range(num_slots))]

    def take(self, adapter: Adapter, in_use: Callable[[], Collection[Adapter | None]]) -> bool:
        """Make sure that `adapter` has a slot. Return False if every slot has an adapter that is in use."""
        if adapter.slot is None:
            if not self._free:
                used = in_use()
                if (leaving := next((other for other in self._stored if other not in used), None)) is None:
                    return False
                self._remove(leaving)
            slot = self._free[-1]
            self._write(slot, adapter)
            adapter.slot = self._free.pop()
        self._stored[adapter] = None
        self._stored.move_to_end(adapter)
        return True

    def clear(self) -> None:
        """Forget all adapters, because the devices have lost them."""
        for adapter in [*self._stored]:
            self._remove(adapter)

    def _remove(self, adapter: Adapter) -> None:
        del self._stored[adapter]
        assert adapter.slot is not None
        self._free.append(adapter.slot)
        adapter.slot = None


class AdapterQueue(WaitingQueue):
    """A waiting queue whose `next_ready` skips sequences that can't get a slot for their adapter.

    A slot is in use while a sequence with the slot's adapter runs. While a sequence waits for a slot, later sequences
    may overtake it. At most `max_num_seqs` of the overtaking sequences may use adapters, so a slot eventually becomes
    free. An overtaking sequence counts if it still runs when `next_ready` is called again. If an overtaking sequence
    has ended when `next_ready` is called again, the sequence's slot is free.
    """

    def __init__(self, scheduler: "Scheduler", slots: AdapterSlots):
        super().__init__()
        self._scheduler, self._slots = scheduler, slots
        self._by_adapter: dict[Adapter | None, WaitingQueue] = {}
        self._blocked: Sequence | None = None  # the first sequence that can't get a slot
        self._overtaking: set[tuple[int, int]] = set()  # by key: a preempted sequence may overtake again

    def push(self, seq: Sequence) -> None:
        super().push(seq)
        self._by_adapter.setdefault(adapter_of(seq), WaitingQueue()).push(seq)

    def discard(self, seq: Sequence) -> None:
        super().discard(seq)
        if queue := self._by_adapter.get(adapter := adapter_of(seq)):
            queue.discard(seq)
            if not queue:
                del self._by_adapter[adapter]

    def next_ready(self) -> Sequence | None:
        """Store the adapter of the first sequence that can get a slot, and return the sequence."""
        blocked: Sequence | None = None
        firsts = [queue[0] for queue in self._by_adapter.values()]
        for seq in sorted(firsts, key=attrgetter("order")):
            adapter = adapter_of(seq)
            if adapter is None:
                return seq
            may_overtake = blocked is None or len(self._overtaking) < self._scheduler.max_num_seqs
            if may_overtake and self._slots.take(adapter, self._in_use):
                return seq
            if blocked is None:
                blocked = seq
                if blocked is not self._blocked:
                    self._blocked, self._overtaking = blocked, set()
                later = (other for other in self._holding() if other.order > blocked.order)
                self._overtaking.update(other.key for other in later if adapter_of(other) is not None)
        return None

    def _in_use(self) -> set[Adapter | None]:
        return {adapter_of(seq) for seq in self._holding()}

    def _holding(self) -> list[Sequence]:
        """Return the running sequences, whose adapters are in use."""
        return [*self._scheduler.running.values(), *self._scheduler.prefilling.values()]
