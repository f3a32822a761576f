"""Single files: written beside and renamed, read without running code; refusals of the system as coded errors."""

from __future__ import annotations

import os
import pickle
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save_file
from torch import Tensor

from paceline.base.errors import CheckpointError
from paceline.checkpoint.agree import os_problem, refusal

# What numpy's arrays and numbers are pickled with: harmless, but unknown to torch's safe reader
# (`torch.serialization.safe_globals`).
NUMPY_VALUES: list[Any] = [
    numpy.empty(0).__reduce__()[0], numpy.float64(0).__reduce__()[0], numpy.ndarray, numpy.dtype,
    *[type(numpy.dtype(code)) for code in "?" + numpy.typecodes["AllInteger"] + numpy.typecodes["AllFloat"]],
]  # fmt: skip

# What torch's safe reader says of bytes that are no pickle at all.
_NO_PICKLE = ("Unsupported operand", "invalid load key", "pickle data was truncated")


@contextmanager
def writing(doing: str) -> Iterator[None]:
    """Turns the system's refusals within a `with` block into `checkpoint-not-writable`, `-disk-full` or `-io`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        refused = refusal(error)
        if refused is None:
            raise
        raise CheckpointError.of([os_problem(refused, doing)]) from error
    except SafetensorError as error:  # carries the system's number as text
        match = re.search(r"os error (\d+)", str(error))
        refused = OSError(str(error))
        if match is not None:
            number = int(match[1])
            refused = OSError(number, os.strerror(number))
        raise CheckpointError.of([os_problem(refused, doing)]) from error


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turns whatever a damaged file does to its parser into one error that names it."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(
            "checkpoint-missing", f"there is no file {path}.", why=_beside(path), fix="check the path"
        ) from None
    except OSError as error:
        raise CheckpointError.of([os_problem(error, "reading")]) from None
    except pickle.UnpicklingError as error:
        if any(text in str(error) for text in _NO_PICKLE):
            raise _damaged(path, "its bytes are no file that torch.save wrote") from None
        # torch names the function or class in the file that it refused to call.
        global_name = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(
            "checkpoint-unsafe",
            f"{path} holds more than tensors and plain values.",
            why=f"it asks for {global_name[1]}" if global_name else str(error).split("\n", maxsplit=1)[0],
            fix="if you trust its author, read it with torch.load(path, weights_only=False) yourself",
        ) from None
    except (SafetensorError, EOFError, ValueError, RuntimeError, KeyError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = str(error).partition("\n")[0]
        raise _damaged(path, f"{type(error).__name__}: {reason}") from None


def _damaged(path: str, reason: str) -> CheckpointError:
    """Returns the error for a file that its parser does not understand."""
    size = os.path.getsize(path)
    return CheckpointError(
        "checkpoint-damaged",
        f"the file {path} cannot be read.",
        why=f"it has {size} bytes; {reason}" if size else "it is empty",
        fix="copy it again from an intact copy, or load another one",
    )


@contextmanager
def replacing(path: str, *, follow: bool = True) -> Iterator[BinaryIO]:
    """Yields a new file, which replaces the one at `path` when the `with` block ends without an error.

    It is on the disk then; until then the old file stays. Its `name` is its temporary path, for libraries that open a file
    themselves. A device or a pipe (/dev/null) is written to rather than replaced.

    Args:
        path: where it belongs.
        follow: a link there stays one, and the file behind it is replaced; else the link is. The first is for paths that
            the script named, the second for names of ours.
    """
    path = os.path.realpath(path) if follow else os.path.abspath(path)
    if follow and os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        with open(path, "wb") as file:
            yield file
        return
    folder, name = os.path.split(path)
    partial = os.path.join(folder, f".{name}.partial-{secrets.token_hex(4)}")
    try:
        with open(partial, "wb") as file:
            yield file
        # The file is opened once more, because a library may have written it under its name and not through `file`. Its data
        # must be on the disk before its name is: a crash between the two would leave an empty file.
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.remove(partial)
        raise


def save_object(obj: Any, path: str | os.PathLike[str], safe_serialization: bool = False) -> None:
    """Saves anything that `torch.save` takes, or a dictionary of tensors as safetensors.

    An old file at `path` stays until the new one is complete. Missing folders are made.

    Ranks: whoever calls; no communication.

    Raises:
        CheckpointError: `checkpoint-value`, `checkpoint-not-writable`, `checkpoint-disk-full`, `checkpoint-io`.
    """
    name = os.path.abspath(os.fspath(path))
    if safe_serialization and not _only_tensors(obj):
        raise CheckpointError(
            "checkpoint-value",
            f"a {type(obj).__qualname__} cannot be saved as safetensors.",
            why="the format holds a dictionary of names and tensors, nothing else",
            fix="save without safe_serialization, or save only the tensors",
        )
    with writing(f"saving {name}"):
        os.makedirs(os.path.dirname(name), exist_ok=True)
    with writing(f"saving {name}"), replacing(name) as file:
        if safe_serialization:
            write_safetensors(obj, file)
        else:
            torch.save(obj, file)


def load_object(path: str | os.PathLike[str], *, map_location: Any = "cpu") -> Any:
    """Reads what `save_object` wrote, without running code from the file.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged`, `checkpoint-unsafe`.
    """
    name = os.path.abspath(os.fspath(path))
    with reading(name), open(name, "rb") as file:
        # A damaged header may not look like one: the name then says how the file was meant, and torch's reader would
        # take its bytes for a pickle that asks for code.
        if is_safetensors(file) or name.endswith(".safetensors"):
            tensors = load_safetensors(file.read())
            return {key: tensor.to(map_location) for key, tensor in tensors.items()}
        return torch.load(file, map_location=map_location, weights_only=True)


def write_safetensors(tensors: Mapping[str, Tensor], file: BinaryIO) -> None:
    """Writes tensors into a file that `replacing` gave, without a copy of those that lie alone in CPU memory."""
    separate: dict[str, Tensor] = {}
    addresses = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        # The format knows no shared memory. A tensor that is a part of a larger storage, or another name of a tensor before
        # it, gets memory of its own.
        if tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.data_ptr() in addresses:
            tensor = tensor.clone()
        addresses.add(tensor.data_ptr())
        separate[name] = tensor
    save_file(separate, file.name, metadata={"format": "pt"})


def _only_tensors(obj: object) -> bool:
    if not isinstance(obj, Mapping):
        return False
    return all(isinstance(key, str) and isinstance(value, Tensor) for key, value in obj.items())


def is_safetensors(file: BinaryIO) -> bool:
    """Returns whether a file is one, by its first bytes: the length of a JSON header, then the header."""
    head = file.read(9)
    file.seek(0)
    return len(head) == 9 and head[8:9] == b"{"


def _beside(path: str) -> str:
    folder = os.path.dirname(path)
    names = sorted(os.listdir(folder))[:8] if os.path.isdir(folder) else []
    return f"beside it: {', '.join(names)}" if names else f"{folder} is empty or missing"
