"""What a rehearsal or a trial does otherwise it does as a `Runtime`: no name of ours is replaced from outside."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from paceline.base.ours import is_our_module


def dotted_names(nodes: list[ast.AST]) -> Iterator[str]:
    """Texts handed to calls that could be looked up as a name of ours, such as "paceline.run.states.States.load"."""
    for node in nodes:
        if isinstance(node, ast.Call):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


def names_something(text: str, src: Path) -> bool:
    """Whether a text is the path of a name inside a module; two parts alone are a group of entry points or a logger."""
    parts = text.split(".")
    if parts[0] != "paceline" or len(parts) < 3 or not all(part.isidentifier() for part in parts):
        return False
    module = src
    for part in parts:
        if (module / f"{part}.py").is_file():
            return parts.index(part) < len(parts) - 1
        if not (module / part).is_dir():
            return True
        module /= part
    return False


def modules_of_ours(nodes: list[ast.AST], src: Path) -> set[str]:
    """Names in a file that stand for modules of ours."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and is_our_module(node.module or ""):
            package = src.joinpath(*(node.module or "").split("."))
            for alias in node.names:
                if (package / f"{alias.name}.py").is_file() or (package / alias.name).is_dir():
                    names.add(alias.asname or alias.name)
    return names


def test_no_name_of_ours_is_replaced_as_a_text(root: Path, files) -> None:
    patched: list[str] = []
    for module in files:
        src = root.joinpath(*module.path.relative_to(root).parts[:3])
        for text in dotted_names(module.nodes):
            if names_something(text, src):
                patched.append(f"{module.where}: {text}")
    assert not patched, f"let the run look up its `Runtime` (world/runtime.py) instead: {patched}"


def test_no_module_of_ours_gets_another_function(root: Path, files) -> None:
    assigned: list[str] = []
    for module in files:
        src = root.joinpath(*module.path.relative_to(root).parts[:3])
        ours = modules_of_ours(module.nodes, src)
        stores = [node for node in module.nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
        for node in stores:
            if isinstance(node.value, ast.Name) and node.value.id in ours:
                assigned.append(f"{module.where}:{node.lineno}")
    assert not assigned, assigned
