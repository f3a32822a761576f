"""Finds the fastest plan and micro-batch of a script, by short measured runs.

paceline tune [options] script.py [arguments of the script]

The script is rehearsed first: what is predicted not to fit is never launched. The rest runs for some steps each, in
processes that are forked from one that has imported everything, and the fastest is written as settings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paceline.base import env as environment
from paceline.base.errors import ConfigError, LaunchError
from paceline.base.terminal import say
from paceline.cli.script import ScriptProgress, add_script, misplaced_options, need_script
from paceline.config import schema
from paceline.config.sources import Launch, resolve_launch

if TYPE_CHECKING:
    from paceline.launch.job import Job
    from paceline_lens.tune.search import Candidate
    from paceline_lens.tune.tuner import Tuned

_OWN = (
    "--metric", "--trials", "--early-stop", "--first-step", "--last-step", "--order", "--micro", "--micro-sizes", "--arg",
    "--thorough", "--device", "--results", "--overwrite",
)  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline tune [options] script.py [arguments of the script]"
    own = parser.add_argument_group("tuning")
    add = own.add_argument
    add(
        "--metric",
        choices=("throughput", "latency", "flops"),
        help="what to optimise: samples/s, time of a step, or FLOP/s",
    )
    add("--trials", type=int, metavar="N", help="maximum number of trials [50]")
    add("--early-stop", type=int, metavar="N", help="stop after N trials without an improvement [5]")
    add("--first-step", type=int, metavar="N", help="first optimizer step to measure [3]")
    add("--last-step", type=int, metavar="N", help="last optimizer step to measure, after which a trial ends [7]")
    add(
        "--order",
        choices=("model_based", "gridsearch", "random"),
        help="order of trials: by predicted time, as listed, or random",
    )
    add("--micro", metavar="MIN:MAX", help="smallest and largest micro-batch of a rank [1:1024]")
    add(
        "--micro-sizes",
        type=int,
        metavar="N",
        help="how many micro-batch sizes to try with each plan, the largest first [3]",
    )
    add(
        "--arg",
        action="append",
        metavar="micro=--FLAG",
        help="argument of the script for the micro-batch size (micro) or the accumulation (accumulate)",
    )
    add("--thorough", action="store_true", help="also try bucket sizes and ways to gather parameters")
    add("--device", metavar="NAME", help="device that sets the memory, such as a100-24GB; not set: that of this host")
    add("--results", metavar="DIR", help="folder for the results [autotuning_results]")
    add("--overwrite", action="store_true", help="discard the results of an earlier search")
    schema.add_options(parser)
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    need_script(args, "paceline tune", "--procs 2")
    for notice in misplaced_options(args, "paceline tune", _OWN):
        say(notice)
    search = _search_flags(args)
    tune(resolve_launch(schema.given(args)), args.script, args.script_args, search, args.device)
    return 0


@dataclass(frozen=True)
class SearchFlags:
    """Holds the flags of the search.

    Attributes:
        values: attributes of `Tuning` -> their values; attributes without a flag may come from a config of the script.
        places: attributes of `Tuning` -> the flag, for messages.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)


def tune(
    resolved: Launch,
    script: str,
    script_args: Sequence[str],
    search: SearchFlags | None = None,
    device: str | None = None,
    local_rank: bool = False,
) -> tuple[Tuned, Candidate]:
    """Tunes a script and writes the results; other commands that tune a script call it too.

    Args:
        resolved: the merged settings.
        script, script_args: the script, and its arguments.
        search: the flags of the search; None for no flags.
        device: name of the device of a rank; None means that the devices of this host are examined.
        local_rank: whether the script gets `--local_rank=N` before its arguments.

    Returns:
        The finished tuning, and its best candidate.
    """
    from paceline_lens.forecast.calibrate import machine_of, of_this_host
    from paceline_lens.forecast.calibration import find
    from paceline_lens.forecast.device import device_of
    from paceline_lens.forecast.rehearsal import with_devices
    from paceline_lens.tune import results as tune_results
    from paceline_lens.tune.search import Tuning
    from paceline_lens.tune.tuner import Task, Tuner

    search = search or SearchFlags()
    given_values = dict(search.values)
    tuning = replace(Tuning(last_step=7), **given_values)
    tuning.check(search.places)
    job = _job_to_tune(resolved, script, script_args)
    job = replace(job, target=replace(job.target, local_rank=local_rank))
    if device is None:
        here = with_devices(lambda: of_this_host(job.procs, cpu=resolved.run.cpu))
    else:
        here = device_of(device)
    results = tune_results.Results()
    progress = ScriptProgress("paceline tune")

    def tell(tuned: Tuned, candidate: Candidate, odd: str) -> None:
        progress.show(_trial(tuned, candidate, odd))

    calibration = None
    # Times that were measured on this host are of no use for a device that was only named.
    if device is None:
        lookup = find(machine_of(job, here.name, environment.snapshot()))
        calibration = lookup.calibration
        datasheet = "" if calibration else f"the datasheet of {here.name}: "
        say(f"times by {datasheet}{lookup.reason}")
    timeout_s = resolved.run.timeout_s or 600.0
    task = Task(job, resolved.not_in_environment, tuning, given_values, here, timeout_s, calibration)
    tuner = Tuner(task, tell, results.open, results.add)
    say(f"rehearsing {script} for {here.name}")
    try:
        tuned = tuner.run()
    finally:
        progress.clear()
        if tuner.first_failure:
            print(f"--- the first trial that failed\n{tuner.first_failure}\n---", file=sys.stderr, flush=True)
    folder = tune_results.write(tuned)
    best, _ = tuned.progress.best()
    assert best is not None, "a tuning without a result is an error"
    print(tune_results.summary(tuned))
    print(f"written to {folder}; to run the best:\n  {tune_results.command(tuned, best, folder)}")
    return tuned, best


def _job_to_tune(resolved: Launch, script: str, script_args: Sequence[str]) -> Job:
    """Returns the job that the trials run, and prints the notices about it.

    Raises:
        LaunchError: `launch-script`, `tune-device`, `tune-launch`.
    """
    from paceline.launch.host import check_target
    from paceline.launch.make_job import job_of, target_of
    from paceline_lens.forecast.rehearsal import with_devices

    check_target(target_of(resolved.launch, script, script_args))
    job, notices = with_devices(lambda: job_of(resolved, script, script_args, environment.snapshot()))
    if job.nodes > 1 or job.target.kind == "program":
        reason = "several nodes take part" if job.nodes > 1 else "the script is a program of its own"
        raise LaunchError(
            "tune-launch",
            "this cannot be tuned: trials are forked, on this host, from a process that has imported the script's libraries.",
            why=f"{reason} (--nodes {job.nodes}, {job.target.name})",
            fix="tune a Python script on one node, and take the result to the others",
        )
    for notice in (*resolved.notices, *notices):
        say(notice)
    return job


def _search_flags(args: argparse.Namespace) -> SearchFlags:
    """Reads the flags of the search.

    Raises:
        ConfigError: `tune-value`.
    """
    names = {"trials": "trials", "early_stop": "early_stop", "first_step": "first_step", "last_step": "last_step",
             "order": "order", "metric": "metric", "micro_sizes": "micro_sizes", "results": "results_dir"}  # fmt: skip
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for name, attribute in names.items():
        places[attribute] = f"--{name.replace('_', '-')}"
        if getattr(args, name) is not None:
            values[attribute] = getattr(args, name)
    if args.results is not None:
        values["exps_dir"] = f"{args.results}/trials"
    if args.thorough:
        values["fast"] = False
    if args.overwrite:
        values["overwrite"] = True
    if args.micro is not None:
        least, _, most = args.micro.partition(":")
        values |= {"min_micro": _whole(least, args.micro), "max_micro": _whole(most or least, args.micro)}
        places |= dict.fromkeys(("min_micro", "max_micro"), f"--micro {args.micro}")
    if args.arg:
        values["arguments"] = {}
        for pair in args.arg:
            name, _, flag = pair.partition("=")
            values["arguments"][name] = flag
        places["arguments"] = f"--arg {' --arg '.join(args.arg)}"
    return SearchFlags(values, places)


def _whole(text: str, message: str) -> int:
    if text.isdigit():
        return int(text)
    raise ConfigError(
        "tune-value",
        f"--micro cannot be {message!r}.",
        why="expected: MIN:MAX, two numbers of samples",
        fix="--micro 1:64",
    )


def _trial(tuned: Tuned, candidate: Candidate, odd: str) -> str:
    """Returns a line about a trial that has just ended.

    Args:
        tuned: the state of the search.
        candidate: the candidate that was measured.
        odd: a remark on the result; "" for none.
    """
    done = len(tuned.progress.results)
    total = min(len(tuned.queue), tuned.task.tuning.trials)
    result = tuned.progress.results[candidate]
    outcome = f"{result.status}: {result.why}"
    if result.status == "measured":
        outcome = f"{result.seconds * 1e3:.1f} ms a step"
    if result.status == "measured" and result.batch:
        outcome += f", {result.batch / result.seconds:.1f} samples/s"
    if odd:
        outcome += f" ({odd})"
    return f"trial {done} of {total}  {candidate.name}  {outcome}"
