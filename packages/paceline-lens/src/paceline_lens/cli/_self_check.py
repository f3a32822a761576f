"""What `paceline test` runs in each process: do the ranks meet, add up, share the data, and learn as one does?"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from paceline.config.kinds import least_and_most

if TYPE_CHECKING:
    from torch import Tensor

    from paceline import Accelerator

SHARE = 4  # number of samples of each rank in a full global batch
# In float32 a sum depends on its order, and several ranks add in another order than one process does.
TOLERANCE = 1e-5


def main() -> int:
    """Runs the checks on this rank, and prints them on rank 0; returns 1 if a check failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--procs", required=True, help="how many there should be: a number, or LEAST:MOST")
    procs = parser.parse_args().procs

    from paceline import Accelerator
    from paceline.world.layout import given_axes

    # It is the machine that is checked, whatever plan a config file names: each process holds the whole model.
    plan = {"shard": 1, "zero": 0, "recompute": "no", "offload": "no", "compile": False}
    plan |= dict.fromkeys(given_axes(), 1)
    accelerator = Accelerator(mixed_precision="no", gradient_accumulation_steps=1, split_batches=False, plan=plan)
    checks = [_group(accelerator, procs), _sum(accelerator), _samples(accelerator), *_training(accelerator)]
    for passed, text in checks:
        accelerator.print(f"{'ok    ' if passed else 'FAILED'}  {text}")
    accelerator.end_training()
    failed = [text for passed, text in checks if not passed]
    if not failed:
        accelerator.print(f"All is well on {procs} processes.")
    return 1 if failed else 0


def _group(accelerator: Accelerator, procs: str) -> tuple[bool, str]:
    import torch

    ranks = accelerator.gather(torch.tensor([accelerator.process_index], device=accelerator.device)).tolist()
    least, most = least_and_most(procs)
    passed = least <= len(ranks) <= most and ranks == list(range(len(ranks)))
    expected = procs.replace(":", " to ")
    return passed, f"group: {len(ranks)} of {expected} processes meet, on {accelerator.device.type}"


def _sum(accelerator: Accelerator) -> tuple[bool, str]:
    import torch

    mine = torch.tensor([accelerator.process_index + 1.0], device=accelerator.device)
    total = accelerator.reduce(mine, "sum").item()
    count = accelerator.num_processes
    return total == count * (count + 1) / 2, f"all_reduce: the numbers from 1 to {count} add up to {total:g}"


def _samples(accelerator: Accelerator) -> tuple[bool, str]:
    import torch
    from torch.utils.data import DataLoader

    count = 2 * SHARE * accelerator.num_processes + 3
    dataset: Any = torch.arange(count)
    loader = accelerator.prepare(DataLoader(dataset, batch_size=SHARE))
    seen = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader]).tolist()
    return seen == list(range(count)), f"data: {count} samples, each seen once and in order by {len(seen)} reads"


def _training(accelerator: Accelerator) -> list[tuple[bool, str]]:
    """One epoch, its last global batch not full, against the same epoch in plain PyTorch."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    count = accelerator.num_processes
    width = SHARE * accelerator.num_processes
    draws = torch.Generator().manual_seed(0)
    num_samples = 3 * width - 1
    samples = TensorDataset(torch.randn(num_samples, 5, generator=draws), torch.randn(num_samples, 2, generator=draws))
    alone = _model()
    together = _model()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(
        together, torch.optim.SGD(together.parameters(), lr=0.1), DataLoader(samples, batch_size=SHARE)
    )
    # `x` and `y` are a global batch, `mine` and `wanted` this rank's part of it. With the same weights before the step, the
    # gradients of both models must be the same.
    worst = 0.0
    for (x, y), (mine, wanted) in zip(DataLoader(samples, batch_size=width), loader, strict=True):
        plain.zero_grad()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(alone(x), y).backward()
        accelerator.backward(torch.nn.functional.mse_loss(model(mine), wanted))
        pairs = zip(alone.parameters(), accelerator.unwrap_model(model).parameters(), strict=True)
        for own, divided in pairs:
            worst = max(worst, _difference(own.grad, divided.grad))
        plain.step()
        optimizer.step()
    pairs = zip(alone.parameters(), accelerator.unwrap_model(model).parameters(), strict=True)
    apart = max(_difference(own, divided) for own, divided in pairs)
    return [
        (worst <= TOLERANCE, f"gradients: {count} processes and one differ by {worst:.1e} at most"),
        (apart <= TOLERANCE, f"weights: after an epoch they differ by {apart:.1e} at most"),
    ]


def _difference(expected: Tensor, actual: Tensor) -> float:
    """Returns the largest difference between two tensors, of which the second may be on a device."""
    difference = (expected.detach() - actual.detach().cpu()).abs()
    return float(difference.max())


def _model() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


if __name__ == "__main__":
    sys.exit(main())
