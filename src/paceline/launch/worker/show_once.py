"""What the processes of a host say alike is shown once: Python's warnings, and argparse's words on a wrong command line.

Each process asks a file that they share whether this text has been shown as often as it wants to show it by now; the first
to ask shows it. A text that differs between ranks is therefore shown by each of them, and nothing passes through the
launcher, so that the processes keep the terminal.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import warnings
from collections import Counter
from contextlib import nullcontext, redirect_stderr
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn, TextIO


class Once:
    """The texts that the processes of one host have shown.

    Args:
        folder: shared by the processes of this host, and theirs alone.
        name: begins the names of the files, so that a restart shows its warnings again.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._mine: Counter[str] = Counter()

    def is_first(self, text: str) -> bool:
        """Whether this process is to show a text, as no other process of this host has shown it so often."""
        digest = sha256(text.encode(errors="replace")).hexdigest()[:24]
        self._mine[digest] += 1
        try:
            with (self._folder / f"{self._name}-{digest}").open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                # The file's length is how often the text was shown.
                if file.seek(0, io.SEEK_END) >= self._mine[digest]:
                    return False
                file.write(b".")
        except (
            OSError
        ):  # the launcher has removed the folder, or the disk is full: shown twice is better than not at all
            return True
        return True


def enter(once: Once | None) -> None:
    """From now on this process shows what others have not shown.

    Args:
        once: shared with the others; None where this process alone writes to its standard error, so that all is shown.
    """
    if once is not None:
        _share_warnings(once)
    _share_usage_errors(once)


def _share_warnings(once: Once) -> None:
    """Shows a warning through `warnings.showwarning`, which is there to be replaced."""
    show = warnings.showwarning

    def show_once(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if file is not None or once.is_first(warnings.formatwarning(message, category, filename, lineno, line)):
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_once


def _share_usage_errors(once: Once | None) -> None:
    """Lets one process say what argparse says of a wrong command line, and keeps the sentence for the launcher's report."""
    usage_error = argparse.ArgumentParser.error

    def error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        first = once is None or once.is_first(f"{parser.prog}: {message}")
        try:
            with nullcontext() if first else redirect_stderr(io.StringIO()):
                usage_error(parser, message)
        except SystemExit as leaving:
            leaving.add_note(message)
            raise

    parser_class: Any = argparse.ArgumentParser
    parser_class.error = error


def of_report(report: str) -> Once:
    """What the processes share whose reports lie in one folder, under the number of their round."""
    path = Path(report)
    return Once(path.parent, f"shown-{path.name.partition('-')[0]}")
