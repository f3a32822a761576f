"""Shows a warning, or a usage error of argparse, only once if several processes of a host print the same text.

The processes share one file for each text. Its length is the number of times that the text was shown. Each process asks this
file before it prints, and prints only if no other process has shown the text as often. A text that differs between ranks is
therefore shown by each of them. The processes keep their terminal: nothing passes through the launcher.
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


class ShownTexts:
    """Counts the texts that the processes of one host have shown.

    Args:
        folder: a folder of the processes of this host.
        name: the prefix of the files. Each round has another one, so that a restart shows its warnings again.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._own_counts: Counter[str] = Counter()

    def is_first(self, text: str) -> bool:
        """Returns whether this process must show a text: no other process of this host has shown it as often."""
        digest = sha256(text.encode(errors="replace")).hexdigest()[:24]
        self._own_counts[digest] += 1
        try:
            with (self._folder / f"{self._name}-{digest}").open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                num_shown = file.seek(0, io.SEEK_END)
                if num_shown >= self._own_counts[digest]:
                    return False
                file.write(b".")
        except OSError:
            # The launcher has removed the folder, or the disk is full. Better to show a text twice than not at all.
            return True
        return True


def install(shown: ShownTexts | None) -> None:
    """Replaces the functions that print warnings and usage errors in this process.

    Args:
        shown: the texts that were shown; None if no other process writes to this standard error, so every text is shown.
    """
    if shown is not None:
        _share_warnings(shown)
    _share_usage_errors(shown)


def _share_warnings(shown: ShownTexts) -> None:
    """Replaces `warnings.showwarning`, as its documentation allows."""
    show = warnings.showwarning

    def show_once(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if file is not None or shown.is_first(warnings.formatwarning(message, category, filename, lineno, line)):
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_once


def _share_usage_errors(shown: ShownTexts | None) -> None:
    """Lets one process print the usage error of argparse, and adds its message to the exception for the report."""
    usage_error = argparse.ArgumentParser.error

    def error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        first = shown is None or shown.is_first(f"{parser.prog}: {message}")
        try:
            with nullcontext() if first else redirect_stderr(io.StringIO()):
                usage_error(parser, message)
        except SystemExit as error_exit:
            error_exit.add_note(message)
            raise

    parser_class: Any = argparse.ArgumentParser
    parser_class.error = error


def of_report(report: str) -> ShownTexts:
    """Returns the texts that processes share if their reports are in the same folder and have the same round number."""
    path = Path(report)
    return ShownTexts(path.parent, f"shown-{path.name.partition('-')[0]}")
