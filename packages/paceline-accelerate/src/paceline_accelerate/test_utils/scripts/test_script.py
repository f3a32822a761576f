"""Checks an installation on any number of processes.

It checks the processes themselves, random numbers, loaders, the parts of a list, a trigger, and a training.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.data.seed import set_seed
from paceline_accelerate.accelerator import Accelerator
from paceline_accelerate.arguments import DataLoaderConfiguration
from paceline_accelerate.operations import gather, gather_object
from paceline_accelerate.random_streams import synchronize_rng_states
from paceline_accelerate.state import AcceleratorState
from paceline_accelerate.test_utils.testing import are_the_same_tensors
from paceline_accelerate.test_utils.training import RegressionDataset, RegressionModel

# A multiple of the global batch on 1, 2, 3, 4, 6 and 12 processes.
ROWS = 48
BATCH = 4


def main() -> None:
    """Runs the checks.

    Raises:
        AssertionError: where one fails.
    """
    accelerator = Accelerator()
    accelerator.print("**Processes**")
    assert gather_object([accelerator.process_index]) == list(range(accelerator.num_processes))
    accelerator.print("**Random numbers**")
    synchronize_rng_states(["torch"])
    assert are_the_same_tensors(torch.get_rng_state().to(accelerator.device)), "the processes draw different numbers"
    accelerator.print("**Loaders**")
    _check_loaders()
    accelerator.print("**Parts of a list**")
    _check_parts(accelerator)
    accelerator.print("**Trigger**")
    _check_trigger(accelerator)
    accelerator.print("**Training**")
    _check_training()


def _accelerator(**options: bool) -> Accelerator:
    AcceleratorState._reset_state()
    return Accelerator(dataloader_config=DataLoaderConfiguration(**options))


def _check_loaders() -> None:
    """Checks that an epoch has each row, whichever way batches are divided."""
    dataset: Any = range(ROWS)
    options: list[dict[str, bool]] = [{}, {"dispatch_batches": True}]
    for option in options:
        accelerator = _accelerator(**option)
        loader = accelerator.prepare(DataLoader(dataset, batch_size=BATCH, shuffle=True))
        rows = torch.cat([gather(batch.to(accelerator.device)) for batch in loader])
        # The last batch is filled up with rows of the first ones.
        global_batch = BATCH * accelerator.num_processes
        num_rows = math.ceil(ROWS / global_batch) * global_batch
        assert len(rows) == num_rows and set(rows.tolist()) == set(range(ROWS)), f"{option}: rows are missing"


def _check_parts(accelerator: Accelerator) -> None:
    """Checks that the parts together are the list, and that their lengths differ by one at most."""
    letters = list("abcdefg")
    with accelerator.split_between_processes(letters) as part:
        parts = gather_object([part]) if accelerator.use_distributed else [part]
    lengths = [len(part) for part in parts]
    joined = list(itertools.chain.from_iterable(parts))
    assert joined == letters and max(lengths) - min(lengths) <= 1, parts


def _check_trigger(accelerator: Accelerator) -> None:
    """Checks that all processes see a trigger that one of them sets, and see it once."""
    if accelerator.is_last_process:
        accelerator.set_trigger()
    assert accelerator.check_trigger() is True, "a trigger of the last process is not seen"
    assert accelerator.check_trigger() is False, "a trigger is seen twice"


def _check_training() -> None:
    """Checks that all processes together learn what one process learns from the same global batches."""
    accelerator = _accelerator(split_batches=True)
    dataset: Any = RegressionDataset(length=ROWS, seed=42)
    batch_size = BATCH * accelerator.num_processes
    # A smaller last batch would be filled up, and so weigh more than it does on one process.
    loader: Any = DataLoader(dataset, batch_size=batch_size, drop_last=True)
    alone = _trained(RegressionModel(), loader)
    model, loader = accelerator.prepare(RegressionModel(), loader)
    together = accelerator.unwrap_model(_trained(model, loader, accelerator)).cpu()
    for name, expected in alone.named_parameters():
        learned = getattr(together, name)
        assert torch.allclose(learned, expected, atol=1e-4), f"{name} is {learned.item()}, not {expected.item()}"


def _trained(model: Any, loader: Any, accelerator: Accelerator | None = None) -> Any:
    """Trains a model for three epochs, and returns it."""
    set_seed(42)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if accelerator is not None:
        optimizer = accelerator.prepare(optimizer)
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
            if accelerator is None:
                loss.backward()
            else:
                accelerator.backward(loss)
            optimizer.step()
    return model


if __name__ == "__main__":
    main()
