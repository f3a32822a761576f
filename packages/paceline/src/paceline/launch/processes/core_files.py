"""Core files of processes that crash (`--cores`).

The launcher allows core files before the processes start. After a crash it finds the file and reads the backtrace from it.
The kernel decides where a core file goes: /proc/sys/kernel/core_pattern names a file, or a program (`|program`) that gets
the core, such as systemd-coredump or apport.
"""

from __future__ import annotations

import glob
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline.launch.job import Target
from paceline.launch.launcher import Failure

# How long the kernel may take to write a core file, and gdb to read it. The file has several GB of memory and libraries.
WRITE_S = 300.0
_READ_S = 180.0
_FRAMES = 60
BACKTRACE = "its backtrace (the thread that crashed):"
_CLOCK_S = 1.0  # how much older than the crash a file may seem, because the times of files are coarse
_PATTERN = Path("/proc/sys/kernel/core_pattern")
_USES_PID = Path("/proc/sys/kernel/core_uses_pid")


def allow() -> str:
    """Allows core files for this process and all that it starts. Returns why there will be none, or ""."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if hard == 0:
        return (
            "--cores: this system allows no core files (`ulimit -Hc` is 0); as root, add `* hard core unlimited` to "
            "/etc/security/limits.conf and log in again (in a container: `docker run --ulimit core=-1`)"
        )
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    pattern = _pattern()
    if pattern.startswith("|"):
        return f"--cores: {_to_a_program(pattern)}"
    return ""


def with_backtrace(failure: Failure, target: Target, pause: Callable[[float], object] = time.sleep) -> Failure:
    """Adds to the report of a process that crashed where its core file is, and its backtrace.

    Args:
        failure: the failure; if it was no crash, it is returned unchanged.
        target: what the process ran.
        pause: waits for some seconds; messages of other nodes are served meanwhile.
    """
    if failure.code >= 0:
        return failure
    pattern = _pattern()
    if pattern.startswith("|"):
        lines = [_to_a_program(pattern, failure.pid)]
    else:
        core = _core_file(pattern, failure.pid, failure.at - _CLOCK_S)
        if core is not None:
            lines = _read(core, _program(target), pause)
        else:
            lines = [
                f"there is no core file: the kernel was to write {pattern!r} (/proc/sys/kernel/core_pattern) in the working "
                f"directory of the process, and {os.getcwd()} has none of process {failure.pid}"
            ]
    return replace(failure, report="\n".join([failure.report, "", *lines]).strip())


def _pattern() -> str:
    """Returns the kernel's pattern for names of core files; "core" if the system has no such file."""
    return _PATTERN.read_text().strip() if _PATTERN.exists() else "core"


def _to_a_program(pattern: str, pid: int | None = None) -> str:
    program = pattern[1:].split()[0]
    look = f"the documentation of {program}"
    if "systemd-coredump" in program:
        look = f"`coredumpctl gdb {pid or 'PID'}`"
    return (
        f"the kernel gives core files to {program} and writes none itself: look with {look}; for files in the working "
        "directory, run as root: sysctl -w kernel.core_pattern=core.%p"
    )


def _core_file(pattern: str, pid: int, since: float) -> Path | None:
    """Returns the newest file that matches the kernel's pattern and was written after `since`."""
    # Only the process id is known here. Everything else that the kernel fills in may be any text.
    meanings = {"%p": str(pid), "%%": "%"}
    wanted = ""
    for part in re.split(r"(%.)", pattern):
        if part.startswith("%"):
            wanted += meanings.get(part, "*")
        else:
            wanted += glob.escape(part)
    if "%p" not in pattern and _USES_PID.exists() and _USES_PID.read_text().strip() != "0":
        wanted += f".{pid}"
    files = [Path(name).absolute() for name in glob.glob(wanted)]
    fresh = [file for file in files if file.stat().st_mtime >= since]
    return max(fresh, key=lambda file: file.stat().st_mtime, default=None)


def _program(target: Target) -> str:
    """Returns the program that has crashed, which gdb needs to read the core file."""
    name = shutil.which(target.name) if target.kind == "program" else None
    return os.path.realpath(name or sys.executable)


def _read(core: Path, program: str, pause: Callable[[float], object]) -> list[str]:
    """Returns lines that say where the core file is, and the backtrace of the thread that crashed."""
    lines = [f"core file: {core} ({core.stat().st_size / 1e6:.0f} MB)"]
    if shutil.which("gdb") is None:
        return [*lines, "its backtrace: gdb is not installed here; then: " + _by_hand(core, program)]
    # debuginfod would ask a server for symbols, and wait for it.
    command = ["gdb", "-nx", "-batch", "-iex", "set debuginfod enabled off", "-ex", f"backtrace {_FRAMES}"]
    with open(f"{core}.backtrace", "w+", encoding="utf-8", errors="replace") as output:
        gdb = subprocess.Popen(
            [*command, program, str(core)], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + _READ_S
        while gdb.poll() is None and time.monotonic() < until:
            pause(0.05)
        if gdb.poll() is None:
            gdb.kill()
            gdb.wait()
        output.seek(0)
        # gdb prints the first frame twice: when it opens the file, and in the backtrace.
        frames = [line.rstrip() for line in output if line.startswith("#")][1:]
    Path(output.name).unlink()
    if not frames:
        return [*lines, f"its backtrace: gdb gave none in {_READ_S:g} s; try " + _by_hand(core, program)]
    return [*lines, BACKTRACE, *frames, f"all threads: {_by_hand(core, program)}"]


def _by_hand(core: Path, program: str) -> str:
    return f"gdb -batch -ex 'thread apply all backtrace' {program} {core}"
