"""The manifest of a checkpoint, which lists its files. A folder without a manifest is no checkpoint.

checkpoint_7/
  manifest.json     this file, written last: versions, plan, step, and size and checksum of every other file
  state.json        everything except tensors (`codec`)
  .metadata         torch's index of the tensors: `torch.distributed.checkpoint` can read the folder
  __0_0.distcp ...  tensors, one file for each rank that wrote any
  ...               files that a user's hook added
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any, BinaryIO

from paceline.base.errors import CheckpointError, Problem, short_repr
from paceline.checkpoint.store import Store

NAME = "manifest.json"
STATE = "state.json"
FORMAT = "paceline-checkpoint"
VERSION = 1
_CHUNK = 1 << 22


@dataclass(frozen=True)
class FileFact:
    """The expected properties of a file.

    Attributes:
        bytes: its size.
        checksum: the algorithm and the value, such as "crc32:0a1b2c3d".
    """

    bytes: int
    checksum: str


class Checksummed:
    """A file that is being written, with its size and checksum so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.bytes = 0
        self._crc = 0

    def write(self, data: Any) -> int:
        """Writes bytes or any buffer."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._crc = zlib.crc32(view, self._crc)
        self.bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Flushes the file; `torch.save` calls it."""
        self._file.flush()

    def tell(self) -> int:
        """Returns the number of bytes that were written."""
        return self.bytes

    @property
    def fact(self) -> FileFact:
        """The entry of the file in the manifest."""
        return FileFact(self.bytes, f"crc32:{self._crc:08x}")


def measure(store: Store, path: str, seen: Callable[[int], None] | None = None) -> FileFact:
    """Reads a whole file to compute its size and checksum; calls `seen` with the size of each piece that was read."""
    length = crc = 0
    with store.open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
            length += len(chunk)
            if seen is not None:
                seen(len(chunk))
    return FileFact(length, f"crc32:{crc:08x}")


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint, and facts about the run that has saved it.

    Attributes:
        files: all other files, by relative name.
        step: the number of optimizer steps.
        world_size: the number of ranks that have saved it.
        plan: the plan of the run, as JSON values.
        metrics: metrics of the script, by name; `Keep(best=...)` compares them.
        within: the subfolder that holds the files; empty if they are beside the manifest. A store that cannot rename writes
            each save into a subfolder of its own, and its `publish` sets this.
        run: the launcher's name of the run (`PACELINE_RUN`); empty without a launcher.
        runs: random names of the run that has saved it, and of the runs that it goes on from; `Ownership` compares them.
        writer: the process that has saved it, as `claim.record` describes it.
        created: seconds since 1970, UTC.
        paceline, torch: the versions that have written it.
        version: the version of the format; newer ones are refused.
        checksum: the checksum of the manifest itself; empty if an older Paceline has written it without one.
    """

    files: dict[str, FileFact]
    step: int = 0
    world_size: int = 1
    plan: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    within: str = ""
    run: str = ""
    runs: list[str] = field(default_factory=list)
    writer: dict[str, str] = field(default_factory=dict)
    created: float = field(default_factory=time.time)
    paceline: str = field(default_factory=lambda: metadata.version("paceline"))
    torch: str = field(default_factory=lambda: metadata.version("torch"))  # torch itself is not needed to look at one
    version: int = VERSION
    checksum: str = ""

    def write(self, store: Store, folder: str) -> None:
        """Writes `manifest.json`. The file is durable when this returns."""
        with store.open(store.join(folder, NAME), "wb") as file:
            file.write(encoded({"format": FORMAT, **asdict(self)}))

    def place(self, store: Store, folder: str) -> str:
        """Returns the folder of the files, given the folder of the manifest."""
        return store.join(folder, self.within) if self.within else folder

    def paths(self) -> list[str]:
        """Returns the names of the files and of the manifest, relative to the checkpoint's folder."""
        prefix = f"{self.within}/" if self.within else ""
        return [*(prefix + name for name in self.files), NAME]

    def check(self) -> None:
        """Refuses values that no save writes: of other types, and files outside of the folder.

        Raises:
            ValueError: with the reason.
        """
        kinds: dict[str, Any] = {"step": int, "world_size": int, "plan": dict, "metrics": dict, "within": str}
        kinds |= {"created": (int, float), "run": str, "checksum": str, "runs": list, "writer": dict}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"its {name} is {short_repr(getattr(self, name))}")
        if not all(isinstance(value, (int, float)) for value in self.metrics.values()):
            raise ValueError(f"its metrics are {short_repr(self.metrics)}")
        if not all(isinstance(text, str) for text in (*self.runs, *self.writer, *self.writer.values())):
            raise ValueError(f"its runs are {short_repr(self.runs)}, and its writer is {short_repr(self.writer)}")
        for name in self.paths():
            parts = name.split("/")
            if {"", ".", ".."} & set(parts) or (os.sep != "/" and os.sep in name):
                raise ValueError(f"its file {short_repr(name)} lies outside of it")
        if "/" in self.within:
            raise ValueError(f"its files lie too deep: {self.within}")

    @classmethod
    def read(cls, store: Store, folder: str) -> Manifest:
        """Reads the manifest of a folder that has one.

        Raises:
            CheckpointError: `checkpoint-damaged`, `checkpoint-newer`.
        """
        path = store.join(folder, NAME)
        try:
            with store.open(path, "rb") as file:
                content = json.loads(file.read())
            if content["format"] != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            if content["version"] > VERSION:
                raise _newer(path, content)
            expected = content.get("checksum", "")
            actual = _checksum(content)
            if expected and expected != actual:
                raise ValueError(f"its own checksum should be {short_repr(expected)} and is {actual!r}")
            content["files"] = {str(name): FileFact(**fact) for name, fact in content["files"].items()}
            # Fields that an older Paceline did not write get their defaults; those of a newer one are left out.
            fields = {name: content[name] for name in cls.__dataclass_fields__ if name in content}
            manifest = cls(**fields)
            manifest.check()
            return manifest
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                "checkpoint-damaged",
                f"the manifest {path} cannot be read.",
                why=f"{type(error).__name__}: {error}",
                fix="load another checkpoint; this file was cut or edited",
            ) from None

    @classmethod
    def find(cls, store: Store, folder: str) -> Manifest | None:
        """Returns the manifest of a folder; None if it has none, or one that cannot be read."""
        if not store.exists(store.join(folder, NAME)):
            return None
        try:
            return cls.read(store, folder)
        except FileNotFoundError:
            return None  # another run has published or removed the folder since
        except CheckpointError as error:
            if error.code not in ("checkpoint-damaged", "checkpoint-newer"):
                raise  # if the store does not answer, it is not known whether there is a manifest
            return None


def encoded(fields: dict[str, Any]) -> bytes:
    """Returns the JSON of a manifest with these fields and a checksum over them."""
    return json.dumps({**fields, "checksum": _checksum(fields)}, indent=1).encode()


def _checksum(fields: dict[str, Any]) -> str:
    """Returns the checksum over all fields except the checksum itself, whatever the layout of the JSON text."""
    others = {name: value for name, value in fields.items() if name != "checksum"}
    canonical = json.dumps(others, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def read_json(store: Store, path: str) -> dict[str, Any]:
    """Reads a JSON file of a checkpoint.

    Raises:
        CheckpointError: `checkpoint-damaged`.
    """
    with store.open(path, "rb") as file:
        content = file.read()
    try:
        tree = json.loads(content)
        if not isinstance(tree, dict):
            raise ValueError(f"it holds {short_repr(tree)}")
        return tree
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            "checkpoint-damaged",
            f"{path} cannot be read.",
            why=f"it has {len(content)} bytes; {type(error).__name__}: {error}",
            fix="load another checkpoint, or copy this file again from an intact copy",
        ) from None


def _newer(path: str, content: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        "checkpoint-newer",
        f"the checkpoint {path} has format {content['version']}, but this Paceline reads up to {VERSION}.",
        why=f"it was written by Paceline {content.get('paceline')}",
        fix=f"install Paceline {content.get('paceline')} or newer",
    )


def verify(
    folder: str,
    store: Store,
    *,
    names: Iterable[str] | None = None,
    manifest: Manifest | None = None,
    seen: Callable[[int], None] | None = None,
) -> list[Problem]:
    """Compares files with the manifest: that all exist with the right size, and the checksums of `names`.

    Args:
        folder: the checkpoint.
        store: its store.
        names: the files to read completely; all by default.
        manifest: the manifest, if the caller has read it already.
        seen: called with the size of each piece that was read.

    Returns:
        One problem for each damaged file.
    """
    manifest = manifest or Manifest.read(store, folder)
    place = manifest.place(store, folder)
    lengths = store.files(place)
    wanted = set(manifest.files if names is None else names)
    problems = []
    for name, fact in manifest.files.items():
        if name not in lengths:
            problems.append(_damaged(folder, name, "the file is missing"))
        elif lengths[name] != fact.bytes:
            problems.append(_damaged(folder, name, f"it should have {fact.bytes} bytes and has {lengths[name]}"))
        elif name in wanted:
            actual = measure(store, store.join(place, name), seen)
            if actual != fact:
                why = f"its checksum should be {fact.checksum} and is {actual.checksum}"
                problems.append(_damaged(folder, name, why))
    return problems


def _damaged(folder: str, name: str, why: str) -> Problem:
    return Problem(
        "checkpoint-damaged",
        f"{name} of the checkpoint {folder} is damaged.",
        why=why,
        fix="load the checkpoint before it, or copy this file again from an intact copy",
    )
