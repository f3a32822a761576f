"""Lists the checkpoints in a folder. No tensor is read for it, and torch is not needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.base.errors import CheckpointError, Problem
from paceline.checkpoint import retention
from paceline.checkpoint.format.checkpoint_format import NATIVE, CheckpointFormat, Summary, format_of
from paceline.checkpoint.format.manifest import Manifest, verify
from paceline.checkpoint.store import Store, store_for
from paceline.world.layout import Layout

_UNFINISHED = (".partial", ".aside")


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint, or the rest of a save that did not end.

    Attributes:
        name, path: its folder.
        bytes: the size of all files in it.
        format: the name of its `CheckpointFormat`.
        summary: facts about it.
        manifest: None for an unfinished save and for a checkpoint of another library, or if it cannot be read.
        problems: files that are missing or have another length; the contents of files are not read.
        unfinished: whether it is the rest of a save that did not end.
    """

    name: str
    path: str
    bytes: int
    format: str = NATIVE
    summary: Summary = field(default_factory=Summary)
    manifest: Manifest | None = None
    problems: tuple[Problem, ...] = ()
    unfinished: bool = False

    @property
    def state(self) -> str:
        """ "complete", "damaged", "unfinished"; or "unchecked", where the format has no list of files to compare with."""
        if self.unfinished:
            return "unfinished"
        if self.format != NATIVE:
            return "unchecked"
        return "damaged" if self.problems else "complete"

    def json(self) -> dict[str, Any]:
        """Returns the entry as JSON values."""
        plan: Any = None
        metrics: dict[str, float] = {}
        if self.manifest is not None:
            plan = plan_in_short(self.manifest)
            metrics = dict(self.manifest.metrics)
        return {
            "name": self.name,
            "path": self.path,
            "format": self.format,
            "state": self.state,
            "bytes": self.bytes,
            "step": self.summary.step,
            "created": self.summary.created,
            "world_size": self.summary.world_size,
            "plan": plan,
            "metrics": metrics,
            "problems": [in_words(problem) for problem in self.problems],
        }


def in_words(problem: Problem) -> str:
    """Returns a problem with its reasons, on one line."""
    reasons = [problem.why] if isinstance(problem.why, str) else problem.why
    return f"{problem.what} {'; '.join(reasons)}"


def home_of(path: str) -> tuple[Store, str]:
    """Returns the store of a path, and the path in the store's own spelling.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-store`.
    """
    store = store_for(path)
    home = store.resolve(path)
    if not store.exists(home):
        raise retention.no_checkpoint(store, home, "say")
    return store, home


def the_checkpoint(path: str) -> tuple[Store, str, CheckpointFormat]:
    """Returns store, path and format of one checkpoint, which may be damaged.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-none`.
    """
    store, home = home_of(path)
    checkpoint_format = format_of(store, home)
    if checkpoint_format is None:
        raise retention.no_checkpoint(store, home, "say")
    return store, home, checkpoint_format


def listed(path: str) -> tuple[Store, str, list[CheckpointEntry]]:
    """Lists the checkpoints at a path: one checkpoint, a folder of them, or the folder of a run.

    Returns:
        The store, the folder of the checkpoints (or the one checkpoint), and the entries.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-none`.
    """
    store, home = home_of(path)
    if format_of(store, home) is not None:
        checkpoint = entry(store, home, store.parent(home)[1])
        return store, home, [] if checkpoint is None else [checkpoint]
    return the_folder(path)


def the_folder(path: str) -> tuple[Store, str, list[CheckpointEntry]]:
    """Lists the checkpoints of a folder, or of the folder `checkpoints` in the folder of a run.

    Returns:
        The store, the folder of the checkpoints, and the entries.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-none`.
    """
    store, home = home_of(path)
    for folder in (home, store.join(home, retention.AUTOMATIC)):
        checkpoints = entries(store, folder)
        if checkpoints:
            return store, folder, checkpoints
    raise CheckpointError(
        "checkpoint-none",
        f"{home} holds no checkpoint.",
        why=retention.contents(store, home),
        fix="pass a checkpoint, a folder of checkpoints, or the project_dir of a run",
    )


def entries(store: Store, folder: str) -> list[CheckpointEntry]:
    """Lists the checkpoints directly in a folder, the oldest first, and then the rests of unfinished saves."""
    everything = [entry(store, store.join(folder, name), name) for name in store.list(folder)]

    def age(checkpoint: CheckpointEntry) -> tuple[bool, int, float, str]:
        created = checkpoint.summary.created or 0.0
        return checkpoint.unfinished, retention.order(store, checkpoint.path), created, checkpoint.name

    return sorted(filter(None, everything), key=age)


def entry(store: Store, path: str, name: str) -> CheckpointEntry | None:
    """Returns the entry of a path; None if it has nothing to do with checkpoints."""
    if not store.folder(path):
        return None
    left_over = name.startswith(".") and any(mark in name for mark in _UNFINISHED)
    checkpoint_format = None if left_over else format_of(store, path)
    if checkpoint_format is None:
        if left_over or retention.number(store, path) is not None:
            return CheckpointEntry(name, path, _size(store, path), unfinished=True)
        return None
    size = _size(store, path)
    if not checkpoint_format.has_manifest:
        return CheckpointEntry(name, path, size, checkpoint_format.name, checkpoint_format.summary(store, path))
    try:
        manifest = Manifest.read(store, path)
    except CheckpointError as error:
        return CheckpointEntry(name, path, size, problems=error.problems)
    summary = Summary(manifest.step, manifest.created, manifest.world_size)
    # Only the lengths are compared: reading all files would take minutes for large checkpoints.
    problems = verify(path, store, names=(), manifest=manifest)
    return CheckpointEntry(name, path, size, summary=summary, manifest=manifest, problems=tuple(problems))


def _size(store: Store, path: str) -> int:
    return sum(store.files(path).values())


def plan_in_short(manifest: Manifest) -> str:
    """Returns the parts of a plan on which a saved state depends, such as "replicate 2 x tp 2, bf16"."""
    plan = manifest.plan
    if not plan:
        return f"{manifest.world_size} ranks"
    # Values that change nothing, such as no ZeRO or no accumulation, are left out.
    words = [str(Layout(**plan.get("layout", {})))]
    if plan.get("zero"):
        words.append(f"zero {plan['zero']}")
    if plan.get("precision", "no") != "no":
        words.append(str(plan["precision"]))
    if plan.get("accumulate", 1) != 1:
        words.append(f"accumulate {plan['accumulate']}")
    return ", ".join(words)
