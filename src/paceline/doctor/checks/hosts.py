"""Do all hosts answer, and can they enter the working directory?"""

from __future__ import annotations

from paceline.doctor.facts import Examination
from paceline.doctor.finding import Check, Finding, leave_out, listed


def judge(examination: Examination) -> list[Finding]:
    """A problem for each host that did not answer a step, or lacks the working directory."""
    findings = []
    several = len(examination.hosts) > 1
    for host, reason in examination.silent.items():
        fix = leave_out(host) if several else "run `paceline env`, which says what this Python lacks"
        findings.append(Finding("problem", "host-silent", host, f"at the step {reason}", fix))
    for host, facts in examination.facts.items():
        if facts.no_cwd:
            what = f"the working directory is not there ({facts.no_cwd})"
            fix = f"change to a folder that {host} has too, and start again there"
            findings.append(Finding("problem", "host-directory", host, what, fix))
    if not findings:
        count = len(examination.hosts)
        what = f"{count} hosts answer: {listed(examination.hosts)}" if several else "this host alone"
        findings.append(Finding("ok", "hosts", "all hosts" if several else examination.hosts[0], what))
    return findings


CHECK = Check("hosts", judge)
