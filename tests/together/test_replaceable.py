"""Functions that tests of scripts replace: the table names each module of ours that calls them."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

import paceline_accelerate
import paceline_deepspeed


def callers_by_imports(door: ModuleType) -> dict[str, set[str]]:
    """Each module-level `from module import name` of a door's own modules: "module:name" -> the importing modules."""
    callers: dict[str, set[str]] = {}
    folder = Path(door.__path__[0])
    for path in folder.rglob("*.py"):
        module = ".".join((door.__name__, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if alias.asname is None:
                        callers.setdefault(f"{node.module}:{alias.name}", set()).add(module)
    return callers


@pytest.mark.parametrize("door", [paceline_accelerate, paceline_deepspeed])
def test_the_table_names_each_caller(door: ModuleType) -> None:
    served = set(door.carried().values())
    by_imports = callers_by_imports(door)
    expected = {}
    for target in served:
        module, _, name = target.partition(":")
        callers = {caller for caller in by_imports.get(target, ()) if ".test_utils" not in caller}
        if not module.startswith(f"{door.__name__}.") or not callers:
            continue
        value = getattr(importlib.import_module(module), name)
        if callable(value) and not isinstance(value, type):
            expected[target] = callers
    assert {target: set(callers) for target, callers in door.replaceable().items()} == expected


def test_callers_in_other_modules_call_the_replacement(serve) -> None:
    serve("accelerate")
    from paceline_accelerate import loading

    modeling = importlib.import_module("accelerate.utils.modeling")
    original = loading.retie_parameters
    modeling.retie_parameters = replacement = lambda *arguments: None
    assert loading.retie_parameters is replacement
    modeling.retie_parameters = original
    assert loading.retie_parameters is original
