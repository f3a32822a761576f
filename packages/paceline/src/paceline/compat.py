"""Scripts written for another library run unchanged: its names are served by Paceline, and it need not be installed.

    install(["accelerate"])                 before the script imports it; `paceline launch --compat accelerate` does so
    python -m paceline.compat script.py     the same for one process (or `-m module`); names of accelerate are served
    --compat deepspeed                      before the script: names of other libraries (or `--compat accelerate,deepspeed`)

A name that is not carried can be imported all the same; using it raises `CompatError` and names the native way.
"""

from __future__ import annotations

import os
import runpy
import sys

from paceline.config.libraries import install

__all__ = ["install"]

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
