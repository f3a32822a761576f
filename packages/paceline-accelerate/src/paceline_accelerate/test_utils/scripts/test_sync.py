"""Checks when gradients are averaged between the processes: not in a block of `no_sync`, and once for each window."""

from __future__ import annotations

import torch

from paceline_accelerate.accelerator import Accelerator
from paceline_accelerate.operations import gather
from paceline_accelerate.test_utils.training import RegressionModel


def main() -> None:
    """Runs the checks.

    Raises:
        AssertionError: where a gradient is another than expected.
    """
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(RegressionModel())
    accelerator.print("**Gradients without synchronization**")
    with accelerator.no_sync(model):
        accelerator.backward(model(_input(accelerator)).sum())
    slopes = _slopes(accelerator, model)
    is_same = torch.allclose(slopes, slopes[0])
    assert is_same == (accelerator.num_processes == 1), "a gradient was averaged within `no_sync`"

    accelerator.print("**Gradients of a window**")
    model.zero_grad()
    for sync_gradients in (False, True):
        with accelerator.accumulate(model):
            assert accelerator.sync_gradients is sync_gradients, "a window ends at another batch than the second"
            accelerator.backward(model(_input(accelerator)).sum())
    # The gradient of the slope is the input, which is the rank plus one: this is the mean over all processes.
    expected = (accelerator.num_processes + 1) / 2
    slopes = _slopes(accelerator, model)
    assert torch.allclose(slopes, torch.full_like(slopes, expected)), "a window's gradient is not the mean"
    accelerator.print("All gradients are as expected.")


def _input(accelerator: Accelerator) -> torch.Tensor:
    """Returns the input of this process, which differs from that of each other process."""
    return torch.tensor([accelerator.process_index + 1.0], device=accelerator.device)


def _slopes(accelerator: Accelerator, model: torch.nn.Module) -> torch.Tensor:
    """Returns the gradient of the slope on each process."""
    gradient = accelerator.unwrap_model(model).a.grad
    slopes: torch.Tensor = gather(gradient.detach().reshape(1))
    return slopes


if __name__ == "__main__":
    main()
