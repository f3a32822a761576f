"""The command `deepspeed` of an installed door: `paceline deepspeed` under its own name."""

from __future__ import annotations

import sys

from paceline.cli import main as command_line


def main() -> int:
    """Runs the command; returns its exit code."""
    return command_line.main(["deepspeed", *sys.argv[1:]])
