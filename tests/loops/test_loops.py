"""About 35 drawn programs a day: each equals plain PyTorch, or is refused with a code. Another day draws others.

CI draws 200 more in a job of its own (`make loops SEEDS=200`).
"""

from __future__ import annotations

import datetime

import pytest
from loops.check import DOORS, PLANS, Case, cases_of, cases_of_door, check, references
from loops.draw import draw
from loops.script import standalone

# Of each day's seeds, how many are run on one process under which plans. On several processes one plan each, in turn.
ON_ONE, ON_TWO, ON_MORE = 15, 10, 4
UNDER_A_DOOR = 6  # of these seeds, those that have a meaning there: half for accelerate, most for DeepSpeed
TODAY = datetime.date.today().toordinal() * 1000


def cases_of_the_day() -> list[Case]:
    programs = [draw(seed) for seed in range(TODAY, TODAY + ON_ONE + ON_TWO + ON_MORE)]
    clear = [program for program, want in zip(programs, references(programs), strict=True) if want is not None]
    cases = []
    for number, program in enumerate(clear):
        place = program.seed - TODAY
        world = 1 if place < ON_ONE else 2 if place < ON_ONE + ON_TWO else 3 + number % 2
        own = cases_of(program, [world])
        cases.append(own[number % len(own)])
    return cases


def cases_of_the_day_through(door: str) -> list[Case]:
    """The next seeds through the names of a library, each on one, two or three processes under one plan."""
    first = TODAY + ON_ONE + ON_TWO + ON_MORE
    programs = [DOORS[door].adapted(draw(seed, kind="none")) for seed in range(first, first + UNDER_A_DOOR)]
    cases = []
    for number, program in enumerate(program for program in programs if program is not None):
        # Not all of them mean something on several processes.
        own = cases_of_door(door, program, [(1, 1, 1, 2, 3)[number % 5]]) or cases_of_door(door, program, [1])
        cases.append(own[number % len(own)])
    return cases


@pytest.mark.timeout(240)
def test_the_programs_of_today() -> None:
    cases = cases_of_the_day() + cases_of_the_day_through("accelerate") + cases_of_the_day_through("deepspeed")
    outcomes = check(cases)
    failed = [
        (case, result) for case, result in zip(cases, outcomes, strict=True) if result and result.kind == "failed"
    ]
    if failed:
        case, result = failed[0]
        names = ", ".join(f"{each.name} ({outcome.what})" for each, outcome in failed)
        pytest.fail(f"seeds that failed (seed-plan): {names}\n\nThe first:\n{standalone(case, result)}", pytrace=False)
    assert sum(result is not None and result.kind == "equal" for result in outcomes) > len(cases) // 2
    assert set(PLANS) == {1, 2, 3, 4}
