"""What a dataset draws at random on one process: as under torch, also after a resume, or the plan says that it is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceline import Accelerator


class Noisy(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(1)


def loader_of(accelerator: Accelerator, dataset: Dataset[Tensor], workers: int) -> DataLoader[Tensor]:
    torch.manual_seed(0)
    loader: DataLoader[Tensor] = DataLoader(dataset, 2, shuffle=True, num_workers=workers)
    return accelerator.prepare(loader)


def decision(accelerator: Accelerator) -> str:
    values = [str(d.value) for d in accelerator.plan.decisions if d.field.startswith("data.random_samples")]
    return "".join(values)


@pytest.mark.parametrize(
    ("workers", "seed", "says"),
    [(0, None, ""), (0, 3, "a stream for each sample"), (1, 3, "a stream for each sample")],
)
def test_a_resume_in_mid_epoch_draws_what_the_run_would_have_drawn(
    tmp_path, workers: int, seed: int | None, says: str
) -> None:
    accelerator = Accelerator(cpu=True, data_seed=seed)
    loader = loader_of(accelerator, Noisy(), workers)
    assert decision(accelerator) == says
    batches = iter(loader)
    next(batches)
    accelerator.save_state(tmp_path / "saved")
    expected = torch.cat(list(batches))
    torch.rand(5)

    resumed = Accelerator(cpu=True, data_seed=seed)
    loader = loader_of(resumed, Noisy(), workers)
    torch.manual_seed(9)
    resumed.load_state(tmp_path / "saved")
    assert torch.equal(torch.cat(list(loader)), expected)


def test_the_plan_says_where_workers_draw_anew_after_a_resume() -> None:
    accelerator = Accelerator(cpu=True)
    loader_of(accelerator, Noisy(), 1)
    assert decision(accelerator) == "from the workers' streams"
    accelerator = Accelerator(cpu=True)
    loader_of(accelerator, TensorDataset(torch.ones(4)), 1)  # draws nothing
    assert decision(accelerator) == ""
