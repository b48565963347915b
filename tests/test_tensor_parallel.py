"""Several ranks on the CPU: the answers of one rank, and what happens when a rank or the caller fails."""

import asyncio
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common import TINY
from programs import Program
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.batches.batch import MAX_CHUNKS, BatchShape, largest_batch
from nanovllm.config import Config
from nanovllm.cuda.graphs import decode_shape
from nanovllm.distributed import process_group, worker
from nanovllm.distributed.step_channel import HEADER, NUM_BUFFERS, StepChannel, StepReader
from nanovllm.engine.engine import SingleRank
from nanovllm.engine.scheduling_policy import FCFS
from nanovllm.utils.interrupts import interrupts_held

PROMPTS = [
    "HAMLET.\nTo be, or not to be",
    "What is 17 + 25?",
    "KING RICHARD.\n",
    "Sort: 7, 3, 9",
    "HAMLET.\nTo be, or not",
    "Hello",
]
BANS = {"min_p": 0.1, "bad_words": ["the", "a"], "allowed_token_ids": [*range(0, 2048, 3)]}
OPTIONS = [
    {},
    {"top_k": 20, "top_p": 0.9, "logprobs": 2},
    {"n": 2, "repetition_penalty": 1.3},
    {"logprobs": 3, "prompt_logprobs": 2},
    BANS,
    {"structured_outputs": {"regex": "[a-d]{30,}"}},
]
PARAMS = [
    SamplingParams(temperature=t, max_tokens=17, seed=7, ignore_eos="structured_outputs" not in options, **options)
    for t, options in zip((0.0, 1.0, 0.6, 0.0, 2.0, 0.7), OPTIONS)
]
SMALL = dict(kvcache_block_size=16, num_kvcache_blocks=7, max_num_batched_tokens=16, max_num_seqs=4)
LONG = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
SOON = 10.0  # seconds
THREADS_BEFORE: list[threading.Thread] = []  # before the test: fixtures of other files may still be open


@pytest.fixture(autouse=True)
def folder_of_the_test(tmp_path, monkeypatch):
    """The ranks connect in a folder of temporary files: none of theirs is left at the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    THREADS_BEFORE[:] = threading.enumerate()
    yield
    assert not leftovers(tmp_path)


def leftovers(folder: Path) -> list:
    """Ranks, threads, and what has a name in the folder of temporary files or in /dev/shm."""
    new = [thread for thread in threading.enumerate() if thread not in THREADS_BEFORE]
    for thread in (threads := [thread for thread in new if thread.name.startswith("nanovllm")]):
        thread.join(0.2)  # what waits for its work may go on just before its end
    threads = [thread for thread in threads if thread.is_alive()]
    return [*ranks_of(os.getpid()), *threads, *folder.glob("nanovllm-*"), *names_of_shared_memory("self")]


def names_of_shared_memory(pid: int | str) -> list[str]:
    """Of a process's mappings; those of semaphores are among them."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")]


def ranks_of(caller: int) -> list[int]:
    """Process ids of a caller's ranks: of programs that run one, and of forks."""
    found, fork = [], Path("/proc/self/cmdline").read_bytes()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            parent = int((process / "stat").read_text().rsplit(")")[-1].split()[1])
            command = (process / "cmdline").read_bytes()
            if parent == caller and (b"nanovllm.distributed.worker" in command or command == fork):
                found.append(int(process.name))
    return sorted(found)


@pytest.fixture(autouse=True)
def ctrl_c_is_an_exception():
    """Also where a shell started us in the background, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def model_name(small_model, tmp_path_factory) -> str:
    """The small model with two key-value heads, fewer than four ranks.

    Its vocabulary is 1026 or 513 ids a rank: the noise is made for four ids at once.
    """
    folder = tmp_path_factory.mktemp("two-kv-heads") / "model"
    shutil.copytree(small_model, folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_key_value_heads": 2, "vocab_size": 2052}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            weights[name] = weight[: 2 * config["head_dim"]].clone()
        elif "embed_tokens" in name:
            weights[name] = torch.cat([weight, -weight[:4]])
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def answers(llm: LLM, max_tokens: int = 17) -> tuple[list, list]:
    """Ids, and log-probabilities."""
    found = llm.generate(PROMPTS, [replace(params, max_tokens=max_tokens) for params in PARAMS], use_tqdm=False)
    ids = [[output.token_ids for output in answer.outputs] for answer in found]
    given = [x or {} for answer in found for x in (answer.logprobs or []) + (answer.prompt_logprobs or [])]
    return ids, [{token_id: found.logprob for token_id, found in x.items()} for x in given]


def assert_same(found: tuple[list, list], expected: tuple[list, list]) -> None:
    assert found[0] == expected[0]
    assert len(found[1]) == len(expected[1]) > 30
    for a, b in zip(found[1], expected[1]):
        assert a == pytest.approx(b, abs=1e-3)


@pytest.fixture(scope="module")
def expected(model_name):
    """A function from settings to the answers of one rank."""

    @cache
    def run(max_tokens: int = 17, **settings) -> tuple[list, list]:
        with LLM(model_name, dtype="float32", device="cpu", **settings) as llm:
            return answers(llm, max_tokens)

    return run


def check_answers(llm: LLM, expected: tuple[list, list]) -> None:
    """Greedy and seeded sampling with all kinds of parameters, preemption, chunks and prefix hits."""
    assert_same(answers(llm), expected)
    assert llm.scheduler.num_preemptions > 0
    prompt = list(range(40))
    first, again = (llm.generate(prompt, replace(PARAMS[1], max_tokens=3), use_tqdm=False)[0] for _ in range(2))
    assert (first["num_cached_tokens"], again["num_cached_tokens"]) == (0, 32)
    assert first["token_ids"] == again["token_ids"]


def test_two_engines_of_a_caller(make_llm, expected, monkeypatch, tmp_path):
    """Each has the answers of one rank. Ctrl-C comes at once, and the engine goes on to work, until a rank fails.

    The first has a policy of a class in `__main__`, which the other rank does not import; the second, log-probabilities
    after edits and filters.
    """
    own = type("Own", (FCFS,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Own", own, raising=False)
    assert type(pickle.loads(pickle.dumps(own()))) is own  # what could be sent, the other rank could not read
    modes = {"logprobs_mode": "raw_logprobs"}, {"logprobs_mode": "processed_logprobs"}
    different = {"async_scheduling": False, "scheduling_policy": own()}, {"async_scheduling": True}
    engines = []
    for settings, mode in zip(different, modes):
        engines.append(make_llm(tensor_parallel_size=2, **SMALL, **settings, **mode))
        # the first one's rank is a new process, as in a program
        monkeypatch.setattr(worker, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Program}))
    pids = os.getpid(), *ranks_of(os.getpid())
    assert len(pids) == 3 and not any(map(names_of_shared_memory, pids)) and not list(tmp_path.glob("nanovllm-*"))
    for llm, mode, pauses in zip(engines, modes, [(0.05, 0.11), (0.04, 0.08)]):
        check_answers(llm, expected(**mode))
        for pause in pauses:
            timer = later(pause, os.kill, os.getpid(), signal.SIGINT)
            begin = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, LONG, use_tqdm=False)
            timer.join()
            assert time.monotonic() - begin < 2.0
            assert llm.is_finished()
    first, second = engines
    few = replace(PARAMS[1], max_tokens=4)
    first_ids = lambda llm: llm.generate(PROMPTS[1], few, use_tqdm=False)[0]["token_ids"]
    expected_ids = [expected(**mode)[0][1][0][:4] for mode in modes]
    with ThreadPoolExecutor(1) as pool:  # any thread may use an engine
        assert pool.submit(first_ids, first).result() == expected_ids[0]
    check_error_in_a_step(first, monkeypatch)
    assert first_ids(second) == expected_ids[1]
    check_kill_between_steps(second)


@pytest.mark.usefixtures("forked_ranks")
def test_fewer_key_value_heads_than_ranks(make_llm, expected):
    llm = make_llm(tensor_parallel_size=4, **SMALL)
    assert next(iter(llm.model_runner.cache_groups)).num_kv_heads == 1
    assert_same(answers(llm, 12), expected(12))  # few steps: Gloo's take long among four
    check_kill_in_a_step(llm, rank=2)


@pytest.mark.parametrize(
    "change, what",
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, r"does not divide the query heads \(6\)"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, r"does not divide the key-value heads \(6\)"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, "not a multiple of the 3 key-value heads"),
        ({"intermediate_size": 770}, r"does not divide the inner size of the feed-forward layers \(770\)"),
        ({"vocab_size": 2046, "eos_token_id": 0}, r"does not divide the vocabulary \(2046\)"),
    ],
)
def test_what_does_not_divide_is_refused(tmp_path, change, what):
    """Before any process is started."""
    config = json.loads(Path(TINY, "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"tensor_parallel_size=4: {what}"):
        LLM(str(tmp_path), device="cpu", tensor_parallel_size=4)


# -- the channel -------------------------------------------------------------------------------------------------------


LARGEST = largest_batch(
    Config(str(TINY), max_num_seqs=4, max_num_batched_tokens=32, max_model_len=48, kvcache_block_size=16)
)


# of 4 sequences and 32 tokens: the lists of all, and log-probabilities of every token
EDITS = {"bias_entries": (2048,), "bias_ids": (2048,), "bias_bits": (2048,), "bad_word_entries": (512,)}
EDITS |= {"bad_words": (512, 16), "mask_indices": (4,), "masks": (4, 64)}
LARGEST_FEATURES = ("logit_edits", tuple(EDITS.items())), ("logprobs", (("requests", (36, 4)), ("is_edited", (1,))))


@pytest.fixture
def channel():
    return StepChannel(capacity=LARGEST, num_readers=2)


def test_every_reader_gets_every_step_before_it_is_overwritten(channel):
    B, T, C = 4, 32, MAX_CHUNKS
    bounds = BatchShape(T, B + C, 0, B + C, 3, T, (("", (T + B + C, 2)),))
    largest = BatchShape(*bounds.graph_shape, B, B, B, LARGEST_FEATURES)
    shapes = [largest, decode_shape(B, 3)] * 20
    steps = [np.arange(i, i + shape.size, dtype=np.int32) for i, shape in enumerate(shapes)]
    assert max(len(step) for step in steps) <= LARGEST
    assert max(len(step) for step in steps) > LARGEST - 100  # which counts more padding than there is
    heard = [[], []]

    def read(reader: int) -> None:
        mine = StepReader(channel.fds_of(reader), LARGEST)
        for _ in steps:
            with mine.receive() as (shape, words):
                time.sleep(0.002 * reader)
                heard[reader].append((shape, words[: shape.size].copy()))
            del words

    readers = [threading.Thread(target=read, args=(reader,)) for reader in range(2)]
    for reader in readers:
        reader.start()
    for shape, step in zip(shapes, steps):
        channel.send(shape, step, timeout=5.0)
    for reader in readers:
        reader.join()
    for got in heard:
        assert [shape for shape, _ in got] == shapes
        assert all(np.array_equal(words, step) for (_, words), step in zip(got, steps))


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_memory_of_ranks_has_room_for_drafts(monkeypatch, num_drafts):
    """For the logits of each drafted token, which ranks gather, and for the words of the batch."""
    sizes = dict(max_num_seqs=80, max_num_batched_tokens=96, max_model_len=48, kvcache_block_size=16)
    drafting = {"method": "ngram", "num_speculative_tokens": num_drafts} if num_drafts else None
    config = Config(str(TINY), tensor_parallel_size=2, speculative_config=drafting, **sizes)
    monkeypatch.setattr(process_group, "connect", lambda *args: args[-1])
    num_rows = 80 * (1 + num_drafts)
    assert worker.connect(0, config, Path()) >= num_rows * config.model_config.vocab_size // 2 * config.dtype.itemsize
    shape = decode_shape(80, config.max_blocks_per_seq, config.tokens_per_row)
    assert largest_batch(config) >= shape.size


def test_a_reader_that_does_not_read(channel):
    """When all buffers are full, it is an error after the timeout."""
    step = np.zeros(4, np.int32)
    for _ in range(NUM_BUFFERS):
        channel.send((0,) * HEADER, step, timeout=0.1)
    with pytest.raises(RuntimeError, match="rank 1 has taken no step"):
        channel.send((0,) * HEADER, step, timeout=0.1)
    later(0.1, channel.release)
    channel.send((0,) * HEADER, step, timeout=SOON)  # it gives up waiting for readers that are gone


def test_a_message_whose_header_is_too_long(channel):
    """It is refused, and the channel still works."""
    with pytest.raises(ValueError, match="a message's header has .* bytes: must be at most 2044"):
        channel.send("x" * 4 * HEADER, np.zeros(4, np.int32), timeout=0.1)
    channel.send("x" * 2000, np.arange(4, dtype=np.int32), timeout=0.1)
    for reader in range(2):
        with StepReader(channel.fds_of(reader), LARGEST).receive() as (message, words):
            assert message == "x" * 2000 and words[:4].tolist() == [0, 1, 2, 3]
        del words


def test_a_channel_has_no_name_and_leaves_no_descriptor():
    before = os.listdir("/proc/self/fd")
    channel = StepChannel(capacity=LARGEST, num_readers=2)
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in channel.fds_of(0)]
    assert names[0].endswith("(deleted)") and names[1:] == ["anon_inode:[eventfd]"] * 2
    assert os.fstat(channel.fds_of(0)[0]).st_mode & 0o777 == 0o600
    del channel
    assert os.listdir("/proc/self/fd") == before


# -- failures ----------------------------------------------------------------------------------------------------------


def later(seconds: float, function, *arguments) -> threading.Timer:
    timer = threading.Timer(seconds, function, arguments)
    timer.start()
    return timer


def pid_of(llm: LLM, rank: int) -> int:
    return llm.workers.processes[rank - 1].pid


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_closed(llm: LLM, begin: float) -> None:
    wait_for(lambda: llm.model_runner is None)  # a caller that still submits hears of the failure earlier
    assert time.monotonic() - begin < SOON
    assert not any(is_alive(process.pid) for process in llm.workers.processes)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x")


def check_kill_in_a_step(llm: LLM, rank: int) -> None:
    begin = time.monotonic()
    later(0.1, os.kill, pid_of(llm, rank), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=rf"rank {rank} was killed \(SIGKILL\)"):
        while time.monotonic() - begin < SOON:
            llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert_closed(llm, begin)


def check_kill_between_steps(llm: LLM) -> None:
    os.kill(pid_of(llm, 1), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 was killed \(SIGKILL\)"):
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert_closed(llm, begin)


def check_error_in_a_step(llm: LLM, monkeypatch) -> None:
    """The other rank gets a batch that makes it fail. The caller gets its error and its traceback."""
    send = StepChannel.send

    def garble(channel, shape, words, timeout):
        send(channel, shape, np.full_like(words, 10**6), timeout)

    begin = time.monotonic()
    failed = pytest.raises(RuntimeError, match=r"(?s)rank 1 failed:.*Traceback.*in forward.*Error")
    with monkeypatch.context() as patch, failed:
        patch.setattr(StepChannel, "send", garble)
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert_closed(llm, begin)


def kill(process) -> None:
    os.kill(process.pid, signal.SIGKILL)


def wait_for(condition) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < SOON
        time.sleep(0.01)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("has_answered", [False, True])
def test_a_server_hears_of_a_rank_that_is_lost_while_nothing_runs(model_name, caplog, has_answered):
    """Its health is that of the engine, and the log names the rank; there is no request that could find out."""
    pytest.importorskip("fastapi")
    from nanovllm.serve import AsyncLLM, EngineDeadError

    llm = AsyncLLM(model_name, device="cpu", dtype="float32", tensor_parallel_size=2, **SMALL)
    failures = []
    llm.on_failure.append(failures.append)

    async def ask():
        return [output async for output in llm.generate("x", SamplingParams(max_tokens=2, ignore_eos=True))]

    if has_answered:
        assert len(asyncio.run(ask())[-1].outputs[0].token_ids) == 2
    assert llm.health() == {"status": "ok"} and not failures
    kill(llm.engine.workers.processes[0])
    wait_for(lambda: failures and llm.engine.model_runner is None)
    assert [str(failure) for failure in failures] == ["rank 1 was killed (SIGKILL)"]
    assert "the engine has failed: rank 1 was killed (SIGKILL)" in caplog.messages
    for call in (llm.health, lambda: asyncio.run(ask())):
        with pytest.raises(EngineDeadError, match=r"rank 1 was killed \(SIGKILL\)"):
            call()
    llm.exit()


@pytest.mark.usefixtures("forked_ranks")
def test_a_replica_hears_of_a_rank_that_is_lost_while_nothing_runs(make_llm):
    pytest.importorskip("msgspec")
    from nanovllm.serve.replicas.replica import Replica

    replica = Replica()
    replica.attach(make_llm(tensor_parallel_size=2, **SMALL))
    with ThreadPoolExecutor(1) as pool:
        report = pool.submit(next, replica.new_reports())
        kill(replica.engine.workers.processes[0])
        with pytest.raises(RuntimeError, match=r"the engine has failed: .*rank 1 was killed \(SIGKILL\)"):
            report.result(SOON)
    replica.exit()


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_hangs_in_a_step(make_llm, monkeypatch):
    for module in (process_group, worker):
        monkeypatch.setattr(module, "STEP_TIMEOUT", 0.5)
    monkeypatch.setattr(worker, "monotonic", lambda: 10 * time.monotonic())  # rank 0 waits shorter for another cause
    llm = make_llm(tensor_parallel_size=2, max_model_len=2048)
    later(0.1, os.kill, pid_of(llm, 1), signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="[Tt]imed out|no step"):
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert_closed(llm, begin)


def start_and(monkeypatch, action) -> None:
    """Start an engine of two ranks, of which `action` is done to one as soon as there is a process."""
    watch = worker.Workers._watch

    def do_and_watch(workers, sockets):
        action(workers.processes[0].pid)
        watch(workers, sockets)

    monkeypatch.setattr(worker.Workers, "_watch", do_and_watch)
    LLM("tiny-qwen3", device="cpu", tensor_parallel_size=2)


def test_a_start_that_never_ends(monkeypatch):
    monkeypatch.setattr(worker, "START_TIMEOUT", 0.6)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="did not start within 1 s"):
        start_and(monkeypatch, lambda pid: os.kill(pid, signal.SIGSTOP))
    assert time.monotonic() - begin < SOON


def test_a_rank_is_killed_before_it_began(monkeypatch):
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 was killed \(SIGKILL\)"):
        start_and(monkeypatch, lambda pid: os.kill(pid, signal.SIGKILL))
    assert time.monotonic() - begin < SOON


@pytest.mark.usefixtures("forked_ranks")
def test_an_error_of_all_ranks_is_rank_0s(tmp_path):
    """A checkpoint without weights is what it would be on one rank."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes(Path(TINY, name).read_bytes())
    with pytest.raises(FileNotFoundError, match="holds no"):
        LLM(str(tmp_path), device="cpu", tensor_parallel_size=2)


def test_ctrl_c_waits_for_the_end_of_a_block():
    reached = 0
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            reached += 1
        reached += 1
    assert reached == 2 and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_ctrl_c_that_are_no_functions(monkeypatch):
    """One that ignores it (as `nohup` does), and one from C, which Python can't put back."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with interrupts_held():
        monkeypatch.undo()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


# -- starts and ends, with ranks that only sleep ----------------------------------------------------------------------


@pytest.fixture
def sleepers(monkeypatch):
    """Workers of two ranks, whose second process was started and never connects."""
    monkeypatch.setattr(worker, "BOOTSTRAP", "import time; time.sleep(99)  # in place of nanovllm.distributed.worker")
    workers = worker.Workers(Config(TINY, device="cpu", tensor_parallel_size=2, max_num_seqs=2, max_model_len=64))
    workers.errors = []

    def connect():
        with pytest.raises(RuntimeError) as error:
            workers.connect()
        workers.errors.append(str(error.value))

    thread = threading.Thread(target=connect)
    thread.start()
    while not workers.processes:
        time.sleep(0.001)
    yield workers
    workers.exit()
    thread.join()


def test_an_exit_that_is_interrupted_is_done(sleepers, monkeypatch, tmp_path):
    """Ctrl-C comes again and again on the way out."""
    rmtree = worker.shutil.rmtree

    def remove_after_interrupts(*arguments, **options):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.02)
        rmtree(*arguments, **options)

    monkeypatch.setattr(worker.shutil, "rmtree", remove_after_interrupts)
    with pytest.raises(KeyboardInterrupt):
        sleepers.exit()
    monkeypatch.undo()
    assert not leftovers(tmp_path)


def test_exits_of_several_threads(sleepers, tmp_path):
    threads = [threading.Thread(target=sleepers.exit) for _ in range(4)]
    for thread in threads:
        thread.start()
    sleepers.exit()
    assert not leftovers(tmp_path)
    sleepers.exit()
    for thread in threads:
        thread.join()
    assert sleepers.failure == "this engine was closed by exit()"


def test_an_exit_by_the_garbage_collector_in_the_ranks_own_thread(sleepers, monkeypatch, tmp_path):
    describe_end = worker._describe_end
    monkeypatch.setattr(worker, "_describe_end", lambda *arguments: sleepers.exit() or describe_end(*arguments))
    sleepers.processes[0].kill()
    sleepers.supervisor.join(SOON)
    assert not leftovers(tmp_path)


def test_one_rank_has_the_same_interface(sleepers):
    names = [name for name in dir(SingleRank()) if not name.startswith("_")]
    public = ("connect", "wait_until_started", "check", "launch", "cause_of", "exit", "tp", "processes", "supervisor")
    assert {*names} == {*public}
    assert all(hasattr(sleepers, name) for name in names)


class FakeRunner:
    """Launches nothing; raises `error` instead, if there is one."""

    error = None

    def prepare(self, step):
        return SimpleNamespace(shape=(0,) * HEADER, buffer=np.zeros(4, np.int32))

    def launch(self, batch, step):
        if self.error:
            raise self.error


def test_an_exit_while_another_thread_launches(sleepers):
    """`launch` waits for a rank that takes no step."""
    for _ in range(NUM_BUFFERS):
        sleepers.launch(FakeRunner(), None)
    later(0.1, sleepers.exit)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"closed by exit\(\)"):
        sleepers.launch(FakeRunner(), None)
    assert time.monotonic() - begin < SOON


def test_ranks_that_cannot_be_started(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(RuntimeError, match="could not be started: FileNotFoundError.*python"):
        LLM("tiny-qwen3", device="cpu", tensor_parallel_size=2)


# -- callers -----------------------------------------------------------------------------------------------------------

CALLERS = """
import gc, os, signal, sys
import programs
from types import SimpleNamespace
from nanovllm import LLM, SamplingParams
from nanovllm.distributed import worker

worker.subprocess = SimpleNamespace(**vars(worker.subprocess) | {"Popen": programs.Program})

def answer():
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return llm.generate("HAMLET", params, use_tqdm=False)[0]["token_ids"]

def fork(end):
    global llm
    if (pid := os.fork()):
        return pid
    signal.alarm(20)
    if end == "use":
        try:
            answer()
        except RuntimeError as error:
            assert "is a fork of" in str(error)
        else:
            sys.exit("a child may not use the ranks")
        llm.exit()
        del llm
        gc.collect()
    if end == "_exit":
        os._exit(0)
    sys.exit(0)

if True:  # no guard of __name__: the ranks do not run this
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever shell started us
    callers = []
    for what in sys.argv[1:]:  # each with an engine that it makes after the fork
        if (pid := os.fork()) == 0:
            break
        callers.append(pid)
    else:
        print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in callers))
        sys.exit()
    signal.alarm(200)  # should the test have failed
    llm = LLM("tiny-qwen3", device="cpu", dtype="float32", tensor_parallel_size=2, max_model_len=2048)
    first = answer()
    if what == "SIGINT":
        assert [os.waitpid(pid, 0)[1] for pid in list(map(fork, ("none", "_exit", "use")))] == [0, 0, 0]
        assert answer() == first
    print(what, os.getpid(), *(process.pid for process in llm.workers.processes), first, flush=True)
    os.read(0, 1)  # until all have started
    while True:
        llm.generate(["HAMLET", "KING"], SamplingParams(max_tokens=1500, ignore_eos=True))
"""


def assert_nothing_is_left(ranks: list[int], folder: Path) -> None:
    give_up = time.monotonic() + SOON
    while (any(map(is_alive, ranks)) or list(folder.glob("nanovllm-*"))) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not any(map(is_alive, ranks)) and not list(folder.glob("nanovllm-*"))


@pytest.mark.skipif(
    torch.__version__.startswith("2.8."), reason="its Gloo prints within the lines of the callers, which share a pipe"
)
def test_ranks_end_with_the_caller(tmp_path):
    """Two callers at a time, one of which forks children: these leave its ranks alone, however they end.

    Nothing of the ranks has a name meanwhile, and nothing is left once the callers have ended, none of which closes its
    engine.
    """
    (tmp_path / "callers.py").write_text(CALLERS)
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    ends = {"SIGINT": signal.SIGINT, "SIGKILL": signal.SIGKILL}
    command = [sys.executable, str(tmp_path / "callers.py"), *ends]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with Program(command, **streams, text=True, bufsize=1, env=environment) as parent:
        started = [parent.stdout.readline().split(maxsplit=3) for _ in ends]
        answers = {text for *_, text in started}
        pids = {what: (int(caller), int(rank)) for what, caller, rank, _ in started}
        assert pids.keys() == ends.keys() and len(answers) == 1
        assert not any(names_of_shared_memory(pid) for both in pids.values() for pid in both)
        assert os.listdir(tmp_path) == ["callers.py"]
        parent.stdin.write("." * len(ends))
        parent.stdin.flush()
        time.sleep(0.2)  # most of the times they are within a step
        for what, end in ends.items():
            os.kill(pids[what][0], end)
        output, errors = parent.communicate(timeout=6 * SOON)  # a busy machine, and processes that end at once
    assert [int(code) for code in output.split()] == [-end for end in ends.values()], errors
    assert_nothing_is_left([rank for _, rank in pids.values()], tmp_path)
