"""Collects the stacks of the running ranks of this host, and of the processes that they have started.

    a signal        lets the process write its stacks itself (`dump.py`)
    py-spy          if it is installed: reads stacks of compiled code too, and those of a stopped process, which cannot write
    /proc           has the state of a process, and its children

A process gets the signal only if it has a handler for it. Without one, the signal would end it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.base.process_name import process_state
from paceline.world.stacks.dump import STACKS, DumpFiles
from paceline.world.stacks.parse import Stack
from paceline_lens.hangs import procfs
from paceline_lens.hangs.stack_report import ProcessStacks
from paceline_lens.hangs.stack_text import threads_of, threads_of_py_spy

_WRITE_S = 2.0  # how long a process may take to write its stacks
_QUIET_S = 0.1  # a file that has not grown for so long is complete
_POLL_S = 0.02
_SPY_S = 10.0  # how long py-spy may take
_SPIES = 8  # processes of py-spy at the same time
_MAX_CHILDREN = 64  # of one rank

Pause = Callable[[float], object]


def collect(pid_of_rank: Mapping[int, int], folder: Path, pause: Pause = time.sleep) -> dict[int, ProcessStacks]:
    """Returns the stacks of ranks, by rank, with those of the processes that they have started.

    Args:
        pid_of_rank: the ranks of this host.
        folder: the folder of their files.
        pause: waits for some seconds; a launcher does its other work meanwhile.
    """
    family: dict[int, list[int]] = {}
    for pid in pid_of_rank.values():
        family[pid] = list(procfs.descendants(pid))[:_MAX_CHILDREN]
    # All ranks write at the same time, into different files. Children write into the file of the rank that has forked them,
    # so they write one after the other.
    texts = _ask(list(pid_of_rank.values()), dict.fromkeys(family), folder, pause)
    for pid, descendants in family.items():
        for child in descendants:
            texts |= _ask([child], {child: pid}, folder, pause)
    all_pids: list[int] = []
    for pid, descendants in family.items():
        all_pids += [pid, *descendants]
    natives, failures = _py_spy(all_pids, folder, pause)
    stacks: dict[int, ProcessStacks] = {}
    for rank, pid in sorted(pid_of_rank.items()):
        children = [_of_process(child, texts, natives, failures) for child in family[pid]]
        stacks[rank] = replace(_of_process(pid, texts, natives, failures), children=tuple(children))
    return stacks


def _of_process(
    pid: int, texts: Mapping[int, str], natives: Mapping[int, str], failures: Mapping[int, str]
) -> ProcessStacks:
    state = process_state(pid)
    native = natives.get(pid, "")
    threads: tuple[Stack, ...] = threads_of(texts.get(pid, ""))
    if state == "T" and native:
        threads = threads_of_py_spy(native)
        native = ""
    note = ""
    if not threads and state == "T":
        note = "it cannot write its stack while it is stopped; install py-spy, which can read it"
    elif not threads and pid in texts:
        note = f"it did not write its stack within {_WRITE_S:g} s"
    elif not threads:
        note = "it has no handler with which it could write its stack"
    note = "; ".join(text for text in (note, failures.get(pid)) if text)
    return ProcessStacks(pid, threads, state, native=native, note=note, command=procfs.command(pid))


def _ask(pids: Sequence[int], writes_for: Mapping[int, int | None], folder: Path, pause: Pause) -> dict[int, str]:
    """Sends the signal to processes, and returns what each process with a handler has written.

    Args:
        pids: the processes; each writes into another file.
        writes_for: the process into whose file a process writes; None for its own.
        folder, pause: those of `collect`.
    """
    path_of: dict[int, Path] = {}
    size_before: dict[int, int] = {}
    for pid in pids:
        path = DumpFiles(folder, writes_for[pid] or pid).stacks
        is_running = process_state(pid) not in ("T", "Z", "")
        if not is_running or not procfs.catches(pid, STACKS) or not path.exists():
            continue
        path_of[pid] = path
        size_before[pid] = path.stat().st_size
        os.kill(pid, STACKS)
    quiet_since = dict.fromkeys(path_of, time.monotonic())
    size = dict(size_before)
    until = time.monotonic() + _WRITE_S
    while time.monotonic() < until:
        now = time.monotonic()
        for pid, path in path_of.items():
            if path.stat().st_size != size[pid]:
                size[pid] = path.stat().st_size
                quiet_since[pid] = now
        quiet_s = [now - quiet_since[pid] for pid in path_of if size[pid] > size_before[pid]]
        all_have_written = len(quiet_s) == len(path_of)
        if all_have_written and all(seconds >= _QUIET_S for seconds in quiet_s):
            break
        pause(_POLL_S)
    texts = {}
    for pid, path in path_of.items():
        texts[pid] = path.read_bytes()[size_before[pid] :].decode(errors="replace")
    return texts


def _py_spy(pids: Sequence[int], folder: Path, pause: Pause) -> tuple[dict[int, str], dict[int, str]]:
    """Returns what py-spy writes about processes, and why it could not read others. It stops each process for a moment."""
    texts: dict[int, str] = {}
    failures: dict[int, str] = {}
    program = shutil.which("py-spy")
    if program is None:
        return texts, failures
    for start in range(0, len(pids), _SPIES):
        commands: dict[int, subprocess.Popen[bytes]] = {}
        for pid in pids[start : start + _SPIES]:
            # py-spy cannot attach to a stopped process. But the memory of such a process does not change, so it can be read.
            mode = "--nonblocking" if process_state(pid) == "T" else "--native"
            words = [program, "dump", mode, "--full-filenames", "--pid", str(pid)]
            with (folder / f"{pid}.py-spy").open("wb") as file:
                commands[pid] = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        until = time.monotonic() + _SPY_S
        while time.monotonic() < until and any(command.poll() is None for command in commands.values()):
            pause(_POLL_S)
        for pid, command in commands.items():
            if command.poll() is None:
                command.kill()
            output = folder / f"{pid}.py-spy"
            text = output.read_text(errors="replace").strip()
            output.unlink()
            if command.wait() == 0:
                texts[pid] = text
            else:
                failures[pid] = f"py-spy could not read it: {(text.splitlines() or ['it did not answer in time'])[0]}"
    return texts, failures
