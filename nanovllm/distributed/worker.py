"""The ranks but the first: their processes, what they do, and how all of it ends."""

import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import torch

from nanovllm.config import Config
from nanovllm.distributed import tensor_parallel
from nanovllm.distributed.step_channel import PLACES, StepChannel, StepReader
from nanovllm.engine.batch import Batch, largest_batch
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.step_result import MAX_LOGPROB_ROWS, PendingStep
from nanovllm.utils.interrupts import interrupts_held
from nanovllm.utils.stopwatch import Stopwatch
from nanovllm.utils.tensor_parallel import STEP_TIMEOUT, TensorParallel

START_TIMEOUT = 1800.0  # seconds for all ranks to load their weights and capture their graphs
MESSAGE = 2**17  # bytes of the longest message between the caller and a rank
READY = b"ready"  # a rank says so when it is here and when it has started; anything else that it says is its error
BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[2:]; from nanovllm.distributed.worker import work; work(int(sys.argv[1]))"
)


class Workers:
    """The other ranks as rank 0, in the caller's process, sees them; none, where one rank is all.

    A thread starts them, watches them and ends them, so no interrupt of the caller leaves that half done. When a rank
    ends, reports an error or does not start in time, all are killed, rank 0's device is told not to wait for them, and
    `failure` says why. Without their caller the ranks end by themselves.

    They are plain subprocesses, not `multiprocessing`'s: that imports the caller's script in each of them, and the exit
    of any forked child of the caller would end them.
    """

    def __init__(self, config: Config):
        self.config = config
        self.failure: str | None = None
        self.tp = TensorParallel()
        self.processes: list[subprocess.Popen] = []
        self._owner = os.getpid()
        self._progress = [0] * (config.tensor_parallel_size - 1)  # 1: is here, 2: has started
        self._keeper: threading.Thread | None = None
        self._is_closing = False  # by `exit`, with nothing queued that waits for a rank
        self._ended = threading.Event()  # before Python 3.13 a `join` that is interrupted takes its thread for ended
        self._channel: StepChannel | None = None
        self._folder: Path | None = None

    def connect(self) -> TensorParallel:
        """Start the processes; rank 0's place among the ranks, once all are here."""
        if self._progress:
            self._deadline = monotonic() + START_TIMEOUT
            self._keeper = threading.Thread(target=self._keep, name="nanovllm ranks", daemon=True)
            with interrupts_held():  # a thread that half started can't be joined
                self._keeper.start()
            self._await(lambda: min(self._progress) >= 1)
            meeting: Future[TensorParallel] = Future()
            threading.Thread(target=self._meet, args=(meeting,), daemon=True).start()
            self._await(meeting.done)  # if one is lost now, the meeting waits for minutes; we do not
            self.tp = meeting.result()
        return self.tp

    def _meet(self, meeting: Future) -> None:
        try:
            meeting.set_result(connect(0, self.config, self._folder))
        except BaseException as error:
            meeting.set_exception(error)

    def wait_until_started(self) -> None:
        if self._progress:
            self._await(lambda: min(self._progress) >= 2)
            if self.tp.folder is None:
                self._remove_folder()  # from here on nothing of ours has a name

    def _await(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.check()
            sleep(0.002)

    def check(self) -> None:
        """RuntimeError where the ranks are gone, or are those of the process that this one was forked from."""
        if self._progress and os.getpid() != self._owner:
            raise RuntimeError(f"this process is a fork of {self._owner}, which owns this engine: start another here")
        if self.failure:
            raise RuntimeError(self.failure)

    def launch(self, runner: ModelRunner, step: ScheduledStep) -> PendingStep:
        """Prepare a step and launch it on all ranks, or on none: Ctrl-C waits until it is done.

        Any thread may call this, one at a time. RuntimeError as of `check`, and where another thread calls `exit`.
        """
        if not self._progress:
            return runner.run(step)
        channel = self._channel
        self.check()
        batch = runner.prepare(step)
        with interrupts_held():
            try:
                channel.send(batch.shape, batch.buffer, STEP_TIMEOUT)
                self.check()
                return runner.launch(batch, step)
            except BaseException as error:
                if not isinstance(error, Exception):  # of another signal's handler; who gets it may go on
                    self._fail(f"a step was interrupted while it was launched ({error!r})")
                raise

    def give_up(self, error: BaseException) -> BaseException:
        """Kill all after an error of rank 0; what to raise: rank 0 may be the first to notice that one is lost."""
        may_be_theirs = bool(self._progress) and os.getpid() == self._owner and isinstance(error, RuntimeError)
        patience = monotonic() + 2.0
        while may_be_theirs and not self.failure and monotonic() < patience:
            sleep(0.01)
        cause = RuntimeError(self.failure) if may_be_theirs and self.failure else error
        self._fail(f"rank 0 failed: {error!r}")
        return cause

    def _keep(self) -> None:
        """The thread of the ranks: all of their life."""
        # the ranks inherit this: SIGINT is the caller's alone, and SIGTERM is for `end_with`
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        pipes: dict[int, socket.socket] = {}
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="nanovllm-"))
            self._channel = StepChannel(largest_batch(self.config), len(self._progress))
            for rank in range(1, len(self._progress) + 1):
                pipes[rank] = self._start(rank)
            self._watch(pipes)
        except Exception as error:
            self._fail(f"the ranks could not be started: {type(error).__name__}: {error}")
        finally:
            try:
                self._end(pipes)
            finally:
                self._ended.set()

    def _start(self, rank: int) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # it keeps messages apart
        with theirs:
            fds = self._channel.fds_of(rank - 1)
            ours.send(pickle.dumps((rank, self._owner, self.config, self._folder, fds)))
            command = [sys.executable, "-c", BOOTSTRAP, str(theirs.fileno()), *map(str, sys.path)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), *fds))
            self.processes.append(process)
        return ours

    def _watch(self, pipes: dict[int, socket.socket]) -> None:
        rank_of = {pipe.fileno(): rank for rank, pipe in pipes.items()}
        poll = select.poll()
        for fd in rank_of:
            poll.register(fd, select.POLLIN)
        while not self.failure:
            errors = []
            for fd, _ in poll.poll(200):
                message = _receive(pipes[rank_of[fd]])
                if message == READY:
                    self._progress[rank_of[fd] - 1] += 1
                elif message:
                    errors.append(f"rank {rank_of[fd]} failed:\n{message.decode(errors='replace')}")
                else:
                    poll.unregister(fd)
                    with suppress(subprocess.TimeoutExpired):
                        self.processes[rank_of[fd] - 1].wait(1.0)
            ended = [(process.poll(), rank) for rank, process in enumerate(self.processes, 1)]
            # one that was killed is the cause; what the others report may be that they have noticed
            errors = [_end_of(rank, code) for code, rank in ended if code is not None and code < 0] + errors
            errors += [_end_of(rank, code) for code, rank in ended if code is not None and code >= 0]
            if errors:
                self._fail(errors[0])
            elif min(self._progress) < 2 and monotonic() > self._deadline:
                self._fail(f"the ranks did not start within {START_TIMEOUT:.0f} s")

    def _fail(self, reason: str) -> None:
        """Kill all; the thread notices, and does the rest."""
        if os.getpid() != self._owner:
            return
        self.failure = self.failure or reason
        for process in self.processes:
            process.kill()

    def _end(self, pipes: dict[int, socket.socket]) -> None:
        """Leave nothing behind, once there is a failure."""
        self._fail("the ranks were ended")  # again: it may have come while they were started
        if not self._is_closing:
            self.tp.abort()
        if self._channel is not None:
            self._channel.release()
            self._channel = None
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
        for pipe in pipes.values():
            pipe.close()
        if self.tp.lost or self.tp.folder is None:
            self._remove_folder()  # else NCCL reads it once more: where it is gone, `tp.close` would wait for minutes

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def exit(self) -> None:
        """End the processes, and leave nothing behind; in a forked child, do nothing.

        It may be called again, by any thread, and while another is in `launch`, which then raises RuntimeError. What
        interrupts it is raised when it is done.
        """
        if self._keeper is None or os.getpid() != self._owner:
            return
        interrupts = []
        with interrupts_held():
            while not self._ended.is_set():
                try:
                    self._is_closing |= self.failure is None
                    self._fail("this engine was closed by exit()")
                    if threading.current_thread() is self._keeper:  # where the garbage collector calls us
                        return
                    self._ended.wait()
                except BaseException as interrupt:  # of the handler of another signal
                    interrupts.append(interrupt)
            self._keeper.join()
        if interrupts:
            raise interrupts[0]


def _receive(pipe: socket.socket) -> bytes:
    """A message of a rank; nothing where it has ended."""
    try:
        return pipe.recv(MESSAGE)
    except ConnectionError:
        return b""


def _end_of(rank: int, code: int) -> str:
    if code < 0:
        return f"rank {rank} was killed ({signal.Signals(-code).name})"
    return f"rank {rank} ended with exit code {code}, for the reason that it printed"


def connect(rank: int, config: Config, folder: Path) -> TensorParallel:
    model, size = config.model_config, config.tensor_parallel_size
    sums = max(config.max_num_batched_tokens, config.max_num_seqs) * model.hidden_size
    logits = max(config.max_num_seqs, MAX_LOGPROB_ROWS) * model.vocab_size // size
    room = max(sums, logits) * config.dtype.itemsize
    return tensor_parallel.connect(rank, size, folder, config.device_of(rank), room)


def work(fd: int) -> None:
    """A rank's whole life, in a process of its own, which ends when it is killed; `fd` is its socket to the caller."""
    pipe = socket.socket(fileno=fd)
    rank, caller, config, folder, fds = pickle.loads(pipe.recv(MESSAGE))
    end_with(caller, folder)
    try:
        torch.set_num_threads(max(1, torch.get_num_threads() // config.tensor_parallel_size))
        pipe.send(READY)
        runner = ModelRunner(config, Stopwatch(), connect(rank, config, folder))
        pipe.send(READY)
        serve(runner, StepReader(fds, largest_batch(config)))
    except BaseException:
        with suppress(OSError):
            pipe.send(traceback.format_exc().encode()[-MESSAGE:])
        threading.Event().wait()  # the caller kills us; if it is gone, which may be our error, so are we soon


def serve(runner: ModelRunner, reader: StepReader) -> None:
    """Run the steps that come, until we are killed."""
    in_flight: list[PendingStep] = []
    while True:
        with reader.receive() as (shape, words):
            if len(in_flight) == PLACES:  # the host buffer of the last step but one is the one that comes next
                in_flight.pop(0).wait_until_over()
            batch = Batch(shape, runner.host_buffer(shape.is_prefill))
            batch.buffer[:] = words[: shape.size]
        in_flight.append(runner.launch(batch))


def end_with(caller: int, folder: Path) -> None:
    """End this process, and remove the folder where the ranks met, when the caller is gone or SIGTERM comes.

    SIGTERM must be blocked, as it is from the start in a process of `Workers`.
    """

    def watch() -> None:
        while os.getppid() == caller and signal.sigtimedwait({signal.SIGTERM}, 0.5) is None:
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="nanovllm watch", daemon=True).start()
