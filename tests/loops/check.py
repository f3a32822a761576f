"""Runs programs under plans and judges them: `check` for many at once.

Case       one program, the ranks and the plan it runs on, and those on which a saved run goes on
Door       how programs are written with the names of a library
cases_of   the cases of a program: every width, every plan that its loop can be written for
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from loops import accelerate_door, deepspeed_door
from loops.compare import (
    FLOAT8_ALONE,
    FLOAT8_BY_FEATURES,
    FLOAT8_ROUNDED_ELSEWHERE,
    FLOAT8_TOLERANCES,
    LOW_PRECISION_TOLERANCE,
    NUMBERS,
    TOLERANCE,
    Outcome,
    difference,
    outcome,
)
from loops.plain import plain
from loops.programs import Alone, Backward, GradientsOf, Program, Read, Statement, States, statements
from loops.ranks import Job, Results, run_jobs
from loops.script import script

from paceline.base.temporary import temporary_folder

Plan = tuple[tuple[str, int | str], ...]

PLANS: dict[int, dict[str, Plan]] = {
    1: {"one": ()},
    2: {
        "replicate": (),
        "zero1": (("shard", 2), ("zero", 1)),
        "zero2": (("shard", 2), ("zero", 2)),
        "shard": (("shard", 2),),
        "tp": (("tp", 2),),
        "ep": (("ep", 2),),
        "ep-shard": (("ep", 2), ("zero", 3)),
        "pp": (("pp", 2),),
        "pp-zbv": (("pp", 2), ("schedule", "zbv")),
    },
    3: {
        "replicate": (),
        "zero1": (("shard", 3), ("zero", 1)),
        "zero2": (("shard", 3), ("zero", 2)),
        "shard": (("shard", 3),),
    },
    4: {
        "replicate": (),
        "zero1": (("shard", 4), ("zero", 1)),
        "zero2": (("shard", 4), ("zero", 2)),
        "shard": (("shard", 4),),
        "hybrid": (("replicate", 2), ("shard", 2)),
        "tp-replicate": (("tp", 2), ("replicate", 2)),
        "ep-replicate": (("ep", 2), ("replicate", 2)),
        "ep-shard": (("ep", 2), ("shard", 2)),
        "pp-shard": (("pp", 2), ("shard", 2)),
        "pp-shard-halves": (("pp", 2), ("shard", 2), ("schedule", "zero-bubble")),
    },
}
# The bodies that an axis can divide; others divide any.
_BODIES = {"pp": ("Blocks", "Wide"), "tp": ("Blocks", "Wide"), "ep": ("StackedMixture", "ListedMixture")}
_LARGEST = 1e6  # of a loss: beyond it, rounding is no longer small


@dataclass(frozen=True)
class Case:
    """One program under one plan.

    Attributes:
        world: the number of ranks.
        plan: the name of the plan among those of this width.
        then: width and plan with which a run that was saved goes on; of no use to others.
        door: the library with whose names the program is written, of `DOORS`.
    """

    program: Program
    world: int
    plan: str
    then: tuple[int, str] = (1, "one")
    door: Literal["", "accelerate", "deepspeed"] = ""

    @property
    def name(self) -> str:
        after = f"-then-{self.then[1]}{self.then[0]}" if self.program.save_at is not None else ""
        door = f"-{self.door}" if self.door else ""
        return f"{self.program.seed}-{self.plan}{self.world}{after}{door}"

    @property
    def settings(self) -> dict[str, int | str]:
        return settings_of(self.door, self.world, self.plan)


@dataclass(frozen=True)
class Door:
    """How programs are written with the names of a library.

    Attributes:
        plain: what the library defines, on one process.
        script: the text that runs in the ranks.
        adapted: the program in the library's names; None if it has no meaning there.
    """

    plain: Callable[[Program], dict[str, Any]] = plain
    script: Callable[..., str] = script
    adapted: Callable[[Program], Program | None] = lambda program: program


DOORS = {
    "": Door(),
    "accelerate": Door(accelerate_door.accelerate_plain, accelerate_door.accelerate_script, accelerate_door.adapted),
    "deepspeed": Door(deepspeed_door.deepspeed_plain, deepspeed_door.deepspeed_script, deepspeed_door.adapted),
}


def settings_of(door: str, world: int, plan: str) -> dict[str, int | str]:
    """What a plan of this name sets; under DeepSpeed's names it is a stage."""
    if door == "deepspeed":
        return {"stage": int(plan.removeprefix("stage"))}
    return dict(PLANS[world][plan])


def cases_of(program: Program, worlds: Iterable[int] = (1, 2, 3, 4), plans: Iterable[str] = ()) -> list[Case]:
    """The cases of a program. A pipeline needs `forward_backward` in place of `backward`; some axes need certain models."""
    # A stage of a pipeline reads the gradients of its own parameters.
    flat = list(statements(program.body))
    no_pipeline = any(isinstance(each, Backward | Read | States) or _of_all_stages(each) for each in flat)
    # A forward pass of a model that ranks divide needs all of them.
    is_whole = any(isinstance(each, Alone) and each.kind in ("evaluate", "saliency") for each in flat)
    cases: list[Case] = []
    wanted = set(plans)
    for world in worlds:
        for plan in PLANS[world]:
            if plan.startswith("pp") and no_pipeline:
                continue
            if program.compiled is not None and plan.startswith(("tp", "ep", "pp")):
                continue
            is_divided = _divides_on_disk(program, world) or not plan.startswith(("one", "replicate", "zero"))
            if is_whole and is_divided:
                continue
            divided = _BODIES.get(plan[:2])
            if divided and any(model.body not in divided for model in program.models):
                continue
            # Plans that divide parameters refuse local steps: one of them is enough.
            is_refused = program.local is not None and plan not in ("one", "replicate")
            if is_refused and plan != _refusing(program, world):
                continue
            if not wanted or plan in wanted:
                own = program if program.local is None else replace(program, replicas=world)
                cases.append(_case(own, world, plan, len(cases)))
    return cases


def _divides_on_disk(program: Program, world: int) -> bool:
    """Whether each rank has a part of the parameters and states on disk, under every plan."""
    return world > 1 and program.offload == "all=disk"


def _of_all_stages(statement: Statement) -> bool:
    """Whether a statement needs the parameters of all stages of a pipeline."""
    return isinstance(statement, GradientsOf) or (isinstance(statement, Alone) and statement.kind == "print")


def _refusing(program: Program, world: int) -> str:
    """The plan on this width that refuses a program with local steps."""
    plans = [plan for plan in PLANS[world] if plan != "replicate" and not plan.startswith(("pp", "tp", "ep"))]
    return plans[program.seed % len(plans)] if world > 1 else ""


def _case(program: Program, world: int, plan: str, number: int) -> Case:
    """One of the cases of a program. What a run writes by `torch.save` is whole where no plan divides it."""
    if program.plain_save:
        saved = [(1, "one"), (2, "replicate")][number % 2]
        if _divides_on_disk(program, saved[0]):
            saved = (1, "one")
        return Case(program, *saved, then=(world, plan))
    if program.local is not None:
        return Case(program, world, plan, (world, plan))
    everywhere = [(world, plan) for world in PLANS for plan in PLANS[world] if not plan.startswith(("pp", "tp", "ep"))]
    return Case(program, world, plan, everywhere[(program.seed + 7 * number) % len(everywhere)])


def accelerate_cases_of(program: Program, worlds: Iterable[int] = (1, 2, 3, 4)) -> list[Case]:
    """The cases of a program that `accelerate_door.adapted` has made. Its checkpoints go on under the same plan."""
    cases = [
        Case(program, world, plan, (world, plan), "accelerate")
        for world in worlds
        for plan in PLANS[world]
        if plan in accelerate_door.PLANS
    ]
    # Each rank has statistics of its own.
    if any(model.body == "BatchNorm" for model in program.models):
        cases = [case for case in cases if case.world == 1]
    return cases


def deepspeed_cases_of(program: Program, worlds: Iterable[int] = (1, 2, 3, 4), plans: Iterable[str] = ()) -> list[Case]:
    """The cases of a program that `deepspeed_door.adapted` has made. Its checkpoints go on at another width."""
    wanted = set(plans)
    then = 1 + program.seed % 3
    if not deepspeed_door.cases_are_meant(program.models, then):
        then = 1
    cases = [
        Case(program, world, f"stage{stage}", (then, f"stage{stage}"), "deepspeed")
        for world in worlds
        for stage in deepspeed_door.STAGES
        if deepspeed_door.cases_are_meant(program.models, world)
    ]
    return [case for case in cases if not wanted or case.plan in wanted]


def cases_of_door(door: str, program: Program, worlds: Iterable[int], plans: Iterable[str] = ()) -> list[Case]:
    """The cases of a program that the door has adapted."""
    if door == "accelerate":
        return accelerate_cases_of(program, worlds)
    if door == "deepspeed":
        return deepspeed_cases_of(program, worlds, plans)
    return cases_of(program, worlds, plans)


def references(programs: Sequence[Program], door: str = "") -> list[dict[str, Any] | None]:
    """What plain PyTorch does, as `door` defines it; None for a program that is wrong there, too."""
    got = run_jobs([Job(program=program, reference=DOORS[door].plain) for program in programs], 1)
    return [each[0] if each[0] is not None and _is_valid(each[0]) else None for each in got]


def _is_valid(want: Mapping[str, Any]) -> bool:
    if "error" in want:
        return False
    numbers = [value for name in NUMBERS for value in want[name]]
    weights = [
        float(value.double().abs().max()) for model in want["weights"] for value in model.values() if value.numel()
    ]
    return all(math.isfinite(value) and abs(value) < _LARGEST for value in (*numbers, *weights))


def check(cases: Sequence[Case], known: Mapping[Program, Any] | None = None) -> list[Outcome | None]:
    """The outcome of each case; None where the program is wrong in plain PyTorch, too.

    Args:
        known: references that were computed before.
    """
    wants = dict(known or {})
    doors = {case.program: case.door for case in cases}
    for door in set(doors.values()):
        missing = [program for program, own in doors.items() if own == door and program not in wants]
        wants |= dict(zip(missing, references(missing, door), strict=True))
        low = {
            program: wants[program]
            for program, own in doors.items()
            if own == door and program.precision in ("bf16", "fp16") and wants[program] is not None
        }
        wants |= _in_low_precision(low, door)
    with tempfile.TemporaryDirectory(prefix="loops-", dir=temporary_folder()) as folder:
        results = _results([case for case in cases if wants[case.program] is not None], wants, Path(folder))
    outcomes: list[Outcome | None] = []
    for case in cases:
        want = wants[case.program]
        outcomes.append(None if want is None else outcome(results[case], want, tolerance_of(case)))
    return outcomes


def tolerance_of(case: Case) -> float:
    """How far numbers may be from the reference; in float8 it depends on whether a scale spans rows of several ranks."""
    if case.program.precision == "no":
        return TOLERANCE
    if not case.program.recipe:
        return LOW_PRECISION_TOLERANCE
    worlds = {case.world} if case.program.save_at is None else {case.world, case.then[0]}
    if 3 in worlds or _has_estimated_divisors(case.program):
        return max(FLOAT8_ROUNDED_ELSEWHERE, FLOAT8_TOLERANCES[case.program.recipe])
    if worlds == {1}:
        return FLOAT8_ALONE
    of_recipe = FLOAT8_TOLERANCES[case.program.recipe]
    is_by_features = case.plan.startswith("tp") and case.program.recipe != "mxfp8"
    return max(of_recipe, FLOAT8_BY_FEATURES) if is_by_features else of_recipe


def _has_estimated_divisors(program: Program) -> bool:
    """Whether the size of a window shows only at its end, so that losses before are divided by an estimate."""
    counts = any(isinstance(each, Backward) and each.items is not None for each in statements(program.body))
    return program.window > 1 and (counts or any(loader.kind != "map" for loader in program.loaders))


def _in_low_precision(exact: Mapping[Program, Any], door: str) -> dict[Program, Any]:
    """The references of bf16 and fp16: what one process of ours does, as each operation rounds, and plain loops choose where.

    Args:
        exact: what plain PyTorch does in float64. A program whose numbers are far from these keeps them, and fails everywhere.
    """
    settings: dict[str, int | str] = {"stage": 0} if door == "deepspeed" else {}
    jobs = [Job(DOORS[door].script(program, settings)) for program in exact]
    wants = {}
    for program, got in zip(exact, run_jobs(jobs, 1), strict=True):
        # One that ends with an error there is judged by its errors.
        if got[0] is None or "error" in got[0]:
            continue
        if difference(got[0], exact[program], LOW_PRECISION_TOLERANCE) is None:
            wants[program] = {**got[0], "saved_in": None}
    return wants


def _results(cases: Sequence[Case], wants: Mapping[Program, Any], folder: Path) -> dict[Case, Results]:
    results: dict[Case, Results] = {}
    jobs: dict[int, list[tuple[Case, Job]]] = {}
    saved = [case for case in cases if wants[case.program].get("saved_in") is not None]
    for number, case in enumerate(cases):
        phase = "save" if case in saved else ""
        text = DOORS[case.door].script(case.program, case.settings, phase, str(folder / str(number)))
        jobs.setdefault(case.world, []).append((case, Job(text, states=not phase and _has_all_states(case, case.plan))))
    for world, own in jobs.items():
        results |= zip([case for case, _ in own], run_jobs([job for _, job in own], world), strict=True)
    later: dict[int, list[tuple[Case, Job]]] = {}
    for number, case in enumerate(cases):
        if case in saved and all(got is not None and "error" not in got for got in results[case]):
            world, plan = case.then
            epoch = wants[case.program]["saved_in"]
            settings = settings_of(case.door, world, plan)
            text = DOORS[case.door].script(case.program, settings, "resume", str(folder / str(number)), epoch)
            later.setdefault(world, []).append((case, Job(text, states=_has_all_states(case, plan))))
    for world, own in later.items():
        for (case, _), got in zip(own, run_jobs([job for _, job in own], world), strict=True):
            results[case] = _joined(results[case][0], got)
    return results


def _has_all_states(case: Case, plan: str) -> bool:
    """Whether every rank has the states of all parameters: a stage of a pipeline has its own, and so have local steps."""
    return case.program.local is None and not plan.startswith(("pp", "tp"))


def _joined(before: Mapping[str, Any] | None, after: Results) -> Results:
    """The notes of a run until its save, and those of the run that went on."""
    assert before is not None
    joined: Results = []
    for got in after:
        if got is not None and "error" not in got:
            got = {**got, **{name: before[name] + got[name] for name in NUMBERS}}
        joined.append(got)
    return joined


def with_program(case: Case, program: Program) -> Case:
    """The same case of another program."""
    return replace(case, program=program)
