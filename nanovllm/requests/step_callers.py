"""Callers that run the loop themselves, by `add_request` and `step`: each thread gets its own outputs."""

import threading

from nanovllm.engine.engine_thread import EngineThread
from nanovllm.engine.outputs import OutputCollector, OutputKind, StepOutput


class StepCallers:
    """The collectors of the threads that call `LLMEngine.add_request`, whose outputs `LLMEngine.step` returns."""

    def __init__(self, engine_thread: EngineThread):
        self._engine_thread = engine_thread
        self.collectors: dict[threading.Thread, OutputCollector] = {}
        self._step_callers: set[threading.Thread] = set()  # those of these threads that call `step` too

    def own_collector(self) -> OutputCollector:
        """The collector of the requests that this thread adds."""
        thread = threading.current_thread()
        if thread not in self.collectors:
            for other, collector in [*self.collectors.items()]:
                if not other.is_alive() and self._engine_thread.is_finished(collector):
                    self.collectors.pop(other, None)
                    self._step_callers.discard(other)
            # it never wants steps: its caller asks for each
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
            failure = error  # what came before it is returned first
        for collector in collectors:
            collector.take_into(output)
        if not output.has_outputs:
            for collector in collectors:  # an error of one step may be in several
                failure, collector.error = failure or collector.error, None
            if failure is not None:
                raise failure
        return output

    def is_finished(self) -> bool:
        """Whether `step` has nothing more to return to this thread."""
        return all(map(self._engine_thread.is_finished, self._collectors_to_read()))

    def _collectors_to_read(self) -> list[OutputCollector]:
        """The collectors whose outputs `step` returns to this thread."""
        if (own := self.collectors.get(threading.current_thread())) is not None:
            return [own]
        return [
            collector
            for thread, collector in [*self.collectors.items()]
            if not (thread in self._step_callers and thread.is_alive())
        ]
