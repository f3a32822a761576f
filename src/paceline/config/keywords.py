"""Keyword arguments that a public function does not take, as an error that names the closest one.

    @checked_keywords
    class Accelerator: ...

    Accelerator(mixed_precison="bf16")    ArgumentError: Accelerator() has no argument 'mixed_precison'; write mixed_precision=

A call that is right pays for one more Python call (about 1 us on a loaded machine).
Names are compared only once Python has refused them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

from paceline.base.errors import ArgumentError
from paceline.config.given import nearest

Checked = TypeVar("Checked", bound=Callable[..., Any])
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def checked_keywords(target: Checked) -> Checked:
    """Decorator: a keyword that `target` does not take raises `argument-unknown`, and no TypeError of Python's.

    Args:
        target: a function; or a class, of which the constructor and the public methods are checked.
    """
    if not isinstance(target, type):
        return cast(Checked, _checked_function(target))
    for name, member in list(vars(target).items()):
        if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
            setattr(target, name, _checked_function(member))
    return target


def refuse_unknown(function: str, given: Iterable[str], accepted: Iterable[str]) -> None:
    """Refuses keywords that a function does not take.

    Args:
        function: what the user called, such as "Accelerator".
        given: names of the keywords of the call.
        accepted: names that it takes.

    Raises:
        ArgumentError: `argument-unknown`, for the first one that is not among them.
    """
    names = list(accepted)
    unknown = [name for name in given if name not in names]
    if not unknown:
        return
    # A function has few arguments, so the end of a name is enough: `level` means `log_level`.
    longer = [name for name in names if name.endswith(f"_{unknown[0]}")]
    close = longer[0] if len(longer) == 1 else nearest(unknown[0], names)
    raise ArgumentError(
        "argument-unknown",
        f"{function}() has no argument {unknown[0]!r}.",
        why=f"it takes: {', '.join(names) or 'no keywords'}",
        fix=f"write {close}=" if close else f"leave {unknown[0]} out",
    )


def _checked_function(function: Any) -> Any:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return function  # it takes every name, and passes them on

    @wraps(function)
    def call(*args: object, **keywords: object) -> Any:
        try:
            return function(*args, **keywords)
        except TypeError:
            accepted = [parameter.name for parameter in parameters if parameter.kind in _NAMED]
            refuse_unknown(_shown(function), keywords, [name for name in accepted if name != "self"])
            raise

    return call


def _shown(function: Any) -> str:
    """How a user calls it: `Accelerator`, `save_state`."""
    owner, _, name = str(function.__qualname__).rpartition(".")
    return owner if name == "__init__" else name
