"""Does each host reach the ports of each other one?"""

from __future__ import annotations

from paceline_hosts.doctor.facts import ConnectionFacts, Examination
from paceline_hosts.doctor.finding import Check, Finding, leave_out, listed, on, where_all

_MEANING = {
    "refused": "the connection to {address} is refused at a port that listens: a firewall rejects it, or {address} is "
    "another host",
    "no answer": "the connection to {address} gets no answer: a firewall drops the packets",
    "no route": "there is no route to {address}",
    "other": "somebody else answers at {address}: a proxy, or another host with this address",
}


def judge(examination: Examination) -> list[Finding]:
    """Finds hosts whose ports are not reached, with one problem for each host and outcome that names all hosts affected."""
    failed: dict[tuple[str, str], list[ConnectionFacts]] = {}
    for row in examination.connections:
        if row.outcome != "open":
            failed.setdefault((row.target, row.outcome), []).append(row)
    findings = []
    for (target, outcome), rows in failed.items():
        first = rows[0]
        what = _MEANING[outcome].format(address=first.address or target)
        where = f"{listed(row.source for row in rows)} -> {target}"
        findings.append(
            Finding("problem", "port-closed", where, f"{what} (port {first.port})", _fix(examination, rows))
        )
    if not findings and examination.connections:
        pairs = len(examination.connections)
        what = f"each host reaches a free port of each other one ({pairs} pairs)"
        findings.append(Finding("ok", "ports", where_all(examination), what))
    return findings


def _fix(examination: Examination, rows: list[ConnectionFacts]) -> str:
    """Returns commands for the firewall of the target that let the other hosts in."""
    target = rows[0].target
    if rows[0].outcome in ("no route", "other"):
        return leave_out(target)
    facts = examination.facts.get(target)
    programs = facts.programs if facts is not None else ()
    sources = [_address(examination, row.source) for row in rows]
    commands = []
    for source in filter(None, sources):
        if "firewall-cmd" in programs:
            commands.append(f"sudo firewall-cmd --permanent --zone=trusted --add-source={source}")
        elif "ufw" in programs:
            commands.append(f"sudo ufw insert 1 allow from {source}")
        else:
            program = "ip6tables" if ":" in source else "iptables"
            commands.append(f"sudo {program} -I INPUT -s {source} -j ACCEPT")
    if "firewall-cmd" in programs:
        commands.append("sudo firewall-cmd --reload")
    return on(target, examination, " && ".join(commands)) if commands else leave_out(target)


def _address(examination: Examination, source: str) -> str:
    """Returns the address of a host for a rule of a firewall: the one at which most of the others reach it."""
    addresses = [row.address for row in examination.connections if row.target == source and row.address]
    return max(addresses, key=addresses.count, default="")


CHECK = Check("ports", judge)
