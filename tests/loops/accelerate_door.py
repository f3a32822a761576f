"""The same programs through accelerate's names: the part of them to which accelerate gives the numbers of plain PyTorch.

accelerate divides a loss by the number of micro-batches of a window, averages over processes, and completes short batches with
samples of the beginning, which it takes off for the loader only that began last. So batches and windows are made full. What
it does not have goes (items, `forward_backward`, saves in an epoch), and what it means otherwise is written as its guides say:
clipping waits for `sync_gradients`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from loops.programs import (
    Accumulate,
    Backward,
    Clip,
    Continue,
    Evaluate,
    ForwardBackward,
    Program,
    Statement,
    When,
    Write,
    Zero,
    statements,
)
from loops.script import script

Body = tuple[Statement, ...]

PLANS = ("one", "replicate", "shard")  # those that its names can ask for on the CPU


def adapted(program: Program) -> Program | None:
    """The program as accelerate defines it; None where accelerate gives another number than plain PyTorch, or none."""
    flat = list(statements(program.body))
    evaluated = {each.loader for each in flat if isinstance(each, Evaluate)}
    if not _has_the_same_meaning(program, flat, evaluated):
        return None
    loaders = []
    for number, loader in enumerate(program.loaders):
        full = max(1, loader.rows // loader.batch)
        if number in program.loop.loaders:
            full = max(1, full // program.window) * program.window
        rows = loader.rows if number in evaluated else full * loader.batch
        loaders.append(replace(loader, rows=rows, drop_last=False))
    body = _body(program.body, program.window > 1)
    return replace(program, loaders=tuple(loaders), body=body, split_batches=True, save_at=None)


def _has_the_same_meaning(program: Program, flat: list[Statement], evaluated: set[int]) -> bool:
    if program.precision != "no" or any(hook.kind != "double" for hook in program.hooks):
        return False
    # Batch norms see the rows of one process.
    if any(model.body == "BatchNorm" for model in program.models):
        return False
    if any(isinstance(each, ForwardBackward) for each in flat):
        return False
    # It has no way to write new values into parameters that are divided.
    if any(isinstance(each, Write) and each.kind == "draw" for each in flat):
        return False
    if any(program.loaders[loader].kind == "iterable" for loader in evaluated):
        return False
    if program.window == 1:
        return True
    # Windows look at one loader and count the calls of `accumulate`. A `zero_grad` clears what a window has so far.
    windows = [each for each in flat if isinstance(each, Accumulate)]
    skips = any(isinstance(each, Continue) for each in flat)
    places = [place for place, each in enumerate(flat) if isinstance(each, Backward)]
    early = any(isinstance(each, Zero) for each in flat[: places[-1]])
    one_loader = program.loop.kind == "for" and len(program.loaders) == 1
    return one_loader and len(windows) == 1 and not skips and not early


def _body(body: Body, windows: bool, inside: bool = False) -> Body:
    result: list[Statement] = []
    for statement in body:
        match statement:
            case Backward(items=items) if items is not None:
                result.append(replace(statement, items=None))
            case Clip() if windows and inside:
                result.append(When("sync", body=(statement,)))
            case Accumulate():
                result.append(replace(statement, body=_body(statement.body, windows, inside=True)))
            case When():
                result.append(replace(statement, body=_body(statement.body, windows, inside)))
            case _:
                result.append(statement)
    return tuple(result)


def accelerate_script(program: Program, plan: Mapping[str, int]) -> str:
    """The script as it is written for accelerate; `shard` is its plugin for FSDP."""
    imports = [
        "from paceline_accelerate.accelerator import Accelerator",
        "from paceline_accelerate.arguments import DataLoaderConfiguration",
    ]
    options = ["cpu=True", "dataloader_config=DataLoaderConfiguration(split_batches=True)"]
    if program.window > 1:
        options.append(f"gradient_accumulation_steps={program.window}")
    if plan:
        imports.append("from paceline_accelerate.fsdp_plugin import FullyShardedDataParallelPlugin")
        options.append("fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)")
    lines = script(program, {}).splitlines()
    for number, line in enumerate(lines):
        if line == "from paceline import Accelerator":
            lines[number] = "\n".join(imports)
        if line.startswith("accelerator = Accelerator("):
            lines[number] = f"accelerator = Accelerator({', '.join(options)})"
    return "\n".join(lines) + "\n"
