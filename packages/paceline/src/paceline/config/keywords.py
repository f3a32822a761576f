"""Reports a keyword argument that a public function does not take, with an error that names the closest one.

    @checked_keywords
    class Accelerator: ...

    Accelerator(mixed_precison="bf16")    ArgumentError: Accelerator() has no argument 'mixed_precison'; write mixed_precision=

A correct call costs one more Python call (about 1 us on a loaded machine). The names are compared only after Python has
refused the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

from paceline.base.errors import ArgumentError
from paceline.config.given import nearest

Checked = TypeVar("Checked", bound=Callable[..., Any])
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# What other launchers call the number of processes.
_PROCESSES = (
    "nproc", "nprocs", "nproc_per_node", "procs", "num_procs", "n_procs", "np", "gpus", "num_gpus", "devices", "world_size",
)  # fmt: skip


def checked_keywords(target: Checked) -> Checked:
    """Decorates `target` so that a keyword that it does not take raises `argument-unknown` instead of Python's TypeError.

    Args:
        target: a function; or a class, whose constructor and public methods are then checked.
    """
    if not isinstance(target, type):
        return cast(Checked, _checked_function(target))
    for name, member in list(vars(target).items()):
        if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
            setattr(target, name, _checked_function(member))
    return target


def refuse_unknown(
    function: str, given: Iterable[str], accepted: Iterable[str], takes_any_number: bool = False
) -> None:
    """Refuses keywords that a function does not take.

    Args:
        function: what the user called, such as "Accelerator".
        given: names of the keywords of the call; a mapping has their values, too.
        accepted: names of the keywords that the function takes.
        takes_any_number: whether it takes any number of values without a name, as `prepare` does.

    Raises:
        ArgumentError: `argument-unknown`, for the first keyword that is not accepted.
    """
    names = list(accepted)
    unknown = [name for name in given if name not in names]
    if not unknown:
        return
    # A function has few arguments, so the end of a name is enough to suggest it: `level` means `log_level`.
    same_end = [name for name in names if name.endswith(f"_{unknown[0]}")]
    value: object = ""
    if len(same_end) == 1:
        close = same_end[0]
    elif unknown[0] in _PROCESSES and "num_processes" in names:
        value = given[unknown[0]] if isinstance(given, Mapping) else ""
        close = "num_processes"
    else:
        close = nearest(unknown[0], names)
    fix = f"leave {unknown[0]} out"
    if close:
        fix = f"write {close}={value}"
    elif takes_any_number:
        fix = f"pass the values without names: {function}({', '.join(unknown)})"
    raise ArgumentError(
        "argument-unknown",
        f"{function}() has no argument {unknown[0]!r}.",
        why=f"it takes: {', '.join(names) or 'no keywords'}",
        fix=fix,
    ) from None  # Python's own error says no more


def _checked_function(function: Any) -> Any:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return function  # it takes every name, and passes them on

    takes_any_number = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)

    @wraps(function)
    def call(*args: object, **keywords: object) -> Any:
        try:
            return function(*args, **keywords)
        except TypeError:
            # The error may also come from inside the function. Then all keywords are accepted ones, nothing is refused
            # here, and Python's own error goes on.
            accepted = []
            for parameter in parameters:
                if parameter.kind in _NAMED and parameter.name != "self":
                    accepted.append(parameter.name)
            refuse_unknown(_shown(function), keywords, accepted, takes_any_number)
            raise

    return call


def _shown(function: Any) -> str:
    """Returns the name by which a user calls a function: `Accelerator`, `save_state`."""
    owner, _, name = str(function.__qualname__).rpartition(".")
    return owner if name == "__init__" else name
