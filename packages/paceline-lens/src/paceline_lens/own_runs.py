"""Runs of the user's script that a command of this package starts by itself: what is handed to them, and how they end."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.config.given import Choice
from paceline.config.sources import HANDED, hand_over
from paceline.launch.job import Job
from paceline.launch.launcher import LAUNCHERS, Outcome


def handed(
    decisions: Iterable[Choice], settings: Mapping[str, Any], where: str, left_out: Iterable[str] = ()
) -> dict[str, str]:
    """Returns the variables with what was said of a run, and in its place the settings of the command.

    Args:
        decisions: what the command line and files say.
        settings: they replace the decisions of their names.
        where: where they come from, for `explain`.
        left_out: names of further decisions that do not count.
    """
    replaced = {*settings, *left_out}
    choices = [decision for decision in decisions if decision.field not in replaced]
    choices += [Choice(name, value, "command line", where) for name, value in settings.items()]
    return {HANDED: hand_over(choices)}


def run_here(job: Job) -> Outcome:
    """Runs a job on this host to its end.

    Raises:
        KeyboardInterrupt, SystemExit: the launcher turns a signal to this process into an exit code. It was meant for the
            whole command, not for one of its runs.
    """
    launcher = LAUNCHERS.get("local")
    outcome: Outcome = launcher.submit(launcher.render(job)).wait()
    if outcome.failure is None and outcome.exit_code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.failure is None and outcome.exit_code == 128 + signal.SIGTERM:
        raise SystemExit(outcome.exit_code)
    return outcome
