"""What one rank does in `prepare` must not grow with the number of ranks: it is counted, in worlds of which one rank exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_models import Mixture
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import Accelerator
from paceline_lens.forecast.rehearsal import SimulatedWorld, rehearse


class OperationCount(TorchDispatchMode):
    """Counts the operations on tensors."""

    operations = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return operation(*args, **(kwargs or {}))


def operations_of_prepare(plan: dict[str, int], ranks: int, file: Path) -> int:
    """Returns how many operations rank 0 of `ranks` carries out in `prepare`, of a rehearsal that does no more."""

    def work() -> None:
        model = Mixture()
        accelerator = Accelerator(plan=plan)
        with OperationCount() as count:
            accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        file.write_text(str(count.operations))

    rehearse(work, SimulatedWorld(ranks, local_size=8))
    return int(file.read_text())


@pytest.mark.parametrize(
    "few, many",
    [
        ({"shard": 8}, {"shard": 256}),
        ({"replicate": 8}, {"replicate": 256}),
        ({"replicate": 2, "shard": 4}, {"replicate": 32, "shard": 8}),
        pytest.param({"tp": 2, "replicate": 4}, {"tp": 2, "replicate": 128}, marks=pytest.mark.needs("large")),
        pytest.param({"cp": 2, "ep": 2, "shard": 2}, {"cp": 2, "ep": 2, "shard": 64}, marks=pytest.mark.needs("large")),
    ],
    ids=lambda plan: "-".join(plan),
)
def test_prepare_takes_as_many_operations_on_few_ranks_as_on_many(
    few: dict[str, int], many: dict[str, int], tmp_path: Path
) -> None:
    of_few = operations_of_prepare(few, 8, tmp_path / "few")
    of_many = operations_of_prepare(many, 256, tmp_path / "many")
    assert of_many == of_few > 0
