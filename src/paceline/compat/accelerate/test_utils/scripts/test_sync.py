"""Checks when gradients are averaged between the processes: not in a block of `no_sync`, and once for each window."""

from __future__ import annotations

import torch

from paceline.compat.accelerate.accelerator import Accelerator
from paceline.compat.accelerate.operations import gather
from paceline.compat.accelerate.test_utils.training import RegressionModel


def main() -> None:
    """Runs the checks.

    Raises:
        AssertionError: where a gradient is another than expected.
    """
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(RegressionModel())
    accelerator.print("**Gradients without synchronization**")
    with accelerator.no_sync(model):
        accelerator.backward(model(_mine(accelerator)).sum())
    is_same = len({round(value, 6) for value in _slopes(accelerator, model)}) == 1
    assert is_same == (accelerator.num_processes == 1), "a gradient was averaged within `no_sync`"

    accelerator.print("**Gradients of a window**")
    model.zero_grad()
    for sync_gradients in (False, True):
        with accelerator.accumulate(model):
            assert accelerator.sync_gradients is sync_gradients, "a window ends at another batch than the second"
            accelerator.backward(model(_mine(accelerator)).sum())
    # The mean over processes and batches of x, which is the number of the process plus one.
    expected = (accelerator.num_processes + 1) / 2
    slopes = torch.tensor(_slopes(accelerator, model))
    assert torch.allclose(slopes, torch.full_like(slopes, expected)), "a window's gradient is not the mean"
    accelerator.print("All gradients are as expected.")


def _mine(accelerator: Accelerator) -> torch.Tensor:
    return torch.tensor([accelerator.process_index + 1.0], device=accelerator.device)


def _slopes(accelerator: Accelerator, model: torch.nn.Module) -> list[float]:
    """The gradient of the slope on each process."""
    gradient = accelerator.unwrap_model(model).a.grad
    return gather(gradient.detach().reshape(1)).tolist()


if __name__ == "__main__":
    main()
