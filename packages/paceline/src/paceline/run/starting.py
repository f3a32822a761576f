"""`start_run`: from the arguments of an `Accelerator` to a `Run` whose process group is up.

arguments -> settings merged -> draft of the plan      what is wrong is reported, before any rank joins the process group
          -> process group -> collectives -> Run       all ranks go the same way from here on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.base.log import warn_once
from paceline.config import resolve_run
from paceline.config.given import Given
from paceline.plan.plan import Decision
from paceline.plan.resolve import draft
from paceline.run.run import Run
from paceline.world import runtime, torch_version
from paceline.world.joining import join
from paceline.world.world import World


def start_run(
    arguments: Mapping[str, Any],
    *,
    plan: Mapping[str, Any] | Sequence[Given] | str | Path | None,
    options: Mapping[str, Mapping[str, Any]] | None,
    profile: str | Sequence[str] | Mapping[str, Any] | None,
    anomalies: Mapping[str, Any] | None,
    scaler: Mapping[str, Any] | None,
    project_dir: str | Path | None,
) -> Run:
    """Starts a run.

    Args:
        arguments: settings by name; None takes the value from the command line, the environment, a file, or the default.
        plan, options, profile, anomalies, scaler, project_dir: see `Accelerator`.

    Ranks: all.

    Raises:
        ConfigError, PlanError, WorldError: before the process group is initialized, with all problems at once.
    """
    torch_version.check(torch.__version__)
    # Settings and a draft of the plan come first: what is wrong with them is reported before any rank joins the process
    # group, where one that failed alone would leave the others waiting.
    profile_names: str | None = None
    if profile is not None:
        from paceline.observe.profiles import chosen as chosen_profiles  # most runs measure nothing

        profile_names, options = chosen_profiles(profile, options)
    if anomalies is not None:
        from paceline.run.anomaly_actions import chosen as chosen_anomalies  # most runs look for none

        options = chosen_anomalies(anomalies, options)
    resolved = resolve_run({**arguments, "profile": profile_names}, plan=plan, options=options)
    surroundings = runtime.current()
    settings = surroundings.settings(resolved.settings)
    decisions = [Decision(**vars(choice)) for choice in resolved.decisions]
    detected = World.detect()
    draft_plan = draft(settings.by_name(), decisions, detected.size, settings.options)
    for notice in resolved.notices:
        warn_once("config", notice)

    # Communication: from here on all ranks must go the same way.
    collectives = join(detected, settings)
    world = collectives.world
    device = collectives.device
    folder = None if project_dir is None else str(project_dir)
    run = Run(world, device, collectives, settings, decisions, draft_plan, scaler, folder)
    # Nobody reads the progress of a process that no launcher has started.
    if world.source != "single":
        from paceline.world.hangs.progress_thread import watch

        progress = watch(world, settings.stuck_after, computes_on_cpu=device.type == "cpu")
        if progress is not None:
            run.events.before_step.subscribe(lambda _: progress.stepped())
    return run
