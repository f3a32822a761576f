"""What a door consists of: the files that `paceline doors install LIBRARY` puts into an environment.

    site-packages/accelerate/__init__.py                        hands the import over to `paceline.compat`
    site-packages/accelerate-1.15.0+paceline.dist-info/         METADATA, RECORD, ... : pip lists and uninstalls it
    bin/accelerate, bin/accelerate-launch, ...                  its commands

The package and the metadata are those of `for_children/LIBRARY`, which `paceline launch --compat` puts into PYTHONPATH.
Nothing here touches a file.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cached_property
from os.path import relpath
from pathlib import Path

from paceline.config.libraries import LIBRARIES
from paceline_doors.names import folder_for_children

# pip shows it beside the version, and `packaging` ranks "1.15.0+paceline" as 1.15.0 where a library asks for ">=1.1.0".
MARK = "+paceline"
INSTALLER = "paceline"

# Its first line shows whose command it is, whatever the module is called.
_SCRIPT = """# Written by `paceline doors`.
import sys

from {module} import {function}

if __name__ == "__main__":
    sys.exit({function}())
"""
_WHEEL = "Wheel-Version: 1.0\nGenerator: paceline\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
# Linux takes no more than 127 characters after `#!`, and no blank in the interpreter's path.
_MAX_SHEBANG = 127


@dataclass(frozen=True)
class Door:
    """The door of one library in one environment.

    Attributes:
        library: whose names it serves.
        packages: the folder of installed packages.
        scripts: the folder of commands.
        python: the environment's interpreter.
    """

    library: str
    packages: Path
    scripts: Path
    python: Path

    @property
    def version(self) -> str:
        """The version that its metadata says."""
        served: str = LIBRARIES.get(self.library).VERSION
        return served + MARK

    @property
    def metadata(self) -> str:
        """Name of the folder of its metadata."""
        return f"{self.library}-{self.version}.dist-info"

    @cached_property
    def files(self) -> dict[str, bytes]:
        """Path, from the folder of packages -> content; RECORD comes last, which makes the door known to pip."""
        commands: dict[str, str] = LIBRARIES.get(self.library).COMMANDS
        folder = folder_for_children(self.library)
        package = folder / self.library
        served_metadata = next(folder.glob("*.dist-info"))
        files = {f"{self.library}/__init__.py": (package / "__init__.py").read_bytes()}
        for name, target in commands.items():
            files[relpath(self.scripts / name, self.packages)] = self._script(target).encode()
        for path in sorted(served_metadata.iterdir()):
            files[f"{self.metadata}/{path.name}"] = path.read_bytes()
        files[f"{self.metadata}/METADATA"] = self._marked(files[f"{self.metadata}/METADATA"])
        files[f"{self.metadata}/WHEEL"] = _WHEEL.encode()
        lines = [f"{name} = {target}\n" for name, target in commands.items()]
        files[f"{self.metadata}/entry_points.txt"] = "".join(["[console_scripts]\n", *lines]).encode()
        record = f"{self.metadata}/RECORD"
        rows = [_row(path, content) for path, content in files.items()]
        rows.append(f"{record},,\n")  # the format wants RECORD in itself, without a hash
        files[record] = "".join(rows).encode()
        return files

    def is_command(self, path: str) -> bool:
        """Whether a path of `files` is a command, which has to be executable."""
        return not path.startswith((f"{self.library}/", f"{self.metadata}/"))

    def _marked(self, metadata: bytes) -> bytes:
        """Returns the metadata with the version that shows the door."""
        lines = []
        for line in metadata.decode().splitlines():
            if line.startswith("Version: "):
                line = f"Version: {self.version}"
            lines.append(line)
        return ("\n".join(lines) + "\n").encode()

    def _script(self, target: str) -> str:
        module, _, function = target.partition(":")
        program = _SCRIPT.format(module=module, function=function)
        interpreter = str(self.python)
        if " " in interpreter or len(interpreter) > _MAX_SHEBANG:
            # The shell runs the second line; to Python the second and third are one string.
            return f"#!/bin/sh\n'''exec' \"{interpreter}\" \"$0\" \"$@\"\n' '''\n{program}"
        return f"#!{interpreter}\n{program}"


def _row(path: str, content: bytes) -> str:
    """Writes a line of RECORD: path, hash and number of bytes."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"{path},sha256={digest},{len(content)}\n"
