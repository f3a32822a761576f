"""Random numbers of ranks that compute different parts of the same samples (`tp`, `cp`).

    outside of a region    all ranks draw the same numbers: dropout on what every rank computes drops the same elements
    inside of a region     each rank draws its own numbers: heads, features or positions of two ranks do not get equal masks

It need not be known which modules are random: the states of the generators show whether numbers were drawn inside of a
region. If none were, the generators continue as if the region had never been opened, so that a model without dropout draws
the same numbers as on one process.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.world.generators import generator_states, restore_generators

_SEED_BYTES = 7  # a generator's seed is a signed number of 8 bytes


class RandomStreams:
    """The generators of the CPU and of one device.

    Args:
        rank: of this process among its peers.
        device: where the model computes.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._depth = 0
        self._accelerator: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._if_unused: list[Tensor] = []
        self._seed_if_used = 0
        self._seeded = b""

    def open(self) -> None:
        """Begins a region, in which each rank draws its own numbers. Regions may be nested."""
        self._depth += 1
        if self._depth > 1:
            return
        self._if_unused = generator_states(self._device)
        # The seeds are a hash of the states. torch must not draw them: selective recomputation counts operations, and would
        # miss this one when it runs the block again.
        digest = hashlib.blake2b(_content(self._if_unused), digest_size=2 * _SEED_BYTES).digest()
        own_seed = int.from_bytes(digest[:_SEED_BYTES], "little")
        self._seed_if_used = int.from_bytes(digest[_SEED_BYTES:], "little")
        self._seed(own_seed + self._rank)
        self._seeded = _content(generator_states(self._device))

    def close(self) -> None:
        """Ends a region: all ranks draw the same numbers again."""
        self._depth -= 1
        if self._depth > 0:
            return
        # Each rank decides for itself. Ranks that run the same modules draw alike, and so continue with the same numbers.
        if _content(generator_states(self._device)) == self._seeded:
            restore_generators(self._if_unused, self._device)  # nothing was drawn
        else:
            self._seed(self._seed_if_used)

    def abandon(self) -> None:
        """Ends all regions that an exception has left open."""
        if self._depth > 0:
            self._depth = 1
            self.close()

    def share(self, group: dist.ProcessGroup) -> None:
        """Sets the states of the generators to those of the group's first rank. Ranks: all of the group."""
        states = generator_states(self._device)
        for state in states:
            here = state.to(self._device)
            dist.broadcast(here, src=dist.get_global_rank(group, 0), group=group)
            state.copy_(here)
        restore_generators(states, self._device)

    def _seed(self, seed: int) -> None:
        # `torch.manual_seed` seeds every kind of device that torch knows, and takes 0.4 ms.
        torch.default_generator.manual_seed(seed)
        if self._accelerator is not None:
            self._accelerator.manual_seed(seed)


def _content(states: list[Tensor]) -> bytes:
    """Returns the bytes of the generators' states, which are always on the CPU."""
    return b"".join(state.numpy().tobytes() for state in states)
