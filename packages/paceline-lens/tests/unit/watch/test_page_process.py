"""The process that serves a page: it says where, and leaves a report when the run ends, however it ends."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path

from synthetic_journal import write_synthetic

from paceline_lens.watch import page_process
from paceline_lens.watch.page_process import PageProcess
from paceline_lens.watch.server import PageServer


def test_a_report_is_there_when_the_run_has_ended(tmp_path: Path, capfd) -> None:
    folder = write_synthetic(tmp_path / "run" / "watch", seconds=5)
    process = PageProcess(folder)
    process.end()
    report = (tmp_path / "run" / "report.html").read_text()
    assert '"name":"synthetic"' in report and "<script src" not in report
    said = capfd.readouterr().err
    assert "the page of the run: http://127.0.0.1:84" in said and "report.html" in said


def test_a_report_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch, capfd) -> None:
    folder = write_synthetic(tmp_path / "run" / "watch", seconds=2)
    (tmp_path / "run" / "report.html").mkdir()
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert page_process.main([str(folder)]) == 1
    assert "could not write" in capfd.readouterr().err


def test_a_folder_of_a_newer_version_is_said(tmp_path: Path, capfd) -> None:
    (tmp_path / "run.json").write_text('{"version": 99}')
    assert page_process.main([str(tmp_path)]) == 1
    assert "watch-version" in capfd.readouterr().err


def test_the_button_asks_the_launcher(tmp_path: Path, monkeypatch) -> None:
    folder = write_synthetic(tmp_path / "watch", seconds=2)
    servers = []
    monkeypatch.setattr("paceline_lens.watch.server.PageServer", recorded(servers))
    signals = []
    monkeypatch.setattr(page_process.os, "kill", lambda *call: signals.append(call))
    monkeypatch.setattr(sys, "stdin", io.StringIO("end\n"))
    assert page_process.main([str(folder)]) == 0
    (server,) = servers
    server.write_stacks()
    assert signals == [(os.getppid(), signal.SIGUSR1)]
    # Once the launcher has gone, its number may be another's.
    with monkeypatch.context() as patch:
        patch.setattr(page_process.os, "getppid", lambda: 1)
        server.write_stacks()
    # A rank that has not said hello has no handler: the signal would end it.
    next(folder.glob("rank-*0.jsonl")).unlink()
    monkeypatch.setattr(sys, "stdin", io.StringIO("end\n"))
    assert page_process.main([str(folder)]) == 0
    servers[1].write_stacks()
    assert len(signals) == 1


def recorded(servers: list[PageServer]) -> type[PageServer]:
    class Recorded(PageServer):
        def __init__(self, *positional, **named) -> None:
            super().__init__(*positional, **named)
            servers.append(self)

    return Recorded
