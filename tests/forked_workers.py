"""`pytest --forks 4`: one process reads all files of tests, and forks workers that run them, a file at a time.

The workers of pytest-xdist are processes of their own, each of which imports torch and reads all files: 13 s of processor
time for each of them, and 27 s where pytest had not rewritten the files before. A fork has all of it, and shares the memory.

A worker that ends in a test, by a crash or `os._exit`, makes that test fail. A new one takes the tests that it had left.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.launch.processes.signals import kill_with_parent

_POLL_S = 1.0  # between two looks for workers that have ended without closing their pipe: a child of theirs may hold it


class ForkedWorker:
    """A fork as its parent sees it.

    Attributes:
        unfinished: the tests that it has been given, by their numbers, the one that runs first.
    """

    def __init__(self, number: int, pid: int, pipe: Connection) -> None:
        self.number = number
        self.pid = pid
        self.pipe = pipe
        self.unfinished: deque[int] = deque()
        self.status = 0  # of waitpid, once it has ended

    def has_ended(self) -> bool:
        pid, self.status = os.waitpid(self.pid, os.WNOHANG)
        return pid != 0


class ForkedRun:
    """The plugin of the process that reads the files: it hands these out, and reports what workers say about tests.

    Args:
        num_workers: how many tests run at the same time.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._files: deque[deque[int]] = deque()
        self._workers: list[ForkedWorker] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed:
            return None  # pytest's own loop has the answers
        numbered = itertools.groupby(range(len(session.items)), key=lambda number: _unit(session.items[number]))
        self._files.extend(deque(numbers) for _, numbers in numbered)
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # workers make folders in it
        gc.freeze()  # no collection in a worker touches, and so copies, what all of them share
        free_numbers = list(range(self._num_workers))
        try:
            while self._files or self._workers:
                while self._files and free_numbers:
                    self._workers.append(self._start(session, free_numbers.pop(0)))
                wait([worker.pipe for worker in self._workers], _POLL_S)
                for worker in list(self._workers):
                    has_ended = worker.has_ended()  # asked first: what it said before is still in its pipe
                    self._read(session, worker)
                    if has_ended:
                        self._workers.remove(worker)
                        free_numbers.append(worker.number)
                        self._mourn(session, worker)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for worker in self._workers:
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
        return True

    def _start(self, session: pytest.Session, number: int) -> ForkedWorker:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, where this process has threads
            pid = os.fork()
        if pid:
            theirs.close()
            return ForkedWorker(number, pid, ours)
        # The fork leaves by os._exit, whatever happens: what this process does at its end is not for the fork to do.
        code = 1
        try:
            kill_with_parent(parent)
            for other in (ours, *(worker.pipe for worker in self._workers)):
                other.close()
            atexit._clear()
            session.config.pluginmanager.unregister(self)
            _work(session, number, theirs)
            atexit._run_exitfuncs()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _read(self, session: pytest.Session, worker: ForkedWorker) -> None:
        """Does what a worker asks for, and reports what it says."""
        hook = session.config.hook
        while worker.pipe.poll():
            try:
                kind, value = worker.pipe.recv()
            except (EOFError, OSError):
                return  # it has ended, or does so now
            if kind == "next file":
                numbers = self._files.popleft() if self._files else deque()
                worker.unfinished.extend(numbers)
                with suppress(OSError):
                    worker.pipe.send(list(numbers))
            elif kind == "warning":
                hook.pytest_warning_recorded.call_historic(kwargs=value)
            else:
                item = session.items[worker.unfinished.popleft()]
                hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
                for data in value:
                    report = hook.pytest_report_from_serializable(config=session.config, data=data)
                    hook.pytest_runtest_logreport(report=report)
                hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _mourn(self, session: pytest.Session, worker: ForkedWorker) -> None:
        """Lets the test fail in which a worker has ended, and keeps those that it leaves for another worker."""
        worker.pipe.close()
        if not worker.unfinished:
            if worker.status:
                raise session.Failed("a worker of --forks has failed outside of a test; it has said why")
            return
        item = session.items[worker.unfinished.popleft()]
        message = "the worker of --forks has ended in this test; if it has said why, it stands above"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "call")
        session.config.hook.pytest_runtest_logreport(report=report)
        if worker.unfinished:
            self._files.appendleft(worker.unfinished)


class SentReports:
    """The plugin of a worker, in the place of pytest's own reporter: it sends what that would print."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config = config
        self._pipe = pipe
        self._reports: list[Any] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self) -> None:
        self._pipe.send(("reports", self._reports))
        self._reports = []

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        told = warning_message
        # As text: a warning may hold anything.
        text = warnings.WarningMessage(str(told.message), told.category, told.filename, told.lineno, None, told.line)
        value = {"warning_message": text, "when": when, "nodeid": nodeid, "location": location}
        self._pipe.send(("warning", value))


def _work(session: pytest.Session, number: int, pipe: Connection) -> None:
    """Runs files of tests until there are none left."""
    config = session.config
    capture = config.pluginmanager.getplugin("capturemanager")
    # The fork shares the files with which its parent captures what is printed, and their positions.
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    reporter = config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(SentReports(config, pipe))
    # pytest-timeout writes stacks where the reporter writes.
    config.pluginmanager.register(SimpleNamespace(_tw=reporter._tw), "terminalreporter")
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"w{number}"
    factory._basetemp.mkdir(exist_ok=True)
    os.environ["PYTEST_XDIST_WORKER"] = f"gw{number}"  # where libraries look for a number of their own
    state = Path(os.environ["XDG_STATE_HOME"]) / str(number)
    state.mkdir(exist_ok=True)
    os.environ["XDG_STATE_HOME"] = str(state)
    # A test knows the next one, as only what that does not need is torn down. So a file is asked for before the last test
    # of the one before it.
    for item, following in itertools.pairwise(itertools.chain(_items(session, pipe), [None])):
        assert item is not None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail or session.shouldstop:
            return


def _items(session: pytest.Session, pipe: Connection) -> Iterator[pytest.Item]:
    while True:
        pipe.send(("next file", None))
        numbers = pipe.recv()
        if not numbers:
            return
        for number in numbers:
            yield session.items[number]


def _unit(item: pytest.Item) -> Path:
    """What one worker has: a file, so that what its fixtures make is made once; and all of tests/shape, so that our sources
    are parsed once."""
    return item.path.parent if item.path.parent.match("tests/shape") else item.path
