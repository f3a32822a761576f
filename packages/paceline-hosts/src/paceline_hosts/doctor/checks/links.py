"""Which link is the slowest, and is it as fast as the others and as its own interfaces report?"""

from __future__ import annotations

from dataclasses import replace

from paceline_hosts.doctor.facts import Examination, LinkFacts
from paceline_hosts.doctor.finding import Check, Finding, Level, leave_out, where_all
from paceline_hosts.doctor.units import rate, seconds

# One TCP connection of one Python process cannot fill a faster link, so a measurement above this rate says nothing about it.
_MEASURABLE = 5e9 / 8
_WARNING = 0.5
_PROBLEM = 0.1
_FAR_S = 2e-3  # within one building, the latency is a tenth of this


def judge(examination: Examination) -> list[Finding]:
    """Finds a host or a pair whose links are much slower than the fastest link, or than the rate of their interfaces."""
    links = examination.links
    if not links:
        return []
    slowest = min(links, key=lambda link: link.bytes_per_s)
    fastest = max(link.bytes_per_s for link in links)
    findings = []
    expected = _expected(examination, slowest, min(fastest, _MEASURABLE))
    if slowest.bytes_per_s < _WARNING * expected:
        level: Level = "problem" if slowest.bytes_per_s < _PROBLEM * expected else "warning"
        findings.append(_slow(examination, slowest, fastest, level, expected))
    farthest = max(links, key=lambda link: link.latency_s)
    if not findings and farthest.latency_s > _FAR_S:
        what = f"a message takes {seconds(farthest.latency_s)}: small collectives wait for it"
        fix = "take hosts of one place, or communicate less often: `--accumulate N`"
        findings.append(Finding("warning", "link-far", f"{farthest.source} -> {farthest.target}", what, fix))
    if not findings:
        pair = f"{slowest.source} -> {slowest.target}"
        what = f"slowest link {pair}: {rate(slowest.bytes_per_s)}; fastest {rate(fastest)}; latency up to "
        what += seconds(farthest.latency_s)
        findings.append(Finding("ok", "links", where_all(examination), what))
    missing = _not_measured(examination)
    return [replace(finding, what=finding.what + missing) for finding in findings]


def _not_measured(examination: Examination) -> str:
    """Returns how many links were measured, for the end of a sentence; "" if all were.

    With many hosts there is no time to measure each pair (see `doctor.rounds`).
    """
    num_open = 0
    for connection in examination.connections:
        answers = connection.source not in examination.silent and connection.target not in examination.silent
        if answers and connection.outcome == "open":
            num_open += 1
    num_measured = len(examination.links)
    return f"; {num_measured} of {num_open} links were measured, for lack of time" if num_measured < num_open else ""


def _slow(examination: Examination, slowest: LinkFacts, fastest: float, level: Level, expected: float) -> Finding:
    culprit = _common_host(examination, expected)
    pair = f"{slowest.source} -> {slowest.target}"
    reasons = [f"the fastest link has {rate(fastest)}"]
    speed = _speed(examination, slowest)
    if speed is not None:
        reasons.append(f"its interface says {rate(speed)}")
    what = f"slowest link {pair}: {rate(slowest.bytes_per_s)}; {', '.join(reasons)}"
    if culprit:
        what = f"all links of {culprit} are slow; {what}"
    host = culprit or slowest.target
    fix = f"{leave_out(host)}; `ethtool {_interface(examination, slowest, host)}` there shows what its link agreed on"
    return Finding(level, "link-slow", culprit or pair, what, fix)


def _common_host(examination: Examination, expected: float) -> str:
    """Returns the host whose links are all slow, if no other link is; "" if there is no such host."""
    slow = [link for link in examination.links if link.bytes_per_s < _WARNING * expected]
    # With two hosts, each link belongs to both of them, so neither can be blamed.
    for host in examination.facts:
        own = [link for link in examination.links if host in (link.source, link.target)]
        if len(examination.facts) > 2 and own and {*own} == {*slow}:
            return host
    return ""


def _expected(examination: Examination, link: LinkFacts, fastest: float) -> float:
    """Returns the bytes per second that a link should carry, from the fastest link and the rate of its own interfaces."""
    speed = _speed(examination, link)
    if speed is None:
        return fastest
    return max(fastest, min(speed, _MEASURABLE) * _WARNING)


def _speed(examination: Examination, link: LinkFacts) -> float | None:
    """Returns the negotiated rate of the slower of the two interfaces in bytes per second; None if neither reports one."""
    speeds = []
    for host, other in ((link.source, link.target), (link.target, link.source)):
        facts = examination.facts.get(host)
        if facts is None:
            continue
        interface = dict(facts.network.routes).get(other)
        for card in facts.network.interfaces:
            if card.name == interface and card.speed_mbit is not None:
                speeds.append(card.speed_mbit * 1e6 / 8)
    return min(speeds, default=None)


def _interface(examination: Examination, link: LinkFacts, host: str) -> str:
    other = link.source if host == link.target else link.target
    facts = examination.facts.get(host)
    if facts is None:
        return "INTERFACE"
    return dict(facts.network.routes).get(other, "INTERFACE")


CHECK = Check("links", judge)
