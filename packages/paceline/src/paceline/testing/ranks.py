"""`run_ranks`: a function on several real processes, in a fraction of a second.

    parent   binds a port -> forks one child a rank -> reads what each returns -> raises the first failure
    child    output to a file, one thread, rendezvous over loopback -> fn(*args) -> sends the result -> ends

Forking a parent that has torch loaded is what makes it fast: nothing is imported again, and `fn` may be a closure.
Children compute on the CPU, so that an accelerator of the parent is never touched.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import pkgutil
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from paceline.base import env as environment
from paceline.base.registry import points
from paceline.base.temporary import temporary_folder
from paceline.config.keywords import checked_keywords
from paceline.config.sources import resolve_run
from paceline.launch.processes.signals import kill_with_parent
from paceline.parallel.mixtures import MIXTURES
from paceline.torch_internals.dtensor import answers_to_mixtures
from paceline.torch_internals.forks import renew_threads
from paceline.world import rendezvous
from paceline.world.network import tcp_store
from paceline.world.world import World

Result = TypeVar("Result")

_STACKS_SIGNAL = signal.SIGUSR2
_GRACE_S = 0.2  # after one rank has failed, how long others may report that they failed before it
_POLL_S = 0.02
_LATER_S = 10  # the group gives up after the parent does, which has the stacks to show
_LENGTH = struct.Struct("<Q")


class RankFailed(RuntimeError):
    """A rank of `run_ranks` raised, died or did not end; its own error is the cause, where it has one.

    Attributes:
        rank: the first that failed.
        output: what each rank printed.
    """

    def __init__(self, message: str, rank: int, output: list[str]) -> None:
        super().__init__(message)
        self.rank = rank
        self.output = output


@dataclass(frozen=True)
class _RankJob:
    fn: Callable[..., Any]
    args: Sequence[Any]
    world: int
    env: Mapping[str, str | None]
    group: bool
    timeout_s: float
    listener: socket.socket
    port: int
    folder: Path


@dataclass
class _Child:
    rank: int
    pid: int
    pipe: int
    received: bytearray = field(default_factory=bytearray)
    result: dict[str, Any] | None = None
    status: int | None = None  # of waitpid, once it has ended
    killed: bool = False  # by us

    @property
    def running(self) -> bool:
        return self.status is None

    @property
    def died(self) -> bool:
        """Ended without a word: killed, aborted, or os._exit in the function."""
        return self.status is not None and self.result is None


@checked_keywords
def run_ranks(
    fn: Callable[..., Result],
    world: int = 4,
    *,
    args: Sequence[Any] = (),
    env: Mapping[str, str | None] | None = None,
    timeout_s: float = 60,
    group: bool = True,
    output: list[str] | None = None,
) -> list[Result]:
    """Runs `fn(*args)` on `world` processes that form a process group, and gives back what each returned.

    Each process finds torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...) set, computes on the CPU with one
    thread, and is in a gloo group before `fn` starts; `Accelerator()` inside `fn` uses it.

    Args:
        fn: any function, closures included. What it returns must be picklable.
        world: how many processes.
        args: arguments of `fn`.
        env: environment variables to set in the children (None removes one).
        timeout_s: seconds until all are killed and the call fails with the stacks of those that hang.
        group: whether to form the group; without, `fn` finds a launcher's environment and nothing else.
        output: a list to fill with what each rank printed; otherwise it is passed on to stdout.

    Returns:
        The return values in rank order.

    Raises:
        RankFailed: a rank raised (its error is the cause), died, or did not end in time.

    Example:
        >>> run_ranks(lambda: torch.distributed.get_rank(), world=2)
        [0, 1]
    """
    __tracebackhide__ = True
    warm_up()
    place = temporary_folder()
    with tempfile.TemporaryDirectory(prefix="paceline-ranks-", dir=place) as folder, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(world + 8)
        job = _RankJob(fn, args, world, env or {}, group, timeout_s, listener, listener.getsockname()[1], Path(folder))
        if not group:
            listener.close()  # `fn` will listen there
        children: list[_Child] = []
        hung: list[_Child] = []
        try:
            for rank in range(world):
                children.append(_fork(job, rank))
            hung = _collect(children, timeout_s)
        finally:
            _end(children)
        printed = [_text(job, rank, "out") for rank in range(world)]
        if output is None:
            sys.stdout.write("".join(printed))
        else:
            output[:] = printed
        _raise_failure(job, children, hung, printed)
        return [child.result["value"] for child in children if child.result]


@cache
def warm_up() -> None:
    """Imports once what each child would import for itself: half of the time of a child that trains a small model.

    DistributedDataParallel loads the compiler's front (1 s), what a plan needs of Paceline takes 0.1 to 0.3 s, a plan that
    divides parameters looks up torch's operators (0.2 s), a save loads torch's checkpoint package (0.1 s), and settings the
    dialects of other libraries (0.03 s).
    """
    for name in (
        "torch.distributed.checkpoint",
        "torch.distributed.tensor.debug",  # where the first mesh is made
        "paceline.torch_internals.compiler",
        "encodings.idna",  # for the names of hosts
    ):
        importlib.import_module(name)
    packages = {
        f"paceline.{name}"
        for name in ("checkpoint", "data", "optim", "parallel", "planner", "precision", "run", "world")
    }
    for group in ("paceline.strategies", "paceline.observers", "paceline.hang_reports"):
        packages |= {point.module.rpartition(".")[0] for point in points(group).values()}
    for package in sorted(packages):
        folders = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(folders, f"{package}."):
            importlib.import_module(module.name)
    answers_to_mixtures(MIXTURES)
    # Without an accelerator, each `torch.manual_seed` notes its stack with lines of the sources, which are read here (0.03 s).
    traceback.format_stack()
    resolve_run(env={})


# ------------------------------------------------------------------------ the child's side


def _fork(job: _RankJob, rank: int) -> _Child:
    """Starts the process of one rank. Only the parent returns from here."""
    # What is still buffered would be printed by the child, too.
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, where the parent has threads
        pid = os.fork()
    if pid:
        os.close(write)
        return _Child(rank, pid, read)
    # The child leaves by os._exit, whatever happens: it must not go on with the parent's work.
    try:
        os.close(read)
        # What the parent left to its garbage collector must not be freed here: a store or a process group among it joins
        # threads that a fork does not copy, and C++ ends the process with "Invalid argument".
        gc.freeze()
        _detach(parent)
        _redirect(job, rank)
        data = _pickled(_run(job, rank))
        with os.fdopen(write, "wb") as pipe:
            pipe.write(_LENGTH.pack(len(data)) + data)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _run(job: _RankJob, rank: int) -> dict[str, Any]:
    """Calls the function; {"value": ...} or {"error": ..., "trace": ..., "at": ...}."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.world, "LOCAL_WORLD_SIZE": job.world, "GROUP_RANK": 0}
    names |= {"MASTER_PORT": job.port, "OMP_NUM_THREADS": 1}
    variables: dict[str, str | None] = {name: str(value) for name, value in names.items()}
    # The caller's variables come last, so that they can replace those of the launcher.
    environment.export({**variables, "MASTER_ADDR": "127.0.0.1", **job.env})
    renew_threads(1)
    try:
        if job.group:
            me = World(rank, job.world, rank, job.world, source="run_ranks", address="127.0.0.1", port=job.port)
            limit = job.timeout_s + _LATER_S
            # A second `Accelerator` of the function joins again, at the same store.
            tcp_store.keep(me, _store(job, rank))
            rendezvous.join(me, cpu=True, timeout_s=limit)
        value = job.fn(*job.args)
        rendezvous.leave()
        return {"value": value}
    except BaseException as error:
        failure = {"error": error, "trace": traceback.format_exc(), "at": time.monotonic()}
        rendezvous.leave()
        return failure


def _store(job: _RankJob, rank: int) -> Any:
    """Returns the store at the port that the parent bound. Rank 0 takes over its socket: nobody else can get the port."""
    own: dict[str, Any] = {}
    if rank == 0:
        own["master_listen_fd"] = job.listener.detach()
    limit = timedelta(seconds=job.timeout_s)
    return dist.TCPStore(  # type: ignore[attr-defined]  # torch's stubs lack it
        "127.0.0.1", job.port, job.world, rank == 0, timeout=limit, wait_for_workers=False, **own
    )


def _pickled(result: dict[str, Any]) -> bytes:
    """Returns the result as bytes. An error that pickle cannot carry travels as its traceback."""
    try:
        data = pickle.dumps(result)
        if "error" in result:
            pickle.loads(data)  # many exceptions can be written and not be read
        return data
    except Exception as error:
        cause = error
        if "error" in result:
            # The last line of a traceback names the exception and its text.
            cause = RuntimeError(result["trace"].strip().splitlines()[-1])
        return pickle.dumps({"error": cause, "trace": result.get("trace", repr(error)), "at": result.get("at", 0.0)})


def _detach(parent: int) -> None:
    """Ends this child with its parent, and takes the parent's signal handlers from it."""
    kill_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its children
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _redirect(job: _RankJob, rank: int) -> None:
    """Sends all that this child prints, C++ included, to a file, and prepares for a dump of its stacks."""
    out = os.open(job.folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(2)  # a crash leaves Python's stacks in what this rank has printed
    faulthandler.register(_STACKS_SIGNAL, file=(job.folder / f"{rank}.stacks").open("w"), all_threads=True)


# ------------------------------------------------------------------------ the parent's side


def _collect(children: list[_Child], timeout_s: float) -> list[_Child]:
    """Reads results until all children have ended, or one failed. Gives those that hang, their stacks written."""
    deadline = time.monotonic() + timeout_s
    failed = False
    with selectors.DefaultSelector() as selector:
        for child in children:
            os.set_blocking(child.pipe, False)
            selector.register(child.pipe, selectors.EVENT_READ, child)
        while any(child.running for child in children):
            left = deadline - time.monotonic()
            if left <= 0:
                # After a failure the others are not hanging: they wait for the rank that failed, and are ended.
                hung = [child for child in children if child.running]
                return [] if failed else _dump_stacks(hung)
            for key, _ in selector.select(min(left, _POLL_S)):
                if not _drain(key.data):
                    selector.unregister(key.fileobj)
            for child in children:
                if child.running:
                    _reap(child, os.WNOHANG)
                if not failed and (child.died or (child.result and "error" in child.result)):
                    failed = True
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
    return []


def _drain(child: _Child) -> bool:
    """Reads what lies in the pipe; whether more may come. Workers of the child hold it too, so a length goes first."""
    while True:
        try:
            data = os.read(child.pipe, 1 << 20)
        except BlockingIOError:
            return True
        child.received += data
        if len(child.received) >= _LENGTH.size and child.result is None:
            (length,) = _LENGTH.unpack_from(child.received)
            if len(child.received) == _LENGTH.size + length:
                child.result = pickle.loads(child.received[_LENGTH.size :])
        if not data:
            return False


def _reap(child: _Child, how: int = 0) -> None:
    pid, status = os.waitpid(child.pid, how)
    if pid:
        _drain(child)
        child.status = status


def _dump_stacks(hung: list[_Child]) -> list[_Child]:
    for child in hung:
        os.kill(child.pid, _STACKS_SIGNAL)
    time.sleep(_GRACE_S)
    return hung


def _end(children: list[_Child]) -> None:
    """Kills those that still run, by pid, and reaps them."""
    for child in children:
        if child.running:
            os.kill(child.pid, signal.SIGKILL)
            _reap(child)
            child.killed = True
        os.close(child.pipe)


def _raise_failure(job: _RankJob, children: list[_Child], hung: list[_Child], printed: list[str]) -> None:
    __tracebackhide__ = True  # pytest then shows the caller's line
    died = [child for child in children if child.died and not child.killed]
    errors = [child for child in children if child.result and "error" in child.result]
    cause: BaseException | None = None
    detail = ""
    # A rank that died makes others fail, and a rank that failed makes others hang. So they are looked at in this order.
    if died:
        child = died[0]
        what = f"died: {_ending(child.status)}"
    elif errors:
        # Of several errors, the first one in time is most likely the cause of the others.
        child = min(errors, key=lambda failed: failed.result["at"] if failed.result else 0.0)
        assert child.result is not None
        cause = child.result["error"]
        what = f"failed: {type(cause).__name__}: {cause}"
        detail = child.result["trace"]
    elif hung:
        child = hung[0]
        hanging_ranks = ", ".join(str(hanging.rank) for hanging in hung)
        what = f"did not end within {job.timeout_s:g} s (hanging: rank {hanging_ranks})"
        for hanging in hung:
            detail += f"--- stacks of rank {hanging.rank}\n{_text(job, hanging.rank, 'stacks')}"
    else:
        return
    shown = ""
    if printed[child.rank]:
        shown = f"\n--- printed by rank {child.rank}\n{printed[child.rank]}"
    message = f"rank {child.rank} of {job.world} {what}\n{detail}{shown}"
    raise RankFailed(message, child.rank, printed) from cause


def _ending(status: int | None) -> str:
    """Says how a process ended that sent no result."""
    code = os.waitstatus_to_exitcode(status or 0)
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code} before it returned"


def _text(job: _RankJob, rank: int, kind: str) -> str:
    path = job.folder / f"{rank}.{kind}"
    return path.read_text(errors="replace") if path.exists() else ""
