"""Predicts the plan and the memory of a run, without running it on a device.

paceline plan [options] script.py [arguments of the script]

The script itself is rehearsed, up to and through one optimizer step, as one of the processes asked for, on tensors that
have a shape and no values. Settings that are `auto` are chosen: the cheapest whose bytes fit on `--device`.

`--measure` first measures this machine with as many processes, and keeps what it found; plans then say how long a step takes
here. It needs no script.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.base import env as environment
from paceline.base.errors import ConfigError, PacelineError
from paceline.base.terminal import say
from paceline.cli.script import ScriptProgress, add_script, misplaced_options, need_script, script_words
from paceline.config import schema
from paceline.config.given import Given
from paceline.config.kinds import least_and_most
from paceline.config.settings import launch_classes, searched_settings, settings_of
from paceline.config.sources import Launch, resolve_launch
from paceline.launch.host import check_target
from paceline.launch.job import Target
from paceline.launch.make_job import target_of
from paceline.world.layout import AXES
from paceline_lens.forecast.device import Device, device_of

if TYPE_CHECKING:
    from paceline_lens.forecast.calibration import Lookup
    from paceline_lens.forecast.report import PlanReport

_OWN = ("--device", "--auto", "--measure", "--draw", "--json")
_USED = ("procs", "nodes", "module", "compat", "config")  # of the launcher's own settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline plan [options] script.py [arguments of the script]"
    own = parser.add_argument_group("planning")
    own.add_argument("--device", metavar="NAME", help="device of the run, such as h200-141GB or a100-24GB")
    own.add_argument("--auto", action="store_true", help="choose every axis that is not given")
    own.add_argument(
        "--measure", action="store_true", help="measure this machine first, to forecast the time of a step"
    )
    own.add_argument("--draw", action="store_true", help="draw the schedule of the pipeline")
    own.add_argument("--json", action="store_true", help="print JSON")
    schema.add_options(parser, unlisted=[name for name in settings_of(*launch_classes()) if name not in _USED])
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the report, and returns 1 if the plan does not fit into the device's memory."""
    given, asked = _split(schema.given(args))
    launch = resolve_launch(given)
    if args.measure and args.script is None:
        _, _, calibration_text = _measure(launch)
        print(calibration_text)
        return 0
    need_script(args, "paceline plan", "--procs 8")
    target = target_of(launch.launch, args.script, script_words(args))
    # The name is checked first: the rehearsal imports torch, and a wrong name should be reported before that.
    device = device_of(args.device) if args.device else None
    check_target(target)
    axes = [f"--{axis}" for axis in AXES]
    for notice in misplaced_options(args, "paceline plan", [*_OWN, "--procs", "--nodes", "--zero", *axes]):
        say(notice)
    opened = _opened(launch, asked, args.auto)
    here = None
    lookup = None
    if args.measure:
        here, lookup, calibration_text = _measure(launch)
        print(calibration_text, file=sys.stderr)
    elif device is None:
        here, lookup = _look_up(launch)
    if device is None and opened:
        device = here
    if opened and device is None:
        raise ConfigError(
            "plan-device",
            f"{', '.join(opened)} cannot be chosen for an unknown device.",
            why="auto takes the cheapest plan that fits, and nobody said how much memory there is",
            fix="say what it will run on, such as `--device h200-141GB`; for this machine, `--measure`",
        )
    progress = ScriptProgress("paceline plan")
    try:
        report = _predict(target, launch, opened, device, here, lookup, progress)
    finally:
        progress.clear()
    _remember(target, report)
    if args.json:
        print(json.dumps(report.json(), indent=2, default=str))
    else:
        print(report.text())
    if args.draw:
        print("\n" + _drawing(report))
    return 0 if report.fits else 1


def _split(given: Sequence[Given]) -> tuple[list[Given], list[str]]:
    """Separates settings that were given as `auto` from the others, because not all of them accept that word.

    Returns:
        The other values, and the names of the settings to choose. `offload` may be both: auto=disk:FOLDER names a folder.
    """
    asked: list[str] = []
    rest: list[Given] = []
    for setting in given:
        word, _, more = str(setting.value).partition("=")
        is_asked = setting.name in searched_settings() and word.lower() == "auto"
        if is_asked:
            asked.append(setting.name)
        if more or not is_asked:
            rest.append(setting)
    return rest, asked


def _opened(launch: Launch, asked: Sequence[str], everything: bool) -> tuple[str, ...]:
    """Returns the settings that the search chooses."""
    chosen = set(asked)
    if everything:
        chosen |= set(searched_settings()) - launch.given.keys()
    elif chosen - {"offload"}:
        # The default of these settings is auto, and they divide the same ranks as the chosen axes.
        chosen |= {"replicate", "shard", "zero"} - launch.given.keys()
    return tuple(name for name in searched_settings() if name in chosen)


def _measure(launch: Launch) -> tuple[Device, Lookup, str]:
    """Measures this machine, and returns its device, the calibration, and a text about it.

    Raises:
        ConfigError: `plan-measure`, for several nodes; PlanError: `calibration-failed`, `calibration-write`.
    """
    from paceline_lens.forecast.calibrate import calibrate, this_machine
    from paceline_lens.forecast.calibration import Lookup, save

    if least_and_most(launch.launch.nodes)[1] > 1:
        raise ConfigError(
            "plan-measure",
            "several nodes cannot be measured from one of them.",
            why=f"nodes={launch.launch.nodes}; links between nodes are not measured",
            fix="measure one node, without `--nodes`: `paceline plan --measure --procs 8`",
        )
    this = this_machine(_with_procs(launch), environment.snapshot())
    calibration = calibrate(this)
    path = save(calibration)
    lookup = Lookup(calibration, f"{path} of {calibration.date}")
    return this.device, lookup, f"{calibration.text()}\nkept in {path}"


def _look_up(launch: Launch) -> tuple[Device | None, Lookup | None]:
    """Returns the device of this machine, if the machine has a calibration, and the result of looking for one.

    Both are None if the plan is for several nodes.
    """
    from paceline_lens.forecast.calibrate import this_machine
    from paceline_lens.forecast.calibration import Lookup, find

    settings = launch.launch
    if least_and_most(settings.nodes)[1] > 1 or settings.hostfile is not None:
        return None, None
    try:
        this = this_machine(_with_procs(launch), environment.snapshot())
    except PacelineError as error:
        # A plan may be for more processes than this machine can run.
        return None, Lookup(None, f"it cannot run this: {error.problems[0].what}")
    lookup = find(this.machine)
    if lookup.calibration is None:
        return None, lookup
    return this.device, lookup


def _with_procs(launch: Launch) -> Launch:
    """Returns the settings with the number of processes that the plan is made for; `auto` becomes 1."""
    procs = launch.launch.procs
    if procs == "auto":
        procs = 1
    return replace(launch, launch=replace(launch.launch, procs=procs))


def _remember(target: Target, report: PlanReport) -> None:
    """Saves the forecast, so that a watched run of the same script can show it in its journal."""
    from paceline_lens.forecast.known_forecasts import KnownForecast, key_of, remember

    time = report.time
    if time is None or target.kind != "script":
        return
    key = key_of(target.name, target.args, report.world_size, report.plan)
    memory = report.rehearsal.memory
    peak_bytes = memory.total if memory is not None else 0
    problem = remember(key, KnownForecast(1e3 * time.total_s, report.rehearsal.work.flops, peak_bytes))
    if problem:
        say(f"the forecast is not kept for `paceline watch`: {problem}")


def _predict(
    target: Target,
    launch: Launch,
    opened: tuple[str, ...],
    device: Device | None,
    here: Device | None,
    lookup: Lookup | None,
    progress: ScriptProgress,
) -> PlanReport:
    """Predicts the memory and the time of a run.

    Args:
        target: the script.
        launch: the merged settings.
        opened: settings that the search chooses.
        device: the device whose memory the plan must fit into; None for no limit.
        here: the device of this machine; None if it is unknown.
        lookup: the calibration by which the time of a step is forecast; None for none.
        progress: shows what is rehearsed.
    """
    from functools import partial

    from paceline.launch.worker.worker import become
    from paceline_lens.forecast.predict import predict
    from paceline_lens.forecast.rehearsal import SimulatedWorld

    settings = _with_procs(launch).launch
    local = int(settings.procs)
    _, nodes = least_and_most(settings.nodes)  # of a range, the largest number is planned for
    computes_on = device or here
    is_accelerated = computes_on is not None and not computes_on.name.startswith("cpu")
    simulated = SimulatedWorld(
        world_size=local * nodes,
        local_size=local,
        accelerated=is_accelerated,
        compat=settings.compat or "",
        memory=device.usable if device is not None else 0,
    )
    return predict(
        partial(become, target, settings.compat or ""),
        simulated,
        device=device,
        decisions=launch.decisions,
        opened=opened,
        lookup=lookup,
        progress=progress.show,
    )


def _drawing(report: PlanReport) -> str:
    """Returns a drawing of the pipeline's schedule, with the largest number of micro-batches of a batch."""
    from paceline.parallel.strategy import timetable_of

    timetable = timetable_of(report.plan, report.rehearsal.models)
    return "no pipeline to draw: pp is 1" if timetable is None else timetable.text()
