"""Chooses the FSDP2 units of a model, each of which is gathered and freed as a whole. Pure: from names and sizes only.

    auto            the repeated blocks
    size            from the leaves upwards: a module with more than a number of parameters that are in no unit yet
    Block, Head     every module of these classes
    none            the whole model is one unit

The root is always a unit, with the parameters of no other unit (embeddings, the last norm, a head). A module that shares a
parameter with something outside of it cannot be a unit, since sharding would untie the two. Its parameters stay in the unit
around it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from paceline.base.errors import Problem
from paceline.plan.facts import ModelFacts
from paceline.plan.fqn import inside, joined, listed, parent, within, within_some
from paceline.plan.options import names_of

POLICIES = ("auto", "size", "none")
_USED_FROM_OUTSIDE = ("MultiheadAttention",)  # their children's parameters are used without calling the children


@dataclass(frozen=True)
class Wrapping:
    """The units of one model.

    Attributes:
        units: names of the units, without the root; outer units before inner ones.
        tied: names of modules that are no units because they share a parameter with something outside.
        alone: names of the ignored modules, outermost only.
        problems: of names that match no module.
    """

    units: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def wrapping(facts: ModelFacts, wrap: str | Iterable[str], min_params: int, ignored: str | Iterable[str]) -> Wrapping:
    """Chooses the units of one model.

    Args:
        facts: of the model.
        wrap: "auto", "size", "none", or names of classes.
        min_params: for "size": the number of its own parameters above which a module becomes a unit.
        ignored: classes or name patterns of modules that are not sharded.
    """
    problems: list[Problem] = []
    alone = _alone(facts, names_of(ignored), problems)
    if wrap == "auto":
        units: Iterable[str] = facts.blocks
    elif wrap == "size":
        units = _by_size(facts, min_params, alone)
    elif wrap == "none":
        units = ()
    else:
        units = _by_class(facts, names_of(wrap), problems)
    chosen: list[str] = []
    tied: list[str] = []
    for name in units:
        if not name or within_some(name, alone):
            continue  # the root, which is a unit always, or a module that FSDP2 ignores
        if leaks(name, facts, alone):
            tied.append(name)
        else:
            chosen.append(name)
    # In the order of `named_modules`, a module comes before those inside of it.
    order = {name: place for place, (name, _) in enumerate(facts.modules)}
    chosen.sort(key=lambda name: order.get(name, 0))
    return Wrapping(tuple(chosen), tuple(tied), alone, tuple(problems))


def leaks(unit: str, facts: ModelFacts, alone: tuple[str, ...]) -> bool:
    """Returns whether a unit shares a parameter with a module outside of it."""
    for names in facts.tied:
        if any(within_some(name, alone) for name in names):
            continue
        inside = [within(name, unit) for name in names]
        if any(inside) and not all(inside):
            return True
    return False


def _alone(facts: ModelFacts, patterns: tuple[str, ...], problems: list[Problem]) -> tuple[str, ...]:
    names_and_kinds = [(name, kind) for name, kind in facts.modules if name]  # without the root
    alone: list[str] = []
    for pattern in patterns:
        matches = []
        for name, kind in names_and_kinds:
            if kind == pattern or fnmatchcase(name, pattern):
                matches.append(name)
        if not matches:
            names = [name for name, _ in names_and_kinds]
            problems.append(
                Problem(
                    "shard-ignored",
                    f"no module of {facts.name} is called {pattern!r}, or is of that class.",
                    why=f"shard.ignored={pattern!r}; the modules are {listed(names, 8)}",
                    fix="write the class of a module, or a pattern of names such as 'encoder.*.adapter'",
                )
            )
        alone.extend(matches)
    # Only the outermost: a module inside an ignored one is ignored with it.
    unique = dict.fromkeys(alone)
    return tuple(name for name in unique if not within_some(name, unique.keys() - {name}))


def _by_class(facts: ModelFacts, names: tuple[str, ...], problems: list[Problem]) -> list[str]:
    units: list[str] = []
    for wanted in names:
        matches = [name for name, kind in facts.modules if name and kind == wanted]
        if not matches:
            classes = dict.fromkeys(kind for _, kind in facts.modules)
            problems.append(
                Problem(
                    "shard-wrap",
                    f"{facts.name} has no module of a class {wanted!r} inside.",
                    why=f"shard.wrap={wanted!r}; its classes: {listed(classes, 8)}",
                    fix=f"name one of these classes, or use one of {', '.join(POLICIES)}",
                )
            )
        units.extend(matches)
    return units


def _by_size(facts: ModelFacts, min_params: int, alone: tuple[str, ...]) -> list[str]:
    """Chooses units from the leaves upwards; a module counts the parameters that no unit inside it has taken."""
    untaken: dict[str, int] = {}
    aliases = facts.aliases
    for layer in facts.layers:
        name = layer.name
        if within_some(name, alone):
            continue
        untaken[name] = 0
        for key, shape in layer.shapes:
            # A tied parameter counts once, under its first name.
            if joined(name, key) not in aliases:
                untaken[name] += prod(shape)
        # The modules around the layer are candidates too, even if they have no parameters of their own.
        while name:
            name = parent(name)
            untaken.setdefault(name, 0)
    closed = [name for name, kind in facts.modules if kind in _USED_FROM_OUTSIDE]
    called = {name for name, _ in facts.modules}
    units = []
    # The innermost modules first: what they do not take goes to the module around them.
    for name in sorted(untaken, key=lambda name: -name.count(".")):
        if not name:
            continue  # the root, which is a unit always
        in_closed = any(name != module and inside(name, module) for module in closed)
        if untaken[name] > min_params and name in called and not in_closed:
            units.append(name)
        else:
            untaken[parent(name)] += untaken[name]
    return units
