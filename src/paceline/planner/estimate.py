"""`estimate`: bytes on a rank by arithmetic alone, and `choose`: the cheapest plan whose bytes fit.

Both are pure. The estimate starts from one process alone and lets each strategy of the chain change it (`cost`). What a
batch takes in activations no formula knows: it is measured once, by a rehearsal of the whole model on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.base.errors import PlanError
from paceline.parallel.strategy import STRATEGIES, Strategy
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Decision, Plan
from paceline.plan.resolve import draft, resolve
from paceline.planner.device import GIB

OPEN = ("replicate", "shard", "zero", "recompute", "tp", "pp")  # what a search may decide


@dataclass(frozen=True)
class Need:
    """What the models of a run need, whatever the plan.

    Attributes:
        models: their facts.
        activations: bytes that one rank keeps between forward and backward without any strategy.
        states: float32 values that the optimizer keeps for each trained parameter.
    """

    models: tuple[ModelFacts, ...]
    activations: int = 0
    states: float = 2.0


@dataclass(frozen=True)
class Rejected:
    """A plan that was not taken: its settings, and why."""

    settings: Mapping[str, Any]
    reason: str

    def __str__(self) -> str:
        return f"{shown(self.settings)}: {self.reason}"


@dataclass(frozen=True)
class Chosen:
    """What a search came to.

    Attributes:
        settings: of the cheapest plan that fits; None where none does.
        estimate: its bytes.
        rejected: the cheaper ones, and why not.
    """

    settings: Mapping[str, Any] | None
    estimate: Bytes | None = None
    rejected: tuple[Rejected, ...] = field(default=())


def estimate(plan: Plan, need: Need, strategies: Iterable[Strategy] | None = None) -> Bytes:
    """Bytes on one rank under a resolved plan: each strategy's `cost` in turn, summed over the models."""
    known = list(STRATEGIES if strategies is None else strategies)
    chain = [next(each for each in known if each.name == name) for name in plan.strategies]
    total = Bytes()
    for number, facts in enumerate(need.models):
        held = Bytes.alone(facts, activations=need.activations if number == 0 else 0)
        held = Bytes(held.parameters, held.gradients, int(need.states * 4 * facts.trainable), held.activations)
        for strategy in chain:
            held = strategy.cost(plan, facts, held)
        total = Bytes(*(getattr(total, name) + getattr(held, name) for name in vars(total)))
    return total


def choose(
    need: Need,
    world_size: int,
    local_size: int,
    usable: int,
    fixed: Mapping[str, Any] | None = None,
    opened: Sequence[str] = OPEN,
    skip: Iterable[Mapping[str, Any]] = (),
) -> Chosen:
    """The cheapest plan that fits.

    Args:
        need: what the models need.
        world_size, local_size: ranks in all, and on one node.
        usable: bytes on each rank.
        fixed: settings that stay as they are.
        opened: names of settings that may be chosen.
        skip: settings that were found not to fit by other means.
    """
    told = {name: value for name, value in (fixed or {}).items() if name not in opened}
    rejected: list[Rejected] = []
    passed = [dict(each) for each in skip]
    for settings in candidates(world_size, local_size, told, opened):
        if settings in passed:
            continue
        try:
            notes = [Decision(name, value, "derived", "planner") for name, value in settings.items()]
            plan = resolve(draft({**told, **settings}, notes, world_size), need.models, STRATEGIES)
        except PlanError as error:
            rejected.append(Rejected(settings, error.problems[0].what))
            continue
        found = estimate(plan, need)
        if found.held <= usable:
            return Chosen(settings, found, tuple(rejected))
        needed, there = gib(found.held), gib(usable)
        rejected.append(Rejected(settings, f"needs {needed} a rank, {there} can be used"))
    return Chosen(None, None, tuple(rejected))


def candidates(
    world_size: int, local_size: int, fixed: Mapping[str, Any], opened: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Settings of the open names, from what costs least in communication and computing again to what costs most."""
    seen: list[dict[str, Any]] = []
    axes = {axis: int(fixed.get(axis, 1)) for axis in ("cp", "tp", "pp")}
    for pp in _sizes("pp", world_size, axes, opened):
        for tp in _sizes("tp", local_size, axes, opened):
            inner = pp * tp * axes["cp"]
            if world_size % inner:
                continue
            for recompute in ("no", "blocks") if "recompute" in opened else (fixed.get("recompute", "no"),):
                near = max(1, local_size // (tp * axes["cp"]))
                for data in _data(world_size // inner, near, fixed.get("shard", "auto")):
                    full = {**data, "tp": tp, "pp": pp, "recompute": recompute}
                    if any(str(fixed.get(name, "auto")) not in ("auto", str(full[name])) for name in full):
                        continue
                    settings = {name: value for name, value in full.items() if name in opened}
                    if settings not in seen:
                        seen.append(settings)
                        yield settings


def _sizes(axis: str, most: int, axes: Mapping[str, int], opened: Sequence[str]) -> list[int]:
    if axis not in opened:
        return [axes[axis]]
    return [size for size in range(1, most + 1) if most % size == 0]


def _data(width: int, near: int, shard: Any) -> Iterator[dict[str, Any]]:
    """Ways of using `width` ranks that read different samples, of which `near` stand on one node."""
    if shard != "auto" and int(shard) > 1:
        for zero in (1, 2, 3) if width % int(shard) == 0 else ():
            yield {"replicate": width // int(shard), "shard": int(shard), "zero": zero}
        return
    yield {"replicate": width, "shard": 1, "zero": 0}
    if width > 1:
        yield {"replicate": 1, "shard": width, "zero": 1}
        yield {"replicate": 1, "shard": width, "zero": 2}
        if 1 < near < width and width % near == 0:
            yield {"replicate": width // near, "shard": near, "zero": 3}
        yield {"replicate": 1, "shard": width, "zero": 3}


def shown(settings: Mapping[str, Any]) -> str:
    """Settings as flags, those that say nothing left out."""
    plain = {"zero": (0, 3), "recompute": ("no",)}
    words = [f"--{name} {value}" for name, value in settings.items() if value not in plain.get(name, (1,))]
    return " ".join(words) or "one process, as it is"


def gib(count: float) -> str:
    """Bytes for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
