"""Drawn programs whose numbers were wrong once, made smaller and kept as data."""

from __future__ import annotations

import pytest
from loops.check import Case, check
from loops.programs import (
    Accumulate,
    Backward,
    Clip,
    EvaluateBatch,
    Forward,
    Freeze,
    ItemCount,
    Loader,
    Loop,
    Model,
    Optimizer,
    Program,
    Slice,
    Step,
    When,
    Zero,
)


def grows(items: ItemCount | None) -> Program:
    """Gradients of the body, which nobody steps or clears, grow from window to window; saved in the second one."""
    return Program(
        seed=1,
        models=(Model("Mlp"),),
        optimizers=(Optimizer("SGD", (Slice(0, "head"),)),),
        loaders=(Loader(rows=48, batch=12, kind="iterable"),),
        body=(
            Accumulate(
                (0,),
                (
                    Forward(0, 0, 0),
                    Backward((0,), items),
                    Clip("model", 0, 100.0),
                    Step(0),
                    Zero("optimizer", 0),
                ),
            ),
        ),
        loop=Loop("for", (0,), epochs=2),
        window=3,
        save_at=5,
    )


# Momentum moves a frozen body as long as its gradients are zeros and not None.
FROZEN_WITH_ZEROS = Program(
    seed=2,
    models=(Model("Mlp"),),
    optimizers=(Optimizer("momentum", (Slice(0, "all"),)),),
    loaders=(Loader(rows=72, batch=12),),
    body=(
        When("at", 2, 0, (Freeze(0, "body", True),)),
        When("at", 4, 0, (Freeze(0, "body", False),)),
        Accumulate(
            (0,), (Forward(0, 0, 0), Backward((0,)), Step(0), When("sync", 0, 0, (Zero("model", 0, to_none=False),)))
        ),
        EvaluateBatch(0, 0),
    ),
    window=2,
)


@pytest.mark.timeout(240)
def test_programs_that_were_wrong_once() -> None:
    cases = []
    for program in (grows(None), grows("int")):
        for world, plan, then in (
            (1, "one", (1, "one")),
            (1, "one", (2, "replicate")),
            (2, "replicate", (1, "one")),
            (2, "shard", (2, "shard")),
            (2, "shard", (3, "zero2")),
            (2, "zero2", (2, "zero2")),
            (2, "zero2", (2, "shard")),
        ):
            cases.append(Case(program, world, plan, then))
    cases += [Case(FROZEN_WITH_ZEROS, 2, plan) for plan in ("replicate", "zero2", "shard")]
    outcomes = check(cases)
    wrong = [
        f"{case.name}: {result}"
        for case, result in zip(cases, outcomes, strict=True)
        if result is None or result.kind != "equal"
    ]
    assert wrong == []
