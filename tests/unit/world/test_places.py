"""Where a thread is, also at instructions that belong to no line of the source."""

from __future__ import annotations

import socket
import sys
import threading
import time
from types import FrameType
from typing import Any

from paceline.world.network import links
from paceline.world.places import call_site, line_of, waits_for_ranks


def catches() -> None:
    try:
        raise ValueError
    except ValueError as error:
        str(error)


def test_an_instruction_without_a_line_counts_as_the_line_before_it() -> None:
    first = catches.__code__.co_firstlineno
    lines: list[tuple[int | None, int, str]] = []

    def note(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        lines.append((frame.f_lineno, line_of(frame), call_site(frame).where))
        return note

    # Other code objects are traced too, as this process may be one that measures its coverage.
    before = sys.gettrace()
    sys.settrace(
        lambda frame, event, argument: note(frame, event, argument) if frame.f_code is catches.__code__ else None
    )
    try:
        catches()
    finally:
        sys.settrace(before)
    without = [(line, where) for own, line, where in lines if own is None]
    assert without, "this Python gives a line to each instruction"
    assert all(first < line <= first + 4 and f":{line} in catches" in where for line, where in without)
    assert all(own == line for own, line, _ in lines if own is not None)


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
