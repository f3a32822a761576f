"""The frame: every dependency is pinned and has a reason, `make help` lists every entry, the README stays short."""

from __future__ import annotations

import re
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path


def dependencies(root: Path) -> dict[str, set[str]]:
    """Names of the packages of others that each part asks for, and those that tests, docs and examples need."""
    needed: dict[str, set[str]] = {}
    for file in root.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        for group in (project["dependencies"], *project.get("optional-dependencies", {}).values()):
            needed.setdefault(project["name"], set()).update(re.split(r"[^\w.-]", each)[0] for each in group)
    lines = (root / "dev" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    needed["dev"] = {re.split(r"[^\w.-]", line)[0] for line in lines if line and not line.startswith("#")}
    parts = needed.keys()
    return {part: {name for name in names if name not in parts} for part, names in needed.items()}


def test_every_dependency_is_pinned(root: Path) -> None:
    text = (root / "constraints.txt").read_text(encoding="utf-8")
    pinned = {line.split("==")[0].lower() for line in text.splitlines() if "==" in line}
    missing = {name for group in dependencies(root).values() for name in group if name.lower() not in pinned}
    assert not missing, f"pin these in constraints.txt: {sorted(missing)}"
    assert not re.findall(r"\+\w+$|://|@", text, re.MULTILINE), "plain versions alone, which any index can serve"


def test_every_dependency_has_a_reason(root: Path) -> None:
    text = (root / "docs" / "adr" / "0001-dependencies.md").read_text(encoding="utf-8")
    rows = [line.lower() for line in text.splitlines() if line.startswith("|")]
    missing = {
        name for group in dependencies(root).values() for name in group if not any(name.lower() in r for r in rows)
    }
    assert not missing, f"give a reason in docs/adr/0001-dependencies.md for {sorted(missing)}"


def test_make_help_lists_every_entry(root: Path) -> None:
    entries = re.search(r"^\.PHONY: (.+)$", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert entries
    listed = subprocess.run(["make", "--no-print-directory"], cwd=root, capture_output=True, text=True, check=True)
    assert re.findall(r"^  make ([\w-]+) ", listed.stdout, re.MULTILINE) == entries.group(1).split()


def test_ci_runs_make_test(root: Path) -> None:
    text = (root / ".ci" / "run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in text and text.rstrip().endswith("make test")
    assert (root / ".ci" / "run").stat().st_mode & 0o111


def test_the_readme_is_short(root: Path) -> None:
    assert len((root / "README.md").read_text(encoding="utf-8").splitlines()) < 120


def test_the_readme_begins_with_gpus_and_says_what_was_not_run(root: Path) -> None:
    first = (root / "README.md").read_text(encoding="utf-8").splitlines()[:12]
    assert "any number of GPUs" in first[2]
    assert any(line.startswith("paceline launch train.py") for line in first)
    assert any(line.startswith("srun ") for line in first)
    assert any("has not run on a GPU yet" in line for line in first)


def test_the_readme_names_its_peers_in_the_tables_heads(root: Path) -> None:
    lines = (root / "README.md").read_text(encoding="utf-8").splitlines()
    heads = [before for before, line in pairwise(lines) if line.startswith("|---")]
    assert heads
    for head in heads:
        peers = [cell for cell in head.split("|") if " over " in cell or " of " in cell]
        assert any(re.search(r"(PyTorch|accelerate|DeepSpeed) \d+\.\d+", cell) for cell in peers), head


def test_the_readme_has_a_picture_that_is_there(root: Path) -> None:
    pictures = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", (root / "README.md").read_text(encoding="utf-8"))
    assert pictures and all(len(text.split()) > 5 and (root / path).is_file() for text, path in pictures)


def test_every_decision_is_in_the_index(root: Path) -> None:
    folder = root / "docs" / "adr"
    index = (folder / "index.md").read_text(encoding="utf-8")
    numbered = sorted(path.name for path in folder.glob("[0-9]*.md"))
    assert numbered and re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", index) == numbered
