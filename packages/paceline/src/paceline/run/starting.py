"""`start_run`: from the arguments of an `Accelerator` to a `Run` whose process group is up.

arguments -> settings merged -> draft of the plan      what is wrong is reported, before any rank joins the process group
          -> process group -> collectives -> Run       all ranks go the same way from here on
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.base.log import warn_once
from paceline.config import Overrides, resolve_run
from paceline.config.settings import PRECISIONS
from paceline.plan.plan import Decision
from paceline.plan.resolve import draft
from paceline.plan.semantics import NATIVE, Semantics
from paceline.run.observers import said
from paceline.run.run import Run
from paceline.world import runtime, torch_version
from paceline.world.joining import join
from paceline.world.world import World


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """What an `Accelerator`, or a door in its place, says about a run that begins.

    Attributes:
        overrides: the settings that the script gives.
        profile, anomalies, scaler, project_dir: see `Accelerator`.
        semantics: how the loop is meant.
    """

    overrides: Overrides = field(default_factory=Overrides)
    profile: str | Sequence[str] | Mapping[str, Any] | None = None
    anomalies: Mapping[str, Any] | None = None
    scaler: Mapping[str, Any] | None = None
    project_dir: str | Path | None = None
    semantics: Semantics = NATIVE


def start_run(arguments: RunArguments) -> Run:
    """Starts a run.

    Ranks: all.

    Raises:
        ConfigError, PlanError, WorldError: before the process group is initialized, with all problems at once.
    """
    torch_version.check(torch.__version__)
    # Settings and a draft of the plan come first: what is wrong with them is reported before any rank joins the process
    # group, where one that failed alone would leave the others waiting.
    overrides = arguments.overrides
    overrides = said(overrides, {"profile": arguments.profile, "anomalies": arguments.anomalies})
    resolved = resolve_run(overrides)
    surroundings = runtime.current()
    settings = surroundings.settings(resolved.settings)
    decisions = [Decision(**vars(choice)) for choice in resolved.decisions]
    detected = World.detect()
    semantics = arguments.semantics
    plan = draft(settings, decisions, detected.size, semantics)
    for notice in resolved.notices:
        warn_once("config", notice)

    # Communication: from here on all ranks must go the same way.
    collectives = join(detected, settings, surroundings, needs_group=plan.fully_sharded)
    world = collectives.world
    device = collectives.device
    if semantics.fp16_on_cpu == "ignored" and device.type == "cpu" and PRECISIONS.get(plan.precision).scales:
        reason = f"{plan.precision} has no effect on the CPU, as under {semantics.library}"
        warn_once("compat", f"{reason}: use bf16 for fewer bytes.")
        plan = plan.in_float32(reason)
    plan = PRECISIONS.get(plan.precision).settle(plan, surroundings.accelerated(device))
    folder = None if arguments.project_dir is None else str(arguments.project_dir)
    run = Run(world, device, collectives, settings, decisions, plan, surroundings, arguments.scaler, folder)
    # Nobody reads the progress of a process that no launcher has started.
    if world.source != "single":
        from paceline.world.hang_reports import reports_for

        reports = reports_for(is_asked=settings.stuck_after not in ("0", type(settings).stuck_after))
        file = None
        if reports is not None:
            file = reports.watch_progress(world, settings.stuck_after, computes_on_cpu=device.type == "cpu")
        if file is not None:
            run.events.before_step.subscribe(lambda _: file.progress.stepped(time.monotonic()))
    return run
