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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import CollectiveError
from paceline.world.debug import Watch
from paceline.world.mesh import Group, cpu_group

_HEAD = struct.Struct("<5q")
# Up to this size gloo's exchange costs what an empty one costs; divided, as each rank receives it from each other.
_ALL_MESSAGES_BYTES, _LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 11, 1 << 14
_NO_BYTES = torch.empty(0, dtype=torch.uint8)

# The name since torch 2.13, which warns of the older one.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(slots=True)
class Sent:
    """What one rank sent.

    Attributes:
        aux: a number of the operation's own.
        rows: dim-0 size of each leaf, -1 for a 0-dim one.
        cpu_bytes, device_bytes: how much data there is.
        cpu, device: the data, uint8; None where it was only announced. Valid until the next exchange.
    """

    aux: int
    cpu_bytes: int
    device_bytes: int
    rows: Sequence[int] = ()
    cpu: Tensor | None = None
    device: Tensor | None = None


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
        self._message = torch.zeros(self.limit, dtype=torch.uint8)
        self._messages = torch.zeros(self.limit * self.size, dtype=torch.uint8)
        # Python reads and writes the few numbers of a message far faster than tensor operations do.
        self._writable = memoryview(cast(Any, self._message.numpy()))
        self._readable = memoryview(cast(Any, self._messages.numpy()))

    def fits(self, leaves: int, cpu_bytes: int) -> bool:
        """Whether a body of this size travels inside the message."""
        return _HEAD.size + 8 * leaves + cpu_bytes <= self.limit

    def announce(
        self,
        op: str,
        detail: str,
        rows: Sequence[int] = (),
        cpu: Tensor = _NO_BYTES,
        device_bytes: int = 0,
        aux: int = 0,
    ) -> list[Sent]:
        """Says what this rank is about to do and hears it of all; `cpu` travels along where it fits.

        Args:
            op: the operation, as the user calls it.
            detail: what must agree between ranks, as text for people.
            rows: dim-0 size of each leaf.
            cpu: bytes to send.
            device_bytes: bytes that would follow on the device.
            aux: a number that may differ between ranks.

        Raises:
            CollectiveError: `collective-mismatch`, on every rank, where `op` or `detail` differ.
        """
        if self.watch is not None:
            self.watch.check(op, detail)
        mine = _fingerprint(op, detail)
        count = cpu.numel()
        _HEAD.pack_into(self._writable, 0, mine, aux, count, device_bytes, len(rows))
        body = _HEAD.size + 8 * len(rows)
        if body + count <= self.limit:
            struct.pack_into(f"<{len(rows)}q", self._writable, _HEAD.size, *rows)
            if count:
                self._message[body : body + count].copy_(cpu)
        all_gather(self._messages, self._message, group=self.cpu_group)
        sent = []
        agreed = True
        for rank in range(self.size):
            start = rank * self.limit
            fingerprint, aux, count, device_bytes, leaves = _HEAD.unpack_from(self._readable, start)
            agreed = agreed and fingerprint == mine
            one = Sent(aux, count, device_bytes)
            if self.fits(leaves, count):
                body = start + _HEAD.size + 8 * leaves
                one.rows = struct.unpack_from(f"<{leaves}q", self._readable, start + _HEAD.size)
                one.cpu = self._messages[body : body + count]
            sent.append(one)
        if not agreed:
            raise self._mismatch(op, detail)
        return sent

    def gather(
        self, op: str, detail: str, rows: Sequence[int], cpu: Tensor, device: Tensor | None = None, aux: int = 0
    ) -> list[Sent]:
        """`announce`, and then whatever did not fit: the rest on the CPU, and the bytes on the device.

        Raises:
            CollectiveError: `collective-mismatch`.
        """
        sent = self.announce(op, detail, rows, cpu, 0 if device is None else device.numel(), aux)
        if any(one.cpu is None for one in sent):
            numbers = torch.tensor(rows, dtype=torch.int64).view(torch.uint8)
            most = max(one.cpu_bytes for one in sent) + numbers.numel()
            for one, data in zip(sent, self._fetch(torch.cat((numbers, cpu)), most, self.cpu_group), strict=True):
                one.rows = data[: numbers.numel()].view(torch.int64).tolist()
                one.cpu = data[numbers.numel() : numbers.numel() + one.cpu_bytes]
        most = max(one.device_bytes for one in sent)
        if most:
            data = device if device is not None else torch.empty(0, dtype=torch.uint8, device=self.device)
            for one, bytes_ in zip(sent, self._fetch(data, most, self.group), strict=True):
                one.device = bytes_[: one.device_bytes]
        return sent

    def _fetch(self, data: Tensor, most: int, group: Group) -> list[Tensor]:
        """The bytes of every rank, of which none has more than `most`."""
        most = (most + 15) // 16 * 16  # keeps each rank's part aligned for any dtype
        if data.numel() != most:
            padded = data.new_empty(most)
            padded[: data.numel()] = data
            data = padded
        gathered = data.new_empty(most * self.size)
        all_gather(gathered, data, group=group)
        return list(torch.split(gathered, most))

    def _mismatch(self, op: str, detail: str) -> CollectiveError:
        """The error that every rank raises: who was about to do what. All ranks make it together."""
        text = f"{op}: {detail}".encode()[: self.limit - 8]
        struct.pack_into("<q", self._writable, 0, len(text))
        self._writable[8 : 8 + len(text)] = text
        all_gather(self._messages, self._message, group=self.cpu_group)
        told: dict[str, list[int]] = {}
        for rank in range(self.size):
            start = rank * self.limit
            (length,) = struct.unpack_from("<q", self._readable, start)
            told.setdefault(bytes(self._readable[start + 8 : start + 8 + length]).decode(errors="replace"), []).append(
                rank
            )
        return CollectiveError(
            "collective-mismatch",
            f"{op}: the ranks do not agree about what to do.",
            why=[f"rank {', '.join(map(str, ranks))}: {what}" for what, ranks in told.items()],
            fix="let all ranks call the same operation with the same structure and dtypes, and with shapes that "
            "differ at most in dim 0 (pad_across_processes makes other dims equal; gather_object takes anything)",
        )


def _fingerprint(op: str, detail: str) -> int:
    digest = hashlib.blake2b(f"{op}\0{detail}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def pack(leaves: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
    """The bytes of `leaves`, one after the other."""
    if not leaves:
        return _NO_BYTES if device is None else torch.empty(0, dtype=torch.uint8, device=device)
    parts = [leaf.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for leaf in leaves]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def unpack(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """New tensors with the shapes and dtypes of `like`, from the bytes that `pack` made."""
    found, start = [], 0
    for leaf in like:
        end = start + leaf.numel() * leaf.element_size()
        found.append(data[start:end].clone().view(leaf.dtype).view(leaf.shape))
        start = end
    return found
