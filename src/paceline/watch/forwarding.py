"""Copies the journal of one host to another, where the two share no folder.

    JournalSender   on a host that does not lead: what its files have that was not sent yet, a part at a time
    JournalCopies   on the host that leads: writes these parts into copies of the files

        runs/2026-11-23-014502-train/watch/
            rank-00000.jsonl                        of a rank of this host
            rank-00002.4711-9f86d081884c.jsonl      the copy of a file of another host, with the name of its launcher

A copy is kept equal to its file byte by byte: a part says at which byte it begins. A file that was thinned has been replaced,
and is sent again from its first byte; so are all files when another launcher leads. Such a copy takes its name only when it
is complete, so that no reader sees a rank as it was an hour ago.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.watch.journal import OWN_FILE

# Of one message. Heartbeats wait behind it: at 10 Mbit/s, for 50 ms.
PART_BYTES = 1 << 16
Answer = Literal["next", "again", "stop"]


@dataclass(frozen=True)
class FilePart:
    """A part of a file of the journal.

    Attributes:
        name: of the file.
        offset: which byte of the file it begins with; 0 begins a new copy.
        text: its bytes, each as one character (Latin-1), since a line that a crash has cut may be no UTF-8.
        is_last: whether the file had no more than this.
    """

    name: str
    offset: int
    text: str
    is_last: bool


@dataclass
class _Sent:
    """How much of a file was sent, and which file that was: one that was thinned is another one of the same name."""

    inode: int
    offset: int = 0


class JournalSender:
    """Gives what is to be sent of the journal of this host. It keeps nothing in memory but how far each file was sent.

    Args:
        folder: of the journal.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sent: dict[str, _Sent] = {}

    def begin(self) -> None:
        """All is to be sent again: another launcher leads, or the copies do not fit."""
        self._sent.clear()

    @property
    def has_begun(self) -> bool:
        """Whether anything was sent since `begin`."""
        return bool(self._sent)

    def parts(self, limit_bytes: int = PART_BYTES) -> list[FilePart]:
        """What was written since the last call, `limit_bytes` at most, as if it will arrive; [] where there is nothing new."""
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
                    sent = self._sent[name] = _Sent(status.st_ino)
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
class _Copy:
    """A copy that is written.

    Attributes:
        path: its name once it is complete.
        staged: where it is written until then; None afterwards.
        size: its bytes so far.
    """

    path: Path
    staged: Path | None
    size: int = 0


class JournalCopies:
    """Writes copies of the journals of other hosts.

    Args:
        folder: of this host's journal.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._copies: dict[tuple[str, str], _Copy] = {}  # by sender and file
        self._shares_folder: dict[str, bool] = {}  # by sender

    def add(self, sender: str, parts: tuple[FilePart, ...]) -> Answer:
        """Takes parts of another host's files.

        Args:
            sender: a name that no other launcher has.
            parts: of its files.

        Returns:
            What the sender is to do: send the "next" parts, all "again", or "stop", as it shares the folder.

        Raises:
            OSError: a copy cannot be written.
        """
        if sender not in self._shares_folder:
            self._shares_folder[sender] = _is_marked(self.folder, sender)
        if self._shares_folder[sender]:
            return "stop"
        for part in parts:
            if not self._write(sender, part):
                return "again"
        return "next"

    def _write(self, sender: str, part: FilePart) -> bool:
        """Writes a part; False where it does not fit to what was written."""
        if not OWN_FILE.fullmatch(part.name):
            return True  # no file of a journal: there is nothing to keep of it
        key = (sender, part.name)
        if part.offset == 0:
            path = self.folder / part.name.replace(".jsonl", f".{_file_word(sender)}.jsonl")
            self._copies[key] = _Copy(path, path.with_name(f".{path.name}"))
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
    """Leaves a mark by which `JournalCopies` sees that a sender has the same folder.

    A new name, and no look at what lies there: what another host has written into a network drive may be seen half a minute
    later, but a name that exists cannot be made anew.
    """
    with suppress(FileExistsError):
        os.close(os.open(_mark_of(folder, sender), os.O_CREAT | os.O_EXCL | os.O_WRONLY))


def unmark(folder: Path, sender: str) -> None:
    """Takes the mark away."""
    with suppress(OSError):  # it is gone already, or it stays, and says nothing to anybody
        _mark_of(folder, sender).unlink()


def _is_marked(folder: Path, sender: str) -> bool:
    path = _mark_of(folder, sender)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return True
    path.unlink()
    return False


def _mark_of(folder: Path, sender: str) -> Path:
    return folder / f".host-{_file_word(sender)}"


def _file_word(sender: str) -> str:
    """A launcher's name as part of a file's name: it comes from another host."""
    return re.sub(r"[^\w+-]", "_", sender)[:80]
