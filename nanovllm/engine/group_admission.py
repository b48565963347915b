"""When a full engine admits the next sequences."""

MAX_STEPS_WITHOUT_ADMISSION = 32


class GroupAdmission:
    """Admission with hysteresis: once the engine is full, sequences are admitted in groups.

    A mixed step for each sequence that ends would hold up all others. So the first sequence that does not fit pauses
    admission until a sixteenth of the running ones have ended, or for MAX_STEPS_WITHOUT_ADMISSION steps.
    """

    def __init__(self) -> None:
        self._max_running: int | None = None  # admission is paused while more than this run
        self._num_steps = 0  # since the pause began

    def may_admit(self, num_running: int) -> bool:
        """Called once in each step with sequences that wait."""
        if self._max_running is None or num_running <= self._max_running:
            return True
        self._num_steps += 1
        return self._num_steps > MAX_STEPS_WITHOUT_ADMISSION

    def pause(self, num_running: int) -> None:
        """A sequence did not fit."""
        self._max_running, self._num_steps = max(0, num_running - max(1, num_running // 16)), 0

    def resume(self) -> None:
        """A sequence was admitted, or none waits any more."""
        self._max_running, self._num_steps = None, 0
