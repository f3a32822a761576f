"""The launcher's line of status: on a terminal that nobody else writes to, and nowhere else."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest
from synthetic_journal import write_synthetic

from paceline_lens.watch.status_line import StatusLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A moment, and when the terminal was last written to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.written = 0.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_synthetic(tmp_path, exit_code=None, started=time.time() - 600)


def line_of(folder: Path, terminal: io.StringIO, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> StatusLine:
    monkeypatch.setattr(StatusLine, "_is_in_front", lambda self: True)
    return StatusLine(folder, terminal, lambda: clock.written, lambda: clock.now)


def test_a_silent_script_gets_a_line_less_and_less_often(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, clock = Terminal(), Clock()
    line = line_of(folder, terminal, clock, monkeypatch)
    moments = []
    for second in range(1200):
        clock.now = float(second)
        before = len(terminal.getvalue())
        line.poll()
        if len(terminal.getvalue()) > before:
            moments.append(second)
    assert moments == [30, 90, 210, 450, 750, 1050]
    assert terminal.getvalue().startswith("paceline: STUCK")  # it was recorded long ago
    assert terminal.getvalue().count("\n") == len(moments)


def test_a_progress_bar_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, clock = Terminal(), Clock()
    line = line_of(folder, terminal, clock, monkeypatch)
    for second in range(600):
        clock.now = float(second)
        clock.written = float(second // 8 * 8)
        line.poll()
    assert terminal.getvalue() == ""
    for second in range(600, 700):
        clock.now = float(second)
        line.poll()
    assert terminal.getvalue().count("\n") >= 1


def test_nothing_is_written_to_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, clock = io.StringIO(), Clock()
    line = line_of(folder, file, clock, monkeypatch)
    clock.now = 100.0
    line.poll()
    assert file.getvalue() == ""


def test_nothing_is_written_before_there_is_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, clock = Terminal(), Clock()
    line = line_of(tmp_path / "none", terminal, clock, monkeypatch)
    clock.now = 100.0
    line.poll()
    assert terminal.getvalue() == ""


@pytest.mark.long
def test_a_real_terminal_says_when_it_was_written_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatusLine, "_is_in_front", lambda self: True)
    monkeypatch.setattr("paceline_lens.watch.status_line._FIRST_S", 20.0)
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal:
        line = StatusLine(folder, terminal)
        time.sleep(10)
        os.write(terminal.fileno(), b"the script writes\r\n")
        time.sleep(11)
        line.poll()
        assert os.read(master, 100) == b"the script writes\r\r\n"
        time.sleep(21)
        line.poll()
        assert os.read(master, 100).startswith(b"paceline: ")
    os.close(master)
