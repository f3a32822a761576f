"""What one process does: it becomes the script, as `python script.py` would have it, and leaves a report if it fails.

    fork: the launcher's child calls `run` and returns up the launcher's stack, so that Python ends as always
    exec: `python -m paceline.launch.worker` does the same in a fresh process

A function travels by cloudpickle to a fresh process (from a notebook), or is called in a forked child (a trial of `paceline
tune`); rank 0's value travels back through a file beside the report. A forked child leaves by `os._exit`: the stack above is
not its own.

An uncaught exception goes to the report file and not to the terminal: the launcher prints the first failing rank's
one, once, instead of a mixture of all.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import gc
import importlib
import importlib.util
import io
import linecache
import multiprocessing
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from paceline.base import env as environment
from paceline.base.errors import LaunchError
from paceline.launch.launcher import Target
from paceline.launch.worker import show_once
from paceline.launch.worker.traceback_text import traceback_text
from paceline.world.stacks import dump

VALUE = ".value"


def run(
    target: Target, report: str, compat: str = "", *, shared: bool = False, before: Callable[[], object] | None = None
) -> int:
    """Runs a script or module as `__main__`; returns the exit code.

    Args:
        target: what to run.
        report: file for the traceback of an uncaught exception, or of a crash.
        compat: libraries whose names are served to the script, joined by commas; "" for none.
        shared: whether standard error is seen together with that of other processes of this host.
        before: called first; an exception of it is the script's.
    """

    def work() -> None:
        if before is not None:
            before()
        become(target, compat)

    show_once.enter(show_once.of_report(report) if shared else None)
    return watched(work, report)


def call(function: Callable[[], Any], report: str) -> int:
    """Calls a function; rank 0's value goes to a file beside the report. Returns the exit code."""

    def work() -> None:
        value = function()
        if environment.get("RANK") == 0:
            try:
                parcel = pickled((value, None), "what the function returned")
            except LaunchError as error:  # no failure of the run: it is told, and not begun again
                parcel = pickled((None, error), "an error")
            with open(report + VALUE, "wb") as file:
                file.write(parcel)
        _end_groups()

    sys.excepthook = sys.__excepthook__  # a notebook's own hook draws in colours
    return watched(work, report)


def _end_groups() -> None:
    """Ends the process group of a function, where it has left one: its threads can abort the process as Python ends."""
    rendezvous = sys.modules.get("paceline.world.rendezvous")
    if rendezvous is not None:
        rendezvous.leave()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def value_of(report: Path) -> Any:
    """What a function returned on rank 0, whose report this is; None for any other.

    Raises:
        LaunchError: `launch-pickle`, where it could not travel.
    """
    path = Path(f"{report}{VALUE}")
    if not path.is_file():
        return None
    value, error = pickle.loads(path.read_bytes())
    if error is not None:
        raise error
    return value


def pickled(thing: object, what: str) -> bytes:
    """`thing` as bytes, functions and classes of a notebook included.

    Raises:
        LaunchError: `launch-pickle`, `launch-accelerator`.
    """
    import cloudpickle  # type: ignore[import-untyped]

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            place = getattr(type(value), "_constructed_at", None) and value._constructed_at
            if place:
                raise _accelerator_outside(place)
            return super().reducer_override(value)

    parcel = io.BytesIO()
    try:
        Pickler(parcel).dump(thing)
        return parcel.getvalue()
    except LaunchError:
        raise
    except Exception as error:
        raise LaunchError(
            "launch-pickle",
            f"{what} cannot travel between processes.",
            why=f"{type(error).__name__}: {error}",
            fix="make what is bound to one process (open files, locks, loaders) inside the function",
        ) from error


def _accelerator_outside(place: tuple[str, int]) -> LaunchError:
    """The error for an `Accelerator` that would travel.

    Args:
        place: file and line of its construction.
    """
    from paceline.launch.notebook_cells import (
        place_of,  # only where it is needed: every process of a launch imports this module
    )

    return LaunchError(
        "launch-accelerator",
        "the function uses an `Accelerator` that was constructed outside of it.",
        why=f"it was constructed in {place_of(*place)}, for that process alone: in each of the new processes it would say "
        "that it is rank 0 of 1, and each would train a model of its own",
        fix="move `accelerator = Accelerator(...)`, and its calls of `prepare`, into the function",
    )


def leave(code: int) -> NoReturn:
    """Ends a forked process whose stack is not its own. Its daemons (workers of loaders) end before it, as they do where
    Python ends: left alone they hold its output open, and its process group alive, for seconds."""
    rendezvous = sys.modules.get("paceline.world.rendezvous")
    if rendezvous is not None:
        rendezvous.leave()
    for child in multiprocessing.active_children():
        if child.daemon and child._parent_pid == os.getpid():  # type: ignore[attr-defined]  # a fork knows its parent's too
            child.kill()
            child.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def leave_after_failure(code: int) -> NoReturn:
    """Ends the process of a function that failed, as Python does, but without taking the interpreter apart.

    A process group that the function made is still there: destroying it could wait for a collective that never ends. A
    thread of it that has a tensor to release while the interpreter is taken apart aborts the process ("terminate called
    without an active exception"), so that its exit code would be another one than that of the failure.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as at every end
    atexit._run_exitfuncs()
    gc.collect()  # closes the files that the function has left open, and so writes them out
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def watched(work: Callable[[], object], report: str) -> int:
    """Calls `work`; an uncaught exception or a crash goes to the file `report`. Returns the exit code."""
    # A crash (SIGSEGV, SIGABRT, SIGBUS, SIGFPE) leaves Python's stacks there. This end stays open: exit handlers and the
    # ends of threads run after this function, and a crash in one of them is to be seen too.
    faulthandler.enable(os.open(report, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    folder = os.path.dirname(report)
    environment.export({dump.FOLDER: folder})
    dump.enter(Path(folder))
    with open(report, "ab", buffering=0) as file:
        try:
            try:
                work()
            except SystemExit as error:
                code, text = _exit_code(error)
                file.write(text.encode(errors="replace"))
                if code:
                    return code
            _finish()
            return 0
        except KeyboardInterrupt:
            return 130
        except BaseException as error:
            file.write(traceback_text(error).encode(errors="replace"))
            return 1


def _finish() -> None:
    """Waits for a save in the background that the script left under way; raises what it raised."""
    background = sys.modules.get("paceline.checkpoint.background")  # a floor above this one: looked up, not imported
    if background is not None:
        background.finish()


def whole_lines() -> None:
    """Has this process write each line at once: somebody is watching the other end of the pipe."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def become(target: Target, compat: str = "") -> None:
    """Runs a script or module as `__main__` in this process, to its end."""
    sys.argv = [target.name, *target.args]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(target.name)) if target.kind == "script" else os.getcwd()
    if compat:
        importlib.import_module("paceline.compat").install(
            compat.split(",")
        )  # a room above this one: looked up, not imported
    if target.kind == "script" and os.path.isfile(target.name):
        # Here, since the launcher imports this module too and needs no parser.
        from paceline.launch.worker.script_imports import import_ahead

        # Before the script's module is made: what is there now is never collected, and a file that the script leaves
        # open would not be written out at Python's end.
        path = os.path.abspath(target.name)
        import_ahead(Path(path).read_bytes(), path, compat.split(","))
    code, main = _load(target)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def call_packed(path: str, compat: str) -> Any:
    """Unpacks a function that `pack` packed, and calls it."""
    if compat:
        importlib.import_module("paceline.compat").install(compat.split(","))
    with open(path, "rb") as file:
        lines, paths, function = pickle.load(file)
        sys.path[:] = paths
        linecache.cache.update(lines)
        return pickle.loads(function)()


def pack(function: Callable[[], Any], path: str) -> None:
    """Writes a function to a file, with the source lines of notebook cells, for tracebacks."""
    cells = {name: lines for name, lines in linecache.cache.items() if not os.path.exists(name)}
    with open(path, "wb") as file:
        parcel = (cells, sys.path, pickled(function, "the function, or what it refers to,"))
        file.write(pickled(parcel, "the notebook's cells"))


def _load(target: Target) -> tuple[CodeType, ModuleType]:
    """The code to run, and the module `__main__` that it runs in."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if target.kind == "script":
        path = os.path.abspath(target.name)
        with io.open_code(path) as file:
            code: Any = compile(file.read(), path, "exec", dont_inherit=True)
        main.__dict__.update(__file__=path, __cached__=None, __package__=None)
        return code, main
    spec = importlib.util.find_spec(target.name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{target.name}.__main__")
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if spec is None or code is None:
        raise ModuleNotFoundError(f"No module named {target.name!r} that can be run", name=target.name)
    main.__dict__.update(
        __file__=spec.origin, __cached__=spec.cached, __package__=spec.parent, __spec__=spec, __loader__=spec.loader
    )
    sys.argv[0] = spec.origin or target.name
    return code, main


def _exit_code(error: SystemExit) -> tuple[int, str]:
    """What `python` makes of `sys.exit(...)` (None is 0, a number itself, anything else 1), and a line for the report."""
    if error.code is None:
        return 0, ""
    if not isinstance(error.code, int):
        return 1, str(error.code)
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        # Who reads it looks for the line of the script that left, and not for argparse's own.
        if frame.filename not in (argparse.__file__, show_once.__file__):
            place = f" ({frame.filename}:{frame.lineno})"
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    code = error.code & 0xFF
    return code, f"SystemExit: {code}{place}{notes}" if code else ""
