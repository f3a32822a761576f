"""`send_file` sends the values that a run could not send. The command `paceline trackers` calls it."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from paceline.base.errors import TrackerError
from paceline.observe.trackers.tracker import TRACKERS
from paceline_lens.trackers.delivery import VERSION, DeliveryEntry, Sender


def send_file(path: Path) -> int:
    """Sends the values of a file that `Delivery` left, and deletes it; returns how many there were.

    Raises:
        TrackerError: `tracker-file`, if it is not such a file, or a run is using it; `tracker-unsent`, if the server does not
            answer; `tracker-refused`, if it refused some values (all others were sent).
    """
    try:
        file = os.open(path, os.O_RDWR)
    except OSError as error:
        raise _no_file(path, str(error)) from None
    try:
        return _send(path, file)
    finally:
        os.close(file)


def _send(path: Path, file: int) -> int:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        what = f"{path} belongs to a run that goes on."
        fix = "wait for the end of the run: it sends the values itself once the server answers"
        raise TrackerError("tracker-file", what, why="a process holds its lock", fix=fix) from None
    header_line, *lines = path.read_bytes().splitlines(keepends=True) or [b""]
    try:
        header = json.loads(header_line)
        tracker = header["tracker"]
        address = header["address"]
        entries = [DeliveryEntry.of_line(line) for line in lines if line.endswith(b"\n")]
    except (ValueError, TypeError, KeyError) as error:
        raise _no_file(path, f"its lines cannot be read: {error!r}") from None
    if header.get("version") != VERSION:
        raise _no_file(path, f"its version is {header.get('version')}, and this Paceline reads version {VERSION}")
    sender = Sender(tracker, TRACKERS.get(tracker).send, address)
    try:
        sender.send(entries)
    except Exception as error:  # each client has its own errors for a server that does not answer
        what = f"the values in {path} could not be sent to {tracker}; they are still there."
        message = " ".join(str(error).split()) or type(error).__name__
        fix = f"once the server answers: `paceline trackers {path}`"
        raise TrackerError("tracker-unsent", what, why=f"it says: {message}", fix=fix) from error
    path.unlink()
    if sender.refused:
        why = [f"{name}: {reason}" for name, reason in list(sender.refused.items())[:5]]
        what = f"{tracker} did not take all values of {path}; all others were sent."
        fix = "give these values other names, or leave them out of `log`"
        raise TrackerError("tracker-refused", what, why=why, fix=fix)
    return sum(len(entry.values) for entry in entries)


def _no_file(path: Path, why: str) -> TrackerError:
    fix = "give a file `unsent-TRACKER-ID.jsonl`, as the run's message names it, or the folder that it lies in"
    return TrackerError("tracker-file", f"{path} holds no values that wait to be sent.", why=why, fix=fix)
