"""Kills processes of a job on purpose, and measures what its recovery costs.

paceline rehearse [options] script.py [arguments of the script]

The job runs as `paceline launch` with the same options would start it, on this machine. `{folder}` in the arguments of the
script stands for a folder of each run, for scripts that write files by themselves. Exit code: 0 where every failure was
survived with the same losses, 1 where one was not, 2 where the job could not be rehearsed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base import env as environment
from paceline.base.errors import ConfigError, PacelineError
from paceline.base.terminal import say
from paceline.cli.script import ScriptProgress, add_script, misplaced_options, need_script, script_words
from paceline.config import schema
from paceline.config.kinds import least_and_most
from paceline.config.settings import settings_of
from paceline.config.sources import Launch, resolve_launch

if TYPE_CHECKING:
    from paceline_lens.rehearse.drill import RehearsedJob

_FAILURES = ("rank", "hang", "host", "preempt", "link")
_OWN: dict[str, dict[str, Any]] = {
    "--failures": {
        "metavar": "NAME,...",
        "default": ",".join(_FAILURES),
        "help": f"some of {','.join(_FAILURES)} [all]",
    },
    "--seed": {"type": int, "metavar": "N", "default": 0, "help": "draws the steps and ranks [0]"},
    "--minutes": {
        "type": float,
        "metavar": "N",
        "default": 10.0,
        "help": "longest time of the run without a failure, which ends after its second save [10]",
    },
    "--devices": {
        "metavar": "N,N",
        "default": "1024,16384,131072",
        "help": "numbers of devices to forecast; settings are proposed for the first [1024,16384,131072]",
    },
    "--mtbf-hours": {
        "type": float,
        "metavar": "N",
        "default": None,
        "help": "mean time between failures of one device, with its share of host and network [50700, as Llama 3's]",
    },
    "--failures-per-day": {
        "type": float,
        "metavar": "N",
        "default": None,
        "help": "the same as a number of failures of the first number of --devices together",
    },
    "--folder": {"metavar": "DIR", "default": None, "help": "keep all that is written here [a folder that is removed]"},
    "--json": {"action": "store_true", "default": False, "help": "print JSON"},
}
# What has no meaning for a job that is disturbed on this machine, or is chosen by the rehearsal.
_WITHOUT = (
    "dry_run", "exclude", "hostfile", "include", "launcher", "launcher_args", "log_dir", "main_address", "main_port",
    "metrics_port", "no_python", "node_rank", "resume", "ssh_port", "store", "tee", "wait", "watch", "watch_dir",
)  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline rehearse [options] script.py [arguments of the script]"
    own = parser.add_argument_group("rehearsal")
    for flag, options in _OWN.items():
        own.add_argument(flag, **options)
    schema.add_options(parser, without=_WITHOUT)
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    need_script(args, "paceline rehearse", "--procs 2")
    failures = _failures(args.failures)
    devices = _devices(args.devices)
    device_mtbf_s = _device_mtbf_s(args, devices)
    if not args.minutes >= 0.01:
        raise _wrong(
            "--minutes", str(args.minutes), "a number, 0.01 or more", f"--minutes {_OWN['--minutes']['default']:g}"
        )
    resolved = resolve_launch(schema.given(args))
    flags = [*_OWN, *(setting.flag for setting in settings_of().values())]
    for notice in (*resolved.notices, *misplaced_options(args, "paceline rehearse", flags)):
        say(notice)
    from paceline_lens.rehearse import report
    from paceline_lens.rehearse.rehearsal import FailureRehearsal, RehearsalLimits

    limits = RehearsalLimits(args.seed, args.minutes * 60)
    # Otherwise the launchers of a drill would outlive this command.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    progress = ScriptProgress("paceline rehearse")
    try:
        job = _job(args, resolved)
        with _folder(args.folder) as folder:
            result = FailureRehearsal(job, Path(folder), limits, progress.show).run(failures, devices, device_mtbf_s)
    except PacelineError as error:
        progress.clear()
        print(f"paceline.{type(error).__name__}: {error}", file=sys.stderr)
        # Without a checkpoint no failure is survived; all other errors say that nothing was rehearsed.
        return 1 if error.code == "rehearse-no-checkpoint" else 2
    finally:
        signal.signal(signal.SIGTERM, before)
    progress.clear()
    print(json.dumps(report.as_json(result), indent=2) if args.json else report.text(result))
    return result.exit_code


def _job(args: argparse.Namespace, resolved: Launch) -> RehearsedJob:
    """Returns the job, after the checks that need no process."""
    from paceline.launch.host import check_target
    from paceline.launch.make_job import starts_elsewhere, target_of
    from paceline_lens.rehearse.drill import RehearsedJob

    launch = resolved.launch
    words = script_words(args)
    check_target(target_of(launch, args.script, words))
    least, nodes = least_and_most(launch.nodes)
    if starts_elsewhere(resolved) or least != nodes:
        given = f"--nodes {launch.nodes}" if least != nodes else "the settings name other hosts"
        raise ConfigError(
            "rehearse-value",
            "failures are rehearsed on this machine, with a fixed number of hosts.",
            why=given,
            fix="`--nodes 2` lets this machine stand for two hosts",
        )
    # The drills have restarts of their own.
    passed_on = [value for value in schema.given(args) if value.name not in ("module", "max_restarts")]
    kind = "module" if launch.module else "script"
    job = RehearsedJob(
        tuple(schema.words(passed_on)), kind, args.script, tuple(words), nodes, env=environment.snapshot()
    )
    if resolved.run.timeout_s is not None:
        job = RehearsedJob(**{**vars(job), "timeout_s": resolved.run.timeout_s})
    if launch.compat and not job.names_folder:
        raise ConfigError(
            "rehearse-folder",
            "a script for another library must be told where to save while it is rehearsed.",
            why=f"compat={launch.compat}: its checkpoints go where the script says, and the real ones could be there",
            fix="give its output folder as {folder}, which stands for one of each run: `paceline rehearse --compat "
            f"{launch.compat} {args.script} --output_dir {{folder}}`",
        )
    return job


def _folder(path: str | None) -> Any:
    """Returns a context with a folder for all drills: in the working directory, since that is the disk of the real job."""
    if path is None:
        return tempfile.TemporaryDirectory(prefix=".paceline-rehearse-", dir=".", ignore_cleanup_errors=True)
    folder = Path(path)
    if folder.exists() and any(folder.iterdir()):
        raise _wrong("--folder", path, "a folder that is empty or not there yet", f"--folder {path}-2")
    folder.mkdir(parents=True, exist_ok=True)
    return nullcontext(str(folder))


def _failures(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in _FAILURES:
            raise _wrong(
                "--failures", name, f"names out of {', '.join(_FAILURES)}, joined by commas", "--failures rank,hang"
            )
    return names


def _devices(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) for part in parts):
        raise _wrong("--devices", text, "numbers of devices, joined by commas", "--devices 1024,16384")
    return [int(part) for part in parts]


def _device_mtbf_s(args: argparse.Namespace, devices: list[int]) -> float:
    """Returns the mean time between failures of one device, in seconds."""
    from paceline_lens.rehearse.report import LLAMA_3_DEVICE_HOURS

    hours, per_day = args.mtbf_hours, args.failures_per_day
    if hours is not None and per_day is not None:
        raise _wrong(
            "--failures-per-day", f"{per_day:g}", "one of both: --mtbf-hours says it too", f"--mtbf-hours {hours:g}"
        )
    for flag, value in (("--mtbf-hours", hours), ("--failures-per-day", per_day)):
        if value is not None and not 0 < value < float("inf"):
            raise _wrong(flag, f"{value:g}", "a number above 0", f"{flag} {7.8 if per_day is not None else 50700:g}")
    if per_day is not None:
        return float(86400 / per_day * devices[0])
    return float((LLAMA_3_DEVICE_HOURS if hours is None else hours) * 3600)


def _wrong(flag: str, value: str, expected: str, fix: str) -> ConfigError:
    return ConfigError("rehearse-value", f"{flag} cannot be {value!r}.", why=f"expected: {expected}", fix=fix)
