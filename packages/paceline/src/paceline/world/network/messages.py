"""`Messages` sends small messages from every rank of a group to every other rank, in ceil(log2(n)) rounds.

In round k each rank sends to the rank 2^k below it and receives from the rank 2^k above it, around the ring. There are two
ways to use the rounds:

    gather     Bruck's all-gather: a round sends all messages that have arrived; the sizes may differ between ranks
    combine    numbers are added (or compared) in each round, so every round sends as much as the first one

    4 ranks, what rank 0 has:   before   0      round 0   0 1      round 1   0 1 2 3

gloo's own collectives pass messages around a ring, which takes n - 1 rounds or twice as many. And if two ranks call different
collectives, gloo ends the process. Here, if some ranks gather and others combine, every rank gets None.

The algorithm of `gather` is of Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing
systems" (1997); the rounds of `combine` are those of its "concatenation".
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence

import torch

from paceline.world.network.links import Links

WORD = struct.Struct("<q")

# The first word of what travels: the size in bytes of a message of `gather`, which is above 0, or one of these.
_DISAGREED = 0
_COMBINED = -1

Combination = Callable[[int, int], int]


class Messages:
    """Exchanges the messages of one group. To gather, a rank writes its own to the beginning of `view`, and calls `gather`.

    Args:
        links: connections between the ranks that take part.
        limit: the largest size of a message in bytes.

    Attributes:
        limit: see above.
        data: all messages that have arrived, of dtype uint8; the first is that of this rank.
        view: the same memory for Python, which reads and writes a few numbers much faster than tensor operations do.

    Ranks:
        All ranks of the group call `gather` or `combine`. No rank may send more than `limit` bytes.
    """

    def __init__(self, links: Links, limit: int) -> None:
        self.rank = links.rank
        self.size = links.size
        self.limit = limit
        self._links = links
        # Most messages are short. Pages of a mapping are memory once something is written to them, and not before.
        pages = mmap.mmap(-1, limit * self.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with torch.inference_mode(False):  # tensors made in inference mode could not be written outside of it
            self.data = torch.frombuffer(pages, dtype=torch.uint8)
        self.view = memoryview(pages)
        self._incoming = self.view[limit:]
        self._disagreed = memoryview(WORD.pack(_DISAGREED))

    def gather(self, num_bytes: int) -> list[int] | None:
        """Sends the first `num_bytes` of `view` to all ranks; their first word is `num_bytes` itself.

        Returns:
            Where the message of each rank begins, in the order of ranks; None, on every rank, where a rank combines.
        """
        ends = [num_bytes]
        agreed = True
        for distance in self._links.distances:
            # The last round of a group whose size is no power of two needs only some of the messages.
            count = min(distance, self.size - distance)
            if not agreed:
                self._links.exchange(distance, self._disagreed, self._incoming)
                continue
            end = ends[-1]
            self._links.exchange(distance, self.view[: ends[count - 1]], self.view[end:])
            for _ in range(count):
                (size,) = WORD.unpack_from(self.view, end)
                # This is no size: the other rank combines, or knows of a rank that does.
                if size <= 0:
                    agreed = False
                    break
                end += size
                ends.append(end)
        if not agreed:
            return None
        starts = [0, *ends[:-1]]
        # The messages are in the order of the ranks, but begin with this one.
        return starts[self.size - self.rank :] + starts[: self.size - self.rank]

    def combine(self, topic: int, numbers: Sequence[int], combination: Combination) -> list[int] | None:
        """Returns the numbers of all ranks, combined element by element.

        Args:
            topic: a number that says what the ranks do; it must be the same on all.
            numbers: the same count on all ranks with the same topic; see `fits`.
            combination: of two numbers; associative and commutative, as is a sum.

        Returns:
            The combined numbers; None, on every rank, where a rank has another topic, or gathers.
        """
        count = len(numbers)
        layout = struct.Struct(f"<{2 + 2 * count}q")
        outgoing = self.view[: layout.size]
        # Of the 2^k ranks from this one on, and of the first n mod 2^k of them. A group of 2^k ranks needs only the former.
        window = list(numbers)
        rest = window
        agreed = True
        for distance in self._links.distances:
            if agreed:
                layout.pack_into(self.view, 0, _COMBINED, topic, *window, *rest)
            self._links.exchange(distance, outgoing if agreed else self._disagreed, self._incoming)
            kind, their_topic, *their_numbers = layout.unpack_from(self.view, self.limit)
            # A rank that knows of a disagreement makes the other rounds too, so that the ranks after it learn of it.
            agreed = agreed and kind == _COMBINED and their_topic == topic
            if not agreed or not count:
                continue
            their_window = their_numbers[:count]
            their_rest = their_numbers[count:]
            if self.size & distance:
                rest_is_empty = self.size % distance == 0
                rest = window if rest_is_empty else list(map(combination, window, their_rest))
            window = list(map(combination, window, their_window))
        if not agreed:
            return None
        is_power_of_two = self.size & (self.size - 1) == 0
        return window if is_power_of_two else rest

    @staticmethod
    def fits(num_numbers: int, limit: int) -> bool:
        """Returns whether `num_numbers` can be combined in messages of at most `limit` bytes."""
        return WORD.size * (2 + 2 * num_numbers) <= limit
