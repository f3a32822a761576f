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
from paceline.cli._script import add_script, need_script, say
from paceline.config import schema
from paceline.config.given import Choice
from paceline.config.settings import LaunchSettings, launch_classes, settings_of
from paceline.config.sources import Launch, resolve_launch
from paceline.launch.launcher import LAUNCHERS, Handle, Job, Launcher, Outcome
from paceline.world.layout import AXES


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline launch [options] script.py [arguments of the script]"
    schema.add_options(parser)
    add_script(parser, "Python file; with -m a module, with --no-python a program")


def run(args: argparse.Namespace) -> int:
    """Runs the script to its end; returns the exit code of the first failing rank, else 0."""
    from paceline.launch.host import check_target
    from paceline.launch.job import job_of, target_of
    from paceline.launch.launchers.slurm.allocation import completed
    from paceline.launch.remote.hosts import job_on_hosts, starts_elsewhere, without_hostfile

    resolved = resolve_launch(schema.given(args))
    need_script(args, "paceline launch", "--procs 2")
    env = environment.snapshot()
    resolved = _alone(resolved) if _asks_for_help(args.script_args) else completed(resolved, env)
    notices: list[str] = []
    if starts_elsewhere(resolved):
        job = job_on_hosts(resolved, args.script, args.script_args, env)
    else:
        without_hostfile(resolved)
        check_target(target_of(resolved.launch, args.script, args.script_args))
        job, notices = job_of(resolved, args.script, args.script_args, env)
    check_plan(resolved, job)
    for notice in (*resolved.notices, *notices):
        say(notice)
    if resolved.launch.dry_run:
        return _show(job, resolved)
    return carry_out(job, resolved)


def check_plan(resolved: Launch, job: Job) -> None:
    """Refuses axes that do not divide the processes, before any is started; what the model decides is for the script.

    Raises:
        PlanError: `plan-size`, `plan-zero`.
    """
    axes = {"shard", "zero", *AXES}
    if job.least or axes.isdisjoint(resolved.given):
        return  # nobody divides anything, or the number of nodes may change
    from paceline.plan.plan import Decision
    from paceline.plan.resolve import draft

    world_size = job.procs * job.nodes
    if job.assignment is not None:
        world_size = sum(len(host.ids) for host in job.assignment.hosts)
    draft(resolved.run.by_name(), [Decision(**vars(row)) for row in resolved.decisions], world_size)


def _asks_for_help(words: Sequence[str]) -> bool:
    """Whether a script is run for its help alone. `-h` may also be an option of the script, which takes a value."""
    return "--help" in words or list(words) == ["-h"]


def _alone(resolved: Launch) -> Launch:
    """The settings of one process on this host: help is the same on all ranks, and needs no other."""
    count = {"module", "no_python", "compat", "dry_run"}
    launch = LaunchSettings(procs=1, **{name: getattr(resolved.launch, name) for name in count})
    decisions = []
    for row in resolved.decisions:
        if row.field in count or row.field == "procs" or row.field not in settings_of(*launch_classes()):
            decisions.append(row)
        elif row.field in settings_of(LaunchSettings):
            decisions.append(Choice(row.field, getattr(launch, row.field)))
    return replace(resolved, launch=launch, decisions=tuple(decisions), cluster={})


def _show(job: Job, resolved: Launch) -> int:
    from paceline.cli.explain import table
    from paceline.launch.host import name

    rendered = _launcher(job, resolved).render(job)
    if rendered.document:
        print(rendered.document)  # alone, so that it can be written to a file and used
        print("settings:", table(resolved, changed=True), sep="\n", file=sys.stderr)
        return 0
    print(rendered.text(name()), "\n\nsettings:", table(resolved, changed=True), sep="\n")
    return 0


def _launcher(job: Job, resolved: Launch) -> Launcher:
    """Who starts a job: on other hosts, whoever was named."""
    name = "local" if job.assignment is None else resolved.launch.launcher
    launcher: Launcher = LAUNCHERS.get(name)
    return launcher


def carry_out(job: Job, resolved: Launch) -> int:
    """Runs a job to its end, and says what failed; returns the exit code."""
    from paceline.launch.failure_report import describe

    launcher = _launcher(job, resolved)
    handle = launcher.submit(launcher.render(job))
    if job.assignment is None:
        outcome = handle.wait()
    else:
        outcome = wait_recorded(handle, job)  # what starts processes here records them itself
    if not outcome.in_worker and outcome.reason:
        print(describe(outcome, job), file=sys.stderr, flush=True)
    return int(outcome.exit_code)


def wait_recorded(handle: Handle, job: Job) -> Outcome:
    """Waits for a job on other hosts, which `paceline ps` shows here meanwhile."""
    from paceline.launch.recording import Recording

    recording = Recording(replace(job, watch=""))
    recording.begin()
    exit_code = 1
    try:
        outcome = handle.wait()
        exit_code = outcome.exit_code
        return outcome
    finally:
        recording.end(exit_code)
