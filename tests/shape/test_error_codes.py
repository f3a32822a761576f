"""Every error code in use has a section in docs/errors.md and a test that names it; every section is a code in use."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from paceline.base import errors

MAKERS = {name for name, thing in vars(errors).items() if isinstance(thing, type)} - {"Iterable", "Sequence"}
CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def last_name(called: ast.expr) -> str:
    """The last part of the name that is called; nothing where what is called has no name."""
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""


def calls(modules):
    """Module, call and first argument of each call that makes an error or a problem."""
    for module in modules.values():
        if module.name == "paceline.base.errors":
            continue
        for node in module.nodes:
            if isinstance(node, ast.Call) and last_name(node.func) in MAKERS:
                first = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "code"), None)
                if not isinstance(first, ast.Starred):  # a problem that came from another rank, put together again
                    yield module, node, first


@pytest.fixture(scope="module")
def codes(modules) -> dict[str, str]:
    """Code -> where it is raised."""
    found: dict[str, str] = {}
    for module, node, first in calls(modules):
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            found.setdefault(first.value, f"{module.where}:{node.lineno}")
    assert "env-value" in found
    return found


@cache
def sections(root: Path) -> list[str]:
    return re.findall(r"^## (.+)$", (root / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_codes_are_literals(modules) -> None:
    wrong = [
        f"{module.where}:{node.lineno} {ast.unparse(node)[:80]}"
        for module, node, first in calls(modules)
        if not (isinstance(first, ast.Constant) and isinstance(first.value, str) and CODE.fullmatch(first.value))
    ]
    assert not wrong, "the first argument is the code, a string literal such as 'plan-size':\n" + "\n".join(wrong)


def test_each_code_is_documented(codes, root) -> None:
    missing = [f"{code} ({where})" for code, where in sorted(codes.items()) if code not in sections(root)]
    assert not missing, "add a section `## code` to docs/errors.md for:\n" + "\n".join(missing)


def test_each_section_is_a_code_in_use(codes, root) -> None:
    stale = [code for code in sections(root) if code not in codes]
    assert not stale, f"docs/errors.md describes codes that nothing raises: {stale}"


def test_sections_are_sorted_and_unique(root) -> None:
    found = sections(root)
    assert found == sorted(set(found)), "run: python docs/sort_errors.py"


def test_each_code_is_named_by_a_test(codes, root) -> None:
    folders = [root / "tests", *root.glob("packages/*/tests")]
    files = [path for folder in folders for path in folder.rglob("*.py") if path.parent != Path(__file__).parent]
    words: set[str] = set()
    for path in files:
        words.update(re.split(r"[^\w-]+", path.read_text(encoding="utf-8")))
    untested = [f"{code} ({where})" for code, where in sorted(codes.items()) if code not in words]
    assert not untested, "no test triggers:\n" + "\n".join(untested)
