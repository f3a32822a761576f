"""What processes write, on a terminal of whatever encoding."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.launcher import Process
from paceline.launch.processes.output import Output

PIECES = (b"caf\xc3", b"\xa9 \xff\n", "日本\n".encode(), b"no end")


def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: Any) -> bytes:
    """What comes out at the terminal; the file has it as it was written."""
    monkeypatch.setattr("sys.stdout", terminal)
    output = Output(str(tmp_path), {0: 1})
    end = output.open(Process(0, 0, {}), 0)[1]
    (read,) = output.pipes
    for piece in PIECES:
        os.write(end, piece)
        assert output.copy(read)
    output.started()
    output.finish()
    assert (tmp_path / "rank0.out").read_bytes() == b"".join(PIECES)
    if isinstance(terminal, io.StringIO):
        return terminal.getvalue().encode()
    return terminal.buffer.getvalue()  # type: ignore[no-any-return]


def test_bytes_reach_a_terminal_that_knows_no_such_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    told = copied(tmp_path, monkeypatch, terminal)
    assert told == b"[rank0]: caf\xc3\xa9 \xff\n[rank0]: \xe6\x97\xa5\xe6\x9c\xac\n[rank0]: no end\n"


def test_a_notebooks_stream_takes_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = copied(tmp_path, monkeypatch, io.StringIO()).decode()
    assert told.splitlines()[1:] == ["[rank0]: 日本", "[rank0]: no end"]
    assert "\\xff" in told
