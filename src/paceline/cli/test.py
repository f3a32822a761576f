"""Checks this machine with a small real run on two processes (or --procs).

The processes are started by `paceline launch`, so that what passes here is what a script gets: its options and
its config file count here too.
"""

from __future__ import annotations

import argparse
import sys

from paceline.cli.main import main
from paceline.config import schema
from paceline.config.given import Given
from paceline.config.sources import resolve_launch

CHECK = "paceline.cli._self_check"


def configure(parser: argparse.ArgumentParser) -> None:
    """Takes the options of `launch`."""
    schema.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Launches the checks; 0 where all passed."""
    given = schema.given(args)
    told = resolve_launch(given)
    source = {row.field: row.source for row in told.decisions}
    if source["procs"] == "default":
        given = (*given, Given("procs", "2", "command line", "--procs"))
        if source["cpu"] == "default" and _accelerators() == 1:  # two processes cannot share one
            given = (*given, Given("cpu", "true", "command line", "--cpu"))
        told = resolve_launch(given)
    procs = told.launch.procs if told.launch.procs != "auto" else max(_accelerators(), 1)
    words = [*schema.words(given), "--module", CHECK, "--procs", str(int(procs) * told.launch.nodes)]
    code = main(["launch", *words])
    if code == 0 and not told.launch.dry_run:
        print("This machine is ready.", file=sys.stderr)
    return code


def _accelerators() -> int:
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0
