"""What a launcher writes down of its run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline import LaunchError
from paceline.cli.launch import wait_recorded
from paceline.launch.failure_report import problem_of
from paceline.launch.job import NEW_FOLDER, Job, Target
from paceline.launch.launcher import Failure, Outcome
from paceline.launch.rounds import Member, Round
from paceline_lens.watch import records
from paceline_lens.watch.journal import JournalReader
from paceline_lens.watch.recording import LaunchRecording
from paceline_lens.watch.registry import registered_runs

JOB = Job(Target("script", "folder/train.py"), procs=2, watch=NEW_FOLDER)


class Page:
    """Stands for the process that serves the page."""

    served: list[Path] = []  # noqa: RUF012
    ended: list[Path] = []  # noqa: RUF012

    def __init__(self, folder: Path, metrics_port: int | None = None) -> None:
        self.folder = folder
        self.served.append(folder)

    def end(self) -> None:
        self.ended.append(self.folder)


@pytest.fixture(autouse=True)
def page(monkeypatch: pytest.MonkeyPatch) -> type[Page]:
    monkeypatch.setattr("paceline_lens.watch.recording.PageProcess", Page)
    monkeypatch.setattr(Page, "served", [])
    monkeypatch.setattr(Page, "ended", [])
    return Page


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def decided(*hosts: str, number: int = 1, restarts: int = 0, reason: str = "") -> Round:
    members = tuple(Member(name, name, 2) for name in hosts)
    return Round(number, restarts, members, reason=reason, founded_at=1_800_000_000.5)


def test_a_run_from_its_start_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = LaunchRecording(JOB)
    recording.begin()
    recording.round(decided("a", "b"), 0, leads=True)
    assert recording.folder == tmp_path / "runs" / "2027-01-15-080000-train" / "watch"
    assert recording.env == {"PACELINE_WATCH_DIR": str(recording.folder)}
    assert "`paceline watch runs/2027-01-15-080000-train` shows it" in capsys.readouterr().err
    failure = Failure(rank=1, local_rank=1, node=0, pid=7, code=1, report="ValueError: empty")
    recording.failed(Outcome(1, failure))
    recording.round(decided("a", "c", number=2, restarts=1, reason="rank 1 failed"), 0, leads=True)
    recording.end(0)
    recording.end(1, "a second call does nothing")
    reader = JournalReader(recording.folder)
    assert (reader.header.name, reader.header.procs, reader.header.nodes) == ("train", 4, 2)
    first, error, second, end = [line.record for line in reader.read()]
    assert first == records.RoundStarted(0, 4, 2)
    assert isinstance(error, records.ErrorShown)
    assert (error.rank, error.code) == (1, "rank-failed")
    assert error.text.startswith("ValueError: empty")
    assert second == records.RoundStarted(1, 4, 2, 1, "rank 1 failed", ["c"], ["b"])
    assert end == records.LauncherEnded(0, "")
    (run,) = registered_runs()
    assert (run.state, run.exit_code, run.watch) == ("ended", 0, str(recording.folder))


def test_hosts_that_share_a_folder_write_files_of_their_own(tmp_path: Path) -> None:
    recordings = [LaunchRecording(JOB) for _ in range(2)]
    for index in (1, 0):
        recordings[index].round(decided("a", "b"), index, leads=index == 0)
    late = LaunchRecording(JOB)
    late.round(decided("b", "c", number=2), 1, leads=False)  # b has become the first, and c has the number that b had
    folder = recordings[0].folder
    assert recordings[1].folder == late.folder == folder
    assert folder is not None
    assert sorted(path.name for path in folder.glob("launcher-*")) == [
        f"launcher-{number}.jsonl" for number in range(3)
    ]


def test_two_runs_of_one_second_have_a_folder_each() -> None:
    first, second = LaunchRecording(JOB), LaunchRecording(JOB)
    first.round(decided("a"), 0, leads=True)
    later = decided("a")
    second.round(Round(1, 0, later.members, founded_at=later.founded_at + 0.1), 0, leads=True)
    assert first.folder is not None
    assert second.folder is not None
    assert second.folder.parent.name == first.folder.parent.name + "-2"


def test_hosts_that_make_the_folder_at_the_same_time_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = LaunchRecording(JOB), LaunchRecording(JOB)
    real = Path.rename

    def late(source: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", real)
        second.round(decided("a", "b"), 1, leads=False)  # while the first has staged its folder, and not renamed it
        return real(source, target)

    monkeypatch.setattr(Path, "rename", late)
    first.round(decided("a", "b"), 0, leads=True)
    assert first.folder == second.folder
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["2027-01-15-080000-train"]


def test_a_run_that_is_not_watched_writes_no_journal(tmp_path: Path) -> None:
    recording = LaunchRecording(Job(Target("module", "package.train")))
    recording.begin()
    recording.round(decided("a"), 0, leads=True)
    (run,) = registered_runs()
    assert (run.state, run.name, run.watch) == ("running", "train", "")
    recording.end(3)
    assert recording.env == {}
    assert not (tmp_path / "runs").exists()


def test_a_forked_process_ends_nothing() -> None:
    recording = LaunchRecording(JOB)
    recording.begin()
    recording.round(decided("a"), 0, leads=True)
    child = os.fork()
    if child == 0:
        recording.end(1)
        os._exit(0)
    os.waitpid(child, 0)
    (run,) = registered_runs()
    assert run.state == "running"
    recording.end(0)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(LaunchError) as error:
        LaunchRecording(JOB)
    assert error.value.code == "watch-write"


def test_the_host_that_leads_serves_the_page_until_the_run_ends(page: type[Page]) -> None:
    first, second = LaunchRecording(JOB), LaunchRecording(JOB)
    first.round(decided("a", "b"), 0, leads=True)
    second.round(decided("a", "b"), 1, leads=False)
    assert page.served == [first.folder] and page.ended == []
    first.round(decided("a", "b", number=2), 0, leads=True)
    assert len(page.served) == 1
    # The journals of all hosts come together on the one that leads now.
    first.round(decided("a", "b", number=3), 0, leads=False)
    second.round(decided("a", "b", number=3), 1, leads=True)
    assert page.ended == [first.folder] and len(page.served) == 2
    for recording in (first, second, second):
        recording.end(0)
        assert len(page.ended) == 1  # the last lines of other hosts may still come
    for recording in (first, second, second):
        recording.close()
    assert len(page.ended) == 2


def test_a_launcher_that_cannot_go_on() -> None:
    recording = LaunchRecording(JOB)
    recording.round(decided("a"), 0, leads=True)
    recording.refused(LaunchError("launch-cut-off", "too few nodes are left."))
    assert recording.folder is not None
    *_, error, end = [line.record for line in JournalReader(recording.folder).read()]
    assert isinstance(error, records.ErrorShown)
    assert error.code == "launch-cut-off"
    assert end == records.LauncherEnded(1, "too few nodes are left.")


class _Elsewhere:
    """A job of other hosts."""

    def __init__(self, exit_code: int | None) -> None:
        self._exit_code = exit_code
        self.state = ""

    def wait(self) -> Outcome:
        self.state = registered_runs()[0].state
        if self._exit_code is None:
            raise KeyboardInterrupt
        return Outcome(self._exit_code)


def test_a_job_of_other_hosts_is_among_the_runs_of_this_one() -> None:
    handle = _Elsewhere(3)
    assert wait_recorded(handle, JOB).exit_code == 3
    assert handle.state == "running"
    assert registered_runs()[0].exit_code == 3
    with pytest.raises(KeyboardInterrupt):
        wait_recorded(_Elsewhere(None), JOB)
    assert [run.exit_code for run in registered_runs()] == [1, 3]


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (
            Failure(1, 1, 0, 7, 1, report="Traceback\nValueError: empty"),
            "rank 1 failed with exit code 1. ValueError: empty",
        ),
        (Failure(1, 1, 0, 7, 1, stuck="rank 1 at train.py:3"), "no rank made progress: rank 1 at train.py:3."),
    ],
)
def test_a_failure_after_that_of_another_host_is_told_in_one_line(failure: Failure, line: str) -> None:
    problem = problem_of(Outcome(1, failure, "node 0 (a): rank 0 failed"), Job(Target("script", "train.py"), nodes=2))
    assert problem.why[1] == f"after it, here: {line}"
