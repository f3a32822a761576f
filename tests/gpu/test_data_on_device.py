"""Batches on an accelerator: copied ahead on a stream of their own, complete when the loop sees them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline.data.prepare import prepare_loader

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator on this machine")


@pytest.mark.parametrize("pinned", [False, True])
def test_batches_arrive_whole(pinned):
    device = torch.accelerator.current_accelerator()
    rows = torch.arange(64 * 1024, dtype=torch.float32).reshape(64, 1024)
    loader = DataLoader(TensorDataset(rows), batch_size=4, pin_memory=pinned)
    prepared = prepare_loader(loader, width=1, index=0, device=device, non_blocking=pinned)
    for step, (batch,) in enumerate(prepared):
        torch.mm(torch.rand(1024, 1024, device=device), torch.rand(1024, 1024, device=device))  # keeps the device busy
        assert batch.device.type == device.type
        assert torch.equal(batch.cpu(), rows[4 * step : 4 * step + 4])
        assert prepared.position.samples == 4 * (step + 1)
