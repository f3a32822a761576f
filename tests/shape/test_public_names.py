"""The public names, frozen in `public_names.txt`: adding or removing one is a decision that a reviewer sees.

Each line has a name and the version that had it first. `docs/contributing/public-names.md` says what is public.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

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


MARK = re.compile(r"since (?P<since>[\d.]+), gone in (?P<gone>[\d.]+): use `")


def wrong_marks(tree: ast.AST) -> list[str]:
    """What is wrong with the deprecations of a module, see `docs/contributing/deprecation.md`."""
    wrong = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("deprecated"):
            continue
        text = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
        mark = MARK.match(str(text))
        if mark is None or "FutureWarning" not in ast.unparse(node):
            wrong.append(f"line {node.lineno}: a FutureWarning says `since A, gone in B: use ...`")
            continue
        since, gone = numbers(mark["since"]), numbers(mark["gone"])
        if gone <= numbers(VERSION):
            wrong.append(f"line {node.lineno}: remove it")
        elif gone[0] == since[0] and gone[1] < since[1] + 2:
            wrong.append(f"line {node.lineno}: two minor versions have to warn")
    return wrong


def test_deprecated_names_go_when_it_was_said_that_they_would(modules) -> None:
    marked = [module for module in modules.values() if "deprecated(" in module.text]
    assert not [wrong for module in marked for wrong in wrong_marks(module.tree)]
    example = "@deprecated('since {}, gone in {}: use `f(x)`', category=FutureWarning)\ndef g(): ..."
    found = [
        wrong_marks(ast.parse(example.format(*versions)))
        for versions in (("0.1", "9.0"), ("9.0", "9.1"), ("0.0", "0.1"))
    ]
    assert [len(wrong) for wrong in found] == [0, 1, 1]
