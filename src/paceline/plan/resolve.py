"""Settings + world + facts -> a frozen `Plan`. Pure: it reads no device, makes no group and touches no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any, Protocol

from paceline.base.errors import PlanError, Problem
from paceline.config.given import nearest
from paceline.plan.facts import ModelFacts
from paceline.plan.options import read
from paceline.plan.plan import Decision, Plan
from paceline.plan.randomness import random_layers
from paceline.plan.rules import model_problems, origin, run_problems
from paceline.world.layout import AXES, Layout


class Pass(Protocol):
    """What planning sees of a strategy: its pure half (`paceline.parallel.strategy` has the whole)."""

    name: str
    stage: int
    axes: tuple[str, ...]
    Options: type

    def wanted(self, plan: Plan) -> bool: ...

    def concerns(self, models: Iterable[ModelFacts]) -> bool: ...

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]: ...

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]: ...


def draft(
    settings: Mapping[str, Any],
    decisions: Iterable[Decision],
    world_size: int,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Plan:
    """The part of a plan that needs no model: layout, precision, accumulation.

    Args:
        settings: `mixed_precision`, `accumulate` and one entry for each axis, a number or "auto".
        decisions: where each setting came from.
        world_size: number of processes.
        options: options of strategies, by the strategy's name.

    Raises:
        PlanError: `plan-size`, `plan-precision`, `plan-accumulate`; all that apply, at once.
    """
    decisions = list(decisions)
    notes = {decision.field: decision for decision in decisions}
    fixed, derived = _sizes(settings, world_size)
    notes |= derived
    plan = Plan(
        layout=Layout(**fixed),
        precision=str(settings.get("mixed_precision", "no")),
        accumulate=settings.get("accumulate", 1),
        recompute=str(settings.get("recompute", "no")),
        compile=bool(settings.get("compile", False)),
        offload=str(settings.get("offload", "no")),
        options=dict(options or {}),
    )
    zero, reason = _stage(settings, plan.layout)
    if reason:
        told = notes.get("zero")
        notes["zero"] = Decision("zero", zero, "derived", told.where if told else "", reason)
    plan = replace(plan, zero=zero, open=_open(settings, decisions), decisions=tuple(notes.values()))
    problems = run_problems(plan, world_size)
    if problems:
        raise PlanError.of(problems)
    return plan


def _sizes(settings: Mapping[str, Any], world_size: int) -> tuple[dict[str, int], dict[str, Decision]]:
    """Ranks along each axis; `replicate`, or `shard` where a stage of it is asked for, takes what the others leave."""
    sizes = {axis: settings.get(axis, "auto") for axis in AXES}
    fixed = {axis: int(size) for axis, size in sizes.items() if size != "auto"}
    others = prod(fixed.values())
    rest = max(1, world_size // others) if others > 0 else 1
    staged = settings.get("zero", "auto") not in ("auto", 0) or settings.get("offload", "no") == "all"
    takes = "shard" if "replicate" in fixed or (staged and "shard" not in fixed) else "replicate"
    notes = {}
    for axis in AXES:
        if axis in fixed:
            continue
        fixed[axis] = rest if axis == takes else 1
        reason = "not asked for"
        if axis == takes:
            reason = f"{world_size} processes" + (f", {others} along the other axes" if others > 1 else "")
        notes[axis] = Decision(axis, fixed[axis], "derived", reason=reason)
    return fixed, notes


def _open(settings: Mapping[str, Any], decisions: Iterable[Decision]) -> tuple[str, ...]:
    """What somebody left to be chosen: "auto" that was said, and what follows from it where nothing else was."""
    said = {each.field for each in decisions if each.value == "auto" and each.source != "default"}
    found: set[str] = said & {"shard", "zero", "tp", "pp"}
    if found & {"shard", "zero"}:
        found |= {name for name in ("shard", "zero") if settings.get(name, "auto") == "auto"}
    if found and settings.get("replicate", "auto") == "auto":
        found.add("replicate")
    return tuple(sorted(found))


def _stage(settings: Mapping[str, Any], layout: Layout) -> tuple[int, str]:
    """The stage of the `shard` axis, and why, where it was not said."""
    asked = settings.get("zero", "auto")
    if layout.shard == 1 and asked in ("auto", 0):
        return 0, "shard is 1"
    if layout.shard == 1 and (layout.size() == 1 or settings.get("shard", "auto") == "auto"):
        return 0, f"zero={asked} divides nothing, since shard is 1"
    if asked == "auto":
        return 3, f"shard={layout.shard}: parameters, gradients and optimizer states are divided"
    return int(asked), ""


def resolve(
    plan: Plan, models: Iterable[ModelFacts], strategies: Iterable[Pass], found: Iterable[Problem] = ()
) -> Plan:
    """Chooses the chain of strategies for these models and checks everything before anything is touched.

    Args:
        plan: the draft.
        models: facts of those that are prepared together.
        strategies: all there are.
        found: problems that are known already, to be told together with those found here.

    Raises:
        PlanError: every problem of the plan with these models, in one error.
    """
    facts = list(models)
    known = sorted(strategies, key=lambda strategy: strategy.stage)
    chosen = [strategy for strategy in known if strategy.wanted(plan) and strategy.concerns(facts)]
    served = {axis for strategy in chosen for axis in strategy.axes}
    problems = [*found, *model_problems(plan, facts)]
    for axis in AXES:
        if getattr(plan.layout, axis) > 1 and axis not in served:
            problems.append(
                Problem(
                    "plan-axis",
                    f"no strategy serves the axis `{axis}`.",
                    why=f"{origin(plan, axis)}; strategies: {', '.join(strategy.name for strategy in known)}",
                    fix=f"leave {axis} at 1",
                )
            )
    problems += _option_problems(plan, known)
    for strategy in chosen:
        for one in facts:
            problems.extend(strategy.check(plan, one))
    if problems:
        raise PlanError.of(problems)
    made = {each: None for strategy in chosen for one in facts for each in strategy.decide(plan, one)}
    made |= {each: None for one in facts for each in random_layers(plan, one)}
    names = tuple(strategy.name for strategy in chosen)
    reason = ", ".join(f"{s.name} serves {'/'.join(s.axes)}" for s in chosen) or "one process needs none"
    return replace(
        plan,
        strategies=names,
        decisions=(*_told(plan, names), *made, Decision("strategies", names, "derived", reason=reason)),
    )


def _option_problems(plan: Plan, strategies: Iterable[Pass]) -> list[Problem]:
    """What is wrong with the options, those of strategies that this plan does not use included."""
    by_name = {strategy.name: strategy for strategy in strategies}
    places = {decision.field: decision.where or decision.source for decision in plan.decisions}
    problems: list[Problem] = []
    for name, given in plan.options.items():
        if name in by_name:
            problems += read(by_name[name].Options, given, name, places)[1]
            continue
        where = next((place for field, place in places.items() if field.startswith(f"options.{name}.")), "")
        close = nearest(name, by_name)
        problems.append(
            Problem(
                "plan-option",
                f"options are given for {name!r}, which is no strategy.",
                why=f"{f'they come from {where}; ' if where else ''}strategies: {', '.join(by_name)}",
                fix=f"write {close!r}" if close else "use one of these names",
            )
        )
    return problems


def _told(plan: Plan, names: tuple[str, ...]) -> Iterable[Decision]:
    """The decisions so far; options of a strategy that this plan does not use say that they have no effect."""
    for each in plan.decisions:
        parts = each.field.split(".", 2)
        idle = parts[0] == "options" and parts[1] not in (*names, "profile")
        yield replace(each, reason=f"no effect: this plan does not use {parts[1]}") if idle else each
