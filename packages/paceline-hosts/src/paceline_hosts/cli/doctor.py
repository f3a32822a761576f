"""Checks hosts for problems that would stop a run, and suggests a fix for each.

Without --hostfile it checks this host, or all hosts of the SLURM allocation in which it runs.
Exit code: 1 if there is a problem, else 0.
"""

from __future__ import annotations

import argparse
import json
import os
import time

from paceline.base import env as environment
from paceline.cli.script import ScriptProgress
from paceline.config import schema
from paceline.config.settings import LaunchSettings, settings_of
from paceline.config.sources import resolve_launch

_USED = ("config", "hostfile", "include", "exclude", "ssh_port", "launcher_args")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline doctor [--hostfile FILE] [options]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (__doc__ or "").partition("\n\n")[2]
    unused = [name for name in settings_of() if name not in _USED]
    schema.add_options(parser, LaunchSettings, without=unused)
    text = "folder that all hosts share, for example for checkpoints; not set: the working directory"
    parser.add_argument("--folder", metavar="DIR", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from paceline_hosts.doctor.examine import Examiner
    from paceline_hosts.doctor.hosts import reach
    from paceline_hosts.doctor.report import DoctorReport

    started_at = time.monotonic()
    reached = reach(resolve_launch(schema.given(args)), environment.snapshot())
    folder = os.path.abspath(args.folder or os.getcwd())
    progress = ScriptProgress("paceline doctor")
    examiner = Examiner(reached, folder, args.folder is not None, progress.show)
    try:
        examination = examiner.examine()
    finally:
        examiner.close()
        progress.clear()
    report = DoctorReport.of(examination, time.monotonic() - started_at)
    print(json.dumps(report.to_json(), indent=2) if args.json else report.text())
    return report.exit_code
