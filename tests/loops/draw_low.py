"""Turns some drawn programs into ones of lower precision, less memory, packed tokens or local steps.

All of it comes from a random stream of its own and after everything else, so that all other programs of a seed stay the same.
If a program cannot be of the kind that is drawn, others are drawn until one can.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

from loops.programs import (
    Accumulate,
    AddGroup,
    Backward,
    Continue,
    CountLocalStep,
    EvaluateBatch,
    Forward,
    ForwardBackward,
    Freeze,
    Loader,
    LocalSteps,
    Model,
    Next,
    Program,
    Read,
    Recipe,
    Remember,
    Statement,
    Step,
    When,
    Write,
    statements,
    uses,
)
from loops.script import OPTIMIZERS_OF_MODULES

# How many of a hundred programs are of each kind.
KINDS = {"disk": 5, "eight-bit": 3, "float8": 3, "local": 4, "packed": 4, "recompute": 2, "dispatch": 3, "twice": 2}
# Each of up to four ranks has a multiple of 32 rows.
_MX_BATCH = 384
_TRIES = 300
_DISKS = ("optimizer=disk", "all=disk", "activations+optimizer=disk")


def draw_low(seed: int, program: Program, others: Callable[[random.Random], Program], kind: str = "") -> Program:
    """The program of a seed, or one of a kind that is drawn.

    Args:
        program: what is drawn without these kinds.
        others: draws one more program of the seed, where this one cannot be of the kind.
        kind: the one that is wanted; "" draws it, and with "none" the program stays what it is.
    """
    if kind == "none":
        return program
    rng = random.Random(f"{seed} low")
    drawn = rng.choices([*KINDS, ""], [*KINDS.values(), 100 - sum(KINDS.values())])[0]
    kind = kind or drawn
    if not kind:
        return program
    for _ in range(_TRIES):
        changed = _CHANGES[kind](program, rng)
        if changed is not None:
            return changed
        program = others(rng)
    raise AssertionError(f"none of {_TRIES} programs can be of the kind {kind!r}")


def _on_disk(program: Program, rng: random.Random) -> Program | None:
    """States on disk, and parameters where ranks divide them."""
    program = replace(program, offload=rng.choice(_DISKS))
    is_elementwise = all(each.kind not in OPTIMIZERS_OF_MODULES for each in program.optimizers)
    if not is_elementwise and rng.random() < 0.8:
        optimizers = [replace(each, kind="AdamW") for each in program.optimizers]
        program = replace(program, optimizers=tuple(optimizers))
    return _maybe_saved(program, rng)


def _maybe_saved(program: Program, rng: random.Random) -> Program:
    """Half of those that can be saved are."""
    is_simple = program.precision in ("no", "fp8") and not program.hooks and not program.loose and not program.twice
    copies = any(isinstance(each, Write) and each.kind in ("keep", "average", "blend") for each in _flat(program))
    changes = uses(program, AddGroup | Freeze | Remember) or program.late is not None or program.apart
    parts_left = program.afterwards or program.loop.ahead or any(each.taken for each in program.loaders)
    average_alone = any(not each.prepared for each in program.averages)
    if not is_simple or copies or changes or parts_left or average_alone or program.save_at is not None:
        return program
    return replace(program, save_at=rng.randint(0, 4)) if rng.random() < 0.5 else program


def _flat(program: Program) -> list[Statement]:
    return list(statements(program.body))


def _with_wide(program: Program, rng: random.Random) -> tuple[Program, int] | None:
    """The program with a wide body, and the number of that model."""
    shared = {model.body_of for model in program.models}
    own = [n for n, model in enumerate(program.models) if model.body_of is None and n not in shared]
    if not own:
        return None
    number = rng.choice(own)
    models = list(program.models)
    models[number] = replace(models[number], body="Wide", tied=False)
    return replace(program, models=tuple(models)), number


def _in_eight_bits(program: Program, rng: random.Random) -> Program | None:
    """The optimizers of a wide body keep their states in 8 bits."""
    made = _with_wide(program, rng)
    if made is None or program.precision != "no":
        return None
    wide, model = made
    optimizers = []
    for optimizer in wide.optimizers:
        owns = any(each.model == model and each.part != "head" for each in optimizer.slices)
        optimizers.append(replace(optimizer, kind="adamw8bit") if owns else optimizer)
    # Steps before the loop, and weights of 0.3, would be in float64: see `script.construction`.
    if wide.begun or any(isinstance(each, Backward) and each.items == "float" for each in _flat(wide)):
        return None
    return _maybe_saved(replace(wide, optimizers=tuple(optimizers)), rng)


def _in_float8(program: Program, rng: random.Random) -> Program | None:
    """Products in float8. Adam divides a difference of rounding by itself, so it is not among the optimizers."""
    flat = _flat(program)
    is_plain = program.precision == "no" and not any(isinstance(each, Forward) and each.penalty for each in flat)
    if not is_plain or program.averages or uses(program, ForwardBackward | Remember):
        return None
    # A model without a layer that fits is refused.
    models = tuple(replace(model, body="Wide", tied=False) for model in program.models)
    wide = replace(program, models=models)
    recipe: Recipe = rng.choice(get_args(Recipe)[1:])
    kinds = ("SGD", "momentum")
    optimizers = [each if each.kind in kinds else replace(each, kind=rng.choice(kinds)) for each in wide.optimizers]
    loaders = list(wide.loaders)
    if recipe == "mxfp8":
        loaders = [replace(each, batch=_MX_BATCH, rows=2 * _MX_BATCH) for each in loaders]
    result = replace(wide, precision="fp8", recipe=recipe, optimizers=tuple(optimizers), loaders=tuple(loaders))
    afterwards = tuple(rng.choice(kinds) for _ in program.afterwards)
    return _maybe_saved(replace(result, afterwards=afterwards), rng)


def _with_local_steps(program: Program, rng: random.Random) -> Program | None:
    """Ranks take steps of their own, on full batches. What looks at one rank's gradients or weights has no common value."""
    flat = _flat(program)
    loop = program.loop
    is_simple = len(program.models) == 1 and loop.kind == "for" and program.precision == "no"
    strange = Freeze | AddGroup | Write | Read | Continue | Next | Remember | ForwardBackward
    if not is_simple or uses(program, strange) or program.averages or program.loose or program.afterwards:
        return None
    if any(isinstance(each, Backward) and each.items is not None for each in flat) or not uses(program, Step):
        return None
    body = _counted(program.body)
    if body is None:
        return None
    models = program.models
    if models[0].body == "BatchNorm":
        models = (replace(models[0], body="LayerNorm"),)
    loaders = tuple(
        replace(each, rows=max(1, each.rows // each.batch) * each.batch, shuffle=False) for each in program.loaders
    )
    local = LocalSteps(rng.choice([1, 2, 2, 3]), outer=rng.random() < 0.5)
    save_at = rng.randint(0, 3) if local.outer and not program.hooks and rng.random() < 0.5 else None
    loop = replace(loop, ahead=0)
    result = replace(program, models=models, loaders=loaders, loop=loop, local=local, body=body)
    return replace(result, save_at=save_at, plain_save=False)


def _counted(body: tuple[Statement, ...]) -> tuple[Statement, ...] | None:
    """The body with a count behind the last step; None if it has none."""
    for place in reversed(range(len(body))):
        statement = body[place]
        if isinstance(statement, Step):
            return (*body[: place + 1], CountLocalStep(), *body[place + 1 :])
        if isinstance(statement, When | Accumulate):
            inner = _counted(statement.body)
            if inner is not None:
                return (*body[:place], replace(statement, body=inner), *body[place + 1 :])
    return None


def _packed(program: Program, rng: random.Random) -> Program | None:
    """Loaders give packed documents. A batch has another number of tokens each time, and ranks have different ones."""
    flat = _flat(program)
    through = any(isinstance(each, Forward) and (each.penalty or each.through is not None) for each in flat)
    strange = ForwardBackward | Next | EvaluateBatch | Continue
    is_simple = program.loop.kind == "for" and program.precision == "no" and not program.averages
    if not is_simple or through or uses(program, strange) or program.apart:
        return None
    models = tuple(_of_documents(model) for model in program.models)
    loaders = tuple(
        Loader(rows=rng.randint(12, 30), batch=rng.choice([16, 24, 40]), kind="packed") for _ in program.loaders
    )
    result = replace(program, models=models, loaders=loaders, split_batches=True, begun=0)
    if program.save_at is not None:
        result = replace(result, save_at=rng.randint(0, 3), plain_save=False)
    if program.loop.ahead:
        result = replace(result, loop=replace(program.loop, ahead=0))
    result = replace(result, dispatch=rng.choice([None, None, True, False]))
    return _maybe_saved(result, rng)


def _of_documents(model: Model) -> Model:
    return replace(model, body="Documents", tied=False)


def _recomputed(program: Program, rng: random.Random) -> Program | None:
    """Models of blocks, without which there is nothing to compute again.

    Not where parameters are written: what is computed again is computed from the values of then, in plain PyTorch, too.
    """
    if uses(program, Write):
        return None
    models = tuple(
        replace(model, body=rng.choice(["Blocks", "Blocks", "Wide"]), tied=False) for model in program.models
    )
    return replace(program, models=models, recompute=rng.choice(["blocks", "2", "selective"]))


def _dispatched(program: Program, rng: random.Random) -> Program | None:
    """Half of them have experts, which a last batch of a row or two leaves without any on most ranks."""
    models = list(program.models)
    loaders = list(program.loaders)
    own = [n for n, model in enumerate(models) if model.body_of is None and model.body != "Blocks"]
    # Two accelerators do not know of each other where the loops over their loaders end.
    if own and not program.apart and program.precision == "no" and rng.random() < 0.5:
        number = rng.choice(own)
        models[number] = replace(models[number], body=rng.choice(["StackedMixture", "ListedMixture"]), tied=False)
        first = loaders[0]
        loaders[0] = replace(first, rows=first.rows // first.batch * first.batch + rng.randint(1, 3))
    dispatch = rng.random() < 0.75
    return replace(program, models=tuple(models), loaders=tuple(loaders), dispatch=dispatch)


def _twice(program: Program, rng: random.Random) -> Program | None:
    """Not with what belongs to one run: a save, a second accelerator, other optimizers."""
    if program.save_at is not None or program.apart or program.late is not None or program.afterwards or program.loose:
        return None
    return replace(program, twice=True)


_CHANGES: dict[str, Callable[[Program, random.Random], Program | None]] = {
    "disk": _on_disk,
    "eight-bit": _in_eight_bits,
    "float8": _in_float8,
    "local": _with_local_steps,
    "packed": _packed,
    "recompute": _recomputed,
    "dispatch": _dispatched,
    "twice": _twice,
}
