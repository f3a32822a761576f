"""Checks that the limits of the system are high enough for a run: open files, processes, locked memory, core files."""

from __future__ import annotations

from paceline_hosts.doctor.facts import Examination, HostFacts, Limit
from paceline_hosts.doctor.finding import Check, Finding, Level, on, where_all
from paceline_hosts.doctor.units import num_bytes

# Each rank has a connection to each other rank, and each worker of a loader opens a few files.
_OPEN_FILES = 4096
_TOO_FEW_OPEN_FILES = 512
# The limit of processes counts threads too.
_PROCESSES = 4096


def judge(examination: Examination) -> list[Finding]:
    """Finds limits with which no run would start (problems), or with which a large run would fail (warnings)."""
    findings: list[Finding] = []
    for host, facts in examination.facts.items():
        findings += _of_host(examination, host, facts)
    if not findings and examination.facts:
        facts = next(iter(examination.facts.values()))
        no_core_files = facts.core_files is not None and facts.core_files.soft == 0
        core_files = "no core files" if no_core_files else "core files"
        what = f"{_shown(facts.open_files)} open files, {_shown(facts.processes)} processes, {core_files}"
        findings.append(Finding("ok", "limits", where_all(examination), what))
    return findings


def _of_host(examination: Examination, host: str, facts: HostFacts) -> list[Finding]:
    findings = []
    if _below(facts.open_files, _OPEN_FILES):
        level: Level = "problem" if _below(facts.open_files, _TOO_FEW_OPEN_FILES) else "warning"
        what = f"a process may open {_shown(facts.open_files)} files (ulimit -n)"
        findings.append(Finding(level, "limit-files", host, what, _fix(examination, host, "nofile", "65536")))
    if _below(facts.processes, _PROCESSES):
        what = f"this user may have {_shown(facts.processes)} processes and threads (ulimit -u)"
        findings.append(Finding("warning", "limit-processes", host, what, _fix(examination, host, "nproc", "65536")))
    # RDMA locks its buffers in memory; other transports need no locked memory.
    if facts.has_rdma and facts.locked_memory is not None and facts.locked_memory.soft != -1:
        what = f"a process may lock {num_bytes(facts.locked_memory.soft)} in memory (ulimit -l): RDMA fails beyond it"
        findings.append(Finding("problem", "limit-memory", host, what, _fix(examination, host, "memlock", "unlimited")))
    return findings


def _fix(examination: Examination, host: str, name: str, value: str) -> str:
    """Returns the command that sets a limit for all later sessions, including those of ssh."""
    command = f"echo '* - {name} {value}' | sudo tee -a /etc/security/limits.d/paceline.conf"
    return f"{on(host, examination, command)}, then log in again"


def _below(limit: Limit | None, least: int) -> bool:
    return limit is not None and 0 <= limit.soft < least


def _shown(limit: Limit | None) -> str:
    if limit is None:
        return "unknown"
    return "unlimited" if limit.soft == -1 else str(limit.soft)


CHECK = Check("limits", judge)
