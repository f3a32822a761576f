"""`fit`: what a plan left to `auto`, decided when the first models are prepared, for the memory that there is.

draft (some of shard, zero, tp, pp on auto)  ->  facts of the models  ->  choose  ->  draft with everything said
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace

import torch

from paceline.base.errors import PlanError
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Decision, Plan
from paceline.plan.resolve import draft
from paceline.planner.device import TABLE, Device
from paceline.planner.estimate import Need, choose, gib
from paceline.world.layout import AXES
from paceline.world.world import World

KEPT_FREE = 0.3  # of the memory: activations are not known before a batch has been seen


def memory_of(device: torch.device, local_size: int) -> int:
    """Bytes that one rank may count on: its accelerator's, or its share of the host's."""
    if device.type != "cpu":
        return int(torch.accelerator.get_memory_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_size


def of_this_host(local_size: int, *, cpu: bool = False) -> Device:
    """The device that a rank has here, at the rates of the nearest known one. Touches it: for a process of its own."""
    accelerated = torch.accelerator.is_available() and not cpu
    found = torch.accelerator.current_accelerator() if accelerated else torch.device("cpu")
    assert found is not None, "an accelerator that is available has a name"
    memory = memory_of(found, local_size)
    if found.type == "cpu":
        return replace(TABLE["cpu-64GB"], name="cpu", memory=memory)
    said = re.sub(r"[\s_]", "", str(getattr(torch, found.type).get_device_name())).lower()
    like = next((row for name, row in TABLE.items() if name.partition("-")[0] in said), TABLE["a100-40GB"])
    return replace(like, name=said or found.type, memory=memory)


def fit(plan: Plan, models: Iterable[ModelFacts], world: World, memory: int) -> Plan:
    """The draft with what it left open said: the cheapest settings whose bytes fit.

    Args:
        plan: a draft with `open` settings.
        models: facts of the first models that are prepared.
        world: the processes.
        memory: bytes of each rank; the same on all ranks.

    Raises:
        PlanError: `plan-none-fits`, with what each would need.
    """
    usable = int(memory * (1 - KEPT_FREE))
    told = {name: getattr(plan, name) for name in ("accumulate", "recompute", "offload", "compile")}
    told |= {axis: getattr(plan.layout, axis) for axis in AXES} | {"mixed_precision": plan.precision}
    if plan.zero:
        told["zero"] = plan.zero
    fixed = {name: value for name, value in told.items() if name not in plan.open}
    found = choose(Need(tuple(models)), world.size, world.local_size, usable, fixed, plan.open)
    if found.settings is None or found.estimate is None:
        raise PlanError(
            "plan-none-fits",
            "no plan fits into the memory that there is.",
            why=[f"{gib(memory)} a rank, of which {KEPT_FREE:.0%} are kept for activations"]
            + [str(each) for each in found.rejected[-3:]],
            fix="use more processes, or say `--offload all` where there is an accelerator",
        )
    reason = f"fits: {gib(found.estimate.held)} of {gib(usable)} a rank, activations not counted"
    if found.rejected:
        reason += f"; not {found.rejected[-1]}"
    notes = {each.field: each for each in plan.decisions}
    for name, value in found.settings.items():
        notes[name] = Decision(name, value, "derived", notes[name].where if name in notes else "", reason)
    return draft({**fixed, **found.settings}, notes.values(), world.size, plan.options)
