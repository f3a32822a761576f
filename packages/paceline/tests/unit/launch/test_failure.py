"""Which process is named as the first that failed, or as the one whose end made others fail."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.launch.failure_report import problem_of
from paceline.launch.job import Job, Target
from paceline.launch.launcher import Outcome, Process
from paceline.launch.processes import failure
from paceline.launch.processes.failure import first_failure
from paceline.launch.processes.spawn import Worker

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:33717."


def ended(folder: Path, rank: int, code: int, report: str = "") -> Worker:
    """A process that has ended; a later rank ended later."""
    path = folder / str(rank)
    path.write_text(report)
    later = rank / 100
    times = {"ended": time.monotonic() + later, "alive": time.time() + later}
    return Worker(Process(rank, rank, {}), 1000 + rank, path, leads=False, code=code, **times)


@pytest.mark.parametrize(
    "report", [GLOO, "paceline.CollectiveError: gather failed, as rank 0 has left.  [collective-failed]"]
)
def test_a_rank_that_left_without_an_error_is_named_with_its_code(tmp_path: Path, report: str) -> None:
    found = first_failure([ended(tmp_path, 0, 0), ended(tmp_path, 1, 1, report), ended(tmp_path, 2, 1, report)], 0)
    assert found is not None and (found.rank, found.code, found.waiting, found.exit_code) == (0, 0, (1, 2), 1)
    problem = str(problem_of(Outcome(1, found), Job(Target("script", "train.py"), procs=3)))
    assert "rank 0 left with exit code 0 while ranks 1, 2 still waited for it.  [rank-failed]" in problem
    assert "failed after it: rank 1: " in problem and "--debug" in problem


def test_an_error_of_its_own_is_no_complaint_about_others(tmp_path: Path) -> None:
    found = first_failure([ended(tmp_path, 0, 0), ended(tmp_path, 1, 1, "ValueError: a bad sample")], 0)
    assert found is not None and (found.rank, found.waiting) == (1, ())


def test_a_lost_connection_without_anybody_to_name_suggests_debug_mode(tmp_path: Path) -> None:
    found = first_failure([ended(tmp_path, 0, 1, GLOO)], 0)
    problem = problem_of(Outcome(1, found), Job(Target("script", "train.py"), procs=2))
    assert found is not None and found.rank == 0 and "--debug" in problem.fix and "mend" not in problem.fix


@pytest.mark.needs("accelerate", "deepspeed")
def test_one_fix_names_all_libraries_whose_names_the_script_needs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import deepspeed\nfrom accelerate import Accelerator\n")
    found = first_failure([ended(tmp_path, 0, 1, "ModuleNotFoundError: No module named 'deepspeed'")], 0)
    fix = problem_of(Outcome(1, found), Job(Target("script", str(script)), procs=1)).fix
    assert fix == "`paceline launch --compat accelerate,deepspeed` serves accelerate's and deepspeed's names"
    script.write_text("import deepspeed\n")
    job = Job(Target("script", str(script)), procs=1, compat="accelerate")
    fix = problem_of(Outcome(1, found), job).fix
    assert "`paceline launch --compat accelerate,deepspeed`" in fix
    assert "`PACELINE_COMPAT=accelerate,deepspeed` before `accelerate launch`" in fix


@pytest.mark.needs("deepspeed")
def test_a_distribution_that_transformers_asks_for_is_one_whose_names_can_be_served(tmp_path: Path) -> None:
    report = "PackageNotFoundError: No package metadata was found for The 'deepspeed>=0.9.3' distribution was not found"
    found = first_failure([ended(tmp_path, 0, 1, report)], 0)
    job = Job(Target("script", "train.py"), procs=1, compat="accelerate")
    assert "--compat accelerate,deepspeed`" in problem_of(Outcome(1, found), job).fix


@pytest.mark.parametrize(
    ("compat", "device"),
    [
        ("", "accelerator.device"),
        ("accelerate", "accelerator.device"),
        ("accelerate,deepspeed", "accelerator.device"),
        pytest.param("deepspeed", "engine.device", marks=pytest.mark.needs("deepspeed")),
    ],
)
def test_a_script_that_needs_cuda_is_told_where_it_runs_or_what_to_write(
    tmp_path: Path, compat: str, device: str
) -> None:
    found = first_failure([ended(tmp_path, 0, 1, "AssertionError: Torch not compiled with CUDA enabled")], 0)
    job = Job(Target("script", "train.py"), procs=1, compat=compat)
    assert f"`.to({device})`" in problem_of(Outcome(1, found), job).fix


def test_an_exit_that_is_announced_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 keeps the store for a moment as it leaves: its exit code comes after the error of the others."""
    monkeypatch.setattr(failure, "stop", lambda *_: None)
    leaving = ended(tmp_path, 0, 0)
    leaving.code, leaving.popen = None, Redirect()  # type: ignore[assignment]
    text = "paceline.CollectiveError: gather failed, as rank 0 has left.  [collective-failed]\n  why: rank 0 has left: "
    found = first_failure([leaving, ended(tmp_path, 1, 1, text + failure.LEFT)], 0)
    assert found is not None and (found.rank, found.waiting) == (0, (1,))


class Redirect:
    """A process that ends with 0, and not at the first look."""

    def __init__(self) -> None:
        self.until = time.monotonic() + 0.3

    def poll(self) -> int | None:
        return 0 if time.monotonic() > self.until else None


def test_a_process_that_does_not_end_has_the_code_with_which_its_script_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread still runs, or the machine is so busy that taking the interpreter apart lasts for seconds."""
    monkeypatch.setattr(failure, "stop", lambda *_: None)
    monkeypatch.setattr(failure, "_EXIT_TIMEOUT_S", 0.0)
    slow = ended(tmp_path, 0, 0, "SystemExit: 9 (/home/me/train.py:6)")
    slow.code, slow.popen = None, SimpleNamespace(poll=lambda: None)  # type: ignore[assignment]
    found = first_failure([slow], 0)
    assert found is not None and found.code == 9
