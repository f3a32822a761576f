"""`reserved` replays what came and went through torch's caching allocator: the bytes that it takes from a device at most.

An allocator takes more than the tensors need, for two reasons:

    streams    memory of one stream is never given to another one. FSDP2 gathers on one stream and reduces on another
    gaps       a tensor takes the smallest gap that holds it, or else the end of what its stream has

This is the allocator with `expandable_segments`, where the memory of a stream is one range that grows at its end. What was
taken is not given back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

_ROUNDING = 512  # bytes of the smallest block


class _StreamMemory:
    """The memory of one stream: where its blocks stand, and the gaps between them."""

    def __init__(self) -> None:
        self.end = 0
        self.most = 0
        self._blocks: dict[int, tuple[int, int]] = {}  # number of a storage -> place, size
        self._gaps: list[tuple[int, int]] = []  # (size, place), smallest first
        self._after: dict[int, int] = {}  # place of a gap -> its size
        self._before: dict[int, int] = {}  # end of a gap -> its place

    def take(self, number: int, size: int) -> None:
        index = bisect_left(self._gaps, (size, 0))
        if index == len(self._gaps):
            place = self.end
            self.end += size
            self.most = max(self.most, self.end)
        else:
            found, place = self._gaps[index]
            self._close(place, found)
            if found > size:
                self._open(place + size, found - size)
        self._blocks[number] = (place, size)

    def give(self, number: int) -> None:
        place, size = self._blocks.pop(number)
        following = self._after.get(place + size)
        if following is not None:
            self._close(place + size, following)
            size += following
        start = self._before.get(place)
        if start is not None:
            self._close(start, place - start)
            place, size = start, place + size - start
        if place + size == self.end:
            self.end = place  # a gap at the end is the range that grows
        else:
            self._open(place, size)

    def _open(self, place: int, size: int) -> None:
        insort(self._gaps, (size, place))
        self._after[place] = size
        self._before[place + size] = place

    def _close(self, place: int, size: int) -> None:
        del self._gaps[bisect_left(self._gaps, (size, place))]
        del self._after[place], self._before[place + size]


def reserved(entries: Iterable[tuple[int, int]], streams: Sequence[str]) -> int:
    """Returns the bytes that an allocator has taken after some entries.

    Args:
        entries: (number of a storage, bytes that came or went), in order.
        streams: by number of a storage, the name of the stream whose memory it is in.
    """
    memory = {name: _StreamMemory() for name in streams}
    sizes: dict[int, int] = {}
    for number, change in entries:
        stream = memory[streams[number]]
        before = sizes.pop(number, 0)
        if before:
            stream.give(number)
        if before + change:
            sizes[number] = before + change
            stream.take(number, -(-(before + change) // _ROUNDING) * _ROUNDING)
    return sum(stream.most for stream in memory.values())
