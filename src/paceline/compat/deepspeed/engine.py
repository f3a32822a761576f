"""`DeepSpeedEngine`: DeepSpeed's step on our accelerator.

engine(x)               forward; ranks communicate in the backward of the window's last micro-batch alone
engine.backward(loss)   loss / accumulation steps -> autograd
engine.step()           at a boundary: clip, optimizer, scheduler, counters; else it counts a micro-batch
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from paceline.accelerator import Accelerator
from paceline.config.deepspeed import Batch, DeepSpeedConfig


class DeepSpeedEngine(nn.Module):
    """Holds a model, its optimizer and its scheduler, and counts.

    Args:
        accelerator: the run.
        config: what was asked for.
        batch: the batch triangle.
        model, optimizer: the user's.

    Attributes:
        accelerator: ours, for what DeepSpeed has no name for.
        micro_steps, global_steps, global_samples, skipped_steps: counters, as DeepSpeed counts them.
    """

    def __init__(
        self, accelerator: Accelerator, config: DeepSpeedConfig, batch: Batch, model: nn.Module, optimizer: Any
    ) -> None:
        super().__init__()
        self.accelerator, self.config, self.batch = accelerator, config, batch
        accelerator.gradients.weigh = False  # a script holds its windows itself, and every micro-batch counts the same
        wrapped, self.optimizer = accelerator.prepare(model, optimizer)
        self._wrapped = [wrapped]  # in a list: its parameters are those of `module`
        self.module = model
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at hand is the last of its window."""
        return (self.micro_steps + 1) % self.batch.accumulate == 0

    def _hold(self) -> AbstractContextManager[Any]:
        """Keeps ranks from communicating inside a window."""
        self.accelerator.gradients.sync = self.is_gradient_accumulation_boundary()
        return nullcontext() if self.accelerator.gradients.sync else self.accelerator.no_sync()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Runs the model."""
        with self._hold():
            return self._wrapped[0](*inputs, **named)

    def backward(self, loss: torch.Tensor, **named: Any) -> torch.Tensor:
        """Computes gradients; returns the loss divided by the accumulation steps."""
        with self._hold():
            self.accelerator.backward(loss, **named)
        return loss / self.batch.accumulate

    def step(self) -> None:
        """At a boundary one optimizer step; counts a micro-batch."""
        if self.is_gradient_accumulation_boundary():
            if self.config["gradient_clipping"]:
                self.accelerator.clip_grad_norm_(self.module.parameters(), self.config["gradient_clipping"])
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.global_steps += 1
            self.global_samples += self.batch.train
        self.micro_steps += 1
