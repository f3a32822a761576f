"""Whether torchao is installed in a release that has what this part uses of it."""

from __future__ import annotations

from importlib import metadata

from paceline.base.errors import Problem
from paceline.base.parts import how_to_install

_OLDEST = (0, 18)  # its prototypes change their signatures


def torchao_problem(what: str, extra: str, why: str) -> Problem | None:
    """Returns the problem with a missing or old torchao; None if it can be used.

    Args:
        what: what needs it, in the plural.
        extra: the extra that installs it.
        why: where it was asked for.
    """
    try:
        version = metadata.version("torchao")
    except metadata.PackageNotFoundError:
        version = ""
    numbers = [int(part) for part in version.split(".")[:2] if part.isdecimal()]
    if tuple(numbers) >= _OLDEST:
        return None
    oldest = ".".join(map(str, _OLDEST))
    state = f"torchao {version} is too old for {what}." if version else f"{what} need torchao, which is not installed."
    return Problem(
        "torchao-missing",
        state,
        why=f"{why}; releases from {oldest} on have them",
        fix=f"run `{how_to_install(extra)}`, or `pip install 'torchao>={oldest}'`",
    )
