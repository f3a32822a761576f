"""Parameters that are in no module, as the temperature of SAC and the weights of several losses, equal those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline import Accelerator
from paceline.testing import run_ranks

PLANS: dict[str, dict[str, int]] = {
    "replicate": {},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "shard": {"zero": 3},
}
ROWS = 12


def loss_of(output: Tensor, batch: Tensor, weights: Tensor) -> Tensor:
    """Two losses, each weighted by its own uncertainty."""
    losses = torch.stack([(output - 1).square().mean(), (output + batch[:, :2]).abs().mean()])
    return (torch.exp(-weights) * losses + weights).sum()


def train(plan: dict[str, int], is_parameter: bool, has_own_optimizer: bool, folder: str | None = None) -> list[float]:
    """Trains two epochs, clips the loose parameter together with the model, and returns norms and weights.

    Args:
        plan: of the run.
        is_parameter: whether the loose parameter is an `nn.Parameter`, and not a plain tensor.
        has_own_optimizer: whether it has an optimizer of its own.
        folder: where the run is saved after the first epoch, and resumed from by another one; None trains on.
    """
    torch.manual_seed(0)
    data = torch.randn(2 * ROWS, 4, dtype=torch.float64)
    norms: list[float] = []
    objects: list[Any] = []
    for epoch in range(2):
        if epoch == 0 or folder is not None:
            accelerator = Accelerator(
                plan=plan if torch.distributed.is_initialized() else {}, gradient_accumulation_steps=2
            )
            torch.manual_seed(1)
            model = nn.Linear(4, 2, dtype=torch.float64)
            weights = torch.zeros(2, requires_grad=True, dtype=torch.float64)
            if is_parameter:
                weights = nn.Parameter(weights.detach())
            groups: list[Any] = list(model.parameters())
            optimizers = [torch.optim.Adam(groups, lr=0.1)]
            if has_own_optimizer:
                optimizers.append(torch.optim.Adam([weights], lr=0.1))
            else:
                optimizers[0].add_param_group({"params": [weights]})
            loader = DataLoader(data, ROWS // 2 // accelerator.num_processes)
            objects = list(accelerator.prepare(model, loader, *optimizers, weights))
            if epoch == 1:
                accelerator.load_state(folder)
        wrapped, batches, *steppers = objects[: 2 + len(optimizers)]
        for batch in batches:
            with accelerator.accumulate(wrapped):
                accelerator.backward(loss_of(wrapped(batch), batch, weights))
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_([*wrapped.parameters(), weights], 1.0)))
                for optimizer in steppers:
                    optimizer.step()
                    optimizer.zero_grad()
        if epoch == 0 and folder is not None:
            accelerator.save_state(folder)
    whole = accelerator.get_state_dict(wrapped)
    return [*norms, *weights.tolist(), *(float(value.sum()) for value in whole.values())]


def train_all(folder: str) -> list[list[float]]:
    results = []
    for name, plan in PLANS.items():
        results.append(train(plan, is_parameter=False, has_own_optimizer=True))
        results.append(train(plan, is_parameter=True, has_own_optimizer=False, folder=str(Path(folder) / name)))
    return results


@pytest.mark.parametrize("width", [2, 3])
def test_they_are_averaged_clipped_and_resumed(width: int, tmp_path: Path) -> None:
    expected = train({}, is_parameter=False, has_own_optimizer=True)
    for results in run_ranks(train_all, width, args=(str(tmp_path),)):
        for result in results:
            assert result == pytest.approx(expected, rel=1e-12, abs=1e-12)
