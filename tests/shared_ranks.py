"""`run_ranks` in processes that stay for the cases of a file: what torch works out at first use is paid once.

    from shared_ranks import run_ranks   # in the place of `paceline.testing.run_ranks`

A case that raises, dies or hangs ends the processes, and runs again in fresh ones: what it does there counts. If it passes
there, it fails nevertheless, as an earlier case has left something behind. `make ranks-alone` (`SHARED_RANKS=no`) gives
fresh processes to every case, each night.

Not for a case that replaces names before its ranks start (`monkeypatch`), that looks at what its processes have loaded,
opened or left behind, or whose ranks are to fail. What it calls travels by cloudpickle: names of the file as such, closures
by value.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from paceline import testing
from paceline.base.log import forget_warnings
from paceline.launch.processes.signals import kill_with_parent
from paceline.testing.ranks import warm_up
from paceline.world import rendezvous
from paceline.world.world import World

_LIFETIME_S = 900  # of a group, which ends with its file
_MOST_GROUPS = 4
_STACKS_SIGNAL = signal.SIGRTMAX - 5  # a rank writes where it is


class SharedCallFailed(Exception):
    """A rank raised, ended or did not answer in time."""


class SharedRanks:
    """Ranks that wait for calls. A fork of this process runs them, as `run_ranks` returns when they have ended."""

    def __init__(self, world: int, env: Mapping[str, str | None], group: bool) -> None:
        warm_up()  # here, and not in each fork
        pipes = [Pipe() for _ in range(world)]
        self._ends = [ours for ours, _ in pipes]
        self._stacks = tempfile.TemporaryDirectory(prefix="paceline-shared-")
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, where this process has threads
            self._keeper = os.fork()
        if self._keeper == 0:
            try:
                kill_with_parent(parent)
                for end in self._ends:
                    end.close()
                theirs = [end for _, end in pipes]
                testing.run_ranks(
                    _serve,
                    world,
                    args=(theirs, group, self._stacks.name),
                    env=env,
                    timeout_s=_LIFETIME_S,
                    group=False,
                    output=[],
                )
            except testing.RankFailed:
                traceback.print_exc()
            finally:
                os._exit(0)
        for _, end in pipes:
            end.close()

    def call(self, request: bytes, timeout_s: float) -> list[Any]:
        """Returns what each rank returned.

        Raises:
            SharedCallFailed: a rank raised, ended or did not answer in time.
        """
        returned: dict[Connection, Any] = {}
        until = time.monotonic() + timeout_s
        try:
            for end in self._ends:
                end.send_bytes(request)
            while len(returned) < len(self._ends):
                answers = wait([end for end in self._ends if end not in returned], until - time.monotonic())
                if not answers:
                    raise SharedCallFailed(f"no answer within {timeout_s:g} s\n{self._where_they_are()}")
                for end in answers:
                    assert isinstance(end, Connection)
                    has_returned, value = pickle.loads(end.recv_bytes())
                    if not has_returned:
                        raise SharedCallFailed(value)
                    returned[end] = value
        except (EOFError, OSError) as error:
            raise SharedCallFailed(f"a rank has ended: {error!r}") from error
        return [returned[end] for end in self._ends]

    def end(self) -> None:
        """Lets the ranks leave their group."""
        for end in self._ends:
            with suppress(OSError):
                end.send_bytes(b"")
        os.waitpid(self._keeper, 0)
        self._close()

    def kill(self) -> None:
        """Ends ranks that may hang: they end with their parent."""
        os.kill(self._keeper, signal.SIGKILL)
        os.waitpid(self._keeper, 0)
        self._close()

    def _where_they_are(self) -> str:
        """The stacks of all ranks, which are children of the process that keeps them."""
        for child in Path(f"/proc/{self._keeper}/task/{self._keeper}/children").read_text().split():
            os.kill(int(child), _STACKS_SIGNAL)
        time.sleep(1)
        files = sorted(Path(self._stacks.name).iterdir())
        return "\n".join(f"--- stacks of rank {file.name}\n{file.read_text()}" for file in files)

    def _close(self) -> None:
        for end in self._ends:
            end.close()
        self._stacks.cleanup()


def _serve(ends: list[Connection], group: bool, stacks: str) -> None:
    """What each rank does: one call after the other, until the empty one or the end of the process of the tests."""
    me = replace(World.detect(), source="run_ranks")
    faulthandler.register(_STACKS_SIGNAL, file=Path(stacks, str(me.rank)).open("w"), all_threads=True)  # noqa: SIM115
    for other in ends[: me.rank] + ends[me.rank + 1 :]:
        other.close()
    environment, dtype = dict(os.environ), torch.get_default_dtype()
    while request := ends[me.rank].recv_bytes():
        if group:
            rendezvous.join(me, cpu=True, timeout_s=_LIFETIME_S)
        ends[me.rank].send_bytes(_answer(request))
        # What is once a process is once a case; and what a case usually leaves in its own processes is taken back.
        forget_warnings()
        torch.set_default_dtype(dtype)
        os.environ.clear()
        os.environ.update(environment)
        gc.collect()


def _answer(request: bytes) -> bytes:
    try:
        fn, args = pickle.loads(request)
        value = fn(*args)
        rendezvous.leave()
        return pickle.dumps((True, value))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


# What a group is born with -> the ranks of this file, the last used at the end.
_groups: dict[tuple[Any, ...], SharedRanks] = {}


def run_ranks(
    fn: Callable[..., Any],
    world: int = 4,
    *,
    args: Sequence[Any] = (),
    env: Mapping[str, str | None] | None = None,
    timeout_s: float = 60,
    group: bool = True,
) -> list[Any]:
    """As `paceline.testing.run_ranks`, which has the arguments; see above for what differs."""
    __tracebackhide__ = True
    if os.environ.get("SHARED_RANKS") == "no":
        return testing.run_ranks(fn, world, args=args, env=env, timeout_s=timeout_s, group=group)
    # A fork keeps the environment and the filters of warnings that this process had. A rank has no groups of its parent.
    environment = frozenset((name, value) for name, value in os.environ.items() if not name.startswith("PYTEST_"))
    key = (os.getpid(), world, group, frozenset((env or {}).items()), environment, tuple(warnings.filters))
    request = cloudpickle.dumps((fn, tuple(args)))
    ranks = _groups.pop(key, None) or SharedRanks(world, env or {}, group)
    _groups[key] = ranks
    try:
        returned = ranks.call(request, timeout_s)
    except BaseException as error:
        _groups.pop(key).kill()
        if not isinstance(error, SharedCallFailed):
            raise
        failure = error
    else:
        end_groups(_MOST_GROUPS)
        return returned
    testing.run_ranks(fn, world, args=args, env=env, timeout_s=timeout_s, group=group)
    pytest.fail(f"in fresh processes it passes, and behind other cases in the same ones it fails: {failure}")


def end_groups(keep: int) -> None:
    """Ends the groups that were used first, until so many are left."""
    while len(_groups) > keep:
        _groups.pop(next(iter(_groups))).end()
