"""Which network interface would gloo and NCCL use, why, and does it lead to the other hosts?"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.doctor.facts import Examination, Interface, Network
from paceline.doctor.finding import Check, Finding, Level, listed, on, where_all


@dataclass(frozen=True)
class Choice:
    """The interfaces that a backend would use; none where it would fail."""

    names: tuple[str, ...]
    reason: str


def gloo_choice(network: Network) -> Choice:
    """What gloo does: GLOO_SOCKET_IFNAME, else the address of the host's own name, else loopback."""
    if network.gloo_variable:
        wanted = tuple(name.strip() for name in network.gloo_variable.split(","))
        interface_names = {card.name for card in network.interfaces}
        reason = f"GLOO_SOCKET_IFNAME={network.gloo_variable}"
        all_there = interface_names.issuperset(wanted)
        return Choice(wanted if all_there else (), reason)
    for address in network.hostname_addresses:
        card = _with_address(network, address)
        if card is not None:
            return Choice((card.name,), "it has the address of the host's own name")
    return Choice(("lo",), "the host's own name has no address of this host")


def nccl_choice(network: Network) -> Choice:
    """What NCCL does: NCCL_SOCKET_IFNAME, else InfiniBand's, else others, else docker's, else loopback."""
    cards = [card for card in network.interfaces if card.is_up and card.addresses]
    variable = network.nccl_variable
    if variable:
        # "eth,ib": names that begin so; "=eth0": this very name; "^" before either: all others.
        excludes = variable.startswith("^")
        exact = variable.lstrip("^").startswith("=")
        prefixes = tuple(name.strip() for name in variable.lstrip("^=").split(","))
        chosen = []
        for card in cards:
            matches = card.name in prefixes if exact else card.name.startswith(prefixes)
            if matches != excludes:
                chosen.append(card.name)
        return Choice(tuple(chosen), f"NCCL_SOCKET_IFNAME={variable}")
    groups = {
        "its name begins with ib": [card for card in cards if card.name.startswith("ib")],
        "neither loopback nor docker's": [card for card in cards if not card.name.startswith(("lo", "docker"))],
        "nothing else is there": cards,
    }
    for reason, group in groups.items():
        if group:
            return Choice((group[0].name,), reason)
    return Choice((), "no interface is up")


def judge(examination: Examination) -> list[Finding]:
    """Problems where gloo, or NCCL on hosts that have devices, would use an interface that does not reach the others."""
    findings: list[Finding] = []
    descriptions: list[str] = []
    several = len(examination.hosts) > 1
    for host, facts in examination.facts.items():
        network = facts.network
        choices = {"gloo": ("GLOO_SOCKET_IFNAME", gloo_choice(network))}
        if facts.devices.kind == "cuda":
            choices["NCCL"] = ("NCCL_SOCKET_IFNAME", nccl_choice(network))
        ways = tuple(dict.fromkeys(card for _, card in network.routes))
        for library, (variable, choice) in choices.items():
            descriptions.append(f"{library}: {_shown(network, choice)} ({choice.reason})")
            if not choice.names:
                what = f"{library} would fail: {choice.reason} names no interface of this host"
                fix = f"`unset {variable}`" if not ways else f"`export {variable}={ways[0]}`"
                findings.append(Finding("problem", "interface-missing", host, what, fix))
            elif several and ways and not set(ways) & set(choice.names):
                what = f"{library} would use {listed(choice.names)} ({choice.reason}), and the other hosts are behind "
                what += f"{listed(ways)}; {network.hostname} is {listed(network.hostname_addresses) or 'unknown'} there"
                # Loopback reaches nobody; another network may, if it has no route of its own.
                level: Level = "problem" if choice.names == ("lo",) else "warning"
                fix = _fix(examination, host, variable, ways[0])
                findings.append(Finding(level, "interface-wrong", host, what, fix))
    if not findings and descriptions:
        what = listed(dict.fromkeys(descriptions))
        findings.append(Finding("ok", "interfaces", where_all(examination), what))
    return findings


def _fix(examination: Examination, host: str, variable: str, way: str) -> str:
    """A variable, which goes along to all hosts, where the interface has one name on all; else the host's own files."""
    networks = [facts.network for facts in examination.facts.values()]
    if all(_has_interface(network, way) for network in networks):
        return f"`export {variable}={way}` before `paceline launch`, which takes it along to all hosts"
    network = examination.facts[host].network
    address = next(card.addresses[0] for card in network.interfaces if card.name == way)
    name = network.hostname
    return on(host, examination, f"sudo sed -i '/\\b{name}\\b/d; $ a {address} {name}' /etc/hosts")


def _has_interface(network: Network, name: str) -> bool:
    return any(card.name == name for card in network.interfaces)


def _with_address(network: Network, address: str) -> Interface | None:
    for card in network.interfaces:
        is_loopback = card.name == "lo" and (address.startswith("127.") or address == "::1")
        if address in card.addresses or is_loopback:
            return card
    return None


def _shown(network: Network, choice: Choice) -> str:
    """Names with the rate of each, where it is known."""
    speeds = {card.name: card.speed_mbit for card in network.interfaces}
    parts = []
    for name in choice.names:
        speed = speeds.get(name)
        parts.append(f"{name}, {speed} Mbit/s" if speed else name)
    return " + ".join(parts)


CHECK = Check("interfaces", judge)
