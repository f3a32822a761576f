"""The parts of the facade change themselves alone: they tell each other things by constructors, methods and events."""

from __future__ import annotations

import ast
from collections.abc import Iterator

FACADE = {
    "paceline.accelerator",
    "paceline_lens.observe.anomaly_actions",
    "paceline.data.active",
    "paceline.run.evaluation_stop",
    "paceline.run.preemption",
    "paceline.run.preparation",
    "paceline.run.prepared",
    "paceline_lens.observe.profiling",
    "paceline.run.run",
    "paceline.run.starting",
    "paceline.run.states",
    "paceline.run.steps",
    "paceline_lens.observe.system_values",
    "paceline.world.events",
    "paceline.world.participant",
}
PACKAGES = ("paceline.optim.", "paceline.precision.")


def _targets(tree: ast.AST) -> Iterator[ast.expr]:
    """What is assigned to, or deleted, with tuples taken apart."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            waiting = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            waiting = [node.target]
        else:
            continue
        while waiting:
            target = waiting.pop()
            if isinstance(target, ast.Tuple | ast.List):
                waiting += target.elts
            else:
                yield target


def assigned_from_outside(tree: ast.AST) -> set[str]:
    """Attributes of something else than `self` that are assigned to."""
    found = set()
    for target in _targets(tree):
        if isinstance(target, ast.Attribute) and not (isinstance(target.value, ast.Name) and target.value.id == "self"):
            found.add(ast.unparse(target))
    return found


def test_nobody_assigns_anothers_attribute(modules) -> None:
    found = set()
    for name, module in modules.items():
        if name in FACADE or name.startswith(PACKAGES):
            found |= {f"{name}: {target}" for target in assigned_from_outside(module.tree)}
    assert set(modules) >= FACADE
    assert not found, "subscribe to an event, or give the owner a method"


def test_what_counts_as_an_assignment() -> None:
    program = "self.a = 1\nself.b.c = 2\nx.d, (y.e, z) = 3\nx.f += 1\ndel x.g\nx.h: int = 4\nx['i'] = 5"
    assert assigned_from_outside(ast.parse(program)) == {"self.b.c", "x.d", "y.e", "x.f", "x.g", "x.h"}
