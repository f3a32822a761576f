"""Each worker process runs the script as `python script.py` does, and writes a report if the script fails.

    fork: the launcher's child calls `run`, and returns up the stack of the launcher, so that Python ends as it always does
    exec: `python -m paceline.launch.worker` does the same in a fresh process

A function is called in place of a script: unpacked in a fresh process (from a notebook, see `pickling.py`), or called in a
forked child (a trial of `paceline tune`). Such a child ends by `os._exit`, because the stack above it belongs to the launcher.

An uncaught exception is written to the report file and not to the terminal. The launcher prints the report of the first rank
that failed, once, instead of a mixture of all reports.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import faulthandler
import gc
import importlib.util
import io
import multiprocessing
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from paceline.base import env as environment
from paceline.base.terminal import say
from paceline.config import libraries
from paceline.launch.job import Target
from paceline.launch.script_libraries import COMPILER_VARIABLE, FRONT
from paceline.launch.worker import same_files, show_once
from paceline.launch.worker.pickling import write_value
from paceline.launch.worker.traceback_text import traceback_text
from paceline.world.stacks import dump

# A script that mentions one of these may divide its work by itself.
_OWN_DIVISION = re.compile(rb"RANK|WORLD_SIZE|torch\.distributed|PartialState")


def run(
    target: Target, report: str, compat: str = "", *, shared: bool = False, before: Callable[[], object] | None = None
) -> int:
    """Runs a script or module as `__main__`; returns the exit code.

    Args:
        target: what to run.
        report: file for the traceback of an uncaught exception, or of a crash.
        compat: libraries whose names are served to the script, joined by commas; "" for none.
        shared: whether other processes of this host write to the same standard error.
        before: called first. An exception that it raises is reported as one of the script.
    """

    def work() -> None:
        if before is not None:
            before()
        become(target, compat)

    shown = show_once.of_report(report)
    show_once.install(shown if shared else None)
    if environment.get("WORLD_SIZE") not in (None, 1):
        same_files.watch(same_files.Claims(report, shown))
    path = os.path.abspath(target.name)  # the script may change the working directory
    is_compiler_imported, variables = FRONT in sys.modules, environment.snapshot()
    code = watched(work, report)
    if code == 0 and environment.get("RANK") == 0:
        if target.kind == "script":
            _note_lone_processes(path)
        if is_compiler_imported:
            _note_late_variables(variables)
    return code


def _note_late_variables(before: Mapping[str, str]) -> None:
    """Names variables of torch's compiler that were set after the launcher had imported it, which is when it reads most."""
    late = []
    for name, value in environment.snapshot().items():
        # The compiler itself sets the last one.
        if COMPILER_VARIABLE.match(name) and before.get(name) != value and name != "TORCHINDUCTOR_CACHE_DIR":
            late.append(name)
    if late:
        say(
            f"{', '.join(late)}: set by a file that the script imports, which may be too late, as the launcher had already "
            "imported torch's compiler. Set it before the command, or in the script itself."
        )


def _note_lone_processes(script: str) -> None:
    """Says that the processes did not work together, where a script that uses torch neither asked for that nor for its rank."""
    size = environment.get("WORLD_SIZE")
    if size is None or size < 2 or "torch" not in sys.modules:
        return
    from paceline.torch_internals.groups import was_initialized

    try:
        source = Path(script).read_bytes()
    except OSError:
        return  # the script has removed itself, and this is only advice
    if was_initialized() or _OWN_DIVISION.search(source):
        return
    say(
        f"the {size} processes did not work together: each ran the whole script, with all samples. To divide the work, create "
        "a `paceline.Accelerator` in the script and call its `prepare`."
    )


def call(function: Callable[[], Any], report: str) -> int:
    """Calls a function; its value on rank 0 is written to a file beside the report. Returns the exit code."""

    def work() -> None:
        value = function()
        if environment.get("RANK") == 0:
            write_value(value, report)
        _destroy_process_group()

    sys.excepthook = sys.__excepthook__  # the hook of a notebook writes colours
    return watched(work, report)


def _destroy_process_group() -> None:
    """Destroys the process group that a function has left: its threads can abort the process while Python ends."""
    rendezvous = sys.modules.get("paceline.world.rendezvous")
    if rendezvous is not None:
        rendezvous.leave()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def leave(code: int) -> NoReturn:
    """Ends a forked process whose stack belongs to the launcher.

    Daemon processes (the workers of data loaders) are ended first, as Python does at its end. They would otherwise keep the
    output open, and the process group alive, for seconds.
    """
    rendezvous = sys.modules.get("paceline.world.rendezvous")
    if rendezvous is not None:
        rendezvous.leave()
    for child in multiprocessing.active_children():
        # A forked process also knows the children of its parent.
        is_own_child = child._parent_pid == os.getpid()  # type: ignore[attr-defined]
        if child.daemon and is_own_child:
            child.kill()
            child.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def leave_after_failure(code: int) -> NoReturn:
    """Ends a process whose script or function failed as Python does, but without finalizing the interpreter.

    To free what torch has loaded costs as much CPU as a third of a start, and the launcher waits for it before all start
    again. The process group may still exist, because destroying it could wait for a collective that never ends: if one
    of its threads released a tensor while the interpreter is finalized, the process would abort ("terminate called without an
    active exception"), and its exit code would no longer tell about the failure.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that are not daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    for live in gc.get_objects():
        # Its type is asked, because `isinstance` runs code of objects that stand for others.
        if issubclass(type(live), io.IOBase):
            with contextlib.suppress(OSError, ValueError):  # closed, or with nobody at its other end
                live.flush()
    os._exit(code)


def watched(work: Callable[[], object], report: str) -> int:
    """Calls `work`; an uncaught exception or a crash goes to the file `report`. Returns the exit code."""
    # On a crash (SIGSEGV, SIGABRT, SIGBUS, SIGFPE), faulthandler writes Python's stacks to this file. It stays open, because
    # exit handlers and threads run after this function, and a crash in one of them is reported too.
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
    """Waits for a checkpoint that is still being saved in the background, and raises what the save raised."""
    background = sys.modules.get("paceline.checkpoint.background")  # a layer above this one, so not imported
    if background is not None:
        background.finish()


def become(target: Target, compat: str = "") -> None:
    """Runs a script or module as `__main__` in this process, to its end."""
    sys.argv = [target.name, *target.args]
    if not sys.flags.safe_path:
        # As Python does: the folder of a script, or the working directory for `-m`.
        is_script = target.kind == "script"
        sys.path[0] = os.path.dirname(os.path.realpath(target.name)) if is_script else os.getcwd()
    if compat:
        libraries.install(compat.split(","))
    code, main = _load(target)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _load(target: Target) -> tuple[CodeType, ModuleType]:
    """Returns the code to run, and the module `__main__` in which it runs."""
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
        # `python -m PACKAGE` runs the module `__main__` of the package.
        spec = importlib.util.find_spec(f"{target.name}.__main__")
    code = None
    if spec is not None:
        get_code = getattr(spec.loader, "get_code", None)
        code = get_code(spec.name) if get_code is not None else None
    if spec is None or code is None:
        raise ModuleNotFoundError(f"No module named {target.name!r} that can be run", name=target.name)
    main.__dict__.update(
        __file__=spec.origin, __cached__=spec.cached, __package__=spec.parent, __spec__=spec, __loader__=spec.loader
    )
    sys.argv[0] = spec.origin or target.name
    return code, main


def _exit_code(error: SystemExit) -> tuple[int, str]:
    """Returns the exit code that Python gives for `sys.exit(...)`, and a line for the report.

    None means 0, a number is the code itself, and anything else is printed and means 1.
    """
    if error.code is None:
        return 0, ""
    if not isinstance(error.code, int):
        return 1, str(error.code)
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        # The user looks for the line of the script that exited, not for the line in argparse.
        if frame.filename not in (argparse.__file__, show_once.__file__):
            place = f" ({frame.filename}:{frame.lineno})"
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    code = error.code & 0xFF  # the system keeps the lowest byte of an exit code
    text = f"SystemExit: {code}{place}{notes}" if code else ""
    return code, text
