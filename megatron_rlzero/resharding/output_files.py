"""Files of a fixed size, written in any order by several threads, past the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

#: Direct writes begin and end at multiples of so many bytes, in the file and in memory.
ALIGNED = 4096
#: bytes of one direct write, and of the memory of each thread that writes
BUFFER = 2**22


def allocate(path: Path, size: int) -> int:
    """Opens a new file of ``size`` bytes for reading and writing, with all of its space reserved.

    Raises:
        OSError: the disk is full; says how much is needed and available.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.posix_fallocate(file, 0, max(size, 1))
    except OSError as error:
        os.close(file)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            error.errno, f"the disk is full: {path.name} needs {size:,} bytes, {free:,} are available", str(path.parent)
        ) from None
    return file


class OutputFile:
    """An open file whose bytes go to the disk at once.

    Pages of the cache would cost more than the disk: to find, to copy into and to write back, and most of all where the
    host of a virtual machine has taken back the free ones. Only the ends of a write, parts of a page, go through it.
    """

    def __init__(self, file: int) -> None:
        self._file, self._thread = file, threading.local()
        try:
            self._direct = os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # A file system that has only the cache.
            self._direct = os.dup(file)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Writes all of the bytes."""
        data = memoryview(data)
        stop = offset + data.nbytes
        first, last = -(-offset // ALIGNED) * ALIGNED, stop // ALIGNED * ALIGNED
        if first >= last:
            _pwrite(self._file, data, offset)
            return
        _pwrite(self._file, data[: first - offset], offset)
        for at in range(first, last, BUFFER):
            part = data[at - offset : min(at + BUFFER, last) - offset]
            aligned = self._buffer()[: part.nbytes]
            np.copyto(aligned, part)
            _pwrite(self._direct, memoryview(aligned), at)
        _pwrite(self._file, data[last - offset :], last)

    def close(self) -> None:
        """Waits until the file is on the disk and closes it."""
        os.close(self._direct)
        try:
            # Direct writes too end in the disk's own cache, and what the file system knows of them in memory.
            os.fsync(self._file)
        finally:
            os.close(self._file)

    def _buffer(self) -> NDArray[np.uint8]:
        """The calling thread's own; it starts with a page."""
        if not hasattr(self._thread, "buffer"):
            self._thread.buffer = np.frombuffer(mmap.mmap(-1, BUFFER, flags=mmap.MAP_PRIVATE), np.uint8)
        return self._thread.buffer


def _pwrite(file: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
