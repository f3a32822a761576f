"""The same programs through accelerate's names, with the numbers that accelerate defines.

A loss is the mean over a micro-batch of all processes, divided by the planned number of micro-batches of a window. All calls of
`accumulate` are counted together; a window ends when the count says so, or at the last batch of the loader that began last.
`step`, `scheduler.step` and `zero_grad` of an optimizer do nothing before its last micro-batch. `AcceleratePlain` computes that
on one process. A short batch is completed with samples of the beginning, so batches are made full. What accelerate has not
is written as its guides say: clipping waits for `sync_gradients`, items are counted by `gather`, a save ends an epoch.
"""

from __future__ import annotations

import re
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
    Evaluate,
    Forward,
    ForwardBackward,
    Next,
    Program,
    Statement,
    When,
    Write,
    Zero,
    statements,
    uses,
)
from loops.script import script
from torch import nn

Body = tuple[Statement, ...]

PLANS = ("one", "replicate", "shard")  # those that its names can ask for on the CPU
_NAME = 99  # of a loss that `forward_backward` has computed natively


def adapted(program: Program) -> Program | None:
    """The program as it is written for accelerate; None where that says nothing about its numbers."""
    flat = list(statements(program.body))
    evaluated = {each.loader for each in flat if isinstance(each, Evaluate)}
    if not _has_a_meaning(program, flat, evaluated):
        return None
    loaders = []
    batches = [max(1, program.loaders[number].rows // program.loaders[number].batch) for number in program.loop.loaders]
    for number, loader in enumerate(program.loaders):
        rows = max(1, loader.rows // loader.batch) * loader.batch
        if number in program.loop.loaders:
            # The loaders of a `zip` end together: one that does not end stays the loader that began last.
            rows = min(batches) * loader.batch
        elif number in evaluated:
            rows = loader.rows
        loaders.append(replace(loader, rows=rows, drop_last=False, taken=""))
    # Each loss has the same weight. A batch that is used again behind the last one would begin a window.
    loop = replace(program.loop, ahead=0, again=program.loop.again if program.window == 1 else "")
    save_at = None
    if program.save_at is not None and loop.kind == "for" and not uses(program, Next):
        loop = replace(loop, epochs=2)
        save_at = batches[0] - 1
    body = _body(program.body, program.window > 1)
    return replace(
        program,
        loaders=tuple(loaders),
        loop=loop,
        body=body,
        split_batches=True,
        offload="",
        loose=False,
        save_at=save_at,
        plain_save=False,
        averages=tuple(
            replace(average, prepared=False) for average in program.averages
        ),  # the methods of a wrapped one are hidden
        apart=False,
    )


def _has_a_meaning(program: Program, flat: list[Statement], evaluated: set[int]) -> bool:
    if any(hook.kind != "double" for hook in program.hooks):
        return False
    # It has no way to write new values into parameters that are divided.
    if any(isinstance(each, Write) and each.kind == "draw" for each in flat):
        return False
    if any(program.loaders[loader].kind == "iterable" for loader in evaluated):
        return False
    if program.window == 1:
        return True
    # A loader of which `Next` takes batches ends at some time, in the middle of the others.
    taken = {each.loader for each in flat if isinstance(each, Next)}
    if program.loop.kind == "next" or any(program.loaders[loader].kind != "endless" for loader in taken):
        return False
    # Weights that are written by a gradient, or gradients that are read, inside of a window: each process has its own.
    return not any(isinstance(each, Write) and each.kind == "descend" for each in flat)


def _body(body: Body, windows: bool, inside: bool = False) -> Body:
    result: list[Statement] = []
    for statement in body:
        match statement:
            case ForwardBackward(model, loader):
                result += [Forward(_NAME, model, loader), Backward((_NAME,))]
            case Backward(_, "mask"):
                result.append(replace(statement, items="int"))
            case Clip() if windows:
                result.append(When("sync", body=(statement,)))
            case Accumulate():
                result.append(replace(statement, body=_body(statement.body, windows, inside=True)))
            case When():
                result.append(replace(statement, body=_body(statement.body, windows, inside)))
            case _:
                result.append(statement)
    return tuple(result)


class AcceleratePlain(Interpreter):
    """A program on one process, as accelerate defines it; see the module."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, defaultdict(float), counting=False)
        self.micro = 0  # calls of `accumulate` since a window ended
        self.epoch = 0

    def _iteration(self, epoch: int) -> None:
        self.epoch = epoch
        super()._iteration(epoch)
        gradients = [parameter.grad for model in self.models for parameter in model.parameters()]
        if self.t == self.program.save_at and any(gradient is not None for gradient in gradients):
            raise Unclear("gradients are in no checkpoint")

    def _accumulate(self, models: tuple[int, ...], body: Body) -> None:
        # A loader of which `Next` takes batches never ends here, and began last in the first epoch.
        began_last = self.epoch > 0 or not self.given
        ends = self.last and began_last
        self.sync = ends or (self.micro + 1) % self.program.window == 0
        self.micro = 0 if ends else self.micro + 1
        self._run(body)

    def _backward(self, statement: Backward | ForwardBackward) -> None:
        assert isinstance(statement, Backward)
        loader = next(f.loader for f in self._forwards() if f.name == statement.names[0])
        x, _, weights = self.batches[loader]
        weights = weights.to(x.dtype) if statement.items else torch.ones(len(x))
        total = sum((self.rows[name] * weights).sum() for name in statement.names) / weights.sum()
        (total / self.program.window).backward()
        self.stale.clear()

    def _step(self, optimizer: int) -> None:
        self.optimizers[optimizer].step()

    def _use(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients may be used at any time."""

    def _zero(self, zero: Zero) -> None:
        if zero.how == "optimizer" and not self.sync:
            return
        if zero.how == "optimizer":
            parameters = [p for group in self.optimizers[zero.number].param_groups for p in group["params"]]
        else:
            parameters = list(self.models[zero.number].parameters())
        for parameter in parameters:
            if zero.to_none or zero.how == "hand" or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad = torch.zeros_like(parameter.grad)


def accelerate_plain(program: Program) -> dict[str, Any]:
    """Runs a program on one process; returns what `plain` returns."""
    return running(lambda: AcceleratePlain(program).run())


def accelerate_script(
    program: Program, plan: Mapping[str, int | str], phase: str = "", folder: str = "saved", epoch: int = 0
) -> str:
    """The script as it is written for accelerate; `shard` is its plugin for FSDP. See `script` for the arguments."""
    imports = [
        "from paceline_accelerate.accelerator import Accelerator",
        "from paceline_accelerate.arguments import DataLoaderConfiguration",
        "from paceline_accelerate.state import AcceleratorState",
    ]
    options = ["cpu=True", "dataloader_config=DataLoaderConfiguration(split_batches=True)"]
    if program.window > 1:
        options.append(f"gradient_accumulation_steps={program.window}")
    if program.precision != "no":
        options.append(f"mixed_precision={program.precision!r}")
    if plan:
        imports.append("from paceline_accelerate.fsdp_plugin import FullyShardedDataParallelPlugin")
        options.append("fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)")
    # Loaders begin anew in a run that goes on.
    lines = script(program, {}, phase, folder, epoch + 1).splitlines()
    for number, line in enumerate(lines):
        if line == "from paceline import Accelerator":
            lines[number] = "\n".join(imports)
        if line.startswith("accelerator = Accelerator("):
            # All accelerators of a process have one precision, and the programs of many seeds run in one process.
            reset = "AcceleratorState._reset_state(True)"
            lines[number] = f"{reset}\naccelerator = Accelerator({', '.join(options)})"
        lines[number] = _ITEMS.sub(_BY_ITEMS, lines[number])
    return "\n".join(lines) + "\n"


_ITEMS = re.compile(r"accelerator\.backward\((.*), num_items=(?:int|float)\((.*)\.sum\(\)\)\)$")
_BY_ITEMS = r"accelerator.backward((\1) * accelerator.num_processes / accelerator.gather(\2.sum()).sum())"
