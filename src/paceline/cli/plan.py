"""Says what a run will take, without a device: its plan, and bytes on each rank.

paceline plan [options] script.py [arguments of the script]

The script itself is rehearsed, up to and through one optimizer step, as one of the processes asked for, on tensors that
have a shape and no values. Settings that are `auto` are chosen: the cheapest whose bytes fit on `--device`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.base.errors import ConfigError
from paceline.config import schema
from paceline.config.given import Given
from paceline.config.settings import launch_classes, searched_settings, settings_of
from paceline.config.sources import Launch, resolve_launch
from paceline.launch.host import check_target
from paceline.launch.job import flag_for_script, range_of_nodes, target_of
from paceline.launch.launcher import Target
from paceline.planner.device import Device, device_of
from paceline.world.layout import AXES

if TYPE_CHECKING:
    from paceline.planner.report import Report

_USED = ("procs", "nodes", "module", "compat", "config")  # of the launcher's own settings


def configure(parser: argparse.ArgumentParser) -> None:
    """Takes all settings of `launch`, and what the run is for."""
    parser.usage = "paceline plan [options] script.py [arguments of the script]"
    own = parser.add_argument_group("planning")
    own.add_argument("--device", metavar="NAME", help="what it will run on, such as h200-141GB or a100-24GB")
    own.add_argument("--auto", action="store_true", help="choose every axis that nobody gave")
    own.add_argument("--draw", action="store_true", help="draw the schedule of the pipeline")
    own.add_argument("--json", action="store_true", help="print JSON")
    schema.add_options(parser, unlisted=[name for name in settings_of(*launch_classes()) if name not in _USED])
    parser.add_argument("script", nargs="?", help="Python file; with -m a module")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 1 where the plan does not fit."""
    given, asked = _split(schema.given(args))
    launch = resolve_launch(given)
    if args.script is None:
        raise ConfigError(
            "command-line",
            "`paceline plan` needs a script.",
            fix="name it after the options: `paceline plan --procs 8 train.py --lr 0.1`",
        )
    # `--` once stood between the script and its arguments.
    words = args.script_args[1:] if args.script_args[:1] == ["--"] else args.script_args
    target = target_of(launch.launch, args.script, words)
    # A wrong name does not wait for torch, which the rehearsal imports.
    device = device_of(args.device) if args.device else None
    check_target(target)
    _notice_misplaced(launch, args.script_args)
    opened = _opened(launch, asked, args.auto)
    if opened and args.device is None:
        raise ConfigError(
            "plan-device",
            f"{', '.join(opened)} cannot be chosen for an unknown device.",
            why="auto takes the cheapest plan that fits, and nobody said how much memory there is",
            fix="say what it will run on, such as `--device h200-141GB`",
        )
    report = _predict(target, launch, opened, device)
    if args.json:
        print(json.dumps(report.json(), indent=2, default=str))
    else:
        print(report.text())
    if args.draw:
        print("\n" + _drawing(report))
    return 0 if report.fits else 1


def _notice_misplaced(launch: Launch, words: Sequence[str]) -> None:
    """Says that a flag behind the script is the script's: a plan for another number of ranks would be believed."""
    sizes = {"procs", "nodes", "zero", *AXES}
    default = [row.field for row in launch.decisions if row.source == "default" and row.field in sizes]
    misplaced = flag_for_script(words, [f"--{name}" for name in default])
    if misplaced:
        text = f"`{misplaced}` stands after the script, which gets it; write it before the script to plan with it."
        print(f"paceline: {text}", file=sys.stderr)


def _split(given: Sequence[Given]) -> tuple[list[Given], list[str]]:
    """What was given, and the settings that were given as `auto`, which some of them do not know."""
    asked: list[str] = []
    rest: list[Given] = []
    for setting in given:
        if setting.name in searched_settings() and str(setting.value).lower() == "auto":
            asked.append(setting.name)
        else:
            rest.append(setting)
    return rest, asked


def _opened(launch: Launch, asked: Sequence[str], everything: bool) -> tuple[str, ...]:
    """The settings that are to be chosen."""
    left = {choice.field for choice in launch.decisions if choice.source == "default"}
    chosen = set(asked)
    if everything:
        chosen |= left
    elif chosen:
        chosen |= left & {"replicate", "shard", "zero"}  # they are auto by themselves, and divide the same ranks
    return tuple(name for name in searched_settings() if name in chosen)


def _predict(target: Target, launch: Launch, opened: tuple[str, ...], device: Device | None) -> Report:
    from functools import partial

    from paceline.launch.worker import become
    from paceline.planner.predict import predict
    from paceline.planner.rehearsal import SimulatedWorld

    settings = launch.launch
    local = 1 if settings.procs == "auto" else int(settings.procs)
    _, nodes = range_of_nodes(settings.nodes)  # as many as may take part
    simulated = SimulatedWorld(
        world_size=local * nodes,
        local_size=local,
        accelerated=device is not None and not device.name.startswith("cpu"),
        compat=settings.compat or "",
        memory=device.usable if device is not None else 0,
    )
    return predict(
        partial(become, target, settings.compat or ""),
        simulated,
        device=device,
        decisions=launch.decisions,
        opened=opened,
    )


def _drawing(report: Report) -> str:
    """The schedule of the pipeline, as many micro-batches as a batch has at most."""
    plan = report.plan
    if plan.layout.pp == 1:
        return "no pipeline to draw: pp is 1"
    from paceline.parallel.pipeline.pipeline import STRATEGY, microbatches, per_rank
    from paceline.parallel.pipeline.schedules import draw

    options = STRATEGY.options(plan)
    ranks = plan.layout.pp
    stages_per_rank = per_rank(options)
    return draw(options.schedule, ranks * stages_per_rank, microbatches(options, ranks), stages_per_rank)
