"""`Ownership` knows which automatically named checkpoints this run may remove.

These are its own, and those of the run that it goes on from.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field

from paceline.checkpoint import retention
from paceline.checkpoint.format.checkpoint_format import record_of
from paceline.checkpoint.store import Store, claim

_log = logging.getLogger("paceline.checkpoint")


@dataclass
class _KnownFolder:
    """What this run knows about a folder.

    Attributes:
        runs: the names of this run and of those that it goes on from, for the manifests of its checkpoints.
        own: paths of the checkpoints that it may remove.
        others: paths of checkpoints of other runs.
        has_saved: whether this run has begun a save there.
        is_warned: whether another run that saves there was reported.
    """

    runs: list[str]
    own: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    has_saved: bool = False
    is_warned: bool = False


class Ownership:
    """Keeps apart the checkpoints of runs that save into the same folder. Ranks: only rank 0 uses it."""

    def __init__(self) -> None:
        self._name = secrets.token_hex(8)
        self._folders: dict[str, _KnownFolder] = {}

    def _of(self, folder: str) -> _KnownFolder:
        return self._folders.setdefault(folder, _KnownFolder([self._name]))

    def runs(self, folder: str) -> list[str]:
        """Returns the names for the manifest of a checkpoint in this folder: the first one is that of this run."""
        return list(self._of(folder).runs)

    def own(self, folder: str) -> set[str]:
        """Returns the paths of the checkpoints in a folder that this run may remove."""
        return self._of(folder).own

    def go_on(self, store: Store, home: str) -> None:
        """Takes over what the run has saved that wrote the loaded checkpoint, unless that run is seen to be alive.

        Only what is there now counts. If that run lives on another host and saves again, its new checkpoints stay its own.
        """
        author = record_of(store, home)
        if author is None or (claim.is_running(author.writer) and not claim.is_mine(author.writer)):
            return
        folder = store.parent(home)[0]
        known = self._of(folder)
        # A checkpoint of an older Paceline has no names. It is the predecessor of all others without names.
        ancestors = author.runs or [""]
        known.runs += [name for name in ancestors if name not in known.runs]
        for path in retention.numbered(store, folder).values():
            other = record_of(store, path)
            if other is not None and (other.runs or [""])[0] in ancestors:
                known.own.add(path)

    def look(self, store: Store, folder: str) -> None:
        """Warns once of another run that saves into the folder, before this run saves there."""
        known = self._of(folder)
        foreign = set(retention.numbered(store, folder).values()) - known.own - known.others
        known.others |= foreign
        for path in sorted(foreign):
            if known.is_warned:
                break
            author = record_of(store, path)
            if author is None or claim.is_mine(author.writer):
                continue
            # What lies there before the first save is a rival's only if its process is seen to run.
            if known.has_saved or claim.is_running(author.writer):
                known.is_warned = True
                _log.warning(
                    "another run saves into %s: %s is of host %s, pid %s. Each run removes only its own checkpoints, and a "
                    "resume takes the newest of all. Give each run its own project_dir.",
                    folder,
                    store.parent(path)[1],
                    author.writer.get("host", "?"),
                    author.writer.get("pid", "?"),
                )
        known.has_saved = True
