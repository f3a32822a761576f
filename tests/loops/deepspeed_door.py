"""The same programs through DeepSpeed's names, with the numbers that DeepSpeed defines.

Each model has an engine of its own with one optimizer, over all of its parameters that are trained. A micro-batch runs a
backward pass for each of its losses, and calls `step` of an engine once, behind the last one. A loss is the mean over a
micro-batch of all ranks, divided by the number of micro-batches of a window. At the end of a window `step` clips, steps the
optimizer and the scheduler, and clears the gradients; parameters without one are stepped with zeros. `DeepSpeedPlain` computes
that on one process.

What DeepSpeed has no words for is left out of a program: weights that the script writes, parameters that are frozen in mid-run,
hooks, losses through two engines, and batches that are not equal on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from loops.plain import Interpreter, Unclear, running
from loops.programs import (
    Accumulate,
    Backward,
    Clip,
    Continue,
    Evaluate,
    EvaluateBatch,
    Forward,
    ForwardBackward,
    Model,
    Next,
    Optimizer,
    Program,
    Read,
    Record,
    Scheduler,
    Slice,
    Statement,
    Step,
    When,
    statements,
    uses,
)
from loops.script import INDENT, construction, definitions, following, plain_statement
from torch import nn

Body = tuple[Statement, ...]

STAGES = (0, 1, 2, 3)
_BATCH = 12  # of all ranks together; each takes as many rows
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}  # of a model, and of what a script gives to it
_BY_LOSS = 3  # every third program calls `loss.backward()`, which DeepSpeed takes from stage 1 on
_NAME = 99  # of a loss that `forward_backward` has computed natively


def adapted(program: Program) -> Program | None:
    """The program as it is written for DeepSpeed; None where nothing is left of it."""
    body = tuple(_flat(program.body))
    # A trained side head beside a frozen part would be in no group of the optimizer.
    if any(model.body_of is not None or (model.side and model.frozen) for model in program.models) or any(
        isinstance(inner, Backward) for each in body if isinstance(each, When) for inner in statements(each.body)
    ):
        return None
    for model in range(len(program.models)):
        losses = [
            place for place, each in enumerate(body) if isinstance(each, Backward) and _model(body, each) == model
        ]
        if not losses:
            return None
        behind = losses[-1] + 1
        body = (*body[:behind], *_end_of_micro_batch(program, model), *body[behind:])
    optimizers = tuple(_optimizer(program, number) for number in range(len(program.models)))
    loaders = tuple(
        replace(loader, batch=_BATCH, rows=max(1, loader.rows // _BATCH) * _BATCH, drop_last=False, taken="")
        for loader in program.loaders
    )
    loop, save_at = replace(program.loop, ahead=0), None
    if program.save_at is not None and loop.kind == "for" and not uses(program, Next):
        loop = replace(loop, epochs=2)
        save_at = loaders[0].rows // _BATCH - 1
    return replace(
        program,
        optimizers=optimizers,
        schedulers=_schedulers(program),
        loaders=loaders,
        loop=loop,
        body=body,
        hooks=(),
        offload="",
        loose=False,
        save_at=save_at,
        plain_save=False,
        averages=(),
        late=None,
        apart=False,
        afterwards=(),
    )


def _flat(body: Body, inside: bool = False) -> Iterable[Statement]:
    """The statements that DeepSpeed has words for, without the blocks of `accumulate`."""
    trained = False
    for statement in body:
        match statement:
            case Accumulate():
                yield from _flat(statement.body, inside)
            case ForwardBackward(model, loader):
                yield from (Forward(_NAME, model, loader), Backward((_NAME,)))
            case Forward(through=None):
                yield replace(statement, penalty=False)
            case Record() | Next() | Evaluate() | EvaluateBatch():
                yield statement
            case Backward(names) if not _goes_through(body, names):
                trained = True
                yield replace(statement, items=None)
            case When("every" | "at") if not trained:
                kept = tuple(_flat(statement.body, inside=True))
                if kept:
                    yield replace(statement, body=kept)
            case Continue() if inside:
                yield statement


def _goes_through(body: Body, names: tuple[int, ...]) -> bool:
    return any(isinstance(each, Forward) and each.name in names and each.through is not None for each in body)


def _model(body: Body, backward: Backward) -> int:
    return next(each.model for each in body if isinstance(each, Forward) and each.name in backward.names)


def _end_of_micro_batch(program: Program, model: int) -> Iterable[Statement]:
    flat = list(statements(program.body))
    if any(isinstance(each, Read) and each.model == model for each in flat):
        yield Read(model)
    clips = [each for each in flat if isinstance(each, Clip) and each.by == "norm"]
    if clips:
        yield Clip("optimizer", model, clips[model % len(clips)].limit)
    yield Step(model)


def _optimizer(program: Program, number: int) -> Optimizer:
    """The one optimizer of a model: of the kind of the first that has parameters of it, and its groups."""
    own = [each for each in program.optimizers if any(part.model == number for part in each.slices)]
    kind = own[0].kind if own and own[0].kind != "Muon" else "Adam"
    model = program.models[number]
    parts = [part for part in ("body", "head") if part != model.frozen]
    if not model.side and own and len(own[0].slices) > 1:
        return Optimizer(kind, tuple(Slice(number, part) for part in parts))  # type: ignore[arg-type]
    if model.frozen:
        return Optimizer(kind, (Slice(number, parts[0]),))  # type: ignore[arg-type]
    return Optimizer(kind, (Slice(number),))


def _schedulers(program: Program) -> tuple[Scheduler, ...]:
    """At most one for each model."""
    chosen: dict[int, Scheduler] = {}
    for scheduler in program.schedulers:
        model = program.optimizers[scheduler.optimizer].slices[0].model
        chosen[model] = replace(scheduler, optimizer=model)
    return tuple(chosen.values())


def cases_are_meant(models: Iterable[Model], world: int) -> bool:
    """Whether a program means the same on this many ranks: each has statistics of its own."""
    return world == 1 or not any(model.body == "BatchNorm" for model in models)


class DeepSpeedPlain(Interpreter):
    """A program on one process, as DeepSpeed defines it; see the module."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, defaultdict(float), counting=False)
        self.micro_steps = [0] * len(program.models)

    def _iteration(self, epoch: int) -> None:
        super()._iteration(epoch)
        if self.t == self.program.save_at and any(count % self.program.window for count in self.micro_steps):
            raise Unclear("gradients are in no checkpoint")

    def _backward(self, statement: Backward | ForwardBackward) -> None:
        assert isinstance(statement, Backward)
        total = sum(self.rows[name].mean() for name in statement.names)
        (total / self.program.window).backward()  # type: ignore[union-attr]

    def _compute(self, statement: Statement) -> None:
        match statement:
            case Clip():
                pass  # `step` clips
            case Read(model) if not self._ends(model):
                pass  # gradients of a window are not averaged before its end
            case _:
                super()._compute(statement)

    def _ends(self, model: int) -> bool:
        return (self.micro_steps[model] + 1) % self.program.window == 0

    def _step(self, optimizer: int) -> None:
        is_end = self._ends(optimizer)
        self.micro_steps[optimizer] += 1
        if not is_end:
            return
        parameters = [p for group in self.optimizers[optimizer].param_groups for p in group["params"]]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        limit = clip_limit(self.program, optimizer)
        if limit:
            self.notes["norms"].append(float(nn.utils.clip_grad_norm_(parameters, limit)))
        self.optimizers[optimizer].step()
        for number, scheduler in enumerate(self.program.schedulers):
            if scheduler.optimizer == optimizer:
                self.schedulers[number].step()
        self.optimizers[optimizer].zero_grad()

    def _use(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients may be used at any time."""


def deepspeed_plain(program: Program) -> dict[str, Any]:
    """Runs a program on one process; returns what `plain` returns."""
    return running(lambda: DeepSpeedPlain(program).run())


def clip_limit(program: Program, model: int) -> float:
    """The `gradient_clipping` of an engine."""
    limits = [each.limit for each in program.body if isinstance(each, Clip) and each.number == model]
    return limits[0] if limits else 0.0


_HELPERS = """
def mean_of_ranks(value):
    value = value.detach().clone()
    torch.distributed.all_reduce(value)
    return float(value) / world


def weights_of(engine):
    with GatheredParameters(list(engine.module.parameters())):
        return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}


def size_of_gradients(engine):
    whole = [safe_get_full_grad(parameter) for parameter in engine.module.parameters() if parameter.requires_grad]
    return sum(float(gradient.abs().sum()) for gradient in whole if gradient is not None)
"""


def deepspeed_script(
    program: Program, plan: Mapping[str, int | str], phase: str = "", folder: str = "saved", epoch: int = 0
) -> str:
    """The script as it is written for DeepSpeed, at the stage of the plan. See `script` for the arguments."""
    imports = [
        "from paceline_deepspeed.initialize import initialize",
        "from paceline_deepspeed.processes import init_distributed",
        "from paceline_deepspeed.values import safe_get_full_grad",
        "from paceline_deepspeed.zero import GatheredParameters",
    ]
    text = [
        definitions(program).replace("\nfrom torch.utils", "\n" + "\n".join(imports) + "\nfrom torch.utils", 1),
        following(program),
        _HELPERS,
        "\n\ninit_distributed('gloo')\n",
        "rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()\n",
        construction(program),
    ]
    for number in range(len(program.models)):
        text.append(_engine(program, number, int(plan["stage"])))
    loaders = ", ".join(f"loader{number}" for number in range(len(program.loaders)))
    text += [f"iterators, loaders = {{}}, [{loaders}]\n", "losses, norms, metrics, gradients = [], [], [], []\n\n\n"]
    by_loss = program.seed % _BY_LOSS == 0 and plan["stage"] != 0 and program.precision == "no"
    text.append("\n".join(_loop(program, by_loss, phase, folder)) + "\n\n\n")
    engines = [f"engine{number}" for number in range(len(program.models))]
    if phase == "resume":
        text += [f'{engine}.load_checkpoint("{folder}/{engine}")\n' for engine in engines]
        text.append(f"train(first_epoch={epoch + 1}, t={program.save_at})\n")
    else:
        text.append("train()\n")
    text.append(f"weights = [weights_of(engine) for engine in ({', '.join(engines)},)]\n")
    text.append(f"rates = [engine.get_lr() for engine in ({', '.join(engines)},)]\n")
    return "".join(text)


def _engine(program: Program, number: int, stage: int) -> str:
    config: dict[str, Any] = {
        "gradient_accumulation_steps": program.window,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": clip_limit(program, number),  # 1.0 where a config does not say it
    }
    given = [f"model=model{number}", f"optimizer=optimizer{number}"]
    for place, scheduler in enumerate(program.schedulers):
        if scheduler.optimizer == number:
            given.append(f"lr_scheduler=scheduler{place}")
    if program.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if program.precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    config_text = f"{{'train_micro_batch_size_per_gpu': {_BATCH} // world, **{config}}}"
    return (
        f"engine{number}, *_ = initialize({', '.join(given)}, config={config_text})\nmodel{number} = engine{number}\n"
    )


def _loop(program: Program, by_loss: bool, phase: str, folder: str) -> Iterable[str]:
    loop = program.loop
    yield "def train(first_epoch=0, t=-1):"
    depth = 3
    if loop.kind == "next":
        yield f"{INDENT}while t < {loop.steps - 1}:"
        depth = 2
    else:
        yield f"{INDENT}for epoch in range(first_epoch, {loop.epochs}):"
        names = ", ".join(f"loader{number}" for number in loop.loaders)
        if loop.again:
            names = f'again({names}, "{loop.again}")'
        batches = ", ".join(f"batch{number}" for number in loop.loaders)
        yield f"{INDENT * 2}for {batches}, in zip({names}):"
    yield f"{INDENT * depth}t += 1"
    if loop.kind != "next":
        for number in loop.loaders:
            yield INDENT * depth + _rows_of_rank(program, number, f"batch{number}")
    for statement in program.body:
        for line in _statement(program, statement, by_loss):
            yield INDENT * depth + line
    if phase == "save":
        yield f"{INDENT * depth}if t == {program.save_at}:"
        for number in range(len(program.models)):
            yield f'{INDENT * (depth + 1)}engine{number}.save_checkpoint("{folder}/engine{number}")'
        yield f"{INDENT * (depth + 1)}return"


def _rows_of_rank(program: Program, loader: int, batch: str) -> str:
    return f"x{loader}, y{loader}, w{loader} = (each[rank::world]{_cast(program)} for each in {batch})"


def _cast(program: Program) -> str:
    return f".to({_DTYPES[program.precision]})" if program.precision != "no" else ""


def _statement(program: Program, statement: Statement, by_loss: bool) -> list[str]:
    match statement:
        case Backward(names):
            loss = " + ".join(f"rows{name}.mean()" for name in names)
            if by_loss:
                return [f"({loss}).backward()"]
            return [f"engine{_model(program.body, statement)}.backward({loss})"]
        case Record(name):
            return [f"losses.append(mean_of_ranks(rows{name}.mean()))"]
        case Clip():
            return []
        case Read(model):
            return [
                f"if engine{model}.is_gradient_accumulation_boundary():",
                f"{INDENT}gradients.append(size_of_gradients(engine{model}))",
            ]
        case Step(model):
            if not clip_limit(program, model):
                return [f"engine{model}.step()"]
            return [
                f"ends = engine{model}.is_gradient_accumulation_boundary()",
                f"engine{model}.step()",
                "if ends:",
                f"{INDENT}norms.append(float(engine{model}.get_global_grad_norm()))",
            ]
        case Next(loader):
            return [_rows_of_rank(program, loader, f"following({loader})")]
        case Evaluate(model, loader):
            rows = f"torch.cat([per_row(model{model}(x{_cast(program)}), y) for x, y, w in loader{loader}])"
            return _evaluation(model, f"float({rows}.mean())")
        case EvaluateBatch(model, loader):
            return _evaluation(model, f"mean_of_ranks(per_row(model{model}(x{loader}), y{loader}).mean())")
        case When(body=body):
            lines = [line for inner in body for line in _statement(program, inner, by_loss)]
            return [plain_statement(program, replace(statement, body=()))[0], *(INDENT + line for line in lines)]
    return plain_statement(program, statement)


def _evaluation(model: int, value: str) -> list[str]:
    return [
        f"engine{model}.eval()",
        "with torch.no_grad():",
        f"{INDENT}metrics.append({value})",
        f"engine{model}.train()",
    ]
