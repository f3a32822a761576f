"""Writes files of weights while the tensors arrive, for `export`: first the header, then the bytes of each tensor.

No file is collected in memory.

SafeFile    the same bytes as `safetensors.torch.save_file` writes
TorchFile   a file for `torch.load` (also with `mmap=True`): a zip of `data.pkl` and one record for each tensor
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from paceline.checkpoint.weights.sources import SAFETENSORS_DTYPES, WeightEntry
from paceline.torch_internals.checkpoint import storage_class_name, tensor_rebuilder

# The order of the format's own writer: it writes the widest dtypes first, so that all tensors are aligned.
_ORDER = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16", "I32", "U32",
    "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip
_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_ALIGNED = 64


class WeightFile:
    """A file that is being written.

    Args:
        file: the open file.
        entries: the tensors, in the order in which they are written.

    Attributes:
        stem, ending: the two parts of its usual name.
    """

    stem: str
    ending: str

    def __init__(self, file: BinaryIO, entries: Sequence[WeightEntry]) -> None:
        self._file = file

    @staticmethod
    def holds(entry: WeightEntry) -> bool:
        """Returns whether the format has the dtype of a tensor."""
        return True

    @staticmethod
    def order(entries: Sequence[WeightEntry]) -> list[WeightEntry]:
        """Returns the tensors in the order in which they are written: that of the model."""
        return list(entries)

    def write(self, entry: WeightEntry, data: Tensor, *, first: bool) -> None:
        """Writes the next bytes of `entry`; `first` says that they are its first ones."""
        raise NotImplementedError

    def close(self) -> None:
        """Writes the end of the file, if anything follows the tensors."""


class SafeFile(WeightFile):
    """A file in the safetensors format."""

    stem = "model"
    ending = "safetensors"

    def __init__(self, file: BinaryIO, entries: Sequence[WeightEntry]) -> None:
        super().__init__(file, entries)
        head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for entry in entries:
            stop = start + entry.nbytes
            kind = _NAMES[entry.dtype]
            head[entry.name] = {"dtype": kind, "shape": list(entry.shape), "data_offsets": [start, stop]}
            start = stop
        text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
        # The header is padded to a multiple of 8 bytes, so that the tensors after it are aligned.
        text += b" " * (-len(text) % 8)
        file.write(struct.pack("<Q", len(text)) + text)

    @staticmethod
    def holds(entry: WeightEntry) -> bool:
        return entry.dtype in _NAMES

    @staticmethod
    def order(entries: Sequence[WeightEntry]) -> list[WeightEntry]:
        """Returns the tensors with the widest dtypes first, then by name."""

        def place(entry: WeightEntry) -> tuple[int, str]:
            return -_ORDER.index(_NAMES[entry.dtype]), entry.name

        return sorted(entries, key=place)

    def write(self, entry: WeightEntry, data: Tensor, *, first: bool) -> None:
        self._file.write(data.numpy().data)


class TorchFile(WeightFile):
    """A file as `torch.save` writes it."""

    stem = "pytorch_model"
    ending = "bin"

    def __init__(self, file: BinaryIO, entries: Sequence[WeightEntry]) -> None:
        super().__init__(file, entries)
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)
        self._record: Any = None
        self._numbers = {entry.name: number for number, entry in enumerate(entries)}
        self._put("data.pkl", _pickled(entries))
        self._put("byteorder", b"little")

    def write(self, entry: WeightEntry, data: Tensor, *, first: bool) -> None:
        if first:
            self._begin(f"data/{self._numbers[entry.name]}")
        self._record.write(data.numpy().data)

    def close(self) -> None:
        """Writes the list of records."""
        self._put("version", b"3\n")
        self._record.close()
        self._zip.close()

    def _put(self, name: str, data: bytes) -> None:
        self._begin(name)
        self._record.write(data)

    def _begin(self, name: str) -> None:
        if self._record is not None:
            self._record.close()
        record = zipfile.ZipInfo(f"archive/{name}")
        # The header has 30 bytes and the name, 20 bytes for lengths above 4 GB, and 4 bytes for the field of padding. The
        # padding aligns the tensor, so that `torch.load(mmap=True)` can use it in place.
        header_end = self._file.tell() + 30 + len(record.filename) + 20 + 4
        padding = -header_end % _ALIGNED
        record.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        self._record = self._zip.open(record, "w", force_zip64=True)


@dataclass(frozen=True)
class _Storage:
    """Replaces the memory of a tensor in a pickle."""

    number: int
    entry: WeightEntry


@dataclass(frozen=True)
class _Whole:
    """Replaces a tensor in a pickle, which is read as a tensor again."""

    number: int
    entry: WeightEntry

    def __reduce__(self) -> Any:
        entry = self.entry
        strides = torch.empty(entry.shape, device="meta").stride()
        rebuild, rest = tensor_rebuilder(entry.dtype)
        # Memory, offset, shape, strides, whether it requires a gradient, and hooks.
        return rebuild, (_Storage(self.number, entry), 0, entry.shape, strides, False, OrderedDict(), *rest)


class _Pickler(pickle.Pickler):
    """Pickles memory as a reference to its record, as `torch.save` does."""

    def persistent_id(self, obj: object) -> Any:
        if not isinstance(obj, _Storage):
            return None
        entry = obj.entry
        kind = storage_class_name(entry.dtype)
        if kind:
            storage = getattr(torch, kind)
            count = entry.nbytes // entry.dtype.itemsize
        else:
            # Newer dtypes have no storage class of their own. Their memory is untyped, and counted in bytes.
            storage = torch.storage.UntypedStorage
            count = entry.nbytes
        return "storage", storage, str(obj.number), "cpu", count


def _pickled(entries: Sequence[WeightEntry]) -> bytes:
    file = io.BytesIO()
    wholes = {entry.name: _Whole(number, entry) for number, entry in enumerate(entries)}
    _Pickler(file, protocol=2).dump(wholes)
    return file.getvalue()
