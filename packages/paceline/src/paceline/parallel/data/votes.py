"""`voted`: the ranks of a group tell each other small flags, by few messages whose order does not matter."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.world.transport import PairwiseTransport
from paceline.world.works import PendingMessages


def voted(transport: PairwiseTransport, tag: int, flags: Tensor) -> Tensor:
    """Returns the flags that any rank has set: the element-wise maximum.

    In round k a rank sends what it knows to the rank 2**k after it, and hears from the rank 2**k before it, until every
    rank has heard of every other: one round for 2 ranks, 10 for 1000. The messages have a tag, so that ranks which start
    other collectives of the group before or after a vote, or the votes of two models in another order, still understand
    each other. For 2 ranks it takes a third of the time of gloo's all-reduce.

    Args:
        transport: of a group that takes CPU tensors.
        tag: of this kind of vote; see `register_unit`.
        flags: of this rank.

    Shape: flags [flags], uint8, the same length on all ranks; returns the same.

    Ranks: all of the group.
    """
    messages = PendingMessages()
    known = flags
    distance = 1
    while distance < transport.size:
        heard = torch.empty_like(known)
        receiver = (transport.rank + distance) % transport.size
        sender = (transport.rank - distance) % transport.size
        own_tag = transport.tagged(tag)
        messages.begin(
            [
                dist.irecv(heard, group=transport.group, group_src=sender, tag=own_tag),
                dist.isend(known, group=transport.group, group_dst=receiver, tag=own_tag),
            ]
        )
        messages.wait()
        known = torch.maximum(known, heard)
        distance *= 2
    return known
