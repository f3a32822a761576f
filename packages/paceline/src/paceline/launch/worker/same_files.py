"""Says once that several processes of a host write one file by `torch.save`, or event files into one folder of TensorBoard.

The last process to write such a file wins, and one that reads it meanwhile finds a damaged file. TensorBoard draws all event
files of a folder as one curve, which then jumps between the ranks. Each process claims what it writes by a file in the folder
of the launcher's reports; who finds the claim of another rank says so.

`torch.save` opens its file in C++, where no audit hook sees it, so it is wrapped. TensorBoard opens event files in Python.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from paceline.base import env as environment
from paceline.base.terminal import say
from paceline.launch.worker.show_once import ShownTexts

_ON_ONE_RANK = "Write on one rank: `if accelerator.is_main_process:`, or `if int(os.environ['RANK']) == 0:`"


class Claims:
    """What each process of this host has written in this round.

    Args:
        report: the file for the traceback of this process; its folder and the number in its name are those of the round.
        shown: the texts that the processes have shown.
    """

    def __init__(self, report: str, shown: ShownTexts) -> None:
        path = Path(report)
        self._folder = path.parent
        self._prefix = f"writer-{path.name.partition('-')[0]}"
        self._shown = shown
        self._told: set[str] = set()

    def of(self, path: str) -> list[int]:
        """Claims a path for this rank. Returns all ranks of this host that have claimed it."""
        rank = environment.get("RANK")
        digest = sha256(os.path.realpath(path).encode(errors="surrogateescape")).hexdigest()[:24]
        name = f"{self._prefix}-{digest}."
        try:
            # Each claims first and looks then, so that one of two at the same moment sees both.
            (self._folder / f"{name}{rank}").touch()
            return sorted(int(claim.suffix[1:]) for claim in self._folder.glob(f"{name}*"))
        except OSError:
            return []  # the launcher has removed the folder, or the disk is full, which the script will notice itself

    def file_is_written(self, path: str) -> None:
        """Says it where another rank writes this file too."""
        if not _is_device(path):
            how = (
                f"write the same file by torch.save: {path}. {_ON_ONE_RANK}, or with the rank in the name of the file."
            )
            self._say(path, how)

    def events_are_written(self, folder: str) -> None:
        """Says it where another rank writes event files into this folder too."""
        how = f"write event files of TensorBoard into one folder: {folder}. {_ON_ONE_RANK}, or each rank into its own folder."
        self._say(folder, how)

    def _say(self, path: str, how: str) -> None:
        if path in self._told:
            return
        if len(self.of(path)) > 1:
            self._told.add(path)
            if self._shown.is_first(how):
                say(f"several ranks {how}")


def watch(claims: Claims) -> None:
    """Looks at the files that this process writes, from now on to its end."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:  # the launcher has imported it where it starts workers by fork
        save = torch.save

        @functools.wraps(save)
        def claiming(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(f, str | os.PathLike):
                claims.file_is_written(os.fspath(f))
            save(obj, f, *args, **kwargs)

        torch.save = claiming

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(args[0], str | bytes) or not args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        path = os.fsdecode(args[0])
        if "events.out.tfevents." in path:
            claims.events_are_written(os.path.dirname(os.path.abspath(path)))

    sys.addaudithook(hook)


def _is_device(path: str) -> bool:
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False  # it will be made
