"""The journal is the folder of a watched run; this module writes and reads the files in it.

    runs/2026-11-23-014502-train/watch/
        run.json            `RunHeader`, written once at the start
        launcher-0.jsonl    one for each host
        rank-00000.jsonl    one for each rank

Each process appends lines (`records.py`) to a file of its own, which no other process writes. A reader remembers how far it
has read each file, so that it can follow a run that goes on. The times in a file always increase. A file that grows too large
is thinned (`thinning.py`) and replaced; by the times, its reader leaves out lines that it has read already.

Hosts that share no folder have one each. The host that leads also has copies of the files of the others
(`forwarding.py`), which are read in the same way.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paceline.base.errors import ConfigError
from paceline.base.files import expanded, replace_text
from paceline.base.followed_file import FollowedFile
from paceline.base.json_fields import read_file
from paceline_lens.watch.records import VERSION, JournalRecord, line_of, record_of
from paceline_lens.watch.thinning import thinned

HEADER = "run.json"
# It also matches the copies of files of hosts that do not share the folder (`forwarding.py`).
_ANY_FILE = re.compile(r"(rank|launcher)-(\d+)(?:\.[\w+-]+)?\.jsonl")
_LIMIT_BYTES = 8 << 20  # the size of a file: about 8 hours with all ticks; older ticks are then thinned
_MOMENT = 1e-6  # the least difference between the times of two lines of a file, in seconds
_TAIL_BYTES = 1 << 16
_LATE_S = 30.0  # clocks of hosts differ by less than this, and ranks start within less than this


@dataclass(frozen=True)
class RunHeader:
    """What is known about a run at its start.

    Attributes:
        version: the version of the format.
        name: the name of the run.
        command: the words of the command line.
        script: the file, module or program that each process runs.
        host, pid: the host and process id of the launcher.
        started: the start, in seconds since the epoch.
        procs: the number of processes in total, as far as the launcher knows it at the start.
        nodes: the number of hosts in total.
    """

    version: int = VERSION
    name: str = ""
    command: list[str] = field(default_factory=list)
    script: str = ""
    host: str = ""
    pid: int = 0
    started: float = 0.0
    procs: int = 1
    nodes: int = 1


@dataclass(frozen=True)
class _FormatVersion:
    version: int


def rank_file(rank: int) -> str:
    """Returns the name of a rank's file."""
    return f"rank-{rank:05d}.jsonl"


def launcher_file(node: int) -> str:
    """Returns the name of the file of a host's launcher."""
    return f"launcher-{node}.jsonl"


def write_header(folder: Path, header: RunHeader) -> None:
    """Makes the folder of a watched run, and writes the header."""
    replace_text(folder / HEADER, json.dumps(asdict(header), indent=1) + "\n")


def add_header(folder: Path, header: RunHeader) -> None:
    """Writes the header, unless the folder has one already."""
    if not (folder / HEADER).exists():
        write_header(folder, header)


def read_header(folder: Path) -> RunHeader:
    """Reads the header of a run.

    Raises:
        ConfigError: `watch-folder`, if no run is recorded there; `watch-version`, if a newer Paceline wrote it.
    """
    path = folder / HEADER
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        version: int = read_file(_FormatVersion, contents, HEADER).version
        header: RunHeader = read_file(RunHeader, contents if version <= VERSION else {}, HEADER)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "watch-folder",
            f"no watched run is recorded in {folder}.",
            why=f"{path}: {error.strerror if isinstance(error, OSError) else error}",
            fix="name the folder that `paceline launch --watch` printed; `paceline ps` lists the runs of this machine",
        ) from None
    if version > VERSION:
        raise ConfigError(
            "watch-version",
            f"the run in {folder} was recorded by a newer Paceline.",
            why=f"{path} says version {version}, and this Paceline reads up to version {VERSION}",
            fix="show it with the Paceline that recorded it, or update this one",
        )
    return header


def watch_folder(path: str | Path) -> Path:
    """Returns the folder of the journal, given that folder or the folder of the run."""
    folder = expanded(path)
    inside = folder / "watch"
    if not (folder / HEADER).exists() and inside.is_dir():
        return inside
    return folder


# -- writing -------------------------------------------------------------------------------------------------------


class JournalWriter:
    """Appends lines to one file; any thread of the process may call it.

    In a process that was forked from this one it writes nothing, since the file belongs to this process.

    Args:
        path: the path of the file; its folder is made if it is missing.
        limit_bytes: the size above which the file is thinned.

    Raises:
        OSError: if the file cannot be opened. `append` and `write` raise it if the lines cannot be written.
    """

    def __init__(self, path: Path, limit_bytes: int = _LIMIT_BYTES) -> None:
        self.path = path
        self._limit = limit_bytes
        self._pid = os.getpid()
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._size = os.fstat(self._file).st_size
        self._last, self._broken = self._end_of_file()

    def append(self, record: JournalRecord, t: float | None = None) -> None:
        """Adds a line with the time `t`, or now. The time is raised if it is not later than that of the line before."""
        self.write([(record, t)])

    def write(self, records: Iterable[tuple[JournalRecord, float | None]]) -> None:
        """Adds several lines at once."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._file < 0:
                return
            lines = []
            for record, t in records:
                moment = max(time.time() if t is None else t, self._last + _MOMENT)
                self._last = round(moment, 6)
                lines.append(line_of(record, self._last))
            self._add(b"".join(lines))
            if self._size > self._limit:
                self._thin()

    def close(self) -> None:
        """Closes the file; later calls of `append` do nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _add(self, data: bytes) -> None:
        """Writes whole lines. An incomplete line that a full disk or a crash left is ended first, so that no other joins it."""
        if self._broken:
            data = b"\n" + data
        # It stays set if the write below raises in the middle of a line.
        self._broken = True
        _write_all(self._file, data)
        self._broken = False
        self._size += len(data)

    def _end_of_file(self) -> tuple[float, bool]:
        """Returns the time of the last complete line, and whether the file ends within a line."""
        tail = os.pread(self._file, _TAIL_BYTES, max(0, self._size - _TAIL_BYTES))
        for line in reversed(tail.split(b"\n")):
            try:
                return record_of(line)[0], not tail.endswith(b"\n")
            except ValueError:
                continue
        return 0.0, bool(tail) and not tail.endswith(b"\n")

    def _thin(self) -> None:
        """Replaces the file by one with fewer lines. A reader sees either the old file or the new one, never a part."""
        temporary = self.path.with_name(f".{self.path.name}.{self._pid}")
        lines = os.pread(self._file, self._size, 0).splitlines(keepends=True)
        head, kept_lines = thinned(lines, self._limit // 2)
        data = b"".join([head, *kept_lines])
        new = os.open(temporary, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_all(new, data)
            temporary.replace(self.path)
        except OSError:
            os.close(new)
            temporary.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file = new
        self._size = len(data)


def _write_all(file: int, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += os.write(file, data[written:])


# -- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JournalLine:
    """One line as it is read.

    Attributes:
        role: "rank" or "launcher", the writer of the file.
        number: the number of that rank, or of the launcher's host.
        t: seconds since the epoch, by the clock of the host that wrote the line.
        record: the contents of the line.
    """

    role: str
    number: int
    t: float
    record: JournalRecord


class _FollowedJournal(FollowedFile):
    """A file of the journal.

    Attributes:
        last: the time of the last line that was read.
        seen: lines up to this time were already read from the file that this one has replaced.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.last = 0.0
        self.seen = 0.0


class JournalReader:
    """Follows the journal of a run: each call of `read` returns the lines that were added since the last call.

    Args:
        path: a run's folder, or the folder of its journal.

    Attributes:
        folder: the folder of the journal.
        header: the header of the run.
        damaged: the number of lines so far that could not be read.
        unknown: the number of lines so far of kinds that this version does not know.
        has_late_file: whether the last call of `read` found a new file that begins long before the lines that had been read.
            It is a file of another host, which was copied when this host became the leader.

    Raises:
        ConfigError: `watch-folder`, `watch-version`.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = watch_folder(path)
        self.header = read_header(self.folder)
        self.damaged = 0
        self.unknown = 0
        self.has_late_file = False
        self._newest = 0.0  # moment of the last line of all
        self._files: dict[str, _FollowedJournal] = {}

    def read(self) -> list[JournalLine]:
        """Returns new lines of all files, in the order of their times. An incomplete last line is left for the next call."""
        lines: list[JournalLine] = []
        self.has_late_file = False
        try:
            names = sorted(os.listdir(self.folder))
        except FileNotFoundError:
            read_header(self.folder)  # it raises an error with a code and a fix, if the folder was removed
            raise
        for name in names:
            match = _ANY_FILE.fullmatch(name)
            if match:
                is_new = name not in self._files
                lines_of_file = self._read_file(name, match[1], int(match[2]))
                if is_new and lines_of_file and lines_of_file[0].t < self._newest - _LATE_S:
                    self.has_late_file = True
                lines += lines_of_file
        lines.sort(key=lambda line: line.t)
        if lines:
            self._newest = max(self._newest, lines[-1].t)
        return lines

    def _read_file(self, name: str, role: str, number: int) -> list[JournalLine]:
        followed = self._files.setdefault(name, _FollowedJournal(self.folder / name))
        texts = followed.read()
        if followed.begins_anew:
            followed.seen = followed.last  # the file was thinned: it has lines again that were read before
        lines = []
        for text in texts:
            line = self._line(text, role, number)
            if line is None or line.t <= followed.seen:
                continue
            followed.last = max(followed.last, line.t)
            lines.append(line)
        return lines

    def _line(self, text: bytes, role: str, number: int) -> JournalLine | None:
        if not text.strip():
            return None  # an empty line follows an incomplete one that was ended after a crash
        try:
            t, record = record_of(text)
        except ValueError:
            self.damaged += 1
            return None
        if record is None:
            self.unknown += 1
            return None
        return JournalLine(role, number, t, record)
