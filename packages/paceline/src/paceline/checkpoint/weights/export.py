"""Weights written as others read them, row by row: no rank ever holds a whole model beside its own part.

    entries   names, shapes and dtypes of the whole model, the same on all ranks
    files     cut by size, whole tensors in each; one rank writes one file
    turns     each writer asks for the next rows of its file; whoever holds a part of them sends it
    publish   once every file is whole and durable, rank 0 gives them their names, the index last

A turn moves at most `TURN_BYTES`, many small tensors or a few rows of a large one, and is the most that an export takes
besides what is there anyway. What fails on one rank fails on all, and leaves what was exported before as it was.
"""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from types import MappingProxyType
from typing import BinaryIO, Protocol

from torch import Tensor

from paceline.base.errors import CheckpointError, Problem
from paceline.base.files import expanded
from paceline.checkpoint.agree import Alone, WriterPeers, agreed, together
from paceline.checkpoint.files import replacing
from paceline.checkpoint.format.checkpoint_format import format_of, newest_in
from paceline.checkpoint.format.manifest import verify
from paceline.checkpoint.store import discard, store_for
from paceline.checkpoint.store.direct import sync_folder
from paceline.checkpoint.store.local import STORE
from paceline.checkpoint.weights.opening import open_weights
from paceline.checkpoint.weights.sources import Box, WeightEntry, Weights, is_part
from paceline.checkpoint.weights.weight_files import SafeFile, TorchFile, WeightFile
from paceline.world.arrived import as_bytes

TURN_BYTES = 64 << 20
LEAST_TURN_BYTES = 1 << 16
_PREFIXES = ("", "K", "M", "G", "T", "P")  # the place of a prefix is the power of 1000 or 1024 that it means


def parse_size(size: int | str) -> int:
    """Returns the number of bytes that a size such as 5000, "10GB" or "512MiB" means.

    Raises:
        CheckpointError: `checkpoint-size`.
    """
    if isinstance(size, int) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]?)(IB|B)?\s*", str(size).upper())
    # "IB" without a prefix, as in "5iB", is no unit.
    if isinstance(size, str) and match and float(match[1]) > 0 and (match[2] or match[3] != "IB"):
        base = 1024 if match[3] == "IB" else 1000
        return int(float(match[1]) * base ** _PREFIXES.index(match[2]))
    raise CheckpointError(
        "checkpoint-size",
        f"{size!r} is not a size.",
        why="a size is a number above 0, with a unit or without",
        fix='write one such as "10GB", "512MiB" or 1000000',
    )


@dataclass(frozen=True)
class RowsOfTensor:
    """Some rows of a whole tensor, which one message carries.

    Attributes:
        entry: the tensor.
        start, stop: the range of rows along dim 0; a 0-dim tensor has one row.
    """

    entry: WeightEntry
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The number of bytes of these rows."""
        return self.entry.nbytes // max(self.entry.rows, 1) * (self.stop - self.start)

    @property
    def box(self) -> Box:
        """Where they lie in the tensor."""
        if not self.entry.shape:
            return ()
        whole_dims = [slice(0, size) for size in self.entry.shape[1:]]
        return (slice(self.start, self.stop), *whole_dims)


class TensorSource(Protocol):
    """A place that whole tensors are read or gathered from."""

    @property
    def entries(self) -> Sequence[WeightEntry]:
        """The tensors, in the order in which they are written."""
        ...

    def fetch(self, wanted: Sequence[Sequence[RowsOfTensor]]) -> list[Tensor]:
        """Returns the bytes (uint8, CPU) of the rows that this rank wants, in order.

        Args:
            wanted: for each rank, the rows that it wants; the same on every rank.

        Ranks: all.
        """
        ...


class Stored:
    """A source of tensors in files, for one process.

    Args:
        weights: the files.
        aliases: further names of tensors, with the names that the files have.
    """

    def __init__(self, weights: Weights, aliases: Mapping[str, str] = MappingProxyType({})) -> None:
        self._weights = weights
        self._aliases = aliases
        self.entries = list(weights.entries.values())
        for alias, name in aliases.items():
            # A checkpoint without frozen parameters may lack it.
            if name in weights.entries:
                self.entries.append(replace(weights.entries[name], name=alias))

    def fetch(self, wanted: Sequence[Sequence[RowsOfTensor]]) -> list[Tensor]:
        """Returns the bytes of rows, read from the files."""
        data = []
        for rows in wanted[0]:
            name = self._aliases.get(rows.entry.name, rows.entry.name)
            data.append(as_bytes(self._weights.read(name, rows.box)))
        return data


def export_weights(
    source: TensorSource,
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    peers: WriterPeers | None = None,
    file_name: str = "",
) -> list[str]:
    """Writes whole tensors into one file or several.

    Args:
        source: where the tensors come from.
        directory: the folder, which is made if it is missing. Files of an earlier export in it are replaced at the end, and
            other files stay.
        max_shard_size: the largest size of a file in bytes; a larger tensor gets a file of its own.
        safe_serialization: whether to write safetensors; otherwise torch's format.
        peers: the ranks that write together. Ranks that see the folder write, and the others send to them.
        file_name: the name of the only file, if it is not the usual one. Then an earlier export stays.

    Returns:
        Names of the files, in order.

    Ranks: all.

    Raises:
        CheckpointError: `checkpoint-size`, `checkpoint-value`, `checkpoint-not-writable`, `checkpoint-disk-full`,
            `checkpoint-io`. Every rank raises it, and an earlier export stays complete.
    """
    peers = peers or Alone()
    is_first = peers.rank == 0
    kind: type[WeightFile] = SafeFile if safe_serialization else TorchFile
    _check_dtypes(source.entries, kind)
    limit = parse_size(max_shard_size)
    parts = [list(source.entries)] if file_name else cut(source.entries, limit)
    files = ExportedFiles(os.fspath(directory), kind, parts, file_name)
    doing = f"saving the model to {files.folder}"
    # The first rank makes the folder. A rank that sees it then shares its file system and can write, too.
    staged = together(peers, doing, lambda: files.begin() if is_first else "")[0]
    try:
        sees_folder = together(peers, doing, lambda: files.join(staged))
        writers = [rank for rank in range(peers.size) if sees_folder[rank]]
        # All writers together ask for `TURN_BYTES` in one turn, so that a rank that holds all of it never packs more.
        num_busy = min(len(writers), len(files.parts))
        step = max(TURN_BYTES // num_busy, LEAST_TURN_BYTES)
        # Writer number n writes the files n, n + len(writers), and so on. All ranks compute the turns of all writers.
        queues = [turns(files.parts[number :: len(writers)], step) for number in range(len(writers))]
        # `fetch` communicates, so that each rank takes part in all turns, also in those in which it wants nothing.
        for turn in zip_longest(*queues, fillvalue=()):
            wanted: list[Sequence[RowsOfTensor]] = [()] * peers.size
            for writer, rows in zip(writers, turn, strict=True):
                wanted[writer] = rows
            data = source.fetch(wanted)
            agreed(peers, doing, functools.partial(files.write, wanted[peers.rank], data))
        # Every rank's files are durable before the first rank gives any of them its name.
        agreed(peers, doing, files.close)
        agreed(peers, doing, lambda: files.publish() if is_first else None)
    except BaseException:
        files.discard(is_first)
        raise
    return files.names + files.index_names


def export_checkpoint(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    model: str = "",
    tied_names: bool = False,
    leave_out: Collection[str] = (),
) -> list[str]:
    """Writes the weights of one model of a checkpoint, tensor by tensor, without building the model.

    Args:
        path: a checkpoint of Paceline, whatever its plan, on a disk or at a URL; one of another library; one in torch's
            distributed format; or anything else that `load_model` reads.
        directory, max_shard_size, safe_serialization: as in `export_weights`.
        model: the name of the model, if the checkpoint has several.
        tied_names: whether a tied tensor of the first model is written under each of its names, and so several times.
        leave_out: names of tensors that are not written, nor are their further names.

    Returns:
        Names of the files, in order.

    Ranks: one; no communication. At most one tensor is in memory, and 64 MB.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged` (checksums are compared first), `checkpoint-unsafe`, and
            those of `export_weights`.
    """
    store = store_for(path)
    home = newest_in(store, store.resolve(os.fspath(path)))
    checkpoint_format = format_of(store, home)
    if checkpoint_format is not None and checkpoint_format.has_manifest:
        problems = verify(home, store)
        if problems:
            raise CheckpointError.of(problems)
    aliases: Mapping[str, str] = {}
    if tied_names and checkpoint_format is not None:
        aliases = checkpoint_format.tied_names(store, home)
    stored = Stored(open_weights(home, model), aliases)
    stored.entries = [entry for entry in stored.entries if aliases.get(entry.name, entry.name) not in leave_out]
    return export_weights(stored, directory, max_shard_size, safe_serialization)


def cut(entries: Sequence[WeightEntry], limit: int) -> list[list[WeightEntry]]:
    """Divides whole tensors into parts of at most `limit` bytes; a larger tensor is a part of its own."""
    parts: list[list[WeightEntry]] = [[]]
    filled = 0
    for entry in entries:
        if filled and filled + entry.nbytes > limit:
            parts.append([])
            filled = 0
        parts[-1].append(entry)
        filled += entry.nbytes
    return parts


def turns(parts: Sequence[Sequence[WeightEntry]], step: int) -> Iterator[list[RowsOfTensor]]:
    """Yields the rows of some files in order, in turns of at most `step` bytes but at least one row."""
    turn: list[RowsOfTensor] = []
    filled = 0
    for entry in chain.from_iterable(parts):
        if not entry.rows:
            turn.append(
                RowsOfTensor(entry, 0, 0)
            )  # a tensor without elements has no bytes, but its name must be in the file
            continue
        row_bytes = max(entry.nbytes // entry.rows, 1)
        start = 0
        while start < entry.rows:
            room = (step - filled) // row_bytes
            # A row that is larger than a whole turn gets a turn of its own.
            if not turn:
                room = max(room, 1)
            if room <= 0:
                yield turn
                turn = []
                filled = 0
                continue
            rows = RowsOfTensor(entry, start, min(entry.rows, start + room))
            turn.append(rows)
            filled += rows.nbytes
            start = rows.stop
    if turn:
        yield turn


class ExportedFiles:
    """The files of one export, which are written under temporary names in the folder and renamed at the end.

    Args:
        directory: the folder of the files.
        kind: their format.
        parts: the tensors of each file.
        file_name: the name of the only file, if it is not the usual one.

    Attributes:
        folder: the directory, as an absolute path.
        parts: the tensors of each file, in the order of their bytes.
        names: the names of the files.
        index_names: the name of the index, if there are several files; otherwise empty.
    """

    def __init__(
        self, directory: str, kind: type[WeightFile], parts: Sequence[Sequence[WeightEntry]], file_name: str = ""
    ) -> None:
        self.folder = os.path.abspath(expanded(directory))
        self.parts = [kind.order(part) for part in parts]
        self._kind = kind
        count = len(parts)
        self.names = [file_name or f"{kind.stem}.{kind.ending}"]
        self._has_usual_names = not file_name
        self.index_names: list[str] = []
        if count > 1:
            self.names = [f"{kind.stem}-{number:05d}-of-{count:05d}.{kind.ending}" for number in range(1, count + 1)]
            self.index_names = [f"{kind.stem}.{kind.ending}.index.json"]
        self._file_names: dict[str, str] = {}  # by the name of a tensor
        for name, part in zip(self.names, self.parts, strict=True):
            self._file_names |= dict.fromkeys([entry.name for entry in part], name)
        self._entries = list(chain.from_iterable(parts))
        self._staged = ""  # the folder in which they are written
        # The name of the file that this rank writes now, the open file, and its content in the chosen format.
        self._open: tuple[str, BinaryIO, WeightFile] | None = None

    def begin(self) -> str:
        """Makes the folder, and in it the one in which the files are written, whose path it returns. Ranks: the first."""
        os.makedirs(self.folder, exist_ok=True)
        stem = self._kind.stem
        # An export that was killed could not remove its files, which may be as large as the model.
        STORE.recover(self.folder, lambda name: name == stem, lambda _: None)
        return STORE.stage(os.path.join(self.folder, stem))

    def join(self, staged: str) -> bool:
        """Sets the folder in which the files are written, and returns whether this rank sees it."""
        self._staged = staged
        return os.path.isdir(staged)

    def write(self, rows: Sequence[RowsOfTensor], data: Sequence[Tensor]) -> None:
        """Writes the bytes of some rows; the rows of a file come in order and before those of the next file."""
        for piece, content in zip(rows, data, strict=True):
            name = self._file_names[piece.entry.name]
            if self._open is None or self._open[0] != name:
                self.close()
                file = open(os.path.join(self._staged, name), "wb")  # noqa: SIM115
                self._open = name, file, self._kind(file, self.parts[self.names.index(name)])
            self._open[2].write(piece.entry, content, first=piece.start == 0)

    def close(self) -> None:
        """Completes the open file, if there is one, and waits until it is on the disk."""
        if self._open is not None:
            _, file, content = self._open
            with file:
                content.close()
                file.flush()
                os.fsync(file.fileno())
            self._open = None

    def discard(self, is_first: bool) -> None:
        """Ends what was begun. The first rank removes the files."""
        if self._open is not None:
            self._open[1].close()
            self._open = None
        if is_first:
            discard(STORE, self._staged)

    def publish(self) -> None:
        """Gives the files their names. A reader finds either the old files or the new ones, also meanwhile and after a crash.

        A reader prefers a single file to an index, and safetensors to torch's format. If old and new files are equally many,
        they have the same names. Then a crash between two renames would mix two models, so that an index first points to the
        new files under other names.
        """
        # A model without tensors has a file, too, but no turn has written it.
        if not self._entries:
            with open(os.path.join(self._staged, self.names[0]), "wb") as file:
                self._kind(file, []).close()
        before: set[str] = set()
        if self._has_usual_names:
            before = {name for name in os.listdir(self.folder) if is_part(name)}
        temporary: list[str] = []
        if self.index_names and before & set(self.names):
            temporary = self._show_temporarily()
        for name in self.names:
            os.replace(os.path.join(self._staged, name), os.path.join(self.folder, name))
        if self.index_names:
            self._write_index({name: name for name in self.names})
        # Single files and indexes are removed before the parts of several files: a reader begins with them, and would miss
        # parts that are removed already.
        old = before - set(self.names) - set(self.index_names)
        parts_of_several = {name for name in old if re.search(r"-\d+-of-\d+\.", name)}
        for name in [*(old - parts_of_several), *parts_of_several, *temporary]:
            os.remove(os.path.join(self.folder, name))
        STORE.remove(self._staged)
        # Names are entries of the folder, so without this a crash of the host could undo the renames.
        sync_folder(self.folder)

    def _show_temporarily(self) -> list[str]:
        """Lets an index point to the new files under names that no old file has; returns these names."""
        others = {name: f"{self._kind.stem}-{secrets.token_hex(4)}-{name}" for name in self.names}
        try:
            for name, other in others.items():
                os.link(os.path.join(self._staged, name), os.path.join(self.folder, other))
        except OSError:
            # The file system has no hard links. Without an index, a crash leaves a folder that a reader refuses, rather than
            # an index that mixes two models.
            for name in self.index_names:
                with suppress(FileNotFoundError):
                    os.remove(os.path.join(self.folder, name))
            # Some links may have been made before the error, and must be removed later.
            return [name for name in others.values() if os.path.exists(os.path.join(self.folder, name))]
        self._write_index(others)
        return list(others.values())

    def _write_index(self, called: Mapping[str, str]) -> None:
        """Writes the index; `called` maps the name of each file to the name under which a reader finds it."""
        total = sum(entry.nbytes for entry in self._entries)
        weight_map = {entry.name: called[self._file_names[entry.name]] for entry in self._entries}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        with replacing(os.path.join(self.folder, self.index_names[0])) as file:
            file.write(text.encode())


def _check_dtypes(entries: Sequence[WeightEntry], kind: type[WeightFile]) -> None:
    problems = []
    for entry in entries:
        if kind.holds(entry):
            continue
        problem = Problem(
            "checkpoint-value",
            f"{entry.name} is of {entry.dtype}, which a {kind.ending} file does not hold.",
            why="the format holds only the usual dtypes",
            fix="convert it before it is saved, or save with safe_serialization=False",
        )
        problems.append(problem)
    if problems:
        raise CheckpointError.of(problems)
