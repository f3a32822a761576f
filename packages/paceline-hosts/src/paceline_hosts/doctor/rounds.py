"""Plans the measurements between hosts, so that they take a bounded time however many hosts there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline_hosts.doctor.facts import LinkFacts

SECONDS = 0.4  # length of one stream, if there is time
_SHORTEST_S = 0.1
_OVERHEAD_S = 0.15  # time of a measurement in addition to its stream: two connections, and the pings
_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
_SIZES_OF_DEVICES = (*_SIZES, 256 << 20)
_LONGEST_S = 0.7  # longest time of one all-reduce; each size is reduced six times
Pair = tuple[str, str]


def rounds(hosts: Sequence[str], budget_s: float) -> tuple[float, list[list[Pair]]]:
    """Divides the ordered pairs of hosts into rounds, whose pairs are measured at the same time.

    No host is in two pairs of a round, because two measurements would share its bandwidth. The rounds come from the circle
    method of tournaments: the first host keeps its place, and all others move on by one place.

    Args:
        hosts: names of all hosts.
        budget_s: seconds for all rounds.

    Returns:
        The seconds for each stream, and the rounds. Some pairs are left out if even the shortest streams would take too
        long.
    """
    places: list[str | None] = list(hosts)
    if len(places) % 2:
        places.append(None)  # a host that would meet this place has no partner in that round
    plan: list[list[Pair]] = []
    for _ in range(len(places) - 1):
        forward_pairs: list[Pair] = []
        half = len(places) // 2
        for first, other in zip(places[:half], reversed(places[half:]), strict=True):
            if first is not None and other is not None:
                forward_pairs.append((first, other))
        backward_pairs = [(other, first) for first, other in forward_pairs]
        plan += [pairs for pairs in (forward_pairs, backward_pairs) if pairs]
        places = [places[0], places[-1], *places[1:-1]]
    # With more hosts there are more rounds, so that each stream gets less time; below the shortest, rounds are left out.
    stream_s = budget_s / max(len(plan), 1) - _OVERHEAD_S
    if stream_s < _SHORTEST_S:
        plan = plan[: int(budget_s / (_SHORTEST_S + _OVERHEAD_S))]
    return min(SECONDS, max(stream_s, _SHORTEST_S)), plan


def slow_rounds(plan: Sequence[Sequence[Pair]], links: Mapping[Pair, LinkFacts]) -> list[list[Pair]]:
    """Returns the rounds of a plan with only those pairs that were less than half as fast as the fastest one."""
    fastest = max((link.bytes_per_s for link in links.values()), default=0.0)
    slow = {pair for pair, link in links.items() if link.bytes_per_s < fastest / 2}
    rounds: list[list[Pair]] = []
    for pairs in plan:
        slow_pairs = [pair for pair in pairs if pair in slow]
        if slow_pairs:
            rounds.append(slow_pairs)
    return rounds


def sizes(slowest: float | None, has_devices: bool) -> list[int]:
    """Returns the sizes of the all-reduces that can be done in time, in bytes.

    Args:
        slowest: bytes per second of the slowest link; None if none was measured.
        has_devices: whether a backend for devices is used, which is fast enough for a larger size.
    """
    candidates = _SIZES_OF_DEVICES if has_devices else _SIZES
    if slowest is None:
        return list(candidates)
    # A ring all-reduce sends nearly twice the size of the tensor over each link.
    most = _LONGEST_S * max(slowest, 1.0) / 2
    in_time = [size for size in candidates if size <= most]
    return in_time or [candidates[0]]
