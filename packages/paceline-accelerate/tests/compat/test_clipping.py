"""Clipping inside of an accumulation window: accelerate 1.15 clips the gradients that have accumulated so far."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline_accelerate.accelerator import Accelerator


def layer_in_a_window() -> tuple[Accelerator, nn.Module]:
    """Prepares a layer whose weight and bias have gradients 3 and 1 after each backward pass."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    layer = nn.Linear(1, 1)
    model, _ = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 0.1))
    return accelerator, model


def test_values_are_clipped_after_each_micro_batch() -> None:
    accelerator, model = layer_in_a_window()
    gradients = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(2 * model(torch.tensor([[3.0]])).sum())
            accelerator.clip_grad_value_(model.parameters(), 2.0)
            gradients.append(model.weight.grad.item())
    # Without the first clip the second gradient would be 6, and the bias would not tell.
    assert gradients == [2.0, 2.0]
    assert model.bias.grad.item() == 2.0


def test_the_norm_is_clipped_after_each_micro_batch() -> None:
    accelerator, model = layer_in_a_window()
    norms = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(2 * model(torch.tensor([[3.0]])).sum())
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
    # sqrt(3 * 3 + 1 * 1), and then 1 more in the same direction.
    assert norms == pytest.approx([3.1623, 4.1623], abs=1e-3)
