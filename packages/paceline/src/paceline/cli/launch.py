"""Starts a script on one or more processes.

paceline launch [options] script.py [arguments of the script]
paceline launch [options] -m module [arguments of the module]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from paceline.base import env as environment
from paceline.base.terminal import say
from paceline.cli.script import add_script, misplaced_options, need_script
from paceline.config import schema
from paceline.config.given import Choice
from paceline.config.settings import LaunchSettings, launch_classes, settings_of
from paceline.config.sources import Launch, resolve_launch
from paceline.launch.job import Job
from paceline.launch.launcher import ALLOCATIONS, LAUNCHERS, Handle, Launcher, Outcome
from paceline.world.layout import AXES


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline launch [options] script.py [arguments of the script]"
    schema.add_options(parser)
    add_script(parser, "Python file; with -m a module, with --no-python a program")


def run(args: argparse.Namespace) -> int:
    """Runs the script to its end, and returns the exit code of the first rank that failed, or 0."""
    from paceline.launch.host import check_target
    from paceline.launch.make_job import job_elsewhere, job_of, starts_elsewhere, target_of, without_hostfile

    resolved = resolve_launch(schema.given(args))
    need_script(args, "paceline launch", "--procs 2")
    env = environment.snapshot()
    if _asks_for_help(args.script_args):
        resolved = _alone(resolved)
    else:
        for variable in ALLOCATIONS.names():
            if env.get(variable):
                resolved = ALLOCATIONS.get(variable)(resolved, env)
    notices: list[str] = []
    if starts_elsewhere(resolved):
        job = job_elsewhere(resolved, args.script, args.script_args, env)
    else:
        without_hostfile(resolved)
        check_target(target_of(resolved.launch, args.script, args.script_args))
        job, notices = job_of(resolved, args.script, args.script_args, env)
    check_plan(resolved, job)
    flags = [setting.flag for setting in settings_of().values()]
    notices += misplaced_options(args, "paceline launch", flags)
    for notice in (*resolved.notices, *notices):
        say(notice)
    if resolved.launch.dry_run:
        return _show(job, resolved)
    return carry_out(job, resolved)


def check_plan(resolved: Launch, job: Job) -> None:
    """Refuses axes that do not divide the number of processes, before any process is started.

    The other checks of a plan need the model, so the script makes them.

    Raises:
        PlanError: `plan-size`, `plan-zero`.
    """
    axes = {"shard", "zero", *AXES}
    # Without a set axis there is nothing to check, and with a range of nodes the number of processes is not known yet.
    if job.least or axes.isdisjoint(resolved.given):
        return
    from paceline.plan.plan import Decision
    from paceline.plan.resolve import draft

    world_size = job.procs * job.nodes
    if job.assignment is not None:
        world_size = sum(len(host.ids) for host in job.assignment.hosts)
    draft(resolved.run, [Decision(**vars(row)) for row in resolved.decisions], world_size)


def _asks_for_help(words: Sequence[str]) -> bool:
    """Returns whether a script is run only to print its help.

    `-h` counts only as the only argument, because it may also be an option of the script that takes a value.
    """
    return "--help" in words or list(words) == ["-h"]


def _alone(resolved: Launch) -> Launch:
    """Reduces the settings to one process on this host, because the help of a script is the same on all ranks."""
    kept_settings = {"module", "no_python", "compat", "dry_run"}
    kept_values = {name: getattr(resolved.launch, name) for name in kept_settings}
    launch = LaunchSettings(procs=1, **kept_values)
    decisions = []
    for row in resolved.decisions:
        if row.field in kept_settings or row.field == "procs" or row.field not in settings_of(*launch_classes()):
            decisions.append(row)
        elif row.field in settings_of(LaunchSettings):
            decisions.append(Choice(row.field, getattr(launch, row.field)))
    return replace(resolved, launch=launch, decisions=tuple(decisions), cluster={})


def _show(job: Job, resolved: Launch) -> int:
    from paceline.cli.explain import table
    from paceline.launch.host import name

    rendered = _launcher(job, resolved).render(job)
    for notice in rendered.notices:
        say(notice)
    if rendered.document:
        # Standard output holds only the document, so that it can be redirected into a file and used.
        print(rendered.document)
        print("settings:", table(resolved, changed=True), sep="\n", file=sys.stderr)
        return 0
    print(rendered.text(name()), "\n\nsettings:", table(resolved, changed=True), sep="\n")
    return 0


def _launcher(job: Job, resolved: Launch) -> Launcher:
    """Returns the launcher of a job: the one that the settings name for other hosts, the local one for this host."""
    name = "local" if job.assignment is None else resolved.launch.launcher
    launcher: Launcher = LAUNCHERS.get(name)
    return launcher


def carry_out(job: Job, resolved: Launch) -> int:
    """Runs a job to its end, prints what failed, and returns the exit code."""
    from paceline.launch.failure_report import describe

    launcher = _launcher(job, resolved)
    rendered = launcher.render(job)
    for notice in rendered.notices:
        say(notice)
    handle = launcher.submit(rendered)
    if job.assignment is None:
        outcome = handle.wait()
    else:
        # The launcher of this host records its job itself; a job on other hosts has to be recorded here.
        outcome = wait_recorded(handle, job)
    if not outcome.in_worker and outcome.reason:
        print(describe(outcome, job), file=sys.stderr, flush=True)
    return int(outcome.exit_code)


def wait_recorded(handle: Handle, job: Job) -> Outcome:
    """Waits for a job on other hosts, and records it on this host, so that `paceline ps` shows it."""
    from paceline.launch.recordings import recording_of

    recording = recording_of(replace(job, watch="", metrics_port=None))
    recording.begin()
    # This code is recorded if the wait raises an error.
    exit_code = 1
    try:
        outcome = handle.wait()
        exit_code = outcome.exit_code
        return outcome
    finally:
        recording.end(exit_code)
