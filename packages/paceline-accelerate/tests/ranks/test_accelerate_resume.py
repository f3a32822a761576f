"""A script for accelerate that goes on after `load_state` skips the batches it has seen itself, under every plan."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.testing import run_ranks


@pytest.mark.parametrize("sharded", [False, True])
def test_an_epoch_begins_at_its_start_after_load_state(sharded, tmp_path) -> None:
    def work():
        from paceline_accelerate.accelerator import Accelerator
        from paceline_accelerate.fsdp_plugin import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(torch.arange(16.0)[:, None], batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for number, batch in enumerate(loader):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            if number == 1:
                accelerator.save_state(str(tmp_path / "saved"))
                break
        accelerator.load_state(str(tmp_path / "saved"))
        rest = [int(batch[0]) for batch in accelerator.skip_first_batches(loader, 2)]
        return rest, [int(batch[0]) for batch in loader]

    answers = run_ranks(work, 2)
    assert answers == [([8, 12], [0, 4, 8, 12]), ([10, 14], [2, 6, 10, 14])]
