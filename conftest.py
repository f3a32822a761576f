"""Guards: a test that leaves something behind fails, so that no test can disturb another."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import long_cases
import pytest
import warm_python
from free_ports import port  # noqa: F401  (fixture)
from late_module import LateModule
from s3_server import s3, s3_server  # noqa: F401  (fixtures)

# Set by pytest itself, and by libraries (OpenMP, scikit-learn, torch) when they are first imported.
_ENVIRONMENT_OF_OTHERS = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_")
# The thread of progress bars, one for the whole process.
_THREADS_OF_OTHERS = ("TMonitor",)
# fsspec runs one event loop a process, and asyncio looks up names on threads that it keeps.
_NAMES_OF_OTHERS = ("fsspecIO", "asyncio_")
_THREAD_GRACE_S = 2.0
_FILES_APART = 11
# With it a printed line is several writes, and those of processes that share a pipe mix.
os.environ.pop("PYTHONUNBUFFERED", None)
# Launchers write down their runs below it.
_state_folder = tempfile.TemporaryDirectory(prefix="paceline-state-")
os.environ["XDG_STATE_HOME"] = _state_folder.name
# What a worker imports while it collects stays: to look for garbage in between takes a second of nine.
gc.disable()
# Gloo's thread asks again and again for the lock of a pair while the thread that has it waits for a processor. What it wakes
# takes that processor away, unless both are batch processes; there are more ranks than cores here, so that it happened often.
if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# A shell starts a background command with SIGINT ignored, which all its children inherit: tests of Ctrl-C would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """One server of commands for all workers, each of which would need two seconds and 700 MB for one of its own."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        config.add_cleanup(warm_python.share_between_workers().close)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker has all files of tests/shape, so that our sources are parsed once; of the others a worker has a file."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class OneWorkerForShape(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return "tests/shape" if scope.startswith("tests/shape/") else scope

    return OneWorkerForShape(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the long cases, before pytest chooses by marks, and puts the files of tests/hosts among the others.

    Those files wait for most of their time: read side by side by all workers they left the processor idle for two minutes.
    """
    if items:
        long_cases.mark(items)
    skip_without_parts(items)
    files = [list(cases) for _, cases in itertools.groupby(items, key=lambda item: item.path)]
    waiting = [cases for cases in files if cases[0].path.parent.name == "hosts"]
    others = [cases for cases in files if cases[0].path.parent.name != "hosts"]
    for number, cases in enumerate(waiting):
        others.insert(number * _FILES_APART, cases)
    items[:] = itertools.chain.from_iterable(others)


def skip_without_parts(items: list[pytest.Item]) -> None:
    """Skips cases that need a part beside their own, `pytest.mark.needs("large")`, where that is not installed.

    So it is where the tests of a part run with what the part depends on (`make test-part`); other runs have all parts.
    """
    for item in items:
        needed = [extra for mark in item.iter_markers("needs") for extra in mark.args]
        absent = [extra for extra in needed if find_spec(f"paceline_{extra}") is None]
        if absent:
            item.add_marker(pytest.mark.skip(reason=f"needs another part: {', '.join(absent)}"))


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def short_collections(request: pytest.FixtureRequest) -> None:
    """Hides what earlier modules left alive from the garbage collector.

    A worker that has read hundreds of files holds millions of objects, and each `gc.collect()` of a test took a second.
    """
    for value in vars(request.module).values():
        if isinstance(value, LateModule):
            value.load()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def ends_shared_ranks() -> Iterator[None]:
    yield
    shared_ranks = sys.modules.get("shared_ranks")
    if shared_ranks is not None:
        shared_ranks.end_groups(keep=0)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaks an environment variable, a thread, a process group, a log level or a file in its folder."""
    environment, threads, folder = _environment(), set(threading.enumerate()), Path.cwd()
    log_level = logging.root.level
    files, group = set(os.listdir(folder)), _has_group()
    yield
    leaks = _changed(environment, _environment())
    for name in {name for name, _ in environment.items() ^ _environment().items()}:
        if name in environment:
            os.environ[name] = environment[name]
        else:
            os.environ.pop(name, None)
    leaks += [f"thread {thread.name}" for thread in _still_running(threads)]
    if _has_group() and not group:
        leaks.append("a process group")
        _end_group()
    if logging.root.level != log_level:
        leaks.append(f"the root logger at level {logging.getLevelName(logging.root.level)}")
        logging.root.setLevel(log_level)
    if Path.cwd() != folder:
        leaks.append(f"the working directory {Path.cwd()}")
        os.chdir(folder)
    leaks += [f"file {name}" for name in sorted(set(os.listdir(folder)) - files) if not name.startswith((".", "__"))]
    _forget_served_states()
    if leaks:
        pytest.fail(f"the test leaves behind: {', '.join(leaks)}", pytrace=False)


def _forget_served_states() -> None:
    """Resets what the doors keep for the whole process: accelerate's states, and the words of DeepSpeed's scripts."""
    state = sys.modules.get("paceline_accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
    window = sys.modules.get("paceline_accelerate.gradient_state")
    if window is not None:
        window.GradientState._reset_state()
    wording = sys.modules.get("paceline.base.wording")
    if wording is not None:
        wording.use(())


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_ENVIRONMENT_OF_OTHERS)}


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [f"environment variable {name}" for name in sorted({name for name, _ in before.items() ^ after.items()})]


def _still_running(before: set[threading.Thread]) -> list[threading.Thread]:
    """New threads that do not end within a moment."""
    until = time.monotonic() + _THREAD_GRACE_S
    while True:
        new = [t for t in threading.enumerate() if t not in before and not _of_others(t)]
        if not new or time.monotonic() > until:
            return new
        time.sleep(0.02)


def _of_others(thread: threading.Thread) -> bool:
    return type(thread).__name__ in _THREADS_OF_OTHERS or thread.name.startswith(_NAMES_OF_OTHERS)


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _end_group() -> None:
    from paceline.world import rendezvous

    rendezvous.leave()
    if _has_group():
        sys.modules["torch.distributed"].destroy_process_group()
