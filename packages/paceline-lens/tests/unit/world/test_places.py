"""Where a thread is, also at instructions that belong to no line of the source."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.world.network import links
from paceline.world.places import line_of
from paceline_lens.hangs.threads import call_site, frame_of_thread, waits_for_ranks


def catches() -> None:
    try:
        raise ValueError
    except ValueError as error:
        str(error)


def test_an_instruction_without_a_line_counts_as_the_line_before_it() -> None:
    first = catches.__code__.co_firstlineno
    without = [start for start, _, line in catches.__code__.co_lines() if line is None]
    assert without, "this Python gives a line to each instruction"
    for start in without:
        # Only another thread can be seen at such an instruction: from Python 3.12 on they are not traced.
        frame: Any = SimpleNamespace(f_code=catches.__code__, f_lasti=start, f_lineno=None, f_back=None)
        line = line_of(frame)
        assert first < line <= first + 4
        assert f":{line} in catches" in call_site(frame).where


def test_a_message_of_another_rank_is_waited_for() -> None:
    # The messages of `reduce`, `gather` and the like travel over Paceline's own connections, not through torch.distributed.
    own, other = socket.socketpair()
    thread = threading.Thread(target=links._receive, args=(own, memoryview(bytearray(8))))
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while not waits_for_ranks(sys._current_frames().get(thread.ident or 0)):
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        other.sendall(bytes(8))
        thread.join()
    assert not waits_for_ranks(sys._getframe())
    own.close()
    other.close()


def _wait_below(depth: int, is_deep: threading.Event, may_end: threading.Event) -> None:
    if depth:
        _wait_below(depth - 1, is_deep, may_end)
        return
    is_deep.set()
    may_end.wait()


def test_no_garbage_is_collected_while_the_stack_of_another_thread_is_read() -> None:
    # A finalizer could let that thread run on, and Python 3.11 would then complete the object of a frame that is gone.
    is_deep, may_end = threading.Event(), threading.Event()
    thread = threading.Thread(target=_wait_below, args=(100, is_deep, may_end))
    thread.start()
    is_deep.wait()
    threshold = gc.get_threshold()
    collections: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    depth = 0
    try:
        with frame_of_thread(thread.ident or 0) as frame:
            gc.callbacks.append(note)
            gc.set_threshold(5)
            while frame is not None:
                depth += 1
                frame = frame.f_back
            during = list(collections)
            gc.callbacks.remove(note)
    finally:
        gc.set_threshold(*threshold)
        may_end.set()
        thread.join()
    assert depth > 100 and not during
    assert gc.isenabled()


def test_a_child_forked_while_a_stack_is_read_collects_garbage() -> None:
    is_reading = threading.Event()

    def read() -> None:
        with frame_of_thread(threading.main_thread().ident or 0):
            is_reading.set()
            time.sleep(0.2)

    thread = threading.Thread(target=read)
    thread.start()
    is_reading.wait()
    pid = os.fork()
    if not pid:
        with frame_of_thread(0):
            pass
        os._exit(0 if gc.isenabled() else 1)
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0


def test_stacks_of_other_threads_are_read_in_one_place_only() -> None:
    sources = Path(__file__).parents[4].glob("*/src/**/*.py")
    readers = [path.name for path in sources if "_current_frames" in path.read_text(encoding="utf-8")]
    assert readers == ["threads.py"]
