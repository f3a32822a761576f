"""Sends values that the server of a tracker did not receive during a run.

A run whose tracker does not answer keeps its values in files `unsent-TRACKER-ID.jsonl` in its folder, and says so. Once the
server is back, `paceline trackers runs/digits/unsent-mlflow-6f0c.jsonl` sends them, each with its own time and step, and
deletes the file. Several files, and folders in which to look for them, may be given.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.base.errors import Problem, TrackerError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="a file of unsent values, or a folder with such files, such as runs"
    )


def run(args: argparse.Namespace) -> int:
    """Sends each file.

    Raises:
        TrackerError: `tracker-file`, `tracker-unsent`, `tracker-refused`; after the other files have been sent.
    """
    from paceline_lens.trackers.unsent import send_file

    problems: list[Problem] = []
    for path in _files(args.files):
        try:
            sent = send_file(path)
            print(f"{path}: {sent:,} values sent")
        except TrackerError as error:
            problems += error.problems
    if problems:
        raise TrackerError.of(problems)
    return 0


def _files(words: list[str]) -> list[Path]:
    files: list[Path] = []
    for word in words:
        path = Path(word)
        if path.is_dir():
            files += sorted(path.rglob("unsent-*.jsonl"))
        else:
            files.append(path)
    if not files:
        print("no values wait to be sent there")
    return files
