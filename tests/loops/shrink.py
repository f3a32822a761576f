"""Makes a program that fails smaller, for as long as it fails in the same way.

smaller    all programs that are one change smaller: a statement less, a block opened, a plainer part, fewer batches
shrink     takes the first of them that still fails in the same way, until none does
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from loops.check import Case, check, with_program
from loops.compare import Outcome
from loops.programs import (
    Accumulate,
    AddGroup,
    Alone,
    Backward,
    Block,
    Clip,
    CountLocalStep,
    Edit,
    Evaluate,
    EvaluateAverage,
    EvaluateBatch,
    EvaluateKept,
    Forward,
    ForwardBackward,
    Freeze,
    GradientsOf,
    Loop,
    Mode,
    Model,
    Next,
    Optimizer,
    Prepare,
    Program,
    Rate,
    Read,
    Recall,
    Record,
    Remember,
    SchedulerStep,
    Setting,
    Slice,
    Statement,
    States,
    Step,
    UpdateAverage,
    UpdateBatchNorm,
    When,
    Write,
    Zero,
    size,
    statements,
    uses,
)

Body = tuple[Statement, ...]
Judge = Callable[[Sequence[Case]], Sequence[Outcome | None]]

_AT_A_TIME = 12  # programs that are tried in one group of ranks


def shrink(case: Case, wanted: Outcome, judge: Judge = check, most_tries: int = 400) -> tuple[Case, Outcome]:
    """The smallest case that was found, and its outcome.

    Args:
        wanted: the outcome of `case`.
        judge: gives the outcomes of cases.
        most_tries: the number of programs after which it stops.
    """
    tries = 0
    tried: set[Program] = {case.program}
    smallest = (case, wanted)
    improved = True
    while improved and tries < most_tries:
        improved = False
        candidates = [program for program in dict.fromkeys(smaller(smallest[0].program)) if program not in tried]
        candidates.sort(key=size)
        for begin in range(0, len(candidates), _AT_A_TIME):
            batch = [with_program(case, program) for program in candidates[begin : begin + _AT_A_TIME]]
            tries += len(batch)
            tried.update(each.program for each in batch)
            same = [(each, got) for each, got in zip(batch, judge(batch), strict=True) if got and got.same_way(wanted)]
            if same:
                smallest = same[0]
                improved = True
                break
            if tries >= most_tries:
                break
    return smallest


def smaller(program: Program) -> Iterator[Program]:
    """All valid programs that are one change smaller."""
    for candidate in _changes(program):
        tidy = _tidied(candidate)
        if tidy is not None and tidy != program and _kinds(tidy) == _kinds(program):
            yield tidy


def _kinds(program: Program) -> list[bool]:
    """What a smaller program keeps: one that does not clear its gradients any more shows another fault, in most cases."""
    return [uses(program, Step), uses(program, Zero), program.window > 1]


def _changes(program: Program) -> Iterator[Program]:
    for body in _smaller_bodies(program.body):
        yield replace(program, body=body)
    for number in range(len(program.models)):
        if len(program.models) > 1:
            yield _without_model(program, number)
        for model in _plainer_models(program.models[number]):
            yield replace(program, models=_with(program.models, number, model))
    for number in range(len(program.optimizers)):
        if len(program.optimizers) > 1:
            yield _without_optimizer(program, number)
        for optimizer in _plainer_optimizers(program.optimizers[number]):
            yield replace(program, optimizers=_with(program.optimizers, number, optimizer))
    for number in range(len(program.schedulers)):
        yield _without_scheduler(program, number)
    for number in range(len(program.loaders)):
        if len(program.loaders) > 1:
            yield _without_loader(program, number)
    yield from _plainer_settings(program)
    yield from _fewer_batches(program)


def _smaller_bodies(body: Body) -> Iterator[Body]:
    for place, statement in enumerate(body):
        before, after = body[:place], body[place + 1 :]
        yield (*before, *after)
        if isinstance(statement, Block):
            yield (*before, *statement.body, *after)
            for inner in _smaller_bodies(statement.body):
                yield (*before, replace(statement, body=inner), *after)
        for plainer in _plainer_statements(statement):
            yield (*before, plainer, *after)


def _plainer_statements(statement: Statement) -> Iterator[Statement]:
    match statement:
        case Backward(names, items, only):
            if only is not None:
                yield replace(statement, only=None)
            if len(names) > 1:
                yield replace(statement, names=names[:1])
            if items is not None:
                yield replace(statement, items=None)
            if items in ("float", "mask"):
                yield replace(statement, items="int")
        case ForwardBackward(items=True):
            yield replace(statement, items=False)
        case Forward(through=through, detach=detach) if through is not None:
            yield replace(statement, through=None, detach=False)
            if not detach:
                yield replace(statement, detach=True)
        case Clip(over, _, limit, by):
            if limit != 100.0:
                yield replace(statement, limit=100.0)
            if by == "value":
                yield replace(statement, by="norm")
            if over == "all":
                yield replace(statement, over="model", number=0)
        case Forward(penalty=True):
            yield replace(statement, penalty=False)
        case Edit("decay" | "assign" | "centre" | "normalise"):
            yield replace(statement, kind="scale")
        case GradientsOf("hessian" | "descend" | "weigh"):
            yield replace(statement, kind="log")
        case GradientsOf("log", _, _, name) if name is not None:
            yield replace(statement, name=None)
        case Alone("saliency"):
            yield replace(statement, kind="evaluate")
        case States("zero" | "pop" | "halve"):
            yield replace(statement, kind="clear")
        case EvaluateKept(by="data"):
            yield replace(statement, by="copy")
        case Remember(file=True):
            yield Remember()
        case Write(early=True):
            yield replace(statement, early=False)
        case Write("data" | "copy" | "clamp" | "clip"):
            yield replace(statement, kind="multiply")
        case Zero(how, _, to_none):
            if not to_none:
                yield replace(statement, to_none=True)
            if how == "hand":
                yield replace(statement, how="model")


def _plainer_models(model: Model) -> Iterator[Model]:
    plain = Model()
    for name in ("body_of", "tied", "side", "frozen", "body"):
        if getattr(model, name) != getattr(plain, name):
            yield replace(model, **{name: getattr(plain, name)}, **({"tied": False} if name == "body" else {}))


def _plainer_optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    if optimizer.options:
        yield replace(optimizer, options="")
    if optimizer.kind != "SGD":
        yield replace(optimizer, kind="SGD", options="")
    for number in range(len(optimizer.slices)):
        if len(optimizer.slices) > 1:
            yield replace(optimizer, slices=optimizer.slices[:number] + optimizer.slices[number + 1 :])
    if len(optimizer.slices) == 1 and optimizer.slices[0].part != "all":
        yield replace(optimizer, slices=(Slice(optimizer.slices[0].model),))


def _plainer_settings(program: Program) -> Iterator[Program]:
    if program.save_at is not None:
        yield replace(program, save_at=None)
        if program.plain_save:
            yield replace(program, plain_save=False)
        elif program.save_at > 0:
            yield replace(program, save_at=program.save_at - 1)
    for place in range(len(program.hooks)):
        yield replace(program, hooks=program.hooks[:place] + program.hooks[place + 1 :])
    if program.window > 1:
        yield replace(program, window=1)
        if program.window > 2:
            yield replace(program, window=2)
    if not program.split_batches:
        yield replace(program, split_batches=True)
    if program.precision != "no":
        yield replace(program, precision="no", recipe="")
    if program.compiled is not None:
        yield replace(program, compiled=None)
    if program.recompute:
        yield replace(program, recompute="")
    if program.dispatch is not None:
        yield replace(program, dispatch=None)
    if program.local is not None:
        yield replace(program, local=None)
        if program.local.outer:
            yield replace(program, local=replace(program.local, outer=False))
    if program.twice:
        yield replace(program, twice=False)
    if any(loader.kind == "packed" for loader in program.loaders):
        yield _unpacked(program)
    if program.loose:
        yield replace(program, loose=False)
    if program.averages:
        yield replace(program, averages=())
        if program.averages[0].prepared:
            yield replace(program, averages=(replace(program.averages[0], prepared=False),))
    if program.late is not None:
        yield replace(program, late=None)
    if program.apart:
        yield replace(program, apart=False)
    if program.afterwards:
        yield replace(program, afterwards=())
    if program.begun:
        yield replace(program, begun=0)
    if program.offload:
        yield replace(program, offload="")
        if program.offload in ("all=disk", "activations+optimizer=disk"):
            yield replace(program, offload="optimizer=disk")
    for place, loader in enumerate(program.loaders):
        if loader.taken:
            plainer = replace(loader, taken="")
            yield replace(program, loaders=(*program.loaders[:place], plainer, *program.loaders[place + 1 :]))
    if program.loop.ahead:
        yield replace(program, loop=replace(program.loop, ahead=0))
    if program.loop.again:
        yield replace(program, loop=replace(program.loop, again=""))
    if program.loop.kind == "zip":
        for loader in program.loop.loaders:
            yield replace(program, loop=Loop("for", (loader,), program.loop.epochs))


def _unpacked(program: Program) -> Program:
    """The program with rows in place of packed documents."""
    models = tuple(replace(model, body="Mlp") if model.body == "Documents" else model for model in program.models)
    loaders = tuple(replace(loader, kind="map") if loader.kind == "packed" else loader for loader in program.loaders)
    return replace(program, models=models, loaders=loaders)


def _fewer_batches(program: Program) -> Iterator[Program]:
    if program.loop.kind != "next" and program.loop.epochs > 1:
        yield replace(program, loop=replace(program.loop, epochs=1))
    if program.loop.kind == "next" and program.loop.steps > 1:
        yield replace(program, loop=replace(program.loop, steps=program.loop.steps - 1))
    for number, loader in enumerate(program.loaders):
        if loader.kind == "sized":
            yield replace(program, loaders=_with(program.loaders, number, replace(loader, kind="iterable")))
        if loader.kind in ("iterable", "endless"):
            yield replace(program, loaders=_with(program.loaders, number, replace(loader, kind="map")))
        for name in ("shuffle", "drop_last"):
            if getattr(loader, name):
                yield replace(program, loaders=_with(program.loaders, number, replace(loader, **{name: False})))
        full = loader.rows // loader.batch * loader.batch
        for rows in (loader.batch, 2 * loader.batch, loader.rows - loader.batch, full):
            if 0 < rows < loader.rows:
                yield replace(program, loaders=_with(program.loaders, number, replace(loader, rows=rows)))
        # In mxfp8 each rank has a multiple of 32 rows.
        if loader.batch > 12 and program.recipe != "mxfp8":
            half = replace(loader, batch=12, rows=max(1, loader.rows // 2))
            yield replace(program, loaders=_with(program.loaders, number, half))


# ------------------------------------------------------------------------ parts that go, with all that names them


def _with(parts: tuple, place: int, part: object) -> tuple:  # type: ignore[type-arg]
    return (*parts[:place], part, *parts[place + 1 :])


def _without(parts: tuple, place: int) -> tuple:  # type: ignore[type-arg]
    return (*parts[:place], *parts[place + 1 :])


def _mapped(body: Body, change: Callable[[Statement], Statement | None]) -> Body:
    """The statements that `change` gives, which takes those away for which it gives None."""
    result: list[Statement] = []
    for statement in body:
        changed = change(statement)
        if isinstance(changed, Block):
            changed = replace(changed, body=_mapped(changed.body, change))
        if changed is not None:
            result.append(changed)
    return tuple(result)


def _moved(number: int, gone: int) -> int:
    return number - (number > gone)


def _without_model(program: Program, gone: int) -> Program:
    def change(statement: Statement) -> Statement | None:
        match statement:
            case Accumulate(models, _):
                left = tuple(_moved(model, gone) for model in models if model != gone)
                return replace(statement, models=left) if left else None
            case Forward(model=model, through=through):
                if gone in (model, through):
                    return None
                through = None if through is None else _moved(through, gone)
                return replace(statement, model=_moved(model, gone), through=through)
            case (
                ForwardBackward() | Read() | Freeze() | Evaluate() | EvaluateBatch() | Edit() | Prepare()
                | EvaluateKept() | GradientsOf() | Alone() | Mode()
            ):  # fmt: skip
                if statement.model == gone:
                    return None
                return replace(statement, model=_moved(statement.model, gone))
            case Clip("model", number) | Zero("model" | "hand", number):
                return None if number == gone else replace(statement, number=_moved(number, gone))
            case Write(model=model, source=source):
                if gone in (model, source):
                    return None
                source = None if source is None else _moved(source, gone)
                return replace(statement, model=_moved(model, gone), source=source)
            case AddGroup(_, each):
                if each.model == gone:
                    return None
                return replace(statement, slice=replace(each, model=_moved(each.model, gone)))
        return statement

    optimizers = []
    for optimizer in program.optimizers:
        slices = tuple(replace(each, model=_moved(each.model, gone)) for each in optimizer.slices if each.model != gone)
        optimizers.append(replace(optimizer, slices=slices))
    models = []
    for model in _without(program.models, gone):
        body_of = model.body_of
        if body_of is not None:
            body_of = None if body_of == gone else _moved(body_of, gone)
        models.append(replace(model, body_of=body_of))
    hooks = tuple(replace(hook, model=_moved(hook.model, gone)) for hook in program.hooks if hook.model != gone)
    averages = tuple(replace(each, model=_moved(each.model, gone)) for each in program.averages if each.model != gone)
    late = None if program.late in (None, gone) else _moved(program.late, gone)
    result = replace(program, models=tuple(models), optimizers=tuple(optimizers), hooks=hooks)
    result = replace(result, averages=averages, late=late, apart=program.apart and len(models) > 1)
    return replace(result, body=_mapped(program.body, change))


def _without_optimizer(program: Program, gone: int) -> Program:
    def change(statement: Statement) -> Statement | None:
        match statement:
            case Step() | AddGroup() | Rate() | Setting() | States():
                if statement.optimizer == gone:
                    return None
                return replace(statement, optimizer=_moved(statement.optimizer, gone))
            case Backward(only=only) if only is not None:
                return None if only == gone else replace(statement, only=_moved(only, gone))
            case Clip("optimizer", number) | Zero("optimizer", number):
                return None if number == gone else replace(statement, number=_moved(number, gone))
        return statement

    result = replace(program, optimizers=_without(program.optimizers, gone), body=_mapped(program.body, change))
    result = replace(result, afterwards=_without(program.afterwards, gone))
    for number in reversed(range(len(program.schedulers))):
        if program.schedulers[number].optimizer == gone:
            result = _without_scheduler(result, number)
    schedulers = [replace(each, optimizer=_moved(each.optimizer, gone)) for each in result.schedulers]
    return replace(result, schedulers=tuple(schedulers))


def _without_scheduler(program: Program, gone: int) -> Program:
    def change(statement: Statement) -> Statement | None:
        if isinstance(statement, SchedulerStep):
            return None if statement.scheduler == gone else SchedulerStep(_moved(statement.scheduler, gone))
        return statement

    return replace(program, schedulers=_without(program.schedulers, gone), body=_mapped(program.body, change))


def _without_loader(program: Program, gone: int) -> Program:
    def change(statement: Statement) -> Statement | None:
        named = Forward | ForwardBackward | Next | Evaluate | EvaluateBatch | EvaluateAverage | UpdateBatchNorm
        named |= EvaluateKept | GradientsOf
        if isinstance(statement, named):
            if statement.loader == gone:
                return None
            return replace(statement, loader=_moved(statement.loader, gone))
        return statement

    left = tuple(_moved(loader, gone) for loader in program.loop.loaders if loader != gone)
    loop = replace(program.loop, loaders=left)
    if loop.kind == "zip" and len(left) == 1:
        loop = replace(loop, kind="for")
    return replace(program, loaders=_without(program.loaders, gone), loop=loop, body=_mapped(program.body, change))


def _tidied(program: Program) -> Program | None:
    """The program without statements that have lost what they name; None if it is no program any more."""
    if program.loop.kind != "next" and not program.loop.loaders:
        return None
    if any(not optimizer.slices for optimizer in program.optimizers):
        empty = next(number for number, optimizer in enumerate(program.optimizers) if not optimizer.slices)
        return _tidied(_without_optimizer(program, empty)) if len(program.optimizers) > 1 else None
    computed = {each.name for each in statements(program.body) if isinstance(each, Forward)}
    remembers = uses(program, Remember)
    is_late = uses(program, Prepare)
    if program.late is not None and not is_late:
        return _tidied(replace(program, late=None))

    def change(statement: Statement) -> Statement | None:
        match statement:
            case Backward(names):
                left = tuple(name for name in names if name in computed)
                return replace(statement, names=left) if left else None
            case Record(name):
                return statement if name in computed else None
            case GradientsOf(name=name) if name is not None:
                return statement if name in computed else None
            case Recall():
                return statement if remembers else None
            case Prepare():
                return statement if program.late is not None else None
            case CountLocalStep():
                return statement if program.local is not None else None
            case UpdateAverage() | EvaluateAverage() | UpdateBatchNorm():
                return statement if program.averages else None
            case When() | Accumulate():
                return statement if statement.body else None
        return statement

    body = _mapped(program.body, change)
    result = replace(program, body=body)
    if not any(isinstance(each, Backward | ForwardBackward) for each in statements(body)):
        return None
    if not _has_batches(result) or _has_parts_twice(result) or not _takes_its_batches(result):
        return None
    return result if body == program.body else _tidied(result)


def _has_batches(program: Program) -> bool:
    """Whether each batch that a statement uses is taken before it, by the loop or by `Next`."""
    taken = set(program.loop.loaders)
    taken |= {each.loader for each in statements(program.body) if isinstance(each, Next)}
    using = Forward | ForwardBackward | EvaluateBatch | GradientsOf
    users = [each for each in statements(program.body) if isinstance(each, using)]
    endless = any(program.loaders[number].kind == "endless" for number in program.loop.loaders)
    kinds = Evaluate | EvaluateAverage | EvaluateKept | UpdateBatchNorm
    evaluated = [each for each in statements(program.body) if isinstance(each, kinds)]
    endless |= any(program.loaders[each.loader].kind == "endless" for each in evaluated)
    return not endless and all(each.loader in taken for each in users)


def _takes_its_batches(program: Program) -> bool:
    """Whether models of documents get documents, and others rows."""
    takes = {model.body == "Documents" for model in program.models if model.body_of is None}
    gives = {loader.kind == "packed" for loader in program.loaders}
    return takes == gives


def _has_parts_twice(program: Program) -> bool:
    """Whether a parameter is in two groups."""
    parts = []
    for optimizer in program.optimizers:
        for each in optimizer.slices:
            own = ["body", "head"] if each.part == "all" else [each.part]
            owner = each.model
            for part in own:
                body_of = program.models[owner].body_of
                parts.append((body_of if part == "body" and body_of is not None else owner, part))
    return len(parts) != len(set(parts))
