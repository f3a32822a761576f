"""The page of the layout answers its first questions with few files, and names no file that is gone."""

from __future__ import annotations

import re
from pathlib import Path

QUESTIONS = (
    "what does `--zero 2` do to my optimizer?",
    "where is a gradient averaged?",
    "what happens when rank 3 dies?",
    "which bytes does `save_state` write?",
    "who decides the order of samples under accelerate's names?",
    "what runs when I type `paceline launch`?",
)


def answers(root: Path) -> dict[str, list[str]]:
    """Question -> the Python files that its answer names."""
    page = (root / "docs/concepts/code-layout.md").read_text(encoding="utf-8")
    table = page.partition("## Where to look")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {row[0]: re.findall(r"`([\w/]+\.py)`", row[-1]) for row in rows[1:]}


def test_five_files_answer_a_question(root: Path) -> None:
    found = answers(root)
    assert {question: len(found[question]) for question in QUESTIONS if not 1 <= len(found[question]) <= 5} == {}


def test_the_files_are_there(root: Path) -> None:
    paths = {path.as_posix() for path in root.glob("packages/*/src/**/*.py")}
    gone = [
        file for files in answers(root).values() for file in files if not any(p.endswith(f"/{file}") for p in paths)
    ]
    assert gone == []
