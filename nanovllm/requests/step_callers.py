"""Supports callers that run the engine's loop themselves with `add_request` and `step`."""

import threading

from nanovllm.engine.collector import OutputCollector, StepOutput
from nanovllm.engine.engine_thread import EngineThread
from nanovllm.engine.outputs import OutputKind


class StepCallers:
    """Manages one collector for each thread that adds requests.

    A call of `step` returns the outputs of requests that the calling thread has added.
    """

    def __init__(self, engine_thread: EngineThread):
        self._engine_thread = engine_thread
        self.collectors: dict[threading.Thread, OutputCollector] = {}
        self._step_callers: set[threading.Thread] = set()  # threads in `collectors` that also call `step`

    def own_collector(self) -> OutputCollector:
        thread = threading.current_thread()
        if thread not in self.collectors:
            for known_thread, collector in [*self.collectors.items()]:
                if not known_thread.is_alive() and self._engine_thread.is_finished(collector):
                    self.collectors.pop(known_thread, None)
                    self._step_callers.discard(known_thread)
            # this collector never wants steps, because its caller asks for each step
            self.collectors[thread] = OutputCollector(OutputKind.TOKENS, max_steps_ahead=0)
        return self.collectors[thread]

    def step(self) -> StepOutput:
        """See `LLMEngine.step`."""
        if (thread := threading.current_thread()) in self.collectors:
            self._step_callers.add(thread)
        engine, collectors = self._engine_thread.engine, self._collectors_to_read()
        output, failure = StepOutput(), None

        def work() -> None:
            if not (engine.unavailable or any(collector.is_ready for collector in collectors)):
                engine.step()
                for collector in collectors:
                    collector.flush()

        try:
            self._engine_thread.check_may_wait()
            self._engine_thread.call(work)
            engine.check_available()
        except RuntimeError as error:
            failure = error  # earlier outputs are returned first
        for collector in collectors:
            collector.take_into(output)
        if not output.has_outputs:
            for collector in collectors:  # a failed step puts its error into every collector
                failure, collector.error = failure or collector.error, None
            if failure is not None:
                raise failure
        return output

    def is_finished(self) -> bool:
        return all(map(self._engine_thread.is_finished, self._collectors_to_read()))

    def _collectors_to_read(self) -> list[OutputCollector]:
        if (collector := self.collectors.get(threading.current_thread())) is not None:
            return [collector]
        return [
            collector
            for thread, collector in [*self.collectors.items()]
            if not (thread in self._step_callers and thread.is_alive())
        ]
