"""The reference: a program in plain PyTorch, one process, whole global batches.

The gradient of a step is, for each `Backward` statement, the mean over all rows (or items) of its window; statements add up.
Here each loss is divided by the window's count before its backward pass, so that `.grad` is right at every moment. The counts
come from a first pass over the same program that computes nothing.

A window ends after `window` micro-batches, or at the last batch of the loader that trains. A micro-batch without a backward
call takes no part. Inside of a window, `step`, clipping and schedulers wait for its last micro-batch, and the `zero_grad` of
an optimizer clears what is older than the window.

Where windows have several micro-batches, some programs have no clear meaning, and end with `Unclear`: a window that is left
open at the end of an epoch; gradients that are used, or cleared by hand, before the last backward pass that reaches them;
micro-batches of one window with different backward calls. So do programs that go on with a gradient that was stepped, or set to
zero, right before a save: checkpoints hold only gradients that wait for a step.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from loops.compare import NUMBERS
from loops.float8_layers import in_float8
from loops.programs import (
    Accumulate,
    AddGroup,
    Alone,
    Backward,
    Clip,
    Continue,
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
    Mode,
    Next,
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
    statements,
)
from loops.script import construction, definitions, replacing
from torch import nn
from torch.optim.swa_utils import update_bn

Counts = dict[tuple[Any, ...], float]


@dataclass
class Window:
    """The accumulation window of some models.

    Attributes:
        number: of windows before it.
        micro: micro-batches with a backward call so far.
        sync: whether the current micro-batch is its last.
        called: whether the current micro-batch had a backward call.
        calls: the statements of these calls; `calls_before`: those of the micro-batch before.
        used: parameters whose gradients were clipped, read, stepped or cleared since the last micro-batch began.
        older: gradients that were there before it began.
    """

    number: int = 0
    micro: int = 0
    sync: bool = True
    called: bool = False
    calls: list[int] = field(default_factory=list)
    calls_before: list[int] | None = None
    used: set[nn.Parameter] = field(default_factory=set)
    older: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)

    @property
    def incomplete(self) -> bool:
        """Whether gradients of a later micro-batch of this window are still to come."""
        return (self.micro > 0 or self.called) and not (self.sync and self.called)


class Unclear(Exception):
    """The program has no clear meaning; see the module."""


class _Next(Exception):
    """`continue`."""


def plain(program: Program) -> dict[str, Any]:
    """Runs a program; see the module. Returns what `compare` compares, and "saved_in": the epoch of the save, or None."""

    def run() -> dict[str, Any]:
        if program.local is not None:
            return _replicas(program)
        notes = _alone(program)
        if program.twice:
            again = _alone(replace(program, seed=program.seed + 1))
            notes = {**again, **{name: notes[name] + again[name] for name in NUMBERS}}
        return notes

    return running(run)


def _alone(program: Program) -> dict[str, Any]:
    counts: Counts = defaultdict(float)
    Interpreter(program, counts, counting=True).run()
    return Interpreter(program, counts, counting=False).run()


def _replicas(program: Program) -> dict[str, Any]:
    """`LocalSGD`: each rank of `Program.replicas` trains on its own rows in a thread; averages are taken where all wait."""
    count = program.replicas
    exchange = Exchange(program)
    ranks = []
    for rank in range(count):
        counts: Counts = defaultdict(float)
        share = (rank, exchange)
        Interpreter(program, counts, counting=True, share=share).run()
        ranks.append(Interpreter(program, counts, counting=False, share=share))
    exchange.begin([interpreter.models[0] for interpreter in ranks])
    with ThreadPoolExecutor(count) as pool:
        notes = list(pool.map(exchange.guarded, [interpreter.run for interpreter in ranks]))
    joined = notes[0]
    for name in ("losses", "metrics"):
        # Each rank has as many rows as the others.
        joined[name] = [sum(values) / count for values in zip(*(each[name] for each in notes), strict=True)]
    joined["norms"] = []
    return joined


class Exchange:
    """The averages of `LocalSGD` over replicas that run in threads."""

    def __init__(self, program: Program) -> None:
        assert program.local is not None
        self.local = program.local
        self.count = program.replicas
        self.barrier = threading.Barrier(self.count, self._average)
        self.models: list[nn.Module] = []
        self.copies: list[torch.Tensor] = []
        self.outer: torch.optim.Optimizer | None = None

    def begin(self, models: list[nn.Module]) -> None:
        """Takes the models of all replicas, which are equal."""
        self.models = models
        if self.local.outer:
            self.copies = [p.detach().clone().requires_grad_() for p in models[0].parameters() if p.requires_grad]
            self.outer = torch.optim.SGD(self.copies, lr=0.7, momentum=0.9)

    def guarded(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Runs a replica; if it fails, the others do not wait for it."""
        try:
            return run()
        except BaseException:
            self.barrier.abort()
            raise

    def wait(self) -> None:
        """Averages the models when all replicas have come."""
        self.barrier.wait()

    @torch.no_grad()
    def _average(self) -> None:
        trained = [[p for p in model.parameters() if p.requires_grad] for model in self.models]
        means = [sum(values) / self.count for values in zip(*trained, strict=True)]
        if self.outer is not None:
            for copy_, mean in zip(self.copies, means, strict=True):
                copy_.grad = copy_ - mean
            self.outer.step()
            means = self.copies
        for parameters in trained:
            for p, mean in zip(parameters, means, strict=True):
                p.copy_(mean)


class _Share:
    """A loader's batches, of each the rows of one replica."""

    def __init__(self, loader: Iterable[Any], rank: int, count: int) -> None:
        self.loader, self.rank, self.count = loader, rank, count

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield tuple(values.chunk(self.count)[self.rank] for values in batch)


class _Unpacked:
    """A loader of packed documents, whose batches are x, y and weights."""

    def __init__(self, loader: Iterable[Any], unpacked: Callable[[Any], Any]) -> None:
        self.loader, self.unpacked = loader, unpacked

    def __iter__(self) -> Iterator[Any]:
        return map(self.unpacked, self.loader)


def running(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Calls a function that runs a program, without its warnings; the default dtype is the caller's afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dtype = torch.get_default_dtype()
        try:
            return run()
        finally:
            torch.set_default_dtype(dtype)
            torch.compiler.set_stance("default")


class Interpreter:
    """Runs a program statement by statement; see the module."""

    def __init__(
        self, program: Program, counts: Counts, counting: bool, share: tuple[int, Exchange] | None = None
    ) -> None:
        self.program, self.counts, self.counting = program, counts, counting
        names: dict[str, Any] = {}
        exec(definitions(program) + construction(program), names)
        self.names = names
        self.models = [names[f"model{number}"] for number in range(len(program.models))]
        self.optimizers = [names[f"optimizer{number}"] for number in range(len(program.optimizers))]
        self.schedulers = [names[f"scheduler{number}"] for number in range(len(program.schedulers))]
        self.loaders = [names[f"loader{number}"] for number in range(len(program.loaders))]
        for number, loader in enumerate(program.loaders):
            if loader.kind == "packed":
                self.loaders[number] = _Unpacked(self.loaders[number], names["unpacked"])
        self.exchange: Exchange | None = None
        self.local_steps = 0
        if share is not None:
            rank, self.exchange = share
            self.loaders = [_Share(loader, rank, program.replicas) for loader in self.loaders]
        if program.recipe:
            in_float8(self.models, program.recipe)
        self.averages = [names[f"average{number}"] for number in range(len(program.averages))]
        self.scale: nn.Parameter | None = names.get("scale")
        self.rows: dict[int, torch.Tensor] = {}
        self.batches: dict[int, tuple[torch.Tensor, ...]] = {}
        self.iterators: dict[int, Iterator[Any]] = {}
        self.given: dict[int, int] = {}  # batches of the current epoch that `Next` has taken
        self.windows: dict[tuple[int, ...], Window] = {}
        self.window: Window | None = None
        self.sync = True
        self.last = False  # whether the head of the loop gave its last batch
        self.kept: dict[tuple[int, str], list[torch.Tensor]] = {}  # copies of weights, by model and part
        self.remembered: list[dict[str, Any]] = []  # states of models and optimizers
        self.norm = 0.0
        self.t = -1
        self.notes: dict[str, Any] = {"losses": [], "norms": [], "metrics": [], "gradients": [], "saved_in": None}
        trained = {f.loader for f in self._forwards() if f.name in self._backward_names()}
        trained |= {s.loader for s in statements(program.body) if isinstance(s, ForwardBackward)}
        self.trained_loaders = trained
        self.reached: set[nn.Parameter] = set()
        # Parameters whose gradients were stepped or set to zero since the last backward pass: a checkpoint does not have them.
        self.stale: set[nn.Parameter] = set()
        self.not_saved: dict[nn.Parameter, bool] = {}  # those of the moment of the save; whether the gradient is zero
        for model in self.models:
            for parameter in model.parameters():
                # torch takes hooks of parameters only that are trained, and this one may be so later.
                is_trained = parameter.requires_grad
                parameter.requires_grad_(True).register_post_accumulate_grad_hook(self.reached.add)
                parameter.requires_grad_(is_trained)

    def _forwards(self) -> list[Forward]:
        return [statement for statement in statements(self.program.body) if isinstance(statement, Forward)]

    def _backward_names(self) -> set[int]:
        backward = [statement for statement in statements(self.program.body) if isinstance(statement, Backward)]
        return {name for statement in backward for name in statement.names}

    def run(self) -> dict[str, Any]:
        for hook in self.program.hooks:
            head = self.models[hook.model].head
            if hook.kind.startswith(("input", "output")):
                _add_module_hook(head, hook.kind)
                continue
            for parameter in head.parameters():
                _add_hook(parameter, hook.kind)
        loop = self.program.loop
        if loop.kind == "next":
            for _ in range(loop.steps):
                self._iteration(0)
        else:
            for epoch in range(loop.epochs):
                if epoch == 1 and self.program.afterwards:
                    self._replace_optimizers()
                for batches, is_last in self._given():
                    self.last = is_last
                    self.batches.update(zip(loop.loaders, batches, strict=True))
                    self._iteration(epoch)
                if any(window.micro for window in self.windows.values()):
                    raise Unclear("a window is open at the end of an epoch")
        if self.exchange is not None and not self.counting and self.local_steps % self.exchange.local.steps:
            self.exchange.wait()
        self.notes["weights"] = [_copied(model.state_dict()) for model in self.models]
        if self.scale is not None:
            self.notes["weights"].append({"scale": self.scale.detach().clone()})
        self.notes["weights"] += [_copied(average.state_dict()) for average in self.averages]
        self.notes["states"] = [states_of(optimizer) for optimizer in self.optimizers]
        self.notes["rates"] = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        return self.notes

    def _given(self) -> Iterator[tuple[Any, bool]]:
        """The batches of an epoch, and whether each is the last. A run that goes on after a save has kept none."""
        loop = self.program.loop
        loaders = [self.loaders[number] for number in loop.loaders]
        if not loop.again:
            yield from _with_last(zip(*loaders, strict=False))
            return
        batches = list(enumerate(zip(*loaders, strict=True)))
        while batches:
            before = self.notes["saved_in"]
            taken = 0
            for (number, batch), is_last in _with_last(_with_kept(iter(batches), loop.again)):
                taken = max(taken, number)
                yield batch, is_last
                if self.notes["saved_in"] != before:
                    break
            batches = [each for each in batches if each[0] > taken]

    def _replace_optimizers(self) -> None:
        """The second optimizers; gradients that wait are those of the models, and stay."""
        exec("\n".join(replacing(self.program)), self.names)
        self.optimizers = [self.names[f"optimizer{number}"] for number in range(len(self.program.optimizers))]

    def _iteration(self, epoch: int) -> None:
        self.t += 1
        try:
            self._run(self.program.body)
        except _Next:
            return
        if self.t == self.program.save_at:
            self.notes["saved_in"] = epoch
            every = [parameter for model in self.models for parameter in model.parameters()]
            for parameter in every if self.program.plain_save else self.stale:
                if parameter.grad is not None:
                    self.not_saved[parameter] = not bool(parameter.grad.any())

    def _run(self, body: tuple[Statement, ...]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, statement: Statement) -> None:
        match statement:
            case Accumulate(models, body):
                self._accumulate(models, body)
            case When(body=body):
                if self._holds(statement):
                    self._run(body)
            case Continue():
                raise _Next
            case Next(loader):
                self._next(loader)
            case Backward():
                self._backward(statement)
            case ForwardBackward(model, loader, _):
                if not self.counting:
                    self.rows[-1] = _per_row(self.models[model](self.batches[loader][0]), self.batches[loader][1])
                self._backward(statement)
            case _ if not self.counting:
                self._compute(statement)

    def _compute(self, statement: Statement) -> None:
        """Statements that neither direct the program nor count rows."""
        match statement:
            case Forward(name, model, loader, through, detach, penalty):
                x, y, _ = self.batches[loader]
                if through is not None:
                    x = self._call(through, x)
                    x = x.detach() if detach else x
                if penalty:
                    x = x.clone().requires_grad_()
                    (slopes,) = torch.autograd.grad(self._call(model, x).sum(), x, create_graph=True)
                    rows = slopes.square().mean(1)
                else:
                    rows = _per_row(self._call(model, x), y)
                self.rows[name] = rows if self.scale is None else self.scale * rows
            case Record(name):
                self.notes["losses"].append(float(self.rows[name].detach().mean()))
            case Clip():
                self._clip(statement)
            case Read(model):
                self._use(self.models[model].parameters())
                gradients = [p.grad for p in self.models[model].parameters() if p.grad is not None]
                self.notes["gradients"].append(sum(float(gradient.abs().sum()) for gradient in gradients))
            case Step(optimizer):
                if self.sync:
                    self._step(optimizer)
            case SchedulerStep(scheduler):
                if self.sync:
                    self._step_scheduler(scheduler)
            case Zero():
                self._zero(statement)
            case Freeze(model, part, frozen):
                _part(self.models[model], part).requires_grad_(not frozen)
            case AddGroup(optimizer, each):
                self.optimizers[optimizer].add_param_group({"params": self._parameters(each)})
            case Write():
                self._write(statement)
            case Edit():
                self._edit(statement)
            case Rate(optimizer, factor):
                for group in self.optimizers[optimizer].param_groups:
                    group["lr"] *= factor
            case Remember():
                self.remembered = copy.deepcopy([each.state_dict() for each in (*self.models, *self.optimizers)])
            case Recall():
                for each, state in zip((*self.models, *self.optimizers), self.remembered, strict=True):
                    each.load_state_dict(copy.deepcopy(state))
            case UpdateAverage(number):
                self.averages[number].update_parameters(self.models[self.program.averages[number].model])
            case UpdateBatchNorm(number, loader):
                update_bn(self.loaders[loader], self.averages[number])
            case EvaluateAverage(number, loader):
                self._evaluate(self.averages[number], list(self.loaders[loader]))
            case Evaluate(model, loader):
                self._evaluate(self.models[model], list(self.loaders[loader]))
            case EvaluateBatch(model, loader):
                self._evaluate(self.models[model], [self.batches[loader]])
            case EvaluateKept():
                self._evaluate_kept(statement)
            case GradientsOf():
                self._gradients_of(statement)
            case Alone():
                self._alone(statement)
            case Setting(optimizer, option, value):
                for group in self.optimizers[optimizer].param_groups:
                    group[option] = value
            case States(kind, optimizer):
                self._states(kind, optimizer)
            case Mode(model, part, training):
                _part(self.models[model], part).train(training)
            case CountLocalStep():
                if self.sync:
                    self._count_local_step()
            case Prepare():
                pass
            case _:
                raise AssertionError(statement)

    def _step(self, optimizer: int) -> None:
        if self.program.window > 1 and self.window is None:
            raise Unclear("a step outside of `accumulate`")
        parameters = [p for group in self.optimizers[optimizer].param_groups for p in group["params"]]
        self._use(parameters)
        self.optimizers[optimizer].step()
        self.stale.update(parameters)

    def _step_scheduler(self, number: int) -> None:
        scheduler = self.schedulers[number]
        if self.program.schedulers[number].kind == "ReduceLROnPlateau":
            scheduler.step(self.notes["norms"][-1] if self.notes["norms"] else 1.0)
        else:
            scheduler.step()

    def _count_local_step(self) -> None:
        assert self.exchange is not None
        self.local_steps += 1
        if self.local_steps % self.exchange.local.steps == 0:
            self.exchange.wait()

    # -- loaders -----------------------------------------------------------------------------------------------

    def _next(self, loader: int) -> None:
        finite = self.program.loaders[loader].kind != "endless"
        if self.window is not None and self.program.window > 1 and finite and loader in self.trained_loaders:
            raise Unclear("the last batch is taken when its window has begun")
        batch = None
        if self.program.loaders[loader].taken != "fresh":
            batch = next(self.iterators.get(loader, iter(())), None)
        if batch is None:
            self.iterators[loader] = iter(self.loaders[loader])
            self.given[loader] = 0
            batch = next(self.iterators[loader])
        self.given[loader] += 1
        self.batches[loader] = batch

    def _at_the_end(self) -> bool:
        if self.program.loop.kind != "next":
            inner = self.trained_loaders - set(self.program.loop.loaders)
            if self.program.window > 1 and any(self.program.loaders[loader].kind != "endless" for loader in inner):
                raise Unclear("windows over two loaders that end at different times")
            if self.program.window > 1 and set(self.program.loop.loaders) - self.trained_loaders:
                raise Unclear("the loop ends with a loader that trains nothing")
            return self.last
        if self.program.window > 1 and len(self.trained_loaders) > 1:
            raise Unclear("windows over two loaders that end at different times")
        ends = {loader: self.program.loaders[loader].batches for loader in self.trained_loaders}
        return any(self.given.get(loader, 0) == batches for loader, batches in ends.items())

    # -- windows -----------------------------------------------------------------------------------------------

    def _accumulate(self, models: tuple[int, ...], body: tuple[Statement, ...]) -> None:
        window = self.windows.setdefault(models, Window())
        if window.micro == 0:
            parameters = {p for model in models for p in self.models[model].parameters() if p.grad is not None}
            window.older = {p: p.grad.clone() for p in parameters}  # type: ignore[union-attr]
        window.sync = window.micro + 1 >= self.program.window or self._at_the_end()
        window.called = False
        window.calls = []
        window.used = set()
        self.window, self.sync = window, window.sync
        try:
            self._run(body)
        finally:
            self.window = None
            if window.called:
                if window.micro and window.calls != window.calls_before:
                    raise Unclear("micro-batches of one window with different backward calls")
                window.calls_before = window.calls
                window.micro += 1
                if window.sync:
                    window.number += 1
                    window.micro = 0
            window.called = False

    def _backward(self, statement: Backward | ForwardBackward) -> None:
        if isinstance(statement, Backward):
            loader = next(f.loader for f in self._forwards() if f.name == statement.names[0])
            names, items = statement.names, statement.items
        else:
            loader, names, items = statement.loader, (-1,), None
        _, y, weights = self.batches[loader]
        if items == "mask":
            weights = (weights > 3).to(y.dtype)
        elif items:
            weights = weights.to(y.dtype) * (0.3 if items == "float" else 1.0)
        else:
            weights = torch.ones(len(y))
        count = float(weights.sum())
        if self.window is not None:
            key = (id(statement), self._number_of(self.window))
            self.window.called = True
            self.window.calls.append(id(statement))
            if self.counting:
                self.counts[key] += count
            count = self.counts[key]
        if not self.counting:
            total = sum((self.rows[name] * weights).sum() for name in names) / count
            self.reached.clear()
            self.stale.clear()
            total.backward(inputs=self._only(statement))
            for parameter in self.reached & set(self.not_saved):
                if not self.not_saved.pop(parameter):
                    raise Unclear("a gradient that was stepped before the save is used again")
            self._check_reached()

    def _only(self, statement: Backward | ForwardBackward) -> list[nn.Parameter] | None:
        """The parameters that get gradients; None for all."""
        if isinstance(statement, ForwardBackward) or statement.only is None:
            return None
        return [p for group in self.optimizers[statement.only].param_groups for p in group["params"]]

    def _check_reached(self) -> None:
        if self.program.window == 1:
            return
        if self.window is None:
            raise Unclear("a backward call outside of `accumulate`")
        if self.reached & self.window.used:
            raise Unclear("gradients were used before the last backward call that reaches them")
        models = next(models for models, each in self.windows.items() if each is self.window)
        own = {parameter for model in models for parameter in self.models[model].parameters()}
        if self.reached - own:
            raise Unclear("a backward call reaches models of another window")
        if any(hook.kind in ("clamp", "fused") for hook in self.program.hooks):
            raise Unclear("a hook that changes finished gradients")

    def _use(self, parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        if not self.not_saved.keys().isdisjoint(parameters):
            raise Unclear("a gradient that was stepped or set to zero before the save is used again")
        if self.program.window == 1:
            return
        for parameter in parameters:
            window = self._window_of(parameter)
            if window is None or (window.incomplete and parameter.grad is not None):
                raise Unclear("incomplete gradients are used")
            window.used.add(parameter)

    def _number_of(self, window: Window) -> tuple[Any, ...]:
        models = next(models for models, each in self.windows.items() if each is window)
        return (models, window.number)

    def _zero(self, zero: Zero) -> None:
        if zero.how == "optimizer":
            parameters = [p for group in self.optimizers[zero.number].param_groups for p in group["params"]]
        else:
            parameters = list(self.models[zero.number].parameters())
        for parameter in parameters:
            window = self._window_of(parameter)
            if window is not None and window.sync and window.called:
                window.used.add(parameter)
            if parameter.grad is None:
                continue
            if window is not None and window.incomplete:
                if zero.how != "optimizer":
                    raise Unclear("gradients of a window are cleared by hand")
                older = window.older.pop(parameter, None)
                if older is None:
                    continue
                if not torch.equal(parameter.grad, older):
                    raise Unclear("gradients that are older than a window are cleared after a pass of the window")
            elif window is not None:
                window.older.pop(parameter, None)
            if zero.to_none or zero.how == "hand":
                parameter.grad = None
                self.not_saved.pop(parameter, None)
            else:
                parameter.grad = torch.zeros_like(parameter.grad)
                self.stale.add(parameter)
                if parameter in self.not_saved:
                    self.not_saved[parameter] = True

    def _window_of(self, parameter: nn.Parameter) -> Window | None:
        for models, window in self.windows.items():
            if any(parameter is each for model in models for each in self.models[model].parameters()):
                return window
        return None

    # -- the rest ----------------------------------------------------------------------------------------------

    def _holds(self, when: When) -> bool:
        if when.kind == "every":
            return self.t % int(when.number) == when.rest
        if when.kind == "at":
            return self.t == when.number
        if when.kind == "from":
            return self.t >= when.number
        if when.kind == "sync":
            return self.sync
        return not self.counting and self.norm > when.number

    def _call(self, model: int, x: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
        odd = self.program.models[model].side == "branch" and self.t % 2 == 1
        inputs = x if isinstance(x, tuple) else (x,)
        result: torch.Tensor = self.models[model](*inputs, odd)
        return result

    def _clip(self, clip: Clip) -> None:
        if not self.sync:
            return
        if clip.over == "model":
            parameters = list(self.models[clip.number].parameters())
        elif clip.over == "all":
            parameters = [p for model in self.models for p in model.parameters()]
        else:
            parameters = [p for group in self.optimizers[clip.number].param_groups for p in group["params"]]
        self._use(parameters)
        if clip.by == "value":
            nn.utils.clip_grad_value_([p for p in parameters if p.grad is not None], clip.limit)
            return
        self.norm = float(nn.utils.clip_grad_norm_(parameters, clip.limit))
        self.notes["norms"].append(self.norm)

    def _edit(self, edit: Edit) -> None:
        parameters = self._parameters(Slice(edit.model, edit.part))
        self._use(parameters)
        for p in parameters:
            if p.grad is None:
                continue
            match edit.kind:
                case "scale":
                    p.grad.mul_(0.5)
                case "decay":
                    p.grad.add_(p.detach(), alpha=0.01)
                case "assign":
                    p.grad = 0.5 * p.grad
                case "centre":
                    p.grad -= p.grad.mean()
                case "normalise":
                    p.grad /= 0.01 + p.grad.norm()

    def _gradients_of(self, statement: GradientsOf) -> None:
        if statement.name is None:
            x, y, _ = self.batches[statement.loader]
            loss = _per_row(self._call(statement.model, x), y).mean()
        else:
            loss = self.rows[statement.name].mean()
        parameters = [p for p in self.models[statement.model].parameters() if p.requires_grad]

        def gradients_of(value: torch.Tensor, **options: bool) -> tuple[torch.Tensor, ...]:
            options["retain_graph"] = statement.name is not None or "create_graph" in options
            return torch.autograd.grad(value, parameters, materialize_grads=True, **options)  # type: ignore[arg-type]

        if statement.kind == "hessian":
            first = gradients_of(loss, create_graph=True)
            loss = torch.stack([(each * p.detach()).sum() for each, p in zip(first, parameters, strict=True)]).sum()
        gradients = gradients_of(loss)
        size = sum(float(each.abs().sum()) for each in gradients)
        if statement.kind in ("log", "hessian"):
            self.notes["gradients"].append(size)
        elif statement.kind == "weigh":
            assert statement.name is not None
            self.rows[statement.name] = self.rows[statement.name] / (1 + size)
        else:
            with torch.no_grad():
                for p, each in zip(parameters, gradients, strict=True):
                    p.sub_(each, alpha=0.05)

    def _alone(self, alone: Alone) -> None:
        model = self.models[alone.model]
        if alone.kind == "save":
            value = sum(float(each.double().abs().sum()) for each in model.state_dict().values())
        elif alone.kind == "print":
            value = sum(float(p.detach().norm()) for p in model.parameters())
        else:
            mode = model.training
            model.eval()
            sample = torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
            output = self._call(alone.model, sample)
            value = float(output.detach().square().mean())
            if alone.kind == "saliency":
                value = float(torch.autograd.grad(output.sum(), sample)[0].abs().sum())
            model.train(mode)
        self.notes["metrics"].append(value)

    def _states(self, kind: str, number: int) -> None:
        optimizer = self.optimizers[number]
        values = [each for state in optimizer.state.values() for each in state.values()]
        values = [each for each in values if isinstance(each, torch.Tensor) and each.ndim]
        match kind:
            case "read":
                self.notes["gradients"].append(sum(float(each.abs().sum()) for each in values))
            case "clear":
                optimizer.state.clear()
            case "pop":
                for p in self._parameters(self.program.optimizers[number].slices[0]):
                    optimizer.state.pop(p, None)
            case _:
                for each in values:
                    each.mul_(0.0 if kind == "zero" else 0.5)

    def _evaluate_kept(self, statement: EvaluateKept) -> None:
        parameters = self._parameters(Slice(statement.model, statement.part))
        kept = self.kept[statement.model, statement.part]
        own = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p, value in zip(parameters, kept, strict=True):
                p.copy_(value)
        self._evaluate(self.models[statement.model], list(self.loaders[statement.loader]))
        with torch.no_grad():
            for p, value in zip(parameters, own, strict=True):
                p.copy_(value)

    def _write(self, write: Write) -> None:
        model = self.models[write.model]
        parameters = self._parameters(Slice(write.model, write.part))
        key = (write.model, write.part)
        match write.kind:
            case "data":
                for p in parameters:
                    p.data.mul_(0.9)
            case "copy":
                for p in parameters:
                    p.data.copy_(0.5 * p.data)
            case "clamp":
                for p in parameters:
                    p.data.clamp_(-0.3, 0.3)
            case "assign":
                for p in parameters:
                    p.data = 0.9 * p.data
            case "constant":
                for p in parameters:
                    nn.init.constant_(p, 0.1)
            case "draw":
                torch.manual_seed(3)
                for p in parameters:
                    nn.init.normal_(p, std=0.3)
            case "load":
                model.head.load_state_dict({"weight": torch.full((4, 4), 0.1), "bias": torch.zeros(4)})
            case "load all":
                state = model.state_dict().items()
                model.load_state_dict({name: 0.9 * v if v.is_floating_point() else v for name, v in state})
            case "keep":
                self.kept[key] = [p.detach().clone() for p in parameters]
            case _:
                if write.kind == "descend":
                    self._use(parameters)
                with torch.no_grad():
                    self._move(write, parameters)

    def _move(self, write: Write, parameters: list[nn.Parameter]) -> None:
        """The writes that are made under `no_grad`."""
        key = (write.model, write.part)
        match write.kind:
            case "multiply":
                for p in parameters:
                    p.mul_(0.9)
            case "clip":
                for p in parameters:
                    p.clamp_(-0.3, 0.3)
            case "from":
                others = self._parameters(Slice(write.source or 0, write.part))
                for p, other in zip(parameters, others, strict=True):
                    p.lerp_(other, 0.3)
            case "descend":
                for p in parameters:
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-0.05)
            case "average":
                for slow, p in zip(self.kept[key], parameters, strict=True):
                    slow.lerp_(p, 0.2)
            case "blend":
                for slow, p in zip(self.kept[key], parameters, strict=True):
                    p.lerp_(slow, 0.5)
            case _:
                raise AssertionError(write)

    def _parameters(self, each: Slice) -> list[nn.Parameter]:
        return list(_part(self.models[each.model], each.part).parameters())

    def _evaluate(self, model: nn.Module, batches: list[tuple[torch.Tensor, ...]]) -> None:
        model.eval()
        with torch.no_grad():
            rows = [_per_row(model(*x) if isinstance(x, tuple) else model(x), y) for x, y, _ in batches]
        model.train()
        self.notes["metrics"].append(float(torch.cat(rows).mean()))


def states_of(optimizer: torch.optim.Optimizer, whole: Any = lambda tensor: tensor) -> list[dict[str, Any]]:
    """The states of an optimizer in the order of its parameters."""
    states = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            states.append({name: _value(value, whole) for name, value in state.items() if value is not None})
    return states


def _value(value: Any, whole: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = whole(value).detach().cpu()
    # A state of 8 bits is compared by the values that its codes stand for.
    return value.dequantize() if hasattr(value, "codes") else value.clone()


def _part(model: nn.Module, part: str) -> nn.Module:
    return model if part == "all" else model.get_submodule(part)


def _per_row(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (output - y).square().mean(1)


def _copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


def _with_last(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last."""
    before: list[Any] = []
    for batch in batches:
        if before:
            yield before.pop(), False
        before.append(batch)
    if before:
        yield before.pop(), True


def _with_kept(batches: Iterator[Any], again: str) -> Iterator[Any]:
    """Each batch, and behind it one that was kept; see `Loop.again`."""
    kept: list[Any] = []
    for batch in batches:
        yield batch
        if again == "another":
            kept.append(batch)
            yield kept[len(kept) // 2]
        elif again:
            yield from kept
            kept = [batch]


def _add_module_hook(head: nn.Module, kind: str) -> None:
    if kind == "input":
        head.register_forward_pre_hook(lambda _, inputs: (1.25 * inputs[0],))
    elif kind == "output":
        head.register_forward_hook(lambda _, inputs, output: 0.75 * output)
    elif kind == "input gradient":
        head.register_full_backward_hook(lambda _, inputs, outputs: tuple(g if g is None else 0.5 * g for g in inputs))
    else:
        head.register_full_backward_pre_hook(lambda _, outputs: tuple(0.5 * g for g in outputs))


def _add_hook(parameter: nn.Parameter, kind: str) -> None:
    if kind == "double":
        parameter.register_hook(lambda gradient: 2 * gradient)
    elif kind == "clamp":
        parameter.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-0.01, 0.01))
    else:
        parameter.register_post_accumulate_grad_hook(_step_at_once)


def _step_at_once(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad
    parameter.grad = None
