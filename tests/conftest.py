"""Guards: a test that leaves something behind fails, so that no test can disturb another."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_server import s3, s3_server  # noqa: F401  (fixtures)

# Set by pytest itself, and by libraries (OpenMP, scikit-learn, torch) when they are first imported.
_ENVIRONMENT_OF_OTHERS = ("PYTEST_", "KMP_", "TORCHINDUCTOR_")
# The thread of progress bars, one for the whole process.
_THREADS_OF_OTHERS = ("TMonitor",)
# fsspec runs one event loop a process, and asyncio looks up names on threads that it keeps.
_NAMES_OF_OTHERS = ("fsspecIO", "asyncio_")
_THREAD_GRACE_S = 2.0
# With it a printed line is several writes, and those of processes that share a pipe mix.
os.environ.pop("PYTHONUNBUFFERED", None)
# Launchers write down their runs below it.
_state_folder = tempfile.TemporaryDirectory(prefix="paceline-state-")
os.environ["XDG_STATE_HOME"] = _state_folder.name


# Cases that are run with `-m long` alone: what they add to their neighbours is little for the minutes of CPU that they take
# together, and `make test` has to stay below 20 minutes on 2 cores.
_LONG = (
    "test_parity_plans.py::test_on_eight[replicate2-shard2-tp2]",
    "test_parity_plans.py::test_on_eight[pp2-shard4]",
    "test_parity_plans.py::test_on_eight[shard8]",
    "test_parity_plans.py::test_on_eight[pp2-replicate2-shard2]",
    "test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[window-shard-tp]",
    "test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[window-replicate-tp]",
    "test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[window-replicate-shard]",
    "test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[plain-pp-shard]",
    "test_examples.py::test_images_are_classified_from_a_notebook[1]",
    "test_chaos.py::test_three_kills_change_nothing",
    "test_slurm.py::test_the_page",
    "test_store_off_hosts.py::test_each_of_two_hosts_outlives_the_other[etcd-1-words1]",
    "test_launch_kubernetes.py::test_the_launcher_in_a_pod_finds_its_world[pytorchjob]",
    "test_launch_kubernetes.py::test_a_bare_script_in_a_pod_finds_its_world[pytorchjob]",
    "test_state_under_plans.py::test_a_checkpoint_goes_on_as_if_nothing_had_happened[replicate2-shard2]",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks `_LONG`, before pytest chooses by marks."""
    for item in items:
        if item.nodeid.endswith(_LONG):
            item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaks an environment variable, a thread, a process group or a file in the working directory."""
    environment, threads, folder = _environment(), set(threading.enumerate()), Path.cwd()
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
    if Path.cwd() != folder:
        leaks.append(f"the working directory {Path.cwd()}")
        os.chdir(folder)
    leaks += [f"file {name}" for name in sorted(set(os.listdir(folder)) - files) if not name.startswith((".", "__"))]
    _forget_served_states()
    if leaks:
        pytest.fail(f"the test leaves behind: {', '.join(leaks)}", pytrace=False)


def _forget_served_states() -> None:
    """Resets the states of the accelerate door, which are those of the process, as accelerate's are."""
    state = sys.modules.get("paceline.compat.accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
    window = sys.modules.get("paceline.compat.accelerate.gradient_state")
    if window is not None:
        window.GradientState._reset_state()


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
