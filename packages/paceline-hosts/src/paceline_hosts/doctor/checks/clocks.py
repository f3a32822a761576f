"""Checks that the clocks of all hosts agree."""

from __future__ import annotations

import statistics

from paceline_hosts.doctor.facts import Examination
from paceline_hosts.doctor.finding import Check, Finding, Level, on, where_all
from paceline_hosts.doctor.units import seconds

_WARNING_S = 0.25  # from here on, the lines in the logs of two hosts are no longer in order
_PROBLEM_S = 2.0  # from here on, files in a shared folder have times in the future, and certificates may be refused


def judge(examination: Examination) -> list[Finding]:
    """Finds each host whose clock differs from the median of all by more than the error of the measurement."""
    clocks = examination.clocks
    if not clocks:
        return []
    # The clock of the host where the command runs is included (0.0). So with two hosts, the one that differs from it is named.
    median_s = statistics.median([0.0, *(clock.offset_s for clock in clocks.values())])
    findings = []
    largest = 0.0
    for host, clock in clocks.items():
        difference = clock.offset_s - median_s
        certain = max(abs(difference) - clock.bound_s, 0.0)
        largest = max(largest, abs(difference) + clock.bound_s)
        if certain > _WARNING_S:
            direction = "ahead of" if difference > 0 else "behind"
            what = f"its clock is {seconds(abs(difference))} {direction} the others (within {seconds(clock.bound_s)})"
            level: Level = "problem" if certain > _PROBLEM_S else "warning"
            findings.append(Finding(level, "clock", host, what, _fix(examination, host, median_s)))
    if not findings:
        what = f"all clocks are within {seconds(largest)} of each other"
        findings.append(Finding("ok", "clocks", where_all(examination), what))
    return findings


def _fix(examination: Examination, host: str, median_s: float) -> str:
    """Returns a command that sets the clock: with a program for NTP if the host has one, else from another host."""
    programs = examination.facts[host].programs if host in examination.facts else ()
    if "chronyc" in programs:
        return on(host, examination, "sudo chronyc makestep")
    if "timedatectl" in programs:
        return on(host, examination, "sudo timedatectl set-ntp true")
    others = [name for name in examination.clocks if name != host]
    source = min(others, key=lambda name: abs(examination.clocks[name].offset_s - median_s), default="HOST")
    return on(host, examination, f'sudo date -s "@$(ssh {source} date +%s.%N)"')


CHECK = Check("clocks", judge)
