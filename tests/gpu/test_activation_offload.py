"""Activations in the host's memory on an accelerator: the same bits, and fewer bytes between forward and backward."""

import pytest
import torch
from parity_models import GPT, loss_of

from paceline import Accelerator


def trained(**plan):
    torch.manual_seed(0)
    accelerator = Accelerator(plan=plan)
    model = GPT(layers=6, width=64)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x, y = torch.randint(24, (2, 8, 16), generator=generator).to(accelerator.device)
        before = torch.accelerator.memory_allocated()
        loss = loss_of(model(x), y)
        kept = torch.accelerator.memory_allocated() - before
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return kept, [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("recompute", ["no", "blocks", "selective"])
@pytest.mark.parametrize("states", ["", "optimizer"])
def test_fewer_bytes_and_the_same_bits(device, recompute, states):
    kept, want = trained(recompute=recompute, offload=states or "no")
    kept_then, got = trained(recompute=recompute, offload="+".join(filter(None, [states, "activations"])))
    assert all(map(torch.equal, got, want))
    assert kept_then < {"no": 0.1, "blocks": 0.4, "selective": 1.0}[recompute] * kept
