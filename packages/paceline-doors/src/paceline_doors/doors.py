"""Installs doors into an environment and removes them: Paceline then serves a library's names to every process of it.

    install     writes the journal -> sets the real library's files aside -> writes the door's files, RECORD last
    remove      deletes the door's files -> moves the real library's files back -> deletes the journal
    stopped     in between: the journal says what to undo, and the next `install` or `remove` begins with that

The journal and the files that are set aside lie in `paceline-doors/LIBRARY` beside the installed packages. That is the same
disk, so a file is moved by renaming it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.base.errors import CompatError, Problem
from paceline.config.libraries import LIBRARIES, unknown_library
from paceline_doors.door_files import Door
from paceline_doors.environments import Environment, folder_of, parts_of

_STATE = "paceline-doors"


@dataclass
class Journal:
    """A record of what an installation does; it is written before the installation changes anything.

    Attributes:
        created: files of the door, as paths relative to the folder of packages.
        set_aside: parts of the real library, likewise; part N lies in `set-aside/N`.
        version: version of the real library.
    """

    created: list[str] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)
    version: str = ""


@dataclass(frozen=True)
class DoorStatus:
    """Describes which door and which real library an environment has under one name.

    Attributes:
        door: version of the installed door; "" where there is none.
        real: version of the real library that is installed, and its folder; "" where there is none.
        real_comes_first: whether that one is imported, and not the door's.
        set_aside: version of the real library that `remove` brings back; "" for none.
        interrupted: whether an installation or a removal was stopped half-way.
    """

    door: str
    real: str
    real_comes_first: bool
    set_aside: str
    interrupted: bool


def status(library: str, environment: Environment) -> DoorStatus:
    """Returns the status of one library in an environment."""
    door = environment.installed_door(library)
    real = environment.real(library)
    state = _state(library, environment)
    journal = _read_journal(state)
    # An installation writes its journal first and the door last, so one without the other was interrupted.
    interrupted = state.exists() and (door is None or journal is None)
    door_version = ""
    if door is not None:
        door_version = door.version
    real_place = ""
    comes_first = False
    if real is not None:
        folder = folder_of(real)
        real_place = f"{real.version} in {folder}"
        comes_first = environment.comes_first(folder)
    version_aside = ""
    if journal is not None:
        version_aside = journal.version
    return DoorStatus(door_version, real_place, comes_first, version_aside, interrupted)


def check_names(libraries: Iterable[str]) -> None:
    """Checks that there are doors for these libraries.

    Raises:
        CompatError: `compat-library`.
    """
    problems = []
    for library in libraries:
        if library not in LIBRARIES.names():
            problems.append(unknown_library(library, f"Paceline has no door for {library!r}."))
    if problems:
        raise CompatError.of(problems)


def check(libraries: Iterable[str], environment: Environment, *, set_aside: bool) -> None:
    """Checks that doors can be installed.

    Raises:
        CompatError: `door-environment`, `door-real`; all problems at once.
    """
    problems = _problems_of(environment)
    for library in libraries:
        problems += _problems_with(library, environment, set_aside=set_aside)
    if problems:
        raise CompatError.of(problems)


def planned(library: str, environment: Environment, *, set_aside: bool) -> list[str]:
    """Lists what `install` would do, with a line for each file or folder."""
    lines = []
    if set_aside:
        for path in _parts_of_real(library, environment):
            lines.append(f"set aside  {_absolute(environment, path)}")
    for path in environment.door(library).files:
        lines.append(f"write      {_absolute(environment, path)}")
    return lines


def install(library: str, environment: Environment, *, set_aside: bool = False) -> None:
    """Installs the door of one library; `check` comes before it. A door that is there already is replaced.

    Raises:
        CompatError: `door-files`, where a file cannot be written or moved; then everything is as it was.
    """
    door = environment.door(library)
    state = _state(library, environment)
    previous = _read_journal(state)
    keeps_aside = previous is not None and bool(previous.set_aside)
    # The removal brings a library back that an earlier installation has set aside, so it is set aside again below.
    remove(library, environment)
    real = environment.real(library)
    journal = Journal(list(door.files))
    if real is not None and (set_aside or keeps_aside):
        journal.set_aside = _parts_of_real(library, environment)
        journal.version = real.version
    try:
        (state / "set-aside").mkdir(parents=True)
        _write(state / "journal.json", json.dumps(vars(journal), indent=1).encode())
        for number, path in enumerate(journal.set_aside):
            (environment.packages / path).rename(state / "set-aside" / str(number))
        for path, content in door.files.items():
            _write(door.packages / path, content, executable=door.is_command(path))
        if not journal.set_aside:
            _delete_state(state)
    except BaseException as error:  # also after Ctrl+C: every process would import half a door
        _undo(journal, door, state)
        if isinstance(error, OSError):
            raise _files_error(f"the door of {library} cannot be installed.", error) from None
        raise


def remove(library: str, environment: Environment) -> bool:
    """Removes a door and brings the real library back; returns False if there was neither a door nor a part of one.

    Raises:
        CompatError: `door-set-aside`, where the real library was installed again meanwhile; `door-files`.
    """
    state = _state(library, environment)
    installed = environment.installed_door(library)
    if installed is not None and not environment.contains(installed):
        installed = None
    if installed is None and not state.exists():
        return False
    journal = _read_journal(state) or Journal()
    real = environment.real(library)
    aside = [state / "set-aside" / str(number) for number in range(len(journal.set_aside))]
    # After an installation that was stopped, parts may still lie at their places: they are no second library then.
    is_aside = bool(aside) and all(path.exists() for path in aside)
    if is_aside and real is not None and environment.contains(real):
        raise CompatError(
            "door-set-aside",
            f"{library} {journal.version} waits to be brought back, and {library} {real.version} stands in its place.",
            why=f"it was installed into {environment.packages} after `paceline doors install {library} --set-aside`",
            fix=f"`pip uninstall {library}`, then `paceline doors remove {library}`",
        )
    if installed is not None:
        journal.created += [str(file) for file in installed.files or []]
    try:
        _undo(journal, environment.door(library), state)
    except OSError as error:
        raise _files_error(f"the door of {library} cannot be removed.", error) from None
    return True


# -- what stands in the way ----------------------------------------------------------------------------------


def _problems_of(environment: Environment) -> list[Problem]:
    """Lists what prevents the installation of any door into an environment."""
    what = "doors cannot be installed into this environment."
    why = ""
    fix = "make one of your own: `python -m venv .venv`, and install paceline there"
    unwritable = [folder for folder in (environment.packages, environment.scripts) if not os.access(folder, os.W_OK)]
    if environment.owner:
        why = environment.owner
    elif unwritable:
        why = f"you may not write to {' and '.join(map(str, unwritable))}"
    elif not environment.distributions("paceline"):
        why = f"paceline itself is not installed in {environment.packages}, so that its processes could not import it"
        fix = "`pip install` paceline there (`pip install path/to/paceline/packages/*` from a checkout)"
    if not why:
        return []
    return [Problem("door-environment", what, why, fix)]


def _problems_with(library: str, environment: Environment, *, set_aside: bool) -> list[Problem]:
    """Lists what prevents the installation of the door of one library."""
    real = environment.real(library)
    if real is None:
        return _unowned(library, environment)
    folder = folder_of(real)
    what = f"{library} {real.version} is installed."
    if not environment.contains(real):
        if not environment.comes_first(folder):
            return []  # a process finds the door first, and the other one is not touched
        why = f"it lies in {folder}, which is searched before {environment.packages}"
        return [Problem("door-real", what, why, f"`pip uninstall {library}`, or take {folder} out of PYTHONPATH")]
    if not parts_of(real):
        why = f"it lies in {folder}, and its metadata does not say which files belong to it"
        fix = (
            "remove it with the program that has installed it, or use `paceline launch --compat`, which leaves it alone"
        )
        return [Problem("door-real", what, why, fix)]
    if set_aside:
        return []
    fix = f"`paceline doors install {library} --set-aside` keeps it for `paceline doors remove {library}`"
    return [Problem("door-real", what, f"it lies in {folder}", fix)]


def _unowned(library: str, environment: Environment) -> list[Problem]:
    """Finds a package of the library's name that no distribution owns, such as a checkout in PYTHONPATH."""
    door = environment.installed_door(library)
    for entry in environment.search:
        folder = Path(entry).absolute()
        is_here = folder == environment.packages
        # `paceline` itself is found in a folder of commands, where a file of the library's name is its command.
        package = folder / library
        imported = package
        if not package.is_dir():
            imported = folder / f"{library}.py"
        is_of_door = is_here and (door is not None or _state(library, environment).exists())
        if not imported.exists() or is_of_door or "for_children" in folder.parts:
            continue
        if is_here or environment.comes_first(folder):
            why = "it belongs to no distribution, and would be imported in place of the door or overwritten by it"
            fix = f"move {imported} away, or take {folder} out of PYTHONPATH"
            return [Problem("door-real", f"{imported} is there already.", why, fix)]
    return []


# -- files ---------------------------------------------------------------------------------------------------


def _state(library: str, environment: Environment) -> Path:
    return environment.packages / _STATE / library


def _read_journal(state: Path) -> Journal | None:
    """Reads the journal of a library; returns None if there is none."""
    path = state / "journal.json"
    if not path.is_file():
        return None
    return Journal(**json.loads(path.read_text(encoding="utf-8")))


def _parts_of_real(library: str, environment: Environment) -> list[str]:
    """Lists what belongs to the real library in the folder of packages; the list is empty if it is not there."""
    real = environment.real(library)
    if real is None or not environment.contains(real):
        return []
    return parts_of(real)


def _absolute(environment: Environment, path: str) -> Path:
    return Path(os.path.normpath(environment.packages / path))


def _write(path: Path, content: bytes, *, executable: bool = False) -> None:
    """Writes a file under another name and renames it, so that no process ever reads half of it."""
    path.parent.mkdir(exist_ok=True)
    partial = _partial(path)
    try:
        partial.write_bytes(content)
        if executable:
            partial.chmod(0o755)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.paceline-partial")


def _undo(journal: Journal, door: Door, state: Path) -> None:
    """Deletes the door's files, moves back what was set aside, and deletes the journal last."""
    created = [door.packages / path for path in journal.created]
    # The door's files first: the real library's may have the same paths.
    for path in created:
        _partial(path).unlink(missing_ok=True)
        # An installation may have stopped before it set the real library's commands aside. A file at the door's path is then
        # the real library's, and must stay.
        if path.is_file() and _is_of_door(path, door):
            path.unlink()
    folders = {path.parent for path in created if path.parent.parent == door.packages}
    for folder in folders:
        # Python writes compiled files into the package's folder, which would keep `rmdir` from removing it.
        if folder.name == door.library and not (folder / "__init__.py").exists():
            shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        with suppress(OSError):  # the folder is not there, or has other files in it
            folder.rmdir()
    for number, part in enumerate(journal.set_aside):
        moved = state / "set-aside" / str(number)
        if moved.exists():
            moved.rename(door.packages / part)
    _delete_state(state)


def _is_of_door(path: Path, door: Door) -> bool:
    """Whether a file at a door's path is the door's and not the real library's."""
    if path.parent.parent == door.packages and path.parent.name.endswith(".dist-info"):
        return True  # the door's metadata folder has the mark in its name
    content = path.read_bytes()
    if content.startswith(b"#!"):
        # The real library's command names the environment's interpreter here, whose path may have any words in it.
        content = content.partition(b"\n")[2]
    return b"paceline" in content.lower()


def _delete_state(state: Path) -> None:
    shutil.rmtree(state, ignore_errors=True)
    with suppress(OSError):  # the folder still has the state of another library
        state.parent.rmdir()


def _files_error(what: str, error: OSError) -> CompatError:
    reason = str(error)
    if error.filename:
        reason = f"{error.filename}: {error.strerror}"
    fix = "see to it that you may write there and that the disk has room, and give the command again"
    return CompatError("door-files", what, reason, fix)
