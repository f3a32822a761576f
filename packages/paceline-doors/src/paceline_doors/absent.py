"""Stand-ins for names that Paceline does not carry: they can be imported, subclassed and asked `isinstance` of, but not used.

Each package of another library's names serves them, so that a script fails where it uses a name and not at its import.
"""

from __future__ import annotations

from typing import Any, NoReturn

from paceline.base.errors import CompatError


def refuse(name: str, why: str, fix: str) -> NoReturn:
    """Raises the error of a name that is used, but not carried."""
    raise CompatError("compat-name", f"{name} is not carried by Paceline.", why=why, fix=fix)


class _Absence(type):
    """Type of all stand-ins. A class, because scripts inherit from names and ask `isinstance` of them."""

    _refusal: tuple[str, str, str]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        refuse(*cls._refusal)

    def __getattr__(cls, name: str) -> Any:
        # Inspection asks for such names, and a script does not.
        if name.startswith("_"):
            raise AttributeError(name)
        what, why, fix = cls._refusal
        refuse(f"{what}.{name}", why, fix)

    def __iter__(cls) -> Any:
        refuse(*cls._refusal)

    def __len__(cls) -> int:
        refuse(*cls._refusal)

    def __getitem__(cls, key: object) -> Any:
        refuse(*cls._refusal)

    def __contains__(cls, key: object) -> bool:
        refuse(*cls._refusal)

    def __eq__(cls, other: object) -> bool:
        # A constant that is not carried equals no text and no number, so that a comparison would take the wrong branch.
        if isinstance(other, str | int | float):
            refuse(*cls._refusal)
        return cls is other

    __hash__ = type.__hash__

    def __repr__(cls) -> str:
        return f"<{cls._refusal[0]}, not carried by Paceline>"


def absent(name: str, why: str, fix: str) -> type:
    """Returns a stand-in for a name, which is given with its module for the sake of messages."""
    members = {"_refusal": (name, why, fix), "__doc__": f"{name}: {why}. {fix}."}
    return _Absence(name.rpartition(".")[2], (), members)
