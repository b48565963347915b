"""Defines an output collector.

No thread has to wait for outputs, because the engine's thread calls functions that take the outputs.
"""

from collections.abc import Callable

from nanovllm.engine.collector import OutputCollector
from nanovllm.engine.outputs import OutputKind


class NotifyingCollector(OutputCollector):
    """Calls `on_output` for new output, and `on_failure` when the engine fails."""

    def __init__(self, kind: OutputKind, on_output: Callable[[], None], on_failure: Callable[[RuntimeError], None]):
        super().__init__(kind)
        self._on_output, self._on_failure = on_output, on_failure

    def put(self) -> None:
        self.new.new_tokens.clear()  # nobody takes the tokens that OutputKind.TOKENS records
        super().put()

    def flush(self) -> None:
        super().flush()
        self._on_output()

    def fail(self, error: RuntimeError) -> None:
        super().fail(error)
        self._on_failure(error)
