"""`Gradients`: which parameters have a gradient, and which of them a backward pass has changed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

from paceline.torch_internals.tensors import times_written
from paceline.world.sharded import local

_Seen = tuple["weakref.ref[Tensor]", tuple[int, int]]


class Gradients:
    """Which gradients there are, and how often each was written, without keeping their memory.

    Args:
        held: every parameter with each of its gradients.
    """

    def __init__(self, held: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._seen: dict[Tensor, list[_Seen]] = {}
        for parameter, gradient in held:
            self._seen.setdefault(parameter, []).append((weakref.ref(gradient), _written(gradient)))

    @property
    def parameters(self) -> set[Tensor]:
        """The parameters that have a gradient."""
        return set(self._seen)

    def has(self, parameter: Tensor) -> bool:
        """Returns whether the parameter had a gradient."""
        return parameter in self._seen

    def changed(self, held: Iterable[tuple[Tensor, Tensor]]) -> set[Tensor]:
        """Returns the parameters that have another gradient now, or one that was written since.

        One that has none any more is being reduced.
        """
        now: dict[Tensor, list[Tensor]] = {}
        for parameter, gradient in held:
            now.setdefault(parameter, []).append(gradient)
        changed = set(self._seen) - set(now)
        for parameter, gradients in now.items():
            known = self._seen.get(parameter, [])
            same = [gradient for gradient in gradients if _is_known(gradient, known)]
            if len(same) != len(gradients) or len(same) != len(known):
                changed.add(parameter)
        return changed


def _written(gradient: Tensor) -> tuple[int, int]:
    """Returns how often a gradient was written. What DTensor writes in place counts for itself, and what FSDP2 writes into this
    rank's part counts for the part."""
    return times_written(gradient), times_written(local(gradient))


def _is_known(gradient: Tensor, known: Iterable[_Seen]) -> bool:
    """Returns whether a gradient was seen before, and was not written since."""
    return any(seen() is gradient and written == _written(gradient) for seen, written in known)
