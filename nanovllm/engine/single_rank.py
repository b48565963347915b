"""Replaces `distributed/` when there is only one rank."""

from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.step_result import PendingStep
from nanovllm.utils.tensor_parallel import TensorParallel


class SingleRank:
    """The interface of `distributed.worker.Workers` for one rank, which is this process."""

    def __init__(self):
        self.tp = TensorParallel()
        self.processes = ()

    def connect(self) -> TensorParallel:
        return self.tp

    def wait_until_started(self) -> None:
        pass

    def check(self) -> None:
        pass

    def launch(self, runner: ModelRunner, step: ScheduledStep) -> PendingStep:
        return runner.run(step)

    def cause_of(self, error: BaseException) -> BaseException:
        return error

    def exit(self) -> None:
        pass
