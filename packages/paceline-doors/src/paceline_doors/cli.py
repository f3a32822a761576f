"""Replaces other libraries by Paceline in this Python environment.

paceline doors install LIBRARY ...      from now on `import LIBRARY` gets Paceline's names, however a process is started
paceline doors remove [LIBRARY ...]     takes the doors out without a trace, and brings back what was set aside
paceline doors status                   what is installed under each name
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from paceline.base.errors import ConfigError
from paceline.base.parts import absent_names
from paceline.config.libraries import LIBRARIES

if TYPE_CHECKING:
    from paceline_doors.doors import DoorStatus
    from paceline_doors.environments import Environment


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline doors install|remove|status [LIBRARY ...] [options]"
    add = parser.add_argument
    add("action", choices=("install", "remove", "status"), metavar="ACTION", help="install, remove or status")
    libraries = ", ".join(LIBRARIES.names())
    add("libraries", nargs="*", metavar="LIBRARY", help=f"{libraries} [remove and status: all of them]")
    add(
        "--set-aside",
        action="store_true",
        help="install: move an installed real library aside; `remove` brings it back",
    )
    add("--dry-run", action="store_true", help="install: only list what would be written and moved")
    add("--json", action="store_true", help="status: print JSON")


def run(args: argparse.Namespace) -> int:
    # Here and below: `--help` does not need them, and they load what reads metadata.
    from paceline_doors import doors
    from paceline_doors.environments import Environment

    environment = Environment.active()
    libraries = list(dict.fromkeys(args.libraries))
    doors.check_names(libraries)
    if args.action == "install":
        return _install(libraries, environment, set_aside=args.set_aside, dry_run=args.dry_run)
    libraries = libraries or LIBRARIES.names()
    if args.action == "remove":
        return _remove(libraries, environment)
    return _show(libraries, environment, as_json=args.json)


def _install(libraries: Sequence[str], environment: Environment, *, set_aside: bool, dry_run: bool) -> int:
    from paceline_doors import doors

    if not libraries:
        names = LIBRARIES.names() or absent_names(LIBRARIES.group)
        fix = f"name one or more of them: {', '.join(names)}"
        raise ConfigError("command-line", "`paceline doors install` needs the name of a library.", fix=fix)
    doors.check(libraries, environment, set_aside=set_aside)
    for library in libraries:
        if dry_run:
            print(*doors.planned(library, environment, set_aside=set_aside), sep="\n")
            continue
        doors.install(library, environment, set_aside=set_aside)
        status = doors.status(library, environment)
        aside = f"; {library} {status.set_aside} is set aside" if status.set_aside else ""
        print(f"{library} {status.door} is installed in {environment.packages}{aside}.")
        print(f"`paceline doors remove {library}` takes it out again.")
        for notice in LIBRARIES.get(library).notices():
            print(f"paceline: {notice}")
    return 0


def _remove(libraries: Sequence[str], environment: Environment) -> int:
    from paceline_doors import doors

    for library in libraries:
        set_aside = doors.status(library, environment).set_aside
        if not doors.remove(library, environment):
            print(f"{library}: there is no door in {environment.packages}.")
            continue
        back = f", and {library} {set_aside} is back" if set_aside else ""
        print(f"{library}: the door is removed{back}.")
    return 0


def _show(libraries: Sequence[str], environment: Environment, *, as_json: bool) -> int:
    from paceline_doors import doors

    rows = {library: doors.status(library, environment) for library in libraries}
    if as_json:
        print(json.dumps({library: asdict(row) for library, row in rows.items()}, indent=2))
        return 0
    print(f"environment: {environment.packages}")
    for library, row in rows.items():
        print(f"{library}: {_described(row, library)}")
    return 0


def _described(row: DoorStatus, library: str) -> str:
    if row.interrupted and row.set_aside and not row.real:
        return f"not installed; {row.set_aside} is set aside: `paceline doors remove {library}` brings it back"
    if row.interrupted:
        return f"half installed: `paceline doors remove {library}` undoes it"
    if not row.door:
        return f"the real one, {row.real}" if row.real else "not installed"
    text = f"served by Paceline as {row.door}"
    if row.set_aside:
        text += f"; {row.set_aside} is set aside"
    if row.real and row.real_comes_first:
        text += f"; but the real one comes first, {row.real}: take that folder out of PYTHONPATH"
    elif row.real:
        text += f"; there is also the real one, {row.real}"
    return text
