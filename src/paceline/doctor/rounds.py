"""What is measured between hosts, and for how long, so that it takes a bounded time however many hosts there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.doctor.facts import Link

SECONDS = 0.4  # of one stream
_SHORTEST_S = 0.1
_OVERHEAD_S = 0.15  # of a measurement, beside its stream: two connections, and the pings
_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
_SIZES_OF_DEVICES = (*_SIZES, 256 << 20)
_LONGEST_S = 0.7  # of one all-reduce; each size is reduced six times
Pair = tuple[str, str]


def rounds(hosts: Sequence[str], budget_s: float) -> tuple[float, list[list[Pair]]]:
    """Which pairs are measured at the same time, so that no host takes part in two: each ordered pair once, if time allows.

    The circle method of tournaments: the first host stays, all others move on by one place.

    Args:
        hosts: all of them.
        budget_s: seconds for all rounds.

    Returns:
        seconds for each stream, and the rounds; fewer rounds than all where the shortest streams would take too long.
    """
    places: list[str | None] = list(hosts)
    if len(places) % 2:
        places.append(None)  # whoever meets it rests
    plan: list[list[Pair]] = []
    for _ in range(len(places) - 1):
        there: list[Pair] = []
        half = len(places) // 2
        for first, other in zip(places[:half], reversed(places[half:]), strict=True):
            if first is not None and other is not None:
                there.append((first, other))
        back = [(other, first) for first, other in there]
        plan += [pairs for pairs in (there, back) if pairs]
        places = [places[0], places[-1], *places[1:-1]]
    each_s = budget_s / max(len(plan), 1) - _OVERHEAD_S
    if each_s < _SHORTEST_S:
        plan = plan[: int(budget_s / (_SHORTEST_S + _OVERHEAD_S))]
    return min(SECONDS, max(each_s, _SHORTEST_S)), plan


def slow_rounds(plan: Sequence[Sequence[Pair]], links: Mapping[Pair, Link]) -> list[list[Pair]]:
    """The rounds of a plan with those pairs alone that were less than half as fast as the fastest one."""
    fastest = max((link.bytes_per_s for link in links.values()), default=0.0)
    slow = {pair for pair, link in links.items() if link.bytes_per_s < fastest / 2}
    rounds: list[list[Pair]] = []
    for pairs in plan:
        slow_pairs = [pair for pair in pairs if pair in slow]
        if slow_pairs:
            rounds.append(slow_pairs)
    return rounds


def sizes(slowest: float | None, has_devices: bool) -> list[int]:
    """Bytes of the all-reduces that can be done in time.

    Args:
        slowest: bytes a second of the slowest link; None where none was measured.
        has_devices: whether the backend of devices is used, which carries more.
    """
    candidates = _SIZES_OF_DEVICES if has_devices else _SIZES
    if slowest is None:
        return list(candidates)
    # A ring carries each byte twice over each link.
    most = _LONGEST_S * max(slowest, 1.0) / 2
    in_time = [size for size in candidates if size <= most]
    return in_time or [candidates[0]]
