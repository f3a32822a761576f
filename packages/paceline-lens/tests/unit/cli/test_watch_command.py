"""`paceline watch` and `paceline ps`: which run, in which form, and what is said where there is none."""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from pathlib import Path

import pytest
from synthetic_journal import write_synthetic

from paceline.base.process_name import process_name
from paceline.cli.main import main
from paceline_lens.watch.registry import RegisteredRun, mark_ended, register
from paceline_lens.watch.remote import arguments


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def registered(name: str, watch: Path | str = "", ago_s: float = 0.0, **facts: object) -> Path:
    pid = os.getpid()
    return register(
        RegisteredRun(
            name, ["paceline", "launch", "train.py"], "train.py", os.getcwd(), socket.gethostname(), pid, process_name(pid),
            time.time() - ago_s, watch=str(watch), **facts,  # type: ignore[arg-type]
        )
    )  # fmt: skip


def run_in(folder: Path, **options: object) -> Path:
    return write_synthetic(folder / "watch", started=time.time() - 61, **options)  # type: ignore[arg-type]


# -- watch -------------------------------------------------------------------------------------------------------------


def test_a_run_that_has_ended_is_shown_in_lines(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in(state / "runs" / "one")
    assert main(["watch", "runs/one", "--text"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("ended after 61 s with exit code 0")
    assert any("Rank 3 on node2 waits 41%" in line for line in lines)


def test_a_run_is_frozen_to_a_file(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in(state / "runs" / "one")
    assert main(["watch", "runs/one", "--freeze", "new/page.html"]) == 0
    assert capsys.readouterr().out == "paceline: written to new/page.html\n"
    assert '"name":"synthetic"' in (state / "new" / "page.html").read_text(encoding="utf-8")
    assert main(["watch", "runs/one", "--freeze", "new"]) != 0
    assert "[watch-write]" in capsys.readouterr().err
    assert main(["watch", "far:one", "--freeze", "page.html"]) != 0
    assert "fix: ssh far paceline watch one --freeze page.html".replace("page", "report") in capsys.readouterr().err


def test_once_says_how_far_it_is(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in(state / "runs" / "one", exit_code=None)
    assert main(["watch", "runs/one", "--once"]) == 0
    assert "step 240 of 240" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["runs/one", "runs/one/watch", "runs", "one", "train", None, "pid"])
def test_what_names_a_run(state: Path, word: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_in(state / "runs" / "one")
    registered("train", folder)
    registered("unwatched")
    words = [] if word is None else [str(os.getpid()) if word == "pid" else word]
    assert main(["watch", *words, "--once"]) == 0
    assert "step 240 of 240" in capsys.readouterr().out


def test_there_is_no_such_run(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "nothing", "--text"]) == 2
    assert "why: no run was started here by this user" in capsys.readouterr().err
    registered("unwatched")
    assert main(["watch"]) == 2
    error = capsys.readouterr().err
    assert "[watch-no-run]" in error and "1 run was started here without --watch" in error
    for number in range(7):
        (state / "runs" / str(number)).mkdir(parents=True)
        registered(f"train{number}", state / "runs" / str(number))
    registered("removed", state / "runs" / "removed")
    assert main(["watch", "nothing"]) == 2
    error = capsys.readouterr().err
    assert f"fix: paceline watch {state}/runs/6" in error and "and 2 older ones" in error


def test_a_folder_without_a_journal_and_one_of_another_version(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (state / "empty").mkdir()
    assert main(["watch", "empty", "--text"]) == 2
    assert "[watch-folder]" in capsys.readouterr().err
    folder = run_in(state / "runs" / "one")
    header = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**header, "version": 99}))
    assert main(["watch", "runs/one", "--text"]) == 2
    assert "[watch-version]" in capsys.readouterr().err


def test_a_folder_that_may_not_be_read(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in(state / "runs" / "one")
    monkeypatch.setattr("paceline_lens.watch.runs.os.access", lambda path, mode: False)  # root may read everything
    assert main(["watch", "runs/one", "--text"]) == 2
    error = capsys.readouterr().err
    assert "[watch-permission]" in error and "chmod -R a+rX" in error


@pytest.mark.parametrize(
    "words", [["--port", "99999"], ["--interval-s", "0"], ["--interval-s", "nan"], ["--port", "x"]]
)
def test_numbers_that_cannot_be(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", *words]) == 2
    assert "[command-line]" in capsys.readouterr().err


def test_a_run_of_another_host(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ssh = state / "ssh"
    ssh.write_text('#!/bin/sh\necho "$@"\nexit ${CODE:-0}\n')
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{state}:{os.environ['PATH']}")
    assert main(["watch", "node7:runs/my run", "--text"]) == 0
    for code, words in (("255", "try `ssh node7`"), ("127", "--remote-command /path/to/bin/paceline")):
        monkeypatch.setenv("CODE", code)
        assert main(["watch", "node7:", "--text"]) == 2
        error = capsys.readouterr().err
        assert "[watch-ssh]" in error and words in error
    monkeypatch.setenv("PATH", str(state / "nowhere"))
    assert main(["watch", "node7:x", "--text"]) == 2
    assert "there is no ssh on this machine" in capsys.readouterr().err


def test_what_ssh_is_told() -> None:
    text = arguments("node7", "runs/my run", "paceline", ["--text"], port=None, is_terminal=True)
    assert text == ["ssh", "-t", "--", "node7", "paceline watch 'runs/my run' --text"]
    page = arguments("node7", "", "/opt/env/bin/paceline", [], port=8123, is_terminal=True)
    assert page[-2:] == ["node7", "/opt/env/bin/paceline watch --port 8123"]
    assert "127.0.0.1:8123:127.0.0.1:8123" in page
    free = arguments("node7", "", "paceline", [], port=None, is_terminal=False)
    assert int(free[-1].split()[-1]) > 1023


# -- ps ----------------------------------------------------------------------------------------------------------------


def test_ps_lists_what_runs_and_what_has_ended(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps"]) == 0
    assert capsys.readouterr().out.startswith("no run in the last day")
    registered("going", run_in(state / "runs" / "one", exit_code=None), procs=4, nodes=2)
    registered("silent")
    mark_ended(registered("failed", ago_s=60.0), time.time(), 3)
    mark_ended(registered("old", ago_s=1e6), time.time() - 1e6, 0)
    assert main(["ps"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["PID", "NAME", "STATE", "PROCS", "STEP", "RATE", "STARTED", "FOLDER"]
    by_name = {line.split()[1]: line for line in lines[1:]}
    assert set(by_name) == {"going", "silent", "failed"}
    assert "running" in by_name["going"] and "4 x 2" in by_name["going"] and "240/240  4 steps/s" in by_name["going"]
    assert by_name["silent"].endswith(f"{state} (not watched)")
    assert "ended (3)" in by_name["failed"]
    assert main(["ps", "--all"]) == 0
    assert "old" in capsys.readouterr().out


def test_ps_in_json(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registered("going", run_in(state / "runs" / "one", exit_code=None))
    assert main(["ps", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["state"], row["step"], row["total"]) == ("going", "running", 240, 240)
    assert row["steps_per_s"] == pytest.approx(4.0, rel=0.05)


def test_ps_lists_the_runs_of_a_name_or_below_a_folder(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registered("digits", run_in(state / "runs" / "one", exit_code=None))
    registered("letters")

    def names(*words: str) -> list[str]:
        assert main(["ps", *words]) == 0
        return [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]]

    assert names("digits") == ["digits"]
    assert names(str(state / "runs")) == ["digits"]
    assert sorted(names(".")) == ["digits", "letters"]
    assert main(["ps", "numbers"]) == 0
    assert capsys.readouterr().out.startswith("no run in the last day of the name 'numbers'")
