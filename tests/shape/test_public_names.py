"""The public names, frozen in `public_names.txt`: adding or removing one is a decision that a reviewer sees."""

from __future__ import annotations

from pathlib import Path

SNAPSHOT = Path(__file__).with_name("public_names.txt")


def public_names() -> list[str]:
    import paceline

    names = [f"paceline.{name}" for name in paceline.__all__]
    names += [f"Accelerator.{name}" for name in dir(paceline.Accelerator) if not name.startswith("_")]
    return sorted(names)


def test_public_names_are_those_of_the_snapshot() -> None:
    today, frozen = public_names(), SNAPSHOT.read_text(encoding="utf-8").split()
    added, removed = sorted(set(today) - set(frozen)), sorted(set(frozen) - set(today))
    assert not (added or removed), f"to add to {SNAPSHOT.name}: {added}; to remove: {removed}"


def test_every_public_name_loads_and_has_a_docstring() -> None:
    import paceline

    for name in paceline.__all__:
        found = getattr(paceline, name)
        assert name.startswith("__") or getattr(found, "__doc__", None), f"paceline.{name} has no docstring"
    assert set(paceline.__all__) <= set(dir(paceline))
