"""Checks this machine with a small real run on two processes (or --procs).

The processes are started by `paceline launch`, so that what passes here is what a script gets: its options and
its config file count here too.
"""

from __future__ import annotations

import argparse

from paceline.cli.main import main
from paceline.config import schema
from paceline.config.given import Given
from paceline.config.kinds import least_and_most
from paceline.config.settings import RunSettings, settings_of
from paceline.config.sources import resolve_launch
from paceline.launch import host

CHECK = "paceline_lens.cli._self_check"


# The checks are a module of ours that trains in float32 with the whole model on each process.
_USED = ("cpu", "debug", "timeout_s")


def configure(parser: argparse.ArgumentParser) -> None:
    unused = [name for name in settings_of(RunSettings) if name not in _USED]
    schema.add_options(parser, without=["module", "no_python", "compat", *unused])


def run(args: argparse.Namespace) -> int:
    """Launches the checks; 0 where all passed."""
    given = schema.given(args)
    resolved = resolve_launch(given)
    source = {row.field: row.source for row in resolved.decisions}
    accelerators = 0 if resolved.run.cpu else host.accelerators().count
    procs = resolved.launch.procs if isinstance(resolved.launch.procs, int) else max(accelerators, 1)
    if source["procs"] == "default":
        procs = 2
        given = (*given, Given("procs", "2", "command line", "--procs"))
        if accelerators == 1 and source["cpu"] == "default":  # two processes cannot share one
            given = (*given, Given("cpu", "true", "command line", "--cpu"))
    least, most = least_and_most(resolved.launch.nodes)
    expected = str(procs * least) if least == most else f"{procs * least}:{procs * most}"
    words = [*schema.words(given), "--module", CHECK, "--procs", expected]
    return main(["launch", *words])
