"""Files that are written past the page cache, where the system can: a checkpoint is not read again by who writes it.

The cache would cost a copy and fresh pages for every byte, several times what the disk takes, and push out what the loop
reads. What lies at a page's beginning in memory goes to the disk from there; the rest is collected first.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Any

import numpy

_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux alone has it
_PAGE = 4096
_COLLECT_BYTES = 4 << 20


class DurableFile:
    """A file whose `with` block ends with its bytes on the disk.

    Raises:
        OSError: as any file does.
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
        """Nothing: the end of the `with` block is what counts."""

    def tell(self) -> int:
        """Bytes written."""
        return self._bytes

    def close(self) -> None:
        """Ends as the `with` block does."""
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
                # A file system that takes the switch and refuses the write, or an end of the disk in mid-page.
                if error.errno == errno.EINVAL and self._direct:
                    self._switch(False)
                    continue
                raise self._named(error) from None

    def _switch(self, direct: bool) -> None:
        if not _DIRECT or direct == self._direct:
            return
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | _DIRECT if direct else flags & ~_DIRECT)
            self._direct = direct
        except OSError as error:
            if error.errno != errno.EINVAL:  # which says that this file system has no other way than the cache
                raise

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, self._path)


def sync_folder(folder: str) -> None:
    """Makes the names in a folder durable."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
