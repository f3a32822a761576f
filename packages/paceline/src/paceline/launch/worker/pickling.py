"""Packs functions and values with cloudpickle, for `notebook` and for the processes that it starts.

A function of a notebook travels to fresh processes. The value that it returns on rank 0 travels back through a file beside
the report of that rank.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.base.errors import LaunchError
from paceline.config import libraries

_VALUE_SUFFIX = ".value"


def pack(function: Callable[[], Any]) -> bytes:
    """Packs a function, together with the source lines of notebook cells, which tracebacks show.

    Raises:
        LaunchError: `launch-pickle`, `launch-accelerator`.
    """
    cells = {name: lines for name, lines in linecache.cache.items() if not os.path.exists(name)}
    packed_function = pickled(function, "the function, or what it refers to,")
    return pickled((cells, sys.path, packed_function), "the notebook's cells")


def call_packed(path: str, compat: str) -> Any:
    """Calls the function that `pack` packed into a file.

    Args:
        path: the file.
        compat: libraries whose names are served to the function, joined by commas; "" for none.
    """
    if compat:
        libraries.install(compat.split(","))
    cells, search_path, packed_function = pickle.loads(Path(path).read_bytes())
    sys.path[:] = search_path
    linecache.cache.update(cells)
    return pickle.loads(packed_function)()


def write_value(value: object, report: str) -> None:
    """Writes what a function returned on rank 0, for `value_of`.

    A value that cannot be pickled is no failure of the run, and must not restart it: the error takes the place of the value.
    """
    try:
        packed = pickled((value, None), "what the function returned")
    except LaunchError as error:
        packed = pickled((None, error), "an error")
    Path(report + _VALUE_SUFFIX).write_bytes(packed)


def value_of(report: Path) -> Any:
    """Returns what a function returned on the rank with this report; None for ranks other than 0.

    Raises:
        LaunchError: `launch-pickle`, if the value could not be pickled.
    """
    path = Path(f"{report}{_VALUE_SUFFIX}")
    if not path.is_file():
        return None
    value, error = pickle.loads(path.read_bytes())
    if error is not None:
        raise error
    return value


def pickled(content: object, name: str) -> bytes:
    """Pickles an object, including functions and classes that a notebook defines.

    Args:
        content: the object.
        name: its name in errors.

    Raises:
        LaunchError: `launch-pickle`, `launch-accelerator`.
    """
    import cloudpickle  # type: ignore[import-untyped]

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            # Only an `Accelerator` has this attribute: the file and line of its construction.
            if hasattr(type(value), "_constructed_at"):
                raise _accelerator_outside(value._constructed_at)
            return super().reducer_override(value)

    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump(content)
        return buffer.getvalue()
    except LaunchError:
        raise
    except Exception as error:
        raise LaunchError(
            "launch-pickle",
            f"{name} cannot travel between processes.",
            why=f"{type(error).__name__}: {error}",
            fix="create objects that belong to one process (open files, locks, loaders) inside the function",
        ) from error


def _accelerator_outside(place: tuple[str, int]) -> LaunchError:
    """Returns the error for an `Accelerator` that the function refers to.

    Args:
        place: file and line of its construction.
    """
    # Imported here, because every process of a launch imports this module, and few need that one.
    from paceline.launch.notebook_cells import place_of

    return LaunchError(
        "launch-accelerator",
        "the function uses an `Accelerator` that was constructed outside of it.",
        why=f"it was constructed in {place_of(*place)}, for that process alone: in each of the new processes it would say "
        "that it is rank 0 of 1, and each would train a model of its own",
        fix="move `accelerator = Accelerator(...)`, and its calls of `prepare`, into the function",
    )
