"""Do the hosts' clocks agree?"""

from __future__ import annotations

import statistics

from paceline.doctor.facts import Examination
from paceline.doctor.finding import Check, Finding, Level, on, where_all
from paceline.doctor.units import seconds

_NOTICED_S = 0.25  # lines of logs of two hosts are no longer in order
_WRONG_S = 2.0  # files of a shared folder have times in the future, certificates and tickets are refused


def judge(examination: Examination) -> list[Finding]:
    """A problem or a warning for each host whose clock differs from the median of all, beyond what was measured."""
    clocks = examination.clocks
    if not clocks:
        return []
    # The clock where the command runs takes part, so that of two hosts the one is named that differs from it.
    right = statistics.median([0.0, *(clock.offset_s for clock in clocks.values())])
    findings = []
    largest = 0.0
    for host, clock in clocks.items():
        difference = clock.offset_s - right
        certain = max(abs(difference) - clock.bound_s, 0.0)
        largest = max(largest, abs(difference) + clock.bound_s)
        if certain > _NOTICED_S:
            direction = "ahead of" if difference > 0 else "behind"
            what = f"its clock is {seconds(abs(difference))} {direction} the others (within {seconds(clock.bound_s)})"
            level: Level = "problem" if certain > _WRONG_S else "warning"
            findings.append(Finding(level, "clock", host, what, _fix(examination, host, right)))
    if not findings:
        what = f"all clocks are within {seconds(largest)} of each other"
        findings.append(Finding("ok", "clocks", where_all(examination), what))
    return findings


def _fix(examination: Examination, host: str, right: float) -> str:
    """Synchronises the clock with what the host has for it, else with that of a host whose clock is right."""
    programs = examination.facts[host].programs if host in examination.facts else ()
    if "chronyc" in programs:
        return on(host, examination, "sudo chronyc makestep")
    if "timedatectl" in programs:
        return on(host, examination, "sudo timedatectl set-ntp true")
    others = [name for name in examination.clocks if name != host]
    source = min(others, key=lambda name: abs(examination.clocks[name].offset_s - right), default="HOST")
    return on(host, examination, f'sudo date -s "@$(ssh {source} date +%s.%N)"')


CHECK = Check("clocks", judge)
