"""The engine loop: schedules a step, launches it, and processes the result of that step or of the previous step."""

from collections.abc import Callable
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.awaiting import wait_for_one
from nanovllm.engine.forward_output import PendingStep
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.output_processor import OutputProcessor
from nanovllm.engine.scheduled_step import ScheduledStep, StepResult
from nanovllm.engine.scheduler import Scheduler
from nanovllm.utils.context import reset_context
from nanovllm.utils.tensor_parallel import TensorParallel

CLOSED = "this engine was closed by exit()"


class UnavailableError(RuntimeError):
    """Raised for a call that the engine refuses while it is paused, asleep, loading weights, or busy with requests."""


class Engine:
    """Owns the scheduler, model runner, ranks and output processor. An `EngineThread` runs the engine's steps."""

    model_runner: ModelRunner | None = None  # None before the model is loaded, and after `exit`
    scheduler: Scheduler
    output_processor: OutputProcessor
    adapters: Any = None  # an AdapterRegistry of lora/, with `enable_lora`

    def __init__(self, config: Config, workers: Any):
        """Store `workers`, the other ranks. `build.py` sets the model runner, scheduler and output processor."""
        self.config, self.workers = config, workers
        # viewers' hooks, called after each step; an error in a hook fails the step
        self.on_step: list[Callable[[ScheduledStep, StepResult], None]] = []
        self.on_exit: list[Callable[[], None]] = []  # called before the engine exits, to save blocks
        self._in_flight: PendingStep | None = None
        self.unavailable: dict[str, str] = {}  # reasons not to run steps or accept requests: see rollout/

    def step(self) -> None:
        """Launch the next step, and process its result or, with `async_scheduling`, the previous step's."""
        if self.scheduler.held:
            self.output_processor.release_held()
        # prompts come first if one `generate` has the engine to itself: it returns all answers together
        scheduled = self.scheduler.schedule(prompts_first=self.output_processor.serves_one_batch)
        launched = self.workers.launch(self.model_runner, scheduled) if scheduled else None
        due = launched  # the step whose result is processed now
        if self.config.async_scheduling:
            due, self._in_flight = self._in_flight, launched
        if due:
            step, result = due.step, due.wait()
            changed = self.scheduler.postprocess(step, result)
            self.output_processor.process(step, result, changed)
            for hook in [*self.on_step]:
                hook(step, result)
        if self.scheduler.held and not (launched or due):
            wait_for_one(self.scheduler)

    def check_open(self) -> None:
        if self.model_runner is None:
            raise RuntimeError(CLOSED)
        self.workers.check()

    def check_available(self) -> None:
        if reasons := [*self.unavailable.values()]:
            raise UnavailableError(reasons[0])

    def drop_requests(self) -> None:
        """Drop all requests and reset the state, because the engine exits or a step has failed."""
        reset_context()
        if self.model_runner is not None:
            self.model_runner.recover()  # queued steps still read the host's buffers
        self._in_flight = None
        self.output_processor.reset()

    def close_after(self, error: BaseException) -> None:
        """Close the engine. If another rank's failure caused `error`, raise that failure."""
        cause = self.workers.cause_of(error)
        has_runner = self.model_runner is not None
        self.exit()
        if not has_runner:  # otherwise, the runner's `exit` has closed it
            self.workers.tp.close()
        if cause is not error:
            raise cause from error

    def exit(self) -> None:
        self.workers.exit()
        if self.model_runner is not None:
            self.model_runner.exit()
            self.model_runner = None


class SingleRank:
    """Replaces `distributed.worker.Workers` when this process is the only rank."""

    tp, processes, supervisor = TensorParallel(), (), None

    def connect(self) -> TensorParallel:
        return self.tp

    def wait_until_started(self) -> None: ...

    def check(self) -> None: ...

    def launch(self, runner: ModelRunner, step: ScheduledStep) -> PendingStep:
        return runner.run(step)

    def cause_of(self, error: BaseException) -> BaseException:
        return error

    def exit(self) -> None:
        """Do nothing: there is no other process."""
