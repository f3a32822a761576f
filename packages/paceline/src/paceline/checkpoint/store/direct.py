"""`DurableFile` writes the files of a checkpoint past the page cache, if the system can (`O_DIRECT`).

The process that writes a checkpoint does not read it again. The cache would cost a copy and new pages for every byte, which
takes several times as long as the disk, and would displace the data that the training reads. A buffer that begins at a page in
memory is written directly; all others are first collected in one that does.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Any

import numpy

_DIRECT = getattr(os, "O_DIRECT", 0)  # only Linux has it
_PAGE = 4096
_COLLECT_BYTES = 4 << 20


class DurableFile:
    """A file that is being written. When its `with` block ends, its bytes are on the disk.

    Raises:
        OSError: it cannot be written; with the path, as `open` would raise it.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._path = path
        self._direct = False
        self._open = True
        self._collected: mmap.mmap | None = None
        self._filled = self._bytes = 0

    def write(self, data: Any) -> int:
        """Writes bytes or any buffer."""
        view = memoryview(data).cast("B")
        length = len(view)
        is_long = not self._filled and length >= _COLLECT_BYTES
        if is_long and numpy.frombuffer(view, numpy.uint8).ctypes.data % _PAGE == 0:
            whole = length - length % _PAGE
            self._put(view[:whole], direct=True)
            view = view[whole:]
        while view:
            if self._collected is None:
                self._collected = mmap.mmap(-1, _COLLECT_BYTES)
            count = min(len(view), _COLLECT_BYTES - self._filled)
            self._collected[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == _COLLECT_BYTES:
                self._put(memoryview(self._collected), direct=True)
                self._filled = 0
        self._bytes += length
        return length

    def flush(self) -> None:
        """Does nothing, because the end of the `with` block writes the rest."""

    def tell(self) -> int:
        """Returns the number of bytes that were written."""
        return self._bytes

    def close(self) -> None:
        """Does the same as the end of the `with` block."""
        self.__exit__(None)

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._open:
            return
        self._open = False
        try:
            if kind is None:
                if self._collected is not None and self._filled:
                    self._put(memoryview(self._collected)[: self._filled], direct=False)
                os.fsync(self._file)
        except OSError as error:
            raise self._named(error) from None
        finally:
            os.close(self._file)

    def _put(self, view: memoryview, *, direct: bool) -> None:
        self._switch(direct)
        while view:
            try:
                view = view[os.write(self._file, view) :]
            except OSError as error:
                # Some file systems accept the flag and then refuse the write. Then the rest goes through the cache.
                if error.errno == errno.EINVAL and self._direct:
                    self._switch(False)
                    continue
                raise self._named(error) from None

    def _switch(self, direct: bool) -> None:
        if not _DIRECT or direct == self._direct:
            return
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            new_flags = flags | _DIRECT if direct else flags & ~_DIRECT
            fcntl.fcntl(self._file, fcntl.F_SETFL, new_flags)
            self._direct = direct
        except OSError as error:
            # EINVAL: the file system has only the cache.
            if error.errno != errno.EINVAL:
                raise

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, self._path)


def sync_folder(folder: str) -> None:
    """Syncs a folder, so that the names of its files are durable."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
