"""`FollowedFile`: reads what other processes append to a file, line by line."""

from __future__ import annotations

import os
from pathlib import Path

_HEAD_BYTES = 100  # the first bytes of a file tell whether it is still the same one


class FollowedFile:
    """Follows a file that grows. One that was replaced, or was emptied, is read from its beginning.

    Args:
        path: of the file, which need not be there yet.

    Attributes:
        is_there: whether it could be read at least once.
        begins_anew: whether the last call of `read` has found another file than the one before it.
        rest: what stands behind the last complete line. `read` returns it together with the rest of its line.
    """

    def __init__(self, path: str | Path) -> None:
        self.is_there = False
        self.begins_anew = False
        self.rest = b""
        self._path = path
        self._head = b""
        self._state = (0, 0)  # size and time of the last change when it was last read
        self._offset = 0

    def read(self) -> list[bytes]:
        """Returns the lines that were completed since the last call, without their ends.

        Raises:
            OSError: the file is there and cannot be read.
        """
        self.begins_anew = False
        try:
            status = os.stat(self._path)
            state = status.st_size, status.st_mtime_ns
            if state == self._state:
                return []
            with open(self._path, "rb") as file:
                head = file.read(_HEAD_BYTES)
                self.begins_anew = not head.startswith(self._head) or status.st_size < self._offset
                if self.begins_anew:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []  # while it is replaced, the file is missing for a moment on some network file systems
        self.is_there = True
        self._head = head
        self._state = state
        *lines, self.rest = data.split(b"\n")
        self._offset += len(data) - len(self.rest)
        return lines
