"""Runs programs as forks of this process, which has imported PyTorch. A new process needs seconds for imports."""

import atexit
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Collection, Mapping
from inspect import signature
from multiprocessing import resource_tracker, util
from pathlib import Path
from types import ModuleType, SimpleNamespace

from tqdm import tqdm

# packages that each program imports anew: ours, and one that reads the environment when it is imported
IMPORTED_ANEW = "nanovllm", "prometheus_client"
SPAWN = util.spawnv_passfds
# tqdm's default lock is shared with forks; a fork that is killed while it draws a bar would hold it forever
tqdm.set_lock(threading.RLock())


class Program(subprocess.Popen):
    """Replaces `subprocess.Popen([sys.executable, ...])` by a fork. Processes that the program spawns are forks too."""

    def _execute_child(self, *arguments):
        given = SimpleNamespace(**signature(super()._execute_child).bind(*arguments).arguments)
        streams = {i: fd for i, fd in enumerate((given.p2cread, given.c2pwrite, given.errwrite)) if fd != -1}
        self.pid = fork_python(given.args[1:], streams, given.pass_fds, given.env, given.start_new_session, given.cwd)
        self._child_created = True
        names = "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"
        self._close_pipe_fds(*(getattr(given, name) for name in names))


def fork_python(
    arguments: list[str],
    streams: Mapping[int, int] = {},
    pass_fds: Collection[int] = (),
    env: Mapping[str, str] | None = None,
    start_new_session: bool = False,
    cwd: str | os.PathLike | None = None,
) -> int:
    """Fork a process that does what `python FILE | -m MODULE | -c CODE ...` would do. Return its id.

    Like a new process, it imports our modules anew, and has no signal handlers and no descriptors except `pass_fds` and
    its standard streams. `streams` maps the number of a standard stream to a descriptor of this process.
    """
    _wait_until_other_threads_sleep()
    if pid := os.fork():
        return pid
    status = 1
    try:
        for number, fd in streams.items():
            os.dup2(fd, number)
        tracker = resource_tracker._resource_tracker._fd  # if this was closed, the tracker would be considered lost
        null = os.open(os.devnull, os.O_RDWR)
        for fd in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, null, tracker, *pass_fds}:
            os.dup2(null, fd, inheritable=False)  # if an old object is collected, it closes this and no new file
        if start_new_session:
            os.setsid()
        if cwd is not None:
            os.chdir(cwd)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        status = _run(arguments)
    finally:
        os._exit(status)


def _wait_until_other_threads_sleep(seconds: float = 2.0) -> None:
    """Wait until no other thread runs, for at most `seconds`, because a running thread may hold a lock.

    A fork would wait for that lock forever. For example, an ending thread holds a lock while it returns memory to MKL.
    """
    end = time.perf_counter() + seconds
    while any(map(_is_running, os.listdir("/proc/self/task"))) and time.perf_counter() < end:
        time.sleep(0.001)


def _is_running(thread: str) -> bool:
    if int(thread) == threading.get_native_id():
        return False
    try:
        state = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return False
    return state == "R"


def _run(arguments: list[str]) -> int:
    """Run a program, and return its exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    logging.getLogger("nanovllm").handlers.clear()
    logging.getLogger("nanovllm").setLevel(logging.NOTSET)
    for name in [name for name in sys.modules if name.split(".")[0] in IMPORTED_ANEW]:
        del sys.modules[name]
    sys.modules["__main__"] = ModuleType("__main__")  # spawned processes import this
    util.spawnv_passfds = _spawn
    tqdm.set_lock(threading.RLock())  # another thread may have held the old lock
    atexit._clear()
    weakref.finalize._registry.clear()
    weakref.finalize._registered_with_atexit = False
    try:
        kind, *rest = arguments
        sys.argv = arguments
        if kind in ("-c", "-m"):
            sys.argv = [kind, *rest[1:]]
            sys.path.insert(0, os.getcwd())
        if kind == "-c":
            exec(rest[0], vars(sys.modules["__main__"]))
        elif kind == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(kind, run_name="__main__")
        code = None
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        traceback.print_exc()
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    if code == -signal.SIGINT:  # end by the signal, so that the parent sees it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code if isinstance(code, int) else int(code is not None)


def _spawn(path: str | bytes, args: list, pass_fds: Collection[int]) -> int:
    arguments = [*map(os.fsdecode, args)]
    is_ours = "spawn_main" in arguments[-2]  # the resource tracker is another program
    return fork_python(arguments[arguments.index("-c") :], {}, pass_fds) if is_ours else SPAWN(path, args, pass_fds)
