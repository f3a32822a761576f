"""A file of tests lies with the part that it is of, and needs what this part depends on: `make test-part` runs it so."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest
from choose_tests import ROOT, FilesOfTests, Sources, names_of

PARTS = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
# Folders of tests/ that look at all parts, or need what a machine may lack. `together` is for parts of which none depends on
# the others.
OF_ALL_PARTS = {"browser", "docs", "gpu", "hosts", "loops", "parts", "shape", "together", "trackers"}
with_dependencies = runpy.run_path(str(ROOT / "dev" / "test_part.py"))["with_dependencies"]


def parts_imported(path: Path) -> set[str]:
    """The parts that a file imports when it is read, in no function."""
    found = set()
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        found |= {name.partition(".")[0].replace("_", "-") for name in names_of(statement, "")}
    return found & set(PARTS)


def needed_beside(tree: ast.Module) -> set[str]:
    """The parts that cases say they need, by `pytest.mark.needs`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    marks = [call for call in calls if ast.unparse(call.func) == "pytest.mark.needs"]
    return {f"paceline-{ast.literal_eval(word)}" for mark in marks for word in mark.args}


def test_each_part_has_tests() -> None:
    for part in PARTS:
        assert list((ROOT / "packages" / part / "tests").rglob("test_*.py")), part


def test_a_file_lies_with_one_part_or_with_those_of_all() -> None:
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in ROOT.glob("tests/**/test_*.py")}
    assert folders <= OF_ALL_PARTS, "tests of one part lie in packages/PART/tests"


@pytest.fixture(scope="module")
def tests() -> FilesOfTests:
    return FilesOfTests(Sources())


@pytest.mark.parametrize("part", PARTS)
def test_the_files_of_a_part_import_what_it_depends_on(part: str, tests: FilesOfTests) -> None:
    allowed = set(with_dependencies(part))
    wrong = {}
    for file in tests.files:
        if not file.is_relative_to(ROOT / "packages" / part):
            continue
        for path in tests.with_helpers(file):
            more = parts_imported(path) - allowed
            if more:
                wrong[str(file.relative_to(ROOT))] = more
        idle = needed_beside(ast.parse(file.read_text(encoding="utf-8"))) & allowed
        assert not idle, f"{file}: {idle} are there in any case"
    assert not wrong, "move them to a part that depends on these"
