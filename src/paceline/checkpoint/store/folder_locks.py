"""`FolderLocks`: the locks that one run has on the folders into which it saves; see `lock` for a lock itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from paceline.checkpoint.store.lock import this_run
from paceline.checkpoint.store.store import Store
from paceline.world import rendezvous


class FolderLocks:
    """What one run has locked: folders of automatic names until it ends, and one other folder while a save writes it."""

    def __init__(self) -> None:
        self._until_the_end: dict[str, Callable[[], object]] = {}
        self._of_this_save: Callable[[], object] | None = None

    def take(self, store: Store, folder: str, *, until_the_end: bool) -> None:
        """Locks a folder that is not locked by this run yet.

        Args:
            store: where it lies.
            folder: that other runs must leave alone.
            until_the_end: whether the lock outlives this save: among automatic names, another run's saves would be pruned
                by this one's rule, and this one's by the other's.

        Raises:
            CheckpointError: `checkpoint-locked`.
        """
        if folder in self._until_the_end:
            return
        release = store.hold(folder, this_run())
        if until_the_end:
            # Also where the run ends by a loss of its last reference alone, as in a notebook.
            finalizer = weakref.finalize(self, release)
            self._until_the_end[folder] = finalizer
            rendezvous.before_leaving(finalizer)
        else:
            self._of_this_save = release

    def end_save(self) -> None:
        """Gives back what was locked for one save."""
        if self._of_this_save is not None:
            self._of_this_save()
            self._of_this_save = None
