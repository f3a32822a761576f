"""Does an all-reduce over all hosts work, and does it use what the links carry?"""

from __future__ import annotations

from paceline.doctor.facts import AllReduces, Examination
from paceline.doctor.finding import Check, Finding, where_all
from paceline.doctor.units import num_bytes, rate, seconds

# gloo is limited by the cores of a host beyond this.
_MEASURABLE = 1e9 / 8
_WARNING = 0.25


def judge(examination: Examination) -> list[Finding]:
    """A problem where it fails, a warning where it is much slower than the slowest link."""
    result = examination.all_reduces
    if result is None:
        return []
    where = where_all(examination)
    if result.error:
        fix = f"`export GLOO_SOCKET_IFNAME={_common_way(examination)}` before `paceline launch`"
        if any(facts.devices.names for facts in examination.facts.values()):
            fix = f"`export NCCL_SOCKET_IFNAME={_common_way(examination)}` before `paceline launch`"
        return [Finding("problem", "all-reduce-fails", where, f"an all-reduce fails: {result.error}", fix)]
    largest = result.times[-1]
    bandwidth = bus_bandwidth(result)
    parts = [f"{num_bytes(row.num_bytes)} in {seconds(row.seconds)}" for row in result.times]
    what = f"{result.backend}, {result.processes} processes: {', '.join(parts)} (bus bandwidth {rate(bandwidth)})"
    slowest = min((link.bytes_per_s for link in examination.links), default=0.0)
    is_large = largest.num_bytes >= 1 << 20  # smaller ones measure the latency
    if is_large and bandwidth < _WARNING * min(slowest, _MEASURABLE):
        what += f"; the slowest link carries {rate(slowest)}"
        fix = f"`export GLOO_SOCKET_IFNAME={_common_way(examination)}` before `paceline launch`"
        return [Finding("warning", "all-reduce-slow", where, what, fix)]
    return [Finding("ok", "all-reduce", where, what)]


def bus_bandwidth(result: AllReduces) -> float:
    """Bytes a second on each link in the largest all-reduce: a ring carries each byte 2 (n - 1) / n times."""
    largest = result.times[-1]
    factor = 2 * (result.processes - 1) / result.processes
    return factor * largest.num_bytes / largest.seconds


def _common_way(examination: Examination) -> str:
    """The interface by which the hosts reach each other."""
    ways: list[str] = []
    for facts in examination.facts.values():
        ways += [card for _, card in facts.network.routes]
    return max(ways, key=ways.count, default="INTERFACE")


CHECK = Check("all-reduce", judge)
