"""`CheckpointSearch` finds the newest undamaged checkpoint in a folder, and verifies the files of a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from paceline.base.errors import CheckpointError, Problem
from paceline.checkpoint import retention
from paceline.checkpoint.agree import WriterPeers, agreed, together
from paceline.checkpoint.format.manifest import NAME, Manifest, verify
from paceline.checkpoint.store import Store
from paceline.plan.fqn import listed

_log = logging.getLogger("paceline.checkpoint")


class CheckpointSearch:
    """Finds and verifies checkpoints; the ranks share the files.

    Args:
        peers: the ranks that load together.

    Attributes:
        damaged: the checkpoints that were found to be damaged.

    Ranks: all must call each method, with equal arguments.
    """

    def __init__(self, peers: WriterPeers) -> None:
        self._peers = peers
        self.damaged: set[str] = set()
        # What `newest` has verified: the load that follows need not read all files a second time.
        self._last_verified: tuple[str, Manifest] | None = None

    def newest(self, store: Store, folder: str, run: str) -> str | None:
        """Returns the newest undamaged checkpoint in a folder; see `Checkpointer.latest`."""
        self._last_verified = None
        errors: list[CheckpointError] = []
        candidates = self._candidates(store, folder, run)
        while candidates:
            path = candidates.pop(0)
            try:
                manifest = agreed(self._peers, f"verifying {path}", partial(self.verified, store, path))
            except CheckpointError as error:
                exists = partial(store.exists, store.join(path, NAME))
                if not together(self._peers, f"looking for {path}", exists)[0]:
                    # Another run that saves here has removed it, so the folder is listed again.
                    errors = []
                    candidates = self._candidates(store, folder, run)
                    continue
                codes = {problem.code for problem in error.problems}
                if not codes <= {"checkpoint-damaged", "checkpoint-newer"}:
                    raise
                # A damaged checkpoint is never pruned: its intact files may be needed.
                self.damaged.add(path)
                errors.append(error)
                if self._peers.rank == 0:
                    # A damaged file has one reason; what it should be and what it is.
                    reasons = [f"{problem.what.rstrip('.')}: {problem.why}" for problem in error.problems]
                    _log.warning("passing over %s: %s", path, "; ".join(reasons))
                continue
            self._last_verified = path, manifest
            return path
        if errors:
            raise _all_damaged(folder, errors)
        if not run:
            # Through `agreed`, because a store that fails on rank 0 alone would leave the other ranks waiting for it.
            agreed(self._peers, f"looking into {folder}", partial(self._warn_of_incomplete, store, folder))
        return None

    def _warn_of_incomplete(self, store: Store, folder: str) -> None:
        incomplete = list(retention.numbered(store, folder).values()) if self._peers.rank == 0 else []
        if incomplete:
            names = listed([store.parent(path)[1] for path in incomplete])
            text = "there is no checkpoint to load in %s: %s without %s, so they are incomplete or not Paceline's"
            _log.warning(text, folder, names, NAME)

    def _candidates(self, store: Store, folder: str, run: str) -> list[str]:
        """Returns the paths in a folder that may be checkpoints, newest first, as rank 0 sees them. Ranks: all."""

        def look() -> list[str]:
            return retention.newest_first(store, folder, run) if self._peers.rank == 0 else []

        return together(self._peers, f"looking into {folder}", look)[0]

    def verified(self, store: Store, home: str) -> Manifest:
        """Returns the manifest of a checkpoint, after its files were compared with it. Ranks: all.

        Raises:
            CheckpointError: `checkpoint-missing`, `checkpoint-none`, `checkpoint-newer`, `checkpoint-damaged`.
        """
        if not store.exists(store.join(home, NAME)):
            raise retention.no_checkpoint(store, home)
        manifest = Manifest.read(store, home)
        already_verified = self._last_verified == (home, manifest)
        self._last_verified = None
        # Each rank reads some of the files to compare checksums, and looks at the length of all files.
        names = [] if already_verified else sorted(manifest.files)[self._peers.rank :: self._peers.size]
        problems = verify(home, store, names=names, manifest=manifest)
        if problems:
            raise CheckpointError.of(problems)
        return manifest


def _all_damaged(folder: str, errors: Sequence[CheckpointError]) -> CheckpointError:
    """Returns the error for a folder in which every checkpoint is damaged."""
    problems: list[Problem] = []
    for error in errors:
        problems += error.problems
    return CheckpointError(
        "checkpoint-damaged",
        f"none of the {len(errors)} checkpoints in {folder} can be loaded.",
        why=[f"{problem.what} {problem.why}" for problem in problems[:4]],
        fix="copy one of them again from an intact copy, or start from the beginning with `--resume no`",
    )
