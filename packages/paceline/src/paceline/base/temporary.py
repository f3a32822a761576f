"""Finds the folder for files that are needed only while a command runs."""

from __future__ import annotations

import os
import tempfile

from paceline.base import env
from paceline.base.errors import ConfigError


def temporary_folder() -> str:
    """Returns the system's folder for temporary files, as `tempfile` finds it.

    Raises:
        ConfigError: `temporary-folder`: there is no folder that this user may write to.
    """
    try:
        folder = tempfile.gettempdir()
        # `tempfile` looks once and remembers the folder, which may have been removed since.
        usable = os.access(folder, os.W_OK | os.X_OK)
        reason = "" if usable else f"{folder} is missing, or may not be written to"
    except FileNotFoundError as error:  # `tempfile` has tried to write into each folder that it knows
        folder = ""
        reason = error.strerror or str(error)
    if reason:
        raise ConfigError(
            "temporary-folder",
            "there is no folder for temporary files.",
            why=[reason, f"TMPDIR is {env.snapshot().get('TMPDIR') or 'not set'}"],
            fix="name a folder that you may write to, with room in it: `TMPDIR=/path/to/a/folder paceline ...`",
        )
    return folder
