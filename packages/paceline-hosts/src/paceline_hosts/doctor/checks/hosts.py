"""Checks that all hosts answer, and that they have the working directory."""

from __future__ import annotations

from paceline_hosts.doctor.facts import Examination
from paceline_hosts.doctor.finding import Check, Finding, leave_out, listed


def judge(examination: Examination) -> list[Finding]:
    """Finds each host that did not answer at some step, or that has no such working directory."""
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
        if several:
            what = f"{len(examination.hosts)} hosts answer: {listed(examination.hosts)}"
            findings.append(Finding("ok", "hosts", "all hosts", what))
        else:
            findings.append(Finding("ok", "hosts", examination.hosts[0], "this host alone"))
    return findings


CHECK = Check("hosts", judge)
