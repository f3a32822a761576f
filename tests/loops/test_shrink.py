"""The shrinker: every smaller program is one, and what is left is what made it fail."""

from __future__ import annotations

from collections.abc import Sequence

from loops.check import Case
from loops.compare import EQUAL, Outcome
from loops.draw import draw
from loops.draw_low import KINDS
from loops.draw_more import FIRST
from loops.programs import AddGroup, Backward, Evaluate, Freeze, Program, Step, size, statements, uses
from loops.script import script
from loops.shrink import shrink, smaller

WRONG = Outcome("failed", "norms")


def judge_by(fails) -> object:
    def judge(cases: Sequence[Case]) -> list[Outcome]:
        return [WRONG if fails(case.program) else EQUAL for case in cases]

    return judge


def test_every_smaller_program_can_be_printed_and_made_smaller() -> None:
    kinds = ["", *KINDS]
    drawn = [draw(seed, kind=kinds[seed % len(kinds)]) for seed in range(36)]
    for original in (*drawn, *map(draw, range(FIRST, FIRST + 36))):
        for program in smaller(original):
            compile(script(program, {}), f"<seed {program.seed}>", "exec")
            names = {each.optimizer for each in statements(program.body) if isinstance(each, Step)}
            assert all(number < len(program.optimizers) for number in names)


def test_what_does_not_matter_goes() -> None:
    def fails(program: Program) -> bool:
        return any(isinstance(each, Backward) and each.items == "int" for each in statements(program.body))

    large = next(p for p in map(draw, range(500)) if fails(p) and size(p) > 30 and uses(p, Evaluate) and uses(p, Step))
    case, result = shrink(Case(large, 1, "one"), WRONG, judge_by(fails))
    assert result == WRONG
    assert fails(case.program)
    assert len(case.program.models) == len(case.program.optimizers) == len(case.program.loaders) == 1
    assert not any(uses(case.program, kind) for kind in (Evaluate, Freeze, AddGroup))
    assert size(case.program) <= 15
