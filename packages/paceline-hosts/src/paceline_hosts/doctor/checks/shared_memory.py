"""Checks that /dev/shm, through which NCCL and the workers of a DataLoader pass data, is large enough."""

from __future__ import annotations

from paceline_hosts.doctor.facts import Examination, HostFacts
from paceline_hosts.doctor.finding import Check, Finding, on, where_all
from paceline_hosts.doctor.units import num_bytes

# Docker's default is 64 MiB. When it is full, SIGBUS ends the workers of a DataLoader.
_TOO_SMALL = 128 << 20
_SMALL = 1 << 30


def judge(examination: Examination) -> list[Finding]:
    """Finds hosts where it is missing or almost full (problems), or where it has little room (warnings)."""
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
        or_more = " or more" if len(set(sizes)) > 1 else ""
        what = f"/dev/shm has {num_bytes(min(sizes))}{or_more}"
        findings.append(Finding("ok", "shared-memory", where_all(examination), what))
    return findings


def _fix(examination: Examination, host: str, facts: HostFacts) -> str:
    """Returns the fix for a host whose /dev/shm is missing, too small or full."""
    if facts.in_container:
        return "start the container with `--shm-size=8g` (Kubernetes: an `emptyDir` with `medium: Memory` at /dev/shm)"
    if facts.shared_memory is None:
        return on(host, examination, "sudo mkdir -p /dev/shm && sudo mount -t tmpfs -o size=8g tmpfs /dev/shm")
    size, _ = facts.shared_memory
    # It is not small but full, probably of the files of processes that have crashed.
    if size >= 2 * _SMALL:
        return on(host, examination, "rm /dev/shm/torch_* /dev/shm/nccl-*")
    return on(host, examination, "sudo mount -o remount,size=8g /dev/shm")


CHECK = Check("shared memory", judge)
