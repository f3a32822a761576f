"""`Delivery` sends the values of one tracker from a thread, so that training never waits for a network. `mlflow.py` uses it.

    log()   -> a line in unsent-mlflow-<id>.jsonl (microseconds)      the training thread
            -> send(address, entries), many lines in one request      a thread, at most twice a second
    finish() -> waits until all is sent, for a limited time; then the file is deleted

Values stay in the file while the server does not answer, also if this process dies. A run that is continued sends them, and so
does the command `paceline trackers FILE`. Each value keeps the time at which it was logged.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paceline.base.errors import Problem, TrackerError
from paceline.base.log import logger, warn_once

VERSION = 1
# What one request carries at most; MLflow takes 1000 values.
_MAX_VALUES = 1000
_MAX_READ_BYTES = 1 << 20


class RefusedError(Exception):
    """The server has refused these values for good, so that it is no use to send them again."""


@dataclass(frozen=True)
class DeliveryEntry:
    """The values of one call of `log`.

    Attributes:
        t: the time of the call, in seconds since the epoch.
        step: the optimizer step, if the caller counts steps.
        values: numbers by name.
        status: how the run ended; only the last entry has one.
    """

    t: float
    step: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    status: str | None = None

    def to_line(self) -> bytes:
        """Returns the entry as a line of JSON; Python reads back the NaN and Infinity that it writes."""
        return json.dumps([self.t, self.step, self.values, self.status]).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> DeliveryEntry:
        """Returns the entry of a line."""
        return cls(*json.loads(line))


class Deliverable(Protocol):
    """A tracker whose values a thread sends, since its client would wait for the server."""

    @property
    def name(self) -> str:
        """The name of the tracker."""

    def address(self) -> dict[str, Any]:
        """Returns what another process needs to send values to the same run: plain JSON without secrets; "id" is the run."""

    def numbers_of(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Returns the values that this tracker accepts."""

    @staticmethod
    def send(address: Mapping[str, Any], entries: Sequence[DeliveryEntry]) -> None:
        """Sends entries, at most 1000 values. It may be called again with entries that have arrived already.

        Any error means: try again later. `RefusedError` says that the server will never take them.
        """


class Delivery:
    """Delivers the values of one tracker.

    Args:
        tracker: the tracker, which has been started.
        folder: the folder of the run.
        interval_s: the pause between two requests.
        longest_pause_s: the longest pause between attempts while the server does not answer; the first is `interval_s`.
        max_bytes: the largest size of the file; values that are logged while it is full are lost, with a warning.
    """

    def __init__(
        self,
        tracker: Deliverable,
        folder: Path,
        *,
        interval_s: float = 0.5,
        longest_pause_s: float = 10.0,
        max_bytes: int = 256 << 20,
    ) -> None:
        self.tracker = tracker
        self.address = tracker.address()
        self.path = folder / f"unsent-{tracker.name}-{self.address['id']}.jsonl"
        self.error: Exception | None = None
        self.lost = 0
        self._interval_s = interval_s
        self._longest_pause_s = longest_pause_s
        self._max_bytes = max_bytes
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        self._file, self._start = _open(self.path, tracker.name, self.address)
        self._end = os.fstat(self._file).st_size
        self._sender = Sender(tracker.name, type(tracker).send, self.address)
        self._thread = threading.Thread(target=self._run, name=f"tracker {tracker.name}", daemon=True)
        if self._end > self._start:  # a process of this run that died has left values in the file
            self._work.set()
        self._thread.start()
        for path in sorted(folder.glob(f"unsent-{tracker.name}-*.jsonl")):
            if path != self.path:
                logger("observe").warning("values of an earlier run were never sent: `paceline trackers %s`.", path)

    def put(self, values: Mapping[str, Any], step: int | None) -> None:
        """Writes values to the file, from which the thread sends them soon.

        Raises:
            TrackerError: `tracker-forked`, in a process that was forked from the one that trains.
        """
        numbers = self.tracker.numbers_of(values)
        if numbers:
            self._append(DeliveryEntry(round(time.time(), 3), step, numbers))

    def finish(self, status: str, timeout_s: float) -> Problem | None:
        """Sends the remaining values and the status of the run, for at most `timeout_s`; returns what could not be sent."""
        if os.getpid() != self._owner:
            return None
        self._append(DeliveryEntry(round(time.time(), 3), status=status))
        self._closing.set()
        # The thread may have sent the last entry and waited for work again before `_closing` was set.
        self._work.set()
        self._thread.join(timeout_s)
        arrived = not self._thread.is_alive()
        self._abandoned.set()
        if arrived:
            os.close(self._file)
            self.path.unlink()
            return self._refusals()
        # The file stays open, since the thread may still read it. Without the lock, `paceline trackers` may send it now.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return self._unsent(timeout_s)

    def _append(self, entry: DeliveryEntry) -> None:
        # A fork has no copy of the thread, and a lock that the thread held at that moment would never be released.
        if os.getpid() != self._owner:
            raise TrackerError(
                "tracker-forked",
                f"values for {self.tracker.name} were logged in a process that was forked from the one that trains.",
                why=f"process {os.getpid()} is a fork of {self._owner}, as workers of a loader are",
                fix="return the values to the training process, and log them there",
            )
        line = entry.to_line()
        with self._lock:
            # The status of the run is one short line, which is kept even if the file is full.
            if self._end + len(line) > self._max_bytes and entry.status is None:
                self.lost += len(entry.values)
                why = f"{self.path} has reached {self._max_bytes:,} bytes while the server does not answer"
                warn_once("observe", f"values for {self.tracker.name} are lost from step {entry.step} on: {why}.")
                return
            os.pwrite(self._file, line, self._end)
            self._end += len(line)
        self._work.set()

    def _run(self) -> None:
        offset = self._start
        pause = self._interval_s
        while not self._abandoned.is_set():
            self._work.wait()
            lines = self._read(offset)
            if not lines:
                if self._is_empty_at(offset):
                    offset = self._start
                    if self._closing.is_set():
                        return
                continue
            try:
                self._sender.send([DeliveryEntry.of_line(line) for line in lines])
            # Clients of trackers raise errors of many kinds for an outage. It is logged once, and the lines are sent again.
            except Exception as error:
                self._note_outage(error)
                self._rest(pause)
                pause = min(2 * pause, self._longest_pause_s)
                continue
            if self.error is not None:
                logger("observe").warning(
                    "%s answers again: the values that were kept are being sent.", self.tracker.name
                )
            self.error = None
            pause = self._interval_s
            offset += sum(map(len, lines))
            self._closing.wait(self._interval_s)

    def _rest(self, pause_s: float) -> None:
        """Waits before another attempt, but at most a second more once `finish` waits for the end."""
        if not self._closing.wait(pause_s):
            return
        self._abandoned.wait(min(pause_s, 1.0))

    def _read(self, offset: int) -> list[bytes]:
        """Reads whole lines from `offset` on."""
        data = os.pread(self._file, _MAX_READ_BYTES, offset)
        while data and b"\n" not in data:  # a single line is longer than one read
            more = os.pread(self._file, _MAX_READ_BYTES, offset + len(data))
            data += more
            if not more:
                return []
        return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)

    def _is_empty_at(self, offset: int) -> bool:
        """Returns whether everything was sent; if so, empties the file, so that it stays small while the server answers."""
        # The lock keeps `_append` from adding a line between the comparison and the truncation, which would lose it.
        with self._lock:
            if self._end != offset:
                return False
            os.ftruncate(self._file, self._start)
            self._end = self._start
            self._work.clear()
            return True

    def _note_outage(self, error: Exception) -> None:
        if self.error is None:
            logger("observe").warning(
                "%s does not answer: %s. Training goes on; values are kept in %s.",
                self.tracker.name, _first_line(error), self.path,
            )  # fmt: skip
        self.error = error

    def _unsent(self, timeout_s: float) -> Problem:
        reason = "it is slower than the values come"
        if self.error is not None:
            reason = _first_line(self.error)
        what = f"the last values for {self.tracker.name} could not be sent; they are kept in {self.path}."
        if self.lost:
            what += f" {self.lost:,} values were lost before, since the file was full."
        return Problem(
            "tracker-unsent",
            what,
            why=[
                f"the last attempt: {reason}",
                f"tried for {timeout_s:g} s after the end (PACELINE_TRACKER_FLUSH_S)",
            ],
            fix=f"once the server answers: `paceline trackers {self.path}`",
        )

    def _refusals(self) -> Problem | None:
        refused = self._sender.refused
        if not refused and not self.lost:
            return None
        why = [f"{name}: {reason}" for name, reason in list(refused.items())[:5]]
        if self.lost:
            why.append(f"{self.lost:,} values were logged while {self.path.name} was full")
        return Problem(
            "tracker-refused",
            f"{self.tracker.name} did not take all values; all others were sent.",
            why=why,
            fix="give these values other names, or leave them out of `log`",
        )


class Sender:
    """Sends entries in portions that one request can carry, and leaves out values that the server refuses.

    Attributes:
        refused: the first reason for each refused value, by name.
    """

    def __init__(
        self, name: str, send: Callable[[Mapping[str, Any], Sequence[DeliveryEntry]], None], address: Mapping[str, Any]
    ) -> None:
        self._name = name
        self._send = send
        self._address = address
        self.refused: dict[str, str] = {}

    def send(self, entries: Sequence[DeliveryEntry]) -> None:
        """Sends all entries in order. If the server does not answer, it raises the tracker's error."""
        for portion in _portions(entries):
            self._send_or_divide(portion)

    def _send_or_divide(self, entries: Sequence[DeliveryEntry]) -> None:
        try:
            self._send(self._address, entries)
        except RefusedError as error:
            # A server refuses a whole request for one bad value and need not say which. Halves find it in few requests, and
            # all other values arrive.
            halves = _halves(entries)
            if halves is None:
                self._note(entries[0], error)
                return
            for half in halves:
                self._send_or_divide(half)

    def _note(self, entry: DeliveryEntry, error: RefusedError) -> None:
        subject = next(iter(entry.values), f"status {entry.status}")
        if subject not in self.refused:
            self.refused[subject] = _first_line(error)
            if len(self.refused) == 1:
                logger("observe").warning(
                    "%s refuses %s, which is left out: %s", self._name, subject, self.refused[subject]
                )


def _first_line(error: Exception) -> str:
    """Returns the first line of an error's message, or its class if there is no message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _portions(entries: Sequence[DeliveryEntry]) -> list[list[DeliveryEntry]]:
    """Groups entries into portions of at most 1000 values; an entry with more values is divided."""
    portions: list[list[DeliveryEntry]] = [[]]
    room = _MAX_VALUES
    for entry in entries:
        for part in _parts(entry):
            if len(part.values) > room:
                portions.append([])
                room = _MAX_VALUES
            portions[-1].append(part)
            room -= len(part.values)
    return [portion for portion in portions if portion]


def _parts(entry: DeliveryEntry) -> list[DeliveryEntry]:
    """Divides an entry into parts of at most 1000 values."""
    if len(entry.values) <= _MAX_VALUES:
        return [entry]
    items = list(entry.values.items())
    parts = []
    for start in range(0, len(items), _MAX_VALUES):
        values = dict(items[start : start + _MAX_VALUES])
        parts.append(DeliveryEntry(entry.t, entry.step, values))
    return parts


def _halves(entries: Sequence[DeliveryEntry]) -> tuple[list[DeliveryEntry], list[DeliveryEntry]] | None:
    """Returns two halves of what was refused; None for a single value."""
    if len(entries) > 1:
        middle = len(entries) // 2
        return list(entries[:middle]), list(entries[middle:])
    entry = entries[0]
    if len(entry.values) <= 1:
        return None
    items = list(entry.values.items())
    middle = len(items) // 2
    first = DeliveryEntry(entry.t, entry.step, dict(items[:middle]))
    second = DeliveryEntry(entry.t, entry.step, dict(items[middle:]))
    return [first], [second]


def _open(path: Path, tracker: str, address: Mapping[str, Any]) -> tuple[int, int]:
    """Opens the file; returns it and the position of its first entry.

    Entries of a process that died stay, except for an incomplete last line.
    """
    header = json.dumps({"version": VERSION, "tracker": tracker, "address": dict(address)}).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Only the user may read the file, since an address may contain a login.
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    # The lock tells `paceline trackers` that a process sends this file already. It ends with the process.
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    old_content = path.read_bytes()
    whole_lines = old_content[: old_content.rfind(b"\n") + 1]
    # The header is written again: the server of the same run may have another address now.
    _, _, entries = whole_lines.partition(b"\n")
    content = header + entries
    if content != old_content:
        os.pwrite(file, content, 0)
        os.ftruncate(file, len(content))
    return file, len(header)
