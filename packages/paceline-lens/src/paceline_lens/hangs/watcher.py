"""`Watcher` runs the one thread of a process that watches its main thread, until the process leaves its group.

    a look      once a second: where is the main thread, does it wait for other ranks, does it make progress? (`progress.py`)
    duties      what is done about it, each in a file of its own, in this order:
                `progress_file.py`   tells whoever watches the ranks of this host
                `waits.py`           reports over the store which rank waits where, and for which
                `debug.py`           raises here an error that another rank has found

The training loop does nothing for this: the thread reads the stack of the main thread. A process without a duty has no thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from paceline.world import lifetime, rendezvous
from paceline.world.lifetime import Leaving
from paceline.world.places import frames_of, outwards
from paceline.world.stacks.parse import Frame
from paceline_lens.hangs import procfs
from paceline_lens.hangs.progress import Look, Progress
from paceline_lens.hangs.threads import frame_of_thread, waiting_frame

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

_JOIN_S = 2.0  # how long the end of a process waits for the thread, which a request to the store may keep

# Long operations without a step, by a part of the path of a file on the stack of the main thread.
_BUSY_FILES = {
    f"{os.sep}paceline{os.sep}checkpoint{os.sep}": "saving or loading a checkpoint",
    f"{os.sep}torch{os.sep}distributed{os.sep}checkpoint{os.sep}": "saving or loading a checkpoint",
    f"{os.sep}torch{os.sep}serialization.py": "saving or loading a file",
    f"{os.sep}torch{os.sep}_dynamo{os.sep}convert_frame.py": "compiling",
    f"{os.sep}torch{os.sep}_inductor{os.sep}compile_fx.py": "compiling",
    f"{os.sep}torch{os.sep}_inductor{os.sep}async_compile.py": "compiling",
    f"{os.sep}pdb.py": "a debugger",
    f"{os.sep}bdb.py": "a debugger",
    f"{os.sep}debugpy{os.sep}": "a debugger",
    f"{os.sep}pydevd": "a debugger",
}
_ONE_FIRST = ("main_process_first", "local_main_process_first")


class Duty(Protocol):
    """Something that is done in the thread after each look.

    Attributes:
        look_s: seconds between two looks, at most.
    """

    look_s: float

    def look(self, look: Look, progress: Progress) -> None:
        """Does what is due after a look."""
        ...

    def close(self, why: str) -> None:
        """Called in the main thread when this process leaves its group, after the thread has ended."""
        ...


D = TypeVar("D", bound=Duty)


def duty(kind: type[D]) -> D | None:
    """Returns the duty of this class; None if this process has none, as in a forked child."""
    watcher = lifetime.of_process().kept(Watcher)
    return None if watcher is None else watcher.duty(kind)


def running(computes_on_cpu: bool) -> Watcher:
    """Returns the watcher of this process, and makes it if there is none.

    Args:
        computes_on_cpu: whether a busy thread computes. With an accelerator, a busy thread may only be waiting.
    """
    watcher = lifetime.of_process().kept(Watcher)
    if watcher is None:
        watcher = Watcher(computes_on_cpu)
        lifetime.of_process().keep(watcher)
    return watcher


class Watcher:
    """Runs the thread.

    Args:
        computes_on_cpu: as for `running`.
    """

    def __init__(self, computes_on_cpu: bool) -> None:
        self._computes_on_cpu = computes_on_cpu
        self._pid = os.getpid()
        self._main = threading.main_thread()
        self._progress = Progress()
        self._duties: list[Duty] = []
        self._store: Store | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, duty: Duty, progress: Progress | None = None) -> None:
        """Adds a duty, and starts the thread with the first one.

        Args:
            duty: the duty.
            progress: what follows the main thread from now on, for a duty that needs its own. Such a duty comes first.
        """
        if progress is not None:
            self._progress = progress
        # The thread may be going through the old list.
        self._duties = [duty, *self._duties] if progress is not None else [*self._duties, duty]
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paceline-watcher", daemon=True)
            self._thread.start()

    def duty(self, kind: type[D]) -> D | None:
        """Returns the duty of this class; None if there is none."""
        return next((duty for duty in self._duties if isinstance(duty, kind)), None)

    def store(self) -> Store | None:
        """Returns the store, over a connection that only the thread uses; None if the store has ended.

        The main thread may be waiting on the other connection, which serves one request at a time.
        """
        shared = rendezvous.store()
        if not rendezvous.store_answers(shared):
            return None
        if self._store is None:
            self._store = shared.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        return self._store

    def close(self, leaving: Leaving) -> None:
        """Ends the thread, and then the duties."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        for duty in self._duties:
            duty.close(leaving.why)

    def _run(self) -> None:
        while not self._stop.wait(min(duty.look_s for duty in self._duties)):
            look = self._look()
            self._progress.look(look)
            for duty in self._duties:
                duty.look(look, self._progress)

    def _look(self) -> Look:
        assert self._main.ident is not None, "the main thread has begun"
        with frame_of_thread(self._main.ident) as innermost:
            waiting = waiting_frame(innermost)
            is_new_call = waiting is not None and _mark(waiting)
            frames = frames_of(innermost)
            places = [(id(frame), frame.f_lasti) for frame in outwards(innermost)]
        # Only the frames from the script's line outwards are compared. A library that the script has called may poll: a loader
        # checks every 5 s whether its workers are alive.
        first_of_script = next((index for index, frame in enumerate(frames) if frame.is_script), 0)
        return Look(
            time.monotonic(),
            tuple(places[first_of_script:]),
            self._cpu_s(),
            procfs.switches(self._pid, self._main.native_id or self._pid),
            busy_with(frames),
            waiting is not None,
            is_new_call,
            _thread_s(self._main) if self._computes_on_cpu else 0.0,
            frames,
        )

    def _cpu_s(self) -> float:
        """Returns the seconds of computation. With an accelerator, only child processes count: this one may wait busily."""
        total_s = procfs.tree_cpu_s(self._pid)
        return total_s if self._computes_on_cpu else total_s - procfs.cpu_s(self._pid)


def busy_with(frames: list[Frame]) -> str:
    """Returns the long operation that a thread is in, by its stack; "" for none."""
    for frame in frames:
        for part, name in _BUSY_FILES.items():
            if part in frame.file:
                return name
        if frame.function in _ONE_FIRST:
            return "waiting for the one process that works first"
    return ""


def end_process(text: str) -> NoReturn:
    """Ends this process from the thread, with a text: the main thread is in a call that nothing interrupts."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    os._exit(1)


def _mark(frame: FrameType) -> bool:
    """Marks a frame as seen, and returns whether it was not marked before.

    A later call may have its frame at the same address, so addresses cannot be compared. A reference to the frame would keep
    tensors alive. So an attribute is used that only tells a debugger to step over the lines of this one call.
    """
    is_new = frame.f_trace_lines
    frame.f_trace_lines = False
    return is_new


def _thread_s(thread: threading.Thread) -> float:
    """Returns the seconds for which a thread has computed; 0 if the system does not say."""
    if not hasattr(time, "pthread_getcpuclockid") or thread.ident is None:
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
