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
from paceline.base.errors import ConfigError
from paceline.config import schema
from paceline.config.given import Choice
from paceline.config.settings import LaunchSettings, settings_of
from paceline.config.sources import Launch, resolve_launch
from paceline.launch.launcher import LAUNCHERS, Job, Launcher
from paceline.world.layout import AXES


def configure(parser: argparse.ArgumentParser) -> None:
    """Takes all settings, then the script and its arguments."""
    parser.usage = "paceline launch [options] script.py [arguments of the script]"
    schema.add_options(parser)
    parser.add_argument("script", nargs="?", help="Python file; with -m a module, with --no-python a program")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")


def run(args: argparse.Namespace) -> int:
    """Runs the script to its end; returns the exit code of the first failing rank, else 0."""
    from paceline.launch.host import check_target
    from paceline.launch.hosts import job_on_hosts, starts_elsewhere, without_hostfile
    from paceline.launch.job import job_of, target_of

    told = resolve_launch(schema.given(args))
    if args.script is None:
        raise ConfigError(
            "command-line",
            "`paceline launch` needs a script.",
            fix="name it after the options: `paceline launch --procs 2 train.py --lr 0.1`",
        )
    if _asks_for_help(args.script_args):
        told = _alone(told)
    env, notices = environment.snapshot(), list[str]()
    if starts_elsewhere(told):
        job = job_on_hosts(told, args.script, args.script_args, env)
    else:
        without_hostfile(told)
        check_target(target_of(told.launch, args.script, args.script_args))
        job, notices = job_of(told, args.script, args.script_args, env)
    check_plan(told, job)
    for notice in (*told.notices, *notices):
        print(f"paceline: {notice}", file=sys.stderr)
    if told.launch.dry_run:
        return _show(job, told)
    return carry_out(job, told)


def check_plan(told: Launch, job: Job) -> None:
    """Refuses axes that do not divide the processes, before any is started; what the model decides is for the script.

    Raises:
        PlanError: `plan-size`, `plan-zero`.
    """
    axes = {"shard", "zero", *AXES}
    if job.least or not any(row.field in axes and row.source != "default" for row in told.decisions):
        return  # nobody divides anything, or the number of nodes may change
    from paceline.plan.plan import Decision
    from paceline.plan.resolve import draft

    world_size = job.procs * job.nodes
    if job.assignment is not None:
        world_size = sum(len(host.ids) for host in job.assignment.hosts)
    draft(vars(told.run), [Decision(**vars(row)) for row in told.decisions], world_size)


def _asks_for_help(words: Sequence[str]) -> bool:
    """Whether a script is run for its help alone. `-h` may also be an option of the script, which takes a value."""
    return "--help" in words or list(words) == ["-h"]


def _alone(told: Launch) -> Launch:
    """The settings of one process on this host: help is the same on all ranks, and needs no other."""
    launch = told.launch
    asked = {"procs": 1, "module": launch.module, "no_python": launch.no_python, "compat": launch.compat}
    asked["dry_run"] = launch.dry_run
    alone = LaunchSettings(**asked)
    kept = [row for row in told.decisions if row.field in asked or row.field not in settings_of(LaunchSettings)]
    defaults = [Choice(name, getattr(alone, name)) for name in settings_of(LaunchSettings) if name not in asked]
    return replace(told, launch=alone, decisions=(*kept, *defaults))


def _show(job: Job, told: Launch) -> int:
    from paceline.cli.explain import table
    from paceline.launch.host import name

    rendered = _launcher(job, told).render(job)
    print(rendered.text(name()), "\n\nsettings:", table(told, changed=True), sep="\n")
    return 0


def _launcher(job: Job, told: Launch) -> Launcher:
    """Who starts a job: on other hosts, whoever was named."""
    found: Launcher = LAUNCHERS.get("local" if job.assignment is None else told.launch.launcher)
    return found


def carry_out(job: Job, told: Launch) -> int:
    """Runs a job to its end, and says what failed; returns the exit code."""
    from paceline.launch.report import describe

    launcher = _launcher(job, told)
    outcome = launcher.submit(launcher.render(job)).wait()
    if not outcome.in_worker and (outcome.failure or outcome.elsewhere):
        print(describe(outcome, job), file=sys.stderr, flush=True)
    return int(outcome.exit_code)
