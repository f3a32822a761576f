"""The folder for files that last as long as a command."""

from __future__ import annotations

import os
import tempfile

from paceline.base import env
from paceline.base.errors import ConfigError


def temporary_folder() -> str:
    """The system's folder for temporary files, as `tempfile` finds it.

    Raises:
        ConfigError: `temporary-folder`, where there is none that this user may write to.
    """
    try:
        folder = tempfile.gettempdir()
        reason = "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} is missing, or may not be written to"
    except FileNotFoundError as error:  # it has tried to write into each
        folder, reason = "", error.strerror or str(error)
    if reason:
        raise ConfigError(
            "temporary-folder",
            "there is no folder for temporary files.",
            why=[reason, f"TMPDIR is {env.snapshot().get('TMPDIR') or 'not set'}"],
            fix="name a folder that you may write to, with room in it: `TMPDIR=/path/to/a/folder paceline ...`",
        )
    return folder
