"""Errors of this door that scripts catch as the Python class that accelerate raises; they stay coded errors of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.base.errors import CheckpointError, CollectiveError, CompatError, PacelineError, TrackerError


class CompatValueError(CompatError, ValueError):
    """A value that accelerate refuses with a `ValueError`."""


class CompatTypeError(CompatError, TypeError):
    """An object that accelerate refuses with a `TypeError`."""


class CompatRuntimeError(CompatError, RuntimeError):
    """A call that accelerate refuses with a `RuntimeError`."""


class CompatAssertionError(CompatError, AssertionError):
    """A call that accelerate refuses with an `AssertionError`."""


class UnknownHandler(CompatValueError, AssertionError):
    """An object that is no handler among `kwargs_handlers`, maybe beside other wrong arguments."""


class MissingModel(CompatError, OSError):
    """A model that is nowhere to be found, for which accelerate raises an `OSError`."""


class CompatImportError(CompatError, ImportError):
    """A call that needs a package which is not installed."""


class MissingCheckpoint(CheckpointError, FileNotFoundError, ValueError):
    """A folder that is not there, or without the files of a checkpoint; accelerate raises a `ValueError`."""


class CheckpointValueError(CheckpointError, ValueError):
    """A checkpoint or a value that cannot be saved or loaded, which accelerate refuses with a `ValueError`."""


class CheckpointOSError(CheckpointError, OSError):
    """A file of weights that accelerate refuses with an `OSError`."""


class MissingParts(CompatError, FileNotFoundError):
    """A checkpoint with fewer models or states than were prepared; accelerate misses the first file."""


class MissingFile(CheckpointError, FileNotFoundError):
    """A file of weights that an index names and that is not there."""


class TrackerChoiceError(TrackerError, ValueError):
    """Trackers that cannot be had, which accelerate refuses with a `ValueError`."""


class DistributedOperationException(CollectiveError):
    """Ranks that bring other shapes to an operation, found because ACCELERATE_DEBUG_MODE asks to look.

    Args:
        what: what happened.
        why, fix: as of every coded error.
    """

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__("collective-mismatch", what, why, fix)
        self._arguments = (what, why, fix)
        if not why and not fix:  # a script's own, which says what it was given
            self.args = (what,)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._arguments


@contextmanager
def refused_as(kind: type[PacelineError], code: str) -> Iterator[None]:
    """Raises an error that has this code as another class of errors, which scripts of accelerate catch."""
    try:
        yield
    except CheckpointError as error:
        if error.code != code:
            raise
        raise kind.of(error.problems) from None
