"""The message with which every collective operation begins, and the bytes that follow it.

Each rank sends one message of a fixed size over the CPU: a fingerprint of what it is about to do (operation,
structure, dtypes, shapes), how many bytes it has, and the bytes themselves where they fit. So

- ranks that disagree learn of it together and raise the same error. The backend must not find out: gloo ends the
  process where sizes differ, and returns garbage where dtypes do;
- a small structure needs this one exchange alone, a large one a second;
- on an accelerator the question costs no synchronisation: the message holds what the host knows, and the data stays
  on the device.

    message   | fingerprint | aux | CPU bytes | device bytes | leaves | rows of each leaf | the CPU bytes ... |
               `----------------- head, 5 x int64 -------------------'  `------- body, where it fits -------'
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import CollectiveError
from paceline.world.debug import Watch, suggestion
from paceline.world.failures import communicate
from paceline.world.mesh import Group, cpu_group
from paceline.world.transport import all_gather_single

_HEAD = struct.Struct("<5q")
# Up to this size gloo's exchange costs what an empty one costs; divided, as each rank receives it from each other.
_ALL_MESSAGES_BYTES, _LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 11, 1 << 14


class Topic:
    """What the ranks must agree about.

    Args:
        op: the operation, as the user calls it.
        detail: structure, dtypes and shapes, as text for people.
    """

    __slots__ = ("detail", "fingerprint", "op")

    def __init__(self, op: str, detail: str = "") -> None:
        self.op = op
        self.detail = detail
        digest = hashlib.blake2b(f"{op}\0{detail}".encode(), digest_size=8).digest()
        self.fingerprint = int.from_bytes(digest, "little", signed=True)


@dataclass(slots=True)
class Sent:
    """What one rank sent.

    Attributes:
        aux: a number of the operation's own.
        rows: dim-0 size of each leaf, -1 for a 0-dim one.
        cpu_bytes, device_bytes: how much data there is.
        cpu_start, device_start: where it begins in `Arrived.cpu` and `Arrived.device`; -1 where it was only announced.
    """

    aux: int
    rows: Sequence[int]
    cpu_bytes: int
    device_bytes: int = 0
    cpu_start: int = -1
    device_start: int = -1


@dataclass(slots=True)
class Arrived:
    """What all ranks sent, in rank order, and the bytes (uint8) of all of them.

    Attributes:
        fresh: whether `cpu` is a buffer of this exchange's own; otherwise the next exchange overwrites it.
    """

    sent: list[Sent]
    cpu: Tensor
    device: Tensor | None = None
    fresh: bool = False


class Exchange:
    """Messages and bytes between the ranks of one group.

    Args:
        group: the ranks that take part.
        device: where tensors may lie besides the CPU.
        watch: debug mode's check, called before each message.
    """

    def __init__(self, group: Group, device: torch.device, watch: Watch | None = None) -> None:
        self.group = group
        self.cpu_group = cpu_group(group)
        self.device = device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.watch = watch
        self.limit = max(_LEAST_BYTES, min(_MOST_BYTES, _ALL_MESSAGES_BYTES // self.size))
        with torch.inference_mode(False):  # tensors made in inference mode could not be written outside of it
            self._message = torch.zeros(self.limit, dtype=torch.uint8, device="cpu")
            self._messages = torch.zeros(self.limit * self.size, dtype=torch.uint8, device="cpu")
        # Python reads and writes the few numbers of a message far faster than tensor operations do.
        self._writable = memoryview(cast(Any, self._message.numpy()))
        self._readable = memoryview(cast(Any, self._messages.numpy()))

    def fits(self, leaves: int, cpu_bytes: int) -> bool:
        """Whether a body of this size travels inside the message."""
        return _HEAD.size + 8 * leaves + cpu_bytes <= self.limit

    def announce(
        self,
        topic: Topic,
        rows: Sequence[int] = (),
        parts: Sequence[Tensor] = (),
        device_bytes: int = 0,
        aux: int = 0,
    ) -> Arrived:
        """Says what this rank is about to do and hears it of all; `parts` travel along where they fit.

        Args:
            topic: what must agree between ranks.
            rows: dim-0 size of each leaf.
            parts: bytes to send, from tensors on the CPU.
            device_bytes: bytes that would follow on the device.
            aux: a number that may differ between ranks.

        Raises:
            CollectiveError: `collective-mismatch`, on every rank, where the topics differ.
        """
        if self.watch is not None:
            self.watch.check(topic.op, topic.detail)
        count = sum(part.numel() for part in parts)
        _HEAD.pack_into(self._writable, 0, topic.fingerprint, aux, count, device_bytes, len(rows))
        body = _HEAD.size + 8 * len(rows)
        if body <= self.limit:
            struct.pack_into(f"<{len(rows)}q", self._writable, _HEAD.size, *rows)
        if parts and body + count <= self.limit:
            torch.cat(list(parts), out=self._message[body : body + count])
        communicate(topic.op, all_gather_single, self._messages, self._message, group=self.cpu_group)
        sent: list[Sent] = []
        agreed = True
        for start in range(0, self.limit * self.size, self.limit):
            fingerprint, aux, count, device_bytes, leaves = _HEAD.unpack_from(self._readable, start)
            agreed = agreed and fingerprint == topic.fingerprint
            rows = ()
            if self.fits(leaves, 0):
                rows = struct.unpack_from(f"<{leaves}q", self._readable, start + _HEAD.size)
            inside = start + _HEAD.size + 8 * leaves if self.fits(leaves, count) else -1
            sent.append(Sent(aux, rows, count, device_bytes, inside))
        if not agreed:
            raise self._mismatch(topic)
        return Arrived(sent, self._messages)

    def gather(
        self,
        topic: Topic,
        rows: Sequence[int],
        parts: Sequence[Tensor],
        device_parts: Sequence[Tensor] = (),
        aux: int = 0,
    ) -> Arrived:
        """`announce`, and then whatever did not fit: the rest on the CPU, and the bytes on the device.

        Raises:
            CollectiveError: `collective-mismatch`.
        """
        arrived = self.announce(topic, rows, parts, sum(part.numel() for part in device_parts), aux)
        if any(sent.cpu_start < 0 for sent in arrived.sent):
            self._fetch_cpu(topic, arrived, rows, parts)
        most = max(sent.device_bytes for sent in arrived.sent)
        if most:
            arrived.device = self._fetch(topic, device_parts, most, self.group, self.device)
            for rank, sent in enumerate(arrived.sent):
                sent.device_start = rank * most
        return arrived

    def _fetch_cpu(self, topic: Topic, arrived: Arrived, rows: Sequence[int], parts: Sequence[Tensor]) -> None:
        """Exchanges the bytes that did not fit; also the rows, where there are thousands of leaves."""
        most = max(sent.cpu_bytes for sent in arrived.sent)
        row_bytes = 0
        if not self.fits(len(rows), 0):
            row_bytes = 8 * len(rows)
            most = (row_bytes + most + 7) // 8 * 8  # so that each rank's numbers lie where int64 may lie
            parts = [torch.tensor(rows, dtype=torch.int64, device="cpu").view(torch.uint8), *parts]
        arrived.cpu = self._fetch(topic, parts, most, self.cpu_group, torch.device("cpu"))
        arrived.fresh = True
        for rank, sent in enumerate(arrived.sent):
            sent.cpu_start = rank * most + row_bytes
            if row_bytes:
                sent.rows = arrived.cpu[rank * most : sent.cpu_start].view(torch.int64).tolist()

    def _fetch(self, topic: Topic, parts: Sequence[Tensor], most: int, group: Group, device: torch.device) -> Tensor:
        """The bytes of every rank, each in its own run of `most`."""
        count = sum(part.numel() for part in parts)
        if len(parts) == 1 and count == most:
            data = parts[0].contiguous()
        else:
            data = torch.cat([*parts, torch.empty(most - count, dtype=torch.uint8, device=device)])
        gathered = torch.empty(most * self.size, dtype=torch.uint8, device=device)
        communicate(topic.op, all_gather_single, gathered, data, group=group)
        return gathered

    def _mismatch(self, topic: Topic) -> CollectiveError:
        """The error that every rank raises: who was about to do what. All ranks make it together."""
        text = f"{topic.op}: {topic.detail}".encode()[: self.limit - 8]
        struct.pack_into("<q", self._writable, 0, len(text))
        self._writable[8 : 8 + len(text)] = text
        communicate(topic.op, all_gather_single, self._messages, self._message, group=self.cpu_group)
        ranks_by_message: dict[str, list[int]] = {}
        for rank in range(self.size):
            start = rank * self.limit
            (length,) = struct.unpack_from("<q", self._readable, start)
            message = bytes(self._readable[start + 8 : start + 8 + length]).decode(errors="replace")
            ranks_by_message.setdefault(message, []).append(rank)
        return CollectiveError(
            "collective-mismatch",
            f"{topic.op}: the ranks do not agree about what to do.",
            why=[f"rank {', '.join(map(str, ranks))}: {message}" for message, ranks in ranks_by_message.items()],
            fix="let all ranks call the same operation with the same structure and dtypes, and with shapes that "
            "differ at most in dim 0 (pad_across_processes makes other dims equal; gather_object takes anything)"
            + suggestion(),
        )


def as_bytes(leaf: Tensor) -> Tensor:
    """The bytes of a tensor, without a copy where it is contiguous.

    Shape:
        Any; gives [number of bytes], of dtype uint8.
    """
    if leaf.is_conj() or leaf.is_neg():
        leaf = leaf.resolve_conj().resolve_neg()
    flat = leaf.contiguous()  # which lets a dim of one row keep any stride, and `view(dtype)` does not
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
