"""Adds to drawn programs what a script does besides its steps.

That is what one rank does alone, `torch.autograd.grad`, settings and states of optimizers, averages in the place of weights,
compiled models, and modes.

All of it comes from a random stream of its own and after everything else, and into seeds from `FIRST` on: programs of earlier
seeds, which reports name, stay what they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from loops.programs import (
    Alone,
    Backward,
    Clip,
    Compiled,
    Edit,
    EvaluateKept,
    Forward,
    GradientsOf,
    Loader,
    Mode,
    Program,
    Remember,
    Scheduler,
    SchedulerStep,
    Setting,
    Statement,
    States,
    Step,
    When,
    Write,
    Zero,
    at_place,
    before,
    models_of,
    replaced,
    statements,
    uses,
)
from loops.script import LATER_EDITS, LATER_SCHEDULERS, OPTIMIZERS, OPTIMIZERS_OF_MODULES, OPTIONS, SCHEDULERS

FIRST = 830_000
Body = tuple[Statement, ...]
Addition = Callable[[Program, random.Random], Program | None]
_EVALUATED = 24  # rows of a loader for evaluation
_SETTINGS = {
    "lr": (0.03, 0.001),
    "weight_decay": (0.05, 0.0),
    "momentum": (0.5, 0.0),
    "betas": ((0.5, 0.9),),
    "maximize": (True,),
}
# Which kinds of optimizers have a setting that is not of all of them.
_OWNERS = {"momentum": ("momentum", "RMSprop"), "betas": ("Adam", "AdamW")}


def draw_more(seed: int, program: Program) -> Program:
    """The program of a seed with up to three additions."""
    if seed < FIRST:
        return program
    rng = random.Random(f"{seed} more")
    for _ in range(rng.choices([0, 1, 2, 3], [30, 35, 22, 13])[0]):
        addition = rng.choices(list(ADDITIONS), list(ADDITIONS.values()))[0]
        program = addition(program, rng) or program
    if program.compiled is not None and any(map(_keeps_its_graph, _flat(program))):
        # torch's own limits: what `aot_autograd` has compiled has no second derivatives, and one backward pass.
        program = replace(program, compiled=replace(program.compiled, backend="eager"))
    return program


def _keeps_its_graph(statement: Statement) -> bool:
    if isinstance(statement, GradientsOf):
        return statement.kind == "hessian" or statement.name is not None
    return isinstance(statement, Forward) and statement.penalty


def _flat(program: Program) -> list[Statement]:
    return list(statements(program.body))


def _placed(program: Program, rng: random.Random, new: Statement, first: int = 0) -> Program:
    """The program with a statement at any place from number `first` on, in every step or in some."""
    place = rng.randint(first, len(_flat(program)))
    whens = [None, When("every", 2, 1), When("every", 3, 2), When("at", rng.randint(0, 4))]
    when = rng.choice(whens)
    new = new if when is None else replace(when, body=(new,))
    return replace(program, body=at_place(program.body, place, new))


def _is_computed_together(program: Program) -> bool:
    """Whether all ranks have one state, in float64, which one accelerator knows."""
    return program.precision == "no" and program.local is None and not program.apart and program.late is None


def _alone(program: Program, rng: random.Random) -> Program | None:
    is_of_rows = all(loader.kind != "packed" for loader in program.loaders)
    if not _is_computed_together(program) or not is_of_rows or program.save_at is not None:
        return None
    model = rng.randrange(len(program.models))
    return _placed(program, rng, Alone(rng.choice(["evaluate", "evaluate", "saliency", "save", "print"]), model))  # type: ignore[arg-type]


def _with_gradients(program: Program, rng: random.Random) -> Program | None:
    """On full batches, where the average of the ranks' gradients is that of one process."""
    flat = _flat(program)
    forwards = [each for each in flat if isinstance(each, Forward)]
    if not forwards or not _is_computed_together(program) or program.loaders[forwards[0].loader].kind == "packed":
        return None
    of = rng.choice(forwards)
    if of.through is not None or program.plain_save:
        return None  # a plain save stands at the end of an epoch, which is shorter then
    kind = rng.choice(["log", "log", "weigh", "hessian", "descend"])
    new = GradientsOf(kind, of.model, of.loader)  # type: ignore[arg-type]
    if kind == "descend" and program.recompute:
        return None  # what is computed again is computed from other weights, in plain PyTorch, too
    if kind == "weigh" or (kind != "descend" and rng.random() < 0.5):
        # The graph is there between the forward pass and its backward pass.
        new = replace(new, name=of.name)
        users = [each for each in flat if isinstance(each, Backward) and of.name in each.names]
        program = replace(program, body=before(program.body, users[0], new)) if users else program
    else:
        program = _placed(program, rng, new, first=flat.index(of))
    loaders = list(program.loaders)
    own = loaders[of.loader]
    loaders[of.loader] = replace(own, rows=max(1, own.rows // own.batch) * own.batch)
    return replace(program, loaders=tuple(loaders))


def _with_inputs(program: Program, rng: random.Random) -> Program | None:
    """A backward pass that gives gradients to the parameters of one optimizer alone, as a step of a GAN."""
    flat = _flat(program)
    backward = [each for each in flat if isinstance(each, Backward)]
    if not backward or program.loose or program.local is not None or program.hooks or program.afterwards:
        return None
    chosen = rng.choice(backward)
    models = models_of(program, chosen)
    owners = [number for number in range(len(program.optimizers)) if models_of(program, Step(number)) & models]
    if not owners:
        return None
    return replace(program, body=replaced(program.body, chosen, replace(chosen, only=rng.choice(owners))))


def _with_setting(program: Program, rng: random.Random) -> Program | None:
    number = rng.randrange(len(program.optimizers))
    name = rng.choice(list(_SETTINGS))
    kind = program.optimizers[number].kind
    if kind in OPTIMIZERS_OF_MODULES or kind not in _OWNERS.get(name, (kind,)) or program.afterwards:
        return None
    setting = Setting(number, name, rng.choice(_SETTINGS[name]))  # type: ignore[arg-type]
    place = rng.randint(0, len(_flat(program)))
    when = When("at", rng.randint(0, 4), body=(setting,))
    return replace(program, body=at_place(program.body, place, when))


def _with_states(program: Program, rng: random.Random) -> Program | None:
    if not _is_computed_together(program):
        return None
    number = rng.randrange(len(program.optimizers))
    # The states of a whole matrix are on the rank that steps it alone.
    is_divided = program.optimizers[number].kind in OPTIMIZERS and not program.afterwards
    kind = rng.choice([*(["read", "read"] * is_divided), "clear", "zero", "pop", "halve"])
    return _placed(program, rng, States(kind, number))  # type: ignore[arg-type]


def _with_swap(program: Program, rng: random.Random) -> Program | None:
    """An average of weights by hand, which an evaluation uses in their place."""
    if not _is_computed_together(program) or program.save_at is not None or program.recompute:
        return None
    if any(loader.kind == "packed" for loader in program.loaders):
        return None
    model = rng.randrange(len(program.models))
    part = rng.choice(["all", "all", "body", "head"])
    number = len(program.loaders)
    keep = When("at", 0, body=(Write("keep", model, part),))  # type: ignore[arg-type]
    swap = EvaluateKept(model, part, number, "data" if rng.random() < 0.2 else "copy")  # type: ignore[arg-type]
    average = Write("average", model, part)  # type: ignore[arg-type]
    evaluated = When("every", rng.choice([2, 3]), 1, (swap,))
    program = replace(program, loaders=(*program.loaders, Loader(_EVALUATED, 12)))
    steps = [place for place, each in enumerate(_flat(program)) if isinstance(each, Step)]
    place = rng.randint(steps[-1] + 1, len(_flat(program))) if steps else len(_flat(program))
    body = at_place(at_place(program.body, place, evaluated), place, average)
    return replace(program, body=(keep, *body))


def _compiled(program: Program, rng: random.Random) -> Program | None:
    if program.recompute or "activations" in program.offload or program.recipe or program.averages or program.hooks:
        return None
    if program.late is not None or program.afterwards or rng.random() < 0.5:
        return None
    if program.loop.again or program.loop.ahead:
        return None  # hooks see from which batch a loss is; the compiler leaves them out, and a warning says so
    # What `torch.compile` gives has other names than `get_state_dict`.
    loads = uses(program, Remember) or any(
        isinstance(each, Write) and each.kind == "load all" for each in _flat(program)
    )
    place = rng.choice(["in place"] if loads else ["before", "after", "after", "in place"])
    return replace(program, compiled=Compiled(place, rng.choice(["eager", "aot_eager"])))  # type: ignore[arg-type]


def _with_options(program: Program, rng: random.Random) -> Program | None:
    number = rng.randrange(len(program.optimizers))
    optimizer = program.optimizers[number]
    if optimizer.kind not in OPTIONS or program.precision != "no":
        return None
    optimizer = replace(optimizer, options=rng.choice(OPTIONS[optimizer.kind]))
    return replace(program, optimizers=(*program.optimizers[:number], optimizer, *program.optimizers[number + 1 :]))


def _with_schedule(program: Program, rng: random.Random) -> Program | None:
    """A scheduler that steps by windows or by epochs."""
    ends = [program.loaders[number].batches for number in program.loop.loaders]
    if program.schedulers or program.afterwards or program.late is not None or None in ends:
        return None
    kinds = [*SCHEDULERS, *LATER_SCHEDULERS]
    norms = any(isinstance(each, Clip) and each.by == "norm" for each in _flat(program))
    if program.save_at is not None or not norms or program.local is not None or program.precision != "no":
        kinds.remove("ReduceLROnPlateau")
    number = rng.randrange(len(program.optimizers))
    kind = rng.choice(kinds)
    if program.optimizers[number].kind in (*OPTIMIZERS_OF_MODULES, "Adagrad") and kind == "OneCycleLR":
        kind = "LambdaLR"
    scheduler = Scheduler(kind, number)  # type: ignore[arg-type]
    when = When("sync", body=(SchedulerStep(0),))
    if ends and rng.random() < 0.5:
        epoch = min(ends)  # type: ignore[type-var]
        when = When("every", epoch, epoch - 1, (SchedulerStep(0),))  # type: ignore[arg-type,operator]
    return replace(program, schedulers=(scheduler,), body=(*program.body, when))


def _with_modes(program: Program, rng: random.Random) -> Program | None:
    """A model, or a part of it, is in evaluation mode for some steps."""
    if program.save_at is not None or program.late is not None:
        return None
    model = rng.randrange(len(program.models))
    part = rng.choice(["all", "body", "head"])
    begin = rng.randint(0, 2)
    places = len(_flat(program))
    off = When("at", begin, body=(Mode(model, part, False),))  # type: ignore[arg-type]
    on = When("at", begin + rng.randint(0, 3), body=(Mode(model, part, True),))  # type: ignore[arg-type]
    body = at_place(program.body, rng.randint(0, places), off)
    return replace(program, body=at_place(body, rng.randint(0, places), on))


def _with_edit(program: Program, rng: random.Random) -> Program | None:
    """Gradients that are written behind clipping."""
    flat = _flat(program)
    steps = [each for each in flat if isinstance(each, Step)]
    if not steps or program.precision != "no" or program.local is not None:
        return None
    target = rng.choice(steps)
    model = rng.choice(sorted(models_of(program, target)))
    edit: Statement = Edit(rng.choice(list(LATER_EDITS)), model, rng.choice(["all", "body", "head"]))  # type: ignore[arg-type]
    if program.window > 1:
        edit = When("sync", body=(edit,))
    return replace(program, body=before(program.body, target, edit))


def _with_zeros(program: Program, rng: random.Random) -> Program | None:
    """Gradients that become zeros at any place."""
    if program.late is not None:
        return None
    how = rng.choice(["optimizer", "model"])
    number = rng.randrange(len(program.optimizers if how == "optimizer" else program.models))
    return _placed(program, rng, Zero(how, number, to_none=False))  # type: ignore[arg-type]


# What is added, and how often.
ADDITIONS: dict[Addition, int] = {
    _alone: 4,
    _with_gradients: 6,
    _with_inputs: 3,
    _with_setting: 3,
    _with_states: 4,
    _with_swap: 3,
    _compiled: 1,
    _with_options: 3,
    _with_schedule: 3,
    _with_modes: 3,
    _with_edit: 2,
    _with_zeros: 3,
}
