"""Where a thread is, also at instructions that belong to no line of the source."""

from __future__ import annotations

import socket
import sys
import threading
import time
from types import SimpleNamespace
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
