"""`python -m paceline.compat script.py args...` (or `-m module args...`): one process, names of accelerate served.

`--compat deepspeed` (or `--compat accelerate,deepspeed`) before the script serves those of other libraries.
"""

from __future__ import annotations

import os
import runpy
import sys

from paceline.compat import install

_USAGE = "usage: python -m paceline.compat [--compat accelerate,deepspeed] [-m] script-or-module [args...]"


def main(words: list[str]) -> None:
    """Becomes the script: its `sys.argv`, its folder on the path, its name `__main__`."""
    libraries = "accelerate"
    if words[:1] == ["--compat"] and len(words) > 1:
        libraries = words[1]
        words = words[2:]
    as_module = words[:1] == ["-m"]
    if as_module:
        words = words[1:]
    if not words:
        print(_USAGE, file=sys.stderr)
        sys.exit(2)
    if words[0] in ("-h", "--help"):
        print(_USAGE)
        sys.exit(0)
    install(libraries.split(","))
    sys.argv = words
    if as_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
