"""`PendingGradients`: what a strategy keeps of gradients beside `.grad`, in the terms in which a checkpoint takes it along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PendingGradients:
    """What one strategy keeps, on one rank, of a window whose gradients no optimizer has stepped yet.

    The gradient of a window is the mean over the ranks that read different samples, each with what lies in `.grad` and
    what is pending here, added up.

    Attributes:
        gradients: by parameter; DTensors where this rank has a part. Where they are given back: this rank's own tensors.
        placements: where they are given back, of those that were DTensors.
        equal: for a parameter, how many ranks along `pp` hold the same: in `gradients` where `open`, else in `.grad`.
        open: whether gradients wait for a sum over the stages of a pipeline.
    """

    gradients: Mapping[Tensor, Tensor] = field(default_factory=dict)
    placements: Mapping[Tensor, tuple[Any, ...]] = field(default_factory=dict)
    equal: Mapping[Tensor, int] = field(default_factory=dict)
    open: bool = False

    def __bool__(self) -> bool:
        return bool(self.gradients or self.equal or self.open)
