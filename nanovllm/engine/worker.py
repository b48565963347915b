"""The ranks but the first: their processes, what they do, and how all of it ends."""
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.batch import Batch, largest_batch
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sampled import LOGPROB_ROWS
from nanovllm.engine.sampled import SampledTokens
from nanovllm.engine.scheduler import ScheduledStep
from nanovllm.engine.step_channel import PLACES, STOP, StepChannel
from nanovllm.utils.distributed import STEP_TIMEOUT, TensorParallel
from nanovllm.utils.stopwatch import Stopwatch

START_TIMEOUT = 1800.0  # seconds for all ranks to load their weights and capture their graphs
GUARD = "the script runs again in every rank: start the engine under `if __name__ == '__main__':`"


class Workers:
    """The other ranks as rank 0, in the caller's process, sees them; none, where one rank is all.

    A thread watches over them. When one ends, reports an error or does not start in time, all are killed, rank 0's device
    is told not to wait for them, and `failure` says why. Without their caller they end by themselves.
    """

    def __init__(self, config: Config):
        """Start the processes; RuntimeError where this is itself a process that is about to become one."""
        self.config = config
        self.failure: str | None = None
        self.tp = TensorParallel()
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self._closing = True  # there is nothing to close
        if config.tensor_parallel_size == 1:
            return
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise RuntimeError(GUARD)
        context = multiprocessing.get_context("spawn")
        num_workers = config.tensor_parallel_size - 1
        self._deadline = monotonic() + START_TIMEOUT
        self._progress = [0] * num_workers  # 1: is here, 2: has started
        self.folder = Path(tempfile.mkdtemp(prefix="nanovllm-"))
        self._channel = StepChannel(context, largest_batch(config), num_workers)
        self._pipes = []
        self._closing = False
        self._watcher = threading.Thread(target=self._watch, name="nanovllm watch", daemon=True)
        try:
            for rank in range(1, num_workers + 1):
                ours, theirs = context.Pipe(duplex=False)
                self._pipes.append(ours)
                arguments = rank, os.getpid(), config, self.folder, self._channel, theirs
                process = context.Process(target=work, args=arguments, name=f"nanovllm rank {rank}", daemon=True)
                process.start()
                self.processes.append(process)
                theirs.close()
            self._watcher.start()
        except BaseException:
            self.exit()
            raise

    def connect(self) -> TensorParallel:
        """Rank 0's place among the ranks, once all are here."""
        if self.processes:
            self._await(lambda: min(self._progress) >= 1)
            self._channel.unlink()
            meeting: Future[TensorParallel] = Future()
            threading.Thread(target=self._meet, args=(meeting,), daemon=True).start()
            self._await(meeting.done)  # if one is lost now, the meeting waits for minutes; we do not
            self.tp = meeting.result()
        return self.tp

    def _meet(self, meeting: Future) -> None:
        try:
            meeting.set_result(connect(0, self.config, self.folder))
        except BaseException as error:
            meeting.set_exception(error)

    def wait_until_started(self) -> None:
        if self.processes:
            self._await(lambda: min(self._progress) >= 2)

    def _await(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self.failure:
                raise RuntimeError(self.failure)
            sleep(0.002)

    def launch(self, runner: ModelRunner, step: ScheduledStep) -> SampledTokens:
        """Prepare a step and launch it on all ranks, or on none: Ctrl-C waits until it is done."""
        if not self.processes:
            return runner.run(step)
        batch = runner.prepare(step)
        with interrupts_held():
            self._channel.send(batch.shape, batch.buffer, STEP_TIMEOUT)
            return runner.launch(batch, step)

    def give_up(self, error: BaseException) -> BaseException:
        """Kill all after an error of rank 0; what to raise for it, as it may be the first to notice that another is lost."""
        may_be_theirs = bool(self.processes) and isinstance(error, RuntimeError)
        patience = monotonic() + 2.0
        while may_be_theirs and not self.failure and monotonic() < patience:
            sleep(0.01)
        cause = RuntimeError(self.failure) if may_be_theirs and self.failure else error
        self._fail(f"rank 0 failed: {error!r}")
        return cause

    def _watch(self) -> None:
        pipes = {pipe: rank for rank, pipe in enumerate(self._pipes, 1)}
        ends = {process.sentinel: rank for rank, process in enumerate(self.processes, 1)}
        while not self._closing and not self.failure:
            ready = connection.wait([*pipes, *ends], timeout=0.2)
            ended = [ends[end] for end in ready if end in ends and not self._closing]
            # one that was killed is the cause; what the others report may be that they have noticed
            for rank in ended:
                if (self.processes[rank - 1].exitcode or 0) < 0:
                    self._fail(self._end_of(rank))
            for pipe in [pipe for pipe in ready if pipe in pipes]:
                self._hear(pipes[pipe], pipe, pipes)
            for rank in ended:
                self._fail(self._end_of(rank))
            if min(self._progress) < 2 and monotonic() > self._deadline:
                self._fail(f"the ranks did not start within {START_TIMEOUT:.0f} s")

    def _hear(self, rank: int, pipe: connection.Connection, pipes: dict) -> None:
        try:
            error = pipe.recv_bytes().decode()
        except (EOFError, OSError):
            del pipes[pipe]  # its end will be seen as well
            return
        if error:
            self._fail(f"rank {rank} failed:\n{error}")
        else:
            self._progress[rank - 1] += 1

    def _end_of(self, rank: int) -> str:
        process = self.processes[rank - 1]
        process.join(1.0)
        if (code := process.exitcode) is not None and code < 0:
            return f"rank {rank} was killed ({signal.Signals(-code).name})"
        hint = "" if self._progress[rank - 1] else f" before it began, for the reason that it printed. Perhaps {GUARD}"
        return f"rank {rank} ended with exit code {code}{hint}"

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        for process in self.processes:
            process.kill()
        self.tp.abort()

    def exit(self) -> None:
        """End the processes, and leave nothing behind. May be called again."""
        if self._closing:
            return
        self._closing = True
        if not self.failure:
            with suppress(RuntimeError):  # who does not read is killed
                self._channel.send(STOP, np.empty(0, np.int32), timeout=1.0)
        for process in self.processes:
            process.join(0.0 if self.failure else 5.0)
            process.kill()
            process.join(5.0)
        if self._watcher.ident is not None:  # it was started
            self._watcher.join()
        for pipe in self._pipes:
            pipe.close()
        self._channel.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def interrupts_held():
    """Ctrl-C within the block comes at its end. It always meets the main thread, so elsewhere there is nothing to hold."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = []
    handler = signal.signal(signal.SIGINT, lambda *arguments: held.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


def connect(rank: int, config: Config, folder: Path) -> TensorParallel:
    model, size = config.model_config, config.tensor_parallel_size
    sums = max(config.max_num_batched_tokens, config.max_num_seqs) * model.hidden_size
    logits = max(config.max_num_seqs, LOGPROB_ROWS) * model.vocab_size // size
    room = max(sums, logits) * config.dtype.itemsize
    return TensorParallel.connect(rank, size, folder, config.device_of(rank), room)


def work(
    rank: int, caller: int, config: Config, folder: Path, channel: StepChannel, pipe: connection.Connection
) -> None:
    """A rank's whole life, in a process of its own. It says b"" when it is here and when it has started, else its error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's
    end_with(caller, folder)
    try:
        torch.set_num_threads(max(1, torch.get_num_threads() // config.tensor_parallel_size))
        pipe.send_bytes(b"")
        runner = ModelRunner(config, Stopwatch(), connect(rank, config, folder))
        pipe.send_bytes(b"")
        serve(runner, channel, rank - 1)
    except BaseException:
        with suppress(OSError):
            pipe.send_bytes(traceback.format_exc().encode())
        threading.Event().wait()  # the caller kills us; if it is gone, which may be our error, so are we soon
    os._exit(0)  # past all that would wait for the device


def serve(runner: ModelRunner, channel: StepChannel, reader: int) -> None:
    """Run the steps that come, until there are to be no more."""
    in_flight: list[SampledTokens] = []
    while True:
        with channel.receive(reader) as (shape, words):
            if shape == STOP:
                return
            if len(in_flight) == PLACES:  # the host buffer of the last step but one is the one that comes next
                in_flight.pop(0).wait_until_over()
            batch = Batch(shape, runner.host_buffer(shape.is_prefill))
            batch.buffer[:] = words[: shape.size]
        in_flight.append(runner.launch(batch))


def end_with(caller: int, folder: Path) -> None:
    """End this process, and remove the folder where the ranks met, when the caller is gone or SIGTERM comes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # for the threads to come as well

    def watch() -> None:
        while os.getppid() == caller and signal.sigtimedwait({signal.SIGTERM}, 0.5) is None:
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="nanovllm watch", daemon=True).start()
