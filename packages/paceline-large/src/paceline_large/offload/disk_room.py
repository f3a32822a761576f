"""Is there room on a disk for the states that optimizers will make in their first step? Known before it, on all ranks."""

from __future__ import annotations

import copy
import inspect
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.base.errors import PrepareError
from paceline.parallel.stand_ins import original
from paceline.parallel.strategy import Context
from paceline.plan.rules import origin
from paceline.planner.estimate import Need, estimate, gib


def states_bytes(context: Context, model: nn.Module, optimizer: Optimizer) -> int:
    """Returns the bytes of states that an optimizer keeps on this rank's disk for the parameters of a model."""
    own = {parameter for parameter in model.parameters() if parameter.requires_grad}
    num_bytes = 0
    known: dict[tuple[int, torch.dtype], int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if original(parameter) not in own:
                continue
            key = number, parameter.dtype
            if key not in known:
                known[key] = _bytes_an_element(optimizer, group, parameter)
            num_bytes += known[key] * parameter.numel()
    # As many float32 values for each trained parameter; how these are divided among ranks, the plan says.
    values = num_bytes / max(1, 4 * sum(parameter.numel() for parameter in own))
    with_states = estimate(context.plan, Need((context.facts,), states=values)).disk
    return with_states - estimate(context.plan, Need((context.facts,), states=0)).disk


def _bytes_an_element(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> int:
    """Returns the bytes of states for one element of a parameter: of those that it has, or else of those that a step makes."""
    state = optimizer.state.get(parameter)
    if not state:
        # A step of one element by the class's own code: hooks of others must not see it.
        stand = nn.Parameter(torch.zeros(1, dtype=parameter.dtype))
        stand.grad = torch.zeros_like(stand)
        trial = copy.copy(optimizer)
        group_of_one = {**group, "params": [stand], "capturable": False}
        vars(trial).update(state=defaultdict(dict), param_groups=[group_of_one])
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(trial)
        state = trial.state[stand]
    return sum(value.element_size() for value in state.values() if isinstance(value, Tensor) and value.dim())


def refuse_small_disk(context: Context, folder: Path, kind: str, num_bytes: int) -> None:
    """Compares what will be written with the free room of a folder's file system, which the ranks of a host share.

    Args:
        context: of the model whose optimizer was prepared.
        folder: where the files will be.
        kind: the class of that optimizer.
        num_bytes: what this rank has still to write, for all optimizers.

    Ranks: all; each raises if one does.

    Raises:
        PrepareError: `offload-room`.
    """
    collectives = context.collectives
    collectives.barrier()  # each rank has reserved its parameters, and none tries out the disk
    of_rank = collectives.world.node, shutil.disk_usage(folder).free, num_bytes
    rows: Iterable[tuple[int, int, int]] = collectives.gather_object(of_rank)
    needed: dict[int, int] = defaultdict(int)
    least_free: dict[int, int] = {}
    for node, free, num_to_come in rows:
        needed[node] += num_to_come
        least_free[node] = min(free, least_free.get(node, free))
    for node, count in needed.items():
        if count > least_free[node]:
            host = f" of host {node}" if len(needed) > 1 else ""
            raise PrepareError(
                "offload-room",
                f"the disk{host} has no room for the states of {kind}: they need {gib(count)}, and {gib(least_free[node])} are "
                f"free in {folder}.",
                why=f"{origin(context.plan, 'offload')}; all processes of a host write there in the first step, with the "
                "states of optimizers that were prepared before and have not stepped",
                fix="make room there, or name a folder on a larger disk: `--offload optimizer=disk:FOLDER`",
            )
