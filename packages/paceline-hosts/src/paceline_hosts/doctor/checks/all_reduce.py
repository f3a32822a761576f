"""Checks that an all-reduce over all hosts works, and that it is about as fast as the slowest link."""

from __future__ import annotations

from paceline_hosts.doctor.facts import AllReduces, Examination
from paceline_hosts.doctor.finding import Check, Finding, where_all
from paceline_hosts.doctor.units import num_bytes, rate, seconds

# Above this rate, the cores of the hosts limit gloo, and not the links.
_MEASURABLE = 1e9 / 8
_WARNING = 0.25


def judge(examination: Examination) -> list[Finding]:
    """Finds an all-reduce that fails (a problem), or that is much slower than the slowest link (a warning)."""
    result = examination.all_reduces
    if result is None:
        return []
    where = where_all(examination)
    if result.error:
        what = f"an all-reduce fails: {result.error}"
        return [Finding("problem", "all-reduce-fails", where, what, _fix(examination))]
    # The times could not be read, so the check of hosts reports their host as silent.
    if not result.times:
        return []
    largest = result.times[-1]
    bandwidth = bus_bandwidth(result)
    parts = [f"{num_bytes(row.num_bytes)} in {seconds(row.seconds)}" for row in result.times]
    what = f"{result.backend}, {result.processes} processes: {', '.join(parts)} (bus bandwidth {rate(bandwidth)})"
    slowest = min((link.bytes_per_s for link in examination.links), default=0.0)
    # A smaller one measures the latency, and not the bandwidth.
    is_large = largest.num_bytes >= 1 << 20
    if is_large and bandwidth < _WARNING * min(slowest, _MEASURABLE):
        what += f"; the slowest link carries {rate(slowest)}"
        return [Finding("warning", "all-reduce-slow", where, what, _fix(examination))]
    return [Finding("ok", "all-reduce", where, what)]


def bus_bandwidth(result: AllReduces) -> float:
    """Returns the bytes per second on each link in the largest all-reduce: a ring sends each byte 2 (n - 1) / n times."""
    largest = result.times[-1]
    factor = 2 * (result.processes - 1) / result.processes
    return factor * largest.num_bytes / largest.seconds


def _fix(examination: Examination) -> str:
    """Returns the command that names the interface through which most hosts reach each other."""
    has_devices = any(facts.devices.names for facts in examination.facts.values())
    variable = "NCCL_SOCKET_IFNAME" if has_devices else "GLOO_SOCKET_IFNAME"
    interfaces: list[str] = []
    for facts in examination.facts.values():
        interfaces += [interface for _, interface in facts.network.routes]
    most_common = max(interfaces, key=interfaces.count, default="INTERFACE")
    return f"`export {variable}={most_common}` before `paceline launch`"


CHECK = Check("all-reduce", judge)
