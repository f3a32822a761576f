"""Checks that a script computes the same numbers on several processes and plans.

paceline verify [--procs 1,2,4] [--plans zero=2,shard=2,tp=2] [options] script.py [arguments of the script]
paceline verify --isolation samples,causal,documents,reach=8 script.py [arguments of the script]

The command's own options may also follow the script, if the script does not mention them.

The script runs unchanged for some optimizer steps: on one process, once more on one process, and under each plan at each
width, at the same global batch. A script without Paceline (torchrun, DDP, FSDP2) runs without plans; it is found out what
became of each gradient. With `--plain before.py`, the script from before it used Paceline runs too, as it is. Exit
code: 0 where all is the same but for rounding, 1 where something differs, 2 where something could not be compared.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base import env as environment
from paceline.base.errors import ConfigError, PacelineError
from paceline.base.terminal import say
from paceline.cli.script import ScriptProgress, add_script, need_script, script_words
from paceline.cli.script_text import reads
from paceline.config import schema
from paceline.config.settings import RunSettings, settings_of
from paceline.config.sources import Launch, resolve_launch

if TYPE_CHECKING:
    from paceline.launch.job import Target
    from paceline_lens.verify.launched import LaunchedRuns
    from paceline_lens.verify.result import Verification

_OWN: dict[str, dict[str, Any]] = {
    "--procs": {"metavar": "N,N", "default": "1,2", "help": "numbers of processes to compare [1,2]"},
    "--plans": {
        "metavar": "NAME=N,NAME=N",
        "default": "",
        "help": "plans to compare, each with each number of processes; join the settings of one plan by + [none]",
    },
    "--steps": {"type": int, "metavar": "N", "default": 20, "help": "optimizer steps of each run [20]"},
    "--plain": {
        "metavar": "SCRIPT",
        "default": "",
        "help": "also compare with the script from before it used Paceline, on one process; in quotes with its arguments, "
        "otherwise it gets those of the script [none]",
    },
    "--isolation": {
        "metavar": "LAW,LAW",
        "default": "",
        "help": "instead, probe the model with the script's first batch: samples, causal, documents, reach=N [none]",
    },
    "--json": {"action": "store_true", "default": False, "help": "print JSON"},
}
_USED = ("module", "compat", "config", "threads", "timeout_s")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline verify [options] script.py [arguments of the script]"
    own = parser.add_argument_group("verification")
    for flag, options in _OWN.items():
        own.add_argument(flag, **options)
    listed = (*_USED, *settings_of(RunSettings))
    schema.add_options(parser, unlisted=[name for name in settings_of() if name not in listed], without=["procs"])
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    need_script(args, "paceline verify", "--procs 1,2")
    _take_own_options_after_script(args)
    widths = _numbers(args.procs)
    plans = _plans(args.plans)
    if args.steps < 1:
        raise _wrong("--steps", str(args.steps), "a whole number, 1 or more", "--steps 20")
    laws = _laws(args.isolation)
    resolved = resolve_launch(schema.given(args))
    try:
        words = script_words(args)
        if laws:
            return _probe(resolved, args.script, words, laws, as_json=args.json)
        plain = _plain_target(args.plain, words)
        verification = _verify(resolved, args.script, words, widths, plans, args.steps, plain)
    except PacelineError as error:
        # 1 says that numbers differ.
        print(f"paceline.{type(error).__name__}: {error}", file=sys.stderr)
        return 2

    from paceline_lens.verify import report

    if args.json:
        print(json.dumps(report.as_json(verification), indent=2))
    else:
        print(report.text(verification, args.steps))
    return verification.exit_code


def _take_own_options_after_script(args: argparse.Namespace) -> None:
    """Moves this command's own options from the arguments of the script to `args`.

    `paceline verify train.py --plans zero=2` would otherwise compare no plan and end with 0. An option that the script
    reads stays the script's.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag, options in _OWN.items():
        if not reads(args.script, flag):
            parser.add_argument(flag, **{**options, "default": argparse.SUPPRESS})
    try:
        moved, script_args = parser.parse_known_args(args.script_args)
    except argparse.ArgumentError as error:
        raise ConfigError(
            "command-line", f"paceline verify: {error}", fix="`paceline verify --help` lists its options"
        ) from None
    if not vars(moved):
        return
    flags = ", ".join(f"`--{name}`" for name in vars(moved))
    say(f"options after the script that the script does not mention are taken by `paceline verify`: {flags}.")
    vars(args).update(vars(moved))
    args.script_args = script_args


def _verify(
    resolved: Launch,
    script: str,
    words: list[str],
    widths: list[int],
    plans: list[str],
    steps: int,
    plain: Target | None,
) -> Verification:
    """Runs the script in each case, and compares what it has computed."""
    from paceline_lens.verify.case import cases_of
    from paceline_lens.verify.verifier import Verifier

    with _runs(resolved, script, words, max(widths), steps, plain) as runs:
        progress = ScriptProgress("paceline verify")
        verifier = Verifier(runs, lambda case: progress.show(f"running {case}"))
        try:
            return verifier.verify(cases_of(widths, plans))
        finally:
            progress.clear()


def _probe(resolved: Launch, script: str, words: list[str], laws: dict[str, Any], *, as_json: bool) -> int:
    """Probes the model of the script; returns the exit code: 0 if it is isolated, 1 if it leaks, 2 if it cannot be probed."""
    from dataclasses import asdict

    from paceline_lens.verify.case import RunFailed

    with _runs(resolved, script, words, 1, 1, None) as runs:
        try:
            report = runs.probe(laws)
        except RunFailed as error:
            print(error, file=sys.stderr)
            return 2
    code = int(bool(report.leaks))
    leaks = [{**asdict(leak), "fix": leak.fix} for leak in report.leaks]
    print(json.dumps({"exit_code": code, "laws": report.laws, "leaks": leaks}, indent=2) if as_json else report)
    return code


@contextmanager
def _runs(
    resolved: Launch, script: str, words: list[str], procs: int, steps: int, plain: Target | None
) -> Iterator[LaunchedRuns]:
    """Yields what runs the script on this host."""
    import tempfile  # `--help` needs none of this

    from paceline.launch.host import check_target
    from paceline.launch.make_job import job_of, target_of
    from paceline_lens.forecast.rehearsal import with_devices

    check_target(target_of(resolved.launch, script, words))
    if plain is not None:
        check_target(plain)
    resolved = replace(resolved, launch=replace(resolved.launch, procs=procs))
    job, notices = with_devices(lambda: job_of(resolved, script, words, environment.snapshot()))
    for notice in (*resolved.notices, *notices):
        say(notice)

    from paceline_lens.verify.launched import LaunchedRuns

    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as folder:
        yield LaunchedRuns(job, resolved.not_in_environment, steps, Path(folder), plain)


def _plain_target(text: str, words: list[str]) -> Target | None:
    """Returns the script that `--plain` names, with its own arguments or those of the other script; None for ""."""
    from paceline.launch.job import Target  # `--help` needs none of this

    if not text:
        return None
    try:
        script, *own_words = shlex.split(text)
    except ValueError:  # no word, or a quotation mark without its other half
        raise _wrong("--plain", text, "a Python file and its arguments", "--plain 'before.py --lr 0.1'") from None
    return Target("script", script, tuple(own_words or words))


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) for part in parts):
        raise _wrong("--procs", text, "numbers of processes, joined by commas", "--procs 1,2,4")
    return [int(part) for part in parts]


def _plans(text: str) -> list[str]:
    """Returns the plans, of which each setting is one of the run."""
    plans = [plan for plan in text.split(",") if plan]
    settings = settings_of(RunSettings)
    for plan in plans:
        for pair in plan.split("+"):
            name, equals, value = pair.partition("=")
            if name not in settings or not equals or not value:
                raise _wrong("--plans", pair, "NAME=VALUE with the name of a setting", "--plans zero=2,shard=2+tp=2")
    return plans


def _laws(text: str) -> dict[str, Any]:
    """Returns the keyword arguments of `isolation` that `--isolation` names."""
    laws: dict[str, Any] = {}
    for word in filter(None, text.split(",")):
        name, equals, value = word.partition("=")
        if name in ("samples", "causal", "documents") and not equals:
            laws[name] = True
        elif name == "reach" and value.isdigit():
            laws[name] = int(value)
        else:
            expected = "samples, causal, documents, reach=N, joined by commas"
            raise _wrong("--isolation", word, expected, "--isolation samples,causal")
    return {"samples": False, **laws} if laws else {}


def _wrong(flag: str, value: str, expected: str, fix: str) -> ConfigError:
    return ConfigError("verify-value", f"{flag} cannot be {value!r}.", why=f"expected: {expected}", fix=fix)
