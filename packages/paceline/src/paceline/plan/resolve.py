"""Makes a frozen `Plan` from settings, the world size and facts about models.

It is pure: it reads no device, makes no process group and touches no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any, ClassVar, Protocol

from paceline.base.errors import PlanError, Problem
from paceline.base.parts import absent_names
from paceline.config.given import nearest
from paceline.config.settings import RunSettings
from paceline.plan.facts import ModelFacts
from paceline.plan.options import read
from paceline.plan.plan import Decision, Plan
from paceline.plan.rules import GROUP, model_problems, origin, run_problems
from paceline.plan.semantics import NATIVE, Semantics
from paceline.world.layout import AXES, DATA_AXES, Layout, model_axes


class PlannedStrategy(Protocol):
    """The part of a strategy that planning uses, which is pure; `paceline.parallel.strategy` has the whole interface."""

    name: str
    stage: int
    axes: tuple[str, ...]
    Options: ClassVar[type]

    def wanted(self, plan: Plan) -> bool: ...

    def concerns(self, models: Iterable[ModelFacts]) -> bool: ...

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]: ...

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]: ...


OTHER_OPTIONS = ("profile", "anomalies")  # blocks of options that belong to no strategy


def draft(settings: RunSettings, decisions: Iterable[Decision], world_size: int, semantics: Semantics = NATIVE) -> Plan:
    """Makes the part of a plan that needs no model: layout, precision, accumulation.

    Args:
        settings: of the run; an axis that they leave out is "auto". Of the options, those that belong to no strategy
            (`OTHER_OPTIONS`) are left out.
        decisions: where each setting came from.
        world_size: the number of processes.
        semantics: how the loop is meant, where no setting says otherwise.

    Raises:
        PlanError: `plan-size`, `plan-precision`, `plan-accumulate`; all that apply, at once.
    """
    decisions = list(decisions)
    of_strategies = dict(settings.options)
    for name in OTHER_OPTIONS:
        of_strategies.pop(name, None)
    sizes, derived = _sizes(settings, world_size)
    by_field = {decision.field: decision for decision in decisions} | derived
    plan = Plan(
        layout=Layout(**sizes),
        precision=settings.mixed_precision,
        accumulate=settings.accumulate,
        recompute=settings.recompute,
        compile=settings.compile,
        offload=settings.offload,
        options=of_strategies,
        semantics=replace(semantics, tail="pad") if settings.even_batches else semantics,
    )
    zero, reason = _stage(settings, plan.layout)
    if reason:
        where = by_field["zero"].where if "zero" in by_field else ""
        by_field["zero"] = Decision("zero", zero, "derived", where, reason)
    plan = replace(plan, zero=zero, open=_open(settings, decisions), decisions=tuple(by_field.values()))
    problems = run_problems(plan, world_size)
    if problems:
        raise PlanError.of(problems)
    return plan


def draft_beside(own: Plan, settings: Mapping[str, Any], world_size: int) -> Plan:
    """Makes the draft of another plan, for some models of a run.

    Args:
        own: the plan of the run.
        settings: of the other plan; precision, accumulation and recomputation default to the run's.
        world_size: the number of processes.

    Raises:
        PlanError: `plan-width`, if batches would be divided over other ranks than in the run; and those of `draft`.
    """
    shared = {
        "mixed_precision": own.precision,
        "accumulate": own.accumulate,
        "recompute": own.recompute,
        "options": own.options,
    }
    decisions = [Decision(name, value, "code", "prepare_model(plan=...)") for name, value in settings.items()]
    other = draft(RunSettings.of({**shared, **settings}), decisions, world_size, own.semantics)
    axes_of_model = [(axis,) for axis in model_axes()]
    for axes in (DATA_AXES, *axes_of_model):
        if other.layout.size(*axes) != own.layout.size(*axes):
            raise PlanError(
                "plan-width",
                f"one run cannot hold models under {own.layout} and under {other.layout}.",
                why="each rank reads one part of a batch, which all models take: "
                f"{', '.join(model_axes())} and {' x '.join(DATA_AXES)} must be the same for all of them",
                fix=f"divide {' x '.join(DATA_AXES)} = {own.layout.width} otherwise, and leave the rest as it is",
            )
    return other


def _sizes(settings: RunSettings, world_size: int) -> tuple[dict[str, int], dict[str, Decision]]:
    """Returns the number of ranks along each axis, and the decisions about those that nobody gave.

    The ranks that the given axes leave go to `replicate`, or to `shard` if a ZeRO stage is asked for.
    """
    given: dict[str, int] = {}
    for axis in AXES:
        size = settings.axes.get(axis, "auto")
        if size != "auto":
            given[axis] = int(size)
    # A size below 1, or a product that does not divide the world size, is an error that `run_problems` reports later.
    others = prod(given.values())
    rest = 1
    if others > 0:
        rest = max(1, world_size // others)
    # A user who asks for a ZeRO stage or for offload wants the ranks to share one copy of the model. Otherwise each rank has
    # its own.
    divides = settings.zero not in ("auto", 0) or "all" in settings.offload.partition("=")[0]
    takes_rest = "replicate"
    if "replicate" in given or (divides and "shard" not in given):
        takes_rest = "shard"
    sizes = dict(given)
    derived = {}
    for axis in AXES:
        if axis in given:
            continue
        sizes[axis] = 1
        reason = "not asked for"
        if axis == takes_rest:
            sizes[axis] = rest
            reason = f"{world_size} processes"
            if others > 1:
                reason += f", {others} along the other axes"
        derived[axis] = Decision(axis, sizes[axis], "derived", reason=reason)
    return sizes, derived


def _open(settings: RunSettings, decisions: Iterable[Decision]) -> tuple[str, ...]:
    """Returns the settings that the planner may choose: those that were set to "auto", and those that follow from them."""
    may_be_open = {"shard", "zero", "offload"}
    may_be_open.update(axis.name for axis in AXES.values() if axis.searched)
    # "auto" by default means that nobody asked for a search: then the plan is the simplest one.
    left_open = set()
    for decision in decisions:
        is_auto = str(decision.value).partition("=")[0] == "auto"
        if decision.field in may_be_open and is_auto and decision.source != "default":
            left_open.add(decision.field)
    # The number of ranks that shard the model and the ZeRO stage are chosen together; the other ranks replicate.
    follows = []
    if left_open & {"shard", "zero"}:
        follows += ["shard", "zero"]
    if left_open - {"offload"}:
        follows.append("replicate")
    for name in follows:
        value = settings.zero if name == "zero" else settings.axes.get(name, "auto")
        if value == "auto":
            left_open.add(name)
    return tuple(sorted(left_open))


def _stage(settings: RunSettings, layout: Layout) -> tuple[int, str]:
    """Returns the ZeRO stage, and the reason for it if nobody gave it."""
    asked = settings.zero
    if layout.shard == 1 and asked in ("auto", 0):
        return 0, "shard is 1"
    # Ranks along `ep` hold the same weights outside of the experts, which a stage divides over them, too.
    if layout.shard == 1 and layout.ep > 1:
        return int(asked), ""
    # FSDP2 on a mesh of one takes parameters off the device.
    if layout.size() == 1 and asked == 3 and "all" in settings.offload.partition("=")[0]:
        return 3, f"offload={settings.offload}: parameters are on the device while a module computes with them"
    # A stage that is asked for explicitly, with an explicit shard of 1 on several ranks, is left for `run_problems` to refuse.
    if layout.shard == 1 and (layout.size() == 1 or settings.axes.get("shard", "auto") == "auto"):
        return 0, f"zero={asked} divides nothing, since shard is 1"
    if asked == "auto":
        return 3, f"shard={layout.shard}: parameters, gradients and optimizer states are divided"
    return int(asked), ""


def resolve(
    plan: Plan,
    models: Iterable[ModelFacts],
    strategies: Iterable[PlannedStrategy],
    problems_before: Iterable[Problem] = (),
) -> Plan:
    """Chooses the chain of strategies for these models, and checks everything before any model is changed.

    Args:
        plan: the draft of the plan.
        models: the facts of the models that are prepared together.
        strategies: all registered strategies.
        problems_before: problems that are known already; the error reports them together with those that are found here.

    Raises:
        PlanError: every problem of the plan with these models, in one error.
    """
    models = list(models)
    strategies = sorted(strategies, key=lambda strategy: strategy.stage)
    chosen = [strategy for strategy in strategies if strategy.wanted(plan) and strategy.concerns(models)]

    # All problems are collected before one error is raised, so that a user corrects them at once and not one by one.
    problems = [*problems_before, *model_problems(plan, models), *_unserved_axes(plan, chosen, strategies)]
    problems += option_problems(plan.options, plan.decisions, strategies)
    for strategy in chosen:
        for facts in models:
            problems += strategy.check(plan, facts)
    if problems:
        raise PlanError.of(problems)

    names = tuple(strategy.name for strategy in chosen)
    plan = replace(plan, strategies=names)
    # A dict serves as an ordered set here: a decision that is the same for several models appears once.
    decisions: dict[Decision, None] = {}
    for strategy in chosen:
        for facts in models:
            decisions |= dict.fromkeys(strategy.decide(plan, facts))
    if plan.layout.size() > 1:
        from paceline.plan.randomness import known_before  # one process computes what it computes without Paceline

        for facts in models:
            decisions |= dict.fromkeys(known_before(plan, facts, names))
    served = [f"{strategy.name} serves {'/'.join(strategy.axes)}" for strategy in chosen]
    reason = ", ".join(served) or "one process needs none"
    chain = Decision("strategies", names, "derived", reason=reason)
    return replace(plan, decisions=(*_with_idle_options(plan, names), *decisions, chain))


def _unserved_axes(
    plan: Plan, chosen: Iterable[PlannedStrategy], strategies: Iterable[PlannedStrategy]
) -> list[Problem]:
    """Returns a problem for each axis that is asked for and that no chosen strategy serves, and for such an `offload`."""
    served: set[str] = set()
    for strategy in chosen:
        served.update(strategy.axes)
    names = ", ".join(strategy.name for strategy in strategies)
    problems = []
    for axis in AXES:
        if getattr(plan.layout, axis) > 1 and axis not in served:
            what = f"no strategy serves the axis `{axis}`."
            why = f"{origin(plan, axis)}; strategies: {names}"
            fix = "; ".join([*absent_names(GROUP), f"or leave {axis} at 1"])
            problems.append(Problem("plan-axis", what, why=why, fix=fix.removeprefix("or ")))
    # `shard` offloads parameters by itself; all else that `offload` means is the strategy's. Whoever asks has to have it.
    if plan.offload != "no" and "offload" not in [strategy.name for strategy in strategies]:
        what = "no strategy serves the setting `offload`."
        why = f"{origin(plan, 'offload')}; strategies: {names}"
        fix = "; ".join([*absent_names(GROUP), "or leave offload out"])
        problems.append(Problem("plan-axis", what, why=why, fix=fix.removeprefix("or ")))
    return problems


def option_problems(
    options: Mapping[str, Mapping[str, Any]], decisions: Iterable[Decision], strategies: Iterable[PlannedStrategy]
) -> list[Problem]:
    """Returns what is wrong with the options of strategies, also of those that a plan does not use.

    Args:
        options: the options, by the name of the strategy.
        decisions: where each option came from.
        strategies: all registered strategies.
    """
    by_name = {strategy.name: strategy for strategy in strategies}
    places = {decision.field: decision.where or decision.source for decision in decisions}
    problems: list[Problem] = []
    for name, given in options.items():
        if name in by_name:
            problems += read(by_name[name].Options, given, name, places)[1]
            continue
        origin_of_first = ""
        for field, place in places.items():
            if field.startswith(f"options.{name}."):
                origin_of_first = f"they come from {place}; "
                break
        close = nearest(name, by_name)
        fix = f"write {close!r}" if close else "; ".join([*absent_names(GROUP), "use one of these names"])
        problems.append(
            Problem(
                "plan-option",
                f"options are given for {name!r}, which is no strategy.",
                why=f"{origin_of_first}strategies: {', '.join(by_name)}",
                fix=fix,
            )
        )
    return problems


def _with_idle_options(plan: Plan, names: tuple[str, ...]) -> Iterable[Decision]:
    """Yields the decisions so far. For an option of a strategy that this plan does not use, the reason is "no effect"."""
    for decision in plan.decisions:
        block, _, rest = decision.field.partition(".")
        strategy = rest.partition(".")[0]
        if block == "options" and strategy not in (*names, *OTHER_OPTIONS):
            yield replace(decision, reason=f"no effect: this plan does not use {strategy}")
        else:
            yield decision
