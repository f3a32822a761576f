"""The public names, frozen in `public_names.txt`: adding or removing one is a decision that a reviewer sees.

Each line has a name and the version that had it first. `docs/contributing/public-names.md` says what is public.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from paceline.base.deprecated import DEPRECATIONS
from paceline.base.version import VERSION

SNAPSHOT = Path(__file__).with_name("public_names.txt")


def public_names() -> list[str]:
    import paceline

    names = [f"paceline.{name}" for name in paceline.__all__]
    names += [f"Accelerator.{name}" for name in dir(paceline.Accelerator) if not name.startswith("_")]
    return sorted(names)


def frozen() -> dict[str, str]:
    """Public name -> the version that had it first."""
    lines = SNAPSHOT.read_text(encoding="utf-8").splitlines()
    return dict(line.split() for line in lines)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_public_names_are_those_of_the_snapshot() -> None:
    today, listed = public_names(), frozen()
    added, removed = sorted(set(today) - set(listed)), sorted(set(listed) - set(today))
    to_add = [f"{name} {VERSION}" for name in added]
    assert not (added or removed), f"to add to {SNAPSHOT.name}: {to_add}; to remove: {removed}"
    assert list(listed) == sorted(listed)


def test_no_name_is_of_a_version_to_come() -> None:
    wrong = {name: since for name, since in frozen().items() if numbers(since) > numbers(VERSION)}
    assert not wrong


def test_every_public_name_loads_and_has_a_docstring() -> None:
    import paceline

    for name in paceline.__all__:
        found = getattr(paceline, name)
        assert name.startswith("__") or getattr(found, "__doc__", None), f"paceline.{name} has no docstring"
    assert set(paceline.__all__) <= set(dir(paceline))


def test_deprecated_names_go_when_it_was_said_that_they_would(modules) -> None:
    for name, module in modules.items():
        if "deprecated(" in module.text and name != "paceline.base.deprecated":
            importlib.import_module(name)
    ours = {name: entry for name, entry in DEPRECATIONS.items() if name.startswith("paceline.")}
    overdue = [name for name, entry in ours.items() if numbers(entry.removed_in) <= numbers(VERSION)]
    assert not overdue, f"remove these: {overdue}"
    hasty = []
    for name, entry in ours.items():
        since, removed_in = numbers(entry.since), numbers(entry.removed_in)
        if removed_in[0] == since[0] and removed_in[1] < since[1] + 2:
            hasty.append(name)
    assert not hasty, f"two minor versions have to warn (docs/contributing/deprecation.md): {hasty}"
