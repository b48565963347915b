"""Implements the tier of the prefix cache on disk. The setting `swap_dir` is the folder of the files."""

import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import xxhash

from nanovllm.cache.block_copies import block_parts
from nanovllm.engine.engine import Engine
from nanovllm.tiers.block_files import SUFFIX, BlockFiles, DamagedFileError
from nanovllm.tiers.connector import CachedBlock
from nanovllm.tiers.host_blocks import row_bytes
from nanovllm.tiers.host_tier import Entry, HostTier, use_host_tier
from nanovllm.tiers.tiered_blocks import TieredBlockManager, report_loss
from nanovllm.utils.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.model_runner import ModelRunner

T = TypeVar("T")
logger = logging.getLogger("nanovllm")
NUM_THREADS = 4
RETRY_SECONDS = 60.0  # if reading is slower than computing, it is measured again after this time
EXIT_SECONDS = 10.0  # `exit` writes blocks for at most this long, and waits for reads at most this long
SALT = "salt"  # a file
SAMPLE_BYTES = 2**20
TOO_SMALL = "host memory is too small for the blocks of a prefix"


@dataclass(slots=True)
class Write:
    """Describes a block that will be written to a file when the copy to host memory has ended."""

    entry: Entry
    is_copied: Callable[[], bool]
    future: Future | None = None  # of the thread that writes the file


@dataclass(slots=True, eq=False)
class Read:
    """Describes the blocks of one call of `get`, some of which are read from files."""

    blocks: list[CachedBlock]
    kept: list[Entry]  # entries of the other blocks, which must stay in host memory
    entries: dict[int, Entry]  # of the blocks that are read, by hash
    rows_are_free: Callable[[], bool]  # until then, earlier copies may still use the rows of `entries`
    futures: dict[int, Future] | None = None  # of the threads that read the files, by hash
    has_arrived: Callable[[], bool] | None = None  # of the copy to the device, which begins when all files were read


class DiskTier(HostTier):
    """Extends HostTier. Writes blocks in host memory to files, and reads other blocks from files.

    Threads read and write the files while steps run. A block is first copied to host memory, and then written to a
    file. A file is first read into host memory, and then copied to the device. The rows of a block stay in host memory
    until no thread uses them. The threads of rank 0 read and write the rows of all ranks.

    The hashes of blocks depend on a random number. The random number is stored in the folder, so that a later engine
    with the same weights computes equal hashes. After the prefix cache was cleared, the engine does not use the folder
    any more, because the weights may have changed. Clearing the prefix cache does not change the files.
    """

    def __init__(self, engine: Engine, num_rows: int):
        self._files: BlockFiles | None = None  # see `start`
        # an engine may write its last blocks when Python exits
        self._threads = DaemonThreads("nanovllm-files", NUM_THREADS)
        self._writes: dict[int, Write] = {}  # by hash
        self._file_reads: list[Read] = []
        self._read_seconds, self._measured_at = 0.0, 0.0  # a moving average per row, and the time of its last change
        super().__init__(engine, num_rows)

    def start(self, files: BlockFiles) -> None:
        self._files = files

    def contains(self, block_hash: int, token_ids: list[int]) -> bool:
        if block_hash in self._entries or self._files is None:
            return super().contains(block_hash, token_ids)
        return block_hash in self._files and self._is_worth_reading()  # `read` compares the token ids

    def put(self, blocks: list[CachedBlock]) -> None:
        self._advance()
        super().put(blocks)
        self._begin_writes([block.block_hash for block in blocks])

    def get(self, blocks: list[CachedBlock]) -> Callable[[], bool]:
        self._advance()
        missing = [block for block in blocks if block.block_hash not in self._entries]
        if not missing or self._files is None:
            return super().get(blocks)
        kept = [self._entries[block.block_hash] for block in blocks if block.block_hash in self._entries]
        sizes = [len(self._ids_of_rows(block)) for block in missing]
        if sum(sizes) + sum(len(entry.rows) for entry in kept) > self._num_rows:  # popping rows would only drop blocks
            raise OSError(TOO_SMALL)
        for entry in kept:
            entry.num_reads += 1
        entries = {x.block_hash: Entry(x.token_ids, self._pop_rows(size)) for x, size in zip(missing, sizes)}
        read = Read(blocks, kept, entries, self._end_of_copies())
        if not all(entry.rows for entry in entries.values()):
            self._release(read)
            raise OSError(TOO_SMALL)
        self._file_reads.append(read)
        self._begin_read(read)
        return partial(self._has_arrived, read)

    def clear(self) -> None:
        work = [(write.entry, write.future) for write in self._writes.values() if write.future is not None]
        work += [(read.entries[key], x) for read in self._file_reads for key, x in (read.futures or {}).items()]
        wait([future for _, future in work if not future.cancel()], EXIT_SECONDS)
        self._writes, self._file_reads = {}, []
        if self._files is not None:
            logger.warning("swap_dir: is no longer used, because the prefix cache was cleared; a restart uses it again")
        self._files = None
        super().clear()
        if in_use := {row for entry, future in work if not future.done() for row in entry.rows}:  # by a file that hangs
            self._free_rows = [row for row in self._free_rows if row not in in_use]

    def usage(self) -> dict[str, int]:
        totals, num_files = self._engine.scheduler.totals, 0 if self._files is None else len(self._files)
        counts = {name: totals[name] for name in ("disk_blocks", "disk_hits")}
        return super().usage() | counts | {"disk_files": num_files}

    def save(self, contents: Iterable[CachedBlock]) -> None:
        """Write the blocks on the device and in host memory to files, for at most EXIT_SECONDS.

        Raises RuntimeError if another rank is lost.

        `contents` begins with the most recent blocks, which are written first.
        """
        end = monotonic() + EXIT_SECONDS
        if self._files is not None:
            num_blocks = self._files.max_bytes // self._runner.host_blocks.rows_of_ranks[:, 0].nbytes
            on_device = [*islice(contents, num_blocks)]
            recent = dict.fromkeys(block.block_hash for block in on_device) | dict.fromkeys(reversed(self._entries))
            hashes = [*islice(recent, num_blocks)]
            for part in _parts(on_device, part_size := max(1, self._num_rows // 4)):
                self.put(part)
                self._wait_for_writes(end)
            for part in _parts(hashes, part_size):
                self._begin_writes(part)
                self._wait_for_writes(end)
            for block_hash in (block_hash for block_hash in reversed(hashes) if block_hash in self._files):
                self._files.touch(block_hash)
            if monotonic() >= end:
                logger.warning("swap_dir: not all cache blocks could be written in %g seconds", EXIT_SECONDS)

    def close(self) -> None:
        """End the threads when they have done all work. After `close`, the tier does not use files."""
        self._threads.close(EXIT_SECONDS)
        self._files = None

    def _allocate(self) -> None:
        if not self._engine.workers.processes:
            return super()._allocate()
        file = os.memfd_create("nanovllm")
        try:
            self._call("allocate", self._num_rows, np.array([os.getpid(), file], np.int32))
        finally:
            os.close(file)  # all ranks have mapped the file

    def _end_of_copies(self) -> Callable[[], bool]:
        return self._runner.host_blocks.end_of_copies(self._num_copies)

    def _begin_writes(self, hashes: list[int]) -> None:
        """Queue the blocks with these `hashes`, which will be written to files.

        Leave out blocks that already have a file. The queued blocks take at most half of the rows in host memory.
        """
        if self._files is None or not hashes:
            return
        is_copied = self._end_of_copies()
        num_rows = sum(len(write.entry.rows) for write in self._writes.values())
        for block_hash in hashes:
            entry = self._entries.get(block_hash)
            if entry is None or block_hash in self._files or block_hash in self._writes:
                continue
            if (num_rows := num_rows + len(entry.rows)) > max(1, self._num_rows // 2):
                break
            entry.num_reads += 1
            self._writes[block_hash] = Write(entry, is_copied)

    def _wait_for_writes(self, end: float) -> None:
        while self._writes and monotonic() < end:
            self._engine.workers.check()  # the copies of a lost rank never end
            sleep(0.001)
            self._advance()

    def _is_worth_reading(self) -> bool:
        """Return whether reading a block from a file takes at most as long as computing it.

        The time of reads is measured while the engine runs. If the time to compute a token was not measured, return
        True.
        """
        ms_per_token = self._runner.measured_ms_per_token
        if ms_per_token is None or monotonic() > self._measured_at + RETRY_SECONDS:
            return True
        return 1e3 * self._read_seconds <= self._engine.config.kvcache_block_size * ms_per_token

    def _begin_read(self, read: Read) -> None:
        if read.rows_are_free() and self._files is not None:
            rows_of_blocks = {block_hash: (x.token_ids, self._rows(x)) for block_hash, x in read.entries.items()}
            submit = partial(self._threads.submit, _seconds_of, self._files.read)
            read.futures = {block_hash: submit(block_hash, *rows) for block_hash, rows in rows_of_blocks.items()}

    def _has_arrived(self, read: Read) -> bool:
        if read.has_arrived is None:
            if read not in self._file_reads:
                raise OSError("the prefix cache was cleared")
            if read.futures is None:
                self._begin_read(read)
                return False
            if not all(future.done() for future in read.futures.values()):
                return False
            self._end_read(read, read.futures)
            read.has_arrived = super().get(read.blocks)
        return read.has_arrived()

    def _end_read(self, read: Read, futures: dict[int, Future]) -> None:
        """Add the blocks that threads have read to `_entries`. Raises OSError if a block could not be read."""
        assert self._files is not None, "`clear` would have ended the read"
        self._file_reads.remove(read)
        errors = {block_hash: error for block_hash, future in futures.items() if (error := future.exception())}
        if found := futures.keys() - errors.keys():
            num_rows = sum(len(read.entries[block_hash].rows) for block_hash in found)
            seconds = sum(futures[block_hash].result() for block_hash in found)
            measured = seconds / num_rows / min(NUM_THREADS, len(futures))
            self._read_seconds, self._measured_at = (self._read_seconds or measured) / 2 + measured / 2, monotonic()
        for block_hash in futures:
            if isinstance(errors.get(block_hash), (DamagedFileError, FileNotFoundError)):
                self._files.remove(block_hash)
            elif block_hash in self._files:
                self._files.touch(block_hash)
            if block_hash not in errors and block_hash not in self._entries:
                self._entries[block_hash] = read.entries.pop(block_hash)
        self._release(read)
        totals = self._engine.scheduler.totals
        totals["disk_blocks"] += len(found)
        if errors:
            raise next(iter(errors.values()))
        hashes = {h for h in found if h >= 0}  # not of second contents, which belong to the same tokens
        totals["disk_hits"] += sum(len(block.token_ids) for block in read.blocks if block.block_hash in hashes)

    def _release(self, read: Read) -> None:
        """Free the rows of `read.entries`, whose blocks are not used.

        Allow the entries in `read.kept` to leave host memory.
        """
        for entry in read.kept:
            entry.num_reads -= 1
        self._free_rows += [row for entry in read.entries.values() for row in entry.rows]

    def _advance(self) -> None:
        """Begin to write blocks whose copies to host memory have ended. Add the sizes of files that were written."""
        if (files := self._files) is None:
            return
        for block_hash, write in [*self._writes.items()]:
            if write.future is None and write.is_copied():
                rows = self._rows(write.entry)
                write.future = self._threads.submit(files.write, block_hash, write.entry.token_ids, rows)
            elif write.future is not None and write.future.done():
                del self._writes[block_hash]
                write.entry.num_reads -= 1
                try:
                    files.add(block_hash, write.future.result())
                except OSError as error:
                    problem = f"swap_dir: a cache block could not be written: {error}"
                    report_loss(self._engine.scheduler.totals, problem)

    def _rows(self, entry: Entry) -> list[np.ndarray]:
        """Return the rows of an entry on all ranks, beginning with rank 0."""
        rows_of_ranks = self._runner.host_blocks.rows_of_ranks.numpy()
        return [rows[row] for rows in rows_of_ranks for row in entry.rows]


def _seconds_of(work: Callable[..., object], *arguments: object) -> float:
    """Call a function, and return how many seconds the call took."""
    begin = monotonic()
    work(*arguments)
    return monotonic() - begin


def _parts(items: Iterable[T], size: int) -> Iterator[list[T]]:
    remaining = iter(items)
    while part := [*islice(remaining, size)]:
        yield part


def use_disk_tier(engine: Engine) -> None:
    """Add tiers in host memory and in files to the engine's prefix cache. The model must be loaded.

    Raises ValueError if the folder can't be used. Raises the errors of `use_host_tier`.
    """
    config, scheduler = engine.config, engine.scheduler
    assert config.swap_dir is not None and engine.model_runner is not None
    folder = Path(config.swap_dir).expanduser() / fingerprint(config, engine.model_runner)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the files reveal users' prompts
        salt = _stored_salt(folder)
        files = BlockFiles(folder, int(config.swap_dir_space * 2**30))
    except (OSError, ValueError) as error:  # ValueError: the path contains a character that no path may have
        raise ValueError(f"swap_dir={config.swap_dir!r:.200}: can't be used: {error!s:.200}") from error
    num_bytes = config.tensor_parallel_size * row_bytes(engine.model_runner)
    if files.max_bytes < num_bytes:
        raise ValueError(f"swap_dir_space={config.swap_dir_space:g}: a cache block takes {num_bytes / 2**30:.3g} GiB")
    tier = use_host_tier(engine, DiskTier)
    tier.start(files)
    scheduler.block_manager.salt = salt
    engine.on_exit.append(partial(_save, engine, tier))


def fingerprint(config: "Config", runner: "ModelRunner") -> str:
    """Return a hash of the weights and of the layout of blocks, because the contents of a block depend on both.

    The hash covers the names, sizes and modification times of the weight files, and some bytes of each file.
    """
    folders, drafting = [Path(config.model).resolve()], config.speculative_config
    if drafting is not None and drafting.model is not None:
        folders.append(Path(drafting.model).resolve())
    files = [
        file for folder in folders for kind in ("safetensors", "json") for file in sorted(folder.glob(f"*.{kind}"))
    ]
    parts = [(tuple(part.shape), str(part.dtype)) for part in block_parts(runner._cached_token_ids, runner.caches, 0)]
    names = "dtype kv_cache_dtype quantization load_format kvcache_block_size mamba_ssm_cache_dtype max_model_len"
    names += " batch_invariant attention_backend tensor_parallel_size"
    settings = [str(getattr(config, name)) for name in names.split()]
    device = torch.cuda.get_device_name(runner.device) if runner.device.type == "cuda" else "cpu"
    drafts = None if drafting is None else [drafting.method, drafting.num_speculative_tokens]
    described = [[*map(str, folders)], [*map(_described, files)], parts, settings, device, drafts]
    return xxhash.xxh3_128_hexdigest(json.dumps(described).encode())


def _described(file: Path) -> list:
    stat, digest = file.stat(), xxhash.xxh3_128()
    with file.open("rb") as opened:
        for begin in (0, stat.st_size // 2, max(0, stat.st_size - SAMPLE_BYTES)):
            opened.seek(begin)
            digest.update(opened.read(SAMPLE_BYTES))
    return [file.name, stat.st_size, stat.st_mtime_ns, digest.hexdigest()]


def _stored_salt(folder: Path) -> int:
    """Return the random number in the file `salt` of a folder. If the file is missing, write a new random number.

    If the file is damaged, also delete the blocks in the folder, whose hashes depend on the lost number.
    """
    file = folder / SALT
    try:
        with suppress(FileExistsError), file.open("xb") as opened:
            opened.write(_with_checksum(secrets.token_bytes(8)))
    except OSError:  # the disk may be full
        file.unlink(missing_ok=True)
        raise
    for _ in range(100):
        if (salt := file.read_bytes()) == _with_checksum(salt[:8]):
            break
        sleep(0.01)  # another engine may write the file now
    else:
        logger.warning("swap_dir: %s is damaged, so the cache blocks in its folder are deleted", file)
        for block in folder.glob(f"*{SUFFIX}"):
            block.unlink(missing_ok=True)
        file.write_bytes(salt := _with_checksum(secrets.token_bytes(8)))
    return int.from_bytes(salt[:8], "little")


def _with_checksum(salt: bytes) -> bytes:
    return salt + xxhash.xxh3_64_digest(salt)


def _save(engine: Engine, tier: DiskTier) -> None:
    """Write the blocks of the prefix cache to files."""
    try:
        if engine.model_runner is not None:
            blocks = engine.scheduler.block_manager
            assert isinstance(blocks, TieredBlockManager)
            tier.save(blocks.contents())
    except Exception:  # the engine may exit because the device has failed
        logger.warning("swap_dir: the last cache blocks could not be written", exc_info=True)
    finally:
        tier.close()
