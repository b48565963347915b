"""Stores the contents of cache blocks in files. All files are in one folder."""

import os
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from struct import Struct
from time import time
from uuid import uuid4

import numpy as np
import xxhash

from nanovllm.engine.sequence import packed_ids

HEADER = Struct("<8s16sQ")  # magic, checksum of all bytes that follow the header, number of bytes of the token ids
MAGIC = b"nvllmkv1"  # another number if blocks of equal shape store something else
SUFFIX = ".block"
MAX_WRITE_SECONDS = 600


class DamagedFileError(OSError):
    """The file of a block is incomplete, was changed, or stores another block."""


class BlockFiles:
    """Stores each block in a separate file. If files take too much space, deletes the least recently used ones.

    The name of a file is the hash of the block. A file contains a header, the token ids, and the rows of bytes in which
    the tier in host memory stores the block. The rows of rank 0 come first. Any thread may call `read` and `write`.
    Only the engine's thread may call the other methods. Several engines may use the same folder. If one engine deletes
    a file, the other engines compute the block again.
    """

    def __init__(self, folder: Path, max_bytes: int):
        """`max_bytes` limits the total size of the files.

        Files that earlier engines have written are used, and count towards `max_bytes`.
        """
        self.folder, self.max_bytes = folder, max_bytes
        for file in folder.glob("*.tmp"):  # an engine may have ended early, or may write this file now
            with suppress(FileNotFoundError):
                if file.stat().st_mtime < time() - MAX_WRITE_SECONDS:
                    file.unlink()
        found = []
        for file in folder.glob(f"*{SUFFIX}"):
            with suppress(FileNotFoundError, ValueError):  # deleted by another engine, or not written by an engine
                found.append((file.stat().st_mtime_ns, int(file.stem), file.stat().st_size))
        self._sizes = OrderedDict((block_hash, num_bytes) for _, block_hash, num_bytes in sorted(found))
        self._num_bytes = sum(self._sizes.values())
        self._delete_oldest()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._sizes

    def add(self, block_hash: int, num_bytes: int) -> None:
        """Add the size of a file that `write` has written.

        If all files together exceed the limit, delete other files.
        """
        self._num_bytes += num_bytes - self._sizes.pop(block_hash, 0)
        self._sizes[block_hash] = num_bytes
        self._delete_oldest()

    def touch(self, block_hash: int) -> None:
        """Mark a block as the most recently used one, also for engines that start later."""
        self._sizes.move_to_end(block_hash)
        with suppress(OSError):
            os.utime(self._path(block_hash))

    def remove(self, block_hash: int) -> None:
        self._num_bytes -= self._sizes.pop(block_hash, 0)
        with suppress(OSError):
            self._path(block_hash).unlink()

    def write(self, block_hash: int, token_ids: list[int], rows: list[np.ndarray]) -> int:
        """Write a file, and return its size in bytes. Raises OSError.

        The file gets its name only when it is complete. If the process ends early, no incomplete file has the name of a
        block.
        """
        parts = [packed_ids(token_ids), *rows]
        checksum = _checksum(parts)
        temporary = self.folder / f"{uuid4().hex}.tmp"
        try:
            with temporary.open("wb") as file:
                file.write(HEADER.pack(MAGIC, checksum, len(parts[0])))
                file.writelines(parts)
                num_bytes = file.tell()
            temporary.replace(self._path(block_hash))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return num_bytes

    def read(self, block_hash: int, token_ids: list[int], rows: list[np.ndarray]) -> None:
        """Read a file into `rows`.

        Raises DamagedFileError if the file is damaged, and another OSError if the file can't be read. After an error,
        the contents of `rows` are undefined.
        """
        path, expected_ids = self._path(block_hash), packed_ids(token_ids)
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            if not S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DamagedFileError(f"{path}: is not a regular file")
            header = file.read(HEADER.size)
            if len(header) < HEADER.size or not header.startswith(MAGIC):
                raise DamagedFileError(f"{path}: is not a file of cache blocks")
            _, checksum, num_id_bytes = HEADER.unpack(header)
            if num_id_bytes != len(expected_ids) or file.read(num_id_bytes) != expected_ids:
                raise DamagedFileError(f"{path}: stores other token ids")
            is_complete = all(_read_into(file, row) for row in rows) and not file.read(1)
        if not is_complete or _checksum([expected_ids, *rows]) != checksum:
            raise DamagedFileError(f"{path}: is damaged")

    def _delete_oldest(self) -> None:
        while self._num_bytes > self.max_bytes:
            self.remove(next(iter(self._sizes)))

    def _path(self, block_hash: int) -> Path:
        return self.folder / f"{block_hash}{SUFFIX}"


def _open_at_once(path: str, flags: int) -> int:
    """Open a file, but do not wait for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read_into(file, row: np.ndarray) -> bool:
    """Fill `row` from an unbuffered file. Return whether the file was long enough."""
    view = memoryview(row)
    while view:
        if not (count := file.readinto(view)):
            return False
        view = view[count:]
    return True


def _checksum(parts: list) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()
