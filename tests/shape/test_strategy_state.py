"""Strategies keep nothing: what was done to a model belongs to its `AppliedStrategy`, and no module of `parallel` holds any."""

from __future__ import annotations

import ast

AXES = ("context", "experts", "pipeline", "tensor")  # packages of strategies
CONTAINERS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
MAKERS = {"dict", "list", "set", "defaultdict", "deque", "count", "OrderedDict", "Counter", "ContextVar"}
WRITERS = {"append", "add", "update", "pop", "popitem", "setdefault", "extend", "insert", "remove", "discard", "clear"}


def state_of(source: str) -> list[str]:
    """Names at the top of a module that hold weak references, or what functions of the module write to."""
    tree = ast.parse(source)
    weak, mutable = [], {}
    for statement in tree.body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        value = statement.value
        made_by = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
        for name in (target.id for target in targets if isinstance(target, ast.Name)):
            if made_by.startswith("Weak"):
                weak.append(name)
            elif isinstance(value, CONTAINERS) or made_by in MAKERS:
                mutable[name] = statement.lineno
    return weak + [name for name in mutable if name in written(tree)]


def written(tree: ast.Module) -> set[str]:
    """Names that some statement changes the content of."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            names.update(node.names)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            names.add(ast.unparse(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITERS:
            names.add(ast.unparse(node.func.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next":
            names.update(ast.unparse(argument) for argument in node.args)
    return names


def test_no_module_of_parallel_keeps_state(modules) -> None:
    wrong = [
        f"{module.where}: {name}"
        for module in modules.values()
        if module.name.startswith("paceline.parallel")
        for name in state_of(module.text)
    ]
    assert not wrong, "keep it in the AppliedStrategy:\n" + "\n".join(wrong)


def test_such_state_is_seen() -> None:
    seen = state_of(
        "import weakref\n"
        "_UNITS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()\n"
        "_NAMES: list[str] = []\n"
        "_TABLE = {'a': 1}\n"
        "_OPEN = {}\n"
        "def f(x):\n"
        "    _NAMES.append(x)\n"
        "    _OPEN[x] = _TABLE['a']\n"
    )
    assert seen == ["_UNITS", "_NAMES", "_OPEN"]


def test_strategies_of_different_axes_do_not_import_each_other(modules) -> None:
    """What two of them need is a file beside their packages; so none reads the options of another."""
    wrong = []
    for name, module in modules.items():
        packages = {axis for axis in AXES if name.startswith(f"paceline.parallel.{axis}.")}
        others = tuple(f"paceline.parallel.{axis}." for axis in AXES if axis not in packages)
        for node in module.nodes if packages else ():
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(others):
                wrong.append(f"{name}: {node.module}")
    assert not wrong, wrong
