"""The messages by which the ranks of a group agree on an operation, and the exchange of its data.

Every operation begins with small messages over the CPU (`messages.py`). A message has a fingerprint of what the rank is
about to do (operation, structure, dtypes, shapes), the number of its bytes, and the bytes themselves if they fit.

- Ranks that disagree notice it together and raise the same error. They must notice before a collective of the backend
  starts: gloo ends the process where sizes differ, and returns garbage where dtypes differ.
- Small data needs no more than these messages.
- Large data, and data on an accelerator, follows in one collective of the backend. The ranks first compare one number, a
  hash of the head of the message; only where it differs do they send each other the heads.

    message   | size | fingerprint | CPU bytes | device bytes | leaves | rows of each leaf | the CPU bytes ... |
              `-------------------- head, 5 x int64 ---------------------'  `------- body, where it fits -------'

    small data             gather(message)                                       everything has arrived
    other data, alike      combine(fingerprint of the head)                      data
    other data, not alike  combine(fingerprint of the head)    gather(head)      data
    numbers                combine(fingerprint, numbers)                         everything has arrived

[ADR 25](../../../docs/adr/0025-agreement-in-rounds.md) says what each costs, and what happens where ranks deviate.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import CollectiveError
from paceline.world.arrived import Arrived, ByteLayout, RankPayload, Topic, fingerprint_of
from paceline.world.failures import communicate
from paceline.world.hang_reports import CheckOfCalls, suggestion
from paceline.world.mesh import Group, cpu_group
from paceline.world.network.links import links_of
from paceline.world.network.messages import WORD, Combination, Messages
from paceline.world.transport import all_gather_single

_HEAD = struct.Struct("<5q")
_NUMBER = 8  # bytes
# Up to this many bytes a message takes as long as an empty one. The first limit is divided by the number of ranks, because
# each rank receives a message from every other rank.
_ALL_MESSAGES_BYTES, _LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 8, 1 << 14
# Two ranks have one round, in which each byte travels once, as it would in a collective. It is quicker here up to this size.
_MOST_BYTES_OF_TWO = 1 << 21
_TEXT_BYTES = 1 << 11  # of what a rank was about to do, in an error

_COMBINATIONS: dict[str, tuple[Combination, dist.ReduceOp.RedOpType]] = {
    "sum": (operator.add, dist.ReduceOp.SUM),
    "max": (max, dist.ReduceOp.MAX),
}


class Exchange:
    """Messages and bytes between the ranks of one group.

    Args:
        group: the ranks that take part.
        device: where tensors may lie besides the CPU.
        call_check: debug mode's check, called before each operation.
    """

    communicate = staticmethod(communicate)  # for operations that send no messages

    def __init__(self, group: Group, device: torch.device, call_check: CheckOfCalls | None = None) -> None:
        self.group = group
        self.cpu_group = cpu_group(group)
        self.device = device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.call_check = call_check
        self.limit = max(_LEAST_BYTES, min(_MOST_BYTES, _ALL_MESSAGES_BYTES // self.size))
        if self.size == 2:
            self.limit = _MOST_BYTES_OF_TWO
        self._messages: Messages | None = None

    def fits(self, leaves: int, cpu_bytes: int) -> bool:
        """Returns whether a body of this size travels inside the message."""
        return _HEAD.size + _NUMBER * leaves + cpu_bytes <= self.limit

    def agree(self, topic: Topic) -> None:
        """Makes sure that all ranks are about to do the same.

        Raises:
            CollectiveError: `collective-mismatch`, on every rank, where the topics differ.
        """
        self.combine(topic, (), "sum")

    def combine(self, topic: Topic, numbers: Sequence[int], combination: Literal["sum", "max"]) -> list[int]:
        """Returns the sum, or the largest, of each number over the ranks.

        Raises:
            CollectiveError: `collective-mismatch`, on every rank, where the topics differ.
        """
        self._check(topic)
        combine, operation = _COMBINATIONS[combination]
        # Ranks with the same topic have as many numbers, so all of them take the same path below.
        fits = Messages.fits(len(numbers), self.limit)
        numbers_in_message = numbers if fits else ()
        combined = self._combine(topic, topic.fingerprint, numbers_in_message, combine)
        if combined is None:
            # Some rank does something else. Gathering the heads raises the error that says which one.
            self._gather(topic, RankPayload((), 0))
            raise AssertionError("ranks that do not agree have different topics")
        if fits:
            return combined
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        communicate(topic.op, dist.all_reduce, tensor, operation, group=self.cpu_group)
        return tensor.tolist()

    def announce(self, topic: Topic, parts: Sequence[Tensor] = ()) -> Arrived:
        """Sends `parts` to all ranks where they fit into a message, and else says how many bytes there are.

        Args:
            topic: what must agree between ranks.
            parts: bytes to send, from tensors on the CPU; they need not be as many on each rank.

        Raises:
            CollectiveError: `collective-mismatch`, on every rank, where the topics differ.
        """
        self._check(topic)
        sent = RankPayload((), _total(parts))
        arrived = self._gather(topic, sent, parts)
        if arrived is None:
            # Another rank has combined, because it does something else. It gathers now too, so that all learn of it.
            arrived = self._gather(topic, sent, parts)
        assert arrived is not None, "no rank combines twice"
        return arrived

    def gather(
        self,
        topic: Topic,
        rows: Sequence[int],
        parts: Sequence[Tensor],
        device_parts: Sequence[Tensor] = (),
        uneven: bool = False,
    ) -> Arrived:
        """Returns the bytes of all ranks, on the CPU and on the device.

        Args:
            topic: what must agree between ranks.
            rows: dim-0 size of each leaf.
            parts, device_parts: bytes to send.
            uneven: whether ranks seldom have the same number of bytes. All ranks say the same.

        Raises:
            CollectiveError: `collective-mismatch`.
        """
        self._check(topic)
        sent = RankPayload(rows, _total(parts), _total(device_parts))
        arrived: Arrived | None = None
        is_small = not device_parts and self.fits(len(rows), sent.cpu_bytes)
        if uneven or is_small:
            arrived = self._gather(topic, sent, parts)
        elif self._combine(topic, fingerprint_of(self._head(topic, sent))) is not None:
            # The heads of all ranks are equal, so each of them sends what this rank sends.
            arrived = Arrived([sent] * self.size, alike=True)
        if arrived is None:
            # Some rank has other sizes, or does something else. Now all ranks send their heads.
            arrived = self._gather(topic, sent)
            assert arrived is not None, "no rank combines twice"
        if arrived.cpu is None:
            arrived.lies_at(self._fetch_cpu(topic, arrived, rows, parts))
        # Every rank computes the same maximum, so all or none of them enter the collective.
        most = max(other.device_bytes for other in arrived.sent)
        if most:
            arrived.device = self._fetch(topic, device_parts, most, self.group, self.device)
        return arrived

    # -------------------------------------------------------------------- messages

    def _connected(self, topic: Topic) -> Messages:
        """Returns the messages of the group, and connects its ranks at the first operation.

        They cannot connect earlier, because only an operation is certain to be entered by all ranks.
        """
        if self._messages is None:
            links = communicate(topic.op, links_of, self.cpu_group)
            self._messages = Messages(links, self.limit)
        return self._messages

    def _check(self, topic: Topic) -> None:
        if self.call_check is not None:
            self.call_check.check(topic.op, topic.detail)

    def _combine(
        self, topic: Topic, fingerprint: int, numbers: Sequence[int] = (), combination: Combination = operator.add
    ) -> list[int] | None:
        messages = self._connected(topic)
        combined: list[int] | None = communicate(topic.op, messages.combine, fingerprint, numbers, combination)
        return combined

    def _gather(self, topic: Topic, sent: RankPayload, parts: Sequence[Tensor] = ()) -> Arrived | None:
        """Exchanges the messages of all ranks, each with its `parts` where they fit.

        Returns None on every rank if one of them has entered `_combine` instead.

        Raises:
            CollectiveError: `collective-mismatch`, on every rank, where the topics differ.
        """
        messages = self._connected(topic)
        head, size = self._put(messages, topic, sent, parts)
        starts: list[int] | None = communicate(topic.op, messages.gather, size)
        if starts is None:
            return None
        received = self._read(messages.view, starts, head, sent)
        everyone: list[RankPayload] = []
        bodies: list[int] = []
        for fingerprint, other, body in received:
            # All ranks see the same messages, so all of them raise here, and exchange their texts for the error.
            if fingerprint != topic.fingerprint:
                raise self._mismatch(topic)
            everyone.append(other)
            bodies.append(body)
        has_rows = len(head) == _HEAD.size + _NUMBER * len(sent.rows)
        # `_read` returns `sent` itself for each message with the same head.
        alike = has_rows and all(other is sent for other in everyone)
        arrived = Arrived(everyone, alike)
        # -1: some rank's bytes did not fit, so no rank uses those that came, and the data follows in one collective.
        if not has_rows or min(bodies) < 0:
            return arrived
        arrived.lies_at(ByteLayout(messages.data, bodies))
        if alike:
            # The buffer begins with this rank's own message, and the ranks after it follow. The bodies are copied without
            # their heads, beginning with rank 0.
            table = messages.data[: size * self.size].view(self.size, size)
            table = table[:, len(head) : len(head) + sent.cpu_bytes]
            first = self.size - self.rank
            ordered = torch.cat([table[first:], table[:first]])
            arrived.lies_at(_evenly(ordered.view(-1), self.size))
        return arrived

    def _put(self, messages: Messages, topic: Topic, sent: RankPayload, parts: Sequence[Tensor]) -> tuple[bytes, int]:
        """Writes this rank's message. Returns its head, and the size of the whole in bytes."""
        head = self._head(topic, sent)
        if not self.fits(0, len(head) - _HEAD.size):
            # The rows of thousands of leaves do not fit into a message; `_fetch_cpu` sends them with the data.
            head = head[: _HEAD.size]
        size = len(head)
        if parts and size + sent.cpu_bytes <= self.limit:
            torch.cat(list(parts), out=messages.data[size : size + sent.cpu_bytes])
            size += sent.cpu_bytes
        size += -size % _NUMBER  # an int64 must begin at a multiple of its size
        messages.view[: len(head)] = head
        WORD.pack_into(messages.view, 0, size)
        # Read back with the size in it, so that `_read` can compare whole heads.
        return bytes(messages.view[: len(head)]), size

    def _read(
        self, view: memoryview, starts: Sequence[int], own_head: bytes, own: RankPayload
    ) -> list[tuple[int, RankPayload, int]]:
        """Returns the fingerprint, the content and the start of the bytes of each message; -1 if it came without its bytes."""
        own_size, own_fingerprint, *_ = _HEAD.unpack_from(own_head)
        own_inside = own_size > len(own_head) or not own.cpu_bytes
        received = []
        for start in starts:
            # The heads are nearly always the same, and comparing two is quicker than unpacking one.
            if view[start : start + len(own_head)] == own_head:
                body = start + len(own_head) if own_inside else -1
                received.append((own_fingerprint, own, body))
                continue
            size, fingerprint, cpu_bytes, device_bytes, leaves = _HEAD.unpack_from(view, start)
            rows: Sequence[int] = ()
            if self.fits(leaves, 0):
                rows = struct.unpack_from(f"<{leaves}q", view, start + _HEAD.size)
            head_size = _HEAD.size + _NUMBER * len(rows)
            inside = size > head_size or not cpu_bytes
            body = start + head_size if inside else -1
            received.append((fingerprint, RankPayload(rows, cpu_bytes, device_bytes), body))
        return received

    def _head(self, topic: Topic, sent: RankPayload) -> bytes:
        """Returns the head of a message and the rows of each leaf; the size of the message is filled in later."""
        numbers = (0, topic.fingerprint, sent.cpu_bytes, sent.device_bytes, len(sent.rows), *sent.rows)
        return struct.pack(f"<{len(numbers)}q", *numbers)

    def _mismatch(self, topic: Topic) -> CollectiveError:
        """Returns the error that every rank raises, which lists what each rank was about to do.

        Ranks:
            All ranks of the group, because they exchange these texts here.
        """
        # A buffer of its own: texts are longer than the usual limit allows where there are many ranks.
        messages = Messages(links_of(self.cpu_group), _TEXT_BYTES)
        what = f"{topic.op}: {topic.detail}" if topic.detail else topic.op
        encoded = what.encode()[: _TEXT_BYTES - WORD.size]
        size = WORD.size + len(encoded)
        WORD.pack_into(messages.view, 0, size)
        messages.view[WORD.size : size] = encoded
        starts = communicate(topic.op, messages.gather, size)
        ranks_by_text: dict[str, list[int]] = {}
        for rank, start in enumerate(starts):
            (size,) = WORD.unpack_from(messages.view, start)
            text = bytes(messages.view[start + WORD.size : start + size]).decode(errors="replace")
            ranks_by_text.setdefault(text, []).append(rank)
        why = []
        for text, ranks in ranks_by_text.items():
            numbers = ", ".join(map(str, ranks))
            why.append(f"rank {numbers}: {text}")
        return CollectiveError(
            "collective-mismatch",
            f"{topic.op}: the ranks do not agree about what to do.",
            why=why,
            fix="let all ranks call the same operation with the same structure and dtypes, and with shapes that "
            "differ at most in dim 0 (pad_across_processes makes other dims equal; gather_object takes anything)"
            + suggestion(),
        )

    # -------------------------------------------------------------------- data

    def _fetch_cpu(self, topic: Topic, arrived: Arrived, rows: Sequence[int], parts: Sequence[Tensor]) -> ByteLayout:
        """Fetches the bytes of all ranks on the CPU, and the rows of each leaf if those did not fit into the messages."""
        most = max(sent.cpu_bytes for sent in arrived.sent)
        if arrived.alike or self.fits(len(rows), 0):
            return self._fetch(topic, parts, most, self.cpu_group, torch.device("cpu"))
        # [rows of each leaf, int64 | the bytes of all leaves | padding] from each rank.
        row_bytes = _NUMBER * len(rows)
        most += row_bytes
        most += -most % _NUMBER  # each rank's numbers must begin at a multiple of the size of int64
        parts = [torch.tensor(rows, dtype=torch.int64, device="cpu").view(torch.uint8), *parts]
        place = self._fetch(topic, parts, most, self.cpu_group, torch.device("cpu"))
        for start, sent in zip(place.starts, arrived.sent, strict=True):
            sent.tell_rows(place.buffer[start : start + row_bytes].view(torch.int64).tolist())
        return ByteLayout(place.buffer, [start + row_bytes for start in place.starts])

    def _fetch(
        self, topic: Topic, parts: Sequence[Tensor], most: int, group: Group, device: torch.device
    ) -> ByteLayout:
        """Fetches the bytes of every rank, each padded to `most` bytes, because an all-gather needs equal sizes."""
        count = _total(parts)
        gathered = torch.empty(most * self.size, dtype=torch.uint8, device=device)
        if most:
            if len(parts) == 1 and count == most:
                data = parts[0].contiguous()
            else:
                data = torch.cat([*parts, torch.empty(most - count, dtype=torch.uint8, device=device)])
            communicate(topic.op, all_gather_single, gathered, data, group=group)
        return _evenly(gathered, self.size)


def _evenly(buffer: Tensor, num_ranks: int) -> ByteLayout:
    """Returns the place of data that has the same number of bytes from each rank."""
    most = buffer.numel() // num_ranks
    starts: Sequence[int] = [0] * num_ranks  # `range` refuses a step of 0
    if most:
        starts = range(0, most * num_ranks, most)
    return ByteLayout(buffer, starts)


def _total(parts: Sequence[Tensor]) -> int:
    return sum(part.numel() for part in parts)
