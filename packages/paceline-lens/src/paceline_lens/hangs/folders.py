"""Where the processes of a host write what they wait for, and their stacks."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.base import env
from paceline.base.temporary import temporary_folder
from paceline.world.stacks import dump


def folder_of_launcher() -> Path | None:
    """Returns the folder of the launcher of this process; None without a launcher, or if it has ended."""
    name = env.get(dump.FOLDER)
    if not name or not os.path.isdir(name):
        return None
    return Path(name)


def folder_under_torchrun() -> Path | None:
    """Returns a folder that the ranks of this host share under torchrun, and lets this process write its stacks there.

    The first rank creates it. The result is None without torchrun, or if the folder belongs to another user.
    """
    if env.get("TORCHELASTIC_RUN_ID") is None or not hasattr(os, "getuid"):
        return None
    folder = Path(temporary_folder()) / f"paceline-stacks-{os.getuid()}-{os.getppid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        return None
    dump.enter(folder)
    return folder
