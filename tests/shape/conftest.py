"""The package as text: each module's syntax tree and the modules of Paceline that it imports. Nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest
from choose_tests import names_of

ROOT = Path(__file__).parents[2]


def import_statements(tree: ast.Module, *, into_functions: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports of a file, but for those in `if TYPE_CHECKING:` blocks and, on request, in the bodies of functions."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += node.orelse
        elif into_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for block in ("body", "orelse", "handlers", "finalbody", "cases"):
                waiting += getattr(node, block, [])


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree, which are walked once for all tests."""
        return list(ast.walk(self.tree))

    @property
    def where(self) -> str:
        """Its path from the root of the repository."""
        return str(self.path.relative_to(ROOT))

    @property
    def room(self) -> str:
        """The package directly under `paceline`, or the file's own name where it lies beside them; of a part, its package.

        The private names of torch are one room, those that one part alone uses among them.
        """
        package, _, rest = self.name.partition(".")
        if rest.partition(".")[0] == "torch_internals":
            return "torch_internals"
        if package != "paceline":
            return package
        return rest.partition(".")[0] or "__init__"

    @cache  # noqa: B019  (a module lives as long as the tests)
    def imported(self, *, into_functions: bool = True) -> list[tuple[int, str]]:
        """Line and dotted name of each import."""
        package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        return [
            (node.lineno, name)
            for node in import_statements(self.tree, into_functions=into_functions)
            for name in names_of(node, package)
        ]


def _modules() -> list[Module]:
    found = []
    for source in sorted(ROOT.glob("packages/*/src")):
        for path in sorted(source.rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            found.append(Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def files() -> list[Module]:
    """All files of all parts."""
    return _modules()


@pytest.fixture(scope="session")
def modules(files: list[Module]) -> dict[str, Module]:
    """All modules of all parts by name, but for those that have another library's name."""
    found = {module.name: module for module in files if ".for_children." not in module.name}
    assert "paceline.base.errors" in found, "the package was not found"
    return found
