"""Checks that a script computes the same numbers at each width and each plan.

paceline verify [--procs 1,2,4] [--plans zero=2,shard=2,tp=2] [options] script.py [arguments of the script]

The script runs unchanged for some optimizer steps: on one process, once more on one process, and under each plan at each
width, at the same global batch. Exit code: 0 where all is the same but for rounding, 1 where something differs, 2 where
something could not be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from paceline.base import env as environment
from paceline.base.errors import ConfigError, PacelineError
from paceline.config import schema
from paceline.config.settings import RunSettings, settings_of
from paceline.config.sources import Launch, resolve_launch

_USED = ("module", "compat", "config", "threads", "timeout_s")


def configure(parser: argparse.ArgumentParser) -> None:
    """Takes what to compare, settings of `launch`, then the script and its arguments."""
    parser.usage = "paceline verify [options] script.py [arguments of the script]"
    own = parser.add_argument_group("verification")
    own.add_argument("--procs", metavar="N,N", default="1,2", help="numbers of processes to compare [1,2]")
    text = "settings to compare, each with each number of processes; join settings of one plan by + [none]"
    own.add_argument("--plans", metavar="NAME=N,NAME=N", default="", help=text)
    own.add_argument("--steps", type=int, metavar="N", default=20, help="optimizer steps of each run [20]")
    own.add_argument("--json", action="store_true", help="print JSON")
    listed = (*_USED, *settings_of(RunSettings))
    schema.add_options(parser, unlisted=[name for name in settings_of() if name not in listed], without=["procs"])
    parser.add_argument("script", nargs="?", help="Python file; with -m a module")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")


def run(args: argparse.Namespace) -> int:
    """Verifies, and prints what came of it."""
    if args.script is None:
        raise ConfigError(
            "command-line",
            "`paceline verify` needs a script.",
            fix="name it after the options: `paceline verify --procs 1,2 train.py --lr 0.1`",
        )
    widths = _numbers(args.procs)
    plans = _plans(args.plans)
    if args.steps < 1:
        raise _wrong("--steps", str(args.steps), "a whole number, 1 or more", "--steps 20")
    words = args.script_args[1:] if args.script_args[:1] == ["--"] else args.script_args
    resolved = resolve_launch(schema.given(args))
    try:
        return _verify(resolved, args.script, words, widths, plans, args.steps, args.json)
    except PacelineError as error:
        # 1 says that numbers differ.
        print(f"paceline.{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _verify(
    resolved: Launch, script: str, words: list[str], widths: list[int], plans: list[str], steps: int, in_json: bool
) -> int:
    import tempfile  # `--help` needs none of this

    from paceline.launch.host import check_target
    from paceline.launch.job import job_of, target_of
    from paceline.planner.rehearsal import in_child

    check_target(target_of(resolved.launch, script, words))
    # Accelerators are counted in a process of its own: one that has touched them cannot be forked any more.
    resolved = replace(resolved, launch=replace(resolved.launch, procs=max(widths)))
    kind, value = in_child(lambda: job_of(resolved, script, words, environment.snapshot()))
    if kind == "ours":
        raise value
    if kind != "result":
        raise RuntimeError(value)
    job, notices = value
    progress = Progress()
    for notice in (*resolved.notices, *notices):
        progress.say(notice)

    from paceline.verify import report
    from paceline.verify.launched import LaunchedRuns, cases_of
    from paceline.verify.verifier import Verifier

    decisions = tuple(choice for choice in resolved.decisions if choice.source in ("command line", "file"))
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as folder:
        runs = LaunchedRuns(job, decisions, steps, Path(folder))
        verifier = Verifier(runs, progress.tell)
        try:
            verification = verifier.verify(cases_of(widths, plans))
        finally:
            progress.clear()
    print(json.dumps(report.as_json(verification), indent=2) if in_json else report.text(verification, steps))
    return verification.exit_code


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) for part in parts):
        raise _wrong("--procs", text, "numbers of processes, joined by commas", "--procs 1,2,4")
    return [int(part) for part in parts]


def _plans(text: str) -> list[str]:
    """The plans, of which each setting is one of the run."""
    plans = [plan for plan in text.split(",") if plan]
    known = settings_of(RunSettings)
    for plan in plans:
        for pair in plan.split("+"):
            name, equals, value = pair.partition("=")
            if name not in known or not equals or not value:
                raise _wrong("--plans", pair, "NAME=VALUE with the name of a setting", "--plans zero=2,shard=2+tp=2")
    return plans


def _wrong(flag: str, value: str, expected: str, fix: str) -> ConfigError:
    return ConfigError("verify-value", f"{flag} cannot be {value!r}.", why=f"expected: {expected}", fix=fix)


class Progress:
    """Says on standard error which run is under way: one line that changes in a terminal, a line for each run elsewhere."""

    def __init__(self) -> None:
        self._in_terminal = sys.stderr.isatty()
        self._begun = time.monotonic()

    def tell(self, line: str) -> None:
        """Shows a run."""
        shown = f"paceline verify: {time.monotonic() - self._begun:5.1f} s  running {line}"
        if self._in_terminal:
            print(f"\r\x1b[K{shown} ...", end="", file=sys.stderr, flush=True)
        else:
            print(shown, file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """A line that stays."""
        print(f"paceline: {line}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Takes the line away."""
        if self._in_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
