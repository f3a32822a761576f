"""No file needs itself by way of others, and a field of a class is written by that class.

Both say how much one has to read to understand one thing. A file of a ring is understood when all files of the ring are; a
field that several classes write has a value that none of them explains. How long a file is matters less.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from choose_tests import text_of

FIELDS = Path(__file__).with_name("fields_written_elsewhere.txt")

# Fields of objects of other libraries that some class of ours has too, and what a command line was parsed to.
OF_OTHERS = (
    " __doc__ __name__ action args choices complete data epilog error extra formatter_class forward "
    "generator grad name returncode training usage version "
)
HOLDERS_OF_OTHERS = ("args", "ctx", "namespace", "parser", "action", "sys")


def imports_of(module) -> Iterator[str]:
    """Dotted names that a module imports anywhere, also for type checkers alone."""
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    return text_of(module.tree).imported_names(package)


def graph_of(modules) -> dict[str, set[str]]:
    """Module -> the modules that it imports. `paceline` itself has no place in it: its names are loaded on first use."""
    graph: dict[str, set[str]] = {}
    for name, module in modules.items():
        if name == "paceline":
            continue
        graph[name] = set()
        for imported in imports_of(module):
            while imported not in modules and imported:
                imported = imported.rpartition(".")[0]
            if imported not in ("", name, "paceline"):
                graph[name].add(imported)
    return graph


def rings_of(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """The groups of nodes that reach each other (Tarjan 1972, "Depth-first search and linear graph algorithms")."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    rings: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        path.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
            if other in path:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == index[node]:
            start = path.index(node)
            if len(path) - start > 1:
                rings.append(set(path[start:]))
            del path[start:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return rings


def test_files_do_not_import_each_other_in_rings(modules) -> None:
    """Imports for type checkers and those in functions included."""
    rings = rings_of(graph_of(modules))
    assert not rings, f"move what both need below both: {[sorted(ring) for ring in rings]}"


def test_a_ring_is_seen() -> None:
    assert rings_of({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [{"b", "c"}]
    assert rings_of({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}) == []


@cache
def assignments(tree: ast.AST) -> list[tuple[str, ast.Attribute]]:
    """Each attribute that is assigned to or deleted, with the class in whose body it happens."""
    found = []
    waiting: list[tuple[str, ast.AST]] = [("", tree)]
    while waiting:
        of_class, node = waiting.pop()
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            found.append((of_class, node))
        inside = node.name if isinstance(node, ast.ClassDef) else of_class
        waiting += reversed([(inside, child) for child in ast.iter_child_nodes(node)])
    return found


def fields_of(modules) -> dict[str, set[str]]:
    """Name of a field -> the files whose classes have it: declared in a body, or assigned to `self`."""
    files: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for _, node in assignments(module.tree):
            if ast.unparse(node.value) == "self":
                files[node.attr].add(module.name)
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                for statement in node.body:
                    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                        files[statement.target.id].add(module.name)
    return files


def written_elsewhere(modules) -> set[str]:
    """`module Class object.field` for each field that is written outside of all files whose classes have it.

    Types are not known here, so that a field which a class of the same file has as well is not seen.
    """
    files = fields_of(modules)
    found = set()
    for module in modules.values():
        for of_class, node in assignments(module.tree):
            holder = ast.unparse(node.value)
            if (
                holder in ("self", "cls")
                or holder.partition(".")[0] in HOLDERS_OF_OTHERS
                or f" {node.attr} " in OF_OTHERS
            ):
                continue
            if node.attr in files and module.name not in files[node.attr]:
                found.add(f"{module.name} {of_class or '-'} {holder}.{node.attr}")
    return found


def test_a_field_is_written_by_its_class(modules) -> None:
    listed = set(FIELDS.read_text(encoding="utf-8").splitlines())
    found = written_elsewhere(modules)
    assert found <= listed, f"give the owner a method: {sorted(found - listed)}"
    assert listed <= found, f"remove from {FIELDS.name}: {sorted(listed - found)}"


def test_what_counts_as_written() -> None:
    tree = ast.parse(
        "class A:\n    def f(self, b):\n        self.c = b.d = 1\n        del b.e\n        x, b.g = 2, 3\nb.h += 1"
    )
    written = [(of_class, ast.unparse(node)) for of_class, node in assignments(tree)]
    assert written == [("A", "self.c"), ("A", "b.d"), ("A", "b.e"), ("A", "b.g"), ("", "b.h")]
