"""`deprecated` marks a public name that will go: it still works, and says to each line that uses it what to use instead."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Deprecation:
    """What is said of a name that will go.

    Attributes:
        since: the first version that warns.
        removed_in: the first version without the name.
        use: what to use instead.
    """

    since: str
    removed_in: str
    use: str


# Full name of each deprecated function, method and class -> what is said of it. Filled as modules are imported, for the test
# that holds the policy.
DEPRECATIONS: dict[str, Deprecation] = {}


def deprecated(*, since: str, removed_in: str, use: str) -> Callable[[T], T]:
    """Marks a function, a method or a class as one that will go.

    The warning is a `FutureWarning`, because Python hides a `DeprecationWarning` from people who run a script that imports
    the function elsewhere. It names the caller's line.

    Args:
        since: the first version that warns.
        removed_in: the first version without the name; `docs/contributing/deprecation.md` says how much later that is.
        use: what to use instead, as code.

    Example:
        @deprecated(since="0.3.0", removed_in="0.5.0", use="accelerator.save_state(folder)")
        def save(self, folder): ...
    """

    def mark(target: T) -> T:
        name = f"{target.__module__}.{target.__qualname__}"
        text = (
            f"{target.__qualname__} is deprecated since Paceline {since}, and {removed_in} has it no more: use `{use}`."
        )
        DEPRECATIONS[name] = Deprecation(since, removed_in, use)
        marked = _mark_class(target, text) if isinstance(target, type) else _mark_function(target, text)
        # PEP 702: type checkers and editors of Python 3.13 read it.
        marked.__deprecated__ = text
        marked.__doc__ = f"{target.__doc__ or ''}\n\nDeprecated since {since}: use `{use}`."
        return cast(T, marked)

    return mark


def _mark_function(function: Callable[..., Any], text: str) -> Any:
    @functools.wraps(function)
    def call(*args: object, **options: object) -> Any:
        warnings.warn(text, FutureWarning, stacklevel=2)
        return function(*args, **options)

    return call


def _mark_class(kind: type, text: str) -> Any:
    # The class stays the same object, so that `isinstance` and pickles of it go on.
    initialise = kind.__init__  # type: ignore[misc]

    @functools.wraps(initialise)
    def initialise_and_warn(self: object, *args: object, **options: object) -> None:
        # A subclass of somebody's own is told as well: it will have no base.
        warnings.warn(text, FutureWarning, stacklevel=2)
        initialise(self, *args, **options)

    kind.__init__ = initialise_and_warn  # type: ignore[misc]
    return kind
