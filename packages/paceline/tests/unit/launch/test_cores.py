"""Core files: found by the kernel's pattern, read by gdb, and what is said where there are none."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.launch.failure_report import problem_of
from paceline.launch.job import Job, Target
from paceline.launch.launcher import Failure, Outcome
from paceline.launch.processes import core_files

TARGET = Target("script", "train.py")


def crashed(pid: int, at: float = 0.0, code: int = -signal.SIGSEGV) -> Failure:
    return Failure(1, 1, 0, pid, code, at, "Fatal Python error: Segmentation fault")


@pytest.fixture
def pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Sets what the kernel is said to do with core files, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)

    def say(text: str, uses_pid: str = "0") -> None:
        for name, value in (("_PATTERN", text), ("_USES_PID", uses_pid)):
            path = tmp_path / name
            path.write_text(f"{value}\n")
            monkeypatch.setattr(core_files, name, path)

    return say


def test_a_process_that_did_not_crash_has_no_core_file() -> None:
    failure = crashed(1, code=7)
    assert core_files.with_backtrace(failure, TARGET) is failure


@pytest.mark.parametrize(
    ("text", "uses_pid", "name"),
    [
        ("core", "0", "core"),
        ("core", "1", "core.77"),
        ("core.%p", "1", "core.77"),
        ("dump-%e-%%-%p.%h", "0", "dump-python-%-77.node1"),
    ],
)
def test_core_files_are_found_by_the_kernels_pattern(text: str, uses_pid: str, name: str, pattern, monkeypatch) -> None:
    pattern(text, uses_pid)
    monkeypatch.setattr(core_files.shutil, "which", lambda name: None)
    Path(name).write_bytes(b"\x7fELF")
    report = core_files.with_backtrace(crashed(77, time.time()), TARGET).report
    assert report.startswith("Fatal Python error: Segmentation fault\n\ncore file: "), report
    assert f"{name} (0 MB)" in report
    assert "gdb is not installed here; then: gdb -batch -ex 'thread apply all backtrace'" in report


def test_the_core_file_of_an_earlier_crash_is_not_taken(pattern) -> None:
    pattern("core")
    Path("core").touch()
    os.utime("core", (1, 1))
    report = core_files.with_backtrace(crashed(77, time.time()), TARGET).report
    assert "there is no core file: the kernel was to write 'core'" in report


@pytest.mark.parametrize(
    ("program", "told"),
    [("/lib/systemd/systemd-coredump %P", "`coredumpctl gdb 77`"), ("/usr/share/apport/apport -p%p", "apport")],
)
def test_a_program_that_takes_core_files_is_named(program: str, told: str, pattern) -> None:
    pattern(f"|{program}")
    report = core_files.with_backtrace(crashed(77), TARGET).report
    assert f"the kernel gives core files to {program.split()[0]} and writes none itself: look with" in report
    assert told in report
    assert "sysctl -w kernel.core_pattern=core.%p" in report
    assert core_files.allow().startswith("--cores: the kernel gives core files to")


def test_a_system_that_allows_none_says_how_to(monkeypatch) -> None:
    monkeypatch.setattr(core_files.resource, "getrlimit", lambda what: (0, 0))
    assert "`ulimit -Hc` is 0" in core_files.allow()


def test_the_fix_points_to_what_there_is() -> None:
    job = Job(TARGET, core_files=True)
    without = Outcome(139, crashed(77))
    assert "run again with `--cores`" in problem_of(without, job).fix
    read = Outcome(139, replace(crashed(77), report=f"...\n{core_files.BACKTRACE}\n#0 main"))
    assert problem_of(read, job).fix == "a crash in compiled code: the stack and the backtrace above say where"


def test_a_backtrace_of_a_real_crash(tmp_path: Path) -> None:
    if not Path("/proc/sys/kernel/core_pattern").exists() or core_files._pattern().startswith(("|", "/")):
        pytest.skip("the kernel writes no core files into the working directory here")
    if core_files.shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if hard == 0:
        pytest.skip("core files are not allowed here (ulimit -Hc)")
    script = "import ctypes; ctypes.string_at(0)"
    begun = time.time()
    limit = lambda: resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))  # noqa: E731
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, preexec_fn=limit)
    assert process.wait() == -signal.SIGSEGV
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        report = core_files.with_backtrace(crashed(process.pid, begun), TARGET).report
    finally:
        os.chdir(before)
    assert "its backtrace (the thread that crashed):\n#0 " in report, report
    assert "string_at" in report
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".backtrace")] == []
