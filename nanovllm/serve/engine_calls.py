"""Defines the server's calls to the engine, except for requests. The calls run in the engine's process."""

from bisect import bisect_left
from typing import Any

from nanovllm.engine.scheduled_step import ScheduledStep, StepResult
from nanovllm.engine.stats import stats_of
from nanovllm.llm import LLM
from nanovllm.lora.lora_request import LoRARequest
from nanovllm.serve.trace import StepRecorder

STEP_TOKENS = (1, 8, *(2**i for i in range(4, 15)))  # upper bounds of the histogram's buckets


class StepSizes:
    """Counts an engine's steps by size.

    The size of a step is the number of computed prompt tokens plus sampled tokens.
    """

    def __init__(self, engine: LLM):
        self.counts, self.total = [0] * (len(STEP_TOKENS) + 1), 0
        engine.core.on_step.append(self._count)

    def _count(self, step: ScheduledStep, result: StepResult) -> None:
        num_tokens = sum(step.chunk_lens) + len(step.sampled_seqs)
        self.counts[bisect_left(STEP_TOKENS, num_tokens)] += 1
        self.total += num_tokens


class EngineCalls:
    """The methods that `EngineClient.call` calls by name.

    The methods return plain data, which can be sent to another process.
    """

    def __init__(self, engine: LLM, sizes: StepSizes):
        self._engine, self._sizes = engine, sizes
        self._recorder = StepRecorder(engine)

    def stats(self) -> dict[str, Any]:
        sizes = self._sizes
        return stats_of(self._engine.scheduler) | {"step_sizes": {"counts": [*sizes.counts], "total": sizes.total}}

    def add_lora(self, name: str, number: int, path: str) -> str:
        """Call `LLM.add_lora`. Return an error message, or "" if the adapter can be used."""
        try:
            self._engine.add_lora(LoRARequest(name, number, path))
        except (ValueError, TypeError, OSError) as error:
            return str(error)
        return ""

    def remove_lora(self, number: int) -> None:
        self._engine.remove_lora(number)

    def start_recording(self) -> None:
        if not self._recorder.is_recording:
            self._recorder.start()

    def stop_recording(self) -> None:
        if self._recorder.is_recording:
            self._recorder.stop()

    def frames(self, last: int) -> tuple[str, int, bool, bool]:
        """Return the frames after frame number `last` (see frames.py) as JSON text, and the newest frame's number.

        Also return two flags: whether the recording continues, and whether the engine is idle.
        """
        recorder = self._recorder
        return *recorder.json_since(last), recorder.is_recording, recorder.is_idle

    def refresh_recording(self) -> None:
        self._recorder.refresh()
