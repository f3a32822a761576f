"""The names of DeepSpeed, and what of ours stands for each.

names.txt       every public name of DeepSpeed, by module: what exists, and so may be imported
_CARRIED        those that do something here, by the module of ours that has them
the rest        raise `CompatError` when they are used; `native_way` says what to do instead
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

VERSION = "0.19.8"

_HERE = "paceline.compat.deepspeed"
# Module -> names; `theirs=ours` where ours is called otherwise.
_CARRIED = {
    f"{_HERE}.initialize": "add_config_arguments init_distributed initialize",
    f"{_HERE}.engine": "DeepSpeedEngine",
}
_DEFAULT_WAY = (
    "no script that we know of needs it",
    "see `docs/migrating-from-deepspeed.md`, or run this script with deepspeed itself, without --compat",
)


@cache
def modules() -> dict[str, frozenset[str]]:
    """Names of DeepSpeed's modules, each with its public names."""
    found = {}
    for line in Path(__file__).with_name("names.txt").read_text(encoding="utf-8").splitlines():
        name, _, names = line.partition(":")
        found[name] = frozenset(names.split())
    return found


@cache
def carried() -> dict[str, str]:
    """Name of theirs -> "module:name" of ours."""
    found = {}
    for module, names in _CARRIED.items():
        for pair in names.split():
            theirs, _, ours = pair.partition("=")
            found[theirs] = f"{module}:{ours or theirs}"
    return found


def native_way(name: str) -> tuple[str, str]:
    """Why a name is not carried, and what to do instead."""
    return _DEFAULT_WAY
