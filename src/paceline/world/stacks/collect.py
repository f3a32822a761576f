"""Collects the stacks of running ranks of this host, and of what they have started, without their help.

    a signal        the process writes its stacks itself (`dump.py`)
    py-spy          where it is installed: native stacks too; of a process that is stopped, which cannot write, Python's
    /proc           its state, and its children

A process gets the signal only where it has a handler for it: it would end another.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.world.stacks import procfs
from paceline.world.stacks.dump import STACKS, Files
from paceline.world.stacks.groups import ProcessStacks
from paceline.world.stacks.parse import Thread, threads_of, threads_of_py_spy

_WRITE_S = 2.0  # how long a process may take to write its stacks
_QUIET_S = 0.1  # a file that has not grown for so long is complete
_POLL_S = 0.02
_SPY_S = 10.0  # how long py-spy may take
_SPIES = 8  # how many run at the same time
_AT_MOST = 64  # children of one rank that are asked

Pause = Callable[[float], object]


@dataclass(frozen=True)
class SpyResult:
    """What py-spy has written of a process, or why it has not."""

    text: str = ""
    failure: str = ""


def collect(pid_of_rank: Mapping[int, int], folder: Path, pause: Pause = time.sleep) -> list[ProcessStacks]:
    """The stacks of ranks, in their order.

    Args:
        pid_of_rank: the ranks of this host.
        folder: that in which their files are.
        pause: waits a moment, and does meanwhile what else must go on.
    """
    family: dict[int, list[int]] = {}
    for pid in pid_of_rank.values():
        family[pid] = list(procfs.descendants(pid))[:_AT_MOST]
    # All ranks at once: they write into different files. Children write into the file of the rank that has forked them.
    texts = _ask(list(pid_of_rank.values()), dict.fromkeys(family), folder, pause)
    for pid, descendants in family.items():
        for child in descendants:
            texts |= _ask([child], {child: pid}, folder, pause)
    everybody = [pid for rank_pid in family for pid in (rank_pid, *family[rank_pid])]
    natives = _py_spy(everybody, folder, pause)
    return [_of_rank(rank, pid, family[pid], texts, natives) for rank, pid in sorted(pid_of_rank.items())]


def _of_rank(
    rank: int, pid: int, descendants: Sequence[int], texts: Mapping[int, str], natives: Mapping[int, SpyResult]
) -> ProcessStacks:
    children = [_of_process(child, texts, natives) for child in descendants]
    own = _of_process(pid, texts, natives)
    return replace(own, rank=rank, children=tuple(children))


def _of_process(pid: int, texts: Mapping[int, str], natives: Mapping[int, SpyResult]) -> ProcessStacks:
    state = procfs.state(pid)
    spied = natives.get(pid, SpyResult())
    native = spied.text
    threads: tuple[Thread, ...] = threads_of(texts.get(pid, ""))
    if state == "T" and native:
        threads, native = threads_of_py_spy(native), ""
    note = ""
    if not threads and state == "T":
        note = "it cannot write its stack while it is stopped; where py-spy is installed, that reads it"
    elif not threads and pid in texts:
        note = f"it did not write its stack within {_WRITE_S:g} s"
    elif not threads:
        note = "no process that the launcher can ask for its stack"
    note = "; ".join(text for text in (note, spied.failure) if text)
    return ProcessStacks(pid, threads, state, native=native, note=note, command=procfs.command(pid))


def _ask(pids: Sequence[int], writes_for: Mapping[int, int | None], folder: Path, pause: Pause) -> dict[int, str]:
    """Sends the signal to processes, and gives what each of those that have a handler has written.

    Args:
        pids: whom; each writes into another file.
        writes_for: into whose file a process writes; None for its own.
        folder, pause: as for `collect`.
    """
    path_of: dict[int, Path] = {}
    size_before: dict[int, int] = {}
    for pid in pids:
        path = Files(folder, writes_for[pid] or pid).stacks
        if procfs.state(pid) in ("T", "Z", "") or not procfs.catches(pid, STACKS) or not path.exists():
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
                size[pid], quiet_since[pid] = path.stat().st_size, now
        waited = [now - quiet_since[pid] for pid in path_of if size[pid] > size_before[pid]]
        if len(waited) == len(path_of) and all(seconds >= _QUIET_S for seconds in waited):
            break
        pause(_POLL_S)
    texts = {}
    for pid, path in path_of.items():
        texts[pid] = path.read_bytes()[size_before[pid] :].decode(errors="replace")
    return texts


def _py_spy(pids: Sequence[int], folder: Path, pause: Pause) -> dict[int, SpyResult]:
    """What py-spy writes of each process; {} where it is not installed. It stops a process for a moment."""
    program = shutil.which("py-spy")
    if program is None:
        return {}
    results: dict[int, SpyResult] = {}
    for start in range(0, len(pids), _SPIES):
        results |= _spy_on(program, pids[start : start + _SPIES], folder, pause)
    return results


def _spy_on(program: str, pids: Sequence[int], folder: Path, pause: Pause) -> dict[int, SpyResult]:
    commands: dict[int, subprocess.Popen[bytes]] = {}
    outputs = {pid: folder / f"{pid}.py-spy" for pid in pids}
    for pid, path in outputs.items():
        # A process that is stopped cannot be attached to; its memory does not change, and can be read as it is.
        how = "--nonblocking" if procfs.state(pid) == "T" else "--native"
        words = [program, "dump", how, "--full-filenames", "--pid", str(pid)]
        with path.open("wb") as file:
            commands[pid] = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
    until = time.monotonic() + _SPY_S
    while time.monotonic() < until and any(command.poll() is None for command in commands.values()):
        pause(_POLL_S)
    results = {}
    for pid, command in commands.items():
        if command.poll() is None:
            command.kill()
        succeeded = command.wait() == 0
        text = outputs[pid].read_text(errors="replace").strip()
        outputs[pid].unlink()
        reason = (text.splitlines() or ["it did not answer in time"])[0]
        results[pid] = SpyResult(text) if succeeded else SpyResult(failure=f"py-spy could not read it: {reason}")
    return results
