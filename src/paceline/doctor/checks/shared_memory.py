"""Is /dev/shm, through which the workers of loaders and NCCL pass data, large enough?"""

from __future__ import annotations

from paceline.doctor.facts import Examination, HostFacts
from paceline.doctor.finding import Check, Finding, on, where_all
from paceline.doctor.units import num_bytes

_TOO_SMALL = 128 << 20  # docker gives 64 MiB, with which the workers of a loader are ended by SIGBUS
_SMALL = 1 << 30


def judge(examination: Examination) -> list[Finding]:
    """A problem where it is missing or tiny, a warning where it is small or nearly full."""
    findings = []
    sizes = []
    for host, facts in examination.facts.items():
        if facts.shared_memory is None:
            what = "there is no /dev/shm: the workers of a DataLoader cannot pass batches on"
            findings.append(Finding("problem", "shared-memory", host, what, _fix(examination, host, facts)))
            continue
        size, free = facts.shared_memory
        sizes.append(size)
        what = f"/dev/shm has {num_bytes(size)}, {num_bytes(free)} of them free"
        if free < _TOO_SMALL:
            what += ": the workers of a DataLoader end with a bus error when it is full"
            findings.append(Finding("problem", "shared-memory", host, what, _fix(examination, host, facts)))
        elif free < _SMALL:
            findings.append(Finding("warning", "shared-memory", host, what, _fix(examination, host, facts)))
    if not findings and sizes:
        what = f"/dev/shm has {num_bytes(min(sizes))}{' or more' if len(set(sizes)) > 1 else ''}"
        findings.append(Finding("ok", "shared-memory", where_all(examination), what))
    return findings


def _fix(examination: Examination, host: str, facts: HostFacts) -> str:
    if facts.in_container:
        return "start the container with `--shm-size=8g` (Kubernetes: an `emptyDir` with `medium: Memory` at /dev/shm)"
    size = facts.shared_memory[0] if facts.shared_memory is not None else 0
    if size >= 2 * _SMALL:  # it is full, not small: files of processes that have crashed
        return on(host, examination, "rm /dev/shm/torch_* /dev/shm/nccl-*")
    if facts.shared_memory is None:
        return on(host, examination, "sudo mkdir -p /dev/shm && sudo mount -t tmpfs -o size=8g tmpfs /dev/shm")
    return on(host, examination, "sudo mount -o remount,size=8g /dev/shm")


CHECK = Check("shared memory", judge)
