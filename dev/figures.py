"""Figures of the source as a reader meets it: how much stands in one statement, how often a comment says why, what is typed.

python dev/figures.py [FOLDER ...]        markdown, for a report
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter
from pathlib import Path

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Figures:
    """What was counted in a folder of Python files."""

    def __init__(self, folder: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.lengths: list[int] = []
        for path in sorted(folder.rglob("*.py")):
            self._read(path)

    def _read(self, path: Path) -> None:
        text = path.read_text()
        tree = ast.parse(text)
        self.counts["lines"] += len(text.splitlines())
        self.counts["files"] += 1
        self._count_tokens(text)
        imported_from_torch = _names_from_torch(tree)
        for node in ast.walk(tree):
            if isinstance(node, COMPREHENSIONS):
                self.counts["comprehensions"] += 1
            elif isinstance(node, ast.IfExp):
                self.counts["conditional expressions"] += 1
            elif isinstance(node, FUNCTIONS):
                self.lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
                self._count_parameters(node)
            elif isinstance(node, ast.Attribute) and _is_private(node.attr):
                self._count_private(node, imported_from_torch)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                private_path = any(_is_private(part) for part in (node.module or "").split("."))
                for alias in node.names:
                    if private_path or _is_private(alias.name):
                        self.counts["private names of torch"] += 1

    def _count_tokens(self, text: str) -> None:
        code_lines: set[int] = set()
        comment_lines: set[int] = set()
        skipped = (
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
            tokenize.ENDMARKER,
            tokenize.ENCODING,
        )
        docstrings = _docstring_lines(ast.parse(text))
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                if not token.string.startswith(("# noqa", "# type:", "# fmt:")):
                    comment_lines.add(token.start[0])
            elif token.type not in skipped and token.start[0] not in docstrings:
                code_lines.update(range(token.start[0], token.end[0] + 1))
        self.counts["code lines"] += len(code_lines)
        self.counts["comment lines"] += len(comment_lines)

    def _count_parameters(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        given = node.args
        parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        for parameter in parameters:
            if parameter is None or parameter.arg in ("self", "cls"):
                continue
            self.counts["parameters"] += 1
            if isinstance(parameter.annotation, ast.Name) and parameter.annotation.id == "Any":
                self.counts["parameters typed Any"] += 1

    def _count_private(self, node: ast.Attribute, imported_from_torch: set[str]) -> None:
        owner = node.value
        if isinstance(owner, ast.Name) and owner.id in ("self", "cls"):
            return
        if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super":
            return
        root: ast.expr = owner
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in imported_from_torch:
            self.counts["private names of torch"] += 1
        else:
            self.counts["private accesses across objects"] += 1


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _names_from_torch(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(
                (alias.asname or alias.name).split(".")[0] for alias in node.names if alias.name.startswith("torch")
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
            and ast.get_docstring(node, clean=False) is not None
        ):
            docstring = node.body[0]
            lines.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def rows(folder: Path) -> list[tuple[str, str]]:
    """The figures of a folder, each with its name."""
    figures = Figures(folder)
    counts, lengths = figures.counts, sorted(figures.lengths)
    per_thousand = 1000 / max(counts["code lines"], 1)
    percentiles = statistics.quantiles(lengths, n=100) if len(lengths) > 1 else [0.0] * 99
    return [
        ("files", f"{counts['files']:,}"),
        ("lines", f"{counts['lines']:,}"),
        ("code lines (no blank line, comment or docstring)", f"{counts['code lines']:,}"),
        ("function length p50 / p90 / p99", " / ".join(f"{percentiles[p - 1]:.0f}" for p in (50, 90, 99))),
        ("comprehensions per 1,000 code lines", f"{counts['comprehensions'] * per_thousand:.1f}"),
        ("conditional expressions per 1,000", f"{counts['conditional expressions'] * per_thousand:.1f}"),
        ("comment lines per 1,000", f"{counts['comment lines'] * per_thousand:.1f}"),
        ("parameters typed Any", f"{100 * counts['parameters typed Any'] / max(counts['parameters'], 1):.1f} %"),
        ("private accesses across objects", f"{counts['private accesses across objects']:,}"),
        ("private names of torch, uses", f"{counts['private names of torch']:,}"),
    ]


def main(folders: list[str]) -> None:
    """Prints a table: a row for each figure, a column for each folder."""
    columns = [rows(Path(folder)) for folder in folders]
    print("| |", " | ".join(folders), "|")
    print("|---|" + "---:|" * len(folders))
    for number, (name, _) in enumerate(columns[0]):
        print(f"| {name} |", " | ".join(column[number][1] for column in columns), "|")


if __name__ == "__main__":
    main(sys.argv[1:] or ["packages/paceline/src/paceline"])
