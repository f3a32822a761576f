"""Finds out which network interface gloo and NCCL would use, and whether it leads to the other hosts.

`gloo_choice` and `nccl_choice` repeat the rules of the two libraries; `judge` compares their choice with the routes to the
other hosts, which the system knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline_hosts.doctor.facts import Examination, Interface, Network
from paceline_hosts.doctor.finding import Check, Finding, Level, listed, on, where_all


@dataclass(frozen=True)
class InterfaceChoice:
    """Holds the interfaces that a backend would use, and why; no interfaces mean that it would fail."""

    names: tuple[str, ...]
    reason: str


def gloo_choice(network: Network) -> InterfaceChoice:
    """Chooses as gloo does: GLOO_SOCKET_IFNAME, otherwise the address of the host's own name, otherwise loopback."""
    if network.gloo_variable:
        wanted = tuple(name.strip() for name in network.gloo_variable.split(","))
        interface_names = {card.name for card in network.interfaces}
        reason = f"GLOO_SOCKET_IFNAME={network.gloo_variable}"
        # gloo opens every interface that is named, so that one missing name makes it fail.
        if not interface_names.issuperset(wanted):
            return InterfaceChoice((), reason)
        return InterfaceChoice(wanted, reason)
    for address in network.hostname_addresses:
        card = _with_address(network, address)
        if card is not None:
            return InterfaceChoice((card.name,), "it has the address of the host's own name")
    return InterfaceChoice(("lo",), "the host's own name has no address of this host")


def nccl_choice(network: Network) -> InterfaceChoice:
    """Chooses as NCCL does: NCCL_SOCKET_IFNAME, otherwise InfiniBand, then other interfaces, then docker and loopback."""
    cards = [card for card in network.interfaces if card.is_up and card.addresses]
    variable = network.nccl_variable
    if variable:
        # "eth,ib" means names with these beginnings, "=eth0" means exactly this name, and "^" before either means all others.
        excludes = variable.startswith("^")
        exact = variable.lstrip("^").startswith("=")
        prefixes = tuple(name.strip() for name in variable.lstrip("^=").split(","))
        chosen = []
        for card in cards:
            matches = card.name.startswith(prefixes)
            if exact:
                matches = card.name in prefixes
            if matches != excludes:
                chosen.append(card.name)
        return InterfaceChoice(tuple(chosen), f"NCCL_SOCKET_IFNAME={variable}")
    infiniband = [card for card in cards if card.name.startswith("ib")]
    ordinary = [card for card in cards if not card.name.startswith(("lo", "docker"))]
    groups = {
        "its name begins with ib": infiniband,
        "neither loopback nor docker's": ordinary,
        "nothing else is there": cards,
    }
    for reason, group in groups.items():
        if group:
            return InterfaceChoice((group[0].name,), reason)
    return InterfaceChoice((), "no interface is up")


def judge(examination: Examination) -> list[Finding]:
    """Finds hosts where gloo, or NCCL if there are CUDA devices, would use an interface that does not reach the others."""
    findings: list[Finding] = []
    descriptions: list[str] = []
    several = len(examination.hosts) > 1
    for host, facts in examination.facts.items():
        network = facts.network
        # Also with CUDA devices, gloo carries what is on the CPU.
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
                # Loopback never reaches another host. Another interface may, even if the route does not lead through it.
                level: Level = "problem" if choice.names == ("lo",) else "warning"
                fix = _fix(examination, host, variable, ways[0])
                findings.append(Finding(level, "interface-wrong", host, what, fix))
    if not findings and descriptions:
        what = listed(dict.fromkeys(descriptions))
        findings.append(Finding("ok", "interfaces", where_all(examination), what))
    return findings


def _fix(examination: Examination, host: str, variable: str, way: str) -> str:
    """Returns a fix: a variable if the interface has the same name on all hosts, otherwise an entry in /etc/hosts.

    The launcher passes the variable to all hosts, so it helps only if the name is the same everywhere.
    """
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
    """Returns the interface that has an address; None if no interface has it."""
    for card in network.interfaces:
        # Linux lets loopback answer at all addresses that begin with 127, though it lists one only.
        is_loopback = card.name == "lo" and (address.startswith("127.") or address == "::1")
        if address in card.addresses or is_loopback:
            return card
    return None


def _shown(network: Network, choice: InterfaceChoice) -> str:
    """Returns the names of the interfaces, with the rate of each one if it is known."""
    speeds = {card.name: card.speed_mbit for card in network.interfaces}
    parts = []
    for name in choice.names:
        speed = speeds.get(name)
        parts.append(f"{name}, {speed} Mbit/s" if speed else name)
    return " + ".join(parts)


CHECK = Check("interfaces", judge)
