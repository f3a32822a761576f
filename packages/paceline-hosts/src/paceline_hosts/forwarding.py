"""Copies the journal of one host to another if the two share no folder. The launchers send the parts with their heartbeats.

    JournalSender   on a host that does not lead: reads what was not sent yet, part by part
    JournalCopies   on the host that leads: writes these parts into copies of the files

        runs/2026-11-23-014502-train/watch/
            rank-00000.jsonl                        of a rank of this host
            rank-00002.4711-9f86d081884c.jsonl      the copy of a file of another host, with the name of its launcher

A copy is equal to its file byte by byte: a part says at which byte it begins. A file that was thinned is a new file, and is
sent again from its first byte. So are all files when another launcher leads. Such a copy gets its name only when it is
complete, so that no reader shows a rank as it was an hour ago.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.base.files import is_there
from paceline.launch.recordings import OWN_FILE

# The most bytes of a message. A heartbeat waits until the message is sent: 50 ms at 10 Mbit/s.
PART_BYTES = 1 << 16
Answer = Literal["next", "again", "stop"]


@dataclass(frozen=True)
class FilePart:
    """A part of a file of the journal.

    Attributes:
        name: the name of the file.
        offset: the position of its first byte in the file; 0 begins a new copy.
        text: its bytes, each as one character (Latin-1), since a line that a crash has cut may be no valid UTF-8.
        is_last: whether the file ended with this part.
    """

    name: str
    offset: int
    text: str
    is_last: bool


@dataclass
class _SentLines:
    """How much of a file was sent. The inode tells whether it is still the same file: thinning replaces it by another one."""

    inode: int
    offset: int = 0


class JournalSender:
    """Reads what must be sent of the journal of this host. In memory it only has how far each file was sent.

    Args:
        folder: the folder of the journal.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sent: dict[str, _SentLines] = {}

    def begin(self) -> None:
        """Begins again with the first byte of each file, since another launcher leads, or a copy does not match its file."""
        self._sent.clear()

    @property
    def has_begun(self) -> bool:
        """Whether anything was sent since `begin`."""
        return bool(self._sent)

    def parts(self, limit_bytes: int = PART_BYTES) -> list[FilePart]:
        """Returns at most `limit_bytes` of what was written since the last call. It assumes that these parts arrive."""
        parts: list[FilePart] = []
        remaining = limit_bytes
        for name in sorted(os.listdir(self.folder)):
            if remaining <= 0:
                break
            if OWN_FILE.fullmatch(name):
                part = self._part_of(name, remaining)
                if part is not None:
                    parts.append(part)
                    remaining -= len(part.text)
        return parts

    def _part_of(self, name: str, limit_bytes: int) -> FilePart | None:
        try:
            with open(self.folder / name, "rb") as file:
                status = os.fstat(file.fileno())
                sent = self._sent.get(name)
                if sent is None or sent.inode != status.st_ino or sent.offset > status.st_size:
                    sent = self._sent[name] = _SentLines(status.st_ino)
                if sent.offset == status.st_size:
                    return None
                file.seek(sent.offset)
                data = file.read(min(limit_bytes, status.st_size - sent.offset))
        except FileNotFoundError:
            return None  # it is being replaced
        part = FilePart(name, sent.offset, data.decode("latin-1"), sent.offset + len(data) == status.st_size)
        sent.offset += len(data)
        return part


@dataclass
class _JournalCopy:
    """A copy that is being written.

    Attributes:
        path: its path when it is complete.
        staged: its path until then; None afterwards.
        size: the number of bytes so far.
    """

    path: Path
    staged: Path | None
    size: int = 0


class JournalCopies:
    """Writes copies of the journals of other hosts.

    Args:
        folder: the folder of this host's journal.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._copies: dict[tuple[str, str], _JournalCopy] = {}  # by sender and file
        self._shares_folder: dict[str, bool] = {}  # by sender

    def add(self, sender: str, parts: tuple[FilePart, ...]) -> Answer:
        """Writes parts of another host's files.

        Args:
            sender: the unique name of the launcher that sends them.
            parts: the parts.

        Returns:
            What the sender must do: send the "next" parts, send everything "again", or "stop", since it shares the folder.

        Raises:
            OSError: a copy cannot be written.
        """
        if sender not in self._shares_folder:
            self._shares_folder[sender] = is_there(_mark_of(self.folder, sender))
        if self._shares_folder[sender]:
            return "stop"
        for part in parts:
            if not self._write(sender, part):
                return "again"
        return "next"

    def _write(self, sender: str, part: FilePart) -> bool:
        """Writes a part; returns False if it does not continue what was written before."""
        if not OWN_FILE.fullmatch(part.name):
            return True  # not a file of a journal; the name comes from another host, and could be any path
        key = (sender, part.name)
        if part.offset == 0:
            path = self.folder / part.name.replace(".jsonl", f".{_file_word(sender)}.jsonl")
            self._copies[key] = _JournalCopy(path, path.with_name(f".{path.name}"))
        copy = self._copies.get(key)
        if copy is None or copy.size != part.offset:
            return False
        with open(copy.staged or copy.path, "ab" if part.offset else "wb") as file:
            copy.size += file.write(part.text.encode("latin-1"))
        if part.is_last and copy.staged is not None:
            copy.staged.replace(copy.path)
            copy.staged = None
        return True


def mark(folder: Path, sender: str) -> None:
    """Creates a file by which `JournalCopies` finds that a sender has the same folder.

    On a network drive, a host may see a file of another one half a minute late. But creating a file that exists fails at once,
    and `is_there` relies on that.
    """
    with suppress(FileExistsError):
        os.close(os.open(_mark_of(folder, sender), os.O_CREAT | os.O_EXCL | os.O_WRONLY))


def unmark(folder: Path, sender: str) -> None:
    """Removes the file of `mark`."""
    with suppress(OSError):  # it does not exist any more; or it stays, and does no harm
        _mark_of(folder, sender).unlink()


def _mark_of(folder: Path, sender: str) -> Path:
    return folder / f".host-{_file_word(sender)}"


def _file_word(sender: str) -> str:
    """Returns a launcher's name as a part of a file name. It comes from another host, and could contain a path."""
    return re.sub(r"[^\w+-]", "_", sender)[:80]
