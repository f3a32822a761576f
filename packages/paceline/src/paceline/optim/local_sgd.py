"""`LocalSGD`: each rank takes its own steps, and every few steps the ranks average their parameters.

    with LocalSGD(...)      gradients are not synchronised in this block
      step() 1 .. n-1       nothing is communicated
      step() n              one reduction of all trainable parameters, coalesced
    on leaving              one more, so that the ranks end alike

Less traffic for somewhat noisier training: Stich, "Local SGD Converges Fast and Communicates Little", 2018.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Literal, Protocol, Self

import torch
from torch import Tensor, nn

from paceline.base.errors import ConfigError, PlanError
from paceline.config.keywords import checked_keywords
from paceline.optim.accumulate import Accumulation
from paceline.world.sharded import is_sharded


class _Accelerator(Protocol):
    """What is used of an Accelerator; this package does not know the facade."""

    gradients: Accumulation

    @property
    def num_processes(self) -> int: ...
    @property
    def sync_gradients(self) -> bool: ...
    def no_sync(self, *models: nn.Module) -> AbstractContextManager[object]: ...
    def reduce(self, tensor: list[Tensor], reduction: Literal["mean"]) -> list[Tensor]: ...


@checked_keywords
class LocalSGD:
    """Averages parameters every `local_sgd_steps` optimizer steps instead of gradients at every one.

    Args:
        accelerator: the run's.
        model: a prepared model.
        local_sgd_steps: optimizer steps between two averages.
        enabled: False leaves the loop as it is without LocalSGD.

    Ranks: all must enter, take the same number of steps and leave. The loop's batches should be of equal size on all
    ranks: an average over ranks counts each alike.

    Raises:
        ConfigError: `local-sgd-steps`. PlanError: `local-sgd-plan`, for parameters that are divided over ranks.

    Example:
        with LocalSGD(accelerator, model, local_sgd_steps=8) as local:
            for batch in loader:
                with accelerator.accumulate(model):
                    ...
                    optimizer.step()
                    optimizer.zero_grad()
                    local.step()
    """

    def __init__(self, accelerator: _Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if isinstance(local_sgd_steps, bool) or not isinstance(local_sgd_steps, int) or local_sgd_steps < 1:
            raise ConfigError(
                "local-sgd-steps",
                f"LocalSGD cannot average every {local_sgd_steps!r} steps.",
                why=f"local_sgd_steps = {local_sgd_steps!r}; it is a whole number, 1 or more",
                fix="LocalSGD(accelerator, model, local_sgd_steps=8)",
            )
        divided = [name for name, parameter in model.named_parameters() if is_sharded(parameter)]
        layout = getattr(getattr(accelerator, "plan", None), "layout", None)
        why = ""
        if divided:
            why = f"{len(divided)} parameters are divided over ranks, the first being {divided[0]}"
        elif layout is not None and layout.shard > 1:
            why = f"shard={layout.shard}: each rank steps a part of the parameters, so none takes steps of its own"
        if enabled and why:
            raise PlanError(
                "local-sgd-plan",
                "LocalSGD needs a plan under which every rank holds and steps the whole model.",
                why=why,
                fix="use a plan with only `replicate`, or LocalSGD(..., enabled=False)",
            )
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.num_processes > 1
        self.steps = 0
        self._unsynchronised = ExitStack()

    def __enter__(self) -> Self:
        if self.enabled:
            self._unsynchronised.enter_context(self.accelerator.no_sync(self.model))
        return self

    def step(self) -> None:
        """Counts an optimizer step; call it after `optimizer.step()`. Calls within an accumulation window do not count."""
        if self.accelerator.sync_gradients:
            self.count_step()

    def count_step(self) -> None:
        """Counts a step, and averages after every `local_sgd_steps` of them. Ranks: all."""
        self.steps += 1
        if self.enabled:
            self.accelerator.gradients.mark_replicas(equal=False)
            if self.steps % self.local_sgd_steps == 0:
                self._average()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unsynchronised.close()
        # After an error the other ranks may never arrive, and nobody needs the average.
        if self.enabled and kind is None and self.steps % self.local_sgd_steps:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        values = [parameter.detach() for parameter in trained]
        means = self.accelerator.reduce(values, reduction="mean")
        for parameter, mean in zip(trained, means, strict=True):
            parameter.copy_(mean)
        self.accelerator.gradients.mark_replicas(equal=True)
