"""Starts, runs and ends the processes of all ranks except rank 0."""

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
from copy import copy
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch

from nanovllm.batches.batch import Batch, BatchShape, largest_batch
from nanovllm.config import Config
from nanovllm.distributed import process_group
from nanovllm.distributed.ranks import Ranks
from nanovllm.distributed.step_channel import NUM_BUFFERS, StepChannel, StepReader
from nanovllm.engine.forward_output import PendingStep
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.runners import make_runner
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.features import check_ranks
from nanovllm.features.logprobs import MAX_TOP_ROWS
from nanovllm.utils.interrupts import interrupts_held
from nanovllm.utils.tensor_parallel import STEP_TIMEOUT
from nanovllm.utils.tensor_parts import TensorPart, parts_of

START_TIMEOUT = 1800.0  # seconds for all ranks to load their weights and capture their graphs
MAX_MESSAGE_BYTES = 2**17  # the maximum size of a message between rank 0 and another rank
# a rank sends this when its process has started, and again when its model runner is ready; other messages are errors
READY = b"ready"
BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[2:]; from nanovllm.distributed.worker import work; work(int(sys.argv[1]))"
)


class Workers:
    """Rank 0's view of the other ranks, in the caller's process.

    A supervisor thread starts, watches and ends the processes, so an interrupt in the caller's thread can't leave this
    work half done. If a rank ends, reports an error or does not start in time, the supervisor kills all ranks. The
    supervisor also stores the reason in `failure`, and makes rank 0's device stop waiting. If the caller is killed, the
    ranks end by themselves.

    The processes are plain subprocesses. With `multiprocessing`, each process would import the caller's script, and a
    forked child of the caller would end the ranks' processes when the child exits.
    """

    def __init__(self, config: Config):
        check_ranks(config.tensor_parallel_size)
        process_group.check_order_of_sums(config)
        self.config = config
        self.failure: str | None = None
        self.on_failure: Callable[[], object] = lambda: None  # called by the supervisor unless `exit` ends the ranks
        self.tp = Ranks()
        self.processes: list[subprocess.Popen] = []
        self._caller_pid = os.getpid()
        self._num_ready = [0] * (config.tensor_parallel_size - 1)  # READY messages of each rank, at most 2
        self.supervisor: threading.Thread | None = None
        self._is_closing = False  # set by `exit` unless a rank has failed: no queued work waits for a rank
        self._ended = threading.Event()  # set when the supervisor ends; an interrupted `join` is unreliable before 3.13
        self._channel: StepChannel | None = None
        self._folder: Path | None = None

    def connect(self) -> Ranks:
        self._deadline = monotonic() + START_TIMEOUT
        self.supervisor = threading.Thread(target=self._supervise, name="nanovllm ranks", daemon=True)
        with interrupts_held():  # a thread whose start was interrupted can't be joined
            self.supervisor.start()
        self._wait_until(lambda: min(self._num_ready) >= 1)
        connection: Future[Ranks] = Future()
        threading.Thread(target=self._connect_rank_0, args=(connection,), daemon=True).start()
        self._wait_until(connection.done)  # raises early if a rank is lost; `connection` would take minutes to fail
        self.tp = connection.result()
        return self.tp

    def _connect_rank_0(self, connection: Future) -> None:
        try:
            connection.set_result(connect(0, self.config, self._folder))
        except BaseException as error:
            connection.set_exception(error)

    def wait_until_started(self) -> None:
        self._wait_until(lambda: min(self._num_ready) >= 2)
        if self.tp.folder is None:
            self._remove_folder()  # from here on, no file can be left behind

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.check()
            sleep(0.002)

    def check(self) -> None:
        if self.failure:
            raise RuntimeError(self.failure)

    def launch(self, runner: ModelRunner, step: ScheduledStep) -> PendingStep:
        """Launch a step on all ranks. Raises RuntimeError if the ranks have failed, or if another thread calls `exit`.

        If rank 0 sends a step and then fails to launch it, the ranks can't continue.
        """
        channel = self._channel
        self.check()
        batch = runner.prepare(step)
        channel.send(batch.shape, batch.buffer, STEP_TIMEOUT)
        self.check()
        return runner.launch(batch, step)

    def send(self, message: Any, words: np.ndarray) -> None:
        """Send a message and up to `largest_batch` words to all other ranks. Each rank calls `message.receive`."""
        self.check()
        self._channel.send(message, words, STEP_TIMEOUT)

    def send_tensor(self, make_message: Callable[[TensorPart], Any], name: str, tensor: torch.Tensor) -> None:
        """Split a tensor, and send the message `make_message(part)` with the words of each part."""
        for part, words in parts_of(name, tensor, 4 * largest_batch(self.config)):
            self.send(make_message(part), words)

    def cause_of(self, error: BaseException) -> BaseException:
        """Kill all ranks after an error of rank 0. Return `error`, or the failure that caused `error`.

        Rank 0 may notice a lost rank before the supervisor does, so this method waits for the supervisor.
        """
        may_be_theirs = os.getpid() == self._caller_pid and isinstance(error, RuntimeError)
        deadline = monotonic() + 2.0
        while may_be_theirs and not self.failure and monotonic() < deadline:
            sleep(0.01)
        cause = RuntimeError(self.failure) if may_be_theirs and self.failure else error
        self._fail(f"rank 0 failed: {error!r}")
        return cause

    def _supervise(self) -> None:
        # the ranks inherit this mask: SIGINT is only for the caller, and `end_with_caller` handles SIGTERM
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        sockets: dict[int, socket.socket] = {}
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="nanovllm-"))
            self._channel = StepChannel(largest_batch(self.config), len(self._num_ready))
            for rank in range(1, len(self._num_ready) + 1):
                sockets[rank] = self._start(rank)
            self._watch(sockets)
        except Exception as error:
            self._fail(f"the ranks could not be started: {type(error).__name__}: {error}")
        finally:
            try:
                self._end(sockets)
            finally:
                self._ended.set()
                if not self._is_closing:
                    self.on_failure()

    def _start(self, rank: int) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # preserves message boundaries
        with theirs:
            fds = self._channel.fds_of(rank - 1)
            ours.send(pickle.dumps((rank, self._caller_pid, _without_policy(self.config), self._folder, fds)))
            command = [sys.executable, "-c", BOOTSTRAP, str(theirs.fileno()), *map(str, sys.path)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), *fds))
            self.processes.append(process)
        return ours

    def _watch(self, sockets: dict[int, socket.socket]) -> None:
        rank_of = {sock.fileno(): rank for rank, sock in sockets.items()}
        poll = select.poll()
        for fd in rank_of:
            poll.register(fd, select.POLLIN)
        while not self.failure:
            errors = []
            for fd, _ in poll.poll(200):
                message = _receive(sockets[rank_of[fd]])
                if message == READY:
                    self._num_ready[rank_of[fd] - 1] += 1
                elif message:
                    errors.append(f"rank {rank_of[fd]} failed:\n{message.decode(errors='replace')}")
                else:
                    poll.unregister(fd)
                    with suppress(subprocess.TimeoutExpired):
                        self.processes[rank_of[fd] - 1].wait(1.0)
            ended = [(process.poll(), rank) for rank, process in enumerate(self.processes, 1)]
            # report a killed rank first, because its end may have caused the errors of other ranks
            errors = [_describe_end(rank, code) for code, rank in ended if code is not None and code < 0] + errors
            errors += [_describe_end(rank, code) for code, rank in ended if code is not None and code >= 0]
            if errors:
                self._fail(errors[0])
            elif min(self._num_ready) < 2 and monotonic() > self._deadline:
                self._fail(f"the ranks did not start within {START_TIMEOUT:.0f} s")

    def _fail(self, reason: str) -> None:
        """Kill all ranks. Store `reason` in `failure`, unless `failure` is already set."""
        if os.getpid() != self._caller_pid:
            return
        self.failure = self.failure or reason
        for process in self.processes:
            process.kill()

    def _end(self, sockets: dict[int, socket.socket]) -> None:
        self._fail("the ranks were ended")  # again, because processes may have started during an earlier `_fail`
        if not self._is_closing:
            self.tp.abort()
        if self._channel is not None:
            self._channel.release()
            self._channel = None
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
        for sock in sockets.values():
            sock.close()
        if self.tp.lost or self.tp.folder is None:
            self._remove_folder()  # otherwise, NCCL must read the folder once more, then `tp.close` removes it

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def exit(self) -> None:
        """End the processes and clean up. In a forked child, do nothing.

        Any thread may call this method at any time. A call of `launch` that runs in another thread raises RuntimeError.
        An interrupt that arrives during `exit` is raised when `exit` ends.
        """
        if self.supervisor is None or os.getpid() != self._caller_pid:
            return
        interrupts = []
        with interrupts_held():
            while not self._ended.is_set():
                try:
                    self._is_closing |= self.failure is None
                    self._fail("this engine was closed by exit()")
                    if threading.current_thread() is self.supervisor:  # called by the garbage collector
                        return
                    self._ended.wait()
                except BaseException as interrupt:  # raised by a handler of another signal
                    interrupts.append(interrupt)
            self.supervisor.join()
        if interrupts:
            raise interrupts[0]


def _without_policy(config: Config) -> Config:
    """Return a copy of the config without its policy, which other ranks do not need and may be unable to import."""
    config = copy(config)
    object.__setattr__(config, "scheduling_policy", "fcfs")  # `replace` would resolve the settings again
    return config


def _receive(sock: socket.socket) -> bytes:
    """Return a message from a rank, or b"" if the rank's process has ended."""
    try:
        return sock.recv(MAX_MESSAGE_BYTES)
    except ConnectionError:
        return b""


def _describe_end(rank: int, code: int) -> str:
    if code < 0:
        return f"rank {rank} was killed ({signal.Signals(-code).name})"
    return f"rank {rank} ended with exit code {code}; see its output for the reason"


def connect(rank: int, config: Config, folder: Path) -> Ranks:
    """Connect a rank to the other ranks through files in `folder`, and return when all ranks are connected."""
    model, size = config.model_config, config.tensor_parallel_size
    sums = max(config.max_num_batched_tokens, config.max_num_seqs) * model.hidden_size
    logits = max(config.max_num_seqs * config.tokens_per_row, MAX_TOP_ROWS) * model.vocab_size // size
    num_bytes = max(sums, logits) * config.dtype.itemsize  # of the largest sum or gathered part
    return process_group.connect(rank, size, folder, config.device_of(rank), num_bytes)


def work(fd: int) -> None:
    """Do the work of a rank until this process is killed. The socket `fd` is connected to rank 0."""
    sock = socket.socket(fileno=fd)
    rank, caller, config, folder, fds = pickle.loads(sock.recv(MAX_MESSAGE_BYTES))
    end_with_caller(caller, folder)
    try:
        torch.set_num_threads(max(1, torch.get_num_threads() // config.tensor_parallel_size))
        sock.send(READY)
        runner = make_runner(config, lambda part: None, connect(rank, config, folder))
        sock.send(READY)
        serve(runner, StepReader(fds, largest_batch(config)))
    except BaseException:
        with suppress(OSError):
            sock.send(traceback.format_exc().encode()[-MAX_MESSAGE_BYTES:])
        threading.Event().wait()  # until the caller kills this process, or `end_with_caller` ends it


def serve(runner: ModelRunner, reader: StepReader) -> None:
    in_flight: list[PendingStep] = []
    incoming: dict[str, Any] = {}  # parts of messages whose other parts have not arrived
    while True:
        with reader.receive() as (shape, words):
            if not isinstance(shape, BatchShape):
                shape.receive(words, runner, incoming)  # such as rollout.new_weights.WeightPart
                continue
            if len(in_flight) == NUM_BUFFERS:  # this step reuses the host buffer of the oldest step in flight
                in_flight.pop(0).synchronize()
            batch = Batch.from_buffer(shape, runner.host_buffer(shape))
            batch.buffer[:] = words[: shape.size]
        in_flight.append(runner.launch(batch))


def end_with_caller(caller: int, folder: Path) -> None:
    """When the caller is gone or SIGTERM arrives, remove `folder` and end this process.

    `Workers` must have blocked SIGTERM.
    """

    def watch() -> None:
        while os.getppid() == caller and signal.sigtimedwait({signal.SIGTERM}, 0.5) is None:
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="nanovllm watch", daemon=True).start()
