"""`ExpertLoad`: how evenly the router of a Mixture of Experts loads them, for the journal of a watched run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.plan.experts import Experts
from paceline.world.tree import tensors
from paceline_lens.observe.phases import PhaseListener


class ExpertLoad(PhaseListener):
    """Counts the tokens of this rank that go to each expert, and tells after each step how far the extremes are from the mean.

    It asks the device for nothing: the numbers that it tells are tensors.

    Args:
        tell: is given the values by their names.
    """

    def __init__(self, tell: Callable[[Mapping[str, object]], object]) -> None:
        self._tell = tell
        self._counts: dict[str, Tensor] = {}  # by layer, of this step

    def follow(self, module: nn.Module, experts: Experts) -> None:
        """Counts what a module of stacked experts is called with."""
        module.register_forward_pre_hook(partial(self._count, experts), with_kwargs=True)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model, or one that was read from a file, tells nobody.
        return ExpertLoad, (_tell_nobody,)

    def _count(
        self, experts: Experts, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        """A forward pre-hook: the experts that were chosen are the only whole numbers among the arguments."""
        choices = next((tensor for tensor in tensors((args, kwargs)) if not tensor.is_floating_point()), None)
        if choices is None or not module.training:
            return
        # Numbers beyond the last expert stand for none.
        chosen = choices.detach().reshape(-1).clamp(max=experts.number)
        counts = torch.zeros(experts.number + 1, device=chosen.device).index_add_(
            0, chosen, torch.ones(len(chosen), device=chosen.device)
        )
        self._counts[experts.name] = self._counts.get(experts.name, 0) + counts[:-1]

    def stepped(self) -> None:
        """Called after the step of an optimizer."""
        if not self._counts:
            return
        # of the mean load in the same layer, since layers may have other numbers of experts
        loads = torch.cat([counts / counts.mean().clamp(min=1e-9) for counts in self._counts.values()])
        self._counts = {}
        self._tell({"experts/busiest": loads.max(), "experts/idlest": loads.min()})


def _tell_nobody(values: Mapping[str, object]) -> None:
    pass
