"""`FolderLocks` holds the locks on the folders into which a run saves, for `Checkpointer`; see `lock` for a lock itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from paceline.checkpoint.store.lock import this_run
from paceline.checkpoint.store.store import Store
from paceline.world import lifetime


class FolderLocks:
    """Holds the locks of one run: on folders of automatic names until it ends, and on another folder during a save."""

    def __init__(self) -> None:
        self._until_the_end: dict[str, Callable[[], object]] = {}
        self._of_this_save: Callable[[], object] | None = None

    def take(self, store: Store, folder: str, *, until_the_end: bool) -> None:
        """Locks a folder that is not locked by this run yet.

        Args:
            store: the store of the folder.
            folder: the folder, into which no other run may save.
            until_the_end: whether the lock outlives this save. A folder of automatic names needs that: two runs would remove
                each other's old checkpoints.

        Raises:
            CheckpointError: `checkpoint-locked`.
        """
        if folder in self._until_the_end:
            return
        release = store.hold(folder, this_run())
        if until_the_end:
            # In a notebook, the run may end only because its last reference is gone. The finalizer runs then too.
            finalizer = weakref.finalize(self, release)
            self._until_the_end[folder] = finalizer
            lifetime.at_end_of_run(lambda _: finalizer())
        else:
            self._of_this_save = release

    def end_save(self) -> None:
        """Releases the lock that was taken for one save."""
        if self._of_this_save is not None:
            self._of_this_save()
            self._of_this_save = None
