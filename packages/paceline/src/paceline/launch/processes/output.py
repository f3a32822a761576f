"""The output of the processes: directly to the terminal, to files, or copied by the launcher to both."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import IO, Any

from paceline.launch.launcher import Process

# The suffix of a log file by file descriptor. The descriptor's number is also the bit of the stream in `tee`.
_BITS = {1: "out", 2: "err"}
_CHUNK = 1 << 16


def say_error(error: object) -> None:
    """Prints an error or a problem that does not end the command."""
    print(f"paceline.LaunchError: {error}", file=sys.stderr, flush=True)


@dataclass
class _OutputPipe:
    """A stream of a process that the launcher copies."""

    read: int
    mark: bytes
    terminal: Any
    file: IO[bytes] | None
    at_line_start: bool = True


class Output:
    """The output streams of the processes of one round.

    Args:
        log_dir: directory for a file of each process and stream, `rank0.out`, `rank0.err`, ...; None for none.
        tee: by local rank, the streams that go to the terminal through the launcher: 1 stdout, 2 stderr, 3 both.
            None, or 0 without `log_dir`: the processes write there themselves.
        mark: the prefix of each line on the terminal; ${rank} and ${local_rank} are replaced.
        ranks: the ranks whose output is shown on the terminal; None for all.
    """

    def __init__(
        self,
        log_dir: str | None,
        tee: Mapping[int, int] | None,
        mark: str = "[rank${rank}]: ",
        ranks: Collection[int] | None = None,
    ) -> None:
        self.log_dir = log_dir
        self.tee = tee
        self.ranks = ranks
        self.mark = Template(mark)
        self.pipes: dict[int, _OutputPipe] = {}
        self._child_ends: list[int] = []

    def open(self, process: Process, attempt: int) -> dict[int, int]:
        """Opens the streams of a process. Returns the descriptors that replace 1 and 2; a stream that stays is left out."""
        ends: dict[int, int] = {}
        copied_streams = (self.tee or {}).get(process.local_rank, 0)
        for bit, name in _BITS.items():
            is_copied = self._shows(process) and bool(copied_streams & bit)
            if self.log_dir is None and not self._shows(process):
                ends[bit] = os.open(os.devnull, os.O_WRONLY)
                continue
            if self.log_dir is None and not is_copied:
                continue  # the process writes to the terminal itself
            file = None
            if self.log_dir is not None:
                file = (Path(self.log_dir) / f"rank{process.rank}.{name}").open("ab", buffering=0)
                if attempt:
                    file.write(f"--- restart {attempt} ---\n".encode())
            if is_copied:
                names = {"rank": process.rank, "local_rank": process.local_rank, "role_name": "rank"}
                ends[bit] = self._pipe(self.mark.safe_substitute(names), bit, file)
            elif file is not None:
                # The process writes into the file itself, so nothing is lost if the launcher dies.
                ends[bit] = os.dup(file.fileno())
                file.close()
        self._child_ends += ends.values()
        return ends

    def is_shared(self, process: Process) -> bool:
        """Returns whether a process writes its standard error to the terminal, as others do, and not to a file."""
        return self.log_dir is None and self._shows(process)

    def _shows(self, process: Process) -> bool:
        """Returns whether the terminal shows the output of a process."""
        return self.ranks is None or process.rank in self.ranks

    def _pipe(self, mark: str, bit: int, file: IO[bytes] | None) -> int:
        read, write = os.pipe()
        os.set_blocking(read, False)
        terminal = sys.stdout if bit == 1 else sys.stderr
        self.pipes[read] = _OutputPipe(read, mark.encode(), terminal, file)
        return write

    def started(self) -> None:
        """Closes the processes' ends of the pipes in the launcher, after all processes were started.

        While the launcher holds one, a pipe never reports the end of the stream.
        """
        for end in self._child_ends:
            os.close(end)
        self._child_ends.clear()

    def copy(self, read: int) -> bool:
        """Copies the data that a pipe holds. Returns False at the end of the stream."""
        pipe = self.pipes[read]
        try:
            data = os.read(read, _CHUNK)
        except BlockingIOError:
            return True
        if pipe.file is not None:
            pipe.file.write(data)
        if data:
            show(pipe.terminal, _marked(data, pipe))
        return bool(data)

    def finish(self) -> None:
        """Copies the data that is left, without waiting for more, and closes all pipes and files."""
        for read, pipe in self.pipes.items():
            # A process that was left behind may hold the pipe open, so its end may never come.
            while self._has_data(read) and self.copy(read):
                pass
            if not pipe.at_line_start and pipe.mark:
                show(pipe.terminal, b"\n")
            self._close(pipe)
        self.pipes.clear()

    def leave(self) -> None:
        """In a forked process: closes the launcher's ends of the pipes, and its files."""
        for pipe in self.pipes.values():
            self._close(pipe)
        self.pipes.clear()
        self.started()

    @staticmethod
    def _has_data(read: int) -> bool:
        import select

        return bool(select.select([read], [], [], 0)[0])

    @staticmethod
    def _close(pipe: _OutputPipe) -> None:
        os.close(pipe.read)
        if pipe.file is not None:
            pipe.file.close()


def show(terminal: Any, data: bytes) -> None:
    """Writes the bytes of a process without decoding them, because its encoding may differ from that of the terminal.

    The stream of a notebook takes only text.
    """
    if hasattr(terminal, "buffer"):
        terminal.flush()
        terminal.buffer.write(data)
    else:
        terminal.write(data.decode(errors="backslashreplace"))
    terminal.flush()


def _marked(data: bytes, pipe: _OutputPipe) -> bytes:
    """Puts the mark of the pipe before each line. A line may arrive in several pieces."""
    if not pipe.mark:
        return data
    marked = [pipe.mark + line for line in data.splitlines(keepends=True)]
    if marked and not pipe.at_line_start:  # the first piece continues a line
        marked[0] = marked[0].removeprefix(pipe.mark)
    pipe.at_line_start = data.endswith((b"\n", b"\r"))
    return b"".join(marked)
