"""Training programs as data: what `draw` makes, `plain` and `script` read, and `shrink` makes smaller.

A program is its parts (models, optimizers, schedulers, loaders), one loop, and the statements of the loop's body. Numbers in
statements are places in the lists of parts. Everything is frozen, so that a smaller program is a `replace` of a larger one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import UnionType
from typing import Literal

ModelPart = Literal["all", "body", "head"]
ItemCount = Literal["int", "float", "mask"]
Offload = Literal[
    "", "activations", "optimizer", "optimizer+activations", "optimizer=disk", "all=disk", "activations+optimizer=disk"
]  # fmt: skip
Recipe = Literal["", "rowwise_with_gw_hp", "mxfp8", "rowwise", "tensorwise"]
EditKind = Literal["scale", "decay", "assign", "centre", "normalise"]


@dataclass(frozen=True)
class Model:
    """A body, a head and perhaps more: see `zoo.Net`.

    Attributes:
        body: the class of its body, in `zoo`.
        tied: whether two layers of the body share their weight.
        side: a second head: "unused", or "branch" where every second step runs through it and not through the first.
        frozen: the part that is not trained.
        body_of: the model whose body this one has, too; None if it has one of its own.
    """

    body: str = "Mlp"
    tied: bool = False
    side: Literal["", "unused", "branch"] = ""
    frozen: Literal["", "body", "head"] = ""
    body_of: int | None = None


@dataclass(frozen=True)
class Slice:
    """Parameters of one model."""

    model: int
    part: ModelPart = "all"


@dataclass(frozen=True)
class Optimizer:
    """An optimizer; each slice is a parameter group of its own, but not of Muon, which divides parameters by their shapes.

    Attributes:
        options: more arguments, such as "foreach=True".
    """

    kind: str
    slices: tuple[Slice, ...]
    options: str = ""


@dataclass(frozen=True)
class AveragedCopy:
    """torch's `AveragedModel` of a model, copied before `prepare`.

    Attributes:
        kind: "mean" and "moving" of the parameters; "mean with buffers", "moving with buffers".
        prepared: whether the copy is prepared, too.
    """

    model: int
    kind: Literal["mean", "moving", "mean with buffers", "moving with buffers"] = "mean"
    prepared: bool = False


@dataclass(frozen=True)
class Scheduler:
    """A scheduler of one optimizer; "ReduceLROnPlateau" is told the last norm."""

    kind: Literal[
        "StepLR", "ExponentialLR", "CosineAnnealingLR", "LambdaLR", "OneCycleLR", "SequentialLR", "ReduceLROnPlateau"
    ]
    optimizer: int


@dataclass(frozen=True)
class Loader:
    """A data set and its loader.

    Attributes:
        rows: samples of an epoch.
        batch: samples of one batch over all ranks.
        kind: "map", "iterable" (an iterable data set), "sized" (one with a length), "endless"; "packed":
            documents, as many in a batch as `batch` tokens hold, packed into one row.
        shuffle: of a data set with a length, in an order that the global seed decides.
        drop_last: whether a short last batch is left out.
        taken: how `Next` takes batches: "" from one iterator after the other, "fresh" the first one of a new iterator each
            time, "cycle" by `itertools.cycle`, which keeps the batches of the first epoch.
    """

    rows: int
    batch: int
    kind: Literal["map", "iterable", "sized", "endless", "packed"] = "map"
    shuffle: bool = False
    drop_last: bool = False
    taken: Literal["", "fresh", "cycle"] = ""

    @property
    def batches(self) -> int | None:
        """Batches of an epoch; None if it never ends, or if their number depends on lengths."""
        if self.kind in ("endless", "packed"):
            return None
        return self.rows // self.batch if self.drop_last else -(-self.rows // self.batch)


@dataclass(frozen=True)
class LocalSteps:
    """`LocalSGD` of the first model around the loop.

    Attributes:
        steps: between two averages over the ranks.
        outer: whether an outer optimizer takes a step in place of each average.
    """

    steps: int
    outer: bool = False


@dataclass(frozen=True)
class Compiled:
    """`torch.compile` of all models: "before" or "after" `prepare`, or "in place" before it by `model.compile()`."""

    place: Literal["before", "after", "in place"]
    backend: Literal["eager", "aot_eager"] = "eager"


HookKind = Literal["double", "clamp", "fused", "input", "output", "input gradient", "output gradient"]


@dataclass(frozen=True)
class Hook:
    """A hook on a model's head, or on its parameters.

    Attributes:
        kind: "double" doubles each gradient as it is computed (`register_hook`), "clamp" limits it after it was added up
            (`register_post_accumulate_grad_hook`), "fused" steps in the backward pass. "input" and "output" scale what goes
            into the head and comes out of it, "input gradient" and "output gradient" what comes back.
    """

    model: int
    kind: HookKind


@dataclass(frozen=True)
class Loop:
    """How batches are taken.

    Attributes:
        kind: "for" one loader; "zip" all `loaders` together; "next": a number of steps, whose body takes all batches.
        loaders: those that the head of the loop takes batches from.
        epochs: of "for" and "zip".
        steps: of "next".
        ahead: of "for": batches that are taken before the first one is used.
        again: of "for": each batch is followed by one that was kept, "the one before" or "another" of this epoch.
    """

    kind: Literal["for", "zip", "next"] = "for"
    loaders: tuple[int, ...] = (0,)
    epochs: int = 1
    steps: int = 4
    ahead: int = 0
    again: Literal["", "the one before", "another"] = ""


# ------------------------------------------------------------------------ statements


@dataclass(frozen=True)
class Forward:
    """`rows<name> = per_row(model(x), y)`: the loss of each row of a loader's batch.

    Attributes:
        through: the model whose output is the input of `model`, as a generator's is a critic's.
        detach: whether no gradient reaches `through`.
        penalty: whether the loss of a row is the mean square of the gradient of the row's output by its input.
    """

    name: int
    model: int
    loader: int
    through: int | None = None
    detach: bool = False
    penalty: bool = False


@dataclass(frozen=True)
class Backward:
    """`backward` of the sum of the losses of some `Forward`s, which have the same loader.

    Attributes:
        items: None for means over rows; else the kind of the numbers that weight rows, whose sum is `num_items`. "mask" selects
            rows: a rank may have none of them.
        only: the optimizer whose parameters alone get gradients, by `inputs=`.
    """

    names: tuple[int, ...]
    items: ItemCount | None = None
    only: int | None = None


@dataclass(frozen=True)
class ForwardBackward:
    """`forward_backward`, which runs under every plan; with items, the loss is a sum over elements."""

    model: int
    loader: int
    items: bool = False


@dataclass(frozen=True)
class Record:
    """Notes the loss of a `Forward`, gathered over all ranks."""

    name: int


@dataclass(frozen=True)
class Clip:
    """Clips by norm, and notes it, or by value. `number` is a model or an optimizer."""

    over: Literal["model", "all", "optimizer"]
    number: int = 0
    limit: float = 1.0
    by: Literal["norm", "value"] = "norm"


@dataclass(frozen=True)
class Read:
    """`unscale_gradients`, and a note of the size of a model's gradients."""

    model: int


@dataclass(frozen=True)
class Edit:
    """Changes a model's gradients by hand, behind `unscale_gradients`.

    Attributes:
        kind: "scale" `p.grad.mul_(0.5)`, "decay" adds a part of the weight, "assign" another tensor, "centre" takes the mean
            of the whole gradient away, "normalise" divides it by its norm.
    """

    kind: EditKind
    model: int
    part: ModelPart = "all"


@dataclass(frozen=True)
class Rate:
    """Multiplies the learning rates of an optimizer."""

    optimizer: int
    factor: float = 0.5


@dataclass(frozen=True)
class Remember:
    """Keeps copies of the states of all models and optimizers; `file`: through `torch.save` and `torch.load`."""

    file: bool = False


@dataclass(frozen=True)
class Recall:
    """Loads what `Remember` kept."""


@dataclass(frozen=True)
class UpdateAverage:
    average: int


@dataclass(frozen=True)
class EvaluateAverage:
    """Notes the mean loss of an average over a whole loader."""

    average: int
    loader: int


@dataclass(frozen=True)
class UpdateBatchNorm:
    """torch's `update_bn` of an average over a loader."""

    average: int
    loader: int


@dataclass(frozen=True)
class Prepare:
    """Prepares a model of `Program.late`, and its optimizers and schedulers."""

    model: int


@dataclass(frozen=True)
class Step:
    optimizer: int


@dataclass(frozen=True)
class SchedulerStep:
    scheduler: int


@dataclass(frozen=True)
class Zero:
    """Clears gradients by the `zero_grad` of an optimizer or of a model, or "hand": `p.grad = None`."""

    how: Literal["optimizer", "model", "hand"]
    number: int
    to_none: bool = True


@dataclass(frozen=True)
class Freeze:
    model: int
    part: ModelPart
    frozen: bool = True


@dataclass(frozen=True)
class AddGroup:
    """Gives an optimizer parameters that were in none."""

    optimizer: int
    slice: Slice


@dataclass(frozen=True)
class Next:
    """Takes the next batch of a loader; after its last batch, it begins again."""

    loader: int


@dataclass(frozen=True)
class Evaluate:
    """Notes the mean loss over a whole loader."""

    model: int
    loader: int


@dataclass(frozen=True)
class EvaluateBatch:
    """Notes the mean loss over the batch that `Next` took last."""

    model: int
    loader: int


WriteKind = Literal[
    "multiply", "data", "copy", "clamp", "assign", "constant", "draw", "load", "load all", "from", "descend",
    "keep", "average", "blend", "clip",
]  # fmt: skip


@dataclass(frozen=True)
class Write:
    """Weights that the script writes itself.

    Attributes:
        kind: under `no_grad`: "multiply", "clip" to a range, "descend" by the gradient, "from" towards the same
            part of the model `source`;
            through `data`: "data" multiplies, "copy", "clamp", "assign" replaces it; "constant" and "draw" make new
            initial values; "load" and "load all" load a state dict. "keep" copies the values, "average" moves the copy
            towards the values, "blend" the values towards the copy.
        early: whether the parameters were taken from the model before the loop.
    """

    kind: WriteKind
    model: int
    part: ModelPart = "all"
    source: int | None = None
    early: bool = False


@dataclass(frozen=True)
class EvaluateKept:
    """Notes the mean loss of a model with the copies that `Write("keep")` has made in the place of its weights.

    Attributes:
        by: how they are exchanged: "copy" by `p.copy_` under `no_grad`, "data" by `p.data, slow.data = slow.data, p.data`.
    """

    model: int
    part: ModelPart
    loader: int
    by: Literal["copy", "data"] = "copy"


@dataclass(frozen=True)
class GradientsOf:
    """`torch.autograd.grad` of a mean loss by the trained parameters of a model, averaged over the ranks.

    Attributes:
        kind: "log" notes their size; "weigh" divides the loss of the `Forward` by one more than it; "hessian" notes the size of
            the product of the Hessian matrix and the weights; "descend" takes a step by hand.
        name: of a `Forward` of the model, whose graph is kept; None computes the loss of `loader`'s batch once more.
    """

    kind: Literal["log", "weigh", "hessian", "descend"]
    model: int
    loader: int
    name: int | None = None


@dataclass(frozen=True)
class Alone:
    """What rank 0 does alone, with an input that all ranks have; the others are told the number, which is noted.

    Attributes:
        kind: "evaluate" without gradients; "saliency", the gradient of the input; "save" writes a state dict that all ranks
            have read; "print" prints the norm of the weights, which all have read.
    """

    kind: Literal["evaluate", "saliency", "save", "print"]
    model: int


@dataclass(frozen=True)
class Setting:
    """Writes an option of all groups of an optimizer: `group["weight_decay"] = 0.05`."""

    optimizer: int
    name: str
    value: float | tuple[float, float] | bool


@dataclass(frozen=True)
class States:
    """What the script does with the states of an optimizer.

    Attributes:
        kind: "read" notes the size of those in `state_dict()`; "clear" `optimizer.state.clear()`; "zero" fills all but numbers
            of steps with zeros; "pop" takes those of the first slice out; "halve" loads a state dict with half of each.
    """

    kind: Literal["read", "clear", "zero", "pop", "halve"]
    optimizer: int


@dataclass(frozen=True)
class Mode:
    """`train()` or `eval()` of a part of a model."""

    model: int
    part: ModelPart
    training: bool


@dataclass(frozen=True)
class CountLocalStep:
    """`local.step()` of `Program.local`, behind the steps of the optimizers."""


@dataclass(frozen=True)
class Continue:
    pass


@dataclass(frozen=True)
class When:
    """A condition that is the same on all ranks.

    Attributes:
        kind: "every": `t % number == rest`; "at": `t == number`; "from": `t >= number`; "sync": the window
            ends; "large": the norm that was
            clipped last is larger than `number`.
    """

    kind: Literal["every", "at", "from", "sync", "large"]
    number: float = 0
    rest: int = 0
    body: tuple[Statement, ...] = ()


@dataclass(frozen=True)
class Accumulate:
    models: tuple[int, ...]
    body: tuple[Statement, ...] = ()


Statement = (
    Forward | Backward | ForwardBackward | Record | Clip | Read | Step | SchedulerStep | Zero | Freeze | AddGroup
    | Write | Next | Evaluate | EvaluateBatch | Continue | When | Accumulate
    | Edit | Rate | Remember | Recall | UpdateAverage | EvaluateAverage | UpdateBatchNorm | Prepare | CountLocalStep
    | EvaluateKept | GradientsOf | Alone | Setting | States | Mode
)  # fmt: skip
Block = When | Accumulate


@dataclass(frozen=True)
class Program:
    """A whole training program.

    Attributes:
        window: micro-batches of an accumulation window.
        split_batches: whether a loader's batch size counts the rows of all ranks.
        offload: what waits in the host's memory or, with "=disk", in files, in the words of the plan; copies are made although
            the device is the host.
        loose: whether losses are multiplied by a parameter that is in no model; the first optimizer has it, too.
        begun: the steps that all models and optimizers have taken before they are prepared, as after a plain checkpoint.
        save_at: the step after which the run is saved, and goes on in new processes; None if it is not.
        plain_save: whether the save is a file of state dicts that `torch.save` writes, which are loaded before `prepare`.
        averages: copies of models that are averages of their weights.
        late: the model that a second call of `prepare` gets, by the statement `Prepare`.
        apart: whether models but the first one, and what belongs to them alone, are prepared by a second `Accelerator`.
        afterwards: the kinds of the optimizers that replace the first ones after the first epoch.
        recipe: how products in float8 are scaled; with `precision` "fp8".
        recompute: which activations are computed again, in the words of the plan.
        dispatch: whether rank 0 reads the batches of all; None leaves the choice to the library.
        local: steps of each rank alone, or None.
        replicas: how many ranks the reference of `local` simulates.
        twice: whether the accelerator is cleared after the loop, and another such model trained in it.
        compiled: whether and how models are compiled.
    """

    seed: int
    models: tuple[Model, ...]
    optimizers: tuple[Optimizer, ...]
    loaders: tuple[Loader, ...]
    body: tuple[Statement, ...]
    loop: Loop = Loop()
    schedulers: tuple[Scheduler, ...] = ()
    hooks: tuple[Hook, ...] = ()
    window: int = 1
    split_batches: bool = True
    precision: Literal["no", "bf16", "fp16", "fp8"] = "no"
    offload: Offload = ""
    loose: bool = False
    begun: int = 0
    save_at: int | None = None
    plain_save: bool = False
    averages: tuple[AveragedCopy, ...] = ()
    late: int | None = None
    apart: bool = False
    afterwards: tuple[str, ...] = ()
    recipe: Recipe = ""
    recompute: Literal["", "blocks", "2", "selective"] = ""
    dispatch: bool | None = None
    local: LocalSteps | None = None
    replicas: int = 1
    twice: bool = False
    compiled: Compiled | None = None


def statements(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """All statements, those of blocks after the block itself."""
    for statement in body:
        yield statement
        if isinstance(statement, Block):
            yield from statements(statement.body)


def size(program: Program) -> int:
    """How much there is to read: the measure that shrinking lowers."""
    parts = len(program.models) + len(program.optimizers) + len(program.loaders) + len(program.schedulers)
    return 3 * parts + len(program.hooks) + len(list(statements(program.body)))


def uses(program: Program, kind: type | UnionType) -> bool:
    """Whether any statement is of this kind."""
    return any(isinstance(statement, kind) for statement in statements(program.body))


def with_body(block: Block, body: tuple[Statement, ...]) -> Block:
    """The same block around other statements."""
    return replace(block, body=body)


def models_of(program: Program, statement: Statement) -> set[int]:
    """The models that a statement names, itself or by an optimizer, scheduler, average or loss."""
    forwards = {each.name: each for each in statements(program.body) if isinstance(each, Forward)}
    match statement:
        case Forward(model=model, through=through):
            return {model} if through is None else {model, through}
        case Backward(names):
            return set().union(*(models_of(program, forwards[name]) for name in names))
        case Record(name):
            return models_of(program, forwards[name])
        case Step(number) | Rate(number) | Clip("optimizer", number) | Zero("optimizer", number):
            return {part.model for part in program.optimizers[number].slices}
        case Setting(optimizer=number) | States(optimizer=number):
            return {part.model for part in program.optimizers[number].slices}
        case SchedulerStep(number):
            return models_of(program, Step(program.schedulers[number].optimizer))
        case Clip("model", number) | Zero(_, number):
            return {number}
        case Clip():
            return set(range(len(program.models)))
        case AddGroup(number, each):
            return {each.model} | models_of(program, Step(number))
        case UpdateAverage(number) | EvaluateAverage(number) | UpdateBatchNorm(number):
            return {program.averages[number].model}
        case Accumulate(models):
            return set(models)
        case Write(model=model, source=source) if source is not None:
            return {model, source}
    return {statement.model} if hasattr(statement, "model") else set()


def at_place(body: tuple[Statement, ...], place: int, new: Statement) -> tuple[Statement, ...]:
    """The body with a statement before the one that is number `place` of all of its `statements`."""
    result: list[Statement] = []
    for statement in body:
        inside = isinstance(statement, Accumulate | When)
        count = 1 + len(list(statements(statement.body))) if inside else 1
        if place == 0:
            result.append(new)
        if inside and 0 < place < count:
            statement = replace(statement, body=at_place(statement.body, place - 1, new))
        result.append(statement)
        place -= count
    if place == 0:
        result.append(new)
    return tuple(result)


def before(body: tuple[Statement, ...], target: Statement, new: Statement) -> tuple[Statement, ...]:
    """The body with a statement before another one."""
    result: list[Statement] = []
    for statement in body:
        if isinstance(statement, Accumulate | When):
            statement = replace(statement, body=before(statement.body, target, new))
        result += [new, statement] if statement is target else [statement]
    return tuple(result)


def replaced(body: tuple[Statement, ...], target: Statement, new: Statement) -> tuple[Statement, ...]:
    """The body with another statement in the place of one."""
    result: list[Statement] = []
    for statement in body:
        if isinstance(statement, Accumulate | When):
            statement = replace(statement, body=replaced(statement.body, target, new))
        result.append(new if statement is target else statement)
    return tuple(result)
