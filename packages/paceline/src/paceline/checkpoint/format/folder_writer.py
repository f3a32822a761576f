"""`FolderWriter` makes the files of a save. `Checkpointer` claims the folder before it, and prunes older ones after it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.checkpoint.agree import WriterPeers
from paceline.checkpoint.store import Store

if TYPE_CHECKING:
    from paceline.checkpoint.format.manifest import Manifest
    from paceline.checkpoint.state.train_state import TrainState


@dataclass(frozen=True)
class Claimed:
    """A folder that a save has claimed, and what belongs into it.

    Attributes:
        store: where it is written.
        home: the final folder of the checkpoint.
        staged: the folder into which it is written first. Rank 0 has created it.
        state: the state to save.
        manifest: what a manifest says of the save, without the files.
        extra_files_hook: writes further files into `staged`; called on each rank before the state is read.
        background: whether the state may change as soon as `FolderWriter.read` has returned.
    """

    store: Store
    home: str
    staged: str
    state: TrainState
    manifest: Manifest
    extra_files_hook: Callable[[str], None] | None
    background: bool


class FolderWriter(Protocol):
    """Writes checkpoints of one layout."""

    def files(self, store: Store, folder: str) -> Collection[str] | None:
        """Returns the files of the checkpoint in a folder, all of which this layout makes; None if it is no checkpoint."""

    def read(self, peers: WriterPeers, claimed: Claimed) -> Callable[[WriterPeers], int]:
        """Reads the state.

        Returns:
            What does the rest of the save: it writes the files into `claimed.staged`, moves the folder to its place when all
            are there, and returns the number of bytes on rank 0. All ranks call it, with a group of their own.

        Ranks: all.
        """
