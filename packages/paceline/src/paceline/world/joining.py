"""`join`: forms the process group, and gives the collectives over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.world import rendezvous
from paceline.world.collectives import Collectives

if TYPE_CHECKING:
    from paceline.config import RunSettings
    from paceline.world.runtime import Runtime
    from paceline.world.world import World


def join(detected: World, settings: RunSettings, runtime: Runtime, *, needs_group: bool = False) -> Collectives:
    """Joins the process group, and returns this process's collectives; they know its world and its device. Ranks: all.

    Args:
        needs_group: whether a single process needs a group of one, also where no launcher has started it.

    Raises:
        WorldError: if a rank does not come.
    """
    world = rendezvous.join(
        detected, cpu=settings.cpu, timeout_s=settings.timeout_s, needs_group=needs_group, detect=runtime.device
    )
    device = torch.device(world.device)
    # A rehearsal has its own.
    collectives: Collectives | None = runtime.collectives(world, device)
    if collectives is not None:
        return collectives
    if world.size > 1 and settings.hang_report_s:
        from paceline.world.hang_reports import reports_for  # one process waits for nobody

        reports = reports_for(is_asked=settings.hang_report_s != type(settings).hang_report_s)
        if reports is not None:
            reports.watch_waits(settings.hang_report_s, settings.timeout_s, computes_on_cpu=device.type == "cpu")
    return Collectives(world, device=device, debug=settings.debug, timeout_s=settings.timeout_s)
