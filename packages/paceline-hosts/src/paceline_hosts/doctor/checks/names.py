"""Are names and addresses of the other hosts looked up fast, and right?"""

from __future__ import annotations

from paceline_hosts.doctor.facts import Examination, LookupFacts
from paceline_hosts.doctor.finding import Check, Finding, listed, on, where_all
from paceline_hosts.doctor.units import seconds

# torch's store asks for the name of each client that connects. With a slow resolver, a run on three hosts started in 23 s,
# and in 7 s without it.
_SLOW_S = 1.0


def judge(examination: Examination) -> list[Finding]:
    """Finds hosts that wait for the resolver, that cannot resolve another host's name, or that get a wrong address for it."""
    findings: list[Finding] = []
    slowest = 0.0
    for host, facts in examination.facts.items():
        slow: list[LookupFacts] = []
        unknown: list[str] = []
        for lookup in facts.lookups:
            slowest = max(slowest, lookup.seconds)
            if lookup.seconds > _SLOW_S:
                slow.append(lookup)
            if _is_name(examination, lookup) and not lookup.answer:
                unknown.append(lookup.question)
        if slow:
            worst = max(slow, key=lambda lookup: lookup.seconds)
            took = f"takes {seconds(worst.seconds)}"
            if not worst.finished:
                took = f"has no answer after {seconds(worst.seconds)}"
            what = f"looking up {worst.question} {took}: starting a run waits for each host's name"
            findings.append(Finding("warning", "names-slow", host, what, _fix(examination, host)))
        elif unknown:
            what = f"the names {listed(unknown)} have no address here: programs that "
            what += "meet by name, such as torchrun, fail"
            findings.append(Finding("warning", "names-unknown", host, what, _fix(examination, host)))
        else:
            findings += _wrong(examination, host, facts.lookups)
    if not findings and any(facts.lookups for facts in examination.facts.values()):
        what = f"names and addresses of all hosts are looked up within {seconds(slowest)}"
        findings.append(Finding("ok", "names", where_all(examination), what))
    return findings


def _is_name(examination: Examination, lookup: LookupFacts) -> bool:
    facts = examination.facts.get(lookup.host)
    return facts is not None and lookup.question == facts.network.hostname


def _wrong(examination: Examination, host: str, lookups: tuple[LookupFacts, ...]) -> list[Finding]:
    """Finds names for which this host gets an address that the named host does not have."""
    findings = []
    for lookup in lookups:
        if not _is_name(examination, lookup):
            continue
        own: list[str] = []
        for card in examination.facts[lookup.host].network.interfaces:
            own += card.addresses
        if own and lookup.answer not in own:
            what = f"the name {lookup.question} has the address {lookup.answer} here, and {lookup.host} has "
            what += listed(own)
            findings.append(Finding("warning", "names-wrong", host, what, _fix(examination, host)))
    return findings


def _fix(examination: Examination, host: str) -> str:
    """Returns a command that adds the hosts to /etc/hosts, which is read before any name server is asked.

    An IPv4 address gets a second line in its IPv6 form (`::ffff:10.0.0.1`), because torch's store asks for that form. This
    line has another name, so that looking up the host's own name never returns the IPv6 form.
    """
    lines = []
    for lookup in examination.facts[host].lookups:
        peer = examination.facts.get(lookup.host)
        is_address = lookup.question.count(".") == 3 and ":" not in lookup.question
        if peer is not None and is_address:
            lines.append(f"'{lookup.question} {peer.network.hostname}'")
            lines.append(f"'::ffff:{lookup.question} {peer.network.hostname}.ipv4'")
    return on(host, examination, f"printf '%s\\n' {' '.join(lines)} | sudo tee -a /etc/hosts")


CHECK = Check("names", judge)
