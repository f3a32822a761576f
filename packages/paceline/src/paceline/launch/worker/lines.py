"""Whole lines: processes that write to one terminal, pipe or file never share a line.

Python writes a line to a pipe in pieces: at the end of a block, or with PYTHONUNBUFFERED=1 the text and its newline apart.
The system lets other writers in between the pieces of a write of more than 4096 bytes. So each process writes a line by one
call, which holds a lock that the processes of a host share.

A text without a newline appears when it is flushed. What another process writes then begins a new line.

On a terminal, lines of standard output begin with the rank, except those of the first process of a host. In a pipe or a file
they stay as the script wrote them, for the programs that read them.
"""

from __future__ import annotations

import fcntl
import io
import os
import sys
from pathlib import Path
from typing import Any

from paceline.base import env as environment

_LINE_ENDS = b"\n\r"


class SharedStream(io.RawIOBase):
    """A raw stream that several processes write to.

    Args:
        descriptor: of the terminal, pipe or file; it stays open.
        folder: where the processes of this host keep the lock. Its file has the id of the process whose line is unfinished.
        mark: what each line begins with; b"" for nothing.
    """

    def __init__(self, descriptor: int, folder: Path, mark: bytes = b"") -> None:
        super().__init__()
        self._mark = mark
        self._is_at_line_start = True
        self._descriptor = descriptor
        self._waiting = bytearray()
        # Standard output and error are often one file, which then has one lock.
        status = os.fstat(descriptor)
        self._lock = os.open(
            folder / f"lines-{status.st_dev}-{status.st_ino}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )

    def write(self, data: Any) -> int:
        """Writes lines that have ended; an unfinished one waits for its end, or for `flush`."""
        # `TextIOWrapper` passes a long text on before its newline comes.
        self._waiting += data
        if b"\n" in self._waiting:
            self.flush()
        return len(data)

    def flush(self) -> None:
        text = bytes(self._waiting)
        self._waiting.clear()
        if text:
            self._write(text)

    def _write(self, text: bytes) -> None:
        # A lock of the process, and not of the open file: children that a script forks have the file, too.
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            unfinished_by = os.pread(self._lock, 20, 0)
            own_id = b"%d" % os.getpid()
            # A bar returns to the begin of the line by itself.
            if unfinished_by not in (b"", own_id) and text[:1] not in (b"\n", b"\r"):
                _write_all(self._descriptor, b"\n")
                self._is_at_line_start = True
            _write_all(self._descriptor, self._marked(text))
            is_finished = text[-1] in _LINE_ENDS
            if unfinished_by or not is_finished:
                os.ftruncate(self._lock, 0)
            if not is_finished:
                os.pwrite(self._lock, own_id, 0)
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def _marked(self, text: bytes) -> bytes:
        """Returns the text with the mark before each of its lines; a bar, which returns to the begin of its line, has none."""
        if not self._mark or b"\r" in text:
            return text
        lines = [self._mark + line for line in text.splitlines(keepends=True)]
        if not self._is_at_line_start:
            lines[0] = lines[0].removeprefix(self._mark)
        self._is_at_line_start = text.endswith(b"\n")
        return b"".join(lines)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def write_whole_lines(report: Path) -> None:
    """Makes this process write whole lines to its standard output and error.

    Args:
        report: the file for its traceback; those of the other processes of this host are in the same folder.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        stream.flush()
        mark = ""
        if name == "stdout" and stream.isatty() and (environment.get("LOCAL_RANK") or 0) > 0:
            mark = f"[rank{environment.get('RANK')}]: "
        raw = SharedStream(stream.fileno(), report.parent, mark.encode())
        # Without a buffer of bytes, as under PYTHONUNBUFFERED: only an unfinished line waits.
        lines = io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)  # type: ignore[type-var]
        setattr(sys, name, lines)
